//! Mounts a tenant by itself: a second connection to the same volume, whose root is the tenant's. Asked for by
//! [`crate::control::tenant_mount`].
//!
//! In this order, each step undone where a later one fails:
//!
//! 1. The tenant's root becomes a border ([`crate::connections`]), unless the tenant is about to be removed. Requests that had
//!    begun before are waited for, and until the kernel has taken in their answers: it holds the lock of the root directory
//!    meanwhile. A tenant that is mounted by itself inside of it, or round it, is a reason to refuse: the root of the inner
//!    one would be kept over two connections.
//! 2. The kernel forgets what it knows below it: the name of the root is invalidated in the directory above, which throws out
//!    what nobody uses, names that are known to be absent, too. What a program has open stays known; where that lies in the
//!    tenant's domain the mount is refused. What it held dirty is written back when a file is closed, so that nothing is lost.
//! 3. `mount`, INIT, serving threads of its own.
//!
//! Names below the root can only come back to the volume's own mount when the border has gone, which is when all that was told
//! over the other connection has been given back.
//!
//! **Unmounting.** `umount` of the volume's own mount is refused by the kernel (EBUSY) as long as a tenant is mounted by itself:
//! this process has a directory of it open. SIGTERM unmounts the tenants first. Where the process is killed, both are dead.
//!
//! A tenant's connection is not handed to another program ([`crate::upgrade`] is refused), nor served by rings, and does not know
//! file handles (NFS): by number an inode outside its tree could be asked for.

use crate::abi::{MINOR_PRUNE, init};
use crate::channel::Channel;
use crate::connections::{Connection, Connections, TELL};
use crate::fs::BraidFs;
use crate::helpers::{Kind, Whose};
use crate::mount::{Mount, MountConfig};
use crate::mount_table::{dead_at, detach_dead, mounts_inside};
use crate::node::WireId;
use crate::serve::READAHEAD_KIB;
use crate::session::{self, run_aside};
use crate::transport::Transport;
use braidfs::{InodeNo, Volume};
use rustix::fs::{Mode, OFlags, ResolveFlags, fstat, openat2};
use rustix::io::Errno;
use std::ffi::OsString;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

/// What differs from the volume's own mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TenantMount {
    /// Nothing is changed over it.
    pub read_only: bool,
    /// Setuid and setgid bits are not honoured.
    pub nosuid: bool,
    /// Device files are not.
    pub nodev: bool,
    /// No programs are run.
    pub noexec: bool,
}

/// How long the kernel has to forget one more of what nobody uses.
const FORGET: Duration = Duration::from_secs(2);
/// From one look to the next, at first and at last: each tells the kernel of all that it still knows.
const LOOKS: [Duration; 2] = [Duration::from_millis(5), Duration::from_millis(160)];
/// From one look whether what is under way has ended to the next.
const MOMENT: Duration = Duration::from_millis(1);

/// Mounts the tenant `name` on the directory `point`, or without one on its own. On a thread of its own: it waits for the kernel.
///
/// # Errors
/// Why not.
pub(crate) fn mount(all: &Arc<Connections>, name: &str, point: &Path, how: TenantMount) -> Result<(), String> {
    let closing = || "the volume is being unmounted".to_owned();
    let config = all.config().ok_or_else(closing)?;
    let fs = all.file_system().ok_or_else(closing)?;
    if fs.negotiated.has(init::OVER_IO_URING) {
        return Err("the volume is mounted with io_uring: mount it with -o transport=dev, and then the tenant".into());
    }
    let upgrades = fs.upgrades.clone();
    let _none =
        upgrades.none_meanwhile().ok_or("an upgrade or a remount of the volume is under way: wait for its end")?;
    let there = || fs.vol.tenant(name).map_err(|_| format!("there is no tenant {name}"));
    let tenant = there()?;
    let root = fs.vol.getattr(tenant.root).map_err(|e| e.to_string())?;
    // without one it is mounted on its own directory
    let home = match point.as_os_str().is_empty() {
        true => Some(place_of(&fs.vol, tenant.root).ok_or("its directory cannot be found")?.0),
        false => None,
    };
    let real = |path: &Path| path.canonicalize().map_err(|e| format!("{}: {e}", path.display()));
    // whose directories lie above its own may put a link there at any time: no link of the volume is followed
    let point = match &home {
        Some(place) => real(&config.mountpoint)?.join(place),
        None => point.to_path_buf(),
    };
    match &home {
        Some(place) => detach_dead_home(&config.mountpoint, place).map_err(|e| format!("{}: {e}", point.display()))?,
        None => {
            if let Some(dead) = dead_at(&point)
                && !dead.detach().map_err(|e| e.to_string())?
            {
                return Err(format!("{}: somebody mounts there at the same time", point.display()));
            }
        }
    }
    let point = if home.is_some() { point } else { real(&point)? };
    let own = Arc::new(Connection::new(WireId::of(&root), tenant.domain, tenant.name, point));
    all.begin(&own)?;
    // from here on nobody removes it, but before somebody may have
    let same = there().and_then(|t| match fs.vol.getattr(t.root) {
        Ok(root) if (WireId::of(&root), t.domain) == (own.root, own.domain) => Ok(()),
        _ => Err(format!("tenant {name} was removed meanwhile, and there is another one")),
    });
    let mounted = same.and_then(|()| forget_below(all, &fs, &own, &config)).and_then(|()| {
        let home = home.map(|place| open_home(&config.mountpoint, &place, own.root.ino())).transpose()?;
        start(all, &fs, &own, &config, how, home)
    });
    if mounted.is_err() {
        let waited = all.open(&own);
        waited.into_iter().for_each(|job| fs.jobs.send(Kind::Borders, Whose::Mount, job));
        drop(fs);
        all.remove(&own);
    }
    mounted
}

/// Has the kernel forget what it knows below the tenant's root over other connections.
fn forget_below(all: &Connections, fs: &BraidFs, own: &Connection, config: &MountConfig) -> Result<(), String> {
    // The first, which tells the others. Those are not kept: one that ends waits until nobody has its channel, and is waited for below.
    let first = all.others(Some(own)).into_iter().next();
    let Some(channel) = first else { return Err("the volume is being unmounted".into()) };
    all.pass();
    // No name has this many bytes. The kernel locks the directory to look for it, and so waits for who was answered just now,
    // but has not taken it in.
    channel.invalidate_entry(own.root, &NO_NAME);
    // nothing crosses the border from here on
    apart_from_others(all, fs, own)?;
    let (path, above) = place_of(&fs.vol, own.root.ino()).ok_or("its directory cannot be found")?;
    match mounts_inside(&config.mountpoint, &path) {
        // what the kernel forgets it unmounts, too
        Ok(Some(other)) => return Err(format!("something is mounted on {}: unmount it first", other.display())),
        Ok(None) => {}
        Err(e) => return Err(format!("the table of mounts cannot be read: {e}")),
    }
    let parent = fs.vol.getattr(above).map_err(|e| e.to_string())?;
    // the last of the path
    let name = path.file_name().unwrap_or_default();
    channel.invalidate_entry(WireId::of(&parent), name.as_bytes());
    channel.invalidate(own.root, true);
    let prunes = fs.negotiated.minor >= MINOR_PRUNE;
    let ([mut pause, longest], mut end, mut least) = (LOOKS, Instant::now() + FORGET, usize::MAX);
    loop {
        let known = fs.known_below(own);
        let Some(first) = known.first() else { return Ok(()) };
        if known.len() < least {
            (least, end) = (known.len(), Instant::now() + FORGET);
        }
        if prunes {
            // what has a name outside the tree, and nobody uses
            channel.prune(&known);
        }
        if Instant::now() > end {
            let also = match prunes {
                true => "",
                false => {
                    ", or had it open under a name outside of the tenant (`sync; echo 2 > /proc/sys/vm/drop_caches`)"
                }
            };
            return Err(format!(
                "files or directories of it are in use through the volume's mount: {}, such as inode {}: `fuser -vm {}` \
                 shows by whom{also}",
                known.len(),
                first.ino().0,
                config.mountpoint.display()
            ));
        }
        thread::sleep(pause);
        pause = (pause * 2).min(longest);
    }
}

/// Longer than a name may be.
const NO_NAME: [u8; 256] = [b'-'; 256];

/// Refuses a tenant's mount inside of another one's, or round it.
fn apart_from_others(all: &Connections, fs: &BraidFs, own: &Connection) -> Result<(), String> {
    let gone = || "its directory cannot be found".to_owned();
    let Some((root, _)) = nested(all, fs, own).ok_or_else(gone)? else { return Ok(()) };
    all.await_open(root);
    nested(all, fs, own).ok_or_else(gone)?.map_or(Ok(()), |(_, why)| Err(why))
}

/// The root of one that is, and in words; the outer `None`: it cannot be told.
fn nested(all: &Connections, fs: &BraidFs, own: &Connection) -> Option<Option<(WireId, String)>> {
    let ours = ancestors(&fs.vol, own.root.ino())?;
    for (tenant, root, point) in all.roots_but(own) {
        let point = point.display();
        if ours.contains(&root.ino()) {
            return Some(Some((
                root,
                format!("it lies inside of tenant {tenant}, which is mounted by itself on {point}"),
            )));
        }
        if ancestors(&fs.vol, root.ino())?.contains(&own.root.ino()) {
            return Some(Some((
                root,
                format!("tenant {tenant} lies inside of it, which is mounted by itself on {point}"),
            )));
        }
    }
    Some(None)
}

/// The directories that a directory lies in, up to the volume's root.
fn ancestors(vol: &Volume, dir: InodeNo) -> Option<Vec<InodeNo>> {
    let (mut all, mut at) = (Vec::new(), dir);
    while at != InodeNo::ROOT {
        at = vol.lookup(at, b"..").ok()?.ino;
        all.push(at);
    }
    Some(all)
}

/// Where a directory lies, from the volume's root on, and the directory above it.
fn place_of(vol: &Volume, dir: InodeNo) -> Option<(PathBuf, InodeNo)> {
    let (mut path, mut at, mut above) = (PathBuf::new(), dir, None);
    while at != InodeNo::ROOT {
        let parent = vol.lookup(at, b"..").ok()?.ino;
        let mut name = None;
        vol.readdir(parent, 0, &mut |e| {
            if e.ino == at && e.name != b"." && e.name != b".." {
                name = Some(OsString::from_vec(e.name.to_vec()));
            }
            name.is_none()
        })
        .ok()?;
        let name = PathBuf::from(name?);
        // a path that ends with a slash has no file name in the end
        path = if path.as_os_str().is_empty() { name } else { name.join(path) };
        above = above.or(Some(parent));
        at = parent;
    }
    Some((path, above?))
}

/// Detaches a dead mount from the tenant's own directory, which may not be where a link leads.
fn detach_dead_home(top: &Path, place: &Path) -> std::io::Result<()> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let top_dir = rustix::fs::open(top, flags, Mode::empty())?;
    match openat2(&top_dir, place, flags, Mode::empty(), ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS) {
        Ok(home) => detach_dead(home.as_fd()),
        // who opens it to mount there says so
        Err(_) => Ok(()),
    }
}

/// The tenant's own directory, to be mounted on: the one of this number at this place of the volume that is mounted on `top`,
/// and none that a symbolic link, or another mount, has put there meanwhile.
fn open_home(top: &Path, place: &Path, root: InodeNo) -> Result<OwnedFd, String> {
    let text = |e: Errno| format!("{}: {e}", top.join(place).display());
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let top_dir = rustix::fs::open(top, flags, Mode::empty()).map_err(text)?;
    let within = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    let home = openat2(&top_dir, place, flags, Mode::empty(), within).map_err(text)?;
    let (above, found) = (fstat(&top_dir).map_err(text)?, fstat(&home).map_err(text)?);
    // numbers of inodes are of one file system each
    if (found.st_dev, found.st_ino) == (above.st_dev, root.0) {
        Ok(home)
    } else {
        Err(format!("{}: another directory is there meanwhile", top.join(place).display()))
    }
}

fn start(
    all: &Arc<Connections>,
    fs: &Arc<BraidFs>,
    own: &Arc<Connection>,
    config: &MountConfig,
    how: TenantMount,
    home: Option<OwnedFd>,
) -> Result<(), String> {
    let cfg = MountConfig {
        source: format!("{}[{}]", config.source, own.tenant),
        mountpoint: own.point.clone(),
        // as it is now: remounts change it
        read_only: fs.vol.read_only() || how.read_only,
        suid: config.suid && !how.nosuid,
        dev: config.dev && !how.nodev,
        exec: config.exec && !how.noexec,
        transport: Transport::Dev,
        fuseblk: None,
        metrics: None,
        upgrade: None,
        tell_devices: None,
        ..config.clone()
    };
    let text = |e: std::io::Error| format!("{}: {e}", own.point.display());
    let pin = pin(config)?;
    let (mount, fd) = Mount::on(&cfg, home.as_ref().map(OwnedFd::as_fd)).map_err(text)?;
    drop(home);
    let mount = Arc::new(mount);
    let channel = Arc::new(Channel::of_tenant(fd, all.clone(), own.clone()));
    let made = agree(&channel, fs, &cfg).and_then(|()| all.join(own, &channel, &mount, pin));
    if let Err(why) = made {
        // ends the connection first: nobody would answer what unmounting may ask
        all.leave(own);
        drop(channel);
        return Err(why);
    }
    mount.set_readahead(READAHEAD_KIB);
    fs.add_dirty(mount.dirty_limit());
    // of limits that come later it is seen there
    if fs.vol.any_rates() {
        fs.raise_threshold();
    }
    let (tell, told) = mpsc::channel();
    let work = {
        let (all, fs, own, mount, threads) = (all.clone(), fs.clone(), own.clone(), mount.clone(), cfg.threads.max(2));
        move || {
            let abandon = || {
                if let Err(e) = mount.abort() {
                    tracing::error!(error = %e, "cannot end the connection of a tenant");
                }
            };
            let failed = tell.clone();
            let ready = || {
                let _ = tell.send(Ok(()));
            };
            let served = session::serve_also(fs.clone(), &channel, threads, abandon, ready, || let_go(&all, &own));
            let_go(&all, &own);
            tracing::info!(tenant = own.tenant, "the tenant is no longer mounted by itself");
            over(&all, fs, &own, channel, mount);
            if let Err(e) = served {
                let _ = failed.send(Err(format!("cannot serve: {e}")));
            }
        }
    };
    // Where there is no thread, what was to be its work is dropped: the channel, then the mount.
    run_aside("fuse-tenant-mount", work).map_err(|e| {
        all.leave(own);
        fs.remove_dirty(mount.dirty_limit());
        format!("cannot serve: {e}")
    })?;
    drop(mount);
    told.recv().map_err(|_| "its threads have ended".to_owned())??;
    tracing::info!(tenant = own.tenant, point = %own.point.display(), "a tenant is mounted by itself");
    Ok(())
}

/// Keeps the volume's own mount from being unmounted.
fn pin(config: &MountConfig) -> Result<OwnedFd, String> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open(&config.mountpoint, flags, Mode::empty())
        .map_err(|e| format!("{}: {e}", config.mountpoint.display()))
}

/// Answers the kernel's INIT.
fn agree(channel: &Channel, fs: &BraidFs, cfg: &MountConfig) -> Result<(), String> {
    let of_main = fs.negotiated;
    let agreed = session::handshake(channel, false, of_main.opens(), cfg.profile).map_err(|e| e.to_string())?;
    if agreed.flags | init::EXPORT_SUPPORT == of_main.flags | init::EXPORT_SUPPORT {
        Ok(())
    } else {
        Err("the kernel does not agree to what it agreed to for the volume's own mount".into())
    }
}

/// The connection has ended: the volume may be unmounted at once, which waits until all that follows is done.
fn let_go(all: &Connections, own: &Connection) {
    if let Some(pin) = all.unpin(own) {
        // Not on this thread: with it a mount that was detached may end, and wait for the volume to be closed, so for this one.
        // Where there is no thread, it is dropped here.
        let _ = run_aside("fuse-tenant-pin", move || drop(pin));
    }
}

/// The connection has ended: all that was told over it is given back, its border is opened, and what was done over it becomes
/// durable.
fn over(all: &Connections, fs: Arc<BraidFs>, own: &Arc<Connection>, channel: Arc<Channel>, mount: Arc<Mount>) {
    all.leave(own);
    // What is put aside is answered, in vain, and gives back what it has.
    let hurry = fs.pacer.hurry();
    let (begun, mut told) = (Instant::now(), 0);
    while Arc::strong_count(&channel) > 1 || Arc::strong_count(own) > OWNERS {
        thread::sleep(MOMENT);
        // until it is done nobody else may see what it changes
        let waited = begun.elapsed().as_secs() / TELL.as_secs();
        if waited > told {
            told = waited;
            tracing::warn!(tenant = own.tenant, "requests of a tenant's mount, which has ended, are still under way");
        }
    }
    drop(hurry);
    drop(channel);
    fs.give_all_back(own);
    all.open(own).into_iter().for_each(|job| fs.jobs.send(Kind::Borders, Whose::Mount, job));
    fs.remove_dirty(mount.dirty_limit());
    if let Err(e) = fs.vol.sync() {
        tracing::error!(error = %e, tenant = own.tenant, "not all of it could be made durable");
    }
    drop(mount);
    drop(fs);
    all.remove(own);
}

/// Of a connection whose channel is the last: this one's, the list's and its copy's, the channel's.
const OWNERS: usize = 4;

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{MetadataExt, symlink};

    #[test]
    fn no_link_is_followed_to_the_directory_of_a_tenant() {
        let top = tempfile::tempdir().unwrap();
        let path = |name: &str| top.path().join(name);
        std::fs::create_dir_all(path("a/tenant")).unwrap();
        symlink("a", path("link")).unwrap();
        symlink("tenant", path("a/also")).unwrap();
        symlink("/", path("out")).unwrap();
        let number = InodeNo(std::fs::metadata(path("a/tenant")).unwrap().ino());
        let open = |place: &str, number| open_home(top.path(), Path::new(place), number).map(|_| ());
        assert_eq!(open("a/tenant", number), Ok(()));
        assert!(open("a/tenant", InodeNo(number.0 + 1)).is_err_and(|e| e.contains("another directory")));
        for place in ["link/tenant", "a/also", "a/../a/tenant/../../..", "out", "gone"] {
            open(place, number).unwrap_err();
        }
        // of another file system the same number means nothing
        let proc = Path::new("/");
        let number = InodeNo(std::fs::metadata("/proc/sys").unwrap().ino());
        assert!(open_home(proc, Path::new("proc/sys"), number).is_err());
    }
}
