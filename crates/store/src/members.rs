//! The devices of a volume in use: one more may come, and the last one may leave.
//!
//! Who reads or writes finds them without a lock that threads share: a device takes a *seat* that nobody had before, and an
//! order tells which seat device `i` has. A device that has left is let go at once, so that others can open it; its seat
//! stays empty until the volume is closed. Each call of a device is counted on a line of the thread's slot ([`PassLock`]): who
//! lets the device go closes the doors and waits until all slots are empty.

use braidfs_device::{BLOCK_BYTES, Device, SharedFlushes, WriteOp};
use braidfs_format::super_block::{DeviceEntry, MAX_DEVICES};
use braidfs_format::{BlockAddr, Geometry};
use braidfs_sync::{PassLock, rank};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

/// Devices that one volume can have had one after the other until it is closed.
const SEATS: usize = 4 * MAX_DEVICES;
/// In the order: there has never been such a device.
const NONE: usize = usize::MAX;

/// See the module.
#[derive(Debug)]
pub(crate) struct Members {
    /// Each set once.
    seats: Box<[OnceLock<Seat>]>,
    /// Which seat device `i` has. Of one that has left what it had.
    order: [AtomicUsize; MAX_DEVICES],
    /// Devices now. Written behind the seat and the order of a new one, and read before these.
    count: AtomicUsize,
}

/// A device and its part of the group space.
#[derive(Debug)]
pub(crate) struct Seat {
    pub device: Arc<dyn Device>,
    member: Arc<Member>,
    /// First block in the group space.
    pub first: u64,
    /// One past the last usable block. Changes of the last device only.
    end: AtomicU64,
    /// Device block of the first one.
    pub start: u64,
}

impl Seat {
    fn new(device: Arc<dyn Device>, entry: &DeviceEntry, geometry: Geometry) -> Self {
        let member = Arc::new(Member {
            name: device.name(),
            elsewhere: device.remote().is_some(),
            inner: PassLock::of_device(Some(SharedFlushes::of(device))),
            errors: AtomicU64::new(0),
            cannot_flush: AtomicBool::new(false),
        });
        Self {
            device: Arc::clone(&member) as Arc<dyn Device>,
            member,
            first: u64::from(entry.first_group.get()) * u64::from(geometry.group_blocks()),
            end: AtomicU64::new(end_of(entry, geometry)),
            start: entry.data_start.get(),
        }
    }

    pub fn end(&self) -> u64 {
        self.end.load(Ordering::Acquire)
    }

    /// Other machines reach it, too.
    pub fn is_elsewhere(&self) -> bool {
        self.member.elsewhere
    }

    /// A flush failed, and so will every later one.
    pub fn cannot_flush(&self) -> bool {
        self.member.cannot_flush.load(Ordering::Relaxed)
    }

    /// Calls that the device answered with an error.
    pub fn errors(&self) -> u64 {
        self.member.errors.load(Ordering::Relaxed)
    }
}

/// One past the last usable block of a device, in the group space.
fn end_of(d: &DeviceEntry, g: Geometry) -> u64 {
    let first = u64::from(d.first_group.get()) * u64::from(g.group_blocks());
    first + u64::from(d.groups.get() - 1) * u64::from(g.group_blocks()) + u64::from(d.last_group_blocks.get())
}

impl Members {
    pub fn new() -> Self {
        Self {
            seats: std::iter::repeat_with(OnceLock::new).take(SEATS).collect(),
            order: std::array::from_fn(|_| AtomicUsize::new(NONE)),
            count: AtomicUsize::new(0),
        }
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }

    /// Whether a volume may get one more before it is closed.
    pub fn has_seat(&self) -> bool {
        self.seats.iter().any(|s| s.get().is_none())
    }

    /// One more, the last; false where there is no seat. One at a time.
    pub fn add(&self, device: Arc<dyn Device>, entry: &DeviceEntry, geometry: Geometry) -> bool {
        let (now, free) = (self.len(), self.seats.iter().position(|s| s.get().is_none()));
        let (Some(order), Some(free)) = (self.order.get(now), free) else { return false };
        if self.seats[free].set(Seat::new(device, entry, geometry)).is_err() {
            return false;
        }
        order.store(free, Ordering::Release);
        self.count.store(now + 1, Ordering::Release);
        true
    }

    /// The last device has left: it is let go when who reads or writes there has done so.
    pub fn remove_last(&self) {
        if let Some(last) = self.len().checked_sub(1) {
            self.count.store(last, Ordering::Release);
            self.seat(last).member.leave();
        }
    }

    /// The last device is as large as `entry` says.
    pub fn resize_last(&self, entry: &DeviceEntry, geometry: Geometry) {
        if let Some(last) = self.len().checked_sub(1) {
            self.seat(last).end.store(end_of(entry, geometry), Ordering::Release);
        }
    }

    /// Of device `i`, or that of one that was device `i` last.
    ///
    /// # Panics
    /// Where there was none.
    pub fn seat(&self, i: usize) -> &Seat {
        let seat = self.seats.get(self.order[i].load(Ordering::Acquire)).and_then(OnceLock::get);
        seat.unwrap_or_else(|| panic!("the volume has no device {i}"))
    }

    /// The device whose groups `addr` lies behind the first block of, and its number.
    #[inline]
    pub fn of(&self, addr: BlockAddr) -> Option<(usize, &Seat)> {
        (0..self.len()).rev().map(|i| (i, self.seat(i))).find(|(_, s)| s.first <= addr.0)
    }
}

/// A device, as long as it is one of the volume's.
#[derive(Debug)]
struct Member {
    name: String,
    /// It has a [`braidfs_device::Remote`], which cannot be lent out from behind the lock.
    elsewhere: bool,
    inner: PassLock<Option<Arc<dyn Device>>, rank::Member>,
    /// Of calls, since the volume was opened; what it cannot do is none.
    errors: AtomicU64,
    /// A flush was one of them.
    cannot_flush: AtomicBool,
}

impl Member {
    /// Lets the device go, once all calls that have begun have ended. Calls that come meanwhile wait, and find that it is gone.
    fn leave(&self) {
        let gone = self.inner.write().take();
        // outside the lock: closing may take long
        drop(gone);
    }

    fn with<R>(&self, f: impl FnOnce(&dyn Device) -> io::Result<R>) -> io::Result<R> {
        match &*self.inner.read() {
            Some(device) => f(&**device).inspect_err(|e| self.count(e)),
            None => Err(io::Error::new(io::ErrorKind::NotFound, format!("{} was removed from the volume", self.name))),
        }
    }
}

impl Member {
    #[cold]
    fn count(&self, e: &io::Error) {
        if e.kind() != io::ErrorKind::Unsupported {
            self.errors.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Device for Member {
    fn blocks(&self) -> u64 {
        self.inner.read().as_ref().map_or(0, |d| d.blocks())
    }
    fn read(&self, block: u64, buf: &mut [u8]) -> io::Result<()> {
        debug_assert!(buf.len().is_multiple_of(BLOCK_BYTES));
        self.with(|d| d.read(block, buf))
    }
    fn write(&self, block: u64, buf: &[u8]) -> io::Result<()> {
        self.with(|d| d.write(block, buf))
    }
    fn write_batch(&self, ops: &[WriteOp<'_>]) -> io::Result<()> {
        self.with(|d| d.write_batch(ops))
    }
    fn write_batch_through(&self, ops: &[WriteOp<'_>]) -> io::Result<()> {
        self.with(|d| d.write_batch_through(ops))
    }
    fn end_sync(&self) {
        if let Some(device) = &*self.inner.read() {
            device.end_sync();
        }
    }
    fn flush(&self) -> io::Result<()> {
        // what lay on one that has left is nobody's
        let flushed = self.inner.read().as_ref().map_or(Ok(()), |d| d.flush());
        flushed.inspect_err(|e| {
            self.count(e);
            self.cannot_flush.store(true, Ordering::Relaxed);
        })
    }
    fn shares_flushes(&self) -> bool {
        true
    }
    fn discard(&self, block: u64, blocks: u64) -> io::Result<()> {
        self.with(|d| d.discard(block, blocks))
    }
    fn grown(&self) -> io::Result<u64> {
        self.with(|d| d.grown())
    }
    fn extend(&self, blocks: u64) -> io::Result<()> {
        self.with(|d| d.extend(blocks))
    }
    fn cut_off(&self, blocks: u64) -> io::Result<()> {
        self.with(|d| d.cut_off(blocks))
    }
    fn writable(&self) -> io::Result<Option<Arc<dyn Device>>> {
        self.with(|d| d.writable())
    }
    fn block_device(&self) -> Option<(u32, u32)> {
        self.inner.read().as_ref().and_then(|d| d.block_device())
    }
    fn name(&self) -> String {
        self.name.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use braidfs_device::MemDevice;

    fn entry(first: u32) -> DeviceEntry {
        DeviceEntry {
            uuid: [0; 16],
            blocks: 4096.into(),
            data_start: 8.into(),
            first_group: first.into(),
            groups: 3.into(),
            last_group_blocks: 1024.into(),
            flags: 0.into(),
            reserved: [0; 16],
        }
    }

    #[test]
    fn devices_come_and_go() {
        let g = Geometry::new(1024, 3).unwrap();
        let m = Members::new();
        let new = || Arc::new(MemDevice::new(4096));
        assert!(m.add(new(), &entry(0), g));
        let mut last = None;
        for round in 0.. {
            let device = new();
            if !m.add(device.clone(), &entry(3), g) {
                last = Some(round);
                break;
            }
            assert_eq!(m.len(), 2);
            let at = m.of(BlockAddr(3 * 1024 + 5)).unwrap();
            assert_eq!((at.0, at.1.first, at.1.end()), (1, 3 * 1024, 6 * 1024));
            let seat = Arc::clone(&at.1.device);
            seat.write(7, &[1; BLOCK_BYTES]).unwrap();
            m.remove_last();
            assert_eq!(m.len(), 1);
            assert_eq!(m.of(BlockAddr(3 * 1024 + 5)).unwrap().0, 0);
            assert_eq!(Arc::strong_count(&device), 1, "it was let go");
            assert!(seat.read(7, &mut [0; BLOCK_BYTES]).is_err() && seat.flush().is_ok() && seat.blocks() == 0);
        }
        assert_eq!(last, Some(SEATS - 1));
        assert!(!m.has_seat());
    }

    #[test]
    fn no_more_than_there_can_be() {
        let g = Geometry::new(1024, 3).unwrap();
        let m = Members::new();
        for i in 0..MAX_DEVICES as u32 {
            assert!(m.add(Arc::new(MemDevice::new(4096)), &entry(3 * i), g));
        }
        assert!(m.has_seat() && !m.add(Arc::new(MemDevice::new(4096)), &entry(99), g));
    }

    /// Where a call is under way the device stays until that has ended; calls that come later fail, and it is let go once.
    #[test]
    fn a_device_that_leaves_stays_until_calls_have_ended() {
        use braidfs_device::{Effect, FaultDevice, Op, Rule};
        use std::thread;
        use std::time::Duration;
        let g = Geometry::new(1024, 3).unwrap();
        let m = Members::new();
        let device = Arc::new(FaultDevice::new(Arc::new(MemDevice::new(4096)), 1));
        assert!(m.add(device.clone(), &entry(0), g));
        let seat = Arc::clone(&m.seat(0).device);
        device.add(Rule::new(Op::Read, Effect::Stall));
        thread::scope(|s| {
            let reads: Vec<_> = (0..3).map(|_| s.spawn(|| seat.read(7, &mut [0; BLOCK_BYTES]))).collect();
            while device.stalled() < 3 {
                thread::yield_now();
            }
            let leaves = s.spawn(|| m.remove_last());
            while m.len() > 0 {
                thread::yield_now();
            }
            let late = s.spawn(|| seat.write(7, &[1; BLOCK_BYTES]));
            thread::sleep(Duration::from_millis(50));
            assert!(!leaves.is_finished(), "it left beside a read");
            assert!(Arc::strong_count(&device) > 1);
            device.clear();
            reads.into_iter().for_each(|r| r.join().unwrap().unwrap());
            leaves.join().unwrap();
            // it came before the doors were closed, or after
            _ = late.join().unwrap();
        });
        assert!(seat.write(7, &[1; BLOCK_BYTES]).is_err());
        assert_eq!(Arc::strong_count(&device), 1, "it was let go");
    }
}
