//! Volumes that stopped, of which one domain's header is lost since: what the others have in their journals stays.

use super::*;
use braidfs::{Cred, FileKind, MountOptions, NewNode, OpenHow, RenameMode, Volume};
use braidfs_device::{Effect, FaultDevice, Op, Rule};
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

/// What an error told the log, in a thread.
#[derive(Clone, Default)]
struct Told(Arc<Mutex<Vec<String>>>);

impl tracing::field::Visit for Told {
    fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
        if field.name() == "message" {
            self.0.lock().push(format!("{value:?}"));
        }
    }
}

impl tracing::Subscriber for Told {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() == tracing::Level::ERROR
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn event(&self, event: &tracing::Event<'_>) {
        event.record(&mut self.clone());
    }
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

/// Where the repair ends before it has written the header again, the log has what the journal held; and so has a check
/// that only looks, in what it found.
#[test]
fn what_the_journal_of_a_lost_header_held_is_told_before_it_goes() {
    for domains in [1, 2] {
        let dev = fresh(64, domains);
        let v = mounted(&dev);
        let lost = domains - 1;
        let dir = if lost == 0 { InodeNo::ROOT } else { dir_in(&v, lost, "d") };
        v.sync().unwrap();
        let f = v.create(dir, b"f", &NEW_FILE, &Cred::root()).unwrap().ino;
        v.fsync(f, false).unwrap();
        assert_eq!(v.domain_of(f).unwrap().0, lost);
        let then = dev.fork();
        v.crash();
        lose_header(&then, lost);
        let is_told = |found: &[Finding]| found.iter().any(|x| (x.code, x.node) == (codes::CHANGES_LOST, Some(f.0)));
        let look = run(&then, &FORCE);
        assert!(is_told(&look.findings), "{:#?}", look.findings);
        let m = volume::read(&[Arc::clone(&then) as Arc<dyn Device>]).unwrap();
        let at = crate::rules::volume::header_place(&m.sb, lost);
        let faulty = Arc::new(FaultDevice::new(then.clone(), 7));
        faulty.add(Rule::new(Op::Write, Effect::Fail(5)).blocks(at..at + 2));
        let told = Told::default();
        let ended = tracing::subscriber::with_default(told.clone(), || {
            check(&[faulty.clone() as Arc<dyn Device>], &REPAIR, &JournalReplay, &|_, _, _| {})
        });
        assert!(ended.is_err() && faulty.fired() > 0, "{ended:?}");
        let told = told.0.lock().clone();
        let mine = |code: u32, node: &str| {
            told.iter().filter(|t| t.starts_with(&format!("E{code} domain {lost}{node}"))).count()
        };
        assert_eq!(
            (mine(codes::DOMAIN_LOST, ":"), mine(codes::CHANGES_LOST, &format!(" node {}:", f.0))),
            (1, 1),
            "{told:#?}"
        );
    }
}
