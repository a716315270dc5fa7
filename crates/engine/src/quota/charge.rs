//! What an operation has charged for an inode, until it is known to use it.

use super::owners::{Force, Owners, Quotas};
use crate::error::Result;
use std::cell::Cell;

thread_local! {
    static FORCE: Cell<Force> = const { Cell::new(Force::None) };
}

/// Limits hold for this thread as before again when the value is dropped.
#[derive(Debug)]
#[must_use]
pub struct Forced(Force);

/// What this thread does is not held to these limits.
pub fn forced(force: Force) -> Forced {
    Forced(FORCE.replace(force))
}

impl Drop for Forced {
    fn drop(&mut self) {
        FORCE.set(self.0);
    }
}

/// To which limits this thread is held.
pub(crate) fn force() -> Force {
    FORCE.get()
}

/// Charges for one inode, which are given back where they are not kept.
#[derive(Debug)]
#[must_use]
pub struct Charge<'a> {
    /// `None`: nothing is counted.
    quotas: Option<&'a Quotas>,
    of: Owners,
    blocks: u64,
    inodes: u64,
    /// Blocks that the inode has less, as the owners were told.
    gave: u64,
    /// To which limits who makes the inode is held; else what this thread does.
    maker: Option<Force>,
}

impl<'a> Charge<'a> {
    pub(crate) fn of(quotas: Option<&'a Quotas>, of: Owners) -> Self {
        Self { quotas, of, blocks: 0, inodes: 0, gave: 0, maker: None }
    }

    /// Whether anything is counted.
    pub fn is_on(&self) -> bool {
        self.quotas.is_some()
    }

    /// Charges blocks, after [`Self::inode`] as that was charged.
    ///
    /// # Errors
    /// [`Error::Quota`](crate::Error::Quota).
    pub fn blocks(&mut self, n: u64) -> Result<()> {
        if let Some(q) = self.quotas.filter(|_| n > 0) {
            q.take(self.of, n, 0, self.maker.unwrap_or(FORCE.get()))?;
            self.blocks += n;
        }
        Ok(())
    }

    /// Charges an inode to be made by a user who is, or is not, privileged.
    ///
    /// # Errors
    /// [`Error::Quota`](crate::Error::Quota).
    pub fn inode(&mut self, privileged: bool) -> Result<()> {
        if let Some(q) = self.quotas {
            let force = if privileged { Force::User } else { FORCE.get() };
            q.take(self.of, 0, 1, force)?;
            self.inodes += 1;
            self.maker = Some(force);
        }
        Ok(())
    }

    /// The inode has so many blocks less by now: they are had again before what follows is charged. Only before a
    /// [`Self::settle`].
    pub fn gave(&mut self, n: u64) {
        if let Some(q) = self.quotas {
            q.give(self.of, n, 0);
            self.gave += n;
        }
    }

    /// It is in use.
    pub fn keep(mut self) {
        (self.blocks, self.inodes) = (0, 0);
    }

    /// What the inode had, and has now: what was charged beyond that is given back, and what it has more is charged by force.
    pub fn settle(mut self, before: u64, now: u64) {
        let charged = (before + std::mem::take(&mut self.blocks)).saturating_sub(self.gave);
        if let Some(q) = self.quotas {
            q.give(self.of, charged.saturating_sub(now), 0);
            q.force(self.of, now.saturating_sub(charged), 0);
        }
    }
}

impl Drop for Charge<'_> {
    fn drop(&mut self) {
        if let Some(q) = self.quotas {
            q.give(self.of, self.blocks, self.inodes);
        }
    }
}

impl Quotas {
    /// Charges for an inode of these owners that is to be made.
    pub fn charge_new(&self, of: Owners) -> Charge<'_> {
        Charge::of(self.is_on().then_some(self), of)
    }
}
