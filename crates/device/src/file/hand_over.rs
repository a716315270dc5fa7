//! An open device passes to another process with its locks and its claim, without a moment in which nobody has them.
//!
//! Locks and claims are of an open file, not of a process: who gets its descriptors (SCM_RIGHTS) has them, too, and they
//! go when the last descriptor is closed. Only an explicit unlock takes them away from all. So from the moment that another
//! process may have the descriptors, [`FileDevice`] is *lent* on either side: dropped, it closes and does not unlock.
//!
//! Who got them also writes without io_uring meanwhile: what a process that is killed has in flight in a ring may reach the
//! device after its end (`io_uring_cancel_generic` waits for other requests only), but a `pwritev` past the page cache keeps the
//! process from ending. So once the process is waited for, nothing of it is on its way.

use super::{Claim, FileDevice};
use crate::BLOCK_BYTES;
use crate::blkdev;
use crate::flush::FlushGate;
use crate::open::{self, OpenError};
use crate::range::RangeLock;
use crate::uring::{self, RingPool};
use braidfs_sync::device::Mutex;
use braidfs_sync::slots::Line;
use rustix::fd::OwnedFd;
use rustix::fs::{FlockOperation, OFlags, fcntl_getfl};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Who has the `O_EXCL` claim on a device that is handed over.
#[derive(Debug)]
pub enum HandedClaim {
    /// Nobody, or not yet.
    None,
    /// This descriptor, which passes on with the device.
    Held(OwnedFd),
    /// The kernel, for a `fuseblk` mount.
    Elsewhere,
}

/// An open device as it passes from one process to another: descriptors that share its open files.
#[derive(Debug)]
pub struct HandedDevice {
    /// As it was given, for messages.
    pub path: PathBuf,
    /// The device, with its lock.
    pub file: OwnedFd,
    /// It is open for writing, with a writer's locks; else for reading, with a reader's.
    pub write: bool,
    /// That with the lock on the bytes, if there is one.
    pub range: Option<OwnedFd>,
    /// Who holds the claim that keeps others off the device.
    pub claim: HandedClaim,
}

impl FileDevice {
    /// What another process needs to go on with it: [`Self::adopt`]. Say [`Self::lend`] before that process may write, and
    /// before this one is dropped. Who has one that is open for reading opens it for writing ([`Device::writable`]) neither from
    /// now until then: the other process would take the lock back to a reader's.
    ///
    /// # Errors
    /// No more descriptors. EROFS: [`Self::is_reopened`].
    pub fn hand_over(&self) -> io::Result<HandedDevice> {
        if self.is_reopened() {
            return Err(io::Error::from_raw_os_error(libc::EROFS));
        }
        let claim = match &*self.claim.lock() {
            Claim::None => HandedClaim::None,
            Claim::Held(file) => HandedClaim::Held(file.try_clone()?.into()),
            Claim::Elsewhere => HandedClaim::Elsewhere,
        };
        let range = self.range.lock().as_ref().map(RangeLock::try_clone).transpose()?;
        let (path, write) = (self.path.clone(), self.write);
        Ok(HandedDevice { path, file: self.file.try_clone()?.into(), write, range, claim })
    }

    /// Whether it was opened for reading and then for writing ([`Device::writable`]), and still is: either of the two has its
    /// lock by the other, and cannot be handed over.
    pub fn is_reopened(&self) -> bool {
        Arc::strong_count(&self.reopened) > 1
    }

    /// Goes on with a device that another process had open. It is lent: [`Self::keep`] makes it this process' own.
    ///
    /// # Errors
    /// It is no device or file, too small, not open for writing where it shall be, or not locked by that descriptor.
    pub fn adopt(handed: HandedDevice) -> Result<FileDevice, OpenError> {
        let HandedDevice { path, file, write, range, claim } = handed;
        let of = |what, e: io::Error| OpenError::of(&path, what, e);
        let flags = fcntl_getfl(&file).map_err(|e| of("look at", e.into()))?;
        let file = File::from(file);
        let kind = file.metadata().map_err(|e| of("look at", e))?.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Err(OpenError::WrongKind { path, kind: "special file" });
        }
        let how = match (flags & OFlags::ACCMODE, write) {
            (OFlags::RDWR, true) => FlockOperation::NonBlockingLockExclusive,
            (OFlags::RDONLY, false) => FlockOperation::NonBlockingLockShared,
            (_, true) => return Err(OpenError::ReadOnly { path }),
            (_, false) => return Err(OpenError::WrongKind { path, kind: "file that is open for writing" }),
        };
        // Where it has the lock this changes nothing; where another open file has it, that is a mix-up.
        open::lock_once(&file, how, &path)?;
        let is_block_device = kind.is_block_device();
        let bytes = size_of(&file, is_block_device).map_err(|e| of("ask the size of", e))?;
        if bytes < BLOCK_BYTES as u64 {
            return Err(OpenError::TooSmall { path, bytes });
        }
        let direct = flags.contains(OFlags::DIRECT);
        let copies = !direct || (!is_block_device && super::is_in_memory(&file));
        let claim = match claim {
            HandedClaim::None => Claim::None,
            HandedClaim::Held(fd) => Claim::Held(fd.into()),
            HandedClaim::Elsewhere => Claim::Elsewhere,
        };
        Ok(FileDevice {
            path,
            file,
            claim: Mutex::new(claim),
            range: Arc::new(Mutex::new(range.map(RangeLock::of))),
            upgraded: None,
            blocks: AtomicU64::new(bytes / BLOCK_BYTES as u64),
            write,
            direct,
            is_block_device,
            rings: uring::available().then(RingPool::default),
            copies,
            gate: Line::<FlushGate>::default(),
            throttle: Arc::default(),
            process: std::process::id(),
            lent: AtomicBool::new(true),
            reopened: Arc::default(),
        })
    }

    /// Another process may have the descriptors: dropped, this one unlocks nothing; and it writes without io_uring.
    pub fn lend(&self) {
        self.lent.store(true, Ordering::SeqCst);
    }

    /// It is this process' own again, or from now on: the other one is gone, or has closed its descriptors without unlocking.
    pub fn keep(&self) {
        self.lent.store(false, Ordering::SeqCst);
    }

    /// Whether it is a block device without a claim of its own or of the kernel.
    pub fn is_without_claim(&self) -> bool {
        self.is_block_device && self.write && matches!(*self.claim.lock(), Claim::None)
    }

    /// What it was opened as.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

fn size_of(file: &File, is_block_device: bool) -> io::Result<u64> {
    if is_block_device { blkdev::size_bytes(file) } else { Ok(file.metadata()?.len()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Device, OpenHow, WriteOp};
    use std::fs::OpenOptions;

    const HOW: OpenHow = OpenHow { write: true, direct: true };

    fn device() -> (tempfile::TempDir, PathBuf, FileDevice) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("i");
        drop(FileDevice::create(&path, 64 * BLOCK_BYTES as u64).unwrap());
        let device = FileDevice::open(&path, HOW).unwrap();
        (dir, path, device)
    }

    /// Whether others get the lock of the file, and that on its bytes, as writers.
    fn free(path: &Path) -> (bool, bool) {
        free_for(path, FlockOperation::NonBlockingLockExclusive)
    }

    /// Whether readers do.
    fn shared(path: &Path) -> (bool, bool) {
        free_for(path, FlockOperation::NonBlockingLockShared)
    }

    fn free_for(path: &Path, how: FlockOperation) -> (bool, bool) {
        let other = OpenOptions::new().read(true).write(true).open(path).unwrap();
        let file = rustix::fs::flock(&other, how).is_ok();
        (file, RangeLock::take(&other, how == FlockOperation::NonBlockingLockExclusive).is_ok())
    }

    fn reader() -> (tempfile::TempDir, PathBuf, FileDevice) {
        let (dir, path, device) = device();
        drop(device);
        let device = FileDevice::open(&path, OpenHow { write: false, direct: true }).unwrap();
        (dir, path, device)
    }

    /// A remount that another device refuses: this one is a reader's again, by whatever name others come.
    #[test]
    fn a_reader_has_its_locks_back_when_its_writer_is_dropped() {
        let (_dir, path, reader) = reader();
        let writer = reader.writable().unwrap().unwrap();
        assert_eq!(shared(&path), (false, false));
        drop(writer);
        assert_eq!((free(&path), shared(&path)), ((false, false), (true, true)));
        // and once more
        drop(reader.writable().unwrap().unwrap());
        assert_eq!((free(&path), shared(&path)), ((false, false), (true, true)));
        let writer = reader.writable().unwrap().unwrap();
        drop(reader);
        drop(writer);
        assert_eq!(free(&path), (true, true));
    }

    #[test]
    fn a_readers_locks_pass_and_stay_a_readers() {
        let (_dir, path, old) = reader();
        let new = FileDevice::adopt(old.hand_over().unwrap()).unwrap();
        old.lend();
        drop(old);
        assert_eq!((free(&path), shared(&path)), ((false, false), (true, true)));
        new.keep();
        let data = [7; BLOCK_BYTES];
        let write = new.write_batch(&[WriteOp { block: 3, bufs: vec![&data] }]);
        assert_eq!(write.unwrap_err().raw_os_error(), Some(libc::EROFS));
        new.read(3, &mut [0; BLOCK_BYTES]).unwrap();
        // as a remount does
        let writer = new.writable().unwrap().unwrap();
        assert_eq!(shared(&path), (false, false));
        writer.write_batch(&[WriteOp { block: 3, bufs: vec![&data] }]).unwrap();
        drop((writer, new));
        assert_eq!(free(&path), (true, true));
    }

    #[test]
    fn one_that_was_opened_again_for_writing_is_not_handed_over() {
        let (_dir, path, reader) = reader();
        let writer = reader.reopen().unwrap();
        for device in [&reader, &writer] {
            assert!(device.is_reopened());
            assert_eq!(device.hand_over().unwrap_err().raw_os_error(), Some(libc::EROFS));
        }
        drop(writer);
        assert!(!reader.is_reopened());
        FileDevice::adopt(reader.hand_over().unwrap()).unwrap();
        assert_eq!(shared(&path), (true, true));
    }

    #[test]
    fn locks_pass_without_a_gap() {
        let (_dir, path, old) = device();
        let new = FileDevice::adopt(old.hand_over().unwrap()).unwrap();
        old.lend();
        assert_eq!(free(&path), (false, false));
        drop(old);
        assert_eq!(free(&path), (false, false), "the drop of one that is lent unlocks for all");
        new.keep();
        let data = [7; BLOCK_BYTES];
        new.write_batch(&[WriteOp { block: 3, bufs: vec![&data] }]).unwrap();
        let mut read = [0; BLOCK_BYTES];
        new.read(3, &mut read).unwrap();
        assert_eq!((read, new.blocks()), (data, 64));
        drop(new);
        assert_eq!(free(&path), (true, true));
    }

    #[test]
    fn one_that_is_not_taken_leaves_the_locks() {
        let (_dir, path, old) = device();
        drop(FileDevice::adopt(old.hand_over().unwrap()).unwrap());
        assert_eq!(free(&path), (false, false), "who was to take it unlocked it");
        drop(old);
        assert_eq!(free(&path), (true, true));
    }

    #[test]
    fn what_is_no_locked_writable_file_is_not_taken() {
        let (_dir, path, old) = device();
        let of = |file: File, write| HandedDevice {
            path: path.clone(),
            file: file.into(),
            write,
            range: None,
            claim: HandedClaim::None,
        };
        let adopt = |file| FileDevice::adopt(of(file, true));
        assert!(matches!(adopt(File::open(&path).unwrap()), Err(OpenError::ReadOnly { .. })));
        let other = OpenOptions::new().read(true).write(true).open(&path).unwrap();
        assert!(matches!(adopt(other), Err(OpenError::InUse { .. })), "its lock is another open file's");
        assert!(matches!(adopt(File::open("/dev/null").unwrap()), Err(OpenError::WrongKind { .. })));
        let adopt = |file| FileDevice::adopt(of(file, false));
        assert!(matches!(adopt(File::open(&path).unwrap()), Err(OpenError::InUse { .. })), "a writer has the lock");
        drop(old);
        let writer = OpenOptions::new().read(true).write(true).open(&path).unwrap();
        assert!(matches!(adopt(writer), Err(OpenError::WrongKind { .. })), "it can be written by that");
    }
}
