//! Access times: when a read is noted.
//!
//! A read looks at the times under the lock that it holds anyway, and only where the mount's mode asks for a new one it
//! changes anything: the inode joins the running transaction, which commits when it commits. So a file that is read again
//! and again costs nothing with relatime, and with strictatime one record per commit.

use crate::cell::{Cell, State};
use crate::types::*;
use crate::volume::MountedVolume;
use crate::volume::operation::Op;
use braidfs_format::inode::NOATIME;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// A day, in seconds: relatime updates an access time that is older.
const RELATIME_AGE: i64 = 24 * 3600;

impl MountedVolume {
    /// The time that an inode read just now gets as its access time, where the mount's mode asks for it.
    pub(crate) fn access_due(&self, st: &State) -> Option<Timestamp> {
        let runtime = &self.shared.runtime;
        let mode = runtime.atime();
        if mode == AtimeMode::Noatime || self.shared.read_only.load(Relaxed) {
            return None;
        }
        if runtime.nodiratime() && FileKind::from_mode(st.mode) == Some(FileKind::Dir) {
            return None;
        }
        let (mtime, ctime) = st.change_times();
        let due = mode == AtimeMode::Strictatime
            || st.atime <= mtime
            || st.atime <= ctime
            || self.shared.second().saturating_sub(st.atime.sec) >= RELATIME_AGE;
        if !due || st.flags & NOATIME != 0 || st.deleted {
            return None;
        }
        Some(self.shared.now()).filter(|now| *now != st.atime)
    }

    /// Updates the access time.
    pub(crate) fn set_atime(&self, c: &Arc<Cell>, now: Timestamp) {
        // a volume too full for an access time is still readable
        if let Ok((mut op, mut st)) = Op::on_whole(self, c, (1, 0), true)
            && !st.deleted
            && op.touch_content(c, &mut st).is_ok()
        {
            st.atime = now;
        }
    }
}
