//! Tombstones and exchanges: did the inode on the other side survive? The rules are [`rules::judge`]'s.

use super::Pass;
use crate::braid::rules::{self, Fate};
use crate::braid::stale::LOOK_INODES;
use crate::cell::Cell;
use crate::domain::recovered::Hint;
use crate::error::{Error, Result};
use crate::planted::{Bug, planted};
use crate::types::*;
use braidfs_format::inode::Link;
use std::sync::Arc;

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

impl Verdict {
    /// Whether who took the names has them.
    fn all_lost(&self) -> bool {
        self.partner.is_none() && self.revived.is_empty() && self.failed.is_empty()
    }

    /// Whether nothing follows: who took the names has them, and the inode has others.
    fn changes_nothing(&self) -> bool {
        self.all_lost() && self.cell.state.read().nlink > 0
    }
}

/// Who took names of an inode.
fn newcomers(cell: &Cell) -> Vec<InodeNo> {
    cell.state.read().durability.tombstones().iter().map(|t| t.newcomer).collect()
}

impl Pass<'_> {
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

    /// Tombstones and exchanges of all inodes that hints name, and of those that had lost their last name: of these the hint may
    /// be behind a checkpoint, where the domain of who took the name had failed before that was durable. So may those of `before`, where
    /// all links are compared: then what cannot be judged is left to the next mount.
    pub(super) fn judge_all(&mut self, hints: &[Hint], orphans: &[InodeNo], before: Option<&[InodeNo]>) -> Result<()> {
        let mut cells = Vec::with_capacity(hints.len());
        for h in hints {
            match self.live(h.child) {
                Err(error) if self.mounted.shared.passes_over(&error) => self.leave_unread(h.child.ino, &error),
                found => cells.extend(found?),
            }
        }
        // all verdicts first: changes make versions newer
        let mut verdicts = Vec::with_capacity(cells.len());
        let leaves = self.mounted.shared.replays;
        for c in cells {
            verdicts.push(if leaves { self.judge_or_leave(c) } else { self.judge_known(c)? });
        }
        for n in orphans {
            let Some(c) = self.orphan(*n) else { continue };
            verdicts.push(if leaves || before.is_some() { self.judge_or_leave(c) } else { self.judge_known(c)? });
        }
        for (looked, ino) in (1..).zip(before.unwrap_or_default()) {
            match self.mounted.find(*ino) {
                Ok(Some(c)) => verdicts.push(self.judge_or_leave(c).filter(|v| !v.changes_nothing())),
                Ok(None) => {}
                Err(error) => self.leave_unread(*ino, &error),
            }
            if looked % LOOK_INODES == 0 {
                self.mounted.keep_to_budget();
            }
        }
        verdicts.into_iter().flatten().try_for_each(|v| self.carry_out(v))
    }

    /// [`Self::judge_known`], or leaves the inode as it is.
    fn judge_or_leave(&mut self, cell: Arc<Cell>) -> Option<Verdict> {
        self.judge_known(cell.clone()).unwrap_or_else(|error| {
            self.leave_undecided(&cell, &error);
            None
        })
    }

    /// [`Self::judge`], or leaves the inode as it is where a domain has failed: of a newcomer's nobody knows what it
    /// had synced, and in the inode's own, or that of its partner, nothing can follow. A check that has the journals
    /// replayed knows all of a domain that does not work then, but nothing follows there either.
    fn judge_known(&mut self, cell: Arc<Cell>) -> Result<Option<Verdict>> {
        let mounted = self.mounted;
        let works = |ino: InodeNo| mounted.domain_of(ino).map_or(Ok(()), |d| d.check_failed());
        if !mounted.shared.replays
            && let Err(error) = newcomers(&cell).into_iter().try_for_each(works)
        {
            self.leave_undecided(&cell, &error);
            return Ok(None);
        }
        let Some(verdict) = self.judge(cell.clone())? else { return Ok(None) };
        let partner = verdict.partner.as_ref().map_or(Ok(()), |(b, _)| works(b.ino));
        match works(cell.ino).and(partner) {
            Err(error) if !verdict.all_lost() => {
                self.leave_undecided(&cell, &error);
                Ok(None)
            }
            _ => Ok(Some(verdict)),
        }
    }

    /// [`Self::leave_unjudged`] of an inode of which is known who took its names: what they become in this mount would
    /// look as if they had taken them.
    fn leave_undecided(&mut self, cell: &Cell, error: &Error) {
        self.leave_unjudged(cell.ino, error);
        let domains = newcomers(cell).into_iter().filter_map(|n| self.mounted.domain_of(n)).map(|d| d.id);
        self.unread.domains.extend(domains);
    }

    /// The inode keeps its tombstones and its exchange, and stays, for the next mount to judge.
    fn leave_unjudged(&mut self, ino: InodeNo, error: &Error) {
        tracing::debug!(%ino, %error, "not judged");
        self.unread.in_domain(self.mounted.domain_of(ino).map(|d| d.id), 1);
        self.unjudged.insert(ino);
    }

    /// [`Self::leave_unjudged`] of an inode of which nobody knows who took its names.
    pub(super) fn leave_unread(&mut self, ino: InodeNo, error: &Error) {
        self.leave_unjudged(ino, error);
        self.unread.by_any = true;
    }

    /// Tombstones and exchanges of an inode: did the other side survive?
    fn judge(&self, cell: Arc<Cell>) -> Result<Option<Verdict>> {
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
        if self.unjudged.contains(&c.ino) || !self.judged.insert(c.clone()) {
            return Ok(()); // another hint for the same inode
        }
        for f in v.failed {
            self.failed.insert(f);
        }
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
            let put = self.put_entry(link.parent, &link.name, &b);
            self.compared(put)?;
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
            let put = self.put_entry(link.parent, &link.name, &c);
            self.compared(put)?;
            self.mended += 1;
        }
        Ok(())
    }
}
