//! Options that change while the volume is mounted, see [`crate::control::remount`].

use crate::abi;
use crate::control::{ATIME_MODES, DATA_MODES, NO, RemountArg, YES};
use crate::fs::{BraidFs, errno};
use crate::ops::flags::ioctl_out;
use crate::request::{Answer, Handled, Outcome, Request};
use crate::requester;
use braidfs::Remount;
use rustix::io::Errno;
use std::time::Duration;
use zerocopy::FromBytes;

impl BraidFs {
    pub(super) fn remount_ioctl(
        &self,
        req: &Request<'_>,
        arg: &abi::IoctlIn,
        input: &[u8],
        out: &mut Answer,
    ) -> Handled {
        if !requester::is_administrator(req) {
            return Err(Errno::PERM);
        }
        let (asked, _) = RemountArg::read_from_prefix(input).map_err(|_| Errno::INVAL)?;
        let (how, sync) = understand(&asked)?;
        // Devices would be opened for writing whose descriptors pass to another process as a reader's; a tenant would be mounted
        // by itself to be written to.
        let turns = how.read_only.is_some_and(|wanted| wanted != self.vol.read_only());
        let _none = if turns { Some(self.upgrades.none_meanwhile().ok_or(Errno::BUSY)?) } else { None };
        if how.read_only == Some(true) && !self.connections.tenants().is_empty() {
            // what the kernel holds dirty of a tenant that is mounted by itself could not be written any more
            return Err(Errno::BUSY);
        }
        self.vol.remount(&how).map_err(|e| match e {
            // why is in the log
            braidfs::Error::DomainFailed { .. } => Errno::ROFS,
            e => errno(e),
        })?;
        self.durable.set(sync, None);
        ioctl_out(out, arg.out_size as usize, &())?;
        Ok(Outcome::Reply)
    }
}

fn understand(arg: &RemountArg) -> Result<(Remount, Option<bool>), Errno> {
    fn one<T: Copy>(all: &[T], number: u32) -> Result<Option<T>, Errno> {
        match number as usize {
            0 => Ok(None),
            n => all.get(n - 1).copied().map(Some).ok_or(Errno::INVAL),
        }
    }
    let flag = |n| match n {
        0 => Ok(None),
        NO => Ok(Some(false)),
        YES => Ok(Some(true)),
        _ => Err(Errno::INVAL),
    };
    let how = Remount {
        read_only: flag(arg.read_only)?,
        data: one(&DATA_MODES, arg.data)?,
        commit_interval: (arg.commit_ms > 0).then(|| Duration::from_millis(arg.commit_ms.into())),
        atime: one(&ATIME_MODES, arg.atime)?,
        nodiratime: flag(arg.nodiratime)?,
        lazytime: flag(arg.lazytime)?,
        ..Remount::default()
    };
    Ok((how, flag(arg.sync)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use braidfs::{AtimeMode, DataMode};

    #[test]
    fn nothing_stays_nothing() {
        assert_eq!(understand(&RemountArg::default()), Ok((Remount::default(), None)));
    }

    #[test]
    fn all_is_understood_or_refused() {
        let arg = RemountArg {
            read_only: YES,
            data: 3,
            atime: 2,
            nodiratime: NO,
            lazytime: YES,
            sync: YES,
            commit_ms: 7000,
            reserved: 0,
        };
        let how = Remount {
            read_only: Some(true),
            data: Some(DataMode::Writeback),
            commit_interval: Some(Duration::from_secs(7)),
            atime: Some(AtimeMode::Noatime),
            nodiratime: Some(false),
            lazytime: Some(true),
            ..Remount::default()
        };
        assert_eq!(understand(&arg), Ok((how, Some(true))));
        for bad in [
            RemountArg { data: 4, ..arg },
            RemountArg { atime: 4, ..arg },
            RemountArg { read_only: 3, ..arg },
            RemountArg { sync: u32::MAX, ..arg },
        ] {
            assert_eq!(understand(&bad), Err(Errno::INVAL));
        }
    }
}
