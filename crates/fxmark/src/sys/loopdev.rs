//! A loop device over an image file, detached when dropped or when its process dies.

use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

const LOOP_CTL_GET_FREE: u32 = 0x4c82;
const LOOP_CONFIGURE: u32 = 0x4c0a;
const LOOP_CLR_FD: u32 = 0x4c01;
/// Detach with the last close.
const LO_FLAGS_AUTOCLEAR: u32 = 4;
const LO_FLAGS_DIRECT_IO: u32 = 16;
const LOOP_MAJOR: u32 = 7;
/// Others look for a free device, too.
const TRIES: usize = 64;

/// `struct loop_config` of `linux/loop.h`. Of its `loop_info64` only the flags are ours.
#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    info_head: [u64; 5],
    info_numbers: [u32; 3],
    flags: u32,
    info_tail: [u64; 22],
    reserved: [u64; 8],
}
const _: () = assert!(size_of::<LoopConfig>() == 304);
const _: () = assert!(std::mem::offset_of!(LoopConfig, flags) == 60);

/// An attached device.
#[derive(Debug)]
pub struct LoopDevice {
    path: PathBuf,
    fd: OwnedFd,
    direct: bool,
}

impl LoopDevice {
    /// Attaches `image`, past the page cache of its file system where that can be.
    ///
    /// # Errors
    /// Not root, no loop devices, or the image cannot be opened.
    pub fn attach(image: &Path) -> io::Result<Self> {
        let how = OFlags::RDWR | OFlags::CLOEXEC;
        let file = rustix::fs::open(image, how, Mode::empty())?;
        let control = rustix::fs::open("/dev/loop-control", how, Mode::empty())?;
        let mut direct = true;
        for _ in 0..TRIES {
            // SAFETY: LOOP_CTL_GET_FREE takes no argument.
            let number = unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE as libc::Ioctl) };
            if number < 0 {
                return Err(io::Error::last_os_error());
            }
            let path = PathBuf::from(format!("/dev/loop{number}"));
            let fd = open_node(&path, number as u32)?;
            let config = LoopConfig {
                fd: file.as_raw_fd() as u32,
                block_size: 0,
                info_head: [0; 5],
                info_numbers: [0; 3],
                flags: LO_FLAGS_AUTOCLEAR | if direct { LO_FLAGS_DIRECT_IO } else { 0 },
                info_tail: [0; 22],
                reserved: [0; 8],
            };
            // SAFETY: LOOP_CONFIGURE reads one struct loop_config, whose size and layout `LoopConfig` has.
            let rc = unsafe { libc::ioctl(fd.as_raw_fd(), LOOP_CONFIGURE as libc::Ioctl, &raw const config) };
            if rc >= 0 {
                return Ok(Self { path, fd, direct });
            }
            match io::Error::last_os_error().raw_os_error() {
                Some(libc::EBUSY) => {}
                Some(libc::EINVAL) if direct => direct = false,
                _ => return Err(io::Error::last_os_error()),
            }
        }
        Err(Errno::BUSY.into())
    }

    /// `/dev/loop<n>`.
    pub fn path(&self) -> &Path {
        &self.path
    }
    /// Does it go past the page cache of the image's file system?
    pub fn is_direct(&self) -> bool {
        self.direct
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        // SAFETY: LOOP_CLR_FD takes no argument. While something uses the device, it is detached with its last close.
        let _ = unsafe { libc::ioctl(self.fd.as_raw_fd(), LOOP_CLR_FD as libc::Ioctl) };
    }
}

/// Opens the device; makes its node where nobody has (containers).
fn open_node(path: &Path, number: u32) -> io::Result<OwnedFd> {
    let open = || rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
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
