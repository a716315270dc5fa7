//! Devices that come to a volume in use, are drained and leave it.

use braidfs::{Error, FileKind, InodeNo, MkfsOptions, MountOptions, OpenFile, SetAttr, Volume};
use braidfs_device::{Device, Effect, FaultDevice, FileDevice, MemDevice, Op, OpenHow, Rule};
use braidfs_testkit::devices::{Change, every_crash_of_a_device};
use braidfs_testkit::small::{
    ALL, BLOCK, MIB, ROOT, beside, close, copies_of, create, devices_of, file, fill, full_beside_pieces, holds, memory,
    piece, relocated,
};
use braidfs_testkit::{small, walk::fsck};
use std::cell::Cell;
use std::sync::Arc;

/// A volume in groups of 4 MiB on all of the devices.
fn format(devices: &[Arc<dyn Device>], domains: u16) {
    let how = MkfsOptions { domains: Some(domains), group_bytes: Some(4 * MIB), ..MkfsOptions::default() };
    let mib: Vec<u64> = devices.iter().map(|d| d.blocks() * BLOCK / MIB).collect();
    small::format(devices, &mib, &how);
}

fn mount(devices: &[Arc<dyn Device>]) -> Volume {
    let options = MountOptions { cache_bytes: 32 * MIB, background: false, ..MountOptions::default() };
    Volume::mount(devices.to_vec(), options).unwrap()
}

fn text<T: std::fmt::Debug>(result: Result<T, Error>) -> String {
    result.unwrap_err().to_string()
}

fn remove(v: &Volume, device: usize) -> Result<braidfs::DeviceChange, Error> {
    v.remove_device(device, &|_, _| true)
}

/// For what tells of its progress: goes on twice, then is to stop.
fn two_steps() -> impl Fn(u64, u64) -> bool {
    let calls = Cell::new(0);
    move |_, _| {
        calls.set(calls.get() + 1);
        calls.get() < 3
    }
}

/// Two directories with three files each, for a thread each.
fn files_of_two(v: &Volume) -> (Vec<InodeNo>, Vec<Vec<OpenFile>>) {
    let dirs: Vec<_> = (0..2).map(|n| create(v, ROOT, &format!("d{n}"), FileKind::Dir)).collect();
    let files = dirs.iter().map(|d| (0..3).map(|n| file(v, *d, &format!("f{n}"))).collect()).collect();
    (dirs, files)
}

/// Overwrites one of a thread's files and reads it again; every third time it is synced, too.
fn overwrite(v: &Volume, files: &[OpenFile], round: u64) {
    let f = &files[(round % files.len() as u64) as usize];
    assert_eq!(v.write(f, 0, &piece(round)).unwrap(), MIB as usize);
    if round.is_multiple_of(3) {
        v.fsync(f.ino(), false).unwrap();
    }
    let mut got = vec![0; MIB as usize];
    v.read(f, 0, &mut got).unwrap();
    assert!(got == piece(round), "inode {}, round {round}", f.ino());
}

#[test]
fn a_full_volume_has_the_room_of_a_device_more_at_once() {
    let all = [memory(64), memory(96), memory(33)];
    format(&all[..1], 2);
    let v = mount(&all[..1]);
    let f = file(&v, ROOT, "f");
    let before = fill(&v, &f, ALL);
    let told = v.statfs();
    for (i, mib) in [(1, 96), (2, 33)] {
        let added = v.add_device(all[i].clone(), true).unwrap();
        assert_eq!((usize::from(added.device), added.bytes), (i, mib * MIB));
        assert_eq!(v.device_number(&added.uuid), Some(i));
    }
    let now = v.statfs();
    assert!(now.blocks > told.blocks + 120 * MIB / BLOCK && now.inodes_free > told.inodes_free);
    let after = fill(&v, &f, ALL);
    assert!(after > before + 115 * MIB, "{before} bytes before, {after} afterwards");
    v.set_label("three").unwrap();
    drop(f);
    close(v, &all);
    // in any order, and all of them
    let mixed = [all[2].clone(), all[0].clone(), all[1].clone()];
    let v = mount(&mixed);
    assert_eq!(v.label(), "three");
    let f = v.open(v.lookup(ROOT, b"f").unwrap().ino).unwrap();
    holds(&v, &f, after);
    drop(f);
    close(v, &all);
    let why = text(Volume::mount(all[..2].to_vec(), MountOptions::default()));
    assert!(why.contains("has 3 devices, 2 were given") && why.contains("missing: device 2 (UUID"), "{why}");
    let why = text(Volume::mount(all[1..].to_vec(), MountOptions::default()));
    assert!(why.contains("missing: device 0 (UUID"), "{why}");
}

#[test]
fn what_cannot_be_added_is_refused() {
    let all: Vec<Arc<dyn Device>> = (0..18).map(|_| memory(16)).collect();
    format(&all[..1], 1);
    let v = mount(&all[..1]);
    let why = text(v.add_device(memory(2), false));
    assert!(why.contains("too few for a block group") && why.contains("least size"), "{why}");
    for i in 1..16 {
        v.add_device(all[i].clone(), false).unwrap();
        if i == 3 {
            let why = text(v.add_device(all[2].clone(), false));
            assert!(why.contains("a device of the volume already"), "{why}");
        }
    }
    let why = text(v.add_device(all[16].clone(), false));
    assert!(why.contains("16 devices"), "{why}");
    close(v, &all[..16]);
    let options = MountOptions { read_only: true, ..MountOptions::default() };
    let v = Volume::mount(all[..16].to_vec(), options).unwrap();
    assert!(matches!(v.add_device(all[17].clone(), false), Err(Error::ReadOnly)));
    assert!(matches!(remove(&v, 15), Err(Error::ReadOnly)));
    assert!(matches!(v.drain_device(15, &|_, _| true), Err(Error::ReadOnly)));
}

/// A volume on two devices, of which the second came later, with a file of `mib` MiB that lies on both, in front of the
/// numbers of which all inodes have theirs.
fn on_both(all: &[Arc<dyn Device>], mib: u64) -> (Volume, OpenFile) {
    format(&all[..1], 2);
    let v = mount(&all[..1]);
    let (f, big) = (file(&v, ROOT, "f"), file(&v, ROOT, "big"));
    fill(&v, &f, 1);
    fill(&v, &big, ALL);
    v.add_device(all[1].clone(), false).unwrap();
    assert_eq!(fill(&v, &f, mib), mib * MIB);
    v.sync().unwrap();
    v.unlink(ROOT, b"big").unwrap();
    drop(big);
    v.sync().unwrap();
    (v, f)
}

#[test]
fn what_lies_on_a_device_that_leaves_moves() {
    let all = [memory(64), memory(64)];
    let (v, f) = on_both(&all, 40);
    let told = v.statfs();
    let last = Cell::new((0, 0));
    let gone = v.remove_device(1, &|done, all| last.replace((done, all)) <= (done, all)).unwrap();
    assert!(last.get().0 == last.get().1 && last.get().1 > 5, "{:?}", last.get());
    assert_eq!((gone.device, gone.bytes, gone.volume), (1, 64 * MIB, 64 * MIB));
    assert!(v.statfs().blocks < told.blocks - 55 * MIB / BLOCK);
    holds(&v, &f, 40 * MIB);
    // it was let go, and is nobody's
    assert_eq!(Arc::strong_count(&all[1]), 1);
    assert!(braidfs::store::super_io::read_one(&all[1]).is_err());
    let why = text(remove(&v, 0));
    assert!(why.contains("only device"), "{why}");
    assert!(text(remove(&v, 1)).contains("no device 1"));
    drop(f);
    close(v, &all[..1]);
    let v = mount(&all[..1]);
    let f = v.open(v.lookup(ROOT, b"f").unwrap().ino).unwrap();
    holds(&v, &f, 40 * MIB);
    drop(f);
    close(v, &all[..1]);
}

/// A device that comes back with what it held a while ago, others having had its groups since: no number comes back as it was.
#[test]
fn numbers_do_not_come_back_with_a_generation_that_they_had() {
    // so small that all of its groups are needed for numbers each time
    let (first, second) = (memory(32), Arc::new(MemDevice::soiled(12 * MIB / BLOCK)));
    format(std::slice::from_ref(&first), 1);
    let v = mount(std::slice::from_ref(&first));
    let many = v.super_block().geometry().unwrap().nodes() * 10;
    let mut had = std::collections::HashSet::new();
    let mut round = |device: Arc<dyn Device>| {
        v.add_device(device, false).unwrap();
        for n in 0..many {
            let ino = create(&v, ROOT, &format!("n{n}"), FileKind::File);
            assert!(had.insert((ino, v.generation(ino).unwrap())), "{ino} has a generation again");
        }
        v.sync().unwrap();
        let why = text(remove(&v, 1));
        assert!(why.contains("have their numbers there"), "{why}");
        (0..many).for_each(|n| v.unlink(ROOT, format!("n{n}").as_bytes()).unwrap());
        remove(&v, 1).unwrap();
    };
    round(second.clone());
    let early = second.snapshot();
    round(second.clone());
    // another one, blank
    round(memory(12));
    round(second);
    round(Arc::new(MemDevice::from_image(early)));
    close(v, &[first]);
}

#[test]
fn only_the_last_device_leaves() {
    let all = [memory(32), memory(32), memory(32)];
    format(&all[..1], 1);
    let v = mount(&all[..1]);
    v.add_device(all[1].clone(), false).unwrap();
    v.add_device(all[2].clone(), false).unwrap();
    let why = text(remove(&v, 1));
    assert!(why.contains("only the last device") && why.contains("device 2 ("), "{why}");
    remove(&v, 2).unwrap();
    remove(&v, 1).unwrap();
    close(v, &all[..1]);
}

#[test]
fn a_device_with_a_journal_does_not_leave() {
    let all = [memory(32), memory(32)];
    format(&all, 2);
    let v = mount(&all);
    let why = text(remove(&v, 1));
    assert!(why.contains("the journal of domain 1 lies there"), "{why}");
    let kept = v.drain_device(1, &|_, _| true).unwrap();
    assert_eq!((kept.groups, kept.journals), (1, 1));
    v.end_drain(1).unwrap();
    close(v, &all);
}

/// What a drain keeps away stays away, also after a mount; what keeps the device is told.
#[test]
fn a_drained_device_gets_nothing_new_and_tells_what_keeps_it() {
    let all = [memory(64), memory(64)];
    format(&all[..1], 1);
    let v = mount(&all[..1]);
    let dirs: Vec<_> = ["a", "b"].iter().map(|n| create(&v, ROOT, n, FileKind::Dir)).collect();
    let below = create(&v, dirs[1], "c", FileKind::Dir);
    v.add_device(all[1].clone(), false).unwrap();
    let (geometry, second) = (v.super_block().geometry().unwrap(), v.super_block().device[1].first_group.get());
    let place = |ino| geometry.node_place(ino).unwrap().0;
    // more than the first device has numbers for
    let (mut n, mut far) = (0, 0);
    while far < 300 {
        let dir = if n % 3 == 0 { dirs[0] } else { below };
        far += u64::from(place(create(&v, dir, &format!("f{n}"), FileKind::File)) >= second);
        n += 1;
    }
    let data = file(&v, ROOT, "data");
    fill(&v, &data, 50);
    v.sync().unwrap();
    let is_far = place(data.ino()) >= second;
    let kept = v.drain_device(1, &|_, _| true).unwrap();
    assert_eq!((kept.device, v.drained_device()), (1, Some(1)));
    assert_eq!(kept.inodes, far + u64::from(is_far), "{kept:?}");
    assert_eq!(kept.directories, 2 + u64::from(is_far));
    let told: Vec<_> = kept.told.iter().map(|d| String::from_utf8_lossy(&d.path).into_owned()).collect();
    assert_eq!(&told[..2], ["/b/c", "/a"]);
    assert_eq!(kept.blocks, 0, "what can move has moved");
    holds(&v, &data, 50 * MIB);
    let free = |v: &Volume| v.statfs().inodes_free;
    assert!(free(&v) < u64::from(geometry.nodes()) * u64::from(second), "what is not given out is not told of");
    let try_all = |v: &Volume| {
        // as far as there are numbers
        for n in 0..2000 {
            match v.create(ROOT, format!("x{n}").as_bytes(), &small::new_node(FileKind::File), &braidfs::Cred::root()) {
                Ok(a) => assert!(place(a.ino) < second, "{}", a.ino),
                Err(Error::NoSpace) => break,
                Err(e) => panic!("{e}"),
            }
        }
        (0..2000).for_each(|n| drop(v.unlink(ROOT, format!("x{n}").as_bytes())));
        v.sync().unwrap();
    };
    let n_used = |v: &Volume| v.drain_device(1, &|_, _| true).unwrap().blocks;
    // some room for numbers on the first device
    (0..200).for_each(|n| v.unlink(if n % 3 == 0 { dirs[0] } else { below }, format!("f{n}").as_bytes()).unwrap());
    v.sync().unwrap();
    try_all(&v);
    assert_eq!(n_used(&v), 0);
    drop(data);
    close(v, &all);
    let v = mount(&all);
    assert_eq!(v.drained_device(), Some(1));
    try_all(&v);
    let f = file(&v, ROOT, "more");
    fill(&v, &f, ALL);
    v.sync().unwrap();
    assert_eq!(n_used(&v), 0, "data keeps away, too");
    drop(f);
    v.unlink(ROOT, b"more").unwrap();
    let why = text(remove(&v, 1));
    assert!(why.contains("have their numbers there: drain it first"), "{why}");
    // the files are copied, as a user would
    for dir in [dirs[0], below] {
        for n in 0..n {
            let _ = v.unlink(dir, format!("f{n}").as_bytes());
        }
    }
    if is_far {
        v.unlink(ROOT, b"data").unwrap();
    }
    let kept = v.drain_device(1, &|_, _| true).unwrap();
    assert!(kept.is_empty(), "{kept:?}");
    remove(&v, 1).unwrap();
    assert_eq!(v.drained_device(), None);
    close(v, &all[..1]);
    // and it is one like any other
    let v = mount(&all[..1]);
    v.add_device(all[1].clone(), true).unwrap();
    let f = file(&v, ROOT, "f");
    assert!(fill(&v, &f, ALL) > 100 * MIB);
    drop(f);
    close(v, &all);
}

#[test]
fn the_end_of_a_drain_makes_the_room_usable_again() {
    let all = [memory(32), memory(64)];
    format(&all[..1], 1);
    let v = mount(&all[..1]);
    v.add_device(all[1].clone(), false).unwrap();
    let before = v.statfs();
    v.drain_device(1, &|_, _| true).unwrap();
    let f = file(&v, ROOT, "f");
    let least = fill(&v, &f, ALL);
    assert!(least < 32 * MIB, "{least}");
    assert!(v.statfs().available < before.available - 55 * MIB / BLOCK);
    v.end_drain(1).unwrap();
    assert_eq!(v.drained_device(), None);
    let most = fill(&v, &f, ALL);
    assert!(most > least + 55 * MIB, "{least} {most}");
    // it is stopped, and goes on
    let size = 20 * MIB;
    v.setattr(f.ino(), &SetAttr { size: Some(size), ..SetAttr::default() }).unwrap();
    v.sync().unwrap();
    assert!(matches!(v.drain_device(1, &two_steps()), Err(Error::Stopped)));
    assert_eq!(v.drained_device(), Some(1));
    assert!(v.drain_device(1, &|_, _| true).unwrap().is_empty());
    holds(&v, &f, size);
    remove(&v, 1).unwrap();
    drop(f);
    close(v, &all[..1]);
}

/// A device that is drained is the only one by now: it gives inode numbers out, also when another one comes, and after a mount.
#[test]
fn the_only_device_is_not_drained() {
    let all = [memory(32), memory(32)];
    format(&all[..1], 1);
    let v = mount(&all[..1]);
    v.add_device(all[1].clone(), false).unwrap();
    v.drain_device(0, &|_, _| true).unwrap();
    remove(&v, 1).unwrap();
    assert_eq!(v.drained_device(), None);
    assert_eq!(v.super_block().device[0].flags.get(), 0);
    for n in 0..100 {
        create(&v, ROOT, &format!("f{n}"), FileKind::File);
    }
    v.add_device(all[1].clone(), true).unwrap();
    assert_eq!(v.drained_device(), None);
    create(&v, ROOT, "g", FileKind::File);
    close(v, &all);
    let v = mount(&all);
    assert_eq!(v.drained_device(), None);
    create(&v, ROOT, "h", FileKind::File);
    close(v, &all);
}

/// A removal that is stopped leaves all as it was, but for what moved; the same again goes on.
#[test]
fn a_removal_is_stopped_and_goes_on() {
    let all = [memory(64), memory(64)];
    let (v, f) = on_both(&all, 40);
    assert!(matches!(v.remove_device(1, &two_steps()), Err(Error::Stopped)));
    let big = file(&v, ROOT, "big");
    let had = fill(&v, &big, ALL);
    assert!(had > 70 * MIB, "the device is one like any other: {had}");
    holds(&v, &f, 40 * MIB);
    drop(big);
    v.unlink(ROOT, b"big").unwrap();
    remove(&v, 1).unwrap();
    holds(&v, &f, 40 * MIB);
    drop(f);
    close(v, &all[..1]);
}

/// Threads overwrite, make, sync and remove files while a device comes and goes, ten times; `df` is as before then.
#[test]
fn ten_rounds_of_a_device_that_comes_and_goes() {
    let all = [memory(64), memory(96)];
    format(&all[..1], 2);
    let v = mount(&all[..1]);
    let keep = file(&v, ROOT, "keep");
    fill(&v, &keep, 6);
    let (_, files) = files_of_two(&v);
    for f in files.iter().flatten() {
        v.write(f, 0, &piece(0)).unwrap();
    }
    v.sync().unwrap();
    let before = v.statfs().blocks;
    beside(
        2,
        |who, at| overwrite(&v, &files[usize::from(who)], at),
        || {
            for _ in 0..10 {
                v.add_device(all[1].clone(), false).unwrap();
                let big = file(&v, ROOT, "big");
                assert!(fill(&v, &big, 80) == 80 * MIB);
                holds(&v, &keep, 6 * MIB);
                drop(big);
                v.unlink(ROOT, b"big").unwrap();
                let mut tries = 0;
                loop {
                    match remove(&v, 1) {
                        Ok(_) => break,
                        // written to all the time
                        Err(Error::Busy(_) | Error::Size(_)) if tries < 50 => tries += 1,
                        Err(e) => panic!("{e}"),
                    }
                }
                assert_eq!(v.statfs().blocks, before);
            }
        },
    );
    holds(&v, &keep, 6 * MIB);
    drop((keep, files));
    close(v, &all[..1]);
}

#[test]
fn every_crash_leaves_the_volume_with_the_device_or_without() {
    for what in [Change::Add, Change::Remove] {
        let (states, old) = every_crash_of_a_device(what).unwrap();
        println!("{what:?}: {states} states, {old} of the old volume");
        assert!(old > 3 && states > old + 3, "{what:?}: {states} states, {old} of the old volume");
    }
}

/// Copies of the superblock that a crash left with one device more are written anew by the next mount: nobody needs the device
/// that has left when the copy that counts is damaged later.
#[test]
fn superblocks_that_a_crash_left_are_written_anew() {
    use braidfs::store::super_io;
    let all = [memory(32), memory(32)];
    format(&all[..1], 1);
    let v = mount(&all[..1]);
    v.add_device(all[1].clone(), false).unwrap();
    let mut replica = vec![0; BLOCK as usize];
    let last = all[0].blocks() - 1;
    all[0].read(last, &mut replica).unwrap();
    remove(&v, 1).unwrap();
    v.crash();
    all[0].write(last, &replica).unwrap();
    let told = || super_io::read_at(&all[0], last).unwrap().devices.get();
    assert_eq!(told(), 2);
    close(mount(&all[..1]), &all[..1]);
    assert_eq!(told(), 1);
    all[0].write(0, &[0; BLOCK as usize]).unwrap();
    let v = mount(&all[..1]);
    assert_eq!(v.super_block().devices.get(), 1);
    v.unmount().unwrap();
}

/// Each write and flush that fails, on either device: afterwards the volume is with the device or without, and has all it had.
#[test]
fn an_error_leaves_the_volume_with_the_device_or_without() {
    for what in [Change::Add, Change::Remove] {
        let images = [Arc::new(MemDevice::soiled(48 * MIB / BLOCK)), Arc::new(MemDevice::soiled(32 * MIB / BLOCK))];
        let all = devices_of(&images);
        let (v, f) = on_both(&all, 4);
        if what == Change::Add {
            remove(&v, 1).unwrap();
        }
        drop(f);
        v.unmount().unwrap();
        let members = if what == Change::Add { 1 } else { 2 };
        let (mut without, mut with, mut fired) = (0, 0, 0);
        for device in 0..2 {
            for (op, n) in (0..).flat_map(|n| [(Op::Write, n), (Op::Flush, n)]) {
                let copies = copies_of(&images);
                let faulty: Vec<_> = copies.iter().map(|d| Arc::new(FaultDevice::new(d.clone(), 1))).collect();
                let now = devices_of(&faulty);
                let v = mount(&now[..members]);
                faulty[device].add(Rule::new(op, Effect::Fail(5)).skip(n).times(1));
                let result = match what {
                    Change::Add => v.add_device(now[1].clone(), false).map(drop),
                    Change::Remove => remove(&v, 1).map(drop),
                };
                let hit = faulty[device].fired() > 0;
                faulty[device].clear();
                let why = format!("{what:?}, {op:?} {n} of device {device}: {result:?}");
                let _ = v.sync();
                let _ = v.unmount();
                // which device has a superblock is told by these
                let there = braidfs::store::super_io::read_one(&copies[1]).is_ok();
                let given = if there { &copies[..] } else { &copies[..1] };
                fsck(given).unwrap_or_else(|e| panic!("{why}: {e}"));
                let v = mount(given);
                let has = v.super_block().device_table().len();
                match (what, &result) {
                    (Change::Add, Ok(())) => assert_eq!(has, 2, "{why}"),
                    (Change::Remove, Ok(())) => assert_eq!(has, 1, "{why}"),
                    _ => {}
                }
                (with, without, fired) =
                    (with + u64::from(has == 2), without + u64::from(has == 1), fired + u64::from(hit));
                let f = v.open(v.lookup(ROOT, b"f").unwrap().ino).unwrap();
                holds(&v, &f, 4 * MIB);
                drop(f);
                v.unmount().unwrap();
                if !hit && op == Op::Flush {
                    break;
                }
            }
        }
        println!("{what:?}: {fired} errors, {with} with the device, {without} without");
        assert!(fired > 4 && with > 0 && without > 0, "{fired} {with} {without}");
    }
}

/// An image file that has left is nobody's: its locks are free while the volume is still in use.
#[test]
fn a_file_that_has_left_can_be_opened_by_others() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("second");
    let first = memory(64);
    format(std::slice::from_ref(&first), 1);
    let v = mount(std::slice::from_ref(&first));
    let open = || FileDevice::open(&path, OpenHow { write: true, direct: false });
    v.add_device(Arc::new(FileDevice::create(&path, 64 * MIB).unwrap()), true).unwrap();
    assert!(open().is_err());
    remove(&v, 1).unwrap();
    let device: Arc<dyn Device> = Arc::new(open().unwrap());
    assert!(braidfs::store::super_io::read_one(&device).is_err());
    drop(device);
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 64 * MIB, "it is as long as it was");
    close(v, &[first]);
}

/// Data moves to a device that was added, beside threads that write; again, and stopped on the way, it goes on.
#[test]
fn data_moves_to_a_device_that_was_added() {
    let all = [memory(64), memory(64)];
    format(&all[..1], 2);
    let v = mount(&all[..1]);
    assert!(text(v.rebalance(&|_, _| true)).contains("one device only"));
    let (dirs, files) = files_of_two(&v);
    let kept: Vec<_> = dirs.iter().map(|d| file(&v, *d, "kept")).collect();
    // room between them: without more, what moves would come there
    let gone: Vec<_> = dirs.iter().map(|d| file(&v, *d, "gone")).collect();
    for n in 1..=12 {
        kept.iter().chain(&gone).for_each(|f| assert_eq!(fill(&v, f, n), n * MIB));
        v.sync().unwrap();
    }
    drop(gone);
    dirs.iter().for_each(|d| v.unlink(*d, b"gone").unwrap());
    v.sync().unwrap();
    for f in files.iter().flatten() {
        v.write(f, 0, &piece(0)).unwrap();
    }
    v.sync().unwrap();
    v.add_device(all[1].clone(), false).unwrap();
    assert!(matches!(v.rebalance(&two_steps()), Err(Error::Stopped)));
    beside(
        2,
        |who, at| overwrite(&v, &files[usize::from(who)], at),
        || {
            let even = v.rebalance(&|_, _| true).unwrap();
            assert!(even.moved > 0, "{even:?}");
            let [(first, _), (second, _)] = even.devices[..] else { panic!("{even:?}") };
            let group = 4 * MIB / BLOCK;
            assert!(first.abs_diff(second) <= 3 * group && second > 2 * group, "{even:?}");
        },
    );
    v.sync().unwrap();
    // what was overwritten since the last group was looked at may have come anywhere: with nobody writing, it ends
    let again = v.rebalance(&|_, _| true).unwrap();
    let last = v.rebalance(&|_, _| true).unwrap();
    assert!(again.moved <= 3 && last.moved == 0, "{again:?} {last:?}");
    kept.iter().for_each(|f| holds(&v, f, 12 * MIB));
    // all room is there as before
    let big = file(&v, ROOT, "big");
    assert!(fill(&v, &big, ALL) > 60 * MIB);
    drop((files, kept, big));
    close(v, &all);
    let v = mount(&all);
    for dir in ["d0", "d1"] {
        let dir = v.lookup(ROOT, dir.as_bytes()).unwrap().ino;
        let f = v.open(v.lookup(dir, b"kept").unwrap().ino).unwrap();
        holds(&v, &f, 12 * MIB);
    }
    close(v, &all);
}

/// Tables of devices that lie, with right checksums: refused, or what can be done with them is, and nothing panics.
#[test]
fn tables_of_devices_that_lie_are_refused() {
    use braidfs::format::super_block::SuperBlock;
    let images = [Arc::new(MemDevice::soiled(32 * MIB / BLOCK)), Arc::new(MemDevice::soiled(16 * MIB / BLOCK))];
    let all = devices_of(&images);
    format(&all[..1], 2);
    let v = mount(&all[..1]);
    v.add_device(all[1].clone(), false).unwrap();
    fill(&v, &file(&v, ROOT, "f"), 24);
    v.unmount().unwrap();
    let mut rng = fastrand::Rng::with_seed(16);
    let (mut refused, mut mounted) = (0, 0);
    for _ in 0..250 {
        let copies = copies_of(&images);
        for (i, device) in copies.iter().enumerate() {
            if rng.u8(..3) == 0 {
                continue;
            }
            let mut block = vec![0; BLOCK as usize];
            device.read(0, &mut block).unwrap();
            let mut sb = SuperBlock::from_block(&block, 0).unwrap();
            let mut this = i as u16;
            for _ in 0..rng.usize(1..4) {
                let n = rng.usize(..3);
                let (word, small) = (rng.u32(..), rng.u32(..20));
                let value = if rng.bool() { small } else { word };
                let d = &mut sb.device[n];
                match rng.u8(..10) {
                    0 => d.blocks = u64::from(value).into(),
                    1 => d.data_start = u64::from(value).into(),
                    2 => d.first_group = value.into(),
                    3 => d.groups = value.into(),
                    4 => d.last_group_blocks = value.into(),
                    5 => d.flags = value.into(),
                    6 => d.uuid[0] ^= value as u8,
                    7 => sb.devices = (small as u16).into(),
                    8 => sb.groups = value.into(),
                    _ => this = small as u16,
                }
            }
            for addr in [0, device.blocks() - 1] {
                device.write(addr, &sb.to_block(this, addr, 3)).unwrap();
            }
        }
        let _ = fsck(&copies);
        let options = MountOptions { cache_bytes: 8 * MIB, background: false, ..MountOptions::default() };
        match Volume::mount(copies.clone(), options) {
            Err(_) => refused += 1,
            Ok(v) => {
                mounted += 1;
                let _ = v.drain_device(rng.usize(..3), &|_, _| true);
                let _ = v.add_device(memory(8), false);
                let _ = v.end_drain(rng.usize(..3));
                let _ = remove(&v, rng.usize(1..4));
                let _ = v.unmount();
                let _ = fsck(&copies);
            }
        }
    }
    println!("{refused} refused, {mounted} mounted");
    assert!(refused > 50 && mounted > 20, "{refused} refused, {mounted} mounted");
}

/// What lies on the device finds no room in its domain, and no group is nobody's: another domain, which has its room in pieces,
/// empties groups for it.
#[test]
fn a_drain_gets_groups_that_others_empty() {
    let all = [memory(96), memory(32)];
    format(&all, 2);
    let v = mount(&all);
    let ((f, size), kept) = full_beside_pieces(&v);
    assert_eq!(relocated(&v), 0);
    let left = v.drain_device(1, &|_, _| true).unwrap();
    assert_eq!(left.blocks, 0, "{left:?}");
    assert!(relocated(&v) > 0);
    holds(&v, &f, size);
    kept.iter().for_each(|f| holds(&v, f, MIB / 2));
    drop((f, kept));
    close(v, &all);
}

/// A block that cannot be read stays on the device, and is told of; what lies in front of it moves.
#[test]
fn a_drain_gets_past_a_block_that_cannot_be_read() {
    let plain = [memory(64), memory(64)];
    let (v, f) = on_both(&plain, 40);
    drop(f);
    v.unmount().unwrap();
    // the last block with the file's content: its words tell their places
    let (mut block, mut bad) = (vec![0; BLOCK as usize], 0);
    let step = u64::from_le_bytes(small::content(8)[..8].try_into().unwrap());
    for at in 0..plain[1].blocks() {
        plain[1].read(at, &mut block).unwrap();
        let word = |i: usize| u64::from_le_bytes(block[8 * i..][..8].try_into().unwrap());
        if (1..512).all(|i| word(i).wrapping_sub(word(i - 1)) == step) {
            bad = at;
        }
    }
    assert!(bad > 0);
    let faulty = Arc::new(FaultDevice::new(plain[1].clone(), 1));
    faulty.add(Rule::new(Op::Read, Effect::Fail(5)).blocks(bad..bad + 1));
    let all = [plain[0].clone(), faulty.clone() as Arc<dyn Device>];
    let v = mount(&all);
    let left = v.drain_device(1, &|_, _| true).unwrap();
    assert!(faulty.fired() > 0);
    assert_eq!((left.blocks, left.groups, left.inodes), (1, 1, 0), "{left:?}");
    let why = text(remove(&v, 1));
    assert!(why.contains("cannot be read"), "{why}");
    // written again it can be read again, as on a device that has spare blocks
    faulty.clear();
    assert!(v.drain_device(1, &|_, _| true).unwrap().is_empty());
    let f = v.open(v.lookup(ROOT, b"f").unwrap().ino).unwrap();
    holds(&v, &f, 40 * MIB);
    drop(f);
    close(v, &all);
}

/// A durable write that fails on one device: on those that have it already no sync stays open, for which others would step back.
#[test]
fn a_durable_write_that_fails_ends_the_syncs_of_the_other_devices() {
    let faulty: Vec<_> = (0..3).map(|n| Arc::new(FaultDevice::new(Arc::new(MemDevice::soiled(8192)), n))).collect();
    let devices: Vec<_> = faulty.iter().map(|d| Arc::clone(d) as Arc<dyn Device>).collect();
    format(&devices, 1);
    let (sb, devices) = braidfs::store::super_io::read_super(&devices).unwrap();
    let store = braidfs::store::Store::new(devices, &sb).unwrap();
    let block = [7; BLOCK as usize];
    // to the first and the last device
    let ops: Vec<_> = [0, 2]
        .map(|d| sb.device_table()[d].first_group.get())
        .map(|group| (store.geometry().group_start(group), vec![&block[..]]))
        .into();
    let flushes = || faulty.iter().map(|d| d.counters().flushes).collect::<Vec<_>>();
    let before = flushes();
    store.write_batch_through(&ops).unwrap();
    assert_eq!(flushes(), before, "whoever writes so flushes himself");
    faulty[2].add(Rule::new(Op::Write, Effect::Fail(5)));
    assert!(store.write_batch_through(&ops).is_err());
    assert_eq!(flushes(), [before[0] + 1, before[1], before[2]]);
}
