//! Histograms of times, log-linear: 8 buckets of one width for each power of two, so that a bucket is at most an eighth
//! wider than what it begins with. 240 buckets reach from 128 ns to nine minutes.
//!
//! Each belongs to one thread, which alone writes it ([`Histogram::record`], no locked instruction), or is written by
//! any ([`Histogram::record_shared`]); one and the same never by both. Who reads sees each bucket as it was at about that moment.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

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

#[cfg(test)]
mod tests {
    use super::*;

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
