//! The protocol as tables: event -> what must be durable first -> what recovery makes of each half.
//!
//! A row runs on a volume of two domains: `A` and all below it is of the one, `B` of the other. What [`BASE`] makes is
//! durable. `before` and `event` are not, but for what the event itself makes durable. Then the transactions of one of the
//! domains alone survive a crash, of `A` or of `B`; and those of both, where all must be as it was.

use super::durability::Before;
use super::frontier::Frontier;
use super::rules::*;
use super::vacated::Vacated;
use crate::names::path::OpenHow;
use crate::types::*;
use crate::volume::Volume;
use braidfs_device::{Device, MemDevice};
use braidfs_format::inode::{Link, Tombstone};
use std::collections::BTreeMap;
use std::sync::Arc;

#[derive(Debug, Clone, Copy)]
enum Step {
    Create(&'static str),
    Mkdir(&'static str),
    Mv(&'static str, &'static str),
    Swap(&'static str, &'static str),
    /// Renames, and leaves a whiteout.
    Hide(&'static str, &'static str),
    Link(&'static str, &'static str),
    Rm(&'static str),
    Rmdir(&'static str),
    Fsync(&'static str),
}
use Step::*;

struct Row {
    before: &'static [Step],
    event: Step,
    /// Domains that the event itself makes durable what they had, before it is over.
    durable: &'static str,
    /// What differs from the base where the transactions of domain A survive: paths that are gone with a `-`, others with
    /// the inode, named by its path in the base, where that has another name.
    a: &'static str,
    /// The same for B.
    b: &'static str,
}

/// What is durable. `k` and `z` have names in both domains; `s`, `e` and `u` are directories, `e` and `u` without files of
/// their own domain.
const BASE: &[Step] = &[
    Mkdir("A"),
    Mkdir("B"),
    Create("A/f"),
    Create("A/k"),
    Link("A/k", "B/k2"),
    Mkdir("A/s"),
    Create("A/s/x"),
    Mkdir("A/e"),
    Create("B/z"),
    Link("B/z", "A/e/z2"),
    Create("B/o"),
    Create("B/q"),
    Link("B/q", "B/q2"),
    Mkdir("B/t"),
    Create("B/t/y"),
    Mkdir("B/u"),
];

const ROWS: &[Row] = &[
    // One inode: it is where its own domain says, whatever the directory's says.
    Row { before: &[], event: Create("A/n"), durable: "", a: "A/n=new", b: "" },
    Row { before: &[], event: Link("A/f", "B/l"), durable: "", a: "B/l=f", b: "" },
    Row { before: &[], event: Rm("B/k2"), durable: "", a: "-B/k2", b: "" },
    Row { before: &[], event: Mv("A/f", "B/n"), durable: "", a: "-A/f B/n=f", b: "" },
    // A victim of another domain: its tombstone counts where the newcomer is durable.
    Row { before: &[], event: Mv("A/f", "B/o"), durable: "", a: "-A/f B/o=f", b: "" },
    Row { before: &[], event: Mv("A/f", "B/q"), durable: "", a: "-A/f B/q=f", b: "" },
    Row { before: &[], event: Mv("A/s", "B/u"), durable: "", a: "-A/s -A/s/x B/u=s B/u/x", b: "" },
    // Partners of two domains: recovery completes the exchange from either half.
    Row { before: &[], event: Swap("A/f", "B/o"), durable: "", a: "A/f=o B/o=f", b: "A/f=o B/o=f" },
    // A vacated name whose last owner lives on: one of its own domain takes it at once, one of another waits.
    Row { before: &[Mv("A/f", "A/f2")], event: Create("A/f"), durable: "", a: "A/f=new A/f2=f", b: "" },
    Row {
        before: &[Mv("A/f", "A/f2")],
        event: Mv("B/o", "A/f"),
        durable: "A",
        a: "-A/f A/f2=f",
        b: "A/f=o A/f2=f -B/o",
    },
    // One that is gone claims nothing that the newcomer does not claim later.
    Row { before: &[Rm("A/f")], event: Mv("B/o", "A/f"), durable: "", a: "-A/f", b: "A/f=o -B/o" },
    // A whiteout is of the moved inode's domain: both are there or none, whatever the directory's domain has. `new`: whose name
    // is of no inode of the base.
    Row { before: &[], event: Hide("A/f", "A/n"), durable: "", a: "A/f=new A/n=f", b: "" },
    Row { before: &[], event: Hide("A/f", "B/n"), durable: "", a: "A/f=new B/n=f", b: "" },
    Row { before: &[], event: Hide("A/f", "B/o"), durable: "", a: "A/f=new B/o=f", b: "" },
    Row { before: &[], event: Hide("A/f", "A/k"), durable: "", a: "A/f=new A/k=f", b: "" },
    Row { before: &[], event: Hide("A/s", "B/u"), durable: "", a: "A/s=new -A/s/x B/u=s B/u/x", b: "" },
    Row { before: &[], event: Hide("A/e/z2", "B/n"), durable: "", a: "", b: "A/e/z2=new B/n=z" },
    Row { before: &[], event: Hide("B/k2", "B/n"), durable: "", a: "B/k2=new B/n=k", b: "" },
    Row { before: &[], event: Hide("B/k2", "B/o"), durable: "", a: "B/k2=new B/o=k", b: "" },
    // What left the name lives on: who takes it from the whiteout waits for both, where it is of another domain.
    Row {
        before: &[Hide("A/f", "A/f2")],
        event: Mv("B/o", "A/f"),
        durable: "A",
        a: "A/f=new A/f2=f",
        b: "A/f=o A/f2=f -B/o",
    },
    Row {
        before: &[Hide("A/f", "A/f2"), Rm("A/f")],
        event: Mv("B/o", "A/f"),
        durable: "A",
        a: "-A/f A/f2=f",
        b: "A/f=o A/f2=f -B/o",
    },
    Row { before: &[Hide("A/f", "A/f2"), Rm("A/f")], event: Create("A/f"), durable: "", a: "A/f=new A/f2=f", b: "" },
    // And whoever had it before the moved one.
    Row { before: &[Rm("A/f"), Mv("B/o", "A/f")], event: Hide("A/f", "B/o"), durable: "", a: "-A/f", b: "A/f=new" },
    // Moves of directories are ordered over all domains; within one they are anyway.
    Row {
        before: &[Mv("A/s", "B/s")],
        event: Mv("B/t", "A/t"),
        durable: "A",
        a: "-A/s -A/s/x B/s B/s/x",
        b: "-A/s -A/s/x A/t A/t/y B/s B/s/x -B/t -B/t/y",
    },
    Row {
        before: &[Mv("A/s", "B/s")],
        event: Mv("A/e", "B/e"),
        durable: "",
        a: "-A/e -A/e/z2 -A/s -A/s/x B/e B/e/z2=z B/s B/s/x",
        b: "",
    },
    // Two of them at once, in two domains: durable when the call returns.
    Row {
        before: &[],
        event: Swap("A/s", "B/t"),
        durable: "AB",
        a: "A/s=t -A/s/x A/s/y B/t=s B/t/x -B/t/y",
        b: "A/s=t -A/s/x A/s/y B/t=s B/t/x -B/t/y",
    },
    Row {
        before: &[Mv("A/s", "B/s")],
        event: Swap("A/e", "B/t"),
        durable: "AB",
        a: "A/e=t A/e/y -A/e/z2 -A/s -A/s/x B/s B/s/x B/t=e -B/t/y B/t/z2=z",
        b: "A/e=t A/e/y -A/e/z2 -A/s -A/s/x B/s B/s/x B/t=e -B/t/y B/t/z2=z",
    },
    // What a crash brings back does not move to where nothing is.
    Row {
        before: &[Mkdir("A/n"), Create("A/n/c")],
        event: Swap("B/o", "A/n/c"),
        durable: "A",
        a: "A/n=new A/n/c=o B/o=new",
        b: "A/n=new A/n/c=o B/o=new",
    },
    Row { before: &[Mkdir("B/n")], event: Mv("A/f", "B/n/f"), durable: "B", a: "-A/f B/n=new B/n/f", b: "B/n=new" },
    // Nothing comes back in a directory that is gone.
    Row {
        before: &[Mv("A/e/z2", "A/z2")],
        event: Rmdir("A/e"),
        durable: "B",
        a: "-A/e -A/e/z2 A/z2=z",
        b: "-A/e/z2 A/z2=z",
    },
    // Recovery can give a name only to an inode that exists.
    Row { before: &[Create("A/n")], event: Swap("A/n", "B/o"), durable: "A", a: "A/n=o B/o=new", b: "A/n=o B/o=new" },
    // A victim that lives on has another name that is durable.
    Row { before: &[Link("B/o", "B/o2")], event: Mv("A/f", "B/o"), durable: "B", a: "-A/f B/o=f B/o2=o", b: "B/o2=o" },
    // What recovery judges stays as it is until that is decided.
    Row {
        before: &[Mv("A/f", "B/q")],
        event: Mv("B/q2", "B/q3"),
        durable: "A",
        a: "-A/f B/q=f",
        b: "-A/f B/q=f -B/q2 B/q3=q",
    },
    // An fsync of one inode: by itself, unless another's fate hangs on it.
    Row { before: &[Create("A/n")], event: Fsync("A/n"), durable: "", a: "A/n=new", b: "A/n=new" },
    Row {
        before: &[Mv("A/f", "A/f2"), Create("A/f")],
        event: Fsync("A/f"),
        durable: "A",
        a: "A/f=new A/f2=f",
        b: "A/f=new A/f2=f",
    },
    Row { before: &[Mv("A/f", "A/s/x")], event: Fsync("A/s/x"), durable: "", a: "-A/f A/s/x=f", b: "-A/f A/s/x=f" },
    Row { before: &[Mv("A/f", "A/k")], event: Fsync("A/k"), durable: "A", a: "-A/f A/k=f", b: "-A/f A/k=f" },
    Row { before: &[Swap("A/f", "A/s/x")], event: Fsync("A/f"), durable: "A", a: "A/f=x A/s/x=f", b: "A/f=x A/s/x=f" },
    Row {
        before: &[Rm("A/f"), Mv("B/o", "A/f")],
        event: Fsync("A/f"),
        durable: "AB",
        a: "A/f=o -B/o",
        b: "A/f=o -B/o",
    },
    Row { before: &[Mv("A/f", "B/o")], event: Fsync("B/o"), durable: "AB", a: "-A/f B/o=f", b: "-A/f B/o=f" },
    // Not by itself where a whiteout was left: nor the whiteout, nor what lies below a directory that left one.
    Row { before: &[Hide("A/f", "A/n")], event: Fsync("A/n"), durable: "A", a: "A/f=new A/n=f", b: "A/f=new A/n=f" },
    Row { before: &[Hide("A/f", "A/n")], event: Fsync("A/f"), durable: "A", a: "A/f=new A/n=f", b: "A/f=new A/n=f" },
    Row {
        before: &[Hide("B/k2", "B/n")],
        event: Fsync("B/n"),
        durable: "AB",
        a: "B/k2=new B/n=k",
        b: "B/k2=new B/n=k",
    },
    Row {
        before: &[Hide("A/s", "A/n"), Create("A/n/y")],
        event: Fsync("A/n/y"),
        durable: "A",
        a: "A/n=s A/n/x A/n/y=new A/s=new -A/s/x",
        b: "A/n=s A/n/x A/n/y=new A/s=new -A/s/x",
    },
];

struct World {
    device: Arc<dyn Device>,
    volume: Volume,
    labels: BTreeMap<(InodeNo, u32), String>,
    base: BTreeMap<String, String>,
}

fn mount(device: &Arc<dyn Device>) -> Volume {
    let options = MountOptions { background: false, serial: true, ..MountOptions::default() };
    Volume::mount(vec![Arc::clone(device)], options).unwrap()
}

fn last(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

impl World {
    fn new() -> Self {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(16384));
        let o = MkfsOptions { domains: Some(2), placement: Placement::Inherit, ..MkfsOptions::default() };
        crate::mkfs::format(std::slice::from_ref(&device), &o).unwrap();
        let mut w = Self { volume: mount(&device), device, labels: BTreeMap::new(), base: BTreeMap::new() };
        BASE.iter().for_each(|s| w.step(*s));
        w.volume.sync().unwrap();
        for (path, ino) in w.walk() {
            w.labels.entry(ino).or_insert_with(|| last(&path).to_owned());
        }
        w.base = w.tree();
        for (path, domain) in [("A", 0), ("A/s/x", 0), ("B", 1), ("B/z", 1), ("B/t/y", 1)] {
            assert_eq!(w.volume.domain_of(w.ino(path)).unwrap(), DomainId(domain), "{path}");
        }
        w
    }

    fn ino(&self, path: &str) -> InodeNo {
        self.volume.resolve(path.as_bytes(), false, &Cred::root()).unwrap().ino
    }

    fn links(&self, path: &str) -> u32 {
        self.volume.resolve(path.as_bytes(), false, &Cred::root()).unwrap().nlink
    }

    fn is_dir(&self, path: &str) -> bool {
        self.volume.resolve(path.as_bytes(), false, &Cred::root()).unwrap().kind() == FileKind::Dir
    }

    fn step(&self, step: Step) {
        let (v, root) = (&self.volume, Cred::root());
        let how = OpenHow { write: true, create: true, mode: 0o644, ..OpenHow::default() };
        let rename = |a: &str, b: &str, mode| v.rename_path(a.as_bytes(), b.as_bytes(), mode, &root);
        let done = match step {
            Create(p) => v.open_path(p.as_bytes(), how, &root).map(drop),
            Mkdir(p) => v.mkdir_path(p.as_bytes(), 0o755, &root).map(drop),
            Mv(a, b) => rename(a, b, RenameMode::Replace),
            Swap(a, b) => rename(a, b, RenameMode::Exchange),
            Hide(a, b) => rename(a, b, RenameMode::Whiteout),
            Link(a, b) => v.link_path(a.as_bytes(), b.as_bytes(), &root),
            Rm(p) => v.unlink_path(p.as_bytes(), &root),
            Rmdir(p) => v.rmdir_path(p.as_bytes(), &root),
            Fsync(p) => v.fsync(self.ino(p), false),
        };
        done.unwrap_or_else(|e| panic!("{step:?}: {e}"));
    }

    /// All paths, directories first, each with its inode.
    fn walk(&self) -> Vec<(String, (InodeNo, u32))> {
        let (mut all, mut todo) = (Vec::new(), vec![(String::new(), InodeNo::ROOT)]);
        while let Some((above, dir)) = todo.pop() {
            let list = |e: DirEntry<'_>| {
                if e.name != b"." && e.name != b".." {
                    let path = format!("{above}{}", String::from_utf8_lossy(e.name));
                    if e.kind == FileKind::Dir {
                        todo.push((format!("{path}/"), e.ino));
                    }
                    all.push((path, (e.ino, e.generation)));
                }
                true
            };
            self.volume.readdir(dir, 0, &mut { list }).unwrap();
        }
        // the shortest name first: it is the inode's label
        all.sort_by_key(|(path, _)| (last(path).len(), path.clone()));
        all
    }

    fn tree(&self) -> BTreeMap<String, String> {
        for dir in self.walk().iter().filter(|(path, _)| self.is_dir(path)).map(|(path, _)| path) {
            let below = |path: &str| path.strip_prefix(&format!("{dir}/")).is_some_and(|rest| !rest.contains('/'));
            let dirs = self.walk().iter().filter(|(path, _)| below(path) && self.is_dir(path)).count();
            assert_eq!(self.links(dir), 2 + dirs as u32, "links of {dir}");
        }
        let label = |ino| self.labels.get(&ino).cloned().unwrap_or("new".into());
        self.walk().into_iter().map(|(path, ino)| (path, label(ino))).collect()
    }

    /// What differs from the base.
    fn changes(&self) -> String {
        let now = self.tree();
        let mut paths: Vec<&String> = self.base.keys().chain(now.keys()).collect();
        paths.sort();
        paths.dedup();
        let tell = |path: &&String| match (self.base.get(*path), now.get(*path)) {
            (old, new) if old == new => None,
            (_, None) => Some(format!("-{path}")),
            (_, Some(label)) if label == last(path) => Some((*path).clone()),
            (_, Some(label)) => Some(format!("{path}={label}")),
        };
        paths.iter().filter_map(tell).collect::<Vec<_>>().join(" ")
    }

    fn committed(&self) -> Vec<u64> {
        self.volume.domains().iter().map(|d| d.committed_tx).collect()
    }

    /// Has the transactions of these domains survive a crash.
    fn crash(self, domains: &[u16]) -> Self {
        domains.iter().for_each(|d| self.volume.commit_domain(DomainId(*d), false).unwrap());
        self.volume.crash();
        Self { volume: mount(&self.device), ..self }
    }
}

#[test]
fn what_must_be_durable_first_and_what_recovery_makes_of_each_half() {
    let mut wrong = Vec::new();
    for row in ROWS {
        let mut have = [const { String::new() }; 3];
        for (domains, have) in [&[0][..], &[1], &[0, 1]].iter().zip(&mut have) {
            let w = World::new();
            row.before.iter().for_each(|s| w.step(*s));
            let old = w.committed();
            w.step(row.event);
            let letters = ["A", "B"].iter().zip(old.iter().zip(w.committed()));
            let durable: String = letters.filter(|(_, (old, new))| **old < *new).map(|(l, _)| *l).collect();
            let before_crash = w.changes();
            let w = w.crash(domains);
            *have = format!("durable {durable:?}: {:?}", w.changes());
            if domains.len() == 2 {
                assert_eq!(w.changes(), before_crash, "{:?} {:?}: both halves", row.before, row.event);
            }
        }
        let want = [row.a, row.b].map(|tree| format!("durable {:?}: {tree:?}", row.durable));
        for (which, (have, want)) in have.iter().zip(&want).enumerate().filter(|(_, (have, want))| have != want) {
            wrong.push(format!("{:?} {:?}, half {which}: have {have}, want {want}", row.before, row.event));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// An entry that a crash left over, of a directory that is gone, counts as a link until something takes its name.
#[test]
fn a_stale_entry_of_a_directory_is_replaced_with_its_link() {
    let w = World::new();
    let (dir, links) = (w.ino("B"), w.links("B"));
    for kind in [FileKind::File, FileKind::Dir] {
        w.step(Mkdir("B/n"));
        let (i, lost) = (w.volume.mounted(), w.ino("B/n"));
        assert!(i.cell(lost).unwrap().state.write().remove_link(dir, b"n", 0));
        i.maybe_stale.store(true, std::sync::atomic::Ordering::Relaxed);
        let new = NewNode { kind, mode: 0o755, umask: 0, rdev: 0, target: b"" };
        let made = w.volume.create(dir, b"n", &new, &Cred::root()).unwrap();
        assert!(made.ino != lost, "{kind:?}");
        assert_eq!(w.links("B"), links + u32::from(kind == FileKind::Dir), "{kind:?}");
        if kind == FileKind::Dir { w.step(Rmdir("B/n")) } else { w.step(Rm("B/n")) }
    }
    assert_eq!(w.links("B"), links);
}

const A: DomainId = DomainId(0);
const B: DomainId = DomainId(1);

fn vacated(domain: DomainId, tx: u64, alive: bool) -> Vacated {
    Vacated { domain, tx: TxId(tx), alive }
}

#[test]
fn who_takes_a_name_waits_for_those_that_left_it() {
    let commits = |d, t| Taking::Commits(Frontier::of(d, TxId(t)));
    let syncs = |after, with: Frontier| Taking::Syncs(Before { after: TxId(after), sync_with: with });
    let rows = [
        (vec![], syncs(0, Frontier::EMPTY)),
        (vec![vacated(A, 5, true)], syncs(5, Frontier::EMPTY)),
        (vec![vacated(A, 5, false)], syncs(0, Frontier::EMPTY)),
        (vec![vacated(B, 7, false)], syncs(0, Frontier::of(B, TxId(7)))),
        (vec![vacated(B, 7, true)], commits(B, 7)),
        (vec![vacated(A, 5, true), vacated(B, 7, false)], syncs(5, Frontier::of(B, TxId(7)))),
        (vec![vacated(A, 5, true), vacated(B, 7, true)], commits(B, 7)),
    ];
    for (left, want) in rows {
        assert_eq!(take_name(&left, A), want, "{left:?}");
    }
}

#[test]
fn directory_moves_and_ends() {
    let t = TxId(3);
    assert_eq!(move_directory(None, A, false), Frontier::EMPTY);
    assert_eq!(move_directory(Some((A, t)), A, false), Frontier::EMPTY, "it is durable before, or with it");
    assert_eq!(move_directory(Some((A, t)), A, true), Frontier::of(A, t), "recovery completes an exchange");
    assert_eq!(move_directory(Some((B, t)), A, false), Frontier::of(B, t));
    let left: Frontier = [(A, t), (B, TxId(8))].into_iter().collect();
    assert_eq!(end_directory(left.clone(), A), Frontier::of(B, TxId(8)));
    assert_eq!(end_directory(left, B), Frontier::of(A, t));
}

#[test]
fn names_that_recovery_needs() {
    use RenameMode::{Exchange, Replace};
    // mode, victim, directory, links
    let rows = [
        (Exchange, false, false, 1, true),
        (Exchange, true, true, 2, true),
        (Replace, false, false, 2, false),
        (Replace, true, false, 1, false),
        (Replace, true, false, 2, true),
        (Replace, true, true, 2, false),
    ];
    for (mode, victim, dir, nlink, want) in rows {
        assert_eq!(names_durable_first(mode, victim, dir, nlink), want, "{mode:?} {victim} {dir} {nlink}");
    }
}

#[test]
fn a_tombstone_is_judged_by_its_newcomer() {
    let link = Link { parent: InodeNo(1), name: b"n"[..].into() };
    let t = Tombstone { link, newcomer: InodeNo(9), generation: 2, version: 7 };
    let inode = InodeRef { ino: InodeNo(9), generation: 2 };
    let partner = Some(InodeVersion { inode, version: 7 });
    let rows = [
        (None, true, Fate::Lost),
        (None, false, Fate::Regained),
        (partner, true, Fate::Lost),
        (partner, false, Fate::Completed),
        // another one took the partner's name afterwards
        (Some(InodeVersion { inode, version: 6 }), false, Fate::Regained),
    ];
    for (exchange, survived, want) in rows {
        assert_eq!(judge(&t, exchange, survived), want, "{exchange:?} {survived}");
    }
    assert!(holder_keeps(5, 4) && holder_keeps(5, 5) && !holder_keeps(4, 5));
}
