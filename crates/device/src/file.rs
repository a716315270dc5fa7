//! Image files and block devices.
//!
//! Owns the descriptor, its locks and the rings of its batches. Invariants: no access lies outside the size
//! that the device had when it was opened, or when it was last asked whether it has grown; with `O_DIRECT` on, the kernel
//! sees only memory at block boundaries. Does not promise an order between writes.

use crate::aligned::AlignedBuf;
use crate::flush::FlushGate;
use crate::open::{self, OpenError};
use crate::range::RangeLock;
use crate::rw::{Gather, read_exact_at};
use crate::throttle::{self, Throttle};
use crate::uring::{self, RingPool};
use crate::{BLOCK_BYTES, Device, WriteOp, blkdev, bytes_of, check_discard, check_ops, check_range};
use braidfs_sync::device::Mutex;
use braidfs_sync::rank;
use braidfs_sync::slots::Line;
use rustix::fd::{AsFd, AsRawFd};
use rustix::fs::{FallocateFlags, OFlags, fallocate, fcntl_getfl, fcntl_setfl, fdatasync};
use rustix::io::{Errno, retry_on_intr};
use std::borrow::Cow;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

pub(crate) mod hand_over;

/// Most bytes that a read bounces at a time.
const BOUNCE_BYTES: usize = 1 << 20;
/// Most writes, and bytes, that go past the device's cache: of more, one flush behind them costs less.
const THROUGH_WRITES: usize = 4;
const THROUGH_BYTES: usize = 64 << 10;
/// Bytes of a large batch that a thread has under way at once, where no small sync needs the device.
const WAVE_BYTES: usize = 32 << 20;

/// How often a claim is tried that somebody else has.
const CLAIM_PAUSE: std::time::Duration = std::time::Duration::from_millis(100);

/// How to open a [`FileDevice`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpenHow {
    /// For writing, excluding everybody else; otherwise for reading, excluding writers.
    pub write: bool,
    /// Past the kernel's page cache where the file can do that.
    pub direct: bool,
}

/// Who was opened for reading has it back from the writer that was made of it.
pub(crate) type RangeSlot = Arc<Mutex<Option<RangeLock>, rank::DeviceRange>>;

/// An image file or a block device.
pub struct FileDevice {
    path: PathBuf,
    file: File,
    claim: Mutex<Claim, rank::DeviceClaim>,
    /// On the bytes, by whatever other name they have.
    range: RangeSlot,
    /// The lock, where it is not that of `file`.
    upgraded: Option<open::UpgradedLock>,
    blocks: AtomicU64,
    write: bool,
    direct: bool,
    is_block_device: bool,
    /// `None`: batches go by `pwritev`, one write behind the other.
    rings: Option<RingPool>,
    /// A write does not wait for a device: the kernel copies it, into its page cache or a file in memory. In a ring it would
    /// go to a worker thread.
    copies: bool,
    /// On lines of its own: all who write beside it read what lies around it.
    gate: Line<FlushGate>,
    /// Large batches step back behind small syncs.
    pub(crate) throttle: Arc<Throttle>,
    /// Who opened it.
    process: u32,
    /// Another process has its descriptors, too, see [`hand_over`].
    lent: AtomicBool,
    /// Shared with the one that [`Device::writable`] opened of it, whose lock is that of this one.
    reopened: Arc<()>,
}

impl FileDevice {
    /// Opens and locks `path`. Its size is rounded down to blocks.
    ///
    /// # Errors
    /// [`OpenError`], which says what is in the way and what to do.
    pub fn open(path: &Path, how: OpenHow) -> Result<FileDevice, OpenError> {
        Self::of(path, how, open::open(path, how.write, true)?)
    }

    /// As [`Self::open`], for writing; with `elsewhere` the claim on a block device is somebody else's, as after
    /// [`Self::release_claim`].
    pub(crate) fn open_claimed(path: &Path, elsewhere: bool) -> Result<FileDevice, OpenError> {
        let opened = open::open_as(path, true, true, !elsewhere)?;
        let device = Self::of(path, OpenHow { write: true, direct: true }, opened)?;
        if elsewhere {
            device.release_claim();
        }
        Ok(device)
    }

    /// Opens `path` for reading without a lock: others may write it meanwhile.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn look_at(path: &Path) -> Result<FileDevice, OpenError> {
        Self::of(path, OpenHow { write: false, direct: true }, open::open(path, false, false)?)
    }

    fn of(path: &Path, how: OpenHow, opened: open::Opened) -> Result<FileDevice, OpenError> {
        let direct =
            how.direct && set_direct(&opened.file).map_err(|e| OpenError::of(path, "turn on direct I/O for", e))?;
        // (/dev is a tmpfs itself)
        let copies = !direct || (!opened.is_block_device && is_in_memory(&opened.file));
        Ok(FileDevice {
            path: path.to_path_buf(),
            file: opened.file,
            claim: Mutex::new(opened.claim.map_or(Claim::None, Claim::Held)),
            range: Arc::new(Mutex::new(opened.range)),
            upgraded: None,
            blocks: AtomicU64::new(opened.bytes / BLOCK_BYTES as u64),
            write: how.write,
            direct,
            is_block_device: opened.is_block_device,
            rings: uring::available().then(RingPool::default),
            copies,
            gate: Line::default(),
            throttle: Arc::default(),
            process: std::process::id(),
            lent: AtomicBool::new(false),
            reopened: Arc::default(),
        })
    }

    /// Makes a sparse image file of `bytes` bytes, and opens it for writing through the page cache.
    ///
    /// # Errors
    /// Where the file exists, or cannot be made.
    pub fn create(path: &Path, bytes: u64) -> Result<FileDevice, OpenError> {
        if bytes < BLOCK_BYTES as u64 {
            return Err(OpenError::TooSmall { path: path.to_path_buf(), bytes });
        }
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .open(path)
            .map_err(|e| OpenError::of(path, "create", e))?;
        let mut range = None;
        let made = open::lock(&file, path, true, false).and_then(|()| {
            // nobody else knows the file
            range = RangeLock::take(&file, true).unwrap_or_default();
            file.set_len(bytes).and_then(|()| file.sync_all()).map_err(|e| OpenError::of(path, "set the size of", e))
        });
        if let Err(e) = made {
            // A file of the wrong size is worse than none; the first error is the one to tell.
            let _ = std::fs::remove_file(path);
            return Err(e);
        }
        Ok(FileDevice {
            path: path.to_path_buf(),
            file,
            claim: Mutex::new(Claim::None),
            range: Arc::new(Mutex::new(range)),
            upgraded: None,
            blocks: AtomicU64::new(bytes / BLOCK_BYTES as u64),
            write: true,
            direct: false,
            is_block_device: false,
            rings: uring::available().then(RingPool::default),
            copies: true,
            gate: Line::default(),
            throttle: Arc::default(),
            process: std::process::id(),
            lent: AtomicBool::new(false),
            reopened: Arc::default(),
        })
    }

    /// How batches are written: `io_uring` or `pread/pwrite`.
    pub fn engine(&self) -> &'static str {
        if self.rings.is_some() { "io_uring" } else { "pread/pwrite" }
    }

    /// Makes batches go by `pwritev` even where io_uring is there (to compare, to test).
    pub fn without_io_uring(mut self) -> Self {
        self.rings = None;
        self
    }

    /// Has batches go by io_uring where they would be only copied, too.
    #[cfg(test)]
    pub(crate) fn with_rings(mut self) -> Self {
        self.copies = false;
        self
    }

    /// Whether I/O goes past the kernel's page cache.
    pub fn is_direct(&self) -> bool {
        self.direct
    }

    /// Whether it is a block device.
    pub fn is_block_device(&self) -> bool {
        self.is_block_device
    }

    /// Gives up the `O_EXCL` claim on a block device, keeping the lock against other braidfs processes.
    ///
    /// For a `fuseblk` mount, whose own claim takes its place: the kernel refuses the mount otherwise.
    pub fn release_claim(&self) {
        *self.claim.lock() = Claim::Elsewhere;
    }

    /// Whether it holds the `O_EXCL` claim on a block device.
    pub fn has_claim(&self) -> bool {
        matches!(*self.claim.lock(), Claim::Held(_))
    }

    /// Takes the `O_EXCL` claim on a block device as soon as nobody else has it, in the background, unless it was opened for
    /// reading. For a device that the kernel keeps for a mount whose server died, as long as files are open on that.
    pub fn claim_later(self: &Arc<Self>) {
        if !self.is_block_device || !self.write {
            return;
        }
        let (weak, path) = (Arc::downgrade(self), self.path.clone());
        let wait = move || {
            while let Some(device) = weak.upgrade() {
                // not by the path, which may name another device by now
                match open::claim(Path::new(&format!("/proc/self/fd/{}", device.file.as_raw_fd()))) {
                    Ok(file) => {
                        *device.claim.lock() = Claim::Held(file);
                        tracing::info!(path = %device.path.display(), "the block device is claimed again");
                        return;
                    }
                    Err(e) => tracing::trace!(error = %e, "not claimed yet"),
                }
                drop(device);
                std::thread::sleep(CLAIM_PAUSE);
            }
        };
        if let Err(error) = std::thread::Builder::new().name("claim".into()).spawn(wait) {
            tracing::warn!(path = %path.display(), %error, "not claimed again: nothing keeps other programs off");
        }
    }

    /// Opens the same file or device again, for writing, and turns the lock of this one into a writer's.
    fn reopen(&self) -> io::Result<FileDevice> {
        let busy = || io::Error::from_raw_os_error(libc::EBUSY);
        let lock =
            open::UpgradedLock::take(&self.file, &self.path, self.is_block_device, &self.range).map_err(|_| busy())?;
        // not by the path, which may name another file by now
        let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        let file = OpenOptions::new().read(true).write(true).open(&path)?;
        let claim = match &*self.claim.lock() {
            Claim::None if self.is_block_device => Claim::Held(open::claim(Path::new(&path))?),
            Claim::Elsewhere => Claim::Elsewhere,
            _ => Claim::None,
        };
        let direct = self.direct && set_direct(&file)?;
        let mut range = self.range.lock();
        // locks of one process exclude each other, too
        *range = None;
        let new = RangeLock::take(&file, true).map_err(|_| {
            *range = RangeLock::take(&self.file, false).unwrap_or_default();
            busy()
        })?;
        Ok(FileDevice {
            path: self.path.clone(),
            file,
            claim: Mutex::new(claim),
            range: Arc::new(Mutex::new(new)),
            upgraded: Some(lock),
            blocks: AtomicU64::new(self.blocks()),
            write: true,
            direct,
            is_block_device: self.is_block_device,
            rings: self.rings.is_some().then(RingPool::default),
            copies: self.copies,
            gate: Line::default(),
            throttle: Arc::default(),
            process: std::process::id(),
            lent: AtomicBool::new(false),
            reopened: Arc::clone(&self.reopened),
        })
    }

    /// The rings, where they may be used.
    fn rings(&self) -> Option<&RingPool> {
        self.rings.as_ref().filter(|_| !self.lent.load(Ordering::Relaxed))
    }

    /// Does `write` with what is to be written, as the kernel takes it.
    fn with_writes<T>(
        &self,
        ops: &[WriteOp<'_>],
        write: impl FnOnce(&mut [Gather<'_>]) -> io::Result<T>,
    ) -> io::Result<T> {
        if !self.write {
            return Err(io::Error::from_raw_os_error(libc::EROFS));
        }
        check_ops(self.blocks(), ops)?;
        let bounced: Vec<Option<AlignedBuf>> = ops
            .iter()
            .map(|op| {
                let bounce = self.direct && !op.bufs.iter().all(|b| AlignedBuf::is_aligned(b));
                bounce.then(|| AlignedBuf::gather(&op.bufs))
            })
            .collect();
        let mut writes = Vec::with_capacity(ops.len());
        for (op, bounced) in ops.iter().zip(&bounced) {
            let bufs: Cow<'_, [&[u8]]> = match bounced {
                Some(copy) => Cow::Owned(vec![&copy[..]]),
                None => Cow::Borrowed(&op.bufs),
            };
            Gather::add(&mut writes, op.block * BLOCK_BYTES as u64, &bufs);
        }
        write(&mut writes)
    }

    fn write_all(&self, writes: &mut [Gather<'_>]) -> io::Result<()> {
        let fd = self.file.as_fd();
        match self.rings() {
            Some(rings) if writes.len() > 1 && !self.copies => rings.write(fd, writes),
            // Alone, a write is cheaper as one system call than as an entry of a ring.
            _ => writes.iter_mut().try_for_each(|w| w.finish(fd, 0)),
        }
    }

    /// In waves, which let small syncs go first.
    fn write_large(&self, mut writes: &mut [Gather<'_>]) -> io::Result<()> {
        let most = if self.rings().is_some() { WAVE_BYTES } else { 0 };
        while let Some(first) = writes.first_mut() {
            let short = self.throttle.short();
            if let Some(mut piece) = short.and_then(|bytes| first.take_front(bytes)) {
                let _wave = self.throttle.enter(piece.bytes);
                self.write_all(std::slice::from_mut(&mut piece))?;
                continue;
            }
            let n = wave(writes, short.map_or(most, |bytes| most.min(bytes)));
            let (now, later) = std::mem::take(&mut writes).split_at_mut(n);
            let _wave = self.throttle.enter(now.iter().map(|w| w.bytes).sum());
            self.write_all(now)?;
            writes = later;
        }
        Ok(())
    }

    /// [`Device::write_batch_through`] of so many bytes.
    fn write_through(&self, ops: &[WriteOp<'_>], bytes: usize) -> io::Result<()> {
        // What was written before must be durable, too: else the flush that follows is needed anyway.
        let Some(rings) = self.rings() else { return self.write_batch(ops) };
        let small = ops.len() <= THROUGH_WRITES && bytes <= THROUGH_BYTES;
        if !(self.is_block_device && self.direct && small && self.gate.is_clean()) {
            return self.write_batch(ops);
        }
        match self.with_writes(ops, |writes| rings.write_through(self.file.as_fd(), writes)) {
            Ok(durable) => {
                if !durable {
                    self.gate.wrote();
                }
                Ok(())
            }
            // The device knows no such writes: the flush that follows says whether it is durable.
            Err(e) if matches!(e.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EINVAL)) => self.write_batch(ops),
            Err(e) => {
                // Was it the write, or the flush that the kernel sent behind it? If the latter, no later flush of the device
                // can be trusted.
                self.write_batch(ops)?;
                tracing::error!("{}: a durable write failed ({e}): no later flush can be trusted", self.path.display());
                self.gate.fail(&e);
                Err(e)
            }
        }
    }
}

/// How many of `writes` are a wave of so many bytes; one at least.
fn wave(writes: &[Gather<'_>], bytes: usize) -> usize {
    let mut sum = 0;
    let fit = writes.iter().take(uring::ENTRIES as usize).take_while(|w| {
        sum += w.bytes;
        sum <= bytes
    });
    fit.count().max(1)
}

impl Drop for FileDevice {
    /// Gives the lock back now: closing the descriptor would, but requests that went by io_uring keep the file open a little
    /// longer (the kernel frees them later), and whoever comes next would find it in use.
    fn drop(&mut self) {
        // A copy of another process, from before a fork, is not ours to unlock, nor what another process is to have.
        if self.process != std::process::id() || self.lent.load(Ordering::SeqCst) {
            return;
        }
        if let Some(lock) = &self.upgraded {
            let range = self.range.lock().take();
            lock.give_back(range);
        }
        if let Err(e) = rustix::fs::flock(&self.file, rustix::fs::FlockOperation::Unlock) {
            tracing::debug!(path = %self.path.display(), error = %e, "the lock goes when the file is closed");
        }
    }
}

/// Who has the `O_EXCL` claim on a block device.
enum Claim {
    /// Nobody: an image, or opened for reading.
    None,
    /// This one holds it.
    Held(File),
    /// The kernel, for a `fuseblk` mount.
    Elsewhere,
}

/// Whether the file lies in a tmpfs.
fn is_in_memory(file: &File) -> bool {
    rustix::fs::fstatfs(file).is_ok_and(|s| i128::from(s.f_type) == i128::from(libc::TMPFS_MAGIC))
}

/// Turns on `O_DIRECT`; false where the file system or its sector size does not allow it.
fn set_direct(file: &File) -> io::Result<bool> {
    let flags = fcntl_getfl(file)?;
    match fcntl_setfl(file, flags | OFlags::DIRECT) {
        Ok(()) => {}
        Err(Errno::INVAL | Errno::OPNOTSUPP) => return Ok(false),
        Err(e) => return Err(e.into()),
    }
    // Some file systems take the flag and refuse the I/O.
    let mut block = AlignedBuf::zeroed(BLOCK_BYTES);
    match read_exact_at(file, &mut block, 0) {
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
            fcntl_setfl(file, flags)?;
            Ok(false)
        }
        // A bad first block is for the reader of that block to find.
        _ => Ok(true),
    }
}

impl Device for FileDevice {
    fn blocks(&self) -> u64 {
        self.blocks.load(Ordering::Acquire)
    }

    fn read(&self, block: u64, buf: &mut [u8]) -> io::Result<()> {
        check_range(self.blocks(), block, buf.len(), io::ErrorKind::UnexpectedEof)?;
        let offset = block * BLOCK_BYTES as u64;
        if !self.direct || AlignedBuf::is_aligned(buf) {
            return read_exact_at(&self.file, buf, offset);
        }
        let mut bounce = AlignedBuf::zeroed(buf.len().min(BOUNCE_BYTES));
        for (i, part) in buf.chunks_mut(BOUNCE_BYTES).enumerate() {
            let bounce = &mut bounce[..part.len()];
            read_exact_at(&self.file, bounce, offset + (i * BOUNCE_BYTES) as u64)?;
            part.copy_from_slice(bounce);
        }
        Ok(())
    }

    fn write_batch(&self, ops: &[WriteOp<'_>]) -> io::Result<()> {
        let written = self.with_writes(ops, |writes| {
            let is_large = !self.copies && writes.iter().map(|w| w.bytes).sum::<usize>() > throttle::SMALL_BYTES;
            if is_large { self.write_large(writes) } else { self.write_all(writes) }
        });
        // also of one that failed something may be written
        self.gate.wrote();
        written
    }

    fn write_batch_through(&self, ops: &[WriteOp<'_>]) -> io::Result<()> {
        let bytes = bytes_of(ops);
        if self.copies {
            return self.write_through(ops, bytes);
        }
        throttle::through(&self.throttle, bytes, || self.write_through(ops, bytes))
    }

    fn end_sync(&self) {
        drop(throttle::flushed(&self.throttle));
    }

    fn flush(&self) -> io::Result<()> {
        let _sync = throttle::flushed(&self.throttle);
        self.gate.flush(|| {
            // An interrupted one says nothing about what was written: another one does.
            retry_on_intr(|| fdatasync(&self.file)).map_err(|e| {
                tracing::error!("{}: flush failed ({e}): no later flush of it can be trusted", self.path.display());
                e.into()
            })
        })
    }

    fn shares_flushes(&self) -> bool {
        true
    }

    fn discard(&self, block: u64, blocks: u64) -> io::Result<()> {
        if !self.write {
            return Err(io::Error::from_raw_os_error(libc::EROFS));
        }
        check_discard(self.blocks(), block, blocks)?;
        if blocks == 0 {
            return Ok(());
        }
        let (start, bytes) = (block * BLOCK_BYTES as u64, blocks * BLOCK_BYTES as u64);
        let result = if self.is_block_device {
            blkdev::discard(&self.file, start, bytes)
        } else {
            let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            retry_on_intr(|| fallocate(&self.file, how, start, bytes)).map_err(Into::into)
        };
        self.gate.wrote();
        match result {
            Err(e) if matches!(e.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOTTY | libc::ENOSYS)) => {
                Err(io::Error::new(io::ErrorKind::Unsupported, e))
            }
            other => other,
        }
    }

    fn grown(&self) -> io::Result<u64> {
        let bytes = if self.is_block_device { blkdev::size_bytes(&self.file)? } else { self.file.metadata()?.len() };
        let blocks = bytes / BLOCK_BYTES as u64;
        self.blocks.fetch_max(blocks, Ordering::AcqRel);
        Ok(blocks)
    }

    fn extend(&self, blocks: u64) -> io::Result<()> {
        if self.grown()? >= blocks {
            return Ok(());
        }
        if self.is_block_device {
            return Err(io::ErrorKind::Unsupported.into());
        }
        if !self.write {
            return Err(io::Error::from_raw_os_error(libc::EROFS));
        }
        let bytes = blocks.checked_mul(BLOCK_BYTES as u64).ok_or(io::ErrorKind::FileTooLarge)?;
        self.file.set_len(bytes)?;
        // the kernel tells of a write that it lost once, perhaps here: no later flush can be trusted then
        self.file.sync_all().inspect_err(|e| self.gate.fail(e))?;
        self.grown().map(drop)
    }

    fn cut_off(&self, blocks: u64) -> io::Result<()> {
        if self.is_block_device || !self.write || blocks >= self.blocks() {
            return Ok(());
        }
        self.blocks.fetch_min(blocks, Ordering::AcqRel);
        self.file.set_len(blocks * BLOCK_BYTES as u64)
    }

    fn writable(&self) -> io::Result<Option<Arc<dyn Device>>> {
        if self.write { Ok(None) } else { Ok(Some(Arc::new(self.reopen()?))) }
    }

    fn block_device(&self) -> Option<(u32, u32)> {
        let m = self.file.metadata().ok()?;
        let number = if self.is_block_device { m.rdev() } else { m.dev() };
        Some((rustix::fs::major(number), rustix::fs::minor(number)))
    }

    fn name(&self) -> String {
        self.path.display().to_string()
    }
}

impl std::fmt::Debug for FileDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FileDevice")
            .field("path", &self.path)
            .field("blocks", &self.blocks())
            .field("write", &self.write)
            .field("direct", &self.direct)
            .field("engine", &self.engine())
            .finish_non_exhaustive()
    }
}
