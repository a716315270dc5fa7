//! Reading ahead, by what the device is asked: requests and blocks, counted.

use braidfs::device::{CountDevice, Device, Effect, FaultDevice, MemDevice, Op, Rule};
use braidfs::{
    Advice, Cred, FallocMode, InodeNo, MemoryBudget, MkfsOptions, MountOptions, OpenFile, OpenHow, TenantBudget,
    Volume, mkfs,
};
use std::sync::Arc;

const MIB: u64 = 1 << 20;
/// Bytes of the large file, and its pages.
const SIZE: u64 = 64 * MIB;
const PAGES: u64 = SIZE / 4096;

struct Made {
    device: Arc<CountDevice>,
}

fn how() -> OpenHow {
    OpenHow { read: true, write: true, create: true, mode: 0o644, ..OpenHow::default() }
}

fn byte(at: u64) -> u8 {
    (at / 4096 % 251) as u8
}

impl Made {
    /// A volume, unmounted, on which `make` has made something.
    fn new(make: impl FnOnce(&Volume)) -> Self {
        let device = Arc::new(CountDevice::new(Arc::new(MemDevice::new(256 * MIB / 4096))));
        let o = MkfsOptions { domains: Some(1), ..MkfsOptions::default() };
        mkfs::format(&[device.clone() as Arc<dyn Device>], &o).unwrap();
        let made = Self { device };
        let v = made.mount(MountOptions::default());
        make(&v);
        v.unmount().unwrap();
        made
    }
    fn with_large_file() -> Self {
        Self::new(|v| {
            let f = v.open_path(b"large", how(), &Cred::root()).unwrap();
            fill(v, &f);
        })
    }
    fn mount(&self, options: MountOptions) -> Volume {
        let options = MountOptions { background: false, ..options };
        Volume::mount(vec![self.device.clone() as Arc<dyn Device>], options).unwrap()
    }
    /// Requests and blocks that are read of the device as `f` runs.
    fn count(&self, f: impl FnOnce()) -> (u64, u64) {
        let before = self.device.counters();
        f();
        let now = self.device.counters() - before;
        (now.reads, now.read_blocks)
    }
}

fn fill(v: &Volume, f: &OpenFile) {
    for at in (0..SIZE).step_by(MIB as usize) {
        let bytes: Vec<u8> = (at..at + MIB).map(byte).collect();
        assert_eq!(v.write(f, at, &bytes).unwrap(), bytes.len());
    }
}

fn open(v: &Volume) -> OpenFile {
    let f = v.open_path(b"large", OpenHow { read: true, ..OpenHow::default() }, &Cred::root()).unwrap();
    // its inode and what else comes first are there then
    v.read(&f, SIZE - 1, &mut [0]).unwrap();
    f
}

fn read(v: &Volume, f: &OpenFile, at: u64, len: usize) {
    let mut buf = vec![0; len];
    assert_eq!(v.read(f, at, &mut buf).unwrap(), len);
    assert!(buf.iter().zip(at..).step_by(97).all(|(b, at)| *b == byte(at)), "at {at}");
}

#[test]
fn in_a_row_requests_are_few_and_large_and_no_block_comes_twice() {
    let made = Made::with_large_file();
    for (len, most) in [(4096, 90), (1000, 90), (65536, 80), (1 << 20, 70)] {
        let v = made.mount(MountOptions { readahead: 0, ..MountOptions::default() });
        let f = open(&v);
        let all = || (0..SIZE).step_by(len).for_each(|at| read(&v, &f, at, len.min((SIZE - at) as usize)));
        let (without, blocks) = made.count(all);
        assert!(without >= SIZE / len as u64 / 5 && (PAGES - 1..=PAGES).contains(&blocks), "{without}, {blocks}");
        drop(f);
        v.unmount().unwrap();
        let v = made.mount(MountOptions::default());
        let f = open(&v);
        let all = || (0..SIZE).step_by(len).for_each(|at| read(&v, &f, at, len.min((SIZE - at) as usize)));
        let (with, blocks) = made.count(all);
        println!("reads of {len} bytes: {without} requests without, {with} with reading ahead");
        assert!(with <= most && (PAGES - 1..=PAGES).contains(&blocks), "{with} requests of {blocks} blocks");
        drop(f);
        v.unmount().unwrap();
    }
}

#[test]
fn pinned_reads_read_ahead_as_well() {
    let made = Made::with_large_file();
    let v = made.mount(MountOptions::default());
    let f = open(&v);
    let (requests, _) = made.count(|| {
        (0..SIZE).step_by(8192).for_each(|at| assert_eq!(v.read_pinned(&f, at, 8192).unwrap()[1][5], byte(at + 4096)));
    });
    assert!(requests <= 90, "{requests}");
}

/// Pages in an order in which none follows the one before it.
fn scattered(n: u64) -> impl Iterator<Item = u64> {
    (0..n).map(move |i| i * 5407 % n)
}

#[test]
fn at_random_nothing_is_read_that_was_not_asked_for() {
    let made = Made::with_large_file();
    let counts = [0, MIB].map(|readahead| {
        let v = made.mount(MountOptions { readahead, ..MountOptions::default() });
        let f = open(&v);
        made.count(|| scattered(PAGES).take(3000).for_each(|page| read(&v, &f, page * 4096, 4096)))
    });
    assert_eq!(counts[0], counts[1]);
    assert_eq!(counts[0], (3000, 3000));
}

#[test]
fn handles_read_in_rows_of_their_own_and_do_what_they_are_told() {
    let made = Made::with_large_file();
    let v = made.mount(MountOptions::default());
    let handles: Vec<(u64, OpenFile)> = (0..4).map(|n| (n * SIZE / 4, open(&v))).collect();
    let (requests, blocks) = made.count(|| {
        for at in (0..SIZE / 4).step_by(4096) {
            handles.iter().for_each(|(from, f)| read(&v, f, from + at, 4096));
        }
    });
    assert!(requests <= 120 && blocks <= PAGES, "{requests} requests of {blocks} blocks");
    drop(handles);
    v.unmount().unwrap();
    let v = made.mount(MountOptions::default());
    let f = open(&v);
    v.advise(&f, Advice::Random);
    assert_eq!(made.count(|| (0..64).for_each(|n| read(&v, &f, n * 4096, 4096))), (64, 64));
    v.advise(&f, Advice::Sequential);
    let (requests, blocks) = made.count(|| (64..64 + 256).for_each(|n| read(&v, &f, n * 4096, 4096)));
    assert!(requests <= 3 && blocks >= 256, "{requests} requests of {blocks} blocks");
    // at random again after that: it misses elsewhere, and is told so
    v.advise(&f, Advice::Normal);
    assert_eq!(
        made.count(|| scattered(PAGES / 2).take(50).for_each(|n| read(&v, &f, SIZE / 2 + n * 4096, 4096))),
        (50, 50)
    );
    // what will be needed is there
    let need = made.count(|| assert_eq!(v.will_need(&f, SIZE / 4 + 100, 8 * MIB).unwrap(), 8 * MIB));
    assert!(need.0 <= 14 && (2048..=2049).contains(&need.1), "{need:?}");
    assert_eq!(made.count(|| read(&v, &f, SIZE / 4, 8 << 20)), (0, 0));
    assert_eq!(v.will_need(&f, SIZE - 10, 1 << 40).unwrap(), 10);
    assert_eq!(v.will_need(&f, SIZE + 10, u64::MAX).unwrap(), 0);
    assert_eq!(v.will_need(&f, 5, 0).unwrap(), 0);
}

#[test]
fn memory_stays_within_the_cache_and_a_tenants_ceiling() {
    const CACHE: u64 = 8 * MIB;
    let made = Made::new(|v| {
        let me = Cred::root();
        let f = v.open_path(b"large", how(), &me).unwrap();
        fill(v, &f);
        let memory = MemoryBudget { least: 0, most: Some(4 * MIB) };
        let budget = TenantBudget { memory, ..TenantBudget::default() };
        v.tenant_create(InodeNo::ROOT, b"t", 0o755, "t", budget, &me).unwrap();
        let f = v.open_path(b"t/large", how(), &me).unwrap();
        fill(v, &f);
    });
    let v = made.mount(MountOptions { cache_bytes: CACHE, ..MountOptions::default() });
    let f = open(&v);
    let (requests, blocks) = made.count(|| {
        for at in (0..SIZE).step_by(4096) {
            read(&v, &f, at, 4096);
            let c = v.cache_use();
            assert!(c.data + c.index <= CACHE + CACHE / 16, "{c:?}");
        }
    });
    // windows of a 32nd part, 256 KiB
    assert!((256..=300).contains(&requests) && blocks <= PAGES + PAGES / 16, "{requests} requests of {blocks} blocks");
    let t = v.open_path(b"t/large", OpenHow { read: true, ..OpenHow::default() }, &Cred::root()).unwrap();
    let (requests, _) = made.count(|| (0..SIZE).step_by(4096).for_each(|at| read(&v, &t, at, 4096)));
    assert!((512..=620).contains(&requests), "{requests}: windows of 128 KiB");
    // forty rows at once: the windows of all take an eighth of it, and no page is thrown out before it was used
    let rows: Vec<OpenFile> = (0..40).map(|_| open(&v)).collect();
    let (_, blocks) = made.count(|| {
        for n in 0..200 {
            rows.iter().zip(0..).for_each(|(f, row)| read(&v, f, row * SIZE / 64 + n * 4096, 4096));
        }
    });
    assert!(blocks <= 40 * 200 + CACHE / 8 / 4096 * 3, "{blocks} blocks for {}", 40 * 200);
    drop((f, t, rows));
    v.unmount().unwrap();
}

#[test]
fn the_end_holes_and_small_pieces_cost_no_request_more() {
    let made = Made::new(|v| {
        let me = Cred::root();
        let f = v.open_path(b"pieces", how(), &me).unwrap();
        for n in 0..40 {
            // two pages, a hole, a page that is allocated and not written
            v.write(&f, n * 16384, &[n as u8 + 1; 8192]).unwrap();
            v.fallocate(&f, FallocMode::Allocate { keep_size: false }, n * 16384 + 12288, 4096).unwrap();
            v.sync().unwrap();
        }
        let f = v.open_path(b"short", how(), &me).unwrap();
        v.write(&f, 0, &[9; 5 * 4096 + 10]).unwrap();
    });
    let v = made.mount(MountOptions::default());
    for (name, len, most) in [(&b"pieces"[..], 40 * 16384, (82, 80)), (b"short", 5 * 4096 + 10, (4, 7))] {
        let f = v.open_path(name, OpenHow { read: true, ..OpenHow::default() }, &Cred::root()).unwrap();
        let mut all = Vec::new();
        let (requests, blocks) = made.count(|| {
            for at in (0..len).step_by(4096) {
                let mut buf = [0xee; 4096];
                let one = made.count(|| {
                    let n = v.read(&f, at, &mut buf).unwrap();
                    all.extend_from_slice(&buf[..n]);
                });
                assert!(one.0 <= 1, "{} requests for one page", one.0);
            }
        });
        assert!(requests <= most.0 && blocks <= most.1, "{requests} requests of {blocks} blocks");
        assert_eq!(all.len() as u64, len);
        if name == b"pieces" {
            let right = |(at, b): (usize, &u8)| *b == if at % 16384 < 8192 { (at / 16384) as u8 + 1 } else { 0 };
            assert!(all.iter().enumerate().all(right));
        } else {
            assert!(all.iter().all(|b| *b == 9));
        }
    }
}

/// A page that cannot be read, or whose checksum does not match, is an error of who asks for it.
#[test]
fn an_error_further_on_is_no_error_of_this_read() {
    for effect in [Effect::Fail(5), Effect::FlipBit] {
        let device = Arc::new(FaultDevice::new(Arc::new(MemDevice::new(64 * MIB / 4096)), 1));
        let devices = || vec![device.clone() as Arc<dyn Device>];
        let o = MkfsOptions { domains: Some(1), data_checksums: true, ..MkfsOptions::default() };
        mkfs::format(&devices(), &o).unwrap();
        let me = Cred::root();
        let v = Volume::mount(devices(), MountOptions::default()).unwrap();
        let f = v.open_path(b"f", how(), &me).unwrap();
        v.write(&f, 0, &[7; 64 * 4096]).unwrap();
        v.sync().unwrap();
        let extents = v.extents(f.ino()).unwrap();
        assert_eq!(extents.len(), 1);
        let bad = extents[0].place.unwrap().1 / 4096 + 20;
        let g = v.open_path(b"g", how(), &me).unwrap();
        v.write(&g, 0, &[7; 8 * 4096]).unwrap();
        v.write(&g, 9 * 4096, &[7; 8 * 4096]).unwrap();
        v.sync().unwrap();
        let bad_of_g = v.extents(g.ino()).unwrap().last().unwrap().place.unwrap().1 / 4096;
        drop((f, g));
        v.unmount().unwrap();
        let v = Volume::mount(devices(), MountOptions { background: false, ..MountOptions::default() }).unwrap();
        device.add(Rule::new(Op::Read, effect).blocks(bad..bad + 1));
        let f = v.open_path(b"f", how(), &me).unwrap();
        let mut buf = [0; 4096];
        for page in 0..64 {
            match v.read(&f, page * 4096, &mut buf) {
                Ok(4096) => assert!(page != 20 && buf == [7; 4096], "page {page}"),
                r => assert!(page == 20 && r.is_err(), "page {page}: {r:?}"),
            }
        }
        assert_eq!(v.cache_use().data, 63 * 4096, "counted as it is");
        device.add(Rule::new(Op::Read, effect).blocks(bad_of_g..bad_of_g + 1));
        let g = v.open_path(b"g", how(), &me).unwrap();
        assert!(v.read(&g, 0, &mut [0; 17 * 4096]).is_err());
        assert_eq!(v.cache_use().data, (63 + 8) * 4096, "with what came before the error");
        device.clear();
        drop(g);
        drop(f);
        v.unmount().unwrap();
    }
}
