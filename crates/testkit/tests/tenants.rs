//! Tenants: directory trees with a domain and a limit of their own.

use braidfs::{
    Cred, Error, FileKind, InodeNo, MkfsOptions, MountOptions, NewNode, OpenFile, RenameMode, StatFs, TenantBudget,
    Volume, mkfs,
};
use braidfs_device::{Device, Effect, FaultDevice, Op, Rule};
use braidfs_testkit::small::{BLOCK, MIB, ROOT, beside, create as make, file, memory, new_node};
use braidfs_testkit::{small, tenant::every_crash_of_a_tenant};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

fn format(device: &Arc<dyn Device>) {
    let how = MkfsOptions { domains: Some(2), group_bytes: Some(4 * MIB), ..MkfsOptions::default() };
    mkfs::format(std::slice::from_ref(device), &how).unwrap();
}

fn mount(device: &Arc<dyn Device>) -> Volume {
    let options = MountOptions { cache_bytes: 64 * MIB, ..MountOptions::default() };
    Volume::mount(vec![Arc::clone(device)], options).unwrap()
}

fn close(v: Volume, device: &Arc<dyn Device>) {
    small::close(v, std::slice::from_ref(device));
}

fn budget(bytes: u64) -> TenantBudget {
    TenantBudget { space: Some(bytes), ..TenantBudget::default() }
}

fn tenant(v: &Volume, name: &str, bytes: u64) -> InodeNo {
    v.tenant_create(ROOT, name.as_bytes(), 0o755, name, budget(bytes), &Cred::root()).unwrap().root
}

/// Appends blocks until there is no room; how many.
fn fill(v: &Volume, f: &OpenFile) -> u64 {
    let mut at = v.getattr(f.ino()).unwrap().size;
    let begin = at;
    for step in [64, 1] {
        let bytes = vec![at as u8; (step * BLOCK) as usize];
        loop {
            match v.write(f, at, &bytes) {
                Ok(n) => at += n as u64,
                Err(Error::NoSpace) => break,
                Err(e) => panic!("at {at}: {e}"),
            }
        }
    }
    (at - begin) / BLOCK
}

fn used(v: &Volume, name: &str) -> u64 {
    v.tenant(name).unwrap().used / BLOCK
}

#[test]
fn a_crash_leaves_the_tenant_or_none() {
    let (states, there) = every_crash_of_a_tenant().unwrap();
    assert!(there > 10 && states > there + 10, "{states} states, {there} with it");
    println!("{states} states, {there} with it");
}

/// What lies below a tenant's root lies in its domain, whatever placement says, and nothing else does; also after a mount.
#[test]
fn a_tenant_has_a_domain_of_its_own() {
    let device = memory(64);
    format(&device);
    let v = mount(&device);
    let t = tenant(&v, "t", 16 * MIB);
    let mine = v.domain_of(t).unwrap();
    v.setxattr(t, b"braidfs.placement", b"spread", braidfs::XattrMode::Set).unwrap();
    let check = |v: &Volume, prefix: &str| {
        let t = v.tenant("t").unwrap().root;
        for n in 0..20 {
            let below = make(v, t, &format!("{prefix}{n}"), FileKind::Dir);
            assert_eq!(v.domain_of(below).unwrap(), mine);
            assert_eq!(v.domain_of(make(v, below, "f", FileKind::File)).unwrap(), mine);
            assert_ne!(v.domain_of(make(v, ROOT, &format!("{prefix}{n}"), FileKind::Dir)).unwrap(), mine);
        }
    };
    check(&v, "a");
    close(v, &device);
    let v = mount(&device);
    assert_eq!(v.tenants().len(), 1);
    assert_eq!(v.tenant("t").unwrap().budget, budget(16 * MIB));
    check(&v, "b");
    close(v, &device);
}

#[test]
fn what_is_refused() {
    let device = memory(64);
    format(&device);
    let v = mount(&device);
    let t = tenant(&v, "t", 8 * MIB);
    let create = |entry: &str, name: &str, b| v.tenant_create(ROOT, entry.as_bytes(), 0o755, name, b, &Cred::root());
    make(&v, ROOT, "dir", FileKind::Dir);
    assert!(matches!(create("u", "t", budget(8 * MIB)), Err(Error::Busy(_))));
    assert!(matches!(create("dir", "u", budget(8 * MIB)), Err(Error::Exists)));
    assert!(matches!(create("u", "u", budget(1)), Err(Error::Invalid(_))));
    assert!(matches!(create("u", "a/b", budget(8 * MIB)), Err(Error::Invalid(_))));
    assert!(matches!(create("u", "", budget(8 * MIB)), Err(Error::Invalid(_))));
    assert!(matches!(v.tenant_set("u", budget(8 * MIB)), Err(Error::NotFound)));
    assert!(matches!(v.tenant_remove("u"), Err(Error::NotFound)));
    // the root stays as long as the tenant does
    assert!(matches!(v.rmdir(ROOT, b"t"), Err(Error::Busy(_))));
    assert!(matches!(v.rename(ROOT, b"dir", ROOT, b"t", RenameMode::Replace), Err(Error::Busy(_))));
    // it may have another name, and files cross the border both ways, with their blocks where they are
    v.rename(ROOT, b"t", ROOT, b"moved", RenameMode::Replace).unwrap();
    let f = file(&v, ROOT, "f");
    v.write(&f, 0, &[1; 100_000]).unwrap();
    v.sync().unwrap();
    let before = used(&v, "t");
    v.rename(ROOT, b"f", t, b"f", RenameMode::Replace).unwrap();
    v.link(f.ino(), ROOT, b"g").unwrap();
    v.sync().unwrap();
    assert!(used(&v, "t") < before + 20, "{} blocks, {before} before", used(&v, "t"));
    drop(f);
    v.tenant_remove("t").unwrap();
    assert!(v.tenants().is_empty());
    v.unlink(t, b"f").unwrap();
    v.rmdir(ROOT, b"moved").unwrap();
    close(v, &device);
}

/// The same blocks are had, to the last one, by one thread and by 64; and never more than the limit.
#[test]
fn the_limit_is_exact_with_many_threads_as_with_one() {
    const FILES: usize = 64;
    let limit = 12 * MIB / BLOCK;
    let mut all = Vec::new();
    for threads in [1, FILES] {
        let device = memory(96);
        format(&device);
        let v = mount(&device);
        let t = tenant(&v, "t", limit * BLOCK);
        let files: Vec<OpenFile> = (0..FILES).map(|n| file(&v, t, &format!("f{n}"))).collect();
        v.sync().unwrap();
        let done = AtomicUsize::new(0);
        let (done, v) = (&done, v);
        std::thread::scope(|s| {
            for part in files.chunks(FILES / threads) {
                let v = &v;
                s.spawn(move || {
                    part.iter().for_each(|f| {
                        fill(v, f);
                    });
                    done.fetch_add(1, Ordering::Relaxed);
                });
            }
            while done.load(Ordering::Relaxed) < threads {
                // the count of what is in use is no picture of one moment while it changes: of data there is never more
                let data: u64 = files.iter().map(|f| v.getattr(f.ino()).unwrap().size / BLOCK).sum();
                assert!(data <= limit, "{data} blocks of {limit}");
                std::thread::yield_now();
            }
        });
        // what reservations for metadata held back
        loop {
            v.sync().unwrap();
            if files.iter().map(|f| fill(&v, f)).sum::<u64>() == 0 {
                break;
            }
        }
        v.sync().unwrap();
        let now = used(&v, "t");
        println!("{threads} threads: {now} blocks in use of {limit}");
        assert!(now <= limit, "{now} blocks of {limit} with {threads} threads");
        all.push(now);
        let StatFs { blocks, free, available, .. } = v.statfs_of(t).unwrap();
        assert_eq!((blocks, free), (limit, limit - now));
        assert!(available <= free);
        // others have room
        assert!(fill(&v, &file(&v, ROOT, "other")) > 8 * MIB / BLOCK);
        close(v, &device);
    }
    let left = |n: &u64| limit - n;
    assert!(all.iter().map(left).all(|n| n < 64), "{all:?} of {limit}");
}

/// What is offered of a tenant is what one file can be filled with, to the block, whatever the limit. As long as some is offered
/// a block more is had, and where one is refused nothing is offered.
#[test]
fn what_is_offered_of_a_tenant_can_be_written() {
    let quarters_of_a_mib = (4..16).chain((16..=64).step_by(6));
    for limit in quarters_of_a_mib.map(|n| n * MIB / 4) {
        let device = memory(64);
        format(&device);
        let options = MountOptions { cache_bytes: 64 * MIB, background: false, ..MountOptions::default() };
        let v = Volume::mount(vec![Arc::clone(&device)], options).unwrap();
        let t = tenant(&v, "t", limit);
        for round in 0..3 {
            let name = format!("f{round}");
            let f = file(&v, t, &name);
            v.sync().unwrap();
            let told = v.statfs_of(t).unwrap().available;
            assert!(told + 8 > limit / BLOCK, "{told} of {} blocks, round {round}", limit / BLOCK);
            // records that were changed may lie in a block more, which is empty after the last commit
            let more = u64::from(round > 0);
            let mut wrote = 0;
            loop {
                let left = v.statfs_of(f.ino()).unwrap().available;
                let result = v.write(&f, wrote * BLOCK, &[7; BLOCK as usize]);
                let why = format!("{limit} bytes, round {round}: {left} left of {told}, {wrote} written: {result:?}");
                match result {
                    Ok(n) => assert!(n as u64 == BLOCK && left + more > 0, "{why}"),
                    Err(Error::NoSpace) => {
                        assert!(left == 0 && (told..=told + more).contains(&wrote), "{why}");
                        break;
                    }
                    Err(_) => panic!("{why}"),
                }
                wrote += 1;
            }
            drop(f);
            v.unlink(t, name.as_bytes()).unwrap();
        }
        close(v, &device);
    }
}

/// The same of a directory with a limit that has no domain of its own.
#[test]
fn what_is_offered_of_a_directory_with_a_quota_can_be_written() {
    let device = memory(64);
    format(&device);
    let v = mount(&device);
    let d = make(&v, ROOT, "d", FileKind::Dir);
    v.quota_directory(d, |l| l.space = Some(320 * BLOCK)).unwrap();
    let f = file(&v, d, "f");
    v.sync().unwrap();
    let told = v.statfs_of(d).unwrap().available;
    assert_eq!(told, 320);
    for wrote in 0..told {
        assert_eq!(v.statfs_of(d).unwrap().available, told - wrote);
        assert_eq!(v.write(&f, wrote * BLOCK, &[7; BLOCK as usize]).unwrap() as u64, BLOCK);
    }
    assert_eq!(v.statfs_of(d).unwrap().available, 0);
    assert!(matches!(v.write(&f, told * BLOCK, &[7; BLOCK as usize]), Err(Error::Quota(_))));
    drop(f);
    close(v, &device);
}

/// Limits change while files are written: no write fails as long as there is room, and what is deleted may be written again.
#[test]
fn a_limit_changes_under_load() {
    let device = memory(96);
    format(&device);
    let v = mount(&device);
    let t = tenant(&v, "t", 32 * MIB);
    let write = |n, round| {
        let name = format!("f{n}.{round}");
        let f = file(&v, t, &name);
        v.write(&f, 0, &vec![n; 1 << 20]).unwrap();
        if round % 2 == 0 {
            v.fsync(f.ino(), false).unwrap();
        }
        v.unlink(t, name.as_bytes()).unwrap();
    };
    beside(4, write, || (0..40).for_each(|n| drop(v.tenant_set("t", budget((24 + n % 7 * 3) * MIB)).unwrap())));
    v.sync().unwrap();
    // below what is in use: nothing more is had, deletions are, and then there is room again
    let f = file(&v, t, "f");
    v.write(&f, 0, &vec![1; 8 << 20]).unwrap();
    v.sync().unwrap();
    v.tenant_set("t", budget(2 * MIB)).unwrap();
    assert!(used(&v, "t") > 2 * MIB / BLOCK);
    assert!(matches!(v.write(&f, 8 << 20, &[1; 4096]), Err(Error::NoSpace)));
    let s = v.statfs_of(t).unwrap();
    assert_eq!((s.free, s.available), (0, 0));
    drop(f);
    v.unlink(t, b"f").unwrap();
    v.sync().unwrap();
    let f = file(&v, t, "g");
    let got = fill(&v, &f);
    assert!((MIB / BLOCK..=2 * MIB / BLOCK).contains(&got), "{got} blocks of 2 MiB");
    v.tenant_set("t", TenantBudget::default()).unwrap();
    assert!(fill(&v, &f) > 16 * MIB / BLOCK);
    close(v, &device);
}

/// Fill one tenant, empty it, fill another, ten rounds: all space comes back, and both get the same each time.
#[test]
fn ten_rounds_lose_nothing() {
    let device = memory(64);
    format(&device);
    let v = mount(&device);
    let both = [tenant(&v, "a", 36 * MIB), tenant(&v, "b", 36 * MIB)];
    let mut got = Vec::new();
    for round in 0..10 {
        let t = both[round % 2];
        let f = file(&v, t, "f");
        got.push(fill(&v, &f));
        drop(f);
        v.unlink(t, b"f").unwrap();
        v.sync().unwrap();
    }
    let least = *got.iter().min().unwrap();
    println!("{got:?}");
    assert!(least > 33 * MIB / BLOCK && got.iter().all(|n| n - least < 64), "{got:?}");
    // the domain of a tenant that has gone is the next one's
    let n = v.domains().len();
    for round in 0..10 {
        v.tenant_remove("b").unwrap();
        v.rmdir(ROOT, b"b").unwrap();
        v.sync().unwrap();
        let t = tenant(&v, "b", 8 * MIB);
        let f = file(&v, t, "f");
        let blocks = fill(&v, &f);
        assert!((7 * MIB / BLOCK..=8 * MIB / BLOCK).contains(&blocks), "{blocks} in round {round}");
        drop(f);
        v.unlink(t, b"f").unwrap();
    }
    assert_eq!(v.domains().len(), n);
    close(v, &device);
}

/// A tenant whose domain fails takes nothing of another's along, nor of what is nobody's.
#[test]
fn a_tenant_that_fails_fails_alone() {
    let device = memory(64);
    format(&device);
    let v = mount(&device);
    let (a, b) = (tenant(&v, "a", 12 * MIB), tenant(&v, "b", 12 * MIB));
    let f = file(&v, a, "f");
    v.write(&f, 0, &vec![1; 1 << 20]).unwrap();
    v.sync().unwrap();
    drop(f);
    v.unmount().unwrap();
    let faulty = Arc::new(FaultDevice::new(device.clone(), 1));
    let v = mount(&(faulty.clone() as Arc<dyn Device>));
    // its journal: where the next commit of `a` goes
    let sb = v.super_block();
    let group = v.domain_of(a).unwrap();
    let mut pair = vec![0; 2 * BLOCK as usize];
    let at = sb.domain_table.get() + 2 * u64::from(group.0);
    device.read(at, &mut pair).unwrap();
    let (_, _, h) = braidfs::format::domain::DomainHeader::from_pair(&pair, sb.volume_id(), at, group.0).unwrap();
    let first = sb.device[0].data_start.get() + h.journal_start.get();
    let journal = first..first + u64::from(h.journal_blocks.get());
    faulty.add(Rule::new(Op::Write, Effect::Fail(5)).blocks(journal));
    make(&v, a, "lost", FileKind::File);
    assert!(v.sync().is_err());
    assert!(v.tenant("a").unwrap().failed.is_some() && v.tenant("b").unwrap().failed.is_none());
    for (dir, name) in [(b, "g"), (ROOT, "h")] {
        let g = file(&v, dir, name);
        v.write(&g, 0, &[2; 50_000]).unwrap();
        v.fsync(g.ino(), false).unwrap();
    }
    let f = v.open(v.lookup(a, b"f").unwrap().ino).unwrap();
    let mut bytes = [0; 4096];
    assert_eq!(v.read(&f, 0, &mut bytes).unwrap(), 4096);
    assert!(bytes.iter().all(|b| *b == 1));
    v.tenant_set("b", budget(10 * MIB)).unwrap();
    drop(f);
    drop(v.unmount());
    let v = mount(&device);
    assert_eq!(v.tenants().len(), 2);
    assert_eq!(v.tenant("b").unwrap().budget, budget(10 * MIB));
    assert_eq!(v.getattr(v.lookup(b, b"g").unwrap().ino).unwrap().size, 50_000);
}

/// A volume on a device that can fail, where nothing goes on by itself.
fn mount_faulty(device: &Arc<dyn Device>) -> (Arc<FaultDevice>, Volume) {
    let faulty = Arc::new(FaultDevice::new(Arc::clone(device), 1));
    let options = MountOptions { background: false, ..MountOptions::default() };
    let v = Volume::mount(vec![faulty.clone() as Arc<dyn Device>], options).unwrap();
    (faulty, v)
}

/// Blocks of a domain's header pair.
fn header_pair(v: &Volume, domain: u16) -> std::ops::Range<u64> {
    let at = v.super_block().domain_table.get() + 2 * u64::from(domain);
    at..at + 2
}

/// What a front end took from programs while there was room for it is not lost when the limit goes down before it comes:
/// but it never has more than the limit before.
#[test]
fn a_lower_limit_loses_nothing_that_was_accepted() {
    let device = memory(96);
    format(&device);
    let v = mount(&device);
    let before = 32 * MIB / BLOCK;
    let t = tenant(&v, "t", before * BLOCK);
    let f = file(&v, t, "f");
    v.write(&f, 0, &vec![1; 4 << 20]).unwrap();
    v.sync().unwrap();
    // in a file with content in its record, in a new one, and one block after the other
    let small = file(&v, t, "small");
    v.write(&small, 0, &[1; 10]).unwrap();
    v.tenant_set("t", budget(2 * MIB)).unwrap();
    assert!(matches!(v.write(&f, 4 << 20, &[1; 4096]), Err(Error::NoSpace)));
    assert_eq!(v.write_accepted(&small, 5, &[2; 100_000]).unwrap(), 100_000);
    for at in 4..20 {
        assert_eq!(v.write_accepted(&f, at << 20, &vec![at as u8; 1 << 20]).unwrap(), 1 << 20, "MiB {at}");
    }
    v.sync().unwrap();
    let mut bytes = [0; 4096];
    v.read(&f, 19 << 20, &mut bytes).unwrap();
    assert!(bytes.iter().all(|b| *b == 19));
    let mut at = 20 << 20;
    while let Ok(n) = v.write_accepted(&f, at, &vec![3; 1 << 18]) {
        at += n as u64;
        assert!(at < 64 << 20, "no end");
    }
    v.sync().unwrap();
    assert!(used(&v, "t") <= before + 64, "{} blocks of {before}", used(&v, "t"));
    close(v, &device);
}

/// What was promised before a limit went down is used up by what takes blocks, not by writes that look whether there are some:
/// 16 MiB are written as they were accepted after ten thousand small writes beside.
#[test]
fn small_writes_do_not_use_up_what_was_promised() {
    let device = memory(96);
    format(&device);
    let v = mount(&device);
    let t = tenant(&v, "t", 24 * MIB);
    let f = file(&v, t, "f");
    v.write(&f, 0, &vec![1; 4 << 20]).unwrap();
    let small: Vec<OpenFile> = (0..100).map(|n| file(&v, t, &format!("small {n}"))).collect();
    v.sync().unwrap();
    v.tenant_set("t", budget(2 * MIB)).unwrap();
    for at in 0..100 {
        for s in &small {
            assert_eq!(v.write_accepted(s, at, &[2]).unwrap(), 1, "byte {at}");
        }
    }
    for at in 4..20 {
        assert_eq!(v.write_accepted(&f, at << 20, &vec![at as u8; 1 << 20]).unwrap(), 1 << 20, "MiB {at}");
    }
    v.sync().unwrap();
    assert!(used(&v, "t") <= 24 * MIB / BLOCK + 64, "{} blocks", used(&v, "t"));
    close(v, &device);
}

/// Above a limit that was lowered files can be overwritten and cleaned: their use does not grow.
#[test]
fn above_the_limit_files_are_overwritten() {
    let device = memory(96);
    format(&device);
    let v = mount(&device);
    let t = tenant(&v, "t", 32 * MIB);
    let f = file(&v, t, "f");
    v.write(&f, 0, &vec![1; 8 << 20]).unwrap();
    v.sync().unwrap();
    v.tenant_set("t", budget(2 * MIB)).unwrap();
    for round in 0..3 {
        for at in (0..8 << 20).step_by(1 << 16) {
            assert_eq!(v.write(&f, at, &[round; 4096]).unwrap(), 4096, "round {round}");
        }
        v.sync().unwrap();
        v.clean(4).unwrap();
    }
    assert!(matches!(v.write(&f, 8 << 20, &[1; 4096]), Err(Error::NoSpace)));
    assert!(used(&v, "t") < 9 * MIB / BLOCK, "{}", used(&v, "t"));
    close(v, &device);
}

/// A tenant that has few blocks in use gets more numbers of inodes, also where it has blocks enough.
#[test]
fn numbers_of_inodes_do_not_end_at_the_limit_of_space() {
    let device = memory(96);
    format(&device);
    let v = mount(&device);
    let t = tenant(&v, "t", 2 * MIB);
    let most = v.statfs_of(t).unwrap().inodes;
    for n in 0..most + 100 {
        make(&v, t, &format!("{n}"), FileKind::File);
    }
    assert!(used(&v, "t") <= 2 * MIB / BLOCK);
    close(v, &device);
}

/// A tenant at its limit that makes and deletes files over and over uses the numbers of the deleted ones, and takes no
/// groups that others could have.
#[test]
fn numbers_of_deleted_inodes_are_used_again_before_groups_are_claimed() {
    let device = memory(96);
    format(&device);
    let v = mount(&device);
    let t = tenant(&v, "t", 2 * MIB);
    let numbers = v.statfs_of(t).unwrap().inodes;
    for n in 0..3 * numbers {
        make(&v, t, "f", FileKind::File);
        v.unlink(t, b"f").unwrap();
        assert!(v.statfs_of(t).unwrap().inodes <= numbers, "{n}: {} of {numbers}", v.statfs_of(t).unwrap().inodes);
    }
    close(v, &device);
}

/// A change of a tenant that the device refused, in its first or its second write or its flush, has not happened.
#[test]
fn what_the_device_refused_has_not_happened() {
    let device = memory(64);
    format(&device);
    let (faulty, v) = mount_faulty(&device);
    let t = tenant(&v, "t", 16 * MIB);
    let pair = header_pair(&v, v.domain_of(t).unwrap().0);
    let rules = [
        Rule::new(Op::Write, Effect::Fail(5)).blocks(pair.clone()),
        Rule::new(Op::Write, Effect::Fail(5)).blocks(pair.clone()).skip(1),
    ];
    for rule in rules.clone() {
        faulty.add(rule.clone().times(1));
        assert!(v.tenant_set("t", budget(4 * MIB)).is_err());
        faulty.clear();
        assert_eq!(v.tenant("t").unwrap().budget, budget(16 * MIB), "{rule:?}");
        faulty.add(rule.clone().times(1));
        assert!(v.tenant_remove("t").is_err());
        faulty.clear();
        assert_eq!(v.tenant("t").unwrap().budget, budget(16 * MIB), "{rule:?}");
        assert!(matches!(v.rmdir(ROOT, b"t"), Err(Error::Busy(_))));
    }
    close(v, &device);
    // the header of a new domain is written, and again when the domain is there, and then twice for the tenant
    for skip in [2, 3] {
        let device = memory(64);
        format(&device);
        let (faulty, v) = mount_faulty(&device);
        faulty.add(Rule::new(Op::Write, Effect::Fail(5)).blocks(header_pair(&v, 2)).skip(skip).times(1));
        assert!(v.tenant_create(ROOT, b"t", 0o755, "t", budget(4 * MIB), &Cred::root()).is_err());
        assert_eq!((faulty.fired(), v.domains().len()), (1, 3));
        assert!(v.tenants().is_empty() && matches!(v.lookup(ROOT, b"t"), Err(Error::NotFound)));
        tenant(&v, "t", 4 * MIB);
        v.unmount().unwrap();
        let v = mount(&device);
        assert_eq!((v.tenants().len(), v.domains().len()), (1, 3));
        close(v, &device);
    }
}

/// Likewise of its flushes; a device whose flush failed is trusted no more.
#[test]
fn a_tenant_whose_flush_failed_is_as_before() {
    for skip in 0..2 {
        let device = memory(64);
        format(&device);
        let (faulty, v) = mount_faulty(&device);
        tenant(&v, "t", 16 * MIB);
        faulty.add(Rule::new(Op::Flush, Effect::Fail(5)).skip(skip).times(1));
        assert!(v.tenant_set("t", budget(4 * MIB)).is_err());
        assert_eq!(v.tenant("t").unwrap().budget, budget(16 * MIB), "flush {skip}");
        assert!(v.tenant_remove("t").is_err() && v.tenants().len() == 1);
        v.crash();
        let v = mount(&device);
        let is = v.tenant("t").unwrap().budget;
        assert!(is == budget(16 * MIB) || is == budget(4 * MIB), "{is:?}");
        close(v, &device);
    }
}

/// A domain that was added for anybody, and failed half-way, is a tenant's only where it is kept for tenants.
#[test]
fn a_second_attempt_at_a_domain_keeps_it_for_tenants() {
    let device = memory(64);
    format(&device);
    let (faulty, v) = mount_faulty(&device);
    // the header is written, the group claimed, and then the header once more
    faulty.add(Rule::new(Op::Write, Effect::Fail(5)).blocks(header_pair(&v, 2)).skip(1).times(1));
    assert!(v.add_domain().is_err());
    assert_eq!((v.domains().len(), faulty.fired()), (2, 1));
    let t = tenant(&v, "t", 8 * MIB);
    let mine = v.domain_of(t).unwrap();
    let elsewhere = |v: &Volume, prefix: &str| {
        for n in 0..12 {
            assert_ne!(v.domain_of(make(v, ROOT, &format!("{prefix}{n}"), FileKind::Dir)).unwrap(), mine);
        }
    };
    elsewhere(&v, "a");
    v.unmount().unwrap();
    let v = mount(&device);
    elsewhere(&v, "b");
    close(v, &device);
}

fn inodes(space: Option<u64>, inodes: u64) -> TenantBudget {
    TenantBudget { space, inodes: Some(inodes), ..TenantBudget::default() }
}

/// Inodes that a tenant has.
fn has(v: &Volume, name: &str) -> u64 {
    v.tenant(name).unwrap().inodes
}

/// One inode more, of each kind in turn.
fn one_more(v: &Volume, dir: InodeNo, n: u64) -> Result<(), Error> {
    let kinds = [FileKind::File, FileKind::Dir, FileKind::Symlink, FileKind::Fifo, FileKind::Socket];
    let new =
        NewNode { kind: kinds[n as usize % kinds.len()], mode: 0o755, umask: 0, rdev: 0, target: b"somewhere else" };
    v.create(dir, format!("{n}").as_bytes(), &new, &Cred::root()).map(drop)
}

/// With a limit of so many there are exactly so many, by one thread and by 64, in one directory and in many; others go on.
#[test]
fn the_limit_of_inodes_is_exact_with_many_threads_as_with_one() {
    const LIMIT: u64 = 1000;
    for threads in [1, 64] {
        let device = memory(96);
        format(&device);
        let v = mount(&device);
        let t = v.tenant_create(ROOT, b"t", 0o755, "t", inodes(None, LIMIT), &Cred::root()).unwrap().root;
        let dirs: Vec<InodeNo> = (0..4).map(|n| make(&v, t, &format!("d{n}"), FileKind::Dir)).collect();
        let next = AtomicUsize::new(0);
        let made: u64 = std::thread::scope(|s| {
            let one = || {
                let mut made = 0;
                loop {
                    let n = next.fetch_add(1, Ordering::Relaxed) as u64;
                    match one_more(&v, dirs[n as usize / 5 % 4], n) {
                        Ok(()) => made += 1,
                        Err(Error::NoSpace) => return made,
                        Err(e) => panic!("{e}"),
                    }
                    assert!(has(&v, "t") <= LIMIT);
                }
            };
            let all: Vec<_> = (0..threads).map(|_| s.spawn(one)).collect();
            all.into_iter().map(|t| t.join().unwrap()).sum()
        });
        assert_eq!((made + 5, has(&v, "t")), (LIMIT, LIMIT), "{threads} threads");
        assert!(matches!(v.tmpfile(t, &new_node(FileKind::File), &Cred::root()), Err(Error::NoSpace)));
        let s = v.statfs_of(dirs[0]).unwrap();
        assert_eq!((s.inodes, s.inodes_free), (LIMIT, 0));
        assert!(v.statfs_of(ROOT).unwrap().inodes_free > LIMIT);
        // a second name is no inode, and others have theirs
        v.link(make(&v, ROOT, "other", FileKind::File), t, b"link").unwrap();
        close(v, &device);
    }
}

/// What is not made, or is deleted, gives its inode back: at once, whether or not that is durable, but not while it is open.
#[test]
fn inodes_are_given_back() {
    let device = memory(64);
    format(&device);
    let v = mount(&device);
    let t = v.tenant_create(ROOT, b"t", 0o755, "t", inodes(Some(16 * MIB), 4), &Cred::root()).unwrap().root;
    let f = file(&v, t, "f");
    let other = make(&v, t, "d", FileKind::Dir);
    assert_eq!(has(&v, "t"), 3);
    let new = |kind, target| NewNode { target, ..new_node(kind) };
    let long = vec![b'x'; 5000];
    for _ in 0..3 {
        let create = |name: &[u8], n: &NewNode<'_>| v.create(t, name, n, &Cred::root()).map(drop);
        assert!(matches!(create(b"f", &new(FileKind::File, b"")), Err(Error::Exists)));
        assert!(matches!(create(b"s", &new(FileKind::Symlink, &long)), Err(Error::NameTooLong)));
        assert!(matches!(create(b"s", &new(FileKind::Symlink, b"")), Err(Error::NotFound)));
        assert_eq!(has(&v, "t"), 3);
        // open without a name
        let (_, tmp) = v.tmpfile(t, &new(FileKind::File, b""), &Cred::root()).unwrap();
        assert!(matches!(create(b"g", &new(FileKind::File, b"")), Err(Error::NoSpace)));
        drop(tmp);
        create(b"g", &new(FileKind::File, b"")).unwrap();
        assert!(matches!(create(b"h", &new(FileKind::Fifo, b"")), Err(Error::NoSpace)));
        // the one that is replaced goes
        v.rename(t, b"g", other, b"g", RenameMode::Replace).unwrap();
        v.unlink(other, b"g").unwrap();
        assert_eq!(has(&v, "t"), 3);
    }
    v.unlink(t, b"f").unwrap();
    make(&v, t, "g", FileKind::File);
    assert_eq!(has(&v, "t"), 4, "one is open without a name");
    drop(f);
    assert_eq!(has(&v, "t"), 3);
    v.rename(t, b"g", ROOT, b"g", RenameMode::Replace).unwrap();
    assert_eq!(has(&v, "t"), 3, "it counts where it lies");
    v.rmdir(t, b"d").unwrap();
    assert_eq!(has(&v, "t"), 2);
    v.tenant_remove("t").unwrap();
    (0..10).for_each(|n| one_more(&v, t, n).unwrap());
    close(v, &device);
}

/// A limit changes while inodes come and go: nothing fails that there is room for; below what is in use nothing more is made.
#[test]
fn a_limit_of_inodes_changes_under_load() {
    let device = memory(64);
    format(&device);
    let v = mount(&device);
    let t = tenant(&v, "t", 32 * MIB);
    let come_and_go = |n, _| {
        let name = format!("f{n}");
        make(&v, t, &name, FileKind::File);
        v.unlink(t, name.as_bytes()).unwrap();
    };
    let change =
        |n: u64| drop(v.tenant_change("t", |b| b.inodes = (!n.is_multiple_of(3)).then_some(9 + n % 7)).unwrap());
    beside(8, come_and_go, || (0..60).for_each(change));
    assert_eq!(has(&v, "t"), 1);
    v.tenant_change("t", |b| b.inodes = None).unwrap();
    (0..20).for_each(|n| one_more(&v, t, n).unwrap());
    v.tenant_change("t", |b| b.inodes = Some(11)).unwrap();
    assert_eq!(v.tenant("t").unwrap().budget, inodes(Some(32 * MIB), 11));
    assert!(matches!(v.tenant_set("t", inodes(None, 0)), Err(Error::Invalid(_))));
    let s = v.statfs_of(t).unwrap();
    assert_eq!((s.inodes, s.inodes_free), (21, 0));
    for n in 0..10 {
        assert!(matches!(one_more(&v, t, 100), Err(Error::NoSpace)), "{n}");
        let gone = format!("{n}");
        if n % 5 == 1 { v.rmdir(t, gone.as_bytes()) } else { v.unlink(t, gone.as_bytes()) }.unwrap();
    }
    assert!(matches!(one_more(&v, t, 100), Err(Error::NoSpace)));
    v.unlink(t, b"10").unwrap();
    one_more(&v, t, 100).unwrap();
    assert_eq!(has(&v, "t"), 11);
    close(v, &device);
}

/// A mount counts them anew: those with nodes beside as one, also after a crash with files that were open without a name.
#[test]
fn a_mount_counts_inodes_anew() {
    let device = memory(64);
    format(&device);
    let v = mount(&device);
    let t = v.tenant_create(ROOT, b"t", 0o755, "t", inodes(None, 700), &Cred::root()).unwrap().root;
    (0..600).for_each(|n| one_more(&v, t, n).unwrap());
    // records with nodes beside
    let long = "x".repeat(200);
    let zero = v.lookup(t, b"0").unwrap().ino;
    for n in 0..40 {
        v.link(zero, t, format!("{long}{n}").as_bytes()).unwrap();
    }
    assert_eq!(has(&v, "t"), 601);
    close(v, &device);
    let v = mount(&device);
    assert_eq!(has(&v, "t"), 601);
    let open: Vec<OpenFile> = (0..10).map(|n| file(&v, t, &format!("open{n}"))).collect();
    (0..10).for_each(|n| v.unlink(t, format!("open{n}").as_bytes()).unwrap());
    v.unlink(t, b"5").unwrap();
    v.sync().unwrap();
    assert_eq!(has(&v, "t"), 610);
    // not durable but for the last one, by itself
    let synced = file(&v, t, "synced");
    v.fsync(synced.ino(), false).unwrap();
    v.crash();
    drop((open, synced));
    let v = mount(&device);
    v.lookup(t, b"synced").unwrap();
    v.sync().unwrap();
    assert_eq!(has(&v, "t"), 601, "one was deleted, one synced, and those without a name are gone");
    let made = (1000..).take_while(|n| one_more(&v, t, *n).is_ok()).count() as u64;
    assert_eq!((made, has(&v, "t")), (99, 700));
    close(v, &device);
}

/// Who is refused because the volume has no number left, and not by the limit, counts as nothing.
#[test]
fn what_has_no_number_counts_as_nothing() {
    let device = memory(24);
    format(&device);
    let v = mount(&device);
    let t = v.tenant_create(ROOT, b"t", 0o755, "t", inodes(None, 1 << 20), &Cred::root()).unwrap().root;
    let made = (0..).take_while(|n| one_more(&v, t, *n).is_ok()).count() as u64;
    for n in 0..5 {
        assert!(matches!(one_more(&v, t, made + n), Err(Error::NoSpace)));
    }
    assert_eq!((made + 1, v.statfs_of(t).unwrap().inodes_free), (has(&v, "t"), 0));
    assert!(v.statfs_of(t).unwrap().available > 16, "there are no numbers, and there is room");
    close(v, &device);
}
