//! One damaged volume: mounted, read, written, checked, repaired, read again.

use crate::damage::sample::mount;
use crate::damage::truth::{OURS, Truth, Verdict, compare, split};
use crate::ops::fill;
use braidfs::fsck::{FsckOptions, FsckReport, check};
use braidfs::namespace::paths::OpenHow;
use braidfs::{Cred, Error, Volume};
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
    /// A mount told of traces in the journal that may be damage.
    pub traces: bool,
    /// Names that a mount before any check showed with something else behind them, or did not show.
    pub served: Vec<String>,
    /// Names lost or changed by the repair, each reported.
    pub given_up: usize,
    /// Lost or changed, and nobody said so.
    pub silent: Vec<String>,
    /// A repair left something, or the check after it found something.
    pub not_repaired: Vec<String>,
}

impl Outcome {
    /// Whether anybody noticed.
    pub fn detected(&self) -> bool {
        self.refused || self.no_check || !self.codes.is_empty() || self.notes > 0 || self.traces
    }
}

/// A volume that was mounted and written before it was checked.
const USED: &str = "used first";

const CHECK: FsckOptions = FsckOptions { repair: false, force: true };
const REPAIR: FsckOptions = FsckOptions { repair: true, force: true };

fn fsck(device: &Arc<MemDevice>, options: &FsckOptions) -> Result<FsckReport, Error> {
    check(&[device.clone() as Arc<dyn Device>], options, &|_, _, _| {})
}

fn name(path: &[u8]) -> String {
    format!("/{}", String::from_utf8_lossy(path).chars().take(60).collect::<String>())
}

/// Makes a file in every directory of the truth and reads it back: errors are allowed, other content is not.
fn write_everywhere(v: &Volume, truth: &Truth, out: &mut Outcome) {
    let dirs: BTreeSet<&[u8]> = truth.keys().map(|p| split(p).0).collect();
    for (i, dir) in (0u32..).zip(dirs) {
        let path = [dir, b"/", OURS].concat();
        let how = OpenHow { read: true, write: true, create: true, mode: 0o600, ..OpenHow::default() };
        let done = v.open_path(&path, how, &Cred::root()).and_then(|f| {
            let data = fill(i, 0, 9000);
            v.write(&f, 0, &data)?;
            v.fsync(f.ino(), false)?;
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
}

/// Mounts, compares, and writes if asked; what was wrong.
fn visit(device: &Arc<MemDevice>, truth: &Truth, write: bool, out: &mut Outcome) {
    let v = match mount(device) {
        Ok(v) => v,
        Err(_) => {
            out.refused = true;
            return;
        }
    };
    out.traces |= !v.recovery_traces().is_empty();
    for (path, verdict) in compare(&v, truth, true) {
        match verdict {
            Verdict::Right => {}
            Verdict::Refused(_) => out.refused = true,
            Verdict::Missing => out.served.push(format!("{}: is not there", name(&path))),
            Verdict::Wrong(why) => out.served.push(format!("{}: {why}", name(&path))),
        }
    }
    if write {
        write_everywhere(&v, truth, out);
    }
    if v.unmount().is_err() {
        out.refused = true;
    }
}

/// What the findings name: nodes and paths.
struct Named {
    nodes: BTreeSet<u64>,
    paths: BTreeSet<Vec<u8>>,
    /// Directory, and what is said of it: names of entries stand in it.
    said: Vec<(u64, String)>,
    notes: bool,
}

impl Named {
    fn of(r: &FsckReport, traces: bool) -> Self {
        Self {
            nodes: r.findings.iter().filter_map(|f| f.node).collect(),
            paths: r.findings.iter().filter_map(|f| f.path.as_ref()).map(|p| p.as_bytes()[1..].to_vec()).collect(),
            said: r.findings.iter().filter_map(|f| Some((f.node?, f.message.clone()))).collect(),
            notes: !r.notes.is_empty() || traces,
        }
    }

    /// Whether a name of the truth, or a directory above that is gone, was named.
    fn covers(&self, path: &[u8], truth: &Truth, verdicts: &BTreeMap<Vec<u8>, Verdict>) -> bool {
        if self.paths.contains(path) || truth.get(path).is_some_and(|e| self.nodes.contains(&e.ino)) {
            return true;
        }
        let (dir, last) = split(path);
        let quoted = format!("{:?}", String::from_utf8_lossy(last));
        if truth.get(dir).is_some_and(|d| self.said.iter().any(|(n, text)| *n == d.ino && text.contains(&quoted))) {
            return true;
        }
        !path.is_empty()
            && verdicts.get(dir).is_some_and(|v| *v == Verdict::Missing)
            && self.covers(dir, truth, verdicts)
    }
}

/// Repairs `device` and judges what is left. `when` is for messages.
fn repair(device: &Arc<MemDevice>, truth: &Truth, when: &str, out: &mut Outcome) {
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
        eprintln!("{when}: {:#?}", report.findings);
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
    let named = Named::of(&report, out.traces && when == USED);
    let verdicts = compare(&v, truth, false);
    for (path, verdict) in &verdicts {
        match verdict {
            Verdict::Right => {}
            Verdict::Refused(_) if named.covers(path, truth, &verdicts) => out.given_up += 1,
            Verdict::Refused(e) => out.not_repaired.push(format!("{when}: {} still refuses: {e}", name(path))),
            _ if named.covers(path, truth, &verdicts) || named.notes => out.given_up += 1,
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
    let mut dirs = vec![braidfs::NodeId::ROOT];
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
    visit(&used, truth, true, &mut out);
    visit(&used, truth, false, &mut out);
    let fresh = Arc::new(MemDevice::from_image(image.clone()));
    match fsck(&fresh, &CHECK) {
        Ok(r) => {
            out.codes = r.findings.iter().map(|f| f.code).collect();
            out.notes = r.notes.len();
        }
        Err(_) => out.no_check = true,
    }
    repair(&fresh, truth, "checked first", &mut out);
    repair(&used, truth, USED, &mut out);
    if out.traces {
        // the mount said that the newest changes may be missing
        out.served.clear();
    }
    if !out.served.is_empty() && !out.detected() {
        out.silent.extend(out.served.iter().map(|s| format!("served: {s}")));
    }
    out
}
