//! Blocks allocated and freed: DWAL appends, DWTL truncates.

use super::blocks::open_direct;
use crate::Result;
use crate::error::On;
use crate::fs::{Fs, OpenHow, Page};
use crate::names::Name;
use crate::worker::{Ctx, Load, Step};

const BLOCK: u64 = 4096;

fn fresh<F: Fs>(c: &Ctx<F>, name: &mut Name, append: bool) -> Result<F::File> {
    let dir = name.set(format_args!("{}", c.id));
    c.fs.ensure_dir(dir).on("mkdir", dir)?;
    let path = name.set(format_args!("{}/data", c.id));
    open_direct(c, path, OpenHow { append, ..OpenHow::CREATE })
}

/// DWAL. A file that has grown to its bound is cut to nothing, outside the clock; the original fills the disk.
pub struct Append<F: Fs> {
    name: Name,
    file: Option<F::File>,
    page: Box<Page>,
    blocks: u64,
}

impl<F: Fs> Append<F> {
    pub fn new(c: &Ctx<F>) -> Self {
        Self { name: c.name(), file: None, page: Page::new(), blocks: 0 }
    }
}

impl<F: Fs> Load<F> for Append<F> {
    fn prepare(&mut self, c: &Ctx<F>) -> Result<()> {
        self.file = Some(fresh(c, &mut self.name, !c.original())?);
        Ok(())
    }
    fn step(&mut self, c: &Ctx<F>) -> Result<Step> {
        let Some(file) = self.file.as_ref().filter(|_| c.original() || self.blocks < c.scale.blocks) else {
            return Ok(Step::Empty);
        };
        c.fs.append(file, &self.page.0).on("append", self.name.get())?;
        self.blocks += 1;
        Ok(Step::Did(1))
    }
    fn refill(&mut self, c: &Ctx<F>) -> Result<()> {
        if let Some(file) = &self.file {
            c.fs.truncate(file, 0).on("ftruncate", self.name.get())?;
        }
        self.blocks = 0;
        Ok(())
    }
}

/// DWTL: the last block goes, again and again. The original fills the disk with the file.
pub struct Cut<F: Fs> {
    name: Name,
    file: Option<F::File>,
    page: Box<Page>,
    blocks: u64,
}

impl<F: Fs> Cut<F> {
    pub fn new(c: &Ctx<F>) -> Self {
        Self { name: c.name(), file: None, page: Page::new(), blocks: 0 }
    }

    fn fill(&mut self, c: &Ctx<F>) -> Result<()> {
        let Some(file) = &self.file else { return Ok(()) };
        while c.original() || self.blocks < c.scale.blocks {
            match c.fs.write_all(file, self.blocks * BLOCK, &self.page.0).on("pwrite", self.name.get()) {
                Err(e) if c.original() && e.no_space() => break,
                done => done?,
            }
            self.blocks += 1;
        }
        if !c.original() {
            // blocks that were never allocated would not be freed
            c.fs.fsync(file, true).on("fdatasync", self.name.get())?;
        }
        Ok(())
    }
}

impl<F: Fs> Load<F> for Cut<F> {
    fn prepare(&mut self, c: &Ctx<F>) -> Result<()> {
        self.file = Some(if c.original() {
            // there the file lies in the root
            let path = self.name.set(format_args!("data-{}", c.id));
            c.fs.open(path, OpenHow::CREATE).on("open", path)?
        } else {
            fresh(c, &mut self.name, false)?
        });
        self.fill(c)
    }
    fn step(&mut self, c: &Ctx<F>) -> Result<Step> {
        let Some(file) = self.file.as_ref().filter(|_| self.blocks > 1) else { return Ok(Step::Empty) };
        self.blocks -= 1;
        c.fs.truncate(file, self.blocks * BLOCK).on("ftruncate", self.name.get())?;
        Ok(Step::Did(1))
    }
    fn refill(&mut self, c: &Ctx<F>) -> Result<()> {
        self.fill(c)
    }
}
