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

use crate::home;
use crate::report::{Finding, Log, ScrubReport};
use crate::rules::Rules;
use crate::rules::group::{has_owners, owners, parse_group};
use crate::rules::volume::{bat_pair, bat_pairs, bat_place, domain_header, header_place, superblock};
use braidfs_device::BLOCK_BYTES;
use braidfs_format::{DomainId, NodeId};
use braidfs_store::Store;
use braidfs_store::interface::{LiveVolume, Still};
use std::time::{Duration, Instant};

/// Findings that are kept; of the others there is a note.
const FINDINGS_MAX: usize = 10_000;
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
        let name = |at| self.volume.first_link(at).map(|l| (l.parent, String::from_utf8_lossy(&l.name).into_owned()));
        let path = node.and_then(|n| home::path(n, name));
        let node = node.map(|n| n.0);
        tracing::error!(code, domain, node, path, "scrub: {message}");
        self.report.findings.push(Finding { code, domain, node, path, message, fixed: false });
    }

    /// Notes what `look` finds. What it finds while the volume is in use may be half of a change: then it looks once more,
    /// while `what` does not change. `blocks` is what it reads.
    fn look(&mut self, what: Still, domain: Option<DomainId>, blocks: u64, mut look: impl FnMut(&mut Log)) {
        let mut log = Log { domain: domain.map(|d| d.0), ..Log::default() };
        look(&mut log);
        if !log.findings.is_empty() {
            self.volume.hold_still(what, &mut || {
                log.findings.clear();
                look(&mut log);
            });
        }
        for f in log.findings {
            self.find(f.code, f.domain, None, f.message);
        }
        self.spend(blocks);
    }

    /// Superblocks, which are only written where the label or `compat` changes.
    fn supers(&mut self) {
        let (sb, store) = (self.volume.super_block(), self.volume.store());
        for (i, d) in sb.device_table().iter().enumerate() {
            for addr in [0, d.blocks.get().saturating_sub(1)] {
                self.look(Still::Superblocks, None, 1, |log| {
                    superblock(store, log, sb, i, addr);
                });
            }
        }
    }

    /// The group table, while nobody claims a group: it is small.
    fn group_table(&mut self) {
        let (sb, store) = (self.volume.super_block(), self.volume.store());
        for index in 0..bat_pairs(sb) {
            self.look(Still::Bat, None, 2, |log| {
                let pair = log.read_pair(store, bat_place(sb, index).0);
                bat_pair(log, sb, index, &pair);
            });
        }
    }

    fn header(&mut self, d: DomainId) {
        let (sb, store) = (self.volume.super_block(), self.volume.store());
        self.look(Still::Header(d), Some(d), 2, |log| {
            let pair = log.read_pair(store, header_place(sb, d.0));
            domain_header(log, sb, d.0, &pair);
        });
    }

    /// The tables of a group, both copies of each.
    fn group(&mut self, d: DomainId, number: u32) {
        let volume = self.volume;
        let blocks = u64::from(volume.store().geometry.meta_blocks());
        self.look(Still::Tables(d), Some(d), blocks, |log| {
            // a group may leave its domain, with a checkpoint; then it is looked at where it comes, or not at all
            if let Some(epoch) = volume.epoch(d, number) {
                look_at_group(volume.store(), log, d, (number, epoch));
            }
        });
        self.done += blocks;
    }

    fn rules(&self) -> Rules {
        Rules::of(self.volume.super_block())
    }
}

/// The tables of group `number`, which `d` owns by the claim of `epoch`.
fn look_at_group(store: &Store, log: &mut Log, d: DomainId, (number, epoch): (u32, u32)) {
    let g = store.geometry;
    let start = g.group_start(number);
    let image = log.read(store, start, g.meta_blocks().min(store.group_blocks(number)) as usize);
    let group = parse_group(store, log, d.0, (number, epoch), u64::MAX, &image);
    for half in (0..2 * g.segments).filter(|h| has_owners(&group, *h)) {
        let at = (g.owners_addr(number, half / 2, half % 2).0 - start.0) as usize * BLOCK_BYTES;
        owners(store, log, &mut Vec::new(), &group, half, &image[at..][..2 * BLOCK_BYTES]);
    }
}
