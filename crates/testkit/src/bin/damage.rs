//! `damage`: the damage matrix, with progress. `damage --help` tells the options.

use braidfs_testkit::damage::matrix::{Limits, run};
use braidfs_testkit::damage::sample::{clean, crashed};
use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::Duration;

const HELP: &str = "\
damage: spoils every metadata block of small volumes in every way, mounts, reads, writes, checks and repairs them.

  --seconds N     stop after N seconds
  --one-of N      do one of N cases, chosen by the seed (default: 1, all)
  --flips N       bits flipped per block, one at a time (default: 1)
  --no-pairs      no damage to two blocks at a time
  --served        also list what a mount showed wrongly before a check found it
  --show N        failures listed (default: 20)
  --only TEXT     only cases with TEXT in their description; BRAIDFS_DAMAGE_LOG=1 prints what fsck finds
  --seed N        of the random choices (default: 1)
  --threads N     (default: one per CPU)";

fn main_with(limits: &mut Limits, show: &mut usize, served: &mut bool) -> Result<bool, lexopt::Error> {
    use lexopt::prelude::*;
    let mut args = lexopt::Parser::from_env();
    while let Some(arg) = args.next()? {
        match arg {
            Long("help") => return Ok(false),
            Long("no-pairs") => limits.pairs = false,
            Long("served") => *served = true,
            Long("seconds") => limits.time = Duration::from_secs(args.value()?.parse()?),
            Long("one-of") => limits.one_of = args.value()?.parse()?,
            Long("flips") => limits.flips = args.value()?.parse()?,
            Long("seed") => limits.seed = args.value()?.parse()?,
            Long("threads") => limits.threads = args.value()?.parse()?,
            Long("only") => limits.only = args.value()?.string()?,
            Long("show") => *show = args.value()?.parse()?,
            other => return Err(other.unexpected()),
        }
    }
    Ok(true)
}

fn main() -> ExitCode {
    let (mut limits, mut show, mut served) = (Limits::default(), 20, false);
    match main_with(&mut limits, &mut show, &mut served) {
        Ok(true) => {}
        Ok(false) => {
            println!("{HELP}");
            return ExitCode::SUCCESS;
        }
        Err(e) => {
            eprintln!("damage: {e}; see --help");
            return ExitCode::from(2);
        }
    }
    let samples = match [clean(false), crashed(), clean(true)].into_iter().collect::<Result<Vec<_>, _>>() {
        Ok(s) => s,
        Err(e) => {
            eprintln!("damage: the volumes to damage cannot be made: {e}");
            return ExitCode::FAILURE;
        }
    };
    println!("seed {}", limits.seed);
    let terminal = std::io::stderr().is_terminal();
    let report = run(&samples, &limits, &|done, all, failed| {
        if terminal {
            eprint!("\r{done} of {all} volumes, {failed} failures ");
        } else if done % 500 == 0 {
            println!("{done} of {all} volumes, {failed} failures");
        }
    });
    if terminal {
        eprintln!();
    }
    for f in report.failures.iter().take(show) {
        println!("FAILED: {f}");
    }
    if served {
        for f in report.served.iter().take(show) {
            println!("SERVED: {f}");
        }
    }
    println!("{report}");
    let codes: Vec<String> = report.codes.iter().map(|(c, n)| format!("E{c} {n}")).collect();
    println!("found: {}", codes.join(", "));
    println!("{:.0} s, {} cases left", report.time.as_secs_f64(), report.left);
    if report.failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
