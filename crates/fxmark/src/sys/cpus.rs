//! CPUs that this process may use, pinning, and how a process is set apart.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::io;

/// The CPUs that this process may use, in order: affinity and cpusets are respected.
///
/// # Errors
/// Where the kernel does not say.
pub fn allowed() -> io::Result<Vec<usize>> {
    let set = sched_getaffinity(None)?;
    Ok((0..CpuSet::MAX_CPU).filter(|&c| set.is_set(c)).collect())
}

/// Keeps the calling thread on one CPU.
///
/// # Errors
/// The CPU is not allowed.
pub fn pin(cpu: usize) -> io::Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu);
    Ok(sched_setaffinity(None, &set)?)
}

/// CPUs as the kernel lists them: `0-3,8`.
///
/// # Errors
/// What is wrong with the text.
pub fn parse_list(text: &str) -> Result<Vec<usize>, String> {
    let number = |t: &str| t.trim().parse::<usize>().map_err(|_| format!("`{t}` is not a CPU: write 0-3,8"));
    let mut cpus = Vec::new();
    for part in text.split(',') {
        match part.split_once('-') {
            Some((a, b)) => {
                let (a, b) = (number(a)?, number(b)?);
                if a > b || b >= CpuSet::MAX_CPU {
                    return Err(format!("`{part}` is no range of CPUs: write 0-3,8"));
                }
                cpus.extend(a..=b);
            }
            None => cpus.push(number(part)?),
        }
    }
    let mut seen = std::collections::HashSet::new();
    match cpus.iter().find(|&&c| !seen.insert(c)) {
        Some(c) => Err(format!("CPU {c} is named twice")),
        None => Ok(cpus),
    }
}

/// This process is killed when its parent ends.
pub fn die_with_parent() {
    // fails for an invalid signal only
    let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
}

/// Mounts made from now on are seen by this process and its children only, and are gone with the last of them.
/// To be called before other threads start.
///
/// # Errors
/// Not root.
pub fn private_mounts() -> io::Result<()> {
    use rustix::mount::{MountPropagationFlags, mount_change};
    // SAFETY: no other thread shares the mount namespace with assumptions about it: callers do this first of all.
    unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNS) }?;
    Ok(mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_parse() {
        assert_eq!(parse_list("0-2,5"), Ok(vec![0, 1, 2, 5]));
        assert_eq!(parse_list("3"), Ok(vec![3]));
        for text in ["", "a", "3-1", "1,1", "0-2,1", "0-99999999"] {
            assert!(parse_list(text).is_err(), "{text}");
        }
    }

    #[test]
    fn pinning_keeps_to_the_allowed() {
        let cpus = allowed().expect("affinity");
        std::thread::spawn(move || {
            pin(cpus[0]).expect("our own CPU");
            assert_eq!(allowed().expect("affinity"), cpus[..1]);
        })
        .join()
        .expect("no panic");
    }
}
