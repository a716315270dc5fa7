//! Reservations: an operation reserves the blocks that it may need before it changes anything, so that ENOSPC comes
//! at the call and never from the flush.

use super::Space;
use crate::error::{Error, Result};
use std::sync::atomic::Ordering::Relaxed;

impl Space {
    /// Promises `blocks` blocks. An `essential` reservation may use the hidden reserve.
    ///
    /// # Errors
    /// [`Error::NoSpace`] where there are not that many.
    pub fn reserve(&self, blocks: u64, essential: bool) -> Result<()> {
        if blocks == 0 {
            return Ok(()); // also below the floor
        }
        let floor = if essential { 0 } else { self.hidden() as i64 };
        let blocks = i64::try_from(blocks).map_err(|_| Error::NoSpace)?;
        let fits = |now: i64| now.checked_sub(blocks).filter(|&left| left >= floor);
        self.unreserved.fetch_update(Relaxed, Relaxed, fits).map(drop).map_err(|_| Error::NoSpace)
    }

    /// Promises blocks for data that is written anew: as many become free when the transaction is durable, so that half
    /// of the hidden reserve may be lent to it.
    ///
    /// # Errors
    /// As [`Self::reserve`].
    pub fn reserve_again(&self, blocks: u64) -> Result<()> {
        let floor = self.hidden() as i64 / 2;
        let blocks = i64::try_from(blocks).map_err(|_| Error::NoSpace)?;
        let fits = |now: i64| now.checked_sub(blocks).filter(|&left| left >= floor);
        self.unreserved.fetch_update(Relaxed, Relaxed, fits).map(drop).map_err(|_| Error::NoSpace)
    }

    /// Gives back reserved blocks that were not taken.
    pub fn unreserve(&self, blocks: u64) {
        self.unreserved.fetch_add(blocks as i64, Relaxed);
    }

    /// Counts blocks that the running transaction freed; they stay unusable until [`Space::apply`].
    pub fn pending_free(&self, blocks: u64) {
        self.pending.fetch_add(blocks as i64, Relaxed);
    }
}
