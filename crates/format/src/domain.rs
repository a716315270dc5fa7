//! The header of a domain: its journal and how far it is checkpointed. Shadow pair on device 0.

use crate::block::{BlockHeader, BlockKind, open_pair, seal};
use crate::{BLOCK_BYTES, COUNTER_MAX, Corrupt};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

/// `flags`: unmounted properly, nothing to replay.
pub const CLEAN: u32 = 1;
/// `flags`: a repair of the domain has not ended; mounts read-only until fsck clears it. Nothing else sets it.
pub const FAILED: u32 = 2;
/// `flags`, beside [`FAILED`]: when the repair that set both began, no table was in doubt. So where the segment tables are not those
/// that the header tells of, the repair was cut off, and no write was lost.
pub const TABLES_SOUND: u32 = 8;
/// `flags`: after a crash, the background GC has not finished: entries may be stale.
pub const NEEDS_GC: u32 = 4;

/// `flags`: a checkpoint gave up what the journal told of another domain, which had failed and takes back what it had
/// not committed; or recovery left something to be judged beside such a one. The next mount compares all links across
/// domains.
pub const PEER_FAILED: u32 = 16;

/// `tenant_flags`: the domain was made for tenants: what is of none is not placed there.
pub const KEPT_FOR_TENANTS: u32 = 1;

/// Longest [`DomainHeader::scratch_root`], bytes.
pub const SCRATCH_ROOT_MAX: usize = 3072;

/// How the domain of a tenant uses its journal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum JournalMode {
    /// Metadata is journaled, data is on the device before it: `data=ordered`, whatever the mount says.
    Ordered = 1,
    /// No file is overwritten in place: `data=journal`, whatever the mount says.
    Data = 2,
    /// There is no journal: nothing is promised before an unmount.
    Scratch = 3,
}

impl JournalMode {
    /// Its number on disk; 0: as the mount says.
    pub fn number(mode: Option<Self>) -> u8 {
        mode.map_or(0, |m| m as u8)
    }
    /// What such a number says.
    ///
    /// # Errors
    /// [`Corrupt`] where it says nothing.
    pub fn from_number(n: u8) -> Result<Option<Self>, Corrupt> {
        Ok(match n {
            0 => None,
            1 => Some(Self::Ordered),
            2 => Some(Self::Data),
            3 => Some(Self::Scratch),
            n => return Err(Corrupt::new("domain header", format!("journal mode {n} is none"))),
        })
    }
    /// As options and reports have it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ordered => "ordered",
            Self::Data => "data",
            Self::Scratch => "scratch",
        }
    }
}

impl std::fmt::Display for JournalMode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// One block, in a shadow pair: what a domain must know before it can read its journal.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct DomainHeader {
    /// Magic, kind, place, number and checksum, which [`crate::block`] sets when all else is there.
    pub header: BlockHeader,
    /// The domain's own number.
    pub domain: U16,
    /// Unused, written as 0.
    pub reserved0: U16,
    /// [`CLEAN`], [`FAILED`], [`TABLES_SOUND`], [`NEEDS_GC`], [`PEER_FAILED`].
    pub flags: U32,
    /// First block of the journal in the group space; the journal is one run of blocks.
    pub journal_start: U64,
    /// Blocks of the journal.
    pub journal_blocks: U32,
    /// Unused, written as 0.
    pub reserved1: U32,
    /// Oldest journal position needed; position `p` lies at `journal_start + p % journal_blocks`.
    pub tail_pos: U64,
    /// Where the next chunk goes (right after a clean unmount; else found by the scan).
    pub head_pos: U64,
    /// Newest transaction whose effects are all in the home tables.
    pub checkpointed_tx: U64,
    /// Newest transaction known committed when this was written; the next has a higher number.
    pub last_tx: U64,
    /// Times this domain was opened for writing, recoveries that a crash cut off among them: it is raised, durably, before the
    /// first write of a mount ([`Self::first_tx`]).
    pub mounts: U32,
    /// Unused, written as 0.
    pub reserved2: U32,
    /// Checkpoints so far. Segment tables of a later one are of a checkpoint that did not end.
    pub checkpoint: U64,
    /// Sum of [`crate::group::table_mark`] over the segment tables as that checkpoint left them.
    pub tables: U64,
    /// Root directory of the tenant that the domain is bound to; 0: it is of the common pool.
    pub tenant_root: U64,
    /// Generation of that inode.
    pub tenant_generation: U32,
    /// Bits such as [`KEPT_FOR_TENANTS`].
    pub tenant_flags: U32,
    /// Most blocks that the tenant may use; 0: as many as there are.
    pub tenant_blocks: U64,
    /// Name of the tenant, zero-padded UTF-8.
    pub tenant_name: [u8; 64],
    /// Most inodes that the tenant may have; 0: as many as there are.
    pub tenant_inodes: U64,
    /// What the tenant may do in a second, in the order of [`TENANT_RATES`].
    pub tenant_rates: [TenantRate; 4],
    /// Blocks beyond which the tenant may use for [`Self::tenant_grace`] only; 0: none.
    pub tenant_soft_blocks: U64,
    /// Since when it uses more than that, seconds since 1970; 0: it does not.
    pub tenant_soft_since: U64,
    /// How long the soft limit may be exceeded, seconds.
    pub tenant_grace: U32,
    /// Devices on which the domain may claim groups, a bit for each number; 0: all.
    pub tenant_devices: U32,
    /// Bytes of the cache that others leave the tenant; 0: none.
    pub tenant_memory_min: U64,
    /// Bytes of the cache that it may hold; 0: as many as there are.
    pub tenant_memory_max: U64,
    /// How the tenant's domain uses its journal: 0, or a [`JournalMode`] as a number.
    pub tenant_journal: u8,
    /// Of a domain without a journal, 1: tables and journal say all of it, as an unmount left them. 0: it is in use, or was
    /// when the volume stopped, and then its content is nothing.
    pub scratch_at_rest: u8,
    /// Bytes of [`Self::scratch_root`] that are used.
    pub scratch_root_bytes: U16,
    /// Unused, written as 0.
    pub reserved4: U32,
    /// Of a domain without a journal: the record of its tenant's root directory ([`crate::node::NodeRecord`]), without names
    /// in it. It is made again from that.
    pub scratch_root: [u8; SCRATCH_ROOT_MAX],
    /// Processor time that the server may spend on the tenant, nanoseconds in a second; 0: as much as there is.
    pub tenant_serving: TenantRate,
    /// Unused, written as 0.
    pub reserved: [u8; 688],
}
const _: () = assert!(size_of::<DomainHeader>() == BLOCK_BYTES);

/// Names of [`DomainHeader::tenant_rates`], in their order: bytes read, bytes written, read and write requests, per second.
pub const TENANT_RATES: [&str; 4] = ["read_bps", "write_bps", "read_iops", "write_iops"];

/// The highest rate and burst of [`TenantRate`], bytes or requests.
pub const TENANT_RATE_MAX: u64 = 1 << 50;

/// What a tenant may do in a second.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct TenantRate {
    /// Bytes or requests; 0: no limit.
    pub per_second: U64,
    /// So many of them may come at once; with no limit 0.
    pub burst: U64,
}

impl DomainHeader {
    /// Name of the tenant that the domain is bound to, as text.
    pub fn tenant_name_str(&self) -> String {
        let n = self.tenant_name.iter().position(|&b| b == 0).unwrap_or(self.tenant_name.len());
        String::from_utf8_lossy(&self.tenant_name[..n]).into_owned()
    }
    /// How its journal is used; `None`: as the mount says. A number that [`Self::from_pair`] refuses counts as none.
    pub fn journal_mode(&self) -> Option<JournalMode> {
        JournalMode::from_number(self.tenant_journal).unwrap_or_default()
    }
    /// Whether it is a domain without a journal.
    pub fn is_scratch(&self) -> bool {
        self.journal_mode() == Some(JournalMode::Scratch)
    }
    /// Whether its content is nothing: it has no journal, and was in use when the volume stopped.
    pub fn is_discarded(&self) -> bool {
        self.is_scratch() && self.scratch_at_rest == 0
    }
    /// The record of the root directory, as [`Self::scratch_root`] has it.
    pub fn scratch_root_record(&self) -> &[u8] {
        &self.scratch_root[..usize::from(self.scratch_root_bytes.get()).min(SCRATCH_ROOT_MAX)]
    }
    /// Keeps the record of the root directory; false where it is too long, and nothing has changed.
    pub fn keep_scratch_root(&mut self, record: &[u8]) -> bool {
        if record.len() > SCRATCH_ROOT_MAX {
            return false;
        }
        self.scratch_root.fill(0);
        self.scratch_root[..record.len()].copy_from_slice(record);
        self.scratch_root_bytes = (record.len() as u16).into();
        true
    }
    /// The first transaction of a mount that finds this header, and in the journal no transaction above `newest`. Nobody has
    /// used its number, or a higher one, before: not the transaction that was being committed when the volume stopped, which
    /// may have written node blocks and nothing else, nor a recovery that a crash cut off so early.
    pub fn first_tx(&self, newest: u64) -> u64 {
        newest.max(self.last_tx.get()).saturating_add(2 + u64::from(self.mounts.get()))
    }
    /// All fields 0, the block header too.
    pub fn empty() -> Self {
        Self::new_zeroed()
    }
    /// The fields of a block, whatever they say; `None` where it is too short.
    pub fn of_block(block: &[u8]) -> Option<Self> {
        Self::read_from_prefix(block).ok().map(|(h, _)| h)
    }
    /// The sealed block for copy `copy` of the pair at device block `pair`.
    pub fn to_block(&self, volume: u32, pair: u64, copy: usize, seq: u64) -> Vec<u8> {
        let mut b = self.as_bytes().to_vec();
        seal(&mut b, BlockKind::Domain, self.domain.get(), volume, pair + copy as u64, seq);
        b
    }
    /// Which copy of the pair at device block `pair` holds, its `seq`, and the header.
    ///
    /// # Errors
    /// [`Corrupt`] where no copy holds or the content is of another domain.
    pub fn from_pair(buf: &[u8], volume: u32, pair: u64, domain: u16) -> Result<(usize, u64, Self), Corrupt> {
        let (copy, h) = open_pair(buf, BlockKind::Domain, volume, pair)?;
        let bad = |why: &str| Err(Corrupt::new("domain header", format!("domain {domain}: {why}")));
        let Ok(s) = Self::read_from_bytes(&buf[copy * BLOCK_BYTES..(copy + 1) * BLOCK_BYTES]) else {
            return bad("too short");
        };
        if s.domain.get() != domain {
            return bad("is of another domain");
        }
        if s.journal_blocks.get() < 16 || s.head_pos.get() < s.tail_pos.get() {
            return bad("the journal's bounds do not hold");
        }
        if s.head_pos.get() - s.tail_pos.get() > u64::from(s.journal_blocks.get()) || s.head_pos.get() > COUNTER_MAX {
            return bad("the journal's head and tail are too far apart");
        }
        if [s.last_tx, s.checkpointed_tx, s.checkpoint].iter().any(|n| n.get() > COUNTER_MAX) {
            return bad("no domain has had so many transactions or checkpoints");
        }
        JournalMode::from_number(s.tenant_journal)?;
        Ok((copy, h.seq.get(), s))
    }
}
