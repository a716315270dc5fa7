//! Groups in which nothing is allocated for the time being, and what their domains have to be told when that ends.

use crate::space::Emptying;
use crate::types::DomainId;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Kept(Vec<(DomainId, Emptying)>);

impl Kept {
    /// Adds a group that is to be emptied.
    pub fn push(&mut self, domain: DomainId, group: Emptying) {
        self.0.push((domain, group));
    }

    /// One of them, to be emptied.
    pub fn take(&mut self, group: u32) -> Option<Emptying> {
        let at = self.0.iter().position(|(_, e)| e.number() == group)?;
        Some(self.0.swap_remove(at).1)
    }

    /// All of them.
    pub fn take_all(&mut self) -> impl Iterator<Item = (DomainId, Emptying)> + '_ {
        self.0.drain(..)
    }
}
