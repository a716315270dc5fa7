//! `figures`: figures of the papers behind braidfs, each a set of tests on several file systems that differ in what the
//! figure is about: domains, mlogs, a journal mode, a switch for experiments. `docs/papers.md` goes through all of the papers'.
//!
//! All figures of a run have their first repetition before any has its second, and the file systems take turns within each
//! test, so that whatever disturbs the machine disturbs all of them. When the time is up, no further repetition begins.

mod list;
mod report;

use crate::lab_args::{self, LabArgs, parse_size};
use crate::results::{Head, Run};
use crate::results_args::ResultsArgs;
use crate::run::{self, Job, Method, QUICK, STANDARD, Turn};
use crate::suite::TestId;
use crate::sys;
use crate::target::Media;
use crate::worker::{Mode, Scale};
use crate::{Error, Result, cli};
use list::{Cores, Figure, Series, Shows};
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

const SCHEMA: &str = "fxmark-figures";
const VERSION: u32 = 1;

/// Redo figures of the papers behind braidfs, in one interleaved run
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = "Examples:\n  \
    braidfs bench figures --list                              which there are\n  \
    braidfs bench figures -o figures.json --docs docs         ten minutes, tables into docs/figures.md\n  \
    braidfs bench figures max-11 --size 2G -o full.json       one of the others\n  \
    braidfs bench figures all --seconds 0.05 --reps 1         does it work?\n  \
    braidfs bench figures --from figures.json --docs docs     the tables again")]
pub struct Args {
    /// Which [default: those that one run of ten minutes can have], or `all` that this program can do
    figures: Vec<String>,
    /// Show all figures
    #[arg(long)]
    list: bool,
    /// Measured time of one repetition
    #[arg(long, value_name = "SECONDS", default_value_t = 0.25)]
    seconds: f64,
    /// Warm-up before each
    #[arg(long, value_name = "SECONDS", default_value_t = 0.05)]
    warm_up: f64,
    /// Repetitions of all
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=100))]
    reps: u64,
    /// Begin no test of a further repetition after so many minutes
    #[arg(long, value_name = "MINUTES", default_value_t = 9.5)]
    minutes: f64,
    /// Size of each file system
    #[arg(long, value_name = "BYTES", value_parser = parse_size, default_value = "1G")]
    size: u64,
    /// Most cores [default: all that this process may use]
    #[arg(long, value_name = "N")]
    cores: Option<usize>,
    /// Files of a worker in tests that create many
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    files: Option<u64>,
    #[command(flatten)]
    pub(crate) lab: LabArgs,
    #[command(flatten)]
    keep: ResultsArgs,
}

/// How all figures were measured.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Plan {
    /// Names of the figures.
    pub figures: Vec<String>,
    /// Measured seconds of one repetition.
    pub seconds: f64,
    /// Seconds before them that do not count.
    pub warm_up: f64,
    /// Repetitions that were wanted.
    pub reps: u64,
    /// Bytes of a file system.
    pub size: u64,
    /// What they lay on.
    pub media: String,
    /// Most cores.
    pub cores: usize,
    /// Sizes of the tests.
    pub scale: Scale,
}

/// One repetition of a test on one of the file systems of a figure.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Line {
    /// Name of the figure.
    pub figure: String,
    /// The file system's name in it.
    pub series: String,
    /// What was measured, without its histogram.
    pub run: Run,
}

/// A file system of a figure.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Made {
    /// Name of the figure.
    pub figure: String,
    /// The file system's name in it.
    pub series: String,
    /// Commands that made and mounted it.
    pub setup: Vec<String>,
    /// Switches for experiments.
    pub switches: String,
}

/// A results file.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Results {
    /// What each such file begins with.
    #[serde(flatten)]
    pub head: Head<Plan>,
    /// In the order in which they ran.
    pub lines: Vec<Line>,
    /// How the file systems were made.
    pub made: Vec<Made>,
    /// What was left out or cut short, with the reason.
    pub notes: Vec<String>,
}

/// Runs it. `before` as in [`cli::main`].
///
/// # Errors
/// Of a file system; wrong arguments.
pub fn main(args: &Args, before: &[&str]) -> Result<()> {
    if args.list {
        let line = |f: &Figure| format!("{:<11} {}{}\n", f.name, f.title, if f.usual { " (usual)" } else { "" });
        return cli::say(list::all().iter().map(line).collect::<String>().trim_end());
    }
    let shown = |r: &Results| {
        let has = |f: &Figure| r.lines.iter().any(|l| l.figure == f.name);
        list::all().into_iter().filter(has).collect::<Vec<_>>()
    };
    let put = |r: &Results, dir: &Path| {
        let put = |f: &Figure| {
            crate::report::put(&dir.join("figures.md"), &format!("figure-{}", f.name), &report::markdown(r, f))
        };
        shown(r).iter().try_for_each(put)
    };
    let terminal = |r: &Results| {
        let all: Vec<String> = shown(r).iter().map(|f| report::terminal(r, f)).collect();
        all.join("\n")
    };
    args.keep.show((SCHEMA, VERSION), || measure(args, before), put, terminal)
}

/// The figures that were asked for, without what cannot be tested here; and why not.
fn figures(args: &Args) -> Result<(Vec<Figure>, Vec<String>)> {
    let (all, mut notes) = (list::all(), Vec::new());
    let wanted = |f: &Figure| match &args.figures[..] {
        [] => f.usual,
        names => names.iter().any(|n| n == f.name || n == "all"),
    };
    if let Some(n) = args.figures.iter().find(|n| *n != "all" && !all.iter().any(|f| f.name == **n)) {
        return Err(Error::Usage(format!("no figure `{n}`: --list shows all")));
    }
    let counted = |f: &Figure| cfg!(feature = "lock-waits") || f.shows != Shows::Locks;
    if let Some(f) = all.iter().find(|f| !counted(f) && args.figures.iter().any(|n| *n == f.name)) {
        let name = f.name;
        return Err(Error::Usage(format!(
            "{name}: this program does not count how long threads wait for locks: `make lock-waits`, or build it with --features lock-waits"
        )));
    }
    let mut figures: Vec<Figure> = all.into_iter().filter(|f| wanted(f) && counted(f)).collect();
    for f in &mut figures {
        f.series.retain(|s| match args.lab.missing(&s.target) {
            None => true,
            Some(why) => {
                let note = format!("without {}: {why}", s.target);
                if !notes.contains(&note) {
                    notes.push(note);
                }
                false
            }
        });
    }
    figures.retain(|f| !f.series.is_empty());
    Ok((figures, notes))
}

fn measure(args: &Args, before: &[&str]) -> Result<Results> {
    let stop = cli::stop_flag()?;
    let fine = |n: f64| n.is_finite() && (0.0..86_400.0).contains(&n);
    if !fine(args.seconds) || args.seconds < 0.001 || !fine(args.warm_up) || !fine(args.minutes) {
        return Err(Error::Usage(
            "--seconds, --warm-up and --minutes have to be above nothing, and below a day".into(),
        ));
    }
    let (figures, notes) = figures(args)?;
    if !rustix::process::geteuid().is_root() {
        return Err(Error::Usage("only root can make file systems: be root".into()));
    }
    sys::private_mounts().map_err(|e| Error::io("making the mounts private", e))?;
    let cpus = sys::allowed().map_err(|e| Error::io("asking for the CPUs", e))?;
    let most = args.cores.unwrap_or(cpus.len());
    if most == 0 || most > cpus.len() {
        return Err(Error::Usage(format!("--cores {most}: there are {} CPUs to use", cpus.len())));
    }
    let dir = tempfile::Builder::new().prefix("fxmark-").tempdir().map_err(|e| Error::io("making a directory", e))?;
    let done = {
        let mut lab = Laboratory::new(args, (dir.path(), before), &stop, cpus)?;
        lab.run(args, &figures, most, notes)?
    };
    drop(dir);
    Ok(done)
}

/// Where cells run, one after the other.
struct Laboratory<'a> {
    job: Job,
    /// As in [`cli::main`].
    before: &'a [&'a str],
    /// Arguments of mkfs and options of mount for all figures, as the user gave them.
    given: [Vec<(String, String)>; 2],
    /// For file systems of a worker's own.
    parts: Vec<crate::target::Lab>,
}

impl<'a> Laboratory<'a> {
    fn new(
        args: &Args,
        (dir, before): (&Path, &'a [&'a str]),
        stop: &Arc<AtomicBool>,
        cpus: Vec<usize>,
    ) -> Result<Self> {
        let mut profile = if args.seconds < STANDARD.seconds { QUICK } else { STANDARD };
        profile.fill &= args.size <= cli::FILL_MAX;
        let media = Media::make(&args.lab.kind(), args.size, profile.fill, dir)?;
        profile.scale.files = args.files.unwrap_or(profile.scale.files);
        profile.size = args.size;
        profile.remake = true;
        let method = Method {
            mode: Mode::Corrected,
            scale: profile.scale,
            seed: 42,
            seconds: args.seconds,
            warm_up: args.warm_up,
            window: 0.0,
            journal: false,
            switches: Some(String::new()),
            cpus,
            worker_args: lab_args::words(before, "worker"),
        };
        let job = Job {
            profile,
            method,
            tests: Vec::new(),
            targets: Vec::new(),
            cores: Vec::new(),
            lab: args.lab.lab(Some(media), dir.to_path_buf(), args.size, before),
            more_labs: Vec::new(),
            drop_caches: true,
            stop: Arc::clone(stop),
            partial: None,
        };
        let given = [job.lab.mkfs_options.clone(), job.lab.mount_options.clone()];
        Ok(Self { job, before, given, parts: Vec::new() })
    }

    fn run(&mut self, args: &Args, figures: &[Figure], most: usize, notes: Vec<String>) -> Result<Results> {
        if figures.iter().any(|f| f.series.iter().any(|s| s.parts)) {
            let how = (args.size, self.job.profile.fill);
            self.parts = args.lab.more_labs(most - 1, true, &self.job.lab.dir, how, self.before)?;
        }
        let plan = Plan {
            figures: figures.iter().map(|f| f.name.to_owned()).collect(),
            seconds: args.seconds,
            warm_up: args.warm_up,
            reps: args.reps,
            size: args.size,
            media: self.job.lab.media.as_ref().map_or_else(String::new, |m| m.what().to_owned()),
            cores: most,
            scale: self.job.method.scale,
        };
        let head = Head::now(SCHEMA, VERSION, plan, &[]);
        let mut out = Results { head, lines: Vec::new(), made: Vec::new(), notes };
        let begun = Instant::now();
        for rep in 0..args.reps as usize {
            for figure in figures {
                for test in figure.tests {
                    let minutes = begun.elapsed().as_secs_f64() / 60.0;
                    if rep > 0 && minutes > args.minutes {
                        let at = format!("repetition {} ended before {test} of {}", rep + 1, figure.name);
                        out.notes.push(format!("time was up after {minutes:.0} minutes: {at} (--minutes)"));
                        return Ok(out);
                    }
                    self.test(figure, test, (most, rep), &mut out)?;
                    out.head.took = begun.elapsed().as_secs_f64();
                    args.keep.keep(&out)?;
                }
            }
        }
        Ok(out)
    }

    /// One test on all file systems of a figure.
    fn test(&mut self, figure: &Figure, test: &str, (most, rep): (usize, usize), out: &mut Results) -> Result<()> {
        let test: TestId = test.parse()?;
        let cores = match figure.cores {
            Cores::One => vec![1],
            Cores::Sweep => run::sweep(most),
            Cores::Most => vec![most],
        };
        for cores in cores {
            for series in &figure.series {
                let turn = Turn { test, target: &series.target, cores, rep };
                self.set(series, cores);
                let (mut run, setup) = match run::cell(&self.job, &turn) {
                    Ok(done) => done,
                    Err(Error::Unsupported(why)) => {
                        let note = format!("{}: without {test} on {}: {why}", figure.name, series.label);
                        if !out.notes.contains(&note) {
                            out.notes.push(note);
                        }
                        continue;
                    }
                    Err(Error::Interrupted) => return Err(Error::Interrupted),
                    // on a full file system a load may find that, and it is what the figure asks
                    Err(e) if series.sizes.full > 0 && e.to_string().to_lowercase().contains("no space") => {
                        out.notes.push(format!("{}: {test} on {} found no space", figure.name, series.label));
                        continue;
                    }
                    Err(e) => {
                        let (test, target) = (test.to_string(), format!("{} ({})", series.label, figure.name));
                        return Err(Error::Run { test, target, cores, why: e.to_string() });
                    }
                };
                if let Some(latency) = &mut run.latency {
                    latency.histogram = Vec::new();
                }
                let (name, label) = (figure.name.to_owned(), series.label.clone());
                if !out.made.iter().any(|m| m.figure == name && m.series == label) {
                    let switches = series.switches.to_owned();
                    out.made.push(Made { figure: name.clone(), series: label.clone(), setup, switches });
                }
                eprintln!("fxmark: {}", report::line(&name, &label, &run));
                out.lines.push(Line { figure: name, series: label, run });
            }
        }
        Ok(())
    }

    /// Makes the next file system that of a series.
    fn set(&mut self, series: &Series, cores: usize) {
        let job = &mut self.job;
        let target = series.target.to_string();
        let and = |given: &[(String, String)], options: &str| {
            let more = (!options.is_empty()).then(|| (target.clone(), options.to_owned()));
            given.iter().cloned().chain(more).collect::<Vec<_>>()
        };
        // the parts not in use wait with the others
        self.parts.append(&mut job.more_labs);
        if series.parts {
            job.more_labs = self.parts.drain(..cores - 1).collect();
        }
        for lab in std::iter::once(&mut job.lab).chain(&mut job.more_labs) {
            lab.mkfs_options = and(&self.given[0], &series.mkfs);
            lab.mount_options = and(&self.given[1], series.mount);
            lab.switches = Some(series.switches.into());
        }
        job.method.journal = series.mount.contains("data=journal");
        job.method.switches = Some(series.switches.into());
        job.method.scale.sizes = series.sizes;
        job.method.scale.files = job.profile.scale.files_of(series.sizes, job.profile.size, cores);
    }
}
