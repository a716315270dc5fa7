//! Random operations on a volume and on the model, with remounts and crashes in between.
//!
//! Runs begin at a fixed seed; `BRAIDFS_SEED` replays one (`random`: a new one), `BRAIDFS_MODEL_OPS` says how many
//! operations (default 40 000; `make heavy-long` 400 000). A failing run is made short for `BRAIDFS_SHRINK_SECONDS` (90) and printed as Rust code
//! for `regressions.rs`.

use braidfs::DataMode;
use braidfs_testkit::env_number;
use braidfs_testkit::full::Kind;
use braidfs_testkit::generate::Profile;
use braidfs_testkit::run::{APART, Act, Setup, Stats, acts_to_rust, random_run, replay};
use braidfs_testkit::shrink::shrink;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

const OPS_PER_RUN: usize = 2000;

fn setup(seed: u64, crashes: bool) -> Setup {
    let mut setup = Setup::vary(seed).with_access_times(seed);
    // of content a crash may leave more there: less often
    if seed.is_multiple_of(if crashes { 6 } else { 4 }) {
        setup.data = DataMode::Writeback;
    }
    setup
}

fn report(seed: u64, crashes: bool, acts: &[Act], why: &str) -> String {
    eprintln!("seed {seed}: {why}\nmaking {} acts shorter …", acts.len());
    let setup = setup(seed, crashes);
    // Each try may panic inside: not worth a backtrace.
    std::panic::set_hook(Box::new(|_| {}));
    let short =
        shrink(acts, Duration::from_secs(env_number("BRAIDFS_SHRINK_SECONDS", 90)), |a| replay(&setup, a).is_err());
    drop(std::panic::take_hook());
    let after = replay(&setup, &short).err().unwrap_or_else(|| "passes when replayed: not deterministic".into());
    format!(
        "seed {seed}: {why}\nshortened to {} acts: {after}\nBRAIDFS_SEED={seed}, or in regressions.rs:\n\
         #[test]\nfn seed_{seed}() {{\n    check({seed}, &[\n{}    ]);\n}}\n",
        short.len(),
        acts_to_rust(&short)
    )
}

fn run_all(first: u64, runs: u64, profile: Profile, crashes: bool) -> Stats {
    let (next, mut total) = (AtomicU64::new(0), Stats::default());
    let failed = std::sync::Mutex::new(None);
    let results: Vec<Stats> = std::thread::scope(|scope| {
        let work = || {
            let mut sum = Stats::default();
            loop {
                let i = next.fetch_add(1, Ordering::Relaxed);
                if i >= runs || failed.lock().unwrap().is_some() {
                    return sum;
                }
                // some on two devices
                let seed = first.wrapping_add(i) | if i % 4 == 3 { APART } else { 0 };
                match random_run(&setup(seed, crashes), profile, seed, OPS_PER_RUN, crashes) {
                    Ok(s) => sum.add(&s),
                    Err((acts, why)) => {
                        failed.lock().unwrap().get_or_insert((seed, acts, why));
                    }
                }
            }
        };
        let threads: Vec<_> = (0..2).map(|_| scope.spawn(work)).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    if let Some((seed, acts, why)) = failed.into_inner().unwrap() {
        panic!("{}", report(seed, crashes, &acts, &why));
    }
    results.iter().for_each(|s| total.add(s));
    total
}

fn runs_of(share: u64) -> (u64, u64) {
    let ops = env_number("BRAIDFS_MODEL_OPS", 40_000);
    let runs =
        if std::env::var_os("BRAIDFS_SEED").is_some() { 1 } else { (ops * share / 100).div_ceil(OPS_PER_RUN as u64) };
    let seed = braidfs_testkit::seed();
    println!("BRAIDFS_SEED={seed} (the first of {runs})");
    (seed, runs)
}

/// At most one in so many operations of each kind that needs room was skipped for want of it, and volumes crashed where they were
/// to.
fn were_judged(s: &Stats, one_in: u64, crashes: bool) {
    println!("{s:?}");
    let most = [Kind::Write, Kind::Reserve, Kind::Name, Kind::Attribute].map(|kind| (kind, one_in));
    s.full.within(&most).expect("the volume is too small to test anything, or tells ENOSPC without need");
    assert_eq!(s.crashes > 0, crashes, "crashes: {s:?}");
}

#[test]
fn random_operations_and_crashes() {
    let (seed, runs) = runs_of(70);
    let s = run_all(
        seed,
        runs,
        Profile { commits: 20, flags: true, whiteouts: true, write_back: true, ..Profile::default() },
        true,
    );
    were_judged(&s, 10, true);
    assert!(s.errors * 2 < s.ops, "most operations fail: {s:?}");
}

/// Few objects, and hardly anything but links, renames, exchanges and removals: where domains meet most.
#[test]
fn random_names_and_crashes() {
    let (seed, runs) = runs_of(50);
    let profile = Profile {
        objects: 25,
        depth: 3,
        file_bytes: 10_000,
        syncs: 60,
        names: true,
        commits: 20,
        flags: true,
        whiteouts: true,
        write_back: true,
        ..Profile::default()
    };
    let s = run_all(seed, runs, profile, true);
    // so few and small objects have room: none of some 20,000 was skipped
    were_judged(&s, 1000, true);
}

#[test]
fn random_operations_without_crashes() {
    let (seed, runs) = runs_of(30);
    let profile =
        Profile { objects: 250, syncs: 5, flags: true, whiteouts: true, write_back: true, ..Profile::default() };
    let s = run_all(seed, runs, profile, false);
    were_judged(&s, 10, false);
}
