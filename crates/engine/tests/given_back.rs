//! Memory of pages after the last volume of a process: a process of its own, with one test.

use braidfs::device::{Device, MemDevice};
use braidfs::{Cred, MkfsOptions, MountOptions, OpenHow, Volume, mkfs};
use std::sync::Arc;

/// KiB in memory of mappings that ask for huge pages, as chunks of pages do; `None` where the kernel does not tell.
fn chunks_kib() -> Option<u64> {
    let maps = std::fs::read_to_string("/proc/self/smaps").ok()?;
    let (mut rss, mut all, mut told) = (0, 0, false);
    for line in maps.lines() {
        if let Some(kib) = line.strip_prefix("Rss:") {
            rss = kib.trim().trim_end_matches(" kB").parse().ok()?;
        } else if let Some(flags) = line.strip_prefix("VmFlags:") {
            told = true;
            all += if flags.split(' ').any(|f| f == "hg") { rss } else { 0 };
        }
    }
    told.then_some(all)
}

#[test]
fn the_last_volume_gives_memory_of_pages_back() {
    let volume = || {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(32768)); // 128 MiB
        mkfs::format(std::slice::from_ref(&device), &MkfsOptions::default()).unwrap();
        let o = MountOptions { background: false, ..MountOptions::default() };
        let v = Volume::mount(vec![device], o).unwrap();
        let how = OpenHow { read: true, write: true, create: true, mode: 0o644, ..OpenHow::default() };
        let f = v.open_path(b"f", how, &Cred::root()).unwrap();
        v.write(&f, 0, &vec![7; 48 << 20]).unwrap();
        drop(f);
        v
    };
    let (first, last) = (volume(), volume());
    let Some(used) = chunks_kib().filter(|kib| *kib > 0) else { return };
    assert!(used > 90 << 10, "{used} KiB of two volumes");
    first.unmount().unwrap();
    let spare = chunks_kib().unwrap();
    assert!(spare > 90 << 10, "{spare} KiB: another volume may want them");
    last.unmount().unwrap();
    let left = chunks_kib().unwrap();
    assert!(left <= 8 << 10, "{left} KiB are left");
}
