//! Inode flags and access times in the library, and the volume's label through every crash.

use braidfs::device::{CountDevice, Device, Image, Keep, MemDevice, RecordDevice};
use braidfs::format::inode::{APPEND, IMMUTABLE, NOATIME, NOCOW};
use braidfs::{
    AtimeMode, Cred, Error, FallocMode, FileKind, InodeNo, MkfsOptions, MountOptions, NewNode, OpenFile, OpenHow,
    RenameMode, SetAttr, SetTime, Timestamp, Volume, XattrMode, mkfs,
};
use braidfs_check::{FsckOptions, check};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};

/// Seconds that the tests' clock shows; each look takes a nanosecond.
static NOW: AtomicI64 = AtomicI64::new(1_000_000);
static LOOKS: AtomicI64 = AtomicI64::new(0);

fn clock() -> Timestamp {
    Timestamp { sec: NOW.load(Relaxed), nsec: (LOOKS.fetch_add(1, Relaxed) % 1_000_000_000) as u32 }
}

fn options(atime: AtimeMode) -> MountOptions {
    MountOptions {
        background: false,
        commit_interval: std::time::Duration::from_secs(3600),
        atime,
        clock: Some(clock),
        ..MountOptions::default()
    }
}

fn formatted(device: Arc<dyn Device>) -> Arc<dyn Device> {
    let o = MkfsOptions { domains: Some(2), group_bytes: Some(4 << 20), ..MkfsOptions::default() };
    mkfs::format(std::slice::from_ref(&device), &o).unwrap();
    device
}

fn mount(device: &Arc<dyn Device>, atime: AtimeMode) -> Volume {
    Volume::mount(vec![device.clone()], options(atime)).unwrap()
}

fn new(kind: FileKind) -> NewNode<'static> {
    NewNode { kind, mode: 0o755, umask: 0, rdev: 0, target: if kind == FileKind::Symlink { b"target" } else { b"" } }
}

fn make(v: &Volume, dir: InodeNo, name: &str, kind: FileKind) -> InodeNo {
    v.create(dir, name.as_bytes(), &new(kind), &Cred::root()).unwrap().ino
}

fn flag(v: &Volume, ino: InodeNo, flags: u32) {
    v.setattr(ino, &SetAttr { flags: Some(flags), ..SetAttr::default() }).unwrap();
}

fn refused<T: std::fmt::Debug>(what: &str, r: braidfs::Result<T>) {
    assert!(matches!(r, Err(Error::Perm)), "{what}: {r:?}");
}

/// What both flags refuse of any inode.
fn guarded(v: &Volume, ino: InodeNo) {
    let at = |sec| Some(SetTime::At(Timestamp { sec, nsec: 0 }));
    for (what, set) in [
        ("mode", SetAttr { mode: Some(0o700), ..SetAttr::default() }),
        ("owner", SetAttr { uid: Some(1), ..SetAttr::default() }),
        ("group", SetAttr { gid: Some(1), ..SetAttr::default() }),
        ("times", SetAttr { atime: at(1), mtime: at(2), ..SetAttr::default() }),
        ("mtime", SetAttr { mtime: at(2), ..SetAttr::default() }),
        ("mtime now", SetAttr { mtime: Some(SetTime::Now), ..SetAttr::default() }),
        ("atime now", SetAttr { atime: Some(SetTime::Now), ..SetAttr::default() }),
        ("ctime", SetAttr { ctime: at(2), ..SetAttr::default() }),
        ("mode, said to be accepted", SetAttr { mode: Some(0), accepted: true, ..SetAttr::default() }),
    ] {
        refused(what, v.setattr(ino, &set));
    }
    refused("setxattr", v.setxattr(ino, b"user.new", b"v", XattrMode::Set));
    refused("removexattr", v.removexattr(ino, b"user.old"));
    refused("removexattr of none", v.removexattr(ino, b"user.none"));
    let before = v.getattr(ino).unwrap();
    let kept = SetAttr { mtime: at(9), ctime: at(10), accepted: true, ..SetAttr::default() };
    let after = v.setattr(ino, &kept).unwrap();
    assert_eq!((after.mtime.sec, after.ctime.sec, after.mode), (9, 10, before.mode), "times that were accepted");
}

fn touch(v: &Volume, ino: InodeNo) -> braidfs::Result<braidfs::Attr> {
    v.setattr(ino, &SetAttr { atime: Some(SetTime::Now), mtime: Some(SetTime::Now), ..SetAttr::default() })
}

fn guarded_file(v: &Volume, f: &OpenFile) {
    let root = InodeNo::ROOT;
    guarded(v, f.ino());
    refused("truncate", v.setattr(f.ino(), &SetAttr { size: Some(0), ..SetAttr::default() }));
    refused("punch", v.fallocate(f, FallocMode::PunchHole, 0, 4096));
    refused("zero", v.fallocate(f, FallocMode::ZeroRange { keep_size: false }, 0, 4096));
    refused("link", v.link(f.ino(), root, b"second"));
    refused("unlink", v.unlink(root, b"file"));
    refused("rename", v.rename(root, b"file", root, b"elsewhere", RenameMode::Replace));
    refused("rename over", v.rename(root, b"other", root, b"file", RenameMode::Replace));
    refused("exchange", v.rename(root, b"other", root, b"file", RenameMode::Exchange));
    refused("rename with a whiteout", v.rename(root, b"file", root, b"elsewhere", RenameMode::Whiteout));
    refused("rename with a whiteout over", v.rename(root, b"other", root, b"file", RenameMode::Whiteout));
}

/// As ext4: an immutable file is opened for reading, an append-only one for appending, too.
#[test]
fn a_path_is_opened_as_the_flags_let_it() {
    let v = mount(&formatted(Arc::new(MemDevice::new(8192))), AtimeMode::Noatime);
    let ino = make(&v, InodeNo::ROOT, "file", FileKind::File);
    let read = OpenHow { read: true, ..OpenHow::default() };
    let write = OpenHow { write: true, ..read };
    let append = OpenHow { append: true, ..write };
    let cut = |how: OpenHow| OpenHow { truncate: true, ..how };
    let open = |how| v.open_path(b"/file", how, &Cred::root());
    flag(&v, ino, IMMUTABLE);
    for how in [write, append, cut(read), cut(write), cut(append)] {
        refused("an immutable file", open(how));
    }
    open(read).unwrap();
    flag(&v, ino, APPEND);
    for how in [write, cut(read), cut(write), cut(append)] {
        refused("an append-only file", open(how));
    }
    open(read).unwrap();
    v.append(&open(append).unwrap(), b"more").unwrap();
    flag(&v, ino, 0);
    open(cut(append)).unwrap();
    assert_eq!(v.getattr(ino).unwrap().size, 0);
}

/// As the cut of one that has content.
#[test]
fn a_file_without_content_is_cut_by_an_open() {
    let v = mount(&formatted(Arc::new(MemDevice::new(8192))), AtimeMode::Noatime);
    let ino = make(&v, InodeNo::ROOT, "file", FileKind::File);
    let f = v.open(ino).unwrap();
    v.fallocate(&f, FallocMode::Allocate { keep_size: true }, 0, 1 << 20).unwrap();
    let past = Some(SetTime::At(Timestamp { sec: 7, nsec: 0 }));
    let set = SetAttr { mode: Some(0o4777), mtime: past, ctime: past, ..SetAttr::default() };
    let before = v.setattr(ino, &set).unwrap();
    assert!(before.sectors >= 2048 && before.size == 0, "{before:?}");
    let cut = OpenHow { write: true, truncate: true, ..OpenHow::default() };
    v.open_path(b"/file", cut, &Cred::user(1, 1)).unwrap();
    let after = v.getattr(ino).unwrap();
    assert_eq!((after.sectors, after.mode & 0o7777), (0, 0o777));
    assert!(after.mtime.sec > 7 && after.ctime.sec > 7, "{after:?}");
}

#[test]
fn flags_guard_files() {
    let device = formatted(Arc::new(MemDevice::new(8192)));
    let v = mount(&device, AtimeMode::Noatime);
    let ino = make(&v, InodeNo::ROOT, "file", FileKind::File);
    make(&v, InodeNo::ROOT, "other", FileKind::File);
    let f = v.open(ino).unwrap();
    v.write(&f, 0, &[7; 10_000]).unwrap();
    v.setxattr(ino, b"user.old", b"v", XattrMode::Set).unwrap();
    v.setxattr(ino, b"security.capability", b"c", XattrMode::Set).unwrap();

    flag(&v, ino, APPEND);
    guarded_file(&v, &f);
    v.append(&f, b"x").unwrap();
    v.fallocate(&f, FallocMode::Allocate { keep_size: true }, 0, 65536).unwrap();
    touch(&v, ino).unwrap();
    refused("setcap", v.removexattr(ino, b"security.capability"));
    v.remove_capabilities(ino).unwrap();
    assert!(matches!(v.remove_capabilities(ino), Err(Error::NoAttr)));

    v.setattr(ino, &SetAttr { flags: Some(0), ..SetAttr::default() }).unwrap();
    v.setxattr(ino, b"security.capability", b"c", XattrMode::Set).unwrap();
    flag(&v, ino, IMMUTABLE);
    refused("capabilities", v.remove_capabilities(ino));
    guarded_file(&v, &f);
    refused("touch", touch(&v, ino));
    refused("append", v.append(&f, b"x"));
    refused("write", v.write(&f, 0, b"x"));
    refused("allocate", v.fallocate(&f, FallocMode::Allocate { keep_size: true }, 0, 65536));
    // over several pieces, and into pages that the running transaction has
    assert_eq!(v.write_accepted(&f, 5000, &vec![8; 3 << 20]).unwrap(), 3 << 20);
    assert_eq!(v.write_accepted(&f, 0, b"late").unwrap(), 4);
    v.fsync(ino, false).unwrap();
    drop(f);
    v.unmount().unwrap();
    let v = mount(&device, AtimeMode::Noatime);
    let f = v.open(ino).unwrap();
    let mut b = vec![0; 5001];
    v.read(&f, 0, &mut b).unwrap();
    assert_eq!((&b[..5], b[5000], v.getattr(ino).unwrap().size), (&b"late\x07"[..], 8, (3 << 20) + 5000));
    assert_eq!(v.getattr(ino).unwrap().flags & (IMMUTABLE | APPEND), IMMUTABLE);
    refused("write after a remount", v.write(&f, 0, b"x"));
    drop(f);
    v.unmount().unwrap();
}

#[test]
fn flags_guard_directories() {
    let device = formatted(Arc::new(MemDevice::new(8192)));
    let v = mount(&device, AtimeMode::Noatime);
    let root = InodeNo::ROOT;
    let dir = make(&v, root, "dir", FileKind::Dir);
    v.setxattr(dir, b"user.old", b"v", XattrMode::Set).unwrap();
    for name in ["in", "in2"] {
        make(&v, dir, name, FileKind::File);
    }
    let outside = |n| make(&v, root, n, FileKind::File);
    let donor = outside("donor");
    for (flags, append) in [(APPEND, true), (IMMUTABLE, false), (APPEND | IMMUTABLE, false)] {
        // one goes in where it may
        if v.lookup(root, b"donor2").is_err() {
            outside("donor2");
        }
        flag(&v, dir, flags);
        guarded(&v, dir);
        refused("unlink", v.unlink(dir, b"in"));
        refused("rename within", v.rename(dir, b"in", dir, b"in3", RenameMode::Replace));
        refused("rename out", v.rename(dir, b"in", root, b"in3", RenameMode::Replace));
        refused("rename over", v.rename(root, b"donor2", dir, b"in", RenameMode::Replace));
        refused("rename out with a whiteout", v.rename(dir, b"in", root, b"in3", RenameMode::NoReplaceWhiteout));
        refused("exchange within", v.rename(dir, b"in", dir, b"in2", RenameMode::Exchange));
        refused("exchange", v.rename(dir, b"in", root, b"donor", RenameMode::Exchange));
        refused("rmdir", v.rmdir(root, b"dir"));
        let takes = [
            v.create(dir, format!("new{flags}").as_bytes(), &new(FileKind::Dir), &Cred::root()).map(drop),
            v.link(donor, dir, format!("linked{flags}").as_bytes()).map(drop),
            v.rename(root, b"donor2", dir, format!("moved{flags}").as_bytes(), RenameMode::NoReplace),
            v.tmpfile(dir, &new(FileKind::File), &Cred::root()).map(drop),
        ];
        for (i, r) in takes.into_iter().enumerate() {
            assert!(if append { r.is_ok() } else { matches!(r, Err(Error::Perm)) }, "{i}: {r:?}");
        }
        if append {
            touch(&v, dir).unwrap();
        } else {
            refused("touch", touch(&v, dir));
        }
        flag(&v, dir, 0);
    }
    v.unmount().unwrap();
}

#[test]
fn a_change_of_flags_changes_the_change_time() {
    let device = formatted(Arc::new(MemDevice::new(8192)));
    let v = mount(&device, AtimeMode::Noatime);
    let ino = make(&v, InodeNo::ROOT, "file", FileKind::File);
    v.fsync(ino, false).unwrap();
    let before = v.getattr(ino).unwrap().ctime;
    flag(&v, ino, NOATIME);
    let after = v.getattr(ino).unwrap().ctime;
    assert!(after > before);
    v.fsync(ino, false).unwrap();
    std::mem::forget(v); // a crash
    let v = mount(&device, AtimeMode::Noatime);
    let found = v.getattr(ino).unwrap();
    assert_eq!((found.ctime, found.flags), (after, NOATIME));
    v.unmount().unwrap();
}

/// Reads each kind of object as a front end does.
/// `+A` of a directory comes to all that is made there, `+C` to files and directories, as on ext4.
#[test]
fn a_directory_hands_flags_down() {
    let v = mount(&formatted(Arc::new(MemDevice::new(16_384))), AtimeMode::Relatime);
    let dir = make(&v, InodeNo::ROOT, "d", FileKind::Dir);
    flag(&v, dir, NOATIME | NOCOW);
    for (kind, flags) in [
        (FileKind::File, NOATIME | NOCOW),
        (FileKind::Dir, NOATIME | NOCOW),
        (FileKind::Symlink, NOATIME),
        (FileKind::Fifo, NOATIME),
    ] {
        let ino = make(&v, dir, &format!("{kind:?}"), kind);
        assert_eq!(v.getattr(ino).unwrap().flags & (NOATIME | NOCOW), flags, "{kind:?}");
    }
}

fn read_all(v: &Volume, objects: &[InodeNo; 3]) -> [Timestamp; 3] {
    let f = v.open(objects[0]).unwrap();
    assert_eq!(v.read(&f, 0, &mut [0; 10]).unwrap(), 4);
    v.readdir(objects[1], 0, &mut |_| true).unwrap();
    assert_eq!(v.readlink(objects[2]).unwrap(), b"target");
    objects.map(|o| v.getattr(o).unwrap().atime)
}

#[test]
fn access_times_follow_the_mode() {
    let count = Arc::new(CountDevice::new(Arc::new(MemDevice::new(8192))));
    let device = formatted(count.clone());
    let v = mount(&device, AtimeMode::Strictatime);
    let objects = [FileKind::File, FileKind::Dir, FileKind::Symlink].map(|k| make(&v, InodeNo::ROOT, k_name(k), k));
    v.write(&v.open(objects[0]).unwrap(), 0, b"data").unwrap();
    make(&v, objects[1], "in", FileKind::File);
    let (a, b) = (read_all(&v, &objects), read_all(&v, &objects));
    assert!(a.iter().zip(&b).all(|(a, b)| a < b), "strictatime: {a:?} {b:?}");
    let f = v.open(objects[0]).unwrap();
    v.read_unnoted(&f, 0, &mut [0; 10]).unwrap();
    assert_eq!(v.getattr(objects[0]).unwrap().atime, b[0], "O_NOATIME");
    drop(f);
    v.unmount().unwrap();

    let v = mount(&device, AtimeMode::Noatime);
    assert_eq!(read_all(&v, &objects), b, "noatime; and the times are durable");
    v.unmount().unwrap();

    // newer than the last change, and not a day old: nothing is noted, and nothing written
    let v = mount(&device, AtimeMode::Relatime);
    assert_eq!(read_all(&v, &objects), b, "relatime");
    v.sync().unwrap();
    let before = count.counters();
    for _ in 0..1000 {
        read_all(&v, &objects);
    }
    v.sync().unwrap();
    assert_eq!((count.counters() - before).write_blocks, 0, "blocks written for a thousand reads");
    NOW.fetch_add(24 * 3600 + 1, Relaxed);
    let c = read_all(&v, &objects);
    assert!(b.iter().zip(&c).all(|(b, c)| b < c), "relatime, a day later: {b:?} {c:?}");
    assert_eq!(read_all(&v, &objects), c, "relatime, once");
    touch(&v, objects[1]).unwrap();
    make(&v, objects[1], "in2", FileKind::File);
    assert!(read_all(&v, &objects)[1] > c[1], "relatime, after a change");
    v.unmount().unwrap();

    let quiet = MountOptions { nodiratime: true, ..options(AtimeMode::Strictatime) };
    let v = Volume::mount(vec![device.clone()], quiet).unwrap();
    let (d, e) = (read_all(&v, &objects), read_all(&v, &objects));
    assert!(d[0] < e[0] && d[2] < e[2] && d[1] == e[1], "nodiratime");
    flag(&v, objects[0], NOATIME);
    assert_eq!(read_all(&v, &objects)[0], e[0], "chattr +A");
    v.unmount().unwrap();
}

fn k_name(kind: FileKind) -> &'static str {
    match kind {
        FileKind::File => "file",
        FileKind::Dir => "dir",
        _ => "link",
    }
}

/// The label and whether fsck is content.
fn look(device: Arc<dyn Device>) -> String {
    let r = check(
        std::slice::from_ref(&device),
        &FsckOptions { repair: false, force: true },
        &braidfs::JournalReplay,
        &|_, _, _| {},
    )
    .unwrap();
    assert!(r.findings.is_empty(), "{:#?}", r.findings);
    let v = mount(&device, AtimeMode::Noatime);
    let label = v.label();
    v.unmount().unwrap();
    label
}

#[test]
fn a_label_is_old_or_new_after_any_crash() {
    let base: Arc<dyn Device> = formatted(Arc::new(MemDevice::new(8192)));
    let v = mount(&base, AtimeMode::Noatime);
    v.set_label("old").unwrap();
    v.unmount().unwrap();
    let rec = Arc::new(RecordDevice::new(Image::copy_of(&*base).unwrap()));
    let device: Arc<dyn Device> = rec.clone();
    let v = mount(&device, AtimeMode::Noatime);
    assert_eq!(v.label(), "old");
    let from = rec.log_len();
    v.set_label("new").unwrap();
    let to = rec.log_len();
    assert_eq!(v.label(), "new");
    for bad in ["x".repeat(64), "a\0b".into()] {
        assert!(matches!(v.set_label(&bad), Err(Error::Invalid(_))));
    }
    assert_eq!(v.label(), "new");
    let mut seen = std::collections::BTreeSet::new();
    for upto in from..=to {
        for keep in
            [Keep::None, Keep::Whole, Keep::Torn(1), Keep::Torn(3), Keep::TornMask(0b1010_1010), Keep::TornMask(1)]
        {
            let image = Arc::new(rec.crash_image(upto, &mut |_| keep));
            let torn = !matches!(keep, Keep::None | Keep::Whole) && !rec.unflushed(upto).is_empty();
            if torn {
                // one copy is damaged: the other one serves
                let v = mount(&(image as Arc<dyn Device>), AtimeMode::Noatime);
                seen.insert(v.label());
                v.unmount().unwrap();
            } else {
                seen.insert(look(image));
            }
        }
    }
    assert_eq!(seen.into_iter().collect::<Vec<_>>(), ["new", "old"]);
    let after = Arc::new(rec.crash_image(to, &mut |_| Keep::None));
    assert_eq!(look(after), "new", "durable when it returns");
    v.unmount().unwrap();

    let v = Volume::mount(vec![device], MountOptions { read_only: true, ..options(AtimeMode::Noatime) }).unwrap();
    assert!(matches!(v.set_label("no"), Err(Error::ReadOnly)));
}
