//! Devices that come to the mounted volume, are drained and leave it, see [`crate::control`].
//!
//! Room goes with a device that leaves or is drained, so that only a mount does it whose kernel holds no writes back that were
//! accepted: they could find no room any more.

use super::job::{Job, Owner, Show};
use super::resize::{resized, understand};
use crate::abi;
use crate::control::{DEVICE_BLANK, DEVICE_START, DEVICE_STATUS, DeviceAnswer, DeviceCall, DeviceStart};
use crate::fs::BraidFs;
use crate::ops::flags::ioctl_out;
use crate::profile::Cache;
use crate::request::{Answer, Handled, Outcome, Request};
use crate::requester;
use braidfs::device::open_volume_devices;
use braidfs::{Error, InodeNo, NewSize, Volume};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use zerocopy::FromBytes;

/// Why a mount with a writeback cache does not lose room.
const HELD_BACK: &str = "mounted, a device is drained or leaves only with `-o cache=through`, since the kernel's writeback cache \
    may hold what was accepted for room that would go: unmount it first";

/// Why a supervised mount that was upgraded takes no device.
const NOT_TOLD: &str = "the process that looks after this mount does not learn of it, since another program took the mount over: \
    unmount it, and mount it again";

/// Is told the path of each device that is about to be added, by the thread that does it: who mounts the volume again needs it.
#[derive(Clone)]
pub struct TellDevices(pub Arc<dyn Fn(&Path) + Send + Sync>);

impl std::fmt::Debug for TellDevices {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("TellDevices")
    }
}

/// What is to be done.
struct Wanted {
    call: DeviceCall,
    uuid: [u8; 16],
    path: PathBuf,
    blank: bool,
    /// Of the volume.
    size: NewSize,
    /// The kernel may hold back what was written.
    held_back: bool,
}

impl Wanted {
    fn of(said: &DeviceStart, held_back: bool) -> Result<Self, Errno> {
        let end = said.path.iter().position(|b| *b == 0).ok_or(Errno::INVAL)?;
        let path = PathBuf::from(OsStr::from_bytes(&said.path[..end]));
        let call = DeviceCall::of(said.call).ok_or(Errno::INVAL)?;
        if call == DeviceCall::Add && !path.is_absolute() {
            return Err(Errno::INVAL);
        }
        let size = match call {
            DeviceCall::Resize => understand(said.flags, said.bytes)?,
            _ => NewSize::Device,
        };
        Ok(Self { call, uuid: said.uuid, path, blank: said.flags & DEVICE_BLANK != 0, size, held_back })
    }

    fn done(&self, vol: &Volume, show: &Show<'_>) -> Result<DeviceAnswer, Error> {
        let number = || {
            let none = || Error::Size("it is no device of this volume".into());
            vol.device_number(&self.uuid).ok_or_else(none)
        };
        let progress = |done, all| show("block groups", done, all);
        match self.call {
            DeviceCall::Add => {
                let device = open_volume_devices(std::slice::from_ref(&self.path), true)
                    .map_err(|e| Error::Size(e.to_string()))?
                    .remove(0);
                vol.add_device(device, self.blank).map(|c| DeviceAnswer::changed(&c))
            }
            DeviceCall::Remove => vol.remove_device(number()?, &progress).map(|c| DeviceAnswer::changed(&c)),
            DeviceCall::Drain => vol.drain_device(number()?, &progress).map(|d| DeviceAnswer::drained(&d)),
            DeviceCall::Rebalance => vol.rebalance(&progress).map(|r| DeviceAnswer::rebalanced(&r)),
            DeviceCall::Move => {
                let name = self.path.to_str().ok_or(Error::Invalid("a tenant's name is UTF-8"))?;
                vol.tenant_move(name, &progress).map(|e| DeviceAnswer::moved(&e))
            }
            DeviceCall::Resize => {
                let emptying = |done, all| show("emptying block groups", done, all);
                resized(vol, self.size, self.held_back, &emptying).map(|r| DeviceAnswer::resized(&r))
            }
            DeviceCall::EndDrain => vol.end_drain(number()?).map(|()| DeviceAnswer::default()),
        }
    }
}

impl BraidFs {
    /// The three of [`crate::control`]. Only root may, and whose the server is: it opens devices that others need not be
    /// allowed to.
    pub(super) fn device_ioctl(
        &self,
        req: &Request<'_>,
        arg: &abi::IoctlIn,
        input: &[u8],
        out: &mut Answer,
    ) -> Handled {
        if req.node().ino() != InodeNo::ROOT {
            return Err(Errno::NOTTY);
        }
        let room = arg.out_size as usize;
        let owner = Owner::of(self, req, arg.fh);
        let mut job = self.device_job.lock();
        if arg.cmd == DEVICE_START {
            requester::of_server(req)?;
            if job.as_ref().is_some_and(Job::running) {
                return Err(Errno::BUSY);
            }
            let (said, _) = DeviceStart::read_from_prefix(input).map_err(|_| Errno::INVAL)?;
            let wanted = Wanted::of(&said, self.profile.cache == Cache::Back)?;
            self.opened_jobs.store(true, Relaxed);
            *job = Some(self.start_device_job(owner, wanted)?);
            ioctl_out(out, room, &())?;
            return Ok(Outcome::Reply);
        }
        let Some(job) = job.as_ref().filter(|j| j.owner == owner) else { return Err(Errno::NODATA) };
        if arg.cmd == DEVICE_STATUS {
            ioctl_out(out, room, &job.status()?)?;
        } else {
            ioctl_out(out, room, &job.text(input)?)?;
        }
        Ok(Outcome::Reply)
    }

    fn start_device_job(&self, owner: Owner, wanted: Wanted) -> Result<Job, Errno> {
        let (vol, told) = (self.vol.clone(), self.tell_devices.clone());
        let not_told = told.is_none() && self.upgrades.has_parent();
        Job::start("fuse-device", owner, move |show| {
            let loses_room = matches!(wanted.call, DeviceCall::Remove | DeviceCall::Drain);
            if let (DeviceCall::Add, Some(told)) = (wanted.call, &told) {
                (told.0)(&wanted.path);
            }
            let refused = match wanted.call {
                DeviceCall::Add => not_told.then_some(NOT_TOLD),
                _ => (wanted.held_back && loses_room).then_some(HELD_BACK),
            };
            let result = refused.map_or_else(|| wanted.done(&vol, show), |why| Err(Error::Size(why.into())));
            drop(vol);
            let answer = result.unwrap_or_else(|e| DeviceAnswer::refused(&e));
            serde_json::to_vec(&answer).unwrap_or_default()
        })
    }

    /// The directory `fh` is closed: what was started through it stops, and is waited for by the end of the mount. Whether there
    /// is work still.
    pub(super) fn end_device_job(&self, fh: u64) -> bool {
        let mut job = self.device_job.lock();
        if job.as_ref().is_some_and(|j| j.owner == Owner::Handle(fh)) {
            let thread = job.take().and_then(Job::abandon);
            drop(job);
            self.asides().extend(thread);
            return false;
        }
        job.is_some()
    }
}
