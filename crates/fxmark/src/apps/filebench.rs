//! Filebench's personalities varmail and fileserver. A step is one pass through the flow; every flow operation counts,
//! as Filebench counts them.

use super::fileset::FileSet;
use crate::Result;
use crate::error::On;
use crate::fs::{Fs, OpenHow};
use crate::worker::{Ctx, Load, Step};

/// Mean bytes of an append, in both.
const APPEND_BYTES: u64 = 16 << 10;
const APPEND: OpenHow = OpenHow { append: true, ..OpenHow::WRITE };

/// varmail: 1000 files of 16 KiB in one directory.
pub struct Varmail {
    set: FileSet,
}

impl Varmail {
    pub fn new<F: Fs>(c: &Ctx<F>) -> Self {
        Self { set: FileSet::new(c, 1000, 1_000_000, 16 << 10) }
    }
}

impl<F: Fs> Load<F> for Varmail {
    fn prepare(&mut self, c: &Ctx<F>) -> Result<()> {
        self.set.prepare(c)
    }
    fn step(&mut self, c: &Ctx<F>) -> Result<Step> {
        let s = &mut self.set;
        s.delete(c)?;
        if let Some((file, _)) = s.create(c)? {
            let bytes = s.rng.below(2 * APPEND_BYTES) + 1;
            s.write(c, &file, 0, bytes)?;
            c.fs.fsync(&file, false).on("fsync", c"a new mail")?;
        }
        if let Some(file) = s.open(c, APPEND)? {
            s.read_all(c, &file)?;
            s.append(c, &file, APPEND_BYTES)?;
            c.fs.fsync(&file, false).on("fsync", c"a mail")?;
        }
        if let Some(file) = s.open(c, OpenHow::READ)? {
            s.read_all(c, &file)?;
        }
        Ok(Step::Did(13))
    }
}

/// fileserver: files of 128 KiB in directories of 20. Filebench has 10,000; here as many as the profile says.
pub struct FileServer {
    set: FileSet,
    /// As a noisy neighbour: fsync of what it writes.
    sync: bool,
}

impl FileServer {
    pub fn new<F: Fs>(c: &Ctx<F>, sync: bool) -> Self {
        Self { set: FileSet::new(c, (c.scale.entries / 2).max(20), 20, 128 << 10), sync }
    }
}

impl<F: Fs> Load<F> for FileServer {
    fn prepare(&mut self, c: &Ctx<F>) -> Result<()> {
        self.set.prepare(c)
    }
    fn step(&mut self, c: &Ctx<F>) -> Result<Step> {
        let s = &mut self.set;
        let bytes = s.file_bytes();
        if let Some((file, _)) = s.create(c)? {
            s.write(c, &file, 0, bytes)?;
            if self.sync {
                c.fs.fsync(&file, false).on("fsync", c"a new file")?;
            }
        }
        if let Some(file) = s.open(c, APPEND)? {
            s.append(c, &file, APPEND_BYTES)?;
        }
        if let Some(file) = s.open(c, OpenHow::READ)? {
            s.read_all(c, &file)?;
        }
        s.delete(c)?;
        s.stat(c)?;
        Ok(Step::Did(11))
    }
}
