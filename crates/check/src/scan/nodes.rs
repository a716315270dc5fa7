//! Checks the nodes of one domain: node table entries, node blocks, inode records and their overflow nodes.
//!
//! Afterwards every used node table entry belongs to an inode of the model, as itself or as one of its overflow nodes.

use super::records;
use crate::codes;
use crate::collect::{Records, Source, checked};
use crate::error::Result;
use crate::model::inodes::Inodes;
use crate::parts::domain::Domain;
use crate::parts::ino::Ino;
use crate::report::{Bad, Checked, Log};
use crate::rules::{inode, record};
use braidfs_format::file_kind::FileKind;
use braidfs_format::inode::{Content, Extent, Inode, decode_extents};
use braidfs_format::node::{NodeKind, NodeRecord};
use braidfs_format::{Corrupt, InodeNo, NodeId};
use braidfs_store::Store;
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;

/// An overflow node of a domain.
struct Overflow {
    node: NodeId,
    owner: InodeNo,
    kind: NodeKind,
    /// Its owner has claimed it.
    taken: bool,
}

/// An extent leaf that its owner may have lost the way to.
struct Spare {
    /// In [`Overflows::nodes`].
    at: usize,
    version: u64,
    extents: Vec<Extent>,
}

/// Overflow nodes of a domain, by number; each is given once.
struct Overflows<'a> {
    nodes: Vec<Overflow>,
    records: Records<'a>,
    /// Extent leaves by owner (places in `nodes`), once somebody asked.
    leaves: Option<HashMap<InodeNo, Vec<usize>>>,
    /// Those of the inode that asked last.
    spare: Option<(InodeNo, Vec<Spare>)>,
    /// Inodes that got leaves which nothing named.
    adopted: HashSet<InodeNo>,
}

impl<'a> Overflows<'a> {
    fn new(nodes: Vec<Overflow>, records: Records<'a>) -> Self {
        Self { nodes, records, leaves: None, spare: None, adopted: HashSet::new() }
    }

    /// The leaves of `owner` that nobody has taken. Every change of an inode writes its record, so that none of its leaves is
    /// of a later `version` than that: such a one belongs to a state that is lost.
    fn spares(&mut self, owner: InodeNo, version: u64) -> Vec<Spare> {
        let Self { nodes, records, leaves, .. } = self;
        let leaves = leaves.get_or_insert_with(|| {
            let mut all: HashMap<InodeNo, Vec<usize>> = HashMap::new();
            for (at, o) in nodes.iter().enumerate().filter(|(_, o)| o.kind == NodeKind::ExtentLeaf) {
                all.entry(o.owner).or_default().push(at);
            }
            all
        });
        let mut out = Vec::new();
        for &at in leaves.get(&owner).into_iter().flatten().filter(|at| !nodes[**at].taken) {
            let Ok((_, r)) = records.get(nodes[at].node) else { continue };
            let Ok(extents) = decode_extents(&r.payload) else { continue };
            let rises = extents.windows(2).all(|w| w[0].end() <= w[1].lblk);
            if r.version <= version && rises && !extents.is_empty() {
                out.push(Spare { at, version: r.version, extents });
            }
        }
        // of two that are about the same blocks the newer one counts
        out.sort_by_key(|s| Reverse(s.version));
        out
    }
}

impl Source for Overflows<'_> {
    fn take(&mut self, owner: InodeNo, node: NodeId, kind: NodeKind) -> Checked<Vec<u8>> {
        let at = self.nodes.binary_search_by_key(&node, |o| o.node).map_err(|_| record::missing(node, kind))?;
        let o = &mut self.nodes[at];
        if o.taken {
            let why = format!("overflow {node} is also used by {}", o.owner);
            return Err(Bad::new(codes::OVERFLOW_SHARED, why));
        }
        record::overflow(node, (o.owner, o.kind), owner, kind)?;
        o.taken = true;
        self.records.take(owner, node, kind)
    }

    fn spare_leaves(&mut self, owner: InodeNo, version: u64, range: Range<u64>) -> Vec<(NodeId, Vec<Extent>)> {
        let mut spares = match self.spare.take() {
            Some((of, spares)) if of == owner => spares,
            _ => self.spares(owner, version),
        };
        // by the first logical block
        let mut found: BTreeMap<u64, (NodeId, Vec<Extent>)> = BTreeMap::new();
        let bounds = |e: &[Extent]| Some((e.first()?.lblk, e.last()?.end()));
        for s in &mut spares {
            let o = &mut self.nodes[s.at];
            let Some((first, end)) = bounds(&s.extents).filter(|_| !o.taken) else { continue };
            let before = found.range(..end).next_back();
            let clash = before.and_then(|(_, (_, e))| bounds(e)).is_some_and(|b| b.1 > first);
            if first >= range.start && end <= range.end && !clash {
                o.taken = true;
                found.insert(first, (o.node, std::mem::take(&mut s.extents)));
            }
        }
        self.spare = Some((owner, spares));
        if !found.is_empty() {
            self.adopted.insert(owner);
        }
        found.into_values().collect()
    }
}

/// Whether parts of `inode` lie in nodes of their own.
fn overflows(inode: &Inode) -> bool {
    !inode.link_nodes.is_empty() || !inode.xattr_nodes.is_empty() || matches!(inode.content, Content::Tree { .. })
}

/// `ino` as it is used where its newest record is lost and `r` is an older one: it may have got other names since, so that
/// entries which name it are believed, and it is written anew.
fn stand_in(domain: &Domain, r: &NodeRecord, mut ino: Ino) -> Ino {
    if domain.outdated.contains(&r.node) {
        ino.links_lost = true;
        (ino.dirty.record, ino.dirty.links) = (true, true);
    }
    ino
}

/// Reads all nodes of `domain`. Inodes are checked as they come, those with overflow nodes at last; the findings are in
/// the order of the numbers all the same. Beside the inodes: those of them that got extent leaves by what these say of
/// themselves, so that only blocks which the owner tables confirm are theirs.
pub fn read(store: &Store, log: &mut Log, domain: &mut Domain, mut inodes: Inodes) -> (Inodes, HashSet<InodeNo>) {
    let rules = inodes.rules;
    let mut nodes: Vec<Overflow> = Vec::new();
    let mut last: Vec<InodeNo> = Vec::new();
    let mut later = Log::of(domain.number);
    for group in domain.groups.values() {
        inodes.reserve(group.number, group.entries.used().count());
    }
    records::each(store, log, domain, &mut |log, domain, entry, r| {
        if r.kind != NodeKind::Inode {
            nodes.push(Overflow { node: r.node, owner: r.owner, kind: r.kind, taken: false });
            return;
        }
        let ino = match inode::decode(&r) {
            Ok(i) if overflows(&i) => return last.push(r.node.inode()),
            Ok(i) => checked(&rules, store, &mut later, domain, (entry, &r, i), None).map(|i| stand_in(domain, &r, i)),
            Err(bad) => Err(bad),
        };
        match ino {
            Ok(ino) => inodes.add(r.node.inode(), ino),
            Err(bad) => {
                log.add(bad.code, Some(r.node), bad.why);
                domain.free_node(store, r.node);
            }
        }
    });
    nodes.sort_unstable_by_key(|o| o.node);
    last.sort_unstable();
    let mut from = Overflows::new(nodes, Records::new(store, domain));
    let mut records = Records::new(store, domain);
    for node in last {
        let mut again = || -> Result<_> {
            let (entry, r) = records.get(node.node())?;
            let i = inode::decode(&r).map_err(|b| Corrupt::new("inode", b.why))?;
            let ino = checked(&rules, store, &mut later, domain, (entry, &r, i), Some(&mut from));
            Ok(stand_in(domain, &r, ino.map_err(|b| Corrupt::new("inode", b.why))?))
        };
        match again() {
            Ok(ino) => inodes.add(node, ino),
            Err(e) => inodes.fail(e),
        }
    }
    later.findings.sort_by_key(|f| f.node);
    log.findings.append(&mut later.findings);
    let Overflows { nodes, adopted, .. } = from;
    for o in nodes.into_iter().filter(|o| !o.taken) {
        let why = format!("overflow node ({:?}) of {} is not used", o.kind, o.owner);
        log.add(codes::OVERFLOW_UNUSED, Some(o.node), why);
        domain.free_node(store, o.node);
    }
    inodes.sort();
    (inodes, adopted)
}

/// Takes away symbolic links without a target: those of which it was told as they were read, and those whose blocks went to
/// others since.
pub fn drop_blank_links(store: &Store, log: &mut Log, domain: &mut Domain, inodes: &mut Inodes) {
    let is_blank = |i: &Ino| {
        let link = FileKind::from_mode(i.inode.mode) == Some(FileKind::Symlink);
        link && !matches!(i.inode.content, Content::Inline(_)) && !inode::has_target(&i.extents)
    };
    let blank: Vec<InodeNo> = inodes.wholes_of(domain).filter(|(_, i)| is_blank(i)).map(|(n, _)| n).collect();
    for node in blank {
        let Some(ino) = inodes.forget(node) else { continue };
        if ino.inode.size > 0 {
            log.add(codes::CONTENT, Some(node.node()), "a symbolic link whose target belongs to others");
        }
        for n in ino.overflow().chain([node.node()]) {
            domain.free_node(store, n);
        }
    }
}
