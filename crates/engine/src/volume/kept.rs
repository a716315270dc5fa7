//! Groups in which nothing is allocated for the time being, and what their domains have to be told when that ends; and those that
//! could not be emptied lately.

use crate::space::Emptying;
use crate::types::DomainId;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::{Duration, Instant};

/// For so long it is not tried again to empty a group for another domain.
const STAYED: Duration = Duration::from_secs(5);

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Kept {
    /// By their numbers.
    groups: BTreeMap<u32, (DomainId, Emptying)>,
    /// Groups that could not be emptied for another domain, since when.
    stayed: HashMap<u32, Instant>,
}

impl Kept {
    /// Adds a group that is to be emptied.
    pub fn push(&mut self, domain: DomainId, group: Emptying) {
        self.groups.insert(group.number(), (domain, group));
    }

    /// One of them, to be emptied.
    pub fn take(&mut self, group: u32) -> Option<Emptying> {
        self.groups.remove(&group).map(|(_, e)| e)
    }

    /// Those of which `which` says so, by their domain and number.
    pub fn take_those(&mut self, which: impl Fn(DomainId, u32) -> bool) -> Self {
        let all = std::mem::take(&mut self.groups);
        let (taken, left) = all.into_iter().partition(|(g, (d, _))| which(*d, *g));
        self.groups = left;
        Self { groups: taken, stayed: HashMap::new() }
    }

    /// All of them.
    pub fn take_all(&mut self) -> impl Iterator<Item = (DomainId, Emptying)> {
        std::mem::take(&mut self.groups).into_values()
    }

    /// The domains whose they are.
    pub fn domains(&self) -> BTreeSet<DomainId> {
        self.groups.values().map(|(d, _)| *d).collect()
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
