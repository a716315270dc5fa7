//! What is done at a boot: only what loses nothing, or nothing.

use super::*;
use braidfs::{Cred, MountOptions, OpenHow, Volume};
use std::time::Duration;

pub fn preened(dev: &Arc<SparseDevice>) -> FsckReport {
    preen(&[Arc::clone(dev) as Arc<dyn Device>], true, &Limits::default(), &JournalReplay, &|_, _, _| {}).unwrap()
}

/// All blocks that are not zero.
fn bytes(dev: &Arc<SparseDevice>) -> Vec<(u64, Vec<u8>)> {
    let block = |at| {
        let mut b = vec![0; BLOCK_BYTES];
        dev.read(at, &mut b).unwrap();
        (at, b)
    };
    dev.written().into_iter().map(block).filter(|(_, b)| b.iter().any(|&x| x != 0)).collect()
}

/// What users stored: of each inode what it is, its names, attributes, place of its data; of a directory also its entries.
pub fn stored(dev: &Arc<SparseDevice>) -> Vec<String> {
    let mut m = model(dev);
    let nodes = m.inodes.select(|_, _| true);
    let one = |node: InodeNo, m: &mut Model| {
        let i = m.body(node).unwrap();
        let mut links: Vec<_> = i.inode.links.iter().map(|l| (l.parent, l.name.clone())).collect();
        let mut entries: Vec<_> = i.entries.iter().map(|e| (e.name.clone(), e.node)).collect();
        let data: Vec<_> =
            if i.is_dir() { vec![] } else { i.extents.iter().map(|e| (e.lblk, e.addr, e.len)).collect() };
        let inline = match &i.inode.content {
            Content::Inline(b) => b.clone(),
            _ => vec![],
        };
        links.sort_unstable();
        entries.sort_unstable();
        let is = (i.generation, i.inode.mode, i.inode.size * u64::from(!i.is_dir()), &i.inode.xattrs);
        format!("{node}: {is:?} {links:?} {entries:?} {data:?} {inline:?}")
    };
    nodes.into_iter().map(|n| one(n, &mut m)).collect()
}

/// Either each finding is safe, all is repaired and nothing that was `there` is missing; or nothing is written. Which it was.
#[track_caller]
pub fn mends_or_leaves(damaged: &Arc<SparseDevice>, there: &[String]) -> bool {
    let seen = run(damaged, &FORCE).findings;
    let (dev, before) = (damaged.fork(), bytes(damaged));
    let r = preened(&dev);
    let safe = r.findings.iter().all(Finding::is_safe);
    if r.by_hand {
        assert_eq!(r.findings, seen);
        assert!(bytes(&dev) == before, "something was written: {:#?}", r.findings);
        return false;
    }
    assert!(safe && r.unfixed() == 0, "{:#?}", r.findings);
    assert_eq!(run(&dev, &FORCE).findings, vec![]);
    let left = stored(&dev);
    for (i, was) in there.iter().enumerate() {
        assert_eq!(left.get(i), Some(was), "{:#?}", r.findings);
    }
    true
}

#[test]
fn only_what_loses_nothing_is_repaired() {
    type Damage = fn(&mut Model);
    fn of(m: &mut Model, path: &str, change: impl FnOnce(&mut Ino)) {
        let n = find(m, path);
        change(m.body(n).unwrap());
    }
    let cases: [(u32, bool, Damage); 8] = [
        (codes::LINK_COUNT, true, |m| of(m, "a/big", |f| (f.inode.nlink, f.dirty.record) = (9, true))),
        (codes::BLOCK_COUNT, true, |m| of(m, "a/big", |f| (f.inode.blocks, f.dirty.record) = (9, true))),
        (codes::REMOTE_FLAG, true, |m| of(m, "a/big", |f| (f.flags, f.dirty.record) = (f.flags ^ REMOTE, true))),
        (codes::LINK_NO_ENTRY, true, |m| of(m, "a/b", |d| (d.entries.truncate(10), d.dirty.entries = true).1)),
        (codes::ENTRY_GENERATION, false, |m| of(m, "a", |d| (d.entries[0].generation, d.dirty.entries) = (77, true))),
        (codes::LINK_PARENT, false, |m| {
            of(m, "a/big", |f| (f.inode.links[0].parent, f.dirty.links) = (InodeNo(77_777), true))
        }),
        (codes::EXTENT_PLACE, false, |m| {
            of(m, "a/small", |f| (f.extents[1].addr, f.dirty.extents) = (BlockAddr(1 << 40), true))
        }),
        // one of each class: neither is repaired
        (codes::LINK_COUNT, false, |m| {
            of(m, "a/big", |f| (f.inode.nlink, f.dirty.record) = (9, true));
            of(m, "a/small", |f| (f.extents[1].addr, f.dirty.extents) = (BlockAddr(1 << 40), true));
        }),
    ];
    let base = populated();
    let there = stored(&base);
    for (code, mended, change) in cases {
        let dev = base.fork();
        let mut m = model(&dev);
        change(&mut m);
        repair::write(&mut m).unwrap();
        let seen = run(&dev, &FORCE).findings;
        assert!(seen.iter().any(|f| f.code == code), "{code}: {seen:#?}");
        assert_eq!(mends_or_leaves(&dev, &there), mended, "{code}");
        // who is asked may have it repaired
        assert_eq!(run(&dev, &REPAIR).unfixed(), 0, "{code}");
    }
}

/// A volume that stopped with so many files in its journal.
pub fn crashed(files: usize) -> Arc<SparseDevice> {
    let dev = fresh(64, 1);
    let options = MountOptions { background: false, commit_interval: Duration::from_secs(3600), ..Default::default() };
    let v = Volume::mount(vec![Arc::clone(&dev) as Arc<dyn Device>], options).unwrap();
    let how = OpenHow { read: true, write: true, create: true, mode: 0o644, ..OpenHow::default() };
    for i in 0..files {
        let f = v.open_path(format!("f{i}").as_bytes(), how, &Cred::root()).unwrap();
        v.write(&f, 0, b"content").unwrap();
        v.sync().unwrap();
    }
    let crashed = dev.fork();
    v.crash();
    crashed
}

/// Journals are replayed on the device where all holds or what does not is safe, and not with one that cannot be replayed.
#[test]
fn journals_are_replayed_or_left() {
    let crashed = crashed(9);
    let whole = crashed.fork();
    let r = preened(&whole);
    assert_eq!((r.findings.as_slice(), r.by_hand, r.files), (&[][..], false, 9));
    let m = volume::read(&[Arc::clone(&whole) as Arc<dyn Device>]).unwrap();
    assert!(!is_dirty(&m), "the journal was not replayed");
    let skipped = preen(&[Arc::clone(&whole) as _], false, &Limits::default(), &JournalReplay, &|_, _, _| {}).unwrap();
    assert!(skipped.clean_skip);

    let copy = crashed.fork();
    copy.write(0, &[0; BLOCK_BYTES]).unwrap();
    let r = preened(&copy);
    assert_eq!(r.findings.iter().map(|f| (f.code, f.fixed)).collect::<Vec<_>>(), [(codes::SUPER_COPY, true)]);
    assert_eq!((run(&copy, &FORCE).findings.as_slice(), r.files), (&[][..], 9));

    // the first transaction that would be replayed is damaged, and others behind it are whole
    let m = volume::read(&[Arc::clone(&crashed) as Arc<dyn Device>]).unwrap();
    let h = m.domains[0].header.unwrap();
    let at = m.sb.device[0].data_start.get() + h.journal_start.get() + h.tail_pos.get() % h.journal_blocks.get() as u64;
    let mut block = vec![0; BLOCK_BYTES];
    crashed.read(at, &mut block).unwrap();
    assert!(block.iter().any(|&x| x != 0));
    crashed.write(at, &[0xa5; BLOCK_BYTES]).unwrap();
    let before = bytes(&crashed);
    let r = preened(&crashed);
    assert!(r.by_hand && r.findings.iter().any(|f| f.code == codes::REPLAY_FAILED), "{:#?}", r.findings);
    assert!(bytes(&crashed) == before, "something was written");
    assert_eq!(run(&crashed, &REPAIR).unfixed(), 0);
}

/// Only the device cannot be written: what is in the journals is not given up, and a later check replays it.
#[test]
fn journals_are_kept_where_the_device_cannot_be_written() {
    use braidfs_device::{Effect, FaultDevice, Op, Rule};
    for (op, skip) in [(Op::Write, 0), (Op::Write, 3), (Op::Write, 9), (Op::Flush, 1), (Op::Flush, 2)] {
        for repair in [false, true] {
            let base = crashed(4);
            let faulty = Arc::new(FaultDevice::new(base.clone(), 1));
            // all three ways to replay begin with such an error; what would give the journals up then meets none
            faulty.add(Rule::new(op, Effect::Fail(28)).skip(skip).times(3));
            let devices = [faulty as Arc<dyn Device>];
            let refused = match repair {
                true => check(&devices, &REPAIR, &JournalReplay, &|_, _, _| {}).map(drop),
                false => preen(&devices, true, &Limits::default(), &JournalReplay, &|_, _, _| {}).map(drop),
            };
            assert!(matches!(refused, Err(crate::Error::Io(_))), "{op:?} {skip}: {refused:?}");
            let r = preened(&base);
            assert_eq!((r.files, r.findings), (4, vec![]), "{op:?} {skip}");
        }
    }
}
