//! Library speed: the same operations on every subject, in rounds A B C A B C, so that whatever disturbs the machine
//! disturbs all of them. Medians over the rounds, with the range; ratios of medians.
//!
//! Every thread works in a directory, or on a file, of its own. Paths are built beforehand. A subject is synced after
//! each of its turns, outside the clock, so that its writeback does not run into the next one's turn.

use crate::subject::{Library, Mounted, Subject};
use crate::table::Table;
use crate::{Error, Result};
use braidfs::MountOptions;
use serde::Serialize;
use std::ffi::CString;
use std::path::Path;
use std::sync::Barrier;
use std::time::Instant;

/// Times faster than ext4 that the library has to be.
pub const GOAL_EXT4: f64 = 3.0;
/// And than tmpfs.
pub const GOAL_TMPFS: f64 = 1.0;

const BLOCK: usize = 4096;
/// Blocks of the file that reads and overwrites go to.
const FILE_BLOCKS: u64 = 1024;
/// Bytes of each file system.
const VOLUME_BYTES: u64 = 2 << 30;

/// What is timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verb {
    /// open(O_CREAT | O_EXCL) and close of a new empty file.
    Create,
    /// stat of all files, by path.
    Stat,
    /// open and close of all files.
    Open,
    /// stat of one file again and again: without cache misses.
    StatOne,
    /// open and close of one file again and again (FxMark's MRPL).
    OpenOne,
    /// Read of 4 KiB of a cached file, at random blocks.
    Read,
    /// Overwrite of 4 KiB, at random blocks.
    Overwrite,
    /// rename in one directory, to a name that is free.
    Rename,
    /// unlink.
    Unlink,
}

/// In the order in which a round runs them.
const VERBS: [Verb; 9] = [
    Verb::Create,
    Verb::Stat,
    Verb::Open,
    Verb::StatOne,
    Verb::OpenOne,
    Verb::Read,
    Verb::Overwrite,
    Verb::Rename,
    Verb::Unlink,
];

impl Verb {
    /// Operations of a thread's turn, of so many files. Those of one file are too short otherwise: two threads would hardly
    /// have begun beside each other.
    fn turn(self, files: usize) -> usize {
        match self {
            Verb::StatOne | Verb::OpenOne | Verb::Read | Verb::Overwrite => 10 * files,
            _ => files,
        }
    }
    fn name(self) -> &'static str {
        match self {
            Verb::Create => "create",
            Verb::Stat => "stat",
            Verb::Open => "open+close",
            Verb::StatOne => "stat (one)",
            Verb::OpenOne => "open+close (one)",
            Verb::Read => "read 4 KiB",
            Verb::Overwrite => "overwrite 4 KiB",
            Verb::Rename => "rename",
            Verb::Unlink => "unlink",
        }
    }
}

/// How much to do.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Rounds; medians are over these.
    pub rounds: usize,
    /// Files per thread, and operations per turn (ten times as many of those that need one file only).
    pub files: usize,
    /// Numbers of threads to try.
    pub threads: Vec<usize>,
    /// Only the library (for profiling).
    pub alone: bool,
    /// Only operations whose names begin like one of these (for profiling); all where there is none.
    pub verbs: Vec<String>,
}

impl Default for Plan {
    fn default() -> Self {
        Self { rounds: 5, files: 20_000, threads: vec![1, 2], alone: false, verbs: Vec::new() }
    }
}

/// Nanoseconds per operation, all threads together, by the clock; with the CPU time of the calling threads beside it,
/// which other work on the machine disturbs less.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Spread {
    /// Median of the rounds.
    pub median: f64,
    /// Fastest round.
    pub min: f64,
    /// Slowest round.
    pub max: f64,
    /// Median CPU time of an operation in its thread (user and kernel).
    pub cpu: f64,
}

impl Spread {
    fn of(turns: &[Turn]) -> Option<Self> {
        let sorted = |f: fn(&Turn) -> f64| {
            let mut v: Vec<f64> = turns.iter().map(f).collect();
            v.sort_by(f64::total_cmp);
            v
        };
        let median = |v: &[f64]| (v[(v.len() - 1) / 2] + v[v.len() / 2]) / 2.0;
        let (wall, cpu) = (sorted(|t| t.wall), sorted(|t| t.cpu));
        let (min, max) = (*wall.first()?, *wall.last()?);
        Some(Self { median: median(&wall), min, max, cpu: median(&cpu) })
    }
}

/// Nanoseconds per operation of one turn.
#[derive(Debug, Clone, Copy)]
struct Turn {
    wall: f64,
    cpu: f64,
}

/// One line of the table.
#[derive(Debug, Clone, Serialize)]
pub struct Line {
    /// What was done.
    pub verb: Verb,
    /// By how many threads at once.
    pub threads: usize,
    /// The library.
    pub library: Spread,
    /// tmpfs, where it could be mounted.
    pub tmpfs: Option<Spread>,
    /// ext4, where it could be mounted.
    pub ext4: Option<Spread>,
    /// How many times faster than tmpfs.
    pub over_tmpfs: Option<f64>,
    /// How many times faster than ext4.
    pub over_ext4: Option<f64>,
    /// How many times less CPU time than tmpfs.
    pub cpu_over_tmpfs: Option<f64>,
    /// How many times less CPU time than ext4.
    pub cpu_over_ext4: Option<f64>,
    /// Whether both goals are met; none where something was skipped.
    pub met: Option<bool>,
}

struct Names {
    dir: CString,
    file: CString,
    old: Vec<CString>,
    new: Vec<CString>,
}

impl Names {
    fn of(round: usize, threads: usize, thread: usize, files: usize) -> Self {
        let name = |s: String| CString::new(s).unwrap_or_else(|_| unreachable!("no NUL in it"));
        let dir = format!("r{round}-{threads}-{thread}");
        Self {
            file: name(format!("{dir}/data")),
            old: (0..files).map(|i| name(format!("{dir}/file-{i:06}"))).collect(),
            new: (0..files).map(|i| name(format!("{dir}/renamed-{i:06}"))).collect(),
            dir: name(dir),
        }
    }
}

/// Numbers that look random and are the same in every run.
struct Steps(u64);

impl Steps {
    fn block(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % FILE_BLOCKS
    }
}

/// Prepares a thread's place: a directory, a file of [`FILE_BLOCKS`] blocks.
fn prepare<S: Subject>(s: &S, n: &Names) -> Result<()> {
    s.mkdir(&n.dir)?;
    s.create(&n.file)?;
    let f = s.open(&n.file)?;
    let data = vec![0x5a; BLOCK];
    (0..FILE_BLOCKS).try_for_each(|b| s.write(&f, b * BLOCK as u64, &data))
}

fn turn<S: Subject>(s: &S, verb: Verb, n: &Names) -> Result<()> {
    let mut again = 0..verb.turn(n.old.len());
    match verb {
        Verb::Create => n.old.iter().try_for_each(|p| s.create(p)),
        Verb::Stat => n.old.iter().try_for_each(|p| s.stat(p).map(drop)),
        Verb::Open => n.old.iter().try_for_each(|p| s.open(p).map(drop)),
        Verb::StatOne => again.try_for_each(|_| s.stat(&n.file).map(drop)),
        Verb::OpenOne => again.try_for_each(|_| s.open(&n.file).map(drop)),
        Verb::Rename => n.old.iter().zip(&n.new).try_for_each(|(a, b)| s.rename(a, b)),
        Verb::Unlink => n.new.iter().try_for_each(|p| s.unlink(p)),
        Verb::Read => {
            let (f, mut buf, mut at) = (s.open(&n.file)?, vec![0; BLOCK], Steps(1));
            again.try_for_each(|_| s.read(&f, at.block() * BLOCK as u64, &mut buf))
        }
        Verb::Overwrite => {
            let (f, data, mut at) = (s.open(&n.file)?, vec![0xa5; BLOCK], Steps(1));
            again.try_for_each(|_| s.write(&f, at.block() * BLOCK as u64, &data))
        }
    }
}

/// Nanoseconds per operation of one turn by a thread per element of `names`.
fn timed<S: Subject>(s: &S, verb: Verb, names: &[Names]) -> Result<Turn> {
    let start = Barrier::new(names.len());
    let done = std::thread::scope(|scope| {
        let start = &start;
        let workers: Vec<_> = names
            .iter()
            .map(|n| {
                scope.spawn(move || {
                    start.wait();
                    // by their own clocks: on a busy machine this thread would look at its clock too late
                    let (began, cpu) = (Instant::now(), thread_cpu());
                    turn(s, verb, n)?;
                    Ok((began, Instant::now(), thread_cpu() - cpu))
                })
            })
            .collect();
        let done = workers.into_iter().map(|w| w.join().unwrap_or_else(|_| Err("a worker panicked".into())));
        done.collect::<Result<Vec<_>>>()
    })?;
    let cpu: f64 = done.iter().map(|d| d.2).sum();
    let (began, ended) = (done.iter().map(|d| d.0).min(), done.iter().map(|d| d.1).max());
    let elapsed = ended.zip(began).map(|(e, b)| e - b).unwrap_or_default();
    s.sync()?;
    let ops = names.iter().map(|n| verb.turn(n.old.len())).sum::<usize>() as f64;
    Ok(Turn { wall: elapsed.as_nanos() as f64 / ops, cpu: cpu / ops })
}

/// CPU time of this thread, nanoseconds.
fn thread_cpu() -> f64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    t.tv_sec as f64 * 1e9 + t.tv_nsec as f64
}

fn skipped<T>(what: &str, r: Result<T>) -> Option<T> {
    r.inspect_err(|e: &Error| eprintln!("SKIPPED: {what} is not compared: {e}")).ok()
}

/// Runs the plan in a new directory below `dir`, which must be on a real disk.
///
/// # Errors
/// Of a file system that was made; one that cannot be made is skipped, loudly.
pub fn run(dir: &Path, plan: &Plan) -> Result<Vec<Line>> {
    let dir = tempfile::Builder::new().prefix("braidfs-bench-").tempdir_in(dir)?;
    let at = |name: &str| dir.path().join(name);
    let library = Library::make(&at("braidfs.img"), VOLUME_BYTES, MountOptions::default())?;
    let (mut tmpfs, mut ext4) = (None, None);
    if !plan.alone {
        tmpfs = skipped("tmpfs", Mounted::tmpfs(&at("tmpfs"), VOLUME_BYTES));
        ext4 = skipped("ext4", Mounted::ext4(&at("ext4.img"), &at("ext4"), VOLUME_BYTES));
    }
    let mut lines = Vec::new();
    for &threads in &plan.threads {
        let mut times = vec![[const { Vec::new() }; 3]; VERBS.len()];
        for round in 0..plan.rounds {
            let names: Vec<_> = (0..threads).map(|t| Names::of(round, threads, t, plan.files)).collect();
            for n in &names {
                prepare(&library, n)?;
                tmpfs.iter().chain(&ext4).try_for_each(|s| prepare(s, n))?;
            }
            library.sync()?;
            tmpfs.iter().chain(&ext4).try_for_each(Subject::sync)?;
            for (verb, times) in VERBS.into_iter().zip(&mut times) {
                if !plan.verbs.is_empty() && !plan.verbs.iter().any(|v| verb.name().starts_with(v.as_str())) {
                    continue;
                }
                times[0].push(timed(&library, verb, &names)?);
                for (s, times) in [&tmpfs, &ext4].into_iter().zip(&mut times[1..]) {
                    if let Some(s) = s {
                        times.push(timed(s, verb, &names)?);
                    }
                }
            }
        }
        for (verb, [a, b, c]) in VERBS.into_iter().zip(times) {
            let Some(library) = Spread::of(&a) else { continue };
            let (tmpfs, ext4) = (Spread::of(&b), Spread::of(&c));
            let over = |s: Option<Spread>| s.map(|s| s.median / library.median);
            let (over_tmpfs, over_ext4) = (over(tmpfs), over(ext4));
            let cpu_over = |s: Option<Spread>| s.map(|s| s.cpu / library.cpu);
            let (cpu_over_tmpfs, cpu_over_ext4) = (cpu_over(tmpfs), cpu_over(ext4));
            let met = over_tmpfs.zip(over_ext4).map(|(t, e)| t >= GOAL_TMPFS && e >= GOAL_EXT4);
            lines.push(Line {
                verb,
                threads,
                library,
                tmpfs,
                ext4,
                over_tmpfs,
                over_ext4,
                cpu_over_tmpfs,
                cpu_over_ext4,
                met,
            });
        }
    }
    Ok(lines)
}

/// The lines for a terminal.
pub fn table(lines: &[Line]) -> Table {
    let mut t = Table::new(&[
        "operation",
        "threads",
        "library",
        "(range)",
        "tmpfs",
        "ext4",
        "x tmpfs",
        "x ext4",
        "goal",
        "| CPU: library",
        "x tmpfs",
        "x ext4",
    ]);
    let ns = |s: Option<Spread>| s.map_or("-".into(), |s| format!("{:.0}", s.median));
    let ratio = |r: Option<f64>| r.map_or("-".into(), |r| format!("{r:.1}"));
    for l in lines {
        t.row(vec![
            l.verb.name().into(),
            l.threads.to_string(),
            ns(Some(l.library)),
            format!("{:.0}-{:.0}", l.library.min, l.library.max),
            ns(l.tmpfs),
            ns(l.ext4),
            ratio(l.over_tmpfs),
            ratio(l.over_ext4),
            l.met.map_or("-", |m| if m { "met" } else { "MISSED" }).into(),
            format!("{:.0}", l.library.cpu),
            ratio(l.cpu_over_tmpfs),
            ratio(l.cpu_over_ext4),
        ]);
    }
    t
}
