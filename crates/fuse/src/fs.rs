//! The front end proper: which volume is served, what was agreed with the kernel, and which handler an operation goes
//! to.
//!
//! The kernel checks permissions (`default_permissions`, POSIX ACLs), keeps names, attributes and pages cached without
//! limit of time (nobody else changes the volume) and collects writes (writeback cache), unless [`crate::profile`] says
//! otherwise. Handlers are in [`crate::ops`].
//!
//! Does not promise: advisory locks and `flock` across mounts (the kernel keeps them), `poll`, `bmap`.

use crate::abi::{self, init, op};
use crate::channel::Channel;
use crate::connections::Connections;
use crate::counters::{Counted, Counters, Line};
use crate::direct_writes::DirectWrites;
use crate::dirty::DirtyLimit;
use crate::dirty_grants::DirtyGrants;
use crate::flagged::Flagged;
use crate::handles::Handles;
use crate::helpers::Jobs;
use crate::listing::Listings;
use crate::looks::Looks;
use crate::ops::{self, Durable, Samples, Syncs, TellDevices};
use crate::pace::Pacer;
use crate::past_cache::PastCache;
use crate::profile::{Profile, Xattr};
use crate::request::{Answer, Handled, Outcome, Request};
use crate::room::beside::Taking;
use crate::room::{Tight, untimed};
use crate::transport::{DEFERRED_MAX, Forgets, Later, Ticket};
use crate::upgrade::Upgrades;
use crate::within_quota::QuotaGrants;
use crate::within_quota::taking::TakingQuota;
use braidfs::{Error, Volume};
use braidfs_sync::{Mutex, rank};
use crossbeam::utils::CachePadded;
use rustix::io::Errno;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;

/// How long the kernel may trust what it is told, seconds.
pub(crate) const TTL_SECONDS: u64 = 3600;
/// Largest READ and WRITE.
pub(crate) const MAX_IO_BYTES: u32 = 1 << 20;
/// Requests of readahead, writeback and asynchronous direct I/O that the kernel sends at once; see [`crate::direct_writes`] for
/// why so many.
pub(crate) const MAX_BACKGROUND: u16 = 1024;
/// From so many on it neither reads ahead nor writes back more than it must.
pub(crate) const CONGESTED: u16 = 96;

/// Wanted of the kernel by default; it is granted what it knows.
///
/// Not wanted: POSIX_LOCKS and FLOCK_LOCKS (the kernel's own suffice), AUTO_INVAL_DATA (all changes go through the
/// kernel), READDIRPLUS_AUTO (see [`crate::listing`]).
const WANTED: u64 = init::ASYNC_READ
    | init::EXPORT_SUPPORT
    | init::BIG_WRITES
    | init::DONT_MASK
    | init::HAS_IOCTL_DIR
    | init::DO_READDIRPLUS
    | init::ASYNC_DIO
    | init::WRITEBACK_CACHE
    | init::PARALLEL_DIROPS
    | init::POSIX_ACL
    | init::MAX_PAGES
    | init::CACHE_SYMLINKS
    | init::EXPLICIT_INVAL_DATA
    | init::HANDLE_KILLPRIV_V2
    | init::SETXATTR_EXT
    | init::INIT_EXT
    | init::CREATE_SUPP_GROUP
    | init::DIRECT_IO_ALLOW_MMAP
    | init::ALLOW_IDMAP;

/// Wanted besides of a mount that runs without OPEN, see [`crate::opened`].
const WITHOUT_OPEN: u64 = init::NO_OPEN_SUPPORT | init::NO_OPENDIR_SUPPORT;
/// Wanted besides of one that runs with it. Without it a file would be truncated by nobody.
const WITH_OPEN: u64 = init::ATOMIC_O_TRUNC;

/// All that any of our mounts asks for.
pub(crate) const KNOWN_FLAGS: u64 = WANTED | WITHOUT_OPEN | WITH_OPEN | init::OVER_IO_URING | init::NO_EXPORT_SUPPORT;

/// What was agreed when the mount came up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Negotiated {
    /// Flags that the kernel and the server agreed on, of [`init`].
    pub flags: u64,
    /// The kernel's minor version.
    pub minor: u32,
}

impl Negotiated {
    /// Whether all of these [`init`] flags were negotiated.
    pub fn has(self, flag: u64) -> bool {
        self.flags & flag == flag
    }

    /// Whether the kernel asks for each open and tells of each close.
    pub fn opens(self) -> bool {
        !self.has(WITHOUT_OPEN)
    }
}

/// Answers INIT; `rings`: they are there, should the kernel know them. With `opens` the kernel is to ask for each open. None
/// of the flags `without` is wanted.
pub(crate) fn negotiate(
    req: &Request<'_>,
    out: &mut Answer,
    rings: bool,
    opens: bool,
    profile: Profile,
    without: u64,
) -> Result<Negotiated, Errno> {
    let old: abi::InitCompatIn = req.arg()?;
    if old.major != abi::MAJOR || old.minor < abi::MINOR_MIN {
        tracing::error!(
            major = old.major,
            minor = old.minor,
            "the kernel's FUSE is too old; 7.31 (Linux 5.4) is needed"
        );
        return Err(Errno::PROTO);
    }
    let high = match req.arg::<abi::InitIn>() {
        Ok(new) if u64::from(old.flags) & init::INIT_EXT != 0 => u64::from(new.flags2),
        _ => 0,
    };
    let offered = u64::from(old.flags) | high << 32;
    let opens = opens || offered & WITHOUT_OPEN != WITHOUT_OPEN;
    let wanted = (profile.wanted(WANTED) & !without) | if rings { init::OVER_IO_URING } else { 0 };
    let flags = offered & (wanted | if opens { WITH_OPEN } else { WITHOUT_OPEN });
    profile.accept(flags)?;
    out.put(&abi::InitOut {
        major: abi::MAJOR,
        minor: abi::MINOR.min(old.minor),
        max_readahead: old.max_readahead,
        flags: flags as u32,
        max_background: MAX_BACKGROUND,
        congestion_threshold: CONGESTED,
        max_write: MAX_IO_BYTES,
        time_gran: 1,
        max_pages: (MAX_IO_BYTES / 4096) as u16,
        map_alignment: 0,
        flags2: (flags >> 32) as u32,
        unused: [0; 7],
    });
    tracing::info!(minor = old.minor, flags = init::names(flags), opens, "FUSE connection is up");
    Ok(Negotiated { flags, minor: old.minor })
}

/// A volume as FUSE serves it. Shared by all serving threads.
pub(crate) struct BraidFs {
    pub(crate) vol: Arc<Volume>,
    pub(crate) handles: Handles,
    pub(crate) listings: Listings,
    /// Files that are written past the kernel's cache.
    pub(crate) direct_writes: DirectWrites,
    /// Of them those of whose times the kernel does not know.
    pub(crate) past_cache: PastCache,
    pub(crate) negotiated: Negotiated,
    /// Rises with each `security.capability` that is set: handles must look again whether a write has to remove one.
    pub(crate) caps_epoch: AtomicU64,
    /// Files whose flags changed.
    pub(crate) flagged: Flagged,
    /// Domains with little room, see [`crate::room`].
    pub(crate) tight: Tight,
    /// Who writes there, on a mount without OPEN.
    pub(crate) dirty_grants: DirtyGrants,
    /// The same for owners with limits.
    pub(crate) quota_grants: QuotaGrants,
    /// What those do.
    pub(crate) looks: Looks,
    pub(crate) jobs: Jobs,
    /// The volume's own mount, and those of tenants.
    pub(crate) connections: Arc<Connections>,
    /// Requests that wait for a tenant's turn.
    pub(crate) pacer: Arc<Pacer>,
    /// What is made durable before it is answered.
    pub(crate) durable: Durable,
    /// Which threads may wait for a device.
    pub(crate) syncs: Syncs,
    /// The scrub that runs, or ran last.
    pub(crate) scrub: Mutex<Option<ops::Job>, rank::Scrub>,
    /// The change of the volume's devices that runs, or ran last.
    pub(crate) device_job: Mutex<Option<ops::Job>, rank::DeviceJob>,
    /// There is one of these: closing a directory need not look for it otherwise.
    pub(crate) opened_jobs: AtomicBool,
    /// Is told of devices that are added.
    pub(crate) tell_devices: Option<TellDevices>,
    /// Threads that answer a request by themselves, under way or just over: the end of the mount waits for them.
    pub(crate) asides: Mutex<Vec<JoinHandle<()>>, rank::Asides>,
    pub(crate) profile: Profile,
    /// What the kernel may hold back.
    pub(crate) dirty: Option<DirtyLimit>,
    /// What was asked.
    pub(crate) counters: Arc<Counters>,
    /// What those who watch fetch in parts.
    pub(crate) samples: Mutex<Samples, rank::Samples>,
    /// Another program may take over.
    pub(crate) upgrades: Arc<Upgrades>,
    /// Requests that a helper thread is to answer when the kernel has answered it.
    waiting: Arc<AtomicUsize>,
    /// Where FORGETs are fetched, where they do not come by themselves.
    pub(crate) forgets: OnceLock<Arc<Forgets<Arc<CachePadded<Line>>>>>,
    /// Batches of FORGETs that are being served. On a line of its own: requests on other CPUs read what lies around.
    pub(crate) forgetting: CachePadded<AtomicUsize>,
}

/// A request that waits, see [`BraidFs::let_wait`].
#[derive(Debug)]
pub(crate) struct Waiting(Arc<AtomicUsize>);

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Where the answer to the request at hand goes.
pub(crate) struct Context<'c> {
    /// The device: for notifications.
    pub channel: &'c Arc<Channel>,
    unique: u64,
    /// The entry of a ring that the request came in.
    ticket: Option<&'c Ticket>,
    /// Where it is counted.
    counted: Option<Counted<'c>>,
    /// Room was made for it.
    room: Option<Taking>,
    /// The same of the limits of its file's owners.
    quota: Option<TakingQuota>,
}

impl<'c> Context<'c> {
    /// The answer goes to the device, or into the entry of a ring.
    pub fn new(channel: &'c Arc<Channel>, unique: u64, ticket: Option<&'c Ticket>) -> Self {
        Self { channel, unique, ticket, counted: None, room: None, quota: None }
    }

    /// It is counted there.
    pub fn counted(self, counted: Option<Counted<'c>>) -> Self {
        Self { counted, ..self }
    }

    /// What the request takes has been looked at: see [`BraidFs::take_room`].
    pub fn with_room(self, room: impl Into<Option<Taking>>) -> Self {
        Self { room: room.into(), ..self }
    }

    /// Where it is so what it takes, for who has it handled again.
    pub fn room(&self) -> Option<&Taking> {
        self.room.as_ref()
    }

    /// The file's owners may have what the request takes: see [`BraidFs::take_quota`].
    pub fn with_quota(self, quota: impl Into<Option<TakingQuota>>) -> Self {
        Self { quota: quota.into(), ..self }
    }

    /// As [`Self::room`].
    pub fn quota(&self) -> Option<&TakingQuota> {
        self.quota.as_ref()
    }

    /// The request moved so many bytes of data.
    pub fn moved(&self, bytes: usize) {
        if let Some(counted) = &self.counted {
            counted.moved(bytes as u64);
        }
    }

    /// Whether nobody but this thread serves the queue that the request came in.
    pub fn is_bound(&self) -> bool {
        self.ticket.is_some()
    }

    /// Whether the queue that the request came in has few places left: it must not wait for long.
    pub fn is_crowded(&self) -> bool {
        self.ticket.is_some_and(Ticket::is_crowded)
    }

    /// Takes the duty to reply away from the serving thread; the handler then returns [`Outcome::Deferred`].
    pub fn later(&self) -> Later {
        Later::new(self.channel, self.unique, self.ticket.cloned()).counted(self.counted.map(|c| c.timing()))
    }
}

impl BraidFs {
    pub(crate) fn new(vol: Arc<Volume>, negotiated: Negotiated, jobs: Jobs) -> Self {
        let tight = Tight::new(vol.super_block().max_domains.get().into());
        let fs = Self {
            vol,
            handles: Handles::default(),
            listings: Listings::default(),
            direct_writes: DirectWrites::default(),
            past_cache: PastCache::default(),
            negotiated,
            caps_epoch: AtomicU64::new(1),
            flagged: Flagged::default(),
            tight,
            dirty_grants: DirtyGrants::default(),
            quota_grants: QuotaGrants::default(),
            looks: Looks::default(),
            jobs,
            connections: Arc::default(),
            pacer: Arc::default(),
            durable: Durable::default(),
            syncs: Syncs::default(),
            scrub: Mutex::default(),
            device_job: Mutex::default(),
            opened_jobs: AtomicBool::new(false),
            tell_devices: None,
            asides: Mutex::default(),
            upgrades: Arc::new(Upgrades::new(None, negotiated, 0)),
            waiting: Arc::default(),
            forgets: OnceLock::new(),
            forgetting: CachePadded::default(),
            profile: Profile::default(),
            dirty: None,
            counters: Arc::default(),
            samples: Mutex::default(),
        };
        if !negotiated.opens() {
            fs.first_look_at_room();
        }
        fs
    }

    /// Lets one more request wait for what the kernel sends on account of it, until the value is dropped. Not where so many
    /// wait already that the kernel, or a queue of a ring, might have no place for that: then it must be answered at
    /// once. `background`: it is of those of which the kernel hands out [`MAX_BACKGROUND`] at a time.
    pub(crate) fn let_wait(&self, background: bool) -> Option<Waiting> {
        let most = match (self.negotiated.has(init::OVER_IO_URING), background) {
            (true, _) => DEFERRED_MAX,
            (false, true) => usize::from(MAX_BACKGROUND) - 64,
            (false, false) => usize::MAX,
        };
        let waiting = Waiting(self.waiting.clone());
        (self.waiting.fetch_add(1, Ordering::Relaxed) < most).then_some(waiting)
    }

    /// Requests that wait so.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }

    /// Closes all files and forgets all look-ups; the volume.
    pub(crate) fn into_volume(self) -> Arc<Volume> {
        self.pacer.end();
        // stops it: it shares the volume
        drop(self.scrub.into_inner());
        drop(self.device_job.into_inner());
        for aside in self.asides.into_inner() {
            // a panic was told by the thread itself
            let _ = aside.join();
        }
        drop(self.handles);
        // the kernel that was told is no longer there; it does not say so at an unmount
        self.vol.forget_all();
        self.vol
    }

    /// Handles one request. INIT and DESTROY are the session's.
    pub(crate) fn handle(&self, req: &Request<'_>, out: &mut Answer, cx: &Context<'_>) -> Handled {
        self.handle_as(req, out, cx, false)
    }

    /// [`Self::handle`]; `waited`: it was put aside where another connection had what it asks for.
    #[inline]
    pub(crate) fn handle_as(&self, req: &Request<'_>, out: &mut Answer, cx: &Context<'_>, waited: bool) -> Handled {
        let several = self.connections.any();
        if several && let Some(stopped) = self.stopped_at_border(req, cx, waited) {
            return stopped;
        }
        let asked = self.tight.changes();
        let mut handled = self.operate(req, out, cx);
        // also where the first of them came meanwhile, which waits for the end of this
        if several && handled == Ok(Outcome::Reply) {
            handled = self.admit(req, out, cx, waited);
        }
        let synced = self.sync_changes(req, handled, cx);
        if synced.is_err() && handled == Ok(Outcome::Reply) {
            // the kernel gets an error in place of what was counted for it
            self.refused(cx.channel.own(), req.head.opcode, out.body());
        }
        if self.tight.changes() != asked && synced == Ok(Outcome::Reply) {
            untimed(req.head.opcode, out);
        }
        synced
    }

    fn operate(&self, req: &Request<'_>, out: &mut Answer, cx: &Context<'_>) -> Handled {
        match req.head.opcode {
            op::LOOKUP => self.lookup(req, out),
            op::FORGET => self.forget(req, cx.channel.own()),
            op::BATCH_FORGET => self.batch_forget(req, cx.channel.own()),
            op::GETATTR => self.getattr(req, out, cx),
            op::STATX => self.statx(req, out),
            op::SETATTR => self.setattr(req, out),
            op::READLINK => self.readlink(req, out),
            op::SYMLINK => self.symlink(req, out, cx),
            op::MKNOD => self.mknod(req, out, cx),
            op::MKDIR => self.mkdir(req, out, cx),
            op::UNLINK => self.unlink(req),
            op::RMDIR => self.rmdir(req),
            op::RENAME => self.rename(req, cx),
            op::RENAME2 => self.rename2(req, cx),
            op::LINK => self.link(req, out, cx),
            // the kernel asks once, and then creates by MKNOD
            op::OPEN | op::OPENDIR | op::CREATE if !self.negotiated.opens() => Err(Errno::NOSYS),
            op::OPEN => self.open(req, out, cx),
            op::READ => self.read(req, out, cx),
            op::WRITE => self.write(req, out, cx),
            op::STATFS => self.statfs(req, out),
            op::RELEASE => self.release(req, cx),
            op::RELEASEDIR => self.releasedir(req, cx),
            op::FSYNC | op::FSYNCDIR => self.fsync(req, cx),
            op::SYNCFS => self.syncfs(cx),
            op::SETXATTR | op::GETXATTR | op::LISTXATTR | op::REMOVEXATTR
                if self.profile.xattr(None) == Xattr::None =>
            {
                Err(Errno::NOSYS)
            }
            op::SETXATTR => self.setxattr(req, cx),
            op::GETXATTR => self.getxattr(req, out),
            op::LISTXATTR => self.listxattr(req, out),
            op::REMOVEXATTR => self.removexattr(req),
            op::OPENDIR => self.opendir(req, out),
            op::READDIR => self.readdir(req, out),
            op::READDIRPLUS => self.readdirplus(req, out, cx),
            op::CREATE => self.create(req, out, cx),
            op::TMPFILE => self.tmpfile(req, out, cx),
            op::IOCTL => self.ioctl(req, out, cx),
            op::FALLOCATE => self.fallocate(req, cx),
            op::LSEEK => self.lseek(req, out, cx),
            op::COPY_FILE_RANGE => self.copy_file_range(req, out, cx, false),
            op::COPY_FILE_RANGE_64 => self.copy_file_range(req, out, cx, true),
            // The kernel remembers ENOSYS and asks no more. FLUSH: close has nothing to do beyond writing back pages,
            // which the kernel does itself. INTERRUPT: operations are short or cannot be undone. Locks: kept locally.
            _ => Err(Errno::NOSYS),
        }
    }
}

/// The errno that an error is told as. What the user cannot have caused goes to the log.
pub(crate) fn errno(e: Error) -> Errno {
    if matches!(e, Error::Io(_) | Error::Corrupt(_) | Error::DomainFailed { .. }) {
        crate::failed::tell(&e);
    }
    Errno::from_raw_os_error(e.errno())
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::{FromBytes, IntoBytes};

    fn init_frame(args: &[u8]) -> Vec<u8> {
        let mut head: abi::InHeader = FromBytes::read_from_bytes(&[0; 40]).unwrap();
        head.len = 40 + args.len() as u32;
        head.opcode = op::INIT;
        [head.as_bytes(), args].concat()
    }

    #[test]
    fn init_takes_what_both_know() {
        let offer = init::WRITEBACK_CACHE | init::INIT_EXT | init::DIRECT_IO_ALLOW_MMAP | 1 << 1 | 1 << 10;
        let arg = abi::InitIn {
            major: 7,
            minor: 44,
            max_readahead: 1 << 17,
            flags: offer as u32,
            flags2: (offer >> 32) as u32,
            unused: [0; 11],
        };
        let f = init_frame(arg.as_bytes());
        let mut out = Answer::new(64);
        let negotiated =
            negotiate(&Request::parse(&f).unwrap(), &mut out, false, false, Profile::default(), 0).unwrap();
        let reply = abi::InitOut::read_from_bytes(out.body()).unwrap();
        assert_eq!(negotiated.flags, init::WRITEBACK_CACHE | init::INIT_EXT | init::DIRECT_IO_ALLOW_MMAP);
        assert_eq!((reply.minor, reply.max_pages, reply.max_readahead), (44, 256, 1 << 17));
        assert_eq!(u64::from(reply.flags) | u64::from(reply.flags2) << 32, negotiated.flags);
    }

    #[test]
    fn old_kernels_are_refused() {
        let arg = abi::InitCompatIn { major: 7, minor: 30, max_readahead: 0, flags: 0 };
        let f = init_frame(arg.as_bytes());
        let negotiated =
            negotiate(&Request::parse(&f).unwrap(), &mut Answer::new(0), true, false, Profile::default(), 0);
        assert_eq!(negotiated, Err(Errno::PROTO));
    }

    #[test]
    fn opens_are_asked_for_or_not() {
        let without = init::NO_OPEN_SUPPORT | init::NO_OPENDIR_SUPPORT;
        let negotiated = |offer: u64, opens| {
            let arg = abi::InitCompatIn { major: 7, minor: 31, max_readahead: 0, flags: offer as u32 };
            let (f, mut out) = (init_frame(arg.as_bytes()), Answer::new(64));
            negotiate(&Request::parse(&f).unwrap(), &mut out, false, opens, Profile::default(), 0)
                .map(|a| (a.flags, a.opens()))
        };
        let all = without | init::ATOMIC_O_TRUNC;
        assert_eq!(negotiated(all, false), Ok((without, false)));
        assert_eq!(negotiated(all, true), Ok((init::ATOMIC_O_TRUNC, true)));
        let half = init::NO_OPEN_SUPPORT | init::ATOMIC_O_TRUNC;
        assert_eq!(negotiated(half, false), Ok((init::ATOMIC_O_TRUNC, true)), "both or neither");
    }

    #[test]
    fn errors_keep_their_errno() {
        assert_eq!(errno(Error::NotFound), Errno::NOENT);
        assert_eq!(errno(Error::NoSpace), Errno::NOSPC);
    }
}
