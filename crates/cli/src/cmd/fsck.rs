//! `braidfs fsck`: checks a volume and repairs it.

use crate::failure::{Outcome, fsck_code};
use crate::{open, text};
use braidfs::JournalReplay;
use braidfs::store::lease::Lease;
use braidfs_check::{Finding, FsckOptions, FsckReport, Limits, check_within, preen};
use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal;
use std::path::PathBuf;
use std::sync::Mutex;

/// Check a volume, and repair it
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Exit codes: 0 no errors, 1 errors corrected, 4 errors left, 8 the check failed, 16 wrong usage.\n\n\
    Examples:\n  braidfs fsck disk.img         check only, if it was not unmounted properly\n  \
    braidfs fsck -f disk.img      check in any case\n  \
    braidfs fsck -fy disk.img     check and repair\n\n\
    Without -y, -p or -a nothing is written. With -p or -a journals are replayed, and errors are repaired only where nothing \
    that was stored can be lost by it: counts, copies, what follows from something else. Is there one more, none is repaired, \
    nothing is written, and the exit code is 4: then somebody runs it with -y. fsck.md has which errors these are.\n\n\
    Memory: 24 bytes per inode, up to --memory (then the node tables are read several times); 32 MiB per TiB of the \
    volume in use; 16 bytes per directory; 3 MiB per thread (two per CPU); up to 60 MiB of the allocator's. A volume \
    with errors takes about 100 bytes per small file and 1 KiB per damaged one, without bound."
)]
pub struct Args {
    /// Change nothing (the default)
    #[arg(short = 'n', conflicts_with_all = ["yes", "preen"])]
    no: bool,
    /// Repair all that can be repaired, also where files, names or changes are given up
    #[arg(short = 'y', long, conflicts_with = "preen")]
    yes: bool,
    /// Repair, for boot scripts, only what loses nothing; silent where nothing was wrong
    #[arg(short = 'p', visible_short_alias = 'a', visible_alias = "auto")]
    preen: bool,
    /// Check even a volume that is marked clean
    #[arg(short, long)]
    force: bool,
    /// The report as JSON, with what each user and group uses
    #[arg(long)]
    json: bool,
    /// A progress bar (the default on a terminal)
    #[arg(short = 'C', long)]
    progress: bool,
    /// Memory for the list of inodes at most
    #[arg(long, value_name = "SIZE", value_parser = text::parse_size, default_value = "256M")]
    memory: u64,
    /// Taken and ignored, for fsck(8)
    #[arg(short = 'V', short_alias = 'T', hide = true, action = clap::ArgAction::Count)]
    ignored: u8,
    /// All devices of the volume
    #[arg(required = true, value_name = "DEVICE")]
    devices: Vec<PathBuf>,
}

pub fn run(args: &Args) -> Outcome {
    let operational = |f: crate::failure::Failure| f.with_code(fsck_code::OPERATIONAL);
    let paths = open::expand(&args.devices);
    let options = FsckOptions { repair: args.yes || args.preen, force: args.force };
    let devices = open::devices(&paths, options.repair).map_err(operational)?;
    let held = |e: braidfs::store::Error| operational(crate::failure::Failure::new(e.to_string()));
    let lease = if options.repair { Lease::of_devices(&devices, true).map_err(held)? } else { None };
    if !options.repair {
        open::nobody_writes(&devices).map_err(operational)?;
    }
    let bar = Bar::new(args.progress || (std::io::stderr().is_terminal() && !args.json && !args.preen));
    let limits = Limits { memory_bytes: args.memory };
    let progress = |phase: &str, done: u64, total: u64| bar.show(phase, done, total);
    let report = if args.preen {
        preen(&devices, args.force, &limits, &JournalReplay, &progress)
    } else {
        check_within(&devices, &options, &limits, &JournalReplay, &progress)
    };
    bar.finish();
    drop(lease);
    let report = match report {
        Ok(report) => report,
        Err(e) => {
            let (e, findings) = e.into_parts();
            // of some of it nothing on the volume may tell any more
            let found = FsckReport { findings, ..FsckReport::default() };
            if !found.findings.is_empty() {
                let place = open::show(&paths);
                let output = if args.json {
                    json(&found, fsck_code::OPERATIONAL)
                } else {
                    found.findings.iter().map(|f| line(&place, f)).collect::<String>().trim_end().to_owned()
                };
                crate::say(format_args!("{output}")).map_err(operational)?;
            }
            return Err(operational(open::explain_check("cannot check", &paths, e)));
        }
    };
    let code = exit_code(&report);
    let output =
        if args.json { json(&report, code) } else { lines(&report, code, &open::show(&paths), options.repair) };
    let silent = args.preen && code == fsck_code::CLEAN && !args.json && report.notes.is_empty();
    if !silent {
        crate::say(format_args!("{output}")).map_err(operational)?;
    }
    Ok(code)
}

fn exit_code(report: &FsckReport) -> u8 {
    if report.findings.is_empty() {
        fsck_code::CLEAN
    } else if report.findings.iter().all(|f| f.fixed) {
        fsck_code::CORRECTED
    } else {
        fsck_code::UNCORRECTED
    }
}

fn json(report: &FsckReport, code: u8) -> String {
    let mut value = serde_json::json!(report);
    value["exit_code"] = code.into();
    format!("{value:#}")
}

fn lines(report: &FsckReport, code: u8, place: &str, repair: bool) -> String {
    let mut out = String::new();
    report.findings.iter().for_each(|f| out += &line(place, f));
    for note in &report.notes {
        out += &format!("{place}: note: {note}\n");
    }
    if report.clean_skip {
        return out + &format!("{place}: clean, not checked: check it all the same with -f");
    }
    let errors = |fixed: bool| {
        text::count(report.findings.iter().filter(|f| f.fixed == fixed).count() as u64, "error", "errors")
    };
    let state = match code {
        fsck_code::CLEAN => "clean".into(),
        fsck_code::CORRECTED => format!("repaired, {} corrected", errors(true)),
        _ if report.by_hand => return out + &by_hand(report, place),
        _ if repair => format!("{} left, {} corrected", errors(false), errors(true)),
        _ => format!("{} left: repair with `braidfs fsck -y`", errors(false)),
    };
    let used = match report.blocks_total {
        0 => String::new(),
        total => format!(", {} of {} used", text::size(report.blocks_used << 12), text::size(total << 12)),
    };
    out + &format!(
        "{place}: {state}; {}, {}, {}, {}{used}",
        text::count(report.files, "file", "files"),
        text::count(report.dirs, "directory", "directories"),
        text::count(report.symlinks, "symlink", "symlinks"),
        text::count(report.other, "special file", "special files"),
    )
}

/// What `-p` says where it leaves a volume to somebody.
fn by_hand(report: &FsckReport, place: &str) -> String {
    let left = report.findings.iter().filter(|f| !f.fixed);
    let mut codes: Vec<String> = left.filter(|f| !f.is_safe()).map(|f| format!("E{:03}", f.code)).collect();
    codes.sort_unstable();
    codes.dedup();
    let what = match codes.len() {
        // a tenant without a journal, as the notes say
        0 => "files".into(),
        1..=5 => format!("files, names or changes ({})", codes.join(", ")),
        n => format!("files, names or changes ({} and {} more)", codes[..5].join(", "), n - 5),
    };
    format!(
        "{place}: UNEXPECTED INCONSISTENCY: {} left; a repair may give up {what}: RUN fsck MANUALLY (`braidfs fsck -y`)",
        text::count(report.unfixed() as u64, "error", "errors")
    )
}

/// A finding as a line.
pub fn line(place: &str, f: &Finding) -> String {
    let mut at = String::new();
    if let Some(domain) = f.domain {
        at += &format!(" domain {domain}");
    }
    if let Some(node) = f.node {
        at += &format!(" node {node}");
    }
    if let Some(path) = &f.path {
        at += &format!(" {}", text::name(path.as_bytes()));
    }
    let fixed = if f.fixed { " (repaired)" } else { "" };
    format!("{place}: E{:03}{at}: {}{fixed}\n", f.code, f.message)
}

/// A bar on the terminal, or nothing. Shared by the checker's threads.
pub struct Bar(Option<(ProgressBar, Mutex<String>)>);

impl Bar {
    /// Shown or not.
    pub fn new(shown: bool) -> Self {
        let style = ProgressStyle::with_template("{msg:24} {wide_bar} {percent:>3}% {eta}");
        Self(shown.then(|| {
            let bar = ProgressBar::new(0);
            if let Ok(style) = style {
                bar.set_style(style);
            }
            (bar, Mutex::new(String::new()))
        }))
    }

    /// Where the work is.
    pub fn show(&self, phase: &str, done: u64, total: u64) {
        let Some((bar, last)) = &self.0 else { return };
        // A poisoned lock only means that another thread failed: that is reported elsewhere.
        let mut last = last.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if *last != phase {
            *last = phase.to_string();
            bar.reset();
            bar.set_message(phase.to_string());
        }
        bar.set_length(total);
        bar.set_position(done);
    }

    /// Takes it away.
    pub fn finish(&self) {
        if let Some((bar, _)) = &self.0 {
            bar.finish_and_clear();
        }
    }
}
