//! Sharing of flushes, and the memory of a failed one.
//!
//! Invariants: one flush runs at a time; a caller returns `Ok` only where no write has returned that is not durable, or
//! after a flush that *started* after the call and succeeded; after a failure no call returns `Ok` for a flush that had not
//! succeeded before it. Who waits for a flush that others run is woken once, when it has ended; one of those whose flush
//! comes next is woken to run it.

use crate::{Device, WriteOp};
use braidfs_sync::device::Mutex;
use braidfs_sync::{Condvar, rank};
use std::io;
use std::sync::atomic::{AtomicU8, Ordering::SeqCst};
use std::sync::{Arc, OnceLock};

#[derive(Debug, Default)]
struct State {
    /// Flushes started so far, all of them one after the other.
    started: u64,
    /// The newest flush that succeeded.
    done: u64,
    running: bool,
}

/// Nothing was written that is not durable.
const CLEAN: u8 = 0;
/// Something was, since the last flush began.
const WRITTEN: u8 = 1;
/// Something was, and nothing since a flush began that has not succeeded yet.
const FLUSHING: u8 = 2;

/// `io::Error` is not `Clone`; this is what later callers get of it.
#[derive(Debug, Clone)]
struct Failure {
    errno: Option<i32>,
    kind: io::ErrorKind,
    text: String,
}

impl Failure {
    fn of(e: &io::Error) -> Self {
        Self { errno: e.raw_os_error(), kind: e.kind(), text: e.to_string() }
    }

    fn error(&self) -> io::Error {
        match self.errno {
            Some(errno) => io::Error::from_raw_os_error(errno),
            None => io::Error::new(self.kind, self.text.clone()),
        }
    }
}

/// Lets concurrent flushes of one device share the work.
#[derive(Debug)]
pub(crate) struct FlushGate {
    state: Mutex<State, rank::Flush>,
    /// Boxed, so that all that a flush writes lies on one cache line.
    failed: OnceLock<Box<Failure>>,
    /// Waiting for flush `n`, at `n % 2`: at most two have waiters, the one that runs and the next.
    ended: [Condvar; 2],
    /// Of the device's cache: [`CLEAN`], [`WRITTEN`] or [`FLUSHING`]. Who writes, or flushes what is durable, mostly reads it
    /// only.
    cache: AtomicU8,
}

impl Default for FlushGate {
    /// Of a device whose cache may hold what another process wrote.
    fn default() -> Self {
        Self {
            state: Mutex::default(),
            failed: OnceLock::new(),
            ended: Default::default(),
            cache: AtomicU8::new(WRITTEN),
        }
    }
}

impl FlushGate {
    /// A write, or a discard, is about to return that only a flush makes durable.
    pub(crate) fn wrote(&self) {
        // where it is `WRITTEN` still, every flush that could end that begins later, and takes this write along
        if self.cache.load(SeqCst) != WRITTEN {
            self.cache.store(WRITTEN, SeqCst);
        }
    }

    /// Whether all writes that have returned are durable.
    pub(crate) fn is_clean(&self) -> bool {
        self.cache.load(SeqCst) == CLEAN
    }

    /// A flush failed, or a write past the device's cache by its flush.
    pub(crate) fn fail(&self, e: &io::Error) {
        self.failed.get_or_init(|| Box::new(Failure::of(e)));
    }

    /// Makes all writes that returned before this call durable by `sync`, run here or by another caller.
    pub(crate) fn flush(&self, sync: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        if self.is_clean() && self.failed.get().is_none() {
            return Ok(());
        }
        let mut state = self.state.lock();
        // A flush that runs already may have passed our writes by: the next one is ours.
        let wanted = state.started + u64::from(!takes_one_under_way(&state));
        while state.done < wanted {
            if let Some(failed) = self.failed.get() {
                return Err(failed.error());
            }
            if state.running {
                self.ended(wanted).wait(&mut state);
                continue;
            }
            state.running = true;
            state.started += 1;
            let mine = state.started;
            drop(state);
            self.cache.store(FLUSHING, SeqCst);
            let panics = Panics { gate: self, flush: mine };
            let result = sync();
            std::mem::forget(panics);
            return self.end(mine, result);
        }
        Ok(())
    }

    /// Flush `flush` has ended: who waits is told, and who waits for the next one runs it.
    fn end(&self, flush: u64, mut result: io::Result<()>) -> io::Result<()> {
        let mut state = self.state.lock();
        state.running = false;
        // what a write past the cache found meanwhile: whether this flush covers all is not known
        if let (Some(failed), Ok(())) = (self.failed.get(), &result) {
            result = Err(failed.error());
        }
        match &result {
            Ok(()) => {
                state.done = flush;
                // not where something has been written since
                let _ = self.cache.compare_exchange(FLUSHING, CLEAN, SeqCst, SeqCst);
            }
            Err(e) => self.fail(e),
        }
        self.ended(flush).notify_all();
        if self.failed.get().is_some() {
            self.ended(flush + 1).notify_all();
        } else {
            // it runs the next one; whoever came meanwhile and began that already lets it wait for its end
            self.ended(flush + 1).notify_one();
        }
        result
    }

    fn ended(&self, flush: u64) -> &Condvar {
        &self.ended[(flush % 2) as usize]
    }
}

/// A flush under way; dropped by a panic of the device's it fails: who waits for it, or comes later, is told.
struct Panics<'a> {
    gate: &'a FlushGate,
    flush: u64,
}

impl Drop for Panics<'_> {
    fn drop(&mut self) {
        let _ = self.gate.end(self.flush, Err(io::Error::other("a flush of the device panicked")));
    }
}

/// With the planted bug: whether a caller takes a flush for its own that began before it came.
#[inline(always)]
fn takes_one_under_way(state: &State) -> bool {
    #[cfg(feature = "planted-bugs")]
    return state.running && planted::UNDER_WAY.load(SeqCst);
    #[cfg(not(feature = "planted-bugs"))]
    {
        let _ = state;
        false
    }
}

/// A bug on purpose, for the crash tests to find.
#[cfg(feature = "planted-bugs")]
pub mod planted {
    use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

    pub(super) static UNDER_WAY: AtomicBool = AtomicBool::new(false);

    /// From now on who flushes takes a flush that others began before for its own, or not any more.
    pub fn take_flush_under_way(on: bool) {
        UNDER_WAY.store(on, SeqCst);
    }
}

/// A device whose concurrent flushes share the work, before one that runs each of them.
#[derive(Debug)]
pub struct SharedFlushes {
    inner: Arc<dyn Device>,
    gate: FlushGate,
}

impl SharedFlushes {
    /// `device`, or one before it that shares its flushes.
    pub fn of(device: Arc<dyn Device>) -> Arc<dyn Device> {
        if device.shares_flushes() { device } else { Arc::new(Self { inner: device, gate: FlushGate::default() }) }
    }
}

impl Device for SharedFlushes {
    fn blocks(&self) -> u64 {
        self.inner.blocks()
    }
    fn read(&self, block: u64, buf: &mut [u8]) -> io::Result<()> {
        self.inner.read(block, buf)
    }
    fn write_batch(&self, ops: &[WriteOp<'_>]) -> io::Result<()> {
        self.inner.write_batch(ops)
    }
    fn write_batch_through(&self, ops: &[WriteOp<'_>]) -> io::Result<()> {
        self.inner.write_batch_through(ops)
    }
    fn end_sync(&self) {
        self.inner.end_sync();
    }
    fn flush(&self) -> io::Result<()> {
        // whether there is anything to be flushed the device knows
        self.gate.wrote();
        self.gate.flush(|| self.inner.flush())
    }
    fn shares_flushes(&self) -> bool {
        true
    }
    fn discard(&self, block: u64, blocks: u64) -> io::Result<()> {
        self.inner.discard(block, blocks)
    }
    fn grown(&self) -> io::Result<u64> {
        self.inner.grown()
    }
    fn extend(&self, blocks: u64) -> io::Result<()> {
        self.inner.extend(blocks)
    }
    fn cut_off(&self, blocks: u64) -> io::Result<()> {
        self.inner.cut_off(blocks)
    }
    fn writable(&self) -> io::Result<Option<Arc<dyn Device>>> {
        self.inner.writable()
    }
    fn remote(&self) -> Option<&dyn crate::Remote> {
        self.inner.remote()
    }
    fn block_device(&self) -> Option<(u32, u32)> {
        self.inner.block_device()
    }
    fn name(&self) -> String {
        self.inner.name()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    #[test]
    fn concurrent_flushes_share_but_never_one_that_had_started() {
        let gate = FlushGate::default();
        let runs = AtomicU64::new(0);
        let (entered_tx, entered) = mpsc::channel();
        let (go, go_rx) = mpsc::channel::<()>();
        thread::scope(|s| {
            let (gate, runs) = (&gate, &runs);
            s.spawn(move || {
                gate.flush(|| {
                    entered_tx.send(()).unwrap();
                    go_rx.recv().unwrap();
                    runs.fetch_add(1, SeqCst);
                    Ok(())
                })
            });
            entered.recv().unwrap();
            // The first flush is under way: these eight may not use it, but share one among them.
            let waiters: Vec<_> = (0..8)
                .map(|_| {
                    s.spawn(|| {
                        gate.flush(|| {
                            runs.fetch_add(1, SeqCst);
                            Ok(())
                        })
                        .unwrap();
                        assert!(runs.load(SeqCst) >= 2, "used a flush that had started before");
                    })
                })
                .collect();
            thread::sleep(Duration::from_millis(200));
            assert_eq!(runs.load(SeqCst), 0);
            go.send(()).unwrap();
            for w in waiters {
                w.join().unwrap();
            }
        });
        assert_eq!(runs.load(SeqCst), 2);
        gate.flush(|| unreachable!("all is durable")).unwrap();
    }

    #[test]
    fn flushes_of_any_device_are_shared() {
        use crate::{Effect, FaultDevice, MemDevice, Op, Rule};
        let fault = Arc::new(FaultDevice::new(Arc::new(MemDevice::new(8)), 1));
        let device = SharedFlushes::of(fault.clone());
        assert!(!fault.shares_flushes() && Arc::ptr_eq(&device, &SharedFlushes::of(device.clone())));
        fault.add(Rule::new(Op::Flush, Effect::Stall));
        thread::scope(|s| {
            s.spawn(|| device.flush().unwrap());
            while fault.stalled() == 0 {
                thread::yield_now();
            }
            (0..8).for_each(|_| drop(s.spawn(|| device.flush().unwrap())));
            thread::sleep(Duration::from_millis(200));
            assert_eq!(fault.counters().flushes, 1, "the others wait");
            fault.clear();
        });
        assert_eq!(fault.counters().flushes, 2, "one for eight");
        device.flush().unwrap();
        assert_eq!(fault.counters().flushes, 3, "it may have something to flush");
    }

    #[test]
    fn what_is_durable_is_not_flushed_again() {
        let gate = FlushGate::default();
        let runs = AtomicU64::new(0);
        let flush = || {
            gate.flush(|| {
                runs.fetch_add(1, SeqCst);
                Ok(())
            })
        };
        flush().unwrap();
        assert_eq!(runs.load(SeqCst), 1, "the device's cache may hold what another process wrote");
        flush().unwrap();
        assert!(gate.is_clean());
        assert_eq!(runs.load(SeqCst), 1);
        gate.wrote();
        assert!(!gate.is_clean());
        flush().unwrap();
        assert_eq!(runs.load(SeqCst), 2);
        // a write that returns while a flush runs is not covered
        gate.wrote();
        gate.flush(|| {
            gate.wrote();
            Ok(())
        })
        .unwrap();
        assert!(!gate.is_clean());
        flush().unwrap();
        assert_eq!(runs.load(SeqCst), 3);
        gate.fail(&io::Error::from_raw_os_error(libc::EIO));
        assert!(gate.is_clean() && flush().is_err(), "a failure is told also where nothing is to be flushed");
    }

    #[test]
    fn a_flush_beside_a_failed_write_past_the_cache_fails() {
        let gate = FlushGate::default();
        let beside = || {
            gate.fail(&io::Error::from_raw_os_error(libc::EIO));
            Ok(())
        };
        assert_eq!(gate.flush(beside).unwrap_err().raw_os_error(), Some(libc::EIO));
        assert!(!gate.is_clean());
    }

    #[test]
    fn a_failure_is_for_good() {
        let gate = FlushGate::default();
        gate.flush(|| Ok(())).unwrap();
        gate.wrote();
        let e = gate.flush(|| Err(io::Error::from_raw_os_error(libc::EIO))).unwrap_err();
        assert_eq!(e.raw_os_error(), Some(libc::EIO));
        for _ in 0..3 {
            let e = gate.flush(|| unreachable!("the device is not asked again")).unwrap_err();
            assert_eq!(e.raw_os_error(), Some(libc::EIO));
        }
    }

    #[test]
    fn waiters_of_a_failed_flush_fail() {
        let gate = FlushGate::default();
        let (entered_tx, entered) = mpsc::channel();
        thread::scope(|s| {
            s.spawn(|| {
                gate.flush(|| {
                    entered_tx.send(()).unwrap();
                    thread::sleep(Duration::from_millis(50));
                    Err(io::Error::other("gone"))
                })
            });
            entered.recv().unwrap();
            assert_eq!(gate.flush(|| Ok(())).unwrap_err().to_string(), "gone");
        });
    }

    #[test]
    fn a_flush_that_panics_fails_and_keeps_nobody_waiting() {
        use std::panic::{AssertUnwindSafe, catch_unwind};
        let gate = FlushGate::default();
        let (entered_tx, entered) = mpsc::channel();
        let (go, go_rx) = mpsc::channel::<()>();
        let (tell, told) = mpsc::channel();
        // not in a scope: where they wait for ever this would, too
        let gate = Arc::new(gate);
        let flushed = gate.clone();
        let panics = thread::spawn(move || {
            let flush = || {
                entered_tx.send(()).unwrap();
                go_rx.recv().unwrap();
                panic!("on purpose")
            };
            catch_unwind(AssertUnwindSafe(|| flushed.flush(flush))).unwrap_err();
        });
        entered.recv().unwrap();
        for _ in 0..2 {
            let (gate, tell) = (gate.clone(), tell.clone());
            thread::spawn(move || tell.send(gate.flush(|| Ok(())).unwrap_err().to_string()).unwrap());
        }
        thread::sleep(Duration::from_millis(50));
        go.send(()).unwrap();
        for _ in 0..2 {
            let why = told.recv_timeout(Duration::from_secs(60)).expect("it waits for a flush that is over");
            assert!(why.contains("panicked"), "{why}");
        }
        panics.join().unwrap();
        gate.flush(|| unreachable!("the device is not asked again")).unwrap_err();
    }
}
