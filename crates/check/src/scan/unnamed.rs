//! Records that came back with a lost node table block: which of them were deleted before.
//!
//! A directory that holds has all names of what hangs in it. So what was found again and has no name in it was deleted, and so was
//! what only a deleted directory names. But a directory that has lost entries says nothing of what it does not name: there the links
//! count, as those of all other inodes do. And a directory was there in which something hangs that is in use for certain.

use super::names::{LinkIndex, is_dir};
use crate::codes;
use crate::model::Model;
use crate::parts::domain::Domain;
use braidfs_format::{InodeNo, NodeId};
use std::collections::{BTreeSet, HashMap, HashSet};

/// Findings of a directory after which entries may be missing in it.
const ENTRIES_LOST: [u32; 14] = [
    codes::NODE_BLOCK,
    codes::RECORD,
    codes::INODE,
    codes::NODE_BLOCK_OLD,
    codes::OVERFLOW_MISSING,
    codes::OVERFLOW_SHARED,
    codes::CONTENT,
    codes::ROOT,
    codes::EXTENT_PLACE,
    codes::BLOCK_SHARED,
    codes::EXTENT_ORDER,
    codes::EXTENT_OLD,
    codes::BUCKET,
    codes::INLINE_ENTRIES,
];

/// Drops the inodes found again that were deleted, once all entries were looked at.
pub fn drop_unnamed(m: &mut Model, index: &mut LinkIndex) {
    let found = |d: &Domain| d.recovered.difference(&d.outdated).copied().collect::<Vec<_>>();
    // no inode has the number of an overflow node
    let recovered: BTreeSet<InodeNo> = m.domains.iter().flat_map(found).map(NodeId::inode).collect();
    if recovered.is_empty() {
        return;
    }
    let used = used_dirs(m, &recovered);
    let torn = torn_dirs(m);
    let mut hanging = unnamed_in(m, &recovered);
    // by rising numbers, each before what comes after it in its directory
    let mut todo: Vec<InodeNo> = recovered.iter().rev().copied().collect();
    while let Some(node) = todo.pop() {
        let Some(ino) = m.inodes.get(node) else { continue };
        let told = |dir: InodeNo| torn.contains(&dir) && is_dir(m, dir);
        let stays = ino.any_linked() || (0..ino.links()).filter_map(|at| ino.parent(at)).any(told);
        if node == InodeNo::ROOT || used.contains(&node) || stays {
            continue;
        }
        if ino.is_dir() {
            todo.extend(hanging.remove(&node).into_iter().flatten());
            todo.extend(unname_all_in(m, index, node).into_iter().filter(|n| recovered.contains(n)));
        }
        m.log.add(codes::RECOVERED_UNNAMED, Some(node.node()), "record found again that no directory names: dropped");
        m.remove(node);
    }
}

/// Those of `recovered` in which, or below which, something hangs that is in use for certain.
fn used_dirs(m: &Model, recovered: &BTreeSet<InodeNo>) -> HashSet<InodeNo> {
    let mut todo: Vec<InodeNo> = Vec::new();
    m.inodes.select(|node, i| {
        // of one that an older record stands in for the names may be old as well
        if !recovered.contains(&node) && !i.links_lost() {
            todo.extend((0..i.links()).filter_map(|at| i.parent(at)).filter(|p| recovered.contains(p)));
        }
        false
    });
    let mut used = HashSet::new();
    while let Some(dir) = todo.pop() {
        if let Some(i) = m.inodes.get(dir).filter(|i| i.is_dir() && used.insert(dir)) {
            todo.extend(i.parent(0).filter(|p| recovered.contains(p)));
        }
    }
    used
}

/// Directories of which entries may be missing.
fn torn_dirs(m: &Model) -> HashSet<InodeNo> {
    // one that was made again is believed where something else than links names it
    let made_again = |dir: InodeNo| m.inodes.get(dir).is_some_and(|i| i.links_lost() && i.any_linked());
    let torn = |code: u32, dir: InodeNo| ENTRIES_LOST.contains(&code) || code == codes::LINK_PARENT && made_again(dir);
    let about = m.log.findings.iter().filter_map(|f| Some((f.code, InodeNo(f.node?))));
    about.filter(|(code, dir)| torn(*code, *dir)).map(|(_, dir)| dir).collect()
}

/// Those of `recovered` that have no name, by the directories in which their links say that they hang.
fn unnamed_in(m: &Model, recovered: &BTreeSet<InodeNo>) -> HashMap<InodeNo, Vec<InodeNo>> {
    let mut hanging: HashMap<InodeNo, Vec<InodeNo>> = HashMap::new();
    for &node in recovered {
        let Some(i) = m.inodes.get(node).filter(|i| !i.any_linked()) else { continue };
        for parent in (0..i.links()).filter_map(|at| i.parent(at)).filter(|p| recovered.contains(p)) {
            hanging.entry(parent).or_default().push(node);
        }
    }
    hanging
}

/// The entries of a directory that goes confirm no link any more; the inodes that they name.
fn unname_all_in(m: &mut Model, index: &mut LinkIndex, dir: InodeNo) -> Vec<InodeNo> {
    let name_key = m.inodes.name_key;
    let keys = |e: &braidfs_format::dentry::Dentry| (e.node, name_key.of(dir, &e.name));
    let named: Vec<(InodeNo, u64)> = m.body(dir).map(|d| d.entries.iter().map(keys).collect()).unwrap_or_default();
    for &(node, key) in &named {
        let at = m.inodes.get(node).and_then(|ino| index.find(&name_key, node, ino, dir, key));
        if let Some(at) = at {
            m.inodes.set_linked(node, at, false);
        }
    }
    named.into_iter().map(|(node, _)| node).collect()
}
