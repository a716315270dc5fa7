//! Files that live by overwrites: random blocks, an fsync every so often, as long as the measurement lasts. A copy-on-write
//! file system makes ever more extents of them; what this load asks is whether an overwrite costs more then.

use crate::Result;
use crate::error::On;
use crate::fs::{Fs, OpenHow, Page};
use crate::names::{Name, Rng};
use crate::worker::{Ctx, Load, Step};

/// Files of a worker.
const FILES: u64 = 8;
/// Blocks written at once while the files are made.
const PIECE: u64 = 256;

/// See the module.
pub struct Overwrites<F: Fs> {
    name: Name,
    rng: Rng,
    files: Vec<F::File>,
    /// Of each file.
    blocks: u64,
    /// Writes since the last fsync.
    since: u64,
    page: Box<Page>,
}

impl<F: Fs> Overwrites<F> {
    pub fn new(c: &Ctx<F>) -> Self {
        let all = if c.scale.aged.bytes > 0 { c.scale.aged.bytes / 4096 } else { c.scale.blocks };
        let blocks = (all / c.foreground.max(1) as u64 / FILES).max(1);
        Self { name: c.name(), rng: c.rng(), files: Vec::new(), blocks, since: 0, page: Page::new() }
    }
}

impl<F: Fs> Load<F> for Overwrites<F> {
    fn prepare(&mut self, c: &Ctx<F>) -> Result<()> {
        let dir = self.name.set(format_args!("{}", c.id));
        c.fs.ensure_dir(dir).on("mkdir", dir)?;
        let piece: Vec<u8> = self.page.0.iter().copied().cycle().take((PIECE * 4096) as usize).collect();
        for f in 0..FILES {
            let path = self.name.set(format_args!("{}/{f}", c.id));
            let file = c.fs.open(path, OpenHow::CREATE).on("open", path)?;
            if c.scale.aged.nocow {
                c.fs.set_nocow(&file).on("chattr +C", path)?;
            }
            for b in (0..self.blocks).step_by(PIECE as usize) {
                let bytes = (self.blocks - b).min(PIECE) as usize * 4096;
                c.fs.write_all(&file, b * 4096, &piece[..bytes]).on("pwrite", path)?;
            }
            c.fs.fsync(&file, false).on("fsync", path)?;
            self.files.push(file);
        }
        Ok(())
    }
    fn step(&mut self, c: &Ctx<F>) -> Result<Step> {
        let (f, b) = (self.rng.below(FILES) as usize, self.rng.below(self.blocks));
        let Some(file) = self.files.get(f) else { return Ok(Step::Empty) };
        c.fs.write_all(file, b * 4096, &self.page.0).on("pwrite", c"one of 8 files")?;
        self.since += 1;
        if self.since >= c.scale.aged.every {
            self.since = 0;
            c.fs.fsync(file, false).on("fsync", c"one of 8 files")?;
        }
        Ok(Step::Did(1))
    }
}
