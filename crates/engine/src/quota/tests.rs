use super::*;
use crate::error::Error;
use crate::types::InodeNo;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

const ALICE: Owners = Owners { uid: 1000, project: 0 };
const OURS: Owners = Owners { uid: 1001, project: 7 };

fn quotas() -> Quotas {
    let q = Quotas::default();
    q.begin();
    q.end_counting();
    q
}

fn used(q: &Quotas, owner: QuotaOwner) -> (u64, u64) {
    let u = q.used(owner);
    (u.blocks, u.inodes)
}

/// The limit is had to the last block and inode, by 64 threads as by one, and what is given back is had again.
#[test]
fn the_limit_is_exact_with_many_threads_as_with_one() {
    for threads in [1, 64] {
        let q = quotas();
        q.set_limits(QuotaOwner::User(1000), Some(100_000), Some(3000));
        let (blocks, inodes) = (AtomicU64::new(0), AtomicU64::new(0));
        std::thread::scope(|s| {
            for t in 0..threads {
                let (q, blocks, inodes) = (&q, &blocks, &inodes);
                s.spawn(move || {
                    for i in 0.. {
                        let mut c = q.charge_new(ALICE);
                        let n = 1 + (i + t) % 5;
                        if c.blocks(n).is_err() {
                            break;
                        }
                        // now and then it is not needed
                        if i % 3 == 0 {
                            continue;
                        }
                        c.keep();
                        blocks.fetch_add(n, SeqCst);
                    }
                    loop {
                        let mut c = q.charge_new(ALICE);
                        if c.inode(false).is_err() {
                            break;
                        }
                        c.keep();
                        inodes.fetch_add(1, SeqCst);
                    }
                });
            }
        });
        // what was given back after others had given up
        loop {
            let mut c = q.charge_new(ALICE);
            if c.blocks(1).is_err() {
                break;
            }
            c.keep();
            blocks.fetch_add(1, SeqCst);
        }
        assert_eq!((blocks.into_inner(), inodes.into_inner()), (100_000, 3000), "{threads} threads");
        assert_eq!(used(&q, QuotaOwner::User(1000)), (100_000, 3000));
        q.give(ALICE, 2, 1);
        assert!(q.take(ALICE, 3, 0, Force::None).is_err() && q.take(ALICE, 2, 1, Force::None).is_ok());
    }
}

/// Where the project has no more, the user is charged nothing.
#[test]
fn both_owners_are_charged_or_none() {
    let q = quotas();
    q.set_limits(QuotaOwner::Project(7), Some(10), None);
    assert!(q.take(OURS, 10, 1, Force::None).is_ok());
    let refused = q.take(OURS, 1, 1, Force::User);
    assert!(matches!(refused, Err(Error::Quota(QuotaOwner::Project(7)))), "{refused:?}");
    assert_eq!(refused.unwrap_err().errno(), libc_enospc());
    assert_eq!((used(&q, QuotaOwner::User(1001)), used(&q, QuotaOwner::Project(7))), ((10, 1), (10, 1)));
    assert!(q.take(OURS, 5, 0, Force::All).is_ok());
    assert_eq!(used(&q, QuotaOwner::Project(7)), (15, 1));
    q.give(OURS, 5, 0);
    assert!(q.take(OURS, 1, 0, Force::None).is_err());
    q.give(OURS, 1, 0);
    assert!(q.take(OURS, 1, 0, Force::None).is_ok());
}

fn libc_enospc() -> i32 {
    Error::NoSpace.errno()
}

/// Limits of users do not hold for the privileged, nor for root's own files.
#[test]
fn the_privileged_exceed_limits_of_users() {
    let q = quotas();
    q.set_limits(QuotaOwner::User(1000), Some(1), Some(1));
    q.set_limits(QuotaOwner::User(0), Some(1), Some(1));
    let refused = q.take(ALICE, 2, 0, Force::None);
    assert!(matches!(refused, Err(Error::Quota(QuotaOwner::User(1000)))));
    assert!(
        q.take(ALICE, 2, 0, Force::User).is_ok() && q.take(Owners { uid: 0, project: 0 }, 9, 9, Force::None).is_ok()
    );
    {
        let _privileged = forced(Force::User);
        let mut c = q.charge_new(ALICE);
        c.blocks(5).unwrap();
        c.keep();
    }
    let mut c = q.charge_new(ALICE);
    assert!(c.blocks(1).is_err() && c.inode(true).is_ok() && c.inode(false).is_err());
    drop(c);
    assert_eq!(used(&q, QuotaOwner::User(1000)), (7, 0));
}

/// An inode is counted once, by whoever comes first.
#[test]
fn an_inode_is_counted_once() {
    let q = Quotas::default();
    assert!(!q.charge_new(ALICE).is_on());
    q.begin();
    for _ in 0..2 {
        q.count(InodeNo(17), ALICE, || 5);
    }
    q.is_counted_now(InodeNo(18));
    q.count(InodeNo(18), ALICE, || 5);
    assert_eq!(used(&q, QuotaOwner::User(1000)), (5, 1));
    q.end_counting();
    q.count(InodeNo(19), ALICE, || 5);
    assert_eq!(used(&q, QuotaOwner::User(1000)), (5, 1));
}

/// A limit below what is in use refuses more until enough is given back; taken away it refuses nothing.
#[test]
fn limits_change_while_they_are_exceeded() {
    let q = quotas();
    let owner = QuotaOwner::User(1000);
    assert!(q.take(ALICE, 5000, 10, Force::None).is_ok());
    q.set_limits(owner, Some(100), Some(4));
    assert_eq!(q.used(owner), Used { blocks: 5000, inodes: 10, most_blocks: Some(100), most_inodes: Some(4) });
    q.give(ALICE, 4900, 6);
    assert!(q.take(ALICE, 1, 0, Force::None).is_err() && q.take(ALICE, 0, 1, Force::None).is_err());
    q.give(ALICE, 1, 1);
    assert!(q.take(ALICE, 1, 1, Force::None).is_ok() && q.take(ALICE, 1, 0, Force::None).is_err());
    q.set_limits(owner, None, None);
    assert!(q.take(ALICE, 1 << 40, 1 << 20, Force::None).is_ok());
    assert_eq!(used(&q, owner), ((1 << 40) + 100, (1 << 20) + 4));
}

/// Owners of which an image has very many take little memory, until they have limits or do something.
#[test]
fn owners_that_do_nothing_are_at_rest() {
    let q = Quotas::default();
    q.begin();
    let of = |n: u64| Owners { uid: 1000 + n as u32 / 2, project: 0 };
    (0..20_000).for_each(|n| q.count(InodeNo(n), of(n), || n % 2 * 7));
    assert_eq!((q.owners().len(), q.active()), (10_000, 0));
    assert!((0..20_000).all(|n| !q.limits_space(QuotaOwner::User(of(n).uid))));
    assert_eq!((used(&q, QuotaOwner::User(1000)), q.active()), ((7, 2), 0));
    // counting goes on beside what they do
    q.set_limits(QuotaOwner::User(1000), Some(10), None);
    q.count(InodeNo(20_000), of(0), || 1);
    q.end_counting();
    assert!(q.take(of(0), 3, 0, Force::None).is_err() && q.take(of(0), 2, 1, Force::None).is_ok());
    assert!(q.take(of(2), 3, 0, Force::None).is_ok() && q.limits_space(QuotaOwner::User(1000)));
    q.give(of(4), 7, 1);
    assert_eq!(used(&q, QuotaOwner::User(1000)), (10, 4));
    assert_eq!(used(&q, QuotaOwner::User(1001)), (10, 2));
    assert_eq!(used(&q, QuotaOwner::User(1002)), (0, 1));
    assert_eq!((q.owners().len(), q.active()), (10_000, 3));
}
