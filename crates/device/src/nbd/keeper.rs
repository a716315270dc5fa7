//! The thread that keeps a device connected: it notices requests that are not answered in time, connects anew, sends again
//! what must be, and declares the device dead.

use super::link::{Link, start_reader};
use super::request::Op;
use super::socket::{Deadline, Socket, Sooner, Timed};
use super::uri::NbdUri;
use super::wire::{self, Command, Export, REPLY_BYTES, Reply, WireError};
use super::{Phase, Shared, Waiting};
use crate::BLOCK_BYTES;
use crate::fence::RecordIo;
use std::io::{self, Read};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How long connecting once may take, with the negotiation.
const DIAL_PATIENCE: Duration = Duration::from_secs(5);
/// Pauses between tries, doubled from one to the other.
const PAUSE_MIN: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// How often a request is sent again by new connections before it may be too late for it whatever else is answered: perhaps it
/// is what makes the server close them.
pub(super) const TRIES: u32 = 8;
/// Where a connection breaks, answers on the others are waited for during this part of the time that a request has.
const EMPTYING: u32 = 4;
/// Writes sent again before their answers are read: these must fit into the server's socket.
const AGAIN: usize = 64;

/// Connections on which the export was agreed on.
pub(super) struct Dialled {
    pub(super) export: Export,
    pub(super) links: Vec<Arc<Socket>>,
}

fn dial(uri: &NbdUri, by: &dyn Deadline) -> Result<(Export, Arc<Socket>), WireError> {
    let began = Instant::now();
    let by = Sooner(by, began + DIAL_PATIENCE.min(uri.timeout));
    let socket = Arc::new(Socket::connect(&uri.place, &by, uri.timeout)?);
    by.made(&socket)?;
    let export = wire::negotiate(&mut Timed { socket: &socket, by: &by }, &uri.export).map_err(|e| match e {
        WireError::Io(e) if e.kind() == io::ErrorKind::TimedOut => {
            let time = began.elapsed().as_secs_f32();
            let text = format!("it does not agree on the export within {time:.1} s: does it serve another client?");
            WireError::Io(io::Error::new(io::ErrorKind::TimedOut, text))
        }
        WireError::Io(e) if e.kind() == io::ErrorKind::UnexpectedEof => {
            WireError::Io(io::Error::new(e.kind(), "the server closed the connection: does it serve another client?"))
        }
        e => e,
    })?;
    Ok((export, socket))
}

/// Connects once, and where the server allows it several times. `was`: what the export must be like.
pub(super) fn dial_all(uri: &NbdUri, was: Option<&Export>, by: &dyn Deadline) -> Result<Dialled, WireError> {
    let (export, first) = dial(uri, by)?;
    if let Some(was) = was {
        check_same(was, &export)?;
    }
    let mut links = vec![first];
    while export.can_multi_conn() && links.len() < uri.connections {
        // fewer do, too
        match dial(uri, by) {
            Ok((other, link)) if other == export => links.push(link),
            _ => break,
        }
    }
    // until somebody asks otherwise
    links.iter().try_for_each(|l| l.set_patience(None))?;
    Ok(Dialled { export, links })
}

fn check_same(was: &Export, is: &Export) -> Result<(), WireError> {
    let other = |what: &str| Err(WireError::Refused(format!("it is another export than before: {what}")));
    match () {
        () if is.bytes < was.bytes => other(&format!("it has {} bytes, not {}", is.bytes, was.bytes)),
        () if is.read_only() && !was.read_only() => other("it is read-only"),
        () if was.can_flush() && !is.can_flush() || was.can_fua() && !is.can_fua() => other("it knows no FLUSH or FUA"),
        () if is.block_min > was.block_min.max(BLOCK_BYTES as u32) || is.payload_max < was.payload_max => {
            other("it takes other sizes of requests")
        }
        () => Ok(()),
    }
}

/// How large the export is now, by a connection of its own.
pub(super) fn ask_size(uri: &NbdUri) -> io::Result<u64> {
    let (export, socket) = dial(uri, &(Instant::now() + uri.timeout))?;
    // An error: it has closed it.
    let _ = socket.send(&wire::request(Command::Disconnect, false, 0, 0, 0), &[]);
    Ok(export.bytes)
}

/// Works until the device is closed or dead.
pub(super) fn run(shared: &Arc<Shared>) {
    let look = (shared.uri.timeout / 16).min(Duration::from_secs(1));
    let mut pause = PAUSE_MIN;
    // why the last try failed
    let mut last = String::new();
    loop {
        shared.end_late_records();
        let mut state = shared.state.lock();
        state.presence.take();
        match state.phase {
            Phase::Closed | Phase::Dead(_) => return,
            Phase::Up => {
                drop(state);
                if shared.is_late() {
                    shared.die(&shared.no_answer());
                    continue;
                }
                state = shared.state.lock();
                if state.phase == Phase::Up {
                    shared.changed.wait_for(&mut state, look);
                }
            }
            Phase::Emptying { until } => {
                drop(state);
                if shared.is_late() {
                    shared.die(&shared.no_answer());
                } else if !shared.has_emptied() {
                    let mut state = shared.state.lock();
                    let left = until.map_or(look, |u| u.saturating_duration_since(Instant::now()).min(look));
                    if state.in_flight() {
                        shared.changed.wait_for(&mut state, left);
                    }
                }
            }
            Phase::Down => {
                // Not so a server that takes connections and breaks them before it answers anything.
                if std::mem::take(&mut state.answered) {
                    pause = PAUSE_MIN;
                } else {
                    shared.changed.wait_for(&mut state, pause);
                    pause = (pause * 2).min(PAUSE_MAX);
                    if state.phase != Phase::Down {
                        continue;
                    }
                }
                drop(state);
                // connections may be gone again each time before this thread finds them up
                if shared.is_tried_too_often() {
                    shared.die(&shared.no_answer());
                    continue;
                }
                let Err(why) = shared.reconnect() else {
                    last.clear();
                    continue;
                };
                // that the time is over in the middle of a try says less than the end of the one before it
                let is_cut = matches!(&why, WireError::Io(e) if e.kind() == io::ErrorKind::TimedOut);
                if !is_cut || last.is_empty() {
                    last = why.to_string();
                }
                if !why.may_pass() {
                    shared.die(&why.to_string());
                } else if shared.is_late() {
                    shared.die(&format!("no connection within {} s: {last}", shared.uri.timeout.as_secs()));
                } else {
                    tracing::debug!(device = %shared.uri.text, error = %why, "not connected yet");
                }
            }
        }
    }
}

impl Shared {
    /// Something is wrong with a connection of this epoch: the keeper makes new ones. What the others were sent is waited for
    /// before, or the server might carry it out behind what the next ones are sent.
    pub(super) fn broke(&self, epoch: u64, link: &Link, e: &io::Error) {
        {
            let mut state = self.state.lock();
            let until = match state.phase {
                Phase::Up => None,
                Phase::Emptying { until } => until,
                _ => return,
            };
            if state.epoch != epoch {
                return;
            }
            let now = Instant::now();
            state.trouble.get_or_insert(now);
            state.requests.values_mut().filter(|w| w.on == Some(link.index)).for_each(|w| w.on = None);
            state.phase = Phase::Emptying { until: until.or(Some(now + self.uri.timeout / EMPTYING)) };
        }
        tracing::warn!(device = %self.uri.text, error = %e, "a connection is lost: connecting anew");
        link.abort();
        self.changed.notify_all();
    }

    /// The server is well, but new connections are wanted: once all is answered that was sent on those that there are.
    pub(super) fn connect_anew(&self) {
        {
            let mut state = self.state.lock();
            if state.phase != Phase::Up {
                return;
            }
            state.phase = Phase::Emptying { until: None };
        }
        self.changed.notify_all();
    }

    /// Ends the connections where no answer is waited for any more. False: one is.
    fn has_emptied(&self) -> bool {
        let links = {
            let mut state = self.state.lock();
            let Phase::Emptying { until } = state.phase else { return true };
            let now = Instant::now();
            if state.in_flight() && until.is_none_or(|u| now < u) {
                return false;
            }
            state.phase = Phase::Down;
            state.epoch += 1;
            state.trouble.get_or_insert(now);
            state.requests.values_mut().for_each(|w| w.on = None);
            std::mem::take(&mut state.links)
        };
        links.iter().for_each(|l| l.abort());
        true
    }

    /// Whether a request has waited for too long: for its answer, or for a connection.
    fn is_late(&self) -> bool {
        self.late_at().is_some_and(|t| Instant::now() >= t)
    }

    /// When the first request that waits, but for those of the owner record, has waited for too long.
    fn late_at(&self) -> Option<Instant> {
        let state = self.state.lock();
        let waiting = state.requests.values().filter(|w| !w.request.record);
        waiting.map(|w| state.since(w)).min().map(|t| t + self.uri.timeout)
    }

    /// Whether one is late though the server answers others.
    fn is_tried_too_often(&self) -> bool {
        let state = self.state.lock();
        let late = |w: &Waiting| w.again > TRIES && w.asked.elapsed() >= self.uri.timeout;
        state.requests.values().any(|w| !w.request.record && late(w))
    }

    /// Requests of the owner record that have waited for too long end. Nothing of them may be carried out later than that, so the
    /// connections that they were sent on are broken.
    fn end_late_records(&self) {
        let now = Instant::now();
        let (epoch, ended, links) = {
            let mut state = self.state.lock();
            let late = |w: &Waiting| w.request.record && now >= state.since(w) + self.uri.timeout;
            let late: Vec<u64> = state.requests.iter().filter(|(_, w)| late(w)).map(|(cookie, _)| *cookie).collect();
            let ended: Vec<Waiting> = late.iter().filter_map(|c| state.requests.remove(c)).collect();
            let sent = || ended.iter().filter(|w| w.on.is_some());
            if let Some(sent) = sent().map(|w| w.sent).min() {
                // others that wait for an answer do so for no longer by this
                state.trouble.get_or_insert(sent);
            }
            let links: Vec<_> = sent().filter_map(|w| state.links.get(w.on?).cloned()).collect();
            (state.epoch, ended, links)
        };
        let late = || io::Error::new(io::ErrorKind::TimedOut, format!("{}: {}", self.uri.text, self.no_answer()));
        links.iter().for_each(|link| self.broke(epoch, link, &late()));
        for waiting in ended {
            let r = waiting.request;
            r.batch.end(r.index, Err(late()));
        }
    }

    /// Who wants to send something has got this from the fence. Where there is no connection it has waited for the server.
    pub(super) fn waited_at_fence(&self, e: &io::Error) {
        if e.kind() == io::ErrorKind::TimedOut && self.state.lock().phase != Phase::Up {
            self.die(&self.no_answer());
        }
    }

    fn no_answer(&self) -> String {
        format!("no answer within {} s", self.uri.timeout.as_secs())
    }

    /// The device fails for good.
    fn die(&self, why: &str) {
        self.fail(format!("{}: {why}", self.uri.text));
    }

    /// [`Self::die`], where `text` names the device.
    pub(super) fn fail(&self, text: String) {
        let (links, requests) = {
            let mut state = self.state.lock();
            if matches!(state.phase, Phase::Closed | Phase::Dead(_)) {
                return;
            }
            state.phase = Phase::Dead(text.clone());
            state.epoch += 1;
            (std::mem::take(&mut state.links), std::mem::take(&mut state.requests))
        };
        tracing::error!("{text}: the device has failed");
        self.changed.notify_all();
        self.gate.fail(&io::Error::other(text.clone()));
        if let Some(fence) = self.fence() {
            // nobody renews the lease any more: who waits for that waits in vain
            fence.lose(text.clone());
        }
        links.iter().for_each(|l| l.abort());
        for waiting in requests.into_values() {
            let r = waiting.request;
            r.batch.end(r.index, Err(io::Error::other(text.clone())));
        }
    }

    /// Nobody uses the device any more.
    pub(super) fn close(&self) {
        let (links, dialled) = {
            let mut state = self.state.lock();
            state.phase = Phase::Closed;
            state.epoch += 1;
            (std::mem::take(&mut state.links), std::mem::take(&mut state.dialled))
        };
        // the keeper is waited for, and may wait for the server on these
        dialled.iter().for_each(|s| s.abort());
        links.iter().for_each(|l| l.disconnect());
        self.changed.notify_all();
    }

    /// Connects, looks whether the volume is still ours, brings the server to where it was, and sends what has no answer.
    fn reconnect(self: &Arc<Self>) -> Result<(), WireError> {
        // where nobody waits; longer than it takes to connect and to look at a lease that has ended
        let end = Instant::now() + self.uri.timeout.max(DIAL_PATIENCE);
        let result = self.reconnect_by(&Reconnecting { shared: self, end: Some(end) });
        let dialled = std::mem::take(&mut self.state.lock().dialled);
        drop(dialled);
        result
    }

    fn reconnect_by(self: &Arc<Self>, by: &Reconnecting<'_>) -> Result<(), WireError> {
        // as large as it was when it was opened, or found to have grown since
        let mut was = self.export;
        was.bytes = was.bytes.max(self.blocks.load(Ordering::Acquire) * BLOCK_BYTES as u64);
        let Dialled { export: _, links } = dial_all(&self.uri, Some(&was), by)?;
        let mut fresh = Fresh { timed: Timed { socket: &links[0], by }, fua: self.export.can_fua() };
        if let Some(fence) = self.fence() {
            fence.rejoin(&mut fresh).map_err(|e| match e.kind() {
                io::ErrorKind::PermissionDenied => WireError::Refused(e.to_string()),
                _ => WireError::Io(e),
            })?;
        }
        let end = self.send_retained(&mut fresh)?;
        links[0].set_patience(None)?;
        let links: Vec<_> = links.into_iter().enumerate().map(|(i, socket)| Link::new(i, socket)).collect();
        let (epoch, done, again) = {
            let mut state = self.state.lock();
            if state.phase != Phase::Down {
                return Ok(());
            }
            let epoch = state.epoch;
            let now = Instant::now();
            let written: Vec<u64> = state
                .requests
                .iter()
                .filter(|(_, w)| w.request.kept.is_some_and(|n| n < end))
                .map(|(cookie, _)| *cookie)
                .collect();
            let done: Vec<_> = written.iter().filter_map(|c| state.requests.remove(c)).collect();
            for number in done.iter().filter_map(|w| w.request.kept) {
                state.retained.acknowledge(number);
            }
            let mut again: Vec<_> = state
                .requests
                .values_mut()
                .map(|w| {
                    w.sent = now;
                    w.again += 1;
                    Arc::clone(&w.request)
                })
                .collect();
            again.sort_by_key(|r| r.cookie);
            state.links.clone_from(&links);
            state.phase = Phase::Up;
            if again.is_empty() {
                state.trouble = None;
            }
            (epoch, done, again)
        };
        tracing::info!(device = %self.uri.text, again = done.len() + again.len(), "connected again");
        for waiting in done {
            let r = waiting.request;
            r.batch.end(r.index, Ok(Vec::new()));
        }
        for link in &links {
            if let Err(e) = start_reader(self, Arc::clone(link), epoch) {
                self.broke(epoch, link, &e);
                return Ok(());
            }
        }
        // While this thread sends nobody else looks whether a request is late: a server that takes nothing must not hold it.
        let by = Reconnecting { shared: self, end: None };
        for (request, link) in again.iter().zip(links.iter().cycle()) {
            // A lease that ended meanwhile is renewed, or lost, by another thread.
            let fence = self.fence().filter(|_| request.op.changes());
            let pass = fence.as_ref().map(|f| f.enter(by.left())).transpose();
            if pass.is_ok() && !self.is_sent_on(epoch, request.cookie, link.index) {
                // one has broken: all that has no answer is sent again by the next ones
                return Ok(());
            }
            let sent = pass.and_then(|_pass| link.send_by(request, by.until()));
            if let Err(e) = sent {
                self.broke(epoch, link, &e);
                return Err(e.into());
            }
            if self.is_late() {
                // it was sent piece by piece, too slowly
                return Ok(());
            }
        }
        Ok(())
    }

    /// A request is about to be sent on a connection; false: no more.
    fn is_sent_on(&self, epoch: u64, cookie: u64, link: usize) -> bool {
        let mut state = self.state.lock();
        let up = state.epoch == epoch && state.phase == Phase::Up;
        if let Some(w) = state.requests.get_mut(&cookie).filter(|_| up) {
            w.on = Some(link);
        }
        up
    }

    /// Sends all writes that are not durable again: the newest content of each block. Those below the number that it returns
    /// are acknowledged then, and durable where a caller asked for that.
    fn send_retained(&self, fresh: &mut Fresh<'_>) -> Result<u64, WireError> {
        let (end, runs, durable) = {
            let state = self.state.lock();
            let durable = state.requests.values().any(|w| matches!(w.request.op, Op::Write { fua: true, .. }));
            (state.retained.end(), state.retained.newest(), durable)
        };
        if runs.is_empty() {
            return Ok(end);
        }
        tracing::info!(device = %self.uri.text, writes = runs.len(), "sending again what may not be durable");
        let chunk = self.chunk();
        let pieces: Vec<_> = runs
            .iter()
            .flat_map(|(block, data, part)| {
                let data = &data[part.clone()];
                data.chunks(chunk).enumerate().map(move |(i, d)| (block + (i * chunk / BLOCK_BYTES) as u64, d))
            })
            .collect();
        let fence = self.fence();
        for wave in pieces.chunks(AGAIN) {
            // renewed a moment ago; where it has ended since, all begins anew
            let pass = fence.as_ref().map(|f| f.enter(Duration::ZERO)).transpose()?;
            for (i, (block, data)) in wave.iter().enumerate() {
                let fua = !self.export.can_flush();
                let offset = block * BLOCK_BYTES as u64;
                let head = wire::request(Command::Write, fua, i as u64, offset, data.len() as u32);
                fresh.timed.send(&head, data)?;
            }
            drop(pass);
            let mut left: Vec<bool> = vec![true; wave.len()];
            for _ in 0..wave.len() {
                let reply = fresh.reply()?;
                match usize::try_from(reply.cookie).ok().and_then(|i| left.get_mut(i)) {
                    Some(left) if *left => *left = false,
                    _ => return Err(WireError::Protocol("an answer to a request that there is not".into())),
                }
                // It was acknowledged before, perhaps: nobody can be told any more but by the device's end.
                reply.result().map_err(|e| {
                    WireError::Refused(format!("a write that was not durable failed when it was sent again: {e}"))
                })?;
            }
        }
        if durable && self.export.can_flush() {
            fresh.command(&wire::request(Command::Flush, false, 0, 0, 0), &[], &mut [])?;
        }
        Ok(end)
    }
}

/// Connecting anew ends when a request that waits for it is late, and when nobody uses the device any more.
struct Reconnecting<'a> {
    shared: &'a Shared,
    /// Where none waits.
    end: Option<Instant>,
}

impl Deadline for Reconnecting<'_> {
    fn until(&self) -> Instant {
        if self.shared.state.lock().phase == Phase::Closed {
            return Instant::now();
        }
        [self.shared.late_at(), self.end].into_iter().flatten().min().unwrap_or_else(|| Instant::now() + DIAL_PATIENCE)
    }

    fn made(&self, socket: &Arc<Socket>) -> io::Result<()> {
        let mut state = self.shared.state.lock();
        if state.phase != Phase::Down {
            return Err(io::ErrorKind::NotConnected.into());
        }
        state.dialled.push(Arc::clone(socket));
        Ok(())
    }
}

/// A connection that nothing else uses yet, for one request after the other.
struct Fresh<'a> {
    timed: Timed<'a>,
    fua: bool,
}

impl Fresh<'_> {
    fn reply(&mut self) -> Result<Reply, WireError> {
        let mut head = [0; REPLY_BYTES];
        self.timed.read_exact(&mut head)?;
        let reply = Reply::parse(&head)?;
        if reply.is_shutdown() {
            return Err(io::Error::other("the server is shutting down").into());
        }
        Ok(reply)
    }

    fn command(&mut self, head: &[u8], data: &[u8], answer: &mut [u8]) -> Result<(), WireError> {
        self.timed.send(head, data)?;
        self.reply()?.result()?;
        self.timed.read_exact(answer)?;
        Ok(())
    }
}

impl RecordIo for Fresh<'_> {
    fn read_record(&mut self, block: u64, buf: &mut [u8]) -> io::Result<()> {
        let head = wire::request(Command::Read, false, 0, block * BLOCK_BYTES as u64, buf.len() as u32);
        Ok(self.command(&head, &[], buf)?)
    }

    fn write_record(&mut self, block: u64, buf: &[u8]) -> io::Result<()> {
        let head = wire::request(Command::Write, self.fua, 0, block * BLOCK_BYTES as u64, buf.len() as u32);
        self.command(&head, buf, &mut [])?;
        if !self.fua {
            self.command(&wire::request(Command::Flush, false, 0, 0, 0), &[], &mut [])?;
        }
        Ok(())
    }
}
