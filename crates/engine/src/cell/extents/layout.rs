//! How an extent map is kept on disk: in the inode record, or as a tree of overflow nodes.
//!
//! Depth 1: the record names the leaves. Depth 2: it names index nodes, which name the leaves. Index nodes keep
//! their ranges from one layout to the next, so that a change writes only the index nodes that it touches.

use super::steps::visit;
use super::{EXTENT_FIXED_BYTES, ExtentMap, IndexNode};
use crate::error::{Error, Result};
use braidfs_format::NodeId;
use braidfs_format::inode::{Content, Extent, LeafRef, encode_extents, encode_refs};
use braidfs_format::node::NodeKind;
use std::collections::BTreeSet;

/// Leaves of a tree that [`ExtentMap::lacks_room`] leaves to what nobody asks it for: the last page of a file that is cut, or
/// grows.
const SPARE_LEAVES: usize = 16;
/// Bytes of an encoded [`LeafRef`].
const REF_BYTES: usize = 14;

/// What [`ExtentMap::layout`] says is to be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// For the inode record.
    pub content: Content,
    /// Overflow nodes that changed, with their payloads (at most `PAYLOAD_MAX` bytes).
    pub write: Vec<(NodeId, NodeKind, Vec<u8>)>,
    /// Nodes that the map no longer uses.
    pub dropped: Vec<NodeId>,
}

impl ExtentMap {
    /// Decides between inline and tree and gives what has to be written. The map then counts as written.
    ///
    /// Inline where all extents encode into `inline_budget` bytes; otherwise every leaf gets a node, one that the map no longer
    /// uses or one from `alloc`, and the record the references, which fit the budget too (a budget of 2800 is always enough;
    /// less makes index nodes come earlier).
    ///
    /// # Errors
    /// Of `alloc`, and [`Error::TooManyExtents`] where the budget does not hold the root. The map then stays valid and
    /// keeps the nodes that it was given; a later call goes on with them.
    pub fn layout(&mut self, inline_budget: usize, alloc: &mut dyn FnMut() -> Result<NodeId>) -> Result<Layout> {
        if self.bytes <= inline_budget {
            return Ok(self.layout_inline());
        }
        let fanout = usize::from(self.limits.refs);
        let root_max = fanout.min(inline_budget / REF_BYTES);
        let leaves = self.leaves.len();
        let depth = if leaves <= root_max { 1 } else { 2 };
        if leaves.div_ceil(fanout) > root_max {
            return Err(Error::TooManyExtents);
        }
        self.dirty.sort_unstable();
        self.dirty.dedup();
        for first in &self.dirty {
            visit();
            if let Some(leaf) = self.leaves.get_mut(first)
                && leaf.node.is_none()
            {
                leaf.node = Some(Self::node_again(&mut self.dropped, alloc)?);
                if !self.index.is_empty() {
                    self.moved.push(*first);
                }
            }
        }
        if depth == 1 {
            self.dropped.extend(std::mem::take(&mut self.index).into_values().filter_map(|i| i.node));
            self.moved.clear();
        } else {
            self.regroup(fanout, root_max);
            for first in &self.moved {
                if let Some(i) = self.index.get_mut(first)
                    && i.node.is_none()
                {
                    i.node = Some(Self::node_again(&mut self.dropped, alloc)?);
                }
            }
        }
        // From here on nothing fails, so that a layout is either given whole or not at all.
        let mut write = Vec::new();
        let mut wrote = (Vec::new(), Vec::new());
        for first in std::mem::take(&mut self.dirty) {
            visit();
            if let Some(leaf) = self.leaves.get_mut(&first)
                && std::mem::take(&mut leaf.dirty)
            {
                let Some(node) = leaf.node else { unreachable!("every leaf was given a node above") };
                write.push((node, NodeKind::ExtentLeaf, encode_extents(&leaf.extents)));
                wrote.0.push(first);
            }
        }
        for first in std::mem::take(&mut self.moved) {
            let own = self.refs_of(first);
            let Some(index) = self.index.get_mut(&first) else { continue };
            let Some(node) = index.node else { unreachable!("every index was given a node above") };
            if index.written != own {
                write.push((node, NodeKind::ExtentIndex, encode_refs(&own)));
                index.written = own;
                wrote.1.push(first);
            }
        }
        let node_of = |node: Option<NodeId>| node.unwrap_or(NodeId(0));
        let refs = if depth == 1 {
            self.leaves.iter().map(|(first, l)| LeafRef { first: *first, node: node_of(l.node) }).collect()
        } else {
            self.index.iter().map(|(first, i)| LeafRef { first: *first, node: node_of(i.node) }).collect()
        };
        self.written = wrote;
        Ok(Layout { content: Content::Tree { depth, refs }, write, dropped: std::mem::take(&mut self.dropped) })
    }

    /// A node that the tree has just given up, else a new one. A tree that is written anew, because its blocks moved within the
    /// file, would else take as many new ones as it has, in a commit: the old ones are free only once that is durable.
    fn node_again(dropped: &mut Vec<NodeId>, alloc: &mut dyn FnMut() -> Result<NodeId>) -> Result<NodeId> {
        dropped.pop().map_or_else(alloc, Ok)
    }

    /// Whether so many extents more could be more than a tree holds, wherever they come: who adds some refuses it
    /// ([`Error::TooManyExtents`]) before a layout must, which is in a commit.
    pub fn lacks_room(&self, extents: usize) -> bool {
        let fanout = usize::from(self.limits.refs);
        // A leaf may be so full that the first extent splits it. The next time it takes some: each part has a quarter of a small
        // leaf to spare, at least.
        let again = (usize::from(self.limits.leaf_split) / 4 / EXTENT_FIXED_BYTES).max(1);
        let leaves = self.leaves.len();
        leaves + extents.min(leaves) + extents / again + SPARE_LEAVES > fanout * fanout
    }

    /// Whether one extent has blocks on both sides of `[from, to)`, so that there are two once that is a hole.
    pub fn splits(&self, from: u64, to: u64) -> bool {
        self.floor(from).is_some_and(|e| e.lblk < from && e.end() > to)
    }

    fn layout_inline(&mut self) -> Layout {
        for (first, leaf) in &mut self.leaves {
            self.dropped.extend(leaf.node.take());
            leaf.mark(*first, &mut self.dirty);
        }
        self.dropped.extend(std::mem::take(&mut self.index).into_values().filter_map(|i| i.node));
        self.moved.clear();
        self.written = Default::default();
        let extents: Vec<Extent> = self.iter().cloned().collect();
        let content = if extents.is_empty() { Content::None } else { Content::Extents(extents) };
        Layout { content, write: Vec::new(), dropped: std::mem::take(&mut self.dropped) }
    }

    /// References to the leaves of the index node that begins at `first`.
    fn refs_of(&self, first: u64) -> Vec<LeafRef> {
        let refs = self.leaves.range(first..self.index_end(first)).map(|(first, l)| {
            visit();
            LeafRef { first: *first, node: l.node.unwrap_or(NodeId(0)) }
        });
        refs.collect()
    }

    /// Where the index node behind the one at `first` begins.
    fn index_end(&self, first: u64) -> u64 {
        self.index.range(first + 1..).next().map_or(u64::MAX, |i| *i.0)
    }

    /// Makes `self.index` cover all leaves, at most `fanout` each and at most `root_max` index nodes. `moved` then names
    /// those that may have changed, rising.
    fn regroup(&mut self, fanout: usize, root_max: usize) {
        let moved = std::mem::take(&mut self.moved);
        if self.index.is_empty() {
            self.regroup_all(fanout);
            return;
        }
        let owner = |lblk: &u64| self.index.range(..=*lblk).next_back().or_else(|| self.index.first_key_value());
        let looked_at: BTreeSet<u64> = moved.iter().filter_map(owner).map(|i| *i.0).collect();
        let mut changed = BTreeSet::new();
        for old in looked_at {
            let end = self.index_end(old);
            let Some(mut node) = self.index.remove(&old) else { continue };
            // the first index node owns what lies before it, too
            let start = if self.index.range(..old).next().is_none() { 0 } else { old };
            let mut firsts: Vec<u64> = self.leaves.range(start..end).map(|l| *l.0).collect();
            firsts.iter().for_each(|_| visit());
            let before = self.index.range(..old).next_back().map(|i| *i.0);
            let joins =
                |before: &u64| self.leaves.range(*before..old).take(fanout).count() + firsts.len() <= fanout / 2;
            if firsts.is_empty() {
                self.dropped.extend(node.node);
                continue;
            }
            if let Some(before) = before.filter(joins) {
                // it owns these leaves now that no index node begins behind it
                self.dropped.extend(node.node);
                changed.insert(before);
                continue;
            }
            // The last one grows at its end: fill what lies before.
            let parts = firsts.len().div_ceil(fanout);
            let size = if end == u64::MAX { fanout } else { firsts.len().div_ceil(parts) };
            firsts = firsts.into_iter().step_by(size).collect();
            for first in firsts {
                let empty = IndexNode { node: None, rolled: false, written: Vec::new() };
                self.index.insert(first, std::mem::replace(&mut node, empty));
                changed.insert(first);
            }
        }
        self.moved = changed.into_iter().filter(|first| self.index.contains_key(first)).collect();
        if self.index.len() > root_max {
            self.regroup_all(fanout);
        }
    }

    /// Full index nodes over all leaves.
    fn regroup_all(&mut self, fanout: usize) {
        let mut old = std::mem::take(&mut self.index).into_values();
        self.moved = self.leaves.keys().step_by(fanout).copied().collect();
        for first in &self.moved {
            let node = old.next().and_then(|i| i.node);
            self.index.insert(*first, IndexNode { node, rolled: false, written: Vec::new() });
        }
        self.dropped.extend(old.filter_map(|i| i.node));
    }
}
