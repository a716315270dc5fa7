//! Requests that take blocks of an owner with a limit past the kernel's cache: FALLOCATE, COPY_FILE_RANGE, direct WRITEs. The volume
//! itself holds them to the limit, but does not know of what the kernel was granted ([`super`]): that was accepted before.
//!
//! They go on at once where the owner has so much beside what was granted, or nothing was. Else a helper thread has that
//! written back first, as before a `write` that does not fit; then the volume tells what they may have, but for threads that are
//! in the midst of a `write` still, others than its own: the kernel asks before a direct write, too. Who runs is counted
//! ([`TakingQuota`]), as with room ([`crate::room::beside`]).

use super::*;
use crate::abi::op;
use crate::fs::{MAX_IO_BYTES, errno};
use crate::request::{Answer, Handled, OwnedRequest};
use crate::room::beside::Taking;

/// Blocks that a request takes of owners, until this is dropped, and what was cloned of it.
#[derive(Debug, Default, Clone)]
pub(crate) struct TakingQuota {
    _taken: Option<Arc<Taken>>,
}

/// See [`TakingQuota`].
#[derive(Debug)]
struct Taken {
    /// Of each owner also how many of the blocks were granted to the request's call before.
    of: Vec<(Arc<DirtyGrants>, u64)>,
    blocks: u64,
}

impl Taken {
    /// Another owner refuses: what the call was granted is granted again.
    fn give_back(mut self, of: Option<Asker>) {
        self.of.drain(..).for_each(|(ledger, own)| ledger.take_less(of, self.blocks, own));
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.of.iter().for_each(|(ledger, _)| ledger.has_taken(self.blocks));
    }
}

/// A request for which an owner has too little beside what the kernel was granted.
struct Beside {
    owners: Vec<QuotaOwner>,
    /// Where it takes blocks: the kernel may hold the lock of the file meanwhile.
    ino: InodeNo,
    /// Whose call was granted some.
    of: Option<Asker>,
    need: u64,
    req: OwnedRequest,
    later: Later,
    since: Instant,
    /// What it takes of its domain's room, where that was looked at before.
    room: Option<Taking>,
    _waiting: Waiting,
}

impl BraidFs {
    /// Lets a request write a range of a file past the cache, where the owners may have the blocks that this adds beside what the
    /// kernel was granted. Else how it goes on: a helper thread has that written back first, and has the request handled again.
    /// `asked`: it is of a `write` before which the kernel asks, as through a handle of its cache.
    pub(crate) fn take_quota(
        &self,
        req: &Request<'_>,
        ino: InodeNo,
        (offset, len): (u64, u64),
        asked: bool,
        cx: &Context<'_>,
    ) -> Result<TakingQuota, Handled> {
        if len == 0 || cx.quota().is_some() || !self.asks_for_quota(ino) {
            return Ok(TakingQuota::default());
        }
        let need = self.vol.new_blocks(ino, offset, len).map_err(|e| Err(errno(e)))?;
        let owners = if need == 0 { Vec::new() } else { self.holding_owners(req, ino) };
        let of = if asked { self.granted_to(req, &owners) } else { None };
        if let Ok(taking) = self.take_of_owners(&owners, of, need) {
            return Ok(taking);
        }
        // as with room ([`BraidFs::take_room`])
        let Some(waiting) = self.let_wait(req.head.opcode == op::WRITE) else {
            return self.take_or_end_replaced(&owners, of, need).map_err(|refused| Err(refusal(refused)));
        };
        let (req, later) = (req.detach(), cx.later());
        let (since, room) = (Instant::now(), cx.room().cloned());
        let beside = Beside { owners, ino, of, need, req, later, since, room, _waiting: waiting };
        // A job that cannot be handed over is dropped, and answers EIO.
        self.send_beside(beside);
        Err(Ok(Outcome::Deferred))
    }

    fn send_beside(&self, b: Beside) {
        let (owners, whose) = (b.owners.clone(), Whose::of(&b.req.get(), b.later.channel()));
        self.jobs.send_for(&owners, whose, move |fs| fs.take_quota_beside(b));
    }

    /// The thread of a WRITE and its call, where it was granted blocks: perhaps in another call, whose bytes are in the cache. By Linux
    /// AIO it may have gone on long ago, even to an `execve` that waits for this WRITE: it is not looked at from here. A call that
    /// is not seen is none that it was granted something for.
    fn granted_to(&self, req: &Request<'_>, owners: &[QuotaOwner]) -> Option<Asker> {
        let asker = Asker { id: req.node(), thread: req.head.pid, call: None };
        if asker.thread == 0 || !owners.iter().any(|owner| self.quota_grants.of(*owner).has_granted(asker)) {
            return None;
        }
        let seen = self.looks.at(vec![asker.thread]).remove(&asker.thread)?;
        Some(Asker { call: seen.call, ..asker })
    }

    /// Takes blocks of all owners, or names the first one that has too few beside what the kernel was granted.
    fn take_of_owners(&self, owners: &[QuotaOwner], of: Option<Asker>, blocks: u64) -> Result<TakingQuota, QuotaOwner> {
        if owners.is_empty() {
            return Ok(TakingQuota::default());
        }
        let mut taking = Taken { of: Vec::new(), blocks };
        for owner in owners {
            let ledger = self.quota_grants.of(*owner);
            let Some(own) = ledger.take(of, blocks, || self.vol.quota_left(*owner).unwrap_or(u64::MAX)) else {
                taking.give_back(of);
                return Err(*owner);
            };
            taking.of.push((ledger, own));
        }
        Ok(TakingQuota { _taken: Some(Arc::new(taking)) })
    }

    /// [`Self::take_of_owners`], where need be without files of theirs that were replaced.
    fn take_or_end_replaced(
        &self,
        owners: &[QuotaOwner],
        of: Option<Asker>,
        blocks: u64,
    ) -> Result<TakingQuota, QuotaOwner> {
        self.or_end_replaced(|| self.take_of_owners(owners, of, blocks))
    }

    /// Has the kernel write back what it was granted, and the request handled; or goes on with that when other jobs of these
    /// owners are done, which call this only.
    fn take_quota_beside(&self, b: Beside) {
        let left = self.write_back_for(&b.owners, Some(b.ino), b.later.channel());
        self.end_removals(b.later.channel());
        match self.take_or_end_replaced(&b.owners, b.of, b.need) {
            Ok(taking) => {
                let (req, later) = (b.req.get(), b.later);
                let cx = later.context().with_quota(taking).with_room(b.room);
                let mut out = Answer::new(MAX_IO_BYTES as usize);
                let handled = self.serve_on_helper(&req, &mut out, &later, &cx);
                self.answer_later(&req, handled, later, &mut out);
            }
            Err(refused) if b.since.elapsed() < self.quota_patience(&b.owners, left, refused, b.need) => {
                std::thread::sleep(pause(b.since));
                // as above
                self.send_beside(b);
            }
            Err(refused) => b.later.done(Err(refusal(refused))),
        }
    }
}
