//! Checks the namespace of the whole volume: entries against inodes, inodes against entries.
//!
//! The links in an inode's record are the truth; an entry is an index to it. So an entry that no link confirms goes,
//! and a link without an entry gets one. Only where an inode's links are lost are the entries that name it believed.
//! (What has no place left: [`super::lost`].)

use super::lost::{LostFound, restore_dirs};
use super::taken::give_names_back;
use super::unnamed::drop_unnamed;
use crate::codes;
use crate::model::Model;
use crate::model::inodes::{Name, NameKey, Seen};
use crate::parts::domain::Domain;
use crate::parts::ino::{Dirty, Ino};
use crate::rules::{link, show};
use braidfs_format::dentry::Dentry;
use braidfs_format::inode::{Inode, Link, Timestamp};
use braidfs_format::name::FileName;
use braidfs_format::node::{DIR, NodeEntry, REMOTE, USED};
use braidfs_format::{BlockAddr, InodeNo, NodeId};
use braidfs_store::Store;
use std::collections::{HashMap, HashSet};

/// Inodes with more links than this get an index of them.
const MANY_LINKS: usize = 16;

/// Runs all checks of the namespace on `m`.
pub fn check(m: &mut Model) {
    check_root(m);
    give_names_back(m);
    drop_orphans(m);
    restore_dirs(m);
    let mut index = LinkIndex::default();
    check_entries(m, &mut index);
    drop_unnamed(m, &mut index);
    check_links(m);
    reconnect_unlinked(m);
    break_loops(m);
    check_counts(m);
    check_remote(m);
}

/// Whether `node` is a directory.
pub fn is_dir(m: &Model, node: InodeNo) -> bool {
    m.inodes.get(node).is_some_and(|i| i.is_dir())
}

/// A new directory inode of generation `generation`, owned by root.
pub fn new_dir(generation: u32, links: Vec<Link>, mode: u32) -> Ino {
    let t = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    let t = Timestamp { sec: t.as_secs() as i64, nsec: t.subsec_nanos() };
    let linked = vec![true; links.len()];
    let inode = Inode { links, ..Inode::empty_dir(mode, t) };
    Ino { linked, dirty: Dirty { record: true, ..Dirty::default() }, ..Ino::new(generation, 0, USED | DIR, inode) }
}

/// The root must be a directory without links; where it is lost it is made again, and the links fill it.
fn check_root(m: &mut Model) {
    let root = InodeNo::ROOT;
    if !is_dir(m, root) {
        m.log.add(codes::ROOT, Some(root.node()), "there is no root directory; a new one is made");
        m.remove(root);
        let Some(domain) = m.domain_of(root) else { return };
        let store = std::sync::Arc::clone(&m.store);
        let generation = m
            .domains
            .get(usize::from(domain))
            .and_then(|d| d.entry(&store, root.node()))
            .map_or(1, |e| e.generation.max(1));
        m.inodes.put(root, new_dir(generation, vec![], 0o755));
    }
    if m.inodes.get(root).is_none_or(|i| i.links() == 0) {
        return;
    }
    if let Some(ino) = m.body(root) {
        ino.inode.links.clear();
        ino.linked.clear();
        ino.dirty.links = true;
        m.log.add(codes::DIR_LINKS, Some(root.node()), "the root directory has a link");
    }
}

/// Inodes without links that count none.
fn orphans(m: &Model) -> Vec<InodeNo> {
    m.inodes.select(|node, i| i.nlink() == 0 && i.links() == 0 && !i.links_lost() && node != InodeNo::ROOT)
}

/// Inodes that were unlinked while open, and never reclaimed.
fn drop_orphans(m: &mut Model) {
    for node in orphans(m) {
        m.log.add(codes::ORPHAN, Some(node.node()), "unlinked inode was not reclaimed");
        m.remove(node);
    }
}

/// Finds a link of an inode quickly, also where it has many.
#[derive(Default)]
pub struct LinkIndex(HashMap<InodeNo, HashMap<(InodeNo, u64), usize>>);

impl LinkIndex {
    /// The link of `node`, seen as `ino`, to the entry of `dir` whose hash is `key`.
    pub fn find(&mut self, name_key: &NameKey, node: InodeNo, ino: Seen<'_>, dir: InodeNo, key: u64) -> Option<usize> {
        let is = |i: usize| Some((ino.parent(i)?, ino.key(name_key, i)?));
        if ino.links() <= MANY_LINKS {
            return (0..ino.links()).find(|&i| ino.parent(i) == Some(dir) && ino.key(name_key, i) == Some(key));
        }
        let all = || (0..ino.links()).filter_map(|i| Some((is(i)?, i))).collect();
        self.0.entry(node).or_insert_with(all).get(&(dir, key)).copied()
    }

    /// `node` has got the link `at` to the entry of `dir` whose hash is `key`.
    fn add(&mut self, node: InodeNo, dir: InodeNo, key: u64, at: usize) {
        if let Some(all) = self.0.get_mut(&node) {
            all.insert((dir, key), at);
        }
    }
}

/// Checks every entry against the inode that it names, and drops the stale ones.
fn check_entries(m: &mut Model, index: &mut LinkIndex) {
    let mut packed = m.inodes.take_names();
    packed.sort_unstable_by_key(|p| p.0);
    let mut packed = packed.into_iter().peekable();
    for dir in m.inodes.select(|_, i| i.is_dir()) {
        let names = std::iter::from_fn(|| packed.next_if(|p| p.0 <= dir)).last().filter(|p| p.0 == dir);
        if let Some((_, names)) = names.filter(|_| m.inodes.whole(dir).is_none())
            && confirm(m, index, dir, &names)
        {
            continue;
        }
        check_entries_of(m, index, dir);
    }
}

/// Notes that the entries of `dir` confirm the links of the inodes that they name. `false`: something does not hold of
/// one, and nothing is noted.
fn confirm(m: &mut Model, index: &mut LinkIndex, dir: InodeNo, names: &[Name]) -> bool {
    let name_key = m.inodes.name_key;
    for (i, e) in names.iter().enumerate() {
        let at = m.inodes.get(e.node).filter(|ino| (ino.generation(), ino.kind()) == (e.generation, e.kind)).and_then(
            |ino| {
                let at = index.find(&name_key, e.node, ino, dir, e.key)?;
                (!ino.linked(at)).then_some(at)
            },
        );
        if let Some(at) = at {
            m.inodes.set_linked(e.node, at, true);
            continue;
        }
        for e in &names[..i] {
            let at = m.inodes.get(e.node).and_then(|ino| index.find(&name_key, e.node, ino, dir, e.key));
            if let Some(at) = at {
                m.inodes.set_linked(e.node, at, false);
            }
        }
        return false;
    }
    true
}

/// Checks the entries of `dir` one by one.
fn check_entries_of(m: &mut Model, index: &mut LinkIndex, dir: InodeNo) {
    let name_key = m.inodes.name_key;
    let Some(entries) = m.body(dir).map(|i| std::mem::take(&mut i.entries)) else { return };
    let before = entries.len();
    let mut changed = false;
    let mut names: HashSet<FileName> = HashSet::with_capacity(before);
    let mut kept = Vec::with_capacity(before);
    for mut e in entries {
        let name = || show(&e.name);
        let Some(ino) = m.inodes.get(e.node) else {
            m.log.add(
                codes::ENTRY_DEAD,
                Some(dir.node()),
                format!("{} names {}, which does not exist", name(), e.node),
            );
            continue;
        };
        let (generation, kind) = (ino.generation(), ino.kind());
        if generation != e.generation {
            let why = format!("{} names {} of generation {}, it has {generation}", name(), e.node, e.generation);
            m.log.add(codes::ENTRY_GENERATION, Some(dir.node()), why);
            continue;
        }
        let key = name_key.of(dir, &e.name);
        let found = index.find(&name_key, e.node, ino, dir, key);
        // An inode that lost its links is believed to hang where it is named.
        let believed = ino.links() == 0 && (ino.links_lost() || ino.nlink() > 0) && e.node != InodeNo::ROOT
            || ino.links_lost() && !ino.is_dir();
        let at = match found {
            Some(at) => at,
            None if believed => {
                let Some(ino) = m.body(e.node) else { continue };
                ino.links_lost = true;
                ino.inode.links.push(Link { parent: dir, name: e.name.clone() });
                ino.linked.push(false);
                ino.dirty.links = true;
                let at = ino.inode.links.len() - 1;
                index.add(e.node, dir, key, at);
                m.log.add(codes::ENTRY_STALE, Some(e.node.node()), format!("has lost its link {} in {dir}", name()));
                at
            }
            None => {
                let why = format!("{} names {}, which does not hang there", name(), e.node);
                m.log.add(codes::ENTRY_STALE, Some(dir.node()), why);
                continue;
            }
        };
        if m.inodes.get(e.node).is_some_and(|i| i.linked(at)) || !names.insert(e.name.clone()) {
            // Reported as a name that stands twice.
            continue;
        }
        m.inodes.set_linked(e.node, at, true);
        if e.kind != kind {
            let why = format!("{} is of type {kind}, the entry says {}", name(), e.kind);
            m.log.add(codes::ENTRY_KIND, Some(dir.node()), why);
            e.kind = kind;
            changed = true;
        }
        kept.push(e);
    }
    if let Some(ino) = m.inodes.whole_mut(dir) {
        ino.dirty.entries |= changed || kept.len() != before;
        ino.entries = kept;
    }
}

/// Names in the directories that were looked into so far.
type NamesOf = HashMap<InodeNo, HashMap<FileName, InodeNo>>;

/// Checks every link of every inode: its parent is a directory that has the entry.
fn check_links(m: &mut Model) {
    let mut names = NamesOf::new();
    let in_order = |i: Seen<'_>| i.all_linked() && !(i.is_dir() && i.links() > 1);
    for node in m.inodes.select(|_, i| !in_order(i)) {
        if m.inodes.get(node).is_some_and(|i| !in_order(i)) {
            check_links_of(m, &mut names, node);
        }
    }
}

/// Checks the links of one inode.
fn check_links_of(m: &mut Model, names: &mut NamesOf, node: InodeNo) {
    let Some(ino) = m.body(node) else { return };
    let dir = ino.is_dir();
    let links: Vec<(Link, bool)> = ino.inode.links.iter().cloned().zip(ino.linked.iter().copied()).collect();
    // Of several links of a directory the first that has its entry counts.
    let only = if dir { links.iter().position(|l| l.1).or(Some(0)) } else { None };
    let (mut kept, mut distinct): (Vec<Link>, HashSet<&Link>) = Default::default();
    for (i, (link, linked)) in links.iter().enumerate() {
        let (name, parent) = (show(&link.name), link.parent);
        if only.is_some_and(|o| o != i) {
            let why = format!("directory has a second link {name} in {parent}");
            m.log.add(codes::DIR_LINKS, Some(node.node()), why);
            if *linked {
                drop_entry(m, link, node);
            }
            continue;
        }
        if distinct.contains(link) {
            m.log.add(codes::LINK_TWICE, Some(node.node()), format!("has the link {name} in {parent} twice"));
            continue;
        }
        if *linked || make_entry(m, names, link, node) {
            kept.push(link.clone());
            distinct.insert(link);
        }
    }
    if let Some(ino) = m.body(node) {
        if ino.inode.links != kept {
            ino.dirty.links = true;
            ino.inode.links = kept;
        }
        ino.linked = vec![true; ino.inode.links.len()];
    }
}

/// Makes the entry that a link has not; false where the link goes: its parent is no directory, or another inode that was
/// linked later has the name.
fn make_entry(m: &mut Model, names: &mut NamesOf, link: &Link, node: InodeNo) -> bool {
    let (name, parent) = (show(&link.name), link.parent);
    if !is_dir(m, parent) || parent == node {
        let why = format!("hangs as {name} in {parent}, which is no directory");
        m.log.add(codes::LINK_PARENT, Some(node.node()), why);
        return false;
    }
    let Some(ino) = m.body(node) else { return false };
    let (generation, kind, seq) = (ino.generation, (ino.inode.mode >> 12) as u8, ino.inode.link_seq);
    let in_parent = names.entry(parent).or_insert_with(|| {
        let entries = m.body(parent).map(|p| p.entries.as_slice()).unwrap_or_default();
        entries.iter().map(|e| (e.name.clone(), e.node)).collect()
    });
    if let Some(&other) = in_parent.get(&link.name) {
        let newer = m.body(other).is_none_or(|o| seq > o.inode.link_seq);
        let why = format!("hangs as {name} in {parent}, and so does {other}");
        m.log.add(codes::LINK_TAKEN, Some(node.node()), why);
        if !newer {
            return false;
        }
        drop_entry(m, link, other);
        drop_link(m, other, link);
    } else {
        let why = format!("hangs as {name} in {parent}, which has no such entry");
        m.log.add(codes::LINK_NO_ENTRY, Some(node.node()), why);
    }
    in_parent.insert(link.name.clone(), node);
    add_entry(m, parent, link.name.clone(), node, generation, kind);
    true
}

/// Adds an entry to `dir`.
pub fn add_entry(m: &mut Model, dir: InodeNo, name: FileName, node: InodeNo, generation: u32, kind: u8) {
    if let Some(d) = m.body(dir) {
        // Position 0 is none: the directory is arranged when it is written.
        d.entries.push(Dentry { hash: 0, node, generation, kind, name });
        d.dirty.entries = true;
    }
}

fn drop_entry(m: &mut Model, link: &Link, node: InodeNo) {
    if let Some(d) = m.body(link.parent) {
        d.entries.retain(|e| e.node != node || e.name != link.name);
        d.dirty.entries = true;
    }
}

fn drop_link(m: &mut Model, node: InodeNo, link: &Link) {
    let Some(i) = m.body(node) else { return };
    if let Some(at) = i.inode.links.iter().position(|l| l == link) {
        i.inode.links.remove(at);
        if at < i.linked.len() {
            i.linked.remove(at);
        }
        i.dirty.links = true;
    }
}

/// What has no link left goes to `/lost+found`.
fn reconnect_unlinked(m: &mut Model) {
    let mut lost = LostFound::default();
    for node in m.inodes.select(|node, i| node != InodeNo::ROOT && i.links() == 0) {
        m.log.add(codes::UNLINKED, Some(node.node()), "hangs nowhere: connected to /lost+found");
        lost.connect(m, node);
    }
}

/// A free node of `domain` with its new generation, marked used.
pub fn take_node(store: &Store, domain: &mut Domain) -> Option<(NodeId, u32)> {
    let g = store.geometry();
    let Domain { groups, undecided, .. } = domain;
    let (node, generation) = groups.values_mut().find_map(|group| {
        // the first numbers of the volume are not given out
        let from = if group.number == 0 { InodeNo::ROOT.0 as u32 + 1 } else { 0 };
        let slot = group.entries.free(from, |slot| undecided.contains(&g.node(group.number, slot)))?;
        Some((g.node(group.number, slot), group.entries.get(slot)?.generation.wrapping_add(1)))
    })?;
    domain.set_entry(store, node, NodeEntry { addr: BlockAddr(0), index: 0, flags: USED, generation, written: 0 });
    Some((node, generation))
}

/// Subdirectories: parent and number, sorted.
fn children(m: &Model) -> Vec<(InodeNo, InodeNo)> {
    let mut out = Vec::new();
    m.inodes.select(|node, i| {
        out.extend(i.parent(0).filter(|_| i.is_dir()).map(|parent| (parent, node)));
        false
    });
    out.sort_unstable();
    out
}

/// Those of `parent`.
fn children_of(children: &[(InodeNo, InodeNo)], parent: InodeNo) -> impl Iterator<Item = InodeNo> {
    let from = children.partition_point(|c| c.0 < parent);
    children[from..].iter().take_while(move |c| c.0 == parent).map(|c| c.1)
}

/// Directories that hang below themselves: one of each loop goes to `/lost+found`.
fn break_loops(m: &mut Model) {
    let children = children(m);
    let mut reached: HashSet<InodeNo> = HashSet::new();
    let reach = |from: InodeNo, reached: &mut HashSet<InodeNo>| {
        let mut todo = vec![from];
        while let Some(n) = todo.pop() {
            if reached.insert(n) {
                todo.extend(children_of(&children, n));
            }
        }
    };
    reach(InodeNo::ROOT, &mut reached);
    let mut lost = LostFound::default();
    for node in m.inodes.select(|_, i| i.is_dir()) {
        if reached.contains(&node) {
            continue;
        }
        let mut seen = HashSet::new();
        let mut at = node;
        while seen.insert(at) {
            match m.inodes.get(at).and_then(|i| i.parent(0)) {
                Some(parent) => at = parent,
                None => break,
            }
        }
        let Some(link) = m.body(at).and_then(|i| i.inode.links.first().cloned()) else { continue };
        m.log.add(codes::UNREACHABLE, Some(at.node()), "directory hangs below itself: connected to /lost+found");
        drop_entry(m, &link, at);
        lost.connect(m, at);
        reach(at, &mut reached);
    }
}

fn check_counts(m: &mut Model) {
    let children = children(m);
    let count = |node: InodeNo, i: Seen<'_>| {
        let subdirs = if i.is_dir() { children_of(&children, node).count() } else { 0 };
        link::count(i.is_dir(), i.links(), subdirs)
    };
    for node in m.inodes.select(|node, i| i.nlink() != count(node, i)) {
        let Some(is) = m.inodes.get(node).map(|i| count(node, i)) else { continue };
        let Some(ino) = m.body(node) else { continue };
        // Part of connecting: only a count that was wrong by itself is a finding.
        let why = format!("counts {} links, has {is}", ino.inode.nlink);
        ino.inode.nlink = is;
        ino.dirty.record = true;
        m.log.add(codes::LINK_COUNT, Some(node.node()), why);
    }
}

fn check_remote(m: &mut Model) {
    let right = |m: &Model, node: InodeNo, i: Seen<'_>| {
        let parents = (0..i.links()).map(|at| i.parent(at).and_then(|p| m.domain_of(p)));
        link::flags(i.flags(), m.domain_of(node), parents)
    };
    for node in m.inodes.select(|node, i| right(m, node, i) != i.flags()) {
        let Some(flags) = m.inodes.get(node).map(|i| right(m, node, i)) else { continue };
        let Some(ino) = m.body(node) else { continue };
        ino.flags = flags;
        ino.dirty.record = true;
        let remote = flags & REMOTE != 0;
        let why = if remote { "lacks the flag REMOTE" } else { "has the flag REMOTE without need" };
        m.log.add(codes::REMOTE_FLAG, Some(node.node()), why);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An index that is made anew for each name costs the square of the names.
    #[test]
    fn an_index_of_links_learns_of_new_ones() {
        let key = NameKey::random().unwrap();
        let (dir, node) = (InodeNo(7), InodeNo(9));
        let link = |i: usize| Link { parent: dir, name: format!("{i}").into_bytes().into() };
        let mut ino = new_dir(1, (0..2 * MANY_LINKS).map(link).collect(), 0);
        let mut index = LinkIndex::default();
        let asked = |index: &mut LinkIndex, ino: &Ino, i: usize| {
            index.find(&key, node, Seen::of(ino), dir, key.of(dir, &link(i).name))
        };
        assert_eq!(asked(&mut index, &ino, 5), Some(5));
        for i in 2 * MANY_LINKS..4 * MANY_LINKS {
            assert_eq!(asked(&mut index, &ino, i), None);
            ino.inode.links.push(link(i));
            index.add(node, dir, key.of(dir, &link(i).name), i);
            assert_eq!((index.0[&node].len(), asked(&mut index, &ino, i)), (i + 1, Some(i)));
        }
    }
}
