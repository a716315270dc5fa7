//! What a file may hold after a crash that is of no one version: blocks that were overwritten where they lie.

use super::Oracle;
use crate::history::{Step, Synced};
use crate::model::{Ino, Node};
use crate::sparse::{PAGE, Sparse};
use crate::walk::{SeenNode, difference};
use std::collections::BTreeSet;
use std::ops::RangeInclusive;
use std::sync::Arc;

/// Bytes that a device writes whole or not at all.
const SECTOR: usize = 512;

/// States of an inode, each with its first version.
type States<'a> = [(usize, Option<&'a Arc<Node>>)];

impl Oracle<'_> {
    /// Whether a file may hold this, of which the inode is as in state `i`, which is `base`. Content of states before `from` was
    /// replaced by what was promised.
    ///
    /// Where commits leave data alone, any content since what was promised may be there, page by page, whatever the inode is.
    ///
    /// Where the file is always overwritten in place, its blocks may be newer than the inode, sector by sector: data is on the
    /// device before the inode is. A sector is of this state, or of a later one in which the page still lies in the same block.
    /// Nothing is older than the inode, but during an fsync, which writes both in any order where nothing but times changed.
    ///
    /// # Errors
    /// What is of no such state.
    pub(super) fn content(
        &self,
        ino: Ino,
        got: &Sparse,
        (i, base): (usize, &Node),
        states: &States<'_>,
        from: usize,
    ) -> Result<(), String> {
        let Some(other) = difference(got, &base.data) else { return Ok(()) };
        if self.history.late_data && got.size() == base.data.size() {
            let since: Vec<&Node> = states.iter().skip(from).filter_map(|(_, n)| n.map(|n| &**n)).collect();
            let moved = since.iter().any(|n| n.blocks.moves() != base.blocks.moves());
            return late(got, &since.iter().map(|n| &n.data).collect::<Vec<_>>(), moved);
        }
        if got.size() != base.data.size() || !base.in_place() || !self.history.fallocated {
            return Err(other);
        }
        let is = |k: usize| states[k].1.filter(|n| n.in_place());
        let own = (0..=i).rev().find(|k| states[*k].1.is_some()).unwrap_or(i);
        let layout = |k: usize| is(k).is_some_and(|n| same_but_content(n, base) && n.blocks.same(&base.blocks));
        let older = if self.sync_under_way(ino) { from } else { own };
        let first = (older..own).rev().take_while(|k| layout(*k)).last().unwrap_or(own).max(from);
        let later: Vec<&Node> =
            std::iter::once(base).chain((first..states.len()).filter_map(|k| Some(&**is(k)?))).collect();
        let pages: BTreeSet<u64> = later.iter().flat_map(|n| n.data.pages()).chain(got.pages()).collect();
        for page in pages {
            let block = base.blocks.block(page);
            let may = |n: &&&Node| block.is_some() && n.blocks.block(page) == block;
            let of: Vec<&Sparse> = later[..1].iter().chain(later[1..].iter().filter(may)).map(|n| &n.data).collect();
            sectors_of(got, &of, page)?;
        }
        Ok(())
    }

    /// Whether power failed during an fsync of the file.
    fn sync_under_way(&self, ino: Ino) -> bool {
        let under_way = &self.history.steps()[self.completed.min(self.newest)..self.newest];
        under_way.iter().any(|s| syncs(s, ino))
    }

    /// Whether commits may overwrite the file: an fsync that was done may have, and none after it wrote elsewhere.
    fn lives_by_overwrites(&self, ino: Ino) -> bool {
        let before = &self.history.steps()[..self.completed.min(self.newest)];
        let state = |v: usize| self.history.version(v).shared(ino);
        let (mut lives, mut last) = (false, state(0));
        for (i, step) in before.iter().enumerate().filter(|(_, s)| syncs(s, ino)) {
            // one that has nothing to write leaves it as it is; beside other threads it may write what comes behind it here
            let now = state(i + 1);
            let writes = !self.serial || !matches!((last, now), (Some(a), Some(b)) if Arc::ptr_eq(a, b));
            lives = !step.elsewhere && (lives || writes);
            last = now;
        }
        lives
    }

    /// Where an fsync of the file was under way that may overwrite blocks: the content may be that of an earlier version,
    /// with some blocks, or sectors of them, as of the later one that was synced, and of any version between them all the
    /// rest (times, since nothing else may differ, nor which blocks there are). Where the file lives by overwrites, whatever a
    /// commit wrote since may be there in part, so that sectors are of any of these versions; also where the same commit gives
    /// holes a place, which come with it. The ranges of versions with which what is there can be explained so.
    pub(super) fn overwritten(&self, ino: Ino, got: &SeenNode, states: &States<'_>) -> Vec<RangeInclusive<usize>> {
        let commits = self.lives_by_overwrites(ino);
        if !self.history.overwrites || !(commits || self.sync_under_way(ino)) {
            return Vec::new();
        }
        let mut out = Vec::new();
        for (i, (from, old)) in states.iter().enumerate() {
            let Some(old) = old.filter(|n| !n.in_place()) else { continue };
            let (mut versions, mut last) = (vec![&**old], *from);
            for (to, new) in &states[i + 1..] {
                let same = |n: &&Arc<Node>| same_but_content(old, n) && n.blocks.keeps(&old.blocks);
                let Some(new) = new.filter(same) else { break };
                let placed = new.blocks.same(&old.blocks);
                if !commits {
                    if !placed {
                        break;
                    }
                    versions.truncate(1);
                }
                // what is of a version with other blocks has these, too
                if placed && versions.iter().all(|n| n.blocks.same(&old.blocks)) {
                    last = *to;
                }
                versions.push(new);
                if mixed(&got.data, &versions).is_ok() {
                    out.push(*from..=last);
                }
            }
        }
        out
    }
}

/// Content that commits left alone: every sector of a page is one that the page had since it was promised. Where a range was
/// collapsed or inserted (`moved`), it may be one of another place, too.
fn late(got: &Sparse, versions: &[&Sparse], moved: bool) -> Result<(), String> {
    let pages: BTreeSet<u64> = versions.iter().flat_map(|v| v.pages()).chain(got.pages()).collect();
    let sector = |v: &Sparse, page: u64, at: usize| -> [u8; SECTOR] { std::array::from_fn(|i| v.page(page)[at + i]) };
    for page in pages {
        let Err(why) = sectors_of(got, versions, page) else { continue };
        let elsewhere = |at: usize| {
            let found = sector(got, page, at);
            found == [0; SECTOR] || versions.iter().any(|v| v.pages().any(|p| sector(v, p, at) == found))
        };
        if !moved || !(0..PAGE).step_by(SECTOR).all(elsewhere) {
            return Err(why);
        }
    }
    Ok(())
}

/// Whether nothing but content and times can differ, and the content has one size.
pub(super) fn same_but_content(a: &Node, b: &Node) -> bool {
    a.data.size() == b.data.size()
        && (a.kind, a.mode, a.uid, a.gid, a.flags) == (b.kind, b.mode, b.uid, b.gid, b.flags)
        && (&a.xattrs, &a.links) == (&b.xattrs, &b.links)
}

/// Whether a step is an fsync of an inode.
fn syncs(s: &Step, ino: Ino) -> bool {
    matches!(s.sync, Some(Synced::One { ino: i, .. }) if i == ino)
}

/// Content overwritten in place: every sector is one of the versions', which have its size. Of what has no block in the first of
/// them it is that one's.
fn mixed(got: &Sparse, versions: &[&Node]) -> Result<(), String> {
    if !versions.iter().any(|n| n.data.size() == got.size()) {
        return Err(format!("size {} of no version", got.size()));
    }
    let pages: BTreeSet<u64> = versions.iter().flat_map(|n| n.data.pages()).chain(got.pages()).collect();
    pages.into_iter().try_for_each(|page| {
        let has = |n: &&&Node| n.blocks.block(page) == versions[0].blocks.block(page);
        let of: Vec<&Sparse> = versions.iter().filter(has).map(|n| &n.data).collect();
        sectors_of(got, &of, page)
    })
}

/// Every sector of a page, as far as the file reaches, is one of the versions'.
fn sectors_of(got: &Sparse, versions: &[&Sparse], page: u64) -> Result<(), String> {
    let (start, found) = (page * PAGE as u64, got.page(page));
    if versions.iter().any(|v| v.page(page) == found) {
        return Ok(());
    }
    for from in (0..PAGE).step_by(SECTOR) {
        let left = got.size().saturating_sub(start + from as u64).min(SECTOR as u64) as usize;
        let range = from..from + left;
        if !versions.iter().any(|v| v.page(page)[range.clone()] == found[range.clone()]) {
            return Err(format!("bytes of no version at {}", start + from as u64));
        }
    }
    Ok(())
}
