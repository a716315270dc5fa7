//! Pages that readers have pinned: as read, and as they were, whatever goes on.

use crate::cell::cache::Memory;
use crate::{
    Cred, Error, FallocMode, FileKind, InodeNo, MemoryBudget, MkfsOptions, MountOptions, NewNode, OpenFile, Pinned,
    SetAttr, TenantBudget, Volume,
};
use braidfs_device::{Device, MemDevice};
use proptest::prelude::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// Bytes of memory of the volumes below; of these may be pinned:
const CACHE: u64 = 8 << 20;
const MOST: usize = (CACHE / 4) as usize;

fn volume() -> Volume {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(32 << 8));
    let o = MkfsOptions { domains: Some(2), group_bytes: Some(8 << 20), ..MkfsOptions::default() };
    crate::mkfs::format(std::slice::from_ref(&device), &o).unwrap();
    let options = MountOptions { background: false, cache_bytes: CACHE, ..MountOptions::default() };
    Volume::mount(vec![device], options).unwrap()
}

fn file_in(v: &Volume, dir: InodeNo, name: &str) -> OpenFile {
    let node = NewNode { kind: FileKind::File, mode: 0o644, umask: 0, rdev: 0, target: b"" };
    let ino = v.create(dir, name.as_bytes(), &node, &Cred::root()).unwrap().ino;
    v.open(ino).unwrap()
}

fn file(v: &Volume, name: &str) -> OpenFile {
    file_in(v, InodeNo::ROOT, name)
}

/// All that no transaction holds and nobody has pinned leaves memory.
fn forget_all(v: &Volume) {
    for d in v.mounted().domains.iter().cycle().take(2 * v.mounted().domains.len()) {
        d.evict(Memory { pages: 1 << 20, cells: 1 << 20, index_bytes: 1 << 30, attached: 0 });
    }
}

fn read(v: &Volume, f: &OpenFile, offset: u64, len: usize) -> Vec<u8> {
    let mut buf = vec![0xaa; len];
    let n = v.read(f, offset, &mut buf).unwrap();
    buf.truncate(n);
    buf
}

fn pin(v: &Volume, f: &OpenFile, offset: u64, len: usize) -> Pinned {
    let pinned = v.read_pinned(f, offset, len).unwrap();
    assert_eq!(pinned.bytes(), pinned.iter().map(|p| p.len()).sum::<usize>());
    pinned
}

#[derive(Debug, Clone)]
enum Step {
    Write(u64, usize, u8),
    Truncate(u64),
    Punch(u64, u64),
    Allocate(u64, u64),
    Collapse(u64),
    Insert(u64),
    Sync,
    Forget,
    Pin(u64, usize),
    Unpin(usize),
}

const SIZE: u64 = 200_000;

fn step() -> impl Strategy<Value = Step> {
    let at = || prop_oneof![0..SIZE, (0..SIZE / 4096).prop_map(|b| b * 4096), 0..3000u64];
    let len = || prop_oneof![1..60_000usize, Just(4096usize), 1..500usize];
    prop_oneof![
        4 => (at(), len(), any::<u8>()).prop_map(|(a, l, b)| Step::Write(a, l, b)),
        1 => at().prop_map(Step::Truncate),
        1 => (at(), len()).prop_map(|(a, l)| Step::Punch(a, l as u64)),
        1 => (at(), len()).prop_map(|(a, l)| Step::Allocate(a, l as u64)),
        1 => (0..20u64).prop_map(Step::Collapse),
        1 => (0..20u64).prop_map(Step::Insert),
        1 => Just(Step::Sync),
        1 => Just(Step::Forget),
        5 => (at(), prop_oneof![len(), Just(1usize << 20)]).prop_map(|(a, l)| Step::Pin(a, l)),
        1 => any::<usize>().prop_map(Step::Unpin),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]
    /// Whatever is done to a file: what is pinned is what read gives at that moment, and stays so.
    #[test]
    fn pinned_bytes_are_those_of_their_time(steps in proptest::collection::vec(step(), 1..60)) {
        let v = volume();
        let f = file(&v, "f");
        let mut kept: Vec<(Pinned, Vec<u8>)> = Vec::new();
        for s in &steps {
            match *s {
                Step::Write(at, len, b) => {
                    let bytes: Vec<u8> = (0..len).map(|i| b.wrapping_add((i / 100) as u8)).collect();
                    prop_assert_eq!(v.write(&f, at, &bytes).unwrap(), len);
                }
                Step::Truncate(to) => {
                    v.setattr(f.ino(), &SetAttr { size: Some(to), ..SetAttr::default() }).unwrap();
                }
                Step::Punch(at, len) => v.fallocate(&f, FallocMode::PunchHole, at, len).unwrap(),
                Step::Allocate(at, len) => {
                    v.fallocate(&f, FallocMode::Allocate { keep_size: at % 2 == 0 }, at, len).unwrap();
                }
                // refused beyond the end
                Step::Collapse(block) => drop(v.fallocate(&f, FallocMode::CollapseRange, block * 4096, 4096)),
                Step::Insert(block) => drop(v.fallocate(&f, FallocMode::InsertRange, block * 4096, 8192)),
                Step::Sync => v.sync().unwrap(),
                Step::Forget => {
                    v.sync().unwrap();
                    forget_all(&v);
                }
                Step::Pin(at, len) => {
                    let pinned = pin(&v, &f, at, len);
                    let model = read(&v, &f, at, len);
                    prop_assert!(pinned.to_vec() == model, "{} bytes at {}", len, at);
                    kept.push((pinned, model));
                    if kept.len() > 8 {
                        kept.remove(0);
                    }
                }
                Step::Unpin(n) if !kept.is_empty() => drop(kept.swap_remove(n % kept.len())),
                Step::Unpin(_) => {}
            }
            for (pinned, model) in &kept {
                prop_assert!(pinned.to_vec() == *model, "changed by {:?}", s);
            }
        }
        drop(f);
        v.unlink(InodeNo::ROOT, b"f").unwrap();
        v.sync().unwrap();
        forget_all(&v);
        for (pinned, model) in &kept {
            prop_assert!(pinned.to_vec() == *model, "changed by the removal");
        }
        let pages: usize = kept.iter().map(|(p, _)| p.len()).sum();
        prop_assert_eq!(v.cache_use().pinned, pages as u64 * 4096);
        drop(kept);
        prop_assert_eq!((v.cache_use().pinned, v.cache_use().data), (0, 0));
        v.unmount().unwrap();
    }
}

#[test]
fn no_byte_is_copied_and_holes_take_no_page() {
    let v = volume();
    let f = file(&v, "f");
    v.write(&f, 0, &[1; 8192]).unwrap();
    v.write(&f, 5 * 4096, &[2; 100]).unwrap();
    v.fallocate(&f, FallocMode::Allocate { keep_size: true }, 3 * 4096, 4096).unwrap();
    let all = pin(&v, &f, 0, usize::MAX);
    assert_eq!(all.iter().map(|p| p.is_hole()).collect::<Vec<_>>(), [false, false, true, true, true, false]);
    assert_eq!(
        (all.bytes(), all[5].len(), &all[5][98..], all[3][..] == [0; 4096]),
        (5 * 4096 + 100, 100, &[2, 2][..], true)
    );
    // the same memory for each of those who ask
    let again = pin(&v, &f, 4090, 20);
    assert_eq!((again.len(), again[0].as_ptr()), (2, all[0][4090..].as_ptr()));
    assert!(pin(&v, &f, 5 * 4096 + 100, 10).is_empty() && pin(&v, &f, u64::MAX, usize::MAX).is_empty());
    assert_eq!(pin(&v, &f, 10, 0).bytes(), 0);
    // overwritten: the writer has a page of its own from then on
    v.write(&f, 0, b"new").unwrap();
    let after = pin(&v, &f, 0, 4);
    assert_eq!((&after[0][..], &all[0][..4]), (&b"new\x01"[..], &[1; 4][..]));
    assert_ne!(after[0].as_ptr(), all[0].as_ptr());
    let short = file(&v, "in its inode");
    v.write(&short, 0, b"a few bytes").unwrap();
    v.setattr(short.ino(), &SetAttr { size: Some(14), ..SetAttr::default() }).unwrap();
    let bytes = pin(&v, &short, 2, 100);
    v.write(&short, 0, b"others then").unwrap();
    assert_eq!(bytes.to_vec(), b"few bytes\0\0\0");
    assert!(matches!(v.open(InodeNo::ROOT).and_then(|d| v.read_pinned(&d, 0, 1)), Err(Error::IsDir)));
}

#[test]
fn what_is_pinned_is_not_evicted_and_counts() {
    let v = volume();
    let f = file(&v, "f");
    let content: Vec<u8> = (0..1u32 << 20).map(|i| (i / 1000) as u8).collect();
    v.write(&f, 0, &content).unwrap();
    v.sync().unwrap();
    let pinned = pin(&v, &f, 0, 1 << 19);
    assert_eq!((v.cache_use().pinned, v.cache_use().data), (1 << 19, 1 << 20));
    let ino = f.ino();
    drop(f);
    // the access time, too: no transaction holds the file
    v.sync().unwrap();
    forget_all(&v);
    assert_eq!(v.cache_use().data, 1 << 19, "what is pinned stays, and nothing else");
    let f = v.open(ino).unwrap();
    let misses = v.cache_use().misses;
    assert!(read(&v, &f, 0, 1 << 19) == content[..1 << 19]);
    assert_eq!(v.cache_use().misses, misses, "the pages were read again");
    assert!(read(&v, &f, 0, 1 << 20) == content);
    assert_eq!(v.cache_use().misses, misses + 1);
    drop(pinned);
    drop(f);
    forget_all(&v);
    assert_eq!((v.cache_use().pinned, v.cache_use().data), (0, 0));
    v.unmount().unwrap();
}

#[test]
fn more_than_a_quarter_of_the_cache_is_refused_and_the_budget_holds() {
    let v = volume();
    let f = file(&v, "f");
    for at in (0..16 << 20).step_by(1 << 20) {
        v.write(&f, at, &[at as u8 >> 4 | 1; 1 << 20]).unwrap();
    }
    v.sync().unwrap();
    let refused = |r: crate::Result<Pinned>| match r.unwrap_err() {
        e @ Error::Pinned { limit } => {
            assert_eq!((limit, e.errno()), (MOST as u64, 12));
            assert!(e.to_string().starts_with("more than 2048 KiB of the cache would be pinned"), "{e}");
        }
        e => panic!("{e}"),
    };
    refused(v.read_pinned(&f, 0, MOST + 1));
    refused(v.read_pinned(&f, 0, usize::MAX));
    assert_eq!(v.cache_use().pinned, 0, "nothing is pinned then");
    let mut kept: Vec<Pinned> = (0..8).map(|n| pin(&v, &f, n << 20, MOST / 8)).collect();
    refused(v.read_pinned(&f, 9 << 20, MOST / 16));
    // overwritten, they are there twice, and the cache keeps to what it may take
    for at in (0..16 << 20).step_by(1 << 20) {
        v.write(&f, at, &[9; 1 << 20]).unwrap();
        v.sync().unwrap();
        v.mounted().balance_memory();
        let all = v.cache_use();
        assert!(all.data + all.index + all.pinned <= CACHE, "{all:?}");
    }
    for (n, p) in kept.iter().enumerate() {
        assert!(p.to_vec() == [(n << 20) as u8 >> 4 | 1; MOST / 8]);
    }
    kept.pop();
    kept.push(pin(&v, &f, 9 << 20, MOST / 16));
    // a hole takes no page, but its pieces take memory as well
    let sparse = file(&v, "sparse");
    v.setattr(sparse.ino(), &SetAttr { size: Some(1 << 40), ..SetAttr::default() }).unwrap();
    refused(v.read_pinned(&sparse, 0, 1 << 40));
}

#[test]
fn a_tenant_pins_a_quarter_of_its_own() {
    let v = volume();
    let me = Cred::root();
    let budget = TenantBudget { memory: MemoryBudget { least: 0, most: Some(4 << 20) }, ..TenantBudget::default() };
    v.tenant_create(InodeNo::ROOT, b"t", 0o755, "t", budget, &me).unwrap();
    let dir = v.resolve(b"t", true, &me).unwrap().ino;
    let f = file_in(&v, dir, "f");
    v.write(&f, 0, &[1; 1 << 20]).unwrap();
    v.write(&f, 1 << 20, &[2; 1 << 20]).unwrap();
    let own = pin(&v, &f, 0, 1 << 20);
    assert!(matches!(v.read_pinned(&f, 1 << 20, 1), Err(Error::Pinned { limit }) if limit == 1 << 20));
    let other = file(&v, "other");
    v.write(&other, 0, &[3; 1 << 20]).unwrap();
    let others = pin(&v, &other, 0, 1 << 20);
    // the volume's sum is looked at every few pages
    assert!(matches!(v.read_pinned(&other, 0, MOST / 16), Err(Error::Pinned { limit }) if limit == MOST as u64));
    // what is pinned is memory of the tenant's that others of its pages do not get
    for at in (2 << 20..8 << 20).step_by(1 << 16) {
        v.write(&f, at, &[4; 1 << 16]).unwrap();
        let held = v.mounted().dom(v.domain_of(dir).unwrap()).cached_bytes();
        assert!(held <= (4 << 20) + (4 << 20) / 8, "{held} bytes");
    }
    assert!(own.to_vec() == [1; 1 << 20]);
    drop(own);
    assert!(pin(&v, &f, 0, 1 << 20).to_vec() == [1; 1 << 20]);
    drop(others);
}

#[test]
fn they_outlast_the_volume_and_a_crash() {
    for crash in [false, true] {
        let v = volume();
        let f = file(&v, "f");
        v.write(&f, 0, &[7; 10_000]).unwrap();
        let pinned = pin(&v, &f, 0, 10_000);
        drop(f);
        if crash {
            v.crash()
        } else {
            v.unmount().unwrap()
        }
        assert!(pinned.to_vec() == [7; 10_000]);
    }
}

#[test]
fn they_outlast_the_failure_of_their_domain() {
    let v = volume();
    let f = file(&v, "f");
    v.write(&f, 0, &[7; 10_000]).unwrap();
    let pinned = pin(&v, &f, 0, 10_000);
    v.mounted().dom(v.domain_of(f.ino()).unwrap()).fail(&Error::Io(std::io::Error::other("planted")));
    assert!(v.write(&f, 0, b"x").is_err());
    assert!(pinned.to_vec() == [7; 10_000]);
    assert!(pin(&v, &f, 0, 10_000).to_vec() == [7; 10_000], "as read: of what is in memory");
}

/// Two that overwrite pages, whole and in part, one that syncs and throws pages out, and readers that keep what they pinned for
/// a while: it is never torn, and never changes.
#[test]
fn writers_never_change_what_is_pinned() {
    const PAGES: usize = 4;
    let v = volume();
    let f = file(&v, "f");
    v.write(&f, 0, &[0; PAGES * 4096]).unwrap();
    let (v, f, writers) = (&v, &f, &AtomicU32::new(2));
    std::thread::scope(|s| {
        for own in [0u8, 128] {
            s.spawn(move || {
                for n in 0..20_000u32 {
                    // the last page not always
                    let pages = if n % 5 == 0 { PAGES - 1 } else { PAGES };
                    v.write(f, 0, &vec![own | (n % 128) as u8; pages * 4096]).unwrap();
                }
                writers.fetch_sub(1, Relaxed);
            });
        }
        s.spawn(move || {
            while writers.load(Relaxed) > 0 {
                v.sync().unwrap();
                forget_all(v);
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
        });
        for _ in 0..2 {
            s.spawn(move || {
                let mut kept = std::collections::VecDeque::new();
                while writers.load(Relaxed) > 0 {
                    let pinned = pin(v, f, 0, PAGES * 4096);
                    let first: Vec<u8> = pinned.iter().map(|p| p[0]).collect();
                    assert!(first.windows(2).take(PAGES - 2).all(|w| w[0] == w[1]), "torn: {first:?}");
                    kept.push_back((pinned, first));
                    if kept.len() > 20 {
                        let (pinned, first) = kept.pop_front().unwrap();
                        for (page, b) in pinned.iter().zip(first) {
                            assert!(page.iter().all(|x| *x == b), "changed");
                        }
                    }
                }
            });
        }
    });
    assert_eq!(v.cache_use().pinned, 0);
}

/// A copy would keep its page for as long as it likes, and nobody would count that.
#[test]
fn pieces_are_not_cloned() {
    trait Cloned<How> {
        fn is_not() {}
    }
    impl<T> Cloned<()> for T {}
    struct Is;
    impl<T: Clone> Cloned<Is> for T {}
    // ambiguous where it is: this is not compiled then
    <super::Piece as Cloned<_>>::is_not();
}
