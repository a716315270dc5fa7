//! A scrub of a volume in use: its rate, its progress, its findings, and the second look at what changes meanwhile.

use crate::home;
use crate::report::{Finding, Log, ScrubReport};
use crate::rules::Rules;
use braidfs_device::BLOCK_BYTES;
use braidfs_format::{DomainId, NodeId};
use braidfs_store::interface::{LiveVolume, Quiesced};
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

/// A scrub under way.
pub struct Scrub<'a> {
    pub volume: &'a dyn LiveVolume,
    pub options: ScrubOptions,
    progress: &'a mut dyn FnMut(&str, u64, u64) -> bool,
    pub report: ScrubReport,
    /// Blocks looked at.
    pub done: u64,
    /// Blocks in use.
    pub total: u64,
    /// When the next read may begin.
    due: Instant,
    shown: Instant,
    unlisted: u64,
}

impl<'a> Scrub<'a> {
    /// One that has done nothing yet.
    pub fn new(
        volume: &'a dyn LiveVolume,
        options: ScrubOptions,
        progress: &'a mut dyn FnMut(&str, u64, u64) -> bool,
    ) -> Self {
        let (report, due, shown) = (ScrubReport::default(), Instant::now(), Instant::now());
        Self { volume, options, progress, report, done: 0, total: 0, due, shown, unlisted: 0 }
    }

    /// What it has found.
    pub fn into_report(mut self) -> ScrubReport {
        if self.unlisted > 0 {
            self.report.notes.push(format!("{} more findings are not listed", self.unlisted));
        }
        self.report
    }

    /// Tells the caller how far it is, now and then or `now`; notes their wish to stop.
    pub fn show(&mut self, phase: &str, now: bool) {
        if now || self.shown.elapsed() >= NAP {
            self.shown = Instant::now();
            let done = self.done.min(self.total);
            self.report.stopped |= !(self.progress)(phase, done, self.total);
        }
    }

    /// Counts blocks that were read, and waits as long as the rate asks.
    pub fn spend(&mut self, blocks: u64) {
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

    pub fn find(&mut self, code: u32, domain: Option<u16>, node: Option<NodeId>, message: String) {
        if self.report.findings.len() >= FINDINGS_MAX {
            self.unlisted += 1;
            return;
        }
        let name = |at| self.volume.first_link(at).map(|l| (l.parent, String::from_utf8_lossy(&l.name).into_owned()));
        // of an overflow node there is none: no inode has its number
        let path = node.and_then(|n| home::path(n.inode(), name));
        let node = node.map(|n| n.0);
        tracing::error!(code, domain, node, path, "scrub: {message}");
        self.report.findings.push(Finding { code, domain, node, path, message, fixed: false });
    }

    /// Notes that a node with many overflow nodes changed during each of so many looks: from logical block `from` on
    /// it was not looked at as a whole.
    pub fn restless(&mut self, domain: DomainId, node: NodeId, looks: u32, from: u64) {
        if self.report.notes.len() < FINDINGS_MAX {
            self.report.notes.push(format!(
                "{node} of domain {} changed each of the {looks} times that its extents were looked at: \
                 whether they hold from block {from} on is not known",
                domain.0
            ));
        }
    }

    /// Notes what `look` finds. What it finds while the volume is in use may be half of a change: then it looks once
    /// more, while `what` does not change. `blocks` is what it reads.
    pub fn look(&mut self, what: Quiesced, domain: Option<DomainId>, blocks: u64, mut look: impl FnMut(&mut Log)) {
        let mut log = Log { domain: domain.map(|d| d.0), ..Log::default() };
        look(&mut log);
        if !log.findings.is_empty() {
            self.volume.quiesce(what, &mut || {
                log.findings.clear();
                look(&mut log);
            });
        }
        for f in log.findings {
            self.find(f.code, f.domain, None, f.message);
        }
        self.spend(blocks);
    }

    /// What the volume asks of every inode.
    pub fn rules(&self) -> Rules {
        Rules::of(&self.volume.super_block())
    }
}
