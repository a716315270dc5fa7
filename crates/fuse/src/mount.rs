//! Mounting and unmounting: what stands between a mount point and a descriptor of the FUSE connection.
//!
//! As root `mount(2)` is called directly, with type `fuse.braidfs`, or `fuseblk.braidfs` on a block device: then
//! `sync` and `umount` reach the file system and wait for it. Other users go through `fusermount3`.

use crate::channel::open_device;
use crate::dirty::DirtyLimit;
use crate::fs::MAX_IO_BYTES;
use crate::latency::Latency;
use crate::mount_table::{Before, MountId, Place, place_of, top_at};
use crate::ops::TellDevices;
use crate::profile::Profile;
use crate::supervise::Guard;
use crate::transport::Transport;
use crate::upgrade::Upgradable;
use crate::watch::MetricsAt;
use braidfs::AtimeMode;
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketFlags, SocketType, recvmsg, socketpair,
};
use std::ffi::CString;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// So long the rings of a server that was killed may take to end, and its connection with them.
const ENDING: Duration = Duration::from_secs(4);
const HELPER: &str = "fusermount3";
const CONNECTIONS: &str = "/sys/fs/fuse/connections";

/// How and where to mount.
#[derive(Debug, Clone)]
pub struct MountConfig {
    /// Shown as the source in `/proc/mounts` (of a `fuseblk` mount the device is shown).
    pub source: String,
    /// An existing directory.
    pub mountpoint: PathBuf,
    /// Let other users than the mounting one in; needs root or `user_allow_other` in `/etc/fuse.conf`.
    pub allow_other: bool,
    /// Nothing is changed, as with mount's `ro`.
    pub read_only: bool,
    /// Honour setuid and setgid bits (root only).
    pub suid: bool,
    /// Honour device files (root only).
    pub dev: bool,
    /// Allow programs to be run.
    pub exec: bool,
    /// Shown in `/proc/mounts`; access times are kept by the volume, see [`braidfs::MountOptions::atime`].
    pub atime: AtimeMode,
    /// As `atime`: of directories none.
    pub nodiratime: bool,
    /// As `atime`: times may reach the disk late.
    pub lazytime: bool,
    /// Every change is durable before it is answered.
    pub sync: bool,
    /// Changes of directories are.
    pub dirsync: bool,
    /// The kernel asks for each open, so that append-only and immutable files can be guarded. A volume that has such files
    /// is served so in any case.
    pub opens: bool,
    /// Symbolic links are not followed (root only; Linux 5.10).
    pub nosymfollow: bool,
    /// Serving threads, at least 2.
    pub threads: usize,
    /// What is done about the time that wake-ups take.
    pub latency: Latency,
    /// How requests come.
    pub transport: Transport,
    /// What it gives up to be asked less.
    pub profile: Profile,
    /// Mount as `fuseblk` on this block device (root only): `sync` reaches the volume, and `umount` returns when it is
    /// closed. The device is only claimed, not used; a loop device of the image does (`braidfs_device::LoopDevice`).
    pub fuseblk: Option<PathBuf>,
    /// Where metrics can be fetched.
    pub metrics: Option<MetricsAt>,
    /// Operations that take longer are told to the log.
    pub slow: Option<Duration>,
    /// What another process needs to take the mount over; `None`: it cannot.
    pub upgrade: Option<Arc<Upgradable>>,
    /// Is told of devices that are added to the volume.
    pub tell_devices: Option<TellDevices>,
    /// Ends the connections of this process where that is killed and cannot end.
    pub guard: Option<Arc<Guard>>,
}

impl MountConfig {
    /// Defaults: everything as an ordinary file system of the mounting user would have it.
    pub fn new(source: impl Into<String>, mountpoint: impl Into<PathBuf>) -> Self {
        let root = rustix::process::geteuid().is_root();
        Self {
            source: source.into(),
            mountpoint: mountpoint.into(),
            allow_other: root,
            read_only: false,
            suid: root,
            dev: root,
            exec: true,
            atime: AtimeMode::Relatime,
            nodiratime: false,
            lazytime: false,
            sync: false,
            dirsync: false,
            opens: false,
            nosymfollow: false,
            threads: std::thread::available_parallelism().map_or(2, |n| n.get().max(2)),
            latency: Latency::Auto,
            transport: Transport::Auto,
            profile: Profile::default(),
            fuseblk: None,
            metrics: None,
            slow: None,
            upgrade: None,
            tell_devices: None,
            guard: None,
        }
    }

    fn flags(&self) -> MountFlags {
        let mut flags = MountFlags::empty();
        flags.set(MountFlags::RDONLY, self.read_only);
        flags.set(MountFlags::NOSUID, !self.suid);
        flags.set(MountFlags::NODEV, !self.dev);
        flags.set(MountFlags::NOEXEC, !self.exec);
        flags.set(MountFlags::NODIRATIME, self.nodiratime);
        flags.set(MountFlags::LAZYTIME, self.lazytime);
        flags.set(MountFlags::SYNCHRONOUS, self.sync);
        flags.set(MountFlags::DIRSYNC, self.dirsync);
        flags.set(MountFlags::NOSYMFOLLOW, self.nosymfollow);
        flags
            | match self.atime {
                AtimeMode::Relatime => MountFlags::RELATIME,
                AtimeMode::Noatime => MountFlags::NOATIME,
                AtimeMode::Strictatime => MountFlags::STRICTATIME,
            }
    }

    /// Options for the kernel. The root's mode only says that it is a directory.
    fn kernel_options(&self, fd: i32) -> String {
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let mut options = format!("fd={fd},rootmode=40000,user_id={uid},group_id={gid},max_read={MAX_IO_BYTES}");
        if !self.profile.private {
            options += ",default_permissions";
        }
        if self.allow_other {
            options += ",allow_other";
        }
        if self.fuseblk.is_some() {
            options += ",blksize=4096";
        }
        options
    }

    /// Options for `fusermount3`, which escapes commas with a backslash.
    fn helper_options(&self) -> String {
        let source = self.source.replace('\\', "\\\\").replace(',', "\\,");
        let mut options = format!("fsname={source},subtype=braidfs,max_read={MAX_IO_BYTES}");
        for (on, name) in [
            (!self.profile.private, ",default_permissions"),
            (self.allow_other, ",allow_other"),
            (self.read_only, ",ro"),
            (!self.exec, ",noexec"),
            (self.atime == AtimeMode::Noatime, ",noatime"),
            (self.sync, ",sync"),
            (self.dirsync, ",dirsync"),
        ] {
            if on {
                options += name;
            }
        }
        options
    }
}

/// A mount that exists. Dropped, it unmounts (lazily) where nobody else has.
#[derive(Debug)]
pub(crate) struct Mount {
    point: PathBuf,
    /// To tell this mount from a later one at the same place.
    id: Option<MountId>,
    /// It is not this process' any more.
    left: AtomicBool,
    guard: Option<Arc<Guard>>,
}

impl Mount {
    /// Mounts; the connection's descriptor.
    pub fn new(cfg: &MountConfig) -> io::Result<(Self, OwnedFd)> {
        Self::on(cfg, None)
    }

    /// The same on a directory that is open, which is the one that the configuration names: whoever may rename a directory above
    /// it cannot have another one mounted over (root's mounts only; others mount on what is their own).
    pub fn on(cfg: &MountConfig, dir: Option<BorrowedFd<'_>>) -> io::Result<(Self, OwnedFd)> {
        cfg.profile.check(cfg)?;
        let opened = dir.map(|dir| PathBuf::from(format!("/proc/self/fd/{}", dir.as_raw_fd())));
        // of one that is open it is asked where it is, and not once more what has its name
        let point = match &opened {
            Some(dir) => std::fs::read_link(dir)?,
            None => cfg.mountpoint.canonicalize()?,
        };
        if !opened.as_ref().unwrap_or(&point).is_dir() {
            return Err(Errno::NOTDIR.into());
        }
        let before = dir.map(|_| Before::now()).transpose()?;
        let fd = match rustix::process::geteuid().is_root() {
            true => mount_direct(cfg, opened.as_ref().unwrap_or(&point))?,
            false => mount_helped(cfg, &point)?,
        };
        let id = match before {
            // who renames a directory above it at this moment has another one have its name
            Some(before) => {
                let lost = "it is mounted, but is not found in the table of mounts: its connection is ended";
                Some(before.made_since(&cfg.source, &point)?.ok_or_else(|| io::Error::other(lost))?)
            }
            None => top_at(&point)?.map(|top| top.id),
        };
        let mount = Self::of(point, id, cfg.guard.clone());
        mount.guard();
        Ok((mount, fd))
    }

    /// One that another process has made.
    pub fn of(point: PathBuf, id: Option<MountId>, guard: Option<Arc<Guard>>) -> Self {
        Self { point, id, left: AtomicBool::new(false), guard }
    }

    /// Its connection ends with this process, whatever that waits for.
    pub fn guard(&self) {
        if let (Some(guard), Some(id)) = (&self.guard, self.id) {
            guard.watch(id);
        }
    }

    /// Another process may serve it when this one has ended.
    pub fn unguard(&self) {
        if let (Some(guard), Some(id)) = (&self.guard, self.id) {
            guard.forget(id);
        }
    }

    /// It stays, whatever becomes of this process: another one serves it, or it is to be seen that nobody does.
    pub fn leave(&self) {
        self.unguard();
        self.left.store(true, Ordering::SeqCst);
    }

    /// Directory that it was mounted on.
    pub fn point(&self) -> &Path {
        &self.point
    }

    /// Which it is; `None` where there is no table of mounts.
    pub fn id(&self) -> Option<MountId> {
        self.id
    }

    /// Where it is now: somebody may have renamed a directory above it, moved it or mounted over it.
    pub fn place(&self) -> Place {
        self.id.map_or(Place::Gone, |id| place_of(&self.point, &id))
    }

    /// Unmounts it where it is on top; with `lazy` also where it is busy: it then lives on for those who use it.
    ///
    /// # Errors
    /// Of umount(2); ENOENT: it is not there, or something is mounted over it.
    pub fn unmount(&self, lazy: bool) -> io::Result<()> {
        match self.place() {
            Place::OnTop(point) => unmount(&point, lazy),
            Place::Covered | Place::Gone => Err(Errno::NOENT.into()),
        }
    }

    /// Ends the connection: every operation under way and to come fails. Root only.
    pub fn abort(&self) -> io::Result<()> {
        abort(self.id.ok_or(Errno::NODEV)?.dev)
    }

    /// Has the kernel read `kib` ahead instead of its 128 KiB. Best effort: only root may.
    pub fn set_readahead(&self, kib: u32) {
        if let Some(path) = self.bdi("read_ahead_kb")
            && let Err(e) = std::fs::write(&path, kib.to_string())
        {
            tracing::debug!(path, error = %e, "readahead stays at the kernel's default");
        }
    }

    /// How much the kernel may hold dirty.
    pub fn dirty_limit(&self) -> Option<DirtyLimit> {
        self.bdi("").map(DirtyLimit::new)
    }

    /// A setting of the kernel for the mount.
    fn bdi(&self, name: &str) -> Option<String> {
        let (major, minor) = self.id?.dev;
        Some(format!("/sys/class/bdi/{major}:{minor}{}/{name}", if major == 0 { "" } else { "-fuseblk" }))
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if !self.left.load(Ordering::SeqCst)
            && let Place::OnTop(point) = self.place()
            && let Err(e) = unmount(&point, true)
        {
            tracing::warn!(point = %self.point.display(), error = %e, "cannot unmount");
        }
        if !self.left.load(Ordering::SeqCst) {
            self.unguard();
        }
    }
}

/// Has the kernel change the flags of the mount on `cfg.mountpoint` to those of `cfg`; with `bind` those of the mount point
/// alone, not those of the file system (`mount -o remount,bind`). With `keep_atime` it leaves those about access times.
/// The server must be told besides ([`crate::control::remount`]). Root only.
///
/// # Errors
/// EBUSY: to read-only, and files are open for writing, or removed and open. EACCES: to writable, and the block device
/// is read-only.
pub fn remount(cfg: &MountConfig, bind: bool, keep_atime: bool) -> io::Result<()> {
    let mut flags = cfg.flags();
    if keep_atime {
        flags -= MountFlags::RELATIME | MountFlags::NOATIME | MountFlags::STRICTATIME | MountFlags::NODIRATIME;
    }
    flags.set(MountFlags::BIND, bind);
    Ok(rustix::mount::mount_remount(&cfg.mountpoint, flags, c"")?)
}

fn unmount(point: &Path, lazy: bool) -> io::Result<()> {
    if rustix::process::geteuid().is_root() {
        let flags = if lazy { UnmountFlags::DETACH } else { UnmountFlags::NOFOLLOW };
        return Ok(rustix::mount::unmount(point, flags)?);
    }
    let mode = if lazy { "-uqz" } else { "-uq" };
    let status = Command::new(HELPER).arg(mode).arg("--").arg(point).status()?;
    if status.success() { Ok(()) } else { Err(Errno::BUSY.into()) }
}

/// Ends the connection of the mount with this device number: all that its users ask for fails from then on, and what the kernel
/// had not written back is lost. Root may, and who mounted it where the control of connections is mounted.
///
/// # Errors
/// There is no such connection; for want of permission.
pub fn abort(device: (u32, u32)) -> io::Result<()> {
    if !Path::new(CONNECTIONS).read_dir()?.any(|_| true) {
        // Control of connections is a file system of its own, which not every system mounts by itself.
        rustix::mount::mount("fusectl", CONNECTIONS, "fusectl", MountFlags::empty(), None)?;
    }
    std::fs::write(connection(device).join("abort"), "1")
}

/// Where the kernel has the settings of the connection of the mount with this device number: it names it by its own encoding
/// of that.
pub(crate) fn connection((major, minor): (u32, u32)) -> PathBuf {
    Path::new(CONNECTIONS).join((u64::from(major) << 20 | u64::from(minor)).to_string())
}

/// Unmounts what is on top at `point`, for those who do not use it yet.
pub(crate) fn detach_top(point: &Path) -> io::Result<()> {
    unmount(point, true)
}

/// Whether the server of the braidfs on `point` has died. One that is ending just now is waited for, [`ENDING`] at most.
pub(crate) fn is_unserved(point: &Path) -> bool {
    let begin = Instant::now();
    loop {
        // The kernel may know the attributes of the root, and ask nobody; these it always asks for.
        match rustix::fs::statvfs(point) {
            // rings are taken down before the connection
            Err(Errno::CANCELED) if begin.elapsed() < ENDING => std::thread::sleep(ENDING / 200),
            other => return other.err() == Some(Errno::NOTCONN),
        }
    }
}

fn mount_direct(cfg: &MountConfig, point: &Path) -> io::Result<OwnedFd> {
    let fd = open_device()?;
    let options = CString::new(cfg.kernel_options(fd.as_raw_fd()))?;
    match &cfg.fuseblk {
        Some(device) => rustix::mount::mount(device, point, "fuseblk.braidfs", cfg.flags(), options.as_c_str())?,
        None => rustix::mount::mount(cfg.source.as_str(), point, "fuse.braidfs", cfg.flags(), options.as_c_str())?,
    }
    Ok(fd)
}

/// `fusermount3` mounts and passes the descriptor over a socket.
fn mount_helped(cfg: &MountConfig, point: &Path) -> io::Result<OwnedFd> {
    if cfg.fuseblk.is_some() {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, "only root can mount as fuseblk"));
    }
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    // The helper inherits `theirs`: a duplicate without CLOEXEC, at the number that the environment names.
    let inherited = rustix::io::fcntl_getfd(&theirs)?;
    rustix::io::fcntl_setfd(&theirs, inherited - rustix::io::FdFlags::CLOEXEC)?;
    let result = Command::new(HELPER)
        .arg("-o")
        .arg(cfg.helper_options())
        .arg("--")
        .arg(point)
        .env("_FUSE_COMMFD", theirs.as_raw_fd().to_string())
        .output()
        .map_err(|e| io::Error::new(e.kind(), format!("{HELPER}: {e} (it is part of fuse3)")))?;
    drop(theirs);
    if !result.status.success() {
        return Err(io::Error::other(String::from_utf8_lossy(&result.stderr).trim().to_owned()));
    }
    receive_fd(&ours)?.ok_or_else(|| io::Error::other(format!("{HELPER} sent no descriptor")))
}

fn receive_fd(socket: &OwnedFd) -> io::Result<Option<OwnedFd>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    recvmsg(socket, &mut [io::IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(mut fds) = message {
            return Ok(fds.next());
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mount_table::dead_at;

    #[test]
    fn options_are_spelt_for_kernel_and_helper() {
        let mut cfg = MountConfig::new("a,b.img", "/mnt");
        cfg.allow_other = true;
        cfg.read_only = true;
        cfg.fuseblk = Some("/dev/loop7".into());
        assert!(cfg.kernel_options(5).starts_with("fd=5,rootmode=40000,"));
        assert!(cfg.kernel_options(5).ends_with(",allow_other,blksize=4096"));
        assert!(cfg.helper_options().starts_with("fsname=a\\,b.img,subtype=braidfs,"));
        assert!(cfg.helper_options().ends_with(",allow_other,ro"));
        for private in [false, true] {
            cfg.profile.private = private;
            for options in [cfg.kernel_options(5), cfg.helper_options()] {
                assert_eq!(options.contains(",default_permissions"), !private, "{options}");
            }
        }
        assert!(cfg.flags().contains(MountFlags::RDONLY | MountFlags::RELATIME));
        assert!(cfg.threads >= 2);
    }

    #[test]
    fn a_healthy_mount_point_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        assert!(dead_at(dir.path()).is_none());
        assert!(dead_at(&dir.path().join("missing")).is_none());
    }
}
