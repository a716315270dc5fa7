//! Extended attributes, and the virtual ones that show and set placement.

use super::acl;
use crate::cell::record::XATTR_BYTES_MAX;
use crate::domain::scratch::SCRATCH_ROOT_XATTRS;
use crate::error::{Error, Result};
use crate::names::checks::check_changeable;
use crate::types::*;
use crate::volume::operation::Op;
use crate::volume::{OpenFile, Volume};
use braidfs_format::inode::encode_xattrs;

/// Virtual: number of the inode's domain (read only).
pub const DOMAIN: &[u8] = b"braidfs.domain";
/// Virtual: placement of new objects in a directory (`spread`, `dirs`, `inherit`, `unset`).
pub const PLACEMENT: &[u8] = b"braidfs.placement";

/// What Linux reads of an ACL from FUSE, and so takes for one (`fuse_set_acl` in fs/fuse/acl.c): a page.
const ACL_BYTES_MAX: usize = 4096;

/// Holds file capabilities.
const CAPABILITY: &[u8] = b"security.capability";

/// Mounted file systems pass only these on; `user.` names reach the virtual ones too.
fn virtual_name(name: &[u8]) -> &[u8] {
    name.strip_prefix(b"user.").filter(|n| n.starts_with(b"braidfs.")).unwrap_or(name)
}

fn check(name: &[u8]) -> Result<()> {
    if name.is_empty() || name.len() > 255 {
        return Err(Error::Range);
    }
    if name.contains(&0) {
        return Err(Error::Invalid("an attribute name with a zero byte"));
    }
    let known: [&[u8]; 4] = [b"user.", b"trusted.", b"security.", b"system.posix_acl_"];
    match known.iter().find(|p| name.starts_with(p)) {
        Some(prefix) if name.len() == prefix.len() => {
            Err(Error::Invalid("an attribute name that ends behind its prefix"))
        }
        Some(_) => Ok(()),
        None => Err(Error::Unsupported("an attribute name outside user., trusted., security. and POSIX ACLs")),
    }
}

impl Volume {
    /// Value of an extended attribute (`user.*`, `trusted.*`, `security.*`, `system.posix_acl_*`). The virtual
    /// attributes `braidfs.domain` (read) and `braidfs.placement` too, also with `user.` before.
    ///
    /// # Errors
    /// [`Error::NoAttr`].
    pub fn getxattr(&self, ino: InodeNo, name: &[u8]) -> Result<Vec<u8>> {
        let i = self.mounted();
        let c = i.cell(ino)?;
        let st = c.state.read();
        match virtual_name(name) {
            DOMAIN => return Ok(c.domain.0.to_string().into_bytes()),
            PLACEMENT if c.kind == FileKind::Dir => {
                return Ok(match st.placement {
                    Placement::Unset => b"unset".to_vec(),
                    Placement::Spread => b"spread".to_vec(),
                    Placement::Dirs => b"dirs".to_vec(),
                    Placement::Inherit => b"inherit".to_vec(),
                });
            }
            _ => {}
        }
        check(name)?;
        st.xattrs.iter().find(|(n, _)| **n == *name).map(|(_, v)| v.to_vec()).ok_or(Error::NoAttr)
    }

    /// Sets one.
    ///
    /// # Errors
    /// [`Error::Exists`], [`Error::NoAttr`] by `mode`; [`Error::NoSpace`] beyond 64 KiB for all of an inode, or 2 KiB of the root
    /// of a tenant without a journal;
    /// [`Error::Unsupported`] for other name spaces; [`Error::Perm`] for append-only and immutable inodes.
    pub fn setxattr(&self, ino: InodeNo, name: &[u8], value: &[u8], mode: XattrMode) -> Result<()> {
        self.set_one(ino, name, value, mode, false)
    }

    /// [`Self::setxattr`] that takes setgid away, both or neither: an ACL is set by somebody who is not of the file's group.
    ///
    /// # Errors
    /// As there.
    pub fn setxattr_kill_sgid(&self, ino: InodeNo, name: &[u8], value: &[u8], mode: XattrMode) -> Result<()> {
        self.set_one(ino, name, value, mode, true)
    }

    fn set_one(&self, ino: InodeNo, name: &[u8], value: &[u8], mode: XattrMode, kill_sgid: bool) -> Result<()> {
        let i = self.mounted();
        i.pace_change(ino);
        let c = i.cell(ino)?;
        let placement = match virtual_name(name) {
            DOMAIN => return Err(Error::Perm),
            PLACEMENT => {
                if c.kind != FileKind::Dir {
                    return Err(Error::NotDir);
                }
                Some(match value {
                    b"unset" => Placement::Unset,
                    b"spread" => Placement::Spread,
                    b"dirs" => Placement::Dirs,
                    b"inherit" => Placement::Inherit,
                    _ => return Err(Error::Invalid("placement is spread, dirs, inherit or unset")),
                })
            }
            _ => {
                check(name)?;
                None
            }
        };
        let most = if name == acl::ACCESS || name == acl::DEFAULT { ACL_BYTES_MAX } else { XATTR_BYTES_MAX };
        if value.len() > most {
            return Err(Error::ArgTooLong);
        }
        let beside = 2 + (value.len() / 4096) as u64 + 16;
        let (mut op, mut st) = Op::on_whole(i, &c, (beside, beside), false)?;
        if st.deleted {
            return Err(Error::NotFound);
        }
        check_changeable(&st)?;
        let has = st.xattrs.iter().any(|(n, _)| **n == *name);
        if placement.is_none() {
            match (mode, has) {
                (XattrMode::Create, true) => return Err(Error::Exists),
                (XattrMode::Replace, false) => return Err(Error::NoAttr),
                _ => {}
            }
            let others: usize =
                st.xattrs.iter().filter(|(n, _)| **n != *name).map(|(n, v)| n.len() + v.len() + 5).sum();
            let most = if i.dom(c.domain).keeps_root(&c) { SCRATCH_ROOT_XATTRS } else { XATTR_BYTES_MAX };
            if others + name.len() + value.len() + 5 > most {
                return Err(Error::NoSpace);
            }
            if name.starts_with(b"system.") && name != acl::ACCESS && name != acl::DEFAULT {
                return Err(Error::Unsupported("a system attribute"));
            }
        }
        if name == acl::ACCESS || name == acl::DEFAULT {
            acl::decode(value)?;
        }
        op.touch(&c, &mut st)?;
        let spill = (encode_xattrs(&st.xattrs).len() + value.len()) / 3900 + 1;
        op.credit(c.domain, spill as u64);
        if let Some(p) = placement {
            st.placement = p;
        } else if name == acl::ACCESS || name == acl::DEFAULT {
            acl::set_acl(&mut st, c.kind, name, value)?;
        } else {
            st.xattrs.retain(|(n, _)| **n != *name);
            st.xattrs.push((name.into(), value.into()));
        }
        if kill_sgid {
            st.mode &= !0o2000;
        }
        st.ctime = i.shared.now();
        st.durability.operation_changes_data();
        i.dom(c.domain).keep_root(&c, &st)
    }

    /// Names of all.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub fn listxattr(&self, ino: InodeNo) -> Result<Vec<Vec<u8>>> {
        let c = self.mounted().cell(ino)?;
        let st = c.state.read();
        let internal = |n: &[u8]| n.starts_with(b"braidfs.");
        Ok(st.xattrs.iter().filter(|(n, _)| !internal(n)).map(|(n, _)| n.to_vec()).collect())
    }

    /// Removes one.
    ///
    /// # Errors
    /// [`Error::NoAttr`]; [`Error::Perm`] for append-only and immutable inodes.
    pub fn removexattr(&self, ino: InodeNo, name: &[u8]) -> Result<()> {
        if virtual_name(name) == PLACEMENT {
            return self.setxattr(ino, name, b"unset", XattrMode::Set);
        }
        check(name)?;
        self.take_xattr(ino, name, false)
    }

    /// Removes the file capabilities (`security.capability`) of a file whose content changes: no user asks for it, so an
    /// append-only file loses them, too.
    ///
    /// # Errors
    /// [`Error::NoAttr`]; [`Error::Perm`] for immutable files.
    pub fn remove_capabilities(&self, ino: InodeNo) -> Result<()> {
        self.take_xattr(ino, CAPABILITY, true)
    }

    /// Whether there is something for [`Self::remove_capabilities`] to do.
    pub fn has_capabilities(&self, file: &OpenFile) -> bool {
        file.cell.state.read().xattrs.iter().any(|(n, _)| **n == *CAPABILITY)
    }

    fn take_xattr(&self, ino: InodeNo, name: &[u8], forced: bool) -> Result<()> {
        let i = self.mounted();
        let c = i.cell(ino)?;
        {
            // a front end asks for this before many writes: the usual answer needs no transaction
            let st = c.state.read();
            if !st.deleted && !st.xattrs.iter().any(|(n, _)| **n == *name) {
                return if forced { Err(Error::NoAttr) } else { check_changeable(&st).and(Err(Error::NoAttr)) };
            }
        }
        let (mut op, mut st) = Op::on_whole(i, &c, (2, 0), true)?;
        if st.deleted {
            return Err(Error::NotFound);
        }
        match st.flags & braidfs_format::inode::IMMUTABLE {
            0 if forced => {}
            _ => check_changeable(&st)?,
        }
        if !st.xattrs.iter().any(|(n, _)| **n == *name) {
            return Err(Error::NoAttr);
        }
        op.touch(&c, &mut st)?;
        st.xattrs.retain(|(n, _)| **n != *name);
        st.ctime = i.shared.now();
        st.durability.operation_changes_data();
        i.dom(c.domain).keep_root(&c, &st)
    }
}
