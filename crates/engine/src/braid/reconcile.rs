//! Making the domains agree after a crash (docs/braid.md).
//!
//! An inode's record is the truth about whether it exists and where it hangs; entries are an index to it. Recovery
//! compares the two for every inode and entry of another domain that a replayed journal touched, and for every inode
//! that was rolled forward: missing entries are made again (*relinked*), stale ones dropped, tombstones and exchanges
//! judged by whether the other side is durable. All changes go into the recovery transactions of the domains, which
//! commit afterwards; until then each journal keeps what led here, so that a crash in the middle starts over.
//!
//! The order: roll-forward records become cells; tombstones and exchanges are judged and carried out (`judge`); names of
//! inodes that were rolled forward, claims, links to other domains and hints are mended (`edits`; `view` is what is only
//! looked at for that); what has lost its last name, or had none, is deleted.

mod all;
mod edits;
mod judge;
mod view;

use crate::cell::{Cell, State};
use crate::domain::Enter;
use crate::domain::recovered::{Claim, Forwarded, Hint, Recovered};
use crate::error::{Error, Result};
use crate::planted::{Bug, planted};
use crate::types::*;
use crate::volume::MountedVolume;
use braidfs_format::dentry::Dentry;
use braidfs_sync::plain::Mutex;
use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use view::{Claims, FEW_INODES, View};

/// All domains entered: recovery runs alone.
struct Pass<'a> {
    mounted: &'a MountedVolume,
    view: View<'a>,
    enters: Vec<Option<Enter<'a>>>,
    /// Inodes that lost their last link.
    doomed: Vec<Arc<Cell>>,
    /// Inodes whose tombstones and exchanges have been carried out.
    judged: Cells,
    /// Inodes that took a name, or were exchanged, which did not survive.
    failed: Cells,
    /// Inodes that could not be judged: the next mount will, or a check.
    unjudged: HashSet<InodeNo>,
    /// Entries and links mended.
    mended: u64,
    /// What could not be read, where all links are compared, and what could not be judged.
    unread: Unread,
}

/// Cells, each once, in the order in which they came.
#[derive(Default)]
struct Cells {
    list: Vec<Arc<Cell>>,
    numbers: HashSet<InodeNo>,
}

impl Cells {
    /// Adds one; whether it is new.
    fn insert(&mut self, c: Arc<Cell>) -> bool {
        let new = self.numbers.insert(c.ino);
        if new {
            self.list.push(c);
        }
        new
    }

    fn contains(&self, ino: InodeNo) -> bool {
        self.numbers.contains(&ino)
    }
}

/// What could not be read, where all links are compared; and what could not be judged, since a domain has failed.
#[derive(Debug, Default)]
pub(crate) struct Unread {
    /// Inodes and blocks of node tables.
    pub count: u64,
    /// The domains of these, and of those that decide about an inode that could not be judged.
    pub domains: BTreeSet<DomainId>,
    /// Which domains decide about such an inode could not be read either: one that had failed, and so was not unmounted properly.
    pub by_any: bool,
}

/// What recovery leaves to be done.
pub(crate) struct Reconciled {
    /// Inodes whose tombstones and exchanges were carried out ([`MountedVolume::forget_judged`]).
    pub judged: Vec<Arc<Cell>>,
    /// What could not be read, where all links are compared, and what could not be judged.
    pub unread: Unread,
}

/// Which rolled-forward inodes, and which claims, need nothing.
struct Settled {
    forwarded: Vec<bool>,
    claims: Vec<bool>,
}

impl MountedVolume {
    /// Makes the domains agree. The inodes that come back keep their tombstones and exchanges until the recovery
    /// transactions of all domains are durable ([`Self::forget_judged`]): after a crash between those transactions they
    /// are judged again, with the same result. `all`: every link between domains is compared, not only what journals tell of.
    pub(crate) fn reconcile(&self, mut recovered: Vec<Recovered>, all: bool) -> Result<Reconciled> {
        assert!(self.shared.recovering.load(Ordering::Relaxed), "reconciled beside operations");
        // blocks and nodes of roll-forward records first, before anything is allocated; and before this thread is in any gate,
        // which it does for a domain as each of the others
        let mut forwarded = self.roll_forward_all(&mut recovered)?;
        let enters = self.enter_working()?;
        let claimed: Vec<Vec<Claim>> = recovered.iter_mut().map(|r| std::mem::take(&mut r.claims)).collect();
        let claims = Claims::of(self, &claimed)?;
        let view = View { mounted: self, claims: &claims };
        let mut p = Pass {
            mounted: self,
            view,
            enters,
            doomed: Vec::new(),
            judged: Cells::default(),
            failed: Cells::default(),
            unjudged: HashSet::new(),
            mended: 0,
            unread: Unread::default(),
        };
        let top = forwarded.iter().map(|f| f.named).max().unwrap_or(0);
        self.shared.forget_name_time(top);
        // directories before what lies in them
        forwarded.sort_by_key(|f| !f.is_dir);
        let hints: Vec<Hint> = recovered.iter_mut().flat_map(|r| std::mem::take(&mut r.hints)).collect();
        self.load_ahead(&recovered, &hints);
        let orphans: Vec<InodeNo> = recovered.iter_mut().flat_map(|r| std::mem::take(&mut r.orphans)).collect();
        let before = all.then(|| p.judged_before());
        p.judge_all(&hints, &orphans, before.as_deref())?;
        let settled = self.settled(view, &forwarded, &claimed);
        for (f, _) in forwarded.iter().zip(&settled.forwarded).filter(|(_, settled)| !**settled) {
            let done = p.relink_forwarded(f);
            p.compared(done)?;
        }
        for (c, _) in claimed.iter().flatten().zip(&settled.claims).filter(|(_, settled)| !**settled) {
            let done = p.apply_claim(c);
            p.compared(done)?;
        }
        for n in recovered.iter().flat_map(|r| &r.remote) {
            if let Ok(Some(c)) = self.find(*n) {
                p.relink(&c)?;
            }
        }
        for h in &hints {
            let done = p.reconcile_hint(h);
            p.compared(done)?;
        }
        if all {
            p.relink_all();
        }
        p.doom_orphans(&orphans);
        // what follows deletes
        self.check_held()?;
        p.reap_doomed()?;
        p.list_kept();
        if p.mended > 0 {
            tracing::info!("recovery mended {} cross-domain links", p.mended);
        }
        // those that lost their last name are deleted with the notes
        let mut judged = p.judged.list;
        let gone = |c: &Arc<Cell>| c.state.read().nlink == 0 && !p.unjudged.contains(&c.ino);
        judged.extend(p.failed.list.into_iter().filter(gone));
        Ok(Reconciled { judged, unread: p.unread })
    }

    /// Enters the domains that work; recovery runs alone, and their transactions are those of recovery.
    fn enter_working(&self) -> Result<Vec<Option<Enter<'_>>>> {
        self.domains
            .iter()
            .map(|d| match d.enter_unthrottled() {
                Ok(e) => Ok(Some(e)),
                Err(Error::DomainFailed { .. }) => Ok(None),
                Err(e) => Err(e),
            })
            .collect()
    }

    /// The roll-forward records of all domains, which know nothing of each other, become cells.
    fn roll_forward_all(&self, recovered: &mut [Recovered]) -> Result<Vec<Forwarded>> {
        let grain = if recovered.iter().any(Recovered::has_much) { 1 } else { self.domains.len() };
        let records: Vec<Mutex<_>> = recovered.iter_mut().map(|r| Mutex::new(r.take_forward())).collect();
        let one = |i: usize| {
            let records = std::mem::take(&mut *records[i].lock());
            match self.domains[i].enter_unthrottled() {
                Ok(e) => self.domains[i].roll_forward(&e, records),
                Err(Error::DomainFailed { .. }) => Ok(Vec::new()),
                Err(e) => Err(e),
            }
        };
        let all = self.shared.workers.each(self.domains.len(), grain, one)?;
        Ok(all.into_iter().flatten().collect())
    }

    /// Number of an inode's domain; 0 where it has none.
    fn place_of(&self, ino: InodeNo) -> usize {
        self.domain_of(ino).map_or(0, |d| usize::from(d.id.0))
    }

    /// Loads by several threads what one is about to compare. Errors are met again there.
    fn load_ahead(&self, recovered: &[Recovered], hints: &[Hint]) {
        let workers = &self.shared.workers;
        let mut wanted: Vec<InodeNo> = recovered.iter().flat_map(|r| r.remote.iter().copied()).collect();
        wanted.extend(hints.iter().flat_map(|h| [h.child.ino, h.dir]));
        wanted.sort_unstable();
        wanted.dedup();
        if workers.threads_for(wanted.len(), FEW_INODES) == 1 {
            return;
        }
        let parts = wanted.len().div_ceil(FEW_INODES);
        let part = |i: usize| {
            for ino in wanted.iter().skip(i * FEW_INODES).take(FEW_INODES) {
                if let Some(d) = self.domain_of(*ino) {
                    let _ = d.find(*ino);
                }
            }
            Ok::<_, Error>(())
        };
        let _ = workers.each(parts, 1, part);
    }

    /// Looks by several threads for what is as it should be: mostly all of it, as a synced file mostly has the name that it
    /// had. What follows changes an entry only to name an inode from which no name was taken, and takes a link away only where
    /// another inode has the name: neither makes that necessary which is not. Errors are met again there.
    fn settled(&self, view: View<'_>, forwarded: &[Forwarded], claimed: &[Vec<Claim>]) -> Settled {
        let claims: Vec<&Claim> = claimed.iter().flatten().collect();
        let mut settled = Settled { forwarded: vec![false; forwarded.len()], claims: vec![false; claims.len()] };
        let workers = &self.shared.workers;
        if workers.threads_for(forwarded.len() + claims.len(), FEW_INODES) == 1 {
            return settled;
        }
        // By the domain of the directory that is looked at, so that no two threads want the lock of one.
        let mut by_domain: Vec<(Vec<usize>, Vec<usize>)> = vec![Default::default(); self.domains.len()];
        for (i, f) in forwarded.iter().enumerate() {
            by_domain[self.place_of(f.parent)].0.push(i);
        }
        for (i, c) in claims.iter().enumerate() {
            by_domain[self.place_of(c.link.parent)].1.push(i);
        }
        let one = |d: usize| {
            let (files, names) = &by_domain[d];
            let files: Vec<usize> =
                files.iter().copied().filter(|i| view.is_linked(&forwarded[*i]).unwrap_or(false)).collect();
            let names: Vec<usize> =
                names.iter().copied().filter(|i| view.is_applied(claims[*i]).unwrap_or(false)).collect();
            Ok::<_, Error>((files, names))
        };
        for (files, names) in workers.each(by_domain.len(), 1, one).unwrap_or_default() {
            files.into_iter().for_each(|i| settled.forwarded[i] = true);
            names.into_iter().for_each(|i| settled.claims[i] = true);
        }
        settled
    }

    /// Takes away the tombstones and exchanges that recovery has carried out, durably.
    ///
    /// # Errors
    /// Of a commit.
    pub(crate) fn forget_judged(&self, judged: &[Arc<Cell>]) -> Result<()> {
        for c in judged {
            let Ok(e) = self.dom(c.domain).enter_unthrottled() else { continue };
            let mut st = c.state.write();
            if !st.deleted {
                touch(&e, c, &mut st)?;
                st.durability.forget_judged();
                if st.links.is_empty() && st.nlink == 0 {
                    if self.held.orphaned(c) {
                        e.domain.orphans.insert(c.ino);
                    } else {
                        self.delete(&e, c, &mut st);
                    }
                }
            }
        }
        if judged.is_empty() { Ok(()) } else { self.commit_those(|d| d.failed().is_none()) }
    }
}

/// Marks a cell as changed in its domain's recovery transaction. Its version stays: a recovery after this one must not take
/// the change for one that others wait for.
fn touch(e: &Enter<'_>, c: &Arc<Cell>, st: &mut State) -> Result<()> {
    let version = st.durability.version();
    e.domain.touch(e.tx(), c, st)?;
    st.durability.recovery_keeps_version(version);
    Ok(())
}

impl Pass<'_> {
    /// The entered domain of a cell; `None` where it has failed: nothing of it can change.
    fn enter(&self, c: &Cell) -> Option<&Enter<'_>> {
        self.enters[usize::from(c.domain.0)].as_ref()
    }

    fn live(&self, inode: InodeRef) -> Result<Option<Arc<Cell>>> {
        self.view.live(inode)
    }

    /// What comparing a name has come to: a check that has the journals replayed sees to what could not be compared.
    fn compared(&self, done: Result<()>) -> Result<()> {
        done.or_else(|error| match self.mounted.shared.passes_over(&error) {
            true => {
                tracing::warn!("a name is not compared: {error}");
                Ok(())
            }
            false => Err(error),
        })
    }

    /// Of what had no name left before the crash nobody knows any more.
    fn doom_orphans(&mut self, orphans: &[InodeNo]) {
        let gone: Vec<_> = orphans.iter().filter_map(|n| self.orphan(*n)).collect();
        self.doomed.extend(gone);
    }

    /// An inode that had no name left before the crash, if it still has none.
    fn orphan(&self, ino: InodeNo) -> Option<Arc<Cell>> {
        let c = self.mounted.find(ino).ok()??;
        let gone = {
            let st = c.state.read();
            st.nlink == 0 && !st.deleted
        };
        gone.then_some(c)
    }

    /// Entries of names that an inode has no more since its roll-forward record go; those that it has are made.
    fn relink_forwarded(&mut self, f: &Forwarded) -> Result<()> {
        let links = f.cell.state.read().links.clone();
        for l in f.old_links.iter().filter(|l| !links.contains(l)) {
            let dropped = self.drop_entry(l.parent, &l.name, &f.cell);
            self.compared(dropped)?;
        }
        self.relink(&f.cell)
    }

    fn is_taken(&self, dir: InodeNo, name: &[u8], c: &Cell) -> bool {
        self.view.is_taken(dir, name, c)
    }

    /// An entry that names an inode from which a synced one took the name ([`Self::is_taken`]) goes, and so does the link.
    fn apply_claim(&mut self, claim: &Claim) -> Result<()> {
        let Some(d) = self.dir(claim.link.parent)? else { return Ok(()) };
        let Some(e) = self.find(&d, &claim.link.name)? else { return Ok(()) };
        let Some(x) = self.live((&e).into())? else { return Ok(()) };
        let named = x.state.read().has_link(claim.link.parent, &claim.link.name);
        if named && self.is_taken(claim.link.parent, &claim.link.name, &x) {
            self.drop_entry(claim.link.parent, &claim.link.name, &x)?;
            self.lose(&x, claim.link.parent, &claim.link.name)?;
        }
        Ok(())
    }

    /// Makes the entries of all links of an inode, or takes the link away where its directory is gone.
    fn relink(&mut self, c: &Arc<Cell>) -> Result<()> {
        if planted(Bug::RelinkSkipped) {
            return Ok(());
        }
        let links = c.state.read().links.to_vec();
        for l in links {
            let put = self.put_entry(l.parent, &l.name, c);
            self.compared(put)?;
        }
        Ok(())
    }

    /// Compares the two sides of a hint. The inode's record decides: where it is there and has the name, the entry is made to
    /// name it; where it has not, or is gone, an entry that names it is dropped.
    fn reconcile_hint(&mut self, h: &Hint) -> Result<()> {
        match self.live(h.child)? {
            Some(c) if c.state.read().has_link(h.dir, &h.name) => self.put_entry(h.dir, &h.name, &c),
            Some(c) => self.drop_entry(h.dir, &h.name, &c),
            None => self.drop_named(h.dir, &h.name, h.child),
        }
    }

    fn find(&self, dir: &Arc<Cell>, name: &[u8]) -> Result<Option<Dentry>> {
        self.view.find(dir, name)
    }

    fn dir(&self, ino: InodeNo) -> Result<Option<Arc<Cell>>> {
        self.view.dir(ino)
    }
}
