//! Names that a rename took from an inode of another domain: did who took them come to be? (As recovery judges it.)

use crate::codes;
use crate::model::Model;
use crate::model::inodes::Seen;
use crate::rules::show;
use braidfs_format::InodeNo;
use braidfs_format::inode::{Link, Tombstone};

/// Whether the newcomer of `t` came to be with the name that it took, or may have: a number that was given out again since had been
/// durable, and who left a group that is of no domain any more as well.
fn came_to_be(m: &mut Model, t: &Tombstone) -> bool {
    let Some(domain) = m.domain_of(t.newcomer) else { return true };
    let entry = m.domains.get(usize::from(domain)).and_then(|d| d.entry(&m.store, t.newcomer.node()));
    match m.body(t.newcomer).map(|i| (i.generation, i.version)) {
        Some((generation, version)) if generation == t.generation => version >= t.version,
        _ => entry.is_some_and(|e| e.generation >= t.generation),
    }
}

/// Names that others took which did not come to be, since the journal that said so is given up: who had them has them still. The
/// newcomer of an exchange was there before; where it has its old name still, it takes the one that the other gave up. Who has other
/// names keeps its tombstones for long; these are asked where something was found only, of a volume that holds they say nothing.
pub fn give_names_back(m: &mut Model) {
    let found = !m.log.findings.is_empty();
    let asked = |i: Seen<'_>| i.has_tombstones() && !i.links_lost() && (found || i.links() == 0);
    for node in m.inodes.select(|node, i| asked(i) && node != InodeNo::ROOT) {
        let Some((of_node, exchange)) = m.body(node).map(|i| (i.inode.tombstones.clone(), i.inode.exchange)) else {
            continue;
        };
        let (mut holds, mut back, mut given) = (Vec::new(), Vec::new(), Vec::new());
        for t in of_node {
            match came_to_be(m, &t) {
                true => holds.push(t),
                false if exchange == Some((t.newcomer, t.generation, t.version)) => given.push(t),
                false => back.push(t),
            }
        }
        if back.is_empty() && given.is_empty() {
            continue;
        }
        for newcomer in back.iter().chain(&given).map(|t| t.newcomer) {
            if let Some(d) = m.domain_of(newcomer).and_then(|d| m.domains.get_mut(usize::from(d))) {
                d.undecided.insert(newcomer.node());
            }
        }
        given.iter().for_each(|t| complete_exchange(m, node, t));
        let Some(ino) = m.body(node) else { continue };
        ino.inode.tombstones = holds;
        if !given.is_empty() {
            ino.inode.exchange = None;
        }
        ino.dirty.record = true;
        back.retain(|t| !ino.inode.links.contains(&t.link));
        for t in &back {
            ino.inode.links.push(t.link.clone());
            ino.linked.push(false);
            ino.dirty.links = true;
        }
        for Tombstone { link: Link { parent, name }, newcomer, .. } in back {
            let why =
                format!("has its link {} in {parent} again: {newcomer}, which took it, is not there", show(&name));
            m.log.add(codes::ENTRY_STALE, Some(node.node()), why);
        }
    }
}

/// The partner of an exchange with `node` takes the name that `node` gave up, and leaves the one that `node` has.
fn complete_exchange(m: &mut Model, node: InodeNo, t: &Tombstone) {
    let Some((mine, seq)) = m.body(node).map(|i| (i.inode.links.clone(), i.inode.link_seq)) else { return };
    let Some(partner) = m.body(t.newcomer).filter(|p| p.generation == t.generation) else { return };
    let links = partner.inode.links.iter().cloned().zip(partner.linked.iter().copied());
    let (mut links, mut linked): (Vec<Link>, Vec<bool>) = links.filter(|(l, _)| !mine.contains(l)).unzip();
    if !links.contains(&t.link) {
        links.push(t.link.clone());
        linked.push(false);
    }
    (partner.inode.links, partner.linked) = (links, linked);
    partner.inode.link_seq = partner.inode.link_seq.max(seq);
    (partner.dirty.record, partner.dirty.links) = (true, true);
    let why = format!("has the link {} in {}, which it exchanged with {node}", show(&t.link.name), t.link.parent);
    m.log.add(codes::ENTRY_STALE, Some(t.newcomer.node()), why);
}
