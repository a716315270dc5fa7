//! The way back to a ring for answers that come from other threads: only the thread of a ring may submit to it.

use crate::request::Answer;
use braidfs_sync::{Mutex, rank};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::ThreadId;

/// What is sent, and for which entry and request.
#[derive(Debug)]
pub(super) struct Letter {
    pub entry: u32,
    pub request: u64,
    pub content: Content,
}

/// Of a letter.
#[derive(Debug)]
pub(super) enum Content {
    /// The answer: its body, or an error.
    Answer(Result<Vec<u8>, Errno>),
    /// The memory of the entry, which was lent; and how many bytes of an answer are in it, or an error. `None`: the answer
    /// comes by itself, or has come.
    Back(Answer, Option<Result<usize, Errno>>),
}

/// Answers that the thread of a ring is to commit.
#[derive(Debug)]
pub(crate) struct Mailbox {
    letters: Mutex<Vec<Letter>, rank::Mailbox>,
    /// There are some, and the thread has been told.
    told: AtomicBool,
    /// Readable when it has been told while it slept.
    bell: OwnedFd,
    owner: OnceLock<ThreadId>,
}

impl Mailbox {
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            letters: Mutex::default(),
            told: AtomicBool::new(false),
            bell: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            owner: OnceLock::new(),
        })
    }

    /// The calling thread is the one of the ring.
    pub(super) fn own(&self) {
        let _ = self.owner.set(std::thread::current().id());
    }

    /// What the ring has to wait for.
    pub(super) fn bell(&self) -> &OwnedFd {
        &self.bell
    }

    /// By the owner, before it sleeps and when the bell rang: what came. `into` is empty.
    pub(super) fn take(&self, into: &mut Vec<Letter>) {
        // Before the letters are taken: whoever posts one after that rings again.
        if self.told.load(Ordering::Relaxed) && self.told.swap(false, Ordering::AcqRel) {
            std::mem::swap(into, &mut self.letters.lock());
        }
    }

    fn post(&self, letter: Letter) {
        self.letters.lock().push(letter);
        if self.told.swap(true, Ordering::AcqRel) || self.owner.get() == Some(&std::thread::current().id()) {
            return;
        }
        if let Err(e) = rustix::io::write(&self.bell, &1u64.to_ne_bytes())
            // it rings already
            && e != Errno::AGAIN
        {
            tracing::error!(error = %e, "cannot wake a serving thread");
        }
    }
}

/// A request of a ring, and the entry in which it came: another one may be there by now.
#[derive(Debug, Clone)]
pub(crate) struct Ticket {
    pub(super) mailbox: Arc<Mailbox>,
    pub(super) entry: u32,
    /// Which one of those that the ring has served.
    pub(super) request: u64,
    /// Its queue was when the request came.
    pub(super) crowded: bool,
}

impl Ticket {
    /// Whether few entries are left in the queue of the request, and none is added: it had better not wait for long.
    pub fn is_crowded(&self) -> bool {
        self.crowded
    }

    /// Answers the request; of no effect where it is answered.
    pub fn post(&self, result: Result<Vec<u8>, Errno>) {
        self.send(Content::Answer(result));
    }

    pub(super) fn send(&self, content: Content) {
        self.mailbox.post(Letter { entry: self.entry, request: self.request, content });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rang(m: &Mailbox) -> bool {
        rustix::io::read(m.bell(), &mut [0; 8]).is_ok()
    }

    #[test]
    fn the_bell_rings_once_and_not_for_the_owner() {
        let m = Arc::new(Mailbox::new().unwrap());
        let ticket = |entry| Ticket { mailbox: m.clone(), entry, request: 7, crowded: false };
        let (mut got, from_elsewhere) = (Vec::new(), |entry: u32, result: Result<Vec<u8>, Errno>| {
            std::thread::scope(|s| s.spawn(|| ticket(entry).post(result)).join().unwrap());
        });
        m.own();
        m.take(&mut got);
        assert!(got.is_empty() && !rang(&m));
        ticket(1).post(Ok(Vec::new()));
        assert!(!rang(&m), "it looks before it sleeps");
        m.take(&mut got);
        assert_eq!(got.drain(..).map(|l| l.entry).collect::<Vec<_>>(), [1]);
        from_elsewhere(2, Ok(b"ab".to_vec()));
        from_elsewhere(3, Err(Errno::IO));
        assert!(rang(&m) && !rang(&m));
        m.take(&mut got);
        assert!(
            matches!(&got[0], Letter { entry: 2, request: 7, content: Content::Answer(Ok(body)) } if body == b"ab")
        );
        assert!(matches!(&got[1], Letter { entry: 3, request: 7, content: Content::Answer(Err(Errno::IO)) }));
        assert_eq!(got.len(), 2);
        got.clear();
        from_elsewhere(4, Ok(Vec::new()));
        assert!(rang(&m), "again after all were taken");
    }
}
