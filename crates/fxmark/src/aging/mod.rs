//! `aging`: what months of use do to a file system, in minutes.
//!
//! A volume is filled to some percent of what df offers, then aged until several times its free space is written: by
//! overwrites of random blocks of large files, or by files that come and go with the sizes of real machines
//! ([`profile`]). The run is cut into slices of the same number of bytes; for each its rate, the times of its operations
//! and what reached the device. Before and after, with nothing cached: how many pieces files lie in, and how fast they are
//! read from their start to their end.
//!
//! All file systems lie on the same device, one after another: load by load and fill by fill the targets take turns, and
//! all of it is done again for each round. One thread works; it is not bound to a CPU. That there is no space is no failure:
//! it is counted. Any other failed operation fails the run.

mod cell;
mod load;
mod picture;
mod profile;
mod report;
mod results;
mod venue;

pub use load::Kind;
pub use profile::Profile;
pub use results::Results;

use crate::lab_args::{LabArgs, parse_size};
use crate::results::Head;
use crate::results_args::ResultsArgs;
use crate::target::{Lab, Target};
use crate::{Error, Result, cli};
use results::{Plan, SCHEMA, VERSION, Volume};
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::Instant;
use venue::{Mounted, Venue};

/// Fill file systems, overwrite and churn until several times the free space is written: what became of them?
#[derive(Debug, clap::Args)]
pub struct Args {
    /// What to age: ext4, xfs, btrfs, f2fs, braidfs (mounted), library (braidfs in process), all, or a directory
    #[arg(short, long = "target", value_name = "TARGET", value_delimiter = ',', default_value = "all")]
    targets: Vec<String>,
    /// What ages them
    #[arg(long, value_enum, value_name = "LOAD,LOAD", value_delimiter = ',', default_value = "overwrite,churn")]
    loads: Vec<Kind>,
    /// How full they are, percent of what df offers when they are empty
    #[arg(long, value_name = "PERCENT,PERCENT", value_delimiter = ',', default_value = "70,80,90,95",
        value_parser = clap::value_parser!(u64).range(1..=99))]
    fill: Vec<u64>,
    /// How often the free space is written
    #[arg(long, value_name = "N", default_value_t = 5.0)]
    times: f64,
    /// Parts of a run, each with figures of its own
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=1000))]
    slices: u64,
    /// Size of the file systems, or of what a directory may take
    #[arg(long, value_name = "BYTES", value_parser = parse_size, default_value = "2G")]
    size: u64,
    /// Overwrites per fsync
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..))]
    fsync_every: u64,
    /// Sizes of files that come and go
    #[arg(long, value_enum, default_value = "agrawal")]
    profile: Profile,
    /// Of these the largest [default: a 64th of --size]
    #[arg(long, value_name = "BYTES", value_parser = parse_size)]
    largest: Option<u64>,
    /// Bytes read from their start to their end, at most
    #[arg(long, value_name = "BYTES", value_parser = parse_size, default_value = "256M")]
    read: u64,
    /// Age a volume no longer than this
    #[arg(long, value_name = "SECONDS", default_value_t = 600.0)]
    limit: f64,
    /// Do all of it so often; figures are medians then
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=100))]
    rounds: u64,
    /// Seed of random numbers
    #[arg(long, default_value_t = 42)]
    seed: u64,
    #[command(flatten)]
    pub(crate) lab: LabArgs,
    #[command(flatten)]
    keep: ResultsArgs,
}

/// Runs it. `before` as in [`cli::main`].
///
/// # Errors
/// Of a file system other than that it has no space; wrong arguments.
pub fn main(args: &Args, before: &[&str]) -> Result<()> {
    let put = |r: &Results, dir: &Path| {
        crate::report::put(&dir.join("aging.md"), "aging", &report::markdown(r))?;
        let at = dir.join("aging.svg");
        std::fs::write(&at, picture::draw(r)).map_err(|e| Error::io(format!("writing {}", at.display()), e))
    };
    args.keep.show((SCHEMA, VERSION), || measure(args, before), put, report::terminal)
}

/// What may be aged. A tmpfs forgets its files when it is unmounted.
fn targets(args: &Args) -> Result<Vec<Target>> {
    let targets = args.lab.targets(&args.targets, &[Target::Ext4NoJournal, Target::Tmpfs])?;
    if targets.contains(&Target::Tmpfs) {
        return Err(Error::Usage("tmpfs: it keeps nothing over an unmount: age something else".into()));
    }
    let fine = |n: f64| n.is_finite() && n > 0.0;
    if !fine(args.times) || !fine(args.limit) {
        return Err(Error::Usage("--times and --limit have to be above nothing".into()));
    }
    Ok(targets)
}

fn measure(args: &Args, before: &[&str]) -> Result<Results> {
    let stop = cli::stop_flag()?;
    let targets = targets(args)?;
    let (dir, media) = args.lab.prepare(&targets, args.size, "age a directory or the library")?;
    let plan = Plan {
        size: args.size,
        media: media.as_ref().map_or_else(|| "directories".into(), |m| m.what().to_owned()),
        fill: args.fill.clone(),
        loads: args.loads.clone(),
        times: args.times,
        slices: args.slices,
        fsync_every: args.fsync_every,
        profile: args.profile,
        largest: args.largest.unwrap_or(args.size / 64),
        read: args.read,
        limit: args.limit,
        rounds: args.rounds,
        seed: args.seed,
    };
    let lab = args.lab.lab(media, dir.path().to_path_buf(), args.size, before);
    let results = run(&lab, plan, &targets, args, &stop);
    // the device before the directory that it lies in
    drop(lab);
    results
}

fn run(lab: &Lab, plan: Plan, targets: &[Target], args: &Args, stop: &AtomicBool) -> Result<Results> {
    let began = Instant::now();
    let mut results = Results { head: Head::now(SCHEMA, VERSION, plan, targets), volumes: Vec::new() };
    for round in 0..args.rounds {
        for &fill in &args.fill {
            for &load in &args.loads {
                for (i, target) in targets.iter().enumerate() {
                    let (volume, setup) = age(lab, &results.head.plan, target, (load, fill, round), stop)?;
                    eprintln!("fxmark: {}", report::line(&volume));
                    results.volumes.push(volume);
                    results.head.targets[i].setup = setup;
                    results.head.took = began.elapsed().as_secs_f64();
                    args.keep.keep(&results)?;
                }
            }
        }
    }
    Ok(results)
}

fn age(
    lab: &Lab,
    plan: &Plan,
    target: &Target,
    which: (Kind, u64, u64),
    stop: &AtomicBool,
) -> Result<(Volume, Vec<String>)> {
    #[cfg(feature = "braidfs")]
    if *target == Target::Library {
        let media = lab.media.as_ref().ok_or_else(|| Error::Other("the library has no device".into()))?;
        let mut venue = venue::InProcess::new(media.device());
        return Ok((cell::age(&mut venue, plan, target, which, stop)?, venue.setup()));
    }
    let mut venue = Mounted::new(lab, target);
    Ok((cell::age(&mut venue, plan, target, which, stop)?, venue.setup()))
}
