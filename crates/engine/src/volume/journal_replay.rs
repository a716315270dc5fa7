//! Replay of journals for a check of an unmounted volume, which cannot use the engine but through this.

use super::Volume;
use crate::domain::recovered::Recovered;
use crate::domain::replay::{self, Tables};
use crate::domain::scratch;
use crate::error::Result;
use crate::nodes::NodeTable;
use crate::space::{Checkpointed, Run, Space};
use crate::types::{BlockAddr, DomainId, MountOptions};
use braidfs_device::Device;
use braidfs_format::domain::DomainHeader;
use braidfs_format::journal::Chunk;
use braidfs_store::Store;
use braidfs_store::interface::{Replay, ReplayError};
use braidfs_sync::workers::Workers;
use std::sync::Arc;

/// Memory for the cache of a replay, which reads the names of all directories once.
const CACHE: u64 = 64 << 20;

/// The engine's own recovery.
#[derive(Debug, Clone, Copy, Default)]
pub struct JournalReplay;

impl Replay for JournalReplay {
    fn replay_volume(&self, devices: &[Arc<dyn Device>]) -> Result<Vec<String>, ReplayError> {
        let options = MountOptions { background: false, cache_bytes: CACHE, ..MountOptions::default() };
        let volume = Volume::mount_to_replay(devices.to_vec(), options)?;
        // beside a domain that does not work a change could make an inode look as if it had taken a name there
        if volume.domains().iter().all(|d| d.failed.is_none())
            && let Err(e) = volume.collect_stale()
        {
            // the check of the names does that, and more
            tracing::debug!("stale entries: {e}");
        }
        let traces = volume.recovery_traces().to_vec();
        volume.unmount()?;
        Ok(traces)
    }

    fn replay_tables(
        &self,
        store: &Arc<Store>,
        domain: DomainId,
        groups: &[u32],
        chunks: &[Chunk],
        header: &mut DomainHeader,
    ) -> Result<u64, ReplayError> {
        let journal = Run { addr: BlockAddr(header.journal_start.get()), len: header.journal_blocks.get() };
        let checkpointed = Checkpointed::of(header);
        let space = Space::open(Arc::clone(store), domain, 1, groups, Some(journal), Some(checkpointed))?;
        let table = NodeTable::open(Arc::clone(store), domain, &space.groups(), &space)?;
        let tables = Tables { geometry: store.geometry(), space: &space, nodes: &table };
        if header.is_discarded() {
            scratch::empty(store, domain, &space, &table, header)?;
            store.flush()?;
            return Ok(header.last_tx.get());
        }
        let workers = Workers::available();
        let newest = replay::replay(domain, chunks, &tables, header, &workers, &mut Recovered::default())?;
        header.checkpoint = header.checkpoint.get().saturating_add(1).into();
        table.write_home()?;
        space.write_home(header.checkpoint.get())?;
        header.tables = space.table_sum().into();
        store.flush()?;
        Ok(newest)
    }
}
