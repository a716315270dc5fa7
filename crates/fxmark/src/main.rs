//! `fxmark`: the benchmark as a program of its own.

use clap::Parser;
use std::process::ExitCode;

#[derive(Debug, Parser)]
#[command(name = "fxmark", version)]
struct Cli {
    #[command(flatten)]
    args: fxmark::cli::Args,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    match fxmark::cli::main(&cli.args, &[]) {
        Ok(code) => code.into(),
        Err(e) => {
            eprintln!("fxmark: {e}");
            e.code().into()
        }
    }
}
