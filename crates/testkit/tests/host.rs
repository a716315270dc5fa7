//! The model against Linux itself: the same random operations on a directory of the host's file system (tmpfs, or where
//! `BRAIDFS_HOST_DIR` says: ext4 also collapses and inserts ranges).
//!
//! Needs root, for device files and `trusted.*` attributes; elsewhere it says so and passes. A difference is an error of
//! the model.

use braidfs::{Error, FallocMode, FileKind, NewNode, RenameMode, Result, SetAttr, SetTime, Timestamp, XattrMode};
use braidfs_testkit::generate::{Generator, Profile};
use braidfs_testkit::model::{Model, Stat, Times};
use braidfs_testkit::ops::{At, Op, Out, Slots, Subject, is_refused, perform, same_answer, to_rust, walk_path};
use braidfs_vfs::{FileSystem, Kernel, OpenHow};
use rustix::fs::{self, AtFlags, CWD, Mode, OFlags, RenameFlags, XattrFlags};
use rustix::io::Errno;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::CString;
use std::io;
use std::io::{Write as _, stderr};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

/// For what is open already.
const HERE: Kernel = Kernel::here();

/// Holds every inode that it ever saw, so that no number is used twice. An id is an inode number.
struct Host {
    root: u64,
    /// A directory is the file system below it.
    held: BTreeMap<u64, Kernel>,
}

fn error(e: impl Into<io::Error>) -> Error {
    let e = e.into();
    match Errno::from_io_error(&e).unwrap_or(Errno::IO) {
        Errno::NOENT => Error::NotFound,
        Errno::EXIST => Error::Exists,
        Errno::NOTDIR => Error::NotDir,
        Errno::ISDIR => Error::IsDir,
        Errno::NOTEMPTY => Error::NotEmpty,
        Errno::NOSPC => Error::NoSpace,
        Errno::NAMETOOLONG => Error::NameTooLong,
        Errno::INVAL => Error::Invalid("host"),
        Errno::PERM => Error::Perm,
        Errno::ACCESS => Error::Access,
        Errno::NODATA => Error::NoAttr,
        Errno::NXIO => Error::NoData,
        Errno::OPNOTSUPP => Error::Unsupported("host"),
        Errno::FBIG => Error::TooBig,
        _ => Error::Io(e),
    }
}

impl Host {
    fn hold(&mut self, fd: OwnedFd) -> Result<u64> {
        let ino = fs::fstat(&fd).map_err(error)?.st_ino;
        self.held.entry(ino).or_insert(fd.into());
        Ok(ino)
    }
    fn path(&self, id: u64) -> String {
        format!("/proc/self/fd/{}", self.held[&id].as_fd().as_raw_fd())
    }
}

fn c(text: &[u8]) -> Result<CString> {
    CString::new(text).map_err(|_| Error::Invalid("a zero byte"))
}

impl Subject for Host {
    type Id = u64;
    type File = (OwnedFd, u64);

    fn root(&self) -> u64 {
        self.root
    }
    fn id(&self, file: &Self::File) -> u64 {
        file.1
    }
    fn lookup(&mut self, dir: u64, name: &[u8]) -> Result<u64> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = fs::openat(&self.held[&dir], name, flags, Mode::empty()).map_err(error)?;
        self.hold(fd)
    }
    fn stat(&mut self, id: u64) -> Result<(Stat, Times)> {
        let s = fs::fstat(&self.held[&id]).map_err(error)?;
        let kind = FileKind::from_mode(s.st_mode).ok_or(Error::Stale)?;
        let size = if matches!(kind, FileKind::File | FileKind::Symlink) { s.st_size as u64 } else { 0 };
        let (mode, nlink) = (s.st_mode & 0o7777, s.st_nlink as u32);
        let stat = Stat { kind, mode, uid: s.st_uid, gid: s.st_gid, rdev: s.st_rdev, nlink, size, flags: 0 };
        let mtime = Some(Timestamp { sec: s.st_mtime as i64, nsec: s.st_mtime_nsec as u32 });
        Ok((stat, Times { mtime, ..Times::default() }))
    }
    fn create(&mut self, dir: u64, name: &[u8], new: &NewNode<'_>) -> Result<u64> {
        let (at, path) = (&self.held[&dir], c(name)?);
        match new.kind {
            FileKind::Dir => at.mkdir(&path, new.mode),
            FileKind::Symlink => at.symlink(&c(new.target)?, &path),
            k => at.mknod(&path, k, new.mode, new.rdev),
        }
        .map_err(error)?;
        self.lookup(dir, name)
    }
    fn tmpfile(&mut self, dir: u64, new: &NewNode<'_>) -> Result<(u64, Self::File)> {
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let fd = fs::openat(&self.held[&dir], ".", flags, Mode::from_raw_mode(new.mode)).map_err(error)?;
        let ino = self.hold(fd.try_clone().map_err(Error::Io)?)?;
        Ok((ino, (fd, ino)))
    }
    fn link(&mut self, id: u64, dir: u64, name: &[u8]) -> Result<()> {
        fs::linkat(CWD, self.path(id), &self.held[&dir], name, AtFlags::SYMLINK_FOLLOW).map_err(error)
    }
    fn unlink(&mut self, dir: u64, name: &[u8]) -> Result<()> {
        self.held[&dir].unlink(&c(name)?).map_err(error)
    }
    fn rmdir(&mut self, dir: u64, name: &[u8]) -> Result<()> {
        self.held[&dir].rmdir(&c(name)?).map_err(error)
    }
    fn rename(&mut self, a: u64, n: &[u8], b: u64, m: &[u8], mode: RenameMode) -> Result<()> {
        let flags = match mode {
            RenameMode::Replace => RenameFlags::empty(),
            RenameMode::NoReplace => RenameFlags::NOREPLACE,
            RenameMode::Exchange => RenameFlags::EXCHANGE,
            RenameMode::Whiteout => RenameFlags::WHITEOUT,
            RenameMode::NoReplaceWhiteout => RenameFlags::WHITEOUT | RenameFlags::NOREPLACE,
            _ => panic!("{mode:?} is not known here"),
        };
        fs::renameat_with(&self.held[&a], n, &self.held[&b], m, flags).map_err(error)
    }
    fn readlink(&mut self, id: u64) -> Result<Vec<u8>> {
        // Of a descriptor itself, Linux says ENOENT where by path it says EINVAL.
        match fs::readlinkat(&self.held[&id], "", Vec::new()) {
            Err(Errno::NOENT) => Err(Error::Invalid("not a symlink")),
            r => r.map(|s| s.into_bytes()).map_err(error),
        }
    }
    fn readdir(&mut self, dir: u64) -> Result<BTreeSet<Vec<u8>>> {
        Ok(self.held[&dir].list(c".").map_err(error)?.into_iter().collect())
    }
    fn open(&mut self, id: u64) -> Result<Self::File> {
        Ok((HERE.open(&c(self.path(id).as_bytes())?, OpenHow::WRITE).map_err(error)?, id))
    }
    fn close(&mut self, file: Self::File) {
        drop(file);
    }
    fn read(&mut self, file: &Self::File, off: u64, len: usize) -> Result<Vec<u8>> {
        let mut buf = vec![0; len];
        let n = HERE.read(&file.0, off, &mut buf).map_err(error)?;
        buf.truncate(n);
        Ok(buf)
    }
    fn write(&mut self, file: &Self::File, off: u64, data: &[u8]) -> Result<usize> {
        HERE.write(&file.0, off, data).map_err(error)
    }
    fn append(&mut self, file: &Self::File, data: &[u8]) -> Result<u64> {
        let at = fs::fstat(&file.0).map_err(error)?.st_size as u64;
        self.write(file, at, data)?;
        Ok(at)
    }
    fn fallocate(&mut self, file: &Self::File, mode: FallocMode, off: u64, len: u64) -> Result<()> {
        use fs::FallocateFlags as F;
        let keep = |k| if k { F::KEEP_SIZE } else { F::empty() };
        let flags = match mode {
            FallocMode::Allocate { keep_size } => keep(keep_size),
            FallocMode::CollapseRange => F::COLLAPSE_RANGE,
            FallocMode::InsertRange => F::INSERT_RANGE,
            FallocMode::PunchHole => F::PUNCH_HOLE | F::KEEP_SIZE,
            // tmpfs has none: the same by two calls.
            FallocMode::ZeroRange { keep_size } => {
                fs::fallocate(&file.0, F::PUNCH_HOLE | F::KEEP_SIZE, off, len).map_err(error)?;
                keep(keep_size)
            }
            _ => panic!("{mode:?} is not known here"),
        };
        fs::fallocate(&file.0, flags, off, len).map_err(error)
    }
    fn seek(&mut self, file: &Self::File, off: u64, hole: bool) -> Result<u64> {
        let from = if hole { fs::SeekFrom::Hole(off) } else { fs::SeekFrom::Data(off) };
        fs::seek(&file.0, from).map_err(error)
    }
    fn copy_range(&mut self, a: &Self::File, off: u64, b: &Self::File, to: u64, len: u64) -> Result<u64> {
        let data = self.read(a, off, len as usize)?;
        self.write(b, to, &data).map(|n| n as u64)
    }
    fn setattr(&mut self, id: u64, set: &SetAttr) -> Result<()> {
        if let Some(size) = set.size {
            let path = std::ffi::CString::new(self.path(id)).map_err(|_| Error::Invalid("path"))?;
            let f = match self.stat(id)?.0.kind {
                FileKind::Dir => return Err(Error::IsDir),
                FileKind::File => fs::open(path, OFlags::WRONLY, Mode::empty()).map_err(error)?,
                _ => return Err(Error::Invalid("no size")),
            };
            fs::ftruncate(f, size).map_err(error)?;
        }
        if let Some(mode) = set.mode {
            // Linux has no permissions on symlinks; braidfs leaves that to the front end.
            if self.stat(id)?.0.kind == FileKind::Symlink {
                return Err(Error::Unsupported("permissions of a symlink"));
            }
            fs::chmod(self.path(id), Mode::from_raw_mode(mode)).map_err(error)?;
        }
        if let (Some(uid), Some(gid)) = (set.uid, set.gid) {
            let (uid, gid) = (fs::Uid::from_raw(uid), fs::Gid::from_raw(gid));
            fs::chownat(&self.held[&id], "", Some(uid), Some(gid), AtFlags::EMPTY_PATH).map_err(error)?;
        }
        if let Some(SetTime::At(t)) = set.mtime {
            let time = |s, n| fs::Timespec { tv_sec: s, tv_nsec: n };
            let times = fs::Timestamps {
                last_access: time(0, fs::UTIME_OMIT as _),
                last_modification: time(t.sec, t.nsec as _),
            };
            fs::utimensat(CWD, self.path(id), &times, AtFlags::empty()).map_err(error)?;
        }
        Ok(())
    }
    fn setxattr(&mut self, id: u64, name: &[u8], value: &[u8], mode: XattrMode) -> Result<()> {
        let flags = match mode {
            XattrMode::Set => XattrFlags::empty(),
            XattrMode::Create => XattrFlags::CREATE,
            XattrMode::Replace => XattrFlags::REPLACE,
            _ => panic!("{mode:?} is not known here"),
        };
        fs::setxattr(self.path(id), name, value, flags).map_err(error)
    }
    fn getxattr(&mut self, id: u64, name: &[u8]) -> Result<Vec<u8>> {
        let mut buf = vec![0; 65_536];
        let n = fs::getxattr(self.path(id), name, &mut buf[..]).map_err(error)?;
        buf.truncate(n);
        Ok(buf)
    }
    fn listxattr(&mut self, id: u64) -> Result<BTreeSet<Vec<u8>>> {
        let mut buf = vec![0; 65_536];
        let n = fs::listxattr(self.path(id), &mut buf[..]).map_err(error)?;
        Ok(buf[..n].split(|b| *b == 0).filter(|n| !n.is_empty()).map(<[u8]>::to_vec).collect())
    }
    fn removexattr(&mut self, id: u64, name: &[u8]) -> Result<()> {
        fs::removexattr(self.path(id), name).map_err(error)
    }
    fn fsync(&mut self, _: u64, _: bool) -> Result<()> {
        Ok(())
    }
    fn sync(&mut self) -> Result<()> {
        Ok(())
    }
    fn trim(&mut self) -> Result<()> {
        Ok(())
    }
    fn clean(&mut self) -> Result<()> {
        Ok(())
    }
    fn defragment(&mut self, _: &Self::File, _: bool) -> Result<()> {
        Ok(())
    }
    fn commit(&mut self, _: Self::Id, _: bool) -> Result<()> {
        Ok(())
    }
}

/// What the model answers, without what this test does not ask Linux for: flags, and other times than those of content.
fn asked<Id>(want: Result<Out<Id>>) -> Result<Out<Id>> {
    want.map(|out| match out {
        Out::Stat(stat, t) => Out::Stat(Stat { flags: 0, ..stat }, Times { mtime: t.mtime, ..Times::default() }),
        out => out,
    })
}

#[test]
fn the_model_is_linux() {
    let tmpfs = std::env::var_os("BRAIDFS_HOST_DIR").unwrap_or_else(|| "/dev/shm".into());
    let dir = tempfile::tempdir_in(tmpfs).or_else(|_| tempfile::tempdir()).unwrap();
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let fd = fs::open(dir.path(), flags, Mode::empty()).unwrap();
    fs::chmod(dir.path(), Mode::from_raw_mode(0o755)).unwrap();
    let trusted = fs::setxattr(dir.path(), "trusted.try", b"x", XattrFlags::empty());
    let user = fs::setxattr(dir.path(), "user.try", b"x", XattrFlags::empty());
    if !rustix::process::geteuid().is_root() || trusted.is_err() || user.is_err() {
        _ = writeln!(
            stderr(),
            "SKIPPED: needs root and extended attributes on {}: {trusted:?} {user:?}",
            dir.path().display()
        );
        return;
    }
    fs::removexattr(dir.path(), "trusted.try").unwrap();
    fs::removexattr(dir.path(), "user.try").unwrap();
    rustix::process::umask(Mode::empty());
    let seed = braidfs_testkit::seed();
    println!("BRAIDFS_SEED={seed}");
    let mut host = Host { root: fs::fstat(&fd).unwrap().st_ino, held: BTreeMap::new() };
    host.hold(fd).unwrap();
    let mut model = Model::default();
    let (mut host_slots, mut slots): (Slots<Host>, Slots<Model>) = (Default::default(), Default::default());
    let mut generator = Generator::new(seed, Profile::default());
    for i in 0..6000 {
        let op = generator.next(&model);
        // tmpfs has neither
        let moves = matches!(op, Op::Fallocate { mode: FallocMode::CollapseRange | FallocMode::InsertRange, .. });
        if moves && dir.path().starts_with("/dev/shm") {
            continue;
        }
        let no_mode = |p| {
            walk_path(&mut model.clone(), p).is_ok_and(|i| model.node(i).is_some_and(|n| n.kind == FileKind::Symlink))
        };
        match &op {
            Op::SetMode { path, .. } if no_mode(*path) => continue,
            op if is_refused(op, &model, &slots) => continue,
            _ => {}
        }
        let got = perform(&mut host, &mut host_slots, &op);
        if let Op::Seek { at: At::Path(p), off, hole } = op {
            if let Ok(ino) = walk_path(&mut model, p)
                && model.node(ino).is_some_and(|n| n.kind == FileKind::File)
            {
                let answer = got.map(|o| if let Out::Number(n) = o { n } else { u64::MAX });
                assert!(model.seek_allows(ino, off, hole, &answer).unwrap(), "{}: {answer:?}", to_rust(&op));
            }
            continue;
        } else if matches!(op, Op::Seek { .. }) {
            continue;
        }
        let want = asked(perform(&mut model, &mut slots, &op));
        assert!(same_answer(&got, &want), "operation {i}, {}: Linux {got:.300?}, model {want:.300?}", to_rust(&op));
    }
    for (path, _) in model.paths() {
        let path = braidfs_testkit::ops::P::new(std::str::from_utf8(&path).unwrap());
        let file = At::Path(path);
        for op in [
            Op::Stat { path },
            Op::Readdir { path },
            Op::ListXattr { path },
            Op::Readlink { path },
            Op::Read { at: file, off: 0, len: 1 << 20 },
        ] {
            let got = perform(&mut host, &mut host_slots, &op);
            let want = asked(perform(&mut model, &mut slots, &op));
            assert!(same_answer(&got, &want), "at the end, {}: Linux {got:.300?}, model {want:.300?}", to_rust(&op));
        }
    }
}
