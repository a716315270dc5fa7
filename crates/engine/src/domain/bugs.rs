//! What planted bugs do in a domain ([`crate::planted`]): only built with them.

use super::Domain;
use super::tx::Tx;
use crate::cell::FileBody;
use crate::error::Result;
use crate::planted::{Bug, planted};
use braidfs_format::{BLOCK_BYTES, BlockAddr};
use braidfs_sync::{PassWriteGuard, rank};
use std::sync::Arc;

impl Domain {
    /// The flip does not wait for the threads of slot 0.
    pub(super) fn close_gate_missing_a_slot(&self) -> PassWriteGuard<'_, Arc<Tx>, rank::Gate> {
        let gate = self.gate.write_missing(1);
        // who is still inside has a reference to it
        std::mem::forget(gate.clone());
        gate
    }

    /// Blocks that a transaction frees are used again, or discarded, before it is durable.
    pub(super) fn free_too_early(&self, runs: &[(BlockAddr, u32)]) {
        if planted(Bug::FreedReused) {
            self.space.free_early(runs);
        }
        if planted(Bug::GivenEarly) {
            // only what empties groups that can be given away
            let own = self.space.groups().first().copied();
            let mut others = runs.to_vec();
            others.retain(|(addr, _)| Some(self.store.geometry().group_of(*addr)) != own);
            self.space.free_early(&others);
        }
        if planted(Bug::DiscardEarly) {
            runs.iter().for_each(|(addr, len)| drop(self.store.discard(*addr, u64::from(*len))));
        }
    }

    /// Of blocks `from .. end` of a file that are about to be moved: where they lie is free before the commit that says where they
    /// are now ([`Bug::MovedFreedEarly`]); or what is copied is what the device has ([`Bug::MovedCopyStale`]).
    pub(crate) fn move_badly(&self, f: &mut FileBody, from: u64, end: u64) -> Result<()> {
        for lblk in from..end {
            let Some(p) = f.map.get(lblk).filter(|p| !p.unwritten) else { continue };
            if planted(Bug::MovedFreedEarly) {
                self.space.free_early(&[(p.addr, 1)]);
            }
            if planted(Bug::MovedCopyStale) && f.pages.is_dirty(lblk) {
                let mut block = vec![0; BLOCK_BYTES];
                self.store.read(p.addr, &mut block)?;
                _ = f.pages.write(lblk, 0, &block);
            }
        }
        Ok(())
    }
}
