//! What a device may hold after a crash: a prefix of the log, and for each write after the last flush of it whether it
//! got there whole, torn or not at all. A volume of several devices has one log: each is a part of the one that is recorded,
//! and a flush covers its own ([`braidfs_device::PartDevice`]).

use braidfs_device::{Event, Flushed, Image, Keep, RecordDevice, SECTOR_BYTES};
use std::collections::BTreeSet;
use std::fmt;

/// What a device recorded: the image that it began with, and all events.
#[derive(Debug)]
pub struct Log {
    /// Before the first event.
    pub initial: Image,
    /// All of them.
    pub events: Vec<Event>,
}

impl Log {
    /// What a device recorded so far.
    pub fn of(device: &RecordDevice) -> Self {
        Self { initial: device.initial(), events: device.log() }
    }

    /// What is durable after the first `upto` events; and how many of them are all durable.
    pub fn durable(&self, upto: usize) -> (Flushed, usize) {
        let flushed = Flushed::by(&self.events[..upto]);
        let all = flushed.prefix(self.initial.blocks());
        (flushed, all)
    }

    /// The writes and discards that a crash after `upto` events may lose.
    pub fn unflushed(&self, upto: usize) -> impl Iterator<Item = &Event> {
        let (flushed, all) = self.durable(upto);
        (all..).zip(&self.events[all..upto]).filter(move |(i, e)| !flushed.has(*i, e)).map(|(_, e)| e)
    }

    /// The device after a crash.
    pub fn image(&self, crash: &CrashState) -> Image {
        let mut image = self.initial.clone();
        let flushed = self.durable(crash.upto).0;
        let mut keep = crash.keep.iter();
        for (i, e) in self.events[..crash.upto].iter().enumerate() {
            if flushed.has(i, e) {
                e.apply(&mut image, Keep::Whole);
            } else if let Some(keep) = keep.next() {
                e.apply(&mut image, *keep);
            }
        }
        image
    }

    /// A crash after `upto` events that loses all it can.
    pub fn without_unflushed(&self, upto: usize) -> CrashState {
        CrashState { upto, keep: self.unflushed(upto).map(|_| Keep::None).collect() }
    }

    /// The lengths of the log from `from` on at which a crash makes a difference: before and after each flush, at each
    /// of `marks` (something was promised there), and the end. A crash between two of them is the later one with some
    /// writes lost.
    pub fn points(&self, from: usize, marks: impl IntoIterator<Item = usize>) -> Vec<usize> {
        let flushes = self.events.iter().enumerate().filter(|(_, e)| matches!(e, Event::Flush { .. }));
        let mut all: BTreeSet<usize> = flushes.flat_map(|(f, _)| [f, f + 1]).collect();
        all.extend(marks);
        all.insert(self.events.len());
        all.into_iter().filter(|p| (from..=self.events.len()).contains(p)).collect()
    }
}

/// What a crash leaves of a log of events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CrashState {
    /// Events of the log that had happened.
    pub upto: usize,
    /// What becomes of each write that was not flushed by then.
    pub keep: Vec<Keep>,
}

impl fmt::Display for CrashState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "crash after event {}", self.upto)?;
        let mark = |k: &Keep| match k {
            Keep::Whole => "w".to_owned(),
            Keep::None => "-".to_owned(),
            Keep::Torn(n) => format!("t{n}"),
            Keep::TornMask(m) => format!("m{m:x}"),
        };
        match self.keep.len() {
            0 => write!(f, ", nothing unflushed"),
            1..=200 => write!(f, ", writes {}", self.keep.iter().map(mark).collect::<Vec<_>>().join(" ")),
            n => write!(f, ", {n} writes"),
        }
    }
}

/// The device with every write on it (after an unmount).
pub fn final_image(log: &RecordDevice) -> Image {
    log.snapshot()
}

fn random_keep(rng: &mut fastrand::Rng, lost: u8) -> Keep {
    match rng.u8(..100) {
        n if n < lost => Keep::None,
        n if n < 90 => Keep::Whole,
        n if n < 95 => Keep::Torn(rng.usize(1..2 * 4096 / SECTOR_BYTES)),
        _ => Keep::TornMask(rng.u64(..)),
    }
}

/// How many crashes of a point are tried.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    /// Every subset of this many unflushed writes, and of fewer.
    pub subsets: usize,
    /// Random subsets, where there are more; random mixes of lost, whole and torn writes always.
    pub samples: usize,
}

/// Calls `f` with crashes at one point, until it says false: nothing kept, everything, each first part of the writes,
/// each write alone lost and alone kept, all subsets where they are few, each write torn at each sector with all others
/// kept or lost, and random ones. `sectors`: of each unflushed write. Some are given twice.
pub fn each(sectors: &[usize], budget: &Budget, rng: &mut fastrand::Rng, f: &mut dyn FnMut(&[Keep]) -> bool) {
    let n = sectors.len();
    let mut keep = vec![Keep::None; n];
    let mut go = |keep: &mut Vec<Keep>, of: &dyn Fn(usize) -> Keep| {
        (0..n).for_each(|i| keep[i] = of(i));
        f(keep)
    };
    let whole = |bit: bool| if bit { Keep::Whole } else { Keep::None };
    if !go(&mut keep, &|_| Keep::None) || n == 0 {
        return;
    }
    if !(1..=n).all(|first| go(&mut keep, &|i| whole(i < first))) {
        return;
    }
    let all = if n <= budget.subsets {
        (1usize..1 << n).all(|mask| go(&mut keep, &|i| whole(mask >> i & 1 == 1)))
    } else {
        (0..n).all(|one| go(&mut keep, &|i| whole(i != one)) && go(&mut keep, &|i| whole(i == one)))
            && (0..budget.samples).all(|_| {
                let lost = rng.u8(5..95);
                let bits: Vec<bool> = (0..n).map(|_| rng.u8(..100) >= lost).collect();
                go(&mut keep, &|i| whole(bits[i]))
            })
    };
    if !all {
        return;
    }
    // long writes are torn at some of their sectors only
    let mut tears: Vec<(usize, usize)> = (0..n).flat_map(|i| (1..sectors[i]).map(move |s| (i, s))).collect();
    if tears.len() > budget.samples {
        rng.shuffle(&mut tears);
        tears.truncate(budget.samples);
    }
    let torn = tears
        .iter()
        .flat_map(|tear| [(tear, true), (tear, false)])
        .all(|((one, at), others)| go(&mut keep, &|i| if i == *one { Keep::Torn(*at) } else { whole(others) }));
    if !torn {
        return;
    }
    for _ in 0..budget.samples {
        let lost = rng.u8(5..85);
        let random: Vec<Keep> = (0..n).map(|_| random_keep(rng, lost)).collect();
        if !go(&mut keep, &|i| random[i]) {
            return;
        }
    }
}

/// A random crash anywhere in the log.
pub fn random(log: &Log, rng: &mut fastrand::Rng) -> CrashState {
    let end = log.events.len();
    let upto = match rng.u8(..3) {
        0 => end,
        1 => rng.usize(..=end),
        _ => {
            let all = log.points(0, []);
            all[rng.usize(..all.len())]
        }
    };
    let lost = rng.u8(..90);
    let keep = log.unflushed(upto).map(|_| random_keep(rng, lost)).collect();
    CrashState { upto, keep }
}

/// Crashes after something was promised, when `from` events had happened: at that moment, and once the last of all events had, each
/// with everything lost that may be; and `more` at random moments from then on, with random parts of the writes.
pub fn since(log: &Log, from: usize, more: usize, rng: &mut fastrand::Rng) -> Vec<CrashState> {
    let end = log.events.len();
    let mut all = vec![log.without_unflushed(from), log.without_unflushed(end)];
    let points = log.points(from, [from]);
    all.extend((0..more).map(|n| {
        let upto = if n % 2 == 0 { rng.usize(from..=end) } else { points[rng.usize(..points.len())] };
        let lost = rng.u8(..=100);
        CrashState { upto, keep: log.unflushed(upto).map(|_| random_keep(rng, lost)).collect() }
    }));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_writes_give_every_subset_and_every_tear() {
        let budget = Budget { subsets: 4, samples: 50 };
        let all = |sectors: &[usize]| {
            let mut out = Vec::new();
            each(sectors, &budget, &mut fastrand::Rng::with_seed(0), &mut |k| {
                out.push(k.to_vec());
                true
            });
            out
        };
        assert_eq!(all(&[]), [vec![]]);
        let three = all(&[8, 8, 16]);
        let whole = |k: &&Vec<Keep>| k.iter().all(|k| matches!(k, Keep::Whole | Keep::None));
        let mut subsets: Vec<String> = three.iter().filter(whole).map(|k| format!("{k:?}")).collect();
        subsets.sort();
        subsets.dedup();
        assert_eq!(subsets.len(), 8);
        for at in 1..16 {
            assert!(three.contains(&vec![Keep::Whole, Keep::Whole, Keep::Torn(at)]));
            assert!(three.contains(&vec![Keep::None, Keep::None, Keep::Torn(at)]));
        }
        // many: each alone lost, and samples
        let many = all(&[8; 9]);
        assert!(
            (0..9).all(|i| many
                .iter()
                .any(|k| k[i] == Keep::None && k.iter().filter(|k| **k == Keep::Whole).count() == 8))
        );
        assert!(many.len() < 250);
        let mut n = 0;
        each(&[8; 9], &budget, &mut fastrand::Rng::with_seed(0), &mut |_| {
            n += 1;
            n < 5
        });
        assert_eq!(n, 5, "stops when told to");
    }
}
