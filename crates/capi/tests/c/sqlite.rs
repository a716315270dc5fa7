//! SQLite on the library, by the VFS in contrib/sqlite, where SQLite's header and library are installed.

use crate::{compile_with, here, run};
use std::io::{BufRead, BufReader};
use std::io::{Write as _, stderr};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The test program, or nothing where SQLite is missing.
fn program(dir: &Path) -> Option<PathBuf> {
    let probe = Command::new("cc").args(["-E", "-include", "sqlite3ext.h", "-x", "c", "/dev/null"]).output();
    if !probe.is_ok_and(|p| p.status.success()) {
        _ = writeln!(stderr(), "SKIPPED: SQLite's header is not installed (libsqlite3-dev): its VFS is not tested");
        return None;
    }
    let sqlite = here().join("../../contrib/sqlite");
    let program = dir.join("program");
    let sources = [sqlite.join("braidfs_vfs.c"), sqlite.join("test.c")];
    compile_with("cc", &[&sources[0], &sources[1]], &["-DSQLITE_CORE", "-lsqlite3"], &program);
    Some(program)
}

#[test]
fn sqlite_works_on_the_library() {
    let dir = tempfile::tempdir().unwrap();
    let Some(program) = program(dir.path()) else { return };
    let image = dir.path().join("a.img");
    assert_eq!(run(Command::new(&program).arg("all").arg(&image)), "ok\n");
    // as an extension of a process that knows nothing of it
    let library = dir.path().join("braidfs_vfs.so");
    let source = here().join("../../contrib/sqlite/braidfs_vfs.c");
    compile_with("cc", &[&source], &["-shared", "-fPIC", "-fvisibility=hidden"], &library);
    for times in ["1\n", "2\n"] {
        let mut load = Command::new(&program);
        let out = run(load.arg("extension").arg(&library).env("BRAIDFS_VOLUME", &image));
        assert_eq!(out, times);
    }
    // the colons of a URI are its own: asked is the server, where nobody listens, after the image was found
    let list = format!("{}:nbd://127.0.0.1:1/export", image.display());
    let load = Command::new(&program).arg("extension").arg(&library).env("BRAIDFS_VOLUME", list).output().unwrap();
    let why = String::from_utf8_lossy(&load.stderr);
    assert!(!load.status.success() && why.to_lowercase().contains("connection refused"), "{why}");
}

/// The end of the process is to the library what a loss of power is to a mount, but for what the device has in its cache.
#[test]
fn a_committed_transaction_survives_kill_9() {
    let dir = tempfile::tempdir().unwrap();
    let Some(program) = program(dir.path()) else { return };
    let kills = std::env::var("BRAIDFS_SQLITE_KILLS").map_or(5, |n| n.parse().unwrap());
    for journal in ["wal", "delete", "truncate"] {
        let image = dir.path().join(journal);
        let mut noted = String::from("0");
        for kill in 0..kills {
            let mut load = Command::new(&program);
            load.arg("crash").arg(&image).arg(journal).stdout(Stdio::piped());
            if kill == 0 {
                load.arg("first");
            }
            let mut child = load.spawn().unwrap();
            let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
            for _ in 0..1 + kill * 7 % 20 {
                noted = lines.next().expect("it goes on until it is killed").unwrap();
            }
            child.kill().unwrap();
            child.wait().unwrap();
            if let Some(last) = lines.map(Result::unwrap).last() {
                noted = last;
            }
            assert_eq!(run(Command::new(&program).arg("verify").arg(&image).arg(journal).arg(&noted)), "ok\n");
        }
    }
}
