//! A scrub of a volume in use finds every flipped bit, and nothing where there is none, whatever goes on.

use crate::names::path::OpenHow;
use crate::types::{
    Cred, DomainId, FallocMode, InodeNo, MkfsOptions, MountOptions, NodeId, RenameMode, SetAttr, SetTime, Timestamp,
};
use crate::volume::Volume;
use crate::volume::journal_replay::JournalReplay;
use crate::volume::tenants::TenantBudget;
use braidfs_check::ScrubReport;
use braidfs_check::codes;
use braidfs_check::online::{ScrubOptions, scrub_mounted};
use braidfs_device::{BLOCK_BYTES, Device, MemDevice};
use braidfs_format::domain::DomainHeader;
use braidfs_format::inode::Link;
use braidfs_format::node::{NodeEntry, NodeTableBlock};
use braidfs_format::super_block::SuperBlock;
use braidfs_format::{BlockAddr, geometry::NODES_PER_BLOCK};
use braidfs_store::Store;
use braidfs_store::interface::{LiveVolume, Quiesced};
use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

fn volume(mib: u64, domains: u16) -> (Arc<MemDevice>, Volume) {
    volume_with(mib, domains, 0)
}

fn volume_with(mib: u64, domains: u16, cache_bytes: u64) -> (Arc<MemDevice>, Volume) {
    let device = Arc::new(MemDevice::new(mib * 256));
    let all: Vec<Arc<dyn Device>> = vec![device.clone()];
    let o = MkfsOptions {
        domains: Some(domains),
        group_bytes: Some(4 << 20),
        data_checksums: true,
        ..MkfsOptions::default()
    };
    crate::mkfs::format(&all, &o).unwrap();
    let options = MountOptions { commit_interval: Duration::from_millis(50), cache_bytes, ..MountOptions::default() };
    (device, Volume::mount(all, options).unwrap())
}

fn put(v: &Volume, path: &str, data: &[u8]) -> InodeNo {
    let how = OpenHow { read: true, write: true, create: true, mode: 0o644, ..OpenHow::default() };
    let f = v.open_path(path.as_bytes(), how, &Cred::root()).unwrap();
    assert_eq!(v.write(&f, 0, data).unwrap(), data.len());
    f.ino()
}

fn scrub(v: &Volume) -> ScrubReport {
    scrub_mounted(v, &ScrubOptions::default(), &mut |_, _, _| true)
}

/// Where a block of the group space lies on the only device.
fn place(v: &Volume, addr: BlockAddr) -> u64 {
    v.super_block().device_table()[0].data_start.get() + addr.0
}

fn flip(device: &MemDevice, block: u64) {
    let mut b = vec![0; BLOCK_BYTES];
    device.read(block, &mut b).unwrap();
    b[1234] ^= 4;
    device.write(block, &b).unwrap();
}

/// Addresses of everything that a scrub must look at, with the code that damage there is reported as.
fn targets(v: &Volume) -> Vec<(u64, u32)> {
    let (mounted, mut out) = (v.mounted(), Vec::new());
    let sb = v.super_block();
    out.extend([(0, codes::SUPER_COPY), (sb.device_table()[0].blocks.get() - 1, codes::SUPER_COPY)]);
    out.extend([0, 1].map(|c| (sb.bat.get() + c, codes::BAT_COPY)));
    out.push((sb.domain_table.get(), codes::DOMAIN_COPY));
    let g = mounted.store.geometry();
    for d in &mounted.domains {
        for group in d.space.groups() {
            out.push((place(v, g.header_addr(group)), codes::GROUP_COPY));
            out.push((place(v, g.segment_table_addr(group)), codes::SEGMENTS_COPY));
            out.push((place(v, g.owners_addr(group, 0, 0)), codes::OWNERS_COPY));
            out.push((place(v, g.node_table_addr(group, 0)), codes::NODES_COPY));
        }
        d.nodes
            .for_each_used(&mut |node, e| {
                out.push((place(v, e.addr), codes::NODE_BLOCK));
                let Ok(Some(cell)) = d.find(node.inode()) else { return Ok(()) };
                let st = cell.state.read();
                let (map, code) = match &st.body {
                    crate::cell::Body::File(f) => (&*f.map, codes::DATA_SUM),
                    crate::cell::Body::Dir(d) => (&d.map, codes::BUCKET),
                    crate::cell::Body::Special => return Ok(()),
                };
                out.extend(map.iter().map(|e| (place(v, BlockAddr(e.addr.0 + u64::from(e.len) - 1)), code)));
                Ok(())
            })
            .unwrap();
    }
    out.sort_unstable();
    out.dedup();
    out
}

#[test]
fn every_flipped_bit_of_a_mounted_volume_is_found() {
    let (device, v) = volume(128, 3);
    let me = Cred::root();
    for d in 0..3 {
        v.mkdir_path(format!("d{d}").as_bytes(), 0o755, &me).unwrap();
        for f in 0..200 {
            put(
                &v,
                &format!("d{d}/a name that is not short, number {f}"),
                &vec![f as u8; if f % 20 == 0 { 30_000 } else { 60 }],
            );
        }
    }
    // extents in overflow nodes
    let how = OpenHow { read: true, write: true, create: true, mode: 0o644, ..OpenHow::default() };
    let big = v.open_path(b"d0/big", how, &me).unwrap();
    for i in 0..600u64 {
        v.write(&big, i * 3 * 4096, &[7; 4096]).unwrap();
    }
    v.sync().unwrap();
    for d in &v.mounted().domains {
        d.checkpoint().unwrap();
    }
    let clean = scrub(&v);
    assert_eq!(clean.findings, vec![]);
    assert_eq!((clean.inodes, clean.data_bad, clean.stopped), (1 + 3 + 601, 0, false));
    assert!(clean.data_checked >= 600 + 30 * 7, "{clean:?}");

    let all = targets(&v);
    for code in [codes::NODE_BLOCK, codes::BUCKET, codes::DATA_SUM, codes::OWNERS_COPY, codes::NODES_COPY] {
        assert!(all.iter().any(|t| t.1 == code), "no block for {code}");
    }
    for (i, &(block, code)) in all.iter().enumerate() {
        // data blocks are many: some of them
        if code == codes::DATA_SUM && i % 16 != 0 {
            continue;
        }
        let mut pair = vec![0; BLOCK_BYTES];
        device.read(block, &mut pair).unwrap();
        if pair.iter().all(|b| *b == 0) {
            continue; // a copy that was never written
        }
        flip(&device, block);
        let r = scrub(&v);
        // of a pair whose other copy was never written, both are lost
        let fits = |c: u32| c == code || code < codes::NODE_BLOCK && c == code + 1;
        assert!(r.findings.iter().any(|f| fits(f.code)), "block {block}, {code}: {:?}", r.findings);
        assert_eq!(r.data_bad, u64::from(code == codes::DATA_SUM));
        if code == codes::DATA_SUM {
            assert!(r.findings[0].path.as_ref().is_some_and(|p| p.starts_with("/d")), "{:?}", r.findings);
            assert_eq!(r.findings.len(), 1);
        }
        flip(&device, block);
    }
    assert_eq!(scrub(&v).findings, vec![]);
    drop(big);
    v.unmount().unwrap();
}

/// A table block whose both copies are lost on the device and whose entries are in memory.
#[test]
fn lost_tables_are_found_while_memory_still_has_them() {
    let (device, v) = volume(64, 2);
    put(&v, "f", b"x");
    v.sync().unwrap();
    v.mounted().domains.iter().for_each(|d| d.checkpoint().unwrap());
    let g = v.mounted().store.geometry();
    let pair = g.node_table_addr(0, 0);
    let mut b = vec![0; 2 * BLOCK_BYTES];
    device.read(place(&v, pair), &mut b).unwrap();
    let (_, _, entries) = NodeTableBlock::decode(&b, v.mounted().store.volume, pair).unwrap();
    assert_eq!(entries.len(), NODES_PER_BLOCK as usize);
    device.write(place(&v, pair), &[1; 2 * BLOCK_BYTES]).unwrap();
    let r = scrub(&v);
    assert!(r.findings.iter().any(|f| f.code == codes::NODES_LOST), "{:?}", r.findings);
    device.write(place(&v, pair), &b).unwrap();
    assert_eq!(scrub(&v).findings, vec![]);
}

#[test]
fn nothing_is_found_under_load() {
    under_load(0);
}

/// Inodes leave memory all the time, and are read again: while a commit is under way that has written them, too.
#[test]
fn nothing_is_found_under_load_with_a_small_cache() {
    under_load(64 << 10);
}

/// `cache`: bytes; 0: as much as is usual.
fn under_load(cache: u64) {
    let (device, v) = volume_with(512, 4, cache);
    let me = Cred::root();
    for d in 0..4 {
        v.mkdir_path(format!("d{d}").as_bytes(), 0o755, &me).unwrap();
    }
    let (stop, ops) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|s| {
        for t in 0..4u64 {
            let (v, stop, ops, me) = (&v, &stop, &ops, &me);
            s.spawn(move || {
                let mut random = fastrand::Rng::with_seed(t);
                let mut random = |n: u64| random.u64(..n);
                while !stop.load(Relaxed) {
                    let name = format!("d{}/a rather long name for a file {t}-{}", random(4), random(200));
                    match random(12) {
                        0..=4 => {
                            let long = [10, 3000, 9000, 100_000][random(4) as usize];
                            put(v, &name, &vec![random(256) as u8; long]);
                        }
                        5 | 6 => {
                            let _ = v.unlink_path(name.as_bytes(), me);
                        }
                        7 | 8 => {
                            let to = format!("d{}/moved {t}-{}", random(4), random(60));
                            let _ = v.rename_path(name.as_bytes(), to.as_bytes(), RenameMode::Replace, me);
                        }
                        9 => {
                            let ino = put(v, &name, &[1; 5000]);
                            let _ = v.fsync(ino, false);
                        }
                        10 => {
                            // scattered blocks: extents in overflow nodes
                            let how =
                                OpenHow { read: true, write: true, create: true, mode: 0o644, ..OpenHow::default() };
                            let f = v.open_path(format!("d{t}/scattered").as_bytes(), how, me).unwrap();
                            for _ in 0..40 {
                                v.write(&f, random(2000) * 8192, &[random(256) as u8; 4096]).unwrap();
                            }
                        }
                        _ => match random(6) {
                            0 => v.sync().unwrap(),
                            1 => v.mounted().domains[random(4) as usize].checkpoint().unwrap(),
                            2 => drop(v.mounted().clean_domain(&v.mounted().domains[random(4) as usize], 1)),
                            _ => {}
                        },
                    }
                    ops.fetch_add(1, Relaxed);
                }
            });
        }
        let begun = Instant::now();
        let (mut scrubs, mut inodes, mut again) = (0, 0, 0);
        while begun.elapsed() < Duration::from_secs(8) {
            let r = scrub(&v);
            if !r.findings.is_empty() {
                stop.store(true, Relaxed);
            }
            assert_eq!(r.findings, vec![], "after {} operations", ops.load(Relaxed));
            (scrubs, inodes, again) = (scrubs + 1, inodes + r.inodes, again + r.looked_again);
        }
        stop.store(true, Relaxed);
        // else the load was none that could mislead it
        assert!(again > 0, "{scrubs} scrubs of {inodes} inodes met no change");
        assert!(scrubs > 2 && inodes > 1000 && ops.load(Relaxed) > 1000, "{scrubs} {inodes} {}", ops.load(Relaxed));
    });
    v.unmount().unwrap();
    let all: Vec<Arc<dyn Device>> = vec![device];
    let how = braidfs_check::FsckOptions { repair: false, force: true };
    assert_eq!(braidfs_check::check(&all, &how, &JournalReplay, &|_, _, _| {}).unwrap().findings, vec![]);
}

#[test]
fn it_keeps_its_rate_and_stops_when_told() {
    let (_, v) = volume(64, 2);
    put(&v, "f", &vec![5; 3_000_000]);
    v.sync().unwrap();
    let whole = scrub(&v).blocks_read;
    assert!(whole > 750, "{whole}");
    let begun = Instant::now();
    let mut steps = 0;
    let o = ScrubOptions { data: true, bytes_per_second: whole * BLOCK_BYTES as u64 * 2 };
    let mut last = 0;
    scrub_mounted(&v, &o, &mut |_, done, total| {
        assert!(done >= last && done <= total);
        (steps, last) = (steps + 1, done);
        true
    });
    assert!(begun.elapsed() > Duration::from_millis(300), "{:?}", begun.elapsed());
    assert!(steps > 2);
    let r = scrub_mounted(&v, &o, &mut |_, _, _| false);
    assert!(r.stopped && r.blocks_read < whole);
}

fn tenant(v: &Volume, name: &str) {
    let budget = TenantBudget { space: Some(4 << 20), inodes: Some(50), ..TenantBudget::default() };
    v.tenant_create(InodeNo::ROOT, name.as_bytes(), 0o755, name, budget, &Cred::root()).unwrap();
}

/// Each field of a tenant is another one in a header whose checksum holds.
#[test]
fn what_headers_say_of_tenants_is_looked_at() {
    type Change = fn(&mut DomainHeader);
    let cases: [(Change, u32); 12] = [
        (|h| h.tenant_rates[0].burst = 1.into(), codes::TENANT),
        (|h| h.tenant_soft_blocks = 1025.into(), codes::TENANT),
        (|h| h.tenant_memory_max = 7.into(), codes::TENANT),
        (|h| h.tenant_name = [0; 64], codes::TENANT),
        (|h| h.tenant_name[1] = b'/', codes::TENANT),
        (|h| h.tenant_blocks = 255.into(), codes::TENANT),
        (|h| h.tenant_inodes = u64::MAX.into(), codes::TENANT),
        (|h| h.tenant_root = 0.into(), codes::TENANT),
        (|h| h.tenant_root = InodeNo::ROOT.0.into(), codes::TENANT),
        (|h| h.tenant_root = (h.tenant_root.get() + 1).into(), codes::TENANT),
        (|h| h.tenant_generation = (h.tenant_generation.get() + 1).into(), codes::TENANT),
        (|h| h.tenant_name[..3].copy_from_slice(b"one"), codes::TENANT_NAME),
    ];
    let (device, v) = volume(64, 1);
    tenant(&v, "one");
    tenant(&v, "two");
    v.sync().unwrap();
    for d in &v.mounted().domains {
        d.checkpoint().unwrap();
    }
    assert_eq!(scrub(&v).findings, vec![]);
    let (sb, domain) = (v.super_block(), v.tenant("two").unwrap().domain);
    let place = sb.domain_table.get() + 2 * u64::from(domain.0);
    let mut pair = vec![0; 2 * BLOCK_BYTES];
    device.read(place, &mut pair).unwrap();
    let (copy, seq, is) = DomainHeader::from_pair(&pair, sb.volume_id(), place, domain.0).unwrap();
    for (i, (change, code)) in cases.into_iter().enumerate() {
        let mut h = is;
        change(&mut h);
        let other = 1 - copy;
        device.write(place + other as u64, &h.to_block(sb.volume_id(), place, other, seq + 1)).unwrap();
        let found: Vec<_> = scrub(&v).findings.into_iter().map(|f| (f.code, f.domain)).collect();
        assert_eq!(found, [(code, Some(domain.0))], "{i}");
        device.write(place, &pair).unwrap();
    }
    assert_eq!(scrub(&v).findings, vec![]);
    v.unmount().unwrap();
}

#[test]
fn tenants_come_and_go_beside_scrubs() {
    let (_, v) = volume(64, 1);
    let (done, mut scrubs) = (AtomicBool::new(false), 0);
    std::thread::scope(|s| {
        s.spawn(|| {
            for n in 0..60 {
                tenant(&v, "t");
                v.tenant_change("t", |b| b.inodes = Some(7 + n)).unwrap();
                v.tenant_remove("t").unwrap();
                v.rmdir(InodeNo::ROOT, b"t").unwrap();
            }
            done.store(true, Relaxed);
        });
        while !done.load(Relaxed) {
            assert_eq!(scrub(&v).findings, vec![]);
            scrubs += 1;
        }
    });
    println!("{scrubs} scrubs");
    v.unmount().unwrap();
}

/// A volume that notes how much is asked of it while nothing changes, and in which something changes after each such
/// moment.
struct Watched<'a> {
    v: &'a Volume,
    /// Table entries asked for in the moment that is, and in any at most.
    asked: Cell<(usize, usize)>,
    after: RefCell<Box<dyn FnMut() + 'a>>,
}

impl<'a> Watched<'a> {
    fn new(v: &'a Volume, after: impl FnMut() + 'a) -> Self {
        Self { v, asked: Cell::default(), after: RefCell::new(Box::new(after)) }
    }
}

impl LiveVolume for Watched<'_> {
    fn super_block(&self) -> SuperBlock {
        self.v.super_block()
    }
    fn store(&self) -> &Arc<Store> {
        self.v.store()
    }
    fn quiesce(&self, what: Quiesced, f: &mut dyn FnMut()) {
        self.v.quiesce(what, &mut || {
            self.asked.set((0, self.asked.get().1));
            f();
            let (now, most) = self.asked.get();
            self.asked.set((0, most.max(now)));
        });
        if let Quiesced::Nodes(_) = what {
            self.after.borrow_mut()();
        }
    }
    fn used_blocks(&self, domain: DomainId) -> u64 {
        self.v.used_blocks(domain)
    }
    fn groups(&self, domain: DomainId) -> Vec<u32> {
        self.v.groups(domain)
    }
    fn owner(&self, group: u32) -> Option<DomainId> {
        self.v.owner(group)
    }
    fn epoch(&self, domain: DomainId, group: u32) -> Option<u32> {
        self.v.epoch(domain, group)
    }
    fn journal(&self, domain: DomainId) -> (u64, u64) {
        self.v.journal(domain)
    }
    fn entry(&self, domain: DomainId, node: NodeId) -> braidfs_store::Result<Option<NodeEntry>> {
        let (now, most) = self.asked.get();
        self.asked.set((now + 1, most));
        self.v.entry(domain, node)
    }
    fn first_link(&self, node: InodeNo) -> Option<Link> {
        self.v.first_link(node)
    }
}

/// A file with hundreds of extent leaves, of which the last is damaged: a commit waits for some of them to be read,
/// not for all, and what changes the file in between is no reason to find something else, nor to go on for ever.
#[test]
fn a_large_tree_is_read_in_parts() {
    let (device, v) = volume(256, 1);
    let how = OpenHow { read: true, write: true, create: true, mode: 0o644, ..OpenHow::default() };
    let f = v.open_path(b"f", how, &Cred::root()).unwrap();
    for i in 0..30_000 {
        v.fallocate(&f, FallocMode::Allocate { keep_size: false }, 2 * i * 4096, 4096).unwrap();
    }
    v.sync().unwrap();
    let d = &v.mounted().domains[0];
    d.checkpoint().unwrap();
    let leaves: Vec<NodeId> = match &f.cell.state.read().body {
        crate::cell::Body::File(f) => f.map.nodes(),
        _ => panic!("no file"),
    };
    assert!(leaves.len() > 400, "{}", leaves.len());
    let look = |after: &mut dyn FnMut()| {
        let watched = Watched::new(&v, &mut *after);
        let r = scrub_mounted(&watched, &ScrubOptions::default(), &mut |_, _, _| true);
        let codes: Vec<u32> = r.findings.iter().filter(|x| x.node == Some(f.ino().0)).map(|x| x.code).collect();
        (codes, r.notes, watched.asked.get().1)
    };
    let none: [u32; 0] = [];
    assert_eq!(look(&mut || {}), (none.into(), vec![], 0));
    // leaves come first, index nodes behind them
    let last = d.nodes.look(leaves[leaves.len() - 5]).unwrap().unwrap();
    flip(&device, place(&v, last.addr));
    let mut touched = 0;
    let mut touch = |most: u32| {
        touched += u32::from(touched < most);
        if touched < most {
            let mtime = Some(SetTime::At(Timestamp { sec: i64::from(touched), nsec: 0 }));
            v.setattr(f.ino(), &SetAttr { mtime, ..SetAttr::default() }).unwrap();
            v.sync().unwrap();
        }
    };
    let (found, notes, asked) = look(&mut || {});
    assert_eq!((found, notes.len()), (vec![codes::NODE_BLOCK], 0));
    assert!((100..300).contains(&asked), "{asked} nodes in one moment");
    let (found, notes, _) = look(&mut || touch(8));
    assert_eq!((found, notes.len()), (vec![codes::NODE_BLOCK], 0));
    let (found, notes, asked) = look(&mut || touch(u32::MAX));
    assert_eq!((found, notes.len()), (none.into(), 1), "{notes:?}");
    assert!(notes[0].contains("changed each of the 5 times") && asked < 300, "{notes:?}, {asked}");
    flip(&device, place(&v, last.addr));
    assert_eq!(look(&mut || {}).0, none);
    drop(f);
    v.unmount().unwrap();
}
