//! Open files, and the references to the volume that they keep.

use super::mounted::MountedVolume;
use crate::cell::opened::OpenCell;
use crate::domain::ahead::Ahead;
use crate::types::*;
use crossbeam::utils::CachePadded;
use std::sync::Arc;

/// A reference to the volume, on cache lines of its own.
pub(crate) type VolumeRef = CachePadded<Arc<MountedVolume>>;

/// An open file: keeps the inode alive while it is unlinked. Dropping it closes.
pub struct OpenFile {
    pub(crate) cell: OpenCell,
    pub(crate) ahead: Ahead,
    volume: Arc<VolumeRef>,
}

impl std::fmt::Debug for OpenFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "OpenFile({})", self.cell.ino.0)
    }
}

impl OpenFile {
    /// Number of the inode that is open.
    pub fn ino(&self) -> InodeNo {
        self.cell.ino
    }
    /// Generation of the inode's number.
    pub fn generation(&self) -> u32 {
        self.cell.generation
    }
    pub(crate) fn new(cell: OpenCell, volume: Arc<VolumeRef>) -> Self {
        Self { cell, ahead: Ahead::default(), volume }
    }
}

impl Drop for OpenFile {
    fn drop(&mut self) {
        self.ahead.give_back(&self.volume.dom(self.cell.domain).ahead);
        if let Some(cell) = self.cell.close() {
            let orphan = {
                let st = cell.state.read();
                st.nlink == 0 && !st.deleted
            };
            // one that is held goes when it is given back
            if orphan
                && !self.volume.held.orphaned(&cell)
                && let Err(e) = self.volume.reap(&cell)
            {
                tracing::warn!("closing unlinked inode {}: {e}", cell.ino.0);
                self.volume.reap_later(cell.ino);
            }
        }
    }
}
