//! The loop of a serving thread that has a ring: wait, serve, commit the answer and wait again in one system call.
//!
//! A thread owns the queues of one or more CPUs and stands on one of them. Each queue has entries; each of them holds
//! one request from when it comes until its answer is committed, also while another thread works on the answer
//! ([`State::Deferred`]). A request that finds no free entry waits in the kernel until one is committed: an entry that
//! is added later does not fetch it (`fuse_uring_do_register` in fs/fuse/dev_uring.c). So a queue must never be full of
//! requests that wait for other requests (the kernel's WRITEs, for instance): of those the whole mount has at most
//! [`DEFERRED_MAX`], less than a queue has entries. Requests that wait for the volume (fsync) are not bounded; for them
//! entries are added as soon as fewer than [`RESERVE`] are left to the kernel, up to [`DEPTH_MAX`]. A queue that has so
//! many and has few left is *crowded*: nothing that comes in it waits for its tenant's turn ([`Ticket::is_crowded`]).
//! One that has none left goes on with the first answer that comes.
//!
//! When entries are added requests may wait already, which these do not fetch, and new ones would overtake them
//! ([`Behind`]).
//!
//! Memory of an entry is used only while it is not the kernel's; the kernel copies to it and from it only while this
//! thread is in a system call ([`super::entry`]).

use super::entry::{Entry, State, serve_in};
use super::loan::{Loan, is_large};
use super::mailbox::{Content, Letter, Mailbox, Ticket};
use super::uring::{Completion, Uring};
use crate::abi::{self, UringCommand, op};
use crate::request::{Answer, Request};
use io_uring::opcode;
use io_uring::squeue::Entry128;
use io_uring::types::{Fixed, Timespec};
use rustix::io::Errno;
use rustix::thread::{CpuSet, sched_setaffinity};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};
use zerocopy::{FromZeros, IntoBytes};

/// Entries of a queue at first, added at once, and at most. Those that are never used cost some 500 bytes each.
const DEPTH: usize = 256;
/// Of a mount: requests that wait for other requests.
pub(crate) const DEFERRED_MAX: usize = DEPTH - 64;
const GROWTH: usize = 64;
const DEPTH_MAX: usize = 8192;
/// How long after there was no memory for more entries it is tried again.
const AGAIN: Duration = Duration::from_secs(1);
/// So many entries of a queue are free for requests that do not wait for other requests.
const RESERVE: usize = 32;
/// With fewer a queue that gets no more is crowded.
const CROWDED: usize = 256;
/// Submission entries: more requests than come at once are submitted in pieces.
const SUBMISSIONS: u32 = 64;
/// A ring without large requests for so long gives memory of these back.
const SMALL_SECONDS: u64 = 1;
/// `user_data` of the mailbox, and of the timer that looks for memory to give back; else it is the number of an entry.
const BELL: u64 = u64::MAX;
const TIMER: u64 = u64::MAX - 1;
/// Set to a CPU's number, registering that CPU's entries fails: for tests of what happens then.
const FAILPOINT: &str = "BRAIDFS_TEST_RING_FAILS_ON_CPU";

/// How a request is answered by the thread that received it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reply {
    /// With the [`Answer`].
    Body,
    /// Success without a body.
    Empty,
    Error(Errno),
    /// By somebody else.
    Deferred,
    /// Not at all.
    Silent,
}

/// A queue of the kernel.
#[derive(Debug)]
struct Queue {
    qid: u16,
    /// Entries, and those of them that are deferred.
    depth: usize,
    deferred: usize,
    /// Entries that it has at most: [`DEPTH_MAX`], or those that there was memory for, until that is tried [`AGAIN`].
    most: usize,
    /// There is no memory for more: when it was tried last. Until one of those that were given to the kernel since brings a request.
    refused: Option<Instant>,
    behind: Behind,
}

/// Whether requests may wait in the kernel for an entry to be committed, though there are free ones. Each commit
/// fetches one of them, so one request is answered at once, and so is what its entry fetches, until it fetches nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Behind {
    No,
    /// The next request is to be answered at once.
    Next,
    /// This entry was committed: what it fetches is, too.
    Fetching(usize),
}

impl Queue {
    /// Whether the request in an entry had better be answered at once.
    fn is_urgent(&self, entry: usize) -> bool {
        self.behind == Behind::Next || self.behind == Behind::Fetching(entry)
    }

    /// Whether it gets no more entries, and few of them are left.
    fn is_crowded(&self) -> bool {
        self.depth >= self.most && self.depth - self.deferred < CROWDED.min(self.most / 2)
    }
}

/// Where a thread with a ring is to be, and the queues that it is to own.
#[derive(Debug)]
pub(crate) struct RingPlace {
    pub cpu: usize,
    pub queues: Vec<u16>,
}

impl RingPlace {
    fn uring(&self) -> io::Result<Uring> {
        let completions = ((self.queues.len() * DEPTH) as u32 * 2).next_power_of_two();
        Uring::new(SUBMISSIONS, completions.max(2 * SUBMISSIONS))
    }

    /// Makes a ring as for this place, which is gone again.
    ///
    /// # Errors
    /// None can be made.
    pub fn try_ring(&self) -> io::Result<()> {
        self.uring().map(drop)
    }
}

/// A ring with the queues that its thread owns.
pub(crate) struct Ring {
    uring: Uring,
    entries: Vec<Entry>,
    queues: Vec<Queue>,
    mailbox: Arc<Mailbox>,
    /// Of the request that is served: made once, for it counts references.
    ticket: Ticket,
    /// Where the bell's count is read to.
    count: Box<u64>,
    /// Entries that are the kernel's, or about to be.
    alive: usize,
    /// The kernel has given entries back, for the connection has ended.
    over: bool,
    memory: Memory,
}

/// Whether entries have memory to give back, and who looks after that. A timer of its own, and not one of each wait: that
/// would be set and cancelled with each request.
#[derive(Debug)]
struct Memory {
    /// Some entry has.
    large: bool,
    /// A large request came since the timer was set.
    came: bool,
    is_set: bool,
    /// What the timer is set to.
    after: Box<Timespec>,
}

impl Ring {
    /// Binds the calling thread, which must be the one that serves, to the CPU, and gives all entries to the kernel.
    /// `device` is the connection, after INIT.
    ///
    /// # Errors
    /// There is no ring, or the kernel refused an entry: the connection cannot be used then, neither by rings nor without.
    pub fn start(place: RingPlace, device: BorrowedFd<'_>) -> io::Result<Self> {
        let mut here = CpuSet::new();
        here.set(place.cpu);
        sched_setaffinity(None, &here)?;
        let mailbox = Arc::new(Mailbox::new()?);
        mailbox.own();
        let uring = place.uring()?;
        uring.register_file(device)?;
        let after = Box::new(Timespec::new().sec(SMALL_SECONDS));
        let mut ring = Self {
            uring,
            entries: Vec::new(),
            queues: place
                .queues
                .into_iter()
                .map(|qid| Queue { qid, depth: 0, deferred: 0, most: DEPTH_MAX, refused: None, behind: Behind::No })
                .collect(),
            ticket: Ticket { mailbox: mailbox.clone(), entry: 0, request: 0, crowded: false },
            mailbox,
            count: Box::new(0),
            alive: 0,
            over: false,
            memory: Memory { large: false, came: false, is_set: false, after },
        };
        ring.listen()?;
        for i in 0..ring.queues.len() {
            for _ in 0..DEPTH {
                let entry = ring.fresh(i)?;
                ring.add(i, entry)?;
            }
        }
        ring.submit()?;
        // What is refused is told at once; requests may have come, too, which are taken later.
        let refused = ring.uring.completions().find(|c| c.who != BELL && c.result < 0);
        match refused {
            Some(c) => Err(io::Error::from_raw_os_error(-c.result)),
            None => Ok(ring),
        }
    }

    /// Serves until the connection is gone. `serve` gets a request, an empty answer to build, and whither it may be
    /// answered later; `lend`, where there is one, gets those that are large. `is_over` says whether the connection has
    /// ended: it is asked now and then while the kernel has no entry to tell it by.
    ///
    /// # Errors
    /// The ring cannot be waited for.
    pub fn run(
        &mut self,
        mut serve: impl FnMut(&Request<'_>, &mut Answer, &Ticket) -> Reply,
        lend: Option<&dyn Fn(Loan)>,
        is_over: &dyn Fn() -> bool,
    ) -> io::Result<()> {
        let (mut scratch, mut letters, mut came) = (Answer::new(4096), Vec::new(), Vec::new());
        while self.alive > 0 || (self.is_awaited() && !is_over()) {
            self.deliver(&mut letters)?;
            self.wait()?;
            self.uring.take(&mut came);
            let timer = came.iter().any(|c| c.who == TIMER);
            for q in &mut self.queues {
                if let Behind::Fetching(entry) = q.behind
                    && came.iter().all(|c| c.who != entry as u64)
                {
                    q.behind = Behind::No;
                }
            }
            for Completion { who, result, .. } in came.drain(..) {
                match who {
                    BELL => {
                        self.listen()?;
                        continue;
                    }
                    TIMER => {
                        self.memory.is_set = false;
                        continue;
                    }
                    _ => {}
                }
                let i = who as usize;
                if result >= 0 {
                    self.serve_one(i, &mut scratch, &mut serve, lend)?;
                    continue;
                }
                match Errno::from_raw_os_error(-result) {
                    // the connection is not ready: at the start only
                    Errno::AGAIN | Errno::INTR => self.give(i, abi::URING_REGISTER)?,
                    e => self.refused(i, e)?,
                }
            }
            if timer {
                self.trim()?;
            }
        }
        Ok(())
    }

    /// Whether no entry is the kernel's, but will be when somebody answers.
    fn is_awaited(&self) -> bool {
        !self.over && self.queues.iter().any(|q| q.deferred > 0)
    }

    /// Gives memory of large requests back, where none has come for a while; `came` has been served.
    fn trim(&mut self) -> io::Result<()> {
        if std::mem::take(&mut self.memory.came) {
            return Ok(());
        }
        // What is answered must have been taken. A request that has come with that waits in one of the entries.
        self.submit()?;
        if self.uring.completions().next().is_none() {
            self.entries.iter_mut().for_each(Entry::trim);
            self.memory.large = false;
        }
        Ok(())
    }

    fn serve_one(
        &mut self,
        i: usize,
        scratch: &mut Answer,
        serve: &mut impl FnMut(&Request<'_>, &mut Answer, &Ticket) -> Reply,
        lend: Option<&dyn Fn(Loan)>,
    ) -> io::Result<()> {
        if std::mem::take(&mut self.entries[i].on_trial) {
            self.has_taken(i);
        }
        let entry = &mut self.entries[i];
        entry.state = State::Busy;
        self.ticket.request += 1;
        entry.request = self.ticket.request;
        let (head, args, size) = match entry.parts() {
            Ok(parts) => parts,
            Err(e) => {
                tracing::error!("the kernel sent a FUSE request that does not parse");
                entry.seal(Err(e));
                return self.give(i, abi::URING_COMMIT_AND_FETCH);
            }
        };
        self.ticket.entry = i as u32;
        let queue = self.queue_of(i);
        let urgent = queue.filter(|q| self.queues[*q].is_urgent(i));
        self.ticket.crowded = urgent.is_some() || queue.is_some_and(|q| self.queues[q].is_crowded());
        if let Some(q) = urgent {
            // until it is committed
            self.queues[q].behind = Behind::Next;
        }
        if may_take_long(head.opcode) {
            // Nobody else's answer waits for it.
            self.submit()?;
        }
        let entry = &mut self.entries[i];
        if let Some(lend) = lend
            && is_large(&head, &args, size)
        {
            entry.lent = true;
            let memory = std::mem::replace(&mut entry.answer, Answer::new(0));
            lend(Loan::new(head, args, size, memory, self.ticket.clone()));
            return self.defer(i);
        }
        let served =
            serve_in(&mut entry.answer, (head, &args, size), scratch, |req, out| serve(req, out, &self.ticket));
        match served {
            Some(result) => {
                entry.seal(result);
                if let Some(q) = urgent {
                    self.queues[q].behind = Behind::Fetching(i);
                }
                self.give(i, abi::URING_COMMIT_AND_FETCH)
            }
            None => self.defer(i),
        }
    }

    /// The request of an entry is answered by another thread, maybe already.
    fn defer(&mut self, i: usize) -> io::Result<()> {
        self.entries[i].state = State::Deferred;
        self.alive -= 1;
        let Some(q) = self.queue_of(i) else { return Ok(()) };
        self.queues[q].deferred += 1;
        let Queue { depth, deferred, most, refused, .. } = self.queues[q];
        let again = || depth < DEPTH_MAX && refused.is_some_and(|at| at.elapsed() >= AGAIN);
        if !self.over && depth - deferred < RESERVE && (depth < most || again()) {
            self.queues[q].behind = Behind::Next;
            self.grow(q)?;
        }
        Ok(())
    }

    /// Commits what other threads have answered.
    fn deliver(&mut self, letters: &mut Vec<Letter>) -> io::Result<()> {
        self.mailbox.take(letters);
        for letter in letters.drain(..) {
            let i = letter.entry as usize;
            let entry = &mut self.entries[i];
            // Of a request that was answered otherwise, as where its handler has panicked: the entry has another one, or
            // none. (Memory comes back before that.)
            if entry.state != State::Deferred || entry.request != letter.request {
                continue;
            }
            let result = match letter.content {
                Content::Answer(answer) if entry.lent => {
                    entry.early = Some(answer);
                    continue;
                }
                Content::Answer(answer) => entry.put(answer),
                Content::Back(memory, result) => {
                    (entry.answer, entry.lent) = (memory, false);
                    match (result, entry.early.take()) {
                        (Some(result), _) => result,
                        (None, Some(answer)) => entry.put(answer),
                        (None, None) => continue,
                    }
                }
            };
            entry.seal(result);
            self.alive += 1;
            if let Some(q) = self.queue_of(i) {
                let queue = &mut self.queues[q];
                queue.deferred -= 1;
                // where all requests are lent or put aside, no other commit tells that nobody waits any more
                if queue.behind == Behind::Next {
                    queue.behind = Behind::Fetching(i);
                }
            }
            self.give(i, abi::URING_COMMIT_AND_FETCH)?;
        }
        Ok(())
    }

    fn queue_of(&self, i: usize) -> Option<usize> {
        self.queues.iter().position(|q| q.qid == self.entries[i].qid)
    }

    /// Gives the kernel more entries of a queue, as many as there is memory for: where there is none, it goes on with those that
    /// it has. Of those that it gives to the kernel that may refuse some, later ([`Self::bury`]): after it did these are on trial.
    fn grow(&mut self, q: usize) -> io::Result<()> {
        let qid = self.queues[q].qid;
        // refused before a request came in them: the kernel knows nothing of them
        let is_left = |e: &Entry| e.qid == qid && e.state == State::Dead && e.request == 0;
        let left: Vec<usize> = (0..self.entries.len()).filter(|i| is_left(&self.entries[*i])).take(GROWTH).collect();
        for i in &left {
            self.enlist(q, *i)?;
        }
        for _ in left.len()..GROWTH {
            match self.fresh(q) {
                Ok(entry) => self.add(q, entry)?,
                Err(e) => {
                    self.refuse(q, &e);
                    return Ok(());
                }
            }
        }
        let queue = &mut self.queues[q];
        if queue.refused.is_some() {
            (queue.most, queue.refused) = (queue.depth, Some(Instant::now()));
        }
        Ok(())
    }

    /// The kernel has an entry that was on trial: it brings a request.
    fn has_taken(&mut self, i: usize) {
        let Some(q) = self.queue_of(i) else { return };
        let queue = &mut self.queues[q];
        if queue.refused.take().is_some() {
            tracing::info!(queue = queue.qid, entries = queue.depth, "memory for more requests at once again");
            queue.most = DEPTH_MAX;
        }
    }

    /// There is no memory for more entries of a queue.
    fn refuse(&mut self, q: usize, why: &dyn std::error::Error) {
        let queue = &mut self.queues[q];
        if queue.refused.is_none() {
            tracing::warn!(error = %why, queue = queue.qid, entries = queue.depth,
                           "no memory for more requests at once: those that wait for the volume may hold up others");
            // those of before tell nothing of this time
            self.entries.iter_mut().filter(|e| e.qid == queue.qid).for_each(|e| e.on_trial = false);
        }
        (queue.most, queue.refused) = (queue.depth, Some(Instant::now()));
    }

    /// A further entry of a queue, which the kernel does not have yet.
    fn fresh(&self, q: usize) -> io::Result<Entry> {
        #[cfg(test)]
        if tests::NO_MEMORY.get() {
            return Err(Errno::NOMEM.into());
        }
        let mut entry = Entry::new(self.queues[q].qid)?;
        if std::env::var(FAILPOINT).is_ok_and(|cpu| cpu == entry.qid.to_string()) {
            entry.iovecs[1].len = 0;
        }
        Ok(entry)
    }

    fn add(&mut self, q: usize, entry: Entry) -> io::Result<()> {
        self.entries.push(entry);
        self.enlist(q, self.entries.len() - 1)
    }

    /// Gives the kernel an entry of a queue that it does not have.
    fn enlist(&mut self, q: usize, i: usize) -> io::Result<()> {
        self.queues[q].depth += 1;
        self.alive += 1;
        self.entries[i].on_trial = self.queues[q].refused.is_some();
        self.give(i, abi::URING_REGISTER)
    }

    /// The kernel does not take an entry: the end of the connection, or it lacks memory for a further one.
    ///
    /// # Errors
    /// It was to take an answer with it, which somebody waits for; or a queue has no entry left, and all of its CPU would wait for good.
    fn refused(&mut self, i: usize, why: Errno) -> io::Result<()> {
        // one that the kernel does not know any more has nobody who waits
        let answers = self.entries[i].request != 0 && why != Errno::NOENT;
        self.bury(i, why);
        let dry = self.queue_of(i).is_some_and(|q| self.queues[q].depth == 0);
        if self.over || !(answers || dry) { Ok(()) } else { Err(why.into()) }
    }

    /// An entry that the kernel does not have any more: the queue has one less.
    fn bury(&mut self, i: usize, why: Errno) {
        if self.entries[i].state == State::Dead {
            return;
        }
        self.entries[i].state = State::Dead;
        self.alive -= 1;
        if matches!(why, Errno::NOTCONN | Errno::CONNABORTED | Errno::CANCELED) {
            self.over = true;
            return;
        }
        let entry = &mut self.entries[i];
        entry.on_trial = false;
        // of further ones it is told once
        if entry.request != 0 {
            tracing::error!(error = %why, queue = entry.qid, "the kernel refused an entry of a ring");
        }
        if let Some(q) = self.queue_of(i) {
            self.queues[q].depth -= 1;
            self.refuse(q, &why);
        }
    }

    /// Has the kernel take an entry: a new one, or one with an answer.
    fn give(&mut self, i: usize, command: u32) -> io::Result<()> {
        let entry = &mut self.entries[i];
        entry.state = State::Kernel;
        if entry.is_large() {
            self.memory.large = true;
            self.memory.came |= entry.was_large();
        }
        let arg = UringCommand { commit_id: entry.commit_id, qid: entry.qid, ..UringCommand::new_zeroed() };
        let mut bytes = [0; 80];
        bytes[..size_of::<UringCommand>()].copy_from_slice(arg.as_bytes());
        let sqe = opcode::UringCmd80::new(Fixed(0), command).cmd(bytes);
        let mut sqe = sqe.addr(Some(entry.iovecs.as_ptr() as u64)).build().user_data(i as u64);
        if command == abi::URING_REGISTER {
            set_len(&mut sqe, 2);
        }
        self.push(&sqe)
    }

    /// Waits for the mailbox, besides the requests.
    fn listen(&mut self) -> io::Result<()> {
        let bell = io_uring::types::Fd(self.mailbox.bell().as_raw_fd());
        let at: *mut u64 = &mut *self.count;
        let sqe = opcode::Read::new(bell, at.cast(), 8).build().user_data(BELL);
        self.push(&sqe.into())
    }

    fn push(&mut self, sqe: &Entry128) -> io::Result<()> {
        if self.uring.is_full() {
            self.submit()?;
        }
        // SAFETY: what the entry points to (an entry's iovecs and memory, the count, the timer's time) lives as long as the
        // ring: entries are never removed, what they point to is on the heap or mapped and does not move, and the ring is
        // dropped first. Memory that is lent comes back before its entry is pushed (`State::Deferred`).
        if unsafe { self.uring.push(sqe) } { Ok(()) } else { Err(Errno::BUSY.into()) }
    }

    /// Hands over what is pushed.
    fn submit(&mut self) -> io::Result<()> {
        while self.uring.unsubmitted() > 0 {
            match self.uring.enter(0) {
                Err(e) if !is_passing(&e) => return Err(e),
                _ => {}
            }
        }
        Ok(())
    }

    /// Hands over what is pushed and waits for something to do. Meanwhile nothing large may lie around for long; and
    /// without an entry the kernel does not tell that the connection has ended.
    fn wait(&mut self) -> io::Result<()> {
        if (self.memory.large || self.alive == 0) && !self.memory.is_set {
            (self.memory.is_set, self.memory.came) = (true, false);
            let at: *const Timespec = &*self.memory.after;
            self.push(&opcode::Timeout::new(at).build().user_data(TIMER).into())?;
        }
        match self.uring.enter(1) {
            Err(e) if !is_passing(&e) => Err(e),
            _ => Ok(()),
        }
    }
}

/// Whether it is worth trying again.
fn is_passing(e: &io::Error) -> bool {
    matches!(e.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY))
}

/// Whether serving it may wait for the device.
fn may_take_long(opcode: u32) -> bool {
    matches!(
        opcode,
        op::FSYNC
            | op::FSYNCDIR
            | op::SYNCFS
            | op::DESTROY
            | op::IOCTL
            | op::FALLOCATE
            | op::COPY_FILE_RANGE
            | op::COPY_FILE_RANGE_64
            | op::READ
            | op::WRITE
            | op::READDIR
            | op::READDIRPLUS
    )
}

/// Sets the field `len` of an SQE, for which the crate's command has no setter.
fn set_len(sqe: &mut Entry128, len: u32) {
    const LEN_AT: usize = 24;
    const { assert!(size_of::<Entry128>() == 128) }
    // SAFETY: an SQE of 128 bytes is `struct io_uring_sqe`, all integers, of which `len` lies at offset 24
    // (linux/io_uring.h); the pointer is to the whole of it.
    unsafe { (&raw mut *sqe).cast::<u8>().add(LEN_AT).cast::<u32>().write_unaligned(len) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::thread::sched_getaffinity;
    use std::cell::Cell;
    use std::fs::File;
    use std::io::{Write as _, stderr};
    use std::os::fd::AsFd;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc;
    use std::thread;

    thread_local! {
        /// No entry can be made.
        pub(super) static NO_MEMORY: Cell<bool> = const { Cell::new(false) };
    }

    /// The null device takes all commands: as a kernel that has a request for each entry as soon as it has the entry.
    fn of_null(null: &File) -> Option<Ring> {
        let here = sched_getaffinity(None).unwrap();
        let cpu = (0..CpuSet::MAX_CPU).find(|cpu| here.is_set(*cpu)).unwrap();
        let place = RingPlace { cpu, queues: vec![0] };
        if let Err(e) = place.try_ring() {
            let _ = writeln!(stderr(), "SKIPPED: no io_uring here: {e}");
            return None;
        }
        Ring::start(place, null.as_fd()).ok()
    }

    /// When entries are added, requests may wait that only a commit fetches: the next one is not put aside.
    #[test]
    fn where_entries_are_added_the_next_request_is_answered_at_once() {
        let null = File::options().read(true).write(true).open("/dev/null").unwrap();
        let served = thread::spawn(move || {
            let mut ring = of_null(&null)?;
            ring.queues[0].most = DEPTH + 8 * GROWTH;
            let mut tickets: Vec<(u32, bool)> = Vec::new();
            let serve = |_: &Request<'_>, _: &mut Answer, ticket: &Ticket| {
                let first = ticket.crowded && tickets.iter().all(|(_, crowded)| !crowded);
                tickets.push((ticket.entry, ticket.crowded));
                if first { Reply::Empty } else { Reply::Deferred }
            };
            ring.run(serve, None, &|| true).unwrap();
            Some(tickets)
        });
        let Some(tickets) = served.join().unwrap() else { return };
        let first = tickets.iter().position(|(_, crowded)| *crowded);
        assert_eq!(first, Some(DEPTH - RESERVE + 1));
        let again = tickets.iter().filter(|(entry, _)| *entry == tickets[DEPTH - RESERVE + 1].0).count();
        assert_eq!((again, tickets.len()), (2, DEPTH + 8 * GROWTH + 1));
    }

    /// A queue that cannot grow goes on with what it has.
    #[test]
    fn without_memory_for_more_entries_it_goes_on() {
        let null = File::options().read(true).write(true).open("/dev/null").unwrap();
        let served = thread::spawn(move || {
            let mut ring = of_null(&null)?;
            NO_MEMORY.set(true);
            let mut deferred = 0;
            let serve = |_: &Request<'_>, _: &mut Answer, _: &Ticket| {
                deferred += 1;
                Reply::Deferred
            };
            ring.run(serve, None, &|| true).unwrap();
            Some((deferred, ring.queues[0].most, ring.queues[0].is_crowded()))
        });
        let Some(served) = served.join().unwrap() else { return };
        assert_eq!(served, (DEPTH, DEPTH, true));
    }

    /// As soon as there is memory again it grows: not at each request, but some time after it was refused.
    #[test]
    fn with_memory_again_it_grows() {
        let null = File::options().read(true).write(true).open("/dev/null").unwrap();
        let grown = thread::spawn(move || {
            let mut ring = of_null(&null)?;
            NO_MEMORY.set(true);
            let mut defer = |entries: std::ops::Range<usize>| {
                entries.for_each(|i| ring.defer(i).unwrap());
                ring.queues[0].depth
            };
            let refused = defer(0..DEPTH - 2);
            NO_MEMORY.set(false);
            let soon = defer(DEPTH - 2..DEPTH - 1);
            ring.queues[0].refused = Instant::now().checked_sub(AGAIN);
            ring.defer(DEPTH - 1).unwrap();
            let Queue { depth, most, .. } = ring.queues[0];
            let tried = (depth, most);
            ring.serve_one(DEPTH, &mut Answer::new(64), &mut |_, _, _| Reply::Empty, None).unwrap();
            Some((refused, soon, tried, ring.queues[0].most))
        });
        let Some(grown) = grown.join().unwrap() else { return };
        assert_eq!(grown, (DEPTH, DEPTH, (DEPTH + GROWTH, DEPTH + GROWTH), DEPTH_MAX));
    }

    /// A handler has passed the duty to answer on, and has failed itself: that is the answer. What comes later is not that
    /// of whoever has the entry then.
    #[test]
    fn a_second_answer_is_not_the_next_requests() {
        let null = File::options().read(true).write(true).open("/dev/null").unwrap();
        let answered = thread::spawn(move || {
            let mut ring = of_null(&null)?;
            let mut tickets = Vec::new();
            for reply in [Reply::Error(Errno::IO), Reply::Deferred] {
                let mut serve = |_: &Request<'_>, _: &mut Answer, ticket: &Ticket| {
                    tickets.push(ticket.clone());
                    reply
                };
                ring.serve_one(5, &mut Answer::new(64), &mut serve, None).unwrap();
            }
            let mut post = |ticket: &Ticket| {
                ticket.post(Ok(b"bytes".to_vec()));
                ring.deliver(&mut Vec::new()).unwrap();
                ring.entries[5].state
            };
            Some([post(&tickets[0]), post(&tickets[1]), post(&tickets[0])])
        });
        let Some(answered) = answered.join().unwrap() else { return };
        assert_eq!(answered, [State::Deferred, State::Kernel, State::Kernel]);
    }

    /// Whoever waits for an answer that the kernel refuses waits for good, and so do all of a CPU whose queue has no entry left.
    #[test]
    fn an_answer_that_is_refused_breaks_the_ring() {
        let null = File::options().read(true).write(true).open("/dev/null").unwrap();
        let told = thread::spawn(move || {
            let mut ring = of_null(&null)?;
            let further = ring.refused(0, Errno::NOMEM).is_ok();
            ring.entries[1].request = 7;
            let unknown = ring.refused(1, Errno::NOENT).is_ok();
            ring.entries[2].request = 8;
            let answer = ring.refused(2, Errno::OPNOTSUPP).is_err();
            let last = (3..DEPTH - 1).all(|i| ring.refused(i, Errno::NOMEM).is_ok());
            let dry = ring.refused(DEPTH - 1, Errno::NOMEM).is_err();
            Some([further, unknown, answer, last, dry])
        });
        let Some(told) = told.join().unwrap() else { return };
        assert_eq!(told, [true; 5]);
        let null = File::options().read(true).write(true).open("/dev/null").unwrap();
        let ended = thread::spawn(move || {
            let mut ring = of_null(&null)?;
            ring.entries.iter_mut().for_each(|e| e.request = 1);
            Some((0..DEPTH).all(|i| ring.refused(i, Errno::NOTCONN).is_ok()))
        });
        assert_ne!(ended.join().unwrap(), Some(false), "a connection that ends is no failure");
    }

    /// The kernel refuses entries when it has them: they do not count as free, and it gets them again some time after that.
    #[test]
    fn what_the_kernel_refuses_is_given_to_it_again() {
        let null = File::options().read(true).write(true).open("/dev/null").unwrap();
        let grown = thread::spawn(move || {
            let mut ring = of_null(&null)?;
            (0..DEPTH - RESERVE).for_each(|i| ring.defer(i).unwrap());
            ring.grow(0).unwrap();
            let added = (ring.queues[0].depth, ring.alive);
            (DEPTH..DEPTH + GROWTH).for_each(|i| ring.bury(i, Errno::NOMEM));
            let Queue { depth, most, .. } = ring.queues[0];
            let refused = (depth, most, ring.alive, ring.queues[0].is_crowded());
            // too soon, and then not
            ring.defer(DEPTH - RESERVE).unwrap();
            let soon = ring.queues[0].depth;
            ring.queues[0].refused = Instant::now().checked_sub(AGAIN);
            ring.defer(DEPTH - RESERVE + 1).unwrap();
            let again = (ring.queues[0].depth, ring.queues[0].most, ring.entries.len());
            // as long as none of them has brought a request the kernel may refuse them once more
            let mut bring = |i| {
                ring.serve_one(i, &mut Answer::new(64), &mut |_, _, _| Reply::Empty, None).unwrap();
                ring.queues[0].refused.is_some()
            };
            let lacks = (bring(DEPTH - 1), bring(DEPTH + 1));
            Some((added, refused, soon, again, lacks, ring.queues[0].most))
        });
        let Some((added, refused, soon, again, lacks, most)) = grown.join().unwrap() else { return };
        assert_eq!(added, (DEPTH + GROWTH, RESERVE + GROWTH));
        assert_eq!(refused, (DEPTH, DEPTH, RESERVE, true));
        assert_eq!(soon, DEPTH);
        assert_eq!(again, (DEPTH + GROWTH, DEPTH + GROWTH, DEPTH + GROWTH), "the same ones");
        assert_eq!((lacks, most), ((true, false), DEPTH_MAX));
    }

    #[test]
    fn what_a_commit_fetches_is_urgent_until_it_fetches_nothing() {
        let urgent = |behind| {
            let queue = Queue { qid: 0, depth: 256, deferred: 0, most: DEPTH_MAX, refused: None, behind };
            [3, 4].map(|entry| queue.is_urgent(entry))
        };
        assert_eq!(urgent(Behind::No), [false, false]);
        assert_eq!(urgent(Behind::Next), [true, true]);
        assert_eq!(urgent(Behind::Fetching(4)), [false, true]);
    }

    /// Requests that are lent, or put aside, are committed by others' answers: by these, too, a queue finds that it is no more behind.
    #[test]
    fn the_answer_of_another_thread_tells_whether_somebody_waits() {
        let null = File::options().read(true).write(true).open("/dev/null").unwrap();
        let behind = thread::spawn(move || {
            let mut ring = of_null(&null)?;
            ring.queues[0].behind = Behind::Next;
            for i in [2, 3] {
                ring.ticket.entry = i;
                ring.defer(i as usize).unwrap();
                ring.ticket.post(Ok(Vec::new()));
            }
            let before = ring.queues[0].behind;
            ring.deliver(&mut Vec::new()).unwrap();
            Some((before, ring.queues[0].behind, ring.queues[0].deferred))
        });
        let Some(behind) = behind.join().unwrap() else { return };
        assert_eq!(behind, (Behind::Next, Behind::Fetching(2), 0), "one commit is enough to ask by");
    }

    /// A queue that gets no more entries, all of which wait for others, goes on with the first answer; and it ends with
    /// the connection, of which no entry tells then.
    #[test]
    fn a_queue_with_no_entry_left_goes_on_with_the_first_answer() {
        let null = File::options().read(true).write(true).open("/dev/null").unwrap();
        let over = AtomicBool::new(false);
        let (all, deferred) = mpsc::channel::<Ticket>();
        thread::scope(|s| {
            let over = &over;
            let served = s.spawn(move || {
                let mut ring = of_null(&null)?;
                ring.queues[0].most = DEPTH;
                let mut tickets = Vec::new();
                let serve = |_: &Request<'_>, _: &mut Answer, ticket: &Ticket| {
                    tickets.push(ticket.clone());
                    let _ = all.send(ticket.clone());
                    Reply::Deferred
                };
                ring.run(serve, None, &|| over.load(Ordering::SeqCst)).unwrap();
                Some((tickets.iter().map(|t| (t.entry, t.crowded)).collect::<Vec<_>>(), ring.alive))
            });
            if let Some(last) = deferred.iter().take(DEPTH).last() {
                thread::sleep(Duration::from_millis(50));
                last.post(Ok(Vec::new()));
                // the next request of the entry
                assert_eq!(deferred.iter().next().map(|t| t.entry), Some(last.entry), "it is served again");
                over.store(true, Ordering::SeqCst);
            }
            let Some((tickets, alive)) = served.join().unwrap() else { return };
            assert_eq!((tickets.len(), alive), (DEPTH + 1, 0));
            assert_eq!((tickets[0].1, tickets[DEPTH - 1].1, tickets[DEPTH].1), (false, true, true), "crowded");
        });
    }
}
