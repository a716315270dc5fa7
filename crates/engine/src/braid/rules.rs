//! The rules, as pure functions: what must be durable before an event, and what recovery makes of its halves.
//!
//! docs/braid.md has each with its reason; the tables in `tests.rs` have each with its outcome.

use crate::braid::durability::Before;
use crate::braid::frontier::Frontier;
use crate::braid::vacated::Vacated;
use crate::types::*;
use braidfs_format::inode::Tombstone;

/// What an inode has to wait for that takes a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Taking {
    /// These transactions are durable before the name is taken.
    Commits(Frontier),
    /// The name can be taken: an fsync of the inode waits for this.
    Syncs(Before),
}

/// An inode of domain `taker` takes a name that these left, not durably yet. Where one of another domain lives on by
/// another name, a crash could bring it back by this name alone: of two that claim a name recovery keeps the later one, and
/// the earlier would lose the only name that it durably has. One of the same domain is durable with the taker's
/// transaction, so only an fsync waits. One that is gone needs no name, but an fsync of the taker makes its end durable:
/// else the name could come back to it when the taker moves on.
pub fn take_name(vacated: &[Vacated], taker: DomainId) -> Taking {
    let mut first = Frontier::EMPTY;
    let mut before = Before::default();
    for v in vacated {
        match (v.domain == taker, v.alive) {
            (false, true) => first.raise(v.domain, v.tx),
            (false, false) => before.sync_with.raise(v.domain, v.tx),
            (true, true) => before.after = before.after.max(v.tx),
            (true, false) => {}
        }
    }
    if first.is_empty() { Taking::Syncs(before) } else { Taking::Commits(first) }
}

/// A directory moves to another parent in domain `mover`; `last` is the last such move. Moves are totally ordered: else `x`
/// below `y` from one domain and `y` below `x` from another would be a loop without a root. One of the same domain is
/// durable before, or with it. That is not enough where an exchange over domains is `completed` from its other half:
/// recovery must then find every earlier move.
pub fn move_directory(last: Option<(DomainId, TxId)>, mover: DomainId, completed: bool) -> Frontier {
    last.filter(|(domain, _)| *domain != mover || completed).into_iter().collect()
}

/// A directory comes to its end in a transaction of domain `end`: its own where it is removed, the newcomer's where it is
/// replaced. `left`: inodes that left it and live on. They would come back in a directory that is gone. Those of domain
/// `end` are durable with it.
pub fn end_directory(mut left: Frontier, end: DomainId) -> Frontier {
    left.retain(|domain, _| domain != end);
    left
}

/// Whether the names of an inode must be durable before a rename over domains: of both partners of an exchange, since
/// recovery can complete it only for one that exists; of a victim that lives on, which would lose its only durable name.
pub fn names_durable_first(mode: RenameMode, is_victim: bool, is_dir: bool, nlink: u32) -> bool {
    mode == RenameMode::Exchange || (is_victim && nlink > 1 && !is_dir)
}

/// What recovery makes of a name that an inode lost to one of another domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// The newcomer is durable: the name is its own.
    Lost,
    /// It is not, and the inode has the name again.
    Regained,
    /// It is not, and was a partner: it takes the name all the same, since this inode has its own.
    Completed,
}

/// Judges a tombstone.
pub fn judge(t: &Tombstone, exchange: Option<InodeVersion>, survived: bool) -> Fate {
    match survived {
        true => Fate::Lost,
        false if exchange == Some(t.into()) => Fate::Completed,
        false => Fate::Regained,
    }
}

/// Of two inodes that both claim a name, whether the one that the entry names keeps it. Logical times of when their names
/// changed: the later one has it; at the same time the one in the entry, which took it from the other.
pub fn holder_keeps(holder: u64, claimant: u64) -> bool {
    holder >= claimant
}
