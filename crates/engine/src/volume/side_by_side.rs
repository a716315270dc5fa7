//! What a mount and an unmount do with all domains: each step for all of them side by side, and one flush for all where one
//! domain alone would need one.
//!
//! The order of the steps is that of one domain: nothing is told of before it is durable. A domain that fails in a step leaves,
//! the others go on. A flush that fails takes along those that have blocks on its device.

use super::MountedVolume;
use super::mount::grain;
use crate::domain::Domain;
use crate::domain::checkpoint::Begun;
use crate::error::{Error, Result};
use crate::planted::{Bug, planted};
use crate::types::DomainId;
use braidfs_format::domain::{DomainHeader, PEER_FAILED};
use braidfs_sync::plain::Mutex;
use std::collections::BTreeSet;
use std::io;

/// Domains on their way through the steps, with what the last one left.
type Going<'d, T> = Vec<(&'d Domain, T)>;

impl MountedVolume {
    /// The headers of all domains that work say that a recovery begins, which writes from now on ([`Domain::mark_opened`]).
    ///
    /// # Errors
    /// Of a device.
    pub(super) fn mark_recovery_begun(&self) -> Result<()> {
        let mut all = Steps::of(self);
        let told = all.step(all.working(), |d, ()| d.change_header(|h| d.mark_opened(h)));
        all.flush(told, |_| vec![0]).into_iter().for_each(|(d, seq)| d.note_header_durable(seq));
        all.outcome
    }

    /// The headers of these domains, of those that work, say that all links are to be compared: recovery left something
    /// to be judged there, of which no journal tells after its checkpoint.
    ///
    /// # Errors
    /// Of a device.
    pub(super) fn mark_left_unjudged(&self, those: &BTreeSet<DomainId>) -> Result<()> {
        let mut all = Steps::of(self);
        let left = |d: &Domain| those.contains(&d.id) && !d.has_passed_failure();
        let marked = all.working().into_iter().filter(|(d, ())| left(d)).collect();
        let marked = all.step(marked, |d, ()| d.change_header(|h| h.flags = (h.flags.get() | PEER_FAILED).into()));
        all.flush(marked, |_| vec![0]).into_iter().for_each(|(d, seq)| d.note_header_durable(seq));
        all.outcome
    }

    /// The headers of all domains that work say that these are in use ([`Domain::mark_in_use`]). `holding`: those without a
    /// journal stay at rest, and keep one until [`Self::end_hand_over`].
    ///
    /// # Errors
    /// Of a device.
    pub(super) fn mark_all_used(&self, after_crash: bool, holding: bool) -> Result<()> {
        let mut all = Steps::of(self);
        let mark = |d: &Domain, h: &mut DomainHeader| {
            d.mark_in_use(h, after_crash);
            if !holding {
                d.mark_scratch_in_use(h);
            }
        };
        let marked = all.step(all.working(), |d, ()| d.change_header(|h| mark(d, h)));
        let durable = all.flush(marked, |_| vec![0]);
        durable.iter().for_each(|(d, seq)| d.note_header_durable(*seq));
        if !holding {
            all.begin_scratch(durable.into_iter().filter(|(d, _)| d.is_scratch()).map(|(d, _)| (d, ())).collect());
        }
        all.outcome
    }

    /// Nobody else may mount the volume by the same list any more: domains without a journal have none from now on.
    ///
    /// # Errors
    /// Of a device: domains without a journal keep one.
    pub(crate) fn end_hand_over(&self) -> Result<()> {
        let mut all = Steps::of(self);
        let held = all.working().into_iter().filter(|(d, ())| d.is_scratch() && d.keeps_journal()).collect();
        let marked = all.step(held, |d, ()| d.change_header(|h| d.mark_scratch_in_use(h)));
        let durable = all.flush(marked, |_| vec![0]);
        all.begin_scratch(durable.into_iter().map(|(d, seq)| (d, d.note_header_durable(seq))).collect());
        all.outcome
    }

    /// Commits the recovery transactions of all domains, in steps: one flush before and one behind the commit records of all.
    ///
    /// # Errors
    /// The first one; domains that had one are read-only.
    pub(super) fn commit_recovered(&self) -> Result<()> {
        if self.shared.options.serial || planted(Bug::CommitBeforeChunks) {
            return self.commit_those(|d| d.failed().is_none());
        }
        let mut all = Steps::of(self);
        let begun = all.step(all.working(), |d, ()| d.begin_commit(&d.shared.workers));
        let chunked: Going<'_, _> = begun.into_iter().filter_map(|(d, c)| c.map(|c| (d, c))).collect();
        let durable = all.flush_groups(chunked, Bug::NoFlushBeforeCommit, Bug::CommitOneDevice);
        let recorded = all.step(durable, |d, c| d.record_commit(&c).map(|()| c));
        let committed = all.flush_groups(recorded, Bug::NoFlushAfterCommit, Bug::NoFlushAfterCommit);
        all.step(committed, |d, c| d.end_commit(c));
        all.outcome
    }

    /// Checkpoints all domains that work.
    ///
    /// # Errors
    /// The first one; domains that had one are read-only.
    pub(super) fn checkpoint_all(&self) -> Result<()> {
        let mut all = Steps::of(self);
        all.checkpoint(all.working());
        all.outcome
    }

    /// The last act of a proper unmount: everything is committed, checkpointed, and the headers of all domains that work say
    /// clean.
    ///
    /// # Errors
    /// The first one; the other domains are clean all the same.
    pub(super) fn close_all(&self) -> Result<()> {
        let mut all = Steps::of(self);
        let rested = all.step(all.working(), |d, ()| d.end_scratch());
        let committed = all.step(rested, |d, ()| d.clean_early().and_then(|()| d.commit()));
        let checkpointed = all.checkpoint(committed);
        let marked = all.step(checkpointed, |d, ()| d.change_header(|h| d.mark_clean(h)));
        let durable = all.flush(marked, |_| vec![0]);
        durable.into_iter().for_each(|(d, seq)| d.note_header_durable(seq));
        all.outcome
    }
}

/// Steps of all domains.
struct Steps<'m> {
    mounted: &'m MountedVolume,
    /// The first error.
    outcome: Result<()>,
}

impl<'m> Steps<'m> {
    /// These have no journal from now on, as one copy of their headers says. Then both do: the loss of one must not bring back
    /// that they were at rest.
    fn begin_scratch(&mut self, going: Going<'m, ()>) {
        if going.is_empty() {
            return;
        }
        let again = self.step(going, |d, ()| d.change_header(|h| d.mark_scratch_late(h)));
        let told = if planted(Bug::ScratchToldLate) { again } else { self.flush(again, |_| vec![0]) };
        told.into_iter().for_each(|(d, seq)| {
            d.note_header_durable(seq);
            d.begin_scratch();
        });
    }

    fn of(mounted: &'m MountedVolume) -> Self {
        Self { mounted, outcome: Ok(()) }
    }

    fn working(&self) -> Going<'m, ()> {
        self.mounted.domains.iter().filter(|d| d.failed().is_none()).map(|d| (&**d, ())).collect()
    }

    fn note(&mut self, e: Error) {
        if self.outcome.is_ok() {
            self.outcome = Err(e);
        }
    }

    /// One step of each; those that go on.
    fn step<A: Send, B: Send>(
        &mut self,
        going: Going<'m, A>,
        f: impl Fn(&'m Domain, A) -> Result<B> + Sync,
    ) -> Going<'m, B> {
        let going: Vec<Mutex<Option<(&'m Domain, A)>>> = going.into_iter().map(|g| Mutex::new(Some(g))).collect();
        let one = |i: usize| {
            // each is taken once
            let taken: Option<(&'m Domain, A)> = going[i].lock().take();
            Ok::<_, Error>(taken.map(|(d, a)| {
                d.run_near();
                f(d, a).map(|b| (d, b))
            }))
        };
        let mut on = Vec::with_capacity(going.len());
        match self.mounted.shared.workers.each(going.len(), grain(&self.mounted.store, going.len()), one) {
            Ok(done) => {
                for r in done.into_iter().flatten() {
                    match r {
                        Ok(g) => on.push(g),
                        Err(e) => self.note(e),
                    }
                }
            }
            Err(e) => self.note(e),
        }
        on
    }

    /// Flushes each device once that `devices` names of a domain; those that go on.
    fn flush<A>(&mut self, going: Going<'m, A>, devices: impl Fn(&Domain) -> Vec<usize>) -> Going<'m, A> {
        let store = &self.mounted.store;
        let of: Vec<Vec<usize>> = going.iter().map(|(d, _)| devices(d)).collect();
        let wanted = |i: usize| of.iter().any(|d| d.contains(&i));
        let flush = |i: usize| Ok::<_, Error>(if wanted(i) { store.device(i).flush().err() } else { None });
        let failed = match self.mounted.shared.workers.each(store.devices(), 1, flush) {
            Ok(failed) => failed,
            Err(e) => {
                self.note(e);
                return Vec::new();
            }
        };
        let mut on = Vec::with_capacity(going.len());
        for ((d, a), devices) in going.into_iter().zip(of) {
            // a device that has left the volume meanwhile has none of the domain's blocks any more
            match devices.iter().find_map(|i| failed.get(*i)?.as_ref()) {
                Some(e) => {
                    let e = Error::Io(copy(e));
                    d.fail(&e);
                    self.note(e);
                }
                None => on.push((d, a)),
            }
        }
        on
    }

    /// Flushes the devices on which the domains have groups: with the first bug none, with the other one those of the journals
    /// alone; those that go on.
    fn flush_groups<A>(&mut self, going: Going<'m, A>, missing: Bug, one: Bug) -> Going<'m, A> {
        if planted(missing) { going } else { self.flush(going, |d| d.devices_but(one)) }
    }

    /// Checkpoints each, as [`Domain::checkpoint`] does one; those that go on.
    fn checkpoint(&mut self, going: Going<'m, ()>) -> Going<'m, ()> {
        // A thread may hold many of these locks as long as it waits for none: who holds one may wait for another domain.
        let mut locks = Vec::with_capacity(going.len());
        let (mine, busy): (Going<'m, ()>, Going<'m, ()>) = going.into_iter().partition(|(d, ())| {
            let lock = d.try_checkpoint_alone();
            let got = lock.is_some();
            locks.extend(lock);
            got
        });
        let begun = self.step(mine, |d, ()| d.begin_checkpoint().inspect_err(|e| d.fail(e)));
        let homes = self.step(begun, |d, begun: Begun| {
            d.write_home(&begun, &[]).inspect_err(|e| d.fail(e))?;
            Ok(begun)
        });
        let durable = self.flush_groups(homes, Bug::HomesUnflushed, Bug::HomesOneDevice);
        let told = self.step(durable, |d, begun| {
            let told = d.write_checkpoint_header(&begun).inspect_err(|e| d.fail(e))?;
            Ok((begun, told))
        });
        let told = self.flush(told, |_| vec![0]);
        let mut done: Going<'m, ()> = Vec::with_capacity(told.len());
        for (d, (begun, told)) in told {
            d.end_checkpoint(&begun, &told);
            done.push((d, ()));
        }
        drop(locks);
        done.extend(self.step(busy, |d, ()| d.checkpoint()));
        done
    }
}

/// The same error again, for another domain.
fn copy(e: &io::Error) -> io::Error {
    e.raw_os_error().map_or_else(|| io::Error::new(e.kind(), e.to_string()), io::Error::from_raw_os_error)
}
