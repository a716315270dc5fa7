//! What reaches the device: bytes per empty file created, writes and flushes per small fsync. Counted, not timed.

use crate::Result;
use crate::table::Table;
use braidfs::namespace::paths::OpenHow;
use braidfs::{Cred, FileKind, MkfsOptions, MountOptions, NewNode, NodeId, OpenFile, Volume, mkfs};
use braidfs_device::{CountDevice, Counters, Device, MemDevice};
use serde::Serialize;
use std::sync::Arc;

/// Most bytes written per empty file, commit and checkpoint included.
pub const GOAL_CREATE_BYTES: f64 = 512.0;
/// Most device writes of create, write 1 KiB, fsync.
pub const GOAL_FSYNC_WRITES: u64 = 3;
/// Most flushes of it.
pub const GOAL_FSYNC_FLUSHES: u64 = 1;

const BLOCK: u64 = 4096;

/// A volume in memory behind a device that counts. Nothing happens in the background.
#[derive(Debug)]
pub struct Counted {
    device: Arc<CountDevice>,
    volume: Volume,
}

impl Counted {
    /// A fresh volume of `bytes` bytes.
    ///
    /// # Errors
    /// Of formatting and mounting it.
    pub fn make(bytes: u64) -> Result<Self> {
        let device = Arc::new(CountDevice::new(Arc::new(MemDevice::new(bytes / BLOCK))));
        let devices: Vec<Arc<dyn Device>> = vec![device.clone()];
        mkfs::format(&devices, &MkfsOptions::default())?;
        let interval = std::time::Duration::from_secs(3600);
        let options = MountOptions { background: false, commit_interval: interval, ..MountOptions::default() };
        Ok(Self { volume: Volume::mount(devices, options)?, device })
    }
    /// The volume.
    pub fn volume(&self) -> &Volume {
        &self.volume
    }
    /// What `f` sends to the device.
    ///
    /// # Errors
    /// Of `f`.
    pub fn count(&self, f: impl FnOnce(&Volume) -> Result<()>) -> Result<Counters> {
        let before = self.device.counters();
        f(&self.volume)?;
        Ok(self.device.counters() - before)
    }
    /// What unmounting sends to the device.
    ///
    /// # Errors
    /// Of unmounting.
    pub fn unmount(self) -> Result<Counters> {
        let before = self.device.counters();
        self.volume.unmount()?;
        Ok(self.device.counters() - before)
    }
}

/// Bytes written for empty files.
#[derive(Debug, Clone, Serialize)]
pub struct Creates {
    /// Files made, over how many directories.
    pub files: u64,
    /// Directories that they are in.
    pub dirs: u64,
    /// Bytes written until all were committed.
    pub commit_bytes: u64,
    /// Bytes written by the checkpoint after it (by unmounting).
    pub checkpoint_bytes: u64,
    /// Both, per file.
    pub bytes_per_file: f64,
    /// Whether the goal is met.
    pub met: bool,
}

/// Makes `files` empty files over `dirs` directories and counts what that writes, commit and checkpoint included.
///
/// # Errors
/// Of the volume.
pub fn creates(files: u64, dirs: u64) -> Result<Creates> {
    let c = Counted::make(2 << 30)?;
    let new = |kind, mode| NewNode { kind, mode, umask: 0, rdev: 0, target: b"" };
    let me = Cred::root();
    let counted = c.count(|v| {
        for d in 0..dirs {
            let dir = v.create(NodeId::ROOT, format!("dir{d}").as_bytes(), &new(FileKind::Dir, 0o755), &me)?;
            for f in 0..files / dirs {
                v.create(dir.ino, format!("file-{f:06}").as_bytes(), &new(FileKind::File, 0o644), &me)?;
            }
        }
        Ok(v.sync()?)
    })?;
    let commit_bytes = counted.write_blocks * BLOCK;
    let checkpoint_bytes = c.unmount()?.write_blocks * BLOCK;
    let bytes_per_file = (commit_bytes + checkpoint_bytes) as f64 / files as f64;
    let met = bytes_per_file <= GOAL_CREATE_BYTES;
    Ok(Creates { files, dirs, commit_bytes, checkpoint_bytes, bytes_per_file, met })
}

/// Traffic of create + write 1 KiB + fsync.
#[derive(Debug, Clone, Serialize)]
pub struct Fsync {
    /// What the directory was when the file was made.
    pub case: String,
    /// Writes, mean of the files.
    pub writes: f64,
    /// Blocks written, mean.
    pub blocks: f64,
    /// Flushes, mean.
    pub flushes: f64,
    /// Most writes that one file took.
    pub writes_max: u64,
    /// Most flushes that one file took.
    pub flushes_max: u64,
    /// Whether the goal is met by every file.
    pub met: bool,
}

/// Makes `files` new files with 1 KiB each in `dir`, fsync each, and counts.
fn fsyncs(c: &Counted, case: &str, dir: &str, files: u64) -> Result<Fsync> {
    let (me, data) = (Cred::root(), [7u8; 1024]);
    let how = OpenHow { read: true, write: true, create: true, exclusive: true, mode: 0o644, ..OpenHow::default() };
    let mut sum = Counters::default();
    let (mut writes_max, mut flushes_max) = (0, 0);
    for i in 0..files {
        let n = c.count(|v| {
            let f: OpenFile = v.open_path(format!("{dir}/{i}").as_bytes(), how, &me)?;
            v.write(&f, 0, &data)?;
            Ok(v.fsync(f.ino(), false)?)
        })?;
        (writes_max, flushes_max) = (n.writes.max(writes_max), n.flushes.max(flushes_max));
        sum.writes += n.writes;
        sum.write_blocks += n.write_blocks;
        sum.flushes += n.flushes;
    }
    let mean = |n: u64| n as f64 / files as f64;
    Ok(Fsync {
        case: case.into(),
        writes: mean(sum.writes),
        blocks: mean(sum.write_blocks),
        flushes: mean(sum.flushes),
        writes_max,
        flushes_max,
        met: writes_max <= GOAL_FSYNC_WRITES && flushes_max <= GOAL_FSYNC_FLUSHES,
    })
}

/// Small fsyncs in an old directory, in a new one, and in one of another domain than the root's.
///
/// # Errors
/// Of the volume.
pub fn small_fsyncs(files: u64) -> Result<Vec<Fsync>> {
    let c = Counted::make(1 << 30)?;
    let (v, me) = (c.volume(), Cred::root());
    v.mkdir_path(b"old", 0o755, &me)?;
    v.sync()?;
    let mut out = vec![fsyncs(&c, "in a directory that is durable", "old", files)?];
    v.mkdir_path(b"new", 0o755, &me)?;
    out.push(fsyncs(&c, "in a directory just made", "new", files)?);
    v.mkdir_path(b"new/a", 0o755, &me)?;
    v.mkdir_path(b"new/a/b", 0o755, &me)?;
    out.push(fsyncs(&c, "three new directories deep", "new/a/b", files)?);
    Ok(out)
}

/// The counts for a terminal.
pub fn create_table(c: &Creates) -> Table {
    let mut t = Table::new(&["empty files", "dirs", "commit MiB", "checkpoint MiB", "bytes/file", "goal"]);
    let mib = |b: u64| format!("{:.1}", b as f64 / f64::from(1 << 20));
    t.row(vec![
        c.files.to_string(),
        c.dirs.to_string(),
        mib(c.commit_bytes),
        mib(c.checkpoint_bytes),
        format!("{:.0}", c.bytes_per_file),
        format!("<= {GOAL_CREATE_BYTES} {}", if c.met { "met" } else { "MISSED" }),
    ]);
    t
}

/// As [`create_table`], of the fsyncs.
pub fn fsync_table(cases: &[Fsync]) -> Table {
    let mut t =
        Table::new(&["create + write 1 KiB + fsync", "writes", "(most)", "blocks", "flushes", "(most)", "goal"]);
    for f in cases {
        t.row(vec![
            f.case.clone(),
            format!("{:.2}", f.writes),
            f.writes_max.to_string(),
            format!("{:.2}", f.blocks),
            format!("{:.2}", f.flushes),
            f.flushes_max.to_string(),
            format!(
                "<= {GOAL_FSYNC_WRITES} writes, {GOAL_FSYNC_FLUSHES} flush {}",
                if f.met { "met" } else { "MISSED" }
            ),
        ]);
    }
    t
}
