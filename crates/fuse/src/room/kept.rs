//! Room that a domain keeps for what the kernel may hold of it, and lends while the kernel has written that back: what other
//! domains may take ([`super`]).

use super::{Cache, Domain};
use crate::channel::Channel;
use crate::dirty_grants::Asker;
use crate::fs::BraidFs;
use crate::helpers::{Kind, Whose};
use braidfs::{DomainId, InodeNo};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Until this is dropped, also by a panic, domains have lent their room.
struct Lent<'f>(&'f BraidFs);

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        self.0.tight.lent.store(false, Ordering::SeqCst);
        self.0.keep_rooms();
    }
}

impl BraidFs {
    /// Tells the volume what each domain must have for what the kernel may hold.
    pub(crate) fn keep_rooms(&self) {
        (0..self.domain_count()).for_each(|d| self.keep_room(d));
    }

    pub(super) fn keep_room(&self, d: usize) {
        // looked at under the lock: else who promises something in between would not be seen
        self.dirty_grants.tell(|granted| {
            let promised = || self.handles.any_promised(|ino| self.domain_index(ino) == Some(d));
            self.keep_room_of(d, granted, self.negotiated.opens() && promised());
        });
    }

    /// [`Self::keep_room`], with so many blocks granted, of whichever domain, or on a mount with OPEN with some file promised room.
    fn keep_room_of(&self, d: usize, granted: u64, promised: bool) {
        let domain = &self.tight.domains[d];
        let held = domain.held.load(Ordering::SeqCst);
        let known = domain.tight.load(Ordering::SeqCst) && !domain.unknown.load(Ordering::SeqCst);
        let least = match self.profile.cache {
            Cache::Through => 0,
            // with what the kernel cannot write back now
            Cache::Back if self.tight.lent.load(Ordering::SeqCst) => return,
            Cache::Back if !known => held,
            Cache::Back if !self.negotiated.opens() => held.min(granted),
            Cache::Back => u64::from(promised) * held,
        };
        domain.kept.store(least, Ordering::SeqCst);
        self.vol.keep_room(DomainId(d as u16), least);
    }

    /// Does something for which a domain lacks room that others may have, while the tight ones keep nothing for the kernel but what
    /// it cannot write back now; `None`: there are none. In jobs about room only.
    pub(crate) fn with_lent_room<R>(&self, channel: &Arc<Channel>, work: impl FnOnce() -> R) -> Option<R> {
        if self.profile.cache != Cache::Back {
            return None;
        }
        // one that others have made short of room since somebody looked at it keeps what the kernel may hold, and is not tight
        for d in 0..self.domain_count() {
            if self.becomes_tight(d, self.vol.sure_room(DomainId(d as u16)), channel) {
                self.write_back_first(d, channel);
            }
        }
        let is_tight = |d: &usize| self.tight.domains[*d].tight.load(Ordering::SeqCst);
        let all: Vec<usize> = (0..self.domain_count()).filter(is_tight).collect();
        if all.is_empty() {
            return None;
        }
        let unknown = |d: &&usize| self.tight.domains[**d].unknown.load(Ordering::SeqCst);
        all.iter().filter(unknown).for_each(|d| self.write_back_first(*d, channel));
        // before anything is written back: what is granted from now on is granted by this thread
        self.tight.lent.store(true, Ordering::SeqCst);
        let _until = Lent(self);
        let left = if self.negotiated.opens() {
            all.iter().for_each(|d| self.write_back(*d, false, channel));
            None
        } else {
            Some(self.write_back_granted(None, channel).blocks)
        };
        for d in all {
            let held = self.tight.domains[d].held.load(Ordering::SeqCst);
            let left = held.min(left.unwrap_or_else(|| self.last_blocks_of(Some(d))));
            // after whoever has looked before it was lent
            self.dirty_grants.tell(|_| self.vol.keep_room(DomainId(d as u16), left));
        }
        Some(work())
    }

    /// What nobody takes from the file's domain, without what requests are about to take ([`super::beside`]).
    pub(super) fn own_room(&self, ino: InodeNo) -> u64 {
        self.domain_index(ino).map_or(0, |d| {
            let taking = self.tight.domains[d].taking.load(Ordering::SeqCst);
            self.vol.own_room(DomainId(d as u16)).saturating_sub(taking)
        })
    }

    /// Grants a thread a `write`, where it fits beside what is granted; `plenty`: there was [enough](Self::enough), and while there is it
    /// need not, the kernel holds no more than that. Room that is granted is the domain's own, and none that others take.
    pub(super) fn grant(&self, asker: Asker, need: u64, plenty: bool) -> bool {
        let ino = asker.id.ino();
        let Some(d) = self.domain_index(ino) else { return false };
        let room = || {
            if self.tight.lent.load(Ordering::SeqCst) {
                return 0;
            }
            // first all, so that what there is cannot go to others once it was looked at
            self.vol.keep_room(DomainId(d as u16), self.tight.domains[d].held.load(Ordering::SeqCst));
            let own = self.own_room(ino);
            if plenty && own >= self.enough(ino) { u64::MAX } else { own }
        };
        self.dirty_grants.grant(asker, need, room, |granted| self.keep_room_of(d, granted, false))
    }

    /// Has the file's domain take groups for so many blocks beside all that is granted; whether it has them then.
    pub(super) fn claim_beside_granted(&self, ino: InodeNo, need: u64) -> bool {
        let mut want = need;
        self.dirty_grants.tell(|granted| want = want.saturating_add(granted));
        self.vol.claim_room(ino, want).is_ok_and(|own| own >= want)
    }

    /// Promises the file room for what the kernel takes, on a mount with OPEN, where its domain has enough for all that the kernel may
    /// hold, and is lending nothing; whether it has.
    pub(super) fn promise(&self, ino: InodeNo) -> bool {
        let has = || !self.tight.lent.load(Ordering::SeqCst) && self.own_room(ino) >= self.enough(ino);
        // before it is looked at: who takes room from then on leaves that. But not where it will not do
        has() && {
            self.promise_all(ino);
            has()
        }
    }

    /// Promises it as much as the kernel may hold, whatever there is.
    pub(super) fn promise_all(&self, ino: InodeNo) {
        self.handles.promise(ino);
        if let Some(d) = self.domain_index(ino) {
            self.dirty_grants.tell(|granted| self.keep_room_of(d, granted, true));
        }
    }

    /// Has what was granted written back soon, where room that is kept for it may be why there was none. Nobody waits for it.
    pub(crate) fn refused_for_room(&self) {
        let tight = |d: &Domain| d.tight.load(Ordering::Relaxed);
        if self.profile.cache != Cache::Back
            || !self.tight.asked.ever.load(Ordering::Relaxed)
            || !self.tight.domains.iter().any(tight)
        {
            return;
        }
        let Some(channel) = self.connections.main() else { return };
        if self.tight.clearing.swap(true, Ordering::SeqCst) {
            return;
        }
        // Not sent only where the mount is ending.
        self.jobs.send(Kind::Room, Whose::Mount, move |fs| {
            // first: who is refused from now on has more written back, and a panic leaves nothing behind
            fs.tight.clearing.store(false, Ordering::SeqCst);
            if fs.negotiated.opens() {
                (0..fs.domain_count())
                    .filter(|d| tight(&fs.tight.domains[*d]))
                    .for_each(|d| fs.write_back(d, false, &channel));
                fs.keep_rooms();
            } else {
                fs.write_back_granted(None, &channel);
            }
        });
    }
}
