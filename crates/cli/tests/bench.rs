//! `braidfs bench`: the benchmark starts its own workers and, as root, a mounted and an in-process braidfs.

mod common;

use common::braidfs_in;
use std::io::{Write as _, stderr};
use std::path::Path;

fn run(dir: &Path, args: &[&str]) -> serde_json::Value {
    let all = ["bench", "--quick", "--seconds", "0.02", "--files", "50", "--cores", "1", "-o", "out.json"];
    braidfs_in(dir, &[&all[..], args].concat()).ok();
    serde_json::from_slice(&std::fs::read(dir.join("out.json")).expect("results")).expect("JSON")
}

/// Whether file systems can be made and mounted here.
fn can_mount() -> bool {
    rustix::process::geteuid().is_root() && Path::new("/dev/loop-control").exists() && Path::new("/dev/fuse").exists()
}

#[test]
fn a_directory_is_measured() {
    let dir = tempfile::tempdir().expect("a directory");
    let target = format!("{}/", dir.path().display());
    let r = run(dir.path(), &["-t", &target, "--tests", "DRBL,MWCL"]);
    assert_eq!(r["runs"].as_array().expect("runs").len(), 2);
}

#[test]
fn braidfs_is_measured_mounted_and_in_process() {
    if !can_mount() {
        _ = writeln!(stderr(), "SKIPPED: needs root, /dev/loop-control and /dev/fuse");
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let image_dir = dir.path().to_str().expect("UTF-8");
    let args = ["-t", "braidfs,library", "--size", "128M", "--image-dir", image_dir, "--tests", "DWSL,MWCM,MRDL,mail"];
    let r = run(dir.path(), &args);
    let runs = r["runs"].as_array().expect("runs");
    assert_eq!(runs.len(), 8);
    assert!(runs.iter().all(|r| r["disk"].is_object()), "no device counters");
    // the image is unlinked, only the results are left
    assert_eq!(std::fs::read_dir(dir.path()).expect("a directory").count(), 1);
}

#[test]
fn single_operations_are_timed() {
    let dir = tempfile::tempdir().expect("a directory");
    let at = dir.path().to_str().expect("UTF-8");
    let options = ["--files", "40", "--rounds", "2", "--threads", "1,2", "--dir", at, "--json"];
    let said = braidfs_in(dir.path(), &[&["bench", "speed"][..], &options].concat()).ok().out;
    let lines: serde_json::Value = serde_json::from_str(&said).expect("JSON");
    let lines = lines.as_array().expect("lines");
    assert_eq!(lines.len(), 18, "nine operations by one and by two threads");
    assert!(lines.iter().all(|l| l["library"]["median"].as_f64().is_some_and(|ns| ns > 0.0)), "{said}");
    // as root beside the kernel's file systems, where they can be made
    assert!(lines.iter().all(|l| l["met"].is_boolean() == (l["tmpfs"].is_object() && l["ext4"].is_object())), "{said}");
    assert_eq!(std::fs::read_dir(dir.path()).expect("a directory").count(), 0, "nothing is left");
}

#[test]
fn one_operation_alone_is_timed() {
    let dir = tempfile::tempdir().expect("a directory");
    let at = dir.path().to_str().expect("UTF-8");
    let speed = |only: &[&str]| {
        let options =
            ["bench", "speed", "--files", "20", "--rounds", "3", "--threads", "1", "--alone", "--dir", at, "--json"];
        let only: Vec<&str> = only.iter().flat_map(|name| ["--only", name]).collect();
        braidfs_in(dir.path(), &[&options[..], &only].concat())
    };
    for only in [&["open"][..], &["rename"], &["unlink"], &["create", "stat"]] {
        let said = speed(only).ok().out;
        let lines: serde_json::Value = serde_json::from_str(&said).expect("JSON");
        let verbs: Vec<&str> = lines.as_array().expect("lines").iter().filter_map(|l| l["verb"].as_str()).collect();
        assert!(!verbs.is_empty() && verbs.iter().all(|v| only.iter().any(|o| v.starts_with(o))), "{only:?}: {said}");
    }
    for only in [&["fly"][..], &["open", "fly"], &["fly", "open"]] {
        let refused = speed(only);
        assert_eq!(refused.code, 2, "{only:?}: {}", refused.err);
        assert!(refused.err.contains("`fly`") && refused.err.contains("rename"), "{only:?}: {}", refused.err);
    }
}

#[test]
fn an_interrupted_benchmark_leaves_nothing() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_braidfs"))
        .args(["bench", "speed", "--files", "50", "--rounds", "1000000", "--threads", "1", "--alone", "--dir"])
        .arg(dir.path())
        .spawn()
        .expect("the program");
    let left = || std::fs::read_dir(dir.path()).expect("a directory").count();
    while left() == 0 {
        assert!(child.try_wait().expect("the child").is_none(), "it ended before it made anything");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).expect("it runs");
    assert_eq!(child.wait().expect("its end").code(), Some(130));
    assert_eq!(left(), 0, "nothing is left");
}

/// What every aged volume has to show, whatever the file system.
fn check_aged(v: &serde_json::Value, slices: usize) {
    let all = v["slices"].as_array().expect("slices");
    assert_eq!(all.len(), slices, "{v}");
    let number = |v: &serde_json::Value| v.as_f64().expect("a number");
    let sum = |field: &str| all.iter().map(|s| number(&s[field])).sum::<f64>();
    let (capacity, filled) = (number(&v["capacity"]), number(&v["filled"]));
    let wanted = capacity * number(&v["fill"]) / 100.0;
    assert!(filled <= wanted && filled > wanted * 0.9, "{v}");
    // once the free space
    assert!(sum("user") >= 0.99 * (capacity - filled), "{v}");
    for s in all {
        assert!(number(&s["p50"]) > 0.0 && number(&s["p50"]) <= number(&s["p999"]), "{v}");
        assert!(number(&s["p999"]) <= 1.01 * number(&s["max"]) && number(&s["seconds"]) > 0.0, "{v}");
    }
    let device = sum("device") + number(&v["settled"]);
    if v["load"] == "overwrite" {
        // all is on the device at the end; what was overwritten again before an fsync of its file only once
        assert!(device > 0.8 * sum("user"), "{v}");
        assert_eq!(sum("user"), 4096.0 * sum("ops"), "{v}");
    } else {
        assert!(device > 0.0 && sum("ops") > slices as f64, "{v}");
    }
    assert!(number(&v["read_fresh"]) > 0.0 && number(&v["read_aged"]) > 0.0, "{v}");
    for layout in [&v["fresh"], &v["aged"]] {
        let (files, pieces) = (number(&layout["files"]), number(&layout["pieces"]));
        assert!(files > 0.0 && pieces >= files, "{v}");
        assert!(number(&layout["bytes"]) > 0.9 * filled, "{v}");
    }
}

#[test]
fn the_library_ages() {
    let dir = tempfile::tempdir().expect("a directory");
    let at = dir.path().to_str().expect("UTF-8");
    let docs = dir.path().join("docs");
    std::fs::create_dir(&docs).expect("a directory");
    std::fs::write(docs.join("aging.md"), "before\n<!-- aging:begin -->\n<!-- aging:end -->\nafter\n").expect("a file");
    let options =
        ["-t", "library", "--size", "64M", "--fill", "70,90", "--times", "1", "--slices", "4", "--image-dir", at];
    let args = [&["bench", "aging"][..], &options, &["--json", "-o", "out.json", "--docs", "docs"]].concat();
    let said = braidfs_in(dir.path(), &args).ok().out;
    let r: serde_json::Value = serde_json::from_str(&said).expect("JSON");
    let volumes = r["volumes"].as_array().expect("volumes");
    assert_eq!(volumes.len(), 4, "two loads, two fill levels");
    volumes.iter().for_each(|v| check_aged(v, 4));
    // the file has the same, and is drawn without another run
    let file = std::fs::read(dir.path().join("out.json")).expect("results");
    assert_eq!(serde_json::from_slice::<serde_json::Value>(&file).expect("JSON"), r);
    let table = braidfs_in(dir.path(), &["bench", "aging", "--from", "out.json"]).ok().out;
    assert!(table.contains("churn, 90 % full") && table.contains("library"), "{table}");
    let page = std::fs::read_to_string(docs.join("aging.md")).expect("a page");
    assert!(page.contains("**overwrite, 70 % full**") && page.ends_with("<!-- aging:end -->\nafter\n"), "{page}");
    let picture = std::fs::read_to_string(docs.join("aging.svg")).expect("a picture");
    assert_eq!(picture.matches("<polyline").count(), 12, "two loads, two fill levels, three metrics: {picture}");
    assert!(!picture.contains("NaN") && !picture.contains("inf"), "{picture}");
    assert_eq!(
        std::fs::read_dir(dir.path()).expect("a directory").count(),
        2,
        "only the results and the page are left"
    );
}

#[test]
fn a_mount_ages_beside_ext4() {
    if !can_mount() {
        _ = writeln!(stderr(), "SKIPPED: needs root, /dev/loop-control and /dev/fuse");
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let at = dir.path().to_str().expect("UTF-8");
    let options =
        ["-t", "ext4,braidfs", "--size", "64M", "--fill", "80", "--times", "1", "--slices", "2", "--image-dir", at];
    let said = braidfs_in(dir.path(), &[&["bench", "aging", "--json"][..], &options].concat()).ok().out;
    let r: serde_json::Value = serde_json::from_str(&said).expect("JSON");
    let volumes = r["volumes"].as_array().expect("volumes");
    let names: Vec<_> = volumes.iter().map(|v| v["target"].as_str().expect("a name")).collect();
    assert_eq!(names, ["ext4", "braidfs", "ext4", "braidfs"], "targets take turns");
    volumes.iter().for_each(|v| check_aged(v, 2));
    assert_eq!(std::fs::read_dir(dir.path()).expect("a directory").count(), 0, "nothing is left");
}

/// All six combinations, of the library; as root also of a mount, whose neighbour is a process.
#[test]
fn isolation_is_measured() {
    let dir = tempfile::tempdir().expect("a directory");
    let at = dir.path().to_str().expect("UTF-8");
    let docs = dir.path().join("docs");
    std::fs::create_dir(&docs).expect("a directory");
    std::fs::write(docs.join("isolation.md"), "a\n<!-- isolation:begin -->\n<!-- isolation:end -->\nb\n")
        .expect("a file");
    let run = |more: &[&str]| -> serde_json::Value {
        let options = ["--reps", "1", "--seconds", "0.15", "--file", "1M", "--size", "128M", "--image-dir", at];
        let args = [&["bench", "isolation", "--json", "-o", "out.json"][..], &options, more].concat();
        serde_json::from_str(&braidfs_in(dir.path(), &args).ok().out).expect("JSON")
    };
    let check = |r: &serde_json::Value, target: &str| {
        let cells: Vec<_> = r["cells"].as_array().expect("cells").iter().filter(|c| c["target"] == target).collect();
        let names: Vec<_> = cells.iter().map(|c| c["neighbour"].as_str().unwrap_or("alone")).collect();
        assert_eq!(names, ["alone", "create", "stream", "fsync", "fill", "read"]);
        for c in cells {
            let number = |field: &str| c[field].as_f64().expect("a number");
            assert!(number("rate") > 0.0 && number("paced") > 0.0 && number("p50") > 0.0, "{c}");
            assert!(number("p50") <= number("p99") && number("p99") <= number("max"), "{c}");
            assert!(c["neighbour"].is_null() || c["flooded"]["ops"].as_u64().is_some_and(|n| n > 0), "{c}");
        }
    };
    let r = run(&["-t", "library", "--docs", "docs"]);
    check(&r, "library");
    assert!(r["targets"][0]["setup"].as_array().expect("commands").len() >= 4, "{r}");
    let page = std::fs::read_to_string(docs.join("isolation.md")).expect("a page");
    assert!(page.contains("| library | fsync |") && page.ends_with("<!-- isolation:end -->\nb\n"), "{page}");
    let table = braidfs_in(dir.path(), &["bench", "isolation", "--from", "out.json"]).ok().out;
    assert!(table.contains("library") && table.contains("stream"), "{table}");
    if !rustix::process::geteuid().is_root()
        || !Path::new("/dev/loop-control").exists()
        || !Path::new("/dev/fuse").exists()
    {
        _ = writeln!(stderr(), "SKIPPED: a mount needs root, /dev/loop-control and /dev/fuse");
        return;
    }
    let r = run(&["-t", "braidfs", "--neighbour-bps", "64M"]);
    check(&r, "braidfs");
    let setup = r["targets"][0]["setup"].to_string();
    assert!(setup.contains("--write-bps 67108864"), "{setup}");
    assert_eq!(
        std::fs::read_dir(dir.path()).expect("a directory").count(),
        2,
        "only the results and the page are left"
    );
}

/// With whole systems where they can be made: a file system for each worker, a journal mode, memory.
#[test]
fn figures_of_the_papers_are_redone() {
    let listed = braidfs_in(Path::new("/"), &["bench", "figures", "--list"]).ok().out;
    assert!(listed.contains("fast18-6") && listed.contains("(usual)"), "{listed}");
    if !can_mount() {
        _ = writeln!(stderr(), "SKIPPED: needs root, /dev/loop-control and /dev/fuse");
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let at = dir.path().to_str().expect("UTF-8");
    std::fs::create_dir(dir.path().join("docs")).expect("a directory");
    let page = dir.path().join("docs/figures.md");
    let marks = |name| format!("<!-- figure-{name}:begin -->\nold\n<!-- figure-{name}:end -->\n");
    std::fs::write(&page, marks("spanfs-1") + &marks("spanfs-7c") + &marks("max-11")).expect("a file");
    let options = ["--seconds", "0.02", "--warm-up", "0", "--reps", "1", "--size", "512M", "--files", "50"];
    let names = ["bench", "figures", "spanfs-1", "spanfs-7c", "--json", "-o", "out.json", "--docs", "docs"];
    let args = [&names[..], &options, &["--image-dir", at]].concat();
    let said = braidfs_in(dir.path(), &args).ok().out;
    let r: serde_json::Value = serde_json::from_str(&said).expect("JSON");
    let lines = r["lines"].as_array().expect("lines");
    let of = |figure: &str, series: &str| -> Vec<&serde_json::Value> {
        lines.iter().filter(|l| l["figure"] == figure && l["series"] == series).map(|l| &l["run"]).collect()
    };
    for series in ["ext4", "ext4, one each", "mount, 16 domains", "library, 16 domains"] {
        let runs = of("spanfs-1", series);
        assert!(!runs.is_empty() && runs.iter().all(|r| r["ops"].as_u64() > Some(0)), "{series}: {said}");
        assert!(runs.iter().all(|r| r["disk"]["writes"].as_u64() > Some(0)), "{series}: {said}");
        assert_eq!(runs[0]["memory"]["process"].is_u64(), !series.starts_with("ext4"), "{series}: {said}");
    }
    let made = r["made"].as_array().expect("set-ups");
    let setup = |series: &str| {
        let of = made.iter().find(|m| m["figure"] == "spanfs-7c" && m["series"] == series);
        of.expect("a set-up")["setup"].to_string()
    };
    for series in ["ext4", "braidfs", "library"] {
        assert!(setup(series).contains("data=journal"), "{series}: {}", setup(series));
    }
    let text = std::fs::read_to_string(&page).expect("a page");
    assert_eq!(text.matches("\nold\n").count(), 1, "only figures that ran are replaced: {text}");
    assert!(text.contains("| syncwrite_seq | 1 |") && text.contains("| varmail | 1 |"), "{text}");
    let again = braidfs_in(dir.path(), &["bench", "figures", "--from", "out.json"]).ok().out;
    assert!(again.contains("ext4, one each") && again.contains("data=journal"), "{again}");
    assert_eq!(
        std::fs::read_dir(dir.path()).expect("a directory").count(),
        2,
        "only the results and the page are left"
    );
}

/// What the papers have tables of: of the library, as root also beside ext4 and of a mount.
#[test]
fn single_things_are_timed() {
    let dir = tempfile::tempdir().expect("a directory");
    let at = dir.path().to_str().expect("UTF-8");
    std::fs::create_dir(dir.path().join("docs")).expect("a directory");
    let page = dir.path().join("docs/figures.md");
    let marks = |name| format!("<!-- times-{name}:begin -->\nold\n<!-- times-{name}:end -->\n");
    let all = ["recovery", "gc", "remount", "commit"];
    std::fs::write(&page, all.map(marks).concat()).expect("a file");
    let root = can_mount();
    if !root {
        _ = writeln!(stderr(), "SKIPPED in part: ext4 and a mount need root, /dev/loop-control and /dev/fuse");
    }
    let targets = if root { "ext4,braidfs,library" } else { "library" };
    let sizes = ["--journals", "2", "--journal", "4M", "--files", "500", "--domains", "4", "--dirty", "1M,2M"];
    let options = ["-t", targets, "--reps", "1", "--seconds", "0.05", "--size", "256M", "--image-dir", at];
    let args = [&["bench", "times"][..], &all, &sizes, &options, &["--json", "-o", "out.json", "--docs", "docs"]];
    let said = braidfs_in(dir.path(), &args.concat()).ok().out;
    let r: serde_json::Value = serde_json::from_str(&said).expect("JSON");
    let samples = r["samples"].as_array().expect("samples");
    let value = |what: &str, target: &str, step: &str| -> f64 {
        let fits = |s: &&serde_json::Value| {
            s["what"] == what && s["target"] == target && s["step"].as_str().is_some_and(|s| s.ends_with(step))
        };
        let found = samples.iter().find(fits).and_then(|s| s["value"].as_f64());
        found.unwrap_or_else(|| panic!("{what} of {target}: {step}: {said}"))
    };
    assert!(samples.iter().all(|s| s["value"].as_f64().is_some_and(|n| n > 0.0)), "{said}");
    // half of the journals at least, and no more than they have
    let used = value("recovery", "library, 2 threads", "in use in the journals");
    assert!((4.0e6..8.4e6).contains(&used), "{used}");
    assert!(value("gc", "library", "beside over between") > 0.01);
    value("remount", "library", "rename to a directory of another domain");
    value("commit", "library", "2 MiB dirty");
    if root {
        value("recovery", "ext4", "mount after the crash");
        value("remount", "ext4", "mount, nothing cached");
        value("remount", "braidfs", "rename to a directory of another domain");
        value("commit", "braidfs, gate", "2 MiB dirty");
    }
    let text = std::fs::read_to_string(&page).expect("a page");
    assert!(!text.contains("\nold\n") && text.contains("| mount after the crash |"), "{text}");
    let again = braidfs_in(dir.path(), &["bench", "times", "--from", "out.json"]).ok().out;
    assert!(again.contains("GC alone, nothing cached"), "{again}");
    assert_eq!(
        std::fs::read_dir(dir.path()).expect("a directory").count(),
        2,
        "only the results and the page are left"
    );
}
