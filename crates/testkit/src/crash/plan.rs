//! Which workloads there are, by number, so that a run can be cut anywhere and go on there.
//!
//! A *part* is a family of workloads: all sequences of one, two or three basic operations on one or all volumes, or
//! random runs. Within a part the order is a fixed permutation, so that any stretch of it is a fair sample.

use super::groups::groups;
use super::pieces::{PRELUDE, pieces};
use super::workload::{Kind, Single, alone, basics, hard, names_met, singles};
use crate::ops::Op;
use crate::run::{APART, BESIDE, PRESSED};
use std::sync::Arc;

/// How a workload ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Power fails after its last operation, or in the midst of one.
    Crash,
    /// It is unmounted; power may fail during that.
    Unmount,
}

/// What is done before power fails.
#[derive(Clone, Debug)]
pub enum Workload {
    /// Basic operations, on one of the volumes.
    Sequence {
        /// Number of the volume.
        base: usize,
        /// What is done.
        ops: Vec<Op>,
        /// Operations before the last basic one: crashes in these belong to a shorter sequence.
        before: usize,
        /// Whether it is unmounted.
        end: End,
        /// The basic operations.
        basics: Vec<usize>,
    },
    /// Random operations on a volume of its own.
    Random {
        /// Gives volume and operations.
        seed: u64,
    },
    /// The same by several threads at a time.
    #[cfg(feature = "schedule")]
    Threads {
        /// Gives volume, operations and schedule.
        seed: u64,
    },
}

/// A family of workloads. Command lines, failures and checkpoint files name it by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// Sequences known to be hard.
    Hard,
    /// All sequences of one operation.
    One,
    /// All sequences of two operations.
    Two,
    /// Three operations of metadata.
    Three,
    /// Random runs of one thread.
    Random,
    /// Random runs of several threads. Empty without the feature `schedule`.
    Threads,
    /// Two operations, no room in the cache.
    Pressed,
    /// Three operations of metadata, domains commit alone.
    Alone,
    /// Groups that change their owner.
    Groups,
    /// Names of shared directories that several operations meet in.
    NamesMet,
    /// One operation, in shared directories.
    OneBeside,
    /// Two operations, in shared directories.
    TwoBeside,
    /// Two operations of metadata in shared directories, domains commit alone.
    AloneBeside,
    /// Random runs of several threads, in shared directories. Empty without the feature `schedule`.
    ThreadsBeside,
    /// Files that lie in pieces are made whole.
    Pieces,
    /// Sequences known to be hard, on two devices.
    HardApart,
    /// One operation, on two devices.
    OneApart,
    /// Two operations, on two devices.
    TwoApart,
    /// Two operations of metadata on two devices, domains commit alone.
    AloneApart,
    /// Groups that change their owner, on two devices.
    GroupsApart,
    /// Files on two devices that lie in pieces are made whole.
    PiecesApart,
    /// Random runs of one thread, on two devices.
    RandomApart,
    /// Random runs of several threads, on two devices. Empty without the feature `schedule`.
    ThreadsApart,
    /// The same with no room in the cache.
    ThreadsPressed,
}

impl Part {
    /// All of them, by their numbers.
    pub const ALL: [Self; 24] = [
        Self::Hard,
        Self::One,
        Self::Two,
        Self::Three,
        Self::Random,
        Self::Threads,
        Self::Pressed,
        Self::Alone,
        Self::Groups,
        Self::NamesMet,
        Self::OneBeside,
        Self::TwoBeside,
        Self::AloneBeside,
        Self::ThreadsBeside,
        Self::Pieces,
        Self::HardApart,
        Self::OneApart,
        Self::TwoApart,
        Self::AloneApart,
        Self::GroupsApart,
        Self::PiecesApart,
        Self::RandomApart,
        Self::ThreadsApart,
        Self::ThreadsPressed,
    ];
    /// Those first that say most about all.
    pub const ORDER: [Self; 24] = [
        Self::Hard,
        Self::HardApart,
        Self::Groups,
        Self::GroupsApart,
        Self::Pieces,
        Self::PiecesApart,
        Self::NamesMet,
        Self::One,
        Self::OneBeside,
        Self::OneApart,
        Self::Two,
        Self::TwoBeside,
        Self::TwoApart,
        Self::Pressed,
        Self::Random,
        Self::RandomApart,
        Self::Threads,
        Self::ThreadsBeside,
        Self::ThreadsApart,
        Self::ThreadsPressed,
        Self::AloneBeside,
        Self::AloneApart,
        Self::Alone,
        Self::Three,
    ];

    /// Its place in [`Self::ALL`].
    pub const fn number(self) -> usize {
        self as usize
    }

    /// The part of a number.
    pub fn of_number(number: usize) -> Option<Self> {
        Self::ALL.get(number).copied()
    }
}

impl std::fmt::Display for Part {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.number().fmt(f)
    }
}

/// The workloads of a part.
#[derive(Clone, Debug)]
pub struct Workloads {
    /// Name of the part in reports.
    pub name: &'static str,
    /// How many there are.
    pub len: u64,
    family: Family,
}

#[derive(Clone, Debug)]
enum Family {
    /// Sequences of so many.
    Sequences {
        length: u32,
        on: On,
        from: Arc<[Single]>,
    },
    /// These, on each of some volumes, ended in each way.
    List {
        on: On,
        from: Arc<[Vec<Op>]>,
        /// Operations that all of them begin with, of which no crash is looked at.
        before: usize,
    },
    Random {
        seed: u64,
    },
    #[cfg(feature = "schedule")]
    Threads {
        seed: u64,
    },
}

/// Which volumes sequences are run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum On {
    /// On each that is not pressed.
    Each,
    /// On one of these, by turns.
    Turns,
    /// On the one with no room in its cache.
    Pressed,
    /// On one of those without shared directories, by turns; a list on each of these.
    AllByTurns,
    /// On each with shared directories.
    Shared,
    /// On each with two devices.
    Apart,
}

impl On {
    /// The volumes, of which `bases` are ordinary, in the order of [`Kind::ALL`].
    fn volumes(self, bases: usize) -> std::ops::Range<usize> {
        match self {
            Self::Each | Self::Turns => 0..bases,
            Self::Pressed => bases..bases + 1,
            Self::AllByTurns => 0..bases + 1,
            Self::Shared => bases + 1..bases + 1 + Kind::SHARED,
            Self::Apart => bases + 1 + Kind::SHARED..bases + 1 + Kind::SHARED + Kind::APART,
        }
    }
    /// Whether each workload is run on one of them alone.
    fn by_turns(self) -> bool {
        matches!(self, Self::Turns | Self::AllByTurns)
    }
}

/// All workloads, by parts.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The parts, by their numbers.
    parts: [Workloads; Part::ALL.len()],
    /// Volumes that are ordinary; the pressed one comes after them, then those with shared directories, then those on two
    /// devices.
    pub bases: usize,
    /// Names of the basic operations.
    pub names: Vec<&'static str>,
    /// Of sequences of basic operations only those with one whose name has this.
    with: Option<String>,
}

/// Random runs of a plan.
const RANDOM_RUNS: u64 = 20_000;

impl Plan {
    /// For so many ordinary volumes, and the others of [`Kind::ALL`].
    pub fn new(bases: usize, seed: u64) -> Self {
        let (all, list) = (basics(), singles());
        let names = all.iter().map(|b| b.name).collect();
        let metadata: Vec<Single> = list.iter().filter(|s| all[s.basic].metadata && !s.of_other).cloned().collect();
        let sequences = |name, length: u32, on: On, from: Vec<Single>| {
            let len = (from.len() as u64).pow(length) * if on.by_turns() { 1 } else { on.volumes(bases).len() as u64 };
            Workloads { name, len, family: Family::Sequences { length, on, from: from.into() } }
        };
        #[cfg(feature = "schedule")]
        let (threads, of_threads) = (RANDOM_RUNS, |kind| Family::Threads { seed: seed | kind });
        #[cfg(not(feature = "schedule"))]
        let (threads, of_threads) = (0, |kind| Family::Random { seed: seed | kind });
        let threads_on = |name, kind| Workloads { name, len: threads, family: of_threads(kind) };
        let list_behind = |name, on: On, before: usize, from: Vec<(&'static str, Vec<Op>)>| {
            let from: Arc<[Vec<Op>]> = from.into_iter().map(|(_, ops)| ops).collect();
            let len = from.len() as u64 * on.volumes(bases).len() as u64 * 2;
            Workloads { name, len, family: Family::List { on, from, before } }
        };
        let list_of = |name, on, from| list_behind(name, on, 0, from);
        let random = |name, kind| Workloads { name, len: RANDOM_RUNS, family: Family::Random { seed: seed | kind } };
        let parts = Part::ALL.map(|part| match part {
            Part::Hard => list_of("known to be hard", On::Each, hard()),
            Part::One => sequences("one operation", 1, On::Each, list.clone()),
            Part::Two => sequences("two operations", 2, On::Each, list.clone()),
            Part::Three => sequences("three of metadata", 3, On::Turns, metadata.clone()),
            Part::Random => random("random runs", 0),
            Part::Threads => threads_on("random runs of several threads", 0),
            Part::Pressed => sequences("two operations, no room in the cache", 2, On::Pressed, list.clone()),
            Part::Alone => sequences("three of metadata, domains commit alone", 3, On::AllByTurns, alone()),
            Part::Groups => list_of("groups that change their owner", On::Each, groups()),
            Part::NamesMet => list_of("names met in shared directories", On::Shared, names_met()),
            Part::OneBeside => sequences("one operation, shared directories", 1, On::Shared, list.clone()),
            Part::TwoBeside => sequences("two operations, shared directories", 2, On::Shared, list.clone()),
            Part::AloneBeside => {
                sequences("two of metadata, shared directories, domains commit alone", 2, On::Shared, alone())
            }
            Part::Pieces => list_behind("files made whole", On::AllByTurns, PRELUDE, pieces()),
            Part::ThreadsBeside => threads_on("random runs of several threads, shared directories", BESIDE),
            Part::HardApart => list_of("known to be hard, two devices", On::Apart, hard()),
            Part::OneApart => sequences("one operation, two devices", 1, On::Apart, list.clone()),
            Part::TwoApart => sequences("two operations, two devices", 2, On::Apart, list.clone()),
            Part::AloneApart => sequences("two of metadata, two devices, domains commit alone", 2, On::Apart, alone()),
            Part::GroupsApart => list_of("groups that change their owner, two devices", On::Apart, groups()),
            Part::PiecesApart => list_behind("files made whole, two devices", On::Apart, PRELUDE, pieces()),
            Part::RandomApart => random("random runs, two devices", APART),
            Part::ThreadsApart => threads_on("random runs of several threads, two devices", APART),
            Part::ThreadsPressed => {
                threads_on("random runs of several threads, two devices, no room in the cache", PRESSED | APART)
            }
        });
        Self { parts, bases, names, with: None }
    }

    /// Only sequences with a basic operation whose name has `text`, of those of basic operations. The numbers stay.
    ///
    /// # Errors
    /// Where there is no such operation.
    pub fn with(self, text: &str) -> Result<Self, String> {
        let known = self.names.iter().any(|n| n.contains(text));
        if known {
            Ok(Self { with: Some(text.into()), ..self })
        } else {
            Err(format!("no operation has {text:?} in its name"))
        }
    }

    /// Whether it is left out ([`Self::with`]).
    pub fn leaves_out(&self, w: &Workload) -> bool {
        match (w, &self.with) {
            (Workload::Sequence { basics, .. }, Some(text)) if !basics.is_empty() => {
                !basics.iter().any(|b| self.names[*b].contains(text.as_str()))
            }
            _ => false,
        }
    }

    /// The workloads of a part.
    pub fn part(&self, part: Part) -> &Workloads {
        &self.parts[part.number()]
    }

    /// Workload `i` of a part.
    pub fn workload(&self, part: Part, i: u64) -> Workload {
        let p = self.part(part);
        match &p.family {
            Family::List { on, from, before } => {
                let end = if i.is_multiple_of(2) { End::Crash } else { End::Unmount };
                let volumes = on.volumes(self.bases);
                let (base, n) = (volumes.start + (i / 2) as usize % volumes.len(), i / 2 / volumes.len() as u64);
                let ops = from[n as usize % from.len()].clone();
                Workload::Sequence { base, ops, before: *before, end, basics: Vec::new() }
            }
            Family::Random { seed } => Workload::Random { seed: seed.wrapping_add(i) },
            #[cfg(feature = "schedule")]
            Family::Threads { seed } => Workload::Threads { seed: seed.wrapping_add(i) },
            Family::Sequences { length, on, from } => {
                let (mut n, volumes) = (permuted(i, p.len), on.volumes(self.bases));
                let count = volumes.len() as u64;
                let base = volumes.start as u64 + if on.by_turns() { i } else { n } % count;
                if !on.by_turns() {
                    n /= count;
                }
                let (mut ops, mut basics, mut before, mut synced) = (Vec::new(), Vec::new(), 0, false);
                for _ in 0..*length {
                    let s = &from[(n % from.len() as u64) as usize];
                    n /= from.len() as u64;
                    before = ops.len();
                    ops.extend(s.ops.iter().cloned());
                    basics.push(s.basic);
                    synced = s.synced;
                }
                // without a sync nothing but the unmount brings it to the device
                let end = if synced && !i.is_multiple_of(8) { End::Crash } else { End::Unmount };
                Workload::Sequence { base: base as usize, ops, before, end, basics }
            }
        }
    }
}

/// A permutation of `0..n` that leaves no pattern of neighbours.
fn permuted(i: u64, n: u64) -> u64 {
    // a step that shares no factor with n, near the golden section
    let mut step = (n as f64 * 0.618_033_988_75) as u64 | 1;
    while gcd(step, n) != 1 {
        step += 1;
    }
    (u128::from(i % n) * u128::from(step) % u128::from(n)) as u64
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Pairs of basic operations that were done one after the other.
#[derive(Clone, Debug)]
pub struct Pairs {
    done: Vec<bool>,
    side: usize,
}

impl Pairs {
    /// None yet, of `n` operations.
    pub fn new(n: usize) -> Self {
        Self { done: vec![false; n * n], side: n }
    }

    /// A workload with these was run.
    pub fn add(&mut self, basics: &[usize]) {
        for w in basics.windows(2) {
            self.done[w[0] * self.side + w[1]] = true;
        }
    }

    /// How many, and of how many.
    pub fn count(&self) -> (usize, usize) {
        (self.done.iter().filter(|d| **d).count(), self.done.len())
    }

    /// For the checkpoint file.
    pub fn to_bits(&self) -> String {
        self.done.iter().map(|d| if *d { '1' } else { '0' }).collect()
    }

    /// From a checkpoint file; `None` where it is of other operations.
    pub fn from_bits(bits: &str, side: usize) -> Option<Self> {
        (bits.len() == side * side).then(|| Self { done: bits.bytes().map(|b| b == b'1').collect(), side })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn parts_have_numbers() {
        for (number, part) in Part::ALL.into_iter().enumerate() {
            assert_eq!((part.number(), Part::of_number(number)), (number, Some(part)));
            assert_eq!(Part::ORDER.iter().filter(|p| **p == part).count(), 1);
        }
        assert_eq!(Part::of_number(Part::ALL.len()), None);
    }

    #[test]
    fn every_workload_comes_once() {
        for n in [1, 2, 7, 12, 360, 1009] {
            let all: BTreeSet<u64> = (0..n).map(|i| permuted(i, n)).collect();
            assert_eq!((all.len() as u64, all.last().copied()), (n, Some(n - 1)));
        }
        let plan = Plan::new(2, 0);
        let mut seen = BTreeSet::new();
        for i in 0..plan.part(Part::One).len {
            let w = format!("{:?}", plan.workload(Part::One, i)).replace("Unmount", "Crash");
            assert!(seen.insert(w), "{i} comes twice");
        }
        let with = plan.clone().with("whiteout").unwrap();
        let of_them = |i: &u64| !with.leaves_out(&with.workload(Part::Two, *i));
        let (of, count) = (1000, (0..1000).filter(of_them).count());
        assert!(count > of / 10 && count < of / 2, "{count} of {of}");
        assert!(plan.clone().with("no such operation").is_err());
        let total: u64 = plan.parts.iter().map(|p| p.len).sum();
        assert!(total > 3_400_000, "{total}");
    }

    #[test]
    fn pairs_survive_the_checkpoint() {
        let mut p = Pairs::new(3);
        p.add(&[0, 1, 2]);
        assert_eq!(p.count(), (2, 9));
        let again = Pairs::from_bits(&p.to_bits(), 3).unwrap();
        assert_eq!(again.count(), (2, 9));
        assert!(Pairs::from_bits("01", 3).is_none());
    }
}
