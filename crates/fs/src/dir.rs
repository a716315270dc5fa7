//! Listing of directories.

use crate::{Error, File, FileKind, Result};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// Entries fetched at once: a listing in the middle of others' changes holds no lock between its batches.
const BATCH: usize = 256;

/// The entries of a directory, without `.` and `..`. What is there all the time comes once, however the directory
/// changes meanwhile; what comes or goes may come or not.
#[derive(Debug)]
pub struct ReadDir {
    dir: File,
    path: PathBuf,
    /// Entries that were read and not given yet, the next one last.
    batch: Vec<DirEntry>,
    cookie: u64,
    ended: bool,
}

/// One of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirEntry {
    path: PathBuf,
    kind: FileKind,
    ino: u64,
}

impl DirEntry {
    /// Its path: that of the listing, and the name.
    pub fn path(&self) -> &Path {
        &self.path
    }
    /// Name of the entry in its directory.
    pub fn file_name(&self) -> &OsStr {
        // the path ends in a name: `next` put it there
        self.path.file_name().unwrap_or_default()
    }
    /// Type, as the directory has it; the inode is not read.
    pub fn kind(&self) -> FileKind {
        self.kind
    }
    /// Number of the inode.
    pub fn ino(&self) -> u64 {
        self.ino
    }
}

impl ReadDir {
    pub(crate) fn new(dir: File, path: &Path) -> Self {
        Self { dir, path: path.to_path_buf(), batch: Vec::new(), cookie: 0, ended: false }
    }

    pub(crate) fn dir(&self) -> &File {
        &self.dir
    }

    fn fetch(&mut self) -> Result<()> {
        let (mut cookie, mut ended) = (self.cookie, true);
        let (batch, path) = (&mut self.batch, &self.path);
        self.dir.shared.volume.readdir(self.dir.open.ino(), cookie, &mut |e| {
            if batch.len() == BATCH {
                ended = false;
                return false;
            }
            cookie = e.next;
            if e.name != b"." && e.name != b".." {
                let name = OsString::from_vec(e.name.to_vec());
                batch.push(DirEntry { path: path.join(name), kind: e.kind, ino: e.ino.0 });
            }
            true
        })?;
        batch.reverse();
        (self.cookie, self.ended) = (cookie, ended);
        Ok(())
    }
}

impl Iterator for ReadDir {
    type Item = Result<DirEntry, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.batch.is_empty()
            && !self.ended
            && let Err(e) = self.fetch()
        {
            // said once
            self.ended = true;
            self.batch.clear();
            return Some(Err(e));
        }
        self.batch.pop().map(Ok)
    }
}
