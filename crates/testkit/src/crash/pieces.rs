//! Sequences in which a file that lies in pieces is made whole, beside all that changes where its blocks lie or what they hold.
//!
//! A move is done in one operation, with its commit; or as its first half alone, which makes the blocks dirty. What then comes
//! before the commit comes as from another thread while the background moves the file.

use crate::ops::At::{Path, Slot};
use crate::ops::{Op, P};
use braidfs::{FallocMode, FileKind, RenameMode};

/// The file.
const F: P = P("A/f");
/// Bytes that it has in the end: seven blocks.
#[cfg(test)]
const BYTES: u64 = 7 * 4096;
/// How many operations [`prelude`] has.
pub const PRELUDE: usize = 21;

fn append(path: &'static str, len: u32, seed: u32) -> Op {
    Op::Append { at: Path(P(path)), len, seed }
}

/// The file grows by some blocks at a time, and between these whatever file is in the same domain: it lies in four pieces.
fn prelude() -> Vec<Op> {
    let mut ops = Vec::new();
    // the first fills its last block; a small file gets a block of its own
    for (i, len) in (0..4).zip([3288, 4096, 8192, 4096]) {
        ops.extend([append("A/f", len, 110 + i), Op::Sync]);
        if i < 3 {
            ops.extend(["A/g", "B/h", "A/s/x"].map(|p| append(p, 4096, 120 + i)));
        }
    }
    // what the last three appends put into memory is on the device, too
    ops.extend([Op::Fsync { at: Path(P("A")), data_only: false }, Op::Fsync { at: Path(F), data_only: false }]);
    ops.extend([Op::Sync, Op::Commit { path: F, checkpoint: true }]);
    ops
}

/// The sequences, each with a name. They begin with the [`PRELUDE`].
pub fn pieces() -> Vec<(&'static str, Vec<Op>)> {
    let whole = || Op::Defragment { at: Path(F), commit: true };
    let half = || Op::Defragment { at: Path(F), commit: false };
    let write = |off, len, seed| Op::Write { at: Path(F), off, len, seed };
    let fsync = || Op::Fsync { at: Path(F), data_only: false };
    let datasync = || Op::Fsync { at: Path(F), data_only: true };
    let of_other = || Op::Fsync { at: Path(P("A/g")), data_only: false };
    let commit = || Op::Commit { path: F, checkpoint: false };
    let checkpoint = || Op::Commit { path: F, checkpoint: true };
    let cut = |size| Op::Truncate { at: Path(F), size };
    let falloc = |mode, off, len| Op::Fallocate { at: Path(F), mode, off, len };
    let mv = |a: &'static str, b: &'static str| Op::Rename { from: P(a), to: P(b), mode: RenameMode::Replace };
    let file = |p| Op::Create { path: P(p), kind: FileKind::File, mode: 0o644 };
    let collapse = FallocMode::CollapseRange;
    let all = [
        ("made whole", vec![whole()]),
        ("made whole, another file synced", vec![half(), of_other(), commit()]),
        ("moved, then synced", vec![half(), fsync(), commit()]),
        ("moved, data synced", vec![half(), datasync(), Op::Sync]),
        ("moved, the commit with a checkpoint", vec![half(), checkpoint(), write(0, 100, 130), fsync()]),
        // overwrites: before it, between its halves, after it; in memory, synced, durable in place
        ("written, then made whole", vec![write(4096, 5000, 131), whole(), fsync()]),
        (
            "written and synced, then made whole",
            vec![write(4096, 5000, 132), fsync(), whole(), write(0, 9000, 133), fsync()],
        ),
        ("written beside", vec![half(), write(100, 9000, 134), commit(), write(100, 50, 135), fsync()]),
        (
            "written and synced beside",
            vec![half(), write(100, 9000, 136), fsync(), write(8192, 4096, 137), fsync(), Op::Sync],
        ),
        ("written beside, data synced", vec![half(), write(4096, 4096, 138), datasync(), commit()]),
        (
            "lives by overwrites",
            vec![
                write(0, 4096, 139),
                fsync(),
                write(4096, 8192, 140),
                commit(),
                write(8192, 4096, 141),
                half(),
                write(0, 12_000, 142),
                fsync(),
                write(0, 4096, 143),
                commit(),
                write(0, 8192, 144),
                fsync(),
            ],
        ),
        (
            "written and made whole again and again",
            vec![whole(), write(4096, 4096, 145), fsync(), whole(), half(), fsync()],
        ),
        // the size
        ("cut beside", vec![half(), cut(9000), fsync(), commit()]),
        ("cut, then made whole", vec![cut(14_000), whole(), fsync()]),
        ("cut to nothing and written", vec![half(), cut(0), append("A/f", 9000, 146), fsync(), Op::Sync]),
        ("cut and grown beside", vec![half(), cut(5000), cut(20_000), commit(), write(4096, 9000, 147), fsync()]),
        (
            "cut beside, then a part of it again",
            vec![half(), cut(10_000), half(), fsync(), append("A/f", 9000, 148), Op::Sync],
        ),
        ("grown beside", vec![half(), append("A/f", 9000, 149), fsync(), commit()]),
        // where blocks lie
        ("a hole beside", vec![half(), falloc(FallocMode::PunchHole, 4096, 8192), fsync(), commit()]),
        (
            "zeroed beside",
            vec![half(), falloc(FallocMode::ZeroRange { keep_size: true }, 100, 9000), fsync(), commit()],
        ),
        ("collapsed beside", vec![half(), falloc(collapse, 4096, 8192), write(4096, 4096, 150), fsync(), commit()]),
        ("inserted beside", vec![half(), falloc(FallocMode::InsertRange, 8192, 4096), fsync(), commit(), whole()]),
        (
            "placed for good beside",
            vec![
                half(),
                falloc(FallocMode::Allocate { keep_size: false }, 0, 40_000),
                write(4096, 4096, 151),
                fsync(),
                commit(),
                write(4096, 9000, 152),
                fsync(),
            ],
        ),
        (
            "copied into beside",
            vec![half(), Op::CopyRange { from: P("B/h"), from_off: 0, to: F, to_off: 100, len: 5000 }, fsync()],
        ),
        // names
        ("unlinked beside", vec![half(), Op::Unlink { path: F }, append("A/g", 9000, 153), of_other(), Op::Sync]),
        (
            "unlinked and open",
            vec![
                Op::Open { path: F, slot: 1 },
                half(),
                Op::Unlink { path: F },
                Op::Write { at: Slot(1), off: 0, len: 9000, seed: 154 },
                Op::Defragment { at: Slot(1), commit: true },
                Op::Sync,
            ],
        ),
        (
            "moved to the other domain beside",
            vec![half(), mv("A/f", "B/n"), Op::Fsync { at: Path(P("B/n")), data_only: false }],
        ),
        ("replaced beside", vec![half(), mv("B/h", "A/f"), fsync(), Op::Sync]),
        // what was freed is used again
        (
            "others take what was freed",
            vec![whole(), append("A/g", 20_000, 155), of_other(), append("B/h", 20_000, 156), Op::Sync],
        ),
        (
            "others take blocks beside",
            vec![half(), append("A/g", 20_000, 157), of_other(), file("A/n"), append("A/n", 20_000, 158), Op::Sync],
        ),
        (
            "discarded and taken",
            vec![half(), Op::Trim, whole(), Op::Trim, append("A/g", 20_000, 159), of_other(), Op::Trim],
        ),
        ("cleaned beside", vec![half(), Op::Clean, write(0, 4096, 160), fsync(), Op::Clean, whole(), fsync()]),
    ];
    all.into_iter().map(|(name, ops)| (name, [prelude(), ops].concat())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::crash::explore::recorded;
    use crate::crash::plan::End;
    use crate::crash::workload::{Kind, base};

    #[test]
    fn every_sequence_moves_blocks_of_a_file_in_pieces() {
        assert_eq!(prelude().len(), PRELUDE);
        for kind in Kind::ALL.iter().filter(|k| !k.shared) {
            let base = base(*kind).unwrap();
            for (name, ops) in pieces() {
                let run = recorded(&base, &ops, End::Crash, true).unwrap_or_else(|e| panic!("{name}, {kind:?}: {e}"));
                let run = run.unwrap_or_else(|| panic!("{name}, {kind:?}: an operation of it cannot be done"));
                assert!(run.moved >= 3, "{name}, {kind:?}: {} blocks moved", run.moved);
                let before = run.history.version(PRELUDE);
                let f = ["A", "f"].iter().fold(crate::model::ROOT, |d, n| before.lookup(d, n.as_bytes()).unwrap());
                assert_eq!(before.stat(f).unwrap().size, BYTES, "{name}");
            }
        }
    }
}
