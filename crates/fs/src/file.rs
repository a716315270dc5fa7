//! Open files: reading, writing, seeking, syncing.

use crate::fs::SharedRef;
use crate::metadata::timestamp;
use crate::{Advice, Error, FallocMode, Metadata, Pinned, Result, StatFs, Ticket};
use braidfs::format::inode::APPEND;
use braidfs::{Error as Why, OpenFile, SetAttr, SetTime, XattrMode};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

/// The attribute that holds file capabilities.
const CAPABILITIES: &[u8] = b"security.capability";

/// An open file or directory. Dropped, it is closed; what was written is kept, and durable as after close(2): with the
/// next commit or sync.
///
/// [`Read`], [`Write`] and [`Seek`] move a position, which threads share as that of a descriptor; [`Self::read_at`] and
/// [`Self::write_at`] have none, and threads that use them do not wait for each other.
///
/// ```
/// # use braidfs_fs::{Fs, OpenOptions, Options};
/// use std::io::{Read, Seek, SeekFrom, Write};
/// # let fs = Fs::in_memory(64 << 20, &Options::default())?;
/// let mut file = fs.create("log")?; // to read and to write
/// file.write_all(b"one line\n")?;
/// file.seek(SeekFrom::Start(4))?;
/// let mut rest = String::new();
/// file.read_to_string(&mut rest)?;
/// assert_eq!(rest, "line\n");
///
/// file.write_all_at(b"ONE", 0)?;
/// let mut word = [0; 3];
/// file.read_exact_at(&mut word, 0)?;
/// assert_eq!(&word, b"ONE");
///
/// let more = OpenOptions::new().append(true).open(&fs, "log")?;
/// assert_eq!(more.append(b"another\n")?, (9, 8)); // from byte 9 on, 8 bytes, whoever else appends
/// more.sync_data()?;
/// # Ok::<(), std::io::Error>(())
/// ```
pub struct File {
    pub(crate) open: OpenFile,
    pub(crate) shared: SharedRef,
    pub(crate) readable: bool,
    pub(crate) writable: bool,
    pub(crate) append: bool,
    pub(crate) position: Mutex<u64>,
    /// [`Shared::capabilities`](crate::fs::Shared) when it had no file capabilities by a look of this handle, which looks before it
    /// changes the content.
    pub(crate) looked: AtomicU64,
}

impl std::fmt::Debug for File {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("File")
            .field("ino", &self.open.ino().0)
            .field("read", &self.readable)
            .field("write", &self.writable)
            .field("append", &self.append)
            .finish_non_exhaustive()
    }
}

impl File {
    fn position(&self) -> MutexGuard<'_, u64> {
        // nobody panics with it locked but in the engine, which leaves the number as it was
        self.position.lock().unwrap_or_else(PoisonError::into_inner)
    }
    fn check(may: bool) -> Result<()> {
        if may { Ok(()) } else { Err(Why::BadHandle.into()) }
    }
    /// [`Self::check`] of what changes the content, before which file capabilities go.
    fn check_writable(&self) -> Result<()> {
        Self::check(self.writable)?;
        // before the look: of what is set meanwhile the next change looks again
        let set = self.shared.capabilities.load(Acquire);
        if self.looked.load(Relaxed) != set {
            self.drop_capabilities()?;
            self.looked.store(set, Relaxed);
        }
        Ok(())
    }

    /// Reads at `offset`: the number of bytes, fewer than wanted only at the end.
    ///
    /// # Errors
    /// EBADF where it is not open for reading; EISDIR; of the device.
    pub fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<usize> {
        Self::check(self.readable)?;
        Ok(self.shared.volume.read(&self.open, offset, buf)?)
    }

    /// Reads as [`Self::read_at`] does, without a copy: what comes back refers to the pages of the volume's cache. See [`Pinned`].
    ///
    /// ```
    /// # use braidfs_fs::{Fs, Options};
    /// # use std::io::Write;
    /// # let fs = Fs::in_memory(64 << 20, &Options::default())?;
    /// # fs.write("video", vec![7; 3_000_000])?;
    /// # let mut socket = Vec::new();
    /// let video = fs.open_read("video")?;
    /// let mut at = 0;
    /// loop {
    ///     let part = video.read_pinned(at, 1 << 20)?; // at most a mebibyte is pinned at once
    ///     if part.is_empty() {
    ///         break; // the end
    ///     }
    ///     for piece in part.iter() {
    ///         socket.write_all(piece)?; // a slice of the cache's page
    ///     }
    ///     at += part.bytes() as u64;
    /// }
    /// # assert_eq!(socket, vec![7; 3_000_000]);
    /// # Ok::<(), std::io::Error>(())
    /// ```
    ///
    /// # Errors
    /// ENOMEM where more than a quarter of the cache (of a tenant: of its ceiling) would be pinned; as [`Self::read_at`].
    pub fn read_pinned(&self, offset: u64, len: usize) -> Result<Pinned> {
        Self::check(self.readable)?;
        let pinned = self.shared.volume.read_pinned(&self.open, offset, len)?;
        Ok(Pinned { pinned, _shared: self.shared.clone() })
    }

    /// What the reads of this handle will be like, as posix_fadvise(2) is told: in a row, or at random. Without it that is found
    /// out (see [`Options::mount`](crate::Options), `readahead`).
    pub fn advise(&self, advice: Advice) {
        self.shared.volume.advise(&self.open, advice);
    }

    /// Brings a range into the cache, as POSIX_FADV_WILLNEED does, and waits for it; an eighth of the cache at most. The bytes of
    /// the file from `offset` on that came, or were there.
    ///
    /// # Errors
    /// As [`Self::read_at`].
    pub fn will_need(&self, offset: u64, len: u64) -> Result<u64> {
        Self::check(self.readable)?;
        Ok(self.shared.volume.will_need(&self.open, offset, len)?)
    }

    /// Writes at `offset`: the number of bytes, fewer than wanted where space ran out in the middle. Of a file opened with
    /// `append` it is the offset that counts, unlike in Linux, where pwrite(2) then appends.
    ///
    /// # Errors
    /// EBADF where it is not open for writing; ENOSPC; EFBIG; EPERM where it is immutable, or append-only and opened with `append`.
    pub fn write_at(&self, buf: &[u8], offset: u64) -> Result<usize> {
        self.check_writable()?;
        // nobody else has one open for writing that was append-only then
        if self.append && self.shared.volume.getattr(self.open.ino())?.flags & APPEND != 0 {
            return Err(Why::Perm.into());
        }
        Ok(self.shared.volume.write(&self.open, offset, buf)?)
    }

    /// Fills `buf` from `offset` on.
    ///
    /// # Errors
    /// [`io::ErrorKind::UnexpectedEof`] where the file ends before; as [`Self::read_at`].
    pub fn read_exact_at(&self, mut buf: &mut [u8], mut offset: u64) -> io::Result<()> {
        while !buf.is_empty() {
            match self.read_at(buf, offset)? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                n => (buf, offset) = (&mut buf[n..], offset + n as u64),
            }
        }
        Ok(())
    }

    /// Writes all of `buf` at `offset`.
    ///
    /// # Errors
    /// As [`Self::write_at`]; a part may have been written.
    pub fn write_all_at(&self, mut buf: &[u8], mut offset: u64) -> Result<()> {
        while !buf.is_empty() {
            match self.write_at(buf, offset)? {
                0 => return Err(Why::NoSpace.into()),
                n => (buf, offset) = (&buf[n..], offset + n as u64),
            }
        }
        Ok(())
    }

    /// Writes at the end: where, and how many bytes, which lie there in one piece whoever else appends. Fewer than given
    /// where there are more than 1 MiB, or where space ran out.
    ///
    /// # Errors
    /// As [`Self::write_at`].
    pub fn append(&self, buf: &[u8]) -> Result<(u64, usize)> {
        self.check_writable()?;
        Ok(self.shared.volume.append_some(&self.open, buf)?)
    }

    /// When it returns, data, attributes and every name on the path survive a crash; of a directory, its entries.
    ///
    /// # Errors
    /// Of the device: what was synced is then in doubt, and the domain refuses writes.
    pub fn sync_all(&self) -> Result<()> {
        Ok(self.shared.volume.fsync(self.open.ino(), false)?)
    }

    /// When it returns, data, size and names survive a crash; times may be older.
    ///
    /// # Errors
    /// As [`Self::sync_all`].
    pub fn sync_data(&self) -> Result<()> {
        Ok(self.shared.volume.fsync(self.open.ino(), true)?)
    }

    /// [`Self::sync_all`], or where `data_only` [`Self::sync_data`], that returns at once: wait by the ticket, or have it
    /// call a function, or await it. Those who wait at the same time share a flush. The file may be closed meanwhile; one that
    /// is removed and closed is not there to be synced.
    ///
    /// ```
    /// # use braidfs_fs::{Fs, Options};
    /// # let fs = Fs::in_memory(64 << 20, &Options::default())?;
    /// let files: Vec<_> = (0..4).map(|i| fs.create(format!("{i}"))).collect::<Result<_, _>>()?;
    /// let tickets: Vec<_> = files.iter().map(|f| f.sync_start(false)).collect();
    /// for ticket in tickets {
    ///     ticket.wait()?;
    /// }
    /// // or a function is called, on a thread of the volume
    /// let (send, receive) = std::sync::mpsc::channel();
    /// files[0].sync_start(true).on_done(Box::new(move |result| send.send(result).unwrap_or_default()));
    /// receive.recv().unwrap()?;
    /// // or a task awaits it
    /// let task = async { files[1].sync_start(true).await };
    /// # drop(task);
    /// # Ok::<(), braidfs_fs::Error>(())
    /// ```
    pub fn sync_start(&self, data_only: bool) -> Ticket {
        self.shared.volume.fsync_start(self.open.ino(), data_only)
    }

    /// Cuts it off or makes it longer, with zeros.
    ///
    /// # Errors
    /// As ftruncate(2).
    pub fn set_len(&self, len: u64) -> Result<()> {
        Self::check(self.writable)?;
        self.set(SetAttr { size: Some(len), ..SetAttr::default() })
    }

    /// fallocate(2): reserves blocks, makes a hole, moves what follows.
    ///
    /// ```
    /// # use braidfs_fs::{FallocMode, Fs, Options};
    /// # let fs = Fs::in_memory(64 << 20, &Options::default())?;
    /// let file = fs.create("a")?;
    /// file.write_all_at(&[7; 12288], 0)?;
    /// file.allocate(FallocMode::PunchHole, 4096, 4096)?;
    /// assert_eq!((file.seek_data(0, true)?, file.seek_data(4096, false)?), (Some(4096), Some(8192)));
    /// # Ok::<(), braidfs_fs::Error>(())
    /// ```
    ///
    /// # Errors
    /// As fallocate(2).
    pub fn allocate(&self, mode: FallocMode, offset: u64, len: u64) -> Result<()> {
        self.check_writable()?;
        Ok(self.shared.volume.fallocate(&self.open, mode, offset, len)?)
    }

    /// What stat tells.
    ///
    /// # Errors
    /// Of the device.
    pub fn metadata(&self) -> Result<Metadata> {
        Ok(Metadata { attr: self.shared.volume.getattr(self.open.ino())? })
    }

    /// Sets the permissions, 12 bits.
    ///
    /// # Errors
    /// EPERM where it is immutable; EROFS.
    pub fn set_permissions(&self, mode: u32) -> Result<()> {
        self.set(SetAttr { mode: Some(mode & 0o7777), ..SetAttr::default() })
    }

    /// Sets owner and group; `None` leaves one. As chown(2) does, it takes set-user-ID bits and file capabilities away from all but
    /// directories.
    ///
    /// # Errors
    /// As [`Self::set_permissions`].
    pub fn set_owner(&self, uid: Option<u32>, gid: Option<u32>) -> Result<()> {
        self.set(SetAttr { uid, gid, ..SetAttr::default() })
    }

    /// Sets the times of the last access and of the last change of the content; `None` leaves one, and twice all.
    ///
    /// # Errors
    /// As [`Self::set_permissions`].
    pub fn set_times(&self, accessed: Option<SystemTime>, modified: Option<SystemTime>) -> Result<()> {
        if accessed.is_none() && modified.is_none() {
            return Ok(());
        }
        let at = |t: SystemTime| SetTime::At(timestamp(t));
        self.set(SetAttr { atime: accessed.map(at), mtime: modified.map(at), ..SetAttr::default() })
    }

    /// [`Self::set_times`] and all else that can be set at once. A new owner without a new mode takes privileges away as
    /// [`Self::set_owner`] does.
    ///
    /// # Errors
    /// As [`Self::set_permissions`].
    pub fn set_attributes(&self, set: &SetAttr) -> Result<()> {
        self.set(*set)
    }

    fn set(&self, mut set: SetAttr) -> Result<()> {
        let owner = set.uid.is_some() || set.gid.is_some();
        // of directories the engine leaves the bits
        set.kill_suid |= owner && set.mode.is_none();
        if owner || set.size.is_some() {
            self.drop_capabilities()?;
        }
        self.shared.volume.setattr(self.open.ino(), &set)?;
        Ok(())
    }

    /// As a write, a truncation and a chown do in Linux: who changes the content, or has it given, gets no privileges by it.
    pub(crate) fn drop_capabilities(&self) -> Result<()> {
        let volume = &self.shared.volume;
        if volume.has_capabilities(&self.open) {
            match volume.remove_capabilities(self.open.ino()) {
                Ok(()) | Err(Why::NoAttr) => {}
                Err(e) => return Err(e.into()),
            }
        }
        Ok(())
    }

    /// The first data at or after `offset`, or where `hole` the first hole (the end of the file is one); `None` where there
    /// is none.
    ///
    /// # Errors
    /// Of the device.
    pub fn seek_data(&self, offset: u64, hole: bool) -> Result<Option<u64>> {
        match self.shared.volume.seek(&self.open, offset, hole) {
            Ok(at) => Ok(Some(at)),
            Err(Why::NoData) => Ok(None),
            Err(e) => Err(e.into()),
        }
    }

    /// Value of an extended attribute.
    ///
    /// # Errors
    /// ENODATA where there is none of the name.
    pub fn xattr(&self, name: &[u8]) -> Result<Vec<u8>> {
        Ok(self.shared.volume.getxattr(self.open.ino(), name)?)
    }

    /// Sets an extended attribute.
    ///
    /// # Errors
    /// As setxattr(2).
    pub fn set_xattr(&self, name: &[u8], value: &[u8], mode: XattrMode) -> Result<()> {
        self.shared.volume.setxattr(self.open.ino(), name, value, mode)?;
        if name == CAPABILITIES {
            self.shared.capabilities.fetch_add(1, AcqRel);
        }
        Ok(())
    }

    /// Names of all extended attributes.
    ///
    /// # Errors
    /// Of the device.
    pub fn xattrs(&self) -> Result<Vec<Vec<u8>>> {
        Ok(self.shared.volume.listxattr(self.open.ino())?)
    }

    /// Removes an extended attribute.
    ///
    /// # Errors
    /// ENODATA where there is none of the name.
    pub fn remove_xattr(&self, name: &[u8]) -> Result<()> {
        Ok(self.shared.volume.removexattr(self.open.ino(), name)?)
    }

    /// Space that this file can have.
    ///
    /// # Errors
    /// Of the device.
    pub fn statvfs(&self) -> Result<StatFs> {
        Ok(self.shared.volume.statfs_of(self.open.ino())?)
    }

    pub(crate) fn read_link(&self) -> Result<Vec<u8>> {
        Ok(self.shared.volume.readlink(self.open.ino())?)
    }
}

impl Read for &File {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let mut at = self.position();
        let n = self.read_at(buf, *at)?;
        *at += n as u64;
        Ok(n)
    }
}

impl Write for &File {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        let mut at = self.position();
        let n = if self.append {
            let (start, n) = self.append(buf)?;
            *at = start + n as u64;
            n
        } else {
            let n = self.write_at(buf, *at)?;
            *at += n as u64;
            n
        };
        Ok(n)
    }
    /// Nothing is held back.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Seek for &File {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let mut at = self.position();
        let new = match to {
            SeekFrom::Start(n) => Some(n),
            SeekFrom::Current(by) => at.checked_add_signed(by),
            SeekFrom::End(by) => self.metadata()?.len().checked_add_signed(by),
        };
        let new = new.filter(|n| i64::try_from(*n).is_ok());
        *at = new.ok_or(Error::Volume(Why::Invalid("a position before the start or beyond every file")))?;
        Ok(*at)
    }
}

impl Read for File {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        (&*self).read(buf)
    }
}

impl Write for File {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        (&*self).write(buf)
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Seek for File {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        (&*self).seek(to)
    }
}
