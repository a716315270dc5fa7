//! One domain alone: what it asks of its siblings, which are a double here, and when. No volume is mounted.

use super::peers::Peers;
use super::recovered::Forward;
use super::sync::Prepared;
use super::work::Work;
use super::*;
use crate::volume::groups::Bat;
use crate::volume::mount::open_domain;
use braidfs_device::{Device, MemDevice};
use braidfs_format::inode::{Content, Extent, Inode, Link, Tombstone};
use braidfs_format::journal::Record;
use braidfs_format::node::{DIR, NodeBlockBuilder, NodeRecord, USED};
use braidfs_store::super_io::read_super;
use std::sync::Weak;

/// The other domain.
const OTHER: DomainId = DomainId(1);
/// Its transaction that shares an operation with this domain.
const THEIRS: TxId = TxId(7);

/// Says how far the other domain has committed, and notes what is asked of it.
#[derive(Debug, Default)]
struct Double {
    committed: AtomicU64,
    /// What was to be committed, each with the tail of this domain's journal at that moment.
    commits: std::sync::Mutex<Vec<(DomainId, TxId, u64)>>,
    /// The other domain has failed.
    fails: AtomicBool,
    owners: Vec<Option<DomainId>>,
    domain: OnceLock<Weak<Domain>>,
}

impl Peers for Double {
    fn committed_tx(&self, domain: DomainId) -> TxId {
        assert_eq!(domain, OTHER, "a domain knows itself");
        TxId(self.committed.load(Ordering::Relaxed))
    }

    fn commit_upto(&self, domain: DomainId, tx: TxId) -> Result<()> {
        let tail = self.domain.get().and_then(Weak::upgrade).map_or(0, |d| d.journal.tail());
        self.commits.lock().unwrap().push((domain, tx, tail));
        if self.fails.load(Ordering::Relaxed) {
            return Err(Error::DomainFailed { domain, why: "its device is gone".into() });
        }
        self.committed.fetch_max(tx.0, Ordering::Relaxed);
        Ok(())
    }

    fn owner(&self, group: u32) -> Option<DomainId> {
        self.owners.get(group as usize).copied().flatten()
    }
}

/// The first of two domains; the other one is not opened.
fn alone() -> (Arc<Domain>, Arc<Double>) {
    alone_on(Arc::new(MemDevice::new(16384)))
}

fn alone_on(device: Arc<dyn Device>) -> (Arc<Domain>, Arc<Double>) {
    let o = MkfsOptions { domains: Some(2), ..MkfsOptions::default() };
    crate::mkfs::format(std::slice::from_ref(&device), &o).unwrap();
    let (d, double, _) = open_on(device);
    (d, double)
}

/// As the device has it, and whether its journal was replayed.
fn open_on(device: Arc<dyn Device>) -> (Arc<Domain>, Arc<Double>, bool) {
    let (sb, devices) = read_super(&[device]).unwrap();
    let store = Arc::new(Store::new(devices, &sb).unwrap());
    let bat = Bat::read(&store, &sb).unwrap();
    let double = Arc::new(Double { owners: bat.owners().collect(), ..Double::default() });
    let shared = Arc::new(Shared::new(MountOptions { cache_bytes: 64 << 20, ..MountOptions::default() }, &sb));
    let peers: Arc<dyn Peers> = double.clone();
    let (d, recovered) = open_domain(&sb, &store, &shared, &peers, &bat, DomainId(0)).unwrap();
    shared.recovering.store(false, Ordering::Relaxed);
    d.write_header(|h| d.mark_in_use(h, false)).unwrap();
    double.domain.set(Arc::downgrade(&d)).unwrap();
    (d, double, recovered.dirty)
}

/// An operation makes a file, which `change` has wait for something of the other domain.
fn make(d: &Domain, change: impl FnOnce(&mut State)) -> Arc<Cell> {
    let (node, generation) = d.nodes.alloc(None).unwrap().unwrap();
    let inode = InodeRef { ino: node.inode(), generation };
    let cell =
        Arc::new(Cell::new(inode, d.id, FileKind::File, State::fresh(FileKind::File, 0o644, 0, 0, d.shared.now())));
    let e = d.enter().unwrap();
    let mut st = cell.state.write();
    st.nlink = 1;
    st.gain_link(InodeNo::ROOT, b"f", 1);
    change(&mut st);
    d.touch(e.tx(), &cell, &mut st).unwrap();
    st.durability.operation_changes_names();
    drop(st);
    e.tx().peer(OTHER, THEIRS);
    d.cells.insert_new(cell.clone());
    cell
}

/// What an fsync of the file does now.
fn prepare(d: &Domain, c: &Arc<Cell>) -> Prepared {
    let linked_at = c.state.read().durability.names_changed_at();
    d.prepare_sync(&d.enter().unwrap(), c, false, linked_at).unwrap()
}

#[test]
fn a_checkpoint_has_the_other_side_committed_before_the_tail_moves() {
    let (d, double) = alone();
    let tail = d.journal.tail();
    make(&d, |_| ());
    d.commit().unwrap();
    assert!(double.commits.lock().unwrap().is_empty(), "a commit waits for no other domain");
    d.checkpoint().unwrap();
    assert_eq!(*double.commits.lock().unwrap(), [(OTHER, THEIRS, tail)], "its tail had not moved then");
    assert!(d.journal.tail() > tail);
    d.checkpoint().unwrap();
    assert_eq!(double.commits.lock().unwrap().len(), 1, "nothing new was shared since");
}

#[test]
fn a_header_is_not_overwritten_before_the_other_one_is_durable() {
    let device = Arc::new(MemDevice::new(16384));
    let (d, _) = alone_on(device.clone());
    let begin = device.flushes();
    let change = || d.change_header(|h| h.mounts = (h.mounts.get() + 1).into()).unwrap();
    let first = change();
    assert_eq!(device.flushes(), begin, "the copy before it is durable, and stays");
    let second = change();
    assert_eq!(device.flushes(), begin + 1, "the first one is the only copy that stays");
    // that is known already, and says nothing of the second
    d.note_header_durable(first);
    let third = change();
    assert_eq!(device.flushes(), begin + 2);
    device.flush().unwrap();
    d.note_header_durable(third);
    change();
    assert_eq!(device.flushes(), begin + 3);
    assert!(first < second && second < third);
}

/// The steps of an unmount, after whose home tables something comes that it does not know of: that must not be lost.
fn close_and_meanwhile(d: &Domain, meanwhile: impl FnOnce(&Domain)) {
    let begun = d.begin_checkpoint().unwrap();
    d.write_home(&begun, &[]).unwrap();
    d.flush_devices().unwrap();
    meanwhile(d);
    let told = d.write_checkpoint_header(&begun).unwrap();
    d.end_checkpoint(&begun, &told);
    d.write_header(|h| d.mark_clean(h)).unwrap();
}

#[test]
fn a_domain_that_commits_during_its_last_checkpoint_is_not_clean() {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(16384));
    let (d, _) = alone_on(device.clone());
    let first = make(&d, |_| ()).ino;
    d.commit().unwrap();
    let mut second = InodeNo(0);
    close_and_meanwhile(&d, |d| {
        second = make(d, |_| ()).ino;
        d.commit().unwrap();
    });
    drop(d);
    let (d, _, replayed) = open_on(device.clone());
    assert!(d.nodes.get(first.node()).unwrap().used());
    assert!(d.nodes.get(second.node()).unwrap().used(), "what was committed is lost");
    assert!(replayed);
    // nothing was committed since the recovery, whose journal is kept all the same
    close_and_meanwhile(&d, |_| ());
    drop(d);
    let (d, _, replayed) = open_on(device);
    assert!(!replayed, "all is in its home");
    assert!(d.nodes.get(second.node()).unwrap().used());
}

#[test]
fn a_failed_domain_holds_up_no_other() {
    let (d, double) = alone();
    double.fails.store(true, Ordering::Relaxed);
    let tail = d.journal.tail();
    make(&d, |_| ());
    d.commit().unwrap();
    d.checkpoint().unwrap();
    assert_eq!(double.commits.lock().unwrap().len(), 1);
    assert!(d.failed().is_none() && d.journal.tail() > tail);
}

#[test]
fn an_fsync_waits_for_whoever_left_the_name() {
    let (d, double) = alone();
    let c = make(&d, |st| st.durability.inode_syncs_with(OTHER, THEIRS));
    d.commit().unwrap();
    double.committed.store(THEIRS.0 - 1, Ordering::Relaxed);
    // durable itself, and still a crash could bring back who had its name
    assert!(matches!(prepare(&d, &c), Prepared::Commit));
    double.committed.store(THEIRS.0, Ordering::Relaxed);
    assert!(matches!(prepare(&d, &c), Prepared::Clean));
}

#[test]
fn an_inode_stays_in_memory_while_it_waits_for_another_domain() {
    let (d, double) = alone();
    let ino = make(&d, |st| st.durability.inode_syncs_with(OTHER, THEIRS)).ino;
    d.commit().unwrap();
    let evict = || (0..3).for_each(|_| d.evict(Memory { cells: 1000, ..Memory::default() }));
    evict();
    assert!(d.cells.get(ino).is_some(), "only memory knows for what it waits");
    double.committed.store(THEIRS.0, Ordering::Relaxed);
    evict();
    assert!(d.cells.get(ino).is_none());
}

#[test]
fn a_tombstone_is_forgotten_when_its_newcomer_is_durable() {
    let (d, double) = alone();
    let link = Link { parent: InodeNo::ROOT, name: (&b"old"[..]).into() };
    let tombstone = Tombstone { link, newcomer: InodeNo(1 << 20), generation: 1, version: 3 };
    let c = make(&d, |st| st.durability.newcomer_takes_name(tombstone, OTHER, THEIRS));
    d.commit().unwrap();
    for (theirs, judged) in [(THEIRS.0 - 1, true), (THEIRS.0, false)] {
        double.committed.store(theirs, Ordering::Relaxed);
        let e = d.enter().unwrap();
        let mut st = c.state.write();
        // a new transaction takes the inode
        d.touch(e.tx(), &c, &mut st).unwrap();
        assert_eq!(st.durability.is_judged(), judged);
        drop((st, e));
        d.commit().unwrap();
    }
}

/// The running transaction, flipped as a commit does it.
fn flip(d: &Domain) -> Arc<Tx> {
    let mut gate = d.gate.write();
    let next = d.next_tx(&gate);
    let old = std::mem::replace(&mut *gate, next);
    *d.committing.lock() = Some(old.clone());
    old.end_of_operations();
    d.running.store(gate.id.0, Ordering::Release);
    old
}

/// Helpers leave what fills no node block to the last of them, who is whoever ends last, and not who began it.
#[test]
fn helpers_of_a_commit_pack_what_is_left_over_together() {
    const CELLS: usize = 12;
    let (d, _double) = alone();
    let cells: Vec<_> = (0..CELLS).map(|_| make(&d, |_| ())).collect();
    let work = Work::new(flip(&d));
    let held = cells[0].state.read();
    std::thread::scope(|s| {
        let first = s.spawn(|| d.help(&work));
        while work.taken() == 0 {
            std::thread::yield_now();
        }
        assert_eq!(d.help(&work), CELLS - 1, "all but the one that the other thread has");
        assert_eq!(d.help(&work), 0, "nothing is left");
        drop(held);
        assert_eq!(first.join().unwrap(), 1);
    });
    let share = work.end().unwrap();
    let of = |kind: fn(&Record) -> bool| share.records.iter().filter(|r| kind(r)).count();
    assert_eq!(of(|r| matches!(r, Record::Node { .. })), CELLS);
    assert_eq!(of(|r| matches!(r, Record::Alloc { .. })), 1, "one node block for {CELLS} small records");
}

#[test]
fn a_helper_that_panics_fails_the_commit() {
    let (d, _double) = alone();
    make(&d, |_| ());
    let work = Work::new(flip(&d));
    let panics = || {
        let _helper = work.begin();
        panic!("on purpose");
    };
    std::thread::scope(|s| s.spawn(panics).join().unwrap_err());
    assert!(work.end().is_err());
    assert_eq!(d.help(&work), 0, "nobody goes on with it");
}

/// A directory that a device or a hostile image has with more buckets than memory: 16 bytes tell of 16 million.
#[test]
fn a_directory_of_impossible_buckets_is_not_loaded() {
    let (d, _) = alone();
    let cell = make(&d, |_| ());
    d.commit().unwrap();
    let entry = d.nodes.get(cell.ino.node()).unwrap();
    let record = d.nodes.load(cell.ino.node(), &entry).unwrap();
    let file = Inode::decode(&record.payload).unwrap();
    let data = d.space.groups()[0];
    let addr = BlockAddr(d.store.geometry().group_start(data).0 + u64::from(d.store.geometry().meta_blocks()));
    let extent = Extent { lblk: 0, addr, len: (1 << 24) - 1, unwritten: false, sums: None };
    let hostile = |mode, extent| Inode { mode, content: Content::Extents(vec![extent]), ..file.clone() };

    // as a commit has it
    let of_dir = NodeRecord {
        payload: hostile(0o040_755, extent.clone()).encode(),
        flags: record.flags | DIR,
        ..record.clone()
    };
    let mut block = NodeBlockBuilder::default();
    while block.push_record(&of_dir).unwrap() != entry.index {}
    let block = block.finish(d.id.0, d.store.volume, entry.addr, entry.written.into());
    d.store.write(entry.addr, &block).unwrap();
    d.nodes.invalidate(entry.addr);
    d.cells.remove(&cell);
    drop(cell);
    let e = d.find(record.node.inode()).unwrap_err();
    assert!(matches!(e, Error::Corrupt(_)), "{e}");

    // as an fsync has it, of one that is new
    let (node, generation) = d.nodes.alloc(None).unwrap().unwrap();
    for (mode, flags) in [(0o040_755, USED | DIR), (0o100_644, USED)] {
        let record = NodeRecord { node, generation, owner: node.inode(), flags, payload: Vec::new(), ..record.clone() };
        let forward = Forward { record, inode: hostile(mode, extent.clone()), overflow: Vec::new() };
        let e = d.roll_forward(&d.enter().unwrap(), vec![forward]).unwrap_err();
        assert!(matches!(e, Error::Corrupt(_)), "{e}");
    }
}

/// A header from which transactions would be counted past their end is refused; none is given a number that was used.
#[test]
fn a_domain_of_impossible_counters_is_not_opened() {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(16384));
    let (d, _) = alone_on(device.clone());
    d.write_header(|h| h.last_tx = (u64::MAX - 2).into()).unwrap();
    let e = crate::Volume::mount(vec![device], MountOptions::default()).err().unwrap();
    assert!(matches!(&e, Error::Corrupt(why) if why.what == "domain header"), "{e}");
}
