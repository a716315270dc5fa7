//! All devices of a mounted volume. The table of mounts names one alone of a `fuseblk` mount, and none that were added since.
//!
//! The server is not asked, as one that does not answer would keep the mount busy: which files it has open is seen in `/proc`.

use super::is_braidfs;
use crate::mountinfo;
use braidfs::format::super_block::SuperBlock;
use braidfs::store::super_io::{names, read_one};
use braidfs_device::{is_nbd_uri, look_at_devices};
use std::collections::BTreeMap;
use std::fs::read_dir;
use std::path::{Path, PathBuf};

/// All devices of the volume of which some are `known`, while it is mounted.
///
/// # Errors
/// How many there are, where they are not found.
pub(super) fn all(known: &[PathBuf]) -> Result<Vec<PathBuf>, u16> {
    // what cannot be read now tells nothing later, either
    let Some((first, sb)) = known.first().and_then(|first| Some((first, super_block(first)?))) else {
        return Ok(known.to_vec());
    };
    let count = sb.devices.get();
    if known.len() >= count.into() {
        return Ok(known.to_vec());
    }
    let mut found = BTreeMap::new();
    for path in known.iter().cloned().chain(open_beside(first)) {
        if let Some(own) = super_block(&path).filter(|own| names(&sb, own)) {
            found.entry(own.this_device.get()).or_insert(path);
        }
    }
    if found.len() == usize::from(count) { Ok(found.into_values().collect()) } else { Err(count) }
}

fn super_block(device: &Path) -> Option<SuperBlock> {
    if is_nbd_uri(device) {
        return None;
    }
    let devices = look_at_devices(&[device.to_path_buf()]).ok()?;
    devices.first().and_then(|device| read_one(device).ok())
}

/// Files that processes have open which have this one open.
fn open_beside(device: &Path) -> Vec<PathBuf> {
    let Ok(device) = device.canonicalize() else { return Vec::new() };
    let mounts = mountinfo::read();
    // what lies on a braidfs is not looked at: its server may be dead
    let is_inside = |file: &PathBuf| mounts.iter().any(|m| is_braidfs(m) && file.starts_with(&m.target));
    let processes = read_dir("/proc").into_iter().flatten().flatten();
    let number = |name: &str| name.parse::<u32>().is_ok();
    let mut all = Vec::new();
    for process in processes.filter(|p| p.file_name().to_str().is_some_and(number)) {
        let links = read_dir(process.path().join("fd")).into_iter().flatten().flatten();
        let files: Vec<PathBuf> = links.filter_map(|link| link.path().read_link().ok()).collect();
        if files.contains(&device) {
            all.extend(files.into_iter().filter(|f| f.is_absolute() && !is_inside(f)));
        }
    }
    all.sort();
    all.dedup();
    // A terminal or a pipe that has a name would keep who opens it.
    all.retain(|f| std::fs::metadata(f).is_ok_and(|m| m.is_file() || is_block(&m)));
    all
}

fn is_block(meta: &std::fs::Metadata) -> bool {
    std::os::unix::fs::FileTypeExt::is_block_device(&meta.file_type())
}
