//! Judges a recovered tree by the durability contract, object by object.
//!
//! Versions are the states after each operation (see [`History`]). For an object, the *bound* of a component (content,
//! attributes, names) is the newest version at which it was promised to be durable; the newest version that may be seen
//! is that of the operation under way at the crash. What is recovered must be the object at one version from the bound
//! on: an operation is never half done, and a domain never keeps a later and loses an earlier change of one object.
//!
//! What was not synced by itself is, domain by domain, of one version: a transaction survives whole or not at all. Objects of
//! different domains may lie apart in time. The content of a file of which an fsync was under way may be half as before and
//! half as synced, where nothing else changed but times; from the first such fsync on, also where a commit wrote it. That of a
//! file that is always overwritten in place may hold newer content in blocks that it had ([`content`]).
//! After an fdatasync, content may be as synced and times as before. Recovery touches directories in which it mends links.
//! It assumes that nothing else (another thread) changed the volume.

use crate::history::{History, Step, Synced};
use crate::model::{self, Ino, Link, Model, Node, Times};
use crate::run::peek_clock;
use crate::subject::Key;
use crate::walk::{Seen, SeenNode, show};
use braidfs::AtimeMode;
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

mod content;

/// Begins what the judge says of a tree that the contract does not allow.
pub const NOT_ALLOWED: &str = "not allowed by the contract";

#[derive(Clone, Copy, Debug, Default)]
struct Bounds {
    data: usize,
    attr: usize,
    links: usize,
}

/// The judge of all crashes after the same number of operations.
pub struct Oracle<'h> {
    history: &'h History,
    completed: usize,
    newest: usize,
    everything: usize,
    bounds: BTreeMap<Ino, Bounds>,
    dirs: BTreeMap<Ino, usize>,
    names: BTreeMap<Link, usize>,
    inos: BTreeMap<Key, Ino>,
    /// Renames that left a whiteout, by the version after each ([`History::whiteout`]).
    whiteouts: Vec<(usize, Ino, Link, Ino)>,
    /// Renames that took the last name of an inode: the version after each, whose name it was, and whose it is.
    replacements: Vec<(usize, Ino, Ino)>,
    /// Whether the versions are in the order in which the volume did them.
    serial: bool,
    /// Inodes that changed, and were judged with others of their domain.
    together: Cell<u64>,
}

/// Versions that what is there of a domain fits.
struct Fitting {
    /// Of each version, from the last sync of everything on, whether all of it does.
    all: Vec<bool>,
    /// Of each object the versions that it fits, for the report.
    each: Vec<(Ino, Vec<usize>)>,
}

impl Fitting {
    fn any(versions: usize) -> Self {
        Self { all: vec![true; versions], each: Vec::new() }
    }
}

impl<'h> Oracle<'h> {
    /// For crashes after `completed` operations have returned and while the next one runs.
    pub fn new(history: &'h History, completed: usize) -> Self {
        Self::with_newest(history, completed, (completed + 1).min(history.steps().len()), true)
    }

    /// For crashes after `completed` operations have returned and while all others of the history run.
    pub fn with_under_way(history: &'h History, completed: usize) -> Self {
        Self::with_newest(history, completed, history.steps().len(), false)
    }

    fn with_newest(history: &'h History, completed: usize, newest: usize, serial: bool) -> Self {
        let mut o = Self {
            history,
            completed,
            newest,
            everything: 0,
            bounds: BTreeMap::new(),
            dirs: BTreeMap::new(),
            names: BTreeMap::new(),
            inos: history.keys.iter().map(|(i, k)| (*k, *i)).collect(),
            replacements: history.replacements(newest),
            whiteouts: (1..=newest).filter_map(|v| history.whiteout(v).map(|(w, link, i)| (v, w, link, i))).collect(),
            serial,
            together: Cell::new(0),
        };
        for step in history.steps().iter().take(completed) {
            match step.sync {
                Some(Synced::All) => o.everything = o.everything.max(step.covers),
                Some(Synced::One { ino, data_only }) => {
                    o.promise(history.version(step.covers), ino, step.covers, data_only);
                }
                None => {}
            }
        }
        o
    }

    /// How many inodes that changed since everything was synced were judged with the others of their domain, in all trees.
    pub fn together(&self) -> u64 {
        self.together.get()
    }

    /// Operations that had returned.
    pub fn completed(&self) -> usize {
        self.completed
    }

    fn promise(&mut self, model: &Model, ino: Ino, v: usize, data_only: bool) {
        let everything = self.everything;
        let b = self.bounds.entry(ino).or_insert(Bounds { data: everything, attr: everything, links: everything });
        // overlapping syncs may return in another order than they began
        b.data = b.data.max(v);
        b.links = b.links.max(v);
        if !data_only {
            b.attr = b.attr.max(v);
        }
        let Some(node) = model.node(ino) else { return };
        if node.kind == braidfs::FileKind::Dir {
            let d = self.dirs.entry(ino).or_insert(v);
            *d = v.max(*d);
        }
        // Every name on every path to it.
        let mut todo: Vec<Ino> = vec![ino];
        let mut done = BTreeSet::new();
        while let Some(at) = todo.pop() {
            if !done.insert(at) {
                continue;
            }
            if at != ino {
                let b =
                    self.bounds.entry(at).or_insert(Bounds { data: everything, attr: everything, links: everything });
                b.links = b.links.max(v);
            }
            for link in model.node(at).into_iter().flat_map(|n| &n.links) {
                let n = self.names.entry(link.clone()).or_insert(v);
                *n = v.max(*n);
                todo.push(link.0);
            }
        }
    }

    fn bound(&self, ino: Ino) -> Bounds {
        let all = self.everything;
        let b = self.bounds.get(&ino).copied().unwrap_or_default();
        Bounds { data: b.data.max(all), attr: b.attr.max(all), links: b.links.max(all) }
    }

    /// Different states of an inode in the versions `from` to the newest, each with its first version.
    fn states(&self, ino: Ino, from: usize) -> Vec<(usize, Option<&'h Arc<Node>>)> {
        let mut out: Vec<(usize, Option<&Arc<Node>>)> = Vec::new();
        for v in from..=self.newest {
            let node = self.history.version(v).shared(ino);
            let same = |a: &Option<&Arc<Node>>| match (a, &node) {
                (Some(a), Some(b)) => Arc::ptr_eq(a, b),
                (None, None) => true,
                _ => false,
            };
            if !out.last().is_some_and(|(_, last)| same(last)) {
                out.push((v, node));
            }
        }
        out
    }

    /// Whether the tree may be what a crash leaves.
    ///
    /// # Errors
    /// What is not allowed, with the operations before.
    pub fn judge(&self, seen: &Seen) -> Result<(), String> {
        self.objects(seen)
            .and_then(|()| self.required(seen))
            .and_then(|()| self.taken_over(seen))
            .and_then(|()| self.all_names(seen))
            .and_then(|()| self.whole_renames(seen))
            .and_then(|()| self.allocated(seen))
            .and_then(|()| self.transactions(seen))
            .map_err(|e| format!("{NOT_ALLOWED}: {e}{}", self.history.story(self.completed)))
    }

    /// Every object that is there is one that was, as of one version.
    fn objects(&self, seen: &Seen) -> Result<(), String> {
        for (key, got) in &seen.nodes {
            let path = || seen.path(*key);
            let ino = *self.inos.get(key).ok_or_else(|| format!("{}: {key:?} never was", path()))?;
            let b = self.bound(ino);
            let from = b.data.min(b.attr).min(b.links);
            let states = self.states(ino, from);
            let exchanged = self.history.exchanged(ino, b.links..=self.newest);
            let named_at_bound = self.history.version(b.links).node(ino).is_some_and(|n| !n.links.is_empty());
            let dir = got.stat.kind == braidfs::FileKind::Dir;

            // The last state that began at or before the bound still holds at the bound.
            let since = |bound: usize| states.iter().rposition(|(v, _)| *v <= bound).unwrap_or(0);
            let torn = if dir { Vec::new() } else { self.overwritten(ino, got, &states[since(b.data)..]) };
            let torn = |v: usize| torn.iter().any(|versions| versions.contains(&v));
            let content = |i: usize, n: &Node| self.content(ino, &got.data, (i, n), &states, since(b.data));
            let data = |i: usize, n: &Node| content(i, n).is_ok() || torn(states[i].0);
            // One that a rename replaced may be back, with the time at which that took its last name.
            let replaced = |i: usize, n: &Node| {
                states.get(i + 1).is_some_and(|(v, next)| {
                    let taken =
                        |l: &Link| self.history.version(*v).node(l.0).is_some_and(|d| d.entries.contains_key(&l.1));
                    next.is_none() && n.links.iter().any(taken)
                })
            };
            let attr = |i: usize, n: &Node| {
                let times = Times { ctime: None, ..n.times };
                self.same_attributes(got, n)
                    || (replaced(i, n) && self.same_attributes(got, &Node { times, ..n.clone() }))
            };
            // content as an fdatasync left it, with the times of before
            let late = |i: usize, n: &Node| {
                let since = since(b.data);
                self.datasynced(ino)
                    && states[i + 1..]
                        .iter()
                        .enumerate()
                        .map_while(|(k, (v, later))| {
                            Some((i + 1 + k, *v, later.filter(|l| content::same_but_content(n, l))?))
                        })
                        .any(|(k, v, later)| k >= since && (content(k, later).is_ok() || torn(v)))
            };
            // Names that it may have got back, each with the version that lost it.
            let revived: Vec<(usize, Link)> = self
                .history
                .lost_names(ino, b.links..=self.newest)
                .into_iter()
                .filter(|(v, link, to)| self.has_name(got, link) && self.before(seen, *to, *v))
                .map(|(v, link, _)| (v, link.clone()))
                .collect();
            // A victim may be back that was gone by then: as it was last, under those names alone.
            let gone: BTreeMap<usize, Node> = if revived.is_empty() {
                BTreeMap::new()
            } else {
                let last = |i: usize| states[..i].iter().rev().find_map(|(_, n)| *n);
                let empty = |n: &Arc<Node>| {
                    // when it lost its last name is known to nobody any more
                    let times = Times { ctime: None, ..n.times };
                    Node { links: BTreeSet::new(), times, ..(**n).clone() }
                };
                (0..states.len())
                    .filter(|i| states[*i].1.is_none())
                    .filter_map(|i| Some((i, empty(last(i)?))))
                    .collect()
            };
            let until = |i: usize| states.get(i + 1).map_or(usize::MAX, |(v, _)| *v);
            let links = |i: usize, n: &Node, bound: bool| {
                let back: Vec<&Link> = revived.iter().filter(|(v, _)| *v < until(i)).map(|(_, l)| l).collect();
                (ino == model::ROOT || !n.links.is_empty() || !back.is_empty())
                    && self.same_links(seen, ino, got, n, &back, bound)
            };
            let any = |from: usize, f: &dyn Fn(usize, &Node) -> bool| {
                (from..states.len()).any(|i| states[i].1.map(|n| &**n).or(gone.get(&i)).is_some_and(|n| f(i, n)))
            };
            let named = |i: usize, n: &Node| {
                ino == model::ROOT || !n.links.is_empty() || revived.iter().any(|(v, _)| *v < until(i))
            };
            if !any(since(b.data), &|i, n| named(i, n) && data(i, n)) {
                let last = (0..states.len()).rev().find_map(|i| content(i, states[i].1?).err());
                let why = last.unwrap_or_default();
                return Err(format!("{}: content of no version from {} to {}: {why}", path(), b.data, self.newest));
            }
            if !any(since(b.attr), &|i, n| named(i, n) && attr(i, n)) {
                let last = states.iter().rev().find_map(|(_, n)| *n);
                let why = last.and_then(|n| n.times.differ(got.times)).unwrap_or_default();
                return Err(format!("{}: attributes of no version from {}: {:?} {why}", path(), b.attr, got.stat));
            }
            if !exchanged && !any(since(b.links), &|i, n| links(i, n, named_at_bound)) {
                let names: Vec<String> = got.links.iter().map(|(k, n)| format!("{:?}/{}", k.0, show(n))).collect();
                let story = self.history.story_above(ino);
                return Err(format!("{}: names {names:?} of no version from {}{story}", path(), b.links));
            }
            // A directory's record does not hold its entries, and its ancestors' records may be older: no joint version.
            // A name that another object took, and with it was synced, may be gone from an otherwise older version: the
            // rename onto it is durable with the newcomer, what was written to the victim before is not.
            let of_one = |i: usize, n: &Node| attr(i, n) && (links(i, n, false) || exchanged);
            if !dir && !any(0, &|i, n| named(i, n) && of_one(i, n) && (data(i, n) || late(i, n))) {
                return Err(format!("{}: content, attributes and names are of different versions", path()));
            }
        }
        Ok(())
    }

    /// Whether an fdatasync of the file was under way or is done, and nothing has synced all since: where it overwrites blocks,
    /// times may be older.
    fn datasynced(&self, ino: Ino) -> bool {
        let synced = |s: &Step| matches!(s.sync, Some(Synced::One { ino: i, data_only: true }) if i == ino);
        self.history.overwrites && self.history.steps()[self.everything..self.newest].iter().any(synced)
    }

    /// Whether all but content and names is as of that version. A directory in which recovery mended a link has the time
    /// of that.
    fn same_attributes(&self, got: &SeenNode, n: &Node) -> bool {
        let (s, t) = (&got.stat, got.times);
        let mended = s.kind == braidfs::FileKind::Dir
            && t.mtime == t.ctime
            && t.mtime.is_some_and(|t| self.history.ended <= t && t <= peek_clock());
        let mut want = n.times;
        if self.history.version(0).atime != AtimeMode::Noatime {
            // may be older, and who looked after recovery has changed them
            want.atime = None;
        }
        if mended {
            want.forget_changes();
        }
        (s.kind, s.mode, s.uid, s.gid, s.rdev, s.flags) == (n.kind, n.mode, n.uid, n.gid, n.rdev, n.flags)
            && got.target == n.target
            && got.xattrs == n.xattrs
            && want.differ(t).is_none()
    }

    fn has_name(&self, got: &SeenNode, (parent, name): &Link) -> bool {
        self.history.keys.get(parent).is_some_and(|p| got.links.contains(&(*p, name.clone())))
    }

    /// Whether what is left of an inode may be from before a version.
    fn before(&self, seen: &Seen, ino: Ino, version: usize) -> bool {
        let Some(got) = self.history.keys.get(&ino).and_then(|k| seen.nodes.get(k)) else { return true };
        (0..version).any(|v| {
            self.history.version(v).node(ino).is_some_and(|n| {
                let have: BTreeSet<&Link> = n.links.iter().filter(|l| self.has_name(got, l)).collect();
                have.len() == got.links.len()
            })
        })
    }

    /// Whether the names found are those of `at`, with `back` (names that may be there beside), without names that went
    /// with their directory or, where nothing was promised (`bound`), to another inode.
    fn same_links(&self, seen: &Seen, ino: Ino, got: &SeenNode, at: &Node, back: &[&Link], bound: bool) -> bool {
        if ino == model::ROOT {
            return true;
        }
        let of = |(p, n): &Link| Some((*self.history.keys.get(p)?, n.clone()));
        let since = self.bound(ino).links;
        let want: BTreeSet<(Key, Vec<u8>)> = at.links.iter().filter_map(of).collect();
        let removed: BTreeSet<(Key, Vec<u8>)> =
            self.history.removed_names(ino, since..=self.newest).into_iter().filter_map(of).collect();
        let back: BTreeSet<(Key, Vec<u8>)> = back.iter().filter_map(|l| of(l)).collect();
        // promised to another one since, which may have left it
        let given = |l: &&Link| {
            let of_promise = |v: &usize| self.history.version(*v).node(l.0).and_then(|d| d.entries.get(&l.1)).copied();
            let after = |v: &&usize| **v > since;
            self.names.get(*l).filter(after).is_some_and(|v| of_promise(v).is_some_and(|i| i != ino))
        };
        let given: BTreeSet<(Key, Vec<u8>)> = at.links.iter().filter(given).filter_map(of).collect();
        let have: BTreeSet<(Key, Vec<u8>)> = got.links.iter().filter(|l| !back.contains(*l)).cloned().collect();
        have.is_subset(&want)
            && want.difference(&have).filter(|l| !back.contains(*l)).all(|(parent, name)| {
                match seen.nodes.get(parent) {
                    // A name in a directory that a crash took.
                    None => true,
                    // Nothing was promised, and another domain came back as of a later time; or the name was removed
                    // since, and who took it then was synced.
                    Some(d) => {
                        let link = (*parent, name.clone());
                        (d.entries.contains_key(name) || given.contains(&link)) && (!bound || removed.contains(&link))
                    }
                }
            })
    }

    /// Objects that may be newer than their domain's last transaction: those that were synced by themselves since all was,
    /// and the directories above them.
    fn rolled_forward(&self) -> BTreeSet<Ino> {
        let mut done = BTreeSet::new();
        for step in &self.history.steps()[self.everything..self.newest] {
            let Some(Synced::One { ino, .. }) = step.sync else { continue };
            let mut todo = vec![ino];
            while let Some(at) = todo.pop() {
                if done.insert(at) || at == ino {
                    let node = self.history.version(step.covers).node(at);
                    todo.extend(node.into_iter().flat_map(|n| &n.links).map(|l| l.0).filter(|p| !done.contains(p)));
                }
            }
        }
        done
    }

    /// Everything of a domain that was not synced by itself since all was is as of one version. Left out is what the contract
    /// leaves out: what had a name before an inode of another domain (it may be back) or one that was synced (it may be gone),
    /// names of exchanged inodes, content that is overwritten in place.
    fn transactions(&self, seen: &Seen) -> Result<(), String> {
        if !self.serial {
            return Ok(());
        }
        let from = self.everything;
        let forward = self.rolled_forward();
        let inos: BTreeSet<Ino> =
            (from..=self.newest).flat_map(|v| self.history.version(v).nodes().map(|(i, _)| i)).collect();
        let mut may: BTreeMap<_, Fitting> = BTreeMap::new();
        for ino in inos {
            let (Some(key), Some(domain)) = (self.history.keys.get(&ino), self.history.domains.get(&ino)) else {
                continue;
            };
            if ino == model::ROOT || forward.contains(&ino) || self.history.replaced(ino, &forward, from..=self.newest)
            {
                continue;
            }
            let got = seen.nodes.get(key);
            let states = self.states(ino, from);
            let torn = got.map(|g| self.overwritten(ino, g, &states)).unwrap_or_default();
            let exchanged = self.history.exchanged(ino, from..=self.newest);
            let gone = |(parent, name): &Link| {
                let dir = self.history.keys.get(parent).and_then(|k| seen.nodes.get(k));
                dir.is_none_or(|d| d.entries.contains_key(name))
            };
            let fits = |i: usize, n: Option<&Arc<Node>>| match (got, n) {
                (None, None) => true,
                (None, Some(n)) => n.links.iter().all(gone),
                (Some(_), None) => false,
                (Some(g), Some(n)) => {
                    let torn = || torn.iter().any(|versions| versions.contains(&states[i].0));
                    !n.links.is_empty()
                        && (self.content(ino, &g.data, (i, n), &states, 0).is_ok() || torn())
                        && self.same_attributes(g, n)
                        && (exchanged || self.same_links(seen, ino, g, n, &[], false))
                }
            };
            let fitting = may.entry(*domain).or_insert_with(|| Fitting::any(self.newest + 1 - from));
            self.together.set(self.together.get() + u64::from(states.len() > 1));
            let mut of_this = Vec::new();
            for (i, (v, node)) in states.iter().enumerate() {
                let until = states.get(i + 1).map_or(self.newest + 1, |(v, _)| *v);
                if fits(i, *node) {
                    of_this.extend(*v..until);
                } else {
                    fitting.all[v - from..until - from].fill(false);
                }
            }
            fitting.each.push((ino, of_this));
        }
        for (domain, fitting) in may {
            if !fitting.all.contains(&true) {
                let each: String = fitting
                    .each
                    .iter()
                    .map(|(i, v)| format!("\n  inode {i} {:?} of versions {v:?}", self.history.keys.get(i)))
                    .collect();
                return Err(format!("{domain:?} is of no one version from {from} to {}:{each}", self.newest));
            }
        }
        Ok(())
    }

    /// A file that nothing was done with since it was synced has the blocks that it had, those that are only reserved too.
    fn allocated(&self, seen: &Seen) -> Result<(), String> {
        for (key, got) in &seen.nodes {
            let known = self.inos.get(key).and_then(|ino| Some((*ino, self.history.sectors.get(ino)?)));
            let Some((ino, known)) = known else { continue };
            let Some((v, sectors)) = known.iter().rev().find(|(v, _)| *v <= self.completed) else { continue };
            if got.sectors != *sectors && self.states(ino, *v).len() == 1 {
                let path = seen.path(*key);
                return Err(format!("{path}: {} sectors, but {sectors} durable since version {v}", got.sectors));
            }
        }
        Ok(())
    }

    /// A rename that leaves a whiteout is there with it, or neither is.
    fn whole_renames(&self, seen: &Seen) -> Result<(), String> {
        for (version, whiteout, link, moved) in &self.whiteouts {
            let found = |ino: &Ino| self.history.keys.get(ino).and_then(|k| seen.nodes.get(k));
            let node = |v: usize, ino: &Ino| self.history.version(v).node(*ino);
            let had = |v: usize, link: &Link| node(v, moved).is_some_and(|n| n.links.contains(link));
            let since = *version..=self.newest;
            let (made, Some(got)) = (found(whiteout), found(moved)) else {
                let new = node(*version, moved).map(|n| &n.links).filter(|l| !l.is_empty());
                if found(whiteout).is_some() && since.clone().all(|v| node(v, moved).map(|n| &n.links) == new) {
                    return Err(format!("{}: a whiteout is there, and what left it is gone", show(&link.1)));
                }
                continue;
            };
            let has = self.has_name(got, link);
            let is_dir_there = found(&link.0).is_some();
            if made.is_some() && is_dir_there && has && !since.clone().any(|v| had(v, link)) {
                return Err(format!("{}: a whiteout is there without the rename that made it", show(&link.1)));
            }
            // The rename is there: what moved is not of before. And the whiteout has been ever since.
            let owed = if is_dir_there {
                let may_be = self.bound(*moved).links.min(version - 1)..*version;
                let placed = |n: &Node| n.links.iter().any(|l| found(&l.0).is_some());
                !has && { may_be }.all(|v| node(v, moved).is_none() || had(v, link)) && { since }
                    .all(|v| node(v, whiteout).is_some_and(placed))
            } else {
                !self.before(seen, *moved, *version) && { since }
                    .all(|v| node(v, whiteout).is_some_and(|n| n.links.contains(link)))
            };
            if made.is_none() && owed {
                return Err(format!("{}: what had the name has moved, and has left no whiteout", show(&link.1)));
            }
        }
        Ok(())
    }

    /// Every object that was promised is there, unless it was removed since.
    fn required(&self, seen: &Seen) -> Result<(), String> {
        let inos: BTreeSet<Ino> =
            (0..=self.newest).flat_map(|v| self.history.version(v).nodes().map(|(i, _)| i)).collect();
        for ino in inos {
            let Some(key) = self.history.keys.get(&ino) else { continue };
            if seen.nodes.contains_key(key) || ino == model::ROOT {
                continue;
            }
            let from = self.bound(ino).links;
            let states = self.states(ino, from);
            if states.iter().all(|(_, n)| n.is_some_and(|n| !n.links.is_empty())) {
                let name = states[0].1.and_then(|n| n.links.first()).map(|(p, n)| (*p, show(n)));
                let story = self.history.story_above(ino);
                return Err(format!("{key:?} {name:?} is lost, durable since version {from}{story}"));
            }
        }
        Ok(())
    }

    /// Where an object that was promised is gone since a rename took its last name, what has the name is there, unless that was
    /// removed, too: what it replaced is there until the newcomer is.
    fn taken_over(&self, seen: &Seen) -> Result<(), String> {
        if !self.serial {
            return Ok(());
        }
        let there = |ino: &Ino| self.history.keys.get(ino).is_some_and(|k| seen.nodes.contains_key(k));
        let named = |v: usize, ino: Ino| self.history.version(v).node(ino).is_some_and(|n| !n.links.is_empty());
        for (v, victim, newcomer) in &self.replacements {
            let from = self.bound(*victim).links;
            if from >= *v || there(victim) || !(from..*v).all(|w| named(w, *victim)) {
                continue;
            }
            let (mut at, mut holder) = (*v, *newcomer);
            while !there(&holder) {
                let Some(end) = (at..=self.newest).find(|w| !named(*w, holder)) else {
                    let stories = [*victim, holder].map(|i| self.history.story_above(i));
                    return Err(format!(
                        "inode {victim}, durable since version {from}, is lost, and so is {holder}, which took its name{}{}",
                        stories[0], stories[1]
                    ));
                };
                let by = self.replacements.iter().find(|(w, ino, _)| (*w, *ino) == (end, holder));
                let Some((_, _, next)) = by else { break };
                (at, holder) = (end, *next);
            }
        }
        Ok(())
    }

    /// Every name leads to what it led to at one version since it was promised (so a rename is never half done).
    fn all_names(&self, seen: &Seen) -> Result<(), String> {
        let mut done: BTreeSet<Link> = BTreeSet::new();
        for v in 0..=self.newest {
            for (dir, node) in self.history.version(v).nodes() {
                if v > 0 && self.history.version(v - 1).shared(dir).is_some_and(|n| Arc::ptr_eq(n, node)) {
                    continue;
                }
                let Some(found) = self.history.keys.get(&dir).and_then(|k| seen.nodes.get(k)) else { continue };
                for name in node.entries.keys() {
                    let link = (dir, name.clone());
                    if done.contains(&link) {
                        continue;
                    }
                    let of_dir = self.dirs.get(&dir).copied().unwrap_or(0);
                    let of_name = self.names.get(&link).copied().unwrap_or(0);
                    let from = of_dir.max(of_name).max(self.everything);
                    let got = found.entries.get(name).and_then(|k| self.inos.get(k)).copied();
                    let mut may = self.states(dir, from).into_iter().map(|(_, n)| n?.entries.get(name).copied());
                    if !may.any(|m| m == got) {
                        let state = if got.is_some() { "leads to something else" } else { "is gone" };
                        let dir = self.history.keys.get(&dir).map(|k| seen.path(*k)).unwrap_or_default();
                        let above = got.map(|g| self.history.story_above(g)).unwrap_or_default();
                        let story = self.history.story_of(None, Some(&link)) + &above;
                        let name = show(name);
                        return Err(format!("the name {name} in {dir} {state}, durable since version {from}{story}"));
                    }
                    done.insert(link);
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::crash::explore::{Recorded, recorded};
    use crate::crash::plan::End;
    use crate::crash::workload::{Base, Kind, base};
    use crate::ops::{At, Op, P};
    use crate::run::mount;
    use crate::states::Log;
    use crate::walk::walk;
    use braidfs::{DataMode, FallocMode, RenameMode};
    use braidfs_device::{Device, MemDevice};

    /// The device before and after all that was written.
    fn tree(log: &Log, base: &Base, whole: bool) -> Seen {
        let mut image = log.initial.clone();
        if whole {
            log.events.iter().for_each(|e| e.apply(&mut image, braidfs_device::Keep::Whole));
        }
        let d: Arc<dyn Device> = Arc::new(MemDevice::from_image(image));
        let v = mount(&[d], &base.setup).unwrap();
        let seen = walk(&v).unwrap();
        v.crash();
        seen
    }

    #[test]
    fn half_a_rename_with_a_whiteout_is_seen() {
        let base = base(Kind::ALL[0]).unwrap();
        let ops = [Op::Rename { from: P("A/f"), to: P("B/n"), mode: RenameMode::Whiteout }, Op::Sync];
        let Recorded { log, history, .. } = recorded(&base, &ops, End::Crash, true).unwrap().unwrap();
        let (old, new) = (tree(&log, &base, false), tree(&log, &base, true));
        let under_way = Oracle::new(&history, 1);
        under_way.judge(&old).unwrap();
        under_way.judge(&new).unwrap();
        let (whiteout, link, moved) = history.whiteout(1).unwrap();
        let key = |ino| history.keys[&ino];
        let (dir, name) = (key(link.0), link.1);
        // moved, and the name is gone
        let mut half = new.clone();
        half.nodes.remove(&key(whiteout));
        half.nodes.get_mut(&dir).unwrap().entries.remove(&name);
        assert!(under_way.whole_renames(&half).unwrap_err().contains("no whiteout"));
        under_way.judge(&half).unwrap_err();
        // the whiteout elsewhere, and the file where it was
        let mut half = old.clone();
        half.nodes.insert(key(whiteout), new.nodes[&key(whiteout)].clone());
        assert!(under_way.whole_renames(&half).unwrap_err().contains("without the rename"));
        assert!(half.nodes.contains_key(&key(moved)));
    }

    #[test]
    fn half_a_transaction_is_seen() {
        let base = base(Kind::ALL[0]).unwrap();
        let write = |path| Op::Write { at: At::Path(P(path)), off: 0, len: 4096, seed: 77 };
        let mode = |mode| Op::SetMode { path: P("A/g"), mode };
        let fsync = |path| Op::Fsync { at: At::Path(P(path)), data_only: false };
        // what was synced by itself before all was is judged like everything
        let before = [mode(0o640), fsync("A/g"), fsync("A/f"), Op::Sync];
        let ops = [write("A/f"), mode(0o600), Op::Sync];
        for before in [&before[..0], &before] {
            let all = [before, &ops].concat();
            let Recorded { log, history, marks, .. } = recorded(&base, &all, End::Crash, true).unwrap().unwrap();
            let mut log_before = Log { initial: log.initial.clone(), events: log.events.clone() };
            log_before.events.truncate(if before.is_empty() { 0 } else { marks[before.len() - 1] });
            let (old, new) = (tree(&log_before, &base, true), tree(&log, &base, true));
            let under_way = Oracle::new(&history, before.len() + 2);
            under_way.judge(&old).unwrap();
            under_way.judge(&new).unwrap();
            // the change of the second file without that of the first
            let mut half = old.clone();
            let g = new.nodes.iter().find(|(_, n)| n.links.iter().any(|l| l.1 == b"g")).unwrap();
            half.nodes.insert(*g.0, g.1.clone());
            let why = under_way.judge(&half).unwrap_err();
            assert!(why.contains("of no one version"), "{why}");
        }
    }

    /// A new name that an fdatasync promised is there: what has the old one is not what the contract allows.
    #[test]
    fn an_old_name_after_an_fdatasync_is_seen() {
        let base = base(Kind::ALL[0]).unwrap();
        let to_other = Op::Rename { from: P("A/f"), to: P("B/n"), mode: RenameMode::Replace };
        let ops = [to_other, Op::Fsync { at: At::Path(P("B/n")), data_only: true }];
        let Recorded { log, history, .. } = recorded(&base, &ops, End::Crash, true).unwrap().unwrap();
        let (old, new) = (tree(&log, &base, false), tree(&log, &base, true));
        Oracle::new(&history, 1).judge(&old).unwrap();
        let done = Oracle::new(&history, 2);
        done.judge(&new).unwrap();
        done.judge(&old).unwrap_err();
    }

    #[test]
    fn reserved_blocks_that_are_lost_are_seen() {
        let base = base(Kind::ALL[0]).unwrap();
        let at = At::Path(P("A/f"));
        let mode = FallocMode::Allocate { keep_size: true };
        let ops = [
            Op::Fallocate { at, mode, off: 0, len: 65_536 },
            Op::Fsync { at, data_only: false },
            Op::SetMode { path: P("A/f"), mode: 0o600 },
        ];
        let Recorded { log, history, .. } = recorded(&base, &ops, End::Crash, true).unwrap().unwrap();
        let new = tree(&log, &base, true);
        let mut lost = new.clone();
        let (_, f) = lost.nodes.iter_mut().find(|(_, n)| n.links.iter().any(|l| l.1 == b"f")).unwrap();
        assert_eq!(f.sectors, 128);
        f.sectors = 24;
        let synced = history.first(2);
        Oracle::new(&synced, 2).judge(&new).unwrap();
        let why = Oracle::new(&synced, 2).judge(&lost).unwrap_err();
        assert!(why.contains("24 sectors, but 128"), "{why}");
        // nothing is promised during the fsync
        Oracle::new(&synced, 1).judge(&lost).unwrap();
    }

    #[test]
    fn content_that_commits_leave_alone_is_of_the_file() {
        let mut base = base(Kind::ALL[0]).unwrap();
        base.setup.data = DataMode::Writeback;
        let at = At::Path(P("A/f"));
        let write = |off, seed| Op::Write { at, off, len: 4096, seed };
        let ops = [write(0, 77), write(4096, 78), Op::Commit { path: P("A/f"), checkpoint: false }];
        let Recorded { log, history, .. } = recorded(&base, &ops, End::Crash, true).unwrap().unwrap();
        let seen = tree(&log, &base, true);
        let (key, f) = seen.nodes.iter().find(|(_, n)| n.links.iter().any(|l| l.1 == b"f")).unwrap();
        let judge = |off, bytes: &[u8]| {
            let mut seen = seen.clone();
            if let Some(n) = seen.nodes.get_mut(key) {
                n.data.write(off, bytes);
            }
            Oracle::new(&history, 3).judge(&seen)
        };
        let ino = history.keys.iter().find(|(_, k)| *k == key).map(|(i, _)| *i).unwrap();
        let new = &history.version(2).node(ino).unwrap().data;
        // nothing of it is written: all as before, or some sectors
        assert_ne!(f.data, *new);
        judge(0, &[]).unwrap();
        judge(512, &new.read(512, 1024)).unwrap();
        judge(4096, &new.read(4096, 4096)).unwrap();
        // of another place, of nobody, nothing where there was something
        judge(0, &new.read(4096, 512)).unwrap_err();
        judge(0, &[0xa5; 512]).unwrap_err();
        judge(0, &[0; 512]).unwrap_err();
    }

    #[test]
    fn content_is_mixed_within_a_block_alone() {
        let base = base(Kind::ALL[0]).unwrap();
        let at = At::Path(P("A/f"));
        let write = |off, len, seed| Op::Write { at, off, len, seed };
        let fallocate = |mode, off, len| Op::Fallocate { at, mode, off, len };
        let ops = [
            fallocate(FallocMode::Allocate { keep_size: false }, 0, 16_384),
            write(0, 8192, 11),
            Op::Sync,
            write(0, 8192, 2),
            fallocate(FallocMode::PunchHole, 4096, 4096),
            write(4096, 10_000, 3),
            write(0, 100, 4),
        ];
        let Recorded { log, history, .. } = recorded(&base, &ops, End::Crash, true).unwrap().unwrap();
        let d: Arc<dyn Device> = Arc::new(MemDevice::from_image(log.initial.clone()));
        let v = mount(&[d], &base.setup).unwrap();
        let before = walk(&v).unwrap();
        v.crash();
        let (key, _) = before.nodes.iter().find(|(_, n)| n.links.iter().any(|l| l.1 == b"f")).unwrap();
        let ino = history.keys.iter().find(|(_, k)| *k == key).map(|(i, _)| *i).unwrap();
        let of = |version: usize| history.version(version).node(ino).unwrap().data.clone();
        // what is there after all but the last has returned: of the first version, with these ranges of others
        let judge = |first: usize, parts: &[(usize, u64, usize)]| {
            let (mut seen, mut data) = (before.clone(), of(first));
            parts.iter().for_each(|(from, off, len)| data.write(*off, &of(*from).read(*off, *len)));
            let n = seen.nodes.get_mut(key).unwrap();
            (n.stat.size, n.data) = (data.size(), data);
            // all else as of that version, or as it was synced
            let is = history.version(first.max(3)).node(ino).unwrap();
            (n.stat.flags, n.times) = (is.flags, is.times);
            Oracle::new(&history, ops.len() - 1).judge(&seen)
        };
        for whole in 3..=7 {
            judge(whole, &[]).unwrap();
        }
        judge(2, &[(3, 0, 16_384)]).unwrap();
        // sectors of the first page, and those of the second before it was punched
        judge(3, &[(4, 512, 512), (4, 4096, 1024), (7, 0, 512)]).unwrap();
        judge(6, &[(7, 0, 512)]).unwrap();
        let refused = |first, parts: &[_]| judge(first, parts).expect_err("it is of no version");
        // less than a sector
        refused(3, &[(4, 600, 100)]);
        // older than the punch, whose block that is
        refused(6, &[(4, 4096, 512)]);
        refused(3, &[(6, 4096, 512)]);
        // the block was only reserved
        refused(5, &[(6, 12_288, 512)]);
        // older than the inode: the sync promised it
        refused(3, &[(1, 0, 512)]);
    }
}
