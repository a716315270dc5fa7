use super::*;

/// On a thread of its own, which has taken nothing yet.
fn on_a_thread(f: impl FnOnce() + Send) {
    std::thread::scope(|s| {
        s.spawn(f);
    });
}

#[test]
fn a_thread_looks_at_the_room_before_it_has_taken_much() {
    on_a_thread(|| {
        let tight = Tight::new(2);
        assert!(tight.is_look_due(0) && tight.is_look_due(0), "nobody has looked whether there are limits");
        tight.plain.store(true, Ordering::Relaxed);
        let every = UNSEEN_BYTES / REQUEST_BYTES;
        assert_eq!((1..=100).filter(|_| tight.is_look_due(1)).count() as u64, 100 / every);
        assert!(tight.is_look_due(UNSEEN_BYTES) && tight.is_look_due(u64::MAX));
        assert!(!tight.is_look_due(UNSEEN_BYTES - REQUEST_BYTES) && tight.is_look_due(0));
        assert!(!tight.is_look_due(0));
        tight.becomes_tight(1);
        assert!(tight.is_look_due(0) && tight.is_look_due(0));
    });
}

/// What all threads can take unseen is little of what a domain has more than the kernel may hold when it becomes tight.
#[test]
fn what_nobody_looks_at_is_little() {
    const { assert!(LARGE_BLOCKS * 4096 >= 512 * UNSEEN_BYTES) };
}

/// A bound that was restricted leaves the domain with so much room that nobody is asked, and is not raised at once.
#[test]
fn a_restricted_bound_is_no_longer_tight() {
    let domain = |bytes: u64| Domain { held: CachePadded::new((bytes / 4096).into()), ..Domain::default() };
    let (usual, least) = (domain(USUAL_BYTES), domain(LEAST_BYTES));
    let room = usual.tight_below() - 1;
    assert!(room >= least.roomy_from() && dirty::wanted(room * 4096, false) == LEAST_BYTES);
    assert!(usual.roomy_from() * 4096 <= 192 << 20 && dirty::wanted(usual.roomy_from() * 4096, false) == USUAL_BYTES);
    assert_eq!(least.tight_below() * 4096, 64 << 20);
}
