//! What ages a file system: overwrites of a few large files, or creating and removing many of all sizes.

use super::profile::{DEPTHS, Profile, draw};
use crate::Result;
use crate::error::On;
use crate::fs::{Fs, OpenHow};
use crate::names::Rng;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use std::ffi::{CStr, CString};

/// What a volume is aged by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Random blocks of 4 KiB of 8 files that fill the volume, an fsync every so often
    Overwrite,
    /// Files created and removed, sizes and depths as of a profile, so that the volume stays as full
    Churn,
}

impl Kind {
    /// As the command line and tables call it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Overwrite => "overwrite",
            Self::Churn => "churn",
        }
    }
}

/// One operation, and so on. Between an unmount and a mount no file is open.
pub trait Load<F: Fs> {
    /// Makes files until so many bytes are taken: the bytes of those that were made, in blocks, and whether there was space
    /// for all.
    ///
    /// # Errors
    /// Of an operation, other than that there is no space.
    fn fill(&mut self, fs: &F, bytes: u64) -> Result<(u64, bool)>;
    /// Opens what stays open.
    ///
    /// # Errors
    /// Of an operation.
    fn open(&mut self, fs: &F) -> Result<()>;
    /// Closes the files that it has open.
    fn close(&mut self);
    /// An operation: the bytes that it wrote for its user.
    ///
    /// # Errors
    /// Of the operation. The next one is possible also after one that found no space.
    fn step(&mut self, fs: &F) -> Result<u64>;
    /// The files that there are.
    fn files(&self) -> Vec<CString>;
}

/// Bytes of a block, of which a file takes whole ones.
const BLOCK: u64 = 4096;
/// Bytes written at once where a file is made.
const PIECE: usize = 1 << 20;

/// Bytes that look random: a file system that compresses or knows zeros gains nothing.
fn noise(rng: &mut Rng, bytes: usize) -> Vec<u8> {
    (0..bytes / 8).flat_map(|_| rng.draw().to_le_bytes()).collect()
}

fn path(text: String) -> CString {
    CString::new(text).unwrap_or_else(|_| unreachable!("made of format strings and numbers"))
}

fn write<F: Fs>(fs: &F, file: &F::File, path: &CStr, bytes: u64, data: &[u8]) -> Result<()> {
    let mut done = 0;
    while done < bytes {
        let n = (bytes - done).min(data.len() as u64);
        fs.write_all(file, done, &data[..n as usize]).on("pwrite", path)?;
        done += n;
    }
    Ok(())
}

/// Random blocks of a few files.
pub struct Overwrites<F: Fs> {
    rng: Rng,
    data: Vec<u8>,
    /// Writes per fsync.
    every: u64,
    /// Writes since the last one.
    since: u64,
    /// Of each file.
    blocks: u64,
    paths: Vec<CString>,
    open: Vec<F::File>,
}

/// Files of [`Overwrites`].
const FILES: u64 = 8;

impl<F: Fs> Overwrites<F> {
    /// With an fsync after every so many writes.
    pub fn new(seed: u64, every: u64) -> Self {
        let mut rng = Rng::new(seed, 0);
        let data = noise(&mut rng, PIECE);
        Self { rng, data, every, since: 0, blocks: 0, paths: Vec::new(), open: Vec::new() }
    }
}

impl<F: Fs> Load<F> for Overwrites<F> {
    fn fill(&mut self, fs: &F, bytes: u64) -> Result<(u64, bool)> {
        self.blocks = (bytes / FILES / BLOCK).max(1);
        let mut done = 0;
        for f in 0..FILES {
            let path = path(format!("file{f}"));
            let file = fs.open(&path, OpenHow::FRESH).on("open", &path)?;
            match write(fs, &file, &path, self.blocks * BLOCK, &self.data)
                .and_then(|()| fs.fsync(&file, false).on("fsync", &path))
            {
                Ok(()) => done += self.blocks * BLOCK,
                // there is less room than was offered: without this file
                Err(e) if e.no_space() => {
                    drop(file);
                    fs.unlink(&path).on("unlink", &path)?;
                    return Ok((done, false));
                }
                Err(e) => return Err(e),
            }
            self.paths.push(path);
        }
        Ok((done, true))
    }
    fn open(&mut self, fs: &F) -> Result<()> {
        self.open = self.paths.iter().map(|p| fs.open(p, OpenHow::WRITE).on("open", p)).collect::<Result<_>>()?;
        Ok(())
    }
    fn close(&mut self) {
        self.open.clear();
    }
    fn step(&mut self, fs: &F) -> Result<u64> {
        let f = self.rng.below(self.open.len() as u64) as usize;
        let (block, from) = (self.rng.below(self.blocks), self.rng.below((PIECE as u64) / BLOCK) * BLOCK);
        let Some((file, path)) = self.open.get(f).zip(self.paths.get(f)) else { return Ok(0) };
        let data = &self.data[from as usize..][..BLOCK as usize];
        fs.write_all(file, block * BLOCK, data).on("pwrite", path)?;
        self.since += 1;
        if self.since >= self.every {
            self.since = 0;
            fs.fsync(file, false).on("fsync", path)?;
        }
        Ok(BLOCK)
    }
    fn files(&self) -> Vec<CString> {
        self.paths.clone()
    }
}

/// Files that come and go. Which goes is left to chance: every file is as likely, however old. (Geriatrix also gives files
/// the ages of its profile.)
pub struct Churn {
    rng: Rng,
    data: Vec<u8>,
    sizes: Vec<(u64, u32)>,
    /// Directories by depth.
    dirs: Vec<Vec<String>>,
    there: Vec<(CString, u64)>,
    /// Bytes of these, in blocks.
    used: u64,
    /// Bytes that are to be used.
    goal: u64,
    /// Of the next file.
    next: u64,
    /// Files made so far.
    made: u64,
    /// A file has to go first: there was no space.
    short: bool,
}

impl Churn {
    /// With files of at most `largest` bytes.
    pub fn new(seed: u64, profile: Profile, largest: u64) -> Self {
        let mut rng = Rng::new(seed, 1);
        let data = noise(&mut rng, PIECE);
        let sizes = profile.up_to(largest);
        let mut new = Self {
            rng,
            data,
            sizes,
            dirs: Vec::new(),
            there: Vec::new(),
            used: 0,
            goal: 0,
            next: 0,
            made: 0,
            short: false,
        };
        new.next = new.size();
        new
    }

    fn size(&mut self) -> u64 {
        draw(&mut self.rng, &self.sizes, |s| s.1).map_or(0, |s| s.0)
    }

    /// Directories of each depth side by side; the first of each holds those of the next.
    fn make_dirs<F: Fs>(&mut self, fs: &F) -> Result<()> {
        let mut above = String::new();
        for (depth, _, width) in DEPTHS {
            let here: Vec<String> = (0..width).map(|i| format!("{above}d{depth}-{i}/")).collect();
            for dir in &here {
                let dir = path(dir.trim_end_matches('/').to_owned());
                fs.mkdir(&dir, 0o755).on("mkdir", &dir)?;
            }
            above.clone_from(&here[0]);
            self.dirs.push(here);
        }
        Ok(())
    }

    fn create<F: Fs>(&mut self, fs: &F) -> Result<u64> {
        let bytes = self.next;
        self.next = self.size();
        let depth = draw(&mut self.rng, &DEPTHS, |d| d.1).map_or(0, |d| d.0 as usize - 1);
        let dirs = &self.dirs[depth];
        let dir = &dirs[self.rng.below(dirs.len() as u64) as usize];
        let path = path(format!("{dir}f{}", self.made));
        self.made += 1;
        let file = fs.open(&path, OpenHow::FRESH).on("open", &path)?;
        let written = write(fs, &file, &path, bytes, &self.data);
        drop(file);
        let taken = bytes.next_multiple_of(BLOCK);
        self.used += taken;
        self.there.push((path, taken));
        written.map(|()| bytes)
    }

    fn remove<F: Fs>(&mut self, fs: &F) -> Result<()> {
        if self.there.is_empty() {
            return Ok(());
        }
        let at = self.rng.below(self.there.len() as u64) as usize;
        let (path, taken) = &self.there[at];
        fs.unlink(path).on("unlink", path)?;
        self.used -= taken;
        self.there.swap_remove(at);
        Ok(())
    }
}

impl<F: Fs> Load<F> for Churn {
    fn fill(&mut self, fs: &F, bytes: u64) -> Result<(u64, bool)> {
        self.goal = bytes;
        self.make_dirs(fs)?;
        while self.used + self.next <= self.goal {
            match self.create(fs) {
                Ok(_) => {}
                // there is less room than was offered: without the last file
                Err(e) if e.no_space() => {
                    if let Some((path, taken)) = self.there.pop() {
                        self.used -= taken;
                        fs.unlink(&path).on("unlink", &path)?;
                    }
                    self.goal = self.used;
                    return Ok((self.used, false));
                }
                Err(e) => return Err(e),
            }
        }
        Ok((self.used, true))
    }
    fn open(&mut self, _: &F) -> Result<()> {
        Ok(())
    }
    fn close(&mut self) {}
    fn step(&mut self, fs: &F) -> Result<u64> {
        if self.short || (self.used + self.next > self.goal && !self.there.is_empty()) {
            self.remove(fs)?;
            self.short = false;
            return Ok(0);
        }
        let done = self.create(fs);
        self.short = done.is_err();
        done
    }
    fn files(&self) -> Vec<CString> {
        self.there.iter().map(|f| f.0.clone()).collect()
    }
}
