//! What a workload did: the model after every operation, what was synced, and how long the device's log was then.

use crate::model::{Ino, Link, Model};
use crate::ops::{At, Op, SLOTS, Slots, to_rust, walk_path};
use crate::run::{Setup, peek_clock};
use crate::subject::Key;
use braidfs::{DataMode, DomainId, Timestamp};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;

/// A promise that an operation gave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Synced {
    /// Everything (`sync`, unmount).
    All,
    /// One file or directory.
    One {
        /// Which one it is.
        ino: Ino,
        /// By fdatasync, which promises the data alone.
        data_only: bool,
    },
}

impl Synced {
    /// What an operation promises once it has returned.
    pub fn by(op: &Op, model: &Model, slots: &Slots<Model>) -> Option<Self> {
        match op {
            Op::Sync => Some(Self::All),
            Op::Fsync { at, data_only } | Op::FsyncAs { at, data_only, .. } => {
                let ino = match at {
                    At::Path(p) => walk_path(&mut model.clone(), *p).ok()?,
                    At::Slot(n) => slots[usize::from(*n) % SLOTS]?,
                };
                Some(Self::One { ino, data_only: *data_only })
            }
            _ => None,
        }
    }
}

/// An operation that was done.
#[derive(Clone, Debug)]
pub struct Step {
    /// What, for messages.
    pub what: String,
    /// The model after it.
    pub after: Model,
    /// Events in the device's log when it had returned.
    pub log: usize,
    /// What it promised.
    pub sync: Option<Synced>,
    /// The version that its promise is about: that after it, or with other threads the one that it began with.
    pub covers: usize,
    /// An fsync that wrote an ordinary file elsewhere, since it had blocks that were new.
    pub elsewhere: bool,
}

/// All operations since a moment when everything was durable. Version 0 is that moment, version `i` the state after
/// the `i`th step.
#[derive(Clone, Debug)]
pub struct History {
    start: Model,
    steps: Vec<Step>,
    /// Every inode that ever was: its number and generation on the volume.
    pub keys: BTreeMap<Ino, Key>,
    /// Domain of every inode that ever was.
    pub domains: BTreeMap<Ino, DomainId>,
    /// What was allocated for a file in versions in which all of it was durable, rising: units of 512 bytes.
    pub sectors: BTreeMap<Ino, Vec<(usize, u64)>>,
    /// An fsync may overwrite blocks of ordinary files.
    pub overwrites: bool,
    /// Blocks of files that were fallocated are overwritten.
    pub fallocated: bool,
    /// Commits leave data alone (`data=writeback`).
    pub late_data: bool,
    /// Nothing of it was done later than this, by the clock of the tests.
    pub ended: Timestamp,
}

impl History {
    /// Begins with a durable state of a volume.
    pub fn new(start: Model, keys: BTreeMap<Ino, Key>, setup: &Setup) -> Self {
        let (overwrites, fallocated) = (setup.overwrites(), setup.overwrites_fallocated());
        let (late_data, ended) = (setup.data == DataMode::Writeback, peek_clock());
        let (steps, domains, sectors) = Default::default();
        Self { start, steps, keys, domains, sectors, overwrites, fallocated, late_data, ended }
    }

    /// Adds an inode that was made.
    pub fn add(&mut self, ino: Ino, key: Key, domain: DomainId) {
        self.keys.insert(ino, key);
        self.domains.insert(ino, domain);
    }

    /// Notes what is allocated for a file of the newest version, which is durable.
    pub fn allocated(&mut self, ino: Ino, sectors: u64) {
        let version = self.steps.len();
        self.sectors.entry(ino).or_default().push((version, sectors));
    }

    /// Adds a step. `elsewhere`: as [`Step::elsewhere`].
    pub fn push(&mut self, op: &Op, after: &Model, log: usize, sync: Option<Synced>, elsewhere: bool) {
        let covers = self.steps.len() + 1;
        self.ended = peek_clock();
        self.steps.push(Step { what: to_rust(op), after: after.clone(), log, sync, covers, elsewhere });
    }

    /// Adds a step of a thread; it began when there were `covers` steps.
    pub fn push_overlapping(
        &mut self,
        (thread, op): (usize, &Op),
        after: &Model,
        log: usize,
        sync: Option<Synced>,
        covers: usize,
    ) {
        self.ended = self.ended.max(peek_clock());
        let what = format!("thread {thread}, since version {covers}: {}", to_rust(op));
        self.steps.push(Step { what, after: after.clone(), log, sync, covers, elsewhere: false });
    }

    /// The beginning of it, so many steps.
    pub fn first(&self, steps: usize) -> Self {
        Self {
            start: self.start.clone(),
            steps: self.steps[..steps].to_vec(),
            keys: self.keys.clone(),
            domains: self.domains.clone(),
            sectors: self.sectors.clone(),
            overwrites: self.overwrites,
            fallocated: self.fallocated,
            late_data: self.late_data,
            ended: self.ended,
        }
    }

    /// Adds an unmount, which promises everything.
    pub fn push_unmount(&mut self, log: usize) {
        let mut after = self.version(self.steps.len()).clone();
        after.close_all();
        let covers = self.steps.len() + 1;
        self.ended = peek_clock();
        let sync = Some(Synced::All);
        self.steps.push(Step { what: "unmount".into(), after, log, sync, covers, elsewhere: false });
    }

    /// The steps so far, in their order.
    pub fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// The model of a version.
    pub fn version(&self, v: usize) -> &Model {
        if v == 0 { &self.start } else { &self.steps[v - 1].after }
    }

    /// How many steps had returned when the log had `upto` events.
    pub fn completed(&self, upto: usize) -> usize {
        self.steps.partition_point(|s| s.log <= upto)
    }

    /// Names that the inode lost to inodes of other domains by renames, in versions after the first of these and up to the
    /// last: at which version, to whom. The rename is durable with the newcomer, so that the victim may have the name again,
    /// whatever else happened to it since.
    pub fn lost_names(&self, ino: Ino, versions: RangeInclusive<usize>) -> Vec<(usize, &Link, Ino)> {
        let mut out = Vec::new();
        for v in versions.start() + 1..=*versions.end() {
            let (before, after) = (self.version(v - 1), self.version(v));
            let (Some(old), Some(new)) = (before.shared(ino), after.shared(ino)) else { continue };
            if std::sync::Arc::ptr_eq(old, new) {
                continue;
            }
            for link in old.links.iter().filter(|l| !new.links.contains(*l)) {
                let newcomer = after.node(link.0).and_then(|d| d.entries.get(&link.1)).copied();
                if let Some(n) = newcomer.filter(|n| *n != ino && self.domains.get(n) != self.domains.get(&ino)) {
                    out.push((v, link, n));
                }
            }
        }
        out
    }

    /// The whiteout that the rename to this version left, if it did: it, its name, and what had that before. Nothing else makes
    /// an inode under a name that is taken.
    pub fn whiteout(&self, version: usize) -> Option<(Ino, Link, Ino)> {
        let (before, after) = (self.version(version.checked_sub(1)?), self.version(version));
        let fresh = after.nodes().rev().take_while(|(i, _)| before.node(*i).is_none());
        fresh.flat_map(|(i, n)| n.links.iter().map(move |l| (i, l))).find_map(|(i, link)| {
            let moved = before.node(link.0)?.entries.get(&link.1)?;
            Some((i, link.clone(), *moved))
        })
    }

    /// Whether the inode was exchanged with one of another domain after the first of these versions, and up to the last.
    pub fn exchanged(&self, ino: Ino, versions: RangeInclusive<usize>) -> bool {
        (versions.start() + 1..=*versions.end()).any(|v| {
            let (before, after) = (self.version(v - 1), self.version(v));
            let (Some(old), Some(new)) = (before.shared(ino), after.shared(ino)) else { return false };
            let to = |m: &Model, l: &Link| m.node(l.0).and_then(|d| d.entries.get(&l.1)).copied();
            let taken = |l: &Link| to(after, l).filter(|n| !new.links.contains(l) && *n != ino);
            old.links.iter().filter_map(taken).any(|n| {
                self.domains.get(&n) != self.domains.get(&ino)
                    && new.links.iter().any(|l| !old.links.contains(l) && to(before, l) == Some(n))
            })
        })
    }

    /// Whether an inode of another domain or one of `synced` had a name after this one, in these versions.
    pub fn replaced(&self, ino: Ino, synced: &BTreeSet<Ino>, mut versions: RangeInclusive<usize>) -> bool {
        let mut had: BTreeSet<&Link> = BTreeSet::new();
        versions.any(|v| {
            let m = self.version(v);
            had.extend(m.shared(ino).into_iter().flat_map(|n| &n.links));
            had.iter().any(|(dir, name)| {
                let now = m.node(*dir).and_then(|d| d.entries.get(name));
                let other = |n: &Ino| synced.contains(n) || self.domains.get(n) != self.domains.get(&ino);
                now.is_some_and(|n| *n != ino && other(n))
            })
        })
    }

    /// Renames, up to version `newest`, that took the last name of an inode: the version after each, whose name it was, and whose
    /// it is.
    pub fn replacements(&self, newest: usize) -> Vec<(usize, Ino, Ino)> {
        let mut out = Vec::new();
        for v in 1..=newest {
            let (old, new) = (self.version(v - 1), self.version(v));
            for (ino, node) in old.nodes() {
                let left = new.shared(ino);
                if left.is_some_and(|n| std::sync::Arc::ptr_eq(n, node) || !n.links.is_empty()) {
                    continue;
                }
                let holds = |(dir, name): &Link| new.node(*dir).and_then(|d| d.entries.get(name)).copied();
                out.extend(node.links.iter().filter_map(holds).map(|by| (v, ino, by)));
            }
        }
        out
    }

    /// Names that the inode lost in versions after the first of these, and up to the last, without getting another one for it:
    /// by an unlink, or to the inode of a rename.
    pub fn removed_names(&self, ino: Ino, versions: RangeInclusive<usize>) -> Vec<&Link> {
        let mut out = Vec::new();
        for v in versions.start() + 1..=*versions.end() {
            let (old, new) = (self.version(v - 1).shared(ino), self.version(v).shared(ino));
            let Some(old) = old else { continue };
            match new {
                Some(new) if std::sync::Arc::ptr_eq(old, new) || !new.links.is_subset(&old.links) => {}
                Some(new) => out.extend(old.links.iter().filter(|l| !new.links.contains(*l))),
                None => out.extend(&old.links),
            }
        }
        out
    }

    /// The steps that changed the names of an inode, or the inode of a name, for messages.
    pub fn story_of(&self, ino: Option<Ino>, link: Option<&Link>) -> String {
        let names = |v: usize| {
            let m = self.version(v);
            let links = ino.and_then(|i| m.node(i)).map(|n| n.links.clone());
            (links, link.and_then(|(d, n)| m.node(*d)?.entries.get(n).copied()))
        };
        let changed: Vec<usize> = (1..=self.steps.len()).filter(|v| names(v - 1) != names(*v)).collect();
        let line = |v: &usize| {
            let s = &self.steps[v - 1];
            format!("\n  version {v} log {:4} {} -> {:?}", s.log, s.what, names(*v))
        };
        let skip = changed.len().saturating_sub(12);
        changed.iter().skip(skip).map(line).collect()
    }

    /// [`Self::story_of`] an inode, of the directories above all names that it had, and of who else had them.
    pub fn story_above(&self, ino: Ino) -> String {
        let mut out = String::new();
        let (mut todo, mut seen) = (vec![ino], BTreeSet::new());
        while let Some(i) = todo.pop() {
            if !seen.insert(i) {
                continue;
            }
            out += &format!("\n  inode {i} {:?} {:?}", self.keys.get(&i), self.domains.get(&i));
            out += &self.story_of(Some(i), None);
            for v in 0..=self.steps.len() {
                for link in self.version(v).node(i).iter().flat_map(|n| &n.links) {
                    todo.push(link.0);
                    if i == ino {
                        // who had the name besides
                        let named = |v| self.version(v).node(link.0)?.entries.get(&link.1).copied();
                        todo.extend((0..=self.steps.len()).filter_map(named));
                    }
                }
            }
        }
        out
    }

    /// The steps up to (and with) the one under way, for messages.
    pub fn story(&self, completed: usize) -> String {
        let mark = |i: usize| if i < completed { "done     " } else { "under way" };
        let shown = self.steps.iter().enumerate().take(completed + 1).skip(completed.saturating_sub(12));
        shown.map(|(i, s)| format!("\n  {} log {:4} {}", mark(i), s.log, s.what)).collect()
    }
}
