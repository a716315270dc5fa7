//! A crash at every write and every flush of a volume that gets a device more, or loses its last one.
//!
//! Both devices are recorded as parts of one: a crash finds both at one moment, and each may lose what it has not flushed. What
//! was synced before must be there, the volume is the old one or the new one, fsck finds nothing, and the same change goes on to
//! its end.

use crate::resize::{holds, keeps, options, write};
use crate::states::{Budget, CrashState, Log};
use crate::torn::{ANY_COPY, SEGMENT_TABLE_COPY, nothing_but};
use crate::walk::fsck;
use braidfs::{Cred, MkfsOptions, OpenHow, Volume, mkfs};
use braidfs_device::{Device, Event, MemDevice, PartDevice, Parted, RecordDevice};
use std::sync::Arc;

const MIB: u64 = 1 << 20;
const BLOCK: u64 = 4096;
/// The first device, and the one that comes or goes, in groups of 4 MiB.
const FIRST: u64 = 32 * MIB;
const MORE: u64 = 24 * MIB;

/// Two devices of so many bytes, which are parts of one.
pub(crate) fn both<D: Parted + 'static>(whole: &Arc<D>, bytes: [u64; 2]) -> [Arc<dyn Device>; 2] {
    let parts: Result<[_; 2], _> = PartDevice::split(whole, bytes.map(|n| n / BLOCK)).try_into();
    parts.unwrap_or_else(|_| unreachable!("a part for each length"))
}

/// A change of a volume's devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// One more comes.
    Add,
    /// The last one goes, on which data lies.
    Remove,
}

/// How a volume may be found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Promised {
    /// The call has returned.
    done: bool,
    /// So has the fsync behind it.
    behind: bool,
}

fn bytes(v: &Volume) -> u64 {
    v.super_block().device_table().iter().map(|d| d.blocks.get() * BLOCK).sum()
}

pub(crate) fn large(v: &Volume, name: &str, mib: u64) -> Result<(), String> {
    let how = OpenHow { read: true, write: true, create: true, mode: 0o644, ..OpenHow::default() };
    let f = v.open_path(name.as_bytes(), how, &Cred::root()).map_err(|e| format!("{name}: {e}"))?;
    for at in 0..mib {
        let n = v.write(&f, at * MIB, &vec![at as u8; MIB as usize]).map_err(|e| format!("{name}, MiB {at}: {e}"))?;
        assert_eq!(n as u64, MIB);
    }
    v.fsync(f.ino(), false).map_err(|e| e.to_string())
}

pub(crate) fn large_holds(v: &Volume, name: &str, mib: u64) -> Result<(), String> {
    let how = OpenHow { read: true, ..OpenHow::default() };
    let f = v.open_path(name.as_bytes(), how, &Cred::root()).map_err(|e| format!("{name}: {e}"))?;
    let mut got = vec![0; MIB as usize];
    for at in 0..mib {
        let n = v.read(&f, at * MIB, &mut got).map_err(|e| format!("{name}, MiB {at}: {e}"))?;
        if n as u64 != MIB || got.iter().any(|b| *b != at as u8) {
            return Err(format!("{name}: MiB {at} is another, {n} bytes"));
        }
    }
    Ok(())
}

fn change(v: &Volume, what: Change, device: &Arc<dyn Device>) -> Result<(), braidfs::Error> {
    match what {
        Change::Add => v.add_device(Arc::clone(device), false).map(drop),
        Change::Remove => v.remove_device(1, &|_, _| true).map(drop),
    }
}

/// MiB of a file that lies on both devices before one goes.
const KEPT: u64 = 8;

/// Looks at one state that a crash leaves; whether the volume is the old one there.
fn look(all: &[Arc<dyn Device>; 2], what: Change, promised: Promised) -> Result<bool, String> {
    let first = &all[..1];
    let text = |e: braidfs::Error| e.to_string();
    // the new device may hold nothing yet, the old one nothing any more
    let has_super = |d: &Arc<dyn Device>| braidfs::store::super_io::read_one(d).is_ok();
    let given = if has_super(&all[1]) { &all[..] } else { first };
    // who drains a device writes tables, who adds one does not
    let adds = what == Change::Add;
    if adds {
        fsck(given)?
    } else {
        nothing_but(ANY_COPY, given)?
    }
    let v = Volume::mount(given.to_vec(), options()).map_err(text)?;
    let (has, one, both) = (bytes(&v), FIRST, FIRST + MORE);
    let (old, new) = if what == Change::Add { (one, both) } else { (both, one) };
    if has != old && has != new {
        return Err(format!("{has} bytes, which is neither {old} nor {new}"));
    }
    let is_old = has == old;
    if is_old && promised.done {
        return Err("it is the old volume after the call returned".into());
    }
    let there = |v: &Volume| -> Result<(), String> {
        holds(v, "before", 1)?;
        holds(v, "meanwhile", 2)?;
        if what == Change::Remove { large_holds(v, "large", KEPT) } else { Ok(()) }
    };
    there(&v)?;
    if promised.behind {
        holds(&v, "behind", 3)?;
    }
    v.unmount().map_err(text)?;
    if has == both {
        match Volume::mount(first.to_vec(), options()) {
            Err(e) if e.to_string().contains("missing: device 1 (UUID") => {}
            Err(e) => return Err(format!("without the second device: {e}")),
            Ok(_) => return Err("it can be mounted without the second device".into()),
        }
    }
    let members = if has == both { &all[..] } else { first };
    let used = if adds { fsck(members) } else { nothing_but(SEGMENT_TABLE_COPY, members) };
    used.map_err(|e| format!("after a mount: {e}"))?;
    let v = Volume::mount(members.to_vec(), options()).map_err(text)?;
    there(&v)?;
    if is_old {
        change(&v, what, &all[1]).map_err(|e| format!("again: {e}"))?;
    }
    if bytes(&v) != new {
        return Err(format!("{} bytes after the second attempt", bytes(&v)));
    }
    if what == Change::Add {
        // room that only both have
        large(&v, "large", KEPT + 24)?;
    }
    there(&v)?;
    v.unmount().map_err(text)?;
    let members = if new == both { &all[..] } else { first };
    fsck(members).map_err(|e| format!("after the second attempt: {e}"))?;
    // where a crash came behind the superblock that counts its own stays: it is left out by it, as seen above
    if what == Change::Remove && is_old && has_super(&all[1]) {
        return Err("the removed device still tells of the volume".into());
    }
    let v = Volume::mount(members.to_vec(), options()).map_err(text)?;
    there(&v)?;
    if what == Change::Add {
        large_holds(&v, "large", KEPT + 24)?;
    }
    v.unmount().map_err(text)?;
    Ok(is_old)
}

/// A volume that is about to change, unmounted.
fn made(what: Change) -> Result<Arc<MemDevice>, String> {
    let text = |e: braidfs::Error| e.to_string();
    let whole = Arc::new(MemDevice::soiled((FIRST + MORE) / BLOCK));
    let [first, second] = both(&whole, [FIRST, MORE]);
    let how = MkfsOptions { domains: Some(2), group_bytes: Some(4 * MIB), ..MkfsOptions::default() };
    mkfs::format(std::slice::from_ref(&first), &how).map_err(text)?;
    let v = Volume::mount(vec![first], options()).map_err(text)?;
    write(&v, "before", 1)?;
    if what == Change::Remove {
        v.add_device(second, false).map_err(text)?;
        large(&v, "filler", 22)?;
        large(&v, "large", KEPT)?;
        v.unlink_path(b"filler", &Cred::root()).map_err(text)?;
    }
    v.unmount().map_err(text)?;
    Ok(whole)
}

/// Crashes a change at every point; how many states there were, and in how many the volume was still the old one.
///
/// # Errors
/// The first state that is none of those that may be.
pub fn every_crash_of_a_device(what: Change) -> Result<(usize, usize), String> {
    let text = |e: braidfs::Error| e.to_string();
    let log = Arc::new(RecordDevice::new(made(what)?.snapshot()));
    let [first, second] = both(&log, [FIRST, MORE]);
    let members = if what == Change::Add { vec![first] } else { vec![first, Arc::clone(&second)] };
    let v = Volume::mount(members, options()).map_err(text)?;
    write(&v, "meanwhile", 2)?;
    let begin = log.log_len();
    change(&v, what, &second).map_err(text)?;
    let end = log.log_len();
    write(&v, "behind", 3)?;
    v.crash();
    let log = Log::of(&log);
    each_crash(&log, [FIRST, MORE], [begin, end], |upto, devices| {
        let promised = Promised { done: upto >= end, behind: upto == log.events.len() };
        look(devices, what, promised).map_err(|e| format!("{what:?}: {e}"))
    })
}

/// Crashes two recorded devices of so many bytes at each flush from the first of the moments on, and at both of these, and has
/// each state looked at, told which moment it is; how many states there were, and how many of them `look` counted.
pub(crate) fn each_crash(
    log: &Log,
    bytes: [u64; 2],
    [begin, end]: [usize; 2],
    mut look: impl FnMut(usize, &[Arc<dyn Device>; 2]) -> Result<bool, String>,
) -> Result<(usize, usize), String> {
    let budget = Budget { subsets: 2, samples: 1 };
    let mut rng = fastrand::Rng::with_seed(7);
    let (mut states, mut counted) = (0, 0);
    for upto in begin..=log.events.len() {
        // a crash between two flushes is the later one with some writes lost
        let flushes = log.events.get(upto).is_none_or(|e| matches!(e, Event::Flush { .. }));
        if ![begin, end].contains(&upto) && !flushes {
            continue;
        }
        for keep in keeps(log, upto, &budget, &mut rng) {
            let crash = CrashState { upto, keep };
            let devices = both(&Arc::new(MemDevice::from_image(log.image(&crash))), bytes);
            states += 1;
            let is = look(upto, &devices).map_err(|e| format!("moments {begin} to {end}, {crash}: {e}"))?;
            counted += usize::from(is);
        }
    }
    Ok((states, counted))
}
