//! Changes of a tenant's journal together with its devices, and what tenants without a journal do beside drains and data checksums.

use braidfs::{Cred, Error, JournalMode, MkfsOptions, TenantBudget, Volume, mkfs};
use braidfs_device::{Device, Effect, FaultDevice, Op, Rule};
use braidfs_testkit::scratch::tree;
use braidfs_testkit::small::{ALL, BLOCK, MIB, ROOT, close, file, fill, holds, memory, mount, piece, set};
use braidfs_testkit::tenant_changes::every_crash_of_a_change;
use braidfs_testkit::walk::fsck;
use std::sync::Arc;

fn volume(mib: &[u64], data_checksums: bool) -> (Vec<Arc<dyn Device>>, Volume) {
    let all: Vec<_> = mib.iter().map(|n| memory(*n)).collect();
    let how = MkfsOptions { domains: Some(2), group_bytes: Some(4 * MIB), data_checksums, ..MkfsOptions::default() };
    mkfs::format(&all, &how).unwrap();
    let v = mount(&all);
    (all, v)
}

fn budget(journal: Option<JournalMode>) -> TenantBudget {
    TenantBudget { journal, ..TenantBudget::default() }
}

const SCRATCH: Option<JournalMode> = Some(JournalMode::Scratch);
const ORDERED: Option<JournalMode> = Some(JournalMode::Ordered);
const DATA: Option<JournalMode> = Some(JournalMode::Data);

fn create(v: &Volume, budget: TenantBudget) -> braidfs::InodeNo {
    v.tenant_create(ROOT, b"d", 0o755, "t", budget, &Cred::root()).unwrap().root
}

/// What the tenant has on a device, as users are told; what is unused there; calls that failed.
fn on(v: &Volume, device: usize) -> (u64, u64, u64) {
    let t = v.tenant("t").unwrap().domain;
    let d = v.device_uses().swap_remove(device);
    let bytes = d.domains.iter().find(|(id, _)| *id == t).map_or(0, |(_, bytes)| *bytes);
    (bytes, d.free, d.errors)
}

/// The device on which such a tenant lies is drained while it is in use: what is in it moves, and is there after an unmount; a crash
/// leaves nothing of it, and all of its neighbour.
#[test]
fn a_tenant_without_a_journal_leaves_a_device_that_is_drained() {
    for (sums, crash) in [(false, false), (false, true), (true, false), (true, true)] {
        let (all, v) = volume(&[96, 96], sums);
        let t = create(&v, budget(SCRATCH));
        let (a, n) = (file(&v, t, "a"), file(&v, ROOT, "n"));
        fill(&v, &a, 40);
        fill(&v, &n, 20);
        v.fsync(n.ino(), false).unwrap();
        v.commit_domain(v.tenant("t").unwrap().domain, false).unwrap();
        let device = (0..2).max_by_key(|n| on(&v, *n).0).unwrap();
        let before = on(&v, device);
        assert!(before.0 > 8 * MIB, "{before:?}");
        let left = v.drain_device(device, &|_, _| true).unwrap();
        let after = on(&v, device);
        assert!(
            after.0 < 2 * MIB && after.1 > before.1 && v.device_uses()[device].drained,
            "{left:?} {before:?} {after:?}"
        );
        let other = on(&v, 1 - device);
        assert!(other.0 + after.0 >= 40 * MIB && !v.device_uses()[1 - device].drained, "{other:?} {after:?}");
        // and it goes on, elsewhere
        holds(&v, &a, 40 * MIB);
        holds(&v, &n, 20 * MIB);
        fill(&v, &file(&v, t, "b"), 4);
        v.commit_domain(v.tenant("t").unwrap().domain, true).unwrap();
        assert!(on(&v, device).0 < 2 * MIB);
        let whole = tree(&v, t).unwrap();
        drop((a, n));
        if crash {
            v.crash();
            fsck(&all).unwrap();
        } else {
            close(v, &all);
        }
        let v = mount(&all);
        assert_eq!(v.drained_device(), Some(device));
        assert_eq!(tree(&v, t).unwrap(), if crash { Default::default() } else { whole });
        holds(&v, &v.open(v.lookup(ROOT, b"n").unwrap().ino).unwrap(), 20 * MIB);
        v.end_drain(device).unwrap();
        // all of the room is to be had again
        let _ = v.unlink(t, b"a");
        let _ = v.unlink(t, b"b");
        let f = file(&v, t, "all");
        assert!(fill(&v, &f, ALL) > 60 * MIB);
        drop(f);
        close(v, &all);
    }
}

/// A bit that flips is found, also in what no journal tells of; what the mount after a crash leaves has no sums of before.
#[test]
fn a_tenant_without_a_journal_has_checksums_of_its_data() {
    let (all, v) = volume(&[64], true);
    let t = create(&v, budget(SCRATCH));
    let f = file(&v, t, "f");
    fill(&v, &f, 2);
    drop(f);
    close(v, &all);
    let fault = Arc::new(FaultDevice::new(all[0].clone(), 3));
    let v = mount(&[fault.clone() as Arc<dyn Device>]);
    let f = v.open(v.lookup(t, b"f").unwrap().ino).unwrap();
    holds(&v, &f, 2 * MIB);
    // overwritten, and thrown out of memory
    v.write(&f, 0, &[9; BLOCK as usize]).unwrap();
    v.commit_domain(v.tenant("t").unwrap().domain, false).unwrap();
    let block = v.extents(f.ino()).unwrap()[0].place.unwrap().1 / BLOCK;
    assert_eq!(on(&v, 0).2, 0);
    drop(f);
    v.unmount().unwrap();
    let v = mount(&[fault.clone() as Arc<dyn Device>]);
    fault.add(Rule::new(Op::Read, Effect::FlipBit).blocks(block..block + 1));
    let f = v.open(v.lookup(t, b"f").unwrap().ino).unwrap();
    let read = v.read(&f, 0, &mut [0; BLOCK as usize]);
    assert!(read.is_err(), "{read:?}");
    fault.clear();
    let mut got = [0; BLOCK as usize];
    v.read(&f, 0, &mut got).unwrap();
    assert_eq!(got, [9; BLOCK as usize]);
    // in the same blocks after a crash
    drop(f);
    v.crash();
    let v = mount(&all);
    let f = file(&v, t, "f");
    fill(&v, &f, 4);
    drop(f);
    close(v, &all);
    let v = mount(&all);
    holds(&v, &v.open(v.lookup(t, b"f").unwrap().ino).unwrap(), 4 * MIB);
    close(v, &all);
}

/// What is refused changes neither of both.
#[test]
fn a_change_of_both_that_is_refused_changes_nothing() {
    let (all, v) = volume(&[64, 64], false);
    v.add_device(memory(48), false).unwrap();
    let refused = |change: TenantBudget, why: &str| {
        let before = v.tenant("t").unwrap().budget;
        let e = v.tenant_set("t", TenantBudget { ..change }).unwrap_err();
        assert!(e.to_string().contains(why), "{e}");
        assert_eq!(v.tenant("t").unwrap().budget, before);
    };
    for from in [None, ORDERED, DATA, SCRATCH] {
        let root = create(&v, TenantBudget { devices: set(&[0, 1]), ..budget(from) });
        let f = file(&v, root, "f");
        fill(&v, &f, 2);
        for to in [None, ORDERED, DATA].into_iter().filter(|to| *to != from) {
            refused(TenantBudget { devices: set(&[3]), ..budget(to) }, "has 3 devices");
            refused(TenantBudget { devices: set(&[1]), space: Some(1), ..budget(to) }, "1 MiB");
        }
        if from != SCRATCH {
            // the devices alone would do
            refused(TenantBudget { devices: set(&[1]), ..budget(SCRATCH) }, "only an empty tenant");
        }
        v.drain_device(2, &|_, _| true).unwrap();
        refused(
            TenantBudget { devices: set(&[2]), ..budget(if from == DATA { ORDERED } else { DATA }) },
            "is being drained",
        );
        v.end_drain(2).unwrap();
        holds(&v, &f, 2 * MIB);
        if from == SCRATCH {
            // it still keeps no journal
            let d = || v.domains().into_iter().find(|d| d.tenant.as_deref() == Some("t")).unwrap();
            assert_eq!(d().journal_mode, Some("scratch"));
            let used = d().journal_used;
            fill(&v, &f, 4);
            v.commit_domain(v.tenant("t").unwrap().domain, false).unwrap();
            assert_eq!(d().journal_used, used);
        }
        drop(f);
        v.unlink(root, b"f").unwrap();
        v.tenant_remove("t").unwrap();
        v.rmdir(ROOT, b"d").unwrap();
        v.sync().unwrap();
    }
    v.remove_device(2, &|_, _| true).unwrap();
    close(v, &all);
}

/// A device that fails at any write or flush of such a change: the tenant is as before, or has the mode alone, or both, in memory as on
/// the device, and never the devices alone.
#[test]
fn a_device_that_fails_in_between_leaves_no_devices_without_the_mode() {
    for (from, to) in [(None, DATA), (SCRATCH, ORDERED), (None, SCRATCH)] {
        let (mut seen, mut over) = ([0; 3], [false; 2]);
        for (which, op, n) in (0..60).flat_map(|n| [(0, Op::Write, n), (1, Op::Flush, n)]) {
            if over[which] {
                continue;
            }
            let (all, v) = volume(&[32, 32], false);
            let root = create(&v, TenantBudget { devices: set(&[0]), ..budget(from) });
            if to != SCRATCH {
                fill(&v, &file(&v, root, "f"), 1);
            }
            close(v, &all);
            let fault = Arc::new(FaultDevice::new(all[0].clone(), 3));
            let both = [fault.clone() as Arc<dyn Device>, all[1].clone()];
            let v = mount(&both);
            fault.add(Rule::new(op, Effect::Fail(5)).skip(n).times(1));
            let changed = v.tenant_change("t", |b| (b.journal, b.devices) = (to, set(&[1])));
            let fired = fault.fired() > 0;
            over[which] = !fired;
            let told = v.device_uses()[0].errors;
            assert!(told > 0 || !fired, "{told} errors are told");
            let known = v.tenant("t").unwrap().budget;
            fault.clear();
            v.crash();
            let v = mount(&all);
            let is = v.tenant("t").unwrap().budget;
            let is = (is.journal, is.devices);
            let state = [(from, set(&[0])), (to, set(&[0])), (to, set(&[1]))].iter().position(|s| *s == is);
            let state = state.unwrap_or_else(|| panic!("{op:?} {n}: {is:?} after {changed:?}"));
            seen[state] += 1;
            if changed.is_ok() {
                assert_eq!((state, (known.journal, known.devices)), (2, is), "{op:?} {n}");
            }
            if from != SCRATCH && to != SCRATCH || from == SCRATCH && is.0 == to {
                holds(&v, &v.open(v.lookup(root, b"f").unwrap().ino).unwrap(), MIB);
            } else {
                assert!(tree(&v, root).unwrap().is_empty());
            }
            close(v, &all);
        }
        assert_eq!(over, [true; 2], "there are more of them");
        assert!(seen[0] > 0 && seen[2] > 0, "{from:?} to {to:?}: {seen:?}");
    }
}

/// A change that fails when the mode is another one already has changed nothing else: what is told of limits holds.
#[test]
fn a_change_that_fails_late_leaves_the_limits_that_are_told() {
    let mut late = 0;
    for (from, to) in [(None, DATA), (DATA, ORDERED)] {
        for n in 0..40 {
            let (all, v) = volume(&[48, 32], false);
            let root = create(&v, TenantBudget { space: Some(32 * MIB), ..budget(from) });
            let f = file(&v, root, "f");
            fill(&v, &f, 2);
            drop(f);
            close(v, &all);
            let fault = Arc::new(FaultDevice::new(all[0].clone(), 3));
            let v = mount(&[fault.clone() as Arc<dyn Device>, all[1].clone()]);
            let f = v.open(v.lookup(root, b"f").unwrap().ino).unwrap();
            // some that waits to be written where it lies
            v.write(&f, 0, &piece(0)).unwrap();
            v.fsync(f.ino(), false).unwrap();
            v.write(&f, MIB, &piece(1)).unwrap();
            fault.add(Rule::new(Op::Write, Effect::Fail(5)).skip(n).times(1));
            let changed = v.tenant_change("t", |b| (b.journal, b.space) = (to, Some(8 * MIB)));
            let fired = fault.fired() > 0;
            fault.clear();
            let told = v.tenant("t").unwrap().budget;
            late += u64::from(changed.is_err() && told.journal == to);
            let holds = v.statfs_of(root).unwrap().blocks * BLOCK;
            let most = told.space.unwrap();
            assert!(holds <= most && holds > most / 2, "{from:?} to {to:?}, {n}: {holds}, {told:?}, {changed:?}");
            drop(f);
            v.crash();
            if !fired {
                break;
            }
        }
    }
    assert!(late > 0, "none failed so late: this test sees nothing");
}

#[test]
fn every_crash_of_a_change_leaves_the_mode_before_the_devices() {
    for (from, to) in [(None, DATA), (DATA, ORDERED), (SCRATCH, ORDERED), (None, SCRATCH)] {
        let (states, found) = every_crash_of_a_change(from, to).unwrap_or_else(|e| panic!("{from:?} to {to:?}: {e}"));
        println!("{from:?} to {to:?}: {states} states, {found:?}");
        let all = [&found.old, &found.between, &found.new].map(|n| n.get());
        assert!(all.iter().all(|n| *n > 0) && states == all.iter().sum::<usize>(), "{from:?} to {to:?}: {all:?}");
    }
}

/// An empty tenant comes to have no journal, and another one again; one with a file, or one that is open, does not.
#[test]
fn an_empty_tenant_comes_to_have_no_journal() {
    let (all, v) = volume(&[64], false);
    let t = create(&v, budget(DATA));
    let to = |journal| v.tenant_change("t", |b| b.journal = journal).map(|t| t.budget.journal);
    let refused = |why: &str| {
        let e = to(SCRATCH).unwrap_err();
        assert!(matches!(e, Error::Invalid(_)) && e.to_string().contains("empty"), "{why}: {e}");
        // and names cross its border still
        v.rename(ROOT, b"o", t, b"o", braidfs::RenameMode::Replace).unwrap();
        v.rename(t, b"o", ROOT, b"o", braidfs::RenameMode::Replace).unwrap();
    };
    drop(file(&v, ROOT, "o"));
    let f = file(&v, t, "f");
    v.write(&f, 0, &[1; 9000]).unwrap();
    refused("a file");
    v.unlink(t, b"f").unwrap();
    refused("an open one");
    drop(f);
    // one of its inodes elsewhere
    drop(file(&v, t, "g"));
    v.rename(t, b"g", ROOT, b"g", braidfs::RenameMode::Replace).unwrap();
    refused("one outside");
    v.unlink(ROOT, b"g").unwrap();
    v.fsync(t, false).unwrap();
    assert_eq!(to(SCRATCH).unwrap(), SCRATCH);
    assert_eq!(v.super_block().incompat.get(), 2, "older programs refuse the volume");
    let crosses = v.rename(ROOT, b"o", t, b"o", braidfs::RenameMode::Replace);
    assert!(matches!(crosses, Err(Error::CrossScratch)));
    let f = file(&v, t, "f");
    fill(&v, &f, 8);
    v.fsync(f.ino(), false).unwrap();
    drop(f);
    v.crash();
    fsck(&all).unwrap();
    let v = mount(&all);
    assert!(tree(&v, t).unwrap().is_empty());
    assert_eq!(v.lookup(ROOT, b"d").unwrap().ino, t);
    let f = file(&v, t, "f");
    fill(&v, &f, 8);
    drop(f);
    let whole = tree(&v, t).unwrap();
    close(v, &all);
    let v = mount(&all);
    assert_eq!(tree(&v, t).unwrap(), whole);
    v.tenant_change("t", |b| b.journal = ORDERED).unwrap();
    v.crash();
    let v = mount(&all);
    assert_eq!(tree(&v, t).unwrap(), whole);
    close(v, &all);
}
