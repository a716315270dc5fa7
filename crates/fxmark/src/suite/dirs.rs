//! Directory listing: MRDL MRDM and their background writers.

use super::TestId;
use crate::error::On;
use crate::fs::{Fs, OpenHow};
use crate::names::{Name, Rng};
use crate::worker::{Ctx, Load, Step};
use crate::{Error, Result};
use std::time::{Duration, Instant};

pub fn build<F: Fs>(id: &TestId, c: &Ctx<F>) -> Box<dyn Load<F>> {
    let shared = id.test.name == "MRDM";
    if c.background {
        return Box::new(Writer { shared, name: c.name(), rng: c.rng(), missing: None });
    }
    Box::new(List { shared, name: c.name(), dir: None })
}

/// A reader. Corrected, a step lists the whole directory; in the original, it is one call of readdir, which at the end
/// of the directory goes on to answer "no more".
struct List<F: Fs> {
    shared: bool,
    name: Name,
    dir: Option<F::Dir>,
}

impl<F: Fs> List<F> {
    fn make(&mut self, c: &Ctx<F>) -> Result<()> {
        let n = &mut self.name;
        if !(self.shared && c.original()) {
            let dir = if self.shared { n.set(format_args!("share")) } else { n.set(format_args!("{}", c.id)) };
            c.fs.ensure_dir(dir).on("mkdir", dir)?;
        }
        // the original makes as many as it can in the time of a measurement
        let until = Instant::now() + Duration::from_secs_f64(c.seconds);
        let mut i = 0u64;
        loop {
            if if c.original() { Instant::now() >= until } else { i == c.scale.entries } {
                return Ok(());
            }
            let path = match (self.shared, c.original()) {
                (false, _) => n.set(format_args!("{}/entry-{}-{i:06}", c.id, c.id)),
                (true, false) => n.set(format_args!("share/entry-{i:06}")),
                (true, true) => n.set(format_args!("entry-{}-{i:06}", c.id)),
            };
            match c.fs.open(path, OpenHow::CREATE).on("open", path) {
                Err(e) if c.original() && e.no_space() => return Ok(()),
                done => drop(done?),
            }
            i += 1;
        }
    }

    fn path<'n>(shared: bool, c: &Ctx<F>, name: &'n mut Name) -> &'n std::ffi::CStr {
        match (shared, c.original()) {
            (false, _) => name.set(format_args!("{}", c.id)),
            (true, false) => name.set(format_args!("share")),
            (true, true) => name.set(format_args!(".")),
        }
    }
}

impl<F: Fs> Load<F> for List<F> {
    fn share(&mut self, c: &Ctx<F>) -> Result<()> {
        if self.shared && !c.original() { self.make(c) } else { Ok(()) }
    }
    fn prepare(&mut self, c: &Ctx<F>) -> Result<()> {
        if !self.shared || c.original() { self.make(c) } else { Ok(()) }
    }
    fn step(&mut self, c: &Ctx<F>) -> Result<Step> {
        if c.original() {
            let dir = match &mut self.dir {
                Some(dir) => dir,
                none => {
                    let path = Self::path(self.shared, c, &mut self.name);
                    none.insert(c.fs.open_dir(path).on("opendir", path)?)
                }
            };
            c.fs.next_entry(dir).on("readdir", self.name.get())?;
            return Ok(Step::Did(1));
        }
        let path = Self::path(self.shared, c, &mut self.name);
        let mut dir = c.fs.open_dir(path).on("opendir", path)?;
        let mut entries = 0;
        while c.fs.next_entry(&mut dir).on("readdir", path)? {
            entries += 1;
        }
        // `.` and `..` count, too. What a writer in the background takes out or puts back meanwhile may be missed.
        let least = if c.workers > c.foreground { c.scale.entries / 2 } else { c.scale.entries + 2 };
        if entries < least || entries > c.scale.entries + 2 + u64::from(c.workers > c.foreground) * c.scale.entries {
            let text = format!("readdir {}: {entries} entries instead of {least}", path.to_string_lossy());
            return Err(Error::Other(text));
        }
        Ok(Step::Did(entries))
    }
}

/// The background writer: removes an entry of a directory that is listed, and makes it again.
struct Writer {
    shared: bool,
    name: Name,
    rng: Rng,
    /// Whose directory, and which entry.
    missing: Option<(u64, u64)>,
}

impl<F: Fs> Load<F> for Writer {
    fn prepare(&mut self, _: &Ctx<F>) -> Result<()> {
        Ok(())
    }
    fn step(&mut self, c: &Ctx<F>) -> Result<Step> {
        let back = self.missing.take();
        // in the original, how many entries there are depends on the machine: the first is always there
        let entries = if c.original() { 1 } else { c.scale.entries };
        let (worker, i) = back.unwrap_or_else(|| (self.rng.below(c.foreground as u64), self.rng.below(entries)));
        let path = match (self.shared, c.original()) {
            (false, _) => self.name.set(format_args!("{worker}/entry-{worker}-{i:06}")),
            (true, false) => self.name.set(format_args!("share/entry-{i:06}")),
            (true, true) => self.name.set(format_args!("entry-{worker}-{i:06}")),
        };
        if back.is_some() {
            drop(c.fs.open(path, OpenHow::FRESH).on("open", path)?);
        } else {
            c.fs.unlink(path).on("unlink", path)?;
            self.missing = Some((worker, i));
        }
        Ok(Step::Did(1))
    }
}
