//! The nineteen microbenchmarks of FxMark, their variants, and the catalogue of all tests.
//!
//! A name has four letters: data or metadata, read or write, the operation, low, medium or high sharing. `_bg` adds a
//! worker in the background that writes what the others read, `_commit` one that makes all durable every 10 ms; `_direct`
//! opens files with O_DIRECT.
//!
//! Corrected against the original program, which is kept as mode `original`: path tests open and close (there: stat),
//! directory tests list again from the start (there: reading on behind the end), files of MWCM are empty, shared blocks
//! lie side by side as Table 2 has them, all `_bg` tests write (there: DRBL_bg and DRBM_bg read), MRPL_bg and MRPH_bg
//! exist, and nothing fills the disk: what a test uses up is made again outside the clock.

mod blocks;
mod commits;
mod dirs;
mod growth;
mod moves;
mod paths;

use crate::fs::Fs;
use crate::worker::{Ctx, Load};
use crate::{Error, apps};
use std::fmt;
use std::str::FromStr;

/// Which part of the suite a test belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Group {
    /// A microbenchmark of file data.
    Data,
    /// A microbenchmark of metadata.
    Meta,
    /// An application, built in.
    App,
    /// A load of a paper's figure, built in, that a run of all tests leaves out.
    Paper,
    /// A program that has to be installed.
    External,
}

/// One entry of the catalogue.
#[derive(Debug, PartialEq, Eq, Hash)]
pub struct Test {
    /// Its name, such as `MWCL`.
    pub name: &'static str,
    /// Where it belongs.
    pub group: Group,
    /// What is done.
    pub what: &'static str,
    /// What is counted.
    pub unit: &'static str,
    /// Is there a `_bg` variant?
    pub has_bg: bool,
    /// Is there a `_commit` variant?
    pub has_commit: bool,
    /// Is there a `_direct` variant?
    pub has_direct: bool,
}

const fn micro(name: &'static str, group: Group, what: &'static str, unit: &'static str) -> Test {
    let read = name.as_bytes()[1] == b'R';
    // truncation has no data that could go around the cache
    let direct = matches!(group, Group::Data) && name.as_bytes()[2] != b'T';
    let private = name.as_bytes()[3] == b'L';
    Test { name, group, what, unit, has_bg: read, has_commit: read && private, has_direct: direct }
}

const fn other(name: &'static str, group: Group, what: &'static str, unit: &'static str) -> Test {
    Test { name, group, what, unit, has_bg: false, has_commit: false, has_direct: false }
}

/// One file of `--file-size`, request by request.
const fn one_file(name: &'static str, what: &'static str, has_direct: bool) -> Test {
    Test { has_direct, ..other(name, Group::Paper, what, "writes") }
}

/// All tests: the paper's Table 2 in its order, then applications.
pub const TESTS: &[Test] = &[
    micro("DRBL", Group::Data, "read a block of a private file", "reads"),
    micro("DRBM", Group::Data, "read a private block of a shared file", "reads"),
    micro("DRBH", Group::Data, "read a shared block of a shared file", "reads"),
    micro("DWOL", Group::Data, "overwrite a block of a private file", "writes"),
    micro("DWOM", Group::Data, "overwrite a private block of a shared file", "writes"),
    micro("DWAL", Group::Data, "append a block to a private file", "appends"),
    micro("DWTL", Group::Data, "truncate a private file by a block", "truncates"),
    micro("DWSL", Group::Data, "overwrite a block of a private file and fsync", "syncs"),
    micro("MRPL", Group::Meta, "open and close a private file five levels down", "opens"),
    micro("MRPM", Group::Meta, "open and close any file of a tree of five levels", "opens"),
    micro("MRPH", Group::Meta, "open and close one file five levels down", "opens"),
    micro("MRDL", Group::Meta, "list a private directory", "entries"),
    micro("MRDM", Group::Meta, "list a shared directory", "entries"),
    micro("MWCL", Group::Meta, "create an empty file in a private directory", "creates"),
    micro("MWCM", Group::Meta, "create an empty file in a shared directory", "creates"),
    micro("MWUL", Group::Meta, "unlink an empty file of a private directory", "unlinks"),
    micro("MWUM", Group::Meta, "unlink an empty file of a shared directory", "unlinks"),
    micro("MWRL", Group::Meta, "rename a file within a private directory", "renames"),
    micro("MWRM", Group::Meta, "move a file from a private to a shared directory", "renames"),
    other(
        "varmail",
        Group::App,
        "mail server: create, append, fsync, read, delete (Filebench's varmail)",
        "operations",
    ),
    other(
        "fileserver",
        Group::App,
        "file server: create, append, read, delete, stat (Filebench's fileserver)",
        "operations",
    ),
    other("mail", Group::App, "mail delivery: a replay of Exim's file operations, split spool", "messages"),
    other("catd_create", Group::App, "create files in a private directory (SpanFS 4.2.1)", "files"),
    other("catd_append", Group::App, "write 4 KiB to an empty file and fsync (SpanFS 4.2.1)", "files"),
    other("catd_truncate", Group::App, "cut files of 4 KiB to nothing (SpanFS 4.2.1)", "files"),
    other("catd_delete", Group::App, "remove the cut files (SpanFS 4.2.1)", "files"),
    other("syncwrite", Group::App, "write 4 KiB at random places of 128 files, fsync each (as sysbench)", "writes"),
    other(
        "syncwrite_seq",
        Group::Paper,
        "write 4 KiB one after the other to 128 files, fsync each (as sysbench)",
        "writes",
    ),
    one_file("write_seq", "write 4 KiB one after the other to a new private file (as IOzone, sysbench)", true),
    one_file("write_rand", "overwrite 4 KiB at random places of a private file (as IOzone, sysbench)", true),
    one_file(
        "write_osync",
        "write 4 KiB one after the other to a new private file opened with O_SYNC (as IOzone)",
        false,
    ),
    other("aged_overwrite", Group::App, "overwrite 4 KiB at random places of 8 files, fsync every so often", "writes"),
    other("tokubench", Group::App, "create files of 200 bytes in a tree of fan-out 128 (as TokuBench)", "files"),
    Test { has_commit: true, ..other("stat", Group::Paper, "stat a private file five levels down", "stats") },
    other("kfsmark", Group::App, "create, write 50 KiB, fsync, close, in a private directory (as fs_mark)", "files"),
    Test {
        name: "tenant",
        group: Group::App,
        what: "tenant: create, write 4 KiB, fsync in a private directory",
        unit: "files",
        has_bg: true,
        has_commit: false,
        has_direct: false,
    },
    other("rocksdb", Group::External, "RocksDB db_bench, overwrite, no compression", "operations"),
    other("dbench", Group::External, "DBENCH, its file server load", "MB"),
];

/// The entry of this name.
pub fn find(name: &str) -> Option<&'static Test> {
    TESTS.iter().find(|t| t.name.eq_ignore_ascii_case(name))
}

/// A test with its variant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TestId {
    /// The entry of the catalogue.
    pub test: &'static Test,
    /// With another worker in the background?
    pub background: bool,
    /// Does that one make all durable every 10 ms? Else it writes what the others read.
    pub commits: bool,
    /// Past the kernel's cache, with O_DIRECT?
    pub direct: bool,
}

impl TestId {
    /// The test without a variant.
    pub const fn plain(test: &'static Test) -> Self {
        Self { test, background: false, commits: false, direct: false }
    }

    /// All of them, in the order of the catalogue: each followed by its variants.
    pub fn all() -> Vec<Self> {
        let variants = |test: &'static Test| {
            let plain = Self::plain(test);
            let bg = test.has_bg.then_some(Self { background: true, ..plain });
            let commit = test.has_commit.then_some(Self { background: true, commits: true, ..plain });
            let direct = test.has_direct.then_some(Self { direct: true, ..plain });
            [Some(plain), bg, commit, direct].into_iter().flatten()
        };
        TESTS.iter().flat_map(variants).collect()
    }
}

impl fmt::Display for TestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.test.name)?;
        if self.background {
            f.write_str(if self.commits { "_commit" } else { "_bg" })?;
        }
        if self.direct {
            f.write_str("_direct")?;
        }
        Ok(())
    }
}

impl FromStr for TestId {
    type Err = Error;
    fn from_str(name: &str) -> Result<Self, Error> {
        let (rest, direct) = name.strip_suffix("_direct").map_or((name, false), |r| (r, true));
        let (rest, commits) = rest.strip_suffix("_commit").map_or((rest, false), |r| (r, true));
        let (base, writes) = rest.strip_suffix("_bg").map_or((rest, false), |r| (r, true));
        let unknown = || Error::Usage(format!("no test `{name}`: `fxmark list` shows all"));
        let test = find(base).ok_or_else(unknown)?;
        let has_all = test.has_bg >= writes && test.has_commit >= commits && test.has_direct >= direct;
        if !has_all || u8::from(writes) + u8::from(commits) + u8::from(direct) > 1 {
            return Err(Error::Usage(format!("{} has no such variant: `fxmark list` shows all", test.name)));
        }
        Ok(Self { test, background: writes || commits, commits, direct })
    }
}

/// The tests that a list names: `micro`, `bg`, `commit`, `direct`, `apps`, `papers`, `external`, `all`, single names, or the start of
/// names with a `*`.
///
/// # Errors
/// A name that there is not.
pub fn choose(list: &str) -> Result<Vec<TestId>, Error> {
    let all = TestId::all();
    let mut wanted = Vec::new();
    for word in list.split(',').map(str::trim).filter(|w| !w.is_empty()) {
        let is_micro = |t: &TestId| matches!(t.test.group, Group::Data | Group::Meta);
        let some: Vec<TestId> = match word {
            "all" => all.clone(),
            "micro" => all.iter().filter(|t| is_micro(t) && !t.background && !t.direct).copied().collect(),
            "bg" => all.iter().filter(|t| t.background && !t.commits).copied().collect(),
            "commit" => all.iter().filter(|t| t.commits).copied().collect(),
            "direct" => all.iter().filter(|t| t.direct && is_micro(t)).copied().collect(),
            "apps" => all.iter().filter(|t| t.test.group == Group::App).copied().collect(),
            "papers" => all.iter().filter(|t| t.test.group == Group::Paper && !t.commits).copied().collect(),
            "external" => all.iter().filter(|t| t.test.group == Group::External).copied().collect(),
            _ => match word.strip_suffix('*') {
                Some(start) => {
                    let fits = |t: &&TestId| t.to_string().to_lowercase().starts_with(&start.to_lowercase());
                    all.iter().filter(fits).copied().collect()
                }
                None => vec![word.parse()?],
            },
        };
        if some.is_empty() {
            return Err(Error::Usage(format!("no test fits `{word}`: `fxmark list` shows all")));
        }
        wanted.extend(some);
    }
    if wanted.is_empty() {
        return Err(Error::Usage("no tests: name some, or `all`".into()));
    }
    // once each, in the order of the catalogue
    Ok(all.into_iter().filter(|t| wanted.contains(t)).collect())
}

/// The load of a worker.
pub fn build<F: Fs>(id: &TestId, c: &Ctx<F>) -> Box<dyn Load<F>> {
    if id.commits && c.background {
        return Box::new(commits::Committer::new(c));
    }
    match id.test.name {
        "DRBL" | "DRBM" | "DRBH" | "DWOL" | "DWOM" | "DWSL" => blocks::build(id, c),
        "DWAL" => Box::new(growth::Append::new(c)),
        "DWTL" => Box::new(growth::Cut::new(c)),
        "MRPL" | "MRPM" | "MRPH" | "stat" => paths::build(id, c),
        "MRDL" | "MRDM" => dirs::build(id, c),
        "MWCL" | "MWCM" => Box::new(moves::Create::new(c, id.test.name == "MWCM")),
        "MWUL" | "MWUM" => Box::new(moves::Unlink::new(c, id.test.name == "MWUM")),
        "MWRL" => Box::new(moves::Rename::new(c)),
        "MWRM" => Box::new(moves::MoveShared::new(c)),
        app => apps::build(app, c),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_come_back() {
        for t in TestId::all() {
            assert_eq!(t.to_string().parse::<TestId>().expect("its own name"), t);
        }
        for bad in
            ["", "DRBX", "DWOL_bg", "MRPL_direct", "DRBL_bg_direct", "varmail_bg", "DRBM_commit", "DRBL_bg_commit"]
        {
            assert!(bad.parse::<TestId>().is_err(), "{bad}");
        }
    }

    #[test]
    fn the_catalogue_is_the_papers() {
        let micro = choose("micro").expect("tests");
        assert_eq!(micro.len(), 19);
        assert_eq!(choose("bg").expect("tests").len(), 9);
        assert_eq!(choose("direct").expect("tests").len(), 7);
        let commits: Vec<String> = choose("commit").expect("tests").iter().map(TestId::to_string).collect();
        assert_eq!(choose("papers").expect("tests").len(), 7);
        assert_eq!(commits, ["DRBL_commit", "MRPL_commit", "MRDL_commit", "stat_commit"]);
        let mixed: Vec<String> = choose("mwr*,DRBL_bg").expect("tests").iter().map(TestId::to_string).collect();
        assert_eq!(mixed, ["DRBL_bg", "MWRL", "MWRM"]);
        assert!(choose("nothing").is_err() && choose(",").is_err());
    }
}
