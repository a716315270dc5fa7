use super::*;
use crate::abi::op;
use std::time::Duration;

#[test]
fn threads_are_summed() {
    let counters = Counters::default();
    let (a, b) = (counters.line(), counters.line());
    for line in [&a, &b] {
        line.end(&line.begin(op::FSYNC), &Ok(Outcome::Deferred), 1);
        line.end(&line.begin(op::GETATTR), &Err(rustix::io::Errno::IO), 1);
    }
    a.end(&a.begin(op::GETATTR), &Ok(Outcome::Reply), 1);
    a.end(&a.begin(4096), &Ok(Outcome::Reply), 1);
    a.end(&a.begin(u32::MAX), &Ok(Outcome::Reply), 1);
    let begun = a.begin(op::READ);
    begun.counted(&a).moved(4096);
    let timing = begun.counted(&a).timing();
    a.end(&begun, &Ok(Outcome::Deferred), 1);
    timing.counted().moved(100);
    let sum = counters.sum();
    let of = |code: u32| (sum[code as usize].requests, sum[code as usize].deferred);
    assert_eq!((of(op::FSYNC), of(op::GETATTR), of(0), of(op::LOOKUP)), ((2, 2), (3, 0), (2, 0), (0, 0)));
    assert_eq!(counters.threads(), 2);
    assert_eq!((sum[op::GETATTR as usize].errors, sum[op::READ as usize].bytes, sum[0].bytes), (2, 4196, 0));
}

#[test]
fn a_sample_is_timed_whatever_the_sequence() {
    let counters = Counters::default();
    let line = counters.line();
    // each fourth one takes longer
    for n in 0..16_000u32 {
        let begun = line.begin(1 + n % 4);
        if begun.at.is_some() && n % 4 == 3 {
            std::thread::sleep(Duration::from_micros(100));
        }
        line.end(&begun, &Ok(Outcome::Reply), 1);
    }
    let sum = counters.sum();
    for (code, s) in sum.iter().enumerate().skip(1).take(4) {
        assert_eq!(s.requests, 4000);
        assert!((200..320).contains(&s.timed), "{} of code {code} were timed", s.timed);
    }
    assert!(sum[4].nanos / sum[4].timed >= 100_000 && sum[1].nanos / sum[1].timed < 50_000);
}

#[test]
fn every_request_is_timed_while_somebody_watches_and_no_longer() {
    let counters = Counters { mode: Arc::new(Mode { clock_is_quick: true, ..Mode::new(None) }), ..Counters::default() };
    let line = counters.line();
    let ask = |n: u32| {
        for i in 0..n {
            line.end(&line.begin(op::GETATTR), &Ok(Outcome::Reply), i % 2);
        }
        let times = counters.times(op::GETATTR as usize).iter().sum::<u64>();
        assert_eq!(times, counters.sum()[op::GETATTR as usize].timed);
        times
    };
    let before = ask(1000);
    assert!(before < 200 && counters.processes().is_empty(), "{before}");
    counters.watch(0);
    assert_eq!(counters.sampled(), SAMPLED);
    counters.watch(3600);
    assert_eq!((ask(1000) - before, counters.sampled()), (1000, 1));
    let processes = counters.processes();
    assert_eq!((processes[&0].requests, processes[&1].timed, processes.len()), (500, 500, 2));
    // the hour is over
    counters.mode.until.store(0, Relaxed);
    let (watched, after) = (before + 1000, ask(10_000));
    assert!(after - watched < 1500, "{after}");
    assert_eq!(counters.sampled(), SAMPLED);
}

#[test]
fn what_is_answered_later_is_timed_until_then() {
    let counters = Counters::default();
    let line = counters.line();
    // the first one is timed
    let begun = line.begin(op::FSYNC);
    let timing = begun.counted(&line).timing();
    line.end(&begun, &Ok(Outcome::Deferred), 1);
    assert_eq!(counters.times(op::FSYNC as usize), [0; BUCKETS]);
    std::thread::sleep(Duration::from_millis(2));
    timing.answered(false);
    let times = crate::watch::sample::Latency::new(&counters.times(op::FSYNC as usize));
    assert_eq!(times.count(), 1);
    assert!(times.quantile(1.0).unwrap() >= 2_000_000);
}

#[test]
fn errors_of_what_is_answered_later_are_counted_also_where_it_is_not_timed() {
    let counters = Counters::default();
    let line = counters.line();
    for n in 0..100 {
        let begun = line.begin(op::FSYNC);
        let timing = begun.counted(&line).timing();
        line.end(&begun, &Ok(Outcome::Deferred), 1);
        timing.answered(n % 2 == 0);
    }
    let sum = counters.sum()[op::FSYNC as usize];
    assert_eq!((sum.requests, sum.errors), (100, 50));
    assert!(sum.timed < 100);
}

#[test]
fn the_wait_for_another_thread_is_part_of_the_latency_and_not_of_the_handler() {
    let counters = Counters::default();
    let line = counters.line();
    let received = Instant::now().checked_sub(Duration::from_secs(100)).unwrap();
    let begun = line.begin_waited(op::READ, Some(received));
    let timing = begun.counted(&line).timing();
    line.end(&begun, &Ok(Outcome::Reply), 1);
    timing.answered(false);
    let times = crate::watch::sample::Latency::new(&counters.times(op::READ as usize));
    assert_eq!((times.count(), times.up_to(50_000_000_000)), (2, 0));
    assert!(counters.sum()[op::READ as usize].nanos < 50_000_000_000);
}

#[test]
fn domains_and_processes_have_the_times_of_all_their_answers() {
    let counters = Counters { mode: Arc::new(Mode { clock_is_quick: true, ..Mode::new(None) }), ..Counters::default() };
    let (a, b) = (counters.line(), counters.line());
    let ask = |line: &Arc<CachePadded<Line>>, client, domain: u16, deferred: bool| {
        let mut begun = line.begin(op::FSYNC);
        line.of(&mut begun, client, || Some(DomainId(domain)));
        let timing = begun.counted(line).timing();
        line.end(&begun, &Ok(if deferred { Outcome::Deferred } else { Outcome::Reply }), client);
        if deferred {
            timing.answered(false);
        }
    };
    let of_domain = |d| counters.times_of_domain(d).iter().sum::<u64>();
    // as always: a sample, of domains only
    (0..1000).for_each(|_| ask(&a, 5, 3, false));
    let sampled = of_domain(3);
    assert!((1..200).contains(&sampled) && counters.processes().is_empty(), "{sampled}");
    counters.watch(3600);
    for _ in 0..100 {
        ask(&a, 5, 3, false);
        ask(&a, 5, 3, true);
        ask(&b, 6, 255, true);
        ask(&b, 6, 256, false);
    }
    assert_eq!((of_domain(3) - sampled, of_domain(255), of_domain(256), of_domain(0)), (200, 100, 0, 0));
    let processes = counters.processes();
    let times = |client| processes[&client].latency.iter().sum::<u64>();
    assert_eq!((times(5), times(6), processes[&5].requests, processes[&6].timed), (200, 200, 200, 200));
    // a new watch begins anew, also for those who are answered later
    counters.mode.until.store(0, Relaxed);
    (0..100).for_each(|_| ask(&a, 5, 3, true));
    counters.watch(3600);
    ask(&a, 5, 3, true);
    assert_eq!(counters.processes()[&5].latency.iter().sum::<u64>(), 1);
}

#[test]
fn who_begins_to_watch_meets_no_counts_of_an_earlier_watch() {
    let counters = Counters::default();
    let (line, idle) = (counters.line(), counters.line());
    let ask =
        |line: &Line, client| (0..40).for_each(|_| line.end(&line.begin(op::GETATTR), &Ok(Outcome::Reply), client));
    counters.watch(3600);
    ask(&line, 1);
    ask(&idle, 1);
    // who goes on to watch goes on with the counts
    counters.watch(3600);
    assert_eq!(counters.processes()[&1].requests, 80);
    counters.mode.until.store(0, Relaxed);
    ask(&line, 7);
    assert!(!is_watched(counters.mode.watched.load(Relaxed)));
    assert_eq!(counters.processes()[&1].requests, 80, "they can be read afterwards");
    counters.watch(3600);
    ask(&line, 2);
    let processes = counters.processes();
    assert_eq!((processes.len(), processes[&2].requests), (1, 40));
}

#[test]
fn a_watch_that_is_asked_for_while_one_ends_is_not_lost() {
    let mode = Mode::new(None);
    let later = mode.start + Duration::from_millis(500);
    mode.watch(100);
    let watched = mode.watched.load(SeqCst);
    mode.look_while(later, || mode.watch(1000));
    assert_eq!(mode.watched.load(SeqCst), watched, "it goes on");
    mode.look(later);
    assert!(is_watched(mode.watched.load(SeqCst)));
    mode.look(mode.start + Duration::from_secs(1));
    assert!(!is_watched(mode.watched.load(SeqCst)));
}
