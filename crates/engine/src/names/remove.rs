//! Taking names away: unlink, rmdir.

use super::asker::Asker;
use super::checks::{check_alive, check_changeable, check_name};
use super::entries::Child;
use crate::braid::entry::{By, Edit};
use crate::braid::vacated::Vacated;
use crate::cell::Cell;
use crate::error::{Error, Result};
use crate::types::*;
use crate::volume::operation::Op;
use crate::volume::{MountedVolume, Volume};
use std::sync::Arc;

/// Metadata blocks that a removal can dirty.
pub(super) const REMOVE_BLOCKS: u64 = 3;

impl Volume {
    /// Removes a name of something that is no directory.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::IsDir`]; [`Error::NoSpace`] where it is the last name of what is open or held, and the journal has
    /// no room for more such: a sixteenth of it lists them, 8 bytes for each. (Files that were replaced, and wait for
    /// who replaced them, are deleted first.)
    pub fn unlink(&self, dir: InodeNo, name: &[u8]) -> Result<()> {
        let i = self.mounted();
        i.pace_change(dir);
        i.remove_in(&i.dir_cell(dir)?, name, false)
    }

    /// Removes an empty directory.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::NotDir`], [`Error::NotEmpty`].
    pub fn rmdir(&self, dir: InodeNo, name: &[u8]) -> Result<()> {
        let i = self.mounted();
        i.pace_change(dir);
        i.remove_in(&i.dir_cell(dir)?, name, true)
    }
}

impl MountedVolume {
    /// Removes a name of a directory that is at hand: [`Volume::rmdir`], else [`Volume::unlink`].
    pub(crate) fn remove_in(&self, d: &Arc<Cell>, name: &[u8], want_dir: bool) -> Result<()> {
        self.remove_seen(d, || d.clone(), name, want_dir, Asker::ANY)
    }

    /// [`Self::remove_in`] in a directory that is only looked at, for `asker`. `whole`: the directory for more than that.
    pub(super) fn remove_seen(
        &self,
        d: &Cell,
        whole: impl FnOnce() -> Arc<Cell>,
        name: &[u8],
        want_dir: bool,
        asker: Asker<'_>,
    ) -> Result<()> {
        if !want_dir && Self::is_shared(d) && self.remove_beside(d, name, asker)?.is_some() {
            return Ok(());
        }
        self.remove_alone(&whole(), name, want_dir, asker)
    }

    /// [`Self::remove_in`] with the directory for itself.
    fn remove_alone(&self, d: &Arc<Cell>, name: &[u8], want_dir: bool, asker: Asker<'_>) -> Result<()> {
        if want_dir && name == b"." {
            return Err(Error::Invalid("the last part of the path is `.`"));
        }
        if want_dir && name == b".." {
            return Err(Error::NotEmpty);
        }
        check_name(name)?;
        let (i, hash) = (self, self.hash(name));
        let mut blocks = REMOVE_BLOCKS;
        loop {
            // outside the gate: which domains the operation will change
            let c = i.lookup_to_leave(d, name)?;
            asker.check_remove_early(d, &c)?;
            match (want_dir, c.kind == FileKind::Dir) {
                (true, false) => return Err(Error::NotDir),
                (false, true) => return Err(Error::IsDir),
                _ => {}
            }
            if want_dir {
                i.commit_vacating_renames(&c, c.domain)?;
            }
            let gone = i.replaced_gone(c.domain);
            let mut op = Op::new(i);
            op.begin(&[d.domain, c.domain], blocks, true)?;
            let mut dst = d.state.write();
            check_alive(&dst)?;
            match i.find_entry_at(d, &mut dst, name, hash)? {
                Some(e) if c.is(e.inode) => {}
                _ => continue, // another one has the name now
            }
            let mut st = c.state.write();
            if st.deleted {
                continue;
            }
            asker.check_remove(&dst, st.uid)?;
            let lacks = if i.goes_with_name(&c, &st) {
                op.lacks_for(&mut [(d.domain, &mut dst)])
            } else {
                op.lacks_for(&mut [(d.domain, &mut dst), (c.domain, &mut st)])
            };
            if let Some(more) = lacks {
                blocks = REMOVE_BLOCKS + more;
                continue;
            }
            if !i.expect_to_go(&op, &c, &st) {
                drop((st, dst, op));
                i.dom(c.domain).make_journal_room()?;
                continue;
            }
            if i.exchanging(&st) {
                drop((st, dst, op));
                i.commit_exchange(&c)?;
                continue;
            }
            check_changeable(&st)?;
            check_changeable(&dst)?;
            if !i.may_stay(&c, &st, false) {
                drop((st, dst, op));
                i.shorten_orphans(c.domain, gone)?;
                continue;
            }
            i.check_no_tenant(&c)?;
            if want_dir && !i.dom(c.domain).with_index(c.ino, &mut st, |ix, load| ix.is_empty(load))? {
                match i.only_stale(&c, &mut st, &[(d, &dst)])? {
                    Child::Stale => {}
                    Child::Lives => return Err(Error::NotEmpty),
                    Child::Busy(busy) => {
                        drop((st, dst, op));
                        Child::wait(&busy);
                        continue;
                    }
                }
            }
            if want_dir && !i.vacated_in(&c, c.domain).is_empty() {
                continue;
            }
            // what is durable by now must not keep the inode when this was its last name
            i.dom(c.domain).forget_durable(&mut st);
            op.touch(d, &mut dst)?;
            op.touch(&c, &mut st)?;
            i.edit_entry_at(By::Operation(&mut op), d, &mut dst, (name, hash), Edit::Remove)?;
            let now = i.shared.now();
            st.ctime = now;
            let seq = i.shared.name_time(&mut [&mut dst], st.link_seq);
            st.remove_link(d.ino, name, seq);
            st.durability.operation_changes_names();
            op.hint(d, name, &c);
            i.name_gone(&op, &c, &mut st);
            // where it lives on, its other names may not be durable yet; what moved out of a directory would come back
            // into it
            let moved_out = want_dir && i.any_vacated_in(&c);
            let left = Vacated { domain: c.domain, tx: op.tx(c.domain).id, alive: st.nlink > 0 || moved_out };
            i.note_vacated(d, &dst, name, left);
            return Ok(());
        }
    }
}
