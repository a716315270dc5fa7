//! The cleaner beside files whose blocks an fsync overwrites in place.

use super::*;
use crate::names::path::OpenHow;
use crate::{Cred, DataMode, MkfsOptions, MountOptions, OpenFile};
use braidfs_device::{CountDevice, Device, Effect, FaultDevice, MemDevice, Op as DeviceOp, Rule};

/// Where the blocks of a file lie.
fn places(c: &Cell) -> Vec<BlockAddr> {
    match &c.state.read().body {
        Body::File(f) => (0..f.map.last_end()).filter_map(|l| f.map.get(l)).map(|p| p.addr).collect(),
        _ => Vec::new(),
    }
}

fn open(v: &Volume, path: &[u8]) -> OpenFile {
    let how = OpenHow { read: true, write: true, create: true, mode: 0o644, ..OpenHow::default() };
    v.open_path(path, how, &Cred::root()).unwrap()
}

#[test]
fn a_block_that_moves_is_not_overwritten_where_it_was() {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(16384));
    let o = MkfsOptions { domains: Some(1), ..MkfsOptions::default() };
    crate::mkfs::format(std::slice::from_ref(&device), &o).unwrap();
    let v = Volume::mount(vec![device], MountOptions { background: false, ..MountOptions::default() }).unwrap();
    let f = open(&v, b"f");
    v.write(&f, 0, &[1; 4 * 4096]).unwrap();
    v.sync().unwrap();
    let (i, c) = (v.mounted(), v.mounted().cell(f.ino()).unwrap());
    let d = i.dom(c.domain);
    let rewrite = |value: u8| {
        v.write(&f, 4096, &[value; 4096]).unwrap();
        v.fsync(f.ino(), false).unwrap();
    };
    let first = places(&c);
    rewrite(2);
    assert_eq!(places(&c), first, "in place");
    // the cleaner has marked it, the commit that moves it has not begun
    assert!(i.move_block(d, first[1], c.ino, 1).unwrap());
    rewrite(3);
    let second = places(&c);
    assert!(second[1] != first[1], "it went elsewhere");
    v.sync().unwrap();
    rewrite(4);
    assert_eq!(places(&c), second, "and stays there");
    // all of it at once: nothing is left where it was
    let all: Vec<_> =
        (0..).zip(&second).map(|(lblk, at)| (*at, Owner { node: c.ino, lblk, ..Owner::default() })).collect();
    assert_eq!(i.move_blocks(d, &all).unwrap(), 4);
    assert!(places(&c).iter().all(|p| !second.contains(p)));
    let mut have = [0; 4 * 4096];
    v.read(&f, 0, &mut have).unwrap();
    assert!(have[4096..8192] == [4; 4096] && have[..4096] == [1; 4096]);
}

/// With `data=writeback`, too, what moves has moved when its commit is done.
#[test]
fn data_that_commits_leave_alone_moves_with_its_commit() {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(16384));
    let o = MkfsOptions { domains: Some(1), ..MkfsOptions::default() };
    crate::mkfs::format(std::slice::from_ref(&device), &o).unwrap();
    let data = DataMode::Writeback;
    let v = Volume::mount(vec![device], MountOptions { background: false, data, ..MountOptions::default() }).unwrap();
    let f = open(&v, b"f");
    v.write(&f, 0, &[1; 8 * 4096]).unwrap();
    v.sync().unwrap();
    let (i, c) = (v.mounted(), v.mounted().cell(f.ino()).unwrap());
    let d = i.dom(c.domain);
    let first = places(&c);
    let all: Vec<_> =
        (0..).zip(&first).map(|(lblk, at)| (*at, Owner { node: c.ino, lblk, ..Owner::default() })).collect();
    assert_eq!(i.move_blocks(d, &all).unwrap(), 8);
    let second = places(&c);
    assert!(second.iter().all(|p| !first.contains(p)), "{first:?}, {second:?}");
    assert!(d.lazy_data() && !d.has_changes(), "nothing is left for the next commit");
    // so it is with files made whole
    let (f, g) = (open(&v, b"in-pieces"), open(&v, b"between"));
    for at in (0..64 * 4096).step_by(4096) {
        for file in [&f, &g] {
            v.write(file, at, &[2; 4096]).unwrap();
            v.sync().unwrap();
        }
    }
    let c = i.cell(f.ino()).unwrap();
    let first = places(&c);
    assert_eq!(v.defragment(f.ino(), 0).unwrap().moved, 64);
    let second = places(&c);
    assert!(second.iter().all(|p| !first.contains(p)) && !d.has_changes(), "{first:?}, {second:?}");
}

/// A block of a directory that holds no entries any more, and that nobody asked for.
#[test]
fn a_directory_block_that_does_not_hold_stays_and_its_domain_goes_on() {
    let memory = Arc::new(MemDevice::new(16384));
    let device: Arc<dyn Device> = memory.clone();
    let o = MkfsOptions { domains: Some(1), ..MkfsOptions::default() };
    crate::mkfs::format(std::slice::from_ref(&device), &o).unwrap();
    let options = || MountOptions { background: false, ..MountOptions::default() };
    let v = Volume::mount(vec![device.clone()], options()).unwrap();
    v.mkdir_path(b"d", 0o755, &Cred::root()).unwrap();
    for n in 0..600 {
        drop(open(&v, format!("d/a-name-that-is-not-short-{n}").as_bytes()));
    }
    v.unmount().unwrap();
    let buckets = |v: &Volume| {
        let c = v.mounted().cell(v.lookup(InodeNo::ROOT, b"d").unwrap().ino).unwrap();
        let st = c.state.read();
        let Body::Dir(b) = &st.body else { unreachable!("a directory") };
        let blocks =
            b.map.iter().flat_map(|e| (0..e.len).map(|k| (BlockAddr(e.addr.0 + u64::from(k)), e.lblk + u64::from(k))));
        blocks.map(|(at, lblk)| (at, Owner { node: c.ino, lblk, ..Owner::default() })).collect::<Vec<_>>()
    };
    let v = Volume::mount(vec![device.clone()], options()).unwrap();
    let all = buckets(&v);
    assert!(all.len() > 2, "{all:?}");
    let at = v.super_block().device[0].data_start.get() + all[1].0.0;
    memory.write(at, &[0xee; 4096]).unwrap();
    let d = v.mounted().domains.iter().next().unwrap();
    assert_eq!(v.mounted().move_blocks(d, &all).unwrap(), all.len() as u64 - 1);
    assert!(d.failed().is_none());
    let after = buckets(&v);
    assert_eq!(all.iter().filter(|(at, _)| after.iter().any(|(a, _)| a == at)).count(), 1, "it stays");
}

#[test]
fn the_pace_begins_gently_and_has_no_step() {
    assert_eq!(Pace::of(64, 1024, false), None);
    assert_eq!(Pace::of(128, 1024, true), None);
    let idle = Pace::of(100, 1024, true).unwrap();
    assert!(idle.segments == 1 && idle.choice.valid_max == 50);
    let all: Vec<Pace> = (0..64).rev().map(|free| Pace::of(free, 1024, false).unwrap()).collect();
    assert!(all[0].segments == 1 && all[0].choice.valid_max == 1);
    assert!(all[63].segments == 4 && all[63].choice.valid_max == 30);
    for (a, b) in all.iter().zip(&all[1..]) {
        let dearer = b.choice.valid_max - a.choice.valid_max;
        assert!(dearer <= 1 && b.segments - a.segments <= 1, "{a:?}, {b:?}");
    }
    // small domains keep a few
    assert_eq!(Pace::of(4, 20, false), None);
    assert_eq!(Pace::of(3, 20, false).unwrap().segments, 1);
}

/// A volume of one domain of which so many segments are `free`, and eight have a tenth of their blocks.
fn nearly_full(free: u64) -> (Arc<CountDevice>, Volume) {
    nearly_full_beside(free, false)
}

/// Eight segments' worth of blocks; of ten that lie side by side nine go.
fn punch(v: &Volume, f: &OpenFile) {
    for at in (0..8 * 512 * 4096).step_by(10 * 4096) {
        v.fallocate(f, FallocMode::PunchHole, at, 9 * 4096).unwrap();
    }
    v.sync().unwrap();
}

/// [`nearly_full`]; with `fixed` eight older segments have a tenth of their blocks, too, and these have a fixed place.
fn nearly_full_beside(free: u64, fixed: bool) -> (Arc<CountDevice>, Volume) {
    const SEGMENTS: u64 = 64;
    let counted = Arc::new(CountDevice::new(Arc::new(MemDevice::new(SEGMENTS * 512 + 4096))));
    let device: Arc<dyn Device> = counted.clone();
    let o = MkfsOptions { domains: Some(1), ..MkfsOptions::default() };
    crate::mkfs::format(std::slice::from_ref(&device), &o).unwrap();
    let v = Volume::mount(vec![device], MountOptions { background: false, ..MountOptions::default() }).unwrap();
    let p = open(&v, b"p");
    if fixed {
        v.fallocate(&p, FallocMode::Allocate { keep_size: false }, 0, 8 * 512 * 4096).unwrap();
        v.sync().unwrap();
    }
    let f = open(&v, b"f");
    let (i, d) = (v.mounted(), v.mounted().domains.iter().next().unwrap());
    let have = || d.space.stats().free_segments + i.shared.unclaimed.load(Ordering::Relaxed) / 512;
    let mut end = 0;
    while have() > free {
        v.write(&f, end, &[7; 64 * 4096]).unwrap();
        v.sync().unwrap();
        end += 64 * 4096;
    }
    // not before: the logs would have filled that
    punch(&v, &p);
    punch(&v, &f);
    (counted, v)
}

/// Segments whose blocks have a fixed place are older, and seem the best ones for ever: others are cleaned all the same, and where
/// nothing moves nothing is committed.
#[test]
fn segments_that_stay_do_not_keep_others_from_being_cleaned() {
    let (_, v) = nearly_full_beside(2, true);
    let d = v.mounted().domains.iter().next().unwrap();
    let other = open(&v, b"other");
    let mut looks = Vec::new();
    for look in 0..20 {
        v.write(&other, 0, &[look; 4096]).unwrap();
        let before = d.counters.commits.load(Ordering::Relaxed);
        let moved = v.clean_as_needed().unwrap();
        let commits = d.counters.commits.load(Ordering::Relaxed) - before;
        assert!(moved > 0 || commits == 0, "look {look} committed for nothing");
        looks.push(moved);
    }
    // what stays comes first, and is not taken again
    let first = looks.iter().position(|n| *n > 40);
    assert!(first.is_some_and(|n| looks[..n].contains(&0)), "{looks:?}");
    assert!(looks.iter().sum::<u64>() > 60, "{looks:?}");
}

/// A block that cannot be read stays; what lies beside it moves, and so do other segments.
#[test]
fn a_block_that_cannot_be_read_does_not_end_cleaning() {
    let (counted, v) = nearly_full(2);
    v.unmount().unwrap();
    let device = Arc::new(FaultDevice::new(counted, 1));
    let options = MountOptions { background: false, ..MountOptions::default() };
    let v = Volume::mount(vec![device.clone()], options).unwrap();
    let c = v.mounted().cell(open(&v, b"f").ino()).unwrap();
    let bad = v.super_block().device[0].data_start.get() + places(&c)[0].0;
    device.add(Rule::new(DeviceOp::Read, Effect::Fail(5)).blocks(bad..bad + 1));
    let moved = (0..20).map(|_| v.clean_as_needed().unwrap()).sum::<u64>();
    assert!(device.fired() > 0 && device.fired() < 3, "it was read {} times", device.fired());
    assert!(moved > 60, "{moved} blocks");
    assert!(v.mounted().domains.iter().all(|d| d.failed().is_none()));
}

#[test]
fn the_cleaner_takes_what_others_leave_unless_room_is_short() {
    /// Looks until something moved, while others read as much as before in each; blocks that moved then.
    fn looks(v: &Volume, counted: &CountDevice, busy: bool) -> (u32, u64) {
        let (i, d) = (v.mounted(), v.mounted().domains.iter().next().unwrap());
        let mut buf = vec![0; 16 << 20];
        let mut now = Duration::from_secs(1000);
        for look in 0..20 {
            if busy || look < 2 {
                d.store.read(BlockAddr(0), &mut buf).unwrap();
            }
            now += Duration::from_millis(100);
            let before = counted.counters();
            // the first two say how fast the device is, at least
            let moved = if look < 2 {
                i.cleaner_share.lock().allowance(now, d.store.bytes_asked());
                0
            } else {
                i.clean_at_pace(d, false, now).unwrap()
            };
            if moved > 0 {
                let did = counted.counters() - before;
                assert!(did.write_blocks >= moved, "{moved} moved, {did:?}");
                return (look - 2, moved);
            }
        }
        panic!("nothing moved");
    }
    let of = |free, busy| {
        let (counted, v) = nearly_full(free);
        looks(&v, &counted, busy)
    };
    // one segment's worth of what it may do in any case is saved before one is moved
    let (looked, moved) = of(2, true);
    assert!(looked > 0 && moved < 60, "{looked} looks, {moved} blocks");
    let (looked, moved) = of(2, false);
    assert!(looked == 0 && moved > 60, "{looked} looks, {moved} blocks");
    let (looked, moved) = of(1, true);
    assert!(looked == 0 && moved > 60, "{looked} looks, {moved} blocks");
}

/// Where numbers are so few that who changes something sees to that first, what is moved does not need a commit for each block.
#[test]
fn moves_share_a_commit_where_numbers_are_few() {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(96 << 8));
    let how = MkfsOptions { domains: Some(1), group_bytes: Some(32 << 20), ..MkfsOptions::default() };
    crate::mkfs::format(std::slice::from_ref(&device), &how).unwrap();
    let v = Volume::mount(vec![device], MountOptions { background: false, ..MountOptions::default() }).unwrap();
    let (i, d) = (v.mounted(), v.mounted().dom(DomainId(0)));
    i.bat.lock().claim_below(Some(1));
    let new = NewNode { kind: FileKind::File, mode: 0o644, umask: 0, rdev: 0, target: b"" };
    let make = |n: u32| v.create(InodeNo::ROOT, format!("{n}").as_bytes(), &new, &Cred::root()).map(|a| a.ino);
    let files: Vec<_> = (0..).map_while(|n| make(n).ok()).collect();
    let f = v.open(files[0]).unwrap();
    v.write(&f, 0, &[7; 32 * BLOCK_BYTES]).unwrap();
    v.sync().unwrap();
    let (free, reserve) = (|| d.nodes.free(), d.nodes.reserve());
    for ino in &files[1..] {
        if free() < reserve / 4 * 3 {
            break;
        }
        v.setxattr(*ino, b"user.long", &[7; 4 << 10], XattrMode::Set).unwrap();
        v.sync().unwrap();
    }
    assert!((reserve / 2..reserve / 4 * 3).contains(&free()), "{} of {reserve}", free());
    let blocks: Vec<_> = d.space.blocks_in(0).unwrap().into_iter().filter(|(_, o)| o.node == files[0]).collect();
    assert_eq!(blocks.len(), 32);
    let commits = || v.domains()[0].commits;
    let before = commits();
    assert_eq!(i.move_blocks(d, &blocks).unwrap(), 32);
    assert!(commits() - before <= 3, "{} commits", commits() - before);
    v.unmount().unwrap();
}
