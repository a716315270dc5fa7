//! `braidfs bench`: the benchmark of the crate `fxmark`, with the same arguments.

use crate::failure::{Failure, Outcome};

/// Runs it. This program mounts what is to be mounted, whatever its name is.
pub fn run(mut args: Box<fxmark::cli::Args>) -> Outcome {
    if let Ok(this) = std::env::current_exe() {
        args.default_braidfs(this);
    }
    fxmark::cli::main(&args, &["bench"]).map_err(|e| Failure::new(e.to_string()).with_code(e.code()))
}
