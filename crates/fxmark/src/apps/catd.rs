//! catd: create, append, truncate, delete, each on the files of a private directory (SpanFS, section 4.2.1). There it
//! is 10,000 files per thread; here as many as the profile says, and again when they are through.

use crate::Result;
use crate::error::On;
use crate::fs::{Fs, OpenHow, Page};
use crate::names::Name;
use crate::worker::{Ctx, Load, Step};
use std::ffi::CStr;

/// The files of a worker, used one after the other.
struct Files {
    name: Name,
    worker: usize,
    count: u64,
    next: u64,
    page: Box<Page>,
}

impl Files {
    fn new<F: Fs>(c: &Ctx<F>) -> Self {
        Self { name: c.name(), worker: c.id, count: c.scale.files, next: 0, page: Page::new() }
    }
    fn dir<F: Fs>(&mut self, c: &Ctx<F>) -> Result<()> {
        let dir = self.name.set(format_args!("{}", self.worker));
        c.fs.ensure_dir(dir).on("mkdir", dir)
    }
    fn path(&mut self, i: u64) -> &CStr {
        self.name.set(format_args!("{}/{i}", self.worker))
    }
    /// Makes the file with `bytes` bytes.
    fn make<F: Fs>(&mut self, c: &Ctx<F>, i: u64, bytes: usize) -> Result<()> {
        let path = self.name.set(format_args!("{}/{i}", self.worker));
        let file = c.fs.open(path, OpenHow::CREATE).on("open", path)?;
        if bytes > 0 { c.fs.write_all(&file, 0, &self.page.0[..bytes]).on("pwrite", path) } else { Ok(()) }
    }
    fn take(&mut self) -> Option<u64> {
        let i = self.next;
        (i < self.count).then(|| {
            self.next += 1;
            i
        })
    }
}

/// Creates empty files.
pub struct Create(Files);
/// Writes 4 KiB to empty files, fsync each.
pub struct Append(Files);
/// Cuts files of 4 KiB to nothing.
pub struct Truncate(Files);
/// Removes empty files that had 4 KiB.
pub struct Delete(Files);

impl Create {
    pub fn new<F: Fs>(c: &Ctx<F>) -> Self {
        Self(Files::new(c))
    }
}
impl Append {
    pub fn new<F: Fs>(c: &Ctx<F>) -> Self {
        Self(Files::new(c))
    }
}
impl Truncate {
    pub fn new<F: Fs>(c: &Ctx<F>) -> Self {
        Self(Files::new(c))
    }
}
impl Delete {
    pub fn new<F: Fs>(c: &Ctx<F>) -> Self {
        Self(Files::new(c))
    }
}

impl<F: Fs> Load<F> for Create {
    fn prepare(&mut self, c: &Ctx<F>) -> Result<()> {
        self.0.dir(c)
    }
    fn step(&mut self, c: &Ctx<F>) -> Result<Step> {
        let Some(i) = self.0.take() else { return Ok(Step::Empty) };
        let path = self.0.path(i);
        drop(c.fs.open(path, OpenHow::FRESH).on("open", path)?);
        Ok(Step::Did(1))
    }
    fn refill(&mut self, c: &Ctx<F>) -> Result<()> {
        for i in 0..std::mem::take(&mut self.0.next) {
            let path = self.0.path(i);
            c.fs.unlink(path).on("unlink", path)?;
        }
        Ok(())
    }
}

impl<F: Fs> Load<F> for Append {
    fn prepare(&mut self, c: &Ctx<F>) -> Result<()> {
        self.0.dir(c)?;
        (0..self.0.count).try_for_each(|i| self.0.make(c, i, 0))
    }
    fn step(&mut self, c: &Ctx<F>) -> Result<Step> {
        let Some(i) = self.0.take() else { return Ok(Step::Empty) };
        let path = self.0.name.set(format_args!("{}/{i}", self.0.worker));
        let file = c.fs.open(path, OpenHow::WRITE).on("open", path)?;
        c.fs.write_all(&file, 0, &self.0.page.0).on("pwrite", path)?;
        c.fs.fsync(&file, false).on("fsync", path)?;
        Ok(Step::Did(1))
    }
    fn refill(&mut self, c: &Ctx<F>) -> Result<()> {
        for i in 0..std::mem::take(&mut self.0.next) {
            let path = self.0.path(i);
            let file = c.fs.open(path, OpenHow::WRITE).on("open", path)?;
            c.fs.truncate(&file, 0).on("ftruncate", path)?;
        }
        Ok(())
    }
}

impl<F: Fs> Load<F> for Truncate {
    fn prepare(&mut self, c: &Ctx<F>) -> Result<()> {
        self.0.dir(c)?;
        (0..self.0.count).try_for_each(|i| self.0.make(c, i, 4096))
    }
    fn step(&mut self, c: &Ctx<F>) -> Result<Step> {
        let Some(i) = self.0.take() else { return Ok(Step::Empty) };
        let path = self.0.path(i);
        let file = c.fs.open(path, OpenHow::WRITE).on("open", path)?;
        c.fs.truncate(&file, 0).on("ftruncate", path)?;
        Ok(Step::Did(1))
    }
    fn refill(&mut self, c: &Ctx<F>) -> Result<()> {
        let gone = std::mem::take(&mut self.0.next);
        (0..gone).try_for_each(|i| self.0.make(c, i, 4096))
    }
}

impl Delete {
    fn make<F: Fs>(&mut self, c: &Ctx<F>, i: u64) -> Result<()> {
        self.0.make(c, i, 4096)?;
        let path = self.0.path(i);
        let file = c.fs.open(path, OpenHow::WRITE).on("open", path)?;
        c.fs.truncate(&file, 0).on("ftruncate", path)
    }
}

impl<F: Fs> Load<F> for Delete {
    fn prepare(&mut self, c: &Ctx<F>) -> Result<()> {
        self.0.dir(c)?;
        (0..self.0.count).try_for_each(|i| self.make(c, i))
    }
    fn step(&mut self, c: &Ctx<F>) -> Result<Step> {
        let Some(i) = self.0.take() else { return Ok(Step::Empty) };
        let path = self.0.path(i);
        c.fs.unlink(path).on("unlink", path)?;
        Ok(Step::Did(1))
    }
    fn refill(&mut self, c: &Ctx<F>) -> Result<()> {
        let gone = std::mem::take(&mut self.0.next);
        (0..gone).try_for_each(|i| self.make(c, i))
    }
}
