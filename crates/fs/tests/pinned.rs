//! Reading without a copy, by handles.

use braidfs_fs::{Fs, OpenOptions, Options, Pinned};
use std::io::ErrorKind;

#[test]
fn what_is_pinned_outlasts_its_file_but_keeps_the_volume_open() {
    let fs = Fs::in_memory(64 << 20, &Options::default()).unwrap();
    fs.write("f", vec![7; 100_000]).unwrap();
    let file = fs.open_read("f").unwrap();
    let pinned: Pinned = file.read_pinned(90_000, 1 << 20).unwrap();
    assert_eq!((pinned.bytes(), pinned.len(), fs.open_handles()), (10_000, 4, 2));
    drop(file);
    fs.write("f", "other").unwrap();
    fs.remove_file("f").unwrap();
    fs.sync().unwrap();
    let closed = fs.close().unwrap_err();
    assert_eq!(closed.error.kind(), ErrorKind::ResourceBusy);
    let fs = closed.fs.unwrap();
    // another thread may look at it and let go of it
    std::thread::spawn(move || assert_eq!(pinned.to_vec(), [7; 10_000])).join().unwrap();
    fs.close().unwrap();
}

#[test]
fn too_much_is_refused_and_says_what_to_do() {
    let fs = Fs::in_memory(64 << 20, &Options::parse("cache=4M").unwrap()).unwrap();
    fs.write("f", vec![7; 3 << 20]).unwrap();
    let file = fs.open_read("f").unwrap();
    let error = file.read_pinned(0, 2 << 20).unwrap_err();
    assert_eq!((error.kind(), error.errno()), (ErrorKind::OutOfMemory, 12));
    assert!(error.to_string().contains("more than 1024 KiB of the cache would be pinned: let go"), "{error}");
    let all: Vec<_> = (0..3).map(|n| file.read_pinned(n << 20, 1 << 18).unwrap()).collect();
    assert!(all.iter().all(|p| p.to_vec() == [7; 1 << 18]));
    let writes = OpenOptions::new().write(true).open(&fs, "f").unwrap();
    assert_eq!(writes.read_pinned(0, 1).unwrap_err().errno(), 9);
}

#[test]
fn pages_stay_after_the_volume_was_dropped() {
    let fs = Fs::in_memory(64 << 20, &Options::default()).unwrap();
    fs.write("f", vec![7; 10_000]).unwrap();
    let pinned = fs.open_read("f").unwrap().read_pinned(0, 10_000).unwrap();
    fs.abandon();
    assert_eq!(pinned.to_vec(), [7; 10_000]);
}

/// The last who has the volume are the pages: closing it with them writes nothing, either.
#[test]
fn an_abandoned_volume_with_pages_in_use_writes_nothing_more() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("vol.img");
    Fs::format(&image, 16 << 20, &Default::default()).unwrap();
    let fs = Fs::open(&[&image], &Options::parse("commit=3600").unwrap()).unwrap();
    fs.write("f", vec![7; 10_000]).unwrap();
    fs.sync().unwrap();
    let pinned = fs.open_read("f").unwrap().read_pinned(0, 10_000).unwrap();
    fs.write("late", b"2").unwrap();
    fs.abandon();
    assert_eq!(pinned.to_vec(), [7; 10_000]);
    drop(pinned);
    let fs = Fs::open(&[&image], &Options::default()).unwrap();
    assert_eq!((fs.read("f").unwrap(), fs.exists("late").unwrap()), (vec![7; 10_000], false));
    fs.close().unwrap();
}
