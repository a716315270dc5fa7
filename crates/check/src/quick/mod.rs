//! The first pass of a check: says whether a volume holds in every respect, in little memory and one reading.
//!
//! It asks what the full pass asks and no less, but keeps no inode: each is checked as it is read and forgotten. What
//! takes two sides (a name in a directory and the link in the inode; a block of a file and its entry in the owner
//! table) is summed up on either side, and the sums compared ([`multiset`]); blocks are ticked off a bitmap. So it
//! cannot say
//! *what* is wrong with a volume, only that something may be: it answers `None`, and the full pass finds out.
//!
//! Memory: a bit per block of the groups in use; 24 bytes per inode and overflow node, or [`Options::memory`] if that
//! is less (the node tables are then read several times); 16 bytes per directory; 32 more per overflow node (a file has
//! one per some hundred extents); 3 MiB per thread.

pub mod multiset;
mod nodes;
mod state;
mod tables;
mod tree;

use crate::home;
use crate::model::Model;
use crate::parts::domain::Domain;
use crate::rules::{Rules, tenant};
use crate::scan::SMALL_GROUPS;
use crate::threads::{cpus, each};
use braidfs_format::domain::CLEAN;
use braidfs_format::inode::{Inode, Link, decode_links};
use braidfs_format::{InodeNo, NodeId};
use multiset::{Keys, MultisetHash};
pub use state::Outcome;
use state::{Ctx, Doubt, Slot, TableTotals, add, doubt};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};

const THREADS_MAX: usize = 32;

/// What to look at.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Also compare file data with its checksums.
    pub data: bool,
    /// Bytes for the list of inodes.
    pub memory: u64,
}

/// Checks the volume whose own tables are in `m`. `None`: something may be wrong, or was before.
pub fn check(m: &Model, o: &Options, progress: &dyn Fn(&str, u64, u64)) -> Option<Outcome> {
    let whole =
        |d: &Domain| !d.header_dirty && d.recovered.is_empty() && d.header.is_some_and(|h| h.flags.get() & CLEAN != 0);
    if !(m.log.findings.is_empty()
        && m.bat_dirty.is_empty()
        && m.volume_writes.is_empty()
        && m.domains.iter().all(whole))
    {
        return None;
    }
    match run(m, o, progress) {
        Ok(outcome) => Some(outcome),
        Err(Doubt(why)) => {
            tracing::debug!("the quick check leaves it to the full one: {why}");
            None
        }
    }
}

/// The tables, then the inodes, then what must be equal on both sides.
fn run(m: &Model, o: &Options, progress: &dyn Fn(&str, u64, u64)) -> Result<Outcome, Doubt> {
    let claimed: Vec<u32> = (0u32..).zip(&m.bat).filter(|(_, e)| e.domain.is_some()).map(|(g, _)| g).collect();
    // twice as many as CPUs: half of them wait for the device
    let threads = if m.bat.len() < SMALL_GROUPS { 1 } else { (2 * cpus()).clamp(4, THREADS_MAX) };
    let mut cx = Ctx {
        m,
        store: &m.store,
        rules: Rules::of(&m.sb),
        keys: Keys::random().map_err(|e| Doubt(e.to_string()))?,
        data: o.data,
        threads,
        bitmaps: m.bat.iter().map(|_| OnceLock::new()).collect(),
        claimed,
        journals: m.domains.iter().map(|d| d.journal().unwrap_or_default()).collect(),
        overflow_nodes: Vec::new(),
        done: AtomicU64::new(0),
    };
    let most = (o.memory / size_of::<Slot>() as u64).max(1);
    let (lists, totals, nodes_in) = read_tables(&cx, most, progress)?;
    cx.overflow_nodes = totals.overflow_nodes;
    cx.overflow_nodes.sort_unstable_by_key(|o| o.node);
    cx.overflow_nodes.shrink_to_fit();
    let mut sum = check_inodes(&cx, lists, &nodes_in, most, totals.valid, progress)?;
    both_sides(&cx, &mut sum, totals.owners)?;
    let mut outcome = sum.outcome;
    outcome.report.usage.set_whole();
    for f in &mut outcome.report.findings {
        f.path = f.node.and_then(|n| home::path(InodeNo(n), |at| home::first_name(cx.store, at)));
    }
    Ok(outcome)
}

/// Reads the tables of all groups: the nodes in use, by domain, where they are no more than `most`; what the tables come to;
/// and how many nodes the node blocks of each group hold.
fn read_tables(
    cx: &Ctx<'_>,
    most: u64,
    progress: &dyn Fn(&str, u64, u64),
) -> Result<(Option<state::Lists>, TableTotals, Vec<AtomicU32>), Doubt> {
    let nodes_in: Vec<AtomicU32> = cx.m.bat.iter().map(|_| AtomicU32::new(0)).collect();
    let (kept, full) = (AtomicU64::new(0), AtomicBool::new(false));
    let nodes = u64::from(cx.store.geometry().nodes());
    let lists = state::lists(cx, |_| nodes, most);
    let totals = each(
        cx.threads,
        cx.claimed.len(),
        |done| progress("tables", done, cx.claimed.len() as u64),
        || (TableTotals::default(), tables::Reader::new(cx)),
        |(totals, reader), i| {
            let (domain, slots) = reader.group(totals, cx.claimed[i], &nodes_in)?;
            let n = slots.len() as u64;
            if full.load(Relaxed) || kept.fetch_add(n, Relaxed) + n > most {
                full.store(true, Relaxed);
                return Ok(());
            }
            add(&lists, domain, slots)
        },
    )?;
    let mut all = TableTotals::default();
    for (mut s, _) in totals {
        all.owners.join(s.owners);
        all.valid += s.valid;
        all.overflow_nodes.append(&mut s.overflow_nodes);
    }
    Ok(((!full.load(Relaxed)).then_some(lists), all, nodes_in))
}

/// Checks all inodes: those in `lists`, or else group by group, `most` at a time.
fn check_inodes(
    cx: &Ctx<'_>,
    lists: Option<state::Lists>,
    nodes_in: &[AtomicU32],
    most: u64,
    valid: u64,
    progress: &dyn Fn(&str, u64, u64),
) -> Result<nodes::Sum, Doubt> {
    let mut sum = nodes::Sum::default();
    let total = nodes_in.iter().map(|c| u64::from(c.load(Relaxed))).sum::<u64>();
    let shown = |inodes: u64| match cx.data {
        true => progress("data", cx.done.load(Relaxed), valid),
        false => progress("inodes", inodes.min(total), total),
    };
    if let Some(lists) = lists {
        nodes::check(cx, &mut sum, lists, &shown)?;
        return Ok(sum);
    }
    let mut before = 0;
    for window in windows(nodes_in, most) {
        let here = |g: u32| u64::from(nodes_in[g as usize].load(Relaxed));
        let lists = state::lists(cx, |g| if window.contains(&g) { here(g) } else { 0 }, u64::MAX);
        tables::slots_of(cx, &window, &lists)?;
        nodes::check(cx, &mut sum, lists, &|done| shown(before + done))?;
        before += window.map(here).sum::<u64>();
    }
    Ok(sum)
}

/// Compares what the inodes come to with what the tables, the directories and the headers say.
fn both_sides(cx: &Ctx<'_>, sum: &mut nodes::Sum, owners: MultisetHash) -> Result<(), Doubt> {
    if sum.blocks != owners {
        return doubt("the owner tables and the inodes do not name the same blocks");
    }
    if sum.links != sum.entries {
        return doubt("directories and inodes do not name the same names");
    }
    if !sum.root {
        return doubt("there is no root directory");
    }
    if cx.overflow_nodes.iter().any(|o| !o.taken.load(Relaxed)) {
        return doubt("an overflow node is not used");
    }
    if cx.bitmaps.iter().filter_map(OnceLock::get).any(|g| g.left.iter().any(|w| w.load(Relaxed) != 0)) {
        return doubt("blocks are marked valid and not used");
    }
    for h in cx.m.domains.iter().filter_map(|d| d.header.as_ref()).filter(|h| h.tenant_root.get() > 0) {
        let root = InodeNo(h.tenant_root.get()).node();
        if !home::entry(cx.store, root).is_ok_and(|e| tenant::is_root(h, &e)) {
            return doubt("the directory of a tenant is not there");
        }
        if h.is_scratch() && home_links(cx, root) != tenant::kept_links(h) {
            return doubt("the directory of a tenant without a journal has another name than is kept of it");
        }
    }
    tree::reaches_root(std::mem::take(&mut sum.dirs))
}

/// The names of an inode, as its home has them; `None` where something does not hold.
fn home_links(cx: &Ctx<'_>, node: NodeId) -> Option<Vec<Link>> {
    let inode = Inode::decode(&home::node(cx.store, node).ok()?.payload).ok()?;
    let mut links = inode.links;
    for n in inode.link_nodes {
        links.extend(decode_links(&home::node(cx.store, n).ok()?.payload).ok()?);
    }
    Some(links)
}

/// Ranges of groups whose node blocks hold at most `most` nodes in use (more where one group alone does).
fn windows(nodes_in: &[AtomicU32], most: u64) -> Vec<std::ops::Range<u32>> {
    let (mut out, mut start, mut sum) = (Vec::new(), 0u32, 0);
    for (g, n) in (0u32..).zip(nodes_in.iter().map(|c| u64::from(c.load(Relaxed)))) {
        if sum + n > most && g > start {
            out.push(start..g);
            (start, sum) = (g, 0);
        }
        sum += n;
    }
    out.push(start..nodes_in.len() as u32);
    out
}
