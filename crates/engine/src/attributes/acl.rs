//! POSIX ACLs: inheritance from a directory's default ACL, and how they follow and answer `chmod`.
//!
//! Values are in the kernel's xattr format: version 2, then entries of (tag u16, permissions u16, id u32).

use crate::cell::State;
use crate::error::{Error, Result};
use crate::types::*;
use braidfs_format::inode::Xattr;

/// Name of the access ACL.
pub const ACCESS: &[u8] = b"system.posix_acl_access";
/// Name of the default ACL.
pub const DEFAULT: &[u8] = b"system.posix_acl_default";

const VERSION: u32 = 2;
const USER_OBJ: u16 = 1;
const USER: u16 = 2;
const GROUP_OBJ: u16 = 4;
const GROUP: u16 = 8;
const MASK: u16 = 16;
const OTHER: u16 = 32;

/// One entry of a POSIX ACL: whom it is for, and what he may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    tag: u16,
    perm: u16,
    id: u32,
}

/// Decodes and checks an ACL.
///
/// # Errors
/// [`Error::Invalid`] where it is none.
pub fn decode(b: &[u8]) -> Result<Vec<Entry>> {
    let bad = Error::Invalid("not a POSIX ACL");
    if b.len() < 4 || !(b.len() - 4).is_multiple_of(8) || b[..4] != VERSION.to_le_bytes() {
        return Err(bad);
    }
    let mut v: Vec<Entry> = Vec::new();
    for e in b[4..].chunks_exact(8) {
        let e = Entry {
            tag: u16::from_le_bytes([e[0], e[1]]),
            perm: u16::from_le_bytes([e[2], e[3]]),
            id: u32::from_le_bytes([e[4], e[5], e[6], e[7]]),
        };
        let known = matches!(e.tag, USER_OBJ | USER | GROUP_OBJ | GROUP | MASK | OTHER);
        if !known || e.perm > 7 || v.last().is_some_and(|l| l.tag > e.tag) {
            return Err(bad);
        }
        v.push(e);
    }
    let one = |t| v.iter().filter(|e| e.tag == t).count();
    let named = one(USER) + one(GROUP) > 0;
    if !v.is_empty()
        && (one(USER_OBJ) != 1 || one(GROUP_OBJ) != 1 || one(OTHER) != 1 || one(MASK) > 1 || (named && one(MASK) == 0))
    {
        return Err(bad);
    }
    Ok(v)
}

fn encode(v: &[Entry]) -> Box<[u8]> {
    let mut b = VERSION.to_le_bytes().to_vec();
    for e in v {
        b.extend_from_slice(&e.tag.to_le_bytes());
        b.extend_from_slice(&e.perm.to_le_bytes());
        b.extend_from_slice(&e.id.to_le_bytes());
    }
    b.into()
}

fn get<'x>(xattrs: &'x [Xattr], name: &[u8]) -> Option<&'x [u8]> {
    xattrs.iter().find(|(n, _)| **n == *name).map(|(_, v)| &**v)
}

fn set(xattrs: &mut Vec<Xattr>, name: &[u8], value: Option<Box<[u8]>>) {
    xattrs.retain(|(n, _)| **n != *name);
    if let Some(v) = value {
        xattrs.push((name.into(), v));
    }
}

/// The permission bits that an access ACL stands for, and whether it says nothing more than they do.
fn to_mode(v: &[Entry]) -> (u32, bool) {
    let perm = |t| v.iter().find(|e| e.tag == t).map(|e| u32::from(e.perm));
    let group = perm(MASK).or(perm(GROUP_OBJ)).unwrap_or(0);
    (perm(USER_OBJ).unwrap_or(0) << 6 | group << 3 | perm(OTHER).unwrap_or(0), v.len() == 3)
}

/// Permissions and ACLs of a new object in `dir`: the default ACL takes the place of the umask.
pub(crate) fn inherit(dir: &State, kind: FileKind, perm: &mut u32, umask: u32) -> Result<Vec<Xattr>> {
    let Some(default) = get(&dir.xattrs, DEFAULT).filter(|_| kind != FileKind::Symlink) else {
        if kind != FileKind::Symlink {
            *perm &= !umask;
        }
        return Ok(Vec::new());
    };
    let mut acl = decode(default)?;
    let masked = acl.iter().any(|e| e.tag == MASK);
    for e in &mut acl {
        let allowed = match e.tag {
            USER_OBJ => *perm >> 6,
            MASK => *perm >> 3,
            GROUP_OBJ if !masked => *perm >> 3,
            OTHER => *perm,
            _ => 7,
        };
        e.perm &= (allowed & 7) as u16;
    }
    let (mode, plain) = to_mode(&acl);
    *perm = (*perm & !0o777) | mode;
    let mut out = Vec::new();
    if !plain {
        out.push((ACCESS.into(), encode(&acl)));
    }
    if kind == FileKind::Dir {
        out.push((DEFAULT.into(), default.into()));
    }
    Ok(out)
}

/// `chmod` on an object with an access ACL changes the ACL's owner, mask (or group) and other entries.
pub(crate) fn chmod(st: &mut State) {
    let Some(Ok(mut acl)) = get(&st.xattrs, ACCESS).map(decode) else { return };
    let masked = acl.iter().any(|e| e.tag == MASK);
    for e in &mut acl {
        match e.tag {
            USER_OBJ => e.perm = (st.mode >> 6 & 7) as u16,
            MASK => e.perm = (st.mode >> 3 & 7) as u16,
            GROUP_OBJ if !masked => e.perm = (st.mode >> 3 & 7) as u16,
            OTHER => e.perm = (st.mode & 7) as u16,
            _ => {}
        }
    }
    set(&mut st.xattrs, ACCESS, Some(encode(&acl)));
}

/// Sets an ACL attribute: the access ACL changes the permission bits and is not kept where it says nothing more.
pub(crate) fn set_acl(st: &mut State, kind: FileKind, name: &[u8], value: &[u8]) -> Result<()> {
    let acl = decode(value)?;
    if name == DEFAULT {
        if kind != FileKind::Dir {
            return Err(Error::Access);
        }
        set(&mut st.xattrs, name, (!acl.is_empty()).then(|| value.into()));
        return Ok(());
    }
    if acl.is_empty() {
        set(&mut st.xattrs, name, None);
        return Ok(());
    }
    let (mode, plain) = to_mode(&acl);
    st.mode = (st.mode & !0o777) | mode;
    set(&mut st.xattrs, name, (!plain).then(|| value.into()));
    Ok(())
}

/// Whether the object's permissions, its ACL included, let `cred` do `want` (bits 4 read, 2 write, 1 execute).
pub(crate) fn allows(st: &State, cred: &Cred, want: u32) -> bool {
    if cred.uid == st.uid {
        return st.mode >> 6 & want == want;
    }
    if let Some(Ok(acl)) = get(&st.xattrs, ACCESS).map(decode) {
        let mask = acl.iter().find(|e| e.tag == MASK).map_or(7, |e| u32::from(e.perm));
        let has = |e: &Entry| u32::from(e.perm) & mask & want == want;
        if let Some(e) = acl.iter().find(|e| e.tag == USER && e.id == cred.uid) {
            return has(e);
        }
        let mut ours = acl.iter().filter(|e| match e.tag {
            GROUP_OBJ => cred.in_group(st.gid),
            GROUP => cred.in_group(e.id),
            _ => false,
        });
        let mut member = false;
        if ours.any(|e| {
            member = true;
            has(e)
        }) {
            return true;
        }
        return !member && st.mode & want == want;
    }
    if cred.in_group(st.gid) {
        return st.mode >> 3 & want == want;
    }
    st.mode & want == want
}
