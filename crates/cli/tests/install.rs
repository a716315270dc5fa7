//! What `make install` puts where, and that the manual pages are found, read well, and go away again.

mod common;
use common::{Bench, Run, run};
use std::io::{Write as _, stderr};
use std::path::{Path, PathBuf};
use std::process::Command;

const PAGES: [&str; 9] = [
    "braidfs",
    "mkfs.braidfs",
    "mount.braidfs",
    "umount.braidfs",
    "fsck.braidfs",
    "braidfs-mkfs",
    "braidfs-mount",
    "braidfs-info",
    "braidfs-scrub",
];
/// Below the root, where systemd, udev and the shells look.
const BESIDE: [&str; 12] = [
    "lib/udev/rules.d/60-braidfs.rules",
    "lib/systemd/system/braidfs-scrub@.service",
    "lib/systemd/system/braidfs-scrub@.timer",
    "lib/systemd/system/braidfs-fsck@.service",
    "lib/systemd/system/braidfs@.service",
    "usr/share/bash-completion/completions/braidfs",
    "usr/share/bash-completion/completions/fsck.braidfs",
    "usr/share/zsh/site-functions/_mkfs.braidfs",
    "usr/share/fish/vendor_completions.d/braidfs.fish",
    "usr/share/braidfs/magic",
    "usr/share/man/man5/braidfs.5",
    "usr/share/doc/braidfs/tutorials/first-volume.md",
];

fn missing(program: &str) -> bool {
    let missing = Command::new(program).arg("--version").output().is_err();
    if missing {
        _ = writeln!(stderr(), "SKIPPED in part: no {program} here");
    }
    missing
}

/// Runs a target of the Makefile on the binary of this test, which is where `cargo build` puts that.
fn make_with(bench: &Bench, target: &str, cargo: &str) -> Run {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut command = Command::new("make");
    command.args(["--no-print-directory", "--assume-old=build", target, "PREFIX=/usr"]).current_dir(root);
    command.arg(format!("DESTDIR={}", bench.path("root").display())).env("CARGO_TARGET_DIR", bench.path("target"));
    command.arg(format!("CARGO={cargo}")).env_remove("MAKEFLAGS");
    run(&mut command)
}

/// Such a target, which would build first.
fn make(bench: &Bench, target: &str) {
    built(bench);
    make_with(bench, target, env!("CARGO")).ok();
}

fn built(bench: &Bench) {
    let release = bench.path("target/release");
    if !release.exists() {
        std::fs::create_dir_all(&release).unwrap();
        std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_braidfs"), release.join("braidfs")).unwrap();
    }
}

/// All files and links below `dir`.
fn files(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap());
    entries.flat_map(|e| if e.file_type().unwrap().is_dir() { files(&e.path()) } else { vec![e.path()] }).collect()
}

#[test]
fn pages_are_installed_found_and_removed() {
    if missing("make") {
        return;
    }
    let b = Bench::new();
    // of an earlier version
    b.write("root/usr/share/man/man1/braidfs-mkfs.8", "");
    b.write("root/usr/share/man/man1/fsck.braidfs.8", "");
    b.write("root/usr/share/man/man8/other.8", "");
    make(&b, "install");
    let man = b.path("root/usr/share/man");
    assert!(!man.join("man1/braidfs-mkfs.8").exists() && !man.join("man1/fsck.braidfs.8").exists());
    for name in ["mkfs", "mount", "umount", "fsck", "mount.fuse", "mount.fuseblk", "umount.fuse", "umount.fuseblk"] {
        let link = std::fs::read_link(b.path(&format!("root/sbin/{name}.braidfs"))).unwrap();
        assert_eq!(link, Path::new("/usr/bin/braidfs"), "{name}");
    }
    for page in PAGES {
        assert!(man.join(format!("man8/{page}.8")).exists(), "{page}");
    }
    for name in BESIDE {
        let text = std::fs::read_to_string(b.path(&format!("root/{name}"))).unwrap();
        assert!(text.contains("braidfs") && !text.contains("@BINDIR@"), "{name}: {text}");
    }
    if !missing("man") {
        for page in PAGES {
            let found = run(Command::new("man").arg("-M").arg(&man).args(["-w", page])).ok().out;
            assert!(found.trim().ends_with(&format!("man8/{page}.8")), "{page}: {found}");
            let shown = run(Command::new("man").arg("-l").arg(found.trim()).env("MANWIDTH", "80")).ok();
            // dashes and quotes differ by locale
            assert!(shown.out.contains("NAME") && shown.out.contains(page.split('.').next().unwrap()), "{shown:?}");
        }
        let table = run(Command::new("man").arg("-M").arg(&man).arg("mount.braidfs").env("MANWIDTH", "80")).ok().out;
        for option in ["remount", "nodiratime", "lazytime", "dirsync", "_netdev", "comment=", "ignored", "refused"] {
            assert!(table.contains(option), "{option} is missing:\n{table}");
        }
    }
    let docs = files(&b.path("root/usr/share/doc/braidfs"));
    for page in
        docs.iter().filter(|p| p.extension().is_some_and(|e| e == "md") && !p.to_string_lossy().contains("tutorials"))
    {
        let text = std::fs::read_to_string(page).unwrap();
        assert!(!text.contains("](../"), "{}: a link to what is not installed", page.display());
    }
    make(&b, "uninstall");
    assert!(!b.path("root/usr/bin/braidfs").exists() && !b.path("root/sbin/mount.braidfs").exists());
    let root = b.path("root");
    let left: Vec<_> = files(&root).into_iter().map(|p| p.strip_prefix(&root).unwrap().to_path_buf()).collect();
    assert_eq!(left, [Path::new("usr/share/man/man8/other.8")]);
}

#[test]
fn root_installs_what_a_user_built() {
    if missing("make") {
        return;
    }
    let b = Bench::new();
    let install = || make_with(&b, "install", "no-such-cargo");
    let refused = install().code(2);
    assert!(
        refused.err.contains("no-such-cargo is not in the path") && refused.err.contains("run `make build`"),
        "{refused:?}"
    );
    assert!(!b.path("root").exists());
    built(&b);
    let said = install().ok();
    assert!(said.out.contains("so nothing is built"), "{said:?}");
    assert!(b.path("root/usr/bin/braidfs").exists() && b.path("root/sbin/mount.braidfs").symlink_metadata().is_ok());
}

#[test]
fn pages_have_no_warnings() {
    let b = Bench::new();
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let with_date = |seconds| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_braidfs"));
        run(command.arg("man").arg(b.path("man")).env("SOURCE_DATE_EPOCH", seconds))
    };
    with_date("yesterday").fails(1, &["SOURCE_DATE_EPOCH", "yesterday"]);
    with_date("951827696").ok();
    let pages = files(&b.path("man"));
    for page in &pages {
        let text = std::fs::read_to_string(page).unwrap();
        let head = text.lines().find(|l| l.starts_with(".TH")).unwrap();
        assert!(head.contains("2000-02-29"), "{}: {head}", page.display());
        // what a page sends its reader to is installed, and has that name
        for name in text.split(|c: char| c.is_whitespace() || "():,".contains(c)).filter(|w| w.contains(".md")) {
            let name = &name[..name.find(".md").unwrap() + 3];
            assert!(docs.join(name).exists(), "{}: {name}", page.display());
        }
        for section in ["NAME", "EXAMPLES", "SEE ALSO"] {
            assert!(
                text.contains(&format!(".SH {section}")) || text.contains(&format!(".SH \"{section}\"")),
                "{}: no {section}",
                page.display()
            );
        }
        let command = page.extension().is_some_and(|e| e == "8");
        assert!(!command || text.contains("EXIT STATUS"), "{}: no EXIT STATUS", page.display());
        assert!(!text.contains(".SH EXTRA"), "{}", page.display());
    }
    assert!(pages.len() >= PAGES.len());
    if !missing("groff") {
        for page in &pages {
            let warned = run(Command::new("groff").args(["-t", "-man", "-ww", "-z", "-Tutf8"]).arg(page)).ok();
            assert_eq!(warned.err, "", "{}", page.display());
        }
    }
    if Command::new("mandoc").output().is_ok() {
        for page in &pages {
            let warned = run(Command::new("mandoc").args(["-T", "lint", "-W", "warning"]).arg(page)).ok();
            assert_eq!(warned.out, "", "{}", page.display());
        }
    } else {
        _ = writeln!(stderr(), "SKIPPED in part: no mandoc here");
    }
}
