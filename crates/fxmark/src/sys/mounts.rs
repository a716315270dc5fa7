//! What is mounted where.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// First version of Linux that tells the server of a FUSE mount of a block device of a syncfs(2).
const FUSEBLK_SYNCFS: (u32, u32) = (6, 18);

/// Does syncfs(2) make all of the file system durable that has this directory? Of a FUSE mount it may only hand the kernel's dirty
/// pages to the server, which is not told to commit: always without a block device, with one on an older kernel.
pub fn syncfs_commits(at: &Path) -> bool {
    let Ok(device) = std::fs::metadata(at).map(|m| m.dev()) else { return true };
    let device = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let uname = rustix::system::uname();
    kind_of(&mounts, &device).is_none_or(|kind| is_told(kind, &uname.release().to_string_lossy()))
}

/// Type of the file system of that device (`MAJOR:MINOR`), by the text of mountinfo.
fn kind_of<'a>(mounts: &'a str, device: &str) -> Option<&'a str> {
    let line = mounts.lines().rev().find(|l| l.split(' ').nth(2) == Some(device))?;
    line.split_once(" - ")?.1.split(' ').next()
}

/// Does a kernel of this release tell file systems of this type of a syncfs?
fn is_told(kind: &str, release: &str) -> bool {
    match kind.split('.').next() {
        Some("fuse") => false,
        Some("fuseblk") => {
            let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|n| n.parse().unwrap_or(0));
            (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) >= FUSEBLK_SYNCFS
        }
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fuse_server_is_told_of_syncfs_by_newer_kernels_on_block_devices() {
        for release in ["6.12.48+deb13-amd64", "6.18.44-fc", "7.0.0-rc1"] {
            assert!(is_told("ext4", release) && !is_told("fuse.braidfs", release) && !is_told("fuse", release));
            assert_eq!(is_told("fuseblk.braidfs", release), !release.starts_with("6.12"), "{release}");
        }
        assert!(!is_told("fuseblk", "5.19") && !is_told("fuseblk", "6.9.1") && is_told("fuseblk", "6.18-rc3"));
    }

    #[test]
    fn the_kind_is_that_of_the_device() {
        let mounts = "22 1 254:0 / / rw - ext4 /dev/vda rw\n\
            40 22 7:3 / /mnt rw,noatime shared:5 - fuseblk.braidfs /dev/loop3 rw\n\
            41 22 0:45 / /x rw master:1 - fuse.braidfs /a\\040- b rw\n";
        assert_eq!(kind_of(mounts, "7:3"), Some("fuseblk.braidfs"));
        assert_eq!(kind_of(mounts, "0:45"), Some("fuse.braidfs"));
        assert_eq!(kind_of(mounts, "0:46"), None);
        assert!(syncfs_commits(Path::new("/proc")), "no FUSE mount");
    }
}
