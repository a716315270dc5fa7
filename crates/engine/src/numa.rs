//! NUMA: which nodes there are, and how the kernel is told where memory and threads belong. What goes to which node,
//! `domain/placed.rs` decides.

mod system;
pub(crate) mod topology;

pub use system::System;
pub use topology::{Allowed, Node, Topology};

use std::io;
use std::sync::Arc;

/// How the kernel is told. Tests record what it would be told.
pub trait Binder: Send + Sync + std::fmt::Debug {
    /// Pages of `bytes` bytes from address `at` on, a mapping of which nothing was touched, come from this node where it has
    /// memory left, and else from another one.
    ///
    /// # Errors
    /// Of the kernel, which may know no nodes or not allow it: the memory is good all the same.
    fn bind_memory(&self, at: usize, bytes: usize, node: u32) -> io::Result<()>;

    /// The calling thread runs on these CPUs, as far as the process may.
    ///
    /// # Errors
    /// Of the kernel: the thread runs where it did.
    fn bind_thread(&self, cpus: &[u32]) -> io::Result<()>;
}

/// Whether memory and threads of domains are placed by NUMA node (`numa=`).
#[derive(Debug, Clone, Default)]
pub enum Numa {
    /// Where the machine has several nodes that the process may use.
    #[default]
    Auto,
    /// Nowhere: memory lies where the thread that first touches it runs.
    Off,
    /// As if the machine were this one; for tests and experiments.
    Given {
        /// Its nodes.
        topology: Topology,
        /// Who is told where things belong.
        binder: Arc<dyn Binder>,
    },
}

/// Says once in the life of the process that the kernel does not place things as it is told.
pub(crate) fn tell_refused(what: &str, e: &io::Error) {
    static TOLD: std::sync::Once = std::sync::Once::new();
    TOLD.call_once(|| tracing::warn!("no placement by NUMA node: {what}: {e}; going on without"));
}

#[cfg(test)]
pub(crate) mod recorder {
    use super::Binder;
    use braidfs_sync::plain::Mutex;
    use std::io;

    /// A machine that is told where things belong, and does nothing.
    #[derive(Debug, Default)]
    pub struct Recorder {
        /// Bytes and node.
        pub memory: Mutex<Vec<(usize, u32)>>,
        /// Name of the thread, and CPUs.
        pub threads: Mutex<Vec<(String, Vec<u32>)>>,
        /// The error that it answers with.
        pub refuses: Option<i32>,
    }

    impl Recorder {
        fn answer(&self) -> io::Result<()> {
            self.refuses.map_or(Ok(()), |e| Err(io::Error::from_raw_os_error(e)))
        }
    }

    impl Binder for Recorder {
        fn bind_memory(&self, at: usize, bytes: usize, node: u32) -> io::Result<()> {
            assert_eq!(at % 4096, 0);
            self.memory.lock().push((bytes, node));
            self.answer()
        }
        fn bind_thread(&self, cpus: &[u32]) -> io::Result<()> {
            let name = std::thread::current().name().unwrap_or_default().to_owned();
            self.threads.lock().push((name, cpus.to_vec()));
            self.answer()
        }
    }
}
