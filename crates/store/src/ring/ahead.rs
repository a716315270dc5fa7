//! Pieces of a journal, read while those before them are searched.
//!
//! One thread does nothing but read, in the order of pieces, and keeps one ahead of those who take them; it needs hardly any time
//! of a CPU. It begins before the scan does: whoever opens a domain reads tables first.

use super::Ring;
use super::buffers::Buffer;
use crate::Result;
use braidfs_format::BLOCK_BYTES;
use braidfs_sync::plain::Mutex;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::{Builder, JoinHandle};

/// A piece by its number, and what lies in it.
type Read = (usize, Result<Buffer>);

/// See the module.
#[derive(Debug)]
pub struct Ahead {
    /// Where the lap begins.
    tail: u64,
    /// `None` while it is dropped.
    read: Option<Mutex<Receiver<Read>>>,
    thread: Option<JoinHandle<()>>,
}

impl Ahead {
    /// Begins to read the lap from `tail` on; `None` where the system starts no thread.
    pub(super) fn begin(ring: &Ring, tail: u64) -> Option<Self> {
        // with no room between them, so that a piece is read while the one before is searched, and no more memory is taken
        let (give, read) = sync_channel(0);
        let ring = ring.clone();
        let work = move || {
            for (i, (first, end)) in ring.pieces(tail).into_iter().enumerate() {
                let bytes = (end - first) as usize * BLOCK_BYTES;
                let mut buf = ring.piece_buffer(bytes);
                let read = ring.store.read(ring.addr(first), &mut buf.bytes_mut()[..bytes]).map(|()| buf);
                if give.send((i, read)).is_err() {
                    return;
                }
            }
        };
        let thread = Builder::new().name("braidfs-ahead".into()).spawn(work).ok()?;
        Some(Self { tail, read: Some(Mutex::new(read)), thread: Some(thread) })
    }

    /// Where the lap begins that it reads.
    pub(super) fn tail(&self) -> u64 {
        self.tail
    }

    /// The next piece that nobody has taken; `None` where there is none.
    pub(super) fn next(&self) -> Option<Read> {
        // who waits for the lock would wait for the piece after this one
        self.read.as_ref()?.lock().recv().ok()
    }
}

impl Drop for Ahead {
    /// The thread ends with the read that is under way.
    fn drop(&mut self) {
        drop(self.read.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
