//! Path look-ups five levels deep: MRPL MRPM MRPH and their background writers, and `stat`.

use super::TestId;
use crate::Result;
use crate::error::On;
use crate::fs::{Fs, OpenHow};
use crate::names::{Name, Rng};
use crate::worker::{Ctx, Load, Step};
use std::collections::HashSet;

const DEPTH: usize = 5;
/// Names that the background writer makes and removes are none of those that readers open.
const WRITTEN: u64 = 8;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sharing {
    Private,
    Any,
    Same,
}

pub fn build<F: Fs>(id: &TestId, c: &Ctx<F>) -> Box<dyn Load<F>> {
    let sharing = match id.test.name {
        "MRPL" | "stat" => Sharing::Private,
        "MRPM" => Sharing::Any,
        _ => Sharing::Same,
    };
    if c.background {
        return Box::new(Writer { sharing, name: c.name(), rng: c.rng(), made: HashSet::new() });
    }
    let stat = c.original() || id.test.name == "stat";
    Box::new(Walk { sharing, stat, name: c.name(), rng: c.rng(), last: c.id as u32 })
}

/// The first `depth` parts of a path: the worker's own chain, or a path of the shared tree.
fn parts(sharing: Sharing, worker: u64, branch: u64, random: &mut Rng) -> [u64; DEPTH] {
    match sharing {
        Sharing::Private => [worker, 0, 0, 0, 0],
        Sharing::Same => [0; DEPTH],
        Sharing::Any => std::array::from_fn(|_| random.below(branch)),
    }
}

/// A worker that looks up paths of five levels.
struct Walk {
    sharing: Sharing,
    /// stat; else open and close.
    stat: bool,
    name: Name,
    rng: Rng,
    /// First number of the original's last path.
    last: u32,
}

/// The original's random path: five numbers in a row of the C library's old generator, modulo 8. The low bits of that
/// one have a period of 8, so that there are eight such paths in all.
fn original_parts(last: &mut u32) -> [u64; DEPTH] {
    let step = |x: u32| x.wrapping_mul(1_103_515_245).wrapping_add(12_345);
    *last = step(*last);
    let mut x = *last;
    std::array::from_fn(|_| {
        let part = u64::from(x % 8);
        x = step(x);
        part
    })
}

impl Walk {
    /// The whole tree: `branch` entries in each directory, files at the fifth level. A tree that is there is used.
    fn tree<F: Fs>(&mut self, c: &Ctx<F>) -> Result<()> {
        let branch = if c.original() { 8 } else { c.scale.branch };
        let n = &mut self.name;
        let dir = |path: &std::ffi::CStr| c.fs.ensure_dir(path).on("mkdir", path);
        for i in 0..branch {
            dir(n.set(format_args!("{i}")))?;
            for j in 0..branch {
                dir(n.set(format_args!("{i}/{j}")))?;
                for k in 0..branch {
                    dir(n.set(format_args!("{i}/{j}/{k}")))?;
                    for l in 0..branch {
                        dir(n.set(format_args!("{i}/{j}/{k}/{l}")))?;
                        for m in 0..branch {
                            let path = n.set(format_args!("{i}/{j}/{k}/{l}/{m}"));
                            drop(c.fs.open(path, OpenHow::CREATE).on("open", path)?);
                        }
                    }
                }
            }
        }
        Ok(())
    }
}

impl<F: Fs> Load<F> for Walk {
    fn share(&mut self, c: &Ctx<F>) -> Result<()> {
        if self.sharing == Sharing::Private { Ok(()) } else { self.tree(c) }
    }
    fn prepare(&mut self, c: &Ctx<F>) -> Result<()> {
        let n = &mut self.name;
        if self.sharing == Sharing::Private {
            let id = c.id;
            for depth in 0..DEPTH - 1 {
                let path = n.set(format_args!("{id}{}", &"/0/0/0"[..2 * depth]));
                c.fs.ensure_dir(path).on("mkdir", path)?;
            }
            let path = n.set(format_args!("{id}/0/0/0/0"));
            drop(c.fs.open(path, OpenHow::CREATE).on("open", path)?);
        } else {
            n.set(format_args!("0/0/0/0/0"));
        }
        Ok(())
    }
    fn step(&mut self, c: &Ctx<F>) -> Result<Step> {
        // a fixed path is built once
        let path = match self.sharing {
            Sharing::Any => {
                let [i, j, k, l, m] = if c.original() {
                    original_parts(&mut self.last)
                } else {
                    parts(self.sharing, 0, c.scale.branch, &mut self.rng)
                };
                self.name.set(format_args!("{i}/{j}/{k}/{l}/{m}"))
            }
            // the original formats this path every time
            Sharing::Same if c.original() => {
                // numbers that the compiler does not know, or it would format them itself
                let [i, j, k, l, m] = std::hint::black_box([0u64; DEPTH]);
                self.name.set(format_args!("{i}/{j}/{k}/{l}/{m}"))
            }
            _ => self.name.get(),
        };
        if self.stat {
            std::hint::black_box(c.fs.stat(path, true).on("stat", path)?);
        } else {
            drop(c.fs.open(path, OpenHow::READ).on("open", path)?);
        }
        Ok(Step::Did(1))
    }
}

/// The background writer: makes and removes files in the directories that readers walk through, at any level.
struct Writer {
    sharing: Sharing,
    name: Name,
    rng: Rng,
    made: HashSet<([u64; DEPTH], usize)>,
}

impl<F: Fs> Load<F> for Writer {
    fn prepare(&mut self, _: &Ctx<F>) -> Result<()> {
        Ok(())
    }
    fn step(&mut self, c: &Ctx<F>) -> Result<Step> {
        let level = self.rng.below(DEPTH as u64) as usize;
        let reader = self.rng.below(c.foreground as u64);
        let branch = if c.original() { 8 } else { c.scale.branch };
        let mut p = parts(self.sharing, reader, branch, &mut self.rng);
        p[level] = WRITTEN + self.rng.below(branch);
        p[level + 1..].fill(0);
        let [i, j, k, l, m] = p;
        let path = match level {
            // above the readers' private chains there is the root
            0 => self.name.set(format_args!("w{i}")),
            1 => self.name.set(format_args!("{i}/w{j}")),
            2 => self.name.set(format_args!("{i}/{j}/w{k}")),
            3 => self.name.set(format_args!("{i}/{j}/{k}/w{l}")),
            _ => self.name.set(format_args!("{i}/{j}/{k}/{l}/w{m}")),
        };
        if self.made.remove(&(p, level)) {
            c.fs.unlink(path).on("unlink", path)?;
        } else {
            drop(c.fs.open(path, OpenHow::FRESH).on("open", path)?);
            self.made.insert((p, level));
        }
        Ok(Step::Did(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_original_opens_eight_files() {
        let mut last = 0;
        let all: HashSet<_> = (0..10_000).map(|_| original_parts(&mut last)).collect();
        assert_eq!(all.len(), 8);
    }

    #[test]
    fn ours_opens_all() {
        let mut rng = Rng::new(42, 0);
        let all: HashSet<_> = (0..10_000).map(|_| parts(Sharing::Any, 0, 4, &mut rng)).collect();
        assert_eq!(all.len(), 1024);
    }
}
