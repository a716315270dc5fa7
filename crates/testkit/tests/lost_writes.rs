//! The device confirms the newest write of a node block and loses it, where the same node lay in the same place before: all
//! that the node table asked of a record until it told of the transaction holds of the older one, too.

use braidfs::format::BLOCK_BYTES;
use braidfs::format::block::{BlockKind, open};
use braidfs::format::node::NodeBlock;
use braidfs::format::super_block::SuperBlock;
use braidfs::{Cred, Error, InodeNo, MkfsOptions, OpenHow, SetAttr, Volume, mkfs};
use braidfs_check::online::{ScrubOptions, scrub_mounted};
use braidfs_check::{FsckOptions, FsckReport, check, codes};
use braidfs_device::{Device, Image, MemDevice};
use braidfs_testkit::damage::sample::mount;
use std::sync::Arc;

/// 16 MiB: the node log comes round soon.
const BLOCKS: u64 = 4096;
/// Commits after which a node log that does not come back to its old blocks never will.
const COMMITS_MAX: u32 = 20_000;

/// A volume whose newest record of a file lies where an older one of it lay.
struct Lost {
    /// The device after an unmount.
    image: Image,
    /// The node block, on the device.
    block: u64,
    /// What it held before.
    older: Vec<u8>,
    file: InodeNo,
    /// Permissions of the file now, and as the older block has them.
    modes: (u32, u32),
}

impl Lost {
    /// The device without the newest write of the block.
    fn device(&self) -> Arc<MemDevice> {
        let mut image = self.image.clone();
        image.write(self.block, &self.older).unwrap();
        Arc::new(MemDevice::from_image(image))
    }
}

fn read(image: &Image, block: u64) -> Vec<u8> {
    let mut b = vec![0; BLOCK_BYTES];
    image.read(block, &mut b).unwrap();
    b
}

/// Whether a node block has the record of `file` and no other.
fn is_of(block: &[u8], file: InodeNo) -> bool {
    block[8] == BlockKind::Node as u8
        && block[32..34] == [1, 0]
        && NodeBlock::record(block, 0).is_ok_and(|r| r.node == file.node())
}

/// The newest transaction in a block of `image` whose only record is that of `file`: block on the device, and the transaction.
fn newest(image: &Image, file: InodeNo) -> (u64, u64) {
    let sb = SuperBlock::from_block(&read(image, 0), 0).unwrap();
    let start = sb.device[0].data_start.get();
    let of_file = |at: u64| {
        let b = read(image, at);
        let h = open(&b, BlockKind::Node, sb.volume_id(), at.checked_sub(start)?).ok()?;
        is_of(&b, file).then_some((at, h.seq.get()))
    };
    image.used().filter_map(of_file).max_by_key(|f| f.1).expect("no record of the file")
}

fn put(v: &Volume, path: &str) -> InodeNo {
    let how = OpenHow { read: true, write: true, create: true, mode: 0o600, ..OpenHow::default() };
    let f = v.open_path(path.as_bytes(), how, &Cred::root()).unwrap();
    v.write(&f, 0, path.as_bytes()).unwrap();
    f.ino()
}

fn lost() -> Lost {
    let device = Arc::new(MemDevice::new(BLOCKS));
    let all = [device.clone() as Arc<dyn Device>];
    let o = MkfsOptions { domains: Some(1), mlogs: Some(1), group_bytes: Some(4 << 20), ..MkfsOptions::default() };
    mkfs::format(&all, &o).unwrap();
    let v = mount(&device).unwrap();
    let file = put(&v, "file");
    put(&v, "other");
    v.sync().unwrap();
    let mode = |n: u32| 0o400 + n % 0o200;
    let mut past: Vec<(u32, Image)> = Vec::new();
    for n in 0..COMMITS_MAX {
        v.setattr(file, &SetAttr { mode: Some(mode(n)), ..SetAttr::default() }).unwrap();
        v.sync().unwrap();
        past.push((n, device.snapshot()));
        if n % 500 != 499 {
            continue;
        }
        let image = device.snapshot();
        let block = newest(&image, file).0;
        let older = |(was, image): &(u32, Image)| {
            let b = read(image, block);
            (*was + 1 < n && is_of(&b, file)).then_some((b, *was))
        };
        // the oldest of all: the last one that it wrote there may be the newest
        if let Some((older, was)) = past.iter().find_map(older).filter(|(b, _)| *b != read(&image, block)) {
            v.unmount().unwrap();
            let image = device.snapshot();
            assert_eq!(newest(&image, file).0, block, "an unmount wrote the file again");
            return Lost { image, block, older, file, modes: (mode(n), mode(was)) };
        }
    }
    panic!("the log never came back to a block");
}

fn fsck(device: &Arc<MemDevice>, repair: bool) -> FsckReport {
    let o = FsckOptions { repair, force: true };
    check(&[device.clone() as Arc<dyn Device>], &o, &braidfs::JournalReplay, &|_, _, _| {}).unwrap()
}

#[test]
fn a_lost_write_of_a_node_block_is_noticed() {
    let lost = lost();
    assert_ne!(lost.modes.0, lost.modes.1);
    let sound = Arc::new(MemDevice::from_image(lost.image.clone()));
    assert_eq!(fsck(&sound, false).findings, []);

    // read
    let device = lost.device();
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
    let device = lost.device();
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
