//! What is the volume's and no domain's: options, clock, counters of memory, marks of its life.

use super::clock;
use super::memory::Looks;
use super::placed::Nodes;
use crate::budget::Budget;
use crate::cell::dir::OpenBucket;
use crate::cell::{DirBody, State};
use crate::device_set::DeviceSet;
use crate::error::{Error, Result};
use crate::planted::{Bug, planted};
use crate::quota::Quotas;
use crate::runtime_options::RuntimeOptions;
use crate::spending::Spending;
use crate::types::*;
use braidfs_format::super_block::{INCOMPAT_DATA_SUMS, MAX_DEVICES, SuperBlock};
use braidfs_sync::slots::Line;
use braidfs_sync::workers::Workers;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

/// No logical time that an operation gave is this late: what says so was written by nobody of us, and must not stop the clock.
const LATEST: u64 = 1 << 63;

/// No group is to be tried again.
const NEVER: u64 = u64::MAX;

/// Each kind of the domains' tables (entries of nodes, owners of segments, blocks of nodes and buckets) takes this part of the
/// cache's memory at most.
const TABLES_PART: u64 = 16;

/// What all domains of a volume share, and its operations with them: the logical clock, limits, counters. It says nothing of
/// any domain: what one must know of others it asks through [`Peers`](super::peers::Peers). Read-mostly: what many write has
/// cache lines of its own.
#[derive(Debug)]
pub struct Shared {
    /// No name of a directory that is not in memory was taken or left later, in logical time ([`Self::name_time`]).
    pub names_before: Line<AtomicU64>,
    /// Names changed side by side, where a test asks for that ([`MountOptions::share_dirs`]).
    pub changed_beside: Line<AtomicU64>,
    /// Files that were replaced and have been deleted since the mount, behind the commits that they waited for: of all domains.
    pub replaced_gone: Line<AtomicU64>,
    /// Options of the mount.
    pub options: MountOptions,
    /// Key of the directory hash.
    pub hash_key: [u8; 16],
    /// Checksum every data block.
    pub data_sums: bool,
    /// Largest inline file.
    pub inline_max: usize,
    /// CPUs that the process may use.
    pub cpus: usize,
    /// NUMA nodes that the domains are placed on, where there are several.
    pub numa: Option<Nodes>,
    /// When threads look at what the caches take.
    pub looks: Arc<Looks>,
    /// Free blocks of groups that no domain owns.
    pub unclaimed: AtomicU64,
    /// Those of each device.
    pub unclaimed_of: [AtomicU64; MAX_DEVICES],
    /// When the first of the groups that are left alone after an error is to be tried again ([`Self::has_come`]): until then they are
    /// missing in [`Self::unclaimed`].
    tried_again: AtomicU64,
    /// When the volume was mounted.
    begun: Instant,
    /// The volume stops without writing another block (`Volume::kill`).
    pub dead: AtomicBool,
    /// A forced read-only volume.
    pub read_only: AtomicBool,
    /// What a domain keeps in memory at most of each kind of its tables, bytes.
    pub table_bytes: u64,
    /// The volume is about to become read-only: operations are refused, what they changed so far is still committed. Set
    /// before the last commit's flip: who enters a domain after that sees it.
    pub closing: AtomicBool,
    /// Those of `options` that a remount changes.
    pub runtime: RuntimeOptions,
    /// Threads of the mount and of the unmount.
    pub workers: Workers,
    /// Some tenant's rates or serving time are limited, or were since the mount: until then nobody looks at his domain's.
    pub rates: AtomicBool,
    /// Some tenant's serving time is, or was: until then nobody asks a clock.
    pub serving: AtomicBool,
    /// What users, groups and directories use, and may.
    pub quotas: Quotas,
    /// A check replays the journals: also those of domains that have failed and were not closed, which have failed still then.
    pub replays: bool,
    /// Recovery has not made the domains agree yet: tombstones and exchanges in records count.
    pub recovering: AtomicBool,
}

impl Shared {
    /// Whether recovery passes over what it meets this error at: it could not be read, and a check sees to it when the
    /// journals are replayed. All that they tell besides would be given up.
    pub fn passes_over(&self, error: &Error) -> bool {
        self.replays && matches!(error, Error::Corrupt(_) | Error::Io(_))
    }

    /// # Errors
    /// The volume was killed: nothing more is written, and nothing becomes durable.
    #[inline]
    pub fn check_alive(&self) -> Result<()> {
        match self.dead.load(Ordering::Relaxed) {
            true => Err(Error::Io(std::io::Error::other("the volume was killed: close it and open it again"))),
            false => Ok(()),
        }
    }

    /// At the mount, where recovery has not begun.
    pub fn new(options: MountOptions, sb: &SuperBlock) -> Self {
        Self {
            names_before: Line::default(),
            changed_beside: Line::default(),
            replaced_gone: Line::default(),
            hash_key: sb.hash_key,
            data_sums: sb.incompat.get() & INCOMPAT_DATA_SUMS != 0,
            inline_max: usize::from(sb.inline_max.get()),
            cpus: braidfs_sync::workers::cpus(),
            numa: Nodes::new(&options),
            looks: Arc::new(Looks::new(options.cache_bytes)),
            table_bytes: options.cache_bytes / TABLES_PART / u64::from(sb.domains.get().max(1)),
            unclaimed: AtomicU64::new(0),
            unclaimed_of: Default::default(),
            tried_again: AtomicU64::new(NEVER),
            begun: Instant::now(),
            dead: AtomicBool::new(false),
            read_only: AtomicBool::new(false),
            closing: AtomicBool::new(false),
            runtime: RuntimeOptions::new(&options),
            workers: match options.recovery_threads {
                0 if options.serial => Workers::alone(),
                0 => Workers::available(),
                n => Workers::always(n),
            },
            rates: AtomicBool::new(false),
            serving: AtomicBool::new(false),
            quotas: Quotas::default(),
            replays: false,
            recovering: AtomicBool::new(true),
            options,
        }
    }
    /// Notes that a domain has limits, where it has.
    pub fn note_limits(&self, budget: &Budget) {
        if budget.is_on() || budget.is_timed() {
            self.rates.store(true, Ordering::Relaxed);
        }
        if budget.is_timed() {
            self.serving.store(true, Ordering::Relaxed);
        }
    }

    /// Charges what this thread does to the tenant of a domain, where any tenant's time is limited, until the value is
    /// dropped; a domain without a limit pays nothing, and neither does who paid before.
    #[inline]
    pub fn spend(&self, budget: &Arc<Budget>) -> Option<Spending> {
        self.serving.load(Ordering::Relaxed).then(|| Spending::begin(budget, false))
    }

    /// Free blocks of groups that no domain owns, on these devices.
    pub fn unclaimed_on(&self, devices: DeviceSet) -> u64 {
        if devices.is_all() {
            return self.unclaimed.load(Ordering::Relaxed);
        }
        devices.numbers().map(|n| self.unclaimed_of[n].load(Ordering::Relaxed)).sum()
    }

    /// Notes when groups that are left alone after an error are to be tried again; `None` where there are none.
    pub fn note_tried_again(&self, at: Option<Instant>) {
        let ms = |at: Instant| at.saturating_duration_since(self.begun).as_millis() as u64;
        self.tried_again.store(at.map_or(NEVER, ms), Ordering::Relaxed);
    }

    /// Whether the time of [`Self::note_tried_again`] has come, to the millisecond. Asks for no time where there is none.
    pub fn has_come(&self) -> bool {
        let at = self.tried_again.load(Ordering::Relaxed);
        at != NEVER && self.begun.elapsed().as_millis() as u64 > at
    }

    /// The logical time at which inodes take and leave names of the directories `dirs`, which the caller has locked.
    /// `than`: the latest such time of these inodes.
    ///
    /// Recovery and the checker compare these times of two inodes that both claim a name, in whatever state a crash left
    /// each: the later one has it (`braid::rules::holder_keeps`). So what must hold is that *all times of an inode
    /// while it has a name lie above those of all who had the name before it*. As long as an inode has a name its time
    /// never falls (`than`). Who takes a name has it later than who left it, since both do so in the directory, whose
    /// time is raised to theirs; names of different directories are never compared (Lamport's clock, its processes being
    /// directories and inodes, instead of one word that all threads write). A directory's time is known in memory only:
    /// where it leaves, [`Self::forget_name_time`] keeps a bound for all of these. What is of an earlier mount was made to agree
    /// by recovery, and raises the clock by `than` where somebody takes a name from it.
    ///
    /// Near the time of day, so that a person can read it.
    pub fn name_time(&self, dirs: &mut [&mut State], than: u64) -> u64 {
        let before = dirs.iter_mut().filter_map(|d| d.dir()).map(|d| d.name_time).max().unwrap_or(0);
        let time = self.name_time_after(before, than);
        for d in dirs.iter_mut().filter_map(|d| d.dir()) {
            if !planted(Bug::ClockNotRaised) {
                d.name_time = time;
            }
        }
        time
    }
    /// [`Self::name_time`] of names of a bucket, by who has the directory locked for reading: names of two buckets are
    /// never compared either.
    pub fn name_time_beside(&self, dir: &DirBody, bucket: &mut OpenBucket<'_>, than: u64) -> u64 {
        let last = bucket.name_time();
        let time = self.name_time_after(dir.name_time.max(*last), than);
        if !planted(Bug::ClockNotRaised) {
            *last = time;
        }
        time
    }
    /// A name changed in a directory that several threads change.
    pub fn count_beside(&self) {
        if self.options.share_dirs {
            self.changed_beside.fetch_add(1, Ordering::Relaxed);
        }
    }
    /// A name of the directory is taken or left at `time`, which [`Self::name_time_beside`] gave.
    pub fn raise_name_time(&self, dir: &mut State, time: u64) {
        if let Some(d) = dir.dir()
            && !planted(Bug::ClockNotRaised)
        {
            d.name_time = d.name_time.max(time);
        }
    }
    /// A logical time behind `before`, `than`, which a record may say, and what directories know that are not in memory.
    fn name_time_after(&self, before: u64, than: u64) -> u64 {
        let now = self.now();
        // a clock that was never set may stand before 1970, or behind what 64 bits hold
        let now = now.sec.clamp(0, i64::from(u32::MAX)) as u64 * 1_000_000_000 + u64::from(now.nsec);
        let before = before.max(than.min(LATEST)).max(self.names_before.load(Ordering::Relaxed));
        now.max(before + 1)
    }
    /// A directory with names taken or left at `time` the latest leaves memory, and nobody can find it any more there.
    pub fn forget_name_time(&self, time: u64) {
        let time = time.min(LATEST);
        if self.names_before.load(Ordering::Relaxed) < time {
            self.names_before.fetch_max(time, Ordering::Relaxed);
        }
    }
    /// Time of day.
    pub fn now(&self) -> Timestamp {
        if let Some(f) = self.options.clock {
            return f();
        }
        clock::now()
    }
    /// The seconds of [`Self::now`].
    pub fn second(&self) -> i64 {
        self.options.clock.map_or_else(clock::second, |f| f().sec)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::FromZeros;

    /// The clock stands still: what comes later is later by the rule alone.
    #[test]
    fn who_takes_a_name_has_it_later_than_who_left_it() {
        let clock: fn() -> Timestamp = || Timestamp { sec: 1, nsec: 0 };
        const NOW: u64 = 1_000_000_000;
        let shared =
            Shared::new(MountOptions { clock: Some(clock), ..MountOptions::default() }, &SuperBlock::new_zeroed());
        let dir = || State::fresh(FileKind::Dir, 0o755, 0, 0, clock());
        let (mut a, mut b) = (dir(), dir());
        // made, then moved within `a`, then taken away: by one inode
        let made = shared.name_time(&mut [&mut a], 0);
        let moved = shared.name_time(&mut [&mut a], made);
        let left = shared.name_time(&mut [&mut a], moved);
        assert!(NOW <= made && made < moved && moved < left);
        // another one takes the name, which knows nothing of the first
        let taken = shared.name_time(&mut [&mut a], 0);
        assert!(taken > left);
        // one that was made in the future, on a clock that was set back, and names of two directories
        let far = shared.name_time(&mut [&mut a, &mut b], 7 * NOW);
        assert!(far > 7 * NOW);
        assert!(shared.name_time(&mut [&mut a], 0) > far);
        let last = shared.name_time(&mut [&mut b], 0);
        assert!(last > far);
        // the directory leaves memory and comes back
        shared.forget_name_time(last);
        let mut b = dir();
        assert!(shared.name_time(&mut [&mut b], 0) > last);
        // an earlier one that leaves changes nothing
        shared.forget_name_time(NOW);
        assert!(shared.name_time(&mut [&mut dir()], 0) > last);
    }

    /// A clock that was never set, one that was set to a far future, and what an image says that nobody of us wrote.
    #[test]
    fn no_clock_stands_still() {
        const CLOCKS: [fn() -> Timestamp; 2] =
            [|| Timestamp { sec: -1, nsec: 999_999_999 }, || Timestamp { sec: i64::MAX, nsec: 0 }];
        for clock in CLOCKS {
            let options = MountOptions { clock: Some(clock), ..MountOptions::default() };
            let shared = Shared::new(options, &SuperBlock::new_zeroed());
            let mut a = State::fresh(FileKind::Dir, 0o755, 0, 0, clock());
            shared.forget_name_time(u64::MAX - 7);
            let mut last = 0;
            for than in [0, u64::MAX, 0, u64::MAX - 1, 0] {
                let time = shared.name_time(&mut [&mut a], than);
                assert!(last < time, "{last:#x} {time:#x}");
                last = time;
            }
        }
    }
}
