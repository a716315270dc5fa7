//! Volumes that stopped, of which a repair of one domain was cut off: the next mount recovers the others beside it, and a check ends
//! the repair. What the two sides of a rename over domains decide about each other is the same then as without that mount.

use super::lost_header::{content, dir_in, mounted, try_mount, write};
use super::*;
use braidfs::{Cred, DomainId, FileKind, NewNode, RenameMode, SetAttr, Volume};

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
    let mut m = volume::read(&[Arc::clone(&then) as Arc<dyn Device>]).unwrap();
    let (store, sb) = (Arc::clone(&m.store), m.sb);
    repair::mark_repair(&store, &sb, &mut m.domains[usize::from(FAILS)]).unwrap();
    then
}

/// What users do in a mount beside the domain that has failed, as far as they can: nothing of it takes a name away.
fn work(v: &Volume, files: &[InodeNo]) {
    for round in 0..4 {
        for f in files {
            drop(v.setattr(*f, &SetAttr { mode: Some(0o640 + round), ..SetAttr::default() }));
        }
        let new = NewNode { kind: FileKind::File, mode: 0o644, umask: 0, rdev: 0, target: b"" };
        (0..8).for_each(|i| drop(v.create(ROOT, format!("new {round} {i}").as_bytes(), &new, &Cred::root())));
        drop(v.sync());
    }
}

/// So many mounts beside the domain that has failed, with work, then a check, and then the names of `files`.
fn named_in_the_end(then: &Arc<SparseDevice>, files: &[(InodeNo, &str)], mounts: u32) -> Vec<Option<InodeNo>> {
    let dev = then.fork();
    let mut refused = 0;
    for n in 0..mounts {
        let Ok(v) = try_mount(&dev) else {
            refused += 1;
            continue;
        };
        assert!(v.domains()[usize::from(FAILS)].failed.is_some());
        work(&v, &files.iter().map(|f| f.0).collect::<Vec<_>>());
        if n % 2 == 0 { v.crash() } else { drop(v.unmount()) }
    }
    let r = run(&dev, &REPAIR);
    assert_eq!(r.unfixed(), 0, "{:#?}", r.findings);
    assert!(r.findings.iter().all(|f| f.code != codes::REPLAY_FAILED), "{:#?}", r.findings);
    assert_eq!(run(&dev, &FORCE).findings, vec![]);
    let v = mounted(&dev);
    for (f, name) in files {
        assert_eq!(content(&v, *f), *name, "{:#?}", r.findings);
    }
    let named = files.iter().map(|(_, name)| v.lookup(ROOT, name.as_bytes()).map(|a| a.ino).ok()).collect();
    v.unmount().unwrap();
    assert_eq!(refused, 0, "of {mounts} mounts, and names {named:?}");
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
    for mounts in 0..3 {
        let named = named_in_the_end(&then, &[(x, "x"), (y, "y")], mounts);
        assert_eq!(named, [Some(y), Some(x)], "{mounts} mounts");
    }
}

/// The file that was replaced is of the domain that fails, and who took its name is not durable.
#[test]
fn a_replaced_file_of_the_failed_domain_has_its_name_again() {
    for (new, mounts) in [(false, 0), (false, 1), (false, 2), (true, 0), (true, 1), (true, 2)] {
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
        let named = named_in_the_end(&then, files, mounts);
        let want: Vec<_> = files.iter().map(|f| Some(f.0)).collect();
        assert_eq!(named, want, "new: {new}, {mounts} mounts");
    }
}

/// The file that was replaced is of a domain that works, who took its name of the one that fails: synced, or not durable.
#[test]
fn a_replaced_file_beside_the_failed_domain_is_judged_by_what_was_synced_there() {
    for (synced, mounts) in [(false, 0), (false, 1), (false, 2), (true, 0), (true, 1), (true, 2)] {
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
            let dev = then.fork();
            (0..mounts).for_each(|_| work(&try_mount(&dev).unwrap(), &[taker]));
            assert_eq!(run(&dev, &REPAIR).unfixed(), 0);
            assert_eq!(run(&dev, &FORCE).findings, vec![]);
            let v = mounted(&dev);
            let named = |name: &[u8]| v.lookup(ROOT, name).map(|a| a.ino).ok();
            assert_eq!((named(b"old"), named(b"new")), (Some(taker), None), "{mounts} mounts");
            continue;
        }
        let named = named_in_the_end(&then, &[(old, "old"), (taker, "new")], mounts);
        assert_eq!(named, [Some(old), Some(taker)], "{mounts} mounts");
    }
}

/// Where nothing is left to be judged, the other domains work.
#[test]
fn the_others_work_beside_a_failed_domain() {
    let dev = fresh(64, 2);
    let v = mounted(&dev);
    let d = dir_in(&v, FAILS, "d");
    let (here, _) = (write(&v, "here"), write_there(&v, d, "there"));
    v.sync().unwrap();
    let dev = stopped(&dev, v);
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
