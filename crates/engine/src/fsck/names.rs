//! Checks the namespace of the whole volume: entries against inodes, inodes against entries.
//!
//! The links in an inode's record are the truth; an entry is an index to it. So an entry that no link confirms goes, and
//! a link without an entry gets one. Only where an inode's links are lost are the entries that name it believed.

use super::codes;
use super::dirs::show;
use super::model::{Dirty, Ino, Model};
use crate::types::{Placement, Timestamp};
use braidfs_format::dentry::Dentry;
use braidfs_format::inode::{Content, Inode, Link};
use braidfs_format::node::{DIR, NodeEntry, REMOTE, USED};
use braidfs_format::{BlockAddr, NodeId};
use std::collections::{BTreeMap, HashMap, HashSet};

/// Where what hangs nowhere goes.
pub const LOST_FOUND: &[u8] = b"lost+found";
/// Inodes with more links than this get an index of them.
const MANY_LINKS: usize = 16;

/// Runs all checks of the namespace on `m`.
pub fn check(m: &mut Model) {
    check_root(m);
    drop_orphans(m);
    let named = check_entries(m);
    drop_unnamed(m, &named);
    check_links(m);
    reconnect_unlinked(m);
    break_loops(m);
    check_counts(m);
    check_remote(m);
}

fn all(m: &Model) -> Vec<NodeId> {
    m.inodes.keys().copied().collect()
}

fn is_dir(m: &Model, node: NodeId) -> bool {
    m.inodes.get(&node).is_some_and(Ino::is_dir)
}

/// A new directory inode, owned by root.
fn new_dir(domain: u16, gener: u32, links: Vec<Link>, mode: u32) -> Ino {
    let t = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    let t = Timestamp { sec: t.as_secs() as i64, nsec: t.subsec_nanos() };
    let linked = vec![true; links.len()];
    let inode = Inode {
        mode: 0o040_000 | mode,
        uid: 0,
        gid: 0,
        nlink: 2,
        size: 0,
        blocks: 0,
        rdev: 0,
        flags: 0,
        placement: Placement::Unset,
        atime: t,
        mtime: t,
        ctime: t,
        btime: t,
        link_seq: 0,
        links,
        xattrs: vec![],
        link_nodes: vec![],
        xattr_nodes: vec![],
        tombstones: vec![],
        exchange: None,
        content: Content::InlineDir(vec![]),
    };
    Ino {
        domain,
        gener,
        version: 0,
        flags: USED | DIR,
        inode,
        tree: vec![],
        extents: vec![],
        entries: vec![],
        linked,
        links_lost: false,
        dirty: Dirty { record: true, ..Dirty::default() },
    }
}

/// The root must be a directory without links; where it is lost it is made again, and the links fill it.
fn check_root(m: &mut Model) {
    let root = NodeId::ROOT;
    if !is_dir(m, root) {
        m.log.add(codes::ROOT, Some(root), "there is no root directory; a new one is made");
        m.remove(root);
        let Some(domain) = m.domain_of(root) else { return };
        let store = std::sync::Arc::clone(&m.store);
        let gener =
            m.domains.get(usize::from(domain)).and_then(|d| d.entry(&store, root)).map_or(1, |e| e.gener.max(1));
        m.inodes.insert(root, new_dir(domain, gener, vec![], 0o755));
    }
    let Some(ino) = m.inodes.get_mut(&root) else { return };
    if !ino.inode.links.is_empty() {
        m.log.add(codes::DIR_LINKS, Some(root), "the root directory has a link");
        ino.inode.links.clear();
        ino.linked.clear();
        ino.dirty.links = true;
    }
}

/// Inodes without links that count none: unlinked while open, and never reclaimed.
fn drop_orphans(m: &mut Model) {
    for node in all(m) {
        let orphan = m
            .inodes
            .get(&node)
            .is_some_and(|i| i.inode.nlink == 0 && i.inode.links.is_empty() && !i.links_lost && node != NodeId::ROOT);
        if orphan {
            m.log.add(codes::ORPHAN, Some(node), "unlinked inode was not reclaimed");
            m.remove(node);
        }
    }
}

/// Finds a link of an inode quickly, also where it has many.
#[derive(Default)]
struct LinkIndex(HashMap<NodeId, HashMap<Link, usize>>);

impl LinkIndex {
    fn find(&mut self, node: NodeId, ino: &Ino, link: &Link) -> Option<usize> {
        let links = &ino.inode.links;
        if links.len() <= MANY_LINKS {
            return links.iter().position(|l| l == link);
        }
        let index =
            self.0.entry(node).or_insert_with(|| links.iter().cloned().enumerate().map(|(i, l)| (l, i)).collect());
        index.get(link).copied()
    }
}

/// Checks every entry against the inode that it names, and drops the stale ones. The inodes that some entry names.
fn check_entries(m: &mut Model) -> HashSet<NodeId> {
    let mut named = HashSet::new();
    let mut index = LinkIndex::default();
    for dir in all(m).into_iter().filter(|&d| is_dir(m, d)).collect::<Vec<_>>() {
        let Some(entries) = m.inodes.get_mut(&dir).map(|i| std::mem::take(&mut i.entries)) else { continue };
        let before = entries.len();
        let mut changed = false;
        let mut names: HashSet<Box<[u8]>> = HashSet::with_capacity(before);
        let mut kept = Vec::with_capacity(before);
        for mut e in entries {
            let name = show(&e.name);
            let Some(ino) = m.inodes.get_mut(&e.node) else {
                m.log.add(codes::ENTRY_DEAD, Some(dir), format!("{name} names {}, which does not exist", e.node));
                continue;
            };
            if ino.gener != e.gener {
                let why = format!("{name} names {} of generation {}, it has {}", e.node, e.gener, ino.gener);
                m.log.add(codes::ENTRY_GENER, Some(dir), why);
                continue;
            }
            let link = Link { parent: dir, name: e.name.clone() };
            let at = match index.find(e.node, ino, &link) {
                Some(at) => at,
                // An inode that lost its links is believed to hang where it is named.
                None if ino.inode.links.is_empty()
                    && (ino.links_lost || ino.inode.nlink > 0)
                    && e.node != NodeId::ROOT
                    || ino.links_lost && !ino.is_dir() =>
                {
                    m.log.add(codes::ENTRY_STALE, Some(e.node), format!("has lost its link {name} in {dir}"));
                    ino.links_lost = true;
                    ino.inode.links.push(link);
                    ino.linked.push(false);
                    ino.dirty.links = true;
                    index.0.remove(&e.node);
                    ino.inode.links.len() - 1
                }
                None => {
                    let why = format!("{name} names {}, which does not hang there", e.node);
                    m.log.add(codes::ENTRY_STALE, Some(dir), why);
                    continue;
                }
            };
            if ino.linked.get(at).copied().unwrap_or(false) || !names.insert(e.name.clone()) {
                // Reported as a name that stands twice.
                continue;
            }
            if let Some(l) = ino.linked.get_mut(at) {
                *l = true;
            }
            let kind = (ino.inode.mode >> 12) as u8;
            if e.kind != kind {
                let why = format!("{name} is of type {}, the entry says {}", kind, e.kind);
                m.log.add(codes::ENTRY_KIND, Some(dir), why);
                e.kind = kind;
                changed = true;
            }
            named.insert(e.node);
            kept.push(e);
        }
        if let Some(ino) = m.inodes.get_mut(&dir) {
            ino.dirty.entries |= changed || kept.len() != before;
            ino.entries = kept;
        }
    }
    named
}

/// Records that came back with a lost node table block and that nothing names were deleted before.
fn drop_unnamed(m: &mut Model, named: &HashSet<NodeId>) {
    let recovered: Vec<NodeId> = m.domains.iter().flat_map(|d| d.recovered.iter().copied()).collect();
    for node in recovered {
        if node != NodeId::ROOT && m.inodes.contains_key(&node) && !named.contains(&node) {
            m.log.add(codes::RECOVERED_UNNAMED, Some(node), "record found again that no directory names: dropped");
            m.remove(node);
        }
    }
}

/// Checks every link of every inode: its parent is a directory that has the entry.
fn check_links(m: &mut Model) {
    // Names in the directories that are looked into.
    let mut names: HashMap<NodeId, HashMap<Box<[u8]>, NodeId>> = HashMap::new();
    for node in all(m) {
        let Some(ino) = m.inodes.get(&node) else { continue };
        let dir = ino.is_dir();
        if ino.linked.iter().all(|&l| l) && !(dir && ino.inode.links.len() > 1) {
            continue;
        }
        let links: Vec<(Link, bool)> = ino.inode.links.iter().cloned().zip(ino.linked.iter().copied()).collect();
        let (gener, kind, seq) = (ino.gener, (ino.inode.mode >> 12) as u8, ino.inode.link_seq);
        // Of several links of a directory the first that has its entry counts.
        let only = if dir { links.iter().position(|l| l.1).or(Some(0)) } else { None };
        let mut kept: Vec<Link> = Vec::new();
        for (i, (link, linked)) in links.iter().enumerate() {
            let (name, parent) = (show(&link.name), link.parent);
            if only.is_some_and(|o| o != i) {
                m.log.add(codes::DIR_LINKS, Some(node), format!("directory has a second link {name} in {parent}"));
                if *linked {
                    drop_entry(m, link, node);
                }
                continue;
            }
            if kept.contains(link) {
                m.log.add(codes::LINK_TWICE, Some(node), format!("has the link {name} in {parent} twice"));
                continue;
            }
            if *linked {
                kept.push(link.clone());
                continue;
            }
            if !is_dir(m, parent) || parent == node {
                m.log.add(
                    codes::LINK_PARENT,
                    Some(node),
                    format!("hangs as {name} in {parent}, which is no directory"),
                );
                continue;
            }
            let in_parent = names.entry(parent).or_insert_with(|| {
                let entries = m.inodes.get(&parent).map(|p| p.entries.as_slice()).unwrap_or_default();
                entries.iter().map(|e| (e.name.clone(), e.node)).collect()
            });
            if let Some(&other) = in_parent.get(&link.name) {
                let newer = m.inodes.get(&other).is_none_or(|o| seq > o.inode.link_seq);
                m.log.add(codes::LINK_TAKEN, Some(node), format!("hangs as {name} in {parent}, and so does {other}"));
                if !newer {
                    continue;
                }
                drop_entry(m, link, other);
                drop_link(m, other, link);
            } else {
                m.log.add(
                    codes::LINK_NO_ENTRY,
                    Some(node),
                    format!("hangs as {name} in {parent}, which has no such entry"),
                );
            }
            in_parent.insert(link.name.clone(), node);
            add_entry(m, parent, link.name.clone(), node, gener, kind);
            kept.push(link.clone());
        }
        if let Some(ino) = m.inodes.get_mut(&node) {
            if ino.inode.links != kept {
                ino.dirty.links = true;
                ino.inode.links = kept;
            }
            ino.linked = vec![true; ino.inode.links.len()];
        }
    }
}

fn add_entry(m: &mut Model, dir: NodeId, name: Box<[u8]>, node: NodeId, gener: u32, kind: u8) {
    if let Some(d) = m.inodes.get_mut(&dir) {
        // Position 0 is none: the directory is arranged when it is written.
        d.entries.push(Dentry { hash: 0, node, gener, kind, name });
        d.dirty.entries = true;
    }
}

fn drop_entry(m: &mut Model, link: &Link, node: NodeId) {
    if let Some(d) = m.inodes.get_mut(&link.parent) {
        d.entries.retain(|e| e.node != node || e.name != link.name);
        d.dirty.entries = true;
    }
}

fn drop_link(m: &mut Model, node: NodeId, link: &Link) {
    let Some(i) = m.inodes.get_mut(&node) else { return };
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
    for node in all(m) {
        let Some(ino) = m.inodes.get(&node) else { continue };
        if node == NodeId::ROOT || !ino.inode.links.is_empty() {
            continue;
        }
        m.log.add(codes::UNLINKED, Some(node), "hangs nowhere: connected to /lost+found");
        connect(m, node);
    }
}

/// Gives `node` the name `#<number>` in `/lost+found`.
fn connect(m: &mut Model, node: NodeId) {
    let Some(parent) = lost_found(m) else { return };
    let taken: HashSet<Box<[u8]>> =
        m.inodes.get(&parent).map(|p| p.entries.iter().map(|e| e.name.clone()).collect()).unwrap_or_default();
    let mut name = format!("#{}", node.0);
    while taken.contains(name.as_bytes()) {
        name.push('_');
    }
    let name: Box<[u8]> = name.into_bytes().into();
    let Some(ino) = m.inodes.get_mut(&node) else { return };
    ino.inode.links = vec![Link { parent, name: name.clone() }];
    ino.linked = vec![true];
    ino.dirty.links = true;
    let (gener, kind) = (ino.gener, (ino.inode.mode >> 12) as u8);
    add_entry(m, parent, name, node, gener, kind);
}

/// `/lost+found`, made where it is not there. `None` where no node is free.
fn lost_found(m: &mut Model) -> Option<NodeId> {
    let mut name = LOST_FOUND.to_vec();
    loop {
        let entry = m.inodes.get(&NodeId::ROOT)?.entries.iter().find(|e| *e.name == *name).map(|e| e.node);
        match entry {
            Some(n) if is_dir(m, n) => return Some(n),
            Some(_) => name.push(b'_'),
            None => break,
        }
    }
    let number = m.domain_of(NodeId::ROOT)?;
    let store = std::sync::Arc::clone(&m.store);
    let domain = m.domains.get_mut(usize::from(number))?;
    let (node, gener) = take_node(&store, domain)?;
    let link = Link { parent: NodeId::ROOT, name: name.clone().into() };
    m.inodes.insert(node, new_dir(number, gener, vec![link], 0o700));
    add_entry(m, NodeId::ROOT, name.into(), node, gener, 4);
    Some(node)
}

/// A free node of `domain` with its new generation, marked used.
pub fn take_node(store: &crate::store::Store, domain: &mut super::model::Domain) -> Option<(NodeId, u32)> {
    let g = store.geometry;
    let (node, gener) = domain.groups.values().find_map(|group| {
        let free = group
            .entries
            .iter()
            .enumerate()
            .find(|&(slot, e)| !e.used() && g.node(group.number, slot as u32).0 > NodeId::ROOT.0);
        free.map(|(slot, e)| (g.node(group.number, slot as u32), e.gener.wrapping_add(1)))
    })?;
    domain.set_entry(store, node, NodeEntry { addr: BlockAddr(0), index: 0, flags: USED, gener });
    Some((node, gener))
}

/// Subdirectories by parent.
fn children(m: &Model) -> BTreeMap<NodeId, Vec<NodeId>> {
    let mut out: BTreeMap<NodeId, Vec<NodeId>> = BTreeMap::new();
    for (node, ino) in m.inodes.iter().filter(|(_, i)| i.is_dir()) {
        if let Some(l) = ino.inode.links.first() {
            out.entry(l.parent).or_default().push(*node);
        }
    }
    out
}

/// Directories that hang below themselves: one of each loop goes to `/lost+found`.
fn break_loops(m: &mut Model) {
    let children = children(m);
    let mut reached: HashSet<NodeId> = HashSet::new();
    let reach = |from: NodeId, reached: &mut HashSet<NodeId>| {
        let mut todo = vec![from];
        while let Some(n) = todo.pop() {
            if reached.insert(n) {
                todo.extend(children.get(&n).into_iter().flatten());
            }
        }
    };
    reach(NodeId::ROOT, &mut reached);
    for node in all(m).into_iter().filter(|&n| is_dir(m, n)).collect::<Vec<_>>() {
        if reached.contains(&node) {
            continue;
        }
        let mut seen = HashSet::new();
        let mut at = node;
        while seen.insert(at) {
            match m.inodes.get(&at).and_then(|i| i.inode.links.first()) {
                Some(l) => at = l.parent,
                None => break,
            }
        }
        let Some(link) = m.inodes.get(&at).and_then(|i| i.inode.links.first()).cloned() else { continue };
        m.log.add(codes::UNREACHABLE, Some(at), "directory hangs below itself: connected to /lost+found");
        drop_entry(m, &link, at);
        connect(m, at);
        reach(at, &mut reached);
    }
}

fn check_counts(m: &mut Model) {
    let children = children(m);
    for (node, ino) in &mut m.inodes {
        let is = if ino.is_dir() { 2 + children.get(node).map_or(0, Vec::len) } else { ino.inode.links.len() };
        let is = u32::try_from(is).unwrap_or(u32::MAX);
        if ino.inode.nlink != is {
            // Part of connecting: only a count that was wrong by itself is a finding.
            let why = format!("counts {} links, has {is}", ino.inode.nlink);
            m.log.add(codes::LINK_COUNT, Some(*node), why);
            ino.inode.nlink = is;
            ino.dirty.record = true;
        }
    }
}

fn check_remote(m: &mut Model) {
    let domain_of = |n: NodeId| {
        let (group, _) = m.store.geometry.node_place(n)?;
        m.bat.get(group as usize)?.domain.map(|d| d.0)
    };
    for (node, ino) in &mut m.inodes {
        let remote = ino.inode.links.iter().any(|l| domain_of(l.parent) != Some(ino.domain));
        let flags = if remote { ino.flags | REMOTE } else { ino.flags & !REMOTE };
        if ino.flags != flags {
            let why = if remote { "lacks the flag REMOTE" } else { "has the flag REMOTE without need" };
            m.log.add(codes::REMOTE_FLAG, Some(*node), why);
            ino.flags = flags;
            ino.dirty.record = true;
        }
    }
}
