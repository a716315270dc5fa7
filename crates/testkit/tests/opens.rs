//! Many threads open, remove, rename and close files of all domains, also those that others opened, in a cache that holds
//! few of them: an open file keeps its content, and in the end every inode and block is free.
//!
//! `BRAIDFS_OPENS_STEPS` (default 20000) of each thread, `BRAIDFS_OPENS_THREADS` (8), `BRAIDFS_SEED` (1).
#![cfg(feature = "schedule")]

use braidfs::device::{Device, MemDevice};
use braidfs::{Cred, FileKind, InodeNo, MkfsOptions, MountOptions, NewNode, OpenFile, OpenHow, Placement, RenameMode};
use braidfs::{DomainId, Error, Volume, mkfs};
use braidfs_testkit::env_number;
use braidfs_testkit::walk::fsck;
use std::sync::{Arc, Mutex};
use std::time::Duration;

const DOMAINS: u16 = 3;

/// What others' removals make impossible is no error here.
fn sane<T>(r: Result<T, Error>) -> Option<T> {
    match r {
        Ok(t) => Some(t),
        Err(e @ (Error::Io(_) | Error::Corrupt(_) | Error::DomainFailed { .. })) => panic!("{e}"),
        Err(_) => None,
    }
}

#[test]
fn opens_removals_and_evictions() {
    braidfs_sync::pins::pin_from_now();
    let device: Arc<dyn Device> = Arc::new(MemDevice::soiled(65536));
    let o = MkfsOptions { domains: Some(DOMAINS), placement: Placement::Spread, ..MkfsOptions::default() };
    mkfs::format(std::slice::from_ref(&device), &o).unwrap();
    let options =
        MountOptions { commit_interval: Duration::from_millis(5), cache_bytes: 256 << 10, ..MountOptions::default() };
    let v = Volume::mount(vec![device.clone()], options).unwrap();
    let me = Cred::root();
    for d in 0..6 {
        v.mkdir_path(format!("d{d}").as_bytes(), 0o755, &me).unwrap();
    }
    v.sync().unwrap();
    v.commit_domain(DomainId(0), true).unwrap();
    let base = v.statfs();
    let handed_on = Mutex::new(Vec::<(u64, OpenFile)>::new());
    let seed = env_number("BRAIDFS_SEED", 1);
    println!("seed {seed}");
    std::thread::scope(|s| {
        for t in 0..env_number("BRAIDFS_OPENS_THREADS", 8) {
            let (v, me, handed_on) = (&v, &me, &handed_on);
            s.spawn(move || {
                let mut r = fastrand::Rng::with_seed(seed << 8 | t);
                let mut open: Vec<(u64, OpenFile)> = Vec::new();
                let how = |create, exclusive| OpenHow {
                    read: true,
                    write: true,
                    create,
                    exclusive,
                    mode: 0o644,
                    ..OpenHow::default()
                };
                let check = |(stamp, f): &(u64, OpenFile)| {
                    let mut b = [0; 8];
                    assert_eq!(v.read(f, 0, &mut b).unwrap(), 8, "{}", f.ino());
                    assert_eq!(u64::from_le_bytes(b), *stamp);
                    assert!(v.getattr(f.ino()).is_ok());
                };
                for _ in 0..env_number("BRAIDFS_OPENS_STEPS", 20_000) {
                    let path = |r: &mut fastrand::Rng| {
                        let long = if r.u64(..4) == 0 { "-a-name-of-more-than-thirty-one-bytes" } else { "" };
                        format!("d{}/n{}{long}", r.u64(..6), r.u64(..40))
                    };
                    let (a, b) = (path(&mut r), path(&mut r));
                    match r.u64(..100) {
                        0..30 => {
                            if let Some(f) = sane(v.open_path(a.as_bytes(), how(false, false), me)) {
                                let mut b = [0; 8];
                                if v.read(&f, 0, &mut b).unwrap() == 8 {
                                    open.push((u64::from_le_bytes(b), f));
                                }
                            }
                        }
                        30..45 => {
                            if let Some(f) = sane(v.open_path(a.as_bytes(), how(true, true), me)) {
                                let stamp = u64::from(f.generation()) << 40 | f.ino().0;
                                v.write(&f, 0, &stamp.to_le_bytes()).unwrap();
                                open.push((stamp, f));
                            }
                        }
                        45..60 => drop(sane(v.unlink_path(a.as_bytes(), me))),
                        60..68 => drop(sane(v.rename_path(a.as_bytes(), b.as_bytes(), RenameMode::Replace, me))),
                        68..72 => drop(sane(v.rename_path(a.as_bytes(), b.as_bytes(), RenameMode::Exchange, me))),
                        72..76 => drop(sane(v.link_path(a.as_bytes(), b.as_bytes(), me))),
                        76..84 => drop(sane(v.resolve(a.as_bytes(), true, me))),
                        84..86 => {
                            if let Some(d) = sane(v.resolve(format!("d{}", r.u64(..6)).as_bytes(), true, me)) {
                                let mut n = 0;
                                sane(v.readdir_plus(d.ino, 0, &mut |_, _| {
                                    n += 1;
                                    true
                                }));
                            }
                        }
                        86..88 => {
                            let new = NewNode { kind: FileKind::File, mode: 0o600, umask: 0, rdev: 0, target: b"" };
                            if let Some((attr, f)) = sane(v.tmpfile(InodeNo::ROOT, &new, me)) {
                                let stamp = u64::from(attr.generation) << 40 | attr.ino.0;
                                v.write(&f, 0, &stamp.to_le_bytes()).unwrap();
                                if let Some(d) = sane(v.resolve(b"d0", true, me)).filter(|_| r.u64(..2) == 0) {
                                    let _ = sane(v.link(attr.ino, d.ino, format!("n{}", r.u64(..40)).as_bytes()));
                                }
                                open.push((stamp, f));
                            }
                        }
                        88..90 => {
                            if let Some((_, f)) = open.last() {
                                drop(v.fsync(f.ino(), r.u64(..2) == 0));
                            }
                        }
                        90..94 => {
                            if let Some(o) = open.pop() {
                                check(&o);
                                handed_on.lock().unwrap().push(o);
                            }
                        }
                        94..98 => {
                            let o = handed_on.lock().unwrap().pop();
                            if let Some(o) = o {
                                check(&o);
                                if r.u64(..2) == 0 {
                                    open.push(o)
                                }
                            }
                        }
                        _ => {
                            if let Some((_, f)) = open.first()
                                && let Ok(g) = v.open(f.ino())
                            {
                                open.push((open[0].0, g));
                            }
                        }
                    }
                    while open.len() > 24 {
                        let o = open.swap_remove(r.u64(..24) as usize);
                        check(&o);
                    }
                }
                open.iter().for_each(check);
            });
        }
    });
    drop(handed_on);
    for d in 0..6 {
        let dir = v.resolve(format!("d{d}").as_bytes(), true, &me).unwrap().ino;
        let mut names = Vec::new();
        v.readdir(dir, 2, &mut |e| {
            names.push(e.name.to_vec());
            true
        })
        .unwrap();
        for n in names {
            v.unlink(dir, &n).unwrap();
        }
    }
    // the background deletes what waited for another domain
    let mut end = v.statfs();
    for _ in 0..100 {
        if end.inodes_free == base.inodes_free {
            break;
        }
        std::thread::sleep(Duration::from_millis(50));
        v.sync().unwrap();
        for d in 0..DOMAINS {
            v.commit_domain(DomainId(d), true).unwrap();
        }
        end = v.statfs();
    }
    assert_eq!(base.inodes_free, end.inodes_free, "inodes that never ended");
    let lost = base.free.abs_diff(end.free);
    assert!(lost < 40, "{lost} blocks");
    v.unmount().unwrap();
    fsck(&[device]).unwrap();
}
