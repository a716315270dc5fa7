//! The host's file tree.

use super::{Meta, Res, Sink, Source, Tree};
use crate::failure::host_error;
use crate::text::host_path;
use braidfs::{FileKind, Timestamp};
use rustix::fs::{AtFlags, CWD, FileType, Gid, Mode, SeekFrom, Timespec, Timestamps, Uid};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};

/// See the module.
#[derive(Debug)]
pub struct HostTree;

fn text(e: impl Into<io::Error>) -> String {
    host_error(&e.into())
}

impl Tree for HostTree {
    fn stat(&self, path: &[u8], follow: bool) -> Res<Option<Meta>> {
        let path = host_path(path);
        let meta = match if follow { std::fs::metadata(path) } else { std::fs::symlink_metadata(path) } {
            Ok(meta) => meta,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(text(e)),
        };
        let time = |sec, nsec: i64| Timestamp { sec, nsec: u32::try_from(nsec).unwrap_or(0) };
        Ok(Some(Meta {
            kind: FileKind::from_mode(meta.mode()).unwrap_or(FileKind::File),
            mode: meta.mode() & 0o7777,
            uid: meta.uid(),
            gid: meta.gid(),
            size: meta.size(),
            atime: time(meta.atime(), meta.atime_nsec()),
            mtime: time(meta.mtime(), meta.mtime_nsec()),
            rdev: meta.rdev(),
            id: (meta.dev(), meta.ino()),
        }))
    }

    fn list(&self, path: &[u8]) -> Res<Vec<Vec<u8>>> {
        std::fs::read_dir(host_path(path)).map_err(text)?.map(|e| Ok(e.map_err(text)?.file_name().into_vec())).collect()
    }

    fn read_link(&self, path: &[u8]) -> Res<Vec<u8>> {
        Ok(std::fs::read_link(host_path(path)).map_err(text)?.as_os_str().as_bytes().to_vec())
    }

    fn open(&self, path: &[u8]) -> Res<Box<dyn Source + '_>> {
        Ok(Box::new(HostFile(File::open(host_path(path)).map_err(text)?)))
    }

    fn create(&self, path: &[u8], mode: u32) -> Res<Box<dyn Sink + '_>> {
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(mode)
            .custom_flags(rustix::fs::OFlags::NOFOLLOW.bits() as i32)
            .open(host_path(path))
            .map_err(text)?;
        Ok(Box::new(HostFile(file)))
    }

    fn make_dir(&self, path: &[u8], mode: u32) -> Res<()> {
        std::fs::DirBuilder::new().mode(mode).create(host_path(path)).map_err(text)
    }

    fn make_link(&self, path: &[u8], target: &[u8]) -> Res<()> {
        std::os::unix::fs::symlink(host_path(target), host_path(path)).map_err(text)
    }

    fn make_special(&self, path: &[u8], meta: &Meta, mode: u32) -> Res<()> {
        let kind = FileType::from_raw_mode(meta.kind.mode_bits());
        rustix::fs::mknodat(CWD, host_path(path), kind, Mode::from_raw_mode(mode), meta.rdev).map_err(text)
    }

    fn remove(&self, path: &[u8]) -> Res<()> {
        std::fs::remove_file(host_path(path)).map_err(text)
    }

    fn set_meta(&self, path: &[u8], meta: &Meta) -> Res<()> {
        let path = host_path(path);
        // Owner first: a change of owner clears setuid. Who may not give files away keeps them, as with `cp -p`.
        let (uid, gid) = (Uid::from_raw(meta.uid), Gid::from_raw(meta.gid));
        match rustix::fs::chownat(CWD, path, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW) {
            Ok(()) | Err(rustix::io::Errno::PERM) => {}
            Err(e) => return Err(text(e)),
        }
        if meta.kind != FileKind::Symlink {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(meta.mode)).map_err(text)?;
        }
        let spec = |t: Timestamp| Timespec { tv_sec: t.sec, tv_nsec: t.nsec.into() };
        let times = Timestamps { last_access: spec(meta.atime), last_modification: spec(meta.mtime) };
        rustix::fs::utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW).map_err(text)
    }

    fn show(&self, path: &[u8]) -> String {
        crate::text::name(path)
    }
}

struct HostFile(File);

impl Source for HostFile {
    fn read(&self, offset: u64, buf: &mut [u8]) -> Res<usize> {
        loop {
            match self.0.read_at(buf, offset) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                done => return done.map_err(text),
            }
        }
    }

    fn data(&self, offset: u64) -> Res<Option<(u64, u64)>> {
        let start = match rustix::fs::seek(&self.0, SeekFrom::Data(offset)) {
            Ok(start) => start,
            Err(rustix::io::Errno::NXIO) => return Ok(None),
            // A file system that knows no holes: read to the end.
            Err(rustix::io::Errno::INVAL | rustix::io::Errno::OPNOTSUPP) => return Ok(Some((offset, u64::MAX))),
            Err(e) => return Err(text(e)),
        };
        Ok(Some((start, rustix::fs::seek(&self.0, SeekFrom::Hole(start)).map_err(text)?)))
    }
}

impl Sink for HostFile {
    fn write(&mut self, offset: u64, data: &[u8]) -> Res<()> {
        self.0.write_all_at(data, offset).map_err(text)
    }

    fn set_size(&mut self, size: u64) -> Res<()> {
        self.0.set_len(size).map_err(text)
    }
}
