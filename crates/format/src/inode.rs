//! The inode record: attributes, links, extended attributes, and inline data or extents.
//!
//! The links (parent directory, name) are SpanFS's *remote entry* and the roll-forward information of
//! F2FS and Max in one: from them a lost directory entry can be made again.

use crate::codec::{Put, Reader};
use crate::name::FileName;
use crate::{BlockAddr, Corrupt, InodeNo, NodeId};

/// Largest inline file, bytes.
pub const INLINE_MAX: usize = 3400;
/// Longest name, bytes.
pub const NAME_MAX: usize = 255;
/// Highest logical block: file sizes are below 8 EiB, logical blocks have 48 bits (sizes to 1 EiB).
pub const LBLK_MAX: u64 = (1 << 48) - 1;
/// Longest extent, blocks.
pub const EXTENT_MAX: u32 = (1 << 24) - 1;
/// Most blocks of an extent in a leaf that carries checksums, so that a leaf always holds several extents.
pub const SUMMED_EXTENT_MAX: u32 = 256;
/// Most bytes of a symbolic link's target.
pub const TARGET_MAX: usize = 4095;

/// `Inode::flags`: overwrite data in place.
pub const NOCOW: u32 = 1;
/// `Inode::flags`: immutable (chattr +i).
pub const IMMUTABLE: u32 = 2;
/// `Inode::flags`: append only (chattr +a).
pub const APPEND: u32 = 4;
/// `Inode::flags`: do not update the access time.
pub const NOATIME: u32 = 8;
/// `Inode::flags`: from this bit on the number of the project that the inode is of, 0: none.
pub const PROJECT_SHIFT: u32 = 12;
/// Highest number of a project.
pub const PROJECT_MAX: u32 = u32::MAX >> PROJECT_SHIFT;
/// `Inode::flags`: bits of the project's number.
pub const PROJECT_MASK: u32 = u32::MAX << PROJECT_SHIFT;

/// Where new objects of a directory go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(u8)]
pub enum Placement {
    /// As the parent directory says (for the root: `Dirs`).
    #[default]
    Unset = 0,
    /// Every object round-robin over the domains (SpanFS).
    Spread = 1,
    /// Directories round-robin, files in their directory's domain.
    Dirs = 2,
    /// Directories of the top level round-robin, all below with their parent (bladefs).
    Inherit = 3,
}

impl Placement {
    /// # Errors
    /// Where `v` is no placement.
    pub fn from_u8(v: u8) -> Result<Self, Corrupt> {
        Ok(match v {
            0 => Self::Unset,
            1 => Self::Spread,
            2 => Self::Dirs,
            3 => Self::Inherit,
            _ => return Err(Corrupt::new("placement", v.to_string())),
        })
    }
}

/// Seconds since 1970 and nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Hash)]
pub struct Timestamp {
    /// Seconds, may be negative.
    pub sec: i64,
    /// 0 to 999 999 999.
    pub nsec: u32,
}

/// One name of an inode.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Link {
    /// The inode of the directory that the name is in.
    pub parent: InodeNo,
    /// The name in it, 1 to 255 bytes without `/` and NUL.
    pub name: FileName,
}

/// A run of blocks of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Extent {
    /// First logical block.
    pub lblk: u64,
    /// Where it lies.
    pub addr: BlockAddr,
    /// Blocks, 1 to [`EXTENT_MAX`].
    pub len: u32,
    /// Allocated but never written: reads as zeros.
    pub unwritten: bool,
    /// CRC-32C per block, on volumes with data checksums and for written, not in-place extents.
    pub sums: Option<Box<[u32]>>,
}

impl Extent {
    /// One past the last logical block.
    pub fn end(&self) -> u64 {
        self.lblk + u64::from(self.len)
    }
    /// Its part from logical block `from` up to `to`, which it has.
    pub fn part(&self, from: u64, to: u64) -> Self {
        let at = |lblk: u64| (lblk - self.lblk) as usize;
        Self {
            lblk: from,
            addr: BlockAddr(self.addr.0 + (from - self.lblk)),
            len: (to - from) as u32,
            unwritten: self.unwritten,
            sums: self.sums.as_ref().map(|s| s[at(from)..at(to)].into()),
        }
    }
    /// Bytes of the encoded extent.
    pub fn encoded_bytes(&self) -> usize {
        16 + self.sums.as_ref().map_or(0, |s| 4 * s.len())
    }
    /// Appends the encoded extent.
    pub fn encode(&self, v: &mut Vec<u8>) {
        let flags = u8::from(self.unwritten) | u8::from(self.sums.is_some()) << 1;
        assert!(self.lblk >> 48 == 0 && self.addr.0 >> 48 == 0 && self.len >> 24 == 0, "{self:?} is too large");
        let fields = u128::from(self.lblk) | u128::from(self.addr.0) << 48 | u128::from(self.len) << 96;
        v.extend_from_slice(&(fields | u128::from(flags) << 120).to_le_bytes());
        for s in self.sums.iter().flat_map(|s| s.iter()) {
            v.put_u32(*s);
        }
    }
    /// # Errors
    /// [`Corrupt`] where the extent is empty, wraps or has unknown flags.
    pub fn decode(r: &mut Reader<'_>) -> Result<Self, Corrupt> {
        let lblk = r.u48()?;
        let addr = BlockAddr(r.u48()?);
        let l = r.bytes(3)?;
        let len = u32::from_le_bytes([l[0], l[1], l[2], 0]);
        let flags = r.u8()?;
        if len == 0 || lblk + u64::from(len) > LBLK_MAX + 1 || flags > 3 {
            return Err(r.bad(format!("extent of {len} blocks at {lblk}, flags {flags}")));
        }
        let sums = if flags & 2 != 0 {
            if r.left() / 4 < len as usize {
                return Err(r.bad("extent without its checksums"));
            }
            Some((0..len).map(|_| r.u32()).collect::<Result<Box<[u32]>, _>>()?)
        } else {
            None
        };
        Ok(Self { lblk, addr, len, unwritten: flags & 1 != 0, sums })
    }
}

/// Encodes extents, one behind the other (payload of an extent leaf, or the inline section).
pub fn encode_extents(extents: &[Extent]) -> Vec<u8> {
    let mut v = Vec::with_capacity(extents.len() * 16);
    extents.iter().for_each(|e| e.encode(&mut v));
    v
}

/// Decodes extents that rise and do not overlap.
///
/// # Errors
/// [`Corrupt`].
pub fn decode_extents(buf: &[u8]) -> Result<Vec<Extent>, Corrupt> {
    let mut r = Reader::new(buf, "extents");
    let mut out: Vec<Extent> = Vec::new();
    while r.left() > 0 {
        let e = Extent::decode(&mut r)?;
        if out.last().is_some_and(|l| l.end() > e.lblk) {
            return Err(r.bad(format!("extent at {} overlaps the one before", e.lblk)));
        }
        out.push(e);
    }
    Ok(out)
}

/// Reference to an extent leaf (or, in a deeper tree, an index node).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeafRef {
    /// Lowest logical block that the leaf may hold.
    pub first: u64,
    /// The leaf's node.
    pub node: NodeId,
}

/// Most references in an index node or in an inode's root.
pub const LEAF_REFS_MAX: usize = 200;

/// Encodes leaf references (payload of an index node).
pub fn encode_refs(refs: &[LeafRef]) -> Vec<u8> {
    let mut v = Vec::with_capacity(refs.len() * 14);
    for r in refs {
        v.put_u48(r.first);
        v.put_u64(r.node.0);
    }
    v
}

/// Decodes rising leaf references.
///
/// # Errors
/// [`Corrupt`].
pub fn decode_refs(buf: &[u8]) -> Result<Vec<LeafRef>, Corrupt> {
    let mut r = Reader::new(buf, "extent index");
    let mut out: Vec<LeafRef> = Vec::new();
    while r.left() > 0 {
        let e = LeafRef { first: r.u48()?, node: NodeId(r.u64()?) };
        if out.last().is_some_and(|l| l.first >= e.first) {
            return Err(r.bad("references do not rise"));
        }
        out.push(e);
    }
    Ok(out)
}

/// What the inode's content is kept in.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Content {
    /// Nothing (special files, empty files).
    #[default]
    None,
    /// File data or a symlink's target, in the record.
    Inline(Vec<u8>),
    /// Directory entries in the record ([`crate::dentry::encode_entries`]).
    InlineDir(Vec<u8>),
    /// Extents in the record.
    Extents(Vec<Extent>),
    /// Extent leaves in nodes of their own; `depth` 1: the references name leaves, 2: index nodes.
    Tree {
        /// 1 or 2.
        depth: u8,
        /// At most [`LEAF_REFS_MAX`].
        refs: Vec<LeafRef>,
    },
}

/// A link that was taken away by a rename of another inode over it. It counts as removed only where that
/// newcomer is found durable at `version` or newer; else the victim still has the link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tombstone {
    /// The link lost.
    pub link: Link,
    /// The inode that took the name.
    pub newcomer: InodeNo,
    /// Generation of the newcomer.
    pub generation: u32,
    /// Its version with the new name.
    pub version: u64,
}

/// An inode, decoded.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Inode {
    /// Type and permissions, as `st_mode`.
    pub mode: u32,
    /// User ID of the owner.
    pub uid: u32,
    /// ID of the owning group.
    pub gid: u32,
    /// Links; of a directory 2 + its subdirectories.
    pub nlink: u32,
    /// Bytes of the content; of a symlink, of its target.
    pub size: u64,
    /// 4 KiB blocks of data allocated, overflow nodes not counted.
    pub blocks: u64,
    /// Device number of a device file, as `st_rdev`.
    pub rdev: u64,
    /// [`NOCOW`] and so on.
    pub flags: u32,
    /// Placement of new objects (directories).
    pub placement: Placement,
    /// Last access to the content.
    pub atime: Timestamp,
    /// Last change of content.
    pub mtime: Timestamp,
    /// Last change of the inode.
    pub ctime: Timestamp,
    /// When it was created.
    pub btime: Timestamp,
    /// Volume-wide logical time of the last change of the links: of two inodes that claim one name after a crash, the
    /// later one has it.
    pub link_seq: u64,
    /// Names; empty for an orphan (unlinked while open). Empty here where they are in overflow nodes.
    pub links: Vec<Link>,
    /// Encoded extended attributes ([`encode_xattrs`]); empty where they are in overflow nodes.
    pub xattrs: Vec<Xattr>,
    /// Overflow nodes with the encoded links, in order.
    pub link_nodes: Vec<NodeId>,
    /// Overflow nodes with the encoded xattrs, in order.
    pub xattr_nodes: Vec<NodeId>,
    /// Names that it lost to other inodes, each as long as it is not durable that those have them.
    pub tombstones: Vec<Tombstone>,
    /// Partner of an exchange in another domain: node, generation, version with its new name.
    pub exchange: Option<(InodeNo, u32, u64)>,
    /// Where its data or its entries are, or these themselves.
    pub content: Content,
}

#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Section {
    Links = 1,
    Xattrs = 2,
    Inline = 3,
    InlineDir = 4,
    Extents = 5,
    Tree1 = 6,
    Tree2 = 7,
    LinkNodes = 8,
    XattrNodes = 9,
    Tombstones = 10,
    Exchange = 11,
}

impl Section {
    /// What it says something about: a record has one section for each at most.
    fn role(kind: u8) -> u32 {
        match kind {
            k if k == Self::Links as u8 || k == Self::LinkNodes as u8 => 1,
            k if k == Self::Xattrs as u8 || k == Self::XattrNodes as u8 => 2,
            k if (Self::Inline as u8..=Self::Tree2 as u8).contains(&k) => 3,
            k if k == Self::Tombstones as u8 => 4,
            k if k == Self::Exchange as u8 => 5,
            _ => 0,
        }
    }
}

/// Bytes of the fixed part.
pub const FIXED_BYTES: usize = 4 * 4 + 8 * 3 + 4 + 1 + 1 + 4 * 12 + 8;

/// Encodes links (a section, or cut into overflow nodes).
pub fn encode_links(links: &[Link]) -> Vec<u8> {
    let mut v = Vec::new();
    for l in links {
        v.put_u64(l.parent.0);
        v.put_u8(l.name.len() as u8);
        v.extend_from_slice(&l.name);
    }
    v
}

/// Whether `name` can be a directory entry.
pub fn valid_name(name: &[u8]) -> bool {
    !name.is_empty()
        && name.len() <= NAME_MAX
        && name != b"."
        && name != b".."
        && !name.iter().any(|&b| b == b'/' || b == 0)
}

fn decode_link(r: &mut Reader<'_>) -> Result<Link, Corrupt> {
    let parent = InodeNo(r.u64()?);
    let n = usize::from(r.u8()?);
    let name = r.bytes(n)?;
    if !valid_name(name) {
        return Err(r.bad("a link has no valid name"));
    }
    Ok(Link { parent, name: name.into() })
}

/// Decodes links.
///
/// # Errors
/// [`Corrupt`].
pub fn decode_links(buf: &[u8]) -> Result<Vec<Link>, Corrupt> {
    let mut r = Reader::new(buf, "links");
    let mut out = Vec::new();
    while r.left() > 0 {
        out.push(decode_link(&mut r)?);
    }
    Ok(out)
}

/// An extended attribute: its full name (`user.x`) and value.
pub type Xattr = (Box<[u8]>, Box<[u8]>);

/// Encodes extended attributes.
pub fn encode_xattrs(xattrs: &[Xattr]) -> Vec<u8> {
    let mut v = Vec::new();
    for (name, value) in xattrs {
        v.put_u8(name.len() as u8);
        v.put_u32(value.len() as u32);
        v.extend_from_slice(name);
        v.extend_from_slice(value);
    }
    v
}

/// Decodes extended attributes.
///
/// # Errors
/// [`Corrupt`].
pub fn decode_xattrs(buf: &[u8]) -> Result<Vec<Xattr>, Corrupt> {
    let mut r = Reader::new(buf, "xattrs");
    let mut out = Vec::new();
    while r.left() > 0 {
        let n = usize::from(r.u8()?);
        let m = r.u32()? as usize;
        if n == 0 {
            return Err(r.bad("an attribute without a name"));
        }
        out.push((r.bytes(n)?.into(), r.bytes(m)?.into()));
    }
    Ok(out)
}

fn put_section(v: &mut Vec<u8>, s: Section, body: &[u8]) {
    if !body.is_empty() {
        v.put_u8(s as u8);
        v.put_u16(body.len() as u16);
        v.extend_from_slice(body);
    }
}

fn put_nodes(v: &mut Vec<u8>, s: Section, nodes: &[NodeId]) {
    let mut b = Vec::with_capacity(nodes.len() * 8);
    nodes.iter().for_each(|n| b.put_u64(n.0));
    put_section(v, s, &b);
}

fn get_nodes(buf: &[u8]) -> Result<Vec<NodeId>, Corrupt> {
    let mut r = Reader::new(buf, "overflow nodes");
    let mut out = Vec::new();
    while r.left() > 0 {
        out.push(NodeId(r.u64()?));
    }
    Ok(out)
}

impl Inode {
    /// An empty directory, made at `time`.
    pub fn empty_dir(permissions: u32, time: Timestamp) -> Self {
        let (atime, mtime, ctime, btime) = (time, time, time, time);
        let content = Content::InlineDir(Vec::new());
        Self { mode: 0o040_000 | permissions, nlink: 2, atime, mtime, ctime, btime, content, ..Self::default() }
    }

    /// The payload of the record. Whether it fits [`crate::node::PAYLOAD_MAX`] is the caller's to see to.
    pub fn encode(&self) -> Vec<u8> {
        let inline = match &self.content {
            Content::Inline(b) => b.len(),
            _ => 0,
        };
        let mut v = Vec::with_capacity(192 + inline);
        v.put_u32(self.mode);
        v.put_u32(self.uid);
        v.put_u32(self.gid);
        v.put_u32(self.nlink);
        v.put_u64(self.size);
        v.put_u64(self.blocks);
        v.put_u64(self.rdev);
        v.put_u32(self.flags);
        v.put_u8(self.placement as u8);
        v.put_u8(
            u8::from(matches!(self.content, Content::Inline(_)))
                | u8::from(matches!(self.content, Content::InlineDir(_))) << 1,
        );
        for t in [self.atime, self.mtime, self.ctime, self.btime] {
            v.put_i64(t.sec);
            v.put_u32(t.nsec);
        }
        v.put_u64(self.link_seq);
        debug_assert_eq!(v.len(), FIXED_BYTES);
        if self.link_nodes.is_empty() {
            put_section(&mut v, Section::Links, &encode_links(&self.links));
        }
        if self.xattr_nodes.is_empty() {
            put_section(&mut v, Section::Xattrs, &encode_xattrs(&self.xattrs));
        }
        put_nodes(&mut v, Section::LinkNodes, &self.link_nodes);
        put_nodes(&mut v, Section::XattrNodes, &self.xattr_nodes);
        let mut t = Vec::new();
        for s in &self.tombstones {
            t.put_u64(s.newcomer.0);
            t.put_u32(s.generation);
            t.put_u64(s.version);
            t.extend_from_slice(&encode_links(std::slice::from_ref(&s.link)));
        }
        put_section(&mut v, Section::Tombstones, &t);
        if let Some((n, g, ver)) = self.exchange {
            let mut b = Vec::new();
            b.put_u64(n.0);
            b.put_u32(g);
            b.put_u64(ver);
            put_section(&mut v, Section::Exchange, &b);
        }
        match &self.content {
            Content::None => {}
            Content::Inline(b) => put_section(&mut v, Section::Inline, b),
            Content::InlineDir(b) => put_section(&mut v, Section::InlineDir, b),
            Content::Extents(e) => put_section(&mut v, Section::Extents, &encode_extents(e)),
            Content::Tree { depth, refs } => {
                put_section(&mut v, if *depth == 2 { Section::Tree2 } else { Section::Tree1 }, &encode_refs(refs));
            }
        }
        v
    }

    /// # Errors
    /// [`Corrupt`] where a field or section does not hold.
    pub fn decode(buf: &[u8]) -> Result<Self, Corrupt> {
        let mut r = Reader::new(buf, "inode record");
        let (mode, uid, gid, nlink) = (r.u32()?, r.u32()?, r.u32()?, r.u32()?);
        let (size, blocks, rdev) = (r.u64()?, r.u64()?, r.u64()?);
        let flags = r.u32()?;
        let placement = Placement::from_u8(r.u8()?)?;
        let inline = r.u8()?;
        let mut times = [Timestamp::default(); 4];
        for t in &mut times {
            *t = Timestamp { sec: r.i64()?, nsec: r.u32()? };
            if t.nsec >= 1_000_000_000 {
                return Err(r.bad(format!("{} nanoseconds", t.nsec)));
            }
        }
        let link_seq = r.u64()?;
        let content = match inline {
            0 => Content::None,
            1 => Content::Inline(Vec::new()),
            2 => Content::InlineDir(Vec::new()),
            n => return Err(r.bad(format!("content flags {n}"))),
        };
        if size > i64::MAX as u64 {
            return Err(r.bad(format!("size {size}")));
        }
        let mut i = Self {
            mode,
            uid,
            gid,
            nlink,
            size,
            blocks,
            rdev,
            flags,
            placement,
            atime: times[0],
            mtime: times[1],
            ctime: times[2],
            btime: times[3],
            link_seq,
            content,
            ..Self::default()
        };
        let mut seen = 0u32;
        while r.left() > 0 {
            let kind = r.u8()?;
            let n = usize::from(r.u16()?);
            let body = r.bytes(n)?;
            // what is never written is not read either, else a record would not be what it encodes to
            if n == 0 {
                return Err(r.bad(format!("section {kind} is empty")));
            }
            let role = 1u32 << Section::role(kind);
            if seen & role != 0 {
                return Err(r.bad(format!("section {kind} after another one for the same")));
            }
            seen |= role;
            match kind {
                k if k == Section::Links as u8 => i.links = decode_links(body)?,
                k if k == Section::Xattrs as u8 => i.xattrs = decode_xattrs(body)?,
                k if k == Section::Inline as u8 && inline == 1 => i.content = Content::Inline(body.to_vec()),
                k if k == Section::InlineDir as u8 && inline == 2 => i.content = Content::InlineDir(body.to_vec()),
                k if k == Section::Extents as u8 && inline == 0 => i.content = Content::Extents(decode_extents(body)?),
                k if (k == Section::Tree1 as u8 || k == Section::Tree2 as u8) && inline == 0 => {
                    let depth = if k == Section::Tree1 as u8 { 1 } else { 2 };
                    i.content = Content::Tree { depth, refs: decode_refs(body)? };
                }
                k if k == Section::LinkNodes as u8 => i.link_nodes = get_nodes(body)?,
                k if k == Section::XattrNodes as u8 => i.xattr_nodes = get_nodes(body)?,
                k if k == Section::Tombstones as u8 => {
                    let mut t = Reader::new(body, "tombstones");
                    while t.left() > 0 {
                        let (newcomer, generation, version) = (InodeNo(t.u64()?), t.u32()?, t.u64()?);
                        i.tombstones.push(Tombstone { link: decode_link(&mut t)?, newcomer, generation, version });
                    }
                }
                k if k == Section::Exchange as u8 => {
                    let mut t = Reader::new(body, "exchange");
                    i.exchange = Some((InodeNo(t.u64()?), t.u32()?, t.u64()?));
                    if t.left() > 0 {
                        return Err(t.bad(format!("{} bytes behind it", t.left())));
                    }
                }
                k => return Err(r.bad(format!("unknown section {k}"))),
            }
        }
        Ok(i)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Inode {
        Inode {
            mode: 0o100_644,
            uid: 1,
            gid: 2,
            nlink: 1,
            size: 10,
            blocks: 0,
            rdev: 0,
            flags: NOCOW,
            placement: Placement::Spread,
            atime: Timestamp { sec: -5, nsec: 999_999_999 },
            mtime: Timestamp::default(),
            ctime: Timestamp { sec: 1 << 40, nsec: 1 },
            btime: Timestamp::default(),
            link_seq: 12,
            links: vec![Link { parent: InodeNo(1), name: b"hello".as_slice().into() }],
            xattrs: vec![(b"user.a".as_slice().into(), b"1".as_slice().into())],
            link_nodes: vec![],
            xattr_nodes: vec![],
            tombstones: vec![Tombstone {
                link: Link { parent: InodeNo(7), name: b"x".as_slice().into() },
                newcomer: InodeNo(9),
                generation: 1,
                version: 4,
            }],
            exchange: Some((InodeNo(8), 2, 3)),
            content: Content::Inline(b"0123456789".to_vec()),
        }
    }

    #[test]
    fn inode_round_trip_and_truncation() {
        let mut i = sample();
        let b = i.encode();
        assert_eq!(Inode::decode(&b).unwrap(), i);
        for n in 0..b.len() {
            // a cut record is an error or lacks whole sections; it never panics
            let _ = Inode::decode(&b[..n]);
        }
        i.content = Content::Extents(vec![
            Extent { lblk: 0, addr: BlockAddr(9), len: 2, unwritten: false, sums: Some(Box::new([1, 2])) },
            Extent { lblk: 5, addr: BlockAddr(77), len: EXTENT_MAX, unwritten: true, sums: None },
        ]);
        assert_eq!(Inode::decode(&i.encode()).unwrap(), i);
        i.content = Content::Tree {
            depth: 2,
            refs: vec![LeafRef { first: 0, node: NodeId(3) }, LeafRef { first: 9, node: NodeId(4) }],
        };
        assert_eq!(Inode::decode(&i.encode()).unwrap(), i);
    }

    #[test]
    fn sections_that_are_never_written_are_refused() {
        let refused = |content: Content, section: Section, body: &[u8], says: &str| {
            let mut b = Inode { content, ..sample() }.encode();
            b.push(section as u8);
            b.put_u16(body.len() as u16);
            b.extend_from_slice(body);
            let e = Inode::decode(&b).unwrap_err().to_string();
            assert!(e.contains(says), "{e}");
        };
        // a map without extents, which an inode without content would be encoded to
        refused(Content::None, Section::Tree1, &[], "section 6 is empty");
        refused(Content::None, Section::Links, &encode_links(&sample().links), "section 1 after");
        refused(Content::None, Section::LinkNodes, &[1; 8], "section 8 after");
        refused(Content::None, Section::XattrNodes, &[1; 8], "section 9 after");
        refused(Content::Inline(b"a".to_vec()), Section::Tree2, &[0; 14], "section 7 after");
        refused(Content::Inline(Vec::new()), Section::Tree2, &[0; 14], "unknown section 7");
        let one = Extent { lblk: 0, addr: BlockAddr(9), len: 2, unwritten: false, sums: None };
        refused(Content::Extents(vec![one]), Section::Tree1, &[0; 14], "section 6 after");
    }
}
