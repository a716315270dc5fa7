//! Files that the kernel asked to open, by the number that it holds; on a mount without OPEN there are none.
//!
//! Owns every [`OpenFile`] of the mount: an unlinked file lives until its last handle is released here. Look-ups are
//! lock-free and write only to the slot of the handle asked for.
//!
//! **Numbers outlive a process** ([`crate::upgrade`]): the kernel goes on to use those that the one before gave out. The upper
//! [`LIFE_BITS`] bits of a number say in which life of the mount it was given, so that a new number is none of those; for
//! these there is a table, made once, of where each lies now.

use crate::node::WireId;
use crate::shards::Shards;
use braidfs::{InodeNo, OpenFile};
use braidfs_sync::{Mutex, rank};
use crossbeam::utils::CachePadded;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use sharded_slab::{Config, DefaultConfig, Entry, Slab};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Writers of one inode.
#[derive(Debug)]
struct Writers {
    /// What the kernel calls the inode.
    id: WireId,
    handles: u32,
    /// Those of them through the kernel's cache.
    cached: u32,
    /// The kernel may hold dirty pages for which there must be room: since when it was told so last.
    promised: Option<Instant>,
}

/// Of the table of writers, see [`Shards`].
const SHARDS: usize = 32;

/// Of the number of a handle: which life of the mount it was given in.
const LIFE_BITS: u32 = 12;
const KEY_BITS: u32 = u64::BITS - LIFE_BITS;

/// Of the slab: it leaves the upper bits of a key alone.
#[derive(Debug)]
pub(crate) struct Keys;

impl Config for Keys {
    const INITIAL_PAGE_SIZE: usize = DefaultConfig::INITIAL_PAGE_SIZE;
    // 33 million handles of each thread's; the other bits tell apart what had the same place
    const MAX_PAGES: usize = 20;
    const MAX_THREADS: usize = DefaultConfig::MAX_THREADS;
    const RESERVED_BITS: usize = LIFE_BITS as usize;
}

/// A handle in the slab.
pub(crate) type Kept<'a> = Entry<'a, CachePadded<Handle>, Keys>;

/// One open file.
pub(crate) struct Handle {
    /// The engine's handle.
    pub file: OpenFile,
    /// The kernel may hold pages written through this handle that have not reached the volume.
    pub cached_writer: AtomicBool,
    /// It is open for writing. So is taken to be what an earlier process opened, which does not tell it.
    pub writer: bool,
    /// It was append-only when it was opened for writing.
    pub append_only: bool,
    /// Its number; set when it is kept.
    pub fh: u64,
    /// [`crate::fs::BraidFs`]' capability epoch when `security.capability` was last found absent or removed.
    pub caps_epoch: AtomicU64,
}

impl Handle {
    pub fn ino(&self) -> InodeNo {
        self.file.ino()
    }

    /// Whether the kernel may hold such pages.
    pub fn is_cached_writer(&self) -> bool {
        self.cached_writer.load(Ordering::Relaxed)
    }

    /// What the kernel calls that.
    pub fn id(&self) -> WireId {
        WireId::new(self.file.ino(), self.file.generation())
    }
}

/// A handle as one process tells the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct HandedHandle {
    /// Number that the kernel has for it.
    pub fh: u64,
    pub ino: u64,
    pub generation: u32,
    pub cached_writer: bool,
    pub append_only: bool,
}

impl HandedHandle {
    /// The handle, of the same file opened anew.
    pub fn of(self, file: OpenFile) -> Handle {
        let Self { fh, cached_writer, append_only, .. } = self;
        Handle {
            file,
            cached_writer: cached_writer.into(),
            writer: true,
            append_only,
            fh,
            caps_epoch: AtomicU64::new(0),
        }
    }
}

/// All open files of a mount.
pub(crate) struct Handles {
    slab: Slab<CachePadded<Handle>, Keys>,
    /// Of this process; in the upper bits of the numbers that it gives.
    life: u64,
    /// Where those are that earlier ones gave out. One that was closed stays in it, and leads nowhere.
    earlier: HashMap<u64, usize>,
    /// Writers per inode, for `lseek` and [`crate::room`]; absent means none.
    writers: Shards<Writers, rank::WriterShard, SHARDS>,
}

impl Default for Handles {
    fn default() -> Self {
        Self { slab: Slab::new_with_config(), life: 0, earlier: HashMap::new(), writers: Default::default() }
    }
}

impl Handles {
    /// With those that an earlier process gave out, under their numbers.
    pub fn of_earlier(handles: impl IntoIterator<Item = (u64, Handle)>) -> Result<Self, Errno> {
        let (mut all, mut lives) = (Self::default(), std::collections::HashSet::new());
        for (fh, handle) in handles {
            let key = all.keep(handle, Some(fh))?;
            if all.earlier.insert(fh, (key & ((1 << KEY_BITS) - 1)) as usize).is_some() {
                return Err(Errno::INVAL);
            }
            lives.insert(fh >> KEY_BITS);
        }
        let free = (1..1 << LIFE_BITS).find(|life| !lives.contains(life));
        all.life = free.ok_or(Errno::NFILE)?;
        Ok(all)
    }

    /// Keeps a handle; its number.
    pub fn insert(&self, handle: Handle) -> Result<u64, Errno> {
        self.keep(handle, None)
    }

    /// The number that it would have here; `fh`: it has another one.
    fn keep(&self, mut handle: Handle, fh: Option<u64>) -> Result<u64, Errno> {
        let (id, writer, cached) = (handle.id(), handle.writer, handle.is_cached_writer());
        let place = self.slab.vacant_entry().ok_or(Errno::NFILE)?;
        let number = self.life << KEY_BITS | place.key() as u64;
        handle.fh = fh.unwrap_or(number);
        place.insert(CachePadded::new(handle));
        if writer {
            let mut writers = self.writers.of(id.ino().0).lock();
            let w = writers.entry(id.ino().0).or_insert(Writers { id, handles: 0, cached: 0, promised: None });
            w.handles += 1;
            w.cached += u32::from(cached);
            if cached {
                w.promised = Some(Instant::now());
            }
        }
        Ok(number)
    }

    /// A handle is written through after all, and the kernel has not been told of it yet.
    pub fn write_through(&self, fh: u64) -> Result<(), Errno> {
        let handle = self.get(fh)?;
        if handle.cached_writer.swap(false, Ordering::Relaxed)
            && let Some(w) = self.writers.of(handle.ino().0).lock().get_mut(&handle.ino().0)
        {
            w.cached -= 1;
            w.promised = w.promised.filter(|_| w.cached > 0);
        }
        Ok(())
    }

    /// Where a handle is, by its number.
    fn key(&self, fh: u64) -> Result<usize, Errno> {
        if fh >> KEY_BITS == self.life {
            return Ok((fh & ((1 << KEY_BITS) - 1)) as usize);
        }
        self.earlier.get(&fh).copied().ok_or(Errno::BADF)
    }

    /// A handle that was given out.
    pub fn get(&self, fh: u64) -> Result<Kept<'_>, Errno> {
        self.slab.get(self.key(fh)?).ok_or(Errno::BADF)
    }

    /// What another process must know of them: all handles, and the files among them that the kernel was promised room for.
    pub fn handed(&mut self) -> (Vec<HandedHandle>, Vec<u64>) {
        let of = |h: &CachePadded<Handle>| HandedHandle {
            fh: h.fh,
            ino: h.ino().0,
            generation: h.file.generation(),
            cached_writer: h.is_cached_writer(),
            append_only: h.append_only,
        };
        let handles = self.slab.unique_iter().map(of).collect();
        let promised = self.writers.iter().flat_map(|shard| {
            let of_shard: Vec<u64> =
                shard.lock().iter().filter(|(_, w)| w.promised.is_some()).map(|(ino, _)| *ino).collect();
            of_shard
        });
        let mut promised: Vec<u64> = promised.collect();
        promised.sort_unstable();
        (handles, promised)
    }

    /// Of all cached writers these, in order, are promised something.
    pub fn set_promised(&self, which: &[u64]) {
        self.writers.iter().for_each(|s| {
            s.lock().iter_mut().for_each(|(ino, w)| {
                let promised = w.cached > 0 && which.binary_search(ino).is_ok();
                w.promised = promised.then(Instant::now);
            })
        });
    }

    /// Closes a handle that was given out; `EBADF` where there is none.
    pub fn release(&self, fh: u64) -> Result<(), Errno> {
        let handle = self.slab.take(self.key(fh)?).ok_or(Errno::BADF)?;
        if handle.writer {
            let mut writers = self.writers.of(handle.ino().0).lock();
            if let Some(w) = writers.get_mut(&handle.ino().0) {
                w.handles -= 1;
                w.cached -= u32::from(handle.is_cached_writer());
                w.promised = w.promised.filter(|_| w.cached > 0);
                if w.handles == 0 {
                    writers.remove(&handle.ino().0);
                }
            }
        }
        Ok(())
    }

    /// Whether the file is open for writing, in whichever way.
    pub fn has_writer(&self, ino: InodeNo) -> bool {
        self.writers.of(ino.0).lock().contains_key(&ino.0)
    }

    /// Whether a `write` to the file may go to the kernel's cache.
    pub fn has_cached_writer(&self, ino: InodeNo) -> bool {
        self.writers.of(ino.0).lock().get(&ino.0).is_some_and(|w| w.cached > 0)
    }

    /// The files among `which` that have a cached writer.
    pub fn written_cached(&self, which: impl Fn(InodeNo) -> bool) -> Vec<WireId> {
        let mut found = Vec::new();
        for shard in self.writers.iter() {
            found.extend(shard.lock().values().filter(|w| w.cached > 0 && which(w.id.ino())).map(|w| w.id));
        }
        found
    }

    /// How many files among `which` have a cached writer.
    pub fn cached_writers(&self, which: impl Fn(InodeNo) -> bool) -> u64 {
        let of = |shard: &Mutex<HashMap<u64, Writers>, rank::WriterShard>| {
            shard.lock().values().filter(|w| w.cached > 0 && which(w.id.ino())).count() as u64
        };
        self.writers.iter().map(of).sum()
    }

    /// The kernel may put more dirty pages of the file into its cache.
    pub fn promise(&self, ino: InodeNo) {
        if let Some(w) = self.writers.of(ino.0).lock().get_mut(&ino.0) {
            w.promised = (w.cached > 0).then(Instant::now);
        }
    }

    /// Whether the kernel was promised room for one of the files among `which`.
    pub fn any_promised(&self, which: impl Fn(InodeNo) -> bool) -> bool {
        self.writers.iter().any(|shard| shard.lock().values().any(|w| w.promised.is_some() && which(w.id.ino())))
    }

    /// How many files among `which` the kernel is promised room for; `None`: for some of them since `then`.
    pub fn promised_before(&self, then: Instant, which: impl Fn(InodeNo) -> bool) -> Option<u64> {
        let mut found = 0;
        for shard in self.writers.iter() {
            for at in shard.lock().values().filter(|w| which(w.id.ino())).filter_map(|w| w.promised) {
                if at >= then {
                    return None;
                }
                found += 1;
            }
        }
        Some(found)
    }

    /// The files among `which` that the kernel was promised room for since they were last asked for here; `all`: also those that it
    /// was not, and may write to without asking, because there was room enough.
    pub fn take_promised(&self, all: bool, which: impl Fn(InodeNo) -> bool) -> Vec<WireId> {
        let mut found = Vec::new();
        for shard in self.writers.iter() {
            for w in
                shard.lock().values_mut().filter(|w| w.cached > 0 && (all || w.promised.is_some()) && which(w.id.ino()))
            {
                w.promised = None;
                found.push(w.id);
            }
        }
        found
    }

    /// [`Self::take_promised`], but that what was promised within `lately` stays so: who was told to go on may not have stored
    /// anything yet.
    pub fn take_promised_but_lately(&self, lately: Duration, which: impl Fn(InodeNo) -> bool) -> Vec<WireId> {
        let mut found = Vec::new();
        for shard in self.writers.iter() {
            for w in shard.lock().values_mut().filter(|w| w.cached > 0 && which(w.id.ino())) {
                let Some(at) = w.promised else { continue };
                w.promised = w.promised.filter(|_| at.elapsed() < lately);
                found.push(w.id);
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use braidfs::{MkfsOptions, MountOptions, Volume};
    use braidfs_device::{Device, MemDevice};
    use std::sync::Arc;

    fn volume() -> Volume {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(16384));
        braidfs::mkfs::format(std::slice::from_ref(&device), &MkfsOptions::default()).unwrap();
        Volume::mount(vec![device], MountOptions::default()).unwrap()
    }

    #[test]
    fn numbers_stay_over_any_number_of_processes() {
        let vol = volume();
        let open = |cached_writer| Handle {
            file: vol.open(InodeNo::ROOT).unwrap(),
            cached_writer: AtomicBool::new(cached_writer),
            writer: cached_writer,
            append_only: false,
            fh: 0,
            caps_epoch: AtomicU64::new(0),
        };
        let mut handles = Handles::default();
        let mut known = vec![handles.insert(open(true)).unwrap(), handles.insert(open(false)).unwrap()];
        for process in 0..5 {
            assert!(handles.has_cached_writer(InodeNo::ROOT));
            let (handed, promised) = handles.handed();
            assert_eq!((handed.len(), promised.len()), (known.len(), usize::from(process == 0)));
            let again = handed.iter().map(|h| (h.fh, h.of(vol.open(InodeNo::ROOT).unwrap())));
            handles = Handles::of_earlier(again.collect::<Vec<_>>()).unwrap();
            handles.set_promised(&[]);
            let new = handles.insert(open(false)).unwrap();
            assert!(!known.contains(&new), "a number that the kernel has is given again");
            known.push(new);
            for fh in &known {
                assert_eq!(handles.get(*fh).unwrap().fh, *fh);
            }
            let closed = known.remove(1);
            handles.release(closed).unwrap();
            assert_eq!((handles.get(closed).err(), handles.release(closed)), (Some(Errno::BADF), Err(Errno::BADF)));
        }
        assert_eq!(handles.get(7 << KEY_BITS).err(), Some(Errno::BADF));
        handles.release(known[0]).unwrap();
        assert!(!handles.has_cached_writer(InodeNo::ROOT));
        let twice = [(5, open(false)), (5, open(false))];
        assert_eq!(Handles::of_earlier(twice).err(), Some(Errno::INVAL));
    }

    /// Who writes past the cache may map the file and store to it, but is promised nothing.
    #[test]
    fn writers_past_the_cache_are_counted_by_themselves() {
        let (vol, handles, ino) = (volume(), Handles::default(), InodeNo::ROOT);
        let open = |cached_writer, writer| {
            let file = vol.open(ino).unwrap();
            let handle = Handle {
                file,
                cached_writer: AtomicBool::new(cached_writer),
                writer,
                append_only: false,
                fh: 0,
                caps_epoch: AtomicU64::new(0),
            };
            handles.insert(handle).unwrap()
        };
        let state = || (handles.has_writer(ino), handles.has_cached_writer(ino), handles.any_promised(|_| true));
        let reader = open(false, false);
        assert_eq!(state(), (false, false, false));
        let through = open(false, true);
        handles.promise(ino);
        assert_eq!((state(), handles.cached_writers(|_| true)), ((true, false, false), 0));
        assert!(handles.take_promised(true, |_| true).is_empty());
        let cached = open(true, true);
        assert_eq!((state(), handles.cached_writers(|_| true)), ((true, true, true), 1));
        handles.release(cached).unwrap();
        assert_eq!(state(), (true, false, false));
        let (cached, late) = (open(true, true), open(true, true));
        handles.write_through(late).unwrap();
        assert_eq!((state(), handles.cached_writers(|_| true)), ((true, true, true), 1));
        handles.write_through(cached).unwrap();
        handles.write_through(cached).unwrap();
        assert_eq!((state(), handles.get(late).unwrap().is_cached_writer()), ((true, false, false), false));
        [cached, late].iter().for_each(|fh| handles.release(*fh).unwrap());
        handles.release(through).unwrap();
        handles.release(reader).unwrap();
        assert_eq!(state(), (false, false, false));
    }
}
