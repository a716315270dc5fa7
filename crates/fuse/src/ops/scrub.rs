//! A scrub of the volume while it is mounted: one at a time, with low priority ([`super::job`]).

use super::job::{Job, Owner};
use crate::abi;
use crate::control::{NO_DATA, SCRUB_START, SCRUB_STATUS, ScrubStart};
use crate::fs::{BraidFs, Context};
use crate::ops::flags::ioctl_out;
use crate::request::{Answer, Handled, Outcome, Request};
use braidfs::{InodeNo, Volume};
use braidfs_check::online::{ScrubOptions, scrub_mounted};
use rustix::io::Errno;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use zerocopy::FromBytes;

/// Least claim on the CPU; the kernel derives that on the device from it.
const NICE: i32 = 19;

fn start(vol: Arc<Volume>, owner: Owner, options: ScrubOptions) -> Result<Job, Errno> {
    Job::start("fuse-scrub", owner, move |show| {
        if let Err(e) = rustix::process::setpriority_process(Some(rustix::thread::gettid()), NICE) {
            tracing::debug!(error = %e, "the scrub runs at ordinary priority");
        }
        tracing::info!("scrub begins");
        let report = scrub_mounted(&*vol, &options, &mut |phase, done, total| show(phase, done, total));
        drop(vol);
        tracing::info!(findings = report.findings.len(), stopped = report.stopped, "scrub ends");
        serde_json::to_vec(&report).unwrap_or_default()
    })
}

impl BraidFs {
    /// The three of [`crate::control`].
    pub(super) fn scrub_ioctl(&self, req: &Request<'_>, arg: &abi::IoctlIn, input: &[u8], out: &mut Answer) -> Handled {
        if req.node().ino() != InodeNo::ROOT {
            return Err(Errno::NOTTY);
        }
        let room = arg.out_size as usize;
        let owner = Owner::of(self, req, arg.fh);
        let mut scrub = self.scrub.lock();
        if arg.cmd == SCRUB_START {
            self.check_may_administer(req)?;
            if scrub.as_ref().is_some_and(Job::running) {
                return Err(Errno::BUSY);
            }
            let (how, _) = ScrubStart::read_from_prefix(input).map_err(|_| Errno::INVAL)?;
            let options = ScrubOptions { data: how.flags & NO_DATA == 0, bytes_per_second: how.bytes_per_second };
            self.opened_jobs.store(true, Relaxed);
            *scrub = Some(start(self.vol.clone(), owner, options)?);
            ioctl_out(out, room, &())?;
            return Ok(Outcome::Reply);
        }
        let Some(scrub) = scrub.as_ref().filter(|s| s.owner == owner) else { return Err(Errno::NODATA) };
        if arg.cmd == SCRUB_STATUS {
            ioctl_out(out, room, &scrub.status()?)?;
        } else {
            ioctl_out(out, room, &scrub.text(input)?)?;
        }
        Ok(Outcome::Reply)
    }

    /// Closes a directory; work that was started through it stops.
    pub(crate) fn releasedir(&self, req: &Request<'_>, cx: &Context<'_>) -> Handled {
        let fh = req.arg::<abi::ReleaseIn>()?.fh;
        if self.opened_jobs.load(Relaxed) {
            let mut scrub = self.scrub.lock();
            if scrub.as_ref().is_some_and(|s| s.owner == Owner::Handle(fh)) {
                *scrub = None;
            }
            let scrubs = scrub.is_some();
            drop(scrub);
            let others = self.end_device_job(fh);
            self.opened_jobs.store(scrubs || others, Relaxed);
        }
        if self.negotiated.opens() {
            if let Some(own) = cx.channel.own() {
                own.closed(fh);
            }
            self.handles.release(fh)?;
        }
        Ok(Outcome::Reply)
    }
}
