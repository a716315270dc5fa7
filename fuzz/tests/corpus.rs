//! Every kept input runs without a panic. Inputs that once failed are among them, named by what they found.

use braidfs_fuzz::TARGETS;
use std::path::Path;

#[test]
fn kept_inputs_run() {
    for (name, run) in TARGETS {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(name);
        let mut n = 0;
        for file in std::fs::read_dir(&dir).unwrap() {
            let path = file.unwrap().path();
            println!("{}", path.display());
            run(&std::fs::read(&path).unwrap());
            n += 1;
        }
        assert!(n > 0, "{} is empty", dir.display());
    }
}
