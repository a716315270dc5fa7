//! Memory of a volume above which somebody else caches what he wrote (a mount): a long write goes through few pages. Alone
//! in its file: the resident set is the process's.

use braidfs::OpenHow;
use braidfs::device::{Device, FileDevice, OpenHow as DeviceHow};
use braidfs::{Cred, MkfsOptions, MountOptions, Volume, mkfs};
use std::sync::Arc;

/// Written in all, in files of so many bytes, one after the other. The last block of each is not whole.
const WRITTEN: u64 = 384 << 20;
const FILE: u64 = (96 << 10) + 100;
/// What may be dirty before a commit begins, what is written while it runs, chunks that are spare.
const MOST: u64 = 224 << 20;

/// Resident bytes of this process.
fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = statm.split(' ').nth(1).unwrap().parse().unwrap();
    pages * rustix::param::page_size() as u64
}

fn content(file: u64) -> Vec<u8> {
    (0..FILE / 4 + 1).flat_map(|i| (file << 32 | i).to_le_bytes()).take(FILE as usize).collect()
}

#[test]
fn a_long_write_goes_through_few_pages() {
    let dir = tempfile::tempdir_in("/var/tmp").or_else(|_| tempfile::tempdir()).unwrap();
    let image = dir.path().join("image");
    drop(FileDevice::create(&image, 2 << 30).unwrap());
    let device: Arc<dyn Device> = Arc::new(FileDevice::open(&image, DeviceHow { write: true, direct: true }).unwrap());
    mkfs::format(std::slice::from_ref(&device), &MkfsOptions::default()).unwrap();
    let options = MountOptions { cache_bytes: 2 << 30, cached_above: true, ..MountOptions::default() };
    let v = Volume::mount(vec![device], options).unwrap();
    let me = Cred::root();
    let how = OpenHow { read: true, write: true, create: true, mode: 0o644, ..OpenHow::default() };
    let open = |n: u64| v.open_path(format!("file-{n}").as_bytes(), how, &me).unwrap();
    let (idle, mut peak) = (resident(), 0);
    let files = WRITTEN / FILE;
    for n in 0..files {
        assert_eq!(v.write(&open(n), 0, &content(n)).unwrap() as u64, FILE);
        peak = peak.max(resident());
        if n % 64 == 63 && peak > idle + MOST / 2 {
            // as the kernel does with writers of a slow device: the machine, not the volume, is what is too slow here
            v.sync().unwrap();
        }
    }
    println!("{} MiB written, {} MiB of memory", WRITTEN >> 20, (peak - idle) >> 20);
    assert!(peak - idle < MOST, "{} MiB", (peak - idle) >> 20);
    v.sync().unwrap();
    // as a kernel asks, for whole pages: what comes of the device is not kept
    let mut got = vec![0; FILE.next_multiple_of(4096) as usize];
    let written = resident();
    for n in 0..files {
        assert_eq!(v.read(&open(n), 0, &mut got).unwrap() as u64, FILE);
        assert!(got[..FILE as usize] == content(n), "file {n}");
    }
    let kept = resident().saturating_sub(written);
    println!("{} MiB read, {} MiB of memory", WRITTEN >> 20, kept >> 20);
    assert!(kept < WRITTEN / 16, "{} MiB", kept >> 20);
    // in pieces that begin and end in blocks, over pages that are in memory and such as are not
    let f = open(0);
    assert_eq!(v.write(&f, 9 * 4096 + 7, b"here").unwrap(), 4);
    let mut want = content(0);
    want[9 * 4096 + 7..][..4].copy_from_slice(b"here");
    for (from, len) in [(0, 4096), (8 * 4096, 3 * 4096), (4096, 12 * 4096), (5, 11 * 4096), (4096, 9000), (0, 100)] {
        assert_eq!(v.read(&f, from, &mut got[..len]).unwrap(), len);
        assert!(got[..len] == want[from as usize..][..len], "{len} bytes from {from} on");
    }
    assert_eq!(v.write(&f, 9 * 4096 + 7, &content(0)[9 * 4096 + 7..][..4]).unwrap(), 4);
    let mut got = vec![0; FILE as usize + 1];
    for n in 0..files {
        let f = open(n);
        assert_eq!(v.read(&f, 0, &mut got).unwrap() as u64, FILE);
        assert!(got[..FILE as usize] == content(n), "file {n}");
        // an append finds the last page
        assert_eq!(v.write(&f, FILE, b"more").unwrap(), 4);
    }
    v.unmount().unwrap();
}
