//! Offline check and repair of a volume, and readable dumps of its structures.
//!
//! [`check`] reads the whole volume into a model of how it should be, corrects the model where something does not hold,
//! and reports each correction with a stable number ([`codes`]). With `repair` it then makes the device equal to the
//! model and checks again. The device must not be in use by anybody else.
//!
//! Not promised: that file *data* is right (that is what data checksums and scrubbing are for), or that an interrupted
//! repair leaves a volume that mounts; running it again does.

pub mod codes;
mod dirs;
pub mod dump;
mod layout;
mod model;
mod names;
mod nodes;
mod pair;
mod prepare;
mod repair;
pub mod scrub;
mod space;
mod tables;
mod volume;

#[cfg(test)]
pub(crate) mod testdev;
#[cfg(test)]
mod tests;

use crate::error::Result;
use crate::overlay::OverlayDevice;
use crate::types::FileKind;
use braidfs_device::Device;
use braidfs_format::NodeId;
use braidfs_format::domain::{CLEAN, NEEDS_GC};
use model::{Domain, Ino, Log, Model};
use prepare::Prepared;
pub(crate) use prepare::mend_node_tables;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};

/// Rounds of repair and check before what is left counts as not repairable.
const ROUNDS: u32 = 4;

/// How to check.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FsckOptions {
    /// Mend what can be mended; else the devices are not written.
    pub repair: bool,
    /// Also check a volume that was unmounted properly.
    pub force: bool,
}

/// One thing that does not hold.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Finding {
    /// What, a number of [`codes`].
    pub code: u32,
    /// In which domain.
    pub domain: Option<u16>,
    /// Of which inode or node.
    pub node: Option<u64>,
    /// Its path, where it has one.
    pub path: Option<String>,
    /// In words.
    pub message: String,
    /// Whether it was mended.
    pub fixed: bool,
}

/// Result of a check.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct FsckReport {
    /// The volume was unmounted properly and not looked at further; the counts are 0.
    pub clean_skip: bool,
    /// What was found.
    pub findings: Vec<Finding>,
    /// What is no error by itself: traces of a crash that might also be damage.
    pub notes: Vec<String>,
    /// Regular files.
    pub files: u64,
    /// Directories.
    pub dirs: u64,
    /// Symbolic links.
    pub symlinks: u64,
    /// Devices, sockets, pipes.
    pub other: u64,
    /// Blocks in use by files, directories and node blocks.
    pub blocks_used: u64,
    /// Blocks of all groups without their metadata and the journals.
    pub blocks_total: u64,
}

impl FsckReport {
    /// Findings that were not mended.
    pub fn unfixed(&self) -> usize {
        self.findings.iter().filter(|f| !f.fixed).count()
    }
}

/// Checks the volume on `devices` (all of it, in any order). `progress` is called with the phase, steps done and steps.
///
/// A volume that was not unmounted has its journals replayed first: on the devices with `repair`, else in memory.
///
/// # Errors
/// No usable superblock, a device missing, or a device that fails on writing. Damage is no error but a finding.
pub fn check(
    devices: &[Arc<dyn Device>],
    options: &FsckOptions,
    progress: &dyn Fn(&str, u64, u64),
) -> Result<FsckReport> {
    check_with(devices, options, progress, &mut scrub::nothing)
}

/// [`check`]; `more` looks at the volume once it is read, too.
fn check_with(
    devices: &[Arc<dyn Device>],
    options: &FsckOptions,
    progress: &dyn Fn(&str, u64, u64),
    more: scrub::More<'_>,
) -> Result<FsckReport> {
    progress("volume", 0, 1);
    let first = volume::read(devices)?;
    progress("volume", 1, 1);
    let flags = |d: &Domain| d.header.map_or(0, |h| h.flags.get());
    let dirty = first.domains.iter().any(|d| d.header.is_some() && (flags(d) & CLEAN == 0 || flags(d) & NEEDS_GC != 0));
    if !dirty && !options.force && first.log.findings.is_empty() {
        return Ok(FsckReport { clean_skip: true, ..FsckReport::default() });
    }
    let mut devices = devices.to_vec();
    let mut prepared = Prepared::default();
    if dirty {
        progress("journal", 0, 1);
        if !options.repair {
            devices = devices.into_iter().map(|d| Arc::new(OverlayDevice::new(d)) as Arc<dyn Device>).collect();
        }
        prepared = prepare::run(&devices)?;
        progress("journal", 1, 1);
    }
    drop(first);

    let mut m = scan(&devices, &mut prepared, progress)?;
    // What was mended for the replay is no longer found.
    let mut early = std::mem::take(&mut prepared.log.findings);
    early.retain(|e| !m.log.findings.iter().any(|f| (f.code, f.domain, f.node) == (e.code, e.domain, e.node)));
    m.log.findings.splice(0..0, early);
    for d in m.domains.iter_mut().filter(|d| d.header.is_some_and(|h| h.flags.get() & CLEAN == 0)) {
        (d.header_dirty, d.reset_journal) = (true, true);
        m.log.domain = Some(d.number);
        m.log.add(codes::REPLAY_FAILED, None, "the journal could not be replayed; what it holds is given up");
    }
    m.log.domain = None;
    more(&mut m);
    let mut report = report(&mut m);
    report.notes = std::mem::take(&mut prepared.notes);
    if !options.repair {
        return Ok(report);
    }
    for round in 0..ROUNDS {
        let writes = m.domains.iter().any(|d| d.header_dirty);
        if m.log.findings.is_empty() && !writes {
            break;
        }
        progress("repair", u64::from(round), u64::from(ROUNDS));
        repair::write(&mut m)?;
        m = scan(&devices, &mut Prepared::default(), progress)?;
        let left = self::report(&mut m);
        let (old, notes) = (std::mem::take(&mut report.findings), std::mem::take(&mut report.notes));
        report = FsckReport { findings: old, notes, ..left.clone() };
        for f in &mut report.findings {
            f.fixed = !left.findings.iter().any(|l| (l.code, l.node, l.domain) == (f.code, f.node, f.domain));
        }
        for f in left.findings {
            if !report.findings.iter().any(|o| (o.code, o.node, o.domain) == (f.code, f.node, f.domain)) {
                report.findings.push(f);
            }
        }
    }
    Ok(report)
}

/// Groups of a volume that one thread scans.
const SMALL_GROUPS: usize = 16;

/// Reads and checks everything.
fn scan(devices: &[Arc<dyn Device>], prepared: &mut Prepared, progress: &dyn Fn(&str, u64, u64)) -> Result<Model> {
    let mut m = volume::read(devices)?;
    prepare::hand_over(prepared, &mut m);
    let domains = std::mem::take(&mut m.domains);
    let total = domains.len();
    // a small volume is read sooner than threads start
    let threads = if m.bat.len() < SMALL_GROUPS {
        1
    } else {
        std::thread::available_parallelism().map_or(1, std::num::NonZero::get).min(total).max(1)
    };
    let todo: Vec<parking_lot::Mutex<Option<Domain>>> =
        domains.into_iter().map(|d| parking_lot::Mutex::new(Some(d))).collect();
    let next = AtomicUsize::new(0);
    let (send, receive) = mpsc::channel();
    let mut done: BTreeMap<u16, (Domain, BTreeMap<_, Ino>, Log)> = BTreeMap::new();
    let model = &m;
    std::thread::scope(|s| {
        let (todo, next) = (&todo, &next);
        let work = move |send: mpsc::Sender<_>| {
            while let Some(slot) = todo.get(next.fetch_add(1, Ordering::Relaxed)) {
                let Some(mut domain) = slot.lock().take() else { continue };
                let mut log = Log::of(domain.number);
                let inodes = scan_domain(model, &mut log, &mut domain);
                if send.send((domain, inodes, log)).is_err() {
                    return;
                }
            }
        };
        for _ in 1..threads {
            let send = send.clone();
            s.spawn(move || work(send));
        }
        if threads == 1 {
            work(send);
        } else {
            s.spawn(move || work(send));
        }
        progress("domains", 0, total as u64);
        for (domain, inodes, log) in receive {
            done.insert(domain.number, (domain, inodes, log));
            progress("domains", done.len() as u64, total as u64);
        }
    });
    for (domain, mut inodes, mut log) in done.into_values() {
        m.domains.push(domain);
        m.inodes.append(&mut inodes);
        m.log.findings.append(&mut log.findings);
    }
    progress("names", 0, 1);
    names::check(&mut m);
    progress("names", 1, 1);
    Ok(m)
}

/// Codes that an old node table may be behind: then a newer record of a node may lie somewhere.
const DOUBTS: [u32; 7] = [
    codes::ENTRY_PLACE,
    codes::NODE_BLOCK,
    codes::RECORD,
    codes::OVERFLOW_MISSING,
    codes::LEAKED,
    codes::NOT_MARKED,
    codes::LIVE_COUNT,
];

/// Checks one domain by itself; where that makes the node table doubtful, once more with the records of all node blocks.
fn scan_domain(m: &Model, log: &mut Log, domain: &mut Domain) -> BTreeMap<NodeId, Ino> {
    let (header, recovered) = (domain.header, domain.recovered.clone());
    let inodes = scan_with(m, log, domain, false);
    if !log.findings.iter().any(|f| DOUBTS.contains(&f.code)) {
        return inodes;
    }
    drop(inodes);
    log.findings.clear();
    (domain.header, domain.recovered) = (header, recovered);
    domain.groups.clear();
    scan_with(m, log, domain, true)
}

fn scan_with(m: &Model, log: &mut Log, domain: &mut Domain, doubt: bool) -> BTreeMap<NodeId, Ino> {
    let store = &*m.store;
    for (number, e) in m.bat.iter().enumerate().filter(|(_, e)| e.domain.is_some_and(|d| d.0 == domain.number)) {
        let group = tables::read_group(store, log, domain.number, number as u32, e.epoch);
        domain.groups.insert(number as u32, group);
    }
    tables::recover_entries(store, log, domain, doubt);
    if domain.header.is_none() {
        repair::rebuild_header(store, domain);
    }
    let mut inodes = nodes::read(store, &m.sb, log, domain);
    space::drop_old_blocks(store, log, domain, &mut inodes);
    space::resolve_shared(store, log, domain, &mut inodes);
    for (node, ino) in inodes.iter_mut().filter(|(_, i)| i.is_dir()) {
        dirs::read(store, &m.sb.hash_key, log, *node, ino);
    }
    space::check(store, log, domain, &inodes);
    inodes
}

/// Counts, and gives the findings their paths.
fn report(m: &mut Model) -> FsckReport {
    let mut r = FsckReport::default();
    for ino in m.inodes.values() {
        match FileKind::from_mode(ino.inode.mode) {
            Some(FileKind::File) => r.files += 1,
            Some(FileKind::Dir) => r.dirs += 1,
            Some(FileKind::Symlink) => r.symlinks += 1,
            _ => r.other += 1,
        }
    }
    let g = m.store.geometry;
    for group in 0..g.groups {
        r.blocks_total += u64::from(m.store.group_blocks(group).saturating_sub(g.meta_blocks()));
    }
    for d in &m.domains {
        r.blocks_total -= d.journal().map_or(0, |j| j.1).min(r.blocks_total);
        let inodes = m.inodes.iter().filter(|(_, i)| i.domain == d.number);
        r.blocks_used += Model::claims(d, inodes).iter().map(|c| u64::from(c.len)).sum::<u64>();
    }
    r.findings = m.log.findings.clone();
    for f in &mut r.findings {
        f.path = f.node.and_then(|n| m.path(braidfs_format::NodeId(n)));
        if f.domain.is_none() {
            f.domain = f.node.and_then(|n| m.domain_of(braidfs_format::NodeId(n)));
        }
    }
    r
}
