//! What must be durable: of each domain its transactions up to one.
//!
//! Invariants: there is one transaction per domain, the latest; domains rise. So whoever waits for a frontier waits for
//! each domain once, and asks one question per domain.

use crate::types::{DomainId, TxId};
use smallvec::{SmallVec, smallvec};

/// Mostly of one domain.
type Points = SmallVec<[(DomainId, TxId); 2]>;

/// See the module. Millions of inodes have an empty one, which takes one word and no allocation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Frontier(Option<Box<Points>>);

impl Frontier {
    /// Waits for nothing.
    pub const EMPTY: Self = Self(None);

    /// The transactions of one domain up to `tx`.
    pub fn of(domain: DomainId, tx: TxId) -> Self {
        Self(Some(Box::new(smallvec![(domain, tx)])))
    }

    /// Has `tx` of `domain` in it, too.
    pub fn raise(&mut self, domain: DomainId, tx: TxId) {
        debug_assert!(tx.0 > 0, "{domain}: no transaction");
        let points = self.0.get_or_insert_with(Box::default);
        match points.binary_search_by_key(&domain, |(d, _)| *d) {
            Ok(at) => points[at].1 = points[at].1.max(tx),
            Err(at) => points.insert(at, (domain, tx)),
        }
    }

    /// Has all of `other` in it, too.
    pub fn merge(&mut self, other: &Self) {
        other.iter().for_each(|(d, t)| self.raise(d, t));
    }

    /// The domains, rising, each with the transaction.
    pub fn as_slice(&self) -> &[(DomainId, TxId)] {
        self.0.as_deref().map_or(&[], |points| points)
    }

    /// The transactions to wait for, at most one of a domain.
    pub fn iter(&self) -> impl Iterator<Item = (DomainId, TxId)> {
        self.as_slice().iter().copied()
    }

    /// Whether there is nothing in it.
    pub fn is_empty(&self) -> bool {
        self.as_slice().is_empty()
    }

    /// Whether one is pending. Where a transaction is not, no earlier one of its domain is either.
    pub fn any(&self, pending: impl Fn(DomainId, TxId) -> bool) -> bool {
        self.iter().any(|(d, t)| pending(d, t))
    }

    /// Forgets what is not pending.
    pub fn retain(&mut self, pending: impl Fn(DomainId, TxId) -> bool) {
        if let Some(points) = &mut self.0 {
            points.retain(|(d, t)| pending(*d, *t));
            if points.is_empty() {
                self.0 = None;
            }
        }
    }

    /// Forgets what is durable when `done` is.
    pub fn drop_covered(&mut self, done: &Self) {
        self.retain(|d, t| !done.iter().any(|(other, upto)| other == d && t <= upto));
    }
}

impl FromIterator<(DomainId, TxId)> for Frontier {
    fn from_iter<I: IntoIterator<Item = (DomainId, TxId)>>(all: I) -> Self {
        let mut f = Self::EMPTY;
        all.into_iter().for_each(|(d, t)| f.raise(d, t));
        f
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frontier(all: &[(u16, u64)]) -> Frontier {
        all.iter().map(|(d, t)| (DomainId(*d), TxId(*t))).collect()
    }

    #[test]
    fn one_transaction_per_domain_the_latest() {
        let f = frontier(&[(2, 7), (0, 3), (2, 5), (0, 4)]);
        assert_eq!(f.as_slice(), &[(DomainId(0), TxId(4)), (DomainId(2), TxId(7))]);
        let mut both = frontier(&[(1, 1), (2, 6)]);
        both.merge(&f);
        assert_eq!(both, frontier(&[(0, 4), (1, 1), (2, 7)]));
        both.merge(&Frontier::EMPTY);
        assert_eq!(both.as_slice().len(), 3);
    }

    #[test]
    fn what_is_durable_is_forgotten() {
        let committed = |d: DomainId| TxId([4, 9, 0][usize::from(d.0)]);
        let mut f = frontier(&[(0, 4), (1, 9), (2, 1)]);
        assert!(f.any(|d, t| committed(d) < t));
        f.retain(|d, t| committed(d) < t);
        assert_eq!(f, frontier(&[(2, 1)]));
        f.retain(|_, _| false);
        assert_eq!(f, Frontier::EMPTY);
        assert!(!f.any(|_, _| true) && f.is_empty());
    }

    #[test]
    fn a_later_transaction_is_not_covered() {
        let mut f = frontier(&[(0, 4), (1, 9), (2, 1)]);
        f.drop_covered(&frontier(&[(0, 4), (1, 8)]));
        assert_eq!(f, frontier(&[(1, 9), (2, 1)]));
    }

    #[test]
    fn an_inode_pays_a_word_for_it() {
        assert_eq!(size_of::<Frontier>(), size_of::<usize>());
    }
}
