//! All devices of a mounted volume. The table of mounts names one alone of a `fuseblk` mount, and none that were added since.
//!
//! The server is not asked, as one that does not answer would keep the mount busy: which files it has open is seen in `/proc`.
//! Nor is a device that hangs waited for by who unmounts ([`Looking`]).

use super::{Backing, backing, force, is_braidfs, is_dead, is_read_only};
use crate::failure::Failure;
use crate::mounted::Source;
use crate::mountinfo::{self, Mount};
use braidfs::format::super_block::SuperBlock;
use braidfs::store::super_io::names;
use braidfs_device::{BLOCK_BYTES, is_nbd_uri};
use std::collections::BTreeMap;
use std::fs::{File, read_dir};
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

/// So long is waited, before a mount goes, for what can be seen of its devices.
const WAIT: Duration = Duration::from_secs(5);

/// What is seen of a mount before it goes. Afterwards a loop device has forgotten its image, and the process has closed its files.
pub(super) struct Seen {
    pub(super) source: Source,
    pub(super) backing: Backing,
    /// Devices on which it can be seen that not all was written: of a mount that writes, all of them, or how many there are.
    pub(super) written: Result<Vec<PathBuf>, u16>,
    /// Its process had died.
    pub(super) is_dead: bool,
}

impl Seen {
    fn of(mount: &Mount) -> Self {
        let (source, backing) = (Source::of(mount), backing(mount));
        let keeps = source.tenant.is_none() && !is_read_only(mount);
        let written = if keeps { all(&backing.devices) } else { Ok(Vec::new()) };
        let is_dead = is_dead(backing.devices.iter().chain(&source.devices));
        Self { source, backing, written, is_dead }
    }
}

/// A look at a mount, by a thread: a device that hangs, or the file system that an image lies on, keeps nobody from unmounting.
pub(super) struct Looking {
    seen: Option<Seen>,
    told: Receiver<Seen>,
}

impl Looking {
    /// Looks, and waits for that for some seconds.
    ///
    /// # Errors
    /// There can be no thread.
    pub(super) fn begin(target: &Path, mount: &Mount) -> Result<Self, Failure> {
        let own = mount.clone();
        let told = force::by_thread(target, move |_| Seen::of(&own))?;
        Ok(Self { seen: told.recv_timeout(WAIT).ok(), told })
    }

    /// What it saw; nothing where it has not ended by the `deadline`.
    pub(super) fn end(self, deadline: Instant) -> Option<Seen> {
        let rest = deadline.saturating_duration_since(Instant::now());
        self.seen.or_else(|| self.told.recv_timeout(rest).ok())
    }
}

/// All devices of the volume of which some are `known`, while it is mounted.
///
/// # Errors
/// How many there are, where they are not found.
fn all(known: &[PathBuf]) -> Result<Vec<PathBuf>, u16> {
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

/// The superblock of a device, or its replica. Through the page cache: a process that waits for that can end; one that waits for a
/// device past it cannot, be it by a thread.
fn super_block(device: &Path) -> Option<SuperBlock> {
    if is_nbd_uri(device) {
        return None;
    }
    let file = File::open(device).ok()?;
    let read = |addr: u64| {
        let mut block = vec![0; BLOCK_BYTES];
        file.read_exact_at(&mut block, addr * BLOCK_BYTES as u64).ok()?;
        SuperBlock::from_block(&block, addr).ok()
    };
    // FUSE locks the inode to say where a file ends, which a write that hangs has locked
    let end = || (&file).seek(SeekFrom::End(0)).ok();
    read(0).or_else(|| read((end()? / BLOCK_BYTES as u64).checked_sub(1)?))
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
