//! A tenant that is empty comes to have no journal.
//!
//! What lies in a tenant was promised to survive a crash, and journals of other domains may speak of it. So no name crosses its
//! border from now on; then all is committed and every domain checkpointed, after which no journal speaks of it; then, with its
//! directory locked, so that nothing comes into it, the header says that there is no journal.

use super::MountedVolume;
use crate::cell::Cell;
use crate::domain::Domain;
use crate::domain::tenant::Binding;
use crate::error::{Error, Result};
use std::sync::Arc;
use std::time::Duration;

/// How often it is tried where somebody changes the directory meanwhile.
const ATTEMPTS: usize = 8;
/// A kernel that was told that files are gone lets go of them a moment later: so often, and so long each time, that is waited for.
const LOOKS: usize = 25;
const LOOK: Duration = Duration::from_millis(20);

impl MountedVolume {
    /// Has the header say what `to` says, durably: that there is no journal. Under the lock of tenants.
    ///
    /// # Errors
    /// [`Error::Invalid`] where something lies in the tenant, or is open; nothing has changed then. [`Error::Busy`];
    /// [`Error::NoSpace`] where the header has no room for the directory's attributes; of a device.
    pub(super) fn become_scratch(&self, d: &Arc<Domain>, to: &mut Binding) -> Result<()> {
        let root = self.cell(to.root.ino)?;
        // before anything is written
        self.check_journals()?;
        self.check_empty(d, &root)?;
        self.tell_scratch()?;
        d.close_border(true);
        match self.bind_empty(d, &root, to) {
            Ok(()) => {
                d.begin_scratch();
                d.reserve_all(false)
            }
            Err(e) => {
                to.root_record.clear();
                d.close_border(false);
                Err(e)
            }
        }
    }

    fn bind_empty(&self, d: &Domain, root: &Cell, to: &mut Binding) -> Result<()> {
        for _ in 0..ATTEMPTS {
            let record = d.root_record(root, &root.state.read())?;
            // its name, too, is durable then: the record says where it hangs
            self.forget_removed()?;
            self.checkpoint_all()?;
            self.check_journals()?;
            self.check_empty(d, root)?;
            let mut st = root.state.write();
            // nothing was made in it since, as whoever makes something changes its times
            if d.root_record(root, &st)? == record && d.with_index(root.ino, &mut st, |ix, load| ix.is_empty(load))? {
                to.root_record = record;
                return d.bind(Some(to));
            }
        }
        Err(Error::Busy("the directory of the tenant changes all the time".into()))
    }

    /// # Errors
    /// [`Error::DomainFailed`] where a domain has failed: the next mount replays its journal, which may speak of what was in
    /// the tenant, and no commit or checkpoint changes that until then.
    fn check_journals(&self) -> Result<()> {
        self.domains.iter().try_for_each(|d| d.check_failed())
    }

    fn check_empty(&self, d: &Domain, root: &Cell) -> Result<()> {
        let is_empty = d.with_index(root.ino, &mut root.state.write(), |ix, load| ix.is_empty(load))?;
        for look in 0..LOOKS {
            if is_empty && d.inodes.used_and_limit().0 <= 1 {
                return Ok(());
            }
            if !is_empty {
                break;
            }
            if look > 0 {
                std::thread::sleep(LOOK);
            }
            self.forget_removed()?;
        }
        Err(Error::Invalid(
            "only an empty tenant comes to have no journal, since what is in it was promised to survive a crash: remove it \
             and close what is open, or make another tenant with --journal scratch",
        ))
    }
}
