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
//! Lock rank: leaf; round, then a list or a table.

use crate::braid::frontier::Frontier;
use crate::types::*;
use braidfs_format::geometry::NODES_PER_BLOCK;
use braidfs_format::name::FileName;
pub use braidfs_sync::lately::Lately;
use braidfs_sync::lately::{Lists, Marks};
use braidfs_sync::slots::Line;
use braidfs_sync::{Mutex, rank};
use foldhash::fast::RandomState;
use smallvec::{SmallVec, smallvec};
use std::collections::HashMap;
use std::hash::BuildHasher;
use std::sync::atomic::{AtomicBool, Ordering};

/// By directory, then by name: the latest inode of each domain that left it.
type Names = HashMap<InodeNo, HashMap<FileName, VacatedList, RandomState>, RandomState>;

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

/// Parts of each table, a power of two. Directories made one after the other have one each.
const SHARDS: u64 = 64;

/// See the module.
#[derive(Debug)]
pub struct VacatedNames {
    /// By hash of their directory.
    shards: Box<[Shard]>,
    /// Names of directories that several threads change at the same time, by directory and name.
    shared: Box<[Shard]>,
    /// Such names that were left lately.
    lately: Lists<(InodeNo, FileName, Vacated), rank::VacatedLately, rank::VacatedRound>,
    /// Whether anything was ever put into `shared`.
    any_shared: AtomicBool,
    hasher: RandomState,
}

/// The names of some directories.
#[derive(Debug, Default)]
struct Shard {
    names: Mutex<Names, rank::VacatedNames>,
    /// A bit for each directory in `names`, perhaps the same for two: most look-ups find nothing and write nothing. In a line of
    /// its own, which who leaves one more name of a directory does not move.
    dirs: Line<Marks>,
}

impl Default for VacatedNames {
    fn default() -> Self {
        let shards = || (0..SHARDS).map(|_| Shard::default()).collect();
        Self {
            shards: shards(),
            shared: shards(),
            lately: Lists::default(),
            any_shared: AtomicBool::new(false),
            hasher: RandomState::default(),
        }
    }
}

impl VacatedNames {
    fn shard(&self, dir: InodeNo) -> &Shard {
        // directories that threads make are one after the other, or in table blocks of the threads' own
        &self.shards[((dir.0 ^ (dir.0 / u64::from(NODES_PER_BLOCK))) % SHARDS) as usize]
    }

    fn shared_shard(&self, dir: InodeNo, name: &[u8]) -> &Shard {
        &self.shared[(self.hasher.hash_one((dir, name)) % SHARDS) as usize]
    }

    /// An inode left `dir/name`. Who took it over from another one of its domain and left it again stands for both.
    pub fn add(&self, dir: InodeNo, name: &[u8], left: Vacated) {
        self.shard(dir).add(dir, name, left);
    }

    /// [`Self::add`] of a directory that several threads change at the same time, by who has it for itself. Lists may have the
    /// name, too, from earlier: what comes of both is the same in either order.
    pub fn add_shared(&self, dir: InodeNo, name: &[u8], left: Vacated) {
        if !self.any_shared.load(Ordering::Relaxed) {
            self.any_shared.store(true, Ordering::Relaxed);
        }
        self.shared_shard(dir, name).add(dir, name, left);
    }

    /// [`Self::add_shared`] by who has the name's bucket locked, which is to [`Lately::note`] the round.
    pub fn add_lately(&self, dir: InodeNo, name: &[u8], left: Vacated) -> u32 {
        self.lately.add(bit(dir), (dir, name.into(), left))
    }

    /// Puts one from a list into the tables.
    fn put_in_tables(&self, (dir, name, left): (InodeNo, FileName, Vacated)) {
        self.add_shared(dir, &name, left);
    }

    /// Who left this name. By who has the directory locked, or asks again then.
    pub fn get(&self, dir: InodeNo, name: &[u8]) -> VacatedList {
        self.lately.merge(bit(dir), |l| self.put_in_tables(l));
        self.in_tables(dir, name)
    }

    /// [`Self::get`] of a name with `hash` whose bucket the caller has locked.
    pub fn get_lately(&self, dir: InodeNo, name: &[u8], hash: u64, lately: &mut Lately) -> VacatedList {
        self.lately.merge_for(bit(dir), hash, lately, |l| self.put_in_tables(l));
        self.in_tables(dir, name)
    }

    fn in_tables(&self, dir: InodeNo, name: &[u8]) -> VacatedList {
        let mut all = self.shard(dir).get(dir, name);
        // which of both the directory was when they left may have changed since; who left this name did so under a lock that
        // the caller has
        if self.any_shared.load(Ordering::Relaxed) {
            all.extend(self.shared_shard(dir, name).get(dir, name));
        }
        all
    }

    /// Everybody who left this directory and lives on.
    pub fn of_dir(&self, dir: InodeNo) -> Frontier {
        // whoever left it did so under a lock that the caller has had since, or asks again under it
        self.lately.merge(bit(dir), |l| self.put_in_tables(l));
        let mut all = self.shard(dir).of_dir(dir);
        if self.any_shared.load(Ordering::Relaxed) {
            self.shared.iter().for_each(|p| all.merge(&p.of_dir(dir)));
        }
        all
    }

    /// Forgets renames that are durable.
    pub fn prune(&self, durable: impl Fn(DomainId, TxId) -> bool) {
        self.shards.iter().chain(&self.shared).for_each(|p| p.prune(&durable));
        self.lately.retain(|(_, _, l)| !durable(l.domain, l.tx));
    }
}

impl Shard {
    fn add(&self, dir: InodeNo, name: &[u8], left: Vacated) {
        let mut all = self.names.lock();
        let names = all.entry(dir).or_default();
        match names.get_mut(name) {
            Some(old) => match old.iter_mut().find(|o| o.domain == left.domain) {
                Some(o) => {
                    *o = Vacated { alive: left.alive || o.alive, tx: left.tx.max(o.tx), ..left };
                }
                None => old.push(left),
            },
            None => {
                names.insert(name.into(), smallvec![left]);
            }
        }
        self.dirs.add(bit(dir));
    }

    fn get(&self, dir: InodeNo, name: &[u8]) -> VacatedList {
        if !self.dirs.has(bit(dir)) {
            return VacatedList::new();
        }
        self.names.lock().get(&dir).and_then(|n| n.get(name)).cloned().unwrap_or_default()
    }

    fn of_dir(&self, dir: InodeNo) -> Frontier {
        if !self.dirs.has(bit(dir)) {
            return Frontier::EMPTY;
        }
        let names = self.names.lock();
        let left =
            names.get(&dir).map(|n| n.values().flatten().filter(|l| l.alive).map(|l| (l.domain, l.tx)).collect());
        left.unwrap_or(Frontier::EMPTY)
    }

    fn prune(&self, durable: impl Fn(DomainId, TxId) -> bool) {
        if self.dirs.none() {
            return;
        }
        let mut all = self.names.lock();
        all.retain(|_, names| {
            names.retain(|_, all| {
                all.retain(|l| !durable(l.domain, l.tx));
                !all.is_empty()
            });
            !names.is_empty()
        });
        self.dirs.are(all.keys().fold(0, |bits, dir| bits | bit(*dir)));
    }
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
                            0..3 => all.get_lately(DIR, &name(id), hash(id), lately),
                            // as who has the directory for itself
                            3 if round % 16 == 0 => all.get(DIR, &name(id)),
                            // it is another one's
                            4 if round % 16 == 0 => {
                                *lately = Lately::UNKNOWN;
                                continue;
                            }
                            _ => {
                                // taken before it is left again
                                all.get_lately(DIR, &name(id), hash(id), lately);
                                left[n] = tx.fetch_add(1, Ordering::Relaxed);
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
        assert!(!alive(&all) && !all.get(DIR, &name(3)).iter().any(|_| true));
    }
}
