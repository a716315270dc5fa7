//! Threads that wait for a commit: they do it together, are woken together, and are told together where it fails.

use braidfs::device::{Device, MemDevice, WriteOp};
use braidfs::{Cred, DomainId, InodeNo, MkfsOptions, MountOptions, OpenHow, Volume, mkfs};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

/// Lets calls through, or holds the first so many of them.
#[derive(Debug, Default)]
struct Barrier {
    /// Calls that it still holds.
    hold: Mutex<usize>,
    opened: Condvar,
    held: AtomicUsize,
}

impl Barrier {
    fn close(&self, calls: usize) {
        *self.hold.lock().unwrap() = calls;
    }
    fn open(&self) {
        *self.hold.lock().unwrap() = 0;
        self.opened.notify_all();
    }
    fn pass(&self) {
        let mut hold = self.hold.lock().unwrap();
        if *hold == 0 || self.held.load(SeqCst) >= *hold {
            return;
        }
        self.held.fetch_add(1, SeqCst);
        while *hold > 0 {
            hold = self.opened.wait(hold).unwrap();
        }
        self.held.fetch_sub(1, SeqCst);
    }
    fn holds(&self, calls: usize) -> bool {
        self.held.load(SeqCst) == calls
    }
}

/// Memory, of which flushes and writes of data can be held.
#[derive(Debug)]
struct Held {
    memory: MemDevice,
    flushes: Barrier,
    data: Barrier,
    /// Blocks of data that were written.
    written: AtomicUsize,
    broken: AtomicBool,
    /// The next write panics.
    panics: AtomicBool,
}

const MIB_BLOCKS: usize = 256;

impl Device for Held {
    fn blocks(&self) -> u64 {
        self.memory.blocks()
    }
    fn read(&self, block: u64, buf: &mut [u8]) -> io::Result<()> {
        self.memory.read(block, buf)
    }
    fn write_batch(&self, ops: &[WriteOp<'_>]) -> io::Result<()> {
        assert!(!self.panics.swap(false, SeqCst), "on purpose");
        let blocks = ops.iter().flat_map(|op| &op.bufs).map(|b| b.len() / 4096).sum::<usize>();
        let of_data = blocks >= MIB_BLOCKS;
        if of_data {
            self.data.pass();
        }
        self.memory.write_batch(ops)?;
        if of_data {
            self.written.fetch_add(blocks, SeqCst);
        }
        Ok(())
    }
    fn flush(&self) -> io::Result<()> {
        self.flushes.pass();
        if self.broken.load(SeqCst) { Err(io::Error::other("broken")) } else { Ok(()) }
    }
    fn discard(&self, _: u64, _: u64) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
    fn name(&self) -> String {
        "held".into()
    }
}

fn options() -> MountOptions {
    MountOptions { background: false, commit_interval: Duration::from_secs(3600), ..MountOptions::default() }
}

fn made(domains: u16) -> (Arc<Held>, Volume) {
    let device = Arc::new(Held {
        memory: MemDevice::new(65536),
        flushes: Barrier::default(),
        data: Barrier::default(),
        written: AtomicUsize::new(0),
        broken: AtomicBool::new(false),
        panics: AtomicBool::new(false),
    });
    let all: Vec<Arc<dyn Device>> = vec![device.clone()];
    mkfs::format(&all, &MkfsOptions { domains: Some(domains), ..MkfsOptions::default() }).unwrap();
    let v = Volume::mount(all, options()).unwrap();
    (device, v)
}

fn write(v: &Volume, path: &str, bytes: &[u8]) -> InodeNo {
    let how = OpenHow { read: true, write: true, create: true, mode: 0o644, ..OpenHow::default() };
    let f = v.open_path(path.as_bytes(), how, &Cred::root()).unwrap();
    assert_eq!(v.write(&f, 0, bytes).unwrap(), bytes.len());
    f.ino()
}

/// Waits for what comes by itself. Where it does not, lets all threads go on.
fn until(device: &Held, what: &str, holds: impl Fn() -> bool) {
    let limit = Instant::now() + Duration::from_secs(60);
    while !holds() {
        if Instant::now() > limit {
            device.flushes.open();
            device.data.open();
            panic!("never: {what}; {} blocks written", device.written.load(SeqCst));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The work comes while others sleep for it: behind the flush of the commit before. Its leader waits for the device with what
/// it took, and all the rest is written by those who waited.
#[test]
fn who_waits_for_the_next_commit_helps_with_it() {
    const FILES: usize = 32;
    /// Files that a thread takes before it writes them.
    const TAKEN: usize = 4;
    const WAITING: usize = 4;
    let (device, v) = made(1);
    // the domain has its groups from here on: to claim one is to flush
    for i in 0..FILES {
        write(&v, &format!("{i}"), &[1; 1 << 20]);
    }
    v.sync().unwrap();
    (0..FILES).for_each(|i| v.unlink_path(format!("{i}").as_bytes(), &Cred::root()).unwrap());
    v.sync().unwrap();
    device.written.store(0, SeqCst);
    let before = v.domains()[0].clone();
    let waiting = AtomicUsize::new(0);
    std::thread::scope(|s| {
        let (v, waiting) = (&v, &waiting);
        device.flushes.close(1);
        write(v, "first", b"1");
        s.spawn(|| v.sync().unwrap());
        until(&device, "a commit that flushes", || device.flushes.holds(1));
        for i in 0..FILES {
            write(v, &format!("{i}"), &[i as u8 + 1; 1 << 20]);
        }
        for _ in 0..WAITING {
            s.spawn(move || {
                waiting.fetch_add(1, SeqCst);
                v.sync().unwrap();
            });
        }
        until(&device, "all of them", || waiting.load(SeqCst) == WAITING);
        device.data.close(1);
        device.flushes.open();
        until(&device, "what others write", || device.written.load(SeqCst) >= (FILES - TAKEN) * MIB_BLOCKS);
        assert!(device.data.holds(1), "the leader waits still");
        device.data.open();
    });
    let after = v.domains()[0].clone();
    assert_eq!(after.commits - before.commits, 2, "one for all who waited");
    assert!((1..=WAITING as u64).contains(&(after.joiners - before.joiners)), "{} joined", after.joiners);
    // a crash now loses nothing
    let image: Arc<dyn Device> = Arc::new(MemDevice::from_image(device.memory.snapshot()));
    v.crash();
    let v = Volume::mount(vec![image], options()).unwrap();
    let how = OpenHow { read: true, ..OpenHow::default() };
    for i in 0..FILES {
        let f = v.open_path(format!("{i}").as_bytes(), how, &Cred::root()).unwrap();
        let mut bytes = vec![0; 1 << 20];
        assert_eq!(v.read(&f, 0, &mut bytes).unwrap(), bytes.len());
        assert!(bytes.iter().all(|b| *b == i as u8 + 1), "file {i}");
    }
    v.unmount().unwrap();
}

/// Those who wait for a commit that fails, and those who wait for the one behind it.
#[test]
fn a_commit_that_fails_is_told_to_all_who_wait() {
    const WAITING: usize = 6;
    let (device, v) = made(1);
    let waiting = AtomicUsize::new(0);
    std::thread::scope(|s| {
        let (v, waiting) = (&v, &waiting);
        device.flushes.close(1);
        write(v, "first", b"1");
        let sync = move || {
            waiting.fetch_add(1, SeqCst);
            v.sync()
        };
        let mut all = vec![s.spawn(sync)];
        until(&device, "a commit that flushes", || device.flushes.holds(1));
        all.push(s.spawn(sync));
        write(v, "second", b"2");
        all.extend((0..WAITING).map(|_| s.spawn(sync)));
        until(&device, "all of them", || waiting.load(SeqCst) == WAITING + 2);
        std::thread::sleep(Duration::from_millis(20));
        device.broken.store(true, SeqCst);
        device.flushes.open();
        for t in all {
            assert!(t.join().unwrap().is_err());
        }
    });
    assert!(v.domains()[0].failed.is_some());
    v.crash();
}

/// What it was to commit is nowhere: the transaction behind it is empty, and no sync may take that for an answer.
#[test]
fn a_commit_whose_leader_panics_has_failed() {
    let (device, v) = made(1);
    write(&v, "first", b"1");
    device.panics.store(true, SeqCst);
    let panicked = std::thread::scope(|s| s.spawn(|| v.commit_domain(DomainId(0), false)).join());
    assert!(panicked.is_err() && !device.panics.load(SeqCst));
    assert!(v.commit_domain(DomainId(0), false).is_err());
    assert!(v.sync().is_err());
    assert!(v.domains()[0].failed.is_some());
    v.crash();
}

/// What an fsync had taken on itself is marked as changed no more: no later one may take that for durable.
#[test]
fn a_domain_fails_whose_fsync_panics() {
    for domains in [1, 2] {
        let (device, v) = made(domains);
        // with two domains the name lies in another one than the file: both are in one submission
        v.mkdir_path(b"d", 0o755, &Cred::root()).unwrap();
        v.sync().unwrap();
        v.mkdir_path(b"d/new", 0o755, &Cred::root()).unwrap();
        let ino = write(&v, "d/new/file", &[1; 20_000]);
        device.panics.store(true, SeqCst);
        let panicked = std::thread::scope(|s| s.spawn(|| v.fsync(ino, false)).join());
        assert!(panicked.is_err() && !device.panics.load(SeqCst));
        assert!(v.fsync(ino, false).is_err(), "{domains} domains");
        assert!(v.sync().is_err());
        assert!(v.domains()[v.domain_of(ino).unwrap().0 as usize].failed.is_some());
        v.crash();
    }
}

/// Many threads that each wait for their own change, again and again.
#[test]
fn nobody_sleeps_for_ever() {
    let (_, v) = made(2);
    for t in 0..8 {
        v.mkdir_path(format!("{t}").as_bytes(), 0o755, &Cred::root()).unwrap();
    }
    v.sync().unwrap();
    std::thread::scope(|s| {
        for t in 0..8 {
            let v = &v;
            s.spawn(move || {
                for i in 0..150 {
                    let ino = write(v, &format!("{t}/{i}"), b"x");
                    if i % 3 == 0 {
                        v.sync().unwrap();
                    } else {
                        v.commit_domain(v.domain_of(ino).unwrap(), false).unwrap();
                    }
                }
            });
        }
    });
    let (commits, joiners) = v.domains().iter().fold((0, 0), |(c, j), d| (c + d.commits, j + d.joiners));
    println!("{commits} commits, {joiners} joined");
    v.unmount().unwrap();
}
