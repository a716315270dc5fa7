//! `_commit`: a worker in the background that changes a file beside each reader's and makes all of the file system durable,
//! every 10 ms. What it costs the readers is what a commit costs them (Max, USENIX ATC '21, Figure 8 b).

use crate::Result;
use crate::error::On;
use crate::fs::{Fs, OpenHow, Page};
use crate::worker::{Ctx, Load, Step};
use std::time::{Duration, Instant};

/// From the begin of a commit to that of the next; a longer one is followed by the next at once.
const EVERY: Duration = Duration::from_millis(10);
/// Blocks of a file that is changed.
const BLOCKS: u64 = 16;

/// See the module.
pub struct Committer<F: Fs> {
    files: Vec<F::File>,
    page: Box<Page>,
    next: Instant,
    commits: u64,
}

impl<F: Fs> Committer<F> {
    pub fn new(_: &Ctx<F>) -> Self {
        Self { files: Vec::new(), page: Page::new(), next: Instant::now(), commits: 0 }
    }
}

impl<F: Fs> Load<F> for Committer<F> {
    fn prepare(&mut self, _: &Ctx<F>) -> Result<()> {
        Ok(())
    }
    /// In the readers' own directories, so that the commits are those of their domains.
    fn after_prepare(&mut self, c: &Ctx<F>) -> Result<()> {
        let mut name = c.name();
        let mut open = |reader| {
            let path = name.set(format_args!("{reader}/committed"));
            c.fs.open(path, OpenHow::CREATE).on("open", path)
        };
        self.files = (0..c.foreground).map(&mut open).collect::<Result<_>>()?;
        Ok(())
    }
    fn step(&mut self, c: &Ctx<F>) -> Result<Step> {
        std::thread::sleep(self.next.saturating_duration_since(Instant::now()));
        self.next = Instant::now() + EVERY;
        for file in &self.files {
            let at = self.commits % BLOCKS * self.page.0.len() as u64;
            c.fs.write_all(file, at, &self.page.0).on("pwrite", c"a file beside those that others read")?;
        }
        c.fs.sync().on("syncfs", c".")?;
        self.commits += 1;
        Ok(Step::Did(1))
    }
}
