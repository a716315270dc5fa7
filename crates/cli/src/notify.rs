//! Tells systemd that the mount can be used, for units of `Type=notify` (sd_notify(3)).

use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

const SOCKET: &str = "NOTIFY_SOCKET";
static OTHERS: AtomicBool = AtomicBool::new(false);

/// Nothing is told by this process any more: another one is the one that counts, or this one does not belong to the service
/// whose socket it knows.
pub fn leave_to_others() {
    OTHERS.store(true, Relaxed);
}

/// Variables that a process that goes on in the place of this one is not to know.
pub fn withheld() -> Vec<&'static str> {
    if OTHERS.load(Relaxed) { vec![SOCKET] } else { Vec::new() }
}

/// Where somebody wants to know.
pub fn ready() {
    notify("READY=1");
}

/// The process with this number is the one that counts.
pub fn main_pid(pid: u32) {
    notify(&format!("MAINPID={pid}"));
}

fn notify(what: &str) {
    if OTHERS.load(Relaxed) {
        return;
    }
    if let Some(socket) = std::env::var_os(SOCKET)
        && let Err(e) = tell(&socket, what)
    {
        tracing::warn!(error = %e, what, "cannot tell the service manager");
    }
}

fn tell(socket: &OsStr, what: &str) -> io::Result<()> {
    let address = match socket.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        _ => SocketAddr::from_pathname(socket)?,
    };
    UnixDatagram::unbound()?.send_to_addr(what.as_bytes(), &address).map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_in_directories_and_abstract_ones_are_told() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let name = format!("braidfs-test-{}", std::process::id());
        let abstract_one = SocketAddr::from_abstract_name(&name).unwrap();
        for (socket, given) in [
            (UnixDatagram::bind(&path).unwrap(), path.as_os_str().to_owned()),
            (UnixDatagram::bind_addr(&abstract_one).unwrap(), format!("@{name}").into()),
        ] {
            tell(&given, "READY=1").unwrap();
            let mut buf = [0; 64];
            let n = socket.recv(&mut buf).unwrap();
            assert_eq!(&buf[..n], b"READY=1");
        }
        assert!(tell(OsStr::new("/no/such/socket"), "READY=1").is_err());
    }
}
