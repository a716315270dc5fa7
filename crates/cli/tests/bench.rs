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
