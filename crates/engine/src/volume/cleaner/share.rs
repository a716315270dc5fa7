//! What the cleaner may take of the devices: half of what others leave of the highest rate that was seen lately, and a little more.
//!
//! Nobody tells how fast a device is. The highest rate so far, be it that of a commit, says how fast it is at least; it fades, since
//! a device that is busy otherwise, or wears, has less to give. What others get is not what they want, where the cleaner is in
//! their way: as it takes half, they have all but a tenth again three intervals after they came back.

use std::time::Duration;

/// How long what was asked in the last interval bounds what the cleaner may do.
const INTERVAL: Duration = Duration::from_millis(90);
/// Part of the highest rate that fades in an interval: half of it in some half a minute.
const FADES: f64 = 1.0 / 512.0;
/// What the cleaner may do in any case in each interval, bytes; saved for the next ones up to so much, which is more than a
/// segment.
pub(super) const LEAST: u64 = 256 << 10;
const SAVED_MOST: u64 = 10 * LEAST;

/// See the module. Bytes are those that are read and written.
#[derive(Debug, Default)]
pub(crate) struct Share {
    last: Option<Look>,
    /// Bytes per second.
    highest: f64,
    /// Half of what others do not use of this interval.
    unused: u64,
    /// What it has in any case.
    saved: u64,
    /// What it did since the interval began.
    own: u64,
}

/// When an interval began, and all bytes until then.
#[derive(Debug, Clone, Copy)]
struct Look {
    at: Duration,
    bytes: u64,
}

impl Share {
    /// What the cleaner may do at time `now`, when `bytes` were asked of the devices in all: bytes.
    pub fn allowance(&mut self, now: Duration, bytes: u64) -> u64 {
        let last = *self.last.get_or_insert(Look { at: now, bytes });
        let time = now.saturating_sub(last.at);
        if time >= INTERVAL {
            let (seconds, all) = (time.as_secs_f64(), bytes.saturating_sub(last.bytes));
            let rate = all as f64 / seconds;
            self.highest = rate.max(self.highest * (1.0 - FADES).powf(seconds / INTERVAL.as_secs_f64()));
            // others go on as they did
            let others = all.saturating_sub(self.own) as f64 / seconds;
            self.unused = ((self.highest - others) / 2.0 * INTERVAL.as_secs_f64()) as u64;
            self.saved = (self.saved + LEAST).min(SAVED_MOST);
            (self.last, self.own) = (Some(Look { at: now, bytes }), 0);
        }
        self.unused + self.saved
    }

    /// The cleaner did so much.
    pub fn note_done(&mut self, bytes: u64) {
        self.own += bytes;
        let unused = bytes.min(self.unused);
        self.unused -= unused;
        self.saved = self.saved.saturating_sub(bytes - unused);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// A device that does 100 MiB between two looks, shared by the cleaner, which does what it may, and others.
    #[derive(Default)]
    struct Shared {
        share: Share,
        now: Duration,
        all: u64,
        did: u64,
    }

    impl Shared {
        /// So many looks, between which others want `others` and have what the cleaner leaves; what that may do at last.
        fn looks(&mut self, n: u32, others: u64) -> u64 {
            let mut left = 0;
            for _ in 0..n {
                self.now += Duration::from_millis(100);
                self.all += others.min(100 * MIB - self.did);
                left = self.share.allowance(self.now, self.all);
                self.did = left.min(100 * MIB);
                self.share.note_done(self.did);
                self.all += self.did;
            }
            left
        }
    }

    #[test]
    fn what_others_leave_is_the_cleaners() {
        let mut s = Shared::default();
        // they want all there is
        let left = s.looks(20, 100 * MIB);
        assert!(left < MIB, "{left}");
        let left = s.looks(3, 50 * MIB);
        assert!((15 * MIB..30 * MIB).contains(&left), "{left}");
        let left = s.looks(3, 0);
        assert!((40 * MIB..50 * MIB).contains(&left), "{left}");
        // they come back
        assert!(s.looks(1, 100 * MIB) > 15 * MIB);
        assert!(s.looks(3, 100 * MIB) < 5 * MIB);
        // half a minute of little
        let left = s.looks(300, MIB);
        assert!((15 * MIB..35 * MIB).contains(&left), "{left}");
    }

    #[test]
    fn within_an_interval_it_is_had_once() {
        let (mut share, now) = (Share::default(), Duration::from_secs(5));
        let at = |ms| now + Duration::from_millis(ms);
        assert_eq!(share.allowance(now, 0), 0);
        assert_eq!(share.allowance(at(100), 0), LEAST);
        share.note_done(LEAST - 1);
        assert_eq!(share.allowance(at(110), 50), 1);
        share.note_done(2);
        assert_eq!(share.allowance(at(120), 60), 0);
        // others do all of what was ever seen: what is not had is saved, up to a bound
        let left: Vec<u64> = (2..40).map(|i| share.allowance(at(100 * i), (i - 1) * MIB)).collect();
        assert!(left[0] >= LEAST && left[0] < 2 * LEAST, "{left:?}");
        assert_eq!(left[1..4], [2 * LEAST, 3 * LEAST, 4 * LEAST]);
        assert_eq!(left.last(), Some(&SAVED_MOST));
    }
}
