//! Inodes that somebody outside holds by number, without having them open: a kernel that was told of them (FUSE's
//! counted look-ups). Such an inode stays when its last name goes, as an orphan, until it is given back.
//!
//! Owns how often each inode was told. An entry takes 17 bytes of a hash table that is between 44 and 87 % full, and
//! nothing else: a cell may leave memory while its inode is held. Counting writes only to the shard of the inode.
//!
//! Who comes first, look-up or removal: a look-up counts, then reads under the cell's lock whether the inode was
//! deleted ([`MountedVolume::hold`]); a removal marks the inode as gone, then asks for the count, both under the cell's lock
//! for writing ([`MountedVolume::last_name_gone`]). So either the look-up sees the deletion, and takes its count back, or the
//! removal sees the count, and leaves an orphan. Whoever gives the last count back sees the mark that the removal
//! left here, and reaps.
//!
//! Lock rank: shards are leaves.

pub mod hand_over;
pub(crate) mod table;

use super::{MountedVolume, Volume};
use crate::cell::Cell;
use crate::error::{Error, Result};
use crate::names::asker::Asker;
use crate::types::*;
use std::sync::atomic::Ordering;
use std::time::Duration;
use table::{Count, GivenBack};

impl MountedVolume {
    /// Counts the inode as held and tells its attributes; `None` where it is gone.
    pub(crate) fn hold(&self, c: &Cell) -> Option<Attr> {
        // the root never goes
        let counted = c.ino != InodeNo::ROOT;
        if counted && !self.held.add(c.ino, c.generation, c.kind) {
            return None;
        }
        let st = c.state.read();
        if st.deleted {
            drop(st);
            self.held.give_back(c.ino, |g| g == c.generation, 1);
            return None;
        }
        if st.nlink == 0 {
            self.held.orphaned(c);
        }
        Some(c.attr(&st))
    }

    /// Takes one count back where the look-up did not get through to the holder.
    pub(crate) fn unhold(&self, ino: InodeNo, generation: u32) {
        self.take_back(ino, &|g| g == generation, 1);
    }

    /// Whether that was the last.
    fn take_back(&self, ino: InodeNo, is_it: &dyn Fn(u32) -> bool, times: u64) -> bool {
        if ino == InodeNo::ROOT || times == 0 {
            return false;
        }
        let orphan = match self.held.give_back(ino, is_it, times) {
            GivenBack::StillHeld => return false,
            GivenBack::Last { orphan } => orphan,
            GivenBack::TooMuch { orphan } => {
                self.held.excess.fetch_add(1, Ordering::Relaxed);
                if !self.held.complained.swap(true, Ordering::Relaxed) {
                    tracing::warn!("inode {ino} was given back more often than it had been told; not said again");
                }
                orphan
            }
        };
        if orphan {
            self.reap_given_back(ino, is_it);
            self.held.reaped(ino);
        }
        true
    }

    fn reap_given_back(&self, ino: InodeNo, is_it: &dyn Fn(u32) -> bool) {
        let reaped = self.find(ino).and_then(|c| match c {
            Some(c) if is_it(c.generation) => self.reap(&c),
            _ => Ok(()),
        });
        if let Err(e) = reaped {
            tracing::warn!("reclaiming unlinked inode {ino}: {e}");
            self.reap_later(ino);
        }
    }
}

impl Volume {
    /// [`Volume::lookup`] that counts the inode as held from outside until [`Volume::forget`].
    ///
    /// # Errors
    /// As [`Volume::lookup`]; nothing is counted then.
    pub fn lookup_held(&self, dir: InodeNo, name: &[u8]) -> Result<Attr> {
        let i = self.mounted();
        loop {
            let d = i.see(dir)?;
            let c = i.lookup_seen(&d, name)?;
            if let Some(attr) = i.hold(&c) {
                return Ok(attr);
            }
            // a directory of a domain that has failed may name one that is deleted in memory, for good
            if name == b"." || name == b".." || i.dom(d.domain).failed().is_some() {
                return Err(Error::NotFound);
            }
            // removed since: the name may be another's by now
        }
    }

    /// [`Volume::create`] that counts the inode as held from outside until [`Volume::forget`].
    ///
    /// # Errors
    /// As [`Volume::create`]; [`Error::NotFound`] where it was removed meanwhile. Nothing is counted then.
    pub fn create_held(&self, dir: InodeNo, name: &[u8], new: &NewNode<'_>, cred: &Cred) -> Result<Attr> {
        let i = self.mounted();
        i.pace_change(dir);
        i.hold(&i.create(dir, name, new, cred)?.0).ok_or(Error::NotFound)
    }

    /// [`Volume::link`] that counts the inode as held from outside until [`Volume::forget`].
    ///
    /// # Errors
    /// As [`Volume::link`]; [`Error::NotFound`] where it was removed meanwhile. Nothing is counted then.
    pub fn link_held(&self, ino: InodeNo, dir: InodeNo, name: &[u8]) -> Result<Attr> {
        let i = self.mounted();
        i.pace_change(dir);
        let (d, c) = (i.dir_cell(dir)?, i.cell(ino)?);
        i.link_in(&c, &d, name, Asker::ANY)?;
        i.hold(&c).ok_or(Error::NotFound)
    }

    /// Counts an inode as held, if it is there and of the generation meant.
    ///
    /// # Errors
    /// [`Error::NotFound`] where it is not; nothing is counted then.
    pub fn hold(&self, ino: InodeNo, is_it: impl Fn(u32) -> bool) -> Result<Attr> {
        let c = self.mounted().see(ino)?;
        if !is_it(c.generation) {
            return Err(Error::NotFound);
        }
        self.mounted().hold(&c).ok_or(Error::NotFound)
    }

    /// Gives `times` counts of an inode back, if the number is held in the generation meant. An inode that lost its
    /// last name meanwhile goes with the last count. More than was counted is taken as all, and said once in the log.
    /// Whether none is left.
    pub fn forget(&self, ino: InodeNo, is_it: impl Fn(u32) -> bool, times: u64) -> bool {
        self.mounted().take_back(ino, &is_it, times)
    }

    /// Whether the inode is held, of whatever generation.
    pub fn is_held(&self, ino: InodeNo) -> bool {
        self.mounted().held.shard(ino).lock().counts.contains_key(&ino.0)
    }

    /// How often the inode is counted, of whatever generation; 0 where it is not held.
    pub fn held_times(&self, ino: InodeNo) -> u64 {
        let shard = self.mounted().held.known_shard(ino);
        shard.and_then(|s| s.lock().counts.get(&ino.0).map(|c| c.times().into())).unwrap_or(0)
    }

    /// All inodes of any kind that are held, among those that are `wanted`. Those that come or go meanwhile may be missing.
    pub fn held_inodes(&self, wanted: impl Fn(InodeNo) -> bool) -> Vec<InodeRef> {
        self.held_where(|ino, _| wanted(ino))
    }

    /// All regular files that are held, among those that are `wanted`. Those that come or go
    /// meanwhile may be missing.
    pub fn held_files(&self, wanted: impl Fn(InodeNo) -> bool) -> Vec<InodeRef> {
        self.held_where(|ino, c| c.is_file() && wanted(ino))
    }

    fn held_where(&self, wanted: impl Fn(InodeNo, &Count) -> bool) -> Vec<InodeRef> {
        let mut found = Vec::new();
        for shard in self.mounted().held.shards() {
            let shard = shard.lock();
            let those = shard.counts.iter().filter(|(ino, c)| wanted(InodeNo(**ino), c));
            found.extend(those.map(|(ino, c)| InodeRef { ino: InodeNo(*ino), generation: c.generation }));
        }
        found
    }

    /// Gives everything back: who held the inodes is gone.
    pub fn forget_all(&self) {
        let i = self.mounted();
        for shard in i.held.shards() {
            let counts = {
                let mut s = shard.lock();
                let counts = std::mem::take(&mut s.counts);
                s.ending += counts.values().filter(|c| c.is_orphan()).count();
                counts
            };
            for (ino, count) in counts.into_iter().filter(|(_, c)| c.is_orphan()) {
                i.reap_given_back(InodeNo(ino), &|g| g == count.generation);
                i.held.reaped(InodeNo(ino));
            }
        }
    }

    /// How many inodes are held, how many of them have no name any more, and how often more was given back than had
    /// been counted.
    pub fn held(&self) -> HeldStats {
        let held = &self.mounted().held;
        let mut s = HeldStats { excess: held.excess.load(Ordering::Relaxed), ..HeldStats::default() };
        for shard in held.shards() {
            let shard = shard.lock();
            s.inodes += shard.counts.len();
            s.orphans += shard.orphans;
            s.bytes += shard.counts.capacity() * (size_of::<(u64, Count)>() + 1);
        }
        s
    }

    /// Whether something was removed less than `lately` ago whose end waits for its holder alone, or is under way: its
    /// space and its number are about to come back.
    pub fn orphans_due(&self, lately: Duration) -> bool {
        self.mounted().held.due(lately)
    }

    /// Whether something lost its last name less than `lately` ago while it was held, or is ending: its space may have come
    /// back since an operation found none.
    pub fn removed_lately(&self, lately: Duration) -> bool {
        self.mounted().held.removed_lately(lately)
    }

    /// Whether something ends just now that its last holder gave back.
    pub fn orphans_ending(&self) -> bool {
        self.mounted().held.due(Duration::ZERO)
    }
}

#[cfg(test)]
mod tests;
