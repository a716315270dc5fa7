//! Wrong command lines: clear messages and the exit codes that other programs know. Nothing here needs a volume.

mod common;
use common::{Bench, run};
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::process::Command;

#[test]
fn help_and_version() {
    let b = Bench::new();
    assert!(b.run(&["--version"]).ok().out.starts_with("braidfs "));
    assert!(b.run(&["--help"]).ok().out.contains("Examples:"));
    for command in
        ["mkfs", "mount", "umount", "fsck", "info", "dump", "ls", "cat", "cp", "rm", "mkdir", "scrub", "stats"]
    {
        assert!(b.run(&[command, "--help"]).ok().out.contains("Example"), "{command}");
    }
}

#[test]
fn usage_has_the_codes_of_each_tool() {
    let b = Bench::new();
    b.run::<&str>(&[]).code(1);
    b.run(&["frobnicate"]).fails(1, &["frobnicate"]);
    b.run(&["mkfs"]).code(1);
    b.run(&["mount", "only-one"]).code(1);
    b.run(&["fsck"]).code(16);
    b.run(&["fsck", "-n", "-y", "x"]).code(16);
    b.run(&["fsck", "--bogus", "x"]).code(16);
    // fsck's 1 means that errors were corrected
    for (command, usage, file) in [
        (&["ls", "x"][..], 1, 1),
        (&["fsck", "x"], 16, 8),
        (&["mount", "x", "y"], 1, 2),
        (&["mount.braidfs", "x", "y"], 1, 2),
        (&["umount", "y"], 1, 2),
    ] {
        let with = |log: [&'static str; 2]| [&log[..], command].concat();
        b.run(&with(["--log", "nonsense=nonsense"])).fails(usage, &["--log", "use error, warn"]);
        b.run(&with(["--log-file", "no/such/log"])).fails(file, &["cannot open the log file", "no such file"]);
    }
}

/// After an upgrade the server would write into the volume that it serves.
#[test]
fn a_log_below_the_mount_point_is_refused() {
    let b = Bench::new();
    std::fs::create_dir(b.path("mnt")).unwrap();
    std::os::unix::fs::symlink("mnt", b.path("link")).unwrap();
    let text = |name: &str| b.path(name).to_str().unwrap().to_owned();
    for file in ["mnt/log", "mnt/below/log", "link/log"] {
        let (place, option) = (text(file), format!("log={}", text(file)));
        b.run(&["--log-file", &place, "mount", "x.img", &text("mnt")]).fails(1, &[file, "name a file elsewhere"]);
        for command in ["mount", "mount.braidfs"] {
            b.run(&[command, "x.img", &text("mnt"), "-o", &option]).fails(1, &[file, "name a file elsewhere"]);
        }
        assert!(!b.path(file).exists());
    }
    // beside it
    b.run(&["--log-file", &text("mnt.log"), "mount", "x.img", &text("mnt")]).fails(32, &["x.img"]);
}

#[test]
fn an_option_that_is_given_again_counts_as_the_last_says() {
    let b = Bench::new();
    b.run(&["mkfs", "-K", "-q", "-K", "--size", "10", "--size", "64M", "--label", "a", "new.img", "--label", "b"]).ok();
    let found = b.run(&["info", "--json", "--json", "new.img"]).ok().out;
    assert!(found.contains("\"b\"") && !found.contains("\"a\""), "{found}");
    b.run(&["fsck", "-f", "-n", "-f", "-n", "new.img"]).ok();
    b.run(&["fsck", "-n", "-n", "-y", "new.img"]).code(16);
}

#[test]
fn mkfs_refuses_what_is_out_of_range() {
    let b = Bench::new();
    for (option, value, part) in [
        ("--domains", "0", "1 to 256"),
        ("--domains", "257", "1 to 256"),
        ("--group-size", "3M", "4M"),
        ("--group-size", "128M", "64M"),
        ("--inline", "3401", "0 to 3400"),
        ("--journal", "1K", "512K"),
        ("--mlogs", "0", "1 to 64"),
        ("--label", "0123456789012345678901234567890123456789012345678901234567890123", "63 bytes"),
        ("--uuid", "00000000-0000-0000-0000-000000000000", "random"),
        ("--size", "33554433", "4096"),
        ("--size", "10", "4096 bytes, and 32 MiB to 16 TiB"),
    ] {
        let mut args = vec!["mkfs", "--size", "64M", option, value, "new.img"];
        if option == "--size" {
            args.drain(1..3);
        }
        b.run(&args).fails(1, &[option, "out of range", part]);
        assert!(!b.path("new.img").exists(), "{option}: an image was left");
    }
    for (option, value) in [("--uuid", "x"), ("--size", "12Q"), ("--placement", "moon"), ("--domains", "many")] {
        b.run(&["mkfs", option, value, "new.img"]).fails(1, &[option]);
    }
    b.run(&["mkfs", "--size", "16M", "new.img"]).fails(1, &["at least 32 MiB"]);
    b.run(&["defrag", "."]).fails(1, &["on no mounted braidfs: give a mount point or a path on one"]);
    b.run(&["mkfs", "--size", "17T", "new.img"]).fails(1, &["at most 16 TiB"]);
    assert!(!b.path("new.img").exists());
}

#[test]
fn mkfs_refuses_devices_that_are_none() {
    let b = Bench::new();
    b.run(&["mkfs", "missing.img"]).fails(1, &["missing.img", "--size"]);
    b.run(&["mkfs", "."]).fails(1, &["image file or a block device"]);
    b.run(&["mkfs", "/dev/null"]).fails(1, &["image file or a block device"]);
    b.sparse("a.img", 64 << 20);
    b.run(&["mkfs", "a.img", "./a.img"]).fails(1, &["twice"]);
    b.run(&["mkfs", "--size", "32M", "a.img"]).fails(1, &["more than --size"]);
    let many: Vec<String> = (0..17).map(|i| format!("d{i}")).collect();
    let args: Vec<&str> = ["mkfs", "--size", "64M"].into_iter().chain(many.iter().map(String::as_str)).collect();
    b.run(&args).fails(1, &["at most 16"]);
    b.run(&["mkfs", "--size", "64M", "no/such/dir.img"]).fails(1, &["dir.img"]);
}

#[test]
fn mkfs_does_not_overwrite_unasked() {
    let b = Bench::new();
    for (name, at, bytes, what) in [
        ("ext.img", 0x438, &b"\x53\xef"[..], "ext2/3/4"),
        ("xfs.img", 0, b"XFSB", "XFS"),
        ("btrfs.img", 0x10040, b"_BHRfS_M", "btrfs"),
        ("swap.img", 4086, b"SWAPSPACE2", "swap"),
        ("luks.img", 0, b"LUKS\xba\xbe", "LUKS"),
        ("gpt.img", 512, b"EFI PART", "GPT"),
        ("text.img", 40 << 20, b"thesis", "holds data (at byte 41943040)"),
    ] {
        b.sparse(name, 64 << 20).write_all_at(bytes, at).unwrap();
        let before = b.read(name);
        b.run(&["mkfs", name]).fails(1, &[name, what, "--force"]);
        assert_eq!(b.read(name), before, "{name} was changed");
    }
}

#[test]
fn mount_options_are_checked() {
    let b = Bench::new();
    for (list, part) in [
        ("bogus", "unknown: leave it out; mount.braidfs(8) lists"),
        ("errors=remount-ro", "unknown: leave it out"),
        ("data=fast", "ordered, journal or writeback"),
        ("commit=900", "1 to 300"),
        ("offset=4096", "losetup"),
        ("user_id=0", "leave it out"),
        ("threads=", "needs a value"),
    ] {
        b.run(&["mount", "-o", list, "vol.img", "."]).fails(1, &["option", part]);
    }
    b.run(&["mount", "-o", "remount,ro", "."]).fails(32, &["nothing is mounted there", "fuse.braidfs,fuseblk.braidfs"]);
    b.run(&["mount", "--commit", "0", "vol.img", "."]).code(1);
    b.run(&["mount", "missing.img", "."]).fails(32, &["missing.img", "check the path"]);
    b.sparse("a.img", 64 << 20);
    b.run(&["mount", "a.img", "no/such/dir"]).fails(32, &["no/such/dir", "make it with mkdir"]);
    b.run(&["mount", "a.img", "a.img"]).fails(32, &["not a directory"]);
}

#[test]
fn helper_names_work() {
    let b = Bench::new();
    let as_name = |name: &str, args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_braidfs"));
        run(command.arg0(name).args(args).current_dir(b.path("")))
    };
    as_name("/sbin/mkfs.braidfs", &["missing.img"]).fails(1, &["missing.img"]);
    as_name("fsck.braidfs", &["-a", "-C0", "missing.img"]).fails(8, &["missing.img"]);
    as_name("mount.braidfs", &["missing.img", ".", "-o", "rw,bogus"]).fails(1, &["bogus"]);
    as_name("mount.braidfs", &["missing.img", ".", "-s", "-o", "rw,bogus"]).fails(32, &["missing.img"]);
    as_name("mount.braidfs", &["missing.img", ".", "-f", "-n", "-o", "noatime,x-mount.mkdir"]).ok();
    as_name("umount.braidfs", &["."]).fails(32, &["nothing is mounted there"]);
    // as mount(8) does it for ext4
    let silent = as_name("mount.braidfs", &["missing.img", ".", "-o", "nofail"]).ok();
    assert_eq!((&*silent.out, &*silent.err), ("", ""));
    as_name("fsck.braidfs", &["-C", "0", "-f", "missing.img"]).fails(8, &["missing.img"]);
    as_name("mkfs.braidfs", &["missing.img", "65536"]).fails(1, &["65536", "mkfs(8)", "--size 64M"]);
    for name in ["mkfs.braidfs", "mount.braidfs", "umount.braidfs", "fsck.braidfs"] {
        assert_eq!(as_name(name, &["-V"]).ok().out, concat!("braidfs ", env!("CARGO_PKG_VERSION"), "\n"), "{name}");
    }
}

#[test]
fn what_is_no_level_is_refused() {
    let b = Bench::new();
    b.run(&["--log", "inf", "ls", "x"]).fails(1, &["--log", "inf: use error, warn, info"]);
    let mut command = Command::new(env!("CARGO_BIN_EXE_braidfs"));
    command.args(["fsck", "x"]).current_dir(b.path("")).env("BRAIDFS_LOG", "wran").env_remove("BRAIDFS_LOG_FILE");
    let said = command.output().unwrap();
    assert_eq!(said.status.code(), Some(16));
    assert!(String::from_utf8_lossy(&said.stderr).contains("wran: use error, warn, info"), "{said:?}");
}

#[test]
fn sizes_are_positive() {
    let b = Bench::with_volume();
    b.run(&["mkfs", "--size", "-5", "new.img"]).fails(1, &["a size is positive"]);
    b.run(&["resize", "vol.img", "-5"]).fails(1, &["a size is positive"]);
    b.run(&["resize", "vol.img", "-5G", "-q"]).fails(1, &["a size is positive"]);
    b.run(&["resize", "-q", "vol.img", "1M"]).fails(1, &["the least size is", "MiB)"]);
    b.run(&["resize", "--json", "vol.img"]).ok();
}

#[test]
fn umount_leaves_others_alone() {
    let b = Bench::new();
    b.run(&["umount", "/proc"]).fails(32, &["proc is mounted there, not braidfs"]);
    b.run(&["umount", "missing"]).fails(32, &["nothing is mounted there", "fuse.braidfs,fuseblk.braidfs"]);
    b.run(&["upgrade", "missing"]).fails(32, &["nothing is mounted there", "fuse.braidfs,fuseblk.braidfs"]);
}

#[test]
fn paths_of_cp_are_checked() {
    let b = Bench::new();
    b.write("a", "x");
    b.run(&["cp", "a", "b"]).fails(1, &["DEVICE:PATH"]);
    b.run(&["cp", "a", "missing.img:/a"]).fails(1, &["missing.img"]);
    b.run(&["cp", "a"]).code(1);
    b.run(&["cat", "missing.img"]).fails(1, &["no path given"]);
    b.run(&["rm", "missing.img"]).fails(1, &["no path given"]);
    b.run(&["dump", "nonsense", "missing.img"]).fails(1, &["super, bat"]);
    b.run(&["mkdir", "-m", "999", "missing.img", "/x"]).fails(1, &["octal"]);
}

#[test]
fn manual_pages_are_written() {
    let b = Bench::new();
    b.run(&["man", "pages"]).ok();
    let page = String::from_utf8(b.read("pages/man8/braidfs-mkfs.8")).unwrap();
    assert!(page.contains(".TH") && page.contains("domains"), "{page}");
    assert!(b.path("pages/man8/braidfs.8").exists() && !b.path("pages/braidfs-man.8").exists());
    assert!(page.contains(r"[\fB\-\-size\fR\ \fIBYTES\fR]") && page.contains(r" \fIDEVICE...\fR"), "{page}");
    assert!(page.contains("BRAIDFS_LOG"), "{page}");
    let fsck = String::from_utf8(b.read("pages/man8/fsck.braidfs.8")).unwrap();
    assert!(fsck.contains(r"[\fB\-p\fR]") && fsck.contains(r"[also \-a, \-\-auto]"), "{fsck}");
    // a directory that is there was meant
    b.run(&["man", "no/such"]).fails(1, &["no/such", "no such file"]);
    assert!(!b.path("no").exists());
}

/// Whether the page has the option, as one of its own or in the text of a command.
fn describes(page: &str, option: &str) -> bool {
    let tagged =
        |line: &str| line.starts_with("\\fB") && line.contains(&format!("\\fB{}\\fR", option.replace('-', "\\-")));
    page.lines().zip(page.lines().skip(1)).any(|(before, line)| before == ".TP" && tagged(line))
}

#[test]
fn manual_pages_have_all_options_of_all_commands() {
    let b = Bench::new();
    b.run(&["man", "pages"]).ok();
    let commands = |help: &str| -> Vec<String> {
        let list = help.split_once("\nCommands:\n").map_or("", |(_, rest)| rest.split("\n\n").next().unwrap());
        // a name is two columns from the left; what it does goes on further in
        let names = list.lines().filter(|l| l.starts_with("  ") && !l.starts_with("   "));
        names.map(|l| l.split_whitespace().next().unwrap().to_string()).filter(|name| name != "help").collect()
    };
    let mut nested = 0;
    for command in commands(&b.run(&["--help"]).ok().out) {
        let page = String::from_utf8(b.read(&format!("pages/man8/braidfs-{command}.8"))).unwrap();
        let help = b.run(&[&command, "--help"]).ok().out;
        let subs = commands(&help);
        let helps = subs.iter().map(|sub| b.run(&[&command, sub, "--help"]).ok().out).chain([help.clone()]);
        for help in helps {
            // what they do goes on further in
            let options = help.lines().filter(|l| l.starts_with("  -") || l.starts_with("      --"));
            let long = options.filter_map(|l| l.split([' ', ',', '[', '=']).find(|w| w.starts_with("--")));
            for option in long {
                assert!(describes(&page, option), "{command}: {option}\n{page}");
                nested += usize::from(!subs.is_empty());
            }
        }
        // 32 is mount(8)'s and umount(8)'s own
        let fails_as_mount = page.contains("\n\\fB0\\fR\n") && page.contains("\n\\fB32\\fR\n");
        assert_eq!(fails_as_mount, ["mount", "umount", "upgrade"].contains(&&*command), "{command}\n{page}");
        for sub in subs {
            assert!(page.contains(&format!("\n.SS {sub}\n")), "{command} {sub}");
        }
    }
    assert!(nested > 100, "{nested}");
}
