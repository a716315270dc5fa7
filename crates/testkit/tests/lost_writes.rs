//! The device confirms the newest write of a node block and loses it, where the same node lay in the same place before: all
//! that the node table asked of a record until it told of the transaction holds of the older one, too. And no two transactions
//! have one number, so that it tells them apart.

use braidfs::format::BLOCK_BYTES;
use braidfs::format::block::{BlockKind, open};
use braidfs::format::domain::DomainHeader;
use braidfs::format::node::NodeBlock;
use braidfs::format::super_block::SuperBlock;
use braidfs::{Cred, DomainId, Error, InodeNo, MkfsOptions, OpenHow, Placement, RenameMode, SetAttr, Volume, mkfs};
use braidfs_check::online::{ScrubOptions, scrub_mounted};
use braidfs_check::{FsckOptions, FsckReport, check, codes};
use braidfs_device::{Device, Effect, FaultDevice, Image, MemDevice, Op, Rule};
use braidfs_testkit::damage::sample::{mount, options};
use std::ops::Range;
use std::sync::Arc;

/// 16 MiB: the node log comes round soon.
const BLOCKS: u64 = 4096;
/// Commits after which a node log that does not come back to its old blocks never will.
const COMMITS_MAX: u32 = 20_000;

/// A volume whose newest record of a file lies where an older one of it lay.
struct Lost {
    back: Back,
    file: InodeNo,
    /// Permissions of the file now, and as the older block has them.
    modes: (u32, u32),
}

fn read(image: &Image, block: u64) -> Vec<u8> {
    let mut b = vec![0; BLOCK_BYTES];
    image.read(block, &mut b).unwrap();
    b
}

/// Whether a node block has the record of `file` and no other.
fn is_record_of(block: &[u8], file: InodeNo) -> bool {
    block[8] == BlockKind::Node as u8
        && block[32..34] == [1, 0]
        && NodeBlock::record(block, 0).is_ok_and(|r| r.node == file.node())
}

/// Whether a block is a bucket of `dir`.
fn is_bucket_of(block: &[u8], dir: InodeNo) -> bool {
    block[8] == BlockKind::Dir as u8 && block[32..40] == dir.0.to_le_bytes()
}

/// The newest transaction in a whole block of `image` for which `is` holds: block on the device, and the transaction.
fn newest(image: &Image, is: &dyn Fn(&[u8]) -> bool) -> (u64, u64) {
    let sb = SuperBlock::from_block(&read(image, 0), 0).unwrap();
    let start = sb.device[0].data_start.get();
    let seq = |at: u64| {
        let b = read(image, at);
        let addr = at.checked_sub(start)?;
        let of = |kind| open(&b, kind, sb.volume_id(), addr).ok();
        let h = of(BlockKind::Node).or_else(|| of(BlockKind::Dir))?;
        is(&b).then_some((at, h.seq.get()))
    };
    image.used().filter_map(seq).max_by_key(|f| f.1).expect("no such block")
}

fn put(v: &Volume, path: &str) -> InodeNo {
    let how = OpenHow { read: true, write: true, create: true, mode: 0o600, ..OpenHow::default() };
    let f = v.open_path(path.as_bytes(), how, &Cred::root()).unwrap();
    v.write(&f, 0, path.as_bytes()).unwrap();
    f.ino()
}

/// A volume whose newest block of an inode lies where an older one of it lay.
struct Back {
    /// The device after an unmount.
    image: Image,
    /// The block, on the device.
    block: u64,
    /// What it held before.
    older: Vec<u8>,
    /// Numbers of the changes: of the newest, and of the one that the older block has.
    changes: (u32, u32),
}

impl Back {
    /// The device without the newest write of the block.
    fn device(&self) -> Arc<MemDevice> {
        let mut image = self.image.clone();
        image.write(self.block, &self.older).unwrap();
        Arc::new(MemDevice::from_image(image))
    }
}

fn small(mlogs: u16) -> (Arc<MemDevice>, Volume) {
    let device = Arc::new(MemDevice::soiled(BLOCKS));
    let o = MkfsOptions { domains: Some(1), mlogs: Some(mlogs), group_bytes: Some(4 << 20), ..MkfsOptions::default() };
    mkfs::format(&[device.clone() as Arc<dyn Device>], &o).unwrap();
    let v = mount(&device).unwrap();
    (device, v)
}

/// Changes and commits until the newest block for which `is` holds lies where an older one lay; then unmounts.
fn come_back(device: &MemDevice, v: Volume, is: &dyn Fn(&[u8]) -> bool, change: &dyn Fn(&Volume, u32)) -> Back {
    let mut past: Vec<(u32, Image)> = Vec::new();
    for n in 0..COMMITS_MAX {
        change(&v, n);
        v.sync().unwrap();
        past.push((n, device.snapshot()));
        if n % 500 != 499 {
            continue;
        }
        let image = device.snapshot();
        let block = newest(&image, is).0;
        let older = |(was, image): &(u32, Image)| {
            let b = read(image, block);
            (*was + 1 < n && is(&b)).then_some((b, *was))
        };
        // the oldest of all: the last one that it wrote there may be the newest
        if let Some((older, was)) = past.iter().find_map(older).filter(|(b, _)| *b != read(&image, block)) {
            v.unmount().unwrap();
            let image = device.snapshot();
            assert_eq!(newest(&image, is).0, block, "an unmount wrote it again");
            return Back { image, block, older, changes: (n, was) };
        }
    }
    panic!("the log never came back to a block");
}

fn lost() -> Lost {
    let (device, v) = small(1);
    let file = put(&v, "file");
    put(&v, "other");
    v.sync().unwrap();
    let mode = |n: u32| 0o400 + n % 0o200;
    let change = |v: &Volume, n: u32| {
        v.setattr(file, &SetAttr { mode: Some(mode(n)), ..SetAttr::default() }).unwrap();
    };
    let back = come_back(&device, v, &|b| is_record_of(b, file), &change);
    let modes = (mode(back.changes.0), mode(back.changes.1));
    Lost { back, file, modes }
}

fn fsck(device: &Arc<MemDevice>, repair: bool) -> FsckReport {
    let o = FsckOptions { repair, force: true };
    check(&[device.clone() as Arc<dyn Device>], &o, &braidfs::JournalReplay, &|_, _, _| {}).unwrap()
}

#[test]
fn a_lost_write_of_a_node_block_is_noticed() {
    let lost = lost();
    assert_ne!(lost.modes.0, lost.modes.1);
    let sound = Arc::new(MemDevice::from_image(lost.back.image.clone()));
    assert_eq!(fsck(&sound, false).findings, []);

    // read
    let device = lost.back.device();
    let v = mount(&device).unwrap();
    let why = v.getattr(lost.file).expect_err("an older state was read as if it were the newest");
    assert!(matches!(why, Error::Corrupt(_)), "{why}");
    assert!(v.resolve(b"other", true, &Cred::root()).is_ok());
    let scrubbed = scrub_mounted(&v, &ScrubOptions::default(), &mut |_, _, _| true);
    let told: Vec<(u32, Option<u64>)> = scrubbed.findings.iter().map(|f| (f.code, f.node)).collect();
    assert_eq!(told, [(codes::NODE_BLOCK_OLD, Some(lost.file.0))], "{:#?}", scrubbed.findings);
    // the domain has gone read-only
    assert!(v.unmount().is_err());

    // checked, and repaired
    let device = lost.back.device();
    for repair in [false, true] {
        let report = fsck(&device, repair);
        let about: Vec<u32> = report.findings.iter().filter(|f| f.node == Some(lost.file.0)).map(|f| f.code).collect();
        assert_eq!(about, [codes::NODE_BLOCK_OLD], "{:#?}", report.findings);
        assert_eq!(report.findings.iter().all(|f| f.fixed), repair, "{:#?}", report.findings);
    }
    assert_eq!(fsck(&device, false).findings, []);
    let v = mount(&device).unwrap();
    let again = v.resolve(b"file", true, &Cred::root()).unwrap();
    assert_eq!((again.ino, again.mode & 0o7777), (lost.file, lost.modes.1), "the record that was left stands in");
    v.unmount().unwrap();
}

/// An older bucket in the place of a newer one is read as it is; a check knows better, by the names in the inodes.
#[test]
fn a_lost_write_of_a_bucket_is_found_by_the_names_in_the_inodes() {
    let (device, v) = small(1);
    let dir = v.mkdir_path(b"dir", 0o755, &Cred::root()).unwrap().ino;
    // more than an inode record takes, and less than two buckets do
    (0..45).for_each(|i| {
        put(&v, &format!("dir/{i:040}"));
    });
    let file = put(&v, "dir/moving");
    let name = |n: u32| if n == 0 { "moving".to_owned() } else { format!("moving-{n}") };
    let change = |v: &Volume, n: u32| {
        v.rename(dir, name(n).as_bytes(), dir, name(n + 1).as_bytes(), RenameMode::default()).unwrap();
    };
    let back = come_back(&device, v, &|b| is_bucket_of(b, dir), &change);
    let (now, was) = (name(back.changes.0 + 1), name(back.changes.1 + 1));
    assert_eq!(fsck(&Arc::new(MemDevice::from_image(back.image.clone())), false).findings, []);

    let device = back.device();
    for repair in [false, true] {
        let report = fsck(&device, repair);
        let mut codes: Vec<u32> = report.findings.iter().map(|f| f.code).collect();
        codes.sort_unstable();
        assert_eq!(codes, [codes::ENTRY_STALE, codes::LINK_NO_ENTRY], "{:#?}", report.findings);
        assert_eq!(report.findings.iter().all(|f| f.fixed), repair, "{:#?}", report.findings);
    }
    let v = mount(&device).unwrap();
    let at = |name: &str| v.resolve(format!("dir/{name}").as_bytes(), true, &Cred::root());
    assert_eq!(at(&now).unwrap().ino, file);
    assert!(matches!(at(&was), Err(Error::NotFound)), "the older name is back");
    v.unmount().unwrap();
    assert_eq!(fsck(&device, false).findings, []);
}

/// Where the journal of a domain lies on the device.
fn journal(image: &Image, domain: DomainId) -> Range<u64> {
    let sb = SuperBlock::from_block(&read(image, 0), 0).unwrap();
    let pair = sb.domain_table.get() + 2 * u64::from(domain.0);
    let both = [read(image, pair), read(image, pair + 1)].concat();
    let (.., h) = DomainHeader::from_pair(&both, sb.volume_id(), pair, domain.0).unwrap();
    let start = sb.device[0].data_start.get() + h.journal_start.get();
    start..start + u64::from(h.journal_blocks.get())
}

/// The newest transaction of a domain that wrote a node block which is on the device.
fn newest_of(image: &Image, domain: DomainId) -> u64 {
    let is_of = |b: &[u8]| b[8] == BlockKind::Node as u8 && b[10..12] == domain.0.to_le_bytes();
    newest(image, &is_of).1
}

/// A crash, and then one in each recovery, leave node blocks on the device and nothing else of the transaction that wrote
/// them. Whoever recovers writes node blocks by a number of its own: an older block in the place of one that the device loses
/// would else say that it is the newest.
#[test]
fn no_recovery_takes_the_number_of_a_transaction_that_a_crash_cut_off() {
    let device = Arc::new(MemDevice::soiled(2 * BLOCKS));
    let o = MkfsOptions { domains: Some(2), placement: Placement::Spread, ..MkfsOptions::default() };
    mkfs::format(&[device.clone() as Arc<dyn Device>], &o).unwrap();
    let faulty = || Arc::new(FaultDevice::new(device.clone(), 1));
    let mount_on = |d: &Arc<FaultDevice>| Volume::mount(vec![d.clone() as Arc<dyn Device>], options());

    let first = faulty();
    let v = mount_on(&first).unwrap();
    v.mkdir_path(b"dir", 0o755, &Cred::root()).unwrap();
    v.sync().unwrap();
    let of_dir = v.domain_of(v.resolve(b"dir", true, &Cred::root()).unwrap().ino).unwrap();
    let far = (0..10).map(|i| format!("dir/{i}")).find_map(|path| {
        let ino = put(&v, &path);
        (v.domain_of(ino).unwrap() != of_dir).then_some((path, ino))
    });
    let (path, file) = far.expect("all files are of the directory's domain");
    // durable with its name, by its own domain
    v.fsync(file, false).unwrap();
    let lost = Rule::new(Op::Write, Effect::Fail(5)).blocks(journal(&device.snapshot(), of_dir));
    first.add(lost.clone());
    v.sync().expect_err("the journal was written");
    v.crash();
    let mut used = vec![newest_of(&device.snapshot(), of_dir)];
    for _ in 0..3 {
        let again = faulty();
        again.add(lost.clone());
        mount_on(&again).map(|_| ()).expect_err("the journal was written");
        used.push(newest_of(&device.snapshot(), of_dir));
    }
    let v = mount(&device).unwrap();
    used.push(newest_of(&device.snapshot(), of_dir));
    assert!(used.windows(2).all(|w| w[0] < w[1]), "numbers of transactions that wrote node blocks: {used:?}");
    assert_eq!(v.resolve(path.as_bytes(), true, &Cred::root()).unwrap().ino, file);
    v.unmount().unwrap();
    assert_eq!(fsck(&device, false).findings, []);
}
