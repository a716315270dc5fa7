//! `crash`: all crash tests, with progress. `crash --help` tells the options.

use braidfs::Placement;
use braidfs_testkit::crash::explore::{Limits, explore};
use braidfs_testkit::crash::workload::{base, sequences};
use std::process::ExitCode;
use std::time::{Duration, Instant};

const HELP: &str = "\
crash: runs all sequences of one and two operations, and judges the volume after every crash.

  --length N      operations per sequence, 1 or 2 (default: 2)
  --per-point N   crashes at each point of the log (default: 100)
  --deep N        fsck and mount again after each Nth crash (default: 1)
  --seconds N     stop after N seconds
  --states N      stop after N crashes
  --failures N    stop after N failing sequences (default: 10)
  --seed N        of the random choices (default: a new one, printed)
  --threads N     (default: one per CPU)";

fn run() -> Result<bool, String> {
    let mut limits = Limits { seed: fastrand::u64(..), ..Limits::default() };
    let mut length = 2;
    let mut args = lexopt::Parser::from_env();
    while let Some(arg) = args.next().map_err(|e| e.to_string())? {
        use lexopt::Arg::Long;
        let Long(name) = arg else { return Err(format!("unexpected argument; {HELP}")) };
        let name = name.to_owned();
        if name == "help" {
            println!("{HELP}");
            return Ok(true);
        }
        let text = args.value().map_err(|e| e.to_string())?;
        let n: u64 = text.to_string_lossy().parse().map_err(|_| format!("--{name} needs a number"))?;
        match name.as_str() {
            "length" => length = n as usize,
            "per-point" => limits.per_point = n as usize,
            "deep" => limits.deep_every = n,
            "seconds" => limits.time = Duration::from_secs(n),
            "states" => limits.states = n,
            "failures" => limits.failures = n as usize,
            "seed" => limits.seed = n,
            "threads" => limits.threads = n as usize,
            _ => return Err(format!("unknown option --{name}; {HELP}")),
        }
    }
    let mut bases = Vec::new();
    for placement in [Placement::Dirs, Placement::Spread] {
        for dirty in [false, true] {
            bases.push(base(placement, dirty).map_err(|e| format!("the volume to begin with: {e}"))?);
        }
    }
    let all = sequences(length);
    println!("seed {}, {} sequences on {} volumes", limits.seed, all.len(), bases.len());
    let (start, total) = (Instant::now(), all.len() * bases.len());
    let report = explore(&bases, &all, &limits, &|n, states, failed| {
        let rate = states as f64 / start.elapsed().as_secs_f64();
        println!("{n} of {total} sequences, {states} crashes ({rate:.0}/s), {failed} failures");
    });
    for f in &report.failures {
        println!("FAILED: {f}\n");
    }
    let rate = report.states as f64 / report.time.as_secs_f64();
    println!(
        "{} sequences, {} crashes, {rate:.0} per second, {} failures",
        report.sequences,
        report.states,
        report.failures.len()
    );
    Ok(report.failures.is_empty())
}

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            eprintln!("crash: {e}");
            ExitCode::from(2)
        }
    }
}
