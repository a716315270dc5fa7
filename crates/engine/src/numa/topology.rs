//! What the kernel tells of NUMA nodes in sysfs, as far as it counts: nodes with memory and CPUs that the process may use.
//!
//! All of it is text that may be missing or odd (another kernel, a container, a test): what cannot be understood counts as not
//! there, and where that leaves fewer than two nodes there is nothing to place.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Where the kernel shows what it knows of the machine.
const SYSFS: &str = "/sys";
/// Nodes and CPUs with higher numbers are ignored: kernels are built for no more (`MAX_NUMNODES`, `NR_CPUS`).
const NODES_MAX: u32 = 1024;
const CPUS_MAX: u32 = 8192;
/// Bytes that are read of a file at most.
const TEXT_MAX: u64 = 64 << 10;
/// Distance of two nodes where nothing else is told: that of neighbours, as firmware gives it.
const FAR: u32 = 20;
/// Directories above a device's that are looked at for its node: partition, disk, bus and bridges.
const ABOVE_MAX: usize = 24;

/// CPUs and nodes that a process may use; `None`: all.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Allowed {
    /// Numbers of CPUs.
    pub cpus: Option<Vec<u32>>,
    /// Numbers of nodes of which it may have memory.
    pub nodes: Option<Vec<u32>>,
}

impl Allowed {
    /// Of this process, by the affinity of its main thread and its `cpuset`; what is not known is no limit.
    pub fn of_this_process() -> Self {
        let mask = rustix::thread::sched_getaffinity(Some(rustix::process::getpid())).ok();
        let cpus = mask.map(|m| {
            let most = rustix::thread::CpuSet::MAX_CPU;
            (0..most).filter(|c| m.is_set(*c)).map(|c| c as u32).collect()
        });
        let status = text(Path::new("/proc/self/status")).unwrap_or_default();
        let nodes = status.lines().find_map(|l| l.strip_prefix("Mems_allowed_list:")).map(|l| list(l, NODES_MAX));
        Self { cpus, nodes: nodes.filter(|n| !n.is_empty()) }
    }
}

/// A node that memory and threads can be placed on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// As the system counts them; there may be gaps.
    pub number: u32,
    /// CPUs that the process may use, rising: the node's own, and those of nodes without memory that are nearest to it.
    pub cpus: Vec<u32>,
    /// Memory, bytes.
    pub bytes: u64,
    /// Places of the other nodes in [`Topology::nodes`], the nearest first.
    pub others: Vec<usize>,
}

/// The nodes of a machine, see the module.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Topology {
    nodes: Vec<Node>,
    /// Of each node of the machine, also those that do not count: the place of the nearest one that does.
    nearest: BTreeMap<u32, usize>,
    sysfs: PathBuf,
}

/// A node as it is told of.
struct Told {
    cpus: Vec<u32>,
    bytes: u64,
    distances: Vec<u32>,
}

impl Topology {
    /// Of this machine and this process, as they were when it was first asked for.
    pub fn of_machine() -> &'static Self {
        static MACHINE: OnceLock<Topology> = OnceLock::new();
        MACHINE.get_or_init(|| Self::read(Path::new(SYSFS), &Allowed::of_this_process()))
    }

    /// Of a machine whose sysfs is in the directory `sysfs`; what is missing or cannot be understood is not there. Looks at
    /// devices in it later, too ([`Self::of_device`]).
    pub fn read(sysfs: &Path, allowed: &Allowed) -> Self {
        let told = told(&sysfs.join("devices/system/node"));
        let may = |list: &Option<Vec<u32>>, n: u32| list.as_ref().is_none_or(|l| l.contains(&n));
        let mut cpus: BTreeMap<u32, u32> = BTreeMap::new();
        for (number, node) in &told {
            // a CPU is of one node, the first that has it
            node.cpus.iter().filter(|c| may(&allowed.cpus, **c)).for_each(|c| _ = cpus.entry(*c).or_insert(*number));
        }
        let counts = |(n, t): (&u32, &Told)| t.bytes > 0 && may(&allowed.nodes, *n) && cpus.values().any(|of| of == n);
        let numbers: Vec<u32> = told.iter().filter(|t| counts(*t)).map(|(n, _)| *n).collect();
        let column: Vec<u32> = told.keys().copied().collect();
        let distance = |from: &Told, to: u32| {
            let at = column.iter().position(|n| *n == to);
            at.and_then(|at| from.distances.get(at)).copied().unwrap_or(FAR)
        };
        // where several are as near, the one with the lowest number: `min_by_key` takes the first
        let nearest = told.iter().filter_map(|(n, t)| {
            let own = numbers.iter().position(|m| m == n);
            let near = || (0..numbers.len()).min_by_key(|i| distance(t, numbers[*i]));
            Some((*n, own.or_else(near)?))
        });
        let nearest: BTreeMap<u32, usize> = nearest.collect();
        let node = |(place, number): (usize, &u32)| {
            let t = told.get(number)?;
            let mut others: Vec<usize> = (0..numbers.len()).filter(|i| *i != place).collect();
            others.sort_by_key(|i| distance(t, numbers[*i]));
            let own = cpus.iter().filter(|(_, of)| nearest.get(of) == Some(&place)).map(|(c, _)| *c);
            Some(Node { number: *number, cpus: own.collect(), bytes: t.bytes, others })
        };
        let nodes = numbers.iter().enumerate().filter_map(node).collect();
        Self { nodes, nearest, sysfs: sysfs.to_owned() }
    }

    /// The nodes that count, by rising number.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Whether there is anything to place.
    pub fn are_several(&self) -> bool {
        self.nodes.len() > 1
    }

    /// The place of the node that a block device (major and minor number) is at, or of the nearest one that counts; `None`
    /// where the kernel does not know.
    pub fn of_device(&self, (major, minor): (u32, u32)) -> Option<usize> {
        let root = std::fs::canonicalize(&self.sysfs).ok()?;
        // where it really lies: the directories above are its disk's and those of what that is connected to
        let device = std::fs::canonicalize(root.join(format!("dev/block/{major}:{minor}"))).ok()?;
        let above = device.ancestors().take(ABOVE_MAX).take_while(|a| a.starts_with(&root));
        let files = above.flat_map(|a| [a.join("device/numa_node"), a.join("numa_node")]);
        // -1: not known there
        let number = files.filter_map(|f| text(&f)?.trim().parse::<u32>().ok()).next()?;
        self.nearest.get(&number).copied()
    }
}

/// All nodes in this directory, by number.
fn told(dir: &Path) -> BTreeMap<u32, Told> {
    let Ok(entries) = std::fs::read_dir(dir) else { return BTreeMap::new() };
    let number = |name: &str| name.strip_prefix("node").filter(|n| n.bytes().all(|b| b.is_ascii_digit()))?.parse().ok();
    let nodes = entries.flatten().filter_map(|e| {
        let n = number(e.file_name().to_str()?).filter(|n| *n < NODES_MAX)?;
        let at = |file: &str| text(&e.path().join(file)).unwrap_or_default();
        let distances = at("distance").split_ascii_whitespace().map(|d| d.parse().unwrap_or(u32::MAX)).collect();
        Some((n, Told { cpus: list(&at("cpulist"), CPUS_MAX), bytes: memory(&at("meminfo")), distances }))
    });
    nodes.collect()
}

/// Bytes of memory that `meminfo` of a node tells of.
fn memory(meminfo: &str) -> u64 {
    let kib = meminfo.lines().find_map(|l| {
        let mut words = l.split_ascii_whitespace().skip_while(|w| *w != "MemTotal:").skip(1);
        words.next()?.parse::<u64>().ok()
    });
    kib.unwrap_or(0).saturating_mul(1024)
}

/// The numbers below `most` of a list such as `0-3,8`, rising, each once.
fn list(text: &str, most: u32) -> Vec<u32> {
    let mut all = Vec::new();
    for part in text.trim().split(',') {
        let number = |t: &str| t.trim().parse::<u32>().ok();
        let (first, last) = match part.split_once('-') {
            Some((a, b)) => (number(a), number(b)),
            None => (number(part), number(part)),
        };
        if let (Some(first), Some(last)) = (first, last) {
            all.extend(first..=last.min(most - 1));
        }
        // a list may name the same again and again
        if all.len() > most as usize {
            all.sort_unstable();
            all.dedup();
        }
    }
    all.sort_unstable();
    all.dedup();
    all
}

fn text(path: &Path) -> Option<String> {
    let mut bytes = Vec::new();
    File::open(path).ok()?.take(TEXT_MAX).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
pub(crate) mod tests;
