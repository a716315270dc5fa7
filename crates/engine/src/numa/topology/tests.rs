use super::*;
use std::fs;
use tempfile::TempDir;

/// A node: number, `cpulist`, MiB of memory, `distance`.
pub(crate) type Line<'a> = (u32, &'a str, u64, &'a str);

/// A directory as the kernel's, with these nodes.
pub(crate) fn sysfs(nodes: &[Line<'_>]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (number, cpus, mib, distance) in nodes {
        let node = dir.path().join(format!("devices/system/node/node{number}"));
        fs::create_dir_all(&node).unwrap();
        let kib = mib * 1024;
        let meminfo = format!("Node {number} MemTotal:       {kib} kB\nNode {number} MemFree:        17 kB\n");
        for (file, text) in [("cpulist", *cpus), ("meminfo", &meminfo), ("distance", *distance)] {
            fs::write(node.join(file), format!("{text}\n")).unwrap();
        }
    }
    dir
}

/// The topology of a machine with these nodes, all of it allowed.
pub(crate) fn machine(nodes: &[Line<'_>]) -> Topology {
    Topology::read(sysfs(nodes).path(), &Allowed::default())
}

fn shown(t: &Topology) -> Vec<(u32, Vec<u32>, u64, Vec<usize>)> {
    t.nodes().iter().map(|n| (n.number, n.cpus.clone(), n.bytes >> 20, n.others.clone())).collect()
}

#[test]
fn nodes_with_their_cpus_and_memory_the_nearest_first() {
    let t = machine(&[(0, "0-3,8", 64, "10 21"), (1, "4-7", 32, "21 10")]);
    assert!(t.are_several());
    assert_eq!(shown(&t), [(0, vec![0, 1, 2, 3, 8], 64, vec![1]), (1, vec![4, 5, 6, 7], 32, vec![0])]);
    // a ring of four with gaps in their numbers: columns are of the nodes that there are
    let t = machine(&[
        (0, "0", 8, "10 30 20 30"),
        (2, "1", 8, "30 10 40 20"),
        (5, "2", 8, "20 40 10 12"),
        (11, "3", 8, "30 20 12 10"),
    ]);
    let others: Vec<(u32, Vec<usize>)> = t.nodes().iter().map(|n| (n.number, n.others.clone())).collect();
    assert_eq!(others, [(0, vec![2, 1, 3]), (2, vec![3, 0, 2]), (5, vec![3, 0, 1]), (11, vec![2, 1, 0])]);
}

/// CPUs of a node without memory are used with the memory that is nearest; memory without CPUs is left to the kernel.
#[test]
fn nodes_without_memory_or_without_cpus_do_not_count() {
    let nodes = [
        (0, "0-1", 64, "10 20 40 15"),
        (1, "2-3", 64, "20 10 11 15"),
        (2, "4-5", 0, "40 11 10 15"),
        (3, "", 512, "15 15 15 10"),
    ];
    let t = machine(&nodes);
    assert_eq!(shown(&t), [(0, vec![0, 1], 64, vec![1]), (1, vec![2, 3, 4, 5], 64, vec![0])]);
    let one = machine(&[nodes[0], (2, "4-5", 0, "40 10")]);
    assert!(!one.are_several());
    assert_eq!(shown(&one), [(0, vec![0, 1, 4, 5], 64, vec![])]);
}

#[test]
fn what_the_process_may_not_use_does_not_count() {
    let dir = sysfs(&[(0, "0-3", 64, "10 20 20"), (1, "4-7", 64, "20 10 20"), (2, "8-11", 64, "20 20 10")]);
    let read = |cpus: Option<&[u32]>, nodes: Option<&[u32]>| {
        let allowed = Allowed { cpus: cpus.map(Into::into), nodes: nodes.map(Into::into) };
        shown(&Topology::read(dir.path(), &allowed))
    };
    assert_eq!(
        read(Some(&[1, 2, 9, 4000]), None),
        [(0, vec![1, 2], 64, vec![1]), (2, vec![9], 64, vec![0])],
        "no CPU of node 1"
    );
    // CPUs of a node whose memory the process may not have go with the nearest one
    assert_eq!(read(None, Some(&[1])), [(1, (0..12).collect::<Vec<_>>(), 64, vec![])]);
    assert_eq!(read(Some(&[5]), Some(&[0, 2])), [], "its CPU is of a node whose memory it may not have");
    assert_eq!(read(None, Some(&[7])), []);
}

#[test]
fn a_machine_that_says_nothing_has_one_node() {
    let dir = tempfile::tempdir().unwrap();
    for at in ["nowhere", "", "devices/system/node"] {
        let t = Topology::read(&dir.path().join(at), &Allowed::default());
        assert!(!t.are_several() && t.nodes().is_empty() && t.of_device((8, 0)).is_none());
    }
    assert!(!Topology::default().are_several());
    // whatever this machine has, it is allowed to use it
    let (here, allowed) = (Topology::of_machine(), Allowed::of_this_process());
    let may = allowed.cpus.unwrap();
    assert!(!may.is_empty());
    assert!(here.nodes().iter().flat_map(|n| &n.cpus).all(|c| may.contains(c)));
}

#[test]
fn odd_text_is_not_there() {
    assert_eq!(list(" 0-2, 5 ,7-6,x,-,3-,-4,,1-1\n", 8), [0, 1, 2, 5]);
    assert_eq!(list("0-4294967295", 8), (0..8).collect::<Vec<_>>());
    assert_eq!(list(&"0-4294967295,".repeat(1000), 8192).len(), 8192);
    assert_eq!(list("99999999999999999999,8,4000000000", 8), []);
    assert_eq!(memory("Node 0 MemTotal: 18446744073709551615 kB"), u64::MAX);
    assert_eq!([memory(""), memory("MemTotal:"), memory("Node 0 MemTotal: -3 kB")], [0; 3]);
    // a CPU that two nodes claim is the first one's; distances may be missing or odd
    let t = machine(&[(0, "0-1", 8, ""), (1, "1-2", 8, "x -1 99999999999 7 7 7 7"), (2, "3", 8, "11")]);
    assert_eq!(shown(&t), [(0, vec![0, 1], 8, vec![1, 2]), (1, vec![2], 8, vec![0, 2]), (2, vec![3], 8, vec![0, 1])]);
    // names that are no nodes
    let dir = sysfs(&[(0, "0", 8, "10"), (1, "1", 8, "10")]);
    for name in ["node", "nodeX", "node-1", "node+1", "node1024", "node99999999999", "memory3", "node 2"] {
        let node = dir.path().join("devices/system/node").join(name);
        fs::create_dir(&node).unwrap();
        fs::write(node.join("cpulist"), "5").unwrap();
        fs::write(node.join("meminfo"), "MemTotal: 100 kB").unwrap();
    }
    let t = Topology::read(dir.path(), &Allowed::default());
    assert_eq!(t.nodes().iter().map(|n| n.number).collect::<Vec<_>>(), [0, 1]);
}

/// Whatever the files hold, what comes out can be used.
#[test]
fn no_text_does_harm() {
    let mut random = fastrand::Rng::with_seed(16);
    let words =
        ["0", "1", "7-3", "2-5", "4294967295", "-", ",", " ", "\n", "MemTotal:", "kB", "\u{fffd}", "10", "Node"];
    for round in 0..200 {
        let dir = sysfs(&[]);
        for _ in 0..random.usize(0..6) {
            let node = dir.path().join(format!("devices/system/node/node{}", random.u32(0..8)));
            fs::create_dir_all(&node).unwrap();
            for file in ["cpulist", "meminfo", "distance"] {
                let text: String = (0..random.usize(0..12)).map(|_| words[random.usize(0..words.len())]).collect();
                match random.u8(0..10) {
                    0 => drop(fs::create_dir_all(node.join(file))),
                    1 => drop(fs::write(node.join(file), [0xff, 0, 0xfe])),
                    _ => drop(fs::write(node.join(file), text)),
                }
            }
        }
        let t = Topology::read(dir.path(), &Allowed::default());
        let mut cpus: Vec<u32> = t.nodes().iter().flat_map(|n| n.cpus.clone()).collect();
        cpus.sort_unstable();
        assert!(cpus.windows(2).all(|w| w[0] < w[1]), "round {round}: a CPU of two nodes");
        for (i, n) in t.nodes().iter().enumerate() {
            let mut all = n.others.clone();
            all.push(i);
            all.sort_unstable();
            assert_eq!(all, (0..t.nodes().len()).collect::<Vec<_>>(), "round {round}");
            assert!(n.bytes > 0 && !n.cpus.is_empty(), "round {round}");
        }
    }
}

#[test]
fn a_device_is_at_the_node_of_what_it_is_connected_to() {
    let dir = sysfs(&[(0, "0", 8, "10 20 30"), (3, "1", 8, "20 10 11"), (4, "", 8, "30 11 10")]);
    let at = |path: &str| dir.path().join(path);
    let bus = at("devices/pci0000:80/0000:80:01.0");
    for (disk, number) in [("nvme/nvme0/nvme0n1/nvme0n1p1", "3"), ("ata1/sda/sda1", "-1")] {
        fs::create_dir_all(bus.join(disk)).unwrap();
        fs::write(bus.join(disk).parent().unwrap().parent().unwrap().join("numa_node"), number).unwrap();
    }
    fs::create_dir_all(at("dev/block")).unwrap();
    let link = |number: &str, to: &Path| std::os::unix::fs::symlink(to, at("dev/block").join(number)).unwrap();
    link("259:1", &bus.join("nvme/nvme0/nvme0n1/nvme0n1p1"));
    link("259:0", &bus.join("nvme/nvme0/nvme0n1"));
    link("8:1", &bus.join("ata1/sda/sda1"));
    let t = Topology::read(dir.path(), &Allowed::default());
    let of = |device| t.of_device(device).map(|i| t.nodes()[i].number);
    assert_eq!([of((259, 1)), of((259, 0))], [Some(3); 2]);
    assert_eq!(of((8, 1)), None, "the kernel does not know");
    // but for what the bus says, above
    fs::write(bus.join("numa_node"), "0\n").unwrap();
    assert_eq!([of((8, 1)), of((259, 1))], [Some(0), Some(3)]);
    fs::write(bus.join("ata1/numa_node"), "4").unwrap();
    assert_eq!(of((8, 1)), Some(3), "of a node that does not count: the nearest");
    fs::write(bus.join("ata1/numa_node"), "77").unwrap();
    assert_eq!(of((8, 1)), None, "a node that there is not");
    // a link out of it, in a circle, to nothing
    let away = tempfile::tempdir().unwrap();
    fs::write(away.path().join("numa_node"), "3").unwrap();
    link("7:0", away.path());
    link("7:1", &at("dev/block/7:1"));
    link("7:2", &at("gone"));
    assert_eq!([(7, 0), (7, 1), (7, 2), (7, 3)].map(of), [None; 4]);
}
