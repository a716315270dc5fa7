//! One damaged volume: mounted, read, written, checked, repaired, read again.

use crate::damage::named::Named;
use crate::damage::sample::mount;
use crate::damage::truth::{Entry, OURS, Truth, Verdict, compare, read_entry, split};
use crate::ops::fill;
use braidfs::OpenHow;
use braidfs::{Cred, Volume};
use braidfs_check::{Error, FsckOptions, FsckReport, check};
use braidfs_device::{Device, Image, MemDevice};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// What became of a damaged volume.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// A mount refused the volume or something on it.
    pub refused: bool,
    /// Numbers of what a check found before anything was written.
    pub codes: BTreeSet<u32>,
    /// The check could not be done and said why.
    pub no_check: bool,
    /// Notes of the check: what may be damage or the trace of a crash.
    pub notes: usize,
    /// What mounts told of traces in the journals that may be damage.
    pub traces: Vec<String>,
    /// Names that a mount before any check showed with something else behind them, or did not show.
    pub served: Vec<String>,
    /// Names lost or changed by the repair, each reported.
    pub given_up: usize,
    /// Files that were made on the damaged volume, and whose fsync succeeded.
    pub synced: usize,
    /// Lost or changed, and nobody said so.
    pub silent: Vec<String>,
    /// A repair left something, or the check after it found something.
    pub not_repaired: Vec<String>,
}

impl Outcome {
    /// Whether anybody noticed.
    pub fn detected(&self) -> bool {
        self.refused || self.no_check || !self.codes.is_empty() || self.notes > 0 || !self.traces.is_empty()
    }
}

/// How the names of the truth were found.
type Verdicts = BTreeMap<Vec<u8>, Verdict>;

/// Both together.
fn with(truth: &Truth, files: &Truth) -> Truth {
    truth.iter().chain(files).map(|(path, e)| (path.clone(), e.clone())).collect()
}

/// A volume that was mounted and written before it was checked.
const USED: &str = "used first";

const CHECK: FsckOptions = FsckOptions { repair: false, force: true };
const REPAIR: FsckOptions = FsckOptions { repair: true, force: true };

fn fsck(device: &Arc<MemDevice>, options: &FsckOptions) -> Result<FsckReport, Error> {
    check(&[device.clone() as Arc<dyn Device>], options, &braidfs::JournalReplay, &|_, _, _| {})
}

fn name(path: &[u8]) -> String {
    format!("/{}", String::from_utf8_lossy(path).chars().take(60).collect::<String>())
}

/// Makes a file in every directory of the truth and reads it back: errors are allowed, other content is not. Those whose fsync
/// succeeded: each must be right from then on, be refused, or be named.
fn write_everywhere(v: &Volume, truth: &Truth, out: &mut Outcome) -> Truth {
    let mut synced = Truth::new();
    let dirs: BTreeSet<&[u8]> = truth.keys().map(|p| split(p).0).collect();
    for (i, dir) in (0u32..).zip(dirs) {
        let path = [dir, b"/", OURS].concat();
        let how = OpenHow { read: true, write: true, create: true, mode: 0o600, ..OpenHow::default() };
        let data = fill(i, 0, 9000);
        let done = v.open_path(&path, how, &Cred::root()).and_then(|f| {
            v.write(&f, 0, &data)?;
            let entry = read_entry(v, f.ino())?;
            v.fsync(f.ino(), false)?;
            // what follows may fail: it is promised
            synced.insert(path.strip_prefix(b"/").unwrap_or(&path).to_vec(), Entry { data: data.clone(), ..entry });
            let mut back = vec![0; data.len()];
            v.read(&f, 0, &mut back)?;
            Ok(back == data)
        });
        match done {
            Ok(true) => {}
            Ok(false) => out.served.push(format!("{}: not what was just written", name(&path))),
            Err(_) => out.refused = true,
        }
    }
    out.synced += synced.len();
    synced
}

/// Mounts, compares, and writes if asked; how the names were found, and which of those that it made were synced.
fn visit(device: &Arc<MemDevice>, truth: &Truth, write: bool, out: &mut Outcome) -> (Verdicts, Truth) {
    let v = match mount(device) {
        Ok(v) => v,
        Err(_) => {
            out.refused = true;
            return Default::default();
        }
    };
    out.traces.extend_from_slice(v.recovery_traces());
    let verdicts = compare(&v, truth, true);
    out.refused |= verdicts.values().any(|v| matches!(v, Verdict::Refused(_)));
    let synced = if write { write_everywhere(&v, truth, out) } else { Truth::new() };
    if v.unmount().is_err() {
        out.refused = true;
    }
    (verdicts, synced)
}

/// Judges what a mount showed. What the check names was noticed, if late; the rest nobody said.
fn judge(verdicts: &Verdicts, truth: &Truth, named: &Named, out: &mut Outcome) {
    for (path, verdict) in verdicts {
        let why = match verdict {
            Verdict::Right | Verdict::Refused(_) => continue,
            Verdict::Missing => "is not there",
            Verdict::Surplus(_) => "should not be there",
            Verdict::Wrong(why) => why,
        };
        // The mount said of this domain that its newest changes may be missing.
        if named.journal_covers(path, truth, verdicts) {
            continue;
        }
        let what = format!("{}: {why}", name(path));
        if !named.covers(path, truth, verdicts) {
            out.silent.push(format!("served: {what}"));
        }
        out.served.push(what);
    }
}

/// What was synced on a damaged volume before its second mount, with what that told of traces.
#[derive(Default)]
struct Made {
    files: Truth,
    traces: Vec<String>,
}

impl Made {
    /// Judges the files as a mount showed them: what a check that found `named` then does not name is lost silently.
    fn judge(&self, verdicts: &Verdicts, all: &Truth, mut named: Named, when: &str, out: &mut Outcome) {
        named.add_traces(&self.traces);
        for (path, verdict) in verdicts.iter().filter(|(path, _)| self.files.contains_key(*path)) {
            let why = match verdict {
                Verdict::Right | Verdict::Refused(_) => continue,
                Verdict::Wrong(why) => why,
                _ => "is gone",
            };
            if !named.covers(path, all, verdicts) && !named.journal_covers(path, all, verdicts) {
                out.silent.push(format!("{when}: {}, synced on the damaged volume: {why}", name(path)));
            }
        }
    }
}

/// Repairs `device` and judges what is left. `when` is for messages.
fn repair(device: &Arc<MemDevice>, truth: &Truth, made: &Made, when: &str, out: &mut Outcome) {
    let report = match fsck(device, &REPAIR) {
        Ok(r) => r,
        // Without a superblock or a device there is nothing to repair with: said so.
        Err(Error::Corrupt(_)) => {
            out.no_check = true;
            return;
        }
        Err(e) => {
            out.not_repaired.push(format!("{when}: the repair failed: {e}"));
            return;
        }
    };
    if std::env::var_os("BRAIDFS_DAMAGE_LOG").is_some() {
        eprintln!("{when}: {:#?}\n{:#?}", report.findings, report.notes);
    }
    let left: Vec<String> =
        report.findings.iter().filter(|f| !f.fixed).map(|f| format!("E{:03} {}", f.code, f.message)).collect();
    if !left.is_empty() {
        out.not_repaired.push(format!("{when}: left: {}", left.join("; ")));
    }
    match fsck(device, &CHECK) {
        Ok(r) if r.findings.is_empty() => {}
        Ok(r) => {
            let again: Vec<String> = r.findings.iter().map(|f| format!("E{:03} {}", f.code, f.message)).collect();
            out.not_repaired.push(format!("{when}: the next check finds: {}", again.join("; ")));
        }
        Err(e) => out.not_repaired.push(format!("{when}: the next check failed: {e}")),
    }
    let v = match mount(device) {
        Ok(v) => v,
        Err(e) => {
            out.not_repaired.push(format!("{when}: the repaired volume cannot be mounted: {e}"));
            return;
        }
    };
    let mut named = Named::of(&report);
    if when == USED {
        named.add_traces(&out.traces);
    }
    let all = with(truth, &made.files);
    let verdicts = compare(&v, &all, false);
    made.judge(&verdicts, &all, Named::of(&report), when, out);
    for (path, verdict) in verdicts.iter().filter(|(path, _)| !made.files.contains_key(*path)) {
        match verdict {
            Verdict::Right => {}
            Verdict::Refused(_) if named.covers(path, truth, &verdicts) => out.given_up += 1,
            Verdict::Refused(e) => out.not_repaired.push(format!("{when}: {} still refuses: {e}", name(path))),
            _ if named.covers(path, truth, &verdicts) || named.journal_covers(path, truth, &verdicts) => {
                out.given_up += 1;
            }
            Verdict::Surplus(_) => out.silent.push(format!("{when}: {} should not be there", name(path))),
            Verdict::Missing => out.silent.push(format!("{when}: {} is gone", name(path))),
            Verdict::Wrong(why) => out.silent.push(format!("{when}: {}: {why}", name(path))),
        }
    }
    if let Err(e) = v.unmount() {
        out.not_repaired.push(format!("{when}: the repaired volume cannot be unmounted: {e}"));
    }
}

/// Reads and writes a volume of which nothing is known to be right, twice: nothing but errors may come of it. Names that are
/// none must not be shown.
///
/// # Panics
/// Where such a name is shown.
pub fn abuse(device: &Arc<MemDevice>, truth: &Truth) {
    let mut out = Outcome::default();
    visit(device, truth, true, &mut out);
    visit(device, truth, false, &mut out);
    let Ok(v) = mount(device) else { return };
    let mut dirs = vec![braidfs::InodeNo::ROOT];
    let mut seen = BTreeSet::new();
    while let Some(dir) = dirs.pop() {
        if !seen.insert(dir) {
            continue;
        }
        let mut bad = None;
        let _ = v.readdir(dir, 0, &mut |e| {
            if e.name.is_empty() || e.name.len() > 255 || e.name.contains(&b'/') || e.name.contains(&0) {
                bad = Some(e.name.to_vec());
            }
            if !matches!(e.name, b"." | b"..") {
                dirs.push(e.ino);
            }
            bad.is_none()
        });
        assert!(bad.is_none(), "a directory shows the name {bad:?}");
    }
    let _ = v.collect_stale();
    let _ = v.statfs();
    let _ = v.unmount();
}

/// Does everything with the damaged `image`.
pub fn trial(image: &Image, truth: &Truth) -> Outcome {
    let mut out = Outcome::default();
    let used = Arc::new(MemDevice::from_image(image.clone()));
    let (first, files) = visit(&used, truth, true, &mut out);
    let (told, all) = (out.traces.len(), with(truth, &files));
    let (second, _) = visit(&used, &all, false, &mut out);
    let made = Made { files, traces: out.traces[told..].to_vec() };
    if second.iter().any(|(path, v)| made.files.contains_key(path) && !matches!(v, Verdict::Right)) {
        let named = fsck(&used, &CHECK).map(|r| Named::of(&r)).unwrap_or_default();
        made.judge(&second, &all, named, "second mount", &mut out);
    }
    let second: Verdicts = second.into_iter().filter(|(path, _)| !made.files.contains_key(path)).collect();
    let fresh = Arc::new(MemDevice::from_image(image.clone()));
    let mut named = Named::default();
    match fsck(&fresh, &CHECK) {
        Ok(r) => {
            out.codes = r.findings.iter().map(|f| f.code).collect();
            out.notes = r.notes.len();
            // of the journals only what the mount told: it is the mount that is judged
            named = Named::of(&FsckReport { notes: Vec::new(), ..r });
        }
        Err(_) => out.no_check = true,
    }
    named.add_traces(&out.traces);
    judge(&first, truth, &named, &mut out);
    judge(&second, truth, &named, &mut out);
    repair(&fresh, truth, &Made::default(), "checked first", &mut out);
    repair(&used, truth, &made, USED, &mut out);
    out
}
