//! `braidfs umount`: unmounts, and returns only when the volume is closed.
//!
//! With plain FUSE the kernel answers umount(2) before the file system's process has written everything: this
//! command then waits for the lock that the process holds on its devices.

mod devices;
mod force;

use crate::failure::{Failure, Outcome, host_error, mount_code};
use crate::mounted::{Source, is_same};
use crate::mountinfo::{self, Mount};
use braidfs_device::{NbdUri, OpenHere, is_nbd_uri, look_at_devices};
use devices::{Looking, Seen};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Unmount, and wait until the volume is closed
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  braidfs umount /mnt\n\n\
    When it returns with 0, everything is on the devices and they can be taken away, unless the volume or a tenant of it is \
    mounted elsewhere, too. Where a device failed before all was written, it says so, and the exit code is 32.\n\n\
    With --force it is synced and unmounted in order as long as its process answers, within --timeout: what is in use stays \
    mounted, and nothing is lost. A process that does not answer for 10 seconds is cut off: what had not been written is lost \
    then, who uses the mount gets errors, and the exit code is 32.\n\n\
    Exit codes: 0 unmounted and closed (with --lazy: detached), 1 wrong usage, 32 it failed, or was cut off.")]
pub struct Args {
    /// Detach it now, close it when it is no longer used; does not wait
    #[arg(short, long)]
    lazy: bool,
    /// Cut off the file system's process if it does not answer
    #[arg(short, long)]
    force: bool,
    /// How long to wait for the volume to be closed, seconds; with --force, before its process is cut off
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    timeout: u64,
    /// Taken and ignored, for umount(8)
    #[arg(short = 'n', short_aliases = ['r', 'v'], hide = true, action = clap::ArgAction::Count)]
    ignored: u8,
    /// Taken and ignored, for umount(8)
    #[arg(short = 't', hide = true)]
    fs_type: Option<String>,
    /// Taken and ignored, for umount(8)
    #[arg(short = 'N', hide = true)]
    namespace: Option<String>,
    /// Where it is mounted
    mountpoint: PathBuf,
}

/// Why nothing can be done with what is no mount point.
pub const NOT_MOUNTED: &str = "nothing is mounted there: `findmnt -t fuse.braidfs,fuseblk.braidfs` lists what is";

pub fn run(args: &Args) -> Outcome {
    run_checked(args).map_err(|f| f.with_code(mount_code::FAILED))
}

fn run_checked(args: &Args) -> Outcome {
    let target = mountinfo::absolute(&args.mountpoint);
    let show = target.display();
    let Some(mount) = mountinfo::at(&target) else {
        return Err(Failure::at("cannot unmount", &show, NOT_MOUNTED));
    };
    if !is_braidfs(&mount) {
        let why = format!("{} is mounted there, not braidfs: use umount", mount.kind);
        return Err(Failure::at("cannot unmount", &show, why));
    }
    // who does not wait needs none of it
    let looking = if args.lazy { None } else { Some(Looking::begin(&target, &mount)?) };
    // for ever is more than a clock can say: a century
    let deadline = Instant::now() + Duration::from_secs(args.timeout.min(u32::MAX.into()));
    match args.force {
        true => force::unmount_or_cut_off(&target, &mount, args.lazy, deadline)?,
        false => detach(&target, &mount, args.lazy, false)?,
    }
    // The volume stays open where it is mounted elsewhere, too (`mount --bind`).
    let elsewhere = mountinfo::read().iter().any(|m| m.device == mount.device && is_braidfs(m));
    let Some(looking) = looking.filter(|_| !elsewhere) else { return Ok(0) };
    let Some(Seen { source, backing, written, is_dead }) = looking.end(deadline) else {
        let why =
            "unmounted, but its devices do not answer: whether its process has closed them cannot be told; see its log";
        return Err(Failure::at("still open:", &show, why));
    };
    let mounter = mount.super_options.split(',').find_map(|o| o.strip_prefix("user_id=")?.parse().ok());
    let devices = match source.tenant {
        // the volume may have been detached before its tenants, and goes on until they are gone, too
        Some(_) if !is_in_use(&source.devices) => &source.devices,
        _ => &backing.devices,
    };
    for device in devices {
        let held: Vec<Held> = match source.tenant {
            Some(_) => Held::of_gone_mounts(device, mounter),
            None => Held::of(device, &mount.device, mounter).into_iter().collect(),
        };
        wait_closed(device, &held, deadline)?;
    }
    if let Some(dir) = backing.loop_device {
        wait_detached(&dir, deadline);
    }
    let died = || crate::complain(format_args!("{show}: its server had died; the next mount replays the journal"));
    let written = match written {
        Ok(devices) => devices,
        Err(count) => {
            match is_dead {
                true => died(),
                false => crate::complain(format_args!(
                    "{show}: unmounted; whether a device failed before all was written cannot be told: the volume has {count} devices, \
                     and not all of them are found here. See the log of the mount"
                )),
            }
            return Ok(0);
        }
    };
    match is_left_open(&written) {
        true if is_dead => {
            died();
            Ok(0)
        }
        true => {
            let why = "unmounted, but a device failed before all was written, or its server was killed just then, and what was \
                       written last may be lost: see the log of the mount, and check it with `braidfs fsck`";
            Err(Failure::at("not closed properly:", &show, why))
        }
        false => Ok(0),
    }
}

fn is_read_only(mount: &Mount) -> bool {
    mount.super_options.split(',').any(|o| o == "ro")
}

/// Whether the server of a volume that is mounted had died, as it holds none of its `devices`. It is asked nothing: one that does
/// not answer would keep the mount busy.
fn is_dead<'a>(mut devices: impl Iterator<Item = &'a PathBuf>) -> bool {
    !devices.any(|d| Held::lock(d).is_some_and(|held| held.lasts()))
}

/// Whether the volume on `devices`, which nobody has open, was not closed properly, as far as that can be seen.
fn is_left_open(devices: &[PathBuf]) -> bool {
    // every connection to an export is one more that somebody may wait for
    if devices.is_empty() || devices.iter().any(|d| is_nbd_uri(d)) {
        return false;
    }
    let looked = look_at_devices(devices).map(|devices| braidfs_check::is_closed(&devices));
    let open = matches!(looked, Ok(Ok(false)));
    // it may be mounted again by now
    open && !devices.iter().filter_map(|d| Held::lock(d)).any(|held| held.lasts())
}

/// Whether a volume on `devices`, or a tenant of it, is mounted.
fn is_in_use(devices: &[PathBuf]) -> bool {
    let uses = |m: &Mount| {
        let theirs = backing(m).devices.into_iter().chain(Source::of(m).devices);
        theirs.into_iter().any(|d| devices.iter().any(|own| is_same(own, &d)))
    };
    mountinfo::read().iter().any(|m| is_braidfs(m) && uses(m))
}

/// Whether it is one of ours.
pub fn is_braidfs(mount: &Mount) -> bool {
    matches!(mount.kind.as_str(), "fuse.braidfs" | "fuseblk.braidfs")
}

/// What the server holds for a mount: nothing for that of a tenant by itself, which ends without the volume being closed.
pub struct Backing {
    /// Files that it has locked.
    pub devices: Vec<PathBuf>,
    /// sysfs directory of the loop device that stands for the image.
    loop_device: Option<PathBuf>,
}

/// What the server of `mount` holds: for a loop device, the image behind it; where that is a part of the image, the device.
pub fn backing(mount: &Mount) -> Backing {
    let source = Source::of(mount);
    if source.tenant.is_some() {
        return Backing { devices: Vec::new(), loop_device: None };
    }
    let name = Path::new(&mount.source).file_name();
    let sysfs = name.map(|name| Path::new("/sys/block").join(name).join("loop"));
    let backing = sysfs.as_ref().and_then(|dir| std::fs::read_to_string(dir.join("backing_file")).ok());
    let is_zero = |dir: &PathBuf, name: &str| std::fs::read_to_string(dir.join(name)).is_ok_and(|n| n.trim() == "0");
    let is_part = sysfs.as_ref().is_some_and(|dir| !is_zero(dir, "offset") || !is_zero(dir, "sizelimit"));
    match backing {
        Some(_) if is_part => Backing { devices: source.devices, loop_device: sysfs },
        Some(image) => Backing { devices: vec![image.trim_end_matches('\n').into()], loop_device: sysfs },
        None => Backing { devices: source.devices, loop_device: None },
    }
}

/// Unmounts `mount`, which was on `target` when that was looked at last, and nothing that is mounted over it since. `forced`: the user
/// has asked for that, which is none yet.
fn detach(target: &Path, mount: &Mount, lazy: bool, forced: bool) -> Result<(), Failure> {
    let show = target.display();
    let mut flags = UnmountFlags::NOFOLLOW;
    flags.set(UnmountFlags::DETACH, lazy);
    // the server of a tenant that was unmounted a moment ago still has a directory of the volume open, for a moment
    let mut tries = 50;
    let done = loop {
        match on_top(target, mount) {
            OnTop::It => {}
            // somebody else has unmounted it
            OnTop::Gone => return Ok(()),
            OnTop::Other => {
                let why = "something else was mounted over it meanwhile: unmount that first";
                return Err(Failure::at("cannot unmount", &show, why));
            }
        }
        let done = unmount(target, flags);
        if done != Err(Errno::BUSY) || tries == 0 || !tenants_of(target).is_empty() {
            break done;
        }
        std::thread::sleep(Duration::from_millis(20));
        tries -= 1;
    };
    match done {
        Ok(()) => Ok(()),
        Err(Errno::BUSY) => Err(Failure::at(
            "cannot unmount",
            &show,
            match tenants_of(target) {
                tenants if !tenants.is_empty() => {
                    format!("busy: tenants of it are mounted by themselves: unmount {} first", tenants.join(", "))
                }
                _ => format!(
                    "busy: files or directories in it are in use: `fuser -vm {show}` shows by whom, --lazy detaches it{}",
                    if forced { "; --force cuts off a process that does not answer, not its users" } else { "" }
                ),
            },
        )),
        Err(Errno::PERM) => by_fusermount(target, lazy),
        Err(e) => Err(Failure::at("cannot unmount", &show, host_error(&io::Error::from(e)))),
    }
}

/// What is on top at a mount point, by the table of mounts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OnTop {
    /// The mount that is meant.
    It,
    /// Something that was mounted over it.
    Other,
    /// It is not there any more, whatever else is.
    Gone,
}

fn on_top(target: &Path, mount: &Mount) -> OnTop {
    // oldest first
    let mut here: Vec<Mount> = mountinfo::read();
    here.retain(|m| m.target == target);
    match here.last() {
        Some(top) if top.device == mount.device => OnTop::It,
        _ if here.iter().any(|m| m.device == mount.device) => OnTop::Other,
        _ => OnTop::Gone,
    }
}

/// Where tenants of the volume on `target` are mounted by themselves.
pub fn tenants_of(target: &Path) -> Vec<String> {
    let mounts = mountinfo::read();
    let Some(volume) = mounts.iter().rev().find(|m| m.target == target) else { return Vec::new() };
    let own = Source::of(volume);
    if own.tenant.is_some() {
        return Vec::new();
    }
    // its source is an image, or the loop device of one; a tenant's names all devices, the first one first
    let devices: Vec<PathBuf> = backing(volume).devices.into_iter().chain(own.devices).collect();
    let is_of = |m: &&Mount| {
        let source = Source::of(m);
        let first = source.devices.first().filter(|_| source.tenant.is_some());
        first.is_some_and(|first| devices.iter().any(|d| is_same(d, first)))
    };
    let tenants = mounts.iter().filter(|m| is_braidfs(m)).filter(is_of);
    tenants.map(|m| m.target.display().to_string()).collect()
}

/// An ordinary user's way to unmount what they mounted themselves.
fn by_fusermount(target: &Path, lazy: bool) -> Result<(), Failure> {
    let show = target.display();
    let mut command = Command::new("fusermount3");
    command.arg("-u").args(lazy.then_some("-z")).arg("--").arg(target);
    let output = command.output().map_err(|e| {
        Failure::at("cannot unmount", &show, format!("fusermount3: {}: install fuse3, or be root", host_error(&e)))
    })?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(Failure::at("cannot unmount", &show, said.trim()))
}

/// By what a server is seen to have a device open.
enum Held {
    /// The lock that it holds for writing.
    Lock(File),
    /// Its connections to an export.
    Export(OpenHere),
}

impl Held {
    /// By the server that `mounter` has for `mount`, by its number in the table.
    fn of(device: &Path, mount: &str, mounter: Option<u32>) -> Option<Self> {
        match export(device) {
            Some(uri) => uri.open_here(mount, mounter).map(Self::Export),
            None => Self::lock(device),
        }
    }

    /// By servers of mounts that are in the table no more.
    fn of_gone_mounts(device: &Path, mounter: Option<u32>) -> Vec<Self> {
        let Some(uri) = export(device) else { return Self::lock(device).into_iter().collect() };
        let table = mountinfo::read();
        let mut mounts = uri.mounts_here();
        mounts.retain(|number| table.iter().all(|m| m.device != *number));
        mounts.iter().filter_map(|number| uri.open_here(number, mounter).map(Self::Export)).collect()
    }

    fn lock(device: &Path) -> Option<Self> {
        if is_nbd_uri(device) {
            return None;
        }
        // What we cannot open (removed, not ours) we cannot wait for.
        File::open(device).ok().map(Self::Lock)
    }

    fn lasts(&self) -> bool {
        match self {
            // Given back when the file is closed. Where locks are not supported there is nothing to wait for.
            Self::Lock(file) => flock(file, FlockOperation::NonBlockingLockShared) == Err(Errno::WOULDBLOCK),
            Self::Export(open) => open.lasts(),
        }
    }
}

fn export(device: &Path) -> Option<NbdUri> {
    device.to_str().filter(|_| is_nbd_uri(device)).and_then(|uri| NbdUri::parse(uri).ok())
}

/// Waits until no server holds the device any more.
fn wait_closed(device: &Path, held: &[Held], deadline: Instant) -> Result<(), Failure> {
    let mut pause = Duration::from_millis(1);
    while held.iter().any(Held::lasts) {
        if Instant::now() >= deadline {
            let why = "unmounted, but its process has not closed it yet: wait, and see its log";
            return Err(Failure::at("still open:", device.display(), why));
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(50));
    }
    Ok(())
}

/// Waits until the loop device that the server attached is free again; others that the user attached stay.
fn wait_detached(sysfs: &Path, deadline: Instant) {
    let ours = || std::fs::read_to_string(sysfs.join("autoclear")).is_ok_and(|text| text.trim() == "1");
    let deadline = deadline.min(Instant::now() + Duration::from_secs(5));
    while ours() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_for_the_lock() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let soon = || Instant::now() + Duration::from_millis(60);
        let wait = |path: &Path, end| {
            let held: Vec<_> = Held::of(path, "0:1", None).into_iter().collect();
            wait_closed(path, &held, end)
        };
        assert!(wait(file.path(), soon()).is_ok());
        let held = File::open(file.path()).unwrap();
        flock(&held, FlockOperation::LockExclusive).unwrap();
        assert!(wait(file.path(), soon()).is_err());
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(30));
            drop(held);
        });
        assert!(wait(file.path(), Instant::now() + Duration::from_secs(10)).is_ok());
        assert!(wait(Path::new("/no/such"), soon()).is_ok());
    }
}
