//! The segment cleaner: empties segments whose blocks are mostly dead, by having the others written elsewhere.
//!
//! [`Space::victim`](crate::space::Space::victim) chooses the segment (greedy or by cost and benefit). Its live blocks become
//! dirty, so that the next flush or commit gives them other places; only what is still the newest moves.

use super::{MountedVolume, Volume};
use crate::cell::{Body, Cell, State};
use crate::domain::Domain;
use crate::error::Result;
use crate::planted::{Bug, planted};
use crate::types::*;
use crate::volume::operation::Op;
use braidfs_format::group::Owner;
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Inodes, each with the node of a record of theirs.
type LiveRecords = Vec<(Arc<Cell>, NodeId)>;

/// Has the overflow record of `node` written again with its touched inode.
pub(super) fn mark_node(c: &Cell, st: &mut State, node: NodeId) {
    if node != c.ino.node() {
        match &mut st.body {
            Body::File(f) => f.map.mark_dirty(&[node]),
            Body::Dir(b) => b.map.mark_dirty(&[node]),
            Body::Special => {}
        }
    }
}

impl MountedVolume {
    /// Empties up to `segments` segments of a domain: their valid blocks are made dirty, so that the next flush or commit
    /// writes them elsewhere (only what is still the newest moves). Blocks moved.
    pub(crate) fn clean_domain(&self, d: &Arc<Domain>, segments: u32) -> Result<u64> {
        let _span = tracing::debug_span!("clean", domain = %d.id, segments).entered();
        let mut moved = 0;
        let mut skip = HashSet::new();
        for _ in 0..segments {
            let s = d.space.stats();
            // moving needs room of its own
            if s.free < s.reserved + s.hidden / 2 + 600 {
                break;
            }
            let Some(v) = d.space.victim(d.committed_tx(), &skip)? else { break };
            skip.insert((v.group, v.segment));
            moved += self.move_blocks(d, &v.blocks)?;
        }
        d.counters.cleaned.fetch_add(moved, Ordering::Relaxed);
        Ok(moved)
    }

    /// Has blocks and whose they were written elsewhere, by a commit; how many.
    pub(crate) fn move_blocks(&self, d: &Arc<Domain>, blocks: &[(BlockAddr, Owner)]) -> Result<u64> {
        let mut moved = 0;
        for (addr, owner) in blocks {
            let moves = if owner.node.0 == 0 {
                self.move_node_block(d, *addr)?
            } else {
                self.move_block(d, *addr, owner.node, owner.lblk)?
            };
            moved += u64::from(moves);
        }
        d.flush_lazy()?;
        d.commit()?;
        Ok(moved)
    }

    /// Makes a data block or directory bucket dirty, if the inode still has it there.
    fn move_block(&self, d: &Arc<Domain>, addr: BlockAddr, ino: InodeNo, lblk: u64) -> Result<bool> {
        let Some(c) = d.find(ino)? else { return Ok(false) };
        let mut op = Op::begin_again(self, d.id, 3)?;
        let mut st = c.state.write();
        let here = match &st.body {
            Body::File(f) => f.map.get(lblk).filter(|p| p.addr == addr),
            Body::Dir(b) => b.map.get(lblk).filter(|p| p.addr == addr),
            Body::Special => None,
        };
        let Some(p) = here else { return Ok(false) };
        if st.deleted || p.unwritten || (c.kind != FileKind::Dir && d.in_place(&st)) {
            return Ok(false); // blocks with a fixed place stay
        }
        if c.kind == FileKind::Dir {
            op.touch(&c, &mut st)?;
            let first = braidfs_format::dentry::bucket_first(lblk);
            op.with_index(&c, &mut st, |ix, load| ix.dirty_bucket(first, load))?;
            return Ok(true);
        }
        op.write_out_older(&c, &mut st)?;
        d.load_pages(&c, &mut st, lblk, 1)?;
        if !self.reserve_pages(&c, &mut st, lblk, lblk) {
            return Ok(false);
        }
        if planted(Bug::MoveForgotten) {
            op.touch_content(&c, &mut st)?;
        } else {
            op.touch(&c, &mut st)?;
        }
        let Body::File(f) = &mut st.body else { return Ok(false) };
        f.cold = true;
        if f.pages.dirty(lblk) {
            self.shared.memory.add(0, 1);
        }
        Ok(true)
    }

    /// The inodes to which the live records of a node block belong, each with the record's node; and the live bytes.
    pub(super) fn live_records(&self, d: &Arc<Domain>, addr: BlockAddr) -> Result<(LiveRecords, usize)> {
        let mut block = vec![0u8; 4096];
        d.budget.charge_run(Way::Read, block.len());
        d.store.read(addr, &mut block)?;
        let (mut live, mut bytes) = (Vec::new(), 0);
        let Ok(n) = braidfs_format::node::NodeBlock::check(&block, d.store.volume, addr) else {
            return Ok((live, bytes));
        };
        for i in 0..n {
            let Ok(r) = braidfs_format::node::NodeBlock::record(&block, i) else { continue };
            // else a dead record of a number whose group has left the domain
            let Some(e) = d.nodes.look(r.node)? else { continue };
            if !e.used() || e.addr != addr || usize::from(e.index) != i {
                continue;
            }
            let Some(c) = d.find(r.owner)? else { continue };
            live.push((c, r.node));
            bytes += r.payload.len();
        }
        Ok((live, bytes))
    }

    /// Makes the inodes of the live records of a node block dirty.
    fn move_node_block(&self, d: &Arc<Domain>, addr: BlockAddr) -> Result<bool> {
        let mut any = false;
        for (c, node) in self.live_records(d, addr)?.0 {
            let mut op = Op::begin_again(self, d.id, 3)?;
            let mut st = c.state.write();
            if st.deleted {
                continue;
            }
            op.touch(&c, &mut st)?;
            op.credit(d.id, 1);
            mark_node(&c, &mut st, node);
            any = true;
        }
        Ok(any)
    }
}

impl Volume {
    /// Cleans up to `segments` segments per domain; blocks moved.
    ///
    /// # Errors
    /// Of the device.
    pub fn clean(&self, segments: u32) -> Result<u64> {
        let i = self.mounted();
        i.domains.iter().filter(|d| d.failed().is_none()).try_fold(0, |n, d| Ok(n + i.clean_domain(d, segments)?))
    }
}

#[cfg(test)]
mod tests;
