//! Benchmarks of braidfs.
//!
//! [`speed`] times the library beside the same operations by system calls on tmpfs and ext4, in interleaved rounds;
//! [`traffic`] counts what reaches the device; [`memory`] looks at the resident set. Counts are deterministic and have
//! tests; times are for people. Every figure comes with its goal and says whether it is met.
//!
//! Not promised: figures that mean something on a machine that does other work meanwhile.

pub mod memory;
pub mod speed;
pub mod subject;
pub mod table;
pub mod traffic;

/// What went wrong: benchmarks are programs, not libraries, and only report it.
pub type Error = Box<dyn std::error::Error + Send + Sync>;
/// Result of a benchmark.
pub type Result<T> = std::result::Result<T, Error>;
