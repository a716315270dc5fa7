use super::*;
use crate::error::Error;
use crate::types::InodeNo;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

const ALICE: Owners = Owners { uid: 1000, gid: 100, project: 0 };
const OURS: Owners = Owners { uid: 1001, gid: 100, project: 7 };

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
        q.take(ALICE, 2, 0, Force::User).is_ok()
            && q.take(Owners { uid: 0, gid: 0, project: 0 }, 9, 9, Force::None).is_ok()
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
    // also for the block that a new inode begins with, of a link with a long target
    let mut c = q.charge_new(ALICE);
    assert!(c.inode(true).is_ok() && c.blocks(1).is_ok());
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
    q.note_counted(InodeNo(18));
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
    let of = |n: u64| Owners { uid: 1000 + n as u32 / 2, gid: 100, project: 0 };
    (0..20_000).for_each(|n| q.count(InodeNo(n), of(n), || n % 2 * 7));
    assert_eq!((q.owners().len(), q.active()), (10_001, 0), "and the group");
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
    assert_eq!((q.owners().len(), q.active()), (10_001, 4));
}

/// Who gives a file to one owner after the other takes no memory for each of them; nothing of what they use is forgotten, with
/// threads that charge some of them meanwhile.
#[test]
fn owners_without_limits_go_to_rest_again() {
    let q = quotas();
    q.set_limits(QuotaOwner::User(7), Some(1000), None);
    let of = |uid| Owners { uid, gid: 100, project: 0 };
    std::thread::scope(|s| {
        for t in 0..4 {
            let q = &q;
            s.spawn(move || {
                for n in 0..20_000 {
                    let uid = 1000 + n * 4 + t;
                    q.force(of(uid), 3, 1);
                    q.give(of(uid), 2, 0);
                    if n % 2 == 0 {
                        q.give(of(uid), 1, 1);
                    }
                    // one that all of them charge, and one with a limit
                    assert!(q.take(of(5), 1, 0, Force::None).is_ok());
                    q.force(of(7), 0, 1);
                }
            });
        }
    });
    assert!(q.active() <= 2 * 1024, "{} are active", q.active());
    assert_eq!((used(&q, QuotaOwner::User(5)), used(&q, QuotaOwner::User(7))), ((80_000, 0), (0, 80_000)));
    assert_eq!(used(&q, QuotaOwner::Group(100)), (40_000 + 80_000, 40_000 + 80_000));
    for uid in (1000..81_000).step_by(977) {
        let uses = u64::from((uid - 1000) / 4 % 2);
        assert_eq!(used(&q, QuotaOwner::User(uid)), (uses, uses), "{uid}");
    }
    let those_that_use = q.owners().into_iter().filter(|o| used(&q, *o) != (0, 0)).count();
    assert_eq!(those_that_use, 40_000 + 3);
    assert!(q.owners().len() <= 40_000 + 3 + 2 * 1024, "{} are listed", q.owners().len());
    assert!(q.take(of(7), 1001, 0, Force::None).is_err() && q.take(of(7), 1000, 0, Force::None).is_ok());
}

/// All owners are met one behind the other, each once, with a look at two of them at most for each.
#[test]
fn owners_are_listed_in_linear_time() {
    const OWNERS: u64 = 100_000;
    let q = Quotas::default();
    q.begin();
    (0..OWNERS).for_each(|n| q.count(InodeNo(n), Owners { uid: n as u32 * 7, gid: 100, project: 0 }, || 1));
    q.end_counting();
    // some have counts of their own, of which the list goes on in between
    (0..OWNERS).step_by(1000).for_each(|n| q.force(Owners { uid: n as u32 * 7, gid: 100, project: n as u32 }, 1, 1));
    let mut all = q.owners();
    all.sort_unstable();
    q.listed.store(0, SeqCst);
    let mut met = Vec::new();
    while let Some(owner) = q.owner_after(met.last().copied()) {
        met.push(owner);
        let listed = q.listed.load(SeqCst);
        assert!(listed <= 2 * met.len() as u64, "{listed} for {}", met.len());
    }
    assert_eq!(met, all);
    assert_eq!(met.len() as u64, OWNERS + 1 + OWNERS / 1000 - 1);
}

/// A thread that has met an owner looks at what is left of its limit without the lock of all owners.
#[test]
fn what_a_slot_knows_is_asked_without_the_common_lock() {
    use std::sync::mpsc::channel;
    let q = quotas();
    let owner = QuotaOwner::User(1000);
    q.set_limits(owner, Some(100), None);
    let ((go, begin), (answer, told)) = (channel(), channel());
    std::thread::scope(|s| {
        let q = &q;
        s.spawn(move || {
            // as a `write` does
            let met = q.take(ALICE, 1, 0, Force::None).is_ok() && q.limits_space(owner);
            answer.send((met, q.used(owner).blocks)).unwrap();
            begin.recv().unwrap();
            let taken = q.take(ALICE, 7, 1, Force::None).is_ok() && q.limits_space(owner);
            answer.send((taken, q.used(owner).blocks)).unwrap();
        });
        assert_eq!(told.recv().unwrap(), (true, 1));
        let answered = q.with_all_locked(|| {
            go.send(()).unwrap();
            told.recv_timeout(std::time::Duration::from_secs(20))
        });
        assert_eq!(answered, Ok((true, 8)));
    });
}

/// Where one of the owners may have no more, none is charged; a group is held as a user is, and root's is not.
#[test]
fn a_group_is_charged_with_the_others_or_nobody_is() {
    let q = quotas();
    let (user, group, project) = (QuotaOwner::User(1001), QuotaOwner::Group(100), QuotaOwner::Project(7));
    q.set_limits(group, Some(10), Some(2));
    q.set_limits(project, Some(5), None);
    assert!(q.take(OURS, 5, 1, Force::None).is_ok());
    let refused = |of: Owners, blocks, inodes| match q.take(of, blocks, inodes, Force::None) {
        Err(Error::Quota(owner)) => owner,
        other => panic!("{other:?}"),
    };
    assert_eq!(refused(OURS, 1, 0), project);
    assert_eq!(refused(ALICE, 6, 0), group);
    assert_eq!(refused(ALICE, 0, 2), group);
    assert_eq!((used(&q, user), used(&q, group), used(&q, project)), ((5, 1), (5, 1), (5, 1)));
    assert_eq!(used(&q, QuotaOwner::User(1000)), (0, 0));
    assert!(q.take(ALICE, 6, 2, Force::User).is_ok());
    q.set_limits(QuotaOwner::Group(0), Some(1), Some(1));
    assert!(q.take(Owners { gid: 0, ..ALICE }, 9, 9, Force::None).is_ok());
    assert!(q.limits_space(group) && !q.limits_space(QuotaOwner::Group(0)));
}
