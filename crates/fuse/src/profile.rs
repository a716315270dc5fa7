//! What a mount gives up of what ext4 does, to be asked less: the table is in `docs/mounted.md`.
//!
//! [`Profile::private`]. The kernel checks no permissions of a mount without `default_permissions`: it lets in whoever
//! may enter, and asks nobody. So nobody but the mounting user may enter, which the kernel sees to
//! (`fuse_permissible_uidgid` in `fs/fuse/dir.c`: all user ids and all group ids of the process are those of the mount).
//! These would let others in, and are refused:
//! - `allow_other` ([`Profile::check`]);
//! - the parameter `allow_sys_admin_access` of the kernel's module, by which every process with CAP_SYS_ADMIN enters,
//!   also one that may not read others' files ([`Profile::check`], and [`Profile::check_module`] when the module is loaded);
//! - export by NFS, whose server looks at files for remote users with root's ids (only the ids for file access are the
//!   remote user's): the kernel is told to have no file handles (INIT flag NO_EXPORT_SUPPORT, Linux 6.9); where it does
//!   not know that there is no private mount ([`Profile::accept`]);
//! - idmapped mounts: the kernel allows them with `default_permissions` only.
//!
//! Without `default_permissions` there are no POSIX ACLs (that INIT flag switches it on), and without extended
//! attributes at all the kernel need not ask for `security.capability` before the first write to each file.

use crate::abi::init;
use crate::mount::MountConfig;
use rustix::io::Errno;
use std::io;

/// The kernel's module parameter; not there before Linux 6.2.
const SYS_ADMIN_ACCESS: &str = "/sys/module/fuse/parameters/allow_sys_admin_access";

/// Who keeps what a program wrote until it reaches the volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Cache {
    /// The kernel, up to a bound: the server is told when a file is closed, synced, or later.
    #[default]
    Back,
    /// The server: it is told of each `write`. The kernel keeps what it has for reads.
    Through,
}

/// How a mount is served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Profile {
    /// For the mounting user alone, whom no permissions hold up.
    pub private: bool,
    /// With `private`: extended attributes, but ACLs, are kept all the same.
    pub user_xattr: bool,
    /// Caching of writes.
    pub cache: Cache,
}

/// What is done about an extended attribute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Xattr {
    /// It is there.
    Kept,
    /// Of this name there is none.
    Refused,
    /// There are none: the kernel is not to ask again.
    None,
}

impl Profile {
    /// Whether the mount can be made so.
    ///
    /// # Errors
    /// What would let somebody in.
    pub(crate) fn check(self, cfg: &MountConfig) -> io::Result<()> {
        if self.private && cfg.allow_other {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "private and allow_other: nobody would be checked: leave one of them out",
            ));
        }
        match std::fs::read_to_string(SYS_ADMIN_ACCESS) {
            // the module may not be loaded yet
            Err(_) => Ok(()),
            told => self.admits_nobody(told),
        }
    }

    /// Whether it is safe with the parameters of the kernel's module: before the first request is answered.
    ///
    /// # Errors
    /// As [`Self::check`], also where it cannot be seen: kernels that can have a private mount have the parameter.
    pub(crate) fn check_module(self) -> io::Result<()> {
        self.admits_nobody(std::fs::read_to_string(SYS_ADMIN_ACCESS))
    }

    fn admits_nobody(self, told: io::Result<String>) -> io::Result<()> {
        match told {
            Err(e) if self.private => {
                let why = format!(
                    "private: cannot see whether processes with CAP_SYS_ADMIN would enter: {SYS_ADMIN_ACCESS}: {e}"
                );
                Err(io::Error::new(e.kind(), why))
            }
            Ok(told) if self.private && told.trim() != "N" => Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                format!("private: processes with CAP_SYS_ADMIN would enter: write N into {SYS_ADMIN_ACCESS}"),
            )),
            _ => Ok(()),
        }
    }

    /// Of the flags of INIT that are `wanted` by default, and those that only profiles want, the ones wanted here.
    pub(crate) fn wanted(self, wanted: u64) -> u64 {
        let mut flags = wanted;
        if self.cache == Cache::Through {
            flags &= !init::WRITEBACK_CACHE;
        }
        if self.private {
            flags &= !(init::POSIX_ACL | init::EXPORT_SUPPORT | init::ALLOW_IDMAP);
            flags |= init::NO_EXPORT_SUPPORT;
        }
        flags
    }

    /// Whether it is safe with what the kernel granted.
    pub(crate) fn accept(self, granted: u64) -> Result<(), Errno> {
        if self.private && granted & init::NO_EXPORT_SUPPORT == 0 {
            return Err(Errno::OPNOTSUPP);
        }
        Ok(())
    }

    /// Why the kernel was refused.
    pub(crate) fn refused(self) -> io::Error {
        let why = "private: this kernel cannot be kept from exporting the mount by NFS (Linux 6.9 can): leave it out";
        io::Error::new(io::ErrorKind::Unsupported, why)
    }

    /// What becomes of requests for the attribute; of no name: of listing all.
    pub(crate) fn xattr(self, name: Option<&[u8]>) -> Xattr {
        match (self.private, self.user_xattr) {
            (false, _) => Xattr::Kept,
            (true, false) => Xattr::None,
            (true, true) if name.is_some_and(|n| n.starts_with(b"system.posix_acl_")) => Xattr::Refused,
            (true, true) => Xattr::Kept,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: u64 =
        init::WRITEBACK_CACHE | init::POSIX_ACL | init::EXPORT_SUPPORT | init::ALLOW_IDMAP | init::MAX_PAGES;

    #[test]
    fn flags_follow_the_profile() {
        let plain = Profile::default();
        assert_eq!(plain.wanted(ALL), ALL);
        assert_eq!(Profile { cache: Cache::Through, ..plain }.wanted(ALL), ALL & !init::WRITEBACK_CACHE);
        let private = Profile { private: true, ..plain };
        let flags = private.wanted(ALL);
        assert_eq!(flags, init::WRITEBACK_CACHE | init::MAX_PAGES | init::NO_EXPORT_SUPPORT);
        assert_eq!((private.accept(flags), plain.accept(0)), (Ok(()), Ok(())));
        assert_eq!(private.accept(flags & !init::NO_EXPORT_SUPPORT), Err(Errno::OPNOTSUPP));
    }

    #[test]
    fn private_is_private() {
        let mut cfg = MountConfig::new("a.img", "/mnt");
        cfg.allow_other = true;
        let private = Profile { private: true, ..Profile::default() };
        assert!(Profile::default().check(&cfg).is_ok() && private.check(&cfg).is_err());
        let told = |p: Profile, text: &str| p.admits_nobody(Ok(text.into())).is_ok();
        assert!(told(private, "N\n") && !told(private, "Y\n") && told(Profile::default(), "Y\n"));
        let unseen = || Err(io::ErrorKind::NotFound.into());
        assert!(private.admits_nobody(unseen()).is_err() && Profile::default().admits_nobody(unseen()).is_ok());
    }

    #[test]
    fn attributes_of_a_private_mount() {
        let acl = Some(&b"system.posix_acl_access"[..]);
        let of = |private, user_xattr, name| Profile { private, user_xattr, cache: Cache::Back }.xattr(name);
        assert_eq!((of(false, false, acl), of(false, true, acl)), (Xattr::Kept, Xattr::Kept));
        assert_eq!((of(true, true, acl), of(true, true, Some(b"user.a"))), (Xattr::Refused, Xattr::Kept));
        assert_eq!((of(true, false, Some(b"user.a")), of(true, false, None)), (Xattr::None, Xattr::None));
    }
}
