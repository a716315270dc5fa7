//! Tenants of the mounted volume, see [`crate::control::tenant_create`]. A call claims
//! groups, waits for syncs and for the device ([`super::aside`]).

use crate::abi;
use crate::connections::Connections;
use crate::control::{
    KNOWS_INODES, LEAVE_SPACE, SET_DEVICES, SET_INODES, SET_JOURNAL, SET_MEMORY, SET_RATES, SET_SERVING, SET_SOFT,
    TenantArg, TenantCall,
};
use crate::fs::{BraidFs, Context};
use crate::helpers::{Kind, Whose};
use crate::node::WireId;
use crate::ops::aside::short;
use crate::request::{Handled, Request};
use crate::requester;
use crate::tenant_mount;
use braidfs::{Cred, DomainId, Error, InodeNo, Rates, Tenant, TenantBudget, Volume};
use rustix::io::Errno;
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::sync::Arc;
use zerocopy::FromBytes;

impl BraidFs {
    /// Only root may, and whose the server is: limits are no matter of those that they are for.
    pub(super) fn tenant_ioctl(
        &self,
        req: &Request<'_>,
        (id, dir): (WireId, InodeNo),
        arg: &abi::IoctlIn,
        input: &[u8],
        cx: &Context<'_>,
    ) -> Handled {
        let uid = requester::of_server(req)?;
        let (mut said, _) = TenantArg::read_from_prefix(input).map_err(|_| Errno::INVAL)?;
        let gid = if uid == 0 { 0 } else { rustix::process::getegid().as_raw() };
        let cred = Cred { uid, gid, ..Cred::root() };
        let (channel, jobs, connections) = (cx.channel.clone(), self.jobs.clone(), self.connections.clone());
        self.ioctl_aside("fuse-tenant", arg, cx, move |vol| {
            let entry = said.text;
            match carry_out(&vol, &connections, dir, &said, &cred) {
                Ok(t) => tell(&mut said, t),
                Err(e) => {
                    said.errno = e.errno().unsigned_abs();
                    // why, without that it is busy, which the others of a volume are not
                    let why = if let Error::Busy(why) = &e { why.clone() } else { e.to_string() };
                    said.text = short(&why);
                }
            }
            drop(vol);
            let limits = said.call == TenantCall::Create as u32 || said.call == TenantCall::Set as u32;
            if limits && said.errno == 0 {
                let (domain, channel) = (DomainId(said.domain as u16), channel.clone());
                // Not sent only where the mount is ending, which has the kernel write back all.
                jobs.send(Kind::Room, Whose::Mount, move |fs| {
                    fs.rates_changed(domain, &channel);
                    fs.limit_changed(domain, &channel);
                });
            }
            // the kernel has not made the entry itself
            if said.call == TenantCall::Create as u32 && said.errno == 0 {
                let name = entry.split(|b| *b == 0).next().unwrap_or_default();
                channel.invalidate_entry(id, name);
            }
            // with its listing, which the kernel may keep without asking for a time
            channel.invalidate(id, true);
            Ok(said)
        })
    }
}

fn carry_out(
    vol: &Volume,
    connections: &Arc<Connections>,
    dir: InodeNo,
    said: &TenantArg,
    cred: &Cred,
) -> braidfs::Result<Option<Tenant>> {
    let text = |bytes: &[u8]| bytes.split(|b| *b == 0).next().unwrap_or_default().to_vec();
    let name = String::from_utf8(text(&said.name)).map_err(|_| Error::Invalid("a tenant's name is UTF-8"))?;
    let limit = |n: u64| Some(n).filter(|n| *n > 0);
    let [read_bps, write_bps, read_iops, write_iops] = said.rates();
    let budget = TenantBudget {
        space: limit(said.space),
        inodes: limit(said.inodes_max),
        soft_space: said.soft(),
        rates: Rates { read_bps, write_bps, read_iops, write_iops },
        memory: said.memory(),
        journal: said.journal()?,
        serving: said.serving(),
        devices: said.devices(),
    };
    match said.call {
        c if c == TenantCall::Create as u32 => {
            let mode = said.mode & 0o7777;
            vol.tenant_create(dir, &text(&said.text), mode, &name, budget, cred).map(Some)
        }
        c if c == TenantCall::Set as u32 => {
            let change = |b: &mut TenantBudget| {
                if said.index & LEAVE_SPACE == 0 {
                    b.space = budget.space;
                }
                if said.index & SET_INODES != 0 {
                    b.inodes = budget.inodes;
                }
                if said.index & SET_SOFT != 0 {
                    b.soft_space = budget.soft_space;
                }
                if said.index & SET_JOURNAL != 0 {
                    b.journal = budget.journal;
                }
                if said.index & SET_MEMORY[0] != 0 {
                    b.memory.least = budget.memory.least;
                }
                if said.index & SET_MEMORY[1] != 0 {
                    b.memory.most = budget.memory.most;
                }
                if said.index & SET_SERVING != 0 {
                    b.serving = budget.serving;
                }
                if said.index & SET_DEVICES != 0 {
                    b.devices = budget.devices;
                }
                let r = &mut b.rates;
                let is = [&mut r.read_bps, &mut r.write_bps, &mut r.read_iops, &mut r.write_iops];
                for ((is, to), flag) in is.into_iter().zip(said.rates()).zip(SET_RATES) {
                    if said.index & flag != 0 {
                        *is = to;
                    }
                }
            };
            vol.tenant_change(&name, change).map(Some)
        }
        c if c == TenantCall::Show as u32 => vol.tenant(&name).map(Some),
        c if c == TenantCall::Next as u32 => {
            vol.tenants().into_iter().nth(said.index as usize).map(Some).ok_or(Error::NotFound)
        }
        c if c == TenantCall::Remove as u32 => {
            // until it is gone: nobody mounts it while this waits
            let _removal = connections.removal(&name).map_err(|point| {
                Error::Busy(format!("it is mounted by itself on {}: unmount it first", point.display()))
            })?;
            vol.tenant_remove(&name).map(|()| None)
        }
        c if c == TenantCall::Mount as u32 => {
            let point = PathBuf::from(OsString::from_vec(text(&said.text)));
            tenant_mount::mount(connections, &name, &point, said.mount()).map(|()| None).map_err(Error::Busy)
        }
        _ => Err(Error::Invalid("an unknown call")),
    }
}

fn tell(said: &mut TenantArg, t: Option<Tenant>) {
    said.errno = 0;
    let Some(t) = t else { return };
    (said.domain, said.root) = (t.domain.0.into(), t.root.0);
    (said.space, said.used, said.inodes) = (t.budget.space.unwrap_or(0), t.used, t.inodes);
    (said.inodes_max, said.mode) = (t.budget.inodes.unwrap_or(0), KNOWS_INODES);
    said.failed = t.failed.is_some().into();
    said.tell_rates(&t);
    said.tell_memory(&t);
    said.tell_journal(&t);
    said.tell_serving(&t);
    let n = t.name.len().min(said.name.len() - 1);
    said.name.fill(0);
    said.name[..n].copy_from_slice(&t.name.as_bytes()[..n]);
}
