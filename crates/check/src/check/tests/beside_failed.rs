//! Volumes that stopped, of which a repair of one domain was cut off before its journal was replayed: the next check judges what the two
//! sides of a rename over domains decide about each other as it would have without that repair.

use super::lost_header::{content, dir_in, mounted, try_mount, write};
use super::*;
use braidfs::{Cred, DomainId, FileKind, NewNode, RenameMode, Volume};

const FAILS: u16 = 1;
const ROOT: InodeNo = InodeNo::ROOT;

/// A new file of the domain that will fail, in the root, with its name as content.
fn write_there(v: &Volume, dir: InodeNo, name: &str) -> InodeNo {
    let new = NewNode { kind: FileKind::File, mode: 0o644, umask: 0, rdev: 0, target: b"" };
    let f = v.create(dir, name.as_bytes(), &new, &Cred::root()).unwrap().ino;
    v.write(&v.open(f).unwrap(), 0, name.as_bytes()).unwrap();
    assert_eq!(v.domain_of(f).unwrap().0, FAILS, "{name}");
    v.rename(dir, name.as_bytes(), ROOT, name.as_bytes(), RenameMode::Replace).unwrap();
    f
}

/// Stops the volume, and has the header of the domain say that a repair of it was cut off.
fn stopped(dev: &Arc<SparseDevice>, v: Volume) -> Arc<SparseDevice> {
    let then = dev.fork();
    v.crash();
    in_repair(&then);
    then
}

fn in_repair(dev: &Arc<SparseDevice>) {
    let mut m = volume::read(&[Arc::clone(dev) as Arc<dyn Device>]).unwrap();
    let (store, sb) = (Arc::clone(&m.store), m.sb);
    repair::mark_repair(&store, &sb, &mut m.domains[usize::from(FAILS)]).unwrap();
}

/// A mount that is refused, then a check, and then the names of `files`.
fn named_in_the_end(dev: &Arc<SparseDevice>, files: &[(InodeNo, &str)]) -> Vec<Option<InodeNo>> {
    assert!(try_mount(dev).is_err_and(|e| e.to_string().contains("run fsck.braidfs")));
    let r = run(dev, &REPAIR);
    assert_eq!(r.unfixed(), 0, "{:#?}", r.findings);
    assert!(r.findings.iter().all(|f| f.code != codes::REPLAY_FAILED), "{:#?}", r.findings);
    assert_eq!(run(dev, &FORCE).findings, vec![]);
    let v = mounted(dev);
    for (f, name) in files {
        assert_eq!(content(&v, *f), *name, "{:#?}", r.findings);
    }
    let named = files.iter().map(|(_, name)| v.lookup(ROOT, name.as_bytes()).map(|a| a.ino).ok()).collect();
    v.unmount().unwrap();
    named
}

#[test]
fn an_exchange_that_one_side_made_durable_is_completed() {
    let dev = fresh(64, 2);
    let v = mounted(&dev);
    let d = dir_in(&v, FAILS, "d");
    let (x, y) = (write(&v, "x"), write_there(&v, d, "y"));
    v.sync().unwrap();
    v.rename(ROOT, b"x", ROOT, b"y", RenameMode::Exchange).unwrap();
    v.commit_domain(DomainId(0), false).unwrap();
    let then = stopped(&dev, v);
    assert_eq!(named_in_the_end(&then, &[(x, "x"), (y, "y")]), [Some(y), Some(x)]);
}

/// The file that was replaced is of the domain that fails, and who took its name is not durable.
#[test]
fn a_replaced_file_of_the_failed_domain_has_its_name_again() {
    for new in [false, true] {
        let dev = fresh(64, 2);
        let v = mounted(&dev);
        let d = dir_in(&v, FAILS, "d");
        let old = write_there(&v, d, "old");
        let before = (!new).then(|| write(&v, "new"));
        v.sync().unwrap();
        let taker = before.unwrap_or_else(|| write(&v, "new"));
        v.rename(ROOT, b"new", ROOT, b"old", RenameMode::Replace).unwrap();
        v.commit_domain(DomainId(FAILS), false).unwrap();
        let then = stopped(&dev, v);
        let files = [(old, "old"), (taker, "new")];
        let files = &files[..if new { 1 } else { 2 }];
        let named = named_in_the_end(&then, files);
        let want: Vec<_> = files.iter().map(|f| Some(f.0)).collect();
        assert_eq!(named, want, "new: {new}");
    }
}

/// The file that was replaced is of a domain that works, who took its name of the one that fails: synced, or not durable.
#[test]
fn a_replaced_file_beside_the_failed_domain_is_judged_by_what_was_synced_there() {
    for synced in [false, true] {
        let dev = fresh(64, 2);
        let v = mounted(&dev);
        let d = dir_in(&v, FAILS, "d");
        let (old, taker) = (write(&v, "old"), write_there(&v, d, "new"));
        v.sync().unwrap();
        v.rename(ROOT, b"new", ROOT, b"old", RenameMode::Replace).unwrap();
        match synced {
            true => v.fsync(taker, false).unwrap(),
            false => v.commit_domain(DomainId(0), false).unwrap(),
        }
        let then = stopped(&dev, v);
        if synced {
            assert_eq!(run(&then, &REPAIR).unfixed(), 0);
            assert_eq!(run(&then, &FORCE).findings, vec![]);
            let v = mounted(&then);
            let named = |name: &[u8]| v.lookup(ROOT, name).map(|a| a.ino).ok();
            assert_eq!((named(b"old"), named(b"new")), (Some(taker), None));
            continue;
        }
        assert_eq!(named_in_the_end(&then, &[(old, "old"), (taker, "new")]), [Some(old), Some(taker)]);
    }
}

/// A repair that was cut off later: all journals were replayed by then, and the other domains work.
#[test]
fn the_others_work_beside_a_failed_domain() {
    let dev = fresh(64, 2);
    let v = mounted(&dev);
    let d = dir_in(&v, FAILS, "d");
    let (here, _) = (write(&v, "here"), write_there(&v, d, "there"));
    v.unmount().unwrap();
    in_repair(&dev);
    let v = mounted(&dev);
    let failed: Vec<bool> = v.domains().iter().map(|d| d.failed.is_some()).collect();
    assert_eq!(failed, [false, true]);
    v.write(&v.open(here).unwrap(), 0, b"HERE").unwrap();
    v.fsync(here, false).unwrap();
    drop(v.unmount());
    assert_eq!(run(&dev, &REPAIR).unfixed(), 0);
    let v = mounted(&dev);
    assert_eq!(content(&v, here), "HERE");
    v.unmount().unwrap();
}
