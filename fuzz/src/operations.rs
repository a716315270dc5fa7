//! Operations on a volume and on the model, compared; remounts and crashes between them.
//!
//! Input: a byte for the options, then three per step: what it is, and the seed of its operands.

use crate::Input;
use braidfs_testkit::generate::{Generator, Profile};
use braidfs_testkit::run::{Act, Runner, Setup, acts_to_rust};

/// Steps of a run at most.
const STEPS: usize = 120;

/// Runs the steps.
///
/// # Panics
/// Where the volume differs from the model: with the steps as Rust code.
pub fn run(data: &[u8]) {
    let mut input = Input(data);
    let setup = Setup::vary(u64::from(input.byte()));
    let mut acts = Vec::new();
    let mut r = Runner::empty(&setup).unwrap_or_else(|e| panic!("an empty volume: {e}"));
    while !input.is_empty() && acts.len() < STEPS {
        let (what, seed) = (input.byte(), input.number(2));
        let act = match what {
            0..4 => Act::Remount,
            4..10 => Act::Crash { seed },
            10..16 => Act::Compare,
            _ => Act::Do(Generator::new(seed, Profile { objects: 30, ..Profile::default() }).next(&r.model)),
        };
        acts.push(act.clone());
        if let Err(e) = r.act(&act) {
            r.abandon();
            panic!("{e}\n{}", acts_to_rust(&acts));
        }
    }
    if let Err(e) = r.finish() {
        panic!("{e}\n{}", acts_to_rust(&acts));
    }
}
