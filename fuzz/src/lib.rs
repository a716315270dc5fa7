//! Fuzz targets: each a function of some bytes that must not panic, hang or take memory without bound.
//!
//! - [`structures`]: every decoder of the format, behind right checksums.
//! - [`journal`]: chunks of any records in the journal of a volume that crashed, replayed.
//! - [`image`]: edits of metadata blocks, sealed again; then mounted, read, written, checked and repaired.
//! - [`operations`]: any sequence of operations, remounts and crashes, compared with the model.
//!
//! The same functions run under libFuzzer (`cargo fuzz`), in the program of this crate with a mutator of its own that
//! knows no coverage (stable), and over the kept inputs in `corpus/` as a test.

pub mod image;
pub mod journal;
pub mod mutate;
pub mod operations;
pub mod structures;

/// A target: its name, which is that of its directory in `corpus/`, and the function.
pub type Target = (&'static str, fn(&[u8]));

/// All targets that there are.
pub const TARGETS: [Target; 4] = [
    ("structures", structures::run),
    ("journal", journal::run),
    ("image", image::run),
    ("operations", operations::run),
];

/// Takes numbers from the front of the input; zeros when it is used up.
#[derive(Debug)]
pub struct Input<'a>(pub &'a [u8]);

impl Input<'_> {
    /// The next byte of the input; 0 at its end.
    pub fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    /// A number of `n` bytes.
    pub fn number(&mut self, n: usize) -> u64 {
        (0..n).fold(0, |x, i| x | u64::from(self.byte()) << (8 * i))
    }

    /// Whether all was taken.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
