//! Live progress on a terminal; silent in a pipe.

use super::Turn;
use crate::report::figure;
use crate::results::Run;
use indicatif::{ProgressBar, ProgressStyle};
use std::cell::Cell;
use std::time::{Duration, Instant};

/// Between two redraws: drawing takes CPU from what is measured.
const REDRAW: Duration = Duration::from_millis(200);

/// The bar, with the cell that runs and its operations.
#[derive(Debug)]
pub struct Progress {
    bar: ProgressBar,
    drawn: Cell<Instant>,
    cell: std::cell::RefCell<String>,
}

impl Progress {
    /// For so many turns.
    pub fn new(turns: usize) -> Self {
        let bar = ProgressBar::new(turns as u64);
        let style = ProgressStyle::with_template("{bar:24} {pos}/{len}  {eta:>4} left  {wide_msg}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        Self { bar, drawn: Cell::new(Instant::now()), cell: std::cell::RefCell::default() }
    }
    /// A turn begins.
    pub fn next(&self, turn: &Turn<'_>) {
        let text = format!("{} on {}, {} core(s), #{}", turn.test, turn.target, turn.cores, turn.rep + 1);
        self.bar.set_message(text.clone());
        self.cell.replace(text);
    }
    /// It has done so many operations.
    pub fn tick(&self, ops: u64) {
        if self.drawn.get().elapsed() >= REDRAW {
            self.drawn.set(Instant::now());
            self.bar.set_message(format!("{}: {ops} operations", self.cell.borrow()));
        }
    }
    /// It is through.
    pub fn done(&self, run: &Run) {
        self.bar.inc(1);
        self.bar.set_message(format!("{}: {}/s", self.cell.borrow(), figure(run.throughput)));
    }
    /// All repetitions are done: takes the bar away.
    pub fn end(&self) {
        self.bar.finish_and_clear();
    }
}
