//! Tables of what a rename means for durability.

use super::*;

const A: DomainId = DomainId(0);
const B: DomainId = DomainId(1);

fn vacated(domain: DomainId, tx: u64, alive: bool) -> Vacated {
    Vacated { domain, tx: TxId(tx), alive }
}

fn subject(domain: DomainId, tx: u64, is_dir: bool, nlink: u32) -> Subject {
    let ino = InodeNo(u64::from(domain.0) * 100 + tx);
    let changed = InodeVersion { inode: InodeRef { ino, generation: 1 }, version: tx + 10 };
    Subject { changed, domain, tx: TxId(tx), is_dir, nlink }
}

/// Old and new name in two directories, of one domain or of two: what both inodes wait for, and who leaves which name.
#[test]
fn a_rename_over_what_is_there() {
    let moved = subject(A, 4, false, 1);
    let none = Waits::default();
    let left_old = (Which::Old, vacated(A, 4, true));
    let run = |other: Option<Subject>, exchange, left_other| {
        plan(&Rename { moved, other, exchange, whiteout: false, two_dirs: true, left_other })
    };
    // nothing is there
    assert_eq!(run(None, false, false), Plan { moved: none, other: none, vacated: [left_old].into_iter().collect() });
    let (near, far) = (subject(A, 4, false, 1), subject(B, 6, false, 1));
    let (near2, far2) = (Subject { nlink: 2, ..near }, Subject { nlink: 2, ..far });
    let (near_dir, far_dir) = (subject(A, 4, true, 2), subject(B, 6, true, 2));
    let follows = Waits { after: TxId(4), ..none };
    let loses = Waits { lost_to: Some((moved.changed, A, TxId(4))), ..none };
    let takes = Waits { sync_with: Some((B, TxId(6))), ..none };
    let left_new = |domain, tx, alive| Some((Which::New, vacated(domain, tx, alive)));
    let partner = Some((far.changed, B, TxId(6)));
    // victim, or partner; exchange; something left the directory: what the moved and the other wait for; who left the name
    let rows = [
        (near, false, false, none, follows, [None, None]),
        (near2, false, false, follows, follows, [left_new(A, 4, true), None]),
        (near_dir, false, false, none, none, [None, None]),
        (near_dir, false, true, follows, none, [left_new(A, 4, true), None]),
        (far, false, false, takes, loses, [left_new(B, 6, false), None]),
        (far2, false, false, takes, loses, [left_new(B, 6, false), None]),
        (far_dir, false, true, Waits { after: TxId(4), ..takes }, loses, [left_new(B, 6, false), left_new(A, 4, true)]),
        (near, true, false, follows, follows, [left_new(A, 4, true), None]),
        (near_dir, true, false, follows, Waits { moves: true, ..follows }, [left_new(A, 4, true), None]),
        (
            far,
            true,
            false,
            Waits { lost_to: partner, exchange: true, ..takes },
            Waits { exchange: true, ..loses },
            [left_new(B, 6, true), None],
        ),
    ];
    for (other, exchange, left_other, moved, waits, left) in rows {
        let vacated = [Some(left_old)].into_iter().chain(left).flatten().collect();
        let have = run(Some(other), exchange, left_other);
        assert_eq!(have, Plan { moved, other: waits, vacated }, "{other:?} exchange {exchange} left {left_other}");
    }
}

#[test]
fn a_directory_moves_only_between_two() {
    let (moved, other) = (subject(A, 4, true, 2), subject(B, 6, true, 2));
    for (two_dirs, exchange) in [(false, false), (false, true), (true, false), (true, true)] {
        let p = plan(&Rename { moved, other: Some(other), exchange, whiteout: false, two_dirs, left_other: false });
        assert_eq!((p.moved.moves, p.other.moves), (two_dirs, two_dirs && exchange));
    }
}

/// Whatever has the new name: no fsync of what moves precedes the transaction that makes the whiteout.
#[test]
fn what_leaves_a_whiteout_is_durable_with_it() {
    let moved = subject(A, 4, false, 1);
    let others = [None, Some(subject(A, 4, false, 1)), Some(subject(B, 6, false, 1)), Some(subject(B, 6, false, 2))];
    for other in others {
        let with =
            |whiteout| plan(&Rename { moved, other, exchange: false, whiteout, two_dirs: true, left_other: false });
        let (without, with) = (with(false), with(true));
        assert_eq!(with.moved, Waits { after: TxId(4), ..without.moved }, "{other:?}");
        assert_eq!((with.other, &with.vacated), (without.other, &without.vacated), "{other:?}");
    }
}

#[test]
fn waits_are_forgotten_when_they_are_durable() {
    let (m, o) = (subject(A, 4, false, 1), subject(B, 6, false, 1));
    let rename =
        Rename { moved: m, other: Some(o), exchange: true, whiteout: false, two_dirs: true, left_other: false };
    let p = plan(&rename);
    let mut d = Durability::new();
    p.moved.note(&mut d, InodeNo(1), b"old");
    assert_eq!((d.tombstones().len(), d.exchange()), (1, Some(o.changed)));
    assert!(d.is_judged() && d.waits(|domain, tx| (domain, tx) == (B, TxId(6))));
    d.forget_durable(|_, tx| tx > TxId(5), false);
    assert!(d.is_judged(), "the partner is not durable");
    d.forget_durable(|_, tx| tx > TxId(6), true);
    assert!(d.is_judged() && !d.waits(|_, _| true), "recovery judges it");
    d.forget_durable(|_, tx| tx > TxId(6), false);
    assert!(!d.is_judged());
    // who took the name loses it again: it decides about nothing
    p.moved.note(&mut d, InodeNo(1), b"old");
    d.inode_regains_name(InodeNo(1), b"other");
    assert_eq!(d.tombstones().len(), 1);
    d.inode_regains_name(InodeNo(1), b"old");
    assert_eq!(d.tombstones().len(), 0);
}
