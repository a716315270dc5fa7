//! What the mount does, told to who watches: see [`crate::watch`].

use crate::abi::{self, op};
use crate::control::{SAMPLE_BYTES, SamplePart};
use crate::counters::CODES;
use crate::fs::BraidFs;
use crate::ops::flags::ioctl_out;
use crate::request::{Answer, Handled, Outcome, Request};
use crate::requester;
use crate::watch::processes::Asked;
use crate::watch::sample::{
    Cache, Device, Domain, LAYOUT, Latency, Operation, Process, Quota, Rate, Sample, Serving, Share, Tenant,
};
use braidfs::RateUse;
use braidfs::{DeviceUse, DomainInfo};
use rustix::io::Errno;
use std::collections::{HashMap, VecDeque};
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, FromZeros};

/// Samples that are kept for those who fetch them in parts.
const KEPT: usize = 16;
/// Threads that are told of.
const PROCESSES: usize = 256;

/// One of those that are shared by all who may not know everything is so long good.
const SHARED_FOR: Duration = Duration::from_millis(100);

/// Samples that are kept for those who fetch them in parts.
#[derive(Debug, Default)]
pub(crate) struct Samples {
    /// By who they are for.
    all: Kept,
    restricted: Kept,
    last: u64,
    /// When the last one was begun that is shared.
    shared: Option<Instant>,
}

type Kept = VecDeque<(u64, Arc<[u8]>)>;

impl Samples {
    fn of(&mut self, restricted: bool) -> &mut Kept {
        if restricted { &mut self.restricted } else { &mut self.all }
    }

    fn keep(&mut self, restricted: bool, text: &Arc<[u8]>) -> u64 {
        self.last += 1;
        let token = self.last;
        let kept = self.of(restricted);
        kept.truncate(KEPT - 1);
        kept.push_front((token, text.clone()));
        token
    }

    /// One token of those who know everything is no use to others.
    fn get(&mut self, restricted: bool, token: u64) -> Option<Arc<[u8]>> {
        self.of(restricted).iter().find(|(t, _)| *t == token).map(|(_, text)| text.clone())
    }

    /// The sample that is shared now; `None`: who asks has to make one, which others need not wait for if there is an older one.
    fn shared(&mut self, now: Instant) -> Option<(u64, Arc<[u8]>)> {
        if self.shared.is_none_or(|at| now.saturating_duration_since(at) >= SHARED_FOR) {
            self.shared = Some(now);
            return None;
        }
        self.restricted.front().cloned()
    }
}

impl BraidFs {
    /// Root, and whose the server is, know everything, and may watch. All others share samples without what
    /// others do.
    pub(super) fn sample_ioctl(
        &self,
        req: &Request<'_>,
        arg: &abi::IoctlIn,
        input: &[u8],
        out: &mut Answer,
    ) -> Handled {
        let (asked, _) = SamplePart::read_from_prefix(input).map_err(|_| Errno::INVAL)?;
        let restricted = requester::of_server(req).is_err();
        let (token, text) = match asked.token {
            0 => {
                if !restricted {
                    self.counters.watch(asked.watch_seconds);
                }
                let shared = if restricted { self.samples.lock().shared(Instant::now()) } else { None };
                match shared {
                    Some(shared) => shared,
                    None => {
                        let text: Arc<[u8]> =
                            serde_json::to_vec(&self.sample(restricted)).map_err(|_| Errno::IO)?.into();
                        (self.samples.lock().keep(restricted, &text), text)
                    }
                }
            }
            token => (token, self.samples.lock().get(restricted, token).ok_or(Errno::STALE)?),
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

    /// As of now; `restricted`: without what others do ([`Sample::restricted`]).
    pub(crate) fn sample(&self, restricted: bool) -> Sample {
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
        let by_thread = if restricted { HashMap::new() } else { self.counters.processes() };
        let process = |(thread, a): (u32, Asked)| Process {
            thread,
            requests: a.requests,
            timed: a.timed,
            timed_ns: a.nanos,
            latency: Latency::new(&a.latency),
        };
        let mut by_thread: Vec<(u32, Asked)> = by_thread.into_iter().collect();
        by_thread.sort_by_key(|(thread, a)| (std::cmp::Reverse(a.requests), *thread));
        by_thread.truncate(PROCESSES);
        let processes = by_thread.into_iter().map(process).collect();
        let memory = self.vol.cache_use();
        let tenants = if restricted { Vec::new() } else { self.vol.tenants() };
        let device = |d| device_sample(d, &tenants, restricted);
        let devices = self.vol.device_uses().into_iter().map(device).collect();
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
            parked: self.pacer.parked() as u64,
            operations: (0..CODES).filter(|c| sums[*c].requests > 0).map(operation).collect(),
            domains: self.vol.domains().into_iter().map(|d| self.domain_sample(d, restricted)).collect(),
            cache: Cache {
                budget: memory.budget,
                data: memory.data,
                dirty: memory.dirty,
                index: memory.index,
                hits: memory.hits,
                misses: memory.misses,
            },
            processes,
            pid_namespace: pid_namespace(),
            restricted,
            devices,
            tenants: tenants.into_iter().map(tenant).collect(),
            quotas: if restricted { Vec::new() } else { self.vol.limited_quotas().into_iter().map(quota).collect() },
        }
    }
}

fn quota(q: braidfs::Quota) -> Quota {
    use braidfs::QuotaOwner::{Group, Project, User};
    let l = q.limits;
    Quota {
        user: if let User(n) = q.owner { Some(n) } else { None },
        group: if let Group(n) = q.owner { Some(n) } else { None },
        project: if let Project(n) = q.owner { Some(n) } else { None },
        directory: q.directory.map(|d| d.0),
        used: q.used,
        space: l.space,
        soft_space: l.soft_space,
        inodes: q.inodes,
        inodes_max: l.inodes,
        soft_inodes: l.soft_inodes,
        space_exceeded_since: q.space_exceeded_since,
        inodes_exceeded_since: q.inodes_exceeded_since,
        grace_is_over: q.grace_is_over,
    }
}

impl BraidFs {
    fn domain_sample(&self, d: DomainInfo, restricted: bool) -> Domain {
        Domain { latency: Latency::new(&self.counters.times_of_domain(d.domain)), ..domain(d, restricted) }
    }
}

fn device_sample(d: DeviceUse, tenants: &[braidfs::Tenant], restricted: bool) -> Device {
    let share = |t: &braidfs::Tenant| {
        let (_, bytes) = d.domains.iter().find(|(id, _)| *id == t.domain)?;
        Some(Share { name: t.name.clone(), bytes: *bytes })
    };
    Device {
        device: d.device,
        tenants: tenants.iter().filter_map(share).collect(),
        name: if restricted { String::new() } else { d.name },
        state: if d.drained { "drained" } else { "ok" }.into(),
        bytes: d.bytes,
        free: d.free,
        groups: d.groups,
        free_groups: d.unclaimed,
        errors: d.errors,
    }
}

fn tenant(t: braidfs::Tenant) -> Tenant {
    Tenant {
        name: t.name,
        domain: t.domain.0,
        root: t.root.0,
        used: t.used,
        space: t.budget.space,
        inodes: t.inodes,
        inodes_max: t.budget.inodes,
        cached: t.cached,
        memory_min: t.budget.memory.least,
        memory_max: t.budget.memory.most,
        soft_space: t.budget.soft_space.map(|s| s.space),
        soft_exceeded_since: t.soft_exceeded_since,
        grace_is_over: t.grace_is_over,
        read: rate(t.budget.rates.read(), t.read),
        written: rate(t.budget.rates.write(), t.written),
        serving: Serving {
            ns_per_second: t.budget.serving.map(|r| r.per_second),
            ns: nanos(t.served.used),
            debt_ns: nanos(t.served.debt),
            waits: t.served.waits,
            waited_ns: nanos(t.served.waited),
        },
        journal: t.budget.journal.map(|j| j.name().into()),
        devices: t.budget.devices.numbers().map(|n| n as u16).collect(),
        elsewhere_groups: t.elsewhere.groups,
        elsewhere: t.elsewhere.bytes,
    }
}

fn rate([bytes, requests]: [Option<braidfs::Rate>; 2], used: RateUse) -> Rate {
    Rate {
        bytes_per_second: bytes.map(|r| r.per_second),
        requests_per_second: requests.map(|r| r.per_second),
        bytes: used.bytes,
        requests: used.requests,
        debt_bytes: used.debt[0],
        debt_requests: used.debt[1],
        waits: used.waits,
        waited_ns: nanos(used.waited),
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn domain(d: DomainInfo, restricted: bool) -> Domain {
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
        relocated_blocks: d.relocated_blocks,
        numa_node: d.numa_node,
        failed: d.failed.map(|why| if restricted { String::new() } else { why }),
        latency: Latency::default(),
    }
}

/// The number of this process' pid namespace; 0: not known.
fn pid_namespace() -> u64 {
    static NUMBER: OnceLock<u64> = OnceLock::new();
    *NUMBER.get_or_init(|| std::fs::metadata("/proc/self/ns/pid").map_or(0, |m| m.ino()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::TenantArg;
    use braidfs::device::{Device, MemDevice};
    use braidfs::numa::{Allowed, Binder, Numa, Topology};
    use braidfs::{Cred, InodeNo, MkfsOptions, MountOptions, TenantBudget, Volume};

    #[derive(Debug)]
    struct Nobody;

    impl Binder for Nobody {
        fn bind_memory(&self, _at: usize, _bytes: usize, _node: u32) -> std::io::Result<()> {
            Ok(())
        }
        fn bind_thread(&self, _cpus: &[u32]) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn where_a_domain_is_placed_is_told_where_there_are_several_nodes() {
        let sysfs = tempfile::tempdir().unwrap();
        for n in [0, 3] {
            let node = sysfs.path().join(format!("devices/system/node/node{n}"));
            std::fs::create_dir_all(&node).unwrap();
            std::fs::write(node.join("cpulist"), format!("{n}")).unwrap();
            std::fs::write(node.join("meminfo"), format!("Node {n} MemTotal: 1024 kB")).unwrap();
        }
        let topology = Topology::read(sysfs.path(), &Allowed::default());
        let given = Numa::Given { topology, binder: Arc::new(Nobody) };
        for (numa, told) in [(given, [Some(0), Some(3), Some(0)]), (Numa::Off, [None; 3])] {
            let device: Arc<dyn Device> = Arc::new(MemDevice::new(16_384));
            let o = MkfsOptions { domains: Some(2), group_bytes: Some(4 << 20), ..MkfsOptions::default() };
            braidfs::mkfs::format(std::slice::from_ref(&device), &o).unwrap();
            let v = Volume::mount(vec![device], MountOptions { numa, ..MountOptions::default() }).unwrap();
            let me = Cred::root();
            let t = v.tenant_create(InodeNo::ROOT, b"t", 0o755, "t", TenantBudget::default(), &me).unwrap();
            let domains: Vec<Domain> = v.domains().into_iter().map(|d| domain(d, true)).collect();
            assert_eq!(domains.iter().map(|d| d.numa_node).collect::<Vec<_>>(), told);
            let mut arg = TenantArg::new_zeroed();
            arg.tell_serving(&t);
            assert_eq!((arg.numa_node(), t.numa_node), (told[usize::from(t.domain.0)], t.numa_node));
            v.unmount().unwrap();
        }
    }

    #[test]
    fn the_last_samples_are_kept_each_for_those_it_was_made_for() {
        let mut samples = Samples::default();
        let tokens: Vec<u64> = (0..40u8).map(|n| samples.keep(false, &Arc::from([n]))).collect();
        let other = samples.keep(true, &Arc::from([99]));
        assert_eq!(samples.get(false, tokens[39]).as_deref(), Some(&[39][..]));
        assert_eq!(samples.get(false, tokens[24]).as_deref(), Some(&[24][..]));
        for token in [tokens[23], 0, u64::MAX, other] {
            assert!(samples.get(false, token).is_none());
        }
        assert_eq!(samples.get(true, other).as_deref(), Some(&[99][..]));
        assert!(samples.get(true, tokens[39]).is_none());
        (0..40u8).for_each(|n| _ = samples.keep(true, &Arc::from([n])));
        assert!(samples.get(false, tokens[39]).is_some(), "who may not know everything pushes nothing out");
    }

    #[test]
    fn a_shared_sample_is_made_once_in_a_while() {
        let mut samples = Samples::default();
        let now = Instant::now();
        assert!(samples.shared(now).is_none());
        assert!(samples.shared(now).is_none(), "there is none yet");
        let token = samples.keep(true, &Arc::from([1]));
        assert_eq!(samples.shared(now).map(|s| s.0), Some(token));
        assert!(samples.shared(now + SHARED_FOR).is_none(), "it is old");
        assert_eq!(samples.shared(now + SHARED_FOR).map(|s| s.0), Some(token), "one makes the next");
    }
}
