//! Volumes made by the first program of this format version must still mount, hold what they held, and pass fsck.
//!
//! `golden/vN-clean.bin` was unmounted, `golden/vN-crash.bin` was not: its journal has a committed transaction and
//! roll-forward records to replay. N is the format version: raising it asks for new images, made by running this test once
//! with `BRAIDFS_BLESS=1` (which never replaces one). What the writer's bytes are is checked in `crates/format`.

use braidfs::OpenHow;
use braidfs::device::{Device, Image, MemDevice};
use braidfs::format::FORMAT_VERSION;
use braidfs::{Cred, FallocMode, InodeNo, MkfsOptions, MountOptions, RenameMode, Volume, mkfs};
use braidfs_check::{FsckOptions, check};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

const MAGIC: &[u8; 8] = b"BRFSGOLD";
const NAMES: u32 = 300;

fn path(kind: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("tests/golden/v{FORMAT_VERSION}-{kind}.bin"))
}

/// Blocks that are not zero, their trailing zeros left out: number, bytes, content.
fn pack(image: &Image) -> Vec<u8> {
    let mut v = MAGIC.to_vec();
    v.extend(image.blocks().to_le_bytes());
    let mut block = [0u8; 4096];
    let mut used: Vec<u64> = image.used().collect();
    used.sort_unstable();
    for n in used {
        image.read(n, &mut block).unwrap();
        let len = block.iter().rposition(|b| *b != 0).map_or(0, |i| i + 1);
        if len > 0 {
            v.extend(n.to_le_bytes());
            v.extend((len as u16).to_le_bytes());
            v.extend(&block[..len]);
        }
    }
    v
}

fn unpack(bytes: &[u8]) -> Image {
    assert_eq!(&bytes[..8], MAGIC);
    let number = |b: &[u8]| u64::from_le_bytes(b.try_into().unwrap());
    let mut image = Image::new(number(&bytes[8..16]));
    let mut rest = &bytes[16..];
    while !rest.is_empty() {
        let len = usize::from(u16::from_le_bytes([rest[8], rest[9]]));
        let mut block = [0u8; 4096];
        block[..len].copy_from_slice(&rest[10..10 + len]);
        image.write(number(&rest[..8]), &block).unwrap();
        rest = &rest[10 + len..];
    }
    image
}

fn options() -> MountOptions {
    MountOptions { background: false, commit_interval: Duration::from_secs(3600), ..MountOptions::default() }
}

fn pattern(n: usize) -> Vec<u8> {
    (0..n).map(|i| (i % 251) as u8).collect()
}

fn put(v: &Volume, path: &str, data: &[u8]) -> InodeNo {
    let how = OpenHow { read: true, write: true, create: true, mode: 0o640, ..OpenHow::default() };
    let f = v.open_path(path.as_bytes(), how, &Cred::root()).unwrap();
    assert_eq!(v.write(&f, 0, data).unwrap(), data.len());
    f.ino()
}

fn get(v: &Volume, path: &str) -> Vec<u8> {
    let f = v.open_path(path.as_bytes(), OpenHow { read: true, ..OpenHow::default() }, &Cred::root()).unwrap();
    let mut b = vec![0; v.getattr(f.ino()).unwrap().size as usize];
    assert_eq!(v.read(&f, 0, &mut b).unwrap(), b.len());
    b
}

/// The content of the unmounted image: something of every kind.
fn fill(v: &Volume) {
    let me = Cred::root();
    for d in ["a", "b", "c", "b/below"] {
        v.mkdir_path(d.as_bytes(), 0o755, &me).unwrap();
    }
    for i in 0..NAMES {
        put(v, &format!("a/name-{i}"), format!("{i}").as_bytes());
    }
    put(v, "b/inline", &pattern(3000));
    put(v, "b/blocks", &pattern(30_000));
    let sparse = put(v, "b/sparse", b"start");
    let f = v.open(sparse).unwrap();
    v.write(&f, 1 << 30, b"end").unwrap();
    drop(f);
    let f = v.open(put(v, "b/allocated", b"")).unwrap();
    v.fallocate(&f, FallocMode::Allocate { keep_size: false }, 0, 40_000).unwrap();
    drop(f);
    let linked = put(v, "c/first", b"two names");
    let below = v.resolve(b"b/below", true, &me).unwrap().ino;
    v.link(linked, below, b"second").unwrap();
    v.rename_path(b"b/below", b"c/moved", RenameMode::Replace, &me).unwrap();
}

fn verify(v: &Volume) {
    let me = Cred::root();
    for i in 0..NAMES {
        assert_eq!(get(v, &format!("a/name-{i}")), format!("{i}").as_bytes());
    }
    assert_eq!(get(v, "b/inline"), pattern(3000));
    assert_eq!(get(v, "b/blocks"), pattern(30_000));
    assert_eq!(get(v, "b/allocated"), vec![0; 40_000]);
    let f = v.open_path(b"b/sparse", OpenHow { read: true, ..OpenHow::default() }, &me).unwrap();
    let mut end = [0; 4];
    assert_eq!(v.read(&f, (1 << 30) - 1, &mut end).unwrap(), 4);
    assert_eq!(&end, b"\0end");
    assert_eq!(get(v, "c/moved/second"), b"two names");
    assert_eq!(v.getattr(v.resolve(b"c/first", true, &me).unwrap().ino).unwrap().nlink, 2);
}

/// What the crashed image has besides: a commit that was not checkpointed, and files that were only synced.
fn change(v: &Volume) {
    let me = Cred::root();
    v.mkdir_path(b"committed", 0o700, &me).unwrap();
    put(v, "committed/file", &pattern(9000));
    v.rename_path(b"a/name-1", b"c/name-1", RenameMode::Replace, &me).unwrap();
    v.sync().unwrap();
    v.mkdir_path(b"fresh", 0o700, &me).unwrap();
    v.fsync(put(v, "fresh/synced", &pattern(7000)), false).unwrap();
    v.fsync(put(v, "c/name-1", b"changed"), false).unwrap();
}

fn verify_changed(v: &Volume) {
    let me = Cred::root();
    assert_eq!(get(v, "committed/file"), pattern(9000));
    assert!(v.resolve(b"a/name-1", true, &me).is_err());
    assert_eq!(get(v, "c/name-1"), b"changed");
    assert_eq!(get(v, "fresh/synced"), pattern(7000));
    assert_eq!(get(v, "a/name-2"), b"2");
}

fn bless() {
    let device = Arc::new(MemDevice::new(16384));
    let d: Arc<dyn Device> = device.clone();
    let o = MkfsOptions { domains: Some(3), mlogs: Some(2), group_bytes: Some(4 << 20), ..MkfsOptions::default() };
    mkfs::format(std::slice::from_ref(&d), &o).unwrap();
    let v = Volume::mount(vec![d.clone()], options()).unwrap();
    fill(&v);
    v.unmount().unwrap();
    std::fs::write(path("clean"), pack(&device.snapshot())).unwrap();
    let v = Volume::mount(vec![d], options()).unwrap();
    change(&v);
    v.crash();
    std::fs::write(path("crash"), pack(&device.snapshot())).unwrap();
}

fn open(kind: &str) -> (Volume, Arc<dyn Device>) {
    let bytes = std::fs::read(path(kind)).unwrap_or_else(|e| panic!("{}: {e}: bless it", path(kind).display()));
    let device: Arc<dyn Device> = Arc::new(MemDevice::from_image(unpack(&bytes)));
    (Volume::mount(vec![device.clone()], options()).unwrap(), device)
}

fn close_and_check(v: Volume, device: &Arc<dyn Device>) {
    v.unmount().unwrap();
    let o = FsckOptions { repair: false, force: true };
    let report = check(std::slice::from_ref(device), &o, &braidfs::JournalReplay, &|_, _, _| {}).unwrap();
    assert!(report.findings.is_empty(), "{:#?}", report.findings);
}

#[test]
fn golden_images_still_work() {
    if std::env::var_os("BRAIDFS_BLESS").is_some() && !path("clean").exists() {
        bless();
    }
    let (v, device) = open("clean");
    verify(&v);
    change(&v);
    verify_changed(&v);
    close_and_check(v, &device);

    let (v, device) = open("crash");
    verify_changed(&v);
    close_and_check(v, &device);
}
