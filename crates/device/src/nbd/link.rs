//! One connection: requests go out whole, one behind the other; a thread reads the answers.

use super::request::Request;
use super::socket::{Deadline, Socket, Timed};
use super::wire::{REPLY_BYTES, Reply, WireError};
use super::{Phase, Shared};
use braidfs_sync::device::Mutex;
use braidfs_sync::rank;
use std::io::{self, Read};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A connection on which the export was agreed on.
#[derive(Debug)]
pub(super) struct Link {
    /// Its place among those that were made at once.
    pub(super) index: usize,
    socket: Arc<Socket>,
    /// Held while a request goes out.
    sending: Mutex<(), rank::NbdSend>,
}

impl Link {
    pub(super) fn new(index: usize, socket: Arc<Socket>) -> Arc<Self> {
        Arc::new(Self { index, socket, sending: Mutex::default() })
    }

    /// Hands a request to the kernel.
    pub(super) fn send(&self, request: &Request) -> io::Result<()> {
        let _sending = self.sending.lock();
        self.whole(self.socket.send(&request.op.head(request.cookie), request.op.data()))
    }

    /// Of who still has the right to send: behind a request that has gone out in part nothing follows, which the server would take
    /// for its rest.
    fn whole(&self, sent: io::Result<()>) -> io::Result<()> {
        sent.inspect_err(|_| self.socket.abort())
    }

    /// As [`Self::send`], or fails by the deadline, for whoever sends meanwhile, too: it is the keeper that sees that they are late.
    pub(super) fn send_by(&self, request: &Request, by: Instant) -> io::Result<()> {
        let _sending = loop {
            match self.sending.try_lock() {
                Some(sending) => break sending,
                None if by.left().is_zero() => return Err(io::ErrorKind::TimedOut.into()),
                None => std::thread::sleep(Duration::from_millis(1)),
            }
        };
        let timed = Timed { socket: &self.socket, by: &by };
        let sent = timed.send(&request.op.head(request.cookie), request.op.data());
        self.whole(sent.and_then(|()| self.socket.set_write_patience(None)))
    }

    /// Says good-bye, where nobody is just sending.
    pub(super) fn disconnect(&self) {
        if let Some(_sending) = self.sending.try_lock() {
            let head = super::wire::request(super::wire::Command::Disconnect, false, 0, 0, 0);
            // An error: it is gone already.
            let _ = self.socket.set_patience(Some(Duration::from_millis(100)));
            let _ = self.socket.send(&head, &[]);
        }
        self.socket.close();
    }

    pub(super) fn abort(&self) {
        self.socket.abort();
    }
}

/// Starts the thread that reads the answers of `link`, until it breaks.
pub(super) fn start_reader(shared: &Arc<Shared>, link: Arc<Link>, epoch: u64) -> io::Result<()> {
    let ours = Arc::clone(shared);
    let reader = std::thread::Builder::new().name("nbd-reader".into()).spawn(move || {
        let e = read_answers(&ours, &link, epoch);
        ours.broke(epoch, &link, &e);
    })?;
    let mut state = shared.state.lock();
    // those of connections that are gone have ended
    state.readers.retain(|r| !r.is_finished());
    state.readers.push(reader);
    Ok(())
}

/// Reads answers until something goes wrong: what it was.
fn read_answers(shared: &Shared, link: &Link, epoch: u64) -> io::Error {
    loop {
        if let Err(e) = read_answer(shared, link, epoch) {
            return e.into();
        }
    }
}

fn read_answer(shared: &Shared, link: &Link, epoch: u64) -> Result<(), WireError> {
    let mut stream = &*link.socket;
    let mut head = [0; REPLY_BYTES];
    stream.read_exact(&mut head)?;
    let reply = Reply::parse(&head)?;
    if reply.is_shutdown() {
        return Err(io::Error::other("the server is shutting down").into());
    }
    let request = {
        let state = shared.state.lock();
        match state.requests.get(&reply.cookie) {
            Some(w) if state.epoch == epoch => Arc::clone(&w.request),
            _ => return Err(WireError::Protocol(format!("an answer to a request {} that there is not", reply.cookie))),
        }
    };
    let mut data = Vec::new();
    let result = reply.result();
    if result.is_ok() {
        // as much as we asked for
        data.resize(request.op.answer_bytes(), 0);
        stream.read_exact(&mut data)?;
    }
    shared.answered(epoch, &request, result.map(|()| data));
    Ok(())
}

impl Shared {
    /// A connection of this epoch gave the answer.
    fn answered(&self, epoch: u64, request: &Request, result: io::Result<Vec<u8>>) {
        {
            let mut state = self.state.lock();
            // else the keeper has it, and sends it again
            let known = state.epoch == epoch && matches!(state.phase, Phase::Up | Phase::Emptying { .. });
            if !known || state.requests.remove(&request.cookie).is_none() {
                return;
            }
            if state.phase == Phase::Up {
                state.trouble = None;
            } else {
                // perhaps the last one that was waited for
                self.changed.notify_all();
            }
            state.answered = true;
            match (request.kept, &result) {
                (Some(number), Ok(_)) => state.retained.acknowledge(number),
                (Some(number), Err(_)) => state.retained.forget(number),
                (None, _) => {}
            }
        }
        request.batch.end(request.index, result);
    }
}

#[cfg(test)]
mod tests {
    use super::super::request::{Batch, Op};
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn nothing_follows_a_part_of_a_request() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let link = Link::new(0, Arc::new(Socket::Unix(ours)));
        let write = |bytes: usize| {
            let op = Op::Write { block: 0, data: vec![1; bytes].into(), fua: false, kept: false };
            Request { cookie: 0, op, kept: None, batch: Batch::of(1), index: 0, record: false }
        };
        // more than the kernel keeps of it
        let e = link.send_by(&write(64 << 20), Instant::now() + Duration::from_millis(50)).unwrap_err();
        assert_eq!(e.kind(), io::ErrorKind::TimedOut);
        // the server takes all that comes, until the connection is gone
        let server = std::thread::spawn(move || io::copy(&mut theirs, &mut io::sink()));
        let behind = link.send(&write(4096));
        drop(link);
        server.join().unwrap().unwrap();
        behind.unwrap_err();
    }
}
