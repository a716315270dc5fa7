//! Committed records of a journal become the committed view again ([`Space::apply`] in recovery).

use super::apply::{Located, blocks_of};
use super::group::Group;
use super::{PairsAhead, Space};
use crate::error::Result;
use braidfs_format::group::OWNERS_PER_BLOCK;
use braidfs_format::journal::TableRecord;
use braidfs_format::{BlockAddr, TxId};
use std::sync::Arc;

/// Records between two looks at how many owner tables are in memory.
const LOOK_EVERY: u32 = 256;

/// A replay by one thread. Several may replay at a time, each records of groups of its own.
pub(crate) struct Replaying<'s> {
    space: &'s Space,
    /// The group of the last record, and which halves of its owner tables it has seen to.
    group: Option<(Arc<Group>, u64)>,
    ahead: PairsAhead,
    until_look: u32,
}

impl Space {
    /// Begins a replay: blocks that the journal says are valid are also marked used.
    pub(crate) fn replaying(&self) -> Replaying<'_> {
        Replaying { space: self, group: None, ahead: PairsAhead::default(), until_look: LOOK_EVERY }
    }
}

impl Replaying<'_> {
    /// As [`Space::apply`], of one record.
    ///
    /// # Errors
    /// As there.
    pub fn apply(&mut self, record: TableRecord, tx: TxId) -> Result<()> {
        let Some(run) = blocks_of(record) else { return Ok(()) };
        let space = self.space;
        let done = self.locate(run.addr).and_then(|(segment, block)| {
            let Some((group, seen)) = &mut self.group else { return Ok(()) };
            let at: Located<'_> = (group, segment, block);
            load_owners(space, at, run.len, seen, &mut self.ahead);
            space.apply_one(record, tx, false, at)
        });
        self.until_look -= 1;
        if self.until_look == 0 || done.is_err() {
            self.until_look = LOOK_EVERY;
            space.evict_owners();
        }
        done
    }

    /// Has the group of `addr` in `group`; the segment there, and the block in that. As [`Space::locate`], which this asks where
    /// the last record was of another group.
    fn locate(&mut self, addr: BlockAddr) -> Result<(u32, u32)> {
        let geometry = self.space.store.geometry();
        if let Some((group, _)) = &self.group
            && let Some(at) = addr.0.checked_sub(geometry.group_start(group.number).0)
            && at < u64::from(geometry.group_blocks())
        {
            let (_, segment, block) = geometry.split(addr);
            return Ok((segment, block));
        }
        let (group, segment, block) = self.space.locate(addr)?;
        self.group = Some((group, 0));
        Ok((segment, block))
    }
}

/// Brings the owner tables of `len` blocks to memory that are not there, as far as they can be read; `seen` has a bit for each
/// half that need not be looked at again. What does not hold is met again by whoever needs it.
fn load_owners(space: &Space, (group, segment, block): Located<'_>, len: u32, seen: &mut u64, ahead: &mut PairsAhead) {
    let half = |segment: u32, block: u32| 2 * segment + block / OWNERS_PER_BLOCK;
    let first = half(segment, block);
    let last = first.saturating_add((block % OWNERS_PER_BLOCK).saturating_add(len.max(1) - 1) / OWNERS_PER_BLOCK);
    for at in first..=last.min(2 * group.segments.len() as u32 - 1) {
        if *seen >> at & 1 == 0 {
            *seen |= 1 << at;
            group.fill_owners_ahead(&space.store, &space.owners, (at / 2, at % 2), ahead);
        }
    }
}
