//! Blocks and inodes come back: after writes that failed, and where inodes lose their names to others of other domains.

use braidfs::device::{Device, Effect, FaultDevice, MemDevice, Op, Rule};
use braidfs::{Cred, DomainId, FallocMode, InodeNo, MkfsOptions, MountOptions, OpenFile, OpenHow, Volume, mkfs};
use braidfs::{Placement, RenameMode, SetAttr};
use std::sync::Arc;
use std::time::Duration;

const PAGE: usize = 4096;

fn formatted(domains: u16) -> Arc<FaultDevice> {
    let device = Arc::new(FaultDevice::new(Arc::new(MemDevice::new(32768)), 7));
    let o = MkfsOptions { domains: Some(domains), placement: Placement::Spread, ..MkfsOptions::default() };
    mkfs::format(&[device.clone() as Arc<dyn Device>], &o).unwrap();
    device
}

/// Nothing happens by itself.
fn mount(device: &Arc<FaultDevice>) -> Volume {
    let commit_interval = Duration::from_secs(3600);
    let options = MountOptions { background: false, serial: true, commit_interval, ..MountOptions::default() };
    Volume::mount(vec![device.clone() as Arc<dyn Device>], options).unwrap()
}

fn open(v: &Volume, path: &str) -> OpenFile {
    let how = OpenHow { read: true, write: true, create: true, mode: 0o644, ..OpenHow::default() };
    v.open_path(path.as_bytes(), how, &Cred::root()).unwrap()
}

/// A file of 32 pages, none of which is in memory.
fn cold_file() -> (Arc<FaultDevice>, Volume, OpenFile) {
    let device = formatted(1);
    let v = mount(&device);
    v.write(&open(&v, "f"), 0, &[1; 32 * PAGE]).unwrap();
    v.unmount().unwrap();
    let v = mount(&device);
    let f = open(&v, "f");
    (device, v, f)
}

/// Free blocks, and sectors of the file, once all is durable.
fn kept(v: &Volume, f: &OpenFile) -> (u64, u64) {
    v.sync().unwrap();
    (v.statfs().free, v.getattr(f.ino()).unwrap().sectors)
}

#[test]
fn a_change_that_cannot_read_its_page_keeps_no_blocks() {
    let (device, v, f) = cold_file();
    let before = kept(&v, &f);
    device.add(Rule::new(Op::Read, Effect::Fail(5)));
    let size = |size| SetAttr { size: Some(size), ..SetAttr::default() };
    for _ in 0..100 {
        v.write(&f, 10, b"x").unwrap_err();
        v.write(&f, 9 * PAGE as u64 - 1, &[3; PAGE + 2]).unwrap_err();
        v.fallocate(&f, FallocMode::PunchHole, 10, 3 * PAGE as u64).unwrap_err();
        v.fallocate(&f, FallocMode::ZeroRange { keep_size: true }, 10, 3 * PAGE as u64).unwrap_err();
        v.setattr(f.ino(), &size(5 * PAGE as u64 + 7)).unwrap_err();
    }
    assert_eq!(before, kept(&v, &f));
    device.clear();
    // and what follows has what it needs
    v.write(&f, 10, b"x").unwrap();
    assert_eq!(before.1, kept(&v, &f).1);
}

/// The second cut of a range fails after blocks for the first were reserved.
#[test]
fn a_range_of_which_one_end_cannot_be_read_keeps_no_blocks() {
    let (device, v, f) = cold_file();
    v.read(&f, 0, &mut [0; 10]).unwrap();
    let before = kept(&v, &f);
    device.add(Rule::new(Op::Read, Effect::Fail(5)));
    for _ in 0..100 {
        let to = 9 * PAGE as u64;
        v.fallocate(&f, FallocMode::PunchHole, 10, to).unwrap_err();
        v.fallocate(&f, FallocMode::ZeroRange { keep_size: true }, 10, to).unwrap_err();
    }
    assert_eq!(before, kept(&v, &f));
}

/// Two directories of two domains.
fn two_directories(v: &Volume) -> [String; 2] {
    let domain = |path: &str| v.domain_of(v.resolve(path.as_bytes(), true, &Cred::root()).unwrap().ino).unwrap();
    let mut made = Vec::<String>::new();
    for i in 0.. {
        let path = format!("d{i}");
        v.mkdir_path(path.as_bytes(), 0o755, &Cred::root()).unwrap();
        if made.is_empty() {
            made.push(path);
        } else if domain(&path) != domain(&made[0]) {
            made.push(path);
            break;
        }
    }
    made.try_into().unwrap()
}

/// A file loses a name to one of another domain, and its other name within the same transaction.
#[test]
fn an_inode_ends_that_lost_a_name_to_another_domain() {
    let device = formatted(2);
    let v = mount(&device);
    let me = Cred::root();
    let [a, b] = two_directories(&v);
    v.sync().unwrap();
    let before = v.statfs();
    let p = |d: &str, n: &str| format!("{d}/{n}").into_bytes();
    for _ in 0..5 {
        v.write(&open(&v, &format!("{a}/x")), 0, &[1; 10 * PAGE]).unwrap();
        v.link_path(&p(&a, "x"), &p(&a, "x2"), &me).unwrap();
        drop(open(&v, &format!("{b}/y")));
        v.sync().unwrap();
        v.rename_path(&p(&b, "y"), &p(&a, "x"), RenameMode::Replace, &me).unwrap();
        v.unlink_path(&p(&a, "x2"), &me).unwrap();
        v.unlink_path(&p(&a, "x"), &me).unwrap();
        for _ in 0..3 {
            v.sync().unwrap();
        }
    }
    let after = v.statfs();
    assert_eq!(before.inodes_free, after.inodes_free);
    // entries of a directory may take a block more
    assert!(before.free.abs_diff(after.free) < 4, "{} blocks", before.free.abs_diff(after.free));
}

/// A domain that has failed does not keep others from deleting what was replaced in them.
#[test]
fn removals_of_other_domains_go_on_where_one_has_failed() {
    let device = formatted(3);
    let v = mount(&device);
    let me = Cred::root();
    let root = v.domain_of(InodeNo::ROOT).unwrap();
    let [bad, good] = [0, 1, 2].map(DomainId).into_iter().filter(|d| *d != root).collect::<Vec<_>>()[..] else {
        panic!("three domains");
    };
    let mut n = 0;
    let mut file = |want: DomainId| loop {
        n += 1;
        let path = format!("f{n}");
        let f = open(&v, &path);
        if v.domain_of(f.ino()).unwrap() == want {
            v.write(&f, 0, &[1; 10 * PAGE]).unwrap();
            break path;
        }
    };
    let pairs = [(file(good), file(bad)), (file(root), file(good))];
    v.sync().unwrap();
    let free = || v.domains()[usize::from(good.0)].inodes_free;
    let before = free();
    for (newcomer, victim) in &pairs {
        v.rename_path(newcomer.as_bytes(), victim.as_bytes(), RenameMode::Replace, &me).unwrap();
    }
    v.commit_domain(root, false).unwrap();
    v.commit_domain(good, false).unwrap();
    device.add(Rule::new(Op::Write, Effect::Fail(5)));
    v.commit_domain(bad, false).unwrap_err();
    device.clear();
    let ino = v.resolve(pairs[1].1.as_bytes(), true, &me).unwrap().ino;
    for _ in 0..4 {
        // for which there is no room: everything is given back first
        let _ = v.find_room(ino, u64::MAX);
        v.commit_domain(root, false).unwrap();
        v.commit_domain(good, false).unwrap();
    }
    assert_eq!(free(), before + 1);
}
