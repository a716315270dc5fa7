//! A set of files with sizes as Filebench draws them, of which some exist.

use crate::Result;
use crate::error::On;
use crate::fs::{Fs, OpenHow};
use crate::names::{Name, Rng};
use crate::worker::Ctx;
use std::ffi::CStr;

/// Bytes of one write or read: Filebench's `iosize`.
pub const IO_BYTES: usize = 1 << 20;

/// The set of one worker.
pub struct FileSet {
    name: Name,
    worker: usize,
    /// Files of one directory.
    width: u64,
    mean_bytes: u64,
    there: Vec<u64>,
    free: Vec<u64>,
    pub rng: Rng,
    pub data: Vec<u8>,
}

impl FileSet {
    pub fn new<F: Fs>(c: &Ctx<F>, files: u64, width: u64, mean_bytes: u64) -> Self {
        Self {
            name: c.name(),
            worker: c.id,
            width,
            mean_bytes,
            there: Vec::new(),
            free: (0..files).rev().collect(),
            rng: c.rng(),
            data: vec![0x5a; IO_BYTES],
        }
    }

    /// Makes the directories, and 80 % of the files.
    pub fn prepare<F: Fs>(&mut self, c: &Ctx<F>) -> Result<()> {
        let files = self.free.len() as u64;
        let top = self.name.set(format_args!("set{}", self.worker));
        c.fs.ensure_dir(top).on("mkdir", top)?;
        for d in 0..files.div_ceil(self.width) {
            let dir = self.name.set(format_args!("set{}/{d}", self.worker));
            c.fs.ensure_dir(dir).on("mkdir", dir)?;
        }
        for _ in 0..files * 8 / 10 {
            let bytes = self.file_bytes();
            if let Some((file, _)) = self.create(c)? {
                self.write(c, &file, 0, bytes)?;
            }
        }
        Ok(())
    }

    /// A size of a file.
    pub fn file_bytes(&mut self) -> u64 {
        self.rng.gamma(self.mean_bytes)
    }

    fn path(&mut self, file: u64) -> &CStr {
        self.name.set(format_args!("set{}/{}/f{file:06}", self.worker, file / self.width))
    }

    /// Creates a file that is not there; none where all are.
    pub fn create<F: Fs>(&mut self, c: &Ctx<F>) -> Result<Option<(F::File, u64)>> {
        let Some(n) = self.free.pop() else { return Ok(None) };
        self.there.push(n);
        let path = self.path(n);
        Ok(Some((c.fs.open(path, OpenHow::FRESH).on("open", path)?, n)))
    }

    fn any(&mut self) -> Option<usize> {
        let n = self.there.len() as u64;
        (n > 0).then(|| self.rng.below(n) as usize)
    }

    /// Opens any file that is there.
    pub fn open<F: Fs>(&mut self, c: &Ctx<F>, how: OpenHow) -> Result<Option<F::File>> {
        let Some(at) = self.any() else { return Ok(None) };
        let path = self.path(self.there[at]);
        Ok(Some(c.fs.open(path, how).on("open", path)?))
    }

    /// Removes any file that is there.
    pub fn delete<F: Fs>(&mut self, c: &Ctx<F>) -> Result<()> {
        let Some(at) = self.any() else { return Ok(()) };
        let n = self.there.swap_remove(at);
        self.free.push(n);
        let path = self.path(n);
        c.fs.unlink(path).on("unlink", path)
    }

    /// stat of any file that is there.
    pub fn stat<F: Fs>(&mut self, c: &Ctx<F>) -> Result<()> {
        let Some(at) = self.any() else { return Ok(()) };
        let path = self.path(self.there[at]);
        std::hint::black_box(c.fs.stat(path, true).on("stat", path)?);
        Ok(())
    }

    /// Writes `bytes` at `offset`.
    pub fn write<F: Fs>(&self, c: &Ctx<F>, file: &F::File, offset: u64, bytes: u64) -> Result<()> {
        let mut done = 0;
        while done < bytes {
            let n = (bytes - done).min(IO_BYTES as u64);
            c.fs.write_all(file, offset + done, &self.data[..n as usize]).on("pwrite", c"a file of the set")?;
            done += n;
        }
        Ok(())
    }

    /// Appends up to twice `mean` bytes to a file opened for appending.
    pub fn append<F: Fs>(&mut self, c: &Ctx<F>, file: &F::File, mean: u64) -> Result<()> {
        let n = self.rng.below(2 * mean) as usize + 1;
        c.fs.append(file, &self.data[..n]).on("append", c"a file of the set")
    }

    /// Reads a file to its end.
    pub fn read_all<F: Fs>(&mut self, c: &Ctx<F>, file: &F::File) -> Result<()> {
        let mut offset = 0;
        loop {
            let n = c.fs.read(file, offset, &mut self.data).on("pread", c"a file of the set")?;
            offset += n as u64;
            if n < IO_BYTES {
                return Ok(());
            }
        }
    }
}
