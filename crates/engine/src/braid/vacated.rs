//! Vacated names: those that inodes left by a rename or unlink which may not be durable yet.
//!
//! Until that is durable, a crash brings the inode back under its old name. Where the inode lives on by another name, a
//! newcomer to the name, or the end of the directory, must not become durable before it: of two inodes that claim a name
//! recovery keeps the later one, and the earlier would lose the only name that it durably has. Where the inode is gone,
//! an fsync of the newcomer makes that durable too: else the name could come back to it when the newcomer moves on.
//! Whoever takes a name asks here first; the rule is [`take_name`](super::rules::take_name).
//!
//! Names of directories that several threads change at the same time lie in a list of the thread's slot first: who leaves a name
//! there moves no line of others. Who looks for names has them put into the tables before, in a *round* ([`Lists`]): all lists
//! are emptied. So that not each look makes a round, a bucket knows the round in which names of it were left last, and some bits
//! of their hashes ([`Lately`]). What is said here of a name of such a directory is said with its bucket locked, or with the
//! directory for itself; so a look that needs a round finds all that was left before it.
//!
//! What is durable by now is forgotten, after each commit, by whoever adds the next name to the same table, or looks for one: the
//! committer would take a line for each name from the thread that left it, and that thread would take it back. The committer itself
//! does so where nobody has added any since the commit before, or where there are many. Who looks passes over what is durable.
//!
//! In the place of a name stands a hash of it, so that the tables are small: two names of a directory with the same hash are taken for
//! one, and whoever takes one of them waits for who left the other, too.
//!
//! Lock rank: leaf; round, then a list or a table.

use crate::braid::frontier::Frontier;
use crate::types::*;
use braidfs_format::geometry::NODES_PER_BLOCK;
pub use braidfs_sync::lately::Lately;
use braidfs_sync::lately::{Lists, Marks};
use braidfs_sync::slots::Line;
use braidfs_sync::{Mutex, MutexGuard, rank};
use foldhash::fast::RandomState;
use hashbrown::HashTable;
use smallvec::SmallVec;
use std::collections::HashMap;
use std::hash::BuildHasher;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering::Relaxed};

/// By directory.
type Names = HashMap<InodeNo, DirNames, RandomState>;

/// Who left one name, at most one inode of each domain: mostly one.
pub type VacatedList = SmallVec<[Vacated; 1]>;

/// Who left a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Vacated {
    /// Domain of the inode.
    pub domain: DomainId,
    /// Transaction in which the name was given up.
    pub tx: TxId,
    /// It lives on by another name, or is a directory that something moved out of.
    pub alive: bool,
}

/// The hash of a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct NameHash(u64);

/// The latest inode of a domain that left a name.
#[derive(Debug)]
struct Entry {
    /// From the highest bit on: what is kept of the name's hash, the domain, whether the inode is alive.
    key: u64,
    tx: TxId,
}

impl Entry {
    /// Bits of the key below the name.
    const BELOW: u32 = 1 + u16::BITS;

    fn new(name: NameHash, left: Vacated) -> Self {
        let key = name.0 >> Self::BELOW << Self::BELOW | u64::from(left.domain.0) << 1 | u64::from(left.alive);
        Self { key, tx: left.tx }
    }
    fn is_of(&self, name: NameHash) -> bool {
        (self.key ^ name.0) >> Self::BELOW == 0
    }
    fn vacated(&self) -> Vacated {
        Vacated { domain: DomainId((self.key >> 1) as u16), tx: self.tx, alive: self.key & 1 == 1 }
    }
    /// For the table that it is in.
    fn place(key: u64) -> u64 {
        (key >> Self::BELOW).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }
}

/// Who left names of one directory: an entry for each name and domain.
#[derive(Debug, Default)]
struct DirNames(HashTable<Entry>);

impl DirNames {
    /// Whether there is one entry more.
    fn add(&mut self, name: NameHash, left: Vacated) -> bool {
        let new = Entry::new(name, left);
        let place = Entry::place(new.key);
        if let Some(old) = self.0.find_mut(place, |e| (e.key ^ new.key) >> 1 == 0) {
            *old = Entry { key: old.key | new.key, tx: left.tx.max(old.tx) };
            return false;
        }
        if self.0.len() == self.0.capacity() && STRIDES.contains(&self.0.len()) {
            self.0.reserve(7 * self.0.len(), |e| Entry::place(e.key));
        }
        self.0.insert_unique(place, new, |e| Entry::place(e.key));
        true
    }
    fn get(&self, name: NameHash) -> VacatedList {
        self.0.iter_hash(Entry::place(name.0)).filter(|e| e.is_of(name)).map(Entry::vacated).collect()
    }
    fn iter(&self) -> impl Iterator<Item = Vacated> {
        self.0.iter().map(Entry::vacated)
    }
}

/// Parts of the table of names in directories that one thread has for itself, a power of two: so many that such directories of some
/// tens of threads mostly have one each.
const SHARDS: u64 = 512;
/// Parts of that of names in directories that several threads change.
const SHARED_SHARDS: u64 = 64;
/// So many names of a table the next thread that adds one forgets, at most: about half a megabyte.
const LATE_MAX: usize = 1 << 14;
/// The table of a directory of which so many names were left, a few at least, has room for eight times as many at once when it
/// grows: new memory costs lines that all threads write.
const STRIDES: std::ops::Range<usize> = 28..2048;

/// See the module.
#[derive(Debug, Default)]
pub struct VacatedNames {
    /// By hash of their directory; none before the first name, so that commits of who leaves none have nothing to look at.
    tables: OnceLock<Tables>,
    /// Names of directories that several threads change at the same time, by directory and name; so, too.
    shared: OnceLock<Box<[Shard]>>,
    /// Such names that were left lately.
    lately: Lists<(InodeNo, NameHash, Vacated), rank::VacatedLately, rank::VacatedRound>,
    /// How often the domain has committed: who adds a name looks.
    commits: Line<AtomicU32>,
    hasher: RandomState,
}

/// Of directories that one thread has for itself.
#[derive(Debug)]
struct Tables {
    shards: Box<[Shard]>,
    /// What [`Shard::added`] was at the last commit: for committers alone.
    seen: Box<[AtomicU32]>,
}

/// The names of some directories.
#[derive(Debug, Default)]
struct Shard {
    table: Mutex<Table, rank::VacatedNames>,
    /// How many were ever added; changed with the table locked.
    added: AtomicU32,
    /// How many there are; so, too.
    len: AtomicUsize,
    /// A bit for each directory in `names`, perhaps the same for two: most look-ups find nothing and write nothing. In a line of
    /// its own, which who leaves one more name of a directory does not move.
    dirs: Line<Marks>,
}

#[derive(Debug, Default)]
struct Table {
    names: Names,
    /// The number of the commit of which it has forgotten what is durable.
    commit: u32,
}

impl VacatedNames {
    fn new_shards(n: u64) -> Box<[Shard]> {
        (0..n).map(|_| Shard::default()).collect()
    }

    /// The part of the table that a directory has.
    fn shard(&self, dir: InodeNo) -> &Shard {
        let tables = self.tables.get_or_init(|| {
            let seen = (0..SHARDS).map(|_| AtomicU32::new(0)).collect();
            Tables { shards: Self::new_shards(SHARDS), seen }
        });
        &tables.shards[shard_of(dir)]
    }

    /// [`Self::shard`]; none before the first name.
    fn known_shard(&self, dir: InodeNo) -> Option<&Shard> {
        self.tables.get().map(|t| &t.shards[shard_of(dir)])
    }

    fn hash(&self, name: &[u8]) -> NameHash {
        NameHash(self.hasher.hash_one(name))
    }

    /// An inode left `dir/name`. Who took it over from another one of its domain and left it again stands for both.
    pub fn add(&self, dir: InodeNo, name: &[u8], left: Vacated, durable: impl Fn(DomainId, TxId) -> bool) {
        let shard = self.shard(dir);
        shard.add(&mut self.table_of(shard, durable).names, dir, self.hash(name), left);
    }

    /// A part's table, without what was durable at the last commit.
    fn table_of<'a>(&self, shard: &'a Shard, durable: impl Fn(DomainId, TxId) -> bool) -> MutexGuard<'a, Table> {
        let commit = self.commits.load(Relaxed);
        let mut table = shard.table.lock();
        if table.commit != commit {
            table.commit = commit;
            shard.forget(&mut table.names, durable);
        }
        table
    }

    /// [`Self::add`] of a directory that several threads change at the same time, by who has it for itself. Lists may have the
    /// name, too, from earlier: what comes of both is the same in either order.
    pub fn add_shared(&self, dir: InodeNo, name: &[u8], left: Vacated) {
        self.put_in_tables((dir, self.hash(name), left));
    }

    /// [`Self::add_shared`] by who has the name's bucket locked, which is to [`Lately::note`] the round.
    pub fn add_lately(&self, dir: InodeNo, name: &[u8], left: Vacated) -> u32 {
        self.lately.add(bit(dir), (dir, self.hash(name), left))
    }

    /// Puts one, as from a list, into the tables.
    fn put_in_tables(&self, (dir, name, left): (InodeNo, NameHash, Vacated)) {
        let shard = shared_shard(self.shared.get_or_init(|| Self::new_shards(SHARED_SHARDS)), dir, name);
        shard.add(&mut shard.table.lock().names, dir, name, left);
    }

    /// Who left this name. By who has the directory locked, or asks again then.
    pub fn get(&self, dir: InodeNo, name: &[u8], durable: impl Fn(DomainId, TxId) -> bool) -> VacatedList {
        self.lately.merge(bit(dir), |l| self.put_in_tables(l));
        self.in_tables(dir, name, durable)
    }

    /// [`Self::get`] of a name with `hash` whose bucket the caller has locked.
    pub fn get_lately(
        &self,
        dir: InodeNo,
        (name, hash): (&[u8], u64),
        lately: &mut Lately,
        durable: impl Fn(DomainId, TxId) -> bool,
    ) -> VacatedList {
        self.lately.merge_for(bit(dir), hash, lately, |l| self.put_in_tables(l));
        self.in_tables(dir, name, durable)
    }

    fn in_tables(&self, dir: InodeNo, name: &[u8], durable: impl Fn(DomainId, TxId) -> bool) -> VacatedList {
        // who left this name did so under a lock that the caller has, and made the table before
        let has_any = |s: &&Shard| s.dirs.has(bit(dir));
        let (own, shared) = (self.known_shard(dir).filter(has_any), self.shared.get());
        if own.is_none() && shared.is_none() {
            return VacatedList::new();
        }
        let name = self.hash(name);
        let mut all = own.map(|s| self.table_of(s, durable).get(dir, name)).unwrap_or_default();
        // which of both the directory was when they left may have changed since
        if let Some(shared) = shared {
            let shard = Some(shared_shard(shared, dir, name)).filter(has_any);
            all.extend(shard.map(|s| s.table.lock().get(dir, name)).unwrap_or_default());
        }
        all
    }

    /// Everybody who left this directory and lives on.
    pub fn of_dir(&self, dir: InodeNo) -> Frontier {
        // whoever left it did so under a lock that the caller has had since, or asks again under it
        self.lately.merge(bit(dir), |l| self.put_in_tables(l));
        let mut all = self.known_shard(dir).map(|s| s.of_dir(dir)).unwrap_or_default();
        self.shared.get().into_iter().flatten().for_each(|p| all.merge(&p.of_dir(dir)));
        all
    }

    /// After a commit, by who made it: forgets renames that are durable, or has the next thread do so that adds a name.
    pub fn prune(&self, durable: impl Fn(DomainId, TxId) -> bool) {
        self.commits.fetch_add(1, Relaxed);
        let tables = self.tables.get().into_iter().flat_map(|t| t.shards.iter().zip(&t.seen));
        for (shard, seen) in tables.filter(|(shard, _)| !shard.dirs.none()) {
            let added = shard.added.load(Relaxed);
            if seen.swap(added, Relaxed) == added || shard.len.load(Relaxed) > LATE_MAX {
                shard.prune(&durable);
            }
        }
        self.shared.get().into_iter().flatten().for_each(|p| p.prune(&durable));
        self.lately.retain(|(_, _, l)| !durable(l.domain, l.tx));
    }
}

impl Table {
    fn get(&self, dir: InodeNo, name: NameHash) -> VacatedList {
        self.names.get(&dir).map(|n| n.get(name)).unwrap_or_default()
    }
}

impl Shard {
    /// `all`: its table.
    fn add(&self, all: &mut Names, dir: InodeNo, name: NameHash, left: Vacated) {
        if all.entry(dir).or_default().add(name, left) {
            self.len.store(self.len.load(Relaxed) + 1, Relaxed);
        }
        self.added.store(self.added.load(Relaxed).wrapping_add(1), Relaxed);
        self.dirs.add(bit(dir));
    }

    fn of_dir(&self, dir: InodeNo) -> Frontier {
        if !self.dirs.has(bit(dir)) {
            return Frontier::EMPTY;
        }
        let all = self.table.lock();
        let left = all.names.get(&dir).map(|n| n.iter().filter(|l| l.alive).map(|l| (l.domain, l.tx)).collect());
        left.unwrap_or(Frontier::EMPTY)
    }

    fn prune(&self, durable: impl Fn(DomainId, TxId) -> bool) {
        if !self.dirs.none() {
            self.forget(&mut self.table.lock().names, durable);
        }
    }

    /// Forgets what is durable of its table, `all`.
    fn forget(&self, all: &mut Names, durable: impl Fn(DomainId, TxId) -> bool) {
        all.retain(|_, names| {
            names.0.retain(|e| !durable(e.vacated().domain, e.tx));
            !names.0.is_empty()
        });
        self.len.store(all.values().map(|n| n.0.len()).sum(), Relaxed);
        self.dirs.are(all.keys().fold(0, |bits, dir| bits | bit(*dir)));
    }
}

/// The part of the table that a directory has. Directories that threads make are one after the other, or each is in a table block
/// of its thread's own, so many blocks behind the last one as its files take, sometimes behind another thread's files: multiples of
/// the golden ratio lie far from each other, and those of another odd number elsewhere.
fn shard_of(dir: InodeNo) -> usize {
    let (block, slot) = (dir.0 / u64::from(NODES_PER_BLOCK), dir.0 % u64::from(NODES_PER_BLOCK));
    let spread = block.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(slot.wrapping_mul(0xd1b5_4a32_d192_ed03));
    (spread >> (u64::BITS - SHARDS.ilog2())) as usize
}

/// The part of names in `shared`, all of them, that one is in.
fn shared_shard(shared: &[Shard], dir: InodeNo, name: NameHash) -> &Shard {
    let spread = (name.0 ^ dir.0).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    &shared[(spread >> (u64::BITS - SHARED_SHARDS.ilog2())) as usize]
}

/// The mark of a directory, in [`Shard::dirs`] and of lists. Those of one part are spread.
fn bit(dir: InodeNo) -> u64 {
    1 << (dir.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 58)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;
    use std::sync::atomic::AtomicU64;

    const DIR: InodeNo = InodeNo(7);

    fn name(n: u64) -> Vec<u8> {
        n.to_string().into_bytes()
    }
    fn hash(n: u64) -> u64 {
        n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 1
    }

    /// Threads leave names of buckets, and look for them: who looks with the bucket locked finds whoever was the last to leave,
    /// in whatever list that is, and while others make rounds.
    #[test]
    fn who_looks_finds_what_was_left_before() {
        let all = VacatedNames::default();
        let tx = AtomicU64::new(1);
        // of each bucket what it knows, and when each name was left last
        let bucket = || std::sync::Mutex::new(([0u64; 16], Lately::UNKNOWN));
        let buckets: Vec<_> = (0..3).map(|_| bucket()).collect();
        let start = Barrier::new(4);
        std::thread::scope(|s| {
            for thread in 0..4u64 {
                let (all, tx, buckets, start) = (&all, &tx, &buckets, &start);
                s.spawn(move || {
                    let mut seed = thread + 1;
                    start.wait();
                    for round in 0..20_000 {
                        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                        let (b, n) = ((seed >> 40) as usize % 3, (seed >> 50) as usize % 16);
                        let id = (b * 16 + n) as u64;
                        let mut bucket = buckets[b].lock().unwrap();
                        let (left, lately) = &mut *bucket;
                        let found = match seed >> 33 & 7 {
                            0..3 => all.get_lately(DIR, (&name(id), hash(id)), lately, |_, _| false),
                            // as who has the directory for itself
                            3 if round % 16 == 0 => all.get(DIR, &name(id), |_, _| false),
                            // it is another one's
                            4 if round % 16 == 0 => {
                                *lately = Lately::UNKNOWN;
                                continue;
                            }
                            _ => {
                                // taken before it is left again
                                all.get_lately(DIR, (&name(id), hash(id)), lately, |_, _| false);
                                left[n] = tx.fetch_add(1, Relaxed);
                                let by = Vacated { domain: DomainId(0), tx: TxId(left[n]), alive: n % 2 == 0 };
                                let round = all.add_lately(DIR, &name(id), by);
                                lately.note(hash(id), round);
                                continue;
                            }
                        };
                        let last = found.first().map_or(0, |v| v.tx.0);
                        assert_eq!(last, left[n], "name {n} of bucket {b}");
                    }
                });
            }
        });
        let left: u64 = buckets.iter().flat_map(|b| b.lock().unwrap().0).filter(|tx| *tx > 0).count() as u64;
        let alive = |all: &VacatedNames| all.of_dir(DIR).any(|_, _| true);
        assert!(left > 40 && alive(&all));
        all.prune(|_, _| true);
        assert!(!alive(&all) && !all.get(DIR, &name(3), |_, _| true).iter().any(|_| true));
    }

    #[test]
    fn an_entry_has_all_that_is_said_of_a_name() {
        let mut names = DirNames::default();
        let of = |domain, tx, alive| Vacated { domain: DomainId(domain), tx: TxId(tx), alive };
        let (a, b) = (NameHash(u64::MAX), NameHash(0));
        assert!(names.add(a, of(u16::MAX, u64::MAX, true)) && names.add(b, of(u16::MAX, 1, false)));
        assert!(names.add(a, of(0, 5, false)) && !names.add(a, of(0, 4, true)) && !names.add(a, of(0, 6, false)));
        let mut found = names.get(a);
        found.sort_by_key(|v| v.domain);
        assert_eq!(found[..], [of(0, 6, true), of(u16::MAX, u64::MAX, true)]);
        assert_eq!(names.get(b)[..], [of(u16::MAX, 1, false)]);
        // of hashes that differ where an entry has other things, one name is taken for the other
        assert_eq!(names.get(NameHash(1 << 16))[..], names.get(b)[..]);
        assert!(names.get(NameHash(1 << 17)).is_empty());
        assert_eq!(names.iter().count(), 3);
    }

    /// 32 threads, each with a directory and up to 3,000 files, made one thread after the other or side by side.
    #[test]
    fn directories_of_threads_have_a_part_each() {
        let block = u64::from(NODES_PER_BLOCK);
        let distinct = |dirs: &mut dyn Iterator<Item = u64>| {
            dirs.map(|dir| shard_of(InodeNo(dir))).collect::<std::collections::BTreeSet<_>>().len()
        };
        assert_eq!(distinct(&mut (0..32).map(|t| 2 + t)), 32);
        for blocks in 1..13 {
            assert!(distinct(&mut (0..32).map(|t| blocks * block * t)) >= 31, "{blocks} blocks");
        }
    }

    /// The table of a directory of which many names are left takes new memory seldom.
    #[test]
    fn a_table_of_names_grows_in_long_strides() {
        let all = VacatedNames::default();
        let left = Vacated { domain: DomainId(0), tx: TxId(1), alive: true };
        let room = || all.shard(DIR).table.lock().names.get(&DIR).map_or(0, |n| n.0.capacity());
        let mut rooms = std::collections::BTreeSet::new();
        for n in 0..2000 {
            all.add(DIR, &name(n), left, |_, _| false);
            rooms.insert(room());
            assert!(room() <= 32 * (n as usize + 1), "{} for {n}", room());
        }
        assert!(rooms.range(29..).count() <= 3, "{rooms:?}");
    }

    /// Names of directories that one thread changes: a commit leaves them to who adds the next one, and forgets them itself where
    /// nobody does, or where they are many.
    #[test]
    fn what_is_durable_is_forgotten_by_who_adds_next_or_by_the_next_commit() {
        let all = VacatedNames::default();
        let left = |tx| Vacated { domain: DomainId(0), tx: TxId(tx), alive: true };
        let upto = |last: u64| move |_: DomainId, tx: TxId| tx.0 <= last;
        let kept = |all: &VacatedNames| all.shard(DIR).table.lock().names.get(&DIR).map_or(0, |n| n.0.len());
        let counted = |all: &VacatedNames| all.shard(DIR).len.load(Relaxed);
        all.add(DIR, &name(1), left(1), upto(0));
        all.add(DIR, &name(2), left(2), upto(0));
        all.prune(upto(1));
        assert_eq!((kept(&all), counted(&all)), (2, 2), "added since the commit before");
        all.add(DIR, &name(3), left(2), upto(1));
        assert_eq!((kept(&all), counted(&all)), (2, 2));
        let found = |n| all.get(DIR, &name(n), upto(1)).len();
        assert_eq!((found(1), found(2)), (0, 1));
        all.prune(upto(2));
        assert_eq!(kept(&all), 2);
        all.prune(upto(2));
        assert_eq!((kept(&all), counted(&all)), (0, 0), "nobody came");
        all.add(DIR, &name(4), left(3), upto(2));
        all.prune(upto(3));
        assert_eq!(kept(&all), 1);
        assert!(all.get(DIR, &name(4), upto(3)).is_empty());
        assert_eq!((kept(&all), counted(&all)), (0, 0), "by who looked");
        assert!(all.of_dir(DIR).is_empty() && all.shard(DIR).dirs.none());
        (0..=LATE_MAX as u64).for_each(|n| all.add(DIR, &name(n), left(4), upto(3)));
        all.prune(upto(4));
        assert_eq!((kept(&all), counted(&all)), (0, 0), "many");
    }
}
