//! What left memory and is read again, on a volume so small that blocks are used again all the time.

use crate::cell::cache::Memory;
use crate::{Cred, FileKind, InodeNo, MkfsOptions, MountOptions, NewNode, Volume};
use braidfs_device::{Device, MemDevice};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Everything that no transaction holds leaves memory: by the second turn also what was used.
fn forget_all(v: &Volume) {
    for d in v.mounted().domains.iter().cycle().take(2 * v.mounted().domains.len()) {
        d.evict(Memory { pages: 1 << 20, cells: 1 << 20, index_bytes: 1 << 30 });
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
    [m.shared.memory.pages() * 4096, m.shared.memory.index_bytes(), tables]
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
