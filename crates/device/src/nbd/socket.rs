//! A connection's socket: TCP or Unix. Low-level module: the `unsafe` of socket options is here.

use super::uri::Place;
use std::io::{self, IoSlice, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// The socket of one connection.
#[derive(Debug)]
pub(crate) enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Socket {
    /// Connects within about `patience`. What is sent and not acknowledged for `timeout` ends the connection, also where
    /// this process is stopped: the kernel sends nothing later than that.
    pub(crate) fn connect(place: &Place, patience: Duration, timeout: Duration) -> io::Result<Self> {
        let socket = match place {
            Place::Unix(path) => Self::Unix(UnixStream::connect(path)?),
            Place::Tcp(host, port) => {
                let mut last = io::Error::new(io::ErrorKind::NotFound, format!("{host}: no address"));
                let mut connected = None;
                for address in (host.as_str(), *port).to_socket_addrs()? {
                    match TcpStream::connect_timeout(&address, patience) {
                        Ok(stream) => {
                            connected = Some(stream);
                            break;
                        }
                        Err(e) => last = e,
                    }
                }
                let stream = connected.ok_or(last)?;
                stream.set_nodelay(true)?;
                let seconds = timeout.as_secs().max(1).min(i32::MAX as u64 / 1000) as libc::c_int;
                let tcp = |name, value| set(stream.as_raw_fd(), libc::IPPROTO_TCP, name, value);
                tcp(libc::TCP_USER_TIMEOUT, seconds * 1000)?;
                // a server that is gone is noticed where nothing is sent, too
                set(stream.as_raw_fd(), libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1)?;
                tcp(libc::TCP_KEEPIDLE, (seconds / 3).max(1))?;
                tcp(libc::TCP_KEEPINTVL, (seconds / 6).max(1))?;
                tcp(libc::TCP_KEEPCNT, 4)?;
                Self::Tcp(stream)
            }
        };
        Ok(socket)
    }

    /// How long a read or write may wait; `None`: for ever.
    pub(crate) fn set_patience(&self, patience: Option<Duration>) -> io::Result<()> {
        match self {
            Self::Tcp(s) => s.set_read_timeout(patience).and_then(|()| s.set_write_timeout(patience)),
            Self::Unix(s) => s.set_read_timeout(patience).and_then(|()| s.set_write_timeout(patience)),
        }
    }

    /// Ends the connection, whoever reads or writes it.
    pub(crate) fn close(&self) {
        // An error: it is not connected any more.
        let _ = match self {
            Self::Tcp(s) => s.shutdown(std::net::Shutdown::Both),
            Self::Unix(s) => s.shutdown(std::net::Shutdown::Both),
        };
    }

    /// As [`Self::close`]; what the kernel has not sent yet it throws away, where it can. (Some kernels do not while a thread
    /// reads; what is not acknowledged ends by TCP_USER_TIMEOUT then.)
    pub(crate) fn abort(&self) {
        self.close();
        if let Self::Tcp(s) = self {
            disconnect(s.as_raw_fd());
        }
    }

    /// Writes `head` and then `data`, whole.
    pub(crate) fn send(&self, head: &[u8], data: &[u8]) -> io::Result<()> {
        let mut slices = [IoSlice::new(head), IoSlice::new(data)];
        let mut left = if data.is_empty() { &mut slices[..1] } else { &mut slices[..] };
        while !left.is_empty() {
            match send_some(self.fd(), left) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(n) => IoSlice::advance_slices(&mut left, n),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    fn fd(&self) -> RawFd {
        match self {
            Self::Tcp(s) => s.as_raw_fd(),
            Self::Unix(s) => s.as_raw_fd(),
        }
    }
}

/// sendmsg(2), without a signal where the connection is gone: a library may not rely on what its program does with SIGPIPE.
fn send_some(fd: RawFd, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
    // SAFETY: all zero is a valid `msghdr`, without an address and control data.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    // `IoSlice` has the layout of `iovec` by its documentation.
    message.msg_iov = bufs.as_ptr().cast_mut().cast();
    message.msg_iovlen = bufs.len() as _;
    // SAFETY: sendmsg only reads the slices, which are borrowed until it returns.
    let sent = unsafe { libc::sendmsg(fd, &raw const message, libc::MSG_NOSIGNAL) };
    usize::try_from(sent).map_err(|_| io::Error::last_os_error())
}

impl Read for &Socket {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        match self {
            Socket::Tcp(s) => (&mut &*s).read(buf),
            Socket::Unix(s) => (&mut &*s).read(buf),
        }
    }
}

impl Write for &Socket {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        send_some(self.fd(), &[IoSlice::new(buf)])
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn set(fd: RawFd, level: libc::c_int, name: libc::c_int, value: libc::c_int) -> io::Result<()> {
    let bytes = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: setsockopt reads one int, which lives until the call returns; a wrong descriptor is an error.
    match unsafe { libc::setsockopt(fd, level, name, (&raw const value).cast(), bytes) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Throws away what a TCP connection has not sent yet: connect(2) with AF_UNSPEC dissolves it, by a reset.
fn disconnect(fd: RawFd) {
    // SAFETY: all zero is a valid `sockaddr`, with the family AF_UNSPEC.
    let nowhere: libc::sockaddr = unsafe { std::mem::zeroed() };
    // SAFETY: connect reads a `sockaddr` of the length given, which lives until the call returns.
    unsafe { libc::connect(fd, &raw const nowhere, size_of::<libc::sockaddr>() as libc::socklen_t) };
}
