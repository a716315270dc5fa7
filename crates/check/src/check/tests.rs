//! Volumes are filled through the model and its writer, so that these tests need nothing above the tables.

mod beside_failed;
mod counts;
mod cut_off;
mod lost;
mod lost_header;
mod preen;
mod scratch;
mod shared;
mod tombstones;
mod trees;
mod uncompared;

use super::*;
use crate::collect::Records;
use crate::dump;
use crate::parts::ino::{Dirty, Ino};
use crate::rules::dir::BUCKETS_TOLD;
use braidfs::{JournalReplay, MkfsOptions};
use braidfs_device::{BLOCK_BYTES, SparseDevice};
use braidfs_format::BlockAddr;
use braidfs_format::NodeId;
use braidfs_format::dentry::Dentry;
use braidfs_format::domain::{DomainHeader, TenantRate};
use braidfs_format::inode::{Content, Extent, Inode, LeafRef, Link};
use braidfs_format::name::FileName;
use braidfs_format::node::{DIR, NodeBlockBuilder, NodeEntry, NodeKind, NodeRecord, REMOTE, USED};
use std::cell::OnceCell;

const FORCE: FsckOptions = FsckOptions { repair: false, force: true };
const REPAIR: FsckOptions = FsckOptions { repair: true, force: true };

fn run(dev: &Arc<SparseDevice>, options: &FsckOptions) -> FsckReport {
    if options.force && !options.repair {
        agree(dev);
    }
    check(&[Arc::clone(dev) as Arc<dyn Device>], options, &JournalReplay, &|_, _, _| {}).unwrap()
}

/// What the quick check lets pass, the model must let pass as well, and count the same; whether it did.
fn agree(dev: &Arc<SparseDevice>) -> bool {
    let devices = [Arc::clone(dev) as Arc<dyn Device>];
    let Ok(m) = volume::read(&devices) else { return false };
    let mut passed = false;
    let whole = OnceCell::new();
    let whole = || whole.get_or_init(|| count(&mut scan(&devices, &mut Prepared::default(), &|_, _, _| {}).unwrap()));
    for memory in [2000, 1 << 30] {
        let how = quick::Options { data: false, memory };
        let Some(mut quick) = holds(&devices, &how, &|_, _, _| {}).unwrap() else { continue };
        // what owners use only the quick check counts, which every sound volume passes
        quick.report.usage = crate::usage::Usage::default();
        assert_eq!(&quick.report, whole(), "{memory} bytes for inodes");
        passed = true;
    }
    // Nor may it shy at what holds.
    let clean = |d: &Domain| d.header.is_some_and(|h| h.flags.get() & CLEAN != 0);
    if !passed && m.log.findings.is_empty() && m.domains.iter().all(clean) {
        assert_ne!(whole().findings, vec![], "the quick check doubts a volume that holds");
    }
    passed
}

fn model(dev: &Arc<SparseDevice>) -> Model {
    scan(&[Arc::clone(dev) as Arc<dyn Device>], &mut Prepared::default(), &|_, _, _| {}).unwrap()
}

fn fresh(mib: u64, domains: u16) -> Arc<SparseDevice> {
    formatted(mib, domains, None)
}

fn formatted(mib: u64, domains: u16, group_bytes: Option<u64>) -> Arc<SparseDevice> {
    let dev = SparseDevice::new(mib * 256);
    let o = MkfsOptions { domains: Some(domains), group_bytes, uuid: Some([5; 16]), ..Default::default() };
    braidfs::mkfs::format(&[Arc::clone(&dev) as Arc<dyn Device>], &o).unwrap();
    dev
}

fn add(m: &mut Model, domain: u16, mode: u32, links: &[(InodeNo, &str)], content: Content) -> InodeNo {
    let store = Arc::clone(&m.store);
    let (node, generation) = names::take_node(&store, &mut m.domains[usize::from(domain)]).unwrap();
    let node = node.inode();
    let dir = mode & 0o170_000 == 0o040_000;
    let remote = links.iter().any(|l| m.domain_of(l.0) != Some(domain));
    let size = match &content {
        Content::Inline(b) => b.len() as u64,
        _ => 0,
    };
    let mut inode = Inode::decode(&m.body(InodeNo::ROOT).unwrap().inode.encode()).unwrap();
    (inode.mode, inode.size, inode.nlink) = (mode, size, if dir { 2 } else { links.len() as u32 });
    (inode.content, inode.links) = (content, vec![]);
    for (parent, name) in links {
        let name: FileName = name.as_bytes().into();
        inode.links.push(Link { parent: *parent, name: name.clone() });
        let p = m.body(*parent).unwrap();
        p.entries.push(Dentry { hash: 0, node, generation, kind: (mode >> 12) as u8, name });
        p.dirty.entries = true;
        p.inode.nlink += u32::from(dir);
    }
    let flags = USED | if dir { DIR } else { 0 } | if remote { REMOTE } else { 0 };
    let (linked, dirty) = (vec![true; links.len()], Dirty { record: true, ..Dirty::default() });
    let ino = Ino { linked, dirty, ..Ino::new(generation, 0, flags, inode) };
    m.inodes.put(node, ino);
    node
}

fn add_extents(m: &mut Model, node: InodeNo, count: u64) {
    let domain = m.domain_of(node).unwrap();
    let group = *m.domains[usize::from(domain)].groups.keys().next().unwrap();
    let start = m.store.geometry().group_start(group).0 + 1024;
    let ino = m.body(node).unwrap();
    ino.inode.content = Content::Extents(vec![]);
    ino.inode.size = count * 2 * BLOCK_BYTES as u64;
    ino.extents = (0..count)
        .map(|i| Extent { lblk: 2 * i, addr: BlockAddr(start + 2 * i), len: 1, unwritten: false, sums: None })
        .collect();
    ino.inode.blocks = count;
    ino.dirty.extents = true;
}

/// A volume with everything: remote inodes, bucketed directory, overflow links, xattrs and extent trees.
fn populated() -> Arc<SparseDevice> {
    // one group has room for the extents of the largest file
    let dev = formatted(128, 3, Some(16 << 20));
    let mut m = model(&dev);
    assert_eq!(m.log.findings, vec![]);
    let root = InodeNo::ROOT;
    let a = add(&mut m, 1, 0o040_755, &[(root, "a")], Content::InlineDir(vec![]));
    let b = add(&mut m, 2, 0o040_755, &[(a, "b")], Content::InlineDir(vec![]));
    let c = add(&mut m, 2, 0o040_755, &[(b, "c")], Content::InlineDir(vec![]));
    for i in 0..400 {
        add(&mut m, (i % 3) as u16, 0o100_644, &[(b, &format!("file-{i}"))], Content::Inline(vec![i as u8; 50]));
    }
    let names: Vec<String> = (0..300).map(|i| format!("a rather long name of a hard link, number {i}")).collect();
    let links: Vec<(InodeNo, &str)> = names.iter().map(|n| (c, n.as_str())).collect();
    add(&mut m, 1, 0o100_600, &links, Content::None);
    add(&mut m, 0, 0o120_777, &[(root, "link")], Content::Inline(b"a/b".to_vec()));
    add(&mut m, 0, 0o010_600, &[(root, "pipe")], Content::None);
    let x = add(&mut m, 2, 0o100_600, &[(a, "attributes")], Content::None);
    m.body(x).unwrap().inode.xattrs = vec![(b"user.big".as_slice().into(), vec![7; 9000].into())];
    let big = add(&mut m, 1, 0o100_600, &[(a, "big")], Content::None);
    add_extents(&mut m, big, 1000);
    let small = add(&mut m, 0, 0o100_600, &[(a, "small")], Content::None);
    add_extents(&mut m, small, 3);
    repair::write(&mut m).unwrap();
    dev
}

#[test]
fn fresh_volumes_are_clean() {
    for (mib, domains) in [(16, 1), (32, 2), (64, 3), (1024, 4), (16 << 20, 8)] {
        let dev = fresh(mib, domains);
        assert!(run(&dev, &FsckOptions::default()).clean_skip);
        let r = run(&dev, &FORCE);
        assert_eq!(r.findings, vec![], "{mib} MiB");
        assert_eq!((r.dirs, r.files, r.clean_skip, r.blocks_used), (1, 0, false, 1));
        let before = dev.written();
        assert_eq!(run(&dev, &REPAIR).findings, vec![]);
        assert_eq!(before, dev.written());
    }
}

#[test]
fn a_filled_volume_is_clean() {
    let dev = populated();
    let mut r = run(&dev, &FORCE);
    assert_eq!(r.findings, vec![]);
    assert_eq!((r.files, r.dirs, r.symlinks, r.other), (404, 4, 1, 1));
    assert!(std::mem::take(&mut r.usage).owners().is_some());
    assert!(agree(&dev));
    let mut m = model(&dev);
    assert_eq!(m.inodes.wholes().count(), 0, "an inode without findings is kept whole");
    for node in m.inodes.select(|_, _| true) {
        m.body(node).unwrap();
    }
    m.inodes.holds().unwrap();
    assert_eq!(count(&mut m), r, "whole inodes are others than packed ones");
    let any = |which: fn(&Ino) -> bool| m.inodes.wholes().any(|(_, i)| which(i));
    assert!(any(|i| !i.tree.is_empty()) && any(|i| i.inode.link_nodes.len() > 1));
    assert!(any(|i| i.inode.xattr_nodes.len() == 3 && i.inode.xattrs[0].1.len() == 9000));
    assert!(any(|i| i.entries.len() == 300) && any(|i| i.linked.len() == 300 && i.linked.iter().all(|l| *l)));
}

/// Damages one block; the check must see it or not need it, a repair must leave a clean volume.
fn damage(base: &Arc<SparseDevice>, there: &[String], block: u64, how: &dyn Fn(&mut [u8])) -> FsckReport {
    let dev = base.fork();
    let mut buf = vec![0; BLOCK_BYTES];
    dev.read(block, &mut buf).unwrap();
    how(&mut buf);
    dev.write(block, &buf).unwrap();
    let seen = run(&dev, &FORCE);
    assert!(seen.findings.iter().all(|f| !f.fixed));
    preen::mends_or_leaves(&dev, there);
    let fixed = run(&dev, &REPAIR);
    assert_eq!(fixed.unfixed(), 0, "block {block}: {:#?}", fixed.findings);
    let after = run(&dev, &FORCE);
    assert_eq!(after.findings, vec![], "block {block}, after a repair");
    seen
}

#[test]
fn every_kind_of_metadata_block_is_mended() {
    let dev = populated();
    let there = preen::stored(&dev);
    let (mut flips, mut seen) = (0, 0);
    for (i, block) in dev.written().into_iter().enumerate() {
        // All of the volume's tables, every third of the others.
        if block < 60 || i % 3 == 0 {
            damage(&dev, &there, block, &|b| b.fill(0));
            flips += 1;
            let r = damage(&dev, &there, block, &|b| b[100] ^= 0x40);
            seen += usize::from(!r.findings.is_empty() || !r.notes.is_empty());
        }
    }
    // All but a few node blocks that were rewritten elsewhere are in use.
    assert!(seen + 3 > flips && flips > 60, "{seen} of {flips} were seen");
}

/// Bytes that a checksum does not give away: everything that is decoded must be looked at.
#[test]
fn forged_blocks_do_not_panic() {
    let base = populated();
    let blocks = base.written();
    let mut random = fastrand::Rng::with_seed(1);
    let mut random = |n: usize| random.usize(..n);
    let mut mended = 0;
    for round in 0..150 {
        let dev = base.fork();
        for _ in 0..=random(4) {
            let block = blocks[random(blocks.len())];
            let mut b = vec![0; BLOCK_BYTES];
            dev.read(block, &mut b).unwrap();
            let reach = [100, 400, BLOCK_BYTES - 32][random(3)];
            for _ in 0..=random(6) {
                b[32 + random(reach)] = [0, 1, 0xff, random(256) as u8][random(4)];
            }
            let crc = braidfs_format::block::checksum(&b);
            b[4..8].copy_from_slice(&crc.to_le_bytes());
            dev.write(block, &b).unwrap();
        }
        let devices = [Arc::clone(&dev) as Arc<dyn Device>];
        for what in [dump::DumpWhat::Bat, dump::DumpWhat::Journal(1), dump::DumpWhat::Path(b"/a/b/c".to_vec())] {
            let _ = dump::dump(&devices, &what);
        }
        // A forged superblock, or a domain that is not clean, is not for this test.
        let Ok(m) = volume::read(&devices) else { continue };
        if m.domains
            .iter()
            .any(|d| d.header.is_some_and(|h| h.flags.get() & CLEAN == 0 || h.flags.get() & NEEDS_GC != 0))
        {
            continue;
        }
        let r = run(&dev, &REPAIR);
        assert_eq!(r.unfixed(), 0, "round {round}: {:#?}", r.findings);
        assert_eq!(run(&dev, &FORCE).findings, vec![], "round {round}");
        mended += usize::from(!r.findings.is_empty());
    }
    assert!(mended > 50, "{mended}");
}

#[test]
fn several_devices() {
    let dev: Vec<Arc<dyn Device>> =
        [40, 64, 33].iter().map(|mib| SparseDevice::new(mib * 256) as Arc<dyn Device>).collect();
    let o = MkfsOptions { domains: Some(4), data_checksums: true, ..Default::default() };
    let sb = braidfs::mkfs::format(&dev, &o).unwrap();
    let mixed = [Arc::clone(&dev[1]), Arc::clone(&dev[2]), Arc::clone(&dev[0])];
    assert_eq!(check(&mixed, &FORCE, &JournalReplay, &|_, _, _| {}).unwrap().findings, vec![]);
    for (d, e) in dev.iter().zip(sb.device_table()) {
        for at in [0, e.blocks.get() - 1] {
            d.write(at, &[0; BLOCK_BYTES]).unwrap();
            let r = check(&mixed, &FsckOptions { repair: true, force: false }, &JournalReplay, &|_, _, _| {}).unwrap();
            assert_eq!(r.findings.iter().map(|f| (f.code, f.fixed)).collect::<Vec<_>>(), [(codes::SUPER_COPY, true)]);
        }
    }
    assert!(check(&mixed[..2], &FORCE, &JournalReplay, &|_, _, _| {}).is_err());
}

/// Both copies of a pair lost.
#[test]
fn lost_pairs_are_made_again() {
    let base = populated();
    let there = preen::stored(&base);
    let m = model(&base);
    let (g, start) = (m.store.geometry(), m.sb.device[0].data_start.get());
    let mut pairs = vec![m.sb.bat.get()];
    pairs.extend((0..3).map(|d| m.sb.domain_table.get() + 2 * d));
    for group in m.domains.iter().flat_map(|d| d.groups.keys()) {
        let at = start + g.group_start(*group).0;
        pairs.extend((0..u64::from(g.meta_blocks() / 2)).map(|i| at + 2 * i));
    }
    for pair in pairs {
        let dev = base.fork();
        dev.write(pair, &[0x55; 2 * BLOCK_BYTES]).unwrap();
        preen::mends_or_leaves(&dev, &there);
        let r = run(&dev, &REPAIR);
        assert!(!r.findings.is_empty(), "pair {pair}");
        assert_eq!(r.unfixed(), 0, "pair {pair}: {:#?}", r.findings);
        let after = run(&dev, &FORCE);
        assert_eq!(after.findings, vec![], "pair {pair}");
        assert_eq!((after.files, after.dirs), (404, 4), "pair {pair}");
    }
}

/// Changes the model of a sound volume, writes it, and checks that the check finds `code` and mends it.
fn broken(code: u32, change: impl FnOnce(&mut Model)) -> FsckReport {
    let dev = populated();
    let mut m = model(&dev);
    change(&mut m);
    repair::write(&mut m).unwrap();
    let r = run(&dev, &REPAIR);
    assert!(r.findings.iter().any(|f| f.code == code), "{code}: {:#?}", r.findings);
    assert_eq!(r.unfixed(), 0, "{code}: {:#?}", r.findings);
    let after = run(&dev, &FORCE);
    assert_eq!(after.findings, vec![], "{code}");
    after
}

/// Binds domain `d` to tenant `name`, whose root is the directory `path`, and lets `change` damage that.
fn bind(m: &mut Model, d: usize, path: &str, name: &str, change: impl FnOnce(&mut DomainHeader)) {
    let root = find(m, path);
    let generation = m.body(root).unwrap().generation;
    let h = m.domains[d].header.as_mut().unwrap();
    (h.tenant_root, h.tenant_generation, h.tenant_blocks) = (root.0.into(), generation.into(), 300.into());
    crate::rules::tenant::rename(h, name);
    change(h);
}

/// Each field of a tenant is damaged by itself; what is left of the tenant is as told.
#[test]
fn tenants_fields_are_looked_at() {
    type Damage = fn(&mut DomainHeader);
    let cases: [(Damage, Option<(&str, u64)>); 23] = [
        (|h| h.tenant_name = [0; 64], Some(("tenant-1", 300))),
        (|h| h.tenant_name[1] = b'/', Some(("tenant-1", 300))),
        (|h| h.tenant_name[0] = 0xff, Some(("tenant-1", 300))),
        (|h| h.tenant_name[63] = b'x', Some(("tenant-1", 300))),
        (|h| h.tenant_blocks = 255.into(), Some(("one", 256))),
        (|h| h.tenant_inodes = ((1 << 56) + 1).into(), Some(("one", 300))),
        (|h| h.tenant_rates[1].per_second = ((1 << 50) + 1).into(), Some(("one", 300))),
        (|h| h.tenant_rates[3].burst = u64::MAX.into(), Some(("one", 300))),
        (|h| h.tenant_rates[2].burst = 1.into(), Some(("one", 300))),
        (|h| h.tenant_soft_blocks = 255.into(), Some(("one", 300))),
        (|h| h.tenant_soft_blocks = 301.into(), Some(("one", 300))),
        (|h| h.tenant_grace = 7.into(), Some(("one", 300))),
        (|h| h.tenant_soft_since = 7.into(), Some(("one", 300))),
        (|h| h.tenant_memory_max = ((4 << 20) - 1).into(), Some(("one", 300))),
        (|h| (h.tenant_memory_min, h.tenant_memory_max) = ((9 << 20).into(), (8 << 20).into()), Some(("one", 300))),
        (|h| h.tenant_serving.per_second = ((1 << 50) + 1).into(), Some(("one", 300))),
        (|h| h.tenant_serving.burst = 1.into(), Some(("one", 300))),
        (|h| h.tenant_devices = 2.into(), Some(("one", 300))),
        (|h| h.tenant_devices = (1 << 15).into(), Some(("one", 300))),
        (|h| h.tenant_devices = (1 | 1 << 16).into(), Some(("one", 300))),
        (|h| h.tenant_root = 0.into(), None),
        (|h| h.tenant_root = InodeNo::ROOT.0.into(), None),
        (|h| h.tenant_generation = (h.tenant_generation.get() + 1).into(), None),
    ];
    let base = populated();
    let mut m = model(&base);
    bind(&mut m, 1, "a", "one", |_| ());
    bind(&mut m, 2, "a/b", "two", |h| {
        (h.tenant_blocks, h.tenant_inodes) = (0.into(), 1.into());
        (h.tenant_soft_blocks, h.tenant_soft_since, h.tenant_grace) = (256.into(), 1.into(), 0.into());
        h.tenant_rates[0].per_second = (1 << 50).into();
        h.tenant_rates[0].burst = (1 << 50).into();
        (h.tenant_memory_min, h.tenant_memory_max) = ((8 << 20).into(), (8 << 20).into());
        (h.tenant_serving.per_second, h.tenant_serving.burst) = (1.into(), (1 << 50).into());
        // one that has left, too
        h.tenant_devices = 5.into();
    });
    repair::write(&mut m).unwrap();
    assert_eq!(run(&base, &FORCE).findings, vec![]);
    assert!(agree(&base));
    for (i, (change, left)) in cases.into_iter().enumerate() {
        let dev = base.fork();
        let mut m = model(&dev);
        change(m.domains[1].header.as_mut().unwrap());
        repair::write(&mut m).unwrap();
        let found: Vec<_> = run(&dev, &FORCE).findings.iter().map(|f| (f.code, f.domain)).collect();
        assert_eq!(found, [(codes::TENANT, Some(1))], "{i}");
        assert_eq!(run(&dev, &REPAIR).unfixed(), 0, "{i}");
        let after = run(&dev, &FORCE);
        assert_eq!((after.findings, after.dirs), (vec![], 4), "{i}");
        let h = model(&dev).domains[1].header.unwrap();
        assert_eq!(
            (h.tenant_inodes.get(), h.tenant_rates, h.tenant_soft_blocks.get(), h.tenant_memory_max.get()),
            (0, [TenantRate::default(); 4], 0, 0),
            "{i}"
        );
        assert_eq!((h.tenant_serving, h.tenant_devices.get()), (TenantRate::default(), 0), "{i}");
        let is = (h.tenant_root.get() > 0).then(|| (h.tenant_name_str(), h.tenant_blocks.get()));
        assert_eq!(is, left.map(|(n, b)| (n.to_owned(), b)), "{i}");
    }
    let mut m = model(&base);
    crate::rules::tenant::rename(m.domains[2].header.as_mut().unwrap(), "one");
    repair::write(&mut m).unwrap();
    let r = run(&base, &REPAIR);
    assert_eq!(r.findings.iter().map(|f| (f.code, f.fixed)).collect::<Vec<_>>(), [(codes::TENANT_NAME, true)]);
    let names: Vec<_> = model(&base).domains.iter().map(|d| d.header.unwrap().tenant_name_str()).collect();
    assert_eq!(names, ["", "one", "tenant-2"]);
}

fn find(m: &mut Model, path: &str) -> InodeNo {
    path.split('/').filter(|p| !p.is_empty()).fold(InodeNo::ROOT, |at, name| {
        m.body(at).unwrap().entries.iter().find(|e| *e.name == *name.as_bytes()).unwrap().node
    })
}

#[test]
fn entries_and_links_are_mended() {
    let edit = |path: &'static str, f: fn(&mut Ino)| {
        move |m: &mut Model| {
            let n = find(m, path);
            f(m.body(n).unwrap());
        }
    };
    let r = broken(
        codes::LINK_NO_ENTRY,
        edit("a/b", |d| {
            d.entries.truncate(10);
            d.dirty.entries = true;
        }),
    );
    assert_eq!(r.files, 404);
    broken(
        codes::ENTRY_GENERATION,
        edit("a", |d| {
            d.entries[0].generation += 1;
            d.dirty.entries = true;
        }),
    );
    broken(
        codes::ENTRY_KIND,
        edit("a", |d| {
            d.entries[0].kind = 1;
            d.dirty.entries = true;
        }),
    );
    broken(
        codes::LINK_COUNT,
        edit("a/big", |f| {
            f.inode.nlink = 9;
            f.dirty.record = true;
        }),
    );
    broken(
        codes::BLOCK_COUNT,
        edit("a/big", |f| {
            f.inode.blocks = 9;
            f.dirty.record = true;
        }),
    );
    let r = broken(
        codes::ENTRY_STALE,
        edit("a/big", |f| {
            f.inode.links.clear();
            f.dirty.links = true;
        }),
    );
    assert_eq!(r.files, 404);
    let r = broken(
        codes::ORPHAN,
        edit("a/big", |f| {
            f.inode.links.clear();
            f.inode.nlink = 0;
            f.dirty.links = true;
        }),
    );
    assert_eq!(r.files, 403);
    let r = broken(
        codes::LINK_PARENT,
        edit("a/big", |f| {
            f.inode.links[0].parent = InodeNo(77_777);
            f.dirty.links = true;
        }),
    );
    assert_eq!((r.files, r.dirs), (404, 5));
    broken(
        codes::REMOTE_FLAG,
        edit("a/big", |f| {
            f.flags ^= REMOTE;
            f.dirty.record = true;
        }),
    );
    broken(codes::ENTRY_DEAD, |m| {
        let (dir, file) = (find(m, "a"), find(m, "a/big"));
        m.remove(file);
        m.body(dir).unwrap().dirty.entries = true;
    });
    broken(codes::INLINE_ENTRIES, edit("a", |d| d.inode.content = Content::InlineDir(vec![1, 2, 3])).also_dirty("a"));
}

trait AlsoDirty: FnOnce(&mut Model) + Sized {
    fn also_dirty(self, path: &'static str) -> impl FnOnce(&mut Model) {
        move |m: &mut Model| {
            let n = find(m, path);
            self(m);
            m.body(n).unwrap().dirty.record = true;
        }
    }
}
impl<F: FnOnce(&mut Model)> AlsoDirty for F {}

#[test]
fn loops_and_lost_roots_are_mended() {
    // "b" below its own child "c"
    let r = broken(codes::UNREACHABLE, |m| {
        let (a, b, c) = (find(m, "a"), find(m, "a/b"), find(m, "a/b/c"));
        let entries = &mut m.body(a).unwrap().entries;
        let at = entries.iter().position(|e| e.node == b).unwrap();
        let mut e = entries.remove(at);
        (m.body(a).unwrap().inode.nlink, m.body(a).unwrap().dirty.entries) = (2, true);
        e.hash = 0;
        let child = m.body(c).unwrap();
        child.entries.push(e);
        (child.inode.nlink, child.dirty.entries) = (3, true);
        let lost = m.body(b).unwrap();
        lost.inode.links[0].parent = c;
        lost.dirty.links = true;
    });
    assert_eq!((r.files, r.dirs), (404, 5));
    let r = broken(codes::ROOT, |m| {
        let store = Arc::clone(&m.store);
        m.body(InodeNo::ROOT).unwrap();
        m.inodes.forget(InodeNo::ROOT);
        m.domains[0].free_node(&store, InodeNo::ROOT.node());
    });
    assert_eq!((r.files, r.dirs), (404, 4));
}

#[test]
fn shared_and_misplaced_blocks_are_mended() {
    broken(codes::BLOCK_SHARED, |m| {
        let (big, small) = (find(m, "a/b/file-1"), find(m, "a/big"));
        let addr = m.body(small).unwrap().extents[3].addr;
        let ino = m.body(big).unwrap();
        ino.extents = vec![Extent { lblk: 0, addr, len: 4, unwritten: false, sums: None }];
        (ino.inode.blocks, ino.inode.content) = (4, Content::Extents(vec![]));
        ino.dirty.extents = true;
    });
    for addr in [0, 5, 1 << 40, 4096 * 2 + 10] {
        broken(codes::EXTENT_PLACE, |m| {
            let n = find(m, "a/small");
            let ino = m.body(n).unwrap();
            ino.extents[1].addr = BlockAddr(addr);
            ino.dirty.extents = true;
        });
    }
}

/// What the engine would refuse, or allocate.
#[test]
fn extents_and_links_that_cannot_be_read_are_mended() {
    broken(codes::CONTENT, |m| {
        let n = find(m, "link");
        let ino = m.body(n).unwrap();
        (ino.inode.content, ino.inode.size) = (Content::None, 1 << 62);
        ino.dirty.record = true;
    });
    let leaves = |m: &mut Model, change: &dyn Fn(&mut Vec<LeafRef>)| {
        let n = find(m, "a/big");
        let ino = m.body(n).unwrap();
        let Content::Tree { refs, .. } = &mut ino.inode.content else { panic!("no tree") };
        change(refs);
        ino.dirty.record = true;
    };
    broken(codes::EXTENT_ORDER, |m| {
        let n = find(m, "a/big");
        let leaf = m.body(n).unwrap().tree[1];
        let entry = m.domains[1].entry(&m.store, leaf).unwrap();
        let mut block = NodeBlockBuilder::default();
        let (kind, flags) = (NodeKind::ExtentLeaf, entry.flags);
        let empty =
            NodeRecord { node: leaf, generation: entry.generation, kind, flags, owner: n, version: 1, payload: vec![] };
        assert_eq!(block.push(&empty.encode()), Some(entry.index), "it is alone in its block");
        let block = block.finish(1, m.store.volume, entry.addr, entry.written.into());
        m.store.write(entry.addr, &block).unwrap();
    });
    broken(codes::EXTENT_ORDER, |m| {
        let n = find(m, "a/big");
        m.body(n).unwrap().extents.remove(0);
        m.body(n).unwrap().dirty.extents = true;
        repair::write(m).unwrap();
        leaves(m, &|refs| refs[0].first = 1);
    });
}

/// A few extents, each of which can be, name the same blocks again and again as buckets of a directory; and some lie nowhere.
#[test]
fn a_directory_of_more_buckets_than_blocks_is_mended() {
    let dev = formatted(64, 1, Some(16 << 20));
    let mut m = model(&dev);
    let n = add(&mut m, 0, 0o040_755, &[(InodeNo::ROOT, "d")], Content::InlineDir(vec![]));
    let geometry = m.store.geometry();
    let group = *m.domains[0].groups.keys().next_back().unwrap();
    // behind the journal
    let len = geometry.group_blocks() / 4;
    let addr = BlockAddr(geometry.group_start(group).0 + 3 * u64::from(len));
    let extent = |lblk, addr, len| Extent { lblk, addr, len, unwritten: false, sums: None };
    let ino = m.body(n).unwrap();
    ino.inode.content = Content::Extents(vec![]);
    ino.extents = (0..20).map(|k| extent(k * u64::from(len), addr, len)).collect();
    // behind the volume, as the writer keeps what it writes off their blocks
    ino.extents.extend((1..4).map(|k| extent(k << 30, BlockAddr(1 << 40), (1 << 24) - 1)));
    ino.dirty.extents = true;
    repair::write(&mut m).unwrap();
    // a block that is named again is a hole there before anybody reads it as a bucket
    let named = u64::from(len);
    let r = run(&dev, &FORCE);
    let of = |code| r.findings.iter().filter(|f| f.code == code).count() as u64;
    assert_eq!((of(codes::EXTENT_PLACE), of(codes::BUCKET)), (3, BUCKETS_TOLD + 1), "of {named}");
    assert!(r.findings.iter().any(|f| f.message.starts_with(&format!("{} more", named - BUCKETS_TOLD))));
    run(&dev, &REPAIR);
    assert_eq!(run(&dev, &FORCE).findings, vec![]);
}

/// What the memory of the second pass hangs on.
#[test]
fn only_what_is_damaged_is_kept_whole() {
    let dev = populated();
    let mut m = model(&dev);
    let (big, dir) = (find(&mut m, "a/big"), find(&mut m, "a/b"));
    let file = m.body(big).unwrap();
    (file.inode.nlink, file.dirty.record) = (9, true);
    let names = m.body(dir).unwrap();
    (names.entries[0].kind, names.dirty.entries) = (2, true);
    repair::write(&mut m).unwrap();
    let m = model(&dev);
    let mut expected = vec![big, dir];
    expected.sort_unstable();
    assert_eq!(m.inodes.wholes().map(|(n, _)| n).collect::<Vec<_>>(), expected, "{:#?}", m.log.findings);
}

#[test]
fn dumps_do_not_fail() {
    let dev = populated();
    let mut m = model(&dev);
    let devices = [Arc::clone(&dev) as Arc<dyn Device>];
    let group = *m.domains[1].groups.keys().next().unwrap();
    let node = find(&mut m, "a/big");
    let block = m.store.geometry().group_start(group).0 + 200;
    use crate::dump::DumpWhat as W;
    for what in [
        W::Super,
        W::Bat,
        W::Domain(1),
        W::Group(group),
        W::Segments(group),
        W::Nodes(group),
        W::Node(node.0),
        W::Block(block),
        W::Journal(0),
        W::Path(b"/a/b".to_vec()),
        W::Path(b"a/big".to_vec()),
        W::Path(b"/".to_vec()),
    ] {
        let text = dump::dump(&devices, &what).unwrap_or_else(|e| panic!("{what:?}: {e}"));
        assert!(text.len() > 30, "{what:?}: {text}");
    }
    assert!(dump::dump(&devices, &W::Domain(99)).is_err());
    assert!(dump::dump(&devices, &W::Group(1 << 20)).is_err());
    assert!(dump::dump(&devices, &W::Path(b"/a/none".to_vec())).is_err());
}

/// Changes what the table entry of `node` says of its block.
fn set_written(m: &mut Model, node: NodeId, change: impl FnOnce(u32) -> u32) {
    let (store, domain) = (Arc::clone(&m.store), usize::from(m.domain_of(node).unwrap()));
    let entry = m.domains[domain].entry(&store, node).unwrap();
    assert!(entry.used() && entry.written != 0, "{node}: {entry:?}");
    m.domains[domain].set_entry(&store, node, NodeEntry { written: change(entry.written), ..entry });
}

/// A node block that is older than the node table says, or newer: of an inode, and of an overflow node. What is left stands in,
/// and is the inode's.
#[test]
fn a_node_block_of_another_transaction_is_told() {
    type Change = fn(u32) -> u32;
    let later: (Change, u32) = (|w| w + 1, codes::NODE_BLOCK_OLD);
    let earlier: (Change, u32) = (|w| w.wrapping_sub(2), codes::ENTRY_OLD);
    for (change, code) in [later, earlier] {
        for (path, overflow) in [("a/b/file-7", false), ("a/big", true), ("a/b", false), ("a/attributes", true)] {
            let dev = populated();
            let mut m = model(&dev);
            let about = find(&mut m, path);
            let node = if overflow { m.body(about).unwrap().overflow().next().unwrap() } else { about.node() };
            set_written(&mut m, node, change);
            repair::write(&mut m).unwrap();
            let seen = run(&dev, &FORCE);
            let told: Vec<(u32, Option<u64>)> = seen.findings.iter().map(|f| (f.code, f.node)).collect();
            assert_eq!(told, [(code, Some(about.0))], "{path}: {:#?}", seen.findings);
            assert_eq!(run(&dev, &REPAIR).unfixed(), 0, "{path}");
            let after = run(&dev, &FORCE);
            assert_eq!(after.findings, vec![], "{path}");
            assert_eq!((after.files, after.dirs), (404, 4), "{path}");
        }
    }
}

/// What a program that did not tell of transactions wrote is taken as it is.
#[test]
fn entries_that_do_not_tell_are_believed() {
    let dev = populated();
    let mut m = model(&dev);
    let node = find(&mut m, "a/b/file-7").node();
    set_written(&mut m, node, |_| 0);
    repair::write(&mut m).unwrap();
    assert_eq!(run(&dev, &FORCE).findings, vec![]);
}

/// A node block in use has a record of a node that its table entry does not name, with a higher version: of a transaction that
/// was never committed. That it is looked for since another block is lost does not make it the newest.
#[test]
fn what_was_never_committed_is_not_found_again() {
    let dev = populated();
    let mut m = model(&dev);
    let [first, second, third] = ["a/b/file-3", "a/b/file-6", "link"].map(|p| find(&mut m, p).node());
    let store = Arc::clone(&m.store);
    let d = &m.domains[0];
    let mut records = Records::new(&store, d);
    let (_, mut newer) = records.get(first).unwrap();
    let (entry, kept) = records.get(second).unwrap();
    let old = records.get(first).unwrap().0;
    newer.version += 5;
    newer.payload = Inode { mode: 0o100_777, ..Inode::decode(&newer.payload).unwrap() }.encode();
    let group = d.groups.values().next_back().unwrap();
    let start = store.geometry().group_start(group.number).0;
    let free = |at: &u32| !group.segments.as_ref().unwrap()[(at / 512) as usize].is_valid(at % 512);
    let addr = BlockAddr(start + u64::from((0..group.blocks).rev().find(free).unwrap()));
    let mut block = NodeBlockBuilder::default();
    block.push(&newer.encode()).unwrap();
    let index = block.push(&kept.encode()).unwrap();
    let written = entry.written + 7;
    store.write(addr, &block.finish(0, store.volume, addr, written.into())).unwrap();
    m.domains[0].set_entry(&store, second, NodeEntry { addr, index, written, ..entry });
    repair::write(&mut m).unwrap();
    assert_eq!(run(&dev, &FORCE).findings, vec![]);

    // damage elsewhere makes the check look into all node blocks
    let mut m = model(&dev);
    set_written(&mut m, third, |w| w + 1);
    repair::write(&mut m).unwrap();
    let seen = run(&dev, &REPAIR);
    let told: Vec<(u32, Option<u64>)> = seen.findings.iter().map(|f| (f.code, f.node)).collect();
    assert_eq!(told, [(codes::NODE_BLOCK_OLD, Some(third.0))], "{:#?}", seen.findings);
    let mut m = model(&dev);
    assert_eq!(m.domains[0].entry(&store, first), Some(old));
    assert_eq!(m.body(first.inode()).unwrap().inode.mode, 0o100_644);
}

/// What two rounds find is told once, however much it is: each is asked for in a set.
#[test]
fn findings_of_two_rounds_come_together() {
    let many = 0..200_000u64;
    let of = |code: u32, nodes: std::ops::Range<u64>| {
        let mut log = Log::of(0);
        nodes.for_each(|n| log.add(code, Some(NodeId(n)), ""));
        FsckReport { findings: log.findings, ..FsckReport::default() }
    };
    let (first, mut left) = (of(codes::CHANGES_LOST, many.clone()), of(codes::CHANGES_LOST, 7..many.end + 9));
    let again = left.findings[0].clone();
    left.findings.extend([again.clone(), Finding { node: None, ..again }]);
    let all = with_what_is_left(first, left);
    assert_eq!(all.findings.len(), many.end as usize + 9 + 1);
    assert!(all.findings[..7].iter().all(|f| f.fixed) && !all.findings[7..].iter().any(|f| f.fixed));
}
