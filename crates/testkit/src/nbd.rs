//! An NBD server inside the test, with a volatile cache: it can lose what nobody flushed, cut connections, hang and go away.
//!
//! Fixed newstyle, NBD_OPT_GO, simple replies; a thread per connection, which carries out one request after the other, but for
//! a write that is to come late. It notes each command in the order in which it was carried out.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

const BLOCK: u64 = 4096;

/// Transmission flags that a server may offer.
#[derive(Debug, Clone, Copy)]
pub struct Offers {
    /// NBD_FLAG_READ_ONLY: writes are refused.
    pub read_only: bool,
    /// NBD_FLAG_SEND_FLUSH: it knows NBD_CMD_FLUSH.
    pub flush: bool,
    /// NBD_FLAG_SEND_FUA: it knows NBD_CMD_FLAG_FUA.
    pub fua: bool,
    /// NBD_FLAG_SEND_TRIM: it knows NBD_CMD_TRIM.
    pub trim: bool,
    /// NBD_FLAG_CAN_MULTI_CONN: several connections may be used at once.
    pub multi: bool,
}

impl Default for Offers {
    fn default() -> Self {
        Self { read_only: false, flush: true, fua: true, trim: true, multi: true }
    }
}

/// A command that was carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Done {
    /// `r`, `w`, `f` or `t`.
    pub what: char,
    /// Its first block.
    pub block: u64,
    /// Number of blocks.
    pub blocks: u64,
    /// Whether it came with NBD_CMD_FLAG_FUA.
    pub fua: bool,
    /// Number of the connection, from 0 on.
    pub connection: u64,
    /// When it was carried out.
    pub at: Instant,
}

#[derive(Default)]
struct Disk {
    durable: HashMap<u64, Vec<u8>>,
    /// Acknowledged; lost where the server is killed.
    cache: HashMap<u64, Vec<u8>>,
}

struct Inner {
    disk: Mutex<Disk>,
    bytes: AtomicU64,
    offers: Mutex<Offers>,
    done: Mutex<Vec<Done>>,
    connections: Mutex<HashMap<u64, UnixStream>>,
    next: AtomicU64,
    up: AtomicBool,
    /// Requests until the connection is cut, half of the time before the request is carried out, half of the time behind it.
    until_cut: AtomicU64,
    cut_every: AtomicU64,
    cuts: AtomicU64,
    /// One more than the block whose requests cut their connections; 0: none.
    poison: AtomicU64,
    /// Requests whose turn comes are held back.
    hung: Mutex<bool>,
    go_on: Condvar,
    /// Milliseconds that each write waits before it is carried out.
    write_delay: AtomicU64,
    /// Milliseconds that the next write is carried out later by, whatever becomes of its connection; 0: none.
    late: AtomicU64,
    /// One more than the number of the connection that the late write came on; 0: it has not come.
    late_on: AtomicU64,
    /// Writes that fail, by their number from now on.
    fail_write: AtomicU64,
    /// Code of the reply by which the export is refused; 0: it is given.
    refuse: AtomicU64,
}

/// See the module. Ends when it is dropped.
pub struct NbdServer {
    inner: Arc<Inner>,
    socket: PathBuf,
}

impl NbdServer {
    /// Serves a blank export of `bytes` bytes on a socket in `dir`.
    ///
    /// # Panics
    /// Where the socket cannot be made.
    pub fn start(dir: &std::path::Path, bytes: u64, offers: Offers) -> Self {
        let inner = Arc::new(Inner {
            disk: Mutex::default(),
            bytes: AtomicU64::new(bytes),
            offers: Mutex::new(offers),
            done: Mutex::default(),
            connections: Mutex::default(),
            next: AtomicU64::new(0),
            up: AtomicBool::new(false),
            until_cut: AtomicU64::new(0),
            cut_every: AtomicU64::new(0),
            cuts: AtomicU64::new(0),
            poison: AtomicU64::new(0),
            hung: Mutex::new(false),
            go_on: Condvar::new(),
            write_delay: AtomicU64::new(0),
            late: AtomicU64::new(0),
            late_on: AtomicU64::new(0),
            fail_write: AtomicU64::new(0),
            refuse: AtomicU64::new(0),
        });
        let server = Self { inner, socket: dir.join("nbd.sock") };
        server.restart();
        server
    }

    /// Its URI, with parameters.
    pub fn uri(&self, parameters: &str) -> String {
        format!("nbd+unix:///x?socket={}&{parameters}", self.socket.display())
    }

    /// Listens (again).
    ///
    /// # Panics
    /// Where the socket cannot be made.
    pub fn restart(&self) {
        let listener = UnixListener::bind(&self.socket).unwrap();
        self.inner.up.store(true, SeqCst);
        let inner = Arc::clone(&self.inner);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let Ok(stream) = stream else { return };
                if !inner.up.load(SeqCst) {
                    return;
                }
                let number = inner.next.fetch_add(1, SeqCst);
                inner.connections.lock().unwrap().insert(number, stream.try_clone().unwrap());
                let inner = Arc::clone(&inner);
                std::thread::spawn(move || {
                    // An error: the other end is gone, or this one was cut.
                    let _ = inner.serve(&stream, number);
                    inner.connections.lock().unwrap().remove(&number);
                    let _ = stream.shutdown(std::net::Shutdown::Both);
                });
            }
        });
    }

    /// Cuts all connections. What was acknowledged stays.
    pub fn cut(&self) {
        for (_, stream) in self.inner.connections.lock().unwrap().drain() {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }

    /// Goes away, as by SIGKILL and the loss of the machine's memory: what was not flushed is lost.
    pub fn kill(&self) {
        self.stop();
        self.inner.disk.lock().unwrap().cache.clear();
    }

    /// Goes away; what was acknowledged stays.
    pub fn stop(&self) {
        let _ = std::fs::remove_file(&self.socket);
        if self.inner.up.swap(false, SeqCst) {
            // whoever waits for the listener finds it gone
            self.hang(false);
        }
        self.cut();
    }

    /// From now on each connection is cut again and again, after so many requests of all; 0: never.
    pub fn cut_every(&self, requests: u64) {
        self.inner.cut_every.store(requests, SeqCst);
        self.inner.until_cut.store(requests, SeqCst);
    }

    /// How many connections [`Self::cut_every`] has cut.
    pub fn cuts(&self) -> u64 {
        self.inner.cuts.load(SeqCst)
    }

    /// From now on each request that begins at `block` cuts its connection.
    pub fn cut_at(&self, block: u64) {
        self.inner.poison.store(block + 1, SeqCst);
    }

    /// Holds back all requests from now on, or lets them go.
    pub fn hang(&self, on: bool) {
        *self.inner.hung.lock().unwrap() = on;
        self.inner.go_on.notify_all();
    }

    /// Each write waits for so many milliseconds before it is carried out, beside those of other connections.
    pub fn delay_writes(&self, milliseconds: u64) {
        self.inner.write_delay.store(milliseconds, SeqCst);
    }

    /// The next write is carried out so much later, beside later requests of its connection, and also where that has ended.
    pub fn late_write(&self, milliseconds: u64) {
        self.inner.late_on.store(0, SeqCst);
        self.inner.late.store(milliseconds, SeqCst);
    }

    /// The number of the connection that the late write came on, once it has come.
    pub fn late_on(&self) -> Option<u64> {
        self.inner.late_on.load(SeqCst).checked_sub(1)
    }

    /// Cuts all connections but one.
    pub fn cut_others(&self, than: u64) {
        for (_, stream) in self.inner.connections.lock().unwrap().iter().filter(|(n, _)| **n != than) {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }

    /// The `n`th write from now on (from 1) fails with ENOSPC; 0: none.
    pub fn fail_write(&self, n: u64) {
        self.inner.fail_write.store(n, SeqCst);
    }

    /// Refuses the export from now on by this NBD_REP_ERR_...; 0: it is given again.
    pub fn refuse(&self, code: u32) {
        self.inner.refuse.store(code.into(), SeqCst);
    }

    /// What it offers to connections from now on.
    pub fn offer(&self, offers: Offers) {
        *self.inner.offers.lock().unwrap() = offers;
    }

    /// Its size for connections from now on; those that there are keep theirs.
    pub fn set_bytes(&self, bytes: u64) {
        self.inner.bytes.store(bytes, SeqCst);
    }

    /// What was done so far.
    pub fn done(&self) -> Vec<Done> {
        self.inner.done.lock().unwrap().clone()
    }

    /// Connections that there are.
    pub fn connections(&self) -> usize {
        self.inner.connections.lock().unwrap().len()
    }

    /// Puts content under a block, durably, past all clients.
    pub fn put(&self, block: u64, data: &[u8]) {
        let mut disk = self.inner.disk.lock().unwrap();
        disk.cache.remove(&block);
        disk.durable.insert(block, data.to_vec());
    }

    /// The content of a block as a client would read it.
    pub fn get(&self, block: u64) -> Vec<u8> {
        self.inner.disk.lock().unwrap().get(block)
    }
}

impl Drop for NbdServer {
    fn drop(&mut self) {
        // wakes who waits for a connection
        self.inner.up.store(false, SeqCst);
        let _ = UnixStream::connect(&self.socket);
        self.stop();
    }
}

impl Disk {
    fn get(&self, block: u64) -> Vec<u8> {
        let found = self.cache.get(&block).or_else(|| self.durable.get(&block));
        found.cloned().unwrap_or_else(|| vec![0; BLOCK as usize])
    }
}

fn bad(why: &str) -> io::Error {
    io::Error::other(why.to_string())
}

/// Answers a request.
fn say(answers: &Mutex<UnixStream>, cookie: u64, answer: Result<Vec<u8>, u32>) -> io::Result<()> {
    let (error, data) = match answer {
        Ok(data) => (0u32, data),
        Err(e) => (e, Vec::new()),
    };
    let head = [&0x6744_6698u32.to_be_bytes()[..], &error.to_be_bytes(), &cookie.to_be_bytes()].concat();
    answers.lock().map_err(|_| bad("poisoned"))?.write_all(&[head, data].concat())
}

impl Inner {
    fn serve(self: &Arc<Self>, mut stream: &UnixStream, number: u64) -> io::Result<()> {
        let size = self.negotiate(stream)?;
        // an answer goes out whole
        let answers = Arc::new(Mutex::new(stream.try_clone()?));
        loop {
            let mut head = [0; 28];
            stream.read_exact(&mut head)?;
            let word = |at: usize| u32::from_be_bytes(head[at..at + 4].try_into().unwrap_or_default());
            let long = |at: usize| u64::from_be_bytes(head[at..at + 8].try_into().unwrap_or_default());
            if word(0) != 0x2560_9513 {
                return Err(bad("magic of a request"));
            }
            let (fua, command, cookie) = (head[5] & 1 != 0, head[7], long(8));
            let (offset, bytes) = (long(16), u64::from(word(24)));
            let mut data = vec![0; if command == 1 { bytes as usize } else { 0 }];
            stream.read_exact(&mut data)?;
            if command == 2 {
                return Ok(());
            }
            let mut hung = self.hung.lock().map_err(|_| bad("poisoned"))?;
            while *hung {
                hung = self.go_on.wait(hung).map_err(|_| bad("poisoned"))?;
            }
            drop(hung);
            if !self.up.load(SeqCst) {
                return Err(bad("killed"));
            }
            if offset / BLOCK + 1 == self.poison.load(SeqCst) {
                return Err(bad("a request that is not borne"));
            }
            let cut = self.cut_every.load(SeqCst) > 0 && self.until_cut.fetch_sub(1, SeqCst) == 1 && {
                self.until_cut.store(self.cut_every.load(SeqCst), SeqCst);
                true
            };
            if cut && self.cuts.fetch_add(1, SeqCst).is_multiple_of(2) {
                return Err(bad("cut before the request"));
            }
            if !offset.is_multiple_of(BLOCK) || !bytes.is_multiple_of(BLOCK) {
                return Err(bad("a request that is not of whole blocks"));
            }
            let late = if command == 1 { self.late.swap(0, SeqCst) } else { 0 };
            if late > 0 {
                let (inner, answers) = (Arc::clone(self), Arc::clone(&answers));
                std::thread::spawn(move || {
                    inner.late_on.store(number + 1, SeqCst);
                    std::thread::sleep(Duration::from_millis(late));
                    let done = inner.carry_out(command, fua, offset / BLOCK, bytes / BLOCK, data, number);
                    // An error: the connection is gone.
                    let _ = say(&answers, cookie, done);
                });
                continue;
            }
            if command == 1 {
                std::thread::sleep(Duration::from_millis(self.write_delay.load(SeqCst)));
            }
            let answer = match offset + bytes > size {
                true => Err(22),
                false => self.carry_out(command, fua, offset / BLOCK, bytes / BLOCK, data, number),
            };
            if cut {
                return Err(bad("cut behind the request"));
            }
            say(&answers, cookie, answer)?;
        }
    }

    fn carry_out(
        &self,
        command: u8,
        fua: bool,
        block: u64,
        blocks: u64,
        data: Vec<u8>,
        connection: u64,
    ) -> Result<Vec<u8>, u32> {
        let mut disk = self.disk.lock().map_err(|_| 5u32)?;
        // a killed server's threads change nothing any more
        if !self.up.load(SeqCst) {
            return Err(5);
        }
        let what = ['r', 'w', '?', 'f', 't'].get(usize::from(command)).copied().unwrap_or('?');
        if let Ok(mut done) = self.done.lock() {
            done.push(Done { what, block, blocks, fua, connection, at: Instant::now() });
        }
        match what {
            'r' => return Ok((block..block + blocks).flat_map(|b| disk.get(b)).collect()),
            'w' => {
                let n = self.fail_write.load(SeqCst);
                if n > 0 && self.fail_write.fetch_sub(1, SeqCst) == 1 {
                    return Err(28);
                }
                for (b, bytes) in (block..).zip(data.chunks(BLOCK as usize)) {
                    if fua {
                        disk.cache.remove(&b);
                        disk.durable.insert(b, bytes.to_vec());
                    } else {
                        disk.cache.insert(b, bytes.to_vec());
                    }
                }
            }
            'f' => {
                let cache = std::mem::take(&mut disk.cache);
                disk.durable.extend(cache);
            }
            't' => {
                for b in block..block + blocks {
                    disk.cache.insert(b, vec![0; BLOCK as usize]);
                }
            }
            _ => return Err(22),
        }
        Ok(Vec::new())
    }

    /// The size that was agreed on.
    fn negotiate(&self, mut stream: &UnixStream) -> io::Result<u64> {
        stream.write_all(b"NBDMAGICIHAVEOPT\0\x03")?;
        let mut flags = [0; 4];
        stream.read_exact(&mut flags)?;
        loop {
            let mut head = [0; 16];
            stream.read_exact(&mut head)?;
            let bytes = u32::from_be_bytes([head[12], head[13], head[14], head[15]]);
            let mut data = vec![0; bytes as usize];
            stream.read_exact(&mut data)?;
            let mut reply = |kind: u32, body: &[u8]| {
                let magic = 0x0003_e889_0455_65a9u64.to_be_bytes();
                let length = (body.len() as u32).to_be_bytes();
                stream.write_all(&[&magic[..], &head[8..12], &kind.to_be_bytes(), &length, body].concat())
            };
            if head[11] != 7 {
                reply(1 | 1 << 31, b"only NBD_OPT_GO")?;
                continue;
            }
            let refuse = self.refuse.load(SeqCst) as u32;
            if refuse > 0 {
                reply(refuse | 1 << 31, b"not now")?;
                continue;
            }
            let size = self.bytes.load(SeqCst);
            let o = *self.offers.lock().map_err(|_| bad("poisoned"))?;
            let bits = [(true, 0), (o.read_only, 1), (o.flush, 2), (o.fua, 3), (o.trim, 5), (o.multi, 8)];
            let flags = bits.iter().filter(|(on, _)| *on).fold(0u16, |f, (_, bit)| f | 1 << bit);
            reply(3, &[&[0, 0][..], &size.to_be_bytes(), &flags.to_be_bytes()].concat())?;
            reply(1, &[])?;
            return Ok(size);
        }
    }
}
