//! Another name for a file.

use super::asker::{Asker, SEARCH, WRITE};
use super::checks::{check_alive, check_changeable, check_name, check_takes_names};
use super::entries::{Child, ENTRY_BLOCKS};
use super::prerequisites::Unwritten;
use crate::braid::entry::{By, Edit};
use crate::cell::Cell;
use crate::error::{Error, Result};
use crate::types::*;
use crate::volume::operation::Op;
use crate::volume::{MountedVolume, Volume};
use std::sync::Arc;

impl Volume {
    /// Another name for a file (not a directory).
    ///
    /// # Errors
    /// [`Error::Exists`], [`Error::Perm`] for directories, [`Error::TooManyLinks`], [`Error::NoSpace`], [`Error::CrossProject`].
    pub fn link(&self, ino: InodeNo, dir: InodeNo, name: &[u8]) -> Result<Attr> {
        let i = self.mounted();
        i.pace_change(dir);
        let d = i.dir_cell(dir)?;
        i.link_in(&i.cell(ino)?, &d, name, Asker::ANY)
    }
}

impl MountedVolume {
    /// [`Volume::link`] of an inode in a directory that are at hand, for `asker`.
    pub(crate) fn link_in(&self, c: &Arc<Cell>, d: &Arc<Cell>, name: &[u8], asker: Asker<'_>) -> Result<Attr> {
        if let Err(e) = asker.check_early(d, WRITE | SEARCH) {
            // as link(2) has it: who may look is told of a name that is there, and not of what he may not do
            let lives = asker.check_early(d, SEARCH).is_ok() && self.find_in(d, name)?.is_some();
            return Err(if lives { Error::Exists } else { e });
        }
        check_name(name)?;
        self.check_border(c.domain, d.domain)?;
        let mut blocks = ENTRY_BLOCKS;
        loop {
            self.commit_exchange(c)?;
            let unwritten = self.commit_new_parents(d, c, c.domain)?;
            if let Some(attr) = self.link_at(c, d, (name, asker), unwritten, &mut blocks)? {
                return Ok(attr);
            }
            // who left the name and must be durable first was seen with the directory locked
            self.commit_vacating_rename(d, name, c.domain)?;
        }
    }

    /// `None` where something must be durable first, what has the name was locked, or more blocks must be reserved: `blocks`.
    pub(super) fn link_at(
        &self,
        c: &Arc<Cell>,
        d: &Arc<Cell>,
        (name, asker): (&[u8], Asker<'_>),
        unwritten: Unwritten,
        blocks: &mut u64,
    ) -> Result<Option<Attr>> {
        let (i, ino) = (self, c.ino);
        let mut op = Op::new(i);
        op.begin(&[d.domain, c.domain], *blocks, false)?;
        let mut dst = d.state.write();
        check_alive(&dst)?;
        asker.check_add(&dst)?;
        // once more: a tenant that is about to lose its journal looks with its directory locked whether anything came into it
        self.check_border(c.domain, d.domain)?;
        let stale = match i.find_entry(d, &mut dst, name)? {
            Some(e) => match i.child_below(d, &[], name, e.inode)? {
                Child::Lives => return Err(Error::Exists),
                Child::Stale => true,
                Child::Busy(busy) => {
                    drop((dst, op));
                    Child::wait(&busy);
                    return Ok(None);
                }
            },
            None => false,
        };
        if c.kind == FileKind::Dir {
            return Err(Error::Perm);
        }
        let Some(before) = op.may_take(d, name, c.domain) else { return Ok(None) };
        let mut st = c.state.write();
        if i.exchanging(&st) || !unwritten.holds(op.enter(c.domain), c, &st) {
            return Ok(None);
        }
        let kept = || c.is_open() || i.held.holds(c);
        let tmp = st.nlink == 0 && i.dom(c.domain).orphans.contains(ino) && kept();
        if st.deleted || (st.nlink == 0 && !tmp) {
            return Err(Error::NotFound);
        }
        check_changeable(&st)?;
        check_takes_names(&dst)?;
        self.check_project(&dst, &st)?;
        st.check_gains(name, None)?;
        if let Some(more) = op.lacks_for(&mut [(d.domain, &mut dst), (c.domain, &mut st)]) {
            *blocks = more + ENTRY_BLOCKS;
            return Ok(None);
        }
        op.touch(d, &mut dst)?;
        op.touch(c, &mut st)?;
        let edit = if stale { Edit::Replace(c) } else { Edit::Add(c) };
        i.edit_entry(By::Operation(&mut op), d, &mut dst, name, edit)?;
        st.durability.inode_takes_name(&before);
        let seq = i.shared.name_time(&mut [&mut dst], st.link_seq);
        st.gain_link(d.ino, name, seq);
        st.nlink += 1;
        st.ctime = i.shared.now();
        st.durability.operation_changes_names();
        if tmp {
            i.dom(c.domain).orphans.remove(ino);
            i.held.named(c);
        }
        op.hint(d, name, c);
        Ok(Some(c.attr(&st)))
    }
}
