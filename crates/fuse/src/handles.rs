//! Files that the kernel asked to open, by the number that it holds; on a mount without OPEN there are none.
//!
//! Owns every [`OpenFile`] of the mount: an unlinked file lives until its last handle is released here. Look-ups are
//! lock-free and write only to the slot of the handle asked for.

use crate::node::WireId;
use braidfs::{InodeNo, OpenFile};
use braidfs_sync::{Mutex, rank};
use crossbeam::utils::CachePadded;
use rustix::io::Errno;
use sharded_slab::{Entry, Slab};
use std::collections::HashMap;
use std::sync::atomic::AtomicU64;

/// Writers of one inode through the kernel's cache.
#[derive(Debug)]
struct Writers {
    /// What the kernel calls the inode.
    id: WireId,
    handles: u32,
    /// The kernel may hold dirty pages for which there must be room.
    promised: bool,
}

/// Of the table of writers; a power of two, see [`Handles::shard`].
const SHARDS: usize = 32;

/// One open file.
pub(crate) struct Handle {
    /// The engine's handle.
    pub file: OpenFile,
    /// The kernel may hold pages written through this handle that have not reached the volume.
    pub cached_writer: bool,
    /// It was append-only when it was opened for writing.
    pub append_only: bool,
    /// [`crate::fs::BraidFs`]' capability epoch when `security.capability` was last found absent or removed.
    pub caps_epoch: AtomicU64,
}

impl Handle {
    pub fn ino(&self) -> InodeNo {
        self.file.ino()
    }

    /// What the kernel calls that.
    pub fn id(&self) -> WireId {
        WireId::new(self.file.ino(), self.file.generation())
    }
}

/// All open files of a mount.
#[derive(Default)]
pub(crate) struct Handles {
    slab: Slab<CachePadded<Handle>>,
    /// Cached writers per inode, for `lseek` and [`crate::room`]; absent means none.
    writers: [CachePadded<Mutex<HashMap<u64, Writers>, rank::WriterShard>>; SHARDS],
}

impl Handles {
    /// Keeps a handle; its number.
    pub fn insert(&self, handle: Handle) -> Result<u64, Errno> {
        let (id, writer) = (handle.id(), handle.cached_writer);
        let key = self.slab.insert(CachePadded::new(handle)).ok_or(Errno::NFILE)?;
        if writer {
            let mut writers = self.shard(id.ino()).lock();
            let w = writers.entry(id.ino().0).or_insert(Writers { id, handles: 0, promised: false });
            (w.handles, w.promised) = (w.handles + 1, true);
        }
        Ok(key as u64)
    }

    /// A handle that was given out.
    pub fn get(&self, fh: u64) -> Result<Entry<'_, CachePadded<Handle>>, Errno> {
        self.slab.get(fh as usize).ok_or(Errno::BADF)
    }

    /// Closes a handle that was given out; `EBADF` where there is none.
    pub fn release(&self, fh: u64) -> Result<(), Errno> {
        let handle = self.slab.take(fh as usize).ok_or(Errno::BADF)?;
        if handle.cached_writer {
            let mut writers = self.shard(handle.ino()).lock();
            if let Some(w) = writers.get_mut(&handle.ino().0) {
                w.handles -= 1;
                if w.handles == 0 {
                    writers.remove(&handle.ino().0);
                }
            }
        }
        Ok(())
    }

    /// Whether the kernel may hold pages of the file that the volume has not seen.
    pub fn has_cached_writer(&self, ino: InodeNo) -> bool {
        self.shard(ino).lock().contains_key(&ino.0)
    }

    /// How many files among `which` have a cached writer.
    pub fn cached_writers(&self, which: impl Fn(InodeNo) -> bool) -> u64 {
        let of = |shard: &CachePadded<Mutex<HashMap<u64, Writers>, rank::WriterShard>>| {
            shard.lock().values().filter(|w| which(w.id.ino())).count() as u64
        };
        self.writers.iter().map(of).sum()
    }

    /// The kernel may put more dirty pages of the file into its cache.
    pub fn promise(&self, ino: InodeNo) {
        if let Some(w) = self.shard(ino).lock().get_mut(&ino.0) {
            w.promised = true;
        }
    }

    /// The files among `which` that the kernel was promised room for since they were last asked for here.
    pub fn take_promised(&self, which: impl Fn(InodeNo) -> bool) -> Vec<WireId> {
        let mut found = Vec::new();
        for shard in &self.writers {
            for w in shard.lock().values_mut().filter(|w| w.promised && which(w.id.ino())) {
                w.promised = false;
                found.push(w.id);
            }
        }
        found
    }

    fn shard(&self, ino: InodeNo) -> &Mutex<HashMap<u64, Writers>, rank::WriterShard> {
        &self.writers[(ino.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - SHARDS.trailing_zeros())) as usize]
    }
}
