//! Opens the devices of a volume and the volume itself for the commands that work on an unmounted one.

use crate::failure::{Failure, advice};
use crate::{mounted, probe};
use braidfs::store::lease::{Lease, seems_held};
use braidfs::store::super_io::read_super;
use braidfs::{Error, MountOptions, Volume};
use braidfs_device::{Device, OpenError, look_at_devices, open_volume_devices};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The devices that `args` name: each is a path or, where no such path exists, several joined by commas.
pub fn expand(args: &[PathBuf]) -> Vec<PathBuf> {
    let mut paths = Vec::new();
    for arg in args {
        match arg.to_str() {
            Some(text) if text.contains(',') && !arg.exists() => {
                paths.extend(text.split(',').filter(|p| !p.is_empty()).map(PathBuf::from));
            }
            _ => paths.push(arg.clone()),
        }
    }
    paths
}

/// Refuses a device that is named twice, by whatever names.
///
/// # Errors
/// Which one.
pub fn no_duplicates(paths: &[PathBuf]) -> Result<(), Failure> {
    let identity = |p: &PathBuf| std::fs::metadata(p).ok().map(|m| (m.dev(), m.ino(), m.rdev()));
    for (i, path) in paths.iter().enumerate() {
        if identity(path).is_some_and(|id| paths[..i].iter().any(|other| identity(other) == Some(id))) {
            return Err(Failure::new(format!("{}: named twice: name every device once", path.display())));
        }
    }
    Ok(())
}

/// Opens all `paths` (no commas left in them).
///
/// # Errors
/// No such device, no permission, in use.
pub fn devices(paths: &[PathBuf], write: bool) -> Result<Vec<Arc<dyn Device>>, Failure> {
    no_duplicates(paths)?;
    open_volume_devices(paths, write).map_err(|e| {
        if matches!(e, OpenError::InUse { .. } | OpenError::Busy { .. }) && mounted::at(paths).is_some() {
            return mounted::explain(&e, paths, None);
        }
        let busy = paths.iter().find_map(|p| Some(format!(" ({} is {})", p.display(), probe::busy(p)?.what)));
        Failure::new(format!("{e}{}", busy.unwrap_or_default()))
    })
}

/// Refuses devices of a volume that somebody writes from elsewhere: for who reads them and does not mount the volume.
///
/// # Errors
/// It is in use; of a device.
pub fn nobody_writes(devices: &[Arc<dyn Device>]) -> Result<(), Failure> {
    // a superblock that does not hold does not say where the lease is; then nobody else can have mounted the volume, either
    let Ok((sb, devices)) = read_super(devices) else { return Ok(()) };
    Lease::look(&devices, &sb).map_err(|e| Failure::new(e.to_string()))
}

/// Devices that are only looked at.
pub struct Looked {
    /// The devices, opened for reading.
    pub devices: Vec<Arc<dyn Device>>,
    /// Somebody writes them, or may: they are not locked.
    pub in_use: bool,
}

/// Opens all `paths` (no commas left in them) for reading, also where somebody else has them open.
///
/// # Errors
/// No such device, no permission.
pub fn look_at(paths: &[PathBuf]) -> Result<Looked, Failure> {
    no_duplicates(paths)?;
    let opened = match open_volume_devices(paths, false) {
        Ok(devices) => Ok(Looked { in_use: seems_held(&devices), devices }),
        Err(OpenError::InUse { .. } | OpenError::Busy { .. }) => {
            look_at_devices(paths).map(|devices| Looked { devices, in_use: true })
        }
        Err(e) => Err(e),
    };
    opened.map_err(|e| Failure::new(e.to_string()))
}

/// Options for a volume that one command opens for itself: no background work, nobody else waits.
pub fn offline_options(write: bool) -> MountOptions {
    MountOptions { read_only: !write, background: false, ..MountOptions::default() }
}

/// Opens the volume on the devices `args` (see [`expand`]).
///
/// # Errors
/// As [`devices`]; no braidfs volume; damage.
pub fn volume(args: &[PathBuf], write: bool) -> Result<Volume, Failure> {
    let paths = expand(args);
    mount(devices(&paths, write)?, &paths, write)
}

/// [`volume`], for a walk through any number of files, which may take long: its threads keep the memory within the cache and, where it
/// is written, commit, as those of a mount.
///
/// # Errors
/// As [`volume`].
pub fn volume_to_walk(args: &[PathBuf], write: bool) -> Result<Volume, Failure> {
    let paths = expand(args);
    let options = MountOptions { background: true, defragment: false, ..offline_options(write) };
    mount_with(devices(&paths, write)?, &paths, options)
}

/// The volume on `devices`, opened from `paths`.
///
/// # Errors
/// No braidfs volume; damage.
pub fn mount(devices: Vec<Arc<dyn Device>>, paths: &[PathBuf], write: bool) -> Result<Volume, Failure> {
    mount_with(devices, paths, offline_options(write))
}

fn mount_with(devices: Vec<Arc<dyn Device>>, paths: &[PathBuf], options: MountOptions) -> Result<Volume, Failure> {
    // as the process of a mount: stopped for long, it must not go on writing where another machine has the volume
    let options = MountOptions { kill_when_stopped: true, ..options };
    Volume::mount(devices, options).map_err(|e| explain("cannot open the volume", paths, &e))
}

/// As [`explain`], of a check, scrub or dump.
pub fn explain_check(what: &str, paths: &[PathBuf], e: braidfs_check::Error) -> Failure {
    use braidfs_check::Error as Check;
    let e = match e.into_parts().0 {
        Check::Unfinished { why, .. } => Error::Busy(why.to_string()),
        Check::Io(e) => Error::Io(e),
        Check::Corrupt(e) => Error::Corrupt(e),
        Check::NoSpace => Error::NoSpace,
        Check::TooBig => Error::TooBig,
        Check::NotFound => Error::NotFound,
        Check::NotDir => Error::NotDir,
    };
    explain(what, paths, &e)
}

/// Says why a volume cannot be used, and what to do: where the devices hold something else, that is the news.
pub fn explain(what: &str, paths: &[PathBuf], e: &Error) -> Failure {
    let place = show(paths);
    let first = paths.first().map_or(Path::new("DEVICE"), PathBuf::as_path);
    let text = e.to_string();
    if !matches!(e, Error::Corrupt(_)) {
        return Failure::at(what, place, format!("{text}{}", advice(e, first)));
    }
    if let Some((path, kind)) = paths.iter().find_map(|p| Some((p, probe::foreign(p)?))) {
        let why = format!("{} holds {kind}, not a braidfs volume: name the right device", path.display());
        return Failure::at(what, place, why);
    }
    // Some messages say already what to do (`use a newer program`, `name all of them`); others mean that there is
    // nothing to check.
    let hint = if text.contains("not a braidfs volume") {
        ": name the right device".into()
    } else if text.contains("truncated") || text.contains("too small") {
        ": restore the missing part of it first".into()
    } else if ["use ", "name all", "were given"].iter().any(|told| text.contains(told)) || what == "cannot check" {
        String::new()
    } else {
        advice(e, first)
    };
    Failure::at(what, place, format!("{text}{hint}"))
}

/// Paths for a message.
pub fn show(paths: &[PathBuf]) -> String {
    paths.iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(",")
}

/// Closes a volume that was written to; errors that show only now are the command's.
///
/// # Errors
/// The last writes could not be made durable.
pub fn close(volume: Volume) -> Result<(), Failure> {
    volume.unmount().map_err(|e| Failure::new(format!("closing the volume: {e}: the last changes may be lost")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commas_split_only_what_does_not_exist() {
        let dir = tempfile::tempdir().unwrap();
        let odd = dir.path().join("a,b");
        std::fs::write(&odd, b"").unwrap();
        assert_eq!(expand(std::slice::from_ref(&odd)), [odd]);
        assert_eq!(expand(&["/no/x,/no/y".into(), "z".into()]), [PathBuf::from("/no/x"), "/no/y".into(), "z".into()]);
    }

    #[test]
    fn the_same_device_twice_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let a = dir.path().join("a");
        std::fs::write(&a, b"").unwrap();
        std::os::unix::fs::symlink(&a, dir.path().join("b")).unwrap();
        assert!(no_duplicates(&[a.clone(), dir.path().join("b")]).is_err());
        assert!(no_duplicates(&[a]).is_ok());
    }
}
