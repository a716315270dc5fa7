//! `mount -o remount`: changes options of what is mounted.
//!
//! The kernel changes its flags by mount(2), and asks the server of a FUSE mount nothing about it: so the server is told
//! by an ioctl on the mount. To read-only the kernel goes first: it refuses where files are open for writing, and writes
//! back all that it holds; then the server closes the volume for changes. To writable the other way round.

use crate::cmd::mount_options::MountSpec;
use crate::cmd::umount::{NOT_MOUNTED, is_braidfs, tenants_of};
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
    let mut spec = MountSpec::parse(now(&mount).iter().chain(options).map(String::as_str), false)
        .map_err(|why| Failure::new(why).with_code(mount_code::USAGE))?;
    // what stands on the command line beside `-o`
    (spec.commit, spec.data) = (given.commit.or(spec.commit), given.data.or(spec.data));
    change(&mount, &spec)
}

/// `mount.braidfs DEVICE DIRECTORY -o remount,…`: mount(8) gives all options that shall be.
pub fn run(mountpoint: &Path, spec: &MountSpec) -> Outcome {
    change(&find(mountpoint)?, spec)
}

/// The options that a mount has.
fn now(mount: &Mount) -> [String; 2] {
    let shown: Vec<&str> = mount.super_options.split(',').filter(|o| SHOWN.contains(o)).collect();
    [mount.options.clone(), shown.join(",")]
}

fn find(mountpoint: &Path) -> Result<Mount, Failure> {
    let target = mountinfo::absolute(mountpoint);
    let fail = |why: &str| Failure::at("cannot remount", target.display(), why).with_code(mount_code::FAILED);
    let mount = mountinfo::at(&target).ok_or_else(|| fail(NOT_MOUNTED))?;
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
    let kernel = |spec: &MountSpec| {
        let mut cfg = MountConfig::new("", place);
        spec.configure(&mut cfg);
        braidfs_fuse::remount(&cfg, spec.bind, spec.keeps_atime())
    };
    if spec.bind {
        return kernel(spec).map(|()| 0).map_err(|e| fail(host_error(&e)));
    }
    let tell = |how: &Remount, sync| control::remount(place, how, sync);
    let was_read_only = mount.super_options.split(',').any(|o| o == "ro");
    // what cannot change is refused before anything does
    if spec.read_only && !was_read_only {
        let tenants = tenants_of(place);
        if !tenants.is_empty() {
            // the server refuses that, too
            return Err(fail(tenants_first(&tenants)));
        }
    }
    let refused = |e: io::Error| fail(server_says(&e, place));
    tell(&Remount { data: spec.data, ..Remount::default() }, None).map_err(refused)?;
    if !spec.read_only {
        tell(&Remount { read_only: Some(false), ..Remount::default() }, None).map_err(refused)?;
    }
    // as it was; the first error is the one to tell
    let undo = || {
        if !spec.read_only && was_read_only {
            let _ = tell(&Remount { read_only: Some(true), ..Remount::default() }, None);
        }
    };
    if let Err(e) = kernel(spec) {
        undo();
        return Err(fail(kernel_says(&e, place)));
    }
    let how = Remount { read_only: Some(spec.read_only), ..spec.changes() };
    if let Err(e) = tell(&how, Some(spec.sync)) {
        // else the kernel would refuse writes that the server takes
        if let Ok(before) = MountSpec::parse(now(mount).iter().map(String::as_str), false) {
            let _ = kernel(&before);
        }
        undo();
        return Err(refused(e));
    }
    Ok(0)
}

fn tenants_first(tenants: &[String]) -> String {
    format!("tenants of it are mounted by themselves: unmount {} first", tenants.join(", "))
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

fn server_says(e: &io::Error, place: &Path) -> String {
    match Errno::from_io_error(e) {
        Some(Errno::INVAL) => "the data mode cannot change while the volume is mounted: leave data= out".into(),
        Some(Errno::ROFS) => {
            "the volume cannot be written: a device is read-only, or a part of the volume failed: see \
                              its log, unmount it and run fsck.braidfs"
                .into()
        }
        Some(Errno::BUSY) => match tenants_of(place) {
            tenants if !tenants.is_empty() => tenants_first(&tenants),
            // what is mounted in another mount namespace is not seen from here
            _ => "another braidfs process has a device of the volume open, a tenant of it is mounted by itself out of sight \
                  from here, or an upgrade of the mount is under way: wait for its end"
                .into(),
        },
        Some(Errno::OPNOTSUPP) => "a tenant is mounted there by itself: unmount it, and mount it anew".into(),
        Some(Errno::PERM) => "only root can".into(),
        Some(Errno::ACCESS) => "this mount lets nobody in but its user, not even root, and only root can remount: unmount it \
                                and mount it anew"
            .into(),
        Some(Errno::NOTTY) => "its server is of an older version: unmount, then mount it again".into(),
        Some(Errno::IO) => "a device failed: see the log of the server and dmesg(1)".into(),
        _ => host_error(e),
    }
}
