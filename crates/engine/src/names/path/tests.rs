//! Who may not change a name may not do so by being faster, or slower, than others who change it.

use super::*;
use crate::{MkfsOptions, MountOptions};
use braidfs_device::{Device, MemDevice};
use std::cell::RefCell;

/// Where an operation on paths is, and another one may come between.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The path was walked, but for its last part.
    Walked,
    /// Permissions were asked for, with nothing locked.
    Asked,
}

type Between = Box<dyn FnOnce()>;

thread_local! {
    static BETWEEN: RefCell<Option<(Place, Between)>> = const { RefCell::new(None) };
}

/// This thread is there: what was to come between does so, once.
pub fn reached(place: Place) {
    let due = BETWEEN.with_borrow_mut(|b| b.take_if(|(at, _)| *at == place));
    if let Some((_, between)) = due {
        between();
    }
}

const OURS: u32 = 1;
const THEIRS: u32 = 2;

fn user(uid: u32) -> Cred {
    Cred { uid, gid: uid, groups: Arc::new([]), privileged: false }
}

/// A sticky directory `t`, which several threads change or one, with something of ours and of somebody else's in it.
struct Scene {
    volume: Arc<Volume>,
    dir: InodeNo,
}

impl Scene {
    fn new(shared: bool, kind: FileKind) -> Self {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(8192));
        let o = MkfsOptions { domains: Some(1), ..MkfsOptions::default() };
        crate::mkfs::format(std::slice::from_ref(&device), &o).unwrap();
        let options = MountOptions { background: false, share_dirs: shared, ..MountOptions::default() };
        let volume = Arc::new(Volume::mount(vec![device], options).unwrap());
        let dir = volume.mkdir_path(b"t", 0o1777, &Cred::root()).unwrap().ino;
        let s = Self { volume, dir };
        s.make(FileKind::Dir, b"sub", OURS);
        s.make(kind, b"ours", OURS);
        s.make(kind, b"theirs", THEIRS);
        if shared {
            for i in 0..400 {
                s.make(FileKind::File, format!("f{i}").as_bytes(), OURS);
            }
            s.volume.sync().unwrap();
            // as where threads take turns
            let dir = s.volume.mounted().dir_cell(dir).unwrap();
            dir.wide.store(true, std::sync::atomic::Ordering::Relaxed);
            s.make(FileKind::File, b"first", OURS);
        }
        s
    }
    fn make(&self, kind: FileKind, name: &[u8], owner: u32) {
        let new = NewNode { kind, mode: 0o777, umask: 0, rdev: 0, target: b"" };
        self.volume.create(self.dir, name, &new, &user(owner)).unwrap();
    }
    fn owner(&self, name: &[u8]) -> Option<u32> {
        self.volume.lookup(self.dir, name).ok().map(|a| a.uid)
    }
    /// Does `work` as the user whose `ours` is; another one comes in between.
    fn with_between<R>(
        &self,
        place: Place,
        between: impl FnOnce(&Volume, InodeNo) + 'static,
        work: impl FnOnce(&Volume, &Cred) -> R,
    ) -> R {
        let (volume, dir) = (self.volume.clone(), self.dir);
        BETWEEN.set(Some((place, Box::new(move || between(&volume, dir)))));
        let done = work(&self.volume, &user(OURS));
        assert!(BETWEEN.take().is_none(), "nothing came in between");
        done
    }
}

fn takes_the_name(v: &Volume, dir: InodeNo) {
    v.rename(dir, b"theirs", dir, b"ours", RenameMode::Replace).unwrap();
}

fn takes_the_new_name(v: &Volume, dir: InodeNo) {
    v.rename(dir, b"theirs", dir, b"new", RenameMode::Replace).unwrap();
}

fn is_given_away(v: &Volume, dir: InodeNo) {
    let ino = v.lookup(dir, b"ours").unwrap().ino;
    v.setattr(ino, &SetAttr { uid: Some(THEIRS), ..SetAttr::default() }).unwrap();
}

fn is_closed(v: &Volume, dir: InodeNo) {
    v.setattr(dir, &SetAttr { mode: Some(0o755), ..SetAttr::default() }).unwrap();
}

#[test]
fn what_gets_the_name_meanwhile_is_not_removed() {
    for (shared, kind) in
        [(false, FileKind::File), (true, FileKind::File), (false, FileKind::Dir), (true, FileKind::Dir)]
    {
        let remove = |v: &Volume, cred: &Cred| match kind {
            FileKind::Dir => v.rmdir_path(b"t/ours", cred),
            _ => v.unlink_path(b"t/ours", cred),
        };
        let s = Scene::new(shared, kind);
        let done = s.with_between(Place::Walked, takes_the_name, remove);
        assert!(matches!(done, Err(Error::Perm)), "{shared} {kind:?}: {done:?}");
        assert_eq!(s.owner(b"ours"), Some(THEIRS));
        let s = Scene::new(shared, kind);
        let done = s.with_between(Place::Walked, is_given_away, remove);
        assert!(matches!(done, Err(Error::Perm)), "{shared} {kind:?}: {done:?}");
        assert_eq!(s.owner(b"ours"), Some(THEIRS));
        // who is left alone may
        assert!(remove(&s.volume, &user(THEIRS)).is_ok());
    }
    for (between, right) in [(is_given_away as fn(&Volume, InodeNo), Error::Perm), (is_closed, Error::Access)] {
        let s = Scene::new(false, FileKind::File);
        let done = s.with_between(Place::Asked, between, |v, cred| v.unlink_path(b"t/ours", cred));
        assert_eq!(format!("{done:?}"), format!("{:?}", Err::<(), _>(right)));
        assert!(s.owner(b"ours").is_some());
    }
}

#[test]
fn what_gets_a_name_meanwhile_is_neither_moved_nor_replaced() {
    let replace = |v: &Volume, cred: &Cred| v.rename_path(b"t/ours", b"t/new", RenameMode::Replace, cred);
    let out = |v: &Volume, cred: &Cred| v.rename_path(b"t/ours", b"t/sub/new", RenameMode::Replace, cred);
    let into = |v: &Volume, cred: &Cred| v.rename_path(b"t/sub/x", b"t/new", RenameMode::Replace, cred);
    let exchange = |v: &Volume, cred: &Cred| v.rename_path(b"t/sub/x", b"t/ours", RenameMode::Exchange, cred);
    type Between = fn(&Volume, InodeNo);
    type Work<'a> = &'a dyn Fn(&Volume, &Cred) -> Result<()>;
    let all: [(&str, Between, Work<'_>); 6] = [
        ("the old name", takes_the_name, &replace),
        ("the owner", is_given_away, &replace),
        ("the old name, to another directory", takes_the_name, &out),
        ("the new name", takes_the_new_name, &replace),
        ("the new name, from another directory", takes_the_new_name, &into),
        ("what it is exchanged for", takes_the_name, &exchange),
    ];
    for shared in [false, true] {
        for (what, between, work) in all {
            let s = Scene::new(shared, FileKind::File);
            let x = NewNode { kind: FileKind::File, mode: 0o644, umask: 0, rdev: 0, target: b"" };
            let sub = s.volume.lookup(s.dir, b"sub").unwrap().ino;
            s.volume.create(sub, b"x", &x, &user(OURS)).unwrap();
            let done = s.with_between(Place::Walked, between, work);
            assert!(matches!(done, Err(Error::Perm)), "{what} ({shared}): {done:?}");
        }
        let s = Scene::new(shared, FileKind::File);
        let done = s.with_between(Place::Asked, is_given_away, replace);
        assert!(matches!(done, Err(Error::Perm)), "{done:?}");
        let done = s.volume.rename_path(b"t/ours", b"t/new", RenameMode::Replace, &user(THEIRS));
        assert!(done.is_ok(), "{done:?}");
    }
}

/// A directory is moved, and gets another `..`, by who may write it alone: also as the partner of an exchange.
#[test]
fn a_directory_that_moves_is_written_by_who_moves_it() {
    let s = Scene::new(false, FileKind::File);
    let (v, root) = (&*s.volume, Cred::root());
    for (path, mode, owner) in [(b"t/sub/ours".as_slice(), 0o755, OURS), (b"t/closed!", 0o555, OURS)] {
        let ino = v.mkdir_path(path, mode, &root).unwrap().ino;
        v.setattr(ino, &SetAttr { uid: Some(owner), ..SetAttr::default() }).unwrap();
    }
    let [to, from] = [(b"t/sub/ours".as_slice(), b"t/closed!".as_slice()), (b"t/closed!", b"t/sub/ours")]
        .map(|(a, b)| v.rename_path(a, b, RenameMode::Exchange, &user(OURS)));
    assert!(matches!((&to, &from), (Err(Error::Access), Err(Error::Access))), "{to:?} {from:?}");
    v.rename_path(b"t/closed!", b"t/closed", RenameMode::Replace, &user(OURS)).unwrap();
}

#[test]
fn no_link_is_made_where_it_may_not_be_any_more() {
    for place in [Place::Walked, Place::Asked] {
        let s = Scene::new(false, FileKind::File);
        let done = s.with_between(place, is_closed, |v, cred| v.link_path(b"t/ours", b"t/new", cred));
        assert!(matches!(done, Err(Error::Access)), "{place:?}: {done:?}");
        assert_eq!(s.owner(b"new"), None);
    }
}

/// As link(2) has it: a name that is there comes before what may not be done to the directory, for who may look.
#[test]
fn a_link_to_a_name_that_is_there_is_told_so() {
    let s = Scene::new(false, FileKind::File);
    let link = |to: &[u8], mode: u32| {
        s.volume.setattr(s.dir, &SetAttr { mode: Some(mode), ..SetAttr::default() }).unwrap();
        s.volume.link_path(b"ours", to, &user(OURS)).unwrap_err()
    };
    let new = NewNode { kind: FileKind::File, mode: 0o777, umask: 0, rdev: 0, target: b"" };
    s.volume.create(InodeNo::ROOT, b"ours", &new, &user(OURS)).unwrap();
    for (to, mode, right) in [
        (b"t/theirs".as_slice(), 0o755, Error::Exists),
        (b"t/new", 0o755, Error::Access),
        (b"t/theirs", 0o754, Error::Access),
    ] {
        assert_eq!(format!("{:?}", link(to, mode)), format!("{right:?}"), "{mode:o}");
    }
}

/// As open(2) has it: a file that its group may execute gets setgid in a directory that hands its group down only from who is of
/// that group, or may do all.
#[test]
fn no_file_runs_as_a_group_that_its_maker_is_not_of() {
    const GROUP: u32 = 77;
    for shared in [false, true] {
        let s = Scene::new(shared, FileKind::File);
        let set = SetAttr { mode: Some(0o2777), gid: Some(GROUP), ..SetAttr::default() };
        s.volume.setattr(s.dir, &set).unwrap();
        let of_group = Cred { groups: Arc::new([5, GROUP]), ..user(OURS) };
        let by_group = Cred { gid: GROUP, ..user(OURS) };
        for (name, cred, exclusive, mode, right) in [
            (b"t/others".as_slice(), user(OURS), false, 0o6755, 0o4755),
            (b"t/fresh", user(OURS), true, 0o2711, 0o711),
            // a mark for mandatory locks
            (b"t/lock", user(OURS), true, 0o2644, 0o2644),
            (b"t/of_group", of_group, true, 0o2755, 0o2755),
            (b"t/by_group", by_group, false, 0o2755, 0o2755),
            (b"t/root", Cred::root(), true, 0o2755, 0o2755),
        ] {
            let how = OpenHow { write: true, create: true, exclusive, mode, ..OpenHow::default() };
            let ino = s.volume.open_path(name, how, &cred).unwrap().ino();
            let a = s.volume.getattr(ino).unwrap();
            let name = String::from_utf8_lossy(name);
            assert_eq!((a.mode & 0o7777, a.gid), (right, GROUP), "{name}, {shared}: {:o}", a.mode);
        }
        let sub = s.volume.mkdir_path(b"t/below", 0o755, &user(OURS)).unwrap();
        assert_eq!((sub.mode & 0o7777, sub.gid), (0o2755, GROUP), "a directory hands the group down, whoever makes it");
    }
}

/// A slash behind the last name, as Linux has it: of a directory, or of one that is to be.
#[test]
fn a_slash_follows_directories_alone() {
    for shared in [false, true] {
        let s = Scene::new(shared, FileKind::File);
        let (v, root) = (&s.volume, Cred::root());
        v.symlink_path(b"sub", b"t/to_dir", &root).unwrap();
        v.symlink_path(b"ours/", b"t/to_file", &root).unwrap();
        v.symlink_path(b"none/", b"t/to_none", &root).unwrap();
        let names = || {
            let mut names = Vec::new();
            v.readdir(s.dir, 0, &mut |e| {
                names.push(e.name.to_vec());
                true
            })
            .unwrap();
            names.sort();
            names
        };
        let before = names();
        let is = |done: Result<()>, right: Error, what: &str| {
            assert_eq!(format!("{done:?}"), format!("{:?}", Err::<(), _>(right)), "{what}, {shared}");
        };
        let open = |path: &str, create, exclusive| {
            let how = OpenHow { read: true, write: create, create, exclusive, mode: 0o600, ..OpenHow::default() };
            v.open_path(path.as_bytes(), how, &root).map(drop)
        };
        is(open("t/ours/", false, false), Error::NotDir, "open of a file");
        is(open("t/to_file", false, false), Error::NotDir, "open by a symlink with a slash");
        is(v.resolve(b"t/to_file", true, &root).map(drop), Error::NotDir, "stat by a symlink with a slash");
        is(open("t/none/", false, false), Error::NotFound, "open of nothing");
        open("t/sub/", false, false).unwrap();
        open("t/to_dir//", false, false).unwrap();
        for path in ["t/ours/", "t/none/", "t/sub/", "t/to_none", "/"] {
            is(open(path, true, false), Error::IsDir, path);
        }
        is(open("t/none/", true, true), Error::IsDir, "exclusive create");
        is(open("none/none/", true, false), Error::NotFound, "create below nothing");
        let unlink = |path: &str| v.unlink_path(path.as_bytes(), &root);
        is(unlink("t/ours/"), Error::NotDir, "unlink of a file");
        is(unlink("t/to_dir/"), Error::NotDir, "unlink of a symlink");
        is(unlink("t/sub/"), Error::IsDir, "unlink of a directory");
        is(unlink("t/none/"), Error::NotFound, "unlink of nothing");
        is(v.rmdir_path(b"t/to_dir/", &root), Error::NotDir, "rmdir of a symlink");
        is(v.symlink_path(b"x", b"t/none/", &root).map(drop), Error::NotFound, "symlink");
        is(v.symlink_path(b"x", b"t/ours/", &root).map(drop), Error::Exists, "symlink over a file");
        is(v.link_path(b"t/ours", b"t/none/", &root), Error::NotFound, "link");
        is(v.link_path(b"t/ours", b"t/theirs/", &root), Error::Exists, "link over a file");
        is(v.link_path(b"t/ours/", b"t/none", &root), Error::NotDir, "link of a file");
        let rename = |from: &str, to: &str, mode| v.rename_path(from.as_bytes(), to.as_bytes(), mode, &root);
        use RenameMode::{Exchange, NoReplace, Replace};
        is(rename("t/ours/", "t/none", Replace), Error::NotDir, "rename of a file");
        is(rename("t/to_dir/", "t/none", Replace), Error::NotDir, "rename of a symlink");
        is(rename("t/ours", "t/none/", Replace), Error::NotDir, "rename of a file to a directory's name");
        is(rename("t/none/", "t/more", Replace), Error::NotFound, "rename of nothing");
        is(rename("t/ours", "t/sub/", NoReplace), Error::Exists, "rename that replaces nothing");
        is(rename("t/sub", "t/ours/", Exchange), Error::NotDir, "exchange with a file");
        is(rename("t/sub", "t/none/", Exchange), Error::NotFound, "exchange with nothing");
        assert_eq!(names(), before, "nothing of this changed a name");
        rename("t/ours", "t/sub/", Exchange).unwrap();
        rename("t/ours/", "t/sub", Exchange).unwrap();
        rename("t/sub/", "t/moved/", Replace).unwrap();
        v.mkdir_path(b"t/sub/", 0o755, &root).unwrap();
        v.rmdir_path(b"t/moved//", &root).unwrap();
        assert_eq!(names(), before);
    }
}
