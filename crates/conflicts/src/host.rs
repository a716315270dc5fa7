//! The process that valgrind runs: takes cells from standard input, runs each in a child, so that all find the same memory.
//!
//! It allocates nothing between two cells: a child's heap would depend on the cells before.

use crate::{Error, Result, cell, client, known};
use braidfs_sync::ablation::{self, Switches};

/// Runs cells until standard input ends. Each is one line `TEST WORKERS DOMAINS WINDOW PLANTED SWITCHES`: the steps of each
/// worker in a window, the name of a planted shared write, and switches for experiments, or a `-` for each. It is answered by
/// a line `ok` or `failed`.
///
/// # Errors
/// Of the pipes.
pub fn main() -> std::io::Result<()> {
    if !client::present() {
        return Err(std::io::Error::other("this is for valgrind's tool `conflicts`: use `braidfs-conflicts run`"));
    }
    let (input, output) = (std::io::stdin(), std::io::stdout());
    let mut line = [0u8; 128];
    loop {
        let n = rustix::io::read(&input, &mut line)?;
        if n == 0 {
            return Ok(());
        }
        let ok = client::in_child(|| report(&String::from_utf8_lossy(&line[..n])))?;
        rustix::io::write(&output, if ok { b"ok\n" } else { b"failed\n" })?;
    }
}

fn report(line: &str) -> bool {
    let done = run(line);
    if let Err(e) = &done {
        eprintln!("{}: {e}", line.trim());
    }
    done.is_ok()
}

fn run(line: &str) -> Result<()> {
    let mut more = line.split_whitespace().skip(3).map(|w| Some(w).filter(|w| *w != "-"));
    let window = more.next().flatten().and_then(|w| w.parse().ok());
    if let Some(planted) = more.next().flatten() {
        plant(planted)?;
    }
    if let Some(names) = more.next().flatten() {
        turn_on(names)?;
    }
    #[cfg(feature = "lock-sections")]
    client::tell_locks();
    match line.strip_prefix("known:").and_then(|k| k.split_whitespace().next()) {
        Some(name) => known::run(name),
        None => cell::run(&line.parse()?, window),
    }
}

/// Turns switches on for this process.
///
/// # Errors
/// There is none of that name, or it is too late.
pub fn turn_on(names: &str) -> Result<()> {
    let switches = Switches::named(names).map_err(|e| Error::Cell(e.to_string()))?;
    if ablation::set(switches) { Ok(()) } else { Err(Error::Cell("switches come too late".into())) }
}

#[cfg(feature = "planted-sharing")]
fn plant(name: &str) -> Result<()> {
    use braidfs::planted::sharing::{Sharing, plant};
    let unknown = || Error::Cell(format!("no planted shared write `{name}`"));
    plant(Sharing::ALL.iter().find(|s| s.1 == name).ok_or_else(unknown)?.0);
    Ok(())
}

#[cfg(not(feature = "planted-sharing"))]
fn plant(_: &str) -> Result<()> {
    Err(Error::Cell("built without the feature planted-sharing".into()))
}
