//! Who is inside, counted per slot: what [`crate::PassLock`] is made of, without what it guards.
//!
//! A reader counts itself in on its slot's line and then looks whether the doors are closed. A writer closes them and then
//! looks at all slots. Each writes first and reads then, in one order of all four ([`SeqCst`]): either the reader sees that
//! they are closed, or the writer sees the reader.
//!
//! The count is changed by one locked instruction, which is that order on all processors; so threads may share a slot, and
//! no system call is needed. (With a plain store per thread the writer would have to ask the kernel for a barrier in all
//! threads, membarrier(2), and there would have to be a way without where that is denied; the store would still be one
//! write to the same line.)

#[cfg(loom)]
use crate::one_order::{AtomicBool, AtomicUsize};
use crate::slots::{Line, PerSlot};
#[cfg(loom)]
use crate::{
    rank::Unranked,
    rounds::loomed::{self, Condvar},
};
#[cfg(not(loom))]
use parking_lot::{Condvar, Mutex};
use std::sync::atomic::Ordering::{Acquire, Release, SeqCst};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicBool, AtomicUsize};

#[cfg(loom)]
type Mutex<T> = loomed::Mutex<T, Unranked>;

#[derive(Debug)]
pub(crate) struct Doors {
    inside: PerSlot<AtomicUsize>,
    /// Read by all, written by writers only.
    closed: Line<AtomicBool>,
    /// Whether a scheduler of tests may stop threads at them.
    #[cfg(feature = "schedule")]
    scheduled: bool,
}

impl Doors {
    pub fn new(slots: usize) -> Self {
        Self {
            inside: PerSlot::with(slots, |_| AtomicUsize::new(0)),
            closed: Line(AtomicBool::new(false)),
            #[cfg(feature = "schedule")]
            scheduled: true,
        }
    }
    /// No scheduler of tests knows them.
    pub fn unscheduled(self) -> Self {
        Self {
            #[cfg(feature = "schedule")]
            scheduled: false,
            ..self
        }
    }
    /// Where a scheduler of tests stops threads that come.
    #[inline(always)]
    pub fn point(&self) {
        #[cfg(feature = "schedule")]
        if self.scheduled {
            crate::schedule::point();
        }
    }
    /// This thread's slot.
    #[inline(always)]
    pub fn slot(&self) -> usize {
        self.inside.slot()
    }
    /// Goes in; false where the doors are closed: the caller must [`Self::leave`] and wait.
    #[inline(always)]
    pub fn enter(&self, slot: usize) -> bool {
        self.inside.part(slot).fetch_add(1, SeqCst);
        #[cfg(feature = "schedule")]
        self.let_others_go_on(slot);
        !self.closed.load(SeqCst)
    }
    /// Between the two steps of [`Self::enter`].
    #[cfg(feature = "schedule")]
    fn let_others_go_on(&self, slot: usize) {
        struct Undo<'a>(&'a AtomicUsize);
        impl Drop for Undo<'_> {
            fn drop(&mut self) {
                self.0.fetch_sub(1, SeqCst);
            }
        }
        // it panics where another thread has
        let undo = Undo(self.inside.part(slot));
        self.point();
        std::mem::forget(undo);
    }
    /// Goes out. Whether a writer may wait for it.
    #[inline(always)]
    pub fn leave(&self, slot: usize) -> bool {
        // what was done inside comes before a writer's look
        self.inside.part(slot).fetch_sub(1, SeqCst);
        self.closed.load(SeqCst)
    }
    pub fn is_closed(&self) -> bool {
        self.closed.load(Acquire)
    }
    /// Lets nobody in from now on, one writer at a time; those who are inside leave by and by ([`Self::first_inside`]).
    pub fn close(&self) {
        self.closed.store(true, SeqCst);
        #[cfg(feature = "schedule")]
        crate::schedule::point();
    }
    /// Whether nobody is inside by a slot from `first` on; where somebody is, of which.
    pub fn first_inside(&self, first: usize) -> Option<usize> {
        (first..self.inside.parts()).find(|&slot| self.inside.part(slot).load(SeqCst) != 0)
    }
    /// What the writer did comes before what is done inside.
    pub fn open(&self) {
        self.closed.store(false, Release);
    }
}

/// Where a writer sleeps until who is inside has left.
pub(crate) struct Waiting {
    sleep: Mutex<()>,
    left: Condvar,
}

impl Waiting {
    pub fn new() -> Self {
        Self { sleep: Mutex::new(()), left: Condvar::default() }
    }
    /// Sleeps where somebody is inside, by the doors, which the caller has closed; until one that leaves wakes it.
    pub fn sleep_if(&self, inside: impl FnOnce() -> bool) {
        let mut sleep = self.sleep.lock();
        // who leaves after this look sees that the doors are closed, and wakes
        if inside() {
            self.left.wait(&mut sleep);
        }
    }
    /// By who has left and saw that the doors are closed ([`Doors::leave`]).
    pub fn wake(&self) {
        // not between the writer's look and its sleep
        drop(self.sleep.lock());
        self.left.notify_one();
    }
}

#[cfg(all(test, loom))]
mod models {
    use super::*;
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;

    struct Guarded {
        doors: Doors,
        value: UnsafeCell<u32>,
    }

    // SAFETY: what is tested: the doors keep a writer of the value from all others, which loom checks.
    unsafe impl Sync for Guarded {}

    /// One attempt, not a loop, which would have no end in a model.
    fn read(g: &Guarded, slot: usize) -> u32 {
        // SAFETY: loom checks it.
        let value = if g.doors.enter(slot) { g.value.with(|v| unsafe { *v }) } else { 0 };
        g.doors.leave(slot);
        value
    }

    fn write(g: &Guarded, first: usize) {
        g.doors.close();
        let mut slot = first;
        while let Some(taken) = g.doors.first_inside(slot) {
            slot = taken;
            loom::thread::yield_now();
        }
        // SAFETY: loom checks it.
        g.value.with_mut(|v| unsafe { *v += 1 });
        g.doors.open();
    }

    /// Two readers, of two slots or of one, and a writer that looks at slots from `first` on.
    fn model(slots: [usize; 2], first: usize) {
        // with more the search takes hours; the bugs of such protocols need two
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(2);
        model.check(move || {
            let g = Arc::new(Guarded { doors: Doors::new(2), value: UnsafeCell::new(0) });
            let readers = slots.map(|slot| {
                let g = g.clone();
                loom::thread::spawn(move || read(&g, slot))
            });
            write(&g, first);
            readers.into_iter().for_each(|r| assert!(r.join().unwrap() <= 1));
        });
    }

    #[test]
    fn a_writer_is_alone() {
        model([0, 1], 0);
        model([1, 1], 0);
    }

    #[test]
    #[should_panic]
    fn a_writer_that_misses_a_slot_is_seen() {
        model([0, 1], 1);
    }

    /// Readers, of two slots or of one, and a writer that sleeps until they have left; loom tells of one that sleeps for ever.
    /// (So it does where [`Waiting::wake`] does not wait for the lock, by ending the process: no test can expect that.)
    fn sleep(slots: [usize; 2]) {
        let mut model = loom::model::Builder::new();
        // into the gate, back to the writer, and out between its look and its sleep
        model.preemption_bound = Some(3);
        model.check(move || {
            let lock = Arc::new((Guarded { doors: Doors::new(2), value: UnsafeCell::new(0) }, Waiting::new()));
            let readers = slots.map(|slot| {
                let lock = lock.clone();
                loom::thread::spawn(move || {
                    let (g, waiting) = &*lock;
                    if g.doors.enter(slot) {
                        // SAFETY: loom checks it.
                        g.value.with(|v| assert_eq!(unsafe { *v }, 0));
                    }
                    if g.doors.leave(slot) {
                        waiting.wake();
                    }
                })
            });
            let (g, waiting) = &*lock;
            g.doors.close();
            let mut slot = 0;
            while let Some(taken) = g.doors.first_inside(slot) {
                slot = taken;
                waiting.sleep_if(|| g.doors.first_inside(slot).is_some());
            }
            // SAFETY: loom checks it.
            g.value.with_mut(|v| unsafe { *v += 1 });
            // the doors stay closed
            readers.into_iter().for_each(|r| r.join().unwrap());
        });
    }

    #[test]
    fn a_writer_that_sleeps_is_woken() {
        sleep([0, 1]);
        sleep([1, 1]);
    }
}
