//! Memory: the resident set of an idle mount, and its growth by many new files under a cache budget.

use crate::Result;
use crate::subject::{Library, Subject};
use crate::table::Table;
use braidfs::MountOptions;
use serde::{Deserialize, Serialize};
use std::ffi::CString;
use std::path::Path;

/// Most bytes of an idle mount.
pub const GOAL_IDLE: u64 = 64 << 20;
/// Most bytes per file, beyond the cache budget.
pub const GOAL_PER_FILE: f64 = 200.0;
/// Files in one directory.
const FILES_PER_DIR: u64 = 10_000;

/// What a process takes.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Memory {
    /// Resident bytes after mounting.
    pub idle: u64,
    /// Files made then.
    pub files: u64,
    /// The cache budget that it was mounted with.
    pub budget: u64,
    /// Most resident bytes while the files were made.
    pub peak: u64,
    /// Resident bytes afterwards.
    pub after: u64,
    /// Peak, less idle and budget, per file.
    pub per_file: f64,
    /// Whether both goals are met.
    pub met: bool,
}

/// Resident bytes of this process.
///
/// # Errors
/// Where `/proc` does not say.
pub fn resident() -> Result<u64> {
    let statm = std::fs::read_to_string("/proc/self/statm")?;
    let pages: u64 = statm.split(' ').nth(1).ok_or("/proc/self/statm has no second field")?.parse()?;
    Ok(pages * rustix::param::page_size() as u64)
}

/// Mounts a fresh volume (an image below `dir`) with `budget` bytes of cache and makes `files` empty files. To be run
/// in a process that has done nothing else.
///
/// # Errors
/// Of the volume.
pub fn measure(dir: &Path, files: u64, budget: u64) -> Result<Memory> {
    let dir = tempfile::Builder::new().prefix("braidfs-bench-").tempdir_in(dir)?;
    let options = MountOptions { cache_bytes: budget, ..MountOptions::default() };
    let bytes = (files * 4096).next_power_of_two().max(1 << 30);
    let library = Library::make(&dir.path().join("image"), bytes, options)?;
    let idle = resident()?;
    let mut peak = idle;
    for f in 0..files {
        if f % FILES_PER_DIR == 0 {
            library.mkdir(&CString::new(format!("{}", f / FILES_PER_DIR))?)?;
            peak = peak.max(resident()?);
        }
        library.create(&CString::new(format!("{}/file-{f:07}", f / FILES_PER_DIR))?)?;
    }
    let after = resident()?;
    peak = peak.max(after);
    let per_file = peak.saturating_sub(idle + budget) as f64 / files.max(1) as f64;
    let met = idle <= GOAL_IDLE && per_file <= GOAL_PER_FILE;
    Ok(Memory { idle, files, budget, peak, after, per_file, met })
}

/// The figures for a terminal.
pub fn table(m: &Memory) -> Table {
    let mut t = Table::new(&["idle MiB", "files", "budget MiB", "peak MiB", "after MiB", "beyond/file", "goal"]);
    let mib = |b: u64| format!("{:.1}", b as f64 / f64::from(1 << 20));
    t.row(vec![
        mib(m.idle),
        m.files.to_string(),
        mib(m.budget),
        mib(m.peak),
        mib(m.after),
        format!("{:.0} B", m.per_file),
        format!(
            "idle <= {} MiB, <= {GOAL_PER_FILE} B per file {}",
            GOAL_IDLE >> 20,
            if m.met { "met" } else { "MISSED" }
        ),
    ]);
    t
}
