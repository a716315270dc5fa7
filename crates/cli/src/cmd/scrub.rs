//! `braidfs scrub`: reads everything that has a checksum and says what does not hold, also of a volume in use; `--mend`
//! finishes what a crash left.

use crate::cmd::fsck::{Bar, line};
use crate::cmd::umount::is_braidfs;
use crate::failure::{Failure, Outcome, fsck_code};
use crate::{mounted, mountinfo, open, text};
use braidfs::{Collected, JournalReplay};
use braidfs_check::{ScrubReport, scrub};
use braidfs_fuse::control::Scrub;
use rustix::io::Errno;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How often the server is asked how far it is.
const POLL: Duration = Duration::from_millis(200);

/// Read all metadata, and all data that has checksums, and compare
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Exit codes: 0 everything holds, 4 something does not, or could not be looked at to be mended, 1 the scrub \
    failed, or wrong usage.\n\n\
    Examples:\n  braidfs scrub /mnt               a mounted volume, while it is in use\n  \
    braidfs scrub --rate 50M /mnt    reading 50 MiB per second at most\n  \
    braidfs scrub disk.img           an unmounted volume: also names against links\n  \
    braidfs scrub --mend disk.img    drop stale entries between domains, make lost ones again\n\n\
    Data has checksums on volumes made with --data-checksums. Nothing is changed without --mend. A scrub of a \
    mounted volume runs in its server with low priority and stops with this command. After a finding unmount and use \
    `braidfs fsck -fy`."
)]
pub struct Args {
    /// Instead, of an unmounted volume: mend what a crash left between domains (stale entries, lost links)
    #[arg(long, conflicts_with = "json")]
    mend: bool,
    /// Of a mounted volume: read at most this much per second
    #[arg(long, value_name = "SIZE", value_parser = parse_rate)]
    rate: Option<u64>,
    /// Of a mounted volume: metadata only
    #[arg(long)]
    no_data: bool,
    /// Print nothing but what does not hold
    #[arg(short, long)]
    quiet: bool,
    /// The report as JSON
    #[arg(long)]
    json: bool,
    /// A progress bar (the default on a terminal)
    #[arg(short = 'C', long)]
    progress: bool,
    /// The mount point of a mounted volume, or all devices of an unmounted one
    #[arg(required = true, value_name = "MOUNTPOINT|DEVICE")]
    devices: Vec<PathBuf>,
}

pub fn run(args: &Args) -> Outcome {
    if let [place] = args.devices.as_slice()
        && is_mount_point(place)
    {
        if args.mend {
            let why = "is mounted, and mends stale entries by itself: leave out --mend";
            return Err(Failure::new(format!("{}: {why}", place.display())));
        }
        return mounted(args, place);
    }
    if args.rate.is_some() || args.no_data {
        let why = "no braidfs is mounted there: --rate and --no-data are for mounted volumes";
        return Err(Failure::new(format!("{}: {why}", open::show(&args.devices))).with_code(1));
    }
    if args.mend {
        return mend(args);
    }
    let paths = open::expand(&args.devices);
    let devices = open::devices(&paths, false).map_err(|f| match mounted::at(&paths) {
        Some(m) => Failure::new(format!("{}, or `braidfs scrub {}`", f.message, m.target.display())),
        None => f,
    })?;
    open::nobody_writes(&devices)?;
    let bar = bar(args);
    let report = scrub(&devices, &JournalReplay, &|phase, done, total| bar.show(phase, done, total));
    bar.finish();
    let report = report.map_err(|e| open::explain_check("cannot scrub", &paths, e))?;
    tell(args, &report, &open::show(&paths))
}

/// To the server 0 is no limit, the opposite of what it looks like.
fn parse_rate(text: &str) -> Result<u64, String> {
    match text::parse_size(text)? {
        0 => Err("nothing would be read: leave out --rate for no limit".into()),
        rate => Ok(rate),
    }
}

fn bar(args: &Args) -> Bar {
    Bar::new(args.progress || (std::io::stderr().is_terminal() && !args.json && !args.quiet))
}

/// Whether a braidfs is mounted on `place`.
fn is_mount_point(place: &Path) -> bool {
    mountinfo::at(&mountinfo::absolute(place)).is_some_and(|m| is_braidfs(&m))
}

/// Has the server of a mounted volume do it.
fn mounted(args: &Args, place: &Path) -> Outcome {
    let show = place.display();
    let failed = |e: std::io::Error| {
        let why = match Errno::from_io_error(&e) {
            Some(Errno::BUSY) => "a scrub is running already: wait for it".into(),
            Some(Errno::PERM) => "only root and the owner of the mount may".into(),
            _ => mounted::server_error(place, &e),
        };
        Failure::at("cannot scrub", &show, why)
    };
    mounted::enter(place).map_err(failed)?;
    let scrub = Scrub::start(place, args.rate.unwrap_or(0), !args.no_data).map_err(failed)?;
    let bar = bar(args);
    let mut pause = Duration::from_millis(2);
    let ended = loop {
        match scrub.progress() {
            Ok(p) if p.ended => break Ok(()),
            Ok(p) => bar.show(&p.phase, p.done, p.total),
            Err(e) => break Err(e),
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(POLL);
    };
    bar.finish();
    let text = ended.and_then(|()| scrub.report()).map_err(failed)?;
    let report: ScrubReport = serde_json::from_slice(&text)
        .map_err(|e| Failure::at("cannot scrub", &show, format!("the server's report does not parse: {e}")))?;
    if report.stopped {
        return Err(Failure::at("cannot scrub", &show, "the scrub was stopped before its end: the volume is closing"));
    }
    tell(args, &report, &show.to_string())
}

fn tell(args: &Args, report: &ScrubReport, place: &str) -> Outcome {
    let code = if report.findings.is_empty() { fsck_code::CLEAN } else { fsck_code::UNCORRECTED };
    if args.json {
        let mut value = serde_json::json!(report);
        value["exit_code"] = code.into();
        crate::say(format_args!("{value:#}"))?;
    } else if !args.quiet || code != fsck_code::CLEAN {
        crate::say(format_args!("{}", lines(report, place)))?;
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
    let failed = |e| open::explain("scrub failed on", &open::expand(&args.devices), &e);
    let all = volume.collect_stale().map_err(failed)?;
    open::close(volume)?;
    let (told, code) = told(&all);
    if code != fsck_code::CLEAN || !args.quiet {
        crate::say(format_args!("{}: {told}", open::show(&args.devices)))?;
    }
    Ok(code)
}

/// What is said of entries that were mended, and the exit code.
fn told(all: &Collected) -> (String, u8) {
    let mended = format!("{} mended", text::count(all.mended, "entry", "entries"));
    let mut left = Vec::new();
    if all.passed_over > 0 {
        let inodes = text::count(all.passed_over, "inode", "inodes");
        left.push(format!("{inodes} could not be compared with the entries that name them"));
    }
    if all.failed_domains > 0 {
        left.push(format!("{} failed", text::count(all.failed_domains as u64, "domain has", "domains have")));
    }
    match &left[..] {
        [] => (mended, fsck_code::CLEAN),
        left => {
            let why = left.join(", and ");
            (format!("{mended}; {why}: check the volume with `braidfs fsck -fn`"), fsck_code::UNCORRECTED)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_passed_over_is_told() {
        let mut all = Collected::default();
        all.mended = 3;
        assert_eq!(told(&all), ("3 entries mended".into(), 0));
        (all.mended, all.passed_over) = (1, 2);
        let (text, code) = told(&all);
        assert_eq!(code, 4);
        let want =
            "1 entry mended; 2 inodes could not be compared with the entries that name them: check the volume with";
        assert!(text.starts_with(want) && text.ends_with("`braidfs fsck -fn`"), "{text}");
        (all.passed_over, all.failed_domains) = (1, 1);
        assert!(
            told(&all).0.contains("1 inode could not") && told(&all).0.contains(", and 1 domain has failed: check")
        );
    }
}
