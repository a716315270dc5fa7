//! `braidfs scrub`: reads everything that has a checksum and says what does not hold; `--mend` finishes what a crash left.

use crate::cmd::fsck::{Bar, line};
use crate::failure::{Outcome, fsck_code};
use crate::{open, text};
use braidfs::fsck::scrub::{ScrubReport, scrub};
use std::io::IsTerminal;
use std::path::PathBuf;

/// Read all metadata, and all data that has checksums, and compare
#[derive(Debug, clap::Args)]
#[command(after_help = "Exit codes: 0 everything holds, 4 something does not, 1 the scrub failed, 2 wrong usage.\n\n\
    Examples:\n  braidfs scrub disk.img           read everything, change nothing\n  \
    braidfs scrub --mend disk.img    drop stale entries between domains, make lost ones again\n\n\
    Data has checksums on volumes made with --data-checksums. The volume must not be mounted for writing;\n\
    a mounted one mends stale entries by itself. After a finding use `braidfs fsck -fy`.")]
pub struct Args {
    /// Instead, mend what a crash left between domains: stale entries, lost links
    #[arg(long, conflicts_with = "json")]
    mend: bool,
    /// Print nothing but what does not hold
    #[arg(short, long)]
    quiet: bool,
    /// The report as JSON
    #[arg(long)]
    json: bool,
    /// A progress bar (the default on a terminal)
    #[arg(short = 'C', long)]
    progress: bool,
    /// All devices of the volume
    #[arg(required = true, value_name = "DEVICE")]
    devices: Vec<PathBuf>,
}

/// Runs it.
pub fn run(args: &Args) -> Outcome {
    if args.mend {
        return mend(args);
    }
    let paths = open::expand(&args.devices);
    let devices = open::devices(&paths, false)?;
    let bar = Bar::new(args.progress || (std::io::stderr().is_terminal() && !args.json && !args.quiet));
    let report = scrub(&devices, &|phase, done, total| bar.show(phase, done, total));
    bar.finish();
    let report = report.map_err(|e| open::explain("cannot scrub", &paths, &e))?;
    let code = if report.findings.is_empty() { fsck_code::CLEAN } else { fsck_code::UNCORRECTED };
    if args.json {
        let mut value = serde_json::json!(report);
        value["exit_code"] = code.into();
        crate::say(format_args!("{value:#}"))?;
    } else if !args.quiet || code != fsck_code::CLEAN {
        crate::say(format_args!("{}", lines(&report, &open::show(&paths))))?;
    }
    Ok(code)
}

fn lines(report: &ScrubReport, place: &str) -> String {
    let mut out = String::new();
    report.findings.iter().for_each(|f| out += &line(place, f));
    report.notes.iter().for_each(|n| out += &format!("{place}: note: {n}\n"));
    let state = match report.findings.len() {
        0 => "everything holds".into(),
        n => text::count(n as u64, "thing does not hold", "things do not hold"),
    };
    let unchecked = match report.data_unchecked {
        0 => String::new(),
        n => format!(", {} without checksums not read", text::size(n << 12)),
    };
    out + &format!(
        "{place}: {state}; {} and {} of data compared{unchecked}",
        text::count(report.inodes, "inode", "inodes"),
        text::size(report.data_checked << 12),
    )
}

fn mend(args: &Args) -> Outcome {
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
