//! What stat tells.

use crate::FileKind;
use braidfs::{Attr, Timestamp};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// What is known of a file, as [`std::fs::Metadata`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Metadata {
    pub(crate) attr: Attr,
}

impl Metadata {
    /// Type of the file.
    pub fn kind(&self) -> FileKind {
        self.attr.kind()
    }
    /// Whether it is a directory.
    pub fn is_dir(&self) -> bool {
        self.kind() == FileKind::Dir
    }
    /// Whether it is a regular file.
    pub fn is_file(&self) -> bool {
        self.kind() == FileKind::File
    }
    /// Whether it is a symlink.
    pub fn is_symlink(&self) -> bool {
        self.kind() == FileKind::Symlink
    }
    /// Bytes, also of a symlink's target.
    #[allow(clippy::len_without_is_empty)] // as in std
    pub fn len(&self) -> u64 {
        self.attr.size
    }
    /// Permissions, 12 bits.
    pub fn permissions(&self) -> u32 {
        self.attr.mode & 0o7777
    }
    /// Last change of the content.
    pub fn modified(&self) -> SystemTime {
        system_time(self.attr.mtime)
    }
    /// Last access to the content.
    pub fn accessed(&self) -> SystemTime {
        system_time(self.attr.atime)
    }
    /// When the file was made.
    pub fn created(&self) -> SystemTime {
        system_time(self.attr.btime)
    }
    /// Last change of the inode.
    pub fn changed(&self) -> SystemTime {
        system_time(self.attr.ctime)
    }
    /// Number of the inode.
    pub fn ino(&self) -> u64 {
        self.attr.ino.0
    }
    /// All of it, with times to the nanosecond.
    pub fn attr(&self) -> &Attr {
        &self.attr
    }
}

/// Times of the format go further than those of the system: the ends stand for what lies beyond.
fn system_time(t: Timestamp) -> SystemTime {
    let (whole, part) = (Duration::from_secs(t.sec.unsigned_abs()), Duration::from_nanos(t.nsec.into()));
    let base = if t.sec < 0 { UNIX_EPOCH.checked_sub(whole) } else { UNIX_EPOCH.checked_add(whole) };
    base.and_then(|b| b.checked_add(part)).unwrap_or(UNIX_EPOCH)
}

/// As the format writes it.
pub(crate) fn timestamp(t: SystemTime) -> Timestamp {
    match t.duration_since(UNIX_EPOCH) {
        Ok(d) => Timestamp { sec: i64::try_from(d.as_secs()).unwrap_or(i64::MAX), nsec: d.subsec_nanos() },
        Err(e) => {
            // before 1970: the nanoseconds still count forwards
            let d = e.duration();
            let sec = i64::try_from(d.as_secs()).map_or(i64::MIN, |s| -s);
            match d.subsec_nanos() {
                0 => Timestamp { sec, nsec: 0 },
                n => Timestamp { sec: sec.saturating_sub(1), nsec: 1_000_000_000 - n },
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_before_1970_come_back() {
        for (sec, nsec) in [(0, 0), (5, 1), (-1, 0), (-1, 999_999_999), (-7, 250_000_000)] {
            let t = Timestamp { sec, nsec };
            assert_eq!(timestamp(system_time(t)), t);
        }
    }
}
