//! Requests, and the batches of them that callers wait for.

use super::wire::{self, Command};
use crate::BLOCK_BYTES;
use braidfs_sync::device::Mutex;
use braidfs_sync::{Condvar, rank};
use std::io;
use std::sync::Arc;

/// Lives until it is answered, whatever connection it is sent on.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) cookie: u64,
    pub(super) op: Op,
    /// Its number among the retained writes.
    pub(super) kept: Option<u64>,
    pub(super) batch: Arc<Batch>,
    pub(super) index: usize,
    /// Of the owner record: where it is late it ends, and nothing else does.
    pub(super) record: bool,
}

/// What is asked of the server. Lengths are at most [`super::CHUNK_BYTES`], of a TRIM [`super::TRIM_BYTES`].
#[derive(Debug, Clone)]
pub(super) enum Op {
    Read {
        offset: u64,
        bytes: u32,
    },
    /// `kept`: it is sent again where it may not be durable; not so the owner record, which has another way.
    Write {
        block: u64,
        data: Arc<[u8]>,
        fua: bool,
        kept: bool,
    },
    Flush,
    Trim {
        offset: u64,
        bytes: u32,
        fua: bool,
    },
}

impl Op {
    pub(super) fn head(&self, cookie: u64) -> [u8; wire::REQUEST_BYTES] {
        match self {
            Self::Read { offset, bytes } => wire::request(Command::Read, false, cookie, *offset, *bytes),
            Self::Write { block, data, fua, .. } => {
                wire::request(Command::Write, *fua, cookie, block * BLOCK_BYTES as u64, data.len() as u32)
            }
            Self::Flush => wire::request(Command::Flush, false, cookie, 0, 0),
            Self::Trim { offset, bytes, fua } => wire::request(Command::Trim, *fua, cookie, *offset, *bytes),
        }
    }

    pub(super) fn data(&self) -> &[u8] {
        match self {
            Self::Write { data, .. } => data,
            _ => &[],
        }
    }

    /// Bytes of the answer behind its head.
    pub(super) fn answer_bytes(&self) -> usize {
        match self {
            Self::Read { bytes, .. } => *bytes as usize,
            _ => 0,
        }
    }

    pub(super) fn changes(&self) -> bool {
        matches!(self, Self::Write { .. } | Self::Trim { .. })
    }
}

/// The requests that one caller waits for.
#[derive(Debug)]
pub(super) struct Batch {
    state: Mutex<BatchState, rank::NbdBatch>,
    done: Condvar,
}

#[derive(Debug)]
struct BatchState {
    left: usize,
    error: Option<io::Error>,
    /// What was read, by the index of the request.
    data: Vec<Vec<u8>>,
}

impl Batch {
    pub(super) fn of(requests: usize) -> Arc<Self> {
        let state = BatchState { left: requests, error: None, data: vec![Vec::new(); requests] };
        Arc::new(Self { state: Mutex::new(state), done: Condvar::default() })
    }

    pub(super) fn end(&self, index: usize, result: io::Result<Vec<u8>>) {
        let mut state = self.state.lock();
        match result {
            Ok(data) => state.data[index] = data,
            Err(e) => drop(state.error.get_or_insert(e)),
        }
        state.left -= 1;
        if state.left == 0 {
            self.done.notify_all();
        }
    }

    /// The first error, or what was read, once all have ended.
    pub(super) fn wait(&self) -> io::Result<Vec<Vec<u8>>> {
        let mut state = self.state.lock();
        while state.left > 0 {
            self.done.wait(&mut state);
        }
        match state.error.take() {
            Some(e) => Err(e),
            None => Ok(std::mem::take(&mut state.data)),
        }
    }
}
