//! What the mount does, told to who watches: see [`crate::watch`].

use crate::abi::{self, op};
use crate::control::{SAMPLE_BYTES, SamplePart};
use crate::counters::CODES;
use crate::fs::BraidFs;
use crate::ops::flags::ioctl_out;
use crate::request::{Answer, Handled, Outcome};
use crate::watch::sample::{Cache, Domain, LAYOUT, Latency, Operation, Process, Sample};
use braidfs::volume::DomainInfo;
use rustix::io::Errno;
use std::collections::VecDeque;
use std::sync::Arc;
use zerocopy::{FromBytes, FromZeros};

/// Samples that are kept for those who fetch them in parts.
const KEPT: usize = 16;
/// Threads that are told of.
const PROCESSES: usize = 256;

/// Samples that were told in part.
#[derive(Debug, Default)]
pub(crate) struct Samples {
    kept: VecDeque<(u64, Arc<[u8]>)>,
    last: u64,
}

impl Samples {
    fn keep(&mut self, text: &Arc<[u8]>) -> u64 {
        self.last += 1;
        self.kept.truncate(KEPT - 1);
        self.kept.push_front((self.last, text.clone()));
        self.last
    }

    fn get(&self, token: u64) -> Option<Arc<[u8]>> {
        self.kept.iter().find(|(t, _)| *t == token).map(|(_, text)| text.clone())
    }
}

impl BraidFs {
    pub(super) fn sample_ioctl(&self, arg: &abi::IoctlIn, input: &[u8], out: &mut Answer) -> Handled {
        let (asked, _) = SamplePart::read_from_prefix(input).map_err(|_| Errno::INVAL)?;
        let (token, text) = match asked.token {
            0 => {
                self.counters.watch(asked.watch_seconds);
                let text: Arc<[u8]> = serde_json::to_vec(&self.sample()).map_err(|_| Errno::IO)?.into();
                (self.samples.lock().keep(&text), text)
            }
            token => (token, self.samples.lock().get(token).ok_or(Errno::STALE)?),
        };
        let rest = usize::try_from(asked.offset).ok().and_then(|at| text.get(at..)).ok_or(Errno::INVAL)?;
        let part = &rest[..rest.len().min(SAMPLE_BYTES)];
        let mut told = SamplePart::new_zeroed();
        (told.layout, told.token, told.offset) = (LAYOUT, token, asked.offset);
        (told.total, told.bytes) = (text.len() as u64, part.len() as u32);
        told.text[..part.len()].copy_from_slice(part);
        ioctl_out(out, arg.out_size as usize, &told)?;
        Ok(Outcome::Reply)
    }

    /// As of now.
    pub(crate) fn sample(&self) -> Sample {
        let sums = self.counters.sum();
        let operation = |code: usize| Operation {
            opcode: code as u32,
            name: match (op::name(code as u32), code) {
                ("?", 0) => "other".into(),
                ("?", code) => format!("#{code}"),
                (name, _) => name.into(),
            },
            requests: sums[code].requests,
            deferred: sums[code].deferred,
            errors: sums[code].errors,
            bytes: sums[code].bytes,
            timed: sums[code].timed,
            timed_ns: sums[code].nanos,
            latency: Latency::new(&self.counters.times(code)),
        };
        let by_thread = self.counters.processes();
        let process = |(thread, (requests, timed_ns))| Process { thread, requests, timed_ns };
        let mut processes: Vec<Process> = by_thread.into_iter().map(process).collect();
        processes.sort_by_key(|p| (std::cmp::Reverse(p.requests), p.thread));
        processes.truncate(PROCESSES);
        let memory = self.vol.cache_use();
        let super_block = self.vol.super_block();
        Sample {
            layout: LAYOUT,
            version: env!("CARGO_PKG_VERSION").into(),
            uptime_ns: u64::try_from(self.counters.uptime().as_nanos()).unwrap_or(u64::MAX),
            uuid: super_block.uuid.iter().map(|b| format!("{b:02x}")).collect(),
            label: super_block.label_str(),
            threads: self.counters.threads() as u32,
            sampled: self.counters.sampled(),
            waiting: self.waiting() as u64,
            operations: (0..CODES).filter(|c| sums[*c].requests > 0).map(operation).collect(),
            domains: self.vol.domains().into_iter().map(domain).collect(),
            cache: Cache {
                budget: memory.budget,
                data: memory.data,
                dirty: memory.dirty,
                index: memory.index,
                hits: memory.hits,
                misses: memory.misses,
            },
            processes,
            tenants: Vec::new(),
        }
    }
}

fn domain(d: DomainInfo) -> Domain {
    Domain {
        domain: d.domain,
        blocks: d.blocks,
        free_blocks: d.free,
        inodes: d.inodes,
        free_inodes: d.inodes_free,
        journal_blocks: d.journal_blocks,
        journal_used: d.journal_used,
        commits: d.commits,
        joiners: d.joiners,
        checkpoints: d.checkpoints,
        fast_syncs: d.fast_syncs,
        cleaned_blocks: d.cleaned_blocks,
        failed: d.failed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_samples_are_kept() {
        let mut samples = Samples::default();
        let tokens: Vec<u64> = (0..40u8).map(|n| samples.keep(&Arc::from([n]))).collect();
        assert_eq!(samples.get(tokens[39]).as_deref(), Some(&[39][..]));
        assert_eq!(samples.get(tokens[24]).as_deref(), Some(&[24][..]));
        assert!(samples.get(tokens[23]).is_none() && samples.get(0).is_none() && samples.get(u64::MAX).is_none());
    }
}
