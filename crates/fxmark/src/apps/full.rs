//! Loads on a file system that is nearly full and was overwritten at random (Max, USENIX ATC '21, Figure 11): once the files
//! of all workers are there, the first one on it fills the rest as far as `--full` says and overwrites blocks of what it filled.

use crate::Result;
use crate::error::On;
use crate::fs::{Fs, OpenHow, Page};
use crate::names::{Name, Rng};
use crate::worker::{Ctx, Load, Step};

/// Of a file that fills.
const FILE: u64 = 8 << 20;
/// Written at once.
const PIECE: usize = 1 << 20;
/// What is less is not filled.
const GRAIN: u64 = 64 << 10;
/// One of so many blocks is overwritten.
const OVERWRITTEN: u64 = 8;
/// Overwrites per fsync.
const EVERY: u64 = 100;

/// The load, on a full file system where the user wants that.
pub fn first<F: Fs, L: Load<F> + 'static>(c: &Ctx<F>, load: L) -> Box<dyn Load<F>> {
    if c.scale.sizes.full == 0 { Box::new(load) } else { Box::new(Filled { load }) }
}

struct Filled<L> {
    load: L,
}

/// Fills up to the wanted percent, with files of at most [`FILE`] bytes; their sizes.
fn fill<F: Fs>(c: &Ctx<F>, name: &mut Name) -> Result<Vec<u64>> {
    let data = Page::new().0.repeat(PIECE / 4096);
    let dir = name.set(format_args!("full"));
    c.fs.ensure_dir(dir).on("mkdir", dir)?;
    let mut sizes = Vec::new();
    loop {
        c.fs.sync().on("syncfs", c".")?;
        let space = c.fs.space().on("statvfs", c".")?;
        let free = space.all / 100 * (100 - c.scale.sizes.full);
        let bytes = space.available.saturating_sub(free).min(FILE) / GRAIN * GRAIN;
        // some file systems keep more for themselves the more is used
        if bytes == 0 {
            return Ok(sizes);
        }
        let path = name.set(format_args!("full/{}", sizes.len()));
        let file = c.fs.open(path, OpenHow::FRESH).on("open", path)?;
        for at in (0..bytes).step_by(PIECE) {
            let n = (bytes - at).min(PIECE as u64) as usize;
            c.fs.write_all(&file, at, &data[..n]).on("pwrite", path)?;
        }
        c.fs.fsync(&file, false).on("fsync", path)?;
        sizes.push(bytes);
    }
}

/// Overwrites blocks at random places of them.
fn overwrite<F: Fs>(c: &Ctx<F>, name: &mut Name, sizes: &[u64]) -> Result<()> {
    let (mut rng, page) = (Rng::new(c.seed, c.workers), Page::new());
    let blocks = sizes.iter().sum::<u64>() / 4096;
    for _ in 0..blocks / OVERWRITTEN / EVERY {
        let f = rng.below(sizes.len() as u64) as usize;
        let path = name.set(format_args!("full/{f}"));
        let file = c.fs.open(path, OpenHow::WRITE).on("open", path)?;
        for _ in 0..EVERY {
            let at = rng.below(sizes[f] / 4096) * 4096;
            c.fs.write_all(&file, at, &page.0).on("pwrite", path)?;
        }
        c.fs.fsync(&file, false).on("fsync", path)?;
    }
    Ok(())
}

impl<F: Fs, L: Load<F>> Load<F> for Filled<L> {
    fn share(&mut self, c: &Ctx<F>) -> Result<()> {
        self.load.share(c)
    }
    fn prepare(&mut self, c: &Ctx<F>) -> Result<()> {
        self.load.prepare(c)
    }
    fn after_prepare(&mut self, c: &Ctx<F>) -> Result<()> {
        self.load.after_prepare(c)?;
        if !c.leads {
            return Ok(());
        }
        let mut name = c.name();
        let sizes = fill(c, &mut name)?;
        overwrite(c, &mut name, &sizes)
    }
    fn step(&mut self, c: &Ctx<F>) -> Result<Step> {
        self.load.step(c)
    }
    fn refill(&mut self, c: &Ctx<F>) -> Result<()> {
        self.load.refill(c)
    }
    fn empty_ends_all(&self, c: &Ctx<F>) -> bool {
        self.load.empty_ends_all(c)
    }
}
