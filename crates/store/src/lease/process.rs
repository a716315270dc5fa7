//! Whether the process that holds a lease runs, as far as that can be told from here.

use super::HELD_HERE;
use braidfs_format::owner::OwnerRecord;
use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};
use std::path::Path;

/// What can be said of a holder from here.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Whereabouts {
    /// A process of this machine, which runs.
    Alive,
    /// A process of this machine, which has ended.
    Dead,
    /// Of another machine, of another PID namespace, or a process that does not show who it is.
    Unknown,
}

pub(super) fn whereabouts(r: &OwnerRecord) -> Whereabouts {
    by_proc(r, Path::new(PROC))
}

/// `proc`: where the processes show.
fn by_proc(r: &OwnerRecord, proc: &Path) -> Whereabouts {
    let me = Process::this();
    let elsewhere = r.boot != me.boot || r.pid_namespace.get() != me.namespace;
    if elsewhere || r.boot == [0; 16] || me.namespace == 0 {
        return Whereabouts::Unknown;
    }
    let pid = r.pid.get();
    if pid == me.pid {
        return if HELD_HERE.lock().contains(&r.nonce) { Whereabouts::Alive } else { Whereabouts::Dead };
    }
    match seen(pid, proc) {
        Seen::Gone => Whereabouts::Dead,
        // the record has 0 where its writer could not see when it began
        Seen::Hidden => Whereabouts::Unknown,
        Seen::Since(_) if r.started.get() == 0 => Whereabouts::Unknown,
        Seen::Since(started) if started == r.started.get() => Whereabouts::Alive,
        Seen::Since(_) => Whereabouts::Dead,
    }
}

/// What tells processes apart.
pub(super) struct Process {
    pub boot: [u8; 16],
    pub pid: u32,
    /// 0 where it does not show.
    pub namespace: u64,
    /// In clock ticks since the boot; 0 where it does not show.
    pub started: u64,
}

impl Process {
    pub fn this() -> Self {
        let mut boot = [0; 16];
        let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let digits: Vec<u8> = text.bytes().filter_map(|b| char::from(b).to_digit(16)).map(|d| d as u8).collect();
        for (byte, pair) in boot.iter_mut().zip(digits.chunks_exact(2)) {
            *byte = pair[0] << 4 | pair[1];
        }
        let namespace = std::fs::metadata("/proc/self/ns/pid").map_or(0, |m| std::os::unix::fs::MetadataExt::ino(&m));
        let pid = std::process::id();
        let started = match seen(pid, Path::new(PROC)) {
            Seen::Since(started) => started,
            Seen::Gone | Seen::Hidden => 0,
        };
        Self { boot, pid, namespace, started }
    }
}

const PROC: &str = "/proc";

/// What is seen of a process.
#[derive(Debug, PartialEq, Eq)]
enum Seen {
    /// It is none, or one that has ended.
    Gone,
    /// There is one, which does not show more: `hidepid`, or a security module.
    Hidden,
    /// When it began, in clock ticks since the boot.
    Since(u64),
}

fn seen(pid: u32, proc: &Path) -> Seen {
    let stat = std::fs::read_to_string(proc.join(format!("{pid}/stat")));
    if let Some(shown) = stat.ok().and_then(|stat| shown(&stat)) {
        return shown;
    }
    // what cannot be read says nothing, the kernel does
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    match pid.map(test_kill_process) {
        Some(Err(Errno::SRCH)) => Seen::Gone,
        _ => Seen::Hidden,
    }
}

/// Of a process's `stat`.
fn shown(stat: &str) -> Option<Seen> {
    // behind the name, which may hold anything: state is the first field, the start the twentieth
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    if matches!(fields.next()?, "Z" | "X") {
        return Some(Seen::Gone);
    }
    fields.nth(18)?.parse().ok().map(Seen::Since)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command};

    fn child() -> Child {
        Command::new("sleep").arg("1000").spawn().unwrap()
    }

    /// A record as another process of this machine writes it.
    fn record_of(pid: u32) -> OwnerRecord {
        let (me, mut r) = (Process::this(), OwnerRecord::empty());
        (r.nonce, r.boot) = ([9; 16], me.boot);
        (r.pid, r.pid_namespace) = (pid.into(), me.namespace.into());
        if let Seen::Since(started) = seen(pid, Path::new(PROC)) {
            r.started = started.into();
        }
        r
    }

    #[test]
    fn a_process_runs_as_long_as_it_shows_the_same_start() {
        let mut child = child();
        let mut r = record_of(child.id());
        assert_eq!(whereabouts(&r), Whereabouts::Alive);
        // its number was given to another one
        r.started = (r.started.get() - 1).into();
        assert_eq!(whereabouts(&r), Whereabouts::Dead);
        r.started = 0.into();
        assert_eq!(whereabouts(&r), Whereabouts::Unknown, "its writer did not see when it began");
        child.kill().unwrap();
        while seen(child.id(), Path::new(PROC)) != Seen::Gone {
            std::thread::yield_now();
        }
        assert_eq!(whereabouts(&r), Whereabouts::Dead, "nobody has waited for it");
        child.wait().unwrap();
        assert_eq!(whereabouts(&r), Whereabouts::Dead);
    }

    /// As with `hidepid`: a process that others cannot see is not taken for one that has ended.
    #[test]
    fn a_process_that_is_hidden_may_run() {
        let mut child = child();
        let (r, nothing) = (record_of(child.id()), Path::new("/proc/self/fdinfo"));
        assert_eq!(by_proc(&r, nothing), Whereabouts::Unknown);
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(by_proc(&r, nothing), Whereabouts::Dead);
    }

    #[test]
    fn numbers_that_no_process_has_say_nothing() {
        for pid in [0, u32::MAX] {
            assert_eq!(seen(pid, Path::new(PROC)), Seen::Hidden);
        }
    }
}
