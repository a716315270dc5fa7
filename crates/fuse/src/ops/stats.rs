//! What was asked since the mount, see [`crate::counters`].

use crate::abi;
use crate::control::{PRIVATE, StatsOp, StatsOut};
use crate::counters::SAMPLED;
use crate::fs::BraidFs;
use crate::ops::flags::ioctl_out;
use crate::request::{Answer, Handled, Outcome};

impl BraidFs {
    pub(super) fn stats_ioctl(&self, arg: &abi::IoctlIn, out: &mut Answer) -> Handled {
        let stats = StatsOut {
            threads: self.counters.threads() as u32,
            sampled: SAMPLED,
            init_flags: self.negotiated.flags,
            how: if self.profile.private { PRIVATE } else { 0 },
            ops: self.counters.sum().map(|s| StatsOp {
                requests: s.requests,
                deferred: s.deferred,
                timed: s.timed,
                nanos: s.nanos,
            }),
        };
        ioctl_out(out, arg.out_size as usize, &stats)?;
        Ok(Outcome::Reply)
    }
}
