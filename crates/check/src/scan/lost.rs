//! What lost its place in the tree: directories whose record is lost, made again as what hangs in them tells, and
//! `lost+found`.

use super::names::{add_entry, is_dir, new_dir, take_node};
use crate::codes;
use crate::model::Model;
use crate::rules::group::LOST_GENERATION;
use braidfs_format::domain::DomainHeader;
use braidfs_format::inode::Link;
use braidfs_format::name::FileName;
use braidfs_format::node::{NodeEntry, USED};
use braidfs_format::{BlockAddr, InodeNo};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

/// Where what hangs nowhere goes.
pub const LOST_FOUND: &[u8] = b"lost+found";

/// Makes directories whose inodes are lost again, under their numbers, so that what hangs in them keeps its names; their own
/// names come from the entries that name them. That a number was a directory's several links must say, or one, where something
/// was found that cost the number its inode: a single link may be what is damaged.
pub fn restore_dirs(m: &mut Model) {
    let mut named: BTreeMap<InodeNo, u64> = BTreeMap::new();
    let inodes = &m.inodes;
    inodes.select(|_, i| {
        for parent in (0..i.links()).filter_map(|at| i.parent(at)).filter(|p| inodes.get(*p).is_none()) {
            *named.entry(parent).or_default() += 1;
        }
        false
    });
    if named.is_empty() {
        return;
    }
    let told: HashSet<u64> = m.log.findings.iter().filter_map(|f| f.node).collect();
    // the table that told the generation may be lost, too
    let mut generations = m.inodes.generations_named(|n| named.contains_key(&n));
    for h in m.domains.iter().filter_map(|d| d.header) {
        let of = generations.entry(InodeNo(h.tenant_root.get())).or_default();
        *of = h.tenant_generation.get().max(*of);
    }
    let store = Arc::clone(&m.store);
    for (dir, links) in named {
        // the first numbers of the volume are not given out, and the root is looked after by itself
        if dir <= InodeNo::ROOT || links < 2 && !told.contains(&dir.0) {
            continue;
        }
        let Some(number) = m.domain_of(dir) else { continue };
        let Some(domain) = m.domains.get_mut(usize::from(number)) else { continue };
        let Some(free) = domain.entry(&store, dir.node()).filter(|e| !e.used()) else { continue };
        let generation = match (free.generation, generations.get(&dir)) {
            (LOST_GENERATION, Some(&named)) => named.max(1),
            (told, named) => told.max(1).max(named.copied().unwrap_or_default()),
        };
        let entry = NodeEntry { addr: BlockAddr(0), index: 0, flags: USED, generation, written: 0 };
        domain.set_entry(&store, dir.node(), entry);
        // it is none of those whose old record was found, of which nobody knows whether they were deleted
        domain.recovered.remove(&dir.node());
        let mut ino = new_dir(generation, vec![], 0o700);
        (ino.links_lost, ino.dirty.links) = (true, true);
        m.inodes.put(dir, ino);
        let why = format!("there is no such inode, and {links} links hang in it: a directory is made again");
        m.log.add(codes::LINK_PARENT, Some(dir.node()), why);
    }
}

/// The directories `lost+found` and the names in them, once they were asked for, by the directory that they are in.
#[derive(Default)]
pub struct LostFound(HashMap<InodeNo, (InodeNo, HashSet<FileName>)>);

impl LostFound {
    /// Gives `node` the name `#<number>` in the `lost+found` that is for it. Nothing happens where no node is free.
    pub fn connect(&mut self, m: &mut Model, node: InodeNo) {
        let home = home(m, node);
        let (parent, names) = match self.0.get_mut(&home) {
            Some((parent, names)) => (*parent, names),
            None => {
                let Some(parent) = lost_found(m, home) else { return };
                let entries = m.body(parent).map(|p| p.entries.as_slice()).unwrap_or_default();
                let names = entries.iter().map(|e| e.name.clone()).collect();
                (parent, &mut self.0.entry(home).or_insert((parent, names)).1)
            }
        };
        let name = free_name(format!("#{}", node.0).as_bytes(), |name| !names.contains(name));
        let Some(ino) = m.body(node) else { return };
        names.insert(name.clone());
        ino.inode.links = vec![Link { parent, name: name.clone() }];
        ino.linked = vec![true];
        ino.dirty.links = true;
        let (generation, kind) = (ino.generation, (ino.inode.mode >> 12) as u8);
        add_entry(m, parent, name, node, generation, kind);
    }
}

/// The first of `name`, `name_`, `name_2`, `name_3` and so on that `fits`: there is no end of names that are short enough.
fn free_name(name: &[u8], fits: impl Fn(&[u8]) -> bool) -> FileName {
    let suffixes = [String::new(), "_".into()].into_iter().chain((2u64..).map(|n| format!("_{n}")));
    let mut names = suffixes.map(|suffix| [name, suffix.as_bytes()].concat());
    names.find(|name| fits(name)).unwrap_or_else(|| name.to_vec()).into()
}

/// The directory in whose `lost+found` an inode without a place goes: the root; of a domain without a journal, whose border no
/// name crosses, its tenant's directory.
fn home(m: &Model, node: InodeNo) -> InodeNo {
    let Some(h) = scratch(m, node) else { return InodeNo::ROOT };
    let root = InodeNo(h.tenant_root.get());
    let is_root = m.inodes.get(root).is_some_and(|i| i.is_dir() && i.generation() == h.tenant_generation.get());
    if is_root && !is_below(m, root, node) { root } else { InodeNo::ROOT }
}

/// The header of the domain of `node` where that is one without a journal.
fn scratch(m: &Model, node: InodeNo) -> Option<DomainHeader> {
    m.domain_of(node).and_then(|d| m.domains.get(usize::from(d))?.header).filter(DomainHeader::is_scratch)
}

/// Whether `dir` hangs below `node`, or is it, or hangs below itself.
fn is_below(m: &Model, dir: InodeNo, node: InodeNo) -> bool {
    let mut seen = HashSet::new();
    let mut at = dir;
    while at != node && seen.insert(at) {
        match m.inodes.get(at).and_then(|i| i.parent(0)) {
            Some(parent) => at = parent,
            None => return false,
        }
    }
    true
}

/// The `lost+found` of `home`, made where it is not there. `None` where no node is free.
fn lost_found(m: &mut Model, home: InodeNo) -> Option<InodeNo> {
    let number = m.domain_of(home)?;
    let entries = m.body(home)?.entries.iter().filter(|e| e.name.starts_with(LOST_FOUND));
    let named: HashMap<FileName, InodeNo> = entries.map(|e| (e.name.clone(), e.node)).collect();
    // a tenant's directory may have the name
    let fits = |n: InodeNo| is_dir(m, n) && (m.domain_of(n) == Some(number) || scratch(m, n).is_none());
    let name = free_name(LOST_FOUND, |name| named.get(name).is_none_or(|n| fits(*n)));
    if let Some(there) = named.get(&name) {
        return Some(*there);
    }
    let store = Arc::clone(&m.store);
    let domain = m.domains.get_mut(usize::from(number))?;
    let (node, generation) = take_node(&store, domain)?;
    let node = node.inode();
    let link = Link { parent: home, name: name.clone() };
    m.inodes.put(node, new_dir(generation, vec![link], 0o700));
    add_entry(m, home, name, node, generation, 4);
    Some(node)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_free_name_is_no_longer_than_a_name_may_be() {
        let first = b"#5";
        let mut taken: HashSet<FileName> = (0..254).map(|n| [&first[..], &vec![b'_'; n]].concat().into()).collect();
        for name in ["#5_2", "#5_3", "#5_4"] {
            assert_eq!(&*free_name(first, |name| !taken.contains(name)), name.as_bytes());
            taken.insert(name.as_bytes().into());
        }
        assert_eq!(&*free_name(b"#6", |name| !taken.contains(name)), b"#6");
        taken.insert((*b"#6").into());
        assert_eq!(&*free_name(b"#6", |name| !taken.contains(name)), b"#6_");
    }
}
