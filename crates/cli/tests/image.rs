//! `braidfs image`: a volume's metadata without its data, and volumes made of it.

mod common;
use common::Bench;
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::time::{Duration, Instant};

const SECRET: &[u8] = b"nobody else may see this";

fn holds(bytes: &[u8], what: &[u8]) -> bool {
    bytes.windows(what.len()).any(|w| w == what)
}

/// Findings of a check, without the place.
fn findings(b: &Bench, images: &[&str]) -> Vec<String> {
    let args: Vec<&str> = ["fsck", "-n", "-f", "--json"].into_iter().chain(images.iter().copied()).collect();
    let said = b.run(&args);
    let report: serde_json::Value = serde_json::from_str(&said.out).unwrap_or_else(|e| panic!("{e}: {said:?}"));
    let list = report["findings"].as_array().unwrap();
    list.iter().map(|f| format!("{} {} {}", f["code"], f["domain"], f["node"])).collect()
}

/// A volume on `images` with a tree of all kinds of content.
fn filled(images: &[&str]) -> Bench {
    let b = Bench::new();
    let make = ["mkfs", "-q", "--size", "64M", "--domains", "2", "--data-checksums"];
    b.run(&make.iter().chain(images).copied().collect::<Vec<_>>()).ok();
    b.write("tree/small", SECRET);
    b.write("tree/large", SECRET.repeat(40_000));
    for n in 0..300 {
        b.write(&format!("tree/many/name-{n}"), format!("{n}"));
    }
    std::os::unix::fs::symlink("../target", b.path("tree/link")).unwrap();
    b.run(&["cp", "-r", "tree", &format!("{}:/tree", images.join(","))]).ok();
    b
}

#[test]
fn an_image_has_the_tree_and_no_data() {
    let images = ["a.img", "b.img"];
    let b = filled(&images);
    let whole = |names: &[&str]| names.iter().flat_map(|n| b.read(n)).collect::<Vec<u8>>();
    assert!(holds(&whole(&images), SECRET), "the test looks for what is not there");
    b.run(&["image", "export", "a.img", "b.img", "out.brfs"]).ok();
    b.run(&["image", "import", "out.brfs", "c.img", "d.img"]).ok();
    let copies = ["c.img", "d.img"];
    for made in ["out.brfs", "c.img", "d.img"] {
        let mode = b.path(made).metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{made} has names that others may not be allowed to list");
    }
    assert!(!holds(&whole(&copies), &SECRET[..8]), "data in the image");
    assert!(b.read("out.brfs").len() < 200_000, "{} bytes", b.read("out.brfs").len());
    for (from, to) in images.iter().zip(copies) {
        assert_eq!(b.path(from).metadata().unwrap().len(), b.path(to).metadata().unwrap().len());
    }
    assert_eq!(findings(&b, &copies), Vec::<String>::new());
    let list = |names: [&str; 2]| b.run(&["ls", "-lR", &names.join(",")]).ok().out;
    assert_eq!(list(images), list(copies));
    assert!(list(copies).contains("../target"), "{}", list(copies));
    // of the right size and zero, also where data has checksums
    b.run(&["cp", "c.img,d.img:/tree/large", "back"]).ok();
    assert_eq!(b.read("back"), vec![0; 40_000 * SECRET.len()]);
    b.run(&["cp", "c.img,d.img:/tree/small", "small"]).ok();
    assert_eq!(b.read("small"), vec![0; SECRET.len()]);
    b.run(&["scrub", "-q", "c.img", "d.img"]).ok();
}

#[test]
fn a_damaged_volume_has_the_same_findings() {
    let b = filled(&["a.img"]);
    let image = b.read("a.img");
    let file = std::fs::File::options().write(true).open(b.path("a.img")).unwrap();
    // node blocks and buckets, of which each is damaged in the middle
    let kinds = [8u8, 9, 5, 6];
    let mut seen = 0;
    for kind in kinds {
        let found = image.chunks(4096).enumerate().filter(|(_, c)| c.starts_with(b"BRFS") && c[8] == kind);
        for (at, _) in found.take(3) {
            file.write_all_at(b"damage", at as u64 * 4096 + 300).unwrap();
            seen += 1;
        }
    }
    assert_eq!(seen, 3 * kinds.len());
    b.run(&["image", "export", "a.img", "out.brfs"]).ok();
    b.run(&["image", "import", "out.brfs", "c.img"]).ok();
    let wanted = findings(&b, &["a.img"]);
    assert!(wanted.len() > 5, "{wanted:?}");
    assert_eq!(findings(&b, &["c.img"]), wanted);
}

#[test]
fn a_bad_file_makes_nothing() {
    let b = Bench::with_volume();
    b.run(&["image", "export", "vol.img", "out.brfs"]).ok();
    b.run(&["image", "export", "vol.img", "out.brfs"]).fails(1, &["out.brfs", "exists"]);
    b.run(&["image", "import", "out.brfs", "vol.img"]).fails(1, &["vol.img", "exists"]);
    b.run(&["image", "import", "out.brfs", "x", "y"]).fails(1, &["1 devices, 2 images"]);
    b.run(&["image", "import", "vol.img", "x"]).fails(1, &["no metadata of a braidfs volume"]);
    b.run(&["image", "import", "out.brfs", "good.img"]).ok();
    let (good, volume) = (b.read("out.brfs"), b.read("good.img"));
    let mut rng = fastrand::Rng::with_seed(3);
    for round in 0..40 {
        let mut bad = good.clone();
        if round % 4 == 0 {
            bad.truncate(rng.usize(..good.len()));
        } else {
            // not of gzip's own header, where a time and the like mean nothing
            bad[rng.usize(10..good.len())] ^= 1 << rng.u8(..8);
        }
        b.write("bad", bad);
        let said = b.run(&["image", "import", "bad", "x"]);
        if said.code == 0 {
            // the bits that fill the last byte of a deflate stream mean nothing
            assert!(round % 4 != 0 && b.read("x") == volume, "round {round}: {said:?}");
            std::fs::remove_file(b.path("x")).unwrap();
        } else {
            assert!(said.code == 1 && !b.path("x").exists(), "round {round}: {said:?}");
        }
    }
}

#[test]
fn runs_outside_of_a_device_are_refused() {
    use std::io::Write;
    let b = Bench::new();
    for (devices, blocks, device, first, count) in [
        (1u32, 100u64, 0u32, 100u64, 1u32),
        (1, 100, 1, 0, 1),
        (1, 100, 0, u64::MAX, 2),
        (1, 100, 0, 0, u32::MAX),
        (1, 100, 0, 0, 0),
        (1, u64::MAX, 0, 0, 1),
        (0, 100, 0, 0, 1),
        (u32::MAX, 100, 0, 0, 1),
    ] {
        let mut out = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        out.write_all(b"BRFSIMG1").unwrap();
        out.write_all(&devices.to_le_bytes()).unwrap();
        out.write_all(&blocks.to_le_bytes()).unwrap();
        out.write_all(&device.to_le_bytes()).unwrap();
        out.write_all(&first.to_le_bytes()).unwrap();
        out.write_all(&count.to_le_bytes()).unwrap();
        out.write_all(&[1; 4096]).unwrap();
        b.write("bad", out.finish().unwrap());
        let said = b.run(&["image", "import", "bad", "x"]);
        assert!(said.code == 1 && !b.path("x").exists(), "{devices} {blocks} {device} {first} {count}: {said:?}");
    }
}

/// Has the kernel refuse links, and renames with flags, to this process and all that it starts.
fn refuse_links() -> std::io::Result<()> {
    use libc::{
        BPF_ABS, BPF_JEQ, BPF_JMP, BPF_K, BPF_LD, BPF_RET, BPF_W, SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO, sock_filter,
    };
    const fn filter(code: u32, k: u32, jt: u8, jf: u8) -> sock_filter {
        sock_filter { code: code as u16, jt, jf, k }
    }
    const fn load(at: u32) -> sock_filter {
        filter(BPF_LD | BPF_W | BPF_ABS, at, 0, 0)
    }
    const fn equal(k: u32, jt: u8, jf: u8) -> sock_filter {
        filter(BPF_JMP | BPF_JEQ | BPF_K, k, jt, jf)
    }
    const fn end(k: u32) -> sock_filter {
        filter(BPF_RET | BPF_K, k, 0, 0)
    }
    #[cfg(target_arch = "x86_64")]
    const LINK: u32 = libc::SYS_link as u32;
    #[cfg(not(target_arch = "x86_64"))]
    const LINK: u32 = libc::SYS_linkat as u32;
    // of struct seccomp_data: the number of the call; the lower half of its fifth argument
    let (number, fifth) = (load(0), load(if cfg!(target_endian = "little") { 48 } else { 52 }));
    let mut program = [
        number,
        equal(libc::SYS_renameat2 as u32, 0, 3),
        fifth,
        equal(0, 3, 0),
        end(SECCOMP_RET_ERRNO | libc::EINVAL as u32),
        equal(libc::SYS_linkat as u32, 2, 0),
        equal(LINK, 1, 0),
        end(SECCOMP_RET_ALLOW),
        end(SECCOMP_RET_ERRNO | libc::EPERM as u32),
    ];
    let program = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: the kernel copies the program, which lives until then.
    let done = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) == 0
    };
    if done { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

/// As of FUSE file systems for exFAT and object stores, and folders that a virtual machine shares.
#[test]
fn a_file_system_without_links_takes_images() {
    let b = filled(&["a.img"]);
    let run = |args: &[&str]| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_braidfs"));
        // SAFETY: it makes system calls, and nothing else.
        unsafe { command.pre_exec(refuse_links) };
        common::run(command.args(args).current_dir(b.path(".")))
    };
    run(&["image", "export", "a.img", "out.brfs"]).ok();
    run(&["image", "import", "out.brfs", "c.img"]).ok();
    assert_eq!(findings(&b, &["c.img"]), Vec::<String>::new());
    let before = b.read("c.img");
    for args in [["export", "a.img", "c.img"], ["import", "out.brfs", "c.img"]] {
        run(&["image", args[0], args[1], args[2]]).fails(1, &["c.img: it exists: remove it first"]);
    }
    assert!(b.read("c.img") == before);
    let names = std::fs::read_dir(b.path(".")).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
    assert!(names.into_iter().all(|name| !name.ends_with(".part")));
}

/// A signal ends a run at any time: what is half written must not look whole.
#[test]
fn what_is_not_whole_has_no_name_yet() {
    let b = filled(&["a.img"]);
    b.run(&["image", "export", "a.img", "out.brfs"]).ok();
    let whole = b.read("out.brfs");
    rustix::fs::mknodat(rustix::fs::CWD, b.path("pipe"), rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    let mut import = std::process::Command::new(env!("CARGO_BIN_EXE_braidfs"));
    let mut import = import.args(["image", "import", "pipe", "b.img"]).current_dir(b.path(".")).spawn().unwrap();
    // one that does not read is ended, so that the write fails
    let _end = common::end_after(Duration::from_secs(60), &import);
    let begun = Instant::now();
    let flags = rustix::fs::OFlags::NONBLOCK.bits() as i32;
    let mut pipe = loop {
        match std::fs::File::options().write(true).custom_flags(flags).open(b.path("pipe")) {
            Ok(pipe) => break pipe,
            Err(e) => assert!(begun.elapsed() < Duration::from_secs(70), "it does not open the pipe: {e}"),
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    rustix::fs::fcntl_setfl(&pipe, rustix::fs::OFlags::empty()).unwrap();
    std::io::Write::write_all(&mut pipe, &whole[..whole.len() / 2]).unwrap();
    let names = || {
        let names = std::fs::read_dir(b.path(".")).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name == "b.img" || name.ends_with(".part")).collect::<Vec<_>>()
    };
    while names().is_empty() {
        assert!(begun.elapsed() < Duration::from_secs(70), "it makes nothing");
        std::thread::sleep(Duration::from_millis(5));
    }
    import.kill().unwrap();
    import.wait().unwrap();
    assert!(!b.path("b.img").exists());
    // the next run is not disturbed, and leaves nothing else
    b.run(&["image", "import", "out.brfs", "b.img"]).ok();
    assert_eq!(names().len(), 2);
    let before = b.read("b.img");
    b.run(&["image", "import", "out.brfs", "b.img"]).fails(1, &["b.img: it exists: remove it first"]);
    b.run(&["image", "export", "a.img", "b.img"]).fails(1, &["b.img: it exists: remove it first"]);
    assert!(b.read("b.img") == before);
    std::fs::write(b.path("cut.brfs"), &whole[..whole.len() / 2]).unwrap();
    b.run(&["image", "import", "cut.brfs", "c.img"]).fails(1, &["cut.brfs"]);
    assert!(!b.path("c.img").exists());
    assert_eq!(names().len(), 2);
}
