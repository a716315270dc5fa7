//! A connection's socket: TCP or Unix. Low-level module: the `unsafe` of socket options is here.

use super::uri::Place;
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SocketFlags, SocketType};
use std::io::{self, IoSlice, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// So long connecting, or a call of [`Timed`], waits at once, before it looks at its deadline again.
const SLICE: Duration = Duration::from_millis(100);

/// When something has to be over. It is asked again and again, since it may become sooner.
pub(crate) trait Deadline {
    fn until(&self) -> Instant;

    /// A connection was made, for who may have to end it from another thread.
    ///
    /// # Errors
    /// It is not wanted any more.
    fn made(&self, _socket: &Arc<Socket>) -> io::Result<()> {
        Ok(())
    }

    fn left(&self) -> Duration {
        self.until().saturating_duration_since(Instant::now())
    }
}

impl Deadline for Instant {
    fn until(&self) -> Instant {
        *self
    }
}

/// The sooner one of a deadline and a moment.
pub(crate) struct Sooner<'a>(pub(crate) &'a dyn Deadline, pub(crate) Instant);

impl Deadline for Sooner<'_> {
    fn until(&self) -> Instant {
        self.0.until().min(self.1)
    }
    fn made(&self, socket: &Arc<Socket>) -> io::Result<()> {
        self.0.made(socket)
    }
}

/// The socket of one connection.
#[derive(Debug)]
pub(crate) enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Socket {
    /// Connects, or gives up by the deadline (but for the look-up of a host's name, which has the system's limits). What is sent and
    /// not acknowledged for `timeout` ends the connection, also where this process is stopped: the kernel sends nothing later
    /// than that.
    pub(crate) fn connect(place: &Place, by: &dyn Deadline, timeout: Duration) -> io::Result<Self> {
        let socket = match place {
            Place::Unix(path) => Self::Unix(connect_unix(path.as_os_str().as_bytes(), by)?),
            Place::Tcp(host, port) => {
                let mut last = io::Error::new(io::ErrorKind::NotFound, format!("{host}: no address"));
                let mut connected = None;
                let addresses: Vec<_> = (host.as_str(), *port).to_socket_addrs()?.collect();
                for (i, address) in addresses.iter().enumerate() {
                    // one that does not answer leaves time for the others
                    let patience = by.left() / (addresses.len() - i) as u32;
                    match connect_tcp(address, &Sooner(by, Instant::now() + patience)) {
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

    fn set_read_patience(&self, patience: Option<Duration>) -> io::Result<()> {
        match self {
            Self::Tcp(s) => s.set_read_timeout(patience),
            Self::Unix(s) => s.set_read_timeout(patience),
        }
    }

    /// How long a write may wait; `None`: for ever.
    pub(crate) fn set_write_patience(&self, patience: Option<Duration>) -> io::Result<()> {
        match self {
            Self::Tcp(s) => s.set_write_timeout(patience),
            Self::Unix(s) => s.set_write_timeout(patience),
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
        send_all(head, data, |bufs| send_some(self.fd(), bufs))
    }

    fn fd(&self) -> RawFd {
        match self {
            Self::Tcp(s) => s.as_raw_fd(),
            Self::Unix(s) => s.as_raw_fd(),
        }
    }
}

/// A socket of which each read and write is over by a deadline, however little the other end gives or takes at a time. Leaves
/// limits on the socket behind it.
pub(crate) struct Timed<'a> {
    pub(crate) socket: &'a Socket,
    pub(crate) by: &'a dyn Deadline,
}

impl Timed<'_> {
    fn in_time<T>(
        &self,
        limit: impl Fn(Option<Duration>) -> io::Result<()>,
        mut call: impl FnMut() -> io::Result<T>,
    ) -> io::Result<T> {
        loop {
            let left = self.by.left();
            if left.is_zero() {
                return Err(io::Error::new(io::ErrorKind::TimedOut, "the server is too slow"));
            }
            limit(Some(left.min(SLICE)))?;
            match call() {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                result => return result,
            }
        }
    }

    fn send_some(&self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
        self.in_time(|t| self.socket.set_write_patience(t), || send_some(self.socket.fd(), bufs))
    }

    /// As [`Socket::send`].
    pub(crate) fn send(&self, head: &[u8], data: &[u8]) -> io::Result<()> {
        send_all(head, data, |bufs| self.send_some(bufs))
    }
}

impl Read for Timed<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.in_time(|t| self.socket.set_read_patience(t), || (&mut &*self.socket).read(buf))
    }
}

impl Write for Timed<'_> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.send_some(&[IoSlice::new(buf)])
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn send_all(head: &[u8], data: &[u8], mut some: impl FnMut(&[IoSlice<'_>]) -> io::Result<usize>) -> io::Result<()> {
    let mut slices = [IoSlice::new(head), IoSlice::new(data)];
    let mut left = if data.is_empty() { &mut slices[..1] } else { &mut slices[..] };
    while !left.is_empty() {
        match some(left) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(n) => IoSlice::advance_slices(&mut left, n),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Connects to the abstract name within `patience`; also the user who listens there.
pub(crate) fn connect_abstract(name: &str, patience: Duration) -> io::Result<(UnixStream, u32)> {
    let stream = connect_unix(&[b"\0", name.as_bytes()].concat(), &(Instant::now() + patience))?;
    let user = uid_of_peer(&stream)?;
    Ok((stream, user))
}

/// The user who listens, or did when this connected.
fn uid_of_peer(stream: &UnixStream) -> io::Result<u32> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut bytes = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: getsockopt writes at most `bytes` bytes to `peer`, which live until the call returns.
    let got = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut bytes,
        )
    };
    if got == 0 { Ok(peer.uid) } else { Err(io::Error::last_os_error()) }
}

/// Connects, or gives up by the deadline, which may become sooner: [`TcpStream::connect_timeout`] would not see that.
fn connect_tcp(address: &SocketAddr, by: &dyn Deadline) -> io::Result<TcpStream> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let fd = net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    let stream = TcpStream::from(fd);
    in_slices(by, |slice| {
        stream.set_write_timeout(Some(slice))?;
        match net::connect(&stream, address) {
            // it was made behind the end of the last slice
            Err(Errno::ISCONN) => Ok(()),
            // goes on by itself
            Err(Errno::INPROGRESS | Errno::ALREADY) => Err(io::ErrorKind::WouldBlock.into()),
            done => Ok(done?),
        }
    })?;
    stream.set_write_timeout(None)?;
    Ok(stream)
}

/// Connects, or gives up by the deadline, which may become sooner, to a path, or behind a zero to an abstract name:
/// [`UnixStream::connect`] waits for ever where the server's backlog is full.
fn connect_unix(bytes: &[u8], by: &dyn Deadline) -> io::Result<UnixStream> {
    // SAFETY: all zero is a valid `sockaddr_un`.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    let is_abstract = bytes.first() == Some(&0);
    // behind it stays a zero
    if bytes.len() >= address.sun_path.len() || bytes[usize::from(is_abstract)..].contains(&0) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "the path of a socket has at most 107 bytes and no NUL",
        ));
    }
    for (to, from) in address.sun_path.iter_mut().zip(bytes) {
        *to = *from as libc::c_char;
    }
    // an abstract name ends with the address
    let length = match is_abstract {
        true => std::mem::offset_of!(libc::sockaddr_un, sun_path) + bytes.len(),
        false => size_of::<libc::sockaddr_un>(),
    };
    // SAFETY: no memory is passed.
    let fd = unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just made, and nobody else has it.
    let stream = UnixStream::from(unsafe { OwnedFd::from_raw_fd(fd) });
    in_slices(by, |slice| {
        stream.set_write_timeout(Some(slice))?;
        // SAFETY: connect reads as much of a `sockaddr_un` as it has, which lives until the call returns.
        let done = unsafe { libc::connect(fd, (&raw const address).cast(), length as libc::socklen_t) };
        if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    })?;
    stream.set_write_timeout(None)?;
    Ok(stream)
}

/// Calls connect(2), which is bounded as writes are (unix(7), and so it is with TCP), until it is done or the deadline is
/// there.
fn in_slices(by: &dyn Deadline, mut connect: impl FnMut(Duration) -> io::Result<()>) -> io::Result<()> {
    let began = Instant::now();
    loop {
        match connect(by.left().clamp(Duration::from_millis(1), SLICE)) {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            done => return done,
        }
        if by.left().is_zero() {
            let text = format!("the server has accepted no connection for {:.1} s", began.elapsed().as_secs_f32());
            return Err(io::Error::new(io::ErrorKind::TimedOut, text));
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;
    use std::os::unix::net::UnixListener;
    use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

    /// A server that accepts nobody, whose backlog is full.
    #[test]
    fn connecting_does_not_wait_for_ever() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let listener = UnixListener::bind(&path).unwrap();
        // SAFETY: a second listen(2) on a socket of ours sets its backlog; no memory is passed.
        assert_eq!(unsafe { libc::listen(listener.as_raw_fd(), 0) }, 0);
        let soon = || Instant::now() + Duration::from_millis(50);
        let connect = || Socket::connect(&Place::Unix(path.clone()), &soon(), Duration::from_secs(1));
        let mut waiting = Vec::new();
        let e = loop {
            match connect() {
                Ok(socket) => waiting.push(socket),
                Err(e) => break e,
            }
            assert!(waiting.len() < 100, "no backlog is so long");
        };
        assert_eq!(e.kind(), io::ErrorKind::TimedOut, "{e}");
        drop(listener);
        assert_eq!(connect().unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
        let long = Place::Unix(format!("/{}", "x".repeat(200)).into());
        assert_eq!(Socket::connect(&long, &soon(), DAY).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }

    /// A deadline that somebody makes sooner.
    struct Told(AtomicBool);

    impl Deadline for Told {
        fn until(&self) -> Instant {
            if self.0.load(SeqCst) { Instant::now() } else { Instant::now() + DAY }
        }
    }

    /// Neither does it wait for what was its deadline when it began.
    #[test]
    fn connecting_ends_when_its_deadline_becomes_sooner() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let (unix, tcp) = (UnixListener::bind(&path).unwrap(), TcpListener::bind("127.0.0.1:0").unwrap());
        // a backlog that is full soon, of both
        net::listen(&unix, 0).unwrap();
        net::listen(&tcp, 0).unwrap();
        for place in [Place::Unix(path), Place::Tcp("127.0.0.1".into(), tcp.local_addr().unwrap().port())] {
            let mut waiting = Vec::new();
            while let Ok(socket) = Socket::connect(&place, &(Instant::now() + SLICE), DAY) {
                waiting.push(socket);
                assert!(waiting.len() < 100, "no backlog is so long");
            }
            let told = Told(AtomicBool::new(false));
            std::thread::scope(|s| {
                let connecting = s.spawn(|| Socket::connect(&place, &told, DAY));
                std::thread::sleep(2 * SLICE);
                assert!(!connecting.is_finished(), "{place:?}: there is no server");
                told.0.store(true, SeqCst);
                assert_eq!(connecting.join().unwrap().unwrap_err().kind(), io::ErrorKind::TimedOut, "{place:?}");
            });
        }
        assert_eq!(
            Socket::connect(&Place::Tcp("127.0.0.1".into(), 1), &Told(AtomicBool::new(false)), DAY).unwrap_err().kind(),
            io::ErrorKind::ConnectionRefused
        );
    }

    const DAY: Duration = Duration::from_secs(86400);
}
