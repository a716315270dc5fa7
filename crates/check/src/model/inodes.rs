//! The inodes of a volume as a check holds them: of each what is compared with others, in 32 bytes; whole only those
//! that differ from what is on the device.
//!
//! Of a name both sides, the link in the inode and the entry in the directory, keep a hash of directory and name, under
//! a key drawn for each check. Two names are taken for one with a chance of 2^-64 for each pair that is compared. Who
//! needs the names themselves reads them again ([`Inodes::body`]).

use crate::collect::{changed, load, load_entries};
use crate::error::{Error, Result};
use crate::parts::domain::Domain;
use crate::parts::ino::Ino;
use crate::rules::Rules;
use braidfs_format::dentry::Dentry;
use braidfs_format::geometry::Geometry;
use braidfs_format::{BlockAddr, InodeNo};
use braidfs_store::Store;
use siphasher::sip::SipHasher13;
use std::collections::BTreeMap;
use std::hash::Hasher;
use std::io;

/// `S_IFDIR >> 12`.
const DIR_KIND: u8 = 4;

/// The single link has its entry.
const LINKED: u8 = 1;
/// There are several links: they are in [`GroupInodes::links`].
const MANY: u8 = 2;
/// There is no link.
const NONE: u8 = 4;
/// Removed, or whole elsewhere.
const GONE: u8 = 8;
/// It has extents.
const MAPPED: u8 = 16;
/// Others took names from it.
const TAKEN: u8 = 32;

/// Key of the hashes by which names are compared, random for each check.
#[derive(Debug, Clone, Copy)]
pub struct NameKey([u8; 16]);

impl NameKey {
    /// A new key.
    ///
    /// # Errors
    /// Where the system has no random numbers.
    pub fn random() -> io::Result<Self> {
        let mut key = [0; 16];
        getrandom::fill(&mut key)?;
        Ok(Self(key))
    }

    /// The hash of `name` in `dir`.
    pub fn of(&self, dir: InodeNo, name: &[u8]) -> u64 {
        let mut h = SipHasher13::new_with_key(&self.0);
        h.write_u64(dir.0);
        h.write(name);
        h.finish()
    }
}

/// A link of an inode.
#[derive(Debug, Clone, Copy)]
struct LinkHash {
    parent: u64,
    key: u64,
    linked: bool,
}

/// An inode that is as the device has it.
#[derive(Debug, Clone, Copy)]
pub struct PackedInode {
    /// Parent of the single link, or where the links begin in [`GroupInodes::links`].
    a: u64,
    /// Key of the single link, or how many there are.
    b: u64,
    slot: u32,
    generation: u32,
    nlink: u32,
    kind: u8,
    flags: u8,
    bits: u8,
}

/// An entry of a directory that holds.
#[derive(Debug, Clone, Copy)]
pub struct Name {
    /// The inode that it names.
    pub node: InodeNo,
    /// Hash of directory and name.
    pub key: u64,
    /// The inode's generation.
    pub generation: u32,
    /// Its type, as [`FileKind::d_type`](braidfs_format::file_kind::FileKind::d_type).
    pub kind: u8,
}

impl Name {
    /// The entry `e` of `dir`.
    pub fn of(key: &NameKey, dir: InodeNo, e: &Dentry) -> Self {
        Self { node: e.node, key: key.of(dir, &e.name), generation: e.generation, kind: e.kind }
    }
}

/// An extent of an inode that is not whole.
#[derive(Debug, Clone, Copy)]
pub struct ExtentRef {
    /// The inode that it belongs to.
    pub node: InodeNo,
    /// First logical block.
    pub lblk: u64,
    /// First block, in the group.
    pub at: u32,
    /// How many blocks.
    pub len: u32,
}

/// What belongs to one group: inodes by their numbers, extents by their place.
#[derive(Debug, Default)]
struct GroupInodes {
    packed: Vec<PackedInode>,
    links: Vec<LinkHash>,
    extents: Vec<ExtentRef>,
    /// Entries of directories, by slot.
    names: Vec<(u32, Box<[Name]>)>,
}

impl GroupInodes {
    fn place(&self, slot: u32) -> Option<usize> {
        let at = self.packed.binary_search_by_key(&slot, |l| l.slot).ok()?;
        (self.packed[at].bits & GONE == 0).then_some(at)
    }

    fn links_of(&self, packed: &PackedInode) -> &[LinkHash] {
        if packed.bits & MANY != 0 { &self.links[packed.a as usize..][..packed.b as usize] } else { &[] }
    }
}

/// An inode, whole or not.
#[derive(Clone, Copy)]
pub struct Seen<'a>(Either<'a>);

#[derive(Clone, Copy)]
enum Either<'a> {
    Packed(&'a PackedInode, &'a [LinkHash]),
    Whole(&'a Ino),
}
use Either::{Packed, Whole};

#[cfg(test)]
impl<'a> Seen<'a> {
    /// An inode that is whole.
    pub fn of(ino: &'a Ino) -> Self {
        Self(Whole(ino))
    }
}

impl Seen<'_> {
    /// Type, as `st_mode >> 12`.
    pub fn kind(&self) -> u8 {
        match self.0 {
            Packed(l, _) => l.kind,
            Whole(i) => (i.inode.mode >> 12) as u8,
        }
    }
    /// Whether it is a directory.
    pub fn is_dir(&self) -> bool {
        self.kind() == DIR_KIND
    }
    /// Generation of the inode's number.
    pub fn generation(&self) -> u32 {
        match self.0 {
            Packed(l, _) => l.generation,
            Whole(i) => i.generation,
        }
    }
    /// Flags of the node table entry.
    pub fn flags(&self) -> u8 {
        match self.0 {
            Packed(l, _) => l.flags,
            Whole(i) => i.flags,
        }
    }
    /// Links that it counts.
    pub fn nlink(&self) -> u32 {
        match self.0 {
            Packed(l, _) => l.nlink,
            Whole(i) => i.inode.nlink,
        }
    }
    /// Whether the entries that name it are believed.
    pub fn links_lost(&self) -> bool {
        matches!(self.0, Whole(i) if i.links_lost)
    }
    /// Whether it has extents.
    pub fn is_mapped(&self) -> bool {
        match self.0 {
            Packed(l, _) => l.bits & MAPPED != 0,
            Whole(i) => !i.extents.is_empty(),
        }
    }
    /// Whether its record tells of names that others took from it.
    pub fn has_tombstones(&self) -> bool {
        match self.0 {
            Packed(l, _) => l.bits & TAKEN != 0,
            Whole(i) => !i.inode.tombstones.is_empty(),
        }
    }
    /// Links that it has.
    pub fn links(&self) -> usize {
        match self.0 {
            Packed(l, _) if l.bits & NONE != 0 => 0,
            Packed(l, many) if l.bits & MANY != 0 => many.len(),
            Packed(..) => 1,
            Whole(i) => i.inode.links.len(),
        }
    }
    /// The directory of link `at`.
    pub fn parent(&self, at: usize) -> Option<InodeNo> {
        match self.0 {
            Packed(l, many) if l.bits & MANY != 0 => many.get(at).map(|h| InodeNo(h.parent)),
            Packed(l, _) => (at < self.links()).then_some(InodeNo(l.a)),
            Whole(i) => i.inode.links.get(at).map(|l| l.parent),
        }
    }
    /// The hash of link `at`.
    pub fn key(&self, key: &NameKey, at: usize) -> Option<u64> {
        match self.0 {
            Packed(l, many) if l.bits & MANY != 0 => many.get(at).map(|h| h.key),
            Packed(l, _) => (at < self.links()).then_some(l.b),
            Whole(i) => i.inode.links.get(at).map(|l| key.of(l.parent, &l.name)),
        }
    }
    /// Whether the entry of link `at` was found.
    pub fn linked(&self, at: usize) -> bool {
        match self.0 {
            Packed(l, many) if l.bits & MANY != 0 => many.get(at).is_some_and(|h| h.linked),
            Packed(l, _) => l.bits & LINKED != 0,
            Whole(i) => i.linked.get(at).copied().unwrap_or(false),
        }
    }
    /// Whether every link has its entry.
    pub fn all_linked(&self) -> bool {
        match self.0 {
            Whole(i) => i.linked.iter().all(|&l| l),
            Packed(..) => (0..self.links()).all(|i| self.linked(i)),
        }
    }
    /// Whether any link has.
    pub fn any_linked(&self) -> bool {
        match self.0 {
            Whole(i) => i.linked.iter().any(|&l| l),
            Packed(..) => (0..self.links()).any(|i| self.linked(i)),
        }
    }
}

/// The inodes of a domain or of all of them.
#[derive(Debug)]
pub struct Inodes {
    geometry: Geometry,
    /// What the volume asks of them.
    pub rules: Rules,
    /// Hashes their names.
    pub name_key: NameKey,
    parts: BTreeMap<u32, GroupInodes>,
    whole: BTreeMap<InodeNo, Ino>,
    /// Some inode is [`GONE`].
    any_gone: bool,
    /// What was read before could not be read again: nothing can be said of the volume.
    failed: Option<Error>,
}

impl Inodes {
    /// With no inode yet.
    pub fn new(geometry: Geometry, rules: Rules, name_key: NameKey) -> Self {
        Self {
            geometry,
            rules,
            name_key,
            parts: BTreeMap::new(),
            whole: BTreeMap::new(),
            any_gone: false,
            failed: None,
        }
    }

    /// None, of the same volume as these.
    pub fn like(&self) -> Self {
        Self::new(self.geometry, self.rules, self.name_key)
    }

    /// Takes in those of another domain.
    pub fn append(&mut self, mut other: Self) {
        self.parts.append(&mut other.parts);
        self.whole.append(&mut other.whole);
        self.any_gone |= other.any_gone;
        self.failed = self.failed.take().or(other.failed);
    }

    /// Notes that an inode could not be read again.
    pub fn fail(&mut self, e: Error) {
        self.failed.get_or_insert(e);
    }

    /// # Errors
    /// Where an inode could not be read again.
    pub fn holds(&mut self) -> Result<()> {
        self.failed.take().map_or(Ok(()), Err)
    }

    /// Makes room for `count` inodes of `group`.
    pub fn reserve(&mut self, group: u32, count: usize) {
        self.parts.entry(group).or_default().packed.reserve_exact(count);
    }

    /// Adds an inode that was not looked at with others yet. [`Self::sort`] comes before any question.
    pub fn add(&mut self, node: InodeNo, ino: Ino) {
        let Some((group, slot)) = self.geometry.node_place(node) else { return };
        if ino.dirty.any() {
            self.whole.insert(node, ino);
            return;
        }
        for e in &ino.extents {
            let group = self.geometry.group_of(e.addr);
            let at = (e.addr.0 - self.geometry.group_start(group).0) as u32;
            let extent = ExtentRef { node, lblk: e.lblk, at, len: e.len };
            self.parts.entry(group).or_default().extents.push(extent);
        }
        let part = self.parts.entry(group).or_default();
        let hash_of = |l: &braidfs_format::inode::Link| LinkHash {
            parent: l.parent.0,
            key: self.name_key.of(l.parent, &l.name),
            linked: false,
        };
        let mapped = if ino.extents.is_empty() { 0 } else { MAPPED };
        let taken = if ino.inode.tombstones.is_empty() { 0 } else { TAKEN };
        let (a, b, bits) = match ino.inode.links.as_slice() {
            [] => (0, 0, NONE),
            [one] => (one.parent.0, hash_of(one).key, 0),
            many => {
                let start = part.links.len() as u64;
                part.links.extend(many.iter().map(hash_of));
                (start, many.len() as u64, MANY)
            }
        };
        part.packed.push(PackedInode {
            a,
            b,
            slot,
            generation: ino.generation,
            nlink: ino.inode.nlink,
            kind: (ino.inode.mode >> 12) as u8,
            flags: ino.flags,
            bits: bits | mapped | taken,
        });
    }

    /// Sorts what was added.
    pub fn sort(&mut self) {
        for part in self.parts.values_mut() {
            part.packed.sort_unstable_by_key(|l| l.slot);
            part.extents.sort_unstable_by_key(|h| (h.at, h.node, h.lblk));
            part.packed.shrink_to_fit();
            part.extents.shrink_to_fit();
            part.links.shrink_to_fit();
        }
    }

    fn packed(&self, node: InodeNo) -> Option<(&GroupInodes, &PackedInode)> {
        let (group, slot) = self.geometry.node_place(node)?;
        let part = self.parts.get(&group)?;
        Some((part, &part.packed[part.place(slot)?]))
    }

    /// What is known of an inode; `None` where there is none.
    pub fn get(&self, node: InodeNo) -> Option<Seen<'_>> {
        if let Some(ino) = self.whole.get(&node) {
            return Some(Seen(Whole(ino)));
        }
        self.packed(node).map(|(part, packed)| Seen(Packed(packed, part.links_of(packed))))
    }

    /// An inode that is whole.
    pub fn whole(&self, node: InodeNo) -> Option<&Ino> {
        self.whole.get(&node)
    }
    /// An inode that is whole, to change it.
    pub fn whole_mut(&mut self, node: InodeNo) -> Option<&mut Ino> {
        self.whole.get_mut(&node)
    }
    /// All that are whole.
    pub fn wholes(&self) -> impl Iterator<Item = (InodeNo, &Ino)> {
        self.whole.iter().map(|(n, i)| (*n, i))
    }
    /// All of `domain` that are whole.
    pub fn wholes_of(&self, domain: &Domain) -> impl Iterator<Item = (InodeNo, &Ino)> {
        let own = |n: InodeNo| self.geometry.node_place(n).is_some_and(|(g, _)| domain.groups.contains_key(&g));
        self.wholes().filter(move |(n, _)| own(*n))
    }

    /// The numbers of those that `which` picks, rising.
    pub fn select(&self, mut which: impl FnMut(InodeNo, Seen<'_>) -> bool) -> Vec<InodeNo> {
        let mut out = Vec::new();
        for (group, part) in &self.parts {
            for packed in part.packed.iter().filter(|l| l.bits & GONE == 0) {
                let node = self.geometry.node(*group, packed.slot).inode();
                if which(node, Seen(Packed(packed, part.links_of(packed)))) {
                    out.push(node);
                }
            }
        }
        let packed = out.len();
        out.extend(self.whole.iter().filter(|(n, i)| which(**n, Seen(Whole(i)))).map(|(n, _)| *n));
        if packed > 0 && out.len() > packed {
            out.sort_unstable();
        }
        out
    }

    /// The extents in `group` of inodes that are not whole, by address.
    pub fn extents_in(&self, group: u32) -> impl Iterator<Item = &ExtentRef> {
        let all = self.parts.get(&group).map(|p| p.extents.as_slice()).unwrap_or_default();
        all.iter().filter(|h| !self.any_gone || self.packed(h.node).is_some())
    }

    /// Notes whether the entry of link `at` was found.
    pub fn set_linked(&mut self, node: InodeNo, at: usize, linked: bool) {
        if let Some(ino) = self.whole.get_mut(&node) {
            if let Some(l) = ino.linked.get_mut(at) {
                *l = linked;
            }
            return;
        }
        let Some((group, slot)) = self.geometry.node_place(node) else { return };
        let Some(part) = self.parts.get_mut(&group) else { return };
        let Some(i) = part.place(slot) else { return };
        let packed = &mut part.packed[i];
        if packed.bits & MANY == 0 {
            packed.bits = packed.bits & !LINKED | if linked { LINKED } else { 0 };
        } else if let Some(h) = part.links.get_mut(packed.a as usize + at) {
            h.linked = linked;
        }
    }

    /// Takes `ino` for the inode `node`, whole.
    pub fn put(&mut self, node: InodeNo, ino: Ino) {
        self.set_gone(node);
        self.whole.insert(node, ino);
    }

    /// Takes an inode out.
    pub fn forget(&mut self, node: InodeNo) -> Option<Ino> {
        self.set_gone(node);
        self.whole.remove(&node)
    }

    fn set_gone(&mut self, node: InodeNo) {
        let Some((group, slot)) = self.geometry.node_place(node) else { return };
        let Some(part) = self.parts.get_mut(&group) else { return };
        if let Some(i) = part.place(slot) {
            part.packed[i].bits |= GONE;
            self.any_gone = true;
        }
    }

    /// An inode of `domain`, whole: read again where it is not; of a directory with its entries where `entries` says
    /// so. Where that fails there is none, and [`Self::holds`] says why.
    pub fn body(&mut self, store: &Store, domain: &Domain, node: InodeNo, entries: bool) -> Option<&mut Ino> {
        if !self.whole.contains_key(&node) {
            self.get(node)?;
            match self.load(store, domain, node, entries) {
                Ok(ino) => self.put(node, ino),
                Err(e) => self.fail(e),
            }
        }
        self.whole.get_mut(&node)
    }

    fn load(&self, store: &Store, domain: &Domain, node: InodeNo, entries: bool) -> Result<Ino> {
        let mut ino = load(&self.rules, store, domain, node)?;
        let seen = self.get(node);
        if ino.inode.links.len() != seen.map_or(0, |s| s.links()) {
            return Err(changed(node.node(), "its links are others than before").into());
        }
        for (i, linked) in ino.linked.iter_mut().enumerate() {
            *linked = seen.is_some_and(|s| s.linked(i));
        }
        if entries && ino.is_dir() {
            ino.entries = load_entries(&self.rules, store, node, &ino)?;
        }
        Ok(ino)
    }

    /// Keeps the entries of a directory that holds.
    pub fn set_names(&mut self, dir: InodeNo, names: Vec<Name>) {
        if let Some((group, slot)) = self.geometry.node_place(dir) {
            self.parts.entry(group).or_default().names.push((slot, names.into_boxed_slice()));
        }
    }

    /// The highest generation of which an entry names each of the directories that `asked` picks.
    pub fn generations_named(&self, asked: impl Fn(InodeNo) -> bool) -> BTreeMap<InodeNo, u32> {
        let packed = self.parts.values().flat_map(|p| &p.names).flat_map(|(_, names)| names);
        let packed = packed.map(|n| (n.node, n.kind, n.generation));
        let whole = self.whole.values().flat_map(|i| &i.entries).map(|e| (e.node, e.kind, e.generation));
        let mut out = BTreeMap::new();
        for (node, _, generation) in packed.chain(whole).filter(|(n, kind, _)| *kind == DIR_KIND && asked(*n)) {
            let highest = out.entry(node).or_insert(generation);
            *highest = generation.max(*highest);
        }
        out
    }

    /// The entries of all directories that hold, by directory.
    pub fn take_names(&mut self) -> Vec<(InodeNo, Box<[Name]>)> {
        let geometry = self.geometry;
        let mut out = Vec::new();
        for (group, part) in &mut self.parts {
            let mut names = std::mem::take(&mut part.names);
            names.sort_unstable_by_key(|n| n.0);
            out.extend(names.into_iter().map(|(slot, n)| (geometry.node(*group, slot).inode(), n)));
        }
        out
    }
}

/// The block of an extent in `group`.
pub fn addr_of(geometry: &Geometry, group: u32, extent: &ExtentRef) -> BlockAddr {
    BlockAddr(geometry.group_start(group).0 + u64::from(extent.at))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_as_documented() {
        assert_eq!(
            (size_of::<PackedInode>(), size_of::<Name>(), size_of::<ExtentRef>(), size_of::<LinkHash>()),
            (32, 24, 24, 24)
        );
    }
}
