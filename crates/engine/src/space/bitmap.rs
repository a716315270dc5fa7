//! Bitmaps over the 512 blocks of a segment. Pure functions.

use braidfs_format::geometry::SEGMENT_BLOCKS;

/// One bit per block of a segment.
pub(super) type Bits = [u64; 8];

/// Bits `from .. from + len`, which must lie in the segment.
pub(super) fn mask(from: u32, len: u32) -> Bits {
    debug_assert!(from + len <= SEGMENT_BLOCKS);
    let mut bits = [0; 8];
    let (mut at, end) = (from, from + len);
    while at < end {
        let bit = at % 64;
        let n = (64 - bit).min(end - at);
        bits[(at / 64) as usize] |= (u64::MAX >> (64 - n)) << bit;
        at += n;
    }
    bits
}

pub(super) fn or(a: &mut Bits, b: &Bits) {
    a.iter_mut().zip(b).for_each(|(a, b)| *a |= b);
}

pub(super) fn clear(a: &mut Bits, b: &Bits) {
    a.iter_mut().zip(b).for_each(|(a, b)| *a &= !b);
}

pub(super) fn and(a: &Bits, b: &Bits) -> Bits {
    std::array::from_fn(|i| a[i] & b[i])
}

pub(super) fn and_not(a: &Bits, b: &Bits) -> Bits {
    std::array::from_fn(|i| a[i] & !b[i])
}

pub(super) fn is_empty(a: &Bits) -> bool {
    a.iter().fold(0, |all, w| all | w) == 0
}

pub(super) fn count(a: &Bits) -> u32 {
    a.iter().map(|w| w.count_ones()).sum()
}

pub(super) fn get(a: &Bits, i: u32) -> bool {
    a[(i / 64) as usize] >> (i % 64) & 1 == 1
}

/// First bit at or after `from` that is `set`; 512 where there is none.
fn next(a: &Bits, from: u32, set: bool) -> u32 {
    let mut at = from;
    while at < SEGMENT_BLOCKS {
        let word = a[(at / 64) as usize];
        let word = (if set { word } else { !word }) >> (at % 64);
        if word != 0 {
            return at + word.trailing_zeros();
        }
        at = (at / 64 + 1) * 64;
    }
    SEGMENT_BLOCKS
}

/// Length of the run of clear bits that starts at `from`.
pub(super) fn clear_len(a: &Bits, from: u32) -> u32 {
    next(a, from, true) - from
}

/// A run of clear bits: the first one at or after `from` (then from the start) with `enough` bits, else `None`.
pub(super) fn find_run(a: &Bits, from: u32, enough: u32) -> Option<(u32, u32)> {
    let search = |mut at: u32, end: u32| {
        while at < end {
            let start = next(a, at, false);
            let len = clear_len(a, start.min(SEGMENT_BLOCKS));
            if start >= end {
                return None;
            }
            if len >= enough {
                return Some((start, len));
            }
            at = start + len;
        }
        None
    };
    search(from, SEGMENT_BLOCKS).or_else(|| search(0, from.min(SEGMENT_BLOCKS)))
}

/// The longest run of clear bits, `None` where all are set.
pub(super) fn longest_run(a: &Bits) -> Option<(u32, u32)> {
    let (mut best, mut at) = (None, next(a, 0, false));
    while at < SEGMENT_BLOCKS {
        let len = clear_len(a, at);
        if best.is_none_or(|(_, n)| len > n) {
            best = Some((at, len));
        }
        at = next(a, at + len, false);
    }
    best
}

/// Blocks of the segment at `first` (counted in its group) that can never be allocated: metadata, journal, past the end.
pub(super) fn fixed_mask(first: u32, meta: u32, blocks: u32, journal: &std::ops::Range<u32>) -> Bits {
    let mut bits = [0u64; 8];
    let mut add = |from: u32, to: u32| {
        let (from, to) = (from.max(first), to.min(first + SEGMENT_BLOCKS));
        if from < to {
            or(&mut bits, &mask(from - first, to - from));
        }
    };
    add(0, meta);
    add(blocks, u32::MAX);
    add(journal.start, journal.end);
    bits
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_and_runs() {
        for (from, len) in [(0, 512), (0, 64), (63, 2), (511, 1), (5, 0), (100, 300)] {
            let m = mask(from, len);
            assert_eq!(count(&m), len);
            assert!((0..512).all(|i| get(&m, i) == (from..from + len).contains(&i)));
        }
        let mut used = mask(0, 512);
        assert_eq!((longest_run(&used), find_run(&used, 9, 1)), (None, None));
        clear(&mut used, &mask(10, 3));
        clear(&mut used, &mask(500, 12));
        assert_eq!(find_run(&used, 0, 1), Some((10, 3)));
        assert_eq!(find_run(&used, 11, 1), Some((11, 2)));
        assert_eq!(find_run(&used, 0, 4), Some((500, 12)));
        assert_eq!(find_run(&used, 508, 5), Some((500, 12)));
        assert_eq!(find_run(&used, 0, 13), None);
        assert_eq!(find_run(&used, 512, 1), Some((10, 3)));
        assert_eq!(longest_run(&used), Some((500, 12)));
        assert_eq!(longest_run(&[0; 8]), Some((0, 512)));
    }
}
