//! Memory that pieces of journals are read to, one journal after the other.
//!
//! The records of a journal stay where they were read to until they are replayed. Then the next one is read to the same memory:
//! to clear memory that was not touched before takes the system as long as all that is done with the bytes.

use braidfs_device::AlignedBuf;
use braidfs_sync::plain::Mutex;
use std::sync::Arc;

/// Buffers that are kept at most: 128 MiB, where journals are not small.
const KEPT: usize = 32;

/// See the module. Those of a volume, from its first scan until [`Self::close`].
#[derive(Debug, Default)]
pub(crate) struct Buffers(Mutex<Spare>);

#[derive(Debug, Default)]
struct Spare {
    bufs: Vec<AlignedBuf>,
    closed: bool,
}

impl Buffers {
    /// A buffer of so many bytes at least, in which anything may stand.
    pub fn take(self: &Arc<Self>, bytes: usize) -> Buffer {
        let spare = {
            let mut spare = self.0.lock();
            let at = spare.bufs.iter().rposition(|b| b.len() >= bytes);
            at.map(|at| spare.bufs.swap_remove(at))
        };
        Buffer { buf: Some(spare.unwrap_or_else(|| AlignedBuf::zeroed(bytes))), of: self.clone() }
    }

    /// No journal is read any more, or hardly any.
    pub fn close(&self) {
        let mut spare = self.0.lock();
        spare.closed = true;
        spare.bufs = Vec::new();
    }
}

/// Memory that goes back to the [`Buffers`] which it came from.
#[derive(Debug)]
pub(crate) struct Buffer {
    /// `None` while it is dropped.
    buf: Option<AlignedBuf>,
    of: Arc<Buffers>,
}

impl Buffer {
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.buf.as_deref_mut().unwrap_or_default()
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        self.buf.as_deref().unwrap_or_default()
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let Some(buf) = self.buf.take() else { return };
        let mut spare = self.of.0.lock();
        if !spare.closed && spare.bufs.len() < KEPT {
            spare.bufs.push(buf);
        }
    }
}
