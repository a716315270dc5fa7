//! `isolation`: what a tenant keeps of its speed beside a neighbour that floods the same device (Table 3.2 and 3.3 of the
//! thesis on bladefs, with five neighbours in place of one).
//!
//! The victim runs transactions on one CPU ([`load::Victim`]), the neighbour works on another ([`load::flood`]); each has a
//! directory with half of the space: a tenant of braidfs, mounted or in process, a directory with a project quota of ext4
//! and XFS where the tools for that are there. For each repetition and target the victim's speed alone is measured first;
//! then it is paced at half of that, alone and beside each neighbour, each time on a file system that was made anew.
//! Targets take turns within each combination, so that what disturbs the machine disturbs all of them. A neighbour
//! beside a mounted file system is a process of its own; beside the library a thread.
//!
//! With `--neighbour-bps` the neighbour may read and write so many bytes a second: by its tenant's rates, or by io.max of a
//! cgroup (version 2) for the kernel's file systems, where there is one.

mod load;
mod place;
mod report;

pub use load::{Flood, Flooded};

use crate::error::On;
use crate::fs::{Fs, Kernel};
use crate::lab_args::{LabArgs, parse_size};
use crate::results::Head;
use crate::results_args::ResultsArgs;
use crate::sys;
use crate::target::{Lab, Target};
use crate::worker::Place;
use crate::{Error, Result, cli};
use load::{Seen, Victim};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

const SCHEMA: &str = "fxmark-isolation";
const VERSION: u32 = 1;
/// How often at most one combination is measured in one repetition, until the machine did not stand still meanwhile.
const TRIES: u32 = 5;

/// What a tenant keeps of its speed beside a neighbour: alone and beside five floods, with spread
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = "Examples:\n  \
    braidfs bench isolation -o isolation.json                     all that is there\n  \
    braidfs bench isolation -t braidfs,ext4 --neighbour-bps 50M   the neighbour is limited\n  \
    braidfs bench isolation -t braidfs --mount-tenants            each tenant mounted by itself\n  \
    braidfs bench isolation -t library --reps 1 --seconds 0.2     does it work? No root needed\n  \
    braidfs bench isolation --from isolation.json --docs docs     tables into docs/isolation.md")]
pub struct Args {
    /// What to test: braidfs (mounted), library (braidfs in process), ext4, xfs, all
    #[arg(short, long = "target", value_name = "TARGET", value_delimiter = ',', default_value = "all")]
    targets: Vec<String>,
    /// Loads of the neighbour, each in cells of its own
    #[arg(
        long,
        value_enum,
        value_name = "LOAD,LOAD",
        value_delimiter = ',',
        default_value = "create,stream,fsync,fill,read"
    )]
    neighbours: Vec<Flood>,
    /// Repetitions of all
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=100))]
    reps: u64,
    /// Measured time of each combination; where the machine itself paused meanwhile (root can tell), again, five times at most
    #[arg(long, value_name = "SECONDS", default_value_t = 10.0)]
    seconds: f64,
    /// Warm-up before it [default: a quarter of --seconds]
    #[arg(long, value_name = "SECONDS")]
    warm_up: Option<f64>,
    /// Size of the file systems
    #[arg(long, value_name = "BYTES", value_parser = parse_size, default_value = "4G")]
    size: u64,
    /// Size of the victim's file
    #[arg(long, value_name = "BYTES", value_parser = parse_size, default_value = "64M")]
    file: u64,
    /// Most bytes a second that the neighbour may read, and as many that it may write [default: no limit]
    #[arg(long, value_name = "BYTES", value_parser = parse_size)]
    neighbour_bps: Option<u64>,
    /// Of braidfs mounted: each tenant is mounted by itself
    #[arg(long)]
    mount_tenants: bool,
    /// CPU of the victim and of the neighbour, as 0,1 [default: the first two that this process may use]
    #[arg(long, value_name = "N,N")]
    cpus: Option<String>,
    #[command(flatten)]
    pub(crate) lab: LabArgs,
    #[command(flatten)]
    keep: ResultsArgs,
}

/// Not for people: a neighbour of a mounted file system.
#[derive(Debug, clap::Args)]
pub struct NeighbourArgs {
    dir: PathBuf,
    #[arg(value_enum)]
    flood: Flood,
    bytes: u64,
    cpu: usize,
    /// A cgroup to enter.
    cgroup: Option<PathBuf>,
}

/// How victim and neighbour were set up and measured.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Plan {
    /// Bytes of a file system.
    pub size: u64,
    /// What they lay on.
    pub media: String,
    /// Bytes of the victim's file.
    pub file: u64,
    /// Measured time, seconds.
    pub seconds: f64,
    /// Time before it that does not count, seconds.
    pub warm_up: f64,
    /// Repetitions of each cell.
    pub reps: u64,
    /// Most bytes a second of the neighbour, each way.
    pub neighbour_bps: Option<u64>,
    /// Of braidfs mounted: was each tenant mounted by itself?
    #[serde(default)]
    pub mount_tenants: bool,
    /// Of the victim and of the neighbour.
    pub cpus: [usize; 2],
    /// Was what lay there dropped from the kernel's caches before?
    pub cold: bool,
}

/// One combination, once.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Cell {
    /// Of the repetition.
    pub rep: u64,
    /// As it was named.
    pub target: String,
    /// None: the victim was alone.
    pub neighbour: Option<Flood>,
    /// Transactions a second that the victim was to do.
    pub paced: f64,
    /// That it did.
    pub rate: f64,
    /// Time of a transaction, µs.
    pub p50: f64,
    /// 99th percentile of that time, µs.
    pub p99: f64,
    /// The longest transaction, µs.
    pub max: f64,
    /// Seconds of the measured time in which the whole machine stood still; none where nobody could tell.
    #[serde(default)]
    pub paused: Option<f64>,
    /// What the neighbour did.
    pub flooded: Option<Flooded>,
}

/// A results file.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Results {
    /// What each such file begins with; the targets' set-up has their limits, too.
    #[serde(flatten)]
    pub head: Head<Plan>,
    /// In the order in which they ran.
    pub cells: Vec<Cell>,
}

/// Runs it. `before` as in [`cli::main`].
///
/// # Errors
/// Of a file system; wrong arguments.
pub fn main(args: &Args, before: &[&str]) -> Result<()> {
    let put =
        |r: &Results, dir: &Path| crate::report::put(&dir.join("isolation.md"), "isolation", &report::markdown(r));
    args.keep.show((SCHEMA, VERSION), || measure(args, before), put, report::terminal)
}

/// The hidden `neighbour` command: floods until its standard input ends, and tells what it did.
///
/// # Errors
/// A failed operation.
pub fn neighbour(args: &NeighbourArgs) -> Result<()> {
    if let Some(cgroup) = &args.cgroup {
        let at = cgroup.join("cgroup.procs");
        std::fs::write(&at, "0").map_err(|e| Error::io(format!("entering {}", cgroup.display()), e))?;
    }
    sys::die_with_parent();
    sys::pin(args.cpu).map_err(|e| Error::io(format!("going to CPU {}", args.cpu), e))?;
    let fs = Kernel::at(&args.dir).map_err(|e| Error::io(format!("opening {}", args.dir.display()), e))?;
    let stop = std::sync::Arc::new(AtomicBool::new(false));
    let told = stop.clone();
    let watch = move || {
        // its end, or an error that is as good
        let _ = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
        told.store(true, Ordering::Relaxed);
    };
    std::thread::spawn(watch);
    let done = load::flood(&fs, (place::NEIGHBOUR, args.flood, args.bytes), || drop(cli::say("ready")), &stop)?;
    cli::say(&serde_json::to_string(&done).map_err(|e| Error::io("writing", std::io::Error::from(e)))?)
}

fn targets(args: &Args) -> Result<Vec<Target>> {
    let others = [Target::Ext4NoJournal, Target::Btrfs, Target::F2fs, Target::Tmpfs];
    let targets = args.lab.targets(&args.targets, &others)?;
    if let Some(t) = targets.iter().find(|t| others.contains(t) || matches!(t, Target::Dir(_))) {
        return Err(Error::Usage(format!(
            "{t}: nothing is limited by directory there: test braidfs, library, ext4, xfs"
        )));
    }
    if args.mount_tenants && !targets.contains(&Target::Braidfs) {
        return Err(Error::Usage("--mount-tenants: braidfs, mounted, is not among the targets".into()));
    }
    let fine = |n: f64| n.is_finite() && n > 0.0 && n < 86_400.0;
    if !fine(args.seconds) || args.warm_up.is_some_and(|n| !n.is_finite() || !(0.0..86_400.0).contains(&n)) {
        return Err(Error::Usage("--seconds and --warm-up have to be between nothing and a day".into()));
    }
    if args.file > args.size / 8 {
        return Err(Error::Usage("--file: the victim's file has an eighth of --size at most".into()));
    }
    Ok(targets)
}

fn cpus(args: &Args) -> Result<[usize; 2]> {
    let allowed = sys::allowed().map_err(|e| Error::io("asking for the CPUs", e))?;
    let Some(list) = &args.cpus else {
        // with one CPU both are there
        return Ok([allowed[0], allowed[1 % allowed.len()]]);
    };
    match sys::parse_list(list).map_err(Error::Usage)?[..] {
        [a, b] if allowed.contains(&a) && allowed.contains(&b) => Ok([a, b]),
        _ => Err(Error::Usage(format!("--cpus: two that this process may use, of {allowed:?}"))),
    }
}

fn measure(args: &Args, before: &[&str]) -> Result<Results> {
    let stop = cli::stop_flag()?;
    let targets = targets(args)?;
    let (dir, media) = args.lab.prepare(&targets, args.size, "test the library")?;
    let plan = Plan {
        size: args.size,
        media: media.as_ref().map_or_else(String::new, |m| m.what().to_owned()),
        file: args.file,
        seconds: args.seconds,
        warm_up: args.warm_up.unwrap_or(args.seconds / 4.0),
        reps: args.reps,
        neighbour_bps: args.neighbour_bps,
        mount_tenants: args.mount_tenants,
        cpus: cpus(args)?,
        cold: rustix::process::geteuid().is_root(),
    };
    let mut lab = args.lab.lab(media, dir.path().to_path_buf(), args.size, before);
    place::ask_for_quotas(&mut lab, &targets);
    let results = run(&lab, plan, &targets, args, &stop, before);
    // the device before the directory that it lies in
    drop(lab);
    results
}

fn run(lab: &Lab, plan: Plan, targets: &[Target], args: &Args, stop: &AtomicBool, before: &[&str]) -> Result<Results> {
    let began = Instant::now();
    let mut results = Results { head: Head::now(SCHEMA, VERSION, plan, targets), cells: Vec::new() };
    for rep in 0..args.reps {
        let mut paced = vec![0.0; targets.len()];
        for neighbour in std::iter::once(None).chain(args.neighbours.iter().copied().map(Some)) {
            for (i, target) in targets.iter().enumerate() {
                let one = One { lab, plan: &results.head.plan, target, neighbour, stop, before };
                let (seen, flooded, setup, rate) = one.run(paced[i])?;
                paced[i] = rate;
                let cell = Cell {
                    rep,
                    target: target.to_string(),
                    neighbour,
                    paced: rate,
                    rate: seen.rate(),
                    p50: seen.quantile(0.5),
                    p99: seen.quantile(0.99),
                    max: seen.quantile(1.0),
                    paused: seen.paused,
                    flooded,
                };
                eprintln!("fxmark: {}", report::line(&cell));
                results.cells.push(cell);
                results.head.targets[i].setup = setup;
                results.head.took = began.elapsed().as_secs_f64();
                args.keep.keep(&results)?;
            }
        }
    }
    Ok(results)
}

/// A combination that is about to be measured.
struct One<'a> {
    lab: &'a Lab,
    plan: &'a Plan,
    target: &'a Target,
    neighbour: Option<Flood>,
    stop: &'a AtomicBool,
    before: &'a [&'a str],
}

type Measured = (Seen, Option<Flooded>, Vec<String>, f64);

/// Measures again, a few times, what the machine's own pauses fell into; the least disturbed of all.
fn undisturbed(mut measure: impl FnMut() -> Result<Seen>) -> Result<Seen> {
    let paused = |seen: &Seen| seen.paused.unwrap_or(0.0);
    let mut best = measure()?;
    for _ in 1..TRIES {
        if paused(&best) == 0.0 {
            break;
        }
        let again = measure()?;
        if paused(&again) < paused(&best) {
            best = again;
        }
    }
    Ok(best)
}

impl One<'_> {
    /// On a file system of its own. `paced` 0: at half of what the victim can do alone, which is measured first; that
    /// speed is given back.
    fn run(&self, paced: f64) -> Result<Measured> {
        if self.plan.cold {
            sys::drop_caches();
        }
        let mut site = self.lab.make(self.target)?;
        let mut setup = std::mem::take(&mut site.setup);
        let measured = match &site.place {
            Place::Dir(at) => {
                let device = site.device.clone();
                let limits = place::limit_mounted(self.lab, self.target, at, device.as_deref(), self.plan);
                let place::Limits { said: more, cgroup, mounts } = limits?;
                setup.extend(more);
                let fs = Kernel::at(at).map_err(|e| Error::io(format!("opening {}", at.display()), e))?;
                let beside = |flood, bytes| {
                    place::Process::start(self.before, at, (flood, bytes), self.plan.cpus[1], cgroup.as_ref())
                };
                let done = self.victim(&fs, paced, |flood, bytes, work| {
                    let process = beside(flood, bytes)?;
                    let seen = work()?;
                    Ok((seen, process.end()?))
                });
                drop(fs);
                mounts.end()?;
                done?
            }
            Place::Library(device) => self.in_process(device, &mut setup, paced)?,
        };
        site.close()?;
        let (seen, flooded, rate) = measured;
        Ok((seen, flooded, setup, rate))
    }

    #[cfg(feature = "braidfs")]
    fn in_process(
        &self,
        device: &std::path::Path,
        setup: &mut Vec<String>,
        paced: f64,
    ) -> Result<(Seen, Option<Flooded>, f64)> {
        let failed = |e| Error::io(format!("mounting {}", device.display()), e);
        let fs = crate::fs::Library::mount(device).map_err(failed)?;
        setup.extend(place::tenants(&fs, self.plan)?);
        let done = self.victim(&fs, paced, |flood, bytes, work| {
            let end = AtomicBool::new(false);
            let (ready, begun) = std::sync::mpsc::channel::<()>();
            std::thread::scope(|s| {
                let flooding = s.spawn(|| {
                    sys::pin(self.plan.cpus[1]).map_err(|e| Error::io("going to a CPU", e))?;
                    let ready = move || {
                        let _ = ready.send(());
                    };
                    load::flood(&fs, (place::NEIGHBOUR, flood, bytes), ready, &end)
                });
                // an error where it failed before
                let seen = begun.recv().map_or_else(|_| Ok(Seen::default()), |()| work());
                end.store(true, Ordering::Relaxed);
                let flooded = flooding.join().map_err(|_| Error::Other("the neighbour panicked".into()))?;
                Ok((seen?, flooded?))
            })
        });
        let unmounted = fs.unmount().map_err(|e| Error::io(format!("unmounting {}", device.display()), e));
        let done = done?;
        unmounted?;
        Ok(done)
    }

    #[cfg(not(feature = "braidfs"))]
    fn in_process(&self, _: &std::path::Path, _: &mut Vec<String>, _: f64) -> Result<(Seen, Option<Flooded>, f64)> {
        Err(Error::Usage("this fxmark was built without the braidfs library".into()))
    }

    /// The victim's part, on its CPU; `beside` has it run beside a neighbour.
    fn victim<F: Fs>(
        &self,
        fs: &F,
        paced: f64,
        beside: impl FnOnce(Flood, u64, &mut (dyn FnMut() -> Result<Seen> + '_)) -> Result<(Seen, Flooded)>,
    ) -> Result<(Seen, Option<Flooded>, f64)> {
        let p = self.plan;
        // the whole process may run anywhere again afterwards
        let allowed = rustix::thread::sched_getaffinity(None).map_err(|e| Error::io("asking for the CPUs", e))?;
        sys::pin(p.cpus[0]).map_err(|e| Error::io(format!("going to CPU {}", p.cpus[0]), e))?;
        let done = (|| {
            let mut victim = Victim::new(fs, place::VICTIM, p.file)?;
            fs.sync().on("syncfs", victim.name())?;
            // the speed alone, too: a pause makes it less, and half of less is easier to keep
            let mut at = |rate| undisturbed(|| victim.run(rate, (p.warm_up, p.seconds), &p.cpus, self.stop));
            let rate = if paced > 0.0 { paced } else { at(0.0)?.rate() / 2.0 };
            let mut work = || at(rate);
            match self.neighbour {
                None => Ok((work()?, None, rate)),
                // a quarter of what it may have
                Some(flood) => {
                    let (seen, flooded) = beside(flood, p.size / 8, &mut work)?;
                    Ok((seen, Some(flooded), rate))
                }
            }
        })();
        let _ = rustix::thread::sched_setaffinity(None, &allowed);
        done
    }
}
