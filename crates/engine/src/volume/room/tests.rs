//! Groups that go from domain to domain while others use them, or fail.

mod panics;

use crate::volume::kept::Kept;
use crate::{
    Cred, DeviceSet, DomainId, FileKind, InodeNo, MkfsOptions, MountOptions, NewNode, SetAttr, TenantBudget, Volume,
    mkfs,
};
use braidfs_device::{Device, Effect, FaultDevice, MemDevice, Op, Rule};
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// A file that is open loses its name while a domain gives a group back: the journal keeps the newest transaction then, as
/// only that one lists such files, and it must not be the one that freed what was in the group.
#[test]
fn nothing_in_the_journal_speaks_of_a_group_that_was_given_back() {
    // behind each flush of that in turn
    for flush in 0.. {
        let memory = Arc::new(MemDevice::new(64 << 8));
        let faults = Arc::new(FaultDevice::new(memory.clone(), 1));
        let device: Arc<dyn Device> = faults.clone();
        mkfs::format(std::slice::from_ref(&device), &MkfsOptions { domains: Some(2), ..MkfsOptions::default() })
            .unwrap();
        let options = MountOptions { background: false, ..MountOptions::default() };
        let v = Volume::mount(vec![device], options.clone()).unwrap();
        let create = |dir, name: &[u8], kind| {
            let new = NewNode { kind, mode: 0o755, umask: 0, rdev: 0, target: b"" };
            v.create(dir, name, &new, &Cred::root()).unwrap().ino
        };
        let (a, i) = (create(InodeNo::ROOT, b"a", FileKind::Dir), v.mounted());
        let names = (0..8).map(|n| create(InodeNo::ROOT, format!("b{n}").as_bytes(), FileKind::Dir));
        let b = names.into_iter().find(|b| v.domain_of(*b).unwrap() != v.domain_of(a).unwrap()).unwrap();
        let (to, from) = (i.domain(a).unwrap(), i.domain(b).unwrap());
        let open = v.open(create(b, b"open", FileKind::File)).unwrap();
        let large = v.open(create(b, b"large", FileKind::File)).unwrap();
        let mut at = 0;
        while let Ok(n) = v.write(&large, at, &[1; 1 << 20]) {
            at += n as u64;
        }
        drop(large);
        v.sync().unwrap();
        v.unlink(b, b"large").unwrap();
        v.sync().unwrap();
        let before = from.space.groups();
        faults.add(Rule::new(Op::Flush, Effect::Stall).skip(flush).times(1));
        let stalled = std::thread::scope(|s| {
            let claim = s.spawn(|| i.claim_group(to).unwrap());
            while faults.stalled() == 0 && !claim.is_finished() {
                std::thread::yield_now();
            }
            let stalled = faults.stalled() > 0;
            if stalled {
                v.unlink(b, b"open").unwrap();
            }
            faults.clear();
            assert!(claim.join().unwrap());
            stalled
        });
        assert!(from.space.groups().len() < before.len(), "no group was given back");
        let after = Arc::new(MemDevice::from_image(memory.snapshot()));
        drop(open);
        v.crash();
        Volume::mount(vec![after], options).unwrap_or_else(|e| panic!("flush {flush}: {e}")).unmount().unwrap();
        if !stalled {
            assert!(flush > 2);
            break;
        }
    }
}

/// While a group is emptied its free blocks are held, so that nobody takes them. Then there is less room than is told
/// of: who was promised that room waits for it.
#[test]
fn who_lacks_room_waits_for_the_one_that_empties_groups() {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(64 << 8));
    mkfs::format(std::slice::from_ref(&device), &MkfsOptions { domains: Some(2), ..MkfsOptions::default() }).unwrap();
    let options = MountOptions { background: false, ..MountOptions::default() };
    let v = Volume::mount(vec![device], options).unwrap();
    let new = NewNode { kind: FileKind::File, mode: 0o644, umask: 0, rdev: 0, target: b"" };
    let ino = v.create(InodeNo::ROOT, b"f", &new, &Cred::root()).unwrap().ino;
    let f = v.open(ino).unwrap();
    let i = v.mounted();
    let d = i.domain(ino).unwrap();
    while i.claim_group(d).unwrap() {}
    v.sync().unwrap();

    let emptying = i.emptying.lock();
    let held = d.space.available();
    d.space.reserve(held, false).unwrap();
    std::thread::scope(|s| {
        let (tell, told) = mpsc::channel();
        let (tell_room, room) = mpsc::channel();
        let v = &v;
        s.spawn(move || tell.send(v.write_accepted(&f, 0, &[1; 1 << 20])).unwrap());
        s.spawn(move || tell_room.send(v.find_room(ino, 256)).unwrap());
        let early = told.recv_timeout(Duration::from_millis(500));
        assert!(early.is_err(), "{early:?} while another thread holds all the room");
        let early = room.recv_timeout(Duration::from_millis(10));
        assert!(early.is_err(), "{early:?} while another thread holds all the room");
        d.space.unreserve(held);
        drop(emptying);
        assert_eq!(told.recv().unwrap().unwrap(), 1 << 20);
        assert!(room.recv().unwrap().unwrap() >= 256);
    });
    v.unmount().unwrap();
}

/// A domain that cannot even look at its groups is none that the one without room hears of: that has no room.
#[test]
fn an_error_of_a_neighbour_is_not_that_of_who_lacks_room() {
    let faults = Arc::new(FaultDevice::new(Arc::new(MemDevice::new(64 << 8)), 1));
    let device: Arc<dyn Device> = faults.clone();
    let how = MkfsOptions { domains: Some(2), group_bytes: Some(4 << 20), ..MkfsOptions::default() };
    mkfs::format(std::slice::from_ref(&device), &how).unwrap();
    let options = MountOptions { background: false, ..MountOptions::default() };
    let v = Volume::mount(vec![device.clone()], options.clone()).unwrap();
    let create = |v: &Volume, dir, name: &str, kind| {
        let new = NewNode { kind, mode: 0o755, umask: 0, rdev: 0, target: b"" };
        v.create(dir, name.as_bytes(), &new, &Cred::root()).unwrap().ino
    };
    let dirs: Vec<_> = (0..8).map(|n| create(&v, InodeNo::ROOT, &format!("d{n}"), FileKind::Dir)).collect();
    let other = *dirs.iter().find(|d| v.domain_of(**d).unwrap() != v.domain_of(InodeNo::ROOT).unwrap()).unwrap();
    let i = v.mounted();
    let (d, o) = (i.domain(InodeNo::ROOT).unwrap(), i.domain(other).unwrap());
    while i.claim_group(o).unwrap() {}
    // in the last group comes to lie what is written while nothing is allocated in the others
    let f = create(&v, other, "f", FileKind::File);
    v.sync().unwrap();
    let (mut kept, groups) = (Kept::default(), o.space.groups());
    i.keep_out_of(&mut kept, groups[..groups.len() - 1].iter().copied());
    v.setattr(f, &SetAttr { mode: Some(0o600), ..SetAttr::default() }).unwrap();
    v.sync().unwrap();
    i.let_go(&mut kept);
    let sparse = i.spare(o, &[], 0).1;
    assert!(!sparse.is_empty(), "no group holds but metadata: this test sees nothing");
    let (d, o) = (d.id, o.id);
    v.unmount().unwrap();

    // anew, so that no table of owners is in memory
    let v = Volume::mount(vec![device], options).unwrap();
    let i = v.mounted();
    let (d, o) = (i.dom(d), i.dom(o));
    assert!(d.failed().is_none() && o.failed().is_none());
    let sparse = i.spare(o, &[], 0).1;
    assert!(!sparse.is_empty());
    let g = i.store.geometry();
    for group in &sparse {
        let start = g.group_start(*group).0;
        faults.add(Rule::new(Op::Read, Effect::Fail(5)).blocks(start..start + u64::from(g.group_blocks())));
    }
    i.empty_sparse(o).unwrap_err();
    assert!(!i.claim_emptied_group(d).unwrap());
    faults.clear();
    assert!(i.claim_emptied_group(d).unwrap());
    v.unmount().unwrap();
}

/// Groups that nobody takes for a moment, while data moves to other devices, are there: `df` shows no smaller volume.
#[test]
fn groups_that_are_avoided_count_as_free() {
    let devices: Vec<Arc<dyn Device>> = (0..2).map(|_| Arc::new(MemDevice::new(64 << 8)) as Arc<dyn Device>).collect();
    let how = MkfsOptions { domains: Some(2), group_bytes: Some(4 << 20), ..MkfsOptions::default() };
    mkfs::format(&devices, &how).unwrap();
    let v = Volume::mount(devices, MountOptions { background: false, ..MountOptions::default() }).unwrap();
    let budget = TenantBudget { devices: DeviceSet::of([0]).unwrap(), ..TenantBudget::default() };
    let t = v.tenant_create(InodeNo::ROOT, b"t", 0o755, "t", budget, &Cred::root()).unwrap();
    let (i, before, of_tenant) = (v.mounted(), v.statfs(), v.statfs_of(t.root).unwrap());
    let avoid = |groups| {
        let mut bat = i.bat.lock();
        bat.avoid(groups);
        i.count_unclaimed_in(&bat);
    };
    avoid(vec![i.groups_of_device(0)]);
    let (now, its) = (v.statfs(), v.statfs_of(t.root).unwrap());
    assert!(now.available < before.available, "they are no room for now");
    let sizes = |s: &crate::StatFs| (s.blocks, s.free, s.inodes, s.inodes_free);
    assert_eq!(sizes(&now), sizes(&before));
    assert_eq!((its.blocks, its.free), (of_tenant.blocks, of_tenant.free));
    avoid(Vec::new());
    assert_eq!(sizes(&v.statfs()), sizes(&before));
    v.unmount().unwrap();
}

/// Tables of one group cannot be written: the domain takes another one, and nobody asks for that one again.
#[test]
fn a_group_whose_tables_cannot_be_written_is_passed_over() {
    let faults = Arc::new(FaultDevice::new(Arc::new(MemDevice::new(64 << 8)), 1));
    let device: Arc<dyn Device> = faults.clone();
    let how = MkfsOptions { domains: Some(2), group_bytes: Some(4 << 20), ..MkfsOptions::default() };
    mkfs::format(std::slice::from_ref(&device), &how).unwrap();
    let v = Volume::mount(vec![device], MountOptions { background: false, ..MountOptions::default() }).unwrap();
    let (i, d) = (v.mounted(), v.mounted().dom(DomainId(0)));
    let (bad, free) = {
        let mut bat = i.bat.lock();
        (bat.find_free(&[]).unwrap() as u32, bat.free_groups_but(&[]))
    };
    let (_, at) = i.store.place(i.store.geometry().group_start(bad), 1).unwrap();
    faults.add(Rule::new(Op::Write, Effect::Fail(5)).blocks(at..at + 1));
    assert!(i.claim_group(d).unwrap());
    assert!(faults.fired() > 0 && !d.space.groups().contains(&bad));
    assert_eq!(i.bat.lock().free_groups_but(&[]), free - 2, "that one is no room");
    faults.clear();
    (2..free).for_each(|n| assert!(i.claim_group(d).unwrap(), "{n} of {free}"));
    // all others are taken: there is none to be had, and the device is well
    assert!(!i.claim_group(d).unwrap());
    assert!(d.failed().is_none() && !d.space.groups().contains(&bad));
    v.unmount().unwrap();
}

/// Who flushes goes by a count of groups on each device: it says what the groups say, as they come and go.
#[test]
fn the_devices_of_a_domain_are_those_of_its_groups() {
    let devices: Vec<Arc<dyn Device>> = (0..2).map(|_| Arc::new(MemDevice::new(8192)) as Arc<dyn Device>).collect();
    mkfs::format(&devices, &MkfsOptions { domains: Some(2), ..MkfsOptions::default() }).unwrap();
    let v = Volume::mount(devices, MountOptions { background: false, ..MountOptions::default() }).unwrap();
    let (i, [a, b]) = (v.mounted(), [0, 1].map(|d| v.mounted().dom(DomainId(d))));
    let devices = || {
        [a, b].map(|d| {
            let by_count: Vec<usize> = d.space.devices().collect();
            assert_eq!(by_count, i.store.devices_of(d.space.groups()), "{}", d.id);
            by_count
        })
    };
    assert_eq!(devices(), [vec![0], vec![1]]);
    while i.bat.lock().free_groups_but(&[]) > 0 {
        assert!(i.claim_group(a).unwrap());
    }
    assert_eq!(devices(), [vec![0, 1], vec![1]]);
    // the first domain gives back what holds nothing
    let before = a.space.groups().len();
    while i.claim_group(b).unwrap() {
        devices();
    }
    assert!(a.space.groups().len() < before);
    assert_eq!(devices()[0], [0], "no group on the second device holds anything");
    v.unmount().unwrap();
}
