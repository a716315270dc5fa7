//! Checks the space of a domain: bitmaps, owners and live counts equal to what is referenced. (Blocks used twice:
//! [`super::shared`].)

use crate::codes;
use crate::model::inodes::{Inodes, addr_of};
use crate::parts::domain::{Domain, Group, Mend};
use crate::report::Log;
use crate::rules::group::{has_owners, owners};
use crate::rules::space::{fixed, in_journal, kind_fits};
use braidfs_format::BlockAddr;
use braidfs_format::geometry::SEGMENT_BLOCKS;
use braidfs_format::group::{OWNERS_PER_BLOCK, Owner, SegmentEntry, SegmentKind, Temperature};
use braidfs_store::Store;

/// A run of blocks in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Claim {
    /// The first block of the run.
    pub addr: BlockAddr,
    /// How many blocks.
    pub len: u32,
    /// Owner of the first; `lblk` counts up.
    pub owner: Owner,
}

impl Claim {
    /// One past the last block.
    pub fn end(&self) -> u64 {
        self.addr.0 + u64::from(self.len)
    }
}

/// The blocks that a domain uses, given group by group.
pub struct Used<'a> {
    inodes: &'a Inodes,
    /// Node blocks and the entries that name each, by address.
    nodes: Vec<(BlockAddr, u32)>,
    /// Extents of the inodes that are whole, by address.
    whole: Vec<Claim>,
}

impl<'a> Used<'a> {
    /// What `domain` uses, whose inodes are among `inodes`.
    pub fn of(domain: &Domain, inodes: &'a Inodes) -> Self {
        let entries = || domain.groups.values().flat_map(|g| g.entries.used());
        let mut addrs: Vec<BlockAddr> = Vec::with_capacity(entries().count());
        addrs.extend(entries().map(|(_, e)| e.addr));
        addrs.sort_unstable();
        let nodes = addrs.chunk_by(|a, b| a == b).map(|c| (c[0], c.len() as u32)).collect();
        let mut whole: Vec<Claim> = Vec::new();
        for (node, ino) in inodes.wholes_of(domain) {
            whole.extend(ino.extents.iter().map(|e| {
                let owner = Owner { node, lblk: e.lblk, ..Owner::default() };
                Claim { addr: e.addr, len: e.len, owner }
            }));
        }
        whole.sort_by_key(|c| (c.addr, c.owner.node));
        Self { inodes, nodes, whole }
    }

    /// What lies in `group`, by address.
    pub fn group(&self, store: &Store, group: u32) -> Vec<Claim> {
        let g = store.geometry();
        let (start, end) = (g.group_start(group), BlockAddr(g.group_start(group).0 + u64::from(g.group_blocks())));
        let nodes = &self.nodes[self.nodes.partition_point(|n| n.0 < start)..];
        let mut out: Vec<Claim> = nodes
            .iter()
            .take_while(|n| n.0 < end)
            .map(|&(addr, n)| {
                let owner = Owner { live: n.min(255) as u8, ..Owner::default() };
                Claim { addr, len: 1, owner }
            })
            .collect();
        out.extend(self.inodes.extents_in(group).map(|h| {
            let owner = Owner { node: h.node, lblk: h.lblk, ..Owner::default() };
            Claim { addr: addr_of(&g, group, h), len: h.len, owner }
        }));
        let whole = &self.whole[self.whole.partition_point(|c| c.addr < start)..];
        out.extend(whole.iter().take_while(|c| c.addr < end));
        out.sort_by_key(|c| (c.addr, c.owner.node));
        out
    }
}

/// What the tables of a group must say of its blocks.
#[derive(Debug)]
pub struct Expected {
    /// Per block: its owner where something refers to it.
    pub owners: Vec<Option<Owner>>,
    /// Per segment: the bitmap.
    pub valid: Vec<[u64; 8]>,
    /// Per segment: blocks of files and directories, and node blocks.
    pub used: Vec<(u32, u32)>,
    /// Per segment: part of the journal lies in it.
    pub journal: Vec<bool>,
}

/// The expected state of `group`; `claims` are what lies in it, by address.
pub fn expected(store: &Store, domain: &Domain, group: &Group, claims: &[Claim]) -> Expected {
    let g = store.geometry();
    let start = g.group_start(group.number).0;
    let total = g.group_blocks();
    let mut e = Expected {
        owners: vec![None; total as usize],
        valid: vec![[0; 8]; g.segments as usize],
        used: vec![(0, 0); g.segments as usize],
        journal: vec![false; g.segments as usize],
    };
    for (i, j) in e.journal.iter_mut().enumerate() {
        *j = in_journal(domain.journal(), g.segment_start(group.number, i as u32).0);
    }
    let mut mark =
        |at: u32| e.valid[(at / SEGMENT_BLOCKS) as usize][(at % SEGMENT_BLOCKS / 64) as usize] |= 1 << (at % 64);
    fixed(g, group.number, group.blocks, domain.journal()).into_iter().flatten().for_each(&mut mark);
    for c in claims {
        for i in 0..c.len {
            let at = (c.addr.0 - start) as u32 + i;
            let Some(slot) = e.owners.get_mut(at as usize) else { break };
            *slot = Some(Owner { lblk: c.owner.lblk + u64::from(i), ..c.owner });
            mark(at);
            let used = &mut e.used[(at / SEGMENT_BLOCKS) as usize];
            if c.owner.node.0 == 0 { used.1 += 1 } else { used.0 += 1 }
        }
    }
    e
}

/// The segment table entry that fits `e`: as it is on the device where that fits.
pub fn segment_entry(e: &Expected, segment: u32, group: &Group, old: Option<&SegmentEntry>) -> SegmentEntry {
    let mut s = old.copied().unwrap_or_default();
    s.valid = e.valid[segment as usize];
    let (data, nodes) = e.used[segment as usize];
    if old.is_none() || !kind_fits(segment, group.blocks, e.used[segment as usize] != (0, 0), s.kind) {
        s.kind = match (data, nodes) {
            _ if segment * SEGMENT_BLOCKS >= group.blocks => SegmentKind::Absent,
            (0, 0) if e.journal[segment as usize] => SegmentKind::Journal,
            (0, 0) if s.valid == [0; 8] => SegmentKind::Free,
            (d, n) if d > n => SegmentKind::Data,
            _ => SegmentKind::Node,
        };
        s.temperature = if s.kind == SegmentKind::Data { Temperature::Warm } else { Temperature::Hot };
    }
    s
}

/// Checks the segment table and owner tables of all groups against what is referenced.
pub fn check(store: &Store, log: &mut Log, domain: &mut Domain, inodes: &Inodes) {
    let used = Used::of(domain, inodes);
    let mut mends: Vec<(u32, Vec<Mend>)> = Vec::new();
    for group in domain.groups.values() {
        let e = expected(store, domain, group, &used.group(store, group.number));
        if let Some(segments) = &group.segments {
            for (i, s) in segments.iter().enumerate() {
                check_segment(log, group, &e, (i as u32, s), domain.doubted.contains(&group.number));
            }
        }
        let mut mend = Vec::new();
        for half in 0..2 * store.geometry().segments {
            check_owners(store, log, &mut mend, group, &e, (half, domain.doubted.contains(&group.number)));
        }
        mends.push((group.number, mend));
    }
    for (number, mend) in mends {
        if let Some(g) = domain.groups.get_mut(&number) {
            g.mend.extend(mend);
        }
    }
}

/// `doubted`: blocks that are not used are valid since we took them for valid.
fn check_segment(log: &mut Log, group: &Group, e: &Expected, (segment, s): (u32, &SegmentEntry), doubted: bool) {
    let at = format!("segment {segment} of group {}", group.number);
    let (mut leaked, mut missing) = (0, 0);
    for (is, should) in s.valid.iter().zip(&e.valid[segment as usize]) {
        leaked += (is & !should).count_ones();
        missing += (should & !is).count_ones();
    }
    if leaked > 0 && !doubted {
        log.add(codes::LEAKED, None, format!("{at}: {leaked} blocks are marked valid and not used"));
    }
    if missing > 0 {
        log.add(codes::NOT_MARKED, None, format!("{at}: {missing} blocks in use are not marked valid"));
    }
    if !kind_fits(segment, group.blocks, e.used[segment as usize] != (0, 0), s.kind) {
        let (data, nodes) = e.used[segment as usize];
        let why = format!("{at} is of kind {:?} with {data} data blocks and {nodes} node blocks", s.kind);
        log.add(codes::SEGMENT_KIND, None, why);
    }
}

/// `doubted`: a count of none is one that was lost.
fn check_owners(
    store: &Store,
    log: &mut Log,
    mend: &mut Vec<Mend>,
    group: &Group,
    e: &Expected,
    (half, doubted): (u32, bool),
) {
    let g = store.geometry();
    if !has_owners(group, half) {
        return;
    }
    let pair = log.read(store, g.owners_addr(group.number, half / 2, half % 2), 2);
    let Some(table) = owners(store, log, mend, group, half, &pair).owners else { return };
    let first = half * OWNERS_PER_BLOCK;
    let (mut wrong, mut example) = (0, None);
    for (i, is) in table.iter().enumerate() {
        let Some(should) = e.owners.get(first as usize + i).copied().flatten() else { continue };
        if is.node != should.node || should.node.0 != 0 && is.lblk != should.lblk {
            wrong += 1;
            example.get_or_insert((first as usize + i, is.node, should.node));
        } else if should.node.0 == 0 && is.live != should.live && !(doubted && is.live == 0) {
            let at = g.group_start(group.number).0 + u64::from(first) + i as u64;
            let why = format!("node block {at} counts {} live records, has {}", is.live, should.live);
            log.add(codes::LIVE_COUNT, None, why);
        }
    }
    if let Some((at, is, should)) = example {
        let why = format!(
            "owner table {half} of group {}: {wrong} blocks have a wrong owner (block {at} of it: {is}, not {should})",
            group.number
        );
        log.add(codes::OWNER, Some(should.node()).filter(|n| n.0 != 0), why);
    }
}
