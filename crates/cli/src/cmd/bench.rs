//! `braidfs bench`: the benchmark of the crate `fxmark`, with the same arguments.

use crate::failure::{Failure, Outcome};

/// Runs it.
pub fn run(args: &fxmark::cli::Args) -> Outcome {
    fxmark::cli::main(args, &["bench"]).map_err(|e| Failure::new(e.to_string()).with_code(e.code()))
}
