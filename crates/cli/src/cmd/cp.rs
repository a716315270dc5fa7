//! `braidfs cp`: copies between the host and an unmounted volume, and inside one.
//!
//! Walks with a stack of its own; one file that fails is reported and the rest is copied. Holes stay holes. With -p, names of
//! one file that are copied together become names of one copy. A symlink at a destination is replaced, never written through, so
//! that a hostile volume cannot send a copy elsewhere on the host; nor can a loop of its directories keep a copy from its end. A
//! device, a pipe or the standard output that is itself named as the destination, or a symlink to it, is written into, as by cp(1):
//! what lies in a directory that is named is replaced. The devices of the volumes are never written as files of the host.
//! A source is read by the descriptor that was looked at: whoever may change the directory of the host that it lies in
//! has no other file copied by that name. Nor does a walk leave what was named: each directory of the host that it comes to, to
//! read or to fill it, stays open while it goes on below, and whatever takes its name is not looked at. So a walk on the host has
//! as many files open as it is deep. No copy of this command is overwritten by another one.

mod keep;

use crate::failure::{Failure, Outcome, host_error};
use crate::mounted::{Identity, identities};
use crate::tree::volume::VolumeTree;
use crate::tree::{Entered, HostTree, MET_BEFORE, Target, Tree};
use crate::{open, text};
use braidfs_vfs::{FileKind, FileSystem, OpenHow, Stat};
use keep::{Losses, Place};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::ffi::{CString, OsString};
use std::io;
use std::path::PathBuf;
use std::rc::Rc;
use std::thread::sleep;
use std::time::Duration;

/// A result whose error is a reason for the user, without the path: who reports it knows that.
type Res<T> = Result<T, String>;

/// Copy files into, out of and inside an unmounted volume
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  braidfs cp -r ./dir disk.img:/x     into the volume\n  \
    braidfs cp disk.img:/x/y .          out of it\n  \
    braidfs cp -a disk.img:/ ./all      everything, with owners, modes, times and links\n\n\
    DEVICE:PATH names a file in a volume; PATH is absolute. A host file whose name holds `:/` is found all the same \
    where it exists. A destination with a slash at its end is a directory, which must be there if no directory is \
    copied. Of several sources with one name the first is copied, and the others are refused (exit code 1).")]
pub struct Args {
    /// Directories and all below; symlinks are copied as symlinks
    #[arg(short, long, visible_short_alias = 'R')]
    recursive: bool,
    /// Keep owner, group, mode and times, ACLs, file capabilities and the extended attributes user.* and trusted.*; without the
    /// right to give files away, what can be, and then no set-user-ID, set-group-ID and sticky bits. Hard links stay: names of one
    /// file that this command copies become names of one file, and a file at the destination that has other names is replaced.
    /// What the destination does not take is told of, and the exit code is 1
    #[arg(short, long)]
    preserve: bool,
    /// All there is: as -r and -p
    #[arg(short, long)]
    archive: bool,
    /// Sources, then the destination: paths of the host or DEVICE:PATH
    #[arg(value_name = "PATH", required = true, num_args = 2..)]
    paths: Vec<OsString>,
}

pub fn run(args: &Args) -> Outcome {
    let Some((to, from)) = args.paths.split_last() else {
        return Err(Failure::new("cp: no destination: write it as `braidfs cp SOURCE DESTINATION`"));
    };
    open_many();
    let to = Target::parse(to);
    let from: Vec<Target> = from.iter().map(|s| Target::parse(s)).collect();
    let mut devices: Vec<&PathBuf> = from.iter().chain([&to]).filter_map(device_of).collect();
    devices.sort();
    devices.dedup();
    if devices.is_empty() {
        return Err(Failure::new(
            "cp: no path names a volume: write one as DEVICE:PATH, e.g. disk.img:/dir (for host to host use cp)",
        ));
    }
    // Each volume is opened once, for writing only where the destination lies.
    let mut volumes = Vec::new();
    for device in devices {
        let tree = VolumeTree::open(device, device_of(&to) == Some(device))?;
        let paths = open::expand(std::slice::from_ref(device));
        let disks = paths.iter().flat_map(|path| identities(path)).collect();
        volumes.push(Opened { device: device.clone(), disks, tree });
    }
    let failed = match volume_of(&volumes, &to) {
        Some(volume) => copy_all(&volumes, &from, volume, &to, args),
        None => copy_all(&volumes, &from, &HostTree::HERE, &to, args),
    }?;
    for volume in volumes {
        volume.tree.close()?;
    }
    Ok(u8::from(failed))
}

/// A walk of the host's directories has as many of them open as it is deep: more than most programs.
fn open_many() {
    let limit = getrlimit(Resource::Nofile);
    // where it may not be, a deeper directory is told of
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

/// An open volume.
struct Opened {
    /// As it was named.
    device: PathBuf,
    /// What its devices are for the host.
    disks: Vec<Identity>,
    tree: VolumeTree,
}

fn volume_of<'v>(volumes: &'v [Opened], target: &Target) -> Option<&'v VolumeTree> {
    let device = device_of(target)?;
    volumes.iter().find(|v| v.device == *device).map(|v| &v.tree)
}

/// Copies all sources to `to`, which lies in `tree`; whether something failed (it has been reported).
fn copy_all<T: Tree>(volumes: &[Opened], from: &[Target], tree: &T, to: &Target, args: &Args) -> Result<bool, Failure> {
    // Written to is one volume, where it is one at all: of a host's file that holds another one a copy can be made.
    let written = volumes.iter().filter(|v| device_of(to) == Some(&v.device)).flat_map(|v| &v.disks).collect();
    let disks = volumes.iter().flat_map(|v| &v.disks).collect();
    let path = path_of(to);
    let into_dir = match stat(tree, path, true) {
        Ok(found) => found.is_some_and(|s| s.kind == FileKind::Dir),
        Err(e) => return Err(Failure::at("cannot copy to", tree.show(path), e)),
    };
    let (recursive, preserve) = (args.recursive || args.archive, args.preserve || args.archive);
    let (losses, copied, made) = (Losses::default(), RefCell::default(), RefCell::default());
    let many = from.len() > 1;
    let dest = Dest { tree, path, into_dir, many, recursive, preserve, disks, written, losses, copied, made };
    if !into_dir && from.len() > 1 {
        let why = "several files can only be copied into a directory: make it first";
        return Err(Failure::at("cannot copy to", tree.show(path), why));
    }
    let mut failed = false;
    for source in from {
        let (path, same) = (path_of(source), device_of(source) == device_of(to));
        let number = volumes.iter().position(|v| device_of(source) == Some(&v.device));
        let whence = Whence { number, same_tree: same };
        failed |= match volume_of(volumes, source) {
            Some(volume) => dest.copy(volume, path, whence),
            None if same => report(&HostTree::HERE, path, "the destination is no volume either: use cp(1)"),
            None => dest.copy(&HostTree::HERE, path, whence),
        };
    }
    Ok(failed || dest.losses.any())
}

fn device_of(t: &Target) -> Option<&PathBuf> {
    match t {
        Target::Volume { device, .. } => Some(device),
        Target::Host(_) => None,
    }
}

fn path_of(t: &Target) -> &[u8] {
    match t {
        Target::Volume { path, .. } | Target::Host(path) => path,
    }
}

fn reason(e: io::Error) -> String {
    host_error(&e)
}

fn c(text: &[u8]) -> Res<CString> {
    CString::new(text).map_err(|_| "a path cannot hold a zero byte".into())
}

/// How long, and how often, is waited for a file that somebody has a lease of, as file servers do: longer than the kernel
/// lets him keep it.
const LEASE_WAIT: Duration = Duration::from_millis(20);
const LEASE_WAITS: u32 = 3000;

/// An open file of a tree.
type Open<T> = <<T as Tree>::Fs as FileSystem>::File;

/// A path as the tree's file system takes it.
fn at(tree: &impl Tree, path: &[u8]) -> Res<CString> {
    c(tree.trim(path))
}

/// None where there is no such file.
fn stat(tree: &impl Tree, path: &[u8], follow: bool) -> Res<Option<Stat>> {
    match tree.fs().stat(&at(tree, path)?, follow) {
        Ok(stat) => Ok(Some(stat)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(reason(e)),
    }
}

/// Tells of a failure; true, for "something failed".
fn report(tree: &impl Tree, path: &[u8], why: &str) -> bool {
    crate::complain(format_args!("cannot copy {}: {why}", tree.show(path)));
    true
}

struct Dest<'a, T> {
    tree: &'a T,
    path: &'a [u8],
    /// It is a directory: what is copied lies in it.
    into_dir: bool,
    /// There are several sources: files of them may have one name.
    many: bool,
    recursive: bool,
    preserve: bool,
    /// Devices of all volumes that are open: no file of the host that is one of them is written, or replaced.
    disks: Vec<&'a Identity>,
    /// Of the volume that is written to: no file of the host that is one of them is read.
    written: Vec<&'a Identity>,
    losses: Losses,
    /// Copies of files that have several names: where they are, and which files.
    copied: RefCell<HashMap<Original, Copied>>,
    /// What was copied to the file with this [`Stat::id`], where something else may be copied to it.
    made: RefCell<HashMap<(u64, u64), Original>>,
}

/// A file that is copied: the number of its volume, none for the host, and its [`Stat::id`] there.
type Original = (Option<usize>, (u64, u64));

/// Where a copy is, and its [`Stat::id`].
type Copied = (Vec<u8>, (u64, u64));

/// Where a source lies.
#[derive(Clone, Copy)]
struct Whence {
    /// Of the volume, none for the host.
    number: Option<usize>,
    /// Source and destination lie in one tree.
    same_tree: bool,
}

/// One walk, to fill a tree `T`.
struct Walk<S, T> {
    stack: Vec<Step<S, T>>,
    /// Directories that were met, and those that were made beside them.
    seen: HashSet<(u64, u64)>,
    whence: Whence,
}

struct Step<S, T> {
    from: Vec<u8>,
    to: Vec<u8>,
    top: bool,
    work: Work,
    /// Where both are found.
    seen_from: Rc<SeenFrom<S, T>>,
}

enum Work {
    Copy,
    /// All below has been copied: now the directory's own times can be set, and its owner may lose rights.
    Finish(Stat),
}

/// The trees as they are seen from a directory and from its copy; none: as they are.
struct SeenFrom<S, T> {
    source: Option<S>,
    dest: Option<T>,
}

/// What is copied, and where to.
struct Item<'a, S, T> {
    source: &'a S,
    from: &'a [u8],
    /// Where it is copied to, as [`Dest::tree`] is seen from there.
    tree: &'a T,
    to: &'a [u8],
    top: bool,
}

impl<T: Tree> Dest<'_, T> {
    /// Copies one source; whether something failed (it has been reported).
    fn copy<S: Tree>(&self, source: &S, path: &[u8], whence: Whence) -> bool {
        // `vol:/` and `.` have no name of their own: their content goes into the directory.
        let to = if self.into_dir { text::join(self.path, text::base_name(path)) } else { self.path.to_vec() };
        let mut failed = false;
        if whence.same_tree && self.recursive {
            match self.is_inside(source, path, &to) {
                Ok(false) => {}
                Ok(true) => return report(source, path, "a directory cannot be copied into itself"),
                Err(e) => return report(source, path, &e),
            }
        }
        let seen_from = Rc::new(SeenFrom { source: None, dest: None });
        let stack = vec![Step { from: path.to_vec(), to, top: true, work: Work::Copy, seen_from }];
        let mut walk = Walk { stack, seen: HashSet::new(), whence };
        while let Some(Step { from, to, top, work, seen_from }) = walk.stack.pop() {
            let tree = seen_from.dest.as_ref().unwrap_or(self.tree);
            let item = Item { source: seen_from.source.as_ref().unwrap_or(source), from: &from, tree, to: &to, top };
            let result = match work {
                Work::Finish(meta) => self.finish(&item, &meta),
                Work::Copy => self.one(&item, &mut walk),
            };
            if let Err(e) = result {
                failed = report(source, &from, &e);
            }
        }
        failed
    }

    /// Whether `to` lies in the directory `path` of the same tree.
    fn is_inside(&self, source: &impl Tree, path: &[u8], to: &[u8]) -> Res<bool> {
        let Some(meta) = stat(source, path, false)?.filter(|m| m.kind == FileKind::Dir) else { return Ok(false) };
        // Where a link leads to counts, not what it is called; itself is another error.
        let dir = match stat(self.tree, to, true)? {
            Some(found) if found.id == meta.id => return Ok(false),
            Some(found) if found.kind == FileKind::Dir => to,
            _ => text::parent(to),
        };
        if stat(self.tree, dir, true)?.is_none() {
            return Ok(false);
        }
        Ok(self.tree.way_up(dir).map_err(reason)?.contains(&meta.id))
    }

    fn one<S: Tree>(&self, item: &Item<'_, S, T>, walk: &mut Walk<S, T>) -> Res<()> {
        let &Item { source, from, tree, to, top } = item;
        let follow = top && !self.recursive;
        let meta = stat(source, from, follow)?.ok_or("no such file or directory")?;
        let (fs, here) = (tree.fs(), |e: String| format!("to {}: {e}", tree.show(to)));
        // Only a destination that the user named may be reached through a symlink.
        let mut old = stat(tree, to, top && meta.kind == FileKind::Dir).map_err(here)?;
        let is_named = top && !self.into_dir && meta.kind == FileKind::File;
        let stream = if is_named { self.stream(to)? } else { None };
        old = stream.or(old);
        if walk.whence.same_tree && old.is_some_and(|o| o.id == meta.id) {
            return Err(format!("{} is the same file", tree.show(to)));
        }
        if old.is_some_and(|o| self.tree.devices(&o).iter().any(|id| self.disks.contains(&id))) {
            return Err(here("is a device of a volume that is open: name a path in it as DEVICE:PATH".into()));
        }
        // a device file is copied as such
        if meta.kind == FileKind::File && source.devices(&meta).iter().any(|id| self.written.contains(&id)) {
            return Err("is the volume itself: not copied".into());
        }
        if meta.kind == FileKind::Dir {
            return self.directory(item, meta, old, walk);
        }
        if old.is_some_and(|o| o.kind == FileKind::Dir) {
            return Err(here("is a directory".into()));
        }
        if top && !self.into_dir && to.ends_with(b"/") {
            // as the kernel has it: a slash is behind nothing but a directory
            return Err(here("no such directory: make it first".into()));
        }
        if !self.recursive && !matches!(meta.kind, FileKind::File | FileKind::Symlink) {
            return Err("is a special file: copy it with -r".into());
        }
        if let Some(stream) = stream {
            let (input, _) = open_seen(source, from, &meta, follow)?;
            return self.write_stream(source.fs(), &input, to, stream.kind == FileKind::File);
        }
        let original = (walk.whence.number, meta.id);
        if old.is_some_and(|o| self.made.borrow().get(&o.id).is_some_and(|of| *of != original)) {
            return Err(here("this command has just copied another file to it: not overwritten".into()));
        }
        let has_others = self.preserve && meta.nlink > 1;
        if has_others && self.link_to_copy(item, &original, &mut old)? {
            return Ok(());
        }
        // before anything at the destination is touched
        let input = match meta.kind {
            FileKind::File => Some(open_seen(source, from, &meta, follow)?),
            _ => None,
        };
        // a file that has other names, where links are kept, is theirs
        let is_replaced = |o: Stat| [o.kind, meta.kind] != [FileKind::File; 2] || (self.preserve && o.nlink > 1);
        if old.is_some_and(is_replaced) {
            fs.unlink(&at(tree, to)?).map_err(reason).map_err(here)?;
            old = None;
        }
        match &input {
            Some((input, meta)) => self.make_file(item, input, meta, old.is_some())?,
            None => self.make_node(item, &meta)?,
        }
        if has_others || self.many || old.is_some_and(|o| o.nlink > 1) {
            let id = stat(tree, to, false).map_err(here)?.map(|s| s.id);
            self.made.borrow_mut().extend(id.map(|id| (id, original)));
            if has_others {
                self.copied.borrow_mut().extend(id.map(|id| (original, (to.to_vec(), id))));
            }
        }
        Ok(())
    }

    /// Copies a directory that was looked at: what lies in it comes later. `old`: what is there.
    fn directory<S: Tree>(
        &self,
        item: &Item<'_, S, T>,
        meta: Stat,
        old: Option<Stat>,
        walk: &mut Walk<S, T>,
    ) -> Res<()> {
        let &Item { source, from, tree, to, top } = item;
        let (mode, here) = (self.first_mode(&meta), |e: String| format!("to {}: {e}", tree.show(to)));
        if !self.recursive {
            return Err("is a directory: copy it with -r".into());
        }
        if source.has_one_name_each() && !walk.seen.insert(meta.id) {
            return Err(MET_BEFORE.into());
        }
        let how = match old {
            Some(old) if old.kind == FileKind::Dir && top => Entered::Found(old.id),
            Some(old) if old.kind == FileKind::Dir => Entered::ToFill(old.id),
            Some(_) => return Err(here("exists and is no directory".into())),
            None => {
                // Writable until it is filled.
                tree.fs().mkdir(&at(tree, to)?, mode | 0o700).map_err(reason).map_err(here)?;
                Entered::Made
            }
        };
        let dest = tree.enter(to, how).map_err(|e| here(opening(&e)))?;
        if walk.whence.same_tree {
            // a loop must not lead to what is being made
            walk.seen.extend(stat(tree, to, true).map_err(here)?.map(|made| made.id));
        }
        let (inside, names) = match source.enter(from, Entered::ToRead(meta.id)) {
            Ok(inside) => {
                let seen = inside.as_ref().unwrap_or(source);
                let names = seen.list(&at(seen, from)?).map_err(reason);
                (inside, names)
            }
            Err(e) => (None, Err(opening(&e))),
        };
        let seen_from = Rc::new(SeenFrom { source: inside, dest });
        let step = |from: &[u8], to: &[u8], top, work| {
            let (from, to, seen_from) = (from.to_vec(), to.to_vec(), Rc::clone(&seen_from));
            Step { from, to, top, work, seen_from }
        };
        if self.preserve || (old.is_none() && mode & 0o700 != 0o700) {
            walk.stack.push(step(from, to, top, Work::Finish(meta)));
        }
        for name in names? {
            if name.contains(&b'/') || name.is_empty() {
                return Err(format!("holds an impossible name {}", text::name(&name)));
            }
            walk.stack.push(step(&text::join(from, &name), &text::join(to, &name), false, Work::Copy));
        }
        Ok(())
    }

    /// Permissions that a copy has until it has all. Without the umask: where the directory has a default ACL, that takes
    /// the place of it. For nobody else until all is set.
    fn first_mode(&self, meta: &Stat) -> u32 {
        meta.mode & if self.preserve { 0o700 } else { 0o777 }
    }

    /// Copies a file that is open; `exists`: into one that is there.
    fn make_file<S: Tree>(&self, item: &Item<'_, S, T>, input: &Open<S>, meta: &Stat, exists: bool) -> Res<()> {
        let &Item { source, tree, to, .. } = item;
        let (fs, here) = (tree.fs(), |e: io::Error| format!("to {}: {}", tree.show(to), reason(e)));
        let mode = if exists { 0o600 } else { self.first_mode(meta) };
        let how = OpenHow { read: false, truncate: true, no_follow: true, mode, ..OpenHow::CREATE };
        let file = fs.open(&at(tree, to)?, how).map_err(here)?;
        self.content(source.fs(), input, to, &file, meta.size)?;
        self.keep_if_wanted(&Place::Open(source.fs(), input), &Place::Open(fs, &file), meta, to)?;
        fs.close(file).map_err(here)
    }

    /// Copies what is neither a directory nor a file.
    fn make_node<S: Tree>(&self, item: &Item<'_, S, T>, meta: &Stat) -> Res<()> {
        let &Item { source, from, tree, to, .. } = item;
        let (fs, here) = (tree.fs(), |e: io::Error| format!("to {}: {}", tree.show(to), reason(e)));
        let (from_path, to_path) = (at(source, from)?, at(tree, to)?);
        match meta.kind {
            FileKind::Symlink => {
                let target = source.fs().read_link(&from_path).map_err(reason)?;
                fs.symlink(&c(&target)?, &to_path).map_err(here)?;
            }
            kind => fs.mknod(&to_path, kind, self.first_mode(meta), meta.rdev).map_err(here)?,
        }
        self.keep_if_wanted(&Place::Named(source.fs(), &from_path), &Place::Named(fs, &to_path), meta, to)
    }

    /// Makes `to` another name of the copy of a file that was copied before, by another name of it: whether there is one. `old`: what
    /// has the name.
    fn link_to_copy<S>(&self, item: &Item<'_, S, T>, original: &Original, old: &mut Option<Stat>) -> Res<bool> {
        let &Item { tree, to, .. } = item;
        let here = |e: String| format!("to {}: {e}", tree.show(to));
        let Some((copy, id)) = self.copied.borrow().get(original).cloned() else { return Ok(false) };
        // something else may have its name by now
        if stat(self.tree, &copy, false).map_err(here)?.is_none_or(|s| s.id != id) {
            return Ok(false);
        }
        let (fs, path) = (tree.fs(), at(tree, to)?);
        if old.is_some_and(|o| o.id == id) {
            return Ok(true);
        }
        if old.take().is_some() {
            fs.unlink(&path).map_err(reason).map_err(here)?;
        }
        let linked = tree.link_from(self.tree, &at(self.tree, &copy)?, &path);
        let lost = |e| self.losses.tell_link(&tree.show(to), &tree.show(&copy), &reason(e));
        if linked.map_err(lost).is_err() {
            return Ok(false);
        }
        if stat(tree, to, false).map_err(here)?.is_some_and(|s| s.id == id) {
            return Ok(true);
        }
        // something else had its name just now
        fs.unlink(&path).map_err(reason).map_err(here)?;
        Ok(false)
    }

    /// Gives a directory that is filled what it is to have.
    fn finish<S: Tree>(&self, item: &Item<'_, S, T>, meta: &Stat) -> Res<()> {
        let &Item { source, from, tree, to, top } = item;
        let here = |e: io::Error| format!("to {}: {}", tree.show(to), reason(e));
        if !self.preserve {
            let made = stat(tree, to, top)?.ok_or("it was removed meanwhile")?;
            // without what it had to be filled
            let made = Stat { mode: made.mode & !(0o700 & !meta.mode), ..made };
            return tree.fs().set_attributes(&at(tree, to)?, &made, top).map_err(here);
        }
        let how = OpenHow { directory: true, no_follow: true, ..OpenHow::READ };
        let input = Directory::open(source, from, how).map_err(|e| opening(&e))?;
        if source.fs().stat_of(input.file()).map_err(reason)?.id != meta.id {
            return Err(REPLACED.into());
        }
        let file = Directory::open(tree, to, OpenHow { no_follow: !top, ..how }).map_err(here)?;
        let (input, file) = (Place::Open(source.fs(), input.file()), Place::Open(tree.fs(), file.file()));
        self.keep_if_wanted(&input, &file, meta, to)
    }

    /// Gives a copy what `meta` says, and the extended attributes, where they are to be kept.
    fn keep_if_wanted<S: FileSystem>(
        &self,
        original: &Place<'_, S>,
        copy: &Place<'_, T::Fs>,
        meta: &Stat,
        to: &[u8],
    ) -> Res<()> {
        if !self.preserve {
            return Ok(());
        }
        let xattrs = original.xattrs().map_err(reason)?;
        let lost = |name: &[u8], e| self.losses.tell(&self.tree.show(to), name, &reason(e));
        let kept = keep::keep(copy, meta, &xattrs, lost);
        kept.map_err(|e| format!("to {}: {}", self.tree.show(to), reason(e)))
    }

    /// What is there and is written into, also behind a symlink.
    fn stream(&self, to: &[u8]) -> Res<Option<Stat>> {
        let found = self.tree.fs().stat(&at(self.tree, to)?, true).ok();
        Ok(found.filter(|s| self.tree.is_written_into(s)))
    }

    /// Writes a file's content, its holes as zeros, to what has no places; owner, mode and times of that stay. A `file` begins
    /// anew.
    fn write_stream<F: FileSystem>(&self, fs: &F, input: &F::File, to: &[u8], file: bool) -> Res<()> {
        let here = |e: io::Error| format!("to {}: {}", self.tree.show(to), reason(e));
        let out = self.tree.fs();
        let how = OpenHow { read: false, truncate: file, ..OpenHow::WRITE };
        let output = out.open(&at(self.tree, to)?, how).map_err(here)?;
        let (mut buf, mut done) = (vec![0u8; 1 << 20], 0);
        loop {
            match fs.read(input, done, &mut buf).map_err(reason)? {
                0 => return out.close(output).map_err(here),
                n => {
                    out.append(&output, &buf[..n]).map_err(here)?;
                    done += n as u64;
                }
            }
        }
    }

    /// Copies the content of a file that had `size` bytes when it was opened.
    fn content<F: FileSystem>(&self, fs: &F, input: &F::File, to: &[u8], output: &Open<T>, size: u64) -> Res<()> {
        let here = |e: io::Error| format!("to {}: {}", self.tree.show(to), reason(e));
        let out = self.tree.fs();
        let mut buf = vec![0u8; 1 << 20];
        // to `end`, or where the file ends: whether it goes on there
        let mut copy = |at: &mut u64, end: u64| -> Res<bool> {
            while *at < end {
                let want = buf.len().min(usize::try_from(end - *at).unwrap_or(usize::MAX));
                let n = fs.read(input, *at, &mut buf[..want]).map_err(reason)?;
                if n == 0 {
                    return Ok(false);
                }
                out.write_all(output, *at, &buf[..n]).map_err(here)?;
                *at += n as u64;
            }
            Ok(true)
        };
        let (mut at, mut goes_on) = (0, true);
        while goes_on && let Some(run) = fs.next_data(input, at).map_err(reason)? {
            at = run.start;
            // it ends before where it shrinks meanwhile, or is one of /sys, whose size is more than its content
            goes_on = copy(&mut at, run.end)?;
        }
        if goes_on {
            // The rest is a hole, as far as the file went and still goes. What has come since is read: it need not be
            // zeros, and files of /proc have no size and content all the same.
            at = at.max(size.min(fs.stat_of(input).map_err(reason)?.size));
            copy(&mut at, u64::MAX)?;
        }
        out.truncate(output, at).map_err(here)
    }
}

/// Why a file is not copied that has taken the name of another one.
const REPLACED: &str = "another file has its name since it was looked at: not copied";

/// Why a directory cannot be opened that was looked at.
fn opening(e: &io::Error) -> String {
    match Errno::from_io_error(e) {
        Some(Errno::STALE | Errno::LOOP | Errno::NOTDIR) => REPLACED.into(),
        _ => host_error(e),
    }
}

/// A directory that is open.
enum Directory<'t, F> {
    /// The one that the tree is seen from.
    OfTree(&'t F),
    Opened(F),
}

impl<'t, F> Directory<'t, F> {
    fn open<S: Tree>(tree: &'t S, path: &[u8], how: OpenHow) -> io::Result<Self>
    where
        S::Fs: FileSystem<File = F>,
    {
        match tree.dir() {
            Some(file) => Ok(Self::OfTree(file)),
            None => Ok(Self::Opened(tree.fs().open(&CString::new(tree.trim(path))?, how)?)),
        }
    }

    fn file(&self) -> &F {
        match self {
            Self::OfTree(file) => file,
            Self::Opened(file) => file,
        }
    }
}

/// Opens a file that was looked at: it, and what it is by now. Nothing else that has its name since: who may write the
/// directory could have what he may not read copied by it, or stop the command by a pipe.
fn open_seen<S: Tree>(source: &S, from: &[u8], seen: &Stat, follow: bool) -> Res<(Open<S>, Stat)> {
    let (fs, path) = (source.fs(), at(source, from)?);
    let how = OpenHow { no_follow: !follow, no_wait: true, ..OpenHow::READ };
    let replaced = || REPLACED.to_owned();
    let mut left = LEASE_WAITS;
    let input = loop {
        match fs.open(&path, how) {
            // its holder gives it back, or loses it
            Err(e) if e.kind() == io::ErrorKind::WouldBlock && left > 0 => left -= 1,
            Err(e) if Errno::from_io_error(&e) == Some(Errno::LOOP) => return Err(replaced()),
            done => break done.map_err(reason)?,
        }
        sleep(LEASE_WAIT);
    };
    let meta = fs.stat_of(&input).map_err(reason)?;
    if meta.id != seen.id || meta.kind != seen.kind {
        return Err(replaced());
    }
    Ok((input, meta))
}
