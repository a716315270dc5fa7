//! What the checker asks of the engine. The engine implements these, the front ends hand the one to the other.

use crate::{Result, Store};
use braidfs_device::Device;
use braidfs_format::domain::DomainHeader;
use braidfs_format::inode::Link;
use braidfs_format::journal::Chunk;
use braidfs_format::node::NodeEntry;
use braidfs_format::super_block::SuperBlock;
use braidfs_format::{DomainId, InodeNo, NodeId};
use std::sync::Arc;

/// Why a journal cannot be replayed; for messages only.
pub type ReplayError = Box<dyn std::error::Error + Send + Sync>;

/// Replays journals: what a check leaves to the engine before it looks at a volume that was not unmounted.
pub trait Replay: Sync {
    /// Replays the journals of all domains of the volume on `devices`, finishes what operations between domains left to
    /// do, and leaves the volume as an unmount does. What in the journals was cut off by a crash, or is damaged, each in a sentence.
    ///
    /// A domain whose header says that it has failed is replayed as well where it was not closed, and its header says so still
    /// then. Of nodes that node tables have as [`FOUND`](braidfs_format::node::FOUND) no entry is made again.
    ///
    /// # Errors
    /// Where the volume cannot be mounted, or of a device; the volume may then be changed in part.
    fn replay_volume(&self, devices: &[Arc<dyn Device>]) -> Result<Vec<String>, ReplayError>;

    /// Applies the committed transactions among `chunks` to the tables of `domain`, which owns `groups`, by itself: no
    /// names, no other domains, nothing that was only synced. Writes the tables, durably, as a checkpoint whose number
    /// and sum of tables it sets in `header`, which it does not write. The newest transaction that it applied.
    ///
    /// # Errors
    /// Where a transaction does not hold, or of a device; the tables may then be changed in part.
    fn replay_tables(
        &self,
        store: &Arc<Store>,
        domain: DomainId,
        groups: &[u32],
        chunks: &[Chunk],
        header: &mut DomainHeader,
    ) -> Result<u64, ReplayError>;
}

/// What of the device does not change while [`LiveVolume::quiesce`] runs its closure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quiesced {
    /// The superblocks of all devices.
    Superblocks,
    /// The block group allocation table.
    Bat,
    /// The header of a domain: it is not written.
    Header(DomainId),
    /// What the headers of all domains say of tenants, and that the roots of these are there.
    Tenants,
    /// The tables of a domain's groups: no checkpoint runs.
    Tables(DomainId),
    /// A domain's node table entries and the blocks that they lead to: no commit runs.
    Nodes(DomainId),
}

/// A volume in use, as the online check sees it: what its tables in memory say is committed, and moments at which the
/// device cannot change. A domain that the volume does not have owns nothing.
pub trait LiveVolume {
    /// The superblock; its label may be older. A volume in use may grow: then the next call tells the new size.
    fn super_block(&self) -> SuperBlock;

    /// Where the blocks lie.
    fn store(&self) -> &Arc<Store>;

    /// Calls `f` once, while `what` does not change on the device. Those who want to change it wait: `f` reads some
    /// hundred blocks at most.
    fn quiesce(&self, what: Quiesced, f: &mut dyn FnMut());

    /// Blocks of `domain`'s groups that are in use, metadata of the groups not counted.
    fn used_blocks(&self, domain: DomainId) -> u64;

    /// The groups that `domain` owns.
    fn groups(&self, domain: DomainId) -> Vec<u32>;

    /// The domain that owns `group`.
    fn owner(&self, group: u32) -> Option<DomainId>;

    /// The epoch of the claim by which `domain` has `group`; `None` where it has it not.
    fn epoch(&self, domain: DomainId, group: u32) -> Option<u32>;

    /// First block and number of blocks of a domain's journal.
    fn journal(&self, domain: DomainId) -> (u64, u64);

    /// The committed entry of `node` in the node table of `domain`; `None` where its group is not the domain's (any
    /// more).
    ///
    /// # Errors
    /// Of the device, or a table block that does not hold.
    fn entry(&self, domain: DomainId, node: NodeId) -> Result<Option<NodeEntry>>;

    /// The first name of an inode, for messages.
    fn first_link(&self, node: InodeNo) -> Option<Link>;
}
