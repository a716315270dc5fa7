//! Memory goals. Alone in its file: the resident set is the process's.

use braidfs_bench::memory::measure;

#[test]
fn memory_stays_near_its_budget() {
    // fewer files than the benchmark: the slope counts, and the budget is smaller in proportion
    let m = measure(&std::env::temp_dir(), 100_000, 16 << 20).unwrap();
    assert!(m.met, "{m:?}");
}
