//! Where metrics are fetched: a socket that answers `GET /metrics`, one client after the other.
//!
//! Clients are strangers. Each has [`PATIENCE`] for all it does and [`REQUEST_BYTES`] for its question; meanwhile nothing of the
//! mount waits, but other clients, of which the system keeps some.

use rustix::event::{PollFd, PollFlags, poll};
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::{Duration, Instant};

/// For a client, from the moment it is served.
const PATIENCE: Duration = Duration::from_secs(2);
/// Its request line and headers.
const REQUEST_BYTES: usize = 8192;

/// Where to listen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MetricsAt {
    /// An address and port of TCP.
    Tcp(SocketAddr),
    /// A socket in the file system.
    Unix(PathBuf),
}

impl FromStr for MetricsAt {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        if let Some(path) = s.strip_prefix("unix:") {
            let path = PathBuf::from(path);
            return if path.is_absolute() { Ok(Self::Unix(path)) } else { Err("unix: needs an absolute path".into()) };
        }
        if let Ok(port) = s.parse() {
            return Ok(Self::Tcp((IpAddr::V4(Ipv4Addr::LOCALHOST), port).into()));
        }
        let why = |_| "use PORT (of this machine alone), ADDRESS:PORT, [ADDRESS]:PORT or unix:/PATH".into();
        s.parse().map(Self::Tcp).map_err(why)
    }
}

#[derive(Debug)]
enum Socket {
    Tcp(TcpListener),
    Unix(UnixListener, PathBuf),
}

/// A socket that listens.
#[derive(Debug)]
pub(crate) struct Listener(Socket);

impl Drop for Listener {
    fn drop(&mut self) {
        if let Socket::Unix(_, path) = &self.0 {
            let _ = std::fs::remove_file(path);
        }
    }
}

trait Stream: Read + Write {
    fn set_timeout(&self, timeout: Duration) -> io::Result<()>;
    fn end_writing(&self);
}

macro_rules! stream {
    ($t:ty) => {
        impl Stream for $t {
            fn set_timeout(&self, timeout: Duration) -> io::Result<()> {
                self.set_read_timeout(Some(timeout))?;
                self.set_write_timeout(Some(timeout))
            }
            fn end_writing(&self) {
                let _ = self.shutdown(Shutdown::Write);
            }
        }
    };
}
stream!(TcpStream);
stream!(UnixStream);

impl Listener {
    /// # Errors
    /// Of the socket: the address is in use, for instance.
    pub fn bind(at: &MetricsAt) -> io::Result<Self> {
        let socket = match at {
            MetricsAt::Tcp(address) => {
                let listener = TcpListener::bind(address)?;
                listener.set_nonblocking(true)?;
                tracing::info!(address = %listener.local_addr()?, "metrics");
                Socket::Tcp(listener)
            }
            MetricsAt::Unix(path) => {
                // What a server left that was killed.
                let is_left = std::fs::symlink_metadata(path).is_ok_and(|m| m.file_type().is_socket())
                    && UnixStream::connect(path).is_err_and(|e| e.kind() == io::ErrorKind::ConnectionRefused);
                if is_left {
                    std::fs::remove_file(path)?;
                }
                let listener = UnixListener::bind(path)?;
                listener.set_nonblocking(true)?;
                Socket::Unix(listener, path.clone())
            }
        };
        Ok(Self(socket))
    }

    /// One that another process listens at, by a descriptor of it.
    pub fn of(at: &MetricsAt, fd: OwnedFd) -> Self {
        Self(match at {
            MetricsAt::Tcp(_) => Socket::Tcp(fd.into()),
            MetricsAt::Unix(path) => Socket::Unix(fd.into(), path.clone()),
        })
    }

    /// Another process goes on to listen there: the socket's name stays.
    pub fn leave(self) {
        std::mem::forget(self);
    }

    /// Answers until the other end of `end` is closed. `text`: what there is to tell; `None`: no more.
    pub fn serve(&self, end: &OwnedFd, text: impl Fn() -> Option<String>) {
        loop {
            let mut fds = [PollFd::new(self, PollFlags::IN), PollFd::new(end, PollFlags::IN)];
            if let Err(e) = poll(&mut fds, None)
                && e != rustix::io::Errno::INTR
            {
                tracing::error!(error = %e, "metrics are told no more");
                return;
            }
            if !fds[1].revents().is_empty() {
                return;
            }
            let accepted = match &self.0 {
                Socket::Tcp(l) => l.accept().map(|(s, _)| Box::new(s) as Box<dyn Stream>),
                Socket::Unix(l, _) => l.accept().map(|(s, _)| Box::new(s) as Box<dyn Stream>),
            };
            match accepted {
                Ok(mut stream) => {
                    if let Err(e) = answer(&mut *stream, PATIENCE, &text) {
                        tracing::debug!(error = %e, "a client of the metrics");
                    }
                }
                Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::ConnectionAborted) => {}
                // no descriptors: others may give some back
                Err(e) => {
                    tracing::debug!(error = %e, "cannot take a client of the metrics");
                    std::thread::sleep(Duration::from_millis(100));
                }
            }
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.0 {
            Socket::Tcp(l) => l.as_fd(),
            Socket::Unix(l, _) => l.as_fd(),
        }
    }
}

/// One request and its answer, in so much time at most.
fn answer(stream: &mut dyn Stream, patience: Duration, text: &dyn Fn() -> Option<String>) -> io::Result<()> {
    let until = Instant::now() + patience;
    let left = |stream: &dyn Stream| match until.saturating_duration_since(Instant::now()) {
        Duration::ZERO => Err(io::Error::from(io::ErrorKind::TimedOut)),
        left => stream.set_timeout(left),
    };
    let (mut buf, mut n) = ([0; REQUEST_BYTES], 0);
    let whole = loop {
        left(stream)?;
        match stream.read(&mut buf[n..])? {
            0 => break false,
            more => n += more,
        }
        if buf[..n].windows(4).any(|w| w == b"\r\n\r\n") || buf[..n].windows(2).any(|w| w == b"\n\n") {
            break true;
        }
    };
    let line = buf[..n].split(|b| *b == b'\n').next().unwrap_or_default();
    let mut words = line.split(|b| b.is_ascii_whitespace());
    let asked = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let path = asked.1.split(|b| *b == b'?').next().unwrap_or_default();
    let (status, body) = match (whole, asked.0, path) {
        (false, ..) => ("400 Bad Request", String::new()),
        (_, b"GET" | b"HEAD", b"/metrics" | b"/") => match text() {
            Some(text) => ("200 OK", text),
            None => ("503 Service Unavailable", String::new()),
        },
        (_, b"GET" | b"HEAD", _) => ("404 Not Found", "metrics are at /metrics\n".into()),
        _ => ("405 Method Not Allowed", String::new()),
    };
    let kind = if status == "200 OK" { super::openmetrics::CONTENT_TYPE } else { "text/plain" };
    let mut all = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    if asked.0 != b"HEAD" {
        all.push_str(&body);
    }
    let mut rest = all.as_bytes();
    while !rest.is_empty() {
        left(stream)?;
        match stream.write(rest)? {
            0 => return Err(io::ErrorKind::WriteZero.into()),
            n => rest = &rest[n..],
        }
    }
    stream.end_writing();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(question: &[u8]) -> (io::Result<()>, String) {
        let (mut ours, mut theirs) = UnixStream::pair().unwrap();
        let question = question.to_vec();
        let client = std::thread::spawn(move || {
            // it may be refused before it has said all
            let _ = ours.write_all(&question);
            let _ = ours.shutdown(Shutdown::Write);
            let mut said = Vec::new();
            let _ = ours.read_to_end(&mut said);
            String::from_utf8(said).unwrap()
        });
        let result = answer(&mut theirs, Duration::from_secs(30), &|| Some("text\n# EOF\n".into()));
        drop(theirs);
        (result, client.join().unwrap())
    }

    #[test]
    fn questions_have_answers() {
        let (result, said) = ask(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n");
        assert!(result.is_ok() && said.starts_with("HTTP/1.1 200 OK\r\n"), "{said}");
        assert!(said.ends_with("\r\n\r\ntext\n# EOF\n") && said.contains("Content-Length: 11\r\n"), "{said}");
        assert!(ask(b"HEAD / HTTP/1.0\n\n").1.ends_with("\r\n\r\n"));
        for (question, status) in [
            (&b"GET /else HTTP/1.1\r\n\r\n"[..], "404"),
            (b"POST /metrics HTTP/1.1\r\n\r\n", "405"),
            (b"GET /metrics", "400"),
            (b"\xff\n\n", "405"),
            (b"", "400"),
            (&[b'a'; REQUEST_BYTES + 1], "400"),
        ] {
            let (_, said) = ask(question);
            assert!(
                said.starts_with(&format!("HTTP/1.1 {status}")) || said.is_empty() && question.len() > REQUEST_BYTES,
                "{said}"
            );
        }
    }

    #[test]
    fn who_says_nothing_is_left() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let result = answer(&mut theirs, Duration::from_millis(20), &|| None);
        assert!(result.is_err());
        drop(ours);
    }

    #[test]
    fn places_are_understood() {
        assert_eq!("9100".parse(), Ok(MetricsAt::Tcp(([127, 0, 0, 1], 9100).into())));
        assert_eq!("0.0.0.0:1".parse(), Ok(MetricsAt::Tcp(([0, 0, 0, 0], 1).into())));
        assert!("[::1]:80".parse::<MetricsAt>().is_ok() && "unix:/run/a".parse::<MetricsAt>().is_ok());
        for wrong in ["", "unix:a", "host:1", "70000", "1.2.3.4"] {
            assert!(wrong.parse::<MetricsAt>().is_err(), "{wrong}");
        }
    }
}
