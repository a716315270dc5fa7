//! The memory of one entry of a queue, which the kernel and a serving thread have in turn: a header (`struct
//! fuse_uring_req_header`: header of the request or answer, structure of the operation, size of the rest) and a payload
//! (the rest of the request: names, data; later the body of the answer).
//!
//! The kernel copies in and out in the context of the serving thread (`fuse_uring_send_in_task`, and when that thread
//! commits), so the two never touch it at the same time. It uses the entry that came back last first, so that of many
//! entries only few are ever in memory.

use super::Reply;
use crate::abi::{InHeader, OutHeader, UringHeader, op};
use crate::fs::MAX_IO_BYTES;
use crate::request::{Answer, Request};
use memmap2::{MmapOptions, UncheckedAdvice};
use rustix::io::Errno;
use std::io;
use zerocopy::{FromBytes, IntoBytes};

/// Where the payload begins in its mapping: an answer wants room for a header in front, which is not used here.
const PAYLOAD: usize = 4096;
/// The kernel wants room for the largest READ and WRITE (`max_payload_sz` in fs/fuse/dev_uring.c).
const PAYLOAD_BYTES: usize = MAX_IO_BYTES as usize;
const HEADER_BYTES: usize = size_of::<UringHeader>();
/// So much of a payload stays in memory once it was used.
const KEPT_BYTES: usize = 64 << 10;

/// Who has the entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    /// The kernel, until a request comes.
    Kernel,
    /// The serving thread.
    Busy,
    /// A request that another thread will answer.
    Deferred,
    /// Nobody any more.
    Dead,
}

/// `struct iovec`, which a thread may take along.
#[derive(Debug)]
#[repr(C)]
pub(super) struct IoVec {
    pub base: usize,
    pub len: usize,
}
const _: () = assert!(size_of::<IoVec>() == size_of::<libc::iovec>());

/// One request of a ring: memory that the kernel fills, and the answer to it.
#[derive(Debug)]
pub(super) struct Entry {
    header: Box<[u8; HEADER_BYTES]>,
    /// Its body is the payload: what is read goes there without a copy.
    pub answer: Answer,
    /// Header and payload, as the kernel wants them told.
    pub iovecs: Box<[IoVec; 2]>,
    pub qid: u16,
    pub state: State,
    /// Number of the request that it holds, by the kernel.
    pub commit_id: u64,
    /// The same, by the ring: one that was served before has another one. 0: none yet.
    pub request: u64,
    /// The kernel got it after it had refused others of its queue, and has not said yet that it has it.
    pub on_trial: bool,
    unique: u64,
    /// Bytes of the payload that may be in memory, and that the last request used.
    used: usize,
    last: usize,
    /// Another thread has the memory of the answer.
    pub lent: bool,
    /// An answer that came before that came back.
    pub early: Option<Result<Vec<u8>, Errno>>,
}

impl Entry {
    /// One for the queue of CPU `qid`.
    pub fn new(qid: u16) -> io::Result<Self> {
        let mut header = Box::new([0; HEADER_BYTES]);
        let mut memory = MmapOptions::new().len(PAYLOAD + PAYLOAD_BYTES).no_reserve_swap().map_anon()?;
        let payload = &mut memory[PAYLOAD..];
        let iovecs = Box::new([
            IoVec { base: header.as_mut_ptr() as usize, len: HEADER_BYTES },
            IoVec { base: payload.as_mut_ptr() as usize, len: PAYLOAD_BYTES },
        ]);
        let answer = Answer::mapped(memory, PAYLOAD);
        Ok(Self {
            header,
            answer,
            iovecs,
            qid,
            state: State::Kernel,
            commit_id: 0,
            request: 0,
            on_trial: false,
            unique: 0,
            used: 0,
            last: 0,
            lent: false,
            early: None,
        })
    }

    /// The request that came: its header, the structure of its operation, and how much payload it has.
    pub fn parts(&mut self) -> Result<(InHeader, [u8; 128], usize), Errno> {
        let header = UringHeader::read_from_bytes(&self.header[..]).map_err(|_| Errno::INVAL)?;
        let (head, _) = InHeader::read_from_prefix(&header.in_out).map_err(|_| Errno::INVAL)?;
        (self.commit_id, self.unique) = (header.ent.commit_id, head.unique);
        let size = header.ent.payload_size as usize;
        self.last = size;
        self.used = self.used.max(size);
        if size > PAYLOAD_BYTES { Err(Errno::INVAL) } else { Ok((head, header.op_in, size)) }
    }

    /// Puts an answer where the kernel finds it.
    pub fn put(&mut self, answer: Result<Vec<u8>, Errno>) -> Result<usize, Errno> {
        put_body(&mut self.answer, &answer?)
    }

    /// Completes the answer: `Ok` with the bytes of a body that is in its place, or an error.
    pub fn seal(&mut self, result: Result<usize, Errno>) {
        let (error, len) = match result {
            Ok(len) => (0, len),
            Err(e) => (-e.raw_os_error(), 0),
        };
        self.last = self.last.max(len);
        self.used = self.used.max(len);
        let head = OutHeader { len: (size_of::<OutHeader>() + len) as u32, error, unique: self.unique };
        let size = std::mem::offset_of!(UringHeader, ent) + std::mem::offset_of!(crate::abi::UringInOut, payload_size);
        self.header[..size_of::<OutHeader>()].copy_from_slice(head.as_bytes());
        self.header[size..size + 4].copy_from_slice(&(len as u32).to_ne_bytes());
    }

    /// Whether [`Self::trim`] has something to give back.
    pub fn is_large(&self) -> bool {
        self.used > KEPT_BYTES
    }

    /// Whether the last request has made it so.
    pub fn was_large(&self) -> bool {
        self.last > KEPT_BYTES
    }

    /// Gives memory back that large requests have used.
    pub fn trim(&mut self) {
        if self.state != State::Kernel || !self.is_large() {
            return;
        }
        let from = PAYLOAD + KEPT_BYTES;
        self.answer.discard(from, PAYLOAD + PAYLOAD_BYTES - from);
        self.used = KEPT_BYTES;
    }
}

/// Puts a body into the memory of an entry. Nothing is answered that is larger than what the kernel said it has room for.
fn put_body(memory: &mut Answer, body: &[u8]) -> Result<usize, Errno> {
    memory.memory().get_mut(PAYLOAD..PAYLOAD + body.len()).ok_or(Errno::IO)?.copy_from_slice(body);
    Ok(body.len())
}

/// Has a request served: its header, the structure of its operation, and how much payload is in the `memory` of the entry.
/// How long the body is that lies there then, or an error; `None` where it is answered later.
pub(super) fn serve_in(
    memory: &mut Answer,
    (head, args, size): (InHeader, &[u8; 128], usize),
    scratch: &mut Answer,
    serve: impl FnOnce(&Request<'_>, &mut Answer) -> Reply,
) -> Option<Result<usize, Errno>> {
    // What is read is built where the kernel takes it from; such requests have no payload.
    let in_place = size == 0 && matches!(head.opcode, op::READ | op::READDIR | op::READDIRPLUS);
    let reply = if in_place {
        memory.clear();
        match Request::of_parts(head, args, &[]) {
            Ok(req) => serve(&req, memory),
            Err(e) => Reply::Error(e),
        }
    } else {
        scratch.clear();
        match Request::of_parts(head, args, &memory.memory()[PAYLOAD..PAYLOAD + size]) {
            Ok(req) => serve(&req, scratch),
            Err(e) => Reply::Error(e),
        }
    };
    Some(match reply {
        Reply::Body if in_place => Ok(memory.len()),
        Reply::Body => put_body(memory, scratch.body()),
        Reply::Empty => Ok(0),
        Reply::Error(e) => Err(e),
        // Those come by the device; the entry must go back.
        Reply::Silent => Err(Errno::NOSYS),
        Reply::Deferred => return None,
    })
}

impl Answer {
    /// Gives memory back to the system; it is zero afterwards.
    fn discard(&mut self, from: usize, len: usize) {
        if let Some(memory) = self.mapping() {
            // SAFETY: the mapping is private and anonymous: what it held is gone, which nobody needs (the kernel has the
            // entry without a request in it), and it reads as zeros from then on. No reference into it is alive.
            if let Err(e) = unsafe { memory.unchecked_advise_range(UncheckedAdvice::DontNeed, from, len) } {
                tracing::debug!(error = %e, "memory of a ring is not given back");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::UringInOut;
    use zerocopy::FromZeros;

    #[test]
    fn requests_come_and_answers_go() {
        let mut e = Entry::new(3).unwrap();
        let mut header = UringHeader::new_zeroed();
        let mut head = InHeader::new_zeroed();
        (head.opcode, head.unique, head.nodeid) = (op::LOOKUP, 77, 1);
        header.in_out[..40].copy_from_slice(head.as_bytes());
        header.ent = UringInOut { commit_id: 77, payload_size: 4, ..UringInOut::new_zeroed() };
        e.header.copy_from_slice(header.as_bytes());
        assert_eq!(e.put(Ok(b"abc\0".to_vec())), Ok(4));
        let (got, _, size) = e.parts().unwrap();
        assert_eq!((got.opcode, got.unique, size, e.commit_id), (op::LOOKUP, 77, 4, 77));
        assert_eq!(size, 4);
        let served = serve_in(&mut e.answer, (got, &[0; 128], size), &mut Answer::new(8), |req, out| {
            assert_eq!(req.name(), Ok(&b"abc"[..]));
            out.put_bytes(b"defgh");
            Reply::Body
        });
        assert_eq!(served, Some(Ok(5)));
        assert_eq!(e.answer.memory()[PAYLOAD..PAYLOAD + 5], *b"defgh");
        let sealed = |e: &Entry| {
            let h = UringHeader::read_from_bytes(&e.header[..]).unwrap();
            let out = OutHeader::read_from_prefix(&h.in_out).unwrap().0;
            (out.len, out.error, out.unique, h.ent.payload_size, h.ent.commit_id)
        };
        e.seal(Ok(128));
        assert_eq!(sealed(&e), (144, 0, 77, 128, 77));
        e.seal(Err(Errno::NOENT));
        assert_eq!(sealed(&e), (16, -2, 77, 0, 77));
        assert_eq!(e.put(Ok(vec![0; PAYLOAD_BYTES + 1])), Err(Errno::IO));
    }

    #[test]
    fn memory_of_large_requests_goes_back() {
        let mut e = Entry::new(0).unwrap();
        e.answer.memory()[PAYLOAD..].fill(9);
        e.seal(Ok(PAYLOAD_BYTES));
        assert!(e.is_large());
        e.state = State::Deferred;
        e.trim();
        assert!(e.is_large(), "somebody writes to it");
        e.state = State::Kernel;
        e.trim();
        assert!(!e.is_large());
        let memory = e.answer.memory();
        assert_eq!((memory[PAYLOAD + KEPT_BYTES - 1], memory[PAYLOAD + KEPT_BYTES]), (9, 0));
    }
}
