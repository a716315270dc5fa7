//! Workers: pinned processes (threads for a library in process), each with one load.
//!
//! A host process gets its [`Spec`] on standard input and answers with one [`Answer`]. It is killed with its parent.
//! The coordinator's side is in [`crate::run`].

mod control;
mod host;
mod turn;

pub use control::{Control, Order, Shared, WORKERS_MAX};
pub use host::main;

use crate::fs::Fs;
use crate::results::LockWait;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::sync::Arc;

/// How the tests are set up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum, Default)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// As the paper's Table 2 says, with bounded set-up; latencies; any error is fatal
    #[default]
    Corrected,
    /// As the original program does it: for comparing with its figures
    Original,
}

/// Sizes of the set-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Scale {
    /// Files of a worker in tests that create, remove or rename.
    pub files: u64,
    /// Entries of a directory that is listed.
    pub entries: u64,
    /// Blocks of 4 KiB of a file that is appended to or truncated.
    pub blocks: u64,
    /// Subdirectories and files of each directory in the five-level tree.
    pub branch: u64,
    /// How the files of `aged_overwrite` are aged.
    #[serde(default)]
    pub aged: Aged,
    /// What the user asked for in place of a test's own sizes.
    #[serde(default)]
    pub sizes: Sizes,
}

impl Scale {
    /// Files that a worker makes before it begins again: fewer where they are large, so that all workers' take no more than a
    /// quarter of a file system of `bytes` bytes.
    #[must_use]
    pub fn files_of(&self, sizes: Sizes, bytes: u64, workers: usize) -> u64 {
        if sizes.file == 0 {
            return self.files;
        }
        self.files.min(bytes / 4 / workers.max(1) as u64 / sizes.file).max(1)
    }
}

/// Sizes in place of a test's own; 0: its own.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sizes {
    /// Bytes of a file of `kfsmark` and of the tests that write one file.
    pub file: u64,
    /// Bytes of one of their requests.
    pub request: u64,
    /// Percent of the file system that `varmail` and `fileserver` fill and overwrite before they begin.
    pub full: u64,
}

impl Sizes {
    /// Each test's own.
    pub const OWN: Self = Self { file: 0, request: 0, full: 0 };

    /// The size of a file, or the test's own.
    pub fn file_or(self, own: u64) -> u64 {
        if self.file > 0 { self.file } else { own }
    }
    /// The size of a request, or the test's own; no larger than a file.
    pub fn request_or(self, own: u64) -> u64 {
        if self.request > 0 { self.request } else { own }
    }
}

/// How files are aged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Aged {
    /// Bytes of all files together; 0: [`Scale::blocks`] blocks.
    pub bytes: u64,
    /// Writes per fsync.
    pub every: u64,
    /// Files get the flag NOCOW (`chattr +C`) where there is one.
    pub nocow: bool,
}

impl Aged {
    /// Small files, an fsync every 100 writes.
    pub const SMALL: Self = Self { bytes: 0, every: 100, nocow: false };
}

impl Default for Aged {
    fn default() -> Self {
        Self::SMALL
    }
}

/// Where the test is.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Place {
    /// A directory of a mounted file system.
    Dir(PathBuf),
    /// A braidfs volume, mounted in the worker's process.
    Library(PathBuf),
}

/// What one host process does.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Spec {
    /// The test, by its name.
    pub test: String,
    /// Which file system, and where in it.
    pub place: Place,
    /// How the tests are set up.
    pub mode: Mode,
    /// How large the files and trees are.
    pub scale: Scale,
    /// Of random numbers.
    pub seed: u64,
    /// Length of the measurement: the original prepares some tests for as long.
    pub seconds: f64,
    /// Foreground workers of the whole cell.
    pub foreground: usize,
    /// All workers of the whole cell.
    pub workers: usize,
    /// File systems that the workers are divided over; worker `n` is on that of number `n` modulo this.
    pub parts: usize,
    /// Is the library mounted with `data=journal`?
    pub journal: bool,
    /// Those of this process: number and CPU.
    pub mine: Vec<(usize, usize)>,
    /// Descriptor of the control memory.
    pub control_fd: i32,
}

/// What one worker did while it was measured.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Report {
    /// Number of the worker.
    pub id: usize,
    /// Is it in the background?
    pub background: bool,
    /// Operations that were completed.
    pub ops: u64,
    /// In this time.
    pub secs: f64,
    /// One in so many operations was timed; 0: none.
    pub sampled: u64,
    /// Latencies: nanoseconds, and how many operations took so long.
    pub latency: Vec<(u64, u64)>,
    /// Times that the worker slept.
    pub voluntary: u64,
    /// Times that it was preempted.
    pub involuntary: u64,
    /// Page faults that needed I/O.
    pub major_faults: u64,
    /// What all threads of the process waited for locks; of the worker that leads.
    pub lock_waits: Vec<LockWait>,
}

/// What a host process answers.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// All its workers are through.
    Done(Vec<Report>),
    /// The file system cannot do what the test needs.
    Unsupported(String),
    /// An operation failed.
    Failed(String),
}

/// What a load knows about its worker.
#[derive(Debug)]
pub struct Ctx<F: Fs> {
    /// The file system.
    pub fs: Arc<F>,
    /// This worker, from 0.
    pub id: usize,
    /// Foreground workers of the whole cell.
    pub foreground: usize,
    /// All workers of the whole cell.
    pub workers: usize,
    /// Is this one in the background?
    pub background: bool,
    /// The first of its file system: makes what all on it use.
    pub leads: bool,
    /// How the tests are set up.
    pub mode: Mode,
    /// Open files with O_DIRECT?
    pub direct: bool,
    /// How large the files and trees are.
    pub scale: Scale,
    /// Before every path: empty, or the directory with a `/`.
    pub prefix: String,
    /// Of random numbers.
    pub seed: u64,
    /// Length of the measurement.
    pub seconds: f64,
}

impl<F: Fs> Ctx<F> {
    /// As the original program?
    pub fn original(&self) -> bool {
        self.mode == Mode::Original
    }
    /// A path buffer.
    pub fn name(&self) -> crate::names::Name {
        crate::names::Name::new(&self.prefix)
    }
    /// Random numbers of this worker.
    pub fn rng(&self) -> crate::names::Rng {
        crate::names::Rng::new(self.seed, self.id)
    }
}

/// What a step of a load did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// So many operations.
    Did(u64),
    /// None: what was prepared is used up.
    Empty,
}

/// What a worker does, step by step.
#[allow(clippy::missing_errors_doc)] // the first failed operation, always
pub trait Load<F: Fs> {
    /// Only the first worker of a file system, before all others: what all use.
    fn share(&mut self, _: &Ctx<F>) -> crate::Result<()> {
        Ok(())
    }
    /// Its own files.
    fn prepare(&mut self, c: &Ctx<F>) -> crate::Result<()>;
    /// When all are prepared.
    fn after_prepare(&mut self, _: &Ctx<F>) -> crate::Result<()> {
        Ok(())
    }
    /// The operation under test.
    fn step(&mut self, c: &Ctx<F>) -> crate::Result<Step>;
    /// Makes again what steps used up; not timed.
    fn refill(&mut self, _: &Ctx<F>) -> crate::Result<()> {
        Ok(())
    }
    /// Does running out end the others' measurement, too?
    fn empty_ends_all(&self, c: &Ctx<F>) -> bool {
        !c.original()
    }
}
