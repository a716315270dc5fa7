//! Memory that one large read takes. Alone in its file: the resident set is the process's.

use braidfs_fs::{Fs, Options};
use std::io::Write;

/// Bytes of the file.
const SIZE: usize = 128 << 20;

/// What a line of the process's status says, bytes.
fn status(name: &str) -> u64 {
    let all = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = all.lines().find_map(|l| l.strip_prefix(name)).unwrap();
    line.split_whitespace().next().unwrap().parse::<u64>().unwrap() << 10
}

/// The cache has its limit also while one call reads more than that.
#[test]
fn a_read_larger_than_the_cache_keeps_to_it() {
    // on a disk, where there is one: what a tmpfs holds is memory, too, though not ours
    let dir = tempfile::tempdir_in("/var/tmp").or_else(|_| tempfile::tempdir()).unwrap();
    let image = dir.path().join("vol.img");
    Fs::format(&image, 256 << 20, &Default::default()).unwrap();
    let options = Options::parse("cache=8M").unwrap();
    let fs = Fs::open(&[&image], &options).unwrap();
    let mut file = fs.create("large").unwrap();
    for i in 0..SIZE >> 20 {
        file.write_all(&[i as u8; 1 << 20]).unwrap();
    }
    drop(file);
    fs.close().unwrap();
    let fs = Fs::open(&[&image], &options).unwrap();
    let file = fs.open_read("large").unwrap();
    let mut all = vec![0xff; SIZE];
    let before = status("VmRSS:");
    // from within a page on, so that pieces begin elsewhere
    assert_eq!(file.read_at(&mut all, 100).unwrap(), SIZE - 100);
    let more = status("VmHWM:").saturating_sub(before);
    assert!(more < 48 << 20, "{} MiB for a read of {} with a cache of 8", more >> 20, SIZE >> 20);
    assert!(all[..SIZE - 100].iter().enumerate().all(|(i, b)| *b == ((i + 100) >> 20) as u8));
    drop(file);
    fs.close().unwrap();
}
