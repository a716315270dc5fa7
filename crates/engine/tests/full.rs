//! A full volume: what operations may do there their commit can write, so that no domain fails for want of a block, and
//! everything can be removed.

use braidfs::{
    Cred, DirEntry, Error, FallocMode, FileKind, InodeNo, MkfsOptions, MountOptions, NewNode, OpenFile, RenameMode,
    SetAttr, Volume, XattrMode, mkfs,
};
use braidfs_device::{CountDevice, Device, MemDevice};
use std::sync::Arc;
use std::time::Duration;

const ROOT: InodeNo = InodeNo::ROOT;
/// Of the whole volume; the domain keeps a 64th of it back, about 250.
const BLOCKS: u64 = 16 << 10;

fn options() -> MountOptions {
    MountOptions { background: false, commit_interval: Duration::from_secs(3600), ..MountOptions::default() }
}

fn volume() -> (Arc<dyn Device>, Volume) {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(BLOCKS));
    mkfs::format(std::slice::from_ref(&device), &MkfsOptions { domains: Some(1), ..MkfsOptions::default() }).unwrap();
    let v = Volume::mount(vec![device.clone()], options()).unwrap();
    (device, v)
}

fn make(v: &Volume, dir: InodeNo, name: &str, kind: FileKind, target: &[u8]) -> Result<InodeNo, Error> {
    let new = NewNode { kind, mode: 0o755, umask: 0, rdev: 0, target };
    v.create(dir, name.as_bytes(), &new, &Cred::root()).map(|a| a.ino)
}

fn file(v: &Volume, dir: InodeNo, name: &str) -> OpenFile {
    v.open(make(v, dir, name, FileKind::File, b"").unwrap()).unwrap()
}

/// It is done, or there is no room: never anything else.
fn done<T>(r: Result<T, Error>) -> bool {
    match r {
        Ok(_) => true,
        Err(Error::NoSpace) => false,
        Err(e) => panic!("{e}"),
    }
}

/// Writes to the end of a file until there is no room.
fn fill(v: &Volume, f: &OpenFile) {
    while done(v.append(f, &[7; 1 << 20])) {}
    while done(v.append(f, &[7; 4096])) {}
    v.sync().unwrap();
}

fn chmod(v: &Volume, ino: InodeNo) -> bool {
    done(v.setattr(ino, &SetAttr { mode: Some(0o640), ..SetAttr::default() }))
}

/// No domain has failed, and what was full can be emptied, commits and all; nothing is wrong on the device.
fn empties(device: Arc<dyn Device>, v: Volume) {
    v.sync().unwrap();
    assert!(v.domains().iter().all(|d| d.failed.is_none()));
    let mut names = Vec::new();
    let mut note = |e: DirEntry<'_>| {
        names.push(e.name.to_vec());
        true
    };
    v.readdir(ROOT, 0, &mut note).unwrap();
    for name in names.iter().filter(|n| *n != b"." && *n != b"..") {
        v.unlink(ROOT, name).unwrap_or_else(|e| panic!("{:?}: {e}", String::from_utf8_lossy(name)));
    }
    v.sync().unwrap();
    let s = v.statfs();
    assert!(s.free + 64 > s.blocks, "{} of {} blocks are free again", s.free, s.blocks);
    v.unmount().unwrap();
    let how = braidfs_check::FsckOptions { repair: false, force: true };
    let found = braidfs_check::check(&[device], &how, &braidfs::JournalReplay, &|_, _, _| {}).unwrap().findings;
    assert_eq!(found, vec![]);
}

/// Files of which two do not fit a node block: each change of one is a block that the commit needs.
#[test]
fn small_files_change_while_nothing_is_free() {
    let (device, v) = volume();
    let all: Vec<InodeNo> = (0..600)
        .map(|n| {
            let f = file(&v, ROOT, &format!("{n}"));
            assert_eq!(v.write(&f, 0, &[1; 2100]).unwrap(), 2100);
            f.ino()
        })
        .collect();
    fill(&v, &file(&v, ROOT, "large"));
    for round in 0..3 {
        let changed = all.iter().filter(|ino| chmod(&v, **ino)).count();
        assert!(changed > 100, "round {round}: {changed} were changed");
        v.sync().unwrap();
    }
    empties(device, v);
}

/// The same as they are made.
#[test]
fn small_files_are_made_until_nothing_is_free() {
    let (device, v) = volume();
    let spare = file(&v, ROOT, "spare");
    v.write(&spare, 0, &vec![1; 3000 * 4096]).unwrap();
    fill(&v, &file(&v, ROOT, "large"));
    drop(spare);
    v.unlink(ROOT, b"spare").unwrap();
    v.sync().unwrap();
    let mut made = 0;
    loop {
        match make(&v, ROOT, &format!("{made}"), FileKind::File, b"") {
            Ok(ino) if done(v.write(&v.open(ino).unwrap(), 0, &[1; 2100])) => made += 1,
            Ok(_) | Err(Error::NoSpace) => break,
            Err(e) => panic!("after {made}: {e}"),
        }
    }
    assert!(made > 2000, "{made} files");
    empties(device, v);
}

/// A write that is refused again, since nothing has changed, does not look again through all node blocks for what could be packed.
#[test]
fn who_is_refused_again_reads_nothing() {
    let counted = Arc::new(CountDevice::new(Arc::new(MemDevice::new(BLOCKS))));
    let device: Arc<dyn Device> = counted.clone();
    mkfs::format(std::slice::from_ref(&device), &MkfsOptions { domains: Some(1), ..MkfsOptions::default() }).unwrap();
    let v = Volume::mount(vec![device.clone()], options()).unwrap();
    // one record to a block
    for n in 0..600 {
        v.write(&file(&v, ROOT, &format!("{n}")), 0, &[1; 2100]).unwrap();
    }
    let large = file(&v, ROOT, "large");
    fill(&v, &large);
    let refused = || assert!(!done(v.append(&large, &[7; 4096])));
    refused();
    let before = counted.counters();
    (0..100).for_each(|_| refused());
    let did = counted.counters() - before;
    assert!(did.reads < 10, "{did:?}");
    drop(large);
    empties(device, v);
}

/// Targets that fit no record beside its name: each takes a block of its own.
#[test]
fn long_links_are_made_until_nothing_is_free() {
    let (device, v) = volume();
    let spare = file(&v, ROOT, "spare");
    v.write(&spare, 0, &vec![1; 1500 * 4096]).unwrap();
    fill(&v, &file(&v, ROOT, "large"));
    drop(spare);
    v.unlink(ROOT, b"spare").unwrap();
    v.sync().unwrap();
    let mut made = Vec::new();
    let target = |n: usize| format!("{n:05}").repeat(800).into_bytes();
    loop {
        match make(&v, ROOT, &format!("{}", made.len()), FileKind::Symlink, &target(made.len())) {
            Ok(ino) => made.push(ino),
            Err(Error::NoSpace) => break,
            Err(e) => panic!("after {}: {e}", made.len()),
        }
    }
    assert!(made.len() > 900, "{} links", made.len());
    v.sync().unwrap();
    for (n, ino) in made.iter().enumerate() {
        assert_eq!(v.readlink(*ino).unwrap(), target(n));
    }
    empties(device, v);
}

/// Attributes that take many nodes, all of which a commit writes again with the inode.
#[test]
fn files_with_long_attributes_change_while_nothing_is_free() {
    let (device, v) = volume();
    let all: Vec<InodeNo> = (0..24)
        .map(|n| {
            let ino = make(&v, ROOT, &format!("{n}"), FileKind::File, b"").unwrap();
            v.setxattr(ino, b"user.long", &vec![n as u8; 60_000], XattrMode::Set).unwrap();
            v.sync().unwrap();
            ino
        })
        .collect();
    fill(&v, &file(&v, ROOT, "large"));
    for round in 0..3 {
        let changed = all.iter().filter(|ino| chmod(&v, **ino)).count();
        assert!(changed > 5, "round {round}: {changed} were changed");
        v.sync().unwrap();
    }
    empties(device, v);
}

/// The same with other operations that change such inodes, one after the other in one transaction: `change` does one to an
/// inode of these, or none where there is no room.
fn long_attributes_change(change: impl Fn(&Volume, InodeNo, usize) -> bool) {
    let (device, v) = volume();
    let all: Vec<InodeNo> = (0..80)
        .map(|n| {
            let ino = make(&v, ROOT, &format!("{n}"), FileKind::File, b"").unwrap();
            v.setxattr(ino, b"user.long", &vec![n as u8; 60_000], XattrMode::Set).unwrap();
            v.setxattr(ino, b"user.short", b"x", XattrMode::Set).unwrap();
            v.sync().unwrap();
            ino
        })
        .collect();
    fill(&v, &file(&v, ROOT, "large"));
    let changed = all.iter().enumerate().filter(|(n, ino)| change(&v, **ino, *n)).count();
    assert!(changed > 5, "{changed} were changed");
    empties(device, v);
}

#[test]
fn of_files_with_long_attributes_one_is_removed_while_nothing_is_free() {
    long_attributes_change(|v, ino, _| done(v.removexattr(ino, b"user.short")));
}

#[test]
fn files_with_long_attributes_exchange_names_while_nothing_is_free() {
    long_attributes_change(|v, _, n| {
        let (a, b) = (format!("{n}"), format!("{}", (n + 1) % 80));
        done(v.rename(ROOT, a.as_bytes(), ROOT, b.as_bytes(), RenameMode::Exchange))
    });
}

#[test]
fn files_with_long_attributes_count_for_a_directory_while_nothing_is_free() {
    let (device, v) = volume();
    let dir = make(&v, ROOT, "dir", FileKind::Dir, b"").unwrap();
    for n in 0..80 {
        let ino = make(&v, dir, &format!("{n}"), FileKind::File, b"").unwrap();
        v.setxattr(ino, b"user.long", &vec![n as u8; 60_000], XattrMode::Set).unwrap();
        v.sync().unwrap();
    }
    fill(&v, &file(&v, ROOT, "large"));
    done(v.quota_directory(dir, |l| l.inodes = Some(1000)));
    v.sync().unwrap();
    for n in 0..80 {
        v.unlink(dir, format!("{n}").as_bytes()).unwrap();
    }
    v.unlink(ROOT, b"large").unwrap();
    v.rmdir(ROOT, b"dir").unwrap();
    empties(device, v);
}

/// Files of long attributes and many extents go with their names where the journal has room for what they free, and nothing but
/// that: left for later they would be written whole once more, for which nobody has asked for blocks.
#[test]
fn files_with_long_attributes_and_many_extents_go_while_nothing_is_free() {
    let pieces = |v: &Volume, name: &str, n: u64| {
        let f = file(v, ROOT, name);
        (0..n).for_each(|i| assert_eq!(v.write(&f, i * 8192, &[1; 4096]).unwrap(), 4096));
        f.ino()
    };
    for others in 12..16 {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(BLOCKS / 4));
        let o = MkfsOptions { domains: Some(2), journal_bytes: Some(128 << 10), ..MkfsOptions::default() };
        mkfs::format(std::slice::from_ref(&device), &o).unwrap();
        let v = Volume::mount(vec![device.clone()], options()).unwrap();
        for n in 0..2 {
            let ino = pieces(&v, &format!("long{n}"), 300);
            v.setxattr(ino, b"user.long", &[7; 60_000], XattrMode::Set).unwrap();
        }
        (0..others).for_each(|n| _ = pieces(&v, &format!("{n}"), 60));
        (0..500).for_each(|n| _ = make(&v, ROOT, &format!("empty{n}"), FileKind::File, b"").unwrap());
        fill(&v, &file(&v, ROOT, "large"));
        v.commit_domain(braidfs::DomainId(0), true).unwrap();
        // the running transaction takes more and more of the journal
        let unlink = |name: String| v.unlink(ROOT, name.as_bytes()).unwrap();
        (0..others).for_each(|n| unlink(format!("{n}")));
        (0..500).for_each(|n| unlink(format!("empty{n}")));
        (0..2).for_each(|n| unlink(format!("long{n}")));
        empties(device, v);
    }
}

/// Files without a name that are open are listed in each commit: the journal has room for so many, and more are refused.
#[test]
fn open_files_without_a_name_do_not_fill_the_journal() {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(BLOCKS));
    let o = MkfsOptions { domains: Some(1), journal_bytes: Some(128 << 10), ..MkfsOptions::default() };
    mkfs::format(std::slice::from_ref(&device), &o).unwrap();
    let v = Volume::mount(vec![device.clone()], options()).unwrap();
    let all: Vec<(String, OpenFile)> = (0..9000)
        .map(|n| {
            let name = format!("{n}");
            let f = file(&v, ROOT, &name);
            (name, f)
        })
        .collect();
    let gone = all.iter().filter(|(name, _)| done(v.unlink(ROOT, name.as_bytes()))).count();
    let dir = make(&v, ROOT, "dir", FileKind::Dir, b"").unwrap();
    let without = NewNode { kind: FileKind::File, mode: 0o600, umask: 0, rdev: 0, target: b"" };
    let temporary = v.tmpfile(dir, &without, &Cred::root());
    for _ in 0..2 {
        v.setattr(ROOT, &SetAttr { mode: Some(0o700), ..SetAttr::default() }).unwrap();
        v.sync().unwrap();
    }
    assert!(v.domains()[0].failed.is_none());
    assert!(gone > 500 && matches!(temporary, Err(Error::NoSpace)), "{gone} are gone");
    // what is over another one goes the same way, and closed ones go in any case
    let (last, other) = (&all[8999].0, &all[8998].0);
    let over = v.rename(ROOT, last.as_bytes(), ROOT, other.as_bytes(), Default::default());
    assert!(matches!(over, Err(Error::NoSpace)), "{over:?}");
    v.commit_domain(braidfs::DomainId(0), true).unwrap();
    let names: Vec<String> = all.into_iter().map(|(name, _)| name).collect();
    assert_eq!(names[..gone].iter().filter(|n| v.lookup(ROOT, n.as_bytes()).is_ok()).count(), 0);
    v.tmpfile(dir, &without, &Cred::root()).unwrap();
    names[gone..].iter().for_each(|n| v.unlink(ROOT, n.as_bytes()).unwrap());
    v.rmdir(ROOT, b"dir").unwrap();
    empties(device, v);
}

/// Small files become longer by `truncate`, many of them in one transaction: their records need room as they do where the same is
/// written.
#[test]
fn small_files_are_extended_while_nothing_is_free() {
    let (device, v) = volume();
    let all: Vec<InodeNo> = (0..2000).map(|n| make(&v, ROOT, &format!("{n}"), FileKind::File, b"").unwrap()).collect();
    fill(&v, &file(&v, ROOT, "large"));
    let longer = |ino: &&InodeNo| done(v.setattr(**ino, &SetAttr { size: Some(3400), ..SetAttr::default() }));
    let extended = all.iter().filter(longer).count();
    v.sync().unwrap();
    assert!(extended < 2000, "there is room for all: this test sees nothing");
    empties(device, v);
}

/// What was allocated behind the end of a file goes where the file is cut to the size that it has.
#[test]
fn blocks_behind_the_end_go_by_a_truncate_to_the_same_size() {
    let (device, v) = volume();
    for size in [0, 100, 3 * 4096] {
        let f = file(&v, ROOT, &format!("{size}"));
        v.write(&f, 0, &vec![1; size as usize]).unwrap();
        v.fallocate(&f, FallocMode::Allocate { keep_size: true }, 0, 1 << 20).unwrap();
        v.sync().unwrap();
        let held = v.getattr(f.ino()).unwrap().sectors;
        v.setattr(f.ino(), &SetAttr { size: Some(size), ..SetAttr::default() }).unwrap();
        v.sync().unwrap();
        let left = v.getattr(f.ino()).unwrap();
        assert!(held == 2048 && left.sectors <= 3 * 8, "{size}: {held} sectors, then {left:?}");
        assert_eq!(left.size, size);
    }
    empties(device, v);
}

/// A truncate to the size that a file has writes nothing: nothing was reserved for it.
#[test]
fn truncating_to_the_same_size_needs_no_room() {
    let (device, v) = volume();
    let all: Vec<OpenFile> = (0..600).map(|n| file(&v, ROOT, &format!("{n}"))).collect();
    all.iter().for_each(|f| assert_eq!(v.write(f, 0, &[7; 5000]).unwrap(), 5000));
    v.sync().unwrap();
    fill(&v, &file(&v, ROOT, "large"));
    for f in &all {
        v.setattr(f.ino(), &SetAttr { size: Some(5000), ..SetAttr::default() }).unwrap();
    }
    drop(all);
    empties(device, v);
}

/// What is written and not placed yet has its blocks: to allocate them takes none.
#[test]
fn what_is_written_is_allocated_without_more_room() {
    let (device, v) = volume();
    let f = file(&v, ROOT, "f");
    let blocks = v.statfs().available * 2 / 3;
    let mut written = 0;
    while written < blocks * 4096 {
        written += v.write(&f, written, &[7; 1 << 20]).unwrap() as u64;
    }
    v.fallocate(&f, FallocMode::Allocate { keep_size: false }, 0, written).unwrap();
    let free = v.statfs().free;
    assert!(matches!(v.fallocate(&f, FallocMode::Allocate { keep_size: true }, 0, 2 * written), Err(Error::NoSpace)));
    v.sync().unwrap();
    assert_eq!(v.statfs().free, free, "nothing of what was refused");
    let mut last = [0; 4096];
    v.read(&f, written - 4096, &mut last).unwrap();
    assert_eq!(last, [7; 4096]);
    drop(f);
    empties(device, v);
}
