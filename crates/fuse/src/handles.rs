//! Open files by the number that the kernel holds.
//!
//! Owns every [`OpenFile`] of the mount: an unlinked file lives until its last handle is released here. Look-ups are
//! lock-free and write only to the slot of the handle asked for.

use braidfs::{NodeId, OpenFile};
use crossbeam::utils::CachePadded;
use parking_lot::Mutex;
use rustix::io::Errno;
use sharded_slab::{Entry, Slab};
use std::collections::HashMap;
use std::sync::atomic::AtomicU64;

/// Of the table of writers; a power of two, see [`Handles::shard`].
const SHARDS: usize = 32;

/// One open file.
pub(crate) struct Handle {
    /// The engine's handle.
    pub file: OpenFile,
    /// Its inode.
    pub ino: NodeId,
    /// The kernel may hold pages written through this handle that have not reached the volume.
    pub cached_writer: bool,
    /// [`crate::fs::BraidFs`]' capability epoch when `security.capability` was last found absent or removed.
    pub caps_epoch: AtomicU64,
}

/// All open files of a mount.
#[derive(Default)]
pub(crate) struct Handles {
    slab: Slab<CachePadded<Handle>>,
    /// Cached writers per inode, for `lseek`; absent means none.
    writers: [CachePadded<Mutex<HashMap<u64, u32>>>; SHARDS],
}

impl Handles {
    /// Keeps a handle; its number.
    pub fn insert(&self, handle: Handle) -> Result<u64, Errno> {
        let (ino, writer) = (handle.ino, handle.cached_writer);
        let key = self.slab.insert(CachePadded::new(handle)).ok_or(Errno::NFILE)?;
        if writer {
            *self.shard(ino).lock().entry(ino.0).or_default() += 1;
        }
        Ok(key as u64)
    }

    /// A handle that was given out.
    pub fn get(&self, fh: u64) -> Result<Entry<'_, CachePadded<Handle>>, Errno> {
        self.slab.get(fh as usize).ok_or(Errno::BADF)
    }

    /// Closes one.
    pub fn release(&self, fh: u64) -> Result<(), Errno> {
        let handle = self.slab.take(fh as usize).ok_or(Errno::BADF)?;
        if handle.cached_writer {
            let mut writers = self.shard(handle.ino).lock();
            if let Some(n) = writers.get_mut(&handle.ino.0) {
                *n -= 1;
                if *n == 0 {
                    writers.remove(&handle.ino.0);
                }
            }
        }
        Ok(())
    }

    /// Whether the kernel may hold pages of the file that the volume has not seen.
    pub fn has_cached_writer(&self, ino: NodeId) -> bool {
        self.shard(ino).lock().contains_key(&ino.0)
    }

    fn shard(&self, ino: NodeId) -> &Mutex<HashMap<u64, u32>> {
        &self.writers[(ino.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - SHARDS.trailing_zeros())) as usize]
    }
}
