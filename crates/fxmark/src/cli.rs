//! The command line, the same for `fxmark` and `braidfs bench`.

use crate::lab_args::{self, LabArgs, parse_bytes, parse_size};
use crate::run::{self, Job, LONG, Method, Profile, QUICK, STANDARD};
use crate::suite::{self, Group, TESTS, TestId};
use crate::target::{self, Media, Target};
use crate::worker::{self, Aged, Mode, Sizes, WORKERS_MAX};
use crate::{Error, Result, report, sys};
use clap::{Parser, Subcommand};
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Examples for `--help`.
pub const EXAMPLES: &str = "Examples:\n  \
    fxmark --quick                               everything once, on all file systems: does it work?\n  \
    fxmark -t ext4,xfs,tmpfs -o results.json     these three, figures to talk about\n  \
    fxmark -t /mnt/a -t /mnt/b --tests MWCM      two directories, one test; no root needed\n  \
    fxmark report results.json -o report.html    figures as one HTML page\n  \
    fxmark compare before.json after.json        what changed, and is it more than chance?\n\n\
    In `braidfs`, it is called `braidfs bench`.";

/// Measure how file systems scale with cores (FxMark)
#[derive(Debug, Parser)]
#[command(args_conflicts_with_subcommands = true, after_help = EXAMPLES)]
pub struct Args {
    #[command(flatten)]
    run: RunArgs,
    #[command(subcommand)]
    command: Option<Cmd>,
}

impl Args {
    /// The program braidfs where the user names none.
    pub fn default_braidfs(&mut self, program: PathBuf) {
        let lab = match &mut self.command {
            Some(Cmd::Aging(aging)) => &mut aging.lab,
            Some(Cmd::Isolation(isolation)) => &mut isolation.lab,
            Some(Cmd::Figures(figures)) => &mut figures.lab,
            #[cfg(feature = "braidfs")]
            Some(Cmd::Times(times)) => &mut times.lab,
            _ => &mut self.run.lab,
        };
        lab.braidfs.get_or_insert(program);
    }
}

/// Images up to this are written through before: larger ones would take longer than what is measured.
pub(crate) const FILL_MAX: u64 = 8 << 30;

#[derive(Debug, Subcommand)]
enum Cmd {
    /// Show all tests
    List {
        /// Print them as JSON
        #[arg(long)]
        json: bool,
    },
    /// Compare two results files, cell by cell
    Compare(report::CompareArgs),
    /// Draw a results file as an HTML page, or print it as Markdown
    Report(report::ReportArgs),
    /// Time the braidfs library beside system calls on tmpfs and ext4 (as root; otherwise alone)
    #[cfg(feature = "braidfs")]
    Speed(crate::speed::Args),
    /// Fill file systems, overwrite and churn until several times the free space is written: what became of them?
    Aging(Box<crate::aging::Args>),
    /// What a tenant keeps of its speed beside a neighbour: alone and beside five floods, with spread
    Isolation(Box<crate::isolation::Args>),
    /// Redo figures of the papers behind braidfs, in one interleaved run
    Figures(Box<crate::figures::Args>),
    /// Time single things that the papers have tables of: mount, recovery, checkpoint, GC
    #[cfg(feature = "braidfs")]
    Times(Box<crate::times::Args>),
    /// Not for people: a neighbour of that
    #[command(hide = true)]
    Neighbour(crate::isolation::NeighbourArgs),
    /// Not for people: one worker
    #[command(hide = true)]
    Worker,
    /// Not for people: a program that ends with its parent
    #[command(hide = true)]
    Hold {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<OsString>,
    },
}

#[derive(Debug, clap::Args)]
struct RunArgs {
    /// What to test: ext4, ext4-nj, xfs, btrfs, f2fs, tmpfs, braidfs (mounted), library (braidfs in process), all,
    /// or a directory
    #[arg(short, long = "target", value_name = "TARGET", value_delimiter = ',', default_value = "all")]
    targets: Vec<String>,
    /// Which tests: micro, bg, commit, direct, apps, papers, external, all, or names (`DR*` for all that begin so)
    #[arg(long, value_name = "LIST", default_value = "micro,bg,direct,apps,external")]
    tests: String,
    /// Everything once and short: does it work?
    #[arg(long, conflicts_with = "long")]
    quick: bool,
    /// Longer and more often: figures to publish
    #[arg(long)]
    long: bool,
    /// How the tests are set up
    #[arg(long, value_enum, default_value = "corrected")]
    mode: Mode,
    /// Measured time of one repetition
    #[arg(long, value_name = "SECONDS")]
    seconds: Option<f64>,
    /// Warm-up before each
    #[arg(long, value_name = "SECONDS")]
    warm_up: Option<f64>,
    /// Repetitions, interleaved between the targets
    #[arg(long, value_name = "N")]
    reps: Option<usize>,
    /// Begin no further repetition after so many minutes [default: 19; no limit with --quick, --long]
    #[arg(long, value_name = "MINUTES")]
    minutes: Option<f64>,
    /// Numbers of cores, as 1,2,4 [default: powers of two up to all]
    #[arg(long, value_name = "N,N", value_delimiter = ',')]
    cores: Vec<usize>,
    /// CPUs to use, in this order, as 0-3,8 [default: all that this process may use]
    #[arg(long, value_name = "LIST")]
    cpus: Option<String>,
    #[command(flatten)]
    lab: LabArgs,
    /// Size of the file systems [default: 1G (--long: 4G), and as much again for every two cores]
    #[arg(long, value_name = "BYTES", value_parser = parse_size)]
    size: Option<u64>,
    /// Make the file system once per target, not for each repetition
    #[arg(long)]
    no_remake: bool,
    /// Leave the kernel's caches as they are
    #[arg(long)]
    keep_caches: bool,
    /// Files of a worker in tests that create, remove or rename
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    files: Option<u64>,
    /// aged_overwrite: how much of the file system its files take, percent [default: a few MiB, by the profile]
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u64).range(1..=95))]
    fill: Option<u64>,
    /// aged_overwrite: writes per fsync
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..))]
    fsync_every: u64,
    /// aged_overwrite: files with the flag NOCOW (chattr +C), where there is one
    #[arg(long)]
    nocow: bool,
    /// Size of the file in kfsmark and write_* [default: by the test and the profile]
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    file_size: Option<u64>,
    /// Size of a request there [default: 16K in kfsmark, 4K]
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    request: Option<u64>,
    /// varmail, fileserver: fill the file system so far before, percent, and overwrite at random
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u64).range(1..=99))]
    full: Option<u64>,
    /// Each worker has a file system of its own, of --size, on a device of its own: what no file system shares
    #[arg(long, conflicts_with = "device")]
    partitions: bool,
    /// Also figures for parts of the measurement, each so long
    #[arg(long, value_name = "SECONDS")]
    window: Option<f64>,
    /// Seed of random numbers
    #[arg(long, default_value_t = 42)]
    seed: u64,
    /// Where the results go, as JSON [default: fxmark.json]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Print the results as JSON, no table
    #[arg(long)]
    json: bool,
}

/// Runs the command; its exit code. `before`: the arguments between the program and ours (`bench` in `braidfs bench`).
///
/// # Errors
/// What failed; [`Error::code`] is the exit code.
pub fn main(args: &Args, before: &[&str]) -> Result<u8> {
    match &args.command {
        None => measure(&args.run, before).map(|()| 0),
        Some(Cmd::List { json }) => list(*json).map(|()| 0),
        Some(Cmd::Compare(a)) => report::compare(a),
        Some(Cmd::Report(a)) => report::report(a).map(|()| 0),
        #[cfg(feature = "braidfs")]
        Some(Cmd::Speed(a)) => crate::speed::main(a).map(|()| 0),
        Some(Cmd::Aging(a)) => crate::aging::main(a, before).map(|()| 0),
        Some(Cmd::Isolation(a)) => crate::isolation::main(a, before).map(|()| 0),
        Some(Cmd::Figures(a)) => crate::figures::main(a, before).map(|()| 0),
        #[cfg(feature = "braidfs")]
        Some(Cmd::Times(a)) => crate::times::main(a, before).map(|()| 0),
        Some(Cmd::Neighbour(a)) => crate::isolation::neighbour(a).map(|()| 0),
        Some(Cmd::Worker) => Ok(worker::main()),
        Some(Cmd::Hold { command }) => target::hold(command).map(|()| 0),
    }
}

fn measure(args: &RunArgs, before: &[&str]) -> Result<()> {
    let stop = stop_flag()?;
    let dir = tempfile::Builder::new().prefix("fxmark-").tempdir().map_err(|e| Error::io("making a directory", e))?;
    let output = args.output.clone().unwrap_or_else(|| "fxmark.json".into());
    let results = {
        let job = job(args, before, &stop, dir.path().to_path_buf(), &output)?;
        run::run(&job)?
    };
    results.write(&output)?;
    if args.json {
        return say_json(&results);
    }
    say(&report::table(&results))?;
    say(&format!("Results: {}; `report {}` draws them as an HTML page", output.display(), output.display()))
}

/// Set by the signals that ask a program to end.
///
/// # Errors
/// They cannot be caught.
pub(crate) fn stop_flag() -> Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(&stop)).map_err(|e| Error::io("catching signals", e))?;
    }
    Ok(stop)
}

/// Prints on standard output. A reader that has gone is no error.
///
/// # Errors
/// The disk behind it is full.
pub fn say(text: &str) -> Result<()> {
    use std::io::Write;
    let mut out = std::io::stdout().lock();
    match writeln!(out, "{text}").and_then(|()| out.flush()) {
        Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => Err(Error::io("writing the output", e)),
        _ => Ok(()),
    }
}

/// [`say`], of results as JSON.
///
/// # Errors
/// As of [`say`].
pub fn say_json<T: serde::Serialize>(results: &T) -> Result<()> {
    say(&serde_json::to_string_pretty(results).map_err(|e| Error::io("writing", std::io::Error::from(e)))?)
}

fn job(args: &RunArgs, before: &[&str], stop: &Arc<AtomicBool>, dir: PathBuf, output: &std::path::Path) -> Result<Job> {
    let mut profile = profile(args)?;
    let targets = args.lab.targets(&args.targets, &[Target::Ext4NoJournal])?;
    let cpus = cpus(args)?;
    let cores = cores(args, cpus.len())?;
    if args.size.is_none() && !args.partitions {
        // every worker has files of its own
        profile.size *= cores.last().map_or(1, |&c| c.div_ceil(2)) as u64;
    }
    profile.fill &= profile.size <= FILL_MAX;
    let bytes = args.fill.map_or(0, |percent| profile.size / 100 * percent);
    profile.scale.sizes = sizes(args)?;
    if args.files.is_none() {
        let most = cores.last().copied().unwrap_or(1);
        profile.scale.files = profile.scale.files_of(profile.scale.sizes, profile.size, most);
    }
    profile.scale.aged = Aged { bytes, every: args.fsync_every, nocow: args.nocow };
    let root = rustix::process::geteuid().is_root();
    if !root && let Some(t) = targets.iter().find(|t| t.needs_root()) {
        return Err(Error::Usage(format!("{t}: only root can make file systems: be root, or test a directory")));
    }
    if targets.iter().any(Target::needs_root) {
        sys::private_mounts().map_err(|e| Error::io("making the mounts private", e))?;
    }
    let needs = targets.iter().any(Target::needs_device);
    let media = needs.then(|| Media::make(&args.lab.kind(), profile.size, profile.fill, &dir)).transpose()?;
    let parts = if args.partitions { cores.last().copied().unwrap_or(1) } else { 1 };
    if parts > 1 && targets.iter().any(|t| matches!(t, Target::Dir(_))) {
        return Err(Error::Usage("--partitions: a directory cannot be divided".into()));
    }
    let more_labs = args.lab.more_labs(parts - 1, needs, &dir, (profile.size, profile.fill), before)?;
    Ok(Job {
        method: Method {
            mode: args.mode,
            scale: profile.scale,
            seed: args.seed,
            seconds: profile.seconds,
            warm_up: profile.warm_up,
            window: args.window.unwrap_or(0.0),
            journal: args.lab.library_journal()?,
            switches: None,
            cpus,
            worker_args: lab_args::words(before, "worker"),
        },
        tests: tests(args)?,
        targets,
        cores,
        lab: args.lab.lab(media, dir, profile.size, before),
        more_labs,
        drop_caches: root && profile.remake && !args.keep_caches,
        stop: Arc::clone(stop),
        partial: Some(output.with_extension("partial.json")),
        profile,
    })
}

fn sizes(args: &RunArgs) -> Result<Sizes> {
    let (file, request) = (args.file_size.unwrap_or(0), args.request.unwrap_or(0));
    if file > 0 && request > file {
        return Err(Error::Usage("--request: a request is no larger than --file-size".into()));
    }
    if request % 4096 != 0 && args.tests.contains("_direct") {
        return Err(Error::Usage("--request: O_DIRECT takes multiples of 4096 bytes".into()));
    }
    Ok(Sizes { file, request, full: args.full.unwrap_or(0) })
}

fn profile(args: &RunArgs) -> Result<Profile> {
    let mut p = match (args.quick, args.long) {
        (true, _) => QUICK,
        (_, true) => LONG,
        _ => STANDARD,
    };
    p.seconds = args.seconds.unwrap_or(p.seconds);
    p.warm_up = args.warm_up.unwrap_or(p.warm_up);
    p.reps = args.reps.unwrap_or(p.reps);
    p.size = args.size.unwrap_or(p.size);
    p.minutes = args.minutes.or(p.minutes);
    p.scale.files = args.files.unwrap_or(p.scale.files);
    p.remake &= !args.no_remake;
    let fine = |s: f64| s.is_finite() && (0.0..=86_400.0).contains(&s);
    if args.window.is_some_and(|s| !fine(s) || s < 0.01) {
        return Err(Error::Usage("--window has to be between 0.01 seconds and a day".into()));
    }
    if !fine(p.seconds) || p.seconds < 0.001 || !fine(p.warm_up) || p.reps == 0 {
        return Err(Error::Usage("--seconds, --warm-up and --reps have to be above nothing, and below a day".into()));
    }
    Ok(p)
}

fn tests(args: &RunArgs) -> Result<Vec<TestId>> {
    let mut tests = suite::choose(&args.tests)?;
    if args.mode == Mode::Original {
        tests.retain(|t| matches!(t.test.group, Group::Data | Group::Meta));
        if tests.is_empty() {
            return Err(Error::Usage("mode original has microbenchmarks only".into()));
        }
    }
    let named = args.tests.split(',').any(|w| suite::find(w).is_some());
    tests.retain(|t| match crate::external::missing(t) {
        Some(why) if !named => {
            eprintln!("fxmark: leaving {t} out: {why}");
            false
        }
        _ => true,
    });
    Ok(tests)
}

fn cpus(args: &RunArgs) -> Result<Vec<usize>> {
    let allowed = sys::allowed().map_err(|e| Error::io("asking for the CPUs", e))?;
    let Some(list) = &args.cpus else { return Ok(allowed) };
    let cpus = sys::parse_list(list).map_err(Error::Usage)?;
    match cpus.iter().find(|c| !allowed.contains(c)) {
        Some(c) => Err(Error::Usage(format!("--cpus: this process may not use CPU {c}: it may use {allowed:?}"))),
        None => Ok(cpus),
    }
}

fn cores(args: &RunArgs, cpus: usize) -> Result<Vec<usize>> {
    let mut cores = if args.cores.is_empty() { run::sweep(cpus) } else { args.cores.clone() };
    cores.sort_unstable();
    cores.dedup();
    match cores.iter().find(|&&c| c == 0 || c > cpus || c >= WORKERS_MAX) {
        Some(c) => Err(Error::Usage(format!("--cores {c}: there are {cpus} CPUs to use"))),
        None => Ok(cores),
    }
}

fn list(json: bool) -> Result<()> {
    if json {
        let all: Vec<_> = TestId::all()
            .iter()
            .map(|t| serde_json::json!({ "name": t.to_string(), "what": t.test.what, "unit": t.test.unit }))
            .collect();
        return say(&serde_json::Value::from(all).to_string());
    }
    let mut text = String::new();
    for t in TESTS {
        let more = match (t.has_bg, t.has_direct) {
            (true, true) => "  (_bg, _direct)",
            (true, false) => "  (_bg)",
            (false, true) => "  (_direct)",
            _ => "",
        };
        let more = if t.has_commit { format!("{more}  (_commit)") } else { more.to_owned() };
        text += &format!("{:<11} {}{more}\n", t.name, t.what);
    }
    say(text.trim_end())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Args::command().debug_assert();
    }
}
