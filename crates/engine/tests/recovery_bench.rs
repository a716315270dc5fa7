//! How long a mount takes after a crash that left 32 domains with journals of 32 MiB, filled nearly as far as they may be before a
//! checkpoint begins: recovery by one thread, by two, and by as many as a mount takes, in turns. Nothing else differs.
//! `make recovery-bench`, on a machine that does nothing else. The image is made once where `RECOVERY_IMAGE` says, and stays
//! there; every mount begins with the same bytes, in a copy beside it, which is removed at the end. `RECOVERY_DOMAINS` are other
//! than 32 for a new image.
//!
//! Beside the times it counts what a busy machine changes little: CPU time, of all threads and of the one that mounts, which
//! is never idle but where it waits for others; requests to the device.

use braidfs::device::{AlignedBuf, CountDevice, Counters, Device, FileDevice, OpenHow, WriteOp};
use braidfs::{
    Cred, DomainId, FileKind, InodeNo, MkfsOptions, MountOptions, NewNode, Placement, SetAttr, Volume, mkfs,
};
use braidfs_format::domain::DomainHeader;
use braidfs_store::Store;
use braidfs_store::ring::{AsItIs, Ring};
use braidfs_store::super_io::read_super;
use braidfs_sync::workers::Workers;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const JOURNAL: u64 = 32 << 20;
const BYTES_PER_DOMAIN: u64 = 3 << 29;
/// Part of a journal that may be in use before a checkpoint begins.
const FULL: f64 = 0.61;
/// Of it, what commits write; the rest is of fsyncs.
const BY_COMMITS: f64 = 0.45;
const FILES: usize = 24_000;
const ROUNDS: usize = 7;
/// Blocks between those that one request sets back.
const COPIED_TOGETHER: u64 = 256;

/// A device that notes which blocks are written, so that they can be set back to what a copy of the image has: nothing is read or
/// kept while the mount is measured.
#[derive(Debug)]
struct Noted {
    inner: FileDevice,
    written: Mutex<Vec<(u64, u64)>>,
}

impl Noted {
    fn note(&self, ops: &[WriteOp<'_>]) {
        let blocks = |op: &WriteOp<'_>| op.bufs.iter().map(|b| b.len() as u64).sum::<u64>() / 4096;
        self.written.lock().unwrap().extend(ops.iter().map(|op| (op.block, blocks(op))));
    }

    /// Puts back what `pristine` has where anything was written; blocks that lie close together by one request.
    fn set_back(&self, pristine: &FileDevice) {
        let mut written = std::mem::take(&mut *self.written.lock().unwrap());
        written.sort_unstable();
        let mut runs: Vec<(u64, u64)> = Vec::new();
        for (block, blocks) in written {
            let end = block + blocks;
            match runs.last_mut() {
                Some((from, to)) if block <= *to + COPIED_TOGETHER && end - *from <= 4 * COPIED_TOGETHER => {
                    *to = end.max(*to);
                }
                _ => runs.push((block, end)),
            }
        }
        for (from, to) in runs {
            let mut old = AlignedBuf::zeroed((to - from) as usize * 4096);
            pristine.read(from, &mut old).unwrap();
            self.inner.write(from, &old).unwrap();
        }
        self.inner.flush().unwrap();
    }
}

impl Device for Noted {
    fn blocks(&self) -> u64 {
        self.inner.blocks()
    }
    fn read(&self, block: u64, buf: &mut [u8]) -> io::Result<()> {
        self.inner.read(block, buf)
    }
    fn write_batch(&self, ops: &[WriteOp<'_>]) -> io::Result<()> {
        self.note(ops);
        self.inner.write_batch(ops)
    }
    fn write_batch_through(&self, ops: &[WriteOp<'_>]) -> io::Result<()> {
        self.note(ops);
        self.inner.write_batch_through(ops)
    }
    fn flush(&self) -> io::Result<()> {
        self.inner.flush()
    }
    fn discard(&self, _: u64, _: u64) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
    fn name(&self) -> String {
        self.inner.name()
    }
}

fn options(threads: usize) -> MountOptions {
    MountOptions {
        background: false,
        commit_interval: Duration::from_secs(100_000),
        serial: false,
        recovery_threads: threads,
        ..MountOptions::default()
    }
}

fn domains() -> u16 {
    std::env::var("RECOVERY_DOMAINS").map_or(32, |n| n.parse().expect("RECOVERY_DOMAINS is a number"))
}

/// Fills the journals: the modes of all files change again and again, then small files are written and synced.
fn fill(path: &Path) {
    let begin = Instant::now();
    let volume = u64::from(domains()) * BYTES_PER_DOMAIN;
    let device: Arc<dyn Device> = Arc::new(FileDevice::create(path, volume).unwrap());
    let mkfs = MkfsOptions {
        domains: Some(domains()),
        journal_bytes: Some(JOURNAL),
        placement: Placement::Inherit,
        ..MkfsOptions::default()
    };
    mkfs::format(std::slice::from_ref(&device), &mkfs).unwrap();
    let v = Volume::mount(vec![device], options(0)).unwrap();
    let new = |kind| NewNode { kind, mode: 0o755, umask: 0, rdev: 0, target: b"" };
    let cred = Cred::root();
    // top-level directories go round: one in each domain, with all below it
    let dirs: Vec<InodeNo> = (0..domains())
        .map(|d| v.create(InodeNo::ROOT, format!("dir{d}").as_bytes(), &new(FileKind::Dir), &cred).unwrap().ino)
        .collect();
    let make = |i: usize| -> Vec<InodeNo> {
        let name = |f: usize| format!("file-{f:06}");
        (0..FILES).map(|f| v.create(dirs[i], name(f).as_bytes(), &new(FileKind::File), &cred).unwrap().ino).collect()
    };
    let files: Vec<Vec<InodeNo>> = (0..dirs.len()).map(make).collect();
    v.sync().unwrap();
    let domain = |i: usize| v.domain_of(files[i][0]).unwrap().0;
    let used = |i: usize| {
        let d = v.domains().into_iter().find(|d| d.domain == domain(i)).unwrap();
        d.journal_used as f64 / d.journal_blocks as f64
    };
    std::thread::scope(|s| {
        for half in 0..2 {
            let (files, used, v) = (&files, &used, &v);
            s.spawn(move || {
                for i in (half..files.len()).step_by(2) {
                    let mut mode = 0;
                    while used(i) < BY_COMMITS {
                        mode = (mode + 1) % 0o777;
                        for f in &files[i] {
                            let change = SetAttr { mode: Some(mode), ..SetAttr::default() };
                            v.setattr(*f, &change).unwrap();
                        }
                        v.commit_domain(v.domain_of(files[i][0]).unwrap(), false).unwrap();
                    }
                    let mut n = 0;
                    while used(i) < FULL {
                        let f = v.open(files[i][n % 3000]).unwrap();
                        v.write(&f, 0, &[n as u8; 3000]).unwrap();
                        v.fsync(f.ino(), false).unwrap();
                        n += 1;
                    }
                }
            });
        }
    });
    let bytes: u64 = v.domains().iter().map(|d| d.journal_used * 4096).sum();
    let commits: u64 = v.domains().iter().map(|d| d.commits).sum();
    let checkpoints: u64 = v.domains().iter().map(|d| d.checkpoints).sum();
    eprintln!(
        "{} MiB in the journals, {commits} commits, {checkpoints} checkpoints, made in {:?}",
        bytes >> 20,
        begin.elapsed()
    );
    v.crash();
}

/// Number of domains, and bytes of their journals from their tails on to where the last whole chunk ends.
fn journal_bytes_used(path: &Path) -> (u64, u64) {
    let device = FileDevice::open(path, OpenHow { write: false, direct: false }).unwrap();
    let (sb, devices) = read_super(&[Arc::new(device) as Arc<dyn Device>]).unwrap();
    let store = Arc::new(Store::new(devices, &sb).unwrap());
    let used = |d: u16| {
        let pair = sb.domain_table.get() + 2 * u64::from(d);
        let mut buf = vec![0; 2 * 4096];
        store.device(0).read(pair, &mut buf).unwrap();
        let (.., header) = DomainHeader::from_pair(&buf, store.volume, pair, d).unwrap();
        let ring = Ring::new(store.clone(), DomainId(d), &header);
        let tail = header.tail_pos.get();
        (ring.scan(tail, &Workers::available(), &AsItIs).unwrap().1 - tail) * 4096
    };
    let domains = sb.domains.get();
    (domains.into(), (0..domains).map(used).sum())
}

/// What a mount after the crash took.
struct Took {
    time: Duration,
    /// CPU time of all threads, and of the caller.
    cpu: [Duration; 2],
    device: Counters,
}

/// CPU time of all threads so far, and of this one.
fn cpu_times() -> [Duration; 2] {
    use rustix::time::{ClockId, clock_gettime};
    [ClockId::ProcessCPUTime, ClockId::ThreadCPUTime].map(|id| {
        let t = clock_gettime(id);
        Duration::new(t.tv_sec as u64, t.tv_nsec as u32)
    })
}

/// A copy of the image, which the mounts write to.
struct Copy(PathBuf);

impl Copy {
    fn of(path: &Path) -> Copy {
        let mut copy = path.as_os_str().to_owned();
        copy.push(".mounted");
        let copy = Copy(copy.into());
        // cp(1) leaves holes where there are some
        let done = std::process::Command::new("cp").arg("--sparse=always").arg(path).arg(&copy.0).status().unwrap();
        assert!(done.success(), "no copy of {}", path.display());
        copy
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// A mount of the copy after the crash, and what was recovered; the copy is then as before.
fn recover(path: &Path, copy: &Copy, threads: usize) -> (Took, u64) {
    let inner = FileDevice::open(&copy.0, OpenHow { write: true, direct: true }).unwrap();
    let device = Arc::new(Noted { inner, written: Mutex::default() });
    let counted = Arc::new(CountDevice::new(device.clone() as Arc<dyn Device>));
    let (begin, before) = (Instant::now(), cpu_times());
    let v = Volume::mount(vec![counted.clone() as Arc<dyn Device>], options(threads)).unwrap();
    let (time, after) = (begin.elapsed(), cpu_times());
    let cpu = [after[0] - before[0], after[1] - before[1]];
    let took = Took { time, cpu, device: counted.counters() };
    let inodes = v.statfs().inodes - v.statfs().inodes_free;
    v.crash();
    device.set_back(&FileDevice::open(path, OpenHow { write: false, direct: true }).unwrap());
    (took, inodes)
}

#[test]
#[ignore = "minutes, and a disk of some GiB; make recovery-bench"]
fn time_against_threads() {
    let path = std::env::var_os("RECOVERY_IMAGE").map_or_else(|| PathBuf::from("recovery.img"), PathBuf::from);
    let rounds = std::env::var("RECOVERY_ROUNDS").map_or(ROUNDS, |n| n.parse().expect("RECOVERY_ROUNDS is a number"));
    if !path.exists() {
        fill(&path);
    }
    let gib = |bytes: u64| bytes as f64 / (1u64 << 30) as f64;
    let (domains, used) = journal_bytes_used(&path);
    let (all, used) = (gib(domains * JOURNAL), gib(used));
    let copy = Copy::of(&path);
    // per number of threads (0: as many as a mount takes): times, CPU times of all threads and of the caller
    let mut times: [[Vec<f64>; 3]; 3] = Default::default();
    let mut found = Vec::new();
    for round in 0..rounds {
        for (case, threads) in [1, 2, 0].into_iter().enumerate() {
            let (took, inodes) = recover(&path, &copy, threads);
            let (d, [cpu, caller]) = (took.device, took.cpu);
            eprintln!(
                "round {round}, {threads} threads: {:?}; CPU {cpu:?}, of it the caller {caller:?}; {} reads of {} blocks, \
                 {} writes of {} blocks, {} flushes",
                took.time, d.reads, d.read_blocks, d.writes, d.write_blocks, d.flushes
            );
            let took = [took.time, cpu, caller].map(|t| t.as_secs_f64());
            times[case].iter_mut().zip(took).for_each(|(all, t)| all.push(t));
            found.push(inodes);
        }
    }
    assert!(found.windows(2).all(|w| w[0] == w[1]), "not all recovered the same: {found:?}");
    let median = |times: &mut Vec<f64>| {
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    };
    let [[one, one_cpu, _], [two, two_cpu, two_caller], [many, many_cpu, _]] =
        times.each_mut().map(|t| t.each_mut().map(median));
    eprintln!(
        "{all:.2} GiB of journals, {used:.3} of them in use ({:.0} %): {one:.3} s by one thread, {two:.3} s by two ({:.2} times \
         faster), {many:.3} s by as many as a mount takes ({:.2} times faster), {:.3} s per GiB of journals, {:.3} s per GiB in \
         use",
        100.0 * used / all,
        one / two,
        one / many,
        many / all,
        many / used
    );
    eprintln!(
        "CPU time: {one_cpu:.3} s by one thread, {many_cpu:.3} s by many, {two_cpu:.3} s by two, of which the caller {two_caller:.3} s: {:.2} times less \
         than one thread's",
        one_cpu / two_caller
    );
}
