//! Paths, built in the loop without allocating.

use std::ffi::CStr;
use std::fmt::{Arguments, Write as _};

/// A buffer that holds one path behind a fixed prefix.
#[derive(Debug, Clone)]
pub struct Name {
    text: String,
    prefix: usize,
}

impl Name {
    /// With `prefix` before every path. A prefix that is not empty ends in `/`.
    pub fn new(prefix: &str) -> Self {
        let mut text = String::with_capacity(256);
        // a NUL would end the path early; there is none in a path that a system call took before
        text.extend(prefix.chars().filter(|c| *c != '\0'));
        let prefix = text.len();
        Self { text, prefix }
    }

    /// Replaces the path by the formatted one. What is formatted has no NUL: it comes from format strings of this
    /// crate and numbers.
    pub fn set(&mut self, path: Arguments<'_>) -> &CStr {
        self.text.truncate(self.prefix);
        // writing to a string fails only where a Display fails
        let _ = self.text.write_fmt(path);
        self.text.push('\0');
        self.get()
    }

    /// The path that was set last.
    pub fn get(&self) -> &CStr {
        CStr::from_bytes_until_nul(self.text.as_bytes()).unwrap_or(c"")
    }
}

/// Numbers that look random and are the same in every run (xorshift64*).
#[derive(Debug, Clone)]
pub struct Rng(u64);

impl Rng {
    /// From a seed and the number of a worker.
    pub fn new(seed: u64, worker: usize) -> Self {
        let mixed =
            (seed ^ (worker as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        Self(mixed | 1)
    }
    /// The next number.
    pub fn draw(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
    /// The next number below `n`, which is not 0.
    pub fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.draw()) * u128::from(n.max(1))) >> 64) as u64
    }
    /// A size drawn from a gamma distribution with shape 1.5 and this mean, as Filebench draws file sizes.
    pub fn gamma(&mut self, mean: u64) -> u64 {
        // shape 1.5 = an exponential (shape 1) + half of a squared normal (shape 1/2, scale 1)
        let unit = |r: &mut Self| ((r.draw() >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
        let exponential = -unit(self).ln();
        let normal = (-2.0 * unit(self).ln()).sqrt() * (std::f64::consts::TAU * unit(self)).cos();
        ((exponential + normal * normal / 2.0) * mean as f64 / 1.5) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_replace_each_other() {
        let mut n = Name::new("root/");
        assert_eq!(n.set(format_args!("{}/{}", 12, 345)), c"root/12/345");
        assert_eq!(n.set(format_args!("x")), c"root/x");
        assert_eq!(n.get(), c"root/x");
        assert_eq!(Name::new("").set(format_args!("a")), c"a");
    }

    #[test]
    fn numbers_spread() {
        let mut r = Rng::new(1, 0);
        let mut seen = [0u32; 8];
        for _ in 0..8000 {
            seen[r.below(8) as usize] += 1;
        }
        assert!(seen.iter().all(|n| (800..1200).contains(n)), "{seen:?}");
        let mean = (0..50_000).map(|_| r.gamma(16_384)).sum::<u64>() / 50_000;
        assert!((16_000..16_800).contains(&mean), "{mean}");
    }
}
