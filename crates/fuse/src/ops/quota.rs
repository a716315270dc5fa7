//! Limits of users, groups and directories of the mounted volume, see [`crate::control::quota_set`].
//!
//! A call that changes limits may count all inodes, walk a tree and waits for the device, so that a thread of its own does it.

use crate::abi;
use crate::control::{QUOTA_DIRECTORY, QUOTA_GROUP, QUOTA_TEXT, QUOTA_USER, QuotaArg, QuotaCall};
use crate::fs::{BraidFs, Context};
use crate::helpers::{Kind, Whose};
use crate::ops::aside::short;
use crate::ops::flags::ioctl_out;
use crate::request::{Answer, Handled, Outcome, Request};
use crate::requester;
use braidfs::{Error, InodeNo, Quota, QuotaOwner, Volume};
use rustix::io::Errno;
use zerocopy::FromBytes;

impl BraidFs {
    /// Only root may change limits, and whose the server is.
    pub(super) fn quota_ioctl(
        &self,
        req: &Request<'_>,
        node: InodeNo,
        (arg, input): (&abi::IoctlIn, &[u8]),
        out: &mut Answer,
        cx: &Context<'_>,
    ) -> Handled {
        let (mut said, _) = QuotaArg::read_from_prefix(input).map_err(|_| Errno::INVAL)?;
        let changes = said.asks() == QuotaCall::Set as u32 || said.asks() == QuotaCall::Remove as u32;
        if changes {
            requester::of_server(req)?;
        }
        if said.asks() == QuotaCall::Show as u32 || said.asks() == QuotaCall::Next as u32 {
            // It looks at memory only, and anybody may ask: the time is that of the domain that it is asked on.
            tell(&self.vol, node, &mut said);
            ioctl_out(out, arg.out_size as usize, &said)?;
            return Ok(Outcome::Reply);
        }
        let (channel, jobs) = (cx.channel.clone(), self.jobs.clone());
        self.ioctl_aside_later("fuse-quota", arg, cx, move |vol, reply| {
            tell(&vol, node, &mut said);
            drop(vol);
            if changes && said.errno == 0 {
                // Not sent only where the mount is ending, which has the kernel write back all.
                jobs.send(Kind::Quota, Whose::Mount, move |fs| {
                    fs.quotas_changed(&channel);
                    reply.send(Ok(said));
                });
            } else {
                reply.send(Ok(said));
            }
        })
    }
}

/// Carries out what is asked, and notes the answer.
fn tell(vol: &Volume, node: InodeNo, said: &mut QuotaArg) {
    match carry_out(vol, node, said) {
        Ok(q) => {
            said.errno = 0;
            if let Some(q) = q {
                said.tell(&q);
            }
        }
        Err(e) => {
            said.errno = e.errno().unsigned_abs();
            said.text = short::<QUOTA_TEXT>(&e.to_string());
        }
    }
}

fn carry_out(vol: &Volume, node: InodeNo, said: &QuotaArg) -> braidfs::Result<Option<Quota>> {
    let owner = || match said.kind {
        QUOTA_USER => Ok(QuotaOwner::User(said.id)),
        QUOTA_GROUP => Ok(QuotaOwner::Group(said.id)),
        QUOTA_DIRECTORY => vol.quota_of_directory(node).ok_or(Error::NotFound),
        _ => Ok(QuotaOwner::Project(said.id)),
    };
    match said.asks() {
        c if c == QuotaCall::Set as u32 && said.kind == QUOTA_DIRECTORY => {
            vol.quota_directory(node, |l| said.change(l)).map(Some)
        }
        c if c == QuotaCall::Set as u32 => vol.quota_change(owner()?, |l| said.change(l)).map(Some),
        c if c == QuotaCall::Show as u32 => vol.quota(owner()?).map(Some),
        c if c == QuotaCall::Next as u32 => {
            let after = said.after().map_err(Error::Invalid)?;
            vol.quota_after(after).map(Some).ok_or(Error::NotFound)
        }
        c if c == QuotaCall::Remove as u32 => vol.quota_remove(owner()?).map(|()| None),
        _ => Err(Error::Invalid("an unknown call")),
    }
}
