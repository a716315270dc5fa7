//! Vacated names: those that inodes left by a rename or unlink which may not be durable yet.
//!
//! Until that is durable, a crash brings the inode back under its old name. Where the inode lives on by another name, a
//! newcomer to the name, or the end of the directory, must not become durable before it: of two inodes that claim a name
//! recovery keeps the later one, and the earlier would lose the only name that it durably has. Where the inode is gone,
//! an fsync of the newcomer makes that durable too: else the name could come back to it when the newcomer moves on.
//! Whoever takes a name asks here first; the rule is [`take_name`](super::rules::take_name).
//!
//! Lock rank: leaf.

use crate::braid::frontier::Frontier;
use crate::types::*;
use braidfs_format::geometry::NODES_PER_BLOCK;
use braidfs_format::name::FileName;
use braidfs_sync::slots::Line;
use braidfs_sync::{Mutex, rank};
use foldhash::fast::RandomState;
use smallvec::{SmallVec, smallvec};
use std::collections::HashMap;
use std::hash::BuildHasher;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// By directory, then by name: the latest inode of each domain that left it.
type Names = HashMap<InodeNo, HashMap<FileName, VacatedList, RandomState>, RandomState>;

/// Mostly one.
pub type VacatedList = SmallVec<[Vacated; 1]>;

/// Who left a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Vacated {
    /// Domain of the inode.
    pub domain: DomainId,
    /// Its transaction.
    pub tx: TxId,
    /// It lives on by another name, or is a directory that something moved out of.
    pub alive: bool,
}

/// Parts of the table by directory, a power of two. Directories made one after the other have one each.
const PARTS: u64 = 64;
/// Parts of the table by name, a power of two: so many that threads which leave different names seldom meet.
const SHARED_PARTS: u64 = 4096;
/// Names of a part that are in a list; others are in a table.
const LISTED: u32 = 8;

/// See the module.
#[derive(Debug)]
pub struct VacatedNames {
    /// By directory.
    parts: Box<[Part<Names, Line<AtomicU64>>]>,
    /// Names of directories that several threads change at the same time, by directory and name. Made for the first of them.
    shared: Line<OnceLock<Box<[SharedPart]>>>,
    hasher: RandomState,
}

/// Some names and who left them.
trait Left: Default {
    /// An inode left this name.
    fn add(&mut self, dir: InodeNo, name: &[u8], left: Vacated);
    /// Who left this name.
    fn get(&self, dir: InodeNo, name: &[u8]) -> Option<&VacatedList>;
    /// Shows everybody who left a directory.
    fn of_dir(&self, dir: InodeNo, see: &mut dyn FnMut(Vacated));
    /// Forgets who is durable, and names that nobody left but these.
    fn forget(&mut self, durable: &dyn Fn(DomainId, TxId) -> bool);
    /// Bits of the directories.
    fn dirs(&self) -> u64;
}

/// Some names, behind a lock.
#[derive(Debug, Default)]
struct Part<L, D> {
    names: Mutex<L, rank::VacatedNames>,
    /// A bit for each directory in `names`, perhaps the same for two: most look-ups find nothing and write nothing. Of many
    /// names in a line of its own, which who leaves names does not move.
    dirs: D,
}

/// [`Part::dirs`], wherever it lies.
trait Word {
    fn word(&self) -> &AtomicU64;
}

impl Word for AtomicU64 {
    fn word(&self) -> &AtomicU64 {
        self
    }
}

impl Word for Line<AtomicU64> {
    fn word(&self) -> &AtomicU64 {
        self
    }
}

/// On a cache line of its own.
#[derive(Debug, Default)]
#[repr(align(64))]
struct SharedPart(Part<Few, AtomicU64>);
const _: () = assert!(braidfs_sync::CHECKED || size_of::<SharedPart>() == 64);

/// A name in a list. Who adds it has allocated it, and moves no other line than the part's.
#[derive(Debug)]
struct Node {
    dir: InodeNo,
    name: FileName,
    left: VacatedList,
    next: Option<Box<Node>>,
}

/// Names of which there are mostly few.
#[derive(Debug, Default)]
struct Few {
    list: Option<Box<Node>>,
    listed: u32,
    others: Option<Box<Names>>,
}

impl Default for VacatedNames {
    fn default() -> Self {
        let parts = (0..PARTS).map(|_| Part::default()).collect();
        Self { parts, shared: Line::default(), hasher: RandomState::default() }
    }
}

impl VacatedNames {
    fn part(&self, dir: InodeNo) -> &Part<Names, Line<AtomicU64>> {
        // directories that threads make are one after the other, or in table blocks of the threads' own
        &self.parts[((dir.0 ^ (dir.0 / u64::from(NODES_PER_BLOCK))) % PARTS) as usize]
    }

    fn shared_part<'p>(&self, parts: &'p [SharedPart], dir: InodeNo, name: &[u8]) -> &'p Part<Few, AtomicU64> {
        &parts[(self.hasher.hash_one((dir, name)) % SHARED_PARTS) as usize].0
    }

    /// An inode left `dir/name`. Who took it over from another one of its domain and left it again stands for both.
    pub fn add(&self, dir: InodeNo, name: &[u8], left: Vacated) {
        self.part(dir).add(dir, name, left);
    }

    /// [`Self::add`] of a directory that several threads change at the same time.
    pub fn add_shared(&self, dir: InodeNo, name: &[u8], left: Vacated) {
        let parts = self.shared.get_or_init(|| (0..SHARED_PARTS).map(|_| SharedPart::default()).collect());
        self.shared_part(parts, dir, name).add(dir, name, left);
    }

    /// Who left this name.
    pub fn get(&self, dir: InodeNo, name: &[u8]) -> VacatedList {
        let mut all = self.part(dir).get(dir, name);
        // which of both the directory was when they left may have changed since; who left this name did so under a lock that
        // the caller has
        if let Some(parts) = self.shared.get() {
            all.extend(self.shared_part(parts, dir, name).get(dir, name));
        }
        all
    }

    /// Everybody who left this directory and lives on.
    pub fn of_dir(&self, dir: InodeNo) -> Frontier {
        let mut all = self.part(dir).of_dir(dir);
        // whoever left it did so under a lock that the caller has had since, or asks again under it
        self.shared.get().into_iter().flatten().for_each(|p| all.merge(&p.0.of_dir(dir)));
        all
    }

    /// Forgets renames that are durable.
    pub fn prune(&self, durable: impl Fn(DomainId, TxId) -> bool) {
        self.parts.iter().for_each(|p| p.prune(&durable));
        self.shared.get().into_iter().flatten().for_each(|p| p.0.prune(&durable));
    }
}

impl<L: Left, D: Word> Part<L, D> {
    fn add(&self, dir: InodeNo, name: &[u8], left: Vacated) {
        // others see the bit once they have the lock
        let mut names = self.names.lock();
        names.add(dir, name, left);
        if !self.may_have(dir) {
            self.dirs.word().fetch_or(bit(dir), Ordering::Release);
        }
    }

    fn get(&self, dir: InodeNo, name: &[u8]) -> VacatedList {
        if !self.may_have(dir) {
            return VacatedList::new();
        }
        self.names.lock().get(dir, name).cloned().unwrap_or_default()
    }

    fn of_dir(&self, dir: InodeNo) -> Frontier {
        if !self.may_have(dir) {
            return Frontier::EMPTY;
        }
        let mut alive = Vec::new();
        self.names.lock().of_dir(dir, &mut |l| alive.extend(l.alive.then_some((l.domain, l.tx))));
        alive.into_iter().collect()
    }

    fn prune(&self, durable: &dyn Fn(DomainId, TxId) -> bool) {
        if self.dirs.word().load(Ordering::Acquire) == 0 {
            return;
        }
        let mut all = self.names.lock();
        Left::forget(&mut *all, durable);
        self.dirs.word().store(Left::dirs(&*all), Ordering::Release);
    }

    fn may_have(&self, dir: InodeNo) -> bool {
        self.dirs.word().load(Ordering::Acquire) & bit(dir) != 0
    }
}

/// One more left a name.
fn merge(all: &mut VacatedList, left: Vacated) {
    match all.iter_mut().find(|o| o.domain == left.domain) {
        Some(o) => {
            debug_assert!(o.tx <= left.tx, "{o:?}, then {left:?}");
            *o = Vacated { alive: left.alive || o.alive, ..left };
        }
        None => all.push(left),
    }
}

impl Left for Names {
    fn add(&mut self, dir: InodeNo, name: &[u8], left: Vacated) {
        let names = self.entry(dir).or_default();
        match names.get_mut(name) {
            Some(all) => merge(all, left),
            None => {
                names.insert(name.into(), smallvec![left]);
            }
        }
    }
    fn get(&self, dir: InodeNo, name: &[u8]) -> Option<&VacatedList> {
        Self::get(self, &dir)?.get(name)
    }
    fn of_dir(&self, dir: InodeNo, see: &mut dyn FnMut(Vacated)) {
        Self::get(self, &dir).into_iter().flat_map(|n| n.values()).flatten().copied().for_each(see);
    }
    fn forget(&mut self, durable: &dyn Fn(DomainId, TxId) -> bool) {
        self.retain(|_, names| {
            names.retain(|_, all| {
                all.retain(|l| !durable(l.domain, l.tx));
                !all.is_empty()
            });
            !names.is_empty()
        });
    }
    fn dirs(&self) -> u64 {
        self.keys().fold(0, |bits, dir| bits | bit(*dir))
    }
}

impl Few {
    fn nodes(&self) -> impl Iterator<Item = &Node> {
        std::iter::successors(self.list.as_deref(), |n| n.next.as_deref())
    }
}

impl Left for Few {
    fn add(&mut self, dir: InodeNo, name: &[u8], left: Vacated) {
        let mut node = self.list.as_deref_mut();
        while let Some(n) = node {
            if n.dir == dir && *n.name == *name {
                return merge(&mut n.left, left);
            }
            node = n.next.as_deref_mut();
        }
        let is_other = self.others.as_ref().is_some_and(|o| Left::get(&**o, dir, name).is_some());
        if is_other || self.listed == LISTED {
            return Left::add(&mut **self.others.get_or_insert_default(), dir, name, left);
        }
        self.listed += 1;
        let next = self.list.take();
        self.list = Some(Box::new(Node { dir, name: name.into(), left: smallvec![left], next }));
    }
    fn get(&self, dir: InodeNo, name: &[u8]) -> Option<&VacatedList> {
        let listed = self.nodes().find(|n| n.dir == dir && *n.name == *name).map(|n| &n.left);
        listed.or_else(|| Left::get(&**self.others.as_ref()?, dir, name))
    }
    fn of_dir(&self, dir: InodeNo, see: &mut dyn FnMut(Vacated)) {
        self.nodes().filter(|n| n.dir == dir).flat_map(|n| &n.left).copied().for_each(&mut *see);
        if let Some(others) = &self.others {
            Left::of_dir(&**others, dir, see);
        }
    }
    fn forget(&mut self, durable: &dyn Fn(DomainId, TxId) -> bool) {
        let mut next = self.list.take();
        self.listed = 0;
        while let Some(mut node) = next {
            next = node.next.take();
            node.left.retain(|l| !durable(l.domain, l.tx));
            if !node.left.is_empty() {
                node.next = self.list.take();
                self.list = Some(node);
                self.listed += 1;
            }
        }
        if let Some(others) = &mut self.others {
            Left::forget(&mut **others, durable);
        }
        self.others.take_if(|o| o.is_empty());
    }
    fn dirs(&self) -> u64 {
        self.nodes().fold(self.others.as_ref().map_or(0, |o| Left::dirs(&**o)), |bits, n| bits | bit(n.dir))
    }
}

/// The bit of a directory in [`Part::dirs`]. Those of one part are spread.
fn bit(dir: InodeNo) -> u64 {
    1 << (dir.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 58)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A list and the table behind it are as the table alone.
    #[test]
    fn few_as_many() {
        let (mut few, mut many) = (Few::default(), Names::default());
        let mut seed = 5u64;
        for round in 0..20_000u64 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let (dir, name) = (InodeNo(1 + (seed >> 40) % 3), format!("{}", (seed >> 33) % 7).into_bytes());
            let left =
                Vacated { domain: DomainId((seed >> 50) as u16 % 2), tx: TxId(round), alive: seed >> 60 & 1 == 1 };
            few.add(dir, &name, left);
            Left::add(&mut many, dir, &name, left);
            if round % 31 == 0 {
                // of one domain all but the last ones, of the other none
                let durable = |d: DomainId, t: TxId| d.0 == 0 && t.0 + 9 < round || t.0 + 40 < round;
                few.forget(&durable);
                Left::forget(&mut many, &durable);
                assert_eq!(few.listed as usize, few.nodes().count());
            }
            assert!(few.listed <= LISTED);
            assert_eq!(few.dirs(), Left::dirs(&many));
            for dir in (1..4).map(InodeNo) {
                let all = |l: &dyn Fn(&mut dyn FnMut(Vacated))| {
                    let mut all = Vec::new();
                    l(&mut |v| all.push((v.domain, v.tx, v.alive)));
                    all.sort_unstable();
                    all
                };
                assert_eq!(all(&|see| few.of_dir(dir, see)), all(&|see| Left::of_dir(&many, dir, see)));
                for name in 0..7 {
                    let name = format!("{name}").into_bytes();
                    assert_eq!(few.get(dir, &name), Left::get(&many, dir, &name));
                }
            }
        }
        assert!(few.others.is_some());
    }
}
