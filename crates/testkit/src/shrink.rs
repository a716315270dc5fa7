//! Makes a failing sequence short: delta debugging (Zeller and Hildebrandt, "Simplifying and isolating failure-inducing
//! input", 2002, the algorithm ddmin).

use std::time::{Duration, Instant};

/// The shortest subsequence found of `all` for which `fails` is true, within about `limit`.
///
/// The result fails too, provided that `all` does.
pub fn shrink<T: Clone>(all: &[T], limit: Duration, mut fails: impl FnMut(&[T]) -> bool) -> Vec<T> {
    shrink_further(all, limit, |part| fails(part).then(|| part.to_vec()))
}

/// [`shrink`], where it may turn out that even less than the given part fails: `failing` says what.
pub fn shrink_further<T: Clone>(all: &[T], limit: Duration, mut failing: impl FnMut(&[T]) -> Option<Vec<T>>) -> Vec<T> {
    let start = Instant::now();
    let mut now = all.to_vec();
    let mut parts = 2;
    while now.len() > 1 && start.elapsed() < limit {
        let piece = now.len().div_ceil(parts);
        let mut smaller = None;
        for from in (0..now.len()).step_by(piece).rev() {
            let mut without = now.clone();
            without.drain(from..(from + piece).min(now.len()));
            smaller = failing(&without);
            if smaller.is_some() {
                break;
            }
            if start.elapsed() > limit {
                break;
            }
        }
        match smaller {
            Some(s) => {
                now = s;
                parts = (parts - 1).clamp(2, now.len().max(2));
            }
            None if piece == 1 => break,
            None => parts = (parts * 2).min(now.len()),
        }
    }
    now
}

#[cfg(test)]
mod tests {
    #[test]
    fn finds_the_two_that_matter() {
        let all: Vec<u32> = (0..1000).collect();
        let fails = |s: &[u32]| s.contains(&7) && s.contains(&900);
        assert_eq!(super::shrink(&all, std::time::Duration::from_secs(10), fails), [7, 900]);
    }
}
