//! Page frames by NUMA node: for each node lists and a pool of chunks of its own, whose memory the kernel is asked to take from
//! there.
//!
//! A node's pool has a share: the part of the budgets of mounted volumes that the node has of the machine's memory. Where that
//! is in use, frames come from the nearest node that has some of its share left, and where none has, from the node's own pool
//! beyond it: that there is not more memory in use than a volume may, who counts its pages sees to, as with one node. A frame
//! goes back to the pool that its chunk is of.
//!
//! The pools are of the process, as those of no node are: several volumes share them, and frames outlive volumes.
//! Locks as there: a list, then the pool, of one node at a time.

use super::pool::{self, Bytes, CHUNK, FRAMES, Free, Home, LISTS, List, Pool};
use crate::numa::{Binder, Node};
use crate::types::thread_slot;
use braidfs_format::BLOCK_BYTES;
use braidfs_sync::{ProcessMutex, rank};
use crossbeam::utils::CachePadded;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

/// Pools at most. Nodes beyond that have none: their frames lie where they are first touched.
const POOLS: usize = 128;

/// A node's frames.
struct NodePool {
    lists: Box<[List]>,
    pool: ProcessMutex<Pool, rank::FramePool>,
    /// Those of the other nodes, the nearest first.
    others: Vec<Home>,
}

static NODES: [OnceLock<NodePool>; POOLS] = [const { OnceLock::new() }; POOLS];
/// Set before the first of them has a frame; on a line of its own, which nobody writes again.
static ARE_THERE: CachePadded<AtomicBool> = CachePadded::new(AtomicBool::new(false));
/// Which of them belong together.
static SETS: ProcessMutex<Vec<Set>, rank::Unranked> = ProcessMutex::new(Vec::new());

/// The pools of a machine.
struct Set {
    nodes: Vec<Node>,
    binder: Arc<dyn Binder>,
    homes: Vec<Home>,
}

/// Whether any node has a pool.
#[inline]
pub(super) fn are_there() -> bool {
    // who has a frame of one learnt of it from who made the pool
    ARE_THERE.load(Relaxed)
}

/// [`super::trim`] of all nodes.
pub(super) fn trim(now: Instant) {
    if are_there() {
        NODES.iter().map_while(OnceLock::get).for_each(|n| n.pool.lock().trim(now));
    }
}

/// [`super::pool::give_all`] of all nodes.
pub(super) fn give_all() {
    if are_there() {
        NODES.iter().map_while(OnceLock::get).for_each(|n| pool::give_all(&n.lists, &n.pool));
    }
}

impl Home {
    #[inline]
    fn pool(self) -> Option<&'static NodePool> {
        NODES.get(usize::from(self.0).checked_sub(1)?)?.get()
    }
    pub(super) fn lists_and_pool(self) -> Option<(&'static [List], &'static ProcessMutex<Pool, rank::FramePool>)> {
        self.pool().map(|n| (&*n.lists, &n.pool))
    }
    /// A frame of the node, or of another one where its share is used up; `None` of no node, and where there is no memory.
    #[inline]
    pub(super) fn take(self) -> Option<NonNull<Bytes>> {
        self.pool()?.take()
    }
    /// Frames of the pool that somebody has.
    #[cfg(test)]
    pub fn in_use(self) -> usize {
        let Some(n) = self.pool() else { return 0 };
        let listed: usize = n.lists.iter().map(|l| l.lock().len()).sum();
        let pool = n.pool.lock();
        pool.chunks.len() * FRAMES - pool.chunks.values().map(|c| c.count).sum::<usize>() - listed
    }
    /// The node's number.
    #[cfg(test)]
    pub fn node(self) -> Option<u32> {
        self.pool()?.pool.lock().node()
    }
}

impl NodePool {
    fn take(&self) -> Option<NonNull<Bytes>> {
        let others = || self.others.iter().filter_map(|h| h.pool()?.take_of(false)).next();
        self.take_of(false).or_else(others).or_else(|| self.take_of(true))
    }

    /// A frame of this node; a new chunk beyond its share only with `beyond`.
    fn take_of(&self, beyond: bool) -> Option<NonNull<Bytes>> {
        let mut list = self.lists[thread_slot(LISTS)].lock();
        if list.is_empty() {
            let mut pool = self.pool.lock();
            if beyond || !pool.is_used_up() {
                pool.take(&mut list);
            }
        }
        list.pop().map(Free::begin)
    }
}

/// A volume's use of the nodes' pools.
#[derive(Debug)]
pub struct Homes {
    homes: Vec<Home>,
    /// What each pool's share has grown by, chunks.
    shares: Vec<usize>,
}

impl Homes {
    /// The pools of these nodes, made where this machine had none yet; for a volume that may have `budget` bytes of pages.
    pub fn new(nodes: &[Node], binder: &Arc<dyn Binder>, budget: u64) -> Self {
        let homes = homes(nodes, binder);
        let all: u128 = nodes.iter().map(|n| u128::from(n.bytes)).sum();
        let chunk = (FRAMES * BLOCK_BYTES) as u128;
        let share = |n: &Node| (u128::from(budget) * u128::from(n.bytes)).div_ceil(all.max(1) * chunk);
        // no more than addresses have room for
        let shares: Vec<usize> =
            nodes.iter().map(|n| share(n).min((usize::MAX / CHUNK) as u128 / 1024) as usize).collect();
        let new = Self { homes, shares };
        new.each(|pool, share| pool.share += share);
        new
    }

    /// That of the node at this place.
    pub fn of(&self, place: usize) -> Home {
        self.homes.get(place).copied().unwrap_or(Home::ANYWHERE)
    }

    fn each(&self, change: impl Fn(&mut Pool, usize)) {
        for (home, share) in self.homes.iter().zip(&self.shares) {
            if let Some(n) = home.pool() {
                change(&mut n.pool.lock(), *share);
            }
        }
    }
}

impl Drop for Homes {
    fn drop(&mut self) {
        self.each(|pool, share| pool.share -= share);
    }
}

fn homes(nodes: &[Node], binder: &Arc<dyn Binder>) -> Vec<Home> {
    let mut sets = SETS.lock();
    if let Some(s) = sets.iter().find(|s| s.nodes == nodes && Arc::ptr_eq(&s.binder, binder)) {
        return s.homes.clone();
    }
    let first = NODES.iter().take_while(|n| n.get().is_some()).count();
    let home = |place: usize| if first + place < POOLS { Home((first + place + 1) as u8) } else { Home::ANYWHERE };
    let homes: Vec<Home> = (0..nodes.len()).map(home).collect();
    ARE_THERE.store(true, Relaxed);
    for (n, home) in nodes.iter().zip(&homes) {
        let Some(place) = usize::from(home.0).checked_sub(1) else { break };
        let pool = Pool::of_node(*home, n.number, binder.clone());
        let made = NodePool {
            lists: std::iter::repeat_with(List::default).take(LISTS).collect(),
            pool: ProcessMutex::new(pool),
            others: n.others.iter().filter_map(|i| homes.get(*i)).copied().filter(|h| *h != Home::ANYWHERE).collect(),
        };
        // made under the lock of `sets`
        let _ = NODES[place].set(made);
    }
    sets.push(Set { nodes: nodes.to_vec(), binder: binder.clone(), homes: homes.clone() });
    homes
}

#[cfg(test)]
mod tests;
