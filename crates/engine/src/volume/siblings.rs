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
    /// By number, each set once, when it is open. They have this in turn.
    domains: Box<[OnceLock<Weak<Domain>>]>,
}

impl Siblings {
    /// With the owners of all groups, room for `room` groups and `domains` domains, and no domain yet.
    pub fn new(owners: impl Iterator<Item = Option<DomainId>>, room: usize, domains: usize) -> Self {
        let owner: Box<[AtomicU16]> = std::iter::repeat_with(AtomicU16::default).take(room).collect();
        for (place, d) in owner.iter().zip(owners) {
            place.store(number(d), Ordering::Relaxed);
        }
        Self { owner, domains: std::iter::repeat_with(OnceLock::new).take(domains).collect() }
    }

    /// Groups that there is room for.
    pub fn room(&self) -> usize {
        self.owner.len()
    }

    /// A domain is open.
    pub fn add(&self, domain: &Arc<Domain>) {
        if let Some(place) = self.domains.get(usize::from(domain.id.0)) {
            // once for each
            let _ = place.set(Arc::downgrade(domain));
        }
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
        self.domains.get(usize::from(id.0))?.get()?.upgrade()
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
