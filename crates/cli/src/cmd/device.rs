//! `braidfs device`: devices come to a volume, are drained, and leave it, mounted or not.

use crate::cmd::fsck::Bar;
use crate::cmd::mkfs::{look, size_image};
use crate::cmd::resize::mount_point;
use crate::cmd::umount::backing;
use crate::failure::{Failure, Outcome, host_error, server_error};
use crate::{mounted, mountinfo, open, probe, text};
use braidfs::format::super_block::SuperBlock;
use braidfs::store::super_io;
use braidfs::{Error, NewSize, Resized, Volume};
use braidfs_device::{Device, is_nbd_uri, look_at_devices};
use braidfs_fuse::control;
use braidfs_fuse::control::devices::{DeviceAnswer, DeviceWork};
use rustix::io::Errno;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How often a server is asked how far it is.
const POLL: Duration = Duration::from_millis(200);
/// How long another change is waited for: one that was interrupted ends when its block group has moved.
const OTHER_CHANGE: Duration = Duration::from_secs(10);
/// Exit code of a drain, or a tenant's move, where something keeps a device.
pub(super) const KEPT: u8 = 4;

/// Add a device to a volume, have data move there, drain one, or remove it, while the volume is mounted or not
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Exit codes: 0 done (of drain: nothing keeps the device), 1 it failed, or wrong usage, 4 something keeps a device that is \
    drained.\n\n\
    Examples:\n  braidfs device add /mnt /dev/sdc              one more device for the volume that is mounted there\n  \
    braidfs device add --size 10G a.img b.img     a new image file for a volume that is not mounted\n  \
    braidfs device drain /mnt /dev/sdc            nothing new goes there; tells what keeps it\n  \
    braidfs device drain --end /mnt /dev/sdc      it is one like any other again\n  \
    braidfs device rebalance /mnt                 data moves until all devices are used evenly\n  \
    braidfs device remove /mnt /dev/sdc           what lies there moves, and it is free for others\n  \
    braidfs device remove a.img b.img UUID        by its UUID, as `braidfs info` shows it\n\n\
    From then on each mount names all devices of the volume (in /etc/fstab, joined by commas). Killed or without power at \
    any moment, the volume is with the device or without it, and the same command again goes on.\n\n\
    The last device can be removed, as long as no file has its inode number there, and no domain its journal (mkfs puts \
    them on all devices that it is given). `drain` keeps new files away, also after the next mount, moves what can move, and \
    says where the others are: copy them within the volume, remove the old ones, then remove the device. Mounted, drain \
    and remove need -o cache=through. A device that holds something is added only with --force."
)]
pub struct Args {
    #[command(subcommand)]
    call: Call,
}

#[derive(Debug, clap::Subcommand)]
enum Call {
    /// Add a device to a volume: all of it
    Add {
        /// Overwrite what is there
        #[arg(short, long)]
        force: bool,
        /// Do not discard the device first (TRIM, hole punch)
        #[arg(short = 'K', long)]
        nodiscard: bool,
        /// Make the image file, or extend it to this size
        #[arg(long, value_parser = text::parse_size, value_name = "BYTES", allow_hyphen_values = true)]
        size: Option<u64>,
        #[command(flatten)]
        how: How,
    },
    /// Keep what is new away from a device, and say what keeps it
    Drain {
        /// Make it a device like any other again
        #[arg(long)]
        end: bool,
        #[command(flatten)]
        how: How,
    },
    /// Move data so that all devices are used evenly, as after one was added
    Rebalance {
        #[command(flatten)]
        tell: Tell,
        /// The mount point of a mounted volume, or all devices of one
        #[arg(required = true, value_name = "MOUNTPOINT|DEVICE")]
        places: Vec<PathBuf>,
    },
    /// Move what lies on the last device to the others, and remove it
    Remove {
        #[command(flatten)]
        how: How,
    },
}

#[derive(Debug, clap::Args)]
struct Tell {
    /// The result as JSON
    #[arg(long)]
    json: bool,
    /// Print nothing on success
    #[arg(short, long)]
    quiet: bool,
}

#[derive(Debug, clap::Args)]
struct How {
    #[command(flatten)]
    tell: Tell,
    /// The mount point of a mounted volume, or all devices of one; then the device that is meant, by its path or, where it is
    /// one of the volume's, its UUID
    #[arg(required = true, num_args = 2.., value_name = "MOUNTPOINT|DEVICE")]
    places: Vec<PathBuf>,
}

/// The volume that is meant.
struct Place {
    /// As it was named.
    name: String,
    devices: Vec<PathBuf>,
    mount: Option<PathBuf>,
    /// What its first device says; nothing where that cannot be read.
    sb: Option<SuperBlock>,
}

pub fn run(args: &Args) -> Outcome {
    let how = match &args.call {
        Call::Rebalance { tell, places } => return rebalance(tell, &Place::of(places).whole()?),
        Call::Add { how, .. } | Call::Drain { how, .. } | Call::Remove { how } => how,
    };
    let Some((target, places)) = how.places.split_last() else {
        return Err(Failure::new("device: name the volume, then the device").with_code(1));
    };
    let place = Place::of(places).whole()?;
    match &args.call {
        Call::Add { force, nodiscard, size, .. } => add(how, &place, target, *force, *nodiscard, *size),
        Call::Drain { end, .. } => drain(how, &place, target, *end),
        Call::Remove { .. } | Call::Rebalance { .. } => remove(how, &place, target),
    }
}

fn superblock_of(path: &Path) -> Option<SuperBlock> {
    super_io::read_one(look_at_devices(&[path.to_path_buf()]).ok()?.first()?).ok()
}

impl Place {
    fn of(places: &[PathBuf]) -> Self {
        let mut devices = open::expand(places);
        let mount = match places {
            [one] => mount_point(one),
            _ => None,
        };
        let mount = mount.or_else(|| mounted::at(&devices).map(|m| m.target));
        if let Some(m) = mount.as_ref().and_then(|point| mountinfo::at(point)) {
            devices = backing(&m).devices;
        }
        let all: Vec<SuperBlock> = devices.iter().filter_map(|d| superblock_of(d)).collect();
        let sb = all.iter().find(|sb| sb.this_device.get() == 0).or(all.first()).copied();
        Self { name: open::show(places), devices, mount, sb }
    }

    /// Refuses a mount point through which the server is not asked about devices, before a new one is wiped.
    fn whole(self) -> Result<Self, Failure> {
        match self.mount.as_deref().and_then(mounted::is_apart) {
            Some(why) => Err(Failure::at("cannot use", &self.name, why)),
            None => Ok(self),
        }
    }

    /// Whether `own` is the superblock of one of its devices.
    fn names(&self, own: &SuperBlock) -> bool {
        self.sb.as_ref().is_some_and(|sb| super_io::names(sb, own))
    }

    /// `own` tells of this volume, which has no such device (any more): a crash came while one was added, or removed.
    fn has_left(&self, own: &SuperBlock) -> bool {
        self.sb.as_ref().is_some_and(|sb| sb.uuid == own.uuid) && !self.names(own)
    }

    /// UUID of the device of the volume that `target` is, by its own superblock or by name; `None`: it has left.
    fn device(&self, target: &Path) -> Result<Option<[u8; 16]>, Failure> {
        let named = target.to_str().and_then(|t| t.parse::<uuid::Uuid>().ok());
        if let Some(uuid) = named.filter(|_| !target.exists()) {
            return Ok(Some(uuid.into_bytes()));
        }
        let fail = |why: &str| Err(Failure::at("cannot use", target.display(), why));
        let Some(own) = superblock_of(target) else {
            return fail(
                "it holds no braidfs volume that can be read: name it by its UUID, which `braidfs info` shows",
            );
        };
        if self.has_left(&own) {
            return Ok(None);
        }
        if !self.names(&own) {
            return fail("it is no device of this volume");
        }
        Ok(Some(own.device[usize::from(own.this_device.get())].uuid))
    }

    /// All devices of the volume, where `target` need not have been named among them.
    fn with(&self, target: &Path) -> Vec<PathBuf> {
        let mut all = self.devices.clone();
        if target.exists() && open::no_duplicates(&[all.clone(), vec![target.to_path_buf()]].concat()).is_ok() {
            all.push(target.to_path_buf());
        }
        all
    }

    /// Does something with the volume, which is not mounted, and closes it.
    fn offline<R>(
        &self,
        what: &str,
        paths: &[PathBuf],
        f: impl FnOnce(&Volume) -> Result<R, Error>,
    ) -> Result<R, Failure> {
        let volume = open::mount(open::devices(paths, true)?, paths, true)?;
        let done = f(&volume).map_err(|e| match e {
            Error::Size(why) => Failure::at(what, &self.name, why),
            e => open::explain(what, paths, &e),
        });
        let closed = open::close(volume);
        done.and_then(|r| closed.map(|()| r))
    }

    fn why(&self, e: &std::io::Error) -> String {
        match (Errno::from_io_error(e), &self.mount) {
            (Some(Errno::BUSY), _) => {
                "another change of its devices is running, which may be one that was interrupted: \
                                       that ends after the present block group: wait for it"
                    .into()
            }
            (_, Some(point)) => mounted::server_error(point, e),
            _ => server_error(e),
        }
    }

    /// Waits for what the server of the mount does, once another change of the devices has ended.
    fn online(
        &self,
        what: &str,
        bar: &Bar,
        start: impl Fn() -> std::io::Result<DeviceWork>,
    ) -> Result<DeviceAnswer, Failure> {
        let begun = Instant::now();
        loop {
            match start() {
                Err(e) if Errno::from_io_error(&e) == Some(Errno::BUSY) && begun.elapsed() < OTHER_CHANGE => {
                    std::thread::sleep(POLL);
                }
                work => return self.follow(what, bar, work),
            }
        }
    }

    /// Waits for what the server of the mount does.
    fn follow(&self, what: &str, bar: &Bar, work: std::io::Result<DeviceWork>) -> Result<DeviceAnswer, Failure> {
        let failed = |e: std::io::Error| Failure::at(what, &self.name, self.why(&e));
        let work = work.map_err(failed)?;
        let mut pause = Duration::from_millis(2);
        loop {
            let p = work.progress().map_err(failed)?;
            if p.ended {
                break;
            }
            if p.total > 0 {
                bar.show(&p.phase, p.done, p.total);
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(POLL);
        }
        bar.finish();
        let answer = work.answer().map_err(failed)?;
        match &answer.error {
            None => Ok(answer),
            Some(_) if answer.errno == Errno::ROFS.raw_os_error() => Err(failed(Errno::ROFS.into())),
            Some(why) => Err(Failure::at(what, &self.name, why)),
        }
    }
}

/// Gives the volume mounted on `point` another size.
///
/// # Errors
/// What the server says.
pub(super) fn resize(point: &Path, size: NewSize, bar: &Bar) -> Result<Resized, Failure> {
    const WHAT: &str = "cannot resize";
    // what its devices say is not asked: one that is elsewhere may take no second connection
    let name = point.display().to_string();
    let place = Place { name, devices: Vec::new(), mount: Some(point.to_path_buf()), sb: None };
    let failed = |e: std::io::Error| Failure::at(WHAT, point.display(), mounted::server_error(point, &e));
    mounted::enter(point).map_err(failed)?;
    let tells_nothing = std::cell::Cell::new(false);
    let answer = place.online(WHAT, bar, || {
        let work = DeviceWork::resize(point, size);
        let refused =
            work.as_ref().is_err_and(|e| matches!(Errno::from_io_error(e), Some(Errno::INVAL | Errno::NOTTY)));
        tells_nothing.set(refused);
        work
    });
    if tells_nothing.get() {
        // The server of an earlier version, or a part of the volume is all that is mounted: it tells nothing until it is done.
        return control::resize(point, size).map_err(failed);
    }
    answer?.as_resized().ok_or_else(|| failed(Errno::IO.into()))
}

/// Number of the device that `target` is, of the volume mounted on `mountpoint`.
///
/// # Errors
/// Where it is none of it.
pub(super) fn number_of(mountpoint: &Path, target: &Path) -> Result<usize, Failure> {
    let place = Place::of(&[mountpoint.to_path_buf()]);
    let none = || Failure::at("cannot use", target.display(), "it is no device of this volume");
    let uuid = place.device(target)?.ok_or_else(none)?;
    let table = place.sb.as_ref().map_or(&[][..], SuperBlock::device_table);
    table.iter().position(|d| d.uuid == uuid).ok_or_else(none)
}

/// Waits until what a tenant has on devices that it may not use has moved, as far as it can. False where another change of
/// devices runs: it moves in the background.
///
/// # Errors
/// What the server says.
pub(super) fn move_tenant(mountpoint: &Path, name: &str, json: bool) -> Result<bool, Failure> {
    let bar = Bar::new(std::io::stderr().is_terminal() && !json);
    let place = Place::of(&[mountpoint.to_path_buf()]);
    let work = DeviceWork::move_tenant(mountpoint, name);
    if work.as_ref().is_err_and(|e| Errno::from_io_error(e) == Some(Errno::BUSY)) {
        return Ok(false);
    }
    place.follow("the devices are set, but a tenant does not move yet in", &bar, work).map(|_| true)
}

fn bar(how: &Tell) -> Bar {
    Bar::new(std::io::stderr().is_terminal() && !how.json && !how.quiet)
}

fn add(how: &How, place: &Place, new: &Path, force: bool, nodiscard: bool, size: Option<u64>) -> Outcome {
    const WHAT: &str = "cannot add a device to";
    if is_nbd_uri(new) {
        let why = "one that is elsewhere belongs to a volume from mkfs.braidfs on, as its lease is taken at the mount";
        return Err(Failure::at("will not add", new.display(), why));
    }
    let own = if new.exists() { superblock_of(new) } else { None };
    if own.as_ref().is_some_and(|own| place.names(own)) {
        return Err(Failure::at("will not add", new.display(), "it is a device of this volume already"));
    }
    // what an attempt before this one left there is nobody's
    let again = own.as_ref().is_some_and(|own| place.has_left(own));
    look(new, size, force || again, "will not add")?;
    let mut made = Vec::new();
    let added = size_image(new, size, &mut made).and_then(|()| {
        // not under the feet of a process that uses it
        drop(open::devices(&[new.to_path_buf()], true)?);
        probe::wipe(new).map_err(|e| Failure::at("cannot wipe old signatures from", new.display(), host_error(&e)))?;
        let path = std::fs::canonicalize(new).map_err(|e| Failure::at("cannot use", new.display(), host_error(&e)))?;
        match &place.mount {
            Some(point) => place.online(WHAT, &bar(&how.tell), || DeviceWork::add(point, &path, !nodiscard)),
            None => place.offline(WHAT, &place.devices, |v| {
                let device: Arc<dyn Device> = braidfs_device::open_volume_devices(&[path], true)
                    .map_err(|e| Error::Size(e.to_string()))?
                    .remove(0);
                v.add_device(device, !nodiscard).map(|c| DeviceAnswer::changed(&c))
            }),
        }
    });
    let added = added.inspect_err(|_| {
        for path in made {
            // The first error is the one to tell. A crash may find that the volume has it: then it must not go.
            let is_blank = superblock_of(&path).is_none();
            let _ = if is_blank { std::fs::remove_file(path) } else { Ok(()) };
        }
    })?;
    tell(&how.tell, &added, || {
        format!(
            "{}: {} added, device {} with {} block groups; the volume has {} now: name all its devices at the next mount",
            place.name,
            text::size(added.bytes),
            added.device,
            added.groups,
            text::size(added.volume)
        )
    })
}

fn remove(how: &How, place: &Place, target: &Path) -> Outcome {
    const WHAT: &str = "cannot remove a device from";
    let Some(uuid) = place.device(target)? else {
        // a crash came before its superblock was wiped
        drop(open::devices(&[target.to_path_buf()], true)?);
        probe::wipe(target)
            .and_then(|()| wipe_replica(target))
            .map_err(|e| Failure::at("cannot wipe", target.display(), host_error(&e)))?;
        return tell(&how.tell, &DeviceAnswer::default(), || {
            format!("{}: {} had left already: wiped", place.name, target.display())
        });
    };
    let bar = bar(&how.tell);
    let gone = match &place.mount {
        Some(point) => place.online(WHAT, &bar, || DeviceWork::remove(point, uuid))?,
        None => {
            let gone = place.offline(WHAT, &place.with(target), |v| {
                let device = number(v, &uuid)?;
                v.remove_device(device, &|done, all| {
                    bar.show("block groups", done, all);
                    true
                })
            });
            bar.finish();
            DeviceAnswer::changed(&gone?)
        }
    };
    tell(&how.tell, &gone, || {
        let has = text::size(gone.volume);
        format!("{}: {} removed, free for others; the volume has {has} now", place.name, target.display())
    })
}

/// The copy in the last block, too.
fn wipe_replica(target: &Path) -> std::io::Result<()> {
    let device = braidfs_device::open_volume_devices(&[target.to_path_buf()], true).map_err(std::io::Error::other)?;
    for d in &device {
        if super_io::read_at(d, d.blocks() - 1).is_ok() {
            d.write(d.blocks() - 1, &[0; braidfs_device::BLOCK_BYTES])?;
            d.flush()?;
        }
    }
    Ok(())
}

fn number(v: &Volume, uuid: &[u8; 16]) -> Result<usize, Error> {
    v.device_number(uuid).ok_or_else(|| Error::Size("it is no device of this volume".into()))
}

fn drain(how: &How, place: &Place, target: &Path, end: bool) -> Outcome {
    const WHAT: &str = "cannot drain a device of";
    let Some(uuid) = place.device(target)? else {
        return Err(Failure::at("cannot drain", target.display(), "it is no device of this volume any more"));
    };
    let bar = bar(&how.tell);
    let answer = match &place.mount {
        Some(point) => place.online(WHAT, &bar, || DeviceWork::drain(point, uuid, end))?,
        None => {
            let answer = place.offline(WHAT, &place.with(target), |v| {
                let device = number(v, &uuid)?;
                if end {
                    return v.end_drain(device).map(|()| DeviceAnswer::default());
                }
                let progress = |done, all| {
                    bar.show("block groups", done, all);
                    true
                };
                v.drain_device(device, &progress).map(|d| DeviceAnswer::drained(&d))
            });
            bar.finish();
            answer?
        }
    };
    let code = tell(&how.tell, &answer, || drained(place, target, &answer))?;
    Ok(if answer.groups > 0 { KEPT } else { code })
}

fn rebalance(how: &Tell, place: &Place) -> Outcome {
    const WHAT: &str = "cannot rebalance";
    let bar = bar(how);
    let answer = match &place.mount {
        Some(point) => place.online(WHAT, &bar, || DeviceWork::rebalance(point))?,
        None => {
            let progress = |done, all| {
                bar.show("block groups", done, all);
                true
            };
            let even = place.offline(WHAT, &place.devices, |v| v.rebalance(&progress));
            bar.finish();
            DeviceAnswer::rebalanced(&even?)
        }
    };
    tell(how, &answer, || {
        let mut out = format!("{}: {} emptied", place.name, text::count(answer.moved, "block group", "block groups"));
        for (i, (used, of)) in answer.devices.iter().enumerate() {
            out += &format!("\n  device {i}: {} of {} in use", text::size(*used), text::size(*of));
        }
        out
    })
}

fn drained(place: &Place, target: &Path, answer: &DeviceAnswer) -> String {
    let (name, target) = (&place.name, target.display());
    let Some(drain) = &answer.drain else {
        return format!("{name}: {target} is a device like any other again");
    };
    if answer.groups == 0 {
        return format!("{name}: {target} is drained: nothing keeps it, it can be removed");
    }
    let mut out = format!("{name}: {target} is being drained; of its block groups {} are in use still", answer.groups);
    if drain.journals > 0 {
        let journals = text::count(drain.journals.into(), "domain has its journal", "domains have their journals");
        out += &format!("\n  {journals} there: these never leave");
    }
    if drain.bytes > 0 {
        let bytes = text::size(drain.bytes);
        out += &format!(
            "\n  {bytes} did not move: there is no room elsewhere, they have a fixed place (chattr +C, fallocate, removed and open), or cannot be read"
        );
    }
    if drain.inodes > 0 {
        let inodes = text::count(drain.inodes, "inode has its number", "inodes have their numbers");
        let dirs = text::count(drain.directories, "directory", "directories");
        out +=
            &format!("\n  {inodes} there, with names in {dirs}: copy them within the volume and remove the old ones");
        for (path, n) in &drain.told {
            let path = if path.is_empty() { "(removed, and open)" } else { path };
            out += &format!("\n  {n:>9} {path}");
        }
        let more = drain.directories.saturating_sub(drain.told.len() as u64);
        if more > 0 {
            out += &format!("\n            and {more} more");
        }
    }
    out
}

fn tell(how: &Tell, answer: &DeviceAnswer, line: impl FnOnce() -> String) -> Outcome {
    if how.json {
        let json = serde_json::to_string_pretty(answer).map_err(|e| Failure::new(format!("device: {e}")))?;
        crate::say(format_args!("{json}"))?;
    } else if !how.quiet {
        crate::say(format_args!("{}", line()))?;
    }
    Ok(0)
}
