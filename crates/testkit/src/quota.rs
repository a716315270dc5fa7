//! A crash at every write and every flush while limits of a user, a group and a directory are set, used, changed and removed.
//!
//! After each the limits, each with all that it has, are those of one of the calls that had returned or were under way; fsck
//! finds nothing, and what is counted is what there is.

use crate::resize::options;
use crate::run::Setup;
use crate::tenant::each_crash;
use crate::walk::fsck;
use braidfs::{Cred, FileKind, InodeNo, MkfsOptions, QuotaLimits, QuotaOwner, Volume, mkfs};
use braidfs_device::{Device, MemDevice, RecordDevice};
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

/// Those after each call: each sets, changes or removes all that one owner has.
const STEPS: [All; 9] = [
    [NONE, NONE, NONE],
    [limits(4), NONE, NONE],
    [limits(4), NONE, limits(1)],
    [limits(4), limits(2), limits(1)],
    [limits(3), limits(2), limits(1)],
    [limits(3), limits(2), limits(5)],
    [limits(3), limits(2), NONE],
    [NONE, limits(2), NONE],
    [NONE, NONE, NONE],
];

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

fn look(image: MemDevice, done: usize) -> Result<usize, String> {
    let devices: [Arc<dyn Device>; 1] = [Arc::new(image)];
    let text = |e: braidfs::Error| e.to_string();
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
    // and it goes on, also where an assignment was cut off
    let dir = v.lookup(InodeNo::ROOT, b"d").map_err(text)?.ino;
    let q = v.quota_directory(dir, |l| *l = limits(9)).map_err(text)?;
    let project = v.getattr(v.lookup(dir, b"f").map_err(text)?.ino).map_err(text)?.project;
    if QuotaOwner::Project(project) != q.owner {
        return Err(format!("a file below {:?} is of project {project}", q.owner));
    }
    counted(&v)?;
    v.unmount().map_err(text)?;
    fsck(&devices).map_err(|e| format!("afterwards: {e}"))?;
    let v = Volume::mount(devices.to_vec(), options()).map_err(text)?;
    let again = found(&v);
    if again != [is[0], is[1], limits(9)] {
        return Err(format!("{again:?} after an unmount"));
    }
    counted(&v)?;
    v.unmount().map_err(text)?;
    Ok(usize::from(is != STEPS[0]))
}

/// Crashes at every point; how many states there were, and in how many there were limits.
///
/// # Errors
/// The first state that is none of those that may be.
pub fn every_crash_of_a_quota() -> Result<(usize, usize), String> {
    let text = |e: braidfs::Error| e.to_string();
    let small = Arc::new(MemDevice::new(48 * MIB / 4096));
    let device: Arc<dyn Device> = small.clone();
    let how = MkfsOptions { domains: Some(2), group_bytes: Some(4 * MIB), ..MkfsOptions::default() };
    mkfs::format(std::slice::from_ref(&device), &how).map_err(text)?;
    let v = Volume::mount(vec![device], options()).map_err(text)?;
    let (root, user) = (InodeNo::ROOT, Cred::user(1000, 1000));
    let new = crate::small::new_node;
    let dir = v.create(root, b"d", &new(FileKind::Dir), &Cred::root()).map_err(text)?.ino;
    let f = v.open(v.create(dir, b"f", &new(FileKind::File), &user).map_err(text)?.ino).map_err(text)?;
    v.write(&f, 0, &vec![1; MIB as usize / 2]).map_err(text)?;
    drop(f);
    v.unmount().map_err(text)?;
    let log = Arc::new(RecordDevice::new(small.snapshot()));
    let v = Volume::mount(vec![Arc::clone(&log) as Arc<dyn Device>], options()).map_err(text)?;
    let mut ends = vec![log.log_len()];
    let use_it = |name: &[u8]| -> Result<(), String> {
        let f = v.open(v.create(dir, name, &new(FileKind::File), &user).map_err(text)?.ino).map_err(text)?;
        v.write(&f, 0, &[1; 20000]).map_err(text)?;
        v.fsync(f.ino(), false).map_err(text)
    };
    let set = |owner, to| v.quota_change(owner, |l| *l = to).map(drop).map_err(text);
    set(USER, STEPS[1][0])?;
    ends.push(log.log_len());
    use_it(b"a")?;
    let project = v.quota_directory(dir, |l| *l = STEPS[2][2]).map_err(text)?.owner;
    ends.push(log.log_len());
    set(GROUP, STEPS[3][1])?;
    ends.push(log.log_len());
    use_it(b"b")?;
    set(USER, STEPS[4][0])?;
    ends.push(log.log_len());
    set(project, STEPS[5][2])?;
    ends.push(log.log_len());
    v.unlink(dir, b"a").map_err(text)?;
    v.quota_remove(project).map_err(text)?;
    ends.push(log.log_len());
    v.quota_remove(USER).map_err(text)?;
    ends.push(log.log_len());
    v.quota_remove(GROUP).map_err(text)?;
    ends.push(log.log_len());
    v.crash();
    each_crash(&log, &ends, look)
}
