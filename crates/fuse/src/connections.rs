//! Tenants that are mounted by themselves: several connections of the kernel to one volume, without stale data.
//!
//! Each connection is a file system of its own for the kernel: its pages, its dirty pages and their bound, its queue of
//! requests, its congestion threshold. The kernel keeps names, attributes and pages without limit of time, and does so for each
//! of them apart, so **no inode may be known over two connections at once**. Two rules see to that:
//!
//! 1. *The border.* While a tenant is mounted by itself nothing can be done in its root directory over another connection:
//!    EBUSY, but for what tells attributes of the directory itself, which is not kept then. Before, the kernel is made to forget
//!    what lies below it ([`crate::tenant_mount`]).
//! 2. *Who was told of an inode has it.* A file may have names on both sides of the border (hard links), a directory may have
//!    been open when the border came. So an answer that would tell of an inode over one connection is not given while the
//!    kernel knows it over another one: that one is made to drop it, which it does where nobody uses it (Linux 6.18), and
//!    where it does not the look-up fails with EBUSY.
//!
//! For rule 2 each tenant's connection counts what was told over it ([`Connection::told`]); the engine counts what was told over
//! all ([`braidfs::Volume::held_times`]). What the volume's own mount was told is the rest, so that it counts nothing more
//! than without tenants' mounts. Order: the engine counts first, then the connection, then it is asked for others; given back
//! in the other order. So of two that are told at once one sees the other, or both do.
//!
//! What a tenant's connection was told, and has open, is given back when it ends: the kernel does not say so at an unmount. Until
//! then the border stays, and who asks for what is behind it is put aside ([`Connections::open`]).

use crate::abi::{self, op};
use crate::channel::Channel;
use crate::dirty::DirtyLimit;
use crate::ending;
use crate::fs::{BraidFs, Context};
use crate::helpers::{Job, Kind, Whose};
use crate::mount::{Mount, MountConfig};
use crate::node::WireId;
use crate::ops::sets_flags;
use crate::request::{Answer, Handled, Outcome, Request};
use crate::session::{Slot, run_aside};
use crate::shards::Shards;
use braidfs::{DomainId, InodeNo};
use braidfs_sync::{BiasedRwLock, Condvar, Guarded, Mutex, rank};
use rustix::io::Errno;
use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use zerocopy::FromBytes;

/// Of what was told, see [`Shards`].
const SHARDS: usize = 64;
/// How long it is waited for the kernel to drop an inode that somebody else wants.
const DROP: Duration = Duration::from_millis(20);
/// How long a request at the border waits for the end of a connection that was unmounted.
const END: Duration = Duration::from_secs(5);
/// The log is told of what does not end that often.
pub(crate) const TELL: Duration = Duration::from_secs(30);
/// How often is looked whether users of tenants may go on.
const TURN: Duration = Duration::from_millis(500);
/// From one look to the next.
const MOMENT: Duration = Duration::from_micros(200);

/// The connection of a tenant that is mounted by itself.
#[derive(Debug)]
pub(crate) struct Connection {
    /// Its root directory, which the kernel calls 1 there.
    pub root: WireId,
    pub domain: DomainId,
    /// Name of the tenant.
    pub tenant: String,
    pub point: PathBuf,
    /// How often each inode was told over it.
    told: Shards<u64, rank::ToldShard, SHARDS>,
    /// What is open over it, where the kernel asks for opens.
    handles: Mutex<HashSet<u64>, rank::ToldShard>,
}

impl Connection {
    pub fn new(root: WireId, domain: DomainId, tenant: String, point: PathBuf) -> Self {
        Self { root, domain, tenant, point, told: Shards::default(), handles: Mutex::default() }
    }

    /// It is being told of the inode once more: as soon as the engine counts it.
    pub fn tell(&self, id: u64) {
        *self.told.of(id).lock().entry(id).or_default() += 1;
    }

    /// How often the inode was told, and not given back.
    pub fn told(&self, id: u64) -> u64 {
        self.told.of(id).lock().get(&id).copied().unwrap_or(0)
    }

    /// The kernel gives back; before the engine does.
    pub fn take_back(&self, id: u64, times: u64) {
        let mut shard = self.told.of(id).lock();
        if let Some(n) = shard.get_mut(&id) {
            *n = n.saturating_sub(times);
            if *n == 0 {
                shard.remove(&id);
            }
        }
    }

    /// Something was closed.
    pub fn closed(&self, fh: u64) {
        self.handles.lock().remove(&fh);
    }

    /// All that was told, with how often, and all that is open: it is over.
    fn end(&self) -> (Vec<(u64, u64)>, Vec<u64>) {
        let told = self.told.iter().flat_map(|shard| std::mem::take(&mut *shard.lock())).collect();
        (told, std::mem::take(&mut *self.handles.lock()).into_iter().collect())
    }
}

/// A tenant that is mounted by itself, or about to be.
#[derive(Debug)]
struct Entry {
    own: Arc<Connection>,
    /// When it is there: until then, and from its end on, nothing is told to it.
    channel: Option<Arc<Channel>>,
    /// Its end has begun.
    ending: bool,
    /// Its root is a border.
    closed: bool,
    mount: Option<Arc<Mount>>,
    /// A directory of the volume's own mount, which cannot be unmounted as long as it is open.
    pin: Option<OwnedFd>,
}

impl Entry {
    /// Whether it was unmounted.
    fn is_ending(&self) -> bool {
        self.ending || self.channel.as_ref().is_some_and(|c| c.is_over())
    }
}

#[derive(Default)]
struct List {
    tenants: Vec<Entry>,
    /// No further one: the volume is being closed.
    closed: bool,
    /// It was asked for by a signal: their users may go on until they leave.
    patient: bool,
    /// And by another one: they may not.
    cut_off: bool,
    /// The volume's own mount.
    main: Weak<Channel>,
    config: Option<MountConfig>,
    /// Tenants that are about to be removed, by their names: not mounted by themselves meanwhile.
    removals: Vec<String>,
    /// Of all threads that handle requests.
    slots: Vec<Weak<[Slot]>>,
    /// Requests that wait for the end of the border at a root, and since when.
    aside: Vec<(WireId, Instant, Job)>,
}

impl List {
    fn take_aside(&mut self, root: WireId, wanted: impl Fn(Instant) -> bool) -> Vec<Job> {
        let those = self.aside.extract_if(.., |(at, since, _)| *at == root && wanted(*since));
        those.map(|(_, _, job)| job).collect()
    }
}

/// Those in the list with a border, for requests to look at.
struct Owners(Vec<Arc<Connection>>);

impl Guarded for Owners {
    fn is_shared(&self) -> bool {
        !self.0.is_empty()
    }
}

/// All connections to a volume, see the module.
pub(crate) struct Connections {
    /// Of tenants, those that begin or end among them. Read by each request.
    count: AtomicUsize,
    list: Mutex<List, rank::Connections>,
    owners: BiasedRwLock<Owners, rank::InodeOwners>,
    changed: Condvar,
}

impl Default for Connections {
    fn default() -> Self {
        let (list, owners) = (Mutex::default(), BiasedRwLock::new(Owners(Vec::new())));
        Self { count: AtomicUsize::new(0), list, owners, changed: Condvar::new() }
    }
}

impl std::fmt::Debug for Connections {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connections").field("count", &self.count).finish_non_exhaustive()
    }
}

/// What holds a request up at the border.
enum Held {
    /// The tenant is mounted by itself.
    Busy,
    /// It was a moment ago, and its end is under way: the request is put aside, unless it was. `first`: nobody else waits at this
    /// root.
    Ending { first: Option<WireId> },
}

impl Connections {
    /// Whether there are more than the volume's own.
    pub fn any(&self) -> bool {
        self.count.load(Ordering::Acquire) > 0
    }

    /// The volume's own mount is served by these threads, and was made so.
    pub fn serve_main(&self, channel: &Arc<Channel>, config: &MountConfig, slots: &Arc<[Slot]>) {
        let mut list = self.list.lock();
        (list.main, list.config) = (Arc::downgrade(channel), Some(config.clone()));
        list.slots = vec![Arc::downgrade(slots)];
    }

    /// A tenant's mount is served by these threads, too.
    pub fn serve_also(&self, slots: &Arc<[Slot]>) {
        let mut list = self.list.lock();
        list.slots.retain(|s| s.strong_count() > 0);
        list.slots.push(Arc::downgrade(slots));
    }

    /// How the volume's own mount was made.
    pub fn config(&self) -> Option<MountConfig> {
        self.list.lock().config.clone()
    }

    /// The file system, for a thread of its own; who has it lets it go before [`Self::remove`].
    pub fn file_system(&self) -> Option<Arc<BraidFs>> {
        let slots = self.list.lock().slots.first()?.upgrade()?;
        // of a thread that does nothing now: the others may be waiting for a device
        let idle = slots.iter().find_map(|slot| slot.try_lock()?.clone());
        idle.or_else(|| slots.iter().find_map(|slot| slot.lock().clone()))
    }

    /// Waits until all requests have ended that are being handled when it is called. Not on a thread that handles one.
    pub fn pass(&self) {
        let all: Vec<_> = self.list.lock().slots.iter().filter_map(Weak::upgrade).collect();
        all.iter().for_each(|slots| slots.iter().for_each(|slot| drop(slot.lock())));
    }

    /// The channel of the volume's own mount.
    pub fn main(&self) -> Option<Arc<Channel>> {
        self.list.lock().main.upgrade()
    }

    /// The channels of all connections but this one.
    pub fn others(&self, own: Option<&Connection>) -> Vec<Arc<Channel>> {
        let list = self.list.lock();
        let main = own.and_then(|_| list.main.upgrade());
        let is_own = |e: &&Entry| own.is_some_and(|own| std::ptr::eq(&raw const *e.own, own));
        let tenants = list.tenants.iter().filter(|e| !is_own(e)).filter_map(|e| e.channel.clone());
        main.into_iter().chain(tenants).collect()
    }

    /// Names of the tenants that are mounted by themselves, and where; not those whose mount has ended, which may still be
    /// made durable.
    pub fn tenants(&self) -> Vec<(String, PathBuf)> {
        let list = self.list.lock();
        let those = list.tenants.iter().filter(|e| !e.is_ending());
        those.map(|e| (e.own.tenant.clone(), e.own.point.clone())).collect()
    }

    /// From now on the root of a tenant is the border of a connection that is to come.
    ///
    /// # Errors
    /// Why it cannot be.
    pub fn begin(&self, own: &Arc<Connection>) -> Result<(), String> {
        self.await_open(own.root);
        let mut list = self.list.lock();
        if list.closed {
            return Err("the volume is being unmounted".into());
        }
        if list.removals.contains(&own.tenant) {
            return Err("it is being removed".into());
        }
        if let Some(there) = list.tenants.iter().find(|e| e.own.root == own.root && e.closed) {
            let point = there.own.point.display();
            if there.is_ending() {
                return Err(format!(
                    "its former mount, on {point}, has not ended: what was asked for over it is still under way"
                ));
            }
            return Err(format!(
                "it is mounted on {point} already: `mount --bind {point} DIRECTORY` shows it elsewhere"
            ));
        }
        let own = own.clone();
        list.tenants.push(Entry { own, channel: None, ending: false, closed: true, mount: None, pin: None });
        self.publish(&list);
        Ok(())
    }

    /// Waits for the border of a connection that was unmounted a moment ago: it may still have to give back what it was told.
    pub fn await_open(&self, root: WireId) {
        let end = Instant::now() + END;
        let mut list = self.list.lock();
        while list.tenants.iter().any(|e| e.own.root == root && e.closed && e.is_ending()) && Instant::now() < end {
            let _ = self.changed.wait_for(&mut list, Duration::from_millis(50));
        }
    }

    /// It is there: it is told of what changes, and ended with the volume.
    ///
    /// # Errors
    /// The volume is being unmounted.
    pub fn join(
        &self,
        own: &Arc<Connection>,
        channel: &Arc<Channel>,
        mount: &Arc<Mount>,
        pin: OwnedFd,
    ) -> Result<(), String> {
        let mut list = self.list.lock();
        if list.closed {
            return Err("the volume is being unmounted".into());
        }
        if let Some(entry) = list.tenants.iter_mut().find(|e| Arc::ptr_eq(&e.own, own)) {
            (entry.channel, entry.mount, entry.pin) = (Some(channel.clone()), Some(mount.clone()), Some(pin));
        }
        Ok(())
    }

    /// The volume may be unmounted. Whoever drops what is returned may have to wait until it is closed.
    pub fn unpin(&self, own: &Connection) -> Option<OwnedFd> {
        let mut list = self.list.lock();
        let entry = list.tenants.iter_mut().find(|e| std::ptr::eq(&raw const *e.own, own))?;
        entry.ending = true;
        entry.pin.take()
    }

    /// Nothing is told to it any more.
    pub fn leave(&self, own: &Arc<Connection>) {
        let mut list = self.list.lock();
        let Some(entry) = list.tenants.iter_mut().find(|e| Arc::ptr_eq(&e.own, own)) else { return };
        entry.ending = true;
        // their ends may ask the kernel
        let gone = (entry.channel.take(), entry.mount.take(), entry.pin.take());
        drop(list);
        drop(gone);
    }

    /// Its border is open from now on: all that was told over it has been given back. Those that waited for that, for the
    /// helper thread.
    #[must_use]
    pub fn open(&self, own: &Arc<Connection>) -> Vec<Job> {
        let mut list = self.list.lock();
        if let Some(entry) = list.tenants.iter_mut().find(|e| Arc::ptr_eq(&e.own, own)) {
            entry.closed = false;
        }
        self.publish(&list);
        let waited = list.take_aside(own.root, |_| true);
        drop(list);
        self.changed.notify_all();
        waited
    }

    /// Tells those that wait for the end of a border when they have waited long enough, until none does. On a thread of its
    /// own: all others may be waiting for a device.
    fn hold_up(&self, root: WireId) {
        loop {
            std::thread::sleep(Duration::from_millis(50));
            let mut list = self.list.lock();
            if list.aside.iter().all(|(at, ..)| *at != root) {
                return;
            }
            let now = Instant::now();
            let those = list.take_aside(root, |since| now.duration_since(since) >= END);
            drop(list);
            // where the volume is being closed they are dropped
            if let Some(fs) = self.file_system() {
                those.into_iter().for_each(|job| job(&fs));
            }
        }
    }

    /// It is no more. Its border is open.
    pub fn remove(&self, own: &Arc<Connection>) {
        self.leave(own);
        let mut list = self.list.lock();
        list.tenants.retain(|e| !Arc::ptr_eq(&e.own, own));
        self.publish(&list);
        drop(list);
        self.changed.notify_all();
    }

    fn publish(&self, list: &List) {
        let closed = list.tenants.iter().filter(|e| e.closed);
        self.owners.write().0 = closed.map(|e| e.own.clone()).collect();
        self.count.store(list.tenants.len(), Ordering::Release);
    }

    /// Waits until there are no tenants' connections, or so long.
    fn wait(&self, within: Duration) -> bool {
        let end = Instant::now() + within;
        let mut list = self.list.lock();
        while !list.tenants.is_empty() {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let _ = self.changed.wait_for(&mut list, left);
        }
        true
    }

    /// Those that are there, with their channels: one that ends waits until nobody has its own.
    fn mounts(&self) -> Vec<(Arc<Mount>, Weak<Channel>)> {
        let there = |e: &Entry| Some((e.mount.clone()?, Arc::downgrade(e.channel.as_ref()?)));
        self.list.lock().tenants.iter().filter_map(there).collect()
    }

    /// Names of the tenants that are mounted by themselves, and where the kernel has the settings of their mounts.
    pub fn dirty_limits(&self) -> Vec<(String, DirtyLimit)> {
        let list = self.list.lock();
        let there = |e: &Entry| Some((e.own.tenant.clone(), e.mount.as_ref()?.dirty_limit()?));
        list.tenants.iter().filter_map(there).collect()
    }

    /// The other borders: name, root, where it is mounted.
    pub fn roots_but(&self, own: &Connection) -> Vec<(String, WireId, PathBuf)> {
        let list = self.list.lock();
        let others = list.tenants.iter().filter(|e| e.closed && !std::ptr::eq(&raw const *e.own, own));
        others.map(|e| (e.own.tenant.clone(), e.own.root, e.own.point.clone())).collect()
    }

    /// Unmounts them, as the volume is to be: what is busy is synced and detached, and ends with its last user, and the volume
    /// after that, unless [`Self::cut_off`] is called.
    pub fn unmount(&self) {
        if !self.any() {
            return;
        }
        {
            let mut list = self.list.lock();
            (list.closed, list.patient) = (true, true);
        }
        for (mount, channel) in self.mounts() {
            if let Err(e) = ending::end(&mount, self, &channel) {
                tracing::warn!(point = %mount.point().display(), error = %e, "cannot unmount a tenant");
            }
        }
        self.wait(END);
        // Of those that are busy: the mount that is about to be detached must not hang on this process. If that was killed, its
        // descriptors would be closed in any order, and this one would wait for an answer that nobody gives.
        let pins: Vec<_> = self.list.lock().tenants.iter_mut().filter_map(|e| e.pin.take()).collect();
        drop(pins);
    }

    /// Nobody waits for their users any more.
    pub fn cut_off(&self) {
        let mut list = self.list.lock();
        (list.closed, list.cut_off) = (true, true);
        drop(list);
        self.changed.notify_all();
    }

    /// They end, as the volume's own mount has: each with its last user where that mount was asked to end, else whoever uses
    /// them.
    pub fn end(self: &Arc<Self>) {
        self.list.lock().closed = true;
        if !self.any() {
            return;
        }
        for (mount, _) in self.mounts() {
            // not there any more, or busy elsewhere
            let _ = mount.unmount(true);
        }
        // What the kernel holds of them would be lost. It may wait for the device: so not here.
        let all = self.clone();
        let _ = run_aside("fuse-write-back", move || all.write_back_all());
        if self.wait(END) {
            return;
        }
        if self.is_patient() {
            tracing::warn!(
                "the volume's mount has ended, its tenants are in use: they end with their last users, and the volume then; or \
                 ask again to cut them off"
            );
            while self.is_patient() {
                if self.wait(TURN) {
                    return;
                }
            }
        }
        for (mount, _) in self.mounts() {
            tracing::warn!(point = %mount.point().display(), "the volume's mount has ended: its tenant's users are cut off");
            if let Err(e) = mount.abort() {
                tracing::error!(error = %e, "cannot end the connection of a tenant");
            }
        }
        // not before: what is under way over it must be in the volume when that is closed
        while !self.wait(TELL) {
            tracing::error!("the volume cannot be closed: requests of a tenant's mount have not ended");
        }
    }

    fn is_patient(&self) -> bool {
        let list = self.list.lock();
        list.patient && !list.cut_off
    }

    /// Whether a directory is a border for those on this connection.
    fn is_border(&self, id: WireId, own: Option<&Connection>) -> bool {
        let of_other = |c: &Arc<Connection>| c.root == id && !own.is_some_and(|own| std::ptr::eq(own, &raw const **c));
        self.owners.read().0.iter().any(of_other)
    }

    /// Whether it is one, and the connection that has what lies below it goes on. Where that ends the request that `later`
    /// makes is put aside.
    fn border(&self, id: WireId, own: Option<&Connection>, later: impl FnOnce() -> Option<Job>) -> Option<Held> {
        if !self.is_border(id, own) {
            return None;
        }
        let mut list = self.list.lock();
        let entry = list.tenants.iter().find(|e| e.own.root == id && e.closed)?;
        if !entry.is_ending() {
            return Some(Held::Busy);
        }
        let Some(job) = later() else { return Some(Held::Busy) };
        let first = list.aside.iter().all(|(at, ..)| *at != id);
        list.aside.push((id, Instant::now(), job));
        Some(Held::Ending { first: first.then_some(id) })
    }

    /// Whether an inode was told over a tenant's connection.
    fn tenant_knows(&self, id: u64) -> bool {
        self.owners.read().0.iter().any(|c| c.told(id) > 0)
    }
}

/// What may be asked of a directory at the border over another connection: nothing that tells or changes what is in it.
fn passes_border(req: &Request<'_>) -> bool {
    match req.head.opcode {
        op::LOOKUP => matches!(req.name(), Ok(b"." | b"..")),
        op::FORGET | op::BATCH_FORGET | op::INTERRUPT | op::GETATTR | op::STATX | op::STATFS | op::SYNCFS => true,
        op::GETXATTR | op::LISTXATTR | op::OPENDIR | op::RELEASEDIR | op::FSYNCDIR => true,
        // asked of the volume on any of its directories, or of this one: but for what changes it
        op::IOCTL => req.arg::<abi::IoctlIn>().is_ok_and(|arg| !sets_flags(arg.cmd)),
        _ => false,
    }
}

impl BraidFs {
    /// Whether a request must not be carried out, as it is of what a tenant has to itself: EBUSY, or it waits for the end of that,
    /// unless it did.
    pub(crate) fn stopped_at_border(&self, req: &Request<'_>, cx: &Context<'_>, waited: bool) -> Option<Handled> {
        let own = cx.channel.own();
        let to = match req.head.opcode {
            // the same start in both
            op::RENAME | op::RENAME2 => req.arg::<abi::RenameIn>().ok().map(|arg| cx.channel.node(WireId(arg.newdir))),
            _ => None,
        };
        let at = [Some(req.node()).filter(|_| !passes_border(req)), to];
        let later = || (!waited).then(|| self.again(req, cx, |_, _| ()));
        match at.into_iter().flatten().find_map(|id| self.connections.border(id, own, later))? {
            Held::Busy => Some(Err(Errno::BUSY)),
            Held::Ending { first } => {
                if let Some(root) = first {
                    let all = self.connections.clone();
                    // where there is no thread they wait for the end, however long that takes
                    let _ = run_aside("fuse-border", move || all.hold_up(root));
                }
                Some(Ok(Outcome::Deferred))
            }
        }
    }

    /// What carries out a request that was put aside, after it has waited: for a helper thread. Dropped, it answers EIO.
    fn again(&self, req: &Request<'_>, cx: &Context<'_>, wait: impl FnOnce(&Self, &Channel) + Send + 'static) -> Job {
        let (req, later) = (req.detach(), cx.later());
        Box::new(move |fs: &BraidFs| {
            let req = req.get();
            wait(fs, later.channel());
            let mut out = Answer::new(crate::fs::MAX_IO_BYTES as usize);
            let handled = fs.handle_as(&req, &mut out, &later.context(), true);
            fs.answer_later(&req, handled, later, &mut out);
        })
    }

    /// Whether the kernel knows the inode over another connection than this one, over which it was told just now.
    fn known_elsewhere(&self, id: u64, own: Option<&Connection>) -> bool {
        match own {
            None => self.connections.tenant_knows(id),
            Some(own) => self.vol.held_times(WireId(id).ino()) > own.told(id),
        }
    }

    /// Counts what an answer is about to tell, and refuses to tell of what another connection has: see the module. `last`: it
    /// was waited for.
    pub(crate) fn admit(&self, req: &Request<'_>, out: &mut Answer, cx: &Context<'_>, last: bool) -> Handled {
        let own = cx.channel.own();
        let done = Ok(Outcome::Reply);
        match req.head.opcode {
            op::LOOKUP | op::CREATE | op::MKNOD | op::MKDIR | op::SYMLINK | op::LINK | op::TMPFILE => {
                let Ok((entry, rest)) = abi::EntryOut::read_from_prefix(out.body()) else { return done };
                let open = abi::OpenOut::read_from_prefix(rest).ok().map(|(open, _)| open.fh);
                let id = entry.nodeid;
                if id == 0 {
                    return done;
                }
                if let Some(own) = own {
                    own.tell(id);
                }
                if let (Some(own), Some(fh)) = (own, open.filter(|_| self.negotiated.opens())) {
                    own.handles.lock().insert(fh);
                }
                if self.connections.is_border(WireId(id), own) {
                    // what is done over the other connection is not told here
                    out.body_mut()[ATTR_VALID_OF_ENTRY].fill(0);
                } else if req.head.opcode == op::LOOKUP && self.known_elsewhere(id, own) {
                    self.give_back(own, id, 1);
                    if last {
                        return Err(Errno::BUSY);
                    }
                    // not sent only where the mount is ending
                    let job = self.again(req, cx, move |fs, channel| fs.have_dropped(WireId(id), channel));
                    self.jobs.send(Kind::Borders, Whose::Mount, job);
                    return Ok(Outcome::Deferred);
                }
            }
            op::READDIRPLUS => {
                let mut at = 0;
                while let Some(len) = listed_len(&out.body()[at..]) {
                    self.admit_listed(own, &mut out.body_mut()[at..]);
                    at = (at + len).min(out.len());
                }
            }
            op::OPEN | op::OPENDIR => {
                if let (Some(own), Ok((open, _))) = (own, abi::OpenOut::read_from_prefix(out.body())) {
                    own.handles.lock().insert(open.fh);
                }
            }
            op::GETATTR | op::STATX if self.connections.is_border(req.node(), own) => {
                // of both answers the first 8 bytes are how long it is good for
                out.body_mut()[..8].fill(0);
            }
            _ => {}
        }
        done
    }

    /// An entry of a listing, which is counted, is told without its attributes where another connection has it.
    fn admit_listed(&self, own: Option<&Connection>, entry: &mut [u8]) {
        let Ok((told, _)) = abi::EntryOut::read_from_prefix(entry) else { return };
        let id = told.nodeid;
        if id == 0 {
            return;
        }
        if self.connections.is_border(WireId(id), own) {
            entry[ATTR_VALID_OF_ENTRY].fill(0);
        } else if self.known_elsewhere(id, own) {
            self.give_back(own, id, 1);
            entry[..size_of::<abi::EntryOut>()].fill(0);
        }
    }

    /// Has the other connections drop an inode, if nobody uses it there. On a helper thread only.
    fn have_dropped(&self, id: WireId, channel: &Channel) {
        let own = channel.own();
        if self.negotiated.minor >= abi::MINOR_PRUNE {
            self.connections.others(own).iter().for_each(|other| other.prune(&[id]));
        }
        let end = Instant::now() + DROP;
        // it was given back here, so that this one has what it was told before
        while self.known_elsewhere(id.0, own) && Instant::now() < end {
            std::thread::sleep(MOMENT);
        }
    }

    /// What a connection was told, and has open, is given back: it has ended, and nothing of it is under way.
    pub(crate) fn give_all_back(&self, own: &Connection) {
        let (told, handles) = own.end();
        for fh in handles {
            // it was there a moment ago
            let _ = self.handles.release(fh);
        }
        told.into_iter().for_each(|(id, times)| self.give_back(None, id, times));
    }

    /// Of a tenant's domain what the kernel knows, but for the tenant's root.
    pub(crate) fn known_below(&self, own: &Connection) -> Vec<WireId> {
        let domain = usize::from(own.domain.0);
        let here = |ino: InodeNo| ino != own.root.ino() && self.domain_index(ino) == Some(domain);
        self.vol.held_inodes(here).into_iter().map(|i| WireId::new(i.ino, i.generation)).collect()
    }
}

/// Where a look-up's answer says how long the attributes are good for: seconds, and nanoseconds.
pub(crate) const ATTR_VALID_OF_ENTRY: std::ops::Range<usize> = 24..32;

/// Bytes of the first entry of a listing with attributes.
pub(crate) fn listed_len(body: &[u8]) -> Option<usize> {
    let (_, rest) = abi::EntryOut::read_from_prefix(body).ok()?;
    let (name, _) = abi::Dirent::read_from_prefix(rest).ok()?;
    Some((size_of::<abi::EntryOut>() + size_of::<abi::Dirent>() + name.namelen as usize).next_multiple_of(8))
}

mod removal;
