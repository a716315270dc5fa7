//! What left memory and is read again, on a volume so small that blocks are used again all the time.

use super::{floors_within, goal_of, kept_most};
use crate::cell::cache::{CELL_BYTES, Memory};
use crate::{Cred, FileKind, InodeNo, MemoryBudget, MkfsOptions, MountOptions, NewNode, TenantBudget, Volume};
use braidfs_device::{Device, MemDevice};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Everything that no transaction holds leaves memory: by the second turn also what was used.
fn forget_all(v: &Volume) {
    for d in v.mounted().domains.iter().cycle().take(2 * v.mounted().domains.len()) {
        d.evict(Memory { pages: 1 << 20, cells: 1 << 20, index_bytes: 1 << 30, attached: 0 });
    }
}

fn names(v: &Volume, dir: InodeNo) -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    v.readdir(dir, 0, &mut |e| {
        all.insert(String::from_utf8_lossy(e.name).into_owned());
        true
    })
    .unwrap();
    all.retain(|n| n != "." && n != "..");
    all
}

#[test]
fn buckets_come_back_as_they_were_written_last() {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(4096));
    let o = MkfsOptions {
        domains: Some(1),
        group_bytes: Some(4 << 20),
        journal_bytes: Some(512 << 10),
        ..MkfsOptions::default()
    };
    crate::mkfs::format(std::slice::from_ref(&device), &o).unwrap();
    let v = Volume::mount(vec![device.clone()], MountOptions { background: false, ..MountOptions::default() }).unwrap();
    let me = Cred::root();
    let node = |kind| NewNode { kind, mode: 0o755, umask: 0, rdev: 0, target: b"" };
    let dirs: Vec<InodeNo> = (0..3)
        .map(|d| v.create(InodeNo::ROOT, format!("d{d}").as_bytes(), &node(FileKind::Dir), &me).unwrap().ino)
        .collect();
    let mut model = vec![BTreeSet::new(); dirs.len()];
    let (mut random, mut next) = (1u64, 0);
    for round in 0..250 {
        for (dir, model) in dirs.iter().zip(&mut model) {
            for _ in 0..12 {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let n = (random >> 33) as usize;
                if model.len() > 500 || (model.len() > 300 && n.is_multiple_of(2)) {
                    let name: String = model.iter().nth(n % model.len()).cloned().unwrap();
                    v.unlink(*dir, name.as_bytes()).unwrap();
                    model.remove(&name);
                } else {
                    let name = format!("a name that takes some room in its bucket, {next}");
                    v.create(*dir, name.as_bytes(), &node(FileKind::File), &me).unwrap();
                    model.insert(name);
                    next += 1;
                }
            }
        }
        v.sync().unwrap();
        forget_all(&v);
        for (dir, model) in dirs.iter().zip(&model) {
            assert!(names(&v, *dir) == *model, "round {round}");
        }
    }
    v.unmount().unwrap();
}

/// Bytes of memory that the cache of the tests below may take.
const BUDGET: u64 = 8 << 20;

fn with_budget(blocks: u64, domains: u16) -> Volume {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(blocks));
    let o = MkfsOptions { domains: Some(domains), group_bytes: Some(8 << 20), ..MkfsOptions::default() };
    crate::mkfs::format(std::slice::from_ref(&device), &o).unwrap();
    let options = MountOptions { background: false, cache_bytes: BUDGET, ..MountOptions::default() };
    Volume::mount(vec![device], options).unwrap()
}

/// What the volume counts: pages, indexes, tables.
fn counted(v: &Volume) -> [u64; 3] {
    let m = v.mounted();
    let tables = m.domains.iter().map(|d| d.space.table_bytes() + d.nodes.memory_bytes()).sum();
    let all = v.cache_use();
    [all.data, all.index, tables]
}

/// What moves while a volume becomes smaller, or off a device, is not kept in memory, also where there is no background.
#[test]
fn what_moves_stays_in_the_budget() {
    let v = with_budget(128 << 8, 1);
    let new = NewNode { kind: FileKind::File, mode: 0o755, umask: 0, rdev: 0, target: b"" };
    let files = [b"low", b"top"].map(|name| {
        let f = v.open(v.create(InodeNo::ROOT, name, &new, &Cred::root()).unwrap().ino).unwrap();
        for n in 0..48 {
            v.write(&f, n << 20, &[n as u8; 1 << 20]).unwrap();
        }
        v.sync().unwrap();
        f
    });
    let [low, top] = files;
    drop(low);
    v.unlink(InodeNo::ROOT, b"low").unwrap();
    v.sync().unwrap();
    forget_all(&v);
    let most = std::cell::Cell::new(0);
    let look = |_, _| most.set(most.get().max(v.cache_use().data));
    v.shrink(72 << 20, &look).unwrap();
    let moved = v.mounted().dom(crate::DomainId(0)).space.used();
    assert!((48 << 8..60 << 8).contains(&moved) && most.get() > 0, "{moved} blocks, {most:?} bytes");
    assert!(most.get() <= BUDGET, "{most:?} bytes of data");
    let mut byte = [0];
    for n in 0..48 {
        v.read(&top, n << 20, &mut byte).unwrap();
        assert_eq!(byte, [n as u8]);
    }
    drop(top);
    v.unmount().unwrap();
}

#[test]
fn tables_of_many_domains_stay_in_the_budget() {
    let v = with_budget(96 << 10, 4);
    let node = |kind| NewNode { kind, mode: 0o755, umask: 0, rdev: 0, target: b"" };
    let (mut most, mut all) = (0, Vec::new());
    for d in 0..8 {
        let dir = v.create(InodeNo::ROOT, format!("d{d}").as_bytes(), &node(FileKind::Dir), &Cred::root()).unwrap().ino;
        for f in 0..3000 {
            let name = format!("f{f}");
            let file = v.create(dir, name.as_bytes(), &node(FileKind::File), &Cred::root()).unwrap().ino;
            if f % 100 == 0 {
                let open = v.open(file).unwrap();
                v.write(&open, 0, &vec![1; 256 << 10]).unwrap();
            }
            all.push(file);
        }
        v.sync().unwrap();
        v.mounted().domains.iter().for_each(|d| d.checkpoint().unwrap());
        // the inodes are read from their blocks
        forget_all(&v);
        all.iter().for_each(|ino| assert!(v.getattr(*ino).is_ok()));
        v.mounted().balance_memory();
        most = most.max(counted(&v)[2]);
    }
    assert!(most > BUDGET / 64, "{most} bytes: nothing was there");
    // three kinds, a sixteenth each; and what a domain needs at least
    let least = 4 * (16 * 2 * crate::space::paired::TABLE_BLOCK_BYTES + 8 * 16 * 4096);
    assert!(most <= (BUDGET / 16 * 3).max(least), "{most} bytes of tables, of {BUDGET}");
    v.unmount().unwrap();
}

/// In a tree of many files most directories are small.
#[test]
fn names_of_small_directories_count() {
    let v = with_budget(32 << 10, 1);
    let node = |kind| NewNode { kind, mode: 0o755, umask: 0, rdev: 0, target: b"" };
    const DIRS: u64 = 100;
    const NAMES: u64 = 100;
    for d in 0..DIRS {
        let dir = v.create(InodeNo::ROOT, format!("d{d}").as_bytes(), &node(FileKind::Dir), &Cred::root()).unwrap().ino;
        for f in 0..NAMES {
            v.create(dir, format!("f{f}").as_bytes(), &node(FileKind::File), &Cred::root()).unwrap();
        }
    }
    // key and entry of each
    let [_, index, _] = counted(&v);
    assert!(index >= DIRS * NAMES * 56, "{index} bytes counted");
    v.unmount().unwrap();
}

/// Large directories that a process has open, and does not use.
#[test]
fn names_of_open_directories_go() {
    let v = with_budget(64 << 10, 1);
    let node = |kind| NewNode { kind, mode: 0o755, umask: 0, rdev: 0, target: b"" };
    const DIRS: u64 = 40;
    const NAMES: u64 = 1000;
    let mut open = Vec::new();
    for d in 0..DIRS {
        let dir = v.create(InodeNo::ROOT, format!("d{d}").as_bytes(), &node(FileKind::Dir), &Cred::root()).unwrap().ino;
        // counted as well where other tests have it that handles are pins
        open.push((v.open(dir).unwrap(), v.mounted().cell(dir).unwrap()));
        for f in 0..NAMES {
            let name = format!("{f:0>200}");
            v.create(dir, name.as_bytes(), &node(FileKind::File), &Cred::root()).unwrap();
        }
        v.sync().unwrap();
        (0..2).for_each(|_| v.mounted().balance_memory());
        let all: u64 = counted(&v).iter().sum();
        assert!(all <= BUDGET, "{all} bytes of {BUDGET}, {} directories are open", open.len());
    }
    const { assert!(DIRS * NAMES * 256 > BUDGET) };
    // what was changed since it was written stays, and counts
    let unwritten = |n: u64| format!("new{n}");
    open.iter().enumerate().for_each(|(n, (f, _))| {
        v.create(f.ino(), unwritten(n as u64).as_bytes(), &node(FileKind::File), &Cred::root()).unwrap();
    });
    forget_all(&v);
    for (n, (f, _)) in open.iter().enumerate() {
        let names = names(&v, f.ino());
        assert!(names.len() == NAMES as usize + 1 && names.contains(&unwritten(n as u64)), "{} names", names.len());
    }
    drop(open);
    v.unmount().unwrap();
}

/// A directory that was emptied takes no blocks, as a new one.
#[test]
fn a_directory_that_was_emptied_gives_its_blocks_back() {
    let v = with_budget(64 << 10, 1);
    let node = |kind| NewNode { kind, mode: 0o755, umask: 0, rdev: 0, target: b"" };
    let dir = v.create(InodeNo::ROOT, b"dir", &node(FileKind::Dir), &Cred::root()).unwrap();
    v.sync().unwrap();
    let used = || v.mounted().dom(crate::DomainId(0)).space.used();
    let (size, before) = (dir.size, used());
    let name = |n: u32| format!("{n:0>100}").into_bytes();
    const NAMES: u32 = 20_000;
    for n in 0..NAMES {
        v.create(dir.ino, &name(n), &node(FileKind::File), &Cred::root()).unwrap();
    }
    v.sync().unwrap();
    let (full, most) = (v.getattr(dir.ino).unwrap(), used());
    assert!(full.size > u64::from(NAMES) * 100 && full.sectors * 512 == full.size && most > before + full.size / 4096);
    for (n, all) in [(0, NAMES / 2), (NAMES / 2, NAMES)] {
        (n..all).for_each(|n| v.unlink(dir.ino, &name(n)).unwrap());
        v.sync().unwrap();
        forget_all(&v);
    }
    let empty = v.getattr(dir.ino).unwrap();
    assert_eq!((empty.size, empty.sectors), (size, 0));
    // the tables of inodes stay, for others
    assert!(used() < most - full.size / 4096, "{} blocks of {most}, {before} before", used());
    v.unmount().unwrap();
}

/// A walk through very many files of a volume that is read-only, from the mount on or since a remount: the thread of the background
/// sees to it that only as many inodes stay in memory as fit the cache.
#[test]
fn who_walks_through_a_read_only_volume_keeps_to_the_budget() {
    const DIRS: u64 = 200;
    const NAMES: u64 = 1000;
    const { assert!(DIRS * NAMES * CELL_BYTES > 10 * BUDGET) };
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(512 << 10));
    let o = MkfsOptions { domains: Some(2), group_bytes: Some(8 << 20), ..MkfsOptions::default() };
    crate::mkfs::format(std::slice::from_ref(&device), &o).unwrap();
    let mount = |read_only| {
        let options = MountOptions { read_only, cache_bytes: BUDGET, ..MountOptions::default() };
        Volume::mount(vec![device.clone()], options).unwrap()
    };
    let inodes = |v: &Volume| v.mounted().domains.iter().map(|d| d.cells.len() as u64).sum::<u64>();
    let walk = |v: &Volume| {
        let mut met = 0;
        for dir in names(v, InodeNo::ROOT) {
            let dir = v.lookup(InodeNo::ROOT, dir.as_bytes()).unwrap().ino;
            let mut each = |_: crate::DirEntry<'_>, attr: Option<&crate::Attr>| {
                met += u64::from(attr.is_some());
                true
            };
            v.readdir_plus(dir, 0, &mut each).unwrap();
            if met.is_multiple_of(20 * NAMES) {
                let begin = std::time::Instant::now();
                while inodes(v) * CELL_BYTES > BUDGET {
                    assert!(begin.elapsed() < std::time::Duration::from_secs(60), "{} inodes of {met}", inodes(v));
                    std::thread::sleep(std::time::Duration::from_millis(10));
                }
            }
        }
        assert_eq!(met, DIRS * NAMES);
    };
    let v = mount(false);
    let node = |kind| NewNode { kind, mode: 0o755, umask: 0, rdev: 0, target: b"" };
    for d in 0..DIRS {
        let dir = v.create(InodeNo::ROOT, format!("d{d}").as_bytes(), &node(FileKind::Dir), &Cred::root()).unwrap().ino;
        for f in 0..NAMES {
            v.create(dir, format!("f{f}").as_bytes(), &node(FileKind::File), &Cred::root()).unwrap();
        }
    }
    v.remount(&crate::Remount { read_only: Some(true), ..crate::Remount::default() }).unwrap();
    walk(&v);
    v.unmount().unwrap();
    let v = mount(true);
    walk(&v);
    v.unmount().unwrap();
}

/// As a check of a volume that was not unmounted does it, without a background.
#[test]
fn who_looks_at_all_names_keeps_to_the_budget() {
    let v = with_budget(64 << 10, 1);
    let node = |kind| NewNode { kind, mode: 0o755, umask: 0, rdev: 0, target: b"" };
    const DIRS: u64 = 200;
    const NAMES: u64 = 250;
    for d in 0..DIRS {
        let dir = v.create(InodeNo::ROOT, format!("d{d}").as_bytes(), &node(FileKind::Dir), &Cred::root()).unwrap().ino;
        for f in 0..NAMES {
            // with memory of its own
            let name = format!("{f:0>200}");
            v.create(dir, name.as_bytes(), &node(FileKind::File), &Cred::root()).unwrap();
        }
    }
    v.sync().unwrap();
    forget_all(&v);
    const { assert!(DIRS * NAMES * 256 > BUDGET / 2 * 3) };
    v.collect_stale().unwrap();
    let [_, index, _] = counted(&v);
    assert!(index > BUDGET / 4 && index <= BUDGET + BUDGET / 4, "{index} bytes of names");
    v.unmount().unwrap();
}

#[test]
fn a_file_in_pieces_counts_with_its_extents() {
    let v = with_budget(64 << 10, 1);
    let node = NewNode { kind: FileKind::File, mode: 0o644, umask: 0, rdev: 0, target: b"" };
    let ino = v.create(InodeNo::ROOT, b"pieces", &node, &Cred::root()).unwrap().ino;
    let file = v.open(ino).unwrap();
    const PIECES: u64 = 20_000;
    for n in 0..PIECES {
        v.write(&file, n * 8192, b"piece").unwrap();
        if n % 1000 == 999 {
            v.sync().unwrap();
        }
    }
    v.sync().unwrap();
    let [_, indexes, _] = counted(&v);
    let extents = PIECES * size_of::<braidfs_format::inode::Extent>() as u64;
    assert!(indexes > extents, "{indexes} bytes of indexes, {extents} of extents");
    v.mounted().balance_memory();
    v.mounted().balance_memory();
    let all: u64 = counted(&v).iter().sum();
    assert!(all <= BUDGET, "{all} bytes of {BUDGET}: {:?}", counted(&v));
    drop(file);
    v.unlink(InodeNo::ROOT, b"pieces").unwrap();
    // of so many extents the background does it
    v.mounted().reap_zombies().unwrap();
    v.sync().unwrap();
    let [pages, indexes, _] = counted(&v);
    assert_eq!(pages, 0);
    assert!(indexes < 64 << 10, "{indexes} bytes of indexes stay");
    v.unmount().unwrap();
}

/// Many files in pieces, of which each is small beside the cache, and all together are not.
#[test]
fn extents_of_files_that_nobody_uses_go() {
    let v = with_budget(640 << 10, 1);
    let node = NewNode { kind: FileKind::File, mode: 0o644, umask: 0, rdev: 0, target: b"" };
    const FILES: u64 = 24;
    const PIECES: u64 = 20_000;
    let mut most = 0;
    for n in 0..FILES {
        let ino = v.create(InodeNo::ROOT, format!("f{n}").as_bytes(), &node, &Cred::root()).unwrap().ino;
        let file = v.open(ino).unwrap();
        for at in (0..PIECES).rev() {
            v.fallocate(&file, crate::FallocMode::Allocate { keep_size: false }, at * 8192, 4096).unwrap();
        }
        drop(file);
        v.sync().unwrap();
        (0..3).for_each(|_| v.mounted().balance_memory());
        most = most.max(counted(&v).iter().sum());
    }
    let extents = FILES * PIECES * size_of::<braidfs_format::inode::Extent>() as u64;
    assert!(extents > 2 * BUDGET);
    assert!(most <= BUDGET + BUDGET / 8, "{most} bytes of {BUDGET}, with {extents} bytes of extents");
    v.unmount().unwrap();
}

/// A volume with tenants of these names, which may hold between `floor` and `ceiling` bytes of [`BUDGET`].
fn with_tenants(names: [&str; 2], limits: [(u64, Option<u64>); 2]) -> (Volume, [InodeNo; 2]) {
    let v = with_budget(64 << 10, 2);
    let roots = [0, 1].map(|n| {
        let memory = MemoryBudget { least: limits[n].0, most: limits[n].1 };
        let budget = TenantBudget { memory, ..TenantBudget::default() };
        v.tenant_create(InodeNo::ROOT, names[n].as_bytes(), 0o755, names[n], budget, &Cred::root()).unwrap().root
    });
    (v, roots)
}

fn file_in(v: &Volume, dir: InodeNo, name: &str) -> crate::OpenFile {
    let node = NewNode { kind: FileKind::File, mode: 0o644, umask: 0, rdev: 0, target: b"" };
    v.open(v.create(dir, name.as_bytes(), &node, &Cred::root()).unwrap().ino).unwrap()
}

fn held(v: &Volume, ino: InodeNo) -> u64 {
    v.mounted().domain_of(ino).unwrap().cached_bytes()
}

const STEP: u64 = 64 << 10;

/// A file of so many bytes, and the most that its domain held meanwhile.
fn fill(v: &Volume, file: &crate::OpenFile, bytes: u64) -> u64 {
    let data = vec![7; STEP as usize];
    let write = |at| {
        assert_eq!(v.write(file, at, &data).unwrap(), data.len());
        held(v, file.ino())
    };
    (0..bytes / STEP).map(|n| write(n * STEP)).max().unwrap()
}

fn read_all(v: &Volume, file: &crate::OpenFile, bytes: u64) -> u64 {
    let mut data = vec![0; STEP as usize];
    let mut read = |at| {
        assert_eq!(v.read(file, at, &mut data).unwrap(), data.len());
        assert!(data.iter().all(|b| *b == 7));
        held(v, file.ino())
    };
    (0..bytes / STEP).map(|n| read(n * STEP)).max().unwrap()
}

#[test]
fn a_tenant_keeps_to_its_ceiling_and_takes_nothing_of_others() {
    const CEILING: u64 = 4 << 20;
    let (v, [small, other]) = with_tenants(["small", "other"], [(0, Some(CEILING)), (0, None)]);
    let beside = file_in(&v, other, "beside");
    fill(&v, &beside, 3 << 20);
    v.sync().unwrap();
    let before = held(&v, other);
    assert!(before >= 3 << 20);
    let file = file_in(&v, small, "large");
    let most = fill(&v, &file, 24 << 20);
    assert!(most <= CEILING + CEILING / 20, "{most} bytes while it was written");
    v.sync().unwrap();
    let most = read_all(&v, &file, 24 << 20);
    assert!((CEILING * 3 / 4..=CEILING + CEILING / 20).contains(&most), "{most} bytes while it was read");
    assert_eq!(held(&v, other), before, "of the other tenant something is gone");
    // and inodes
    for n in 0..20_000 {
        drop(file_in(&v, small, &format!("f{n}")));
        assert!(n % 100 > 0 || held(&v, small) <= 2 * CEILING, "{} bytes with {n} files", held(&v, small));
    }
    v.sync().unwrap();
    v.mounted().balance_memory();
    assert!(held(&v, small) <= CEILING, "{} bytes with 20,000 files", held(&v, small));
    // raised and taken away while it is in use
    let set = |most| v.tenant_change("small", |b| b.memory.most = most).unwrap();
    set(Some(CEILING * 3 / 2));
    let most = read_all(&v, &file, 24 << 20);
    assert!((CEILING * 5 / 4..=CEILING * 3 / 2 + CEILING / 10).contains(&most), "{most} bytes of a higher ceiling");
    assert_eq!(set(Some(CEILING)).budget.memory.most, Some(CEILING));
    assert!(v.tenant_change("small", |b| b.memory.most = Some(1 << 20)).is_err(), "too little");
    assert!(v.tenant_change("small", |b| b.memory.least = CEILING + 1).is_err(), "more than it may hold");
    read_all(&v, &file, STEP);
    assert!(held(&v, small) <= CEILING + CEILING / 20, "{} bytes of the lower one", held(&v, small));
    set(None);
    assert!(read_all(&v, &file, 24 << 20) > CEILING * 5 / 4, "without one");
    drop((file, beside));
    v.unmount().unwrap();
}

#[test]
fn limits_of_memory_outlast_a_mount_and_go_with_the_tenant() {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(16 << 10));
    let o = MkfsOptions { domains: Some(1), group_bytes: Some(8 << 20), ..MkfsOptions::default() };
    crate::mkfs::format(std::slice::from_ref(&device), &o).unwrap();
    let mount = || {
        let options = MountOptions { background: false, cache_bytes: 32 << 20, ..MountOptions::default() };
        Volume::mount(vec![device.clone()], options).unwrap()
    };
    let v = mount();
    let memory = MemoryBudget { least: 1 << 20, most: Some(4 << 20) };
    let budget = TenantBudget { memory, ..TenantBudget::default() };
    let root = v.tenant_create(InodeNo::ROOT, b"t", 0o755, "t", budget, &Cred::root()).unwrap().root;
    v.unmount().unwrap();
    let v = mount();
    assert_eq!(v.tenant("t").unwrap().budget, budget);
    let file = file_in(&v, root, "large");
    let most = fill(&v, &file, 16 << 20);
    assert!(most <= (4 << 20) + (4 << 20) / 20, "{most} bytes after a mount");
    assert_eq!(v.mounted().domain_of(root).unwrap().memory.floor(), 1 << 20);
    v.tenant_remove("t").unwrap();
    assert_eq!(v.mounted().domain_of(root).unwrap().memory.ceiling(), None);
    assert!(read_all(&v, &file, 16 << 20) > 8 << 20, "an ordinary directory now");
    drop(file);
    v.unmount().unwrap();
}

#[test]
fn what_a_tenant_has_for_itself_outlasts_a_flood_of_others() {
    const FLOOR: u64 = 3 << 20;
    let (v, [quiet, flood]) = with_tenants(["quiet", "flood"], [(FLOOR, None), (0, None)]);
    let file = file_in(&v, quiet, "kept");
    fill(&v, &file, 2 << 20);
    let large = file_in(&v, flood, "large");
    fill(&v, &large, 48 << 20);
    v.sync().unwrap();
    let before = held(&v, quiet);
    assert!(before >= 2 << 20);
    for _ in 0..3 {
        read_all(&v, &large, 48 << 20);
        v.mounted().balance_memory();
    }
    assert_eq!(held(&v, quiet), before);
    let misses = v.cache_use().misses;
    read_all(&v, &file, 2 << 20);
    assert_eq!(v.cache_use().misses, misses, "it was read from the device");
    // without a floor it is gone
    v.tenant_change("quiet", |b| b.memory.least = 0).unwrap();
    for _ in 0..3 {
        read_all(&v, &large, 48 << 20);
        v.mounted().balance_memory();
    }
    assert!(held(&v, quiet) < 1 << 20, "{} bytes", held(&v, quiet));
    drop((file, large));
    v.unmount().unwrap();
}

#[test]
fn several_threads_keep_to_a_ceiling_together() {
    const CEILING: u64 = 4 << 20;
    let (v, [dir, _]) = with_tenants(["busy", "other"], [(0, Some(CEILING)), (0, None)]);
    let files: Vec<_> = (0..6).map(|n| file_in(&v, dir, &format!("f{n}"))).collect();
    let most = std::thread::scope(|s| {
        let all: Vec<_> = files.iter().map(|f| s.spawn(|| fill(&v, f, 8 << 20))).collect();
        all.into_iter().map(|t| t.join().unwrap()).max().unwrap()
    });
    // each has a write more under way, and a file that is locked keeps its pages for a moment; without the ceiling it is all of it
    assert!(most <= 2 * CEILING, "{most} bytes");
    v.sync().unwrap();
    files.iter().for_each(|f| assert!(read_all(&v, f, 8 << 20) <= CEILING + CEILING / 20));
    drop(files);
    v.unmount().unwrap();
}

/// What an fsync of a directory waits for is known to memory alone: the directory stays there until it is durable.
#[test]
fn a_directory_stays_whose_entries_concern_what_is_not_durable() {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(16384));
    let o = MkfsOptions { domains: Some(2), placement: crate::Placement::Spread, ..MkfsOptions::default() };
    crate::mkfs::format(std::slice::from_ref(&device), &o).unwrap();
    let o = MountOptions { background: false, serial: true, ..MountOptions::default() };
    let v = Volume::mount(vec![device.clone()], o).unwrap();
    let me = Cred::root();
    let node = |kind| NewNode { kind, mode: 0o755, umask: 0, rdev: 0, target: b"" };
    let dir = v.create(InodeNo::ROOT, b"d", &node(FileKind::Dir), &me).unwrap().ino;
    let other = (0..).map(|i| format!("f{i}")).find(|name| {
        let f = v.create(InodeNo::ROOT, name.as_bytes(), &node(FileKind::File), &me).unwrap().ino;
        v.domain_of(f).unwrap() != v.domain_of(dir).unwrap()
    });
    v.sync().unwrap();
    v.rename(InodeNo::ROOT, other.unwrap().as_bytes(), dir, b"x", crate::RenameMode::Replace).unwrap();
    let own = v.domain_of(dir).unwrap();
    v.commit_domain(own, false).unwrap();
    forget_all(&v);
    v.fsync(dir, false).unwrap();
    v.crash();
    let o = MountOptions { background: false, serial: true, ..MountOptions::default() };
    let v = Volume::mount(vec![device], o).unwrap();
    assert_eq!(names(&v, dir), BTreeSet::from(["x".to_string()]));
    v.sync().unwrap();
    // looking makes it warm
    (0..2).for_each(|_| forget_all(&v));
    assert!(v.mounted().dom(own).cells.get(dir).is_none(), "nothing keeps it");
}

/// Small files that are looked at hold their content, names and attributes in memory, which counts, and goes with them.
#[test]
fn what_hangs_on_inodes_counts() {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(64 << 8));
    crate::mkfs::format(std::slice::from_ref(&device), &MkfsOptions::default()).unwrap();
    let options = || MountOptions { background: false, cache_bytes: 4 << 20, ..MountOptions::default() };
    let v = Volume::mount(vec![device.clone()], options()).unwrap();
    let me = Cred::root();
    let node = NewNode { kind: FileKind::File, mode: 0o644, umask: 0, rdev: 0, target: b"" };
    let name = |n: u32| format!("{n}").into_bytes();
    for n in 0..3000 {
        let f = v.open(v.create(InodeNo::ROOT, &name(n), &node, &me).unwrap().ino).unwrap();
        v.write(&f, 0, &[7; 3000]).unwrap();
        if n % 100 == 0 {
            v.setxattr(f.ino(), b"user.long", &[7; 20_000], crate::XattrMode::Set).unwrap();
        }
    }
    v.sync().unwrap();
    let attached = |v: &Volume| v.mounted().domains.iter().map(|d| d.memory.attached()).sum::<u64>();
    assert!(attached(&v) > 3000 * 2500, "{}", attached(&v));
    v.unmount().unwrap();
    let v = Volume::mount(vec![device], options()).unwrap();
    for n in 0..3000 {
        v.lookup(InodeNo::ROOT, &name(n)).unwrap();
        if n % 100 == 0 {
            // as the background does, which waits for nobody
            v.mounted().keep_to_budget();
            let (used, counted) = (super::Held::of(v.mounted()).used, attached(&v));
            assert!(used < 6 << 20, "{n}: {used} bytes of 4 MiB, of which {counted} hang on inodes");
        }
    }
    forget_all(&v);
    assert!(attached(&v) < 8 << 10, "{} bytes of inodes that are gone", attached(&v));
}

/// What a recovery takes out of the cache for what was synced last counts no more.
#[test]
fn what_a_recovery_replaces_does_not_count() {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(64 << 8));
    crate::mkfs::format(std::slice::from_ref(&device), &MkfsOptions::default()).unwrap();
    let options = || MountOptions { background: false, ..MountOptions::default() };
    let v = Volume::mount(vec![device.clone()], options()).unwrap();
    let node = NewNode { kind: FileKind::File, mode: 0o644, umask: 0, rdev: 0, target: b"" };
    let make = |n: u32| v.open(v.create(InodeNo::ROOT, format!("{n}").as_bytes(), &node, &Cred::root()).unwrap().ino);
    let files: Vec<_> = (0..300).map(|n| make(n).unwrap()).collect();
    files.iter().for_each(|f| assert_eq!(v.write(f, 0, &[7; 2500]).unwrap(), 2500));
    v.sync().unwrap();
    for f in &files {
        v.write(f, 0, &[8; 2600]).unwrap();
        v.fsync(f.ino(), false).unwrap();
    }
    drop(files);
    v.crash();
    let v = Volume::mount(vec![device], options()).unwrap();
    let counted = |v: &Volume| {
        let of = |d: &crate::domain::Domain| d.memory.attached() + d.memory.index_bytes();
        v.mounted().domains.iter().map(|d| of(d)).sum::<u64>()
    };
    for n in 0..300 {
        let f = v.open(v.lookup(InodeNo::ROOT, format!("{n}").as_bytes()).unwrap().ino).unwrap();
        let mut content = [0; 3000];
        assert_eq!(v.read(&f, 0, &mut content).unwrap(), 2600, "{n} was not rolled forward: this test sees nothing");
    }
    v.sync().unwrap();
    forget_all(&v);
    assert!(counted(&v) < 8 << 10, "{} bytes of inodes that are gone", counted(&v));
}

/// What is kept for tenants is all together no more than a part of the cache: where more was asked for each gets its part of that,
/// and the cache keeps to its budget.
#[test]
fn floors_above_the_cache_leave_it_its_bound() {
    for floor in [BUDGET / 2, 4 * BUDGET, u64::MAX / 2] {
        let (v, roots) = with_tenants(["one", "two"], [(floor, None); 2]);
        let files = roots.map(|root| file_in(&v, root, "large"));
        let cached = || {
            let used = v.cache_use();
            used.data + used.index
        };
        for f in &files {
            fill(&v, f, 2 * BUDGET);
            v.sync().unwrap();
        }
        for f in files.iter().cycle().take(4) {
            read_all(&v, f, 2 * BUDGET);
            v.mounted().balance_memory();
            assert!(cached() <= BUDGET, "{} bytes with floors of {floor}", cached());
        }
        let quiet = held(&v, roots[0]);
        assert!(quiet >= BUDGET / 4, "{quiet} bytes are left of what is its own, with floors of {floor}");
        drop(files);
        v.unmount().unwrap();
    }
}

/// However much tables take, and however high floors are: who has none is left a part of what the cache shrinks to.
#[test]
fn floors_and_tables_leave_something_to_who_has_no_floor() {
    for (budget, tables) in [(BUDGET, 0), (BUDGET, BUDGET / 4), (64 << 30, 16 << 30)] {
        let floors: u64 = floors_within([budget, budget / 2].into_iter(), kept_most(budget, tables)).iter().sum();
        let left = goal_of(budget).checked_sub(tables + floors).unwrap();
        assert!(left >= budget / 8, "{left} of {budget}, with {tables} in tables and {floors} kept");
    }
}
