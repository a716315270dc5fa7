//! From where on a domain's journal is needed.

use std::collections::BTreeMap;
use std::ops::Range;

/// Which position transactions need the journal from.
#[derive(Debug, Default)]
pub(super) struct FirstPositions {
    /// Position of the first chunk of each transaction since the last checkpoint.
    taken: BTreeMap<u64, u64>,
    /// The recovery transaction, and the tail that stays until it is committed and checkpointed.
    recovery: Option<(u64, u64)>,
    /// Where the journal that recovery found ends with what no commit record and no fsync counts on: the chunks of a
    /// transaction that the crash cut off.
    cut_off: Range<u64>,
    /// The newest transaction of recovery that is not in the journal, until a checkpoint has it.
    left: Option<u64>,
}

impl FirstPositions {
    /// A chunk of `tx` was taken at `pos`.
    pub fn take(&mut self, tx: u64, pos: u64) {
        self.taken.entry(tx).or_insert(pos);
    }

    /// The journal that recovery found stays from `tail` on as long as `tx` is not given up. Nothing counts on `cut_off`, its
    /// end.
    pub fn keep_for_recovery(&mut self, tx: u64, tail: u64, cut_off: Range<u64>) {
        self.recovery = Some((tx, tail));
        self.cut_off = cut_off;
    }

    /// What of the journal the crash cut off, once: the journal goes on where that began, so that chunks that were taken since
    /// are none.
    pub fn take_cut_off(&mut self) -> Range<u64> {
        self.taken.clear();
        std::mem::take(&mut self.cut_off)
    }

    /// Chunks of a transaction of recovery lie behind what the crash cut off, which stays from now on: the journal must not go
    /// back before them.
    pub fn go_on_behind_cut_off(&mut self) {
        self.cut_off = 0..0;
    }

    /// `tx` of recovery is left to the tables alone, and so are those that follow it before a checkpoint: in the journal they
    /// would follow one that is missing there.
    pub fn leave_journal(&mut self, tx: u64) {
        self.left = Some(tx);
    }

    /// Whether that is so.
    pub fn leaves_journal(&self) -> bool {
        self.left.is_some()
    }

    /// Where the journal begins of which transactions from `keep` on are kept, and those up to `covered` are in the tables; `None`: at
    /// its head. What recovery found is needed no more once the tables have its transaction, also where that one is kept.
    pub fn tail(&self, keep: u64, covered: u64) -> Option<u64> {
        let recovery = self.recovery.filter(|(tx, _)| *tx > covered).map(|(_, tail)| tail);
        self.taken.range(keep..).map(|(_, pos)| *pos).chain(recovery).min()
    }

    /// Whether the journal has a chunk of a transaction newer than `tx`. What recovery keeps is none.
    pub fn has_newer(&self, tx: u64) -> bool {
        tx.checked_add(1).is_some_and(|next| self.taken.range(next..).next().is_some())
    }

    /// Transactions before `keep` are given up, and those up to `covered` are in the tables.
    pub fn forget_before(&mut self, keep: u64, covered: u64) {
        self.taken = self.taken.split_off(&keep);
        self.recovery = self.recovery.filter(|(tx, _)| *tx > covered);
        self.left = self.left.filter(|tx| *tx > covered);
    }
}
