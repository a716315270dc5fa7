//! Histograms of times, log-linear: 8 buckets of one width for each power of two, so that a bucket is at most an eighth
//! wider than what it begins with. 240 buckets reach from 128 ns to nine minutes.
//!
//! Each belongs to one thread, which alone writes it ([`Histogram::record`], no locked instruction), or is written by
//! any ([`Histogram::record_shared`]); one and the same never by both. Who reads sees each bucket as it was at about that moment.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

/// Width of the first buckets: 2 to this power, nanoseconds.
const UNIT_BITS: u32 = 7;
/// Buckets for each power of two: 2 to this power.
const SUB_BITS: u32 = 3;
const SUB: u64 = 1 << SUB_BITS;
/// The largest time, in units, is below 2 to this power; what is longer counts in the last bucket.
const MAX_BITS: u32 = 32;
/// How many there are.
pub(crate) const BUCKETS: usize = ((MAX_BITS - SUB_BITS + 1) << SUB_BITS) as usize;

/// The bucket of a time.
pub(crate) fn bucket(nanos: u64) -> usize {
    let units = (nanos >> UNIT_BITS).min((1 << MAX_BITS) - 1);
    if units < SUB {
        return units as usize;
    }
    let shift = units.ilog2() - SUB_BITS;
    // The first bit of `units >> shift` is set, which adds one power of two.
    (u64::from(shift) * SUB + (units >> shift)) as usize
}

/// Where a bucket begins, nanoseconds; of [`BUCKETS`] where the last one ends.
pub(crate) fn lower(bucket: usize) -> u64 {
    let (power, sub) = ((bucket as u64) >> SUB_BITS, bucket as u64 & (SUB - 1));
    let units = if power == 0 { sub } else { (SUB + sub) << (power - 1) };
    units << UNIT_BITS
}

/// Times of one operation.
#[derive(Debug)]
pub(crate) struct Histogram([AtomicU64; BUCKETS]);

impl Default for Histogram {
    fn default() -> Self {
        Self(std::array::from_fn(|_| AtomicU64::new(0)))
    }
}

impl Histogram {
    /// Counts a time, in the only thread that does.
    pub fn record(&self, nanos: u64) {
        let n = &self.0[bucket(nanos)];
        n.store(n.load(Relaxed).wrapping_add(1), Relaxed);
    }

    /// Counts a time, in any thread.
    pub fn record_shared(&self, nanos: u64) {
        self.0[bucket(nanos)].fetch_add(1, Relaxed);
    }

    /// Adds its counts.
    pub fn add_to(&self, sum: &mut [u64; BUCKETS]) {
        for (sum, n) in sum.iter_mut().zip(&self.0) {
            *sum += n.load(Relaxed);
        }
    }
}

/// Buckets of a [`Coarse`] histogram: two of a [`Histogram`] are one.
const COARSE: usize = BUCKETS / 2;
/// Of these, for each power of two.
const COARSE_SUB: usize = 1 << (SUB_BITS - 1);

/// Half as fine, and in a quarter of the memory: for who is one of many. A bucket is at most a quarter wider than what it
/// begins with. One thread writes it; a count ends at the largest that fits.
#[derive(Debug)]
pub(crate) struct Coarse {
    counts: [AtomicU32; COARSE],
    /// By power of two, whether something is counted there: most are empty, and need not be emptied nor read.
    used: AtomicU32,
}

impl Default for Coarse {
    fn default() -> Self {
        Self { counts: std::array::from_fn(|_| AtomicU32::new(0)), used: AtomicU32::new(0) }
    }
}

impl Coarse {
    /// Counts a time.
    pub fn record(&self, nanos: u64) {
        let b = bucket(nanos) / 2;
        let n = &self.counts[b];
        n.store(n.load(Relaxed).saturating_add(1), Relaxed);
        let (used, row) = (self.used.load(Relaxed), 1 << (b / COARSE_SUB));
        if used & row == 0 {
            self.used.store(used | row, Relaxed);
        }
    }

    /// Forgets all.
    pub fn clear(&self) {
        self.rows().for_each(|(_, row)| row.iter().for_each(|n| n.store(0, Relaxed)));
        self.used.store(0, Relaxed);
    }

    /// Adds its counts; each to the later of its two buckets, so that no time looks shorter than it was.
    pub fn add_to(&self, sum: &mut [u64; BUCKETS]) {
        for (first, row) in self.rows() {
            for (i, n) in row.iter().enumerate() {
                sum[(first + i) * 2 + 1] += u64::from(n.load(Relaxed));
            }
        }
    }

    /// The first bucket of each row in which something is counted, and the row.
    fn rows(&self) -> impl Iterator<Item = (usize, &[AtomicU32])> {
        let used = self.used.load(Relaxed);
        let rows = self.counts.chunks(COARSE_SUB).enumerate();
        rows.filter(move |(r, _)| used & (1 << r) != 0).map(|(r, row)| (r * COARSE_SUB, row))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_coarse_one_tells_times_up_to_a_quarter_too_long_and_forgets() {
        let h = Coarse::default();
        for nanos in [0, 127, 1000, 70_000, 1 << 30, u64::MAX] {
            let mut sum = [0; BUCKETS];
            h.record(nanos);
            h.add_to(&mut sum);
            assert_eq!(sum.iter().sum::<u64>(), 1, "{nanos}");
            let told = lower(sum.iter().position(|n| *n == 1).unwrap() + 1);
            let longest = 1 << (MAX_BITS + UNIT_BITS);
            assert!(told > nanos.min(longest - 1) && told <= nanos.min(longest) / 4 * 5 + 256, "{nanos}: {told}");
            h.clear();
            h.add_to(&mut sum);
            assert_eq!(sum.iter().sum::<u64>(), 1, "{nanos}: it forgets");
        }
        h.counts[0].store(u32::MAX - 1, Relaxed);
        (0..3).for_each(|_| h.record(1));
        let mut sum = [0; BUCKETS];
        h.add_to(&mut sum);
        assert_eq!(sum[1], u64::from(u32::MAX), "and does not begin anew by itself");
    }

    #[test]
    fn buckets_follow_each_other_and_none_is_wider_than_an_eighth() {
        for b in 0..BUCKETS {
            let (from, to) = (lower(b), lower(b + 1));
            assert!(from < to, "{b}");
            assert_eq!((bucket(from), bucket(to - 1)), (b, b), "{from} to {to}");
            assert!(b < SUB as usize || (to - from) * SUB <= from, "{b}: {from} to {to}");
        }
        assert_eq!(lower(BUCKETS), 1 << (MAX_BITS + UNIT_BITS));
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn threads_that_share_one_lose_nothing() {
        let h = Histogram::default();
        std::thread::scope(|s| {
            for t in 0..4u64 {
                let h = &h;
                s.spawn(move || (0..5000).for_each(|n| h.record_shared(t * 1000 + n % 3)));
            }
        });
        let mut sum = [0; BUCKETS];
        h.add_to(&mut sum);
        assert_eq!(sum.iter().sum::<u64>(), 20_000);
    }
}
