//! Large READs and WRITEs, which other threads serve than that of the ring they came through.
//!
//! That thread is bound to its CPU and alone with its queue: while it copied a megabyte, or waited for the device, everybody
//! else who asks from that CPU would wait, and a stream would have one CPU for its copies. So the memory of the entry goes to
//! another thread, with the request, and comes back with the answer in it, by the mailbox.

use super::Reply;
use super::entry::serve_in;
use super::mailbox::{Content, Ticket};
use crate::abi::{InHeader, ReadIn, op};
use crate::request::{Answer, Request};
use rustix::io::Errno;
use std::time::Instant;
use zerocopy::FromBytes;

/// From so many bytes on a request is large: to wake another thread costs what it takes to copy some ten KiB.
const LARGE_BYTES: usize = 128 << 10;

/// A request, and the memory that it lies in. It comes back in any case: the kernel knows its address.
#[derive(Debug)]
pub(crate) struct Loan {
    head: InHeader,
    args: [u8; 128],
    size: usize,
    /// When it came.
    received: Instant,
    /// There until it goes back.
    memory: Option<Answer>,
    ticket: Ticket,
}

impl Loan {
    /// Of the entry that `ticket` names.
    pub(super) fn new(head: InHeader, args: [u8; 128], size: usize, memory: Answer, ticket: Ticket) -> Self {
        Self { head, args, size, received: Instant::now(), memory: Some(memory), ticket }
    }

    /// When the thread of its ring had it.
    pub fn received(&self) -> Instant {
        self.received
    }

    /// The request, without its data.
    pub fn request(&self) -> Result<Request<'_>, Errno> {
        Request::of_parts(self.head, &self.args, &[])
    }

    /// Has it served, and gives it back. `scratch` is for answers that are not built in place.
    pub fn serve(mut self, scratch: &mut Answer, serve: impl FnOnce(&Request<'_>, &mut Answer, &Ticket) -> Reply) {
        let Some(memory) = &mut self.memory else { return };
        let ticket = &self.ticket;
        let result = serve_in(memory, (self.head, &self.args, self.size), scratch, |req, out| serve(req, out, ticket));
        self.give_back(result);
    }

    /// `None`: it is answered later.
    fn give_back(&mut self, result: Option<Result<usize, Errno>>) {
        if let Some(memory) = self.memory.take() {
            self.ticket.send(Content::Back(memory, result));
        }
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        self.give_back(Some(Err(Errno::IO)));
    }
}

/// Whether another thread had better serve it.
pub(super) fn is_large(head: &InHeader, args: &[u8], size: usize) -> bool {
    match head.opcode {
        op::WRITE => size >= LARGE_BYTES,
        op::READ => ReadIn::read_from_prefix(args).is_ok_and(|(arg, _)| arg.size as usize >= LARGE_BYTES),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::super::entry::Entry;
    use super::super::mailbox::Mailbox;
    use super::*;
    use std::sync::Arc;
    use zerocopy::{FromZeros, IntoBytes};

    fn lent(opcode: u32, mailbox: &Arc<Mailbox>) -> (Loan, usize) {
        let entry = Entry::new(0).unwrap();
        let at = entry.iovecs[1].base;
        let mut head = InHeader::new_zeroed();
        head.opcode = opcode;
        let ticket = Ticket { mailbox: mailbox.clone(), entry: 3, request: 1, crowded: false };
        (Loan::new(head, [0; 128], 5, entry.answer, ticket), at)
    }

    #[test]
    fn memory_comes_back_whatever_happens() {
        let mailbox = Arc::new(Mailbox::new().unwrap());
        let mut letters = Vec::new();
        let mut scratch = Answer::new(64);
        let mut back = || {
            mailbox.take(&mut letters);
            let letter = letters.pop().expect("a letter");
            assert_eq!((letter.entry, letters.len()), (3, 0));
            match letter.content {
                Content::Back(mut memory, result) => (memory.memory().as_ptr() as usize + 4096, result),
                Content::Answer(_) => panic!("without the memory"),
            }
        };
        let (loan, at) = lent(op::WRITE, &mailbox);
        loan.serve(&mut scratch, |req, out, _| {
            assert_eq!(req.arg_and_rest::<[u8; 1]>().unwrap().1, [0; 5]);
            out.put_bytes(b"abcdefgh");
            Reply::Body
        });
        assert_eq!(back(), (at, Some(Ok(8))));
        let (loan, at) = lent(op::WRITE, &mailbox);
        loan.serve(&mut scratch, |_, _, _| Reply::Deferred);
        assert_eq!(back(), (at, None));
        let (loan, at) = lent(op::READ, &mailbox);
        drop(loan);
        assert_eq!(back(), (at, Some(Err(Errno::IO))));
        let (loan, at) = lent(op::READ, &mailbox);
        let panics = std::panic::AssertUnwindSafe(|| loan.serve(&mut scratch, |_, _, _| panic!("of a handler")));
        assert!(std::panic::catch_unwind(panics).is_err());
        assert_eq!(back(), (at, Some(Err(Errno::IO))));
    }

    #[test]
    fn large_is_what_has_much_data() {
        let mut head = InHeader::new_zeroed();
        let mut arg = ReadIn::new_zeroed();
        arg.size = LARGE_BYTES as u32;
        head.opcode = op::READ;
        assert!(is_large(&head, arg.as_bytes(), 0));
        arg.size -= 1;
        assert!(!is_large(&head, arg.as_bytes(), 0) && !is_large(&head, &[], 0));
        head.opcode = op::WRITE;
        assert!(is_large(&head, &[], LARGE_BYTES) && !is_large(&head, &[], LARGE_BYTES - 1));
        head.opcode = op::SETXATTR;
        assert!(!is_large(&head, &[], LARGE_BYTES));
    }
}
