//! Scrub of a mounted volume: reads every metadata block, and data that has checksums, while the volume is in use.
//!
//! Looks at what is durable, as it lies on the device; what is only in memory or in a journal comes under its eyes when it
//! is committed. All metadata but journals: superblocks and replicas, both copies of the group table, of domain headers
//! and of the tables of all groups; the node block of every node; overflow nodes, extents and directory buckets. What
//! takes two inodes (names against links, blocks used twice) is for a check of the unmounted volume.
//!
//! No false alarm: everything is read without a lock first. Where that does not hold it may have been written meanwhile,
//! so it is looked up and read again at a moment at which it cannot change ([`LiveVolume::hold_still`]), which others wait for:
//! some hundred blocks at most. Only what does not hold then is a finding.

mod inodes;

use super::model::Log;
use super::one::Rules;
use super::pair::PairState;
use super::scrub::ScrubReport;
use super::tables::parse_group;
use super::{Finding, codes};
use braidfs_device::{AlignedBuf, BLOCK_BYTES};
use braidfs_format::NodeId;
use braidfs_format::bat::ENTRIES_PER_BLOCK;
use braidfs_format::domain::DomainHeader;
use braidfs_format::group::{OWNERS_PER_BLOCK, decode_owners};
use braidfs_format::{BlockKind, DomainId, bat};
use braidfs_store::interface::{LiveVolume, Still};
use braidfs_store::super_io;
use std::time::{Duration, Instant};

/// Findings that are kept; of the others there is a note.
const FINDINGS_MAX: usize = 10_000;
/// Directories that a path is followed through.
const DEPTH_MAX: usize = 4096;
/// Longest sleep before the caller is asked whether to go on.
const NAP: Duration = Duration::from_millis(100);

/// How to scrub a mounted volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScrubOptions {
    /// Compare file data with its checksums, where it has some.
    pub data: bool,
    /// Bytes read per second at most; 0: as fast as it goes.
    pub bytes_per_second: u64,
}

impl Default for ScrubOptions {
    fn default() -> Self {
        Self { data: true, bytes_per_second: 0 }
    }
}

/// Reads all metadata of a volume, and data that has checksums, while it is in use, and compares. Changes nothing; memory:
/// some MiB. `progress` is told the phase, blocks done and blocks (a guess), and says whether to go on. What cannot be read
/// is a finding.
pub fn scrub_mounted(
    volume: &dyn LiveVolume,
    options: &ScrubOptions,
    progress: &mut dyn FnMut(&str, u64, u64) -> bool,
) -> ScrubReport {
    let mut s = Scrub {
        volume,
        options: *options,
        progress,
        report: ScrubReport::default(),
        done: 0,
        total: 0,
        due: Instant::now(),
        shown: Instant::now(),
        unlisted: 0,
    };
    s.run();
    let Scrub { mut report, unlisted, .. } = s;
    if unlisted > 0 {
        report.notes.push(format!("{unlisted} more findings are not listed"));
    }
    report
}

struct Scrub<'a> {
    volume: &'a dyn LiveVolume,
    options: ScrubOptions,
    progress: &'a mut dyn FnMut(&str, u64, u64) -> bool,
    report: ScrubReport,
    /// Blocks looked at.
    done: u64,
    /// Blocks in use.
    total: u64,
    /// When the next read may begin.
    due: Instant,
    shown: Instant,
    unlisted: u64,
}

impl Scrub<'_> {
    fn run(&mut self) {
        let volume = self.volume;
        let per_group = u64::from(volume.store().geometry.meta_blocks());
        let domains = || (0..volume.super_block().domains.get()).map(DomainId);
        for d in domains() {
            self.total += volume.used_blocks(d) + per_group * volume.groups(d).len() as u64;
        }
        self.show("volume", true);
        self.supers();
        self.group_table();
        for d in domains() {
            self.header(d);
        }
        for d in domains() {
            for group in volume.groups(d) {
                if self.report.stopped {
                    return;
                }
                self.group(d, group);
                inodes::of_group(self, d, group);
            }
        }
        self.done = self.total;
        self.show("blocks", true);
    }

    /// What `look` gives while `what` does not change on the device.
    fn still<R>(&self, what: Still, mut look: impl FnMut() -> R) -> Option<R> {
        let mut seen = None;
        self.volume.hold_still(what, &mut || seen = Some(look()));
        seen
    }

    /// Tells the caller how far it is, now and then or `now`; notes their wish to stop.
    fn show(&mut self, phase: &str, now: bool) {
        if now || self.shown.elapsed() >= NAP {
            self.shown = Instant::now();
            let done = self.done.min(self.total);
            self.report.stopped |= !(self.progress)(phase, done, self.total);
        }
    }

    /// Counts blocks that were read, and waits as long as the rate asks.
    fn spend(&mut self, blocks: u64) {
        self.report.blocks_read += blocks;
        if self.options.bytes_per_second > 0 {
            let seconds = (blocks * BLOCK_BYTES as u64) as f64 / self.options.bytes_per_second as f64;
            // what was missed is not made up for
            self.due = self.due.max(Instant::now() - NAP) + Duration::from_secs_f64(seconds.min(3600.0));
            while !self.report.stopped
                && let Some(left) = self.due.checked_duration_since(Instant::now())
            {
                std::thread::sleep(left.min(NAP));
                self.show("blocks", false);
            }
        }
        self.show("blocks", false);
    }

    fn find(&mut self, code: u32, domain: Option<u16>, node: Option<NodeId>, message: String) {
        if self.report.findings.len() >= FINDINGS_MAX {
            self.unlisted += 1;
            return;
        }
        let path = node.and_then(|n| self.path(n));
        let node = node.map(|n| n.0);
        tracing::error!(code, domain, node, path, "scrub: {message}");
        self.report.findings.push(Finding { code, domain, node, path, message, fixed: false });
    }

    /// The path of an inode by its first links, as far as it can be told.
    fn path(&self, node: NodeId) -> Option<String> {
        let mut parts: Vec<String> = Vec::new();
        let mut at = node;
        while at != NodeId::ROOT && parts.len() < DEPTH_MAX {
            let link = self.volume.first_link(at)?;
            parts.push(String::from_utf8_lossy(&link.name).into_owned());
            at = link.parent;
        }
        parts.reverse();
        Some(format!("/{}", parts.join("/")))
    }

    /// Superblocks, which are only written where the label or `compat` changes.
    fn supers(&mut self) {
        let (sb, store) = (self.volume.super_block(), self.volume.store());
        for (i, d) in sb.device_table().iter().enumerate() {
            let device = store.device(i);
            for addr in [0, d.blocks.get().saturating_sub(1)] {
                let look = || match super_io::read_at(device, addr) {
                    Ok(s) if super::volume::same(&s, sb, i as u16) => None,
                    Ok(_) => Some("differs from the others".to_string()),
                    Err(e) => Some(e.to_string()),
                };
                if let Some(why) = self.still(Still::Superblocks, look).flatten() {
                    let what = format!("superblock at block {addr} of {}: {why}", device.name());
                    self.find(codes::SUPER_COPY, None, None, what);
                }
                self.spend(1);
            }
        }
    }

    /// The group table, while nobody claims a group: it is small.
    fn group_table(&mut self) {
        let sb = self.volume.super_block();
        let groups = sb.groups.get() as usize;
        for index in 0..groups.div_ceil(ENTRIES_PER_BLOCK as usize) {
            let pair = sb.bat.get() + 2 * index as u64;
            let count = (groups - index * ENTRIES_PER_BLOCK as usize).min(ENTRIES_PER_BLOCK as usize);
            let look = || {
                let mut found = Vec::new();
                let buf = self.read_pair(pair, &mut found);
                let state = PairState::of(&buf, BlockKind::Bat, sb.volume_id(), pair);
                if let Some((copy, why)) = state.damaged() {
                    found.push((codes::BAT_COPY, format!("BAT pair {index}, copy {copy}: {why}")));
                }
                if let Err(e) = bat::decode(&buf, sb.volume_id(), pair, count, sb.domains.get()) {
                    found.push((codes::BAT_LOST, format!("BAT pair {index}: {e}")));
                }
                found
            };
            let mut found = look();
            if !found.is_empty() {
                found = self.still(Still::Bat, look).unwrap_or_default();
            }
            found.into_iter().for_each(|(code, why)| self.find(code, None, None, why));
            self.spend(2);
        }
    }

    fn header(&mut self, d: DomainId) {
        let sb = self.volume.super_block();
        let pair = sb.domain_table.get() + 2 * u64::from(d.0);
        let look = || {
            let mut found = Vec::new();
            let buf = self.read_pair(pair, &mut found);
            let state = PairState::of(&buf, BlockKind::Domain, sb.volume_id(), pair);
            if let Some((copy, why)) = state.damaged() {
                found.push((codes::DOMAIN_COPY, format!("domain header, copy {copy}: {why}")));
            }
            if let Err(e) = DomainHeader::from_pair(&buf, sb.volume_id(), pair, d.0) {
                found.push((codes::DOMAIN_LOST, e.to_string()));
            }
            found
        };
        let found = self.still(Still::Header(d), look).unwrap_or_default();
        found.into_iter().for_each(|(code, why)| self.find(code, Some(d.0), None, why));
        self.spend(2);
    }

    /// A pair of device 0; what cannot be read is noted and counts as zeros.
    fn read_pair(&self, pair: u64, found: &mut Vec<(u32, String)>) -> AlignedBuf {
        let mut buf = AlignedBuf::zeroed(2 * BLOCK_BYTES);
        for (at, block) in (pair..).zip(buf.chunks_mut(BLOCK_BYTES)) {
            if let Err(e) = self.volume.store().device(0).read(at, block) {
                block.fill(0);
                found.push((codes::UNREADABLE, format!("volume block {at} cannot be read: {e}")));
            }
        }
        buf
    }

    /// The tables of a group, both copies of each.
    fn group(&mut self, d: DomainId, number: u32) {
        // a group may leave its domain, with a checkpoint; then it is looked at where it comes, or not at all
        let look = || self.volume.epoch(d, number).map_or_else(Vec::new, |epoch| self.look_at_group(d, number, epoch));
        let mut found = look();
        if !found.is_empty() {
            found = self.still(Still::Tables(d), look).unwrap_or_default();
        }
        for f in found {
            self.find(f.code, Some(d.0), None, f.message);
        }
        let blocks = u64::from(self.volume.store().geometry.meta_blocks());
        self.done += blocks;
        self.spend(blocks);
    }

    fn look_at_group(&self, d: DomainId, number: u32, epoch: u32) -> Vec<Finding> {
        let store = self.volume.store();
        let g = store.geometry;
        let mut log = Log::of(d.0);
        let blocks = g.meta_blocks().min(store.group_blocks(number));
        let start = g.group_start(number);
        let image = log.read(store, start, blocks as usize);
        let group = parse_group(store, &mut log, d.0, (number, epoch), u64::MAX, &image);
        for half in 0..(2 * g.segments).min(group.blocks.div_ceil(OWNERS_PER_BLOCK)) {
            let addr = g.owners_addr(number, half / 2, half % 2);
            let pair = &image[(addr.0 - start.0) as usize * BLOCK_BYTES..][..2 * BLOCK_BYTES];
            let what = || format!("owner table of segment {} (half {}) of group {number}", half / 2, half % 2);
            if let Some((copy, why)) = PairState::of(pair, BlockKind::Owners, store.volume, addr.0).damaged() {
                log.add(codes::OWNERS_COPY, None, format!("{}, copy {copy}: {why}", what()));
            }
            if let Err(e) = decode_owners(pair, store.volume, addr) {
                log.add(codes::OWNERS_LOST, None, format!("{}: {e}", what()));
            }
        }
        log.findings
    }

    fn rules(&self) -> Rules {
        Rules::of(self.volume.super_block())
    }
}
