//! Loop devices: a block device for an image file. Root only. A volume that is mounted by one as `fuseblk` reads and writes
//! the image itself.

use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use zerocopy::{FromZeros, Immutable, IntoBytes};

const LOOP_CTL_GET_FREE: u64 = 0x4c82;
const LOOP_CONFIGURE: u64 = 0x4c0a;
const LOOP_CLR_FD: u64 = 0x4c01;
const LO_FLAGS_READ_ONLY: u32 = 1;
const LO_FLAGS_AUTOCLEAR: u32 = 4;
const LO_FLAGS_DIRECT_IO: u32 = 16;
const LOOP_MAJOR: u32 = 7;
/// Others look for a free device, too.
const TRIES: u32 = 64;

/// `struct loop_config` of `linux/loop.h`, with its `struct loop_info64`.
#[derive(FromZeros, IntoBytes, Immutable)]
#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    sizelimit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    file_name: [u8; 64],
    crypt_name: [u8; 64],
    encrypt_key: [u8; 32],
    init: [u64; 2],
    reserved: [u64; 8],
}
const _: () = assert!(size_of::<LoopConfig>() == 304);

/// An image file attached to a loop device. Dropped, it is detached, or as soon as the last user (a mount) is gone.
#[derive(Debug)]
pub struct LoopDevice {
    path: PathBuf,
    fd: OwnedFd,
    direct: bool,
}

impl LoopDevice {
    /// Attaches `image` to a free loop device, with direct I/O where the image's file system can.
    ///
    /// # Errors
    /// Not root, no loop devices, or the image cannot be opened.
    pub fn attach(image: &Path, read_only: bool) -> io::Result<Self> {
        let access = if read_only { OFlags::RDONLY } else { OFlags::RDWR };
        let file = rustix::fs::open(image, access | OFlags::CLOEXEC, Mode::empty())?;
        let control = rustix::fs::open("/dev/loop-control", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        let mut config = LoopConfig::new_zeroed();
        config.fd = file.as_raw_fd() as u32;
        config.flags = LO_FLAGS_AUTOCLEAR | LO_FLAGS_DIRECT_IO | if read_only { LO_FLAGS_READ_ONLY } else { 0 };
        let name = image.as_os_str().as_bytes();
        let shown = name.len().min(config.file_name.len() - 1);
        config.file_name[..shown].copy_from_slice(&name[..shown]);
        for _ in 0..TRIES {
            // SAFETY: LOOP_CTL_GET_FREE takes no argument.
            let number = unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE as libc::Ioctl) };
            if number < 0 {
                return Err(io::Error::last_os_error());
            }
            let path = PathBuf::from(format!("/dev/loop{number}"));
            let fd = open_loop(&path, number as u32, access)?;
            match configure(&fd, &config) {
                Ok(()) => return Ok(Self { path, fd, direct: config.flags & LO_FLAGS_DIRECT_IO != 0 }),
                Err(e) if e.raw_os_error() == Some(libc::EBUSY) => {}
                Err(e) if e.raw_os_error() == Some(libc::EINVAL) && config.flags & LO_FLAGS_DIRECT_IO != 0 => {
                    config.flags &= !LO_FLAGS_DIRECT_IO;
                }
                Err(e) => return Err(e),
            }
        }
        Err(Errno::BUSY.into())
    }

    /// Path of the loop device, `/dev/loop<n>`.
    pub fn path(&self) -> &Path {
        &self.path
    }
    /// Whether it goes past the page cache of the image's file system.
    pub fn is_direct(&self) -> bool {
        self.direct
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        // SAFETY: LOOP_CLR_FD takes no argument. With a mount on it, the device is detached when that goes.
        let _ = unsafe { libc::ioctl(self.fd.as_raw_fd(), LOOP_CLR_FD as libc::Ioctl) };
    }
}

fn configure(fd: &OwnedFd, config: &LoopConfig) -> io::Result<()> {
    // SAFETY: LOOP_CONFIGURE reads one struct loop_config, whose size and layout `LoopConfig` has.
    let rc = unsafe { libc::ioctl(fd.as_raw_fd(), LOOP_CONFIGURE as libc::Ioctl, &raw const *config) };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Opens the device; makes its node where nobody has (containers).
fn open_loop(path: &Path, number: u32, access: OFlags) -> io::Result<OwnedFd> {
    let open = || rustix::fs::open(path, access | OFlags::CLOEXEC, Mode::empty());
    match open() {
        Err(Errno::NOENT) => {
            let dev = rustix::fs::makedev(LOOP_MAJOR, number);
            match rustix::fs::mknodat(rustix::fs::CWD, path, FileType::BlockDevice, Mode::from(0o660), dev) {
                Ok(()) | Err(Errno::EXIST) => Ok(open()?),
                Err(e) => Err(e.into()),
            }
        }
        done => Ok(done?),
    }
}
