//! What writing out cells produced: node records without a place, and blocks to write.

use crate::cell::Cell;
use crate::cell::pages::Page;
use crate::types::*;
use braidfs_format::node::NodeRecord;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A run of blocks to write.
#[derive(Debug)]
pub enum Payload {
    /// Pages of a file, of its blocks from that logical one on; `Cell::inflight` goes down when they are written.
    Pages(Vec<Page>, Arc<Cell>, u64),
    /// Sealed metadata blocks.
    Raw(Vec<u8>),
    /// A sealed bucket of a directory.
    Bucket(Vec<u8>),
}

/// Runs of blocks to write, with their places.
pub type Writes = Vec<(BlockAddr, Payload)>;

/// What serialising cells produced and nobody has written yet.
#[derive(Debug, Default)]
pub struct Out {
    /// Node records without a place.
    pub nodes: Vec<NodeRecord>,
    /// Nodes to free, with their generation.
    pub free: Vec<(NodeId, u32)>,
    /// Blocks to write.
    pub writes: Writes,
    /// Bytes in `writes`.
    pub bytes: usize,
    /// Data was written in place on the way.
    pub in_place: bool,
    /// Whoever gathers this flushes the devices right after it.
    pub flushed: bool,
    /// Inodes that are gone: leave the cache when the transaction is durable.
    pub dead: Vec<Arc<Cell>>,
}

impl Out {
    /// Adds the pages of the blocks from `lblk` on; the cell has them under way until they are written.
    pub(super) fn write_pages(&mut self, at: BlockAddr, lblk: u64, pages: Vec<Page>, cell: &Arc<Cell>) {
        cell.inflight.fetch_add(1, Ordering::AcqRel);
        self.bytes += pages.len() * 4096;
        self.writes.push((at, Payload::Pages(pages, cell.clone(), lblk)));
    }
    /// Adds what another thread has written out.
    pub fn append(&mut self, mut o: Out) {
        self.nodes.append(&mut o.nodes);
        self.free.append(&mut o.free);
        self.writes.append(&mut o.writes);
        self.bytes += o.bytes;
        self.dead.append(&mut o.dead);
    }
}
