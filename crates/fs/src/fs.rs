//! An open volume, and what is done by path.

use crate::{CloseError, Error, File, FileKind, Metadata, MkfsOptions, OpenOptions, Options, ReadDir, Result};
use braidfs::{Attr, Cred, Error as Why, OpenFile, RenameMode, SetAttr, StatFs, Ticket, Volume, XattrMode};
use braidfs_device::{BLOCK_BYTES, Device, FileDevice, MemDevice, open_volume_devices};
use crossbeam::utils::CachePadded;
use std::ffi::{OsStr, OsString};
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};
use std::time::SystemTime;

/// What handles need of a volume.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) volume: Volume,
    cred: Cred,
    umask: u32,
    /// Rises with each `security.capability` that is set, from 1: handles must look again whether a write has to remove one.
    pub(crate) capabilities: AtomicU64,
}

/// What a handle holds of it, on a cache line of its own.
pub(crate) type SharedRef = Arc<CachePadded<Arc<Shared>>>;

/// References that threads share out among them, so that opens and closes of different threads write no common line.
const REFERENCES: usize = 64;

/// An open volume. See the [crate].
pub struct Fs {
    references: Vec<SharedRef>,
}

impl std::fmt::Debug for Fs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Fs").field(&self.volume()).finish()
    }
}

/// The bytes of a path. The engine skips slashes at its start.
fn bytes(path: &Path) -> Result<&[u8]> {
    let bytes = path.as_os_str().as_bytes();
    match bytes {
        [] => Err(Why::NotFound.into()),
        _ if bytes.contains(&0) => Err(Why::Invalid("a path with a zero byte").into()),
        _ => Ok(bytes),
    }
}

impl Fs {
    /// Makes an image file of `size` bytes and a volume in it.
    ///
    /// What exists is not overwritten: `braidfs mkfs`, which looks at what a device holds, and [`braidfs::mkfs::format`],
    /// which does not, are for that.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let image = dir.path().join("vol.img");
    /// use braidfs_fs::{Fs, MkfsOptions, parse_mkfs};
    ///
    /// let options = MkfsOptions { label: "mail".into(), data_checksums: true, ..MkfsOptions::default() };
    /// Fs::format(&image, 64 << 20, &options)?;
    /// // the same by text, refused here: what is there stays
    /// let again = Fs::format(&image, 64 << 20, &parse_mkfs("label=mail,data-checksums")?);
    /// assert_eq!(again.unwrap_err().kind(), std::io::ErrorKind::AlreadyExists);
    /// # Ok::<(), std::io::Error>(())
    /// ```
    ///
    /// # Errors
    /// EEXIST; sizes that do not fit; of the file system that the image is in. No image is left then.
    pub fn format(image: impl AsRef<Path>, size: u64, options: &MkfsOptions) -> Result<()> {
        let image = image.as_ref();
        let device: Arc<dyn Device> = Arc::new(FileDevice::create(image, size)?);
        let made = braidfs::mkfs::format(&[device], options);
        if made.is_err() {
            // it was made here; the error that counts is the first one
            let _ = std::fs::remove_file(image);
        }
        made?;
        Ok(())
    }

    /// Opens the volume on these image files, block devices or NBD exports (`nbd://HOST/EXPORT`, `nbd+unix:///EXPORT?socket=PATH`), all
    /// that it has.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let image = dir.path().join("vol.img");
    /// # use braidfs_fs::{Fs, Options};
    /// # Fs::format(&image, 64 << 20, &Default::default())?;
    /// let fs = Fs::open(&[&image], &Options::parse("noatime,commit=1")?)?;
    /// fs.write("a", "text")?;
    /// // one process, and in it one `Fs`, has it for writing
    /// let second = Fs::open(&[&image], &Options::default());
    /// assert_eq!(second.unwrap_err().kind(), std::io::ErrorKind::ResourceBusy);
    /// fs.close()?;
    ///
    /// let fs = Fs::open(&[&image], &Options::read_only())?;
    /// assert_eq!(fs.read_to_string("a")?, "text");
    /// assert_eq!(fs.write("a", "new").unwrap_err().kind(), std::io::ErrorKind::ReadOnlyFilesystem);
    /// fs.close()?;
    /// # Ok::<(), std::io::Error>(())
    /// ```
    ///
    /// # Errors
    /// A device cannot be opened or is in use; no volume, not all of its devices, damage.
    pub fn open(devices: &[impl AsRef<Path>], options: &Options) -> Result<Self> {
        let paths: Vec<PathBuf> = devices.iter().map(|p| p.as_ref().to_path_buf()).collect();
        Self::on(open_volume_devices(&paths, !options.mount.read_only)?, options)
    }

    /// Opens the volume on devices of whatever kind.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn on(devices: Vec<Arc<dyn Device>>, options: &Options) -> Result<Self> {
        let volume = Volume::mount(devices, options.mount.clone())?;
        let (uid, gid) = options.owner;
        let cred = Cred { uid, gid, privileged: true, ..Cred::root() };
        let shared = Arc::new(Shared { volume, cred, umask: options.umask, capabilities: AtomicU64::new(1) });
        let references = (0..REFERENCES).map(|_| Arc::new(CachePadded::new(shared.clone()))).collect();
        Ok(Self { references })
    }

    /// A new volume of `size` bytes in memory, for tests: it is gone when it is closed.
    ///
    /// # Errors
    /// The size does not fit; ENOMEM.
    pub fn in_memory(size: u64, options: &Options) -> Result<Self> {
        let device: Arc<dyn Device> = Arc::new(MemDevice::try_new(size / BLOCK_BYTES as u64).map_err(Why::Io)?);
        let made = MkfsOptions { root_owner: options.owner, ..MkfsOptions::default() };
        braidfs::mkfs::format(std::slice::from_ref(&device), &made)?;
        Self::on(vec![device], options)
    }

    /// Makes everything durable and closes the volume.
    ///
    /// ```
    /// # use braidfs_fs::{Fs, Options};
    /// # let fs = Fs::in_memory(64 << 20, &Options::default())?;
    /// let file = fs.create("a")?;
    /// let error = fs.close().unwrap_err(); // the file is open
    /// let fs = error.fs.expect("the volume, to go on with");
    /// drop(file);
    /// fs.close()?;
    /// # Ok::<(), std::io::Error>(())
    /// ```
    ///
    /// # Errors
    /// EBUSY while files or listings are open, or something is pinned, with the volume to go on with; else of a device, and it is closed.
    pub fn close(mut self) -> Result<(), CloseError> {
        if self.open_handles() > 0 {
            let error =
                Why::Busy("files of the volume are still open, or pages of it pinned: close or drop them first".into());
            return Err(CloseError { error: error.into(), fs: Some(self) });
        }
        let mut last = None;
        for r in self.references.drain(..) {
            // no handle has it, and nobody can make one
            last = Arc::into_inner(r).map(CachePadded::into_inner);
            if let Some(shared) = last.take().and_then(Arc::into_inner) {
                return shared.volume.unmount().map_err(|e| CloseError { error: e.into(), fs: None });
            }
        }
        drop(last);
        Ok(())
    }

    /// Ends it as a crash would: nothing more is written, and the next open recovers what was durable. For a process that
    /// has found its memory to be wrong. Files that are still open can be read; what would change something, or sync it, is an
    /// error. The devices are in use until the last of them, of listings and of what is [pinned](crate::Pinned) is dropped.
    pub fn abandon(self) {
        // handles have the volume, too, and the last of them closes it
        self.volume().kill();
    }

    /// Files and listings that are open, and what is [pinned](crate::Pinned).
    pub fn open_handles(&self) -> usize {
        self.references.iter().map(|r| Arc::strong_count(r) - 1).sum()
    }

    fn shared(&self) -> &SharedRef {
        &self.references[braidfs_sync::slots::mine() % REFERENCES]
    }

    /// The volume below, for what has no call here.
    pub fn volume(&self) -> &Volume {
        &self.shared().volume
    }

    fn cred(&self) -> &Cred {
        &self.shared().cred
    }

    fn umask(&self) -> u32 {
        self.shared().umask
    }

    fn handle(&self, open: OpenFile, how: &OpenOptions) -> File {
        File {
            open,
            shared: self.shared().clone(),
            readable: how.how.read,
            writable: how.how.write || how.append,
            append: how.append,
            position: Mutex::new(0),
            looked: AtomicU64::new(0),
        }
    }

    pub(crate) fn open_file(&self, path: &Path, options: &OpenOptions) -> Result<File> {
        let mut how = options.how;
        how.write |= options.append;
        how.append = options.append;
        // as std::fs: open(2) leaves it open what becomes of these
        let changes = how.create || how.exclusive || how.truncate;
        if !how.write && (changes || !how.read) {
            return Err(Why::Invalid("open: neither read nor write, or create or truncate without write").into());
        }
        how.create |= how.exclusive;
        (how.mode, how.umask) = (how.mode & 0o7777, self.umask());
        let open = self.volume().open_path(bytes(path)?, how, self.cred())?;
        let file = self.handle(open, options);
        if how.truncate {
            file.drop_capabilities()?;
        }
        Ok(file)
    }

    /// The inode of a path, of whatever kind, held: its number stays its own for as long.
    fn inode(&self, path: &Path, follow: bool) -> Result<File> {
        let path = bytes(path)?;
        let found = self.open_found(|| Ok(Some(self.volume().resolve(path, follow, self.cred())?)))?;
        found.ok_or_else(|| Why::NotFound.into())
    }

    /// Opens what `look` finds, which looks again where that was removed in between: another one may have the name. `None` where
    /// there is nothing.
    fn open_found(&self, look: impl Fn() -> Result<Option<Attr>>) -> Result<Option<File>> {
        let mut gone = None;
        loop {
            let Some(attr) = look()? else { return Ok(None) };
            match self.volume().open(attr.ino) {
                Ok(open) if open.generation() == attr.generation => {
                    return Ok(Some(self.handle(open, OpenOptions::new().write(true))));
                }
                Ok(_) | Err(Why::NotFound) => {}
                Err(e) => return Err(e.into()),
            }
            // a directory of a domain that has failed may name for good what is deleted in memory
            let now = (attr.ino, attr.generation);
            if gone.replace(now) == Some(now) && self.volume().domains().iter().any(|d| d.failed.is_some()) {
                return Ok(None);
            }
        }
    }

    /// Opens a file or directory for reading.
    ///
    /// # Errors
    /// As open(2).
    pub fn open_read(&self, path: impl AsRef<Path>) -> Result<File> {
        self.open_file(path.as_ref(), OpenOptions::new().read(true))
    }

    /// Opens a file for reading and writing, made where it is not there and else emptied.
    ///
    /// # Errors
    /// As open(2).
    pub fn create(&self, path: impl AsRef<Path>) -> Result<File> {
        self.open_file(path.as_ref(), OpenOptions::new().read(true).write(true).create(true).truncate(true))
    }

    /// All of a file.
    ///
    /// # Errors
    /// As open(2) and read(2).
    pub fn read(&self, path: impl AsRef<Path>) -> Result<Vec<u8>> {
        let mut file = self.open_read(path)?;
        let mut all = Vec::with_capacity(usize::try_from(file.metadata()?.len()).unwrap_or(0).min(1 << 30));
        file.read_to_end(&mut all).map_err(inner)?;
        Ok(all)
    }

    /// All of a file, which is text.
    ///
    /// # Errors
    /// As [`Self::read`]; EINVAL where it is not UTF-8.
    pub fn read_to_string(&self, path: impl AsRef<Path>) -> Result<String> {
        String::from_utf8(self.read(path)?).map_err(|_| Why::Invalid("the file is not UTF-8").into())
    }

    /// Makes a file with this content, or replaces the content of the one that is there. Not atomic: for that write another
    /// one, sync it, and rename it.
    ///
    /// # Errors
    /// As open(2) and write(2).
    pub fn write(&self, path: impl AsRef<Path>, content: impl AsRef<[u8]>) -> Result<()> {
        self.create(path)?.write_all(content.as_ref()).map_err(inner)
    }

    /// Copies content and permissions of a file; the bytes.
    ///
    /// # Errors
    /// As open(2), read(2) and write(2); EINVAL where both are one file.
    pub fn copy(&self, from: impl AsRef<Path>, to: impl AsRef<Path>) -> Result<u64> {
        let from = self.open_read(from)?;
        let attr = from.metadata()?;
        if !attr.is_file() {
            return Err(Why::Invalid("the source is not a regular file").into());
        }
        let to = self.open_file(to.as_ref(), OpenOptions::new().write(true).create(true).mode(attr.permissions()))?;
        if to.open.ino() == from.open.ino() {
            return Err(Why::Invalid("source and target are the same file").into());
        }
        to.set_len(0)?;
        let mut done = 0;
        loop {
            match self.volume().copy_range(&from.open, done, &to.open, done, u64::MAX - done)? {
                0 => break,
                n => done += n,
            }
        }
        to.set_permissions(attr.permissions())?;
        Ok(done)
    }

    /// What stat tells, symlinks followed.
    ///
    /// # Errors
    /// As stat(2).
    pub fn metadata(&self, path: impl AsRef<Path>) -> Result<Metadata> {
        self.stat(path.as_ref(), true)
    }

    /// What stat tells, of a symlink itself.
    ///
    /// # Errors
    /// As lstat(2).
    pub fn symlink_metadata(&self, path: impl AsRef<Path>) -> Result<Metadata> {
        self.stat(path.as_ref(), false)
    }

    fn stat(&self, path: &Path, follow: bool) -> Result<Metadata> {
        let attr: Attr = self.volume().resolve(bytes(path)?, follow, self.cred())?;
        Ok(Metadata { attr })
    }

    /// Whether the path leads to something.
    ///
    /// # Errors
    /// It cannot be told.
    pub fn exists(&self, path: impl AsRef<Path>) -> Result<bool> {
        match self.metadata(path) {
            Ok(_) => Ok(true),
            Err(Error::Volume(Why::NotFound | Why::NotDir)) => Ok(false),
            Err(e) => Err(e),
        }
    }

    /// Makes a directory with the permissions 777 less the umask, or those that a default ACL of the one above gives it.
    ///
    /// # Errors
    /// As mkdir(2).
    pub fn create_dir(&self, path: impl AsRef<Path>) -> Result<()> {
        self.create_dir_with(path, 0o777)
    }

    /// Makes a directory.
    ///
    /// # Errors
    /// As mkdir(2).
    pub fn create_dir_with(&self, path: impl AsRef<Path>, mode: u32) -> Result<()> {
        self.volume().mkdir_path_with(bytes(path.as_ref())?, mode & 0o7777, self.umask(), self.cred())?;
        Ok(())
    }

    /// Makes a directory and those above it that are not there; one that is there is as good.
    ///
    /// # Errors
    /// As mkdir(2).
    pub fn create_dir_all(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let mut missing = Vec::new();
        for dir in path.ancestors().filter(|d| !d.as_os_str().is_empty()) {
            match self.create_dir(dir) {
                Ok(()) => break,
                Err(Error::Volume(Why::NotFound)) => missing.push(dir),
                Err(e) => return self.is_dir_or(dir, e).and_then(|()| self.create_dirs(&missing)),
            }
        }
        self.create_dirs(&missing)
    }

    fn create_dirs(&self, missing: &[&Path]) -> Result<()> {
        missing.iter().rev().try_for_each(|dir| self.create_dir(dir).or_else(|e| self.is_dir_or(dir, e)))
    }

    /// # Errors
    /// `e` where the path leads to no directory.
    fn is_dir_or(&self, path: &Path, e: Error) -> Result<()> {
        if self.metadata(path).is_ok_and(|m| m.is_dir()) { Ok(()) } else { Err(e) }
    }

    /// Lists a directory.
    ///
    /// ```
    /// # use braidfs_fs::{FileKind, Fs, Options};
    /// # let fs = Fs::in_memory(64 << 20, &Options::default())?;
    /// fs.create_dir_all("mail/2026")?;
    /// fs.write("mail/index", "one")?;
    /// let mut found = Vec::new();
    /// for entry in fs.read_dir("mail")? {
    ///     let entry = entry?;
    ///     found.push((entry.file_name().to_owned(), entry.kind()));
    /// }
    /// found.sort_by(|a, b| a.0.cmp(&b.0)); // they come in no order
    /// assert_eq!(found, [("2026".into(), FileKind::Dir), ("index".into(), FileKind::File)]);
    /// # Ok::<(), braidfs_fs::Error>(())
    /// ```
    ///
    /// # Errors
    /// As opendir(3).
    pub fn read_dir(&self, path: impl AsRef<Path>) -> Result<ReadDir> {
        let dir = self.inode(path.as_ref(), true)?;
        if !dir.metadata()?.is_dir() {
            return Err(Why::NotDir.into());
        }
        Ok(ReadDir::new(dir, path.as_ref()))
    }

    /// Removes a name of a file that is no directory.
    ///
    /// # Errors
    /// As unlink(2).
    pub fn remove_file(&self, path: impl AsRef<Path>) -> Result<()> {
        Ok(self.volume().unlink_path(bytes(path.as_ref())?, self.cred())?)
    }

    /// Removes an empty directory.
    ///
    /// # Errors
    /// As rmdir(2).
    pub fn remove_dir(&self, path: impl AsRef<Path>) -> Result<()> {
        Ok(self.volume().rmdir_path(bytes(path.as_ref())?, self.cred())?)
    }

    /// Removes a directory with all below it; of a symlink only itself, and none is followed below. What others put there
    /// meanwhile may make it fail with ENOTEMPTY.
    ///
    /// # Errors
    /// As unlink(2) and rmdir(2). ENOTDIR where slashes follow the name of a symlink: nothing is removed then.
    pub fn remove_dir_all(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let named = without_slashes(bytes(path)?);
        let top = self.inode(Path::new(OsStr::from_bytes(named)), false)?;
        match top.metadata()?.kind() {
            FileKind::Dir => {}
            // with a slash it leads to a directory that has another name
            FileKind::Symlink if named.len() == bytes(path)?.len() => return self.remove_file(path),
            _ => return Err(Why::NotDir.into()),
        }
        // Directories that are being listed, each in the one before, with their names there. They are open, and nothing is removed by
        // a path: in the place of one a symlink may have come meanwhile.
        let mut below = vec![(ReadDir::new(top, Path::new("")), OsString::new())];
        while let Some((listing, _)) = below.last_mut() {
            if let Some(entry) = listing.next() {
                let (entry, dir) = (entry?, listing.dir());
                let name = entry.file_name();
                match entry.kind() {
                    FileKind::Dir => {
                        if let Some(child) = self.directory_in(dir, name)? {
                            below.push((ReadDir::new(child, Path::new("")), name.to_owned()));
                        }
                    }
                    _ => gone(self.volume().unlink(dir.open.ino(), name.as_bytes()))?,
                }
            } else if let Some((_, name)) = below.pop()
                && let Some((parent, _)) = below.last()
            {
                gone(self.volume().rmdir(parent.dir().open.ino(), name.as_bytes()))?;
            }
        }
        Ok(gone(self.volume().rmdir_path(bytes(path)?, self.cred()))?)
    }

    /// Opens a directory by its name in one that is open; `None` where no directory has the name any more.
    fn directory_in(&self, dir: &File, name: &OsStr) -> Result<Option<File>> {
        self.open_found(|| match self.volume().lookup(dir.open.ino(), name.as_bytes()) {
            Err(Why::NotFound) => Ok(None),
            found => Ok(Some(found?).filter(|attr| attr.kind() == FileKind::Dir)),
        })
    }

    /// Gives a file another name; what `to` names is replaced. Atomic, also across a crash.
    ///
    /// # Errors
    /// As rename(2).
    pub fn rename(&self, from: impl AsRef<Path>, to: impl AsRef<Path>) -> Result<()> {
        self.rename_with(from, to, RenameMode::Replace)
    }

    /// renameat2(2): replaces, refuses to, or exchanges the two; or leaves a whiteout, which is the caller's.
    ///
    /// ```
    /// # use braidfs_fs::{Fs, Options, RenameMode};
    /// # let fs = Fs::in_memory(64 << 20, &Options::default())?;
    /// fs.write("config", "old")?;
    /// fs.write("config.new", "new")?;
    /// let refused = fs.rename_with("config.new", "config", RenameMode::NoReplace);
    /// assert_eq!(refused.unwrap_err().kind(), std::io::ErrorKind::AlreadyExists);
    /// fs.rename_with("config.new", "config", RenameMode::Exchange)?; // the old one stays, under the other name
    /// assert_eq!((fs.read("config")?, fs.read("config.new")?), (b"new".to_vec(), b"old".to_vec()));
    /// # Ok::<(), braidfs_fs::Error>(())
    /// ```
    ///
    /// # Errors
    /// As renameat2(2).
    pub fn rename_with(&self, from: impl AsRef<Path>, to: impl AsRef<Path>, mode: RenameMode) -> Result<()> {
        Ok(self.volume().rename_path(bytes(from.as_ref())?, bytes(to.as_ref())?, mode, self.cred())?)
    }

    /// Gives a file one more name.
    ///
    /// # Errors
    /// As link(2).
    pub fn hard_link(&self, original: impl AsRef<Path>, link: impl AsRef<Path>) -> Result<()> {
        Ok(self.volume().link_path(bytes(original.as_ref())?, bytes(link.as_ref())?, self.cred())?)
    }

    /// Makes a symlink at `link`.
    ///
    /// # Errors
    /// As symlink(2).
    pub fn symlink(&self, target: impl AsRef<Path>, link: impl AsRef<Path>) -> Result<()> {
        self.volume().symlink_path(bytes(target.as_ref())?, bytes(link.as_ref())?, self.cred())?;
        Ok(())
    }

    /// Where a symlink leads.
    ///
    /// # Errors
    /// As readlink(2).
    pub fn read_link(&self, path: impl AsRef<Path>) -> Result<PathBuf> {
        use std::os::unix::ffi::OsStringExt;
        let target = self.inode(path.as_ref(), false)?.read_link()?;
        Ok(PathBuf::from(std::ffi::OsString::from_vec(target)))
    }

    /// Changes attributes of what a path names, or where `follow` of what a symlink at its end leads to.
    ///
    /// # Errors
    /// As chmod(2), chown(2), utimensat(2), truncate(2).
    pub fn set_attributes(&self, path: impl AsRef<Path>, follow: bool, set: &SetAttr) -> Result<()> {
        self.inode(path.as_ref(), follow)?.set_attributes(set)
    }

    /// Sets the permissions, 12 bits.
    ///
    /// # Errors
    /// As chmod(2).
    pub fn set_permissions(&self, path: impl AsRef<Path>, mode: u32) -> Result<()> {
        self.inode(path.as_ref(), true)?.set_permissions(mode)
    }

    /// Sets the times of the last access and of the last change of the content; `None` leaves one, and twice all.
    ///
    /// # Errors
    /// As utimensat(2).
    pub fn set_times(
        &self,
        path: impl AsRef<Path>,
        accessed: Option<SystemTime>,
        modified: Option<SystemTime>,
    ) -> Result<()> {
        self.inode(path.as_ref(), true)?.set_times(accessed, modified)
    }

    /// Value of an extended attribute.
    ///
    /// # Errors
    /// ENODATA where there is none of the name.
    pub fn xattr(&self, path: impl AsRef<Path>, follow: bool, name: &[u8]) -> Result<Vec<u8>> {
        self.inode(path.as_ref(), follow)?.xattr(name)
    }

    /// Sets an extended attribute.
    ///
    /// ```
    /// # use braidfs_fs::{Error, Fs, Options, XattrMode};
    /// # let fs = Fs::in_memory(64 << 20, &Options::default())?;
    /// fs.write("a", "text")?;
    /// fs.set_xattr("a", true, b"user.tag", b"blue", XattrMode::Create)?; // refused where it is there
    /// fs.set_xattr("a", true, b"user.tag", b"red", XattrMode::Set)?;
    /// assert_eq!(fs.xattr("a", true, b"user.tag")?, b"red");
    /// assert_eq!(fs.xattrs("a", true)?, [b"user.tag"]);
    /// fs.remove_xattr("a", true, b"user.tag")?;
    /// assert!(matches!(fs.xattr("a", true, b"user.tag"), Err(Error::Volume(braidfs_fs::VolumeError::NoAttr))));
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// As setxattr(2).
    pub fn set_xattr(
        &self,
        path: impl AsRef<Path>,
        follow: bool,
        name: &[u8],
        value: &[u8],
        mode: XattrMode,
    ) -> Result<()> {
        self.inode(path.as_ref(), follow)?.set_xattr(name, value, mode)
    }

    /// Names of all extended attributes.
    ///
    /// # Errors
    /// As listxattr(2).
    pub fn xattrs(&self, path: impl AsRef<Path>, follow: bool) -> Result<Vec<Vec<u8>>> {
        self.inode(path.as_ref(), follow)?.xattrs()
    }

    /// Removes an extended attribute.
    ///
    /// # Errors
    /// ENODATA where there is none of the name.
    pub fn remove_xattr(&self, path: impl AsRef<Path>, follow: bool, name: &[u8]) -> Result<()> {
        self.inode(path.as_ref(), follow)?.remove_xattr(name)
    }

    /// Space of the whole volume ([`File::statvfs`]: of what a file can have).
    pub fn statvfs(&self) -> StatFs {
        self.volume().statfs()
    }

    /// When it returns, everything survives a crash.
    ///
    /// # Errors
    /// Of a device.
    pub fn sync(&self) -> Result<()> {
        Ok(self.volume().sync()?)
    }

    /// [`Self::sync`] that returns at once. See [`File::sync_start`].
    ///
    /// ```
    /// # use braidfs_fs::{Fs, Options};
    /// # let fs = Fs::in_memory(64 << 20, &Options::default())?;
    /// fs.write("a", "text")?;
    /// let ticket = fs.sync_start();
    /// fs.write("b", "meanwhile")?;
    /// ticket.wait()?; // "a" survives a crash
    /// # Ok::<(), braidfs_fs::Error>(())
    /// ```
    pub fn sync_start(&self) -> Ticket {
        self.volume().sync_start()
    }
}

/// A path without the slashes at its end, which follow a symlink; the root's keeps them.
fn without_slashes(path: &[u8]) -> &[u8] {
    path.iter().rposition(|b| *b != b'/').map_or(path, |last| &path[..=last])
}

/// What somebody else has removed is removed.
fn gone(done: std::result::Result<(), Why>) -> std::result::Result<(), Why> {
    match done {
        Err(Why::NotFound) => Ok(()),
        done => done,
    }
}

/// The error of a call of [`std::io`]'s traits on a [`File`].
fn inner(e: std::io::Error) -> Error {
    match e.downcast::<Error>() {
        Ok(e) => e,
        Err(e) if e.kind() == std::io::ErrorKind::WriteZero => Why::NoSpace.into(),
        Err(e) => Why::Io(e).into(),
    }
}
