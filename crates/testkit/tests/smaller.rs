//! A volume that becomes smaller while other changes of the volume happen, and where its device fails.

use braidfs::{
    Cred, Error, FileKind, JournalMode, MkfsOptions, MountOptions, NewSize, OpenFile, Remount, SetAttr, TenantBudget,
    Volume,
};
use braidfs_device::{Device, Effect, FaultDevice, MemDevice, Op, RecordDevice, Rule};
use braidfs_format::super_block::INCOMPAT_SCRATCH;
use braidfs_testkit::small::{
    ALL, BLOCK, MIB, ROOT, close, copies_of, create, devices_of, file, fill, full_beside_pieces, groups_of_nobody,
    holds, memory, new_node, relocated,
};
use braidfs_testkit::{small, walk::fsck};
use std::cell::Cell;
use std::sync::Arc;

/// A volume in groups of 4 MiB on the first part of each device, so large.
fn format(devices: &[Arc<dyn Device>], mib: &[u64], domains: u16) {
    let how = MkfsOptions { domains: Some(domains), group_bytes: Some(4 * MIB), ..MkfsOptions::default() };
    small::format(devices, mib, &how);
}

/// Nothing goes on by itself.
fn mount(devices: &[Arc<dyn Device>]) -> Volume {
    let options = MountOptions { cache_bytes: 32 * MIB, background: false, ..MountOptions::default() };
    Volume::mount(devices.to_vec(), options).unwrap()
}

/// A volume of 128 MiB whose groups at the end are domains', with a file of 20 MiB partly there.
fn used_to_the_end(v: &Volume) -> OpenFile {
    let (big, f) = (file(v, ROOT, "big"), file(v, ROOT, "f"));
    let other = file(v, create(v, ROOT, "d", FileKind::Dir), "other");
    fill(v, &big, 40);
    fill(v, &f, 10);
    fill(v, &other, 36);
    assert_eq!(fill(v, &f, 20), 20 * MIB);
    v.sync().unwrap();
    v.unlink(ROOT, b"big").unwrap();
    drop(big);
    v.sync().unwrap();
    f
}

/// The superblocks of the smaller volume tell of a domain that was added while groups were emptied.
#[test]
fn a_domain_that_is_added_meanwhile_is_told_of() {
    let all = [memory(128)];
    format(&all, &[128], 2);
    let v = mount(&all);
    let f = used_to_the_end(&v);
    let added = Cell::new(false);
    let progress = |_, _| {
        if !added.replace(true) {
            v.add_domain().unwrap();
        }
    };
    assert_eq!(v.shrink(84 * MIB, &progress).unwrap().after, 84 * MIB);
    assert!(added.get());
    assert_eq!((v.domain_count(), v.super_block().domains.get()), (3, 3));
    holds(&v, &f, 20 * MIB);
    drop(f);
    close(v, &all);
    let v = mount(&all);
    assert_eq!((v.domain_count(), v.super_block().domains.get()), (3, 3));
    close(v, &all);
}

/// Two ask for it at once, or one asks again who has not heard the answer: the later one finds it done.
#[test]
fn a_size_that_it_has_already_is_no_error() {
    let all = [memory(128)];
    format(&all, &[128], 2);
    let v = mount(&all);
    let shrink = |mib| v.shrink(mib * MIB, &|_, _| ());
    let first = shrink(84).unwrap();
    assert_eq!((first.before, first.after), (128 * MIB, 84 * MIB));
    let again = shrink(84).unwrap();
    assert_eq!((again.before, again.after), (84 * MIB, 84 * MIB));
    assert_eq!((again.volume, again.groups), (first.volume, first.groups));
    assert!(matches!(shrink(85), Err(Error::Size(_))));
    close(v, &all);
}

/// And of a tenant that came to have no journal: an older program must not believe its tables after a crash.
#[test]
fn a_tenant_that_loses_its_journal_meanwhile_is_told_of() {
    let all = [memory(128)];
    format(&all, &[128], 2);
    let v = mount(&all);
    v.tenant_create(ROOT, b"t", 0o755, "t", TenantBudget::default(), &Cred::root()).unwrap();
    let f = used_to_the_end(&v);
    let told = || v.super_block().incompat.get() & INCOMPAT_SCRATCH != 0;
    assert!(!told());
    std::thread::scope(|s| {
        let change = Cell::new(None);
        let progress = |_, _| {
            let by_another = || s.spawn(|| v.tenant_change("t", |b| b.journal = Some(JournalMode::Scratch)).map(drop));
            let changing = change.take().unwrap_or_else(by_another);
            while !told() && !changing.is_finished() {
                std::thread::yield_now();
            }
            change.set(Some(changing));
        };
        assert_eq!(v.shrink(84 * MIB, &progress).unwrap().after, 84 * MIB);
        change.take().unwrap().join().unwrap().unwrap();
    });
    assert!(told());
    drop(f);
    v.crash();
    let v = mount(&all);
    assert_ne!(v.super_block().incompat.get() & INCOMPAT_SCRATCH, 0, "the copy that counts");
    close(v, &all);
}

/// Nothing is written once the volume is read-only, also where a group at the end is empty already.
#[test]
fn a_remount_to_read_only_ends_it() {
    let image = Arc::new(MemDevice::soiled(128 * MIB / BLOCK));
    let all: [Arc<dyn Device>; 1] = [image.clone()];
    format(&all, &[128], 1);
    let v = mount(&all);
    let big = file(&v, ROOT, "big");
    fill(&v, &big, 100);
    v.sync().unwrap();
    v.unlink(ROOT, b"big").unwrap();
    drop(big);
    v.unmount().unwrap();
    let log = Arc::new(RecordDevice::new(image.snapshot()));
    let all: [Arc<dyn Device>; 1] = [log.clone()];
    let v = mount(&all);
    let written = Cell::new(None);
    let progress = |done, _| {
        if done == 1 {
            let read_only = Remount { read_only: Some(true), ..Remount::default() };
            // by a thread that does not hold what this one does
            std::thread::scope(|s| s.spawn(|| v.remount(&read_only)).join()).unwrap().unwrap();
            written.set(Some(log.log_len()));
        }
    };
    let result = v.shrink(48 * MIB, &progress);
    assert!(matches!(result, Err(Error::ReadOnly)), "{result:?}");
    assert_eq!(Some(log.log_len()), written.get());
    fsck(&all).unwrap();
    // and again once it is writable
    v.remount(&Remount { read_only: Some(false), ..Remount::default() }).unwrap();
    assert_eq!(v.shrink(48 * MIB, &|_, _| {}).unwrap().after, 48 * MIB);
    close(v, &all);
}

/// Numbers of removed directories are taken until a checkpoint, and keep no group.
#[test]
fn removed_directories_keep_no_group() {
    let all = [memory(128)];
    format(&all, &[64], 1);
    let v = mount(&all);
    v.grow(NewSize::Bytes(128 * MIB)).unwrap();
    let geometry = v.super_block().geometry().unwrap();
    let many = geometry.nodes() * 14;
    for n in 0..many {
        create(&v, ROOT, &format!("d{n}"), FileKind::Dir);
    }
    v.sync().unwrap();
    assert!(matches!(v.shrink(32 * MIB, &|_, _| {}), Err(Error::Size(_))));
    for n in 0..many {
        v.rmdir(ROOT, format!("d{n}").as_bytes()).unwrap();
    }
    v.shrink(32 * MIB, &|_, _| {}).unwrap();
    close(v, &all);
}

/// A domain that is full but for its group at the end takes another one for what lies there.
#[test]
fn a_full_domain_takes_another_group_for_what_must_move() {
    let all = [memory(128)];
    format(&all, &[128], 2);
    let v = mount(&all);
    let one = create(&v, ROOT, "one", FileKind::Dir);
    let mut two = create(&v, ROOT, "two", FileKind::Dir);
    for n in 0..8 {
        if v.domain_of(two).unwrap() == v.domain_of(one).unwrap() {
            two = create(&v, ROOT, &format!("two{n}"), FileKind::Dir);
        }
    }
    assert_ne!(v.domain_of(two).unwrap(), v.domain_of(one).unwrap());
    let (f, big) = (file(&v, one, "f"), file(&v, two, "big"));
    let before = fill(&v, &f, 10);
    fill(&v, &big, 100);
    v.sync().unwrap();
    // to the end
    let mut size = before;
    let room = || v.write_room(f.ino());
    while room() > 0 && size < 40 * MIB {
        let now = fill(&v, &f, size / MIB + 1);
        if now == size {
            break;
        }
        size = now;
    }
    v.sync().unwrap();
    v.unlink(two, b"big").unwrap();
    drop(big);
    v.sync().unwrap();
    let r = v.shrink(64 * MIB, &|_, _| {}).unwrap();
    assert_eq!(r.after, 64 * MIB);
    holds(&v, &f, size);
    drop(f);
    close(v, &all);
}

/// A domain is full, its group must go, and no group is nobody's: another domain, which has its room in pieces, empties groups
/// for it.
#[test]
fn a_full_domain_gets_groups_that_others_empty() {
    let all = [memory(128)];
    format(&all, &[128], 2);
    let v = mount(&all);
    let ((f, size), kept) = full_beside_pieces(&v);
    let free = v.statfs().free * BLOCK;
    assert!(free > 40 * MIB, "{free} bytes free");
    assert_eq!((groups_of_nobody(&v), relocated(&v)), (0, 0));
    let first = Cell::new(true);
    let progress = |_, _| {
        // who empties groups does not wait for himself
        assert!(!first.replace(false) || matches!(v.add_domain(), Err(Error::NoSpace)));
    };
    let r = v.shrink(100 * MIB, &progress).unwrap();
    assert_eq!(r.after, 100 * MIB);
    assert!(relocated(&v) > 0 && !first.get());
    holds(&v, &f, size);
    kept.iter().for_each(|f| holds(&v, f, MIB / 2));
    drop((f, kept));
    close(v, &all);
}

/// Writes and flushes that fail (every second one, of the first writes as many as of flushes): the volume has one of both sizes afterwards, and all that it had.
#[test]
fn a_write_that_fails_leaves_one_of_both_sizes() {
    for devices in [1, 2] {
        let images: Vec<Arc<MemDevice>> = (0..devices).map(|_| Arc::new(MemDevice::soiled(64 * MIB / BLOCK))).collect();
        let all = devices_of(&images);
        format(&all, &[64, 64][..devices], 2);
        let v = mount(&all);
        let f = file(&v, ROOT, "f");
        let big = file(&v, ROOT, "big");
        fill(&v, &big, 48 * devices as u64);
        fill(&v, &f, 4);
        v.sync().unwrap();
        v.unlink(ROOT, b"big").unwrap();
        drop((f, big));
        v.unmount().unwrap();
        let (mut olds, mut news, mut fired) = (0, 0, 0);
        for device in 0..devices {
            for (op, n) in (0..).flat_map(|n| [(Op::Write, n), (Op::Flush, n)]) {
                let copies = copies_of(&images);
                let faulty: Vec<_> = copies.iter().map(|d| Arc::new(FaultDevice::new(d.clone(), 1))).collect();
                let now = devices_of(&faulty);
                let v = mount(&now);
                faulty[device].add(Rule::new(op, Effect::Fail(5)).skip(n * 2).times(1));
                let result = v.shrink(40 * MIB, &|_, _| {});
                let hit = faulty[device].fired() > 0;
                faulty[device].clear();
                let what = format!("{op:?} {} of device {device} of {devices}: {result:?}", n * 2);
                // what comes behind it goes on, or is refused
                let more = v.create(ROOT, b"more", &new_node(FileKind::File), &Cred::root());
                let _ = v.sync();
                let said = v.unmount();
                fsck(&copies).unwrap_or_else(|e| panic!("{what}, {:?}, {said:?}: {e}", more.map(|a| a.ino)));
                let v = mount(&copies);
                let is_new = v.super_block().device[devices - 1].blocks.get() == 40 * MIB / BLOCK;
                assert!(is_new || result.is_err(), "{what}");
                (olds, news, fired) = (olds + u64::from(!is_new), news + u64::from(is_new), fired + u64::from(hit));
                let f = v.open(v.lookup(ROOT, b"f").unwrap().ino).unwrap();
                holds(&v, &f, 4 * MIB);
                if !is_new {
                    v.shrink(40 * MIB, &|_, _| {}).unwrap_or_else(|e| panic!("{what}, again: {e}"));
                    holds(&v, &f, 4 * MIB);
                }
                drop(f);
                v.unmount().unwrap();
                fsck(&copies).unwrap_or_else(|e| panic!("{what}, again: {e}"));
                if !hit && op == Op::Flush {
                    break;
                }
            }
        }
        println!("{devices} devices: {fired} errors, {olds} of the old size, {news} of the new one");
        assert!(olds > 3 && news > 1, "{olds} {news}");
    }
}

/// A limit is reached as exactly as before when groups of the domain have gone.
#[test]
fn a_limit_is_reached_as_before() {
    let all = [memory(128)];
    format(&all, &[128], 2);
    let v = mount(&all);
    let budget = TenantBudget { space: Some(18 * MIB), ..Default::default() };
    let dir = v.tenant_create(ROOT, b"t", 0o755, "t", budget, &Cred::root()).unwrap().root;
    let domain = v.domain_of(dir).unwrap();
    let (big, t) = (file(&v, ROOT, "big"), file(&v, dir, "t"));
    fill(&v, &t, 2);
    fill(&v, &big, ALL);
    v.unlink(ROOT, b"big").unwrap();
    drop(big);
    v.sync().unwrap();
    // to the limit, and back to half of it
    let reached = || {
        fill(&v, &t, 30);
        v.sync().unwrap();
        let all = fill(&v, &t, 30);
        v.sync().unwrap();
        let half = SetAttr { size: Some(8 * MIB), ..SetAttr::default() };
        v.setattr(t.ino(), &half).unwrap();
        v.sync().unwrap();
        all
    };
    let before = reached();
    for size in [100, 80, 60] {
        v.shrink(size * MIB, &|_, _| {}).unwrap();
        holds(&v, &t, 8 * MIB);
        let after = reached();
        assert!(after.abs_diff(before) < 64 << 10, "{before} bytes before, {after} with {size} MiB");
    }
    assert!(v.is_limited(domain));
    drop(t);
    close(v, &all);
}

/// The least size that is named can be had, filled and emptied, many times.
#[test]
fn all_room_comes_back_at_the_least_size() {
    let all = [memory(128)];
    format(&all, &[128], 2);
    let v = mount(&all);
    let f = file(&v, ROOT, "f");
    fill(&v, &f, 12);
    v.sync().unwrap();
    let mut size = 24 * MIB;
    let least = loop {
        match v.shrink(size, &|_, _| {}) {
            Ok(r) => {
                assert_eq!(r.after, size);
                size -= MIB / 2;
            }
            Err(Error::Size(_)) => break size + MIB / 2,
            Err(e) => panic!("{e}"),
        }
    };
    holds(&v, &f, 12 * MIB);
    println!("least size {least}");
    let mut first = None;
    for round in 0..10 {
        let big = file(&v, ROOT, "big");
        let had = fill(&v, &big, ALL);
        holds(&v, &big, had);
        v.sync().unwrap();
        drop(big);
        v.unlink(ROOT, b"big").unwrap();
        v.sync().unwrap();
        let before = *first.get_or_insert(had);
        assert!(had + 128 * 1024 >= before, "{before} bytes at first, {had} in round {round}");
    }
    holds(&v, &f, 12 * MIB);
    for round in 0..25 {
        let to = least + (round * 7 % 23 + 4) * 4 * MIB;
        v.grow(NewSize::Bytes(to)).unwrap();
        let g = file(&v, ROOT, "g");
        let had = fill(&v, &g, 3 + round % 5);
        holds(&v, &g, had);
        drop(g);
        v.unlink(ROOT, b"g").unwrap();
        v.shrink(least, &|_, _| {}).unwrap_or_else(|e| panic!("round {round} from {to}: {e}"));
        holds(&v, &f, 12 * MIB);
    }
    drop(f);
    close(v, &all);
    let v = mount(&all);
    let f = v.open(v.lookup(ROOT, b"f").unwrap().ino).unwrap();
    holds(&v, &f, 12 * MIB);
    drop(f);
    close(v, &all);
}
