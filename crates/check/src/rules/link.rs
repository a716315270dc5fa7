//! What links and names come to, in the inode and in its node table entry.

use braidfs_format::inode::Link;
use braidfs_format::node::REMOTE;
use std::collections::HashSet;

/// Most links of an inode that are compared with each other one by one.
const FEW_LINKS: usize = 16;

/// The link count of an inode: a directory counts itself, its entry and its subdirectories.
pub fn count(dir: bool, links: usize, subdirs: usize) -> u32 {
    u32::try_from(if dir { subdirs + 2 } else { links }).unwrap_or(u32::MAX)
}

/// The flags of an inode of `domain` that has `flags`, where its links are in directories of `parents`: `REMOTE` says
/// that one of these is another domain (`None`: nobody's).
pub fn flags(flags: u8, domain: Option<u16>, mut parents: impl Iterator<Item = Option<u16>>) -> u8 {
    if parents.any(|p| p != domain) { flags | REMOTE } else { flags & !REMOTE }
}

/// Whether no link stands twice.
pub fn distinct(links: &[Link]) -> bool {
    if links.len() <= FEW_LINKS {
        return links.iter().enumerate().all(|(i, l)| !links[..i].contains(l));
    }
    let all: HashSet<&Link> = links.iter().collect();
    all.len() == links.len()
}
