//! What mkfs must not overwrite unasked, made by the programs that make it; with `--force` it leaves no trace of it.

mod common;
use common::{Bench, run};
use std::io::{Write as _, stderr};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};

const BYTES: u64 = 64 << 20;

/// Where programs for administrators are, besides `PATH`.
fn find(program: &str) -> Option<String> {
    let path = std::env::var("PATH").unwrap_or_default();
    path.split(':').chain(["/usr/sbin", "/sbin"]).map(|d| format!("{d}/{program}")).find(|p| Path::new(p).exists())
}

/// Runs a program on the image; false where it is missing, which is said.
fn make(bench: &Bench, program: &str, args: &[&str], input: &str) -> bool {
    let Some(path) = find(program) else {
        _ = writeln!(stderr(), "SKIPPED: no {program} here");
        return false;
    };
    let mut command = Command::new(path);
    command.args(args).current_dir(bench.path("")).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), input.as_bytes()).unwrap();
    let done = child.wait_with_output().unwrap();
    assert!(done.status.success(), "{program}: {}", String::from_utf8_lossy(&done.stderr));
    true
}

/// What wipefs lists, one signature a line; `None` where it is missing.
fn listed(bench: &Bench, image: &str) -> Option<String> {
    let path = find("wipefs").or_else(|| {
        _ = writeln!(stderr(), "SKIPPED in part: no wipefs here");
        None
    })?;
    Some(run(Command::new(path).args(["--no-act", "--parsable", image]).current_dir(bench.path(""))).ok().out)
}

/// It is refused with a message that has `what`, nothing changes, and with `--force` no signature is left.
fn refused_then_forced(bench: &Bench, image: &str, what: &str) {
    let before = bench.read(image);
    bench.run(&["mkfs", image]).fails(1, &["will not format", image, what, "--force"]);
    assert!(bench.read(image) == before, "{what}: changed without --force");
    bench.run(&["mkfs", "-q", "--force", image]).ok();
    if let Some(left) = listed(bench, image) {
        assert_eq!(left.lines().filter(|l| !l.starts_with('#')).collect::<Vec<_>>(), [""; 0], "{what}: left behind");
    }
    bench.run(&["fsck", "-f", image]).ok();
}

#[test]
fn what_programs_make() {
    let b = Bench::new();
    for (program, args, input, what) in [
        ("mkfs.bfs", &["i.img"][..], "", "bfs"),
        ("mkfs.minix", &["i.img"], "", "minix"),
        ("mkfs.minix", &["-3", "i.img"], "", "minix"),
        ("mkswap", &["i.img"], "", "swap"),
        ("mkfs.ext4", &["-qF", "i.img"], "", "ext"),
        ("mkfs.vfat", &["i.img"], "", "FAT"),
        ("sfdisk", &["-q", "i.img"], "label: dos\n,\n", "partition table"),
        ("sfdisk", &["-q", "i.img"], "label: gpt\n,\n", "partition table"),
        (
            "cryptsetup",
            &["luksFormat", "-q", "--pbkdf", "pbkdf2", "--pbkdf-force-iterations", "1000", "i.img", "-"],
            "secret",
            "LUKS",
        ),
    ] {
        let file = b.sparse("i.img", 0);
        file.set_len(0).unwrap();
        file.set_len(BYTES).unwrap();
        if make(&b, program, args, input) {
            refused_then_forced(&b, "i.img", what);
        }
    }
}

#[test]
fn cramfs() {
    let b = Bench::new();
    b.write("dir/file", "text");
    if make(&b, "mkfs.cramfs", &["dir", "i.img"], "") {
        b.sparse("i.img", BYTES);
        refused_then_forced(&b, "i.img", "cramfs");
    }
}

/// Written by hand: their programs need devices.
#[test]
fn members_of_raids_and_others() {
    let b = Bench::new();
    // struct mdp_superblock_1, little-endian, version 1.2 at 4096
    let mut md = vec![0u8; 256];
    md[0..4].copy_from_slice(&0xa92b_4efcu32.to_le_bytes());
    md[4] = 1;
    md[128..136].copy_from_slice(&8u64.to_le_bytes()); // data_offset... super_offset follows
    md[144..152].copy_from_slice(&8u64.to_le_bytes());
    let lvm = b"LABELONE\x01\0\0\0\0\0\0\0";
    let bcache = b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81";
    for (at, bytes, what) in [
        (4096, &md[..], "RAID"),
        (512, lvm, "LVM"),
        (0x1018, bcache, "bcache"),
        (0, b"LUKS\xba\xbe\0\x01", "LUKS"),
        (BYTES - 512, b"EFI PART", "GPT"),
        (BYTES - 512, b"\xde\x11\xde\x11", "DDF"),
    ] {
        b.sparse("i.img", 0).set_len(0).unwrap();
        b.sparse("i.img", BYTES).write_all_at(bytes, at).unwrap();
        let refused = b.run(&["mkfs", "i.img"]).code(1);
        // an image that holds anything is refused; a device is by its signature alone
        assert!(refused.err.contains(what) || refused.err.contains("holds data"), "{what}: {}", refused.err);
        b.run(&["mkfs", "-q", "--force", "i.img"]).ok();
    }
}

/// A signature somewhere in a block device that is not empty otherwise.
#[test]
fn block_devices() {
    if !rustix::process::geteuid().is_root() || !Path::new("/dev/loop-control").exists() {
        _ = writeln!(stderr(), "SKIPPED: loop devices need root");
        return;
    }
    let b = Bench::new();
    b.sparse("i.img", BYTES);
    let attached = run(Command::new("losetup").args(["--find", "--show"]).arg(b.path("i.img"))).ok().out;
    let device = attached.trim();
    let steps = || {
        if make(&b, "mkfs.bfs", &[device], "") {
            b.run(&["mkfs", device]).fails(1, &["bfs", "--force"]);
        }
        b.run(&["mkfs", "-q", "--force", device]).ok();
        b.run(&["mkfs", device]).fails(1, &["a braidfs volume", "--force"]);
        // a smaller volume than the device
        b.run(&["mkfs", "--size", "65M", "--force", device]).fails(1, &["64 MiB", "less than --size"]);
        b.run(&["mkfs", "-q", "--size", "40M", "--force", device]).ok();
        let info = b.run(&["info", "--json", device]).ok().out;
        let bytes: u64 = info.split("\"bytes\": ").nth(1).unwrap().split(',').next().unwrap().parse().unwrap();
        assert!((32 << 20..=40 << 20).contains(&bytes), "{bytes}");
        b.run(&["fsck", "-f", device]).ok();
        let file = std::fs::File::options().read(true).write(true).open(device).unwrap();
        let mut last = [1; 4096];
        file.read_exact_at(&mut last, BYTES - 4096).unwrap();
        assert_eq!(last, [0; 4096], "the superblock of the larger volume that was there is left");
        // what lies behind the volume is left alone
        file.write_all_at(b"mine", 50 << 20).unwrap();
        b.write("f", vec![7; 20 << 20]);
        b.run(&["cp", "f", &format!("{device}:/f")]).ok();
        let mut mine = [0; 4];
        file.read_exact_at(&mut mine, 50 << 20).unwrap();
        assert_eq!(&mine, b"mine");
        b.run(&["fsck", "-f", device]).ok();
    };
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(steps));
    run(Command::new("losetup").args(["--detach", device]));
    result.unwrap_or_else(|p| std::panic::resume_unwind(p));
}
