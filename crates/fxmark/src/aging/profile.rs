//! What files of real machines are like: the sizes and depths of profiles that come with Geriatrix (Kadekodi, Nagarajan,
//! Ganger, Gibson, "Geriatrix: Aging what you see and what you don't see", USENIX ATC '18; github.com/saurabhkadekodi/
//! geriatrix, `profiles/`). Weights count files.

use crate::names::Rng;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// Which sizes files have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Profile {
    /// Desktops of a company (Agrawal, Bolosky, Douceur, Lorch, FAST '07)
    Agrawal,
    /// Desktops of a company, later (Meyer, Bolosky, FAST '11)
    Meyer,
    /// Storage of a research group (the profile wang_os)
    WangOs,
}

/// Sizes of files in bytes, each with its weight.
type Sizes = &'static [(u64, u32)];

const AGRAWAL: Sizes = &[
    (8, 1),
    (32, 7),
    (128, 16),
    (512, 40),
    (2 << 10, 50),
    (8 << 10, 46),
    (32 << 10, 35),
    (128 << 10, 20),
    (512 << 10, 10),
    (2 << 20, 4),
    (8 << 20, 1),
];

const MEYER: Sizes = &[
    (0, 100),
    (1, 20),
    (2, 40),
    (4, 30),
    (8, 30),
    (16, 100),
    (32, 100),
    (64, 170),
    (128, 220),
    (256, 400),
    (512, 680),
    (1 << 10, 1180),
    (2 << 10, 1230),
    (4 << 10, 1150),
    (8 << 10, 1020),
    (16 << 10, 900),
    (32 << 10, 700),
    (64 << 10, 680),
    (128 << 10, 440),
    (256 << 10, 300),
    (512 << 10, 230),
    (1 << 20, 175),
    (2 << 20, 130),
    (4 << 20, 100),
    (8 << 20, 60),
    (16 << 20, 40),
    (32 << 20, 20),
    (64 << 20, 10),
    (128 << 20, 10),
];

const WANG_OS: Sizes = &[
    (0, 12),
    (512, 8),
    (1 << 10, 9),
    (2 << 10, 12),
    (4 << 10, 18),
    (8 << 10, 12),
    (16 << 10, 10),
    (32 << 10, 9),
    (64 << 10, 5),
    (128 << 10, 1),
    (256 << 10, 1),
    (512 << 10, 1),
    (1 << 20, 1),
    (2 << 20, 1),
    (4 << 20, 1),
];

/// (depth, weight of its files, directories that hold them): the profile agrawal.
pub const DEPTHS: [(u32, u32, u32); 15] = [
    (1, 1, 1),
    (2, 2, 5),
    (3, 14, 13),
    (4, 15, 19),
    (5, 23, 30),
    (6, 24, 36),
    (7, 42, 32),
    (8, 22, 26),
    (9, 15, 22),
    (10, 12, 17),
    (11, 7, 8),
    (12, 4, 5),
    (13, 3, 2),
    (14, 2, 1),
    (15, 1, 1),
];

/// One of these, with a chance as its weight says.
pub fn draw<T: Copy>(rng: &mut Rng, of: &[T], weight: impl Fn(T) -> u32) -> Option<T> {
    let all: u64 = of.iter().map(|t| u64::from(weight(*t))).sum();
    let mut at = rng.below(all);
    of.iter().copied().find(|t| {
        let here = u64::from(weight(*t));
        let found = at < here;
        at = at.saturating_sub(here);
        found
    })
}

impl Profile {
    fn sizes(self) -> Sizes {
        match self {
            Self::Agrawal => AGRAWAL,
            Self::Meyer => MEYER,
            Self::WangOs => WANG_OS,
        }
    }

    /// The sizes up to `largest` bytes: on a small volume the others would be most of it.
    pub fn up_to(self, largest: u64) -> Vec<(u64, u32)> {
        self.sizes().iter().copied().filter(|s| s.0 <= largest).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_drawn_by_weight() {
        let mut rng = Rng::new(1, 0);
        for profile in [Profile::Agrawal, Profile::Meyer, Profile::WangOs] {
            let sizes = profile.up_to(1 << 20);
            assert!(sizes.is_sorted_by(|a, b| a.0 < b.0) && sizes.iter().all(|s| s.0 <= 1 << 20 && s.1 > 0));
            let (all, mut seen) = (sizes.iter().map(|s| s.1).sum::<u32>(), vec![0u32; sizes.len()]);
            for _ in 0..100_000 {
                let (bytes, _) = draw(&mut rng, &sizes, |s| s.1).expect("a size");
                seen[sizes.iter().position(|s| s.0 == bytes).expect("one of them")] += 1;
            }
            for (seen, (bytes, weight)) in seen.into_iter().zip(sizes) {
                let wanted = 100_000.0 * f64::from(weight) / f64::from(all);
                assert!(
                    (f64::from(seen) - wanted).abs() < 6.0 * wanted.sqrt() + 1.0,
                    "{profile:?} {bytes}: {seen} {wanted}"
                );
            }
        }
    }
}
