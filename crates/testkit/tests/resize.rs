//! A volume that grows: under load, when it is full, on one device and several, and what it refuses.

use braidfs::{Cred, Error, FileKind, InodeNo, MkfsOptions, MountOptions, NewSize, OpenFile, Volume};
use braidfs_device::{Device, Effect, FaultDevice, FileDevice, Op, Rule, SparseDevice};
use braidfs_testkit::resize::{
    every_crash_of_a_growth, every_crash_of_a_shrink, every_crash_of_a_shrink_by_lent_groups,
};
use braidfs_testkit::small::{
    ALL, BLOCK, Ended, MIB, ROOT, close, content, create, file, fill, holds, memory, new_node, piece,
};
use braidfs_testkit::{small, walk::fsck};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// A volume on the first part of each device, so large.
fn format(devices: &[Arc<dyn Device>], mib: &[u64], domains: u16) {
    small::format(devices, mib, &MkfsOptions { domains: Some(domains), ..MkfsOptions::default() });
}

fn mount(devices: &[Arc<dyn Device>]) -> Volume {
    let options = MountOptions { cache_bytes: 32 * MIB, ..MountOptions::default() };
    Volume::mount(devices.to_vec(), options).unwrap()
}

#[test]
fn a_full_volume_has_room_at_once() {
    let all = [memory(256)];
    format(&all, &[64], 2);
    let v = mount(&all);
    let f = file(&v, ROOT, "f");
    let before = fill(&v, &f, ALL);
    let told = v.statfs();
    let r = v.grow(NewSize::Bytes(160 * MIB)).unwrap();
    assert_eq!((r.before, r.after, r.volume), (64 * MIB, 160 * MIB, 160 * MIB));
    let now = v.statfs();
    assert!(now.blocks > told.blocks + 90 * MIB / BLOCK && now.available > told.available + 90 * MIB / BLOCK);
    assert!(now.inodes_free > told.inodes_free);
    let after = fill(&v, &f, ALL);
    assert!(after > before + 85 * MIB, "{before} bytes before, {after} afterwards");
    // all that there is
    assert_eq!(v.grow(NewSize::Device).unwrap().after, 256 * MIB);
    let last = fill(&v, &f, ALL);
    assert!(last > after + 85 * MIB, "{after} bytes before, {last} afterwards");
    v.sync().unwrap();
    drop(f);
    close(v, &all);
    let v = mount(&all);
    assert_eq!(v.super_block().device[0].blocks.get(), 256 * MIB / BLOCK);
    let ino = v.lookup(ROOT, b"f").unwrap().ino;
    let f = v.open(ino).unwrap();
    holds(&v, &f, last);
    drop(f);
    close(v, &all);
}

#[test]
fn threads_write_while_it_grows() {
    let all = [memory(512)];
    format(&all, &[48], 3);
    let v = mount(&all);
    let dirs: Vec<_> = (0..3).map(|i| create(&v, ROOT, &format!("d{i}"), FileKind::Dir)).collect();
    let (stop, written) = (AtomicBool::new(false), AtomicU64::new(0));
    let sizes: Vec<u64> = std::thread::scope(|s| {
        let one = |dir: InodeNo| {
            let (v, stop, written) = (&v, &stop, &written);
            move || {
                let f = file(v, dir, "f");
                let (mut at, mut names) = (0, 0);
                while !stop.load(Ordering::Relaxed) {
                    match v.write(&f, at, &content(at)) {
                        Ok(n) => {
                            at += n as u64;
                            written.fetch_add(n as u64, Ordering::Relaxed);
                        }
                        Err(Error::NoSpace) => std::thread::yield_now(),
                        Err(e) => panic!("{e}"),
                    }
                    names += 1;
                    let name = format!("n{names}");
                    match v.create(dir, name.as_bytes(), &new_node(FileKind::File), &Cred::root()) {
                        Ok(a) if names % 3 == 0 => v.fsync(a.ino, false).unwrap(),
                        Ok(_) | Err(Error::NoSpace) => {}
                        Err(e) => panic!("{e}"),
                    }
                }
                at
            }
        };
        let threads: Vec<_> = dirs.iter().map(|d| s.spawn(one(*d))).collect();
        for step in 1..=8u64 {
            // so that each step is needed, and found
            while written.load(Ordering::Relaxed) < step * 24 * MIB {
                std::thread::yield_now();
            }
            v.grow(NewSize::More(40 * MIB)).unwrap();
        }
        while written.load(Ordering::Relaxed) < 300 * MIB {
            std::thread::yield_now();
        }
        stop.store(true, Ordering::Relaxed);
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    close(v, &all);
    let v = mount(&all);
    for (i, size) in sizes.into_iter().enumerate() {
        let dir = v.lookup(ROOT, format!("d{i}").as_bytes()).unwrap().ino;
        let f = v.open(v.lookup(dir, b"f").unwrap().ino).unwrap();
        holds(&v, &f, size);
    }
    v.unmount().unwrap();
}

/// Sizes at the edges: less than a group more, a group more, and a last group that is short and in use.
#[test]
fn any_size_will_do() {
    let all = [memory(80)];
    format(&all, &[33], 1);
    let v = mount(&all);
    let f = file(&v, ROOT, "f");
    let mut before = fill(&v, &f, ALL);
    for more in [BLOCK, 65 * BLOCK, MIB, 3 * MIB, 4 * MIB, 4 * MIB + BLOCK, 11 * MIB + 7 * BLOCK] {
        let was = v.super_block().device[0].blocks.get();
        let r = v.grow(NewSize::More(more)).unwrap();
        assert_eq!(r.after, was * BLOCK + more);
        let now = fill(&v, &f, ALL);
        assert!(now >= before);
        before = now;
        v.sync().unwrap();
    }
    drop(f);
    v.unmount().unwrap();
    fsck(&all).unwrap();
    let v = mount(&all);
    // the group that was short is whole when it is taken again
    let told = v.statfs().blocks;
    v.unlink(ROOT, b"f").unwrap();
    v.sync().unwrap();
    assert!(v.statfs().blocks >= told);
    close(v, &all);
}

#[test]
fn the_last_of_several_devices_grows() {
    let all = [memory(64), memory(300)];
    format(&all, &[64, 40], 2);
    let v = mount(&all);
    let f = file(&v, ROOT, "f");
    let before = fill(&v, &f, ALL);
    assert_eq!(v.grow(NewSize::Device).unwrap().volume, 364 * MIB);
    assert!(fill(&v, &f, ALL) > before + 200 * MIB);
    drop(f);
    close(v, &all);
    let swapped = [all[1].clone(), all[0].clone()];
    let v = mount(&swapped);
    assert_eq!(v.super_block().device[1].blocks.get(), 300 * MIB / BLOCK);
    close(v, &all);
}

#[test]
fn what_cannot_be_is_refused_and_changes_nothing() {
    let all: [Arc<dyn Device>; 1] = [SparseDevice::new((1 << 40) / BLOCK)];
    format(&all, &[32], 1);
    let v = mount(&all);
    let why = |size| match v.grow(size) {
        Err(Error::Size(why)) => why,
        other => panic!("{size:?}: {other:?}"),
    };
    assert!(why(NewSize::Bytes(16 * MIB)).contains("the volume uses 33554432 bytes"));
    assert!(why(NewSize::Bytes(2 << 40)).contains("at most"));
    assert!(why(NewSize::More(u64::MAX)).contains("EiB"));
    // of the room that the tables have
    let most = why(NewSize::Device);
    let most: u64 = most.split(' ').filter_map(|w| w.parse().ok()).max().unwrap();
    assert!(most > 30 << 30, "{most}");
    assert!(matches!(v.grow(NewSize::Bytes(most + BLOCK * 1024)), Err(Error::Size(_))));
    assert_eq!(v.super_block().device[0].blocks.get(), 32 * MIB / BLOCK);
    let same = v.grow(NewSize::Bytes(32 * MIB)).unwrap();
    assert_eq!((same.before, same.after), (32 * MIB, 32 * MIB));
    assert_eq!(v.grow(NewSize::Bytes(most)).unwrap().after, most);
    close(v, &all);
    let options = MountOptions { read_only: true, ..MountOptions::default() };
    let v = Volume::mount(all.to_vec(), options).unwrap();
    assert!(matches!(v.grow(NewSize::More(MIB)), Err(Error::ReadOnly)));
    assert_eq!(v.super_block().device[0].blocks.get(), most / BLOCK);
}

#[test]
fn a_device_that_is_too_small_is_said_so() {
    let all = [memory(64)];
    format(&all, &[64], 1);
    let v = mount(&all);
    match v.grow(NewSize::Bytes(65 * MIB)) {
        Err(Error::Size(why)) => assert!(why.contains("67108864 bytes (64.0 MiB) only"), "{why}"),
        other => panic!("{other:?}"),
    }
    close(v, &all);
}

/// An image file is made longer, and a device that fails meanwhile leaves the volume as it was.
#[test]
fn files_are_extended_and_errors_undone() {
    let dir = tempfile::tempdir().unwrap();
    let image: Arc<dyn Device> = Arc::new(FileDevice::create(&dir.path().join("image"), 64 * MIB).unwrap());
    let faulty = Arc::new(FaultDevice::new(image, 1));
    let all: [Arc<dyn Device>; 1] = [faulty.clone()];
    format(&all, &[64], 1);
    let v = mount(&all);
    v.sync().unwrap();
    let before = (v.super_block().groups.get(), v.statfs().blocks);
    faulty.add(Rule::new(Op::Write, Effect::Fail(5)).blocks(0..1));
    assert!(matches!(v.grow(NewSize::Bytes(96 * MIB)), Err(Error::Io(_))));
    assert_eq!((v.super_block().groups.get(), v.statfs().blocks), before);
    faulty.clear();
    v.grow(NewSize::Bytes(96 * MIB)).unwrap();
    assert_eq!(std::fs::metadata(dir.path().join("image")).unwrap().len(), 96 * MIB);
    close(v, &all);
}

#[test]
fn every_crash_leaves_the_old_size_or_the_new_one() {
    for devices in [1, 2] {
        let (states, old) = every_crash_of_a_growth(devices).unwrap();
        // both come out
        assert!(old > 3 && states > old + 3, "{states} states, {old} of the old size");
        println!("{devices} devices: {states} states, {old} of the old size");
    }
}

/// Groups behind the new end are emptied, whatever lies in them but inodes; all of it is there afterwards.
#[test]
fn what_lies_behind_a_smaller_end_moves() {
    let all = [memory(256)];
    format(&all, &[64], 2);
    let v = mount(&all);
    let dir = create(&v, ROOT, "dir", FileKind::Dir);
    let keep: Vec<_> = (0..3).map(|i| file(&v, dir, &format!("keep{i}"))).collect();
    let big = file(&v, dir, "big");
    fill(&v, &big, ALL);
    v.grow(NewSize::Bytes(200 * MIB)).unwrap();
    // in the groups at the end
    for f in &keep {
        assert_eq!(fill(&v, f, 8), 8 * MIB);
    }
    v.sync().unwrap();
    let end = v.super_block().groups.get();
    drop(big);
    v.unlink(dir, b"big").unwrap();
    v.sync().unwrap();
    let mut told = Vec::new();
    let told_cell = std::cell::RefCell::new(&mut told);
    let r = v.shrink(64 * MIB, &|done, all| told_cell.borrow_mut().push((done, all))).unwrap();
    assert_eq!((r.before, r.after), (200 * MIB, 64 * MIB));
    assert!(r.groups < end && told.last().is_some_and(|(done, all)| done == all && *all > 0), "{told:?}");
    assert_eq!(v.super_block().device[0].blocks.get(), 64 * MIB / BLOCK);
    keep.iter().for_each(|f| holds(&v, f, 8 * MIB));
    drop(keep);
    close(v, &all);
    let v = mount(&all);
    for i in 0..3 {
        let dir = v.lookup(ROOT, b"dir").unwrap().ino;
        let f = v.open(v.lookup(dir, format!("keep{i}").as_bytes()).unwrap().ino).unwrap();
        holds(&v, &f, 8 * MIB);
    }
    // and there and back again
    for size in [180, 64, 130, 64] {
        assert_eq!(v.resize(NewSize::Bytes(size * MIB), &|_, _| {}).unwrap().after, size * MIB);
    }
    close(v, &all);
}

/// Overwrites files in turn, makes, syncs and removes others, until `stop`. Which piece each file holds then, `u64::MAX` for none.
fn busy(v: &Volume, dir: InodeNo, files: &[OpenFile], stop: &AtomicBool, written: &AtomicU64) -> Vec<u64> {
    let mut last = vec![u64::MAX; files.len()];
    let mut round = 0;
    while !stop.load(Ordering::Relaxed) {
        let at = round as usize % files.len();
        assert_eq!(v.write(&files[at], 0, &piece(round)).unwrap(), MIB as usize);
        last[at] = round;
        let short = format!("s{round}");
        let f = file(v, dir, &short);
        v.write(&f, 0, &piece(round)[..5000]).unwrap();
        match round % 4 {
            0 => v.fsync(files[at].ino(), false).unwrap(),
            1 => v.fsync(f.ino(), true).unwrap(),
            _ => {}
        }
        drop(f);
        v.unlink(dir, short.as_bytes()).unwrap();
        written.fetch_add(1, Ordering::Relaxed);
        round += 1;
    }
    last
}

/// Others overwrite, append, remove and sync all the time, in what has to move and elsewhere.
#[test]
fn threads_write_while_it_becomes_smaller() {
    const FILES: u64 = 6;
    let all = [memory(256)];
    format(&all, &[64], 3);
    let v = mount(&all);
    // all that have a number for long have it in front
    let dirs: Vec<_> = (0..3).map(|i| create(&v, ROOT, &format!("d{i}"), FileKind::Dir)).collect();
    let files: Vec<Vec<_>> =
        dirs.iter().map(|d| (0..FILES).map(|i| file(&v, *d, &format!("f{i}"))).collect()).collect();
    v.sync().unwrap();
    let (stop, written) = (AtomicBool::new(false), AtomicU64::new(0));
    let grown = [200, 256, 180, 256].map(|n| n * MIB);
    let (smaller, last): (u64, Vec<Vec<u64>>) = std::thread::scope(|s| {
        let (v, stop, written) = (&v, &stop, &written);
        let threads: Vec<_> =
            dirs.iter().zip(&files).map(|(d, f)| s.spawn(move || busy(v, *d, f, stop, written))).collect();
        let ended = Ended(stop);
        let mut smaller = 0;
        for step in 0..12 {
            let more = written.load(Ordering::Relaxed) + 30;
            while written.load(Ordering::Relaxed) < more {
                std::thread::yield_now();
            }
            let size = NewSize::Bytes(grown[step % grown.len()]);
            if !v.is_smaller(size) {
                v.grow(size).unwrap();
            }
            let more = written.load(Ordering::Relaxed) + 30;
            while written.load(Ordering::Relaxed) < more {
                std::thread::yield_now();
            }
            match v.shrink(100 * MIB, &|_, _| {}) {
                Ok(r) => smaller += u64::from(r.after == 100 * MIB),
                // a short file has its number there, or it is written to, just then
                Err(Error::Size(_) | Error::Busy(_)) => {}
                Err(e) => panic!("{e}"),
            }
        }
        drop(ended);
        (smaller, threads.into_iter().map(|t| t.join().unwrap()).collect())
    });
    println!("{smaller} times smaller, {} rounds", written.load(Ordering::Relaxed));
    assert!(smaller > 0);
    let check = |v: &Volume, f: &OpenFile, n: u64| {
        let mut got = vec![0; MIB as usize];
        assert_eq!(v.read(f, 0, &mut got).unwrap(), MIB as usize);
        assert!(got == piece(n), "a file has another content than piece {n}");
    };
    for (f, n) in files.iter().flatten().zip(last.iter().flatten()).filter(|(_, n)| **n < u64::MAX) {
        check(&v, f, *n);
    }
    drop(files);
    close(v, &all);
    let v = mount(&all);
    for (i, last) in last.iter().enumerate() {
        let dir = v.lookup(ROOT, format!("d{i}").as_bytes()).unwrap().ino;
        for (k, n) in last.iter().enumerate().filter(|(_, n)| **n < u64::MAX) {
            check(&v, &v.open(v.lookup(dir, format!("f{k}").as_bytes()).unwrap().ino).unwrap(), *n);
        }
    }
    close(v, &all);
}

/// What cannot leave is named, with the least size, and that size can be had.
#[test]
fn inodes_and_fixed_blocks_keep_their_groups() {
    let all = [memory(128)];
    format(&all, &[32], 1);
    let v = mount(&all);
    let why = |size: u64| match v.shrink(size, &|_, _| {}) {
        Err(Error::Size(why)) => why,
        other => panic!("{other:?}"),
    };
    assert!(why(64 * MIB).contains("no larger"));
    assert!(why(MIB).contains("least size"));
    v.grow(NewSize::Device).unwrap();
    // more inodes than the first groups have numbers for
    let mut last = 0;
    for i in 0..30_000 {
        last = create(&v, ROOT, &format!("n{i}"), FileKind::File).0;
    }
    v.sync().unwrap();
    let groups = v.super_block().groups.get();
    assert!(last > 0);
    let said = why(32 * MIB);
    assert!(said.contains("inode numbers"), "{said}");
    let least: u64 = said.split(' ').filter_map(|w| w.parse().ok()).max().unwrap();
    assert!(least > 32 * MIB && least < 128 * MIB, "{said}");
    assert_eq!(v.super_block().groups.get(), groups);
    // it goes on as before
    create(&v, ROOT, "after", FileKind::File);
    assert_eq!(v.shrink(least, &|_, _| {}).unwrap().after, least);
    close(v, &all);
}

#[test]
fn every_crash_of_a_smaller_volume_leaves_one_of_both_sizes() {
    let (states, old) = every_crash_of_a_shrink().unwrap();
    assert!(old > 3 && states > old + 3, "{states} states, {old} of the old size");
    println!("{states} states, {old} of the old size");
}

#[test]
fn every_crash_leaves_one_of_both_sizes_where_another_domain_makes_room() {
    let (states, old) = every_crash_of_a_shrink_by_lent_groups().unwrap();
    assert!(old > 30 && states > old + 3, "{states} states, {old} of the old size");
    println!("{states} states, {old} of the old size");
}

/// A device that fails at what comes behind the superblock that counts: the volume is smaller, and stays so.
#[test]
fn an_error_behind_the_superblock_that_counts_keeps_the_smaller_size() {
    let faulty = Arc::new(FaultDevice::new(memory(128), 1));
    let all: [Arc<dyn Device>; 1] = [faulty.clone()];
    format(&all, &[128], 2);
    let v = mount(&all);
    v.sync().unwrap();
    let old_last = 128 * MIB / BLOCK - 1;
    faulty.add(Rule::new(Op::Write, Effect::Fail(5)).blocks(old_last..old_last + 1));
    assert_eq!(v.shrink(64 * MIB, &|_, _| {}).unwrap().after, 64 * MIB);
    assert_eq!(v.super_block().device[0].blocks.get(), 64 * MIB / BLOCK);
    faulty.clear();
    // nothing of it lies behind the end
    let f = file(&v, ROOT, "f");
    let size = fill(&v, &f, ALL);
    assert!(size < 64 * MIB, "{size}");
    v.sync().unwrap();
    drop(f);
    close(v, &all);
    let v = mount(&all);
    let f = v.open(v.lookup(ROOT, b"f").unwrap().ino).unwrap();
    holds(&v, &f, size);
    drop(f);
    close(v, &all);
}

/// Where it is not known whether the superblock that counts is the new one, nothing is claimed behind the smaller end.
#[test]
fn after_an_error_at_the_superblock_that_counts_neither_size_is_wrong() {
    let faulty = Arc::new(FaultDevice::new(memory(128), 1));
    let all: [Arc<dyn Device>; 1] = [faulty.clone()];
    format(&all, &[128], 2);
    let v = mount(&all);
    v.sync().unwrap();
    faulty.add(Rule::new(Op::Write, Effect::Fail(5)).blocks(0..1));
    assert!(matches!(v.shrink(64 * MIB, &|_, _| {}), Err(Error::Io(_))));
    faulty.clear();
    assert_eq!(v.super_block().device[0].blocks.get(), 128 * MIB / BLOCK);
    assert!(matches!(v.grow(NewSize::Bytes(256 * MIB)), Err(Error::Busy(_))));
    let f = file(&v, ROOT, "f");
    let size = fill(&v, &f, ALL);
    assert!(size < 64 * MIB, "{size}");
    drop(f);
    v.unlink(ROOT, b"f").unwrap();
    v.sync().unwrap();
    // the same again goes on
    assert_eq!(v.shrink(64 * MIB, &|_, _| {}).unwrap().after, 64 * MIB);
    assert!(v.grow(NewSize::Device).is_ok());
    close(v, &all);
}

/// What the group table says of groups that the volume has not is believed by nobody when it grows.
#[test]
fn owners_of_groups_that_are_not_there_are_forgotten() {
    use braidfs::format::bat::{self, BatEntry, ENTRIES_PER_BLOCK};
    let all = [memory(256)];
    format(&all, &[64], 1);
    let v = mount(&all);
    let sb = v.super_block();
    v.unmount().unwrap();
    let (pair, groups) = (sb.bat.get(), sb.groups.get() as usize);
    let mut buf = vec![0; 2 * BLOCK as usize];
    all[0].read(pair, &mut buf).unwrap();
    let per = ENTRIES_PER_BLOCK as usize;
    let (copy, seq, mut entries) = bat::decode(&buf, sb.volume_id(), pair, per, 1).unwrap();
    for e in &mut entries[groups + 1..groups + 4] {
        *e = BatEntry { domain: Some(braidfs::format::DomainId(0)), epoch: 3 };
    }
    all[0].write(pair + 1 - copy as u64, &bat::encode(&entries, sb.volume_id(), pair, 1 - copy, seq + 1)).unwrap();
    let v = mount(&all);
    v.grow(NewSize::Device).unwrap();
    v.unmount().unwrap();
    fsck(&all).unwrap();
    let v = mount(&all);
    let f = file(&v, ROOT, "f");
    assert!(fill(&v, &f, ALL) > 230 * MIB);
    drop(f);
    close(v, &all);
}
