//! One serving thread: receives a request by either transport, has it handled, answers.

use super::Slot;
use crate::abi::{self, op};
use crate::channel::{Channel, Received};
use crate::counters::Line;
use crate::fs::{Context, MAX_IO_BYTES};
use crate::latency::Served;
use crate::request::{Answer, Outcome, Request};
use crate::slow::Asked;
use crate::transport::{Forgets, Later, Loan, Reply, Ring, Ticket};
use crate::upgrade::stop::Stop;
use braidfs::Spending;
use crossbeam::utils::CachePadded;
use rustix::io::Errno;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A request and its header; the kernel wants room for 4 KiB besides the largest WRITE.
pub(super) const RECEIVE_BYTES: usize = MAX_IO_BYTES as usize + 4096;

/// One serving thread.
pub(super) struct Server<'a> {
    pub i: usize,
    pub slot: &'a Slot,
    pub channel: Arc<Channel>,
    pub served: &'a Served,
    pub counts: Arc<CachePadded<Line>>,
    /// Who serves large requests of a ring.
    pub lend: Option<crossbeam::channel::Sender<Loan>>,
    pub close: &'a (dyn Fn() + Sync),
    /// The connection has ended, or nobody can serve it.
    pub gone: &'a AtomicBool,
}

impl Server<'_> {
    /// Serves from the device, until the connection is gone, or it is to stop.
    pub fn at_device(&self, stop: &Stop) {
        let _serving = self.served.begin(self.i);
        let stoppable = stop.thread(self.i);
        let mut buf = vec![0; RECEIVE_BYTES];
        let mut out = Answer::of_pages(MAX_IO_BYTES as usize);
        while let Some(received) = stoppable.receive(|| self.channel.try_receive(&mut buf)) {
            if self.take(received, &buf, &mut out).is_err() {
                return;
            }
        }
    }

    /// Serves what was received; whether that was something.
    ///
    /// # Errors
    /// Nothing more will come.
    fn take(&self, received: io::Result<Received>, buf: &[u8], out: &mut Answer) -> Result<bool, ()> {
        match received {
            // interrupted, or a request that was
            Ok(Received::Bytes(0) | Received::Nothing) => return Ok(false),
            Ok(Received::Bytes(n)) if self.serve_frame(&buf[..n], out) => return Ok(true),
            Ok(Received::Bytes(_) | Received::Gone) => {}
            Err(e) => tracing::error!(error = %e, "cannot receive from the FUSE device"),
        }
        self.gone.store(true, Ordering::SeqCst);
        Err(())
    }

    /// Serves what comes within `turn`, where no other thread does.
    pub fn serve_for(&self, turn: Duration, buf: &mut [u8], out: &mut Answer) -> Result<(), ()> {
        let end = Instant::now() + turn;
        let begun = self.channel.set_blocking(false);
        let served = (|| {
            while begun.is_ok() && Instant::now() < end {
                let received = self.channel.try_receive(buf);
                if !self.take(received, buf, out)? {
                    self.channel.await_request(Duration::from_millis(1));
                }
            }
            Ok(())
        })();
        match begun.and_then(|()| self.channel.set_blocking(true)) {
            Ok(()) => served,
            Err(e) => self.take(Err(e), buf, out).map(drop),
        }
    }

    /// Serves from a ring, until the connection is gone.
    pub fn at_ring(&self, ring: &mut Ring) -> io::Result<()> {
        let _serving = self.served.begin(self.i);
        let lend = |loan: Loan| {
            if let Ok(req) = loan.request() {
                self.served.count(self.i, &req);
            }
            if let Some(others) = &self.lend {
                // Where nobody takes it, it is dropped, and answers EIO.
                let _ = others.send(loan);
            }
        };
        let lend = self.lend.as_ref().map(|_| &lend as &dyn Fn(Loan));
        let serve =
            |req: &Request<'_>, out: &mut Answer, ticket: &Ticket| self.dispatch(req, out, Some(ticket), &mut None);
        ring.run(serve, lend, &|| self.channel.is_over())
    }

    /// Serves what rings have lent, until they are gone.
    pub fn serve_large(&self, lent: &crossbeam::channel::Receiver<Loan>) {
        let mut scratch = Answer::new(4096);
        for loan in lent {
            let received = loan.received();
            loan.serve(&mut scratch, |req, out, ticket| self.handle(req, out, Some(ticket), Some(received), &mut None));
        }
    }

    /// Serves what does not come through rings.
    pub fn read_forgets(&self) {
        let forgets = Forgets::new(self.channel.clone(), RECEIVE_BYTES, self.counts.clone()).map(Arc::new);
        let read = forgets.and_then(|forgets| {
            if let Some(fs) = &*self.slot.lock() {
                // Set once: there is one such thread.
                let _ = fs.forgets.set(forgets.clone());
            }
            forgets.watch(|| match &*self.slot.lock() {
                Some(fs) => fs.take_forgets(&forgets),
                None => Ok(None),
            })
        });
        if let Err(e) = read {
            tracing::error!(error = %e, "cannot receive from the FUSE device");
        }
    }

    /// Handles one frame of the device; false after DESTROY.
    fn serve_frame(&self, frame: &[u8], out: &mut Answer) -> bool {
        let mut req = match Request::parse(frame) {
            Ok(req) => req,
            Err(_) => {
                tracing::error!(bytes = frame.len(), "the kernel sent a FUSE request that does not parse");
                return true;
            }
        };
        out.clear();
        req.head.nodeid = self.channel.node(req.node()).0;
        let (opcode, unique) = (req.head.opcode, req.head.unique);
        // until it is answered
        let mut spending = None;
        match self.dispatch(&req, out, None, &mut spending) {
            Reply::Body if self.channel.reply(unique, out) => {}
            Reply::Body => {
                if let Some(fs) = &*self.slot.lock() {
                    fs.refused(self.channel.own(), opcode, out.body());
                }
            }
            Reply::Empty => self.channel.reply_empty(unique),
            Reply::Error(e) => self.channel.reply_error(unique, e),
            Reply::Deferred | Reply::Silent => {}
        }
        opcode != op::DESTROY
    }

    /// Handles a request of either transport, at the cost of its tenant for as long as `spending` lives.
    fn dispatch(
        &self,
        req: &Request<'_>,
        out: &mut Answer,
        ticket: Option<&Ticket>,
        spending: &mut Option<Spending>,
    ) -> Reply {
        self.served.count(self.i, req);
        if req.head.opcode == op::DESTROY {
            // answered when it is done, also where that panics
            let later = ticket.is_none().then(|| Later::new(&self.channel, req.head.unique, None));
            (self.close)();
            if let Some(later) = later {
                later.done(Ok(()));
                return Reply::Deferred;
            }
            return Reply::Empty;
        }
        self.handle(req, out, ticket, None, spending)
    }

    /// Handles a request that the volume is still there for. `received`: when another thread got it.
    fn handle(
        &self,
        req: &Request<'_>,
        out: &mut Answer,
        ticket: Option<&Ticket>,
        received: Option<Instant>,
        spending: &mut Option<Spending>,
    ) -> Reply {
        let (channel, unique, opcode) = (&self.channel, req.head.unique, req.head.opcode);
        let slot = self.slot.lock();
        *spending = slot.as_ref().and_then(|fs| fs.spend(req.node()));
        let mut begun = self.counts.begin_waited(opcode, received);
        self.counts.about(&mut begun, received, |at| {
            let bytes = match opcode {
                // of both the size lies at the same place
                op::READ | op::WRITE => req.arg::<abi::ReadIn>().ok().map(|r| r.size),
                _ => None,
            };
            Asked { opcode, node: req.head.nodeid, thread: req.head.pid, bytes, at }
        });
        let domain = || slot.as_ref().and_then(|fs| fs.vol.domain_of(req.node().ino()).ok());
        self.counts.of(&mut begun, req.head.pid, domain);
        let span = tracing::trace_span!("request", op = op::name(opcode), node = %req.node(), thread = req.head.pid);
        let _span = span.entered();
        let handled = match &*slot {
            // A panic is our bug; the request that ran into it fails, the mount lives on.
            Some(fs) => {
                let cx = Context::new(channel, unique, ticket).counted(Some(begun.counted(&self.counts)));
                catch_unwind(AssertUnwindSafe(|| fs.serve(req, out, &cx))).unwrap_or_else(|_| {
                    tracing::error!(op = op::name(opcode), node = %req.node(), "panic in a FUSE operation");
                    Err(Errno::IO)
                })
            }
            None if matches!(opcode, op::FORGET | op::BATCH_FORGET) => Ok(Outcome::Silent),
            None => Err(Errno::NODEV),
        };
        self.counts.end(&begun, &handled, req.head.pid);
        match handled {
            Ok(Outcome::Reply) => Reply::Body,
            Ok(Outcome::Deferred) => Reply::Deferred,
            Ok(Outcome::Silent) => Reply::Silent,
            Err(e) => {
                tracing::trace!(op = op::name(opcode), node = %req.node(), error = %e);
                Reply::Error(e)
            }
        }
    }
}
