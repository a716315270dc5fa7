//! Names made, removed and moved: MWCL MWCM MWUL MWUM MWRL MWRM.
//!
//! What runs out (names to make, files to remove or move) is put back outside the clock, by all workers at once.

use crate::Result;
use crate::error::On;
use crate::fs::{Fs, OpenHow, Page};
use crate::names::Name;
use crate::worker::{Ctx, Load, Step};
use std::ffi::CStr;
use std::time::{Duration, Instant};

/// Makes the directory of this worker, or the shared one.
fn make_dir<F: Fs>(c: &Ctx<F>, name: &mut Name, shared: bool) -> Result<()> {
    let dir = if shared { name.set(format_args!("share")) } else { name.set(format_args!("{}", c.id)) };
    c.fs.ensure_dir(dir).on("mkdir", dir)
}

/// The `i`th file of this worker. The original's shared directory is the root, and its names are longer.
fn file<'n, F: Fs>(c: &Ctx<F>, name: &'n mut Name, shared: bool, i: u64) -> &'n CStr {
    match (shared, c.original()) {
        (false, false) => name.set(format_args!("{}/{i}", c.id)),
        (true, false) => name.set(format_args!("share/{}.{i}", c.id)),
        (false, true) => name.set(format_args!("{}/private_file-{i}.dat", c.id)),
        (true, true) => name.set(format_args!("shared_fil-{}-{i}.dat", c.id)),
    }
}

/// MWCL, MWCM: creates files in a directory of the worker's own, or of all.
pub struct Create {
    shared: bool,
    name: Name,
    page: Box<Page>,
    made: u64,
}

impl Create {
    pub fn new<F: Fs>(c: &Ctx<F>, shared: bool) -> Self {
        Self { shared, name: c.name(), page: Page::new(), made: 0 }
    }
}

impl<F: Fs> Load<F> for Create {
    fn prepare(&mut self, c: &Ctx<F>) -> Result<()> {
        if self.shared && c.original() { Ok(()) } else { make_dir(c, &mut self.name, self.shared) }
    }
    fn step(&mut self, c: &Ctx<F>) -> Result<Step> {
        if self.made == c.scale.files && !c.original() {
            return Ok(Step::Empty);
        }
        let path = file(c, &mut self.name, self.shared, self.made);
        let how = if c.original() { OpenHow::CREATE } else { OpenHow::FRESH };
        let file = c.fs.open(path, how).on("open", path)?;
        if self.shared && c.original() {
            // the original's MWCM writes a page
            c.fs.append(&file, &self.page.0).on("write", path)?;
        }
        drop(file);
        self.made += 1;
        Ok(Step::Did(1))
    }
    fn refill(&mut self, c: &Ctx<F>) -> Result<()> {
        for i in 0..std::mem::take(&mut self.made) {
            let path = file(c, &mut self.name, self.shared, i);
            c.fs.unlink(path).on("unlink", path)?;
        }
        Ok(())
    }
}

/// MWUL, MWUM: removes files of a directory of the worker's own, or of all.
pub struct Unlink {
    shared: bool,
    name: Name,
    /// So many files were made.
    files: u64,
    /// Of which the first so many are gone.
    gone: u64,
}

impl Unlink {
    pub fn new<F: Fs>(c: &Ctx<F>, shared: bool) -> Self {
        Self { shared, name: c.name(), files: 0, gone: 0 }
    }
}

impl<F: Fs> Load<F> for Unlink {
    fn prepare(&mut self, c: &Ctx<F>) -> Result<()> {
        if !(self.shared && c.original()) {
            make_dir(c, &mut self.name, self.shared)?;
        }
        while c.original() || self.files < c.scale.files {
            let path = file(c, &mut self.name, self.shared, self.files);
            match c.fs.open(path, OpenHow::CREATE).on("open", path) {
                // the original fills the file system
                Err(e) if c.original() && e.no_space() => break,
                done => drop(done?),
            }
            self.files += 1;
        }
        Ok(())
    }
    fn step(&mut self, c: &Ctx<F>) -> Result<Step> {
        if self.gone == self.files {
            return Ok(Step::Empty);
        }
        let path = file(c, &mut self.name, self.shared, self.gone);
        c.fs.unlink(path).on("unlink", path)?;
        self.gone += 1;
        Ok(Step::Did(1))
    }
    fn refill(&mut self, c: &Ctx<F>) -> Result<()> {
        for i in 0..std::mem::take(&mut self.gone) {
            let path = file(c, &mut self.name, self.shared, i);
            drop(c.fs.open(path, OpenHow::FRESH).on("open", path)?);
        }
        Ok(())
    }
}

/// MWRL: `N` becomes `N.2`; when all have, back again. The original renames one file from number to number.
pub struct Rename {
    from: Name,
    to: Name,
    next: u64,
    back: bool,
}

impl Rename {
    pub fn new<F: Fs>(c: &Ctx<F>) -> Self {
        Self { from: c.name(), to: c.name(), next: 0, back: false }
    }
}

impl<F: Fs> Load<F> for Rename {
    fn prepare(&mut self, c: &Ctx<F>) -> Result<()> {
        make_dir(c, &mut self.from, false)?;
        let files = if c.original() { 1 } else { c.scale.files };
        for i in 0..files {
            let path = file(c, &mut self.from, false, i);
            let file = c.fs.open(path, OpenHow::CREATE).on("open", path)?;
            if c.original() {
                c.fs.fsync(&file, false).on("fsync", path)?;
            }
        }
        Ok(())
    }
    fn step(&mut self, c: &Ctx<F>) -> Result<Step> {
        let i = self.next;
        self.next += 1;
        let (from, to) = if c.original() {
            (file(c, &mut self.from, false, i), file(c, &mut self.to, false, i + 1))
        } else {
            if self.next == c.scale.files {
                self.next = 0;
            }
            let (a, b) = (file(c, &mut self.from, false, i), self.to.set(format_args!("{}/{i}.2", c.id)));
            if self.back { (b, a) } else { (a, b) }
        };
        c.fs.rename(from, to).on("rename", from)?;
        if self.next == 0 {
            self.back = !self.back;
        }
        Ok(Step::Did(1))
    }
}

/// MWRM: from the private directory to the shared one.
pub struct MoveShared {
    from: Name,
    to: Name,
    files: u64,
    moved: u64,
}

impl MoveShared {
    pub fn new<F: Fs>(c: &Ctx<F>) -> Self {
        Self { from: c.name(), to: c.name(), files: 0, moved: 0 }
    }
}

impl<F: Fs> Load<F> for MoveShared {
    fn prepare(&mut self, c: &Ctx<F>) -> Result<()> {
        make_dir(c, &mut self.from, false)?;
        if !c.original() {
            make_dir(c, &mut self.from, true)?;
        }
        // the original makes as many as it can in the time of a measurement, and takes 5 % away again
        let until = Instant::now() + Duration::from_secs_f64(c.seconds);
        let enough = |made: u64| if c.original() { Instant::now() >= until } else { made == c.scale.files };
        while !enough(self.files) {
            let path = file(c, &mut self.from, false, self.files);
            match c.fs.open(path, OpenHow::CREATE).on("open", path) {
                Err(e) if c.original() && e.no_space() => break,
                done => drop(done?),
            }
            self.files += 1;
        }
        if c.original() {
            for _ in 0..(self.files / 20 + 1).min(self.files) {
                self.files -= 1;
                let path = file(c, &mut self.from, false, self.files);
                c.fs.unlink(path).on("unlink", path)?;
            }
        }
        Ok(())
    }
    fn step(&mut self, c: &Ctx<F>) -> Result<Step> {
        if self.moved == self.files {
            return Ok(Step::Empty);
        }
        let from = file(c, &mut self.from, false, self.moved);
        let to = file(c, &mut self.to, true, self.moved);
        c.fs.rename(from, to).on("rename", from)?;
        self.moved += 1;
        Ok(Step::Did(1))
    }
    fn refill(&mut self, c: &Ctx<F>) -> Result<()> {
        for i in 0..std::mem::take(&mut self.moved) {
            let (home, away) = (file(c, &mut self.from, false, i), file(c, &mut self.to, true, i));
            c.fs.rename(away, home).on("rename", away)?;
        }
        Ok(())
    }
    fn empty_ends_all(&self, _: &Ctx<F>) -> bool {
        true
    }
}
