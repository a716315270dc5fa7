//! The two kinds of file tree that `braidfs cp` copies between: the host's and a volume's.
//!
//! Owns the parsing of `DEVICE:PATH` and what trees are called in messages.

pub mod volume;

use crate::failure::Failure;
use crate::mounted::{Identity, with_backing};
use crate::text;
use braidfs_device::is_nbd_uri;
use braidfs_vfs::{FileKind, FileSystem, Kernel, OpenHow, Stat};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::fstat;
use rustix::io::Errno;
use std::ffi::{CStr, CString, OsStr};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// A file tree that `cp` copies from or to.
pub trait Tree: Sized {
    /// How it is called.
    type Fs: FileSystem;
    /// The file system that the tree is in.
    fn fs(&self) -> &Self::Fs;
    /// A path as it takes it.
    fn trim<'p>(&self, path: &'p [u8]) -> &'p [u8] {
        path
    }
    /// The path for a message.
    fn show(&self, path: &[u8]) -> String;
    /// Which devices a file can be, for what is opened as one.
    fn devices(&self, _: &Stat) -> Vec<Identity> {
        Vec::new()
    }
    /// Whether what is named as a destination is written into, as cp(1) does, and not replaced: a device, a pipe, the output of
    /// this process. In a volume that is not mounted nothing is behind such a file.
    fn is_written_into(&self, _: &Stat) -> bool {
        false
    }
    /// The directories that a directory lies in, by their [`Stat::id`], itself first. Of a volume alone: `cp` copies nothing from
    /// the host to the host.
    ///
    /// # Errors
    /// Of the file system.
    fn way_up(&self, _: &[u8]) -> io::Result<Vec<(u64, u64)>> {
        Ok(Vec::new())
    }
    /// The tree as it is seen from one of its directories, which this opens: whatever takes the directory's name, or the name of one
    /// above it, what lies in it is found. Only for the paths of the directory itself and of what lies right in it, which stay whole.
    /// None: nobody else changes the tree.
    ///
    /// # Errors
    /// Of the file system; STALE, LOOP or NOTDIR where another file has its name.
    fn enter(&self, _: &[u8], _: Entered) -> io::Result<Option<Self>> {
        Ok(None)
    }
    /// The directory that the tree is seen from, where it is open for reading.
    fn dir(&self) -> Option<&<Self::Fs as FileSystem>::File> {
        None
    }
    /// Names in a directory.
    ///
    /// # Errors
    /// Of the file system.
    fn list(&self, path: &CStr) -> io::Result<Vec<Vec<u8>>> {
        self.fs().list(path)
    }
    /// Makes `to` another name of a file of the same tree, as that is seen from elsewhere. Both as [`Self::trim`] has them.
    ///
    /// # Errors
    /// Of the file system.
    fn link_from(&self, _: &Self, from: &CStr, to: &CStr) -> io::Result<()> {
        self.fs().link(from, to)
    }
    /// Whether a directory has one name, so that it is damage where a walk meets it twice: what is mounted does not count here.
    fn has_one_name_each(&self) -> bool;
}

/// How [`Tree::enter`] comes to a directory.
#[derive(Debug, Clone, Copy)]
pub enum Entered {
    /// To be listed: the one with this [`Stat::id`], and no symlink.
    ToRead((u64, u64)),
    /// To be filled: the one with this [`Stat::id`], and no symlink.
    ToFill((u64, u64)),
    /// To be filled: the one with this [`Stat::id`], maybe behind a symlink.
    Found((u64, u64)),
    /// To be filled: it was just made.
    Made,
}

/// Why a walk leaves out a directory of a volume that it has met before.
pub const MET_BEFORE: &str =
    "a loop of directories, or one with two names: it was met before: check the volume with `braidfs fsck -fn`";

/// Why nothing is removed in a directory that an entry of a damaged volume leads to.
pub const FOREIGN: &str =
    "a directory that lies in another one, so nothing in it is removed: check the volume with `braidfs fsck -fn`";

/// The tree of the host, by system calls.
pub struct HostTree {
    fs: Kernel,
    /// The directory that it is seen from, by its whole path, and whether that is open for reading.
    from: Option<(Vec<u8>, bool)>,
}

impl HostTree {
    /// Relative paths start at the working directory.
    pub const HERE: Self = Self { fs: Kernel::here(), from: None };
}

impl Tree for HostTree {
    type Fs = Kernel;
    fn fs(&self) -> &Kernel {
        &self.fs
    }
    fn trim<'p>(&self, path: &'p [u8]) -> &'p [u8] {
        match &self.from {
            None => path,
            Some((dir, _)) if dir == path => b".",
            Some(_) => path.rsplit(|b| *b == b'/').next().unwrap_or(path),
        }
    }
    fn enter(&self, path: &[u8], how: Entered) -> io::Result<Option<Self>> {
        let (id, follow) = match how {
            Entered::ToRead(id) | Entered::ToFill(id) => (Some(id), false),
            Entered::Found(id) => (Some(id), true),
            Entered::Made => (None, false),
        };
        // a slash at its end would lead through a symlink that has taken its name
        let slashes = path.iter().rev().take_while(|b| id.is_none() && **b == b'/').count();
        let name = CString::new(self.trim(&path[..path.len() - slashes]))?;
        let (dir, is_readable) =
            match self.fs.open(&name, OpenHow { directory: true, no_follow: !follow, ..OpenHow::READ }) {
                // who may write it need not be allowed to read it
                Err(e) if e.kind() == io::ErrorKind::PermissionDenied && !matches!(how, Entered::ToRead(_)) => {
                    (self.fs.itself(&name, follow)?, false)
                }
                dir => (dir?, true),
            };
        if let Some(id) = id
            && self.fs.stat_of(&dir)?.id != id
        {
            return Err(Errno::STALE.into());
        }
        Ok(Some(Self { fs: dir.into(), from: Some((path.to_vec(), is_readable)) }))
    }
    fn dir(&self) -> Option<&OwnedFd> {
        let is_readable = self.from.as_ref().is_some_and(|(_, is_readable)| *is_readable);
        self.fs.root_dir().filter(|_| is_readable)
    }
    fn list(&self, path: &CStr) -> io::Result<Vec<Vec<u8>>> {
        match self.dir() {
            Some(_) if path == c"." => self.fs.list_root(),
            _ => self.fs.list(path),
        }
    }
    fn link_from(&self, other: &Self, from: &CStr, to: &CStr) -> io::Result<()> {
        self.fs.link_from(&other.fs, from, to)
    }
    fn show(&self, path: &[u8]) -> String {
        text::name(path)
    }
    fn devices(&self, meta: &Stat) -> Vec<Identity> {
        match meta.kind {
            FileKind::File => vec![Identity::File(meta.id.0, meta.id.1)],
            FileKind::Block => with_backing(Identity::Block(meta.rdev)),
            _ => Vec::new(),
        }
    }
    fn is_written_into(&self, meta: &Stat) -> bool {
        let is = |fd: BorrowedFd<'_>| fstat(fd).is_ok_and(|s| (s.st_dev, s.st_ino) == meta.id);
        match meta.kind {
            FileKind::Dir | FileKind::Symlink => false,
            FileKind::File => is(io::stdout().as_fd()) || is(io::stderr().as_fd()),
            FileKind::Char | FileKind::Block | FileKind::Fifo | FileKind::Socket => true,
        }
    }
    fn has_one_name_each(&self) -> bool {
        false
    }
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
    /// `DEVICE:PATH`, where `PATH` is absolute or empty, is a path in a volume, unless a host file has that name. The colon of
    /// a URI's scheme is none of these.
    pub fn parse(arg: &OsStr) -> Self {
        let bytes = arg.as_bytes();
        let scheme = arg.to_str().filter(|_| is_nbd_uri(Path::new(arg))).and_then(|a| a.find("://"));
        let first = scheme.map_or(1, |at| at + 3);
        let colon = (first..bytes.len()).find(|&i| bytes[i] == b':' && matches!(bytes.get(i + 1), None | Some(b'/')));
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

    /// [`Self::with_paths`], for a `command` that needs one at least.
    pub fn with_some_paths(
        command: &str,
        device: &OsStr,
        paths: &[std::ffi::OsString],
    ) -> Result<(PathBuf, Vec<Vec<u8>>), Failure> {
        let (device, paths) = Self::with_paths(device, paths);
        if paths.is_empty() {
            let why = format!("{command}: no path given: write it as `braidfs {command} DEVICE PATH`");
            return Err(Failure::new(why));
        }
        Ok((device, paths))
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
            ("nbd://h:1/e:/a", volume("nbd://h:1/e", "/a")),
            ("nbd+unix:///e?socket=/s:", volume("nbd+unix:///e?socket=/s", "")),
            ("nbd://h/e", Target::Host(b"nbd://h/e".to_vec())),
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
        assert!(Target::with_some_paths("rm", OsStr::new("v:/a"), &[]).is_ok());
        let why = Target::with_some_paths("rm", OsStr::new("v"), &[]).unwrap_err().to_string();
        assert!(why.contains("`braidfs rm DEVICE PATH`"), "{why}");
    }
}
