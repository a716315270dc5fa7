//! Claims beside devices that fail.

use super::GROUP_RESTS;
use crate::volume::MountedVolume;
use crate::{DomainId, MkfsOptions, MountOptions, Volume, mkfs};
use braidfs_device::{Device, Effect, FaultDevice, MemDevice, Op, Rule};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A volume of two devices of 64 MiB in groups of 4 MiB; domain 0 has its journal on device 0, the next one on device 1, and so on.
fn on_two_devices(domains: u16) -> (Vec<Arc<FaultDevice>>, Volume) {
    let faults: Vec<_> = (0..2).map(|n| Arc::new(FaultDevice::new(Arc::new(MemDevice::new(64 << 8)), n))).collect();
    let devices: Vec<Arc<dyn Device>> = faults.iter().map(|f| f.clone() as Arc<dyn Device>).collect();
    let how = MkfsOptions { domains: Some(domains), group_bytes: Some(4 << 20), ..MkfsOptions::default() };
    mkfs::format(&devices, &how).unwrap();
    let v = Volume::mount(devices, MountOptions { background: false, ..MountOptions::default() }).unwrap();
    (faults, v)
}

/// Has every group claimed once that is nobody's, and given back.
fn recycle_all(i: &MountedVolume) {
    while i.bat.lock().free_groups_but(&[]) > 0 {
        assert!(i.claim_group(i.dom(DomainId(0))).unwrap());
    }
    let mut bat = i.bat.lock();
    while i.give_back(&mut bat, None, &[]).unwrap() {}
}

/// A flush of the device fails, and so does every later one.
fn cannot_flush(i: &MountedVolume, device: usize, faults: &FaultDevice) {
    faults.add(Rule::new(Op::Flush, Effect::Fail(5)));
    i.store.flush_devices([device]).unwrap_err();
}

/// Groups on a device that are nobody's.
fn free_on(i: &MountedVolume, device: usize) -> usize {
    let all: Vec<_> = i.bat.lock().owners().collect();
    i.groups_of_device(device).filter(|g| all[*g as usize].is_none()).count()
}

/// A group that was somebody's before is claimed with writes that are durable in between, on its own device alone: another one
/// that cannot flush takes no group of a sound device away.
#[test]
fn groups_that_had_an_owner_are_claimed_beside_a_device_that_cannot_flush() {
    let (faults, v) = on_two_devices(2);
    let (i, d) = (v.mounted(), v.mounted().dom(DomainId(0)));
    recycle_all(i);
    let free = free_on(i, 0);
    assert!(free > 10, "{free}");
    cannot_flush(i, 1, &faults[1]);
    for n in 0..free {
        assert!(i.claim_group(d).unwrap(), "{n} of {free}");
    }
    assert!(!i.claim_group(d).unwrap());
    assert_eq!((free_on(i, 0), i.room(d, u64::MAX)), (0, d.space.available()));
    assert!(d.failed().is_none());
    v.crash();
}

/// A dead device is not tried group by group.
#[test]
fn a_device_that_cannot_be_written_is_left_alone_for_a_while() {
    for recycled in [false, true] {
        let (faults, v) = on_two_devices(1);
        let (i, d) = (v.mounted(), v.mounted().dom(DomainId(0)));
        if recycled {
            recycle_all(i);
        }
        faults[1].add(Rule::new(Op::Write, Effect::Fail(5)));
        let (on_0, on_1) = (free_on(i, 0), free_on(i, 1));
        let claim = || {
            let before = faults[1].counters().batches;
            let claimed = i.claim_group(d);
            let failed = faults[1].counters().batches - before;
            assert!(failed <= 2, "{failed} writes of one claim failed");
            claimed
        };
        (0..on_0).for_each(|n| assert!(claim().unwrap(), "{n} of {on_0}"));
        assert_eq!(free_on(i, 0), 0, "the sound device is used");
        let none = claim();
        assert!(!matches!(none, Ok(true)) && faults[1].fired() > 0, "{none:?}");
        assert_eq!(i.room(d, u64::MAX), d.space.available());
        assert_eq!((free_on(i, 1), d.failed()), (on_1, None));
        // it is well again: all its groups are claimed, when their time has come
        faults[1].clear();
        assert!(i.bat.lock().try_again(Instant::now() + GROUP_RESTS));
        (0..on_1).for_each(|n| assert!(i.claim_group(d).unwrap(), "{n} of {on_1}"));
        v.unmount().unwrap();
    }
}

/// A domain is added on the sound devices, and where the tables of a group cannot be written, with another group.
#[test]
fn a_domain_is_added_beside_what_fails() {
    let (faults, v) = on_two_devices(2);
    let i = v.mounted();
    cannot_flush(i, 1, &faults[1]);
    let id = v.add_domain().unwrap();
    assert_eq!(i.store.device_of(i.dom(id).journal_group()), Some(0));
    v.crash();

    let (faults, v) = on_two_devices(2);
    let i = v.mounted();
    let bad = i.bat.lock().owners().position(|o| o.is_none()).unwrap() as u32;
    let (device, at) = i.store.place(i.store.geometry().group_start(bad), 1).unwrap();
    faults[device].add(Rule::new(Op::Write, Effect::Fail(5)).blocks(at..at + 1));
    let id = v.add_domain().unwrap();
    assert!(faults[device].fired() > 0 && i.dom(id).journal_group() != bad);
    faults[device].clear();
    v.unmount().unwrap();
}

/// What an idle domain has on a device that cannot flush is no room for others, and it is not asked for it: that would fail it.
#[test]
fn a_domain_on_a_device_that_cannot_flush_is_not_asked_for_groups() {
    let (faults, v) = on_two_devices(4);
    let (i, [d, idle]) = (v.mounted(), [0, 3].map(|n| v.mounted().dom(DomainId(n))));
    let has_one = |o: &Arc<crate::domain::Domain>| i.store.device_of(o.journal_group()) == Some(1);
    assert!(!has_one(d) && has_one(idle));
    for (device, of) in [(0, d), (1, idle)] {
        while free_on(i, device) > 0 {
            assert!(i.claim_group(of).unwrap());
        }
    }
    assert!(idle.space.groups().len() > 10);
    cannot_flush(i, 1, &faults[1]);
    assert_eq!(i.room(d, u64::MAX), d.space.available_with(0));
    assert!(!i.claim_group(d).unwrap());
    assert_eq!((d.failed(), idle.failed()), (None, None));
    v.crash();
}

/// Where claims of groups on a device fail, a domain that has empty ones there is not asked for them: to give them back it would
/// write there, and the error would be its own. However few of nobody's there are, each of which fails once.
#[test]
fn a_claim_that_fails_makes_no_idle_domain_read_only() {
    for left in [1, 2, 5] {
        for adds in [false, true] {
            let (faults, v) = on_two_devices(2);
            let (i, [d, idle]) = (v.mounted(), [0, 1].map(|n| v.mounted().dom(DomainId(n))));
            assert_eq!(i.store.device_of(idle.journal_group()), Some(1));
            while free_on(i, 0) > 0 {
                assert!(i.claim_group(d).unwrap());
            }
            while free_on(i, 1) > left {
                assert!(i.claim_group(idle).unwrap());
            }
            faults[1].add(Rule::new(Op::Write, Effect::Fail(5)));
            if adds {
                v.add_domain().unwrap();
                assert_eq!(
                    i.store.device_of(i.dom(DomainId(2)).journal_group()),
                    Some(0),
                    "of those that domain 0 spares"
                );
            } else {
                for _ in 0..3 {
                    assert!(!matches!(i.claim_group(d), Ok(true)));
                }
            }
            assert!(faults[1].fired() > 0, "{left} {adds}");
            assert_eq!((d.failed(), idle.failed()), (None, None), "{left} {adds}");
            assert_eq!(free_on(i, 1), left);
            // it is well again, and is asked when its time has come
            faults[1].clear();
            i.bat.lock().try_again(Instant::now() + GROUP_RESTS);
            i.count_unclaimed();
            (0..left + 3).for_each(|n| assert!(i.claim_group(d).unwrap(), "{n} of {left}"));
            v.unmount().unwrap();
        }
    }
}

/// Groups that were left alone are room again once their time has come, also where nobody claims: who is told that there is none
/// does not.
#[test]
fn groups_count_as_room_again_when_their_time_has_come() {
    let (_faults, v) = on_two_devices(1);
    let (i, d) = (v.mounted(), v.mounted().dom(DomainId(0)));
    let before = i.room(d, u64::MAX);
    let end = Instant::now() + Duration::from_millis(50);
    i.bat.lock().leave_alone(i.groups_of_device(1), end);
    i.count_unclaimed();
    let meanwhile = i.room(d, u64::MAX);
    assert!(Instant::now() >= end || meanwhile < before, "{meanwhile} of {before}");
    std::thread::sleep(Duration::from_millis(60));
    assert_eq!(i.room(d, u64::MAX), before);
    v.unmount().unwrap();
}
