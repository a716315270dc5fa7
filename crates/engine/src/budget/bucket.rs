//! A token bucket, by places on a line ([`super`]): units are bytes, requests or nanoseconds of processor time.

use crate::types::Rate;

/// Nanoseconds.
pub const SECOND: u64 = 1_000_000_000;

/// See the module. Units are bytes or requests.
#[derive(Debug, Default)]
pub struct Bucket {
    limit: Option<Rate>,
    charged: u64,
    drained: u64,
    /// Of what time `drained` is, ns.
    at: u64,
    /// What of a unit has drained beside it, 1/10^9.
    part: u64,
}

impl Bucket {
    fn drain(&mut self, now: u64) {
        let Some(limit) = self.limit else {
            self.drained = self.charged;
            return;
        };
        let passed = now.saturating_sub(self.at);
        self.at = self.at.max(now);
        let parts = u128::from(passed) * u128::from(limit.per_second) + u128::from(self.part);
        let units = u64::try_from(parts / u128::from(SECOND)).unwrap_or(u64::MAX);
        self.part = (parts % u128::from(SECOND)) as u64;
        self.drained = self.drained.saturating_add(units);
        if self.drained >= self.charged {
            (self.drained, self.part) = (self.charged, 0);
        }
    }

    /// Charges `n`; the place of who takes them.
    pub fn take(&mut self, now: u64, n: u64) -> u64 {
        self.drain(now);
        self.charged += n;
        self.charged
    }

    /// What was taken and is not needed.
    pub fn give_back(&mut self, n: u64) {
        self.drained = (self.drained + n).min(self.charged);
    }

    /// How long who took `n` and has this place waits, ns.
    pub fn wait(&mut self, now: u64, place: u64, n: u64) -> u64 {
        self.drain(now);
        let Some(limit) = self.limit else { return 0 };
        // who takes more than a burst goes when all before him is paid
        let before = place.saturating_sub(self.drained).saturating_sub(limit.burst().max(n));
        let ns = (u128::from(before) * u128::from(SECOND)).div_ceil(u128::from(limit.per_second.max(1)));
        u64::try_from(ns).unwrap_or(u64::MAX)
    }

    /// What was charged and is not paid yet.
    pub fn debt(&mut self, now: u64) -> u64 {
        self.drain(now);
        self.charged - self.drained
    }

    /// Another limit from now on, also for who waits.
    pub fn limit(&mut self, now: u64, limit: Option<Rate>) {
        self.drain(now);
        self.at = now;
        self.limit = limit;
    }
}
