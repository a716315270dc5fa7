//! How an extent map is kept on disk: in the inode record, or as a tree of overflow nodes.
//!
//! Depth 1: the record names the leaves. Depth 2: it names index nodes, which name the leaves. Index nodes keep
//! their ranges from one layout to the next, so that a change writes only the index nodes that it touches.

use super::{ExtentMap, IndexNode};
use crate::error::{Error, Result};
use braidfs_format::NodeId;
use braidfs_format::inode::{Content, Extent, LEAF_REFS_MAX, LeafRef, encode_extents, encode_refs};
use braidfs_format::node::NodeKind;
use std::ops::Range;

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
    /// Inline where all extents encode into `inline_budget` bytes; otherwise every leaf gets a node from
    /// `alloc`, and the record the references, which fit the budget too (a budget of 2800 is always enough;
    /// less makes index nodes come earlier).
    ///
    /// # Errors
    /// Of `alloc`, and [`Error::TooBig`] where the budget does not hold the root. The map then stays valid and
    /// keeps the nodes that it was given; a later call goes on with them.
    pub fn layout(&mut self, inline_budget: usize, alloc: &mut dyn FnMut() -> Result<NodeId>) -> Result<Layout> {
        let bytes: usize = self.leaves.iter().map(|l| l.bytes).sum();
        if bytes <= inline_budget {
            return Ok(self.layout_inline());
        }
        let fanout = usize::from(self.limits.refs);
        let root_max = fanout.min(inline_budget / REF_BYTES);
        let leaves = self.leaves.len();
        let depth = if leaves <= root_max { 1 } else { 2 };
        if leaves.div_ceil(fanout) > root_max {
            return Err(Error::TooBig);
        }
        for leaf in &mut self.leaves {
            if leaf.node.is_none() {
                leaf.node = Some(alloc()?);
                leaf.dirty = true;
            }
        }
        if depth == 1 {
            self.dropped.extend(self.index.drain(..).filter_map(|i| i.node));
        } else {
            let groups = self.regroup(fanout, root_max);
            for i in &mut self.index {
                if i.node.is_none() {
                    i.node = Some(alloc()?);
                }
            }
            debug_assert_eq!(groups.len(), self.index.len());
        }
        // From here on nothing fails, so that a layout is either given whole or not at all.
        let mut write = Vec::new();
        let mut refs: Vec<LeafRef> = Vec::with_capacity(leaves);
        for leaf in &mut self.leaves {
            let Some(node) = leaf.node else { unreachable!("every leaf was given a node above") };
            refs.push(LeafRef { first: leaf.first, node });
            if std::mem::take(&mut leaf.dirty) {
                write.push((node, NodeKind::ExtentLeaf, encode_extents(&leaf.extents)));
            }
        }
        if depth == 2 {
            let mut root = Vec::with_capacity(self.index.len());
            let mut rest = refs.as_slice();
            for i in 0..self.index.len() {
                let end = self.index.get(i + 1).map_or(u64::MAX, |n| n.first);
                let (own, after) = rest.split_at(rest.partition_point(|r| r.first < end));
                rest = after;
                let index = &mut self.index[i];
                let Some(node) = index.node else { unreachable!("every index was given a node above") };
                root.push(LeafRef { first: index.first, node });
                if index.written != own {
                    index.written = own.to_vec();
                    write.push((node, NodeKind::ExtentIndex, encode_refs(own)));
                }
            }
            refs = root;
        }
        Ok(Layout { content: Content::Tree { depth, refs }, write, dropped: std::mem::take(&mut self.dropped) })
    }

    /// Upper bound of the overflow nodes that [`Self::layout`] would write now.
    pub fn dirty_nodes_estimate(&self) -> usize {
        let n = self.leaves.len();
        let leaves = self.leaves.iter().filter(|l| l.dirty || l.node.is_none()).count();
        // an index node that splits leaves its parts at least half full
        let index = if n <= 1 { 0 } else { self.index.len() + n / (usize::from(self.limits.refs) / 2) + 1 };
        leaves + index
    }

    /// Whether the map is close to the most that a tree can hold: a writer should refuse to add extents
    /// ([`Error::TooBig`]) before a layout must.
    pub fn is_full(&self) -> bool {
        let fanout = usize::from(self.limits.refs);
        self.leaves.len() + LEAF_REFS_MAX >= fanout * fanout
    }

    fn layout_inline(&mut self) -> Layout {
        for leaf in &mut self.leaves {
            self.dropped.extend(leaf.node.take());
            leaf.dirty = true;
        }
        self.dropped.extend(self.index.drain(..).filter_map(|i| i.node));
        let extents: Vec<Extent> = self.iter().cloned().collect();
        let content = if extents.is_empty() { Content::None } else { Content::Extents(extents) };
        Layout { content, write: Vec::new(), dropped: std::mem::take(&mut self.dropped) }
    }

    /// Makes `self.index` cover all leaves, at most `fanout` each and at most `root_max` index nodes.
    fn regroup(&mut self, fanout: usize, root_max: usize) -> Vec<Range<usize>> {
        let n = self.leaves.len();
        let mut groups: Vec<(Range<usize>, Option<IndexNode>)> = Vec::new();
        let mut unused = Vec::new();
        let mut old = std::mem::take(&mut self.index).into_iter().peekable();
        while let Some(index) = old.next() {
            let start = groups.last().map_or(0, |g| g.0.end);
            let end = old.peek().map_or(n, |next| self.leaves.partition_point(|l| l.first < next.first));
            let len = end.saturating_sub(start);
            match groups.last_mut() {
                _ if len == 0 => unused.push(index),
                Some((last, _)) if last.len() + len <= fanout / 2 => {
                    last.end = end;
                    unused.push(index);
                }
                _ => {
                    let parts = len.div_ceil(fanout);
                    // The last one grows at its end: fill what lies before.
                    let size = if end == n { fanout } else { len.div_ceil(parts) };
                    let mut index = Some(index);
                    for p in 0..parts {
                        let from = start + p * size;
                        groups.push((from..end.min(from + size), index.take()));
                    }
                }
            }
        }
        if groups.is_empty() || groups.len() > root_max {
            let mut nodes: Vec<IndexNode> = groups.into_iter().filter_map(|g| g.1).collect();
            nodes.reverse();
            groups = (0..n).step_by(fanout).map(|from| (from..n.min(from + fanout), nodes.pop())).collect();
            unused.append(&mut nodes);
        }
        self.dropped.extend(unused.into_iter().filter_map(|i| i.node));
        let mut ranges = Vec::with_capacity(groups.len());
        for (range, index) in groups {
            let first = self.leaves[range.start].first;
            let (node, written) = index.map_or((None, Vec::new()), |i| (i.node, i.written));
            self.index.push(IndexNode { first, node, written });
            ranges.push(range);
        }
        ranges
    }
}
