//! Directories: opendir, readdir, readdirplus.

use super::attrs::entry_out;
use super::data::is_quiet;
use crate::abi::{self, fopen};
use crate::fs::{BraidFs, Context, MAX_IO_BYTES, errno};
use crate::handles::Handle;
use crate::request::{Answer, Handled, Outcome, Request};
use braidfs::{DirEntry, InodeNo, Volume};
use rustix::io::Errno;
use std::sync::atomic::AtomicU64;
use zerocopy::{FromZeros, IntoBytes};

impl BraidFs {
    pub(crate) fn opendir(&self, req: &Request<'_>, out: &mut Answer) -> Handled {
        let file = self.hold(req.node())?;
        let caps_epoch = AtomicU64::new(0);
        let fh = self.handles.insert(Handle {
            file,
            cached_writer: false.into(),
            writer: false,
            append_only: false,
            fh: 0,
            caps_epoch,
        })?;
        // All changes of the directory pass through the kernel, so its copy of the listing stays right.
        out.put(&abi::OpenOut { fh, open_flags: fopen::CACHE_DIR | fopen::KEEP_CACHE, padding: 0 });
        Ok(Outcome::Reply)
    }

    pub(crate) fn readdir(&self, req: &Request<'_>, out: &mut Answer) -> Handled {
        let arg: abi::ReadIn = req.arg()?;
        let dir = self.opened_node(req.node(), arg.fh)?;
        self.list_names(dir, &arg, None, out)
    }

    /// A part of a listing without attributes, each entry in the form that `plus` says ([`put_dirent`]).
    fn list_names(
        &self,
        dir: InodeNo,
        arg: &abi::ReadIn,
        plus: Option<Option<abi::EntryOut>>,
        out: &mut Answer,
    ) -> Handled {
        let limit = arg.size.min(MAX_IO_BYTES) as usize;
        let mut full = false;
        let each = &mut |entry: DirEntry<'_>| {
            full = !put_dirent(out, limit, plus, &entry);
            !full
        };
        let list = if is_quiet(arg) { Volume::readdir_unnoted } else { Volume::readdir };
        list(&self.vol, dir, arg.offset, each).map_err(errno)?;
        listed(out, full)
    }

    pub(crate) fn readdirplus(&self, req: &Request<'_>, out: &mut Answer, cx: &Context<'_>) -> Handled {
        let arg: abi::ReadIn = req.arg()?;
        let dir = self.opened_node(req.node(), arg.fh)?;
        if !self.listings.wants_attributes(dir, arg.offset) {
            return self.list_names(dir, &arg, Some(None), out);
        }
        let limit = arg.size.min(MAX_IO_BYTES) as usize;
        let (mut full, mut told) = (false, 0);
        let own = cx.channel.own();
        let list = if is_quiet(&arg) { Volume::readdir_held_unnoted } else { Volume::readdir_held };
        let listing = list(&self.vol, dir, arg.offset, &mut |entry, attr| {
            let attr = attr.map(|a| entry_out(a, self.attr_ttl(a)));
            full = !put_dirent(out, limit, Some(attr), &entry);
            told += u64::from(!full);
            if let (Some(own), Some(entry), false) = (own, attr, full) {
                // at once: while the rest is listed whoever looks it up over this connection must not take it for another's
                own.tell(entry.nodeid);
            }
            !full
        });
        if let Err(e) = listing {
            self.unlist(own, out.body());
            return Err(errno(e));
        }
        self.listings.told(dir, told);
        listed(out, full)
    }
}

/// An empty answer means the end; it must not come from an entry that did not fit.
fn listed(out: &Answer, full: bool) -> Handled {
    if full && out.len() == 0 { Err(Errno::INVAL) } else { Ok(Outcome::Reply) }
}

/// Appends an entry (with attributes where `plus` is given), or says that it does not fit.
fn put_dirent(out: &mut Answer, limit: usize, plus: Option<Option<abi::EntryOut>>, e: &DirEntry<'_>) -> bool {
    let attrs = if plus.is_some() { size_of::<abi::EntryOut>() } else { 0 };
    // what is there so far ends at a multiple of 8, too
    let len = (attrs + size_of::<abi::Dirent>() + e.name.len()).next_multiple_of(8);
    if out.len() + len > limit {
        return false;
    }
    let (attr, rest) = out.extend(len).split_at_mut(attrs);
    let (dirent, rest) = rest.split_at_mut(size_of::<abi::Dirent>());
    let (name, pad) = rest.split_at_mut(e.name.len());
    if let Some(told) = plus {
        // Node 0: no look-up is counted (`.` and `..`).
        attr.copy_from_slice(told.unwrap_or_else(abi::EntryOut::new_zeroed).as_bytes());
    }
    let namelen = e.name.len() as u32;
    let entry = abi::Dirent { ino: e.ino.0, off: e.next, namelen, kind: e.kind.d_type().into() };
    dirent.copy_from_slice(entry.as_bytes());
    name.copy_from_slice(e.name);
    pad.fill(0);
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use braidfs::{FileKind, InodeNo};
    use zerocopy::FromBytes;

    fn entry(name: &[u8]) -> DirEntry<'_> {
        DirEntry { ino: InodeNo(77), generation: 1, kind: FileKind::Dir, name, next: 5 }
    }

    #[test]
    fn entries_are_padded_and_bounded() {
        let mut out = Answer::new(0);
        assert!(put_dirent(&mut out, 64, None, &entry(b"abc")));
        assert_eq!(out.len(), 32);
        assert!(put_dirent(&mut out, 64, None, &entry(b"12345678")));
        assert!(!put_dirent(&mut out, 64, None, &entry(b"")));
        let (d, rest) = abi::Dirent::read_from_prefix(out.body()).unwrap();
        assert_eq!((d.ino, d.off, d.namelen, d.kind, &rest[..3]), (77, 5, 3, 4, &b"abc"[..]));
        assert!(listed(&out, true).is_ok());
        assert!(listed(&Answer::new(0), true).is_err());
    }

    #[test]
    fn plus_without_attributes_names_no_node() {
        let mut out = Answer::new(0);
        assert!(put_dirent(&mut out, 4096, Some(None), &entry(b".")));
        assert_eq!(out.len(), 128 + 32);
        assert_eq!(abi::EntryOut::read_from_prefix(out.body()).unwrap().0.nodeid, 0);
    }
}
