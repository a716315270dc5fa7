//! Bugs on purpose in where an overwrite goes that only several threads show which overwrite, sync and clean one file.
#![cfg(feature = "planted-bugs")]

use braidfs::planted::{Bug, plant};
use braidfs_testkit::crash::shared::run;
use braidfs_testkit::env_number;

// one test: a planted bug is one of the whole process
#[test]
fn a_crash_shows_what_was_overwritten_too_early() {
    let most = env_number("BRAIDFS_SHARED_RUNS", 1000);
    for bug in [Bug::PlaceForgotten, Bug::InFlightForgotten, Bug::MoveForgotten] {
        plant(Some(bug));
        let found = (1..=most).find_map(|seed| Some((seed, run(seed).err()?)));
        plant(None);
        let Some((seed, why)) = found else { panic!("no seed up to {most} shows {bug:?}") };
        println!("{bug:?}: {why}");
        run(seed).unwrap();
    }
}
