//! Exports of NBD servers as devices.
//!
//! A client of our own: the kept crates know no reconnect, no several connections or need an async runtime, and libnbd is a C
//! library that is too old in stable distributions. It asks for fixed newstyle, NBD_OPT_GO and simple replies, no more.
//!
//! Requests are objects that live until they are answered, whatever connection they are sent on: [`request`] has them, [`link`] sends them and
//! reads the answers, [`keeper`] connects anew and sends again what was not answered, [`retained`] has the writes that no
//! flush has made durable. Invariants: a flush is sent only after the writes that it covers were acknowledged; after a
//! reconnect every write that was not made durable is sent again, and acknowledged, before anything else is sent; before that what
//! sound connections were sent is answered, or a quarter of its time has gone; a request is answered within the time of the URI, or the
//! device fails; but for one of the owner record, which alone fails then. A device that failed stays so. Does not promise: that a
//! server does not carry out requests of a connection that broke, later (docs/remote.md).

mod keeper;
mod link;
mod request;
mod retained;
mod socket;
mod uri;
mod wire;

pub use uri::{NbdUri, OpenHere, is_nbd_uri};

use crate::fence::{Fence, RecordIo};
use crate::flush::FlushGate;
use crate::throttle::{self, Throttle};
use crate::{BLOCK_BYTES, Device, Remote, WriteOp, bytes_of, check_discard, check_ops, check_range};
use braidfs_sync::device::Mutex;
use braidfs_sync::{IdleCondvar, rank};
use keeper::Dialled;
use link::Link;
use request::{Batch, Op, Request};
use retained::Retained;
use socket::Socket;
use std::collections::HashMap;
use std::io;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use wire::Export;

/// Most bytes of a request.
const CHUNK_BYTES: usize = 1 << 20;
/// Requests of one call that are in flight at once, and bytes of them.
const WAVE: usize = 256;
const WAVE_BYTES: usize = 16 << 20;
/// Bytes of writes that wait for a flush, from which on one is sent at once: so many are kept in memory, and as many as are
/// in flight.
const RETAINED_BYTES: usize = 64 << 20;
/// Most bytes of one TRIM.
const TRIM_BYTES: u64 = 1 << 30;
/// Most writes, and bytes, that are sent with FUA where a flush follows at once.
const THROUGH_WRITES: usize = 4;
const THROUGH_BYTES: usize = 64 << 10;

/// An export of an NBD server.
pub struct NbdDevice {
    shared: Arc<Shared>,
    keeper: Option<JoinHandle<()>>,
}

/// What callers, the keeper and the readers of connections share.
#[derive(Debug)]
struct Shared {
    uri: NbdUri,
    write: bool,
    /// As it was when it was opened.
    export: Export,
    blocks: AtomicU64,
    state: Mutex<State, rank::NbdState>,
    /// For the keeper: something happened that it must look at.
    changed: IdleCondvar,
    gate: FlushGate,
    /// Large batches step back behind small syncs.
    throttle: Arc<Throttle>,
    fence: Mutex<Option<Arc<Fence>>, rank::NbdFence>,
}

#[derive(Debug)]
struct State {
    phase: Phase,
    /// Counts the times of connecting: what happens to connections of an earlier time is of no interest.
    epoch: u64,
    links: Vec<Arc<Link>>,
    /// Connections that the keeper makes just now, for who closes the device.
    dialled: Vec<Arc<Socket>>,
    next_link: usize,
    cookie: u64,
    /// Requests without an answer, by their cookie.
    requests: HashMap<u64, Waiting>,
    retained: Retained,
    /// Something was answered since the last time of connecting.
    answered: bool,
    /// Of the threads that read answers.
    readers: Vec<JoinHandle<()>>,
    /// Since when no connection has answered anything after one broke.
    trouble: Option<Instant>,
    presence: Presence,
}

impl State {
    /// Whether an answer may come.
    fn in_flight(&self) -> bool {
        self.requests.values().any(|w| w.on.is_some())
    }

    /// Since when a request has waited for its answer, or for a connection. One that was sent again and again has waited since it
    /// was asked.
    fn since(&self, w: &Waiting) -> Instant {
        match self.trouble {
            _ if w.again > keeper::TRIES => w.asked,
            Some(trouble) => trouble.max(w.asked),
            None => w.sent,
        }
    }
}

/// For [`NbdUri::open_here`].
#[derive(Debug, Default)]
struct Presence {
    /// Of the mount that is served.
    name: Option<SocketAddr>,
    /// `None` while another process has the name: of a mount before, whose number this one was given.
    listener: Option<UnixListener>,
}

impl Presence {
    /// Takes the name, where it is free.
    fn take(&mut self) {
        if let (Some(name), None) = (&self.name, &self.listener) {
            self.listener = UnixListener::bind_addr(name).ok();
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Phase {
    Up,
    /// Connections are about to be given up: requests are kept back, and answers to those that were sent are waited for, until
    /// that moment at most. Else the server might carry them out behind what is sent on the next connections.
    Emptying {
        until: Option<Instant>,
    },
    Down,
    /// For good, with the reason.
    Dead(String),
    Closed,
}

/// How requests go to the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// Changes pass only while the lease lasts, and reads not behind its end: others may have written by then.
    Fenced,
    /// Past the fence.
    Unfenced,
    /// Past the fence, for the owner record: the holder of a lease asks again and again, also where nobody uses the device, which a
    /// server that is away meanwhile must not fail.
    Record,
}

/// A request without an answer.
#[derive(Debug)]
struct Waiting {
    request: Arc<Request>,
    asked: Instant,
    /// When it was sent, on the connections that there are now.
    sent: Instant,
    /// Where an answer may come: the place of a connection. `None`: it is to be sent (again).
    on: Option<usize>,
    /// How often it was sent again.
    again: u32,
}

/// An export cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NbdError {
    /// Nobody is there, or not in time.
    #[error("{uri}: cannot connect: {error}; is the server running, and host, port or socket right?")]
    Connect {
        /// As it was given.
        uri: String,
        /// Of the system.
        #[source]
        error: io::Error,
    },
    /// The server refuses, or does not keep to the protocol.
    #[error("{uri}: {why}")]
    Refused {
        /// As it was given.
        uri: String,
        /// What it said, and what to do.
        why: String,
    },
    /// Wanted for writing, but read-only.
    #[error(
        "{uri}: the server lets nobody write it; open the volume read-only, or have the server export it for writing"
    )]
    ReadOnly {
        /// As it was given.
        uri: String,
    },
    /// Nothing written would be durable.
    #[error(
        "{uri}: the server can neither FLUSH nor FUA, so that nothing would be durable: turn it on there (nbd-server: flush = true)"
    )]
    NotDurable {
        /// As it was given.
        uri: String,
    },
}

impl NbdDevice {
    /// Connects, and agrees with the server on the export. Connects anew by itself from then on.
    ///
    /// # Errors
    /// [`NbdError`].
    pub fn open(uri: &NbdUri, write: bool) -> Result<Self, NbdError> {
        let text = uri.text.clone();
        let by = Instant::now() + uri.timeout;
        let Dialled { export, links } = keeper::dial_all(uri, None, &by).map_err(|e| match e {
            wire::WireError::Io(error) => NbdError::Connect { uri: text.clone(), error },
            e => NbdError::Refused { uri: text.clone(), why: e.to_string() },
        })?;
        if write && export.read_only() {
            return Err(NbdError::ReadOnly { uri: text });
        }
        if write && !export.can_flush() && !export.can_fua() {
            return Err(NbdError::NotDurable { uri: text });
        }
        if export.block_min > BLOCK_BYTES as u32 || export.payload_max < BLOCK_BYTES as u32 {
            let why = format!(
                "it takes requests of {} to {} bytes, braidfs needs 4096",
                export.block_min, export.payload_max
            );
            return Err(NbdError::Refused { uri: text, why });
        }
        if export.bytes < BLOCK_BYTES as u64 {
            let why = format!("has {} bytes, too few to hold a volume; name the right export", export.bytes);
            return Err(NbdError::Refused { uri: text, why });
        }
        let links: Vec<_> = links.into_iter().enumerate().map(|(i, socket)| Link::new(i, socket)).collect();
        tracing::info!(
            device = %text, bytes = export.bytes, connections = links.len(), fua = export.can_fua(),
            trim = export.can_trim(), "connected"
        );
        let state = State {
            phase: Phase::Up,
            epoch: 0,
            links: links.clone(),
            dialled: Vec::new(),
            next_link: 0,
            cookie: 0,
            requests: HashMap::new(),
            retained: Retained::default(),
            answered: true,
            readers: Vec::new(),
            trouble: None,
            presence: Presence::default(),
        };
        let shared = Arc::new(Shared {
            uri: uri.clone(),
            write,
            export,
            blocks: AtomicU64::new(export.bytes / BLOCK_BYTES as u64),
            state: Mutex::new(state),
            changed: IdleCondvar::default(),
            gate: FlushGate::default(),
            throttle: Arc::default(),
            fence: Mutex::default(),
        });
        let failed = |error| NbdError::Connect { uri: text.clone(), error };
        let mut device = Self { shared: Arc::clone(&shared), keeper: None };
        for link in links {
            link::start_reader(&shared, link, 0).map_err(failed)?;
        }
        let keeper = std::thread::Builder::new().name("nbd-keeper".into()).spawn(move || keeper::run(&shared));
        device.keeper = Some(keeper.map_err(failed)?);
        Ok(device)
    }

    /// How many connections it has; 0 while there is none.
    pub fn connections(&self) -> usize {
        let state = self.shared.state.lock();
        if state.phase == Phase::Up { state.links.len() } else { 0 }
    }

    /// This process has the device open to serve `mount`, by the number of the file system that mountinfo has (`0:57`): who unmounts
    /// that finds it so by [`NbdUri::open_here`], until the device is closed.
    pub fn serves(&self, mount: &str) {
        // without a name nobody waits
        let name = self.shared.uri.presence(mount).ok();
        let mut state = self.shared.state.lock();
        state.presence = Presence { name, listener: None };
        // where that fails the keeper tries again
        state.presence.take();
    }

    /// The URI that the device was opened by.
    pub fn uri(&self) -> &NbdUri {
        &self.shared.uri
    }
}

impl Drop for NbdDevice {
    fn drop(&mut self) {
        self.shared.close();
        // The keeper itself may be the last that has the device, through the lease that it looks at: it ends when it comes back.
        if let Some(keeper) = self.keeper.take()
            && keeper.thread().id() != std::thread::current().id()
            && keeper.join().is_err()
        {
            tracing::error!("{}: its thread panicked", self.shared.uri.text);
        }
        // A process that forks next has none of them.
        let readers = std::mem::take(&mut self.shared.state.lock().readers);
        readers.into_iter().for_each(|r| drop(r.join()));
        // last: now nothing of it is under way
        self.shared.state.lock().presence = Presence::default();
    }
}

impl Shared {
    fn fence(&self) -> Option<Arc<Fence>> {
        self.fence.lock().clone()
    }

    /// Most bytes of a read or write: whole blocks.
    fn chunk(&self) -> usize {
        let most = CHUNK_BYTES.min(self.export.payload_max as usize);
        most - most % BLOCK_BYTES
    }

    /// Sends all of `ops`, at most a wave of them, and waits for the answers: what was read, by the index.
    fn run(&self, ops: Vec<Op>, way: Way) -> io::Result<Vec<Vec<u8>>> {
        let fence = self.fence().filter(|f| way == Way::Fenced && (ops.iter().any(Op::changes) || f.is_over()));
        // Held until all is handed to the kernel.
        let pass = fence.as_ref().map(|f| f.enter(self.uri.timeout)).transpose();
        let pass = pass.inspect_err(|e| self.waited_at_fence(e))?;
        let batch = Batch::of(ops.len());
        let mut sends = Vec::with_capacity(ops.len());
        let epoch;
        {
            let mut state = self.state.lock();
            match &state.phase {
                Phase::Dead(why) => return Err(io::Error::other(why.clone())),
                Phase::Closed => return Err(io::ErrorKind::NotConnected.into()),
                Phase::Up | Phase::Emptying { .. } | Phase::Down => {}
            }
            epoch = state.epoch;
            let now = Instant::now();
            for (index, op) in ops.into_iter().enumerate() {
                let cookie = state.cookie;
                state.cookie += 1;
                let kept = match &op {
                    Op::Write { block, data, kept: true, .. } => Some(state.retained.keep(*block, Arc::clone(data))),
                    _ => None,
                };
                let record = way == Way::Record;
                let request = Arc::new(Request { cookie, op, kept, batch: Arc::clone(&batch), index, record });
                let on = (state.phase == Phase::Up).then(|| (state.next_link + 1) % state.links.len());
                if let Some(next) = on {
                    state.next_link = next;
                    sends.push((Arc::clone(&state.links[next]), Arc::clone(&request)));
                }
                state.requests.insert(cookie, Waiting { request, asked: now, sent: now, on, again: 0 });
            }
        }
        // Where there is no connection, or it breaks, the keeper sends them. Those of other connections are waited for.
        for (link, request) in &sends {
            if let Err(e) = link.send(request) {
                self.broke(epoch, link, &e);
            }
        }
        drop(pass);
        batch.wait()
    }

    /// [`Self::run`] in waves; `each` gets the answers of a wave with the place of its first request. Those of a `large` batch of
    /// writes let small syncs go first.
    fn run_waves(
        &self,
        mut ops: impl Iterator<Item = Op>,
        (way, large): (Way, bool),
        mut each: impl FnMut(usize, Vec<Vec<u8>>),
    ) -> io::Result<()> {
        let mut first = 0;
        loop {
            let (mut wave, mut bytes) = (Vec::new(), 0);
            let most = self.throttle.short().filter(|_| large).map_or(WAVE_BYTES, |bytes| bytes.min(WAVE_BYTES));
            while wave.len() < WAVE && bytes < most {
                let Some(op) = ops.next() else { break };
                bytes += op.data().len() + op.answer_bytes();
                wave.push(op);
            }
            if wave.is_empty() {
                return Ok(());
            }
            if wave.iter().any(Op::changes) {
                self.make_room()?;
            }
            let n = wave.len();
            let _turn = large.then(|| self.throttle.enter(bytes));
            each(first, self.run(wave, way)?);
            first += n;
        }
    }

    /// Flushes where much waits for it in memory.
    fn make_room(&self) -> io::Result<()> {
        let full = || self.state.lock().retained.bytes() >= RETAINED_BYTES;
        if full() {
            self.gate.wrote();
            self.gate.flush(|| self.flush_once())?;
        }
        Ok(())
    }

    fn flush_once(&self) -> io::Result<()> {
        let covered = self.state.lock().retained.acknowledged();
        if self.export.can_flush() {
            self.run(vec![Op::Flush], Way::Unfenced)?;
        } else if let Phase::Dead(why) = &self.state.lock().phase {
            // each write was durable when it was acknowledged
            return Err(io::Error::other(why.clone()));
        }
        let mut state = self.state.lock();
        covered.into_iter().for_each(|n| state.retained.forget(n));
        Ok(())
    }

    /// The writes of a batch, cut into requests.
    fn writes<'a>(&'a self, ops: &'a [WriteOp<'_>], fua: bool) -> impl Iterator<Item = Op> + 'a {
        let fua = fua || !self.export.can_flush();
        let chunk = self.chunk();
        ops.iter().flat_map(move |op| {
            let bytes: usize = op.bufs.iter().map(|b| b.len()).sum();
            let mut rest = op.bufs.iter().copied();
            let mut now: &[u8] = &[];
            (0..bytes).step_by(chunk).map(move |at| {
                let mut data = Vec::with_capacity(chunk.min(bytes - at));
                while data.len() < chunk.min(bytes - at) {
                    if now.is_empty() {
                        now = rest.next().unwrap_or_default();
                    }
                    let n = now.len().min(chunk - data.len());
                    data.extend_from_slice(&now[..n]);
                    now = &now[n..];
                }
                Op::Write { block: op.block + (at / BLOCK_BYTES) as u64, data: data.into(), fua, kept: true }
            })
        })
    }

    fn may_write(&self) -> io::Result<()> {
        if self.write { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::EROFS)) }
    }

    fn read_as(&self, block: u64, buf: &mut [u8], way: Way) -> io::Result<()> {
        let (start, chunk, bytes) = (block * BLOCK_BYTES as u64, self.chunk(), buf.len());
        let ops = (0..bytes)
            .step_by(chunk)
            .map(|at| Op::Read { offset: start + at as u64, bytes: chunk.min(bytes - at) as u32 });
        self.run_waves(ops, (way, false), |first, answers| {
            for (i, data) in answers.into_iter().enumerate() {
                let at = (first + i) * chunk;
                buf[at..at + data.len()].copy_from_slice(&data);
            }
        })
    }
}

impl Device for NbdDevice {
    fn blocks(&self) -> u64 {
        self.shared.blocks.load(Ordering::Acquire)
    }

    fn read(&self, block: u64, buf: &mut [u8]) -> io::Result<()> {
        check_range(self.blocks(), block, buf.len(), io::ErrorKind::UnexpectedEof)?;
        self.shared.read_as(block, buf, Way::Fenced)
    }

    fn write_batch(&self, ops: &[WriteOp<'_>]) -> io::Result<()> {
        let shared = &self.shared;
        shared.may_write()?;
        check_ops(self.blocks(), ops)?;
        let large = bytes_of(ops) > throttle::SMALL_BYTES;
        let written = shared.run_waves(shared.writes(ops, false), (Way::Fenced, large), |_, _| {});
        // also of one that failed something may be written
        shared.gate.wrote();
        written
    }

    fn write_batch_through(&self, ops: &[WriteOp<'_>]) -> io::Result<()> {
        let shared = &self.shared;
        let bytes = bytes_of(ops);
        throttle::through(&shared.throttle, bytes, || {
            let small = ops.len() <= THROUGH_WRITES && bytes <= THROUGH_BYTES;
            // What was written before must be durable, too: else the flush that follows is needed anyway.
            if !(small && shared.export.can_fua() && shared.export.can_flush() && shared.gate.is_clean()) {
                return self.write_batch(ops);
            }
            shared.may_write()?;
            check_ops(self.blocks(), ops)?;
            let written = shared.run_waves(shared.writes(ops, true), (Way::Fenced, false), |_, _| {});
            if written.is_err() {
                shared.gate.wrote();
            }
            written
        })
    }

    fn end_sync(&self) {
        drop(throttle::flushed(&self.shared.throttle));
    }

    fn flush(&self) -> io::Result<()> {
        let _sync = throttle::flushed(&self.shared.throttle);
        self.shared.gate.flush(|| {
            self.shared.flush_once().inspect_err(|e| {
                tracing::error!("{}: flush failed ({e}): no later flush of it can be trusted", self.name());
            })
        })
    }

    fn shares_flushes(&self) -> bool {
        true
    }

    fn discard(&self, block: u64, blocks: u64) -> io::Result<()> {
        let shared = &self.shared;
        shared.may_write()?;
        check_discard(self.blocks(), block, blocks)?;
        if !shared.export.can_trim() {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "the NBD server knows no TRIM"));
        }
        let (start, bytes) = (block * BLOCK_BYTES as u64, blocks * BLOCK_BYTES as u64);
        let fua = !shared.export.can_flush();
        let ops = (0..bytes).step_by(TRIM_BYTES as usize).map(|at| Op::Trim {
            offset: start + at,
            bytes: TRIM_BYTES.min(bytes - at) as u32,
            fua,
        });
        let trimmed = shared.run_waves(ops, (Way::Fenced, false), |_, _| {});
        shared.gate.wrote();
        trimmed.map_err(|e| match e.raw_os_error() {
            Some(libc::EOPNOTSUPP) => io::Error::new(io::ErrorKind::Unsupported, e),
            _ => e,
        })
    }

    fn grown(&self) -> io::Result<u64> {
        let shared = &self.shared;
        let blocks = keeper::ask_size(&shared.uri)? / BLOCK_BYTES as u64;
        if blocks > self.blocks() {
            // Many servers fix the size for each connection: those that there are know the old one.
            shared.connect_anew();
            shared.read_as(blocks - 1, &mut [0; BLOCK_BYTES], Way::Fenced)?;
            shared.blocks.fetch_max(blocks, Ordering::AcqRel);
        }
        Ok(blocks)
    }

    fn extend(&self, blocks: u64) -> io::Result<()> {
        // nobody here makes an export longer, but on the server somebody may have
        if blocks <= self.blocks() || blocks <= self.grown()? {
            return Ok(());
        }
        Err(io::ErrorKind::Unsupported.into())
    }

    fn writable(&self) -> io::Result<Option<Arc<dyn Device>>> {
        // a mount that becomes writable would need a lease in between
        if self.shared.write { Ok(None) } else { Err(io::Error::from_raw_os_error(libc::EROFS)) }
    }

    fn remote(&self) -> Option<&dyn Remote> {
        Some(self)
    }

    fn name(&self) -> String {
        self.shared.uri.text.clone()
    }
}

impl Remote for NbdDevice {
    fn lease(&self) -> Option<Duration> {
        self.shared.uri.lease
    }

    fn io_timeout(&self) -> Duration {
        self.shared.uri.timeout
    }

    fn set_fence(&self, fence: Arc<Fence>) {
        *self.shared.fence.lock() = Some(Arc::clone(&fence));
        // What is there now may be the next owner's: nothing is read any more, either. Not an `Arc`, which would keep the
        // connections.
        let shared = Arc::downgrade(&self.shared);
        fence.when_lost(Box::new(move |why| {
            if let Some(shared) = shared.upgrade() {
                shared.fail(why.to_string());
            }
        }));
    }

    fn is_held(&self) -> bool {
        self.shared.fence().is_some_and(|f| f.is_open())
    }

    fn record_io(&self) -> Box<dyn RecordIo + '_> {
        Box::new(BesideTheFence(&self.shared))
    }
}

/// The owner record's way to the device.
struct BesideTheFence<'a>(&'a Shared);

impl RecordIo for BesideTheFence<'_> {
    fn read_record(&mut self, block: u64, buf: &mut [u8]) -> io::Result<()> {
        self.0.read_as(block, buf, Way::Record)
    }

    fn write_record(&mut self, block: u64, buf: &[u8]) -> io::Result<()> {
        self.0.may_write()?;
        let fua = self.0.export.can_fua();
        self.0.run(vec![Op::Write { block, data: buf.into(), fua, kept: false }], Way::Record)?;
        if !fua {
            self.0.run(vec![Op::Flush], Way::Record).inspect_err(|e| {
                // The server says so once: others' writes may be lost. One that is late says nothing: what it was to make durable
                // is sent again, and flushed by who waits for that.
                if e.raw_os_error().is_some() {
                    self.0.gate.fail(e);
                }
            })?;
        }
        Ok(())
    }
}

impl std::fmt::Debug for NbdDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NbdDevice")
            .field("uri", &self.shared.uri.text)
            .field("blocks", &self.blocks())
            .field("write", &self.shared.write)
            .finish_non_exhaustive()
    }
}
