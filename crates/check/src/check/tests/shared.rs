//! Forged files of very many extents that name the same blocks: the work is counted.

use super::*;
use braidfs_device::CountDevice;

/// Extents of the forged file.
const EXTENTS: u64 = 100_000;

/// A volume with a forged file of [`EXTENTS`] extents, each of one of `blocks` blocks of which the first is that of the honest
/// file beside it; the model that wrote it, and the number of the forged file.
fn forged(blocks: u64) -> (Arc<SparseDevice>, Model, InodeNo) {
    forged_of(EXTENTS, 1, blocks)
}

/// [`forged`] with so many extents of so many blocks each.
fn forged_of(extents: u64, len: u32, blocks: u64) -> (Arc<SparseDevice>, Model, InodeNo) {
    let dev = formatted(64, 1, Some(16 << 20));
    let mut m = model(&dev);
    let root = InodeNo::ROOT;
    let n = add(&mut m, 0, 0o100_600, &[(root, "forged")], Content::None);
    // the owner tables are written in the order of numbers: they name this one
    let honest = add(&mut m, 0, 0o100_600, &[(root, "honest")], Content::None);
    add_extents(&mut m, honest, 3);
    let first = m.body(honest).unwrap().extents[0].addr.0;
    let ino = m.body(n).unwrap();
    let addr = |i: u64| BlockAddr(first + i % blocks);
    ino.inode.content = Content::Extents(vec![]);
    let step = 2 * u64::from(len);
    ino.extents =
        (0..extents).map(|i| Extent { lblk: step * i, addr: addr(i), len, unwritten: false, sums: None }).collect();
    (ino.inode.size, ino.inode.blocks) = (step * extents * BLOCK_BYTES as u64, extents * u64::from(len));
    ino.dirty.extents = true;
    repair::write(&mut m).unwrap();
    (dev, m, n)
}

/// What a check finds, and how often it reads.
fn counted(dev: &Arc<SparseDevice>) -> (FsckReport, u64) {
    let dev = Arc::new(CountDevice::new(Arc::clone(dev) as Arc<dyn Device>));
    let report = check(&[Arc::clone(&dev) as Arc<dyn Device>], &FORCE, &JournalReplay, &|_, _, _| {}).unwrap();
    (report, dev.counters().reads)
}

#[test]
fn shared_blocks_take_no_read_for_each_extent() {
    let (dev, _, n) = forged(5);
    let (report, reads) = counted(&dev);
    let shared: Vec<u64> =
        report.findings.iter().filter(|f| f.code == codes::BLOCK_SHARED).filter_map(|f| f.node).collect();
    // of the five blocks the honest file has every other one, and each of the others is the forged one's once
    assert_eq!(shared, vec![n.0; EXTENTS as usize - 2]);
    assert!(reads < EXTENTS / 20, "{reads} reads");
    assert_eq!(run(&dev, &REPAIR).unfixed(), 0);
    let mut m = model(&dev);
    assert_eq!(m.log.findings, vec![]);
    let honest = find(&mut m, "honest");
    assert_eq!((m.body(n).unwrap().extent_blocks(), m.body(honest).unwrap().extent_blocks()), (2, 3));
}

#[test]
fn blocks_of_an_old_record_take_no_read_each() {
    let (dev, mut m, n) = forged(1000);
    set_written(&mut m, n.node(), |w| w + 1);
    repair::write(&mut m).unwrap();
    drop(m);
    let (report, reads) = counted(&dev);
    let told: Vec<u32> = report.findings.iter().filter(|f| f.node == Some(n.0)).map(|f| f.code).collect();
    assert_eq!(told, [codes::NODE_BLOCK_OLD, codes::EXTENT_OLD], "{:#?}", report.findings);
    assert!(reads < EXTENTS / 20, "{reads} reads");
}

/// Each of the extents names as many blocks as there are: they are asked for once, not once for each extent.
#[test]
fn long_extents_of_an_old_record_are_not_gone_through_one_by_one() {
    let (dev, mut m, n) = forged_of(50_000, 2000, 3);
    set_written(&mut m, n.node(), |w| w + 1);
    repair::write(&mut m).unwrap();
    drop(m);
    let (report, _) = counted(&dev);
    let told: Vec<u32> = report.findings.iter().filter(|f| f.node == Some(n.0)).map(|f| f.code).collect();
    assert_eq!(told, [codes::NODE_BLOCK_OLD, codes::EXTENT_OLD], "{:#?}", report.findings);
    assert_eq!(run(&dev, &REPAIR).unfixed(), 0);
    let mut m = model(&dev);
    assert_eq!(m.log.findings, vec![]);
    // all but what the honest file has, each block once
    let honest = find(&mut m, "honest");
    assert_eq!(m.body(honest).unwrap().extent_blocks(), 3);
    assert!(m.body(n).unwrap().extent_blocks() <= 2002 - 2);
}
