//! Sequences in which block groups go from one domain to the other: filled, emptied, given back and taken.
//!
//! Blocks are allocated behind the end of files, which is quick and takes groups all the same.

use crate::ops::At::{Path, Slot};
use crate::ops::{Op, P};
use braidfs::{FallocMode, FileKind, RenameMode};

/// Where files are grown: behind what they hold.
const FROM: u64 = 64 << 10;
/// More than one domain's own group and all the others have: the volumes are of 24 MiB.
const ALL: u64 = 18 << 20;

fn grow(path: &'static str, len: u64) -> Op {
    Op::Fallocate { at: Path(P(path)), mode: FallocMode::Allocate { keep_size: true }, off: FROM, len }
}

fn empty(path: &'static str) -> Op {
    Op::Fallocate { at: Path(P(path)), mode: FallocMode::PunchHole, off: FROM, len: ALL }
}

fn fsync(path: &'static str) -> Op {
    Op::Fsync { at: Path(P(path)), data_only: false }
}

fn commit(path: &'static str, checkpoint: bool) -> Op {
    Op::Commit { path: P(path), checkpoint }
}

/// A new file with content.
fn content(path: &'static str, len: u32, seed: u32) -> [Op; 2] {
    let made = Op::Create { path: P(path), kind: FileKind::File, mode: 0o644 };
    [made, Op::Write { at: Path(P(path)), off: 0, len, seed }]
}

/// The sequences, each with a name.
pub fn groups() -> Vec<(&'static str, Vec<Op>)> {
    let [new_a, write_a] = content("A/n", 300_000, 60);
    let [new_b, write_b] = content("B/n", 300_000, 61);
    // what is written then lies in a group that the domain has claimed
    let [fill_a, fill_write] = content("A/x", 3_720_000, 64);
    let unlink = |path| Op::Unlink { path: P(path) };
    vec![
        (
            "emptied, then taken by the other domain",
            vec![
                grow("A/f", ALL),
                Op::Sync,
                empty("A/f"),
                Op::Sync,
                grow("B/h", 10 << 20),
                new_b.clone(),
                write_b.clone(),
                fsync("B/n"),
                Op::Sync,
            ],
        ),
        (
            "taken before what emptied them is durable",
            vec![grow("A/f", ALL), Op::Sync, empty("A/f"), grow("B/h", ALL), fsync("B/h"), Op::Sync],
        ),
        (
            "to the other domain and back",
            vec![
                grow("A/f", ALL),
                Op::Sync,
                empty("A/f"),
                grow("B/h", ALL),
                fsync("B/h"),
                empty("B/h"),
                grow("A/f", ALL),
                Op::Sync,
            ],
        ),
        (
            "given back while an unlinked file is open",
            vec![
                Op::Open { path: P("A/g"), slot: 1 },
                unlink("A/g"),
                grow("A/f", ALL),
                Op::Sync,
                empty("A/f"),
                Op::Sync,
                grow("B/h", ALL),
                Op::Append { at: Slot(1), len: 100, seed: 62 },
                Op::Sync,
            ],
        ),
        (
            "with synced files in them",
            vec![
                grow("A/f", 14 << 20),
                new_a.clone(),
                write_a.clone(),
                fsync("A/n"),
                unlink("A/n"),
                empty("A/f"),
                grow("B/h", 12 << 20),
                new_b.clone(),
                write_b.clone(),
                fsync("B/n"),
                Op::Sync,
            ],
        ),
        (
            "emptied of a synced file for the other domain",
            vec![
                fill_a.clone(),
                fill_write.clone(),
                Op::Sync,
                new_a.clone(),
                write_a.clone(),
                fsync("A/n"),
                unlink("A/x"),
                Op::Sync,
                grow("B/h", ALL),
                new_b.clone(),
                write_b.clone(),
                fsync("B/n"),
                Op::Sync,
            ],
        ),
        (
            "emptied of a file that is overwritten and renamed for the other domain",
            vec![
                fill_a,
                fill_write,
                new_a.clone(),
                write_a.clone(),
                fsync("A/n"),
                unlink("A/x"),
                commit("A", true),
                Op::Write { at: Path(P("A/n")), off: 4096, len: 9000, seed: 63 },
                Op::Rename { from: P("A/n"), to: P("B/m"), mode: RenameMode::Replace },
                grow("B/h", ALL),
                fsync("B/m"),
                new_b.clone(),
                write_b.clone(),
                commit("B", false),
                Op::Sync,
            ],
        ),
        (
            "domains commit alone",
            vec![
                grow("A/f", ALL),
                new_a.clone(),
                commit("A", false),
                empty("A/f"),
                commit("A", false),
                grow("B/h", 10 << 20),
                commit("B", true),
                new_b.clone(),
                write_b.clone(),
                commit("A", true),
                commit("B", false),
            ],
        ),
        (
            "both domains grow afterwards",
            vec![
                grow("A/f", ALL),
                Op::Sync,
                empty("A/f"),
                Op::Sync,
                grow("B/h", 6 << 20),
                Op::Sync,
                grow("A/f", 8 << 20),
                new_a,
                write_a,
                fsync("A/n"),
                new_b,
                write_b,
                Op::Sync,
            ],
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::super::workload::bases;
    use crate::run::{Runner, set_clock};
    use braidfs::Placement;

    /// Blocks that these operations have moved out of groups for the other domain.
    fn relocated(base: &super::super::workload::Base, ops: &[super::Op]) -> u64 {
        set_clock(0);
        let mut r = Runner::new(&base.setup, base.image.clone(), base.model.clone(), base.keys.clone()).unwrap();
        ops.iter().for_each(|op| r.apply(op).unwrap());
        let moved = r.volume().unwrap().domains().iter().map(|d| d.relocated_blocks).sum();
        r.abandon();
        moved
    }

    #[test]
    fn groups_in_use_are_emptied() {
        let bases = bases().unwrap();
        for (name, ops) in super::groups().into_iter().filter(|(name, _)| name.starts_with("emptied of")) {
            // with `spread` the files lie in other domains than their directories
            // on two devices there is other room
            let plain = bases.iter().filter(|b| !b.kind.shared && !b.kind.apart && b.kind.placement == Placement::Dirs);
            let moved: Vec<_> = plain.map(|base| (base.kind, relocated(base, &ops))).collect();
            assert!(moved.iter().all(|(_, n)| *n > 0), "{name}: {moved:?}");
        }
    }
}
