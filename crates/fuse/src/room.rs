//! Telling ENOSPC at the `write` although the kernel's writeback cache takes writes before the volume sees them.
//!
//! Room is counted per domain: its free blocks and those of groups that it can still claim. The kernel holds at most
//! what [`crate::dirty`] allows. While a domain has as much again, 48 MiB more at least, nothing is done. Below, the domain
//! is *tight*; the kernel is then allowed the least, and when it has written back what it held of the domain, that is what counts.
//! Where the domain has room enough for that, it is tight no longer. Else:
//! 1. With OPEN, files opened for writing are opened write-through: the volume answers each `write` itself, exactly.
//! 2. Files that were opened before, and without OPEN all files, stay cached, the kernel offers no way back. But each
//!    `write` needs valid attributes, so they are told without a time to live: the kernel then asks (GETATTR with the flag
//!    of a handle) before each `write`. When a domain becomes tight, all such files are written back once and lose their
//!    attributes: with OPEN those that are open for writing, without it all files of the domain that the kernel knows.
//! 3. Asked so with less room than the kernel may hold, the volume first has the kernel write back what is promised to
//!    others, commits, and says ENOSPC where less than [`LAST_BLOCKS`] are left, or a MiB for each such writer. Without
//!    OPEN, where all writes ask, it looks how much this one is about to write ([`requester::doing`]) and grants it where it
//!    fits beside all that was granted and not written back yet ([`crate::dirty_grants`]); else it has the kernel write that back,
//!    waits for who is in the midst of a `write`, and says ENOSPC where it does not fit then. A `write` to blocks that the file
//!    has, and that are written where they lie, always fits ([`braidfs::Volume::blocks_to_write`]).
//!
//! **Who asks.** Without OPEN the flag says that a `write` asks, or a `read` across the end of the file, or `lseek` to it;
//! `stat` has no such flag (`fuse_update_attributes` in `fs/fuse`). Who is seen to do none of the first is told at once.
//!
//! **While it becomes tight.** With 10^5 files known to the kernel it takes a moment until all of them have lost their
//! attributes; with OPEN it is those that are open for writing, and the helper thread that has them written back may be busy.
//! Files that have not go on to take writes, but no more than the kernel may hold: where less than that is
//! left meanwhile, the answers to WRITEs of the cache are held back, and so is the kernel, until all files have
//! ([`Becoming`]).
//!
//! **Who looks.** Whoever takes room looks at that of the domain ([`BraidFs::watch_room`]). A domain may become tight by what
//! others take, while the volume sees no write to a file of it, so all domains are looked at now and then. As long as no domain
//! is tight or limited, a thread looks after each 64 KiB only.
//!
//! **What other domains may take** ([`kept`]). Whether a domain is tight is told by room that no other domain takes at once
//! ([`braidfs::Volume::sure_room`]): groups that it can get count beyond one for each other domain. In a tight domain only its own blocks
//! are granted, and where these are too few it takes a group first. The volume gives none of a domain's groups away that leave less
//! than what the kernel may hold, or was granted ([`braidfs::Volume::keep_room`]). Where another domain lacks room for that, and the
//! kernel asks, it writes back what was granted in all tight domains, and then they give what they have, while no `write` in them is
//! told to go on ([`BraidFs::with_lent_room`]). Who else is refused has that written back for the next time.
//!
//! **What no `write` asks for.** FALLOCATE, copies, with OPEN writes of files that are written through, and what makes names take
//! only room that the kernel does not hold, and was not granted ([`beside`]).
//!
//! **Limits.** The room of a domain with a limit of its own (a tenant's) says nothing of its neighbours', and the kernel has one
//! bound for the whole mount. So such domains are left out when that is set, and a tight one does not restrict it: what
//! the kernel may hold of each is the whole bound, and it is tight as by that. So that few are, the bound is
//! [`MOST_BESIDE_LIMITED`] at most where there are any.
//!
//! On a mount without the writeback cache ([`Cache::Through`]) no domain is ever tight: all `write`s are as by rule 1, and
//! pages stay for reads.
//!
//! Does not promise: room for what the kernel holds of a domain that is not tight, where one call in another domain takes so many
//! groups of nobody's that none is left before anybody looks again (`fallocate` of nearly all that is free); ENOSPC for stores to
//! a shared map, nor for a single `write` of more than [`LAST_BLOCKS`] (of several writers, 1 MiB) by rule 3, or, without OPEN, of
//! more than that by other calls than `write` and `pwrite`, or of more than
//! [`LARGE_BLOCKS`]; these are told at `fsync` and `close`. Without OPEN a `write` that does not fit takes nothing,
//! where the volume itself would take a part. The last blocks cannot be had through a handle of rule 2, and where they are
//! all that is left it gets ENOSPC for a `read` across the end of the file, too: the kernel asks the same; without OPEN a
//! `read` by `io_uring` does, or by a thread that `/proc` does not show.

pub(crate) use self::asked::{tell_until_known, untimed};
use crate::channel::Channel;
use crate::dirty::{self, DirtyLimit, LEAST_BYTES, MOST_BESIDE_LIMITED, USUAL_BYTES};
use crate::dirty_grants::{Asker, LATELY, Left};
use crate::fs::{BraidFs, Context, TTL_SECONDS, Waiting, errno};
use crate::helpers::{Kind, Whose};
use crate::node::WireId;
use crate::ops::attr_out;
use crate::profile::Cache;
use crate::request::{Answer, Handled, Outcome, Request};
use crate::requester::{self, Doing, Seen, WriteRange};
use crate::session::run_aside;
use crate::transport::Later;
use crate::within_quota::{pause, sleep_until};
use braidfs::format::inode::{APPEND, IMMUTABLE};
use braidfs::{Attr, DomainId, FileKind, InodeNo};
use braidfs_sync::{Mutex, rank};
use crossbeam::utils::CachePadded;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

/// What the kernel is taken to hold of a mount of whose bound nothing is known.
const USUAL_DIRTY_BLOCKS: u64 = USUAL_BYTES / 4096;
/// Room besides what the kernel may hold, with which nobody looks how much a `write` takes: for large ones, and for what threads
/// store before the kernel looks at its bound.
const LARGE_BLOCKS: u64 = (USUAL_BYTES - LEAST_BYTES) / 4096;
const LAST_BLOCKS: u64 = (2 << 20) / 4096;
/// What each of several writers is taken to write at once: all of them may have been told to go on before one of them did.
const WRITE_BLOCKS: u64 = (1 << 20) / 4096;
/// A `write` may take so much more than its bytes: a page in part at each end, metadata.
const SLACK_BLOCKS: u64 = 32;
/// With fewer blocks the volume counts all of them ([`braidfs::Volume::write_room`]).
const COUNTED_BLOCKS: u64 = 1 << 16;
/// How long a `write` that does not fit waits for others that are under way; where some are not seen until they count as
/// done ([`LATELY`]): one that only reads must not cost others their room. For those that are seen to write, where it would fit
/// without them, [`beside::TAKES`].
const IN_FLIGHT: Duration = Duration::from_millis(100);
/// All domains are looked at so often at most, and not more than a twentieth of the time.
const LOOK: Duration = Duration::from_millis(5);
/// Longest that answers are held back, see [`Becoming`]: what the kernel is told may wait for one of these in turn, if a
/// file is removed just then.
const HOLD_BACK: Duration = Duration::from_secs(2);

/// A thread takes so many between two looks at the room.
const UNSEEN_BYTES: u64 = 64 << 10;
/// A request counts as so many at least: it takes room for metadata.
const REQUEST_BYTES: u64 = 4 << 10;

thread_local! {
    /// Bytes that this thread has taken since it looked at the room, of whichever domain.
    static UNSEEN: Cell<u64> = const { Cell::new(0) };
}

/// Which domains are tight. Read by all threads, written only when one changes.
pub(crate) struct Tight {
    domains: Box<[Domain]>,
    /// What is read for each answer with attributes, and seldom written.
    asked: CachePadded<Asked>,
    /// No domain had a limit of its own when all were looked at last.
    plain: AtomicBool,
    /// When all domains are to be looked at again, µs since `begin`.
    look: CachePadded<AtomicU64>,
    begin: Instant,
    /// Bytes that the kernel's bound was last set for.
    bound: AtomicU64,
    /// A helper thread is about to set it anew.
    raising: AtomicBool,
    /// Domains that there were when all were looked at last.
    counted: AtomicUsize,
    /// Tight domains keep nothing for the kernel: who asks before a `write` waits for a helper thread.
    lent: AtomicBool,
    /// A helper thread is about to have the kernel write back what was granted.
    clearing: AtomicBool,
}

/// A `write` that does not fit beside what was granted, see [`BraidFs::make_fit`].
struct Fit {
    asker: Asker,
    /// Where it writes, as far as that is seen.
    range: Option<WriteRange>,
    /// Blocks that the write will need at most.
    need: u64,
    later: Later,
    since: Instant,
    /// Nobody has looked for room yet, however long that is in coming.
    is_new: bool,
    _waiting: Waiting,
}

/// A `write` to a file that its domain has too little room to be promised at once, see [`BraidFs::make_promise`].
struct Asks {
    ino: InodeNo,
    /// As in [`Fit`].
    range: Option<WriteRange>,
    /// Who was granted it within its owner's limits, which it gives back where it is refused.
    asker: Option<Asker>,
    later: Later,
    since: Instant,
    _waiting: Waiting,
}

#[derive(Default)]
struct Asked {
    /// Some domain is tight, or was: mostly none ever is, and who asks for one of a file looks no further.
    ever: AtomicBool,
    /// Rises when files come to be such that the kernel must ask before each `write`.
    changes: AtomicU64,
}

#[derive(Default)]
struct Domain {
    tight: AtomicBool,
    becoming: Arc<Becoming>,
    /// What the kernel may hold of it was not written back since it became tight.
    unknown: AtomicBool,
    /// Changes of its limit that [`BraidFs::limit_changed`] knows of.
    changes: AtomicU64,
    /// Blocks that the kernel may hold dirty of the domain. Written when it becomes tight.
    held: CachePadded<AtomicU64>,
    /// What of that the volume was told to keep last.
    kept: AtomicU64,
    /// Blocks that requests take just now which no `write` asked for ([`beside`]).
    taking: Arc<CachePadded<AtomicU64>>,
    /// Requests of which it is not said yet whether they may.
    takers: Arc<AtomicUsize>,
}

/// A domain that becomes tight, until all files have lost their attributes: until then, with little room, answers to
/// WRITEs of the kernel's cache wait here. Their pages count as held by the kernel meanwhile, so that it takes no more
/// than its bound.
#[derive(Default)]
struct Becoming {
    now: AtomicBool,
    held_back: Mutex<Vec<(Later, Vec<u8>)>, rank::HeldBack>,
}

impl Becoming {
    fn end(&self) {
        let mut held_back = self.held_back.lock();
        self.now.store(false, Ordering::SeqCst);
        let all = std::mem::take(&mut *held_back);
        drop(held_back);
        for (later, body) in all {
            let mut out = Answer::new(body.len());
            out.put_bytes(&body);
            later.answer(&mut out);
        }
    }
}

impl Domain {
    /// With less room it is tight.
    fn tight_below(&self) -> u64 {
        let held = self.held.load(Ordering::SeqCst);
        held + held.max(LARGE_BLOCKS)
    }

    /// And then until it has this much: it does not change its mind with each write.
    fn roomy_from(&self) -> u64 {
        self.tight_below() + self.held.load(Ordering::SeqCst).max(USUAL_DIRTY_BLOCKS / 2)
    }
}

impl Tight {
    pub fn new(domains: usize) -> Self {
        let domain = |_| Domain { held: CachePadded::new(USUAL_DIRTY_BLOCKS.into()), ..Domain::default() };
        let domains = (0..domains).map(domain).collect();
        Self {
            domains,
            asked: CachePadded::default(),
            plain: AtomicBool::new(false),
            look: CachePadded::default(),
            begin: Instant::now(),
            bound: AtomicU64::new(USUAL_BYTES),
            raising: AtomicBool::new(false),
            counted: AtomicUsize::new(0),
            lent: AtomicBool::new(false),
            clearing: AtomicBool::new(false),
        }
    }
}

/// What one process tells the next of domains with little room.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct HandedRoom {
    /// By domain: tight, unknown, blocks that the kernel may hold.
    domains: Vec<(bool, bool, u64)>,
    bound: u64,
}

impl Tight {
    /// For another process: none becomes tight just now.
    pub fn handed(&self) -> HandedRoom {
        let load = |b: &AtomicBool| b.load(Ordering::SeqCst);
        let of = |d: &Domain| (load(&d.tight), load(&d.unknown), d.held.load(Ordering::SeqCst));
        HandedRoom { domains: self.domains.iter().map(of).collect(), bound: self.bound.load(Ordering::SeqCst) }
    }

    /// As it was in another process.
    pub fn take(&self, handed: &HandedRoom) {
        for (d, &(tight, unknown, held)) in self.domains.iter().zip(&handed.domains) {
            self.asked.ever.fetch_or(tight, Ordering::SeqCst);
            d.tight.store(tight, Ordering::SeqCst);
            d.unknown.store(unknown, Ordering::SeqCst);
            d.held.store(held, Ordering::SeqCst);
        }
        self.bound.store(handed.bound, Ordering::SeqCst);
    }

    /// Whether the calling thread, which has taken so many bytes of a domain, is to look at the room. As long as no domain is
    /// tight or has a limit of its own, it does so after some [`UNSEEN_BYTES`] only: a domain is tight with far more room than
    /// all threads can take meanwhile.
    #[inline]
    fn is_look_due(&self, bytes: u64) -> bool {
        let unseen = UNSEEN.get().saturating_add(bytes.max(REQUEST_BYTES));
        let due =
            unseen >= UNSEEN_BYTES || !self.plain.load(Ordering::Relaxed) || self.asked.ever.load(Ordering::Relaxed);
        UNSEEN.set(if due { 0 } else { unseen });
        due
    }

    /// The kernel's bound is about to be set for `bound` bytes, so that with tenants' mounts it may hold `most`.
    fn set_for(&self, bound: u64, most: u64) {
        self.bound.store(bound, Ordering::SeqCst);
        self.may_hold(most);
    }

    /// The kernel may hold so many bytes of each domain, if it was not more already.
    fn may_hold(&self, bytes: u64) {
        self.domains.iter().for_each(|d| {
            d.held.fetch_max(bytes / 4096, Ordering::SeqCst);
        });
    }

    /// A domain is tight; whether it was not before.
    fn becomes_tight(&self, d: usize) -> bool {
        self.asked.ever.store(true, Ordering::SeqCst);
        let becomes = !self.domains[d].tight.swap(true, Ordering::SeqCst);
        if becomes {
            self.more_are_asked();
            let held = self.domains[d].held.load(Ordering::Relaxed);
            tracing::debug!(domain = d, held, "little room: each write asks");
        }
        becomes
    }
}

impl BraidFs {
    /// Whether writers of the file must be watched.
    pub(crate) fn is_tight(&self, ino: InodeNo) -> bool {
        self.profile.cache == Cache::Back
            && self.tight.asked.ever.load(Ordering::Relaxed)
            && self.domain_index(ino).is_some_and(|d| self.tight.domains[d].tight.load(Ordering::Relaxed))
    }

    pub(crate) fn domain_index(&self, ino: InodeNo) -> Option<usize> {
        let d = usize::from(self.vol.domain_of(ino).ok()?.0);
        (d < self.tight.domains.len()).then_some(d)
    }

    /// Has the kernel hold dirty pages by the room that there is: before the first request comes.
    pub(crate) fn allow_dirty(&mut self, limit: Option<DirtyLimit>) {
        self.dirty = limit;
        self.allow_by_room(None);
        self.keep_rooms();
    }

    /// Domains that there are. There are places for as many as the volume can have, and nothing in those.
    fn domain_count(&self) -> usize {
        self.vol.domain_count().min(self.tight.domains.len())
    }

    /// Whether a domain has a limit of its own, so that its room is no matter of its neighbours.
    fn is_limited(&self, domain: usize) -> bool {
        self.vol.is_limited(DomainId(domain as u16))
    }

    /// Whether some domain without a limit is tight.
    fn is_any_tight(&self) -> bool {
        (0..self.domain_count()).any(|d| self.tight.domains[d].tight.load(Ordering::SeqCst) && !self.is_limited(d))
    }

    /// Has the kernel hold the least; how much it may hold then, bytes.
    fn restrict(&self) -> u64 {
        self.tight.bound.store(LEAST_BYTES, Ordering::SeqCst);
        self.dirty.as_ref().map_or(USUAL_BYTES, DirtyLimit::restrict)
    }

    /// Room of the domain that has least, of those without limits; `None`: all have one.
    fn least_room(&self) -> Option<u64> {
        let shared = (0..self.domain_count()).filter(|d| !self.is_limited(*d));
        shared.map(|d| self.vol.sure_room(DomainId(d as u16))).min()
    }

    /// Sets the kernel's bound by the room that there is; before, it counts as set, and domains with limits that have too
    /// little room for it become tight. Where requests come already `channel` tells the kernel so: in jobs about room
    /// only.
    fn allow_by_room(&self, channel: Option<&Channel>) {
        let (Some(limit), Some(least)) = (&self.dirty, self.least_room()) else { return };
        let wanted = dirty::wanted(least * 4096, (0..self.domain_count()).any(|d| self.is_limited(d)));
        // what the kernel holds already it may go on to hold for a while: it is restricted where that matters
        let stays = channel.is_some() && wanted < self.tight.bound.load(Ordering::SeqCst);
        if stays {
            self.tight.may_hold(limit.now());
        } else {
            self.tight.set_for(wanted, wanted + limit.of_tenants());
        }
        for d in (0..self.domain_count()).filter(|d| self.is_limited(*d)) {
            let domain = &self.tight.domains[d];
            let little = self.vol.sure_room(DomainId(d as u16)) < domain.tight_below();
            if little && self.tight.becomes_tight(d) {
                match channel {
                    Some(channel) => self.write_back_first(d, channel),
                    // it holds nothing
                    None => domain.unknown.store(false, Ordering::SeqCst),
                }
            }
        }
        let bytes = if stays { limit.now() } else { limit.allow(wanted) };
        self.tight.domains.iter().for_each(|d| d.held.store(bytes / 4096, Ordering::SeqCst));
        self.keep_rooms();
    }

    /// The kernel may hold pages of a tenant's mount, too: counted before there are any. Not on a helper thread.
    pub(crate) fn add_dirty(&self, tenant: Option<DirtyLimit>) {
        if let (Some(limit), Some(tenant)) = (&self.dirty, tenant) {
            limit.add(&tenant);
            let (done, told) = mpsc::channel();
            self.set_bound_anew(move || {
                let _ = done.send(());
            });
            // comes back with an error where the mount is ending
            let _ = told.recv();
        }
    }

    /// It may not any more.
    pub(crate) fn remove_dirty(&self, tenant: Option<DirtyLimit>) {
        if let (Some(limit), Some(tenant)) = (&self.dirty, tenant) {
            limit.remove(&tenant);
            self.set_bound_anew(|| {});
        }
    }

    fn set_bound_anew(&self, done: impl FnOnce() + Send + 'static) {
        // Not sent only where the mount is ending.
        self.jobs.send(Kind::Room, Whose::Mount, move |fs| {
            if fs.is_any_tight() {
                let held = fs.restrict() / 4096;
                fs.tight.domains.iter().for_each(|d| d.held.store(held, Ordering::SeqCst));
                fs.keep_rooms();
            } else if let Some(channel) = fs.connections.main() {
                fs.allow_by_room(Some(&channel));
            }
            done();
        });
    }

    /// Has the kernel's bound raised where all domains have much more room than it was set for. `least`: blocks that the
    /// smallest has, of those without limits; `limited`: there are some with.
    fn raise_bound(&self, least: u64, limited: bool, channel: &Arc<Channel>) {
        let enough = dirty::wanted(least * 4096, limited) >= 2 * self.tight.bound.load(Ordering::Relaxed);
        if !enough || self.dirty.is_none() || self.is_any_tight() || self.tight.raising.swap(true, Ordering::SeqCst) {
            return;
        }
        // In turn with what restricts it.
        let channel = Arc::clone(channel);
        self.jobs.send(Kind::Room, Whose::Mount, move |fs| {
            if !fs.is_any_tight() {
                fs.allow_by_room(Some(&channel));
            }
            fs.tight.raising.store(false, Ordering::SeqCst);
        });
    }

    /// Looks how much room each domain has before the first request comes: on a mount without OPEN.
    pub(crate) fn first_look_at_room(&self) {
        // of one that is added later nobody will have asked
        self.tight.domains.iter().for_each(|d| d.unknown.store(true, Ordering::SeqCst));
        for (d, domain) in self.tight.domains.iter().enumerate().take(self.domain_count()) {
            let room = self.vol.sure_room(DomainId(d as u16));
            let tight = room < domain.tight_below();
            domain.unknown.store(!tight, Ordering::SeqCst);
            self.tight.asked.ever.fetch_or(tight, Ordering::SeqCst);
            domain.tight.store(tight, Ordering::SeqCst);
        }
        self.keep_rooms();
    }

    /// Looks how much room the file has; to be called where room is taken, with how many bytes of it. The first to see a tight
    /// domain has its cached writers written back.
    #[inline]
    pub(crate) fn watch_room(&self, ino: InodeNo, bytes: u64, channel: &Arc<Channel>) {
        // without a cache that takes writes each `write` is told by the volume itself
        if self.profile.cache == Cache::Through {
            return;
        }
        self.watch_quotas(channel);
        if self.tight.is_look_due(bytes) {
            self.look_at_room(ino, channel);
        }
    }

    fn look_at_room(&self, ino: InodeNo, channel: &Arc<Channel>) {
        if let Some(d) = self.domain_index(ino) {
            self.watch_domain(d, self.vol.sure_room(DomainId(d as u16)), channel);
        }
        let (now, due) = (self.tight.begin.elapsed(), self.tight.look.load(Ordering::Relaxed));
        let until = |d: Duration| u64::try_from(d.as_micros()).unwrap_or(u64::MAX);
        if until(now) >= due
            && let next = until(now + LOOK)
            && self.tight.look.compare_exchange(due, next, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        {
            // written only when it changes: all threads read what lies beside it
            if self.tight.counted.load(Ordering::Relaxed) != self.domain_count() {
                self.tight.counted.store(self.domain_count(), Ordering::Relaxed);
                self.keep_rooms();
            }
            let (mut least, mut limited) = (None, false);
            for d in 0..self.domain_count() {
                let room = self.vol.sure_room(DomainId(d as u16));
                if self.is_limited(d) {
                    limited = true;
                } else {
                    least = Some(least.map_or(room, |l: u64| l.min(room)));
                }
                self.watch_domain(d, room, channel);
            }
            if let Some(least) = least {
                self.raise_bound(least, limited, channel);
            }
            if self.tight.plain.load(Ordering::Relaxed) == limited {
                self.tight.plain.store(!limited, Ordering::Relaxed);
            }
            let took = self.tight.begin.elapsed() - now;
            self.tight.look.fetch_max(until(now + 20 * took), Ordering::Relaxed);
        }
    }

    fn watch_domain(&self, d: usize, mut room: u64, channel: &Arc<Channel>) {
        let domain = &self.tight.domains[d];
        let changes = self.vol.limit_changes(DomainId(d as u16));
        if domain.changes.load(Ordering::Relaxed) != changes {
            // by the volume itself: a tenant is held to its soft limit, or no more
            domain.changes.store(changes, Ordering::Relaxed);
            let (id, channel) = (DomainId(d as u16), channel.clone());
            self.jobs.send(Kind::Room, Whose::Mount, move |fs| fs.limit_changed(id, &channel));
        }
        if domain.tight.load(Ordering::Relaxed) {
            // while files are told that it is tight they must not learn otherwise: nobody would tell them again in time
            let stays = domain.becoming.now.load(Ordering::SeqCst) || domain.takers.load(Ordering::SeqCst) > 0;
            // without what requests are about to take, which have looked at it as at a tight one
            let left = || room.saturating_sub(domain.taking.load(Ordering::SeqCst));
            if stays || left() < domain.roomy_from() {
                return;
            }
            tracing::debug!(domain = d, "room enough: no write asks");
            domain.unknown.store(true, Ordering::SeqCst);
            domain.tight.store(false, Ordering::SeqCst);
            self.keep_room(d);
            // some may have looked before that
            room = left();
        }
        if self.becomes_tight(d, room, channel) {
            let channel = channel.clone();
            // Not sent only where the mount is ending.
            self.jobs.send(Kind::Room, Whose::Mount, move |fs| fs.write_back_first(d, &channel));
        }
    }

    /// Whether a domain has only so much room, and is tight from now on: what the kernel may hold of it is to be written back.
    fn becomes_tight(&self, d: usize, room: u64, channel: &Arc<Channel>) -> bool {
        let becomes = room < self.tight.domains[d].tight_below() && self.tight.becomes_tight(d);
        if becomes {
            self.begin_tight(d, channel);
        }
        becomes
    }

    /// Has all files that may be written to through the cache lose their attributes, on a thread of its own: a helper may be
    /// waiting for the kernel, and the kernel for an answer that is held back.
    fn begin_tight(&self, d: usize, channel: &Arc<Channel>) {
        let becoming = self.tight.domains[d].becoming.clone();
        if becoming.now.swap(true, Ordering::SeqCst) {
            return;
        }
        let files = if self.negotiated.opens() {
            self.handles.written_cached(|ino| self.domain_index(ino) == Some(d))
        } else {
            self.known_files(d)
        };
        if files.is_empty() {
            return becoming.end();
        }
        let (channel, ends) = (channel.clone(), becoming.clone());
        let tell = move || {
            let (done, told) = mpsc::channel::<()>();
            let teller = run_aside("fuse-tell", move || {
                let mut files = files;
                files.retain(|id| !channel.invalidate(*id, false));
                drop(done);
                tell_until_known(files, |id| channel.invalidate(*id, false));
            });
            if teller.is_ok() {
                // comes back with an error, when the sender is gone
                let _ = told.recv_timeout(HOLD_BACK);
            }
            ends.end();
        };
        if let Err(e) = run_aside("fuse-room", tell) {
            // a helper does it, later
            tracing::warn!(error = %e, "no thread to tell the kernel that there is little room");
            becoming.end();
        }
    }

    /// The files of the domain that the kernel knows.
    pub(crate) fn known_files(&self, domain: usize) -> Vec<WireId> {
        let files = self.vol.held_files(|ino| self.domain_index(ino) == Some(domain));
        files.into_iter().map(|f| WireId::new(f.ino, f.generation)).collect()
    }

    /// Answers a WRITE of the kernel's cache, or has the answer wait until the kernel knows that there is little room.
    pub(crate) fn written_cached(&self, ino: InodeNo, out: &Answer, cx: &Context<'_>) -> Outcome {
        // mostly none becomes tight, and none ever was
        if !self.tight.asked.ever.load(Ordering::SeqCst) {
            return Outcome::Reply;
        }
        let Some(d) = self.domain_index(ino) else { return Outcome::Reply };
        let becoming = &self.tight.domains[d].becoming;
        if !becoming.now.load(Ordering::SeqCst) || self.vol.sure_room(DomainId(d as u16)) >= self.kernel_holds(ino) {
            return Outcome::Reply;
        }
        let mut held_back = becoming.held_back.lock();
        if !becoming.now.load(Ordering::SeqCst) {
            return Outcome::Reply;
        }
        held_back.push((cx.later(), out.body().to_vec()));
        Outcome::Deferred
    }

    /// Blocks of the file's domain that the kernel may hold dirty.
    pub(crate) fn kernel_holds(&self, ino: InodeNo) -> u64 {
        self.domain_index(ino).map_or(USUAL_DIRTY_BLOCKS, |d| self.tight.domains[d].held.load(Ordering::SeqCst))
    }

    /// Blocks with which nobody looks how much a `write` to the file takes.
    pub(crate) fn enough(&self, ino: InodeNo) -> u64 {
        self.kernel_holds(ino) + LARGE_BLOCKS
    }

    /// How long the kernel may trust a file's attributes. Not at all, where it must ask before each `write`: in a tight
    /// domain, and of a file that takes no writes.
    pub(crate) fn attr_ttl(&self, attr: &Attr) -> u64 {
        if attr.flags & (IMMUTABLE | APPEND) != 0 {
            self.met_guarded();
        }
        let asks = if self.negotiated.opens() {
            (self.is_asked(attr.ino) || self.flagged.is_immutable(attr.ino)) && self.handles.has_cached_writer(attr.ino)
        } else {
            attr.kind() == FileKind::File && (self.is_asked(attr.ino) || attr.flags & (IMMUTABLE | APPEND) != 0)
        };
        if asks { 0 } else { TTL_SECONDS }
    }

    /// Whether the kernel is to ask before each `write`: with little room, or where a tenant may write so much in a second
    /// only ([`crate::pace`]).
    fn is_asked(&self, ino: InodeNo) -> bool {
        self.is_tight(ino) || self.asks_for_quota(ino) || self.asks_to_pace(ino)
    }

    /// Whether the kernel may hold pages of the file that the volume has not seen: also of one that is written through, what was
    /// stored to a map of it.
    pub(crate) fn may_be_dirty(&self, ino: InodeNo) -> bool {
        !self.negotiated.opens() || self.handles.has_writer(ino)
    }

    /// Whether a GETATTR with this handle may come from a `write` through the cache.
    pub(crate) fn may_write_cached(&self, id: WireId, fh: u64) -> bool {
        !self.negotiated.opens() || self.handles.get(fh).is_ok_and(|h| h.id() == id && h.is_cached_writer())
    }

    /// GETATTR before a `write` through the cache of a tight domain: may it go on? Answered by a helper thread where the
    /// kernel has to write back, since what it writes back comes to the serving threads. `granted`: it was, within its owners'
    /// limits, which a `write` that is refused here has back.
    pub(crate) fn getattr_of_writer(
        &self,
        req: &Request<'_>,
        granted: Option<Asker>,
        out: &mut Answer,
        cx: &Context<'_>,
    ) -> Handled {
        if !self.negotiated.opens() {
            return self.getattr_of_anybody(req, out, cx);
        }
        let id = req.node();
        let give_back = || granted.into_iter().for_each(|asker| self.take_quota_back(asker));
        let (ino, attr) = (id.ino(), self.attr(id).inspect_err(|_| give_back())?);
        if self.promise(ino) {
            out.put(&attr_out(&attr, 0));
            return Ok(Outcome::Reply);
        }
        let range = requester::write_range(req.head.pid);
        if self.has_its_blocks(ino, range) {
            // what the kernel holds then is written back with what others hold
            self.promise_all(ino);
            out.put(&attr_out(&attr, 0));
            return Ok(Outcome::Reply);
        }
        let Some(waiting) = self.let_wait(false) else {
            return self.getattr_of_one_of_many(id, &attr, out).inspect_err(|_| give_back());
        };
        let asks = Asks { ino, range, asker: granted, later: cx.later(), since: Instant::now(), _waiting: waiting };
        // A job that cannot be handed over is dropped, and answers EIO.
        self.jobs.send(Kind::Room, Whose::Mount, move |fs| fs.make_promise(asks));
        Ok(Outcome::Deferred)
    }

    /// [`Self::fit_room`] on a mount with OPEN. In jobs of the helpers only.
    pub(crate) fn fit_promise(&self, asker: Asker, range: Option<WriteRange>, later: Later, waiting: Waiting) {
        let ino = asker.id.ino();
        if !self.is_tight(ino) || self.promise(ino) {
            return self.let_write(asker, later);
        }
        if self.has_its_blocks(ino, range) {
            self.promise_all(ino);
            return self.let_write(asker, later);
        }
        let asks = Asks { ino, range, asker: Some(asker), later, since: Instant::now(), _waiting: waiting };
        self.jobs.send(Kind::Room, Whose::Mount, move |fs| fs.make_promise(asks));
    }

    /// Promises a file room when the kernel has written back what was promised before, on a mount with OPEN. In jobs about room
    /// only, which go on with others while somebody takes room that this may need.
    fn make_promise(&self, asks: Asks) {
        let (ino, domain) = (asks.ino, self.domain_index(asks.ino));
        // as in `make_fit`
        if self.vol.claim_room(ino, self.enough(ino)).is_ok() && self.promise(ino) {
            return self.let_go_on(asks);
        }
        if let Some(d) = domain {
            self.restrict_again(d);
            self.write_back(d, false, asks.later.channel());
        }
        let want = self.last_blocks(ino);
        let has = || self.own_room(ino) >= want;
        // who takes room from the promise on leaves that, and who did before is seen behind it
        let promise = || {
            has() && {
                self.promise_all(ino);
                has()
            }
        };
        if promise() {
            return self.let_go_on(asks);
        }
        let waits = |asks: Asks| {
            std::thread::sleep(Duration::from_micros(500));
            // as above
            self.jobs.send(Kind::Room, Whose::Mount, move |fs| fs.make_promise(asks));
        };
        if self.is_taking(domain, asks.since) {
            return waits(asks);
        }
        match self.find_room(ino, want, asks.later.channel()) {
            Ok(_) if promise() || self.has_its_blocks(ino, asks.range) => {
                self.promise_all(ino);
                self.let_go_on(asks);
            }
            Ok(room) if room >= want && self.is_taking(domain, asks.since) => waits(asks),
            refused => {
                asks.asker.into_iter().for_each(|asker| self.take_quota_back(asker));
                asks.later.done(Err(refused.map_or_else(errno, |_| Errno::NOSPC)));
            }
        }
    }

    fn let_go_on(&self, asks: Asks) {
        match asks.asker {
            Some(asker) => self.let_write(asker, asks.later),
            None => _ = self.tell_attr(asks.ino, asks.later),
        }
    }

    /// [`Self::getattr_of_writer`] on a mount without OPEN.
    fn getattr_of_anybody(&self, req: &Request<'_>, out: &mut Answer, cx: &Context<'_>) -> Handled {
        let (id, thread) = (req.node(), req.head.pid);
        let (ino, attr) = (id.ino(), self.attr(id)?);
        let mut plenty = self.own_room(ino) >= self.enough(ino);
        let (asker, need, goes_on) = loop {
            let seen = if plenty { Seen::NOTHING } else { requester::doing(req) };
            let asker = Asker { id, thread, call: seen.call };
            let need = blocks_of(seen.doing);
            let goes_on = need.is_none_or(|need| (plenty || !self.is_unknown(ino)) && self.grant(asker, need, plenty));
            if goes_on || !plenty {
                break (asker, need, goes_on);
            }
            // somebody has taken it since: how much this one writes matters
            plenty = false;
        };
        let range = if goes_on { None } else { requester::write_range(thread) };
        if goes_on || self.has_its_blocks(ino, range) {
            out.put(&attr_out(&attr, 0));
            return Ok(Outcome::Reply);
        }
        let need = need.unwrap_or(0);
        let Some(waiting) = self.let_wait(false) else {
            // it was within its limits before this
            self.take_quota_back(asker);
            return Err(Errno::NOSPC);
        };
        let (later, since) = (cx.later(), Instant::now());
        let fit = Fit { asker, range, need, later, since, is_new: true, _waiting: waiting };
        // A job that cannot be handed over is dropped, and answers EIO.
        self.jobs.send(Kind::Room, Whose::Mount, move |fs| fs.make_fit(fit));
        Ok(Outcome::Deferred)
    }

    /// Answers a `write` that has waited for something else, on a mount without OPEN: where its domain has little room,
    /// when it fits there, too. In jobs of the helpers only.
    pub(crate) fn fit_room(
        &self,
        asker: Asker,
        range: Option<WriteRange>,
        doing: Doing,
        later: Later,
        waiting: Waiting,
    ) {
        let ino = asker.id.ino();
        let need = blocks_of(doing).filter(|_| self.is_tight(ino));
        let plenty = self.own_room(ino) >= self.enough(ino);
        let goes_on = need.is_none_or(|need| (plenty || !self.is_unknown(ino)) && self.grant(asker, need, plenty));
        if goes_on || self.has_its_blocks(ino, range) {
            return self.let_write(asker, later);
        }
        let need = need.unwrap_or(0);
        let fit = Fit { asker, range, need, later, since: Instant::now(), is_new: true, _waiting: waiting };
        self.jobs.send(Kind::Room, Whose::Mount, move |fs| fs.make_fit(fit));
    }

    /// Whether the file has all blocks that a thread is about to write, as `fallocate` gave them: that takes no room, and
    /// does not count as granted. Not known of appends: the kernel may know a later end than the volume.
    fn has_its_blocks(&self, ino: InodeNo, range: Option<WriteRange>) -> bool {
        let Some((Some(offset), len)) = range else { return false };
        self.vol.blocks_to_write(ino, offset, len).is_ok_and(|blocks| blocks == 0)
    }

    /// Grants a `write` when the kernel has written back what was granted before. In jobs about room only, which go on
    /// with others while somebody is in the midst of a `write`.
    fn make_fit(&self, mut fit: Fit) {
        let ino = fit.asker.id.ino();
        let fits = || self.grant(fit.asker, fit.need, false);
        // groups that it can have come first: nothing need be written back for them
        if !self.is_unknown(ino) && self.claim_beside_granted(ino, fit.need) && fits() {
            return self.let_write(fit.asker, fit.later);
        }
        let mut lately = self.dirty_grants.left_lately(fit.since);
        if let Some(d) = self.domain_index(ino) {
            if self.is_unknown(ino) {
                self.write_back_first(d, fit.later.channel());
            } else if lately.is_none() {
                self.restrict_again(d);
            }
        }
        let left = loop {
            let is_known = lately.is_some();
            let left = lately.take().unwrap_or_else(|| self.write_back_granted(None, fit.later.channel()));
            if fits() {
                return self.let_write(fit.asker, fit.later);
            }
            let waits = fit.is_new || fit.since.elapsed() < self.patience(left, ino, fit.need);
            if left.blocks > 0 && waits || self.is_taking(self.domain_index(ino), fit.since) {
                // of many that wait each sleeps at the same time
                let due = Instant::now() + pause(fit.since);
                fit.is_new = false;
                // as above
                self.jobs.send(Kind::Room, Whose::Mount, move |fs| {
                    sleep_until(due);
                    fs.make_fit(fit);
                });
                return;
            }
            if !is_known {
                break left;
            }
        };
        match self.find_room(ino, fit.need.saturating_add(left.blocks), fit.later.channel()) {
            // what is committed may be written where it lies
            Ok(_) if fits() || self.has_its_blocks(ino, fit.range) => return self.let_write(fit.asker, fit.later),
            Ok(_) => fit.later.done(Err(Errno::NOSPC)),
            Err(e) => fit.later.done(Err(errno(e))),
        }
        // it was within its limits before it was looked for room
        self.take_quota_back(fit.asker);
    }

    /// How long who needs so much room waits for `write`s that are under way: see [`IN_FLIGHT`].
    fn patience(&self, left: Left, ino: InodeNo, need: u64) -> Duration {
        match left.unseen {
            // what they write counts twice until their `write`s have ended
            _ if left.writing && self.own_room(ino) >= need => beside::TAKES,
            true => LATELY + IN_FLIGHT,
            false => IN_FLIGHT,
        }
    }

    /// What `df` shows of so many `available` blocks of a tenant with little room, where the kernel asks before each `write`: none of
    /// those that it must find beside its own.
    pub(crate) fn writable(&self, ino: InodeNo, available: u64) -> u64 {
        let asks = self.profile.cache == Cache::Back && !self.negotiated.opens();
        if !asks || !self.domain_index(ino).is_some_and(|d| self.is_limited(d)) {
            return available;
        }
        let room = self.vol.write_room(ino);
        if room < COUNTED_BLOCKS { available.min(room.saturating_sub(SLACK_BLOCKS)) } else { available }
    }

    fn is_unknown(&self, ino: InodeNo) -> bool {
        self.domain_index(ino).is_some_and(|d| self.tight.domains[d].unknown.load(Ordering::SeqCst))
    }

    /// Lets a `write` go on that was granted what it needs, or tells that there is no such file: that keeps nothing of a quota.
    fn let_write(&self, asker: Asker, later: Later) {
        if !self.tell_attr(asker.id.ino(), later) {
            self.take_quota_back(asker);
        }
    }

    /// Answers with the attributes; whether there were some.
    fn tell_attr(&self, ino: InodeNo, later: Later) -> bool {
        let attr = self.vol.getattr(ino);
        let told = attr.is_ok();
        match attr {
            Ok(attr) => {
                let mut out = Answer::new(256);
                out.put(&attr_out(&attr, 0));
                later.answer(&mut out);
            }
            Err(e) => later.done(Err(errno(e))),
        }
        told
    }

    /// The same where so many writers wait already that this one must not: it is let through while there is more room
    /// than all of them may take now.
    fn getattr_of_one_of_many(&self, id: WireId, attr: &Attr, out: &mut Answer) -> Handled {
        if !self.promise(id.ino()) {
            self.promise_all(id.ino());
            if self.own_room(id.ino()) < self.last_blocks(id.ino()) {
                return Err(Errno::NOSPC);
            }
        }
        out.put(&attr_out(attr, 0));
        Ok(Outcome::Reply)
    }

    /// With less room than this, writers through the cache are refused: on a mount with OPEN.
    fn last_blocks(&self, ino: InodeNo) -> u64 {
        self.last_blocks_of(self.domain_index(ino))
    }

    fn last_blocks_of(&self, domain: Option<usize>) -> u64 {
        let writers = self.handles.cached_writers(|other| self.domain_index(other) == domain);
        LAST_BLOCKS.max(writers * WRITE_BLOCKS + WRITE_BLOCKS / 2)
    }

    /// Has the kernel write back what it may hold of a domain that has just become tight. In jobs about room only.
    fn write_back_first(&self, domain: usize, channel: &Channel) {
        let bound = self.bound_for_tight(domain);
        if self.negotiated.opens() {
            self.write_back(domain, true, channel);
        } else {
            let mut unknown = self.known_files(domain);
            unknown.retain(|id| !self.drop_pages(*id, None, channel));
            self.tell_again(unknown);
        }
        self.tight.domains[domain].unknown.store(false, Ordering::SeqCst);
        if let Some(bound) = bound {
            self.tight.domains[domain].held.store(bound / 4096, Ordering::SeqCst);
        }
        self.keep_rooms();
    }

    /// What the kernel may hold of a tight domain from now on, bytes: the least, but for a domain with a limit of its own,
    /// which does not restrict its neighbours. `None`: as before.
    fn bound_for_tight(&self, domain: usize) -> Option<u64> {
        if self.is_limited(domain) {
            // more than it was set to, where memory has become free
            return self.dirty.as_ref().map(DirtyLimit::now);
        }
        Some(self.restrict())
    }

    /// The limit of a domain has changed. Where that leaves it little room the kernel writes back what it took while there was
    /// more; then nothing that was accepted before is under way. In jobs about room only.
    pub(crate) fn limit_changed(&self, domain: DomainId, channel: &Arc<Channel>) {
        let changes = self.vol.limit_changes(domain);
        let d = usize::from(domain.0);
        if let Some(place) = self.tight.domains.get(d) {
            place.changes.store(changes, Ordering::Relaxed);
        }
        self.tight.plain.store(false, Ordering::Relaxed);
        if self.profile.cache == Cache::Back && d < self.domain_count() && self.is_limited(d) {
            let much = self.tight.bound.load(Ordering::SeqCst) > MOST_BESIDE_LIMITED;
            if let Some(limit) = self.dirty.as_ref().filter(|_| much) {
                // of the first domain with a limit; what the kernel holds of it beyond that it writes back below
                self.tight.set_for(MOST_BESIDE_LIMITED, MOST_BESIDE_LIMITED + limit.of_tenants());
                limit.allow(MOST_BESIDE_LIMITED);
            }
            let place = &self.tight.domains[d];
            self.becomes_tight(d, self.vol.sure_room(domain), channel);
            // also of one that was tight: it may have been granted what was there
            self.write_back_first(d, channel);
            if !place.tight.load(Ordering::SeqCst) {
                // with room nobody is asked: what the kernel holds from now on is unknown again
                place.unknown.store(true, Ordering::SeqCst);
                self.keep_room(d);
            }
        }
        self.vol.promises_are_kept(domain, changes);
    }

    /// The kernel's bound has grown where memory has become free. In jobs about room only.
    fn restrict_again(&self, domain: usize) {
        let place = &self.tight.domains[domain];
        let limit = self.dirty.as_ref().filter(|_| place.tight.load(Ordering::SeqCst));
        if let Some(limit) = limit {
            let bytes = if self.is_limited(domain) { limit.now() } else { self.restrict() };
            place.held.store(bytes / 4096, Ordering::SeqCst);
            self.keep_room(domain);
        }
    }

    /// Has the kernel write back what it was promised room for in this domain, or all that it may hold, on a mount with OPEN. By the
    /// helper thread only.
    fn write_back(&self, domain: usize, all: bool, channel: &Channel) {
        for id in self.handles.take_promised(all, |ino| self.domain_index(ino) == Some(domain)) {
            self.drop_pages(id, None, channel);
        }
    }

    /// Has the kernel write back what was granted, on a mount without OPEN; what is left. `locked`: see
    /// [`crate::dirty_grants::DirtyGrants::write_back`]. In jobs about room only.
    fn write_back_granted(&self, locked: Option<InodeNo>, channel: &Channel) -> Left {
        let writing = self.dirty_grants.write_back(&self.looks, locked);
        writing.files.iter().for_each(|id| _ = self.drop_pages(*id, None, channel));
        let left = self.dirty_grants.written_back(writing);
        self.keep_rooms();
        left
    }
}

/// Blocks that who is seen to do this is taken to write; `None`: nothing.
fn blocks_of(doing: Doing) -> Option<u64> {
    match doing {
        Doing::Other => None,
        // and a page at each end
        Doing::Writing(Some(bytes)) => Some(bytes.div_ceil(4096).saturating_add(SLACK_BLOCKS)),
        Doing::Writing(None) | Doing::Running | Doing::Unknown => Some(LAST_BLOCKS),
    }
}

mod asked;
pub(crate) mod beside;
mod kept;
#[cfg(test)]
mod tests;
