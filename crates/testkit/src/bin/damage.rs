//! `damage`: the damage matrix, with progress. `damage --help` tells the options.

use braidfs_testkit::damage::matrix::{Limits, run};
use braidfs_testkit::damage::sample::{clean, crashed};
use clap::Parser;
use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::Duration;

/// Spoils every metadata block of small volumes in every way, mounts, reads, writes, checks and repairs them.
#[derive(Parser)]
#[command(name = "damage", after_help = "BRAIDFS_DAMAGE_LOG=1 prints what fsck finds")]
struct Args {
    /// Stop after so many seconds
    #[arg(long)]
    seconds: Option<u64>,
    /// Do one of so many cases, chosen by the seed
    #[arg(long, default_value_t = 1)]
    one_of: usize,
    /// Bits flipped per block, one at a time
    #[arg(long, default_value_t = 1)]
    flips: usize,
    /// No damage to two blocks at a time
    #[arg(long)]
    no_pairs: bool,
    /// Also list what a mount showed wrongly before a check found it
    #[arg(long)]
    served: bool,
    /// At most this many failures are listed
    #[arg(long, default_value_t = 20)]
    show: usize,
    /// Only cases with this text in their description
    #[arg(long, default_value = "", hide_default_value = true)]
    only: String,
    /// Seed of the random choices
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Threads [default: one per CPU]
    #[arg(long, default_value_t = 0, hide_default_value = true)]
    threads: usize,
}

fn main() -> ExitCode {
    let Args { seconds, one_of, flips, no_pairs, served, show, only, seed, threads } = Args::parse();
    let time = seconds.map_or(Duration::MAX, Duration::from_secs);
    let limits = Limits { seed, time, one_of, pairs: !no_pairs, flips, threads, only, ..Limits::default() };
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
