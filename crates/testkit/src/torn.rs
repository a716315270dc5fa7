//! What fsck may find of a crash state that it looks at as the crash left it: one torn copy of a pair, of which the other copy holds.

use crate::walk::is_of_a_copy;
use braidfs::device::Device;
use braidfs_check::codes::{DOMAIN_COPY, SEGMENTS_COPY};
use braidfs_check::{FsckOptions, check};
use std::sync::Arc;

/// Findings that are allowed, by their numbers.
pub(crate) type Allowed = fn(u32) -> bool;

/// A copy of any table.
pub(crate) const ANY_COPY: Allowed = is_of_a_copy;
/// A copy of a domain header alone.
pub(crate) const HEADER_COPY: Allowed = |code| code == DOMAIN_COPY;
/// A copy of a segment table alone.
pub(crate) const SEGMENT_TABLE_COPY: Allowed = |code| code == SEGMENTS_COPY;

/// Runs fsck, which changes nothing.
///
/// # Errors
/// The findings that are not allowed, one a line; what kept fsck from looking.
pub(crate) fn nothing_but(allowed: Allowed, devices: &[Arc<dyn Device>]) -> Result<(), String> {
    let options = FsckOptions { repair: false, force: true };
    let report =
        check(devices, &options, &braidfs::JournalReplay, &|_, _, _| {}).map_err(|e| format!("fsck failed: {e}"))?;
    let wrong = report.findings.iter().filter(|f| !allowed(f.code));
    let lines: Vec<String> = wrong.map(|f| format!("{}: {}", f.code, f.message)).collect();
    if lines.is_empty() { Ok(()) } else { Err(format!("fsck finds\n  {}", lines.join("\n  "))) }
}
