//! Every link between domains, where the journals do not tell what differs: a checkpoint passed the failure of another domain
//! ([`PEER_FAILED`](braidfs_format::domain::PEER_FAILED)), which takes back what it had not committed.
//!
//! A device had errors, so that what cannot be read is passed over: the volume is mounted all the same, and the next mount looks again.
//! Until then nothing may be built on what it will find: the domains that passed a failure are read-only, and so are those in which
//! something could not be read ([`Unread`]).

use super::{Pass, Unread};
use crate::braid::stale::LOOK_INODES;
use crate::domain::Domain;
use crate::error::Error;
use crate::types::*;
use braidfs_format::inode::Inode;
use braidfs_format::node::{FOUND, NodeEntry, OVERFLOW, REMOTE};
use std::sync::Arc;

impl Unread {
    /// So many more, of a domain.
    pub(super) fn in_domain(&mut self, domain: Option<DomainId>, count: u64) {
        if count > 0 {
            self.count += count;
            self.domains.extend(domain);
        }
    }
}

impl Pass<'_> {
    /// The inodes with tombstones, or with an exchange, of domains that passed a failure: what decides about them may be what is
    /// taken back.
    pub(super) fn judged_before(&mut self) -> Vec<InodeNo> {
        let mut found = Vec::new();
        let passed = |d: &&Arc<Domain>| d.failed().is_none() && d.has_passed_failure();
        for d in self.mounted.domains.iter().filter(passed) {
            let is_judged = |node, e: &NodeEntry| {
                let inode = Inode::decode(&d.nodes.load(node, e)?.payload)?;
                Ok::<_, Error>(!inode.tombstones.is_empty() || inode.exchange.is_some())
            };
            let mut unread = Vec::new();
            d.nodes.for_each_readable(
                &mut |node, e| {
                    if e.flags & OVERFLOW != 0 {
                        return;
                    }
                    match is_judged(node, &e) {
                        Ok(true) => found.push(node.inode()),
                        Ok(false) => {}
                        Err(error) => unread.push((node.inode(), error)),
                    }
                },
                // counted by `relink_all`, which comes by the same blocks
                &mut |_| (),
            );
            unread.iter().for_each(|(ino, error)| self.leave_unread(*ino, error));
        }
        found
    }

    /// Makes the entries of all links of inodes with a parent in another domain, or takes a link away where its directory is gone.
    pub(super) fn relink_all(&mut self) {
        let mounted = self.mounted;
        for d in mounted.domains.iter().filter(|d| d.failed().is_none()) {
            let (mut blocks, mut inodes, mut looked) = (0, 0, 0);
            d.nodes.for_each_readable(
                &mut |node, e| {
                    // nor what was found again in the place of a lost table, and may have been deleted
                    if e.flags & (OVERFLOW | REMOTE | FOUND) != REMOTE {
                        return;
                    }
                    let done = d.find(node.inode()).and_then(|c| c.map_or(Ok(()), |c| self.relink(&c)));
                    if let Err(error) = done {
                        tracing::debug!(%node, %error, "not compared with its links");
                        inodes += 1;
                    }
                    looked += 1;
                    if looked % LOOK_INODES == 0 {
                        mounted.keep_to_budget();
                    }
                },
                &mut |error| {
                    tracing::debug!(%error, "a block of the node table is passed over");
                    blocks += 1;
                },
            );
            self.unread.in_domain(Some(d.id), blocks + inodes);
            self.unread.by_any |= blocks > 0 && d.has_passed_failure();
        }
    }
}
