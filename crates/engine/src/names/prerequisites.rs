//! What must be durable before a name may change, and the rare commits in the foreground that make it so.
//!
//! The rules are `crate::braid::rules`; here they are asked with what the volume remembers. Nothing here is done inside a
//! gate: an operation that finds a rule broken under its locks lets everything go, commits here, and starts again.

use crate::braid::frontier::Frontier;
use crate::braid::rules::{Taking, end_directory, take_name};
use crate::braid::vacated::VacatedList;
use crate::cell::{Cell, State};
use crate::error::Result;
use crate::types::*;
use crate::volume::MountedVolume;
use std::sync::Arc;

impl MountedVolume {
    /// Who left `dir/name` without that being durable yet (`crate::braid::vacated`).
    pub fn vacated_by(&self, dir: &Cell, name: &[u8]) -> VacatedList {
        let mut all = self.dom(dir.domain).vacated.get(dir.ino, name);
        all.retain(|l| self.pending(l.domain, l.tx));
        all
    }

    /// Inodes that left a directory without that being durable yet, which must be so before its end is, decided in domain
    /// `end`: its own where it is removed, the newcomer's where it is replaced.
    pub fn vacated_in(&self, dir: &Cell, end: DomainId) -> Frontier {
        let mut all = end_directory(self.dom(dir.domain).vacated.of_dir(dir.ino), end);
        all.retain(|d, t| self.pending(d, t));
        all
    }

    /// Whether something left a directory, and lives on, without that being durable yet.
    pub fn any_vacated_in(&self, dir: &Cell) -> bool {
        self.dom(dir.domain).vacated.of_dir(dir.ino).any(|d, t| self.pending(d, t))
    }

    /// Makes the rename durable by which an inode of another domain than `newcomer` left `dir/name`, if there is one.
    /// Not inside a gate. One of the rare commits in the foreground.
    pub fn commit_vacating_rename(&self, dir: &Cell, name: &[u8], newcomer: DomainId) -> Result<()> {
        match take_name(&self.vacated_by(dir, name), newcomer) {
            Taking::Commits(first) => self.commit_some(&first),
            Taking::Syncs(_) => Ok(()),
        }
    }

    /// Whether the inode was exchanged with one of another domain, or lost a name to one, that is not durable yet.
    /// Recovery completes such an exchange from this inode's record, and gives such a name back as of the time of the
    /// record's last change of names: until then its names may not change.
    pub fn exchanging(&self, st: &State) -> bool {
        st.durability.is_judged() && st.durability.waits_for().any(|d, t| self.pending(d, t))
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
        waits.retain(|d, t| self.pending(d, t));
        self.commit_some(&waits)
    }

    /// Makes all renames away from a directory durable before it goes ([`Self::vacated_in`]). Not inside a gate.
    pub fn commit_vacating_renames(&self, dir: &Cell, end: DomainId) -> Result<()> {
        self.commit_some(&self.vacated_in(dir, end))
    }

    /// An object that a crash brings back moves into `dir`: the directories above it that were never durable, and live in
    /// other domains than the object, are made durable first. Else a crash could keep the object's move and lose the only
    /// place where it hangs. So, too, are those of the object's own domain where an inode of another domain moves it
    /// (`moved_by`, in an exchange). Not inside a gate; one of the rare commits in the foreground.
    pub(crate) fn commit_new_parents(&self, dir: &Arc<Cell>, child: &Arc<Cell>, moved_by: DomainId) -> Result<()> {
        let alone = moved_by == child.domain;
        // what hangs below a directory moves with it
        if alone && child.kind != FileKind::Dir && !self.ever_durable(child)? {
            return Ok(());
        }
        let mut at = dir.clone();
        let mut seen = std::collections::HashSet::new();
        while at.ino != NodeId::ROOT && seen.insert(at.ino) {
            if (!alone || at.domain != child.domain)
                && self.dom(at.domain).failed().is_none()
                && !self.ever_durable(&at)?
            {
                return self.sync_by_commit(dir);
            }
            let parent = at.state.read().parent;
            let Some(above) = self.find(parent)? else { return Ok(()) }; // removed meanwhile
            at = above;
        }
        Ok(())
    }

    /// Whether the inode is there after a crash, in some state.
    fn ever_durable(&self, c: &Cell) -> Result<bool> {
        let synced = c.state.read().durability.ever_synced();
        let known = self.dom(c.domain).nodes.get(c.ino)?;
        Ok(synced || (known.used() && known.generation == c.generation))
    }
}
