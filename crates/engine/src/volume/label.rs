//! What changes in the superblocks while the volume is in use: its label, and whether it has guarded inodes.

use super::{MountedVolume, Volume};
use crate::error::{Error, Result};
use braidfs_format::super_block::{COMPAT_GUARDED, INCOMPAT_SCRATCH, SuperBlock};
use std::sync::atomic::Ordering;

/// Longest label, bytes.
pub const LABEL_MAX: usize = 63;

/// Of superblocks: 1 is the one that mkfs writes.
const SEQ: u64 = 2;

impl Volume {
    /// The label, UTF-8 but for damage.
    pub fn label(&self) -> String {
        let mut sb = self.super_block();
        sb.label = *self.mounted().label.lock();
        sb.label_str()
    }

    /// Gives the volume another label; durable when this returns. On each device the superblock first, then its replica: a
    /// crash between them leaves the new label with the old one in the replica, which counts only where the superblock is
    /// damaged.
    ///
    /// # Errors
    /// [`Error::Invalid`] for more than [`LABEL_MAX`] bytes or a NUL; [`Error::ReadOnly`]; of a device: some of its
    /// superblocks may have the new label then.
    pub fn set_label(&self, label: &str) -> Result<()> {
        let i = self.mounted();
        if label.len() > LABEL_MAX || label.contains('\0') {
            return Err(Error::Invalid("a label has at most 63 bytes and no NUL"));
        }
        if self.read_only() {
            return Err(Error::ReadOnly);
        }
        let mut current = i.label.lock();
        let mut new = [0; 64];
        new[..label.len()].copy_from_slice(label.as_bytes());
        i.write_supers(&new, i.compat.load(Ordering::Relaxed))?;
        *current = new;
        Ok(())
    }

    /// Whether the volume has, or once had, inodes that are immutable or append-only: a front end that cannot guard those
    /// without more effort need not make it otherwise. Inodes that got such a flag from versions before this is kept are
    /// not known here.
    pub fn guarded(&self) -> bool {
        self.mounted().compat.load(Ordering::Relaxed) & COMPAT_GUARDED != 0
    }

    /// Has [`Self::guarded`] tell so from now on; durable when this returns. [`Self::setattr`] does it before the first such
    /// flag is set.
    ///
    /// # Errors
    /// As [`Self::set_label`].
    pub fn note_guarded(&self) -> Result<()> {
        if self.guarded() {
            return Ok(());
        }
        if self.read_only() {
            return Err(Error::ReadOnly);
        }
        let i = self.mounted();
        let label = i.label.lock();
        let compat = i.compat.load(Ordering::Relaxed) | COMPAT_GUARDED;
        i.write_supers(&label, compat)?;
        i.compat.store(compat, Ordering::Relaxed);
        Ok(())
    }
}

impl MountedVolume {
    /// Has the superblocks say that there is, or was, a domain without a journal, durably: an older program would believe its
    /// tables after a crash.
    ///
    /// # Errors
    /// Of a device: some of its superblocks may say so then.
    pub(super) fn tell_scratch(&self) -> Result<()> {
        let label = self.label.lock();
        let before = self.sb.read().incompat;
        // also where one says so: a crash may have come before the others did
        self.sb.write().incompat = (before.get() | INCOMPAT_SCRATCH).into();
        self.write_supers(&label, self.compat.load(Ordering::Relaxed))
            .inspect_err(|_| self.sb.write().incompat = before)
    }

    /// What superblocks say besides the volume's size comes into `sb`, a copy which is about to be written as another size: it
    /// may have changed since that copy was made. The caller holds the lock of the label, whose content is `label`, until
    /// `sb` is the superblock of the volume.
    pub(super) fn take_over(&self, sb: &mut SuperBlock, label: &[u8; 64]) {
        let now = self.sb.read();
        (sb.label, sb.compat) = (*label, self.compat.load(Ordering::Relaxed).into());
        // no feature goes while the volume is in use
        sb.incompat = (sb.incompat.get() | now.incompat.get()).into();
        sb.domains = now.domains;
    }

    /// Writes all superblocks, durably. The caller holds the lock of the label.
    pub(super) fn write_supers(&self, label: &[u8; 64], compat: u32) -> Result<()> {
        let mut sb = *self.sb.read();
        (sb.label, sb.compat) = (*label, compat.into());
        (0..sb.device_table().len()).try_for_each(|n| self.write_supers_on(n, &sb))
    }

    /// Writes the superblocks of one device, durably.
    pub(super) fn write_supers_on(&self, n: usize, sb: &SuperBlock) -> Result<()> {
        let device = self.store.device(n);
        for addr in [0, sb.device[n].blocks.get().saturating_sub(1)] {
            device.write(addr, &sb.to_block(n as u16, addr, SEQ)).map_err(Error::Io)?;
            device.flush().map_err(Error::Io)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Cred, FileKind, InodeNo, MkfsOptions, MountOptions, NewNode, SetAttr};
    use braidfs_device::{Device, MemDevice};
    use braidfs_format::inode::{APPEND, IMMUTABLE, NOATIME};
    use std::sync::Arc;

    #[test]
    fn guarded_inodes_are_remembered() {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(16384));
        crate::mkfs::format(std::slice::from_ref(&device), &MkfsOptions::default()).unwrap();
        let mount = |read_only| {
            let options = MountOptions { read_only, ..MountOptions::default() };
            Volume::mount(vec![device.clone()], options).unwrap()
        };
        let v = mount(false);
        let new = NewNode { kind: FileKind::File, mode: 0o600, umask: 0, rdev: 0, target: &[] };
        let file = v.create(InodeNo::ROOT, b"f", &new, &Cred::root()).unwrap().ino;
        let set = |v: &Volume, flags| v.setattr(file, &SetAttr { flags: Some(flags), ..SetAttr::default() }).unwrap();
        set(&v, NOATIME);
        v.sync().unwrap();
        assert!(!v.guarded());
        v.set_label("before").unwrap();
        set(&v, APPEND);
        assert!(v.guarded());
        // before the flag itself is
        v.crash();
        let v = mount(false);
        assert!(v.guarded() && v.label() == "before" && v.getattr(file).unwrap().flags == NOATIME);
        v.set_label("after").unwrap();
        set(&v, IMMUTABLE);
        set(&v, 0);
        v.unmount().unwrap();
        let v = mount(true);
        assert!(v.guarded() && v.label() == "after");
        v.note_guarded().unwrap();
        v.unmount().unwrap();
    }

    /// A copy from before loses nothing that was told of since.
    #[test]
    fn what_was_told_meanwhile_is_taken_over() {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(16384));
        let how = MkfsOptions { data_checksums: true, ..MkfsOptions::default() };
        crate::mkfs::format(std::slice::from_ref(&device), &how).unwrap();
        let v = Volume::mount(vec![device], MountOptions::default()).unwrap();
        let mut copy = v.super_block();
        let before = copy.incompat.get();
        v.mounted().tell_scratch().unwrap();
        v.note_guarded().unwrap();
        v.set_label("new").unwrap();
        v.add_domain().unwrap();
        v.mounted().take_over(&mut copy, &v.mounted().label.lock());
        assert!(before != 0 && copy.incompat.get() == before | INCOMPAT_SCRATCH);
        assert_eq!((copy.label_str(), copy.compat.get() & COMPAT_GUARDED), ("new".to_string(), COMPAT_GUARDED));
        assert_eq!(usize::from(copy.domains.get()), v.domain_count());
        v.unmount().unwrap();
    }

    #[test]
    fn a_read_only_mount_keeps_nothing() {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(16384));
        crate::mkfs::format(std::slice::from_ref(&device), &MkfsOptions::default()).unwrap();
        let options = MountOptions { read_only: true, ..MountOptions::default() };
        let v = Volume::mount(vec![device], options).unwrap();
        assert!(matches!(v.note_guarded(), Err(Error::ReadOnly)) && !v.guarded());
    }
}
