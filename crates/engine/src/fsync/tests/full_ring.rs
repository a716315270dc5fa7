//! Recovery of a domain with judged inodes, which commits twice, where the journal has little room for that.

use super::{content, make, mounted, short_journals};
use crate::{DomainId, FileKind, InodeNo, RenameMode, Volume};
use braidfs_device::{Device, Effect, FaultDevice, Image, MemDevice, Op, Rule};
use std::ops::Range;
use std::sync::Arc;

/// A volume of two domains with journals of 32 blocks, after a crash: an inode of each has exchanged names with one of the
/// other, and files of the first were synced by themselves.
struct Crashed {
    device: Arc<MemDevice>,
    /// The journal of the domain of `files`, and its header.
    journal: Range<u64>,
    header: Range<u64>,
    exchanged: [(InodeNo, String); 2],
    files: Vec<InodeNo>,
    domain: DomainId,
}

impl Crashed {
    /// With `n` files that are synced, as far as the journal has room beside `left` blocks.
    fn new(n: usize, left: u64) -> Self {
        let device = short_journals(2);
        let v = mounted(device.clone()).unwrap();
        let one = |name: &str, not: &[DomainId]| make(&v, InodeNo::ROOT, name, FileKind::File, not);
        let x = one("x", &[]);
        let domain = v.domain_of(x.0).unwrap();
        let y = one("y", &[domain]);
        let of_y = v.domain_of(y.0).unwrap();
        let mut files: Vec<InodeNo> = (0..n).map(|i| one(&format!("f{i}-"), &[of_y]).0).collect();
        v.sync().unwrap();
        let i = v.mounted().clone();
        let d = i.dom(domain).clone();
        d.checkpoint().unwrap();
        v.rename(InodeNo::ROOT, x.1.as_bytes(), InodeNo::ROOT, y.1.as_bytes(), RenameMode::Exchange).unwrap();
        v.sync().unwrap();
        let room = || d.journal.blocks() - d.journal.used();
        let synced = |(n, f): (usize, &InodeNo)| {
            v.write(&v.open(*f).unwrap(), 0, &content(n)).unwrap();
            let c = i.cell(*f).unwrap();
            room() > left && d.sync_beyond_limit(&d.enter_unthrottled().unwrap(), &c)
        };
        let synced = files.iter().enumerate().take_while(|f| synced(*f)).count();
        files.truncate(synced);
        let (_, first) = i.store.place(d.journal.addr(0), d.journal.blocks()).unwrap();
        let journal = first..first + d.journal.blocks();
        let pair = i.sb.read().domain_table.get() + 2 * u64::from(domain.0);
        drop((d, i));
        v.crash();
        Self { device, journal, header: pair..pair + 2, exchanged: [(x.0, y.1), (y.0, x.1)], files, domain }
    }

    fn image(&self) -> Image {
        self.device.snapshot()
    }

    /// The volume has the names and content that it had before the crash, of the first file this content.
    fn check(&self, v: &Volume, first: &[u8]) {
        for (ino, name) in &self.exchanged {
            assert_eq!(v.lookup(InodeNo::ROOT, name.as_bytes()).unwrap().ino, *ino, "{name}");
        }
        for (n, ino) in self.files.iter().enumerate() {
            let mut b = vec![0; 1000];
            let len = v.read(&v.open(*ino).unwrap(), 0, &mut b).unwrap();
            let wanted = if n == 0 { first.to_vec() } else { content(n) };
            assert_eq!(b[..len], wanted, "file {n}");
        }
    }
}

fn without_faults(image: Image) {
    let how = braidfs_check::FsckOptions { repair: false, force: true };
    let device = Arc::new(MemDevice::from_image(image)) as Arc<dyn Device>;
    let found = braidfs_check::check(&[device], &how, &crate::JournalReplay, &|_, _, _| {}).unwrap();
    assert_eq!(found.findings, vec![]);
}

/// The first transaction of recovery fits behind what earlier recoveries were cut off in, the second one does not: it must not
/// set the journal back over the first one. That would be replayed after the next crash, over newer tables.
#[test]
fn a_second_commit_of_recovery_does_not_go_back_over_the_first() {
    let c = Crashed::new(1, 0);
    let mut failed = 0;
    for n in 0..40 {
        let copy = Arc::new(MemDevice::from_image(c.image()));
        let v = mounted(copy.clone()).unwrap();
        c.check(&v, &content(0));
        let newer = [n + 100; 300];
        v.write(&v.open(c.files[0]).unwrap(), 0, &newer).unwrap();
        v.sync().unwrap();
        v.mounted().dom(c.domain).checkpoint().unwrap();
        v.crash();
        without_faults(copy.snapshot());
        let v = mounted(copy.clone()).unwrap();
        c.check(&v, &newer);
        v.unmount().unwrap();
        without_faults(copy.snapshot());
        // one more recovery that is cut off: its chunks are one write, its commit record is the next
        let faulty = Arc::new(FaultDevice::new(c.device.clone(), 1));
        faulty.add(Rule::new(Op::Write, Effect::Fail(5)).blocks(c.journal.clone()).skip(1));
        failed += u32::from(mounted(faulty.clone()).is_err() && faulty.fired() > 0);
    }
    assert!(failed >= 20, "{failed} recoveries were cut off");
}

/// The first transaction of recovery does not fit the journal, the second one would: it would follow one that is missing.
#[test]
fn a_second_commit_of_recovery_does_not_follow_one_that_is_not_in_the_journal() {
    for left in 1..12 {
        let c = Crashed::new(30, left);
        // recovery stops where it would tell of the tables that it has written
        let faulty = Arc::new(FaultDevice::new(c.device.clone(), 1));
        faulty.add(Rule::new(Op::Write, Effect::Fail(5)).blocks(c.header.clone()).skip(2));
        let mounting = mounted(faulty.clone());
        assert!(faulty.fired() > 0, "{left} left: {mounting:?}");
        drop(mounting);
        let v = mounted(c.device.clone()).unwrap();
        c.check(&v, &content(0));
        v.unmount().unwrap();
        without_faults(c.image());
    }
}
