//! Where a volume is mounted, by whatever name of its devices: two paths or hard links, a loop device and the image
//! behind it, two loop devices of one image.

use crate::cmd::umount::{backing, is_braidfs};
use crate::failure::{Failure, host_error};
use crate::mountinfo::{self, Mount};
use braidfs_device::{OpenError, is_nbd_uri};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// What names the same bytes.
#[derive(PartialEq)]
enum Identity {
    /// A block device, by its number.
    Block(u64),
    /// A file, by its file system and number.
    File(u64, u64),
    /// An export of an NBD server, as it was named.
    Export(PathBuf),
}

fn identity(path: &Path) -> Option<Identity> {
    if is_nbd_uri(path) {
        return Some(Identity::Export(path.to_path_buf()));
    }
    let meta = std::fs::metadata(path).ok()?;
    let block = meta.file_type().is_block_device();
    Some(if block { Identity::Block(meta.rdev()) } else { Identity::File(meta.dev(), meta.ino()) })
}

/// `path`, and the file behind it where it is a loop device.
fn identities(path: &Path) -> Vec<Identity> {
    let mut all: Vec<_> = identity(path).into_iter().collect();
    if let Some(&Identity::Block(rdev)) = all.first() {
        let (major, minor) = (rustix::fs::major(rdev), rustix::fs::minor(rdev));
        let behind = std::fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/loop/backing_file"));
        all.extend(behind.ok().and_then(|file| identity(Path::new(file.trim_end_matches('\n')))));
    }
    all
}

/// The newest mount that uses one of `devices`.
pub fn at(devices: &[PathBuf]) -> Option<Mount> {
    let ours: Vec<_> = devices.iter().flat_map(|d| identities(d)).collect();
    let uses = |m: &Mount| {
        let source = identities(Path::new(&m.source));
        let mut theirs = backing(m).devices.iter().flat_map(|d| identities(d)).chain(source).collect::<Vec<_>>();
        theirs.retain(|id| ours.contains(id));
        !theirs.is_empty()
    };
    mountinfo::read().into_iter().rev().find(|m| is_braidfs(m) && uses(m))
}

/// Why devices cannot be opened; where the volume is mounted already, how to have it at `wanted`, too.
pub fn explain(e: &OpenError, devices: &[PathBuf], wanted: Option<&Path>) -> Failure {
    let mount = match e {
        OpenError::InUse { .. } | OpenError::Busy { .. } => at(devices),
        _ => None,
    };
    let Some(mount) = mount else { return Failure::new(e.to_string()) };
    let (device, point) = (crate::open::show(devices), mount.target.display());
    Failure::new(match wanted {
        Some(wanted) if wanted == mount.target => format!("{device}: is mounted on {point} already"),
        Some(wanted) => format!(
            "{device}: is mounted on {point} already: `mount --bind {point} {}` shows it there, too",
            wanted.display()
        ),
        None => format!("{device}: is in use: mounted on {point}: unmount it first"),
    })
}

/// Refuses a block device that is mounted already, though nobody excludes us, as both only read: the kernel would give the
/// mount that exists to the new mount point, and the new server would never be asked.
pub fn not_by_the_kernel(device: &Path, read_only: bool) -> Result<(), Failure> {
    if !read_only {
        // a writer holds the claim itself
        return Ok(());
    }
    let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC;
    match rustix::fs::open(device, flags, Mode::empty()) {
        Ok(_) => Ok(()),
        Err(Errno::BUSY) => Err(match at(&[device.to_path_buf()]) {
            Some(m) => {
                let point = m.target.display();
                let why =
                    format!("is mounted on {point} already: `mount --bind {point} DIRECTORY` shows it elsewhere, too");
                Failure::new(format!("{}: {why}", device.display()))
            }
            None => Failure::new(OpenError::Busy { path: device.into() }.to_string()),
        }),
        Err(e) => Err(Failure::at("cannot open", device.display(), host_error(&e.into()))),
    }
}
