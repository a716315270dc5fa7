//! Limits of users and of directories: entries of the internal attribute [`XATTR`] of the root directory.

use crate::Corrupt;
use crate::inode::PROJECT_MAX;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Name of the attribute: of no name space that users reach.
pub const XATTR: &[u8] = b"braidfs.quota";

/// `kind`: a user.
pub const USER: u8 = 1;
/// `kind`: a directory, by the number of its project.
pub const PROJECT: u8 = 2;

/// One of them. Of blocks and inodes 0 is no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct QuotaEntry {
    /// [`USER`] or [`PROJECT`].
    pub kind: u8,
    /// Unused, 0.
    pub reserved0: [u8; 3],
    /// Number of the user, or of the project.
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
    /// The directory of a project; of a user 0.
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

/// The attribute's value. The entries rise by their keys.
pub fn encode(entries: &[QuotaEntry]) -> Vec<u8> {
    entries.as_bytes().to_vec()
}

/// Decodes it.
///
/// # Errors
/// [`Corrupt`] where an entry is of no kind, has no number that its kind can have, or does not rise.
pub fn decode(value: &[u8]) -> Result<Vec<QuotaEntry>, Corrupt> {
    let bad = |why: String| Corrupt::new("quota", why);
    let (entries, rest) = value.as_chunks::<{ size_of::<QuotaEntry>() }>();
    if !rest.is_empty() {
        return Err(bad(format!("{} bytes are no whole entries", value.len())));
    }
    let mut all: Vec<QuotaEntry> = Vec::with_capacity(entries.len());
    for e in entries {
        let e = QuotaEntry::read_from_bytes(e).map_err(|_| bad("too short".into()))?;
        let holds = match e.kind {
            USER => e.root.get() == 0,
            PROJECT => (1..=PROJECT_MAX).contains(&e.id.get()) && e.root.get() > 0,
            _ => false,
        };
        if !holds || all.last().is_some_and(|last| last.key() >= e.key()) {
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
        assert_eq!(decode(&encode(&[user, project])), Ok(vec![user, project]));
        assert_eq!(decode(&[]), Ok(vec![]));
    }

    #[test]
    fn what_does_not_hold_is_refused() {
        let user = QuotaEntry { kind: USER, id: 1000.into(), ..Default::default() };
        let project = QuotaEntry { kind: PROJECT, id: 1.into(), root: 9.into(), ..Default::default() };
        let wrong = [
            encode(&[user, user]),
            encode(&[project, user]),
            encode(&[QuotaEntry { kind: 3, ..user }]),
            encode(&[QuotaEntry { root: 1.into(), ..user }]),
            encode(&[QuotaEntry { id: 0.into(), ..project }]),
            encode(&[QuotaEntry { id: (PROJECT_MAX + 1).into(), ..project }]),
            encode(&[QuotaEntry { root: 0.into(), ..project }]),
            encode(&[user])[..71].to_vec(),
        ];
        for value in wrong {
            assert!(decode(&value).is_err(), "{value:?}");
        }
    }
}
