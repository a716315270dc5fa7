//! What owners use and may, as they are told of it.

use super::{Quota, QuotaLimits, bytes, is_over, limits_of, some};
use crate::error::{Error, Result};
use crate::types::*;
use crate::volume::Volume;
use std::ops::Bound;

impl Volume {
    /// Limits of an owner, and what it uses. Of a volume without any limit nothing is counted.
    ///
    /// # Errors
    /// [`Error::NotFound`] where it has no limits and nothing was counted for it.
    pub fn quota(&self, owner: QuotaOwner) -> Result<Quota> {
        let i = self.mounted();
        let entry = i.quotas.lock().get(&owner).copied();
        let used = i.shared.quotas.used(owner);
        if entry.is_none() && (used.blocks, used.inodes) == (0, 0) {
            return Err(Error::NotFound);
        }
        let e = entry.unwrap_or_default();
        let over = |since: u64| is_over(since, e.grace.get(), i.quota_clock());
        Ok(Quota {
            owner,
            directory: some(e.root.get()).map(InodeNo),
            limits: entry.map_or_else(QuotaLimits::default, |e| limits_of(&e)),
            used: bytes(used.blocks),
            inodes: used.inodes,
            space_exceeded_since: some(e.blocks_since.get()),
            inodes_exceeded_since: some(e.inodes_since.get()),
            grace_is_over: over(e.blocks_since.get()) || over(e.inodes_since.get()),
        })
    }

    /// All owners that have limits or, once there is one that has, use anything; users first, then groups, by their numbers.
    pub fn quotas(&self) -> Vec<Quota> {
        std::iter::successors(self.quota_after(None), |q| self.quota_after(Some(q.owner))).collect()
    }

    /// Owners that have limits, in the order of [`Self::quotas`].
    pub fn limited_quotas(&self) -> Vec<Quota> {
        let owners: Vec<_> = self.mounted().quotas.lock().keys().copied().collect();
        owners.into_iter().filter_map(|owner| self.quota(owner).ok()).collect()
    }

    /// The first of [`Self::quotas`] behind one of them; `None`: the first of all. So all can be looked at one by one, also
    /// while owners come and go.
    pub fn quota_after(&self, after: Option<QuotaOwner>) -> Option<Quota> {
        let i = self.mounted();
        let mut after = after;
        loop {
            let behind = (after.map_or(Bound::Unbounded, Bound::Excluded), Bound::Unbounded);
            let limited = i.quotas.lock().range(behind).next().map(|e| *e.0);
            let owner = [limited, i.shared.quotas.owner_after(after)].into_iter().flatten().min()?;
            match self.quota(owner) {
                Ok(q) => return Some(q),
                // it uses nothing any more
                Err(_) => after = Some(owner),
            }
        }
    }

    /// Whether any limits of users or directories may hold.
    #[inline]
    pub fn any_quotas(&self) -> bool {
        self.mounted().shared.quotas.is_on()
    }

    /// How often the limit that an owner is held to was changed: by a call, or since the grace of a soft limit was over, or less
    /// was in use again. A front end tells the kernel ([`Self::has_limited_owner`]).
    #[inline]
    pub fn quota_limit_changes(&self) -> u64 {
        self.mounted().shared.quotas.limit_changes()
    }

    /// Whether the user, the group or the project of an inode has a limit of space.
    pub fn has_limited_owner(&self, ino: InodeNo) -> bool {
        !self.limited_owners(ino).is_empty()
    }

    /// Owners of an inode that have a limit of space, a user first. Root has none.
    pub fn limited_owners(&self, ino: InodeNo) -> Vec<QuotaOwner> {
        let i = self.mounted();
        if !i.shared.quotas.is_on() {
            return Vec::new();
        }
        let Ok(c) = i.see(ino) else { return Vec::new() };
        let owners = c.state.read().owners();
        owners.each().filter(|owner| i.shared.quotas.limits_space(*owner)).collect()
    }

    /// Blocks that an owner may still have; `None`: it has no limit.
    pub fn quota_left(&self, owner: QuotaOwner) -> Option<u64> {
        let used = self.mounted().shared.quotas.used(owner);
        used.most_blocks.map(|most| most.saturating_sub(used.blocks))
    }

    /// Deletes files that count for an owner and were replaced by those of other domains, which are made durable for that: whether
    /// any of them is gone. For a front end that is about to say that the owner has as much as may be, and asks again then; what is
    /// refused here comes by them itself.
    pub fn end_replaced_files(&self, owner: QuotaOwner) -> bool {
        self.mounted().end_owners_replaced(owner)
    }

    /// Blocks of content that writing a range of a file would add.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub fn new_blocks(&self, ino: InodeNo, offset: u64, len: u64) -> Result<u64> {
        let c = self.mounted().cell(ino)?;
        let n = c.state.read().new_blocks(offset, len);
        Ok(n)
    }
}
