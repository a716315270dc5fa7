//! Recovery by several threads: what it shows is what one thread would have shown, what cannot be read is no blank journal,
//! and a crash in the middle of it is a crash like any other.

use braidfs::{Cred, FileKind, InodeNo, MkfsOptions, NewNode, Placement, Volume};
use braidfs_device::{Device, Effect, FaultDevice, Image, MemDevice, Op, Rule};
use braidfs_testkit::ops::fill;
use braidfs_testkit::run::{Setup, mount};
use braidfs_testkit::walk::{Seen, fsck, walk};
use std::sync::Arc;

fn setup(threads: usize) -> Setup {
    let mkfs = MkfsOptions {
        domains: Some(4),
        group_bytes: Some(4 << 20),
        journal_bytes: Some(1 << 20),
        placement: Placement::Spread,
        uuid: Some(*b"recovery-threads"),
        ..MkfsOptions::default()
    };
    Setup { mkfs, bytes: 128 << 20, recovery_threads: threads, ..Setup::default() }
}

fn device(image: &Image) -> Arc<dyn Device> {
    Arc::new(MemDevice::from_image(image.clone()))
}

/// Files and directories that come and go and grow, with commits between, and fsyncs after the last of them.
fn work(v: &Volume, rng: &mut fastrand::Rng) {
    let cred = Cred::root();
    let new = |kind| NewNode { kind, mode: 0o755, umask: 0, rdev: 0, target: b"" };
    let mut dirs = vec![InodeNo::ROOT];
    let mut files: Vec<(InodeNo, Vec<u8>, InodeNo)> = Vec::new();
    for i in 0..1500u64 {
        let dir = rng.choice(&dirs).copied().unwrap();
        let name = format!("{i}").into_bytes();
        match rng.u8(..10) {
            0 if dirs.len() < 40 => dirs.push(v.create(dir, &name, &new(FileKind::Dir), &cred).unwrap().ino),
            1 | 2 if !files.is_empty() => {
                let (dir, name, _) = files.swap_remove(rng.usize(..files.len()));
                v.unlink(dir, &name).unwrap();
            }
            3 if !files.is_empty() => {
                let i = rng.usize(..files.len());
                let (from, old, ino) = files[i].clone();
                v.rename(from, &old, dir, &name, Default::default()).unwrap();
                files[i] = (dir, name, ino);
            }
            4 | 5 if !files.is_empty() => {
                let (.., ino) = files[rng.usize(..files.len())];
                let f = v.open(ino).unwrap();
                v.write(&f, rng.u64(..60_000), &fill(i as u32, 0, rng.usize(1..20_000))).unwrap();
            }
            _ => {
                let ino = v.create(dir, &name, &new(FileKind::File), &cred).unwrap().ino;
                let f = v.open(ino).unwrap();
                v.write(&f, 0, &fill(i as u32, 0, rng.usize(..30_000))).unwrap();
                files.push((dir, name, ino));
            }
        }
        if i % 100 == 99 && i < 1400 {
            v.sync().unwrap();
        } else if i % 9 == 0 && !files.is_empty() {
            v.fsync(files[rng.usize(..files.len())].2, false).unwrap();
        }
    }
}

/// A volume that was not unmounted, its journals full of transactions.
fn crashed(seed: u64) -> Image {
    let setup = setup(0);
    let device = Arc::new(MemDevice::from_image(setup.format().unwrap()));
    let v = mount(&[device.clone() as Arc<dyn Device>], &setup).unwrap();
    work(&v, &mut fastrand::Rng::with_seed(seed));
    v.crash();
    device.snapshot()
}

/// All of it that threads may not change: the tree, and what is in use.
fn recovered(image: &Image, threads: usize) -> (Seen, Vec<u64>) {
    let d = device(image);
    let setup = setup(threads);
    let v = mount(std::slice::from_ref(&d), &setup).unwrap();
    let mut seen = walk(&v).unwrap();
    // a link that is mended touches its directory, by the clock of whoever mends
    seen.nodes.values_mut().filter(|n| n.stat.kind == FileKind::Dir).for_each(|n| n.times.forget_changes());
    let s = v.statfs();
    let mut used = vec![s.blocks, s.inodes, s.inodes_free];
    used.extend(v.domains().iter().flat_map(|d| [u64::from(d.groups), d.free, d.inodes_free]));
    v.unmount().unwrap();
    fsck(std::slice::from_ref(&d)).unwrap();
    let again = mount(std::slice::from_ref(&d), &setup).unwrap();
    assert_eq!(again.statfs().inodes_free, s.inodes_free);
    again.crash();
    (seen, used)
}

fn threads_recover_what_one_recovers() {
    for seed in 0..3 {
        let image = crashed(seed);
        let one = recovered(&image, 0);
        assert!(one.0.nodes.len() > 300, "{} objects", one.0.nodes.len());
        for threads in [1, 2, 4] {
            let many = recovered(&image, threads);
            assert!(one.0 == many.0, "seed {seed}, {threads} threads: another tree");
            assert_eq!(one.1, many.1, "seed {seed}, {threads} threads");
        }
    }
}

/// Where the journals lie: the blocks from which nothing but chunks was written.
fn journals(image: &Image) -> Vec<u64> {
    let mut block = vec![0; 4096];
    let is_chunk = |b: &u64| {
        image.read(*b, &mut block).unwrap();
        block[..4] == *b"BRJL"
    };
    let mut used: Vec<u64> = image.used().collect();
    used.sort_unstable();
    used.into_iter().filter(is_chunk).collect()
}

/// Mounts volumes of which some block of a journal cannot be read: with how many threads that is not noticed.
fn unnoticed() -> usize {
    let image = crashed(7);
    let chunks = journals(&image);
    assert!(chunks.len() > 100, "{} chunks", chunks.len());
    let mut rng = fastrand::Rng::with_seed(7);
    let mut unnoticed = 0;
    for threads in [0, 2, 4] {
        let mut noticed = 0;
        for _ in 0..12 {
            let block = rng.choice(&chunks).copied().unwrap();
            let faulty = Arc::new(FaultDevice::new(device(&image), 1));
            faulty.add(Rule::new(Op::Read, Effect::Fail(5)).blocks(block..block + 1));
            let all = [faulty.clone() as Arc<dyn Device>];
            match mount(&all, &setup(threads)) {
                Err(e) if e.contains("os error 5") => noticed += 1,
                Err(_) => continue,
                Ok(v) => {
                    v.crash();
                    continue;
                }
            }
            // and nothing was changed: without the error it is as it would have been
            faulty.clear();
            let v = mount(&all, &setup(threads)).unwrap();
            walk(&v).unwrap();
            v.crash();
        }
        unnoticed += usize::from(noticed < 12);
    }
    unnoticed
}

// one test: a planted bug is one of the whole process
#[test]
fn threads_recover_as_one_does() {
    threads_recover_what_one_recovers();
    assert_eq!(unnoticed(), 0);
    #[cfg(feature = "planted-bugs")]
    {
        braidfs::planted::plant(Some(braidfs::planted::Bug::UnreadableBlank));
        let unnoticed = unnoticed();
        braidfs::planted::plant(None);
        assert!(unnoticed > 0);
    }
}
