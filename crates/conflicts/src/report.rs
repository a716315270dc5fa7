//! What the tool writes about one window, read and condensed.
//!
//! The file has a record per line, fields behind tabs: `sum` and `call` for each kind of operation; then, for each cache
//! line that moved, `line`, its place (`heap`, `static`, `stack`, `mapping`), and the `site`s that moved it, most transfers
//! first. `frame`s belong to the record before them. `rest` sums up the lines with the fewest. Then come `lock`s that several CPUs
//! had for themselves, and in `locks` the rest of those. `end` is last.

use crate::{Error, Result};
use serde::{Deserialize, Serialize};

/// One window of a cell. "Per operation" divides by the operations of all workers.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Window {
    /// Operations of the test.
    pub ops: u64,
    /// Lines that one CPU wrote in this window and another one touched.
    pub shared_lines: usize,
    /// Coherence transfers that the test's operations waited for, per operation.
    pub transfers: f64,
    /// Those of the line with the most, per operation.
    pub hottest: f64,
    /// System calls per operation.
    pub calls: f64,
    /// Which, and how many of each in the window.
    pub call_names: Vec<(String, u64)>,
    /// Looks at the clock or the number of the CPU, which cost no system call outside of valgrind, per operation.
    pub clocks: f64,
    /// Accesses to memory per operation.
    pub accesses: f64,
    /// Locked instructions per operation.
    pub locked: f64,
    /// Instructions per operation.
    #[serde(default)]
    pub instructions: f64,
    /// Commits in this window.
    pub commits: u64,
    /// Transfers that the commits waited for, per commit.
    pub commit_transfers: f64,
    /// The lines that moved, most transfers first; in a long report without those with the fewest.
    pub lines: Vec<Line>,
    /// Locks that more than one CPU had for itself, those that cost most first. Only in a build with the feature
    /// `lock-sections`.
    #[serde(default)]
    pub locks: Vec<Lock>,
}

/// A lock that more than one CPU had for itself in the window. All per operation of all workers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Lock {
    /// CPUs that had it.
    pub cpus: u32,
    /// How often it was taken.
    pub holds: f64,
    /// How often another CPU than the time before took it.
    pub handoffs: f64,
    /// Instructions of who had it while they had it.
    pub instructions: f64,
    /// Transfers that they waited for meanwhile.
    pub transfers: f64,
    /// One place where it was taken, innermost first.
    pub stack: Vec<Frame>,
}

/// A cache line.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Line {
    /// How it is shared.
    pub sharing: Sharing,
    /// Transfers that the test's operations waited for, per operation.
    pub transfers: f64,
    /// Transfers that commits waited for, in the window.
    pub commit_transfers: u64,
    /// CPUs that touched it.
    pub cpus: u32,
    /// CPUs that wrote it.
    pub writers: u32,
    /// Where it lies.
    pub place: String,
    /// Who allocated the block, innermost of the project first.
    pub origin: Vec<Frame>,
    /// Who moved it, most transfers first.
    pub sites: Vec<Site>,
}

/// How a line is shared in a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Sharing {
    /// Some byte was written by one CPU and touched by another.
    True,
    /// Different bytes of the line.
    False,
    /// Nobody else touched it in this window: it was another CPU's before.
    Before,
}

/// An instruction whose accesses moved a line.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Site {
    /// Whether it writes.
    pub writes: bool,
    /// By a locked instruction.
    pub locked: bool,
    /// The kernel, for a system call.
    pub kernel: bool,
    /// Transfers in the window.
    pub transfers: u64,
    /// First byte in the line, and number of bytes up to the last.
    pub bytes: (u32, u32),
    /// The stack, innermost first, cut to what says something.
    pub stack: Vec<Frame>,
}

/// A function, and a line of its source.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Frame {
    /// Name, where it is known: that of an inlined function is not always.
    pub function: String,
    /// File and line, relative to the project where it is the project's.
    pub at: String,
}

impl Frame {
    /// Of valgrind's `function (file:line)` or `function (in object)`.
    fn read(text: &str) -> Self {
        let (function, at) = text.rsplit_once(" (").unwrap_or((text, ""));
        let at = at.strip_suffix(')').unwrap_or(at).trim_start_matches("in ");
        let at = at.find("crates/").filter(|_| !at.contains("/registry/")).map_or(at, |i| &at[i..]);
        let function = if function == "UnknownInlinedFun" { "" } else { function };
        Self { function: function.into(), at: at.into() }
    }
    /// Is it code of the project?
    pub fn ours(&self) -> bool {
        self.at.starts_with("crates/") && !self.at.starts_with("crates/conflicts/")
    }
}

/// Frames kept of a stack.
const KEPT: usize = 6;

/// Leaves the innermost frame and those of the project.
fn cut(stack: &[Frame]) -> Vec<Frame> {
    let first = stack.first().filter(|f| !f.ours()).cloned();
    first.into_iter().chain(stack.iter().filter(|f| f.ours()).cloned()).take(KEPT).collect()
}

/// The innermost frame of the project: what called its lock types rather than these.
fn says_most(stack: &[Frame]) -> Option<&Frame> {
    let ours = || stack.iter().filter(|f| f.ours());
    ours().find(|f| !f.at.starts_with("crates/sync/")).or_else(|| ours().next())
}

impl Site {
    /// The innermost frame of the project but its lock types, else the innermost of all.
    pub fn frame(&self) -> Option<&Frame> {
        says_most(&self.stack).or(self.stack.first())
    }
}

impl Lock {
    /// The frame that says most, as [`Site::frame`].
    pub fn frame(&self) -> Option<&Frame> {
        says_most(&self.stack).or(self.stack.first())
    }
}

impl Line {
    /// Who allocated it, where that is the project.
    pub fn allocator(&self) -> Option<&Frame> {
        says_most(&self.origin)
    }
    /// Does any frame of who moves or allocated it contain this text?
    pub fn mentions(&self, text: &str) -> bool {
        let frames = self.sites.iter().flat_map(|s| &s.stack).chain(&self.origin);
        let mut frames = frames.into_iter();
        frames.any(|f| f.function.contains(text) || f.at.contains(text)) || self.place.contains(text)
    }
}

impl Window {
    /// The window whose report is `text`, with `ops` operations and `commits` commits.
    ///
    /// # Errors
    /// The report is not whole, or of another version of the tool.
    pub fn read(text: &str, ops: u64, commits: u64) -> Result<Self> {
        let mut w = Self { ops, commits, ..Self::default() };
        let per_op = |n: u64| n as f64 / ops.max(1) as f64;
        let (mut whole, mut rest_shared, mut moved, mut commit_moved, mut calls) = (false, 0, 0, 0, 0);
        for record in text.lines() {
            let fields: Vec<&str> = record.split('\t').collect();
            let bad = || Error::Cell(format!("the tool's report has a record that nobody knows: {record}"));
            let number = |i: usize| fields.get(i).and_then(|f| read_number(f)).ok_or_else(bad);
            match fields[0] {
                "sum" if fields.get(1) == Some(&"foreground") => {
                    w.accesses = per_op(number(3)?);
                    w.locked = per_op(number(4)?);
                    w.clocks = per_op(number(5)?);
                    w.instructions = per_op(number(6)?);
                }
                "call" if fields.get(1) == Some(&"foreground") => {
                    let name = fields.get(2).ok_or_else(bad)?;
                    w.call_names.push((call_name(name).to_owned(), number(3)?));
                    calls += number(3)?;
                }
                "sum" | "call" => {}
                "line" => {
                    let sharing = match fields.get(2) {
                        Some(&"true") => Sharing::True,
                        Some(&"false") => Sharing::False,
                        Some(&"before") => Sharing::Before,
                        _ => return Err(bad()),
                    };
                    moved += number(3)?;
                    commit_moved += number(4)?;
                    w.lines.push(Line {
                        sharing,
                        transfers: per_op(number(3)?),
                        commit_transfers: number(4)?,
                        cpus: number(5)?.count_ones(),
                        writers: number(6)?.count_ones(),
                        place: String::new(),
                        origin: Vec::new(),
                        sites: Vec::new(),
                    });
                }
                "lock" => w.locks.push(Lock {
                    cpus: number(1)?.count_ones(),
                    holds: per_op(number(2)?),
                    handoffs: per_op(number(3)?),
                    instructions: per_op(number(4)?),
                    transfers: per_op(number(5)?),
                    stack: Vec::new(),
                }),
                // those that cost least
                "locks" => {}
                "frame" if !w.locks.is_empty() => {
                    let frame = Frame::read(fields.get(1).ok_or_else(bad)?);
                    w.locks.last_mut().ok_or_else(bad)?.stack.push(frame);
                }
                "frame" => {
                    let line = w.lines.last_mut().ok_or_else(bad)?;
                    let stack = line.sites.last_mut().map_or(&mut line.origin, |s| &mut s.stack);
                    stack.push(Frame::read(fields.get(1).ok_or_else(bad)?));
                }
                "heap" => {
                    let place = format!("byte {} of a heap block of {} bytes", number(2)?, number(1)?);
                    w.lines.last_mut().ok_or_else(bad)?.place = place;
                }
                "static" => {
                    let place = format!("byte {} of static {}", number(2)?, fields[1]);
                    w.lines.last_mut().ok_or_else(bad)?.place = place;
                }
                "stack" => w.lines.last_mut().ok_or_else(bad)?.place = "a thread's stack or its thread-locals".into(),
                "mapping" => {
                    let place = format!("byte {} of mapping {}", number(1)?, fields.get(2).ok_or_else(bad)?);
                    w.lines.last_mut().ok_or_else(bad)?.place = place;
                }
                "site" => {
                    let access = fields.get(1).ok_or_else(bad)?;
                    let bytes = number(4)?;
                    w.lines.last_mut().ok_or_else(bad)?.sites.push(Site {
                        writes: access.contains('w'),
                        locked: access.contains('l'),
                        kernel: access.contains('k'),
                        transfers: number(2)?,
                        bytes: (bytes.trailing_zeros(), 64 - bytes.leading_zeros() - bytes.trailing_zeros()),
                        stack: Vec::new(),
                    });
                }
                "rest" => {
                    rest_shared = number(2)? as usize;
                    moved += number(3)?;
                    commit_moved += number(4)?;
                }
                "end" => whole = true,
                _ => return Err(bad()),
            }
        }
        if !whole {
            return Err(Error::Cell("the tool's report ends early".into()));
        }
        for l in &mut w.lines {
            l.origin = cut(&l.origin);
            for s in &mut l.sites {
                s.stack = cut(&s.stack);
            }
        }
        for l in &mut w.locks {
            l.stack = cut(&l.stack);
        }
        w.shared_lines = rest_shared + w.lines.iter().filter(|l| l.sharing != Sharing::Before).count();
        w.transfers = per_op(moved);
        w.hottest = w.lines.iter().map(|l| l.transfers).fold(0.0, f64::max);
        w.calls = per_op(calls);
        w.commit_transfers = commit_moved as f64 / commits.max(1) as f64;
        w.lines.sort_by(|a, b| b.transfers.total_cmp(&a.transfers));
        Ok(w)
    }
}

/// Names of the calls that are likely here, by their number on x86-64.
fn call_name(number: &str) -> &str {
    const NAMES: &[(&str, &str)] = &[
        ("9", "mmap"),
        ("11", "munmap"),
        ("17", "pread64"),
        ("18", "pwrite64"),
        ("24", "sched_yield"),
        ("28", "madvise"),
        ("74", "fsync"),
        ("75", "fdatasync"),
        ("202", "futex"),
        ("295", "preadv"),
        ("296", "pwritev"),
        ("324", "membarrier"),
        ("327", "preadv2"),
        ("328", "pwritev2"),
        ("426", "io_uring_enter"),
    ];
    NAMES.iter().find(|n| n.0 == number).map_or(number, |n| n.1)
}

fn read_number(text: &str) -> Option<u64> {
    match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16).ok(),
        None => text.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REPORT: &str = "\
sum\tforeground\t10\t500\t20\t30\t4000
call\tforeground\t296\t10
sum\tbackground\t1\t900\t1\t0\t10000
call\tbackground\tfdatasync\t1
line\t0x1000\ttrue\t20\t2\t0x7\t0x3
heap\t256\t16\t1
frame\t__rust_alloc (/rustc/1/library/alloc/src/alloc.rs:95)
frame\tmake<T> (/home/x/braidfs/crates/engine/src/domain/mod.rs:7)
site\trwl\t15\t0x3\t0xff00
frame\tUnknownInlinedFun (/rustc/1/library/core/src/sync/atomic.rs:9)
frame\tread<A::B> (/home/x/braidfs/crates/sync/src/locks.rs:185)
frame\tenter (/home/x/braidfs/crates/engine/src/domain/tx.rs:8)
frame\tcall (/home/x/.cargo/registry/src/crates/other/lib.rs:1)
site\tr\t5\t0x4\t0xff0000
line\t0x2000\tbefore\t10\t0\t0x1\t0x1
mapping\t77\t(anonymous)
rest\t3\t2\t4\t50
lock\t0x3\t20\t10\t1000\t5
frame\tlock (/home/x/braidfs/crates/sync/src/locks.rs:105)
frame\tadd (/home/x/braidfs/crates/engine/src/braid/vacated.rs:70)
locks\t1\t100
end
";

    #[test]
    fn a_report_is_read() {
        let w = Window::read(REPORT, 10, 2).expect("a report");
        assert_eq!((w.ops, w.shared_lines, w.lines.len()), (10, 3, 2));
        assert_eq!((w.transfers, w.hottest, w.calls, w.clocks), (3.4, 2.0, 1.0, 3.0));
        assert_eq!((w.accesses, w.locked, w.commit_transfers, w.instructions), (50.0, 2.0, 26.0, 400.0));
        let k = &w.locks[0];
        assert_eq!((k.cpus, k.holds, k.handoffs, k.instructions, k.transfers), (2, 2.0, 1.0, 100.0, 0.5));
        assert_eq!(k.frame().map(|f| f.at.as_str()), Some("crates/engine/src/braid/vacated.rs:70"));
        assert_eq!(w.call_names, [("pwritev".to_owned(), 10)]);
        let l = &w.lines[0];
        assert_eq!((l.sharing, l.transfers, l.cpus, l.writers), (Sharing::True, 2.0, 3, 2));
        assert_eq!(l.place, "byte 16 of a heap block of 256 bytes");
        assert_eq!(l.allocator().map(|f| f.at.as_str()), Some("crates/engine/src/domain/mod.rs:7"));
        let s = &l.sites[0];
        assert_eq!((s.writes, s.locked, s.kernel, s.bytes), (true, true, false, (8, 8)));
        assert_eq!(s.frame().map(|f| f.at.as_str()), Some("crates/engine/src/domain/tx.rs:8"));
        assert_eq!(s.stack.len(), 3, "the innermost, and those of the project: {:?}", s.stack);
        assert!(l.mentions("domain/tx.rs") && l.mentions("heap block") && !l.mentions("flush.rs"));
        assert_eq!(w.lines[1].sharing, Sharing::Before);
    }

    #[test]
    fn half_a_report_is_none() {
        assert!(Window::read(REPORT.strip_suffix("end\n").expect("its end"), 10, 2).is_err());
        assert!(Window::read("line\t0x1\tmaybe\t1\t1\t1\t1\nend\n", 1, 0).is_err());
        assert!(Window::read("frame\tf (a.rs:1)\nend\n", 1, 0).is_err());
        assert!(Window::read("surprise\nend\n", 1, 0).is_err());
    }
}
