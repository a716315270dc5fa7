//! What `cp -p` keeps beside the content: owner, mode, times and extended attributes, ACLs and file capabilities among them.
//!
//! Nobody but the owner may do anything with a copy before all is set. What a file system does not take is told of, once for each
//! kind.

use crate::text;
use braidfs_vfs::{FileKind, FileSystem, Stat, Xattr};
use std::cell::RefCell;
use std::collections::HashSet;
use std::ffi::CStr;
use std::io;

const ACCESS_ACL: &[u8] = b"system.posix_acl_access";
const DEFAULT_ACL: &[u8] = b"system.posix_acl_default";
const CAPABILITIES: &[u8] = b"security.capability";
/// An ACL without entries, its version alone: setting it takes away what is there.
const NO_ACL: [u8; 4] = 2u32.to_le_bytes();
/// The owning group's entry of an ACL.
const GROUP_OBJ: [u8; 2] = 4u16.to_le_bytes();

/// What could not be kept.
#[derive(Debug, Default)]
pub struct Losses(RefCell<HashSet<Vec<u8>>>);

impl Losses {
    /// Whether there was one.
    pub fn any(&self) -> bool {
        !self.0.borrow().is_empty()
    }

    /// Tells of the first copy that is a file of its own, where it was to be another name of `first`.
    pub fn tell_link(&self, place: &str, first: &str, why: &str) {
        if self.0.borrow_mut().insert(b"a link".to_vec()) {
            crate::complain(format_args!(
                "{place} becomes a file of its own, and no name of {first}: {why} (the first of these: no other is told of)"
            ));
        }
    }

    /// Tells of the first attribute of its kind; `place` is the copy.
    pub fn tell(&self, place: &str, name: &[u8], why: &str) {
        let kind = name.split(|b| *b == b'.').next().unwrap_or(name);
        if self.0.borrow_mut().insert(kind.to_vec()) {
            let (name, kind) = (text::name(name), text::name(kind));
            crate::complain(format_args!(
                "{place} does not get its attribute {name}: {why} (the first of {kind}.*: no other is told of)"
            ));
        }
    }
}

/// Labels and hashes of the host's security modules are no part of a file.
fn is_kept(name: &[u8]) -> bool {
    [ACCESS_ACL, DEFAULT_ACL, CAPABILITIES].contains(&name)
        || name.starts_with(b"user.")
        || name.starts_with(b"trusted.")
}

/// A file that is copied, or a copy.
pub enum Place<'p, F: FileSystem> {
    /// A file or directory, which is open.
    Open(&'p F, &'p F::File),
    /// A symlink or a special file, which nobody opens.
    Named(&'p F, &'p CStr),
}

impl<F: FileSystem> Place<'_, F> {
    /// All extended attributes.
    ///
    /// # Errors
    /// Of the file system.
    pub fn xattrs(&self) -> io::Result<Vec<Xattr>> {
        match self {
            Place::Open(fs, file) => fs.xattrs_of(file),
            Place::Named(fs, path) => fs.xattrs(path),
        }
    }
    fn set_xattr(&self, kind: FileKind, name: &[u8], value: &[u8]) -> io::Result<()> {
        match self {
            Place::Open(fs, file) => fs.set_xattr_of(file, name, value),
            Place::Named(fs, path) => fs.set_xattr(path, kind, name, value),
        }
    }
    fn set_attributes(&self, stat: &Stat) -> io::Result<()> {
        match self {
            Place::Open(fs, file) => fs.set_attributes_of(file, stat),
            Place::Named(fs, path) => fs.set_attributes(path, stat, false),
        }
    }
}

/// Gives a copy what `meta` says and those of `xattrs` that are kept, and takes away the ACLs that its directory
/// gave it. `lost` hears of each attribute that the file system does not take.
///
/// # Errors
/// Owner, mode or times cannot be set.
pub fn keep<F: FileSystem>(
    copy: &Place<'_, F>,
    meta: &Stat,
    xattrs: &[Xattr],
    mut lost: impl FnMut(&[u8], io::Error),
) -> io::Result<()> {
    let given = copy.xattrs()?;
    let found = |of: &[Xattr], name: &[u8]| of.iter().position(|(n, _)| n == name);
    let acls = [ACCESS_ACL, DEFAULT_ACL].map(|name| match found(xattrs, name) {
        Some(i) => Some((name, &xattrs[i].1[..])),
        None => found(&given, name).map(|_| (name, &NO_ACL[..])),
    });
    let plain = || xattrs.iter().filter(|(n, _)| is_kept(n) && ![ACCESS_ACL, DEFAULT_ACL].contains(&&n[..]));
    if acls == [None, None] && plain().next().is_none() {
        return copy.set_attributes(meta);
    }
    let (mut mode, mut set) = (meta.mode, |name: &[u8], value: &[u8]| {
        let done = copy.set_xattr(meta.kind, name, value);
        done.map_err(|e| lost(name, e)).is_ok()
    });
    // The owner first, as it is he who may do something from here on.
    copy.set_attributes(&Stat { mode: mode & 0o700, ..*meta })?;
    for (name, value) in acls.into_iter().flatten() {
        if !set(name, value) && name == ACCESS_ACL {
            mode = without_acl(mode, value);
        }
    }
    for (name, value) in plain().filter(|(n, _)| n != CAPABILITIES) {
        set(name, value);
    }
    copy.set_attributes(&Stat { mode, ..*meta })?;
    // a change of the owner, to the same one too, takes them away
    if let Some(i) = found(xattrs, CAPABILITIES) {
        set(CAPABILITIES, &xattrs[i].1);
    }
    Ok(())
}

/// The mode of a file that loses its access ACL: the group's bits were what anybody may have by the ACL, and the group has an entry
/// there.
fn without_acl(mode: u32, acl: &[u8]) -> u32 {
    let entries = acl.get(4..).unwrap_or_default().chunks_exact(8);
    match entries.into_iter().find(|e| e[..2] == GROUP_OBJ) {
        Some(e) => mode & (!0o070 | (u32::from(e[2]) & 7) << 3),
        None => mode,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_group_gets_no_more_than_its_entry_says() {
        let mut acl = NO_ACL.to_vec();
        for (tag, may) in [(1u16, 6u16), (2, 6), (4, 4), (16, 6), (32, 0)] {
            acl.extend([tag.to_le_bytes(), may.to_le_bytes()].concat());
            acl.extend([0xff; 4]);
        }
        assert_eq!(without_acl(0o2660, &acl), 0o2640);
        assert_eq!(without_acl(0o600, &acl), 0o600);
        assert_eq!((without_acl(0o660, &NO_ACL), without_acl(0o660, b"")), (0o660, 0o660));
    }
}
