//! A whole run: every cell in its turn, and what came out.

mod plan;
mod progress;
mod team;

pub use plan::{LONG, Profile, QUICK, STANDARD, Turn, sweep, turns, unfit};
pub use team::{Measured, Method, Team};

use crate::results::{self, CpuSplit, Latency, LockWait, Results, Run, Skipped, TargetInfo};
use crate::suite::{Group, TestId};
use crate::sys::drop_caches;
use crate::target::{Lab, Site, Target};
use crate::worker::Place;
use crate::{Error, Result, external, stats};
use progress::Progress;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::Instant;

/// Everything that a run needs to know.
#[derive(Debug)]
pub struct Job {
    /// Sizes and times, with what the user changed.
    pub profile: Profile,
    /// How cells are measured.
    pub method: Method,
    /// Tests to run, with their variants.
    pub tests: Vec<TestId>,
    /// File systems to run them on.
    pub targets: Vec<Target>,
    /// Numbers of cores.
    pub cores: Vec<usize>,
    /// Where file systems are made.
    pub lab: Lab,
    /// With one more here for each core but the first, every worker has a file system of its own.
    pub more_labs: Vec<Lab>,
    /// Drop the kernel's caches before each repetition?
    pub drop_caches: bool,
    /// Set by SIGINT and SIGTERM.
    pub stop: std::sync::Arc<AtomicBool>,
    /// Where what was measured goes if the run fails.
    pub partial: Option<PathBuf>,
}

/// Runs it.
///
/// # Errors
/// The first failed operation, with its test and target. Nothing that was made is left.
pub fn run(job: &Job) -> Result<Results> {
    let begun = Instant::now();
    let mut out = empty(job);
    let all = turns(&job.tests, &job.targets, &job.cores, job.profile.reps, job.profile.remake);
    let progress = Progress::new(all.len());
    let done = Runner { job, progress: &progress, sites: None, begun }.all(&all, &mut out);
    progress.end();
    out.head.took = begun.elapsed().as_secs_f64();
    if let Err(e) = done {
        if let Some(path) = job.partial.as_ref().filter(|_| !out.runs.is_empty()) {
            out.notes.push(format!("incomplete: {e}"));
            out.write(path)?;
            eprintln!("fxmark: what was measured before is in {}", path.display());
        }
        return Err(e);
    }
    Ok(out)
}

fn empty(job: &Job) -> Results {
    let media = job.lab.media.as_ref().map_or_else(|| "none".to_owned(), |m| m.what().to_owned());
    let plan = results::Plan {
        profile: job.profile.name.into(),
        mode: job.method.mode,
        seconds: job.method.seconds,
        warm_up: job.method.warm_up,
        reps: job.profile.reps,
        cores: job.cores.clone(),
        cpus: job.method.cpus.clone(),
        media,
        remade: job.profile.remake,
        caches_dropped: job.drop_caches,
        scale: job.method.scale,
        seed: job.method.seed,
    };
    let head = results::Head::now(results::SCHEMA, results::VERSION, plan, &[]);
    let busy = head.machine.load.parse::<f64>().is_ok_and(|l| l > 0.5);
    let notes = busy.then(|| format!("the machine did other work: load average {} at the start", head.machine.load));
    Results { head, runs: Vec::new(), skipped: Vec::new(), notes: notes.into_iter().collect() }
}

struct Runner<'a> {
    job: &'a Job,
    progress: &'a Progress,
    /// The file system that stands, where it is not made again each time.
    sites: Option<(Target, Vec<Site>)>,
    begun: Instant,
}

impl Runner<'_> {
    fn all(&mut self, turns: &[Turn<'_>], out: &mut Results) -> Result<()> {
        let job = self.job;
        for turn in turns {
            let minutes = self.begun.elapsed().as_secs_f64() / 60.0;
            if turn.rep > 0 && job.profile.minutes.is_some_and(|most| minutes > most) {
                let from = format!("{} on {}, {} core(s)", turn.test, turn.target, turn.cores);
                out.notes.push(format!(
                    "time was up after {minutes:.0} minutes: repetition {} ended before {from} (--minutes)",
                    turn.rep + 1
                ));
                break;
            }
            self.progress.next(turn);
            let done = self.one(turn, out);
            let why = match done {
                Ok(run) if run.throughput <= 0.0 => {
                    let why = "no operation was completed: measure longer (--seconds)".to_owned();
                    let (test, target) = (run.test, run.target);
                    return Err(Error::Run { test, target, cores: turn.cores, why });
                }
                Ok(run) => {
                    self.progress.done(&run);
                    out.runs.push(run);
                    continue;
                }
                Err(Error::Unsupported(why)) => why,
                Err(Error::Interrupted) => return Err(Error::Interrupted),
                Err(e) => {
                    let (test, target) = (turn.test.to_string(), turn.target.to_string());
                    return Err(Error::Run { test, target, cores: turn.cores, why: e.to_string() });
                }
            };
            let (test, target) = (turn.test.to_string(), turn.target.to_string());
            let skipped = Skipped { test, target, cores: turn.cores, why };
            if !out.skipped.contains(&skipped) {
                out.skipped.push(skipped);
            }
        }
        self.put_away()
    }

    fn put_away(&mut self) -> Result<()> {
        self.sites.take().map_or(Ok(()), |(_, sites)| close(sites))
    }

    /// The file system for a turn, or those of its workers: fresh, or what stands.
    fn sites(&mut self, turn: &Turn<'_>, out: &mut Results) -> Result<Vec<Site>> {
        let job = self.job;
        if let Some((target, sites)) = self.sites.take() {
            let library = sites.iter().any(|s| matches!(s.place, Place::Library(_)));
            if target == *turn.target && !library {
                return Ok(sites);
            }
            close(sites)?;
        }
        if job.drop_caches {
            drop_caches();
        }
        let more = job.more_labs.iter().take(turn.cores - 1);
        let sites =
            std::iter::once(&job.lab).chain(more).map(|lab| lab.make(turn.target)).collect::<Result<Vec<_>>>()?;
        let site = &sites[0];
        if !out.head.targets.iter().any(|t| t.name == turn.target.to_string()) {
            out.head.targets.push(TargetInfo { name: turn.target.to_string(), setup: site.setup.clone() });
        }
        Ok(sites)
    }

    fn one(&mut self, turn: &Turn<'_>, out: &mut Results) -> Result<Run> {
        let job = self.job;
        if let Some(why) = unfit(&turn.test, turn.target, turn.cores, job.method.cpus.len()) {
            return Err(Error::Unsupported(why));
        }
        if !job.more_labs.is_empty() && (turn.test.background || turn.test.test.group == Group::External) {
            return Err(Error::Unsupported("its workers need one file system".into()));
        }
        let sites = self.sites(turn, out)?;
        if turn.test.commits && !sites.iter().all(Site::sync_commits) {
            return Err(Error::Unsupported("syncfs(2) does not reach this mount: nobody would commit".into()));
        }
        if job.profile.remake || !job.more_labs.is_empty() {
            let places: Vec<Place> = sites.iter().map(|s| s.place.clone()).collect();
            let run = self.measure(turn, &sites, &places)?;
            close(sites)?;
            return Ok(run);
        }
        let run = match &sites[0].place {
            Place::Dir(root) => {
                let dir = tempfile::Builder::new().prefix("cell-").tempdir_in(root);
                let dir = dir.map_err(|e| Error::io(format!("making a directory in {}", root.display()), e))?;
                let run = self.measure(turn, &sites, &[Place::Dir(dir.path().to_path_buf())])?;
                dir.close().map_err(|e| Error::io("removing the files of a test", e))?;
                run
            }
            library => self.measure(turn, &sites, std::slice::from_ref(library))?,
        };
        self.sites = Some((turn.target.clone(), sites));
        Ok(run)
    }

    fn measure(&self, turn: &Turn<'_>, sites: &[Site], places: &[Place]) -> Result<Run> {
        let job = self.job;
        let devices: Vec<PathBuf> = sites.iter().filter_map(|s| s.device.clone()).collect();
        if turn.test.test.group == Group::External {
            let [Place::Dir(dir)] = places else { return Err(Error::Unsupported("not mounted".into())) };
            return external::run(turn, dir, &job.method, &job.stop, devices.first().map(PathBuf::as_path));
        }
        let mut tick = |ops| self.progress.tick(ops);
        let mut team = Team::start(&job.method, &job.stop, &turn.test, places, devices, turn.cores)?;
        sites.iter().for_each(|site| team.account(site.daemon()));
        let mut measured = team.run(&mut tick)?;
        if !sites.iter().all(Site::sync_commits) {
            // what the sync wrote is not all
            measured.settle = None;
        }
        Ok(summary(turn, &measured))
    }
}

fn close(sites: Vec<Site>) -> Result<()> {
    sites.into_iter().try_for_each(Site::close)
}

/// Runs one turn on file systems made for it; the commands that made the first one are given back, too.
///
/// # Errors
/// As of [`run`]; [`Error::Unsupported`] where the cell has to be left out.
pub fn cell(job: &Job, turn: &Turn<'_>) -> Result<(Run, Vec<String>)> {
    let mut out = empty(job);
    let progress = Progress::new(1);
    let run = Runner { job, progress: &progress, sites: None, begun: Instant::now() }.one(turn, &mut out);
    progress.end();
    Ok((run?, out.head.targets.pop().map_or_else(Vec::new, |t| t.setup)))
}

/// One run from what was measured.
fn summary(turn: &Turn<'_>, m: &Measured) -> Run {
    let (front, back): (Vec<_>, Vec<_>) = m.reports.iter().partition(|r| !r.background);
    let rates: Vec<f64> = front.iter().map(|r| if r.secs > 0.0 { r.ops as f64 / r.secs } else { 0.0 }).collect();
    let histogram = front.iter().flat_map(|r| r.latency.iter().copied()).collect();
    let sampled = front.iter().map(|r| r.sampled).max().unwrap_or(0);
    let mut lock_waits = Vec::new();
    m.reports.iter().for_each(|r| LockWait::add(&mut lock_waits, &r.lock_waits));
    let total = m.cpu.total().max(1) as f64;
    let low = rates.iter().copied().fold(f64::INFINITY, f64::min);
    Run {
        test: turn.test.to_string(),
        target: turn.target.to_string(),
        cores: turn.cores,
        rep: turn.rep,
        ops: front.iter().map(|r| r.ops).sum(),
        secs: stats::mean(&front.iter().map(|r| r.secs).collect::<Vec<_>>()),
        throughput: rates.iter().sum(),
        fairness: (if low.is_finite() { low } else { 0.0 }, rates.iter().copied().fold(0.0, f64::max)),
        background: (!back.is_empty()).then(|| back.iter().map(|r| r.ops as f64 / r.secs.max(1e-9)).sum()),
        latency: Latency::of(histogram, sampled),
        cpu: CpuSplit {
            user: m.cpu.user as f64 / total,
            system: m.cpu.system as f64 / total,
            idle: m.cpu.idle as f64 / total,
            iowait: m.cpu.iowait as f64 / total,
            steal: m.cpu.steal as f64 / total,
        },
        voluntary: front.iter().map(|r| r.voluntary).sum(),
        involuntary: front.iter().map(|r| r.involuntary).sum(),
        switches: m.switches,
        disk: m.disk,
        settle: m.settle,
        phases: m.phases,
        daemon: m.daemon,
        memory: m.memory,
        lock_waits,
        windows: m.windows.clone(),
    }
}

/// Does a directory lie on a path that exists and is one?
///
/// # Errors
/// It does not.
pub fn check_dir(dir: &Path) -> Result<()> {
    match std::fs::metadata(dir) {
        Ok(m) if m.is_dir() => Ok(()),
        Ok(_) => Err(Error::Usage(format!("{}: not a directory", dir.display()))),
        Err(e) => Err(Error::io(format!("{}", dir.display()), e)),
    }
}
