//! Entering a domain: an operation holds its gate for reading, as long as it changes something, and names the transaction
//! that runs. Who would find too little room in the journal makes some before, outside of the gate.

use super::Domain;
use super::tx::{self, CELL_COST, Tx};
use crate::cell::cache::Memory;
use crate::error::Result;
use crate::panics::error_of;
use crate::types::InodeNo;
use braidfs_format::BLOCK_BYTES;
use braidfs_sync::{PassReadGuard, rank};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Blocks or extents that an operation may free unannounced ([`Enter::expect_pieces`]).
const FEW_PIECES: usize = 64;

/// A list of orphans takes so many 64ths of the journal at most, where one more is open or held,
const ORPHANS_PART: u64 = 4;
/// and where one more only waits for who has replaced it: what is open does not keep names from being replaced.
const REPLACED_PART: u64 = 5;

/// The right to change a domain: holds its gate, names its running transaction. Dropping it leaves.
pub struct Enter<'a> {
    /// The domain whose gate was entered.
    pub domain: &'a Domain,
    guard: PassReadGuard<'a, Arc<Tx>, rank::Gate>,
    /// Journal bytes that are announced and not yet used.
    expected: std::cell::Cell<usize>,
    /// It was entered by what a panic drops, which may end well.
    in_panic: bool,
}

impl Enter<'_> {
    /// Announces that the operation will free so many blocks or extents, at most [`Domain::pieces_max`]: who wants to enter
    /// from now on finds that much less room in the journal. False where there is too little: the caller lets everything go,
    /// has [`Domain::make_journal_room`] make some, and begins again. A few need no announcement: what [`Domain::enter`]
    /// leaves of the journal is enough for those of many threads, and not for many times the most.
    #[must_use]
    pub fn expect_pieces(&self, pieces: usize) -> bool {
        if pieces <= FEW_PIECES {
            return true;
        }
        let bytes = pieces * tx::PAGE_COST;
        let cost = self.guard.expect(bytes);
        if self.domain.journal_tight(cost) {
            self.guard.expect_no_more(bytes);
            return false;
        }
        self.expected.set(self.expected.get() + bytes);
        true
    }

    /// Whether so much was announced ([`Self::expect_pieces`]).
    pub fn expects(&self, pieces: usize) -> bool {
        pieces > FEW_PIECES && self.expected.get() >= pieces * tx::PAGE_COST
    }

    /// The running transaction.
    pub fn tx(&self) -> &Tx {
        &self.guard
    }

    /// Whether commits may find too few nodes for what inodes' records have no room for.
    #[inline]
    pub fn is_short_of_nodes(&self) -> bool {
        self.domain.nodes.is_short(|| (self.guard.cost() / CELL_COST) as u64)
    }

    /// [`Self::is_short_of_nodes`] of who writes elsewhere what is there.
    pub fn is_short_of_nodes_to_move(&self) -> bool {
        self.domain.nodes.is_short_to_move(|| (self.guard.cost() / CELL_COST) as u64)
    }

    /// Announces a write of the running transaction's data that goes on after leaving.
    pub fn begin_io(&self) -> tx::PendingIo {
        self.guard.begin_io()
    }

    /// The operation may be half done. The gate is left after that: no commit makes it durable.
    #[cold]
    #[inline(never)]
    fn fail_by_panic(&self) {
        self.domain.fail(&error_of("an operation"));
    }
}

impl Drop for Enter<'_> {
    fn drop(&mut self) {
        // what it used of that has been counted by itself
        if self.expected.get() > 0 {
            self.guard.expect_no_more(self.expected.get());
        }
        if std::thread::panicking() && !self.in_panic {
            self.fail_by_panic();
        }
    }
}

impl Domain {
    /// Waits until the journal has room for another operation, doing the commit and checkpoint itself if need be; then
    /// enters. The caller holds no gate of a higher domain and no cell lock.
    ///
    /// # Errors
    /// [`Self::check_writable`].
    #[inline(always)]
    pub fn enter(&self) -> Result<Enter<'_>> {
        loop {
            self.check_writable()?;
            let guard = self.gate.read();
            if self.has_room_for(&guard) {
                return Ok(self.entered(guard));
            }
            drop(guard);
            self.make_room_to_enter()?;
        }
    }

    /// [`Self::enter`] where nothing has to be committed for it.
    ///
    /// # Errors
    /// [`Self::check_writable`].
    pub(crate) fn enter_if_room(&self) -> Result<Option<Enter<'_>>> {
        self.check_writable()?;
        let guard = self.gate.read();
        let fits = self.has_room_for(&guard);
        Ok(fits.then(|| self.entered(guard)))
    }

    fn needs_room(&self) -> bool {
        !self.has_room_for(&self.gate.read())
    }

    /// [`Self::enter`] without a look at the journal's room (recovery; the second domain of an operation).
    ///
    /// # Errors
    /// [`Self::check_writable`].
    pub fn enter_unthrottled(&self) -> Result<Enter<'_>> {
        self.check_writable()?;
        Ok(self.entered(self.gate.read()))
    }

    #[inline(always)]
    fn entered<'a>(&'a self, guard: PassReadGuard<'a, Arc<Tx>, rank::Gate>) -> Enter<'a> {
        Enter { domain: self, guard, expected: std::cell::Cell::new(0), in_panic: std::thread::panicking() }
    }

    /// Makes journal room, or commits because the running transaction holds too much of the cache and lets as much go.
    fn make_room_to_enter(&self) -> Result<()> {
        let most = self.pinned_max.load(Ordering::Relaxed);
        if self.gate.read().cost() <= most {
            return self.make_journal_room();
        }
        self.commit()?;
        self.write_excess_tables()?;
        let cells = most / CELL_COST;
        if self.cells.len() > 2 * cells {
            self.evict(Memory { cells, ..Memory::default() });
        }
        // who enters may have locks that go before
        self.keep_to_ceiling(false);
        Ok(())
    }

    /// Blocks or extents that one operation may free or allocate: their records must fit what [`Self::enter`] leaves of the
    /// journal. Who has more to do does it in several operations.
    pub fn pieces_max(&self) -> usize {
        self.journal.blocks() as usize * 4096 / 8 / tx::PAGE_COST
    }

    /// Whether operations may enter with `tx` running: neither the journal nor the cache becomes too full by it.
    fn has_room_for(&self, tx: &Tx) -> bool {
        let most = self.pinned_max.load(Ordering::Relaxed);
        let fits = |cost: usize| cost <= most && !self.journal_tight(cost);
        fits(tx.cost_at_most()) || fits(tx.cost())
    }

    /// Whether no more inodes may lose their last name while they are open or held. Each commit lists all of those, and the list
    /// before it is kept until it is durable; with one that is under way there are three in the journal, of which
    /// [`Self::journal_tight`] counts the first.
    pub fn has_most_orphans(&self) -> bool {
        self.orphans_fill(ORPHANS_PART)
    }

    /// [`Self::has_most_orphans`] of inodes that are replaced, neither open nor held, and wait for who replaces them.
    pub fn has_most_replaced(&self) -> bool {
        self.orphans_fill(REPLACED_PART)
    }

    fn orphans_fill(&self, part: u64) -> bool {
        let bytes = self.orphans.len() * size_of::<InodeNo>();
        bytes as u64 >= self.journal.blocks() * BLOCK_BYTES as u64 / 64 * part && self.keeps_journal()
    }

    /// Whether a commit of `cost` bytes more could run into the journal's end.
    fn journal_tight(&self, cost: usize) -> bool {
        if !self.fits_journal() {
            return false;
        }
        self.journal.used() + self.commit_blocks(cost) > self.journal_limit()
    }

    /// Blocks of the journal that a commit of `cost` bytes and the one that is under way may need.
    fn commit_blocks(&self, cost: usize) -> u64 {
        let pending = self.pending.load(Ordering::Acquire);
        ((cost + pending) / 4096) as u64 * 5 / 4 + 8
    }

    /// Blocks of the journal that are in use at most before room is made.
    fn journal_limit(&self) -> u64 {
        self.journal.blocks() * 5 / 8
    }

    /// Blocks of the journal that may be in use with a roll-forward chunk: what a commit of `cost` bytes needs stays free. After
    /// a crash recovery commits that much at most.
    pub(super) fn roll_forward_most(&self, cost: usize) -> u64 {
        let commits = if self.fits_journal() { self.commit_blocks(cost) } else { 0 };
        self.journal_limit().saturating_sub(commits)
    }
}

/// Domains that were entered: mostly one or two.
pub type Enters<'a> = smallvec::SmallVec<[Enter<'a>; 2]>;

/// Enters several domains at once, in the order of their numbers (the gate's rank), and adds them to `entered`, which has
/// none.
///
/// # Errors
/// As [`Domain::enter`].
pub fn enter_all<'a>(domains: &[&'a Domain], entered: &mut Enters<'a>) -> Result<()> {
    debug_assert!(entered.is_empty());
    'again: loop {
        for (i, d) in domains.iter().enumerate() {
            debug_assert!(i == 0 || domains[i - 1].id < d.id);
            if i > 0 && d.needs_room() {
                // never wait for a commit with another gate held
                entered.clear();
                d.make_room_to_enter()?;
                continue 'again;
            }
            entered.push(if i == 0 { d.enter()? } else { d.enter_unthrottled()? });
        }
        return Ok(());
    }
}

/// [`enter_all`] that does not wait for a commit or checkpoint: false, with some of them entered, where a journal has too little
/// room.
///
/// # Errors
/// As [`Domain::enter`].
pub fn try_enter_all<'a>(domains: &[&'a Domain], entered: &mut Enters<'a>) -> Result<bool> {
    for d in domains {
        if d.needs_room() {
            return Ok(false);
        }
        entered.push(d.enter_unthrottled()?);
    }
    Ok(true)
}
