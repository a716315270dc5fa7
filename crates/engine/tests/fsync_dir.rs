//! What an fsync of a directory waits for: the domains that its entries concern, and no others.

use braidfs::device::{CountDevice, Device, MemDevice};
use braidfs::{
    Cred, DomainId, FileKind, InodeNo, MkfsOptions, MountOptions, NewNode, Placement, RenameMode, Volume, mkfs,
};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

const DOMAINS: u16 = 32;

fn node(kind: FileKind) -> NewNode<'static> {
    NewNode { kind, mode: 0o755, umask: 0, rdev: 0, target: b"" }
}

/// A volume of 32 domains whose root directory spreads what is made in it; with directories of the root's own domain.
struct Setup {
    v: Volume,
    device: Arc<CountDevice>,
    /// Files of each domain, names in the root.
    files: Vec<Vec<String>>,
}

/// So many files of each domain.
const FILES: usize = 6;

fn setup(share_dirs: bool) -> Setup {
    let device = Arc::new(CountDevice::new(Arc::new(MemDevice::new(65536))));
    let all: Vec<Arc<dyn Device>> = vec![device.clone()];
    let o = MkfsOptions { domains: Some(DOMAINS), placement: Placement::Spread, ..MkfsOptions::default() };
    mkfs::format(&all, &o).unwrap();
    let o = MountOptions {
        background: false,
        serial: true,
        share_dirs,
        commit_interval: Duration::from_secs(3600),
        ..MountOptions::default()
    };
    let v = Volume::mount(all, o).unwrap();
    let mut files = vec![Vec::new(); usize::from(DOMAINS)];
    for i in 0.. {
        let name = format!("a file of some domain, {i}");
        let a = v.create(InodeNo::ROOT, name.as_bytes(), &node(FileKind::File), &Cred::root()).unwrap();
        files[usize::from(v.domain_of(a.ino).unwrap().0)].push(name);
        if files.iter().all(|f| f.len() >= FILES) {
            break;
        }
    }
    Setup { v, device, files }
}

impl Setup {
    /// A directory in the root, of another domain than all in `not`.
    fn dir(&self, name: &str, not: &[u16]) -> (InodeNo, u16) {
        for i in 0.. {
            let name = format!("{name}{i}");
            let a = self.v.create(InodeNo::ROOT, name.as_bytes(), &node(FileKind::Dir), &Cred::root()).unwrap();
            let d = self.v.domain_of(a.ino).unwrap().0;
            if !not.contains(&d) {
                return (a.ino, d);
            }
        }
        unreachable!()
    }

    /// Something changes in every domain, in one transaction with something of domain `with`: a file of each is linked in a
    /// directory there.
    fn everywhere(&self, busy: InodeNo, round: usize) {
        for of_domain in &self.files {
            let ino = self.v.lookup(InodeNo::ROOT, of_domain[FILES - 1].as_bytes()).unwrap().ino;
            self.v.link(ino, busy, format!("another name, {round}, {}", of_domain[FILES - 1]).as_bytes()).unwrap();
        }
    }

    /// The domains that commit meanwhile, and the flushes.
    fn committing(&self, f: impl FnOnce()) -> (BTreeSet<u16>, u64) {
        let commits = || -> Vec<u64> { self.v.domains().iter().map(|d| d.commits).collect() };
        let (before, device) = (commits(), self.device.counters());
        f();
        let did = commits().into_iter().zip(before).zip(0u16..);
        (did.filter(|((a, b), _)| a > b).map(|(_, d)| d).collect(), (self.device.counters() - device).flushes)
    }
}

/// One that changes in a directory, which domains its fsync waits for, and that another one then has nothing to do.
fn waits_for(s: &Setup, round: usize, busy: InodeNo, dir: InodeNo, change: impl FnOnce(), domains: &[u16]) {
    s.v.sync().unwrap();
    s.everywhere(busy, round);
    change();
    let expected: BTreeSet<u16> = domains.iter().copied().collect();
    let (did, flushes) = s.committing(|| s.v.fsync(dir, false).unwrap());
    assert_eq!(did, expected, "round {round}");
    // before and after each commit record
    assert!(flushes <= 2 * expected.len() as u64, "round {round}: {flushes} flushes");
    assert_eq!(s.committing(|| s.v.fsync(dir, false).unwrap()), (BTreeSet::new(), 0), "round {round}, again");
}

fn the_domains_that_its_entries_concern(share_dirs: bool) {
    let s = setup(share_dirs);
    let (v, root) = (&s.v, InodeNo::ROOT);
    let (dir, own) = s.dir("d", &[]);
    // of the same domain: whoever changes in both is in one transaction
    v.setxattr(dir, b"braidfs.placement", b"inherit", braidfs::XattrMode::Set).unwrap();
    let busy = v.create(dir, b"busy", &node(FileKind::Dir), &Cred::root()).unwrap().ino;
    assert_eq!(v.domain_of(busy).unwrap(), DomainId(own));
    let others: Vec<u16> = (0..DOMAINS).filter(|d| *d != own).collect();
    let (a, b, c) = (others[0], others[1], others[2]);
    let root_domain = v.domain_of(root).unwrap().0;
    let (other, other_domain) = s.dir("e", &[own, a, b, c, root_domain]);
    let file = |d: u16, n: usize| s.files[usize::from(d)][n].as_bytes();
    if share_dirs {
        // so large that it does not lie in its inode record
        for i in 0..200 {
            v.create(
                dir,
                format!("a long name that fills a bucket, {i}").as_bytes(),
                &node(FileKind::File),
                &Cred::root(),
            )
            .unwrap();
        }
    }
    let check = |round, change: &dyn Fn(), domains: &[u16]| waits_for(&s, round, busy, dir, change, domains);

    check(0, &|| v.rename(root, file(a, 0), dir, b"came", RenameMode::Replace).unwrap(), &[own, a]);
    check(1, &|| _ = v.link(v.lookup(root, file(b, 0)).unwrap().ino, dir, b"linked").unwrap(), &[own, b]);
    check(2, &|| v.unlink(dir, b"linked").unwrap(), &[own, b]);
    // the victim and the newcomer
    check(3, &|| v.rename(root, file(c, 0), dir, b"came", RenameMode::Replace).unwrap(), &[own, a, c]);
    check(4, &|| v.rename(dir, b"came", other, b"went", RenameMode::Replace).unwrap(), &[own, c]);
    check(5, &|| v.rename(root, file(a, 1), dir, b"x", RenameMode::Replace).unwrap(), &[own, a]);
    check(6, &|| v.rename(dir, b"x", root, file(b, 1), RenameMode::Exchange).unwrap(), &[own, a, b]);
    // nothing of it changed, whatever did elsewhere
    check(7, &|| v.rename(root, file(a, 2), other, b"elsewhere", RenameMode::Replace).unwrap(), &[]);
    // what a commit of one of the domains made durable is not waited for again
    check(
        8,
        &|| {
            v.rename(root, file(a, 3), dir, b"y", RenameMode::Replace).unwrap();
            v.rename(root, file(b, 3), dir, b"z", RenameMode::Replace).unwrap();
            v.fsync(v.lookup(dir, b"y").unwrap().ino, false).unwrap();
            v.fsync(other, false).unwrap();
        },
        &[own, a, b],
    );
    assert!(v.domain_of(other).unwrap() == DomainId(other_domain));
    assert!(!share_dirs || v.changed_beside() > 0);
}

#[test]
fn a_synced_directory_waits_for_the_domains_that_its_entries_concern() {
    the_domains_that_its_entries_concern(false);
}

#[test]
fn also_one_that_several_threads_change() {
    the_domains_that_its_entries_concern(true);
}
