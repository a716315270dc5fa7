//! The volumes that get damaged: small ones with every kind of structure, and images of their past.

use crate::damage::truth::{Truth, read_all};
use crate::ops::fill;
use braidfs::OpenHow;
use braidfs::{
    Cred, FallocMode, FileKind, InodeNo, MkfsOptions, MountOptions, NewNode, Placement, RenameMode, Result, SetAttr,
    SetTime, Timestamp, Volume, XattrMode, mkfs,
};
use braidfs_device::{Device, Image, MemDevice};
use std::sync::Arc;

/// Blocks of the device: 48 MiB.
const BLOCKS: u64 = 12288;
/// Names in the directory with several buckets.
const NAMES: u32 = 120;

/// A volume at rest.
pub struct Sample {
    /// Its name in messages.
    pub name: &'static str,
    /// What lies on the device.
    pub image: Image,
    /// What its files hold.
    pub truth: Truth,
    /// The device as it was earlier, newest first.
    pub past: Vec<Image>,
}

/// Options of all mounts of these tests: nothing happens in the background, time stands still.
pub fn options() -> MountOptions {
    MountOptions {
        background: false,
        serial: true,
        commit_interval: std::time::Duration::from_secs(3600),
        cache_bytes: 64 << 20,
        clock: Some(|| Timestamp { sec: 1_700_000_000, nsec: 0 }),
        ..MountOptions::default()
    }
}

/// Mounts what lies on `device`.
///
/// # Errors
/// Of the mount.
pub fn mount(device: &Arc<MemDevice>) -> Result<Volume> {
    Volume::mount(vec![device.clone() as Arc<dyn Device>], options())
}

/// Writes a whole file, made where it is not there.
fn put(v: &Volume, path: &str, seed: u32, len: usize) -> Result<InodeNo> {
    let how = OpenHow { read: true, write: true, create: true, truncate: true, mode: 0o640, ..OpenHow::default() };
    let f = v.open_path(path.as_bytes(), how, &Cred::root())?;
    v.write(&f, 0, &fill(seed, 0, len))?;
    let at = Timestamp { sec: 1_000_000 + i64::from(seed), nsec: 5 };
    v.setattr(f.ino(), &SetAttr { mtime: Some(SetTime::At(at)), ..SetAttr::default() })?;
    Ok(f.ino())
}

fn make(v: &Volume, dir: InodeNo, name: &str, kind: FileKind, target: &[u8]) -> Result<InodeNo> {
    let new = NewNode { kind, mode: 0o755, umask: 0, rdev: 0x0102, target };
    v.create(dir, name.as_bytes(), &new, &Cred::root()).map(|a| a.ino)
}

fn dir_of(v: &Volume, path: &str) -> Result<InodeNo> {
    Ok(v.resolve(path.as_bytes(), true, &Cred::root())?.ino)
}

/// Something of every kind.
///
/// # Errors
/// Of any operation.
pub fn fill_first(v: &Volume) -> Result<()> {
    let me = Cred::root();
    for d in ["a", "a/deep", "a/deep/deeper", "b", "c", "many"] {
        v.mkdir_path(d.as_bytes(), 0o755, &me)?;
    }
    put(v, "a/empty", 1, 0)?;
    put(v, "a/inline", 2, 900)?;
    put(v, "a/blocks", 3, 50_000)?;
    put(v, "a/deep/deeper/leaf", 4, 9000)?;
    // extents in several leaves
    let f = v.open(put(v, "b/tree", 5, 4096)?)?;
    for i in 1..600u64 {
        v.write(&f, i * 8192, &fill(5, i * 8192, 4096))?;
    }
    drop(f);
    // overwritten in place
    let f = v.open(put(v, "b/in-place", 6, 0)?)?;
    v.fallocate(&f, FallocMode::Allocate { keep_size: false }, 0, 80_000)?;
    v.write(&f, 10_000, &fill(6, 10_000, 30_000))?;
    drop(f);
    let many = dir_of(v, "many")?;
    let hub = put(v, "c/hub", 7, 5000)?;
    for i in 0..NAMES {
        let name = format!("a name of medium length, number {i:04}");
        if i % 3 == 0 {
            put(v, &format!("many/{name}"), 100 + i, 20 + i as usize * 40)?;
        } else {
            v.link(hub, many, name.as_bytes())?;
        }
    }
    // names in several directories of other domains
    let linked = put(v, "a/linked", 8, 7000)?;
    for d in ["b", "c", "a/deep"] {
        v.link(linked, dir_of(v, d)?, b"also linked")?;
    }
    let (a, c) = (dir_of(v, "a")?, dir_of(v, "c")?);
    make(v, a, "short symlink", FileKind::Symlink, b"../b/tree")?;
    make(v, c, "long symlink", FileKind::Symlink, &[b'x'; 3900])?;
    make(v, c, "pipe", FileKind::Fifo, b"")?;
    make(v, c, "device", FileKind::Char, b"")?;
    let marked = put(v, "c/attributes", 9, 300)?;
    v.setxattr(marked, b"user.small", b"value", XattrMode::Set)?;
    v.setxattr(marked, b"user.large", &fill(10, 0, 6000), XattrMode::Set)?;
    v.setattr(marked, &SetAttr { mode: Some(0o600), uid: Some(7), gid: Some(8), ..SetAttr::default() })?;
    Ok(())
}

/// Changes everything once more, so that older versions of the blocks say something else. `round` is 1, 2, …
///
/// # Errors
/// Of any operation.
pub fn change(v: &Volume, round: u32) -> Result<()> {
    let me = Cred::root();
    let seed = round * 1000;
    put(v, "a/inline", seed + 2, 900 + round as usize * 100)?;
    put(v, "a/blocks", seed + 3, 50_000 + round as usize * 5000)?;
    put(v, "a/deep/deeper/leaf", seed + 4, 9000)?;
    put(v, &format!("a/made in round {round}"), seed + 11, 6000)?;
    put(v, &format!("c/made in round {round}"), seed + 12, 60)?;
    for i in (0..NAMES).step_by(3) {
        put(v, &format!("many/a name of medium length, number {i:04}"), seed + 100 + i, 30 + i as usize * 41)?;
    }
    put(v, &format!("many/new in round {round}"), seed + 13, 4000)?;
    let from = format!("many/a name of medium length, number {:04}", round * 3 + 1);
    v.unlink(dir_of(v, "many")?, from.split_once('/').map_or("", |p| p.1).as_bytes())?;
    let f = v.open(dir_of(v, "b/tree")?)?;
    for i in (0..600u64).step_by(7) {
        v.write(&f, i * 8192, &fill(seed + 5, i * 8192, 4096))?;
    }
    drop(f);
    let f = v.open(dir_of(v, "b/in-place")?)?;
    v.write(&f, 20_000, &fill(seed + 6, 20_000, 9000))?;
    drop(f);
    let marked = dir_of(v, "c/attributes")?;
    v.setxattr(marked, b"user.large", &fill(seed + 10, 0, 6000), XattrMode::Set)?;
    v.setattr(marked, &SetAttr { mode: Some(0o600 + round), ..SetAttr::default() })?;
    let (old, new) = (format!("a/moved {}", round - 1), format!("b/moved {round}"));
    if round == 1 {
        put(v, "b/moved 1", 14, 3000)?;
    } else {
        let old = if round == 2 { "b/moved 1".into() } else { old };
        let new = if round == 2 { "a/moved 2".into() } else { new };
        v.rename_path(old.as_bytes(), new.as_bytes(), RenameMode::Replace, &me)?;
    }
    v.mkdir_path(format!("a/deep/dir {round}").as_bytes(), 0o700, &me)?;
    Ok(())
}

/// The device with a volume of two or three domains, changed and unmounted several times, and its past.
fn unmounted(sums: bool) -> Result<(Arc<MemDevice>, Vec<Image>)> {
    let device = Arc::new(MemDevice::soiled(BLOCKS));
    let o = MkfsOptions {
        domains: Some(3),
        mlogs: Some(2),
        group_bytes: Some(4 << 20),
        placement: Placement::Spread,
        data_checksums: sums,
        uuid: Some([0x5a; 16]),
        ..MkfsOptions::default()
    };
    mkfs::format(&[device.clone() as Arc<dyn Device>], &o)?;
    let mut past = Vec::new();
    let v = mount(&device)?;
    fill_first(&v)?;
    v.unmount()?;
    for round in 1..=2 {
        past.insert(0, device.snapshot());
        let v = mount(&device)?;
        change(&v, round)?;
        v.sync()?;
        past.insert(0, device.snapshot());
        v.unmount()?;
    }
    Ok((device, past))
}

fn truth_of(image: &Image) -> Result<Truth> {
    let v = mount(&Arc::new(MemDevice::from_image(image.clone())))?;
    let truth = read_all(&v)?;
    v.crash();
    Ok(truth)
}

/// A volume that was unmounted.
///
/// # Errors
/// Of any operation.
pub fn clean(sums: bool) -> Result<Sample> {
    let (device, past) = unmounted(sums)?;
    let image = device.snapshot();
    let name = if sums { "unmounted, data checksums" } else { "unmounted" };
    Ok(Sample { name, truth: truth_of(&image)?, image, past })
}

/// A volume that crashed: committed transactions, synced files and an orphan are in its journals only.
///
/// # Errors
/// Of any operation.
pub fn crashed() -> Result<Sample> {
    let (device, mut past) = unmounted(false)?;
    past.insert(0, device.snapshot());
    let v = mount(&device)?;
    change(&v, 3)?;
    let gone = v.open(put(&v, "a/unlinked while open", 15, 20_000)?)?;
    v.unlink(dir_of(&v, "a")?, b"unlinked while open")?;
    v.sync()?;
    past.insert(0, device.snapshot());
    v.fsync(put(&v, "c/synced by itself", 16, 7000)?, false)?;
    v.fsync(put(&v, "a/inline", 17, 1500)?, false)?;
    past.insert(0, device.snapshot());
    v.fsync(put(&v, "a/deep/dir 3/synced too", 18, 30_000)?, false)?;
    drop(v.mkdir_path(b"never synced", 0o755, &Cred::root()));
    v.crash();
    drop(gone);
    let image = device.snapshot();
    Ok(Sample { name: "crashed", truth: truth_of(&image)?, image, past })
}
