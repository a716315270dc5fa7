//! The new process: greets, looks at what it is offered, takes it, mounts, and serves when it is told to.

use super::record::{OLDEST, Offer, Record, VERSION, check_version, held_of, tells_quota_grants};
use super::wire::{Peer, ToNew, ToOld};
use super::{at_step, end_hand_over, mount_again};
use crate::channel::Channel;
use crate::control::UpgradeArg;
use crate::fs::Negotiated;
use crate::mount::{Mount, MountConfig};
use crate::ops::ioctl_out;
use crate::request::Answer;
use crate::serve::{Attached, Progress, ServeError, Served};
use crate::session::{Fresh, RunError};
use crate::watch::listen::Listener;
use braidfs::store::super_io::read_super;
use braidfs_device::{Device, FileDevice};
use rustix::fs::{Mode, OFlags};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, mpsc};
use zerocopy::FromZeros;

/// A process that was started to take a mount over.
#[derive(Debug)]
pub struct Heir {
    peer: Peer,
    negotiated: Negotiated,
    devices: Vec<Arc<FileDevice>>,
}

/// What it was given.
struct Taken {
    record: Record,
    channel: Channel,
    /// The request that asked came by this; for nothing else.
    asked: Channel,
    metrics: Option<OwnedFd>,
    supervisor: Option<OwnedFd>,
}

impl Heir {
    /// Greets the process at the other end of the standard input, which is another one from then on, and looks at what it
    /// offers.
    ///
    /// # Errors
    /// Why it does not take over; the other process knows.
    pub fn new() -> Result<Self, ServeError> {
        let failed = |e: std::io::Error| ServeError::TakeOver(format!("{e}: only a process that serves starts it so"));
        let peer = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3).map_err(|e| failed(e.into()))?;
        let null = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
        null.and_then(|null| rustix::stdio::dup2_stdin(&null)).map_err(|e| failed(e.into()))?;
        // Of a terminal that the other one was started from, its signals are not meant for this one.
        let _ = rustix::process::setsid();
        let peer = Peer::of(peer);
        let (oldest, newest) = match at_step("new-of-another-version") {
            Ok(()) => (OLDEST, VERSION),
            Err(_) => (VERSION + 1, VERSION + 2),
        };
        peer.send(&ToOld::Hello { oldest, newest, program: env!("CARGO_PKG_VERSION").into() }, &[]).map_err(failed)?;
        let offered = match peer.receive::<ToNew>(None).map_err(failed)? {
            Some((ToNew::Offer(offer), fds)) => at_step("new-offered").and_then(|()| look_at(offer, fds)),
            Some(_) => Err("it was told what it did not ask for".into()),
            None => return Err(ServeError::TakeOver("the other process does not hand over".into())),
        };
        match offered {
            Ok((negotiated, devices)) => Ok(Self { peer, negotiated, devices }),
            Err(why) => Err(refuse(&peer, why)),
        }
    }

    /// Takes over and serves until it is unmounted, or yet another process does; as [`crate::serve()`]. `cfg` and its
    /// [`crate::Upgradable`] are as of a mount with the same options; devices and the parent's pipe are added here.
    ///
    /// # Errors
    /// Why it does not take over; the other process knows, and goes on. Else as [`crate::serve()`].
    pub fn serve(
        self,
        mut cfg: MountConfig,
        mut upgrade: super::Upgradable,
        mut tell: impl FnMut(Progress),
    ) -> Result<(), ServeError> {
        let Self { peer, negotiated, devices } = self;
        let signals = Signals::new([SIGTERM, SIGINT, SIGHUP]).map_err(ServeError::Start)?;
        let taken = match at_step("new-willing").and_then(|()| take(&peer)) {
            Ok(taken) => taken,
            Err(why) => return Err(refuse(&peer, why)),
        };
        let Taken { record, channel, asked, metrics, supervisor } = taken;
        // Not the same: whoever has that has a request to answer.
        let (channel, asked) = (Arc::new(channel), Arc::new(asked));
        upgrade.devices = devices.iter().map(Arc::downgrade).collect();
        upgrade.supervisor = supervisor;
        let Record { version, point, mount, front, held, asked: unique } = record;
        let mounted = at_step("new-given").and_then(|()| {
            mount_again(&devices, &upgrade.options, &front.options.of_volume(), &held_of(&held))
                .map_err(|e| e.to_string())
        });
        let vol = match mounted {
            Ok(vol) => Arc::new(vol),
            Err(why) => return Err(refuse(&peer, why)),
        };
        cfg.upgrade = Some(Arc::new(upgrade));
        let mount = Arc::new(Mount::of(point, mount.and_then(|id| id.parse().ok()), cfg.guard.clone()));
        // until it serves, the mount is the other one's
        let volume = Arc::clone(&vol);
        let fresh = at_step("new-mounting")
            .and_then(|()| Fresh::again(vol, negotiated, &cfg, mount.dirty_limit(), front, None));
        let fresh = match fresh {
            Ok(fresh) => fresh,
            Err(why) => {
                mount.leave();
                return Err(refuse(&peer, why));
            }
        };
        if !tells_quota_grants(version) {
            fresh.write_back_limited();
        }
        let metrics = match (&cfg.metrics, metrics) {
            (Some(at), Some(fd)) => Some(Listener::of(at, fd)),
            _ => None,
        };
        let asker = match await_asker() {
            Ok(asker) => asker,
            Err(e) => {
                mount.leave();
                return Err(refuse(&peer, e.to_string()));
            }
        };
        // Where nobody listens the other process has ended, as below.
        let _ = peer.send(&ToOld::Mounted, &[]);
        if let Err(why) = at_step("new-mounted").and_then(|()| await_go(&peer)) {
            mount.leave();
            metrics.into_iter().for_each(Listener::leave);
            return Err(refuse(&peer, why));
        }
        mount.guard();
        let _ = peer.send(&ToOld::Going, &[]);
        let _ = at_step("new-going");
        end_hand_over(&volume);
        // nobody but the serving threads has it when they stop
        drop(volume);
        for device in &devices {
            device.keep();
            if device.is_without_claim() {
                device.claim_later();
            }
        }
        drop(devices);
        // it waits for this
        let _ = asker.send((peer, asked, unique));
        tracing::info!(point = %mount.point().display(), "took the mount over");
        let attached = Attached { mount, channel, signals };
        match attached.serve(fresh, (&cfg, metrics.as_ref()), negotiated, Vec::new(), &mut tell) {
            Ok(Served::Unmounted) => Ok(()),
            Ok(Served::HandedOver) => {
                metrics.into_iter().for_each(Listener::leave);
                Ok(())
            }
            Err(RunError::Start(e)) => Err(ServeError::Start(e)),
            Err(RunError::Close(e)) => Err(ServeError::Close(e)),
            Err(RunError::Rings { why, .. }) => Err(ServeError::Ring(why)),
        }
    }
}

/// Tells the other process, where it listens; the error.
fn refuse(peer: &Peer, why: String) -> ServeError {
    let _ = peer.send(&ToOld::Refused(why.clone()), &[]);
    ServeError::TakeOver(why)
}

/// Whether this program can serve what is offered.
fn look_at(offer: Offer, fds: Vec<OwnedFd>) -> Result<(Negotiated, Vec<Arc<FileDevice>>), String> {
    let Offer { version, program, agreed, devices, user } = offer;
    check_version(version)?;
    tracing::info!(version = program, "upgrade: offered a mount");
    let own = rustix::process::geteuid().as_raw();
    if user != own {
        return Err(format!("it runs as user {own}, the mount is served by user {user}"));
    }
    let negotiated = agreed.understand()?;
    let mut fds = fds.into_iter();
    let changes = devices.iter().any(super::record::OfferedDevice::is_writable);
    let adopt = |line: super::record::OfferedDevice| {
        let handed = line.handed(&mut fds).ok_or("descriptors are missing")?;
        FileDevice::adopt(handed).map(Arc::new).map_err(|e| e.to_string())
    };
    let devices = devices.into_iter().map(adopt).collect::<Result<Vec<_>, String>>()?;
    let seen: Vec<Arc<dyn Device>> = devices.iter().map(|d| Arc::clone(d) as Arc<dyn Device>).collect();
    // Of a format, or with a feature, that this program does not know.
    let (sb, _) = read_super(&seen).map_err(|e| e.to_string())?;
    if changes {
        sb.may_change().map_err(|e| e.to_string())?;
    }
    Ok((negotiated, devices))
}

fn take(peer: &Peer) -> Result<Taken, String> {
    peer.send(&ToOld::Willing, &[]).map_err(|e| e.to_string())?;
    let (take, fds) = match peer.receive::<ToNew>(None).map_err(|e| e.to_string())? {
        Some((ToNew::Take(take), fds)) => (take, fds),
        Some(_) => return Err("it was told what it did not ask for".into()),
        None => return Err("the other process does not hand over".into()),
    };
    let mut fds = fds.into_iter();
    let mut next = |wanted: bool| {
        if wanted { fds.next().map(Some).ok_or_else(|| "descriptors are missing".to_string()) } else { Ok(None) }
    };
    let missing = || "descriptors are missing".to_string();
    let record = File::from(next(true)?.ok_or_else(missing)?);
    let channel = Channel::new(next(true)?.ok_or_else(missing)?);
    let asked = match next(take.asked_elsewhere)? {
        Some(fd) => fd,
        None => channel.as_fd().try_clone_to_owned().map_err(|e| e.to_string())?,
    };
    let asked = Channel::new(asked);
    let (metrics, supervisor) = (next(take.metrics)?, next(take.supervisor)?);
    let record = Record::read(&record, take.bytes)?;
    Ok(Taken { record, channel, asked, metrics, supervisor })
}

/// Waits to be told to serve; the other process' end tells, too (see [`super`]).
fn await_go(peer: &Peer) -> Result<(), String> {
    match peer.receive::<ToNew>(None) {
        Ok(Some((ToNew::Go, _))) => Ok(()),
        Ok(None) => {
            tracing::warn!("the process that handed over has ended before it said so: going on in its place");
            Ok(())
        }
        Ok(Some(_)) => Err("it was told what it did not ask for".into()),
        Err(e) => Err(e.to_string()),
    }
}

/// The other process, and where the request came from that asked for the upgrade.
type Asker = (Peer, Arc<Channel>, u64);

/// A thread that answers it once the other process is gone.
fn await_asker() -> std::io::Result<mpsc::Sender<Asker>> {
    let (tell, told) = mpsc::channel::<Asker>();
    let wait = move || {
        let Ok((peer, channel, unique)) = told.recv() else { return };
        peer.await_end();
        let mut arg = UpgradeArg::new_zeroed();
        arg.pid = std::process::id();
        arg.set_text(env!("CARGO_PKG_VERSION").as_bytes());
        let mut out = Answer::new(size_of::<UpgradeArg>());
        if ioctl_out(&mut out, size_of::<UpgradeArg>(), &arg).is_ok() {
            channel.reply(unique, &mut out);
        }
    };
    std::thread::Builder::new().name("fuse-upgraded".into()).spawn(wait)?;
    Ok(tell)
}
