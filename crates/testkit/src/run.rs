//! The same operations on a volume and on the model, compared one by one; with remounts and crashes in between.
//!
//! Everything is single-threaded and nothing commits by itself, so a list of [`Act`]s replays exactly.

use crate::crash::apart;
use crate::full::{self, Full};
use crate::generate::{Generator, Profile};
use crate::history::{History, Synced};
use crate::model::{self, Ino, Model, Node, Times};
use crate::ops::{At, Op, Out, SLOTS, Slots, is_refused, perform, same_answer, to_rust, walk_path};
use crate::oracle::Oracle;
use crate::quota;
use crate::states::{self, CrashState, Log};
use crate::subject::{Key, OnVolume, stat_of};
use crate::walk::{ROOT_KEY, Seen, fsck, walk};
use braidfs::{
    AtimeMode, DataMode, DomainId, Error, FileKind, MkfsOptions, MountOptions, Overwrite, Placement, RenameMode,
    Timestamp, Volume, mkfs,
};
use braidfs_device::{BLOCK_BYTES, Device, Image, MemDevice, PartDevice, Parted, RecordDevice};
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

/// A clock that counts its readings, so that no two changes have the same time and no run depends on the real one.
pub fn test_clock() -> Timestamp {
    time_of(reading())
}

/// Readings of the clock of all threads that have none of their own.
static TICKS: AtomicI64 = AtomicI64::new(0);

/// Readings in a tick of [`coarse_clock`].
const TICK: i64 = 4;

fn reading() -> i64 {
    match OWN_CLOCK.get() {
        Some(t) => {
            OWN_CLOCK.set(Some(t + 1));
            t
        }
        None => TICKS.fetch_add(1, Ordering::Relaxed),
    }
}

fn time_of(reading: i64) -> Timestamp {
    Timestamp { sec: 1_700_000_000 + reading / 1000, nsec: (reading % 1000) as u32 * 1_000_000 }
}

/// [`test_clock`] with ticks, as a kernel's coarse clock has them: some changes have the same time.
pub fn coarse_clock() -> Timestamp {
    time_of(reading() / TICK * TICK)
}

/// What [`coarse_clock`] tells next. Does not count as a reading.
pub fn peek_clock() -> Timestamp {
    time_of(OWN_CLOCK.get().unwrap_or_else(|| TICKS.load(Ordering::Relaxed)) / TICK * TICK)
}

thread_local!(static OWN_CLOCK: Cell<Option<i64>> = const { Cell::new(None) });

/// From now on [`test_clock`] counts from `at` for this thread alone, so that what it does is the same each time.
pub fn set_clock(at: i64) {
    OWN_CLOCK.set(Some(at));
}

/// Options with which nothing happens but what the test does: no interval commit, no cleaner, no access times.
pub fn quiet_mount(setup: &Setup) -> MountOptions {
    MountOptions {
        data: setup.data,
        overwrite: setup.overwrite,
        commit_interval: Duration::from_secs(1_000_000),
        atime: setup.atime,
        cache_bytes: setup.cache,
        cached_above: setup.cached_above,
        background: false,
        // several threads of a recovery: its commits, too
        serial: setup.recovery_threads == 0,
        recovery_threads: setup.recovery_threads,
        falling: setup.falling,
        share_dirs: setup.share_dirs,
        clock: Some(coarse_clock),
        ..MountOptions::default()
    }
}

/// A budget of the cache that no run comes near to, in bytes.
const CACHE: u64 = 16 << 20;

/// Crashes that are judged beside the one that a run goes on from.
const OTHER_CRASHES: usize = 12;

/// Writes an image where `BRAIDFS_FAILED_IMAGE` says, for `braidfs dump` and others; of a second device beside it, with `.1`
/// behind its name.
fn keep(setup: &Setup, image: Image) {
    let Some(path) = std::env::var_os("BRAIDFS_FAILED_IMAGE") else { return };
    for (n, device) in setup.devices(&Arc::new(MemDevice::from_image(image))).iter().enumerate() {
        let mut path = path.clone();
        if n > 0 {
            path.push(format!(".{n}"));
        }
        let mut bytes = vec![0; device.blocks() as usize * BLOCK_BYTES];
        let done = device.read(0, &mut bytes).and_then(|()| std::fs::write(&path, bytes));
        eprintln!("{}: {done:?}", path.display());
    }
}

/// The volume that a run uses.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Bytes of the device.
    pub bytes: u64,
    /// Bytes of a second device (0: there is none). What is recorded, and the images, have it behind the first one.
    pub second: u64,
    /// Options of mkfs.
    pub mkfs: MkfsOptions,
    /// When data is written (`data=` of a mount).
    pub data: DataMode,
    /// Whether overwrites stay in place (`overwrite=` of a mount).
    pub overwrite: Overwrite,
    /// Budget of the cache in bytes. With a small one data is written before its transaction commits, and read again.
    pub cache: u64,
    /// Written pages are given up, as on a mount.
    pub cached_above: bool,
    /// Domains commit from the last to the first, also in a recovery.
    pub falling: bool,
    /// Directories of more than one bucket are changed as by several threads ([`MountOptions::share_dirs`]).
    pub share_dirs: bool,
    /// So many threads mount and unmount; 0: one, which does everything in the same order each time.
    pub recovery_threads: usize,
    /// When a read renews the access time (`relatime` … of a mount).
    pub atime: AtimeMode,
    /// A user and a group have limits, so that what everybody uses is counted.
    pub quotas: bool,
}

impl Default for Setup {
    fn default() -> Self {
        let mkfs = MkfsOptions {
            domains: Some(3),
            group_bytes: Some(4 << 20),
            journal_bytes: Some(512 << 10),
            mlogs: Some(2),
            uuid: Some(*b"braidfs-testkit!"),
            ..MkfsOptions::default()
        };
        Self {
            bytes: 64 << 20,
            second: 0,
            mkfs,
            data: DataMode::Ordered,
            overwrite: Overwrite::Auto,
            cache: CACHE,
            cached_above: false,
            falling: false,
            share_dirs: false,
            recovery_threads: 0,
            atime: AtimeMode::Noatime,
            quotas: false,
        }
    }
}

/// Bytes of the first and the second device of volumes that have two: the first one has a group for each of two domains, or more.
const SHARES: [(u64, u64); 2] = [(9 << 20, 56 << 20), (17 << 20, 48 << 20)];

/// In a seed of a volume of threads: the directory that they share has several buckets, and they change it beside each other.
pub const BESIDE: u64 = 1 << 63;
/// In a seed of a volume of threads: its cache has no room, so that whatever may leave memory does, and is read again.
pub const PRESSED: u64 = 1 << 62;
/// In a seed of a volume: it has two devices.
pub const APART: u64 = 1 << 61;

impl Setup {
    /// One of the combinations of options that matter for correctness, on two devices where the seed has [`APART`].
    pub fn vary(seed: u64) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut s = Self::default();
        let placements = [Placement::Dirs, Placement::Spread, Placement::Inherit];
        s.mkfs.placement = rng.choice(placements).unwrap_or(Placement::Dirs);
        s.mkfs.domains = Some(rng.u16(1..5));
        s.mkfs.inline_max = rng.choice([0, 200, 3400]).unwrap_or(0);
        s.mkfs.data_checksums = rng.bool();
        s.mkfs.mlogs = Some(rng.u16(1..3));
        s.data = if rng.u8(..4) == 0 { DataMode::Journal } else { DataMode::Ordered };
        s.cache = rng.choice([1, 64 << 10, CACHE, CACHE, CACHE, CACHE]).unwrap_or(CACHE);
        s.falling = rng.bool();
        s.overwrite = if rng.u8(..4) == 0 { Overwrite::Log } else { Overwrite::Auto };
        s.cached_above = rng.bool();
        s.quotas = rng.bool();
        if seed & APART != 0 {
            (s.bytes, s.second) = SHARES[rng.usize(..SHARES.len())];
        }
        s
    }

    /// With access times in some way, or without. Who looks at such a volume changes it.
    pub fn with_access_times(self, seed: u64) -> Self {
        let modes = [AtimeMode::Noatime, AtimeMode::Noatime, AtimeMode::Relatime, AtimeMode::Strictatime];
        let atime = fastrand::Rng::with_seed(!seed).choice(modes).unwrap_or(AtimeMode::Noatime);
        Self { atime, ..self }
    }

    /// Whether an fsync may overwrite blocks of ordinary files.
    pub fn overwrites(&self) -> bool {
        self.overwrite == Overwrite::Auto && self.data != DataMode::Journal && !self.mkfs.data_checksums
    }

    /// Whether blocks of files that were fallocated are overwritten.
    pub fn overwrites_fallocated(&self) -> bool {
        self.data != DataMode::Journal
    }

    /// The devices of the volume, which are parts of `whole`, the one that is recorded.
    pub fn devices<D: Parted + 'static>(&self, whole: &Arc<D>) -> Vec<Arc<dyn Device>> {
        if self.second == 0 {
            return vec![whole.clone()];
        }
        PartDevice::split(whole, [self.bytes, self.second].map(|n| n / BLOCK_BYTES as u64))
    }

    /// A new, empty volume.
    ///
    /// # Errors
    /// Of mkfs.
    pub fn format(&self) -> Result<Image, String> {
        let whole = Arc::new(MemDevice::soiled((self.bytes + self.second) / BLOCK_BYTES as u64));
        let devices = self.devices(&whole);
        mkfs::format(&devices, &self.mkfs).map_err(|e| format!("mkfs: {e}"))?;
        if self.quotas {
            quota::begin(mount(&devices, self)?)?;
        }
        Ok(whole.snapshot())
    }
}

/// A step of a run.
#[derive(Clone, Debug, PartialEq)]
pub enum Act {
    /// Do an operation.
    Do(Op),
    /// Compare the whole tree.
    Compare,
    /// Unmount, fsck, mount, compare.
    Remount,
    /// Lose power at a place that the seed gives; recover; judge; go on from there.
    Crash {
        /// Chooses the place and what of the unflushed writes survives.
        seed: u64,
    },
}

/// Acts as Rust code.
pub fn acts_to_rust(acts: &[Act]) -> String {
    let line = |a: &Act| match a {
        Act::Do(op) => format!("        Act::Do({}),\n", to_rust(op)),
        other => format!("        Act::{other:?},\n"),
    };
    acts.iter().map(line).collect()
}

/// What a run did.
#[derive(Clone, Copy, Debug, Default)]
pub struct Stats {
    /// How many operations ran.
    pub ops: u64,
    /// Of them, those that the volume refused (as the model did).
    pub errors: u64,
    /// By kind, how many were done, and skipped, as the volume was full.
    pub full: Full,
    /// Ranges that were collapsed or inserted.
    pub moves: u64,
    /// How many crashes it was mounted again after.
    pub crashes: u64,
    /// What else was done, by kind.
    pub did: Did,
}

/// Operations that were done of kinds that a generator may come to leave out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Did {
    /// Renames that left a whiteout.
    pub whiteouts: u64,
    /// Writes that kept the times, as a kernel with a writeback cache has it.
    pub written_back: u64,
    /// Changes of several attributes at once.
    pub set: u64,
    /// Changes of flags.
    pub flags: u64,
    /// Exchanges, and renames that replace nothing.
    pub exchanges: u64,
    /// Files made whole, and calls of the cleaner.
    pub cleaned: u64,
}

impl Did {
    /// Counts an operation that succeeded with this answer.
    pub fn note<Id>(&mut self, op: &Op, out: &Out<Id>) {
        let n = match op {
            Op::Rename { mode, .. } if mode.leaves_whiteout() && matches!(out, Out::Made(_)) => &mut self.whiteouts,
            Op::Rename { mode: RenameMode::Exchange | RenameMode::NoReplace, .. } => &mut self.exchanges,
            Op::WriteBack { .. } => &mut self.written_back,
            Op::SetAttr { .. } => &mut self.set,
            Op::SetFlags { .. } => &mut self.flags,
            Op::Clean | Op::Defragment { .. } => &mut self.cleaned,
            _ => return,
        };
        *n += 1;
    }

    /// Adds what another run did.
    pub fn add(&mut self, o: &Self) {
        self.whiteouts += o.whiteouts;
        self.written_back += o.written_back;
        self.set += o.set;
        self.flags += o.flags;
        self.exchanges += o.exchanges;
        self.cleaned += o.cleaned;
    }

    /// Each with its name.
    pub fn named(&self) -> [(&'static str, u64); 6] {
        [
            ("renames that left a whiteout", self.whiteouts),
            ("writes that kept the times", self.written_back),
            ("changes of several attributes", self.set),
            ("changes of flags", self.flags),
            ("exchanges", self.exchanges),
            ("files made whole or cleaned", self.cleaned),
        ]
    }
}

impl Stats {
    /// Adds what another run did.
    pub fn add(&mut self, other: &Self) {
        self.ops += other.ops;
        self.errors += other.errors;
        self.full.sum(&other.full);
        self.moves += other.moves;
        self.crashes += other.crashes;
        self.did.add(&other.did);
    }
}

/// A volume and its model.
pub struct Runner {
    setup: Setup,
    device: Arc<RecordDevice>,
    vol: Option<Volume>,
    /// The model, equal to the volume after every operation.
    pub model: Model,
    keys: BTreeMap<Ino, Key>,
    used: BTreeSet<Key>,
    on_volume: Slots<OnVolume<'static>>,
    on_model: [Option<Ino>; SLOTS],
    /// What happened since the mount.
    pub history: History,
    /// What was done so far, counted.
    pub stats: Stats,
}

pub(crate) fn guarded<T>(f: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(f)).map_err(|p| {
        let text = p.downcast_ref::<String>().map(String::as_str).or_else(|| p.downcast_ref::<&str>().copied());
        format!("panic: {}", text.unwrap_or("?"))
    })
}

/// What an operation names, the directories above, and what is open.
fn inodes_of(model: &mut Model, open: &Slots<Model>, op: &Op) -> BTreeSet<Ino> {
    let mut inos: BTreeSet<Ino> = open.iter().flatten().copied().collect();
    for path in op.paths() {
        inos.extend([path, path.split().0].into_iter().filter_map(|p| walk_path(model, p).ok()));
    }
    inos
}

/// How often a domain has committed since the mount.
fn commits_of(vol: &Volume, domain: DomainId) -> u64 {
    vol.domains().iter().filter(|d| d.domain == domain.0).map(|d| d.commits).sum()
}

/// Whether a flag may refuse an operation: of what it names, the directories above, and what is open.
pub fn is_guarded(model: &mut Model, open: &Slots<Model>, op: &Op) -> bool {
    inodes_of(model, open, op).into_iter().any(|i| model.node(i).is_some_and(Node::is_guarded))
}

/// Whether both refuse what a flag guards: where that is one of two reasons, the other one may be told, as a kernel finds most of
/// them before it asks.
pub fn both_refuse<A, B>(got: &braidfs::Result<A>, want: &braidfs::Result<B>) -> bool {
    let perm = |e: &Error| e.errno() == Error::Perm.errno();
    matches!((got, want), (Err(g), Err(w)) if perm(g) || perm(w))
}

/// Times of inodes of the model, from the volume.
fn times_of<'a>(vol: &'a Volume, keys: &'a BTreeMap<Ino, Key>) -> impl FnMut(Ino) -> Result<Times, String> + 'a {
    |ino| {
        let key = keys.get(&ino).ok_or_else(|| format!("inode {ino} of the model has no key"))?;
        vol.getattr(key.0).map(|a| Times::of(&a)).map_err(|e| format!("{key:?}: {e}"))
    }
}

/// Has the history know what is allocated for files that were synced just now.
fn note_allocated(history: &mut History, vol: &Volume, synced: Synced) -> Result<(), String> {
    let (model, keys) = (history.version(history.steps().len()), &history.keys);
    let of = |ino: Ino| model.node(ino).is_some_and(|n| n.kind == FileKind::File).then_some(ino);
    let files: Vec<Ino> = match synced {
        Synced::One { ino, .. } => of(ino).into_iter().collect(),
        Synced::All => model.nodes().filter_map(|(ino, _)| of(ino)).collect(),
    };
    let known = files.into_iter().filter_map(|ino| Some((ino, *keys.get(&ino)?)));
    let told =
        known.map(|(ino, key)| vol.getattr(key.0).map(|a| (ino, a.sectors)).map_err(|e| format!("{key:?}: {e}")));
    let told: Vec<(Ino, u64)> = told.collect::<Result<_, _>>()?;
    told.into_iter().for_each(|(ino, sectors)| history.allocated(ino, sectors));
    Ok(())
}

impl Runner {
    /// Mounts a volume that equals `model`, which learns the times that it does not know.
    ///
    /// # Errors
    /// Of the mount.
    pub fn new(setup: &Setup, image: Image, model: Model, keys: BTreeMap<Ino, Key>) -> Result<Self, String> {
        let device = Arc::new(RecordDevice::new(image));
        let vol = mount(&setup.devices(&device), setup)?;
        let mut model = model;
        model.atime = setup.atime;
        model.learn(&mut times_of(&vol, &keys), &|_| true)?;
        let mut history = History::new(model.clone(), keys.clone(), setup);
        history.domains = keys.iter().filter_map(|(i, k)| Some((*i, vol.domain_of(k.0).ok()?))).collect();
        note_allocated(&mut history, &vol, Synced::All)?;
        Ok(Self {
            setup: setup.clone(),
            device,
            vol: Some(vol),
            used: keys.values().copied().collect(),
            model,
            keys,
            on_volume: Default::default(),
            on_model: Default::default(),
            history,
            stats: Stats::default(),
        })
    }

    /// Mounts a new volume: an empty one, or one on two devices with files whose blocks lie on both ([`apart::spread`]).
    ///
    /// # Errors
    /// Of mkfs and mount.
    pub fn empty(setup: &Setup) -> Result<Self, String> {
        let keys = BTreeMap::from([(model::ROOT, ROOT_KEY)]);
        let mut r = Self::new(setup, setup.format()?, Model::default(), keys)?;
        if setup.second > 0 {
            apart::spread(&mut r)?;
        }
        Ok(r)
    }

    /// How it was made.
    pub fn setup(&self) -> &Setup {
        &self.setup
    }

    /// The device that it is mounted on.
    pub fn device(&self) -> &Arc<RecordDevice> {
        &self.device
    }

    /// The volume, while it is mounted.
    ///
    /// # Errors
    /// When it is not.
    pub fn volume(&self) -> Result<&Volume, String> {
        self.vol.as_ref().ok_or_else(|| "not mounted".into())
    }

    /// Key of an inode of the model.
    pub fn keys(&self) -> &BTreeMap<Ino, Key> {
        &self.keys
    }

    /// Does one operation on both.
    ///
    /// # Errors
    /// How they differ.
    pub fn apply(&mut self, op: &Op) -> Result<(), String> {
        if is_refused(op, &self.model, &self.on_model) {
            return Ok(());
        }
        let unplaced = self.unplaced(op)?;
        let vol = self.vol.as_ref().ok_or("not mounted")?;
        let slots = &mut self.on_volume;
        let began = peek_clock();
        self.model.second = began.sec;
        let got =
            guarded(|| perform(&mut OnVolume::alone(vol), slots, op)).map_err(|e| format!("{}: {e}", to_rust(op)))?;
        self.stats.ops += 1;
        let full = matches!(got, Err(Error::NoSpace));
        self.stats.full.add(op, full);
        if full {
            return full::little_room(vol, slots, op);
        }
        let sync = Synced::by(op, &self.model, &self.on_model);
        if let Op::Seek { at, off, hole } = op {
            return self.check_seek(*at, *off, *hole, got);
        }
        let guarded = is_guarded(&mut self.model, &self.on_model, op);
        let want = perform(&mut self.model, &mut self.on_model, op);
        let alike = same_answer(&got, &want) || (guarded && both_refuse(&got, &want));
        if !alike {
            let cut = |s: String| match s.chars().count() {
                0..=400 => s,
                _ => format!("{}…", s.chars().take(400).collect::<String>()),
            };
            let at = match (&got, &want) {
                (Ok(Out::Bytes(g)), Ok(Out::Bytes(w))) => g.iter().zip(w).position(|(a, b)| a != b),
                _ => None,
            };
            let from = at.map_or_else(String::new, |at| format!(" (from byte {at} on)"));
            let (got, want) = (cut(format!("{got:?}")), cut(format!("{want:?}")));
            return Err(format!("{}: volume {got}, model {want}{from}", to_rust(op)));
        }
        if let Ok(out) = &got {
            self.stats.did.note(op, out);
        }
        match (got, want) {
            (Ok(Out::Made(key)), Ok(Out::Made(ino))) => {
                if !self.used.insert(key) {
                    return Err(format!("{}: {key:?} is (or was) another inode's number and generation", to_rust(op)));
                }
                self.keys.insert(ino, key);
                self.history.add(ino, key, vol.domain_of(key.0).map_err(|e| format!("{key:?}: {e}"))?);
            }
            (Err(_), _) => self.stats.errors += 1,
            _ => self.stats.moves += u64::from(full::moves_blocks(op)),
        }
        // one that commits writes what is new in any case
        let elsewhere = unplaced.is_some_and(|(domain, commits)| commits_of(vol, domain) == commits);
        self.check_times(op, began).map_err(|e| format!("{}: {e}", to_rust(op)))?;
        self.history.push(op, &self.model, self.device.log_len(), sync, elsewhere);
        let vol = self.vol.as_ref().ok_or("not mounted")?;
        sync.map_or(Ok(()), |sync| note_allocated(&mut self.history, vol, sync))
    }

    /// Where this is an fsync of an ordinary file with dirty pages that have no place yet: its domain, and how often that has
    /// committed.
    fn unplaced(&self, op: &Op) -> Result<Option<(DomainId, u64)>, String> {
        let Some(Synced::One { ino, .. }) = Synced::by(op, &self.model, &self.on_model) else { return Ok(None) };
        let (Some(key), Some(node)) = (self.keys.get(&ino), self.model.node(ino)) else { return Ok(None) };
        // what is small may lie in the inode
        let of_blocks = node.kind == FileKind::File && node.data.size() > BLOCK_BYTES as u64;
        if !of_blocks || node.in_place() || !self.history.overwrites {
            return Ok(None);
        }
        let vol = self.volume()?;
        let extents = vol.extents(key.0).map_err(|e| format!("extents of {key:?}: {e}"))?;
        if extents.iter().all(|e| e.place.is_some()) {
            return Ok(None);
        }
        let domain = vol.domain_of(key.0).map_err(|e| format!("{key:?}: {e}"))?;
        Ok(Some((domain, commits_of(vol, domain))))
    }

    /// What the operation, which began at `began`, changes has times of its own now, which the model learns; of what it
    /// names nothing else has changed.
    fn check_times(&mut self, op: &Op, began: Timestamp) -> Result<(), String> {
        let vol = self.vol.as_ref().ok_or("not mounted")?;
        let ended = peek_clock();
        self.model.learn(&mut times_of(vol, &self.keys), &|t| began <= t && t <= ended)?;
        for ino in inodes_of(&mut self.model, &self.on_model, op) {
            let (Some(key), Some(node)) = (self.keys.get(&ino), self.model.node(ino)) else { continue };
            let (stat, times) = vol.getattr(key.0).map(|a| stat_of(&a)).map_err(|e| format!("{key:?}: {e}"))?;
            let want = self.model.stat(ino).map_err(|e| e.to_string())?;
            if stat != want {
                return Err(format!("afterwards {key:?} is {stat:?}, model {want:?}"));
            }
            if let Some(d) = node.times.differ(times) {
                return Err(format!("afterwards {key:?} has {d}"));
            }
        }
        Ok(())
    }

    fn check_seek(&mut self, at: At, off: u64, hole: bool, got: braidfs::Result<Out<Key>>) -> Result<(), String> {
        let what = || format!("seek {at:?} {off} hole {hole}");
        let probe = perform(&mut self.model, &mut self.on_model, &Op::Read { at, off: 0, len: 0 });
        if let Err(want) = probe {
            return match got {
                Err(g) if g.errno() == want.errno() => Ok(()),
                g => Err(format!("{}: volume {g:?}, model {want:?}", what())),
            };
        }
        let ino = match at {
            At::Path(p) => walk_path(&mut self.model, p).ok(),
            At::Slot(n) => self.on_model[usize::from(n) % SLOTS],
        };
        let answer = got.map(|o| if let Out::Number(n) = o { n } else { u64::MAX });
        match ino.map(|i| self.model.seek_allows(i, off, hole, &answer)) {
            Some(Ok(true)) => Ok(()),
            _ => Err(format!("{}: answer {answer:?} passes over data or is out of range", what())),
        }
    }

    /// Compares the whole tree.
    ///
    /// # Errors
    /// The first difference.
    pub fn compare(&mut self) -> Result<(), String> {
        let vol = self.vol.as_ref().ok_or("not mounted")?;
        let began = peek_clock();
        guarded(|| walk(vol))??.compare(&self.model, &self.keys)?;
        self.model.second = began.sec;
        self.model.all_accessed();
        self.model.learn(&mut times_of(vol, &self.keys), &|_| true)?;
        guarded(|| quota::holds(vol, &self.setup))?
    }

    fn close_slots(&mut self) {
        self.on_volume = Default::default();
        self.on_model = Default::default();
        self.model.close_all();
    }

    /// Unmounts, checks with fsck and mounts again. Open files are lost.
    ///
    /// # Errors
    /// Of any of it, or a difference to the model afterwards.
    pub fn remount(&mut self) -> Result<(), String> {
        let vol = self.vol.take().ok_or("not mounted")?;
        guarded(|| vol.unmount())?.map_err(|e| format!("unmount: {e}"))?;
        self.close_slots();
        let image = states::final_image(&self.device);
        fsck(&self.on(&image)).map_err(|e| format!("after an unmount: {e}"))?;
        self.restart(image)?;
        self.compare().map_err(|e| format!("after a remount: {e}"))?;
        // nothing that lost its name is there any more
        quota::inodes_are(self.volume()?, &self.setup, self.model.nodes().map(|(_, n)| (n.uid, n.gid)))
            .map_err(|e| format!("after a remount: {e}"))
    }

    /// Devices with what an image holds.
    fn on(&self, image: &Image) -> Vec<Arc<dyn Device>> {
        self.setup.devices(&Arc::new(MemDevice::from_image(image.clone())))
    }

    fn restart(&mut self, image: Image) -> Result<(), String> {
        let next = Self::new(&self.setup, image, self.model.clone(), self.keys.clone())?;
        let (stats, used) = (self.stats, std::mem::take(&mut self.used));
        *self = next;
        self.stats = stats;
        self.used.extend(used);
        Ok(())
    }

    /// Loses power, recovers, judges by the contract, and goes on with what there is.
    ///
    /// # Errors
    /// What the contract does not allow.
    pub fn crash(&mut self, seed: u64) -> Result<(), String> {
        let mut rng = fastrand::Rng::with_seed(seed);
        let vol = self.vol.take().ok_or("not mounted")?;
        guarded(|| vol.crash())?;
        self.close_slots();
        let log = Log::of(&self.device);
        self.judge_others(&log, seed)?;
        let state = states::random(&log, &mut rng);
        let image = log.image(&state);
        let devices = self.on(&image);
        let (vol, seen) = self.judged(&devices, &state)?;
        guarded(|| vol.unmount())?.map_err(|e| format!("{state}: unmount after recovery: {e}"))?;
        fsck(&devices).map_err(|e| format!("{state}: after recovery and unmount: {e}"))?;

        // Goes on from the image before that recovery: this one is recorded, so that a crash in it is found too.
        let (mut model, keys) = seen.to_model();
        // Relinking a lost entry may touch its directory, each time anew.
        model.forget_dir_times();
        self.model = model;
        self.keys = keys;
        self.restart(image)?;
        self.compare().map_err(|e| format!("{state}: recovering twice gives another state: {e}"))?;
        self.stats.crashes += 1;
        // What the crash lost has lost its number too, so it may be given again with the same generation.
        self.used = self.keys.values().copied().collect();
        Ok(())
    }

    /// Other crashes of the same run: recovered and judged, no more. Of one that fails, `BRAIDFS_FAILED_IMAGE` gets the
    /// image as it was before recovery.
    fn judge_others(&self, log: &Log, seed: u64) -> Result<(), String> {
        let mut rng = fastrand::Rng::with_seed(!seed);
        for _ in 0..OTHER_CRASHES {
            let state = states::random(log, &mut rng);
            let image = log.image(&state);
            let (vol, _) = self.judged(&self.on(&image), &state).inspect_err(|_| keep(&self.setup, image))?;
            vol.crash();
        }
        Ok(())
    }

    /// Recovers what a crash left and judges it by the contract.
    fn judged(&self, devices: &[Arc<dyn Device>], state: &CrashState) -> Result<(Volume, Seen), String> {
        let vol = mount(devices, &self.setup).map_err(|e| format!("{state}: recovery: {e}"))?;
        let seen = guarded(|| walk(&vol))?.map_err(|e| format!("{state}: after recovery: {e}"))?;
        let oracle = Oracle::new(&self.history, self.history.completed(state.upto));
        oracle.judge(&seen).map_err(|e| format!("{state}: {e}"))?;
        guarded(|| quota::holds(&vol, &self.setup))?.map_err(|e| format!("{state}: {e}"))?;
        Ok((vol, seen))
    }

    /// Loses power, and that is it.
    pub fn abandon(mut self) {
        if let Some(vol) = self.vol.take() {
            vol.crash();
        }
    }

    /// Unmounts with what is open.
    ///
    /// # Errors
    /// Of the unmount.
    pub fn unmount(mut self) -> Result<(), String> {
        self.close()
    }

    /// [`Self::unmount`]; the device and the model stay.
    ///
    /// # Errors
    /// Of the unmount.
    pub fn close(&mut self) -> Result<(), String> {
        let vol = self.vol.take().ok_or("not mounted")?;
        guarded(|| vol.unmount())?.map_err(|e| format!("unmount: {e}"))
    }

    /// Does one step.
    ///
    /// # Errors
    /// What was wrong.
    pub fn act(&mut self, act: &Act) -> Result<(), String> {
        match act {
            Act::Do(op) => self.apply(op),
            Act::Compare => self.compare(),
            Act::Remount => self.remount(),
            Act::Crash { seed } => self.crash(*seed),
        }
    }

    /// Unmounts at the end of a run and checks what is left.
    ///
    /// # Errors
    /// What was wrong.
    pub fn finish(mut self) -> Result<Stats, String> {
        self.compare()?;
        self.remount()?;
        if let Some(vol) = self.vol.take() {
            vol.unmount().map_err(|e| format!("unmount: {e}"))?;
        }
        Ok(self.stats)
    }
}

/// Mounts with [`quiet_mount`]; a panic is an error.
///
/// # Errors
/// Of the mount.
pub fn mount(devices: &[Arc<dyn Device>], setup: &Setup) -> Result<Volume, String> {
    guarded(|| Volume::mount(devices.to_vec(), quiet_mount(setup)))?.map_err(|e| format!("mount: {e}"))
}

/// Runs a list of acts on a new volume.
///
/// # Errors
/// What was wrong, and at which act.
pub fn replay(setup: &Setup, acts: &[Act]) -> Result<Stats, String> {
    let mut r = Runner::empty(setup)?;
    for (i, a) in acts.iter().enumerate() {
        guarded(|| r.act(a)).and_then(|x| x).map_err(|e| format!("act {i} of {}: {e}", acts.len()))?;
    }
    r.finish().map_err(|e| format!("at the end: {e}"))
}

/// Generates and runs `count` acts: operations, with a comparison, a remount or a crash now and then.
///
/// # Errors
/// The acts up to the failing one, and what was wrong.
pub fn random_run(
    setup: &Setup,
    profile: Profile,
    seed: u64,
    count: usize,
    crashes: bool,
) -> Result<Stats, (Vec<Act>, String)> {
    let mut acts = Vec::new();
    let mut rng = fastrand::Rng::with_seed(!seed);
    let mut generator = Generator::new(seed, profile);
    let mut r = Runner::empty(setup).map_err(|e| (Vec::new(), e))?;
    for _ in 0..count {
        let act = match rng.u32(..2000) {
            0..4 => Act::Remount,
            4..14 if crashes => Act::Crash { seed: rng.u64(..) },
            14..20 => Act::Compare,
            _ => Act::Do(generator.next(&r.model)),
        };
        acts.push(act.clone());
        if let Err(e) = guarded(|| r.act(&act)).and_then(|x| x) {
            return Err((acts, e));
        }
    }
    r.finish().map_err(|e| (acts, e))
}
