//! Blocks that several inodes of a domain claim, or that an old record claims and others have by now: who keeps them.
//!
//! A forged file may name the same blocks in each of millions of extents. So an owner table is read once for all claims of its
//! group, and of an inode all holes are made at once.

use super::space::{Claim, Used};
use crate::codes;
use crate::model::inodes::{Inodes, addr_of};
use crate::parts::domain::{Domain, Group};
use crate::report::Log;
use braidfs_device::BLOCK_BYTES;
use braidfs_format::group::{OWNERS_PER_BLOCK, Owner, decode_owners};
use braidfs_format::{BlockAddr, Geometry, InodeNo};
use braidfs_store::Store;
use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap, HashMap, HashSet};
use std::ops::Range;

/// What the owner tables of the device say. Those of the group that was asked for last are kept.
struct OnDevice<'a> {
    store: &'a Store,
    group: Option<u32>,
    /// By the place of the pair; `None` where it cannot be read.
    tables: HashMap<BlockAddr, Option<Vec<Owner>>>,
}

impl<'a> OnDevice<'a> {
    fn new(store: &'a Store) -> Self {
        Self { store, group: None, tables: HashMap::new() }
    }

    /// The owner of the block at `addr`; `None` where its table cannot be read.
    fn owner(&mut self, addr: BlockAddr) -> Option<Owner> {
        let (group, segment, block) = self.store.geometry().split(addr);
        if self.group.replace(group) != Some(group) {
            self.tables.clear();
        }
        let pair = self.store.geometry().owners_addr(group, segment, block / OWNERS_PER_BLOCK);
        let read = || {
            let mut buf = vec![0u8; 2 * BLOCK_BYTES];
            self.store.read(pair, &mut buf).ok()?;
            decode_owners(&buf, self.store.volume, pair).ok().map(|(_, _, owners)| owners)
        };
        let table = self.tables.entry(pair).or_insert_with(read).as_ref()?;
        table.get((block % OWNERS_PER_BLOCK) as usize).copied()
    }
}

/// Logical blocks of inodes, to be taken from them.
type Holes = Vec<(InodeNo, Range<u64>)>;

/// Makes `holes`. What cannot be read again is noted, and ends the check.
fn punch(store: &Store, domain: &Domain, inodes: &mut Inodes, mut holes: Holes) {
    holes.sort_unstable_by_key(|(node, h)| (*node, h.start));
    for of_one in holes.chunk_by(|a, b| a.0 == b.0) {
        let Some(ino) = inodes.body(store, domain, of_one[0].0, false) else { return };
        ino.punch(of_one.iter().map(|h| h.1.clone()));
        ino.inode.blocks = ino.extent_blocks();
    }
}

/// Finds blocks used twice. The one that the owner table names keeps them (node blocks always); the others get a hole.
pub fn resolve_shared(store: &Store, log: &mut Log, domain: &Domain, inodes: &mut Inodes) {
    let used = Used::of(domain, inodes);
    let mut on_device = OnDevice::new(store);
    let mut holes = Holes::new();
    for group in domain.groups.keys() {
        let claims = used.group(store, *group);
        let mut rest = claims.as_slice();
        while let Some(first) = rest.first() {
            let (mut end, mut n) = (first.end(), 1);
            while let Some(c) = rest.get(n).filter(|c| c.addr.0 < end) {
                (end, n) = (end.max(c.end()), n + 1);
            }
            let (some, later) = rest.split_at(n);
            if n > 1 {
                share(&mut on_device, log, some, &mut holes);
            }
            rest = later;
        }
    }
    punch(store, domain, inodes, holes);
}

/// Gives each block of `claims`, which are sorted by address and overlap, to one of them; what the others lose goes to `holes`.
fn share(on_device: &mut OnDevice<'_>, log: &mut Log, claims: &[Claim], holes: &mut Holes) {
    let won = winners(on_device, claims);
    let mut by_claim: Vec<usize> = (0..won.len()).collect();
    by_claim.sort_by_key(|&i| won[i].0);
    let mut mine = by_claim.into_iter().peekable();
    for (index, c) in claims.iter().enumerate() {
        let mut lose = |from: u64, to: u64| {
            if from >= to {
                return;
            }
            let at = won.partition_point(|w| w.1.end <= from);
            let winner = won.get(at).map_or(InodeNo(0), |w| claims[w.0].owner.node);
            let by = if winner.0 == 0 { "a node block".into() } else { winner.to_string() };
            let why = format!("{} blocks at block {from} are also used by {by}", to - from);
            log.add(codes::BLOCK_SHARED, Some(c.owner.node.node()), why);
            let lblk = |addr: u64| c.owner.lblk + (addr - c.addr.0);
            holes.push((c.owner.node, lblk(from)..lblk(to)));
        };
        let mut from = c.addr.0;
        while let Some(i) = mine.next_if(|i| won[*i].0 == index) {
            lose(from, won[i].1.start);
            from = won[i].1.end;
        }
        lose(from, c.end());
    }
}

/// Runs of blocks by address, and which of `claims` keeps each. The owner table is asked for the first block of what the
/// same claims share.
fn winners(on_device: &mut OnDevice<'_>, claims: &[Claim]) -> Vec<(usize, Range<u64>)> {
    let mut bounds: Vec<u64> = claims.iter().flat_map(|c| [c.addr.0, c.end()]).collect();
    bounds.sort_unstable();
    bounds.dedup();
    let mut out: Vec<(usize, Range<u64>)> = Vec::new();
    // owner, where its logical block 0 would lie, index: of all that have the block
    let mut open: BTreeSet<(InodeNo, u64, usize)> = BTreeSet::new();
    let key = |i: usize| (claims[i].owner.node, claims[i].addr.0.wrapping_sub(claims[i].owner.lblk), i);
    let mut in_order: BTreeSet<usize> = BTreeSet::new();
    let mut ends: BinaryHeap<Reverse<(u64, usize)>> = BinaryHeap::new();
    let mut next = 0;
    for bound in bounds.windows(2) {
        while let Some(Reverse((_, i))) = ends.peek().filter(|e| e.0.0 <= bound[0]).copied() {
            ends.pop();
            open.remove(&key(i));
            in_order.remove(&i);
        }
        while claims.get(next).is_some_and(|c| c.addr.0 <= bound[0]) {
            open.insert(key(next));
            in_order.insert(next);
            ends.push(Reverse((claims[next].end(), next)));
            next += 1;
        }
        let first = open.first().copied();
        let mut asked = || {
            let is = on_device.owner(BlockAddr(bound[0]))?;
            let exact = (is.node, bound[0].wrapping_sub(is.lblk));
            let right = open.range((exact.0, exact.1, 0)..).next().filter(|o| (o.0, o.1) == exact);
            right.or_else(|| open.range((is.node, 0, 0)..).next().filter(|o| o.0 == is.node)).map(|o| o.2)
        };
        let winner = match first {
            Some((InodeNo(0), _, i)) => Some(i),
            Some((.., i)) if open.len() == 1 => Some(i),
            _ => asked().or_else(|| in_order.first().copied()),
        };
        let Some(winner) = winner else { continue };
        match out.last_mut() {
            Some((w, run)) if *w == winner && run.end == bound[0] => run.end = bound[1],
            _ => out.push((winner, bound[0]..bound[1])),
        }
    }
    out
}

/// Blocks that an inode names: the place of the first, whose, its logical block, and how many.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Named {
    addr: u64,
    node: InodeNo,
    lblk: u64,
    len: u32,
}

impl Named {
    fn end(&self) -> u64 {
        self.addr + u64::from(self.len)
    }
    /// Whose the blocks are, and where logical block 0 would lie.
    fn key(&self) -> (InodeNo, u64) {
        (self.node, self.addr.wrapping_sub(self.lblk))
    }
}

/// Whose blocks of a group are, by its tables: each was asked for once, however often it is named.
#[derive(Debug, Default)]
struct Given {
    /// By owner and where its logical block 0 would lie: runs that rise.
    runs: HashMap<(InodeNo, u64), Vec<Range<u64>>>,
    /// Runs of which nothing can be read: whoever names them has them.
    unread: Vec<Range<u64>>,
}

impl Given {
    /// Of the blocks of `group` that `named`, which is sorted, names.
    fn read(g: &Geometry, on_device: &mut OnDevice<'_>, group: &Group, named: &[Named]) -> Self {
        let mut given = Self::default();
        let mut at = 0;
        for n in named {
            for addr in at.max(n.addr)..n.end() {
                given.block(g, on_device, group, addr);
            }
            at = at.max(n.end());
        }
        given
    }

    fn block(&mut self, g: &Geometry, on_device: &mut OnDevice<'_>, group: &Group, addr: u64) {
        let (_, segment, block) = g.split(BlockAddr(addr));
        let table = group.segments.as_ref().filter(|_| !group.segments_doubtful);
        if table.and_then(|t| t.get(segment as usize)).is_some_and(|s| !s.is_valid(block)) {
            return;
        }
        let runs = match on_device.owner(BlockAddr(addr)) {
            Some(o) => self.runs.entry((o.node, addr.wrapping_sub(o.lblk))).or_default(),
            None => &mut self.unread,
        };
        match runs.last_mut() {
            Some(run) if run.end == addr => run.end += 1,
            _ => runs.push(addr..addr + 1),
        }
    }

    /// Adds what of `n` is not its inode's to `holes`. Extents of an inode do not overlap: so runs of one key are looked at once.
    fn missing(&self, n: &Named, holes: &mut Holes) {
        let of = |runs: &'_ [Range<u64>]| {
            let first = runs.partition_point(|r| r.end <= n.addr);
            runs[first..].iter().take_while(|r| r.start < n.end()).cloned().collect::<Vec<_>>()
        };
        let mut has = self.runs.get(&n.key()).map_or_else(Vec::new, |runs| of(runs));
        has.append(&mut of(&self.unread));
        has.sort_unstable_by_key(|r| r.start);
        let mut at = n.addr;
        for run in has.into_iter().chain(std::iter::once(n.end()..n.end())) {
            if run.start > at {
                let lblk = |addr: u64| n.lblk + (addr - n.addr);
                holes.push((n.node, lblk(at)..lblk(run.start)));
            }
            at = at.max(run.end);
        }
    }
}

/// Takes blocks from inodes whose records were found again, and from those that `adopted` extent leaves, that the tables do
/// not give them: the record was an older one, and what lies there now may be anybody's.
pub fn drop_old_blocks(store: &Store, log: &mut Log, domain: &Domain, adopted: &HashSet<InodeNo>, inodes: &mut Inodes) {
    if domain.recovered.is_empty() && adopted.is_empty() {
        return;
    }
    let doubted = |node: InodeNo| domain.recovered.contains(&node.node()) || adopted.contains(&node);
    let mut whole: Vec<Named> = Vec::new();
    for (node, ino) in inodes.wholes_of(domain).filter(|(n, _)| doubted(*n)) {
        whole.extend(ino.extents.iter().map(|e| Named { addr: e.addr.0, node, lblk: e.lblk, len: e.len }));
    }
    whole.sort_unstable();
    let g = store.geometry();
    let mut on_device = OnDevice::new(store);
    let mut holes = Holes::new();
    for (number, group) in &domain.groups {
        let start = g.group_start(*number).0;
        let end = start + u64::from(g.group_blocks());
        let found = inodes.extents_in(*number).filter(|h| doubted(h.node));
        let mut named: Vec<Named> =
            found.map(|h| Named { addr: addr_of(&g, *number, h).0, node: h.node, lblk: h.lblk, len: h.len }).collect();
        let from = whole.partition_point(|n| n.addr < start);
        named.extend(whole[from..].iter().take_while(|n| n.addr < end));
        named.sort_unstable();
        let given = Given::read(&g, &mut on_device, group, &named);
        named.iter().for_each(|n| given.missing(n, &mut holes));
    }
    holes.sort_unstable_by_key(|(node, h)| (*node, h.start));
    for of_one in holes.chunk_by(|a, b| a.0 == b.0) {
        let blocks: u64 = of_one.iter().map(|(_, h)| h.end - h.start).sum();
        let why = format!("{blocks} blocks of an older version now belong to others: holes");
        log.add(codes::EXTENT_OLD, Some(of_one[0].0.node()), why);
    }
    punch(store, domain, inodes, holes);
}
