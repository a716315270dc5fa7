//! The arithmetic: medians, spread, and whether two sets of repetitions differ.
//!
//! With three to ten repetitions nothing can be assumed about the distribution: differences are judged by the exact
//! Mann-Whitney test (by its normal approximation where there are many), ratios get a bootstrap interval.

use crate::names::Rng;

/// Mean; 0 of nothing.
pub fn mean(v: &[f64]) -> f64 {
    if v.is_empty() { 0.0 } else { v.iter().sum::<f64>() / v.len() as f64 }
}

fn sorted(v: &[f64]) -> Vec<f64> {
    let mut v = v.to_vec();
    v.sort_by(f64::total_cmp);
    v
}

/// A quantile, between neighbours by their distance; 0 of nothing.
pub fn quantile(v: &[f64], q: f64) -> f64 {
    let v = sorted(v);
    let Some(last) = v.len().checked_sub(1) else { return 0.0 };
    let at = q.clamp(0.0, 1.0) * last as f64;
    let (low, part) = (at.floor() as usize, at.fract());
    let high = (low + 1).min(last);
    v[low] + (v[high] - v[low]) * part
}

/// Median; 0 of nothing.
pub fn median(v: &[f64]) -> f64 {
    quantile(v, 0.5)
}

/// Half the distance of the quartiles over the median; below four values, of the extremes.
pub fn spread(v: &[f64]) -> f64 {
    let m = median(v);
    if v.len() < 2 || m == 0.0 {
        return 0.0;
    }
    let (a, b) = if v.len() < 4 { (0.0, 1.0) } else { (0.25, 0.75) };
    (quantile(v, b) - quantile(v, a)) / 2.0 / m
}

/// Two-sided p of the Mann-Whitney test: how often sets that do not differ would differ as much. 1 where one is empty.
pub fn mann_whitney(a: &[f64], b: &[f64]) -> f64 {
    if a.is_empty() || b.is_empty() {
        return 1.0;
    }
    // twice U, so that ties stay whole
    let twice_u: usize = a
        .iter()
        .flat_map(|x| b.iter().map(move |y| x.total_cmp(y)))
        .map(|o| match o {
            std::cmp::Ordering::Greater => 2,
            std::cmp::Ordering::Equal => 1,
            std::cmp::Ordering::Less => 0,
        })
        .sum();
    let (n, m) = (a.len(), b.len());
    if n * m <= 400 { exact(n, m, twice_u) } else { normal(n, m, twice_u) }
}

/// Counts arrangements: `ways[u]` of n and m values whose U is u.
fn exact(n: usize, m: usize, twice_u: usize) -> f64 {
    // ways(n, m, u) = ways(n-1, m, u-m) + ways(n, m-1, u), built up row by row
    let mut rows: Vec<Vec<f64>> = vec![vec![1.0]; m + 1];
    for i in 1..=n {
        let mut next: Vec<Vec<f64>> = vec![vec![1.0]];
        for j in 1..=m {
            let mut ways = vec![0.0; i * j + 1];
            for (u, w) in rows[j].iter().enumerate() {
                ways[u + j] += w;
            }
            for (u, w) in next[j - 1].iter().enumerate() {
                ways[u] += w;
            }
            next.push(ways);
        }
        rows = next;
    }
    let ways = &rows[m];
    let all: f64 = ways.iter().sum();
    // the smaller tail, ties counted towards it
    let u = twice_u.min(2 * n * m - twice_u).div_ceil(2);
    let tail: f64 = ways.iter().take(u + 1).sum();
    (2.0 * tail / all).min(1.0)
}

fn normal(n: usize, m: usize, twice_u: usize) -> f64 {
    let (n, m) = (n as f64, m as f64);
    let deviation = (n * m * (n + m + 1.0) / 12.0).sqrt();
    let z = ((twice_u as f64 / 2.0 - n * m / 2.0).abs() - 0.5).max(0.0) / deviation;
    // erfc by Abramowitz and Stegun 7.1.26, good to 1.5e-7
    let t = 1.0 / (1.0 + 0.327_591_1 * z / std::f64::consts::SQRT_2);
    let poly =
        t * (0.254_829_592 + t * (-0.284_496_736 + t * (1.421_413_741 + t * (-1.453_152_027 + t * 1.061_405_429))));
    (poly * (-z * z / 2.0).exp()).min(1.0)
}

/// 95 % interval of the ratio of the medians of `b` over `a`, by resampling both.
pub fn ratio_interval(a: &[f64], b: &[f64]) -> (f64, f64) {
    const ROUNDS: usize = 2000;
    if a.is_empty() || b.is_empty() {
        return (0.0, 0.0);
    }
    let mut rng = Rng::new(1, 0);
    let mut again = |v: &[f64]| {
        let drawn: Vec<f64> = v.iter().map(|_| v[rng.below(v.len() as u64) as usize]).collect();
        median(&drawn)
    };
    let ratios: Vec<f64> = (0..ROUNDS).map(|_| (again(a), again(b))).map(|(a, b)| b / a).collect();
    (quantile(&ratios, 0.025), quantile(&ratios, 0.975))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_quantiles() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(quantile(&[1.0, 2.0, 3.0, 4.0, 5.0], 0.25), 2.0);
        assert_eq!(median(&[]), 0.0);
        assert_eq!(spread(&[9.0, 10.0, 11.0]), 0.1);
    }

    #[test]
    fn mann_whitney_is_the_tables() {
        // complete separation: 2 / C(n+m, n)
        assert!((mann_whitney(&[1.0, 2.0, 3.0], &[4.0, 5.0, 6.0]) - 0.1).abs() < 1e-12);
        assert!((mann_whitney(&[1.0, 2.0, 3.0, 4.0], &[5.0, 6.0, 7.0, 8.0]) - 2.0 / 70.0).abs() < 1e-12);
        // n = m = 5, U = 3: 7 of 252 arrangements at each end
        let a = [1.0, 2.0, 3.0, 4.0, 8.0];
        let b = [5.0, 6.0, 7.0, 9.0, 10.0];
        assert!((mann_whitney(&a, &b) - 0.0556).abs() < 1e-3, "{}", mann_whitney(&a, &b));
        assert!((mann_whitney(&b, &a) - mann_whitney(&a, &b)).abs() < 1e-12);
        assert_eq!(mann_whitney(&[1.0, 2.0], &[1.0, 2.0]), 1.0);
        assert_eq!(mann_whitney(&[], &[1.0]), 1.0);
    }

    #[test]
    fn many_values_agree_with_the_exact_test() {
        let a: Vec<f64> = (0..18).map(f64::from).collect();
        let b: Vec<f64> = (0..18).map(|i| f64::from(i) + 5.5).collect();
        let twice: usize = a.iter().flat_map(|x| b.iter().map(move |y| if x > y { 2 } else { 0 })).sum();
        assert!((exact(18, 18, twice) - normal(18, 18, twice)).abs() < 0.01);
    }

    #[test]
    fn ratios_have_intervals() {
        let (low, high) = ratio_interval(&[100.0, 101.0, 99.0, 100.0], &[200.0, 202.0, 198.0, 201.0]);
        assert!(low > 1.9 && high < 2.1 && low <= high, "{low} {high}");
    }
}
