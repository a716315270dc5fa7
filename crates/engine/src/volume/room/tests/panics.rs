//! What a panic that is caught leaves behind where groups are emptied: nothing that keeps later calls from their work.

use crate::{Cred, DeviceSet, DomainId, FileKind, InodeNo, MkfsOptions, MountOptions, NewNode, Volume, mkfs};
use braidfs_device::{Device, Effect, FaultDevice, MemDevice, Op, Rule};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A volume of one domain on devices of 64 MiB with faults.
fn volume(devices: usize) -> (Volume, Vec<Arc<FaultDevice>>) {
    let faults: Vec<_> =
        (0..devices).map(|_| Arc::new(FaultDevice::new(Arc::new(MemDevice::new(64 << 8)), 1))).collect();
    let all: Vec<_> = faults.iter().map(|d| d.clone() as Arc<dyn Device>).collect();
    let how = MkfsOptions { domains: Some(1), group_bytes: Some(4 << 20), ..MkfsOptions::default() };
    mkfs::format(&all, &how).unwrap();
    let v = Volume::mount(all, MountOptions { background: false, ..MountOptions::default() }).unwrap();
    (v, faults)
}

#[test]
fn a_group_that_was_being_emptied_is_like_any_other() {
    let (v, _) = volume(1);
    let (i, d) = (v.mounted(), v.mounted().dom(DomainId(0)));
    (0..4).for_each(|_| assert!(i.claim_group(d).unwrap()));
    let there = || {
        let open: Vec<u32> = d.space.groups().into_iter().filter(|g| d.space.is_open(*g)).collect();
        (open, d.space.available())
    };
    let (before, group) = (there(), d.space.groups()[2]);
    let emptying = || {
        let _e = d.space.keep_out(group).expect("there is room elsewhere");
        assert_ne!(there(), before);
        panic!("on purpose")
    };
    catch_unwind(AssertUnwindSafe(|| i.while_emptying(emptying))).unwrap_err();
    assert_eq!(there(), before);
    assert!(!i.is_emptying(), "the thread would never wait for room again");
    v.unmount().unwrap();
}

#[test]
fn a_volume_that_was_becoming_smaller_is_of_its_old_size() {
    let (v, _) = volume(1);
    let (i, before) = (v.mounted(), v.statfs());
    let smaller = |progress: &dyn Fn(u64, u64)| v.shrink(48 << 20, progress);
    catch_unwind(AssertUnwindSafe(|| smaller(&|_, _| panic!("on purpose")))).unwrap_err();
    assert!(!i.becomes_smaller.load(Ordering::SeqCst), "others would not wait for who empties groups");
    assert!(!i.is_emptying());
    assert_eq!(v.statfs(), before);
    smaller(&|_, _| ()).unwrap();
    v.unmount().unwrap();
}

#[test]
fn groups_that_were_avoided_can_be_claimed() {
    let (v, faults) = volume(2);
    let i = v.mounted();
    let new = NewNode { kind: FileKind::File, mode: 0o644, umask: 0, rdev: 0, target: b"" };
    let f = v.open(v.create(InodeNo::ROOT, b"f", &new, &Cred::root()).unwrap().ino).unwrap();
    (0..20).for_each(|n| assert_eq!(v.write(&f, n << 20, &[1; 1 << 20]).unwrap(), 1 << 20));
    v.sync().unwrap();
    let before = i.bat.lock().free_groups_but(&[]);
    faults[1].add(Rule::new(Op::Write, Effect::Panic).times(1));
    catch_unwind(AssertUnwindSafe(|| v.rebalance(&|_, _| true))).unwrap_err();
    let bat = i.bat.lock();
    assert_eq!(i.avoided_on(&bat, DeviceSet::ALL), (0, 0));
    assert!(bat.free_groups_but(&[]) + 1 >= before);
    drop(bat);
    assert!(!i.is_emptying());
    drop(f);
    v.crash();
}
