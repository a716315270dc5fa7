//! Every kept input runs without a panic. Inputs that once failed are among them, named by what they found; those named by
//! a number reach code that the others do not.

use braidfs_fuzz::TARGETS;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

#[test]
fn kept_inputs_run() {
    let mut all = Vec::new();
    for (name, run) in TARGETS {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(name);
        let before = all.len();
        all.extend(std::fs::read_dir(&dir).unwrap().map(|file| (run, file.unwrap().path())));
        assert!(all.len() > before, "{} is empty", dir.display());
    }
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(Vec::<PathBuf>::new()));
    let work = || {
        while let Some((run, path)) = all.get(next.fetch_add(1, Relaxed)) {
            let data = std::fs::read(path).unwrap();
            // what it panics with has been printed
            if std::panic::catch_unwind(|| run(&data)).is_err() {
                failed.lock().unwrap().push(path.clone());
            }
        }
    };
    std::thread::scope(|s| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            s.spawn(work);
        }
    });
    assert_eq!(failed.into_inner().unwrap(), Vec::<PathBuf>::new(), "these inputs fail");
}
