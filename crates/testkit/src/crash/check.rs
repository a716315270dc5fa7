//! Judges the crashes of one log: makes the images, recovers them, compares with what the contract allows.
//!
//! Every crash image is *decided*: recovered and judged itself, or found to hold the same bytes as one that was, wherever
//! that one's recovery and the walk after it looked ([`super::tree`]). Of each kind of recovery so found the first may be
//! looked at *deeply* (the volume is used, unmounted, checked with fsck and mounted again; and fsck looks at the crash state, which is
//! mounted behind it) and may be crashed itself, at each of its writes. [`Counts`] keeps these apart.

use super::tree::ReadTree;
use crate::late::{Durable, ImageHash, Late};
use crate::oracle::{NOT_ALLOWED, Oracle};
use crate::quota;
use crate::run::{Did, Setup, guarded, mount, set_clock};
use crate::states::{Budget, CrashState, Log, each};
use crate::walk::{Seen, fsck, is_of_a_copy, repair, walk};
use braidfs::format::inode::{APPEND, IMMUTABLE};
use braidfs::{Cred, FileKind, InodeNo, NewNode, SetAttr, Volume};
use braidfs_device::{Device, TraceDevice};
use foldhash::HashSet;
use std::hash::BuildHasher;
use std::sync::Arc;

/// Readings of the test clock at which things begin, so that they are the same each time and in the right order.
pub mod times {
    /// When a workload begins.
    pub const WORKLOAD: i64 = 1_000_000;
    /// When a recovery begins.
    pub const RECOVERY: i64 = 2_000_000;
    /// The recovery after a crash of a recovery.
    pub const SECOND: i64 = 3_000_000;
}

/// How thoroughly a workload is crashed.
#[derive(Clone, Copy, Debug)]
pub struct Depth {
    /// Crashes of each point.
    pub budget: Budget,
    /// Crashes of each point of a recovery; no samples and no subsets: recoveries are not crashed.
    pub second: Budget,
    /// Of the kinds of recovery found, every so manieth is looked at deeply (0: none); of those after a crash of one a
    /// quarter of that.
    pub deep_every: u64,
    /// Of the kinds of recovery found, every so manieth is crashed itself (0: none).
    pub second_every: u64,
    /// Of the kinds of recovery found, every so manieth is run again by several threads, deeply, compared, and crashed itself
    /// where `second_every` is not 0 (0: none).
    pub threads_every: u64,
    /// Of the images that only agree with one that was recovered, every so manieth is recovered all the same, deeply,
    /// and compared (0: none).
    pub recheck_every: u64,
    /// Go on after a failure, and count the images that fail.
    pub count_failures: bool,
}

/// Flags of what cannot become longer.
const GUARDED: u32 = IMMUTABLE | APPEND;
/// Bytes behind the end of a file that are looked at.
const BEHIND: usize = 3 * 4096;

/// Threads of a recovery that is run again by several.
const THREADS: usize = 3;

/// What was done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Counts {
    /// Different images that crashes of workloads left, each decided.
    pub images: u64,
    /// Of `second` too: crashes that left an image that there was before.
    pub duplicates: u64,
    /// Recoveries run and judged for them.
    pub recoveries: u64,
    /// Of these, such as were decided already and run to compare.
    pub rechecked: u64,
    /// Recoveries after which the volume was used, unmounted, checked and mounted again; and the crash state, with an fsck
    /// before the mount, once more.
    pub deep: u64,
    /// Recoveries that were crashed themselves; and an fsck of the same crash state.
    pub crashed: u64,
    /// Different images that these crashes left, each decided.
    pub second_images: u64,
    /// Recoveries run and judged for them.
    pub second_recoveries: u64,
    /// Recoveries run again by several threads, and compared.
    #[serde(default)]
    pub threaded: u64,
    /// Different images that crashes of these left, each decided; in `second_images`, too.
    #[serde(default)]
    pub threaded_images: u64,
    /// Different images that crashes of an fsck of a crash state left, each decided; in `second_images`, too.
    #[serde(default)]
    pub checked_images: u64,
    /// Recoveries that did not depend on what they read alone. Always 0, else the figures mean less.
    pub strays: u64,
    /// Images that are not as they must be.
    pub failing: u64,
    /// Names that workloads changed with the directory locked for reading ([`braidfs::Volume::changed_beside`]).
    #[serde(default)]
    pub changed_beside: u64,
    /// Crash states of workloads that did so.
    #[serde(default)]
    pub states_beside: u64,
    /// Blocks that workloads moved so that their files lie in fewer pieces.
    #[serde(default)]
    pub moved: u64,
    /// Crash states of workloads that did so.
    #[serde(default)]
    pub states_moved: u64,
    /// Inodes that changed since everything was synced and were judged with the others of their domain: each once for each
    /// tree that was judged.
    #[serde(default)]
    pub together: u64,
    /// What else workloads did, by kind.
    #[serde(default)]
    pub did: Did,
}

impl Counts {
    /// Adds the counts of another run.
    pub fn add(&mut self, o: &Counts) {
        self.images += o.images;
        self.duplicates += o.duplicates;
        self.recoveries += o.recoveries;
        self.rechecked += o.rechecked;
        self.deep += o.deep;
        self.crashed += o.crashed;
        self.second_images += o.second_images;
        self.second_recoveries += o.second_recoveries;
        self.threaded += o.threaded;
        self.threaded_images += o.threaded_images;
        self.checked_images += o.checked_images;
        self.strays += o.strays;
        self.failing += o.failing;
        self.changed_beside += o.changed_beside;
        self.states_beside += o.states_beside;
        self.moved += o.moved;
        self.states_moved += o.states_moved;
        self.together += o.together;
        self.did.add(&o.did);
    }

    /// These are of a workload that changed `beside` names with their directory locked for reading, moved so many blocks, and
    /// did this.
    pub fn of_workload(&mut self, beside: u64, moved: u64, did: Did) {
        let where_any = |n: u64| if n > 0 { self.states() } else { 0 };
        (self.states_beside, self.states_moved) = (where_any(beside), where_any(moved));
        (self.changed_beside, self.moved, self.did) = (beside, moved, did);
    }

    /// All crash states decided: of workloads and of recoveries.
    pub fn states(&self) -> u64 {
        self.images + self.second_images
    }
}

/// A crash, and perhaps one of the recovery after it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Crash {
    /// Of the workload.
    pub first: CrashState,
    /// Of the recovery.
    pub second: Option<CrashState>,
}

/// Something that is not as it must be.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The crash; none where the workload itself failed.
    pub crash: Option<Crash>,
    /// What is wrong.
    pub why: String,
}

/// Who saw that something is not as it must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Class {
    /// The workload itself, before any crash: a panic, an error, or an answer that is not the model's.
    Live,
    /// A panic in a recovery, or in what followed.
    Panic,
    /// The judge of the contract.
    Contract,
    /// A comparison of two recoveries of one crash state, or of a recovery and the mount behind it.
    Same,
    /// fsck.
    Fsck,
    /// The mount.
    Mount,
    /// Who reads or uses the recovered volume.
    Use,
}

impl Class {
    /// A word or two for tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Live => "the workload",
            Self::Panic => "a panic",
            Self::Contract => "the judge",
            Self::Same => "a comparison",
            Self::Fsck => "fsck",
            Self::Mount => "the mount",
            Self::Use => "use",
        }
    }
}

impl Failure {
    /// Who saw it.
    pub fn class(&self) -> Class {
        let says = |text| self.why.contains(text);
        match () {
            () if self.crash.is_none() => Class::Live,
            () if says("panic: ") => Class::Panic,
            () if says(NOT_ALLOWED) => Class::Contract,
            () if says("something else") => Class::Same,
            () if says("fsck") => Class::Fsck,
            () if says("mount: ") => Class::Mount,
            () => Class::Use,
        }
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.crash {
            Some(Crash { first, second: None }) => write!(f, "{first}\n  {}", self.why),
            Some(Crash { first, second: Some(s) }) => write!(f, "{first}; of the recovery: {s}\n  {}", self.why),
            None => f.write_str(&self.why),
        }
    }
}

/// What a recovered tree is held against.
pub struct Level<'a> {
    /// The contract, by the length of the log.
    pub judge: &'a dyn Fn(usize) -> &'a Oracle<'a>,
    /// Of a recovery that was crashed: what it would have shown.
    pub expect: Option<&'a Seen>,
}

/// Compares what two recoveries of the same crash show.
///
/// # Errors
/// The first difference.
pub fn same_tree(a: &Seen, b: &Seen) -> Result<(), String> {
    if a.nodes.len() != b.nodes.len() {
        return Err(format!("{} objects, then {}", a.nodes.len(), b.nodes.len()));
    }
    for (key, x) in &a.nodes {
        let Some(y) = b.nodes.get(key) else { return Err(format!("{} is gone", a.path(*key))) };
        let mut y = y.clone();
        // Relinking a lost entry may touch its directory.
        if x.stat.kind == FileKind::Dir {
            (y.times.mtime, y.times.ctime, y.sectors) = (x.times.mtime, x.times.ctime, x.sectors);
        }
        if *x != y {
            let times = x.times.differ(y.times).unwrap_or_default();
            let sectors = (x.sectors, y.sectors);
            return Err(format!("{}: {:?}, then {:?} {times} sectors {sectors:?}", a.path(*key), x.stat, y.stat));
        }
    }
    Ok(())
}

/// Behind the end of a file there are zeros, whatever its blocks held before.
fn nothing_behind_the_end(vol: &Volume, seen: &Seen) -> Result<(), String> {
    let files = seen.nodes.iter().filter(|(_, n)| n.stat.kind == FileKind::File && n.stat.flags & GUARDED == 0);
    for (key, n) in files {
        let (ino, end) = (key.0, n.stat.size);
        let fail = |e| format!("{} becomes longer: {e}", seen.path(*key));
        vol.setattr(ino, &SetAttr { size: Some(end + BEHIND as u64), ..SetAttr::default() }).map_err(fail)?;
        let mut buf = [1; BEHIND];
        let got = vol.open(ino).and_then(|f| vol.read(&f, end, &mut buf)).map_err(fail)?;
        if got != BEHIND || buf != [0; BEHIND] {
            return Err(format!("{}: behind its {end} bytes are others than zeros", seen.path(*key)));
        }
    }
    Ok(())
}

/// A recovered volume must do work like any other.
fn use_it(vol: &Volume) -> braidfs::Result<()> {
    let new = NewNode { kind: FileKind::File, mode: 0o600, umask: 0, rdev: 0, target: b"" };
    let a = vol.create(InodeNo::ROOT, b"after-the-crash", &new, &Cred::root())?;
    let f = vol.open(a.ino)?;
    vol.write(&f, 0, &[7; 5000])?;
    vol.fsync(a.ino, false)?;
    vol.unlink(InodeNo::ROOT, b"after-the-crash")
}

/// Uses, unmounts, checks and mounts again a volume that recovery gave.
fn deep(vol: Volume, devices: &[Arc<dyn Device>], setup: &Setup, seen: &Seen, collect: bool) -> Result<(), String> {
    if collect {
        vol.collect_stale().map_err(|e| format!("background GC after recovery: {e}"))?;
    }
    use_it(&vol).map_err(|e| format!("the recovered volume does not work: {e}"))?;
    vol.sync().map_err(|e| format!("sync after recovery: {e}"))?;
    let space = vol.statfs();
    vol.unmount().map_err(|e| format!("unmount after recovery: {e}"))?;
    fsck(devices).map_err(|e| format!("fsck after recovery and unmount: {e}"))?;
    let vol = mount(devices, setup).map_err(|e| format!("second mount: {e}"))?;
    let again = walk(&vol).map_err(|e| format!("after the second mount: {e}"))?;
    quota::holds(&vol, setup).map_err(|e| format!("after the second mount: {e}"))?;
    let counted = vol.statfs();
    nothing_behind_the_end(&vol, &again).map_err(|e| format!("after the second mount: {e}"))?;
    vol.crash();
    if (space.blocks, space.free, space.inodes, space.inodes_free)
        != (counted.blocks, counted.free, counted.inodes, counted.inodes_free)
    {
        return Err(format!("space after recovery {space:?}, after the second mount {counted:?}"));
    }
    same_tree(seen, &again).map_err(|e| format!("the second mount shows something else: {e}"))
}

/// As at a boot: fsck looks at what the crash left, finds nothing but copies that it tore, mends those, and a mount then shows what
/// one without fsck does.
fn fsck_first(devices: &[Arc<dyn Device>], setup: &Setup, seen: &Seen) -> Result<(), String> {
    let found = repair(devices).map_err(|e| format!("fsck before a mount: {e}"))?;
    if let Some((code, why)) = found.iter().find(|(code, _)| !is_of_a_copy(*code)) {
        return Err(format!("fsck of the crash state finds {code}: {why}"));
    }
    fsck(devices).map_err(|e| format!("fsck again: {e}"))?;
    let vol = mount(devices, setup).map_err(|e| format!("mount after fsck: {e}"))?;
    let again = walk(&vol).map_err(|e| format!("after fsck: {e}"))?;
    quota::holds(&vol, setup).map_err(|e| format!("after fsck: {e}"))?;
    vol.crash();
    same_tree(seen, &again).map_err(|e| format!("fsck before the mount shows something else: {e}"))
}

/// What a recovery showed, in 64 bits.
fn digest(seen: &Seen) -> u64 {
    foldhash::quality::FixedState::with_seed(7).hash_one(seen)
}

/// A recovery that was run.
struct Run {
    /// Varying blocks read.
    reads: Vec<u32>,
    /// What it showed, and the [`digest`] of that.
    seen: Result<(Seen, u64), String>,
    /// Writes and flushes until it was mounted.
    mounted: usize,
    device: Arc<TraceDevice>,
}

/// Judges logs. Keeps count over all of them.
pub struct Checker<'a> {
    setup: &'a Setup,
    depth: Depth,
    rng: fastrand::Rng,
    stop: &'a dyn Fn() -> bool,
    /// What was judged so far.
    pub counts: Counts,
    kinds: u64,
    agreeing: u64,
}

/// What recoveries showed ([`digest`]) and was allowed by one judge: it need not judge that again.
type Allowed = HashSet<u64>;

impl<'a> Checker<'a> {
    /// `stop` is asked at every point.
    pub fn new(setup: &'a Setup, depth: Depth, seed: u64, stop: &'a dyn Fn() -> bool) -> Self {
        let rng = fastrand::Rng::with_seed(seed);
        // so that short logs do not all skip the same
        let (kinds, agreeing) = (seed, seed);
        Self { setup, depth, rng, stop, counts: Counts::default(), kinds, agreeing }
    }

    /// Judges crashes at `points` (rising) of a log.
    ///
    /// # Errors
    /// The first crash that is not as it must be; with `count_failures`, after all were judged.
    pub fn check(&mut self, log: &Log, points: &[usize], level: &Level<'_>) -> Result<(), Failure> {
        let mut durable = Durable::new(log);
        let mut images: HashSet<ImageHash> = HashSet::default();
        let mut judged: HashSet<(ImageHash, usize)> = HashSet::default();
        let mut failing: HashSet<ImageHash> = HashSet::default();
        let mut allowed = Allowed::default();
        let mut failure = None;
        if level.expect.is_some() {
            // a crash before the first write of a recovery is the crash that it recovers
            images.insert(0);
            judged.insert((0, 0));
        }
        for &upto in points {
            if (self.stop)() {
                break;
            }
            let judge = (level.judge)(upto);
            if level.expect.is_none() {
                allowed.clear(); // the judge is another one
            }
            let promised = if level.expect.is_some() { 0 } else { judge.completed() };
            let mut late = Late::new(log, upto, &mut durable);
            let (sectors, mut state) = (late.sectors(), Vec::new());
            let mut tree: ReadTree<Result<u64, Arc<str>>> = ReadTree::default();
            let budget = if level.expect.is_some() { self.depth.second } else { self.depth.budget };
            let mut rng = self.rng.fork();
            each(&sectors, &budget, &mut rng, &mut |keep| {
                let image = late.state(keep, &mut state);
                let new = images.insert(image);
                if !judged.insert((image, promised)) {
                    self.counts.duplicates += 1;
                    return true;
                }
                if new && level.expect.is_some() {
                    self.counts.second_images += 1;
                } else if new {
                    self.counts.images += 1;
                }
                let result = match tree.find(&state) {
                    Some(known) => {
                        let known = known.clone();
                        self.agree(&late, &state, judge, level, known)
                    }
                    None => self.kind(&late, &state, judge, level, &mut tree, &mut allowed),
                };
                let Err((second, why)) = result else { return true };
                self.counts.failing += u64::from(failing.insert(image));
                let first = CrashState { upto, keep: keep.to_vec() };
                failure.get_or_insert(Failure { crash: Some(Crash { first, second }), why });
                self.depth.count_failures
            });
            if failure.is_some() && !self.depth.count_failures {
                break;
            }
        }
        failure.map_or(Ok(()), Err)
    }

    /// A state that agrees with one that was recovered, in all that was read.
    fn agree(
        &mut self,
        late: &Late,
        state: &[u32],
        judge: &Oracle<'_>,
        level: &Level<'_>,
        known: Result<u64, Arc<str>>,
    ) -> Result<(), (Option<CrashState>, String)> {
        self.agreeing += 1;
        let due = self.depth.recheck_every > 0 && self.agreeing.is_multiple_of(self.depth.recheck_every);
        let known = match known {
            Ok(known) if due => known,
            other => return other.map(|_| ()).map_err(|e| (None, e.to_string())),
        };
        self.counts.rechecked += 1;
        let run = self.recover(late, state, judge, level, &mut Allowed::default(), true);
        let (_, digest) = run.seen.map_err(|e| (None, e))?;
        self.counts.strays += u64::from(digest != known);
        Ok(())
    }

    /// The first state of a kind.
    fn kind(
        &mut self,
        late: &Late,
        state: &[u32],
        judge: &Oracle<'_>,
        level: &Level<'_>,
        tree: &mut ReadTree<Result<u64, Arc<str>>>,
        allowed: &mut Allowed,
    ) -> Result<(), (Option<CrashState>, String)> {
        self.kinds += 1;
        let first = level.expect.is_none();
        let due = |every: u64| every > 0 && self.kinds.is_multiple_of(every);
        let deep_every = if first { self.depth.deep_every } else { 4 * self.depth.deep_every };
        let (deep, second) = (due(deep_every), first && due(self.depth.second_every));
        let threaded = first && due(self.depth.threads_every);
        let run = self.recover(late, state, judge, level, allowed, deep);
        let value = match &run.seen {
            Ok((_, digest)) => Ok(*digest),
            Err(e) => Err(e.as_str().into()),
        };
        if !tree.insert(state, &run.reads, value) {
            self.counts.strays += 1;
        }
        let (seen, _) = run.seen.map_err(|e| (None, e))?;
        if threaded {
            // another run of these threads makes other writes: the crash cannot be named by them
            self.threaded(late, state, judge, &seen).map_err(|why| (None, format!("by {THREADS} threads: {why}")))?;
        }
        if !second {
            return Ok(());
        }
        self.counts.crashed += 1;
        let mut events = run.device.log();
        events.truncate(run.mounted);
        let log = Log { initial: late.image(state), events };
        let points = log.points(0, []);
        let level = Level { judge: &|_| judge, expect: Some(&seen) };
        self.check(&log, &points, &level).map_err(|f| (f.crash.map(|c| c.first), f.why))?;
        self.checked(late, state, &level).map_err(|why| (None, format!("fsck before a mount: {why}")))
    }

    /// Has fsck mend a state, and crashes it.
    fn checked(&mut self, late: &Late, state: &[u32], level: &Level<'_>) -> Result<(), String> {
        set_clock(times::RECOVERY);
        let trace = Arc::new(late.device(state));
        guarded(|| repair(&self.setup.devices(&trace))).and_then(|r| r)?;
        let log = Log { initial: late.image(state), events: trace.log() };
        let before = self.counts.second_images;
        let result = self.check(&log, &log.points(0, []), level);
        self.counts.checked_images += self.counts.second_images - before;
        result.map_err(|f| f.to_string())
    }

    /// Runs the recovery of a state that showed `seen` again, by several threads, and crashes it.
    fn threaded(&mut self, late: &Late, state: &[u32], judge: &Oracle<'_>, seen: &Seen) -> Result<(), String> {
        self.counts.threaded += 1;
        set_clock(times::RECOVERY);
        let setup = Setup { recovery_threads: THREADS, ..self.setup.clone() };
        let trace = Arc::new(late.device(state));
        let devices = setup.devices(&trace);
        let mounted = guarded(|| {
            let vol = mount(&devices, &setup).map_err(|e| format!("recovery: {e}"))?;
            let mounted = trace.log_len();
            let again = walk(&vol).map_err(|e| format!("after recovery: {e}"))?;
            same_tree(seen, &again).map_err(|e| format!("it shows something else: {e}"))?;
            quota::holds(&vol, &setup)?;
            deep(vol, &devices, &setup, &again, false)?;
            Ok(mounted)
        })
        .and_then(|r| r)?;
        if self.depth.second_every == 0 {
            return Ok(());
        }
        let mut events = trace.log();
        events.truncate(mounted);
        let log = Log { initial: late.image(state), events };
        let level = Level { judge: &|_| judge, expect: Some(seen) };
        let before = self.counts.second_images;
        let result = self.check(&log, &log.points(0, []), &level);
        self.counts.threaded_images += self.counts.second_images - before;
        result.map_err(|f| f.to_string())
    }

    /// Recovers a state and judges what there is.
    fn recover(
        &mut self,
        late: &Late,
        state: &[u32],
        judge: &Oracle<'_>,
        level: &Level<'_>,
        allowed: &mut Allowed,
        go_on: bool,
    ) -> Run {
        let trace = Arc::new(late.device(state));
        let devices = self.setup.devices(&trace);
        set_clock(if level.expect.is_some() { times::SECOND } else { times::RECOVERY });
        match level.expect {
            Some(_) => self.counts.second_recoveries += 1,
            None => self.counts.recoveries += 1,
        }
        self.counts.deep += u64::from(go_on);
        // both ways: the threads that would do it are not running
        let collect = self.counts.deep.is_multiple_of(2);
        let (mut reads, mut mounted) = (Vec::new(), 0);
        let seen = guarded(|| {
            let vol = mount(&devices, self.setup).map_err(|e| format!("recovery: {e}"));
            mounted = trace.log_len();
            let seen = vol.and_then(|vol| {
                let seen = walk(&vol).map_err(|e| format!("after recovery: {e}"))?;
                // what this reads decides, too
                quota::holds(&vol, self.setup)?;
                Ok((seen, vol))
            });
            reads = late.reads(&trace);
            let (seen, vol) = seen?;
            let digest = digest(&seen);
            if !allowed.contains(&digest) {
                judge.judge(&seen)?;
                if let Some(first) = level.expect {
                    same_tree(first, &seen).map_err(|e| format!("a second recovery shows something else: {e}"))?;
                }
                allowed.insert(digest);
            }
            if go_on {
                deep(vol, &devices, self.setup, &seen, collect)?;
                fsck_first(&self.setup.devices(&Arc::new(late.device(state))), self.setup, &seen)?;
            } else {
                vol.crash();
            }
            Ok((seen, digest))
        })
        .and_then(|r| r);
        if seen.is_err() {
            // perhaps before they were noted, or deep down
            reads = late.reads(&trace);
        }
        Run { reads, seen, mounted, device: trace }
    }

    /// Recovers one state and judges it, deeply.
    ///
    /// # Errors
    /// What is wrong.
    pub fn one(&mut self, log: &Log, crash: &Crash, judge: &Oracle<'_>) -> Result<(), String> {
        let level = Level { judge: &|_| judge, expect: None };
        let (late, state) = Late::of(log, &crash.first)?;
        let run = self.recover(&late, &state, judge, &level, &mut Allowed::default(), crash.second.is_none());
        let (seen, _) = run.seen?;
        let Some(second) = &crash.second else { return Ok(()) };
        let mut events = run.device.log();
        events.truncate(run.mounted);
        let log = Log { initial: late.image(&state), events };
        let (late, state) = Late::of(&log, second)?;
        let level = Level { judge: &|_| judge, expect: Some(&seen) };
        self.recover(&late, &state, judge, &level, &mut Allowed::default(), true).seen.map(|_| ())
    }
}
