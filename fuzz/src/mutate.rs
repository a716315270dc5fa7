//! A mutator without knowledge of coverage, for a toolchain without libFuzzer.

/// Numbers that often stand at a limit.
const LIMITS: [u64; 12] =
    [0, 1, 0x7f, 0x80, 0xff, 0x7fff, 0xffff, 0xff_ffff, 0x7fff_ffff, 0xffff_ffff, 0xffff_ffff_ffff, u64::MAX];
/// Longest input made.
const LONGEST: usize = 9000;

/// An input made from one or two of `corpus` (or from nothing).
pub fn mutate(corpus: &[Vec<u8>], rng: &mut fastrand::Rng) -> Vec<u8> {
    let mut data = match corpus.len() {
        0 => Vec::new(),
        n => corpus[rng.usize(..n)].clone(),
    };
    for _ in 0..1 << rng.u32(..5) {
        let at = rng.usize(..=data.len());
        match rng.u8(..8) {
            0 if at < data.len() => data[at] ^= 1 << rng.u8(..8),
            1 if at < data.len() => data[at] = rng.u8(..),
            2 => {
                let bytes = LIMITS[rng.usize(..LIMITS.len())].to_le_bytes();
                for (i, b) in bytes[..[1, 2, 4, 6, 8][rng.usize(..5)]].iter().enumerate() {
                    if let Some(x) = data.get_mut(at + i) {
                        *x = *b;
                    }
                }
            }
            3 => {
                let n = rng.usize(..32);
                data.splice(at..at, (0..n).map(|_| rng.u8(..)));
            }
            4 => {
                let end = (at + rng.usize(..32)).min(data.len());
                data.drain(at..end);
            }
            5 if !corpus.is_empty() => {
                let other = &corpus[rng.usize(..corpus.len())];
                let from = rng.usize(..=other.len());
                let end = (from + rng.usize(..200)).min(other.len());
                data.splice(at..at, other[from..end].iter().copied());
            }
            6 => {
                let end = (at + rng.usize(..64)).min(data.len());
                let part = data[at..end].to_vec();
                let to = rng.usize(..=data.len());
                data.splice(to..to, part);
            }
            _ => data.extend((0..rng.usize(..64)).map(|_| rng.u8(..))),
        }
    }
    data.truncate(LONGEST);
    data
}
