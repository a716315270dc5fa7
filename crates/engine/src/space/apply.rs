//! Committed records become the committed view, in the live file system and in recovery by the same code.
//!
//! Every record sets a state, so a sequence of records leads to the same tables from whatever mixture of older and
//! newer home blocks it starts, as long as it begins no later than the oldest of them. A segment's kind, temperature
//! and age are those of the last `Alloc` in it, and the default as soon as it has no valid block.

use super::bitmap;
use super::group::Group;
use super::pool::SegmentRef;
use super::{Run, Space};
use crate::error::Result;
use braidfs_format::geometry::SEGMENT_BLOCKS;
use braidfs_format::group::{NO_SNAPSHOT, Owner, SegmentEntry, SegmentKind, Temperature};
use braidfs_format::journal::{Record, TableRecord};
use braidfs_format::{BlockAddr, Corrupt, InodeNo, TxId};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// Blocks `.0 .. .0 + .1` of a segment.
type Piece = (u32, u32);
/// Where a block is: its group, the segment there, the block in that.
pub(super) type Located<'g> = (&'g Arc<Group>, u32, u32);

/// The first block that a record says something of, and how many it does; `None` where none of this module's tables is meant.
pub(super) fn blocks_of(record: TableRecord) -> Option<Run> {
    match record {
        TableRecord::Alloc { addr, len, .. } | TableRecord::Free { addr, len } => Some(Run { addr, len }),
        TableRecord::Live { addr, .. } => Some(Run { addr, len: 1 }),
        TableRecord::Node { .. } => None,
    }
}

impl Space {
    /// Makes the records of durable transaction `tx` the committed view. `Alloc` sets owners and marks valid, `Free` and
    /// `Live` of 0 make blocks reusable, `Live` sets the count of live records; others are ignored. Of one transaction,
    /// the `Live` of a block may come before its `Alloc`; records of different transactions come in order.
    ///
    /// # Errors
    /// `Corrupt` where a run is not of this domain or touches metadata or journal; of the device (owner tables are
    /// loaded on first need). The records before the one that failed are then applied.
    pub fn apply(&self, records: &[Record], tx: TxId) -> Result<()> {
        let apply = |r| {
            let Some(run) = blocks_of(r) else { return Ok(()) };
            let (group, segment, block) = self.locate(run.addr)?;
            self.apply_one(r, tx, true, (&group, segment, block))
        };
        let done = records.iter().filter_map(Record::table).try_for_each(apply);
        self.evict_owners();
        done
    }

    /// `live`: [`Space::pending_free`] has counted what they free. `at` is where the first block of the record is.
    pub(super) fn apply_one(&self, record: TableRecord, tx: TxId, live: bool, at: Located<'_>) -> Result<()> {
        match record {
            TableRecord::Alloc { addr, len, kind, temperature, owner, lblk } => {
                self.apply_alloc(at, Run { addr, len }, kind, temperature, (owner, lblk), tx)
            }
            TableRecord::Free { addr, len } => self.apply_free(at, Run { addr, len }, live),
            TableRecord::Live { addr, live: 0 } => self.apply_free(at, Run { addr, len: 1 }, live),
            TableRecord::Live { addr, live: records } => {
                for_each_piece(at, Run { addr, len: 1 }, |group, index, piece| {
                    group.edit_owners(&self.store, &self.owners, index, piece, &mut |_, o| o.live = records)
                })
            }
            TableRecord::Node { .. } => Ok(()),
        }
    }

    fn apply_alloc(
        &self,
        at: Located<'_>,
        run: Run,
        kind: SegmentKind,
        temperature: Temperature,
        (owner, lblk): (InodeNo, u64),
        tx: TxId,
    ) -> Result<()> {
        if !matches!(kind, SegmentKind::Data | SegmentKind::Node) {
            return Err(Corrupt::new("allocation record", format!("{} of kind {kind:?}", run.addr)).into());
        }
        for_each_piece(at, run, |group, index, piece| {
            let segment = &group.segments[index as usize];
            let base = lblk + (segment.start.0 + u64::from(piece.0) - run.addr.0);
            group.edit_owners(&self.store, &self.owners, index, piece, &mut |i, o| {
                let live = if owner.0 == 0 && o.node.0 == 0 { o.live } else { 0 };
                let lblk = if owner.0 == 0 { 0 } else { base + u64::from(i - piece.0) };
                *o = Owner { node: owner, lblk, live, birth: NO_SNAPSHOT };
            })?;
            let bits = bitmap::mask(piece.0, piece.1);
            let mut state = segment.state.lock();
            let fresh = segment.is_fresh();
            let new = group.set_used(segment, &mut state, &bits);
            bitmap::or(&mut state.entry.valid, &bits);
            state.entry =
                SegmentEntry { kind: segment.kind_after(kind), temperature, age: tx.0, valid: state.entry.valid };
            state.kind = kind;
            group.table_dirty.store(true, Relaxed);
            drop(state);
            self.account.force(new);
            if fresh {
                self.withdraw(group.number, index);
            }
            Ok(())
        })
    }

    fn apply_free(&self, at: Located<'_>, run: Run, announced: bool) -> Result<()> {
        for_each_piece(at, run, |group, index, piece| {
            // Owners first: as soon as the block is unused, somebody may take it.
            group.edit_owners(&self.store, &self.owners, index, piece, &mut |_, o| *o = Owner::default())?;
            let segment = &group.segments[index as usize];
            let bits = bitmap::mask(piece.0, piece.1);
            let mut state = segment.state.lock();
            let freed = group.clear_used(segment, &mut state, &bits);
            bitmap::clear(&mut state.entry.valid, &bits);
            if bitmap::is_empty(&state.entry.valid) {
                state.entry = SegmentEntry::default();
            }
            group.table_dirty.store(true, Relaxed);
            let (idle, withheld) = (!state.active, state.withheld);
            drop(state);
            self.account.add(if withheld { 0 } else { freed.into() });
            if announced {
                self.pending.add(-i64::from(freed));
            }
            if idle && segment.is_fresh() {
                self.offer(&SegmentRef { group: group.clone(), index });
            }
            Ok(())
        })
    }

    /// Frees all blocks that are valid, but for metadata and the journal: before anybody uses the domain.
    ///
    /// # Errors
    /// `Corrupt` where an owner table does not hold; of the device.
    pub(crate) fn free_all(&self) -> Result<()> {
        let groups: Vec<_> = self.groups.read().values().cloned().collect();
        for segment in groups.iter().flat_map(|g| &g.segments) {
            let valid = segment.state.lock().entry.valid;
            let taken = |i: u32| bitmap::get(&valid, i) && !bitmap::get(&segment.fixed, i);
            let mut at = 0;
            while at < SEGMENT_BLOCKS {
                let len = (at..SEGMENT_BLOCKS).take_while(|i| taken(*i)).count() as u32;
                if len > 0 {
                    let run = Run { addr: BlockAddr(segment.start.0 + u64::from(at)), len };
                    let (group, segment, block) = self.locate(run.addr)?;
                    self.apply_free((&group, segment, block), run, false)?;
                }
                at += len + 1;
            }
            self.evict_owners();
        }
        Ok(())
    }

    /// [`for_each_piece`] of a run.
    pub(super) fn for_each_piece(
        &self,
        addr: BlockAddr,
        len: u32,
        f: impl FnMut(&Arc<Group>, u32, Piece) -> Result<()>,
    ) -> Result<()> {
        let (group, segment, block) = self.locate(addr)?;
        for_each_piece((&group, segment, block), Run { addr, len }, f)
    }

    /// Live records of the node block at `addr`, committed view.
    ///
    /// # Errors
    /// `Corrupt` where `addr` is not of this domain; of the device.
    pub fn live(&self, addr: BlockAddr) -> Result<u8> {
        Ok(self.owner(addr)?.live)
    }

    /// Who uses the block at `addr`, committed view.
    ///
    /// # Errors
    /// As [`Space::live`].
    pub fn owner(&self, addr: BlockAddr) -> Result<Owner> {
        let (group, index, block) = self.locate(addr)?;
        let owner = group.owner(&self.store, &self.owners, index, block);
        self.evict_owners();
        owner
    }
}

/// Calls `f` with the parts of a run, which begins at `at`, segment by segment, after checking all of it.
#[inline]
pub(super) fn for_each_piece(
    (group, first, block): Located<'_>,
    run: Run,
    mut f: impl FnMut(&Arc<Group>, u32, Piece) -> Result<()>,
) -> Result<()> {
    let Run { addr, len } = run;
    let bad = |why: &str| Corrupt::new("block run", format!("{addr} + {len}: {why}"));
    let last = u64::from(first * SEGMENT_BLOCKS + block) + u64::from(len);
    if len == 0 || last > group.segments.len() as u64 * u64::from(SEGMENT_BLOCKS) {
        return Err(bad("is empty or leaves its group").into());
    }
    let fixed = |(index, (from, len)): (u32, Piece)| {
        !bitmap::is_empty(&bitmap::and(&bitmap::mask(from, len), &group.segments[index as usize].fixed))
    };
    let touches = "touches metadata, the journal or the group's end";
    // nearly all of them
    if block + len <= SEGMENT_BLOCKS {
        let piece = (first, (block, len));
        return if fixed(piece) { Err(bad(touches).into()) } else { f(group, piece.0, piece.1) };
    }
    let pieces = || {
        let mut left = len;
        (first..).scan(block, move |at, index| {
            let piece = (*at, (SEGMENT_BLOCKS - *at).min(left));
            (*at, left) = (0, left - piece.1);
            (piece.1 > 0).then_some((index, piece))
        })
    };
    if pieces().any(fixed) {
        return Err(bad(touches).into());
    }
    pieces().try_for_each(|(index, piece)| f(group, index, piece))
}
