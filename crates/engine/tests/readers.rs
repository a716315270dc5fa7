//! What many threads read at once: opens counted apart from the inode, names looked up lately, by anybody.

use braidfs::device::{Device, MemDevice};
use braidfs::{Cred, Error, InodeNo, MkfsOptions, MountOptions, OpenFile, OpenHow, SetAttr, Volume, mkfs};
use braidfs_check::{FsckOptions, check};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};

const READ: OpenHow = OpenHow {
    read: true,
    append: false,
    write: false,
    create: false,
    exclusive: false,
    truncate: false,
    no_follow: false,
    mode: 0,
    umask: 0,
    later: (),
};

fn formatted(domains: u16) -> Arc<MemDevice> {
    let device = Arc::new(MemDevice::new(16384));
    let all: Vec<Arc<dyn Device>> = vec![device.clone()];
    let o = MkfsOptions { domains: Some(domains), group_bytes: Some(4 << 20), ..MkfsOptions::default() };
    mkfs::format(&all, &o).unwrap();
    device
}

fn mount(device: &Arc<MemDevice>, cache_bytes: u64) -> Volume {
    let options = MountOptions { background: false, cache_bytes, ..MountOptions::default() };
    Volume::mount(vec![device.clone()], options).unwrap()
}

fn create(v: &Volume, path: &str) -> OpenFile {
    let how = OpenHow { write: true, create: true, mode: 0o644, ..READ };
    v.open_path(path.as_bytes(), how, &Cred::root()).unwrap()
}

/// From here on threads of this process count opens in tables of their own.
fn open_what_others_opened(v: &Volume) {
    let me = Cred::root();
    drop(create(v, "everybody"));
    for _ in 0..40 {
        for _ in 0..2 {
            std::thread::scope(|s| {
                let one = s.spawn(|| drop(v.open_path(b"everybody", READ, &me).unwrap()));
                // two threads that live at once are two
                drop(v.open_path(b"everybody", READ, &me).unwrap());
                one.join().unwrap();
            });
        }
    }
    v.unlink_path(b"everybody", &me).unwrap();
}

fn is_clean(device: Arc<MemDevice>) {
    let how = FsckOptions { repair: false, force: true };
    let found = check(&[device as Arc<dyn Device>], &how, &braidfs::JournalReplay, &|_, _, _| {}).unwrap();
    assert!(found.findings.is_empty(), "{:#?}", found.findings);
}

fn free_inodes(v: &Volume) -> u64 {
    v.sync().unwrap();
    v.sync().unwrap();
    v.statfs().inodes_free
}

/// An unlinked file stays while somebody has it open, wherever that is counted, and goes with the last: never before, and
/// never too late.
#[test]
fn the_last_close_of_an_unlinked_file_frees_it_whoever_closes() {
    let device = formatted(1);
    let v = mount(&device, 64 << 20);
    let me = Cred::root();
    open_what_others_opened(&v);
    let before = free_inodes(&v);
    for round in 0..30 {
        let first = create(&v, "f");
        let ino = first.ino();
        v.write(&first, 0, &[7; 5000]).unwrap();
        // one counted in the inode, where it was made; others by name; one by number
        let mut all: Vec<OpenFile> = (0..3).map(|_| v.open_path(b"f", READ, &me).unwrap()).collect();
        all.push(v.open(ino).unwrap());
        all.push(first);
        all.rotate_left(round % 5);
        v.unlink_path(b"f", &me).unwrap();
        assert!(v.is_open(ino));
        while let Some(f) = all.pop() {
            let mut b = [0; 5000];
            assert_eq!((v.read(&f, 0, &mut b).unwrap(), b), (5000, [7; 5000]));
            // an orphan is opened by its number
            let again = v.open(ino).unwrap();
            std::thread::scope(|s| s.spawn(|| drop(f)).join().unwrap());
            assert!(v.is_open(ino));
            if !all.is_empty() {
                drop(again);
                assert!(v.is_open(ino));
                continue;
            }
            std::thread::scope(|s| s.spawn(|| drop(again)).join().unwrap());
        }
        assert!(!v.is_open(ino) && matches!(v.getattr(ino), Err(Error::NotFound)));
    }
    assert_eq!(free_inodes(&v), before, "all are gone");
    v.unmount().unwrap();
    is_clean(device);
}

/// Opens race with unlinks, and with an eviction that finds nothing to keep cells for but handles.
#[test]
fn opens_race_with_unlinks_and_evictions() {
    let device = formatted(2);
    // so small that cells go all the time
    let v = mount(&device, 1 << 20);
    let me = Cred::root();
    open_what_others_opened(&v);
    drop(create(&v, "steady"));
    (0..2000).for_each(|i| drop(create(&v, &format!("{i}"))));
    let big = create(&v, "big");
    let before = free_inodes(&v);
    let (over, opened) = (AtomicBool::new(false), AtomicU32::new(0));
    std::thread::scope(|s| {
        for t in 0..3 {
            let (v, me, over, opened) = (&v, &me, &over, &opened);
            s.spawn(move || {
                let mut kept = Vec::new();
                while !over.load(SeqCst) {
                    for n in 0..4 {
                        match v.open_path(format!("f{n}").as_bytes(), READ, me) {
                            Ok(f) => {
                                opened.fetch_add(1, SeqCst);
                                let mut b = [0; 8];
                                let got = v.read(&f, 0, &mut b).unwrap();
                                assert!(got == 0 || b == f.ino().0.to_le_bytes(), "the file of another number");
                                kept.push(f);
                            }
                            Err(Error::NotFound) => {}
                            Err(e) => panic!("{e}"),
                        }
                    }
                    assert!(v.resolve(b"steady", true, me).is_ok());
                    if kept.len() > 8 + t {
                        kept.clear();
                    }
                }
            });
        }
        // on a machine with much else to do the others come late
        for round in (0..150_000u32).take_while(|n| *n < 1500 || opened.load(SeqCst) == 0) {
            let name = format!("f{}", round % 4);
            let f = create(&v, &name);
            if round >= 1500 {
                std::thread::yield_now();
            }
            v.write(&f, 0, &f.ino().0.to_le_bytes()).unwrap();
            drop(f);
            if round % 8 == 0 {
                v.write(&big, 0, &[1; 1 << 20]).unwrap();
                v.sync().unwrap();
                v.read(&big, 0, &mut [0; 4096]).unwrap();
            }
            v.unlink_path(name.as_bytes(), &me).unwrap();
        }
        over.store(true, SeqCst);
    });
    assert!(opened.load(SeqCst) > 0);
    assert_eq!(free_inodes(&v), before, "all are gone");
    v.unmount().unwrap();
    is_clean(device);
}

/// Names that everybody has looked up open the way for nobody who has no right to it.
#[test]
fn rights_are_looked_at_on_the_quick_way() {
    let device = formatted(1);
    let v = mount(&device, 64 << 20);
    let root = Cred::root();
    let user = Cred { uid: 7, gid: 7, groups: Arc::from([]), privileged: false };
    v.mkdir_path(b"a", 0o755, &root).unwrap();
    v.mkdir_path(b"a/b", 0o755, &root).unwrap();
    drop(create(&v, "a/b/c"));
    let b = v.resolve(b"a/b", true, &root).unwrap().ino;
    let mode = |mode| v.setattr(b, &SetAttr { mode: Some(mode), ..SetAttr::default() }).unwrap();
    for _ in 0..3 {
        for who in [&root, &user] {
            assert!(v.resolve(b"a/b/c", true, who).is_ok());
            assert!(v.open_path(b"a/b/c", READ, who).is_ok());
        }
        mode(0o700);
        assert!(v.open_path(b"a/b/c", READ, &root).is_ok());
        assert!(matches!(v.resolve(b"a/b/c", true, &user), Err(Error::Access)));
        assert!(matches!(v.open_path(b"a/b/c", READ, &user), Err(Error::Access)));
        assert!(v.resolve(b"a/b", true, &user).is_ok(), "what is in it is hidden, not itself");
        let fresh = OpenHow { write: true, create: true, exclusive: true, mode: 0o600, ..READ };
        mode(0o755);
        assert!(matches!(v.open_path(b"a/b/d", fresh, &user), Err(Error::Access)));
        assert!(matches!(v.mkdir_path(b"a/b/d", 0o755, &user), Err(Error::Access)));
        assert!(matches!(v.unlink_path(b"a/b/c", &user), Err(Error::Access)));
    }
}

/// Of a long name the table has a hash alone.
#[test]
fn long_names_are_found_and_forgotten() {
    let device = formatted(1);
    let v = mount(&device, 64 << 20);
    let me = Cred::root();
    let name = |n: usize, c: char| c.to_string().repeat(n);
    for n in [31, 32, 33, 100, 255] {
        let (a, b, sub) = (name(n, 'a'), name(n, 'b'), name(n, 's'));
        let ino = create(&v, &a).ino();
        v.mkdir_path(sub.as_bytes(), 0o755, &me).unwrap();
        let inner = create(&v, &format!("{sub}/{a}")).ino();
        for _ in 0..3 {
            assert_eq!(v.resolve(a.as_bytes(), true, &me).unwrap().ino, ino);
            assert_eq!(v.lookup(InodeNo::ROOT, a.as_bytes()).unwrap().ino, ino);
            assert_eq!(v.resolve(format!("{sub}/{a}").as_bytes(), true, &me).unwrap().ino, inner);
            assert!(matches!(v.resolve(b.as_bytes(), true, &me), Err(Error::NotFound)));
        }
        v.rename_path(a.as_bytes(), b.as_bytes(), braidfs::RenameMode::Replace, &me).unwrap();
        assert!(matches!(v.resolve(a.as_bytes(), true, &me), Err(Error::NotFound)));
        assert_eq!(v.resolve(b.as_bytes(), true, &me).unwrap().ino, ino);
        v.link_path(b.as_bytes(), a.as_bytes(), &me).unwrap();
        v.unlink_path(b.as_bytes(), &me).unwrap();
        assert_eq!(v.resolve(a.as_bytes(), true, &me).unwrap().ino, ino);
        assert!(matches!(v.resolve(b.as_bytes(), true, &me), Err(Error::NotFound)));
    }
}
