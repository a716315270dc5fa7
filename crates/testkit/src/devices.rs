//! A crash at every write and every flush of a volume that gets a device more, or loses its last one.
//!
//! Each device is recorded, and with each of its events how far all others were: a crash finds all devices at one moment, and
//! each may lose what it has not flushed. What was synced before must be there, the volume is the old one or the new one, fsck
//! finds nothing, and the same change goes on to its end.

use crate::resize::{holds, keeps_of, options, write};
use crate::states::{Budget, CrashState, Log};
use crate::walk::fsck;
use braidfs::{Cred, MkfsOptions, OpenHow, Volume, mkfs};
use braidfs_device::{Device, Event, MemDevice, RecordDevice, WriteOp};
use std::io;
use std::sync::{Arc, Mutex};

const MIB: u64 = 1 << 20;
const BLOCK: u64 = 4096;
/// The first device, and the one that comes or goes, in groups of 4 MiB.
const FIRST: u64 = 32 * MIB;
const MORE: u64 = 24 * MIB;

/// Devices that are recorded by one clock.
#[derive(Debug)]
pub(crate) struct Together {
    logs: Vec<RecordDevice>,
    /// After each event of any of them, how long each log was.
    times: Mutex<Vec<Vec<usize>>>,
}

impl Together {
    /// Both with what they have now, and what is recorded of them from now on.
    pub(crate) fn of(devices: &[Arc<MemDevice>; 2]) -> (Arc<Self>, [Arc<dyn Device>; 2]) {
        let logs = devices.iter().map(|d| RecordDevice::new(d.snapshot())).collect();
        let together = Arc::new(Self { logs, times: Mutex::default() });
        let both = [0, 1].map(|i| Arc::new(One(Arc::clone(&together), i)) as Arc<dyn Device>);
        (together, both)
    }

    fn tick(&self) {
        // one thread does all: see `options`
        self.times.lock().unwrap().push(self.logs.iter().map(RecordDevice::log_len).collect());
    }

    pub(crate) fn now(&self) -> usize {
        self.times.lock().unwrap().len()
    }
}

/// One of them.
#[derive(Debug)]
struct One(Arc<Together>, usize);

impl One {
    fn log(&self) -> &RecordDevice {
        &self.0.logs[self.1]
    }

    fn after<R>(&self, result: R) -> R {
        self.0.tick();
        result
    }
}

impl Device for One {
    fn blocks(&self) -> u64 {
        self.log().blocks()
    }
    fn read(&self, block: u64, buf: &mut [u8]) -> io::Result<()> {
        self.log().read(block, buf)
    }
    fn write_batch(&self, ops: &[WriteOp<'_>]) -> io::Result<()> {
        self.after(self.log().write_batch(ops))
    }
    fn flush(&self) -> io::Result<()> {
        self.after(self.log().flush())
    }
    fn discard(&self, block: u64, blocks: u64) -> io::Result<()> {
        self.after(self.log().discard(block, blocks))
    }
    fn name(&self) -> String {
        format!("device {}", self.1)
    }
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
fn look(images: Vec<MemDevice>, what: Change, promised: Promised) -> Result<bool, String> {
    let all: Vec<Arc<dyn Device>> = images.into_iter().map(|i| Arc::new(i) as Arc<dyn Device>).collect();
    let first = &all[..1];
    let text = |e: braidfs::Error| e.to_string();
    // the new device may hold nothing yet, the old one nothing any more
    let has_super = |d: &Arc<dyn Device>| braidfs::store::super_io::read_one(d).is_ok();
    let given = if has_super(&all[1]) { &all[..] } else { first };
    let torn = |found: &String| found.lines().skip(1).all(|line| line.contains("checksum does not match"));
    if let Err(found) = fsck(given)
        && (what == Change::Add || !torn(&found))
    {
        return Err(found);
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
    fsck(members).or_else(|found| if torn(&found) { Ok(()) } else { Err(found) })?;
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
fn made(what: Change) -> Result<[Arc<MemDevice>; 2], String> {
    let text = |e: braidfs::Error| e.to_string();
    let devices = [FIRST, MORE].map(|n| Arc::new(MemDevice::new(n / BLOCK)));
    let [first, second] = devices.clone().map(|d| d as Arc<dyn Device>);
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
    Ok(devices)
}

/// Crashes a change at every point; how many states there were, and in how many the volume was still the old one.
///
/// # Errors
/// The first state that is none of those that may be.
pub fn every_crash_of_a_device(what: Change) -> Result<(usize, usize), String> {
    let text = |e: braidfs::Error| e.to_string();
    let (together, [first, second]) = Together::of(&made(what)?);
    let members = if what == Change::Add { vec![first] } else { vec![first, Arc::clone(&second)] };
    let v = Volume::mount(members, options()).map_err(text)?;
    write(&v, "meanwhile", 2)?;
    let begin = together.now() - 1;
    change(&v, what, &second).map_err(text)?;
    let end = together.now() - 1;
    write(&v, "behind", 3)?;
    v.crash();
    let last = together.times.lock().unwrap().len();
    each_crash(&together, [begin, end], |at, images| {
        let promised = Promised { done: at >= end, behind: at + 1 == last };
        look(images, what, promised).map_err(|e| format!("{what:?}: {e}"))
    })
}

/// Crashes two recorded devices at each flush from the first of the moments on, and at both of these, and has each state looked
/// at, told which moment it is; how many states there were, and how many of them `look` counted.
pub(crate) fn each_crash(
    together: &Together,
    [begin, end]: [usize; 2],
    mut look: impl FnMut(usize, Vec<MemDevice>) -> Result<bool, String>,
) -> Result<(usize, usize), String> {
    let records: Vec<Log> = together.logs.iter().map(Log::of).collect();
    let times = together.times.lock().unwrap().clone();
    let budget = Budget { subsets: 2, samples: 1 };
    let mut rng = fastrand::Rng::with_seed(7);
    let (mut states, mut counted) = (0, 0);
    for (at, time) in times.iter().enumerate().skip(begin) {
        // a crash between two flushes is the later one with some writes lost
        let flushes = |t: Option<&Vec<usize>>| {
            t.is_none_or(|t| {
                (0..2).any(|i| t[i] > time[i] && matches!(records[i].events[time[i]], Event::Flush { .. }))
            })
        };
        if ![begin, end].contains(&at) && !flushes(times.get(at + 1)) {
            continue;
        }
        let lost: Vec<usize> = (0..2).map(|i| records[i].unflushed(time[i]).count()).collect();
        let events = (0..2).flat_map(|i| records[i].unflushed(time[i]));
        for keep in keeps_of(events, &budget, &mut rng) {
            let (of_first, of_second) = keep.split_at(lost[0]);
            let crash = [(0, of_first), (1, of_second)].map(|(i, k)| CrashState { upto: time[i], keep: k.to_vec() });
            let images = (0..2).map(|i| MemDevice::from_image(records[i].image(&crash[i]))).collect();
            states += 1;
            let is = look(at, images)
                .map_err(|e| format!("moment {at} ({begin} to {end}), {} and {}: {e}", crash[0], crash[1]))?;
            counted += usize::from(is);
        }
    }
    Ok((states, counted))
}
