//! Moments at which nothing moves, for the scrub of a volume in use.
//!
//! Nothing of a domain's committed state changes on the device but in a commit (blocks that it freed are used again), in a
//! checkpoint (tables) and when its header is written. What does not hold in such a moment is damage.

use super::Domain;
use braidfs_format::BlockAddr;

impl Domain {
    /// Calls `f` while no commit runs: node table entries, and the blocks that they lead to, stay as they are. Lock rank
    /// of `commit_lock`: no gate, no cell lock in `f`, and the device only for a moment.
    pub fn between_commits<R>(&self, f: impl FnOnce() -> R) -> R {
        let _one = self.commit_lock.lock();
        f()
    }

    /// Calls `f` while no checkpoint runs: the tables of the domain's groups stay as they are on the device. Lock rank of
    /// `checkpoint_lock`.
    pub fn between_checkpoints<R>(&self, f: impl FnOnce() -> R) -> R {
        let _one = self.checkpoint_lock.lock();
        f()
    }

    /// Calls `f` while the header is not written. Lock rank of `header`.
    pub fn between_headers<R>(&self, f: impl FnOnce() -> R) -> R {
        let _one = self.header.lock();
        f()
    }

    /// Waits until all operations that are under way in the domain have ended. Lock rank of the gate.
    pub fn wait_for_operations(&self) {
        drop(self.gate.write());
    }

    /// The group in which the journal lies.
    pub(crate) fn journal_group(&self) -> u32 {
        self.store.geometry().group_of(BlockAddr(self.journal_place().0))
    }

    /// First block of the journal, and how many it has.
    pub fn journal_place(&self) -> (u64, u64) {
        let h = self.header.lock();
        (h.header.journal_start.get(), u64::from(h.header.journal_blocks.get()))
    }
}
