//! The block group allocation table in memory (SpanFS section 3.2.1).

use crate::error::Result;
use crate::store::Store;
use crate::types::*;
use braidfs_format::BLOCK_BYTES;
use braidfs_format::bat::{self, BatEntry, ENTRIES_PER_BLOCK};
use braidfs_format::block::{BlockKind, other_copy_lost};
use braidfs_format::group::GroupHeader;
use braidfs_format::super_block::SuperBlock;

/// See the module. On-disk state of each block's pair, and the entries.
#[derive(Debug)]
pub struct Bat {
    entries: Vec<BatEntry>,
    /// (current copy, sequence number) per block.
    pairs: Vec<(usize, u64)>,
    start: u64,
    volume: u32,
    next: usize,
}

impl Bat {
    /// Reads the table from device 0.
    ///
    /// # Errors
    /// Of the device, or where a block has no valid copy.
    pub fn read(store: &Store, sb: &SuperBlock) -> Result<Self> {
        let device = &**store.device(0);
        let groups = sb.groups.get() as usize;
        let per = ENTRIES_PER_BLOCK as usize;
        let mut b = Self {
            entries: Vec::with_capacity(groups),
            pairs: Vec::new(),
            start: sb.bat.get(),
            volume: sb.volume_id(),
            next: 0,
        };
        let mut buf = vec![0u8; 2 * BLOCK_BYTES];
        while b.entries.len() < groups {
            let pair = b.start + 2 * b.pairs.len() as u64;
            device.read(pair, &mut buf)?;
            let n = (groups - b.entries.len()).min(per);
            let (copy, seq, mut e) = bat::decode(&buf, b.volume, pair, n, sb.domains.get())?;
            if let Some(lost) = other_copy_lost(&buf, BlockKind::Bat, b.volume, pair, (copy, seq)) {
                tracing::warn!("{lost}; claims are taken from the group headers");
                let first = b.entries.len() as u32;
                for (group, entry) in (first..).zip(&mut e) {
                    claim_in_header(store, sb, group, entry)?;
                }
            }
            b.entries.extend(e);
            b.pairs.push((copy, seq));
        }
        Ok(b)
    }
    /// Groups of `domain`.
    pub fn groups_of(&self, domain: DomainId) -> Vec<u32> {
        self.entries.iter().enumerate().filter(|(_, e)| e.domain == Some(domain)).map(|(i, _)| i as u32).collect()
    }
    /// Owner of each group.
    pub fn owners(&self) -> impl Iterator<Item = Option<DomainId>> + '_ {
        self.entries.iter().map(|e| e.domain)
    }
    /// Owner and epoch of `group`.
    pub fn entry(&self, group: u32) -> BatEntry {
        self.entries.get(group as usize).copied().unwrap_or_default()
    }
    /// Groups without an owner.
    pub fn free_groups(&self) -> u32 {
        self.entries.iter().filter(|e| e.domain.is_none()).count() as u32
    }
    /// A free group, the next one round.
    pub fn find_free(&mut self) -> Option<usize> {
        let n = self.entries.len();
        let i = (0..n).map(|k| (self.next + k) % n).find(|&i| self.entries[i].domain.is_none())?;
        self.next = i;
        Some(i)
    }
    /// Changes one entry, durably.
    ///
    /// # Errors
    /// Of the device: the entry is as before.
    pub fn set(&mut self, device: &dyn braidfs_device::Device, group: usize, e: BatEntry) -> Result<()> {
        let per = ENTRIES_PER_BLOCK as usize;
        let block = group / per;
        let old = std::mem::replace(&mut self.entries[group], e);
        let (copy, seq) = self.pairs[block];
        let pair = self.start + 2 * block as u64;
        let to = (block + 1) * per;
        let b =
            bat::encode(&self.entries[block * per..to.min(self.entries.len())], self.volume, pair, 1 - copy, seq + 1);
        let r = device.write(pair + (1 - copy) as u64, &b).and_then(|()| device.flush());
        if let Err(e) = r {
            self.entries[group] = old;
            return Err(e.into());
        }
        self.pairs[block] = (1 - copy, seq + 1);
        Ok(())
    }
    /// `group` is nobody's any more, durably.
    ///
    /// # Errors
    /// As [`Self::set`].
    pub fn set_free(&mut self, device: &dyn braidfs_device::Device, group: u32) -> Result<()> {
        let epoch = self.entry(group).epoch.wrapping_add(1);
        self.set(device, group as usize, BatEntry { domain: None, epoch })
    }
}

/// Takes over a claim that the header of a group tells and the table does not know: metadata of a group is whole before
/// the table is written.
fn claim_in_header(store: &Store, sb: &SuperBlock, group: u32, entry: &mut BatEntry) -> Result<()> {
    let pair = store.geometry.header_addr(group);
    let mut buf = vec![0u8; 2 * BLOCK_BYTES];
    store.read(pair, &mut buf)?;
    if let Ok((_, _, h)) = GroupHeader::from_pair(&buf, store.volume, pair)
        && h.group.get() == group
        && h.epoch.get() > entry.epoch
        && h.domain < sb.domains
    {
        *entry = BatEntry { domain: Some(DomainId(h.domain.get())), epoch: h.epoch.get() };
    }
    Ok(())
}
