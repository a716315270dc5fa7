//! Entries that name what cannot hang there, as a damaged volume has them, or one after a crash: nobody waits for himself.

use super::*;
use crate::braid::entry::{By, Edit};
use crate::cell::Body;
use crate::names::asker::Asker;
use crate::volume::crowd::at_once;
use crate::volume::operation::Op;
use crate::{Cred, Error, MkfsOptions, MountOptions, OpenFile, Volume};
use braidfs_device::{Device, MemDevice};
use std::sync::mpsc;
use std::time::Duration;

fn volume() -> Volume {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(16384));
    let o = MkfsOptions { domains: Some(2), ..MkfsOptions::default() };
    crate::mkfs::format(std::slice::from_ref(&device), &o).unwrap();
    Volume::mount(vec![device], MountOptions { background: false, ..MountOptions::default() }).unwrap()
}

fn mkdir(v: &Volume, dir: InodeNo, name: &[u8]) -> Arc<Cell> {
    let new = NewNode { kind: FileKind::Dir, mode: 0o755, umask: 0, rdev: 0, target: b"" };
    v.mounted().create(dir, name, &new, &Cred::root()).unwrap().0
}

fn make(v: &Volume, dir: InodeNo, name: &[u8]) -> Result<Attr> {
    v.create(dir, name, &NewNode { kind: FileKind::File, mode: 0o644, umask: 0, rdev: 0, target: b"" }, &Cred::root())
}

/// Puts an entry that no link of `child` stands for.
fn plant(v: &Volume, dir: &Arc<Cell>, name: &[u8], child: &Cell) {
    let i = v.mounted();
    let mut op = Op::new(i);
    op.begin(&[dir.domain], 4, true).unwrap();
    let mut st = dir.state.write();
    op.touch(dir, &mut st).unwrap();
    i.edit_entry(By::Operation(&mut op), dir, &mut st, name, Edit::Add(child)).unwrap();
    i.forget_name(dir, name);
}

fn has(v: &Volume, dir: InodeNo, name: &[u8]) -> bool {
    let mut found = false;
    v.readdir(dir, 0, &mut |e| {
        found |= e.name == name;
        true
    })
    .unwrap();
    found
}

/// Runs it on a thread of its own, which may not wait for ever.
fn within<T: Send + 'static>(v: &Arc<Volume>, f: impl FnOnce(&Volume) -> T + Send + 'static) -> T {
    let (tell, told) = mpsc::channel();
    let v = v.clone();
    std::thread::spawn(move || tell.send(f(&v)));
    told.recv_timeout(Duration::from_secs(20)).expect("it panics, or waits for itself")
}

#[test]
fn an_entry_that_names_its_own_directory_is_damage() {
    for ask_first in [false, true] {
        let v = Arc::new(volume());
        let d = mkdir(&v, InodeNo::ROOT, b"d");
        let (dir, mode) = (d.ino, RenameMode::Replace);
        plant(&v, &d, b"me", &d);
        if ask_first {
            within(&v, move |v| v.lookup(dir, b"me").unwrap_err());
        }
        within(&v, move |v| v.rename(dir, b"me", dir, b"you", mode).unwrap_err());
        within(&v, move |v| v.rename(dir, b"me", InodeNo::ROOT, b"me", mode).unwrap_err());
        within(&v, move |v| v.rmdir(dir, b"me").unwrap_err());
        within(&v, move |v| v.unlink(dir, b"me").unwrap_err());
        within(&v, move |v| v.readdir(dir, 0, &mut |_| true).unwrap());
        assert!(v.getattr(dir).is_ok(), "the directory itself is there");
    }
}

#[test]
fn after_a_crash_an_entry_that_names_its_own_directory_is_no_more_than_stale() {
    let v = Arc::new(volume());
    let d = mkdir(&v, InodeNo::ROOT, b"d");
    let dir = d.ino;
    v.mounted().maybe_stale.store(true, Ordering::Relaxed);
    for name in [b"a", b"b", b"c", b"e"] {
        plant(&v, &d, name, &d);
    }
    let root = mkdir(&v, InodeNo::ROOT, b"other");
    plant(&v, &root, b"root", &v.mounted().cell(InodeNo::ROOT).unwrap());
    assert!(matches!(within(&v, move |v| v.rmdir(dir, b"a")), Err(Error::NotFound)));
    within(&v, move |v| make(v, dir, b"b").unwrap());
    assert!(v.lookup(dir, b"b").is_ok(), "a new file has taken the name");
    within(&v, move |v| v.rename(dir, b"b", dir, b"c", RenameMode::Replace).unwrap());
    within(&v, move |v| {
        v.rmdir(InodeNo::ROOT, b"d").map_or_else(|e| assert!(matches!(e, Error::NotEmpty)), |()| panic!())
    });
    // the GC looks at what is committed, and drops what is left
    v.sync().unwrap();
    assert_eq!(within(&v, |v| v.collect_stale().unwrap().mended), 3);
    assert!(!has(&v, dir, b"a") && !has(&v, dir, b"e") && has(&v, dir, b"c"));
    assert!(!v.mounted().maybe_stale.load(Ordering::Relaxed));
}

/// The directory in which an emptied one hangs is locked with it.
#[test]
fn a_directory_with_a_stale_entry_that_names_the_one_above_it_is_empty() {
    let v = Arc::new(volume());
    let above = mkdir(&v, InodeNo::ROOT, b"above");
    let ino = above.ino;
    let one = mkdir(&v, ino, b"one");
    let two = mkdir(&v, ino, b"two");
    let new = mkdir(&v, ino, b"new");
    v.mounted().maybe_stale.store(true, Ordering::Relaxed);
    for d in [&one, &two] {
        plant(&v, d, b"up", &above);
        plant(&v, d, b"new", &new);
    }
    within(&v, move |v| v.rmdir(ino, b"one").unwrap());
    within(&v, move |v| v.rename(ino, b"new", ino, b"two", RenameMode::Replace).unwrap());
    assert_eq!(v.lookup(ino, b"two").unwrap().ino, new.ino);
}

/// A stale entry of a directory names one above it, which another thread has locked and who waits for the directory next.
#[test]
fn who_has_a_directory_locked_waits_for_nothing_that_a_stale_entry_names() {
    let v = Arc::new(volume());
    let above = mkdir(&v, InodeNo::ROOT, b"above");
    let d = mkdir(&v, above.ino, b"d");
    let from = make(&v, InodeNo::ROOT, b"f").unwrap().ino;
    v.mounted().maybe_stale.store(true, Ordering::Relaxed);
    plant(&v, &d, b"up", &above);
    let (tell, told) = mpsc::channel();
    let locked = above.state.write();
    let (w, dir) = (v.clone(), d.ino);
    let other = std::thread::spawn(move || {
        let r = w.link(from, dir, b"up");
        tell.send(()).unwrap();
        r
    });
    assert!(told.recv_timeout(Duration::from_millis(300)).is_err(), "it needs to know");
    // parents before children: this waits for the directory
    let free = (0..200).any(|_| {
        std::thread::sleep(Duration::from_millis(10));
        d.state.try_write().is_some()
    });
    drop(locked);
    assert!(other.join().unwrap().is_ok());
    assert!(free, "the other thread held the directory and waited");
}

/// As above, where a directory ends, by a removal or a rename over it: whether it is empty takes a look at what it names.
#[test]
fn who_ends_a_directory_waits_for_nothing_that_its_stale_entries_name() {
    let v = Arc::new(volume());
    let above = mkdir(&v, InodeNo::ROOT, b"above");
    let other = mkdir(&v, InodeNo::ROOT, b"other");
    let ino = above.ino;
    let (one, two) = (mkdir(&v, ino, b"one"), mkdir(&v, ino, b"two"));
    mkdir(&v, ino, b"new");
    v.mounted().maybe_stale.store(true, Ordering::Relaxed);
    plant(&v, &one, b"x", &other);
    plant(&v, &two, b"x", &other);
    let remove = |v: &Volume, dir| v.rmdir(dir, b"one");
    let replace = |v: &Volume, dir| v.rename(dir, b"new", dir, b"two", RenameMode::Replace);
    let ends: [fn(&Volume, InodeNo) -> Result<()>; 2] = [remove, replace];
    for end in ends {
        let (tell, told) = mpsc::channel();
        let locked = other.state.write();
        let w = v.clone();
        let thread = std::thread::spawn(move || tell.send(end(&w, ino)));
        assert!(told.recv_timeout(Duration::from_millis(300)).is_err(), "it needs to know");
        let free = (0..200).any(|_| {
            std::thread::sleep(Duration::from_millis(10));
            above.state.try_write().is_some()
        });
        drop(locked);
        let ended = told.recv_timeout(Duration::from_secs(20)).expect("it goes on");
        thread.join().unwrap().unwrap();
        assert!(ended.is_ok() && free, "{ended:?}; {free}: what is let go while it waits");
    }
}

/// Many that free as much as one operation may, at the same time, admitted when the journal was as full as it may be then.
#[test]
fn the_journal_has_room_for_what_was_admitted() {
    const FILES: usize = 20;
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(32768));
    let o = MkfsOptions { domains: Some(1), journal_bytes: Some(128 << 10), ..MkfsOptions::default() };
    crate::mkfs::format(std::slice::from_ref(&device), &o).unwrap();
    let v =
        Arc::new(Volume::mount(vec![device], MountOptions { background: false, ..MountOptions::default() }).unwrap());
    let d = v.mounted().domains[0].clone();
    let pieces = d.pieces_max() as u64;
    let files: Vec<_> =
        (0..FILES).map(|n| v.open(make(&v, InodeNo::ROOT, format!("f{n}").as_bytes()).unwrap().ino).unwrap()).collect();
    // every other page, and each beside one of another file, so that no two can be freed as one
    for page in 0..pieces {
        for f in &files {
            v.write(f, 2 * page * 4096, &[1; 4096]).unwrap();
            v.mounted().dom(f.cell.domain).flush_cell(&f.cell).unwrap();
        }
    }
    v.sync().unwrap();
    let extents = |f: &OpenFile| match &f.cell.state.read().body {
        Body::File(b) => b.map.extent_count() as u64,
        _ => 0,
    };
    assert!(files.iter().all(|f| extents(f) == pieces), "{} of {pieces}", extents(&files[0]));
    at_once(&v, &files, |v, ino| v.setattr(ino, &SetAttr { size: Some(0), ..SetAttr::default() }).map(drop));
    assert!(files.iter().all(|f| extents(f) == 0));
}

/// The directory that gets the number of one that was removed.
fn number_given_again(v: &Volume, old: InodeNo) -> Arc<Cell> {
    v.sync().unwrap();
    v.mounted().domains.iter().for_each(|d| d.checkpoint().unwrap());
    let again = (0..5000).map(|n| mkdir(v, InodeNo::ROOT, format!("again{n}").as_bytes())).find(|d| d.ino == old);
    again.expect("the number is given again")
}

/// The directory of a path is removed, and another one gets its number, before the operation comes to it.
#[test]
fn a_path_leads_to_the_directory_that_had_the_name() {
    let v = volume();
    let (i, root) = (v.mounted(), InodeNo::ROOT);
    let file = make(&v, root, b"f").unwrap().ino;
    let old = mkdir(&v, root, b"d").ino;
    let (dir, name) = v.parent_cell(b"d/x", &Cred::root()).unwrap();
    assert_eq!((dir.ino, name), (old, b"x".as_slice()));
    v.rmdir(root, b"d").unwrap();
    let again = number_given_again(&v, old);
    assert!(again.generation != dir.generation);
    // where only the number is known, it is the other directory that is changed
    make(&v, old, b"y").unwrap();
    let gone = |r: Result<()>| assert!(matches!(r, Err(Error::NotFound)), "{r:?}");
    let new = NewNode { kind: FileKind::File, mode: 0o644, umask: 0, rdev: 0, target: b"" };
    gone(i.create_in(&dir, name, &new, &Cred::root()).map(|_| ()));
    gone(i.link_in(&i.cell(file).unwrap(), &dir, name, Asker::ANY).map(|_| ()));
    gone(i.remove_in(&dir, b"y", false));
    let rename = |from: (Arc<Cell>, &[u8]), to: Arc<Cell>| {
        i.rename_seen(from, &to, || to.clone(), (name, RenameMode::Replace), (&Cred::root(), Asker::ANY))
    };
    gone(rename((i.cell(root).unwrap(), b"f"), dir.clone()));
    gone(rename((dir, b"y"), i.cell(root).unwrap()));
    assert!(has(&v, old, b"y") && !has(&v, old, b"x") && has(&v, root, b"f"));
}

/// What is above a directory that was removed may be gone, and another one have its number.
#[test]
fn a_removed_directory_has_nothing_above_it() {
    let v = volume();
    let root = InodeNo::ROOT;
    let above = mkdir(&v, root, b"above").ino;
    let dir = mkdir(&v, above, b"dir").ino;
    let open = v.open(dir).unwrap();
    assert_eq!(v.lookup(dir, b"..").unwrap().ino, above);
    v.rmdir(above, b"dir").unwrap();
    v.rmdir(root, b"above").unwrap();
    number_given_again(&v, above);
    let found = v.lookup(dir, b"..");
    assert!(matches!(found, Err(Error::NotFound)), "{found:?}");
    // as long as it is open
    assert_eq!(v.lookup(dir, b".").unwrap().ino, dir);
    drop(open);
}

/// While entries may be stale, only those are noted whose inodes were seen to hang there.
#[test]
fn after_a_crash_names_are_noted_that_are_no_stale_ones() {
    let v = volume();
    let d = mkdir(&v, InodeNo::ROOT, b"d");
    v.mounted().maybe_stale.store(true, Ordering::Relaxed);
    let f = make(&v, d.ino, b"f").unwrap().ino;
    let other = mkdir(&v, InodeNo::ROOT, b"other");
    plant(&v, &d, b"stale", &other);
    let noted = |name: &[u8]| v.mounted().dentries.get(&Key::of(d.ino, d.generation, name)).map(|t| t.node);
    assert_eq!(noted(b"f"), None, "nobody has looked");
    for _ in 0..2 {
        assert_eq!(v.lookup(d.ino, b"f").unwrap().ino, f);
        assert!(matches!(v.lookup(d.ino, b"stale"), Err(Error::NotFound)));
        assert_eq!((noted(b"f"), noted(b"stale")), (Some(f), None));
    }
    v.unlink(d.ino, b"f").unwrap();
    assert_eq!(noted(b"f"), None);
    assert!(matches!(v.resolve(b"d/f", true, &Cred::root()), Err(Error::NotFound)));
}

/// Locks the two cells in this order, and makes an entry of the first directory for the second.
fn lock_and_plant(v: &Volume, dir: &Arc<Cell>, child: &Arc<Cell>, child_first: bool) {
    let i = v.mounted();
    let mut op = Op::new(i);
    op.begin(&[dir.domain], 4, true).unwrap();
    let above = child_first.then(|| child.state.write());
    let mut st = dir.state.write();
    let _child = above.unwrap_or_else(|| child.state.write());
    op.touch(dir, &mut st).unwrap();
    i.edit_entry(By::Operation(&mut op), dir, &mut st, b"x", Edit::Add(child)).unwrap();
}

#[test]
fn parents_are_locked_before_children() {
    let v = volume();
    let (a, b) = (mkdir(&v, InodeNo::ROOT, b"a"), mkdir(&v, InodeNo::ROOT, b"b"));
    lock_and_plant(&v, &a, &b, false);
    let wrong = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| lock_and_plant(&v, &b, &a, true)));
    let said = wrong.err().and_then(|e| e.downcast::<String>().ok());
    let right = if braidfs_sync::CHECKED {
        said.is_some_and(|s| s.contains("parents before children"))
    } else {
        said.is_none()
    };
    assert!(right);
}

/// A file and a directory of different domains.
fn apart(v: &Volume) -> (Arc<Cell>, Arc<Cell>) {
    let dirs: Vec<_> = (0..64).map(|i| mkdir(v, InodeNo::ROOT, format!("d{i}").as_bytes())).collect();
    let d = dirs[0].clone();
    let files = (0..64).map(|i| make(v, dirs[i].ino, b"f").unwrap().ino);
    let f = files.map(|ino| v.mounted().cell(ino).unwrap()).find(|f| f.domain != d.domain).unwrap();
    (d, f)
}

fn failed(v: &Volume) -> Vec<DomainId> {
    v.mounted().domains.iter().filter(|d| d.failed().is_some()).map(|d| d.id).collect()
}

/// The newest write of a bucket is lost: the domain whose inode it names has done nothing.
#[test]
fn an_entry_that_is_too_old_fails_its_directorys_domain() {
    let v = volume();
    let (d, f) = apart(&v);
    let above = f.state.read().links[0].parent;
    v.sync().unwrap();
    v.unlink(above, b"f").unwrap();
    v.sync().unwrap();
    plant(&v, &d, b"old", &f);
    assert!(matches!(v.lookup(d.ino, b"old"), Err(Error::Corrupt(_))));
    assert_eq!(failed(&v), [d.domain]);
}

/// The tables of a domain are those of before the inode was made.
#[test]
fn an_inode_that_its_domain_does_not_know_fails_that_domain() {
    let v = volume();
    let (d, f) = apart(&v);
    let later = InodeRef { ino: f.ino, generation: f.generation + 1 };
    let st = State::fresh(FileKind::File, 0, 0, 0, Timestamp::default());
    plant(&v, &d, b"new", &Cell::new(later, f.domain, FileKind::File, st));
    assert!(matches!(v.lookup(d.ino, b"new"), Err(Error::Corrupt(_))));
    assert_eq!(failed(&v), [f.domain]);
}
