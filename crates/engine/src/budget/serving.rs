//! The meter of processor time that a server's threads spend on a tenant ([`crate::spending`]).
//!
//! What is done in the background is debt, as with what is asked of the device. How long a request will
//! take nobody knows before: who comes takes a place as if it took what others did lately, so that many who come at once have
//! their turns one after another.

use super::bucket::Bucket;
use crate::types::Rate;
use std::time::Duration;

/// What a request is taken to need before any was seen, ns.
const FIRST: u64 = 20_000;
/// The mean goes by this part to what the last request took.
const PART: u64 = 8;

/// See the module.
#[derive(Debug, Default)]
pub struct Meter {
    bucket: Bucket,
    /// What requests took lately, ns; 0: none was seen.
    mean: u64,
    used: u64,
    waits: u64,
    waited: Duration,
}

impl Meter {
    pub fn limit(&mut self, now: u64, limit: Option<Rate>) {
        self.bucket.limit(now, limit);
    }

    /// What one more request takes, and its place.
    pub fn come(&mut self, now: u64) -> (u64, u64) {
        let n = if self.mean > 0 { self.mean } else { FIRST };
        (n, self.bucket.take(now, n))
    }

    pub fn wait(&mut self, now: u64, place: u64, n: u64) -> u64 {
        if n > 0 { self.bucket.wait(now, place, n) } else { 0 }
    }

    pub fn give_back(&mut self, n: u64) {
        self.bucket.give_back(n);
    }

    pub fn waited(&mut self, waited: Duration) {
        self.waits += 1;
        self.waited += waited;
    }

    pub fn used(&mut self, now: u64) -> ServingUse {
        let debt = Duration::from_nanos(self.bucket.debt(now));
        ServingUse { used: Duration::from_nanos(self.used), debt, waits: self.waits, waited: self.waited }
    }

    pub fn charge(&mut self, now: u64, n: u64, request: bool) {
        self.bucket.take(now, n);
        self.used += n;
        if request {
            self.mean = (self.mean * (PART - 1) + n).div_ceil(PART).max(1);
        }
    }
}

/// What of its processor time a tenant has used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ServingUse {
    /// Since the mount, while there was a limit.
    pub used: Duration,
    /// Of that, what is not paid yet: who comes next waits for it.
    pub debt: Duration,
    /// Requests that waited, and how long all of them did.
    pub waits: u64,
    /// How long the requests of `waits` waited, all together.
    pub waited: Duration,
}
