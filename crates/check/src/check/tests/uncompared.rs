//! Volumes that stopped, in which something cannot be read that a replay compares names with: the journals are replayed
//! all the same.

use super::lost_header::{content, dir_in, mounted, write};
use super::*;
use braidfs::{DomainId, RenameMode};
use braidfs_device::{Effect, FaultDevice, Op, Rule};

const EIO: i32 = 5;

/// A volume that stopped with a file moved, in a transaction, to a directory of another domain, and one synced since;
/// what it is then, and where the directory's inode lies on the device.
fn moved_and_synced() -> (Arc<SparseDevice>, [InodeNo; 2], u64) {
    let dev = fresh(64, 2);
    let v = mounted(&dev);
    let d = dir_in(&v, 1, "d");
    v.unmount().unwrap();
    let v = mounted(&dev);
    let (moved, synced) = (write(&v, "moved"), write(&v, "synced"));
    v.sync().unwrap();
    v.rename(InodeNo::ROOT, b"moved", d, b"moved", RenameMode::Replace).unwrap();
    v.commit_domain(DomainId(0), false).unwrap();
    v.write(&v.open(synced).unwrap(), 0, b"SYNCED").unwrap();
    v.fsync(synced, false).unwrap();
    let then = dev.fork();
    v.crash();
    let m = model(&then);
    let addr = m.domains[1].entry(&m.store, d.node()).unwrap().addr;
    (then, [moved, synced], m.sb.device[0].data_start.get() + addr.0)
}

/// What a repair through `device` leaves on `dev`.
fn keeps(dev: &Arc<SparseDevice>, device: Arc<dyn Device>, [moved, synced]: [InodeNo; 2]) {
    let r = check(&[device], &REPAIR, &JournalReplay, &|_, _, _| {}).unwrap();
    let given_up = [codes::REPLAY_FAILED, codes::CHANGES_LOST];
    assert!(r.findings.iter().all(|f| !given_up.contains(&f.code)), "{:#?}", r.findings);
    assert_eq!(run(dev, &REPAIR).unfixed(), 0);
    assert_eq!(run(dev, &FORCE).findings, vec![]);
    let v = mounted(dev);
    assert_eq!((content(&v, moved), content(&v, synced)), ("moved".into(), "SYNCED".into()), "{:#?}", r.findings);
    v.unmount().unwrap();
}

#[test]
fn a_directory_that_does_not_hold_costs_nothing_of_the_journals() {
    let (dev, files, block) = moved_and_synced();
    dev.write(block, &[1; BLOCK_BYTES]).unwrap();
    keeps(&dev, dev.clone(), files);
}

#[test]
fn a_directory_that_cannot_be_read_costs_nothing_of_the_journals() {
    let (dev, files, block) = moved_and_synced();
    let faulty = FaultDevice::new(dev.clone(), 7);
    faulty.add(Rule::new(Op::Read, Effect::Fail(EIO)).blocks(block..block + 1));
    keeps(&dev, Arc::new(faulty), files);
}
