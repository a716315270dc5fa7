//! The damage matrix, one in some of its cases, in an order by the seed.
//!
//! `BRAIDFS_DAMAGE_ONE_OF` (default 5), `BRAIDFS_DAMAGE_SECONDS` (default 300), `BRAIDFS_SEED`. All of it: the program `damage` of this
//! crate.

use braidfs::JournalReplay;
use braidfs_check::{FsckOptions, check};
use braidfs_device::{Device, MemDevice};
use braidfs_testkit::damage::inflict::Damage;
use braidfs_testkit::damage::matrix::{Limits, run};
use braidfs_testkit::damage::sample::{Sample, clean, crashed};
use braidfs_testkit::damage::target::{Kind, targets};
use braidfs_testkit::damage::trial::trial;
use braidfs_testkit::env_number;
use std::sync::Arc;
use std::time::Duration;

/// Address space of the test: what a damaged number asks for beyond it is refused, and the test fails.
const MEMORY: u64 = 8 << 30;

#[test]
fn damage_is_noticed_repaired_and_told() {
    let limit = rustix::process::Rlimit { current: Some(MEMORY), maximum: Some(MEMORY) };
    rustix::process::setrlimit(rustix::process::Resource::As, limit).unwrap();
    let seed = braidfs_testkit::seed();
    println!("BRAIDFS_SEED={seed}");
    let samples = [clean(false).unwrap(), crashed().unwrap(), clean(true).unwrap()];
    let time = Duration::from_secs(env_number("BRAIDFS_DAMAGE_SECONDS", 300));
    let one_of = env_number("BRAIDFS_DAMAGE_ONE_OF", 5).max(1) as usize;
    let limits = Limits { seed, time, one_of, ..Limits::default() };
    let report = run(&samples, &limits, &|_, _, _| {});
    println!("{report}{} cases left", report.left);
    let failures: Vec<String> = report.failures.iter().take(10).map(ToString::to_string).collect();
    assert!(failures.is_empty(), "seed {seed}:\n{}", failures.join("\n"));
    let sum = report.sum();
    // some damages change nothing
    assert!(sum.damaged > report.left, "only {} volumes were damaged, {} cases left", sum.damaged, report.left);
    assert!(sum.synced > sum.damaged, "only {} files were made on damaged volumes", sum.synced);
    // A block that is as it was before is whole: see docs/crash-contract.md for what of it goes unnoticed. Node blocks do not.
    let noticed = |kind: Kind, d: Option<Damage>| d != Some(Damage::Older) || kind == Kind::Node;
    let unnoticed: usize = report.totals.iter().filter(|((k, d), _)| noticed(*k, *d)).map(|(_, t)| t.served).sum();
    assert_eq!(unnoticed, 0, "{}", report.served.iter().map(ToString::to_string).collect::<String>());
}

/// Both copies of a domain header are lost, with a journal that was not replayed: the check names what it gives up.
#[test]
fn a_lost_header_gives_up_the_journal_and_says_so() {
    let sample = crashed().unwrap();
    for domain in 0..3 {
        let mut image = sample.image.clone();
        let all = targets(&image).unwrap();
        let copies: Vec<u64> =
            all.iter().filter(|t| t.kind == Kind::Domain && t.domain == Some(domain)).map(|t| t.block).collect();
        assert_eq!(copies.len(), 2);
        copies.iter().for_each(|b| image.write(*b, &[0; 4096]).unwrap());
        let out = trial(&image, &sample.truth);
        assert!(out.silent.is_empty() && out.not_repaired.is_empty(), "domain {domain}: {out:#?}");
        assert!(out.given_up > 0, "domain {domain}: nothing was lost");
    }
}

/// A checkpoint writes the copy of a table that does not count. A crash that tears it has damaged nothing: the check says that
/// the volume was not unmounted, and no more. Of an unmounted volume it is an error, and so it is where the copy that counts
/// is lost.
#[test]
fn a_copy_that_a_checkpoint_was_writing_is_no_error() {
    let tables = [Kind::Domain, Kind::Group, Kind::Segments, Kind::Owners, Kind::NodeTable];
    let check_with = |sample: &Sample, block: u64| {
        let image = sample.image.clone();
        let mut torn = vec![0; 4096];
        image.read(block, &mut torn).unwrap();
        torn[..512].fill(0x5a);
        let mut image = image;
        image.write(block, &torn).unwrap();
        let device: Arc<dyn Device> = Arc::new(MemDevice::from_image(image));
        let options = FsckOptions { repair: false, force: true };
        check(&[device], &options, &JournalReplay, &|_, _, _| {}).unwrap()
    };
    let (in_use, unmounted) = (crashed().unwrap(), clean(false).unwrap());
    let (mut shadows, mut counting) = (0, 0);
    for sample in [&in_use, &unmounted] {
        for kind in tables {
            let all = targets(&sample.image).unwrap();
            for t in all.iter().filter(|t| t.kind == kind && !t.what.contains("blank")).take(6) {
                let (report, what) = (check_with(sample, t.block), &t.what);
                let codes: Vec<u32> = report.findings.iter().map(|f| f.code).collect();
                let trace = report.notes.iter().any(|n| n.contains("cut off by the crash, or damaged"));
                if std::ptr::eq(sample, &raw const in_use) && !t.current && kind != Kind::Domain {
                    assert!(codes.is_empty() && trace, "{what}: {codes:?} {:?}", report.notes);
                    shadows += 1;
                } else {
                    assert!(!codes.is_empty(), "{what}: {:?}", report.notes);
                    counting += 1;
                }
            }
        }
    }
    assert!(shadows > 5 && counting > 15, "{shadows} {counting}");
}

/// docs/fsck.md has every number of the code, with its words and whether `-p` repairs it, and no other.
#[test]
fn the_numbers_are_documented() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let read = |p: &str| std::fs::read_to_string(root.join(p)).unwrap();
    let (mut want, mut words) = (Vec::new(), Vec::new());
    for line in read("crates/check/src/codes.rs").lines() {
        if let Some(text) = line.strip_prefix("/// ") {
            words.push(text.to_string());
        } else if let Some((_, number)) = line.strip_prefix("pub const ").and_then(|l| l.split_once(" = ")) {
            let text = words.join(" ");
            want.push(format!("| {} | {} |", number.trim_end_matches(';'), text.trim_end_matches('.')));
            words.clear();
        }
    }
    assert!(want.len() > 50, "{want:?}");
    let page = read("docs/fsck.md");
    let rows: Vec<&str> =
        page.lines().filter(|l| l.starts_with('|') && l[2..].starts_with(|c: char| c.is_ascii_digit())).collect();
    assert_eq!(rows.len(), want.len());
    for (row, want) in rows.iter().zip(&want) {
        assert!(row.starts_with(want.as_str()), "{row} should begin with {want}");
        let number: u32 = row.split(' ').nth(1).unwrap().parse().unwrap();
        let safe = if braidfs_check::codes::is_safe(number) { " yes |" } else { " no |" };
        assert!(row.ends_with(safe), "{row} should end with{safe}");
    }
}
