//! `crash`: the crash explorer, with progress, checkpoint and resume. `crash --help` tells the options.

use braidfs_testkit::crash::check::Counts;
use braidfs_testkit::crash::explore::{Failed, Limits, Report, in_seconds};
use braidfs_testkit::crash::minimise::minimise;
use braidfs_testkit::crash::plan::{Part, Plan};
use braidfs_testkit::crash::run::{Standing, TURNS, brief, full};
use braidfs_testkit::crash::workload::{Base, Kind, bases};
use braidfs_testkit::env_number;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const HELP: &str = "\
crash: runs workloads, makes the images that a crash may leave at any moment, recovers and judges each.

  crash [brief]        every sequence of one operation, samples of all others
  crash full           every workload; interrupt it at any time, the same command goes on
  crash planted        with bugs on purpose: in how many crash states each is seen (feature planted-bugs)
  crash parts          which workloads there are

  --seconds N          stop after N seconds (default: brief 300, full never)
  --states N           stop after N crash states (brief: default 1000000)
  --failures N         stop after N failing workloads (default: 5)
  --threads N          (default: one per CPU)
  --deep-every N       use, unmount, check and mount again the volume after every so manieth kind of recovery; of sequences
                       of three after a quarter of that, of random runs after twice that (default: brief 8, full 4)
  --second-every N     crash every so manieth kind of recovery itself; of sequences of three an eighth of that, of random
                       runs half (default: brief 16, full 8)
  --seed N             of the random runs (default: 1)
  --file PATH          full: where it stands (default: target/crash-run.json)
  --part N             full: only this part, may be given several times
  --one PART:NUMBER    this workload alone
  --table              planted: count all, print a table for docs/testing.md
  --bug NAME           planted: only this one
  --no-minimise        print failures as they are

  BRAIDFS_SHRINK_SECONDS: how long each failure may take to be made short (default 60)";

struct Args {
    command: String,
    limits: Limits,
    seconds: Option<u64>,
    seed: u64,
    file: PathBuf,
    parts: Vec<Part>,
    one: Option<(Part, u64)>,
    table: bool,
    bug: Option<String>,
    minimise: bool,
}

fn part(number: u64) -> Result<Part, String> {
    let unknown = || format!("there is no part {number}; `crash parts` lists them");
    usize::try_from(number).ok().and_then(Part::of_number).ok_or_else(unknown)
}

fn args() -> Result<Option<Args>, String> {
    use lexopt::Arg::{Long, Value};
    let mut a = Args {
        command: String::new(),
        limits: Limits::brief(),
        seconds: None,
        seed: 1,
        file: "target/crash-run.json".into(),
        parts: Vec::new(),
        one: None,
        table: false,
        bug: None,
        minimise: true,
    };
    let mut states = None;
    let (mut failures, mut threads, mut deep, mut second) = (None, None, None, None);
    let mut args = lexopt::Parser::from_env();
    while let Some(arg) = args.next().map_err(|e| e.to_string())? {
        let name = match arg {
            Value(v) if a.command.is_empty() => {
                a.command = v.to_string_lossy().into_owned();
                continue;
            }
            Long(name) => name.to_owned(),
            _ => return Err(format!("unexpected argument\n{HELP}")),
        };
        match name.as_str() {
            "help" => {
                println!("{HELP}");
                return Ok(None);
            }
            "table" => a.table = true,
            "no-minimise" => a.minimise = false,
            _ => {
                let text = args.value().map_err(|e| e.to_string())?.to_string_lossy().into_owned();
                let number = || text.parse::<u64>().map_err(|_| format!("--{name} needs a number, not {text}"));
                match name.as_str() {
                    "seconds" => a.seconds = Some(number()?),
                    "states" => states = Some(number()?),
                    "failures" => failures = Some(number()? as usize),
                    "threads" => threads = Some(number()? as usize),
                    "deep-every" => deep = Some(number()?.max(1)),
                    "second-every" => second = Some(number()?.max(1)),
                    "seed" => a.seed = number()?,
                    "part" => a.parts.push(part(number()?)?),
                    "file" => a.file = text.into(),
                    "bug" => a.bug = Some(text),
                    "one" => {
                        let pair = text.split_once(':').and_then(|(p, n)| Some((p.parse().ok()?, n.parse().ok()?)));
                        let (p, n) = pair.ok_or("--one needs PART:NUMBER")?;
                        a.one = Some((part(p)?, n));
                    }
                    _ => return Err(format!("unknown option --{name}\n{HELP}")),
                }
            }
        }
    }
    if a.command.is_empty() {
        a.command = "brief".into();
    }
    if a.command == "full" {
        a.limits = Limits::full();
    }
    a.limits.states = states.unwrap_or(if a.command == "full" { u64::MAX } else { 1_000_000 });
    if let Some(every) = deep {
        a.limits.depth.deep_every = every;
        a.limits.three.deep_every = 4 * every;
        a.limits.random.deep_every = every.div_ceil(2);
    }
    if let Some(every) = second {
        a.limits.depth.second_every = every;
        a.limits.three.second_every = 8 * every;
        a.limits.random.second_every = 2 * every;
    }
    a.limits.failures = failures.unwrap_or(5);
    a.limits.threads = threads.unwrap_or(a.limits.threads);
    Ok(Some(a))
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
    let Some(mut a) = args()? else { return Ok(true) };
    let bases = bases().map_err(|e| format!("the volumes to begin with: {e}"))?;
    let plan = Plan::new(Kind::ORDINARY, a.seed);
    a.limits.until = a.seconds.or((a.command == "brief").then_some(300)).and_then(in_seconds);
    if let Some((part, number)) = a.one {
        let mut report = Report::new(&plan);
        if number >= plan.part(part).len {
            return Err(format!("there is no workload {part}:{number}; `crash parts` lists them"));
        }
        println!("{:#?}", plan.workload(part, number));
        let range = number..number + 1;
        let start = Instant::now();
        braidfs_testkit::crash::explore::explore(&plan, &bases, part, range, &a.limits, &mut report, &|_, _| {});
        report.failures.iter().for_each(|f| println!("{}", describe(&plan, &bases, &a.limits, a.minimise, f)));
        println!("{}", report.summary(start.elapsed()));
        return Ok(sound(&report));
    }
    match a.command.as_str() {
        "parts" => {
            Part::ALL.iter().for_each(|p| println!("{p}: {}, {} workloads", plan.part(*p).name, plan.part(*p).len));
            Ok(true)
        }
        "brief" => {
            let show = Show { plan: &plan, bar: bar(a.limits.states), start: Instant::now(), before: 0 };
            let report = brief(&plan, &bases, &a.limits, TURNS, &|part, n, len, c| {
                show.bar.set_position(c.states());
                show.tell(part, n, len, c);
            });
            let time = show.start.elapsed();
            show.bar.finish_and_clear();
            report
                .failures
                .iter()
                .for_each(|f| println!("FAILED {}", describe(&plan, &bases, &a.limits, a.minimise, f)));
            println!("{}", report.summary(time));
            Ok(sound(&report))
        }
        "full" => {
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
                &a.limits,
                &mut standing,
                &|part, n, len, c| {
                    show.bar.set_position(others(part) + n);
                    show.tell(part, n, len, c);
                },
                &|f| {
                    let text = describe(&plan, &bases, &a.limits, a.minimise, f);
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
        "planted" => planted(&plan, &bases, &a),
        other => Err(format!("unknown command {other}\n{HELP}")),
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
        println!(
            "{:16} {:6.1} s, {} of {} crash states, {} of {} workloads: {}",
            found.name,
            found.time.as_secs_f64(),
            found.counts.failing,
            found.counts.states(),
            found.workloads.1,
            found.workloads.0,
            found.first.as_deref().unwrap_or("NOT FOUND")
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
    Err(format!("{} needs a build with --features planted-bugs (table: {}, bug: {:?})", a.command, a.table, a.bug))
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
