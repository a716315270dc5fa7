//! Devices that a tenant may use.

use braidfs::store::interface::LiveVolume;
use braidfs::{
    Cred, Error, FileKind, InodeNo, JournalMode, MkfsOptions, MountOptions, OpenFile, SetAttr, TenantBudget, Volume,
};
use braidfs_device::Device;
use braidfs_testkit::small::{self, ALL, BLOCK, MIB, ROOT, close, content, file, fill, holds, memory, mount, set};
use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A volume in groups of 4 MiB, its two domains on the first two devices.
fn volume(mib: &[u64]) -> (Vec<Arc<dyn Device>>, Volume) {
    let all: Vec<_> = mib.iter().map(|n| memory(*n)).collect();
    let how = MkfsOptions { domains: Some(2), group_bytes: Some(4 * MIB), ..MkfsOptions::default() };
    small::format(&all, mib, &how);
    let v = mount(&all);
    (all, v)
}

fn tenant(v: &Volume, devices: &[usize], space: Option<u64>) -> InodeNo {
    let budget = TenantBudget { devices: set(devices), space, ..TenantBudget::default() };
    v.tenant_create(ROOT, b"t", 0o755, "t", budget, &Cred::root()).unwrap().root
}

fn allow(v: &Volume, numbers: &[usize]) -> Result<(), Error> {
    v.tenant_change("t", |b| b.devices = set(numbers)).map(drop)
}

fn moved(v: &Volume) -> braidfs::Elsewhere {
    v.tenant_move("t", &|_, _| true).unwrap()
}

/// Block groups of the tenant on each device.
fn groups(v: &Volume) -> Vec<usize> {
    let (sb, all) = (v.super_block(), v.groups(v.tenant("t").unwrap().domain));
    let of = |d: &braidfs::format::super_block::DeviceEntry| {
        let range = d.first_group.get()..d.first_group.get() + d.groups.get();
        all.iter().filter(|g| range.contains(g)).count()
    };
    sb.device_table().iter().map(of).collect()
}

fn truncate(v: &Volume, f: &OpenFile, size: u64) {
    v.setattr(f.ino(), &SetAttr { size: Some(size), ..SetAttr::default() }).unwrap();
    v.sync().unwrap();
}

fn text<T: std::fmt::Debug>(result: Result<T, Error>) -> String {
    result.unwrap_err().to_string()
}

/// Numbers and data: all of it lies there, ENOSPC comes when that is full, `df` counts that, and others have room.
#[test]
fn groups_are_claimed_where_the_tenant_may_have_them() {
    let (all, v) = volume(&[48, 40, 64]);
    let root = tenant(&v, &[1], None);
    let told = v.statfs_of(root).unwrap();
    assert!(told.blocks * BLOCK < 40 * MIB && told.available * BLOCK > 25 * MIB, "{told:?}");
    let f = file(&v, root, "f");
    let full = fill(&v, &f, ALL);
    assert!(full + 3 * MIB > told.available * BLOCK && full < 40 * MIB, "{full}, {told:?}");
    let now = v.statfs_of(root).unwrap();
    assert!(now.available < 64 && v.write_room(f.ino()) < 64, "{now:?}");
    let on = groups(&v);
    assert!(on[0] == 0 && on[1] > 5 && on[2] == 0, "{on:?}");
    // others have what is there
    let other = file(&v, ROOT, "other");
    assert_eq!(fill(&v, &other, 40), 40 * MIB);
    // numbers, too
    truncate(&v, &f, 0);
    let made = (0..100_000).take_while(|n| {
        let made = v.create(root, format!("n{n}").as_bytes(), &small::new_node(FileKind::File), &Cred::root());
        assert!(made.is_ok() || matches!(made, Err(Error::NoSpace)));
        made.is_ok()
    });
    let made = made.count();
    let on = groups(&v);
    assert!(made > 5000 && on[0] == 0 && on[2] == 0, "{made} {on:?}");
    (0..made).for_each(|n| v.unlink(root, format!("n{n}").as_bytes()).unwrap());
    v.sync().unwrap();
    assert_eq!(fill(&v, &f, ALL) / MIB, full / MIB);
    drop((f, other));
    close(v, &all);
    // and after a mount
    let v = mount(&all);
    let f = v.open(v.lookup(root, b"f").unwrap().ino).unwrap();
    truncate(&v, &f, 0);
    assert_eq!(fill(&v, &f, ALL) / MIB, full / MIB);
    assert_eq!((groups(&v)[0], groups(&v)[2]), (0, 0));
    drop(f);
    close(v, &all);
}

/// What lies elsewhere moves, the groups are nobody's then, and what it is stays.
#[test]
fn what_lies_elsewhere_moves() {
    let (all, v) = volume(&[64, 64, 64]);
    let root = tenant(&v, &[0], None);
    let f = file(&v, root, "f");
    allow(&v, &[1]).unwrap();
    assert_eq!(v.tenant("t").unwrap().elsewhere.groups, 1, "the journal's");
    fill(&v, &f, 30);
    v.sync().unwrap();
    let on = groups(&v);
    assert!(on[0] == 1 && on[1] >= 7 && on[2] == 0, "{on:?}");
    let before = v.statfs();
    allow(&v, &[2, 0]).unwrap();
    let there = v.tenant("t").unwrap().elsewhere;
    assert!(there.groups as usize == on[1] && there.bytes >= 30 * MIB && !there.journal, "{there:?}");
    // stopped, and goes on
    let calls = Cell::new(0);
    let stop = |_, all| {
        calls.set(calls.get() + 1);
        assert_eq!(all, u64::from(there.groups));
        calls.get() < 4
    };
    assert!(matches!(v.tenant_move("t", &stop), Err(Error::Stopped)));
    let some = groups(&v)[1];
    assert!(some < on[1] && some > 0, "{some}");
    let last = Cell::new((0, 0));
    v.tenant_move("t", &|done, all| last.replace((done, all)) <= (done, all)).unwrap();
    assert_eq!(last.get().0, last.get().1);
    let left = v.tenant("t").unwrap().elsewhere;
    assert_eq!((left.groups, left.bytes, left.crowded), (0, 0, false));
    assert_eq!(groups(&v)[1], 0);
    holds(&v, &f, 30 * MIB);
    let now = v.statfs();
    assert!(now.available.abs_diff(before.available) * BLOCK < 5 * MIB, "{before:?} {now:?}");
    // others have it
    let other = file(&v, ROOT, "other");
    assert!(fill(&v, &other, ALL) > 100 * MIB);
    drop((f, other));
    close(v, &all);
    let v = mount(&all);
    let f = v.open(v.lookup(root, b"f").unwrap().ino).unwrap();
    holds(&v, &f, 30 * MIB);
    drop(f);
    close(v, &all);
}

/// Where the devices have no room for it the tenant gets nothing more, and can overwrite and delete; then it moves.
#[test]
fn a_tenant_that_does_not_fit_gets_nothing_more() {
    let (all, v) = volume(&[32, 96]);
    let root = tenant(&v, &[0], None);
    let (f, keep) = (file(&v, root, "f"), file(&v, root, "keep"));
    allow(&v, &[1]).unwrap();
    fill(&v, &f, 50);
    fill(&v, &keep, 4);
    v.sync().unwrap();
    allow(&v, &[0]).unwrap();
    let left = moved(&v);
    assert!(left.crowded && left.groups > 3 && left.bytes > 20 * MIB, "{left:?}");
    let used = v.tenant("t").unwrap().used;
    assert!(matches!(v.write(&keep, 4 * MIB, &content(0)), Err(Error::NoSpace)));
    assert_eq!((v.statfs_of(root).unwrap().available, v.write_room(keep.ino())), (0, 0));
    assert!(v.statfs().available * BLOCK > 30 * MIB);
    // as it was, several times over: and not much more of it lies elsewhere, by the reserve of the domain
    for n in 0..6 {
        v.write(&keep, (n % 4) * MIB, &small::piece(n % 4)).unwrap();
        v.fsync(keep.ino(), false).unwrap();
    }
    let again = moved(&v);
    assert!(again.bytes <= left.bytes + 4 * MIB && v.tenant("t").unwrap().used <= used, "{left:?} {again:?}");
    truncate(&v, &f, 10 * MIB);
    let left = moved(&v);
    assert_eq!((left.groups, left.crowded), (0, false), "{left:?}");
    assert_eq!(groups(&v)[1], 0);
    holds(&v, &f, 10 * MIB);
    holds(&v, &keep, 4 * MIB);
    v.write(&keep, 4 * MIB, &small::piece(4)).unwrap();
    drop((f, keep));
    close(v, &all);
}

/// The limit of space is exact beside a group that stays where nothing more may come.
#[test]
fn the_limit_of_space_stays_exact() {
    const LIMIT: u64 = 16 * MIB;
    let (all, v) = volume(&[64, 64]);
    let root = tenant(&v, &[0], Some(LIMIT));
    let f = file(&v, root, "f");
    let used = |v: &Volume| v.tenant("t").unwrap().used;
    let most = fill(&v, &f, ALL);
    assert!(LIMIT - used(&v) <= 16 * BLOCK, "{}", used(&v));
    allow(&v, &[1]).unwrap();
    // also what is full moves
    let left = moved(&v);
    assert!(left.groups == 1 && left.journal && !left.crowded, "{left:?}");
    holds(&v, &f, most);
    let on = groups(&v);
    assert!(on[0] == 1 && on[1] <= 6, "no more than it needs: {on:?}");
    for _ in 0..3 {
        assert!(
            matches!(v.write(&f, most + BLOCK, &[1; 8 * BLOCK as usize]), Err(Error::NoSpace)) || used(&v) <= LIMIT
        );
        truncate(&v, &f, MIB);
        moved(&v);
        let again = fill(&v, &f, ALL);
        assert!(again.abs_diff(most) <= 8 * BLOCK, "{again}, {most}");
        v.sync().unwrap();
        let used = used(&v);
        assert!(used <= LIMIT && LIMIT - used <= 16 * BLOCK, "{used}");
    }
    assert_eq!(groups(&v)[0], 1);
    drop(f);
    close(v, &all);
}

/// A device that a tenant alone may use is neither drained nor removed; a device that comes later is none that one may use which
/// has left.
#[test]
fn the_last_device_of_a_tenant_stays() {
    let (all, v) = volume(&[64, 64]);
    v.add_device(memory(48), false).unwrap();
    let root = tenant(&v, &[0], None);
    let f = file(&v, root, "f");
    allow(&v, &[2]).unwrap();
    fill(&v, &f, 10);
    v.sync().unwrap();
    let alone = "tenant t may use no other device";
    assert!(text(v.drain_device(2, &|_, _| true)).contains(alone));
    assert!(text(v.remove_device(2, &|_, _| true)).contains(alone));
    allow(&v, &[2, 1]).unwrap();
    let drained = v.drain_device(2, &|_, _| true).unwrap();
    assert!(drained.is_empty(), "{drained:?}");
    let on = groups(&v);
    assert!(on[1] > 1 && on[2] == 0, "{on:?}");
    assert!(text(allow(&v, &[2])).contains("device 2 is being drained"));
    assert!(text(allow(&v, &[3])).contains("has 3 devices"));
    // together with another change none of both is made
    let both = v.tenant_change("t", |b| (b.devices, b.journal) = (set(&[3]), Some(JournalMode::Data)));
    assert!(text(both).contains("has 3 devices"));
    assert_eq!(v.tenant("t").unwrap().budget.journal, None);
    let size = v.getattr(f.ino()).unwrap().size;
    v.remove_device(2, &|_, _| true).unwrap();
    assert_eq!(v.tenant("t").unwrap().budget.devices, set(&[1]));
    let third = memory(48);
    v.add_device(third.clone(), false).unwrap();
    holds(&v, &f, size);
    let full = fill(&v, &f, ALL);
    assert!(full < 64 * MIB && groups(&v)[2] == 0, "{full}");
    drop(f);
    let all: Vec<_> = all.iter().cloned().chain([third]).collect();
    close(v, &all);
    let v = mount(&all);
    assert_eq!(v.tenant("t").unwrap().budget.devices, set(&[1]));
    // one that is drained is one like any other for it afterwards, but for what the tenant may not
    v.drain_device(0, &|_, _| true).unwrap();
    v.end_drain(0).unwrap();
    let g = file(&v, v.tenant("t").unwrap().root, "g");
    v.unlink(v.tenant("t").unwrap().root, b"f").unwrap();
    v.sync().unwrap();
    fill(&v, &g, 20);
    assert_eq!((groups(&v)[0], groups(&v)[2]), (1, 0));
    // no tenant any more: it claims everywhere
    v.tenant_remove("t").unwrap();
    assert!(fill(&v, &g, ALL) > 80 * MIB);
    drop(g);
    close(v, &all);
}

/// The background goes on with what an earlier mount began.
#[test]
fn a_mount_goes_on() {
    let (all, v) = volume(&[48, 48]);
    let root = tenant(&v, &[0], None);
    let f = file(&v, root, "f");
    allow(&v, &[1]).unwrap();
    fill(&v, &f, 12);
    v.sync().unwrap();
    allow(&v, &[0]).unwrap();
    let before = v.tenant("t").unwrap().elsewhere;
    assert!(before.groups > 2);
    drop(f);
    close(v, &all);
    let options = MountOptions { cache_bytes: 32 * MIB, ..MountOptions::default() };
    let v = Volume::mount(all.clone(), options).unwrap();
    let end = Instant::now() + Duration::from_secs(60);
    while v.tenant("t").unwrap().elsewhere.groups > 0 {
        assert!(Instant::now() < end, "{:?}", v.tenant("t").unwrap().elsewhere);
        std::thread::sleep(Duration::from_millis(20));
    }
    let f = v.open(v.lookup(root, b"f").unwrap().ino).unwrap();
    holds(&v, &f, 12 * MIB);
    drop(f);
    close(v, &all);
}

/// What a front end had accepted comes, also where the devices that are left are full, and nothing moves before.
#[test]
fn what_was_accepted_before_is_not_lost() {
    let (all, v) = volume(&[24, 96]);
    drop(v);
    let options =
        MountOptions { cache_bytes: 64 * MIB, background: false, cached_above: true, ..MountOptions::default() };
    let v = Volume::mount(all.clone(), options).unwrap();
    let root = tenant(&v, &[0], None);
    let f = file(&v, root, "f");
    allow(&v, &[0, 1]).unwrap();
    let (domain, room) = (v.domain_of(root).unwrap(), v.write_room(f.ino()));
    assert!(room * BLOCK > 60 * MIB);
    let changes = |v: &Volume| v.limit_changes(domain);
    allow(&v, &[0]).unwrap();
    assert!(v.write_room(f.ino()) * BLOCK < 20 * MIB);
    for n in 0..50 {
        assert_eq!(v.write_accepted(&f, n * MIB, &small::piece(n)).unwrap() as u64, MIB, "MiB {n}");
    }
    v.sync().unwrap();
    assert!(groups(&v)[1] > 5);
    let stops = Cell::new(0);
    let go_on = |_, _| {
        stops.set(stops.get() + 1);
        stops.get() < 3
    };
    assert!(matches!(v.tenant_move("t", &go_on), Err(Error::Stopped)), "it waits");
    v.promises_are_kept(domain, changes(&v));
    let left = moved(&v);
    assert!(left.bytes > 20 * MIB, "{left:?}");
    assert!(matches!(v.write_accepted(&f, 50 * MIB, &small::piece(50)), Err(Error::NoSpace)));
    holds(&v, &f, 50 * MIB);
    truncate(&v, &f, 8 * MIB);
    let left = moved(&v);
    assert_eq!((left.groups, left.crowded), (0, false), "{left:?}");
    drop(f);
    close(v, &all);
}

#[test]
fn every_crash_of_a_move_leaves_all_that_was_synced() {
    let (states, old) = braidfs_testkit::tenant_devices::every_crash_of_a_move().unwrap();
    assert!(states > 100 && old > 0 && old < states, "{states} {old}");
    println!("{states} states, {old} before the change");
}
