//! Mounts a tenant by itself: a second connection to the same volume, whose root is the tenant's. Asked for by
//! [`crate::control::tenant_mount`].
//!
//! In this order, each step undone where a later one fails:
//!
//! 1. The tenant's root becomes a border ([`crate::connections`]). Requests that had begun before are waited for.
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
use crate::connections::{Connection, Connections};
use crate::fs::BraidFs;
use crate::mount::{Mount, MountConfig};
use crate::mount_table::{dead_at, mounts_below};
use crate::node::WireId;
use crate::serve::READAHEAD_KIB;
use crate::session::{self, run_aside};
use crate::transport::Transport;
use braidfs::{InodeNo, Volume};
use rustix::fs::{Mode, OFlags};
use std::ffi::OsString;
use std::os::fd::OwnedFd;
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

/// How long the kernel has to forget what nobody uses.
const FORGET: Duration = Duration::from_secs(2);
/// From one look to the next.
const LOOK: Duration = Duration::from_millis(5);
/// An answer that was given before the border came is with who asked for it after this long.
const ARRIVES: Duration = Duration::from_millis(10);
/// How long what is under way may take when a connection has ended.
const UNDER_WAY: Duration = Duration::from_secs(30);

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
    let tenant = fs.vol.tenant(name).map_err(|_| format!("there is no tenant {name}"))?;
    let root = fs.vol.getattr(tenant.root).map_err(|e| e.to_string())?;
    // without one it is mounted on its own directory
    let point = &match point.as_os_str().is_empty() {
        true => config.mountpoint.join(place_of(&fs.vol, tenant.root).ok_or("its directory cannot be found")?.0),
        false => point.to_path_buf(),
    };
    if let Some(dead) = dead_at(point)
        && !dead.detach(point).map_err(|e| e.to_string())?
    {
        return Err(format!("{}: somebody mounts there at the same time", point.display()));
    }
    let point = point.canonicalize().map_err(|e| format!("{}: {e}", point.display()))?;
    let own = Arc::new(Connection::new(WireId::of(&root), tenant.domain, tenant.name, point));
    all.begin(&own)?;
    let mounted = forget_below(all, &fs, &own, &config).and_then(|()| start(all, &fs, &own, &config, how));
    if mounted.is_err() {
        drop(fs);
        all.remove(&own);
    }
    mounted
}

/// Has the kernel forget what it knows below the tenant's root over other connections.
fn forget_below(all: &Connections, fs: &BraidFs, own: &Connection, config: &MountConfig) -> Result<(), String> {
    let (path, above) = place_of(&fs.vol, own.root.ino()).ok_or("its directory cannot be found")?;
    let shown = config.mountpoint.join(&path);
    match mounts_below(&shown) {
        // what the kernel forgets it unmounts, too
        Ok(Some(other)) => return Err(format!("something is mounted on {}: unmount it first", other.display())),
        Ok(None) => {}
        Err(e) => return Err(format!("the table of mounts cannot be read: {e}")),
    }
    all.pass();
    thread::sleep(ARRIVES);
    let parent = fs.vol.getattr(above).map_err(|e| e.to_string())?;
    // the last of the path; of the first channel, which tells the others
    let (name, others) = (path.file_name().unwrap_or_default(), all.others(Some(own)));
    let Some(channel) = others.first() else { return Err("the volume is being unmounted".into()) };
    channel.invalidate_entry(WireId::of(&parent), name.as_bytes());
    channel.invalidate(own.root, true);
    let end = Instant::now() + FORGET;
    loop {
        let known = fs.known_below(own);
        let Some(first) = known.first() else { return Ok(()) };
        if fs.negotiated.minor >= MINOR_PRUNE {
            // what has a name outside the tree, and nobody uses
            channel.prune(&known);
        }
        if Instant::now() > end {
            return Err(format!(
                "files or directories of it are in use through the volume's mount: {}, such as inode {}: `fuser -vm {}` \
                 shows by whom",
                known.len(),
                first.ino(),
                config.mountpoint.display()
            ));
        }
        thread::sleep(LOOK);
    }
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

fn start(
    all: &Arc<Connections>,
    fs: &Arc<BraidFs>,
    own: &Arc<Connection>,
    config: &MountConfig,
    how: TenantMount,
) -> Result<(), String> {
    let cfg = MountConfig {
        source: format!("{}[{}]", config.source, own.tenant),
        mountpoint: own.point.clone(),
        read_only: config.read_only || how.read_only,
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
    let (mount, fd) = Mount::new(&cfg).map_err(text)?;
    let mount = Arc::new(mount);
    let channel = Arc::new(Channel::of_tenant(fd, all.clone(), own.clone()));
    let made = agree(&channel, fs, &cfg).and_then(|()| all.join(own, &channel, &mount, pin));
    if let Err(why) = made {
        // ends the connection first: nobody would answer what unmounting may ask
        drop(all.leave(own));
        drop(channel);
        return Err(why);
    }
    mount.set_readahead(READAHEAD_KIB);
    fs.add_dirty(mount.dirty_limit());
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
            let served = session::serve_also(fs.clone(), &channel, threads, abandon, || {
                let _ = tell.send(Ok(()));
            });
            tracing::info!(tenant = own.tenant, "the tenant is no longer mounted by itself");
            let pin = over(&all, fs, &own, channel, mount);
            // with it the volume's own mount may end, which waits until all of this is over
            drop(pin);
            if let Err(e) = served {
                let _ = failed.send(Err(format!("cannot serve: {e}")));
            }
        }
    };
    // Where there is no thread, what was to be its work is dropped: the channel, then the mount.
    run_aside("fuse-tenant-mount", work).map_err(|e| {
        drop(all.leave(own));
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

/// The connection has ended: all that was told over it is given back, and its border goes. What kept the volume's own mount.
fn over(
    all: &Connections,
    fs: Arc<BraidFs>,
    own: &Arc<Connection>,
    channel: Arc<Channel>,
    mount: Arc<Mount>,
) -> Option<OwnedFd> {
    let pin = all.leave(own);
    // What is put aside is answered, in vain, and gives back what it has.
    let hurry = fs.pacer.hurry();
    let end = Instant::now() + UNDER_WAY;
    // each channel has one, and so have this, the list and its copy
    while Arc::strong_count(own) > OWNERS && Instant::now() < end {
        thread::sleep(Duration::from_millis(1));
    }
    drop(hurry);
    drop(channel);
    fs.give_all_back(own);
    fs.remove_dirty(mount.dirty_limit());
    if let Err(e) = fs.vol.sync() {
        tracing::error!(error = %e, tenant = own.tenant, "not all of it could be made durable");
    }
    drop(mount);
    drop(fs);
    all.remove(own);
    pin
}

/// Of a connection whose channel is the last: this one's, the list's and its copy's, the channel's.
const OWNERS: usize = 4;
