//! Listing directories by cookies that stay valid while the directory changes.

use super::checks::check_alive;
use crate::cell::{Body, Cell};
use crate::error::{Error, Result};
use crate::planted::sharing::{Place, share};
use crate::types::*;
use crate::volume::{MountedVolume, Volume};
use braidfs_format::dentry::Dentry;
use std::sync::atomic::Ordering;

/// Entries taken under the directory's lock at once.
const BATCH: usize = 128;

/// What a listing tells beside the names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Tell {
    Names,
    Attrs,
    /// Attributes, and the inodes are counted as held ([`crate::volume::held`]).
    Held,
}

impl MountedVolume {
    /// Up to [`BATCH`] entries after position `pos`. `seen`: the access time that the directory gets.
    fn entries_after(&self, c: &Cell, mut pos: u64, seen: &mut Option<Timestamp>) -> Result<Vec<Dentry>> {
        let mut out = Vec::with_capacity(BATCH);
        {
            let st = c.state.read();
            check_alive(&st)?;
            *seen = self.access_due(&st);
            let Body::Dir(d) = &st.body else { return Err(Error::NotDir) };
            let whole = d.index.list_loaded(pos, BATCH, &mut |e| out.push(e.clone()));
            if whole || !out.is_empty() {
                return Ok(out);
            }
        }
        let mut st = c.state.write();
        self.dom(c.domain).with_index(c.ino, &mut st, |ix, load| {
            while out.len() < BATCH {
                match ix.next_after(pos, load)? {
                    Some(e) => {
                        pos = e.hash;
                        out.push(e.clone());
                    }
                    None => break,
                }
            }
            Ok(())
        })?;
        Ok(out)
    }

    /// What a directory has at one moment. In parts ([`Self::entries_after`]) something may be missed that gets another name there
    /// meanwhile.
    ///
    /// # Errors
    /// [`Error::NotFound`] where it was removed; [`Error::NotDir`]; of the device.
    pub(crate) fn children_at_once(&self, dir: InodeRef) -> Result<Vec<InodeRef>> {
        // a file may have its number by now
        let c = self.find(dir.ino)?.filter(|c| c.is(dir)).ok_or(Error::NotFound)?;
        if c.kind != FileKind::Dir {
            return Err(Error::NotDir);
        }
        // first in parts, which brings them into memory: nobody waits for all of them to be read
        let mut pos = 2;
        while let Some(last) = self.entries_after(&c, pos, &mut None)?.last() {
            pos = last.hash;
        }
        let mut st = c.state.write();
        check_alive(&st)?;
        let mut all = Vec::new();
        self.dom(c.domain).with_index(c.ino, &mut st, |ix, load| {
            let mut pos = 2;
            while let Some(e) = ix.next_after(pos, load)? {
                pos = e.hash;
                all.push(e.into());
            }
            Ok(all)
        })
    }

    /// Whether an inode has a name in a directory: an entry may be left over from a crash.
    pub(crate) fn hangs_in(&self, c: &Cell, dir: InodeNo) -> bool {
        let st = c.state.read();
        !st.deleted && st.links.iter().any(|l| l.parent == dir)
    }

    fn list(
        &self,
        dir: InodeNo,
        cookie: u64,
        tell: Tell,
        noting: bool,
        each: &mut dyn FnMut(DirEntry<'_>, Option<&Attr>) -> bool,
    ) -> Result<()> {
        let c = self.see(dir)?;
        if c.kind != FileKind::Dir {
            return Err(Error::NotDir);
        }
        let parent = {
            let st = c.state.read();
            if st.nlink == 0 {
                // one that was removed has nothing any more, not even `.`
                return Ok(());
            }
            st.parent
        };
        let mut at = cookie;
        for (i, (ino, name)) in [(dir, b".".as_slice()), (parent, b"..".as_slice())].into_iter().enumerate() {
            let next = i as u64 + 1;
            if at < next {
                if !each(DirEntry { ino, generation: 0, kind: FileKind::Dir, name, next }, None) {
                    return Ok(());
                }
                at = next;
            }
        }
        let check = self.maybe_stale.load(Ordering::Relaxed);
        let mut pos = at.max(2);
        loop {
            let mut seen = None;
            let batch = self.entries_after(&c, pos, &mut seen)?;
            if let Some(now) = seen.filter(|_| noting) {
                self.set_atime(&c.arc(), now);
            }
            if batch.is_empty() {
                return Ok(());
            }
            for e in &batch {
                pos = e.hash;
                let kind = FileKind::from_mode(u32::from(e.kind) << 12).unwrap_or(FileKind::File);
                let entry = DirEntry { ino: e.node, generation: e.generation, kind, name: &e.name, next: e.hash };
                let attr = if tell != Tell::Names || check {
                    // a child that cannot be read is listed all the same; asking for it tells the error
                    match self.child_seen(&c, &e.name, e.into()) {
                        Ok(None) => continue,
                        Ok(Some(c)) if tell == Tell::Held => self.hold(&c),
                        Ok(Some(c)) => {
                            let st = c.state.read();
                            (!st.deleted).then(|| c.attr(&st))
                        }
                        Err(_) => None,
                    }
                } else {
                    None
                };
                if !each(entry, attr.as_ref()) {
                    if tell == Tell::Held && attr.is_some() {
                        self.unhold(e.node, e.generation);
                    }
                    return Ok(());
                }
            }
        }
    }
}

impl Volume {
    /// Entries after `cookie` (0: from the start, `.` and `..` included) until `each` returns false; the entry refused
    /// is not consumed. Cookies stay valid while the directory changes.
    ///
    /// # Errors
    /// [`Error::NotDir`], or of the device.
    pub fn readdir(&self, dir: InodeNo, cookie: u64, each: &mut dyn FnMut(DirEntry<'_>) -> bool) -> Result<()> {
        share(Place::List);
        self.mounted().list(dir, cookie, Tell::Names, true, &mut |e, _| each(e))
    }

    /// As [`Self::readdir`], and no access time is noted, as for who opened the directory with O_NOATIME.
    ///
    /// # Errors
    /// As [`Self::readdir`].
    pub fn readdir_unnoted(&self, dir: InodeNo, cookie: u64, each: &mut dyn FnMut(DirEntry<'_>) -> bool) -> Result<()> {
        share(Place::List);
        self.mounted().list(dir, cookie, Tell::Names, false, &mut |e, _| each(e))
    }

    /// As [`Self::readdir`], with attributes (`None` for `.` and `..`, and for an inode that cannot be read).
    ///
    /// # Errors
    /// As [`Self::readdir`].
    pub fn readdir_plus(
        &self,
        dir: InodeNo,
        cookie: u64,
        each: &mut dyn FnMut(DirEntry<'_>, Option<&Attr>) -> bool,
    ) -> Result<()> {
        let r = self.mounted().list(dir, cookie, Tell::Attrs, true, each);
        self.mounted().maybe_evict_of(dir);
        r
    }

    /// As [`Self::readdir_plus`], with each inode that `each` takes counted as held from outside until
    /// [`Self::forget`].
    ///
    /// # Errors
    /// As [`Self::readdir`]. What `each` took until then is counted.
    pub fn readdir_held(
        &self,
        dir: InodeNo,
        cookie: u64,
        each: &mut dyn FnMut(DirEntry<'_>, Option<&Attr>) -> bool,
    ) -> Result<()> {
        self.list_held(dir, cookie, true, each)
    }

    /// As [`Self::readdir_held`], and no access time is noted.
    ///
    /// # Errors
    /// As [`Self::readdir_held`].
    pub fn readdir_held_unnoted(
        &self,
        dir: InodeNo,
        cookie: u64,
        each: &mut dyn FnMut(DirEntry<'_>, Option<&Attr>) -> bool,
    ) -> Result<()> {
        self.list_held(dir, cookie, false, each)
    }

    fn list_held(
        &self,
        dir: InodeNo,
        cookie: u64,
        noting: bool,
        each: &mut dyn FnMut(DirEntry<'_>, Option<&Attr>) -> bool,
    ) -> Result<()> {
        let r = self.mounted().list(dir, cookie, Tell::Held, noting, each);
        self.mounted().maybe_evict_of(dir);
        r
    }
}
