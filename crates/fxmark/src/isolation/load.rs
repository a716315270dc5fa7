//! What the two do: the victim's transactions, and the loads of its neighbour.

use crate::error::On;
use crate::fs::Fs;
use crate::names::Rng;
use crate::{Error, Result, sys};
use braidfs_vfs::OpenHow;
use serde::{Deserialize, Serialize};
use std::ffi::{CStr, CString};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const BLOCK: u64 = 4096;
/// Blocks that a transaction reads.
const READS: u64 = 4;
/// Files of a directory of those that only make them, and how many there are before they are removed.
const PER_DIR: u64 = 1000;
const FILES_MAX: u64 = 20_000;
const PIECE: usize = 1 << 20;

/// What a neighbour does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Flood {
    /// Makes empty files; 20000 of them are removed again.
    Create,
    /// Writes a file from its start to its end, again and again.
    Stream,
    /// Overwrites 4 KiB and syncs them.
    Fsync,
    /// Fills all the space that it may have with files of 1 MiB, removes them, and begins again.
    Fill,
    /// Reads all that it has, again and again.
    Read,
}

impl Flood {
    /// As the command line has it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Create => "create",
            Self::Stream => "stream",
            Self::Fsync => "fsync",
            Self::Fill => "fill",
            Self::Read => "read",
        }
    }
}

/// What a neighbour did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Flooded {
    /// Files, writes with fsync, or pieces of 1 MiB.
    pub ops: u64,
    /// Bytes of data that it wrote.
    pub bytes: u64,
    /// How long it worked.
    pub seconds: f64,
    /// How often it found no space.
    pub full: u64,
}

fn path(text: &str) -> CString {
    // names of ours have no zeros
    CString::new(text).unwrap_or_default()
}

fn is_full(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// Does `flood` in directory `dir` until told to stop; `bytes`: of its files. `ready` is called when it begins.
///
/// # Errors
/// A failed operation other than that there is no space, which is no failure of who fills.
pub fn flood<F: Fs>(
    fs: &F,
    (dir, flood, bytes): (&str, Flood, u64),
    ready: impl FnOnce(),
    stop: &AtomicBool,
) -> Result<Flooded> {
    let data = noise(PIECE);
    let file = path(&format!("{dir}/flood"));
    let open = |how| fs.open(&file, how).on("open", &file);
    let whole = |f: &F::File| -> Result<()> {
        (0..bytes.div_ceil(PIECE as u64)).try_for_each(|n| fs.write_all(f, n * PIECE as u64, &data).on("pwrite", &file))
    };
    let mut buf = vec![0; PIECE];
    let mut prepared = None;
    if matches!(flood, Flood::Fsync | Flood::Read) {
        let f = open(OpenHow::CREATE)?;
        whole(&f)?;
        fs.fsync(&f, false).on("fsync", &file)?;
        prepared = Some(f);
    }
    ready();
    let (begun, mut done, mut rng) = (Instant::now(), Flooded::default(), Rng::new(11, 1));
    let goes_on = || !stop.load(Ordering::Relaxed);
    match flood {
        Flood::Create => {
            let dir_of = |n: u64| path(&format!("{dir}/d{}", n / PER_DIR));
            let name = |n: u64| path(&format!("{dir}/d{}/f{}", n / PER_DIR, n % PER_DIR));
            let mut n = 0;
            while goes_on() {
                if n % PER_DIR == 0 {
                    let d = dir_of(n);
                    fs.ensure_dir(&d).on("mkdir", &d)?;
                }
                let at = name(n);
                fs.open(&at, OpenHow::FRESH).on("creat", &at)?;
                (n, done.ops) = (n + 1, done.ops + 1);
                if n == FILES_MAX {
                    while n > 0 && goes_on() {
                        n -= 1;
                        let at = name(n);
                        fs.unlink(&at).on("unlink", &at)?;
                    }
                }
            }
        }
        Flood::Stream => {
            while goes_on() {
                let f = open(OpenHow { truncate: true, ..OpenHow::CREATE })?;
                let mut at = 0;
                while at < bytes && goes_on() {
                    fs.write_all(&f, at, &data).on("pwrite", &file)?;
                    at += PIECE as u64;
                    (done.ops, done.bytes) = (done.ops + 1, done.bytes + PIECE as u64);
                }
            }
        }
        Flood::Fsync => {
            let f = prepared.map_or_else(|| open(OpenHow::WRITE), Ok)?;
            while goes_on() {
                let at = rng.below((bytes / BLOCK).max(1)) * BLOCK;
                fs.write_all(&f, at, &data[..BLOCK as usize]).on("pwrite", &file)?;
                fs.fsync(&f, true).on("fdatasync", &file)?;
                (done.ops, done.bytes) = (done.ops + 1, done.bytes + BLOCK);
            }
        }
        Flood::Fill => {
            while goes_on() {
                let mut n = 0;
                while goes_on() {
                    let at = path(&format!("{dir}/fill{n}"));
                    n += 1;
                    match fs.open(&at, OpenHow::CREATE).and_then(|f| fs.write_all(&f, 0, &data)) {
                        Ok(()) => (done.ops, done.bytes) = (done.ops + 1, done.bytes + PIECE as u64),
                        Err(e) if is_full(&e) => break,
                        Err(e) => return Err(e).on("pwrite", &at),
                    }
                }
                done.full += u64::from(goes_on());
                for n in 0..n {
                    let at = path(&format!("{dir}/fill{n}"));
                    match fs.unlink(&at) {
                        // it was the one that found no space
                        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                        unlinked => unlinked.on("unlink", &at)?,
                    }
                }
            }
        }
        Flood::Read => {
            let f = prepared.map_or_else(|| open(OpenHow::READ), Ok)?;
            while goes_on() {
                let mut at = 0;
                while at < bytes && goes_on() {
                    let n = fs.read(&f, at, &mut buf).on("pread", &file)?;
                    at += PIECE as u64;
                    (done.ops, done.bytes) = (done.ops + 1, done.bytes + n as u64);
                }
            }
        }
    }
    done.seconds = begun.elapsed().as_secs_f64();
    Ok(done)
}

/// Bytes that do not compress to nothing.
fn noise(n: usize) -> Vec<u8> {
    let mut rng = Rng::new(7, 0);
    let mut bytes = vec![0; n];
    bytes.chunks_exact_mut(8).for_each(|c| c.copy_from_slice(&rng.draw().to_le_bytes()));
    bytes
}

/// The victim: a transaction reads four blocks of its file at random, overwrites one and syncs it. (The thesis has TPC-W,
/// which "uses cache memory for reads and issues many synchronous writes with small request sizes".)
pub struct Victim<'f, F: Fs> {
    fs: &'f F,
    file: F::File,
    name: CString,
    blocks: u64,
    rng: Rng,
    page: Vec<u8>,
    buf: Vec<u8>,
}

/// What a victim saw.
#[derive(Debug, Clone, Default)]
pub struct Seen {
    /// From when a transaction was to begin until it was done, nanoseconds, rising.
    pub latencies: Vec<u64>,
    /// How long it worked.
    pub seconds: f64,
    /// Of that, how long the machine stood still; none where nobody could tell.
    pub paused: Option<f64>,
}

impl Seen {
    /// Transactions a second.
    pub fn rate(&self) -> f64 {
        self.latencies.len() as f64 / self.seconds.max(1e-9)
    }

    /// Microseconds that a part `q` did not take longer than.
    pub fn quantile(&self, q: f64) -> f64 {
        let Some(last) = self.latencies.len().checked_sub(1) else { return 0.0 };
        self.latencies[((last as f64 * q).ceil() as usize).min(last)] as f64 / 1000.0
    }
}

impl<'f, F: Fs> Victim<'f, F> {
    /// With a file of so many bytes in directory `dir`, which is written and synced.
    ///
    /// # Errors
    /// A failed operation.
    pub fn new(fs: &'f F, dir: &str, bytes: u64) -> Result<Self> {
        let name = path(&format!("{dir}/victim"));
        let file = fs.open(&name, OpenHow::CREATE).on("open", &name)?;
        let (page, blocks) = (noise(PIECE), (bytes / BLOCK).max(1));
        let mut at = 0;
        while at < blocks * BLOCK {
            let n = (blocks * BLOCK - at).min(PIECE as u64);
            fs.write_all(&file, at, &page[..n as usize]).on("pwrite", &name)?;
            at += n;
        }
        fs.fsync(&file, false).on("fsync", &name)?;
        Ok(Self { fs, file, name, blocks, rng: Rng::new(3, 0), page, buf: vec![0; BLOCK as usize] })
    }

    fn transaction(&mut self) -> Result<()> {
        for _ in 0..READS {
            let at = self.rng.below(self.blocks) * BLOCK;
            self.fs.read_exact(&self.file, at, &mut self.buf).on("pread", &self.name)?;
        }
        let at = self.rng.below(self.blocks) * BLOCK;
        self.fs.write_all(&self.file, at, &self.page[..BLOCK as usize]).on("pwrite", &self.name)?;
        self.fs.fsync(&self.file, true).on("fdatasync", &self.name)
    }

    /// Runs one transaction after the other (`rate` 0), or `rate` a second: each has a time at which it begins, and one
    /// that begins late counts from then, as it does for who asked for it. `warm_up` is not counted. Pauses of the machine
    /// are looked for on `cpus`.
    ///
    /// # Errors
    /// A failed operation; interrupted.
    pub fn run(
        &mut self,
        rate: f64,
        (warm_up, seconds): (f64, f64),
        cpus: &[usize],
        stop: &AtomicBool,
    ) -> Result<Seen> {
        self.phase(rate, warm_up, stop)?;
        // without the right to it, nobody watches
        let watch = sys::PauseWatch::begin(cpus).ok();
        let mut seen = self.phase(rate, seconds, stop)?;
        seen.paused = watch.map(|w| w.end().as_secs_f64());
        seen.latencies.sort_unstable();
        Ok(seen)
    }

    fn phase(&mut self, rate: f64, seconds: f64, stop: &AtomicBool) -> Result<Seen> {
        let (begun, mut latencies) = (Instant::now(), Vec::new());
        for n in 0u64.. {
            if stop.load(Ordering::Relaxed) {
                return Err(Error::Interrupted);
            }
            let now = begun.elapsed();
            let due = if rate > 0.0 { Duration::from_secs_f64(n as f64 / rate) } else { now };
            if due.max(now).as_secs_f64() >= seconds {
                break;
            }
            if let Some(pause) = due.checked_sub(now) {
                std::thread::sleep(pause);
            }
            self.transaction()?;
            latencies.push(u64::try_from((begun.elapsed().saturating_sub(due)).as_nanos()).unwrap_or(u64::MAX));
        }
        Ok(Seen { latencies, seconds: begun.elapsed().as_secs_f64().max(seconds), paused: None })
    }

    /// The name of its file.
    pub fn name(&self) -> &CStr {
        &self.name
    }
}
