//! A table by number whose parts have a lock each, so that threads that are about different numbers seldom meet.

use braidfs_sync::Mutex;
use braidfs_sync::rank::Rank;
use crossbeam::utils::CachePadded;
use std::collections::HashMap;
use std::fmt::Debug;

type Part<T, R> = CachePadded<Mutex<HashMap<u64, T>, R>>;

/// In `N` parts, a power of two.
#[derive(Debug)]
pub(crate) struct Shards<T: Debug, R: Rank<Key = ()>, const N: usize>([Part<T, R>; N]);

impl<T: Debug, R: Rank<Key = ()>, const N: usize> Default for Shards<T, R, N> {
    fn default() -> Self {
        const { assert!(N.is_power_of_two() && N > 1) };
        Self(std::array::from_fn(|_| Part::default()))
    }
}

impl<T: Debug, R: Rank<Key = ()>, const N: usize> Shards<T, R, N> {
    /// The part that has `number`.
    pub fn of(&self, number: u64) -> &Mutex<HashMap<u64, T>, R> {
        // neighbours are often about the same time
        &self.0[(number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - N.trailing_zeros())) as usize]
    }

    /// All parts.
    pub fn iter(&self) -> impl Iterator<Item = &Mutex<HashMap<u64, T>, R>> {
        self.0.iter().map(|part| &**part)
    }
}
