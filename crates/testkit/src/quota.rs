//! A crash at every write and every flush while limits of a user, a group and a directory are set, used, changed and removed.
//!
//! After each the limits, each with all that it has, are those of one of the calls that had returned or were under way; fsck
//! finds nothing, and what is counted is what there is. Files are there with their content as they were synced, and count for the
//! directory's project if the call that gave them its number, or took that away, allows it. No file has a number without
//! limits, but one that was moved out.

use crate::resize::options;
use crate::run::Setup;
use crate::small::{new_node, two_directories};
use crate::tenant::each_crash;
use crate::walk::fsck;
use braidfs::{Cred, Error, FileKind, InodeNo, MkfsOptions, QuotaLimits, QuotaOwner, RenameMode, Volume, mkfs};
use braidfs_device::{Device, MemDevice, RecordDevice};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

const MIB: u64 = 1 << 20;
const USER: QuotaOwner = QuotaOwner::User(1000);
const GROUP: QuotaOwner = QuotaOwner::Group(1000);

/// Limits of the user, of the group and of the directory.
type All = [QuotaLimits; 3];

/// No limits.
const NONE: QuotaLimits =
    QuotaLimits { space: None, soft_space: None, inodes: None, soft_inodes: None, grace: braidfs::GRACE };

/// Limits of which each field is another for another `n`, and that nobody meets here.
const fn limits(n: u64) -> QuotaLimits {
    QuotaLimits {
        space: Some((4 + n) * MIB),
        soft_space: Some((3 + n) * MIB - 4096 * n),
        inodes: Some(1000 + n),
        soft_inodes: Some(500 - n),
        grace: Duration::from_secs(86_400 + n),
    }
}

/// Those after each call: each sets, changes or removes all that one owner has, or makes and syncs a file.
const STEPS: [All; 11] = [
    [NONE, NONE, NONE],
    [limits(4), NONE, NONE],
    [limits(4), NONE, NONE],
    [limits(4), NONE, limits(1)],
    [limits(4), limits(2), limits(1)],
    [limits(4), limits(2), limits(1)],
    [limits(3), limits(2), limits(1)],
    [limits(3), limits(2), limits(5)],
    [limits(3), limits(2), NONE],
    [NONE, limits(2), NONE],
    [NONE, NONE, NONE],
];
/// The calls that make and sync the files `a` and `b`, give the directory limits, and take them away. Before the last one `a` is
/// removed.
const MAKES_A: usize = 2;
const GIVES: usize = 3;
const MAKES_B: usize = 5;
const TAKES: usize = 8;
/// The project of the directory: the volume's first.
const PROJECT: u32 = 1;

fn found(v: &Volume) -> All {
    let all = v.quotas();
    let of = |is: fn(&QuotaOwner) -> bool| {
        let found = all.iter().filter(|q| is(&q.owner)).map(|q| q.limits);
        found.into_iter().find(|l| QuotaLimits { grace: NONE.grace, ..*l } != NONE).unwrap_or(NONE)
    };
    [of(|o| *o == USER), of(|o| *o == GROUP), of(|o| matches!(o, QuotaOwner::Project(_)))]
}

/// Limits that a volume with [`Setup::quotas`] has, of so much that nobody meets one.
const LIMITS: QuotaLimits = QuotaLimits {
    space: Some(1 << 40),
    soft_space: Some(1 << 39),
    inodes: Some(1 << 38),
    soft_inodes: Some(1 << 37),
    grace: Duration::from_secs(77),
};
const LIMITED: [QuotaOwner; 2] = [USER, QuotaOwner::Group(3)];

/// Sets the limits of [`Setup::quotas`], and unmounts.
///
/// # Errors
/// Of any of it.
pub fn begin(v: Volume) -> Result<(), String> {
    for owner in LIMITED {
        v.quota_change(owner, |l| *l = LIMITS).map_err(|e| format!("{owner:?}: {e}"))?;
    }
    v.unmount().map_err(|e| format!("unmount: {e}"))
}

/// The limits of a volume with [`Setup::quotas`] are those that were set, and all that is counted is what there is.
///
/// # Errors
/// What is not.
pub fn holds(v: &Volume, setup: &Setup) -> Result<(), String> {
    if !setup.quotas {
        return Ok(());
    }
    let limits: Vec<_> = v.limited_quotas().into_iter().map(|q| (q.owner, q.limits)).collect();
    if limits != LIMITED.map(|owner| (owner, LIMITS)) {
        return Err(format!("limits are {limits:?}"));
    }
    match v.quota_drift() {
        Ok(wrong) if wrong.is_empty() => Ok(()),
        Ok(wrong) => Err(format!("counted wrong by (owner, blocks, inodes): {wrong:?}")),
        Err(e) => Err(format!("counting anew: {e}")),
    }
}

/// Users and groups of a volume with [`Setup::quotas`] have as many inodes as a list of all their users and groups has.
///
/// # Errors
/// Which do not.
pub fn inodes_are(v: &Volume, setup: &Setup, all: impl Iterator<Item = (u32, u32)>) -> Result<(), String> {
    if !setup.quotas {
        return Ok(());
    }
    let mut want: BTreeMap<QuotaOwner, u64> = BTreeMap::new();
    for (uid, gid) in all {
        *want.entry(QuotaOwner::User(uid)).or_default() += 1;
        *want.entry(QuotaOwner::Group(gid)).or_default() += 1;
    }
    let have: BTreeMap<_, _> = v.quotas().into_iter().map(|q| (q.owner, q.inodes)).filter(|(_, n)| *n > 0).collect();
    if have == want { Ok(()) } else { Err(format!("inodes by owner are {have:?}, not {want:?}")) }
}

fn text(e: Error) -> String {
    e.to_string()
}

fn format_small() -> Result<Arc<MemDevice>, String> {
    let small = Arc::new(MemDevice::soiled(48 * MIB / 4096));
    let device: Arc<dyn Device> = small.clone();
    let how = MkfsOptions { domains: Some(2), group_bytes: Some(4 * MIB), ..MkfsOptions::default() };
    mkfs::format(std::slice::from_ref(&device), &how).map_err(text)?;
    Ok(small)
}

/// Bytes of the file that is there from the beginning, and of those that are made.
const FIRST: usize = MIB as usize / 2;
const LATER: usize = 20_000;

/// The project of a file, which has so many bytes; `None` where it is not there.
fn project_of(v: &Volume, dir: InodeNo, name: &str, bytes: usize) -> Result<Option<u32>, String> {
    let a = match v.lookup(dir, name.as_bytes()) {
        Err(Error::NotFound) => return Ok(None),
        found => found.map_err(|e| format!("{name}: {e}"))?,
    };
    let mut got = vec![0; bytes + 1];
    let n = v.read(&v.open(a.ino).map_err(text)?, 0, &mut got).map_err(|e| format!("{name}: {e}"))?;
    if n != bytes || got[..n].iter().any(|b| *b != 1) || (a.uid, a.gid) != (1000, 1000) {
        return Err(format!("{name}: {n} bytes, or another content, or the owner {}:{}", a.uid, a.gid));
    }
    Ok(Some(a.project))
}

/// Projects by name.
type Projects = Vec<(&'static str, u32)>;

/// What counts for the directory's project.
struct Tree {
    /// Limits are given to this one.
    dir: InodeNo,
    /// It is in another domain.
    other: InodeNo,
    /// States in which some of what lies in the directory had its number and some had not.
    halves: Cell<usize>,
}

impl Tree {
    /// The projects of the directory and of what lies in it, by name, and that of the file that was moved out, where it is out.
    fn projects(&self, v: &Volume) -> Result<(Projects, Option<u32>), String> {
        let names = [("f", FIRST), ("a", LATER), ("b", LATER), ("moved", LATER)];
        let mut all = vec![(".", v.getattr(self.dir).map_err(text)?.project)];
        for (name, bytes) in names {
            all.extend(project_of(v, self.dir, name, bytes)?.map(|p| (name, p)));
        }
        Ok((all, project_of(v, self.other, "moved", LATER)?))
    }

    /// After so many calls the files are there that were synced, and have the number that they may have; `limited`: the project has
    /// limits.
    fn holds(&self, v: &Volume, done: usize, limited: bool) -> Result<(), String> {
        let (all, moved) = self.projects(v)?;
        let wrong =
            |why: &str| Err(format!("{why} after {done} calls, limits {limited}: {all:?}, moved out {moved:?}"));
        let there = |name| all.iter().any(|(n, _)| *n == name);
        // Without a sync a removal or a move may be there or not.
        let may_be = |made: usize, gone: usize| match done {
            n if n + 1 < made => [false, false],
            n if (made..gone).contains(&n) => [true, true],
            _ => [false, true],
        };
        let never = STEPS.len();
        for (name, made, gone) in [("f", 0, never), ("a", MAKES_A, TAKES - 1), ("b", MAKES_B, never)] {
            if !may_be(made, gone).contains(&there(name)) {
                return wrong(name);
            }
        }
        if there("moved") == moved.is_some() || moved.is_some() && done < GIVES {
            return wrong("the file that is moved out");
        }
        if moved.is_some_and(|p| p != PROJECT) {
            return wrong("what was moved out has no number");
        }
        let numbers: &[u32] = match done {
            n if n + 1 < GIVES => &[0],
            n if (GIVES..TAKES - 1).contains(&n) => &[PROJECT],
            n if n < TAKES && limited => &[0, PROJECT],
            _ => &[0],
        };
        if all.iter().any(|(_, p)| !numbers.contains(p)) {
            return wrong("another number");
        }
        self.halves.set(self.halves.get() + usize::from(all.iter().any(|(_, p)| *p != all[0].1)));
        Ok(())
    }

    /// What does not count for the directory cannot come into it.
    fn border_holds(&self, v: &Volume) -> Result<(), String> {
        if v.getattr(self.dir).map_err(text)?.project == 0 {
            return Ok(());
        }
        let out = v.lookup(self.other, b"out").map_err(text)?.ino;
        let crossed = [
            v.rename(self.other, b"out", self.dir, b"out", RenameMode::Replace).map(drop),
            v.rename(self.other, b"out", self.dir, b"f", RenameMode::Exchange).map(drop),
            v.link(out, self.dir, b"out").map(drop),
        ];
        match crossed.iter().all(|r| matches!(r, Err(Error::CrossProject))) {
            true => Ok(()),
            false => Err(format!("over the border of a directory with limits: {crossed:?}")),
        }
    }

    /// All of it counts for the project that a call has given it.
    fn counts_for(&self, v: &Volume, owner: QuotaOwner) -> Result<(), String> {
        let (all, moved) = self.projects(v)?;
        match all.iter().all(|(_, p)| QuotaOwner::Project(*p) == owner) && moved.is_none_or(|p| p == PROJECT) {
            true => Ok(()),
            false => Err(format!("what lies in a directory of {owner:?} has the numbers {all:?}, moved out {moved:?}")),
        }
    }

    fn look(&self, image: MemDevice, done: usize) -> Result<usize, String> {
        let devices: [Arc<dyn Device>; 1] = [Arc::new(image)];
        fsck(&devices)?;
        let v = Volume::mount(devices.to_vec(), options()).map_err(text)?;
        let (is, may) = (found(&v), &STEPS[done..(done + 2).min(STEPS.len())]);
        if !may.contains(&is) {
            return Err(format!("{is:?} after {done} calls"));
        }
        let counted = |v: &Volume| match v.quota_drift() {
            Ok(wrong) if !v.any_quotas() || wrong.is_empty() => Ok(()),
            other => Err(format!("after {done} calls: {other:?}")),
        };
        counted(&v)?;
        let limited = is[2] != NONE;
        self.holds(&v, done, limited)?;
        self.border_holds(&v)?;
        // and it goes on, also where an assignment was cut off; a number that something still has is no other directory's
        let out = self.projects(&v)?.1.is_some();
        let q = v.quota_directory(self.dir, |l| *l = limits(9)).map_err(text)?;
        if (q.owner == QuotaOwner::Project(PROJECT)) != (limited || !out) {
            return Err(format!("{:?} after {done} calls, moved out {out}", q.owner));
        }
        self.counts_for(&v, q.owner)?;
        counted(&v)?;
        v.unmount().map_err(text)?;
        fsck(&devices).map_err(|e| format!("afterwards: {e}"))?;
        let v = Volume::mount(devices.to_vec(), options()).map_err(text)?;
        let again = found(&v);
        if again != [is[0], is[1], limits(9)] {
            return Err(format!("{again:?} after an unmount"));
        }
        self.counts_for(&v, q.owner)?;
        self.border_holds(&v)?;
        counted(&v)?;
        v.unmount().map_err(text)?;
        Ok(usize::from(is != STEPS[0]))
    }
}

/// A file of the user.
fn make(v: &Volume, dir: InodeNo, name: &[u8], bytes: usize) -> Result<(), String> {
    let a = v.create(dir, name, &new_node(FileKind::File), &Cred::user(1000, 1000)).map_err(text)?;
    let f = v.open(a.ino).map_err(text)?;
    v.write(&f, 0, &vec![1; bytes]).map_err(text)?;
    v.fsync(f.ino(), false).map_err(text)
}

/// Crashes at every point; how many states there were, in how many there were limits, and in how many of them the directory's number
/// was given, or taken away, by halves.
///
/// # Errors
/// The first state that is none of those that may be.
pub fn every_crash_of_a_quota() -> Result<(usize, usize, usize), String> {
    let small = format_small()?;
    let v = Volume::mount(vec![small.clone()], options()).map_err(text)?;
    let [dir, other] = two_directories(&v);
    make(&v, dir, b"f", FIRST)?;
    // of the other domain, also where it lies in the directory
    make(&v, other, b"moved", LATER)?;
    make(&v, other, b"out", LATER)?;
    v.rename(other, b"moved", dir, b"moved", RenameMode::NoReplace).map_err(text)?;
    v.unmount().map_err(text)?;
    let log = Arc::new(RecordDevice::new(small.snapshot()));
    let v = Volume::mount(vec![Arc::clone(&log) as Arc<dyn Device>], options()).map_err(text)?;
    let mut ends = vec![log.log_len()];
    let set = |owner, to| v.quota_change(owner, |l| *l = to).map(drop).map_err(text);
    let project = QuotaOwner::Project(PROJECT);
    for (call, to) in STEPS.iter().enumerate().skip(1) {
        match call {
            MAKES_A => make(&v, dir, b"a", LATER)?,
            GIVES => {
                let q = v.quota_directory(dir, |l| *l = to[2]).map_err(text)?;
                assert_eq!(q.owner, project);
            }
            MAKES_B => make(&v, dir, b"b", LATER)?,
            1 | 6 => set(USER, to[0])?,
            4 => {
                v.rename(dir, b"moved", other, b"moved", RenameMode::NoReplace).map_err(text)?;
                set(GROUP, to[1])?;
            }
            7 => set(project, to[2])?,
            TAKES => {
                v.unlink(dir, b"a").map_err(text)?;
                v.quota_remove(project).map_err(text)?;
            }
            9 => v.quota_remove(USER).map_err(text)?,
            _ => v.quota_remove(GROUP).map_err(text)?,
        }
        ends.push(log.log_len());
    }
    v.crash();
    let tree = Tree { dir, other, halves: Cell::new(0) };
    let (states, with) = each_crash(&log, &ends, |image, done| tree.look(image, done))?;
    Ok((states, with, tree.halves.get()))
}
