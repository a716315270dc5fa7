//! The matrix: which cells there are, and what was found in each.

use crate::report::Window;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::Path;

/// Numbers of workers.
pub const WORKERS: [usize; 5] = [2, 4, 8, 16, 32];

/// Steps of each worker in the windows of [`LONG_CELLS`]: a commit comes after 2,730 of them. With 32 workers who do a million
/// operations a second together, each does 156,250 in the five seconds between two commits.
pub const LONG: usize = 8192;

/// Cells with long windows, in which what commits hand over weighs less, as it does in use. Tests and numbers of workers, with
/// one domain.
pub const LONG_CELLS: [(&str, usize); 6] =
    [("DRBM", 8), ("DWOL", 2), ("DWOL", 8), ("DWOL", 16), ("DWOM", 8), ("MRPH", 8)];

/// How many domains the volume has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Domains {
    /// One for all workers (`--domains 1`).
    One,
    /// One for each worker's own directory, and one for what they share.
    Each,
}

impl Domains {
    /// Both, in the order of the tables.
    pub const ALL: [Self; 2] = [Self::One, Self::Each];

    /// As it is written on command lines and in files.
    pub fn name(self) -> &'static str {
        match self {
            Self::One => "one",
            Self::Each => "each",
        }
    }
}

/// Which cell of the matrix: a test, with how many workers, on how many domains.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct CellId {
    /// Test of the suite, such as `MWCL`.
    pub test: String,
    /// Number of threads that work at once.
    pub workers: usize,
    /// One domain for all of them, or one each.
    pub domains: Domains,
    /// Steps of each worker in a window, where they are not as many as is usual.
    #[serde(default)]
    pub window: Option<usize>,
}

impl CellId {
    /// A cell with windows as they are usual.
    pub fn usual(test: impl Into<String>, workers: usize, domains: Domains) -> Self {
        Self { test: test.into(), workers, domains, window: None }
    }
    /// The cells with long windows.
    pub fn long() -> impl Iterator<Item = Self> {
        let long = |(test, workers)| Self { window: Some(LONG), ..Self::usual(test, workers, Domains::One) };
        LONG_CELLS.into_iter().map(long)
    }
}

impl fmt::Display for CellId {
    /// A window that is not the usual one as `x4096`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.test, self.workers, self.domains.name())?;
        self.window.map_or(Ok(()), |w| write!(f, " x{w}"))
    }
}

impl std::str::FromStr for CellId {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        let mut words = text.split_whitespace();
        let mut read = || {
            let (test, workers, domains) = (words.next()?, words.next()?, words.next()?);
            let domains = Domains::ALL.into_iter().find(|d| d.name() == domains)?;
            let window = words.next().and_then(|w| w.strip_prefix('x')?.parse().ok());
            Some(Self { test: test.into(), workers: workers.parse().ok()?, domains, window })
        };
        read().ok_or_else(|| Error::Cell(format!("`{text}` is no cell")))
    }
}

/// What was found in a cell.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Cell {
    /// Which cell it is.
    pub id: CellId,
    /// Only the test's operations.
    pub foreground: Window,
    /// The same with commits beside them.
    pub commit: Window,
}

/// The windows of a cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WindowKind {
    /// That of [`Cell::foreground`].
    Foreground,
    /// That of [`Cell::commit`].
    Commit,
}

impl WindowKind {
    /// Both, in the order of the tables.
    pub const ALL: [Self; 2] = [Self::Foreground, Self::Commit];

    /// As it is written in files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Foreground => "foreground",
            Self::Commit => "commit",
        }
    }
}

impl Cell {
    /// Transfers that one commit of all domains costs one worker, beyond those that its operations have anyway.
    pub fn per_commit(&self) -> f64 {
        let more = (self.commit.transfers - self.foreground.transfers) * self.commit.ops as f64;
        more / (self.commit.commits.max(1) * self.id.workers as u64) as f64
    }
    /// The window of that kind.
    pub fn window(&self, kind: WindowKind) -> &Window {
        match kind {
            WindowKind::Foreground => &self.foreground,
            WindowKind::Commit => &self.commit,
        }
    }
}

/// What a run writes.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Matrix {
    /// Version of this structure.
    pub version: u32,
    /// What was found, cell by cell.
    pub cells: Vec<Cell>,
}

impl Matrix {
    /// The [`Matrix::version`] that this program writes and reads.
    pub const VERSION: u32 = 1;

    /// Reads what a run wrote.
    ///
    /// # Errors
    /// It cannot be read, or another version wrote it.
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read(path).map_err(|e| Error::io(path, e))?;
        let m: Self = serde_json::from_slice(&text)?;
        if m.version == Self::VERSION {
            Ok(m)
        } else {
            Err(Error::Cell(format!("{}: another version", path.display())))
        }
    }
    /// Tests, in their order.
    pub fn tests(&self) -> Vec<&str> {
        let mut tests: Vec<&str> = Vec::new();
        for c in &self.cells {
            if !tests.contains(&c.id.test.as_str()) {
                tests.push(&c.id.test);
            }
        }
        tests
    }
    /// A cell with the usual windows, if it ran.
    pub fn cell(&self, test: &str, workers: usize, domains: Domains) -> Option<&Cell> {
        let id = CellId::usual(test, workers, domains);
        self.cells.iter().find(|c| c.id == id)
    }
}
