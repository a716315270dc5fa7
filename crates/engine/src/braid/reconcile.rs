//! Making the domains agree after a crash (docs/braid.md).
//!
//! An inode's record is the truth about whether it exists and where it hangs; entries are an index to it. Recovery
//! compares the two for every inode and entry of another domain that a replayed journal touched, and for every inode
//! that was rolled forward: missing entries are made again (*relinked*), stale ones dropped, tombstones and exchanges
//! judged by whether the other side is durable. All changes go into the recovery transactions of the domains, which
//! commit afterwards; until then each journal keeps what led here, so that a crash in the middle starts over.

use crate::braid::entry::{By, Edit};
use crate::braid::rules::{self, Fate};
use crate::cell::{Cell, State, name_hash};
use crate::domain::Enter;
use crate::domain::recover::{Claim, Forwarded, Hint, Recovered};
use crate::error::{Error, Result};
use crate::planted::{Bug, planted};
use crate::types::*;
use crate::volume::MountedVolume;
use braidfs_format::dentry::Dentry;
use braidfs_format::inode::Link;
use braidfs_format::journal::Record;
use braidfs_sync::plain::Mutex;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Inodes that one thread has loaded before another has started.
const FEW_INODES: usize = 64;

/// Which inodes had a name by a roll-forward record, and when: by the domain of the directory, in the order of directories and
/// names.
#[derive(Default)]
struct Claims<'a>(Vec<Vec<&'a Claim>>);

impl<'a> Claims<'a> {
    /// Sorted by several threads, of which each has the claims on some domains.
    fn of(mounted: &MountedVolume, claims: &'a [Vec<Claim>]) -> Result<Self> {
        let mut by_domain: Vec<Vec<&Claim>> = vec![Vec::new(); mounted.domains.len()];
        for c in claims.iter().flatten() {
            by_domain[mounted.place_of(c.link.parent)].push(c);
        }
        let grain = if by_domain.iter().any(|c| c.len() >= FEW_INODES) { 1 } else { by_domain.len() };
        let by_domain: Vec<Mutex<_>> = by_domain.into_iter().map(Mutex::new).collect();
        let sorted = |i: usize| {
            let mut claims: Vec<&Claim> = std::mem::take(&mut *by_domain[i].lock());
            claims.sort_by(|a, b| (a.link.parent, &a.link.name[..]).cmp(&(b.link.parent, &b.link.name[..])));
            Ok::<_, Error>(claims)
        };
        mounted.shared.workers.each(by_domain.len(), grain, sorted).map(Self)
    }

    /// Those on `name` in `dir`, of which `place` is the domain's.
    fn on(&self, place: usize, dir: InodeNo, name: &[u8]) -> impl Iterator<Item = &'a Claim> {
        let claims = self.0.get(place).map_or(&[][..], |c| c);
        let from = claims.partition_point(|c| (c.link.parent, &c.link.name[..]) < (dir, name));
        claims[from..].iter().copied().take_while(move |c| c.link.parent == dir && c.link.name[..] == *name)
    }
}

/// What is there at this moment, for those who only look.
#[derive(Clone, Copy)]
struct View<'a> {
    mounted: &'a MountedVolume,
    claims: &'a Claims<'a>,
}

/// All domains entered: recovery runs alone.
pub(crate) struct Pass<'a> {
    mounted: &'a MountedVolume,
    view: View<'a>,
    enters: Vec<Option<Enter<'a>>>,
    /// Inodes that lost their last link.
    doomed: Vec<Arc<Cell>>,
    /// Inodes whose tombstones and exchanges have been carried out.
    judged: Vec<Arc<Cell>>,
    /// Inodes that took a name, or were exchanged, which did not survive.
    failed: Vec<Arc<Cell>>,
    /// Entries and links mended.
    pub mended: u64,
}

/// Which rolled-forward inodes, and which claims, need nothing.
struct Settled {
    forwarded: Vec<bool>,
    claims: Vec<bool>,
}

/// What becomes of an inode with tombstones or an exchange.
struct Verdict {
    cell: Arc<Cell>,
    /// The exchange's other side did not survive: it takes this name.
    partner: Option<(Arc<Cell>, Link)>,
    /// Names that the inode has again, since their takers did not survive.
    revived: Vec<Link>,
    /// These takers, as they were before.
    failed: Vec<Arc<Cell>>,
}

impl MountedVolume {
    /// Makes the domains agree. The inodes that come back keep their tombstones and exchanges until the recovery
    /// transactions of all domains are durable ([`Self::forget_judged`]): after a crash between those transactions they
    /// are judged again, with the same result.
    pub(crate) fn reconcile(&self, mut recovered: Vec<Recovered>) -> Result<Vec<Arc<Cell>>> {
        assert!(self.shared.recovering.load(Ordering::Relaxed), "reconciled beside operations");
        // blocks and nodes of roll-forward records first, before anything is allocated; and before this thread is in any gate,
        // which it does for a domain as each of the others
        let mut forwarded = self.roll_forward_all(&mut recovered)?;
        let enters = self
            .domains
            .iter()
            .map(|d| match d.enter_unthrottled() {
                Ok(e) => Ok(Some(e)),
                Err(Error::DomainFailed { .. }) => Ok(None),
                Err(e) => Err(e),
            })
            .collect::<Result<Vec<_>>>()?;
        let claimed: Vec<Vec<Claim>> = recovered.iter_mut().map(|r| std::mem::take(&mut r.claims)).collect();
        let claims = Claims::of(self, &claimed)?;
        let view = View { mounted: self, claims: &claims };
        let mut p =
            Pass { mounted: self, view, enters, doomed: Vec::new(), judged: Vec::new(), failed: Vec::new(), mended: 0 };
        let top = forwarded.iter().map(|f| f.named).max().unwrap_or(0);
        self.shared.forget_name_time(top);
        // directories before what lies in them
        forwarded.sort_by_key(|f| !f.is_dir);
        let hints: Vec<Hint> = recovered.iter_mut().flat_map(|r| std::mem::take(&mut r.hints)).collect();
        self.load_ahead(&recovered, &hints);
        // all verdicts first: changes make versions newer
        let verdicts = hints.iter().map(|h| p.judge(h)).collect::<Result<Vec<_>>>()?;
        for v in verdicts.into_iter().flatten() {
            p.carry_out(v)?;
        }
        let settled = self.settled(view, &forwarded, &claimed);
        for (f, _) in forwarded.iter().zip(&settled.forwarded).filter(|(_, settled)| !**settled) {
            p.relink_forwarded(f)?;
        }
        for (c, _) in claimed.iter().flatten().zip(&settled.claims).filter(|(_, settled)| !**settled) {
            p.enforce(c)?;
        }
        for n in recovered.iter().flat_map(|r| &r.remote) {
            if let Ok(Some(c)) = self.find(*n) {
                p.relink(&c)?;
            }
        }
        for h in &hints {
            p.compare(h)?;
        }
        let orphans: Vec<InodeNo> = recovered.iter_mut().flat_map(|r| std::mem::take(&mut r.orphans)).collect();
        for n in orphans {
            if let Ok(Some(c)) = self.find(n) {
                let gone = {
                    let st = c.state.read();
                    st.nlink == 0 && !st.deleted
                };
                if gone {
                    p.doomed.push(c);
                }
            }
        }
        // what follows deletes
        self.check_held()?;
        p.reap_doomed()?;
        p.list_kept();
        if p.mended > 0 {
            tracing::info!("recovery mended {} cross-domain links", p.mended);
        }
        // those that lost their last name are deleted with the notes
        p.judged.extend(p.failed.into_iter().filter(|c| c.state.read().nlink == 0));
        Ok(p.judged)
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
                names.iter().copied().filter(|i| view.is_enforced(claims[*i]).unwrap_or(false)).collect();
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
                e.domain.touch(e.tx(), c, &mut st)?;
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
        if judged.is_empty() { Ok(()) } else { self.commit_all() }
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

impl View<'_> {
    fn live(self, inode: InodeRef) -> Result<Option<Arc<Cell>>> {
        Ok(self.mounted.find(inode.ino)?.filter(|c| c.is(inode) && !c.state.read().deleted))
    }

    fn dir(self, ino: InodeNo) -> Result<Option<Arc<Cell>>> {
        Ok(self.mounted.find(ino)?.filter(|c| {
            let st = c.state.read();
            c.kind == FileKind::Dir && !st.deleted && st.nlink > 0
        }))
    }

    fn find(self, dir: &Arc<Cell>, name: &[u8]) -> Result<Option<Dentry>> {
        let hash = name_hash(&self.mounted.shared.hash_key, name);
        let d = self.mounted.dom(dir.domain);
        let mut st = dir.state.write();
        d.with_index(dir.ino, &mut st, |ix, load| Ok(ix.find(hash, name, load)?.cloned()))
    }

    /// Whether a synced inode took this name from `c`: it may have left it again, but the name does not go back.
    fn is_taken(self, dir: InodeNo, name: &[u8], c: &Cell) -> bool {
        let mut others = self.claims.on(self.mounted.place_of(dir), dir, name).filter(|o| o.ino != c.ino).peekable();
        if others.peek().is_none() {
            return false;
        }
        let seq = c.state.read().link_seq;
        others.any(|o| o.seq > seq)
    }

    /// Whether [`Pass::relink_forwarded`] would find all as it is.
    fn is_linked(self, f: &Forwarded) -> Result<bool> {
        let c = &f.cell;
        let links = {
            let st = c.state.read();
            if st.deleted || f.old_links.iter().any(|l| !st.links.contains(l)) {
                return Ok(false);
            }
            st.links.to_vec()
        };
        for l in &links {
            let Some(d) = self.dir(l.parent)? else { return Ok(false) };
            let named = self.find(&d, &l.name)?.is_some_and(|e| c.is((&e).into()));
            if !named || self.is_taken(l.parent, &l.name, c) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Whether [`Pass::enforce`] would find nothing to do.
    fn is_enforced(self, claim: &Claim) -> Result<bool> {
        let Link { parent, name } = &claim.link;
        let Some(d) = self.dir(*parent)? else { return Ok(true) };
        let Some(e) = self.find(&d, name)? else { return Ok(true) };
        let Some(x) = self.live((&e).into())? else { return Ok(true) };
        Ok(!x.state.read().has_link(*parent, name) || !self.is_taken(*parent, name, &x))
    }
}

impl Pass<'_> {
    /// The entered domain of a cell; `None` where it has failed: nothing of it can change.
    fn enter(&self, c: &Cell) -> Option<&Enter<'_>> {
        self.enters[usize::from(c.domain.0)].as_ref()
    }

    fn live(&self, inode: InodeRef) -> Result<Option<Arc<Cell>>> {
        self.view.live(inode)
    }

    /// Whether the inode's change with `version` survived.
    fn survived(&self, change: InodeVersion) -> Result<bool> {
        let InodeVersion { inode: InodeRef { ino, generation }, version } = change;
        // a group leaves its domain when no inode in it is left
        let Some(d) = self.mounted.domain_of(ino) else { return Ok(true) };
        let e = d.nodes.get(ino.node())?;
        if e.generation != generation || !e.used() {
            if let Ok(Some(c)) = d.find(ino)
                && c.is(change.inode)
            {
                return Ok(c.state.read().durability.version() >= version);
            }
            // freed later (then it had been durable), or never came to be
            return Ok(e.generation >= generation && e.generation != 0);
        }
        let c = d.find(ino)?.ok_or(Error::NotFound)?;
        Ok(c.state.read().durability.version() >= version)
    }

    /// Tombstones and exchanges of the inode that a hint names: did the other side survive?
    fn judge(&self, h: &Hint) -> Result<Option<Verdict>> {
        let Some(cell) = self.live(h.child)? else { return Ok(None) };
        let (tombstones, exchange) = {
            let st = cell.state.read();
            (st.durability.tombstones().to_vec(), st.durability.exchange())
        };
        if tombstones.is_empty() && exchange.is_none() {
            return Ok(None);
        }
        let mut v = Verdict { cell, partner: None, revived: Vec::new(), failed: Vec::new() };
        for t in tombstones {
            let newcomer = InodeVersion::from(&t);
            let survived = planted(Bug::TombstoneUnconditional) || self.survived(newcomer)?;
            let fate = rules::judge(&t, exchange, survived);
            if fate != Fate::Lost {
                v.failed.extend(self.live(newcomer.inode)?);
            }
            match fate {
                Fate::Lost => {}
                Fate::Regained => v.revived.push(t.link),
                Fate::Completed if planted(Bug::ExchangeHalf) => {}
                Fate::Completed => v.partner = self.live(newcomer.inode)?.map(|b| (b, t.link)),
            }
        }
        Ok(Some(v))
    }

    /// Completes an exchange or gives a victim its names back.
    fn carry_out(&mut self, v: Verdict) -> Result<()> {
        let c = v.cell;
        if self.judged.iter().any(|s| s.ino == c.ino) {
            return Ok(()); // another hint for the same inode
        }
        self.judged.push(c.clone());
        self.failed.extend(v.failed);
        // names come back as of when they changed: who took one later keeps it
        let seq = c.state.read().link_seq;
        if let Some((b, link)) = v.partner {
            // the partner takes the name that this inode gave up
            let mine: Vec<_> = c.state.read().links.to_vec();
            self.change(&b, |st| {
                for l in &mine {
                    st.remove_link(l.parent, &l.name, seq);
                }
                if !st.has_link(link.parent, &link.name) {
                    st.add_link(link.parent, &link.name, seq);
                }
                st.parent = link.parent;
            })?;
            self.put_entry(link.parent, &link.name, &b)?;
            self.mended += 1;
        }
        for link in v.revived {
            let dir = c.kind == FileKind::Dir;
            self.change(&c, |st| {
                if !st.has_link(link.parent, &link.name) {
                    st.add_link(link.parent, &link.name, seq);
                }
                st.nlink = if dir { st.nlink.max(2) } else { st.links.len() as u32 };
                if dir {
                    // its entry may be there still: nobody else tells it
                    st.parent = link.parent;
                }
            })?;
            self.put_entry(link.parent, &link.name, &c)?;
            self.mended += 1;
        }
        Ok(())
    }

    /// Changes a cell in its domain's recovery transaction.
    fn change(&self, c: &Arc<Cell>, f: impl FnOnce(&mut State)) -> Result<()> {
        let Some(e) = self.enter(c) else { return Ok(()) };
        let mut st = c.state.write();
        touch(e, c, &mut st)?;
        f(&mut st);
        if st.nlink == 0 {
            c.nameless.store(true, Ordering::SeqCst);
        }
        st.durability.recovery_changes_names();
        Ok(())
    }

    fn relink_forwarded(&mut self, f: &Forwarded) -> Result<()> {
        let links = f.cell.state.read().links.clone();
        for l in f.old_links.iter().filter(|l| !links.contains(l)) {
            self.drop_entry(l.parent, &l.name, &f.cell)?;
        }
        self.relink(&f.cell)
    }

    fn is_taken(&self, dir: InodeNo, name: &[u8], c: &Cell) -> bool {
        self.view.is_taken(dir, name, c)
    }

    /// An entry that names an inode from which a synced one took the name ([`Self::is_taken`]) goes, and so does the link.
    fn enforce(&mut self, claim: &Claim) -> Result<()> {
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
            self.put_entry(l.parent, &l.name, c)?;
        }
        Ok(())
    }

    /// Compares the two sides of a hint. The inode's record decides: where it is there and has the name, the entry is made to
    /// name it; where it has not, or is gone, an entry that names it is dropped.
    fn compare(&mut self, h: &Hint) -> Result<()> {
        match self.live(h.child)? {
            Some(c) if c.state.read().has_link(h.dir, &h.name) => self.put_entry(h.dir, &h.name, &c),
            Some(c) => self.drop_entry(h.dir, &h.name, &c),
            None => self.drop_named(h.dir, &h.name, h.child),
        }
    }

    fn find(&self, dir: &Arc<Cell>, name: &[u8]) -> Result<Option<Dentry>> {
        self.view.find(dir, name)
    }

    fn drop_entry(&mut self, dir: InodeNo, name: &[u8], c: &Arc<Cell>) -> Result<()> {
        self.drop_named(dir, name, c.inode())
    }

    /// Removes the entry, if it names that inode.
    fn drop_named(&mut self, dir: InodeNo, name: &[u8], inode: InodeRef) -> Result<()> {
        let Some(d) = self.dir(dir)? else { return Ok(()) };
        let Some(old) = self.find(&d, name)? else { return Ok(()) };
        if InodeRef::from(&old) != inode {
            return Ok(());
        }
        self.edit(&d, name, Edit::Remove)
    }

    /// Changes an entry in the recovery transaction of the directory's domain, unless that has failed.
    fn edit(&mut self, dir: &Arc<Cell>, name: &[u8], edit: Edit<'_>) -> Result<()> {
        let Some(e) = self.enter(dir) else { return Ok(()) };
        let mut st = dir.state.write();
        touch(e, dir, &mut st)?;
        self.mounted.edit_entry(By::Recovery(e), dir, &mut st, name, edit)?;
        drop(st);
        self.mended += 1;
        Ok(())
    }

    fn dir(&self, ino: InodeNo) -> Result<Option<Arc<Cell>>> {
        self.view.dir(ino)
    }

    /// Sees to it that `dir/name` names `c`. Of two inodes that claim the name, the one linked later has it, also where it
    /// was synced there and has left it since.
    fn put_entry(&mut self, dir: InodeNo, name: &[u8], c: &Arc<Cell>) -> Result<()> {
        if c.state.read().deleted {
            return Ok(());
        }
        let Some(d) = self.dir(dir)? else {
            // its directory never came to be: nothing below it was synced
            return self.lose(c, dir, name);
        };
        if self.is_taken(dir, name, c) {
            // the entry may be gone already, with the directory's own domain
            self.drop_entry(dir, name, c)?;
            return self.lose(c, dir, name);
        }
        let old = self.find(&d, name)?;
        if let Some(o) = &old {
            if c.is(o.into()) {
                return Ok(());
            }
            if let Some(x) = self.live(o.into())?
                && x.state.read().has_link(dir, name)
            {
                if rules::holder_keeps(x.state.read().link_seq, c.state.read().link_seq) {
                    return self.lose(c, dir, name);
                }
                self.lose(&x, dir, name)?;
            }
        }
        self.note(dir, name, c);
        if self.enter(&d).is_none() {
            return Ok(());
        }
        self.edit(&d, name, if old.is_some() { Edit::Replace(c) } else { Edit::Add(c) })?;
        if c.kind == FileKind::Dir {
            c.state.write().parent = dir;
        }
        Ok(())
    }

    /// Has the journals of both sides say that a name changed over domains: the recovery transactions do not become
    /// durable together, and after a crash between them the sides are compared again.
    fn note(&self, dir: InodeNo, name: &[u8], c: &Cell) {
        let Some(dir_domain) = self.mounted.domain_of(dir).map(|d| d.id) else { return };
        if dir_domain == c.domain {
            return;
        }
        let r = Record::Remote { dir, child: c.ino, generation: c.generation, name: name.into() };
        for d in [dir_domain, c.domain] {
            if let Some(e) = &self.enters[usize::from(d.0)] {
                e.tx().record(r.clone());
            }
        }
    }

    /// An inode loses a name that it claims.
    fn lose(&mut self, c: &Arc<Cell>, dir: InodeNo, name: &[u8]) -> Result<()> {
        self.note(dir, name, c);
        let is_dir = c.kind == FileKind::Dir;
        let mut last = false;
        self.change(c, |st| {
            // its other claims are as old as they were
            if st.remove_link(dir, name, st.link_seq) {
                if !is_dir {
                    st.nlink = st.links.len() as u32;
                }
                last = st.links.is_empty();
            }
        })?;
        if last {
            self.doomed.push(c.clone());
        }
        Ok(())
    }

    /// Has the recovery transactions list the orphans that are held, of domains too in which nothing else is to be done: what
    /// listed them goes with the next checkpoint.
    fn list_kept(&self) {
        if self.mounted.held.is_empty() {
            return;
        }
        for e in self.enters.iter().flatten().filter(|e| !e.domain.orphans.is_empty()) {
            e.tx().record(Record::Orphans(Vec::new()));
        }
    }

    /// Deletes what lost its last name; of a directory also what only it named.
    fn reap_doomed(&mut self) -> Result<()> {
        while let Some(c) = self.doomed.pop() {
            {
                let st = c.state.read();
                if st.deleted || !st.links.is_empty() {
                    continue;
                }
            }
            if c.kind == FileKind::Dir {
                let mut pos = 2;
                loop {
                    let next = {
                        let d = self.mounted.dom(c.domain);
                        let mut st = c.state.write();
                        d.with_index(c.ino, &mut st, |ix, load| Ok(ix.next_after(pos, load)?.cloned()))?
                    };
                    let Some(e) = next else { break };
                    pos = e.hash;
                    if let Some(x) = self.live((&e).into())?
                        && x.state.read().has_link(c.ino, &e.name)
                    {
                        self.lose(&x, c.ino, &e.name)?;
                    }
                }
            }
            if self.mounted.held.orphaned(&c) {
                // its holder gives it back
                if c.state.read().nlink > 0 {
                    self.change(&c, |st| st.nlink = 0)?;
                }
                self.mounted.dom(c.domain).orphans.insert(c.ino);
                continue;
            }
            if self.judged.iter().chain(&self.failed).any(|s| s.ino == c.ino) {
                // another inode has a name by its record alone until that one's recovery is durable, too; and that it is
                // deleted must not look as if it had come to be
                self.change(&c, |st| st.nlink = 0)?;
                self.mounted.dom(c.domain).orphans.insert(c.ino);
                continue;
            }
            let Some(e) = self.enter(&c) else { continue };
            let mut st = c.state.write();
            e.domain.touch(e.tx(), &c, &mut st)?;
            st.nlink = 0;
            self.mounted.delete(e, &c, &mut st);
        }
        Ok(())
    }
}
