//! What the kernel tells and does: CPUs, accounts, block devices, the machine. Holds the `unsafe` calls.

mod accounts;
mod cpus;
mod dir;
mod fiemap;
mod machine;
mod mounts;
mod pauses;

pub use accounts::{
    CpuTimes, DiskCounters, Usage, cpu_times, disk_counters, kernel_memory, process_cpu, process_peak, switches,
};
pub use cpus::{allowed, die_with_parent, parse_list, pin, private_mounts};
pub use dir::DirStream;
pub use fiemap::{Extent, extents};
pub use machine::{Machine, drop_caches};
pub use mounts::syncfs_commits;
pub use pauses::PauseWatch;
