//! Programs that have to be installed: RocksDB's `db_bench` and DBENCH. They are pinned to the cores of the cell and
//! run in the directory under test; their own figure is taken.

use crate::results::{CpuSplit, Latency, Run};
use crate::run::{Method, Turn};
use crate::suite::{Group, TestId};
use crate::sys::{cpu_times, disk_counters, switches};
use crate::target::program;
use crate::{Error, Result, sys};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Longer than the measured time by so much: setting up and closing.
const MORE: Duration = Duration::from_secs(300);

/// Why a test cannot run here; none where it can, or where it needs no program.
pub fn missing(test: &TestId) -> Option<String> {
    if test.test.group != Group::External {
        return None;
    }
    let name = program_of(test.test.name);
    if program(name).is_none() {
        return Some(format!("{name} is not installed"));
    }
    (name == "dbench" && load_file().is_none()).then(|| "dbench's client.txt is not installed".into())
}

fn program_of(test: &str) -> &'static str {
    if test == "rocksdb" { "db_bench" } else { "dbench" }
}

fn load_file() -> Option<PathBuf> {
    ["/usr/share/dbench/client.txt", "/usr/local/share/client.txt", "/usr/local/share/dbench/client.txt"]
        .iter()
        .map(PathBuf::from)
        .find(|p| p.is_file())
}

/// Runs it once.
///
/// # Errors
/// The program fails, or says nothing that can be understood.
pub fn run(turn: &Turn<'_>, dir: &Path, method: &Method, stop: &AtomicBool, device: Option<&Path>) -> Result<Run> {
    let name = program_of(turn.test.test.name);
    let path = program(name).ok_or_else(|| Error::Unsupported(format!("{name} is not installed")))?;
    // the programs count whole seconds, and dbench has no figure for the first
    let seconds = (method.seconds.ceil() as u64).max(if name == "dbench" { 3 } else { 1 });
    let cpus: Vec<usize> = method.cpus.iter().copied().take(turn.cores).collect();
    let list = cpus.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
    let mut args = vec!["--cpu-list".to_owned(), list, path.display().to_string()];
    if name == "db_bench" {
        args.extend([
            "--benchmarks=overwrite".into(),
            "--compression_type=none".into(),
            format!("--db={}", dir.join("db").display()),
            format!("--threads={}", turn.cores),
            format!("--duration={seconds}"),
            format!("--num={}", method.scale.files * 20),
            "--use_existing_db=0".into(),
            "--histogram=1".into(),
        ]);
    } else {
        let load = load_file().ok_or_else(|| Error::Unsupported("dbench's client.txt is not installed".into()))?;
        args.extend([
            "-c".into(),
            load.display().to_string(),
            "-D".into(),
            dir.display().to_string(),
            "-t".into(),
            seconds.to_string(),
            turn.cores.to_string(),
        ]);
    }
    let (cpu, switched, disk) = (cpu_times(&cpus), switches(), device.and_then(disk_counters));
    let begun = Instant::now();
    let text = output(&args, Duration::from_secs(seconds) + MORE, stop)?;
    let wall = begun.elapsed().as_secs_f64();
    let cpu = cpu_times(&cpus) - cpu;
    let found = if name == "db_bench" { rocksdb(&text) } else { dbench(&text) };
    let Some((ops, throughput, latency)) = found else {
        let last = text.lines().rev().take(5).collect::<Vec<_>>().join(" / ");
        return Err(Error::Other(format!("{name} gave no figure; it said last: {last}")));
    };
    let total = cpu.total().max(1) as f64;
    Ok(Run {
        test: turn.test.to_string(),
        target: turn.target.to_string(),
        cores: turn.cores,
        rep: turn.rep,
        ops,
        secs: if throughput > 0.0 && ops > 0 { ops as f64 / throughput } else { wall },
        throughput,
        fairness: (0.0, 0.0),
        background: None,
        latency,
        cpu: CpuSplit {
            user: cpu.user as f64 / total,
            system: cpu.system as f64 / total,
            idle: cpu.idle as f64 / total,
            iowait: cpu.iowait as f64 / total,
            steal: cpu.steal as f64 / total,
        },
        voluntary: 0,
        involuntary: 0,
        switches: sys::switches().saturating_sub(switched),
        disk: disk.and_then(|before| Some(device.and_then(disk_counters)? - before)),
        settle: None,
        phases: 1,
        daemon: None,
        memory: None,
        lock_waits: Vec::new(),
        windows: Vec::new(),
    })
}

/// Runs a pinned program; both of its outputs.
fn output(args: &[String], limit: Duration, stop: &AtomicBool) -> Result<String> {
    let mut log = tempfile::tempfile().map_err(|e| Error::io("making a file for a program's output", e))?;
    let copy = || log.try_clone().map_err(|e| Error::io("making a file for a program's output", e));
    let mut child = Command::new("taskset")
        .args(args)
        .process_group(0)
        .stdin(Stdio::null())
        .stdout(copy()?)
        .stderr(copy()?)
        .spawn()
        .map_err(|e| Error::io("running taskset (of util-linux)", e))?;
    let begun = Instant::now();
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if stop.load(Ordering::Relaxed) || begun.elapsed() > limit => {
                // the whole group: dbench has children
                if let Some(group) = rustix::process::Pid::from_raw(child.id() as i32) {
                    let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
                }
                let _ = child.wait();
                return Err(if stop.load(Ordering::Relaxed) {
                    Error::Interrupted
                } else {
                    Error::Other(format!("`{}` did not end", args.join(" ")))
                });
            }
            Ok(None) => std::thread::sleep(Duration::from_millis(10)),
            Err(e) => return Err(Error::io("waiting for a program", e)),
        }
    };
    use std::io::{Read, Seek};
    let mut text = Vec::new();
    let read = log.rewind().and_then(|()| log.read_to_end(&mut text));
    read.map_err(|e| Error::io("reading a program's output", e))?;
    let text = String::from_utf8_lossy(&text).into_owned();
    if status.success() {
        return Ok(text);
    }
    let last = text.lines().rev().take(3).collect::<Vec<_>>().join(" / ");
    Err(Error::Command { command: args.join(" "), said: format!("{status}: {last}") })
}

type Figures = (u64, f64, Option<Latency>);

/// `overwrite : 2.345 micros/op 426439 ops/sec 2.0 seconds 852878 operations; 47.2 MB/s`
fn rocksdb(text: &str) -> Option<Figures> {
    let line = text.lines().find(|l| l.starts_with("overwrite") && l.contains("ops/sec"))?;
    let words: Vec<&str> = line.split_ascii_whitespace().collect();
    let before = |unit: &str| {
        let at = words.iter().position(|w| w.trim_end_matches(';') == unit)?;
        words.get(at.checked_sub(1)?)?.parse::<f64>().ok()
    };
    let (rate, seconds) = (before("ops/sec")?, before("seconds"));
    let ops = before("operations").or_else(|| Some(rate * seconds?)).unwrap_or(0.0);
    Some((ops as u64, rate, None))
}

/// `Throughput 640.759 MB/sec  32 clients  32 procs  max_latency=464.544 ms`
fn dbench(text: &str) -> Option<Figures> {
    let line = text.lines().find(|l| l.starts_with("Throughput "))?;
    let rate: f64 = line.split_ascii_whitespace().nth(1)?.parse().ok()?;
    Some((0, rate, None))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_found() {
        let line = "overwrite    :       3.211 micros/op 311403 ops/sec 2.000 seconds 622807 operations;   34.4 MB/s\n";
        assert!(matches!(rocksdb(line), Some((622_807, r, None)) if r == 311_403.0));
        let old = "overwrite    :       3.211 micros/op 311403 ops/sec;   34.4 MB/s\n";
        assert!(matches!(rocksdb(old), Some((0, r, None)) if r == 311_403.0));
        assert!(rocksdb("Keys: 16 bytes").is_none());
        let line = "x\nThroughput 640.759 MB/sec  32 clients  32 procs  max_latency=464.544 ms\n";
        assert!(matches!(dbench(line), Some((0, r, None)) if r == 640.759));
    }
}
