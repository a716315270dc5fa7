//! A crash at every write and every flush while limits of a user, a group and a directory are set, used, changed and removed.
//!
//! After each the limits are those of one of the calls that had returned or were under way; fsck finds nothing, and what is
//! counted is what there is.

use crate::resize::options;
use crate::run::Setup;
use crate::tenant::each_crash;
use crate::walk::fsck;
use braidfs::{Cred, FileKind, InodeNo, MkfsOptions, QuotaOwner, Volume, mkfs};
use braidfs_device::{Device, MemDevice, RecordDevice};
use std::collections::BTreeMap;
use std::sync::Arc;

const MIB: u64 = 1 << 20;
const USER: QuotaOwner = QuotaOwner::User(1000);
const GROUP: QuotaOwner = QuotaOwner::Group(1000);

/// Hard limits of the user, of the group and of the directory, bytes.
type Hard = [Option<u64>; 3];

/// Those after each call.
const STEPS: [Hard; 8] = [
    [None, None, None],
    [Some(8 * MIB), None, None],
    [Some(8 * MIB), None, Some(2 * MIB)],
    [Some(8 * MIB), Some(6 * MIB), Some(2 * MIB)],
    [Some(4 * MIB), Some(6 * MIB), Some(2 * MIB)],
    [Some(4 * MIB), Some(6 * MIB), None],
    [None, Some(6 * MIB), None],
    [None, None, None],
];

fn limits(v: &Volume) -> Hard {
    let all = v.quotas();
    let of = |is: fn(&QuotaOwner) -> bool| all.iter().filter(|q| is(&q.owner)).find_map(|q| q.limits.space);
    [of(|o| *o == USER), of(|o| *o == GROUP), of(|o| matches!(o, QuotaOwner::Project(_)))]
}

/// Limits that a volume with [`Setup::quotas`] has, of so many bytes that nobody meets one.
const LIMIT: u64 = 1 << 40;
const LIMITED: [QuotaOwner; 2] = [USER, QuotaOwner::Group(3)];

/// Sets the limits of [`Setup::quotas`], and unmounts.
///
/// # Errors
/// Of any of it.
pub fn begin(v: Volume) -> Result<(), String> {
    for owner in LIMITED {
        v.quota_change(owner, |l| l.space = Some(LIMIT)).map_err(|e| format!("{owner:?}: {e}"))?;
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
    let limits: Vec<_> = v.limited_quotas().into_iter().map(|q| (q.owner, q.limits.space)).collect();
    if limits != LIMITED.map(|owner| (owner, Some(LIMIT))) {
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
    let (is, may) = (limits(&v), &STEPS[done..(done + 2).min(STEPS.len())]);
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
    let q = v.quota_directory(dir, |l| l.space = Some(3 * MIB)).map_err(text)?;
    let project = v.getattr(v.lookup(dir, b"f").map_err(text)?.ino).map_err(text)?.project;
    if QuotaOwner::Project(project) != q.owner {
        return Err(format!("a file below {:?} is of project {project}", q.owner));
    }
    counted(&v)?;
    v.unmount().map_err(text)?;
    fsck(&devices).map_err(|e| format!("afterwards: {e}"))?;
    let v = Volume::mount(devices.to_vec(), options()).map_err(text)?;
    if limits(&v)[2] != Some(3 * MIB) {
        return Err("the limit is another one after an unmount".into());
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
    v.quota_change(USER, |l| l.space = Some(8 * MIB)).map_err(text)?;
    ends.push(log.log_len());
    use_it(b"a")?;
    let project = v.quota_directory(dir, |l| l.space = Some(2 * MIB)).map_err(text)?.owner;
    ends.push(log.log_len());
    v.quota_change(GROUP, |l| l.space = Some(6 * MIB)).map_err(text)?;
    ends.push(log.log_len());
    use_it(b"b")?;
    v.quota_change(USER, |l| l.space = Some(4 * MIB)).map_err(text)?;
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
