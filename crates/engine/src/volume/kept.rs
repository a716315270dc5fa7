//! Groups in which nothing is allocated for the time being, and what their domains have to be told when that ends; and those that
//! could not be emptied lately.

use crate::space::Emptying;
use crate::types::DomainId;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// For so long it is not tried again to empty a group for another domain.
const STAYED: Duration = Duration::from_secs(5);

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Kept {
    groups: Vec<(DomainId, Emptying)>,
    /// Groups that could not be emptied for another domain, since when.
    stayed: HashMap<u32, Instant>,
}

impl Kept {
    /// Adds a group that is to be emptied.
    pub fn push(&mut self, domain: DomainId, group: Emptying) {
        self.groups.push((domain, group));
    }

    /// One of them, to be emptied.
    pub fn take(&mut self, group: u32) -> Option<Emptying> {
        let at = self.groups.iter().position(|(_, e)| e.number() == group)?;
        Some(self.groups.swap_remove(at).1)
    }

    /// All of them.
    pub fn take_all(&mut self) -> impl Iterator<Item = (DomainId, Emptying)> + '_ {
        self.groups.drain(..)
    }

    /// A group could not be emptied for another domain: what lies there has a fixed place, say.
    pub fn note_stayed(&mut self, group: u32) {
        self.stayed.insert(group, Instant::now());
    }

    /// Groups for which that was so a moment ago.
    pub fn stayed(&mut self) -> Vec<u32> {
        self.stayed.retain(|_, since| since.elapsed() < STAYED);
        self.stayed.keys().copied().collect()
    }
}
