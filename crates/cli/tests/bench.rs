//! `braidfs bench`: the benchmark starts its own workers and, as root, a mounted and an in-process braidfs.

mod common;

use common::braidfs_in;
use std::path::Path;

fn run(dir: &Path, args: &[&str]) -> serde_json::Value {
    let all = ["bench", "--quick", "--seconds", "0.02", "--files", "50", "--cores", "1", "-o", "out.json"];
    braidfs_in(dir, &[&all[..], args].concat()).ok();
    serde_json::from_slice(&std::fs::read(dir.join("out.json")).expect("results")).expect("JSON")
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
    let loops = Path::new("/dev/loop-control").exists() && Path::new("/dev/fuse").exists();
    if !rustix::process::geteuid().is_root() || !loops {
        eprintln!("skipped: needs root, /dev/loop-control and /dev/fuse");
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
