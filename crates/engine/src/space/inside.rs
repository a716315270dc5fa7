//! Whether runs of blocks are the domain's own, to be had by its inodes: asked of what records name before it is believed.

use super::Space;
use super::apply::{blocks_of, for_each_piece};
use super::group::Group;
use crate::error::Result;
use braidfs_format::BlockAddr;
use braidfs_format::journal::Record;
use std::cell::RefCell;
use std::sync::Arc;

/// Answers for one thread. What is asked one after the other often lies in one group: that is kept.
pub(crate) struct Inside<'s> {
    space: &'s Space,
    group: RefCell<Option<Arc<Group>>>,
}

impl Space {
    /// What says whether runs of blocks are the domain's.
    pub(crate) fn inside(&self) -> Inside<'_> {
        Inside { space: self, group: RefCell::new(None) }
    }

    /// What [`Self::apply`] would refuse for the place of its blocks: asked before the records become durable, or no mount could
    /// replay them.
    ///
    /// # Errors
    /// `Corrupt` where a run is not of this domain or touches metadata or journal.
    pub(crate) fn check_places(&self, records: &[Record]) -> Result<()> {
        let inside = self.inside();
        let mut runs = records.iter().filter_map(Record::table).filter_map(blocks_of);
        runs.try_for_each(|run| inside.check(run.addr, run.len))
    }
}

impl Inside<'_> {
    /// Whether `addr .. addr + len` can hold what inodes of the domain have: it lies in one of its groups, behind the tables of
    /// that, and not in the journal.
    pub fn holds(&self, addr: BlockAddr, len: u32) -> bool {
        self.check(addr, len).is_ok()
    }

    /// [`Self::holds`], and what is wrong else.
    fn check(&self, addr: BlockAddr, len: u32) -> Result<()> {
        let geometry = self.space.store.geometry();
        let is_in = |group: &Group| {
            let at = addr.0.checked_sub(geometry.group_start(group.number).0);
            at.is_some_and(|at| at < geometry.group_blocks().into())
        };
        let mut last = self.group.borrow_mut();
        let group = match &*last {
            Some(group) if is_in(group) => group,
            _ => last.insert(self.space.locate(addr)?.0),
        };
        let (_, segment, block) = geometry.split(addr);
        for_each_piece((group, segment, block), super::Run { addr, len }, |_, _, _| Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use super::super::testdev::store;
    use super::super::{Run, Space};
    use braidfs_format::journal::Record;
    use braidfs_format::{BlockAddr, DomainId};

    const D: DomainId = DomainId(3);

    /// Groups 0, with a journal behind its tables, and 2, a short one, are the domain's; group 1 is another's.
    #[test]
    fn runs_are_inside_that_lie_in_data_of_one_group() {
        let (_, store) = store(2, 3, 700);
        let journal = Run { addr: BlockAddr(28), len: 300 };
        Space::init_group(&store, D, 0, 1, Some((28, 300))).unwrap();
        Space::init_group(&store, DomainId(4), 1, 1, None).unwrap();
        Space::init_group(&store, D, 2, 1, None).unwrap();
        let space = Space::open(store, D, 1, &[0, 2], Some(journal), None).unwrap();
        let inside = space.inside();
        for (addr, len) in [(328, 1), (328, 696), (1023, 1), (2076, 672), (2747, 1), (328, 2)] {
            assert!(inside.holds(BlockAddr(addr), len), "{addr} + {len}");
            space.check_places(&[Record::Free { addr: BlockAddr(addr), len }]).unwrap();
        }
        for (addr, len) in [
            (0, 1),
            (27, 1),
            (28, 1),
            (327, 1),
            (327, 2),
            (328, 697),
            (1023, 2),
            (1052, 1),
            (2047, 30),
            (2075, 2),
            (2076, 673),
            (2748, 1),
            (3072, 1),
            (1 << 47, 1),
            (328, u32::MAX),
        ] {
            for before in [400, 2100] {
                assert!(inside.holds(BlockAddr(before), 1) && !inside.holds(BlockAddr(addr), len), "{addr} + {len}");
            }
            let good = Record::Free { addr: BlockAddr(400), len: 1 };
            let why = space.check_places(&[good, Record::Free { addr: BlockAddr(addr), len }]).unwrap_err();
            assert!(matches!(why, crate::Error::Corrupt(_)), "{why}");
        }
    }
}
