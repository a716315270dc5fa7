//! Limits of users, groups and directories: entries of the internal attributes [`RECORDS`] of the root directory.

use crate::Corrupt;
use crate::inode::PROJECT_MAX;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Name of the attribute with limits of users and directories: of no name space that users reach.
pub const XATTR: &[u8] = b"braidfs.quota";
/// Name of the attribute with limits of groups. Programs that know none refuse a kind that they do not know, and with it the
/// whole record: so groups have one of their own.
pub const GROUPS_XATTR: &[u8] = b"braidfs.quota.groups";
/// Names of all records.
pub const RECORDS: [&[u8]; 2] = [XATTR, GROUPS_XATTR];

/// `kind`: a user.
pub const USER: u8 = 1;
/// `kind`: a directory, by the number of its project.
pub const PROJECT: u8 = 2;
/// `kind`: a group.
pub const GROUP: u8 = 3;

/// One of them. Of blocks and inodes 0 is no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct QuotaEntry {
    /// [`USER`] or [`PROJECT`]; [`GROUP`] in the record of groups.
    pub kind: u8,
    /// Unused, 0.
    pub reserved0: [u8; 3],
    /// Number of the user, of the group, or of the project.
    pub id: U32,
    /// Most blocks of content.
    pub blocks: U64,
    /// Blocks that may be exceeded for [`Self::grace`] only.
    pub soft_blocks: U64,
    /// Most inodes.
    pub inodes: U64,
    /// Inodes that may be exceeded for [`Self::grace`] only.
    pub soft_inodes: U64,
    /// Seconds.
    pub grace: U32,
    /// Generation of [`Self::root`].
    pub root_generation: U32,
    /// The directory of a project; else 0.
    pub root: U64,
    /// Since when there are more than [`Self::soft_blocks`], seconds since 1970; 0: there are not.
    pub blocks_since: U64,
    /// Since when there are more than [`Self::soft_inodes`].
    pub inodes_since: U64,
}
const _: () = assert!(size_of::<QuotaEntry>() == 72);

impl QuotaEntry {
    /// What the entries are sorted by.
    pub fn key(&self) -> (u8, u32) {
        (self.kind, self.id.get())
    }
}

/// The name of the attribute that entries of a kind stand in.
fn record_of(kind: u8) -> &'static [u8] {
    if kind == GROUP { GROUPS_XATTR } else { XATTR }
}

/// The value of the attribute `record`: those of the entries that stand there, which rise by their keys.
pub fn encode(record: &[u8], entries: &[QuotaEntry]) -> Vec<u8> {
    entries.iter().filter(|e| record_of(e.kind) == record).flat_map(|e| e.as_bytes()).copied().collect()
}

/// Decodes it.
///
/// # Errors
/// [`Corrupt`] where an entry is of no kind of this record, has no number that its kind can have, or does not rise.
pub fn decode(record: &[u8], value: &[u8]) -> Result<Vec<QuotaEntry>, Corrupt> {
    let bad = |why: String| Corrupt::new("quota", why);
    let (entries, rest) = value.as_chunks::<{ size_of::<QuotaEntry>() }>();
    if !rest.is_empty() {
        return Err(bad(format!("{} bytes are no whole entries", value.len())));
    }
    let mut all: Vec<QuotaEntry> = Vec::with_capacity(entries.len());
    for e in entries {
        let e = QuotaEntry::read_from_bytes(e).map_err(|_| bad("too short".into()))?;
        let holds = match e.kind {
            USER | GROUP => e.root.get() == 0,
            PROJECT => (1..=PROJECT_MAX).contains(&e.id.get()) && e.root.get() > 0,
            _ => false,
        };
        if !holds || record_of(e.kind) != record || all.last().is_some_and(|last| last.key() >= e.key()) {
            return Err(bad(format!("entry {}, of kind {} and number {}", all.len(), e.kind, e.id)));
        }
        all.push(e);
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_come_back() {
        let user = QuotaEntry { kind: USER, id: 1000.into(), blocks: 5.into(), grace: 7.into(), ..Default::default() };
        let project = QuotaEntry { kind: PROJECT, id: PROJECT_MAX.into(), root: 9.into(), ..Default::default() };
        let group = QuotaEntry { kind: GROUP, id: 1000.into(), soft_inodes: 9.into(), ..Default::default() };
        let all = [user, project, group];
        assert_eq!(decode(XATTR, &encode(XATTR, &all)), Ok(vec![user, project]));
        assert_eq!(decode(GROUPS_XATTR, &encode(GROUPS_XATTR, &all)), Ok(vec![group]));
        assert_eq!(decode(XATTR, &[]), Ok(vec![]));
        // as it was before there were groups, and no kind that a program of then refuses
        assert_eq!(encode(XATTR, &all), [user, project].as_bytes());
        assert!(
            decode(XATTR, &encode(GROUPS_XATTR, &all)).is_err() && decode(GROUPS_XATTR, &encode(XATTR, &all)).is_err()
        );
    }

    #[test]
    fn what_does_not_hold_is_refused() {
        let user = QuotaEntry { kind: USER, id: 1000.into(), ..Default::default() };
        let project = QuotaEntry { kind: PROJECT, id: 1.into(), root: 9.into(), ..Default::default() };
        let wrong = [
            encode(XATTR, &[user, user]),
            encode(XATTR, &[project, user]),
            [QuotaEntry { kind: 4, ..user }].as_bytes().to_vec(),
            encode(XATTR, &[QuotaEntry { root: 1.into(), ..user }]),
            encode(XATTR, &[QuotaEntry { id: 0.into(), ..project }]),
            encode(XATTR, &[QuotaEntry { id: (PROJECT_MAX + 1).into(), ..project }]),
            encode(XATTR, &[QuotaEntry { root: 0.into(), ..project }]),
            encode(XATTR, &[user])[..71].to_vec(),
        ];
        for value in wrong {
            assert!(decode(XATTR, &value).is_err(), "{value:?}");
        }
    }
}
