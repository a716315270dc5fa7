//! What an inode's changes wait for, and what of them is durable.
//!
//! Each change of an inode makes a new *version* in the running transaction of its domain. A version becomes durable with
//! that transaction's commit, or before by a roll-forward record of an fsync. The methods that change something are named
//! by what happened, the others by what is asked; the caller holds the lock of the inode's state, and says which
//! transactions are durable.
//!
//! Invariants:
//! - `dirty_tx` is the transaction that will write the inode, `None` where none will; it is later than `sent_tx`.
//! - nothing is newer than `version`: not what was sent, synced or last changed.
//! - tombstones and an exchange of this mount stand beside the transactions in `waits_for`.

use crate::braid::frontier::Frontier;
use crate::lazy::{Empty, Lazy};
use crate::planted::{Bug, planted};
use crate::types::*;
use braidfs_format::inode::Tombstone;
use std::num::NonZeroU64;

/// What must be durable with an inode that takes a name which another one left.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Before {
    /// A transaction of its own domain.
    pub after: TxId,
    /// Transactions of other domains, with an fsync of the inode.
    pub sync_with: Frontier,
}

/// What an fsync makes durable of an inode.
#[derive(Debug, Clone, Copy)]
pub struct Reach {
    /// Up to this version all of it.
    pub version: u64,
    /// Up to this version all but times.
    pub data: u64,
}

/// What recovery judges by whether other inodes are durable.
#[derive(Debug, Default)]
struct Judged {
    /// Names lost to inodes of other domains, until those are durable.
    tombstones: Vec<Tombstone>,
    /// Partner of an exchange, until both are durable.
    exchange: Option<InodeVersion>,
}

impl Empty for Judged {
    const EMPTY: &'static Self = &Self { tombstones: Vec::new(), exchange: None };
    fn empty() -> Self {
        Self::default()
    }
}

/// See the module. A transaction here says: what counts is durable once this one is; 0 is durable always.
#[derive(Debug)]
pub struct Durability {
    version: u64,
    /// The transaction that has it on its list and will write it. Numbers of transactions begin at 1.
    dirty_tx: Option<NonZeroU64>,
    /// Transaction that last serialised it, and the version that it had then.
    sent_tx: TxId,
    sent_version: u64,
    /// Version that is known durable by a roll-forward record.
    synced: u64,
    /// Version whose names are known durable by a roll-forward record of it or of something below it.
    link_synced: u64,
    /// Version at which the names last changed.
    linked_at: u64,
    /// Version at which something other than times last changed (fdatasync); 0 where a later one is known durable but for
    /// its times.
    data_at: u64,
    /// Version at which times last changed that an fsync makes durable (all but those of reads), where nothing but times
    /// and content changed.
    times_at: u64,
    /// Transaction in which something else last changed than times and the content of blocks that stay where they are. Once
    /// it is durable, all that a crash can bring back of the inode has the same size, the same blocks and the same names.
    changed_tx: TxId,
    /// No block is overwritten in place before this transaction is durable: a roll-forward record holds checksums of the
    /// blocks, the file became one that is overwritten in place, or its blocks moved within it.
    summed_tx: TxId,
    /// Data of that transaction was written before its commit, without a flush or checksums in a roll-forward record.
    early_tx: TxId,
    /// No fsync makes the inode durable before this transaction of its own domain: it took a name that another inode left
    /// then, or its blocks moved within the file.
    after: TxId,
    /// Transactions of other domains that must be durable with an fsync of this inode: an inode there lost the name that
    /// this one has.
    sync_with: Frontier,
    /// Transactions of other domains that the tombstones and the exchange wait for.
    waits_for: Frontier,
    judged: Lazy<Judged>,
    /// Moved to another directory in this mount (a directory).
    moved: bool,
    /// It took the name of an inode that a crash brings back, or of one that had.
    replaces: bool,
}

impl Durability {
    /// Of a new inode: its first version, which nobody has written.
    pub fn new() -> Self {
        Self { version: 1, linked_at: 1, data_at: 1, ..Self::loaded(0, Vec::new(), None) }
    }

    /// Of an inode that was read: its record's version is durable, with all that the record says.
    pub fn loaded(version: u64, tombstones: Vec<Tombstone>, exchange: Option<InodeVersion>) -> Self {
        let none = tombstones.is_empty() && exchange.is_none();
        let judged = if none { Lazy::default() } else { Lazy::of(Judged { tombstones, exchange }) };
        Self {
            version,
            dirty_tx: None,
            sent_tx: TxId(0),
            sent_version: version,
            synced: version,
            link_synced: version,
            linked_at: 0,
            data_at: 0,
            times_at: 0,
            changed_tx: TxId(0),
            summed_tx: TxId(0),
            early_tx: TxId(0),
            after: TxId(0),
            sync_with: Frontier::EMPTY,
            waits_for: Frontier::EMPTY,
            judged,
            moved: false,
            replaces: false,
        }
    }
}

impl Default for Durability {
    fn default() -> Self {
        Self::new()
    }
}

/// Changes, and transactions that write them.
impl Durability {
    /// The module's invariants, as far as one inode shows them.
    fn holds(&self) -> bool {
        let versions = [self.sent_version, self.synced, self.link_synced, self.linked_at, self.data_at, self.times_at];
        self.dirty_tx().is_none_or(|t| t > self.sent_tx) && versions.iter().all(|v| *v <= self.version)
    }

    /// Rises with each change.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// The transaction that will write the inode, if it has changed.
    #[inline]
    pub fn dirty_tx(&self) -> Option<TxId> {
        self.dirty_tx.map(|t| TxId(t.get()))
    }

    /// The transaction that last wrote it, where that is not durable: the node table points to older records until then.
    pub fn sent_tx(&self, committed: TxId) -> Option<TxId> {
        (self.sent_tx > committed).then_some(self.sent_tx)
    }

    /// A transaction has the inode on its list, and will write it.
    pub fn transaction_takes_inode(&mut self, tx: TxId) {
        debug_assert!(self.dirty_tx.is_none() && self.sent_tx < tx, "{tx}: {self:?}");
        self.dirty_tx = NonZeroU64::new(tx.0);
    }

    /// An operation changed the inode.
    pub fn operation_makes_version(&mut self) {
        self.version += 1;
    }

    /// Recovery restores this version, which others may wait for: it makes none of its own.
    pub fn recovery_keeps_version(&mut self, version: u64) {
        self.version = version;
    }

    /// Something else changed than times and the content of blocks that stay, in this transaction.
    pub fn operation_changes_inode(&mut self, tx: TxId) {
        self.changed_tx = tx;
    }

    /// What an fdatasync makes durable changed, with the newest version.
    pub fn operation_changes_data(&mut self) {
        self.data_at = self.version;
    }

    /// Whether the newest version is one of what an fdatasync makes durable. More content may join it while pages are dirty:
    /// an fsync and a transaction that take a version along take all dirty pages with it, and whoever dirties a page again
    /// makes a version.
    #[inline]
    pub fn version_is_of_data(&self) -> bool {
        self.data_at == self.version
    }

    /// Operations of the transaction that will write the directory changed names in it, and made so many versions.
    pub fn operations_changed_directory(&mut self, versions: u64) {
        debug_assert!(self.dirty_tx.is_some(), "{self:?}");
        self.version += versions;
        self.data_at = self.version;
        self.changed_tx = self.dirty_tx().unwrap_or(self.changed_tx);
    }

    /// Names changed, with the newest version.
    pub fn operation_changes_names(&mut self) {
        self.linked_at = self.version;
        if !planted(Bug::NamesForgotten) {
            self.data_at = self.version;
        }
    }

    /// Recovery changed names. They are written by its own transaction: no fdatasync is asked for them.
    pub fn recovery_changes_names(&mut self) {
        self.linked_at = self.version;
    }

    /// Times changed, with the newest version, beside content at most.
    pub fn operation_changes_times(&mut self) {
        self.times_at = self.version;
    }

    /// A transaction wrote the inode as it is. `committed`: the newest durable one.
    pub fn transaction_writes_inode(&mut self, tx: TxId, committed: TxId) {
        debug_assert!(self.dirty_tx() == Some(tx) && committed < tx, "{tx}, {committed} committed: {self:?}");
        self.dirty_tx = None;
        if self.sent_tx <= committed {
            self.link_synced = self.link_synced.max(self.sent_version);
        }
        self.sent_tx = tx;
        self.sent_version = self.version;
        debug_assert!(self.holds(), "{self:?}");
    }

    /// A roll-forward record, with checksums of blocks, goes out beside transaction `tx`.
    pub fn record_sums_blocks(&mut self, tx: TxId) {
        self.summed_tx = tx;
    }

    /// The file is overwritten in place from this transaction on.
    pub fn file_becomes_in_place(&mut self, tx: TxId) {
        self.summed_tx = tx;
    }

    /// Blocks moved within the file. In the durable state they lie elsewhere in it: until this is durable, nothing is
    /// written in place, and an fsync commits (a roll-forward record would not tell the owner tables of blocks that it does
    /// not bring).
    pub fn operation_moves_blocks(&mut self, tx: TxId) {
        self.summed_tx = tx;
        self.inode_follows(tx);
    }

    /// Data of `tx` is written before its commit, and nothing says whether it is whole.
    pub fn memory_writes_data_early(&mut self, tx: TxId) {
        self.early_tx = tx;
    }

    /// An fsync made it durable so far.
    pub fn fsync_reaches(&mut self, reach: Reach) {
        debug_assert!(reach.version <= self.version && reach.data <= self.version, "{reach:?}: {self:?}");
        self.synced = self.synced.max(reach.version);
        if self.data_at <= reach.data {
            self.data_at = 0;
        }
        self.link_synced = self.link_synced.max(reach.data);
        debug_assert!(self.holds(), "{self:?}");
    }

    /// An fsync of something below made the existence and the names durable that a directory had at `version`.
    pub fn fsync_below_reaches(&mut self, version: u64) {
        self.link_synced = self.link_synced.max(version);
    }

    /// Whether all versions are written, by transactions that are durable.
    pub fn is_durable(&self, committed: TxId) -> bool {
        self.dirty_tx.is_none() && self.sent_tx <= committed
    }

    /// Whether no transaction will write it, and the last that did is not `pending`: nothing is newer in memory than on the device.
    pub fn is_written(&self, pending: impl Fn(TxId) -> bool) -> bool {
        self.dirty_tx.is_none() && !pending(self.sent_tx)
    }

    /// Whether the inode's existence and its names are durable.
    pub fn names_durable(&self, committed: TxId) -> bool {
        self.linked_at <= self.link_synced || (self.linked_at <= self.sent_version && self.sent_tx <= committed)
    }

    /// Whether some version is surely durable: a roll-forward record has been written of it, it was read, or a transaction
    /// that is durable wrote it.
    pub fn ever_durable(&self, committed: TxId) -> bool {
        self.synced > 0 || self.link_synced > 0 || (self.sent_tx.0 > 0 && self.sent_tx <= committed)
    }

    /// Whether nothing has written the inode yet, transaction `tx` will be the first to do so, and nothing else is lost with it:
    /// what it replaced, or what that had replaced, is gone with that transaction.
    pub fn is_unwritten(&self, tx: TxId) -> bool {
        let written = self.synced > 0 || self.link_synced > 0 || self.sent_tx.0 > 0;
        !written && !self.replaces && self.dirty_tx() == Some(tx)
    }

    /// Whether no roll-forward record lacks what an fsync makes durable of the inode but for pages and names.
    pub fn synced(&self, data_only: bool) -> bool {
        let seen = if data_only { self.data_at } else { self.version };
        seen <= self.synced
    }

    /// Whether no commit that is under way, or about to begin, carries an older state: `running` is the transaction that
    /// operations change.
    pub fn is_newest(&self, committed: TxId, running: TxId) -> bool {
        self.sent_tx <= committed && self.dirty_tx().is_none_or(|t| t >= running)
    }

    /// Version at which the names last changed: the same as before where no name changed meanwhile.
    pub fn names_changed_at(&self) -> u64 {
        self.linked_at
    }

    /// Whether size, blocks and names are durable as they are.
    pub fn layout_durable(&self, committed: TxId) -> bool {
        self.changed_tx <= committed
    }

    /// Whether a roll-forward record that counts carries checksums of blocks, or they must stay for another reason.
    pub fn sums_count(&self, committed: TxId) -> bool {
        self.summed_tx > committed
    }

    /// Whether data was written that the next roll-forward record must not precede.
    pub fn early_data(&self, committed: TxId) -> bool {
        self.early_tx > committed
    }

    /// Whether times changed that are not durable.
    pub fn times_pending(&self, committed: TxId) -> bool {
        let sent = if self.sent_tx <= committed { self.sent_version } else { 0 };
        self.times_at > self.synced.max(sent)
    }
}

/// Names over domains, and what they wait for.
impl Durability {
    /// No fsync makes the inode durable before this transaction of its own domain.
    pub fn inode_follows(&mut self, tx: TxId) {
        self.after = self.after.max(tx);
    }

    /// An fsync has given the inode's records to nobody but this transaction, which writes it: what they bring counts as written, and
    /// data without checksums may be on the device, or not. A later record would lack the one and vouch for the other.
    pub fn fsync_leaves_to_commit(&mut self, tx: TxId) {
        self.inode_follows(tx);
    }

    /// The inode takes a name that others left.
    pub fn inode_takes_name(&mut self, before: &Before) {
        self.inode_follows(before.after);
        self.sync_with.merge(&before.sync_with);
    }

    /// An inode of `domain` lost, in `tx`, the name that this one takes: an fsync of this one, or of what is below it, makes
    /// that durable, too.
    pub fn inode_syncs_with(&mut self, domain: DomainId, tx: TxId) {
        self.sync_with.raise(domain, tx);
    }

    /// The inode lost a name to one of `domain`, which takes it in `tx`: it counts when that is durable.
    pub fn newcomer_takes_name(&mut self, tombstone: Tombstone, domain: DomainId, tx: TxId) {
        self.judged.tombstones.push(tombstone);
        self.waits_for.raise(domain, tx);
        debug_assert!(self.holds(), "{self:?}");
    }

    /// The inode and one of another domain exchange names; each also has a tombstone for the name that it gave.
    pub fn partner_exchanges_name(&mut self, partner: InodeVersion) {
        debug_assert!(!self.judged.tombstones.is_empty() && !self.waits_for.is_empty(), "{self:?}");
        self.judged.exchange = Some(partner);
    }

    /// The inode takes the name of `victim`, whose domain runs transaction `victim_tx`.
    pub fn inode_replaces(&mut self, victim: &Self, victim_tx: TxId) {
        self.replaces |= !victim.is_unwritten(victim_tx);
    }

    /// A directory moves to another parent: an fsync below it, where that is not durable, commits.
    pub fn directory_moves(&mut self) {
        self.moved = true;
    }

    /// Whether a roll-forward record can say all of a new directory but its entries: it hangs where it was made, nothing
    /// must be durable before it, and no exchange decides about its name.
    pub fn is_plain(&self, committed: TxId) -> bool {
        !self.moved && !self.precedes(committed) && self.judged.exchange.is_none()
    }

    /// The inode has a name that it once lost: whoever took it has lost it again, and no longer decides about it.
    pub fn inode_regains_name(&mut self, parent: InodeNo, name: &[u8]) {
        if let Some(judged) = self.judged.there() {
            judged.tombstones.retain(|t| t.link.parent != parent || *t.link.name != *name);
        }
    }

    /// Forgets what waited for transactions that are durable by now: also tombstones and an exchange that a record brought
    /// along from an earlier mount, which would make recovery misjudge later ones. `recovering`: those count still.
    pub fn forget_durable(&mut self, pending: impl Fn(DomainId, TxId) -> bool, recovering: bool) {
        self.sync_with.retain(&pending);
        self.waits_for.retain(&pending);
        if self.waits_for.is_empty() && !recovering {
            self.forget_judged();
        }
    }

    /// Recovery has carried out the tombstones and the exchange, durably; or nothing waits for them.
    pub fn forget_judged(&mut self) {
        self.judged = Lazy::default();
    }

    /// Names that the inode loses for good when their newcomers are durable.
    pub fn tombstones(&self) -> &[Tombstone] {
        &self.judged.tombstones
    }

    /// Partner of an exchange that is not known durable.
    pub fn exchange(&self) -> Option<InodeVersion> {
        self.judged.exchange
    }

    /// Whether it has tombstones or an exchange.
    pub fn is_judged(&self) -> bool {
        self.judged.exchange.is_some() || !self.judged.tombstones.is_empty()
    }

    /// Transactions of other domains that decide about names of the inode.
    pub fn waits_for(&self) -> &Frontier {
        &self.waits_for
    }

    /// Transactions of other domains that an fsync of the inode, or of what is below it, makes durable.
    pub fn sync_with(&self) -> &Frontier {
        &self.sync_with
    }

    /// Whether a transaction of another domain is pending that an fsync of the inode needs. Only memory knows of it.
    pub fn waits(&self, pending: impl Fn(DomainId, TxId) -> bool) -> bool {
        self.waits_for.any(&pending) || self.sync_with.any(&pending)
    }

    /// Whether a transaction of its own domain is not durable which no fsync may precede.
    pub fn precedes(&self, committed: TxId) -> bool {
        self.after > committed
    }
}
