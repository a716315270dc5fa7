//! Where a new inode goes: its domain, and its number there.

use crate::cell::{Cell, State};
use crate::domain::Domain;
use crate::error::{Error, Result};
use crate::types::*;
use crate::volume::MountedVolume;
use crate::volume::need::Need;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The number of an inode to be made. Who does not make it gives it back.
#[derive(Debug, Clone, Copy)]
pub(super) struct NewInode {
    pub inode: InodeRef,
    /// Where it is.
    pub domain: DomainId,
}

impl MountedVolume {
    /// Where a new object of `dir` goes ([`Placement`]).
    pub(super) fn place(&self, dir: &Cell, st: &State, kind: FileKind) -> DomainId {
        if self.dom(dir.domain).tenant_root().is_some() {
            // a tenant has nothing elsewhere, also where it has no room
            return dir.domain;
        }
        let policy = match st.placement {
            Placement::Unset => self.default_placement(),
            p => p,
        };
        let spread = match policy {
            Placement::Spread => true,
            Placement::Inherit => kind == FileKind::Dir && dir.ino == InodeNo::ROOT,
            _ => kind == FileKind::Dir,
        };
        let n = self.domains.len() as u32;
        // the next domain that can take it
        for _ in 0..if spread { n } else { 0 } {
            let d = &self.domains[(self.next_domain.fetch_add(1, Ordering::Relaxed) % n) as usize];
            if d.failed().is_none() && !d.is_kept() && self.has_room(d) {
                return d.id;
            }
        }
        if self.has_room(self.dom(dir.domain)) {
            return dir.domain;
        }
        self.roomiest().filter(|d| self.has_room(d)).map_or(dir.domain, |d| d.id)
    }

    pub(crate) fn default_placement(&self) -> Placement {
        self.placement
    }

    /// A new inode's number in domain `target`, or in another one where that has none; and the domain. Not inside a gate.
    ///
    /// # Errors
    /// [`Error::NoSpace`] where none has one; of the device.
    pub(super) fn new_inode_anywhere(&self, target: DomainId, near: InodeNo) -> Result<NewInode> {
        let tenant = self.dom(target).tenant_root().is_some();
        if let Some(inode) = self.inode_in(target, near, tenant)? {
            return Ok(NewInode { inode, domain: target });
        }
        if tenant {
            return Err(Error::NoSpace);
        }
        for d in self.domains.iter().filter(|d| d.id != target && d.failed().is_none() && !d.inodes.is_counted()) {
            // no tenant's: nothing is counted there
            if let Some((node, generation)) = d.nodes.alloc(None)? {
                return Ok(NewInode { inode: InodeRef { ino: node.inode(), generation }, domain: d.id });
            }
        }
        let inode = self.new_inode(target, near)?.ok_or(Error::NoSpace)?;
        Ok(NewInode { inode, domain: target })
    }

    /// A new inode's number, its domain given more groups if need be, or those of deleted inodes; `None` where there is
    /// none to be had, also by a tenant's limit. It counts from now on. Not inside a gate.
    ///
    /// # Errors
    /// Of the device.
    pub(super) fn new_inode(&self, d: DomainId, near: InodeNo) -> Result<Option<InodeRef>> {
        self.inode_in(d, near, true)
    }

    /// [`Self::new_inode`]; other domains empty groups for it only where `relocate` says so.
    fn inode_in(&self, d: DomainId, near: InodeNo, relocate: bool) -> Result<Option<InodeRef>> {
        let dom = self.dom(d);
        loop {
            let gone = self.replaced_gone(d);
            if dom.inodes.take() {
                break;
            }
            // files that were replaced are deleted when that is durable
            if !self.end_replaced_since(d, gone) {
                return Ok(None);
            }
        }
        let number = self.new_number(dom, near, relocate);
        if !matches!(number, Ok(Some(_))) {
            dom.inodes.give();
        }
        number
    }

    /// Gives back what [`Self::new_inode`] or [`Self::new_inode_anywhere`] gave, where the inode is not made.
    pub(super) fn give_number_back(&self, d: DomainId, inode: InodeRef) {
        let dom = self.dom(d);
        dom.nodes.release(inode.ino.node());
        dom.inodes.give();
    }

    fn new_number(&self, dom: &Arc<Domain>, near: InodeNo, relocate: bool) -> Result<Option<InodeRef>> {
        let (mut given_back, mut attempt) = (false, 0);
        loop {
            if let Some((node, generation)) = dom.nodes.alloc(Some(near.node()))? {
                return Ok(Some(InodeRef { ino: node.inode(), generation }));
            }
            // only what gives numbers out: else each group would be as good as none, and the next one be claimed
            if !dom.space.at_limit() && self.claim_beyond_limit(dom, Need::Numbers)? {
                continue;
            }
            if !given_back {
                given_back = true;
                self.free_numbers(dom)?;
                continue;
            }
            // for numbers, of which a limit of space is none
            let more = if dom.space.at_limit() {
                self.claim_beyond_limit(dom, Need::Numbers)?
            } else {
                relocate && self.relocate_for(dom, Need::Numbers, attempt)?
            };
            attempt += 1;
            if !more {
                return Ok(None);
            }
        }
    }
}
