//! Volumes that stopped, of which one domain's header is lost since: what the others have in their journals stays.

use super::*;
use braidfs::{Cred, FileKind, MountOptions, NewNode, OpenHow, RenameMode, Volume};
use std::time::Duration;

const LOST: u16 = 1;
const NEW_FILE: NewNode<'_> = NewNode { kind: FileKind::File, mode: 0o644, umask: 0, rdev: 0, target: b"" };

pub fn try_mount(dev: &Arc<SparseDevice>) -> braidfs::Result<Volume> {
    let options = MountOptions { background: false, commit_interval: Duration::from_secs(3600), ..Default::default() };
    Volume::mount(vec![Arc::clone(dev) as Arc<dyn Device>], options)
}

pub fn mounted(dev: &Arc<SparseDevice>) -> Volume {
    try_mount(dev).unwrap()
}

/// A directory of `domain` below the root.
pub fn dir_in(v: &Volume, domain: u16, prefix: &str) -> InodeNo {
    let make = |i| v.mkdir_path(format!("{prefix}{i}").as_bytes(), 0o755, &Cred::root()).unwrap().ino;
    (0..64).map(make).find(|d| v.domain_of(*d).unwrap().0 == domain).expect("a directory in each domain")
}

/// A new file in the root's domain, with its name as content.
pub fn write(v: &Volume, name: &str) -> InodeNo {
    let how = OpenHow { read: true, write: true, create: true, mode: 0o644, ..OpenHow::default() };
    let f = v.open_path(name.as_bytes(), how, &Cred::root()).unwrap();
    v.write(&f, 0, name.as_bytes()).unwrap();
    let ino = v.lookup(InodeNo::ROOT, name.as_bytes()).unwrap().ino;
    assert_eq!(v.domain_of(ino).unwrap().0, 0, "{name}");
    ino
}

/// Overwrites both copies of the header of `domain`.
pub fn lose_header(dev: &Arc<SparseDevice>, domain: u16) {
    let m = volume::read(&[Arc::clone(dev) as Arc<dyn Device>]).unwrap();
    let at = crate::rules::volume::header_place(&m.sb, domain);
    (0..2).for_each(|i| dev.write(at + i, &[0; BLOCK_BYTES]).unwrap());
}

/// Stops the volume, loses the header, and repairs it; what it was then, mounted.
fn repaired(dev: &Arc<SparseDevice>, v: Volume) -> (FsckReport, Volume) {
    let dev_then = dev.fork();
    v.crash();
    lose_header(&dev_then, LOST);
    let look = run(&dev_then, &FORCE);
    let preened = preen::preened(&dev_then);
    assert!(preened.by_hand, "{:#?}", preened.findings);
    let r = run(&dev_then, &REPAIR);
    assert_eq!(r.unfixed(), 0, "{:#?}", r.findings);
    let codes = |r: &FsckReport| r.findings.iter().map(|f| f.code).collect::<Vec<_>>();
    assert_eq!(codes(&look), codes(&r));
    assert!(codes(&r).contains(&codes::DOMAIN_LOST), "{:#?}", r.findings);
    assert!(!codes(&r).contains(&codes::REPLAY_FAILED), "{:#?}", r.findings);
    assert_eq!(run(&dev_then, &FORCE).findings, vec![]);
    (r, mounted(&dev_then))
}

pub fn content(v: &Volume, ino: InodeNo) -> String {
    let mut b = vec![0; 100];
    let n = v.read(&v.open(ino).unwrap(), 0, &mut b).unwrap();
    String::from_utf8_lossy(&b[..n]).into_owned()
}

#[test]
fn what_other_domains_synced_stays() {
    let dev = fresh(64, 2);
    let v = mounted(&dev);
    dir_in(&v, LOST, "d");
    v.sync().unwrap();
    let names: Vec<String> = (0..5).map(|i| format!("file-{i}")).collect();
    for name in &names {
        v.fsync(write(&v, name), false).unwrap();
    }
    let (r, v) = repaired(&dev, v);
    for name in &names {
        let ino =
            v.lookup(InodeNo::ROOT, name.as_bytes()).unwrap_or_else(|e| panic!("{name}: {e}, {:#?}", r.findings)).ino;
        assert_eq!(content(&v, ino), *name);
    }
    v.unmount().unwrap();
}

/// Where the directory of a synced file was in the journal that is given up, the file goes to `/lost+found`.
#[test]
fn a_synced_file_whose_directory_is_lost_stays() {
    let dev = fresh(64, 2);
    let v = mounted(&dev);
    v.sync().unwrap();
    let d = dir_in(&v, LOST, "d");
    let f = write(&v, "file");
    v.rename(InodeNo::ROOT, b"file", d, b"moved", RenameMode::Replace).unwrap();
    v.fsync(f, false).unwrap();
    let (r, v) = repaired(&dev, v);
    assert_eq!(content(&v, f), "file", "{:#?}", r.findings);
    assert_eq!(v.getattr(f).unwrap().nlink, 1);
    v.unmount().unwrap();
}

/// A volume with a directory of the domain that will be lost, in which there is a file `c` of it; both checkpointed.
fn with_file_of_lost(dev: &Arc<SparseDevice>) -> (Volume, InodeNo, InodeNo) {
    let v = mounted(dev);
    let d = dir_in(&v, LOST, "d");
    let c = v.create(d, b"c", &NEW_FILE, &Cred::root()).unwrap().ino;
    v.write(&v.open(c).unwrap(), 0, b"c").unwrap();
    assert_eq!(v.domain_of(c).unwrap().0, LOST);
    v.unmount().unwrap();
    (mounted(dev), d, c)
}

#[test]
fn a_name_beside_another_one_comes_back_where_who_took_it_is_lost() {
    let dev = fresh(64, 2);
    let (v, d, c) = with_file_of_lost(&dev);
    let f = write(&v, "f");
    v.link(f, InodeNo::ROOT, b"other").unwrap();
    v.sync().unwrap();
    v.rename(d, b"c", InodeNo::ROOT, b"f", RenameMode::Replace).unwrap();
    v.sync().unwrap();
    let (r, v) = repaired(&dev, v);
    let named =
        |dir, name: &[u8]| v.lookup(dir, name).map(|a| a.ino).unwrap_or_else(|e| panic!("{e}, {:#?}", r.findings));
    assert_eq!((named(InodeNo::ROOT, b"f"), named(InodeNo::ROOT, b"other"), named(d, b"c")), (f, f, c));
    v.unmount().unwrap();
}
