//! `braidfs mount` and the helper `mount.braidfs` of mount(8).
//!
//! The volume is opened and served by a background process (`--foreground`: by this one), which tells this command
//! when the mount stands, so that the exit code is right and the caller finds the files there.

use crate::cmd::mount_again::{Again, Parent, note_of, volume_of};
use crate::cmd::mount_options::{self, FuseBlk, MountSpec};
use crate::cmd::umount::is_braidfs;
use crate::cmd::{remount, tenant};
use crate::failure::{Failure, Outcome, host_error, mount_code};
use crate::{mounted, mountinfo, notify, open};
use braidfs::numa::Numa;
use braidfs::store::super_io::{read_one, read_super};
use braidfs::{MountOptions, Volume};
use braidfs_device::{
    AnyDevice, Device, FileDevice, LoopDevice, OpenError, is_nbd_uri, is_unclaimed, look_at_devices, open_any_devices,
    open_claimed_devices,
};
use braidfs_fuse::{
    Cache, DaemonError, DeadMount, Guard, Heir, Looked, MountConfig, Progress, Ready, SuperviseError, Supervised,
    TellDevices, Upgradable, daemonize, dead_at, greeting, look_after, serve, supervise,
};
use rustix::fs::{MemfdFlags, memfd_create};
use std::ffi::OsStr;
use std::fs::File;
use std::io::ErrorKind;
use std::os::fd::RawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use uuid::Uuid;

/// How often a plain FUSE mount commits: sync(2) does not reach us there.
const PLAIN_FUSE_COMMIT: Duration = Duration::from_secs(1);
/// How long what a dead process held is waited for.
const LOCKS_WAIT: Duration = Duration::from_secs(10);
/// How long the claim on a block device is waited for: the kernel keeps it for a moment after an unmount.
const CLAIM_WAIT: Duration = Duration::from_secs(1);

/// Mount a volume
#[derive(Debug, clap::Args)]
#[command(after_help = "Options of -o, as in mount(8):\n  \
    ro rw remount relatime noatime strictatime nodiratime lazytime sync dirsync suid nosuid\n  \
    dev nodev exec noexec nosymfollow allow_other commit=SECONDS data=MODE overwrite=HOW\n  \
    cache=SIZE cache=back cache=through threads=N fuseblk=WHEN latency=WHAT transport=HOW\n  \
    metrics=WHERE slow=MS discard nodiscard nodefrag fileflags private user_xattr\n  \
    supervise[=TIMES/SECONDS] tenant=NAME numa=HOW log=FILE\n\
    mount.braidfs(8) has the table of all, and what a remount does with each.\n\n\
    discard: free space of 2 MiB and more is discarded (TRIM, hole punch) as it becomes free; without it, fstrim does \
    that when it is called.\n\n\
    overwrite=auto (default): an fsync may write changed blocks where they lie, if that costs less; from then \
    on commits of that file do, too. Not if the volume has data checksums or is mounted with data=journal. \
    log: changed blocks are always written elsewhere, so that a crash leaves all of them or none.\n\n\
    numa=auto (default): if the machine has several NUMA nodes, each domain has one of them (in turn, or that of its \
    device): memory for its pages comes from there, and its background threads run there. off: the kernel decides.\n\n\
    private: for the mounting user alone, without permissions, ACLs and extended attributes; cache=through: each write \
    goes to the server at once. Both save requests; mounted.md says what they give up.\n\n\
    latency=auto (default): a process that alone sends many small requests is served on its own CPU \
    (as root); low: also, idle CPUs do not halt while requests come (root; faster, above all in a \
    virtual machine, for more power); off: neither.\n\n\
    transport=auto (default): requests come through io_uring, a queue for each CPU, where the kernel \
    takes that (Linux 6.14; `echo Y > /sys/module/fuse/parameters/enable_uring` turns it on, a line \
    `options fuse enable_uring=Y` in /etc/modprobe.d for good), else through /dev/fuse; ring: that or \
    nothing; dev: /dev/fuse. The log says which and why.\n\n\
    supervise: a parent waits for the process that serves the mount. If that dies (a crash, kill -9), the parent mounts \
    anew at the same place, unless it has died more than TIMES times within SECONDS (5/600). umount ends both, and so \
    does SIGTERM to either. Files that were open stay dead (ENOTCONN): see mounted.md. The log tells of it.\n\n\
    Warnings and errors of a mount in the background go to the system's log (journalctl -t braidfs); with --log-file, or \
    log=, all goes into that file.\n\n\
    A DEVICE may lie on an NBD server: nbd://HOST[:PORT][/EXPORT], nbd+unix:///EXPORT?socket=PATH, with \
    ?timeout=SECONDS (30), connections=N (4), lease=SECONDS or off (15): remote.md. Such a volume has one writer.\n\n\
    The documentation lies in /usr/share/doc/braidfs, in /usr/local/share where `make install` put it, or docs/ of the \
    sources.\n\n\
    Examples:\n  braidfs mount disk.img /mnt\n  braidfs mount -o ro,noatime /dev/sdb /dev/sdc /mnt\n  \
    braidfs mount nbd://storage/vol1 /mnt           on another machine's disk\n  \
    braidfs mount -f --log debug disk.img /mnt      in the foreground\n  \
    braidfs mount -o remount,ro /mnt                read-only from now on\n  \
    braidfs mount -o tenant=web /mnt /srv/web       one tenant of it, by itself (tenants.md)\n\n\
    In /etc/fstab (with this program linked as /sbin/mount.braidfs), a block device, and an image file, which systemd does not \
    check by itself; systemd ends a mount after 90 seconds unless told otherwise:\n  \
    LABEL=data     /data  braidfs  noatime,x-systemd.mount-timeout=1h  0 2\n  \
    /srv/disk.img  /mnt   braidfs  nofail,x-systemd.mount-timeout=1h,x-systemd.requires=braidfs-fsck@srv-disk.img.service  0 0\n\n\
    Exit codes: 0 it is mounted (with --foreground: it was, and is closed), 1 wrong usage, 2 system error, 32 the mount \
    failed.")]
pub struct Args {
    /// Mount options, separated by commas
    #[arg(short, long, value_name = "OPTIONS")]
    pub options: Vec<String>,
    /// Stay in the foreground
    #[arg(short, long)]
    pub foreground: bool,
    /// Threads that serve requests [default: one per CPU]
    #[arg(long, value_name = "N", value_parser = mount_options::parse_threads)]
    pub threads: Option<usize>,
    /// Memory for data and metadata [default: a quarter of the machine's]
    #[arg(long, value_name = "SIZE", value_parser = mount_options::parse_cache)]
    pub cache: Option<u64>,
    /// Changes are durable after this long at the latest [default: 5; plain FUSE: 1]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=300))]
    pub commit: Option<u64>,
    /// Order of data and metadata: ordered, journal or writeback [default: ordered]
    #[arg(long, value_name = "MODE", value_parser = mount_options::parse_data)]
    pub data: Option<braidfs::DataMode>,
    /// Mount through a block device, so that umount waits for the volume to be closed
    #[arg(long, value_enum, value_name = "WHEN")]
    pub fuseblk: Option<FuseBlk>,
    /// Take over from the process that serves the mount, at the other end of standard input: by `braidfs upgrade`
    #[arg(long, hide = true)]
    take_over: bool,
    /// Look after the mount in the place of another program, which was this process and left this descriptor: after
    /// `braidfs upgrade`
    #[arg(long, hide = true, value_name = "DESCRIPTOR", conflicts_with = "take_over")]
    look_after: Option<RawFd>,
    /// Say whether this program can do that
    #[arg(long, hide = true)]
    can_look_after: bool,
    /// Skip unknown options
    #[arg(long, hide = true)]
    pub sloppy: bool,
    /// All devices of the volume (also joined by commas), then the directory to mount on; with `-o remount` the
    /// directory is enough
    #[arg(required_unless_present = "can_look_after", num_args = 1.., value_names = ["DEVICE", "MOUNTPOINT"])]
    paths: Vec<PathBuf>,
}

impl Args {
    /// The directory to mount on.
    pub fn mountpoint(&self) -> Option<&Path> {
        self.paths.last().map(PathBuf::as_path)
    }

    /// It takes over what another process has mounted.
    pub fn is_mounted(&self) -> bool {
        self.take_over || self.look_after.is_some()
    }
}

/// What mount(8) calls
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  mount.braidfs disk.img /mnt -o ro\n\n\
    Exit codes: 0 it is mounted, 1 wrong usage, 2 system error, 32 the mount failed.")]
pub struct HelperArgs {
    /// Devices, joined by commas
    device: PathBuf,
    /// The directory to mount on
    pub mountpoint: PathBuf,
    /// Skip unknown options
    #[arg(short = 's')]
    sloppy: bool,
    /// Do everything but the mount
    #[arg(short = 'f')]
    fake: bool,
    /// No entry in mtab (there is none)
    #[arg(short = 'n')]
    no_mtab: bool,
    /// Say more in the log
    #[arg(short = 'v')]
    pub verbose: bool,
    /// Mount namespace (mount(8) has entered it)
    #[arg(short = 'N')]
    namespace: Option<String>,
    /// Type of the file system, as mount(8) names it
    #[arg(short = 't')]
    fs_type: Option<String>,
    /// Options, joined by commas
    #[arg(short = 'o')]
    pub options: Vec<String>,
}

/// Runs `braidfs mount`.
pub fn run(args: &Args) -> Outcome {
    if args.can_look_after {
        return crate::say(format_args!("{}", greeting())).map(|()| 0);
    }
    let mut spec = understand(&args.options, args.sloppy)?;
    spec.threads = args.threads.unwrap_or(spec.threads);
    spec.cache_bytes = args.cache.unwrap_or(spec.cache_bytes);
    spec.commit = args.commit.map(Duration::from_secs).or(spec.commit);
    spec.data = args.data.or(spec.data);
    spec.fuseblk = args.fuseblk.unwrap_or(spec.fuseblk);
    let (mountpoint, devices) = match args.paths.split_last() {
        Some((mountpoint, volume)) if !volume.is_empty() && !spec.remount && spec.tenant.is_some() => {
            return mount_tenant(volume, mountpoint, &spec);
        }
        Some((mountpoint, [])) if spec.remount => return remount::run_by_hand(mountpoint, &args.options, &spec),
        Some((mountpoint, _)) if spec.remount => return remount::run(mountpoint, &spec),
        Some((mountpoint, devices)) if !devices.is_empty() => (mountpoint, devices),
        _ => return Err(Failure::new("mount: no mount point: write it as `braidfs mount DEVICE DIRECTORY`")),
    };
    if let Some(record) = args.look_after {
        return go_on_looking(args, devices, mountpoint, &spec, record);
    }
    let devices = &real_paths(devices).map_err(|f| f.with_code(mount_code::FAILED))?;
    let again = Again::of(args, devices, mountpoint);
    if args.take_over {
        return take_over(devices, mountpoint, &spec, &again);
    }
    mount(devices, mountpoint, &spec, args.foreground, &again)
}

/// Runs in the new process of an upgrade.
fn take_over(devices: &[PathBuf], mountpoint: &Path, spec: &MountSpec, again: &Again) -> Outcome {
    // it comes with `exec`, but the other program may be one that does not have it
    flush_for_others();
    if spec.supervise.is_some() {
        notify::leave_to_others();
    }
    // the other end of the standard input shall see the end of this process by itself
    let guard = if spec.supervise.is_none() { guard(true) } else { None };
    let heir = Heir::new().map_err(|e| Failure::new(e.to_string()))?;
    let mut cfg = MountConfig::new(open::show(devices), mountpoint);
    spec.configure(&mut cfg);
    cfg.guard = guard;
    // how often it commits, and what a remount changes, the other process tells
    let upgrade = upgradable(volume_options(spec, PLAIN_FUSE_COMMIT), again);
    let tell = |progress| match progress {
        Progress::HandedOver(pid) => notify::main_pid(pid),
        Progress::Mounted(_) | Progress::Ready => {}
    };
    heir.serve(cfg, upgrade, tell).map(|()| 0).map_err(|e| Failure::new(e.to_string()))
}

/// As prctl(2) advises: what needs memory in a process that writes a file system back must not wait for file systems. Threads
/// have it from the one that calls this.
fn flush_for_others() {
    if let Err(e) = rustix::process::configure_io_flusher_behavior(true) {
        tracing::debug!(%e, "the kernel does not take this process for one that writes a file system back");
    }
}

/// Who ends the connections of this process if it is killed and cannot end; before it has threads. A parent does the same.
fn guard(in_background: bool) -> Option<Arc<Guard>> {
    match Guard::start(in_background) {
        Ok(guard) => Some(Arc::new(guard)),
        Err(e) => {
            tracing::warn!(error = %host_error(&e), "no guard: killed at a bad moment, the mount may have to be cut off by hand");
            None
        }
    }
}

/// What the next program needs. The volume's devices, and the pipe to a parent, are added.
fn upgradable(options: MountOptions, again: &Again) -> Upgradable {
    let (arguments, withheld) = (again.take_over(), notify::withheld());
    Upgradable { devices: Vec::new(), options, arguments, supervisor: None, withheld, refused: None }
}

/// Runs in the parent of a supervised mount that was another program so far.
fn go_on_looking(args: &Args, devices: &[PathBuf], mountpoint: &Path, spec: &MountSpec, record: RawFd) -> Outcome {
    let failed = |f: Failure| {
        // nobody may read what a command prints
        tracing::error!(error = f.message, "does not look after the mount any more");
        f.with_code(mount_code::FAILED)
    };
    let error = |e: std::io::Error| failed(Failure::new(format!("--look-after={record}: {}", host_error(&e))));
    let again = Again::of(args, devices, mountpoint);
    let looked = Looked::take(record).map_err(error)?;
    if args.foreground {
        // who was to be told so far
        notify::main_pid(std::process::id());
    }
    let job = Job {
        devices: devices.to_vec(),
        mountpoint: mountpoint.to_owned(),
        spec,
        mounted: volume_of(&looked.note),
        again: &again,
        added: Added::new(spec).map_err(error)?,
    };
    job.look_after(!args.foreground, looked).map_err(failed)?;
    Ok(0)
}

/// How a volume is mounted.
fn volume_options(spec: &MountSpec, default_commit: Duration) -> MountOptions {
    MountOptions {
        read_only: spec.read_only,
        data: spec.data.unwrap_or_default(),
        overwrite: spec.overwrite,
        commit_interval: spec.commit.unwrap_or(default_commit),
        atime: spec.atime.unwrap_or_default(),
        nodiratime: spec.nodiratime.unwrap_or_default(),
        lazytime: spec.lazytime,
        cache_bytes: spec.cache_bytes,
        cached_above: true,
        paced_above: true,
        kill_when_stopped: true,
        discard: spec.discard,
        defragment: !spec.nodefrag,
        numa: if spec.numa_off { Numa::Off } else { Numa::Auto },
        ..MountOptions::default()
    }
}

/// What `mount.braidfs` does for mount(8).
pub fn run_helper(args: &HelperArgs) -> Outcome {
    let spec = understand(&args.options, args.sloppy)?;
    if args.fake {
        return Ok(0);
    }
    if spec.remount {
        return remount::run(&args.mountpoint, &spec);
    }
    if spec.tenant.is_some() {
        return mount_tenant(std::slice::from_ref(&args.device), &args.mountpoint, &spec);
    }
    // as mount(8) does it by itself where there is no helper
    let is_missing = |d: &PathBuf| !is_nbd_uri(d) && matches!(d.try_exists(), Ok(false));
    if spec.nofail && open::expand(std::slice::from_ref(&args.device)).iter().any(is_missing) {
        tracing::info!(device = %args.device.display(), "is not there: with nofail that is no error");
        return Ok(0);
    }
    let by_hand = Args {
        options: args.options.clone(),
        foreground: false,
        threads: None,
        cache: None,
        commit: None,
        data: None,
        fuseblk: None,
        take_over: false,
        look_after: None,
        can_look_after: false,
        sloppy: args.sloppy,
        paths: Vec::new(),
    };
    let devices = real_paths(std::slice::from_ref(&args.device)).map_err(|f| f.with_code(mount_code::FAILED))?;
    let again = Again::of(&by_hand, &devices, &args.mountpoint);
    mount(&devices, &args.mountpoint, &spec, false, &again)
}

/// For whom and how it is served, in the words of the options.
fn how(spec: &MountSpec) -> String {
    let through = spec.write_cache == Cache::Through;
    let words = [
        (true, if through { "cache=through" } else { "cache=back" }),
        (spec.private, "private"),
        (spec.user_xattr, "user_xattr"),
    ];
    words.iter().filter(|w| w.0).map(|w| w.1).collect::<Vec<_>>().join(",")
}

/// Has the server of a volume, which is named by its devices or by where it is mounted, mount a tenant by itself.
fn mount_tenant(volume: &[PathBuf], mountpoint: &Path, spec: &MountSpec) -> Outcome {
    let place = match volume {
        [one] if mountinfo::at(&mountinfo::absolute(one)).is_some_and(|m| is_braidfs(&m)) => mountinfo::absolute(one),
        devices => match mounted::at(&open::expand(devices)) {
            Some(m) => m.target,
            None => {
                let why = "it is not mounted: mount the volume first, then its tenants";
                return Err(Failure::at("cannot mount", open::show(devices), why).with_code(mount_code::FAILED));
            }
        },
    };
    let name = spec.tenant.as_deref().unwrap_or_default();
    tenant::mount(&place, name, Some(mountpoint), spec.of_tenant()).map_err(|f| f.with_code(mount_code::FAILED))
}

fn understand(lists: &[String], sloppy: bool) -> Result<MountSpec, Failure> {
    let spec = MountSpec::parse(lists.iter().map(String::as_str), sloppy);
    spec.map_err(|why| Failure::new(why).with_code(mount_code::USAGE))
}

/// Opens the volume and mounts it, in the background unless `foreground`.
fn mount(devices: &[PathBuf], mountpoint: &Path, spec: &MountSpec, foreground: bool, again: &Again) -> Outcome {
    let failed = |f: Failure| f.with_code(mount_code::FAILED);
    // The server works in `/`: its paths must not depend on where we were started.
    let mountpoint = mountinfo::absolute(mountpoint);
    let added = Added::new(spec).map_err(|e| failed(Failure::new(host_error(&e))))?;
    let job = Job { devices: devices.to_vec(), mountpoint, spec, mounted: None, again, added };
    let place = job.mountpoint.display();
    match std::fs::metadata(&job.mountpoint) {
        // Its place is taken when the volume is open.
        _ if dead_at(&job.mountpoint).is_some() => {}
        Ok(meta) if meta.is_dir() => {}
        Ok(_) => {
            return Err(failed(Failure::at("cannot mount on", place, "not a directory: give an existing directory")));
        }
        Err(e) if e.kind() == ErrorKind::NotFound => {
            return Err(failed(Failure::at("cannot mount on", place, "no such directory: make it with mkdir")));
        }
        Err(e) => return Err(failed(Failure::at("cannot mount on", place, host_error(&e)))),
    }
    if foreground {
        job.run(false, &mut Ready::calling(notify::ready)).map_err(failed)?;
        return Ok(0);
    }
    // a service that this command is run by is no affair of the mount's
    notify::leave_to_others();
    match daemonize(|ready| job.run(true, ready)) {
        Ok(()) => Ok(0),
        Err(e @ DaemonError::Fork(_)) => Err(Failure::new(e.to_string()).with_code(mount_code::SYSTEM)),
        Err(e) => Err(failed(Failure::new(e.to_string()))),
    }
}

fn real_paths(devices: &[PathBuf]) -> Result<Vec<PathBuf>, Failure> {
    let real = |path: &PathBuf| {
        if is_nbd_uri(path) {
            return Ok(path.clone());
        }
        std::fs::canonicalize(path).map_err(|e| {
            let check = if e.kind() == ErrorKind::NotFound { "; check the path" } else { "" };
            Failure::at("cannot mount", path.display(), host_error(&e) + check)
        })
    };
    open::expand(devices).iter().map(real).collect()
}

/// What a serving process does.
type Work<'a> = Box<dyn FnMut(&mut Ready, Option<&DeadMount>) -> Result<(), Failure> + 'a>;

/// One mount, from opening the devices to closing the volume.
struct Job<'a> {
    devices: Vec<PathBuf>,
    mountpoint: PathBuf,
    spec: &'a MountSpec,
    /// The volume that was mounted there before, where that is known: no other one goes in its place.
    mounted: Option<Uuid>,
    /// What a program is called with that takes over.
    again: &'a Again,
    /// Devices that the volume was given since; only where there is a parent that needs them.
    added: Option<Arc<Added>>,
}

/// Paths of devices that a supervised volume was given while it was mounted: the process that serves it writes them, its parent
/// reads them when it has died. In a file that both have open.
struct Added(File);

impl Added {
    /// Where there will be a parent.
    fn new(spec: &MountSpec) -> std::io::Result<Option<Arc<Self>>> {
        if spec.supervise.is_none() {
            return Ok(None);
        }
        let file = memfd_create(c"braidfs-devices", MemfdFlags::CLOEXEC)?;
        Ok(Some(Arc::new(Self(file.into()))))
    }

    fn note(&self, path: &Path) {
        let end = self.0.metadata().map_or(0, |m| m.len());
        // one write: with its end mark it is there or not
        let line = [path.as_os_str().as_bytes(), b"\0"].concat();
        if let Err(e) = self.0.write_all_at(&line, end) {
            tracing::warn!("{}: is not known to the supervising process: {e}", path.display());
        }
    }

    fn paths(&self) -> Vec<PathBuf> {
        let mut text = vec![0; self.0.metadata().map_or(0, |m| m.len() as usize)];
        if self.0.read_exact_at(&mut text, 0).is_err() {
            return Vec::new();
        }
        let whole = text.split_inclusive(|b| *b == 0).filter_map(|line| line.strip_suffix(b"\0"));
        let mut all: Vec<PathBuf> = whole.map(|line| PathBuf::from(OsStr::from_bytes(line))).collect();
        all.sort();
        all.dedup();
        all
    }
}

/// The block device that a fuseblk mount claims.
enum Claim {
    /// The volume's own first device.
    Own,
    /// One that stands for an image file.
    Loop(LoopDevice),
}

impl Job<'_> {
    /// Serves until it is unmounted, with a parent that looks after the process where that is wanted.
    fn run(&self, in_background: bool, ready: &mut Ready) -> Result<(), Failure> {
        if self.spec.supervise.is_none() {
            return self.serve(ready, None, guard(in_background));
        }
        let mounted = self.uuid();
        self.supervised(in_background, mounted, |how, work| supervise(how, ready, work))
    }

    /// Goes on with what another program began.
    fn look_after(&self, in_background: bool, looked: Looked) -> Result<(), Failure> {
        self.supervised(in_background, self.mounted, |how, work| look_after(how, looked, work))
    }

    /// The parent of processes that serve the volume `mounted`, where that is known.
    fn supervised(
        &self,
        in_background: bool,
        mounted: Option<Uuid>,
        look: impl FnOnce(&Supervised<'_>, Work<'_>) -> Result<(), SuperviseError>,
    ) -> Result<(), Failure> {
        let work = |ready: &mut Ready, dead: Option<&DeadMount>| {
            // the parent tells who is to be told
            notify::leave_to_others();
            let Some(dead) = dead else { return self.serve(ready, None, None) };
            // a remount may have changed it meanwhile
            let spec = self.spec.with_flags_of(&dead.options());
            let (mountpoint, again, added) = (self.mountpoint.clone(), self.again, self.added.clone());
            Job { devices: self.devices_now(mounted), mountpoint, spec: &spec, mounted, again, added }.serve(
                ready,
                Some(dead),
                None,
            )
        };
        // which of them are the volume's is looked at when it is mounted again
        let (devices, note) = (|| self.devices_ever(), note_of(mounted));
        let parent = Parent { again: self.again, devices: &devices };
        let how = Supervised {
            point: &self.mountpoint,
            limit: self.spec.supervise.unwrap_or_default(),
            in_background,
            successor: Some(&parent),
            note: &note,
        };
        look(&how, Box::new(work)).map_err(|e| Failure::new(e.to_string()))
    }

    /// All devices that the volume has or had.
    fn devices_ever(&self) -> Vec<PathBuf> {
        let added = self.added.as_ref().map_or_else(Vec::new, |a| a.paths());
        let mut all = self.devices.clone();
        all.extend(added.into_iter().filter(|p| !self.devices.contains(p)));
        all
    }

    /// The devices of the volume by now: it may have been given some, or have lost some that are anybody's, also the one that
    /// was named first. The kernel's claim is on the first of them.
    fn devices_now(&self, mounted: Option<Uuid>) -> Vec<PathBuf> {
        let (Some(mounted), false) = (mounted, self.devices_ever().len() == 1) else {
            return self.devices.clone();
        };
        let of_volume = |path: &PathBuf| {
            let device = look_at_devices(std::slice::from_ref(path)).ok();
            let sb = device.and_then(|d| read_one(&d[0]).ok());
            sb.is_some_and(|sb| Uuid::from_bytes(sb.uuid) == mounted)
        };
        let mut all = self.devices_ever();
        all.retain(of_volume);
        // where there is none the mount says what is wrong with those that there were
        if all.is_empty() { self.devices.clone() } else { all }
    }

    /// Which volume lies on the devices; `None` where there is something wrong with them, which a mount will say.
    fn uuid(&self) -> Option<Uuid> {
        let (sb, _) = read_super(&look_at_devices(&self.devices).ok()?).ok()?;
        Some(Uuid::from_bytes(sb.uuid))
    }

    /// # Errors
    /// Where `devices` hold another volume than the one that was mounted. Before it is recovered.
    fn check_same(&self, devices: &[Arc<dyn Device>]) -> Result<(), Failure> {
        if let (Some(was), Ok((sb, _))) = (self.mounted, read_super(devices))
            && Uuid::from_bytes(sb.uuid) != was
        {
            let is = Uuid::from_bytes(sb.uuid);
            let why = format!("{} has another volume now, {is}; {was} was mounted", open::show(&self.devices));
            return Err(Failure::at("cannot mount on", self.mountpoint.display(), why));
        }
        Ok(())
    }

    /// Opens the devices. With `dead` a daemon that died was found at the mount point: the kernel lets go of its locks a moment
    /// after the mount looks dead, later where it was killed with much to write; the claim on a block device stays with
    /// the mount.
    fn open_files(&self, dead: Option<&DeadMount>, again: bool) -> Result<Vec<AnyDevice>, OpenError> {
        let end = Instant::now() + if dead.is_some() { LOCKS_WAIT } else { CLAIM_WAIT };
        let mut told = false;
        // `again`: an earlier dead mount, which is no more in the table, may have the claim
        let may_pass = |e: &OpenError| match e {
            OpenError::InUse { .. } => dead.is_some(),
            OpenError::Busy { .. } => again || dead.is_none(),
            _ => false,
        };
        loop {
            let opened = match open_any_devices(&self.devices, !self.spec.read_only) {
                Err(OpenError::Busy { path }) if self.devices.first() == Some(&path) && self.is_claimed_by(dead) => {
                    open_claimed_devices(&self.devices)
                }
                opened => opened,
            };
            match opened {
                Err(e) if Instant::now() < end && may_pass(&e) => {
                    if !std::mem::replace(&mut told, true) {
                        tracing::info!(error = %e, "waiting for what another process or mount held");
                    }
                    std::thread::sleep(Duration::from_millis(50));
                }
                result => return result,
            }
        }
    }

    /// Whether the kernel keeps the first device for the dead mount, and not for anybody else.
    fn is_claimed_by(&self, dead: Option<&DeadMount>) -> bool {
        let Some(dead) = dead else { return false };
        std::fs::metadata(&self.devices[0]).is_ok_and(|m| {
            m.file_type().is_block_device()
                && dead.has_claim_on(rustix::fs::major(m.rdev()), rustix::fs::minor(m.rdev()))
        })
    }

    /// `restart`: the mount that a parent found dead, in whose place this one goes.
    fn serve(&self, told: &mut Ready, restart: Option<&DeadMount>, guard: Option<Arc<Guard>>) -> Result<(), Failure> {
        flush_for_others();
        let spec = self.spec;
        let found = if restart.is_some() { None } else { dead_at(&self.mountpoint) };
        let dead = restart.or(found.as_ref());
        let files = self
            .open_files(dead, restart.is_some())
            .map_err(|e| mounted::explain(&e, &self.devices, Some(&self.mountpoint)))?;
        let first =
            files.first().ok_or_else(|| Failure::new("mount: no device given: name all devices of the volume"))?.file();
        let mut claim = self.claim(first.map(|f| &**f), dead)?;
        let default_commit = if claim.is_some() { MountOptions::default().commit_interval } else { PLAIN_FUSE_COMMIT };
        let options = volume_options(spec, default_commit);
        let mut upgrade = upgradable(options.clone(), self.again);
        let commit = options.commit_interval;
        let devices: Vec<_> = files.iter().map(AnyDevice::device).collect();
        self.check_same(&devices)?;
        let volume = Volume::mount(devices, options).map_err(|e| open::explain("cannot mount", &self.devices, &e))?;
        if let Some(dead) = dead
            && !self.detach(dead, restart.is_some(), first, &mut claim, told)?
        {
            return Ok(());
        }
        // where it is now: a directory above it may have another name than at first
        let mountpoint = restart.map_or(&*self.mountpoint, DeadMount::point);
        let mut cfg = MountConfig::new(open::show(&self.devices), mountpoint);
        spec.configure(&mut cfg);
        cfg.guard = guard;
        cfg.tell_devices = self.added.clone().map(|a| TellDevices(Arc::new(move |path| a.note(path))));
        cfg.fuseblk = claim.as_ref().map(|claim| match claim {
            Claim::Own => self.devices[0].clone(),
            Claim::Loop(device) => device.path().to_path_buf(),
        });
        match &claim {
            None => tracing::info!(
                "plain FUSE: sync and syncfs do not reach the volume (fsync does), so it commits every {} s",
                commit.as_secs()
            ),
            Some(Claim::Own) => {
                first.inspect(|f| f.release_claim());
            }
            Some(Claim::Loop(_)) => {}
        }
        tracing::info!(
            source = %cfg.source, mountpoint = %mountpoint.display(), io = first.map_or("NBD", |f| f.engine()),
            direct = first.is_none_or(|f| f.is_direct()),
            threads = cfg.threads, options = %how(spec), commit_s = commit.as_secs(), "mounting"
        );
        // The locks go with the volume, which is closed before umount(8) returns, and not with this process.
        upgrade.devices = files.iter().filter_map(AnyDevice::file).map(Arc::downgrade).collect();
        if upgrade.devices.len() < files.len() {
            let why = "a device of it is elsewhere (nbd), and its connection cannot change hands: unmount it and mount it with the \
                       new program";
            upgrade.refused = Some(why.into());
        }
        let exports: Vec<_> = files.iter().filter_map(AnyDevice::export).map(Arc::downgrade).collect();
        drop(files);
        if spec.supervise.is_some() {
            upgrade.supervisor = told.to_parent();
        }
        cfg.upgrade = Some(Arc::new(upgrade));
        let tell = |progress| match progress {
            Progress::Mounted(Some(id)) => {
                // for `braidfs umount`, which has no lock to wait for
                exports.iter().filter_map(Weak::upgrade).for_each(|export| export.serves(&id.device()));
                told.mounted(id);
            }
            Progress::Mounted(None) => {}
            Progress::Ready => told.ready(),
            Progress::HandedOver(pid) => notify::main_pid(pid),
        };
        serve(Arc::new(volume), &cfg, tell).map_err(|e| Failure::new(e.to_string()))
    }

    /// Takes a dead mount away, with a claim on the block device that can be had then. False where that cannot be and it was
    /// told, which is so on a restart.
    fn detach(
        &self,
        dead: &DeadMount,
        restart: bool,
        first: Option<&Arc<FileDevice>>,
        claim: &mut Option<Claim>,
        told: &mut Ready,
    ) -> Result<bool, Failure> {
        // Nobody can say yet who has the device when the dead mount is detached. Before that, so that what can fail does.
        let spare = match claim {
            Some(Claim::Own) if first.is_some_and(|f| !f.has_claim()) => Some(self.attach_loop()),
            _ => None,
        };
        // Not before: until the new mount is there, programs see the directory below.
        told.detaching();
        if !dead.detach().map_err(|e| self.cannot_detach(&e))? {
            let why = "the dead mount there has gone or changed, or somebody has mounted over it";
            if restart {
                told.ended(&why);
                return Ok(false);
            }
            return Err(Failure::at("cannot mount on", self.mountpoint.display(), why));
        }
        if let Some(spare) = spare
            && !is_unclaimed(&self.devices[0]).map_err(|e| Failure::new(e.to_string()))?
        {
            tracing::info!("the dead mount is in use and keeps the block device: mounting by a loop device of it");
            first.inspect(|f| f.claim_later());
            *claim = Some(Claim::Loop(spare?));
        }
        // several that died one over the other
        while !restart && let Some(next) = dead_at(&self.mountpoint) {
            if !next.detach().map_err(|e| self.cannot_detach(&e))? {
                break;
            }
        }
        if let (None, Some(first)) = (&claim, first)
            && !first.has_claim()
        {
            first.claim_later();
        }
        Ok(true)
    }

    fn cannot_detach(&self, e: &std::io::Error) -> Failure {
        let why = format!("a dead file system is mounted there and cannot be unmounted: {}", host_error(e));
        Failure::at("cannot mount on", self.mountpoint.display(), why)
    }

    /// A loop device of the first device. Writable also for a read-only mount, where it can be: nobody writes through it,
    /// but a mount on a read-only device could not become writable.
    fn attach_loop(&self) -> Result<LoopDevice, Failure> {
        LoopDevice::attach(&self.devices[0], false)
            .or_else(|e| if self.spec.read_only { LoopDevice::attach(&self.devices[0], true) } else { Err(e) })
            .map_err(|e| Failure::new(format!("no loop device: {}", host_error(&e))))
    }

    /// Decides between fuseblk and plain FUSE, and gets the block device for the former; with `dead` a block device that a
    /// dead mount may have yet.
    fn claim(&self, first: Option<&FileDevice>, dead: Option<&DeadMount>) -> Result<Option<Claim>, Failure> {
        let root = rustix::process::geteuid().is_root();
        let missing = match self.spec.fuseblk {
            FuseBlk::Never => return Ok(None),
            _ if !root => "only root can: leave fuseblk out".to_string(),
            _ if !knows_fuseblk() => "the kernel has no fuseblk: leave it out, or load the module `fuse`".to_string(),
            _ if first.is_none() => "a network block device has no block device here: leave fuseblk out".to_string(),
            _ if first.is_some_and(FileDevice::is_block_device) => {
                if !self.is_claimed_by(dead) {
                    mounted::not_by_the_kernel(&self.devices[0], self.spec.read_only)?;
                }
                return Ok(Some(Claim::Own));
            }
            _ => match self.attach_loop() {
                Ok(device) => return Ok(Some(Claim::Loop(device))),
                Err(e) => e.message,
            },
        };
        if self.spec.fuseblk == FuseBlk::Always {
            return Err(Failure::at("cannot mount with fuseblk", self.devices[0].display(), missing));
        }
        // of a network block device it is known that there is none
        if root && first.is_some() {
            tracing::warn!(
                "a plain FUSE mount: sync(2) does not reach the volume, and umount(8) does not wait: {missing}"
            );
        } else {
            tracing::debug!(why = missing, "not mounting with fuseblk");
        }
        Ok(None)
    }
}

/// Whether the kernel has fuseblk. The module lists it once it is loaded, which opening its device has done.
fn knows_fuseblk() -> bool {
    let _ = std::fs::File::open("/dev/fuse");
    std::fs::read_to_string("/proc/filesystems").is_ok_and(|list| list.split_whitespace().any(|w| w == "fuseblk"))
}
