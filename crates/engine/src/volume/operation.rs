//! An operation under way: the domains that it changes, entered, with blocks reserved for the metadata that it will dirty.

use super::MountedVolume;
use crate::braid::durability::Before;
use crate::braid::rules::{Taking, take_name};
use crate::braid::vacated::Vacated;
use crate::cell::{Body, Cell, State};
use crate::domain::enter::{Enters, enter_all};
use crate::domain::packed;
use crate::domain::serialise::writes_in_place;
use crate::domain::tx::Tx;
use crate::domain::{Domain, Enter};
use crate::error::{Error, Result};
use crate::planted::{Bug, planted};
use crate::types::*;
use braidfs_format::dentry::{Dentry, ENTRY_FIXED_BYTES};
use braidfs_format::journal::Record;
use braidfs_sync::BiasedWriteGuard;
use smallvec::SmallVec;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Blocks that a write to a file reserves for metadata before it asks for its own.
pub(crate) const METADATA_OF_WRITE: u64 = 4;

/// So many extents fit a record whatever else is in it; more may be a tree, whose leaves are nodes of their own.
pub(crate) const EXTENTS_OF_RECORD: usize = 32;

/// What a domain has of nodes for leaves of extents ([`Op::leaves_for`]).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Leaves {
    /// As many as are needed, or none is.
    Enough,
    /// Pages that are dirty may come to lie in one extent, or each in its own: once they are written it is known
    /// ([`crate::domain::Domain::flush_cell`]).
    Unknown,
    /// Few: more have to be made ([`MountedVolume::make_nodes`]).
    Few,
}

/// What an operation has done for nodes that its file's extents may need.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Asked {
    Nothing,
    /// Dirty pages were written, so many times, and count as the extents that they have become.
    Written(u8),
    /// More were made, or none can be had and the operation goes on without.
    Nodes,
}

impl Asked {
    /// How often dirty pages are written out for it: others may write to the file each time before it goes on.
    const MOST: u8 = 8;

    /// Whether dirty pages are to be written out, which the caller does; counted.
    pub fn writes_out(&mut self) -> bool {
        let times = match *self {
            Asked::Nothing => 0,
            Asked::Written(times) => times,
            Asked::Nodes => Self::MOST,
        };
        if times < Self::MOST {
            *self = Asked::Written(times + 1);
        }
        times < Self::MOST
    }
}

/// So many names fit a record, and half of another one.
const FEW_LINKS: usize = 16;

thread_local! {
    /// This thread makes the volume read-only, and may change it still.
    static LAST: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// This thread is [`LAST`], until it is dropped, by a panic as well: the thread may serve other volumes after that.
struct Last;

impl Drop for Last {
    fn drop(&mut self) {
        LAST.set(false);
    }
}

/// Does what is left to do on a volume that takes no more operations, by the one that will commit once more.
pub(super) fn as_the_last<R>(work: impl FnOnce() -> R) -> R {
    LAST.set(true);
    let _last = Last;
    work()
}

/// Domains, each once, by their numbers.
fn in_order<'a>(mounted: &'a MountedVolume, ids: &[DomainId]) -> SmallVec<[&'a Domain; 2]> {
    let mut all = SmallVec::new();
    for id in ids {
        if !all.iter().any(|d: &&Domain| d.id == *id) {
            all.push(&**mounted.dom(*id));
        }
    }
    all.sort_unstable_by_key(|d| d.id);
    all
}

/// The domains that an operation changes, entered.
pub(crate) struct Op<'a> {
    pub mounted: &'a MountedVolume,
    enters: Enters<'a>,
    /// Blocks reserved per entered domain, in the same order, and not yet handed to a transaction.
    reserved: SmallVec<[u64; 2]>,
}

impl<'a> Op<'a> {
    /// One that has entered no domain yet. It enters where it stands: an operation costs so little that to move what it has
    /// entered out of a result would be seen.
    #[inline(always)]
    pub fn new(mounted: &'a MountedVolume) -> Self {
        Self { mounted, enters: Enters::new(), reserved: SmallVec::new() }
    }

    /// One that has entered the domain of `cell`, and that inode's state, locked: with `least` blocks reserved, or with those that it
    /// takes to write all of an inode of many names or attributes ([`Self::lacks`]), and `beside` that.
    ///
    /// # Errors
    /// As [`Self::begin`].
    pub fn on_whole(
        mounted: &'a MountedVolume,
        cell: &'a Arc<Cell>,
        (least, beside): (u64, u64),
        essential: bool,
    ) -> Result<(Self, BiasedWriteGuard<'a, State>)> {
        let mut blocks = least;
        loop {
            let mut op = Self::new(mounted);
            op.begin(&[cell.domain], blocks, essential)?;
            let mut st = cell.state.write();
            match op.lacks(cell, &mut st) {
                Some(more) => blocks = more + beside,
                None => return Ok((op, st)),
            }
        }
    }

    /// Enters `domains` and reserves `blocks` metadata blocks in each. Once; where it fails, the caller lets the operation go.
    ///
    /// # Errors
    /// [`Error::NoSpace`] where nothing can be made free.
    #[inline]
    pub fn begin(&mut self, domains: &[DomainId], blocks: u64, essential: bool) -> Result<()> {
        self.begin_lending(domains, blocks, essential, None)
    }

    /// [`Self::begin`] for what is written elsewhere: it is lent blocks as what is overwritten is, and half the reserve of nodes, which
    /// is what [`MountedVolume::make_nodes`] leaves it at least: else each block would have a commit of its own.
    ///
    /// # Errors
    /// As [`Self::begin`].
    pub fn begin_again(&mut self, domain: DomainId, blocks: u64) -> Result<()> {
        self.begin_as(&[domain], blocks, false, Some(domain), |e| e.is_short_of_nodes_to_move())
    }

    /// [`Self::begin`], with the blocks in domain `lender` out of half its reserve where it has no others: what is made goes
    /// to another one, since this has no room.
    ///
    /// # Errors
    /// As [`Self::begin`].
    pub fn begin_lending(
        &mut self,
        domains: &[DomainId],
        blocks: u64,
        essential: bool,
        lender: Option<DomainId>,
    ) -> Result<()> {
        self.begin_as(domains, blocks, essential, lender, |e| e.is_short_of_nodes())
    }

    fn begin_as(
        &mut self,
        domains: &[DomainId],
        blocks: u64,
        essential: bool,
        lender: Option<DomainId>,
        is_short_of_nodes: impl Fn(&Enter<'_>) -> bool,
    ) -> Result<()> {
        let mounted = self.mounted;
        let (mut attempt, mut had_nodes) = (0, false);
        'again: loop {
            // it would make room for what is refused
            self.refuse_if_closed()?;
            self.enter_domains(domains)?;
            self.refuse_if_closed()?;
            // who takes away may go on: what it frees makes room for more
            if !essential && !had_nodes && self.enters.iter().any(&is_short_of_nodes) {
                let short = self.enters.iter().filter(|e| is_short_of_nodes(e)).map(|e| e.domain.id);
                let short: SmallVec<[DomainId; 2]> = short.collect();
                self.leave();
                had_nodes = true;
                short.iter().try_for_each(|d| mounted.make_nodes(mounted.dom(*d)))?;
                continue;
            }
            for e in &self.enters {
                let space = &e.domain.space;
                let lends = lender == Some(e.domain.id) && space.reserve_again(blocks).is_ok();
                if !lends && space.reserve(blocks, essential).is_err() {
                    let short = mounted.dom(e.domain.id);
                    self.leave();
                    mounted.make_room(short, &mut attempt)?;
                    continue 'again;
                }
                self.reserved.push(blocks);
            }
            return Ok(());
        }
    }

    /// [`Self::begin`] in one domain, where it has so many blocks as it is: for what may as well be left. False: as where it fails.
    ///
    /// # Errors
    /// Of the domain; [`Error::ReadOnly`].
    pub fn begin_if_room(&mut self, domain: DomainId, blocks: u64) -> Result<bool> {
        self.enter_domains(&[domain])?;
        self.refuse_if_closed()?;
        let has_room = self.mounted.dom(domain).space.reserve(blocks, false).is_ok();
        if has_room {
            self.reserved.push(blocks);
        }
        Ok(has_room)
    }

    #[inline(always)]
    fn enter_domains(&mut self, ids: &[DomainId]) -> Result<()> {
        debug_assert!(self.enters.is_empty());
        match ids {
            // mostly it is one
            [one, others @ ..] if others.iter().all(|d| d == one) => {
                self.enters.push(self.mounted.dom(*one).enter()?);
                Ok(())
            }
            _ => enter_all(&in_order(self.mounted, ids), &mut self.enters),
        }
    }

    #[inline(always)]
    fn refuse_if_closed(&self) -> Result<()> {
        let closed = self.mounted.shared.closing.load(Ordering::Relaxed) && !LAST.get();
        if closed { Err(Error::ReadOnly) } else { Ok(()) }
    }

    /// Leaves what was entered, and gives back what it had reserved there.
    fn leave(&mut self) {
        self.give_back();
        self.reserved.clear();
        self.enters.clear();
    }

    #[inline(always)]
    fn give_back(&self) {
        for (e, n) in self.enters.iter().zip(&self.reserved) {
            if *n > 0 {
                e.domain.space.unreserve(*n);
            }
        }
    }

    fn index(&self, d: DomainId) -> usize {
        // every domain that an operation touches was entered by `begin`
        self.enters.iter().position(|e| e.domain.id == d).unwrap_or_else(|| unreachable!("{d} was not entered"))
    }
    /// The entered domain.
    pub fn enter(&self, d: DomainId) -> &Enter<'a> {
        &self.enters[self.index(d)]
    }
    /// Its running transaction.
    pub fn tx(&self, d: DomainId) -> &Tx {
        self.enter(d).tx()
    }

    /// Whose transaction an entry of a directory of domain `dir` changes with, where its inode is of another one: `inode`. `None`
    /// also where this was not entered: an entry that is stale says nothing of its inode.
    pub fn concerned(&self, dir: DomainId, inode: DomainId) -> Option<(DomainId, TxId)> {
        let other = self.enters.iter().find(|e| e.domain.id == inode && inode != dir);
        other.map(|e| (inode, e.tx().id))
    }

    /// Marks a cell as changed. Where its record begins a new node block, a reserved block becomes the transaction's.
    pub fn touch(&mut self, cell: &Arc<Cell>, st: &mut State) -> Result<()> {
        self.touch_content(cell, st)?;
        st.durability.operation_changes_inode(self.tx(cell.domain).id);
        Ok(())
    }

    /// [`Self::touch`] by what changes nothing but times and the content of blocks ([`Domain::touch_content`]).
    pub fn touch_content(&mut self, cell: &Arc<Cell>, st: &mut State) -> Result<()> {
        let i = self.index(cell.domain);
        let (d, tx) = (self.enters[i].domain, self.enters[i].tx());
        let fresh = st.durability.dirty_tx() != Some(tx.id);
        d.touch_content(tx, cell, st)?;
        if fresh {
            self.grows_by(cell.domain, packed::weight(st.record_bytes()));
        }
        Ok(())
    }

    /// With how many blocks an operation is to begin that will touch an inode of very many names or attributes, where this one has
    /// fewer: all of them are written with each change. Asked before anything is changed.
    pub fn lacks(&self, cell: &Cell, st: &mut State) -> Option<u64> {
        let i = self.index(cell.domain);
        let blocks = self.whole_record(i, st);
        // and those beside it that were asked for
        (blocks > self.reserved[i]).then_some(blocks + METADATA_OF_WRITE)
    }

    /// [`Self::lacks`] of several inodes, which may be of one domain: so many are to be reserved in each.
    #[inline]
    pub fn lacks_for(&self, touched: &mut [(DomainId, &mut State)]) -> Option<u64> {
        if touched.iter().all(|(_, st)| Self::is_short(st)) { None } else { self.lacks_for_long(touched) }
    }

    #[inline(never)]
    fn lacks_for_long(&self, touched: &mut [(DomainId, &mut State)]) -> Option<u64> {
        let mut sums: SmallVec<[u64; 4]> = SmallVec::from_elem(0, self.enters.len());
        for (d, st) in touched {
            let i = self.index(*d);
            sums[i] += self.whole_record(i, st);
        }
        let lacks = sums.iter().zip(&self.reserved).any(|(blocks, reserved)| blocks > reserved);
        lacks.then(|| sums.iter().max().copied().unwrap_or(0) + METADATA_OF_WRITE)
    }

    /// Whether an inode has few names and no attributes: what all operations reserve is enough for it.
    #[inline]
    pub fn is_short(st: &State) -> bool {
        st.links.len() <= FEW_LINKS && st.xattrs.is_empty()
    }

    /// Blocks that touching an inode of the domain entered at `i` takes, where it is one of many names or attributes; else 0.
    #[inline]
    fn whole_record(&self, i: usize, st: &mut State) -> u64 {
        if Self::is_short(st) {
            return 0;
        }
        if st.durability.dirty_tx() == Some(self.enters[i].tx().id) {
            return 0;
        }
        packed::weight(st.record_bytes()).div_ceil(packed::BLOCK) + 1
    }

    /// Whether content that is added to a file may need leaves of extents, and the domain is short of nodes: the caller lets the
    /// operation go, sees to that, once, before anything is changed, and begins again. `pages` of the file are written, the first
    /// and the last; what is dirty already, or overwritten where it lies, needs no extent. Cheap where there are other nodes.
    #[inline]
    pub fn leaves_for(&self, cell: &Cell, st: &State, pages: Option<(u64, u64)>) -> Leaves {
        if !self.enter(cell.domain).is_short_of_nodes() {
            return Leaves::Enough;
        }
        self.leaves_of_few(cell, st, pages)
    }

    #[inline(never)]
    fn leaves_of_few(&self, cell: &Cell, st: &State, pages: Option<(u64, u64)>) -> Leaves {
        let Body::File(f) = &st.body else { return Leaves::Enough };
        let extents = f.map.extent_count();
        if f.inline.is_some() || extents + f.pages.dirty_count() <= EXTENTS_OF_RECORD {
            return Leaves::Enough;
        }
        let d = self.mounted.dom(cell.domain);
        let in_place = d.in_place(st) && !d.reserves_all();
        let stays = |l| f.map.get(l).is_some_and(|p| !p.unwritten && writes_in_place(&p, in_place));
        match pages {
            Some((first, last)) if (first..=last).all(|l| f.pages.is_dirty(l) || stays(l)) => Leaves::Enough,
            _ if extents <= EXTENTS_OF_RECORD => Leaves::Unknown,
            _ => Leaves::Few,
        }
    }

    /// Before blocks are reserved for pages of a file: what an older transaction has still to write of it is written out.
    /// That takes the reservations of its dirty pages, which the operation would else count on, and lose when it touches
    /// the file. And what an operation that failed had reserved is given back.
    pub fn write_out_older(&mut self, cell: &Arc<Cell>, st: &mut State) -> Result<()> {
        if let Body::File(f) = &mut st.body {
            self.mounted.release_surplus(self.mounted.dom(cell.domain), f);
        }
        match st.durability.dirty_tx() {
            Some(by) if by != self.tx(cell.domain).id => self.touch_content(cell, st),
            _ => Ok(()),
        }
    }

    /// Announces that extents of a file go, as many as one operation may free. False where the journal has too little room
    /// ([`Enter::expect_pieces`]).
    #[must_use]
    pub fn expect_frees(&self, cell: &Cell, st: &State) -> bool {
        let Body::File(f) = &st.body else { return true };
        let e = self.enter(cell.domain);
        e.expect_pieces(f.map.extent_count().min(e.domain.pieces_max()))
    }

    /// The record of a touched cell grows from so many bytes to so many.
    pub fn grows(&mut self, d: DomainId, from: usize, to: usize) {
        self.grows_by(d, packed::weight(to).saturating_sub(packed::weight(from)));
    }

    /// The records of a touched directory weigh more by a name.
    pub fn grows_by_name(&mut self, d: DomainId, name: &[u8]) {
        self.grows_by(d, (ENTRY_FIXED_BYTES + name.len()) as u64);
    }

    #[inline]
    fn grows_by(&mut self, d: DomainId, weight: u64) {
        let blocks = self.tx(d).pack(weight);
        if blocks > 0 {
            self.credit(d, blocks);
        }
    }

    /// Hands reserved blocks to the transaction: it will need them to write metadata.
    pub fn credit(&mut self, d: DomainId, blocks: u64) {
        let i = self.index(d);
        let n = blocks.min(self.reserved[i]);
        self.reserved[i] -= n;
        let (space, tx) = (&self.enters[i].domain.space, self.enters[i].tx());
        tx.add_credits(n);
        // An inode of many records needs more than the operation asked for: out of what is kept for commits, so that the next
        // one finds that gone. Where it is not there the commit looks again.
        if n < blocks && space.reserve_for_commit(blocks - n).is_ok() {
            tx.add_credits(blocks - n);
        }
    }

    /// Takes a block out of those that were reserved, for data; false where none is left.
    pub fn take_reserved(&mut self, d: DomainId) -> bool {
        let i = self.index(d);
        let some = self.reserved[i] > 0;
        self.reserved[i] -= u64::from(some);
        some
    }

    /// Two domains' transactions share this operation: neither checkpoints without the other being durable.
    pub fn braid(&self, a: DomainId, b: DomainId) {
        if a != b {
            let (x, y) = (self.tx(a), self.tx(b));
            x.peer(b, y.id);
            y.peer(a, x.id);
        }
    }

    /// A cross-domain entry changes: both journals say so, for recovery to compare the sides.
    pub fn hint(&self, dir: &Cell, name: &[u8], child: &Cell) {
        if dir.domain != child.domain {
            self.hint_always(dir, name, child);
        }
    }

    /// [`Self::hint`] also within one domain: the fate of the child depends on an inode of another domain.
    pub fn hint_always(&self, dir: &Cell, name: &[u8], child: &Cell) {
        let closed = |d| self.mounted.dom(d).is_closed();
        debug_assert!(
            dir.domain == child.domain
                || !closed(dir.domain) && !closed(child.domain)
                || self.mounted.dom(child.domain).is_tenant_root(child.ino)
                || planted(Bug::ScratchBorderOpen),
            "{} in {} crosses the border of a domain without a journal",
            child.ino,
            dir.ino
        );
        let r = Record::Remote { dir: dir.ino, child: child.ino, generation: child.generation, name: name.into() };
        self.tx(child.domain).record(r.clone());
        if dir.domain != child.domain {
            self.tx(dir.domain).record(r);
            self.braid(dir.domain, child.domain);
        }
    }

    /// An inode of `domain` takes `dir/name`: what must be durable with it. `None` where an inode of another domain left
    /// the name, lives on, and must be made durable first ([`MountedVolume::commit_vacating_rename`]).
    pub fn may_take(&self, dir: &Cell, name: &[u8], domain: DomainId) -> Option<Before> {
        Self::before(&self.mounted.vacated_by(dir, name), domain)
    }

    /// [`Self::may_take`] for who left the name (`crate::braid::vacated`).
    pub fn before(left: &[Vacated], domain: DomainId) -> Option<Before> {
        match take_name(left, domain) {
            Taking::Syncs(before) => Some(before),
            Taking::Commits(_) => None,
        }
    }

    /// Runs `f` on the names of a directory that was touched; new dirty buckets get their reserved blocks.
    pub fn with_index<R>(
        &mut self,
        dir: &Arc<Cell>,
        st: &mut State,
        f: impl FnOnce(&mut crate::cell::dir::DirIndex, &mut dyn FnMut(u64) -> Result<Vec<Dentry>>) -> Result<R>,
    ) -> Result<R> {
        let d = self.enter(dir.domain).domain;
        let mut delta = 0;
        let r = d.with_index(dir.ino, st, |ix, load| {
            let before = ix.dirty_buckets();
            let r = f(ix, load);
            delta = ix.dirty_buckets().saturating_sub(before);
            r
        });
        self.credit(dir.domain, delta as u64);
        r
    }
}

impl Drop for Op<'_> {
    #[inline]
    fn drop(&mut self) {
        self.give_back();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::volume::{OpenFile, Volume};
    use braidfs_device::{Device, MemDevice};
    use std::panic::{AssertUnwindSafe, catch_unwind};

    /// A file of a volume of two domains.
    fn a_file(device: &Arc<dyn Device>) -> (Volume, InodeNo) {
        let o = MkfsOptions { domains: Some(2), ..MkfsOptions::default() };
        crate::mkfs::format(std::slice::from_ref(device), &o).unwrap();
        let v = mount(device);
        let node = NewNode { kind: FileKind::File, mode: 0o644, umask: 0, rdev: 0, target: b"" };
        let ino = v.create(InodeNo::ROOT, b"f", &node, &Cred::root()).unwrap().ino;
        v.sync().unwrap();
        (v, ino)
    }

    fn mount(device: &Arc<dyn Device>) -> Volume {
        Volume::mount(vec![device.clone()], MountOptions { background: false, ..MountOptions::default() }).unwrap()
    }

    fn change(m: &MountedVolume, ino: InodeNo, panics: bool) {
        let c = m.cell(ino).unwrap();
        let mut op = Op::new(m);
        op.begin(&[c.domain], 1, false).unwrap();
        let mut st = c.state.write();
        op.touch(&c, &mut st).unwrap();
        st.mtime.sec = 77;
        assert!(!panics, "on purpose");
    }

    #[test]
    fn no_commit_takes_along_what_a_panic_has_left_half_done() {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(16384));
        let (v, ino) = a_file(&device);
        let m = v.mounted().clone();
        catch_unwind(AssertUnwindSafe(|| change(&m, ino, true))).unwrap_err();
        let of_file = m.cell(ino).unwrap().domain;
        assert!(m.domains.iter().all(|d| d.failed().is_some() == (d.id == of_file)), "it alone");
        v.fsync(ino, false).unwrap_err();
        v.sync().unwrap_err();
        drop(m);
        // an unmount tries it, too
        drop(v);
        let v = mount(&device);
        let c = v.mounted().cell(ino).unwrap();
        assert_ne!(c.state.read().mtime.sec, 77);
    }

    /// What a user's panic drops, such as an open file, may change the volume, and does it as always.
    #[test]
    fn an_operation_of_what_a_panic_drops_is_a_whole_one() {
        struct Changes<'a>(&'a MountedVolume, InodeNo);
        impl Drop for Changes<'_> {
            fn drop(&mut self) {
                change(self.0, self.1, false);
            }
        }
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(16384));
        let (v, ino) = a_file(&device);
        let user = || {
            let _changes = Changes(v.mounted(), ino);
            panic!("a user's bug")
        };
        catch_unwind(AssertUnwindSafe(user)).unwrap_err();
        v.sync().unwrap();
    }

    #[test]
    fn a_thread_is_the_last_one_no_more_after_a_panic() {
        std::panic::catch_unwind(|| as_the_last(|| panic!("on purpose"))).unwrap_err();
        assert!(!LAST.get());
    }

    const AT_ONCE: usize = 32;

    /// On a full volume that `make` has made something on, [`AT_ONCE`] operations that have begun, all of them, before the first one sees
    /// how much its inodes take: they wait for the inodes that `make` tells. Each change of one writes all of its attributes again.
    /// Their commit has the blocks, or some are told that there is no room.
    fn change_at_once<T>(
        make: impl FnOnce(&Volume) -> (Vec<InodeNo>, T),
        change: impl Fn(&Volume, &T, usize) -> Result<()> + Sync,
    ) where
        T: Sync,
    {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(16384));
        let o = MkfsOptions { domains: Some(1), ..MkfsOptions::default() };
        crate::mkfs::format(std::slice::from_ref(&device), &o).unwrap();
        let v = mount(&device);
        let (inodes, made) = make(&v);
        let all: Vec<_> = inodes.iter().map(|ino| v.mounted().cell(*ino).unwrap()).collect();
        let large = v.open(make_in(&v, InodeNo::ROOT, "large", FileKind::File)).unwrap();
        for piece in [1 << 20, 4096] {
            while v.append(&large, &vec![7; piece]).is_ok() {}
        }
        v.sync().unwrap();
        let (held, go) = (std::sync::Barrier::new(all.len() + 1), std::sync::Barrier::new(all.len() + 1));
        let changed = std::sync::atomic::AtomicUsize::new(0);
        std::thread::scope(|s| {
            for c in &all {
                let (held, go) = (&held, &go);
                s.spawn(move || {
                    let _st = c.state.read();
                    held.wait();
                    go.wait();
                });
            }
            held.wait();
            let (v, made, change, changed) = (&v, &made, &change, &changed);
            for n in 0..AT_ONCE {
                s.spawn(move || match change(v, made, n) {
                    Ok(()) => _ = changed.fetch_add(1, Ordering::Relaxed),
                    Err(Error::NoSpace) => {}
                    Err(e) => panic!("{e}"),
                });
            }
            // they have begun by then, or this test sees nothing
            std::thread::sleep(std::time::Duration::from_millis(500));
            go.wait();
        });
        v.sync().unwrap();
        let changed = changed.into_inner();
        assert!(changed > 3, "{changed} were changed");
        drop((large, all));
        v.unmount().unwrap();
    }

    fn make_in(v: &Volume, dir: InodeNo, name: &str, kind: FileKind) -> InodeNo {
        let node = NewNode { kind, mode: 0o755, umask: 0, rdev: 0, target: b"" };
        v.create(dir, name.as_bytes(), &node, &Cred::root()).unwrap().ino
    }

    /// Inodes that are written with long attributes by each change.
    fn long(v: &Volume, kind: FileKind) -> Vec<InodeNo> {
        let long = |n: usize| {
            let ino = make_in(v, InodeNo::ROOT, &format!("{n}"), kind);
            v.setxattr(ino, b"user.long", &vec![n as u8; 60_000], XattrMode::Set).unwrap();
            v.setxattr(ino, b"user.short", b"x", XattrMode::Set).unwrap();
            if kind == FileKind::Dir {
                make_in(v, ino, "f", FileKind::File);
            }
            v.sync().unwrap();
            ino
        };
        (0..AT_ONCE).map(long).collect()
    }

    #[test]
    fn many_inodes_of_long_attributes_change_at_once_while_nothing_is_free() {
        let make = |v: &Volume| {
            let all = long(v, FileKind::File);
            (all.clone(), all)
        };
        change_at_once(make, |v, all, n| v.removexattr(all[n], b"user.short"));
    }

    #[test]
    fn names_are_removed_in_directories_of_long_attributes_at_once_while_nothing_is_free() {
        let make = |v: &Volume| {
            let all = long(v, FileKind::Dir);
            (all.clone(), all)
        };
        change_at_once(make, |v, all, n| v.unlink(all[n], b"f"));
    }

    #[test]
    fn many_open_files_of_long_attributes_lose_their_names_at_once_while_nothing_is_free() {
        let make = |v: &Volume| {
            let all = long(v, FileKind::File);
            let open: Vec<_> = all.iter().map(|ino| v.open(*ino).unwrap()).collect();
            (all, open)
        };
        change_at_once(make, |v, _, n| v.unlink(InodeNo::ROOT, format!("{n}").as_bytes()));
    }

    #[test]
    fn files_of_long_attributes_are_read_at_once_while_nothing_is_free() {
        let make = |v: &Volume| {
            v.mounted().shared.runtime.set_atime(AtimeMode::Strictatime);
            long_with_content(v)
        };
        change_at_once(make, |v, open, n| v.read(&open[n], 0, &mut [0; 1]).map(drop));
    }

    #[test]
    fn ranges_of_files_of_long_attributes_are_taken_out_at_once_while_nothing_is_free() {
        let collapse =
            |v: &Volume, open: &Vec<OpenFile>, n: usize| v.fallocate(&open[n], FallocMode::CollapseRange, 4096, 4096);
        change_at_once(long_with_content, collapse);
    }

    fn long_with_content(v: &Volume) -> (Vec<InodeNo>, Vec<OpenFile>) {
        let all = long(v, FileKind::File);
        let open: Vec<_> = all.iter().map(|ino| v.open(*ino).unwrap()).collect();
        open.iter().for_each(|f| assert_eq!(v.write(f, 0, &[7; 16384]).unwrap(), 16384));
        v.sync().unwrap();
        (all, open)
    }
}
