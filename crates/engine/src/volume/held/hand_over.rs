//! Inodes that are held outlive an orderly unmount: a server hands the volume over to another one while a kernel, or an
//! embedding program, goes on using what it has of it.
//!
//! Owns the list that goes from the one to the other. Nothing on disk says "kept": an unmount leaves inodes without a name
//! as orphans in any case, and every mount reclaims those that are not on its list. So after a crash on the way, or where the
//! list is lost, they go as they would have gone.

use super::table::{Count, LookupCounts, ORPHAN, TIMES_MAX};
use crate::error::{Error, Result};
use crate::types::*;
use crate::volume::{MountedVolume, Volume};
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// So few inodes are not worth a thread.
const FEW: usize = 4096;

/// Why [`Volume::unmount_holding`] did not hand over.
#[derive(Debug, thiserror::Error)]
#[error("the volume is not handed over")]
#[non_exhaustive]
pub struct NotHandedOver {
    /// What was in the way.
    #[source]
    pub error: Error,
    /// The volume, mounted as before, where it was refused. `None` where an error came while it was unmounted: it is as
    /// after an unmount with that error.
    pub volume: Option<Volume>,
}

impl LookupCounts {
    /// The inodes of a list.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a list that no [`Volume::unmount_holding`] has made.
    pub(crate) fn of_list(list: &[HeldInode]) -> Result<Self> {
        let held = Self::default();
        for h in list {
            let InodeRef { ino, generation } = h.inode;
            if ino == InodeNo::ROOT || h.times == 0 {
                return Err(Error::Invalid("the list of held inodes names the root, or one that is held no time"));
            }
            match held.shard(ino).lock().counts.entry(ino.0) {
                Entry::Vacant(e) => e.insert(Count { generation, times: h.times.min(TIMES_MAX) }),
                Entry::Occupied(_) => return Err(Error::Invalid("the list of held inodes names one twice")),
            };
        }
        Ok(held)
    }

    /// Whether no inode is held.
    pub(crate) fn is_empty(&self) -> bool {
        self.shards().iter().all(|s| s.lock().counts.is_empty())
    }
}

impl MountedVolume {
    /// All that is held must be on the volume: a holder is not left with a number that means nothing, or another inode.
    /// Before recovery reclaims anything.
    ///
    /// # Errors
    /// [`Error::HeldGone`]; of loading an inode.
    pub(crate) fn check_held(&self) -> Result<()> {
        let shards = self.held.shards();
        let all: usize = shards.iter().map(|s| s.lock().counts.len()).sum();
        if all == 0 {
            return Ok(());
        }
        let grain = if all < FEW { shards.len() } else { 1 };
        let check = |i: usize| {
            let of_shard = |(ino, c): (&u64, &Count)| InodeRef { ino: InodeNo(*ino), generation: c.generation };
            let listed: Vec<InodeRef> = shards[i].lock().counts.iter().map(of_shard).collect();
            for inode in listed {
                let there = self.find(inode.ino)?.filter(|c| c.is(inode) && !c.state.read().deleted);
                let Some(c) = there else { return Err(Error::HeldGone { inode }) };
                if let Some(count) = shards[i].lock().counts.get_mut(&inode.ino.0) {
                    count.set_kind(c.kind);
                }
            }
            Ok(())
        };
        self.shared.workers.each(shards.len(), grain, check).map(drop)
    }

    /// # Errors
    /// [`Error::DomainFailed`], of the first one that has.
    pub(crate) fn all_domains_work(&self) -> Result<()> {
        match self.domains.iter().find_map(|d| Some((d.id, d.failed()?))) {
            Some((domain, why)) => Err(Error::DomainFailed { domain, why: why.to_owned() }),
            None => Ok(()),
        }
    }

    fn held_list(&self) -> Vec<HeldInode> {
        let mut list = Vec::new();
        for shard in self.held.shards() {
            let shard = shard.lock();
            list.extend(shard.counts.iter().map(|(ino, c)| HeldInode {
                inode: InodeRef { ino: InodeNo(*ino), generation: c.generation },
                times: c.times(),
            }));
        }
        for d in &self.domains {
            for ino in d.orphans.list() {
                // one that is open is in memory
                if let Some(c) = self.look(ino)
                    && c.is_open()
                    && !self.held.holds(&c)
                {
                    list.push(HeldInode { inode: c.inode(), times: 1 });
                }
            }
        }
        list.sort_unstable_by_key(|h| h.inode);
        list
    }
}

impl Volume {
    /// What is held: by [`Volume::lookup_held`] and [`Volume::hold`], as often as it was counted, and each inode without a
    /// name that only an [`OpenFile`](crate::OpenFile) keeps, once. What comes or goes meanwhile may be missing.
    pub fn held_list(&self) -> Vec<HeldInode> {
        self.mounted().held_list()
    }

    /// [`Volume::unmount`] for a hand-over to [`Volume::mount_holding`], here or in another process: tells what is held. Where
    /// that list is given to the next mount nothing of it is reclaimed; any other mount reclaims what has no name.
    ///
    /// Handles that are open end, as at an unmount: they are opened again by number. One of an unlinked file that is not
    /// held otherwise may be dropped before or after this, but counts only if it is there when the volume closes.
    ///
    /// Of a volume that is read-only nothing is written: the next mount is to be read-only, too. What recovery kept in memory
    /// it finds again.
    ///
    /// # Errors
    /// [`Error::DomainFailed`]; [`Error::Busy`] where a device failed on the way to read-only; and the volume goes on. Of a
    /// device, as [`Volume::unmount`].
    pub fn unmount_holding(mut self) -> Result<Vec<HeldInode>, Box<NotHandedOver>> {
        let mounted = Arc::clone(self.mounted());
        if let Err(error) = mounted.all_domains_work().and_then(|()| self.check_as_on_devices()) {
            return Err(Box::new(NotHandedOver { error, volume: Some(self) }));
        }
        // a handle that goes from now on deletes nothing more: the list is that of what is on the devices
        match self.close() {
            Ok(()) => Ok(mounted.held_list()),
            Err(error) => Err(Box::new(NotHandedOver { error, volume: None })),
        }
    }

    /// Behind [`Volume::mount_holding`], once no other mount may follow by the same list: tenants without a journal have none
    /// from now on. Until then what is done to them survives a crash, and costs as much as for others.
    ///
    /// # Errors
    /// Of a device: they keep a journal.
    pub fn end_hand_over(&self) -> Result<()> {
        let mounted = self.mounted();
        if mounted.shared.read_only.load(Ordering::Relaxed) { Ok(()) } else { mounted.end_hand_over() }
    }

    /// Of a volume that is read-only, which an unmount closes as it is: no change is in memory only.
    fn check_as_on_devices(&self) -> Result<()> {
        let mounted = self.mounted();
        // what waits in overlays each mount finds in the journals
        let in_memory = mounted.shared.read_only.load(Ordering::Relaxed)
            && !self.overlays.is_waiting()
            && mounted.domains.iter().any(|d| d.is_left_unclean());
        match in_memory {
            true => Err(Error::Busy("an error kept it from being written when it became read-only".into())),
            false => Ok(()),
        }
    }
}

impl Count {
    fn set_kind(&mut self, kind: FileKind) {
        let orphan = self.times & ORPHAN;
        *self = Self { times: orphan | self.times() | super::table::kind_bit(kind), ..*self };
    }
}
