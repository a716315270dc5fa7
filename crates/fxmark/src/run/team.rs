//! The workers of one cell, from the coordinator's side: starts the processes, gives orders, collects reports.
//!
//! Dropped, it kills what still runs. The coordinator sleeps between looks: it takes no CPU from the workers.

use crate::results::{Memory, Window};
use crate::suite::TestId;
use crate::sys::{
    CpuTimes, DiskCounters, cpu_times, disk_counters, kernel_memory, process_cpu, process_peak, switches,
};
use crate::target::SWITCHES;
use crate::worker::{Answer, Control, Mode, Order, Place, Report, Scale, Shared, Spec};
use crate::{Error, Result};
use rustix::fd::AsRawFd;
use std::ffi::OsString;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Between two looks at the workers.
const LOOK: Duration = Duration::from_millis(2);
/// Nothing that is not timed takes longer, unless it hangs.
const PATIENCE: Duration = Duration::from_secs(900);
/// Preparing again may take so many times as long as measuring.
const REFILL_FACTOR: f64 = 6.0;
/// And this much on top, seconds.
const REFILL_MORE: f64 = 2.0;

/// How one cell is measured.
#[derive(Debug, Clone)]
pub struct Method {
    /// How the tests are set up.
    pub mode: Mode,
    /// Sizes of what the tests make.
    pub scale: Scale,
    /// Of random numbers.
    pub seed: u64,
    /// Measured time, seconds.
    pub seconds: f64,
    /// Before it, seconds.
    pub warm_up: f64,
    /// Figures for parts of the measurement, each so long, seconds; 0: none.
    pub window: f64,
    /// Is the library mounted with `data=journal`?
    pub journal: bool,
    /// Switches for experiments of the library, [`SWITCHES`]; none: as this process has them.
    pub switches: Option<String>,
    /// CPUs that may be used, in order.
    pub cpus: Vec<usize>,
    /// How this program is called as a worker: after its own path.
    pub worker_args: Vec<OsString>,
}

/// What was measured.
#[derive(Debug, Clone, Default)]
pub struct Measured {
    /// Of every worker.
    pub reports: Vec<Report>,
    /// Of the CPUs that workers were pinned to.
    pub cpu: CpuTimes,
    /// Context switches of the machine.
    pub switches: u64,
    /// What the device did meanwhile.
    pub disk: Option<DiskCounters>,
    /// And afterwards, until everything was durable.
    pub settle: Option<DiskCounters>,
    /// Number of timed phases.
    pub phases: u32,
    /// CPU time of the file system's processes, seconds.
    pub daemon: Option<f64>,
    /// Memory of the file system at the end.
    pub memory: Option<Memory>,
    /// Parts of the measurement.
    pub windows: Vec<Window>,
}

/// The workers of one cell.
#[derive(Debug)]
pub struct Team<'a> {
    method: &'a Method,
    stop: &'a AtomicBool,
    control: Shared,
    hosts: Vec<Child>,
    workers: usize,
    cpus: Vec<usize>,
    devices: Vec<PathBuf>,
    /// Of the kernel's caches and structures before.
    kernel: u64,
    /// Processes that are the file system.
    daemons: Vec<u32>,
    windows: Vec<Window>,
}

impl<'a> Team<'a> {
    /// Starts `cores` workers, and one more in the background where the test has that. They are divided over `places`, each
    /// a file system; `devices` are these file systems'.
    ///
    /// # Errors
    /// A process cannot be started.
    pub fn start(
        method: &'a Method,
        stop: &'a AtomicBool,
        test: &TestId,
        places: &[Place],
        devices: Vec<PathBuf>,
        cores: usize,
    ) -> Result<Self> {
        let workers = cores + usize::from(test.background);
        let control = Shared::new().map_err(|e| Error::io("making the control memory", e))?;
        let cpu_of = |worker: usize| method.cpus.get(worker % method.cpus.len().max(1)).copied().unwrap_or(0);
        let mine: Vec<(usize, usize)> = (0..workers).map(|w| (w, cpu_of(w))).collect();
        let mut cpus: Vec<usize> = mine.iter().map(|m| m.1).collect();
        cpus.dedup();
        let (daemons, windows, hosts) = (Vec::new(), Vec::new(), Vec::new());
        let kernel = kernel_memory();
        let mut team = Self { method, stop, control, hosts, workers, cpus, devices, kernel, daemons, windows };
        let control_fd = team.control.fd().as_raw_fd();
        let spec = |place: &Place, mine: &[(usize, usize)]| Spec {
            test: test.to_string(),
            place: place.clone(),
            mode: method.mode,
            scale: method.scale,
            seed: method.seed,
            seconds: method.seconds,
            foreground: cores,
            workers,
            parts: places.len(),
            journal: method.journal,
            mine: mine.to_vec(),
            control_fd,
        };
        for (i, place) in places.iter().enumerate() {
            let mine: Vec<(usize, usize)> = mine.iter().skip(i).step_by(places.len()).copied().collect();
            let specs: Vec<Spec> = match place {
                Place::Dir(_) => mine.chunks(1).map(|one| spec(place, one)).collect(),
                // one process has the volume
                Place::Library(_) => vec![spec(place, &mine)],
            };
            for spec in specs {
                let host = team.host(&spec)?;
                if matches!(place, Place::Library(_)) {
                    team.daemons.push(host.id());
                }
                team.hosts.push(host);
            }
        }
        Ok(team)
    }

    /// Counts the CPU time of this process, too: it is the file system.
    pub fn account(&mut self, daemon: Option<u32>) {
        self.daemons.extend(daemon);
    }

    /// CPU time of the file system's processes so far, seconds.
    fn daemon_cpu(&self) -> Option<f64> {
        if self.daemons.is_empty() { None } else { self.daemons.iter().map(|pid| process_cpu(*pid)).sum() }
    }

    fn memory(&self) -> Memory {
        let peaks = self.daemons.iter().filter_map(|pid| process_peak(*pid));
        let process = (!self.daemons.is_empty()).then(|| peaks.sum());
        Memory { process, kernel: kernel_memory().saturating_sub(self.kernel) }
    }

    /// What its devices have done so far; none where there is none.
    fn disk(&self) -> Option<DiskCounters> {
        let mut sum = None::<DiskCounters>;
        for device in &self.devices {
            *sum.get_or_insert_default() += disk_counters(device)?;
        }
        sum
    }

    fn host(&self, spec: &Spec) -> Result<Child> {
        let exe = std::env::current_exe().map_err(|e| Error::io("finding this program", e))?;
        let mut command = Command::new(exe);
        // a group of its own: Ctrl-C is for the coordinator, which then ends the workers
        command.args(&self.method.worker_args).process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped());
        if let Some(switches) = &self.method.switches {
            command.env(SWITCHES, switches);
        }
        let mut child = command.spawn().map_err(|e| Error::io("starting a worker", e))?;
        let told = child.stdin.take().map(|mut to| {
            let text = serde_json::to_vec(spec).map_err(std::io::Error::from)?;
            to.write_all(&text)
        });
        match told {
            Some(Ok(())) => Ok(child),
            Some(Err(e)) => {
                end(&mut child);
                Err(Error::io("talking to a worker", e))
            }
            None => Ok(child),
        }
    }

    /// The page that is shared with the workers.
    pub fn control(&self) -> &Control {
        &self.control
    }

    /// Prepares, warms up, measures, collects.
    ///
    /// # Errors
    /// The first failed operation of any worker; [`Error::Interrupted`].
    pub fn run(mut self, tick: &mut dyn FnMut(u64)) -> Result<Measured> {
        for order in [Order::Share, Order::Prepare, Order::AfterPrepare] {
            self.order(order, None, tick)?;
        }
        let original = self.method.mode == Mode::Original;
        if !original && self.method.warm_up > 0.0 {
            self.order(Order::Warm, Some(self.method.warm_up), tick)?;
            self.order(Order::Refill, None, tick)?;
        }
        self.order(Order::Sync, None, tick)?;
        let mut done = Measured::default();
        let (begun, mut measured) = (Instant::now(), 0.0);
        let add = |sum: &mut Option<DiskCounters>, from: Option<DiskCounters>, to: Option<DiskCounters>| {
            if let (Some(a), Some(b)) = (from, to) {
                *sum.get_or_insert_default() += b - a;
            }
        };
        loop {
            let (cpu, switched, disk) = (cpu_times(&self.cpus), switches(), self.disk());
            let daemon = self.daemon_cpu();
            measured += self.order(Order::Measure, Some(self.method.seconds - measured), tick)?;
            done.cpu += cpu_times(&self.cpus) - cpu;
            if let (Some(from), Some(to)) = (daemon, self.daemon_cpu()) {
                *done.daemon.get_or_insert_default() += to - from;
            }
            done.switches += switches().saturating_sub(switched);
            let after = self.disk();
            add(&mut done.disk, disk, after);
            done.phases += 1;
            let too_long = begun.elapsed().as_secs_f64() > REFILL_FACTOR * self.method.seconds + REFILL_MORE;
            if original || too_long || measured >= 0.97 * self.method.seconds {
                self.order(Order::Sync, None, tick)?;
                add(&mut done.settle, after, self.disk());
                break;
            }
            self.order(Order::Refill, None, tick)?;
            self.order(Order::Sync, None, tick)?;
        }
        done.memory = Some(self.memory());
        done.windows = std::mem::take(&mut self.windows);
        done.reports = self.finish()?;
        Ok(done)
    }

    /// Gives an order and waits until all workers have done it; how long that took. A timed one is halted after
    /// `seconds`, counted from when all have begun.
    fn order(&mut self, order: Order, seconds: Option<f64>, tick: &mut dyn FnMut(u64)) -> Result<f64> {
        let number = self.control.order(order);
        let ordered = Instant::now();
        let mut begun = ordered;
        let limit = seconds.map(|s| Duration::from_secs_f64(s.max(0.0)));
        let mut started = limit.is_none();
        let cut = if order == Order::Measure { self.method.window } else { 0.0 };
        let mut window = None;
        loop {
            if !started {
                started = self.control.all_started(self.workers);
                begun = Instant::now();
            }
            if cut > 0.0 && started {
                let now = (Instant::now(), self.control.total(self.workers), self.daemon_cpu());
                let (from, ops, daemon) = *window.get_or_insert(now);
                let secs = (now.0 - from).as_secs_f64();
                if secs >= cut {
                    let daemon = now.2.zip(daemon).map(|(to, from)| to - from);
                    self.windows.push(Window { secs, ops: now.1.saturating_sub(ops), daemon });
                    window = Some(now);
                }
            }
            if self.control.arrived() >= self.workers {
                return Ok(begun.elapsed().as_secs_f64());
            }
            self.check()?;
            let gone = begun.elapsed();
            if ordered.elapsed() > PATIENCE {
                let text =
                    format!("no answer from the workers for {} s while they should {order:?}", PATIENCE.as_secs());
                return Err(Error::Other(text));
            }
            let nap = match limit {
                Some(_) if !started => Duration::from_micros(100),
                Some(limit) if gone >= limit => {
                    self.control.halt(number);
                    LOOK
                }
                Some(limit) => LOOK.min(limit - gone),
                None => LOOK,
            };
            tick(self.control.total(self.workers));
            std::thread::sleep(nap);
        }
    }

    /// Has the user, or a worker, given up?
    fn check(&mut self) -> Result<()> {
        if self.stop.load(Ordering::Relaxed) {
            return Err(Error::Interrupted);
        }
        let mut gone = self.control.failed();
        for host in &mut self.hosts {
            gone |= host.try_wait().map_err(|e| Error::io("waiting for a worker", e))?.is_some();
        }
        if gone {
            self.control.fail();
            return Err(match self.answers() {
                Ok(_) => Error::Other("a worker ended before it was told to".into()),
                Err(e) => e,
            });
        }
        Ok(())
    }

    fn finish(mut self) -> Result<Vec<Report>> {
        self.control.order(Order::Finish);
        self.answers()
    }

    /// What all hosts say; of several failures the first that says something.
    fn answers(&mut self) -> Result<Vec<Report>> {
        let (mut reports, mut failure) = (Vec::new(), None);
        for host in std::mem::take(&mut self.hosts) {
            let out = host.wait_with_output().map_err(|e| Error::io("waiting for a worker", e))?;
            match serde_json::from_slice(&out.stdout) {
                Ok(Answer::Done(some)) => reports.extend(some),
                Ok(Answer::Unsupported(why)) => failure = Some(Error::Unsupported(why)),
                Ok(Answer::Failed(why)) => failure = failure.or(Some(Error::Other(why))),
                Err(_) => failure = failure.or(Some(Error::Other(format!("a worker ended with {}", out.status)))),
            }
        }
        reports.sort_by_key(|r| r.id);
        failure.map_or(Ok(reports), Err)
    }
}

fn end(child: &mut Child) {
    // it may have ended by itself
    let _ = child.kill();
    let _ = child.wait();
}

impl Drop for Team<'_> {
    fn drop(&mut self) {
        self.control.fail();
        self.hosts.iter_mut().for_each(end);
    }
}
