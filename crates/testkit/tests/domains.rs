//! Domains that are added to a volume in use.

use braidfs::{Cred, DomainId, Error, FileKind, InodeNo, MkfsOptions, MountOptions, OpenHow, Volume, mkfs};
use braidfs_device::{Device, Effect, FaultDevice, Op, Rule};
use braidfs_testkit::add_domain::every_crash_of_an_addition;
use braidfs_testkit::small::{MIB, ROOT, close, create, groups_of_nobody, holds, in_pieces, memory, relocated};
use braidfs_testkit::walk::fsck;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

fn format(devices: &[Arc<dyn Device>], domains: u16) {
    let how = MkfsOptions { domains: Some(domains), group_bytes: Some(4 * MIB), ..MkfsOptions::default() };
    mkfs::format(devices, &how).unwrap();
}

fn mount(devices: &[Arc<dyn Device>]) -> Volume {
    Volume::mount(devices.to_vec(), MountOptions { cache_bytes: 32 * MIB, ..MountOptions::default() }).unwrap()
}

fn mkdir(v: &Volume, name: &str) -> InodeNo {
    create(v, ROOT, name, FileKind::Dir)
}

fn put(v: &Volume, path: &str, bytes: &[u8]) -> braidfs::Result<()> {
    let how = OpenHow { write: true, create: true, mode: 0o644, ..OpenHow::default() };
    let f = v.open_path(path.as_bytes(), how, &Cred::root())?;
    v.write(&f, 0, bytes)?;
    v.fsync(f.ino(), false)
}

fn size(v: &Volume, path: &str) -> u64 {
    let f = v.open_path(path.as_bytes(), OpenHow { read: true, ..OpenHow::default() }, &Cred::root()).unwrap();
    v.getattr(f.ino()).unwrap().size
}

#[test]
fn a_crash_leaves_the_domain_or_none() {
    let (states, missing) = every_crash_of_an_addition().unwrap();
    assert!(missing > 3 && states > missing + 3, "{states} states, {missing} without it");
    println!("{states} states, {missing} without it");
}

/// Until the tables are full, with files in each, on two devices.
#[test]
fn a_volume_gets_as_many_domains_as_its_tables_have_room_for() {
    let all = [memory(64), memory(64)];
    format(&all, 2);
    let v = mount(&all);
    for n in 2..16 {
        assert_eq!(v.add_domain().unwrap(), DomainId(n));
    }
    assert!(matches!(v.add_domain(), Err(Error::Busy(_))));
    let made: Vec<_> = (0..32).map(|n| v.domain_of(mkdir(&v, &format!("d{n}"))).unwrap()).collect();
    assert!((0..16).all(|d| made.contains(&DomainId(d))), "placement leaves some out: {made:?}");
    (0..32).for_each(|n| put(&v, &format!("d{n}/f"), &[n; 9000]).unwrap());
    v.unmount().unwrap();
    fsck(&all).unwrap();
    let v = mount(&all);
    assert_eq!(v.domains().len(), 16);
    (0..32).for_each(|n| assert_eq!(size(&v, &format!("d{n}/f")), 9000));
}

/// Where every group is in use there is no room for a domain, and then, when files went, there is.
#[test]
fn a_domain_needs_a_group() {
    let all = [memory(64)];
    format(&all, 2);
    let v = mount(&all);
    let mut n = 0;
    while put(&v, &format!("f{n}"), &vec![7; MIB as usize]).is_ok() {
        n += 1;
    }
    assert!(matches!(v.add_domain(), Err(Error::NoSpace)));
    assert_eq!(v.domains().len(), 2);
    (0..=n).for_each(|n| drop(v.unlink_path(format!("f{n}").as_bytes(), &Cred::root())));
    v.sync().unwrap();
    assert_eq!(v.add_domain().unwrap(), DomainId(2));
    v.unmount().unwrap();
    fsck(&all).unwrap();
}

/// Every group is in use, some of each: one is emptied for the domain.
#[test]
fn a_domain_gets_a_group_that_another_one_empties() {
    let all = [memory(64)];
    format(&all, 2);
    let v = mount(&all);
    let kept = in_pieces(&v, create(&v, ROOT, "d", FileKind::Dir), 64, || {});
    assert_eq!((groups_of_nobody(&v), relocated(&v)), (0, 0));
    assert_eq!(v.add_domain().unwrap(), DomainId(2));
    assert!(relocated(&v) > 0);
    kept.iter().for_each(|f| holds(&v, f, MIB / 2));
    drop(kept);
    close(v, &all);
}

/// Domains come while threads write, sync and remove.
#[test]
fn domains_come_under_load() {
    let all = [memory(128)];
    format(&all, 2);
    let v = mount(&all);
    let stop = AtomicBool::new(false);
    std::thread::scope(|s| {
        for t in 0..4 {
            let (v, stop) = (&v, &stop);
            s.spawn(move || {
                for n in 0.. {
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    let dir = format!("t{t}n{n}");
                    mkdir(v, &dir);
                    put(v, &format!("{dir}/f"), &vec![t; 50_000]).unwrap();
                    if n % 4 > 0 {
                        v.unlink_path(format!("{dir}/f").as_bytes(), &Cred::root()).unwrap();
                    }
                }
            });
        }
        let added = (2..8).map(|_| v.add_domain()).collect::<Result<Vec<_>, _>>();
        stop.store(true, Ordering::Relaxed);
        assert_eq!(added.unwrap().len(), 6);
    });
    v.sync().unwrap();
    v.crash();
    let v = mount(&all);
    assert_eq!(v.domains().len(), 8);
    v.unmount().unwrap();
    fsck(&all).unwrap();
}

/// The device fails somewhere on the way: the volume goes on without the domain, and the next mount has it whole or not.
#[test]
fn an_error_on_the_way_leaves_the_domain_or_none() {
    for skip in 0..12 {
        let device = memory(64);
        format(std::slice::from_ref(&device), 2);
        let faulty = Arc::new(FaultDevice::new(device.clone(), 1));
        let v = mount(&[faulty.clone() as Arc<dyn Device>]);
        put(&v, "before", b"kept").unwrap();
        faulty.add(Rule::new(Op::Write, Effect::Fail(5)).skip(skip).times(1));
        let first = v.add_domain();
        faulty.clear();
        let got = v.domains().len();
        assert!(first.is_err() || got == 3);
        v.crash();
        let v = mount(std::slice::from_ref(&device));
        assert!((2..=3).contains(&v.domains().len()) && v.domains().len() >= got);
        assert_eq!(size(&v, "before"), 4);
        v.unmount().unwrap();
        fsck(std::slice::from_ref(&device)).unwrap();
    }
}
