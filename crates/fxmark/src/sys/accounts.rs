//! The kernel's accounts: CPU times, context switches, block device counters.

use serde::{Deserialize, Serialize};
use std::fs;
use std::ops::Sub;
use std::path::Path;

/// CPU time of some CPUs, in ticks of the kernel.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct CpuTimes {
    /// Running programs, niced ones included.
    pub user: u64,
    /// In the kernel, interrupts included.
    pub system: u64,
    /// Doing nothing, with no process that waits for a device.
    pub idle: u64,
    /// Doing nothing while a process waits for a device.
    pub iowait: u64,
    /// Taken by the hypervisor.
    pub steal: u64,
}

impl Sub for CpuTimes {
    type Output = Self;
    fn sub(self, o: Self) -> Self {
        // iowait may run backwards
        Self {
            user: self.user.saturating_sub(o.user),
            system: self.system.saturating_sub(o.system),
            idle: self.idle.saturating_sub(o.idle),
            iowait: self.iowait.saturating_sub(o.iowait),
            steal: self.steal.saturating_sub(o.steal),
        }
    }
}

impl std::ops::AddAssign for CpuTimes {
    fn add_assign(&mut self, o: Self) {
        self.user += o.user;
        self.system += o.system;
        self.idle += o.idle;
        self.iowait += o.iowait;
        self.steal += o.steal;
    }
}

impl CpuTimes {
    /// All of it.
    pub fn total(&self) -> u64 {
        self.user + self.system + self.idle + self.iowait + self.steal
    }
}

/// Times of these CPUs together; zeros where /proc does not say.
pub fn cpu_times(cpus: &[usize]) -> CpuTimes {
    let stat = fs::read_to_string("/proc/stat").unwrap_or_default();
    parse_cpu_times(&stat, cpus)
}

fn parse_cpu_times(stat: &str, cpus: &[usize]) -> CpuTimes {
    let mut sum = CpuTimes::default();
    for line in stat.lines() {
        let mut words = line.split_ascii_whitespace();
        let cpu = words.next().and_then(|w| w.strip_prefix("cpu")).and_then(|n| n.parse::<usize>().ok());
        if !cpu.is_some_and(|c| cpus.contains(&c)) {
            continue;
        }
        let t: Vec<u64> = words.map(|w| w.parse().unwrap_or(0)).collect();
        // user nice system idle iowait irq softirq steal (guest is in user)
        let at = |i: usize| t.get(i).copied().unwrap_or(0);
        sum +=
            CpuTimes { user: at(0) + at(1), system: at(2) + at(5) + at(6), idle: at(3), iowait: at(4), steal: at(7) };
    }
    sum
}

/// CPU time, user and system, of all threads of a process since it started, seconds; none where it has gone.
pub fn process_cpu(pid: u32) -> Option<f64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    Some(parse_process(&stat)? as f64 / rustix::param::clock_ticks_per_second() as f64)
}

fn parse_process(stat: &str) -> Option<u64> {
    // the name may hold anything
    let (_, rest) = stat.rsplit_once(')')?;
    let words: Vec<&str> = rest.split_ascii_whitespace().collect();
    Some(words.get(11)?.parse::<u64>().ok()? + words.get(12)?.parse::<u64>().ok()?)
}

/// Most memory that a process has had at once, bytes; none where it has gone.
pub fn process_peak(pid: u32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    Some(kib(&status, &["VmHWM:"]))
}

/// Memory of the kernel's caches and structures (page cache, buffers, slabs), bytes.
pub fn kernel_memory() -> u64 {
    let info = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    kib(&info, &["Buffers:", "Cached:", "Slab:"])
}

/// Sum of these lines of the kernel's, in bytes.
fn kib(text: &str, names: &[&str]) -> u64 {
    let of = |line: &str| {
        let (name, rest) = line.split_once(char::is_whitespace)?;
        names.contains(&name).then_some(())?;
        rest.split_ascii_whitespace().next()?.parse::<u64>().ok()
    };
    text.lines().filter_map(of).sum::<u64>() << 10
}

/// Context switches of the machine since it started.
pub fn switches() -> u64 {
    let stat = fs::read_to_string("/proc/stat").unwrap_or_default();
    let line = stat.lines().find_map(|l| l.strip_prefix("ctxt "));
    line.and_then(|n| n.trim().parse().ok()).unwrap_or(0)
}

/// What a block device has done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskCounters {
    /// Read requests that it has completed.
    pub reads: u64,
    /// Bytes that these read.
    pub read_bytes: u64,
    /// Write requests that it has completed.
    pub writes: u64,
    /// Bytes that these wrote.
    pub written_bytes: u64,
    /// Flush requests that it has completed.
    pub flushes: u64,
}

impl Sub for DiskCounters {
    type Output = Self;
    fn sub(self, o: Self) -> Self {
        Self {
            reads: self.reads.saturating_sub(o.reads),
            read_bytes: self.read_bytes.saturating_sub(o.read_bytes),
            writes: self.writes.saturating_sub(o.writes),
            written_bytes: self.written_bytes.saturating_sub(o.written_bytes),
            flushes: self.flushes.saturating_sub(o.flushes),
        }
    }
}

impl std::ops::AddAssign for DiskCounters {
    fn add_assign(&mut self, o: Self) {
        self.reads += o.reads;
        self.read_bytes += o.read_bytes;
        self.writes += o.writes;
        self.written_bytes += o.written_bytes;
        self.flushes += o.flushes;
    }
}

/// Counters of `/dev/NAME`; none for what is no whole block device.
pub fn disk_counters(device: &Path) -> Option<DiskCounters> {
    let name = device.file_name()?.to_str()?;
    let text = fs::read_to_string(format!("/sys/class/block/{name}/stat")).ok()?;
    Some(parse_disk(&text))
}

fn parse_disk(text: &str) -> DiskCounters {
    let n: Vec<u64> = text.split_ascii_whitespace().map(|w| w.parse().unwrap_or(0)).collect();
    let at = |i: usize| n.get(i).copied().unwrap_or(0);
    // sectors of 512 bytes, whatever the device has
    DiskCounters { reads: at(0), read_bytes: at(2) * 512, writes: at(4), written_bytes: at(6) * 512, flushes: at(15) }
}

/// Accounts of the calling thread.
#[derive(Debug, Clone, Copy, Default)]
pub struct Usage {
    /// Times that it slept.
    pub voluntary: u64,
    /// Times that it was preempted.
    pub involuntary: u64,
    /// Page faults with I/O.
    pub major_faults: u64,
}

impl Usage {
    /// Of the calling thread, since it began.
    pub fn of_thread() -> Self {
        let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
        // SAFETY: getrusage fills the struct, which is plain old data, valid zeroed, too.
        let usage = unsafe {
            libc::getrusage(libc::RUSAGE_THREAD, usage.as_mut_ptr());
            usage.assume_init()
        };
        Self {
            voluntary: usage.ru_nvcsw as u64,
            involuntary: usage.ru_nivcsw as u64,
            major_faults: usage.ru_majflt as u64,
        }
    }
}

impl Sub for Usage {
    type Output = Self;
    fn sub(self, o: Self) -> Self {
        Self {
            voluntary: self.voluntary - o.voluntary,
            involuntary: self.involuntary - o.involuntary,
            major_faults: self.major_faults - o.major_faults,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proc_stat_of_some_cpus() {
        let stat = "cpu  9 9 9 9\ncpu0 1 2 3 4 5 6 7 8 0 0\ncpu1 10 0 0 10 0 0 0 0 0 0\ncpu10 99 99 99\nctxt 5\n";
        let t = parse_cpu_times(stat, &[0, 1]);
        assert_eq!(t, CpuTimes { user: 13, system: 16, idle: 14, iowait: 5, steal: 8 });
        assert_eq!(t.total(), 56);
    }

    #[test]
    fn process_stat() {
        let stat = "7 (a) b) S 1 7 7 0 -1 4194560 1 2 3 4 55 66 7 8 20 0 9 0 1 2";
        assert_eq!(parse_process(stat), Some(121));
        assert!(process_cpu(std::process::id()).is_some());
    }

    #[test]
    fn memory() {
        let info = "MemTotal:       100 kB\nBuffers:  1 kB\nCached: 20 kB\nSwapCached: 5 kB\nSlab:\t  300 kB\n";
        assert_eq!(kib(info, &["Buffers:", "Cached:", "Slab:"]), 321 << 10);
        assert!(process_peak(std::process::id()).is_some_and(|b| b > 1 << 20) && kernel_memory() > 1 << 20);
    }

    #[test]
    fn block_stat() {
        let d = parse_disk("  10 0 16 3 20 5 80 7 0 1 2 0 0 0 0 4 1\n");
        assert_eq!(d, DiskCounters { reads: 10, read_bytes: 8192, writes: 20, written_bytes: 40960, flushes: 4 });
    }
}
