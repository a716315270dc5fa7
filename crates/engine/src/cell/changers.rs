//! Directories that several threads change at the same time.
//!
//! Who has the cell of such a directory locked for reading may change names in it, one bucket at a time (`dir::open`). What
//! changes of the directory itself with each name (version, times, counts) then lies in parts, one per slot of threads
//! ([`super::sharing`]), so that these threads write no common line but the bucket's. Who locks the cell for writing finds
//! it put together ([`Guarded::merge_slots`]); `stat` asks for the times ([`State::change_times`]).
//!
//! A directory begins to be shared once its changers have taken turns [`TURNS`] times, and ceases with a commit since which
//! hardly anybody changed it so ([`DirBody::committed`]): one that a thread has for itself has a pointer more.

use super::dir::open::Changed;
use super::{Body, DirBody, State};
use crate::braid::frontier::Frontier;
use crate::types::*;
use braidfs_sync::Guarded;
use braidfs_sync::ablation::{self, Switch};
use braidfs_sync::slots;

/// So often must another thread than the last one have changed names before a directory is shared.
const TURNS: u16 = 8;
/// A directory stays shared where so many changes were made side by side since the last commit.
const CHANGES: u64 = 64;

impl DirBody {
    /// This thread changes a name with the directory for itself. `at_once`: it is shared, whoever changed it before.
    pub fn note_changer(&mut self, at_once: bool) {
        let me = slots::mine() as u16;
        if me == self.changer && !at_once {
            return;
        }
        self.changer = me;
        self.turns = self.turns.saturating_add(1);
        let often = self.turns >= TURNS || at_once;
        if often && self.sharing.is_none() && !self.index.is_inline() && !ablation::is_on(Switch::Cells) {
            self.sharing = Some(Box::default());
            self.index.set_shared(true);
        }
    }

    /// A commit takes the directory as it is. `stays`: it stays shared.
    pub fn commit_takes(&mut self, stays: bool) {
        if std::mem::take(&mut self.together) < CHANGES && !stays && self.sharing.take().is_some() {
            self.turns = 0;
            self.index.set_shared(false);
        }
    }

    /// Whether threads may change names of it with it locked for reading.
    pub fn is_shared(&self) -> bool {
        self.sharing.is_some()
    }

    /// When names of it were taken or left last, in logical time.
    pub fn last_name_time(&self) -> u64 {
        let parts = self.sharing.as_ref().and_then(|s| s.sums()).map_or(0, |s| s.name_time);
        self.name_time.max(parts)
    }
}

impl Guarded for State {
    #[inline(always)]
    fn merge_slots(&mut self) {
        if let Body::Dir(d) = &self.body
            && d.sharing.is_some()
        {
            self.merge();
        }
    }
    #[inline(always)]
    fn is_shared(&self) -> bool {
        matches!(&self.body, Body::Dir(d) if d.is_shared())
    }
}

impl State {
    #[cold]
    #[inline(never)]
    fn merge(&mut self) {
        let Body::Dir(d) = &mut self.body else { return };
        let Some((s, first, concerned)) = d.sharing.as_mut().and_then(|s| s.take()) else { return };
        d.concerned.merge(&concerned);
        d.index.opened_changed(s.entries, s.memory, &first);
        d.name_time = d.name_time.max(s.name_time);
        d.together += s.changes;
        // within a tick of the clock it is what it was: others look at what lies beside it
        if (self.mtime, self.ctime) != (s.time, s.time) {
            (self.mtime, self.ctime) = (s.time, s.time);
        }
        self.durability.operations_changed_directory(s.changes);
    }

    /// The directory for changes of names by who has it locked for reading, in transaction `tx`, which runs. `None` where
    /// one needs the directory for itself: it is not shared, or no change of that transaction has taken it yet.
    pub fn shared_in(&self, tx: TxId) -> Option<&DirBody> {
        match &self.body {
            Body::Dir(d) if d.sharing.is_some() && self.durability.dirty_tx() == Some(tx) => Some(d),
            _ => None,
        }
    }

    /// Whether threads may change names of it with it locked for reading.
    pub fn is_shared_dir(&self) -> bool {
        self.is_shared()
    }

    /// Times of the last changes of content and inode.
    #[inline]
    pub fn change_times(&self) -> (Timestamp, Timestamp) {
        match &self.body {
            Body::Dir(d) if d.sharing.is_some() => d.times().map_or((self.mtime, self.ctime), |t| (t, t)),
            _ => (self.mtime, self.ctime),
        }
    }

    /// Rises with each change, also of a directory that is shared.
    pub fn version(&self) -> u64 {
        let parts = match &self.body {
            Body::Dir(d) => d.sharing.as_ref().and_then(|s| s.sums()).map_or(0, |s| s.changes),
            _ => 0,
        };
        self.durability.version() + parts
    }
}

impl DirBody {
    fn times(&self) -> Option<Timestamp> {
        self.sharing.as_ref()?.sums().map(|s| s.time)
    }

    /// A name changed by who has the directory locked for reading, and its bucket. `concerned`: the domain of the inode and its
    /// transaction, where that is another one than the directory's.
    pub fn note_change(&self, counts: Changed, now: Timestamp, name_time: u64, concerned: Option<(DomainId, TxId)>) {
        let Some(s) = &self.sharing else { return };
        // threads of one slot may do so at the same time
        s.note(counts, now, name_time, concerned);
    }

    /// An entry changed, by who has the directory for itself, with an inode of another domain, in its transaction `tx`.
    pub fn entry_concerns(&mut self, domain: DomainId, tx: TxId) {
        self.concerned.raise(domain, tx);
    }

    /// Transactions of other domains that changed inodes with entries of this directory: those that are pending are among them.
    pub fn concerned(&self) -> Frontier {
        let mut all = self.concerned.clone();
        if let Some(s) = &self.sharing {
            all.merge(&s.concerned());
        }
        all
    }

    /// Whether a transaction of another domain is pending that changed an inode with an entry of this directory. Of one that a
    /// transaction has yet to write, perhaps more are. Only memory knows of it.
    pub fn waits(&self, pending: impl Fn(DomainId, TxId) -> bool) -> bool {
        self.concerned.any(pending)
    }

    /// Forgets those that are not pending any more.
    pub fn forget_durable(&mut self, pending: impl Fn(DomainId, TxId) -> bool) {
        self.concerned.retain(pending);
    }
}
