//! Whose dirty pages are written by which thread when memory is short: counted on a device that records.

use super::{HELP_PAGES, share_of};
use crate::{Cred, Error, FileKind, InodeNo, MkfsOptions, MountOptions, NewNode, OpenFile, TenantBudget, Volume};
use braidfs_device::{Device, Event, RecordDevice};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes of the cache.
const BUDGET: u64 = 8 << 20;
const PAGE: u64 = 4096;
/// More than all roots, directories and journals of the tests write in one call.
const OWN: u64 = 16;

fn volume() -> (Arc<RecordDevice>, Volume, [InodeNo; 2]) {
    let recorder = Arc::new(RecordDevice::blank(96 << 10));
    let device: Arc<dyn Device> = recorder.clone();
    let o = MkfsOptions { domains: Some(2), group_bytes: Some(8 << 20), ..MkfsOptions::default() };
    crate::mkfs::format(std::slice::from_ref(&device), &o).unwrap();
    let v =
        Volume::mount(vec![device], MountOptions { background: false, cache_bytes: BUDGET, ..MountOptions::default() });
    let v = v.unwrap();
    let roots = ["quiet", "flood"].map(|name| {
        let t = v.tenant_create(InodeNo::ROOT, name.as_bytes(), 0o755, name, TenantBudget::default(), &Cred::root());
        t.unwrap().root
    });
    v.sync().unwrap();
    (recorder, v, roots)
}

fn file(v: &Volume, dir: InodeNo, name: &str) -> OpenFile {
    let node = NewNode { kind: FileKind::File, mode: 0o644, umask: 0, rdev: 0, target: b"" };
    v.open(v.create(dir, name.as_bytes(), &node, &Cred::root()).unwrap().ino).unwrap()
}

fn put(v: &Volume, f: &OpenFile, page: u64, pages: u64) {
    let data = vec![page as u8; (pages * PAGE) as usize];
    assert_eq!(v.write(f, page * PAGE, &data).unwrap(), data.len());
}

fn cached(v: &Volume) -> u64 {
    let used = v.cache_use();
    used.data + used.index
}

/// Blocks written, and flushes, in these events, by one thread or by all.
fn counted(log: &[Event], by: Option<u64>) -> (u64, usize) {
    let is_by = |t: &u64| by.is_none_or(|by| by == *t);
    log.iter().fold((0, 0), |(blocks, flushes), e| match e {
        Event::Write { data, thread, .. } if is_by(thread) => (blocks + data.len() as u64 / PAGE, flushes),
        Event::Flush { thread, .. } if is_by(thread) => (blocks, flushes + 1),
        _ => (blocks, flushes),
    })
}

/// Has a tenant fill the cache with dirty pages, in files of so many, and leave it to others to find it full.
fn flood(v: &Volume, dir: InodeNo, pages: u64) -> Vec<OpenFile> {
    let (mut all, mut page) = (Vec::new(), pages);
    while cached(v) + 16 * PAGE < BUDGET - BUDGET / 64 {
        if page == pages {
            all.push(file(v, dir, &format!("f{}", all.len())));
            page = 0;
        }
        put(v, all.last().unwrap(), page, 16);
        page += 16;
    }
    assert!(v.cache_use().dirty > BUDGET * 3 / 4, "{:?}", v.cache_use());
    all
}

/// What single calls wrote.
#[derive(Default)]
struct Calls(Vec<(usize, usize)>);

impl Calls {
    fn call<R>(&mut self, log: &RecordDevice, f: impl FnOnce() -> R) -> R {
        let before = log.log_len();
        let done = f();
        self.0.push((before, log.log_len()));
        done
    }

    /// Blocks by one call at most, and by all; none flushed.
    fn count(&self, log: &RecordDevice, by: Option<u64>) -> (u64, u64) {
        let log = log.log();
        let each = self.0.iter().map(|&(from, to)| {
            let (blocks, flushes) = counted(&log[from..to], by);
            assert_eq!(flushes, 0, "a small request flushed the device");
            blocks
        });
        each.fold((0, 0), |(most, all), n| (most.max(n), all + n))
    }
}

/// Another tenant makes `n` files of a page and reads them.
fn small_requests(log: &RecordDevice, v: &Volume, dir: InodeNo, n: u64) -> Calls {
    let (mut calls, mut page) = (Calls::default(), [0; PAGE as usize]);
    for n in 0..n {
        let f = calls.call(log, || file(v, dir, &format!("small{n}")));
        calls.call(log, || put(v, &f, 0, 1));
        calls.call(log, || assert_eq!(v.read(&f, 0, &mut page).unwrap(), page.len()));
    }
    calls
}

/// The one that finds the cache full has not filled it: of small files it writes a few, and of large ones nothing.
#[test]
fn a_tenant_within_its_share_writes_little_of_its_neighbour() {
    for pages in [64, 1024] {
        let (log, v, [quiet, flooded]) = volume();
        let files = flood(&v, flooded, pages);
        let dirty = v.cache_use().dirty;
        let (most, all) = small_requests(&log, &v, quiet, 512).count(&log, None);
        let help = if pages as usize <= HELP_PAGES { HELP_PAGES as u64 } else { 0 };
        assert!(most <= help + OWN, "{most} blocks by one small request, of files of {pages} pages");
        println!("{pages} pages: {most} blocks by one request, {all} by all, {dirty} bytes were dirty");
        if help > 0 {
            assert!(cached(&v) <= BUDGET * 5 / 4, "{:?}: nobody has written", v.cache_use());
        }
        // the one that did writes it when it comes again
        let before = log.log_len();
        let more = file(&v, flooded, "more");
        (0..64).for_each(|p| put(&v, &more, p, 1));
        let (blocks, _) = counted(&log.log()[before..], None);
        assert!(v.cache_use().dirty < BUDGET / 2, "{:?} after it wrote {blocks} blocks", v.cache_use());
        let mut page = [0; PAGE as usize];
        for f in &files {
            assert_eq!(v.read(f, PAGE, &mut page).unwrap(), page.len());
            assert!(page.iter().all(|b| *b == 0), "page 1 is of the first write");
        }
        drop((files, more));
        v.unmount().unwrap();
    }
}

/// Who asks for it goes on, and the thread that serves such calls writes.
#[test]
fn what_is_in_the_way_is_written_by_the_thread_that_is_called() {
    let (log, v, [quiet, flooded]) = volume();
    let files = flood(&v, flooded, 1024);
    let from = log.log_len();
    log.flush().unwrap();
    let Some(&Event::Flush { thread: this, .. }) = log.log().last() else { panic!("the flush is not in the log") };
    let m = v.mounted();
    m.calls.begin();
    std::thread::scope(|s| {
        s.spawn(|| m.serve_calls());
        let asked = small_requests(&log, &v, quiet, 512).0.len();
        let end = Instant::now() + Duration::from_secs(60);
        while v.cache_use().dirty >= BUDGET / 2 && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(1));
        }
        m.calls.end();
        assert!(v.cache_use().dirty < BUDGET / 2, "{:?} after {asked} calls", v.cache_use());
    });
    let written = |by| counted(&log.log()[from..], by).0;
    let (own, all) = (written(Some(this)), written(None));
    assert!(all - own >= BUDGET / 4 / PAGE, "{own} of {all} blocks by who asked");
    drop(files);
    v.unmount().unwrap();
}

/// One that fills the cache alone keeps it to its budget by itself.
#[test]
fn a_flood_alone_keeps_to_the_budget() {
    let (_log, v, [_, flooded]) = volume();
    let f = file(&v, flooded, "f");
    let mut most = 0;
    for page in (0..6 * BUDGET / PAGE).step_by(16) {
        put(&v, &f, page, 16);
        most = most.max(cached(&v));
    }
    assert!(most <= BUDGET + BUDGET / 8, "{most} bytes");
    drop(f);
    v.unmount().unwrap();
}

/// What a domain that failed holds dirty never leaves memory: its neighbour goes on in what is left.
#[test]
fn beside_a_domain_that_failed_the_others_go_on() {
    let (_log, v, [quiet, flooded]) = volume();
    let files = flood(&v, flooded, 256);
    let bad = Error::Io(std::io::Error::other("for the test"));
    v.mounted().domain_of(flooded).unwrap().fail(&bad);
    let stays = v.cache_use().dirty;
    let f = file(&v, quiet, "f");
    let mut most = 0;
    for page in (0..2 * BUDGET / PAGE).step_by(4) {
        put(&v, &f, page, 4);
        most = most.max(cached(&v));
    }
    assert!(v.cache_use().dirty >= stays);
    assert!(most <= BUDGET * 3 / 2, "{most} bytes");
    let mut page = [0; PAGE as usize];
    for p in (0..2 * BUDGET / PAGE).step_by(4) {
        assert_eq!(v.read(&f, p * PAGE, &mut page).unwrap(), page.len());
        assert!(page.iter().all(|b| *b == p as u8));
    }
    drop((files, f));
    drop(v);
}

/// A commit of the neighbour that is held up, as by a scrub, holds up nobody else.
#[test]
fn beside_a_domain_that_is_held_up_the_others_go_on() {
    let (log, v, [quiet, flooded]) = volume();
    let files = flood(&v, flooded, 64);
    let m = v.mounted();
    m.domain_of(flooded).unwrap().between_commits(|| small_requests(&log, &v, quiet, 512));
    drop(files);
    v.unmount().unwrap();
}

#[test]
fn shares_are_what_all_can_have_together() {
    let share = |all: &[(u64, u64)], goal| share_of(all.iter().copied(), goal);
    assert_eq!(share(&[(100, 0)], 70), 70);
    // who holds less leaves the rest
    assert_eq!(share(&[(10, 0), (100, 0)], 70), 60);
    assert_eq!(share(&[(50, 0), (100, 0)], 70), 35);
    // a floor is a share at least
    assert_eq!(share(&[(50, 50), (100, 0)], 70), 20);
    assert_eq!(share(&[(50, 90), (100, 0), (5, 0)], 70), 15);
    // nothing to share
    assert_eq!(share(&[(50, 50), (100, 0)], 50), 0);
    assert_eq!(share(&[(50, 50), (100, 0)], 20), 0);
    assert_eq!(share(&[], 20), 20);
    // all fit
    assert_eq!(share(&[(1, 0), (2, 0)], 20), 20);
}
