//! Changes of entries, links and inodes by recovery, each in the recovery transaction of its domain.

use super::{Pass, touch};
use crate::braid::entry::{By, Edit};
use crate::braid::rules;
use crate::cell::{Cell, State};
use crate::error::Result;
use crate::types::*;
use braidfs_format::journal::Record;
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl Pass<'_> {
    /// Changes a cell in its domain's recovery transaction.
    pub(super) fn change(&self, c: &Arc<Cell>, f: impl FnOnce(&mut State)) -> Result<()> {
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

    pub(super) fn drop_entry(&mut self, dir: InodeNo, name: &[u8], c: &Arc<Cell>) -> Result<()> {
        self.drop_named(dir, name, c.inode())
    }

    /// Removes the entry, if it names that inode.
    pub(super) fn drop_named(&mut self, dir: InodeNo, name: &[u8], inode: InodeRef) -> Result<()> {
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

    /// Sees to it that `dir/name` names `c`. Of two inodes that claim the name, the one linked later has it, also where it
    /// was synced there and has left it since.
    pub(super) fn put_entry(&mut self, dir: InodeNo, name: &[u8], c: &Arc<Cell>) -> Result<()> {
        if c.state.read().deleted {
            return Ok(());
        }
        let Some(d) = self.dir(dir)? else {
            if self.mounted.domain_of(dir).is_some_and(|d| self.enters[usize::from(d.id.0)].is_none()) {
                // of a domain that has failed nobody knows what it had synced: a check connects what hangs nowhere
                return Ok(());
            }
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
    pub(super) fn lose(&mut self, c: &Arc<Cell>, dir: InodeNo, name: &[u8]) -> Result<()> {
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

    /// Has the recovery transactions list the orphans that are held, or could not be judged, of domains too in which nothing else is to
    /// be done: what listed them goes with the next checkpoint.
    pub(super) fn list_kept(&self) {
        if self.mounted.held.is_empty() && self.unjudged.is_empty() {
            return;
        }
        for e in self.enters.iter().flatten().filter(|e| !e.domain.orphans.is_empty()) {
            e.tx().record(Record::Orphans(Vec::new()));
        }
    }

    /// What hangs in a directory that goes loses that name.
    fn lose_all_in(&mut self, c: &Arc<Cell>) -> Result<()> {
        let mut pos = 2;
        loop {
            let next = {
                let d = self.mounted.dom(c.domain);
                let mut st = c.state.write();
                d.with_index(c.ino, &mut st, |ix, load| Ok(ix.next_after(pos, load)?.cloned()))?
            };
            let Some(e) = next else { return Ok(()) };
            pos = e.hash;
            if let Some(x) = self.live((&e).into())?
                && x.state.read().has_link(c.ino, &e.name)
            {
                self.lose(&x, c.ino, &e.name)?;
            }
        }
    }

    /// Deletes what lost its last name; of a directory also what only it named.
    pub(super) fn reap_doomed(&mut self) -> Result<()> {
        while let Some(c) = self.doomed.pop() {
            {
                let st = c.state.read();
                if st.deleted || !st.links.is_empty() {
                    continue;
                }
            }
            if self.unjudged.contains(&c.ino) {
                // the next mount may give it a name back
                if c.state.read().nlink > 0 {
                    self.change(&c, |st| st.nlink = 0)?;
                }
                self.mounted.dom(c.domain).orphans.insert(c.ino);
                continue;
            }
            if c.kind == FileKind::Dir
                && let Err(error) = self.lose_all_in(&c)
            {
                if !self.mounted.shared.passes_over(&error) {
                    return Err(error);
                }
                // a check finds what is left in it
                tracing::warn!(ino = %c.ino, %error, "a directory without a name is not deleted");
                continue;
            }
            if self.mounted.held.orphaned(&c) {
                // its holder gives it back
                if c.state.read().nlink > 0 {
                    self.change(&c, |st| st.nlink = 0)?;
                }
                self.mounted.dom(c.domain).orphans.insert(c.ino);
                continue;
            }
            if self.judged.contains(c.ino) || self.failed.contains(c.ino) {
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
