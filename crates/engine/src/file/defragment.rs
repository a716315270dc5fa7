//! Files that were written in pieces, made whole: their blocks are read and become dirty, so that the next commit writes them
//! side by side and frees where they lay, in one transaction.
//!
//! To a crash this is a move by the cleaner: before the commit the old places count, after it the new ones. Content, size and
//! times stay. Who writes to the file meanwhile waits for one window at most, and what it writes is what goes out.
//!
//! Left alone: files that are always overwritten in place, whose blocks must not move beside writes that go where they lie.

use super::PAGE;
use crate::cell::pieces::{Defragmented, Pieces, WINDOW, next_window, pieces};
use crate::cell::{Body, Cell, FileBody, State};
use crate::domain::Domain;
use crate::error::{Error, Result};
use crate::types::*;
use crate::volume::operation::Op;
use crate::volume::{MountedVolume, Volume};
use braidfs_format::geometry::SEGMENT_BLOCKS;
use braidfs_format::inode::NOCOW;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Metadata blocks that moving a window can dirty.
const WINDOW_BLOCKS: u64 = 4;
/// Blocks of a domain that stay free for others.
const SPARE_BLOCKS: u64 = 600;
/// So do segments.
const SPARE_SEGMENTS: u64 = 4;
/// Blocks that are moved by one commit.
const BATCH: u64 = 2048;

/// Of the cell of a regular file.
fn file_of<'s>(c: &Cell, st: &'s State) -> Result<&'s FileBody> {
    match (&st.body, c.kind) {
        (Body::File(f), FileKind::File) => Ok(f),
        (Body::Dir(_), _) => Err(Error::IsDir),
        _ => Err(Error::Invalid("not a regular file")),
    }
}

impl MountedVolume {
    /// Moves what is in short pieces from block `from` on, some `most` blocks, and commits; `spare` segments of the domain stay
    /// free. `next` in blocks.
    ///
    /// # Errors
    /// [`Error::NoSpace`] where too little lies together to move it to: nothing more was moved. Of the device.
    pub(crate) fn defragment(&self, c: &Arc<Cell>, from: u64, most: u64, spare: u64) -> Result<Defragmented> {
        let d = self.dom(c.domain);
        let (room, done) = self.move_windows(c, from, most, spare)?;
        if done.moved > 0 {
            // with `data=writeback` a commit leaves it alone
            d.flush_cell(c)?;
            d.commit()?;
        }
        room.map(|()| done)
    }

    /// Makes what is in short pieces dirty, for the next commit to write it elsewhere. As [`Self::defragment`], with what is wrong
    /// behind the last window that moves.
    fn move_windows(&self, c: &Arc<Cell>, from: u64, most: u64, spare: u64) -> Result<(Result<()>, Defragmented)> {
        let d = self.dom(c.domain);
        d.check_writable()?;
        let (mut at, mut moved) = (from, 0);
        let mut room = Ok(());
        let next = loop {
            let window = {
                let st = c.state.read();
                let f = file_of(c, &st)?;
                if st.deleted || stays(d, &st) { None } else { next_window(&f.map, at) }
            };
            let Some(window) = window else { break None };
            if moved >= most {
                break Some(window);
            }
            room = if has_room(d, moved + WINDOW, spare) {
                self.move_window(c, window, &mut moved)
            } else {
                Err(Error::NoSpace)
            };
            if room.is_err() {
                break Some(window);
            }
            at = window + WINDOW;
        };
        d.counters.defragmented.fetch_add(moved, Ordering::Relaxed);
        Ok((room, Defragmented { next, moved }))
    }

    /// Makes the blocks of one window dirty, if they are still worth it, and adds how many these are to `moved`.
    fn move_window(&self, c: &Arc<Cell>, window: u64, moved: &mut u64) -> Result<()> {
        let d = self.dom(c.domain);
        let mut op = Op::new(self);
        op.begin_again(d.id, WINDOW_BLOCKS)?;
        let mut st = c.state.write();
        if st.deleted || stays(d, &st) || !pieces(&file_of(c, &st)?.map, window, window + WINDOW).are_short() {
            return Ok(());
        }
        if file_of(c, &st)?.lacks_extents(WINDOW as usize, 0) {
            return Ok(());
        }
        op.write_out_older(c, &mut st)?;
        d.load_pages(c, &mut st, window, WINDOW)?;
        let mut runs: Vec<(u64, u64)> = Vec::new();
        {
            let Body::File(f) = &st.body else { return Ok(()) };
            let mut at = window;
            while let Some(p) = f.map.next_from(at).filter(|p| p.lblk < window + WINDOW) {
                at = (p.lblk + u64::from(p.len)).min(window + WINDOW);
                if !p.unwritten {
                    runs.push((p.lblk, at));
                }
            }
        }
        // these blocks count already
        let mut charge = self.shared.quotas.charge(c, &st);
        // all of them or none: a window of which a part is moved is in more pieces
        for (i, (first, end)) in runs.iter().enumerate() {
            if !self.reserve_pages(c, &mut st, (*first, end - 1), &mut charge)? {
                drop((charge, st, op));
                if i > 0 {
                    self.give_back_surplus(c);
                }
                return Err(Error::NoSpace);
            }
        }
        // where its blocks lie changes
        op.touch(c, &mut st)?;
        op.credit(d.id, WINDOW_BLOCKS / 2);
        let Body::File(f) = &mut st.body else { return Ok(()) };
        #[cfg(feature = "planted-bugs")]
        d.move_badly(f, window, window + WINDOW)?;
        f.cold = true;
        let (mut fresh, mut all) = (0, 0);
        for (first, end) in runs {
            fresh += (first..end).filter(|l| f.pages.dirty(*l)).count();
            all += end - first;
        }
        d.memory.add(0, fresh);
        op.tx(d.id).expect_pages(fresh);
        *moved += all;
        Ok(())
    }

    /// Does it, and once more with room made for it where there was too little.
    fn with_segments<R>(&self, d: &Arc<Domain>, go: impl Fn() -> Result<R>) -> Result<R> {
        match go() {
            Err(Error::NoSpace) => {
                self.make_segments(d)?;
                go()
            }
            done => done,
        }
    }

    /// Makes room that lies together for what an administrator wants moved: another group, else the cleaner empties segments.
    fn make_segments(&self, d: &Arc<Domain>) -> Result<()> {
        let wanted = SPARE_SEGMENTS + BATCH / u64::from(SEGMENT_BLOCKS) + 1;
        for _ in 0..wanted {
            if d.space.stats().free_segments >= wanted {
                break;
            }
            if !self.claim_group(d)? && self.clean_domain(d, 1)? == 0 {
                break;
            }
        }
        Ok(())
    }
}

/// Whether the file is always overwritten in place, or will be once that is durable.
fn stays(d: &Domain, st: &State) -> bool {
    st.flags & NOCOW != 0 && d.data_mode() != DataMode::Journal
}

/// Whether a domain can have so many blocks written elsewhere, side by side, and has room for others still.
fn has_room(d: &Domain, blocks: u64, spare: u64) -> bool {
    let s = d.space.stats();
    let segments = blocks.div_ceil(u64::from(SEGMENT_BLOCKS));
    s.free_segments >= spare + segments && s.free >= s.reserved + s.hidden / 2 + SPARE_BLOCKS + blocks
}

impl Volume {
    /// In how many pieces a regular file lies.
    ///
    /// # Errors
    /// [`Error::NotFound`]; [`Error::IsDir`], [`Error::Invalid`] for what has no data; of the device.
    pub fn pieces(&self, ino: InodeNo) -> Result<Pieces> {
        let i = self.mounted();
        let c = i.cell(ino)?;
        let st = c.state.read();
        let f = file_of(&c, &st)?;
        Ok(Pieces { stays: stays(i.dom(c.domain), &st), ..pieces(&f.map, 0, u64::MAX) })
    }

    /// Makes a part of a regular file whole, from byte `from` on: some 8 MiB of it, durably. Call it again with `next` until
    /// there is none. Content and times stay; what others write meanwhile counts. (As e4defrag and xfs_fsr do.)
    ///
    /// # Errors
    /// As [`Self::pieces`]; [`Error::NoSpace`] where too little room lies together; [`Error::ReadOnly`].
    pub fn defragment(&self, ino: InodeNo, from: u64) -> Result<Defragmented> {
        let i = self.mounted();
        let c = i.cell(ino)?;
        let done = i.with_segments(i.dom(c.domain), || i.defragment(&c, from / PAGE, BATCH, SPARE_SEGMENTS))?;
        i.maybe_evict(i.dom(c.domain));
        Ok(Defragmented { next: done.next.map(|b| b * PAGE), ..done })
    }

    /// The first half of [`Self::defragment`]: what moves waits for the next commit, as others see it who change the file between.
    /// For tests.
    ///
    /// # Errors
    /// As [`Self::defragment`].
    #[doc(hidden)]
    pub fn defragment_uncommitted(&self, ino: InodeNo) -> Result<u64> {
        let i = self.mounted();
        let c = i.cell(ino)?;
        i.with_segments(i.dom(c.domain), || {
            let (room, done) = i.move_windows(&c, 0, BATCH, SPARE_SEGMENTS)?;
            room.map(|()| done.moved)
        })
    }
}
