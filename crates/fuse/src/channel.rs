//! A descriptor of the FUSE connection: requests out of it, replies and notifications into it.
//!
//! Each serving thread has a descriptor of its own (`FUSE_DEV_IOC_CLONE`); a reply must go to the descriptor that
//! gave the request. Sends never block on other threads: the kernel takes a reply as one `write`.
//!
//! Where tenants are mounted by themselves ([`crate::connections`]) notifications go to all connections of the volume: one that
//! does not know the inode says so, and nothing happens there.

use crate::abi;
use crate::connections::{Connection, Connections};
use crate::node::WireId;
use crate::request::Answer;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;
use zerocopy::IntoBytes;

/// Opens `/dev/fuse`, close-on-exec; the error names the file.
pub(crate) fn open_device() -> io::Result<OwnedFd> {
    Ok(rustix::fs::open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?)
}

/// What there was to read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Received {
    /// A request of so many bytes; 0: one that was interrupted.
    Bytes(usize),
    Nothing,
    Gone,
}

/// One descriptor of the connection.
#[derive(Debug)]
pub(crate) struct Channel {
    fd: OwnedFd,
    /// All connections of the volume.
    all: Arc<Connections>,
    /// Whose it is; `None`: the volume's own mount.
    own: Option<Arc<Connection>>,
}

impl Channel {
    /// Wraps the descriptor that was mounted.
    pub fn new(fd: OwnedFd) -> Self {
        Self { fd, all: Arc::default(), own: None }
    }

    /// Wraps the descriptor of a tenant that is mounted by itself.
    pub fn of_tenant(fd: OwnedFd, all: Arc<Connections>, own: Arc<Connection>) -> Self {
        Self { fd, all, own: Some(own) }
    }

    /// All connections of the volume.
    pub fn connections(&self) -> &Arc<Connections> {
        &self.all
    }

    /// The tenant whose connection it is; `None`: the volume's own mount.
    pub fn own(&self) -> Option<&Connection> {
        self.own.as_deref()
    }

    /// Whether the kernel has ended the connection.
    pub fn is_over(&self) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut fds = [PollFd::new(&self.fd, PollFlags::IN)];
        poll(&mut fds, Some(&now)).is_ok() && fds[0].revents().intersects(PollFlags::ERR | PollFlags::HUP)
    }

    /// What the kernel calls an inode over this connection. The volume's root it does not know over a tenant's, whose root has
    /// that number there.
    fn wire(&self, node: WireId) -> Option<u64> {
        match &self.own {
            Some(own) if own.root == node => Some(WireId::ROOT.0),
            Some(_) if node == WireId::ROOT => None,
            _ => Some(node.0),
        }
    }

    /// The inode of a request that came over this connection.
    pub fn node(&self, id: WireId) -> WireId {
        self.own.as_ref().filter(|_| id == WireId::ROOT).map_or(id, |own| own.root)
    }

    /// Sends a notification over all connections that it means something to; whether it did to the kernel over one of them.
    fn tell(&self, frame: impl Fn(&Self) -> Option<Vec<u8>>) -> bool {
        let send = |to: &Self| frame(to).is_some_and(|frame| to.send(&frame));
        let mut known = send(self);
        if self.all.any() {
            self.all.others(self.own()).iter().for_each(|other| known |= send(other));
        }
        known
    }

    /// A further descriptor of the same connection.
    pub fn try_clone(&self) -> io::Result<Self> {
        let fd = open_device()?;
        let source = self.fd.as_raw_fd() as u32;
        // SAFETY: FUSE_DEV_IOC_CLONE reads one u32, which `source` is, and keeps no pointer.
        let rc = unsafe { libc::ioctl(fd.as_raw_fd(), abi::DEV_IOC_CLONE as libc::Ioctl, &raw const source) };
        if rc < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { fd, all: self.all.clone(), own: self.own.clone() })
    }

    /// From now on [`Self::try_receive`] returns at once. Also of other descriptors that share the open file.
    pub fn set_nonblocking(&self) -> io::Result<()> {
        self.set_blocking(false)
    }

    /// Whether [`Self::try_receive`] waits for a request.
    pub fn set_blocking(&self, on: bool) -> io::Result<()> {
        let mut flags = rustix::fs::fcntl_getfl(&self.fd)?;
        flags.set(OFlags::NONBLOCK, !on);
        Ok(rustix::fs::fcntl_setfl(&self.fd, flags)?)
    }

    /// Waits for so long at most until something waits to be received.
    pub fn await_request(&self, within: Duration) {
        let within = Timespec { tv_sec: 0, tv_nsec: within.subsec_nanos().into() };
        let mut fds = [PollFd::new(&self.fd, PollFlags::IN)];
        // whatever it says, receiving tells
        let _ = poll(&mut fds, Some(&within));
    }

    /// A request, where there is one; `Gone` when the file system has been unmounted. 0 bytes also where a signal came while it
    /// waited.
    pub fn try_receive(&self, buf: &mut [u8]) -> io::Result<Received> {
        match rustix::io::read(&self.fd, &mut *buf) {
            Ok(n) => Ok(Received::Bytes(n)),
            Err(Errno::NOENT | Errno::INTR) => Ok(Received::Bytes(0)),
            Err(Errno::AGAIN) => Ok(Received::Nothing),
            Err(Errno::NODEV | Errno::CONNABORTED) => Ok(Received::Gone),
            Err(e) => Err(e.into()),
        }
    }

    /// Whether nothing waits to be received: everything that the kernel has queued so far is with a serving thread.
    pub fn is_empty(&self) -> bool {
        self.is_idle() && (!self.all.any() || self.all.others(self.own()).iter().all(|other| other.is_idle()))
    }

    fn is_idle(&self) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut fds = [PollFd::new(&self.fd, PollFlags::IN)];
        poll(&mut fds, Some(&now)).is_ok() && !fds[0].revents().contains(PollFlags::IN)
    }

    /// Waits for the next request; `None` when the file system has been unmounted.
    pub fn receive(&self, buf: &mut [u8]) -> io::Result<Option<usize>> {
        loop {
            match rustix::io::read(&self.fd, &mut *buf) {
                Ok(n) => return Ok(Some(n)),
                // ENOENT: the request was interrupted before it was handed over.
                Err(Errno::NOENT | Errno::INTR | Errno::AGAIN) => {}
                Err(Errno::NODEV | Errno::CONNABORTED) => return Ok(None),
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// Sends an answer; whether the kernel took it.
    pub fn reply(&self, unique: u64, answer: &mut Answer) -> bool {
        self.send(answer.frame(unique))
    }

    /// Sends an error.
    pub fn reply_error(&self, unique: u64, error: Errno) {
        self.send(abi::OutHeader { len: 16, error: -error.raw_os_error(), unique }.as_bytes());
    }

    /// Sends success without a body.
    pub fn reply_empty(&self, unique: u64) {
        self.send(abi::OutHeader { len: 16, error: 0, unique }.as_bytes());
    }

    /// Has the kernel forget attributes of an inode and, with `pages`, write back and drop its pages.
    ///
    /// With `pages` the kernel sends WRITE requests and waits for them: never call it from a serving thread. Whether the kernel
    /// knows the inode: not where it forgot it, or will be told of it by an answer that is under way.
    pub fn invalidate(&self, node: WireId, pages: bool) -> bool {
        self.notify(node, if pages { 0 } else { -1 }, 0)
    }

    /// As [`Self::invalidate`] of the pages of a range, which is not empty: never from a serving thread either.
    pub fn invalidate_range(&self, node: WireId, offset: u64, len: u64) -> bool {
        let signed = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
        let len = signed(len).min(i64::MAX - signed(offset));
        self.notify(node, signed(offset), len)
    }

    /// Has the kernel forget what it knows of a name, also that there was none. It locks the directory: never from a serving
    /// thread.
    pub fn invalidate_entry(&self, dir: WireId, name: &[u8]) {
        let len = 16 + 16 + name.len() as u32 + 1;
        let head = abi::OutHeader { len, error: abi::NOTIFY_INVAL_ENTRY, unique: 0 };
        self.tell(|to| {
            let dir = to.wire(dir)?.to_ne_bytes();
            let body = [&dir[..], &(name.len() as u32).to_ne_bytes(), &[0; 4], name, &[0]].concat();
            Some([head.as_bytes(), &body].concat())
        });
    }

    fn notify(&self, node: WireId, off: i64, len: i64) -> bool {
        self.tell(|to| {
            let body = abi::InvalInodeOut { ino: to.wire(node)?, off, len };
            let head =
                abi::OutHeader { len: 16 + size_of_val(&body) as u32, error: abi::NOTIFY_INVAL_INODE, unique: 0 };
            Some([head.as_bytes(), body.as_bytes()].concat())
        })
    }

    /// Has the kernel drop those of the inodes that nobody uses. As with [`Self::invalidate`] of pages, not from a serving
    /// thread.
    pub fn prune(&self, nodes: &[WireId]) {
        for some in nodes.chunks(512) {
            self.tell(|to| {
                let ids: Vec<u64> = some.iter().filter_map(|id| to.wire(*id)).collect();
                let body = abi::PruneOut { count: ids.len() as u32, padding: 0, spare: 0 };
                let len = 16 + size_of_val(&body) + size_of_val(&ids[..]);
                let head = abi::OutHeader { len: len as u32, error: abi::NOTIFY_PRUNE, unique: 0 };
                Some([head.as_bytes(), body.as_bytes(), ids.as_bytes()].concat())
            });
        }
    }

    fn send(&self, frame: &[u8]) -> bool {
        match rustix::io::write(&self.fd, frame) {
            Ok(_) => return true,
            // ENOENT: interrupted, or (notification) not cached. ENODEV: unmounted meanwhile. Nobody waits any more.
            Err(Errno::NOENT | Errno::NODEV | Errno::CONNABORTED) => {}
            Err(e) => tracing::error!(error = %e, bytes = frame.len(), "the kernel refused a FUSE reply"),
        }
        false
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
