//! Checks the volume's own tables: superblocks and replicas, the block group allocation table, domain headers.

use crate::codes;
use crate::error::Result;
use crate::model::Model;
use crate::model::inodes::{Inodes, NameKey};
use crate::pair::mended;
use crate::parts::domain::Domain;
use crate::report::Log;
use crate::rules::Rules;
use crate::rules::tenant::{self, Wrong};
use crate::rules::volume::{bat_pair, bat_pairs, bat_place, domain_header, header_place, superblock};
use braidfs_device::{BLOCK_BYTES, Device};
use braidfs_format::bat::{BatEntry, ENTRIES_PER_BLOCK};
use braidfs_format::domain::{CLEAN, DomainHeader, FAILED};
use braidfs_format::group::{GroupHeader, SegmentTable, claim_seq, table_sum};
use braidfs_format::{BlockKind, DomainId};
use braidfs_store::Store;
use braidfs_store::ring::Ring;
use braidfs_store::super_io;
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

/// `seq` of superblocks written by a repair.
const SUPER_SEQ: u64 = 2;

/// Reads the volume's tables.
///
/// # Errors
/// Where there is no usable superblock, or a device is missing or too small: nothing can be checked.
pub fn read(devices: &[Arc<dyn Device>]) -> Result<Model> {
    let (sb, order) = super_io::read_super(devices)?;
    let store = Arc::new(Store::new(order, &sb)?);
    let inodes = Inodes::new(store.geometry(), Rules::of(&sb), NameKey::random()?);
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
    count_domains(&mut m);
    read_domains(&mut m);
    find_claims(&mut m);
    check_tenants(&mut m);
    Ok(m)
}

/// Where the segment tables of a domain are not those that its header tells of, the newest BAT may be lost, with the
/// claims in it: then those are taken that make the sum right.
fn find_claims(m: &mut Model) {
    let g = m.store.geometry();
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

/// A domain has given `group` back, and the BAT does not say so yet: a crash came between, which a mount puts right; in
/// a volume that was unmounted it is damage.
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
    for (i, d) in m.sb.device_table().iter().enumerate() {
        for addr in [0, d.blocks.get() - 1] {
            if !superblock(&m.store, &mut m.log, &m.sb, i, addr) {
                m.volume_writes.push((i, addr, m.sb.to_block(i as u16, addr, SUPER_SEQ)));
            }
        }
    }
}

fn read_bat(m: &mut Model) {
    for index in 0..bat_pairs(&m.sb) {
        let (pair, first, count) = bat_place(&m.sb, index);
        let buf = m.log.read_pair(&m.store, pair);
        let table = bat_pair(&mut m.log, &m.sb, index, &buf);
        let Some(entries) = table.content else {
            for group in first..first + count {
                let entry = claim_of(m, group as u32);
                m.bat.push(entry);
            }
            m.bat_dirty.push(index);
            continue;
        };
        m.bat.extend(entries);
        if let Some(copy) = table.damaged {
            newer_claims(m, index, first);
            let mend = mended(&buf, BlockKind::Bat, m.sb.volume_id(), pair, copy);
            m.volume_writes.extend(mend.map(|b| (0, pair + copy as u64, b)));
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
    let pair = m.store.geometry().header_addr(group);
    let mut buf = vec![0u8; 2 * BLOCK_BYTES];
    if m.store.read(pair, &mut buf).is_err() {
        return BatEntry::default();
    }
    match GroupHeader::from_pair(&buf, m.sb.volume_id(), pair) {
        Ok((_, _, h)) if h.group.get() == group && is_domain(m, h.domain.get()) => {
            BatEntry { domain: Some(DomainId(h.domain.get())), epoch: h.epoch.get() }
        }
        _ => BatEntry::default(),
    }
}

/// Whether the volume has such a domain, or one may have been added that the superblock does not tell of yet: its header is
/// durable before its first group's.
fn is_domain(m: &Model, number: u16) -> bool {
    let mut log = Log::default();
    let mut header = || {
        let pair = header_place(&m.sb, number);
        let buf = log.read_pair(&m.store, pair);
        DomainHeader::from_pair(&buf, m.sb.volume_id(), pair, number).is_ok()
    };
    number < m.sb.domains.get() || (number < m.sb.max_domains.get() && header())
}

/// A domain is there once it owns a group: the superblocks tell of it later.
fn count_domains(m: &mut Model) {
    let named = m.bat.iter().filter_map(|e| e.domain).map(|d| d.0 + 1).max();
    m.sb.domains = named.map_or(m.sb.domains.get(), |n| n.max(m.sb.domains.get())).into();
}

fn read_domains(m: &mut Model) {
    let volume = m.sb.volume_id();
    for number in 0..m.sb.domains.get() {
        let pair = header_place(&m.sb, number);
        let mut log = Log::of(number);
        let buf = log.read_pair(&m.store, pair);
        let table = domain_header(&mut log, &m.sb, number, &buf);
        let mut header = None;
        let mut dirty = false;
        if let Some(mut h) = table.content {
            if let Some(copy) = table.damaged {
                // The lost one may have been the newer: what it knew stands in the journal. But in the middle of a repair nobody
                // else has written it.
                if h.flags.get() & FAILED == 0 {
                    h.flags = (h.flags.get() & !CLEAN).into();
                    h.scratch_at_rest = 0;
                }
                let mend = mended(&buf, BlockKind::Domain, volume, pair, copy);
                m.volume_writes.extend(mend.map(|b| (0, pair + copy as u64, b)));
            }
            if journal_fits(m, &h, number) {
                if h.flags.get() & FAILED != 0 {
                    log.add(codes::DOMAIN_FAILED, None, "a repair of the domain did not end");
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
        if !m.bat.iter().any(|e| e.domain == Some(DomainId(number))) {
            log.add(codes::DOMAIN_EMPTY, None, "the domain owns no group");
        }
        m.log.findings.append(&mut log.findings);
        m.domains.push(Domain {
            number,
            header_dirty: dirty || header.is_none(),
            header_damaged: table.damaged.is_some(),
            header,
            tables_doubted: false,
            reset_journal: false,
            journal_lost: header.is_some_and(|h| h.flags.get() & FAILED != 0),
            groups: BTreeMap::new(),
            recovered: Default::default(),
            outdated: Default::default(),
            undecided: Default::default(),
            doubted: Default::default(),
            fresh: Vec::new(),
            replaced: Vec::new(),
        });
    }
}

/// What the headers say of tenants, but for what only the inodes tell.
fn check_tenants(m: &mut Model) {
    let mut names = tenant::Names::default();
    for i in 0..m.domains.len() {
        let Some(mut h) = m.domains[i].header else { continue };
        let mut found = Vec::new();
        tenant::fields(&h, m.store.devices(), |ino| m.domain_of(ino), |w| found.push(w));
        let mut log = Log::of(m.domains[i].number);
        for w in found {
            match w {
                Wrong::Root(_) => tenant::clear(&mut h),
                Wrong::Name(_) => tenant::rename(&mut h, &free_name(m, i)),
                Wrong::Limit(_) => tenant::least(&mut h),
                Wrong::Inodes(_) => tenant::unlimited_inodes(&mut h),
                Wrong::Rate(which, _) => tenant::unlimited_rate(&mut h, which),
                Wrong::Soft(_) => tenant::no_soft_limit(&mut h),
                Wrong::Memory(_) => tenant::any_memory(&mut h),
                Wrong::Journal(_) => tenant::journaled(&mut h),
                Wrong::Serving(_) => tenant::any_serving(&mut h),
                Wrong::Devices(_) => tenant::any_devices(&mut h),
            }
            log.add(codes::TENANT, None, w.why());
        }
        if let Some(why) = names.taken(&h) {
            log.add(codes::TENANT_NAME, None, why);
            tenant::rename(&mut h, &free_name(m, i));
            names.taken(&h);
        }
        if !log.findings.is_empty() {
            m.domains[i].header = Some(h);
            m.domains[i].header_dirty = true;
            m.log.findings.append(&mut log.findings);
        }
    }
}

/// A name that no tenant has, for that of domain `i`.
fn free_name(m: &Model, i: usize) -> String {
    let taken: HashSet<String> = m.domains.iter().filter_map(|d| Some(d.header?.tenant_name_str())).collect();
    let mut name = format!("tenant-{}", m.domains[i].number);
    while taken.contains(&name) {
        name.push('x');
    }
    name
}

/// Whether the journal lies in the data blocks of one group of its domain.
fn journal_fits(m: &Model, h: &DomainHeader, domain: u16) -> bool {
    let g = m.store.geometry();
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
