//! A crash at every write and every flush of a volume that gets one more domain.
//!
//! What was synced before must be there, the domain is there with all that it needs or not at all, fsck finds nothing, no
//! group is lost, and the same call again adds one.

use crate::resize::{holds, keeps, options, write};
use crate::states::{Budget, CrashState, Log};
use crate::walk::fsck;
use braidfs::{Cred, DomainId, FileKind, InodeNo, MkfsOptions, NewNode, Volume, mkfs};
use braidfs_device::{Device, MemDevice, RecordDevice};
use std::sync::Arc;

const MIB: u64 = 1 << 20;
const SIZE: u64 = 32 * MIB;
const BEFORE: usize = 2;

/// A directory in domain `wanted`, by the placement of directories: one after the other.
fn dir_in(v: &Volume, wanted: DomainId, prefix: &str) -> Result<String, String> {
    let text = |e: braidfs::Error| format!("{prefix}: {e}");
    for n in 0..16 {
        let name = format!("{prefix}{n}");
        let new = NewNode { kind: FileKind::Dir, mode: 0o755, umask: 0, rdev: 0, target: b"" };
        let made = v.create(InodeNo::ROOT, name.as_bytes(), &new, &Cred::root()).map_err(text)?;
        if v.domain_of(made.ino).map_err(text)? == wanted {
            return Ok(name);
        }
    }
    Err(format!("placement never chose {wanted}"))
}

/// Blocks of all domains and of groups that are nobody's.
fn blocks(v: &Volume) -> u64 {
    v.statfs().blocks
}

/// Looks at one state that a crash leaves; whether the domain was not there.
fn look(image: MemDevice, dir: &str, (done, behind): (bool, bool), all: u64) -> Result<bool, String> {
    let devices: [Arc<dyn Device>; 1] = [Arc::new(image)];
    let text = |e: braidfs::Error| e.to_string();
    fsck(&devices)?;
    let v = Volume::mount(devices.to_vec(), options()).map_err(text)?;
    holds(&v, "before", 1)?;
    holds(&v, "meanwhile", 2)?;
    let missing = match v.domains().len() {
        n if n == BEFORE => true,
        n if n == BEFORE + 1 => false,
        n => return Err(format!("{n} domains")),
    };
    if missing && done {
        return Err("the domain is not there after the call returned".into());
    }
    if behind {
        holds(&v, &format!("{dir}/behind"), 3)?;
    }
    let id = if missing { v.add_domain().map_err(|e| format!("again: {e}"))? } else { DomainId(BEFORE as u16) };
    let later = dir_in(&v, id, "later")?;
    write(&v, &format!("{later}/file"), 4)?;
    // the journal is not data: it is as long as the others
    let journal: u64 = v.domains().last().map_or(0, |d| d.journal_blocks);
    if blocks(&v) + journal != all {
        return Err(format!("{} blocks and a journal of {journal}, of {all}", blocks(&v)));
    }
    v.unmount().map_err(text)?;
    fsck(&devices).map_err(|e| format!("after the second attempt: {e}"))?;
    let v = Volume::mount(devices.to_vec(), options()).map_err(text)?;
    holds(&v, &format!("{later}/file"), 4)?;
    if v.super_block().domains.get() != BEFORE as u16 + 1 {
        return Err("the superblock does not tell of it".into());
    }
    v.unmount().map_err(text)?;
    Ok(missing)
}

/// Crashes the addition of a domain at every point; how many states there were, and in how many it was not there.
///
/// # Errors
/// The first state that is none of those that may be.
pub fn every_crash_of_an_addition() -> Result<(usize, usize), String> {
    let text = |e: braidfs::Error| e.to_string();
    let small = Arc::new(MemDevice::soiled(SIZE / 4096));
    let device: Arc<dyn Device> = small.clone();
    let how = MkfsOptions { domains: Some(BEFORE as u16), group_bytes: Some(4 * MIB), ..MkfsOptions::default() };
    mkfs::format(std::slice::from_ref(&device), &how).map_err(text)?;
    let v = Volume::mount(vec![device], options()).map_err(text)?;
    write(&v, "before", 1)?;
    let all = blocks(&v);
    v.unmount().map_err(text)?;
    let log = Arc::new(RecordDevice::new(small.snapshot()));
    let v = Volume::mount(vec![Arc::clone(&log) as Arc<dyn Device>], options()).map_err(text)?;
    write(&v, "meanwhile", 2)?;
    let begin = log.log_len();
    let id = v.add_domain().map_err(text)?;
    let end = log.log_len();
    let dir = dir_in(&v, id, "d")?;
    write(&v, &format!("{dir}/behind"), 3)?;
    v.crash();
    let record = Log::of(&log);
    let budget = Budget { subsets: 3, samples: 12 };
    let mut rng = fastrand::Rng::with_seed(7);
    let (mut states, mut missing) = (0, 0);
    for upto in record.points(begin, [begin, end]) {
        for keep in keeps(&record, upto, &budget, &mut rng) {
            let state = CrashState { upto, keep };
            let image = MemDevice::from_image(record.image(&state));
            let promised = (upto >= end, upto == record.events.len());
            states += 1;
            missing += usize::from(look(image, &dir, promised, all).map_err(|e| format!("{state}: {e}"))?);
        }
    }
    Ok((states, missing))
}
