//! `braidfs-bench`: the benchmarks as a program.

use braidfs_bench::{Result, memory, speed, traffic};
use lexopt::prelude::*;
use std::path::PathBuf;

/// As in `braidfs` itself.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const HELP: &str = "\
Usage: braidfs-bench [speed|traffic|memory]... [options]

  speed    the library beside tmpfs and ext4 (as root; otherwise alone)
  traffic  device bytes per empty file, device writes and flushes per small fsync
  memory   resident set: idle, and after a million files with a small cache
  Without a name: all three.

  --json         results as JSON on standard output
  --dir DIR      where images are made, on a disk (default: /var/tmp)
  --rounds N     rounds of `speed` (default: 5)
  --files N      files per thread of `speed` (default: 20000), files of `memory` (default: 1000000)
  --threads N,N  numbers of threads of `speed` (default: 1,2)
  --alone        `speed` of the library only
  --only VERB    only these operations of `speed`, by the start of their names (again for more)
";

fn main() -> std::process::ExitCode {
    match start() {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("braidfs-bench: {e}");
            std::process::ExitCode::FAILURE
        }
    }
}

fn start() -> Result<()> {
    let (mut what, mut json, mut dir, mut files) = (Vec::new(), false, PathBuf::from("/var/tmp"), None);
    let mut plan = speed::Plan::default();
    let mut args = lexopt::Parser::from_env();
    while let Some(arg) = args.next()? {
        match arg {
            Long("json") => json = true,
            Long("alone") => plan.alone = true,
            Long("only") => plan.verbs.push(args.value()?.string()?),
            Long("dir") => dir = args.value()?.into(),
            Long("rounds") => plan.rounds = args.value()?.parse()?,
            Long("files") => files = Some(args.value()?.parse::<u64>()?),
            Long("threads") => {
                let list = args.value()?.string()?;
                plan.threads = list.split(',').map(str::parse).collect::<std::result::Result<_, _>>()?;
            }
            Short('h') | Long("help") => {
                print!("{HELP}");
                return Ok(());
            }
            Value(v) => what.push(v.string()?),
            other => return Err(other.unexpected().into()),
        }
    }
    if what.is_empty() {
        what = ["speed", "traffic", "memory"].map(String::from).to_vec();
    }
    let mut out = serde_json::Map::new();
    for w in &what {
        let value = match w.as_str() {
            "speed" => {
                plan.files = files.map_or(plan.files, |f| f as usize);
                let lines = speed::run(&dir, &plan)?;
                show(json, "Library speed: ns per operation, median (range)", &speed::table(&lines));
                serde_json::to_value(lines)?
            }
            "traffic" => {
                let creates = traffic::creates(100_000, 10)?;
                show(json, "Device bytes of creating empty files", &traffic::create_table(&creates));
                let fsyncs = traffic::small_fsyncs(100)?;
                show(json, "Device traffic of a small fsync", &traffic::fsync_table(&fsyncs));
                serde_json::json!({ "creates": creates, "fsyncs": fsyncs })
            }
            // memory that other benchmarks have left behind would count: in a process of its own
            "memory" if what.len() > 1 => {
                let mut child = std::process::Command::new(std::env::current_exe()?);
                child.args(["memory", "--json", "--dir"]).arg(&dir).stderr(std::process::Stdio::inherit());
                if let Some(f) = files {
                    child.args(["--files", &f.to_string()]);
                }
                let answer = child.output()?;
                if !answer.status.success() {
                    return Err("the memory benchmark failed".into());
                }
                let answer: serde_json::Value = serde_json::from_slice(&answer.stdout)?;
                let m: memory::Memory = serde_json::from_value(answer["memory"].clone())?;
                show(json, "Resident set", &memory::table(&m));
                serde_json::to_value(m)?
            }
            "memory" => {
                let m = memory::measure(&dir, files.unwrap_or(1_000_000), 64 << 20)?;
                show(json, "Resident set", &memory::table(&m));
                serde_json::to_value(m)?
            }
            other => return Err(format!("{other}: no such benchmark (see --help)").into()),
        };
        out.insert(w.clone(), value);
    }
    if json {
        println!("{}", serde_json::to_string_pretty(&out)?);
    }
    Ok(())
}

fn show(json: bool, title: &str, table: &braidfs_bench::table::Table) {
    if !json {
        println!("{title}\n{table}");
    }
}
