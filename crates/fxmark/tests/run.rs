//! The program as users run it: every test on a directory, failing targets, interruption, comparison.

use serde_json::Value;
use std::io::{Write as _, stderr};
use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

fn fxmark() -> Command {
    Command::new(env!("CARGO_BIN_EXE_fxmark"))
}

fn text(out: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr))
}

/// Runs `tests` on directory `on`, short; results go to `dir`.
fn run(dir: &Path, on: &Path, tests: &str, more: &[&str]) -> Output {
    let mut c = fxmark();
    c.args(["--quick", "--warm-up", "0.005", "--files", "50", "--cores", "1", "--tests", tests]);
    if !more.contains(&"--seconds") {
        c.args(["--seconds", "0.02"]);
    }
    c.arg("-t").arg(on).arg("-o").arg(dir.join("out.json")).args(more);
    c.output().expect("the program starts")
}

fn results(dir: &Path) -> Value {
    let text = std::fs::read(dir.join("out.json")).expect("results");
    serde_json::from_slice(&text).expect("JSON")
}

fn is_empty(dir: &Path) -> bool {
    std::fs::read_dir(dir).expect("a directory").next().is_none()
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

#[test]
fn every_test_runs_on_a_directory() {
    let (dir, on) = (tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("a directory"));
    let out = run(dir.path(), on.path(), "micro,bg,commit,apps,papers", &[]);
    assert!(out.status.success(), "{}", text(&out));
    let r = results(dir.path());
    assert_eq!((r["schema"].as_str(), r["version"].as_u64()), (Some("fxmark-results"), Some(1)));
    let runs = r["runs"].as_array().expect("runs");
    let skipped = r["skipped"].as_array().expect("a list");
    // 19, 9 with a background writer, 4 with one that commits, 12 applications, 7 of papers
    assert_eq!(runs.len() + skipped.len(), 51, "{}", text(&out));
    for run in runs {
        assert!(run["ops"].as_u64().expect("a number") > 0, "{run}");
        assert!(run["latency"]["p50"].as_u64().expect("a number") > 0, "{run}");
        let name = run["test"].as_str().expect("a name");
        assert_eq!(name.ends_with("_bg") || name.ends_with("_commit"), run["background"].is_f64(), "{run}");
        assert!(run["memory"]["process"].is_null() && run["memory"]["kernel"].is_u64(), "{run}");
    }
    assert!(is_empty(on.path()), "something is left");
}

#[test]
fn overwrites_are_told_over_time() {
    let (dir, on) = (tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("a directory"));
    let more =
        ["--seconds", "0.5", "--window", "0.1", "--size", "64M", "--fill", "25", "--fsync-every", "10", "--nocow"];
    let out = run(dir.path(), on.path(), "aged_overwrite", &more);
    assert!(out.status.success(), "{}", text(&out));
    assert!(text(&out).contains("over time: aged_overwrite"), "{}", text(&out));
    let r = results(dir.path());
    assert_eq!(r["plan"]["scale"]["aged"]["bytes"].as_u64(), Some((64 << 20) / 100 * 25));
    for run in r["runs"].as_array().expect("runs") {
        let windows = run["windows"].as_array().expect("a list");
        // one fsync on a busy machine may end long after the half second
        let most = (run["secs"].as_f64().expect("a number") / 0.1).ceil() as usize;
        assert!((3..=most).contains(&windows.len()), "{run}");
        let ops: u64 = windows.iter().map(|w| w["ops"].as_u64().expect("a number")).sum();
        assert!(ops > 0 && ops <= run["ops"].as_u64().expect("a number"), "{run}");
    }
    assert!(is_empty(on.path()));
}

#[test]
fn sizes_are_what_was_asked_for() {
    let (dir, on) = (tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("a directory"));
    let more = ["--file-size", "256K", "--request", "64K", "--size", "8M", "--seconds", "0.05"];
    let out = fxmark()
        .args(["--quick", "--cores", "1", "--tests", "kfsmark,write_seq,write_rand"])
        .args(more)
        .arg("-t")
        .arg(on.path())
        .arg("-o")
        .arg(dir.path().join("out.json"))
        .output()
        .expect("the program starts");
    assert!(out.status.success(), "{}", text(&out));
    let r = results(dir.path());
    // a quarter of 8 MiB
    assert_eq!(r["plan"]["scale"]["files"].as_u64(), Some(8));
    assert_eq!(r["plan"]["scale"]["sizes"]["request"].as_u64(), Some(64 << 10));
    let phases = |test: &str| {
        let run = r["runs"].as_array().expect("runs").iter().find(|r| r["test"] == test).expect("a run");
        (run["ops"].as_u64().expect("a number"), run["phases"].as_u64().expect("a number"))
    };
    // four requests use the file up, eight files the set
    for (test, most) in [("write_seq", 4), ("kfsmark", 8)] {
        let (ops, phases) = phases(test);
        assert!(ops > 0 && ops <= most * phases, "{test}: {ops} in {phases}");
    }
    assert_eq!(phases("write_rand").1, 1);
    assert!(is_empty(on.path()));
}

#[test]
fn a_load_begins_on_what_is_full() {
    if !is_root() {
        _ = writeln!(stderr(), "SKIPPED: mounting needs root");
        return;
    }
    let (dir, tiny) = (tempfile::tempdir().expect("a directory"), Tiny::new("size=400m"));
    let mut child = fxmark()
        .args(["--quick", "--cores", "1", "--tests", "varmail", "--full", "90", "--seconds", "3", "--warm-up", "0"])
        .arg("-t")
        .arg(tiny.0.path())
        .arg("-o")
        .arg(dir.path().join("out.json"))
        .stderr(std::process::Stdio::null())
        .stdout(std::process::Stdio::null())
        .spawn()
        .expect("the program starts");
    let used = || {
        let s = rustix::fs::statvfs(tiny.0.path()).expect("statvfs");
        100 * (s.f_blocks - s.f_bavail) / s.f_blocks
    };
    let mut most = 0;
    while child.try_wait().expect("it runs").is_none() {
        most = most.max(used());
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(child.wait().expect("it ends").success());
    // the load's own files grow meanwhile
    assert!((88..=96).contains(&most), "{most} %");
    assert!(is_empty(tiny.0.path()), "something is left");
}

#[test]
fn original_mode_has_no_latencies() {
    let (dir, on) = (tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("a directory"));
    let out = run(dir.path(), on.path(), "DRBL,DWAL,MRPM,MRDL,MWCM,MWRM", &["--mode", "original"]);
    assert!(out.status.success(), "{}", text(&out));
    let r = results(dir.path());
    assert!(r["runs"].as_array().expect("runs").iter().all(|r| r["latency"].is_null()));
    assert!(is_empty(on.path()));
}

/// A tmpfs that is full after a moment; unmounted when dropped.
struct Tiny(tempfile::TempDir);

impl Tiny {
    fn new(options: &str) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let mount = Command::new("mount").args(["-t", "tmpfs", "-o", options, "tmpfs"]).arg(dir.path()).status();
        assert!(mount.expect("mount starts").success());
        Self(dir)
    }
}

impl Drop for Tiny {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(self.0.path()).status();
    }
}

#[test]
fn a_full_target_fails_the_run() {
    if !is_root() {
        _ = writeln!(stderr(), "SKIPPED: mounting needs root");
        return;
    }
    // no room for the blocks, no room for the files, no room even for setting up
    for (options, test, said) in [
        ("size=1m", "DWAL", "append"),
        ("nr_inodes=30", "MWCL", "open"),
        ("size=1m", "DWTL", "pwrite"),
        ("size=64k", "varmail", "pwrite"),
    ] {
        let tiny = Tiny::new(options);
        let dir = tempfile::tempdir().expect("a directory");
        let out = run(dir.path(), tiny.0.path(), test, &["--seconds", "0.3"]);
        assert_eq!(out.status.code(), Some(1), "{test}: {}", text(&out));
        let err = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(err.contains("No space left") && err.contains(said) && err.contains(test), "{test}: {err}");
        assert!(!dir.path().join("out.json").exists(), "a failed run has results");
        assert!(is_empty(tiny.0.path()), "{test}: something is left");
    }
}

#[test]
fn no_space_is_counted_where_a_volume_ages() {
    if !is_root() {
        _ = writeln!(stderr(), "SKIPPED: mounting needs root");
        return;
    }
    // df offers more than there is room for names
    let tiny = Tiny::new("size=32m,nr_inodes=300");
    let out = fxmark()
        .args(["aging", "--loads", "churn", "--fill", "95", "--times", "1", "--slices", "2", "--size", "32M", "--json"])
        .args(["--largest", "1M", "-t"])
        .arg(tiny.0.path())
        .output();
    let out = out.expect("the program starts");
    assert!(out.status.success(), "{}", text(&out));
    let r: Value = serde_json::from_slice(&out.stdout).expect("JSON");
    let v = &r["volumes"][0];
    assert!(v["notes"][0].as_str().is_some_and(|n| n.starts_with("no space for more than")), "{v}");
    let none: u64 =
        v["slices"].as_array().expect("slices").iter().map(|s| s["no_space"].as_u64().expect("a number")).sum();
    assert!(none > 0, "{v}");
    assert!(is_empty(tiny.0.path()), "something is left");
}

#[test]
fn a_target_that_is_read_only_fails_the_run() {
    if !is_root() {
        _ = writeln!(stderr(), "SKIPPED: mounting needs root");
        return;
    }
    let tiny = Tiny::new("ro");
    let dir = tempfile::tempdir().expect("a directory");
    let out = run(dir.path(), tiny.0.path(), "DRBL", &[]);
    assert_eq!(out.status.code(), Some(1), "{}", text(&out));
    assert!(text(&out).contains("Read-only"), "{}", text(&out));
}

#[test]
fn interrupted_it_cleans_up() {
    let (dir, on) = (tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("a directory"));
    let mut c = fxmark();
    c.args(["--quick", "--seconds", "60", "--cores", "1", "--tests", "DWOL", "-t"]).arg(on.path());
    let mut child = c.arg("-o").arg(dir.path().join("out.json")).spawn().expect("the program starts");
    let until = std::time::Instant::now() + Duration::from_secs(20);
    while is_empty(on.path()) && std::time::Instant::now() < until {
        std::thread::sleep(Duration::from_millis(5));
    }
    let pid = rustix::process::Pid::from_raw(child.id() as i32).expect("a process");
    rustix::process::kill_process(pid, rustix::process::Signal::INT).expect("it runs");
    let status = child.wait().expect("it ends");
    assert_eq!(status.code(), Some(130));
    assert!(is_empty(on.path()), "something is left");
    assert!(!dir.path().join("out.json").exists());
}

#[test]
fn wrong_usage_says_what_to_do() {
    for (args, said) in [
        (&["--tests", "DRBX", "-t", "/tmp"][..], "no test `DRBX`"),
        (&["-t", "ntfs"], "no target `ntfs`"),
        (&["-t", "/tmp", "--cores", "0"], "--cores 0"),
        (&["-t", "/tmp", "--cpus", "99999999"], "CPU"),
        (&["--device", "/dev/null", "-t", "ext4"], "--force"),
        (&["-t", "/tmp", "--partitions", "--cores", "2"], "--partitions"),
        (&["-t", "/tmp", "--file-size", "4K", "--request", "8K"], "--request"),
        (&["figures", "fast18-99"], "fast18-99"),
        (&["compare", "/dev/null", "/dev/null"], "/dev/null"),
        (&["aging", "-t", "tmpfs"], "tmpfs"),
        (&["aging", "-t", "/tmp", "--times", "0"], "--times"),
        (&["aging", "--from", "/dev/null"], "/dev/null"),
    ] {
        let out = fxmark().args(args).output().expect("the program starts");
        assert!(!out.status.success(), "{args:?}");
        assert!(text(&out).contains(said), "{args:?}: {}", text(&out));
    }
}

#[test]
fn two_runs_compare() {
    let (dir, on) = (tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("a directory"));
    let out = run(dir.path(), on.path(), "DRBL", &["--reps", "5"]);
    assert!(out.status.success(), "{}", text(&out));
    let mut r = results(dir.path());
    for run in r["runs"].as_array_mut().expect("runs") {
        run["throughput"] = (run["throughput"].as_f64().expect("a number") * 100.0).into();
    }
    let (a, b) = (dir.path().join("out.json"), dir.path().join("b.json"));
    std::fs::write(&b, r.to_string()).expect("a file");
    let out = fxmark().arg("compare").args([&a, &b]).args(["--json", "--fail-over", "50"]).output().expect("it starts");
    assert_eq!(out.status.code(), Some(3), "{}", text(&out));
    let all: Value = serde_json::from_slice(&out.stdout).expect("JSON");
    assert!((all[0]["ratio"].as_f64().expect("a ratio") - 100.0).abs() < 1e-6);
    assert_eq!(all[0]["significant"], true);
    let same = fxmark().arg("compare").args([&a, &a]).args(["--fail-over", "50"]).output().expect("it starts");
    assert!(same.status.success(), "{}", text(&same));
    r["version"] = 99.into();
    std::fs::write(&b, r.to_string()).expect("a file");
    let newer = fxmark().arg("compare").args([&a, &b]).output().expect("it starts");
    assert!(!newer.status.success() && text(&newer).contains("99"), "{}", text(&newer));
}

#[test]
fn reports_are_whole() {
    let (dir, on) = (tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("a directory"));
    let out = run(dir.path(), on.path(), "DRBL,MWCL,tenant,tenant_bg", &["--reps", "2"]);
    assert!(out.status.success(), "{}", text(&out));
    let (json, html) = (dir.path().join("out.json"), dir.path().join("out.html"));
    let out = fxmark().arg("report").arg(&json).output().expect("the program starts");
    assert!(out.status.success(), "{}", text(&out));
    let page = std::fs::read_to_string(&html).expect("a page");
    // nothing is loaded from elsewhere
    for outside in ["src=", "href=", "http", "@import", "url("] {
        assert!(!page.contains(outside), "{outside}");
    }
    for part in ["Throughput of DRBL", "Latency of MWCL", "<h2>Isolation", "All figures"] {
        assert!(page.contains(part), "{part}");
    }
    for bad in ["NaN", "inf"] {
        assert!(
            !page.split("<svg").skip(1).any(|s| s.split("</svg>").next().is_some_and(|s| s.contains(bad))),
            "{bad}"
        );
    }
    assert_eq!(page.matches("<svg").count(), page.matches("</svg>").count());
    let md = dir.path().join("page.md");
    std::fs::write(&md, "before\n<!-- fxmark:begin -->\nold\n<!-- fxmark:end -->\nafter\n").expect("a file");
    let out = fxmark().arg("report").arg(&json).arg("--into").arg(&md).output().expect("the program starts");
    assert!(out.status.success(), "{}", text(&out));
    let page = std::fs::read_to_string(&md).expect("a page");
    assert!(page.starts_with("before\n") && page.ends_with("<!-- fxmark:end -->\nafter\n") && !page.contains("old"));
    assert!(page.contains("| DRBL | 1 |") && page.contains("| target | alone /s |"), "{page}");
}
