//! The nodes of a group of a volume in use: node blocks, and what they lead to.

use super::pass::Scrub;
use crate::codes;
use crate::data::compare;
use crate::parts::domain::is_data;
use crate::parts::ino::Ino;
use crate::read::{read_scattered, runs};
use crate::report::{Bad, Checked};
use crate::rules::dir::Buckets;
use crate::rules::record::{self, node_block};
use crate::rules::{Visitor, inode};
use braidfs_device::{AlignedBuf, BLOCK_BYTES};
use braidfs_format::dentry::Dentry;
use braidfs_format::geometry::NODES_PER_BLOCK;
use braidfs_format::inode::Extent;
use braidfs_format::node::{NodeEntry, NodeKind};
use braidfs_format::{BlockAddr, DomainId, InodeNo, NodeId};
use braidfs_store::interface::Quiesced;

/// Node blocks read at once.
const RUN_BLOCKS: u64 = 64;
/// Buckets and data blocks that are looked at while a commit waits.
const STILL_BLOCKS: u64 = 256;
/// Overflow nodes that are read so. What has more is read in parts.
const STILL_NODES: usize = 256;
/// Looks at an inode that changes meanwhile before a commit has to wait.
const FREE_LOOKS: u32 = 2;
/// Looks in parts at one that changes between them.
const LOOKS_IN_PARTS: u32 = 5;

/// Looks at all nodes whose entries stand in group `number`.
pub fn of_group(s: &mut Scrub<'_>, d: DomainId, number: u32) {
    let g = s.volume.store().geometry();
    let mut used: Vec<(NodeId, NodeEntry)> = Vec::new();
    for index in 0..g.node_blocks() {
        for slot in index * NODES_PER_BLOCK..(index + 1) * NODES_PER_BLOCK {
            let node = g.node(number, slot);
            if node.0 == 0 {
                continue;
            }
            match s.volume.entry(d, node) {
                Ok(Some(e)) if e.used() => used.push((node, e)),
                Ok(Some(_)) => {}
                Ok(None) => return, // the group has left the domain: there was no node in it
                Err(e) => {
                    let why = format!("node table block {index} of group {number}: {e}");
                    s.find(codes::NODES_LOST, Some(d.0), None, why);
                    break;
                }
            }
        }
    }
    used.sort_unstable_by_key(|(_, e)| (e.addr, e.index));
    let mut buf = AlignedBuf::zeroed(RUN_BLOCKS as usize * BLOCK_BYTES);
    for (first, blocks, some) in runs(&used, |u| u.1.addr.0, RUN_BLOCKS) {
        if s.report.stopped {
            return;
        }
        let bytes = &mut buf[..blocks as usize * BLOCK_BYTES];
        // a block that cannot be read, or a run over the end of a device, is read again for each node
        let read = s.volume.store().read(BlockAddr(first), bytes).is_ok();
        s.spend(blocks);
        for block in some.chunk_by(|a, b| { a.1.addr } == { b.1.addr }) {
            let addr = block[0].1.addr;
            let bytes = &buf[(addr.0 - first) as usize * BLOCK_BYTES..][..BLOCK_BYTES];
            let whole = read && node_block(bytes, s.volume.store().volume, addr).is_ok();
            s.done += 1;
            for &(node, entry) in block {
                if s.report.stopped {
                    return;
                }
                one_node(s, d, node, entry, whole.then_some(bytes));
            }
        }
    }
}

/// What a look at a node comes to.
enum Seen {
    /// All of it holds; it is an inode.
    Inode,
    /// It holds, and its inode looks further.
    Overflow,
    /// It does not exist any more.
    Gone,
    /// It holds up to this logical block; the look was cut short.
    UpTo(u64),
}

/// What may change while a node is looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum How {
    /// Anything.
    Free,
    /// Nothing: a commit waits.
    Still,
    /// Nothing while a part is read; a commit may come between two of them. It writes the inode's record elsewhere
    /// where it changes anything of the inode.
    Parts,
}

/// Looks at a node until it holds or certainly does not; `block` is its node block as read before.
fn one_node(s: &mut Scrub<'_>, d: DomainId, node: NodeId, entry: NodeEntry, block: Option<&[u8]>) {
    let (mut from, mut looks, mut in_parts, mut is_long) = (0, 0, 0, false);
    let mut first = block.map(|b| (entry, b));
    loop {
        let how = match looks < FREE_LOOKS {
            true => How::Free,
            false if is_long => How::Parts,
            false => How::Still,
        };
        let mut live = Live {
            journal: s.volume.journal(d),
            data: s.options.data,
            from,
            left: if how == How::Still { STILL_BLOCKS } else { u64::MAX },
            nodes_left: if how == How::Still { STILL_NODES } else { usize::MAX },
            cut: None,
            how,
            is: None,
            changed: false,
            read: 0,
            d,
            s,
        };
        let seen = if how == How::Still {
            let (volume, mut seen) = (live.s.volume, Ok(Seen::Gone));
            volume.quiesce(Quiesced::Nodes(d), &mut || seen = look(&mut live, node, None));
            seen
        } else {
            look(&mut live, node, first.take())
        };
        // also what was found between two parts must be of one state
        let seen = seen.or_else(|bad| live.part(|_| Err(bad)));
        from = live.from;
        is_long |= live.nodes_left == 0;
        let (read, changed) = (live.read, live.changed);
        s.spend(read);
        if s.report.stopped {
            return;
        }
        match seen {
            Ok(Seen::Inode) => {
                s.report.inodes += 1;
                return;
            }
            Ok(Seen::Overflow | Seen::Gone) => return,
            Ok(Seen::UpTo(lblk)) => (from, looks) = (lblk, 0),
            Err(_) if how == How::Still && is_long => {}
            Err(_) if changed => {
                in_parts += 1;
                if in_parts == LOOKS_IN_PARTS {
                    return s.restless(d, node, in_parts, from);
                }
            }
            // what lies before it was looked at, and held
            Err(b) if how == How::Free => {
                s.report.looked_again += u64::from(looks == 0);
                (from, looks) = (from.max(b.at.unwrap_or(0)), looks + 1);
            }
            Err(b) => {
                s.report.data_bad += u64::from(b.data);
                s.report.data_checked += u64::from(b.data);
                s.find(b.code, Some(d.0), Some(node), b.why);
                // what comes behind a bad block is looked at as well
                match b.at {
                    Some(lblk) => (from, looks) = (lblk + 1, 0),
                    None => return,
                }
            }
        }
    }
}

/// Looks at a node once.
fn look(live: &mut Live<'_, '_>, node: NodeId, known: Option<(NodeEntry, &[u8])>) -> Checked<Seen> {
    let store = live.s.volume.store();
    let own: AlignedBuf;
    let (entry, block) = match known {
        Some(k) => k,
        None => {
            let there = live.part(|live| {
                let e = live.s.volume.entry(live.d, node).map_err(|e| Bad::new(codes::NODES_LOST, e.to_string()))?;
                let Some(e) = e.filter(NodeEntry::used) else { return Ok(None) };
                live.read += 1;
                let mut block = AlignedBuf::zeroed(BLOCK_BYTES);
                let unreadable = |why| Bad::new(codes::UNREADABLE, format!("node block {}: {why}", { e.addr }));
                store.read(e.addr, &mut block).map_err(unreadable)?;
                node_block(&block, store.volume, e.addr)?;
                Ok(Some((e, block)))
            })?;
            let Some((e, block)) = there else { return Ok(Seen::Gone) };
            live.is = Some((node, e));
            own = block;
            (e, &own[..])
        }
    };
    let r = record::record(block, node, &entry)?;
    if r.kind != NodeKind::Inode {
        return Ok(Seen::Overflow);
    }
    let rules = live.s.rules();
    let mut ino = Ino::new(r.generation, r.version, entry.flags, inode::decode(&r)?);
    inode::check(&rules, live, &r, &mut ino, Some(Buckets::until_bad(node.inode())))?;
    Ok(live.cut.map_or(Seen::Inode, Seen::UpTo))
}

/// Parts of an inode as the committed view has them now.
struct Live<'a, 'b> {
    s: &'a mut Scrub<'b>,
    d: DomainId,
    journal: (u64, u64),
    data: bool,
    /// Buckets and data below this logical block were looked at before.
    from: u64,
    /// Blocks that may still be read.
    left: u64,
    /// The first logical block that was left out for that.
    cut: Option<u64>,
    /// Overflow nodes that may still be read; 0 where they were too few, which ends the look.
    nodes_left: usize,
    how: How,
    /// The node, and its table entry when the look began.
    is: Option<(NodeId, NodeEntry)>,
    /// The entry became another between two parts, which ended the look.
    changed: bool,
    /// Blocks read and not yet accounted for.
    read: u64,
}

impl Live<'_, '_> {
    /// Reads something; of a look in parts with a commit waiting, which must not have come before it.
    ///
    /// # Errors
    /// Of `read`; it came.
    fn part<R>(&mut self, read: impl FnOnce(&mut Self) -> Checked<R>) -> Checked<R> {
        if self.how != How::Parts {
            return read(self);
        }
        let (volume, mut read, mut r) = (self.s.volume, Some(read), None);
        volume.quiesce(Quiesced::Nodes(self.d), &mut || {
            let now = |(node, _): (NodeId, NodeEntry)| volume.entry(self.d, node).ok().flatten();
            self.changed |= self.is.is_some_and(|is| now(is) != Some(is.1));
            if let Some(read) = read.take().filter(|_| !self.changed) {
                r = Some(read(self));
            }
        });
        r.unwrap_or_else(|| Err(Bad::new(0, "it changed")))
    }

    /// Accounts for blocks that were read, where nobody waits: the rate is kept, and the caller asked whether to go on.
    ///
    /// # Errors
    /// The caller wants to stop.
    fn spend(&mut self) -> Checked<()> {
        if self.how != How::Still {
            let read = std::mem::take(&mut self.read);
            self.s.spend(read);
            if self.s.report.stopped {
                return Err(Bad::new(0, "stopped"));
            }
        }
        Ok(())
    }
}

impl Visitor for Live<'_, '_> {
    fn overflow(&mut self, owner: InodeNo, nodes: &[NodeId], kind: NodeKind) -> Checked<Vec<Option<Vec<u8>>>> {
        if nodes.len() > self.nodes_left {
            self.nodes_left = 0;
            return Err(Bad::new(0, "it has too many overflow nodes"));
        }
        self.nodes_left -= nodes.len();
        self.spend()?;
        self.part(|live| {
            let mut entries = Vec::with_capacity(nodes.len());
            for &n in nodes {
                let e = live
                    .s
                    .volume
                    .entry(live.d, n)
                    .map_err(|e| Bad::new(codes::OVERFLOW_MISSING, format!("overflow {n}: {e}")))?;
                entries.push((n, e.filter(NodeEntry::used).ok_or_else(|| record::missing(n, kind))?));
            }
            live.read += entries.len() as u64;
            record::read_overflow(live.s.volume.store(), owner, &entries, kind)
        })
    }

    fn bucket(&mut self, lblk: u64) -> bool {
        if lblk < self.from || self.cut.is_some() {
            return false;
        }
        if self.left == 0 {
            self.cut = Some(lblk);
            return false;
        }
        self.left -= 1;
        true
    }

    fn blocks(&mut self, addrs: &[BlockAddr]) -> Checked<Vec<u8>> {
        self.read += addrs.len() as u64;
        self.s.done += addrs.len() as u64;
        self.spend()?;
        self.part(|live| read_scattered(live.s.volume.store(), addrs))
    }

    fn holds(&self, addr: BlockAddr, len: u64) -> bool {
        let volume = self.s.volume;
        let g = volume.store().geometry();
        if !g.contains(addr, len) {
            return false;
        }
        let group = g.group_of(addr);
        volume.owner(group) == Some(self.d)
            && is_data(g, addr, len, volume.store().group_blocks(group), Some(self.journal))
    }

    fn extent(&mut self, _: InodeNo, e: Extent, data: bool) -> Checked<()> {
        let skip = self.from.saturating_sub(e.lblk).min(u64::from(e.len));
        let len = u64::from(e.len) - skip;
        if !data || len == 0 || self.cut.is_some() {
            return Ok(());
        }
        let Some(sums) = e.sums.as_ref().filter(|_| self.data && !e.unwritten) else {
            self.s.report.data_unchecked += if e.unwritten { 0 } else { len };
            self.s.done += len;
            self.from = e.end();
            return Ok(());
        };
        let now = len.min(self.left);
        if now < len {
            self.cut = Some(e.lblk + skip + now);
        }
        if now == 0 {
            return Ok(());
        }
        let (lblk, addr) = (e.lblk + skip, BlockAddr(e.addr.0 + skip));
        let part = Extent { lblk, addr, len: now as u32, unwritten: false, sums: None };
        let mut first: Option<Bad> = None;
        self.part(|live| {
            compare(live.s.volume.store(), &part, &sums[skip as usize..], &mut |code, at, why| {
                first.get_or_insert(Bad { code, why, at: Some(at), data: true });
            });
            Ok(())
        })?;
        // up to the first bad block everything holds
        let good = first.as_ref().and_then(|b| b.at).map_or(now, |at| at - lblk);
        self.read += now;
        self.left -= now;
        self.from = lblk + good;
        self.s.report.data_checked += good;
        self.s.done += good;
        match first {
            Some(bad) => Err(bad),
            None => self.spend(),
        }
    }

    fn entry(&mut self, _: InodeNo, _: Dentry) {}
}
