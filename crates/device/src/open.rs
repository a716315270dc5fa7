//! Opening of image files, block devices and network block devices: kinds, locks, sizes, and errors that say what to do.
//!
//! Exclusion: a writer holds `flock(LOCK_EX)`, a reader `flock(LOCK_SH)`, on files and block devices alike; a
//! writer of a block device holds it with `O_EXCL` as well, so that a mounted one is refused. The bytes behind a loop
//! device can have other names: [`crate::range`].

use crate::file::{FileDevice, OpenHow, RangeSlot};
use crate::nbd::{NbdDevice, NbdError, NbdUri, is_nbd_uri};
use crate::range::RangeLock;
use crate::{BLOCK_BYTES, Device, blkdev};
use braidfs_sync::device::Mutex;
use braidfs_sync::rank;
use rustix::fs::FlockOperation;
use rustix::io::Errno;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// A device cannot be opened or created.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// Nothing is there.
    #[error("{}: no such file or device; check the path", .path.display())]
    NotFound {
        /// As it was given.
        path: PathBuf,
    },
    /// We may not.
    #[error("{}: permission denied for {what}; use an account that may, or change the file's mode", .path.display())]
    PermissionDenied {
        /// As it was given.
        path: PathBuf,
        /// `reading`, `writing`, `creating`.
        what: &'static str,
    },
    /// Neither an image file nor a block device.
    #[error("{}: is a {kind}; give an image file or a block device", .path.display())]
    WrongKind {
        /// As it was given.
        path: PathBuf,
        /// What it is.
        kind: &'static str,
    },
    /// A braidfs process has it.
    #[error("{}: is in use by another braidfs process; unmount the volume or wait for that process", .path.display())]
    InUse {
        /// As it was given.
        path: PathBuf,
    },
    /// Mounted, or held by RAID, LVM, swap.
    #[error("{}: is mounted or held by the system (RAID, LVM, swap); release it first", .path.display())]
    Busy {
        /// As it was given.
        path: PathBuf,
    },
    /// Wanted for writing, but read-only.
    #[error("{}: is read-only; mount it with `-o ro`, or make the device writable", .path.display())]
    ReadOnly {
        /// As it was given.
        path: PathBuf,
    },
    /// Not even a block.
    #[error("{}: has {bytes} bytes, too few to hold a volume; name the right device", .path.display())]
    TooSmall {
        /// As it was given.
        path: PathBuf,
        /// How many it has.
        bytes: u64,
    },
    /// To be created, but there.
    #[error("{}: exists already; remove it first, or give another path", .path.display())]
    Exists {
        /// As it was given.
        path: PathBuf,
    },
    /// The same device twice in one volume.
    #[error("{} and {} are the same device; name each device once", .first.display(), .second.display())]
    Twice {
        /// The path that was given first.
        first: PathBuf,
        /// A later one, of the same device.
        second: PathBuf,
    },
    /// No URI of an NBD export, or one that is not supported.
    #[error("{}: {why}", .path.display())]
    Uri {
        /// As it was given.
        path: PathBuf,
        /// What is wrong with it, and what to write.
        why: String,
    },
    /// An export of an NBD server cannot be used.
    #[error(transparent)]
    Nbd(#[from] NbdError),
    /// An empty list.
    #[error("no device given; name all devices of the volume")]
    NoDevice,
    /// An error of the system that is none of these.
    #[error("{}: cannot {what}: {error}", .path.display())]
    Io {
        /// As it was given.
        path: PathBuf,
        /// What was tried.
        what: &'static str,
        /// The system's answer.
        #[source]
        error: io::Error,
    },
}

impl OpenError {
    /// The errno that a POSIX front end answers.
    pub fn errno(&self) -> i32 {
        use rustix::io::Errno as E;
        let of = |error: &io::Error| error.raw_os_error().unwrap_or(E::IO.raw_os_error());
        let errno = match self {
            Self::NotFound { .. } => E::NOENT,
            Self::PermissionDenied { .. } => E::ACCESS,
            Self::InUse { .. } | Self::Busy { .. } => E::BUSY,
            Self::ReadOnly { .. } | Self::Nbd(NbdError::ReadOnly { .. }) => E::ROFS,
            Self::Exists { .. } => E::EXIST,
            Self::Io { error, .. } | Self::Nbd(NbdError::Connect { error, .. }) => return of(error),
            Self::Nbd(NbdError::Refused { .. } | NbdError::NotDurable { .. }) => E::IO,
            Self::Uri { .. } | Self::WrongKind { .. } | Self::TooSmall { .. } | Self::Twice { .. } | Self::NoDevice => {
                E::INVAL
            }
        };
        errno.raw_os_error()
    }
}

impl OpenError {
    /// The variant for an error of the system.
    pub(crate) fn of(path: &Path, what: &'static str, error: io::Error) -> Self {
        let path = path.to_path_buf();
        match error.raw_os_error() {
            Some(libc::ENOENT | libc::ENXIO | libc::ENODEV | libc::ENOTDIR) => Self::NotFound { path },
            Some(libc::EACCES | libc::EPERM) => {
                let what = match what {
                    "open for writing" => "writing",
                    "create" => "creating",
                    _ => "reading",
                };
                Self::PermissionDenied { path, what }
            }
            Some(libc::EROFS) => Self::ReadOnly { path },
            Some(libc::EBUSY) => Self::Busy { path },
            Some(libc::EEXIST) => Self::Exists { path },
            _ => Self::Io { path, what, error },
        }
    }
}

/// One device of a volume: what its path or URI names.
#[derive(Debug, Clone)]
pub enum AnyDevice {
    /// An image file or a block device.
    File(Arc<FileDevice>),
    /// An export of an NBD server.
    Nbd(Arc<NbdDevice>),
}

impl AnyDevice {
    /// It, as any device.
    pub fn device(&self) -> Arc<dyn Device> {
        match self {
            Self::File(file) => Arc::clone(file) as Arc<dyn Device>,
            Self::Nbd(export) => Arc::clone(export) as Arc<dyn Device>,
        }
    }

    /// It, where it is an image file or a block device.
    pub fn file(&self) -> Option<&Arc<FileDevice>> {
        match self {
            Self::File(file) => Some(file),
            Self::Nbd(_) => None,
        }
    }

    /// It, where it is an export of an NBD server.
    pub fn export(&self) -> Option<&Arc<NbdDevice>> {
        match self {
            Self::File(_) => None,
            Self::Nbd(export) => Some(export),
        }
    }
}

/// Opens all devices of a volume, in the order given: image files, block devices, and `nbd://` and `nbd+unix://` URIs. Writers
/// exclude everybody else, but for those of an NBD export, who do so by a lease on the volume.
///
/// # Errors
/// For the first device that cannot be opened, or that is named twice.
pub fn open_volume_devices(paths: &[PathBuf], write: bool) -> Result<Vec<Arc<dyn Device>>, OpenError> {
    Ok(open_any_devices(paths, write)?.iter().map(AnyDevice::device).collect())
}

/// As [`open_volume_devices`], for callers that need to know what they are.
///
/// # Errors
/// As [`open_volume_devices`].
pub fn open_any_devices(paths: &[PathBuf], write: bool) -> Result<Vec<AnyDevice>, OpenError> {
    all_of(paths, write, |path| FileDevice::open(path, OpenHow { write, direct: true }))
}

/// Opens devices for reading without any lock, also while others write them: what is read may change at any time.
///
/// # Errors
/// As [`open_volume_devices`], but never in use.
pub fn look_at_devices(paths: &[PathBuf]) -> Result<Vec<Arc<dyn Device>>, OpenError> {
    Ok(all_of(paths, false, FileDevice::look_at)?.iter().map(AnyDevice::device).collect())
}

/// As [`open_volume_devices`], of image files and block devices alone.
///
/// # Errors
/// As [`open_volume_devices`]; a URI names no file.
pub fn open_volume_files(paths: &[PathBuf], write: bool) -> Result<Vec<Arc<FileDevice>>, OpenError> {
    let files = open_any_devices(paths, write)?;
    let file = |(d, path): (&AnyDevice, &PathBuf)| {
        d.file().cloned().ok_or_else(|| OpenError::WrongKind { path: path.clone(), kind: "network block device" })
    };
    files.iter().zip(paths).map(file).collect()
}

/// As [`open_any_devices`], for writing, where the dead mount of a server that was killed still has the claim on the first
/// device: a mount that nobody serves writes nothing.
///
/// # Errors
/// As [`open_volume_devices`].
pub fn open_claimed_devices(paths: &[PathBuf]) -> Result<Vec<AnyDevice>, OpenError> {
    all_of(paths, true, |path| FileDevice::open_claimed(path, Some(path) == paths.first().map(PathBuf::as_path)))
}

/// Whether nobody has a claim on a block device.
///
/// # Errors
/// It cannot be opened.
pub fn is_unclaimed(path: &Path) -> Result<bool, OpenError> {
    match claim(path) {
        Ok(_) => Ok(true),
        Err(e) if e.raw_os_error() == Some(libc::EBUSY) => Ok(false),
        Err(e) => Err(OpenError::of(path, "claim", e)),
    }
}

/// What tells devices apart.
enum Identity {
    /// Device and inode number; of block devices all ones and their own number: two nodes may name one device.
    File(u64, u64),
    Export(NbdUri),
}

impl Identity {
    fn of(path: &Path) -> Result<Self, OpenError> {
        if is_nbd_uri(path) {
            let parsed = path.to_str().ok_or("not UTF-8".to_string()).and_then(NbdUri::parse);
            return parsed.map(Self::Export).map_err(|why| OpenError::Uri { path: path.into(), why });
        }
        let meta = std::fs::metadata(path).map_err(|e| OpenError::of(path, "look at", e))?;
        let block = meta.file_type().is_block_device();
        Ok(if block { Self::File(u64::MAX, meta.rdev()) } else { Self::File(meta.dev(), meta.ino()) })
    }

    fn is(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::File(a, b), Self::File(c, d)) => (a, b) == (c, d),
            (Self::Export(a), Self::Export(b)) => a.names_same(b),
            _ => false,
        }
    }
}

/// Opens each, and refuses one that is named twice.
fn all_of(
    paths: &[PathBuf],
    write: bool,
    open: impl Fn(&Path) -> Result<FileDevice, OpenError>,
) -> Result<Vec<AnyDevice>, OpenError> {
    if paths.is_empty() {
        return Err(OpenError::NoDevice);
    }
    let mut seen: Vec<(Identity, &PathBuf)> = Vec::new();
    for path in paths {
        let id = Identity::of(path)?;
        if let Some((_, first)) = seen.iter().find(|s| s.0.is(&id)) {
            return Err(OpenError::Twice { first: first.to_path_buf(), second: path.clone() });
        }
        seen.push((id, path));
    }
    let one = |(id, path): (Identity, &PathBuf)| match id {
        Identity::Export(uri) => Ok(AnyDevice::Nbd(Arc::new(NbdDevice::open(&uri, write)?))),
        Identity::File(..) => Ok(AnyDevice::File(Arc::new(open(path)?))),
    };
    seen.into_iter().map(one).collect()
}

/// An opened and locked file.
pub(crate) struct Opened {
    pub(crate) file: File,
    /// Holds the `O_EXCL` claim of a block device opened for writing.
    pub(crate) claim: Option<File>,
    /// Holds the lock on the bytes.
    pub(crate) range: Option<RangeLock>,
    pub(crate) is_block_device: bool,
    pub(crate) bytes: u64,
}

/// Opens `path`, without a lock where it shall only be looked at.
pub(crate) fn open(path: &Path, write: bool, locked: bool) -> Result<Opened, OpenError> {
    open_as(path, write, locked, write)
}

/// As [`open`]; `claimed`: a block device is claimed.
pub(crate) fn open_as(path: &Path, write: bool, locked: bool, claimed: bool) -> Result<Opened, OpenError> {
    let kind = std::fs::metadata(path).map_err(|e| OpenError::of(path, "look at", e))?.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        let kind = match () {
            () if kind.is_dir() => "directory",
            () if kind.is_char_device() => "character device",
            () if kind.is_fifo() => "pipe",
            () => "special file",
        };
        return Err(OpenError::WrongKind { path: path.to_path_buf(), kind });
    }
    let what = if write { "open for writing" } else { "open for reading" };
    let file = OpenOptions::new().read(true).write(write).open(path).map_err(|e| OpenError::of(path, what, e))?;
    let meta = file.metadata().map_err(|e| OpenError::of(path, "look at", e))?;
    let is_block_device = meta.file_type().is_block_device();
    let mut range = None;
    if locked {
        lock(&file, path, write, is_block_device)?;
        range = RangeLock::take(&file, write).map_err(|e| in_use(path, e))?;
    }
    let (claim, bytes) = if is_block_device {
        let claim = match claimed {
            true => Some(claim(path).map_err(|e| OpenError::of(path, "claim", e))?),
            false => None,
        };
        (claim, blkdev::size_bytes(&file).map_err(|e| OpenError::of(path, "ask the size of", e))?)
    } else {
        (None, meta.len())
    };
    if bytes < BLOCK_BYTES as u64 {
        return Err(OpenError::TooSmall { path: path.to_path_buf(), bytes });
    }
    Ok(Opened { file, claim, range, is_block_device, bytes })
}

fn in_use(path: &Path, e: Errno) -> OpenError {
    match e {
        Errno::WOULDBLOCK | Errno::ACCESS => OpenError::InUse { path: path.to_path_buf() },
        e => OpenError::of(path, "lock", e.into()),
    }
}

/// Claims a block device, as a mount does, for as long as the file is open.
pub(crate) fn claim(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(path)
}

/// A reader's lock that was turned into a writer's. Dropped, it is a reader's again, for as long as the reader lives.
#[derive(Debug)]
pub(crate) struct UpgradedLock {
    /// Shares the lock with the reader's descriptor.
    file: File,
    path: PathBuf,
    is_block_device: bool,
    /// Where the reader has its lock on the bytes, as long as it lives.
    range: Weak<Mutex<Option<RangeLock>, rank::DeviceRange>>,
}

impl UpgradedLock {
    /// Of `file`, which holds a reader's lock, and on the bytes that in `range`.
    pub(crate) fn take(file: &File, path: &Path, is_block_device: bool, range: &RangeSlot) -> Result<Self, OpenError> {
        let own = file.try_clone().map_err(|e| OpenError::of(path, "lock", e))?;
        let lock = Self { file: own, path: path.to_path_buf(), is_block_device, range: Arc::downgrade(range) };
        // where it fails the reader's lock may be gone for a moment: the drop of `lock` takes it again
        self::lock(&lock.file, path, true, is_block_device)?;
        Ok(lock)
    }

    /// The writer ends, which held `range`: the reader has its own lock on the bytes again, without a moment in which others could
    /// take them for writing.
    pub(crate) fn give_back(&self, range: Option<RangeLock>) {
        let Some(reader) = self.range.upgrade() else { return };
        let range = range.filter(|r| r.let_readers_in(&self.file).is_ok());
        let taken = RangeLock::take(&self.file, false);
        drop(range);
        match taken {
            Ok(lock) => *reader.lock() = lock,
            Err(e) => tracing::warn!(path = %self.path.display(), error = %e, "others may write its bytes"),
        }
    }
}

impl Drop for UpgradedLock {
    fn drop(&mut self) {
        if let Err(e) = lock(&self.file, &self.path, false, self.is_block_device) {
            tracing::warn!("{e}");
        }
    }
}

/// Locks `file` for as long as it is open.
pub(crate) fn lock(file: &File, path: &Path, write: bool, is_block_device: bool) -> Result<(), OpenError> {
    let how = if write { FlockOperation::NonBlockingLockExclusive } else { FlockOperation::NonBlockingLockShared };
    // udev locks a block device for a moment whenever a writer has closed it. Of a process that was killed the kernel closes
    // what its io_uring had registered some milliseconds after others can see its end.
    let (mut tries, pause) = if is_block_device { (20, 50) } else { (30, 10) };
    loop {
        tries -= 1;
        match rustix::fs::flock(file, how) {
            Ok(()) => return Ok(()),
            Err(Errno::INTR) => tries += 1,
            Err(Errno::WOULDBLOCK) if tries > 0 => std::thread::sleep(Duration::from_millis(pause)),
            Err(Errno::WOULDBLOCK) => return Err(OpenError::InUse { path: path.to_path_buf() }),
            Err(e) => return Err(OpenError::of(path, "lock", e.into())),
        }
    }
}

/// One try for a lock.
pub(crate) fn lock_once(file: &File, how: FlockOperation, path: &Path) -> Result<(), OpenError> {
    rustix::fs::flock(file, how).map_err(|e| in_use(path, e))
}
