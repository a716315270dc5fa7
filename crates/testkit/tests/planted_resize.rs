//! Bugs on purpose in what changes a volume, which the explorer's operations do not have: its growth, one more domain, devices that
//! come and leave.
#![cfg(feature = "planted-bugs")]

use braidfs::planted::{Bug, plant};
use braidfs_testkit::add_domain::every_crash_of_an_addition;
use braidfs_testkit::devices::{Change, every_crash_of_a_device};
use braidfs_testkit::resize::every_crash_of_a_growth;

/// A crash state fails: not what was done before it.
fn seen_by_a_crash<T>(bug: Bug, seen: Result<T, String>) {
    let Err(why) = seen else { panic!("{bug:?} was not seen") };
    assert!(why.contains("crash after event"), "{bug:?}, before any crash: {why}");
    println!("{bug:?}: {why}");
}

// one test: a planted bug is one of the whole process
#[test]
fn a_size_told_before_the_group_table_is_durable_is_seen() {
    assert!(every_crash_of_a_growth(1).is_ok());
    plant(Some(Bug::SizeEarly));
    let seen = every_crash_of_a_growth(1);
    plant(None);
    seen_by_a_crash(Bug::SizeEarly, seen);
    domain_counted_early();
    device_told_of_early();
}

/// A device is told of before it has its own superblocks, or wiped before it is told of no more.
fn device_told_of_early() {
    for (bug, what) in [(Bug::DeviceEarly, Change::Add), (Bug::LeftEarly, Change::Remove)] {
        plant(Some(bug));
        let seen = every_crash_of_a_device(what);
        plant(None);
        seen_by_a_crash(bug, seen);
    }
}

/// A domain is counted before its header is durable.
fn domain_counted_early() {
    plant(Some(Bug::DomainEarly));
    let seen = every_crash_of_an_addition();
    plant(None);
    seen_by_a_crash(Bug::DomainEarly, seen);
}
