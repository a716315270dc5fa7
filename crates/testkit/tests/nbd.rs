//! Network block devices: what the client keeps of a device's contract while its server misbehaves. Sockets in a directory
//! of the test's own; no test waits for a clock but by the times that a URI gives.

use braidfs::{Cred, MkfsOptions, MountOptions, OpenHow, Volume, mkfs};
use braidfs_device::{BLOCK_BYTES, Device, NbdDevice, NbdError, NbdUri, WriteOp};
use braidfs_testkit::nbd::{NbdServer, Offers};
use braidfs_testkit::walk::fsck;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

const BYTES: u64 = 8 << 20;

fn server(offers: Offers) -> (tempfile::TempDir, NbdServer) {
    let dir = tempfile::tempdir().unwrap();
    let server = NbdServer::start(dir.path(), BYTES, offers);
    (dir, server)
}

fn try_open(server: &NbdServer, how: &str, write: bool) -> Result<NbdDevice, NbdError> {
    NbdDevice::open(&NbdUri::parse(&server.uri(how)).unwrap(), write)
}

fn open(server: &NbdServer, how: &str) -> NbdDevice {
    try_open(server, how, true).unwrap()
}

fn block(value: u8) -> Vec<u8> {
    vec![value; BLOCK_BYTES]
}

fn read(device: &NbdDevice, at: u64) -> Vec<u8> {
    let mut buf = block(0);
    device.read(at, &mut buf).unwrap();
    buf
}

#[test]
fn reads_writes_flushes_and_discards() {
    let (_dir, server) = server(Offers::default());
    let device = open(&server, "connections=3");
    assert_eq!((device.blocks(), device.connections()), (BYTES / 4096, 3));
    // more than a request holds, in pieces that do not end with it
    let data: Vec<u8> = (0..5 << 20).map(|i: u32| (i / 777) as u8).collect();
    let (a, b) = data.split_at(3 * BLOCK_BYTES);
    device.write_batch(&[WriteOp { block: 7, bufs: vec![a, b] }, WriteOp { block: 1, bufs: vec![&block(9)] }]).unwrap();
    let mut back = vec![0; data.len()];
    device.read(7, &mut back).unwrap();
    assert!(back == data, "not what was written");
    assert_eq!(read(&device, 1), block(9));
    assert!(server.done().iter().all(|d| d.what != 'f' && !d.fua));
    device.flush().unwrap();
    device.flush().unwrap();
    assert_eq!(server.done().iter().filter(|d| d.what == 'f').count(), 1, "nothing was written in between");
    device.write_batch_through(&[WriteOp { block: 1, bufs: vec![&block(8)] }]).unwrap();
    device.flush().unwrap();
    let done = server.done();
    assert!(done.last().unwrap().fua, "{:?}", done.last());
    device.discard(7, 100).unwrap();
    assert_eq!(read(&device, 8), block(0));
    let past = device.read(BYTES / 4096, &mut block(0)).unwrap_err();
    assert_eq!(past.kind(), std::io::ErrorKind::UnexpectedEof);
    drop(device);
    let end = Instant::now() + Duration::from_secs(10);
    while server.connections() > 0 {
        assert!(Instant::now() < end, "connections stay");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn what_a_server_lacks_is_said_or_done_without() {
    let (_dir, server) = server(Offers { multi: false, ..Offers::default() });
    assert_eq!(open(&server, "connections=3").connections(), 1);
    server.offer(Offers { read_only: true, ..Offers::default() });
    assert!(matches!(try_open(&server, "", true), Err(NbdError::ReadOnly { .. })));
    let reader = try_open(&server, "", false).unwrap();
    assert_eq!(reader.write(0, &block(1)).unwrap_err().raw_os_error(), Some(30));
    server.offer(Offers { flush: false, fua: false, ..Offers::default() });
    assert!(matches!(try_open(&server, "", true), Err(NbdError::NotDurable { .. })));
    // each write durable, a flush has nothing to do
    server.offer(Offers { flush: false, trim: false, ..Offers::default() });
    let device = open(&server, "");
    device.write(3, &block(3)).unwrap();
    device.flush().unwrap();
    assert!(server.done().iter().all(|d| d.what != 'f' && (d.what != 'w' || d.fua)));
    assert_eq!(device.discard(0, 1).unwrap_err().kind(), std::io::ErrorKind::Unsupported);
    server.stop();
    let e = try_open(&server, "timeout=1", true).unwrap_err().to_string();
    assert!(e.contains("cannot connect") && e.contains("is the server running"), "{e}");
}

#[test]
fn an_error_of_the_server_is_the_callers() {
    let (_dir, server) = server(Offers::default());
    let device = open(&server, "");
    server.fail_write(2);
    let ops: Vec<_> = [1, 2, 3].map(|b| WriteOp { block: b, bufs: vec![&[7; BLOCK_BYTES][..]] }).into();
    assert_eq!(device.write_batch(&ops).unwrap_err().raw_os_error(), Some(28));
    device.write(9, &block(1)).unwrap();
    device.flush().unwrap();
}

/// A server that loses what was not flushed: all of it comes again, of each block the newest, and the flush is true.
#[test]
fn writes_that_were_not_flushed_survive_the_servers_death() {
    let (_dir, server) = server(Offers::default());
    let device = open(&server, "timeout=20");
    device.write(0, &block(1)).unwrap();
    device.flush().unwrap();
    for (at, value) in [(1, 2), (2, 3), (1, 4)] {
        device.write(at, &block(value)).unwrap();
    }
    server.kill();
    assert_eq!(server.get(1), block(0), "it was not flushed");
    let waits = AtomicBool::new(true);
    std::thread::scope(|s| {
        let (device, waits) = (&device, &waits);
        s.spawn(move || {
            device.flush().unwrap();
            waits.store(false, SeqCst);
        });
        std::thread::sleep(Duration::from_millis(100));
        let waited = waits.load(SeqCst);
        server.restart();
        assert!(waited, "flushed without a server");
    });
    server.kill();
    for (at, value) in [(0, 1), (1, 4), (2, 3)] {
        assert_eq!(server.get(at), block(value), "block {at}");
    }
}

/// Connections that are cut again and again, before a request is carried out and behind it, under threads that write, read
/// back, flush, and lose the server's cache: what a flush covered is there.
#[test]
fn the_contract_holds_while_connections_are_cut() {
    let (_dir, server) = server(Offers::default());
    let device = open(&server, "timeout=60&connections=4");
    server.cut_every(90);
    let stop = AtomicBool::new(false);
    std::thread::scope(|s| {
        let (device, stop, server) = (&device, &stop, &server);
        let workers: Vec<_> = (0..4u64)
            .map(|t| {
                s.spawn(move || {
                    for round in 1..=30u8 {
                        let data = block(round);
                        let ops: Vec<_> = (0..8).map(|i| WriteOp { block: t * 8 + i, bufs: vec![&data[..]] }).collect();
                        device.write_batch(&ops).unwrap();
                        assert_eq!(read(device, t * 8 + 3), data, "thread {t} round {round}");
                        if round % 3 == 0 {
                            device.flush().unwrap();
                        }
                    }
                })
            })
            .collect();
        s.spawn(move || {
            while !stop.load(SeqCst) {
                std::thread::sleep(Duration::from_millis(30));
                server.kill();
                server.restart();
            }
        });
        let ended: Vec<_> = workers.into_iter().map(|w| w.join()).collect();
        stop.store(true, SeqCst);
        ended.into_iter().for_each(|e| e.unwrap());
    });
    device.flush().unwrap();
    server.kill();
    assert!(server.cuts() >= 5, "{} cuts", server.cuts());
    for b in 0..32 {
        assert_eq!(server.get(b), block(30), "block {b}");
    }
}

#[test]
fn after_its_time_the_device_fails_for_good() {
    let (_dir, server) = server(Offers::default());
    let device = open(&server, "timeout=4");
    device.write(0, &block(1)).unwrap();
    // while nobody asks, a server may be away for as long as it likes
    server.stop();
    std::thread::sleep(Duration::from_millis(4500));
    server.restart();
    assert_eq!(read(&device, 0), block(1));
    server.kill();
    let start = Instant::now();
    let e = device.write(1, &block(2)).unwrap_err().to_string();
    assert!(e.contains("no connection within 4 s") && start.elapsed() >= Duration::from_secs(4), "{e}");
    server.restart();
    assert!(device.flush().is_err(), "what was written is lost");
    assert!(device.read(0, &mut block(0)).is_err());
    assert_eq!(server.connections(), 0, "it does not come back");
}

#[test]
fn a_server_that_hangs_fails_the_device() {
    let (_dir, server) = server(Offers::default());
    let device = open(&server, "timeout=5");
    server.hang(true);
    let e = device.read(0, &mut block(0)).unwrap_err().to_string();
    assert!(e.contains("no answer within 5 s"), "{e}");
    assert!(device.flush().is_err());
}

/// Another disk behind the same name: nothing is written to it.
#[test]
fn another_export_in_the_place_of_the_first_is_refused() {
    let (_dir, server) = server(Offers::default());
    let device = open(&server, "timeout=20");
    device.write(0, &block(1)).unwrap();
    server.kill();
    server.set_bytes(BYTES / 2);
    server.restart();
    let e = device.flush().unwrap_err().to_string();
    assert!(e.contains("another export"), "{e}");
    assert_eq!(server.get(0), block(0));
}

/// More is written between two flushes than the client keeps in memory: it flushes by itself.
#[test]
fn memory_for_writes_that_wait_for_a_flush_is_bounded() {
    let (_dir, server) = server(Offers::default());
    let device = open(&server, "");
    let data = vec![5; 4 << 20];
    for _ in 0..40 {
        device.write(0, &data).unwrap();
    }
    let flushes = server.done().iter().filter(|d| d.what == 'f').count();
    assert!((1..=3).contains(&flushes), "{flushes} flushes of 160 MiB");
}

#[test]
fn an_export_that_grew_is_seen() {
    let (_dir, server) = server(Offers::default());
    let device = open(&server, "");
    server.set_bytes(2 * BYTES);
    assert_eq!(device.grown().unwrap(), 2 * BYTES / 4096);
    device.write(2 * BYTES / 4096 - 1, &block(1)).unwrap();
    server.set_bytes(3 * BYTES);
    device.extend(3 * BYTES / 4096).unwrap();
    assert_eq!(device.blocks(), 3 * BYTES / 4096);
    assert_eq!(device.extend(4 * BYTES / 4096).unwrap_err().kind(), std::io::ErrorKind::Unsupported);
    // what has grown may not be small again behind a new connection
    device.flush().unwrap();
    server.kill();
    server.set_bytes(BYTES);
    server.restart();
    let e = device.read(0, &mut block(0)).unwrap_err().to_string();
    assert!(e.contains("another export"), "{e}");
}

/// A server that carries out several requests at once, with a write that takes it long, when the client wants new connections:
/// since the export has grown, or since another connection broke. Nothing that comes later on is overtaken by that write.
#[test]
fn a_slow_write_is_waited_for_before_connecting_anew() {
    for grown in [true, false] {
        let (_dir, server) = server(Offers::default());
        let device = open(&server, "timeout=40&connections=2");
        server.late_write(1000);
        std::thread::scope(|s| {
            let slow = s.spawn(|| device.write(5, &block(1)).unwrap());
            let on = loop {
                if let Some(on) = server.late_on() {
                    break on;
                }
                std::thread::sleep(Duration::from_millis(1));
            };
            if grown {
                server.set_bytes(2 * BYTES);
                assert_eq!(device.grown().unwrap(), 2 * BYTES / 4096);
            } else {
                server.cut_others(on);
            }
            slow.join().unwrap();
            device.write(5, &block(2)).unwrap();
            device.flush().unwrap();
            let end = Instant::now() + Duration::from_secs(60);
            while !server.done().iter().any(|d| (d.what, d.connection, d.block) == ('w', on, 5)) {
                assert!(Instant::now() < end, "the slow write has not come");
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        assert_eq!(server.get(5), block(2), "grown: {grown}: an old write behind a newer one that was flushed");
    }
}

/// A server that has been started again knows its exports a moment later.
#[test]
fn an_export_that_is_refused_for_a_moment_is_waited_for() {
    for code in [2, 6] {
        let (_dir, server) = server(Offers::default());
        let device = open(&server, "timeout=20");
        device.write(0, &block(1)).unwrap();
        server.kill();
        server.refuse(code);
        server.restart();
        std::thread::scope(|s| {
            let flush = s.spawn(|| device.flush());
            std::thread::sleep(Duration::from_millis(300));
            server.refuse(0);
            flush.join().unwrap().unwrap();
        });
        assert_eq!(server.get(0), block(1));
    }
    let (_dir, server) = server(Offers::default());
    let device = open(&server, "timeout=1");
    server.refuse(6);
    server.cut();
    let e = device.read(0, &mut block(0)).unwrap_err().to_string();
    assert!(e.contains("no connection within 1 s") && e.contains("no such export"), "{e}");
    // who opens is told at once
    assert!(matches!(try_open(&server, "timeout=20", true), Err(NbdError::Refused { .. })));
}

/// A request for which the server closes the connection each time, while it answers all others.
#[test]
fn a_request_that_no_connection_survives_fails_the_device() {
    let (_dir, server) = server(Offers::default());
    let device = open(&server, "timeout=1&connections=1");
    server.cut_at(5);
    let stop = AtomicBool::new(false);
    let e = std::thread::scope(|s| {
        s.spawn(|| {
            while !stop.load(SeqCst) {
                if device.read(1, &mut block(0)).is_err() {
                    return;
                }
            }
        });
        let e = device.read(5, &mut block(0)).unwrap_err();
        stop.store(true, SeqCst);
        e
    });
    assert!(e.to_string().contains("within 1 s"), "{e}");
}

/// Its first connection breaks, the next ones take nothing: more is to be sent again than the kernel keeps.
#[test]
fn a_server_that_takes_nothing_fails_the_device() {
    const READERS: u64 = 600;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let listener = UnixListener::bind(&path).unwrap();
    let broken = AtomicBool::new(false);
    let open = AtomicBool::new(true);
    std::thread::scope(|s| {
        s.spawn(|| {
            let mut kept = Vec::new();
            while let Ok((mut stream, _)) = listener.accept() {
                if !open.load(SeqCst) {
                    return;
                }
                agree(&mut stream).unwrap();
                if kept.is_empty() {
                    while !broken.load(SeqCst) {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    let _ = stream.shutdown(std::net::Shutdown::Both);
                }
                kept.push(stream);
            }
        });
        // time enough for all to ask before the first of them gives up
        let uri = NbdUri::parse(&format!("nbd+unix:///?socket={}&timeout=5", path.display())).unwrap();
        let device = NbdDevice::open(&uri, true).unwrap();
        let asked = AtomicU64::new(0);
        std::thread::scope(|s| {
            for n in 0..READERS {
                let (device, asked) = (&device, &asked);
                s.spawn(move || {
                    asked.fetch_add(1, SeqCst);
                    assert!(device.read(n, &mut block(0)).is_err());
                });
            }
            while asked.load(SeqCst) < READERS {
                std::thread::sleep(Duration::from_millis(1));
            }
            broken.store(true, SeqCst);
        });
        open.store(false, SeqCst);
        let _ = UnixStream::connect(&path);
    });
}

/// A server that agrees with the first `good` clients and breaks their connections when it is told to; with all others it begins, and
/// then says one byte after the other of an information that never ends. Ends with the test's process.
fn trickling(dir: &std::path::Path, good: usize, how: &str) -> (NbdUri, Arc<AtomicBool>) {
    let path = dir.join("trickling.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let broken = Arc::new(AtomicBool::new(false));
    let breaks = Arc::clone(&broken);
    std::thread::spawn(move || {
        for (n, stream) in listener.incoming().enumerate() {
            let (Ok(mut stream), breaks) = (stream, Arc::clone(&breaks)) else { return };
            std::thread::spawn(move || -> std::io::Result<()> {
                if n < good {
                    agree(&mut stream)?;
                    while !breaks.load(SeqCst) {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    return Ok(());
                }
                stream.write_all(b"NBDMAGICIHAVEOPT\0\x03")?;
                stream.read_exact(&mut [0; 4 + 16 + 8])?;
                let magic = 0x0003_e889_0455_65a9u64.to_be_bytes();
                stream.write_all(&[&magic[..], &[0, 0, 0, 7], &3u32.to_be_bytes(), &8000u32.to_be_bytes()].concat())?;
                loop {
                    stream.write_all(&[0])?;
                    std::thread::sleep(Duration::from_millis(50));
                }
            });
        }
    });
    (NbdUri::parse(&format!("nbd+unix:///?socket={}&{how}", path.display())).unwrap(), broken)
}

/// However little a server says at a time: connecting is over in time, at first and anew, for callers and for who closes.
#[test]
fn a_server_that_trickles_holds_nobody() {
    let dir = tempfile::tempdir().unwrap();
    // seconds by the URI; on a busy machine more, but nothing near the minute of the other URI or what the server would take
    let in_time = |began: Instant| assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
    let (uri, _) = trickling(dir.path(), 0, "timeout=1");
    let began = Instant::now();
    let e = NbdDevice::open(&uri, true).unwrap_err().to_string();
    assert!(e.contains("does not agree"), "{e}");
    in_time(began);
    for timeout in [5, 60] {
        let dir = tempfile::tempdir().unwrap();
        let (uri, broken) = trickling(dir.path(), 1, &format!("timeout={timeout}"));
        let device = NbdDevice::open(&uri, true).unwrap();
        broken.store(true, SeqCst);
        // until it connects anew
        std::thread::sleep(Duration::from_millis(300));
        let began = Instant::now();
        if timeout == 5 {
            let e = device.read(0, &mut block(0)).unwrap_err().to_string();
            assert!(e.contains("no connection within 5 s"), "{e}");
        } else {
            drop(device);
        }
        in_time(began);
    }
}

/// Who serves a mount is seen by who unmounts it, and nobody else who has the export open; also where the name was another
/// one's at first, whose mount had the number before.
#[test]
fn who_serves_a_mount_is_seen() {
    let (_dir, server) = server(Offers::default());
    let uri = NbdUri::parse(&server.uri("timeout=2")).unwrap();
    let open = || NbdDevice::open(&uri, false).unwrap();
    let (first, second, other, _looks) = (open(), open(), open(), open());
    assert!(uri.mounts_here().is_empty());
    first.serves("0:7");
    second.serves("0:7");
    other.serves("0:8");
    assert_eq!(uri.mounts_here(), ["0:7", "0:8"]);
    let seen = uri.open_here("0:7", None).unwrap();
    assert!(seen.lasts() && uri.open_here("0:9", None).is_none());
    drop(first);
    assert!(!seen.lasts());
    let end = Instant::now() + Duration::from_secs(10);
    let seen = loop {
        match uri.open_here("0:7", None) {
            Some(seen) => break seen,
            None => assert!(Instant::now() < end, "the name is not taken when it is free"),
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    drop(second);
    assert!(!seen.lasts() && uri.open_here("0:8", None).is_some_and(|o| o.lasts()));
    assert_eq!(uri.mounts_here(), ["0:8"]);
}

/// A server that takes no connection any more: who closes the device does not wait until connecting is given up.
#[test]
fn a_server_that_accepts_nobody_holds_nobody() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("full.sock");
    let listener = UnixListener::bind(&path).unwrap();
    rustix::net::listen(&listener, 0).unwrap();
    let uri = NbdUri::parse(&format!("nbd+unix:///?socket={}&timeout=60&connections=1", path.display())).unwrap();
    let (device, client) = std::thread::scope(|s| {
        let client = s.spawn(|| {
            let mut client = listener.accept().unwrap().0;
            agree(&mut client).map(|()| client).unwrap()
        });
        (NbdDevice::open(&uri, true).unwrap(), client.join().unwrap())
    });
    // it has the one place of the backlog
    let waits = UnixStream::connect(&path).unwrap();
    drop(client);
    // until it connects anew
    std::thread::sleep(Duration::from_millis(300));
    let began = Instant::now();
    drop(device);
    // a minute by the URI
    assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
    drop((listener, waits));
}

/// What a server says to the request with this cookie.
type Says = fn(&[u8]) -> Vec<u8>;

/// Agrees with a client on an export.
fn agree(stream: &mut UnixStream) -> std::io::Result<()> {
    stream.write_all(b"NBDMAGICIHAVEOPT\0\x03")?;
    let mut go = [0; 4 + 16 + 8];
    stream.read_exact(&mut go)?;
    let info = [&[0u8, 0][..], &BYTES.to_be_bytes(), &[0, 0x0d]].concat();
    for (kind, body) in [(3u32, &info[..]), (1, &[])] {
        let magic = 0x0003_e889_0455_65a9u64.to_be_bytes();
        let length = (body.len() as u32).to_be_bytes();
        stream.write_all(&[&magic[..], &[0, 0, 0, 7], &kind.to_be_bytes(), &length, body].concat())?;
    }
    Ok(())
}

/// A server that agrees on an export, takes a request, and then says `says` each time.
fn hostile(dir: &std::path::Path, says: Says) -> NbdUri {
    let path = dir.join("hostile.sock");
    let listener = UnixListener::bind(&path).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            let mut talk = || -> std::io::Result<()> {
                agree(&mut stream)?;
                let mut request = [0; 28];
                stream.read_exact(&mut request)?;
                stream.write_all(&says(&request[8..16]))
            };
            let _ = talk();
        }
    });
    NbdUri::parse(&format!("nbd+unix:///?socket={}&timeout=5", path.display())).unwrap()
}

#[test]
fn a_hostile_server_fails_the_device_and_no_more() {
    const MAGIC: [u8; 4] = 0x6744_6698u32.to_be_bytes();
    let says: [Says; 6] = [
        |_| b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec(),
        |_| [&MAGIC[..], &[0; 4], &[0xff; 8]].concat(),
        |cookie| [&MAGIC[..], &[0; 4], cookie, &[7; 100]].concat(),
        |cookie| [&MAGIC[..], &[0; 4], cookie][..2].concat(),
        |cookie| [&MAGIC[..], &[0, 0, 0, 108], cookie].concat(),
        // a structured reply, with a length of 4 GiB
        |cookie| [&0x668e_33efu32.to_be_bytes()[..], &[0, 1, 0, 1], cookie, &[0xff; 4]].concat(),
    ];
    std::thread::scope(|s| {
        for says in says {
            s.spawn(move || {
                let dir = tempfile::tempdir().unwrap();
                let device = NbdDevice::open(&hostile(dir.path(), says), true).unwrap();
                let e = device.read(0, &mut block(0)).unwrap_err().to_string();
                assert!(e.contains("within 5 s"), "{e}");
                assert!(device.write(0, &block(1)).is_err());
            });
        }
    });
}

/// A volume on a server that dies and loses what was not flushed, again and again; in the end the program dies, too: what
/// was synced is there, and fsck finds nothing.
#[test]
fn a_volume_outlives_its_server() {
    let (_dir, server) = server(Offers::default());
    server.set_bytes(64 << 20);
    let open = || vec![Arc::new(open(&server, "timeout=60&lease=off")) as Arc<dyn Device>];
    mkfs::format(&open(), &MkfsOptions::default()).unwrap();
    let how = OpenHow { read: true, write: true, create: true, mode: 0o644, ..OpenHow::default() };
    let me = Cred::root();
    let content = |n: u8| vec![n; 3000 + 500 * usize::from(n)];
    let v = Volume::mount(open(), MountOptions::default()).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|s| {
        s.spawn(|| {
            while !stop.load(SeqCst) {
                std::thread::sleep(Duration::from_millis(50));
                server.kill();
                server.restart();
            }
        });
        let threads: Vec<_> = (0..3u8)
            .map(|t| {
                let (v, me, content) = (&v, &me, &content);
                s.spawn(move || {
                    for n in 0..15u8 {
                        let file = v.open_path(format!("f{t}-{n}").as_bytes(), how, me).unwrap();
                        v.write(&file, 0, &content(n)).unwrap();
                        v.fsync(file.ino(), false).unwrap();
                        v.write(&file, 0, b"not synced").unwrap();
                    }
                })
            })
            .collect();
        let ended: Vec<_> = threads.into_iter().map(|t| t.join()).collect();
        stop.store(true, SeqCst);
        ended.into_iter().for_each(|e| e.unwrap());
    });
    v.crash();
    server.kill();
    server.restart();
    let v = Volume::mount(open(), MountOptions::default()).unwrap();
    for t in 0..3 {
        for n in 0..15u8 {
            let file =
                v.open_path(format!("f{t}-{n}").as_bytes(), OpenHow { read: true, ..OpenHow::default() }, &me).unwrap();
            let mut data = content(0xff);
            let got = v.read(&file, 0, &mut data).unwrap();
            assert!(
                got == content(n).len() && (data[..got] == content(n) || data.starts_with(b"not synced")),
                "f{t}-{n}"
            );
        }
    }
    v.unmount().unwrap();
    fsck(&open()).unwrap();
}
