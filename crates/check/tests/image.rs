//! An image of a crashed volume has its tree, and neither content nor values of attributes, wherever the volume keeps them.

use braidfs::{
    Cred, InodeNo, JournalMode, JournalReplay, MkfsOptions, MountOptions, OpenHow, TenantBudget, Volume, XattrMode,
    mkfs,
};
use braidfs_check::{FsckOptions, check, image};
use braidfs_device::{BLOCK_BYTES, Device, MemDevice};
use std::sync::Arc;

const SECRET: &[u8] = b"nobody else may see this";
const BLOCKS: u64 = 16384;

fn options() -> MountOptions {
    MountOptions { background: false, commit_interval: std::time::Duration::from_secs(3600), ..MountOptions::default() }
}

fn put(v: &Volume, path: &str, data: &[u8]) -> InodeNo {
    let how = OpenHow { read: true, write: true, create: true, mode: 0o644, ..OpenHow::default() };
    let f = v.open_path(path.as_bytes(), how, &Cred::root()).unwrap();
    assert_eq!(v.write(&f, 0, data).unwrap(), data.len());
    f.ino()
}

fn leaks(device: &dyn Device) -> usize {
    let mut all = vec![0u8; BLOCKS as usize * BLOCK_BYTES];
    device.read(0, &mut all).unwrap();
    all.windows(8).filter(|w| *w == &SECRET[..8]).count()
}

/// A value of `n` bytes that is full of secrets.
fn secrets(n: usize) -> Vec<u8> {
    SECRET.iter().copied().cycle().take(n).collect()
}

fn findings(device: &Arc<dyn Device>) -> Vec<String> {
    let options = FsckOptions { repair: false, force: true };
    let report = check(std::slice::from_ref(device), &options, &JournalReplay, &|_, _, _| {}).unwrap();
    report.findings.iter().map(|f| f.message.clone()).collect()
}

#[test]
fn of_a_crashed_volume_with_everything() {
    let mem = Arc::new(MemDevice::new(BLOCKS));
    let dev: Arc<dyn Device> = mem.clone();
    let o =
        MkfsOptions { domains: Some(3), group_bytes: Some(4 << 20), data_checksums: true, ..MkfsOptions::default() };
    mkfs::format(std::slice::from_ref(&dev), &o).unwrap();
    let v = Volume::mount(vec![dev], options()).unwrap();
    let me = Cred::root();
    for d in 0..3 {
        v.mkdir_path(format!("d{d}").as_bytes(), 0o755, &me).unwrap();
        let small = put(&v, &format!("d{d}/small"), SECRET);
        v.setxattr(small, b"user.short", SECRET, XattrMode::Set).unwrap();
        let many = put(&v, &format!("d{d}/attributes"), &secrets(1000));
        for n in 0..6 {
            v.setxattr(many, format!("user.long{n}").as_bytes(), &secrets(3000), XattrMode::Set).unwrap();
        }
        put(&v, &format!("d{d}/large"), &secrets(300_000));
    }
    v.sync().unwrap();
    // in the journal alone, some of it by fsync
    for d in 0..3 {
        let late = put(&v, &format!("d{d}/late"), SECRET);
        v.setxattr(late, b"user.late", &secrets(3500), XattrMode::Set).unwrap();
        v.fsync(late, false).unwrap();
    }
    let crashed: Arc<dyn Device> = Arc::new(MemDevice::from_image(mem.snapshot()));
    v.crash();
    assert!(leaks(crashed.as_ref()) > 1000, "the test looks for what is not there");

    let opened = image::open(std::slice::from_ref(&crashed), &JournalReplay).unwrap();
    assert_eq!(opened.device_blocks(), [BLOCKS]);
    assert!(opened.findings.is_empty(), "{:?}", opened.findings);
    let copy: Arc<dyn Device> = Arc::new(MemDevice::new(BLOCKS));
    let mut blocks = 0;
    opened
        .metadata(
            &mut |device, at, block| {
                assert_eq!((device, block.len()), (0, BLOCK_BYTES));
                blocks += 1;
                copy.write(at, block)
            },
            &|_, _| {},
        )
        .unwrap();
    assert!((20..2000).contains(&blocks), "{blocks} blocks");
    assert_eq!(leaks(copy.as_ref()), 0);
    assert_eq!(findings(&copy), Vec::<String>::new());

    let v = Volume::mount(vec![Arc::clone(&copy)], options()).unwrap();
    for d in 0..3 {
        for (name, size) in [("small", 24), ("attributes", 1000), ("large", 300_000), ("late", 24)] {
            let attr = v.resolve(format!("d{d}/{name}").as_bytes(), true, &me).unwrap();
            assert_eq!(attr.size, size, "d{d}/{name}");
        }
        let many = v.resolve(format!("d{d}/attributes").as_bytes(), true, &me).unwrap().ino;
        for n in 0..6 {
            assert_eq!(v.getxattr(many, format!("user.long{n}").as_bytes()).unwrap(), vec![0; 3000]);
        }
        let file =
            v.open_path(format!("d{d}/large").as_bytes(), OpenHow { read: true, ..OpenHow::default() }, &me).unwrap();
        let mut content = vec![1; 300_000];
        // the checksums are those of zeros
        assert_eq!(v.read(&file, 0, &mut content).unwrap(), 300_000);
        assert!(content.iter().all(|b| *b == 0));
    }
    v.unmount().unwrap();
}

#[test]
fn nothing_of_what_the_device_held_before() {
    let mem = Arc::new(MemDevice::new(BLOCKS));
    let dev: Arc<dyn Device> = mem.clone();
    // blocks of an earlier volume, on all of the device: with a header, and content of files behind it
    let mut old = vec![0xa5; BLOCK_BYTES];
    old[..4].copy_from_slice(b"BRFS");
    old[4..4 + SECRET.len()].copy_from_slice(SECRET);
    for (at, bytes) in old.chunks_mut(64).enumerate() {
        bytes[32..32 + SECRET.len()].copy_from_slice(SECRET);
        bytes[60] = at as u8;
    }
    for at in 0..BLOCKS {
        dev.write(at, &old).unwrap();
    }
    let o = MkfsOptions { domains: Some(3), group_bytes: Some(4 << 20), ..MkfsOptions::default() };
    mkfs::format(std::slice::from_ref(&dev), &o).unwrap();
    let v = Volume::mount(vec![Arc::clone(&dev)], options()).unwrap();
    put(&v, "file", SECRET);
    v.unmount().unwrap();
    let wanted = findings(&dev);

    let opened = image::open(std::slice::from_ref(&dev), &JournalReplay).unwrap();
    let copy: Arc<dyn Device> = Arc::new(MemDevice::new(BLOCKS));
    opened.metadata(&mut |_, at, block| copy.write(at, block), &|_, _| {}).unwrap();
    assert_eq!(leaks(copy.as_ref()), 0);
    assert_eq!(findings(&copy), wanted);
}

/// The header of a domain without a journal keeps the record of its root directory, with the values of its attributes.
#[test]
fn of_a_tenant_without_a_journal() {
    let mem = Arc::new(MemDevice::new(BLOCKS));
    let dev: Arc<dyn Device> = mem.clone();
    let o = MkfsOptions { domains: Some(2), group_bytes: Some(4 << 20), ..MkfsOptions::default() };
    mkfs::format(std::slice::from_ref(&dev), &o).unwrap();
    let v = Volume::mount(vec![Arc::clone(&dev)], options()).unwrap();
    let budget = TenantBudget { space: Some(8 << 20), journal: Some(JournalMode::Scratch), ..TenantBudget::default() };
    let t = v.tenant_create(InodeNo::ROOT, b"d", 0o2750, "t", budget, &Cred::root()).unwrap();
    v.setxattr(t.root, b"user.key", &secrets(1500), XattrMode::Set).unwrap();
    put(&v, "d/file", SECRET);
    for crashed in [true, false] {
        if !crashed {
            v.sync().unwrap();
        }
        let from: Arc<dyn Device> = Arc::new(MemDevice::from_image(mem.snapshot()));
        assert!(leaks(from.as_ref()) > 50, "the test looks for what is not there");
        let opened = image::open(std::slice::from_ref(&from), &JournalReplay).unwrap();
        let copy: Arc<dyn Device> = Arc::new(MemDevice::new(BLOCKS));
        opened.metadata(&mut |_, at, block| copy.write(at, block), &|_, _| {}).unwrap();
        assert_eq!(leaks(copy.as_ref()), 0);
        assert_eq!(findings(&copy), Vec::<String>::new());
        let v = Volume::mount(vec![copy], options()).unwrap();
        let root = v.resolve(b"d", true, &Cred::root()).unwrap();
        assert_eq!((root.ino, root.mode & 0o7777), (t.root, 0o2750));
        assert_eq!(v.getxattr(t.root, b"user.key").unwrap(), vec![0; 1500]);
        v.unmount().unwrap();
    }
    v.unmount().unwrap();
}
