//! Changing the options of a mounted volume: what `mount -o remount` does.

use super::background::Background;
use super::operation::as_the_last;
use super::{MountedVolume, Running, Volume};
use crate::error::{Error, Result};
use crate::types::Remount;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// How often domains are closed until they are clean, on the way to read-only.
const CLOSED_AGAIN: usize = 4;

impl Volume {
    /// Changes options while the volume is in use. All that can be refused is looked at before anything changes.
    ///
    /// To read-only: operations that would change something answer [`Error::ReadOnly`] from then on; what was done so far
    /// is made durable and checkpointed, and the volume is marked clean on the devices, as by an unmount. (A file that is
    /// removed and still open keeps it from being clean: the next mount reclaims it.)
    ///
    /// To writable, also of a volume that was mounted read-only: its devices are opened for writing, and what recovery
    /// kept in memory is written.
    ///
    /// # Errors
    /// [`Error::Invalid`]: the data mode cannot change. To writable: [`Error::DomainFailed`]; [`Error::ReadOnly`] where a
    /// device is; [`Error::Busy`] where others use it. Of a device; on the way to read-only the volume is that then, and
    /// not clean.
    pub fn remount(&self, how: &Remount) -> Result<()> {
        let mounted = self.mounted();
        if how.data.is_some_and(|data| data != mounted.shared.options.data) {
            return Err(Error::Invalid("the data mode cannot change while the volume is mounted"));
        }
        match how.read_only {
            Some(true) => self.to_read_only()?,
            Some(false) => self.to_writable()?,
            None => {}
        }
        let runtime = &mounted.shared.runtime;
        how.atime.into_iter().for_each(|mode| runtime.set_atime(mode));
        how.nodiratime.into_iter().for_each(|on| runtime.set_nodiratime(on));
        how.lazytime.into_iter().for_each(|on| runtime.set_lazytime(on));
        how.commit_interval.into_iter().for_each(|interval| runtime.set_commit_interval(interval));
        Ok(())
    }

    /// The options that [`Self::remount`] changes, as they are now.
    pub fn options_now(&self) -> Remount {
        let mounted = self.mounted();
        let runtime = &mounted.shared.runtime;
        Remount {
            read_only: Some(mounted.shared.read_only.load(Ordering::Relaxed)),
            data: Some(mounted.shared.options.data),
            commit_interval: Some(runtime.commit_interval()),
            atime: Some(runtime.atime()),
            nodiratime: Some(runtime.nodiratime()),
            lazytime: Some(runtime.lazytime()),
            ..Remount::default()
        }
    }

    /// Starts the threads that work by themselves, where the mount wants them.
    pub(super) fn start_background(&self) -> Result<()> {
        self.restart_background(&mut self.running.lock())
    }

    /// [`Self::start_background`] of a volume that has become read-only, or writable.
    fn restart_background(&self, running: &mut Running) -> Result<()> {
        // joins those that were there
        running.background = None;
        let mounted = self.mounted();
        if mounted.shared.options.background {
            let start = if self.read_only() { Background::start_for_readers } else { Background::start };
            running.background = Some(start(Arc::clone(mounted))?);
        }
        Ok(())
    }

    fn to_read_only(&self) -> Result<()> {
        let mounted = self.mounted();
        let mut running = self.running.lock();
        if self.read_only() {
            return Ok(());
        }
        // joins them
        running.background = None;
        let retired = mounted.retire();
        let result = retired.and(self.restart_background(&mut running));
        tracing::info!(ok = result.is_ok(), "the volume is read-only");
        result
    }

    fn to_writable(&self) -> Result<()> {
        let mounted = self.mounted();
        let mut running = self.running.lock();
        if !self.read_only() {
            return Ok(());
        }
        mounted.sb.read().may_change()?;
        for d in &mounted.domains {
            d.check_failed()?;
        }
        let first = self.overlays.is_waiting();
        self.overlays.write_through().map_err(|e| {
            match e.raw_os_error().map(rustix::io::Errno::from_raw_os_error) {
                Some(rustix::io::Errno::BUSY) => Error::Busy(e.to_string()),
                Some(rustix::io::Errno::ROFS | rustix::io::Errno::ACCESS | rustix::io::Errno::PERM) => Error::ReadOnly,
                _ => Error::Io(e),
            }
        })?;
        if !first {
            // a volume that was mounted read-only has done this already
            mounted.mark_all_used(false, false)?;
        }
        // a hand-over of the read-only volume has left them at rest
        mounted.end_hand_over()?;
        mounted.shared.closing.store(false, Ordering::SeqCst);
        mounted.shared.read_only.store(false, Ordering::SeqCst);
        self.restart_background(&mut running)?;
        tracing::info!("the volume is writable");
        Ok(())
    }
}

impl MountedVolume {
    /// Makes all durable, marks the domains clean and refuses changes from then on. Domains that failed before stay as they
    /// are, and are no error.
    fn retire(&self) -> Result<()> {
        // a change of a tenant that has begun ends first: it writes a header
        let _tenants = self.tenants.lock();
        let failed = || self.domains.iter().filter(|d| d.failed().is_some()).count();
        let before = failed();
        // most of the work while others go on
        let mut r = self.commit_everything();
        self.shared.closing.store(true, Ordering::SeqCst);
        // a shrink that gives a group up has done so, and gives up no other
        drop(self.bat.lock());
        // operations that entered before are committed by this; those that enter later are refused
        r = r.and(self.commit_everything());
        // files that lost their last name by one of those waited for it
        r = r.and(as_the_last(|| self.reap_zombies()));
        r = r.and(self.commit_everything());
        // An operation that was about to enter may have made room in a journal meanwhile, by a commit behind the
        // checkpoint; it is refused then, and does so once.
        for _ in 0..CLOSED_AGAIN {
            r = r.and(self.close_all());
            if r.is_err() || !self.domains.iter().any(|d| d.is_left_unclean()) {
                break;
            }
        }
        // a change of the size that has begun ends first, and the next one sees it
        let bat = self.bat.lock();
        self.shared.read_only.store(true, Ordering::SeqCst);
        drop(bat);
        match r {
            Err(Error::DomainFailed { .. }) if failed() == before => Ok(()),
            r => r,
        }
    }
}
