//! The domains as they see each other: whose a group is, and what of another is durable.

use crate::domain::Domain;
use crate::domain::peers::Peers;
use crate::error::Result;
use crate::types::*;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, OnceLock, Weak};

/// A domain as [`Siblings`] has it.
fn number(owner: Option<DomainId>) -> u16 {
    owner.map_or(0, |d| d.0 + 1)
}

/// The domains of a volume, for each other.
#[derive(Debug)]
pub(crate) struct Siblings {
    /// Number of each group's owner plus 1, 0: nobody. As many as the volume can grow to have.
    owner: Box<[AtomicU16]>,
    /// Set once, when all are open. They have this in turn.
    domains: OnceLock<Box<[Weak<Domain>]>>,
}

impl Siblings {
    /// With the owners of all groups, room for `room` groups, and no domain yet.
    pub fn new(owners: impl Iterator<Item = Option<DomainId>>, room: usize) -> Self {
        let owner: Box<[AtomicU16]> = std::iter::repeat_with(AtomicU16::default).take(room).collect();
        for (place, d) in owner.iter().zip(owners) {
            place.store(number(d), Ordering::Relaxed);
        }
        Self { owner, domains: OnceLock::new() }
    }

    /// Groups that there is room for.
    pub fn room(&self) -> usize {
        self.owner.len()
    }

    /// The domains are open.
    pub fn meet(&self, domains: &[Arc<Domain>]) {
        // set once: at the mount
        let _ = self.domains.set(domains.iter().map(Arc::downgrade).collect());
    }

    /// A group has another owner.
    pub fn set_owner(&self, group: u32, owner: Option<DomainId>) {
        self.owner[group as usize].store(number(owner), Ordering::Release);
    }

    /// The domain that owns a group.
    pub fn owner_of(&self, group: u32) -> Option<DomainId> {
        self.owner(group)
    }

    fn domain(&self, id: DomainId) -> Option<Arc<Domain>> {
        self.domains.get()?.get(usize::from(id.0))?.upgrade()
    }
}

impl Peers for Siblings {
    fn committed_tx(&self, domain: DomainId) -> TxId {
        self.domain(domain).map_or(TxId(u64::MAX), |d| d.committed_tx())
    }

    fn commit_upto(&self, domain: DomainId, tx: TxId) -> Result<()> {
        self.domain(domain).map_or(Ok(()), |d| d.commit_upto(tx))
    }

    fn owner(&self, group: u32) -> Option<DomainId> {
        let d = self.owner.get(group as usize)?.load(Ordering::Relaxed);
        d.checked_sub(1).map(DomainId)
    }
}
