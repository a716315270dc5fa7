//! `braidfs-conflicts`: runs the conflict checker. `make conflicts` has the usual arguments.

mod experiments;

use braidfs_conflicts::baseline::{self, Baseline};
use braidfs_conflicts::cell::WINDOW_MIN;
use braidfs_conflicts::drive::How;
use braidfs_conflicts::matrix::{Cell, CellId, Domains, Matrix, WORKERS};
use braidfs_conflicts::{Error, Result, client, clock, drive, host, page};
use clap::Parser;
use experiments::{Ablate, Project, Time};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// As the command of braidfs has it.
#[global_allocator]
static ALLOCATOR: client::Told<mimalloc::MiMalloc> = client::Told(mimalloc::MiMalloc);

/// Counts the cache lines that threads share on the hot paths of braidfs.
#[derive(Debug, Parser)]
#[command(name = "braidfs-conflicts", version)]
enum Cli {
    /// Run cells of the matrix, and compare them with what they may share
    Run(Run),
    /// Show that shared writes on purpose are found (needs the feature `planted-sharing`)
    Planted,
    /// Time tests on the library, in memory, without valgrind
    Time(Time),
    /// Project throughput to 1 to 128 cores (needs the feature `lock-sections`)
    Project(Project),
    /// What each switch for experiments costs, by transfers and by time on two cores
    Ablations(Ablate),
}

#[derive(Debug, clap::Args)]
struct Run {
    /// Tests of the suite, as `braidfs bench` names them
    #[arg(long, value_name = "LIST", default_value = "micro")]
    tests: String,
    /// Numbers of workers [default: 2,4,8,16,32]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    workers: Vec<usize>,
    /// `one` domain for all, or one `each` [default: both]
    #[arg(long, value_name = "one|each")]
    domains: Option<String>,
    /// Processes side by side [default: CPUs]
    #[arg(long, value_name = "N")]
    jobs: Option<usize>,
    /// Steps of each worker in a window, other than the baseline's: nothing is compared then
    #[arg(long, value_name = "N", conflicts_with = "bless")]
    window: Option<usize>,
    /// Show so many cache lines of each cell
    #[arg(long, value_name = "N", default_value_t = 0)]
    lines: usize,
    /// Write everything that was found
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Take what an earlier run wrote with --json, and run nothing
    #[arg(long, value_name = "FILE", conflicts_with_all = ["json", "window"])]
    from: Option<PathBuf>,
    /// Write tables and picture into the documentation
    #[arg(long, value_name = "DIR")]
    docs: Option<PathBuf>,
    /// Make what was found the new baseline
    #[arg(long)]
    bless: bool,
    /// Above a cap of the baseline by how much a cell may be [default: 5]
    #[arg(long, value_name = "PERCENT", conflicts_with = "bless")]
    slack: Option<u32>,
    /// Say so, and succeed, where valgrind is missing
    #[arg(long)]
    skip: bool,
}

fn kept(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

fn main() -> ExitCode {
    // the parser would leave a heap behind that depends on the version of the parser
    if std::env::args_os().nth(1).is_some_and(|a| a == "host") {
        return match host::main() {
            Ok(()) => ExitCode::SUCCESS,
            Err(e) => {
                eprintln!("braidfs-conflicts: {e}");
                ExitCode::from(2)
            }
        };
    }
    let args: Vec<String> = std::env::args().collect();
    let done = if args.get(1).is_some_and(|a| a == "timed") {
        clock::child(&args[2..]).map(|()| true)
    } else {
        match Cli::parse() {
            Cli::Run(args) => run(&args),
            Cli::Planted => planted(),
            Cli::Time(args) => experiments::time(&args),
            Cli::Project(args) => experiments::project(&args),
            Cli::Ablations(args) => experiments::ablations(&args),
        }
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            eprintln!("braidfs-conflicts: {e}");
            ExitCode::from(2)
        }
    }
}

fn cells(args: &Run) -> Result<Vec<CellId>> {
    let tests = fxmark::suite::choose(&args.tests)?;
    let workers = if args.workers.is_empty() { WORKERS.to_vec() } else { args.workers.clone() };
    if workers.iter().any(|n| !(2..=62).contains(n)) {
        return Err(Error::Cell("--workers: 2 to 62".into()));
    }
    if args.window.is_some_and(|w| w < WINDOW_MIN) {
        return Err(Error::Cell(format!("--window: {WINDOW_MIN} or more")));
    }
    let domains: Vec<Domains> = match args.domains.as_deref() {
        None => Domains::ALL.to_vec(),
        Some(name) => {
            let found = Domains::ALL.into_iter().find(|d| d.name() == name);
            vec![found.ok_or_else(|| Error::Cell("--domains: `one` or `each`".into()))?]
        }
    };
    let mut out = Vec::new();
    for &d in &domains {
        for t in &tests {
            out.extend(workers.iter().map(|&workers| CellId::usual(t.to_string(), workers, d)));
        }
    }
    // with the whole matrix, and with what is chosen of it
    if args.window.is_none() && args.workers.is_empty() && domains.contains(&Domains::One) {
        out.extend(CellId::long().filter(|id| tests.iter().any(|t| t.to_string() == id.test)));
    }
    Ok(out)
}

fn jobs(wanted: Option<usize>) -> usize {
    wanted.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from))
}

fn measure(args: &Run) -> Result<Matrix> {
    let ids = cells(args)?;
    let tool = drive::build_tool()?;
    let how = How { window: args.window, ..How::default() };
    let wanted: Vec<(CellId, How<'_>)> = ids.into_iter().map(|id| (id, how)).collect();
    let show = |c: &Cell| println!("{}", page::cell(c, args.lines));
    Ok(Matrix { version: Matrix::VERSION, cells: drive::run(&wanted, &tool, jobs(args.jobs), show)? })
}

/// Whether no cell is worse than the baseline.
fn run(args: &Run) -> Result<bool> {
    if let Some(what) = drive::missing().filter(|_| args.from.is_none()) {
        if args.skip {
            println!("conflicts: SKIPPED, nothing was checked: needs {what}");
            return Ok(true);
        }
        return Err(Error::Cell(format!("needs {what}")));
    }
    let allowed = baseline::read_allowed(&kept("allowed.json"))?;
    let path = kept("baseline.txt");
    let mut caps = match Baseline::read(&path) {
        Err(Error::Io(_, e)) if args.bless && e.kind() == std::io::ErrorKind::NotFound => Baseline::default(),
        read => read?,
    };
    if let Some(percent) = args.slack {
        caps.allow_percent(percent);
    }
    let matrix = match &args.from {
        Some(path) => Matrix::read(path)?,
        None => measure(args)?,
    };
    if let Some(path) = &args.json {
        std::fs::write(path, serde_json::to_vec(&matrix)?).map_err(|e| Error::io(path, e))?;
    }
    if let Some(dir) = &args.docs {
        page::put(dir, &matrix)?;
    }
    if args.window.is_some() {
        return Ok(true);
    }
    if args.bless {
        caps.bless(&matrix.cells, &allowed);
        std::fs::write(&path, caps.text()).map_err(|e| Error::io(&path, e))?;
    }
    let worse: Vec<String> = matrix.cells.iter().flat_map(|c| caps.worse(c, &allowed)).collect();
    for w in &worse {
        println!("WORSE: {w}");
    }
    let better = matrix.cells.iter().filter(|c| caps.better(c, &allowed)).count();
    if better > 0 {
        println!("{better} cells share less than the baseline allows: `make conflicts BLESS=1` keeps it so");
    }
    println!("conflicts: {} cells, {} figures worse than the baseline", matrix.cells.len(), worse.len());
    Ok(worse.is_empty())
}

#[cfg(not(feature = "planted-sharing"))]
fn planted() -> Result<bool> {
    Err(Error::Cell("build it with --features planted-sharing, as `make conflicts-planted` does".into()))
}

/// Whether each shared write on purpose makes its cell worse, and the same cells without it are not.
#[cfg(feature = "planted-sharing")]
fn planted() -> Result<bool> {
    use braidfs::planted::sharing::Sharing;
    if let Some(what) = drive::missing() {
        return Err(Error::Cell(format!("needs {what}")));
    }
    let allowed = baseline::read_allowed(&kept("allowed.json"))?;
    let caps = Baseline::read(&kept("baseline.txt"))?;
    let cell = |s: Sharing| {
        let (test, workers) = match s {
            Sharing::CounterInOpen | Sharing::FlagWritten => ("MRPL", 4),
            Sharing::ArcCloned => ("DRBL", 4),
            Sharing::AddOfZero | Sharing::SameValueStored => ("DWOL", 4),
            Sharing::NeighbourOnLine => ("MRDL", 4),
            Sharing::HeapNeighbour => ("DWAL", 4),
            Sharing::LockTaken => ("DWTL", 4),
            Sharing::InCommit => ("DWOL", 2),
            Sharing::ManyThreads => ("DRBL", 32),
        };
        CellId::usual(test, workers, Domains::One)
    };
    let mut wanted: Vec<(CellId, How<'_>)> = Vec::new();
    for (s, name, _) in Sharing::ALL {
        let planted = How { planted: Some(name), ..How::default() };
        wanted.extend([(cell(*s), How::default()), (cell(*s), planted)]);
    }
    let tool = drive::build_tool()?;
    let found = drive::run(&wanted, &tool, jobs(None), |_| {})?;
    let mut ok = true;
    for ((_, _, what), pair) in Sharing::ALL.iter().zip(found.chunks_exact(2)) {
        let (without, with) = (caps.worse(&pair[0], &allowed), caps.worse(&pair[1], &allowed));
        match (&without[..], &with[..]) {
            ([], [seen, ..]) => println!("found: {what}: {seen}"),
            ([], []) => {
                println!("NOT FOUND: {what}, in {}", pair[1].id);
                ok = false;
            }
            ([seen, ..], _) => {
                println!("WORSE WITHOUT IT: {what}: {seen}");
                ok = false;
            }
        }
    }
    println!(
        "conflicts: {} shared writes on purpose, {}",
        Sharing::ALL.len(),
        if ok { "all found" } else { "see above" }
    );
    Ok(ok)
}
