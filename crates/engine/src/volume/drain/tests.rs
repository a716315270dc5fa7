//! Groups that are emptied for long: what others do meanwhile, and what is told.

use crate::volume::moves::Moves;
use crate::{
    Cred, DeviceSet, Error, FileKind, InodeNo, MkfsOptions, MountOptions, NewNode, TenantBudget, Volume, mkfs,
};
use braidfs_device::{Device, Effect, FaultDevice, MemDevice, Op, Rule};
use std::sync::{Arc, mpsc};
use std::time::Duration;

const ROOT: InodeNo = InodeNo::ROOT;

/// A device of so many MiB, with faults.
fn device(mib: u64) -> Arc<FaultDevice> {
    Arc::new(FaultDevice::new(Arc::new(MemDevice::new(mib << 8)), 1))
}

fn format(devices: &[Arc<FaultDevice>]) -> Volume {
    let all: Vec<_> = devices.iter().map(|d| d.clone() as Arc<dyn Device>).collect();
    let how = MkfsOptions { domains: Some(1), group_bytes: Some(4 << 20), ..MkfsOptions::default() };
    mkfs::format(&all, &how).unwrap();
    mount(devices)
}

fn mount(devices: &[Arc<FaultDevice>]) -> Volume {
    let all = devices.iter().map(|d| d.clone() as Arc<dyn Device>).collect();
    Volume::mount(all, MountOptions { background: false, ..MountOptions::default() }).unwrap()
}

fn create(v: &Volume, dir: InodeNo, name: &str, kind: FileKind) -> InodeNo {
    let new = NewNode { kind, mode: 0o755, umask: 0, rdev: 0, target: b"" };
    v.create(dir, name.as_bytes(), &new, &Cred::root()).unwrap().ino
}

fn only(n: usize) -> DeviceSet {
    DeviceSet::of([n]).unwrap()
}

fn tenant(v: &Volume, budget: TenantBudget) -> InodeNo {
    v.tenant_create(ROOT, b"t", 0o755, "t", budget, &Cred::root()).unwrap().root
}

/// Appends until there is no room.
fn fill(v: &Volume, ino: InodeNo) -> u64 {
    let f = v.open(ino).unwrap();
    let mut at = v.getattr(ino).unwrap().size;
    while let Ok(n) = v.write(&f, at, &[1; 1 << 16]) {
        at += n as u64;
    }
    v.sync().unwrap();
    at
}

/// Does something while another thread holds the right to empty groups.
fn while_another_empties(v: &Volume, what: impl FnOnce()) {
    let (begins, begun) = mpsc::channel();
    let (end, ended) = mpsc::channel::<()>();
    std::thread::scope(|s| {
        s.spawn(move || {
            let _kept = v.mounted().emptying.lock();
            begins.send(()).unwrap();
            let _ = ended.recv();
        });
        begun.recv().unwrap();
        what();
        drop(end);
    });
}

/// A drain may take hours, and whoever lacks room waits for one group of it only.
#[test]
fn a_drain_lets_others_empty_groups_in_between() {
    let v = format(&[device(64), device(64)]);
    let i = v.mounted();
    let seen = std::cell::Cell::new(0);
    v.drain_device(1, &|done, all| {
        seen.set(seen.get() + 1);
        assert!(i.emptying.try_lock().is_some(), "group {done} of {all}");
        true
    })
    .unwrap();
    assert!(seen.get() > 10, "{}", seen.get());
    v.end_drain(1).unwrap();
    // who ends it meanwhile ends it
    let ended = v.drain_device(1, &|done, _| {
        if done == 2 {
            v.end_drain(1).unwrap();
        }
        true
    });
    assert!(matches!(ended, Err(Error::Busy(_))), "{ended:?}");
    assert_eq!(v.drained_device(), None);
    assert!(i.emptying.lock().domains().is_empty());
    v.unmount().unwrap();
}

/// Who is at a limit of its own hears that at once while another thread empties groups of others; and who could have room waits
/// for a moment only where that thread lets nobody in between.
#[test]
fn who_lacks_room_does_not_wait_for_hours() {
    let v = format(&[device(64)]);
    let i = v.mounted();
    let t = tenant(&v, TenantBudget { space: Some(4 << 20), ..TenantBudget::default() });
    let (limited, other) = (create(&v, t, "f", FileKind::File), create(&v, ROOT, "f", FileKind::File));
    fill(&v, limited);
    fill(&v, other);
    for (ino, smaller) in [(limited, false), (other, true)] {
        std::thread::scope(|s| {
            let emptying = i.emptying.lock();
            i.becomes_smaller.store(smaller, std::sync::atomic::Ordering::SeqCst);
            let (tell, told) = mpsc::channel();
            let v = &v;
            s.spawn(move || {
                let f = v.open(ino).unwrap();
                let end = v.getattr(ino).unwrap().size;
                tell.send(v.write(&f, end, &[1; 1 << 20])).unwrap();
            });
            let wrote = told.recv_timeout(Duration::from_secs(60));
            drop(emptying);
            let wrote = wrote.expect("it waits");
            assert!(wrote.is_ok() || matches!(wrote, Err(Error::NoSpace)), "{wrote:?}");
        });
        i.becomes_smaller.store(false, std::sync::atomic::Ordering::SeqCst);
    }
    v.unmount().unwrap();
}

/// A tenant may use all devices again while another thread empties groups, and what it has is counted then: the groups that were
/// closed to it are its own all the same, by the next look of the background.
#[test]
fn groups_that_a_tenant_may_use_again_are_opened() {
    for remove in [false, true] {
        let v = format(&[device(64), device(64)]);
        let i = v.mounted();
        let t = tenant(&v, TenantBudget { devices: only(0), ..TenantBudget::default() });
        create(&v, t, "f", FileKind::File);
        v.tenant_change("t", |b| b.devices = only(1)).unwrap();
        let d = i.domain(t).unwrap();
        assert!(d.space.has_closed() && d.space.has_shut(), "this test sees nothing");
        while_another_empties(&v, || {
            if remove {
                v.tenant_remove("t").unwrap();
            } else {
                v.tenant_change("t", |b| b.devices = DeviceSet::ALL).unwrap();
            }
            // as who makes room does
            i.count_shut(d);
        });
        assert!(d.space.has_closed());
        i.move_tenants(&mut Moves::default(), &|| false);
        assert_eq!(d.space.closed_groups(), []);
        assert!(i.emptying.lock().domains().is_empty());
        v.unmount().unwrap();
    }
}

/// The same by the end of what another thread empties, in the place of the background.
#[test]
fn the_end_of_a_drain_opens_groups_that_a_tenant_may_use_again() {
    let v = format(&[device(64), device(64), device(64)]);
    let i = v.mounted();
    let t = tenant(&v, TenantBudget { devices: only(0), ..TenantBudget::default() });
    create(&v, t, "f", FileKind::File);
    v.tenant_change("t", |b| b.devices = only(1)).unwrap();
    let d = i.domain(t).unwrap();
    while_another_empties(&v, || {
        v.tenant_change("t", |b| b.devices = DeviceSet::ALL).unwrap();
        i.count_shut(d);
    });
    assert!(d.space.has_closed() && !d.space.has_shut());
    v.drain_device(2, &|_, _| true).unwrap();
    v.end_drain(2).unwrap();
    assert_eq!(d.space.closed_groups(), []);
    v.unmount().unwrap();
}

/// An inode whose record cannot be read keeps the device as others do, and the drain does not fail by it.
#[test]
fn a_drain_counts_what_cannot_be_read() {
    let devices = [device(64), device(64)];
    let v = format(&devices[..1]);
    for n in 0..40 {
        create(&v, ROOT, &format!("f{n}"), FileKind::File);
    }
    v.add_device(devices[1].clone(), false).unwrap();
    let kept = v.drain_device(0, &|_, _| true).unwrap();
    assert!(kept.inodes > 40, "{kept:?}");
    v.unmount().unwrap();
    let v = mount(&devices);
    let (i, mut records) = (v.mounted(), Vec::new());
    for g in i.groups_of_device(0) {
        let Some(d) = i.siblings.owner_of(g).map(|id| i.dom(id)) else { continue };
        d.nodes
            .for_each_used_of(g, &mut |_, entry| {
                records.push({ entry.addr }.0);
                Ok(())
            })
            .unwrap();
    }
    // not that of the root directory, which the mount has read
    let block = *records.last().unwrap();
    let start = i.store.geometry().group_start(i.groups_of_device(1).start).0;
    assert!(block >= start, "what moved lies on the other device");
    let at = block - start + v.super_block().device[1].data_start.get();
    devices[1].add(Rule::new(Op::Read, Effect::Fail(5)).blocks(at..at + 1));
    let again = v.drain_device(0, &|_, _| true).unwrap();
    assert!(devices[1].fired() > 0, "it was read: this test sees nothing");
    assert_eq!(again.inodes, kept.inodes);
    devices[1].clear();
    v.unmount().unwrap();
}

/// While a volume becomes smaller, too, nothing comes to lie where a tenant may have nothing, and its limit counts that: only what
/// is behind the new end is emptied for it.
#[test]
fn a_tenant_stays_off_a_device_while_the_volume_becomes_smaller() {
    let v = format(&[device(64), device(64)]);
    let i = v.mounted();
    let budget = TenantBudget { devices: only(0), space: Some(8 << 20), ..TenantBudget::default() };
    let t = tenant(&v, budget);
    create(&v, t, "f", FileKind::File);
    v.tenant_change("t", |b| b.devices = only(1)).unwrap();
    let d = i.domain(t).unwrap();
    let closed = d.space.closed_groups();
    assert!(!closed.is_empty() && d.space.has_shut(), "this test sees nothing");
    let seen = std::cell::Cell::new(0);
    v.shrink(48 << 20, &|_, _| {
        seen.set(seen.get() + 1);
        assert!(closed.iter().all(|g| !d.space.is_open(*g)), "{closed:?} and {:?}", d.space.closed_groups());
        assert!(d.space.has_shut());
    })
    .unwrap();
    assert!(seen.get() > 0);
    assert_eq!(d.space.closed_groups(), closed);
    v.unmount().unwrap();
}

/// Nobody claims a group of a device that is drained: a tenant is not left with that one alone.
#[test]
fn a_tenant_has_a_device_beside_one_that_is_drained() {
    let v = format(&[device(64), device(64), device(64)]);
    let two = DeviceSet::of([1, 2]).unwrap();
    create(&v, tenant(&v, TenantBudget { devices: two, ..TenantBudget::default() }), "f", FileKind::File);
    v.drain_device(1, &|_, _| true).unwrap();
    let text = |r: Result<crate::DeviceChange, Error>| match r {
        Err(Error::Size(why)) => why,
        other => panic!("{other:?}"),
    };
    let why = text(v.remove_device(2, &|_, _| true));
    assert!(why.contains("tenant t may use no other device"), "{why}");
    // nor is the other one drained in its place
    assert!(matches!(v.drain_device(2, &|_, _| true), Err(Error::Busy(_))));
    v.end_drain(1).unwrap();
    v.drain_device(2, &|_, _| true).unwrap();
    v.unmount().unwrap();
}
