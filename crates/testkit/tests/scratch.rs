//! Tenants without a journal, and the other modes of a tenant's journal.

use braidfs::{
    Cred, DomainInfo, Error, FallocMode, FileKind, InodeNo, JournalMode, MkfsOptions, MountOptions, Remount,
    RenameMode, TenantBudget, Volume, XattrMode, mkfs,
};
use braidfs_device::{CountDevice, Device, MemDevice};
use braidfs_testkit::scratch::{budget, create as tenant, every_crash_of_a_discard, every_crash_of_a_scratch, tree};
use braidfs_testkit::small::{ALL, BLOCK, MIB, ROOT, close, create, file, fill, memory};
use braidfs_testkit::walk::{fsck, walk};
use std::sync::Arc;

fn format(device: &Arc<dyn Device>, group: u64) {
    let how = MkfsOptions { domains: Some(2), group_bytes: Some(group), ..MkfsOptions::default() };
    mkfs::format(std::slice::from_ref(device), &how).unwrap();
}

fn mount_with(device: &Arc<dyn Device>, cache_bytes: u64) -> Volume {
    let options = MountOptions { cache_bytes, background: false, ..MountOptions::default() };
    Volume::mount(vec![Arc::clone(device)], options).unwrap()
}

fn mount(device: &Arc<dyn Device>) -> Volume {
    mount_with(device, 64 * MIB)
}

fn info(v: &Volume) -> DomainInfo {
    let t = v.tenant("t").unwrap();
    v.domains().into_iter().find(|d| d.domain == t.domain.0).unwrap()
}

fn unlimited() -> TenantBudget {
    TenantBudget { space: None, ..budget(MIB) }
}

#[test]
fn a_crash_leaves_it_empty_or_as_its_unmount_did() {
    let (states, whole) = every_crash_of_a_scratch().unwrap();
    assert!(whole > 10 && states > whole + 10, "{states} states, {whole} with something in it");
    println!("{states} states, {whole} with something in it");
}

#[test]
fn a_crash_of_the_mount_that_empties_it_leaves_it_empty() {
    let states = every_crash_of_a_discard().unwrap();
    assert!(states > 10, "{states} states");
    println!("{states} states");
}

/// A thousand files that are made, written and synced in each way there is: not one call of the device.
#[test]
fn nothing_is_asked_of_the_device() {
    let counted = Arc::new(CountDevice::new(memory(256)));
    let device: Arc<dyn Device> = counted.clone();
    format(&device, 64 * MIB);
    let v = mount(&device);
    let t = tenant(&v).unwrap().root;
    v.sync().unwrap();
    let (before, journal) = (counted.counters(), info(&v).journal_used);
    for n in 0..1000 {
        let f = file(&v, t, &format!("f{n}"));
        v.write(&f, 0, &[n as u8; 5000]).unwrap();
        match n % 5 {
            0 => v.fsync(f.ino(), false).unwrap(),
            1 => v.fsync_files(&[(f.ino(), true)]).into_iter().for_each(|r| r.unwrap()),
            2 => v.fsync_start(f.ino(), false).wait().unwrap(),
            3 => v.fsync_here(f.ino(), false, 4).map_or((), |r| r.unwrap()),
            _ => v.fsync(t, false).unwrap(),
        }
    }
    v.sync().unwrap();
    let asked = counted.counters() - before;
    assert_eq!((asked.flushes, asked.writes), (0, 0), "{asked:?}");
    assert_eq!((info(&v).journal_used, v.cache_use().dirty), (journal, 2 * 1000 * BLOCK));
    // the neighbour is written as ever, and does not wait for it
    let n = file(&v, ROOT, "n");
    v.write(&n, 0, &[1; 100_000]).unwrap();
    v.sync().unwrap();
    assert!((counted.counters() - before).flushes > 0 && v.cache_use().dirty == 2 * 1000 * BLOCK);
    let whole = tree(&v, t).unwrap();
    drop(n);
    close(v, std::slice::from_ref(&device));
    let v = mount(&device);
    assert_eq!(tree(&v, t).unwrap(), whole);
    close(v, &[device]);
}

/// With little memory data and tables are written, and nothing is flushed but for a checkpoint of tables.
#[test]
fn memory_is_given_back_without_a_journal() {
    let counted = Arc::new(CountDevice::new(memory(640)));
    let device: Arc<dyn Device> = counted.clone();
    format(&device, 64 * MIB);
    let v = mount_with(&device, 4 * MIB);
    let t = v.tenant_create(ROOT, b"d", 0o755, "t", unlimited(), &Cred::root()).unwrap().root;
    let (before, first) = (counted.counters(), info(&v));
    for n in 0..50 {
        let f = file(&v, t, &format!("f{n}"));
        assert_eq!(fill(&v, &f, 1), MIB);
        for i in 0..60 {
            create(&v, t, &format!("e{n}-{i}"), FileKind::File);
        }
    }
    let (asked, now) = (counted.counters() - before, info(&v));
    let checkpoints = now.checkpoints - first.checkpoints;
    assert!(asked.write_blocks > 10_000, "{asked:?}");
    assert_eq!(asked.flushes, 2 * checkpoints, "{asked:?}, {checkpoints} checkpoints");
    assert!(checkpoints > 0 && checkpoints < now.commits - first.commits, "{checkpoints} checkpoints");
    assert_eq!(now.journal_used, 0);
    let whole = tree(&v, t).unwrap();
    close(v, std::slice::from_ref(&device));
    let v = mount(&device);
    assert_eq!(tree(&v, t).unwrap(), whole);
    // what it writes after a checkpoint of that kind is no more than before
    assert_eq!(fill(&v, &file(&v, t, "last"), 20), 20 * MIB);
    v.commit_domain(v.tenant("t").unwrap().domain, true).unwrap();
    v.unlink(t, b"f0").unwrap();
    v.crash();
    let v = mount(&device);
    assert!(tree(&v, t).unwrap().is_empty());
    close(v, &[device]);
}

/// All of the limit is had, given back and had again, and groups go back to neighbours, with and without a crash.
#[test]
fn its_room_comes_back() {
    let device = memory(96);
    format(&device, 4 * MIB);
    let v = mount(&device);
    let t = v.tenant_create(ROOT, b"d", 0o755, "t", unlimited(), &Cred::root()).unwrap().root;
    let mut had = Vec::new();
    for _ in 0..3 {
        let f = file(&v, t, "f");
        had.push(fill(&v, &f, ALL));
        v.unlink(t, b"f").unwrap();
    }
    assert!(had[0] > 60 * MIB && had.iter().all(|n| n + 2 * MIB > had[0]), "{had:?}");
    let n = file(&v, ROOT, "n");
    let all = fill(&v, &n, ALL);
    assert!(all + 8 * MIB > had[0], "{all} of {had:?} bytes");
    v.fsync(n.ino(), false).unwrap();
    v.unlink(ROOT, b"n").unwrap();
    drop(n);
    v.sync().unwrap();
    fill(&v, &file(&v, t, "f"), ALL);
    v.crash();
    fsck(std::slice::from_ref(&device)).unwrap();
    let v = mount(&device);
    assert!(tree(&v, t).unwrap().is_empty() && v.tenant("t").unwrap().used < MIB);
    let n = file(&v, ROOT, "n");
    assert!(fill(&v, &n, ALL) + 8 * MIB > had[0]);
    v.fsync(n.ino(), false).unwrap();
    v.crash();
    let v = mount(&device);
    walk(&v).unwrap();
    close(v, &[device]);
}

#[test]
fn no_name_crosses_its_border() {
    let device = memory(64);
    format(&device, 4 * MIB);
    let v = mount(&device);
    let t = tenant(&v).unwrap().root;
    let (inside, outside) = (file(&v, t, "i").ino(), file(&v, ROOT, "o").ino());
    let (din, dout) = (create(&v, t, "di", FileKind::Dir), create(&v, ROOT, "do", FileKind::Dir));
    let crosses =
        |r: Result<(), Error>| assert!(matches!(&r, Err(e @ Error::CrossScratch) if e.errno() == 18), "{r:?}");
    for mode in [RenameMode::Replace, RenameMode::NoReplace] {
        crosses(v.rename(t, b"i", ROOT, b"x", mode));
        crosses(v.rename(ROOT, b"o", t, b"x", mode));
        crosses(v.rename(t, b"di", dout, b"x", mode));
        crosses(v.rename(ROOT, b"do", din, b"x", mode));
    }
    crosses(v.rename(t, b"i", ROOT, b"o", RenameMode::Exchange));
    crosses(v.rename(ROOT, b"o", t, b"i", RenameMode::Exchange));
    crosses(v.rename(ROOT, b"o", t, b"i", RenameMode::Replace));
    crosses(v.link(inside, ROOT, b"x").map(drop));
    crosses(v.link(outside, t, b"x").map(drop));
    let new = braidfs_testkit::small::new_node(FileKind::File);
    let (tmp, open) = v.tmpfile(t, &new, &Cred::root()).unwrap();
    crosses(v.link(tmp.ino, ROOT, b"x").map(drop));
    v.link(tmp.ino, t, b"tmp").unwrap();
    drop(open);
    crosses(v.tenant_create(t, b"u", 0o755, "u", TenantBudget::default(), &Cred::root()).map(drop));
    // its own directory keeps its name
    for mode in [RenameMode::Replace, RenameMode::Exchange] {
        assert!(matches!(v.rename(ROOT, b"d", ROOT, b"do", mode), Err(Error::Busy(_))));
        assert!(matches!(v.rename(ROOT, b"do", ROOT, b"d", mode), Err(Error::Busy(_))));
    }
    // within it all goes, also what replaces
    v.rename(t, b"i", din, b"j", RenameMode::Replace).unwrap();
    v.rename(din, b"j", t, b"tmp", RenameMode::Exchange).unwrap();
    v.rename(t, b"tmp", din, b"j", RenameMode::Replace).unwrap();
    // another one without a journal is another file system, too
    let u = v.tenant_create(ROOT, b"u", 0o755, "u", budget(8 * MIB), &Cred::root()).unwrap().root;
    crosses(v.rename(din, b"j", u, b"j", RenameMode::Replace));
    close(v, &[device]);
}

/// What is there when it gets a journal, or is no tenant any more, survives a crash right after that; then names cross.
#[test]
fn it_gets_a_journal() {
    let device = memory(64);
    format(&device, 4 * MIB);
    for removed in [false, true] {
        let v = mount(&device);
        let t = tenant(&v).unwrap().root;
        for n in 0..50 {
            v.write(&file(&v, t, &format!("f{n}")), 0, &[n; 9000]).unwrap();
        }
        let open = file(&v, t, "gone");
        v.unlink(t, b"gone").unwrap();
        let whole = tree(&v, t).unwrap();
        if removed {
            v.tenant_remove("t").unwrap();
        } else {
            v.tenant_change("t", |b| b.journal = Some(JournalMode::Ordered)).unwrap();
            let back = v.tenant_change("t", |b| b.journal = Some(JournalMode::Scratch));
            assert!(matches!(back, Err(Error::Invalid(_))));
        }
        drop(open);
        v.crash();
        fsck(std::slice::from_ref(&device)).unwrap();
        let v = mount(&device);
        assert_eq!(tree(&v, t).unwrap(), whole);
        let f = file(&v, t, "synced");
        v.write(&f, 0, &[1; 9000]).unwrap();
        v.fsync(f.ino(), false).unwrap();
        v.rename(t, b"f0", ROOT, b"f0", RenameMode::Replace).unwrap();
        drop(f);
        v.crash();
        let v = mount(&device);
        assert!(tree(&v, t).unwrap().contains_key("/synced"));
        for name in tree(&v, t).unwrap().keys() {
            v.unlink(t, &name.as_bytes()[1..]).unwrap();
        }
        let _ = v.unlink(ROOT, b"f0");
        if !removed {
            assert_eq!(v.tenant("t").unwrap().budget.journal, Some(JournalMode::Ordered));
            v.tenant_remove("t").unwrap();
        }
        v.rmdir(ROOT, b"d").unwrap();
        v.sync().unwrap();
        close(v, std::slice::from_ref(&device));
    }
}

/// Read-only it is at rest: a crash then is none. Writable again, it is in use.
#[test]
fn read_only_is_a_rest() {
    let device = memory(64);
    format(&device, 4 * MIB);
    let v = mount(&device);
    let t = tenant(&v).unwrap().root;
    v.write(&file(&v, t, "f"), 0, &[1; 9000]).unwrap();
    let to = |v: &Volume, read_only| v.remount(&Remount { read_only: Some(read_only), ..Remount::default() }).unwrap();
    to(&v, true);
    let whole = tree(&v, t).unwrap();
    v.crash();
    let v = mount(&device);
    assert_eq!(tree(&v, t).unwrap(), whole);
    to(&v, true);
    to(&v, false);
    v.write(&file(&v, t, "g"), 0, &[1; 9000]).unwrap();
    v.crash();
    // a look at it changes nothing
    let options = || MountOptions { read_only: true, ..MountOptions::default() };
    for _ in 0..2 {
        let v = Volume::mount(vec![device.clone()], options()).unwrap();
        assert!(tree(&v, t).unwrap().is_empty() && v.tenant("t").unwrap().budget == budget(16 * MIB));
        v.unmount().unwrap();
    }
    // and from read-only on it goes on
    let v = Volume::mount(vec![device.clone()], options()).unwrap();
    to(&v, false);
    v.write(&file(&v, t, "h"), 0, &[1; 9000]).unwrap();
    let whole = tree(&v, t).unwrap();
    close(v, std::slice::from_ref(&device));
    let v = mount(&device);
    assert_eq!(tree(&v, t).unwrap(), whole);
    close(v, &[device]);
}

/// What the mount that empties it keeps of its directory; numbers come back as others.
#[test]
fn its_directory_comes_back() {
    let device = memory(64);
    format(&device, 4 * MIB);
    let v = mount(&device);
    let name = [b'n'; 255];
    let t = v.tenant_create(ROOT, &name, 0o711, "t", budget(16 * MIB), &Cred::root()).unwrap().root;
    v.setxattr(t, b"user.large", &[7; 1900], XattrMode::Set).unwrap();
    assert!(matches!(v.setxattr(t, b"user.more", &[7; 200], XattrMode::Set), Err(Error::NoSpace)));
    v.setxattr(t, b"user.gone", b"x", XattrMode::Set).unwrap();
    v.removexattr(t, b"user.gone").unwrap();
    let mut seen: Vec<(InodeNo, u32)> = Vec::new();
    let mut v = v;
    for n in 0..3 {
        for i in 0..20 {
            let ino = create(&v, t, &format!("f{i}"), FileKind::File);
            let is = (ino, v.generation(ino).unwrap());
            assert!(!seen.contains(&is), "{is:?} again in round {n}");
            seen.push(is);
        }
        v.crash();
        fsck(std::slice::from_ref(&device)).unwrap();
        v = mount(&device);
        assert!(tree(&v, t).unwrap().is_empty());
        assert_eq!(v.lookup(ROOT, &name).unwrap().ino, t);
        assert_eq!(v.getxattr(t, b"user.large").unwrap(), vec![7; 1900]);
        assert!(matches!(v.getxattr(t, b"user.gone"), Err(Error::NoAttr)));
        assert_eq!(v.tenant("t").unwrap().inodes, 1);
    }
    close(v, &[device]);
}

/// Groups of it are emptied by a shrink while it is in use: it goes on, and its neighbours lose nothing by a crash.
#[test]
fn its_blocks_move() {
    let device = memory(128);
    format(&device, 4 * MIB);
    for crash in [false, true] {
        let v = mount(&device);
        let t = v.tenant_create(ROOT, b"d", 0o755, "t", unlimited(), &Cred::root()).unwrap().root;
        let (a, n) = (file(&v, t, "a"), file(&v, ROOT, "n"));
        fill(&v, &a, 40);
        fill(&v, &n, 20);
        let b = file(&v, t, "b");
        fill(&v, &b, 20);
        v.fsync(n.ino(), false).unwrap();
        v.unlink(t, b"a").unwrap();
        drop((a, b));
        assert_eq!(v.shrink(84 * MIB, &|_, _| {}).unwrap().after, 84 * MIB);
        let (whole, neighbour) = (tree(&v, t).unwrap(), tree(&v, ROOT).unwrap().remove("/n"));
        drop(n);
        if crash {
            v.crash();
            fsck(std::slice::from_ref(&device)).unwrap();
        } else {
            close(v, std::slice::from_ref(&device));
        }
        let v = mount(&device);
        assert_eq!(tree(&v, t).unwrap(), if crash { Default::default() } else { whole });
        assert_eq!(tree(&v, ROOT).unwrap().remove("/n"), neighbour);
        v.grow(braidfs::NewSize::Device).unwrap();
        v.unlink(ROOT, b"n").unwrap();
        let _ = v.unlink(t, b"b");
        v.tenant_remove("t").unwrap();
        v.rmdir(ROOT, b"d").unwrap();
        close(v, std::slice::from_ref(&device));
    }
}

/// Files that were allocated are overwritten in place, but for those of a tenant that wants `data`, from the moment on that it does.
#[test]
fn the_mode_decides_where_overwrites_go() {
    let device = memory(64);
    format(&device, 4 * MIB);
    let v = mount(&device);
    let of = |journal| TenantBudget { journal, ..TenantBudget::default() };
    let t = v.tenant_create(ROOT, b"d", 0o755, "t", of(Some(JournalMode::Data)), &Cred::root()).unwrap().root;
    let f = file(&v, t, "f");
    v.fallocate(&f, FallocMode::Allocate { keep_size: false }, 0, MIB).unwrap();
    let overwrite = |n: u8| {
        v.write(&f, 0, &vec![n; MIB as usize]).unwrap();
        let before = v.extents(f.ino()).unwrap();
        v.fsync(f.ino(), false).unwrap();
        let moved = v.extents(f.ino()).unwrap() != before;
        v.sync().unwrap();
        moved
    };
    let set = |journal| v.tenant_change("t", |b| b.journal = journal).unwrap().budget.journal;
    // what has never been written is filled where it lies
    overwrite(1);
    assert!(overwrite(2));
    assert_eq!(set(Some(JournalMode::Ordered)), Some(JournalMode::Ordered));
    assert!(!overwrite(3));
    assert_eq!(set(None), None);
    assert!(!overwrite(4));
    // what is dirty when it changes has no blocks reserved
    v.write(&f, 0, &vec![9; MIB as usize]).unwrap();
    assert_eq!(set(Some(JournalMode::Data)), Some(JournalMode::Data));
    assert!(overwrite(5));
    drop(f);
    close(v, std::slice::from_ref(&device));
    let v = mount(&device);
    assert_eq!(v.tenant("t").unwrap().budget, of(Some(JournalMode::Data)));
    assert_eq!(v.super_block().incompat.get(), 0);
    close(v, &[device]);
}

/// The bit is there before the first such domain, and stays.
#[test]
fn older_programs_refuse_the_volume() {
    let image = Arc::new(MemDevice::soiled(64 * MIB / BLOCK));
    let device: Arc<dyn Device> = image.clone();
    format(&device, 4 * MIB);
    let v = mount(&device);
    tenant(&v).unwrap();
    assert_eq!(v.super_block().incompat.get(), 2);
    v.crash();
    let v = mount(&device);
    v.tenant_remove("t").unwrap();
    close(v, std::slice::from_ref(&device));
    let v = mount(&device);
    assert_eq!(v.super_block().incompat.get(), 2);
    close(v, &[device]);
}
