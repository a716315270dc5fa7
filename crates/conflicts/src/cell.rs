//! One cell of the matrix: a test of the suite with so many workers, on a volume of its own.
//!
//! Workers are threads that run strictly in turn, one step each, so that a run does not depend on scheduling. Phases: the
//! load's set-up; a warm-up, which brings lines to where they lie in the long run; the foreground window, in which only
//! the load runs; and the commit window, in which another thread on a virtual CPU of its own commits all domains twice, the
//! second time with a checkpoint.

use crate::client::{self, Count};
use crate::matrix::{CellId, Domains};
use crate::turns::Member;
use crate::{Error, Result};
use braidfs::{Cred, DomainId, MkfsOptions, MountOptions, Volume, mkfs};
use braidfs_device::{Device, FileDevice, OpenHow};
use braidfs_vfs::Library;
use fxmark::suite::{TestId, build};
use fxmark::worker::{Aged, Ctx, Load, Mode, Scale, Sizes, Step};
use std::path::Path;
use std::sync::Arc;

/// Bytes of the image at least, which is sparse.
const IMAGE_BYTES: u64 = 4 << 30;
/// And for each domain: where one has so little that its free blocks are counted one by one, its threads share that.
const DOMAIN_BYTES: u64 = 1 << 30;
/// Memory for pages and cells: all tests fit.
const CACHE_BYTES: u64 = 1 << 30;
/// Sizes of the set-up: no test runs out of files within a cell.
const SCALE: Scale = Scale { files: 1024, entries: 128, blocks: 1024, branch: 4, aged: Aged::SMALL, sizes: Sizes::OWN };
/// Steps between refills of a worker that the sizes must allow beyond its windows: warm-up, and what a test starts with.
const MARGIN: u64 = 256;
const SEED: u64 = 42;
/// Commits in the commit window.
const COMMITS: usize = 2;
/// Least steps of a window: some before, between and after the commits.
pub const WINDOW_MIN: usize = COMMITS + 1;

/// How many times each worker takes its turn.
#[derive(Debug, Clone, Copy)]
struct Rounds {
    warm: usize,
    window: usize,
}

impl Rounds {
    fn of(test: &str, window: Option<usize>) -> Self {
        let usual = match test {
            // a step lists a whole directory
            "MRDL" | "MRDM" => Self { warm: 8, window: 16 },
            // any of 1,024 files: each worker has opened nearly all of them
            "MRPM" => Self { warm: 8192, window: 128 },
            _ => Self { warm: 64, window: 128 },
        };
        Self { window: window.unwrap_or(usual.window), ..usual }
    }

    /// Sizes that no worker uses up.
    fn scale(self) -> Scale {
        let steps = 2 * self.window as u64 + MARGIN;
        Scale { files: SCALE.files.max(steps), blocks: SCALE.blocks.max(steps), ..SCALE }
    }
}

/// What a cell did, beside what the tool reports.
#[derive(Debug, Clone, Copy, Default, serde::Serialize, serde::Deserialize)]
pub struct Done {
    /// Operations in the foreground window (a listing counts entries, as in the suite).
    pub foreground: u64,
    /// Operations in the commit window.
    pub commit: u64,
    /// Commits in it, of all domains together.
    pub commits: u64,
}

/// Runs a cell, with windows of so many steps for each worker or as many as is usual, in the working directory, which gets
/// the tool's reports `foreground` and `commit`, and `done`.
///
/// # Errors
/// The first operation that failed.
pub fn run(id: &CellId, window: Option<usize>) -> Result<()> {
    // one more for commits
    client::machine(id.workers + 1);
    let test: TestId = id.test.parse()?;
    let fs = Arc::new(mount(id)?);

    let rounds = Rounds::of(test.test.name, window);
    let team = Team::start(&test, id.workers, rounds.scale(), &fs)?;
    for order in [Order::Share, Order::Prepare, Order::AfterPrepare] {
        team.all(order)?;
    }
    fs.volume.sync()?;
    for _ in 0..rounds.warm {
        team.round(Count::Not)?;
    }

    let mut done = Done::default();
    client::clear();
    for _ in 0..rounds.window {
        done.foreground += team.round(Count::Foreground)?;
    }
    client::report(c"foreground");

    client::clear();
    for r in 0..rounds.window {
        done.commit += team.round(Count::Foreground)?;
        if (r + 1) % (rounds.window / (COMMITS + 1)) == 0 && done.commits < COMMITS as u64 {
            done.commits += 1;
            let checkpoint = done.commits == COMMITS as u64;
            team.commit(checkpoint)?;
        }
    }
    client::report(c"commit");

    let path = Path::new("done");
    std::fs::write(path, serde_json::to_vec(&done)?).map_err(|e| Error::io(path, e))?;
    team.end()?;
    let fs = Arc::into_inner(fs).ok_or(Error::Died)?;
    fs.volume.unmount()?;
    Ok(())
}

/// Makes the volume of a cell in the working directory, and mounts it. Its image has no name then, and goes with the process.
///
/// # Errors
/// Of the file, or of the volume.
pub fn mount(id: &CellId) -> Result<Library> {
    let domains = match id.domains {
        Domains::One => 1,
        // and one for what they share
        Domains::Each => id.workers as u16 + 1,
    };
    let image = Path::new("image");
    let bytes = IMAGE_BYTES.max(DOMAIN_BYTES * u64::from(domains));
    drop(FileDevice::create(image, bytes).map_err(|e| Error::Cell(e.to_string()))?);
    let how = OpenHow { write: true, direct: true };
    let device: Arc<dyn Device> = Arc::new(FileDevice::open(image, how).map_err(|e| Error::Cell(e.to_string()))?);
    let format = MkfsOptions { domains: Some(domains), ..MkfsOptions::default() };
    mkfs::format(std::slice::from_ref(&device), &format)?;
    // what works in the background by the clock would come at another moment each time
    let options = MountOptions { background: false, serial: true, cache_bytes: CACHE_BYTES, ..MountOptions::default() };
    let volume = Volume::mount(vec![device], options)?;
    std::fs::remove_file(image).map_err(|e| Error::io(image, e))?;
    Ok(Library { volume, cred: Cred::root(), umask: 0 })
}

/// What a load of worker `id` of `workers` knows.
pub fn context(fs: &Arc<Library>, (id, workers): (usize, usize), scale: Scale) -> Ctx<Library> {
    Ctx {
        fs: Arc::clone(fs),
        id,
        foreground: workers,
        workers,
        background: false,
        leads: id == 0,
        mode: Mode::Corrected,
        direct: false,
        scale,
        prefix: String::new(),
        seed: SEED,
        seconds: 0.0,
    }
}

#[derive(Debug, Clone, Copy)]
enum Order {
    Share,
    Prepare,
    AfterPrepare,
    Step(Count),
    Commit { checkpoint: bool },
}

struct Team {
    workers: Vec<Member<Order>>,
    committer: Member<Order>,
}

impl Team {
    fn start(test: &TestId, workers: usize, scale: Scale, fs: &Arc<Library>) -> Result<Self> {
        let one = |id| {
            let context = context(fs, (id, workers), scale);
            let test = *test;
            Member::start(move || {
                let mut load = build::<Library>(&test, &context);
                move |order| obey(&context, &mut *load, order)
            })
        };
        let workers_started = (0..workers).map(one).collect::<Result<_>>()?;
        let fs = Arc::clone(fs);
        let committer = Member::start(move || {
            move |order| {
                if let Order::Commit { checkpoint } = order {
                    client::operation(workers, Count::Background, || commit(&fs.volume, checkpoint))?;
                }
                Ok(0)
            }
        })?;
        Ok(Self { workers: workers_started, committer })
    }
    fn all(&self, order: Order) -> Result<u64> {
        self.workers.iter().map(|w| w.tell(order)).sum()
    }
    fn round(&self, count: Count) -> Result<u64> {
        self.all(Order::Step(count))
    }
    fn commit(&self, checkpoint: bool) -> Result<()> {
        self.committer.tell(Order::Commit { checkpoint }).map(drop)
    }
    fn end(self) -> Result<()> {
        self.workers.into_iter().chain([self.committer]).try_for_each(Member::end)
    }
}

fn commit(volume: &Volume, checkpoint: bool) -> Result<()> {
    for d in 0..volume.domains().len() {
        volume.commit_domain(DomainId(d as u16), checkpoint)?;
    }
    Ok(())
}

fn obey(c: &Ctx<Library>, load: &mut dyn Load<Library>, order: Order) -> Result<u64> {
    match order {
        Order::Share if c.id == 0 => load.share(c)?,
        Order::Share | Order::Commit { .. } => {}
        Order::Prepare => load.prepare(c)?,
        Order::AfterPrepare => load.after_prepare(c)?,
        Order::Step(count) => {
            return match client::operation(c.id, count, || load.step(c))? {
                Step::Did(n) => Ok(n),
                Step::Empty => Err(Error::Cell("the test ran out of files: SCALE is too small for its rounds".into())),
            };
        }
    }
    Ok(0)
}
