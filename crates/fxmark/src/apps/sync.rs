//! Small durable writes, and many small files: as sysbench, fs_mark and TokuBench do them.

use crate::Result;
use crate::error::On;
use crate::fs::{Fs, OpenHow, Page};
use crate::names::{Name, Rng};
use crate::worker::{Ctx, Load, Step};

/// sysbench's fileio, synchronous writes, at random places or one after the other: 128 files per instance, 4 KiB and an
/// fsync each time.
pub struct SyncWrites<F: Fs> {
    name: Name,
    rng: Rng,
    /// One block after the other, file by file; the number of the next.
    next: Option<u64>,
    files: Vec<F::File>,
    blocks: u64,
    page: Box<Page>,
}

const FILES: u64 = 128;

impl<F: Fs> SyncWrites<F> {
    pub fn new(c: &Ctx<F>, sequential: bool) -> Self {
        let blocks = (c.scale.blocks / FILES).max(1);
        let next = sequential.then_some(0);
        Self { name: c.name(), rng: c.rng(), next, files: Vec::new(), blocks, page: Page::new() }
    }
}

impl<F: Fs> Load<F> for SyncWrites<F> {
    fn prepare(&mut self, c: &Ctx<F>) -> Result<()> {
        let dir = self.name.set(format_args!("{}", c.id));
        c.fs.ensure_dir(dir).on("mkdir", dir)?;
        for f in 0..FILES {
            let path = self.name.set(format_args!("{}/{f}", c.id));
            let file = c.fs.open(path, OpenHow::CREATE).on("open", path)?;
            for b in 0..self.blocks {
                c.fs.write_all(&file, b * 4096, &self.page.0).on("pwrite", path)?;
            }
            self.files.push(file);
        }
        Ok(())
    }
    fn step(&mut self, c: &Ctx<F>) -> Result<Step> {
        let (f, b) = match &mut self.next {
            Some(n) => {
                *n += 1;
                (((*n - 1) / self.blocks % FILES) as usize, (*n - 1) % self.blocks)
            }
            None => (self.rng.below(FILES) as usize, self.rng.below(self.blocks)),
        };
        let Some(file) = self.files.get(f) else { return Ok(Step::Empty) };
        c.fs.write_all(file, b * 4096, &self.page.0).on("pwrite", c"one of 128 files")?;
        c.fs.fsync(file, false).on("fsync", c"one of 128 files")?;
        Ok(Step::Did(1))
    }
}

/// fs_mark: a new file, written in pieces, fsync, close.
pub struct SyncFiles {
    name: Name,
    made: u64,
    bytes: usize,
    piece: usize,
    data: Vec<u8>,
}

impl SyncFiles {
    pub fn new<F: Fs>(c: &Ctx<F>, bytes: usize, piece: usize) -> Self {
        Self { name: c.name(), made: 0, bytes, piece, data: vec![0xa5; piece] }
    }
}

impl<F: Fs> Load<F> for SyncFiles {
    fn prepare(&mut self, c: &Ctx<F>) -> Result<()> {
        let dir = self.name.set(format_args!("{}", c.id));
        c.fs.ensure_dir(dir).on("mkdir", dir)
    }
    fn step(&mut self, c: &Ctx<F>) -> Result<Step> {
        if self.made == c.scale.files {
            return Ok(Step::Empty);
        }
        let path = self.name.set(format_args!("{}/{}", c.id, self.made));
        let file = c.fs.open(path, OpenHow::FRESH).on("open", path)?;
        let mut left = self.bytes;
        while left > 0 {
            let n = left.min(self.piece);
            c.fs.append(&file, &self.data[..n]).on("write", path)?;
            left -= n;
        }
        c.fs.fsync(&file, false).on("fsync", path)?;
        self.made += 1;
        Ok(Step::Did(1))
    }
    fn refill(&mut self, c: &Ctx<F>) -> Result<()> {
        for i in 0..std::mem::take(&mut self.made) {
            let path = self.name.set(format_args!("{}/{i}", c.id));
            c.fs.unlink(path).on("unlink", path)?;
        }
        Ok(())
    }
}

/// TokuBench: small files in a balanced tree. Each worker has a tree of its own, three levels deep.
pub struct Tree {
    name: Name,
    made: u64,
    data: [u8; 200],
}

/// Entries of a directory.
const FAN_OUT: u64 = 128;

impl Tree {
    pub fn new<F: Fs>(c: &Ctx<F>) -> Self {
        Self { name: c.name(), made: 0, data: [0x3c; 200] }
    }
    fn dirs<F: Fs>(c: &Ctx<F>) -> u64 {
        c.scale.files.div_ceil(FAN_OUT)
    }
}

impl<F: Fs> Load<F> for Tree {
    fn prepare(&mut self, c: &Ctx<F>) -> Result<()> {
        let dir = self.name.set(format_args!("{}", c.id));
        c.fs.ensure_dir(dir).on("mkdir", dir)?;
        for d in 0..Self::dirs(c) {
            let dir = self.name.set(format_args!("{}/{}", c.id, d / FAN_OUT));
            c.fs.ensure_dir(dir).on("mkdir", dir)?;
            let dir = self.name.set(format_args!("{}/{}/{}", c.id, d / FAN_OUT, d % FAN_OUT));
            c.fs.ensure_dir(dir).on("mkdir", dir)?;
        }
        Ok(())
    }
    fn step(&mut self, c: &Ctx<F>) -> Result<Step> {
        if self.made == c.scale.files {
            return Ok(Step::Empty);
        }
        // from directory to directory, as a balanced tree grows
        let (dirs, i) = (Self::dirs(c), self.made);
        let d = i % dirs;
        let path = self.name.set(format_args!("{}/{}/{}/{}", c.id, d / FAN_OUT, d % FAN_OUT, i / dirs));
        let file = c.fs.open(path, OpenHow::FRESH).on("open", path)?;
        c.fs.append(&file, &self.data).on("write", path)?;
        self.made += 1;
        Ok(Step::Did(1))
    }
    fn refill(&mut self, c: &Ctx<F>) -> Result<()> {
        let dirs = Self::dirs(c);
        for i in 0..std::mem::take(&mut self.made) {
            let d = i % dirs;
            let path = self.name.set(format_args!("{}/{}/{}/{}", c.id, d / FAN_OUT, d % FAN_OUT, i / dirs));
            c.fs.unlink(path).on("unlink", path)?;
        }
        Ok(())
    }
}
