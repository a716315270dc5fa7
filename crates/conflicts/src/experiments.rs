//! The commands `time`, `project` and `ablations`.

use braidfs_conflicts::ablations::{self, Ablations, SETS};
use braidfs_conflicts::clock::{self, Job, Timed};
use braidfs_conflicts::drive::{self, How};
use braidfs_conflicts::matrix::{Cell, CellId, Domains, Matrix, WORKERS};
use braidfs_conflicts::model::Projection;
use braidfs_conflicts::{Error, Result, page, picture};
use std::path::{Path, PathBuf};

/// Arguments of `time`.
#[derive(Debug, clap::Args)]
pub struct Time {
    /// Tests of the suite, as `braidfs bench` names them
    #[arg(long, value_name = "LIST", default_value = "micro")]
    tests: String,
    /// Numbers of threads
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "1")]
    workers: Vec<usize>,
    /// Sets of switches for experiments, as `none gate slots,arcs all`
    #[arg(long, value_name = "SET", num_args = 1.., default_value = "none")]
    switches: Vec<String>,
    /// Processes of five rounds for each figure, in turn
    #[arg(long, value_name = "N", default_value_t = 3)]
    repetitions: usize,
    /// Write all rounds
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Arguments of `project`.
#[derive(Debug, clap::Args)]
pub struct Project {
    /// What `time --switches none all --json` wrote
    #[arg(long, value_name = "FILE")]
    times: PathBuf,
    /// Tests of the suite, as `braidfs bench` names them
    #[arg(long, value_name = "LIST", default_value = "micro")]
    tests: String,
    /// Processes side by side [default: CPUs]
    #[arg(long, value_name = "N")]
    jobs: Option<usize>,
    /// Where the cells are kept: run, where there is no such directory
    #[arg(long, value_name = "DIR")]
    cells: Option<PathBuf>,
    /// Write the projection
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write tables and picture into the documentation
    #[arg(long, value_name = "DIR")]
    docs: Option<PathBuf>,
}

/// Arguments of `ablations`.
#[derive(Debug, clap::Args)]
pub struct Ablate {
    /// Tests of the suite, as `braidfs bench` names them
    #[arg(long, value_name = "LIST", default_value = "micro")]
    tests: String,
    /// Processes side by side [default: CPUs]
    #[arg(long, value_name = "N")]
    jobs: Option<usize>,
    /// By transfers only
    #[arg(long)]
    no_times: bool,
    /// Take the transfers that an earlier run wrote with --json
    #[arg(long, value_name = "FILE")]
    from: Option<PathBuf>,
    /// Processes of five rounds for each time, in turn
    #[arg(long, value_name = "N", default_value_t = 3)]
    repetitions: usize,
    /// Write everything that was found
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write tables into the documentation
    #[arg(long, value_name = "DIR")]
    docs: Option<PathBuf>,
}

fn write<T: serde::Serialize>(path: &Path, what: &T) -> Result<()> {
    std::fs::write(path, serde_json::to_vec(what)?).map_err(|e| Error::io(path, e))
}

fn tests(list: &str) -> Result<Vec<String>> {
    Ok(fxmark::suite::choose(list)?.iter().map(ToString::to_string).collect())
}

fn show(t: &Timed) {
    let set = if t.switches.is_empty() { "none" } else { &t.switches };
    println!("{:<5}{:>3} {set:<6} {:>8.0} ns", t.test, t.workers, t.median());
}

/// The command `time`: measures and writes what operations take.
pub fn time(args: &Time) -> Result<bool> {
    let mut jobs: Vec<Job> = Vec::new();
    for test in tests(&args.tests)? {
        for &workers in &args.workers {
            let name = |s: &String| if s == "none" { String::new() } else { s.clone() };
            jobs.extend(args.switches.iter().map(|s| (test.clone(), workers, name(s))));
        }
    }
    let times = clock::run(&jobs, args.repetitions.max(1))?;
    times.iter().for_each(show);
    if let Some(path) = &args.json {
        write(path, &times)?;
    }
    Ok(true)
}

fn needs() -> Result<()> {
    match drive::missing() {
        Some(what) => Err(Error::Cell(format!("needs {what}"))),
        None => Ok(()),
    }
}

/// Cells of these tests with a set of switches.
fn cells(tests: &[String], workers: &[usize], domains: &[Domains], set: &str, jobs: Option<usize>) -> Result<Matrix> {
    let how = How { switches: Some(set).filter(|s| !s.is_empty()), ..How::default() };
    let mut wanted = Vec::new();
    for &domains in domains {
        for test in tests {
            wanted.extend(workers.iter().map(|&workers| (CellId::usual(test, workers, domains), how)));
        }
    }
    let tool = drive::build_tool()?;
    let said = if set.is_empty() { "none" } else { set };
    let tell = |c: &Cell| println!("{said:<6} {}", page::cell(c, 0));
    Ok(Matrix { version: Matrix::VERSION, cells: drive::run(&wanted, &tool, super::jobs(jobs), tell)? })
}

/// The command `project`: more cores, from counts and times.
pub fn project(args: &Project) -> Result<bool> {
    let text = std::fs::read(&args.times).map_err(|e| Error::io(&args.times, e))?;
    let times: Vec<Timed> = serde_json::from_slice(&text)?;
    let kept = args.cells.as_ref().filter(|dir| dir.is_dir());
    let [shipped, coarse] = match kept {
        Some(dir) => [Matrix::read(&dir.join("shipped.json"))?, Matrix::read(&dir.join("coarse.json"))?],
        None => {
            needs()?;
            let tests = tests(&args.tests)?;
            [
                cells(&tests, &WORKERS, &Domains::ALL, "", args.jobs)?,
                cells(&tests, &WORKERS, &[Domains::One], "all", args.jobs)?,
            ]
        }
    };
    if let Some(dir) = args.cells.as_ref().filter(|dir| !dir.is_dir()) {
        std::fs::create_dir_all(dir).map_err(|e| Error::io(dir, e))?;
        write(&dir.join("shipped.json"), &shipped)?;
        write(&dir.join("coarse.json"), &coarse)?;
    }
    let projection = Projection::of(&shipped, &coarse, &times)?;
    if let Some(path) = &args.json {
        write(path, &projection)?;
    }
    if let Some(dir) = &args.docs {
        picture::put(dir, &projection)?;
    }
    println!("{}", picture::markdown(&projection));
    Ok(true)
}

/// The command `ablations`: counts and times with mechanisms switched off.
pub fn ablations(args: &Ablate) -> Result<bool> {
    let transfers = match &args.from {
        Some(path) => Ablations::read(path)?.transfers,
        None => {
            needs()?;
            let tests = tests(&args.tests)?;
            let of = |set: &&str| cells(&tests, &[ablations::WORKERS], &[Domains::One], set, args.jobs);
            SETS.iter().map(of).collect::<Result<_>>()?
        }
    };
    let jobs = if args.no_times { Vec::new() } else { ablations::worth_timing(&transfers) };
    let times = clock::run(&jobs, args.repetitions.max(1))?;
    let found = Ablations { version: Ablations::VERSION, transfers, times };
    if let Some(path) = &args.json {
        write(path, &found)?;
    }
    if let Some(dir) = &args.docs {
        found.put(dir)?;
    }
    println!("{}", found.markdown());
    Ok(true)
}
