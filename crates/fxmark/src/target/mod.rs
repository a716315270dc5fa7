//! File systems made for a run, and removed after it.
//!
//! Mounts are private to this process and its children, loop devices detach with their last user, and helpers die with
//! their parent: nothing is left, however the run ends. Root is needed for all but a plain directory and the library.

mod command;
mod media;
mod site;

pub use command::{hold, program, run};
pub use media::{Media, MediaKind};
pub use site::{Lab, SWITCHES, Site};

use crate::{Error, Result};
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// What is tested.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// A directory that is there.
    Dir(PathBuf),
    /// ext4 with its defaults.
    Ext4,
    /// ext4 without a journal, the paper's ext4NJ.
    Ext4NoJournal,
    /// XFS, on a device.
    Xfs,
    /// btrfs, on a device.
    Btrfs,
    /// F2FS, on a device.
    F2fs,
    /// tmpfs, in memory.
    Tmpfs,
    /// braidfs, mounted through FUSE.
    Braidfs,
    /// The braidfs library in the process of the workers.
    Library,
}

impl Target {
    /// Those that need no argument.
    pub const MADE: [Self; 8] = [
        Self::Ext4,
        Self::Ext4NoJournal,
        Self::Xfs,
        Self::Btrfs,
        Self::F2fs,
        Self::Tmpfs,
        Self::Braidfs,
        Self::Library,
    ];

    /// The kernel's name of the file system, where it has to know it.
    pub fn kernel_type(&self) -> Option<&'static str> {
        match self {
            Self::Ext4 | Self::Ext4NoJournal => Some("ext4"),
            Self::Xfs => Some("xfs"),
            Self::Btrfs => Some("btrfs"),
            Self::F2fs => Some("f2fs"),
            Self::Tmpfs => Some("tmpfs"),
            Self::Braidfs => Some("fuse"),
            Self::Dir(_) | Self::Library => None,
        }
    }

    /// Does it lie on the block device?
    pub fn needs_device(&self) -> bool {
        !matches!(self, Self::Dir(_) | Self::Tmpfs)
    }
    /// Does it need root?
    pub fn needs_root(&self) -> bool {
        !matches!(self, Self::Dir(_))
    }
    /// Programs of it that can be missing.
    pub fn programs(&self) -> &'static [&'static str] {
        match self {
            Self::Ext4 | Self::Ext4NoJournal => &["mkfs.ext4"],
            Self::Xfs => &["mkfs.xfs"],
            Self::Btrfs => &["mkfs.btrfs"],
            Self::F2fs => &["mkfs.f2fs"],
            _ => &[],
        }
    }

    /// Why it cannot be tested here; none where it can.
    pub fn missing(&self) -> Option<String> {
        if let Some(p) = self.programs().iter().find(|p| program(p).is_none()) {
            return Some(format!("{p} is not installed"));
        }
        if *self == Self::Library && !cfg!(feature = "braidfs") {
            return Some("this fxmark was built without the braidfs library".into());
        }
        let kind = self.kernel_type()?;
        // a module that is not loaded yet is not listed; opening its device loads this one
        if *self == Self::Braidfs {
            let _ = std::fs::File::open("/dev/fuse");
        }
        let known = || {
            let list = std::fs::read_to_string("/proc/filesystems").unwrap_or_default();
            list.split_ascii_whitespace().any(|w| w == kind)
        };
        if known() || (run("modprobe", &[kind]).is_ok() && known()) {
            return None;
        }
        Some(format!("the kernel has no {kind}"))
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Dir(dir) => return write!(f, "{}", dir.display()),
            Self::Ext4 => "ext4",
            Self::Ext4NoJournal => "ext4-nj",
            Self::Xfs => "xfs",
            Self::Btrfs => "btrfs",
            Self::F2fs => "f2fs",
            Self::Tmpfs => "tmpfs",
            Self::Braidfs => "braidfs",
            Self::Library => "library",
        })
    }
}

impl FromStr for Target {
    type Err = Error;
    fn from_str(name: &str) -> Result<Self> {
        if let Some(known) = Self::MADE.into_iter().find(|t| t.to_string() == name) {
            return Ok(known);
        }
        if name.contains('/') || name == "." {
            return Ok(Self::Dir(name.into()));
        }
        let known: Vec<String> = Self::MADE.iter().map(Self::to_string).collect();
        Err(Error::Usage(format!("no target `{name}`: give a directory (with a `/`) or one of {}", known.join(", "))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_parse() {
        for t in Target::MADE {
            assert_eq!(t.to_string().parse::<Target>().expect("its own name"), t);
        }
        assert_eq!("/tmp".parse::<Target>().expect("a directory"), Target::Dir("/tmp".into()));
        assert!("ntfs".parse::<Target>().is_err());
    }
}
