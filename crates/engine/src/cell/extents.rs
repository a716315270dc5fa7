//! The extent map: where the blocks of one file or directory lie.
//!
//! Owns the mapping from logical blocks to runs on disk, cut into leaves of which each is one overflow node
//! once the map no longer fits into the inode record (see [`ExtentMap::layout`]).
//!
//! Invariants
//! - Extents rise by logical block and never overlap; no leaf is empty.
//! - The first leaf begins at 0; a leaf owns `[first, first of the next)` and its extents lie wholly in it.
//! - An encoded leaf fits a node record.
//! - `blocks`, `count` and `bytes` are the sums over all extents.
//! - Every dirty leaf is named in `dirty`, every rolled one in `rolled`.
//!
//! Cost: a look-up, an insertion and the layout of a change take steps by the logarithm of the number of leaves, plus
//! what a leaf, an index node and the root of the tree hold at most.
//!
//! Not promised: that the map is the shortest possible. Extents that continue each other over a leaf's
//! border may stay apart. No locks, no I/O.

mod layout;
pub mod steps;
#[cfg(test)]
mod tests;

use crate::lazy::Empty;
use braidfs_format::inode::{EXTENT_MAX, Extent, LBLK_MAX, LEAF_REFS_MAX, LeafRef, SUMMED_EXTENT_MAX};
use braidfs_format::node::PAYLOAD_MAX;
use braidfs_format::{BlockAddr, Corrupt, NodeId};
use smallvec::SmallVec;
use std::collections::{BTreeMap, HashSet};
use steps::visit;

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
    /// The most that fits a node.
    leaf_bytes: u16,
    /// Leaves without checksums are split from here on while there are few of them: a change writes its whole leaf.
    leaf_split: u16,
    /// How many are few.
    few_leaves: u16,
    summed_blocks: u16,
    refs: u16,
}

impl Limits {
    const FORMAT: Self = Self {
        leaf_bytes: PAYLOAD_MAX as u16,
        leaf_split: 1024,
        // of 40,000 that a tree can have; later ones grow to whole nodes
        few_leaves: 20_000,
        summed_blocks: SUMMED_EXTENT_MAX as u16,
        refs: LEAF_REFS_MAX as u16,
    };
}

#[derive(Debug, Clone)]
struct Leaf {
    /// `None`: never laid out as a node.
    node: Option<NodeId>,
    /// The node's content is not what `extents` says.
    dirty: bool,
    /// Whether only a roll-forward record tells of it: [`ExtentMap::rolled_forward`].
    rolled: bool,
    extents: Vec<Extent>,
    /// Encoded length of `extents`.
    bytes: usize,
}

/// An index node of a tree of depth 2, as it was last written.
#[derive(Debug, Clone)]
struct IndexNode {
    node: Option<NodeId>,
    /// Whether only a roll-forward record tells of it: [`ExtentMap::rolled_forward`].
    rolled: bool,
    /// Empty: never written, or to be written anew.
    written: Vec<LeafRef>,
}

/// Runs of blocks, by the first and their number: mostly one or two.
pub type Runs = SmallVec<[(BlockAddr, u32); 2]>;

/// Logical blocks to disk runs; see the module.
#[derive(Debug, Clone)]
pub struct ExtentMap {
    /// By the first block that they own.
    leaves: BTreeMap<u64, Box<Leaf>>,
    /// By the first block of their first leaf, as of the last layout.
    index: BTreeMap<u64, IndexNode>,
    /// Where dirty leaves begin, and others, too: one may have gone, or begin elsewhere by now and be named again.
    dirty: Vec<u64>,
    /// The same of rolled leaves.
    rolled: Vec<u64>,
    /// Leaves that the last layout wrote, and index nodes.
    written: (Vec<u64>, Vec<u64>),
    /// Blocks at which leaves came, went or moved their border, and whose index nodes are to be looked at again.
    moved: Vec<u64>,
    /// Nodes that the durable tree may still use and the next layout uses again or gives up.
    dropped: Vec<NodeId>,
    blocks: u64,
    count: usize,
    bytes: usize,
    limits: Limits,
}

impl Empty for ExtentMap {
    const EMPTY: &'static Self = &ExtentMap::new();
    fn empty() -> Self {
        Self::new()
    }
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
    fn new(extents: Vec<Extent>, bytes: usize) -> Box<Self> {
        Box::new(Self { node: None, dirty: false, rolled: false, extents, bytes })
    }

    /// Index of the first extent that begins after `lblk`.
    fn after(&self, lblk: u64) -> usize {
        // appending is the common case
        match self.extents.last() {
            Some(l) if l.lblk > lblk => self.extents.partition_point(|e| e.lblk <= lblk),
            _ => self.extents.len(),
        }
    }

    /// Marks the leaf, which begins at `first`, dirty.
    fn mark(&mut self, first: u64, dirty: &mut Vec<u64>) {
        if !std::mem::replace(&mut self.dirty, true) {
            dirty.push(first);
        }
    }
}

impl ExtentMap {
    /// An empty map.
    pub const fn new() -> Self {
        Self {
            leaves: BTreeMap::new(),
            index: BTreeMap::new(),
            dirty: Vec::new(),
            rolled: Vec::new(),
            written: (Vec::new(), Vec::new()),
            moved: Vec::new(),
            dropped: Vec::new(),
            blocks: 0,
            count: 0,
            bytes: 0,
            limits: Limits::FORMAT,
        }
    }

    /// The tree has small nodes from now on, as long as it is in memory: of few extents, and few of them.
    #[cfg(test)]
    pub(crate) fn have_small_nodes(&mut self) {
        self.limits = Limits { leaf_split: 64, refs: 16, ..Limits::FORMAT };
    }

    /// From the extents of an inode record (as `decode_extents` gives them: rising, without overlaps).
    pub fn from_inline(extents: Vec<Extent>) -> Self {
        let mut m = Self::new();
        let mut freed = Runs::new();
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
            m.bytes += bytes;
            let mut leaf = Leaf::new(extents, bytes);
            leaf.node = Some(r.node);
            m.leaves.insert(r.first, leaf);
        }
        m.index = index_nodes
            .into_iter()
            .map(|(r, refs)| (r.first, IndexNode { node: Some(r.node), rolled: false, written: refs }))
            .collect();
        Ok(m)
    }

    /// The leaf that owns `lblk`, and where it begins.
    fn leaf_at(&self, lblk: u64) -> Option<(u64, &Leaf)> {
        let (first, leaf) = self.leaves.range(..=lblk).next_back()?;
        visit();
        Some((*first, leaf))
    }

    /// Where the leaf begins that owns `lblk`; 0 for an empty map.
    fn first_of(&self, lblk: u64) -> u64 {
        self.leaf_at(lblk).map_or(0, |l| l.0)
    }

    /// The leaf behind the one that begins at `first`.
    fn leaf_after(&self, first: u64) -> Option<(u64, &Leaf)> {
        self.leaves.range(first + 1..).next().map(|(f, l)| (*f, &**l))
    }

    /// The leaf before the one that begins at `first`.
    fn leaf_before(&self, first: u64) -> Option<(u64, &Leaf)> {
        self.leaves.range(..first).next_back().map(|(f, l)| (*f, &**l))
    }

    /// The mapping from `lblk` to the end of its extent; `None`: a hole.
    pub fn get(&self, lblk: u64) -> Option<Piece> {
        let (_, leaf) = self.leaf_at(lblk)?;
        let e = leaf.extents[..leaf.after(lblk)].last()?;
        (lblk < e.end()).then(|| Piece::of(e, lblk))
    }

    /// The piece at `lblk`, else the first extent after it.
    pub fn next_from(&self, lblk: u64) -> Option<Piece> {
        let (first, leaf) = self.leaf_at(lblk)?;
        let i = leaf.after(lblk);
        if let Some(e) = leaf.extents[..i].last()
            && lblk < e.end()
        {
            return Some(Piece::of(e, lblk));
        }
        let next = leaf.extents.get(i).or_else(|| self.leaf_after(first)?.1.extents.first())?;
        Some(Piece::of(next, next.lblk))
    }

    /// The extent with the highest first block that is not above `lblk`; it may end before `lblk`.
    pub fn floor(&self, lblk: u64) -> Option<&Extent> {
        let (first, leaf) = self.leaf_at(lblk)?;
        leaf.extents[..leaf.after(lblk)].last().or_else(|| self.leaf_before(first)?.1.extents.last())
    }

    /// One past the last mapped block; 0 for an empty map.
    pub fn last_end(&self) -> u64 {
        self.leaves.last_key_value().and_then(|l| l.1.extents.last()).map_or(0, Extent::end)
    }

    /// Blocks mapped, unwritten ones included.
    pub fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Bytes of all extents as they are encoded.
    pub fn encoded_bytes(&self) -> usize {
        self.bytes
    }

    /// Leaves that are to be written, or a few more.
    pub fn dirty_leaves(&self) -> usize {
        self.dirty.len()
    }

    /// Number of extents.
    pub fn extent_count(&self) -> usize {
        self.count
    }

    /// Where the last `n` extents begin; `None` where there are no more than `n`.
    pub fn tail(&self, n: usize) -> Option<u64> {
        let mut left = n;
        if self.count <= n {
            return None;
        }
        for l in self.leaves.values().rev() {
            match l.extents.len().checked_sub(left) {
                Some(at) if left > 0 => return Some(l.extents[at].lblk),
                _ => left = left.saturating_sub(l.extents.len()),
            }
        }
        None
    }

    /// All extents in order.
    pub fn iter(&self) -> impl Iterator<Item = &Extent> {
        self.leaves.values().inspect(|_| visit()).flat_map(|l| &l.extents)
    }

    /// Memory that the map takes, roughly, in bytes.
    pub fn memory_bytes(&self) -> usize {
        self.leaves.len() * (size_of::<Leaf>() + 3 * size_of::<usize>())
            + self.bytes
            + self.count * (size_of::<Extent>() - EXTENT_FIXED_BYTES)
    }

    /// Maps `e`, in place of what was mapped there; the runs replaced go to `freed`.
    ///
    /// # Panics
    /// Where `e` is no extent that the format can hold (a bug of ours).
    pub fn insert(&mut self, e: Extent, freed: &mut Runs) {
        assert!(e.len > 0 && e.len <= EXTENT_MAX && e.lblk <= LBLK_MAX && e.end() <= LBLK_MAX + 1, "bad extent {e:?}");
        assert!(e.sums.as_ref().is_none_or(|s| s.len() == e.len as usize), "{} blocks, other sums", e.len);
        let (lblk, end) = (e.lblk, e.end());
        let Some(e) = self.swap(e, freed) else { return };
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
    pub fn remove(&mut self, from: u64, to: u64, freed: &mut Runs) {
        if !self.shorten(from, to, freed) {
            self.cut_out(from, to, freed);
            self.merge_small(from);
        }
    }

    /// The short way of [`Self::remove`], for the tail of the last extent: a file is truncated. False where it is not that.
    fn shorten(&mut self, from: u64, to: u64, freed: &mut Runs) -> bool {
        let Some((&first, leaf)) = self.leaves.iter_mut().next_back() else { return false };
        // checksums are cut, too, and then the leaf is smaller
        let is_tail = |e: &&mut Extent| e.lblk < from && from < e.end() && e.end() <= to && e.sums.is_none();
        let Some(last) = leaf.extents.last_mut().filter(is_tail) else { return false };
        let stays = (from - last.lblk) as u32;
        freed.push((BlockAddr(last.addr.0 + u64::from(stays)), last.len - stays));
        self.blocks -= u64::from(last.len - stays);
        last.len = stays;
        leaf.mark(first, &mut self.dirty);
        true
    }

    /// Turns the unwritten parts of `[from, to)` into written ones, without checksums.
    pub fn mark_written(&mut self, from: u64, to: u64) {
        let mut at = from;
        let mut same = Runs::new();
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
        for (first, leaf) in &mut self.leaves {
            visit();
            leaf.mark(*first, &mut self.dirty);
        }
        for (first, index) in &mut self.index {
            index.written.clear();
            self.moved.push(*first);
        }
    }

    /// Marks these nodes to be written by the next layout, where they are still part of the map. It looks at every
    /// leaf: for the cleaner, which comes rarely.
    pub fn mark_dirty(&mut self, nodes: &[NodeId]) {
        for (first, leaf) in &mut self.leaves {
            visit();
            if leaf.node.is_some_and(|n| nodes.contains(&n)) {
                leaf.mark(*first, &mut self.dirty);
            }
        }
        for (first, index) in &mut self.index {
            if index.node.is_some_and(|n| nodes.contains(&n)) {
                index.written.clear();
                self.moved.push(*first);
            }
        }
    }

    /// What the last layout wrote went into a roll-forward record only; [`Self::write_rolled`] will have it written
    /// again.
    pub fn rolled_forward(&mut self) {
        let (leaves, index) = std::mem::take(&mut self.written);
        for first in leaves {
            if let Some(leaf) = self.leaves.get_mut(&first)
                && !std::mem::replace(&mut leaf.rolled, true)
            {
                self.rolled.push(first);
            }
        }
        for first in index {
            if let Some(i) = self.index.get_mut(&first) {
                i.rolled = true;
            }
        }
    }

    /// Marks the nodes to be written by the next layout that were only rolled forward.
    pub fn write_rolled(&mut self) {
        for first in std::mem::take(&mut self.rolled) {
            visit();
            if let Some(leaf) = self.leaves.get_mut(&first)
                && std::mem::take(&mut leaf.rolled)
            {
                leaf.mark(first, &mut self.dirty);
            }
        }
        for (first, index) in self.index.iter_mut().filter(|i| i.1.rolled) {
            index.rolled = false;
            index.written.clear();
            self.moved.push(*first);
        }
    }

    /// All overflow nodes of the map, those included that the next layout would drop: what deleting the file
    /// has to free.
    pub fn nodes(&self) -> Vec<NodeId> {
        let leaves = self.leaves.values().filter_map(|l| l.node);
        leaves.chain(self.index.values().filter_map(|i| i.node)).chain(self.dropped.iter().copied()).collect()
    }

    /// Whether `b` can be joined to `a`.
    fn continues(&self, a: &Extent, b: &Extent) -> bool {
        Self::joins(&self.limits, a, b)
    }

    fn joins(limits: &Limits, a: &Extent, b: &Extent) -> bool {
        let max = if a.sums.is_some() { u32::from(limits.summed_blocks) } else { EXTENT_MAX };
        a.end() == b.lblk
            && a.addr.0 + u64::from(a.len) == b.addr.0
            && a.unwritten == b.unwritten
            && a.sums.is_some() == b.sums.is_some()
            && a.len + b.len <= max
    }

    /// The leaf that begins at `first`, which will have changed; there is one.
    fn leaf_mut(&mut self, first: u64) -> &mut Leaf {
        let Some(leaf) = self.leaves.get_mut(&first) else { unreachable!("no leaf begins at {first}") };
        leaf.mark(first, &mut self.dirty);
        leaf
    }

    /// Adds a leaf that begins at `first`.
    fn add_leaf(&mut self, first: u64, mut leaf: Box<Leaf>) {
        leaf.mark(first, &mut self.dirty);
        self.leaves.insert(first, leaf);
        self.note_moved(first);
    }

    /// Takes out the leaf that begins at `first`; its node is no longer used.
    fn take_leaf(&mut self, first: u64) -> Option<Box<Leaf>> {
        let leaf = self.leaves.remove(&first)?;
        self.dropped.extend(leaf.node);
        self.note_moved(first);
        Some(leaf)
    }

    /// Lets the leaf that begins at `from` begin at `to`. Its node says the same as before.
    fn move_border(&mut self, from: u64, to: u64) {
        let Some(leaf) = self.leaves.remove(&from) else { return };
        if leaf.dirty {
            self.dirty.push(to);
        }
        if leaf.rolled {
            self.rolled.push(to);
        }
        self.leaves.insert(to, leaf);
        self.note_moved(from);
        self.note_moved(to);
    }

    fn note_moved(&mut self, lblk: u64) {
        // a tree that gets index nodes looks at all leaves
        if !self.index.is_empty() {
            self.moved.push(lblk);
        }
    }

    /// The short way of [`Self::insert`], for what replaces one extent and neither joins nor cuts. Gives `e` back
    /// where it is not that.
    fn swap(&mut self, e: Extent, freed: &mut Runs) -> Option<Extent> {
        let Some((first, leaf)) = self.leaf_at(e.lblk) else { return Some(e) };
        let at = leaf.after(e.lblk);
        let same = |o: &Extent| (o.lblk, o.len, o.sums.is_some()) == (e.lblk, e.len, e.sums.is_some());
        let [before @ .., old] = &leaf.extents[..at] else { return Some(e) };
        // what begins or ends a leaf may join over its border
        let (Some(left), Some(right)) = (before.last(), leaf.extents.get(at)) else { return Some(e) };
        if !same(old) || self.continues(left, &e) || self.continues(&e, right) {
            return Some(e);
        }
        freed.push((old.addr, old.len));
        self.leaf_mut(first).extents[at - 1] = e;
        None
    }

    /// Joins extents `at` and `at + 1` of the leaf at `first` where one continues the other.
    fn join_next(&mut self, first: u64, at: usize) {
        let limits = self.limits;
        let leaf = self.leaf_mut(first);
        let (Some(a), Some(b)) = (leaf.extents.get(at), leaf.extents.get(at + 1)) else { return };
        if Self::joins(&limits, a, b) {
            let next = leaf.extents.remove(at + 1);
            join(&mut leaf.extents[at], next);
            leaf.bytes -= EXTENT_FIXED_BYTES;
            self.bytes -= EXTENT_FIXED_BYTES;
            self.count -= 1;
        }
    }

    /// Puts `e` where nothing is mapped.
    fn place(&mut self, e: Extent) {
        if self.leaves.is_empty() {
            self.add_leaf(0, Leaf::new(Vec::new(), 0));
        }
        let mut first = self.first_of(e.lblk);
        // What the next leaf owns but `e` covers is empty: move the border rather than cut `e`.
        if let Some((next, _)) = self.leaf_after(first)
            && next < e.end()
        {
            self.move_border(next, e.end());
        }
        let mut at = self.leaf_mut(first).after(e.lblk);
        if at == 0
            && let Some((before, leaf)) = self.leaf_before(first)
            && leaf.extents.last().is_some_and(|last| self.continues(last, &e))
        {
            at = leaf.extents.len();
            self.move_border(first, e.end());
            first = before;
        }
        let limits = self.limits;
        let leaf = self.leaf_mut(first);
        let mut bytes = e.encoded_bytes();
        let mut count = 1;
        let len = e.len;
        if at > 0 && Self::joins(&limits, &leaf.extents[at - 1], &e) {
            at -= 1;
            join(&mut leaf.extents[at], e);
            bytes -= EXTENT_FIXED_BYTES;
            count = 0;
        } else {
            leaf.extents.insert(at, e);
        }
        leaf.bytes += bytes;
        self.bytes += bytes;
        self.count += count;
        self.blocks += u64::from(len);
        self.join_next(first, at);
        self.split_if_full(first);
    }

    /// Splits the leaf at `first` where it no longer fits a node, or is larger than need be.
    fn split_if_full(&mut self, first: u64) {
        let Some(leaf) = self.leaves.get(&first).filter(|l| l.bytes > usize::from(self.limits.leaf_split)) else {
            return;
        };
        let whole = usize::from(self.limits.leaf_bytes);
        let plain = leaf.bytes == leaf.extents.len() * EXTENT_FIXED_BYTES;
        let few = plain && self.leaves.len() < usize::from(self.limits.few_leaves);
        let max = if few { usize::from(self.limits.leaf_split) } else { whole };
        if leaf.bytes <= max {
            return;
        }
        let is_last = self.leaf_after(first).is_none();
        let leaf = self.leaf_mut(first);
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
        debug_assert!(bytes <= whole && leaf.bytes <= whole);
        self.add_leaf(extents[0].lblk, Leaf::new(extents, bytes));
    }

    /// Takes `[from, to)` out and drops the leaves that become empty.
    fn cut_out(&mut self, from: u64, to: u64, freed: &mut Runs) {
        if from >= to || self.leaves.is_empty() {
            return;
        }
        let start = self.first_of(from);
        let mut empty = Vec::new();
        for (&first, leaf) in self.leaves.range_mut(start..to) {
            visit();
            let i = leaf.extents.partition_point(|e| e.end() <= from);
            let j = leaf.extents.partition_point(|e| e.lblk < to);
            if i >= j {
                continue;
            }
            let (a, z) = (&leaf.extents[i], &leaf.extents[j - 1]);
            let left = (a.lblk < from).then(|| cut(a, a.lblk, from));
            let right = (z.end() > to).then(|| cut(z, to, z.end()));
            self.bytes -= leaf.bytes;
            for e in &leaf.extents[i..j] {
                let (s, t) = (e.lblk.max(from), e.end().min(to));
                freed.push((BlockAddr(e.addr.0 + (s - e.lblk)), (t - s) as u32));
                self.blocks -= t - s;
                leaf.bytes -= e.encoded_bytes();
            }
            let rest = left.into_iter().chain(right);
            leaf.bytes += rest.clone().map(|e| e.encoded_bytes()).sum::<usize>();
            self.bytes += leaf.bytes;
            let before = leaf.extents.len();
            leaf.extents.splice(i..j, rest);
            self.count = self.count + leaf.extents.len() - before;
            leaf.mark(first, &mut self.dirty);
            if leaf.extents.is_empty() {
                empty.push(first);
            }
        }
        for first in empty {
            self.take_leaf(first);
        }
        if let Some((&first, _)) = self.leaves.first_key_value() {
            if first != 0 {
                self.move_border(first, 0);
            }
            // a hole in the middle of an extent makes one more
            self.split_if_full(self.first_of(from));
        }
    }

    /// Joins the leaf at `lblk` with a neighbour where both are small.
    fn merge_small(&mut self, lblk: u64) {
        let small = usize::from(self.limits.leaf_split) / 4;
        let Some((first, _)) = self.leaf_at(lblk).filter(|l| l.1.bytes <= small) else { return };
        let before = self.leaf_before(first).map(|l| l.0);
        // the leaf after `lblk` may be the one that was cut from the left
        for left in [Some(first), before].into_iter().flatten() {
            let fits = |l: Option<(u64, &Leaf)>| l.filter(|l| l.1.bytes <= small).map(|l| l.0);
            if fits(self.leaf_at(left)).is_some()
                && let Some(right) = fits(self.leaf_after(left))
                && let Some(mut gone) = self.take_leaf(right)
            {
                let leaf = self.leaf_mut(left);
                let border = leaf.extents.len() - 1;
                leaf.extents.append(&mut gone.extents);
                leaf.bytes += gone.bytes;
                self.join_next(left, border);
            }
        }
    }
}
