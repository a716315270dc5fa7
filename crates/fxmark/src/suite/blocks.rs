//! Reads and overwrites of one block of 4 KiB: DRBL DRBM DRBH DWOL DWOM DWSL and their background writers.

use super::TestId;
use crate::error::On;
use crate::fs::{Fs, OpenHow, Page};
use crate::names::Rng;
use crate::worker::{Ctx, Load, Step};
use crate::{Error, Result};

const BLOCK: u64 = 4096;
/// The original gives every worker so much of a shared file, and uses its first block.
const ORIGINAL_REGION: u64 = 8 << 20;

/// Which block a worker uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sharing {
    /// The first of the worker's own file.
    Private,
    /// The worker's own, of a file of all.
    Side,
    /// The first of a file of all.
    Same,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Act {
    Read,
    Write,
    WriteSync,
}

pub fn build<F: Fs>(id: &TestId, c: &Ctx<F>) -> Box<dyn Load<F>> {
    let sharing = match id.test.name.as_bytes()[3] {
        b'L' => Sharing::Private,
        b'M' => Sharing::Side,
        _ => Sharing::Same,
    };
    let act = match id.test.name {
        "DWOL" | "DWOM" => Act::Write,
        "DWSL" => Act::WriteSync,
        _ => Act::Read,
    };
    // what the original's background workers do: DRBL_bg runs the plain test, DRBM_bg's "writer" reads
    let really_writes = !c.original() || sharing == Sharing::Same;
    if c.background && really_writes {
        return Box::new(Writer { sharing, files: Vec::new(), page: Page::new(), rng: c.rng() });
    }
    Box::new(Block { sharing, act, file: None, offset: 0, page: Page::new() })
}

/// Bytes between the blocks of two workers in a shared file.
fn stride<F: Fs>(c: &Ctx<F>) -> u64 {
    if c.original() { ORIGINAL_REGION } else { BLOCK }
}

/// Opens one of the files. A file system that refuses O_DIRECT is told apart from one that fails.
fn open<F: Fs>(c: &Ctx<F>, sharing: Sharing, worker: usize, how: OpenHow) -> Result<F::File> {
    let mut name = c.name();
    let path = match sharing {
        Sharing::Private => name.set(format_args!("{worker}/data")),
        _ => name.set(format_args!("share")),
    };
    open_direct(c, path, how)
}

/// Opens with O_DIRECT where the test wants it.
pub fn open_direct<F: Fs>(c: &Ctx<F>, path: &std::ffi::CStr, how: OpenHow) -> Result<F::File> {
    c.fs.open(path, how.direct(c.direct)).on("open", path).map_err(|e| match e {
        Error::Op { why, .. } if c.direct && why.raw_os_error() == Some(libc::EINVAL) => {
            Error::Unsupported("the file system refuses O_DIRECT".into())
        }
        e => e,
    })
}

/// One worker that reads or overwrites one block.
struct Block<F: Fs> {
    sharing: Sharing,
    act: Act,
    file: Option<F::File>,
    offset: u64,
    page: Box<Page>,
}

impl<F: Fs> Load<F> for Block<F> {
    fn share(&mut self, c: &Ctx<F>) -> Result<()> {
        if self.sharing == Sharing::Private {
            return Ok(());
        }
        let file = open(c, self.sharing, 0, OpenHow::CREATE)?;
        let blocks = match (self.sharing, c.original()) {
            (Sharing::Same, _) => 1,
            (_, false) => c.workers as u64,
            (_, true) => c.workers as u64 * ORIGINAL_REGION / BLOCK,
        };
        for b in 0..blocks {
            c.fs.write_all(&file, b * BLOCK, &self.page.0).on("pwrite", c"share")?;
        }
        c.fs.fsync(&file, false).on("fsync", c"share")
    }

    fn prepare(&mut self, c: &Ctx<F>) -> Result<()> {
        let mut how = if self.act == Act::Read && !c.original() { OpenHow::READ } else { OpenHow::WRITE };
        if self.sharing == Sharing::Private {
            let mut name = c.name();
            let dir = name.set(format_args!("{}", c.id));
            c.fs.ensure_dir(dir).on("mkdir", dir)?;
            let file = open(c, self.sharing, c.id, OpenHow::CREATE)?;
            c.fs.write_all(&file, 0, &self.page.0).on("pwrite", c"data")?;
            if c.original() {
                // the original keeps the descriptor that wrote
                self.file = Some(file);
                return Ok(());
            }
            c.fs.fsync(&file, false).on("fsync", c"data")?;
        } else if self.sharing == Sharing::Side {
            self.offset = c.id as u64 * stride(c);
        }
        how.create = c.original();
        self.file = Some(open(c, self.sharing, c.id, how)?);
        Ok(())
    }

    fn step(&mut self, c: &Ctx<F>) -> Result<Step> {
        let Some(file) = &self.file else { return Ok(Step::Empty) };
        match self.act {
            Act::Read => c.fs.read_exact(file, self.offset, &mut self.page.0).on("pread", c"the block")?,
            Act::Write => c.fs.write_all(file, self.offset, &self.page.0).on("pwrite", c"the block")?,
            Act::WriteSync => {
                c.fs.write_all(file, self.offset, &self.page.0).on("pwrite", c"the block")?;
                c.fs.fsync(file, false).on("fsync", c"the file")?;
            }
        }
        Ok(Step::Did(1))
    }
}

/// The background writer: overwrites the blocks that the others read, in random order.
struct Writer<F: Fs> {
    sharing: Sharing,
    files: Vec<F::File>,
    page: Box<Page>,
    rng: Rng,
}

impl<F: Fs> Load<F> for Writer<F> {
    fn prepare(&mut self, _: &Ctx<F>) -> Result<()> {
        Ok(())
    }
    fn after_prepare(&mut self, c: &Ctx<F>) -> Result<()> {
        let files = if self.sharing == Sharing::Private { c.foreground } else { 1 };
        self.files = (0..files).map(|w| open(c, self.sharing, w, OpenHow::WRITE)).collect::<Result<_>>()?;
        Ok(())
    }
    fn step(&mut self, c: &Ctx<F>) -> Result<Step> {
        let reader = self.rng.below(c.foreground as u64);
        let (file, offset) = match self.sharing {
            Sharing::Private => (reader as usize, 0),
            Sharing::Side => (0, reader * stride(c)),
            Sharing::Same => (0, 0),
        };
        let Some(file) = self.files.get(file) else { return Ok(Step::Empty) };
        c.fs.write_all(file, offset, &self.page.0).on("pwrite", c"a block that others read")?;
        Ok(Step::Did(1))
    }
}
