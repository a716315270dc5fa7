//! `mount -o remount`: changes options of what is mounted.
//!
//! The kernel changes its flags by mount(2), and asks the server of a FUSE mount nothing about it: so the server is told
//! by an ioctl on the mount. To read-only the kernel goes first: it refuses where files are open for writing, and writes
//! back all that it holds; then the server closes the volume for changes. To writable the other way round.

use crate::cmd::mount_options::MountSpec;
use crate::cmd::umount::{is_braidfs, tenants_of};
use crate::failure::{Failure, Outcome, host_error, mount_code};
use crate::mountinfo::{self, Mount};
use braidfs::Remount;
use braidfs_fuse::{MountConfig, control};
use rustix::io::Errno;
use std::io;
use std::path::Path;

/// Options of the file system that the table of mounts shows and a remount sets anew.
const SHOWN: [&str; 3] = ["ro", "sync", "lazytime"];

/// `braidfs mount -o remount,… DIRECTORY`: what the options do not say stays as it is, as with mount(8).
pub fn run_by_hand(mountpoint: &Path, options: &[String], given: &MountSpec) -> Outcome {
    let mount = find(mountpoint)?;
    let now: Vec<&str> = mount.super_options.split(',').filter(|o| SHOWN.contains(o)).collect();
    let now = [mount.options.clone(), now.join(",")];
    let mut spec = MountSpec::parse(now.iter().chain(options).map(String::as_str), false)
        .map_err(|why| Failure::new(why).with_code(mount_code::USAGE))?;
    // what stands on the command line beside `-o`
    (spec.commit, spec.data) = (given.commit.or(spec.commit), given.data.or(spec.data));
    change(&mount, &spec)
}

/// `mount.braidfs DEVICE DIRECTORY -o remount,…`: mount(8) gives all options that shall be.
pub fn run(mountpoint: &Path, spec: &MountSpec) -> Outcome {
    change(&find(mountpoint)?, spec)
}

fn find(mountpoint: &Path) -> Result<Mount, Failure> {
    let target = mountinfo::absolute(mountpoint);
    let fail = |why: &str| Failure::at("cannot remount", target.display(), why).with_code(mount_code::FAILED);
    let mount = mountinfo::at(&target).ok_or_else(|| fail("nothing is mounted there"))?;
    if !is_braidfs(&mount) {
        return Err(fail(&format!("{} is mounted there, not braidfs", mount.kind)));
    }
    if !rustix::process::geteuid().is_root() {
        return Err(fail("only root can"));
    }
    Ok(mount)
}

fn change(mount: &Mount, spec: &MountSpec) -> Outcome {
    let place = &mount.target;
    let fail = |why: String| Failure::at("cannot remount", place.display(), why).with_code(mount_code::FAILED);
    let mut cfg = MountConfig::new("", place);
    spec.configure(&mut cfg);
    let kernel = || braidfs_fuse::remount(&cfg, spec.bind, spec.keeps_atime());
    if spec.bind {
        return kernel().map(|()| 0).map_err(|e| fail(host_error(&e)));
    }
    let tell = |how: &Remount, sync| control::remount(place, how, sync);
    let was_read_only = mount.super_options.split(',').any(|o| o == "ro");
    // what cannot change is refused before anything does
    let tenants = if spec.read_only && !was_read_only { tenants_of(place) } else { Vec::new() };
    if !tenants.is_empty() {
        // the server refuses that, too
        return Err(fail(format!("tenants of it are mounted by themselves: unmount {} first", tenants.join(", "))));
    }
    tell(&Remount { data: spec.data, ..Remount::default() }, None).map_err(|e| fail(server_says(&e)))?;
    if !spec.read_only {
        tell(&Remount { read_only: Some(false), ..Remount::default() }, None).map_err(|e| fail(server_says(&e)))?;
    }
    if let Err(e) = kernel() {
        if !spec.read_only && was_read_only {
            // as it was; the first error is the one to tell
            let _ = tell(&Remount { read_only: Some(true), ..Remount::default() }, None);
        }
        return Err(fail(kernel_says(&e, place)));
    }
    let how = Remount { read_only: Some(spec.read_only), ..spec.changes() };
    tell(&how, Some(spec.sync)).map_err(|e| fail(server_says(&e)))?;
    Ok(0)
}

fn kernel_says(e: &io::Error, place: &Path) -> String {
    match Errno::from_io_error(e) {
        Some(Errno::BUSY) => format!(
            "busy: files are open for writing, or removed and still open: `fuser -vm {}` shows by whom",
            place.display()
        ),
        Some(Errno::ACCESS) => "its block device is read-only: see blockdev(8), --setrw".into(),
        _ => host_error(e),
    }
}

fn server_says(e: &io::Error) -> String {
    match Errno::from_io_error(e) {
        Some(Errno::INVAL) => "the data mode cannot change while the volume is mounted: leave data= out".into(),
        Some(Errno::ROFS) => {
            "the volume cannot be written: a device is read-only, or a part of the volume failed: see \
                              its log, unmount it and run fsck.braidfs"
                .into()
        }
        Some(Errno::BUSY) => {
            "another braidfs process has a device of the volume open, or an upgrade of the mount is under way: wait for its end".into()
        }
        Some(Errno::OPNOTSUPP) => "a tenant is mounted there by itself: unmount it, and mount it anew".into(),
        Some(Errno::PERM) => "only root can".into(),
        Some(Errno::NOTTY) => "its server is of an older version: unmount, then mount it again".into(),
        Some(Errno::IO) => "a device failed: see the log of the server and dmesg(1)".into(),
        _ => host_error(e),
    }
}
