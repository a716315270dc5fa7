//! Reads and checks the entries of directories.

use super::inodes::{Inodes, Name, NameKey, changed};
use super::model::{Domain, Ino, Log};
use super::{codes, nodes, one};
use crate::error::Result;
use braidfs_device::BLOCK_BYTES;
use braidfs_format::dentry::name_hash;
use braidfs_format::dentry::{Dentry, HASH_MAX, HASH_PROBES, bucket_first, decode_bucket, decode_entries};
use braidfs_format::inode::Content;
use braidfs_format::{BlockAddr, NodeId};
use braidfs_store::Store;
use std::collections::HashSet;

/// Buckets read at a time (4 KiB each).
const AT_A_TIME: usize = 64;

/// Reads and checks the directories of `domain`. The entries of those that hold are packed; the others are whole.
pub fn check(store: &Store, key: &[u8; 16], log: &mut Log, domain: &Domain, inodes: &mut Inodes) {
    for node in inodes.select(|_, i| i.is_dir()) {
        if let Some(ino) = inodes.whole_mut(node) {
            read(store, key, log, node, ino);
            continue;
        }
        let mut ino = match nodes::load(store, domain, node) {
            Ok(ino) => ino,
            Err(e) => {
                inodes.fail(e);
                continue;
            }
        };
        if let Some(names) = pack(store, key, &inodes.name_key, node, &ino) {
            inodes.set_names(node, names);
            continue;
        }
        read(store, key, log, node, &mut ino);
        if ino.dirty.any() {
            inodes.put(node, ino);
        } else {
            let names = ino.entries.iter().map(|e| Name::of(&inodes.name_key, node, e)).collect();
            inodes.set_names(node, names);
        }
    }
}

/// The buckets of a directory: logical block and address.
fn buckets(ino: &Ino) -> Vec<(u64, BlockAddr)> {
    let blocks = |e: &braidfs_format::inode::Extent| {
        let (lblk, addr) = (e.lblk, e.addr.0);
        (0..u64::from(e.len)).map(move |i| (lblk + i, BlockAddr(addr + i)))
    };
    ino.extents.iter().flat_map(blocks).collect()
}

/// Calls `f` with the entries of a directory, in the record or bucket by bucket: with the positions that they may have.
/// `false`: something cannot be read, or `f` says so.
fn each_bucket(
    store: &Store,
    node: NodeId,
    ino: &Ino,
    f: &mut dyn FnMut(Vec<Dentry>, std::ops::Range<u64>) -> bool,
) -> bool {
    if let Content::InlineDir(bytes) = &ino.inode.content {
        let Ok(e) = decode_entries(bytes) else { return false };
        if !f(e, 0..HASH_MAX + 1) {
            return false;
        }
    }
    let buckets = buckets(ino);
    for (start, some) in buckets.chunks(AT_A_TIME).enumerate().map(|(i, b)| (i * AT_A_TIME, b)) {
        let addrs: Vec<BlockAddr> = some.iter().map(|b| b.1).collect();
        let Ok(blocks) = one::read_scattered(store, &addrs) else { return false };
        for (i, (block, &(lblk, addr))) in blocks.chunks(BLOCK_BYTES).zip(some).enumerate() {
            let end = buckets.get(start + i + 1).map_or(HASH_MAX + 1, |b| bucket_first(b.0));
            let Ok(e) = decode_bucket(block, node, lblk, store.volume, addr) else { return false };
            if !f(e, bucket_first(lblk)..end) {
                return false;
            }
        }
    }
    true
}

/// The entries of a directory in which all holds, packed; else `None`.
fn pack(store: &Store, key: &[u8; 16], name_key: &NameKey, node: NodeId, ino: &Ino) -> Option<Vec<Name>> {
    let mut names = Vec::new();
    let holds = each_bucket(store, node, ino, &mut |entries, range| {
        entries.iter().all(|e| {
            let h = name_hash(key, &e.name);
            names.push(Name::of(name_key, node, e));
            range.contains(&e.hash) && (h..=h + HASH_PROBES).contains(&e.hash)
        })
    });
    holds.then_some(())?;
    let mut keys: Vec<u64> = names.iter().map(|n| n.key).collect();
    keys.sort_unstable();
    keys.windows(2).all(|w| w[0] != w[1]).then_some(names)
}

/// The entries of a directory in which all holds, once more.
///
/// # Errors
/// Where that is no longer so.
pub fn load(store: &Store, node: NodeId, ino: &Ino) -> Result<Vec<Dentry>> {
    let mut out = Vec::new();
    let holds = each_bucket(store, node, ino, &mut |entries, _| {
        out.extend(entries);
        true
    });
    if holds { Ok(out) } else { Err(changed(node, "its entries").into()) }
}

/// Fills [`Ino::entries`] of directory `node`. What cannot be read is made again from the links of the inodes.
fn read(store: &Store, key: &[u8; 16], log: &mut Log, node: NodeId, ino: &mut Ino) {
    if let Content::InlineDir(bytes) = &ino.inode.content {
        match decode_entries(bytes) {
            Ok(e) => ino.entries = e,
            Err(e) => {
                log.add(codes::INLINE_ENTRIES, Some(node), e.to_string());
                ino.dirty.entries = true;
            }
        }
    }
    let buckets = buckets(ino);
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
