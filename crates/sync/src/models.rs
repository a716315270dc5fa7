//! Models under loom, which explores the orders in which threads run and in which their stores become visible.
//!
//! loom knows no order of all `SeqCst` accesses, only that of fences: the models run the code for processors without a
//! locked exchange.

use crate::bias::Bias;
use crate::published::{Line, before_looking};
use loom::cell::UnsafeCell;
use loom::sync::{Arc, Mutex};
use loom::thread;

const LOCK: usize = 64;

/// A biased lock: the lock below is a mutex, which keeps writers and who counts turns apart.
struct Model {
    bias: Bias,
    lines: [Line; 2],
    below: Mutex<()>,
    value: UnsafeCell<(u32, u32)>,
}

impl Model {
    fn read(&self, thread: usize) {
        if let Some(place) = self.bias.enter(|| self.lines[thread].publish(LOCK)) {
            // loom tells where a writer is about
            self.value.with(|v| assert_eq!(unsafe { (*v).0 }, unsafe { (*v).1 }));
            place.clear();
            return;
        }
        let _below = self.below.lock().unwrap();
        self.value.with(|v| assert_eq!(unsafe { (*v).0 }, unsafe { (*v).1 }));
        // two turns set the mark
        self.bias.turn(thread as u32 + 1, 2);
    }
    fn write(&self) {
        let _below = self.below.lock().unwrap();
        if self.bias.clear() {
            before_looking();
            for line in &self.lines {
                while line.has(LOCK) {
                    thread::yield_now();
                }
            }
        }
        self.value.with_mut(|v| unsafe {
            (*v).0 += 1;
            (*v).1 += 1;
        });
    }
}

fn model() -> Arc<Model> {
    let m = Model {
        bias: Bias::new(),
        lines: [Line::new(), Line::new()],
        below: Mutex::new(()),
        value: UnsafeCell::new((0, 0)),
    };
    m.bias.set();
    Arc::new(m)
}

// What each thread does, with the mark set at first.
fn run(one: &'static [u8], other: &'static [u8]) {
    let mut b = loom::model::Builder::new();
    b.preemption_bound = Some(3);
    b.check(move || {
        let m = model();
        let threads: Vec<_> = [one, other]
            .into_iter()
            .enumerate()
            .map(|(i, ops)| {
                let m = m.clone();
                thread::spawn(move || ops.iter().for_each(|op| if *op == b'r' { m.read(i) } else { m.write() }))
            })
            .collect();
        threads.into_iter().for_each(|t| t.join().unwrap());
    });
}

#[test]
fn a_writer_sees_published_readers() {
    run(b"rr", b"w");
    run(b"r", b"ww");
}

#[test]
fn readers_after_a_new_mark_see_what_was_written() {
    run(b"rwr", b"rr");
}
