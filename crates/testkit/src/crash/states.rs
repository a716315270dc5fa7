//! What a device may hold after a crash: a prefix of the log, and for each write after the last flush of it whether it
//! got there whole, torn or not at all.

use braidfs_device::{Image, Keep, RecordDevice, SECTOR_BYTES};
use std::collections::BTreeSet;
use std::fmt;

/// One crash.
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

impl CrashState {
    /// The device after it.
    pub fn image(&self, log: &RecordDevice) -> Image {
        log.crash_image(self.upto, &mut |i| self.keep.get(i).copied().unwrap_or(Keep::None)).snapshot()
    }
}

/// The device with every write on it (after an unmount).
pub fn final_image(log: &RecordDevice) -> Image {
    log.snapshot()
}

/// The lengths of the log at which a crash makes a difference: around each flush, and the end. (A crash between two
/// flushes is the later one with some writes lost.)
pub fn points(log: &RecordDevice) -> Vec<usize> {
    let mut all: BTreeSet<usize> = log.flushes().into_iter().flat_map(|f| [f, f + 1]).collect();
    all.insert(log.log_len());
    all.into_iter().collect()
}

fn random_keep(rng: &mut fastrand::Rng, lost: u8) -> Keep {
    match rng.u8(..100) {
        n if n < lost => Keep::None,
        n if n < 90 => Keep::Whole,
        n if n < 95 => Keep::Torn(rng.usize(1..2 * 4096 / SECTOR_BYTES)),
        _ => Keep::TornMask(rng.u64(..)),
    }
}

/// Crashes at one point: all subsets where they are few, else all, nothing, each write alone lost, and random ones; at
/// most `count`.
pub fn at_point(log: &RecordDevice, upto: usize, count: usize, rng: &mut fastrand::Rng) -> Vec<CrashState> {
    let n = log.unflushed(upto).len();
    let mut out: Vec<CrashState> = Vec::new();
    let mut push = |keep: Vec<Keep>| {
        let state = CrashState { upto, keep };
        if !out.contains(&state) {
            out.push(state);
        }
        out.len() >= count
    };
    let whole_or_none = |bit: bool| if bit { Keep::Whole } else { Keep::None };
    if push(vec![Keep::None; n]) || n == 0 || push(vec![Keep::Whole; n]) {
        return out;
    }
    if n < 20 && 1usize << n <= count {
        for mask in 1usize..(1 << n) - 1 {
            push((0..n).map(|i| whole_or_none(mask >> i & 1 == 1)).collect());
        }
    } else {
        for i in 0..n.min(count / 4) {
            let i = if n > count / 4 { rng.usize(..n) } else { i };
            push((0..n).map(|j| whole_or_none(i != j)).collect());
            push((0..n).map(|j| whole_or_none(i == j)).collect());
        }
    }
    for _ in 0..2 * count {
        let lost = rng.u8(5..85);
        if push((0..n).map(|_| random_keep(rng, lost)).collect()) {
            break;
        }
    }
    out
}

/// A random crash anywhere in the log.
pub fn random(log: &RecordDevice, rng: &mut fastrand::Rng) -> CrashState {
    let upto = match rng.u8(..3) {
        0 => log.log_len(),
        1 => rng.usize(..=log.log_len()),
        _ => {
            let all = points(log);
            all[rng.usize(..all.len())]
        }
    };
    let lost = rng.u8(..90);
    let keep = (0..log.unflushed(upto).len()).map(|_| random_keep(rng, lost)).collect();
    CrashState { upto, keep }
}

#[cfg(test)]
mod tests {
    use super::*;
    use braidfs_device::Device;

    #[test]
    fn few_writes_give_every_subset() {
        let d = RecordDevice::blank(16);
        let page = vec![1; 4096];
        for b in 0..3 {
            d.write(b, &page).unwrap();
        }
        d.flush().unwrap();
        let rng = &mut fastrand::Rng::with_seed(0);
        assert_eq!(points(&d), [3, 4]);
        let states = at_point(&d, 3, 100, rng);
        assert!(states.len() > 30, "torn ones too");
        let whole = states.iter().filter(|s| s.keep.iter().all(|k| matches!(k, Keep::Whole | Keep::None)));
        assert!(whole.count() >= 8);
        assert_eq!(at_point(&d, 4, 100, rng), [CrashState { upto: 4, keep: vec![] }]);
    }
}
