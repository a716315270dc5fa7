//! What the online check sees of a volume in use.

#[cfg(test)]
mod tests;

use super::Volume;
use crate::domain::Domain;
use crate::domain::peers::Peers;
use crate::error::Error;
use crate::types::{DomainId, InodeNo, NodeId};
use braidfs_format::Corrupt;
use braidfs_format::inode::Link;
use braidfs_format::node::NodeEntry;
use braidfs_format::super_block::SuperBlock;
use braidfs_store::Store;
use braidfs_store::interface::{LiveVolume, Quiesced};
use std::sync::Arc;

impl Volume {
    fn domain_of_number(&self, domain: DomainId) -> Option<&Arc<Domain>> {
        self.mounted().domains.get(usize::from(domain.0))
    }
}

impl LiveVolume for Volume {
    fn super_block(&self) -> SuperBlock {
        Volume::super_block(self)
    }

    fn store(&self) -> &Arc<Store> {
        &self.mounted().store
    }

    fn quiesce(&self, what: Quiesced, f: &mut dyn FnMut()) {
        let of = |d| self.domain_of_number(d);
        match what {
            Quiesced::Superblocks => {
                let _label = self.mounted().label.lock();
                return f();
            }
            Quiesced::Bat => {
                let _claims = self.mounted().bat.lock();
                return f();
            }
            Quiesced::Tenants => {
                let _one = self.mounted().tenants.lock();
                return f();
            }
            Quiesced::Header(d) => of(d).map(|d| d.between_headers(&mut *f)),
            Quiesced::Tables(d) => of(d).map(|d| d.between_checkpoints(&mut *f)),
            Quiesced::Nodes(d) => of(d).map(|d| d.between_commits(&mut *f)),
        }
        .unwrap_or_else(f)
    }

    fn used_blocks(&self, domain: DomainId) -> u64 {
        let Some(d) = self.domain_of_number(domain) else { return 0 };
        let s = d.space.stats();
        s.blocks.saturating_sub(s.free)
    }

    fn groups(&self, domain: DomainId) -> Vec<u32> {
        self.domain_of_number(domain).map_or_else(Vec::new, |d| d.space.groups())
    }

    fn owner(&self, group: u32) -> Option<DomainId> {
        self.mounted().siblings.owner(group)
    }

    fn epoch(&self, domain: DomainId, group: u32) -> Option<u32> {
        self.domain_of_number(domain)?.space.epoch(group)
    }

    fn journal(&self, domain: DomainId) -> (u64, u64) {
        self.domain_of_number(domain).map_or((0, 0), |d| d.journal_place())
    }

    fn entry(&self, domain: DomainId, node: NodeId) -> braidfs_store::Result<Option<NodeEntry>> {
        let Some(d) = self.domain_of_number(domain) else { return Ok(None) };
        d.nodes.look(node).map_err(|e| match e {
            Error::Io(e) => e.into(),
            Error::Corrupt(e) => e.into(),
            e => Corrupt::new("node table", e.to_string()).into(),
        })
    }

    fn first_link(&self, node: InodeNo) -> Option<Link> {
        let cell = self.mounted().domain_of(node)?.find(node).ok()??;
        let state = cell.state.read();
        state.links.first().cloned()
    }
}
