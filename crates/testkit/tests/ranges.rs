//! Collapsing and inserting ranges of files: random mixes with all other changes of one file, remounted and crashed in
//! between; how much is written; what is refused.

use braidfs::OpenHow;
use braidfs::format::inode::{APPEND, IMMUTABLE};
use braidfs::{Cred, Error, FallocMode, MkfsOptions, MountOptions, OpenFile, SetAttr, Volume, mkfs};
use braidfs_check::online::{ScrubOptions, scrub_mounted};
use braidfs_device::{CountDevice, Device, MemDevice};
use braidfs_testkit::ops::{At, Op, P};
use braidfs_testkit::run::{Act, Setup, Stats, acts_to_rust, replay};
use braidfs_testkit::walk::fsck;
use std::sync::Arc;

const PAGE: u64 = 4096;
use FallocMode::{CollapseRange, InsertRange};

fn options() -> MountOptions {
    MountOptions { background: false, ..MountOptions::default() }
}

fn volume(blocks: u64, o: &MkfsOptions) -> (Arc<CountDevice>, Volume) {
    let device = Arc::new(CountDevice::new(Arc::new(MemDevice::soiled(blocks))));
    mkfs::format(&[device.clone() as Arc<dyn Device>], o).unwrap();
    let v = Volume::mount(vec![device.clone()], options()).unwrap();
    (device, v)
}

fn create(v: &Volume, name: &str) -> OpenFile {
    let how = OpenHow { read: true, write: true, create: true, mode: 0o644, ..OpenHow::default() };
    v.open_path(name.as_bytes(), how, &Cred::root()).unwrap()
}

fn content(v: &Volume, f: &OpenFile) -> Vec<u8> {
    let mut all = vec![0; v.getattr(f.ino()).unwrap().size as usize];
    assert_eq!(v.read(f, 0, &mut all).unwrap(), all.len());
    all
}

/// Random changes of one file, of which two in five move its blocks.
fn acts(seed: u64, crashes: bool) -> Vec<Act> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let path = P("f");
    let at = At::Path(path);
    let mut acts = vec![Act::Do(Op::Create { path, kind: braidfs::FileKind::File, mode: 0o644 })];
    for n in 0..250 {
        let (off, len) = (rng.u64(..160_000), rng.u64(1..30_000));
        let (block, blocks) = (rng.u64(..30) * PAGE, rng.u64(1..6) * PAGE);
        let keep_size = rng.bool();
        let mode = |mode, off, len| Op::Fallocate { at, mode, off, len };
        acts.push(Act::Do(match rng.u8(..20) {
            0..6 => Op::Write { at, off, len: len as u32, seed: n },
            6..10 => mode(CollapseRange, block, blocks),
            10..14 => mode(InsertRange, block, blocks),
            14 => mode(FallocMode::PunchHole, off, len),
            15 if seed.is_multiple_of(2) => mode(FallocMode::Allocate { keep_size }, off, len),
            15 => mode(InsertRange, 0, PAGE),
            16 if seed.is_multiple_of(2) => mode(FallocMode::ZeroRange { keep_size }, off, len),
            16 => Op::Trim,
            17 => Op::Truncate { at, size: off },
            18 => Op::Fsync { at, data_only: keep_size },
            _ => Op::Sync,
        }));
        acts.push(Act::Do(Op::Read { at, off: 0, len: 400_000 }));
        match rng.u8(..40) {
            0 => acts.push(Act::Remount),
            1..3 if crashes => acts.push(Act::Crash { seed: rng.u64(..) }),
            _ => {}
        }
    }
    acts.push(Act::Remount);
    acts
}

fn random(crashes: bool, first: u64) {
    let mut sum = Stats::default();
    for seed in first..first + 40 {
        let acts = acts(seed, crashes);
        match replay(&Setup::vary(seed), &acts) {
            Ok(stats) => sum.add(&stats),
            Err(why) => {
                let short = braidfs_testkit::shrink::shrink(&acts, std::time::Duration::from_secs(60), |a| {
                    replay(&Setup::vary(seed), a).is_err()
                });
                panic!("seed {seed}: {why}\n{}{:?}", acts_to_rust(&short), replay(&Setup::vary(seed), &short));
            }
        }
    }
    println!("{sum:?}");
    // one file of some hundred KiB has room on 64 MiB
    sum.full.within(&[]).unwrap();
    // two in five of 10,000 changes move blocks, and nearly half of these are refused, as they begin behind the file
    assert!(sum.moves > 1000, "{sum:?}");
    assert_eq!(sum.crashes > 0, crashes, "{sum:?}");
}

#[test]
fn as_the_model_over_remounts() {
    random(false, 0);
}

#[test]
fn as_the_model_over_crashes() {
    random(true, 1000);
}

#[test]
fn blocks_move_and_no_data_is_written() {
    for data_checksums in [false, true] {
        let o = MkfsOptions { data_checksums, domains: Some(1), ..MkfsOptions::default() };
        let (device, v) = volume(32_768, &o);
        let f = create(&v, "f");
        let mut want: Vec<u8> = (0..32 << 20).map(|i: u32| (i / 4096 * 7 + i % 251) as u8).collect();
        v.write(&f, 0, &want).unwrap();
        v.sync().unwrap();
        let (before, free) = (device.counters(), v.statfs().free);
        v.fallocate(&f, CollapseRange, 8 * PAGE, 100 * PAGE).unwrap();
        v.fallocate(&f, InsertRange, 4000 * PAGE, 1000 * PAGE).unwrap();
        v.fallocate(&f, InsertRange, 0, PAGE).unwrap();
        v.sync().unwrap();
        let written = (device.counters() - before).write_blocks * 4096;
        assert!(written < 1 << 20, "{written} bytes written to move 32 MiB");
        // a node block may come or go
        assert!((free + 90..=free + 100).contains(&v.statfs().free), "{} after {free}", v.statfs().free);
        drop(want.drain(8 * 4096..108 * 4096));
        drop(want.splice(4000 * 4096..4000 * 4096, vec![0; 1000 * 4096]));
        drop(want.splice(0..0, vec![0; 4096]));
        assert!(content(&v, &f) == want);
        let r = scrub_mounted(&v, &ScrubOptions::default(), &mut |_, _, _| true);
        assert!(r.findings.is_empty(), "{:?}", r.findings);
        drop(f);
        v.unmount().unwrap();
        fsck(&[device.clone() as Arc<dyn Device>]).unwrap();
        let v = Volume::mount(vec![device], options()).unwrap();
        let f = create(&v, "f");
        assert!(content(&v, &f) == want, "after a mount");
        // the cleaner finds the blocks where they are now
        v.clean(8).unwrap();
        assert!(content(&v, &f) == want);
    }
}

/// What FIEMAP would tell: read there on the device, it is the file's content.
#[test]
fn extents_say_where_it_lies() {
    let (device, v) = volume(16_384, &MkfsOptions::default());
    let f = create(&v, "f");
    v.write(&f, 0, b"small").unwrap();
    let small = v.extents(f.ino()).unwrap();
    assert!(small.len() == 1 && small[0].place.is_none(), "{small:?}");
    let mut want: Vec<u8> = (0..400_000u32).map(|i| (i / 4096 + i % 253) as u8).collect();
    v.write(&f, 0, &want).unwrap();
    let waiting = v.extents(f.ino()).unwrap();
    assert!(waiting.iter().all(|e| e.place.is_none()) && waiting[0].len == 98 * PAGE, "{waiting:?}");
    v.sync().unwrap();
    v.fallocate(&f, InsertRange, 3 * PAGE, 5 * PAGE).unwrap();
    v.fallocate(&f, FallocMode::Allocate { keep_size: false }, 5 * PAGE, PAGE).unwrap();
    v.sync().unwrap();
    drop(want.splice(3 * 4096..3 * 4096, vec![0; 5 * 4096]));
    let mut got = vec![0; want.len()];
    let extents = v.extents(f.ino()).unwrap();
    for e in &extents {
        let (number, byte) = e.place.unwrap();
        assert!(number == 0 && e.len.is_multiple_of(PAGE));
        let mut data = vec![0; e.len as usize];
        device.read(byte / PAGE, &mut data).unwrap();
        let n = data.len().min(got.len() - e.offset as usize);
        if !e.unwritten {
            got[e.offset as usize..][..n].copy_from_slice(&data[..n]);
        }
    }
    assert!(got == want && extents.iter().filter(|e| e.unwritten).count() == 1, "{extents:?}");
    assert!(matches!(v.extents(braidfs::InodeNo::ROOT), Err(Error::IsDir)));
}

#[test]
fn refused_as_on_ext4() {
    let (_, v) = volume(16_384, &MkfsOptions::default());
    let f = create(&v, "f");
    v.write(&f, 0, &[7; 20_000]).unwrap();
    let errno = |mode, off, len| v.fallocate(&f, mode, off, len).map_err(|e| e.errno()).err();
    for (mode, off, len, want) in [
        (CollapseRange, 0, 0, libc_errno::EINVAL),
        (CollapseRange, 100, PAGE, libc_errno::EINVAL),
        (CollapseRange, 0, 100, libc_errno::EINVAL),
        (CollapseRange, PAGE, 4 * PAGE, libc_errno::EINVAL),
        (CollapseRange, 8 * PAGE, PAGE, libc_errno::EINVAL),
        (InsertRange, 1, PAGE, libc_errno::EINVAL),
        (InsertRange, 5 * PAGE, PAGE, libc_errno::EINVAL),
        (InsertRange, 0, (1 << 60) - PAGE, libc_errno::EFBIG),
        (InsertRange, PAGE, u64::MAX - PAGE + 1, libc_errno::EFBIG),
    ] {
        assert_eq!(errno(mode, off, len), Some(want), "{mode:?} {off} {len}");
    }
    assert_eq!(content(&v, &f), [7; 20_000]);
    for flags in [IMMUTABLE, APPEND] {
        v.setattr(f.ino(), &SetAttr { flags: Some(flags), ..SetAttr::default() }).unwrap();
        assert_eq!(errno(CollapseRange, 0, PAGE), Some(libc_errno::EPERM));
        assert_eq!(errno(InsertRange, 0, PAGE), Some(libc_errno::EPERM));
    }
    v.setattr(f.ino(), &SetAttr { flags: Some(0), ..SetAttr::default() }).unwrap();
    let before = v.getattr(f.ino()).unwrap();
    v.fallocate(&f, CollapseRange, 0, PAGE).unwrap();
    let after = v.getattr(f.ino()).unwrap();
    assert!(after.size == 20_000 - PAGE && after.sectors == before.sectors - 8 && after.mtime >= before.mtime);
}

/// Values of Linux, so that the test does not depend on a crate for three numbers.
mod libc_errno {
    pub const EPERM: i32 = 1;
    pub const EINVAL: i32 = 22;
    pub const EFBIG: i32 = 27;
}

#[test]
fn very_many_extents_are_refused_and_stay() {
    let o = MkfsOptions { domains: Some(1), journal_bytes: Some(512 << 10), ..MkfsOptions::default() };
    let (device, v) = volume(32_768, &o);
    let f = create(&v, "f");
    let mut refused = false;
    for n in 0..2000u64 {
        // every other block, so that no two are one extent
        v.write(&f, n * 2 * PAGE, &[n as u8; 4096]).unwrap();
        if n % 500 == 499 {
            v.sync().unwrap();
            let moved = v.fallocate(&f, InsertRange, 0, PAGE).and_then(|()| v.fallocate(&f, CollapseRange, 0, PAGE));
            refused |= matches!(moved, Err(Error::Unsupported(_)));
            assert!(moved.is_ok() || n > 800, "{n}: {moved:?}");
        }
    }
    assert!(refused, "as many extents as the journal cannot take");
    let all = content(&v, &f);
    assert!((0..2000).all(|n| all[n * 8192..n * 8192 + 4096] == [n as u8; 4096]));
    drop(f);
    v.unmount().unwrap();
    fsck(&[device as Arc<dyn Device>]).unwrap();
}

/// Blocks of a file that is overwritten in place are written elsewhere while a move is not durable: a volume without room
/// for that says so at the call, and not later.
#[test]
fn in_place_on_a_full_volume() {
    let o = MkfsOptions { domains: Some(1), ..MkfsOptions::default() };
    let (device, v) = volume(8192, &o);
    let f = create(&v, "f");
    v.fallocate(&f, FallocMode::Allocate { keep_size: false }, 0, 8 << 20).unwrap();
    v.write(&f, 0, &[1; 8 << 20]).unwrap();
    v.sync().unwrap();
    let g = create(&v, "g");
    while v.write(&g, v.getattr(g.ino()).unwrap().size, &[2; 4096]).is_ok() {}
    v.sync().unwrap();
    // dirty pages that nothing is reserved for
    v.write(&f, 0, &[3; 8 << 20]).unwrap();
    let moved = v.fallocate(&f, CollapseRange, 0, PAGE);
    let size = (8 << 20) - if moved.is_ok() { 4096 } else { 0 };
    assert!(moved.is_ok() || matches!(moved, Err(Error::NoSpace)), "{moved:?}");
    v.sync().unwrap();
    assert!(content(&v, &f) == vec![3; size]);
    drop((f, g));
    v.unmount().unwrap();
    fsck(&[device as Arc<dyn Device>]).unwrap();
}
