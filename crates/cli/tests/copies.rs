//! What `braidfs cp` does where files become others meanwhile.

mod common;
use common::Bench;
use rustix::fs::{CWD, FileType, RenameFlags, mknodat, renameat_with};
use std::io::Write;
use std::os::unix::fs::symlink;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

/// A user who may write a directory from which root copies gets nothing copied that root alone may read, and stops no copy.
#[test]
fn what_takes_the_name_of_a_source_is_not_copied() {
    const FILES: usize = 200;
    let b = Bench::with_volume();
    b.write("secret", "secret");
    std::fs::create_dir(b.path("others")).unwrap();
    for n in 0..FILES {
        b.write(&format!("d/{n}"), "public");
        let other = b.path(&format!("others/{n}"));
        match n % 4 {
            0 => mknodat(CWD, other, FileType::Fifo, 0o600.into(), 0).unwrap(),
            _ => symlink(b.path("secret"), other).unwrap(),
        }
    }
    let stop = AtomicBool::new(false);
    thread::scope(|s| {
        s.spawn(|| {
            let pairs = (0..FILES).map(|n| (b.path(&format!("d/{n}")), b.path(&format!("others/{n}"))));
            let pairs = pairs.collect::<Vec<_>>();
            while !stop.load(Ordering::Relaxed) {
                for (one, other) in &pairs {
                    renameat_with(CWD, one, CWD, other, RenameFlags::EXCHANGE).unwrap();
                }
            }
        });
        for n in 0..20 {
            // some have become others, and are told of
            b.run(&["cp", "-r", "d", &format!("vol.img:/{n}")]);
        }
        stop.store(true, Ordering::Relaxed);
    });
    b.run(&["cp", "-r", "vol.img:/", "out"]).ok();
    let mut copied = 0;
    for dir in 0..20 {
        for n in 0..FILES {
            let path = format!("out/{dir}/{n}");
            if std::fs::symlink_metadata(b.path(&path)).is_ok_and(|m| m.is_file()) {
                assert_eq!(String::from_utf8_lossy(&b.read(&path)), "public", "{path}");
                copied += 1;
            }
        }
    }
    assert!(copied > 0);
}

#[test]
fn a_copy_of_a_file_that_grows_has_no_bytes_that_it_never_had() {
    let b = Bench::with_volume();
    b.write("log", "x");
    let stop = AtomicBool::new(false);
    thread::scope(|s| {
        s.spawn(|| {
            let mut log = std::fs::File::options().append(true).open(b.path("log")).unwrap();
            while !stop.load(Ordering::Relaxed) {
                for _ in 0..20 {
                    log.write_all(b"x").unwrap();
                }
                thread::sleep(Duration::from_micros(20));
            }
        });
        for n in 0..40 {
            b.run(&["cp", "log", &format!("vol.img:/{n}")]).ok();
        }
        stop.store(true, Ordering::Relaxed);
    });
    b.run(&["cp", "-r", "vol.img:/", "out"]).ok();
    for n in 0..40 {
        let copy = b.read(&format!("out/{n}"));
        let zeros = copy.iter().filter(|b| **b != b'x').count();
        assert_eq!(zeros, 0, "in {} bytes of copy {n}", copy.len());
    }
}
