//! What a domain asks of the other domains of its volume.

use crate::error::Result;
use crate::types::*;

/// All that a domain needs of its siblings. The volume implements it; in a test of one domain a double does. (What is the
/// same for all domains and says nothing of any is data that they look at all the time, without a call: `Shared`.)
///
/// Transactions of two domains that share an operation are named to each other ([`Tx::peer`](super::tx::Tx::peer)). From then
/// on a domain asks whether the other's is durable: before its inode goes out in an fsync, before its cell leaves memory,
/// before a tombstone or an exchange is forgotten; and it has the other's committed before its own journal's tail moves.
pub trait Peers: std::fmt::Debug + Send + Sync {
    /// The newest durable transaction of another domain. Later than all where there is no such domain: nothing waits for it.
    fn committed_tx(&self, domain: DomainId) -> TxId;

    /// Returns when transaction `tx` of another domain is durable. The caller is inside no gate and holds no cell lock, and
    /// no lock of rank commit or below (docs/locking.md).
    ///
    /// # Errors
    /// Of the device: that domain is then read-only.
    fn commit_upto(&self, domain: DomainId, tx: TxId) -> Result<()>;

    /// Owner of a block group, and so of the inodes there; `None` where it is free or there is no such group.
    fn owner(&self, group: u32) -> Option<DomainId>;
}
