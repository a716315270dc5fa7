//! Which thread serves the queues of which CPUs.
//!
//! The kernel has a queue for each *possible* CPU and takes rings only when all of them have an entry: also those of CPUs
//! that are not there yet, and of those that this process may not use. A thread runs on each CPU that it may; it owns
//! that CPU's queue, and its share of the others.

use rustix::thread::{CpuSet, sched_getaffinity};
use std::io;

const POSSIBLE: &str = "/sys/devices/system/cpu/possible";

/// CPUs with a thread, and the queues that each owns, its own first.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Plan {
    pub owners: Vec<(usize, Vec<u16>)>,
}

impl Plan {
    pub fn of_this_machine() -> io::Result<Self> {
        let text = std::fs::read_to_string(POSSIBLE)?;
        let bad = || io::Error::new(io::ErrorKind::InvalidData, format!("{POSSIBLE}: {text:?} is no list of CPUs"));
        let possible = parse_list(text.trim()).ok_or_else(bad)?;
        let mine = sched_getaffinity(None)?;
        let usable: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&cpu| mine.is_set(cpu)).collect();
        Ok(Self::new(&possible, &usable))
    }

    fn new(possible: &[u16], usable: &[usize]) -> Self {
        let is_usable = |q: u16| usable.contains(&usize::from(q));
        let mut owners: Vec<(usize, Vec<u16>)> = usable
            .iter()
            .map(|&cpu| (cpu, possible.iter().copied().filter(|&q| usize::from(q) == cpu).collect()))
            .collect();
        for (i, &q) in possible.iter().filter(|&&q| !is_usable(q)).enumerate() {
            let n = owners.len();
            owners[i % n].1.push(q);
        }
        Self { owners }
    }
}

/// Numbers of CPUs from a list as `/sys` has it: `0-3,8`. `None`: it is none.
fn parse_list(text: &str) -> Option<Vec<u16>> {
    let mut cpus = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        cpus.extend(first.parse::<u16>().ok()?..=last.parse().ok()?);
    }
    Some(cpus)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists() {
        assert_eq!(parse_list("0"), Some(vec![0]));
        assert_eq!(parse_list("0-2,8"), Some(vec![0, 1, 2, 8]));
        assert_eq!(parse_list(""), None);
        assert_eq!(parse_list("0-x"), None);
    }

    #[test]
    fn every_queue_has_an_owner() {
        let all = |p: &Plan| {
            let mut q: Vec<u16> = p.owners.iter().flat_map(|o| o.1.clone()).collect();
            q.sort_unstable();
            q
        };
        let p = Plan::new(&[0, 1], &[0, 1]);
        assert_eq!(p.owners, [(0, vec![0]), (1, vec![1])]);
        let p = Plan::new(&[0, 1, 2, 3, 4, 5], &[1, 4]);
        assert_eq!(p.owners, [(1, vec![1, 0, 3]), (4, vec![4, 2, 5])]);
        assert_eq!(all(&p), [0, 1, 2, 3, 4, 5]);
        let p = Plan::new(&[0, 1, 2], &[2]);
        assert_eq!((p.owners.len(), all(&p)), (1, vec![0, 1, 2]));
    }

    #[test]
    fn of_this_machine() {
        let p = Plan::of_this_machine().unwrap();
        assert!(!p.owners.is_empty() && p.owners.iter().all(|o| !o.1.is_empty()), "{p:?}");
    }
}
