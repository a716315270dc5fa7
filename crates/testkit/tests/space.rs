//! Space that is told of is there, comes back, and goes from domain to domain.

use braidfs::{
    Cred, Error, FallocMode, FileKind, InodeNo, MkfsOptions, MountOptions, NewNode, OpenFile, StatFs, Volume, mkfs,
};
use braidfs_device::{Device, MemDevice};
use braidfs_testkit::small::two_directories;
use braidfs_testkit::walk::fsck;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

const ROOT: InodeNo = InodeNo::ROOT;
const MIB: u64 = 1 << 20;
const BLOCK: u64 = 4096;

fn device(mib: u64, domains: u16) -> Arc<dyn Device> {
    let d: Arc<dyn Device> = Arc::new(MemDevice::soiled(mib * MIB / BLOCK));
    let options = MkfsOptions { domains: Some(domains), ..MkfsOptions::default() };
    mkfs::format(std::slice::from_ref(&d), &options).unwrap();
    d
}

fn mount(d: &Arc<dyn Device>) -> Volume {
    let options = MountOptions { cache_bytes: 32 * MIB, background: false, ..MountOptions::default() };
    Volume::mount(vec![d.clone()], options).unwrap()
}

fn create(v: &Volume, dir: InodeNo, name: &str, kind: FileKind) -> braidfs::Result<braidfs::Attr> {
    let new = NewNode { kind, mode: 0o755, umask: 0, rdev: 0, target: b"" };
    v.create(dir, name.as_bytes(), &new, &Cred::root())
}

fn mkdir(v: &Volume, name: &str) -> InodeNo {
    create(v, ROOT, name, FileKind::Dir).unwrap().ino
}

fn file(v: &Volume, dir: InodeNo, name: &str) -> OpenFile {
    v.open(create(v, dir, name, FileKind::File).unwrap().ino).unwrap()
}

/// Writes until there is no room; bytes.
fn fill(v: &Volume, f: &OpenFile, byte: u8) -> u64 {
    let data = vec![byte; MIB as usize];
    let mut at = 0;
    loop {
        match v.write(f, at, &data) {
            Ok(n) => at += n as u64,
            Err(Error::NoSpace) => return at,
            Err(e) => panic!("after {at} bytes: {e}"),
        }
    }
}

/// Several writers fill a directory, a file each, which then go; bytes written.
fn round(v: &Volume, dir: InodeNo, writers: usize) -> u64 {
    let files: Vec<_> = (0..writers).map(|i| file(v, dir, &format!("f{i}"))).collect();
    let written = std::thread::scope(|s| {
        let all: Vec<_> = files.iter().map(|f| s.spawn(|| fill(v, f, 7))).collect();
        all.into_iter().map(|t| t.join().unwrap()).sum()
    });
    drop(files);
    v.sync().unwrap();
    for i in 0..writers {
        v.unlink(dir, format!("f{i}").as_bytes()).unwrap();
    }
    v.sync().unwrap();
    written
}

fn near(a: u64, b: u64, by: u64) -> bool {
    a.abs_diff(b) <= by
}

fn offered(v: &Volume, ino: InodeNo) -> u64 {
    v.statfs_of(ino).unwrap().available * BLOCK
}

#[test]
fn ten_rounds_of_filling_and_removing() {
    for domains in [1, 2, 8] {
        for writers in [1, 4] {
            let d = device(64, domains);
            let v = mount(&d);
            let dir = mkdir(&v, "dir");
            v.sync().unwrap();
            let mut seen: Vec<StatFs> = Vec::new();
            for n in 0..10 {
                let before = offered(&v, dir);
                let written = round(&v, dir, writers);
                let why = format!("{domains} domains, {writers} writers, round {n}");
                assert!(near(written, before, 4 * MIB), "{why}: {written} written, {before} offered");
                let after = offered(&v, dir);
                assert!(near(after, before, before / 500), "{why}: {before} offered, {after} afterwards");
                seen.push(v.statfs_of(dir).unwrap());
            }
            let (first, last) = (seen[0], seen[9]);
            assert_eq!(first, last, "{domains} domains, {writers} writers");
            v.unmount().unwrap();
            fsck(&[d]).unwrap();
        }
    }
}

#[test]
fn emptied_groups_go_to_the_domain_that_needs_them() {
    for domains in [2, 8] {
        let d = device(96, domains);
        let mut v = mount(&d);
        let dirs = two_directories(&v);
        v.sync().unwrap();
        let first = dirs.map(|dir| offered(&v, dir));
        for n in 0..6 {
            let dir = dirs[n % 2];
            let before = offered(&v, dir);
            assert!(near(before, first[n % 2], 9 * MIB), "round {n}: {before} of {}", first[n % 2]);
            let written = round(&v, dir, 1);
            assert!(near(written, before, 2 * MIB), "round {n}: {written} written, {before} offered");
            if n == 3 {
                v.unmount().unwrap();
                fsck(std::slice::from_ref(&d)).unwrap();
                v = mount(&d);
            }
        }
        let live = v.statfs();
        v.unmount().unwrap();
        fsck(std::slice::from_ref(&d)).unwrap();
        let v = mount(&d);
        assert_eq!(v.statfs().free, live.free);
        assert_eq!(v.statfs().inodes_free, live.inodes_free);
    }
}

#[test]
fn what_is_offered_can_be_allocated() {
    for domains in [1, 2, 8] {
        let d = device(64, domains);
        let v = mount(&d);
        let dir = mkdir(&v, "dir");
        for _ in 0..3 {
            let f = file(&v, dir, "f");
            v.sync().unwrap();
            let n = offered(&v, dir);
            assert!(n > 20 * MIB);
            v.fallocate(&f, FallocMode::Allocate { keep_size: false }, 0, n)
                .unwrap_or_else(|e| panic!("{domains} domains: {n} bytes offered: {e}"));
            assert!(offered(&v, dir) < MIB);
            drop(f);
            v.unlink(dir, b"f").unwrap();
            v.sync().unwrap();
        }
        v.unmount().unwrap();
        fsck(&[d]).unwrap();
    }
}

#[test]
fn new_files_go_where_there_is_room() {
    let d = device(64, 4);
    let v = mount(&d);
    let dir = mkdir(&v, "dir");
    let home = v.domain_of(dir).unwrap();
    let f = file(&v, dir, "big");
    assert_eq!(v.domain_of(f.ino()).unwrap(), home);
    fill(&v, &f, 1);
    v.sync().unwrap();
    let all = v.statfs();
    assert!(offered(&v, dir) < MIB && all.available * BLOCK > 6 * MIB, "{all:?}");
    // the other domains' first groups are used, one after the other
    let mut seen = BTreeMap::new();
    for i in 0..40 {
        let f = file(&v, dir, &format!("small{i}"));
        assert_eq!(v.write(&f, 0, &vec![2; 200_000]).unwrap(), 200_000, "file {i}");
        *seen.entry(v.domain_of(f.ino()).unwrap()).or_insert(0) += 1;
    }
    assert!(seen.len() >= 3 && !seen.contains_key(&home), "{seen:?}");
    drop(f);
    v.unmount().unwrap();
    fsck(&[d]).unwrap();
}

#[test]
fn numbers_of_a_group_that_moved_are_nobodys_until_they_are_given_again() {
    let d = device(32, 2);
    let v = mount(&d);
    let [a, b] = two_directories(&v);
    let mut old = BTreeMap::new();
    for i in 0..5000 {
        let made = create(&v, a, &format!("n{i}"), FileKind::File).unwrap();
        old.insert(made.ino, made.generation);
    }
    v.sync().unwrap();
    for i in 0..5000 {
        v.unlink(a, format!("n{i}").as_bytes()).unwrap();
    }
    v.sync().unwrap();
    let f = file(&v, b, "big");
    fill(&v, &f, 3);
    let home = v.domain_of(b).unwrap();
    let moved: Vec<_> = old.keys().filter(|n| v.domain_of(**n).is_ok_and(|d| d == home)).copied().collect();
    assert!(moved.len() > 1500, "{} numbers moved", moved.len());
    assert!(moved.iter().all(|n| matches!(v.getattr(*n), Err(Error::NotFound))));
    drop(f);
    v.unlink(b, b"big").unwrap();
    v.sync().unwrap();
    let mut again = 0;
    for i in 0..5000 {
        let made = create(&v, b, &format!("n{i}"), FileKind::File).unwrap();
        if let Some(generation) = old.get(&made.ino) {
            assert!(
                made.generation > *generation,
                "number {} had generation {generation}, has {}",
                made.ino,
                made.generation
            );
            again += 1;
        }
    }
    assert!(again > 1500, "{again} numbers were given again");
    v.unmount().unwrap();
    fsck(&[d]).unwrap();
}

/// Counts who works still, also where it fails.
struct Done<'a>(&'a AtomicUsize);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

/// `df` counts none of them twice, whoever has it just then.
#[test]
fn groups_go_to_and_fro_under_load() {
    let d = device(64, 4);
    let v = mount(&d);
    let dirs: Vec<_> = (0..4).map(|i| mkdir(&v, &format!("d{i}"))).collect();
    let (blocks, working) = (v.statfs().blocks, AtomicUsize::new(dirs.len()));
    std::thread::scope(|s| {
        s.spawn(|| {
            while working.load(Relaxed) > 0 {
                // less while a group is emptied, of which nobody is given what is free
                assert!(v.statfs().blocks <= blocks);
            }
        });
        for (t, dir) in dirs.iter().enumerate() {
            let (v, working) = (&v, &working);
            s.spawn(move || {
                let _done = Done(working);
                let mut rng = fastrand::Rng::with_seed(t as u64);
                for n in 0..60 {
                    let name = format!("f{n}");
                    let Ok(made) = create(v, *dir, &name, FileKind::File) else { continue };
                    let f = v.open(made.ino).unwrap();
                    let data = vec![t as u8 + 1; rng.usize(1..20) << 20];
                    let wrote = match v.write(&f, 0, &data) {
                        Ok(n) => n,
                        Err(Error::NoSpace) => 0,
                        Err(e) => panic!("{e}"),
                    };
                    if n % 4 == 0 {
                        v.fsync(made.ino, false).unwrap();
                    }
                    let mut back = vec![0; wrote];
                    assert_eq!(v.read(&f, 0, &mut back).unwrap(), wrote);
                    assert!(back.iter().all(|b| *b == t as u8 + 1));
                    drop(f);
                    v.unlink(*dir, name.as_bytes()).unwrap();
                }
            });
        }
    });
    v.sync().unwrap();
    assert_eq!(v.statfs().blocks, blocks);
    v.unmount().unwrap();
    fsck(&[d]).unwrap();
}

/// A write for which there is no room leaves nothing reserved: also one to a file of many extents, whose records would have
/// needed more blocks.
#[test]
fn a_refused_write_keeps_nothing() {
    let d = device(32, 1);
    let v = mount(&d);
    let dir = mkdir(&v, "dir");
    let holes = file(&v, dir, "holes");
    for n in 0..200 {
        v.write(&holes, 2 * n * BLOCK, &[1; BLOCK as usize]).unwrap();
    }
    v.sync().unwrap();
    let filler = file(&v, dir, "filler");
    let mut at = fill(&v, &filler, 2);
    while v.write(&filler, at, &[2; BLOCK as usize]).is_ok() {
        at += BLOCK;
    }
    v.sync().unwrap();
    let before = v.statfs();
    for n in 0..3 {
        assert!(matches!(v.write(&holes, (2 * n + 1) * BLOCK, &[3; BLOCK as usize]), Err(Error::NoSpace)));
        assert_eq!(v.statfs(), before, "write {n}");
    }
    v.unmount().unwrap();
    fsck(&[d]).unwrap();
}

/// 64 files, filled block by block by so many threads until none finds room; blocks written. Afterwards, with all removed,
/// what statfs told before is told again.
fn fill_with_threads(threads: usize) -> u64 {
    const FILES: usize = 64;
    let d = device(256, 1);
    let v = mount(&d);
    let dir = mkdir(&v, "d");
    v.sync().unwrap();
    let empty = v.statfs();
    let files: Vec<OpenFile> = (0..FILES).map(|i| file(&v, dir, &format!("f{i}"))).collect();
    let block = vec![7; BLOCK as usize];
    let wrote: u64 = std::thread::scope(|s| {
        let all: Vec<_> = (0..threads)
            .map(|t| {
                let (v, files, block) = (&v, &files, &block);
                s.spawn(move || {
                    // by turns, so that with one thread, too, all files are of one length
                    let mut mine: Vec<&OpenFile> = files.iter().skip(t).step_by(threads).collect();
                    let mut wrote = 0;
                    while !mine.is_empty() {
                        mine.retain(|f| match v.append(f, block) {
                            Ok(_) => {
                                wrote += 1;
                                true
                            }
                            Err(Error::NoSpace) => false,
                            Err(e) => panic!("after {wrote} blocks: {e}"),
                        });
                    }
                    wrote
                })
            })
            .collect();
        all.into_iter().map(|t| t.join().unwrap()).sum()
    });
    v.sync().unwrap();
    let full = v.statfs();
    assert!(wrote > empty.available - 1024, "{threads} threads: {wrote} of {}", empty.available);
    assert_eq!(full.available, 0, "{threads} threads: {full:?}");
    drop(files);
    (0..FILES).for_each(|i| v.unlink(dir, format!("f{i}").as_bytes()).unwrap());
    v.sync().unwrap();
    let free = v.statfs().free;
    // the directory may keep a block for its names
    assert!(empty.free - free <= 1, "{threads} threads: {empty:?}, {free}");
    v.unmount().unwrap();
    fsck(std::slice::from_ref(&d)).unwrap();
    wrote
}

/// What slots of threads keep for themselves is found by whoever needs it.
#[test]
fn many_threads_find_as_much_room_as_one() {
    let (one, many) = (fill_with_threads(1), fill_with_threads(64));
    // extents lie otherwise: node blocks more or less
    assert!(one.abs_diff(many) <= 32, "{one} blocks with one thread, {many} with 64");
}

/// What a file of the tests below holds in its block `n`.
fn block_of(file: usize, n: u64) -> Vec<u8> {
    let mut block = vec![file as u8; BLOCK as usize];
    block[..8].copy_from_slice(&n.to_le_bytes());
    block
}

fn check_file(v: &Volume, f: &OpenFile, number: usize, blocks: u64) {
    let mut seen = vec![0; BLOCK as usize];
    for n in 0..blocks {
        assert_eq!(v.read(f, n * BLOCK, &mut seen).unwrap(), seen.len());
        assert_eq!(seen, block_of(number, n), "block {n} of file {number}");
    }
}

/// A domain whose groups are all in use to a quarter has room for another that lacks it: its groups are emptied, and its
/// files stay what they are, also for those who read and overwrite them meanwhile.
#[test]
fn groups_in_use_are_emptied_for_the_domain_that_needs_them() {
    const BLOCKS: u64 = 128;
    for domains in [2, 8] {
        let d = device(96, domains);
        let v = mount(&d);
        let [a, b] = two_directories(&v);
        let mut files = Vec::new();
        'full: loop {
            let number = files.len();
            let f = file(&v, b, &format!("f{number}"));
            for n in 0..BLOCKS {
                match v.write(&f, n * BLOCK, &block_of(number, n)) {
                    Ok(_) => {}
                    Err(Error::NoSpace) => break 'full,
                    Err(e) => panic!("file {number}: {e}"),
                }
            }
            files.push(f);
        }
        v.unlink(b, format!("f{}", files.len()).as_bytes()).unwrap();
        v.sync().unwrap();
        for n in (0..files.len()).filter(|n| n % 4 != 1) {
            v.unlink(b, format!("f{n}").as_bytes()).unwrap();
        }
        let kept: Vec<_> = files.into_iter().enumerate().filter(|(n, _)| n % 4 == 1).collect();
        v.sync().unwrap();
        let (told, free) = (offered(&v, a), v.statfs().free * BLOCK);
        let target = file(&v, a, "target");
        let stop = std::sync::atomic::AtomicBool::new(false);
        let written = std::thread::scope(|s| {
            for half in 0..2 {
                let (v, kept, stop) = (&v, &kept, &stop);
                s.spawn(move || {
                    let mut round = 0;
                    while !stop.load(std::sync::atomic::Ordering::Relaxed) || round == 0 {
                        for (number, f) in kept.iter().filter(|(n, _)| n / 4 % 2 == half) {
                            let n = round % BLOCKS;
                            match v.write(f, n * BLOCK, &block_of(*number, n)) {
                                Ok(_) | Err(Error::NoSpace) => {}
                                Err(e) => panic!("file {number}: {e}"),
                            }
                            check_file(v, f, *number, BLOCKS);
                        }
                        round += 1;
                    }
                });
            }
            let written = fill(&v, &target, 9);
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
            written
        });
        let why = format!("{domains} domains: {written} written, {told} told of, {free} free");
        assert!(told < free / 2, "{why}: groups are empty");
        assert!(written > free * 6 / 10, "{why}");
        kept.iter().for_each(|(number, f)| check_file(&v, f, *number, BLOCKS));
        v.sync().unwrap();
        kept.iter().for_each(|(number, f)| check_file(&v, f, *number, BLOCKS));
        // what several threads had reserved where they were refused is given back when something is committed
        drop(file(&v, a, "more"));
        v.sync().unwrap();
        v.unlink(a, b"more").unwrap();
        v.sync().unwrap();
        drop((kept, target));
        let live = v.statfs();
        v.unmount().unwrap();
        fsck(std::slice::from_ref(&d)).unwrap();
        let v = mount(&d);
        assert_eq!(v.statfs().free, live.free);
        v.unmount().unwrap();
    }
}

/// What a front end has accepted for a domain stays its room: neither its empty groups nor those in use go to a domain that lacks
/// room, until the front end says so; and the domain has it, to the last block.
#[test]
fn what_a_front_end_has_accepted_stays_room_of_its_domain() {
    for in_pieces in [false, true] {
        let d = device(96, 2);
        let v = mount(&d);
        let [a, b] = two_directories(&v);
        let domain = v.domain_of(b).unwrap();
        let mut files = Vec::new();
        loop {
            let f = file(&v, b, &format!("f{}", files.len()));
            let Ok(_) = v.fallocate(&f, FallocMode::Allocate { keep_size: false }, 0, MIB) else { break };
            files.push(f);
        }
        v.unlink(b, format!("f{}", files.len()).as_bytes()).unwrap();
        for (n, f) in files.iter().enumerate() {
            if in_pieces && n % 4 == 1 {
                // blocks without a fixed place
                fill_to(&v, f, MIB);
            } else {
                v.unlink(b, format!("f{n}").as_bytes()).unwrap();
            }
        }
        files.retain(|f| v.getattr(f.ino()).is_ok_and(|attr| attr.nlink > 0));
        v.sync().unwrap();
        let want = v.own_room(domain) / 2;
        assert!(want > 4 * MIB / BLOCK, "{want} blocks");
        let told = v.statfs_of(a).unwrap().available;
        v.keep_room(domain, want);
        // it is there for others once the front end needs it no more, as it does not by the time that anybody is refused
        assert_eq!(v.statfs_of(a).unwrap().available, told);
        let target = file(&v, a, "target");
        let first = fill(&v, &target, 1);
        let left = v.own_room(domain);
        assert!(left >= want, "{left} blocks are left of {want}, in pieces: {in_pieces}");
        // what was accepted comes
        let accepted = file(&v, b, "accepted");
        let piece = vec![7; 64 << 10];
        for n in 0..want * BLOCK / (64 << 10) {
            assert_eq!(v.write_accepted(&accepted, n * (64 << 10), &piece).unwrap(), piece.len(), "{n}");
        }
        v.fsync(accepted.ino(), false).unwrap();
        v.unlink(b, b"accepted").unwrap();
        drop(accepted);
        v.sync().unwrap();
        v.keep_room(domain, 0);
        let more = fill(&v, &file(&v, a, "more"), 2);
        assert!(more > first / 8 && more > 2 * MIB, "{first} bytes first, then {more}");
        drop((files, target));
        v.unmount().unwrap();
        fsck(std::slice::from_ref(&d)).unwrap();
    }
}

/// Writes a file from its beginning to `bytes`.
fn fill_to(v: &Volume, f: &OpenFile, bytes: u64) {
    let piece = vec![5; 64 << 10];
    for at in (0..bytes).step_by(piece.len()) {
        assert_eq!(v.write(f, at, &piece).unwrap(), piece.len());
    }
}

/// A group that nobody has is a domain's own when a front end asks for room, and none is taken for what it cannot have.
#[test]
fn room_is_claimed_where_it_suffices() {
    let d = device(96, 2);
    let v = mount(&d);
    let [a, _] = two_directories(&v);
    let f = file(&v, a, "f");
    let domain = v.domain_of(a).unwrap();
    let (own, all) = (v.own_room(domain), v.domain_room(domain));
    assert!(own < all && v.sure_room(domain) <= all, "{own} of {all}");
    assert_eq!(v.claim_room(f.ino(), all + 1000).unwrap(), own, "more than there is");
    let want = own + (all - own) / 2;
    assert!(v.claim_room(f.ino(), want).unwrap() >= want);
    assert!(v.own_room(domain) >= want && v.domain_room(domain) >= all - all / 50);
    v.unmount().unwrap();
}

/// A group in which another domain has nothing but metadata is one that can be had: who asks for room gets it once that is
/// written elsewhere.
#[test]
fn room_is_claimed_where_only_metadata_lies() {
    let d = device(192, 2);
    let v = mount(&d);
    let [a, b] = two_directories(&v);
    let f = file(&v, a, "f");
    let domain = v.domain_of(a).unwrap();
    // the other domain takes all there is, then keeps only names in it
    let mut files = 0;
    'full: loop {
        let large = file(&v, b, &format!("large{files}"));
        let to = fill(&v, &large, 3);
        files += 1;
        // in each group some blocks of metadata
        for n in 0..64 {
            if create(&v, b, &format!("{files}-{n:0200}"), FileKind::File).is_err() {
                break 'full;
            }
        }
        if to < MIB {
            break;
        }
    }
    for n in 0..files {
        v.unlink(b, format!("large{n}").as_bytes()).unwrap();
    }
    v.sync().unwrap();
    let (own, all) = (v.own_room(domain), v.domain_room(domain));
    assert!(own < all, "{own} of {all}");
    let has = v.claim_room(f.ino(), all).unwrap();
    assert!(has >= all, "{has} of {all} blocks, {own} before");
    v.unmount().unwrap();
    fsck(std::slice::from_ref(&d)).unwrap();
}
