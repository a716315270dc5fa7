//! `braidfs scrub`: finds and mends stale entries and lost links between domains.

use crate::failure::Outcome;
use crate::{open, text};
use std::path::PathBuf;

/// Find and mend what a crash left between domains: stale entries, lost links
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  braidfs scrub disk.img\n\n\
    A mounted volume does this by itself in the background; after damage use `braidfs fsck`.")]
pub struct Args {
    /// Print nothing
    #[arg(short, long)]
    quiet: bool,
    /// All devices of the volume
    #[arg(required = true, value_name = "DEVICE")]
    devices: Vec<PathBuf>,
}

/// Runs it.
pub fn run(args: &Args) -> Outcome {
    let volume = open::volume(&args.devices, true)?;
    let mended =
        volume.collect_stale().map_err(|e| open::explain("scrub failed on", &open::expand(&args.devices), &e))?;
    open::close(volume)?;
    if !args.quiet {
        let entries = text::count(mended, "entry", "entries");
        crate::say(format_args!("{}: {entries} mended", open::show(&args.devices)))?;
    }
    Ok(0)
}
