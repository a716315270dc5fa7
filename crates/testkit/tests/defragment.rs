//! Files that were written in pieces are made whole: what they hold, where it lies, and what others do meanwhile.

use braidfs::{DomainId, Error, FallocMode, MkfsOptions, OpenFile, SetAttr, Volume};
use braidfs_device::Device;
use braidfs_testkit::defragment::{block, every_crash, in_pieces, options, whole};
use braidfs_testkit::small::{self, ALL, BLOCK, MIB, ROOT, beside, close, file, fill, memory};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

fn volume(mib: u64) -> ([Arc<dyn Device>; 1], Volume) {
    let all = [memory(mib)];
    small::format(&all, &[mib], &MkfsOptions { domains: Some(1), ..MkfsOptions::default() });
    let v = Volume::mount(all.to_vec(), options()).unwrap();
    (all, v)
}

fn holds(v: &Volume, f: &OpenFile, blocks: u64, version: u64) {
    let mut got = vec![0; BLOCK as usize];
    for b in 0..blocks {
        v.read(f, b * BLOCK, &mut got).unwrap();
        assert!(got == block(b, version), "block {b} is another");
    }
}

#[test]
fn a_file_in_pieces_becomes_whole() {
    const BLOCKS: u64 = 4096;
    let (all, v) = volume(128);
    let f = file(&v, ROOT, "f");
    in_pieces(&v, &f, BLOCKS).unwrap();
    v.commit_domain(DomainId(0), true).unwrap();
    let (before, attr, free) = (v.pieces(f.ino()).unwrap(), v.getattr(f.ino()).unwrap(), v.statfs().free);
    assert!(before.pieces > BLOCKS / 2 && before.are_short() && before.blocks == BLOCKS, "{before:?}");
    assert_eq!(before.pieces as usize, pieces_of(&v, &f), "as the extents tell");
    assert!(whole(&v, &f).unwrap() > BLOCKS / 2);
    let after = v.pieces(f.ino()).unwrap();
    assert!(after.pieces <= BLOCKS / 256 && !after.are_short() && after.blocks == BLOCKS, "{after:?}");
    assert_eq!(after.pieces as usize, pieces_of(&v, &f));
    let now = v.getattr(f.ino()).unwrap();
    assert_eq!((now.mtime, now.ctime, now.size, now.sectors), (attr.mtime, attr.ctime, attr.size, attr.sectors));
    holds(&v, &f, BLOCKS, 1);
    v.commit_domain(DomainId(0), true).unwrap();
    // what the extents took of metadata comes back, too
    assert!(v.statfs().free >= free, "{} blocks free, {free} before", v.statfs().free);
    assert_eq!(whole(&v, &f).unwrap(), 0, "once is enough");
    drop(f);
    close(v, &all);
    let v = Volume::mount(all.to_vec(), options()).unwrap();
    let f = v.open(v.lookup(ROOT, b"f").unwrap().ino).unwrap();
    assert_eq!(v.pieces(f.ino()).unwrap(), after);
    holds(&v, &f, BLOCKS, 1);
    drop(f);
    close(v, &all);
}

/// Runs of blocks that lie side by side.
fn pieces_of(v: &Volume, f: &OpenFile) -> usize {
    let all = v.extents(f.ino()).unwrap();
    let follows = |w: &[braidfs::FileExtent]| {
        let (a, b) = (w[0].place.unwrap(), w[1].place.unwrap());
        w[0].offset + w[0].len == w[1].offset && a.0 == b.0 && a.1 + w[0].len == b.1
    };
    1 + all.windows(2).filter(|w| !follows(w)).count()
}

/// Blocks of such a file must not move beside writes that go where they lie.
#[test]
fn what_is_always_overwritten_in_place_stays() {
    let (all, v) = volume(64);
    let (f, gap) = (file(&v, ROOT, "f"), file(&v, ROOT, "gap"));
    for b in 0..200 {
        v.write(&f, b * BLOCK, &block(b, 1)).unwrap();
        v.write(&gap, b * BLOCK, &block(b, 1)).unwrap();
        v.sync().unwrap();
    }
    // it has a place for all of its blocks, and takes no others from now on
    v.fallocate(&f, FallocMode::Allocate { keep_size: true }, 0, 200 * BLOCK).unwrap();
    v.sync().unwrap();
    let before = v.extents(f.ino()).unwrap();
    assert!(before.len() > 100, "{} extents", before.len());
    assert!(v.pieces(f.ino()).unwrap().stays);
    assert_eq!(whole(&v, &f).unwrap(), 0);
    assert_eq!(v.extents(f.ino()).unwrap(), before);
    let dir = small::create(&v, ROOT, "d", braidfs::FileKind::Dir);
    assert!(matches!(v.defragment(dir, 0), Err(Error::IsDir)));
    let immutable = SetAttr { flags: Some(braidfs::format::inode::IMMUTABLE), ..SetAttr::default() };
    v.setattr(gap.ino(), &immutable).unwrap();
    assert!(whole(&v, &gap).unwrap() > 0, "content that cannot change may move");
    holds(&v, &gap, 200, 1);
    drop((f, gap));
    close(v, &all);
}

#[test]
fn it_takes_no_room_that_is_not_there() {
    let (all, v) = volume(64);
    let f = file(&v, ROOT, "f");
    in_pieces(&v, &f, 1500).unwrap();
    let big = file(&v, ROOT, "big");
    fill(&v, &big, ALL);
    v.sync().unwrap();
    let before = v.extents(f.ino()).unwrap();
    match v.defragment(f.ino(), 0) {
        Err(Error::NoSpace) => {}
        other => panic!("{other:?}"),
    }
    holds(&v, &f, 1500, 1);
    assert_eq!(v.extents(f.ino()).unwrap(), before);
    drop(big);
    v.unlink(ROOT, b"big").unwrap();
    v.sync().unwrap();
    assert!(whole(&v, &f).unwrap() > 1000);
    holds(&v, &f, 1500, 1);
    drop(f);
    close(v, &all);
}

/// Threads overwrite, read and sync the file while it is made whole again and again: each block has the last write of it, and
/// no reader sees an older one than before.
#[test]
fn what_others_write_meanwhile_counts() {
    const BLOCKS: u64 = 600;
    const THREADS: u8 = 3;
    let (all, v) = volume(96);
    let f = file(&v, ROOT, "f");
    in_pieces(&v, &f, BLOCKS).unwrap();
    // of each block the last version that a write of it returned with
    let done: Vec<AtomicU64> = (0..BLOCKS).map(|_| AtomicU64::new(1)).collect();
    let round = |thread: u8, n: u64| {
        let mut rng = fastrand::Rng::with_seed(u64::from(thread) << 32 | n);
        for _ in 0..40 {
            // a thread writes blocks of its own, and reads all
            let own = rng.u64(..BLOCKS / u64::from(THREADS)) * u64::from(THREADS) + u64::from(thread);
            let version = done[own as usize].load(Ordering::Acquire) + 1;
            v.write(&f, own * BLOCK, &block(own, version)).unwrap();
            done[own as usize].store(version, Ordering::Release);
            let b = rng.u64(..BLOCKS);
            let least = done[b as usize].load(Ordering::Acquire);
            let mut got = vec![0; BLOCK as usize];
            v.read(&f, b * BLOCK, &mut got).unwrap();
            let is = u64::from_le_bytes(got[..8].try_into().unwrap());
            assert!(is >> 32 == b && is & 0xffff_ffff >= least, "block {b}: {is:x}, {least} was written");
            assert!(got == block(b, is & 0xffff_ffff), "block {b} is torn");
        }
        if n.is_multiple_of(2) {
            v.fsync(f.ino(), false).unwrap();
        }
    };
    let mut moved = 0;
    beside(THREADS, round, || {
        for _ in 0..5 {
            // what they overwrote is free once that is durable
            let mut again = 0;
            moved += loop {
                match whole(&v, &f) {
                    Err(Error::NoSpace) if again < 100 => again += 1,
                    moved => break moved.unwrap(),
                }
                v.sync().unwrap();
            };
            // it falls to pieces as they write
            while !v.pieces(f.ino()).unwrap().are_short() {
                std::thread::yield_now();
            }
        }
    });
    assert!(moved > 2 * BLOCKS, "{moved} blocks moved");
    let holds = |v: &Volume, f: &OpenFile| {
        for b in 0..BLOCKS {
            let mut got = vec![0; BLOCK as usize];
            v.read(f, b * BLOCK, &mut got).unwrap();
            assert!(got == block(b, done[b as usize].load(Ordering::Relaxed)), "block {b} is another");
        }
    };
    holds(&v, &f);
    drop(f);
    close(v, &all);
    let v = Volume::mount(all.to_vec(), options()).unwrap();
    let f = v.open(v.lookup(ROOT, b"f").unwrap().ino).unwrap();
    holds(&v, &f);
    assert!(v.getattr(f.ino()).unwrap().size == BLOCKS * BLOCK && MIB > BLOCK);
    drop(f);
    close(v, &all);
}

#[test]
fn a_crash_at_any_moment_leaves_the_content() {
    for sums in [false, true] {
        let (states, whole) = every_crash(sums).unwrap();
        println!("data checksums {sums}: {states} states, the file was whole in {whole}");
        assert!(whole > 10 && states - whole > 10, "{states} states, the file was whole in {whole}");
    }
    planted();
}

#[cfg(not(feature = "planted-bugs"))]
fn planted() {}

/// The commit tells of new places before the content is there. (One test with the above: a planted bug is one of the whole
/// process. The other tests here crash nothing.)
#[cfg(feature = "planted-bugs")]
fn planted() {
    use braidfs::planted::{Bug, plant};
    plant(Some(Bug::NoFlushBeforeCommit));
    let seen = every_crash(false);
    plant(None);
    println!("{}", seen.expect_err("the bug was not seen"));
}
