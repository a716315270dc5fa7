//! The owner record: who may write a volume that lies on a device that other machines reach, too.
//!
//! In the block before the first group of each device, which no volume ever used: the tables of device 0 are an odd number of
//! blocks and groups begin at a multiple of 8. Not a structure of the volume: a program that knows nothing of it may leave it,
//! overwrite it or miss it.

use crate::block::{BlockHeader, BlockKind, open, seal};
use crate::super_block::SuperBlock;
use crate::{BLOCK_BYTES, Corrupt};
use zerocopy::little_endian::{I64, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

/// [`OwnerRecord::state`]: nobody has the volume.
pub const GIVEN_BACK: u8 = 0;
/// [`OwnerRecord::state`]: somebody has it, as long as the lease is renewed.
pub const HELD: u8 = 1;

/// The record, one block.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct OwnerRecord {
    /// Its `seq` rises with each renewal.
    pub header: BlockHeader,
    /// Random, of the one who holds the lease.
    pub nonce: [u8; 16],
    /// [`GIVEN_BACK`] or [`HELD`].
    pub state: u8,
    /// Unused, written as 0.
    pub reserved0: [u8; 7],
    /// Milliseconds from a renewal on in which the holder writes.
    pub lease_ms: U32,
    /// Milliseconds that a request of the holder may be in flight at most.
    pub io_ms: U32,
    /// Seconds since 1970 by the holder's clock, for messages.
    pub renewed: I64,
    /// The holder's /proc/sys/kernel/random/boot_id.
    pub boot: [u8; 16],
    /// The holder's process.
    pub pid: U32,
    /// Unused, written as 0.
    pub reserved1: [u8; 4],
    /// Inode number of the PID namespace that `pid` is of.
    pub pid_namespace: U64,
    /// When the process began, in clock ticks since the boot.
    pub started: U64,
    /// Name of the holder's machine, padded with zeros, for messages.
    pub host: [u8; 64],
    /// Unused, written as 0.
    pub reserved: [u8; 3920],
}
const _: () = assert!(size_of::<OwnerRecord>() == BLOCK_BYTES);

impl OwnerRecord {
    /// A record with all bytes zero, which is of nobody.
    pub fn empty() -> Self {
        Self::new_zeroed()
    }

    /// The device block of device `device`'s record; `None` where that is in use.
    pub fn place(sb: &SuperBlock, device: usize) -> Option<u64> {
        let before = match device {
            0 => sb.bat.get().checked_add(2 * u64::from(sb.bat_pairs.get()))?,
            _ => 1,
        };
        let place = sb.device_table().get(device)?.data_start.get().checked_sub(1)?;
        (place >= before).then_some(place)
    }

    /// The sealed block.
    pub fn to_block(&self, volume: u32, addr: u64, seq: u64) -> Vec<u8> {
        let mut block = self.as_bytes().to_vec();
        seal(&mut block, BlockKind::Owner, 0xffff, volume, addr, seq);
        block
    }

    /// Reads device block `addr`.
    ///
    /// # Errors
    /// There is none, or it is damaged, or of another volume.
    pub fn from_block(block: &[u8], volume: u32, addr: u64) -> Result<Self, Corrupt> {
        open(block, BlockKind::Owner, volume, addr)?;
        Self::read_from_bytes(block).map_err(|_| Corrupt::new("owner record", format!("{} bytes", block.len())))
    }

    /// The machine's name as text that can be printed.
    pub fn host_str(&self) -> String {
        let n = self.host.iter().position(|&b| b == 0).unwrap_or(self.host.len());
        String::from_utf8_lossy(&self.host[..n]).chars().filter(|c| !c.is_control()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_read_as_written_and_only_at_its_place() {
        let mut r = OwnerRecord::empty();
        r.state = HELD;
        r.host[..3].copy_from_slice(b"a\x1bb");
        let block = r.to_block(7, 9, 3);
        let back = OwnerRecord::from_block(&block, 7, 9).unwrap();
        assert_eq!((back.state, back.header.seq.get(), back.host_str()), (HELD, 3, "ab".into()));
        assert!(OwnerRecord::from_block(&block, 8, 9).is_err() && OwnerRecord::from_block(&block, 7, 8).is_err());
        assert!(OwnerRecord::from_block(&[0; BLOCK_BYTES], 7, 9).is_err());
    }
}
