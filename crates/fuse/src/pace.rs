//! Requests of tenants that have asked more of the device than they may in a second, or taken more of the serving threads' time:
//! they are put aside until their turn.
//!
//! A serving thread that slept would be one less for the tenant's neighbours, so a request that must wait is copied and parked,
//! with the duty to answer it, and threads of this module's own serve it when its turn has come ([`braidfs::Turn`]). INTERRUPT
//! changes nothing for it, as for any other request: who was killed is gone when the request is answered.
//!
//! **What is parked** is what a program waits for: reads, direct and synchronous writes, fsyncs, what makes or removes a name in a
//! directory, changes of attributes. For most of these the kernel holds the lock of an inode meanwhile. A rename that wants it,
//! too, and has two directories, holds a lock of the whole mount while it waits. So they wait for [`LOCKED_WAIT`] at most, and
//! the rest is debt; over a tenant's own mount, whose renames are its own, until their turn. Direct writes wait until their turn
//! everywhere: it is the lock of that file only, and to let them go would be no limit at all. Not parked, and charged all the
//! same, so that what comes next waits the longer:
//! - WRITE of the kernel's cache. Its flusher serves all tenants of the mount, and dirty pages count for all of them. The `write`
//!   calls behind them wait instead: of files in a domain whose writes are limited the kernel must ask for attributes before
//!   each `write`, as in a tight domain ([`crate::room`]), and that request waits for as many bytes as the call is seen to
//!   write ([`requester::doing`]). When the pages come they are paid for.
//! - times that the flusher writes back, by SETATTR, which it waits for.
//! - changes of size, by SETATTR or an OPEN with O_TRUNC: the kernel writes back no page of the file meanwhile, and `sync`
//!   would wait for these.
//! - RENAME: the kernel holds a lock of the whole mount meanwhile, where the directories are two. (For room it waits for
//!   [`LOCKED_WAIT`] at most: [`crate::room::beside`].)
//! - SYNCFS, which is everybody's.
//!
//! What looks something up, opens it, or asks by ioctl, waits for no device, and where the tenant's processor time is limited
//! for [`LOOKS_WAIT`] at most: the
//! kernel looks names up under the lock of a RENAME, too. Listings wait for that as what holds a lock.
//!
//! **How many.** The kernel hands out only so many requests that nobody in the kernel waits for by itself, and neither
//! reads ahead nor writes back for anybody when many of them are out. So parked ones are bounded, for all and for each
//! tenant, and where root has mounted the volume the kernel's threshold is raised by as many. What comes beyond is
//! served at once and is debt. So is what comes through a queue of a ring that has few places left
//! ([`Context::is_crowded`]): those who came before wait in them.
//!
//! **Who waits for them.** When the kernel is told to drop pages of a file it waits for reads of them, and for writes that go
//! through its cache. While a helper thread does that, these are not parked where they are of the domain, and those that are
//! go on ([`Pacer::rush`]).

use crate::abi::{self, fattr, op};
use crate::channel::Channel;
use crate::dirty::DirtyLimit;
use crate::fs::{BraidFs, CONGESTED, Context, MAX_IO_BYTES};
use crate::node::WireId;
use crate::ops::sets_flags;
use crate::request::{Answer, Handled, Outcome, OwnedRequest, Request};
use crate::requester::{self, Doing};
use crate::room::tell_until_known;
use crate::transport::Later;
use braidfs::{Demand, DomainId, InodeNo, Spending, Turn, Way};
use braidfs_sync::{Condvar, Mutex, rank};
use std::collections::{BTreeMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Threads that serve what was parked. What they cannot keep up with has its turn at once, and is not parked.
pub(crate) const THREADS: usize = 2;
/// Parked of those that the kernel counts ([`crate::fs::MAX_BACKGROUND`]), and of them for one tenant.
const MOST: usize = 448;
const MOST_OF_ONE: usize = 192;
/// The same where the kernel's threshold could not be raised: less than [`crate::fs::CONGESTED`].
const MOST_UNRAISED: usize = 48;
const MOST_OF_ONE_UNRAISED: usize = 24;
/// What a `writev` and its kin are taken to write: how much it is cannot be seen.
const SOME: usize = 64 << 10;
/// Longer no request waits that only looks at something: a rename may have sent it, for which the kernel holds a lock of the
/// whole mount. A tenant that does nothing else has a hundred of them a second for each of its threads.
const LOOKS_WAIT: Duration = Duration::from_millis(10);
/// Nor longer what the kernel holds the lock of an inode for, where others have the mount, too.
pub(crate) const LOCKED_WAIT: Duration = Duration::from_millis(500);
/// So often it is looked whether a limit has changed.
const LOOK: Duration = Duration::from_millis(20);

/// A request that waits for its turn.
struct Parked {
    turn: Turn,
    /// The kernel counts it.
    background: bool,
    /// What it is going to write comes later, from the kernel's cache.
    ahead: bool,
    /// It waits no longer, whenever its turn is.
    until: Option<Instant>,
    req: OwnedRequest,
    later: Later,
}

/// Domain, and how it waits there.
type Key = (usize, Kind);

/// Of what waits, each with a queue of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
enum Kind {
    /// Reads of data.
    #[default]
    Read,
    /// Direct writes, and the question before one through the cache.
    Write,
    /// Writes through the kernel's cache that are not its flusher's: they hold pages.
    Through,
    /// What the kernel holds the lock of an inode for, by the way it goes.
    LockedRead,
    LockedWrite,
    /// What waits for processor time only, and not for long.
    Look,
}

impl Kind {
    /// Of what comes over a mount that nobody but the tenant has: a lock there is in nobody else's way.
    fn over_own(self) -> Self {
        match self {
            Self::LockedRead => Self::Read,
            Self::LockedWrite => Self::Write,
            kind => kind,
        }
    }

    /// No request waits for longer, whenever its turn is.
    fn longest(self) -> Option<Duration> {
        match self {
            Self::Look => Some(LOOKS_WAIT),
            Self::LockedRead | Self::LockedWrite => Some(LOCKED_WAIT),
            Self::Read | Self::Write | Self::Through => None,
        }
    }
}

#[derive(Default)]
struct State {
    /// Each in the order of their turns; none is empty.
    queues: BTreeMap<Key, VecDeque<Parked>>,
    /// Of which one was served last.
    last: Key,
    /// Domains of which pages are being dropped.
    rushing: BTreeMap<usize, usize>,
    /// How many have all turns come at once.
    hurrying: usize,
    /// Parked requests that the kernel counts.
    background: usize,
    ended: bool,
}

/// See the module.
#[derive(Default)]
pub(crate) struct Pacer {
    state: Mutex<State, rank::Paced>,
    wake: Condvar,
    /// Parked at the moment.
    parked: AtomicUsize,
    /// Whether the kernel's threshold was raised: asked for once.
    raised: AtomicBool,
    asked: AtomicBool,
}

enum Next {
    Now(Box<Parked>),
    In(Duration),
    Nothing,
}

impl State {
    fn next(&mut self) -> Next {
        let mut soonest: Option<Duration> = None;
        let mut ready: Option<Key> = None;
        // who was served last comes last
        let behind = |key: &Key| *key <= self.last;
        for (&key, queue) in &self.queues {
            let Some(first) = queue.front() else { continue };
            let left = first.until.map(|until| until.saturating_duration_since(Instant::now()));
            let due = first.turn.due().map(|due| left.map_or(due, |left| left.min(due)));
            match due.filter(|d| !d.is_zero() && self.hurrying == 0 && !self.is_rushing(key)) {
                None if ready.is_none_or(|r| behind(&r) && !behind(&key)) => ready = Some(key),
                None => {}
                Some(due) => soonest = Some(soonest.map_or(due, |s| s.min(due))),
            }
        }
        let Some(key) = ready else { return soonest.map_or(Next::Nothing, |due| Next::In(due.min(LOOK))) };
        let Some(mut queue) = self.queues.remove(&key) else { return Next::Nothing };
        let Some(p) = queue.pop_front() else { return Next::Nothing };
        if !queue.is_empty() {
            self.queues.insert(key, queue);
        }
        self.last = key;
        self.background -= usize::from(p.background);
        Next::Now(Box::new(p))
    }

    /// Whether it holds pages of a domain whose pages are being dropped.
    fn is_rushing(&self, (domain, kind): Key) -> bool {
        matches!(kind, Kind::Read | Kind::Through) && self.rushing.contains_key(&domain)
    }

    fn background_of(&self, domain: usize) -> usize {
        let of_it = self.queues.range((domain, Kind::Read)..=(domain, Kind::Look));
        of_it.map(|(_, q)| q.iter().filter(|p| p.background).count()).sum()
    }
}

/// While it lives, everything is served at once.
pub(crate) struct Hurry<'a>(&'a Pacer);

impl Drop for Hurry<'_> {
    fn drop(&mut self) {
        self.0.state.lock().hurrying -= 1;
    }
}

/// While it lives, reads of the domain are served at once.
pub(crate) struct Rush<'a> {
    pacer: &'a Pacer,
    domain: usize,
}

impl Drop for Rush<'_> {
    fn drop(&mut self) {
        let mut s = self.pacer.state.lock();
        if let Some(n) = s.rushing.get_mut(&self.domain) {
            *n -= 1;
            if *n == 0 {
                s.rushing.remove(&self.domain);
            }
        }
    }
}

impl Pacer {
    /// Serves what is parked when its turn comes, until the volume is closed.
    pub fn run(&self, mut serve: impl FnMut(Turned)) {
        let mut s = self.state.lock();
        while !s.ended {
            match s.next() {
                Next::Now(p) => {
                    drop(s);
                    self.parked.fetch_sub(1, Ordering::Relaxed);
                    serve(Turned(p));
                    s = self.state.lock();
                }
                Next::In(due) => drop(self.wake.wait_for(&mut s, due)),
                Next::Nothing => self.wake.wait(&mut s),
            }
        }
    }

    /// Has [`Self::run`] end. Who is still parked gets EIO: the mount is gone.
    pub fn end(&self) {
        let queues = {
            let mut s = self.state.lock();
            s.ended = true;
            std::mem::take(&mut s.queues)
        };
        self.wake.notify_all();
        drop(queues);
    }

    /// Requests that wait for their turn.
    pub fn parked(&self) -> usize {
        self.parked.load(Ordering::Relaxed)
    }

    /// Has what is parked be served now, and nothing parked, as long as the value lives: that is debt.
    pub fn hurry(&self) -> Hurry<'_> {
        self.state.lock().hurrying += 1;
        self.wake.notify_all();
        Hurry(self)
    }

    fn rush(&self, domain: usize) -> Rush<'_> {
        *self.state.lock().rushing.entry(domain).or_default() += 1;
        self.wake.notify_all();
        Rush { pacer: self, domain }
    }

    /// Parks a request, or says that it cannot wait.
    fn park(&self, p: impl FnOnce(Turn) -> Parked, turn: Turn, key: Key, background: bool) -> Option<Turn> {
        let mut s = self.state.lock();
        let (most, of_one) = match self.raised.load(Ordering::Relaxed) {
            true => (MOST, MOST_OF_ONE),
            false => (MOST_UNRAISED, MOST_OF_ONE_UNRAISED),
        };
        let full = background && (s.background >= most || s.background_of(key.0) >= of_one);
        if full || s.ended || s.hurrying > 0 || s.is_rushing(key) {
            return Some(turn);
        }
        s.background += usize::from(background);
        s.queues.entry(key).or_default().push_back(p(turn));
        self.parked.fetch_add(1, Ordering::Relaxed);
        drop(s);
        self.wake.notify_one();
        None
    }
}

/// A request whose turn has come.
pub(crate) struct Turned(Box<Parked>);

/// What a request is going to ask of the device, of which inode's domain, and how it waits.
struct Asks {
    ino: WireId,
    demand: Demand,
    background: bool,
    ahead: bool,
    kind: Kind,
}

impl Asks {
    /// For which the kernel holds the lock of an inode.
    fn locked(ino: WireId, demand: Demand) -> Self {
        let kind = match demand.way {
            Way::Read => Kind::LockedRead,
            Way::Write => Kind::LockedWrite,
        };
        Self { ino, demand, background: false, ahead: false, kind }
    }
}

impl BraidFs {
    /// What of the request must wait for a tenant's turn, if it is one that is parked; see the module.
    fn asks(&self, req: &Request<'_>) -> Option<Asks> {
        let node = req.node();
        let change = || Some(Asks::locked(node, Demand::change()));
        match req.head.opcode {
            op::READ => {
                let size = req.arg::<abi::ReadIn>().ok()?.size.min(MAX_IO_BYTES);
                let demand = Demand::read(size as usize);
                Some(Asks { ino: node, demand, background: true, ahead: false, kind: Kind::Read })
            }
            op::WRITE => {
                let arg = req.arg::<abi::WriteIn>().ok()?;
                let size = arg.size.min(MAX_IO_BYTES) as usize;
                let waits = arg.write_flags & abi::WRITE_CACHE == 0;
                let kind = if arg.write_flags & abi::WRITE_LOCKOWNER == 0 { Kind::Through } else { Kind::Write };
                // the kernel may have asked before this one, too
                let demand = Demand { ahead: true, ..Demand::write(size) };
                waits.then_some(Asks { ino: node, demand, background: true, ahead: false, kind })
            }
            op::FSYNC | op::FSYNCDIR => Some(Asks::locked(node, Demand::sync())),
            op::MKNOD | op::MKDIR | op::SYMLINK | op::LINK | op::UNLINK | op::RMDIR | op::CREATE | op::TMPFILE => {
                change()
            }
            op::SETXATTR | op::REMOVEXATTR | op::FALLOCATE | op::LSEEK => change(),
            op::SETATTR => {
                let valid = req.arg::<abi::SetattrIn>().ok()?.valid;
                let of_a_user = fattr::MODE | fattr::UID | fattr::GID;
                (valid & of_a_user != 0 && valid & fattr::SIZE == 0).then(change).flatten()
            }
            op::COPY_FILE_RANGE | op::COPY_FILE_RANGE_64 => {
                let arg = req.arg::<abi::CopyRangeIn>().ok()?;
                let bytes = arg.len.min(MAX_IO_BYTES.into()) as usize;
                Some(Asks::locked(WireId(arg.nodeid_out), Demand::write(bytes)))
            }
            op::GETATTR => self.asks_before_write(req).or_else(|| self.looks(node)),
            op::READDIR | op::READDIRPLUS => self.is_timed(node).then(|| Asks::locked(node, Demand::read(0))),
            op::OPEN if req.arg::<abi::OpenIn>().ok()?.flags & libc::O_TRUNC as u32 != 0 => None,
            op::IOCTL if sets_flags(req.arg::<abi::IoctlIn>().ok()?.cmd) => change(),
            op::LOOKUP | op::GETXATTR | op::LISTXATTR | op::READLINK | op::STATX | op::STATFS => self.looks(node),
            op::OPEN | op::OPENDIR | op::IOCTL => self.looks(node),
            _ => None,
        }
    }

    /// What only looks at something, which costs next to nothing but the time of who serves it.
    fn looks(&self, node: WireId) -> Option<Asks> {
        let demand = Demand::read(0);
        self.is_timed(node).then_some(Asks { ino: node, demand, background: false, ahead: false, kind: Kind::Look })
    }

    /// Whether the time is limited that is spent on the tenant of an inode.
    fn is_timed(&self, node: WireId) -> bool {
        let limited = |d| self.vol.serving_limited(DomainId(d as u16));
        self.vol.any_serving() && self.domain_index(node.ino()).is_some_and(limited)
    }

    /// Has the tenant of an inode pay for what this thread does, until the value is dropped.
    pub(crate) fn spend(&self, node: WireId) -> Option<Spending> {
        if !self.vol.any_serving() {
            return None;
        }
        self.vol.spend(DomainId(self.domain_index(node.ino())? as u16))
    }

    /// The same of the question before a `write` through the kernel's cache.
    fn asks_before_write(&self, req: &Request<'_>) -> Option<Asks> {
        let arg = req.arg::<abi::GetattrIn>().ok()?;
        if arg.getattr_flags & abi::GETATTR_FH == 0 || !self.paces_writes(self.domain_index(req.node().ino())?) {
            return None;
        }
        let bytes = match requester::doing(req).doing {
            Doing::Other => return None,
            Doing::Writing(Some(n)) => usize::try_from(n).unwrap_or(usize::MAX).min(64 << 20),
            Doing::Writing(None) => SOME,
            // it may be no `write` at all: that is debt when it comes
            Doing::Running | Doing::Unknown => 0,
        };
        let demand = Demand::write(bytes);
        Some(Asks { ino: req.node(), demand, background: false, ahead: true, kind: Kind::Write })
    }

    /// Whether the tenant of the domain may write so much in a second only, or have it served for so long.
    pub(crate) fn paces_writes(&self, domain: usize) -> bool {
        let domain = DomainId(domain as u16);
        self.vol.rates_limited(domain, Way::Write) || self.vol.serving_limited(domain)
    }

    /// Whether the kernel is to ask before each `write` to the file, since its tenant's are paced.
    pub(crate) fn asks_to_pace(&self, ino: InodeNo) -> bool {
        self.vol.any_rates() && self.domain_index(ino).is_some_and(|d| self.paces_writes(d))
    }

    /// Handles a request, or parks it until its tenant's turn.
    #[inline]
    pub(crate) fn serve(&self, req: &Request<'_>, out: &mut Answer, cx: &Context<'_>) -> Handled {
        if self.vol.any_rates() { self.serve_in_turn(req, out, cx) } else { self.serve_now(req, out, cx) }
    }

    fn serve_in_turn(&self, req: &Request<'_>, out: &mut Answer, cx: &Context<'_>) -> Handled {
        let place = self.asks(req).and_then(|asks| Some((self.domain_index(asks.ino.ino())?, asks)));
        let come = |d: usize, asks: &Asks| match asks.kind {
            Kind::Look => self.vol.come_to_look(DomainId(d as u16)),
            _ => self.vol.come(DomainId(d as u16), asks.demand),
        };
        let turn = place.and_then(|(d, asks)| Some((d, come(d, &asks)?, asks)));
        let Some((domain, turn, asks)) = turn else { return self.serve_now(req, out, cx) };
        let turn = match turn.due().filter(|_| !cx.is_crowded()) {
            None => turn,
            Some(_) => {
                let kind = if cx.channel.own().is_some() { asks.kind.over_own() } else { asks.kind };
                let park = |turn| Parked {
                    turn,
                    background: asks.background,
                    ahead: asks.ahead,
                    until: kind.longest().map(|longest| Instant::now() + longest),
                    req: req.detach(),
                    later: cx.later(),
                };
                match self.pacer.park(park, turn, (domain, kind), asks.background) {
                    None => return Ok(Outcome::Deferred),
                    Some(turn) => turn,
                }
            }
        };
        if asks.ahead {
            turn.pay_ahead();
            return self.serve_now(req, out, cx);
        }
        let _paid = turn.go();
        self.serve_now(req, out, cx)
    }

    /// Serves a request whose turn has come, on a thread of [`Pacer::run`].
    pub(crate) fn serve_turned(&self, Turned(p): Turned, out: &mut Answer) {
        let Parked { turn, ahead, req, later, .. } = *p;
        let paid = if ahead {
            turn.pay_ahead();
            None
        } else {
            Some(turn.go())
        };
        let req = req.get();
        let _spending = self.spend(req.node());
        out.clear();
        let handled = catch_unwind(AssertUnwindSafe(|| self.serve_now(&req, out, &later.context())));
        let handled = handled.unwrap_or_else(|_| {
            tracing::error!(op = op::name(req.head.opcode), node = %req.node(), "panic in a FUSE operation");
            Err(rustix::io::Errno::IO)
        });
        drop(paid);
        self.answer_later(&req, handled, later, out);
    }

    /// Has the kernel drop pages of a file, or of a range of it: in jobs of the helpers only. Whether it knows the file.
    pub(crate) fn drop_pages(&self, id: WireId, range: Option<(u64, u64)>, channel: &Channel) -> bool {
        let domain = self.domain_index(id.ino()).filter(|_| self.vol.any_rates());
        let _rush = domain.map(|d| self.pacer.rush(d));
        match range {
            Some((offset, len)) => channel.invalidate_range(id, offset, len),
            None => channel.invalidate(id, true),
        }
    }

    /// The rates of a tenant have changed: from now on the kernel asks before each `write` there, where writes are limited,
    /// and hands out more of what may be parked. On a thread of its own.
    pub(crate) fn rates_changed(&self, domain: DomainId, channel: &Arc<Channel>) {
        let reads = self.vol.rates_limited(domain, Way::Read);
        let writes = self.paces_writes(domain.0.into());
        if reads || writes {
            self.raise_threshold();
        }
        if writes {
            self.tight.more_are_asked();
            let (mut files, channel) = (self.known_files(domain.0.into()), channel.clone());
            let tell = move || {
                files.retain(|id| !channel.invalidate(*id, false));
                tell_until_known(files, |id| channel.invalidate(*id, false));
            };
            if let Err(e) = crate::session::run_aside("fuse-rates", tell) {
                tracing::warn!(error = %e, "no thread to tell the kernel that a tenant's writes are limited");
            }
        }
    }

    /// What is parked must not keep the kernel from reading ahead and writing back for others, over any of the connections.
    pub(crate) fn raise_threshold(&self) {
        if !self.pacer.asked.swap(true, Ordering::Relaxed) {
            match self.dirty.as_ref().and_then(raise_threshold_of) {
                Some(()) => self.pacer.raised.store(true, Ordering::Relaxed),
                None => tracing::info!(
                    "the kernel's congestion threshold cannot be raised: few requests of tenants with limited rates wait at a time"
                ),
            }
        }
        // each has one of its own
        for (tenant, limit) in self.connections.dirty_limits() {
            if raise_threshold_of(&limit).is_none() {
                tracing::info!(tenant, "the kernel's congestion threshold of a tenant's mount cannot be raised");
            }
        }
    }
}

/// Where the kernel takes it.
fn raise_threshold_of(mount: &DirtyLimit) -> Option<()> {
    let file = mount.connection()?.join("congestion_threshold");
    let now: usize = std::fs::read_to_string(&file).ok()?.trim().parse().ok()?;
    // a process before this one may have raised it
    let wanted = usize::from(CONGESTED) + MOST;
    if now < wanted { std::fs::write(&file, wanted.to_string()).ok() } else { Some(()) }
}

#[cfg(test)]
mod tests;
