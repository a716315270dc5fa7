//! The volume's label, the one thing in the superblocks that changes while the volume is in use.

use super::Volume;
use crate::error::{Error, Result};

/// Longest label, bytes.
pub const LABEL_MAX: usize = 63;

/// Of superblocks: 1 is the one that mkfs writes.
const SEQ: u64 = 2;

impl Volume {
    /// The label, UTF-8 but for damage.
    pub fn label(&self) -> String {
        let mut sb = self.inner().sb;
        sb.label = *self.inner().label.lock();
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
        let i = self.inner();
        if label.len() > LABEL_MAX || label.contains('\0') {
            return Err(Error::Invalid("a label has at most 63 bytes and no NUL"));
        }
        if self.read_only() {
            return Err(Error::ReadOnly);
        }
        let mut current = i.label.lock();
        let mut sb = i.sb;
        sb.label = [0; 64];
        sb.label[..label.len()].copy_from_slice(label.as_bytes());
        for (n, entry) in sb.device_table().iter().enumerate() {
            let device = i.store.device(n);
            for addr in [0, entry.blocks.get().saturating_sub(1)] {
                device.write(addr, &sb.to_block(n as u16, addr, SEQ)).map_err(Error::Io)?;
                device.flush().map_err(Error::Io)?;
            }
        }
        *current = sb.label;
        Ok(())
    }
}
