//! The label of a mounted volume: the ioctls of the kernel that any file system may know, and the client.

use super::{ask, text_of};
use std::fs::File;
use std::io;

/// `FS_IOC_GETFSLABEL` of linux/fs.h.
pub(crate) const FS_IOC_GETFSLABEL: u32 = 0x8100_9431;
/// `FS_IOC_SETFSLABEL`.
pub(crate) const FS_IOC_SETFSLABEL: u32 = 0x4100_9432;
/// `FSLABEL_MAX`, the closing 0 included.
pub(crate) const LABEL_BYTES: usize = 256;

/// The label of the mounted volume of which `dir` is any directory.
///
/// # Errors
/// ENOTTY: the file system there has no label.
pub fn label(dir: &File) -> io::Result<String> {
    let mut text = [0_u8; LABEL_BYTES];
    ask(dir, FS_IOC_GETFSLABEL, &mut text)?;
    Ok(text_of(&text))
}

/// Gives it another label; durable when this returns.
///
/// # Errors
/// EPERM: only root may, and the owner of the root directory. EINVAL: longer than 63 bytes, or with a NUL in it. EROFS; of a device.
pub fn set_label(dir: &File, label: &str) -> io::Result<()> {
    let mut text = [0_u8; LABEL_BYTES];
    let fits = label.len() < LABEL_BYTES && !label.contains('\0');
    text.get_mut(..label.len()).filter(|_| fits).ok_or(io::ErrorKind::InvalidInput)?.copy_from_slice(label.as_bytes());
    ask(dir, FS_IOC_SETFSLABEL, &mut text)
}
