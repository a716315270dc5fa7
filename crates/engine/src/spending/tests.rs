//! Processor time on clocks of the tests.

use super::*;
use crate::budget::Turn;
use crate::types::{Demand, Rate, Rates};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

const SECOND: u64 = 1_000_000_000;
const MS: u64 = 1_000_000;

/// The time of day, and how long the thread has run; two clocks that the test moves.
struct Clocks {
    now: &'static AtomicU64,
    ran: &'static AtomicU64,
    read: [fn() -> Duration; 2],
}

macro_rules! clocks {
    () => {{
        static NOW: AtomicU64 = AtomicU64::new(7_000_000);
        static RAN: AtomicU64 = AtomicU64::new(3);
        let read: [fn() -> Duration; 2] = [
            || Duration::from_nanos(NOW.load(Ordering::Relaxed)),
            || Duration::from_nanos(RAN.load(Ordering::Relaxed)),
        ];
        Clocks { now: &NOW, ran: &RAN, read }
    }};
}

impl Clocks {
    fn budget(&self, per_second: u64, burst: Option<u64>) -> Arc<Budget> {
        let limit = (per_second > 0).then_some(Rate { per_second, burst });
        Budget::new(&Rates::default(), limit, Some(self.read[0]), Some(self.read[1]))
    }

    fn now(&self) -> u64 {
        self.now.load(Ordering::Relaxed)
    }

    /// The thread runs for so long.
    fn run(&self, ns: u64) {
        self.ran.fetch_add(ns, Ordering::Relaxed);
    }

    fn wait(&self, turn: &Turn) {
        while let Some(due) = turn.due() {
            self.now.fetch_add(u64::try_from(due.as_nanos()).unwrap(), Ordering::Relaxed);
        }
    }
}

fn used(b: &Budget) -> u64 {
    u64::try_from(b.served().used.as_nanos()).unwrap()
}

/// Requests of all lengths, some of them in a crowd, with work in the background: over ten seconds it is what is allowed, of a
/// part of a processor and of several.
#[test]
fn the_time_is_what_is_allowed() {
    let c = clocks!();
    for (percent, sizes, crowd, background) in [
        (50, 5_000..2 * MS, 1, 0),
        (1, 1_000..20_000, 1, 0),
        (150, 5_000..200_000, 64, 30 * MS),
        (400, 50_000..MS, 7, 100 * MS),
    ] {
        let limit = percent * SECOND / 100;
        let b = c.budget(limit, None);
        let (begin, mut random, mut debts) = (c.now(), fastrand::Rng::with_seed(percent), 0);
        let mut waiting: Vec<Turn> = Vec::new();
        while c.now() < begin + 10 * SECOND {
            while waiting.len() < crowd {
                waiting.push(b.come_served(Demand::read(4096)).unwrap());
            }
            let turn = waiting.remove(0);
            c.wait(&turn);
            let paid = turn.go();
            let spending = Spending::begin(&b, true);
            c.run(random.u64(sizes.clone()));
            drop((spending, paid));
            if background > 0 && c.now() - begin > debts * SECOND {
                debts += 1;
                let _commit = Spending::begin(&b, false);
                c.run(background);
            }
        }
        drop(waiting);
        let (is, may) = (used(&b), limit * 10);
        assert!(is.abs_diff(may) * 20 <= may, "{percent} %: {is}, not {may}");
        assert!(b.served().waits > 100, "{:?}", b.served());
    }
}

/// Who is not served by a front end's threads pays for nothing, and waits for nothing.
#[test]
fn who_calls_the_library_spends_his_own() {
    let c = clocks!();
    let b = c.budget(SECOND / 2, None);
    assert!(b.come(Demand::read(4096)).is_none() && b.pace(Demand::change()).is_none());
    let unlimited = c.budget(0, None);
    assert!(unlimited.come_served(Demand::read(4096)).is_none());
}

/// What a thread does for another domain in between, that one pays, if it has a limit.
#[test]
fn each_pays_for_its_own() {
    let c = clocks!();
    let (one, other, none) = (c.budget(SECOND, None), c.budget(SECOND, None), c.budget(0, None));
    let outer = Spending::begin(&one, false);
    c.run(100);
    {
        let _commit = Spending::begin(&other, false);
        c.run(20);
        {
            let _unlimited = Spending::begin(&none, false);
            c.run(3000);
        }
        c.run(5);
    }
    c.run(1);
    drop(outer);
    c.run(40_000);
    assert_eq!((used(&one), used(&other), used(&none)), (101, 25, 0));
    // what nobody pays for has ended: the next request begins anew
    drop(Spending::begin(&one, false));
    assert_eq!(used(&one), 101);
}

/// A commit in the background is waited for by who comes next; a burst is there after a pause.
#[test]
fn what_is_done_in_the_background_is_debt() {
    let c = clocks!();
    let b = c.budget(SECOND / 10, Some(10 * MS));
    let commit = Spending::begin(&b, false);
    c.run(110 * MS);
    drop(commit);
    assert_eq!(b.served().debt, Duration::from_millis(110));
    let turn = b.come_served(Demand::change()).unwrap();
    let due = turn.due().unwrap();
    // at 10 %, but for the burst
    assert!(due >= Duration::from_secs(1) && due < Duration::from_millis(1101), "{due:?}");
    drop(turn);
    c.now.fetch_add(60 * SECOND, Ordering::Relaxed);
    assert_eq!(b.served().debt, Duration::ZERO);
    let turns: Vec<Turn> = (0..1000).map(|_| b.come_served(Demand::change()).unwrap()).collect();
    let at_once = turns.iter().take_while(|t| t.due().is_none()).count() as u64;
    // as many as the burst is enough for, as what was done in the background is no measure of a request; then one after another
    assert_eq!(at_once, 10 * MS / 20_000);
    let (a, z) = (turns[at_once as usize + 10].due().unwrap(), turns[at_once as usize + 11].due().unwrap());
    assert_eq!(z - a, Duration::from_micros(200));
}

/// Another limit holds at once; without one nothing is charged any more.
#[test]
fn another_limit_holds_for_who_waits() {
    let c = clocks!();
    let b = c.budget(SECOND / 100, Some(1));
    let commit = Spending::begin(&b, false);
    c.run(50 * MS);
    drop(commit);
    let turn = b.come_served(Demand::change()).unwrap();
    let before = turn.due().unwrap();
    b.set(&Rates::default(), Some(Rate { per_second: SECOND / 10, burst: Some(1) }));
    assert_eq!(turn.due().unwrap().as_nanos() / 1000, before.as_nanos() / 10_000);
    b.set(&Rates::default(), None);
    assert_eq!(turn.due(), None);
    let spending = Spending::begin(&b, false);
    c.run(7 * MS);
    drop(spending);
    assert_eq!(used(&b), 50 * MS);
}
