//! Random runs of several threads at a time, with a schedule from the seed.
//!
//! Each thread works in a directory of its own, and under names of its own in one that all share; syncs concern all. So its
//! operations have one right answer each, whatever the others do. The threads run under `braidfs_sync::schedule`: one at a
//! time, changing at locks of the engine and at the device, so that an operation stops in the middle and others, commits
//! and checkpoints of theirs go on; and the same seed gives the same run.
//!
//! [`Threads`] says it all: the volume, the operations of each thread, the schedule. So it can be made short
//! ([`super::minimise_threads`]) and printed.
//!
//! Operations are put in the order in which they returned. A crash finds those done that had returned by then, and of each
//! thread at most one under way, of which it may leave the state before or after. A sync promises what had returned before
//! it began.

use super::check::{Checker, Failure, Level, times};
use super::explore::{Limits, at_most};
use super::workload::{Base, Kind, many_names};
use crate::generate::{Generator, Profile};
use crate::history::{History, Synced};
use crate::model::{Ino, Model};
use crate::ops::{At, Op, Out, P, Slots, is_refused, perform, same_answer, to_rust, walk_path};
use crate::oracle::Oracle;
use crate::run::{BESIDE, Did, PRESSED, Runner, Setup, both_refuse, guarded, is_guarded, mount, set_clock};
use crate::states::Log;
use crate::subject::{Key, OnVolume};
use crate::walk::walk;
use braidfs::{DomainId, Error, FileKind, RenameMode, Result as FsResult, Volume};
use braidfs_device::{Device, Parted, RecordDevice, WriteOp};
use braidfs_sync::schedule;
use std::cell::OnceCell;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// Threads of a run.
pub const THREADS: usize = 4;
/// The directory that all share.
const SHARED: P = P("shared");
/// Names of a thread in it.
const NAMES: usize = 3;
/// Names of a thread in such a directory.
const NAMES_BESIDE: usize = 8;

/// A recording device at which another thread may go on.
#[derive(Debug)]
pub struct Switching(pub Arc<RecordDevice>);

impl Device for Switching {
    fn blocks(&self) -> u64 {
        self.0.blocks()
    }
    fn read(&self, block: u64, buf: &mut [u8]) -> io::Result<()> {
        schedule::point();
        self.0.read(block, buf)
    }
    fn write_batch(&self, ops: &[WriteOp<'_>]) -> io::Result<()> {
        for op in ops {
            schedule::point();
            self.0.write_batch(std::slice::from_ref(op))?;
        }
        schedule::point();
        Ok(())
    }
    fn flush(&self) -> io::Result<()> {
        self.flush_part(0..self.blocks())
    }
    fn discard(&self, block: u64, blocks: u64) -> io::Result<()> {
        schedule::point();
        self.0.discard(block, blocks)
    }
    fn name(&self) -> String {
        self.0.name()
    }
}

impl Parted for Switching {
    fn flush_part(&self, blocks: Range<u64>) -> io::Result<()> {
        schedule::point();
        // what others write meanwhile it does not cover
        self.0.flush_part_while(blocks, &|| (0..4).for_each(|_| schedule::point()))?;
        schedule::point();
        Ok(())
    }
}

fn own(thread: usize) -> P {
    P::new(&format!("t{thread}"))
}

/// What several threads do, and how they take turns.
#[derive(Clone, Debug, PartialEq)]
pub struct Threads {
    /// The seed of the volume's options.
    pub volume: u64,
    /// The seed that says which thread goes on where.
    pub schedule: u64,
    /// What each thread does. Each must work under names of its own: `t0`, `t0/…`, `shared/0-…` for one of them, with
    /// another digit below [`THREADS`] for each other.
    pub lists: Vec<Vec<Op>>,
}

impl Threads {
    /// [`THREADS`] threads with `count` random operations between them.
    pub fn random(base: &Base, seed: u64, count: usize) -> Self {
        let lists = (0..THREADS).map(|t| ops_of(base, seed, t, count / THREADS)).collect();
        Self { volume: seed, schedule: seed, lists }
    }

    /// Operations of all threads.
    pub fn count(&self) -> usize {
        self.lists.iter().map(Vec::len).sum()
    }
}

/// The volume to begin with: its options from the seed, the directories made.
///
/// # Errors
/// Of any operation.
pub fn base(seed: u64) -> Result<Base, String> {
    set_clock(0);
    let mut setup = Setup::vary(seed);
    if seed & PRESSED != 0 {
        setup.cache = 1;
    }
    if seed & BESIDE != 0 {
        setup.share_dirs = true;
        setup.mkfs.domains = Some(2 + (seed % 3) as u16);
        // domains commit inside operations now and then
        setup.mkfs.journal_bytes = Some(if seed.is_multiple_of(2) { 128 << 10 } else { 512 << 10 });
    }
    let mut r = Runner::empty(&setup)?;
    for path in (0..THREADS).map(own).chain([SHARED]) {
        r.apply(&Op::Create { path, kind: FileKind::Dir, mode: 0o755 })?;
    }
    if setup.share_dirs {
        many_names(SHARED).iter().try_for_each(|op| r.apply(op))?;
    }
    r.apply(&Op::Sync)?;
    if setup.share_dirs {
        // as long as entries may be stale all changes have the directory for themselves
        r.close()?;
    }
    let base = Base::of(&r, Kind::ALL[0]);
    r.abandon();
    Ok(base)
}

/// What a thread does in the shared directory, and between it and its own.
fn shared_op(rng: &mut fastrand::Rng, model: &Model, (thread, names): (usize, usize), seed: u32) -> Op {
    let beside = |n: usize| SHARED.join(&format!("{thread}-{n}-{}", "y".repeat(190)));
    let name = |n: usize| if names > NAMES { beside(n) } else { SHARED.join(&format!("{thread}-{n}")) };
    let home = |n: usize| own(thread).join(&format!("m{n}"));
    let (path, kept) = (name(rng.usize(..names)), home(rng.usize(..names)));
    let dir = |p: P| walk_path(&mut model.clone(), p).ok().and_then(|i| model.node(i)).map(|n| n.kind);
    let is_dir = dir(kept) == Some(FileKind::Dir);
    let rename = |rng: &mut fastrand::Rng, from, to| {
        let mode = match rng.u8(..8) {
            0 => RenameMode::NoReplace,
            1 => RenameMode::Exchange,
            2 => RenameMode::Whiteout,
            3 => RenameMode::NoReplaceWhiteout,
            _ => RenameMode::Replace,
        };
        Op::Rename { from, to, mode }
    };
    match rng.u8(..12) {
        0..3 => Op::Create { path, kind: FileKind::File, mode: 0o644 },
        3 => Op::Unlink { path },
        4 if !is_dir => rename(rng, kept, path),
        5 if !is_dir => rename(rng, path, kept),
        6 => Op::Link { from: path, to: kept },
        7 => Op::Link { from: kept, to: path },
        8 => Op::Fsync { at: At::Path(SHARED), data_only: false },
        9 => Op::Fsync { at: At::Path(path), data_only: rng.bool() },
        _ => Op::Append { at: At::Path(path), len: rng.u32(1..6000), seed },
    }
}

/// The operations of one thread: they mean the same whatever the others do.
fn ops_of(base: &Base, seed: u64, thread: usize, count: usize) -> Vec<Op> {
    let seed = seed.wrapping_mul(31).wrapping_add(thread as u64);
    let beside = base.setup.share_dirs;
    let (names, one_in) = if beside { (NAMES_BESIDE, 2) } else { (NAMES, 5) };
    let mut rng = fastrand::Rng::with_seed(!seed);
    // each in half of the threads, so that there are runs with each and without
    let profile = Profile {
        objects: 25,
        file_bytes: 60_000,
        // of all that is done each sync of everything is a smaller part where others come in threes
        syncs: 120,
        commits: if rng.bool() { 20 } else { 0 },
        flags: rng.bool(),
        whiteouts: rng.bool(),
        rewrites: rng.bool(),
        write_back: rng.bool(),
        ..Profile::default()
    };
    let mut generator = Generator::new(seed, profile);
    generator.top = own(thread);
    let (mut model, mut slots): (_, Slots<Model>) = (base.model.clone(), Default::default());
    let mut ops = Vec::new();
    while ops.len() < count {
        let op = if beside && rng.u8(..20) == 0 {
            let path = [own(thread), SHARED][rng.usize(..2)];
            Op::Commit { path, checkpoint: rng.bool() }
        } else if rng.u8(..one_in) == 0 {
            shared_op(&mut rng, &model, (thread, names), (seed as u32) << 20 | ops.len() as u32 | 1 << 19)
        } else {
            generator.next(&model)
        };
        if !undefined(&op, &model, &slots) {
            // what it answers is compared when it is done on the volume
            let _ = perform(&mut model, &mut slots, &op);
            ops.push(op);
        }
    }
    ops
}

/// Whether no one answer is the right one (a seek has many), or no front end lets it through.
fn undefined(op: &Op, model: &Model, slots: &Slots<Model>) -> bool {
    matches!(op, Op::Seek { .. }) || is_refused(op, model, slots)
}

/// The operations but those that are undefined, which they may be after others were taken out.
pub(super) fn defined(base: &Base, ops: &[Op]) -> Vec<Op> {
    let (mut model, mut slots): (_, Slots<Model>) = (base.model.clone(), Default::default());
    let mut out = Vec::new();
    for op in ops {
        if !undefined(op, &model, &slots) {
            let _ = perform(&mut model, &mut slots, op);
            out.push(op.clone());
        }
    }
    out
}

/// An operation that was done.
#[derive(Debug)]
struct Done {
    thread: usize,
    op: Op,
    /// Operations that had returned when it began.
    after: usize,
    /// The length of the log when it began, and when it returned.
    log: (usize, usize),
    got: FsResult<Out<Key>>,
}

/// The slots of all threads.
type AllSlots = Vec<Slots<Model>>;

/// One that changes the model, as it was put in order.
#[derive(Debug)]
struct Placed {
    done: Done,
    /// How many steps it had behind it when it began.
    covers: usize,
    /// The slots after it.
    slots: AllSlots,
    made: Option<(Ino, Key, DomainId)>,
}

/// A run of several threads, as it was recorded.
#[derive(Debug)]
pub struct Run {
    /// What was written.
    pub log: Log,
    history: History,
    placed: Vec<Placed>,
    /// The length of the log when each operation began, by thread.
    pub begun: Vec<Vec<usize>>,
    /// Names changed with their directory locked for reading.
    pub beside: u64,
    /// Blocks moved to make files whole.
    pub moved: u64,
    /// What else was done.
    pub did: Did,
}

/// Runs the threads; what was done, in the order of returns.
fn threads(vol: &Volume, device: &RecordDevice, lists: &[Vec<Op>], seed: u64) -> Vec<Done> {
    let done: Mutex<Vec<Done>> = Mutex::default();
    let body = |(thread, ops): (usize, &'_ Vec<Op>)| {
        let (done, ops) = (&done, ops.clone());
        Box::new(move || {
            set_clock(times::WORKLOAD + 200_000 * thread as i64);
            let mut slots: Slots<OnVolume<'_>> = Default::default();
            for op in ops {
                let count = || done.lock().unwrap_or_else(PoisonError::into_inner).len();
                let (after, begin) = (count(), device.log_len());
                let got = perform(&mut OnVolume::among_others(vol), &mut slots, &op);
                let log = (begin, device.log_len());
                done.lock().unwrap_or_else(PoisonError::into_inner).push(Done { thread, op, after, log, got });
                schedule::point();
            }
        }) as schedule::Body<'_, ()>
    };
    schedule::run(seed, lists.iter().enumerate().map(body).collect());
    done.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// Runs the threads and compares every answer, and the tree at the end, with the model.
///
/// # Errors
/// How they differ.
pub fn recorded(base: &Base, workload: &Threads) -> Result<Run, String> {
    set_clock(times::WORKLOAD);
    let device = Arc::new(RecordDevice::new(base.image.clone()));
    let vol = mount(&base.setup.devices(&Arc::new(Switching(device.clone()))), &base.setup)?;
    let lists: Vec<Vec<Op>> = workload.lists.iter().map(|ops| defined(base, ops)).collect();
    let all = guarded(|| threads(&vol, &device, &lists, workload.schedule))?;
    let mut begun = vec![Vec::new(); lists.len()];
    all.iter().for_each(|d| begun[d.thread].push(d.log.0));
    let mut history = History::new(base.model.clone(), base.keys.clone(), &base.setup);
    let domain = |k: &Key| vol.domain_of(k.0).map_err(|e| format!("{k:?}: {e}"));
    for (ino, key) in &base.keys {
        history.domains.insert(*ino, domain(key)?);
    }
    let (mut model, mut slots): (_, AllSlots) = (base.model.clone(), vec![Default::default(); lists.len()]);
    let (mut placed, mut did): (Vec<Placed>, _) = (Vec::new(), Did::default());
    // how many steps there were when so many operations had returned
    let mut steps = vec![0];
    for done in all {
        if matches!(done.got, Err(Error::NoSpace)) {
            // these volumes have room for all that the threads do
            return Err(format!("thread {}: no space for {}", done.thread, to_rust(&done.op)));
        }
        let guarded = is_guarded(&mut model, &slots[done.thread], &done.op);
        let want = perform(&mut model, &mut slots[done.thread], &done.op);
        let alike = same_answer(&done.got, &want) || (guarded && both_refuse(&done.got, &want));
        if !alike {
            let op = to_rust(&done.op);
            return Err(format!("thread {}: {op}: volume {:.400?}, model {want:.400?}", done.thread, done.got));
        }
        if let Ok(out) = &done.got {
            did.note(&done.op, out);
        }
        let made = match (&done.got, want) {
            (Ok(Out::Made(key)), Ok(Out::Made(ino))) => Some((ino, *key, domain(key)?)),
            _ => None,
        };
        if let Some((ino, key, domain)) = made {
            if history.keys.values().any(|k| *k == key) {
                return Err(format!("{}: {key:?} is (or was) another inode's", to_rust(&done.op)));
            }
            history.add(ino, key, domain);
        }
        let sync = if done.got.is_ok() { Synced::by(&done.op, &model, &slots[done.thread]) } else { None };
        let covers = steps[done.after];
        history.push_overlapping((done.thread, &done.op), &model, done.log.1, sync, covers);
        placed.push(Placed { done, covers, slots: slots.clone(), made });
        steps.push(placed.len());
    }
    let seen = guarded(|| walk(&vol))??;
    seen.compare(&model, &history.keys).map_err(|e| format!("at the end: {e}"))?;
    let log = Log::of(&device);
    let (beside, moved) = (vol.changed_beside(), super::explore::moved(&vol));
    vol.crash();
    Ok(Run { log, history, placed, begun, beside, moved, did })
}

impl Run {
    /// What a crash after `upto` events is held against: the steps done by then and those under way, one per thread at
    /// most; and how many were done.
    fn at(&self, base: &Base, upto: usize) -> (History, usize) {
        let completed = self.placed.partition_point(|p| p.done.log.1 <= upto);
        let mut h = self.history.first(completed);
        h.keys = base.keys.clone();
        h.domains.retain(|i, _| base.keys.contains_key(i));
        for (ino, key, domain) in self.placed[..completed].iter().filter_map(|p| p.made) {
            h.add(ino, key, domain);
        }
        let mut model = h.version(completed).clone();
        let mut slots = completed
            .checked_sub(1)
            .map_or_else(|| vec![Default::default(); self.begun.len()], |i| self.placed[i].slots.clone());
        for p in self.placed[completed..].iter().filter(|p| p.done.log.0 <= upto) {
            let d = &p.done;
            if p.covers > completed {
                continue; // it began when others had returned that have not yet
            }
            if let (Ok(Out::Made(ino)), Some((_, key, domain))) =
                (perform(&mut model, &mut slots[d.thread], &d.op), p.made)
            {
                h.add(ino, key, domain);
            }
            // it promises nothing, but may have overwritten blocks
            let sync = Synced::by(&d.op, &model, &slots[d.thread]);
            h.push_overlapping((d.thread, &d.op), &model, d.log.1, sync, completed);
        }
        (h, completed)
    }
}

impl Run {
    /// The lengths of the log at which a crash makes a difference.
    pub fn points(&self) -> Vec<usize> {
        self.log.points(0, self.history.steps().iter().map(|s| s.log))
    }

    /// Judges crashes at `points` (rising).
    ///
    /// # Errors
    /// The first that is not as it must be.
    pub fn check(&self, base: &Base, checker: &mut Checker<'_>, points: &[usize]) -> Result<(), Failure> {
        if points.is_empty() {
            return Ok(());
        }
        let histories: Vec<(History, usize)> = points.iter().map(|p| self.at(base, *p)).collect();
        let oracles: Vec<OnceCell<Oracle<'_>>> = points.iter().map(|_| OnceCell::new()).collect();
        let judge = |upto: usize| {
            let i = points.partition_point(|p| *p < upto).min(points.len() - 1);
            let (history, completed) = &histories[i];
            oracles[i].get_or_init(|| Oracle::with_under_way(history, *completed))
        };
        checker.check(&self.log, points, &Level { judge: &judge, expect: None })
    }

    /// Calls `f` with the judge of crashes at one point.
    pub fn judged<T>(&self, base: &Base, upto: usize, f: impl FnOnce(&Oracle<'_>) -> T) -> T {
        let (history, completed) = self.at(base, upto);
        f(&Oracle::with_under_way(&history, completed))
    }
}

/// Runs the workload of a seed and judges crashes of it at some points.
///
/// # Errors
/// The first that is not as it must be, or a difference between volume and model.
pub fn run(
    seed: u64,
    limits: &Limits,
    stop: &dyn Fn() -> bool,
    counts: &mut super::check::Counts,
) -> Result<(), Failure> {
    let fail = |why| Failure { crash: None, why };
    let base = base(seed).map_err(fail)?;
    let run = recorded(&base, &Threads::random(&base, seed, limits.random_ops)).map_err(fail)?;
    let mut checker = Checker::new(&base.setup, limits.random, seed, stop);
    let points = at_most(run.points(), limits.random_points, &mut fastrand::Rng::with_seed(!seed));
    let result = run.check(&base, &mut checker, &points);
    *counts = checker.counts;
    counts.of_workload(run.beside, run.moved, run.did);
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use braidfs_device::Event;

    #[test]
    fn the_seed_gives_the_run() {
        let base = base(3).unwrap();
        let runs: Vec<Run> = (0..2).map(|_| recorded(&base, &Threads::random(&base, 3, 120)).unwrap()).collect();
        let order = |r: &Run| r.placed.iter().map(|p| (p.done.thread, p.done.log)).collect::<Vec<_>>();
        assert_eq!(order(&runs[0]), order(&runs[1]));
        let event = |e: &Event| match e {
            Event::Write { block, data, .. } => (*block, data.to_vec()),
            Event::Discard { block, blocks, .. } => (*block, blocks.to_le_bytes().to_vec()),
            Event::Flush { covers, .. } => (u64::MAX, covers.to_le_bytes().to_vec()),
        };
        assert_eq!(runs[0].log.events.len(), runs[1].log.events.len());
        for (i, (a, b)) in runs[0].log.events.iter().zip(&runs[1].log.events).enumerate() {
            let ((at, a), (bt, b)) = (event(a), event(b));
            let differ = a.iter().zip(&b).position(|(a, b)| a != b);
            assert_eq!((at, a.len(), None), (bt, b.len(), differ), "event {i} {:02x?}", &a[..64.min(a.len())]);
        }
        // they do overlap
        let overlapping = runs[0].placed.iter().enumerate().filter(|(i, p)| p.covers < *i).count();
        assert!(overlapping > 20, "{overlapping}");
        let in_sync = runs[0].placed.iter().enumerate();
        let in_sync =
            in_sync.filter(|(i, p)| matches!(p.done.op, Op::Sync | Op::Fsync { .. }) && p.covers < *i).count();
        assert!(in_sync > 3, "{in_sync}");
    }
}
