//! Changing attributes: mode, owner, size, times (chmod, chown, truncate, utimensat).

use super::acl;
use crate::cell::{Body, Cell, State};
use crate::error::{Error, Result};
use crate::file::cuts;
use crate::planted::sharing::{Place, share};
use crate::planted::{Bug, planted};
use crate::types::*;
use crate::volume::operation::Op;
use crate::volume::{MountedVolume, Volume};
use braidfs_format::inode::{APPEND, IMMUTABLE, NOATIME, NOCOW, PROJECT_MASK};
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl Volume {
    /// Changes attributes; a size change truncates or extends.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::NoSpace`], [`Error::TooBig`]; [`Error::Quota`], also of a group that it is given to, unless
    /// this thread is not held to such limits ([`crate::forced`]); [`Error::Perm`] for immutable inodes, and for append-only
    /// ones but where the times are set to now; [`Error::Invalid`] for times of 10^9 nanoseconds or more.
    pub fn setattr(&self, ino: InodeNo, set: &SetAttr) -> Result<Attr> {
        share(Place::SetAttr);
        check_times(set)?;
        let i = self.mounted();
        let c = i.cell(ino)?;
        let _paid = i.pace(c.domain, Demand::change());
        if let Some(attr) = i.set_beside(&c, set)? {
            return Ok(attr);
        }
        // before anything is changed
        if set.flags.is_some_and(|f| f & !(NOCOW | IMMUTABLE | APPEND | NOATIME) != 0) {
            return Err(Error::Unsupported("an inode flag"));
        }
        if set.size.is_some() {
            match c.kind {
                FileKind::File => {}
                FileKind::Dir => return Err(Error::IsDir),
                _ => return Err(Error::Invalid("not a regular file")),
            }
        }
        if set.flags.is_some_and(|f| f & (IMMUTABLE | APPEND) != 0) {
            self.note_guarded()?;
        }
        let mut replaced = i.replaced();
        let mut done = self.set_all(&c, set);
        while let Err(Error::Quota(owner)) = done
            && i.end_replaced_of(owner, &mut replaced)
        {
            done = self.set_all(&c, set);
        }
        if done.is_err() && set.size.is_some() {
            i.give_back_surplus(&c);
        }
        done
    }

    /// [`Self::setattr`] of mode and times of an inode that the running transaction will write anyway, of the generation meant:
    /// a change in memory, and nothing else. A front end that is told of each time by itself (FUSE after a rename) needs
    /// not open the file for it. `None` where it is more than that, or the inode another one; nothing is changed then.
    ///
    /// # Errors
    /// Where the domain has failed, [`Error::ReadOnly`]; [`Error::Invalid`] as there.
    pub fn setattr_beside(&self, ino: InodeNo, is_it: impl Fn(u32) -> bool, set: &SetAttr) -> Result<Option<Attr>> {
        check_times(set)?;
        let i = self.mounted();
        // who has a rate waits for its turn
        if i.shared.rates.load(Ordering::Relaxed) {
            return Ok(None);
        }
        match i.look(ino) {
            Some(c) if is_it(c.generation) => i.set_beside(&c, set),
            _ => Ok(None),
        }
    }

    /// Apart from [`Self::setattr`], so that the attributes come to where they are wanted, and are not moved there.
    #[inline(never)]
    fn set_all(&self, c: &Arc<Cell>, set: &SetAttr) -> Result<Attr> {
        let i = self.mounted();
        let (mut attempt, mut blocks) = (0, 2);
        loop {
            let mut op = Op::new(i);
            op.begin(&[c.domain], blocks, true)?;
            let mut st = c.state.write();
            if st.deleted {
                return Err(Error::NotFound);
            }
            allowed(&st, set)?;
            if let Some(more) = op.lacks(c, &mut st) {
                blocks = more;
                continue;
            }
            // what was to be written in place has no blocks reserved: it is written before that ends
            let leaves_place = set.flags.is_some_and(|f| f & NOCOW == 0) && st.flags & NOCOW != 0;
            if leaves_place && matches!(&st.body, Body::File(f) if f.pages.dirty_count() > 0) {
                drop(st);
                drop(op);
                i.flush_cell(c)?;
                continue;
            }
            let cut = set.size.filter(|size| cuts(&st, *size));
            if cut.is_some() && !op.expect_frees(c, &st) {
                drop((st, op));
                i.dom(c.domain).make_journal_room()?;
                continue;
            }
            if set.size.is_some() || leaves_place {
                op.write_out_older(c, &mut st)?;
            }
            // of very many extents some at a time: a crash may leave the file between its old and its new size
            // (what lies behind the end of a file that grows was allocated to stay there)
            if let Some(size) = cut
                && i.truncate_piece(&mut op, c, &mut st, size)?
            {
                continue;
            }
            let quotas = &i.shared.quotas;
            let mut charge = quotas.charge(c, &st);
            let ready = match set.size {
                Some(size) => i.prepare_truncate(&mut op, c, &mut st, size, &mut charge)?,
                None => !leaves_place || i.load_page_to_move(c, &mut st, &mut charge)?,
            };
            if !ready {
                drop(charge);
                drop(st);
                drop(op);
                i.make_room(i.dom(c.domain), &mut attempt)?;
                continue;
            }
            let before = times(&st);
            if only_times(set) || (set.size.is_some() && planted(Bug::TruncateForgotten)) {
                op.touch_content(c, &mut st)?;
            } else {
                op.touch(c, &mut st)?;
            }
            let now = i.shared.now();
            if let Some(size) = set.size {
                let had = quotas.blocks_of(&st);
                i.truncate(&op, c, &mut st, size);
                charge.settle(had, quotas.blocks_of(&st));
                st.mtime = now;
                st.durability.operation_changes_data();
            }
            if let Some(g) = set.gid {
                // before all else that is changed, but for a size, which no system call changes together with it
                quotas.regroup(c, &mut st, g, set.size.is_some())?;
                st.durability.operation_changes_data();
            }
            if let Some(u) = set.uid {
                quotas.transfer(c, &mut st, |st| st.uid = u);
                st.durability.operation_changes_data();
            }
            if leaves_place {
                i.dirty_last_page(i.dom(c.domain), &mut st);
            }
            set_in(op.tx(c.domain).id, &mut st, set, c.kind, now, before);
            if c.kind == FileKind::Dir && !only_times(set) {
                i.dom(c.domain).keep_root(c, &st)?;
            }
            return Ok(c.attr(&st));
        }
    }
}

impl MountedVolume {
    /// Changes mode and times of an inode that the running transaction will write anyway: nothing is reserved, and nothing
    /// joins the transaction. `None` where it is more than that, or an inode that its flags guard.
    ///
    /// Not inside the gate, for the reason that overwrites of dirty pages are not (`write_to_dirty_pages`): where the
    /// transaction is flipped meanwhile, its commit waits for the cell's lock and takes the change with it, as if it had
    /// come before the flip. A thread that has changed something in the next transaction sees its number, and does not come here.
    fn set_beside(&self, c: &Cell, set: &SetAttr) -> Result<Option<Attr>> {
        // a volume that takes no more operations says so by an operation
        if !is_small(set) || self.shared.closing.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let d = self.dom(c.domain);
        d.check_writable()?;
        // the header of its domain is to be told
        if set.mode.is_some() && d.keeps_root(c) {
            return Ok(None);
        }
        let mut guard = c.state.write();
        let st = &mut *guard;
        let tx = d.running();
        let guarded = st.flags & (IMMUTABLE | APPEND) != 0;
        if st.durability.dirty_tx() != Some(tx) || st.deleted || guarded {
            return Ok(None);
        }
        st.durability.operation_makes_version();
        if set.mode.is_some() {
            st.durability.operation_changes_inode(tx);
        }
        let before = times(st);
        set_in(tx, st, set, c.kind, self.shared.now(), before);
        Ok(Some(c.attr(st)))
    }
}

/// Access, modification and change time.
fn times(st: &State) -> [Timestamp; 3] {
    [st.atime, st.mtime, st.ctime]
}

/// Sets mode, flags and times of an inode that transaction `tx` writes; `before` the change its times were these.
fn set_in(tx: TxId, st: &mut State, set: &SetAttr, kind: FileKind, now: Timestamp, before: [Timestamp; 3]) {
    set_mode_and_flags(st, set, kind, tx);
    set_times(st, set, now);
    if before != times(st) {
        st.durability.operation_changes_times();
    }
}

/// Sets mode and flags, in transaction `tx`.
fn set_mode_and_flags(st: &mut State, set: &SetAttr, kind: FileKind, tx: TxId) {
    if let Some(m) = set.mode {
        st.mode = (st.mode & !0o7777) | (m & 0o7777);
        acl::chmod(st);
        st.durability.operation_changes_data();
    }
    if let Some(f) = set.flags {
        if f & NOCOW != 0 && st.flags & NOCOW == 0 {
            // blocks of an ordinary file stay as they are while a crash could make it one again
            st.durability.file_becomes_in_place(tx);
        }
        st.flags = f | (st.flags & PROJECT_MASK);
        st.durability.operation_changes_data();
    }
    if set.kill_suid && kind != FileKind::Dir {
        let mut m = st.mode & !0o4000;
        // without group execute, setgid is a mark for mandatory locks
        if m & 0o010 != 0 {
            m &= !0o2000;
        }
        st.mode = m;
    }
    if set.kill_sgid {
        st.mode &= !0o2000;
    }
}

/// Sets the times that `set` names; the change's own is `now`, where it names none.
fn set_times(st: &mut State, set: &SetAttr, now: Timestamp) {
    let time = |t: SetTime| match t {
        SetTime::Now => now,
        SetTime::At(t) => t,
    };
    st.ctime = set.ctime.map_or(now, time);
    if let Some(t) = set.atime {
        st.atime = time(t);
    }
    if let Some(t) = set.mtime {
        st.mtime = time(t);
    }
}

/// Refuses times that no record can have: it would not be read again.
fn check_times(set: &SetAttr) -> Result<()> {
    let has_one = |t: &Option<SetTime>| if let Some(SetTime::At(t)) = t { is_over(t) } else { false };
    if has_one(&set.atime) || has_one(&set.mtime) || has_one(&set.ctime) {
        return Err(Error::Invalid("a time of 10^9 nanoseconds or more"));
    }
    Ok(())
}

/// Not part of who calls it: the compiler would look at the time first, and then whether there is one, which checkers of memory take
/// for a mistake.
#[inline(never)]
fn is_over(t: &Timestamp) -> bool {
    t.nsec >= 1_000_000_000
}

/// Whether nothing but times is set.
fn only_times(set: &SetAttr) -> bool {
    set.mode.is_none() && is_small(set)
}

/// Whether nothing but mode and times is set.
fn is_small(set: &SetAttr) -> bool {
    // all by name: whatever comes to be set is not small by itself
    let SetAttr {
        uid,
        gid,
        size,
        flags,
        kill_suid,
        kill_sgid,
        mode: _,
        atime: _,
        mtime: _,
        ctime: _,
        accepted: _,
        later: (),
    } = *set;
    uid.is_none() && gid.is_none() && size.is_none() && flags.is_none() && !kill_suid && !kill_sgid
}

/// Whether the inode's flags let it change so. Flags themselves are for the front end to guard.
fn allowed(st: &State, set: &SetAttr) -> Result<()> {
    if st.flags & (IMMUTABLE | APPEND) == 0 || set.flags.is_some() {
        return Ok(());
    }
    // of an append-only inode both times may become now, as by `touch`
    let touch = set.ctime.is_none() && set.atime == set.mtime && set.atime.is_none_or(|t| t == SetTime::Now);
    let privileges_kept = SetAttr { kill_suid: false, kill_sgid: false, ..*set };
    if only_times(&privileges_kept) && (set.accepted || (touch && st.flags & IMMUTABLE == 0)) {
        Ok(())
    } else {
        Err(Error::Perm)
    }
}

#[cfg(test)]
mod tests;
