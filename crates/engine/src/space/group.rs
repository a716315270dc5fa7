//! One group in memory: the state of its segments, and its owner tables as far as they are loaded.

use super::PairsAhead;
use super::bitmap::{self, Bits};
use super::paired::{Counts, PairCopy, Paired, Place, Residency};
use super::run::{Class, Run};
use crate::error::Result;
use crate::planted::{Bug, planted};
use crate::store::Store;
use braidfs_format::geometry::SEGMENT_BLOCKS;
use braidfs_format::group::{GroupHeader, OWNERS_PER_BLOCK, Owner, SegmentEntry, SegmentKind, SegmentTable, claim_seq};
use braidfs_format::{BLOCK_BYTES, BlockAddr, Corrupt, DomainId, TxId};
use braidfs_sync::{Mutex, rank};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};

/// Looks at which segments are active, before all are counted.
const LOOKS: usize = 3;

/// Groups whose emptying has ended without a word, by a panic.
pub(super) type Abandoned = Arc<braidfs_sync::plain::Mutex<Vec<Arc<Group>>>>;

/// A group of the domain.
#[derive(Debug)]
pub(super) struct Group {
    pub number: u32,
    /// Of the claim by which the domain has it.
    pub epoch: u32,
    pub segments: Box<[Segment]>,
    /// Data blocks that nothing uses, but for those of segments in `active`: these are counted in the segments alone, so that
    /// logs which write to segments of one group do not write to one line for each block.
    idle: AtomicU32,
    /// Bit `i`: some mlog writes to segment `i`. Changes under the lock of that segment's state.
    active: AtomicU32,
    /// Blocks that can be allocated at all.
    total_blocks: u32,
    /// Which copy of the segment table is current.
    pub table: Mutex<PairCopy, rank::SegmentTable>,
    /// How often the other tables were written.
    pub counts: Arc<Counts>,
    /// The committed view changed since the segment table was written.
    pub table_dirty: AtomicBool,
    /// Some half of an owner table changed.
    pub owners_dirty: AtomicBool,
    /// Nothing is allocated in it any more. Read under a segment's lock, so that whoever sets it and then looks at each
    /// segment knows what there is.
    closed: AtomicBool,
}

/// A segment of it. Logs write to segments side by side: no line is of two.
#[derive(Debug)]
#[repr(align(64))]
pub(super) struct Segment {
    pub start: BlockAddr,
    /// Blocks that are never allocated.
    pub fixed: Bits,
    pub fixed_count: u32,
    /// Holds blocks of the journal: keeps the kind `Journal`.
    journal: bool,
    /// Unused blocks; changes under the lock of `state`.
    free: AtomicU32,
    pub state: Mutex<SegmentState, rank::Segment>,
    owners: [Mutex<Paired<Owner>, rank::Owners>; 2],
}

/// What a segment's lock protects.
#[derive(Debug)]
pub(super) struct SegmentState {
    /// The running view.
    pub used: Bits,
    /// The committed view.
    pub entry: SegmentEntry,
    /// What the log that has it, or had it last, is for.
    pub kind: SegmentKind,
    /// Some mlog writes to it.
    pub active: bool,
    /// Its unused blocks are being discarded: none may be taken.
    pub discarding: bool,
    /// Its group is being emptied: unused blocks are none of the account's.
    pub withheld: bool,
    /// The cleaner could move none of so many valid blocks, as of this transaction.
    pub stays: Option<(u32, TxId)>,
    /// Where its log goes on.
    cursor: u32,
}

impl Group {
    /// Reads header and segment table: its newest copy that is not of a checkpoint after `upto`. `None` where that says
    /// that the domain has given the group back.
    pub fn open(store: &Store, domain: DomainId, number: u32, journal: Option<Run>, upto: u64) -> Result<Option<Self>> {
        let geometry = store.geometry();
        let bad = |why: String| Corrupt::new("group header", format!("of group {number}: {why}"));
        if number >= geometry.groups {
            return Err(bad(format!("the volume has {} groups", geometry.groups)).into());
        }
        let mut buf = vec![0u8; 4 * BLOCK_BYTES];
        store.read(geometry.header_addr(number), &mut buf)?;
        let (_, _, header) =
            GroupHeader::from_pair(&buf[..2 * BLOCK_BYTES], store.volume, geometry.header_addr(number))?;
        let (owner, blocks) = (header.domain.get(), header.blocks.get());
        if header.group.get() != number || owner != domain.0 {
            return Err(bad(format!("says group {} of domain {owner}, not {domain}", header.group.get())).into());
        }
        if blocks <= geometry.meta_blocks() || blocks > store.group_blocks(number) {
            return Err(bad(format!("{blocks} blocks of {}", store.group_blocks(number))).into());
        }
        let table = SegmentTable::decode_upto(
            &buf[2 * BLOCK_BYTES..],
            geometry.segments,
            store.volume,
            geometry.segment_table_addr(number),
            upto,
        )?;
        let epoch = header.epoch.get();
        if table.seq == claim_seq(epoch.wrapping_add(1)) {
            return Ok(None);
        }
        let counts = Arc::new(Counts::new(&table));
        let start = geometry.group_start(number).0;
        let journal = journal.map_or(0..0, |j| {
            let clip = |at: u64| at.saturating_sub(start).min(u64::from(blocks)) as u32;
            clip(j.addr.0)..clip(j.addr.0.saturating_add(u64::from(j.len)))
        });
        let mut segments = Vec::with_capacity(table.entries.len());
        for (i, entry) in (0..).zip(table.entries) {
            let first = i * SEGMENT_BLOCKS;
            if (entry.kind == SegmentKind::Absent) != (first >= blocks) {
                return Err(
                    Corrupt::new("segment table", format!("group {number}: segment {i} is {:?}", entry.kind)).into()
                );
            }
            let fixed = bitmap::fixed_mask(first, geometry.meta_blocks(), blocks, &journal);
            let overlaps = journal.start < first + SEGMENT_BLOCKS && journal.end > first && !journal.is_empty();
            segments.push(Segment::new(geometry.segment_start(number, i), entry, fixed, overlaps));
        }
        let idle = segments.iter().map(Segment::free).sum();
        let total_blocks = segments.iter().map(Segment::total).sum();
        Ok(Some(Self {
            number,
            epoch,
            segments: segments.into(),
            idle: AtomicU32::new(idle),
            active: AtomicU32::new(0),
            total_blocks,
            table: Mutex::new(PairCopy { index: table.copy, seq: table.seq }),
            counts,
            // what a checkpoint left that did not end must not look like one that did
            table_dirty: AtomicBool::new(table.unfinished),
            owners_dirty: AtomicBool::new(false),
            closed: AtomicBool::new(false),
        }))
    }

    /// Data blocks that nothing uses. Takes no lock: where a log takes or leaves a segment meanwhile, a hint.
    pub fn free(&self) -> u32 {
        let mut active = self.active.load(Acquire);
        for _ in 0..LOOKS {
            let idle = self.idle.load(Acquire);
            let of = |i: &usize| active >> i & 1 == 1;
            let free = (0..self.segments.len()).filter(of).map(|i| self.segments[i].free()).sum::<u32>() + idle;
            let now = self.active.load(Acquire);
            if now == active {
                return free;
            }
            active = now;
        }
        self.segments.iter().map(Segment::free).sum()
    }
    /// Blocks that can be allocated at all.
    pub fn total(&self) -> u32 {
        self.total_blocks
    }
    /// Blocks of these that something uses, as [`Self::free`] knows it.
    pub fn used(&self) -> u32 {
        self.total_blocks - self.free().min(self.total_blocks)
    }
    /// Makes segment `index` active for `class` where it is not yet and `ok` holds.
    pub fn activate(&self, index: u32, class: Class, ok: impl FnOnce(&Segment) -> bool) -> bool {
        let segment = &self.segments[index as usize];
        let mut state = segment.state.lock();
        if state.active || state.discarding || !ok(segment) {
            return false;
        }
        (state.active, state.cursor) = (true, 0);
        state.kind = class.kind;
        self.active.fetch_or(1 << index, Release);
        self.idle.fetch_sub(segment.free(), Release);
        true
    }
    /// No log writes to segment `index` any more.
    pub fn leave(&self, index: u32) {
        let segment = &self.segments[index as usize];
        let mut state = segment.state.lock();
        if std::mem::take(&mut state.active) {
            self.idle.fetch_add(segment.free(), Release);
            self.active.fetch_and(!(1 << index), Release);
        }
    }

    /// Whether no block is used that could be unused, and the journal lies elsewhere. Takes no lock: a hint.
    pub fn is_empty(&self) -> bool {
        self.free() == self.total_blocks && !self.segments.iter().any(|s| s.journal)
    }
    /// Whether nothing is allocated in it any more.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Relaxed)
    }
    /// Nothing is allocated in it from now on (`true`), where it is empty; whether it was, and nobody else had done so.
    pub fn close(&self) -> bool {
        if self.closed.swap(true, Relaxed) {
            return false;
        }
        let unused = |s: &Segment| s.state.lock().used == s.fixed;
        if self.is_empty() && self.segments.iter().all(unused) {
            return true;
        }
        self.reopen();
        false
    }
    /// Nothing is allocated in it from now on, whatever it holds, and what becomes unused is withheld from the account. Blocks
    /// that were unused before, which the account has still. `None` where somebody else has stopped or closed it.
    pub fn stop(&self) -> Option<i64> {
        if self.closed.swap(true, Relaxed) {
            return None;
        }
        // who is about to take a block has done so when its segment's lock is free
        Some(self.withhold(true))
    }
    /// Undoes [`Self::stop`]; blocks that are unused now, which the account has not.
    pub fn go_on(&self) -> i64 {
        let unused = self.withhold(false);
        self.reopen();
        unused
    }
    fn withhold(&self, withheld: bool) -> i64 {
        let one = |s: &Segment| {
            let mut state = s.state.lock();
            state.withheld = withheld;
            i64::from(s.free())
        };
        self.segments.iter().map(one).sum()
    }
    /// Whether a stopped group holds nothing.
    pub fn is_emptied(&self) -> bool {
        self.is_closed() && self.is_empty() && self.segments.iter().all(|s| s.state.lock().used == s.fixed)
    }
    /// Whether what it holds are `max` blocks at most, all of them node blocks and directory buckets.
    pub fn is_sparse(&self, max: u32) -> bool {
        let nodes = |s: &Segment| s.free() == s.total() || s.state.lock().entry.kind == SegmentKind::Node;
        (1..=max).contains(&self.used()) && !self.segments.iter().any(|s| s.journal) && self.segments.iter().all(nodes)
    }
    /// Gives blocks again, after [`Self::close`].
    pub fn reopen(&self) {
        self.closed.store(false, Relaxed);
    }

    /// Takes up to `want` consecutive blocks of segment `index`: the first run from the cursor on that has `enough`,
    /// or where `enough` is 0 the longest.
    pub fn take(&self, index: u32, want: u32, enough: u32) -> Option<Run> {
        let segment = &self.segments[index as usize];
        if segment.free() == 0 {
            return None;
        }
        let mut state = segment.state.lock();
        if state.discarding || self.is_closed() {
            return None;
        }
        let found = match enough {
            0 => bitmap::longest_run(&state.used),
            // the first run, so that freed blocks are met soon
            n if planted(Bug::FreedReused) || planted(Bug::MovedFreedEarly) => bitmap::find_run(&state.used, 0, n),
            n => bitmap::find_run(&state.used, state.cursor, n),
        };
        let (at, len) = found?;
        Some(self.mark(segment, &mut state, at, len.min(want)))
    }

    /// Takes up to `want` blocks from block `at` of segment `index` on, where it is unused.
    pub fn take_at(&self, index: u32, at: u32, want: u32) -> Option<Run> {
        let segment = &self.segments[index as usize];
        let mut state = segment.state.lock();
        let len = bitmap::clear_len(&state.used, at).min(want);
        (len > 0 && !state.discarding && !self.is_closed()).then(|| self.mark(segment, &mut state, at, len))
    }

    fn mark(&self, segment: &Segment, state: &mut SegmentState, at: u32, len: u32) -> Run {
        let new = self.set_used(segment, state, &bitmap::mask(at, len));
        debug_assert_eq!(new, len);
        state.cursor = at + len;
        Run { addr: BlockAddr(segment.start.0 + u64::from(at)), len }
    }

    /// Marks blocks used; how many were not.
    pub fn set_used(&self, segment: &Segment, state: &mut SegmentState, bits: &Bits) -> u32 {
        let new = bitmap::count(&bitmap::and_not(bits, &state.used));
        bitmap::or(&mut state.used, bits);
        segment.free.fetch_sub(new, Relaxed);
        if !state.active {
            self.idle.fetch_sub(new, Relaxed);
        }
        new
    }

    /// Marks blocks unused; how many were used, which are the account's where they are not `withheld`.
    pub fn clear_used(&self, segment: &Segment, state: &mut SegmentState, bits: &Bits) -> u32 {
        let old = bitmap::count(&bitmap::and(bits, &state.used));
        bitmap::clear(&mut state.used, bits);
        segment.free.fetch_add(old, Relaxed);
        if !state.active {
            self.idle.fetch_add(old, Relaxed);
        }
        old
    }

    /// Changes the owners of blocks `from .. from + len` of segment `index`; `f` gets the block's number in the segment.
    pub fn edit_owners(
        &self,
        store: &Store,
        resident: &Residency,
        index: u32,
        (from, len): (u32, u32),
        f: &mut dyn FnMut(u32, &mut Owner),
    ) -> Result<()> {
        let (mut at, end) = (from, from + len);
        while at < end {
            let half = at / OWNERS_PER_BLOCK;
            let stop = end.min((half + 1) * OWNERS_PER_BLOCK);
            let mut table = self.segments[index as usize].owners[half as usize].lock();
            let owners = table.edit(store, self.owners_place(store, index, half), resident)?;
            for i in at..stop {
                f(i, &mut owners[(i % OWNERS_PER_BLOCK) as usize]);
            }
            // Under the lock: a writer of the home tables that clears the flag first still sees the change.
            self.owners_dirty.store(true, Relaxed);
            at = stop;
        }
        Ok(())
    }

    /// Takes half `half` of the owner table of segment `index` from what `ahead` has read, or reads, where it can.
    pub fn fill_owners_ahead(
        &self,
        store: &Store,
        resident: &Residency,
        (index, half): (u32, u32),
        ahead: &mut PairsAhead,
    ) {
        let mut table = self.segments[index as usize].owners[half as usize].lock();
        if table.is_loaded() {
            return;
        }
        let place = self.owners_place(store, index, half);
        let end = store.geometry().node_table_addr(self.number, 0);
        if let Some(pair) = ahead.pair(store, place.pair, end) {
            // what does not hold is read again, and told of then
            let _ = table.fill(pair, store.volume, place, resident);
        }
    }

    /// The owner of block `block` of segment `index`.
    pub fn owner(&self, store: &Store, resident: &Residency, index: u32, block: u32) -> Result<Owner> {
        let half = block / OWNERS_PER_BLOCK;
        let mut table = self.segments[index as usize].owners[half as usize].lock();
        Ok(table.load(store, self.owners_place(store, index, half), resident)?[(block % OWNERS_PER_BLOCK) as usize])
    }

    /// Where half `half` of the owner table of segment `index` lies.
    fn owners_place(&self, store: &Store, index: u32, half: u32) -> Place<'_> {
        let g = store.geometry();
        Place {
            pair: g.owners_addr(self.number, index, half),
            counts: &self.counts,
            index: g.owners_index(index, half),
        }
    }

    /// The write of half an owner table ended: see [`Paired::end_write`].
    pub fn end_owner_write(&self, index: u32, half: u32, written: Option<PairCopy>) {
        self.segments[index as usize].owners[half as usize].lock().end_write(written);
    }

    /// All halves of owner tables: segment, half, table.
    pub fn owner_tables(&self) -> impl Iterator<Item = (u32, u32, &Mutex<Paired<Owner>, rank::Owners>)> {
        (0u32..).zip(&self.segments).flat_map(|(s, seg)| (0u32..).zip(&seg.owners).map(move |(h, t)| (s, h, t)))
    }
}

impl Segment {
    fn new(start: BlockAddr, mut entry: SegmentEntry, fixed: Bits, journal: bool) -> Self {
        bitmap::or(&mut entry.valid, &fixed);
        let free = SEGMENT_BLOCKS - bitmap::count(&entry.valid);
        let state = SegmentState {
            used: entry.valid,
            kind: entry.kind,
            active: false,
            discarding: false,
            withheld: false,
            stays: None,
            cursor: 0,
            entry,
        };
        Self {
            start,
            fixed_count: bitmap::count(&fixed),
            fixed,
            journal,
            free: AtomicU32::new(free),
            state: Mutex::new(state),
            owners: Default::default(),
        }
    }
    /// Data blocks that nothing uses.
    pub fn free(&self) -> u32 {
        self.free.load(Relaxed)
    }
    /// Blocks that can be allocated at all.
    pub fn total(&self) -> u32 {
        SEGMENT_BLOCKS - self.fixed_count
    }
    /// Whether no block is used that could be unused.
    pub fn is_fresh(&self) -> bool {
        self.total() > 0 && self.free() == self.total()
    }
    /// None of its valid blocks, so many, could be moved as of a transaction.
    pub fn note_stays(&self, valid: u32, now: TxId) {
        self.state.lock().stays = Some((valid, now));
    }
    /// The kind of the segment after an allocation of `kind`.
    pub fn kind_after(&self, kind: SegmentKind) -> SegmentKind {
        if self.journal { SegmentKind::Journal } else { kind }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Space;
    use super::super::testdev::store;
    use super::*;
    use braidfs_format::group::Temperature;

    const D: DomainId = DomainId(0);
    const WARM: Class = Class { kind: SegmentKind::Data, temperature: Temperature::Warm };

    /// What two logs take and commits free in their segments writes to no line of the group, and is not forgotten there.
    #[test]
    fn logs_that_write_to_one_group_count_in_their_segments() {
        let (_, store) = store(4, 1, 2048);
        Space::init_group(&store, D, 0, 1, None).unwrap();
        let group = Group::open(&store, D, 0, None, u64::MAX).unwrap().unwrap();
        let total = group.total();
        assert!(group.is_empty() && group.activate(1, WARM, |_| true) && group.activate(3, WARM, |_| true));
        assert!(!group.activate(3, WARM, |_| true), "two logs have it");
        assert!(group.is_empty());
        let idle = || group.idle.load(Relaxed);
        let before = idle();
        for _ in 0..50 {
            assert_eq!(group.take(1, 3, 1).map(|r| r.len), Some(3));
            assert_eq!(group.take(3, 2, 1).map(|r| r.len), Some(2));
        }
        let segment = &group.segments[1];
        let freed = group.clear_used(segment, &mut segment.state.lock(), &bitmap::mask(0, 30));
        assert_eq!(freed, 30);
        assert_eq!(idle(), before, "a block of a log's segment was counted in the group");
        assert_eq!(group.free(), total - 250 + 30);
        for index in [1, 3, 3] {
            group.leave(index);
            assert_eq!(group.free(), total - 250 + 30);
        }
        assert_eq!(idle(), total - 250 + 30);
        // nobody's segment
        let freed = group.clear_used(segment, &mut segment.state.lock(), &bitmap::mask(30, 120));
        assert_eq!((freed, group.free(), idle()), (120, total - 100, total - 100));
    }

    #[test]
    fn no_line_is_of_two_segments() {
        assert_eq!((align_of::<Segment>(), size_of::<Segment>() % 64), (64, 0));
    }
}
