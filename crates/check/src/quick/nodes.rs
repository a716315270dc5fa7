//! Reads the records of all inodes in the order of the device, checks each, and sums up what it names.

use super::multiset::{Keys, MultisetHash};
use super::state::{Ctx, Doubt, Lists, Outcome, Slot, doubt};
use crate::codes;
use crate::data::compare;
use crate::parts::ino::Ino;
use crate::read::{read_scattered, runs};
use crate::report::{Bad, Checked, Finding};
use crate::rules::dir::Buckets;
use crate::rules::{Visitor, inode, link, record};
use crate::threads::each;
use braidfs_device::{AlignedBuf, BLOCK_BYTES};
use braidfs_format::dentry::Dentry;
use braidfs_format::inode::{Extent, Inode};
use braidfs_format::node::{NodeKind, NodeRecord, OVERFLOW};
use braidfs_format::{BlockAddr, InodeNo, NodeId};
use braidfs_sync::plain::Mutex;
use std::sync::atomic::Ordering::Relaxed;

/// Slots that one thread checks at a time, at least.
const CHUNK: usize = 2048;
/// Most blocks read at once.
const RUN_BLOCKS: u64 = 256;

/// What the inodes come to.
#[derive(Default)]
pub struct Sum {
    pub outcome: Outcome,
    /// Blocks as the inodes and the node table name them.
    pub blocks: MultisetHash,
    /// Names as the inodes have them.
    pub links: MultisetHash,
    /// Names as the directories have them.
    pub entries: MultisetHash,
    /// Directories and their parents.
    pub dirs: Vec<(u64, u64)>,
    pub root: bool,
}

impl Sum {
    fn join(&mut self, mut o: Sum) {
        self.outcome.report.join(o.outcome.report);
        self.outcome.data_checked += o.outcome.data_checked;
        self.outcome.data_unchecked += o.outcome.data_unchecked;
        self.blocks.join(o.blocks);
        self.links.join(o.links);
        self.entries.join(o.entries);
        self.dirs.append(&mut o.dirs);
        self.root |= o.root;
    }
}

/// Checks the nodes in `slots` (all of some node blocks) and adds to `sum`.
pub fn check(cx: &Ctx<'_>, sum: &mut Sum, lists: Lists, progress: &dyn Fn(u64)) -> Result<(), Doubt> {
    let sort = |_: &mut (), i: usize| {
        let list: &Mutex<Vec<Slot>> = &lists[i];
        list.lock().sort_unstable_by_key(Slot::key);
        Ok::<(), Doubt>(())
    };
    each(cx.threads, lists.len(), |_| {}, || (), sort)?;
    let by_domain: Vec<Vec<Slot>> = lists.into_iter().map(Mutex::into_inner).collect();
    // Whole node blocks: domain and range.
    let mut chunks = Vec::new();
    for (domain, slots) in by_domain.iter().enumerate() {
        let mut start = 0;
        while start < slots.len() {
            let mut end = (start + CHUNK).min(slots.len());
            while end < slots.len() && slots[end].addr() == slots[end - 1].addr() {
                end += 1;
            }
            chunks.push((domain, start..end));
            start = end;
        }
    }
    let workers = each(
        cx.threads,
        chunks.len(),
        |done| progress(done * CHUNK as u64),
        || Worker::new(cx),
        |w, i| {
            let (domain, range) = chunks[i].clone();
            w.side.domain = domain as u16;
            w.chunk(&by_domain[domain][range])
        },
    )?;
    workers.into_iter().for_each(|w| sum.join(w.side.sum));
    Ok(())
}

/// A thread's state.
struct Worker<'a> {
    buf: AlignedBuf,
    side: Side<'a>,
}

impl<'a> Worker<'a> {
    fn new(cx: &'a Ctx<'a>) -> Self {
        let blocks = if cx.threads == 1 { 16 } else { RUN_BLOCKS };
        let side = Side { cx, domain: 0, sum: Sum::default(), subdirs: 0, content: 0 };
        Self { buf: AlignedBuf::zeroed(blocks as usize * BLOCK_BYTES), side }
    }

    /// Checks the nodes of some node blocks.
    fn chunk(&mut self, slots: &[Slot]) -> Result<(), Doubt> {
        let most = (self.buf.len() / BLOCK_BYTES) as u64;
        for (first, blocks, some) in runs(slots, Slot::addr, most) {
            if self.side.cx.bitmap(self.side.domain, BlockAddr(first), blocks).is_none() {
                self.apart(some)?;
                continue;
            }
            let bytes = blocks as usize * BLOCK_BYTES;
            if let Err(e) = self.side.cx.store.read(BlockAddr(first), &mut self.buf[..bytes]) {
                return doubt(format!("node blocks at {first}: {e}"));
            }
            for block in some.chunk_by(|a, b| a.addr() == b.addr()) {
                let at = (block[0].addr() - first) as usize * BLOCK_BYTES;
                self.side.block(&self.buf[at..][..BLOCK_BYTES], block)?;
            }
        }
        Ok(())
    }

    /// Block by block: the run goes over the end of a group.
    fn apart(&mut self, some: &[Slot]) -> Result<(), Doubt> {
        for block in some.chunk_by(|a, b| a.addr() == b.addr()) {
            let addr = BlockAddr(block[0].addr());
            if let Err(e) = self.side.cx.store.read(addr, &mut self.buf[..BLOCK_BYTES]) {
                return doubt(format!("node block {addr}: {e}"));
            }
            self.side.block(&self.buf[..BLOCK_BYTES], block)?;
        }
        Ok(())
    }
}

/// The part of a thread's state that takes what the inodes name.
struct Side<'a> {
    cx: &'a Ctx<'a>,
    domain: u16,
    sum: Sum,
    /// Subdirectories of the directory at hand.
    subdirs: usize,
    /// Blocks of the inode's content.
    content: u64,
}

impl Side<'_> {
    fn keys(&self) -> &Keys {
        &self.cx.keys
    }

    /// Checks a node block and the nodes that lie in it.
    fn block(&mut self, block: &[u8], slots: &[Slot]) -> Result<(), Doubt> {
        let addr = BlockAddr(slots[0].addr());
        self.claim(addr, 1)?;
        let live = slots.len().min(255) as u64;
        let hash = self.keys().block(addr, InodeNo(0), live);
        self.sum.blocks.add(hash);
        record::node_block(block, self.cx.store.volume, addr)?;
        for s in slots {
            let r = record::record(block, s.node(), &s.entry())?;
            if s.flags() & OVERFLOW != 0 {
                if r.kind == NodeKind::Inode {
                    return doubt(format!("{} is an inode and flagged as overflow", r.node));
                }
                continue;
            }
            self.inode(&r, s.flags())?;
        }
        Ok(())
    }

    fn inode(&mut self, r: &NodeRecord, flags: u8) -> Result<(), Doubt> {
        let node = r.node.inode();
        (self.subdirs, self.content) = (0, 0);
        let rules = self.cx.rules;
        let found = |b: Bad| Doubt(format!("{node}: E{}: {}", b.code, b.why));
        let mut ino = Ino::new(r.generation, r.version, flags, inode::decode(r).map_err(found)?);
        inode::check(&rules, self, r, &mut ino, Some(Buckets::until_bad(node))).map_err(found)?;
        let (dir, i) = (ino.is_dir(), &ino.inode);
        let links = link::count(dir, i.links.len(), self.subdirs);
        if i.nlink != links {
            return doubt(format!("{node} counts {} links, has {links}", i.nlink));
        }
        match (node == InodeNo::ROOT, i.links.len()) {
            (true, 0) if dir => self.sum.root = true,
            (true, _) => return doubt("the root is no directory, or has a link"),
            (false, 0) => return doubt(format!("{node} hangs nowhere")),
            (false, n) if dir && n > 1 => return doubt(format!("directory {node} has {n} links")),
            _ => {}
        }
        if !link::distinct(&i.links) {
            return doubt(format!("{node} has a link twice"));
        }
        let parents = i.links.iter().map(|l| self.cx.domain_of(l.parent));
        if link::flags(flags, Some(self.domain), parents) != flags {
            return doubt(format!("flag REMOTE of {node}"));
        }
        self.count(node, r.generation, dir, i);
        Ok(())
    }

    fn count(&mut self, node: InodeNo, generation: u32, dir: bool, i: &Inode) {
        for l in &i.links {
            let hash = self.keys().name(l.parent, &l.name, node, generation, (i.mode >> 12) as u8);
            self.sum.links.add(hash);
        }
        if dir {
            self.sum.dirs.push((node.0, i.links.first().map_or(0, |l| l.parent.0)));
        }
        self.sum.outcome.report.count(i.mode);
        self.sum.outcome.report.usage.add(i, self.content);
    }

    /// Ticks blocks off.
    fn claim(&mut self, addr: BlockAddr, len: u64) -> Checked<()> {
        let Some(bitmap) = self.cx.bitmap(self.domain, addr, len) else {
            return Err(Bad::new(codes::ENTRY_PLACE, format!("{addr} is no data block of domain {}", self.domain)));
        };
        let start = addr.0 - self.cx.store.geometry().group_start(bitmap.number).0;
        let mut at = start;
        while at < start + len {
            let n = (64 - at % 64).min(start + len - at);
            let mask = (u64::MAX >> (64 - n)) << (at % 64);
            if bitmap.left[(at / 64) as usize].fetch_and(!mask, Relaxed) & mask != mask {
                let why = format!("a block of {len} from {addr} is used twice, or not marked valid");
                return Err(Bad::new(codes::BLOCK_SHARED, why));
            }
            at += n;
        }
        self.sum.outcome.report.blocks_used += len;
        self.cx.done.fetch_add(len, Relaxed);
        Ok(())
    }

    /// Compares the data of an extent with its checksums.
    fn data(&mut self, ino: InodeNo, e: &Extent) {
        let Some(sums) = &e.sums else {
            self.sum.outcome.data_unchecked += u64::from(e.len);
            return;
        };
        let domain = self.domain;
        self.sum.outcome.data_checked += u64::from(e.len);
        let findings = &mut self.sum.outcome.report.findings;
        compare(self.cx.store, e, sums, &mut |code, _, message| {
            let node = Some(ino.0);
            findings.push(Finding { code, domain: Some(domain), node, path: None, message, fixed: false });
        });
    }
}

impl Visitor for Side<'_> {
    fn overflow(&mut self, owner: InodeNo, nodes: &[NodeId], kind: NodeKind) -> Checked<Vec<Option<Vec<u8>>>> {
        let mut entries = Vec::with_capacity(nodes.len());
        for n in nodes {
            let at = self.cx.overflow_nodes.binary_search_by_key(&n.0, |o| o.node);
            let over =
                at.ok().map(|i| &self.cx.overflow_nodes[i]).filter(|_| self.cx.domain_of(*n) == Some(self.domain));
            let over = over.ok_or_else(|| record::missing(*n, kind))?;
            if over.taken.swap(true, Relaxed) {
                return Err(Bad::new(codes::OVERFLOW_SHARED, format!("overflow {n} is used twice")));
            }
            entries.push((*n, over.entry));
        }
        record::read_overflow(self.cx.store, owner, &entries, kind)
    }

    fn blocks(&mut self, addrs: &[BlockAddr]) -> Checked<Vec<u8>> {
        read_scattered(self.cx.store, addrs)
    }

    fn holds(&self, addr: BlockAddr, len: u64) -> bool {
        self.cx.bitmap(self.domain, addr, len).is_some()
    }

    fn extent(&mut self, ino: InodeNo, e: Extent, data: bool) -> Checked<()> {
        self.claim(e.addr, u64::from(e.len))?;
        self.content += u64::from(e.len);
        for i in 0..u64::from(e.len) {
            let hash = self.keys().block(BlockAddr(e.addr.0 + i), ino, e.lblk + i);
            self.sum.blocks.add(hash);
        }
        if data && self.cx.data && !e.unwritten {
            self.data(ino, &e);
        }
        Ok(())
    }

    fn entry(&mut self, dir: InodeNo, e: Dentry) {
        let hash = self.keys().name(dir, &e.name, e.node, e.generation, e.kind);
        self.sum.entries.add(hash);
        self.subdirs += usize::from(e.kind == (0o040_000 >> 12) as u8);
    }
}
