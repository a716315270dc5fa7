//! What a rename means for durability: a pure function from the facts to what each of the inodes waits for.
//!
//! An inode's own record says where it hangs, so a rename becomes durable with the transaction of the moved inode's domain.
//! Whatever else it changes must not be durable without that, or must be taken back by recovery:
//! - an inode of another domain that loses its name gets a *conditional tombstone*, which counts where the newcomer is
//!   durable; the partners of an exchange over domains get one each, and name each other;
//! - an inode of the same domain is durable with the same transaction, and only an fsync could be earlier: it waits. So does the
//!   moved inode where it leaves a whiteout, which is made in its domain.

use crate::braid::durability::Durability;
use crate::braid::vacated::Vacated;
use crate::types::*;
use braidfs_format::inode::{Link, Tombstone};
use smallvec::SmallVec;

/// An inode that a rename changes, as it is with this change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Subject {
    /// It, with the version that has the change.
    pub changed: InodeVersion,
    /// Its domain, and the transaction there that has the change.
    pub domain: DomainId,
    /// Transaction of that domain.
    pub tx: TxId,
    /// It is a directory.
    pub is_dir: bool,
    /// Links before the change.
    pub nlink: u32,
}

/// What a rename meets, as it stands under the directories' locks.
#[derive(Debug, Clone, Copy)]
pub struct Rename {
    /// What has the old name.
    pub moved: Subject,
    /// What has the new name: a victim, or a partner in an exchange.
    pub other: Option<Subject>,
    /// They exchange names.
    pub exchange: bool,
    /// A new inode of the moved one's domain takes the old name.
    pub whiteout: bool,
    /// Old and new name are in two directories.
    pub two_dirs: bool,
    /// Something left `other`, a directory, and lives on, without that being durable yet.
    pub left_other: bool,
}

/// One of the two names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Which {
    /// The moved inode's before.
    Old,
    /// Its name afterwards.
    New,
}

/// What an inode waits for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Waits {
    /// A directory that changes its parent: such moves are ordered.
    pub moves: bool,
    /// No fsync makes it durable before this transaction of its own domain; 0: none.
    pub after: TxId,
    /// An fsync makes this transaction of another domain durable, too.
    pub sync_with: Option<(DomainId, TxId)>,
    /// It loses its name where this change of an inode of another domain is durable.
    pub lost_to: Option<(InodeVersion, DomainId, TxId)>,
    /// It exchanges names with that one.
    pub exchange: bool,
}

impl Waits {
    /// Notes it in an inode that has lost the name `dir/name`.
    pub fn note(&self, d: &mut Durability, dir: InodeNo, name: &[u8]) {
        if self.moves {
            d.directory_moves();
        }
        d.inode_follows(self.after);
        if let Some((domain, tx)) = self.sync_with {
            d.inode_syncs_with(domain, tx);
        }
        if let Some((newcomer, domain, tx)) = self.lost_to {
            let InodeVersion { inode: InodeRef { ino, generation }, version } = newcomer;
            let link = Link { parent: dir, name: name.into() };
            d.newcomer_takes_name(Tombstone { link, newcomer: ino, generation, version }, domain, tx);
            if self.exchange {
                d.partner_exchanges_name(newcomer);
            }
        }
    }
}

/// What a rename means for durability.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    /// What the moved inode waits for.
    pub moved: Waits,
    /// What the other one waits for.
    pub other: Waits,
    /// Who leaves which name.
    pub vacated: SmallVec<[(Which, Vacated); 3]>,
}

impl Plan {
    /// Whether it asks of each inode what can be: domains wait for others, an exchange is one for both, and by tombstones.
    fn holds(&self, r: &Rename) -> bool {
        let apart = |w: &Waits, own: DomainId| {
            w.sync_with.is_none_or(|(d, _)| d != own) && w.lost_to.is_none_or(|(_, d, _)| d != own)
        };
        apart(&self.moved, r.moved.domain)
            && r.other.is_none_or(|o| apart(&self.other, o.domain))
            && (r.other.is_some() || self.other == Waits::default())
            && self.moved.exchange == self.other.exchange
            && !(r.exchange && r.whiteout)
            && (!self.moved.exchange || (self.moved.lost_to.is_some() && self.other.lost_to.is_some()))
    }
}

/// See the module.
pub fn plan(r: &Rename) -> Plan {
    let p = waits(r);
    debug_assert!(p.holds(r), "{r:?}: {p:?}");
    p
}

fn waits(r: &Rename) -> Plan {
    let m = r.moved;
    let mut p = Plan::default();
    p.moved.moves = m.is_dir && r.two_dirs;
    p.vacated.push((Which::Old, Vacated { domain: m.domain, tx: m.tx, alive: true }));
    if r.whiteout {
        p.moved.after = m.tx;
    }
    let Some(o) = r.other else { return p };
    let apart = o.domain != m.domain;
    if apart {
        p.other.lost_to = Some((m.changed, m.domain, m.tx));
        // not only of the newcomer: the vacated name tells whoever has it after that one
        p.moved.sync_with = Some((o.domain, o.tx));
        p.vacated.push((Which::New, Vacated { domain: o.domain, tx: o.tx, alive: r.exchange }));
    }
    match (r.exchange, apart) {
        (true, true) => {
            p.moved.lost_to = Some((o.changed, o.domain, o.tx));
            (p.moved.exchange, p.other.exchange) = (true, true);
        }
        (true, false) => {
            // each has the other's old name
            (p.moved.after, p.other.after) = (m.tx, o.tx);
            p.vacated.push((Which::New, Vacated { domain: o.domain, tx: o.tx, alive: true }));
        }
        // a victim with other names may not lose this one before the newcomer has it
        (false, false) if !o.is_dir => p.other.after = m.tx,
        (false, _) => {}
    }
    if r.exchange {
        p.other.moves = o.is_dir && r.two_dirs;
        return p;
    }
    // what lives on by other names, or what moved out of a directory, would come back: whoever has the name is not
    // durable before
    let comes_back = if o.is_dir { r.left_other } else { !apart && o.nlink > 1 };
    if comes_back {
        p.moved.after = m.tx;
        p.vacated.push((Which::New, Vacated { domain: m.domain, tx: m.tx, alive: true }));
    }
    p
}

#[cfg(test)]
mod tests;
