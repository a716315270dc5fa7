//! Checks an unmounted volume, and repairs it.
//!
//! [`check`] first asks [`quick`] whether the volume holds: one reading, little memory. Where that cannot be said, it
//! reads the whole volume into a model of how it should be, corrects the model where something does not hold, and
//! reports each correction with a stable number ([`codes`]). With `repair` it then makes the device equal to the model
//! and checks again.

#[cfg(test)]
mod tests;

use crate::codes;
use crate::data;
use crate::error::Result;
use crate::model::inodes::Inodes;
use crate::model::{Model, Names};
use crate::parts::domain::Domain;
use crate::quick::{self, Outcome};
use crate::repair::prepare::Prepared;
use crate::repair::{self, prepare};
use crate::report::{Finding, FsckOptions, FsckReport, Limits, Log, ScrubReport};
use crate::rules::tenant;
use crate::scan::space::Used;
use crate::scan::{SMALL_GROUPS, dirs, names, nodes, shared, space, tables, volume};
use crate::threads::{cpus, each};
use braidfs_device::Device;
use braidfs_format::InodeNo;
use braidfs_format::domain::{CLEAN, DomainHeader, NEEDS_GC};
use braidfs_store::interface::Replay;
use braidfs_store::overlay::OverlayDevice;
use braidfs_sync::plain::Mutex;
use std::collections::HashSet;
use std::convert::Infallible;
use std::sync::Arc;

/// Rounds of repair and check before what is left counts as not repairable.
const ROUNDS: u32 = 4;

/// Checks the volume on `devices` (all of it, in any order). `progress` is called with the phase, steps done and steps.
///
/// A volume that was not unmounted has its journals replayed first, by `replay`: on the devices with `repair`, else in
/// memory.
///
/// # Errors
/// No usable superblock, a device missing, or a device that fails on writing. Damage is no error but a finding.
pub fn check(
    devices: &[Arc<dyn Device>],
    options: &FsckOptions,
    replay: &dyn Replay,
    progress: &dyn Fn(&str, u64, u64),
) -> Result<FsckReport> {
    check_within(devices, options, &Limits::default(), replay, progress)
}

/// As [`check`], within `limits`.
///
/// # Errors
/// As [`check`].
pub fn check_within(
    devices: &[Arc<dyn Device>],
    options: &FsckOptions,
    limits: &Limits,
    replay: &dyn Replay,
    progress: &dyn Fn(&str, u64, u64),
) -> Result<FsckReport> {
    check_with(devices, &How::of(options, limits), replay, progress, None).map(|(report, _)| report)
}

/// Checks, replays journals and repairs where nobody is asked, at a boot for instance: only where each finding is
/// [safe](codes::is_safe). Else nothing is written, and the report says [`FsckReport::by_hand`]. First everything is done in
/// memory, as [`check`] does it without `repair`.
///
/// # Errors
/// As [`check`].
pub fn preen(
    devices: &[Arc<dyn Device>],
    force: bool,
    limits: &Limits,
    replay: &dyn Replay,
    progress: &dyn Fn(&str, u64, u64),
) -> Result<FsckReport> {
    let first = volume::read(devices)?;
    first.sb.may_change()?;
    // A repair takes a tenant without a journal for one that was in use, and empties it, where the copy that told is lost.
    let empties = |d: &Domain| d.header_damaged && d.header.is_some_and(|h| h.is_discarded());
    let (dirty, empties) = (is_dirty(&first), first.domains.iter().any(empties));
    drop(first);
    let look = How::of(&FsckOptions { repair: false, force }, limits);
    let (report, writes) = check_with(devices, &look, replay, progress, None)?;
    if empties || !report.findings.iter().all(Finding::is_safe) {
        return Ok(FsckReport { by_hand: true, ..report });
    }
    if !report.findings.is_empty() || writes {
        let repair = How { repair: true, only_safe: true, ..look };
        return check_with(devices, &repair, replay, progress, None).map(|(report, _)| report);
    }
    if dirty {
        prepare::run(devices, replay, true)?;
    }
    Ok(report)
}

/// How [`check_with`] goes about it.
struct How {
    repair: bool,
    force: bool,
    /// A repair ends before it writes what is not safe.
    only_safe: bool,
    limits: Limits,
}

impl How {
    fn of(options: &FsckOptions, limits: &Limits) -> Self {
        Self { repair: options.repair, force: options.force, only_safe: false, limits: *limits }
    }
}

/// Whether the volume on `devices` was closed properly, by all that its domains' headers say: the only thing that is looked at.
///
/// # Errors
/// Of a device, or no volume.
pub fn is_closed(devices: &[Arc<dyn Device>]) -> Result<bool> {
    let m = volume::read(devices)?;
    Ok(m.domains.iter().all(|d| d.header.is_some_and(|h| h.flags.get() & CLEAN != 0)))
}

/// Whether journals are to be replayed.
fn is_dirty(m: &Model) -> bool {
    let flags = |d: &Domain| d.header.map_or(0, |h| h.flags.get());
    m.domains.iter().any(|d| d.header.is_some() && (flags(d) & CLEAN == 0 || flags(d) & NEEDS_GC != 0))
}

/// [`check_within`], and whether a repair has to write though nothing may have been found; with `data`, file data is compared as
/// well.
fn check_with(
    devices: &[Arc<dyn Device>],
    how: &How,
    replay: &dyn Replay,
    progress: &dyn Fn(&str, u64, u64),
    data: Option<&mut ScrubReport>,
) -> Result<(FsckReport, bool)> {
    progress("volume", 0, 1);
    let first = volume::read(devices)?;
    progress("volume", 1, 1);
    if how.repair {
        first.sb.may_change()?;
    }
    let dirty = is_dirty(&first);
    if !dirty && !how.force && first.log.findings.is_empty() {
        return Ok((FsckReport { clean_skip: true, ..FsckReport::default() }, false));
    }
    let mut devices = devices.to_vec();
    let mut prepared = Prepared::default();
    if dirty {
        progress("journal", 0, 1);
        if !how.repair {
            devices = devices.into_iter().map(|d| Arc::new(OverlayDevice::new(d)) as Arc<dyn Device>).collect();
        }
        prepared = prepare::run(&devices, replay, how.repair)?;
        progress("journal", 1, 1);
    }
    drop(first);

    // Blocks that were taken for valid, so that the replay used none of them, are counted: not by the first pass.
    let recount = !prepared.doubted.is_empty();
    if prepared.log.findings.is_empty() && !recount && prepared.recovered.values().all(HashSet::is_empty) {
        let quick = quick::Options { data: data.is_some(), memory: how.limits.memory_bytes };
        if let Some(held) = holds(&devices, &quick, progress)? {
            if let Some(out) = data {
                (out.data_checked, out.data_unchecked) = (held.data_checked, held.data_unchecked);
                out.data_bad = held.report.findings.len() as u64;
            }
            return Ok((FsckReport { notes: prepared.notes, ..held.report }, false));
        }
    }
    let before = prepared.log.findings.clone();
    let mut m = scan(&devices, &mut prepared, progress).map_err(|e| e.after(before.clone()))?;
    add_found_before(&mut m, &mut prepared);
    if let Some(out) = data {
        data::compare_all(&mut m, out, progress);
    }
    let report = FsckReport { notes: std::mem::take(&mut prepared.notes), ..count(&mut m) };
    if !how.repair {
        let writes = recount || m.domains.iter().any(|d| d.header_dirty);
        return Ok((report, writes));
    }
    let told = abouts(&before);
    prepare::tell(report.findings.iter().filter(|f| codes::goes_with_journal(f.code) && !told.contains(&about(f))));
    let found = report.findings.clone();
    let repaired = repair_until_it_holds(&devices, m, report, recount, how, progress);
    Ok((repaired.map_err(|e| e.after(found))?, false))
}

/// Adds what the preparation for the replay found, and the journals that could not be replayed.
fn add_found_before(m: &mut Model, prepared: &mut Prepared) {
    // So says the preparation itself, until the repair has ended.
    let says = |f: &Finding| f.domain.is_some_and(|d| prepared.marked.contains(&d));
    m.log.findings.retain(|f| f.code != codes::DOMAIN_FAILED || !says(f));
    // What was mended for the replay is no longer found.
    let mut early = std::mem::take(&mut prepared.log.findings);
    let found = abouts(&m.log.findings);
    early.retain(|e| !found.contains(&about(e)));
    // A header that was made again says that its repair goes on.
    let made = early.iter().filter(|e| [codes::DOMAIN_LOST, codes::JOURNAL_PLACE].contains(&e.code));
    let made: HashSet<Option<u16>> = made.map(|e| e.domain).collect();
    m.log.findings.retain(|f| f.code != codes::DOMAIN_FAILED || !made.contains(&f.domain));
    m.log.findings.splice(0..0, early);
    for d in m.domains.iter_mut().filter(|d| d.header.is_some_and(|h| h.flags.get() & CLEAN == 0)) {
        (d.header_dirty, d.reset_journal) = (true, true);
        if prepare::is_unreplayed(&m.store, d) {
            m.log.domain = Some(d.number);
            m.log.add(codes::REPLAY_FAILED, None, "the journal could not be replayed; what it holds is given up");
        }
    }
    m.log.domain = None;
}

/// Writes `m`, with the findings of `report`, and checks again, until nothing is left or nothing more can be done; `recount`:
/// blocks are to be counted though nothing was found.
fn repair_until_it_holds(
    devices: &[Arc<dyn Device>],
    mut m: Model,
    mut report: FsckReport,
    mut recount: bool,
    how: &How,
    progress: &dyn Fn(&str, u64, u64),
) -> Result<FsckReport> {
    for round in 0..ROUNDS {
        let writes = m.domains.iter().any(|d| d.header_dirty);
        if m.log.findings.is_empty() && !writes && !std::mem::take(&mut recount) {
            break;
        }
        if how.only_safe && !m.log.findings.iter().all(Finding::is_safe) {
            report.by_hand = true;
            break;
        }
        progress("repair", u64::from(round), u64::from(ROUNDS));
        repair::write(&mut m)?;
        drop(m);
        let quick = quick::Options { data: false, memory: how.limits.memory_bytes };
        if let Some(held) = holds(devices, &quick, progress)? {
            report = FsckReport { findings: report.findings, notes: report.notes, ..held.report };
            report.findings.iter_mut().for_each(|f| f.fixed = true);
            break;
        }
        m = scan(devices, &mut Prepared::default(), progress)?;
        report = with_what_is_left(report, count(&mut m));
    }
    Ok(report)
}

/// What a finding is about. There may be one for each inode: of many findings a set of these is asked.
type About = (u32, Option<u16>, Option<u64>);

fn about(f: &Finding) -> About {
    (f.code, f.domain, f.node)
}

fn abouts(findings: &[Finding]) -> HashSet<About> {
    findings.iter().map(about).collect()
}

/// The findings of `report`, those fixed that are not in `left`, and what only that has.
fn with_what_is_left(report: FsckReport, left: FsckReport) -> FsckReport {
    let mut findings = report.findings;
    let still = abouts(&left.findings);
    findings.iter_mut().for_each(|f| f.fixed = !still.contains(&about(f)));
    let mut known = abouts(&findings);
    findings.extend(left.findings.iter().filter(|f| known.insert(about(f))).cloned());
    FsckReport { findings, notes: report.notes, ..left }
}

/// What a volume consists of that holds but, perhaps, for file data. `None` where something may be wrong.
fn holds(
    devices: &[Arc<dyn Device>],
    how: &quick::Options,
    progress: &dyn Fn(&str, u64, u64),
) -> Result<Option<Outcome>> {
    let m = volume::read(devices)?;
    let mut outcome = quick::check(&m, how, progress);
    if let Some(o) = &mut outcome {
        o.report.blocks_total = blocks_total(&m);
    }
    Ok(outcome)
}

/// Blocks of all groups without their metadata and the journals.
fn blocks_total(m: &Model) -> u64 {
    let g = m.store.geometry();
    let groups: u64 = (0..g.groups).map(|n| u64::from(m.store.group_blocks(n).saturating_sub(g.meta_blocks()))).sum();
    groups.saturating_sub(m.domains.iter().map(|d| d.journal().map_or(0, |j| j.1)).sum())
}

/// Reads and checks everything.
fn scan(devices: &[Arc<dyn Device>], prepared: &mut Prepared, progress: &dyn Fn(&str, u64, u64)) -> Result<Model> {
    let mut m = volume::read(devices)?;
    prepare::hand_over(prepared, &mut m);
    let domains = std::mem::take(&mut m.domains);
    let total = domains.len();
    let threads = if m.bat.len() < SMALL_GROUPS { 1 } else { cpus().min(total).max(1) };
    let todo: Vec<Mutex<Option<Domain>>> = domains.into_iter().map(|d| Mutex::new(Some(d))).collect();
    let shown = |done| progress("domains", done, total as u64);
    let done = each(threads, total, shown, Vec::new, |done, i| {
        if let Some(mut domain) = todo[i].lock().take() {
            let mut log = Log::of(domain.number);
            let inodes = scan_domain(&m, &mut log, &mut domain);
            done.push((domain, inodes, log));
        }
        Ok::<(), Infallible>(())
    });
    let mut done: Vec<_> = done.unwrap_or_else(|never| match never {}).into_iter().flatten().collect();
    done.sort_by_key(|(domain, ..)| domain.number);
    for (domain, inodes, mut log) in done {
        m.domains.push(domain);
        m.inodes.append(inodes);
        m.log.findings.append(&mut log.findings);
    }
    progress("names", 0, 1);
    names::check(&mut m);
    tenants_have_roots(&mut m);
    scratch_roots_are_kept(&mut m);
    m.inodes.holds()?;
    progress("names", 1, 1);
    Ok(m)
}

/// A tenant whose root directory is not there is none.
fn tenants_have_roots(m: &mut Model) {
    for d in &mut m.domains {
        let Some(h) = d.header.as_mut().filter(|h| h.tenant_root.get() > 0) else { continue };
        let (root, generation) = (InodeNo(h.tenant_root.get()), h.tenant_generation.get());
        if m.inodes.get(root).is_some_and(|i| i.is_dir() && i.generation() == generation) {
            continue;
        }
        let why = tenant::rootless(h);
        tenant::clear(h);
        d.header_dirty = true;
        let mut log = Log::of(d.number);
        log.add(codes::TENANT, None, why);
        m.log.findings.append(&mut log.findings);
    }
}

/// A tenant without a journal whose directory has another name than its header keeps gets a journal: it would come back in a
/// place that is not there.
fn scratch_roots_are_kept(m: &mut Model) {
    for i in 0..m.domains.len() {
        let Some(mut h) = m.domains[i].header.filter(DomainHeader::is_scratch) else { continue };
        let is = m.body(InodeNo(h.tenant_root.get())).map(|root| root.inode.links.clone());
        if is == tenant::kept_links(&h) {
            continue;
        }
        tenant::journaled(&mut h);
        let d = &mut m.domains[i];
        (d.header, d.header_dirty) = (Some(h), true);
        let mut log = Log::of(d.number);
        log.add(codes::TENANT, None, "the directory of a tenant without a journal has another name than is kept of it");
        m.log.findings.append(&mut log.findings);
    }
}

/// Codes that an old node table may be behind: then a newer record of a node may lie somewhere.
const DOUBTS: [u32; 9] = [
    codes::ENTRY_OLD,
    codes::ENTRY_PLACE,
    codes::NODE_BLOCK,
    codes::RECORD,
    codes::NODE_BLOCK_OLD,
    codes::OVERFLOW_MISSING,
    codes::LEAKED,
    codes::NOT_MARKED,
    codes::LIVE_COUNT,
];

/// Checks one domain by itself; where that makes the node table doubtful, once more with the records of all node
/// blocks.
fn scan_domain(m: &Model, log: &mut Log, domain: &mut Domain) -> Inodes {
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

fn scan_with(m: &Model, log: &mut Log, domain: &mut Domain, doubt: bool) -> Inodes {
    let store = &*m.store;
    tables::read_groups(store, log, domain, &m.bat);
    tables::take_found(store, domain);
    tables::recover_entries(store, log, domain, doubt);
    if domain.header.is_none() {
        repair::rebuild_header(store, domain);
        prepare::name_given_up(store, domain, log);
    }
    let (mut inodes, adopted) = nodes::read(store, log, domain, m.inodes.like());
    shared::drop_old_blocks(store, log, domain, &adopted, &mut inodes);
    shared::resolve_shared(store, log, domain, &mut inodes);
    nodes::drop_blank_links(store, log, domain, &mut inodes);
    dirs::check(store, log, domain, &mut inodes);
    space::check(store, log, domain, &inodes);
    inodes
}

/// Counts, and gives the findings their paths.
fn count(m: &mut Model) -> FsckReport {
    let mut r = FsckReport::default();
    m.inodes.select(|_, i| {
        r.count(u32::from(i.kind()) << 12);
        false
    });
    r.blocks_total = blocks_total(m);
    for d in &m.domains {
        let used = Used::of(d, &m.inodes);
        let blocks = |group: &u32| used.group(&m.store, *group).iter().map(|c| u64::from(c.len)).sum::<u64>();
        r.blocks_used += d.groups.keys().map(blocks).sum::<u64>();
    }
    r.findings = m.log.findings.clone();
    let mut names = Names::default();
    for f in &mut r.findings {
        f.path = f.node.and_then(|n| m.path(InodeNo(n), &mut names));
        if f.domain.is_none() {
            f.domain = f.node.and_then(|n| m.domain_of(InodeNo(n)));
        }
    }
    r
}

/// Checks the volume on `devices`, changes nothing, and also compares file data with its checksums. `replay` replays
/// the journals of a volume that was not unmounted, in memory. `progress` is called with the phase, steps done and
/// steps.
///
/// # Errors
/// As [`check`].
pub fn scrub(
    devices: &[Arc<dyn Device>],
    replay: &dyn Replay,
    progress: &dyn Fn(&str, u64, u64),
) -> Result<ScrubReport> {
    let how = How::of(&FsckOptions { repair: false, force: true }, &Limits::default());
    let mut out = ScrubReport::default();
    let (report, _) = check_with(devices, &how, replay, progress, Some(&mut out))?;
    out.inodes = report.files + report.dirs + report.symlinks + report.other;
    out.findings = report.findings;
    out.notes = report.notes;
    Ok(out)
}
