//! Open files, and the references to the volume that they keep.

use super::mounted::MountedVolume;
use crate::cell::Cell;
use crate::types::*;
use crossbeam::utils::CachePadded;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A reference to the volume, on cache lines of its own.
pub(crate) type VolumeRef = CachePadded<Arc<MountedVolume>>;

/// An open file: keeps the inode alive while it is unlinked. Dropping it closes.
pub struct OpenFile {
    pub(crate) cell: Arc<Cell>,
    volume: Arc<VolumeRef>,
}

impl std::fmt::Debug for OpenFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "OpenFile({})", self.cell.ino.0)
    }
}

impl OpenFile {
    /// The inode.
    pub fn ino(&self) -> NodeId {
        self.cell.ino
    }
    /// Generation of the inode's number.
    pub fn gener(&self) -> u32 {
        self.cell.gener
    }
    pub(crate) fn new(cell: Arc<Cell>, volume: Arc<VolumeRef>) -> Self {
        cell.opens.fetch_add(1, Ordering::SeqCst);
        Self { cell, volume }
    }
}

impl Drop for OpenFile {
    fn drop(&mut self) {
        // in this order: whoever takes the last name says so, then looks at the count
        if self.cell.opens.fetch_sub(1, Ordering::SeqCst) == 1 && self.cell.nameless.load(Ordering::SeqCst) {
            let orphan = {
                let st = self.cell.state.read();
                st.nlink == 0 && !st.deleted
            };
            // one that is held goes when it is given back
            if orphan
                && !self.volume.held.orphaned(&self.cell)
                && let Err(e) = self.volume.reap(&self.cell)
            {
                // it stays an orphan: the next mount reclaims it
                tracing::warn!("closing unlinked inode {}: {e}", self.cell.ino.0);
            }
        }
    }
}
