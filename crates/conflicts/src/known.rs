//! Programs whose sharing is known, without a file system: does the checker see what there is, and nothing else?
//!
//! They run before every matrix. A checker that sees nothing would find all cells better than ever.

use crate::cell::Done;
use crate::client::{self, Count};
use crate::matrix::{CellId, Domains};
use crate::report::{Sharing, Window};
use crate::turns::Member;
use crate::{Error, Result};
use std::hint::black_box;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

const WORKERS: usize = 4;
const ROUNDS: usize = 32;

/// A program, and how the line is shared on which each operation waits for one transfer; `None`: it shares nothing.
pub const ALL: &[(&str, Option<Sharing>)] = &[
    ("own", None),
    ("readers", None),
    ("counter", Some(Sharing::True)),
    ("add-zero", Some(Sharing::True)),
    ("same-value", Some(Sharing::True)),
    ("neighbour", Some(Sharing::False)),
    ("clone", Some(Sharing::True)),
    ("lock", Some(Sharing::True)),
    // a build that tells of locks sees how long this one is held
    ("section", Some(Sharing::True)),
];

/// Steps of `section` inside and outside of its lock.
const STEPS: [u64; 2] = [300, 700];

#[repr(align(64))]
#[derive(Default)]
struct Aligned<T>(T);

#[derive(Default)]
struct Shared {
    counter: Aligned<AtomicU64>,
    packed: Aligned<[AtomicU64; WORKERS]>,
    spread: [Aligned<AtomicU64>; WORKERS],
    read: Aligned<AtomicU64>,
    lock: Aligned<Mutex<u64>>,
    section: Aligned<braidfs_sync::plain::Mutex<u64>>,
    cloned: Arc<()>,
}

/// So many steps of the same length.
#[inline(never)]
fn steps(n: u64) -> u64 {
    (0..n).fold(0, |a, i| black_box(a ^ i))
}

fn act(name: &str, s: &Shared, me: usize) {
    let relaxed = Ordering::Relaxed;
    match name {
        "own" => drop(s.spread[me].0.fetch_add(1, relaxed)),
        "readers" => drop(black_box(s.read.0.load(relaxed))),
        "counter" => drop(s.counter.0.fetch_add(1, relaxed)),
        "add-zero" => drop(s.counter.0.fetch_add(black_box(0), relaxed)),
        "same-value" => s.counter.0.store(black_box(0), relaxed),
        "neighbour" => drop(s.packed.0[me].fetch_add(1, relaxed)),
        "clone" => drop(black_box(Arc::clone(&s.cloned))),
        "section" => {
            let mut n = s.section.0.lock();
            *n = steps(STEPS[0]);
            drop(n);
            black_box(steps(STEPS[1]));
        }
        _ => {
            if let Ok(mut n) = s.lock.0.lock() {
                *n += 1;
            }
        }
    }
}

/// Runs a program in the working directory, as [`crate::cell::run`] runs a cell.
///
/// # Errors
/// There is no such program.
pub fn run(name: &str) -> Result<()> {
    let Some((name, _)) = ALL.iter().find(|k| k.0 == name) else {
        return Err(Error::Cell(format!("no known program `{name}`")));
    };
    client::machine(WORKERS);
    let shared = Arc::new(Shared::default());
    let one = |me| {
        let shared = Arc::clone(&shared);
        Member::start(move || {
            move |count| {
                client::operation(me, count, || act(name, &shared, me));
                Ok(1)
            }
        })
    };
    let workers = (0..WORKERS).map(one).collect::<Result<Vec<_>>>()?;
    let round = |count| workers.iter().try_for_each(|w| w.tell(count).map(drop));
    (0..ROUNDS).try_for_each(|_| round(Count::Not))?;
    client::clear();
    (0..ROUNDS).try_for_each(|_| round(Count::Foreground))?;
    client::report(c"foreground");
    client::report(c"commit");
    let ops = (ROUNDS * WORKERS) as u64;
    let done = serde_json::to_vec(&Done { foreground: ops, commit: ops, commits: 0 })?;
    std::fs::write("done", done).map_err(|e| Error::io(Path::new("done"), e))?;
    workers.into_iter().try_for_each(Member::end)
}

/// The cell of a program.
pub fn cell(name: &str) -> CellId {
    CellId::usual(format!("known:{name}"), WORKERS, Domains::One)
}

/// Whether the window of a program is as it must be.
///
/// # Errors
/// It is not: the checker is wrong.
pub fn judge(name: &str, sharing: Option<Sharing>, w: &Window) -> Result<()> {
    let seen = w.lines.first().map(|l| l.sharing);
    let wanted = if sharing.is_some() { 1.0 } else { 0.0 };
    // taking and leaving a lock, or a clone and its end, is one transfer
    if seen == sharing && w.transfers == wanted && w.calls == 0.0 {
        return judge_locks(name, w);
    }
    let Window { transfers, calls, .. } = w;
    Err(Error::Cell(format!(
        "the checker does not see what it must: program `{name}` has {transfers} transfers per operation instead of \
         {wanted}, {calls} system calls, and sharing {seen:?} instead of {sharing:?}"
    )))
}

/// In a build that tells of locks: one that all have in turn, for as long as it is held, and none elsewhere.
fn judge_locks(name: &str, w: &Window) -> Result<()> {
    if !cfg!(feature = "lock-sections") {
        return Ok(());
    }
    let right = match &w.locks[..] {
        [] => name != "section",
        [l] => {
            let share = l.instructions / w.instructions;
            let wanted = STEPS[0] as f64 / (STEPS[0] + STEPS[1]) as f64;
            let counts =
                (l.cpus, l.holds, l.handoffs) == (WORKERS as u32, 1.0, (ROUNDS * WORKERS - 1) as f64 / w.ops as f64);
            name == "section" && counts && (share - wanted).abs() < 0.03 && l.transfers == 0.0
        }
        _ => false,
    };
    if right {
        return Ok(());
    }
    Err(Error::Cell(format!("the checker does not see locks as it must: program `{name}` has {:?}", w.locks)))
}
