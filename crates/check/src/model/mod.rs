//! What a check holds in memory: the state of the volume as it should be. (Of the inodes: [`inodes`].)
//!
//! A check reads the volume into this model and, where something does not hold, reports it and corrects the *model*.
//! A repair then makes the device equal to the model. So there is one decision per damage, taken in one place.

pub mod inodes;

use crate::collect::load;
use crate::home;
use crate::parts::domain::Domain;
use crate::parts::ino::Ino;
use crate::report::Log;
use braidfs_format::bat::BatEntry;
use braidfs_format::inode::Link;
use braidfs_format::super_block::SuperBlock;
use braidfs_format::{InodeNo, NodeId};
use braidfs_store::Store;
use inodes::Inodes;
use std::collections::HashMap;

/// Names kept for the paths of findings.
const NAMES_MAX: usize = 4096;

/// The volume as the devices have it, and as it should be; what differs is marked and written by the repair.
#[derive(Debug)]
pub struct Model {
    /// The superblock that counts.
    pub sb: SuperBlock,
    /// Where the blocks lie.
    pub store: std::sync::Arc<Store>,
    /// Owners of all groups.
    pub bat: Vec<BatEntry>,
    /// BAT pairs to write again (index).
    pub bat_dirty: Vec<usize>,
    /// Blocks of volume structures to write: device, block, content.
    pub volume_writes: Vec<(usize, u64, Vec<u8>)>,
    /// Domains by number.
    pub domains: Vec<Domain>,
    /// Inodes of all domains.
    pub inodes: Inodes,
    /// The segment tables of a domain are not those that its header tells of.
    pub tables_old: bool,
    /// What was found so far.
    pub log: Log,
}

impl Model {
    /// Domain that owns a node.
    pub fn domain_of(&self, node: impl Into<NodeId>) -> Option<u16> {
        let (group, _) = self.store.geometry().node_place(node)?;
        self.bat.get(group as usize)?.domain.map(|d| d.0)
    }

    /// An inode, whole: read again where it is not, with the entries of a directory.
    pub fn body(&mut self, node: InodeNo) -> Option<&mut Ino> {
        let domain = self.domains.get(usize::from(self.domain_of(node)?))?;
        self.inodes.body(&self.store, domain, node, true)
    }

    /// Removes an inode with its overflow nodes.
    pub fn remove(&mut self, node: InodeNo) {
        if self.body(node).is_none() {
            return;
        }
        let (Some(ino), Some(number)) = (self.inodes.forget(node), self.domain_of(node)) else { return };
        let Some(domain) = self.domains.get_mut(usize::from(number)) else { return };
        for n in ino.overflow().chain([node.node()]) {
            domain.free_node(&self.store, n);
        }
    }

    /// Directory and name of an inode by its first link.
    fn name(&self, node: InodeNo) -> Option<(InodeNo, String)> {
        let shown = |links: &[Link]| links.first().map(|l| (l.parent, String::from_utf8_lossy(&l.name).into_owned()));
        if let Some(ino) = self.inodes.whole(node) {
            return shown(&ino.inode.links);
        }
        self.inodes.get(node).filter(|s| s.links() > 0)?;
        let domain = self.domains.get(usize::from(self.domain_of(node)?))?;
        shown(&load(&self.inodes.rules, &self.store, domain, node).ok()?.inode.links)
    }

    /// Path of an inode for messages, by its first links. `known` are names found before.
    pub fn path(&self, node: InodeNo, known: &mut Names) -> Option<String> {
        home::path(node, |at| {
            if known.0.len() > NAMES_MAX {
                known.0.clear();
            }
            known.0.entry(at).or_insert_with(|| self.name(at)).clone()
        })
    }
}

/// Names of inodes, for paths.
#[derive(Debug, Default)]
pub struct Names(HashMap<InodeNo, Option<(InodeNo, String)>>);
