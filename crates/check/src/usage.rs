//! What users, groups and projects use, as a check counts it from the inodes.

use braidfs_format::BLOCK_BYTES;
use braidfs_format::inode::{Inode, PROJECT_SHIFT};
use serde::ser::{Serialize, Serializer};
use std::collections::BTreeMap;

/// So many owners are told apart; of more nothing is told, so that an image cannot take all memory.
const OWNERS_MAX: usize = 65_536;

/// For whom it counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Owner {
    /// A user, by number.
    User(u32),
    /// A group, by number.
    Group(u32),
    /// The number that the inodes of a directory with limits carry.
    Project(u32),
}

/// What an owner uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Used {
    /// Who.
    #[serde(flatten)]
    pub owner: Owner,
    /// Bytes of blocks of files and directories.
    pub bytes: u64,
    /// Inodes.
    pub inodes: u64,
}

/// What all owners use. As JSON a list of [`Used`], or `null` where it was not counted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Usage {
    /// Blocks and inodes.
    counted: BTreeMap<Owner, (u64, u64)>,
    too_many: bool,
    /// All inodes were looked at, and nothing was wrong.
    whole: bool,
}

impl Usage {
    /// Counts an inode with so many blocks of content.
    pub(crate) fn add(&mut self, i: &Inode, blocks: u64) {
        let project = Some(i.flags >> PROJECT_SHIFT).filter(|n| *n > 0).map(Owner::Project);
        for owner in [Owner::User(i.uid), Owner::Group(i.gid)].into_iter().chain(project) {
            self.add_to(owner, blocks, 1);
        }
    }

    fn add_to(&mut self, owner: Owner, blocks: u64, inodes: u64) {
        if self.counted.len() >= OWNERS_MAX && !self.counted.contains_key(&owner) {
            self.too_many = true;
            return;
        }
        let sum = self.counted.entry(owner).or_default();
        *sum = (sum.0.saturating_add(blocks), sum.1.saturating_add(inodes));
    }

    /// Adds what another part of the volume has.
    pub(crate) fn join(&mut self, other: Self) {
        self.too_many |= other.too_many;
        other.counted.into_iter().for_each(|(owner, (blocks, inodes))| self.add_to(owner, blocks, inodes));
    }

    /// Nothing is missing.
    pub(crate) fn set_whole(&mut self) {
        self.whole = true;
    }

    /// All owners, users first, then groups, by their numbers; `None` where not all was counted: of a volume with errors, of one
    /// that was not looked at, or of too many owners.
    pub fn owners(&self) -> Option<Vec<Used>> {
        let used = |(owner, (blocks, inodes)): (&Owner, &(u64, u64))| Used {
            owner: *owner,
            bytes: blocks.saturating_mul(BLOCK_BYTES as u64),
            inodes: *inodes,
        };
        (self.whole && !self.too_many).then(|| self.counted.iter().map(used).collect())
    }
}

impl Serialize for Usage {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        self.owners().serialize(to)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_come_together_and_owners_are_not_without_end() {
        let (mut a, mut b) = (Usage::default(), Usage::default());
        a.add_to(Owner::User(7), 3, 1);
        b.add_to(Owner::User(7), 2, 1);
        b.add_to(Owner::Group(9), 2, 1);
        a.join(b);
        assert_eq!(a.owners(), None, "not all was looked at");
        a.set_whole();
        let json = serde_json::to_value(&a).unwrap();
        let want =
            serde_json::json!([{"user": 7, "bytes": 20480, "inodes": 2}, {"group": 9, "bytes": 8192, "inodes": 1}]);
        assert_eq!(json, want);
        (0..OWNERS_MAX as u32).for_each(|n| a.add_to(Owner::User(n), 1, 1));
        assert_eq!((a.owners(), a.counted.len()), (None, OWNERS_MAX));
        assert!(serde_json::to_value(&a).unwrap().is_null());
    }
}
