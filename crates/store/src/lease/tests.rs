//! What a holder does that was stopped, or whose server was slow, in the middle of a renewal.

use super::*;
use braidfs_device::{MemDevice, WriteOp};

const BLOCK: u64 = 7;
const VOLUME: u32 = 5;
const LEASE: Duration = Duration::from_secs(2);
const IO_TIMEOUT: Duration = Duration::from_secs(1);

/// What happens at one point of a renewal, once, while the thread is there.
type Happens = Box<dyn FnOnce(&MemDevice) + Send>;

/// Memory that other machines reach, so to say.
#[derive(Default)]
struct Elsewhere {
    memory: Option<MemDevice>,
    io_timeout: Duration,
    /// The answer to a read lies in the socket, and is not looked at.
    answered: Mutex<Option<Happens>>,
    /// A write is about to be submitted.
    submits: Mutex<Option<Happens>>,
    /// The connection breaks at the next write, which is not carried out yet.
    breaks: Mutex<bool>,
    /// What was submitted last.
    sent: Mutex<Option<Vec<u8>>>,
}

impl std::fmt::Debug for Elsewhere {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Elsewhere")
    }
}

impl Elsewhere {
    fn new(io_timeout: Duration) -> Arc<Self> {
        Arc::new(Self { memory: Some(MemDevice::new(64)), io_timeout, ..Self::default() })
    }

    fn memory(&self) -> &MemDevice {
        self.memory.as_ref().unwrap()
    }

    fn happens(&self, what: &Mutex<Option<Happens>>) {
        let what = what.lock().take();
        if let Some(what) = what {
            what(self.memory());
        }
    }
}

impl Device for Elsewhere {
    fn blocks(&self) -> u64 {
        self.memory().blocks()
    }
    fn read(&self, block: u64, buf: &mut [u8]) -> io::Result<()> {
        self.memory().read(block, buf)
    }
    fn write_batch(&self, ops: &[WriteOp<'_>]) -> io::Result<()> {
        self.memory().write_batch(ops)
    }
    fn flush(&self) -> io::Result<()> {
        Ok(())
    }
    fn discard(&self, _: u64, _: u64) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
    fn remote(&self) -> Option<&dyn Remote> {
        Some(self)
    }
    fn name(&self) -> String {
        "elsewhere".into()
    }
}

impl Remote for Elsewhere {
    fn lease(&self) -> Option<Duration> {
        Some(LEASE)
    }
    fn io_timeout(&self) -> Duration {
        self.io_timeout
    }
    fn set_fence(&self, _: Arc<Fence>) {}
    fn is_held(&self) -> bool {
        false
    }
    fn record_io(&self) -> Box<dyn RecordIo + '_> {
        Box::new(Io(self))
    }
}

struct Io<'a>(&'a Elsewhere);

impl RecordIo for Io<'_> {
    fn read_record(&mut self, block: u64, buf: &mut [u8]) -> io::Result<()> {
        self.0.read(block, buf)?;
        self.0.happens(&self.0.answered);
        Ok(())
    }
    fn write_record(&mut self, block: u64, buf: &[u8]) -> io::Result<()> {
        self.0.happens(&self.0.submits);
        *self.0.sent.lock() = Some(buf.to_vec());
        if std::mem::take(&mut *self.0.breaks.lock()) {
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        self.0.write(block, buf)
    }
}

/// A holder whose lease ends after `left`; nothing renews it but the test.
fn holder(device: &Arc<Elsewhere>, left: Duration) -> Owner {
    let owner = Owner::new(Arc::clone(device) as Arc<dyn Device>, BLOCK, VOLUME, LEASE).unwrap();
    owner.write(&mut Io(device), HELD).unwrap();
    owner.fence.extend(boot_time() + left);
    owner
}

/// The other machine takes the volume over, when it may.
fn taken_over(memory: &MemDevice) {
    std::thread::sleep(LEASE + IO_TIMEOUT);
    let mut r = OwnerRecord::empty();
    (r.nonce, r.state) = ([7; 16], HELD);
    memory.write(BLOCK, &r.to_block(VOLUME, BLOCK, 1)).unwrap();
}

fn is_the_others(device: &Elsewhere) -> bool {
    read(&mut Io(device), BLOCK, VOLUME).unwrap().is_some_and(|r| r.nonce == [7; 16])
}

#[test]
fn an_answer_from_before_the_stop_is_not_believed() {
    let device = Elsewhere::new(IO_TIMEOUT);
    let owner = holder(&device, LEASE);
    *device.answered.lock() = Some(Box::new(taken_over));
    let e = owner.renew(&mut Io(&device)).unwrap_err();
    assert_eq!(e.kind(), io::ErrorKind::PermissionDenied, "{e}");
    assert!(is_the_others(&device), "the other's record was written over");
    assert!(owner.fence.lost().is_some() && !owner.fence.is_open());
}

#[test]
fn nothing_passes_where_the_stop_was_before_the_write() {
    let device = Elsewhere::new(IO_TIMEOUT);
    let owner = holder(&device, LEASE);
    *device.submits.lock() = Some(Box::new(taken_over));
    let e = owner.renew(&mut Io(&device)).unwrap_err();
    assert_eq!(e.kind(), io::ErrorKind::PermissionDenied, "{e}");
    assert!(owner.fence.lost().is_some() && !owner.fence.is_open());
}

/// A server that is slow while the lease ends: whoever may take it later sees the new record.
#[test]
fn a_renewal_that_was_under_way_in_time_counts() {
    let device = Elsewhere::new(Duration::from_secs(60));
    let owner = holder(&device, LEASE);
    *device.submits.lock() = Some(Box::new(|_| std::thread::sleep(LEASE)));
    let before = boot_time();
    owner.renew(&mut Io(&device)).unwrap();
    assert!(owner.fence.lost().is_none() && owner.fence.deadline() >= before + LEASE);
    assert!(owner.fence.deadline() <= boot_time() + LEASE, "counted from behind the write");
}

/// Who found the volume free looks again where the answer is old: somebody else may have it by now.
#[test]
fn an_old_answer_takes_no_lease() {
    let device = Elsewhere::new(IO_TIMEOUT);
    let late = Owner::new(Arc::clone(&device) as Arc<dyn Device>, BLOCK, VOLUME, LEASE).unwrap();
    let other = Owner::new(Arc::clone(&device) as Arc<dyn Device>, BLOCK, VOLUME, LEASE).unwrap();
    let nonce = other.nonce;
    HELD_HERE.lock().push(nonce);
    let back = Arc::downgrade(&device);
    // the second look, behind which the record is written
    *device.answered.lock() = Some(Box::new(move |_| {
        let (device, again) = (back.upgrade().unwrap(), back.clone());
        *device.answered.lock() = Some(Box::new(move |_| {
            other.write(&mut Io(&again.upgrade().unwrap()), HELD).unwrap();
            std::thread::sleep(2 * WINDOW);
        }));
    }));
    assert!(matches!(late.acquire(), Err(Error::Held(_))));
    let left = read(&mut Io(&device), BLOCK, VOLUME).unwrap().unwrap();
    assert_eq!(left.nonce, nonce, "the record of who has the lease was written over");
    HELD_HERE.lock().retain(|n| *n != nonce);
}

/// Of a lease that has ended a slow look is no reason to give up: it is looked again.
#[test]
fn a_slow_look_at_a_lease_that_has_ended_is_repeated() {
    let device = Elsewhere::new(IO_TIMEOUT);
    let owner = holder(&device, Duration::ZERO);
    *device.answered.lock() = Some(Box::new(|_| std::thread::sleep(2 * WINDOW)));
    owner.renew(&mut Io(&device)).unwrap();
    assert!(owner.fence.lost().is_none() && owner.fence.is_open());
}

/// But a slow write is: somebody may have looked before it came.
#[test]
fn a_slow_write_of_a_lease_that_has_ended_loses_it() {
    let device = Elsewhere::new(IO_TIMEOUT);
    let owner = holder(&device, Duration::ZERO);
    *device.submits.lock() = Some(Box::new(|_| std::thread::sleep(2 * WINDOW)));
    assert!(owner.renew(&mut Io(&device)).is_err());
    assert!(owner.fence.lost().is_some() && !owner.fence.is_open());
}

/// Its connection broke before the answer to the record that gives the lease back: the device may have that, and another one the
/// lease, though it would last for long.
#[test]
fn what_is_given_back_is_not_taken_from_the_next_one() {
    let device = Elsewhere::new(IO_TIMEOUT);
    let owner = Arc::new(holder(&device, Duration::from_secs(60)));
    let (returning, back) = (Returning(Arc::downgrade(&owner)), Arc::downgrade(&device));
    let mut holder = Holder { owner: Arc::clone(&owner), renewing: None, winding: None };
    *device.submits.lock() = Some(Box::new(move |_| {
        let device = back.upgrade().unwrap();
        // it finds its own record, and the other one comes before it has written the next
        *device.answered.lock() = Some(Box::new(|memory| {
            std::thread::sleep(2 * WINDOW);
            let mut r = OwnerRecord::empty();
            (r.nonce, r.state) = ([7; 16], HELD);
            memory.write(BLOCK, &r.to_block(VOLUME, BLOCK, 1)).unwrap();
        }));
        returning.rejoin(&mut Io(&device)).unwrap_err();
        assert!(is_the_others(&device), "the other's record was written over");
        *device.breaks.lock() = true;
    }));
    holder.end(true);
    assert!(is_the_others(&device) && owner.fence.lost().is_some());
}

/// The server's disk is a snapshot of some renewals ago, with a record of ours.
#[test]
fn a_disk_from_before_a_confirmed_renewal_loses_the_lease() {
    let device = Elsewhere::new(IO_TIMEOUT);
    let owner = holder(&device, LEASE);
    let mut before = vec![0; BLOCK_BYTES];
    device.read(BLOCK, &mut before).unwrap();
    owner.renew(&mut Io(&device)).unwrap();
    owner.renew(&mut Io(&device)).unwrap();
    device.write(BLOCK, &before).unwrap();
    let e = owner.renew(&mut Io(&device)).unwrap_err();
    assert_eq!(e.kind(), io::ErrorKind::PermissionDenied, "{e}");
    assert!(e.to_string().contains("2 renewals of the lease ago"), "{e}");
    assert!(owner.fence.lost().is_some() && !owner.fence.is_open());
    let mut now = vec![0; BLOCK_BYTES];
    device.read(BLOCK, &mut now).unwrap();
    assert_eq!(now, before, "nothing was written to it");
}

/// Of writes that were under way together any may be the one that the device has in the end.
#[test]
fn writes_that_come_in_another_order_are_no_loss() {
    let [now, later] = [10, 20].map(Duration::from_secs);
    let mut n = Numbers::default();
    let (first, least) = n.begin(now);
    n.confirm(first, least);
    let (slow, least_slow) = n.begin(now);
    let (quick, least_quick) = n.begin(now);
    n.confirm(quick, least_quick);
    assert_eq!(n.confirmed, slow, "the slow one may have come behind it");
    n.confirm(slow, least_slow);
    assert_eq!(n.confirmed, slow);
    // one that failed may still come
    let (failed, _) = n.begin(now);
    n.fail(failed, later);
    assert_eq!(n.confirmed, slow);
    let (next, least) = n.begin(now);
    n.confirm(next, least);
    assert_eq!(n.confirmed, failed, "the one that failed may have come behind it");
    // until it is too late for it
    let (last, least) = n.begin(later);
    n.confirm(last, least);
    assert_eq!((n.confirmed, n.under_way.len()), (last, 1));
    // and one that was sent again may come twice
    let (twice, least_twice) = n.begin(later);
    n.broke(later + now);
    n.confirm(twice, least_twice);
    assert_eq!(n.confirmed, twice);
    let (next, least) = n.begin(later);
    n.confirm(next, least);
    assert_eq!(n.confirmed, twice, "the first of the two may have come behind it");
    let (last, least) = n.begin(later + now);
    n.confirm(last, least);
    assert_eq!(n.confirmed, last);
}

/// A server that carries out a renewal of a broken connection when the next one was confirmed: it has lost nothing.
#[test]
fn a_renewal_that_comes_late_is_no_loss() {
    let device = Elsewhere::new(IO_TIMEOUT);
    let owner = holder(&device, LEASE);
    *device.breaks.lock() = true;
    assert!(owner.renew(&mut Io(&device)).is_err());
    let late = device.sent.lock().take().unwrap();
    owner.renew(&mut Io(&device)).unwrap();
    owner.renew(&mut Io(&device)).unwrap();
    device.write(BLOCK, &late).unwrap();
    owner.renew(&mut Io(&device)).unwrap();
    assert!(owner.fence.lost().is_none() && owner.fence.is_open());
    // behind the time in which it may come, it is what a snapshot has
    std::thread::sleep(IO_TIMEOUT);
    owner.renew(&mut Io(&device)).unwrap();
    device.write(BLOCK, &late).unwrap();
    assert_eq!(owner.renew(&mut Io(&device)).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
}

/// What was sent again, since its connection broke before the answer, may come twice.
#[test]
fn a_renewal_that_comes_twice_is_no_loss() {
    let device = Elsewhere::new(IO_TIMEOUT);
    let owner = Arc::new(holder(&device, LEASE));
    let returning = Returning(Arc::downgrade(&owner));
    let back = Arc::downgrade(&device);
    // the next connection is there while it waits for its answer
    *device.submits.lock() = Some(Box::new(move |_| {
        let device = back.upgrade().unwrap();
        returning.rejoin(&mut Io(&device)).unwrap();
    }));
    owner.renew(&mut Io(&device)).unwrap();
    let twice = device.sent.lock().take().unwrap();
    owner.renew(&mut Io(&device)).unwrap();
    device.write(BLOCK, &twice).unwrap();
    owner.renew(&mut Io(&device)).unwrap();
    assert!(owner.fence.lost().is_none() && owner.fence.is_open());
}

/// A renewal whose connection broke ends behind that of the next connection, which was submitted later: that one's end counts.
#[test]
fn a_renewal_that_ends_late_does_not_shorten_the_lease() {
    let device = Elsewhere::new(IO_TIMEOUT);
    let owner = Arc::new(holder(&device, LEASE));
    let returning = Returning(Arc::downgrade(&owner));
    let back = Arc::downgrade(&device);
    let renewed = Arc::new(Mutex::new(Duration::ZERO));
    let end = Arc::clone(&renewed);
    *device.submits.lock() = Some(Box::new(move |_| {
        std::thread::sleep(LEASE / 4);
        *end.lock() = boot_time() + LEASE;
        returning.rejoin(&mut Io(&back.upgrade().unwrap())).unwrap();
    }));
    owner.renew(&mut Io(&device)).unwrap();
    assert!(owner.fence.deadline() >= *renewed.lock());
}

/// A mount does not wait for days where the record says so.
#[test]
fn no_longer_time_is_believed_than_a_uri_may_ask_for() {
    let mut r = OwnerRecord::empty();
    (r.lease_ms, r.io_ms) = (u32::MAX.into(), u32::MAX.into());
    assert_eq!((lease_of(&r), io_timeout_of(&r)), (TIME_MAX, TIME_MAX));
    r.lease_ms = 700.into();
    assert_eq!(lease_of(&r), Duration::from_millis(700));
}
