//! The machine that a figure belongs to.

use serde::{Deserialize, Serialize};
use std::fs;

/// What the figures depend on.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// Name and version of the kernel.
    pub kernel: String,
    /// Architecture, as `uname -m` has it.
    pub arch: String,
    /// Model of the CPU.
    pub cpu: String,
    /// Number of CPUs online.
    pub cpus: usize,
    /// Size of its memory, bytes.
    pub memory: u64,
    /// Virtual machine or container, where the kernel tells.
    pub hypervisor: Option<String>,
    /// Frequency governor of CPU 0.
    pub governor: Option<String>,
    /// Defences against CPU faults that are on, by name.
    pub mitigations: Vec<String>,
    /// Load average of the last minute at the start: other work on the machine.
    pub load: String,
}

fn line(path: &str) -> Option<String> {
    fs::read_to_string(path).ok().map(|t| t.trim().to_owned()).filter(|t| !t.is_empty())
}

fn field(text: &str, key: &str) -> Option<String> {
    let found = text.lines().find_map(|l| l.split_once(':').filter(|(k, _)| k.trim() == key));
    found.map(|(_, v)| v.trim().to_owned())
}

impl Machine {
    /// The machine that this runs on.
    pub fn here() -> Self {
        let uname = rustix::system::uname();
        let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let memory = field(&fs::read_to_string("/proc/meminfo").unwrap_or_default(), "MemTotal");
        let kib = memory.and_then(|m| m.split(' ').next()?.parse::<u64>().ok()).unwrap_or(0);
        let virtualised = info.lines().any(|l| l.starts_with("flags") && l.contains(" hypervisor"));
        let mut mitigations: Vec<String> = fs::read_dir("/sys/devices/system/cpu/vulnerabilities")
            .into_iter()
            .flatten()
            .flatten()
            .filter(|f| fs::read_to_string(f.path()).is_ok_and(|t| t.starts_with("Mitigation")))
            .filter_map(|f| f.file_name().into_string().ok())
            .collect();
        mitigations.sort();
        Self {
            kernel: format!("{} {}", uname.sysname().to_string_lossy(), uname.release().to_string_lossy()),
            arch: std::env::consts::ARCH.into(),
            cpu: field(&info, "model name").or_else(|| field(&info, "CPU part")).unwrap_or_default(),
            cpus: std::thread::available_parallelism().map_or(1, usize::from),
            memory: kib << 10,
            hypervisor: line("/sys/hypervisor/type").or_else(|| virtualised.then(|| "virtual machine".into())),
            governor: line("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
            mitigations,
            load: line("/proc/loadavg").and_then(|l| Some(l.split(' ').next()?.to_owned())).unwrap_or_default(),
        }
    }

    /// In one line.
    pub fn summary(&self) -> String {
        let vm = self.hypervisor.as_deref().map(|h| format!(" ({h})")).unwrap_or_default();
        let gib = self.memory as f64 / f64::from(1 << 30);
        format!("{} x {}{vm}, {gib:.0} GiB, {}, {}", self.cpus, self.cpu, self.kernel, self.arch)
    }
}

/// Writes everything back and drops the page, dentry and inode caches; whether the kernel let us (root only).
pub fn drop_caches() -> bool {
    rustix::fs::sync();
    fs::write("/proc/sys/vm/drop_caches", "3").is_ok()
}
