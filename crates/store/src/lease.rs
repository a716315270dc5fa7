//! The lease of who writes a volume on devices that other machines reach, too.
//!
//! Each such device has an owner record ([`braidfs_format::owner`]), which its holder renews; the device's [`Fence`] lets a
//! write through only while the lease lasts by the holder's own clock. Clocks of machines are not compared: who finds a record
//! takes its holder for alive until it has not changed for as long as the lease and a request in flight may last, by his own
//! clock. Of two that find it free at once, one sees the other's record after [`SETTLE`]: a record counts as written only
//! where its write ended within [`WINDOW`] of the read before it (Lamport, "A fast mutual exclusion algorithm", 1987, has the
//! idea).
//!
//! A record of ours that is older than one that was confirmed is a server's that has lost writes, by a snapshot for instance: nothing
//! more is written to that.
//!
//! Invariants: the deadline is counted from before the write of a renewal; a lease that has ended is renewed only after the
//! record was found to be ours, and [`SETTLE`] after the write once more; a record of somebody else ends the lease for good.
//! Whether it has ended is decided behind each step that waits: the process may have been stopped there for any time, with
//! an answer that was true when it began.
//! Does not promise: that a server does not carry out later what was in flight. docs/remote.md has what follows for users.

mod process;

use crate::super_io::{read_one, read_super};
use crate::{Error, Result};
use braidfs_device::{BLOCK_BYTES, Device, Fence, RecordIo, Rejoin, Remote, boot_time};
use braidfs_format::owner::{GIVEN_BACK, HELD, OwnerRecord};
use braidfs_format::super_block::SuperBlock;
use braidfs_sync::IdleCondvar;
use braidfs_sync::plain::Mutex;
use process::{Process, Whereabouts, whereabouts};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// A write of a record that was found free counts only where it ended so soon after it was found.
const WINDOW: Duration = Duration::from_millis(500);
/// After so long the record is looked at again: twice the window.
const SETTLE: Duration = Duration::from_secs(1);
/// How often that is tried.
const TRIES: usize = 5;
/// How often somebody else's record is looked at.
const LOOK: Duration = Duration::from_millis(200);

/// No longer lease, or timeout of a request, is believed of a record: what the URI of a device may ask for.
const TIME_MAX: Duration = Duration::from_secs(3600);

/// Leases that this process holds, by their nonces.
static HELD_HERE: Mutex<Vec<[u8; 16]>> = Mutex::new(Vec::new());

/// The right to write the remote devices of a volume. Given back when it is dropped.
#[derive(Debug)]
pub struct Lease {
    holders: Vec<Holder>,
}

impl Lease {
    /// Takes the lease on all devices that need one; `None` where none does. Waits where the last holder died. `killed`: as by
    /// [`Self::kill_when_stopped`], from before the first write on.
    ///
    /// # Errors
    /// [`Error::Held`]: somebody else has it. Of a device; of the system.
    pub fn take(devices: &[Arc<dyn Device>], sb: &SuperBlock, killed: bool) -> Result<Option<Self>> {
        let mut holders = Vec::new();
        for (i, device) in devices.iter().enumerate() {
            let Some(lease) = needed(device) else { continue };
            holders.push(Holder::take_as(device, (sb, i), lease, killed)?);
        }
        Ok(Self::of(holders))
    }

    /// For who is about to write these devices, whatever they hold: a volume, a part of one, parts of several. Of each whose
    /// superblock holds, the lease that this tells of.
    ///
    /// # Errors
    /// As [`Self::take`].
    pub fn of_devices(devices: &[Arc<dyn Device>], killed: bool) -> Result<Option<Self>> {
        let mut holders = Vec::new();
        for device in devices {
            let Some(lease) = needed(device) else { continue };
            let sb = match read_one(device) {
                Ok(sb) => sb,
                Err(Error::Corrupt(_)) => continue,
                Err(e) => return Err(e),
            };
            holders.push(Holder::take_as(device, (&sb, usize::from(sb.this_device.get())), lease, killed)?);
        }
        Ok(Self::of(holders))
    }

    fn of(holders: Vec<Holder>) -> Option<Self> {
        (!holders.is_empty()).then_some(Self { holders })
    }

    /// Looks whether somebody writes the volume, for who only reads it. A reader holds no lease: a writer may come later.
    ///
    /// # Errors
    /// [`Error::Held`]; of a device.
    pub fn look(devices: &[Arc<dyn Device>], sb: &SuperBlock) -> Result<()> {
        for (i, device) in devices.iter().enumerate() {
            let Some(remote) = device.remote().filter(|r| r.lease().is_some() && !r.is_held()) else { continue };
            let Some(block) = OwnerRecord::place(sb, i) else { continue };
            let mut io = remote.record_io();
            let Some(found) = read(&mut *io, block, sb.volume_id())? else { continue };
            if found.state != HELD {
                continue;
            }
            let alive = match whereabouts(&found) {
                Whereabouts::Alive => true,
                Whereabouts::Dead => false,
                // a holder renews four times as often as it must
                Whereabouts::Unknown => {
                    tracing::info!(device = %device.name(), "waiting whether the volume is in use: {}", holder(&found));
                    changes_within(&mut *io, block, sb.volume_id(), &found, lease_of(&found) / 2)?
                }
            };
            if alive {
                return Err(held(&**device, &found));
            }
        }
        Ok(())
    }

    /// From now on the kernel kills this process where it is stopped past the end of the lease.
    ///
    /// # Errors
    /// Of the system.
    pub fn kill_when_stopped(&self) -> io::Result<()> {
        self.holders.iter().try_for_each(|h| h.owner.fence.kill_when_stopped())
    }

    /// The fence of the `i`th device that has one; for tests.
    #[doc(hidden)]
    pub fn fence(&self, i: usize) -> Option<&Arc<Fence>> {
        self.holders.get(i).map(|h| &h.owner.fence)
    }

    /// Ends it without a word on the devices, as a crash does.
    pub fn abandon(mut self) {
        self.holders.iter_mut().for_each(|h| h.end(false));
    }

    /// Opens the fences for good, and writes no record any more: for who makes another volume in the place of this one.
    pub fn into_unfenced(mut self) {
        for h in &mut self.holders {
            h.end(false);
            h.owner.fence.extend(Duration::MAX);
        }
    }
}

/// The lease on one device.
#[derive(Debug)]
struct Holder {
    owner: Arc<Owner>,
    renewing: Option<JoinHandle<()>>,
    winding: Option<JoinHandle<()>>,
}

/// What the renewing thread, and the device when it was away, know.
#[derive(Debug)]
struct Owner {
    device: Arc<dyn Device>,
    block: u64,
    volume: u32,
    lease: Duration,
    io_timeout: Duration,
    nonce: [u8; 16],
    numbers: Mutex<Numbers>,
    fence: Arc<Fence>,
    /// The device may have by now that nobody has the lease.
    giving_back: AtomicBool,
    stop_renewing: AtomicBool,
    stop_winding: AtomicBool,
    lock: Mutex<()>,
    stopped: IdleCondvar,
}

/// Numbers of the writes of a record. Two may be under way at once, the renewal's on a connection that has broken and that of
/// the device when it is back, and come in either order. What was sent on a connection that broke the server may still carry
/// out behind what was sent on the next one, for as long as a request may be in flight: such a write is under way until then.
#[derive(Debug, Default)]
struct Numbers {
    last: u64,
    under_way: Vec<UnderWay>,
    /// The device has that one, or a later one, whatever happened: else it has lost what it had confirmed.
    confirmed: u64,
}

/// A write that the device may come to have.
#[derive(Debug)]
struct UnderWay {
    number: u64,
    /// It was confirmed, or has failed.
    ended: bool,
    /// Even then it may still come, until this moment of [`boot_time`].
    until: Duration,
}

impl Numbers {
    /// A write begins: its number, and the least that the device may have once it has confirmed this one.
    fn begin(&mut self, now: Duration) -> (u64, u64) {
        self.under_way.retain(|w| !w.ended || w.until > now);
        self.last += 1;
        let least = self.under_way.iter().map(|w| w.number).fold(self.last, u64::min);
        self.under_way.push(UnderWay { number: self.last, ended: false, until: Duration::ZERO });
        (self.last, least)
    }

    /// The device has confirmed the write.
    fn confirm(&mut self, number: u64, least: u64) {
        self.confirmed = self.confirmed.max(least);
        self.end(number, Duration::ZERO);
    }

    /// Nobody knows what becomes of the write, which may come until then.
    fn fail(&mut self, number: u64, until: Duration) {
        self.end(number, until);
    }

    fn end(&mut self, number: u64, until: Duration) {
        for w in self.under_way.iter_mut().filter(|w| w.number == number) {
            (w.ended, w.until) = (true, w.until.max(until));
        }
    }

    /// A connection broke. What was sent on it and has no answer is sent again on the next one, and the server may carry out
    /// both.
    fn broke(&mut self, until: Duration) {
        self.under_way.iter_mut().filter(|w| !w.ended).for_each(|w| w.until = w.until.max(until));
    }
}

/// The fence's way to the owner: not an `Arc`, which would keep the device for ever.
#[derive(Debug)]
struct Returning(std::sync::Weak<Owner>);

impl Rejoin for Returning {
    fn rejoin(&self, io: &mut dyn RecordIo) -> io::Result<()> {
        let Some(owner) = self.0.upgrade() else { return Ok(()) };
        owner.check_wanted()?;
        owner.numbers.lock().broke(owner.in_flight_until());
        owner.renew(io)
    }
}

/// How long a lease on the device is to last; `None`: it needs none, or this process has it already.
fn needed(device: &Arc<dyn Device>) -> Option<Duration> {
    // who has the lease may open the volume within: fsck, to replay its journals
    device.remote().filter(|r| !r.is_held()).and_then(Remote::lease)
}

impl Holder {
    /// Takes the lease on a device that is the `n`th of the volume that `sb` tells of.
    fn take_as(device: &Arc<dyn Device>, (sb, n): (&SuperBlock, usize), lease: Duration, killed: bool) -> Result<Self> {
        let Some(block) = OwnerRecord::place(sb, n) else {
            let why = format!(
                "{}: the volume has no room for an owner record: lease=off mounts it all the same",
                device.name()
            );
            return Err(Error::Io(io::Error::other(why)));
        };
        Self::take(Arc::clone(device), block, sb.volume_id(), lease, killed)
    }

    fn take(device: Arc<dyn Device>, block: u64, volume: u32, lease: Duration, killed: bool) -> Result<Self> {
        let owner = Arc::new(Owner::new(device, block, volume, lease)?);
        let fence = Arc::clone(&owner.fence);
        HELD_HERE.lock().push(owner.nonce);
        let mut holder = Self { owner: Arc::clone(&owner), renewing: None, winding: None };
        let start =
            |name: &str, work: Box<dyn FnOnce() + Send>| std::thread::Builder::new().name(name.into()).spawn(work);
        // before the record is written: who is stopped there must not write it when somebody else has the lease
        let winding = Arc::clone(&owner);
        holder.winding = Some(start("lease-watch", Box::new(move || winding.wind_again_and_again()))?);
        if killed {
            fence.kill_when_stopped()?;
        }
        owner.acquire()?;
        fence.set_rejoin(Box::new(Returning(Arc::downgrade(&owner))));
        if let Some(remote) = owner.device.remote() {
            remote.set_fence(fence);
        }
        let renewing = Arc::clone(&owner);
        holder.renewing = Some(start("lease", Box::new(move || renewing.renew_again_and_again()))?);
        Ok(holder)
    }

    /// Stops the threads; `given_back`: and says on the device that nobody has it any more.
    fn end(&mut self, given_back: bool) {
        if self.owner.stop_renewing.load(SeqCst) {
            return;
        }
        self.owner.stop(&self.owner.stop_renewing, self.renewing.take());
        if given_back && self.owner.fence.is_open() {
            self.owner.giving_back.store(true, SeqCst);
            let done = self.owner.device.remote().map(|r| self.owner.write(&mut *r.record_io(), GIVEN_BACK));
            if let Some(Err(e)) = done {
                tracing::warn!(device = %self.owner.device.name(), error = %e, "the lease ends by itself");
            }
        }
        self.owner.fence.extend(Duration::ZERO);
        // Last: a server that is away just now must not have this process killed, which has done all its work.
        self.owner.stop(&self.owner.stop_winding, self.winding.take());
        // that thread may have set the timer by what it saw before
        self.owner.fence.wind_up();
        OUTLIVED.lock().push((self.owner.nonce, self.owner.numbers.lock().last));
        HELD_HERE.lock().retain(|n| *n != self.owner.nonce);
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        self.end(true);
    }
}

impl Owner {
    fn new(device: Arc<dyn Device>, block: u64, volume: u32, lease: Duration) -> Result<Self> {
        let mut nonce = [0; 16];
        random(&mut nonce)?;
        let io_timeout = device.remote().map_or(Duration::ZERO, Remote::io_timeout);
        Ok(Self {
            device,
            block,
            volume,
            lease,
            io_timeout,
            nonce,
            numbers: Mutex::default(),
            fence: Arc::new(Fence::new(lease / 8)),
            giving_back: AtomicBool::new(false),
            stop_renewing: AtomicBool::new(false),
            stop_winding: AtomicBool::new(false),
            lock: Mutex::default(),
            stopped: IdleCondvar::default(),
        })
    }

    fn read(&self, io: &mut dyn RecordIo) -> Result<Option<OwnerRecord>> {
        read(io, self.block, self.volume)
    }

    fn write(&self, io: &mut dyn RecordIo, state: u8) -> io::Result<()> {
        let mut r = OwnerRecord::empty();
        let me = Process::this();
        r.nonce = self.nonce;
        r.state = state;
        r.lease_ms = millis(self.lease).into();
        r.io_ms = millis(self.io_timeout).into();
        r.renewed = now().into();
        r.boot = me.boot;
        r.pid = me.pid.into();
        r.pid_namespace = me.namespace.into();
        r.started = me.started.into();
        let host = hostname();
        let n = host.len().min(63);
        r.host[..n].copy_from_slice(&host.as_bytes()[..n]);
        let (seq, least) = self.numbers.lock().begin(boot_time());
        let written = io.write_record(self.block, &r.to_block(self.volume, self.block, seq));
        let until = self.in_flight_until();
        let mut numbers = self.numbers.lock();
        match &written {
            Ok(()) => numbers.confirm(seq, least),
            Err(_) => numbers.fail(seq, until),
        }
        written
    }

    /// Until when what was sent by now may be in flight.
    fn in_flight_until(&self) -> Duration {
        boot_time().saturating_add(self.io_timeout)
    }

    fn remote(&self) -> Result<&dyn Remote> {
        self.device.remote().ok_or_else(|| Error::Io(io::ErrorKind::Unsupported.into()))
    }

    /// Waits until nobody has the device, and takes it.
    fn acquire(&self) -> Result<()> {
        let mut io = self.remote()?.record_io();
        let mut slow = false;
        for _ in 0..TRIES {
            self.wait_until_free(&mut *io)?;
            let began = boot_time();
            // once more, and from here on the clock runs
            if self.read(&mut *io)?.is_some_and(|r| r.state == HELD && !self.outlived(&r)) {
                continue;
            }
            let pass = self.fence.beside();
            let submitted = boot_time();
            slow = submitted.saturating_sub(began) > WINDOW;
            if slow {
                // What was read is old: somebody else's record may be there by now, and must not be written over.
                continue;
            }
            self.write(&mut *io, HELD)?;
            drop(pass);
            if boot_time().saturating_sub(began) > WINDOW {
                // Another one may have found the old record, written his and looked at it before ours came: it must be left
                // alone until he has seen it.
                return Err(self.too_slow("write"));
            }
            std::thread::sleep(SETTLE);
            if self.read(&mut *io)?.is_some_and(|r| r.nonce == self.nonce) {
                self.fence.extend(submitted + self.lease);
                return Ok(());
            }
            // somebody else came at the same time
        }
        if slow {
            return Err(self.too_slow("read"));
        }
        Err(Error::Held(format!("{}: others take the lease again and again", self.device.name())))
    }

    fn too_slow(&self, what: &str) -> Error {
        let why = format!(
            "{}: the server took longer than {} ms for a small {what}: no lease can be had so; try again, or do without (lease=off)",
            self.device.name(),
            WINDOW.as_millis()
        );
        Error::Io(io::Error::new(io::ErrorKind::TimedOut, why))
    }

    /// A holder that was found dead, or silent for long enough: its last record.
    fn outlived(&self, r: &OwnerRecord) -> bool {
        OUTLIVED.lock().contains(&(r.nonce, r.header.seq.get()))
    }

    fn wait_until_free(&self, io: &mut dyn RecordIo) -> Result<()> {
        loop {
            let Some(found) = self.read(io)?.filter(|r| r.state == HELD) else { return Ok(()) };
            if self.outlived(&found) {
                return Ok(());
            }
            let io_timeout = io_timeout_of(&found);
            let wait = match whereabouts(&found) {
                Whereabouts::Alive => return Err(held(&*self.device, &found)),
                // it submits nothing any more; what it had in flight is waited for
                Whereabouts::Dead => io_timeout,
                Whereabouts::Unknown => lease_of(&found).saturating_add(io_timeout),
            };
            tracing::warn!(
                device = %self.device.name(),
                "the volume was not given back by its last user: waiting {} s whether it is in use: {}",
                wait.as_secs(),
                holder(&found)
            );
            if changes_within(io, self.block, self.volume, &found, wait)? {
                return match self.read(io)? {
                    Some(r) if r.state == HELD => Err(held(&*self.device, &r)),
                    _ => Ok(()),
                };
            }
            OUTLIVED.lock().push((found.nonce, found.header.seq.get()));
            tracing::warn!(device = %self.device.name(), "the lease is taken over from {}", holder(&found));
        }
    }

    /// Renews the lease, also one that has ended where nobody else has taken it.
    fn renew(&self, io: &mut dyn RecordIo) -> io::Result<()> {
        for _ in 0..TRIES {
            let began = boot_time();
            self.check_ours(io)?;
            let pass = self.fence.beside();
            let submitted = boot_time();
            // what is given back anybody may take, whether or not its answer has come
            let ended = submitted >= self.fence.deadline() || self.giving_back.load(SeqCst);
            if ended && submitted.saturating_sub(began) > WINDOW {
                // What was read is old: somebody else's record may be there by now, and must not be written over.
                continue;
            }
            self.write(io, HELD)?;
            drop(pass);
            let written = boot_time();
            // Of a lease that lasted: before this moment nobody may take it, and who is about to sees this record.
            let safe = self.fence.deadline().saturating_add(self.io_timeout);
            let late = if ended { written.saturating_sub(began) > WINDOW } else { written >= safe };
            if late {
                // as in `acquire`: somebody else may have it by now, and not have seen this
                self.fence.lose(format!("{}: the lease had ended before it was renewed", self.device.name()));
                return self.fence.check_lost();
            }
            if ended {
                // who gives the lease up waits for the end of this
                self.wait(&self.stop_winding, SETTLE);
                self.check_wanted()?;
                self.check_ours(io)?;
                tracing::warn!(device = %self.device.name(), "the lease had ended; nobody has taken it, and it is renewed");
            }
            // the device may have renewed it meanwhile, when it came back
            self.fence.renew(submitted + self.lease);
            return Ok(());
        }
        Err(io::Error::new(io::ErrorKind::TimedOut, "the server is too slow to renew the lease, which has ended"))
    }

    /// # Errors
    /// The lease was given up: no record is written any more.
    fn check_wanted(&self) -> io::Result<()> {
        match self.stop_winding.load(SeqCst) {
            true => Err(io::Error::other("the lease is given up")),
            false => Ok(()),
        }
    }

    /// # Errors
    /// Somebody else has the volume, it is another one, or as it was before: for good.
    fn check_ours(&self, io: &mut dyn RecordIo) -> io::Result<()> {
        let confirmed = self.numbers.lock().confirmed;
        let found = self.read(io).map_err(|e| match e {
            Error::Io(e) => e,
            e => io::Error::other(e.to_string()),
        })?;
        let name = self.device.name();
        let why = match found {
            Some(r) if r.nonce == self.nonce && r.header.seq.get() >= confirmed => return Ok(()),
            Some(r) if r.nonce == self.nonce => format!(
                "{name}: the server has lost writes that it had confirmed (its disk is as it was {} renewals of the lease ago): \
                 nothing more is written; unmount, and run fsck",
                confirmed - r.header.seq.get()
            ),
            Some(r) => format!("{name}: the lease was lost to {}: nothing more is written", holder(&r)),
            None => format!("{name}: the lease was lost (its record is gone): nothing more is written"),
        };
        tracing::error!("{why}");
        self.fence.lose(why);
        self.fence.check_lost()
    }

    fn renew_again_and_again(&self) {
        let mut failed = false;
        while !self.wait(&self.stop_renewing, if failed { LOOK } else { self.lease / 4 }) {
            let renewed = match self.device.remote() {
                Some(remote) => self.renew(&mut *remote.record_io()),
                None => return,
            };
            failed = renewed.is_err();
            if let Err(e) = renewed {
                if self.fence.lost().is_some() {
                    return;
                }
                tracing::warn!(device = %self.device.name(), error = %e, "the lease is not renewed yet");
            }
        }
    }

    fn wind_again_and_again(&self) {
        while !self.wait(&self.stop_winding, Fence::winding(self.lease)) {
            self.fence.wind_up();
        }
    }

    /// Stops one of the two threads.
    fn stop(&self, stop: &AtomicBool, thread: Option<JoinHandle<()>>) {
        stop.store(true, SeqCst);
        drop(self.lock.lock());
        self.stopped.notify_all();
        thread.into_iter().for_each(|t| drop(t.join()));
    }

    /// Waits for so long; true: the lease ends.
    fn wait(&self, stop: &AtomicBool, time: Duration) -> bool {
        let end = Instant::now() + time;
        let mut guard = self.lock.lock();
        while !stop.load(SeqCst) {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            self.stopped.wait_for(&mut guard, left);
        }
        true
    }
}

/// Records whose holders were found gone by this process, or were this process.
static OUTLIVED: Mutex<Vec<([u8; 16], u64)>> = Mutex::new(Vec::new());

/// The record of a volume on a device; `None` where there is none.
fn read(io: &mut dyn RecordIo, block: u64, volume: u32) -> Result<Option<OwnerRecord>> {
    let mut buf = vec![0; BLOCK_BYTES];
    io.read_record(block, &mut buf)?;
    Ok(OwnerRecord::from_block(&buf, volume, block).ok())
}

/// Whether the record becomes another one within `time`.
fn changes_within(io: &mut dyn RecordIo, block: u64, volume: u32, found: &OwnerRecord, time: Duration) -> Result<bool> {
    let end = boot_time() + time;
    loop {
        match read(io, block, volume)? {
            Some(r) if r.nonce == found.nonce && r.header.seq == found.header.seq => {}
            _ => return Ok(true),
        }
        let left = end.saturating_sub(boot_time());
        if left.is_zero() {
            return Ok(false);
        }
        std::thread::sleep(left.min(LOOK));
    }
}

/// The owner record of each device that has one.
///
/// # Errors
/// Of a device.
pub fn records(devices: &[Arc<dyn Device>], sb: &SuperBlock) -> Result<Vec<(usize, u64, OwnerRecord)>> {
    let mut out = Vec::new();
    for (i, device) in devices.iter().enumerate() {
        let Some(block) = OwnerRecord::place(sb, i) else { continue };
        let mut buf = vec![0; BLOCK_BYTES];
        device.read(block, &mut buf)?;
        out.extend(OwnerRecord::from_block(&buf, sb.volume_id(), block).ok().map(|r| (i, block, r)));
    }
    Ok(out)
}

/// Whether somebody seems to write the volume, for who only looks at it.
pub fn seems_held(devices: &[Arc<dyn Device>]) -> bool {
    let held = |(_, _, r): &(usize, u64, OwnerRecord)| r.state == HELD && whereabouts(r) != Whereabouts::Dead;
    let remote = devices.iter().any(|d| d.remote().is_some());
    remote && read_super(devices).and_then(|(sb, devices)| records(&devices, &sb)).is_ok_and(|all| all.iter().any(held))
}

fn lease_of(r: &OwnerRecord) -> Duration {
    Duration::from_millis(r.lease_ms.get().into()).min(TIME_MAX)
}

fn io_timeout_of(r: &OwnerRecord) -> Duration {
    Duration::from_millis(r.io_ms.get().into()).min(TIME_MAX)
}

/// Who it is, for a message.
fn holder(r: &OwnerRecord) -> String {
    format!("process {} on {}", r.pid, r.host_str())
}

fn held(device: &dyn Device, r: &OwnerRecord) -> Error {
    let ago = (now() - r.renewed.get()).max(0);
    let wait = lease_of(r) + io_timeout_of(r);
    Error::Held(format!(
        "{}: is in use by {}, which renewed its lease {ago} s ago, for {} s: unmount it there; where that machine is gone it \
         can be had {} s after the last renewal",
        device.name(),
        holder(r),
        lease_of(r).as_secs(),
        wait.as_millis().div_ceil(1000)
    ))
}

fn hostname() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname").map_or("?".into(), |h| h.trim().to_string())
}

fn random(out: &mut [u8]) -> Result<()> {
    use std::io::Read;
    Ok(std::fs::File::open("/dev/urandom")?.read_exact(out)?)
}

fn millis(time: Duration) -> u32 {
    u32::try_from(time.as_millis()).unwrap_or(u32::MAX)
}

fn now() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |t| t.as_secs() as i64)
}

#[cfg(test)]
mod tests;
