//! `braidfs-fuzz`: runs the targets over their corpus, then over mutations of it, on a stable toolchain.

use braidfs_fuzz::mutate::mutate;
use braidfs_fuzz::{TARGETS, Target};
use clap::Parser;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// The input that a thread is at, and since when.
type Current = Mutex<Option<(Instant, Vec<u8>)>>;

/// An input that takes longer hangs.
const PATIENCE: Duration = Duration::from_secs(30);

/// Runs fuzz targets.
#[derive(Parser)]
#[command(name = "braidfs-fuzz")]
struct Args {
    /// Targets [default: all]
    #[arg(value_name = "TARGET", value_parser = target)]
    targets: Vec<Target>,
    /// How long each target runs
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Seed of the mutations
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Threads [default: one per CPU]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    threads: Option<u16>,
    /// Only this input
    #[arg(long, value_name = "FILE")]
    input: Option<PathBuf>,
}

fn target(name: &str) -> Result<Target, String> {
    TARGETS.iter().find(|t| t.0 == name).copied().ok_or_else(|| format!("there is no target {name}"))
}

fn corpus(name: &str) -> std::io::Result<Vec<Vec<u8>>> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(name);
    let mut files: Vec<PathBuf> = std::fs::read_dir(dir)?.map(|e| e.map(|e| e.path())).collect::<Result<_, _>>()?;
    files.sort();
    files.iter().map(std::fs::read).collect()
}

fn text(p: &(dyn std::any::Any + Send)) -> String {
    let s = p.downcast_ref::<String>().cloned();
    s.or_else(|| p.downcast_ref::<&str>().map(|s| (*s).to_string())).unwrap_or_default()
}

/// Runs one input; what it panicked with.
fn one(target: Target, data: &[u8]) -> Result<(), String> {
    std::panic::catch_unwind(|| target.1(data)).map_err(|p| text(&*p))
}

/// Makes a failing input shorter, for a few seconds.
fn shorten(target: Target, mut data: Vec<u8>) -> Vec<u8> {
    let start = Instant::now();
    let mut step = data.len() / 2;
    while step > 0 && start.elapsed() < Duration::from_secs(10) {
        let mut at = 0;
        while at < data.len() && start.elapsed() < Duration::from_secs(10) {
            let mut less = data.clone();
            less.drain(at..(at + step).min(data.len()));
            if one(target, &less).is_err() {
                data = less;
            } else {
                at += step;
            }
        }
        step /= 2;
    }
    data
}

fn keep(name: &str, data: &[u8], why: &str) {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("artifacts").join(name);
    let sum = data.iter().fold(0xcbf2_9ce4_8422_2325u64, |h, b| (h ^ u64::from(*b)).wrapping_mul(0x100_0000_01b3));
    let path = dir.join(format!("{sum:016x}"));
    let kept = std::fs::create_dir_all(&dir).and_then(|()| std::fs::write(&path, data));
    match kept {
        Ok(()) => println!("FAILED: {name}, input {} ({} bytes): {why}", path.display(), data.len()),
        Err(e) => println!("FAILED: {name}: {why}; the input {data:?} cannot be kept: {e}"),
    }
}

/// Runs a target for its time; failing inputs, each with another message.
fn fuzz(target: Target, a: &Args, corpus: &[Vec<u8>]) -> usize {
    let (start, stop, runs) = (Instant::now(), AtomicBool::new(false), AtomicU64::new(0));
    let seen: Mutex<Vec<(String, Vec<u8>)>> = Mutex::new(Vec::new());
    let threads = a.threads.map_or_else(|| std::thread::available_parallelism().map_or(1, usize::from), usize::from);
    let current: Vec<Current> = (0..threads).map(|_| Mutex::new(None)).collect();
    let lock = |m: &Current, v| *m.lock().unwrap_or_else(|e| e.into_inner()) = v;
    std::thread::scope(|s| {
        for t in 0..threads {
            let (seen, stop, runs, current) = (&seen, &stop, &runs, &current[t]);
            s.spawn(move || {
                let mut rng = fastrand::Rng::with_seed(a.seed.wrapping_mul(1000).wrapping_add(t as u64));
                while !stop.load(Relaxed) {
                    let data = mutate(corpus, &mut rng);
                    lock(current, Some((Instant::now(), data.clone())));
                    let result = one(target, &data);
                    lock(current, None);
                    runs.fetch_add(1, Relaxed);
                    if let Err(why) = result {
                        // the same place fails with other numbers
                        let key: String = why.chars().filter(|c| !c.is_ascii_digit()).take(80).collect();
                        let mut seen = seen.lock().unwrap_or_else(|e| e.into_inner());
                        if !seen.iter().any(|(k, _)| *k == key) {
                            seen.push((key, data.clone()));
                            drop(seen);
                            let short = shorten(target, data);
                            let why = one(target, &short).err().unwrap_or(why);
                            keep(target.0, &short, &why);
                        }
                    }
                }
            });
        }
        while start.elapsed() < Duration::from_secs(a.seconds) {
            std::thread::sleep(Duration::from_millis(200));
            for c in &current {
                let c = c.lock().unwrap_or_else(|e| e.into_inner());
                if let Some((_, data)) = c.as_ref().filter(|(since, _)| since.elapsed() > PATIENCE) {
                    keep(target.0, data, "hangs");
                    std::process::exit(1);
                }
            }
        }
        stop.store(true, Relaxed);
    });
    let failed = seen.into_inner().unwrap_or_default().len();
    let n = runs.into_inner();
    println!("{}: {n} inputs, {:.0} a second, {failed} failures", target.0, n as f64 / start.elapsed().as_secs_f64());
    failed
}

fn main() -> ExitCode {
    let a = Args::parse();
    let targets = if a.targets.is_empty() { &TARGETS[..] } else { &a.targets };
    if let Some(path) = &a.input {
        let data = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        targets.iter().for_each(|t| t.1(&data));
        return ExitCode::SUCCESS;
    }
    std::panic::set_hook(Box::new(|_| {})); // reported with the input
    let mut failed = 0;
    for target in targets {
        let corpus = match corpus(target.0) {
            Ok(c) => c,
            Err(e) => {
                eprintln!("braidfs-fuzz: corpus/{}: {e}", target.0);
                return ExitCode::FAILURE;
            }
        };
        for data in &corpus {
            if let Err(why) = one(*target, data) {
                keep(target.0, data, &why);
                failed += 1;
            }
        }
        failed += fuzz(*target, &a, &corpus);
    }
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
