//! `crash`: the crash explorer, with progress, checkpoint and resume. `crash --help` tells the options.

use braidfs_testkit::crash::check::Counts;
use braidfs_testkit::crash::explore::{Failed, Limits, Report, in_seconds};
use braidfs_testkit::crash::minimise::minimise;
use braidfs_testkit::crash::plan::{Part, Plan};
use braidfs_testkit::crash::run::{Standing, TURNS, brief, full};
use braidfs_testkit::crash::workload::{Base, Kind, bases};
use braidfs_testkit::env_number;
use clap::{Parser, ValueEnum};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Runs workloads, makes the images that a crash may leave at any moment, recovers and judges each.
#[derive(Parser)]
#[command(name = "crash", after_help = "BRAIDFS_SHRINK_SECONDS: how long each failure may take to be made short (60)")]
struct Args {
    #[arg(value_enum, default_value_t = Command::Brief)]
    command: Command,
    /// Stop after so many seconds [default: brief 300, full never]
    #[arg(long)]
    seconds: Option<u64>,
    /// Stop after so many crash states [default: brief 1000000, full never]
    #[arg(long)]
    states: Option<u64>,
    /// Stop after so many failing workloads
    #[arg(long, default_value_t = 5)]
    failures: usize,
    /// Threads [default: one per CPU]
    #[arg(long)]
    threads: Option<usize>,
    /// Use, unmount, check and mount again the volume after every so manieth kind of recovery; of sequences of three after
    /// a quarter of that, of random runs after twice that [default: brief 8, full 4]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    deep_every: Option<u64>,
    /// Crash every so manieth kind of recovery itself (0: none); of sequences of three an eighth of that, of random runs half
    /// [default: brief 16, full 8]
    #[arg(long)]
    second_every: Option<u64>,
    /// Run every so manieth kind of recovery again by several threads, and crash it (0: none) [default: brief 48, full 32]
    #[arg(long)]
    threads_every: Option<u64>,
    /// Of the unflushed writes at a point, try every subset where they are so many at most [default: 12; of random runs 6]
    #[arg(long, value_parser = clap::value_parser!(u8).range(0..=16))]
    subsets: Option<u8>,
    /// Where there are more, so many random subsets; and always so many torn writes and so many random mixes
    /// [default: brief 32, full 64; of sequences of three and of random runs fewer]
    #[arg(long)]
    samples: Option<u16>,
    /// Seed of the random runs
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// full: where it stands
    #[arg(long, default_value = "target/crash-run.json")]
    file: PathBuf,
    /// full: only this part, may be given several times
    #[arg(long = "part", value_name = "N", value_parser = part)]
    parts: Vec<Part>,
    /// Of sequences of basic operations only those with one whose name has this
    #[arg(long, value_name = "TEXT")]
    with: Option<String>,
    /// This workload alone
    #[arg(long, value_name = "PART:NUMBER", value_parser = workload)]
    one: Option<(Part, u64)>,
    /// planted: count all, print a table for docs/testing.md
    #[arg(long)]
    table: bool,
    /// planted: only this one
    #[arg(long)]
    bug: Option<String>,
    /// Print failures as they are
    #[arg(long)]
    no_minimise: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Command {
    /// Some of each kind of workload in turns
    Brief,
    /// Every workload; interrupt it at any time, the same command goes on
    Full,
    /// With bugs on purpose: in how many crash states each is seen (feature planted-bugs)
    Planted,
    /// Which workloads there are
    Parts,
}

fn part(number: &str) -> Result<Part, String> {
    let part = number.parse().ok().and_then(Part::of_number);
    part.ok_or_else(|| format!("there is no part {number}; `crash parts` lists them"))
}

fn workload(text: &str) -> Result<(Part, u64), String> {
    let (p, n) = text.split_once(':').ok_or("write it as PART:NUMBER")?;
    Ok((part(p)?, n.parse().map_err(|_| format!("{n} is no number"))?))
}

fn limits(a: &Args) -> Limits {
    let full = a.command == Command::Full;
    let mut l = if full { Limits::full() } else { Limits::brief() };
    l.states = a.states.unwrap_or(if full { u64::MAX } else { 1_000_000 });
    if let Some(every) = a.deep_every {
        l.depth.deep_every = every;
        l.three.deep_every = 4 * every;
        l.random.deep_every = every.div_ceil(2);
    }
    if let Some(every) = a.second_every {
        l.depth.second_every = every;
        l.three.second_every = 8 * every;
        l.random.second_every = 2 * every;
    }
    if let Some(every) = a.threads_every {
        for depth in [&mut l.depth, &mut l.three, &mut l.random] {
            depth.threads_every = every;
        }
    }
    for depth in [&mut l.depth, &mut l.three, &mut l.random] {
        let budget = &mut depth.budget;
        budget.subsets = a.subsets.map_or(budget.subsets, usize::from);
        budget.samples = a.samples.map_or(budget.samples, usize::from);
    }
    l.failures = a.failures;
    l.threads = a.threads.unwrap_or(l.threads);
    l.until = a.seconds.or((a.command == Command::Brief).then_some(300)).and_then(in_seconds);
    l
}

/// A bar on a terminal, nothing in a pipe.
fn bar(len: u64) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(len), ProgressDrawTarget::stderr_with_hz(4));
    let style = ProgressStyle::with_template("{elapsed_precise} {wide_bar} {percent}% {msg}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar
}

struct Show<'a> {
    plan: &'a Plan,
    bar: ProgressBar,
    start: Instant,
    before: u64,
}

impl Show<'_> {
    fn tell(&self, part: Part, done: u64, len: u64, c: &Counts) {
        let rate = (c.states() - self.before) as f64 / self.start.elapsed().as_secs_f64();
        self.bar.set_message(format!(
            "{}: {done} of {len}; {} states, {rate:.0}/s, {} failing",
            self.plan.part(part).name,
            c.states(),
            c.failing
        ));
    }
}

fn describe(plan: &Plan, bases: &[Base], limits: &Limits, short: bool, f: &Failed) -> String {
    let mut text = format!("{}, number {} (--one {0}:{1}):\n  {}\n", f.part, f.number, f.failure);
    text.insert_str(0, &format!("{}: part ", plan.part(f.part).name));
    if short {
        let limit = Duration::from_secs(env_number("BRAIDFS_SHRINK_SECONDS", 60));
        text += match minimise(bases, &f.workload, &f.failure, limits.random_ops, limit) {
            Ok(Some(s)) => format!("made short: {}\n{}", s.failure(), s.to_test()),
            Ok(None) => format!("when tried again alone it passes: {:?}\n", f.workload),
            Err(e) => format!("not made short: {e}\n"),
        }
        .as_str();
    }
    text
}

/// Nothing failed, and no recovery depended on more than what it read.
fn sound(r: &Report) -> bool {
    r.failures.is_empty() && r.counts.strays == 0
}

fn run() -> Result<bool, String> {
    let a = Args::parse();
    let (limits, short) = (limits(&a), !a.no_minimise);
    let bases = bases().map_err(|e| format!("the volumes to begin with: {e}"))?;
    let plan = Plan::new(Kind::ORDINARY, a.seed);
    let plan = if let Some(text) = &a.with { plan.with(text)? } else { plan };
    if let Some((part, number)) = a.one {
        let mut report = Report::new(&plan);
        if number >= plan.part(part).len {
            return Err(format!("there is no workload {part}:{number}; `crash parts` lists them"));
        }
        println!("{:#?}", plan.workload(part, number));
        let range = number..number + 1;
        let start = Instant::now();
        braidfs_testkit::crash::explore::explore(&plan, &bases, part, range, &limits, &mut report, &|_, _| {});
        report.failures.iter().for_each(|f| println!("{}", describe(&plan, &bases, &limits, short, f)));
        println!("{}", report.summary(start.elapsed()));
        return Ok(sound(&report));
    }
    match a.command {
        Command::Parts => {
            Part::ALL.iter().for_each(|p| println!("{p}: {}, {} workloads", plan.part(*p).name, plan.part(*p).len));
            Ok(true)
        }
        Command::Brief => {
            let show = Show { plan: &plan, bar: bar(limits.states), start: Instant::now(), before: 0 };
            let report = brief(&plan, &bases, &limits, TURNS, &|part, n, len, c| {
                show.bar.set_position(c.states());
                show.tell(part, n, len, c);
            });
            let time = show.start.elapsed();
            show.bar.finish_and_clear();
            report.failures.iter().for_each(|f| println!("FAILED {}", describe(&plan, &bases, &limits, short, f)));
            println!("{}", report.summary(time));
            Ok(sound(&report))
        }
        Command::Full => {
            let mut standing = Standing::load(&plan, &a.file)?;
            let parts: Vec<Part> = if a.parts.is_empty() { Part::ORDER.to_vec() } else { a.parts.clone() };
            let total = parts.iter().map(|p| plan.part(*p).len).sum();
            let before = standing.report(&plan).counts.states();
            let show = Show { plan: &plan, bar: bar(total), start: Instant::now(), before };
            let others = |part: Part| parts.iter().take_while(|p| **p != part).map(|p| plan.part(*p).len).sum::<u64>();
            full(
                &plan,
                &bases,
                &parts,
                &limits,
                &mut standing,
                &|part, n, len, c| {
                    show.bar.set_position(others(part) + n);
                    show.tell(part, n, len, c);
                },
                &|f| {
                    let text = describe(&plan, &bases, &limits, short, f);
                    show.bar.suspend(|| println!("FAILED {text}"));
                    text
                },
            )?;
            show.bar.finish_and_clear();
            for (name, done, len) in standing.parts() {
                println!("{name}: {done} of {len}");
            }
            let report = standing.report(&plan);
            println!("{}", report.summary(standing.time()));
            println!("{} failing workloads; where it stands: {}", standing.failures().len(), a.file.display());
            Ok(standing.failures().is_empty() && sound(&report))
        }
        Command::Planted => planted(&plan, &bases, &a),
    }
}

#[cfg(feature = "planted-bugs")]
fn planted(plan: &Plan, bases: &[Base], a: &Args) -> Result<bool, String> {
    use braidfs::planted::Bug;
    use braidfs_testkit::crash::planted::{hunt, table};
    // what a bug on purpose makes panic is not worth a backtrace
    std::panic::set_hook(Box::new(|_| {}));
    let bugs: Vec<_> = Bug::ALL.iter().filter(|b| a.bug.as_ref().is_none_or(|n| n == b.1)).collect();
    if bugs.is_empty() {
        return Err("no such bug".into());
    }
    let mut all = Vec::new();
    for bug in bugs {
        let found = hunt(plan, bases, bug, a.table);
        let first = match &found.first {
            Some((class, why)) => format!("seen by {}: {why}", class.name()),
            None if found.live > 0 => format!("NOT FOUND in a crash state; {} workloads fail before any", found.live),
            None => "NOT FOUND".into(),
        };
        println!(
            "{:16} {:6.1} s, {} of {} crash states, {} of {} workloads: {first}",
            found.name,
            found.time.as_secs_f64(),
            found.counts.failing,
            found.counts.states(),
            found.workloads.1,
            found.workloads.0,
        );
        all.push(found);
    }
    if a.table {
        println!("\n{}", table(&all));
    }
    Ok(all.iter().all(|f| f.first.is_some()))
}

#[cfg(not(feature = "planted-bugs"))]
fn planted(_: &Plan, _: &[Base], a: &Args) -> Result<bool, String> {
    Err(format!("this needs a build with --features planted-bugs (table: {}, bug: {:?})", a.table, a.bug))
}

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            eprintln!("crash: {e}");
            ExitCode::from(2)
        }
    }
}
