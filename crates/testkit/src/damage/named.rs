//! What a check or a mount says is wrong, and whether it says so of a given name.

use crate::damage::truth::{Truth, Verdict, split};
use braidfs_check::FsckReport;
use std::collections::{BTreeMap, BTreeSet};

/// What findings name: nodes and paths; and the domains whose journals have traces.
#[derive(Clone, Debug, Default)]
pub struct Named {
    nodes: BTreeSet<u64>,
    paths: BTreeSet<Vec<u8>>,
    /// Directory, and what is said of it: names of entries stand in it.
    said: Vec<(u64, String)>,
    /// Domains of whose journals a note or a mount tells what may be damage.
    journals: BTreeSet<u16>,
}

/// Domain of a trace: it begins with "journal of domain N,".
fn domain_of(trace: &str) -> Option<u16> {
    trace.strip_prefix("journal of domain ")?.split(',').next()?.parse().ok()
}

impl Named {
    /// What `r` names.
    pub fn of(r: &FsckReport) -> Self {
        let mut named = Self {
            nodes: r.findings.iter().filter_map(|f| f.node).collect(),
            paths: r.findings.iter().filter_map(|f| f.path.as_ref()).map(|p| p.as_bytes()[1..].to_vec()).collect(),
            said: r.findings.iter().filter_map(|f| Some((f.node?, f.message.clone()))).collect(),
            journals: BTreeSet::new(),
        };
        named.add_traces(&r.notes);
        named
    }

    /// Adds what a check or a mount tells of the journals.
    pub fn add_traces(&mut self, traces: &[String]) {
        self.journals.extend(traces.iter().filter_map(|t| domain_of(t)));
    }

    /// Whether a name of the truth, or a directory above that is gone, was named.
    pub fn covers(&self, path: &[u8], truth: &Truth, verdicts: &BTreeMap<Vec<u8>, Verdict>) -> bool {
        let surplus = |v: &Verdict| matches!(v, Verdict::Surplus(ino) if self.nodes.contains(ino));
        if self.paths.contains(path)
            || verdicts.get(path).is_some_and(surplus)
            || truth.get(path).is_some_and(|e| self.nodes.contains(&e.ino))
        {
            return true;
        }
        let (dir, last) = split(path);
        let quoted = format!("{:?}", String::from_utf8_lossy(last));
        if truth.get(dir).is_some_and(|d| self.said.iter().any(|(n, text)| *n == d.ino && text.contains(&quoted))) {
            return true;
        }
        gone(dir, path, verdicts) && self.covers(dir, truth, verdicts)
    }

    /// Whether a journal with traces may have held the last change of this name. A trace says in which domain the newest
    /// changes may be missing, and cannot say which: what can be read of them is cut off or spoilt. A change of a domain is
    /// one of its inodes, of a name in its directories, or of the links of what such a name names.
    pub fn journal_covers(&self, path: &[u8], truth: &Truth, verdicts: &BTreeMap<Vec<u8>, Verdict>) -> bool {
        if self.journals.is_empty() {
            return false;
        }
        let (dir, _) = split(path);
        let lost = |p: &[u8]| truth.get(p).is_some_and(|e| self.journals.contains(&e.domain));
        if let Some(Verdict::Surplus(ino)) = verdicts.get(path) {
            // the name is back whose removal is lost
            return lost(dir) || truth.values().any(|e| e.ino == *ino && self.journals.contains(&e.domain));
        }
        let linked = |ino: u64| truth.iter().any(|(p, e)| e.ino == ino && lost(split(p).0));
        lost(path)
            || lost(dir)
            || truth.get(path).is_some_and(|e| linked(e.ino))
            || gone(dir, path, verdicts) && self.journal_covers(dir, truth, verdicts)
    }
}

/// Whether `path` is below a `dir` that is not there.
fn gone(dir: &[u8], path: &[u8], verdicts: &BTreeMap<Vec<u8>, Verdict>) -> bool {
    !path.is_empty() && verdicts.get(dir).is_some_and(|v| *v == Verdict::Missing)
}
