//! Reservations: an operation reserves the blocks that it may need before it changes anything, so that ENOSPC comes
//! at the call and never from the flush.

use super::Space;
use crate::error::{Error, Result};

/// What of the `hidden` reserve no operation may have, also one that takes away: a commit that needs a block more than its
/// operations expected finds it there. Less than what is lent ([`Space::reserve_again`]) leaves.
fn kept_for_commits(hidden: u64) -> u64 {
    hidden / 4
}

impl Space {
    /// Promises `blocks` blocks. An `essential` reservation may use the hidden reserve, but for what of it is kept for commits.
    ///
    /// # Errors
    /// [`Error::NoSpace`] where there are not that many.
    pub fn reserve(&self, blocks: u64, essential: bool) -> Result<()> {
        if blocks == 0 {
            return Ok(()); // also below the floor
        }
        let hidden = self.hidden();
        let floor = if essential { kept_for_commits(hidden) as i64 - self.withheld() } else { hidden as i64 };
        self.take_from_account(blocks, floor)
    }

    /// Promises blocks for what a transaction must write, whose operations were let in: all that there are.
    ///
    /// # Errors
    /// As [`Self::reserve`].
    pub(crate) fn reserve_for_commit(&self, blocks: u64) -> Result<()> {
        if blocks == 0 {
            return Ok(());
        }
        self.take_from_account(blocks, -self.withheld())
    }

    /// Promises blocks as to anybody; none of them was promised before.
    pub(crate) fn reserve_ordinary(&self, blocks: u64) -> Result<u64> {
        self.reserve(blocks, false).map(|()| 0)
    }

    /// Promises blocks for data that is written anew: as many become free when the transaction is durable, so that half
    /// of the hidden reserve may be lent to it, and what a limit withholds.
    ///
    /// # Errors
    /// As [`Self::reserve`].
    pub fn reserve_again(&self, blocks: u64) -> Result<()> {
        self.take_from_account(blocks, self.hidden() as i64 / 2 - self.withheld())
    }

    pub(super) fn take_from_account(&self, blocks: u64, floor: i64) -> Result<()> {
        let blocks = i64::try_from(blocks).map_err(|_| Error::NoSpace)?;
        if self.account.take(blocks, floor) { Ok(()) } else { Err(Error::NoSpace) }
    }

    /// Gives back reserved blocks that were not taken.
    pub fn unreserve(&self, blocks: u64) {
        self.account.give(blocks as i64);
    }

    /// Counts blocks that the running transaction freed; they stay unusable until [`Space::apply`].
    pub fn pending_free(&self, blocks: u64) {
        self.pending.add(blocks as i64);
    }
}
