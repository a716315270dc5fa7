//! What must be durable before a name may change, and the rare commits in the foreground that make it so.
//!
//! The rules are `crate::braid::rules`; here they are asked with what the volume remembers. Nothing here is done inside a
//! gate: an operation that finds a rule broken under its locks lets everything go, commits here, and starts again.

use crate::braid::frontier::Frontier;
use crate::braid::rules::{Taking, end_directory, take_name};
use crate::braid::vacated::{Vacated, VacatedList};
use crate::cell::dir::OpenBucket;
use crate::cell::{Cell, State};
use crate::domain::{Domain, Enter};
use crate::error::Result;
use crate::types::*;
use crate::volume::MountedVolume;
use std::sync::Arc;

/// Whether an inode is moved without a commit of the directories above it, since nothing has written it yet.
#[derive(Debug, Clone, Copy, Default)]
#[must_use]
pub(super) struct Unwritten(bool);

impl Unwritten {
    /// Whether that is still so, for who has entered the inode's domain, and locked the inode and the directory that it leaves.
    pub fn holds(self, e: &Enter<'_>, c: &Cell, st: &State) -> bool {
        !self.0 || is_unwritten(e.domain, e.tx().id, c, st)
    }
}

/// Whether nothing has written the inode in transaction `tx` of its domain, and no sync is about to: one that is under way may
/// have seen its names. That of the inode holds its lock; those of a directory, and of everything, want the transaction.
fn is_unwritten(d: &Domain, tx: TxId, c: &Cell, st: &State) -> bool {
    st.durability.is_unwritten(tx) && !d.is_wanted(tx) && c.sync.try_lock().is_some()
}

impl MountedVolume {
    /// Whether a crash may still take back what domain `d` did in transaction `t`. Of a domain that has failed the next mount takes it
    /// back, for certain: nobody takes a name, or ends a directory, that its inodes have left so. To commit it gives that domain's
    /// error ([`MountedVolume::pending`] is of what is waited for).
    fn undecided(&self, d: DomainId, t: TxId) -> bool {
        let d = self.dom(d);
        d.committed_tx() < t && d.keeps_journal()
    }

    /// Who left `dir/name` without that being durable yet (`crate::braid::vacated`).
    pub fn vacated_by(&self, dir: &Cell, name: &[u8]) -> VacatedList {
        let mut all = self.dom(dir.domain).vacated.get(dir.ino, name, |d, t| !self.undecided(d, t));
        all.retain(|l| self.undecided(l.domain, l.tx));
        all
    }

    /// [`Self::vacated_by`] of a name with `hash`, whose bucket the caller has locked.
    pub(super) fn vacated_lately(
        &self,
        dir: &Cell,
        name: &[u8],
        hash: u64,
        bucket: &mut OpenBucket<'_>,
    ) -> VacatedList {
        let mut all =
            self.dom(dir.domain).vacated.get_lately(dir.ino, (name, hash), bucket.left(), |d, t| !self.undecided(d, t));
        all.retain(|l| self.undecided(l.domain, l.tx));
        all
    }

    /// An inode left `dir/name`. The caller has the directory locked for writing.
    pub(super) fn note_vacated(&self, dir: &Cell, st: &State, name: &[u8], left: Vacated) {
        let vacated = &self.dom(dir.domain).vacated;
        if st.is_shared_dir() {
            vacated.add_shared(dir.ino, name, left);
        } else {
            vacated.add(dir.ino, name, left, |d, t| !self.undecided(d, t));
        }
    }

    /// Inodes that left a directory without that being durable yet, which must be so before its end is, decided in domain
    /// `end`: its own where it is removed, the newcomer's where it is replaced.
    pub fn vacated_in(&self, dir: &Cell, end: DomainId) -> Frontier {
        let mut all = end_directory(self.dom(dir.domain).vacated.of_dir(dir.ino), end);
        all.retain(|d, t| self.undecided(d, t));
        all
    }

    /// Whether something left a directory, and lives on, without that being durable yet.
    pub fn any_vacated_in(&self, dir: &Cell) -> bool {
        self.dom(dir.domain).vacated.of_dir(dir.ino).any(|d, t| self.undecided(d, t))
    }

    /// Makes the rename or unlink durable by which an inode of another domain than `newcomer` left `dir/name`, if there is one.
    /// Not inside a gate. One of the rare commits in the foreground.
    pub fn commit_vacating_rename(&self, dir: &Cell, name: &[u8], newcomer: DomainId) -> Result<()> {
        match take_name(&self.vacated_by(dir, name), newcomer) {
            Taking::Commits(first) => self.commit_some(&first),
            Taking::Syncs(_) => Ok(()),
        }
    }

    /// Whether the inode was exchanged with one of another domain, or lost a name to one, that is not durable yet.
    /// Recovery completes such an exchange from this inode's record, and gives such a name back as of the time of the
    /// record's last change of names: until then its names may not change, which is until the next mount where that domain has
    /// failed. (Nor would its record have room for many tombstones.)
    pub fn exchanging(&self, st: &State) -> bool {
        st.durability.is_judged() && st.durability.waits_for().any(|d, t| self.undecided(d, t))
    }

    /// Makes the partner's side of an exchange durable before names of `c` change. Not inside a gate.
    pub fn commit_exchange(&self, c: &Cell) -> Result<()> {
        let mut waits = {
            let st = c.state.read();
            if !self.exchanging(&st) {
                return Ok(());
            }
            st.durability.waits_for().clone()
        };
        waits.retain(|d, t| self.undecided(d, t));
        self.commit_some(&waits)
    }

    /// Makes all renames and unlinks from a directory durable before it goes ([`Self::vacated_in`]). Not inside a gate.
    pub fn commit_vacating_renames(&self, dir: &Cell, end: DomainId) -> Result<()> {
        self.commit_some(&self.vacated_in(dir, end))
    }

    /// An object that a crash brings back moves into `dir`: the directories above it that were never durable, and live in
    /// other domains than the object, are made durable first. Else a crash could keep the object's move and lose the only
    /// place where it hangs. So, too, are those of the object's own domain where an inode of another domain moves it
    /// (`moved_by`, in an exchange). Not inside a gate; one of the rare commits in the foreground. The error is that of a domain that has
    /// failed, with a directory that never was durable.
    ///
    /// An object that nothing has written yet needs none of that, as long as it stays so: the caller asks the answer again
    /// ([`Unwritten::holds`]) when it has entered the gate and locked the object.
    pub(super) fn commit_new_parents(&self, dir: &Cell, child: &Cell, moved_by: DomainId) -> Result<Unwritten> {
        let alone = moved_by == child.domain;
        // what hangs below a directory moves with it
        if alone && child.kind != FileKind::Dir {
            let domain = self.dom(child.domain);
            if is_unwritten(domain, domain.running(), child, &child.state.read()) {
                return Ok(Unwritten(true));
            }
        }
        self.commit_above(dir, child, alone).map(|()| Unwritten(false))
    }

    /// [`Self::commit_new_parents`] of what may be there after a crash. `alone`: none of another domain moves it.
    pub(super) fn commit_above(&self, dir: &Cell, child: &Cell, alone: bool) -> Result<()> {
        let mut above: Option<Arc<Cell>> = None;
        let mut seen = std::collections::HashSet::new();
        loop {
            let at = above.as_deref().unwrap_or(dir);
            if at.ino == InodeNo::ROOT || !seen.insert(at.ino) {
                return Ok(());
            }
            if (!alone || at.domain != child.domain) && !self.ever_durable(at)? {
                // of one that has failed the next mount takes the directory back, and would take what is in it along
                self.dom(at.domain).check_failed()?;
                let Some(dir) = self.find(dir.ino)?.filter(|c| c.is(dir.inode())) else { return Ok(()) };
                return self.sync_by_commit(&dir);
            }
            let parent = at.state.read().parent;
            if parent == InodeNo::ROOT {
                return Ok(());
            }
            // removed meanwhile, if it is not there
            above = self.find(parent)?;
            if above.is_none() {
                return Ok(());
            }
        }
    }

    /// Whether the inode is there after a crash, in some state.
    fn ever_durable(&self, c: &Cell) -> Result<bool> {
        let d = self.dom(c.domain);
        // mostly memory knows
        if c.state.read().durability.ever_durable(d.committed_tx()) {
            return Ok(true);
        }
        let known = d.nodes.get(c.ino.node())?;
        Ok(known.used() && known.generation == c.generation)
    }
}
