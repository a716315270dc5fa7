//! The old process: starts the new one, stops serving, hands over, and serves again by itself where that fails.

use super::record::{
    Agreed, Front, OLDEST, Offer, OfferedDevice, Options, Record, Take, VERSION, check_needs, common, list_of, needs,
};
use super::stop::Stop;
use super::wire::{ENDED, FDS_MAX, Peer, ToNew, ToOld};
use super::{Upgradable, at_step, end_hand_over, mount_again};
use crate::abi;
use crate::channel::Channel;
use crate::control::UpgradeArg;
use crate::counters::Counters;
use crate::daemon::{Handing, tell_parent_within};
use crate::fs::{BraidFs, Context, Negotiated};
use crate::handles::Handles;
use crate::mount::Mount;
use crate::ops::{Job, ioctl_out};
use crate::past_cache::PastCache;
use crate::request::{Answer, Handled, Outcome, Request};
use crate::requester;
use crate::session::run_aside;
use crate::transport::Later;
use crate::watch::listen::Listener;
use braidfs::{HeldInode, Volume};
use braidfs_device::FileDevice;
use rustix::io::Errno;
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;
use zerocopy::FromBytes;

/// How long the new program has to greet, and to look at what it is offered.
const GREETING: Duration = Duration::from_secs(10);
/// A parent that looks after the mount reads each second what it is told.
const PARENT_READS: Duration = Duration::from_secs(5);
/// The new process looks at each inode that the kernel knows: so many it does in a second in any case.
const HELD_PER_SECOND: u64 = 4000;
/// A device whose lock as a writer is that of an open file for reading, see [`FileDevice::hand_over`].
const READ_ONLY_FIRST: &str = "it was mounted read-only first, and a remount opened its devices for writing: unmount it and \
                               mount it with the new program";
/// From one look whether the serving threads have stopped to the next.
const MOMENT: Duration = Duration::from_millis(1);

/// The upgrades of one mount, of which one at a time is under way.
#[derive(Debug)]
pub(crate) struct Upgrades {
    config: Option<Arc<Upgradable>>,
    negotiated: Negotiated,
    /// For the serving threads.
    pub stop: Stop,
    /// They have stopped, or ended.
    stopped: AtomicBool,
    under_way: AtomicBool,
    /// For who waits for the end of the serving threads: why they were stopped.
    ready: (crossbeam::channel::Sender<Prepared>, crossbeam::channel::Receiver<Prepared>),
}

/// A new process that is willing, and the request that asked for it.
#[derive(Debug)]
pub(crate) struct Prepared {
    new: New,
    asked: Asked,
}

/// The process of the new program. Dropped, it is ended.
#[derive(Debug)]
struct New {
    child: Child,
    program: PathBuf,
    peer: Peer,
    /// Of the record that it is given.
    version: u32,
    /// It goes on without us.
    released: bool,
}

impl Drop for New {
    fn drop(&mut self) {
        if !self.released {
            self.end();
        }
    }
}

impl New {
    /// Ends it; when this returns nothing that it wrote is under way (see [`FileDevice::lend`]).
    fn end(&mut self) -> String {
        let _ = self.child.kill();
        match self.child.wait() {
            Ok(status) => status.to_string(),
            Err(e) => e.to_string(),
        }
    }

    /// Whether it had begun to serve, now that it is ended: what it said before stays readable.
    fn said_going(&self) -> bool {
        std::iter::from_fn(|| self.peer.receive::<ToOld>(Some(Duration::ZERO)).ok().flatten())
            .any(|(said, _)| said == ToOld::Going)
    }

    fn receive(&self, within: Duration) -> Result<ToOld, String> {
        match self.peer.receive::<ToOld>(Some(within)) {
            Ok(Some((said, _))) => Ok(said),
            Ok(None) => Err(ENDED.into()),
            Err(e) if e.kind() == io::ErrorKind::TimedOut => Err(format!("it said nothing for {} s", within.as_secs())),
            Err(e) => Err(e.to_string()),
        }
    }
}

/// Who asked for the upgrade, and what for.
#[derive(Debug)]
struct Asked {
    later: Later,
    arg: Box<UpgradeArg>,
}

impl Asked {
    fn refuse(self, why: &str) {
        tracing::warn!(reason = why, "not upgraded: this process goes on");
        self.tell(why);
    }

    /// Nobody serves the mount any more.
    fn lose(self, why: &str) {
        tracing::error!(reason = why, "not upgraded, and the connection ends");
        self.tell(&format!("{why}; the connection ends, as after a crash: unmount it, and mount it again"));
    }

    fn tell(mut self, why: &str) {
        self.arg.errno = Errno::CANCELED.raw_os_error() as u32;
        self.arg.set_text(why.as_bytes());
        let mut out = Answer::new(size_of::<UpgradeArg>());
        match ioctl_out(&mut out, size_of::<UpgradeArg>(), &*self.arg) {
            Ok(()) => self.later.answer(&mut out),
            Err(e) => self.later.done(Err(e)),
        }
    }
}

impl Prepared {
    /// The process does not hand over after all.
    pub fn refuse(self, why: &str) {
        let Self { new, asked } = self;
        drop(new);
        asked.refuse(why);
    }

    /// Where the request came from that asked.
    pub fn channel(&self) -> Option<&Arc<Channel>> {
        self.asked.later.place().map(|p| p.0)
    }
}

/// See [`Upgrades::none_meanwhile`].
pub(crate) struct NoneMeanwhile<'a>(&'a Upgrades);

impl Drop for NoneMeanwhile<'_> {
    fn drop(&mut self) {
        self.0.under_way.store(false, Ordering::SeqCst);
    }
}

impl Upgrades {
    /// With so many threads that serve.
    pub fn new(config: Option<Arc<Upgradable>>, negotiated: Negotiated, threads: usize) -> Self {
        Self {
            config,
            negotiated,
            stop: Stop::new(threads),
            stopped: AtomicBool::new(false),
            under_way: AtomicBool::new(false),
            ready: crossbeam::channel::bounded(1),
        }
    }

    /// Whether a parent looks after this process.
    pub fn has_parent(&self) -> bool {
        self.config.as_ref().is_some_and(|c| c.supervisor.is_some())
    }

    /// All serving threads have ended. Why, where it was for this.
    pub fn all_stopped(&self) -> Option<Prepared> {
        self.stopped.store(true, Ordering::SeqCst);
        self.ready.1.try_recv().ok()
    }

    /// No upgrade begins until it is dropped; `None`: one is under way.
    pub fn none_meanwhile(&self) -> Option<NoneMeanwhile<'_>> {
        (!self.under_way.swap(true, Ordering::SeqCst)).then_some(NoneMeanwhile(self))
    }

    /// They serve again.
    pub fn go_on(&self) {
        self.stop.take_back();
        self.under_way.store(false, Ordering::SeqCst);
    }

    /// Has the serving threads stop.
    fn stop_all(self: &Arc<Self>, prepared: Prepared) {
        self.stopped.store(false, Ordering::SeqCst);
        // There is room, as one at a time is under way; and this has the other end.
        let _ = self.ready.0.send(prepared);
        if let Err(e) = self.stop.ask() {
            if let Ok(prepared) = self.ready.1.try_recv() {
                self.under_way.store(false, Ordering::SeqCst);
                prepared.refuse(&format!("cannot stop: {e}"));
            }
            return;
        }
        // nobody else has it: the mount is ending
        while !self.stopped.load(Ordering::SeqCst) && Arc::strong_count(self) > 1 {
            self.stop.wake();
            std::thread::sleep(MOMENT);
        }
    }
}

impl BraidFs {
    /// Has another program take over. Only root may ask, and whose the server is, as the server's user runs what is named.
    pub(crate) fn upgrade_ioctl(
        &self,
        req: &Request<'_>,
        arg: &abi::IoctlIn,
        input: &[u8],
        cx: &Context<'_>,
    ) -> Handled {
        requester::of_server(req)?;
        let (said, _) = UpgradeArg::read_from_prefix(input).map_err(|_| Errno::INVAL)?;
        if (arg.out_size as usize) < size_of::<UpgradeArg>() {
            return Err(Errno::INVAL);
        }
        let asked = Asked { later: cx.later(), arg: Box::new(said) };
        let config = match self.check_may_upgrade(cx) {
            Ok(config) => config,
            Err(why) => {
                asked.refuse(&why);
                return Ok(Outcome::Deferred);
            }
        };
        let upgrades = self.upgrades.clone();
        if upgrades.under_way.swap(true, Ordering::SeqCst) {
            asked.refuse("another upgrade of it, or a remount, is under way");
            return Ok(Outcome::Deferred);
        }
        let (needs, vol) = (self.needs(), Arc::clone(&self.vol));
        let begin = move || {
            let durable = make_durable(&vol);
            // nobody but the serving threads has it when they stop
            drop(vol);
            match durable.and_then(|()| upgrades.greet(&config, &asked.arg, needs)) {
                Ok(new) => upgrades.stop_all(Prepared { new, asked }),
                Err(why) => {
                    upgrades.under_way.store(false, Ordering::SeqCst);
                    asked.refuse(&why);
                }
            }
        };
        if run_aside("fuse-upgrade", begin).is_err() {
            // what was to be its work is dropped, and answers EIO
            self.upgrades.under_way.store(false, Ordering::SeqCst);
        }
        Ok(Outcome::Deferred)
    }

    /// Whether the mount can be handed over.
    fn check_may_upgrade(&self, cx: &Context<'_>) -> Result<Arc<Upgradable>, String> {
        let no = |why: &str| Err(why.to_string());
        let Some(config) = &self.upgrades.config else { return no("the program that serves it does not hand over") };
        if let Some(why) = &config.refused {
            return no(why);
        }
        if cx.is_bound() || self.negotiated.has(abi::init::OVER_IO_URING) {
            return no(
                "its requests come through io_uring, whose queues cannot change hands: mount with transport=dev, or \
                       unmount it and mount it with the new program",
            );
        }
        if std::process::id() == 1 {
            return no("it is served by the first process of a container, which ends with it");
        }
        match self.cannot_hand_over() {
            Some(why) => Err(why),
            None => Ok(config.clone()),
        }
    }

    /// Why the volume cannot be handed over as it is at this moment.
    pub(crate) fn cannot_hand_over(&self) -> Option<String> {
        let why = |text: &str| Some(text.to_owned());
        if let Some(d) = self.vol.domains().into_iter().find(|d| d.failed.is_some()) {
            let error = d.failed.unwrap_or_default();
            return Some(format!(
                "domain {} is read-only after an error ({error}): unmount it and run fsck.braidfs",
                d.domain
            ));
        }
        if let Some(job) = self.job_under_way() {
            return why(job);
        }
        if let Some((tenant, point)) = self.connections.tenants().first() {
            let point = point.display();
            return Some(format!(
                "tenant {tenant} is mounted by itself on {point}, which only an unmount ends: unmount it, and mount it \
                 again after the upgrade"
            ));
        }
        // what was added since is not among those that are handed over
        let known = self.upgrades.config.as_ref().map_or(&[][..], |c| &c.devices[..]);
        let gone = known.iter().any(|d| d.strong_count() == 0);
        if known.iter().filter_map(Weak::upgrade).any(|d| d.is_reopened()) {
            return why(READ_ONLY_FIRST);
        }
        if gone || usize::from(self.vol.super_block().devices.get()) != known.len() {
            return why(
                "devices were added or removed since it was mounted: unmount it and mount it with the new program",
            );
        }
        None
    }

    /// See [`Front::needs`].
    fn needs(&self) -> Option<(u32, &'static str)> {
        let report = self.device_job.lock().as_ref().and_then(Job::handed).is_some();
        needs(self.vol.read_only(), report, !self.quota_grants.handed().is_empty())
    }

    /// Long work that must end before the mount can be handed over.
    fn job_under_way(&self) -> Option<&'static str> {
        if self.scrub.lock().as_ref().is_some_and(Job::running) {
            return Some("it is being scrubbed: wait for the end, or stop that");
        }
        let changes = self.device_job.lock().as_ref().is_some_and(Job::running);
        changes.then_some("its devices are being changed: wait for the end, or stop that")
    }

    /// Takes it apart for another process, or another [`BraidFs`]: the volume, what is known beside it, and the handles, which
    /// keep their files until the volume is closed; what only another [`BraidFs`] gets.
    fn into_front(self) -> (Arc<Volume>, Front, Handles, Untold) {
        let mut handles = self.handles;
        for aside in self.asides.into_inner() {
            let _ = aside.join();
        }
        let scrub = self.scrub.into_inner().and_then(|s| s.handed());
        let device_job = self.device_job.into_inner().and_then(|s| s.handed());
        let (sync, dirsync) = self.durable.get();
        let (numbers, promised) = handles.handed();
        let front = Front {
            options: Options::of(&self.vol.options_now(), sync, dirsync),
            handles: numbers,
            promised,
            flags: self.flagged.handed(),
            room: self.tight.handed(),
            grants: self.dirty_grants.handed(),
            quota_grants: self.quota_grants.handed(),
            scrub,
            device_job,
        };
        (self.vol, front, handles, Untold { counters: self.counters, past_cache: self.past_cache })
    }
}

impl Upgrades {
    /// Starts the new program; it is willing.
    fn greet(&self, config: &Upgradable, arg: &UpgradeArg, needs: Option<(u32, &'static str)>) -> Result<New, String> {
        let program = PathBuf::from(OsString::from_vec(arg.text().to_vec()));
        let shown = program.display();
        if !program.is_absolute() {
            return Err(format!("{shown}: not an absolute path"));
        }
        let cannot = |e: io::Error| format!("cannot start {shown}: {e}");
        let (peer, theirs) = Peer::pair().map_err(cannot)?;
        tracing::info!(program = %shown, "upgrade: starting the new program");
        let mut command = Command::new(&program);
        for name in &config.withheld {
            command.env_remove(name);
        }
        let child = command.args(&config.arguments).stdin(Stdio::from(theirs)).spawn().map_err(cannot)?;
        // with the other end of the socket
        drop(command);
        let mut new = New { child, program: program.clone(), peer, version: VERSION, released: false };
        self.agree(config, &mut new, needs).map_err(|why| {
            let status = new.end();
            format!("{shown}: {why} ({status})")
        })?;
        Ok(new)
    }

    fn agree(&self, config: &Upgradable, new: &mut New, needs: Option<(u32, &str)>) -> Result<(), String> {
        let ToOld::Hello { oldest, newest, program } = new.receive(GREETING)? else {
            return Err("it does not greet".into());
        };
        new.version = common(oldest, newest).ok_or_else(|| {
            format!(
                "version {program} takes hand-over records of versions {oldest} to {newest}, the process that serves \
                 writes {OLDEST} to {VERSION}: unmount it and mount it with the new program"
            )
        })?;
        check_needs(new.version, needs)?;
        tracing::info!(version = program, record = new.version, "upgrade: the new program greets");
        at_step("old-greeted")?;
        let devices = alive(config)?;
        let (mut lines, mut fds) = (Vec::new(), Vec::new());
        for device in &devices {
            let handed = device.hand_over().map_err(|e| match Errno::from_io_error(&e) {
                Some(Errno::ROFS) => READ_ONLY_FIRST.into(),
                _ => format!("{}: {e}", device.path().display()),
            })?;
            let (line, its) = OfferedDevice::of(handed);
            lines.push(line);
            fds.extend(its);
        }
        if fds.len() > FDS_MAX {
            return Err("the volume has too many devices".into());
        }
        let offer = Offer {
            version: new.version,
            program: env!("CARGO_PKG_VERSION").into(),
            agreed: Agreed::of(self.negotiated),
            devices: lines,
            user: rustix::process::geteuid().as_raw(),
        };
        let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
        new.peer.tell_new(&ToNew::Offer(offer), &fds)?;
        match new.receive(GREETING)? {
            ToOld::Willing => Ok(()),
            ToOld::Refused(why) => Err(why),
            _ => Err("it answers what it was not asked".into()),
        }
    }
}

/// What the volume's end would write for the most part, while it is served: so that a device which takes nothing more, as an image on
/// a full disk, is noticed when the mount can go on for reading, and so that less is to be written when it cannot.
fn make_durable(vol: &Volume) -> Result<(), String> {
    let mut domains = if vol.read_only() { Vec::new() } else { vol.domains() }.into_iter();
    domains
        .try_for_each(|d| vol.commit_domain(braidfs::DomainId(d.domain), true))
        .map_err(|e| format!("what was written cannot be made durable: {e}"))
}

fn alive(config: &Upgradable) -> Result<Vec<Arc<FileDevice>>, String> {
    let devices: Option<Vec<_>> = config.devices.iter().map(Weak::upgrade).collect();
    devices.ok_or_else(|| "the volume is being closed".into())
}

/// What a mount is served with.
pub(crate) struct Served<'a> {
    pub config: Option<&'a Arc<Upgradable>>,
    pub channel: &'a Arc<Channel>,
    pub mount: &'a Mount,
    pub metrics: Option<&'a Listener>,
}

/// What another process is not told, and this one goes on to know where none takes over.
#[derive(Debug)]
pub(crate) struct Untold {
    pub counters: Arc<Counters>,
    pub past_cache: PastCache,
}

/// How it went.
pub(crate) enum HandedOver {
    /// Another process serves, whose number this is.
    To(u32),
    /// This one is to go on, with what it knew; the handles keep their files until they are opened anew.
    No { vol: Arc<Volume>, front: Box<Front>, handles: Box<Handles>, untold: Box<Untold> },
    /// Neither program can serve the volume.
    Lost(braidfs::Error),
}

/// Hands over what nobody serves any more.
pub(crate) fn hand_over(fs: BraidFs, prepared: Prepared, served: &Served<'_>) -> HandedOver {
    let (vol, front, handles, untold) = fs.into_front();
    let untold = Box::new(untold);
    let Prepared { mut new, asked } = prepared;
    let known = served.config.ok_or_else(|| "it cannot be handed over".to_string());
    let (config, devices) = match known.and_then(|config| Ok((config, alive(config)?))) {
        Ok(both) => both,
        Err(why) => {
            asked.refuse(&why);
            return HandedOver::No { vol, front: Box::new(front), handles: Box::new(handles), untold };
        }
    };
    let vol = match Arc::try_unwrap(vol) {
        Ok(vol) => vol,
        Err(vol) => {
            asked.refuse("something else in its process uses the volume");
            return HandedOver::No { vol, front: Box::new(front), handles: Box::new(handles), untold };
        }
    };
    let now = vol.options_now();
    let held = match vol.unmount_holding() {
        Ok(held) => held,
        Err(e) => {
            let braidfs::NotHandedOver { error, volume, .. } = *e;
            let why = format!("the volume cannot be closed: {error}");
            drop(new);
            let Some(vol) = volume else {
                // What was acknowledged last may be gone: the kernel must not go on with it.
                asked.lose(&why);
                return HandedOver::Lost(error);
            };
            asked.refuse(&why);
            return HandedOver::No { vol: Arc::new(vol), front: Box::new(front), handles: Box::new(handles), untold };
        }
    };
    tracing::info!(held = held.len(), handles = front.handles.len(), "upgrade: the volume is closed");
    // It goes on where this process is killed in the midst.
    served.mount.unguard();
    let why = match give(&new, &asked, &All { config, devices: &devices, front: &front, held: &held }, served) {
        Ok(()) => {
            new.released = true;
            asked.later.taken();
            return HandedOver::To(new.child.id());
        }
        Err(why) => why,
    };
    let status = new.end();
    if new.said_going() {
        // Between the last look at it and its end it may have acknowledged what is on no device.
        asked.lose(&format!("the new process said too late that it serves, and was ended ({status})"));
        return HandedOver::Lost(braidfs::Error::Busy("the process that was to serve it answered too late".into()));
    }
    served.mount.guard();
    devices.iter().for_each(|d| d.keep());
    match mount_again(&devices, &config.options, &now, &held) {
        Ok(vol) => {
            end_hand_over(&vol);
            asked.refuse(&format!("{why} ({status})"));
            HandedOver::No { vol: Arc::new(vol), front: Box::new(front), handles: Box::new(handles), untold }
        }
        Err(e) => {
            asked.lose(&format!("{why} ({status}); and the volume cannot be mounted again: {e}"));
            HandedOver::Lost(e)
        }
    }
}

/// All that passes to the new program.
struct All<'a> {
    config: &'a Upgradable,
    devices: &'a [Arc<FileDevice>],
    front: &'a Front,
    held: &'a [HeldInode],
}

/// # Errors
/// Why the new process does not serve, and has not served: then it may be ended, and this one goes on.
fn give(new: &New, asked: &Asked, all: &All<'_>, served: &Served<'_>) -> Result<(), String> {
    at_step("old-closed")?;
    // it may have come since the other program greeted
    check_needs(new.version, all.front.needs())?;
    all.devices.iter().for_each(|d| d.lend());
    if let Some(parent) = &all.config.supervisor {
        let handing =
            Handing { pid: new.child.id().cast_signed(), program: Some(new.program.clone()), asked_to_end: false };
        tell_parent_within(parent, &handing.said(), PARENT_READS).map_err(|e| {
            format!(
                "the process that looks after it does not read what it is told ({e}): unmount it, and mount it again"
            )
        })?;
    }
    let (channel, unique) = asked.later.place().ok_or("the request did not come by the device")?;
    let record = Record {
        version: new.version,
        point: served.mount.point().to_owned(),
        mount: served.mount.id().map(|id| id.to_string()),
        front: all.front.clone(),
        held: list_of(all.held),
        asked: unique,
    };
    let (file, bytes) = record.write().map_err(|e| e.to_string())?;
    let elsewhere = (!Arc::ptr_eq(channel, served.channel)).then_some(channel);
    let take = Take {
        bytes,
        asked_elsewhere: elsewhere.is_some(),
        metrics: served.metrics.is_some(),
        supervisor: all.config.supervisor.is_some(),
    };
    let mut fds: Vec<BorrowedFd<'_>> = vec![file.as_fd(), served.channel.as_fd()];
    fds.extend(elsewhere.map(|c| c.as_fd()));
    fds.extend(served.metrics.map(AsFd::as_fd));
    fds.extend(all.config.supervisor.as_ref().map(OwnedFd::as_fd));
    new.peer.tell_new(&ToNew::Take(take), &fds)?;
    at_step("old-given")?;
    let patience = Duration::from_secs(u64::from(asked.arg.seconds.max(1)) + all.held.len() as u64 / HELD_PER_SECOND);
    match new.receive(patience)? {
        ToOld::Mounted => {}
        ToOld::Refused(why) => return Err(why),
        _ => return Err("it answers what it was not asked".into()),
    }
    at_step("old-mounted")?;
    new.peer.tell_new(&ToNew::Go, &[])?;
    at_step("old-told")?;
    match new.receive(GREETING)? {
        ToOld::Going => Ok(()),
        ToOld::Refused(why) => Err(why),
        _ => Err("it answers what it was not asked".into()),
    }
}

/// The volume and what was known beside it, for a process that serves it from now on.
///
/// # Errors
/// A file that is open is not there.
pub(crate) fn restore(fs: &mut BraidFs, front: Front) -> Result<(), String> {
    let open = |h: &crate::handles::HandedHandle| {
        let file = fs.vol.open(braidfs::InodeNo(h.ino)).map_err(|e| format!("an open file, inode {}: {e}", h.ino))?;
        if file.generation() != h.generation {
            return Err(format!("an open file, inode {}, is another one", h.ino));
        }
        Ok((h.fh, h.of(file)))
    };
    let handles: Vec<_> = front.handles.iter().map(open).collect::<Result<_, String>>()?;
    fs.handles = Handles::of_earlier(handles).map_err(|e| format!("the numbers of open files: {e}"))?;
    fs.handles.set_promised(&front.promised);
    fs.flagged = crate::flagged::Flagged::of_handed(&front.flags);
    fs.dirty_grants = crate::dirty_grants::DirtyGrants::of_handed(&front.grants);
    fs.quota_grants = crate::within_quota::QuotaGrants::of_handed(&front.quota_grants);
    fs.tight.take(&front.room);
    fs.keep_rooms();
    fs.durable.set(Some(front.options.sync), Some(front.options.dirsync));
    if let Some(scrub) = front.scrub {
        fs.opened_jobs.store(true, Ordering::Relaxed);
        fs.scrub = braidfs_sync::Mutex::new(Some(Job::of_handed(scrub)));
    }
    if let Some(job) = front.device_job {
        fs.opened_jobs.store(true, Ordering::Relaxed);
        fs.device_job = braidfs_sync::Mutex::new(Some(Job::of_handed(job)));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_ended_process_said_is_heard() {
        for (said, going) in [(None, false), (Some(ToOld::Refused("no".into())), false), (Some(ToOld::Going), true)] {
            let (peer, theirs) = Peer::pair().unwrap();
            let child = Command::new("/bin/true").spawn().unwrap();
            let mut new = New { child, program: "/bin/true".into(), peer, version: VERSION, released: false };
            let theirs = Peer::of(theirs);
            let words = [Some(ToOld::Mounted), said];
            words.iter().flatten().for_each(|word| theirs.send(word, &[]).unwrap());
            drop(theirs);
            new.end();
            assert_eq!(new.said_going(), going, "{words:?}");
        }
    }
}
