//! The metadata blocks of an image, each with its kind and place.

use braidfs::format::block::{BlockKind, open};
use braidfs::format::domain::DomainHeader;
use braidfs::format::group::SegmentTable;
use braidfs::format::journal::{ChunkKind, decode_chunk, peek_chunk};
use braidfs::format::super_block::SuperBlock;
use braidfs::format::{BLOCK_BYTES, BlockAddr, Corrupt, DomainId, bat};
use braidfs_device::Image;

/// What a block is, as far as the damage matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Superblock or replica.
    Super,
    /// Copy of a BAT block.
    Bat,
    /// Copy of a domain header.
    Domain,
    /// Copy of a group header.
    Group,
    /// Copy of a segment table.
    Segments,
    /// Copy of half an owner table.
    Owners,
    /// Copy of a node table block.
    NodeTable,
    /// Node block in use.
    Node,
    /// Directory bucket in use.
    Dir,
    /// Journal block of a chunk that recovery reads.
    Journal,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 10] = [
        Self::Super,
        Self::Bat,
        Self::Domain,
        Self::Group,
        Self::Segments,
        Self::Owners,
        Self::NodeTable,
        Self::Node,
        Self::Dir,
        Self::Journal,
    ];
}

/// A block to damage.
#[derive(Clone, Debug)]
pub struct Target {
    /// Where, on the only device.
    pub block: u64,
    /// What it is.
    pub kind: Kind,
    /// Whose, where it is one domain's.
    pub domain: Option<u16>,
    /// What the damaged block is, in words.
    pub what: String,
    /// Whether recovery or a reader takes it, or only its shadow.
    pub current: bool,
    /// The last chunk of a journal: nothing that follows can tell that it was there.
    pub last: bool,
    /// One of the few that much hangs on.
    pub important: bool,
}

struct Lister<'a> {
    image: &'a Image,
    volume: u32,
    /// Of what is added now.
    domain: Option<u16>,
    out: Vec<Target>,
}

impl Lister<'_> {
    fn read(&self, block: u64, blocks: u64) -> Vec<u8> {
        let mut buf = vec![0; blocks as usize * BLOCK_BYTES];
        // an image of our own: all its blocks can be read
        let _ = self.image.read(block, &mut buf);
        buf
    }

    fn add(&mut self, block: u64, kind: Kind, current: bool, important: bool, what: String) {
        self.out.push(Target { block, kind, domain: self.domain, what, current, important, last: false });
    }

    /// Both copies of a pair on the device at `block`, written for `addr`.
    fn pair(&mut self, block: u64, addr: u64, (as_block, kind): (BlockKind, Kind), important: bool, what: &str) {
        let (pair, volume) = (self.read(block, 2), self.volume);
        let seq = |i: u64| {
            let b = &pair[i as usize * BLOCK_BYTES..][..BLOCK_BYTES];
            open(b, as_block, volume, addr + i).ok().map(|h| h.seq.get())
        };
        let newer = u64::from(seq(1) > seq(0));
        for copy in 0..2 {
            let (current, name) = if copy == newer { (true, "current") } else { (false, "shadow") };
            let blank = if seq(copy).is_none() { ", blank" } else { "" };
            let what = format!("{what}, {name} copy{blank}");
            self.add(block + copy, kind, current, important && current, what);
        }
    }
}

/// Lists the metadata blocks of a volume on one device.
///
/// # Errors
/// Where the image is not one of a sound volume.
pub fn targets(image: &Image) -> Result<Vec<Target>, Corrupt> {
    let mut l = Lister { image, volume: 0, domain: None, out: Vec::new() };
    let sb = SuperBlock::from_block(&l.read(0, 1), 0)?;
    l.volume = sb.volume_id();
    let g = sb.geometry()?;
    let start = sb.device[0].data_start.get();
    l.add(0, Kind::Super, true, true, "superblock".into());
    l.add(image.blocks() - 1, Kind::Super, true, true, "superblock replica".into());
    l.pair(sb.bat.get(), sb.bat.get(), (BlockKind::Bat, Kind::Bat), true, "BAT");
    let (_, _, entries) =
        bat::decode(&l.read(sb.bat.get(), 2), l.volume, sb.bat.get(), sb.groups.get() as usize, sb.domains.get())?;
    for d in 0..sb.domains.get() {
        l.domain = Some(d);
        let at = sb.domain_table.get() + 2 * u64::from(d);
        l.pair(at, at, (BlockKind::Domain, Kind::Domain), true, &format!("header of domain {d}"));
        let (_, _, h) = DomainHeader::from_pair(&l.read(at, 2), l.volume, at, d)?;
        journal(&mut l, start, d, &h);
    }
    for (group, e) in (0u32..).zip(&entries).filter(|(_, e)| e.domain.is_some()) {
        l.domain = e.domain.map(|d| d.0);
        let first = e.domain.is_some_and(|d| d.0 == 0);
        let mut pair = |addr: BlockAddr, kinds, important, what: String| {
            l.pair(addr.0 + start, addr.0, kinds, important, &what);
        };
        pair(g.header_addr(group), (BlockKind::Group, Kind::Group), true, format!("header of group {group}"));
        let at = g.segment_table_addr(group);
        pair(at, (BlockKind::SegmentTable, Kind::Segments), true, format!("segment table of group {group}"));
        for (segment, half) in (0..g.segments).flat_map(|s| [(s, 0), (s, 1)]) {
            let what = format!("owner table of segment {segment}, half {half}, of group {group}");
            let important = first && segment == 0 && half == 0;
            pair(g.owners_addr(group, segment, half), (BlockKind::Owners, Kind::Owners), important, what);
        }
        for index in 0..g.node_blocks() {
            let what = format!("node table block {index} of group {group}");
            let important = index == 0;
            pair(g.node_table_addr(group, index), (BlockKind::NodeTable, Kind::NodeTable), important, what);
        }
        let at = g.segment_table_addr(group);
        let (_, _, segments) = SegmentTable::decode(&l.read(at.0 + start, 2), g.segments, l.volume, at)?;
        for block in g.meta_blocks()..g.group_blocks() {
            let s = &segments[(block / 512) as usize];
            if !s.is_valid(block % 512) {
                continue;
            }
            let addr = g.group_start(group).0 + u64::from(block);
            let b = l.read(addr + start, 1);
            for (as_block, kind) in [(BlockKind::Node, Kind::Node), (BlockKind::Dir, Kind::Dir)] {
                if open(&b, as_block, l.volume, addr).is_ok() {
                    l.add(addr + start, kind, true, false, format!("{kind:?} block {addr}"));
                }
            }
        }
    }
    Ok(l.out)
}

/// The chunks between the tail and the end of the journal, block by block.
fn journal(l: &mut Lister<'_>, start: u64, domain: u16, h: &DomainHeader) {
    let (at, n) = (h.journal_start.get() + start, u64::from(h.journal_blocks.get()));
    let ring = l.read(at, n);
    let mut pos = h.tail_pos.get();
    let (end, mut last) = (pos + n, l.out.len());
    while pos < end {
        let rest = &ring[(pos % n) as usize * BLOCK_BYTES..];
        let chunk = decode_chunk(rest, l.volume, DomainId(domain), pos).ok();
        let Some(c) = chunk else {
            // what lies there is older, or was cut off
            debug_assert!(peek_chunk(rest, l.volume, DomainId(domain), pos).is_none());
            pos += 1;
            continue;
        };
        for i in 0..u64::from(c.blocks) {
            let what = format!("journal of domain {domain}, {:?} chunk at {pos}, block {i}", c.kind);
            l.add(at + pos % n + i, Kind::Journal, true, c.kind == ChunkKind::Commit, what);
        }
        last = l.out.len() - c.blocks as usize;
        pos += u64::from(c.blocks);
    }
    l.out[last..].iter_mut().for_each(|t| t.last = true);
}
