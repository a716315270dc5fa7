//! The segment cleaner: empties segments whose blocks are mostly dead, by having the others written elsewhere.
//!
//! [`Space::victim`](crate::space::Space::victim) chooses the segment (greedy or by cost and benefit). Its live blocks become
//! dirty, so that the next flush or commit gives them other places, in a log for what is cold; only what is still the newest moves.
//!
//! How much is cleaned, and at which price, follows from the free segments ([`Pace`]): it begins early, with what costs
//! next to nothing, and takes more and fuller segments the fewer there are. What is fuller than that is left to the logs,
//! which recycle its slack: that moves nothing, and costs runs of blocks instead. All victims of one look are moved by one commit.
//! While half of the free segments that there shall be are there, it takes no more of the devices than a part of what others
//! leave ([`share`]).

pub(super) mod share;

use super::{MountedVolume, Volume};
use crate::cell::{Body, Cell, State};
use crate::domain::Domain;
use crate::error::{Error, Result};
use crate::planted::{Bug, planted};
use crate::space::cleaning::{AT_ONCE, Choice};
use crate::types::*;
use crate::volume::operation::Op;
use braidfs_format::BLOCK_BYTES;
use braidfs_format::geometry::SEGMENT_BLOCKS;
use braidfs_format::group::Owner;
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Inodes, each with the node of a record of theirs.
type LiveRecords = Vec<(Arc<Cell>, NodeId)>;

/// Free segments that a domain shall have, of all that it has one in so many; at least [`LEAST`], at most [`MOST`].
const FREE_PART: u64 = 16;
const LEAST: u64 = 4;
const MOST: u64 = 64;
/// Segments cleaned in one look at most.
const SEGMENTS_MAX: u64 = AT_ONCE as u64;
/// Share of valid blocks, in percent, up to which a segment is moved where no free one is left. It costs 0.4 blocks per block that
/// it gains; with overwrites all over a file, dearer ones cost more than all the logs save by whole segments
/// (tests/write_amplification.rs).
const DEAREST_PERCENT: u64 = 30;
/// A block that is moved is read and written.
const MOVE_BYTES: u64 = 2 * BLOCK_BYTES as u64;
/// While nothing else goes on, which costs nobody time.
const IDLE_PERCENT: u64 = 50;

/// How many segments a domain cleans, and which: a proportional controller of its free segments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Pace {
    segments: u32,
    choice: Choice,
    /// Free segments are short, or nothing else goes on: whoever else wants the devices does not count.
    unbounded: bool,
}

impl Pace {
    /// With so many `free` segments of `all` (what the domain can take of nobody's among them). `None`: there are enough. While
    /// the volume is `idle` there are to be twice as many.
    fn of(free: u64, all: u64, idle: bool) -> Option<Self> {
        let wanted = (all / FREE_PART).clamp(LEAST, MOST);
        let missing = wanted.saturating_sub(free);
        let by_benefit = |percent: u64| Choice { valid_max: percent as u32, greedy: false };
        if idle && free < 2 * wanted {
            return Some(Self { segments: 1, choice: by_benefit(IDLE_PERCENT), unbounded: true });
        }
        if missing == 0 {
            return None;
        }
        let percent = (DEAREST_PERCENT * missing).div_ceil(wanted);
        let segments = (SEGMENTS_MAX * missing).div_ceil(wanted);
        let choice = by_benefit(percent);
        Some(Self { segments: segments as u32, choice, unbounded: 2 * missing > wanted })
    }

    /// As many segments of these as take so many bytes at most; `None` where that is not one.
    fn within(self, bytes: u64) -> Option<Self> {
        if self.unbounded {
            return Some(self);
        }
        let blocks = (u64::from(SEGMENT_BLOCKS) * u64::from(self.choice.valid_max)).div_ceil(100);
        let segments = (bytes / (blocks * MOVE_BYTES)).min(self.segments.into()) as u32;
        (segments > 0).then_some(Self { segments, ..self })
    }
}

/// Has the overflow record of `node` written again with its touched inode.
pub(super) fn mark_node(c: &Cell, st: &mut State, node: NodeId) {
    if node != c.ino.node() {
        match &mut st.body {
            Body::File(f) => f.map.mark_dirty(&[node]),
            Body::Dir(b) => b.map.mark_dirty(&[node]),
            Body::Special => {}
        }
    }
}

impl MountedVolume {
    /// What a look of the background cleans of a domain at time `now`, from whenever on: as many segments, and as full ones, as
    /// its free segments say, and as many as others leave room for on the devices. Blocks moved.
    pub(crate) fn clean_at_pace(&self, d: &Arc<Domain>, idle: bool, now: Duration) -> Result<u64> {
        let Some(pace) = self.pace_of(d, idle) else { return Ok(0) };
        let left = self.cleaner_share.lock().allowance(now, self.store.bytes_asked());
        let Some(pace) = pace.within(left) else { return Ok(0) };
        let before = self.store.bytes_asked();
        let moved = self.clean_segments(d, pace.segments, pace.choice)?;
        // others may have asked for something meanwhile; and its commit has written what they had changed
        let did = (self.store.bytes_asked() - before).min(moved * MOVE_BYTES);
        self.cleaner_share.lock().note_done(did);
        Ok(moved)
    }

    fn pace_of(&self, d: &Arc<Domain>, idle: bool) -> Option<Pace> {
        let s = d.space.stats();
        // its share of what nobody has yet
        let more = self.shared.unclaimed_on(d.devices()) / u64::from(SEGMENT_BLOCKS) / self.domains.len().max(1) as u64;
        Pace::of(s.free_segments + more, s.segments + more, idle)
    }

    /// Empties up to `segments` segments of a domain, whatever that costs.
    pub(crate) fn clean_domain(&self, d: &Arc<Domain>, segments: u32) -> Result<u64> {
        self.clean_segments(d, segments, Choice::ANY)
    }

    /// Empties up to `segments` segments of a domain: their valid blocks are made dirty, so that the next flush or commit
    /// writes them elsewhere (only what is still the newest moves). Blocks moved.
    fn clean_segments(&self, d: &Arc<Domain>, segments: u32, choice: Choice) -> Result<u64> {
        let _spending = self.shared.spend(&d.budget);
        let _span = tracing::debug_span!("clean", domain = %d.id, segments, ?choice).entered();
        let (mut skip, mut victims, mut blocks) = (HashSet::new(), Vec::new(), 0);
        let now = d.committed_tx();
        for _ in 0..segments {
            let s = d.space.stats();
            // moving needs room of its own
            if s.free < s.reserved + s.hidden / 2 + 600 + blocks {
                break;
            }
            let Some(v) = d.space.victim(now, &skip, choice)? else { break };
            skip.insert((v.group, v.segment));
            blocks += v.blocks.len() as u64;
            victims.push(v);
        }
        let mut moved = 0;
        for v in &victims {
            let n = self.mark_blocks(d, &v.blocks)?;
            if n == 0 {
                d.space.note_stays(v, now);
            }
            moved += n;
        }
        self.write_marked(d, moved)?;
        d.counters.cleaned.fetch_add(moved, Ordering::Relaxed);
        Ok(moved)
    }

    /// Has blocks and whose they were written elsewhere, by a commit; how many.
    pub(crate) fn move_blocks(&self, d: &Arc<Domain>, blocks: &[(BlockAddr, Owner)]) -> Result<u64> {
        let _spending = self.shared.spend(&d.budget);
        let moved = self.mark_blocks(d, blocks)?;
        self.write_marked(d, moved)?;
        Ok(moved)
    }

    /// Writes what [`Self::mark_blocks`] made dirty. Where that is nothing there is no commit: the next look would have the next one.
    fn write_marked(&self, d: &Arc<Domain>, moved: u64) -> Result<()> {
        if moved > 0 {
            d.flush_lazy()?;
            d.commit()?;
        }
        Ok(())
    }

    /// Makes blocks dirty, so that the next commit writes them elsewhere; how many. One that cannot be read, or does not hold, stays,
    /// as one with a fixed place does: it keeps none of the others.
    fn mark_blocks(&self, d: &Arc<Domain>, blocks: &[(BlockAddr, Owner)]) -> Result<u64> {
        let (mut moved, mut bad, mut first) = (0, 0, None);
        for (addr, owner) in blocks {
            let marked = if owner.node.0 == 0 {
                self.move_node_block(d, *addr)
            } else {
                self.move_block(d, *addr, owner.node, owner.lblk)
            };
            match marked {
                Ok(moves) => moved += u64::from(moves),
                Err(why @ (Error::Io(_) | Error::Corrupt(_))) if d.failed().is_none() => {
                    bad += 1;
                    first.get_or_insert((*addr, why));
                }
                Err(why) => return Err(why),
            }
        }
        if let Some((addr, why)) = first {
            tracing::warn!("{}: {bad} blocks cannot move, the first of them {addr}: {why}", d.id);
        }
        Ok(moved)
    }

    /// Whether one of these blocks has a fixed place, as far as is seen without a change: what is in memory, or durable. One of an
    /// inode that cannot be read counts as such.
    ///
    /// # Errors
    /// Of the domain.
    pub(super) fn any_is_fixed(&self, d: &Arc<Domain>, blocks: &[(BlockAddr, Owner)]) -> Result<bool> {
        let mut last: Option<Arc<Cell>> = None;
        for (addr, owner) in blocks.iter().filter(|(_, owner)| owner.node.0 != 0) {
            if last.as_ref().is_none_or(|c| c.ino != owner.node) {
                last = match d.find(owner.node) {
                    Err(Error::Io(_) | Error::Corrupt(_)) if d.failed().is_none() => return Ok(true),
                    found => found?,
                };
            }
            let Some(c) = &last else { continue };
            let st = c.state.read();
            let Body::File(f) = &st.body else { continue };
            let here = f.map.get(owner.lblk).filter(|p| p.addr == *addr);
            if here.is_some_and(|p| !st.deleted && is_fixed(d, c, &st, p.unwritten)) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Makes a data block or directory bucket dirty, if the inode still has it there.
    fn move_block(&self, d: &Arc<Domain>, addr: BlockAddr, ino: InodeNo, lblk: u64) -> Result<bool> {
        let Some(c) = d.find(ino)? else { return Ok(false) };
        let mut op = Op::new(self);
        op.begin_again(d.id, 3)?;
        let mut st = c.state.write();
        let here = match &st.body {
            Body::File(f) => f.map.get(lblk).filter(|p| p.addr == addr),
            Body::Dir(b) => b.map.get(lblk).filter(|p| p.addr == addr),
            Body::Special => None,
        };
        let Some(p) = here else { return Ok(false) };
        if st.deleted || is_fixed(d, &c, &st, p.unwritten) {
            return Ok(false);
        }
        if matches!(&st.body, Body::File(f) if f.lacks_extents(1, 0)) {
            return Ok(false); // a block out of the middle of an extent
        }
        if c.kind == FileKind::Dir {
            let first = braidfs_format::dentry::bucket_first(lblk);
            if let Some(dir) = st.dir()
                && dir.index.is_unread(first)
            {
                // one that does not hold stays where it is
                d.look_at_bucket(c.ino, &dir.map, lblk)?;
            }
            op.touch(&c, &mut st)?;
            op.with_index(&c, &mut st, |ix, load| ix.dirty_bucket(first, load))?;
            return Ok(true);
        }
        op.write_out_older(&c, &mut st)?;
        d.load_pages(&c, &mut st, lblk, 1)?;
        // the block counts already
        let mut charge = self.shared.quotas.charge(&c, &st);
        if !self.reserve_pages(&c, &mut st, (lblk, lblk), &mut charge)? {
            return Ok(false);
        }
        if planted(Bug::MoveForgotten) {
            op.touch_content(&c, &mut st)?;
        } else {
            op.touch(&c, &mut st)?;
        }
        let Body::File(f) = &mut st.body else { return Ok(false) };
        f.cold = true;
        if f.pages.dirty(lblk) {
            d.memory.add(0, 1);
        }
        d.write_lazily(&c);
        Ok(true)
    }

    /// The inodes to which the live records of a node block belong, each with the record's node; and the live bytes.
    pub(super) fn live_records(&self, d: &Arc<Domain>, addr: BlockAddr) -> Result<(LiveRecords, usize)> {
        let mut block = vec![0u8; 4096];
        d.budget.charge_run(Way::Read, block.len());
        d.store.read(addr, &mut block)?;
        let (mut live, mut bytes) = (Vec::new(), 0);
        let Ok(n) = braidfs_format::node::NodeBlock::check(&block, d.store.volume, addr) else {
            return Ok((live, bytes));
        };
        for i in 0..n {
            let Ok(r) = braidfs_format::node::NodeBlock::record(&block, i) else { continue };
            // else a dead record of a number whose group has left the domain
            let Some(e) = d.nodes.look(r.node)? else { continue };
            if !e.used() || { e.addr } != addr || usize::from(e.index) != i {
                continue;
            }
            let Some(c) = d.find(r.owner)? else { continue };
            live.push((c, r.node));
            bytes += r.payload.len();
        }
        Ok((live, bytes))
    }

    /// Makes the inodes of the live records of a node block dirty.
    fn move_node_block(&self, d: &Arc<Domain>, addr: BlockAddr) -> Result<bool> {
        let mut any = false;
        for (c, node) in self.live_records(d, addr)?.0 {
            let mut op = Op::new(self);
            op.begin_again(d.id, 3)?;
            let mut st = c.state.write();
            if st.deleted {
                continue;
            }
            op.touch(&c, &mut st)?;
            op.credit(d.id, 1);
            mark_node(&c, &mut st, node);
            any = true;
        }
        Ok(any)
    }
}

/// Whether blocks of an inode, written or not, stay where they are: each is overwritten there, or will be written there first.
fn is_fixed(d: &Domain, c: &Cell, st: &State, unwritten: bool) -> bool {
    unwritten || c.kind != FileKind::Dir && d.in_place(st)
}

impl Volume {
    /// Cleans up to `segments` segments per domain; blocks moved.
    ///
    /// # Errors
    /// Of the device.
    pub fn clean(&self, segments: u32) -> Result<u64> {
        let i = self.mounted();
        i.domains.iter().filter(|d| d.failed().is_none()).try_fold(0, |n, d| Ok(n + i.clean_domain(d, segments)?))
    }

    /// What the background cleans in one look of a tenth of a second, while something goes on and leaves enough of the devices;
    /// for tests that have none.
    ///
    /// # Errors
    /// Of the device.
    #[doc(hidden)]
    pub fn clean_as_needed(&self) -> Result<u64> {
        let i = self.mounted();
        let clean = |d: &Arc<Domain>| match i.pace_of(d, false) {
            Some(pace) => i.clean_segments(d, pace.segments, pace.choice),
            None => Ok(0),
        };
        i.domains.iter().filter(|d| d.failed().is_none()).try_fold(0, |n, d| Ok(n + clean(d)?))
    }
}

#[cfg(test)]
mod tests;
