//! Structures of a volume as text, for people who look into one.
//!
//! Reads the home places only: what a journal holds and no checkpoint has written is shown by [`DumpWhat::Journal`]
//! alone. The text is for reading; its form is not fixed.

use crate::error::{Error, Result};
use crate::home;
use braidfs_device::{BLOCK_BYTES, Device};
use braidfs_format::bat::{self, ENTRIES_PER_BLOCK};
use braidfs_format::block::{BlockHeader, BlockKind, MAGIC, checksum};
use braidfs_format::dentry::name_hash;
use braidfs_format::dentry::{Dentry, decode_bucket, decode_entries};
use braidfs_format::domain::{
    CLEAN, DomainHeader, FAILED, NEEDS_GC, PEER_FAILED, TABLES_SOUND, TENANT_RATES, TenantRate,
};
use braidfs_format::geometry::NODES_PER_BLOCK;
use braidfs_format::group::{GroupHeader, SegmentTable};
use braidfs_format::inode::{
    Content, Extent, Inode, PROJECT_MASK, PROJECT_SHIFT, Timestamp, decode_extents, decode_links, decode_refs,
    decode_xattrs,
};
use braidfs_format::journal::{Chunk, Record, decode_chunk, peek_chunk};
use braidfs_format::node::{DIR, NodeBlock, NodeKind, NodeRecord, NodeTableBlock, OVERFLOW, REMOTE, USED};
use braidfs_format::owner::HELD;
use braidfs_format::super_block::{DRAINED, SuperBlock};
use braidfs_format::{BlockAddr, Corrupt, DomainId, InodeNo, NodeId, quota};
use braidfs_store::Store;
use braidfs_store::super_io::read_super;
use std::collections::HashSet;
use std::fmt::Write;
use std::sync::Arc;

/// What to show.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DumpWhat {
    /// The superblocks of all devices.
    Super,
    /// The block group allocation table.
    Bat,
    /// The header of a domain.
    Domain(u16),
    /// The header of a group.
    Group(u32),
    /// The segment table of a group.
    Segments(u32),
    /// The used node table entries of a group.
    Nodes(u32),
    /// A node: its table entry and record.
    Node(u64),
    /// A block of the group space, decoded as far as it says what it is.
    Block(u64),
    /// The chunks in the journal of a domain.
    Journal(u16),
    /// The inode that a path names.
    Path(Vec<u8>),
}

/// Shows `what` of the volume on `devices`.
///
/// # Errors
/// No such thing, no volume, damage where it is looked for, or of a device.
pub fn dump(devices: &[Arc<dyn Device>], what: &DumpWhat) -> Result<String> {
    let (sb, order) = read_super(devices)?;
    let store = Store::new(order, &sb)?;
    let d = Dump { sb, store };
    match what {
        DumpWhat::Super => Ok(d.super_block()),
        DumpWhat::Bat => d.bat(),
        DumpWhat::Domain(n) => d.domain(*n),
        DumpWhat::Group(n) => d.group(*n),
        DumpWhat::Segments(n) => d.segments(*n),
        DumpWhat::Nodes(n) => d.nodes(*n),
        DumpWhat::Node(n) => d.node(NodeId(*n)),
        DumpWhat::Block(n) => d.block(BlockAddr(*n)),
        DumpWhat::Journal(n) => d.journal(*n),
        DumpWhat::Path(p) => d.node(d.resolve(p)?.node()),
    }
}

struct Dump {
    sb: SuperBlock,
    store: Store,
}

macro_rules! line {
    ($out:expr, $($arg:tt)*) => {{
        // Writing to a string does not fail.
        let _ = writeln!($out, $($arg)*);
    }};
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn text(bytes: &[u8]) -> String {
    format!("{:?}", String::from_utf8_lossy(bytes))
}

fn time(t: Timestamp) -> String {
    format!("{}.{:09}", t.sec, t.nsec)
}

fn names(flags: u32, table: &[(u32, &str)]) -> String {
    let set: Vec<&str> = table.iter().filter(|(bit, _)| flags & bit != 0).map(|f| f.1).collect();
    if set.is_empty() { "none".into() } else { set.join(", ") }
}

fn entry_flags(flags: u8) -> String {
    let table = [(USED, "used"), (REMOTE, "remote"), (OVERFLOW, "overflow"), (DIR, "directory")];
    names(u32::from(flags), &table.map(|(b, n)| (u32::from(b), n)))
}

impl Dump {
    fn pair(&self, addr: BlockAddr) -> Result<Vec<u8>> {
        let mut buf = vec![0u8; 2 * BLOCK_BYTES];
        self.store.read(addr, &mut buf)?;
        Ok(buf)
    }

    fn volume_pair(&self, block: u64) -> Result<Vec<u8>> {
        let mut buf = vec![0u8; 2 * BLOCK_BYTES];
        self.store.device(0).read(block, &mut buf)?;
        Ok(buf)
    }

    fn check_group(&self, group: u32) -> Result<()> {
        if group < self.store.geometry().groups { Ok(()) } else { Err(Error::NotFound) }
    }

    fn super_block(&self) -> String {
        let (s, g) = (&self.sb, self.store.geometry());
        let mut o = String::new();
        line!(o, "format version   {}", s.version);
        line!(o, "features         incompatible {:#x}, compatible {:#x}", s.incompat, s.compat);
        line!(o, "UUID             {}", uuid::Uuid::from_bytes(s.uuid));
        line!(o, "label            {:?}", s.label_str());
        line!(o, "created          {} s since 1970", s.created);
        line!(o, "groups           {} of {} blocks ({} segments)", s.groups, s.group_blocks, g.segments);
        line!(o, "domains          {} (room for {})", s.domains, s.max_domains);
        line!(o, "logs per domain  {}", s.mlogs);
        line!(o, "inline limit     {} bytes", s.inline_max);
        line!(o, "placement        {}", s.placement);
        line!(o, "domain table     at block {}", s.domain_table);
        line!(o, "BAT              at block {}, room for {} pairs", s.bat, s.bat_pairs);
        for (i, d) in s.device_table().iter().enumerate() {
            line!(o, "device {i}         {}, {}", self.store.device(i).name(), uuid::Uuid::from_bytes(d.uuid));
            line!(
                o,
                "                 {} blocks, groups {} to {} from block {} on, the last of {} blocks",
                d.blocks,
                d.first_group,
                u64::from(d.first_group.get()) + u64::from(d.groups.get()) - 1,
                d.data_start,
                d.last_group_blocks
            );
            if d.flags.get() != 0 {
                line!(
                    o,
                    "                 flags {:#x}{}",
                    d.flags,
                    if d.flags.get() & DRAINED != 0 { " (is drained)" } else { "" }
                );
            }
        }
        let devices: Vec<_> = (0..self.store.devices()).map(|i| self.store.device(i).clone()).collect();
        for (i, block, r) in braidfs_store::lease::records(&devices, s).unwrap_or_default() {
            let state = if r.state == HELD { "held" } else { "given back" };
            line!(
                o,
                "owner of device {i} (block {block}) {state}, renewal {}: process {} on {}, {} s since 1970, lease {} ms, requests {} ms",
                r.header.seq,
                r.pid,
                r.host_str(),
                r.renewed,
                r.lease_ms,
                r.io_ms
            );
        }
        o
    }

    fn bat(&self) -> Result<String> {
        let mut o = String::new();
        let groups = self.sb.groups.get();
        let mut run: Option<(u32, bat::BatEntry)> = None;
        let mut show = |from: u32, to: u32, e: bat::BatEntry| {
            let owner = e.domain.map_or_else(|| "free".into(), |d| d.to_string());
            line!(o, "groups {from} to {to}: {owner}, claim {}", e.epoch);
        };
        for index in 0..groups.div_ceil(ENTRIES_PER_BLOCK) {
            let first = index * ENTRIES_PER_BLOCK;
            let pair = self.sb.bat.get() + 2 * u64::from(index);
            let count = (groups - first).min(ENTRIES_PER_BLOCK) as usize;
            let buf = self.volume_pair(pair)?;
            let (_, _, entries) = bat::decode(&buf, self.sb.volume_id(), pair, count, self.sb.max_domains.get())?;
            for (group, e) in (first..).zip(entries) {
                match run {
                    Some((_, last)) if last == e => {}
                    Some((from, last)) => {
                        show(from, group - 1, last);
                        run = Some((group, e));
                    }
                    None => run = Some((group, e)),
                }
            }
        }
        if let Some((from, e)) = run {
            show(from, groups - 1, e);
        }
        Ok(o)
    }

    fn header(&self, domain: u16) -> Result<(usize, u64, DomainHeader)> {
        if domain >= self.sb.domains.get() {
            return Err(Error::NotFound);
        }
        let pair = self.sb.domain_table.get() + 2 * u64::from(domain);
        Ok(DomainHeader::from_pair(&self.volume_pair(pair)?, self.sb.volume_id(), pair, domain)?)
    }

    fn domain(&self, domain: u16) -> Result<String> {
        let (copy, seq, h) = self.header(domain)?;
        let mut o = String::new();
        let bits = [
            (CLEAN, "clean"),
            (FAILED, "failed"),
            (NEEDS_GC, "needs collection"),
            (TABLES_SOUND, "tables sound"),
            (PEER_FAILED, "a peer failed"),
        ];
        let flags = names(h.flags.get(), &bits);
        line!(o, "domain           {domain} (copy {copy}, sequence {seq})");
        line!(o, "flags            {flags}");
        if h.tenant_root.get() > 0 {
            let most = match h.tenant_blocks.get() {
                0 => "no limit".into(),
                n => format!("{n} blocks at most"),
            };
            let inodes = match h.tenant_inodes.get() {
                0 => String::new(),
                n => format!(", {n} inodes at most"),
            };
            line!(o, "tenant           {:?}, root {}, {most}{inodes}", h.tenant_name_str(), h.tenant_root);
            if h.tenant_soft_blocks.get() > 0 {
                let since = match h.tenant_soft_since.get() {
                    0 => String::new(),
                    n => format!(", exceeded since {n}"),
                };
                line!(o, "soft limit       {} blocks, for {} s{since}", h.tenant_soft_blocks, h.tenant_grace);
            }
            if (h.tenant_memory_min.get(), h.tenant_memory_max.get()) != (0, 0) {
                let most = match h.tenant_memory_max.get() {
                    0 => "no limit".into(),
                    n => format!("{n} bytes at most"),
                };
                line!(o, "memory           {} bytes at least, {most}", h.tenant_memory_min);
            }
            if let Some(mode) = h.journal_mode() {
                let state = match (h.is_scratch(), h.is_discarded()) {
                    (false, _) => "",
                    (true, false) => ": there is none; at rest",
                    (true, true) => ": there is none; in use, its content counts for nothing",
                };
                line!(o, "journal mode     {mode}{state}");
            }
            for (rate, name) in h.tenant_rates.iter().zip(TENANT_RATES).filter(|(r, _)| r.per_second.get() > 0) {
                line!(o, "{name:<16} {} per second, {} at once", rate.per_second, rate.burst);
            }
            if h.tenant_serving.per_second.get() > 0 {
                let TenantRate { per_second, burst } = h.tenant_serving;
                line!(o, "serving time     {per_second} ns per second, {burst} at once");
            }
            if h.tenant_devices.get() > 0 {
                let is = |n: &u32| h.tenant_devices.get() & 1 << n != 0;
                let devices: Vec<String> = (0..u32::BITS).filter(is).map(|n| n.to_string()).collect();
                line!(o, "devices          {}", devices.join(","));
            }
        }
        line!(o, "journal          {} blocks from block {}", h.journal_blocks, h.journal_start);
        line!(o, "journal in use   positions {} to {}", h.tail_pos, h.head_pos);
        line!(o, "transactions     last {}, checkpointed {}", h.last_tx, h.checkpointed_tx);
        line!(o, "mounts           {}", h.mounts);
        Ok(o)
    }

    fn group(&self, group: u32) -> Result<String> {
        self.check_group(group)?;
        let g = self.store.geometry();
        let addr = g.header_addr(group);
        let (copy, seq, h) = GroupHeader::from_pair(&self.pair(addr)?, self.store.volume, addr)?;
        let mut o = String::new();
        line!(o, "group            {} (copy {copy}, sequence {seq})", h.group);
        line!(o, "owner            domain {}, claim {}", h.domain, h.epoch);
        line!(o, "blocks           {} from block {}, {} of them metadata", h.blocks, addr.0, g.meta_blocks());
        line!(o, "nodes            {} from node {}", g.nodes(), g.node(group, 0).0);
        Ok(o)
    }

    fn segments(&self, group: u32) -> Result<String> {
        self.check_group(group)?;
        let g = self.store.geometry();
        let addr = g.segment_table_addr(group);
        let (copy, seq, segments) = SegmentTable::decode(&self.pair(addr)?, g.segments, self.store.volume, addr)?;
        let mut o = String::new();
        line!(o, "segment table of group {group} (copy {copy}, sequence {seq})");
        for (i, s) in segments.iter().enumerate() {
            let start = g.segment_start(group, i as u32);
            let (kind, heat) = (format!("{:?}", s.kind), format!("{:?}", s.temperature));
            line!(o, "{i:4}  from {start}: {kind:8}{heat:6}{:4} valid, last written by tx {}", s.valid_count(), s.age);
        }
        Ok(o)
    }

    fn nodes(&self, group: u32) -> Result<String> {
        self.check_group(group)?;
        let g = self.store.geometry();
        let mut o = String::new();
        for index in 0..g.node_blocks() {
            let addr = g.node_table_addr(group, index);
            let (_, _, entries) = NodeTableBlock::decode(&self.pair(addr)?, self.store.volume, addr)?;
            for (i, e) in entries.iter().enumerate().filter(|(_, e)| e.used()) {
                let node = g.node(group, index * NODES_PER_BLOCK + i as u32);
                let flags = entry_flags(e.flags);
                line!(o, "{node}: {} record {}, generation {}, {flags}", { e.addr }, e.index, { e.generation });
            }
        }
        if o.is_empty() {
            line!(o, "group {group} has no node in use");
        }
        Ok(o)
    }

    fn node(&self, node: NodeId) -> Result<String> {
        let e = home::entry(&self.store, node)?;
        let mut o = String::new();
        line!(
            o,
            "{node}: {} record {}, generation {}, {}",
            { e.addr },
            e.index,
            { e.generation },
            entry_flags(e.flags)
        );
        if e.used() {
            o.push_str(&self.show_record(&home::node(&self.store, node)?, true));
        }
        Ok(o)
    }

    /// A record; with `deep` also what its overflow nodes and buckets hold.
    fn show_record(&self, r: &NodeRecord, deep: bool) -> String {
        let mut o = String::new();
        let NodeRecord { node, kind, owner, version, generation, payload, .. } = r;
        let bytes = payload.len();
        line!(
            o,
            "  record of {node} ({kind:?}), owner {owner}, version {version}, generation {generation}, {bytes} bytes"
        );
        let shown = match r.kind {
            NodeKind::Inode => Inode::decode(&r.payload).map(|i| self.show_inode(r.node.inode(), &i, deep)),
            NodeKind::ExtentLeaf => decode_extents(&r.payload).map(|e| show_extents(&e)),
            NodeKind::ExtentIndex => decode_refs(&r.payload)
                .map(|refs| refs.iter().map(|r| format!("    from {} on: {}\n", r.first, r.node)).collect()),
            NodeKind::Xattrs | NodeKind::Links => Ok("    part of a longer encoding\n".into()),
        };
        match shown {
            Ok(s) => o.push_str(&s),
            Err(e) => line!(o, "    {e}"),
        }
        o
    }

    fn gather(&self, nodes: &[NodeId]) -> Result<Vec<u8>> {
        let mut v = Vec::new();
        for n in nodes {
            v.extend(home::node(&self.store, *n)?.payload);
        }
        Ok(v)
    }

    fn show_inode(&self, node: InodeNo, i: &Inode, deep: bool) -> String {
        let mut o = String::new();
        let Inode { mode, uid, gid, nlink, size, blocks, flags, rdev, placement, link_seq, .. } = i;
        line!(o, "    mode {mode:o}, owner {uid}:{gid}, {nlink} links, {size} bytes, {blocks} blocks");
        let (flags, project) = (flags & !PROJECT_MASK, flags >> PROJECT_SHIFT);
        if project > 0 {
            line!(o, "    project {project}");
        }
        line!(o, "    flags {flags:#x}, device {rdev:#x}, placement {placement:?}, link time {link_seq}");
        let [atime, mtime, ctime, btime] = [i.atime, i.mtime, i.ctime, i.btime].map(time);
        line!(o, "    atime {atime}, mtime {mtime}, ctime {ctime}, btime {btime}");
        let mut links = Ok(i.links.clone());
        if !i.link_nodes.is_empty() {
            line!(o, "    links in {:?}", i.link_nodes);
            links = self.gather(&i.link_nodes).and_then(|b| Ok(decode_links(&b)?));
        }
        match links {
            Ok(l) => l.iter().for_each(|l| line!(o, "    link {} in {}", text(&l.name), l.parent)),
            Err(e) => line!(o, "    links: {e}"),
        }
        let mut xattrs = Ok(i.xattrs.clone());
        if !i.xattr_nodes.is_empty() {
            line!(o, "    attributes in {:?}", i.xattr_nodes);
            xattrs = self.gather(&i.xattr_nodes).and_then(|b| Ok(decode_xattrs(&b)?));
        }
        match xattrs {
            Ok(x) => x.iter().for_each(|(n, v)| {
                line!(o, "    attribute {}: {} bytes", text(n), v.len());
                if quota::RECORDS.contains(&&**n) {
                    show_quotas(&mut o, n, v);
                }
            }),
            Err(e) => line!(o, "    attributes: {e}"),
        }
        for t in &i.tombstones {
            let (name, parent) = (text(&t.link.name), t.link.parent);
            line!(o, "    lost {name} in {parent} to {} generation {} version {}", t.newcomer, t.generation, t.version);
        }
        if let Some((n, g, v)) = i.exchange {
            line!(o, "    exchanged with {n} generation {g} version {v}");
        }
        match &i.content {
            Content::None => line!(o, "    no content"),
            Content::Inline(b) if i.mode & 0o170_000 == 0o120_000 => line!(o, "    target {}", text(b)),
            Content::Inline(b) => line!(o, "    {} bytes inline", b.len()),
            Content::InlineDir(b) => match decode_entries(b) {
                Ok(e) => show_entries(&mut o, &e),
                Err(e) => line!(o, "    {e}"),
            },
            Content::Extents(e) => o.push_str(&show_extents(e)),
            Content::Tree { depth, refs } => {
                line!(o, "    extent tree of depth {depth}");
                refs.iter().for_each(|r| line!(o, "    from {} on: {}", r.first, r.node));
            }
        }
        if deep && matches!(i.content, Content::Extents(_) | Content::Tree { .. }) {
            match self.extents(i) {
                Ok(e) if i.mode & 0o170_000 == 0o040_000 => match self.buckets(node, &e) {
                    Ok(entries) => show_entries(&mut o, &entries),
                    Err(e) => line!(o, "    {e}"),
                },
                Ok(e) if matches!(i.content, Content::Tree { .. }) => o.push_str(&show_extents(&e)),
                Ok(_) => {}
                Err(e) => line!(o, "    {e}"),
            }
        }
        o
    }

    fn extents(&self, i: &Inode) -> Result<Vec<Extent>> {
        match &i.content {
            Content::Extents(e) => Ok(e.clone()),
            Content::Tree { depth, refs } => {
                // a node that is named again and again would be shown as often
                let mut seen = HashSet::new();
                let mut node = |n| match seen.insert(n) {
                    true => home::node(&self.store, n),
                    false => Err(Corrupt::new("extent tree", format!("{n} is used twice")).into()),
                };
                let mut leaves: Vec<NodeId> = refs.iter().map(|r| r.node).collect();
                if *depth == 2 {
                    let mut below = Vec::new();
                    for n in leaves {
                        below.extend(decode_refs(&node(n)?.payload)?.iter().map(|r| r.node));
                    }
                    leaves = below;
                }
                let mut out = Vec::new();
                for n in leaves {
                    out.extend(decode_extents(&node(n)?.payload)?);
                }
                Ok(out)
            }
            _ => Ok(Vec::new()),
        }
    }

    fn buckets(&self, dir: InodeNo, extents: &[Extent]) -> Result<Vec<Dentry>> {
        let mut out = Vec::new();
        let mut block = vec![0u8; BLOCK_BYTES];
        for e in extents {
            for i in 0..u64::from(e.len) {
                let addr = BlockAddr(e.addr.0 + i);
                self.store.read(addr, &mut block)?;
                out.extend(decode_bucket(&block, dir, e.lblk + i, self.store.volume, addr)?);
            }
        }
        Ok(out)
    }

    fn block(&self, addr: BlockAddr) -> Result<String> {
        let mut block = vec![0u8; BLOCK_BYTES];
        self.store.read(addr, &mut block)?;
        let g = self.store.geometry();
        let (group, segment, at) = g.split(addr);
        let mut o = String::new();
        line!(o, "{addr}: block {at} of segment {segment} of group {group}");
        let field = |at: usize| u64::from_le_bytes(block[at..at + 8].try_into().unwrap_or_default());
        let sealed = u32::from_le_bytes([block[0], block[1], block[2], block[3]]) == MAGIC;
        if sealed {
            let holds = u32::from_le_bytes([block[4], block[5], block[6], block[7]]) == checksum(&block);
            line!(o, "metadata of kind {}, written for block {}, sequence {}", block[8], field(16), field(24));
            line!(o, "checksum {}", if holds { "holds" } else { "does not hold" });
            if block[8] == BlockKind::Node as u8 {
                for i in 0..NodeBlock::check(&block, self.store.volume, addr)? {
                    match NodeBlock::record(&block, i) {
                        Ok(r) => o.push_str(&self.show_record(&r, false)),
                        Err(e) => line!(o, "  {e}"),
                    }
                }
                return Ok(o);
            }
            if block[8] == BlockKind::Dir as u8 {
                let dir = InodeNo(field(size_of::<BlockHeader>()));
                let lblk = field(size_of::<BlockHeader>() + 8) & ((1 << 48) - 1);
                line!(o, "bucket {lblk} of directory {dir}");
                show_entries(&mut o, &decode_bucket(&block, dir, lblk, self.store.volume, addr)?);
                return Ok(o);
            }
        }
        let end = block.iter().rposition(|&b| b != 0).map_or(0, |i| i + 1);
        for (i, row) in block[..end].chunks(32).enumerate() {
            line!(o, "{:04x}  {}", 32 * i, hex(row));
        }
        if end < BLOCK_BYTES {
            line!(o, "zeros from byte {end} on");
        }
        Ok(o)
    }

    fn journal(&self, domain: u16) -> Result<String> {
        let (_, _, h) = self.header(domain)?;
        let (start, blocks) = (h.journal_start.get(), u64::from(h.journal_blocks.get()));
        let mut o = self.domain(domain)?;
        let mut block = vec![0u8; BLOCK_BYTES];
        let mut at = 0;
        let mut found: Vec<(u64, std::result::Result<Chunk, Corrupt>)> = Vec::new();
        while at < blocks {
            self.store.read(BlockAddr(start + at), &mut block)?;
            let pos = u64::from_le_bytes(block[16..24].try_into().unwrap_or_default());
            let id = DomainId(domain);
            let n = peek_chunk(&block, self.store.volume, id, pos).filter(|&n| at + u64::from(n) <= blocks);
            let Some(n) = n.filter(|_| pos % blocks == at) else {
                at += 1;
                continue;
            };
            let mut chunk = vec![0u8; n as usize * BLOCK_BYTES];
            self.store.read(BlockAddr(start + at), &mut chunk)?;
            let chunk = decode_chunk(&chunk, self.store.volume, id, pos);
            // A torn chunk may be followed by the start of another one.
            at += if chunk.is_ok() { u64::from(n) } else { 1 };
            found.push((pos, chunk));
        }
        found.sort_by_key(|c| c.0);
        for (pos, chunk) in found {
            let old = if pos < h.tail_pos.get() { ", no longer needed" } else { "" };
            match chunk {
                Ok(c) => {
                    line!(o, "{:?} chunk at {pos}, {} blocks, {}, stream {}{old}", c.kind, c.blocks, c.tx, c.stream);
                    c.records.iter().for_each(|r| line!(o, "  {}", show_journal(&r.to_owned())));
                }
                Err(e) => line!(o, "chunk at {pos}: {e}{old}"),
            }
        }
        Ok(o)
    }

    /// The inode that a path names, by the home tables.
    fn resolve(&self, path: &[u8]) -> Result<InodeNo> {
        let mut at = InodeNo::ROOT;
        for name in path.split(|&b| b == b'/').filter(|n| !n.is_empty() && *n != b".") {
            let i = Inode::decode(&home::node(&self.store, at.node())?.payload)?;
            let entries = match &i.content {
                Content::InlineDir(b) => decode_entries(b)?,
                Content::Extents(_) | Content::Tree { .. } => {
                    let mut extents = self.extents(&i)?;
                    // Only the bucket of the name, and the next for one that moved up past taken positions.
                    let lblk = name_hash(&self.sb.hash_key, name) >> 15;
                    let from = extents.partition_point(|e| e.lblk <= lblk).saturating_sub(1);
                    extents.drain(..from);
                    extents.truncate(2);
                    self.buckets(at, &extents)?
                }
                _ if i.mode & 0o170_000 == 0o040_000 => Vec::new(),
                _ => return Err(Error::NotDir),
            };
            at = entries.iter().find(|e| *e.name == *name).ok_or(Error::NotFound)?.node;
        }
        Ok(at)
    }
}

fn show_extents(extents: &[Extent]) -> String {
    let show = |e: &Extent| {
        let how = if e.unwritten { ", unwritten" } else { "" };
        let sums = if e.sums.is_some() { ", with checksums" } else { "" };
        format!("    {} to {}: {}{how}{sums}\n", e.lblk, e.end() - 1, e.addr)
    };
    extents.iter().map(show).collect()
}

/// Limits of users, groups and directories.
fn show_quotas(o: &mut String, record: &[u8], value: &[u8]) {
    let entries = match quota::decode(record, value) {
        Ok(entries) => entries,
        Err(e) => return line!(o, "        {e}"),
    };
    for e in entries {
        let whose = match e.kind {
            quota::USER => "user",
            quota::GROUP => "group",
            _ => "project",
        };
        let (b, sb, i, si) = (e.blocks, e.soft_blocks, e.inodes, e.soft_inodes);
        line!(o, "        {whose} {}: blocks {b}, soft {sb}, inodes {i}, soft {si}, grace {} s", e.id, e.grace);
        if e.root.get() > 0 {
            line!(o, "            directory {}, generation {}", e.root, e.root_generation);
        }
        for (what, since) in [("blocks", e.blocks_since.get()), ("inodes", e.inodes_since.get())] {
            if since > 0 {
                line!(o, "            soft limit of {what} exceeded since {since}");
            }
        }
    }
}

fn show_entries(o: &mut String, entries: &[Dentry]) {
    line!(o, "    {} entries", entries.len());
    for e in entries {
        line!(o, "    {:016x} {} -> {} generation {}, type {}", e.hash, text(&e.name), e.node, e.generation, e.kind);
    }
}

fn show_journal(r: &Record) -> String {
    match r {
        Record::Node { node, entry } => {
            let flags = entry_flags(entry.flags);
            format!("{node} at {} record {}, generation {}, {flags}", { entry.addr }, entry.index, { entry.generation })
        }
        Record::Full(r) => format!("full {} ({:?}) version {}, {} bytes", r.node, r.kind, r.version, r.payload.len()),
        Record::Sums { addr, sums } => format!("checksums of {} blocks from {addr}", sums.len()),
        Record::Remote { dir, child, generation, name } => {
            format!("{} in {dir} is or was {child} generation {generation}", text(name))
        }
        other => format!("{other:?}"),
    }
}
