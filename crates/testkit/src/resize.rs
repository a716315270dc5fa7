//! A crash at every write and every flush of a volume that becomes larger or smaller.
//!
//! What was synced before must be there, the volume has its old size or the new one, fsck finds nothing, and the same
//! change goes on to its end. The growth needs more pairs of the group table than the volume had.

use crate::small::{ROOT, create, relocated};
use crate::states::{Budget, CrashState, Log, each};
use crate::torn::{ANY_COPY, SEGMENT_TABLE_COPY, nothing_but};
use crate::walk::fsck;
use braidfs::{Cred, FileKind, MkfsOptions, MountOptions, NewSize, OpenHow, RenameMode, Volume, mkfs};
use braidfs_device::{CutDevice, Device, Event, Keep, MemDevice, RecordDevice, SECTOR_BYTES};
use std::sync::Arc;

const MIB: u64 = 1 << 20;
const BLOCK: u64 = 4096;
/// The volume before, in groups of 4 MiB, and afterwards: more than 500 groups.
const SMALL: u64 = 32 * MIB;
const LARGE: u64 = 2304 * MIB;

pub(crate) fn options() -> MountOptions {
    MountOptions { cache_bytes: 8 * MIB, background: false, serial: true, ..MountOptions::default() }
}

fn content(n: u8) -> Vec<u8> {
    (0..50_000u32).map(|i| (i / 7) as u8 ^ n).collect()
}

pub(crate) fn write(v: &Volume, name: &str, n: u8) -> Result<(), String> {
    let how = OpenHow { read: true, write: true, create: true, mode: 0o644, ..OpenHow::default() };
    let text = |e: braidfs::Error| format!("{name}: {e}");
    let f = v.open_path(name.as_bytes(), how, &Cred::root()).map_err(text)?;
    v.write(&f, 0, &content(n)).map_err(text)?;
    v.fsync(f.ino(), false).map_err(text)
}

pub(crate) fn holds(v: &Volume, name: &str, n: u8) -> Result<(), String> {
    let how = OpenHow { read: true, ..OpenHow::default() };
    let f = v.open_path(name.as_bytes(), how, &Cred::root()).map_err(|e| format!("{name}: {e}"))?;
    let (wanted, mut got) = (content(n), vec![0; 60_000]);
    let len = v.read(&f, 0, &mut got).map_err(|e| format!("{name}: {e}"))?;
    if got[..len] == wanted { Ok(()) } else { Err(format!("{name}: other content")) }
}

fn used(v: &Volume) -> u64 {
    v.super_block().device_table().iter().map(|d| d.blocks.get() * BLOCK).sum()
}

/// A volume on `devices` devices that is about to grow on the last one, and has been used.
fn made(devices: usize) -> Result<Vec<RecordDevice>, String> {
    let small: Vec<_> = (0..devices).map(|_| Arc::new(MemDevice::soiled(LARGE / BLOCK))).collect();
    let last = devices - 1;
    let cut = |(i, d): (usize, &Arc<MemDevice>)| {
        let whole: Arc<dyn Device> = d.clone();
        Arc::new(CutDevice::new(whole, (if i == last { SMALL } else { 2 * SMALL }) / BLOCK)) as Arc<dyn Device>
    };
    let all: Vec<_> = small.iter().enumerate().map(cut).collect();
    let how = MkfsOptions { domains: Some(2), group_bytes: Some(4 * MIB), ..MkfsOptions::default() };
    mkfs::format(&all, &how).map_err(|e| e.to_string())?;
    let v = Volume::mount(all, options()).map_err(|e| e.to_string())?;
    write(&v, "before", 1)?;
    v.unmount().map_err(|e| e.to_string())?;
    Ok(small.iter().map(|d| RecordDevice::new(d.snapshot())).collect())
}

/// What a state must have.
#[derive(Clone, Copy)]
struct Promised {
    /// The call has returned.
    done: bool,
    /// So has the fsync behind it.
    behind: bool,
}

/// Bytes of the volume before and afterwards, and of its last device afterwards.
#[derive(Clone)]
struct Sizes {
    old: u64,
    new: u64,
    device: u64,
    /// Files that lay at the end.
    kept: std::ops::Range<u64>,
    /// Files of another domain, of which every fourth is there.
    quarter: u64,
}

/// Files of a MiB before a volume becomes smaller, of which the last ones stay.
const PIECES: u64 = 36;
const KEPT: u64 = 3;

fn make_piece(v: &Volume, name: &str, n: u64, bytes: u64) -> braidfs::Result<()> {
    let create = OpenHow { write: true, create: true, mode: 0o644, ..OpenHow::default() };
    let f = v.open_path(name.as_bytes(), create, &Cred::root())?;
    v.write(&f, 0, &vec![n as u8; bytes as usize])?;
    v.fsync(f.ino(), false)
}

fn piece_holds(v: &Volume, name: &str, n: u64, bytes: u64) -> Result<(), String> {
    let how = OpenHow { read: true, ..OpenHow::default() };
    let f = v.open_path(name.as_bytes(), how, &Cred::root()).map_err(|e| format!("{name}: {e}"))?;
    let mut got = vec![0; bytes as usize + 1];
    let len = v.read(&f, 0, &mut got).map_err(|e| format!("{name}: {e}"))?;
    if len as u64 != bytes || got[..len].iter().any(|b| *b != n as u8) {
        return Err(format!("{name}: other content, {len} bytes"));
    }
    Ok(())
}

fn pieces_hold(v: &Volume, sizes: &Sizes) -> Result<(), String> {
    sizes.kept.clone().try_for_each(|n| piece_holds(v, &format!("p{n}"), n, MIB))?;
    (1..sizes.quarter).step_by(4).try_for_each(|n| piece_holds(v, &format!("other/q{n}"), n, MIB / 2))
}

/// Looks at one state that a crash leaves; whether the volume has its old size there.
fn look(images: Vec<MemDevice>, sizes: &Sizes, promised: Promised) -> Result<bool, String> {
    let devices: Vec<Arc<dyn Device>> = images.into_iter().map(|i| Arc::new(i) as Arc<dyn Device>).collect();
    let text = |e: braidfs::Error| e.to_string();
    // A checkpoint that was cut off may leave torn copies of tables, which the mount writes anew; a growth writes no tables.
    if sizes.new > sizes.old {
        fsck(&devices)?
    } else {
        nothing_but(ANY_COPY, &devices)?
    }
    let v = Volume::mount(devices.clone(), options()).map_err(text)?;
    holds(&v, "before", 1)?;
    holds(&v, "meanwhile", 2)?;
    pieces_hold(&v, sizes)?;
    let is_old = used(&v) == sizes.old;
    if !is_old && used(&v) != sizes.new {
        return Err(format!("{} bytes, which is neither {} nor {}", used(&v), sizes.old, sizes.new));
    }
    if is_old && promised.done {
        return Err("the size is the old one after the call returned".into());
    }
    if promised.behind {
        holds(&v, "behind", 3)?;
    }
    let v = if sizes.new < sizes.old {
        v.unmount().map_err(text)?;
        // The write that gives a group up may be torn: then the copy of the segment table that does not count stays damaged until
        // the table is written again, which fsck tells and mends.
        nothing_but(SEGMENT_TABLE_COPY, &devices).map_err(|e| format!("after a mount: {e}"))?;
        Volume::mount(devices.clone(), options()).map_err(text)?
    } else {
        v
    };
    v.resize(NewSize::Bytes(sizes.device), &|_, _| {}).map_err(|e| format!("again: {e}"))?;
    if used(&v) != sizes.new {
        return Err(format!("{} bytes after the second attempt", used(&v)));
    }
    if sizes.new > sizes.old {
        // room that only the larger volume has
        let how = OpenHow { write: true, create: true, mode: 0o644, ..OpenHow::default() };
        let f = v.open_path(b"large", how, &Cred::root()).map_err(text)?;
        for at in 0..2 * SMALL / MIB {
            v.write(&f, at * MIB, &vec![5; MIB as usize]).map_err(text)?;
        }
    }
    holds(&v, "before", 1)?;
    holds(&v, "meanwhile", 2)?;
    pieces_hold(&v, sizes)?;
    v.unmount().map_err(text)?;
    fsck(&devices).map_err(|e| format!("after the second attempt: {e}"))?;
    Ok(is_old)
}

/// Crashes a volume that becomes smaller, and so moves what lies at its end, at every point; how many states there were,
/// and in how many the size was still the old one.
///
/// # Errors
/// The first state that is none of those that may be.
pub fn every_crash_of_a_shrink() -> Result<(usize, usize), String> {
    let sizes = Sizes { old: 48 * MIB, new: 32 * MIB, device: 32 * MIB, kept: PIECES - KEPT..PIECES, quarter: 0 };
    let text = |e: braidfs::Error| e.to_string();
    // a MiB each: the last ones lie in the groups at the end
    let made = |v: &Volume| {
        (0..PIECES).try_for_each(|n| make_piece(v, &format!("p{n}"), n, MIB))?;
        write(v, "before", 1).and_then(|()| write(v, "meanwhile", 2)).expect("there is room");
        (0..PIECES - KEPT).try_for_each(|n| v.unlink_path(format!("p{n}").as_bytes(), &Cred::root()))
    };
    let budget = Budget { subsets: 2, samples: 6 };
    let mut rng = fastrand::Rng::with_seed(7);
    crashes_of_a_shrink(&sizes, |v| made(v).map_err(text), &mut |log, upto| keeps(log, upto, &budget, &mut rng))
}

/// The same where the domain of what lies at the end is full, and the other one empties groups for it: of each point the crash
/// that loses all, and those that tear one write and keep the others.
///
/// # Errors
/// The first state that is none of those that may be.
pub fn every_crash_of_a_shrink_by_lent_groups() -> Result<(usize, usize), String> {
    let mut sizes = Sizes { old: 64 * MIB, new: 56 * MIB, device: 56 * MIB, kept: 0..0, quarter: 56 };
    let text = |e: braidfs::Error| e.to_string();
    let device: Arc<dyn Device> = Arc::new(MemDevice::soiled(sizes.old / BLOCK));
    // how many there is room for
    let v = formatted(&device)?;
    sizes.kept.end = full_beside_quarters(&v, sizes.quarter, u64::MAX).map_err(text)?;
    v.crash();
    let made = |v: &Volume| full_beside_quarters(v, sizes.quarter, sizes.kept.end).map(drop).map_err(text);
    crashes_of_a_shrink(&sizes, made, &mut |log, upto| {
        let n = log.unflushed(upto).count();
        let torn = |one| (0..n).map(|i| if i == one { Keep::Torn(1) } else { Keep::Whole }).collect();
        std::iter::once(vec![Keep::None; n]).chain((0..n).map(torn)).collect()
    })
}

/// The first domain is full, of the other one's files every fourth is there; how many pieces of a MiB, `most` at most, the first has.
fn full_beside_quarters(v: &Volume, quarter: u64, most: u64) -> braidfs::Result<u64> {
    write(v, "before", 1).and_then(|()| write(v, "meanwhile", 2)).expect("there is room");
    let cred = Cred::root();
    let first = v.domain_of(ROOT)?;
    let of_other = |name: &String| v.domain_of(create(v, ROOT, name, FileKind::Dir)).is_ok_and(|d| d != first);
    let name = (0..64).map(|n| format!("d{n}")).find(of_other).expect("one of two domains");
    v.rename(ROOT, name.as_bytes(), ROOT, b"other", RenameMode::NoReplace)?;
    (0..quarter).try_for_each(|n| make_piece(v, &format!("other/q{n}"), n, MIB / 2))?;
    let mut n = 0;
    while n < most && v.write_room(ROOT) > 2 * MIB / BLOCK {
        make_piece(v, &format!("p{n}"), n, MIB)?;
        n += 1;
    }
    let mut gone = (0..quarter).filter(|n| n % 4 != 1);
    gone.try_for_each(|n| v.unlink_path(format!("other/q{n}").as_bytes(), &cred))?;
    v.sync()?;
    Ok(n)
}

/// A volume on all of a device, in groups of 4 MiB.
fn formatted(device: &Arc<dyn Device>) -> Result<Volume, String> {
    let how = MkfsOptions { domains: Some(2), group_bytes: Some(4 * MIB), ..MkfsOptions::default() };
    mkfs::format(std::slice::from_ref(device), &how).map_err(|e| e.to_string())?;
    Volume::mount(vec![Arc::clone(device)], options()).map_err(|e| e.to_string())
}

/// `keeps`: what may become of the writes that a crash at a point of a log may lose.
fn crashes_of_a_shrink(
    sizes: &Sizes,
    made: impl Fn(&Volume) -> Result<(), String>,
    keeps: &mut dyn FnMut(&Log, usize) -> Vec<Vec<Keep>>,
) -> Result<(usize, usize), String> {
    let text = |e: braidfs::Error| e.to_string();
    let small = Arc::new(MemDevice::soiled(sizes.old / BLOCK));
    let v = formatted(&(small.clone() as Arc<dyn Device>))?;
    made(&v)?;
    v.unmount().map_err(text)?;
    let log = Arc::new(RecordDevice::new(small.snapshot()));
    let v = Volume::mount(vec![Arc::clone(&log) as Arc<dyn Device>], options()).map_err(text)?;
    let begin = log.log_len();
    let moved = std::cell::Cell::new(0);
    v.shrink(sizes.new, &|_, all| moved.set(all)).map_err(text)?;
    let end = log.log_len();
    if moved.get() == 0 {
        return Err("no group at the end was a domain's: nothing is shown".into());
    }
    if sizes.quarter > 0 && relocated(&v) == 0 {
        return Err("no domain emptied a group for another: nothing is shown".into());
    }
    write(&v, "behind", 3)?;
    v.crash();
    let record = Log::of(&log);
    let (mut states, mut olds) = (0, 0);
    for upto in record.points(begin, [begin, end]) {
        for keep in keeps(&record, upto) {
            let state = CrashState { upto, keep };
            let promised = Promised { done: upto >= end, behind: upto == record.events.len() };
            let image = MemDevice::from_image(record.image(&state));
            states += 1;
            olds += usize::from(look(vec![image], sizes, promised).map_err(|e| format!("{state}: {e}"))?);
        }
    }
    Ok((states, olds))
}

/// What may become of the writes that a crash at one point may lose.
pub(crate) fn keeps(log: &Log, upto: usize, budget: &Budget, rng: &mut fastrand::Rng) -> Vec<Vec<Keep>> {
    let size = |e: &Event| if let Event::Write { data, .. } = e { data.len() / SECTOR_BYTES } else { 1 };
    let sectors: Vec<usize> = log.unflushed(upto).map(size).collect();
    let mut all = Vec::new();
    each(&sectors, budget, rng, &mut |k| {
        all.push(k.to_vec());
        true
    });
    all
}

/// Crashes a growth at every point; how many states there were, and in how many the size was still the old one.
///
/// # Errors
/// The first state that is none of those that may be.
pub fn every_crash_of_a_growth(devices: usize) -> Result<(usize, usize), String> {
    let logs = made(devices)?;
    let logs: Vec<Arc<RecordDevice>> = logs.into_iter().map(Arc::new).collect();
    let all: Vec<Arc<dyn Device>> = logs.iter().map(|d| Arc::clone(d) as Arc<dyn Device>).collect();
    let text = |e: braidfs::Error| e.to_string();
    let v = Volume::mount(all, options()).map_err(text)?;
    write(&v, "meanwhile", 2)?;
    let old = used(&v);
    let marks = |logs: &[Arc<RecordDevice>]| logs.iter().map(|d| d.log_len()).collect::<Vec<_>>();
    let begin = marks(&logs);
    v.grow(NewSize::Bytes(LARGE)).map_err(text)?;
    let end = marks(&logs);
    write(&v, "behind", 3)?;
    v.crash();
    let (mut states, mut olds) = (0, 0);
    let sizes = Sizes { old, new: old + LARGE - SMALL, device: LARGE, kept: 0..0, quarter: 0 };
    let mut one = |images, promised, what: String| {
        states += 1;
        olds += usize::from(look(images, &sizes, promised).map_err(|e| format!("{what}: {e}"))?);
        Ok::<(), String>(())
    };
    // One device crashes in the middle of its writes; how far the others were is tried at both ends, since a device waits for
    // the flush of another one only where the superblock that counts is to come.
    let records: Vec<Log> = logs.iter().map(|d| Log::of(d)).collect();
    let last = devices - 1;
    let budget = Budget { subsets: 3, samples: 12 };
    let mut rng = fastrand::Rng::with_seed(7);
    for upto in records[last].points(begin[last], [begin[last], end[last]]) {
        // with several devices the order among them is that of the calls: device 0 is last
        let others = if upto < end[last] { &begin } else { &end };
        for keep in keeps(&records[last], upto, &budget, &mut rng) {
            let state = CrashState { upto, keep };
            let images = (0..devices).map(|i| match i == last {
                true => MemDevice::from_image(records[last].image(&state)),
                false => logs[i].crash_image(others[i], &mut |_| Keep::Whole),
            });
            let behind = devices == 1 && upto == records[last].events.len();
            let promised = Promised { done: upto >= end[last], behind };
            one(images.collect(), promised, format!("device {last} of {devices}, {state}"))?;
        }
    }
    // the device of the group table and of the superblock that counts
    for upto in (begin[0]..=end[0]).filter(|_| devices > 1) {
        for keep in keeps(&records[0], upto, &budget, &mut rng) {
            let state = CrashState { upto, keep };
            let images = (0..devices).map(|i| match i {
                0 => MemDevice::from_image(records[0].image(&state)),
                i => logs[i].crash_image(end[i], &mut |_| Keep::Whole),
            });
            let promised = Promised { done: upto == end[0], behind: false };
            one(images.collect(), promised, format!("device 0 of {devices}, {state}"))?;
        }
    }
    Ok((states, olds))
}
