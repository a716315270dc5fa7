//! The block group allocation table in memory (SpanFS section 3.2.1).

use crate::error::Result;
use crate::store::Store;
use crate::types::*;
use braidfs_format::BLOCK_BYTES;
use braidfs_format::bat::{self, BatEntry, ENTRIES_PER_BLOCK};
use braidfs_format::block::{BlockKind, other_copy_lost};
use braidfs_format::domain::DomainHeader;
use braidfs_format::group::GroupHeader;
use braidfs_format::super_block::SuperBlock;
use std::collections::BTreeSet;
use std::ops::Range;
use std::time::Instant;

/// `seq` of a pair that is written for the first time.
const FIRST_SEQ: u64 = 1;

/// See the module. On-disk state of each block's pair, and the entries.
#[derive(Debug)]
pub struct Bat {
    /// Of all groups that the pairs have room for: behind those of the volume what is left of a larger one.
    entries: Vec<BatEntry>,
    /// Groups of the volume.
    groups: usize,
    domains: u16,
    /// As many domains as the volume's tables have room for: no group can be another's.
    most: u16,
    /// Groups from this one on are not claimed: the volume is being made smaller.
    end: Option<usize>,
    /// Nor are those from this one on, since a superblock may say that the volume ends there.
    doubtful: Option<usize>,
    /// Nor are these: they are of a device that is drained.
    drained: Range<u32>,
    /// Nor, for the time being, are these: their devices are fuller than others.
    avoided: Vec<Range<u32>>,
    /// (current copy, sequence number) per block.
    pairs: Vec<(usize, u64)>,
    start: u64,
    volume: u32,
    next: usize,
    /// The device may say that these groups were claimed: a write that said so failed. Nobody claims them until the block of
    /// the table is written again.
    unsure: BTreeSet<usize>,
    /// What was written to these, or to their devices, failed: nobody claims them until then.
    resting: Vec<(Range<u32>, Instant)>,
    /// All groups of devices, to which something that was written failed a moment ago: no domain is asked for one of them until then.
    suspected: Vec<(Range<u32>, Instant)>,
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
            entries: Vec::with_capacity(groups.next_multiple_of(per)),
            groups,
            domains: sb.domains.get(),
            most: sb.max_domains.get(),
            end: None,
            doubtful: None,
            drained: 0..0,
            avoided: Vec::new(),
            pairs: Vec::new(),
            start: sb.bat.get(),
            volume: sb.volume_id(),
            next: 0,
            unsure: BTreeSet::new(),
            resting: Vec::new(),
            suspected: Vec::new(),
        };
        let mut buf = vec![0u8; 2 * BLOCK_BYTES];
        while b.entries.len() < groups {
            let pair = b.start + 2 * b.pairs.len() as u64;
            device.read(pair, &mut buf)?;
            let n = (groups - b.entries.len()).min(per);
            let (copy, seq, mut e) = bat::decode(&buf, b.volume, pair, per, b.most)?;
            if let Some(lost) = other_copy_lost(&buf, BlockKind::Bat, b.volume, pair, (copy, seq)) {
                tracing::warn!("{lost}; claims are taken from the group headers");
                let first = b.entries.len() as u32;
                for (group, entry) in (first..).zip(&mut e[..n]) {
                    claim_in_header(store, sb, group, entry)?;
                }
            }
            b.entries.extend(e);
            b.pairs.push((copy, seq));
        }
        let named = b.owners().flatten().map(|d| d.0 + 1).max();
        b.domains = named.map_or(b.domains, |n| n.max(b.domains));
        Ok(b)
    }
    /// How many domains the volume had when this was read: those that the superblock tells of, and those that groups are of.
    pub fn domains(&self) -> u16 {
        self.domains
    }
    /// Of the groups that the volume has.
    fn all(&self) -> &[BatEntry] {
        &self.entries[..self.groups]
    }
    /// Has no group claimed from `end` on, or all again.
    pub(super) fn claim_below(&mut self, end: Option<usize>) {
        self.end = end;
    }
    /// Whether the volume is being made smaller.
    pub(super) fn is_shrinking(&self) -> bool {
        self.end.is_some()
    }
    /// It is not known whether the volume ends at `end` on the device: nothing is claimed behind that until it is.
    pub(super) fn doubt(&mut self, end: usize) {
        self.doubtful = Some(self.doubtful.map_or(end, |e| e.min(end)));
    }
    /// Whether it is not known where the volume ends on the device.
    pub(super) fn is_doubtful(&self) -> bool {
        self.doubtful.is_some()
    }
    /// The first group that must not be claimed.
    pub(super) fn claim_end(&self) -> usize {
        let all = usize::MAX;
        self.end.unwrap_or(all).min(self.doubtful.unwrap_or(all)).min(self.groups)
    }
    /// Has none of these groups claimed: their device is drained.
    pub(super) fn drain(&mut self, groups: Range<u32>) {
        self.drained = groups;
    }
    /// Groups of a device that is drained.
    pub(super) fn drained(&self) -> Range<u32> {
        self.drained.clone()
    }
    /// Has none of these groups claimed until it is told of others.
    pub(super) fn avoid(&mut self, groups: Vec<Range<u32>>) {
        self.avoided = groups;
    }
    /// Whether `group` must not be claimed although it may be nobody's.
    fn is_kept(&self, group: usize) -> bool {
        self.is_lost(group) || self.drained.contains(&(group as u32)) || is_among(group, &self.avoided)
    }
    /// Whether something failed for which `group` is not claimed.
    fn is_lost(&self, group: usize) -> bool {
        self.unsure.contains(&group) || self.resting.iter().any(|(groups, _)| groups.contains(&(group as u32)))
    }
    /// Has none of these groups claimed before `end`: what was written to them has failed.
    pub(super) fn leave_alone(&mut self, groups: Range<u32>, end: Instant) {
        self.resting.retain(|(r, _)| *r != groups);
        self.resting.push((groups, end));
    }
    /// Has no domain asked for one of these groups before `end`, all those of a device: what was written to it has failed, and whoever
    /// gives a group back writes there.
    pub(super) fn suspect(&mut self, groups: Range<u32>, end: Instant) {
        self.suspected.retain(|(r, _)| *r != groups);
        self.suspected.push((groups, end));
    }
    /// Has those claimed, and asked for, again whose time has come by `now`; whether there are any.
    pub(super) fn try_again(&mut self, now: Instant) -> bool {
        let before = self.resting.len() + self.suspected.len();
        self.resting.retain(|(_, end)| *end > now);
        self.suspected.retain(|(_, end)| *end > now);
        self.resting.len() + self.suspected.len() < before
    }
    /// When the first of those is to be tried again ([`Self::try_again`]).
    pub(super) fn tried_again_at(&self) -> Option<Instant> {
        self.resting.iter().chain(&self.suspected).map(|(_, end)| *end).min()
    }
    /// Whether all of these groups are left alone, or nobody is asked for them.
    pub(super) fn rests(&self, groups: &Range<u32>) -> bool {
        let all = |(r, _): &(Range<u32>, Instant)| r.start <= groups.start && groups.end <= r.end;
        self.resting.iter().any(all) || self.suspected.iter().any(all)
    }
    /// Owners of the groups that can be claimed where they are nobody's, by who may not have these; of one that the device may say
    /// is claimed, or that is kept free, none that there is.
    pub(super) fn claimable_but<'a>(
        &'a self,
        forbidden: &'a [Range<u32>],
    ) -> impl Iterator<Item = Option<DomainId>> + 'a {
        let kept = move |g| (self.is_kept(g) || is_among(g, forbidden)).then_some(DomainId(u16::MAX));
        self.owners().enumerate().map(move |(g, owner)| owner.or_else(|| kept(g))).take(self.claim_end())
    }
    /// Groups that are nobody's and are claimed by nobody only since they are to be avoided for a moment, but these.
    pub(super) fn avoided_but<'a>(&'a self, forbidden: &'a [Range<u32>]) -> impl Iterator<Item = u32> + 'a {
        let end = self.claim_end() as u32;
        let free = |g: &u32| self.entries[*g as usize].domain.is_none();
        let only = move |g: &u32| !self.is_lost(*g as usize) && !self.drained.contains(g);
        let may = move |g: &u32| *g < end && !is_among(*g as usize, forbidden);
        self.avoided.iter().cloned().flatten().filter(may).filter(free).filter(only)
    }
    /// Groups that the pairs on the device have room for.
    pub(super) fn room(&self) -> usize {
        self.entries.len()
    }
    /// The volume has so many groups from now on, for which there is room, and that is what the device says.
    pub(super) fn resize(&mut self, groups: usize) {
        self.doubtful = None;
        self.groups = groups.min(self.entries.len());
        // behind the end another device may come
        self.resting.retain(|(r, _)| r.end as usize <= groups);
        self.suspected.retain(|(r, _)| r.end as usize <= groups);
    }
    /// One more pair. Where the device has it already it stays, so that the epochs of its groups go on; a group in it that
    /// the volume has not can be nobody's. Does not flush.
    ///
    /// # Errors
    /// Of the device: there is no pair more.
    pub(super) fn add_pair(&mut self, device: &dyn braidfs_device::Device) -> Result<()> {
        let per = ENTRIES_PER_BLOCK as usize;
        let pair = self.start + 2 * self.pairs.len() as u64;
        let mut buf = vec![0u8; 2 * BLOCK_BYTES];
        device.read(pair, &mut buf)?;
        let (copy, seq, entries) = match bat::decode(&buf, self.volume, pair, per, self.most) {
            // also where it says what it should: perhaps an attempt before this one wrote it, and could not flush it
            Ok((copy, seq, mut entries)) => {
                for e in entries.iter_mut().filter(|e| e.domain.is_some()) {
                    *e = BatEntry { domain: None, epoch: e.epoch.wrapping_add(1) };
                }
                let block = bat::encode(&entries, self.volume, pair, 1 - copy, seq + 1);
                device.write(pair + 1 - copy as u64, &block)?;
                (1 - copy, seq + 1, entries)
            }
            Err(_) => {
                let entries = vec![BatEntry::default(); per];
                buf.fill(0);
                buf[..BLOCK_BYTES].copy_from_slice(&bat::encode(&entries, self.volume, pair, 0, FIRST_SEQ));
                device.write(pair, &buf)?;
                (0, FIRST_SEQ, entries)
            }
        };
        self.entries.extend(entries);
        self.pairs.push((copy, seq));
        Ok(())
    }
    /// Forgets the pairs behind the first `room` groups.
    pub(super) fn forget_pairs(&mut self, room: usize) {
        self.entries.truncate(room);
        self.pairs.truncate(room / ENTRIES_PER_BLOCK as usize);
    }
    /// What the pairs say of groups that the volume has not is nothing that a larger one may believe: durably, they are
    /// nobody's.
    ///
    /// # Errors
    /// As [`Self::set`].
    pub(super) fn free_behind_end(&mut self, device: &dyn braidfs_device::Device) -> Result<()> {
        for group in self.groups..self.entries.len() {
            let BatEntry { domain, epoch } = self.entries[group];
            if domain.is_some() {
                self.set(device, group, BatEntry { domain: None, epoch: epoch.wrapping_add(1) })?;
            }
        }
        Ok(())
    }
    /// Groups of `domain`.
    pub fn groups_of(&self, domain: DomainId) -> Vec<u32> {
        self.all().iter().enumerate().filter(|(_, e)| e.domain == Some(domain)).map(|(i, _)| i as u32).collect()
    }
    /// Owner of each group.
    pub fn owners(&self) -> impl Iterator<Item = Option<DomainId>> + '_ {
        self.all().iter().map(|e| e.domain)
    }
    /// Owner and epoch of `group`.
    pub fn entry(&self, group: u32) -> BatEntry {
        self.all().get(group as usize).copied().unwrap_or_default()
    }
    /// Groups without an owner that can be claimed and are not among these.
    pub(super) fn free_groups_but(&self, forbidden: &[Range<u32>]) -> u32 {
        self.claimable_but(forbidden).filter(Option::is_none).count() as u32
    }
    /// A free group that is not among these, the next one round.
    pub fn find_free(&mut self, forbidden: &[Range<u32>]) -> Option<usize> {
        let n = self.claim_end();
        let free = |i: &usize| self.entries[*i].domain.is_none() && !self.is_kept(*i) && !is_among(*i, forbidden);
        let i = (0..n).map(|k| (self.next + k) % n.max(1)).find(free)?;
        self.next = i;
        Some(i)
    }
    /// Changes one entry, durably.
    ///
    /// # Errors
    /// Of the device: the entry is as before in memory. On the device it may be the new one, so that another domain must not
    /// claim the group: its header would tell of one owner, the table of another.
    pub fn set(&mut self, device: &dyn braidfs_device::Device, group: usize, e: BatEntry) -> Result<()> {
        let per = ENTRIES_PER_BLOCK as usize;
        let block = group / per;
        let old = std::mem::replace(&mut self.entries[group], e);
        let (copy, seq) = self.pairs[block];
        let pair = self.start + 2 * block as u64;
        let b = bat::encode(&self.entries[block * per..][..per], self.volume, pair, 1 - copy, seq + 1);
        let r = device.write(pair + (1 - copy) as u64, &b).and_then(|()| device.flush());
        if let Err(e) = r {
            self.entries[group] = old;
            if old.domain.is_none() {
                self.unsure.insert(group);
            }
            return Err(e.into());
        }
        self.unsure.retain(|g| g / per != block);
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

fn is_among(group: usize, ranges: &[Range<u32>]) -> bool {
    ranges.iter().any(|groups| groups.contains(&(group as u32)))
}

/// Takes over a claim that the header of a group tells and the table does not know: metadata of a group is whole before
/// the table is written.
fn claim_in_header(store: &Store, sb: &SuperBlock, group: u32, entry: &mut BatEntry) -> Result<()> {
    let pair = store.geometry().header_addr(group);
    let mut buf = vec![0u8; 2 * BLOCK_BYTES];
    store.read(pair, &mut buf)?;
    if let Ok((_, _, h)) = GroupHeader::from_pair(&buf, store.volume, pair)
        && h.group.get() == group
        && h.epoch.get() > entry.epoch
        && (h.domain < sb.domains || has_header(store, sb, h.domain.get())?)
    {
        *entry = BatEntry { domain: Some(DomainId(h.domain.get())), epoch: h.epoch.get() };
    }
    Ok(())
}

/// Whether a domain that the superblock does not tell of was being added: its header is durable before its first group's.
fn has_header(store: &Store, sb: &SuperBlock, domain: u16) -> Result<bool> {
    if domain >= sb.max_domains.get() {
        return Ok(false);
    }
    let pair = sb.domain_table.get() + 2 * u64::from(domain);
    let mut buf = vec![0u8; 2 * BLOCK_BYTES];
    store.device(0).read(pair, &mut buf)?;
    Ok(DomainHeader::from_pair(&buf, store.volume, pair, domain).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{MkfsOptions, MountOptions, Volume, mkfs};
    use braidfs_device::{Device, Effect, FaultDevice, MemDevice, Op, Rule};
    use std::sync::Arc;

    /// The device may say that a group is claimed although the write failed: another domain must not write its header.
    #[test]
    fn a_group_whose_claim_may_be_on_the_device_is_not_claimed() {
        let faulty = Arc::new(FaultDevice::new(Arc::new(MemDevice::new(64 << 8)), 1));
        let devices: Vec<Arc<dyn Device>> = vec![faulty.clone()];
        let how = MkfsOptions { domains: Some(2), group_bytes: Some(4 << 20), ..MkfsOptions::default() };
        mkfs::format(&devices, &how).unwrap();
        let v = Volume::mount(devices, MountOptions { background: false, ..MountOptions::default() }).unwrap();
        let i = v.mounted();
        let mut bat = i.bat.lock();
        let (all, g) = (bat.free_groups_but(&[]), bat.find_free(&[]).unwrap());
        let claim = |bat: &mut Bat, g: usize, d| {
            let epoch = bat.entry(g as u32).epoch + 1;
            bat.set(&**i.store.device(0), g, BatEntry { domain: Some(DomainId(d)), epoch })
        };
        faulty.add(Rule::new(Op::Write, Effect::Fail(5)).times(1));
        assert!(claim(&mut bat, g, 0).is_err());
        assert_eq!(bat.free_groups_but(&[]), all - 1);
        let other = bat.find_free(&[]).unwrap();
        assert_ne!(other, g);
        assert!(
            bat.claimable_but(&[]).nth(g).unwrap().is_some()
                && bat.groups_of(DomainId(0)).iter().all(|o| *o != g as u32)
        );
        // now the device says what memory does
        claim(&mut bat, other, 1).unwrap();
        assert_eq!(bat.free_groups_but(&[]), all - 1);
        assert!(bat.claimable_but(&[]).nth(g).unwrap().is_none());
        bat.set_free(&**i.store.device(0), other as u32).unwrap();
        drop(bat);
        v.unmount().unwrap();
    }

    /// Who is told that there is a domain more finds it, and whose its group is.
    #[test]
    fn a_domain_is_told_of_when_its_group_is_its_own() {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(64 << 8));
        let how = MkfsOptions { domains: Some(2), group_bytes: Some(4 << 20), ..MkfsOptions::default() };
        mkfs::format(std::slice::from_ref(&device), &how).unwrap();
        let v = Volume::mount(vec![device], MountOptions { background: false, ..MountOptions::default() }).unwrap();
        let all = &v.mounted().domains;
        let list = super::super::domains::Domains::new(vec![all[0].clone()], 2);
        let mut called = false;
        assert!(list.push(all[1].clone(), || {
            called = true;
            assert_eq!((list.len(), list.iter().count()), (1, 1));
            assert_eq!(list[1].id, DomainId(1));
        }));
        assert!(called && list.len() == 2);
        assert!(!list.push(all[1].clone(), || unreachable!("there is no room")));
        v.unmount().unwrap();
    }
}
