//! The domains of a mounted volume: a list that grows and never moves, so that who reads it takes no lock.

use crate::domain::Domain;
use std::ops::Index;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

/// See the module. A domain's place is its number.
#[derive(Debug)]
pub(crate) struct Domains {
    places: Box<[OnceLock<Arc<Domain>>]>,
    len: AtomicUsize,
}

impl Domains {
    /// With room for `most`, or for those at hand where they are more.
    pub fn new(domains: Vec<Arc<Domain>>, most: usize) -> Self {
        let (len, most) = (domains.len(), most.max(domains.len()));
        let places: Box<[OnceLock<_>]> = domains.into_iter().map(OnceLock::from).collect();
        let mut places = places.into_vec();
        places.resize_with(most, OnceLock::new);
        Self { places: places.into(), len: AtomicUsize::new(len) }
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.len.load(Ordering::Acquire)
    }

    /// How many there can be.
    pub fn room(&self) -> usize {
        self.places.len()
    }

    /// The domain of this number.
    pub fn get(&self, number: usize) -> Option<&Arc<Domain>> {
        self.places.get(number)?.get()
    }

    /// By rising number.
    pub fn iter(&self) -> Iter<'_> {
        self.places[..self.len()].iter().filter_map(OnceLock::get)
    }

    /// One more, with the next number. Only one thread does this at a time; false where there is no room. `before` is called
    /// when who knows the number finds the domain, and nobody has been told of it.
    pub fn push(&self, domain: Arc<Domain>, before: impl FnOnce()) -> bool {
        let len = self.len();
        let fits = usize::from(domain.id.0) == len && self.places.get(len).is_some_and(|p| p.set(domain).is_ok());
        if fits {
            before();
            self.len.store(len + 1, Ordering::Release);
        }
        fits
    }
}

type Iter<'a> = std::iter::FilterMap<
    std::slice::Iter<'a, OnceLock<Arc<Domain>>>,
    fn(&'a OnceLock<Arc<Domain>>) -> Option<&'a Arc<Domain>>,
>;

impl<'a> IntoIterator for &'a Domains {
    type Item = &'a Arc<Domain>;
    type IntoIter = Iter<'a>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl Index<usize> for Domains {
    type Output = Arc<Domain>;

    fn index(&self, number: usize) -> &Arc<Domain> {
        // a number is given out once its domain is here
        self.get(number).unwrap_or_else(|| unreachable!("there is no domain {number}"))
    }
}
