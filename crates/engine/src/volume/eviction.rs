//! The cache's budget: who goes over it gives pages, cells and names of directories back. Dirty pages that are in the way are
//! written first, as `write_back.rs` says.
//!
//! Which pages and cells go, `cell/cache.rs` chooses (second chance), in each domain by itself. How much of each domain: as much
//! as it has beyond its floor, in proportion (all floors together are a part of the cache at most); and of one that is over its
//! own ceiling, what is too much (bladefs, section 2: each partition has memory of its own).

use super::MountedVolume;
use crate::domain::Domain;
use crate::domain::ceiling::Taken;
use crate::types::{CacheUse, InodeNo};
use crate::volume::Volume;

/// What the domains hold of the cache, as of now.
pub(super) struct Held {
    /// Of the whole cache, bytes.
    pub budget: u64,
    /// Of each domain.
    pub taken: Vec<Taken>,
    /// What others leave each domain.
    pub floors: Vec<u64>,
    /// Bytes of tables, as far as they count.
    pub tables: u64,
    /// Bytes of all.
    pub used: u64,
}

impl Held {
    pub fn of(m: &MountedVolume) -> Self {
        let budget = m.cache_budget();
        let taken: Vec<Taken> = m.domains.iter().map(|d| Taken::of(d)).collect();
        // tables have limits of their own, and nothing here makes them smaller
        let tables: u64 = m.domains.iter().map(|d| d.space.table_bytes() + d.nodes.memory_bytes()).sum();
        let tables = tables.min(budget / 4);
        let floors = floors_within(m.domains.iter().map(|d| d.memory.floor()), kept_most(budget, tables));
        Self { budget, used: taken.iter().map(Taken::bytes).sum::<u64>() + tables, taken, floors, tables }
    }

    /// Bytes of which somebody who makes room leaves no more.
    pub fn goal(&self) -> u64 {
        goal_of(self.budget)
    }
}

/// As [`Held::goal`], of a cache of so many bytes.
fn goal_of(budget: u64) -> u64 {
    budget - budget / 8
}

/// What others leave all domains together at most, of a cache of so many bytes in which `tables` are: where that was all that who
/// makes room leaves, nobody would give anything back, and who has no floor would be left with nothing.
pub(super) fn kept_most(budget: u64, tables: u64) -> u64 {
    goal_of(budget).saturating_sub(tables) / 4 * 3
}

/// Floors as they hold: where all together are above `most`, each is its part of that.
fn floors_within(floors: impl Iterator<Item = u64>, most: u64) -> Vec<u64> {
    let floors: Vec<u64> = floors.collect();
    let all: u128 = floors.iter().map(|f| u128::from(*f)).sum();
    let most = u128::from(most);
    if all <= most {
        return floors;
    }
    floors.into_iter().map(|f| (u128::from(f) * most / all) as u64).collect()
}

impl Volume {
    /// What the cache holds, and what it was good for.
    pub fn cache_use(&self) -> CacheUse {
        let i = self.mounted();
        let mut all = CacheUse { budget: i.cache_budget(), ..CacheUse::default() };
        for d in &i.domains {
            let (hits, misses) = d.memory.hits_and_misses();
            all.data += d.memory.pages() * 4096;
            all.dirty += d.memory.dirty() * 4096;
            all.index += d.memory.index_bytes() + d.memory.attached();
            all.pinned += d.memory.pinned() * 4096;
            all.hits += hits;
            all.misses += misses;
        }
        all
    }
}

impl MountedVolume {
    pub(crate) fn cache_budget(&self) -> u64 {
        self.shared.options.cache_bytes
    }

    /// Pages of all domains that are not written yet.
    pub(crate) fn dirty_pages(&self) -> u64 {
        self.domains.iter().map(|d| d.memory.dirty()).sum()
    }

    /// Gives memory back where `d`, which the caller has used, is over its ceiling, or the cache over its budget. Cheap where
    /// they are not.
    pub(crate) fn maybe_evict(&self, d: &Domain) {
        if d.memory.exceeds_ceiling(|| d.cell_bytes()) {
            d.keep_to_ceiling(true);
        }
        if !self.shared.looks.is_due() {
            return;
        }
        let bytes: u64 =
            self.domains.iter().map(|d| (d.memory.pages() + d.memory.pinned()) * 4096 + d.memory.index_bytes()).sum();
        self.shared.looks.saw(self.dirty_pages(), bytes);
        if bytes > self.cache_budget() {
            self.write_back_for(d);
            if let Some(_one) = self.evicting.try_lock() {
                self.evict();
            }
        }
    }

    /// [`Self::maybe_evict`] for who has read directory `dir`.
    pub(crate) fn maybe_evict_of(&self, dir: InodeNo) {
        if let Some(d) = self.domain_of(dir) {
            self.maybe_evict(d);
        }
    }

    /// The background's look at memory: pages and cells.
    pub(crate) fn balance_memory(&self) {
        self.domains.iter().for_each(|d| d.keep_to_ceiling(true));
        self.write_back();
        let _one = self.evicting.lock();
        self.evict();
    }

    /// What has no need to wait of [`Self::balance_memory`]: nothing is written, and no gate is entered.
    pub(crate) fn keep_to_budget(&self) {
        self.domains.iter().for_each(|d| d.drop_beyond_ceiling());
        if let Some(_one) = self.evicting.try_lock() {
            self.evict();
        }
    }

    fn evict(&self) {
        let held = Held::of(self);
        if held.used <= held.budget {
            return;
        }
        let (goal, taken) = (held.goal(), &held.taken);
        // Domains that have more than what is theirs, and how much more.
        let all = || self.domains.iter().zip(taken).zip(&held.floors);
        let with = || all().map(|((d, t), f)| (d, t, t.bytes().saturating_sub(*f))).filter(|(.., more)| *more > 0);
        let over = held.used - goal;
        let all: u64 = with().map(|(.., more)| more).sum();
        let is_many = taken.iter().map(|t| t.cell_bytes).sum::<u64>() > goal / 2;
        for (d, t, more) in with() {
            let share = u128::from(over) * u128::from(more) / u128::from(all);
            d.evict(t.part((share as u64).min(more), is_many));
        }
    }
}

#[cfg(test)]
mod tests;
