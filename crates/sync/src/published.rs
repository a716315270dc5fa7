//! What each thread reads right now, on a cache line that only this thread writes.
//!
//! A reader that would count itself in a shared word pays a transfer of its line for each other reader. Here it puts the
//! address of what it reads on its own line, and looks after that whether it may (a visible reader, as in BRAVO: Dice and
//! Kogan, USENIX ATC 2019, section 3; for objects that may be freed, a hazard pointer: Michael, IEEE TPDS 2004, section 3).
//! Who wants to change or to free the object takes the permission away first, and then looks at all lines.
//!
//! Either of the two sees the other: the reader's store comes before its look, the other's store before its look, and
//! between them each has a full fence. On the reader's side the store is an exchange, which costs no more than the locked
//! count that it replaces, so that private objects never pay for shared ones. Only what one thread reads all the time it reads
//! with a plain store, and who wants to change that makes both fences ([`crate::membarrier`]).
//!
//! Lines stay for ever and go from threads that end to new ones: there are as many as there were threads at once.

#[cfg(not(loom))]
use std::sync::atomic::{AtomicUsize, fence};

use crate::bias::Readers;
use crate::membarrier;
#[cfg(loom)]
use crate::one_order::{AtomicUsize, fence};
use crate::pins::{Table, Uses};
use std::cell::Cell;
use std::sync::OnceLock;
use std::sync::atomic::{
    AtomicBool, AtomicPtr,
    Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst},
};

/// So many things a thread reads at once at most; for more it has to count itself.
const PLACES: usize = 8;

/// Address of what is read; 0 where nothing is.
#[derive(Debug)]
pub struct Place(AtomicUsize);

impl Place {
    /// It is read no more.
    #[inline(always)]
    pub fn clear(&self) {
        self.0.store(0, Release);
    }
}

/// The places of one thread.
#[derive(Debug)]
#[repr(align(128))]
pub struct Line {
    places: [Place; PLACES],
    uses: Uses,
}

impl Line {
    pub(crate) fn new() -> Self {
        Self { places: std::array::from_fn(|_| Place(AtomicUsize::new(0))), uses: Uses::default() }
    }
    /// Only by the line's thread. `None` where no place is free. What the caller loads after this it loads after all others
    /// can see the place.
    #[inline(always)]
    pub(crate) fn publish(&self, address: usize) -> Option<&Place> {
        let place = self.free_place()?;
        if cfg!(all(target_arch = "x86_64", not(loom))) {
            // a locked instruction is the fence
            place.0.swap(address, SeqCst);
        } else {
            // Release: who finds this here synchronises with what the place said before, too
            place.0.store(address, Release);
            fence(SeqCst);
        }
        Some(place)
    }
    /// [`Self::publish`] with half of the fence: others see the place who have made one in all threads
    /// ([`membarrier::in_all_threads`]) since.
    #[inline(always)]
    pub(crate) fn publish_without_fence(&self, address: usize) -> Option<&Place> {
        let place = self.free_place()?;
        place.0.store(address, Release);
        membarrier::light();
        Some(place)
    }
    #[inline(always)]
    fn free_place(&self) -> Option<&Place> {
        self.places.iter().find(|p| p.0.load(Relaxed) == 0)
    }
    /// Whether its thread reads what is there. By who has called [`before_looking`] after taking the permission away.
    pub(crate) fn has(&self, address: usize) -> bool {
        self.places.iter().any(|p| p.0.load(Acquire) == address)
    }
    fn all(&self) -> impl Iterator<Item = usize> {
        self.places.iter().map(|p| p.0.load(Acquire)).filter(|a| *a != 0)
    }
}

/// Between taking the permission to read away and a look at the lines.
pub(crate) fn before_looking() {
    fence(SeqCst);
}

/// A line and whose it is.
struct Slot {
    line: Line,
    pins: OnceLock<Box<Table>>,
    number: u32,
    taken: AtomicBool,
    next: Option<&'static Slot>,
}

static LAST: AtomicPtr<Slot> = AtomicPtr::new(std::ptr::null_mut());

thread_local! {
    static MINE: Cell<Option<&'static Slot>> = const { Cell::new(None) };
    /// Its number; 0 where there is none yet.
    static NUMBER: Cell<u32> = const { Cell::new(0) };
    /// Gives the slot back when the thread ends.
    static RETURN_SLOT: ReturnSlot = const { ReturnSlot };
}

struct ReturnSlot;

impl Drop for ReturnSlot {
    fn drop(&mut self) {
        NUMBER.set(0);
        if let Some(slot) = MINE.take() {
            // who forgot a guard has left a place that will never be cleared: the rest of the line is as good as before
            slot.taken.store(false, Release);
        }
    }
}

fn slots() -> impl Iterator<Item = &'static Slot> {
    // SAFETY: null, or a slot that `register` has leaked and nobody changes but for its atomics.
    let last = unsafe { LAST.load(Acquire).as_ref() };
    std::iter::successors(last, |s| s.next)
}

/// This thread's slot; `None` while the thread ends.
#[inline(always)]
fn mine() -> Option<&'static Slot> {
    MINE.get().or_else(register)
}

#[cold]
#[inline(never)]
fn register() -> Option<&'static Slot> {
    RETURN_SLOT.try_with(|_| ()).ok()?;
    let free =
        slots().find(|s| !s.taken.load(Relaxed) && s.taken.compare_exchange(false, true, Acquire, Relaxed).is_ok());
    let slot = free.unwrap_or_else(|| {
        let mut last = LAST.load(Acquire);
        loop {
            // SAFETY: as in `slots`.
            let next = unsafe { last.as_ref() };
            let number = next.map_or(1, |s| s.number + 1);
            let slot = Box::into_raw(Box::new(Slot {
                line: Line::new(),
                pins: OnceLock::new(),
                number,
                taken: AtomicBool::new(true),
                next,
            }));
            match LAST.compare_exchange(last, slot, AcqRel, Acquire) {
                // SAFETY: leaked just now, shared from here on and never freed.
                Ok(_) => break unsafe { &*slot },
                Err(now) => {
                    // SAFETY: nobody else has seen it.
                    drop(unsafe { Box::from_raw(slot) });
                    last = now;
                }
            }
        }
    });
    MINE.set(Some(slot));
    NUMBER.set(slot.number);
    seen_before_what_follows();
    Some(slot)
}

/// After this thread has put something into what others search: who searches, with a fence of its own after it has taken a
/// permission away, finds it there, or this thread sees from here on that the permission is gone. The fence of [`Line::publish`] is
/// not enough: on some processors it is the exchange alone, which orders nothing that was written before in the memory model.
fn seen_before_what_follows() {
    std::sync::atomic::fence(SeqCst);
}

/// Puts the address of what this thread reads on its line; `None` where there is no room. The caller then looks whether it
/// may read.
#[inline(always)]
pub fn publish(address: usize) -> Option<&'static Place> {
    mine()?.line.publish(address)
}

/// [`publish`] by a thread that alone has the permission to read without a fence; others look by [`is_published_by`] or
/// [`wait_until_unread`], and know of it.
#[inline(always)]
pub(crate) fn publish_without_fence(address: usize) -> Option<&'static Place> {
    mine()?.line.publish_without_fence(address)
}

/// The lines of threads that may be among these readers, who see or are seen from here on.
fn lines_of(readers: Readers) -> impl Iterator<Item = &'static Line> {
    readers.before_looking();
    slots().filter(move |s| readers.may_be(s.number)).map(|s| &s.line)
}

/// Whether one of these readers reads what is at this address. The caller has taken away their permission to read, by a store.
pub(crate) fn is_published_by(readers: Readers, address: usize) -> bool {
    lines_of(readers).any(|l| l.has(address))
}

/// Whether some thread reads what is at this address, with a fence as in [`publish`]. The caller has taken away the permission to
/// read, by a store.
pub fn is_published(address: usize) -> bool {
    is_published_by(Readers::FENCED, address)
}

/// All addresses that threads read. The caller has taken away the permission to read what it asks for, by stores.
pub fn all() -> Vec<usize> {
    before_looking();
    slots().flat_map(|s| s.line.all()).collect()
}

/// Waits until none of these readers reads what is at this address. The caller has taken away their permission to read, by a store.
pub(crate) fn wait_until_unread(readers: Readers, address: usize) {
    for line in lines_of(readers) {
        let mut turns = 0;
        while line.has(address) {
            wait(&mut turns);
        }
    }
}

fn wait(turns: &mut u32) {
    // most readers copy a page; some wait for a device
    const SPINS: u32 = 128;
    *turns += 1;
    if *turns < SPINS && !crate::locks::waits_by_turns() {
        std::hint::spin_loop();
    } else {
        crate::give_way(turns.saturating_sub(SPINS));
    }
}

/// A small number that tells this thread from others that run now; 0 while it ends.
#[inline(always)]
pub fn reader_number() -> u32 {
    let n = NUMBER.get();
    if n != 0 { n } else { register().map_or(0, |s| s.number) }
}

/// This thread's table of pins, made where it has none; `None` while the thread ends.
#[inline(always)]
pub(crate) fn own_table(make: impl FnOnce() -> Table) -> Option<&'static Table> {
    let slot = mine()?;
    match slot.pins.get() {
        Some(table) => Some(table),
        None => Some(make_table(slot, make)),
    }
}

#[cold]
#[inline(never)]
fn make_table(slot: &'static Slot, make: impl FnOnce() -> Table) -> &'static Table {
    let table = slot.pins.get_or_init(|| Box::new(make()));
    seen_before_what_follows();
    table
}

/// All threads' tables of pins.
pub(crate) fn tables() -> impl Iterator<Item = &'static Table> {
    slots().filter_map(|s| s.pins.get().map(|t| &**t))
}

#[inline(always)]
pub(crate) fn with_uses(f: impl FnOnce(&Uses)) {
    if let Some(slot) = mine() {
        f(&slot.line.uses);
    }
}

/// How many lines a search looks at.
pub fn lines() -> u32 {
    // SAFETY: as in `slots`.
    unsafe { LAST.load(Acquire).as_ref() }.map_or(0, |s| s.number)
}
