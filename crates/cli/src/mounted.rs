//! Where a volume is mounted, by whatever name of its devices: two paths or hard links, a loop device and the image
//! behind it, two loop devices of one image.

use crate::cmd::umount::{backing, is_braidfs};
use crate::failure::{self, Failure, host_error};
use crate::mountinfo::{self, Mount};
use crate::{names, open};
use braidfs_device::{NbdUri, OpenError, is_nbd_uri};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::thread::{Gid, Uid, set_thread_groups, set_thread_res_gid, set_thread_res_uid};
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// What the source of one of our mounts names: `/a.img,/b.img`, or `/a.img,/b.img[web]` where the tenant `web` is mounted by
/// itself.
#[derive(Debug, PartialEq, Eq)]
pub struct Source {
    /// The devices of the volume; of a `fuseblk` mount the one block device.
    pub devices: Vec<PathBuf>,
    /// The tenant that is mounted by itself.
    pub tenant: Option<OsString>,
}

impl Source {
    /// Of a mount.
    pub fn of(mount: &Mount) -> Self {
        match mount.kind.as_str() {
            // its source is what the kernel names the block device
            "fuseblk.braidfs" => Self::whole(&mount.source),
            _ => Self::parse(&mount.source),
        }
    }

    /// A tenant's name has no slash; brackets it may have, and so may the name of an image. What is there decides.
    fn parse(source: &OsStr) -> Self {
        let whole = Self::whole(source);
        let Some(named) = source.as_bytes().strip_suffix(b"]") else { return whole };
        let last = whole.devices.last();
        if last.is_some_and(|d| d.exists()) {
            return whole;
        }
        let from = named.iter().rposition(|b| *b == b'/').map_or(0, |slash| slash + 1);
        let brackets = (from..named.len()).filter(|i| named[*i] == b'[');
        let mut tenants = brackets.map(|i| Self {
            tenant: Some(OsStr::from_bytes(&named[i + 1..]).into()),
            ..Self::whole(OsStr::from_bytes(&named[..i]))
        });
        let is_export = |d: &PathBuf| d.to_str().is_some_and(|d| NbdUri::parse(d).is_ok());
        let is_sound = |s: &Self| s.devices.last().is_some_and(|d| d.exists() || is_export(d));
        match tenants.clone().find(is_sound) {
            Some(tenant) => tenant,
            // an address may end with a bracket
            None if last.is_some_and(is_export) => whole,
            // the devices have other names by now
            None => tenants.next().unwrap_or(whole),
        }
    }

    fn whole(source: &OsStr) -> Self {
        Self { devices: open::expand(&[source.into()]), tenant: None }
    }
}

/// What names the same bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Identity {
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
pub fn identities(path: &Path) -> Vec<Identity> {
    identity(path).map_or_else(Vec::new, with_backing)
}

/// A device, and the file behind it where it is a loop device.
pub fn with_backing(device: Identity) -> Vec<Identity> {
    let mut all = vec![device];
    if let Some(&Identity::Block(rdev)) = all.first() {
        let (major, minor) = (rustix::fs::major(rdev), rustix::fs::minor(rdev));
        let behind = std::fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/loop/backing_file"));
        all.extend(behind.ok().and_then(|file| identity(Path::new(file.trim_end_matches('\n')))));
    }
    all
}

/// Whether two paths name the same device, also where nothing is there any more.
pub fn is_same(one: &Path, other: &Path) -> bool {
    let ours = identities(one);
    one == other || identities(other).iter().any(|id| ours.contains(id))
}

/// The newest mount that uses one of `devices`: of the whole volume, where there is one; never that of a tenant by itself.
pub fn at(devices: &[PathBuf]) -> Option<Mount> {
    let ours: Vec<_> = devices.iter().flat_map(|d| identities(d)).collect();
    let uses = |m: &Mount| {
        let source = Source::of(m);
        let theirs = backing(m).devices.into_iter().chain(source.devices);
        source.tenant.is_none() && theirs.flat_map(|d| identities(&d)).any(|id| ours.contains(&id))
    };
    let mut all = mountinfo::read();
    all.retain(|m| is_braidfs(m) && uses(m));
    let whole = all.iter().rposition(|m| m.root == Path::new("/"));
    whole.or(all.len().checked_sub(1)).map(|i| all.swap_remove(i))
}

/// The mount that a path lies on. Nothing is asked of its server.
fn covering(path: &Path) -> Option<Mount> {
    let path = mountinfo::absolute(path);
    let on = mountinfo::read().into_iter().filter(|m| path.starts_with(&m.target));
    // the newest on a path hides the others
    on.max_by_key(|m| m.target.components().count())
}

/// User and group that alone may use a mount.
fn only_user(mount: &Mount) -> Option<(u32, u32)> {
    let number = |name: &str| {
        let value = mount.super_options.split(',').find_map(|o| o.strip_prefix(name)?.strip_prefix('='));
        value.and_then(|v| v.parse::<u32>().ok())
    };
    let shared = mount.super_options.split(',').any(|o| o == "allow_other");
    if shared || !is_braidfs(mount) { None } else { number("user_id").zip(number("group_id")) }
}

/// Who this process would have to become to look at `path`: the only user of a mount that lets root in neither.
pub fn closed_by(path: &Path) -> Option<u32> {
    let closed = |e: io::Error| Errno::from_io_error(&e) == Some(Errno::ACCESS);
    let is_closed = rustix::process::geteuid().is_root() && std::fs::symlink_metadata(path).is_err_and(closed);
    covering(path).as_ref().and_then(only_user).filter(|_| is_closed).map(|(user, _)| user)
}

/// Opens a directory of a mount. One of a user's own lets nobody else in, root neither: then as that user, who this process
/// is from then on, in that user's group and in none of root's. It starts no program any more: that would be the user's to
/// change, on root's terminal.
///
/// # Errors
/// Of the host.
pub fn enter(directory: &Path) -> io::Result<File> {
    match File::open(directory) {
        Err(e) if Errno::from_io_error(&e) == Some(Errno::ACCESS) && rustix::process::geteuid().is_root() => {
            let Some(who) = covering(directory).as_ref().and_then(only_user) else { return Err(e) };
            // This process has one thread, and does nothing else after it.
            become_user(who)?;
            File::open(directory)
        }
        opened => opened,
    }
}

/// User and group that a thread of root must become to be let into a mount, [`become_user`].
pub fn must_be(mount: &Mount) -> Option<(u32, u32)> {
    let is_root = rustix::process::geteuid().is_root();
    only_user(mount).filter(|(user, _)| is_root && *user != 0)
}

/// This thread is that user, in that group alone, from now on; the process asks for no names any more.
///
/// # Errors
/// Of the host.
pub fn become_user((user, group): (u32, u32)) -> io::Result<()> {
    let (user, group) = (Uid::from_raw(user), Gid::from_raw(group));
    names::ask_nobody();
    set_thread_groups(&[])?;
    set_thread_res_gid(group, group, group)?;
    Ok(set_thread_res_uid(user, user, user)?)
}

/// Why the host refused something below `path`; of a mount that lets nobody else in, that.
pub fn host_says(path: &Path, e: &io::Error) -> String {
    let closed = match Errno::from_io_error(e) {
        Some(Errno::ACCESS) => covering(path).as_ref().and_then(only_user),
        _ => None,
    };
    match closed {
        Some((user, _)) if rustix::process::geteuid().as_raw() != user => {
            let user = names::user(user).unwrap_or_else(|| format!("user {user}"));
            format!("this mount lets nobody else in, not even root: run it as {user}")
        }
        _ => host_error(e),
    }
}

/// Why the server cannot be asked about the whole volume through the mount point `point`; `None` where it can.
pub fn is_apart(point: &Path) -> Option<&'static str> {
    let mount = mountinfo::at(&mountinfo::absolute(point))?;
    if Source::of(&mount).tenant.is_some() {
        return Some(failure::TENANT_ALONE);
    }
    // some things it is asked through the root directory of the volume alone
    let part = mount.root != Path::new("/");
    part.then_some("a part of the volume is mounted there: name the mount point of the whole")
}

/// As [`failure::server_error`], where the server was asked through the mount point `point`.
pub fn server_error(point: &Path, e: &io::Error) -> String {
    match Errno::from_io_error(e) {
        Some(Errno::NOTTY) => is_apart(point).map_or_else(|| failure::server_error(e), Into::into),
        Some(Errno::ACCESS) => host_says(point, e),
        _ => failure::server_error(e),
    }
}

/// That a device is mounted, and what to do.
pub fn in_use(mount: &Mount) -> String {
    let point = mount.target.display();
    format!("is in use: mounted on {point}: `braidfs umount {point}` first")
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
        None => format!("{device}: {}", in_use(&mount)),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_names_devices_and_a_tenant() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name).display().to_string();
        for name in ["a", "b", "c[d]", "e,f"] {
            std::fs::write(path(name), b"").unwrap();
        }
        let cut = "nbd://[::1]";
        for (source, devices, tenant) in [
            (path("a"), vec![path("a")], None),
            (format!("{},{}", path("a"), path("b")), vec![path("a"), path("b")], None),
            (path("a[web]"), vec![path("a")], Some("web")),
            (format!("{},{}", path("a"), path("b[web]")), vec![path("a"), path("b")], Some("web")),
            (path("e,f[a,b]"), vec![path("e,f")], Some("a,b")),
            (path("c[d]"), vec![path("c[d]")], None),
            (path("c[d][x]"), vec![path("c[d]")], Some("x")),
            (path("a[x[y]]"), vec![path("a")], Some("x[y]")),
            // removed
            (path("no[web]"), vec![path("no")], Some("web")),
            (path("no"), vec![path("no")], None),
            (cut.into(), vec![cut.into()], None),
            (format!("{cut}[web]"), vec![cut.into()], Some("web")),
            ("nbd://h/e[web]".into(), vec!["nbd://h/e".into()], Some("web")),
        ] {
            let want = Source {
                devices: devices.into_iter().map(PathBuf::from).collect(),
                tenant: tenant.map(OsString::from),
            };
            assert_eq!(Source::parse(OsStr::new(&source)), want, "{source}");
        }
    }

    #[test]
    fn links_and_what_is_gone_name_the_same_device() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        std::fs::write(path("a"), b"").unwrap();
        std::fs::write(path("b"), b"").unwrap();
        std::fs::hard_link(path("a"), path("link")).unwrap();
        assert!(is_same(&path("a"), &path("link")) && is_same(&path("no"), &path("no")));
        assert!(!is_same(&path("a"), &path("b")) && !is_same(&path("no"), &path("a")));
    }
}
