//! Mounting, as root and where the kernel has FUSE; elsewhere the tests say that they did nothing.

mod common;
use common::Bench;
use std::io::{Write, stderr};
use std::path::{Path, PathBuf};

/// A mounted volume; unmounted when the test fails, too.
struct Mounted {
    bench: Bench,
    point: PathBuf,
}

impl Mounted {
    fn new(args: &[&str]) -> Option<Self> {
        if !rustix::process::geteuid().is_root() || !std::path::Path::new("/dev/fuse").exists() {
            _ = writeln!(stderr(), "SKIPPED: mounting needs root and /dev/fuse");
            return None;
        }
        let bench = Bench::with_volume();
        std::fs::create_dir(bench.path("mnt")).unwrap();
        let point = bench.path("mnt");
        bench.run(&[&["mount"], args, &["vol.img", "mnt"]].concat()).ok();
        Some(Self { bench, point })
    }
}

impl Mounted {
    /// The process of the server: the one that holds the image open.
    fn server(&self) -> i32 {
        let image = std::fs::canonicalize(self.bench.path("vol.img")).unwrap();
        let server = std::fs::read_dir("/proc").unwrap().flatten().find(|p| {
            let fds = std::fs::read_dir(p.path().join("fd"));
            fds.is_ok_and(|fds| fds.flatten().any(|fd| std::fs::read_link(fd.path()).is_ok_and(|l| l == image)))
        });
        server.unwrap().file_name().to_str().unwrap().parse().unwrap()
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if is_mounted(&self.point) {
            let _ = rustix::mount::unmount(&self.point, rustix::mount::UnmountFlags::DETACH);
        }
    }
}

fn is_mounted(point: &std::path::Path) -> bool {
    let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    table.lines().any(|l| l.split(' ').nth(4) == point.to_str())
}

fn write_unmount_and_check(args: &[&str]) {
    let Some(m) = Mounted::new(args) else { return };
    std::fs::create_dir(m.point.join("d")).unwrap();
    std::fs::write(m.point.join("d/f"), "through the kernel").unwrap();
    // While it is mounted, nobody else may touch it.
    m.bench.run(&["fsck", "-fy", "vol.img"]).fails(8, &["in use"]);
    m.bench.run(&["mkfs", "--force", "vol.img"]).code(1);
    // Busy.
    let held = std::fs::File::open(m.point.join("d/f")).unwrap();
    m.bench.run(&["umount", "mnt"]).fails(32, &["busy"]);
    drop(held);
    m.bench.run(&["umount", "mnt"]).ok();
    assert!(!is_mounted(&m.point));
    // Closed when umount returns: no waiting here.
    m.bench.run(&["fsck", "-f", "vol.img"]).ok();
    assert_eq!(m.bench.run(&["cat", "vol.img", "/d/f"]).ok().out, "through the kernel");
    m.bench.run(&["mkfs", "--force", "-q", "vol.img"]).ok();
}

#[test]
fn plain_fuse() {
    write_unmount_and_check(&["--fuseblk", "never"]);
}

#[test]
fn fuseblk_or_what_there_is() {
    write_unmount_and_check(&["-o", "noatime,commit=2,threads=3"]);
}

#[test]
fn read_only_mounts_change_nothing() {
    let Some(m) = Mounted::new(&["-o", "ro"]) else { return };
    let e = std::fs::write(m.point.join("f"), "x").unwrap_err();
    assert_eq!(e.raw_os_error(), Some(rustix::io::Errno::ROFS.raw_os_error()));
    m.bench.run(&["umount", "--timeout", &u64::MAX.to_string(), "mnt"]).ok();
}

/// The kernel does not make any of the server's threads wait for file systems when they need memory.
#[test]
fn the_server_is_known_to_write_back() {
    // PF_MEMALLOC_NOIO in the flags of proc_pid_stat(5)
    const NOIO: u64 = 0x8_0000;
    let Some(m) = Mounted::new(&[]) else { return };
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let caps = status.lines().find_map(|l| l.strip_prefix("CapEff:")).unwrap();
    if u64::from_str_radix(caps.trim(), 16).unwrap() & 1 << 24 == 0 {
        _ = writeln!(stderr(), "SKIPPED: no CAP_SYS_RESOURCE here");
        return;
    }
    let mut threads = 0;
    for thread in std::fs::read_dir(format!("/proc/{}/task", m.server())).unwrap() {
        let stat = std::fs::read_to_string(thread.unwrap().path().join("stat")).unwrap();
        let flags: u64 = stat.rsplit(')').next().unwrap().split_whitespace().nth(6).unwrap().parse().unwrap();
        assert!(flags & NOIO != 0, "{stat}");
        threads += 1;
    }
    assert!(threads > 2, "{threads}");
    m.bench.run(&["umount", "mnt"]).ok();
}

#[test]
fn a_foreground_mount_ends_on_a_signal() {
    let Some(m) = Mounted::new(&[]) else { return };
    m.bench.run(&["umount", "mnt"]).ok();
    let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_braidfs"))
        .args(["mount", "-f", "--fuseblk", "never", "vol.img", "mnt"])
        .current_dir(m.bench.path(""))
        .spawn()
        .unwrap();
    for _ in 0..500 {
        if is_mounted(&m.point) {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let mut file = std::fs::File::create(m.point.join("f")).unwrap();
    file.write_all(b"kept").unwrap();
    drop(file);
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert!(child.wait().unwrap().success());
    assert!(!is_mounted(&m.point));
    assert_eq!(m.bench.run(&["cat", "vol.img", "/f"]).ok().out, "kept");
}

#[test]
fn a_dead_mount_point_is_taken_over() {
    let Some(m) = Mounted::new(&["--fuseblk", "never"]) else { return };
    std::fs::write(m.point.join("f"), "synced").unwrap();
    std::fs::File::open(m.point.join("f")).unwrap().sync_all().unwrap();
    let pid = m.server();
    rustix::process::kill_process(rustix::process::Pid::from_raw(pid).unwrap(), rustix::process::Signal::KILL).unwrap();
    while std::fs::read_dir(&m.point).is_ok() {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    m.bench.run(&["mount", "vol.img", "mnt"]).ok();
    assert_eq!(std::fs::read(m.point.join("f")).unwrap(), b"synced");
    m.bench.run(&["umount", "mnt"]).ok();
    m.bench.run(&["fsck", "-f", "vol.img"]).ok();
}

/// A directory of the volume is all that is mounted still.
#[test]
fn a_volume_grows_through_a_part_of_it() {
    let Some(m) = Mounted::new(&["--fuseblk", "never"]) else { return };
    let part = m.bench.path("part");
    for dir in [&m.point.join("d"), &part] {
        std::fs::create_dir(dir).unwrap();
    }
    rustix::mount::mount_bind(m.point.join("d"), &part).unwrap();
    let resized = m.bench.run(&["resize", "part", "96M"]);
    m.bench.run(&["umount", "part"]).ok();
    assert!(resized.ok().out.contains("grown from 64 MiB to 96 MiB"));
    m.bench.run(&["umount", "mnt"]).ok();
    m.bench.run(&["fsck", "-f", "vol.img"]).ok();
}

/// The image lies where nothing answers: neither is it waited for to detach the mount, nor to cut its process off.
#[test]
fn a_device_that_hangs_keeps_nobody_from_unmounting() {
    use rustix::process::{Pid, Signal, kill_process};
    for (args, code) in [(&["--lazy"][..], 0), (&["--force", "--timeout", "2"], 32)] {
        let Some(outer) = Mounted::new(&["--fuseblk", "never"]) else { return };
        let b = &outer.bench;
        b.run(&["mkfs", "-q", "--size", "32M", "mnt/inner.img"]).ok();
        std::fs::create_dir(b.path("inner")).unwrap();
        b.run(&["mount", "--fuseblk", "never", "mnt/inner.img", "inner"]).ok();
        let server = Pid::from_raw(outer.server()).unwrap();
        kill_process(server, Signal::STOP).unwrap();
        let program = env!("CARGO_BIN_EXE_braidfs");
        let umount =
            std::process::Command::new(program).arg("umount").args(args).arg("inner").current_dir(b.path("")).spawn();
        let mut umount = umount.unwrap();
        let mut ended = None;
        for _ in 0..600 {
            ended = umount.try_wait().unwrap();
            if ended.is_some() {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
        umount.kill().unwrap();
        kill_process(server, Signal::CONT).unwrap();
        umount.wait().unwrap();
        let is_left = is_mounted(&b.path("inner"));
        if is_left {
            rustix::mount::unmount(b.path("inner"), rustix::mount::UnmountFlags::DETACH).unwrap();
        }
        assert_eq!(ended.and_then(|status| status.code()), Some(code), "{args:?}");
        assert!(!is_left, "{args:?}");
        // busy until the inner volume is closed
        for _ in 0..500 {
            if rustix::mount::unmount(&outer.point, rustix::mount::UnmountFlags::empty()).is_ok() {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }
}

/// Of tenant `t` with its root and one file: df -i tells it, the last inode can be had and no more, and what is removed is
/// had again at once.
fn a_limit_of_inodes(m: &Mounted, root: &Path) {
    m.bench.run(&["tenant", "set", "--inodes", "0", "mnt", "t"]).fails(1, &["none"]);
    let set = m.bench.run(&["tenant", "set", "--json", "--inodes", "100", "mnt", "t"]).ok();
    let of = |out: &str| serde_json::from_str::<serde_json::Value>(out).unwrap();
    assert_eq!((of(&set.out)["space"].as_u64(), of(&set.out)["inodes_max"].as_u64()), (Some(4 << 20), Some(100)));
    let left = || {
        let s = rustix::fs::statvfs(root).unwrap();
        (s.f_files, s.f_ffree)
    };
    assert_eq!(left(), (100, 98));
    let file = |n: u32| std::fs::File::create_new(root.join(n.to_string())).map(drop);
    for n in 0..98 {
        file(n).unwrap();
    }
    let full = |r: std::io::Result<()>| r.unwrap_err().raw_os_error() == Some(rustix::io::Errno::NOSPC.raw_os_error());
    assert!(full(file(98)) && full(std::fs::create_dir(root.join("d"))));
    assert_eq!(left(), (100, 0));
    for n in 0..98 {
        std::fs::remove_file(root.join(n.to_string())).unwrap();
        file(n + 1000).unwrap_or_else(|e| panic!("after {n} was removed: {e}"));
    }
    let stats = of(&m.bench.run(&["stats", "--json", "mnt"]).ok().out);
    assert_eq!(stats["tenants"][0]["name"].as_str(), Some("t"));
    assert_eq!(
        (stats["tenants"][0]["inodes"].as_u64(), stats["tenants"][0]["inodes_max"].as_u64()),
        (Some(100), Some(100))
    );
    let top = m.bench.run(&["top", "--batch", "-d", "0.1", "-n", "1", "mnt"]).ok().out;
    let row = top.lines().find(|l| l.starts_with("t ")).map(|l| l.split_whitespace().collect::<Vec<_>>().join(" "));
    assert!(row.is_some_and(|r| r.contains(" % 100 100 % ")), "{top}");
    m.bench.run(&["tenant", "set", "--inodes", "none", "mnt", "t"]).ok();
    file(98).unwrap();
}

/// A tenant whose rates would keep it for a minute: its neighbour goes on meanwhile, and without the rates it is done, with
/// every byte.
#[test]
fn a_tenant_that_waits_holds_nobody_up() {
    let Some(m) = Mounted::new(&[]) else { return };
    let of = |out: &str| serde_json::from_str::<serde_json::Value>(out).unwrap();
    let rates = ["--write-bps", "64K/1", "--read-bps", "64K/64K", "--read-iops", "500"];
    let create =
        [&["tenant", "create", "--json", "--soft-space", "2M", "--grace", "2h"][..], &rates, &["mnt/t"]].concat();
    let made = of(&m.bench.run(&create).ok().out);
    assert_eq!((made["soft_space"].as_u64(), made["grace_seconds"].as_u64()), (Some(2 << 20), Some(7200)));
    let bps = |way: &str| (made["rates"][way]["per_second"].as_u64(), made["rates"][way]["burst"].as_u64());
    assert_eq!((bps("write_bps"), bps("read_bps")), ((Some(65536), Some(1)), (Some(65536), Some(65536))));
    assert!(made["rates"]["write_iops"].is_null() && bps("read_iops") == (Some(500), Some(50)), "{made}");
    for (wrong, why) in [
        (["--write-bps", "1K"], "64 KiB per second at least"),
        (["--read-iops", "9"], "10 requests per second at least"),
        (["--soft-space", "64K"], "1 MiB at least"),
    ] {
        m.bench.run(&[&["tenant", "set"], &wrong[..], &["mnt", "t"]].concat()).fails(1, &[why]);
    }
    // what is not named of a soft limit stays
    let soft = |words: &[&str]| {
        let set = m.bench.run(&[&["tenant", "set", "--json"], words, &["mnt", "t"]].concat()).ok();
        (of(&set.out)["soft_space"].as_u64(), of(&set.out)["grace_seconds"].as_u64())
    };
    assert_eq!(soft(&["--soft-space", "3M"]), (Some(3 << 20), Some(7200)));
    assert_eq!(soft(&["--grace", "3d"]), (Some(3 << 20), Some(259_200)));
    let shown = m.bench.run(&["tenant", "show", "mnt", "t"]).ok().out;
    assert!(shown.contains("  soft limit 3 MiB, for 3 days\n"), "{shown}");
    m.bench.run(&["tenant", "create", "mnt/u"]).ok();
    m.bench.run(&["tenant", "set", "--grace", "1h", "mnt", "u"]).fails(1, &["--soft-space"]);
    let pieces = || (0..64u8).map(|n| vec![n; 65536]);
    let file = m.point.join("t/f");
    let writing = std::thread::spawn({
        let file = file.clone();
        move || {
            let mut f = std::fs::File::create(file).unwrap();
            pieces().for_each(|piece| f.write_all(&piece).unwrap());
            f.sync_all().unwrap();
        }
    });
    for n in 0..20 {
        let mut f = std::fs::File::create(m.point.join(format!("u/{n}"))).unwrap();
        f.write_all(&[1; 1 << 18]).unwrap();
        f.sync_all().unwrap();
    }
    assert!(!writing.is_finished(), "4 MiB at 64 KiB a second");
    let stats = of(&m.bench.run(&["stats", "--json", "mnt"]).ok().out);
    assert_eq!(stats["tenants"][0]["written"]["bytes_per_second"].as_u64(), Some(65536), "{stats}");
    m.bench.run(&["top", "--batch", "-d", "0.1", "-n", "1", "mnt"]).ok();
    m.bench
        .run(&["tenant", "set", "--write-bps", "none", "--read-bps", "none", "--read-iops", "none", "mnt", "t"])
        .ok();
    writing.join().unwrap();
    let read = std::fs::read(&file).unwrap();
    assert!(read == pieces().flatten().collect::<Vec<_>>(), "another content");
    let shown = m.bench.run(&["tenant", "show", "mnt", "t"]).ok().out;
    assert!(shown.contains("soft limit 3 MiB") && !shown.contains("written: at most"), "{shown}");
    m.bench.run(&["umount", "mnt"]).ok();
    m.bench.run(&["fsck", "-f", "vol.img"]).ok();
}

/// A tenant is made where the kernel has looked for its directory before; `df` there shows its limit, and the writer who
/// reaches it gets ENOSPC while others go on.
#[test]
fn a_tenant_of_a_mounted_volume() {
    let Some(m) = Mounted::new(&[]) else { return };
    let root = m.point.join("t");
    assert!(!root.exists());
    assert_eq!(std::fs::read_dir(&m.point).unwrap().count(), 0);
    let of = |out: &str| serde_json::from_str::<serde_json::Value>(out).unwrap();
    let made = m.bench.run(&["tenant", "create", "--json", "--space", "2M", "mnt/t"]).ok();
    assert_eq!(of(&made.out)["space"], 2 << 20);
    assert!(root.is_dir() && std::fs::read_dir(&m.point).unwrap().count() == 1);
    m.bench.run(&["tenant", "create", "--space", "2M", "--name", "v", "mnt/t"]).fails(1, &["there already"]);
    m.bench
        .run(&["tenant", "create", "--space", "2M", "--name", "t", "mnt/u"])
        .fails(1, &["there is a tenant t already"]);
    m.bench.run(&["tenant", "set", "--space", "2M", "mnt", "u"]).fails(1, &["there is no tenant u"]);
    m.bench.run(&["tenant", "set", "--space", "4K", "mnt", "t"]).fails(1, &["1 MiB at least"]);
    assert_eq!(rustix::fs::statvfs(&root).unwrap().f_blocks, 512);
    let mut f = std::fs::File::create(root.join("f")).unwrap();
    let full = (0..64).find_map(|_| f.write_all(&[1; 1 << 16]).and_then(|()| f.sync_all()).err()).unwrap();
    assert_eq!(full.raw_os_error(), Some(rustix::io::Errno::NOSPC.raw_os_error()));
    let mut other = std::fs::File::create(m.point.join("other")).unwrap();
    other.write_all(&[2; 4 << 20]).unwrap();
    other.sync_all().unwrap();
    m.bench.run(&["tenant", "set", "--space", "4M", "mnt", "t"]).ok();
    f.write_all(&[1; 1 << 20]).unwrap();
    f.sync_all().unwrap();
    drop((f, other));
    a_limit_of_inodes(&m, &root);
    assert_eq!(std::fs::remove_dir(&root).unwrap_err().raw_os_error(), Some(rustix::io::Errno::BUSY.raw_os_error()));
    let listed = of(&m.bench.run(&["tenant", "list", "--json", "mnt"]).ok().out);
    assert_eq!((listed[0]["name"].as_str(), listed[0]["space"].as_u64()), (Some("t"), Some(4 << 20)));
    assert!(listed[0]["used"].as_u64().unwrap() > 2 << 20 && listed.as_array().unwrap().len() == 1);
    m.bench.run(&["tenant", "show", "mnt", "t"]).ok();
    m.bench.run(&["tenant", "remove", "mnt", "t"]).ok();
    assert_eq!(m.bench.run(&["tenant", "list", "mnt"]).ok().out, "");
    std::fs::remove_dir_all(&root).unwrap();
    m.bench.run(&["umount", "mnt"]).ok();
    m.bench.run(&["fsck", "-f", "vol.img"]).ok();
}
