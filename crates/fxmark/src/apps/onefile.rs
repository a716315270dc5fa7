//! One private file, written request by request: as IOzone's write, random write and O_SYNC write (SpanFS, Figure 5) and
//! sysbench's buffered ones (Figure 6). The file is as large as `--file-size` says, the request as `--request`.

use crate::error::On;
use crate::fs::{Fs, OpenHow, Page};
use crate::names::{Name, Rng};
use crate::worker::{Ctx, Load, Step};
use crate::{Error, Result};
use braidfs_device::AlignedBuf;

/// Of a request.
const REQUEST: u64 = 4096;
/// Written at once while a file is made.
const PIECE: usize = 1 << 20;

/// The file of a worker.
struct One<F: Fs> {
    name: Name,
    file: Option<F::File>,
    bytes: u64,
    request: u64,
    /// At an address that O_DIRECT takes.
    data: AlignedBuf,
}

/// Bytes to write, with a pattern that does not compress to nothing.
fn data(bytes: usize) -> AlignedBuf {
    let (page, mut data) = (Page::new(), AlignedBuf::zeroed(bytes.next_multiple_of(4096)));
    data.chunks_exact_mut(4096).for_each(|c| c.copy_from_slice(&page.0));
    data
}

impl<F: Fs> One<F> {
    fn new(c: &Ctx<F>) -> Self {
        let request = c.scale.sizes.request_or(REQUEST);
        let bytes = c.scale.sizes.file_or(c.scale.blocks * REQUEST).max(request) / request * request;
        Self { name: c.name(), file: None, bytes, request, data: data(request as usize) }
    }

    fn open(&mut self, c: &Ctx<F>, sync: bool) -> Result<()> {
        let dir = self.name.set(format_args!("{}", c.id));
        c.fs.ensure_dir(dir).on("mkdir", dir)?;
        let path = self.name.set(format_args!("{}/data", c.id));
        let how = OpenHow { sync, ..OpenHow::CREATE }.direct(c.direct);
        let file = c.fs.open(path, how).on("open", path).map_err(|e| match e {
            Error::Op { why, .. } if c.direct && why.raw_os_error() == Some(libc::EINVAL) => {
                Error::Unsupported("the file system refuses O_DIRECT".into())
            }
            e => e,
        });
        self.file = Some(file?);
        Ok(())
    }

    fn write(&mut self, c: &Ctx<F>, at: u64) -> Result<()> {
        let Some(file) = &self.file else { return Ok(()) };
        c.fs.write_all(file, at, &self.data[..self.request as usize]).on("pwrite", self.name.get())
    }
}

/// One request after the other to a new file; with `sync` opened with O_SYNC, which the library does by an fsync.
pub struct Sequential<F: Fs> {
    one: One<F>,
    sync: bool,
    at: u64,
}

impl<F: Fs> Sequential<F> {
    pub fn new(c: &Ctx<F>, sync: bool) -> Self {
        Self { one: One::new(c), sync, at: 0 }
    }
}

impl<F: Fs> Load<F> for Sequential<F> {
    fn prepare(&mut self, c: &Ctx<F>) -> Result<()> {
        self.one.open(c, self.sync)
    }
    fn step(&mut self, c: &Ctx<F>) -> Result<Step> {
        if self.at == self.one.bytes {
            return Ok(Step::Empty);
        }
        self.one.write(c, self.at)?;
        if let Some(file) = self.one.file.as_ref().filter(|_| self.sync && !c.fs.has_open_sync()) {
            c.fs.fsync(file, false).on("fsync", self.one.name.get())?;
        }
        self.at += self.one.request;
        Ok(Step::Did(1))
    }
    fn refill(&mut self, c: &Ctx<F>) -> Result<()> {
        self.at = 0;
        self.one.file.as_ref().map_or(Ok(()), |f| c.fs.truncate(f, 0).on("ftruncate", self.one.name.get()))
    }
}

/// Requests at random places of a file that was written before.
pub struct Random<F: Fs> {
    one: One<F>,
    rng: Rng,
}

impl<F: Fs> Random<F> {
    pub fn new(c: &Ctx<F>) -> Self {
        Self { one: One::new(c), rng: c.rng() }
    }
}

impl<F: Fs> Load<F> for Random<F> {
    fn prepare(&mut self, c: &Ctx<F>) -> Result<()> {
        self.one.open(c, false)?;
        let Some(file) = &self.one.file else { return Ok(()) };
        let piece = data(PIECE);
        for at in (0..self.one.bytes).step_by(PIECE) {
            let n = (self.one.bytes - at).min(PIECE as u64) as usize;
            c.fs.write_all(file, at, &piece[..n]).on("pwrite", self.one.name.get())?;
        }
        c.fs.fsync(file, false).on("fsync", self.one.name.get())
    }
    fn step(&mut self, c: &Ctx<F>) -> Result<Step> {
        let at = self.rng.below(self.one.bytes / self.one.request) * self.one.request;
        self.one.write(c, at)?;
        Ok(Step::Did(1))
    }
}
