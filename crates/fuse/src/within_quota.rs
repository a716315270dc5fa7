//! Telling EDQUOT at the `write` although the kernel's writeback cache takes writes before the volume sees them.
//!
//! A file whose user, group or directory has a limit is *asked about*: its attributes are told without a time to live, so that the
//! kernel asks (GETATTR with the flag of a handle) before each `write`, as in a domain with little room ([`crate::room`]). What
//! is granted there counts for the owner until the kernel has written it back ([`crate::dirty_grants`], one ledger for each
//! owner). What does not fit beside that has the kernel write it back first; then it is known which blocks of the file are new,
//! and that is what decides. On a mount with OPEN such files are opened write-through instead, and the volume answers; for one that
//! was open when the limit came the kernel asks as on other mounts.
//!
//! FALLOCATE, COPY_FILE_RANGE and direct WRITEs take blocks beside what was granted ([`taking`]).
//!
//! **Soft limits.** The volume itself holds an owner to its soft limit when the grace is over. That is seen at the next request
//! that takes room ([`BraidFs::watch_quotas`]): what the kernel takes until it writes something back goes beyond the limit.
//!
//! Does not promise: a limit for stores to a shared map, for `io_uring`, and for what the kernel held when the limit was set;
//! `writev`, `splice` and who does not show in `/proc` are refused [`UNSEEN_BLOCKS`] early, `sendfile` and `copy_file_range`
//! [`PIPE_BLOCKS`]. A `write` through the cache that does not fit takes
//! nothing, where the volume itself would take a part.

pub(crate) mod taking;

use crate::channel::Channel;
use crate::dirty_grants::{Asker, DirtyGrants, HandedGrants, LATELY, Left};
use crate::fs::{BraidFs, Context, Waiting};
use crate::helpers::{Kind, Whose};
use crate::node::WireId;
use crate::profile::Cache;
use crate::request::{Outcome, Request};
use crate::requester::{self, Doing, WriteRange};
use crate::transport::Later;
use braidfs::{Error, Force, Forced, InodeNo, QuotaOwner};
use braidfs_sync::slots::PerSlot;
use braidfs_sync::{Mutex, rank};
use crossbeam::utils::CachePadded;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// What a call is taken to write that cannot be seen.
const UNSEEN_BLOCKS: u64 = (2 << 20) / 4096;
/// What `sendfile` and `copy_file_range` write at once (`splice_direct_to_actor` in fs/splice.c), with a page at an end.
const PIPE_BLOCKS: u64 = 17;
/// So much is granted to an owner before the kernel writes back, at most (1 GiB), but for one `write` of more: more would be
/// remembered by file for ever.
const MOST_BLOCKS: u64 = 1 << 18;
/// How long a `write` that does not fit waits for others that are under way; where it would fit without those that are seen to write,
/// [`TAKES`].
const IN_FLIGHT: Duration = Duration::from_millis(100);
/// How long anybody waits for what counts twice meanwhile: requests that take blocks past the cache, and other `write`s.
const TAKES: Duration = Duration::from_secs(10);

type Ledgers = Mutex<HashMap<QuotaOwner, Arc<DirtyGrants>>, rank::QuotaGrants>;

/// What writers through the kernel's cache were granted, by owner.
#[derive(Debug, Default)]
pub(crate) struct QuotaGrants {
    /// What each slot of threads has met: threads of different owners write no common line.
    known: PerSlot<Ledgers>,
    all: Ledgers,
    /// Changes of limits that the kernel was told of, or is about to be. In another process it is told once more.
    changes: CachePadded<AtomicU64>,
}

/// An owner, for another process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum HandedOwner {
    User(u32),
    Project(u32),
    Group(u32),
}

impl QuotaGrants {
    /// For another process: of owners to whom something is granted.
    pub fn handed(&self) -> Vec<(HandedOwner, HandedGrants)> {
        // Each has a lock of its own, which is not taken under this one.
        let all: Vec<_> = self.all.lock().iter().map(|(owner, grants)| (*owner, Arc::clone(grants))).collect();
        let of = |(owner, grants): (QuotaOwner, Arc<DirtyGrants>)| {
            let owner = match owner {
                QuotaOwner::User(user) => HandedOwner::User(user),
                QuotaOwner::Project(project) => HandedOwner::Project(project),
                QuotaOwner::Group(group) => HandedOwner::Group(group),
            };
            (owner, grants.handed())
        };
        all.into_iter().map(of).filter(|(_, grants)| !grants.is_empty()).collect()
    }

    /// As it was in another process.
    pub fn of_handed(handed: &[(HandedOwner, HandedGrants)]) -> Self {
        let of = |(owner, grants): &(HandedOwner, HandedGrants)| {
            let owner = match *owner {
                HandedOwner::User(user) => QuotaOwner::User(user),
                HandedOwner::Project(project) => QuotaOwner::Project(project),
                HandedOwner::Group(group) => QuotaOwner::Group(group),
            };
            (owner, Arc::new(DirtyGrants::of_handed(grants)))
        };
        Self { all: Mutex::new(handed.iter().map(of).collect()), ..Self::default() }
    }

    pub(crate) fn of(&self, owner: QuotaOwner) -> Arc<DirtyGrants> {
        if let Some(ledger) = self.known.mine().lock().get(&owner) {
            return ledger.clone();
        }
        // one of the locks at a time
        let ledger = self.all.lock().entry(owner).or_default().clone();
        self.known.mine().lock().insert(owner, ledger.clone());
        ledger
    }
}

/// How a question before a `write` goes on ([`BraidFs::getattr_within_quota`]).
pub(crate) enum Within {
    /// To others that may refuse it; what the thread was granted here.
    Goes(Option<Asker>),
    /// A helper thread answers it.
    Waits(Outcome),
}

/// A `write` that does not fit beside what was granted.
struct Fit {
    asker: Asker,
    whose: Whose,
    /// Where it writes, as far as that is seen.
    range: Option<WriteRange>,
    owners: Vec<QuotaOwner>,
    /// Blocks that it is taken to need, until it is known better.
    need: u64,
    /// What it was seen to do.
    doing: Doing,
    later: Later,
    since: Instant,
    /// Nobody has looked what is left yet, however long that is in coming.
    is_new: bool,
    waiting: Waiting,
}

impl BraidFs {
    /// Whether the kernel is to ask before each `write` to the file.
    pub(crate) fn asks_for_quota(&self, ino: InodeNo) -> bool {
        self.vol.any_quotas() && self.profile.cache == Cache::Back && self.vol.has_limited_owner(ino)
    }

    /// What the thread that asks does is not held to limits of users and groups, where it is root's.
    pub(crate) fn as_requester(&self, req: &Request<'_>) -> Option<Forced> {
        (self.vol.any_quotas() && requester::uid(req) == Some(0)).then(|| braidfs::forced(Force::User))
    }

    /// Owners of a file to whose limits of space who asks is held: root to those of directories only.
    fn holding_owners(&self, req: &Request<'_>, ino: InodeNo) -> Vec<QuotaOwner> {
        let mut owners = self.vol.limited_owners(ino);
        if owners.iter().any(|o| !matches!(o, QuotaOwner::Project(_))) && requester::uid(req) == Some(0) {
            owners.retain(|o| matches!(o, QuotaOwner::Project(_)));
        }
        owners
    }

    /// GETATTR before a `write` through the cache: whether it is within its owners' limits.
    pub(crate) fn getattr_within_quota(&self, req: &Request<'_>, cx: &Context<'_>) -> Result<Within, Errno> {
        let (id, thread) = (req.node(), req.head.pid);
        if !self.asks_for_quota(id.ino()) {
            return Ok(Within::Goes(None));
        }
        let owners = self.holding_owners(req, id.ino());
        if owners.is_empty() {
            return Ok(Within::Goes(None));
        }
        let seen = requester::doing(req);
        let need = match seen.doing {
            Doing::Other => return Ok(Within::Goes(None)),
            // and a page at each end
            Doing::Writing(Some(bytes)) => bytes.div_ceil(4096).saturating_add(1),
            Doing::Writing(None) if requester::writes_by_pipe(thread) => PIPE_BLOCKS,
            Doing::Writing(None) | Doing::Running | Doing::Unknown => UNSEEN_BLOCKS,
        };
        let asker = Asker { id, thread, call: seen.call };
        let Err(refused) = self.grants(MOST_BLOCKS, asker, need, &owners) else { return Ok(Within::Goes(Some(asker))) };
        let Some(waiting) = self.let_wait(false) else { return Err(refusal(refused)) };
        let later = cx.later();
        let range = requester::write_range(thread);
        let whose = Whose::of(req, cx.channel);
        let (doing, since) = (seen.doing, Instant::now());
        let fit = Fit { asker, whose, range, owners, need, doing, later, since, is_new: true, waiting };
        // A job that cannot be handed over is dropped, and answers EIO.
        self.jobs.send_for(&fit.owners.clone(), whose, move |fs| fs.fit_quota(fit));
        Ok(Within::Waits(Outcome::Deferred))
    }

    /// Grants blocks where they fit beside what else was granted to each owner, and that makes no more than `most`; the first that
    /// has no room for them refuses.
    fn grants(&self, most: u64, asker: Asker, blocks: u64, owners: &[QuotaOwner]) -> Result<(), QuotaOwner> {
        let refuses = |owner: &QuotaOwner| {
            let room = || self.vol.quota_left(*owner).unwrap_or(u64::MAX);
            !self.quota_grants.of(*owner).grant_of(most, asker, blocks, room, drop)
        };
        let Some(first) = owners.iter().position(refuses) else { return Ok(()) };
        // of a write that is not let in the others have nothing to count
        owners[..first].iter().for_each(|owner| self.quota_grants.of(*owner).take_back(asker));
        Err(owners[first])
    }

    /// The `write` of a thread, which may have been granted blocks of its file's owners just now, does not come.
    pub(crate) fn take_quota_back(&self, asker: Asker) {
        if self.vol.any_quotas() {
            let owners = self.vol.limited_owners(asker.id.ino());
            owners.iter().for_each(|owner| self.quota_grants.of(*owner).take_back(asker));
        }
    }

    /// Has the kernel write back what was granted to the owners, and tells the most that one of them has left. `locked`: see
    /// [`DirtyGrants::write_back`].
    fn write_back_for(&self, owners: &[QuotaOwner], locked: Option<InodeNo>, channel: &Channel) -> Left {
        let mut most = Left::default();
        for owner in owners {
            let ledger = self.quota_grants.of(*owner);
            let writing = ledger.write_back(&self.looks, locked);
            writing.files.iter().for_each(|id| _ = self.drop_pages(*id, None, channel));
            most = most.or(ledger.written_back(writing));
        }
        most
    }

    /// [`DirtyGrants::left_lately`] of all owners: the most that one of them has left.
    fn left_lately(&self, owners: &[QuotaOwner], since: Instant) -> Option<Left> {
        owners
            .iter()
            .try_fold(Left::default(), |most, owner| Some(most.or(self.quota_grants.of(*owner).left_lately(since)?)))
    }

    /// Has the kernel write back what was granted to the owners, and looks again. In jobs of these owners only.
    fn fit_quota(&self, mut fit: Fit) {
        let mut lately = self.left_lately(&fit.owners, fit.since);
        loop {
            let is_known = lately.is_some();
            let left = lately.take().unwrap_or_else(|| {
                let left = self.write_back_for(&fit.owners, None, fit.later.channel());
                self.end_removals(fit.later.channel());
                left
            });
            let ino = fit.asker.id.ino();
            // what the file has is known by now
            let need = fit.range.and_then(|(offset, len)| {
                let offset = offset.map_or_else(|| self.vol.getattr(ino).map(|a| a.size), Ok).ok()?;
                self.vol.new_blocks(ino, offset, len).ok()
            });
            let need = need.unwrap_or(fit.need);
            // all that can be forgotten is, by now: what is left counts by its limits alone
            let granted = match need {
                0 => Ok(()),
                need if is_known => self.grants(u64::MAX, fit.asker, need, &fit.owners),
                need => self.or_end_replaced(|| self.grants(u64::MAX, fit.asker, need, &fit.owners)),
            };
            let Err(refused) = granted else {
                // the domain may have little room besides
                if self.negotiated.opens() {
                    return self.fit_promise(fit.asker, fit.range, fit.later, fit.waiting);
                }
                return self.fit_room(fit.asker, fit.range, fit.doing, fit.later, fit.waiting);
            };
            let waits = fit.is_new || fit.since.elapsed() < self.quota_patience(&fit.owners, left, refused, need);
            if waits && (left.blocks > 0 || self.is_taking_of(&fit.owners)) {
                // of many that wait each sleeps at the same time
                let due = Instant::now() + pause(fit.since);
                fit.is_new = false;
                // as above
                self.jobs.send_for(&fit.owners.clone(), fit.whose, move |fs| {
                    sleep_until(due);
                    fs.fit_quota(fit);
                });
                return;
            }
            if !is_known {
                return fit.later.done(Err(refusal(refused)));
            }
        }
    }

    /// How long who needs so many blocks of the owners waits for others, where this one `refused`, and so much is `left`.
    fn quota_patience(&self, owners: &[QuotaOwner], left: Left, refused: QuotaOwner, need: u64) -> Duration {
        // what others write counts twice until their `write`s have ended: where nothing else is in its way it waits for that
        let for_writers = || left.writing && self.vol.quota_left(refused).is_none_or(|room| room >= need);
        match left.unseen {
            _ if self.is_taking_of(owners) || for_writers() => TAKES,
            true => LATELY + IN_FLIGHT,
            false => IN_FLIGHT,
        }
    }

    /// Whether a request is taking blocks of one of the owners past the cache.
    fn is_taking_of(&self, owners: &[QuotaOwner]) -> bool {
        owners.iter().any(|owner| self.quota_grants.of(*owner).is_taking())
    }

    /// Does what an owner's limit may refuse, and does it again where files that were replaced are gone then, and count no more; and
    /// once more where none is: another thread may have ended them since it was refused.
    fn or_end_replaced<R>(&self, attempt: impl Fn() -> Result<R, QuotaOwner>) -> Result<R, QuotaOwner> {
        let mut again = false;
        loop {
            match attempt() {
                Err(refused) if self.vol.end_replaced_files(refused) || !std::mem::replace(&mut again, true) => {}
                done => return done,
            }
        }
    }

    /// Has the kernel told where the volume itself has changed limits: an owner is held to its soft limit, or no more.
    #[inline]
    pub(crate) fn watch_quotas(&self, channel: &Arc<Channel>) {
        let (known, changes) = (&self.quota_grants.changes, self.vol.quota_limit_changes());
        let before = known.load(Ordering::Relaxed);
        if before != changes && known.compare_exchange(before, changes, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            let channel = channel.clone();
            // Not sent only where the mount is ending, which has the kernel write back all.
            self.jobs.send(Kind::Quota, Whose::Mount, move |fs| fs.quotas_changed(&channel));
        }
    }

    /// Limits have changed, or what was granted is not known: the kernel writes back what it took, and asks from now on. By the
    /// helper thread only.
    pub(crate) fn quotas_changed(&self, channel: &Channel) {
        if self.profile.cache == Cache::Through {
            return;
        }
        self.quota_grants.changes.store(self.vol.quota_limit_changes(), Ordering::Relaxed);
        self.tight.more_are_asked();
        // not as they are listed, under a lock
        let files = self.vol.held_files(|_| true);
        let mut unknown = Vec::new();
        for f in files.into_iter().filter(|f| self.vol.has_limited_owner(f.ino)) {
            let id = WireId::new(f.ino, f.generation);
            channel.invalidate(id, false);
            if !self.drop_pages(id, None, channel) {
                unknown.push(id);
            }
        }
        self.tell_again(unknown);
    }
}

/// How long one that has waited `since` then does so before it is looked at again: what is written back meanwhile is much by and by.
pub(crate) fn pause(since: Instant) -> Duration {
    if since.elapsed() < IN_FLIGHT { Duration::from_micros(500) } else { Duration::from_millis(5) }
}

/// Sleeps until then, unless that is past.
pub(crate) fn sleep_until(due: Instant) {
    std::thread::sleep(due.saturating_duration_since(Instant::now()));
}

/// A directory's limit is told as a full disk.
fn refusal(owner: QuotaOwner) -> Errno {
    Errno::from_raw_os_error(Error::Quota(owner).errno())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    /// All threads have one ledger for an owner, which each finds by itself once it has met the owner.
    #[test]
    fn a_thread_finds_the_ledger_of_an_owner_by_itself() {
        let (grants, owner) = (QuotaGrants::default(), QuotaOwner::User(7));
        let ledger = grants.of(owner);
        let ((go, begin), (answer, told)) = (channel(), channel());
        std::thread::scope(|s| {
            let (grants, ledger) = (&grants, &ledger);
            s.spawn(move || {
                answer.send(Arc::ptr_eq(&grants.of(owner), ledger)).unwrap();
                begin.recv().unwrap();
                answer.send(Arc::ptr_eq(&grants.of(owner), ledger)).unwrap();
            });
            assert_eq!(told.recv(), Ok(true));
            let all = grants.all.lock();
            go.send(()).unwrap();
            let again = told.recv_timeout(Duration::from_secs(20));
            drop(all);
            assert_eq!(again, Ok(true));
        });
    }
}
