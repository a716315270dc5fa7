//! The system's log, as syslog(3) writes it: for a mount in the background, whose standard error is `/dev/null` once it
//! stands.
//!
//! Whoever mounted by mount(8) or `/etc/fstab` looks for what went wrong where the kernel's file systems say it, in the
//! journal. A line never waits: what the system's log does not take at once is lost, since the log itself may lie on the
//! volume that is served.

use rustix::fs::{fstat, major, minor};
use std::io::{self, Write};
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;
use tracing::{Level, Metadata};
use tracing_subscriber::fmt::MakeWriter;

/// Another socket than [`SOCKET`]; empty: none.
const VARIABLE: &str = "BRAIDFS_SYSLOG";
const SOCKET: &str = "/dev/log";
/// LOG_DAEMON, in the upper bits of a priority.
const DAEMON: u8 = 3 << 3;
/// `/dev/null`, as major and minor number.
const NULL: (u32, u32) = (1, 3);

/// Standard error while there is one, and then the system's log.
pub struct Lines {
    socket: PathBuf,
}

impl Lines {
    pub fn new() -> Self {
        Self { socket: std::env::var_os(VARIABLE).map_or_else(|| SOCKET.into(), PathBuf::from) }
    }

    fn line(&self, level: Level) -> Line<'_> {
        if self.socket.as_os_str().is_empty() || !stderr_is_null() {
            return Line::Stderr;
        }
        Line::System { socket: &self.socket, priority: DAEMON | severity(level) }
    }
}

impl<'a> MakeWriter<'a> for Lines {
    type Writer = Line<'a>;

    fn make_writer(&'a self) -> Line<'a> {
        self.line(Level::INFO)
    }

    fn make_writer_for(&'a self, meta: &Metadata<'_>) -> Line<'a> {
        self.line(*meta.level())
    }
}

/// Where one line goes, which is written at once.
pub enum Line<'a> {
    Stderr,
    System { socket: &'a PathBuf, priority: u8 },
}

impl Write for Line<'_> {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        match self {
            Self::Stderr => return io::stderr().write(text),
            Self::System { socket, priority } => {
                let mut line = format!("<{priority}>braidfs[{}]: ", std::process::id()).into_bytes();
                line.extend_from_slice(text.trim_ascii());
                // nobody is there to tell that it cannot be told
                let _ = UnixDatagram::unbound().and_then(|from| {
                    from.set_nonblocking(true)?;
                    from.send_to(&line, socket)
                });
            }
        }
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn severity(level: Level) -> u8 {
    match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 6,
        _ => 7,
    }
}

fn stderr_is_null() -> bool {
    fstat(io::stderr()).is_ok_and(|s| (major(s.st_rdev), minor(s.st_rdev)) == NULL)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_a_datagram() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("log");
        let system = UnixDatagram::bind(&socket).unwrap();
        Line::System { socket: &socket, priority: DAEMON | severity(Level::WARN) }
            .write_all(b" WARN no room\n")
            .unwrap();
        let mut said = [0; 100];
        let n = system.recv(&mut said).unwrap();
        assert_eq!(String::from_utf8_lossy(&said[..n]), format!("<28>braidfs[{}]: WARN no room", std::process::id()));
        // one that takes no more, and none at all, are no error
        for _ in 0..2000 {
            Line::System { socket: &socket, priority: DAEMON }.write_all(b"more\n").unwrap();
        }
        drop((system, dir));
        Line::System { socket: &socket, priority: DAEMON }.write_all(b"nobody\n").unwrap();
    }
}
