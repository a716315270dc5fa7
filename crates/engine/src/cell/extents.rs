//! The extent map: where the blocks of one file or directory lie.
//!
//! Owns the mapping from logical blocks to runs on disk, cut into leaves of which each is one overflow node
//! once the map no longer fits into the inode record (see [`ExtentMap::layout`]).
//!
//! Invariants
//! - Extents rise by logical block and never overlap; no leaf is empty.
//! - The first leaf begins at 0; a leaf owns `[first, first of the next)` and its extents lie wholly in it.
//! - An encoded leaf fits a node record.
//! - `blocks` and `count` are the sums over all extents.
//!
//! Not promised: that the map is the shortest possible. Extents that continue each other over a leaf's
//! border may stay apart. No locks, no I/O.

mod layout;
#[cfg(test)]
mod tests;

pub use layout::Layout;

use braidfs_format::inode::{EXTENT_MAX, Extent, LBLK_MAX, LEAF_REFS_MAX, LeafRef};
use braidfs_format::node::PAYLOAD_MAX;
use braidfs_format::{BlockAddr, Corrupt, NodeId};
use std::collections::HashSet;

/// Most blocks of an extent that carries checksums, so that a leaf always holds several extents.
pub const SUMMED_EXTENT_MAX: u32 = 256;

/// Encoded bytes of an extent without its checksums.
const EXTENT_FIXED_BYTES: usize = 16;

/// A part of an extent, as a look-up answers it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// First logical block.
    pub lblk: u64,
    /// Where that block lies.
    pub addr: BlockAddr,
    /// Blocks to the end of the extent.
    pub len: u32,
    /// Reads as zeros.
    pub unwritten: bool,
    /// Checksum of the first block.
    pub sum: Option<u32>,
}

impl Piece {
    /// The part of `e` from `lblk` on, which lies in it.
    fn of(e: &Extent, lblk: u64) -> Self {
        let skip = lblk - e.lblk;
        Self {
            lblk,
            addr: BlockAddr(e.addr.0 + skip),
            len: e.len - skip as u32,
            unwritten: e.unwritten,
            sum: e.sums.as_ref().and_then(|s| s.get(skip as usize).copied()),
        }
    }
}

/// Sizes at which the tree splits. Only tests use others than the format's.
#[derive(Debug, Clone, Copy)]
struct Limits {
    leaf_bytes: u16,
    summed_blocks: u16,
    refs: u16,
}

impl Limits {
    const FORMAT: Self =
        Self { leaf_bytes: PAYLOAD_MAX as u16, summed_blocks: SUMMED_EXTENT_MAX as u16, refs: LEAF_REFS_MAX as u16 };
}

#[derive(Debug, Clone)]
struct Leaf {
    first: u64,
    /// `None`: never laid out as a node.
    node: Option<NodeId>,
    /// The node's content is not what `extents` says.
    dirty: bool,
    extents: Vec<Extent>,
    /// Encoded length of `extents`.
    bytes: usize,
}

/// An index node of a tree of depth 2, as it was last written.
#[derive(Debug, Clone)]
struct IndexNode {
    first: u64,
    node: Option<NodeId>,
    /// Empty: never written, or to be written anew.
    written: Vec<LeafRef>,
}

/// Logical blocks to disk runs; see the module.
#[derive(Debug, Clone)]
pub struct ExtentMap {
    leaves: Vec<Leaf>,
    index: Vec<IndexNode>,
    /// Nodes that the durable tree may still use and the next layout gives up.
    dropped: Vec<NodeId>,
    blocks: u64,
    count: usize,
    limits: Limits,
}

impl Default for ExtentMap {
    fn default() -> Self {
        Self::new()
    }
}

/// The part `[from, to)` of `e`, which must not be empty.
fn cut(e: &Extent, from: u64, to: u64) -> Extent {
    let (skip, len) = (from - e.lblk, to - from);
    Extent {
        lblk: from,
        addr: BlockAddr(e.addr.0 + skip),
        len: len as u32,
        unwritten: e.unwritten,
        sums: e.sums.as_ref().map(|s| s[skip as usize..(skip + len) as usize].into()),
    }
}

/// Appends `b`, which continues `a`.
fn join(a: &mut Extent, b: Extent) {
    a.len += b.len;
    if let (Some(x), Some(y)) = (a.sums.take(), b.sums) {
        let mut v = x.into_vec();
        v.extend_from_slice(&y);
        a.sums = Some(v.into_boxed_slice());
    }
}

impl Leaf {
    fn new(first: u64) -> Self {
        Self { first, node: None, dirty: true, extents: Vec::new(), bytes: 0 }
    }

    /// Index of the first extent that begins after `lblk`.
    fn after(&self, lblk: u64) -> usize {
        // appending is the common case
        match self.extents.last() {
            Some(l) if l.lblk > lblk => self.extents.partition_point(|e| e.lblk <= lblk),
            _ => self.extents.len(),
        }
    }
}

impl ExtentMap {
    /// An empty map.
    pub fn new() -> Self {
        Self { leaves: Vec::new(), index: Vec::new(), dropped: Vec::new(), blocks: 0, count: 0, limits: Limits::FORMAT }
    }

    /// From the extents of an inode record (as `decode_extents` gives them: rising, without overlaps).
    pub fn from_inline(extents: Vec<Extent>) -> Self {
        let mut m = Self::new();
        let mut freed = Vec::new();
        for e in extents {
            m.insert(e, &mut freed);
        }
        debug_assert!(freed.is_empty(), "inline extents overlap");
        m
    }

    /// From the leaves of a tree in order and, for depth 2, its index nodes with the references in each.
    ///
    /// # Errors
    /// [`Corrupt`] where leaves do not begin at 0 and rise, a node is used twice, an extent lies outside its
    /// leaf, or the index nodes name other leaves.
    pub fn from_leaves(
        leaves: Vec<(LeafRef, Vec<Extent>)>,
        index_nodes: Vec<(LeafRef, Vec<LeafRef>)>,
    ) -> Result<Self, Corrupt> {
        let bad = |why: String| Corrupt::new("extent tree", why);
        let mut m = Self::new();
        let mut seen = HashSet::new();
        for r in leaves.iter().map(|l| l.0).chain(index_nodes.iter().map(|i| i.0)) {
            if r.node.0 == 0 || !seen.insert(r.node) {
                return Err(bad(format!("{} is used twice, or is no node", r.node)));
            }
        }
        if leaves.first().is_some_and(|l| l.0.first != 0) {
            return Err(bad("the first leaf does not begin at 0".into()));
        }
        if !index_nodes.is_empty() {
            if !index_nodes.iter().flat_map(|i| &i.1).eq(leaves.iter().map(|l| &l.0)) {
                return Err(bad("index nodes name other leaves than were read".into()));
            }
            if let Some(i) = index_nodes.iter().find(|i| i.1.first().is_none_or(|r| r.first != i.0.first)) {
                return Err(bad(format!("index {} does not begin at {}", i.0.node, i.0.first)));
            }
        }
        let firsts: Vec<u64> = leaves.iter().map(|l| l.0.first).chain([LBLK_MAX + 1]).collect();
        for (i, (r, extents)) in leaves.into_iter().enumerate() {
            let (mut at, end) = (r.first, firsts[i + 1]);
            if at >= end {
                return Err(bad(format!("leaf {} at {at} does not lie before the next at {end}", r.node)));
            }
            for e in &extents {
                let sums_hold = e.sums.as_ref().is_none_or(|s| s.len() == e.len as usize && e.len <= SUMMED_EXTENT_MAX);
                if e.len == 0 || e.len > EXTENT_MAX || e.lblk < at || e.lblk >= end || e.end() > end || !sums_hold {
                    return Err(bad(format!(
                        "extent of {} blocks at {} in leaf {} of [{}, {end})",
                        e.len, e.lblk, r.node, r.first
                    )));
                }
                at = e.end();
                m.blocks += u64::from(e.len);
            }
            let bytes = extents.iter().map(Extent::encoded_bytes).sum();
            if extents.is_empty() || bytes > PAYLOAD_MAX {
                return Err(bad(format!("leaf {} of {bytes} bytes", r.node)));
            }
            m.count += extents.len();
            m.leaves.push(Leaf { first: r.first, node: Some(r.node), dirty: false, extents, bytes });
        }
        m.index = index_nodes
            .into_iter()
            .map(|(r, refs)| IndexNode { first: r.first, node: Some(r.node), written: refs })
            .collect();
        Ok(m)
    }

    /// Index of the leaf that owns `lblk`; there must be one.
    fn leaf_of(&self, lblk: u64) -> usize {
        match self.leaves.last() {
            Some(l) if l.first > lblk => self.leaves.partition_point(|l| l.first <= lblk) - 1,
            _ => self.leaves.len() - 1,
        }
    }

    /// Leaf, and index in it of the first extent that begins after `lblk`.
    fn seek(&self, lblk: u64) -> Option<(usize, usize)> {
        if self.leaves.is_empty() {
            return None;
        }
        let li = self.leaf_of(lblk);
        Some((li, self.leaves[li].after(lblk)))
    }

    /// The mapping from `lblk` to the end of its extent; `None`: a hole.
    pub fn get(&self, lblk: u64) -> Option<Piece> {
        let (li, i) = self.seek(lblk)?;
        let e = self.leaves[li].extents[..i].last()?;
        (lblk < e.end()).then(|| Piece::of(e, lblk))
    }

    /// The piece at `lblk`, else the first extent after it.
    pub fn next_from(&self, lblk: u64) -> Option<Piece> {
        let (li, i) = self.seek(lblk)?;
        let leaf = &self.leaves[li];
        if let Some(e) = leaf.extents[..i].last()
            && lblk < e.end()
        {
            return Some(Piece::of(e, lblk));
        }
        let next = leaf.extents.get(i).or_else(|| self.leaves.get(li + 1)?.extents.first())?;
        Some(Piece::of(next, next.lblk))
    }

    /// The extent with the highest first block that is not above `lblk`; it may end before `lblk`.
    pub fn floor(&self, lblk: u64) -> Option<&Extent> {
        let (li, i) = self.seek(lblk)?;
        self.leaves[li].extents[..i].last().or_else(|| self.leaves[..li].last()?.extents.last())
    }

    /// One past the last mapped block; 0 for an empty map.
    pub fn last_end(&self) -> u64 {
        self.leaves.last().and_then(|l| l.extents.last()).map_or(0, Extent::end)
    }

    /// Blocks mapped, unwritten ones included.
    pub fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Number of extents.
    pub fn extent_count(&self) -> usize {
        self.count
    }

    /// Where the last `n` extents begin; `None` where there are no more than `n`.
    pub fn tail(&self, n: usize) -> Option<u64> {
        let mut skip = self.count.checked_sub(n).filter(|s| *s > 0)?;
        for l in &self.leaves {
            match l.extents.get(skip) {
                Some(e) => return Some(e.lblk),
                None => skip -= l.extents.len(),
            }
        }
        None
    }

    /// All extents in order.
    pub fn iter(&self) -> impl Iterator<Item = &Extent> {
        self.leaves.iter().flat_map(|l| &l.extents)
    }

    /// Memory that the map takes, roughly, in bytes.
    pub fn memory_bytes(&self) -> usize {
        self.leaves.len() * size_of::<Leaf>()
            + self.leaves.iter().map(|l| l.bytes).sum::<usize>()
            + self.count * (size_of::<Extent>() - EXTENT_FIXED_BYTES)
    }

    /// Maps `e`, in place of what was mapped there; the runs replaced go to `freed`.
    ///
    /// # Panics
    /// Where `e` is no extent that the format can hold (a bug of ours).
    pub fn insert(&mut self, e: Extent, freed: &mut Vec<(BlockAddr, u32)>) {
        assert!(e.len > 0 && e.len <= EXTENT_MAX && e.lblk <= LBLK_MAX && e.end() <= LBLK_MAX + 1, "bad extent {e:?}");
        assert!(e.sums.as_ref().is_none_or(|s| s.len() == e.len as usize), "{} blocks, other sums", e.len);
        let (lblk, end) = (e.lblk, e.end());
        let overwrites = lblk < self.last_end() && self.next_from(lblk).is_some_and(|p| p.lblk < end);
        if overwrites {
            self.cut_out(lblk, end, freed);
        }
        let step = u64::from(self.limits.summed_blocks);
        if e.sums.is_some() && u64::from(e.len) > step {
            let mut at = lblk;
            while at < end {
                let to = end.min(at + step);
                self.place(cut(&e, at, to));
                at = to;
            }
        } else {
            self.place(e);
        }
        if overwrites {
            self.merge_small(lblk);
        }
    }

    /// Unmaps `[from, to)`; its runs go to `freed`.
    pub fn remove(&mut self, from: u64, to: u64, freed: &mut Vec<(BlockAddr, u32)>) {
        self.cut_out(from, to, freed);
        self.merge_small(from);
    }

    /// Turns the unwritten parts of `[from, to)` into written ones, without checksums.
    pub fn mark_written(&mut self, from: u64, to: u64) {
        let mut at = from;
        let mut same = Vec::new();
        while let Some(p) = self.next_from(at).filter(|p| p.lblk < to) {
            let len = (u64::from(p.len)).min(to - p.lblk) as u32;
            at = p.lblk + u64::from(len);
            if p.unwritten {
                // the run only changes its state: nothing is freed
                self.insert(Extent { lblk: p.lblk, addr: p.addr, len, unwritten: false, sums: None }, &mut same);
            }
        }
    }

    /// Marks every node of the map to be written by the next layout.
    pub fn all_dirty(&mut self) {
        self.leaves.iter_mut().for_each(|l| l.dirty = true);
        self.index.iter_mut().for_each(|i| i.written.clear());
    }

    /// Marks these nodes to be written by the next layout, where they are still part of the map.
    pub fn mark_dirty(&mut self, nodes: &[NodeId]) {
        for l in self.leaves.iter_mut().filter(|l| l.node.is_some_and(|n| nodes.contains(&n))) {
            l.dirty = true;
        }
        for i in self.index.iter_mut().filter(|i| i.node.is_some_and(|n| nodes.contains(&n))) {
            i.written.clear();
        }
    }

    /// All overflow nodes of the map, those included that the next layout would drop: what deleting the file
    /// has to free.
    pub fn nodes(&self) -> Vec<NodeId> {
        let leaves = self.leaves.iter().filter_map(|l| l.node);
        leaves.chain(self.index.iter().filter_map(|i| i.node)).chain(self.dropped.iter().copied()).collect()
    }

    /// Whether `b` can be joined to `a`.
    fn continues(&self, a: &Extent, b: &Extent) -> bool {
        let max = if a.sums.is_some() { u32::from(self.limits.summed_blocks) } else { EXTENT_MAX };
        a.end() == b.lblk
            && a.addr.0 + u64::from(a.len) == b.addr.0
            && a.unwritten == b.unwritten
            && a.sums.is_some() == b.sums.is_some()
            && a.len + b.len <= max
    }

    /// Joins extents `at` and `at + 1` of leaf `li` where one continues the other.
    fn join_next(&mut self, li: usize, at: usize) {
        let list = &self.leaves[li].extents;
        if list.get(at + 1).is_some_and(|n| self.continues(&list[at], n)) {
            let leaf = &mut self.leaves[li];
            let next = leaf.extents.remove(at + 1);
            join(&mut leaf.extents[at], next);
            leaf.bytes -= EXTENT_FIXED_BYTES;
            self.count -= 1;
        }
    }

    /// Puts `e` where nothing is mapped.
    fn place(&mut self, e: Extent) {
        if self.leaves.is_empty() {
            self.leaves.push(Leaf::new(0));
        }
        let mut li = self.leaf_of(e.lblk);
        let mut at = self.leaves[li].after(e.lblk);
        // What the next leaf owns but `e` covers is empty: move the border rather than cut `e`.
        if let Some(next) = self.leaves.get_mut(li + 1) {
            next.first = next.first.max(e.end());
        }
        if at == 0
            && let Some(last) = self.leaves[..li].last().and_then(|l| l.extents.last())
            && self.continues(last, &e)
        {
            self.leaves[li].first = e.end();
            li -= 1;
            at = self.leaves[li].extents.len();
        }
        let list = &self.leaves[li].extents;
        let joins_left = at > 0 && self.continues(&list[at - 1], &e);
        self.count += 1;
        self.blocks += u64::from(e.len);
        let leaf = &mut self.leaves[li];
        leaf.dirty = true;
        leaf.bytes += e.encoded_bytes();
        if joins_left {
            at -= 1;
            join(&mut leaf.extents[at], e);
            leaf.bytes -= EXTENT_FIXED_BYTES;
            self.count -= 1;
        } else {
            leaf.extents.insert(at, e);
        }
        self.join_next(li, at);
        self.split_if_full(li);
    }

    /// Splits leaf `li` where it no longer fits a node.
    fn split_if_full(&mut self, li: usize) {
        let is_last = li + 1 == self.leaves.len();
        let leaf = &mut self.leaves[li];
        let max = usize::from(self.limits.leaf_bytes);
        if leaf.bytes <= max {
            return;
        }
        let tail = leaf.extents.last().map_or(0, Extent::encoded_bytes);
        let at = if is_last && leaf.bytes - tail <= max {
            // a file that grows at its end leaves full leaves behind
            leaf.extents.len() - 1
        } else {
            let mut sum = 0;
            let half = leaf.bytes / 2;
            1 + leaf.extents[1..leaf.extents.len() - 1]
                .iter()
                .take_while(|e| {
                    sum += e.encoded_bytes();
                    sum < half
                })
                .count()
        };
        let extents = leaf.extents.split_off(at);
        let bytes = extents.iter().map(Extent::encoded_bytes).sum();
        leaf.bytes -= bytes;
        leaf.dirty = true;
        let right = Leaf { first: extents[0].lblk, node: None, dirty: true, extents, bytes };
        debug_assert!(right.bytes <= max && leaf.bytes <= max);
        self.leaves.insert(li + 1, right);
    }

    /// Takes `[from, to)` out and drops the leaves that become empty.
    fn cut_out(&mut self, from: u64, to: u64, freed: &mut Vec<(BlockAddr, u32)>) {
        if from >= to || self.leaves.is_empty() {
            return;
        }
        let start = self.leaf_of(from);
        // Only leaves wholly in the range become empty, but for the first and last, so they lie together.
        let (mut empty, mut empties) = (start, 0);
        for li in start..self.leaves.len() {
            let leaf = &mut self.leaves[li];
            if leaf.first >= to {
                break;
            }
            let i = leaf.extents.partition_point(|e| e.end() <= from);
            let j = leaf.extents.partition_point(|e| e.lblk < to);
            if i >= j {
                continue;
            }
            let (a, z) = (&leaf.extents[i], &leaf.extents[j - 1]);
            let left = (a.lblk < from).then(|| cut(a, a.lblk, from));
            let right = (z.end() > to).then(|| cut(z, to, z.end()));
            for e in &leaf.extents[i..j] {
                let (s, t) = (e.lblk.max(from), e.end().min(to));
                freed.push((BlockAddr(e.addr.0 + (s - e.lblk)), (t - s) as u32));
                self.blocks -= t - s;
                leaf.bytes -= e.encoded_bytes();
            }
            let rest = left.into_iter().chain(right);
            leaf.bytes += rest.clone().map(|e| e.encoded_bytes()).sum::<usize>();
            let before = leaf.extents.len();
            leaf.extents.splice(i..j, rest);
            self.count = self.count + leaf.extents.len() - before;
            leaf.dirty = true;
            if leaf.extents.is_empty() {
                if empties == 0 {
                    empty = li;
                }
                empties += 1;
            }
        }
        self.dropped.extend(self.leaves.drain(empty..empty + empties).filter_map(|l| l.node));
        if let Some(l) = self.leaves.first_mut() {
            l.first = 0;
            // a hole in the middle of an extent makes one more
            self.split_if_full(self.leaf_of(from));
        }
    }

    /// Joins the leaf at `lblk` with a neighbour where both are small.
    fn merge_small(&mut self, lblk: u64) {
        let small = usize::from(self.limits.leaf_bytes) / 4;
        let Some((li, _)) = self.seek(lblk) else { return };
        // the leaf after `lblk` may be the one that was cut from the left
        for left in [li, li.wrapping_sub(1)] {
            if let Some([a, b]) = self.leaves.get_mut(left..left.wrapping_add(2))
                && a.bytes <= small
                && b.bytes <= small
            {
                let border = a.extents.len() - 1;
                a.extents.append(&mut b.extents);
                a.bytes += b.bytes;
                a.dirty = true;
                let gone = self.leaves.remove(left + 1);
                self.dropped.extend(gone.node);
                self.join_next(left, border);
            }
        }
    }
}
