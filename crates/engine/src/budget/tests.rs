//! Token buckets on a clock of the tests.

use super::*;
use std::sync::atomic::AtomicU64;

const MS: u64 = 1_000_000;

fn rate(per_second: u64, burst: Option<u64>) -> Option<Rate> {
    Some(Rate { per_second, burst })
}

/// Moves the clock on until the turn has come; how long that was, ns.
fn wait(clock: &AtomicU64, turn: &Turn) -> u64 {
    let before = clock.load(Ordering::Relaxed);
    while let Some(due) = turn.due() {
        clock.fetch_add(u64::try_from(due.as_nanos()).unwrap(), Ordering::Relaxed);
    }
    clock.load(Ordering::Relaxed) - before
}

macro_rules! clock {
    () => {{
        static NOW: AtomicU64 = AtomicU64::new(7_000_000);
        (&NOW, || Duration::from_nanos(NOW.load(Ordering::Relaxed)))
    }};
}

/// Pieces of all sizes, at rates from a trickle to more than a device does, by one and by many who come at once.
#[test]
fn the_rate_holds() {
    for (per_second, burst, sizes, at_once) in [
        (100 << 20, None, [4096, 1 << 20], 1),
        (100 << 20, Some(1), [4096, 1 << 20], 64),
        (333_333_333, Some(20 << 20), [1, 70_000], 3),
        (10 << 30, None, [1 << 16, 1 << 16], 1),
        (64 << 10, None, [512, 4096], 5),
    ] {
        let mut bucket = Bucket::default();
        bucket.limit(5, rate(per_second, burst));
        let burst = rate(per_second, burst).unwrap().burst();
        let (mut random, mut now, mut done, mut waiting) = (fastrand::Rng::with_seed(7), 5, 0u64, Vec::new());
        while now < 5 + 10 * SECOND {
            while waiting.len() < at_once {
                let n = random.u64(sizes[0]..=sizes[1]);
                waiting.push((bucket.take(now, n), n));
            }
            let due = |b: &mut Bucket, &(place, n): &(u64, u64)| b.wait(now, place, n);
            match waiting.iter().map(|w| due(&mut bucket, w)).enumerate().min_by_key(|d| d.1).unwrap() {
                (i, 0) => done += waiting.swap_remove(i).1,
                (_, ns) => now += ns,
            }
        }
        let (low, high) = (per_second / 1000 * 995, per_second * 10 + burst.max(sizes[1]) + sizes[1]);
        assert!(done >= low * 10 && done <= high, "{per_second}: {done}");
    }
}

#[test]
fn a_burst_comes_at_once_after_a_pause() {
    let mut b = Bucket::default();
    b.limit(0, rate(1000, Some(500)));
    let mut at_once = |now| {
        (0..)
            .take_while(|_| {
                let place = b.take(now, 100);
                let goes = b.wait(now, place, 100) == 0;
                if !goes {
                    b.give_back(100);
                }
                goes
            })
            .count()
    };
    assert_eq!(at_once(0), 5);
    assert_eq!(at_once(100 * MS), 1);
    assert_eq!(at_once(200 * MS + 299 * MS), 3);
    assert_eq!(at_once(60 * SECOND), 5, "no more for a longer one");
}

/// What was written in the background is waited for by who comes next, also where it is much.
#[test]
fn debt_is_paid_by_who_comes() {
    let mut b = Bucket::default();
    b.limit(0, rate(1000, Some(100)));
    b.take(0, 5100);
    let place = b.take(0, 0);
    assert_eq!(b.wait(0, place, 0), 5 * SECOND);
    // and not by who was there before it
    b.take(0, 7000);
    assert_eq!(b.wait(0, place, 0), 5 * SECOND);
    assert_eq!(b.debt(3 * SECOND), 9100);
}

#[test]
fn another_limit_holds_for_who_waits() {
    let (clock, now) = clock!();
    let rates = |n: u64| Rates { write_bps: rate(n, Some(1)), ..Rates::default() };
    let budget = Budget::new(&rates(1000), None, Some(now), None);
    let first = budget.come(Demand::write(4000)).unwrap();
    assert_eq!(first.due(), None);
    let second = budget.come(Demand::write(1000)).unwrap();
    assert_eq!(second.due(), Some(Duration::from_secs(4)));
    clock.fetch_add(SECOND, Ordering::Relaxed);
    budget.set(&rates(3000), None);
    assert_eq!(second.due(), Some(Duration::from_secs(1)));
    budget.set(&Rates::default(), None);
    assert_eq!(second.due(), None);
    assert!(budget.come(Demand::write(1)).is_none(), "nothing is limited");
    // what comes when there is a limit again does not pay for what there was before
    budget.set(&rates(1000), None);
    let third = budget.come(Demand::write(4000)).unwrap();
    assert_eq!(third.due(), None);
}

/// What was taken and is not needed is given back, by who gives up and by who did less; what was done beyond it is debt.
#[test]
fn what_is_not_needed_is_given_back() {
    let (clock, now) = clock!();
    let budget = Budget::new(&Rates { read_bps: rate(1000, Some(1)), ..Rates::default() }, None, Some(now), None);
    let debt = || budget.used(Way::Read).debt[0];
    drop(budget.come(Demand::read(5000)));
    assert_eq!(debt(), 0);
    let paid = budget.come(Demand::read(5000)).unwrap().go();
    assert_eq!(debt(), 5000);
    budget.charge(Way::Read, 1500, 1);
    // another way, and another thread, have nothing of it
    budget.charge(Way::Write, 700, 1);
    std::thread::scope(|s| {
        s.spawn(|| budget.charge(Way::Read, 100, 1));
    });
    assert_eq!(debt(), 5100);
    drop(paid);
    assert_eq!(debt(), 1600);
    let paid = budget.come(Demand::read(1000)).unwrap();
    assert_eq!(wait(clock, &paid), SECOND * 16 / 10);
    let paid = paid.go();
    budget.charge(Way::Read, 3000, 1);
    drop(paid);
    assert_eq!(debt(), 3000);
    assert_eq!(budget.used(Way::Read).bytes, 4600);
    assert_eq!((budget.used(Way::Read).waits, budget.used(Way::Read).waited), (1, Duration::from_millis(1600)));
}

/// Who goes on with it on another thread holds what was paid until that is done: the time counts that it takes.
#[test]
fn what_another_thread_goes_on_with_stays_paid() {
    let (clock, now) = clock!();
    let budget = Budget::new(&Rates { write_iops: rate(100, Some(1)), ..Rates::default() }, None, Some(now), None);
    let mut done = 0;
    while clock.load(Ordering::Relaxed) < 10 * SECOND {
        let turn = budget.come(Demand::sync()).unwrap();
        wait(clock, &turn);
        let paid = turn.go();
        let held = budget.take_credit().unwrap();
        drop(paid);
        // another thread, and 10 ms later
        clock.fetch_add(10 * MS, Ordering::Relaxed);
        budget.charge(Way::Write, 8192, 2);
        drop(held);
        done += 2;
    }
    assert!((995..=1005).contains(&done), "{done}");
    assert_eq!(budget.used(Way::Write).requests, done);
}

/// What a kernel took into its cache was paid for when it did.
#[test]
fn what_is_paid_ahead_costs_nothing_later() {
    let (clock, now) = clock!();
    let budget = Budget::new(&Rates { write_bps: rate(1 << 20, Some(1)), ..Rates::default() }, None, Some(now), None);
    let debt = || budget.used(Way::Write).debt[0];
    for _ in 0..3 {
        let turn = budget.come(Demand::write(1 << 20)).unwrap();
        wait(clock, &turn);
        turn.pay_ahead();
    }
    assert_eq!(clock.load(Ordering::Relaxed) - 7 * MS, 2 * SECOND);
    assert_eq!(debt(), 1 << 20);
    budget.charge(Way::Write, 3 << 20, 3);
    assert_eq!(debt(), 1 << 20);
    budget.charge(Way::Write, 4096, 1);
    assert_eq!(debt(), (1 << 20) + 4096);
    // a direct write that was asked for before comes by itself; what it does not need is there again
    let domain_writes = |n: u64| budget.charge(Way::Write, n, 1);
    let turn = budget.come(Demand::write(8192)).unwrap();
    wait(clock, &turn);
    turn.pay_ahead();
    let before = debt();
    let direct = budget.come(Demand { ahead: true, ..Demand::write(8192) }).unwrap();
    assert_eq!(debt(), before);
    let paid = direct.go();
    domain_writes(4096);
    drop(paid);
    drop(budget.come(Demand { ahead: true, ..Demand::write(8192) }));
    domain_writes(4096);
    assert_eq!(debt(), before);
    domain_writes(4096);
    assert_eq!(debt(), before + 4096);
    // what a kernel has not written after a minute it has overwritten
    for (seconds, left) in [(30, 0), (75, 4096)] {
        clock.fetch_add(100 * SECOND, Ordering::Relaxed);
        budget.come(Demand::write(4096)).unwrap().pay_ahead();
        clock.fetch_add(seconds * SECOND, Ordering::Relaxed);
        domain_writes(4096);
        assert_eq!(debt(), left, "after {seconds} s");
    }
}
