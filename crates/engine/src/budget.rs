//! How much a tenant may read and write in a second: token buckets for bytes and requests, reads and writes apart.
//!
//! **What is charged** is what the domain asks of the device, and what it is about to: a page of a file when a `write` makes
//! it dirty, in the thread that does; metadata, the journal and the home tables when they are written; what is read, when it
//! is read. A request is a run of blocks, each MiB of it that is begun one more. What memory serves costs nothing.
//!
//! **Who waits** is who begins something, before it enters a gate or locks anything: [`Turn`]. A commit, the cleaner or a
//! checkpoint never waits: what it writes is *debt*, which who comes next waits for. So the rate holds over time whoever
//! wrote, and nobody holds a lock that others want while he waits.
//!
//! **Each has a place.** Who comes takes what he is going to need at once, and with that a place on the line of all that was
//! ever charged (`charged`); time moves a second mark along that line at the limit's rate (`drained`), and he goes when it is
//! within a burst of his place. It is the virtual scheduling of the generic cell rate algorithm (ITU-T I.371), in units in
//! place of time, so that a limit may change while somebody waits. What he took and did not need he gives back: the mark
//! jumps.
//!
//! **Who pays** is whose domain it is, but where a domain empties a group for another one: then that one does ([`paid_by`]).
//!
//! All of it lies behind one lock of the domain, which nobody takes where there is no limit.
//!
//! **Processor time** of a front end's threads has a bucket of its own, in nanoseconds ([`serving`]): who comes takes what the
//! tenant's requests took lately on average, gives that back when he is done, and is charged what he took.

use crate::types::{Demand, Rate, Rates, Way};
use braidfs_format::domain::{DomainHeader, TenantRate};
use braidfs_sync::{Mutex, rank};
use crossbeam::utils::CachePadded;
use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

mod bucket;
mod serving;

use bucket::{Bucket, SECOND};
pub use serving::ServingUse;

/// A request has at most so many bytes.
const REQUEST_BYTES: u64 = 1 << 20;
/// What was paid for ahead is good for so long at least, and twice as long at most, ns: a kernel writes back what is older
/// than 30 s. What was overwritten in its cache before does not come, and must not be saved up.
const AHEAD_NS: u64 = 35 * SECOND;
/// One who waits looks so often whether the limit is another one.
const LOOK: Duration = Duration::from_millis(20);

/// Bytes and requests of each way, as [`Rates`] has them.
const BYTES: usize = 0;
const REQUESTS: usize = 1;

#[derive(Debug, Default)]
struct Meter {
    serving: serving::Meter,
    /// By way, then [`BYTES`], [`REQUESTS`].
    buckets: [[Bucket; 2]; 2],
    /// Bytes of writes that were paid before they come.
    ahead: Ahead,
    used: [[u64; 2]; 2],
    /// Who waited, and how long.
    waits: [u64; 2],
    waited: [Duration; 2],
}

/// What was paid ahead ([`Turn::pay_ahead`]): by age.
#[derive(Debug, Default)]
struct Ahead {
    young: u64,
    old: u64,
    /// When the old ones were young, ns.
    turned: u64,
}

impl Ahead {
    fn age(&mut self, now: u64) {
        let passed = now.saturating_sub(self.turned);
        if passed >= AHEAD_NS {
            self.old = if passed < 2 * AHEAD_NS { self.young } else { 0 };
            (self.young, self.turned) = (0, now);
        }
    }

    fn pay(&mut self, now: u64, n: u64) {
        self.age(now);
        self.young += n;
    }

    /// Of `n` those that were paid.
    fn take(&mut self, now: u64, n: u64) -> u64 {
        self.age(now);
        let old = n.min(self.old);
        let young = (n - old).min(self.young);
        (self.old, self.young) = (self.old - old, self.young - young);
        old + young
    }
}

/// What of the limits is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RateUse {
    /// Bytes charged since the mount, while there was a limit.
    pub bytes: u64,
    /// Requests charged since the mount, while there was a limit.
    pub requests: u64,
    /// Bytes and requests that are not paid yet.
    pub debt: [u64; 2],
    /// Calls that waited, and how long all of them did.
    pub waits: u64,
    /// How long the calls of `waits` waited, all together.
    pub waited: Duration,
}

/// See the module.
#[derive(Debug)]
pub struct Budget {
    on: AtomicBool,
    /// Processor time has a limit.
    timed: AtomicBool,
    /// Whether reads have a limit, and whether writes do.
    limited: [AtomicBool; 2],
    /// Since when [`Self::now`] counts; where tests do not say what time it is.
    begin: Instant,
    clock: Option<fn() -> Duration>,
    /// Of the thread; where tests do not say how long it ran.
    processor: Option<fn() -> Duration>,
    meter: CachePadded<Mutex<Meter, rank::Budget>>,
}

thread_local! {
    /// What this thread has paid for in advance: of which budget, which way, bytes and requests.
    static PAID: Cell<(usize, usize, [u64; 2])> = const { Cell::new((0, 0, [0; 2])) };
    static INSTEAD: RefCell<Option<Instead>> = const { RefCell::new(None) };
    /// Whether there is something in `INSTEAD`: to be asked each time something is charged.
    static IS_INSTEAD: Cell<bool> = const { Cell::new(false) };
}

/// What this thread charges `spared` for, whose domain does it, is charged to `payer`, or to nobody.
struct Instead {
    spared: Arc<Budget>,
    payer: Option<Arc<Budget>>,
}

/// Does something for another domain: what this thread charges `spared` for is charged to `payer`, or to nobody. What other threads
/// do of it (who helps a commit) is not.
pub fn paid_by<R>(spared: &Arc<Budget>, payer: Option<&Arc<Budget>>, does: impl FnOnce() -> R) -> R {
    /// Also where it panics, the next one pays for himself.
    struct Before(Option<Instead>);
    impl Drop for Before {
        fn drop(&mut self) {
            IS_INSTEAD.set(self.0.is_some());
            INSTEAD.replace(self.0.take());
        }
    }
    let _before = Before(INSTEAD.replace(Some(Instead { spared: spared.clone(), payer: payer.cloned() })));
    IS_INSTEAD.set(true);
    does()
}

impl Budget {
    /// With these limits; the clocks: of a test.
    pub fn new(
        rates: &Rates,
        serving: Option<Rate>,
        clock: Option<fn() -> Duration>,
        processor: Option<fn() -> Duration>,
    ) -> Arc<Self> {
        let new = Self {
            on: AtomicBool::new(false),
            timed: AtomicBool::new(false),
            limited: Default::default(),
            begin: Instant::now(),
            clock,
            processor,
            meter: CachePadded::default(),
        };
        new.set(rates, serving);
        Arc::new(new)
    }

    /// Whether what is asked of the device is limited.
    #[inline]
    pub fn is_on(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    /// Whether that way is.
    pub fn limits(&self, way: Way) -> bool {
        self.limited[way as usize].load(Ordering::Relaxed)
    }

    fn now(&self) -> u64 {
        let since = self.clock.map_or_else(|| self.begin.elapsed(), |clock| clock());
        u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
    }

    /// Other limits from now on, also for those who wait.
    pub fn set(&self, rates: &Rates, serving: Option<Rate>) {
        let now = self.now();
        let mut m = self.meter.lock();
        m.serving.limit(now, serving);
        self.timed.store(serving.is_some(), Ordering::Relaxed);
        for (way, limits) in [(Way::Read, rates.read()), (Way::Write, rates.write())] {
            self.limited[way as usize].store(limits != [None; 2], Ordering::Relaxed);
            for (bucket, limit) in m.buckets[way as usize].iter_mut().zip(limits) {
                bucket.limit(now, limit);
            }
        }
        let on = !rates.is_empty();
        if !on {
            m.ahead = Ahead::default();
        }
        self.on.store(on, Ordering::Relaxed);
    }

    /// The domain asks so much of the device, or will. Never waits.
    #[inline]
    pub fn charge(&self, way: Way, bytes: u64, requests: u64) {
        if self.may_charge() {
            self.charge_now(way, [bytes, requests]);
        }
    }

    /// Whether [`Self::charge`] counts anything: the device is limited for the domain, or another one may pay.
    #[inline]
    pub fn may_charge(&self) -> bool {
        self.is_on() || IS_INSTEAD.get()
    }

    /// [`Self::charge`] of a run of blocks that is read or written now.
    #[inline]
    pub fn charge_run(&self, way: Way, bytes: usize) {
        self.charge(way, bytes as u64, requests_of(bytes));
    }

    #[cold]
    fn charge_now(&self, way: Way, units: [u64; 2]) {
        self.with_payer(|payer| {
            if payer.is_on() {
                payer.take(way, units);
            }
        });
    }

    /// Does something with the budget that pays for what this thread does here, if any does: see [`paid_by`].
    fn with_payer(&self, charge: impl FnOnce(&Self)) {
        INSTEAD.with_borrow(|instead| match instead {
            Some(i) if i.spared.address() == self.address() => i.payer.as_deref().map_or((), charge),
            _ => charge(self),
        });
    }

    fn take(&self, way: Way, mut units: [u64; 2]) {
        let (whose, paid_way, mut paid) = PAID.get();
        let whole = units;
        if whose == self.address() && paid_way == way as usize {
            for (unit, paid) in units.iter_mut().zip(&mut paid) {
                let n = (*unit).min(*paid);
                (*unit, *paid) = (*unit - n, *paid - n);
            }
            PAID.set((whose, paid_way, paid));
        }
        let now = self.now();
        let mut m = self.meter.lock();
        for (used, n) in m.used[way as usize].iter_mut().zip(whole) {
            *used += n;
        }
        if way == Way::Write {
            units[BYTES] -= m.ahead.take(now, units[BYTES]);
        }
        for (bucket, n) in m.buckets[way as usize].iter_mut().zip(units) {
            bucket.take(now, n);
        }
    }

    fn address(&self) -> usize {
        std::ptr::from_ref(self) as usize
    }

    /// Somebody is about to do something that will need so much: he waits for his turn. `None` where the device is not limited.
    #[inline]
    pub fn come(self: &Arc<Self>, demand: Demand) -> Option<Turn> {
        self.is_on().then(|| Turn::new(self, demand, false))
    }

    /// [`Self::come`] of who has it served by a thread of a front end, whose time may be limited.
    #[inline]
    pub fn come_served(self: &Arc<Self>, demand: Demand) -> Option<Turn> {
        (self.is_on() || self.is_timed()).then(|| Turn::new(self, demand, true))
    }

    /// [`Self::come_served`] of who waits for the time only.
    #[inline]
    pub fn come_to_look(self: &Arc<Self>) -> Option<Turn> {
        self.is_timed().then(|| {
            let came = self.now();
            let (time, time_place) = self.meter.lock().serving.come(came);
            let (budget, way) = (self.clone(), Way::Read);
            Turn { budget, way, taken: [0; 2], ahead: 0, place: [0; 2], rated: false, time, time_place, came }
        })
    }

    /// Waits until the domain may do what is demanded. The caller holds no lock and is in no gate.
    #[inline]
    pub fn pace(self: &Arc<Self>, demand: Demand) -> Option<Paid> {
        self.come(demand).map(Turn::wait)
    }

    /// Takes what this thread has paid for, for who goes on with what it does.
    pub fn take_credit(self: &Arc<Self>) -> Option<Credit> {
        let (whose, way, units) = PAID.get();
        (whose == self.address()).then(|| {
            PAID.set((whose, way, [0; 2]));
            Credit { budget: self.clone(), way, units }
        })
    }

    /// Whether processor time is limited.
    #[inline]
    pub fn is_timed(&self) -> bool {
        self.timed.load(Ordering::Relaxed)
    }

    /// What of it was used.
    pub fn served(&self) -> ServingUse {
        let now = self.now();
        self.meter.lock().serving.used(now)
    }

    /// So much was spent on it, by a request or in the background.
    pub fn charge_time(&self, ns: u64, request: bool) {
        if ns > 0 && (self.is_timed() || IS_INSTEAD.get()) {
            self.with_payer(|payer| {
                if payer.is_timed() {
                    payer.take_time(ns, request);
                }
            });
        }
    }

    fn take_time(&self, ns: u64, request: bool) {
        let now = self.now();
        self.meter.lock().serving.charge(now, ns, request);
    }

    /// How long this thread has run, ns.
    pub fn ran(&self) -> u64 {
        let ran = self.processor.map_or_else(thread_time, |clock| clock());
        u64::try_from(ran.as_nanos()).unwrap_or(u64::MAX)
    }

    /// What was used of which way.
    pub fn used(&self, way: Way) -> RateUse {
        let now = self.now();
        let mut m = self.meter.lock();
        let way = way as usize;
        let [bytes, requests] = m.used[way];
        let debt = m.buckets[way].each_mut().map(|b| b.debt(now));
        RateUse { bytes, requests, debt, waits: m.waits[way], waited: m.waited[way] }
    }
}

/// What a thread had paid for and somebody else goes on with; given back when the value is dropped: what that cost has been
/// charged by then.
#[derive(Debug)]
pub struct Credit {
    budget: Arc<Budget>,
    way: usize,
    units: [u64; 2],
}

impl Drop for Credit {
    fn drop(&mut self) {
        let mut m = self.budget.meter.lock();
        for (bucket, n) in m.buckets[self.way].iter_mut().zip(self.units) {
            bucket.give_back(n);
        }
    }
}

fn thread_time() -> Duration {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(u64::try_from(t.tv_sec).unwrap_or(0), u32::try_from(t.tv_nsec).unwrap_or(0))
}

/// What a header says that its tenant may ask of the device.
pub fn rates(h: &DomainHeader) -> Rates {
    let rate = |r: TenantRate| {
        let burst = Some(r.burst.get()).filter(|n| *n > 0);
        Some(Rate { per_second: r.per_second.get(), burst }).filter(|r| r.per_second > 0)
    };
    let [read_bps, write_bps, read_iops, write_iops] = h.tenant_rates.map(rate);
    Rates { read_bps, write_bps, read_iops, write_iops }
}

/// What a header says that the server may spend on its tenant, ns of processor time in a second.
pub fn serving(h: &DomainHeader) -> Option<Rate> {
    let TenantRate { per_second, burst } = h.tenant_serving;
    let burst = Some(burst.get()).filter(|n| *n > 0);
    Some(Rate { per_second: per_second.get(), burst }).filter(|r| r.per_second > 0)
}

/// Requests that a run of so many bytes is.
pub fn requests_of(bytes: usize) -> u64 {
    (bytes as u64).div_ceil(REQUEST_BYTES)
}

/// A place in the line of those who want something of a domain with limits. Dropped, it is given up.
#[derive(Debug)]
pub struct Turn {
    budget: Arc<Budget>,
    way: Way,
    /// Bytes and requests.
    taken: [u64; 2],
    /// Bytes beside these that were paid ahead.
    ahead: u64,
    place: [u64; 2],
    /// The device is limited, so that a wait is one for it: also one that a change of the limit ends.
    rated: bool,
    /// Processor time that it takes as others did, ns, and its place for that; nothing where that has no limit.
    time: u64,
    time_place: u64,
    came: u64,
}

impl Turn {
    fn new(budget: &Arc<Budget>, demand: Demand, served: bool) -> Self {
        let (budget, way) = (budget.clone(), demand.way);
        let (mut taken, came) = ([demand.bytes, demand.requests], budget.now());
        let mut m = budget.meter.lock();
        let ahead = if demand.ahead { m.ahead.take(came, taken[BYTES]) } else { 0 };
        taken[BYTES] -= ahead;
        let [bytes, requests] = &mut m.buckets[way as usize];
        let place = [bytes.take(came, taken[BYTES]), requests.take(came, taken[REQUESTS])];
        let (time, time_place) = if served && budget.is_timed() { m.serving.come(came) } else { (0, 0) };
        drop(m);
        let rated = budget.is_on() && place != [0; 2];
        Self { budget, way, taken, ahead, place, rated, time, time_place, came }
    }

    /// How long it is until then, as things are; `None`: now.
    pub fn due(&self) -> Option<Duration> {
        let now = self.budget.now();
        let mut m = self.budget.meter.lock();
        let buckets = &mut m.buckets[self.way as usize];
        let wait = |i: usize, b: &mut Bucket| b.wait(now, self.place[i], self.taken[i]);
        let ns = buckets.iter_mut().enumerate().map(|(i, b)| wait(i, b)).max().unwrap_or(0);
        let ns = ns.max(m.serving.wait(now, self.time_place, self.time));
        (ns > 0).then(|| Duration::from_nanos(ns))
    }

    /// Waits for it.
    fn wait(self) -> Paid {
        while let Some(due) = self.due() {
            std::thread::sleep(due.min(LOOK));
        }
        self.go()
    }

    /// It has come: what this thread asks of the device until the value is dropped is paid, as far as it was demanded.
    pub fn go(self) -> Paid {
        self.count_wait();
        let [bytes, requests] = self.taken;
        let before = PAID.replace((self.budget.address(), self.way as usize, [bytes + self.ahead, requests]));
        Paid { turn: self, before, _of_this_thread: std::marker::PhantomData }
    }

    /// It has come: the bytes are paid for whoever writes them later, the kernel from its cache for instance.
    pub fn pay_ahead(mut self) {
        self.count_wait();
        let now = self.budget.now();
        self.budget.meter.lock().ahead.pay(now, self.taken[BYTES] + self.ahead);
        (self.taken[BYTES], self.ahead) = (0, 0);
    }

    fn count_wait(&self) {
        let now = self.budget.now();
        // a moment is no wait
        let waited = Duration::from_nanos(now.saturating_sub(self.came));
        if waited > Duration::from_micros(50) {
            let mut m = self.budget.meter.lock();
            if self.rated {
                m.waits[self.way as usize] += 1;
                m.waited[self.way as usize] += waited;
            }
            if self.time > 0 {
                m.serving.waited(waited);
            }
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if self.taken != [0; 2] || self.ahead > 0 || self.time > 0 {
            let now = self.budget.now();
            let mut m = self.budget.meter.lock();
            m.ahead.pay(now, self.ahead);
            m.serving.give_back(self.time);
            for (bucket, n) in m.buckets[self.way as usize].iter_mut().zip(self.taken) {
                bucket.give_back(n);
            }
        }
    }
}

/// What a thread does that waited for its [`Turn`]. Dropped, what it did not need is given back.
#[derive(Debug)]
pub struct Paid {
    turn: Turn,
    /// Of who called, on this thread.
    before: (usize, usize, [u64; 2]),
    _of_this_thread: std::marker::PhantomData<*const ()>,
}

impl Drop for Paid {
    fn drop(&mut self) {
        let (_, _, [bytes, requests]) = PAID.replace(self.before);
        let turn = &mut self.turn;
        // what was paid ahead is used last
        (turn.taken, turn.ahead) = ([bytes.saturating_sub(turn.ahead), requests], bytes.min(turn.ahead));
    }
}

#[cfg(test)]
mod tests;
