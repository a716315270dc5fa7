//! The tables of the groups: what they say is checked, summed up and, but for the bitmap, forgotten.

use super::multiset::MultisetHash;
use super::state::{Ctx, Doubt, GroupBitmap, Lists, OverflowNode, Slot, TableTotals, add, doubt, nothing_found};
use crate::parts::domain::Group;
use crate::report::Log;
use crate::rules;
use crate::rules::group::{has_owners, parse_group};
use crate::rules::space::{fixed, kind_fits};
use crate::threads::each;
use braidfs_device::{AlignedBuf, BLOCK_BYTES};
use braidfs_format::BlockAddr;
use braidfs_format::geometry::{NODES_PER_BLOCK, SEGMENT_BLOCKS};
use braidfs_format::group::OWNERS_PER_BLOCK;
use braidfs_format::node::{NodeTableBlock, OVERFLOW};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};

/// Reads and checks the tables of groups, one group after the other.
pub struct Reader<'a> {
    cx: &'a Ctx<'a>,
    image: AlignedBuf,
    slots: Vec<Slot>,
}

impl<'a> Reader<'a> {
    pub fn new(cx: &'a Ctx<'a>) -> Self {
        let bytes = if cx.claimed.is_empty() { 0 } else { cx.store.geometry().meta_blocks() as usize * BLOCK_BYTES };
        Self { cx, image: AlignedBuf::zeroed(bytes), slots: Vec::new() }
    }

    /// Checks the tables of group `number`; its domain and slots in use. `nodes_in` counts them by the group that their
    /// records lie in.
    pub fn group(
        &mut self,
        totals: &mut TableTotals,
        number: u32,
        nodes_in: &[AtomicU32],
    ) -> Result<(u16, &[Slot]), Doubt> {
        let (store, g) = (self.cx.store, self.cx.store.geometry());
        let entry = self.cx.m.bat.get(number as usize).copied().unwrap_or_default();
        let Some(domain) = entry.domain.map(|d| d.0) else { return doubt("a group lost its owner") };
        if self.cx.m.tables_old {
            return doubt("a segment table is not the newest");
        }
        let blocks = g.meta_blocks().min(store.group_blocks(number)) as usize;
        let image = &mut self.image[..blocks * BLOCK_BYTES];
        if let Err(e) = store.read(g.group_start(number), image) {
            return doubt(format!("tables of group {number}: {e}"));
        }
        let mut log = Log::of(domain);
        let group = parse_group(store, &mut log, domain, (number, entry.epoch), u64::MAX, image);
        nothing_found(&log)?;
        let left = valid(self.cx, &group, domain)?;
        totals.owners.join(owners(self.cx, &group, image, &left)?);
        totals.valid += left.iter().map(|w| u64::from(w.count_ones())).sum::<u64>();

        self.slots.clear();
        for (slot, e) in group.entries.used() {
            let node = g.node(number, slot);
            if node.0 == 0 {
                return doubt("node 0 is in use");
            }
            let Some(n) = nodes_in.get(g.group_of(e.addr) as usize).filter(|_| g.contains(e.addr, 1)) else {
                return doubt(format!("{node} lies outside the volume"));
            };
            n.fetch_add(1, Relaxed);
            if e.flags & OVERFLOW != 0 {
                totals.overflow_nodes.push(OverflowNode { node: node.0, entry: *e, taken: AtomicBool::new(false) });
            }
            self.slots.push(Slot::new(node, e));
        }
        let left = left.into_iter().map(AtomicU64::new).collect();
        let bitmap = GroupBitmap { number, domain, blocks: group.blocks, left };
        if self.cx.bitmaps[number as usize].set(bitmap).is_err() {
            return doubt("a group was read twice");
        }
        Ok((domain, &self.slots))
    }
}

/// The valid blocks of a group without those that belong to nobody: metadata, journal, what lies past the end.
fn valid(cx: &Ctx<'_>, group: &Group, domain: u16) -> Result<Vec<u64>, Doubt> {
    let g = cx.store.geometry();
    let Some(segments) = &group.segments else { return doubt("a segment table is lost") };
    let mut words: Vec<u64> = segments.iter().flat_map(|s| s.valid).collect();
    let journal = cx.journals.get(usize::from(domain)).copied();
    let mut nobodys = vec![0u64; words.len()];
    for at in fixed(g, group.number, group.blocks, journal).into_iter().flatten() {
        nobodys[(at / 64) as usize] |= 1 << (at % 64);
    }
    for (word, nobodys) in words.iter_mut().zip(nobodys) {
        if *word & nobodys != nobodys {
            return doubt(format!("metadata of group {} is not marked valid", group.number));
        }
        *word &= !nobodys;
    }
    for (i, s) in (0u32..).zip(segments) {
        let used = words[(i * SEGMENT_BLOCKS / 64) as usize..][..8].iter().any(|w| *w != 0);
        if !kind_fits(i, group.blocks, used, s.kind) {
            return doubt(format!("segment {i} of group {} is of kind {:?}", group.number, s.kind));
        }
    }
    Ok(words)
}

/// Checks the owner tables in `image`; the sum of what they say of the valid blocks.
fn owners(cx: &Ctx<'_>, group: &Group, image: &[u8], valid: &[u64]) -> Result<MultisetHash, Doubt> {
    let g = cx.store.geometry();
    let start = g.group_start(group.number);
    let mut sum = MultisetHash::default();
    for half in (0..2 * g.segments).filter(|h| has_owners(group, *h)) {
        let addr = g.owners_addr(group.number, half / 2, half % 2);
        let at = (addr.0 - start.0) as usize * BLOCK_BYTES;
        let Some(pair) = image.get(at..).and_then(|b| b.get(..2 * BLOCK_BYTES)) else {
            return doubt("a group ends in its tables");
        };
        let mut log = Log::default();
        let table = rules::group::owners(cx.store, &mut log, &mut Vec::new(), group, half, pair);
        nothing_found(&log)?;
        let Some(owners) = table.owners else { return doubt("an owner table is lost") };
        let first = half * OWNERS_PER_BLOCK;
        for (at, o) in (first..).zip(&owners) {
            if valid[(at / 64) as usize] >> (at % 64) & 1 == 1 {
                let what = if o.node.0 == 0 { u64::from(o.live) } else { o.lblk };
                sum.add(cx.keys.block(BlockAddr(start.0 + u64::from(at)), o.node, what));
            }
        }
    }
    Ok(sum)
}

/// Adds the slots in use whose records lie in the groups of `window` to `lists`, from the node tables once more.
pub fn slots_of(cx: &Ctx<'_>, window: &Range<u32>, lists: &Lists) -> Result<(), Doubt> {
    let g = cx.store.geometry();
    let bytes = 2 * g.node_blocks() as usize * BLOCK_BYTES;
    each(
        cx.threads,
        cx.claimed.len(),
        |_| {},
        || (Vec::new(), AlignedBuf::zeroed(bytes)),
        |(slots, buf), i| {
            let number = cx.claimed[i];
            let first = g.node_table_addr(number, 0);
            if let Err(e) = cx.store.read(first, buf) {
                return doubt(format!("node table of group {number}: {e}"));
            }
            slots.clear();
            for (index, pair) in (0u32..).zip(buf.chunks(2 * BLOCK_BYTES)) {
                let (_, _, entries) = NodeTableBlock::decode(pair, cx.store.volume, g.node_table_addr(number, index))
                    .map_err(|e| Doubt(e.to_string()))?;
                for (slot, e) in (index * NODES_PER_BLOCK..).zip(&entries).filter(|(_, e)| e.used()) {
                    if window.contains(&g.group_of(e.addr)) {
                        slots.push(Slot::new(g.node(number, slot), e));
                    }
                }
            }
            add(lists, cx.domain_of(g.node(number, 1)).unwrap_or(u16::MAX), slots)
        },
    )?;
    Ok(())
}
