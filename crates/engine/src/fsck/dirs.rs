//! Reads and checks the entries of directories.

use super::codes;
use super::model::{Ino, Log};
use crate::cell::name_hash;
use crate::store::Store;
use braidfs_format::dentry::{Dentry, HASH_MAX, HASH_PROBES, bucket_first, decode_bucket, decode_entries};
use braidfs_format::inode::Content;
use braidfs_format::{BlockAddr, NodeId};
use std::collections::HashSet;

/// Fills [`Ino::entries`] of directory `node`. What cannot be read is made again from the links of the inodes.
pub fn read(store: &Store, key: &[u8; 16], log: &mut Log, node: NodeId, ino: &mut Ino) {
    if let Content::InlineDir(bytes) = &ino.inode.content {
        match decode_entries(bytes) {
            Ok(e) => ino.entries = e,
            Err(e) => {
                log.add(codes::INLINE_ENTRIES, Some(node), e.to_string());
                ino.dirty.entries = true;
            }
        }
    }
    let buckets: Vec<(u64, BlockAddr)> = ino
        .extents
        .iter()
        .flat_map(|e| (0..u64::from(e.len)).map(move |i| (e.lblk + i, BlockAddr(e.addr.0 + i))))
        .collect();
    for (i, &(lblk, addr)) in buckets.iter().enumerate() {
        let block = log.read(store, addr, 1);
        let entries = match decode_bucket(&block, node, lblk, store.volume, addr) {
            Ok(e) => e,
            Err(e) => {
                log.add(codes::BUCKET, Some(node), format!("bucket {lblk}: {e}"));
                ino.dirty.entries = true;
                continue;
            }
        };
        let end = buckets.get(i + 1).map_or(HASH_MAX + 1, |b| bucket_first(b.0));
        if let Some(e) = entries.iter().find(|e| e.hash < bucket_first(lblk) || e.hash >= end) {
            log.add(codes::BUCKET_RANGE, Some(node), format!("{} stands in bucket {lblk}", show(&e.name)));
            ino.dirty.entries = true;
        }
        ino.entries.extend(entries);
    }
    check_positions(key, log, node, ino);
}

fn check_positions(key: &[u8; 16], log: &mut Log, node: NodeId, ino: &mut Ino) {
    let mut names: HashSet<&[u8]> = HashSet::with_capacity(ino.entries.len());
    for e in &ino.entries {
        let h = name_hash(key, &e.name);
        if !(h..=h + HASH_PROBES).contains(&e.hash) {
            let why = format!("{} stands at {:#x}, its name says {h:#x}", show(&e.name), e.hash);
            log.add(codes::ENTRY_HASH, Some(node), why);
            ino.dirty.entries = true;
        }
        if !names.insert(&e.name) {
            // Which one is right, the links of the inodes say.
            log.add(codes::NAME_TWICE, Some(node), format!("{} stands there twice", show(&e.name)));
            ino.dirty.entries = true;
        }
    }
}

/// Gives all entries their positions again, in order. Entries that find no free one are returned.
pub fn arrange(key: &[u8; 16], entries: Vec<Dentry>) -> (Vec<Dentry>, Vec<Dentry>) {
    let mut taken: HashSet<u64> = HashSet::with_capacity(entries.len());
    let (mut placed, mut failed) = (Vec::with_capacity(entries.len()), Vec::new());
    let mut moved = Vec::new();
    // Those that stand right keep their position, which is a cookie that programs may hold.
    for e in entries {
        let h = name_hash(key, &e.name);
        if (h..=h + HASH_PROBES).contains(&e.hash) && taken.insert(e.hash) {
            placed.push(e);
        } else {
            moved.push(e);
        }
    }
    for mut e in moved {
        let h = name_hash(key, &e.name);
        match (h..=h + HASH_PROBES).find(|p| taken.insert(*p)) {
            Some(p) => {
                e.hash = p;
                placed.push(e);
            }
            None => failed.push(e),
        }
    }
    placed.sort_by_key(|e| e.hash);
    (placed, failed)
}

/// A name for messages.
pub fn show(name: &[u8]) -> String {
    format!("{:?}", String::from_utf8_lossy(name))
}
