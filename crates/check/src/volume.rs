//! Checks the volume's own tables: superblocks and replicas, the block group allocation table, domain headers.

use super::codes;
use super::inodes::Inodes;
use super::model::{Domain, Log, Model};
use super::pair::{CopyState, PairState, mended};
use crate::error::Result;
use braidfs_device::{BLOCK_BYTES, Device};
use braidfs_format::bat::{self, BatEntry, ENTRIES_PER_BLOCK};
use braidfs_format::domain::{CLEAN, DomainHeader, FAILED};
use braidfs_format::group::table_sum;
use braidfs_format::group::{GroupHeader, SegmentTable, claim_seq};
use braidfs_format::super_block::SuperBlock;
use braidfs_format::{BlockKind, DomainId};
use braidfs_store::Store;
use braidfs_store::ring::Ring;
use braidfs_store::super_io;
use std::collections::BTreeMap;
use std::sync::Arc;

/// `seq` of superblocks written by a repair.
const SUPER_SEQ: u64 = 2;

/// Reads a pair of volume blocks of device 0; unreadable blocks count as zeros and are reported.
pub fn read_pair(store: &Store, log: &mut Log, pair: u64) -> Vec<u8> {
    let mut buf = vec![0u8; 2 * BLOCK_BYTES];
    for (i, b) in buf.chunks_mut(BLOCK_BYTES).enumerate() {
        if let Err(e) = store.device(0).read(pair + i as u64, b) {
            b.fill(0);
            log.add(codes::UNREADABLE, None, format!("volume block {} cannot be read: {e}", pair + i as u64));
        }
    }
    buf
}

/// Reads the volume's tables.
///
/// # Errors
/// Where there is no usable superblock, or a device is missing or too small: nothing can be checked.
pub fn read(devices: &[Arc<dyn Device>]) -> Result<Model> {
    let (sb, order) = super_io::read_super(devices)?;
    let store = Arc::new(Store::new(order, &sb)?);
    let inodes = Inodes::new(store.geometry);
    let mut m = Model {
        sb,
        store,
        bat: Vec::new(),
        bat_dirty: Vec::new(),
        volume_writes: Vec::new(),
        domains: Vec::new(),
        inodes,
        tables_old: false,
        log: Log::default(),
    };
    check_supers(&mut m);
    read_bat(&mut m);
    read_domains(&mut m);
    find_claims(&mut m);
    Ok(m)
}

/// Where the segment tables of a domain are not those that its header tells of, the newest BAT may be lost, with the claims
/// in it: then those are taken that make the sum right.
fn find_claims(m: &mut Model) {
    let g = m.store.geometry;
    let mark = |m: &Model, group: u32, upto: u64| {
        let addr = g.segment_table_addr(group);
        let pair = Log::default().read(&m.store, addr, 2);
        let table = SegmentTable::decode_upto(&pair, g.segments, m.store.volume, addr, upto);
        (group, table.map_or(0, |t| t.seq))
    };
    for i in 0..m.domains.len() {
        let Some(h) = m.domains[i].header else { continue };
        let (upto, number) = (h.checkpoint.get(), m.domains[i].number);
        let owned = (0u32..).zip(&m.bat).filter(|(_, e)| e.domain == Some(DomainId(number)));
        let mut tables: Vec<(u32, u64)> = owned.map(|(group, _)| mark(m, group, upto)).collect();
        let left = |(group, seq): &(u32, u64)| *seq == claim_seq(m.bat[*group as usize].epoch.wrapping_add(1));
        for (group, _) in tables.extract_if(.., |t| left(t)).collect::<Vec<_>>() {
            given_back(m, group, h.flags.get() & CLEAN != 0);
        }
        if table_sum(&tables) == h.tables.get() {
            continue;
        }
        let free = (0..m.bat.len() as u32).filter(|&group| m.bat[group as usize].domain.is_none());
        let lost: Vec<(u32, BatEntry)> = free
            .map(|group| (group, claim_of(m, group)))
            .filter(|(group, c)| c.domain == Some(DomainId(number)) && c.epoch > m.bat[*group as usize].epoch)
            .collect();
        tables.extend(lost.iter().map(|(group, _)| mark(m, *group, upto)));
        if lost.is_empty() || table_sum(&tables) != h.tables.get() {
            m.tables_old = true;
            continue;
        }
        for (group, claim) in lost {
            let why =
                format!("it lacks the claim of group {group} by domain {number}: the device lost its newest copy");
            m.log.add(codes::BAT_COPY, None, format!("BAT pair {}: {why}", group / ENTRIES_PER_BLOCK));
            m.bat[group as usize] = claim;
            let index = (group / ENTRIES_PER_BLOCK) as usize;
            if !m.bat_dirty.contains(&index) {
                m.bat_dirty.push(index);
            }
        }
    }
}

/// A domain has given `group` back, and the BAT does not say so yet: a crash came between, which a mount puts right; in a
/// volume that was unmounted it is damage.
fn given_back(m: &mut Model, group: u32, clean: bool) {
    let index = (group / ENTRIES_PER_BLOCK) as usize;
    let old = m.bat[group as usize];
    if clean {
        let owner = old.domain.map_or(u16::MAX, |d| d.0);
        let why = format!("it lacks that domain {owner} gave group {group} back");
        m.log.add(codes::BAT_COPY, None, format!("BAT pair {index}: {why}: the device lost its newest copy"));
        if !m.bat_dirty.contains(&index) {
            m.bat_dirty.push(index);
        }
    }
    m.bat[group as usize] = BatEntry { domain: None, epoch: old.epoch.wrapping_add(1) };
}

fn check_supers(m: &mut Model) {
    let table = m.sb.device_table().to_vec();
    for (i, d) in table.iter().enumerate() {
        let device = Arc::clone(m.store.device(i));
        for addr in [0, d.blocks.get() - 1] {
            let why = match super_io::read_at(&device, addr) {
                Ok(s) if same(&s, &m.sb, i as u16) => continue,
                Ok(_) => "differs from the others".to_string(),
                Err(e) => e.to_string(),
            };
            m.log.add(codes::SUPER_COPY, None, format!("superblock at block {addr} of {}: {why}", device.name()));
            m.volume_writes.push((i, addr, m.sb.to_block(i as u16, addr, SUPER_SEQ)));
        }
    }
}

/// Whether two superblocks say the same, but for the header, the device that they stand on, and what a crash may have
/// changed in some of them: the label and `compat`.
pub fn same(a: &SuperBlock, b: &SuperBlock, device: u16) -> bool {
    let plain = |s: &SuperBlock| SuperBlock { label: [0; 64], compat: 0.into(), ..*s }.to_block(0, 0, 0);
    a.this_device.get() == device && plain(a) == plain(b)
}

fn read_bat(m: &mut Model) {
    let groups = m.sb.groups.get() as usize;
    let (volume, domains) = (m.sb.volume_id(), m.sb.domains.get());
    for index in 0..groups.div_ceil(ENTRIES_PER_BLOCK as usize) {
        let first = index * ENTRIES_PER_BLOCK as usize;
        let count = (groups - first).min(ENTRIES_PER_BLOCK as usize);
        let pair = m.sb.bat.get() + 2 * index as u64;
        let buf = read_pair(&m.store, &mut m.log, pair);
        let state = PairState::of(&buf, BlockKind::Bat, volume, pair);
        match bat::decode(&buf, volume, pair, count, domains) {
            Ok((_, _, entries)) => {
                m.bat.extend(entries);
                if let Some((copy, why)) = state.damaged() {
                    newer_claims(m, index, first);
                    m.log.add(codes::BAT_COPY, None, format!("BAT pair {index}, copy {copy}: {why}"));
                    let mend = mended(&buf, BlockKind::Bat, volume, pair, copy);
                    m.volume_writes.extend(mend.map(|b| (0, pair + copy as u64, b)));
                }
            }
            Err(e) => {
                m.log.add(codes::BAT_LOST, None, format!("BAT pair {index}: {e}; owners taken from group headers"));
                for group in first..first + count {
                    let entry = claim_of(m, group as u32);
                    m.bat.push(entry);
                }
                m.bat_dirty.push(index);
            }
        }
    }
}

/// Claims that only the headers of groups tell: the newer copy of BAT pair `index` is lost.
fn newer_claims(m: &mut Model, index: usize, first: usize) {
    for group in first..m.bat.len() {
        let claim = claim_of(m, group as u32);
        if claim.domain.is_some() && claim.epoch > m.bat[group].epoch {
            m.bat[group] = claim;
            if !m.bat_dirty.contains(&index) {
                m.bat_dirty.push(index);
            }
        }
    }
}

/// Owner of a group as its header says; free where there is none.
fn claim_of(m: &Model, group: u32) -> BatEntry {
    let pair = m.store.geometry.header_addr(group);
    let mut buf = vec![0u8; 2 * BLOCK_BYTES];
    if m.store.read(pair, &mut buf).is_err() {
        return BatEntry::default();
    }
    match GroupHeader::from_pair(&buf, m.sb.volume_id(), pair) {
        Ok((_, _, h)) if h.group.get() == group && h.domain < m.sb.domains => {
            BatEntry { domain: Some(DomainId(h.domain.get())), epoch: h.epoch.get() }
        }
        _ => BatEntry::default(),
    }
}

fn read_domains(m: &mut Model) {
    let volume = m.sb.volume_id();
    for number in 0..m.sb.domains.get() {
        let pair = m.sb.domain_table.get() + 2 * u64::from(number);
        let mut log = Log::of(number);
        let buf = read_pair(&m.store, &mut log, pair);
        let state = PairState::of(&buf, BlockKind::Domain, volume, pair);
        let mut header = None;
        let mut dirty = false;
        match DomainHeader::from_pair(&buf, volume, pair, number) {
            Ok((_, _, mut h)) => {
                if let Some((copy, why)) = state.damaged() {
                    // the lost one may have been the newer: what it knew stands in the journal
                    h.flags = (h.flags.get() & !CLEAN).into();
                    log.add(codes::DOMAIN_COPY, None, format!("domain header, copy {copy}: {why}"));
                    let mend = mended(&buf, BlockKind::Domain, volume, pair, copy);
                    m.volume_writes.extend(mend.map(|b| (0, pair + copy as u64, b)));
                }
                if journal_fits(m, &h, number) {
                    if h.flags.get() & FAILED != 0 {
                        log.add(codes::DOMAIN_FAILED, None, "the domain had stopped after an error");
                        dirty = true;
                    }
                    let ring = Ring::new(Arc::clone(&m.store), DomainId(number), &h);
                    if h.flags.get() & CLEAN != 0 && ring.goes_on(h.head_pos.get()).unwrap_or(false) {
                        log.add(codes::DOMAIN_OLD, None, "says unmounted, and its journal goes on");
                        h.flags = (h.flags.get() & !CLEAN).into();
                    }
                    header = Some(h);
                } else {
                    let at = h.journal_start.get();
                    let why = format!("journal of {} blocks at block {at} is outside its groups", h.journal_blocks);
                    log.add(codes::JOURNAL_PLACE, None, why);
                }
            }
            Err(e) => {
                // A pair never written is as bad as a damaged one: the domain exists.
                let blank = state.0 == [CopyState::Blank, CopyState::Blank];
                log.add(codes::DOMAIN_LOST, None, if blank { "domain header is blank".into() } else { e.to_string() });
            }
        }
        if !m.bat.iter().any(|e| e.domain == Some(DomainId(number))) {
            log.add(codes::DOMAIN_EMPTY, None, "the domain owns no group");
        }
        m.log.findings.append(&mut log.findings);
        m.domains.push(Domain {
            number,
            header_dirty: dirty || header.is_none(),
            header,
            reset_journal: false,
            groups: BTreeMap::new(),
            recovered: Default::default(),
        });
    }
}

/// Whether the journal lies in the data blocks of one group of its domain.
fn journal_fits(m: &Model, h: &DomainHeader, domain: u16) -> bool {
    let g = m.store.geometry;
    let (start, n) = (braidfs_format::BlockAddr(h.journal_start.get()), u64::from(h.journal_blocks.get()));
    if !g.contains(start, n) {
        return false;
    }
    let group = g.group_of(start);
    let at = start.0 - g.group_start(group).0;
    m.bat.get(group as usize).is_some_and(|e| e.domain == Some(DomainId(domain)))
        && at >= u64::from(g.meta_blocks())
        && at + n <= u64::from(m.store.group_blocks(group))
}
