//! Roll-forward records after a crash become cells of the recovery transaction: the inodes that an fsync wrote beside the
//! transactions, and no commit since. Which records count: `newest`.

pub(super) mod newest;
mod parts;

use super::recovered::{Forward, Forwarded};
use super::{Domain, Enter};
use crate::cell::extents::Runs;
use crate::cell::record::cell_of;
use crate::cell::{Body, Cell};
use crate::error::{Error, Result};
use crate::space::Run;
use crate::types::*;
use braidfs_format::group::{SegmentKind, Temperature};
use braidfs_format::inode::Link;
use braidfs_format::journal::Record;
use braidfs_format::node::{DIR, NodeRecord};
use parts::{Part, parts_of, without};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

impl Domain {
    /// Turns roll-forward records into cells of the running (recovery) transaction: takes their blocks and nodes.
    /// Nothing else may have been allocated before.
    ///
    /// # Errors
    /// [`crate::Error::Corrupt`] where a record cannot be.
    pub fn roll_forward(&self, e: &Enter<'_>, records: Vec<Forward>) -> Result<Vec<Forwarded>> {
        let mut out = Vec::new();
        for record in records {
            if let Some(f) = self.roll_forward_one(e, record)? {
                out.push(f);
            }
        }
        Ok(out)
    }

    fn roll_forward_one(&self, e: &Enter<'_>, forward: Forward) -> Result<Option<Forwarded>> {
        let inode = &forward.record;
        let old = match self.older_than_record(inode) {
            // the record names none of its entries: a check makes it again from what hangs in it
            Err(why) if inode.flags & DIR != 0 && self.shared.passes_over(&why) => {
                tracing::error!("{}: {why}; left to the check", inode.node);
                return Ok(None);
            }
            old => old?,
        };
        if old.is_some() && inode.flags & DIR != 0 {
            return Ok(None); // it exists: the skeleton says nothing new
        }
        if let Some(o) = &old
            && o.state.read().durability.version() >= inode.version
        {
            return Ok(None);
        }
        let (version, cell) = (inode.version, self.cell_of_forwarded(forward)?);
        let new_nodes: HashSet<NodeId> = cell.nodes(&cell.state.read()).into_iter().collect();
        let mut replaced = old.map(|o| self.take_out_replaced(&o, &new_nodes)).unwrap_or_default();
        for n in &new_nodes {
            if !self.nodes.get(*n)?.used() {
                self.nodes.take(*n)?;
            }
        }
        let cell = Arc::new(cell);
        let mut st = cell.state.write();
        st.dropped = replaced.nodes.into();
        if let Body::File(f) = &mut st.body {
            let parts = parts_of(&f.map);
            self.take_new_blocks(e, cell.ino, &without(&parts, &replaced.parts))?;
            replaced.parts = without(&replaced.parts, &parts);
            f.map.all_dirty();
        }
        let mut runs: Runs = replaced.parts.iter().map(|p| (BlockAddr(p.start), p.len)).collect();
        self.free_runs(e.tx(), &mut runs);
        self.touch(e.tx(), &cell, &mut st)?;
        // the state is the record's: whoever waits for a later version of this inode must not take it for that
        st.durability.recovery_keeps_version(version);
        let (parent, named) = (st.links.first().map_or(InodeNo(0), |l| l.parent), st.link_seq);
        drop(st);
        self.cells.insert_new(cell.clone());
        Ok(Some(Forwarded { is_dir: cell.kind == FileKind::Dir, cell, old_links: replaced.links, parent, named }))
    }

    /// The inode of a roll-forward record as the committed transactions have it; `None` where it is new.
    fn older_than_record(&self, inode: &NodeRecord) -> Result<Option<Arc<Cell>>> {
        match self.find(inode.node.inode()) {
            Ok(Some(old)) if old.generation != inode.generation => {
                self.forget_cell(&old);
                Ok(None)
            }
            Ok(old) => Ok(old),
            // the record that was synced says all; blocks that only the lost one names are found by a check
            Err(why)
                if inode.flags & DIR == 0 && (matches!(why, Error::Corrupt(_)) || self.shared.passes_over(&why)) =>
            {
                tracing::error!("{}: {why}; restored as it was synced", inode.node);
                Ok(None)
            }
            Err(e) => Err(e),
        }
    }

    /// A cell of a roll-forward record, whose overflow nodes are in the same chunk or, unchanged, where the table says.
    fn cell_of_forwarded(&self, forward: Forward) -> Result<Cell> {
        let Forward { record, inode, overflow } = forward;
        let mut by_node: HashMap<NodeId, NodeRecord> = overflow.into_iter().map(|r| (r.node, r)).collect();
        for r in by_node.values() {
            self.new_generations.lock().insert(r.node, r.generation);
        }
        let inside = self.space.inside();
        let holds = |addr, len| inside.holds(addr, len);
        cell_of(&record, inode, self.id, self.places(&holds), &mut |n| match by_node.remove(&n) {
            Some(r) => Ok(r),
            None => self.nodes.load(n, &self.nodes.get(n)?),
        })
    }

    /// Takes the committed cell of an inode out of the cache: what it had, of its nodes those that `new_nodes` has no more.
    fn take_out_replaced(&self, old: &Arc<Cell>, new_nodes: &HashSet<NodeId>) -> Replaced {
        let st = old.state.read();
        let parts = match &st.body {
            Body::File(f) => parts_of(&f.map),
            _ => Vec::new(),
        };
        let nodes = old.nodes(&st).into_iter().filter(|n| !new_nodes.contains(n)).collect();
        let replaced = Replaced { links: st.links.to_vec(), parts, nodes };
        drop(st);
        self.forget_cell(old);
        replaced
    }

    /// Takes blocks of a file that it did not have, and tells the journal of them.
    fn take_new_blocks(&self, e: &Enter<'_>, owner: InodeNo, parts: &[Part]) -> Result<()> {
        for p in parts {
            let run = Run { addr: BlockAddr(p.start), len: p.len };
            self.space.take(run)?;
            e.tx().record(Record::Alloc {
                addr: run.addr,
                len: run.len,
                kind: SegmentKind::Data,
                temperature: Temperature::Warm,
                owner,
                lblk: p.lblk,
            });
        }
        Ok(())
    }
}

/// What the committed state of an inode had that a roll-forward record replaces.
#[derive(Default)]
struct Replaced {
    links: Vec<Link>,
    /// Its blocks.
    parts: Vec<Part>,
    /// Overflow nodes that it has no more.
    nodes: Vec<NodeId>,
}
