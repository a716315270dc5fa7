//! Bugs on purpose in domains without a journal, which the explorer's volumes do not have.
#![cfg(feature = "planted-bugs")]

use braidfs::planted::{Bug, plant};
use braidfs_testkit::scratch::{a_name_over_the_border, every_crash_of_a_discard, every_crash_of_a_scratch};

fn seen<T>(bug: Bug, look: impl Fn() -> Result<T, String>) {
    plant(Some(bug));
    let seen = look();
    plant(None);
    match seen {
        Ok(_) => panic!("{bug:?} was not seen"),
        Err(why) => println!("{bug:?}: {why}"),
    }
}

// one test: a planted bug is one of the whole process
#[test]
fn bugs_of_domains_without_a_journal_are_seen() {
    a_name_over_the_border().unwrap();
    seen(Bug::ScratchUntold, every_crash_of_a_scratch);
    seen(Bug::ScratchToldLate, every_crash_of_a_scratch);
    seen(Bug::ScratchEmptiedLate, every_crash_of_a_discard);
    seen(Bug::ScratchBorderOpen, a_name_over_the_border);
}
