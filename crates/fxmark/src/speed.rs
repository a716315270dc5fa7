//! `speed`: the braidfs library beside system calls on tmpfs and ext4, the same operations one after the other.
//!
//! In rounds A B C A B C, so that whatever disturbs the machine disturbs all of them. Medians over the rounds, with the
//! range; ratios of medians. Every thread works in a directory, or on a file, of its own. Paths are built beforehand. A
//! file system is synced after each of its turns, outside the clock, so that its writeback does not run into the next
//! one's turn.

use crate::error::On;
use crate::fs::{Fs, Kernel, Library, OpenHow};
use crate::names::Rng;
use crate::stats::{median, quantile};
use crate::target::{Lab, Media, MediaKind, Site, Target};
use crate::worker::Place;
use crate::{Error, Result, report, sys};
use braidfs_vfs::FileSystem;
use comfy_table::{CellAlignment, Table};
use serde::Serialize;
use std::ffi::{CStr, CString};
use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Times faster than ext4 that the library has to be.
pub const GOAL_EXT4: f64 = 3.0;
/// And than tmpfs.
pub const GOAL_TMPFS: f64 = 1.0;

const BLOCK: u64 = 4096;
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
    /// unlink in one directory.
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
    /// Operations of a thread's turn, of so many files. Those of one file are too short otherwise: two threads would
    /// hardly have begun beside each other.
    fn turn(self, files: usize) -> usize {
        match self {
            Verb::StatOne | Verb::OpenOne | Verb::Read | Verb::Overwrite => 10 * files,
            _ => files,
        }
    }
    /// Does it make, or take away, what the others need? Then it is done untimed where it is not asked for.
    fn is_needed(self) -> bool {
        matches!(self, Verb::Create | Verb::Rename | Verb::Unlink)
    }
    fn is_meant_by(self, name: &str) -> bool {
        self.name().starts_with(name)
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

/// Time the braidfs library beside system calls on tmpfs and ext4 (as root; otherwise alone)
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Rounds; medians are over these
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..))]
    rounds: u64,
    /// Files per thread, and operations per turn (ten times as many of those that need one file only)
    #[arg(long, value_name = "N", default_value_t = 20_000, value_parser = clap::value_parser!(u64).range(1..))]
    files: u64,
    /// Numbers of threads
    #[arg(long, value_name = "N,N", value_delimiter = ',', default_value = "1,2",
        value_parser = clap::value_parser!(u64).range(1..=1024))]
    threads: Vec<u64>,
    /// Where images are made, on a disk
    #[arg(long, value_name = "DIR", default_value = "/var/tmp")]
    dir: PathBuf,
    /// The library only
    #[arg(long)]
    alone: bool,
    /// Only operations whose names begin so (again for more)
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
    /// Print JSON, no table
    #[arg(long)]
    json: bool,
}

impl Args {
    fn asks_for(&self, verb: Verb) -> bool {
        self.only.is_empty() || self.only.iter().any(|name| verb.is_meant_by(name))
    }

    /// # Errors
    /// [`Error::Usage`]: an operation that there is not.
    fn check(&self) -> Result<()> {
        let is_unknown = |name: &&String| !VERBS.into_iter().any(|v| v.is_meant_by(name));
        let Some(name) = self.only.iter().find(is_unknown) else { return Ok(()) };
        let known = VERBS.map(Verb::name).join(", ");
        Err(Error::Usage(format!("--only: no operation begins with `{name}`: {known}")))
    }
}

/// Nanoseconds per operation, all threads together, by the clock; with the CPU time of the calling threads beside it,
/// which other work on the machine disturbs less.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Spread {
    /// Median of the rounds.
    pub median: f64,
    /// That of the fastest round.
    pub min: f64,
    /// That of the slowest round.
    pub max: f64,
    /// Median CPU time of an operation in its thread (user and kernel).
    pub cpu: f64,
}

impl Spread {
    fn of(turns: &[Turn]) -> Option<Self> {
        let of = |f: fn(&Turn) -> f64| turns.iter().map(f).collect::<Vec<_>>();
        let (wall, cpu) = (of(|t| t.wall), of(|t| t.cpu));
        let (min, max) = (quantile(&wall, 0.0), quantile(&wall, 1.0));
        (!turns.is_empty()).then(|| Self { median: median(&wall), min, max, cpu: median(&cpu) })
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
    /// The library, in this process.
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
    fn of(round: u64, threads: usize, thread: usize, files: usize) -> Self {
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

fn open<F: Fs>(fs: &F, path: &CStr, how: OpenHow) -> Result<F::File> {
    fs.open(path, how).on("open", path)
}

/// Prepares a thread's place: a directory, a file of [`FILE_BLOCKS`] blocks.
fn prepare<F: Fs>(fs: &F, n: &Names) -> Result<()> {
    fs.mkdir(&n.dir, 0o755).on("mkdir", &n.dir)?;
    let file = open(fs, &n.file, OpenHow::FRESH)?;
    let data = vec![0x5a; BLOCK as usize];
    (0..FILE_BLOCKS).try_for_each(|b| fs.write_all(&file, b * BLOCK, &data).on("pwrite", &n.file))
}

fn turn<F: Fs>(fs: &F, verb: Verb, n: &Names) -> Result<()> {
    let mut again = 0..verb.turn(n.old.len());
    let stat = |path: &CString| fs.stat(path, true).on("stat", path).map(|s| _ = std::hint::black_box(s.size));
    let (mut rng, mut buf) = (Rng::new(1, 0), vec![0xa5; BLOCK as usize]);
    match verb {
        Verb::Create => n.old.iter().try_for_each(|p| open(fs, p, OpenHow::FRESH).map(drop)),
        Verb::Stat => n.old.iter().try_for_each(stat),
        Verb::Open => n.old.iter().try_for_each(|p| open(fs, p, OpenHow::WRITE).map(drop)),
        Verb::StatOne => again.try_for_each(|_| stat(&n.file)),
        Verb::OpenOne => again.try_for_each(|_| open(fs, &n.file, OpenHow::WRITE).map(drop)),
        Verb::Rename => n.old.iter().zip(&n.new).try_for_each(|(a, b)| fs.rename(a, b).on("rename", a)),
        Verb::Unlink => n.new.iter().try_for_each(|p| fs.unlink(p).on("unlink", p)),
        Verb::Read | Verb::Overwrite => {
            let file = open(fs, &n.file, OpenHow::WRITE)?;
            again.try_for_each(|_| {
                let at = rng.below(FILE_BLOCKS) * BLOCK;
                if verb == Verb::Read {
                    fs.read_exact(&file, at, &mut buf).on("pread", &n.file)
                } else {
                    fs.write_all(&file, at, &buf).on("pwrite", &n.file)
                }
            })
        }
    }
}

/// Nanoseconds per operation of one turn by a thread per element of `names`.
fn timed<F: Fs>(fs: &F, verb: Verb, names: &[Names]) -> Result<Turn> {
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
                    turn(fs, verb, n)?;
                    Ok((began, Instant::now(), thread_cpu() - cpu))
                })
            })
            .collect();
        let done =
            workers.into_iter().map(|w| w.join().unwrap_or_else(|_| Err(Error::Other("a worker panicked".into()))));
        done.collect::<Result<Vec<_>>>()
    })?;
    let cpu: f64 = done.iter().map(|d| d.2).sum();
    let (began, ended) = (done.iter().map(|d| d.0).min(), done.iter().map(|d| d.1).max());
    let elapsed = ended.zip(began).map(|(e, b)| e - b).unwrap_or_default();
    fs.sync().on("syncfs", c".")?;
    let ops = names.iter().map(|n| verb.turn(n.old.len())).sum::<usize>() as f64;
    Ok(Turn { wall: elapsed.as_nanos() as f64 / ops, cpu: cpu / ops })
}

/// CPU time of this thread, nanoseconds.
fn thread_cpu() -> f64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    t.tv_sec as f64 * 1e9 + t.tv_nsec as f64
}

/// A file system of the kernel, made for this.
struct Mounted {
    fs: Kernel,
    site: Site,
    /// Its device goes after it.
    _lab: Lab,
}

/// None, loudly, where it cannot be made here.
fn mounted(target: &Target, dir: &Path, root: bool) -> Option<Mounted> {
    let make = || {
        if !root {
            return Err(Error::Usage("only root can make file systems".into()));
        }
        let dir = dir.join(target.to_string());
        std::fs::create_dir(&dir).map_err(|e| Error::io(format!("making {}", dir.display()), e))?;
        let device = || Media::make(&MediaKind::Loop(dir.clone()), VOLUME_BYTES, false, &dir);
        let media = target.needs_device().then(device).transpose()?;
        let lab = Lab { media, size: VOLUME_BYTES, dir, ..Lab::default() };
        let site = lab.make(target)?;
        let Place::Dir(at) = &site.place else { return Err(Error::Other(format!("{target} is not mounted"))) };
        let fs = Kernel::at(at).map_err(|e| Error::io(format!("opening {}", at.display()), e))?;
        Ok(Mounted { fs, site, _lab: lab })
    };
    make().inspect_err(|e| eprintln!("SKIPPED: {target} is not compared: {e}")).ok()
}

/// Runs it.
///
/// # Errors
/// Of a file system that was made; one that cannot be made is skipped, loudly. [`Error::Interrupted`]; an operation that there is not.
pub fn main(args: &Args) -> Result<()> {
    args.check()?;
    let stop = crate::cli::stop_flag()?;
    let root = !args.alone && rustix::process::geteuid().is_root();
    if root {
        sys::private_mounts().map_err(|e| Error::io("making the mounts private", e))?;
    }
    let failed = |what: &str, e| Error::io(format!("{what} in {}", args.dir.display()), e);
    let dir = tempfile::Builder::new().prefix("fxmark-").tempdir_in(&args.dir).map_err(|e| failed("images", e))?;
    let image = dir.path().join("braidfs.img");
    let sparse = std::fs::File::create_new(&image).and_then(|f| f.set_len(VOLUME_BYTES));
    let library = sparse.and_then(|()| Library::format(&image)).and_then(|()| Library::mount(&image));
    let library = library.map_err(|e| failed("a volume", e))?;
    let make = |target| (!args.alone).then(|| mounted(&target, dir.path(), root)).flatten();
    let (tmpfs, ext4) = (make(Target::Tmpfs), make(Target::Ext4));
    let others = [tmpfs.as_ref().map(|m| &m.fs), ext4.as_ref().map(|m| &m.fs)];
    let lines = measure(args, &library, others, &stop)?;
    for Mounted { fs, site, _lab } in [tmpfs, ext4].into_iter().flatten() {
        drop(fs);
        site.close()?;
    }
    library.unmount().map_err(|e| failed("unmounting the volume", e))?;
    if args.json {
        return crate::cli::say_json(&lines);
    }
    crate::cli::say(&format!("Library speed: ns per operation, median (range)\n{}", table(&lines)))
}

fn measure(args: &Args, library: &Library, others: [Option<&Kernel>; 2], stop: &AtomicBool) -> Result<Vec<Line>> {
    let go_on = || if stop.load(Ordering::Relaxed) { Err(Error::Interrupted) } else { Ok(()) };
    let files = args.files as usize;
    let mut lines = Vec::new();
    for threads in args.threads.iter().map(|t| *t as usize) {
        let mut times = vec![[const { Vec::new() }; 3]; VERBS.len()];
        for round in 0..args.rounds {
            let names: Vec<_> = (0..threads).map(|t| Names::of(round, threads, t, files)).collect();
            for n in &names {
                prepare(library, n)?;
                others.into_iter().flatten().try_for_each(|fs| prepare(fs, n))?;
            }
            library.sync().on("sync", c".")?;
            others.into_iter().flatten().try_for_each(|fs| fs.sync().on("syncfs", c"."))?;
            for (verb, times) in VERBS.into_iter().zip(&mut times) {
                let asked = args.asks_for(verb);
                if !asked && !verb.is_needed() {
                    continue;
                }
                go_on()?;
                let took = timed(library, verb, &names)?;
                times[0].extend(asked.then_some(took));
                for (fs, times) in others.into_iter().zip(&mut times[1..]) {
                    let Some(fs) = fs else { continue };
                    go_on()?;
                    let took = timed(fs, verb, &names)?;
                    times.extend(asked.then_some(took));
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
fn table(lines: &[Line]) -> Table {
    let mut t = Table::new();
    report::lines(&mut t);
    t.set_header([
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
    t.column_iter_mut().skip(1).for_each(|c| c.set_cell_alignment(CellAlignment::Right));
    let ns = |s: Option<Spread>| s.map_or("-".into(), |s| format!("{:.0}", s.median));
    let ratio = |r: Option<f64>| r.map_or("-".into(), |r| format!("{r:.1}"));
    for l in lines {
        t.add_row([
            l.verb.name().to_owned(),
            l.threads.to_string(),
            ns(Some(l.library)),
            format!("{:.0}-{:.0}", l.library.min, l.library.max),
            ns(l.tmpfs),
            ns(l.ext4),
            ratio(l.over_tmpfs),
            ratio(l.over_ext4),
            l.met.map_or("-", |m| if m { "met" } else { "MISSED" }).to_owned(),
            format!("{:.0}", l.library.cpu),
            ratio(l.cpu_over_tmpfs),
            ratio(l.cpu_over_ext4),
        ]);
    }
    t
}
