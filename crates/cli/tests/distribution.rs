//! What a distribution ships beside the command: `probe` for udev, completions, units, the line for file(1), fstab.
//! `scripts/mount_tests/distribution.py` has what needs root.

mod common;
use common::{Bench, run};
use std::collections::HashMap;
use std::io::{Write as _, stderr};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

const SHELLS: [&str; 3] = ["bash", "zsh", "fish"];

fn missing(program: &str) -> bool {
    let missing = Command::new(program).arg("--version").output().is_err();
    if missing {
        _ = writeln!(stderr(), "SKIPPED in part: no {program} here");
    }
    missing
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn properties(text: &str) -> HashMap<&str, &str> {
    text.lines().map(|l| l.split_once('=').unwrap_or_else(|| panic!("`{l}` is no property"))).collect()
}

#[test]
fn probe_names_a_volume_and_nothing_else() {
    let b = Bench::new();
    let uuid = "0f0e0d0c-0b0a-0908-0706-050403020100";
    b.run(&["mkfs", "-q", "--size", "64M", "-L", "my disk", "-U", uuid, "one.img", "two.img"]).ok();
    let one = b.run(&["probe", "--udev", "one.img"]).ok().out;
    let (first, second) = (properties(&one), b.run(&["probe", "--udev", "two.img"]).ok().out);
    let second = properties(&second);
    let wanted = [
        ("TYPE", "braidfs"),
        ("USAGE", "filesystem"),
        ("UUID", uuid),
        ("UUID_ENC", uuid),
        ("LABEL", "my_disk"),
        ("LABEL_ENC", "my\\x20disk"),
        ("BLOCKSIZE", "4096"),
    ];
    for (name, value) in wanted {
        let name = format!("ID_FS_{name}");
        assert_eq!((first[&*name], second[&*name]), (value, value), "{name}");
    }
    assert_ne!(first["ID_FS_UUID_SUB"], second["ID_FS_UUID_SUB"]);
    let info: serde_json::Value =
        serde_json::from_str(&b.run(&["info", "--json", "one.img", "two.img"]).ok().out).unwrap();
    assert_eq!(info["devices"][0]["uuid"], first["ID_FS_UUID_SUB"]);
    assert_eq!(info["bytes"].to_string(), first["ID_FS_SIZE"]);
    assert_eq!(info["format_version"].to_string(), first["ID_FS_VERSION"]);
    let shown = b.run(&["probe", "one.img"]).ok().out;
    assert!(shown.contains(&format!("\nUUID={uuid}\n")) && shown.contains("\nTYPE=braidfs\n"), "{shown}");
}

#[test]
fn probe_says_no_and_does_not_wait() {
    let b = Bench::with_volume();
    b.write("empty", "");
    b.write("short", &b.read("vol.img")[..4095]);
    b.write("text", vec![b'B'; 100_000]);
    for name in ["empty", "short", "text", "/dev/null"] {
        let expected = if name == "/dev/null" { 1 } else { 2 };
        let said = b.run(&["probe", "--udev", name]).code(expected);
        assert_eq!(said.out, "", "{name}");
    }
    for name in ["no/such", "."] {
        b.run(&["probe", name]).fails(1, &["cannot read", name]);
    }
    assert!(Command::new("mkfifo").arg(b.path("fifo")).status().unwrap().success());
    // open(2) without O_NONBLOCK waits here for a writer that never comes
    let mut probe = Command::new("timeout");
    probe.args(["60", env!("CARGO_BIN_EXE_braidfs"), "probe"]).arg(b.path("fifo"));
    run(&mut probe).fails(1, &["neither a block device nor a file"]);
}

#[test]
fn probe_survives_every_byte() {
    let b = Bench::with_volume();
    let good = b.read("vol.img")[..4096].to_vec();
    let mut rng = fastrand::Rng::with_seed(17);
    for round in 0..60 {
        let mut bad = good.clone();
        for _ in 0..=rng.usize(..8) {
            bad[rng.usize(..1300)] = rng.u8(..);
        }
        // behind a right checksum in half of the rounds
        if round % 2 == 0 {
            bad[..4].copy_from_slice(b"BRFS");
            bad[4..8].fill(0);
            let crc = braidfs_format::block::checksum(&bad);
            bad[4..8].copy_from_slice(&crc.to_le_bytes());
        }
        b.sparse("bad.img", 1 << 20).write_all_at(&bad, 0).unwrap();
        let said = b.run(&["probe", "--udev", "bad.img"]);
        assert!(said.code == 0 || said.code == 2 && said.out.is_empty(), "{said:?}");
        properties(&said.out);
    }
}

#[test]
fn shells_complete_commands_and_options() {
    let b = Bench::new();
    for shell in SHELLS {
        for helper in [None, Some("mkfs.braidfs"), Some("umount.braidfs"), Some("fsck.braidfs")] {
            let args: Vec<&str> = ["completions", shell].into_iter().chain(helper).collect();
            let script = b.run(&args).ok().out;
            let name = helper.unwrap_or("braidfs");
            let option = if name.starts_with("umount") { "timeout" } else { "json" };
            assert!(script.contains(name) && script.contains(option), "{shell} {name}: {script}");
            assert!(
                !script.contains("mount.braidfs") || name == "umount.braidfs",
                "{shell}: hidden commands are offered"
            );
            b.write(&format!("{name}.{shell}"), script);
        }
    }
    b.run(&["completions", "tcsh"]).fails(1, &["tcsh"]);
    let complete = |words: &str, function: &str, file: &str| {
        let script = format!(
            ". ./{file}; COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); \
             {function} ${{COMP_WORDS[0]}} \"${{COMP_WORDS[COMP_CWORD]}}\" \"${{COMP_WORDS[COMP_CWORD - 1]}}\"; \
             printf '%s\\n' \"${{COMPREPLY[@]}}\""
        );
        run(Command::new("bash").args(["--norc", "-ec", &script]).current_dir(b.path(""))).ok().out
    };
    if !missing("bash") {
        let offered = complete("braidfs sc", "_braidfs", "braidfs.bash");
        assert_eq!(offered.trim(), "scrub");
        assert_eq!(complete("braidfs scrub --no", "_braidfs", "braidfs.bash").trim(), "--no-data");
        let offered = complete("fsck.braidfs --fo", "_fsck.braidfs", "fsck.braidfs.bash");
        assert_eq!(offered.trim(), "--force");
    }
    for (shell, check) in [("zsh", "-n"), ("fish", "--no-execute")] {
        if !missing(shell) {
            run(Command::new(shell).arg(check).arg(format!("braidfs.{shell}")).current_dir(b.path(""))).ok();
        }
    }
}

/// The units as `make install` writes them, for the program that is tested.
fn units(b: &Bench) -> Vec<PathBuf> {
    let program = Path::new(env!("CARGO_BIN_EXE_braidfs")).parent().unwrap().display().to_string();
    let mut units = Vec::new();
    for entry in std::fs::read_dir(root().join("dist/systemd")).unwrap() {
        let path = entry.unwrap().path();
        let text = std::fs::read_to_string(&path).unwrap().replace("@BINDIR@", &program);
        let name = path.file_name().unwrap().to_str().unwrap().trim_end_matches(".in");
        b.write(&format!("units/{name}"), text);
        units.push(b.path(&format!("units/{name}")));
    }
    units
}

#[test]
fn units_are_what_systemd_takes() {
    let b = Bench::new();
    let units = units(&b);
    assert_eq!(units.len(), 4);
    if missing("systemd-analyze") {
        return;
    }
    for unit in units {
        let said = run(Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&unit)).ok();
        // of our units only: the host's may be odd
        let own: Vec<_> = said.err.lines().filter(|l| l.contains("braidfs")).collect();
        assert!(own.is_empty(), "{}: {own:#?}", unit.display());
    }
}

#[test]
fn commands_of_units_and_of_the_rule_run() {
    let b = Bench::with_volume();
    let of = |file: &str, key: &str| -> Vec<String> {
        let text = std::fs::read_to_string(root().join("dist").join(file)).unwrap();
        let line = text.lines().find_map(|l| l.strip_prefix(key)).unwrap_or_else(|| panic!("{file} has no {key}"));
        let image = b.path("vol.img").display().to_string();
        let line = line.trim_matches('"').replace("%f", &image).replace("$devnode", &image);
        let mut words = line.split(' ').map(String::from);
        assert_eq!(words.next().as_deref(), Some("@BINDIR@/braidfs"));
        words.collect()
    };
    assert_eq!(b.run(&of("systemd/braidfs-scrub@.service.in", "ExecStart=")).ok().out, "");
    assert_eq!(b.run(&of("systemd/braidfs-fsck@.service.in", "ExecStart=")).ok().out, "");
    let said = b.run(&of("udev/60-braidfs.rules.in", "IMPORT{program}=")).ok().out;
    assert_eq!(properties(&said)["ID_FS_TYPE"], "braidfs");
}

#[test]
fn file_knows_a_volume() {
    if missing("file") {
        return;
    }
    let b = Bench::new();
    b.run(&["mkfs", "-q", "--size", "64M", "-L", "my disk", "vol.img"]).ok();
    b.run(&["mkfs", "-q", "--size", "64M", "a.img", "b.img"]).ok();
    let magic = root().join("dist/magic");
    let file = |name: &str| run(Command::new("file").arg("-b").arg("-m").arg(&magic).arg(b.path(name))).ok().out;
    let shown = b.run(&["probe", "vol.img"]).ok().out;
    let uuid = properties(&shown)["UUID"].to_string();
    assert_eq!(file("vol.img").trim(), format!("braidfs file system, format 3, UUID {uuid}, label \"my disk\""));
    assert!(file("b.img").contains(", a device of 2, UUID "), "{}", file("b.img"));
    // other blocks of it begin with the same magic, the replica of the superblock among them
    let image = b.read("vol.img");
    let mut kinds = HashMap::new();
    for block in image.chunks(4096).skip(1).filter(|c| c.starts_with(b"BRFS")) {
        kinds.insert(block[8], block);
    }
    assert!(kinds.len() > 5 && kinds.contains_key(&1), "{:?}", kinds.keys());
    for (kind, block) in kinds {
        b.write("other", block);
        assert!(!file("other").contains("braidfs"), "{kind}: {}", file("other"));
    }
}

#[test]
fn systemd_makes_a_mount_of_an_fstab_line() {
    let generator = "/usr/lib/systemd/system-generators/systemd-fstab-generator";
    if !Path::new(generator).exists() {
        _ = writeln!(stderr(), "SKIPPED: no {generator} here");
        return;
    }
    let b = Bench::new();
    b.write(
        "fstab",
        "/dev/disk/by-uuid/aa /a braidfs noatime 0 2\n\
         /srv/disk.img /b braidfs x-systemd.mount-timeout=1h,x-systemd.requires=braidfs-fsck@srv-disk.img.service 0 0\n",
    );
    for dir in ["n", "e", "l"] {
        std::fs::create_dir(b.path(dir)).unwrap();
    }
    let mut command = Command::new(generator);
    command.args(["n", "e", "l"]).current_dir(b.path("")).env("SYSTEMD_FSTAB", b.path("fstab"));
    run(&mut command).ok();
    let a = String::from_utf8(b.read("n/a.mount")).unwrap();
    assert!(a.contains("\nType=braidfs\nOptions=noatime\n"), "{a}");
    let image = String::from_utf8(b.read("n/b.mount")).unwrap();
    assert!(image.contains("TimeoutSec=1h\n"), "{image}");
    assert!(
        image.contains("What=/srv/disk.img\n") && image.contains("After=braidfs-fsck@srv-disk.img.service"),
        "{image}"
    );
}
