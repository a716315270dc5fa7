//! The ioctls of block devices. Low-level module.

use rustix::fd::AsFd;
use rustix::io::retry_on_intr;
use rustix::ioctl::{Getter, Opcode, Setter, ioctl, opcode};
use std::io;

/// `_IOR(0x12, 114, size_t)`: the size in bytes, as `u64` in spite of its declared type.
const BLKGETSIZE64: Opcode = opcode::read::<usize>(0x12, 114);
/// `_IO(0x12, 119)`: takes `u64[2]`, the first byte and the number of bytes.
const BLKDISCARD: Opcode = opcode::none(0x12, 119);

/// Bytes of the block device `fd`.
pub(crate) fn size_bytes(fd: impl AsFd) -> io::Result<u64> {
    // SAFETY: BLKGETSIZE64 writes one u64 through its argument.
    let bytes = unsafe { ioctl(fd, Getter::<BLKGETSIZE64, u64>::new()) }?;
    Ok(bytes)
}

/// Discards a range of the block device `fd`.
pub(crate) fn discard(fd: impl AsFd, start: u64, bytes: u64) -> io::Result<()> {
    // SAFETY: BLKDISCARD reads two u64 through its argument and touches no memory of ours.
    retry_on_intr(|| unsafe { ioctl(&fd, Setter::<BLKDISCARD, [u64; 2]>::new([start, bytes])) })?;
    Ok(())
}
