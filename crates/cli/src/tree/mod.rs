//! The two kinds of file tree that `braidfs cp` copies between: the host's and a volume's.
//!
//! Owns the traits and the parsing of `DEVICE:PATH`. Errors are texts without the path: the copier knows the path.

pub mod host;
pub mod volume;

use braidfs::{FileKind, Timestamp};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// A result whose error is a reason for the user.
pub type Res<T> = Result<T, String>;

/// What a copy needs to know of a file.
#[derive(Debug, Clone, Copy)]
pub struct Meta {
    /// Type.
    pub kind: FileKind,
    /// Permissions, 12 bits.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Bytes.
    pub size: u64,
    /// Last access.
    pub atime: Timestamp,
    /// Last change.
    pub mtime: Timestamp,
    /// Device number of a device file.
    pub rdev: u64,
    /// Device and inode: tells files of one tree apart.
    pub id: (u64, u64),
}

/// A file tree. Paths are bytes.
pub trait Tree {
    /// `None` where there is no such file.
    fn stat(&self, path: &[u8], follow: bool) -> Res<Option<Meta>>;
    /// Names in a directory, without `.` and `..`.
    fn list(&self, path: &[u8]) -> Res<Vec<Vec<u8>>>;
    /// Target of a symlink.
    fn read_link(&self, path: &[u8]) -> Res<Vec<u8>>;
    /// Opens a file to read.
    fn open(&self, path: &[u8]) -> Res<Box<dyn Source + '_>>;
    /// Makes or empties a file; a symlink at `path` is not followed.
    fn create(&self, path: &[u8], mode: u32) -> Res<Box<dyn Sink + '_>>;
    /// Makes a directory.
    fn make_dir(&self, path: &[u8], mode: u32) -> Res<()>;
    /// Makes a symlink.
    fn make_link(&self, path: &[u8], target: &[u8]) -> Res<()>;
    /// Makes a pipe, socket or device file.
    fn make_special(&self, path: &[u8], meta: &Meta, mode: u32) -> Res<()>;
    /// Removes a name that is no directory.
    fn remove(&self, path: &[u8]) -> Res<()>;
    /// Sets owner, permissions and times; of a symlink itself.
    fn set_meta(&self, path: &[u8], meta: &Meta) -> Res<()>;
    /// The path for a message.
    fn show(&self, path: &[u8]) -> String;
}

/// A file open for reading.
pub trait Source {
    /// Bytes read; 0 at the end.
    fn read(&self, offset: u64, buf: &mut [u8]) -> Res<usize>;
    /// The next run of data at or after `offset`; `None` where only a hole is left.
    fn data(&self, offset: u64) -> Res<Option<(u64, u64)>>;
}

/// A file open for writing.
pub trait Sink {
    /// Writes all of `data`.
    fn write(&mut self, offset: u64, data: &[u8]) -> Res<()>;
    /// Gives the file its size (a hole at its end has not been written).
    fn set_size(&mut self, size: u64) -> Res<()>;
}

/// What an argument of `cp` names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// A path of the host.
    Host(Vec<u8>),
    /// A path in a volume.
    Volume {
        /// Its device (or several, with commas).
        device: PathBuf,
        /// From the volume's root.
        path: Vec<u8>,
    },
}

impl Target {
    /// `DEVICE:PATH`, where `PATH` is absolute or empty, is a path in a volume, unless a host file has that name.
    pub fn parse(arg: &OsStr) -> Self {
        let bytes = arg.as_bytes();
        let colon = (1..bytes.len()).find(|&i| bytes[i] == b':' && matches!(bytes.get(i + 1), None | Some(b'/')));
        match colon {
            Some(i) if !Path::new(arg).exists() => {
                Self::Volume { device: OsStr::from_bytes(&bytes[..i]).into(), path: bytes[i + 1..].to_vec() }
            }
            _ => Self::Host(bytes.to_vec()),
        }
    }

    /// For the commands `ls`, `cat`, `rm` and `mkdir`: the device, and the paths in it that its argument (after a
    /// colon) and `paths` name.
    pub fn with_paths(device: &OsStr, paths: &[std::ffi::OsString]) -> (PathBuf, Vec<Vec<u8>>) {
        let mut all: Vec<Vec<u8>> = Vec::new();
        let device = match Self::parse(device) {
            Self::Volume { device, path } => {
                all.push(path);
                device
            }
            Self::Host(_) => device.into(),
        };
        all.extend(paths.iter().map(|p| p.as_bytes().to_vec()));
        (device, all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn volume(device: &str, path: &str) -> Target {
        Target::Volume { device: device.into(), path: path.into() }
    }

    #[test]
    fn targets_parse() {
        for (text, target) in [
            ("vol.img:/a/b", volume("vol.img", "/a/b")),
            ("/tmp/v:", volume("/tmp/v", "")),
            ("a,b:/", volume("a,b", "/")),
            ("c:d:/e", volume("c:d", "/e")),
            ("./plain", Target::Host(b"./plain".to_vec())),
            ("with:colon", Target::Host(b"with:colon".to_vec())),
            (":/x", Target::Host(b":/x".to_vec())),
        ] {
            assert_eq!(Target::parse(OsStr::new(text)), target, "{text}");
        }
    }

    #[test]
    fn devices_with_paths() {
        let (device, paths) = Target::with_paths(OsStr::new("v:/a"), &["/b".into()]);
        assert_eq!((device, paths), ("v".into(), vec![b"/a".to_vec(), b"/b".to_vec()]));
        let (device, paths) = Target::with_paths(OsStr::new("v"), &[]);
        assert_eq!((device, paths), ("v".into(), vec![]));
    }
}
