//! What `braidfs cp` does where files become others meanwhile, and where copies would meet.

mod common;
use common::Bench;
use rustix::fs::{CWD, FileType, RenameFlags, mknodat, renameat_with};
use std::io::Write;
use std::os::unix::fs::{MetadataExt, symlink};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

/// Ends a thread that loops, also where the test fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// As cp(1) has it, which unlinks what has other names there: they need not be names of one file any more.
#[test]
fn a_copy_is_not_written_through_links_that_the_sources_do_not_have() {
    let b = Bench::with_volume();
    b.write("s/x", "old");
    std::fs::hard_link(b.path("s/x"), b.path("s/y")).unwrap();
    for to in ["vol.img:/d", "vol.img:/plain"] {
        b.run(&["cp", "-a", "s", to]).ok();
    }
    std::fs::remove_file(b.path("s/y")).unwrap();
    b.write("s/x", "of x");
    b.write("s/y", "of y");
    let both = |dir: &str| ["x", "y"].map(|name| b.run(&["cat", &format!("vol.img:{dir}/{name}")]).ok().out);
    b.run(&["cp", "-a", "s/.", "vol.img:/d"]).ok();
    assert_eq!(both("/d"), ["of x", "of y"]);
    b.run(&["cp", "-a", "vol.img:/d", "out"]).ok();
    assert_eq!(std::fs::metadata(b.path("out/x")).unwrap().nlink(), 1);
    // links are kept by -p alone: then one is written, and the other file does not fit in
    b.run(&["cp", "-r", "s/.", "vol.img:/plain"]).fails(1, &["another file to it: not overwritten"]);
    let [x, y] = both("/plain");
    assert!(x == y && x.starts_with("of "), "{x} {y}");
    b.run(&["fsck", "-f", "vol.img"]).ok();
}

#[test]
fn what_was_just_copied_is_not_overwritten() {
    let b = Bench::with_volume();
    for dir in ["a", "b", "c"] {
        b.write(&format!("{dir}/log"), format!("of {dir}"));
        b.write(&format!("{dir}/only {dir}"), dir);
    }
    symlink("target", b.path("c/link")).unwrap();
    b.write("b/link", "no link");
    b.run(&["mkdir", "vol.img:/logs", "/all", "/twice", "/links"]).ok();
    let again = b.run(&["cp", "a/log", "b/log", "c/log", "vol.img:/logs"]);
    let again = again.fails(1, &["cannot copy b/log: to vol.img:/logs/log: this command", "cannot copy c/log"]);
    assert!(!again.err.contains("a/log"), "{again:?}");
    assert_eq!(b.run(&["cat", "vol.img:/logs/log"]).ok().out, "of a");
    // what is no file, or of several directories, is the same; the rest is copied
    b.run(&["cp", "-r", "a/.", "c/.", "b/.", "vol.img:/all"]).fails(1, &["b/./link", "b/./log", "c/./log"]);
    assert_eq!(b.run(&["ls", "vol.img:/all"]).ok().out, "link\nlog\nonly a\nonly b\nonly c\n");
    b.run(&["cp", "vol.img:/all/log", "vol.img:/logs/log", "."]).fails(1, &["/logs/log: to ./log: this command"]);
    // one that is named twice is copied twice
    b.run(&["cp", "-r", "a/log", "a/log", "c/link", "c/link", "vol.img:/twice"]).ok();
    // names of one file would become names of another's copy
    std::fs::hard_link(b.path("a/log"), b.path("a/other")).unwrap();
    b.run(&["cp", "-a", "a/log", "b/log", "a/other", "vol.img:/links"]).fails(1, &["cannot copy b/log"]);
    assert_eq!(b.run(&["cat", "vol.img:/links/log", "/links/other"]).ok().out, "of aof a");
    // another command may overwrite it
    b.run(&["cp", "c/log", "vol.img:/logs"]).ok();
    b.run(&["fsck", "-f", "vol.img"]).ok();
}

/// A user who may write a directory from which root copies gets nothing copied that root alone may read, and stops no copy.
#[test]
fn what_takes_the_name_of_a_source_is_not_copied() {
    const FILES: usize = 200;
    const ROUNDS: usize = 10;
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
        let _stop = Stop(&stop);
        for n in 0..ROUNDS {
            // some have become others, and are told of
            b.run_within(Duration::from_secs(120), &["cp", "-r", "d", &format!("vol.img:/{n}")]);
        }
    });
    b.run(&["cp", "-r", "vol.img:/", "out"]).ok();
    let mut copied = 0;
    for dir in 0..ROUNDS {
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

/// Directories that change places with symlinks to `secret`, which root alone may read or write.
const PLACES: usize = 60;
const ROUNDS_OF_PLACES: usize = 20;

fn make_places(b: &Bench) {
    b.write("secret/f", "secret");
    b.write("secret/sub/f", "secret");
    std::fs::create_dir(b.path("others")).unwrap();
    for n in 0..PLACES {
        symlink(b.path("secret"), b.path(&format!("others/{n}"))).unwrap();
    }
}

/// Runs something several times while what lies in `dir`, as soon as it is there, and in `others` change places.
fn while_places_change(b: &Bench, dir: &str, run: impl Fn(usize)) {
    let stop = AtomicBool::new(false);
    let pairs = (0..PLACES).map(|n| (b.path(&format!("{dir}/{n}")), b.path(&format!("others/{n}"))));
    let pairs = pairs.collect::<Vec<_>>();
    thread::scope(|s| {
        s.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                for (one, other) in &pairs {
                    _ = renameat_with(CWD, one, CWD, other, RenameFlags::EXCHANGE);
                }
            }
        });
        let _stop = Stop(&stop);
        (0..ROUNDS_OF_PLACES).for_each(run);
    });
}

/// The same of the directories above it: what a walk has come to by a name is what it goes on in, whatever has the name by then.
#[test]
fn a_walk_does_not_leave_what_was_named() {
    let b = Bench::with_volume();
    make_places(&b);
    for n in 0..PLACES {
        b.write(&format!("d/{n}/f"), "public");
        b.write(&format!("d/{n}/sub/f"), "public");
    }
    while_places_change(&b, "d", |n| {
        // what has become a link is copied as one, or told of
        b.run(&["cp", "-a", "d", &format!("vol.img:/{n}")]);
    });
    b.run(&["cp", "-r", "vol.img:/", "all"]).ok();
    let is_dir = |path: &str| std::fs::symlink_metadata(b.path(path)).is_ok_and(|m| m.is_dir());
    let mut copied = 0;
    for n in 0..ROUNDS_OF_PLACES * PLACES {
        let place = format!("all/{}/{}", n / PLACES, n % PLACES);
        for file in ["f", "sub/f"].iter().filter(|_| is_dir(&place)) {
            let content = std::fs::read_to_string(b.path(&format!("{place}/{file}")));
            assert_ne!(content.as_deref().ok(), Some("secret"), "{place}/{file}");
            copied += usize::from(content.is_ok());
        }
    }
    assert!(copied > 0);
}

/// Nor does a user who may write the directory that root copies into have anything of the host's overwritten.
#[test]
fn nothing_is_written_but_in_what_was_named() {
    let b = Bench::with_volume();
    make_places(&b);
    for n in 0..PLACES {
        b.write(&format!("out/{n}/f"), "public");
        b.write(&format!("out/{n}/sub/f"), "public");
    }
    b.run(&["cp", "-r", "out", "vol.img:/"]).ok();
    std::fs::remove_dir_all(b.path("out")).unwrap();
    for args in [&["-r"][..], &["-a"]] {
        while_places_change(&b, "out", |_| {
            b.run(&[&["cp"], args, &["vol.img:/out", "."]].concat());
        });
    }
    for file in ["secret/f", "secret/sub/f"] {
        assert_eq!(b.read(file), b"secret", "{file}");
    }
}

/// Deeper than a process usually may have files open.
#[test]
fn a_walk_may_be_deep() {
    use std::os::unix::process::CommandExt;
    let b = Bench::with_volume();
    let deep = "d/".repeat(60);
    b.write(&format!("{deep}f"), "deep");
    let run = |args: &[&str]| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_braidfs"));
        let few = || {
            let limit = rustix::process::Rlimit { current: Some(48), maximum: Some(1024) };
            Ok(rustix::process::setrlimit(rustix::process::Resource::Nofile, limit)?)
        };
        // SAFETY: it makes a system call, and nothing else.
        unsafe { command.pre_exec(few) };
        common::run(command.args(args).current_dir(b.path("."))).ok()
    };
    run(&["cp", "-a", "d", "vol.img:/"]);
    run(&["cp", "-a", "vol.img:/d", "out"]);
    assert_eq!(b.read(&format!("out/{}f", &deep[2..])), b"deep");
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

#[test]
fn a_slash_at_the_end_names_a_directory() {
    let b = Bench::with_volume();
    b.write("f", "f");
    b.write("dir/f", "f");
    symlink("dir", b.path("link")).unwrap();
    for to in ["vol.img:/backup/", "vol.img:/backup//", "backup/"] {
        let from = if to == "backup/" { "vol.img:/dir/f" } else { "f" };
        b.run(&["cp", "-r", "dir", "vol.img:/dir"]).ok();
        b.run(&["cp", from, to]).fails(1, &["backup", "no such directory: make it first"]);
        b.run(&["cp", "-a", "link", to]).code(1);
    }
    b.run(&["cp", "f", "vol.img:/dir/f/"]).fails(1, &["/dir/f: not a directory"]);
    assert_eq!(b.run(&["ls", "vol.img:/"]).ok().out, "dir\n");
    assert!(!b.path("backup").exists());
    // a directory makes it
    b.run(&["cp", "-r", "dir", "vol.img:/backup/"]).ok();
    b.run(&["cp", "f", "vol.img:/backup/"]).ok();
    b.run(&["cp", "-r", "vol.img:/dir", "backup/"]).ok();
    assert_eq!(b.read("backup/f"), b"f");
}
