use crate::cell::Body;
use crate::cell::frames::pool::Home;
use crate::numa::recorder::Recorder;
use crate::numa::topology::tests::{Line, machine, sysfs};
use crate::numa::{Allowed, Numa, Topology};
use crate::{Cred, FileKind, InodeNo, MkfsOptions, MountOptions, NewNode, Volume};
use braidfs_device::{Device, MemDevice, WriteOp};
use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const TWO: [Line<'_>; 2] = [(1, "0-1", 64, "10 20"), (4, "6", 64, "20 10")];

fn options(topology: Topology, binder: Arc<Recorder>) -> MountOptions {
    let numa = Numa::Given { topology, binder };
    MountOptions { numa, background: false, cache_bytes: 64 * MIB, ..MountOptions::default() }
}

fn made(device: Arc<dyn Device>, domains: u16, options: MountOptions) -> Volume {
    let o = MkfsOptions { domains: Some(domains), group_bytes: Some(4 << 20), ..MkfsOptions::default() };
    crate::mkfs::format(std::slice::from_ref(&device), &o).unwrap();
    Volume::mount(vec![device], options).unwrap()
}

fn volume(domains: u16, options: MountOptions) -> Volume {
    made(Arc::new(MemDevice::new(64 << 10)), domains, options)
}

/// A file in each domain, by domain.
fn files(v: &Volume) -> Vec<InodeNo> {
    let n = v.mounted().domains.len();
    let mut files = vec![InodeNo(0); n];
    let node = |kind| NewNode { kind, mode: 0o755, umask: 0, rdev: 0, target: b"" };
    for i in 0..100 {
        let dir = v.create(InodeNo::ROOT, format!("d{i}").as_bytes(), &node(FileKind::Dir), &Cred::root()).unwrap().ino;
        let file = v.create(dir, b"f", &node(FileKind::File), &Cred::root()).unwrap().ino;
        files[usize::from(v.mounted().domain(file).unwrap().id.0)] = file;
        if files.iter().all(|f| f.0 > 0) {
            return files;
        }
    }
    panic!("domains without a directory: {files:?}");
}

/// Where the pages of a file that are in memory come from.
fn homes(v: &Volume, file: InodeNo) -> Vec<Home> {
    let cell = v.mounted().cell(file).unwrap();
    let mut st = cell.state.write();
    let Body::File(f) = &mut st.body else { panic!("no file") };
    (0..32 * MIB / 4096).filter_map(|l| f.pages.get(l).map(|p| p.home())).collect()
}

fn numbers(v: &Volume) -> Vec<Option<u32>> {
    v.domains().iter().map(|d| d.numa_node).collect()
}

/// Frames that somebody has of the nodes' pools.
fn in_use(v: &Volume) -> Vec<usize> {
    let nodes = v.mounted().shared.numa.as_ref().unwrap();
    (0..nodes.topology.nodes().len()).map(|i| nodes.homes.of(i).in_use()).collect()
}

#[test]
fn pages_of_a_domain_are_of_its_node() {
    let v = volume(4, options(machine(&TWO), Arc::default()));
    assert_eq!(numbers(&v), [Some(1), Some(4), Some(1), Some(4)], "dealt out");
    for (file, node) in files(&v).into_iter().zip(numbers(&v)) {
        let open = v.open(file).unwrap();
        // inline first; then whole pages and parts of some
        v.write(&open, 0, b"a little").unwrap();
        v.write(&open, 5000, &[1; 100_000]).unwrap();
        let before = homes(&v, file);
        assert_eq!((before.len(), before.iter().all(|h| h.node() == node)), (26, true), "{before:?}");
        v.sync().unwrap();
        let d = v.mounted().domain(file).unwrap();
        for _ in 0..2 {
            d.evict(crate::cell::cache::Memory { pages: 1000, ..Default::default() });
        }
        assert_eq!(homes(&v, file), []);
        // read again
        let mut buf = vec![0; 105_000];
        assert_eq!(v.read(&open, 0, &mut buf).unwrap(), 105_000);
        assert!(buf[..8] == *b"a little" && buf[5000..].iter().all(|b| *b == 1));
        let after = homes(&v, file);
        assert!(after.len() == 26 && after.iter().all(|h| h.node() == node), "{after:?}");
    }
    // 26 pages of two files each: no more frames than pages
    assert_eq!(in_use(&v), [52, 52]);
    assert_eq!(v.cache_use().data, 104 * 4096);
    v.unmount().unwrap();
}

/// Of a volume whose domains are all at the small node: the other one gives, and there is not more memory in use than with one
/// node.
#[test]
fn the_budget_is_kept_where_a_node_has_no_more() {
    const BUDGET: u64 = 16 * MIB;
    let uneven: [Line<'_>; 2] = [(0, "0", 7000, "10 20"), (1, "1", 1000, "20 10")];
    let o = |t| MountOptions { cache_bytes: BUDGET, ..options(t, Arc::default()) };
    let fill = |v: &Volume| {
        let file = files(v)[1];
        let open = v.open(file).unwrap();
        let mut most = 0;
        for n in 0..24 {
            v.write(&open, n * MIB, &vec![n as u8; MIB as usize]).unwrap();
            v.sync().unwrap();
            v.mounted().balance_memory();
            most = most.max(v.cache_use().data);
        }
        (file, most)
    };
    let one = volume(2, o(machine(&[uneven[0]])));
    let (_, most) = fill(&one);
    one.unmount().unwrap();
    let v = volume(2, o(machine(&uneven)));
    let (file, placed) = fill(&v);
    assert_eq!(placed, most, "the same pages are in memory");
    assert!((4 * MIB..=BUDGET).contains(&placed), "{placed}");
    let used = in_use(&v);
    assert_eq!(used.iter().sum::<usize>() as u64 * 4096, v.cache_use().data, "a frame for each page");
    // its share of two chunks, and the rest
    let nodes: Vec<u32> = homes(&v, file).iter().filter_map(|h| h.node()).collect();
    assert!(nodes.contains(&0) && nodes.contains(&1), "{used:?}");
    assert!(used[1] <= 2 * 511, "{used:?}");
    v.unmount().unwrap();
}

#[test]
fn one_node_is_told_nothing() {
    let single = machine(&[TWO[0], (9, "", 64, "20 10")]);
    let recorder = Arc::new(Recorder::default());
    let background = MountOptions { background: true, ..options(single, recorder.clone()) };
    let off = MountOptions { numa: Numa::Off, ..options(Topology::default(), recorder.clone()) };
    for o in [background, off] {
        let v = volume(4, o);
        for file in files(&v) {
            v.write(&v.open(file).unwrap(), 0, &[1; 100_000]).unwrap();
            assert!(homes(&v, file).iter().all(|h| *h == Home::ANYWHERE));
        }
        v.sync().unwrap();
        assert!(v.mounted().shared.numa.is_none());
        assert_eq!(numbers(&v), [None; 4]);
        v.unmount().unwrap();
    }
    assert!(recorder.memory.lock().is_empty() && recorder.threads.lock().is_empty());
}

#[test]
fn threads_of_a_domain_run_on_its_node_and_others_where_they_did() {
    let recorder = Arc::new(Recorder::default());
    let o = MountOptions { background: true, recovery_threads: 4, ..options(machine(&TWO), recorder.clone()) };
    let v = volume(4, o);
    let files = files(&v);
    let cpus_of = |name: &str| -> BTreeSet<Vec<u32>> {
        let all = recorder.threads.lock();
        all.iter().filter(|(n, _)| n.starts_with(name)).map(|(_, cpus)| cpus.clone()).collect()
    };
    let both = BTreeSet::from([vec![0, 1], vec![6]]);
    let until = |name: &str| {
        let end = Instant::now() + Duration::from_secs(60);
        while cpus_of(name) != both {
            assert!(Instant::now() < end, "{name}: {:?}", cpus_of(name));
            for file in &files {
                v.write(&v.open(*file).unwrap(), 0, &[1; 100_000]).unwrap();
            }
            v.sync().unwrap();
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    until("braidfs-bg-");
    until("braidfs-commit-");
    v.unmount().unwrap();
    let all = recorder.threads.lock();
    assert!(all.iter().all(|(_, cpus)| both.contains(cpus)), "{all:?}");
    // who syncs does a part by itself
    let own = std::thread::current().name().unwrap().to_owned();
    assert!(all.iter().all(|(n, _)| *n != own), "{all:?}");
}

#[test]
fn a_thread_that_is_there_already_is_not_told_again() {
    let recorder = Arc::new(Recorder::default());
    let v = volume(4, options(machine(&TWO), recorder.clone()));
    // by the mount
    recorder.threads.lock().clear();
    let near = |own: bool| {
        let d: Vec<_> = v.mounted().domains.iter().cloned().collect();
        let run = move || {
            if own {
                braidfs_sync::workers::become_own();
            }
            [0, 2, 0, 1, 3, 2].into_iter().for_each(|i: usize| d[i].run_near());
        };
        std::thread::spawn(run).join().unwrap();
        recorder.threads.lock().drain(..).map(|(_, cpus)| cpus).collect::<Vec<_>>()
    };
    assert_eq!(near(true), [vec![0, 1], vec![6], vec![0, 1]]);
    assert!(near(false).is_empty());
    v.unmount().unwrap();
}

/// A kernel, or a container, that allows nothing of it.
#[test]
fn a_refusal_changes_nothing() {
    let recorder = Arc::new(Recorder { refuses: Some(libc::ENOSYS), ..Recorder::default() });
    let v =
        volume(2, MountOptions { background: true, recovery_threads: 2, ..options(machine(&TWO), recorder.clone()) });
    for file in files(&v) {
        let open = v.open(file).unwrap();
        v.write(&open, 0, &[5; 100_000]).unwrap();
        v.sync().unwrap();
        let mut buf = vec![0; 100_000];
        assert_eq!((v.read(&open, 0, &mut buf).unwrap(), buf), (100_000, vec![5; 100_000]));
    }
    let d = v.mounted().domains[1].clone();
    let run = move || {
        braidfs_sync::workers::become_own();
        d.run_near();
    };
    std::thread::spawn(run).join().unwrap();
    v.unmount().unwrap();
    assert!(!recorder.memory.lock().is_empty() && !recorder.threads.lock().is_empty());
}

/// A device in memory that lies on a block device of this number.
#[derive(Debug)]
struct At(MemDevice, u32);

impl Device for At {
    fn blocks(&self) -> u64 {
        self.0.blocks()
    }
    fn read(&self, block: u64, buf: &mut [u8]) -> io::Result<()> {
        self.0.read(block, buf)
    }
    fn write_batch(&self, ops: &[WriteOp<'_>]) -> io::Result<()> {
        self.0.write_batch(ops)
    }
    fn flush(&self) -> io::Result<()> {
        self.0.flush()
    }
    fn discard(&self, block: u64, blocks: u64) -> io::Result<()> {
        self.0.discard(block, blocks)
    }
    fn block_device(&self) -> Option<(u32, u32)> {
        Some((259, self.1))
    }
    fn name(&self) -> String {
        "memory".into()
    }
}

/// Two disks, at the nodes 4 and 1, and one that the kernel tells nothing of.
#[test]
fn domains_are_at_the_node_of_their_device_where_devices_differ() {
    let machine = sysfs(&TWO);
    std::fs::create_dir_all(machine.path().join("dev/block")).unwrap();
    for (disk, node) in [(0, "4"), (1, "1"), (2, "-1")] {
        let at = machine.path().join(format!("devices/disk{disk}"));
        std::fs::create_dir_all(&at).unwrap();
        std::fs::write(at.join("numa_node"), node).unwrap();
        std::os::unix::fs::symlink(at, machine.path().join(format!("dev/block/259:{disk}"))).unwrap();
    }
    let topology = Topology::read(machine.path(), &Allowed::default());
    let placed = |disks: &[u32]| {
        let devices: Vec<Arc<dyn Device>> =
            disks.iter().map(|d| Arc::new(At(MemDevice::new(32 << 10), *d)) as Arc<dyn Device>).collect();
        let o = MkfsOptions { domains: Some(4), group_bytes: Some(4 << 20), ..MkfsOptions::default() };
        crate::mkfs::format(&devices, &o).unwrap();
        let v = Volume::mount(devices.clone(), options(topology.clone(), Arc::default())).unwrap();
        let found = numbers(&v);
        v.unmount().unwrap();
        // a read-only mount, whose devices are looked through
        let read_only = MountOptions { read_only: true, ..options(topology.clone(), Arc::default()) };
        let v = Volume::mount(devices, read_only).unwrap();
        assert_eq!(numbers(&v), found);
        v.unmount().unwrap();
        found.into_iter().flatten().collect::<Vec<_>>()
    };
    let dealt = [1, 4, 1, 4];
    assert_eq!(placed(&[0, 1]), [4, 1, 4, 1]);
    for all_alike in [&[0][..], &[1], &[2], &[0, 0], &[2, 2]] {
        assert_eq!(placed(all_alike), dealt, "{all_alike:?}");
    }
    // those of the one that nobody knows are dealt out
    assert_eq!(placed(&[1, 2]), [1, 4, 1, 4]);
    assert_eq!(placed(&[2, 1]), [1, 1, 1, 1]);
}

/// A domain that is added has its place, too.
#[test]
fn a_domain_that_is_added_is_placed() {
    let v = volume(2, options(machine(&TWO), Arc::default()));
    v.add_domain().unwrap();
    v.add_domain().unwrap();
    assert_eq!(numbers(&v), [Some(1), Some(4), Some(1), Some(4)]);
    v.unmount().unwrap();
}
