//! The superblock: block 0 and the last block of every device of the volume.
//!
//! Device 0 goes on with the domain headers (shadow pairs) and the block group allocation table
//! (shadow pairs); groups start at each device's `data_start`.

use crate::block::{BlockHeader, BlockKind, open, seal};
use crate::geometry::SEGMENT_BLOCKS;
use crate::{BLOCK_BYTES, Corrupt, FORMAT_VERSION, Geometry};
use zerocopy::little_endian::{I64, U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Why a block holds no superblock that was never one.
pub const NO_MAGIC: &str = "no braidfs magic";
/// Most devices of a volume.
pub const MAX_DEVICES: usize = 16;
/// Most blocks of a device.
pub const DEVICE_BLOCKS_MAX: u64 = (1 << 48) - 1;
/// Most domains of a volume.
pub const MAX_DOMAINS: u16 = 256;
/// `incompat` bit: extents carry a CRC-32C per data block.
pub const INCOMPAT_DATA_SUMS: u32 = 1;
/// `incompat` bit: a domain without a journal was made. An older program would believe its tables after a crash. It is never
/// taken back.
pub const INCOMPAT_SCRATCH: u32 = 2;
/// All `incompat` bits that this code knows.
pub const INCOMPAT_KNOWN: u32 = INCOMPAT_DATA_SUMS | INCOMPAT_SCRATCH;

/// All `ro_compat` bits that this code knows.
pub const RO_COMPAT_KNOWN: u32 = 0;

/// `compat` bit: inodes that are immutable or append-only were made. It is never taken back.
pub const COMPAT_GUARDED: u32 = 1;

/// Devices from this size on (1 GiB) have groups aligned to segments.
const ALIGN_FROM_BLOCKS: u64 = (1 << 30) / BLOCK_BYTES as u64;

/// [`DeviceEntry::flags`]: nothing new comes to lie on the device. A program that does not know it may put something there.
pub const DRAINED: u32 = 1;

/// One device of the volume, 64 bytes.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, PartialEq, Eq)]
#[repr(C)]
pub struct DeviceEntry {
    /// The device's own UUID.
    pub uuid: [u8; 16],
    /// Blocks of the device that the volume uses.
    pub blocks: U64,
    /// Device block where its first group starts.
    pub data_start: U64,
    /// Number of its first group.
    pub first_group: U32,
    /// How many groups lie on it.
    pub groups: U32,
    /// Blocks of its last group (a short one has fewer than the others).
    pub last_group_blocks: U32,
    /// Bits: [`DRAINED`] or none.
    pub flags: U32,
    /// Unused, written as 0.
    pub reserved: [u8; 16],
}
const _: () = assert!(size_of::<DeviceEntry>() == 64);

impl DeviceEntry {
    /// Of no device.
    pub fn empty() -> Self {
        Self::new_zeroed()
    }
    /// Device block where the first group of a device with `blocks` blocks starts, behind tables that end at `tables_end`.
    pub fn groups_from(blocks: u64, tables_end: u64) -> u64 {
        let align = if blocks >= ALIGN_FROM_BLOCKS { u64::from(SEGMENT_BLOCKS) } else { 8 };
        tables_end.max(8).next_multiple_of(align)
    }
    /// A device with `blocks` blocks, the last of which is the superblock's replica, and as many groups as fit behind tables
    /// that end at `tables_end`, from group `first_group` on. `None` where not even one does.
    pub fn lay_out(uuid: [u8; 16], blocks: u64, tables_end: u64, first_group: u32, g: Geometry) -> Option<Self> {
        let data_start = Self::groups_from(blocks, tables_end);
        let (groups, last) = g.groups_on(blocks.checked_sub(data_start + 1)?);
        let groups = u32::try_from(groups).ok().filter(|n| *n > 0)?;
        Some(Self {
            uuid,
            blocks: blocks.into(),
            data_start: data_start.into(),
            first_group: first_group.into(),
            groups: groups.into(),
            last_group_blocks: last.into(),
            ..Self::empty()
        })
    }
}

/// The superblock, one block.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct SuperBlock {
    /// Magic, kind, place, number and checksum, which [`crate::block`] sets when all else is there.
    pub header: BlockHeader,
    /// [`FORMAT_VERSION`] of who made it.
    pub version: U32,
    /// Features that an older program must refuse.
    pub incompat: U32,
    /// Features that an older program may ignore.
    pub compat: U32,
    /// Blocks of a whole group.
    pub group_blocks: U32,
    /// UUID of the volume.
    pub uuid: [u8; 16],
    /// Label, zero-padded UTF-8.
    pub label: [u8; 64],
    /// Groups of all devices.
    pub groups: U32,
    /// Domains in use.
    pub domains: U16,
    /// Domain headers that there is room for.
    pub max_domains: U16,
    /// Devices of the volume.
    pub devices: U16,
    /// Which of them this one is.
    pub this_device: U16,
    /// Largest file kept in its inode record, bytes; 0 turns inline data off.
    pub inline_max: U16,
    /// mlogs per domain.
    pub mlogs: U16,
    /// Device block (of device 0) of the first domain header pair.
    pub domain_table: U64,
    /// Device block (of device 0) of the first BAT pair.
    pub bat: U64,
    /// BAT pairs there is room for (growth included).
    pub bat_pairs: U32,
    /// Default placement, [`crate::inode::Placement`].
    pub placement: u8,
    /// Unused, written as 0.
    pub reserved0: [u8; 3],
    /// Key of the directory hash.
    pub hash_key: [u8; 16],
    /// Seconds since 1970 when it was made.
    pub created: I64,
    /// Devices, in the order of their groups.
    pub device: [DeviceEntry; MAX_DEVICES],
    /// Features that an older program must not change; it may read the volume.
    pub ro_compat: U32,
    /// Unused, written as 0.
    pub reserved: [u8; 2876],
}
const _: () = assert!(size_of::<SuperBlock>() == BLOCK_BYTES);

impl SuperBlock {
    /// An all-zero superblock of this format version.
    pub fn empty() -> Self {
        let mut s = Self::new_zeroed();
        s.version = FORMAT_VERSION.into();
        s
    }
    /// First four bytes of the UUID: stamped into every metadata block.
    pub fn volume_id(&self) -> u32 {
        u32::from_le_bytes([self.uuid[0], self.uuid[1], self.uuid[2], self.uuid[3]])
    }
    /// # Errors
    /// Where the group size is none.
    pub fn geometry(&self) -> Result<Geometry, Corrupt> {
        Geometry::new(self.group_blocks.get(), self.groups.get())
    }
    /// The label as text.
    pub fn label_str(&self) -> String {
        let n = self.label.iter().position(|&b| b == 0).unwrap_or(self.label.len());
        String::from_utf8_lossy(&self.label[..n]).into_owned()
    }
    /// # Errors
    /// [`Corrupt`] where the volume has a feature that this program must not change.
    pub fn may_change(&self) -> Result<(), Corrupt> {
        match self.ro_compat.get() & !RO_COMPAT_KNOWN {
            0 => Ok(()),
            new => {
                let why = format!(
                    "features {new:#x}, which this program may only read: mount it read-only (-o ro), check it with -n, or use a newer program"
                );
                Err(Corrupt::new("superblock", why))
            }
        }
    }
    /// The devices in use.
    pub fn device_table(&self) -> &[DeviceEntry] {
        &self.device[..usize::from(self.devices.get()).min(MAX_DEVICES)]
    }
    /// The sealed block for device block `addr` (0 or the last), of the device `this_device`.
    pub fn to_block(&self, this_device: u16, addr: u64, seq: u64) -> Vec<u8> {
        let mut s = *self;
        s.this_device = this_device.into();
        let mut b = s.as_bytes().to_vec();
        seal(&mut b, BlockKind::Super, 0xffff, self.volume_id(), addr, seq);
        b
    }
    /// Decodes and checks a superblock read from device block `addr`.
    ///
    /// # Errors
    /// [`Corrupt`]; a newer version or an unknown feature says so.
    pub fn from_block(block: &[u8], addr: u64) -> Result<Self, Corrupt> {
        let bad = |why: String| Err(Corrupt::new("superblock", why));
        let Ok(s) = Self::read_from_bytes(block) else {
            return bad(format!("{} bytes", block.len()));
        };
        if s.header.magic.get() != crate::block::MAGIC {
            return bad(NO_MAGIC.into());
        }
        open(block, BlockKind::Super, s.volume_id(), addr)?;
        if s.version.get() != FORMAT_VERSION {
            return bad(format!(
                "format version {}, this program knows {FORMAT_VERSION}: use the program that made it",
                s.version.get()
            ));
        }
        if s.incompat.get() & !INCOMPAT_KNOWN != 0 {
            return bad(format!("unknown features {:#x}: use a newer program", s.incompat.get() & !INCOMPAT_KNOWN));
        }
        let g = s.geometry()?;
        let n = s.devices.get();
        if n == 0 || usize::from(n) > MAX_DEVICES || s.this_device.get() >= n {
            return bad(format!("device {} of {n}", s.this_device.get()));
        }
        if s.domains.get() == 0 || s.domains > s.max_domains || s.max_domains.get() > MAX_DOMAINS {
            return bad(format!("{} domains of {}", s.domains.get(), s.max_domains.get()));
        }
        if s.mlogs.get() == 0 || s.mlogs.get() > 64 || usize::from(s.inline_max.get()) > crate::inode::INLINE_MAX {
            return bad(format!("{} mlogs, inline limit {}", s.mlogs.get(), s.inline_max.get()));
        }
        let mut next = 0u32;
        for (i, d) in s.device_table().iter().enumerate() {
            let need = u64::from(d.groups.get().max(1) - 1) * u64::from(g.group_blocks())
                + u64::from(d.last_group_blocks.get());
            let ok = d.first_group.get() == next
                && d.groups.get() > 0
                && d.last_group_blocks.get() <= g.group_blocks()
                && d.last_group_blocks.get() >= crate::geometry::SEGMENT_BLOCKS
                && d.blocks.get() <= DEVICE_BLOCKS_MAX
                && d.data_start.get().checked_add(need).is_some_and(|e| e < d.blocks.get());
            if !ok {
                return bad(format!("device {i} does not fit the volume"));
            }
            next = match next.checked_add(d.groups.get()) {
                Some(n) => n,
                None => return bad("too many groups".into()),
            };
        }
        if next != g.groups {
            return bad(format!("{next} groups on the devices, {} in the volume", g.groups));
        }
        let pairs = u64::from(s.bat_pairs.get());
        let dt_end = s.domain_table.get().saturating_add(2 * u64::from(s.max_domains.get()));
        let bat_end = s.bat.get().saturating_add(2 * pairs);
        let start = s.device[0].data_start.get();
        if s.domain_table.get() == 0
            || dt_end > s.bat.get()
            || bat_end > start
            || pairs * u64::from(crate::bat::ENTRIES_PER_BLOCK) < u64::from(g.groups)
        {
            return bad("volume tables overlap".into());
        }
        Ok(s)
    }
}
