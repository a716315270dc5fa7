//! `braidfs bench`: the benchmark of the crate `fxmark`, with the same arguments.

use crate::failure::{Failure, Outcome};

/// As `fxmark --help` has them, by the name that it has here.
pub const EXAMPLES: &str = "Examples:\n  \
    braidfs bench --quick                               everything once: does it work?\n  \
    braidfs bench -t ext4,braidfs -o results.json       two file systems, figures to talk about\n  \
    braidfs bench -t /mnt/a -t /mnt/b --tests MWCM      two directories, one test; no root needed\n  \
    braidfs bench report results.json -o report.html    figures as one HTML page\n  \
    braidfs bench compare before.json after.json        what changed; more than chance?\n\n\
    Without a command the tests of --tests run on each file system of -t that this machine has.";

/// Runs it. This program mounts what is to be mounted, whatever its name is.
pub fn run(mut args: Box<fxmark::cli::Args>) -> Outcome {
    if let Ok(this) = std::env::current_exe() {
        args.default_braidfs(this);
    }
    fxmark::cli::main(&args, &["bench"]).map_err(|e| Failure::new(e.to_string()).with_code(e.code()))
}
