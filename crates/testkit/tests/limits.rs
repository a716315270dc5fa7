//! Limits: many entries, long names, full volumes, links, offsets, and devices that hold no volume (or not all of it).

use braidfs::{
    Cred, Error, FileKind, InodeNo, MkfsOptions, MountOptions, NewNode, OpenFile, RenameMode, SetAttr, Volume, mkfs,
};
use braidfs_device::{BLOCK_BYTES, Device, FileDevice, Image, MemDevice, OpenHow};
use braidfs_testkit::ops::fill;
use braidfs_testkit::walk::{fsck, walk};
use std::collections::BTreeSet;
use std::sync::Arc;

const ROOT: InodeNo = InodeNo::ROOT;

fn new(kind: FileKind) -> NewNode<'static> {
    NewNode { kind, mode: 0o755, umask: 0, rdev: 0, target: b"" }
}

fn device(bytes: u64) -> Arc<dyn Device> {
    let d: Arc<dyn Device> = Arc::new(MemDevice::soiled(bytes / BLOCK_BYTES as u64));
    mkfs::format(std::slice::from_ref(&d), &MkfsOptions { domains: Some(2), ..MkfsOptions::default() }).unwrap();
    d
}

fn mount(d: &Arc<dyn Device>) -> Volume {
    Volume::mount(vec![d.clone()], MountOptions { cache_bytes: 64 << 20, ..MountOptions::default() }).unwrap()
}

fn create(v: &Volume, dir: InodeNo, name: &str) -> braidfs::Result<OpenFile> {
    v.open(v.create(dir, name.as_bytes(), &new(FileKind::File), &Cred::root())?.ino)
}

fn mkdir(v: &Volume, dir: InodeNo, name: &str) -> InodeNo {
    v.create(dir, name.as_bytes(), &new(FileKind::Dir), &Cred::root()).unwrap().ino
}

fn count(v: &Volume, dir: InodeNo) -> usize {
    let (mut names, mut cookie) = (BTreeSet::new(), 0);
    // In pieces, as a kernel does.
    loop {
        let mut n = 0;
        v.readdir(dir, cookie, &mut |e| {
            if n == 300 {
                return false;
            }
            n += 1;
            cookie = e.next;
            assert!(names.insert(e.name.to_vec()), "{:?} twice", String::from_utf8_lossy(e.name));
            true
        })
        .unwrap();
        if n == 0 {
            return names.len() - 2;
        }
    }
}

#[test]
fn a_hundred_thousand_files_in_a_directory() {
    const N: usize = 100_000;
    let d = device(512 << 20);
    let v = mount(&d);
    let dir = mkdir(&v, ROOT, "many");
    for i in 0..N {
        v.create(dir, format!("file-{i}").as_bytes(), &new(FileKind::File), &Cred::root()).unwrap();
    }
    assert_eq!(count(&v, dir), N);
    v.unmount().unwrap();
    let v = mount(&d);
    assert_eq!(count(&v, dir), N);
    for i in (0..N).step_by(7) {
        v.lookup(dir, format!("file-{i}").as_bytes()).unwrap();
        assert!(matches!(v.lookup(dir, format!("none-{i}").as_bytes()), Err(Error::NotFound)));
    }
    for i in 0..N {
        v.unlink(dir, format!("file-{i}").as_bytes()).unwrap();
    }
    assert_eq!(count(&v, dir), 0);
    v.rmdir(ROOT, b"many").unwrap();
    v.unmount().unwrap();
    fsck(&[d]).unwrap();
}

#[test]
fn long_names() {
    let d = device(64 << 20);
    let v = mount(&d);
    let dir = mkdir(&v, ROOT, &"d".repeat(255));
    for i in 0..2000 {
        create(&v, dir, &format!("{i:0>255}")).unwrap();
    }
    assert!(matches!(create(&v, dir, &"x".repeat(256)), Err(Error::NameTooLong)));
    assert!(matches!(v.lookup(dir, &[b'x'; 256]), Err(Error::NameTooLong)));
    let long = [b'x'; 256];
    assert!(matches!(
        v.rename(dir, format!("{:0>255}", 1).as_bytes(), dir, &long, Default::default()),
        Err(Error::NameTooLong)
    ));
    let f = v.lookup(dir, format!("{:0>255}", 1).as_bytes()).unwrap();
    assert!(matches!(v.link(f.ino, dir, &long), Err(Error::NameTooLong)));
    assert_eq!(count(&v, dir), 2000);
    v.unmount().unwrap();
    fsck(std::slice::from_ref(&d)).unwrap();
    let v = mount(&d);
    assert_eq!(count(&v, dir), 2000);
    v.unmount().unwrap();
}

/// Makes files of `bytes` until there is no room; how many.
fn fill_up(v: &Volume, dir: InodeNo, bytes: usize) -> usize {
    for i in 0..100_000 {
        let made = create(v, dir, &format!("f{i}")).and_then(|f| v.write(&f, 0, &fill(i, 0, bytes)));
        match made {
            Ok(n) if n == bytes => {}
            // the last blocks took a part
            Ok(_) | Err(Error::NoSpace) => return i as usize,
            Err(e) => panic!("file {i}: {e}"),
        }
    }
    panic!("a volume that never gets full")
}

#[test]
fn filled_emptied_and_filled_again() {
    for bytes in [300_000, 5000, 3000] {
        let d = device(48 << 20);
        let v = mount(&d);
        let first_free = v.statfs().free;
        let mut counts = Vec::new();
        for round in 0..3 {
            let dir = mkdir(&v, ROOT, "full");
            let n = fill_up(&v, dir, bytes);
            counts.push(n);
            v.sync().unwrap_or_else(|e| panic!("what was accepted must get to the device: {e}"));
            for i in (0..n).step_by(17) {
                let f = v.open(v.lookup(dir, format!("f{i}").as_bytes()).unwrap().ino).unwrap();
                let mut buf = vec![0; bytes];
                assert_eq!(v.read(&f, 0, &mut buf).unwrap(), bytes);
                assert!(buf == fill(i as u32, 0, bytes), "round {round}: content of f{i}");
            }
            // Removing works on a full volume, the file that did not get its data included.
            for i in 0..n {
                v.unlink(dir, format!("f{i}").as_bytes()).unwrap();
            }
            drop(v.unlink(dir, format!("f{n}").as_bytes()));
            v.rmdir(ROOT, b"full").unwrap();
            v.sync().unwrap();
        }
        assert!(counts[0] * bytes > (48 << 20) / 2, "only {} files of {bytes} bytes fit", counts[0]);
        assert!(counts[2] * 100 >= counts[0] * 95, "space is lost: {counts:?}");
        let free = v.statfs().free;
        assert!(free * 100 >= first_free * 97, "{free} blocks free of {first_free} at first");
        v.unmount().unwrap();
        fsck(&[d]).unwrap();
    }
}

#[test]
fn overwritten_many_times_while_nearly_full() {
    let d = device(48 << 20);
    let v = mount(&d);
    let dir = mkdir(&v, ROOT, "d");
    let total = v.statfs().available;
    let mut files = Vec::new();
    while v.statfs().available * 20 > total {
        let f = create(&v, dir, &format!("f{}", files.len())).unwrap();
        if v.write(&f, 0, &fill(0, 0, 64 << 10)).is_err() {
            break;
        }
        files.push((f, [0u32; 16]));
    }
    assert!(files.len() > 100);
    let mut rng = fastrand::Rng::with_seed(5);
    let (mut written, mut version, mut refused) = (0u64, 1u32, 0u32);
    while written < 20 * (48 << 20) && refused < 10_000 {
        let i = rng.usize(..files.len());
        let page = rng.usize(..16);
        let off = page as u64 * 4096;
        match v.write(&files[i].0, off, &fill(version, off, 4096)) {
            Ok(_) => files[i].1[page] = version,
            // The cleaner may be behind; a writer that waits for it must get on.
            Err(Error::NoSpace) => {
                refused += 1;
                v.sync().unwrap();
            }
            Err(e) => panic!("{e}"),
        }
        written += 4096;
        version += 1;
    }
    assert!(refused * 100 < version, "{refused} of {version} overwrites refused though no space is asked for");
    let check = |v: &Volume| {
        for (i, (_, pages)) in files.iter().enumerate() {
            let f = v.open(v.lookup(dir, format!("f{i}").as_bytes()).unwrap().ino).unwrap();
            for (page, version) in pages.iter().enumerate() {
                let (off, mut buf) = (page as u64 * 4096, vec![0; 4096]);
                v.read(&f, off, &mut buf).unwrap();
                assert!(buf == fill(*version, off, 4096), "f{i} page {page}");
            }
        }
    };
    check(&v);
    v.unmount().unwrap();
    fsck(std::slice::from_ref(&d)).unwrap();
    let v = mount(&d);
    check(&v);
    v.unmount().unwrap();
}

#[test]
fn links_up_to_the_limit() {
    // as many names as their bytes allow: 440 000 with 9 for each name
    const LINK_MAX: u32 = 30_000;
    let d = device(256 << 20);
    let v = mount(&d);
    let f = create(&v, ROOT, "f").unwrap();
    let dirs = [mkdir(&v, ROOT, "a"), mkdir(&v, ROOT, "b")];
    let mut n = 1u32;
    let error = loop {
        match v.link(f.ino(), dirs[n as usize % 2], format!("l{n}").as_bytes()) {
            Ok(a) => {
                n += 1;
                assert_eq!(a.nlink, n);
                assert!(n <= 65_000, "no limit");
            }
            Err(e) => break e,
        }
    };
    assert!(matches!(error, Error::TooManyLinks), "{error}");
    assert!(n >= LINK_MAX, "only {n} links");
    v.unmount().unwrap();
    let v = mount(&d);
    let ino = v.lookup(ROOT, b"f").unwrap().ino;
    assert_eq!(v.getattr(ino).unwrap().nlink, n);
    v.unlink(ROOT, b"f").unwrap();
    assert_eq!(v.link(ino, ROOT, b"g").unwrap().nlink, n);
    v.unmount().unwrap();
    fsck(&[d]).unwrap();
}

/// A file with as many names as its record can hold keeps them: a longer name is refused, and the domain goes on. Also in
/// directories that several threads change.
#[test]
fn renames_keep_to_the_limit_of_links() {
    [false, true].into_iter().for_each(rename_at_the_limit_of_links);
}

fn rename_at_the_limit_of_links(share_dirs: bool) {
    let d = device(256 << 20);
    let v = Volume::mount(vec![d.clone()], MountOptions { share_dirs, ..MountOptions::default() }).unwrap();
    let (a, b) = (mkdir(&v, ROOT, "a"), mkdir(&v, ROOT, "b"));
    let (f, other) = (create(&v, a, "f").unwrap(), create(&v, b, "other").unwrap());
    let names: Vec<String> =
        (0u32..).map(|n| format!("l{n}")).take_while(|l| v.link(f.ino(), a, l.as_bytes()).is_ok()).collect();
    assert!(names.len() >= 30_000, "{} links", names.len());
    let long = |n: usize| format!("{n:0255}");
    let rename = |n: usize, dir, to: &str, mode| v.rename(a, names[n].as_bytes(), dir, to.as_bytes(), mode);
    let mut grown = 0;
    for n in 0..200 {
        // into the same directory, and into another one
        let dir = if n % 2 == 0 { a } else { b };
        match rename(n, dir, &long(n), RenameMode::Replace) {
            Ok(()) => grown += 1,
            Err(e) => assert!(matches!(e, Error::TooManyLinks), "{e}"),
        }
        // no longer
        rename(1000 + n, dir, &names[1000 + n].replace('l', "m"), RenameMode::NoReplace).unwrap();
    }
    assert!(grown < 2, "{grown} names have become longer");
    // nor by an exchange
    assert!(v.rename(b, b"other", b, long(0).as_bytes(), RenameMode::Replace).is_ok());
    let e = rename(500, b, &long(0), RenameMode::Exchange).unwrap_err();
    assert!(matches!(e, Error::TooManyLinks), "{e}");
    v.sync().unwrap();
    assert_eq!(v.getattr(f.ino()).unwrap().nlink as usize, names.len() + 1);
    drop((f, other));
    v.unmount().unwrap();
    fsck(&[d]).unwrap();
}

/// More than ext4 counts (65,000).
#[test]
fn many_subdirectories() {
    const COUNT: u32 = 70_000;
    let d = device(512 << 20);
    let v = mount(&d);
    let (all, more) = (mkdir(&v, ROOT, "all"), mkdir(&v, ROOT, "more"));
    let moved = mkdir(&v, more, "moved");
    for n in 0..COUNT {
        mkdir(&v, all, &format!("d{n}"));
    }
    v.rename(more, b"moved", all, b"moved", RenameMode::Replace).unwrap();
    assert_eq!(v.getattr(moved).unwrap().nlink, 2);
    let links = |v: &Volume| v.getattr(all).unwrap().nlink;
    assert_eq!(links(&v), COUNT + 3);
    v.unmount().unwrap();
    fsck(std::slice::from_ref(&d)).unwrap();
    let v = mount(&d);
    assert_eq!(links(&v), COUNT + 3);
    v.rmdir(all, b"d7").unwrap();
    assert_eq!(links(&v), COUNT + 2);
    v.unmount().unwrap();
    fsck(&[d]).unwrap();
}

#[test]
fn sparse_files() {
    let d = device(64 << 20);
    let v = mount(&d);
    let f = create(&v, ROOT, "f").unwrap();
    let offsets = [1u64 << 20, (1 << 32) + 5, 1 << 40, (1 << 50) + 4095, (1 << 59) + 1];
    for (i, off) in offsets.iter().enumerate() {
        v.write(&f, *off, &fill(i as u32, *off, 6000)).unwrap();
    }
    let check = |v: &Volume, f: &OpenFile| {
        let mut buf = vec![0; 6000];
        for (i, off) in offsets.iter().enumerate() {
            assert_eq!(v.read(f, *off, &mut buf).unwrap(), 6000);
            assert!(buf == fill(i as u32, *off, 6000), "at {off}");
            assert_eq!(v.read(f, *off - 8192, &mut buf[..4000]).unwrap(), 4000);
            assert!(buf[..4000].iter().all(|b| *b == 0), "before {off}");
            let data = v.seek(f, off - 100_000, false).unwrap();
            assert!(data <= *off && *off - data < 100_000);
        }
        assert!(v.getattr(f.ino()).unwrap().sectors < 1000);
    };
    check(&v, &f);
    assert!(matches!(v.write(&f, u64::MAX - 10, b"xyz"), Err(Error::TooBig)));
    assert!(matches!(v.write(&f, 1 << 62, b"x"), Err(Error::TooBig)));
    let set = SetAttr { size: Some(1 << 62), ..SetAttr::default() };
    assert!(matches!(v.setattr(f.ino(), &set), Err(Error::TooBig)));
    v.setattr(f.ino(), &SetAttr { size: Some(1 << 60), ..SetAttr::default() }).unwrap();
    drop(f);
    v.unmount().unwrap();
    fsck(std::slice::from_ref(&d)).unwrap();
    let v = mount(&d);
    let f = v.open(v.lookup(ROOT, b"f").unwrap().ino).unwrap();
    check(&v, &f);
    v.setattr(f.ino(), &SetAttr { size: Some(0), ..SetAttr::default() }).unwrap();
    drop(f);
    v.unmount().unwrap();
    fsck(&[d]).unwrap();
}

#[test]
fn an_image_is_mounted_once() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("volume.img");
    let open = |write| FileDevice::open(&path, OpenHow { write, direct: false });
    let first: Arc<dyn Device> = Arc::new(FileDevice::create(&path, 64 << 20).unwrap());
    mkfs::format(std::slice::from_ref(&first), &MkfsOptions::default()).unwrap();
    let v = mount(&first);
    let error = open(true).expect_err("a second writer must be refused").to_string();
    assert!(error.contains("in use"), "{error}");
    assert!(open(false).is_err(), "a reader beside a writer must be refused");
    create(&v, ROOT, "f").unwrap();
    v.unmount().unwrap();
    drop(first);
    let again: Arc<dyn Device> = Arc::new(open(true).unwrap());
    let v = mount(&again);
    v.lookup(ROOT, b"f").unwrap();
    v.unmount().unwrap();
}

fn used_image() -> Image {
    let d = Arc::new(MemDevice::soiled((64 << 20) / BLOCK_BYTES as u64));
    let dynamic: Arc<dyn Device> = d.clone();
    mkfs::format(std::slice::from_ref(&dynamic), &MkfsOptions { domains: Some(2), ..MkfsOptions::default() }).unwrap();
    let v = mount(&dynamic);
    for i in 0..20 {
        let sub = mkdir(&v, ROOT, &format!("d{i}"));
        let f = create(&v, sub, "f").unwrap();
        v.write(&f, 0, &fill(i, 0, 20_000)).unwrap();
    }
    v.unmount().unwrap();
    d.snapshot()
}

fn try_mount(image: Image) -> braidfs::Result<Volume> {
    let d: Arc<dyn Device> = Arc::new(MemDevice::from_image(image));
    Volume::mount(vec![d], MountOptions { background: false, ..MountOptions::default() })
}

#[test]
fn devices_that_hold_no_volume_are_refused() {
    for blocks in [0, 1, 2, 8, 1000, 100_000] {
        assert!(try_mount(Image::new(blocks)).is_err(), "{blocks} blocks of zeros");
    }
    let mut foreign = Image::new(10_000);
    for b in 0..10_000 {
        foreign.write(b, &fill(b as u32, 0, BLOCK_BYTES)).unwrap();
    }
    assert!(try_mount(foreign).is_err(), "noise");
    let whole = used_image();
    for share in [0, 1, 10, 50, 90, 99] {
        let blocks = whole.blocks() * share / 100;
        let mut short = Image::new(blocks);
        let mut buf = vec![0; BLOCK_BYTES];
        for b in whole.used().filter(|b| *b < blocks) {
            whole.read(b, &mut buf).unwrap();
            short.write(b, &buf).unwrap();
        }
        assert!(try_mount(short).is_err(), "truncated to {share} %");
    }
    try_mount(whole).unwrap().unmount().unwrap();
}

#[test]
fn damaged_blocks_give_errors_and_no_panic() {
    let whole = used_image();
    let seed = braidfs_testkit::seed();
    println!("BRAIDFS_SEED={seed}");
    let mut rng = fastrand::Rng::with_seed(seed);
    let used: Vec<u64> = whole.used().collect();
    let (mut refused, mut lived) = (0, 0);
    for i in 0..300 {
        let mut image = whole.clone();
        for _ in 0..rng.usize(1..4) {
            let block = if i < used.len() && i < 40 { used[i] } else { used[rng.usize(..used.len())] };
            let mut buf = vec![0; BLOCK_BYTES];
            image.read(block, &mut buf).unwrap();
            match rng.u8(..3) {
                0 => buf.fill(0),
                1 => buf[rng.usize(..BLOCK_BYTES)] ^= 1 << rng.u8(..8),
                _ => rng.fill(&mut buf[2048..]),
            }
            image.write(block, &buf).unwrap();
        }
        // Errors are right, panics and hangs are not; what is read must have been written.
        match try_mount(image) {
            Err(_) => refused += 1,
            Ok(v) => {
                lived += 1;
                drop(walk(&v));
                drop(create(&v, ROOT, "new").and_then(|f| v.write(&f, 0, &[1; 9000])));
                drop(v.unmount());
            }
        }
    }
    println!("{refused} refused, {lived} mounted");
    assert!(lived > 0, "a single damaged block must not make every volume unusable");
}

/// Numbers of inodes become free again when they run out: of files with their deletion, of directories at a checkpoint.
#[test]
fn numbers_of_removed_inodes_are_given_again() {
    let d = device(24 << 20);
    let quiet = MountOptions { cache_bytes: 64 << 20, background: false, ..MountOptions::default() };
    let v = Volume::mount(vec![d.clone()], quiet).unwrap();
    let all = v.statfs().inodes;
    for kind in [FileKind::File, FileKind::Dir] {
        for i in 0..2 * all {
            v.create(ROOT, b"x", &new(kind), &Cred::root()).unwrap_or_else(|e| panic!("{kind:?} {i} of {all}: {e}"));
            match kind {
                FileKind::Dir => v.rmdir(ROOT, b"x").unwrap(),
                _ => v.unlink(ROOT, b"x").unwrap(),
            }
        }
    }
    v.unmount().unwrap();
    fsck(&[d]).unwrap();
}
