//! `times`: single things that the papers have tables of, which are no load that repeats an operation: what a mount takes after
//! a crash ([`recovery`]), what one takes else and what it leaves to do ([`remount`]), how long all is made durable by how
//! much is dirty ([`commit`]), how long the GC walks after a crash and what a load beside it keeps ([`gc`]).
//!
//! Each gives samples, of a file system and of what was done to it; a table has their medians. File systems take turns within
//! a repetition.

mod commit;
mod gc;
mod recovery;
mod remount;
mod report;

use crate::lab_args::{LabArgs, parse_size};
use crate::results::Head;
use crate::results_args::ResultsArgs;
use crate::target::{Lab, Target};
use crate::{Error, Result, cli};
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

const SCHEMA: &str = "fxmark-times";
const VERSION: u32 = 1;

/// What can be timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum What {
    /// A mount after a crash with full journals, beside ext4 (FAST '18, Table 3)
    Recovery,
    /// The GC of stale entries after a crash, and varmail beside it (SpanFS, Table 4)
    Gc,
    /// Mount, unmount, opens with nothing cached, renames within and between domains (SpanFS, Table 5)
    Remount,
    /// Making all durable, by how much is dirty (Max, Figure 8 a)
    Commit,
}

impl What {
    /// As it is called.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Recovery => "recovery",
            Self::Gc => "gc",
            Self::Remount => "remount",
            Self::Commit => "commit",
        }
    }
}

/// Time single things that the papers have tables of: mount, recovery, checkpoint, GC
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = "Examples:\n  \
    braidfs bench times recovery -t ext4,library             a mount after a crash\n  \
    braidfs bench times gc --files 32000,320000              no root needed\n  \
    braidfs bench times recovery gc remount commit --docs docs -o times.json\n  \
    braidfs bench times --from times.json --docs docs        the tables again")]
pub struct Args {
    /// What is timed
    #[arg(value_enum, required_unless_present = "from")]
    what: Vec<What>,
    /// On ext4, xfs, braidfs (mounted), library (braidfs in process), all
    #[arg(short, long = "target", value_name = "TARGET", value_delimiter = ',', default_value = "all")]
    targets: Vec<String>,
    /// Repetitions of all
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=100))]
    reps: u64,
    /// Size of the file systems [recovery: as large as its journals need]
    #[arg(long, value_name = "BYTES", value_parser = parse_size, default_value = "2G")]
    size: u64,
    /// gc: files of the volumes. remount: the first number is that of its files
    #[arg(long, value_name = "N,N", value_delimiter = ',', default_value = "32000,320000",
        value_parser = clap::value_parser!(u64).range(100..))]
    files: Vec<u64>,
    /// gc: domains of the volumes; objects are spread over them
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u64).range(1..=64))]
    domains: u64,
    /// gc: time beside the GC, and as much alone
    #[arg(long, value_name = "SECONDS", default_value_t = 2.0)]
    seconds: f64,
    /// recovery: journals of braidfs, one of ext4 with as much in it
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u64).range(1..=64))]
    journals: u64,
    /// recovery: size of each journal of braidfs
    #[arg(long, value_name = "BYTES", value_parser = parse_size, default_value = "32M")]
    journal: u64,
    /// commit: bytes that are dirty
    #[arg(long, value_name = "BYTES,BYTES", value_delimiter = ',', value_parser = parse_size, default_value = "1M,4M,16M,64M,256M")]
    dirty: Vec<u64>,
    #[command(flatten)]
    pub(crate) lab: LabArgs,
    #[command(flatten)]
    keep: ResultsArgs,
}

/// How it was timed.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Plan {
    /// Repetitions.
    pub reps: u64,
    /// What the file systems lay on.
    pub media: String,
    /// Of each thing that was timed, in words.
    pub notes: Vec<(What, String)>,
}

/// What a value counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Unit {
    /// Seconds.
    Seconds,
    /// Operations a second.
    Rate,
    /// One value over another.
    Ratio,
    /// Bytes.
    Bytes,
}

/// One value of one repetition.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Sample {
    /// Of what.
    pub what: What,
    /// The file system.
    pub target: String,
    /// What was done.
    pub step: String,
    /// What `value` counts.
    pub unit: Unit,
    /// In its unit.
    pub value: f64,
    /// Which repetition, from 0.
    pub rep: u64,
}

/// A results file.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Results {
    /// What each such file begins with.
    #[serde(flatten)]
    pub head: Head<Plan>,
    /// In the order in which they were taken.
    pub samples: Vec<Sample>,
}

/// What the parts need to know.
struct Job<'a> {
    args: &'a Args,
    lab: Lab,
    stop: Arc<AtomicBool>,
    results: Results,
}

impl Job<'_> {
    fn targets(&self) -> Vec<Target> {
        self.results.head.targets.iter().filter_map(|t| t.name.parse().ok()).collect()
    }
    fn has(&self, target: &Target) -> bool {
        self.targets().contains(target)
    }
    fn note(&mut self, what: What, text: String) {
        self.results.head.plan.notes.push((what, text));
    }
    fn add(&mut self, what: What, target: &str, (step, unit): (&str, Unit), value: f64, rep: u64) {
        let sample = Sample { what, target: target.into(), step: step.into(), unit, value, rep };
        eprintln!("fxmark: {}", report::line(&sample));
        self.results.samples.push(sample);
    }
    /// Has the user given up?
    fn check(&self) -> Result<()> {
        if self.stop.load(Ordering::Relaxed) { Err(Error::Interrupted) } else { Ok(()) }
    }
}

/// Seconds that it takes, and what it gives.
fn timed<T>(work: impl FnOnce() -> Result<T>) -> Result<(T, f64)> {
    let begun = Instant::now();
    let done = work()?;
    Ok((done, begun.elapsed().as_secs_f64()))
}

/// Runs it. `before` as in [`cli::main`].
///
/// # Errors
/// Of a file system; wrong arguments.
pub fn main(args: &Args, before: &[&str]) -> Result<()> {
    let put = |r: &Results, dir: &Path| {
        let put = |what: What| {
            let mark = format!("times-{}", what.name());
            crate::report::put(&dir.join("figures.md"), &mark, &report::markdown(r, what))
        };
        report::shown(r).into_iter().try_for_each(put)
    };
    args.keep.show((SCHEMA, VERSION), || measure(args, before), put, report::terminal)
}

fn measure(args: &Args, before: &[&str]) -> Result<Results> {
    let stop = cli::stop_flag()?;
    let others = [Target::Ext4NoJournal, Target::Btrfs, Target::F2fs, Target::Tmpfs];
    let mut targets = args.lab.targets(&args.targets, &others)?;
    if let Some(t) = targets.iter().find(|t| others.contains(t) || matches!(t, Target::Dir(_))) {
        return Err(Error::Usage(format!("{t}: what is timed here is ext4, xfs, braidfs, library")));
    }
    if !args.seconds.is_finite() || !(0.001..86_400.0).contains(&args.seconds) {
        return Err(Error::Usage("--seconds has to be above nothing, and below a day".into()));
    }
    let only = |what: &[What]| args.what.iter().all(|w| what.contains(w));
    if only(&[What::Gc]) {
        targets.retain(|t| *t == Target::Library);
    }
    if targets.is_empty() {
        return Err(Error::Usage("gc: it is timed in the library: have that among the targets".into()));
    }
    let (dir, media) = args.lab.prepare(&targets, args.size, "time the library")?;
    let words = media.as_ref().map_or_else(String::new, |m| m.what().to_owned());
    let plan = Plan { reps: args.reps, media: words, notes: Vec::new() };
    let lab = args.lab.lab(media, dir.path().to_path_buf(), args.size, before);
    let results = Results { head: Head::now(SCHEMA, VERSION, plan, &targets), samples: Vec::new() };
    let begun = Instant::now();
    let mut job = Job { args, lab, stop, results };
    let mut what = args.what.clone();
    what.sort_unstable();
    what.dedup();
    for what in what {
        match what {
            What::Recovery => recovery::time(&mut job, &args.lab)?,
            What::Gc => gc::time(&mut job)?,
            What::Remount => remount::time(&mut job)?,
            What::Commit => commit::time(&mut job)?,
        }
        job.results.head.took = begun.elapsed().as_secs_f64();
        args.keep.keep(&job.results)?;
    }
    let Job { lab, results, .. } = job;
    // the device before the directory that it lies in
    drop(lab);
    Ok(results)
}
