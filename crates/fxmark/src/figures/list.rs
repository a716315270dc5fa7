//! The figures: their tests, and the file systems that stand for the papers' systems.
//!
//! "As ext4" is braidfs with one journal, one list of a transaction for all threads and a commit that nobody helps; "P" has
//! helpers (P-EXT4: threads that wait join the I/O), "O" lists by thread, too (O-EXT4).

use crate::target::Target;
use crate::worker::Sizes;

/// Numbers of cores of a figure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cores {
    /// One.
    One,
    /// Powers of two, up to all.
    Sweep,
    /// All.
    Most,
}

/// What a figure shows of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shows {
    /// Operations a second.
    Rate,
    /// The same, and what the device wrote.
    RateAndDevice,
    /// Latencies of a test beside those of its `_commit` variant.
    Tails,
    /// Memory.
    Memory,
    /// The locks that threads waited for longest, in a build that counts it.
    Locks,
}

/// A curve of a figure: a file system, as it is made and mounted.
#[derive(Debug, Clone, PartialEq)]
pub struct Series {
    /// Its name in tables.
    pub label: String,
    /// What is tested.
    pub target: Target,
    /// More arguments of mkfs.
    pub mkfs: String,
    /// More options of mount.
    pub mount: &'static str,
    /// Switches for experiments of braidfs.
    pub switches: &'static str,
    /// Has each worker a file system of its own?
    pub parts: bool,
    /// Sizes of the test.
    pub sizes: Sizes,
}

/// A figure or table of a paper.
#[derive(Debug, Clone)]
pub struct Figure {
    /// By which it is asked for.
    pub name: &'static str,
    /// Where it is from, and what it shows.
    pub title: &'static str,
    /// Tests of the suite.
    pub tests: &'static [&'static str],
    /// With so many workers.
    pub cores: Cores,
    /// What is told of them.
    pub shows: Shows,
    /// Runs where no figure is named?
    pub usual: bool,
    /// Its curves.
    pub series: Vec<Series>,
}

impl Series {
    fn of(label: impl Into<String>, target: Target) -> Self {
        let (mkfs, mount, switches) = (String::new(), "", "");
        Self { label: label.into(), target, mkfs, mount, switches, parts: false, sizes: Sizes::OWN }
    }
    fn plain(target: Target) -> Self {
        Self::of(target.to_string(), target)
    }
    fn mkfs(self, mkfs: impl Into<String>) -> Self {
        Self { mkfs: mkfs.into(), ..self }
    }
    fn mount(self, mount: &'static str) -> Self {
        Self { mount, ..self }
    }
    fn switches(self, switches: &'static str) -> Self {
        Self { switches, ..self }
    }
    fn parts(self) -> Self {
        Self { label: format!("{}, one each", self.label), parts: true, ..self }
    }
    fn sizes(self, sizes: Sizes) -> Self {
        Self { sizes, ..self }
    }
}

/// braidfs by both ways, with `label` behind their names.
fn both(label: &str) -> [Series; 2] {
    [("mount", Target::Braidfs), ("library", Target::Library)].map(|(way, t)| Series::of(format!("{way}, {label}"), t))
}

const ONE_JOURNAL: &str = "--domains 1";
const SPANFS: &str = "--domains 16 --placement spread";
const FAST18_TESTS: &[&str] = &["tokubench", "syncwrite", "varmail", "fileserver"];
/// Switches of the three systems of FAST '18.
const FAST18: [(&str, &str); 3] = [("as ext4", "slots,leader"), ("P", "slots"), ("O", "")];

fn fast18(mount: &'static str) -> Vec<Series> {
    let mut out = vec![Series::plain(Target::Ext4).mount(mount)];
    let braidfs = |(label, switches): (&str, &'static str)| {
        both(label).map(|s| s.mkfs(ONE_JOURNAL).mount(mount).switches(switches))
    };
    let all: Vec<Series> = FAST18.into_iter().flat_map(braidfs).collect();
    for target in [Target::Braidfs, Target::Library] {
        out.extend(all.iter().filter(|s| s.target == target).cloned());
    }
    out
}

/// By a number that mkfs is given.
fn by(what: &str, flags: &str, numbers: &[u32]) -> Vec<Series> {
    let series = |way: usize| {
        move |n: &u32| {
            let [mount, library] = both(&format!("{n} {what}"));
            let s = if way == 0 { mount } else { library };
            s.mkfs(flags.replace("{}", &n.to_string()))
        }
    };
    numbers.iter().map(series(0)).chain(numbers.iter().map(series(1))).collect()
}

fn today() -> Vec<Series> {
    [Target::Ext4, Target::Xfs, Target::Braidfs, Target::Library].map(Series::plain).into()
}

fn spanfs(parts: bool) -> Vec<Series> {
    let kernel = [Target::Ext4, Target::Xfs].map(Series::plain);
    let mut out: Vec<Series> = kernel.to_vec();
    if parts {
        out.extend(kernel.map(Series::parts));
    }
    out.extend(both("16 domains").map(|s| s.mkfs(SPANFS)));
    out
}

/// The library with one domain, which stands for one journal, and as SpanFS-16.
fn one_and_many() -> Vec<Series> {
    let library = |label: &str| Series::of(format!("library, {label}"), Target::Library);
    vec![library("1 domain").mkfs(ONE_JOURNAL), library("16 domains").mkfs(SPANFS)]
}

fn full() -> Vec<Series> {
    let at = |full: u64| {
        let name = move |s: Series| {
            let label = if full == 0 { s.label.clone() } else { format!("{}, {full} %", s.label) };
            Series { label, ..s }.sizes(Sizes { full, ..Sizes::OWN })
        };
        [Target::Ext4, Target::Braidfs, Target::Library].map(Series::plain).map(name)
    };
    [0, 90, 97].into_iter().flat_map(at).collect()
}

fn kfsmark(request: u64) -> Vec<Series> {
    let mut out = vec![Series::plain(Target::Xfs)];
    out.extend(by("domains", "--domains {}", &[1, 2, 4, 8]));
    out.into_iter().map(|s| s.sizes(Sizes { file: 32 << 20, request, full: 0 })).collect()
}

fn tails() -> Vec<Series> {
    let mut out = today();
    out.push(Series::of("library, gate", Target::Library).switches("gate"));
    out
}

fn figure(
    name: &'static str,
    title: &'static str,
    tests: &'static [&'static str],
    cores: Cores,
    series: Vec<Series>,
) -> Figure {
    Figure { name, title, tests, cores, shows: Shows::Rate, usual: false, series }
}

/// All of them, in the order of `docs/papers.md`.
pub fn all() -> Vec<Figure> {
    let usual = |f: Figure| Figure { usual: true, ..f };
    let locks =
        |name, title, tests, series| Figure { shows: Shows::Locks, ..figure(name, title, tests, Cores::Most, series) };
    let journal = |s: Series| if s.target == Target::Xfs { s } else { s.mount("data=journal") };
    vec![
        figure(
            "fxmark-14",
            "FxMark, Figure 14: one file system, and one for each worker",
            &["mail", "MWCL", "DWSL"],
            Cores::Sweep,
            spanfs(true),
        ),
        figure(
            "spanfs-1",
            "SpanFS, Figure 1: sequential writes with an fsync each, and one file system for each worker",
            &["syncwrite_seq"],
            Cores::Sweep,
            spanfs(true),
        ),
        figure(
            "spanfs-5",
            "SpanFS, Figure 5: IOzone's writes, buffered, direct, O_SYNC",
            &["write_seq", "write_seq_direct", "write_rand", "write_rand_direct", "write_osync"],
            Cores::Most,
            spanfs(false).into_iter().map(|s| s.sizes(Sizes { file: 64 << 20, ..Sizes::OWN })).collect(),
        ),
        figure(
            "spanfs-6",
            "SpanFS, Figure 6: sysbench's writes, buffered and with an fsync each",
            &["write_seq", "write_rand", "syncwrite_seq", "syncwrite"],
            Cores::Most,
            spanfs(false),
        ),
        figure(
            "spanfs-7c",
            "SpanFS, Figure 7 c: varmail with data=journal",
            &["varmail"],
            Cores::Sweep,
            [Target::Ext4, Target::Braidfs, Target::Library].map(Series::plain).map(journal).into(),
        ),
        locks(
            "spanfs-1-locks",
            "SpanFS, Tables 1 and 2: the locks that threads wait for",
            &["syncwrite_seq"],
            one_and_many(),
        ),
        locks(
            "spanfs-3-locks",
            "SpanFS, Table 3: the locks that threads wait for in catd",
            &["catd_create", "catd_append", "catd_truncate", "catd_delete"],
            one_and_many(),
        ),
        Figure {
            shows: Shows::Tails,
            ..usual(figure(
                "max-8b",
                "Max, Figure 8 b: readers beside a commit every 10 ms",
                &["DRBL", "DRBL_commit", "MRPL", "MRPL_commit", "MRDL", "MRDL_commit", "stat", "stat_commit"],
                Cores::One,
                tails(),
            ))
        },
        figure(
            "max-11",
            "Max, Figure 11: fileserver and varmail on a file system that is full and was overwritten",
            &["varmail", "fileserver"],
            Cores::Most,
            full(),
        ),
        usual(figure(
            "max-12c",
            "Max, Figure 12 c: fsync by number of domains (where Max has trees)",
            &["DWSL"],
            Cores::Most,
            by("domains", "--domains {}", &[1, 2, 4, 16]),
        )),
        usual(figure(
            "max-12d",
            "Max, Figure 12 d: varmail and fsync by number of mlogs",
            &["varmail", "DWSL"],
            Cores::Most,
            by("mlogs", "--domains 1 --mlogs {}", &[1, 2, 4, 8]),
        )),
        Figure {
            shows: Shows::Memory,
            ..figure(
                "max-table5",
                "Max, Table 5: memory by application",
                &["varmail", "fileserver", "mail", "tokubench"],
                Cores::Most,
                today(),
            )
        },
        Figure {
            shows: Shows::RateAndDevice,
            ..usual(figure(
                "fast18-6",
                "FAST '18, Figure 6 and Table 2: ordered mode",
                FAST18_TESTS,
                Cores::Sweep,
                fast18(""),
            ))
        },
        Figure {
            shows: Shows::RateAndDevice,
            ..usual(figure(
                "fast18-7",
                "FAST '18, Figure 7 and Table 2: data journaling",
                FAST18_TESTS,
                Cores::Most,
                fast18("data=journal"),
            ))
        },
        locks(
            "fast18-2-locks",
            "FAST '18, Table 2: the locks that threads wait for, data journaling",
            &["syncwrite"],
            fast18("data=journal").into_iter().filter(|s| s.target == Target::Library).collect(),
        ),
        usual(figure(
            "fast18-8",
            "FAST '18, Figure 8: one journal against one for each domain",
            &["varmail", "fileserver"],
            Cores::Most,
            std::iter::once(Series::plain(Target::Ext4)).chain(by("domains", "--domains {}", &[1, 16])).collect(),
        )),
        figure(
            "thesis-3.7",
            "Bladefs, Figure 3.7: kfsmark with files of 32 MiB in requests of 4 KiB, by number of domains",
            &["kfsmark"],
            Cores::Most,
            kfsmark(4 << 10),
        ),
        figure(
            "thesis-3.8",
            "Bladefs, Figure 3.8: the same in requests of 64 KiB",
            &["kfsmark"],
            Cores::Most,
            kfsmark(64 << 10),
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::suite::TestId;

    #[test]
    fn all_can_be_run() {
        let all = all();
        for f in &all {
            let same = all.iter().filter(|g| g.name == f.name).count();
            assert_eq!(same, 1, "{}", f.name);
            assert!(f.tests.iter().all(|t| t.parse::<TestId>().is_ok()), "{}", f.name);
            for s in &f.series {
                assert_eq!(f.series.iter().filter(|o| o.label == s.label).count(), 1, "{}: {}", f.name, s.label);
                assert!(s.switches.is_empty() || matches!(s.target, Target::Braidfs | Target::Library), "{}", f.name);
            }
        }
        let of = |name: &str| all.iter().find(|f| f.name == name).expect("a figure");
        let labels: Vec<&str> = of("fast18-6").series.iter().map(|s| s.label.as_str()).collect();
        let braidfs = ["mount, as ext4", "mount, P", "mount, O", "library, as ext4", "library, P", "library, O"];
        assert_eq!(labels, [&["ext4"][..], &braidfs].concat());
        assert!(of("fast18-7").series.iter().all(|s| s.mount == "data=journal"));
        assert!(of("max-12d").series.iter().any(|s| s.mkfs == "--domains 1 --mlogs 4"));
        assert!(of("max-8b").tests.chunks(2).all(|t| t[1] == format!("{}_commit", t[0])));
    }
}
