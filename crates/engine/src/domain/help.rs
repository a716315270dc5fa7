//! What a helper of a commit does: takes cells, writes them out, packs their node records.

use super::Domain;
use super::out::{Out, Payload};
use super::packed::{Packer, Together};
use super::tx::Tx;
use super::work::{Helper, Share, Work};
use crate::error::Result;
use crate::types::*;
use braidfs_format::group::{SegmentKind, Temperature};
use braidfs_format::journal::Record;
use braidfs_format::node::{NodeEntry, NodeRecord};

/// Bytes of data that a helper gathers before it writes them.
const BATCH_BYTES: usize = 4 << 20;

impl Domain {
    /// Takes cells from the list and writes them out, until there is none left. How many it took.
    pub(super) fn help(&self, w: &Work) -> usize {
        let Some(mut helper) = w.begin() else { return 0 };
        let mut took = 0;
        if let Err(e) = self.write_cells(&mut helper, &mut took) {
            w.fail(e);
        }
        took
    }

    fn write_cells(&self, helper: &mut Helper<'_>, took: &mut usize) -> Result<()> {
        let w = helper.work;
        let mlog = self.pick_mlog();
        let mut out = Out::default();
        while let Some(cell) = w.take() {
            *took += 1;
            let mut st = cell.state.write();
            self.serialise(&w.tx, cell, &mut st, &mut out, mlog)?;
            drop(st);
            if out.bytes >= BATCH_BYTES {
                out.bytes = 0;
                self.submit(std::mem::take(&mut out.writes))?;
            }
        }
        let mut made = Share::default();
        let mut nodes = std::mem::take(&mut out.nodes);
        loop {
            let all = helper.takes_rest(&mut nodes);
            made.nodes = self.pack(&w.tx, nodes, all, &mut out, &mut made.records, mlog)?;
            self.submit(std::mem::take(&mut out.writes))?;
            made.free.append(&mut out.free);
            made.dead.append(&mut out.dead);
            match helper.leave(&mut made) {
                Some(rest) => nodes = rest,
                None => return Ok(()),
            }
        }
    }

    /// Packs node records into node blocks of the node log; their facts go to `records`, the blocks to `out`. Records that
    /// fill no block are returned, but with `all`.
    pub(super) fn pack(
        &self,
        tx: &Tx,
        nodes: Vec<NodeRecord>,
        all: bool,
        out: &mut Out,
        records: &mut Vec<Record>,
        mlog: usize,
    ) -> Result<Vec<NodeRecord>> {
        let mut packer = Packer::default();
        for n in nodes {
            if packer.push(n) {
                self.write_together(tx, &mut packer.full, out, records, mlog)?;
            }
        }
        if all && !packer.open.records.is_empty() {
            self.write_together(tx, &mut packer.open, out, records, mlog)?;
        }
        Ok(packer.open.records.into_iter().map(|(n, _)| n).collect())
    }

    /// Makes a node block of these records, of which there is one at least.
    fn write_together(
        &self,
        tx: &Tx,
        together: &mut Together,
        out: &mut Out,
        records: &mut Vec<Record>,
        mlog: usize,
    ) -> Result<()> {
        let addr = self.alloc_meta(tx, mlog)?;
        let block = together.builder.finish(self.id.0, self.store.volume, addr, tx.id.0);
        records.push(Record::Alloc {
            addr,
            len: 1,
            kind: SegmentKind::Node,
            temperature: Temperature::Hot,
            owner: InodeNo(0),
            lblk: 0,
        });
        records.push(Record::Live { addr, live: together.records.len() as u8 });
        for (n, index) in together.records.drain(..) {
            let written = tx.id.0 as u32;
            let entry = NodeEntry { addr, index, flags: n.flags, generation: n.generation, written };
            records.push(Record::Node { node: n.node, entry });
        }
        together.begin();
        out.bytes += block.len();
        out.writes.push((addr, Payload::Raw(block)));
        Ok(())
    }
}
