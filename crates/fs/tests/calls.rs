//! The calls by path and by handle, what they answer and refuse.

use braidfs_device::{Device, Effect, FaultDevice, MemDevice, Op, Rule};
use braidfs_fs::{
    Error, FileKind, Fs, MkfsOptions, MountOptions, Numa, OpenOptions, Options, RenameMode, SetAttr, XattrMode,
};
use std::io::{BufRead, BufReader, BufWriter, ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

fn memory() -> Fs {
    Fs::in_memory(64 << 20, &Options::default()).unwrap()
}

fn kind<T: std::fmt::Debug>(r: Result<T, Error>) -> ErrorKind {
    r.unwrap_err().kind()
}

fn names(fs: &Fs, dir: &str) -> Vec<String> {
    let all = fs.read_dir(dir).unwrap().map(|e| e.unwrap().file_name().to_str().unwrap().to_owned());
    let mut all: Vec<_> = all.collect();
    all.sort();
    all
}

#[test]
fn a_size_without_memory_for_it_is_an_error() {
    let made = [1 << 59, u64::MAX].map(|size| Fs::in_memory(size, &Options::default()));
    made.into_iter().for_each(|made| assert_eq!(kind(made), ErrorKind::OutOfMemory));
}

#[test]
fn a_file_reads_writes_and_seeks() {
    let fs = memory();
    let mut out = BufWriter::new(fs.create("lines").unwrap());
    for i in 0..10_000 {
        writeln!(out, "line {i}").unwrap();
    }
    let mut file = out.into_inner().unwrap();
    file.rewind().unwrap();
    let lines: Vec<_> = BufReader::new(&file).lines().map(Result::unwrap).collect();
    assert_eq!((lines.len(), lines[9_999].as_str()), (10_000, "line 9999"));
    let end = file.seek(SeekFrom::End(-5)).unwrap();
    let mut last = String::new();
    file.read_to_string(&mut last).unwrap();
    assert_eq!(last, "9999\n");
    assert_eq!(file.stream_position().unwrap(), end + 5);
    assert_eq!(file.seek(SeekFrom::Current(i64::MIN)).unwrap_err().kind(), ErrorKind::InvalidInput);
    assert_eq!(file.stream_position().unwrap(), end + 5);
    file.write_all_at(b"LINE", 0).unwrap();
    let mut four = [0; 4];
    file.read_exact_at(&mut four, 0).unwrap();
    assert_eq!(&four, b"LINE");
    assert_eq!(file.read_exact_at(&mut four, end + 3).unwrap_err().kind(), ErrorKind::UnexpectedEof);
    file.set_len(4).unwrap();
    assert_eq!(fs.read("lines").unwrap(), b"LINE");
    assert_eq!(file.seek_data(0, false).unwrap(), Some(0));
    assert_eq!(file.seek_data(4, false).unwrap(), None);
}

#[test]
fn a_handle_does_what_it_was_opened_for() {
    let fs = memory();
    fs.write("f", "text").unwrap();
    let mut reads = fs.open_read("f").unwrap();
    // EBADF has no kind of its own
    assert!(matches!(reads.write_at(b"x", 0), Err(Error::Volume(braidfs::Error::BadHandle))));
    assert!(matches!(reads.set_len(0), Err(Error::Volume(braidfs::Error::BadHandle))));
    assert!(reads.write(b"x").is_err());
    let mut writes = OpenOptions::new().append(true).open(&fs, "f").unwrap();
    assert!(writes.read(&mut [0]).is_err());
    writes.write_all(b" and more").unwrap();
    assert_eq!(fs.read_to_string("f").unwrap(), "text and more");
    assert_eq!(kind(OpenOptions::new().open(&fs, "f")), ErrorKind::InvalidInput);
    assert_eq!(kind(OpenOptions::new().read(true).truncate(true).open(&fs, "f")), ErrorKind::InvalidInput);
    let fresh = OpenOptions::new().write(true).create_new(true).open(&fs, "f");
    assert_eq!(kind(fresh), ErrorKind::AlreadyExists);
    assert_eq!(kind(fs.open_read("no")), ErrorKind::NotFound);
    assert_eq!(kind(fs.open_read("")), ErrorKind::NotFound);
    assert_eq!(kind(fs.open_read("a\0b")), ErrorKind::InvalidInput);
    assert_eq!(kind(fs.open_read("f/")), ErrorKind::NotADirectory);
    assert_eq!(kind(fs.create("f/")), ErrorKind::IsADirectory);
    assert_eq!(kind(fs.create("new/")), ErrorKind::IsADirectory);
    assert!(!fs.exists("new").unwrap());
    assert_eq!(kind(fs.create("no/f")), ErrorKind::NotFound);
}

#[test]
fn directories_and_names() {
    let fs = memory();
    fs.create_dir_all("a/b/c").unwrap();
    fs.create_dir_all("/a/b/c").unwrap();
    fs.write("a/b/file", b"1").unwrap();
    assert_eq!(kind(fs.create_dir_all("a/b/file")), ErrorKind::AlreadyExists);
    assert_eq!(kind(fs.create_dir_all("a/b/file/below")), ErrorKind::NotADirectory);
    assert_eq!(kind(fs.create_dir("a")), ErrorKind::AlreadyExists);
    assert_eq!(kind(fs.remove_dir("a")), ErrorKind::DirectoryNotEmpty);
    assert_eq!(kind(fs.remove_file("a")), ErrorKind::IsADirectory);
    assert_eq!(kind(fs.read_dir("a/b/file")), ErrorKind::NotADirectory);
    fs.symlink("b/file", "a/link").unwrap();
    assert_eq!(fs.read_link("a/link").unwrap(), Path::new("b/file"));
    assert_eq!(kind(fs.read_link("a/b")), ErrorKind::InvalidInput);
    assert_eq!(fs.read("a/link").unwrap(), b"1");
    assert!(fs.symlink_metadata("a/link").unwrap().is_symlink());
    fs.hard_link("a/b/file", "hard").unwrap();
    assert_eq!(fs.metadata("hard").unwrap().attr().nlink, 2);
    assert_eq!(names(&fs, "a"), ["b", "link"]);
    let entry = fs.read_dir("a").unwrap().map(Result::unwrap).find(|e| e.kind() == FileKind::Symlink).unwrap();
    assert_eq!(entry.path(), Path::new("a/link"));
    fs.rename("hard", "a/b/other").unwrap();
    assert_eq!(kind(fs.rename_with("a/link", "a/b", RenameMode::NoReplace)), ErrorKind::AlreadyExists);
    fs.rename_with("a/link", "a/b", RenameMode::Exchange).unwrap();
    assert!(fs.metadata("a/link").unwrap().is_dir());
    assert_eq!(kind(fs.rename_with("a/b", "a/link", RenameMode::NoReplaceWhiteout)), ErrorKind::AlreadyExists);
    fs.rename_with("a/b", "moved", RenameMode::NoReplaceWhiteout).unwrap();
    let whiteout = fs.symlink_metadata("a/b").unwrap();
    assert_eq!((whiteout.kind(), whiteout.attr().mode & 0o7777, whiteout.attr().rdev), (FileKind::Char, 0, 0));
    fs.rename_with("moved", "a/b", RenameMode::Whiteout).unwrap();
    assert_eq!(fs.symlink_metadata("moved").unwrap().kind(), FileKind::Char);
    assert!(!fs.exists("hard").unwrap() && !fs.exists("a/link/file/x").unwrap() && fs.exists("a").unwrap());
}

/// As in Linux, a directory's default ACL says what new files in it have, and the umask nothing.
#[test]
fn a_default_acl_takes_the_place_of_the_umask() {
    let fs = Fs::in_memory(64 << 20, &Options::default().with_umask(0o077)).unwrap();
    fs.create_dir("plain").unwrap();
    fs.create_dir("shared").unwrap();
    let entries: [(u16, u16, u32); 5] = [(1, 7, !0), (2, 7, 1234), (4, 5, !0), (16, 7, !0), (32, 5, !0)];
    let mut acl = 2u32.to_le_bytes().to_vec();
    for (tag, may, id) in entries {
        acl.extend([tag.to_le_bytes(), may.to_le_bytes()].concat());
        acl.extend(id.to_le_bytes());
    }
    fs.set_xattr("shared", true, b"system.posix_acl_default", &acl, XattrMode::Set).unwrap();
    for (dir, file, below) in [("plain", 0o600, 0o700), ("shared", 0o664, 0o775)] {
        fs.write(format!("{dir}/file"), "").unwrap();
        let fresh = OpenOptions::new().write(true).create_new(true).open(&fs, format!("{dir}/fresh")).unwrap();
        assert_eq!(fresh.metadata().unwrap().permissions(), file, "{dir}");
        fs.create_dir_all(format!("{dir}/dir/below")).unwrap();
        let mode = |name: &str| fs.metadata(format!("{dir}/{name}")).unwrap().permissions();
        assert_eq!((mode("file"), mode("dir"), mode("dir/below")), (file, below, below), "{dir}");
    }
}

/// Nothing below a symlink goes, however deep the tree is.
#[test]
fn a_tree_is_removed_and_nothing_else() {
    let fs = memory();
    fs.write("kept", b"").unwrap();
    fs.create_dir_all("keep/dir").unwrap();
    let deep = vec!["d"; 600].join("/");
    fs.create_dir_all(format!("tree/{deep}")).unwrap();
    for i in 0..700 {
        fs.write(format!("tree/{i}"), b"").unwrap();
    }
    fs.symlink("/keep", "tree/link").unwrap();
    fs.symlink("tree", "to-tree").unwrap();
    fs.remove_dir_all("to-tree").unwrap();
    assert!(fs.exists("tree/0").unwrap());
    fs.remove_dir_all("tree").unwrap();
    assert_eq!(names(&fs, "/"), ["keep", "kept"]);
    // nor below one whose name is followed by slashes
    fs.symlink("keep", "link").unwrap();
    for link in ["link/", "link//", "/link/"] {
        assert_eq!(kind(fs.remove_dir_all(link)), ErrorKind::NotADirectory);
    }
    fs.remove_dir_all("link").unwrap();
    assert!(fs.exists("keep/dir").unwrap() && !fs.exists("link").unwrap());
    fs.create_dir_all("slashed/dir").unwrap();
    fs.remove_dir_all("slashed//").unwrap();
    assert_eq!(kind(fs.remove_dir_all("kept/")), ErrorKind::NotADirectory);
    assert_eq!(kind(fs.remove_dir_all("kept")), ErrorKind::NotADirectory);
    assert_eq!(kind(fs.remove_dir_all("tree")), ErrorKind::NotFound);
}

/// While one thread removes a tree, another puts a symlink in the place of one of its directories, again and again.
#[test]
fn a_symlink_that_comes_meanwhile_is_not_followed() {
    let fs = memory();
    fs.create_dir("other").unwrap();
    for i in 0..50 {
        fs.write(format!("other/{i}"), b"").unwrap();
    }
    let end = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|s| {
        s.spawn(|| {
            while !end.load(std::sync::atomic::Ordering::Relaxed) {
                for i in (0..100).rev() {
                    let (dir, away) = (format!("tree/{i}"), format!("away{i}"));
                    if fs.rename(&dir, &away).is_ok() {
                        let _ = fs.symlink("/other", &dir);
                    }
                }
            }
        });
        for round in 0..40 {
            (0..100).for_each(|i| fs.create_dir_all(format!("tree{round}/{i}")).unwrap());
            fs.rename(format!("tree{round}"), "tree").unwrap();
            let _ = fs.remove_dir_all("tree");
            let _ = fs.remove_dir_all("tree");
            (0..100).for_each(|i| fs.remove_dir(format!("away{i}")).unwrap_or_default());
            let _ = fs.rename("tree", format!("left{round}"));
        }
        end.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    let left = names(&fs, "other");
    assert_eq!(left.len(), 50, "{left:?}");
}

/// chown(2), and what changes the content, take set-user-ID bits or file capabilities along.
#[test]
fn privileges_end_with_the_owner_or_the_content() {
    const CAPS: &[u8] = b"security.capability";
    let fs = memory();
    fs.write("f", "program").unwrap();
    fs.create_dir("d").unwrap();
    let privileged = || {
        fs.set_permissions("f", 0o6755).unwrap();
        fs.set_xattr("f", true, CAPS, b"caps", XattrMode::Set).unwrap();
    };
    let left = || (fs.metadata("f").unwrap().permissions(), fs.xattr("f", true, CAPS).is_ok());
    let file = OpenOptions::new().read(true).write(true).open(&fs, "f").unwrap();
    privileged();
    assert_eq!(left(), (0o6755, true));
    file.set_owner(Some(0), None).unwrap();
    assert_eq!(left(), (0o755, false), "chown");
    let changes: [(&str, &dyn Fn()); 4] = [
        ("write", &|| file.write_all_at(b"P", 0).unwrap()),
        ("ftruncate", &|| file.set_len(3).unwrap()),
        ("open", &|| drop(fs.create("f").unwrap())),
        ("append", &|| {
            let more = OpenOptions::new().append(true).open(&fs, "f").unwrap();
            more.append(b"x").unwrap();
        }),
    ];
    // also where this handle has changed the content before, and another one set them since
    for (what, change) in changes.iter().chain(&changes) {
        privileged();
        change();
        assert!(!left().1, "{what}");
    }
    fs.set_permissions("d", 0o7755).unwrap();
    fs.open_read("d").unwrap().set_owner(Some(1), Some(1)).unwrap();
    assert_eq!(fs.metadata("d").unwrap().permissions(), 0o7755, "of a directory they are not privileges");
}

/// As Linux answers for the root, `.` and `..`, which no entry has.
#[test]
fn what_is_no_name_says_so() {
    let fs = memory();
    fs.create_dir("a").unwrap();
    fs.write("f", b"").unwrap();
    let code = |r: Result<(), Error>| r.unwrap_err().errno();
    for path in ["/", ".", "..", "a/.", "a/..", "a/./"] {
        assert_eq!(code(fs.create_dir(path)), 17, "mkdir {path}: EEXIST");
        assert_eq!(code(fs.remove_file(path)), 21, "unlink {path}: EISDIR");
        assert_eq!(code(fs.rename(path, "b")), 16, "rename {path}: EBUSY");
        assert_eq!(code(fs.rename("f", path)), 16, "rename to {path}: EBUSY");
        assert_eq!(code(fs.hard_link("f", path)), 17, "link {path}: EEXIST");
    }
    assert_eq!(["/", "a/.", "a/.."].map(|path| code(fs.remove_dir(path))), [16, 22, 39], "EBUSY, EINVAL, ENOTEMPTY");
    assert_eq!(code(fs.set_xattr("f", true, b"user.", b"", XattrMode::Set)), 22);
}

/// A path has 4,096 bytes at most, whatever is done by it.
#[test]
fn a_path_that_is_too_long_is_refused_by_all_calls() {
    let fs = memory();
    // 15 times 255 bytes, and 16: a name of 255 makes it 4,096
    let dir = format!("{}{}/", format!("{}/", "d".repeat(254)).repeat(15), "x".repeat(15));
    let name = "n".repeat(255);
    let (fits, long) = (format!("{dir}{name}"), format!("{dir}/{name}"));
    assert_eq!((fits.len(), long.len()), (4096, 4097));
    fs.create_dir_all(&dir).unwrap();
    fs.write("f", b"").unwrap();
    let fresh = |path: &str| OpenOptions::new().write(true).create_new(true).open(&fs, path).map(drop);
    type Call<'a> = (&'a str, Box<dyn Fn(&str) -> Result<(), Error> + 'a>);
    let calls: [Call<'_>; 10] = [
        ("mkdir", Box::new(|path| fs.create_dir(path))),
        ("rmdir", Box::new(|path| fs.remove_dir(path))),
        ("open with O_EXCL", Box::new(fresh)),
        ("unlink", Box::new(|path| fs.remove_file(path))),
        ("open with O_CREAT", Box::new(|path| fs.create(path).map(drop))),
        ("rename", Box::new(|path| fs.rename(path, "g"))),
        ("rename to", Box::new(|path| fs.rename("g", path))),
        ("stat", Box::new(|path| fs.metadata(path).map(drop))),
        ("unlink", Box::new(|path| fs.remove_file(path))),
        ("link to", Box::new(|path| fs.hard_link("f", path))),
    ];
    for (what, call) in calls {
        assert_eq!(call(&long).map_err(|e| e.errno()), Err(36), "{what}: ENAMETOOLONG");
        call(&fits).unwrap_or_else(|e| panic!("{what}: {e}"));
    }
    assert_eq!(fs.symlink("f", &long).map_err(|e| e.errno()), Err(36));
    // with what there is no name for, too
    assert_eq!(fs.create(format!("{long}/")).map(drop).map_err(|e| e.errno()), Err(36));
}

/// What is there all the time is listed once, while others come and go.
#[test]
fn a_listing_goes_on_while_names_change() {
    let fs = memory();
    fs.create_dir("d").unwrap();
    for i in 0..1_000 {
        fs.write(format!("d/{i}"), b"").unwrap();
    }
    let mut listing = fs.read_dir("d").unwrap();
    let mut seen: Vec<String> = Vec::new();
    for n in 0.. {
        let Some(entry) = listing.next() else { break };
        seen.push(entry.unwrap().file_name().to_str().unwrap().to_owned());
        if n < 400 {
            // odd ones go and new ones come
            let _ = fs.remove_file(format!("d/{}", n * 2 + 1));
            fs.write(format!("d/new{n}"), b"").unwrap();
        }
    }
    for i in (0..1_000).step_by(2) {
        assert_eq!(seen.iter().filter(|s| **s == i.to_string()).count(), 1, "{i}");
    }
    fs.remove_dir_all("d").unwrap();
    assert!(listing.next().is_none());
}

/// What is open for appending when the file becomes append-only, or was opened since, writes at the end alone.
#[test]
fn an_append_only_file_is_not_written_over() {
    let fs = Fs::in_memory(64 << 20, &Options::default()).unwrap();
    fs.write("log", b"one").unwrap();
    let set = SetAttr { flags: Some(braidfs::format::inode::APPEND), ..SetAttr::default() };
    fs.set_attributes("log", true, &set).unwrap();
    assert_eq!(OpenOptions::new().write(true).open(&fs, "log").unwrap_err().errno(), 1);
    assert_eq!(OpenOptions::new().append(true).truncate(true).open(&fs, "log").unwrap_err().errno(), 1);
    let mut log = OpenOptions::new().append(true).open(&fs, "log").unwrap();
    assert_eq!(log.write_at(b"ONE", 0).unwrap_err().errno(), 1);
    log.write_all(b" two").unwrap();
    assert_eq!(fs.read("log").unwrap(), b"one two");
}

#[test]
fn attributes_and_copies() {
    let options = Options::default().with_owner(7, 8).with_umask(0o027);
    let fs = Fs::in_memory(64 << 20, &options).unwrap();
    fs.write("f", vec![5; 3 << 20]).unwrap();
    let m = fs.metadata("f").unwrap();
    assert_eq!((m.attr().uid, m.attr().gid, m.permissions(), m.len()), (7, 8, 0o640, 3 << 20));
    let long_ago = UNIX_EPOCH - Duration::from_nanos(1_500_000_000);
    fs.set_times("f", None, Some(long_ago)).unwrap();
    fs.set_permissions("f", 0o4755).unwrap();
    let m = fs.metadata("f").unwrap();
    assert_eq!((m.modified(), m.permissions()), (long_ago, 0o4755));
    assert!(m.accessed() > UNIX_EPOCH && m.created() <= m.changed());
    fs.set_times("f", None, None).unwrap();
    fs.open_read("f").unwrap().set_times(None, None).unwrap();
    assert_eq!(fs.metadata("f").unwrap(), m, "nothing was set");
    assert_eq!(fs.set_times("nowhere", None, None).unwrap_err().errno(), 2);
    assert_eq!(fs.set_xattr("f", true, b"user.\0k", b"v", XattrMode::Create).unwrap_err().errno(), 22);
    assert_eq!(fs.xattr("f", true, b"user.\0k").unwrap_err().errno(), 22);
    fs.set_xattr("f", true, b"user.k", b"v", XattrMode::Create).unwrap();
    assert_eq!(fs.xattr("f", true, b"user.k").unwrap(), b"v");
    assert_eq!(fs.xattrs("f", true).unwrap(), [b"user.k"]);
    fs.remove_xattr("f", true, b"user.k").unwrap();
    assert_eq!(fs.xattr("f", true, b"user.k").unwrap_err().errno(), 61);
    assert_eq!(fs.copy("f", "g").unwrap(), 3 << 20);
    assert_eq!(fs.metadata("g").unwrap().permissions(), 0o4755);
    assert!(fs.read("g").unwrap() == fs.read("f").unwrap());
    fs.hard_link("g", "h").unwrap();
    assert_eq!(kind(fs.copy("g", "h")), ErrorKind::InvalidInput);
    assert_eq!(fs.metadata("g").unwrap().len(), 3 << 20);
    let space = fs.statvfs();
    assert!(space.available > 0 && space.available < space.blocks);
    fs.symlink("f", "l").unwrap();
    fs.set_permissions("l", 0o600).unwrap();
    assert_eq!(fs.metadata("f").unwrap().permissions(), 0o600);
}

#[test]
fn what_was_written_is_there_after_a_close() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("vol.img");
    assert_eq!(kind(Fs::open(&[&image], &Options::default())), ErrorKind::NotFound);
    assert_eq!(kind(Fs::format(&image, 1 << 20, &Default::default())), ErrorKind::InvalidInput);
    assert!(!image.exists(), "an image is left of a volume that could not be made");
    Fs::format(&image, 64 << 20, &Default::default()).unwrap();
    assert_eq!(kind(Fs::format(&image, 64 << 20, &Default::default())), ErrorKind::AlreadyExists);
    let fs = Fs::open(&[&image], &Options::default()).unwrap();
    assert_eq!(kind(Fs::open(&[&image], &Options::default())), ErrorKind::ResourceBusy);
    let file = fs.create("f").unwrap();
    (&file).write_all(b"kept").unwrap();
    file.sync_start(false).wait().unwrap();
    fs.sync_start().wait().unwrap();
    // closes only without open files, and goes on as before
    let fs = fs.close().unwrap_err().fs.unwrap();
    let listing = fs.read_dir("/").unwrap();
    drop(file);
    let fs = fs.close().unwrap_err().fs.unwrap();
    assert_eq!(fs.open_handles(), 1);
    drop(listing);
    fs.close().unwrap();
    let fs = Fs::open(&[&image], &Options::read_only()).unwrap();
    assert_eq!(fs.read("f").unwrap(), b"kept");
    assert_eq!(kind(fs.create("g")), ErrorKind::ReadOnlyFilesystem);
    // as open(2) has it: not first where something is written
    for how in [OpenOptions::new().read(true).write(true), OpenOptions::new().append(true)] {
        assert_eq!(kind(how.open(&fs, "f")), ErrorKind::ReadOnlyFilesystem);
    }
    assert_eq!(kind(OpenOptions::new().write(true).open(&fs, "/")), ErrorKind::IsADirectory);
    let file = fs.open_read("f").unwrap();
    // dropped, it ends with its last file
    drop(fs);
    assert_eq!(file.metadata().unwrap().len(), 4);
    drop(file);
    Fs::open(&[&image], &Options::default()).unwrap().close().unwrap();
}

/// As after a crash: what was synced is there.
#[test]
fn an_abandoned_volume_has_what_was_synced() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("vol.img");
    Fs::format(&image, 64 << 20, &Default::default()).unwrap();
    let fs = Fs::open(&[&image], &Options::parse("commit=3600").unwrap()).unwrap();
    let mut file = fs.create("synced").unwrap();
    file.write_all(b"1").unwrap();
    file.sync_all().unwrap();
    drop(file);
    fs.write("late", b"2").unwrap();
    fs.abandon();
    let fs = Fs::open(&[&image], &Options::default()).unwrap();
    assert_eq!((fs.read("synced").unwrap().as_slice(), fs.exists("late").unwrap()), (&b"1"[..], false));
    fs.close().unwrap();
}

/// Also where files are open: neither its threads nor the end of the last handle write anything.
#[test]
fn an_abandoned_volume_with_open_files_writes_nothing_more() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("vol.img");
    Fs::format(&image, 16 << 20, &Default::default()).unwrap();
    let fs = Fs::open(&[&image], &Options::parse("commit=1").unwrap()).unwrap();
    let mut file = fs.create("synced").unwrap();
    file.write_all(b"1").unwrap();
    file.sync_all().unwrap();
    let listing = fs.read_dir("/").unwrap();
    fs.write("late", b"2").unwrap();
    fs.abandon();
    let before = std::fs::read(&image).unwrap();
    assert!(file.sync_all().is_err() && file.write_all(b"3").is_err());
    std::thread::sleep(Duration::from_millis(1500));
    drop((file, listing));
    assert!(std::fs::read(&image).unwrap() == before, "something was written");
    let fs = Fs::open(&[&image], &Options::default()).unwrap();
    assert_eq!((fs.read("synced").unwrap().as_slice(), fs.exists("late").unwrap()), (&b"1"[..], false));
    fs.close().unwrap();
}

#[test]
fn options_are_text() {
    for bad in [
        "x",
        "ro=1",
        "commit",
        "commit=-1",
        "data=x",
        "umask=8",
        "umask=1000",
        "cache=99999999999T",
        "cache=é",
        "numa=1",
        "numa",
    ] {
        assert_eq!(kind(Options::parse(bad)), ErrorKind::InvalidInput, "{bad}");
    }
    let o = Options::parse("ro,,rw,uid=3,gid=4,data=journal,overwrite=log,cache=1G").unwrap();
    assert_eq!((o.mount.read_only, o.owner, o.mount.cache_bytes), (false, (3, 4), 1 << 30));
    let numa = |text| Options::parse(text).unwrap().mount.numa;
    assert!(matches!((numa("numa=off"), numa("numa=off,numa=auto")), (Numa::Off, Numa::Auto)));
    assert!(braidfs_fs::parse_mkfs("label=a,domains=2,group-size=4M,inline=0,data-checksums").is_ok());
    assert_eq!(kind(braidfs_fs::parse_mkfs("inline=1M")), ErrorKind::InvalidInput);
}

/// A directory of a failed domain comes from the device again as it was, and may name what is gone in memory.
#[test]
fn a_name_of_what_a_failed_domain_has_removed_is_nowhere() {
    let faults = Arc::new(FaultDevice::new(Arc::new(MemDevice::new(8192)), 1));
    let devices: Vec<Arc<dyn Device>> = vec![faults.clone()];
    braidfs::mkfs::format(&devices, &MkfsOptions { domains: Some(1), ..MkfsOptions::default() }).unwrap();
    let mount = MountOptions { background: false, cache_bytes: 1, ..MountOptions::default() };
    let fs = Fs::on(devices, &Options::new(mount)).unwrap();
    fs.create_dir("d").unwrap();
    fs.write("d/a", b"").unwrap();
    fs.create_dir("others").unwrap();
    for i in 0..600 {
        fs.write(format!("others/{i}"), [1; 5000]).unwrap();
    }
    fs.sync().unwrap();
    let ino = fs.metadata("d/a").unwrap().attr().ino;
    fs.remove_file("d/a").unwrap();
    faults.add(Rule::new(Op::Write, Effect::Fail(5)));
    fs.sync().unwrap_err();
    faults.clear();
    for i in 0..600 {
        // the directory leaves memory, and the inode does not: somebody asks for it
        fs.read(format!("others/{i}")).unwrap();
        assert!(matches!(fs.volume().open(ino), Err(braidfs::Error::NotFound)));
    }
    fs.metadata("d/a").expect("the directory is as it was on the device");
    assert_eq!(kind(fs.set_permissions("d/a", 0o600)), ErrorKind::NotFound);
    assert_eq!(kind(fs.read_dir("d/a")), ErrorKind::NotFound);
    assert!(fs.remove_dir_all("d").is_err());
}
