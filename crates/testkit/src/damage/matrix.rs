//! All blocks times all kinds of damage, and the totals.

use crate::damage::inflict::{Damage, inflict};
use crate::damage::sample::Sample;
use crate::damage::target::{Kind, Target, targets};
use crate::damage::trial::{Outcome, trial};
use braidfs_device::Image;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// How much to do.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Of the random choices.
    pub seed: u64,
    /// Stop after this time.
    pub time: Duration,
    /// Do one of so many of the cases, in an order by the seed.
    pub one_of: usize,
    /// Also damage two blocks at a time.
    pub pairs: bool,
    /// Bits flipped per block, one at a time.
    pub flips: usize,
    /// Threads; 0: one per CPU.
    pub threads: usize,
    /// Only cases whose description has this in it.
    pub only: String,
    /// A volume that takes longer hangs.
    pub patience: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            seed: 1,
            time: Duration::MAX,
            one_of: 1,
            pairs: true,
            flips: 1,
            threads: 0,
            only: String::new(),
            patience: Duration::from_secs(30),
        }
    }
}

/// What is damaged, and how.
#[derive(Clone, Debug)]
pub struct Case {
    /// Index of the sample.
    pub sample: usize,
    /// Blocks (index of the target) and what happens to each.
    pub blocks: Vec<(usize, Damage)>,
    /// For the random choices of this case.
    pub seed: u64,
}

/// Counts of a kind of damage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Volumes with damage.
    pub damaged: usize,
    /// Damage that nothing depended on: all files right, nothing found.
    pub harmless: usize,
    /// Noticed by a mount or a check.
    pub detected: usize,
    /// Repaired so that the next check is clean.
    pub repaired: usize,
    /// Refused by the check: nothing to repair with.
    pub refused: usize,
    /// Volumes on which the repair gave something up and said so.
    pub lossy: usize,
    /// Names given up, each reported.
    pub given_up: usize,
    /// Volumes whose damage a mount did not notice and showed something else, though a check finds it.
    pub served: usize,
    /// The last chunk of a journal vanished without a trace: no program can tell.
    pub traceless: usize,
    /// Files that were made and synced on damaged volumes: each was right from then on, refused or named.
    pub synced: usize,
    /// Volumes on which something was lost or changed and nobody said so.
    pub silent: usize,
    /// Repairs that did not end clean.
    pub not_repaired: usize,
    /// Trials in which something panicked.
    pub panics: usize,
}

impl Totals {
    fn add(&mut self, o: &Outcome) {
        self.damaged += 1;
        self.detected += usize::from(o.detected());
        let bad = !o.silent.is_empty() || !o.served.is_empty() || !o.not_repaired.is_empty();
        self.harmless += usize::from(!o.detected() && !bad);
        self.refused += usize::from(o.no_check);
        self.repaired += usize::from(o.detected() && !o.no_check && o.not_repaired.is_empty());
        self.lossy += usize::from(o.given_up > 0);
        self.given_up += o.given_up;
        self.served += usize::from(!o.served.is_empty());
        self.synced += o.synced;
        self.silent += usize::from(!o.silent.is_empty());
        self.not_repaired += usize::from(!o.not_repaired.is_empty());
    }
}

/// A case that went wrong.
#[derive(Clone, Debug)]
pub struct Failure {
    /// What was damaged.
    pub case: String,
    /// What went wrong.
    pub why: Vec<String>,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.case)?;
        self.why.iter().take(6).try_for_each(|w| writeln!(f, "    {w}"))?;
        if self.why.len() > 6 {
            writeln!(f, "    … {} more", self.why.len() - 6)?;
        }
        Ok(())
    }
}

/// What all cases of the matrix came to.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// By kind of block and damage; pairs of blocks under the kind of the first, with `None`.
    pub totals: BTreeMap<(Kind, Option<Damage>), Totals>,
    /// What must not be: silent, panics, hangs, repairs that did not end clean.
    pub failures: Vec<Failure>,
    /// What a mount showed wrongly and a check finds.
    pub served: Vec<Failure>,
    /// Numbers of findings and on how many volumes.
    pub codes: BTreeMap<u32, usize>,
    /// Cases that were not done for want of time.
    pub left: usize,
    /// How long all of it took.
    pub time: Duration,
}

impl Report {
    /// All kinds together.
    pub fn sum(&self) -> Totals {
        let mut t = Totals::default();
        for x in self.totals.values() {
            t.damaged += x.damaged;
            t.harmless += x.harmless;
            t.detected += x.detected;
            t.repaired += x.repaired;
            t.refused += x.refused;
            t.lossy += x.lossy;
            t.given_up += x.given_up;
            t.served += x.served;
            t.traceless += x.traceless;
            t.synced += x.synced;
            t.silent += x.silent;
            t.not_repaired += x.not_repaired;
            t.panics += x.panics;
        }
        t
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:<11} {:<7} {:>7} {:>8} {:>8} {:>8} {:>7} {:>5} {:>8} {:>6} {:>9} {:>6} {:>7} {:>6}",
            "block",
            "damage",
            "volumes",
            "harmless",
            "detected",
            "repaired",
            "refused",
            "lossy",
            "given up",
            "served",
            "traceless",
            "silent",
            "not rep",
            "panics"
        )?;
        let mut line = |kind: String, damage: String, t: &Totals| {
            writeln!(
                f,
                "{kind:<11} {damage:<7} {:>7} {:>8} {:>8} {:>8} {:>7} {:>5} {:>8} {:>6} {:>9} {:>6} {:>7} {:>6}",
                t.damaged,
                t.harmless,
                t.detected,
                t.repaired,
                t.refused,
                t.lossy,
                t.given_up,
                t.served,
                t.traceless,
                t.silent,
                t.not_repaired,
                t.panics
            )
        };
        for ((kind, damage), t) in &self.totals {
            line(format!("{kind:?}"), damage.map_or("two".into(), |d| format!("{d:?}")), t)?;
        }
        line("all".into(), String::new(), &self.sum())
    }
}

/// The cases of `samples`, in an order by the seed.
fn cases(lists: &[Vec<Target>], limits: &Limits) -> Vec<Case> {
    let mut rng = fastrand::Rng::with_seed(limits.seed);
    let mut out = Vec::new();
    for (sample, list) in lists.iter().enumerate() {
        for (i, damage) in (0..list.len()).flat_map(|i| Damage::ALL.map(|d| (i, d))) {
            let times = if damage == Damage::Flip { limits.flips.max(1) } else { 1 };
            out.extend((0..times).map(|_| Case { sample, blocks: vec![(i, damage)], seed: rng.u64(..) }));
        }
        if limits.pairs {
            let first: Vec<usize> = (0..list.len()).filter(|i| list[*i].important).collect();
            for (n, a) in first.iter().enumerate() {
                for b in &first[n + 1..] {
                    let kinds = [Damage::Flip, Damage::Zero, Damage::Noise];
                    let how = [kinds[rng.usize(..3)], kinds[rng.usize(..3)]];
                    out.push(Case { sample, blocks: vec![(*a, how[0]), (*b, how[1])], seed: rng.u64(..) });
                }
            }
        }
    }
    rng.shuffle(&mut out);
    out.truncate(out.len().div_ceil(limits.one_of.max(1)));
    out
}

/// The image of a case; `None` where the damage changes nothing.
fn damaged(case: &Case, sample: &Sample, list: &[Target]) -> Option<Image> {
    let mut rng = fastrand::Rng::with_seed(case.seed);
    let mut image = sample.image.clone();
    let mut any = false;
    for (i, damage) in &case.blocks {
        any |= inflict(&mut image, *damage, &list[*i], list, &sample.past, &mut rng);
    }
    any.then_some(image)
}

fn describe(case: &Case, sample: &Sample, list: &[Target]) -> String {
    let blocks: Vec<String> =
        case.blocks.iter().map(|(i, d)| format!("{d:?} of block {}, {}", list[*i].block, list[*i].what)).collect();
    format!("{} volume: {} (case {:#x})", sample.name, blocks.join(" and "), case.seed)
}

enum Message {
    Start(usize, usize),
    Done(usize, Option<std::thread::Result<Outcome>>),
}

/// Does all cases. `progress` gets cases done, cases, failures so far.
///
/// # Panics
/// Where a sample is no sound volume. On a hang the process ends: a thread cannot be stopped.
pub fn run(samples: &[Sample], limits: &Limits, progress: &dyn Fn(usize, usize, usize)) -> Report {
    let lists: Vec<Vec<Target>> = samples
        .iter()
        .map(|s| targets(&s.image).unwrap_or_else(|e| panic!("the {} volume is not sound: {e}", s.name)))
        .collect();
    let mut cases = cases(&lists, limits);
    cases
        .retain(|c| limits.only.is_empty() || describe(c, &samples[c.sample], &lists[c.sample]).contains(&limits.only));
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = if limits.threads == 0 { cpus } else { limits.threads };
    let start = Instant::now();
    let next = AtomicUsize::new(0);
    let mut report = Report::default();
    let (send, receive) = mpsc::channel();
    let old_hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {})); // reported with the case
    std::thread::scope(|s| {
        for t in 0..threads {
            let (send, next, cases, lists) = (send.clone(), &next, &cases, &lists);
            s.spawn(move || {
                while start.elapsed() < limits.time {
                    let n = next.fetch_add(1, Ordering::Relaxed);
                    let Some(case) = cases.get(n) else { return };
                    let (sample, list) = (&samples[case.sample], &lists[case.sample]);
                    if send.send(Message::Start(t, n)).is_err() {
                        return;
                    }
                    let outcome = damaged(case, sample, list)
                        .map(|image| catch_unwind(AssertUnwindSafe(|| trial(&image, &sample.truth))));
                    if send.send(Message::Done(n, outcome)).is_err() {
                        return;
                    }
                }
            });
        }
        drop(send);
        let mut running: BTreeMap<usize, (usize, Duration)> = BTreeMap::new();
        let mut done = 0;
        // a process that was stopped for a while has not been waiting
        let (mut waited, mut last) = (Duration::ZERO, Instant::now());
        loop {
            waited += last.elapsed().min(Duration::from_secs(2));
            last = Instant::now();
            match receive.recv_timeout(Duration::from_secs(1)) {
                Ok(Message::Start(thread, n)) => {
                    running.insert(thread, (n, waited));
                }
                Ok(Message::Done(n, outcome)) => {
                    running.retain(|_, (m, _)| *m != n);
                    done += 1;
                    let case = &cases[n];
                    let describe = || describe(case, &samples[case.sample], &lists[case.sample]);
                    record(&mut report, case, &lists[case.sample], outcome, describe);
                    progress(done, cases.len(), report.failures.len());
                }
                Err(mpsc::RecvTimeoutError::Timeout) => {}
                Err(mpsc::RecvTimeoutError::Disconnected) => break,
            }
            if let Some((n, _)) = running.values().find(|(_, since)| waited.saturating_sub(*since) > limits.patience) {
                let case = &cases[*n];
                eprintln!("HANGS: {}", describe(case, &samples[case.sample], &lists[case.sample]));
                std::process::exit(101);
            }
        }
        report.left = cases.len() - done;
    });
    std::panic::set_hook(old_hook);
    report.time = start.elapsed();
    report
}

fn record(
    report: &mut Report,
    case: &Case,
    list: &[Target],
    outcome: Option<std::thread::Result<Outcome>>,
    describe: impl Fn() -> String,
) {
    let Some(outcome) = outcome else { return };
    let (first, damage) = case.blocks[0];
    let key = (list[first].kind, (case.blocks.len() == 1).then_some(damage));
    let totals = report.totals.entry(key).or_default();
    let mut o = match outcome {
        Ok(o) => o,
        Err(p) => {
            totals.damaged += 1;
            totals.panics += 1;
            let text = p.downcast_ref::<String>().cloned();
            let text = text.or_else(|| p.downcast_ref::<&str>().map(|s| (*s).to_string())).unwrap_or_default();
            report.failures.push(Failure { case: describe(), why: vec![format!("panic: {text}")] });
            return;
        }
    };
    let vanished = |d: Damage| d != Damage::Flip;
    if !o.silent.is_empty() && case.blocks.iter().any(|(i, d)| list[*i].last && vanished(*d)) && !o.detected() {
        totals.damaged += 1;
        totals.traceless += 1;
        return;
    }
    o.silent.sort();
    totals.add(&o);
    let seen: BTreeSet<u32> = o.codes.clone();
    seen.into_iter().for_each(|c| *report.codes.entry(c).or_default() += 1);
    let why: Vec<String> = o.silent.iter().map(|s| format!("silent: {s}")).chain(o.not_repaired.clone()).collect();
    if !why.is_empty() {
        report.failures.push(Failure { case: describe(), why });
    }
    if !o.served.is_empty() {
        report.served.push(Failure { case: describe(), why: o.served });
    }
}
