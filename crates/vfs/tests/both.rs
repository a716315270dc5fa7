//! The same calls on both adapters: the same answers, the same kinds of errors.

use braidfs_vfs::{FileKind, FileSystem, Kernel, Library, OpenHow, Stat, Timestamp};
use std::io::ErrorKind;

/// What `fs`, which is empty, answers to a run of calls, in words that do not depend on it.
fn answers<F: FileSystem>(fs: &F) -> Vec<String> {
    let mut out = Vec::new();
    let mut say = |what: &str, answer: Result<String, std::io::Error>| {
        out.push(format!("{what}: {:?}", answer.map_err(|e| e.kind())));
    };
    say("mkdir", fs.mkdir(c"d", 0o755).map(|()| String::new()));
    say("mkdir again", fs.mkdir(c"d", 0o755).map(|()| String::new()));
    say("open what is not there", fs.open(c"d/f", OpenHow::READ).map(|_| String::new()));
    let file = fs.open(c"d/f", OpenHow { mode: 0o640, ..OpenHow::FRESH }).unwrap();
    say("open afresh again", fs.open(c"d/f", OpenHow::FRESH).map(|_| String::new()));
    say("write", fs.write_all(&file, 1 << 20, &[7; 5000]).map(|()| String::new()));
    say(
        "append",
        fs.append(&fs.open(c"d/f", OpenHow { append: true, ..OpenHow::WRITE }).unwrap(), b"end")
            .map(|()| String::new()),
    );
    let mut buf = [0; 5003];
    say("read", fs.read_exact(&file, 1 << 20, &mut buf).map(|()| format!("{:?}", &buf[4998..])));
    say("read past the end", fs.read_exact(&file, (1 << 20) + 5000, &mut buf).map(|()| String::new()));
    say("read at the end", fs.read(&file, 2 << 20, &mut buf).map(|n| n.to_string()));
    say("data", fs.next_data(&file, 0).map(|d| format!("{:?}", d.map(|d| d.start))));
    say("no data", fs.next_data(&file, (1 << 20) + 5003).map(|d| format!("{d:?}")));
    say("truncate", fs.truncate(&file, 10).map(|()| String::new()));
    say("fsync", fs.fsync(&file, false).and_then(|()| fs.fsync(&file, true)).map(|()| String::new()));
    let described = |s: Stat| format!("{:?} {:o} {} {} {} {}", s.kind, s.mode, s.uid, s.gid, s.size, s.rdev);
    say("stat", fs.stat(c"d/f", true).map(described));
    say("stat of what is open", fs.stat_of(&file).map(described));
    let same = fs.stat_of(&file).unwrap().id == fs.stat(c"d/f", true).unwrap().id;
    say("its number", Ok(same.to_string()));
    let other = fs.open(c"d/f", OpenHow { no_wait: true, ..OpenHow::READ }).unwrap();
    say("close", fs.close(other).map(|()| String::new()));
    say("symlink", fs.symlink(c"f", c"d/l").map(|()| String::new()));
    say("readlink", fs.read_link(c"d/l").map(|t| String::from_utf8(t).unwrap()));
    say("readlink of a file", fs.read_link(c"d/f").map(|_| String::new()));
    say("stat through it", fs.stat(c"d/l", true).map(|s| format!("{:?} {}", s.kind, s.size)));
    say("stat of it", fs.stat(c"d/l", false).map(|s| format!("{:?} {}", s.kind, s.size)));
    let create = OpenHow { read: false, truncate: true, no_follow: true, ..OpenHow::CREATE };
    say("open it itself", fs.open(c"d/l", create).map(|_| String::new()));
    say("mknod", fs.mknod(c"d/p", FileKind::Fifo, 0o600, 0).map(|()| String::new()));
    say("stat of a pipe", fs.stat(c"d/p", false).map(described));
    let time = |sec| Timestamp { sec, nsec: 5 };
    let set = Stat { mode: 0o4711, atime: time(100), mtime: time(-7), ..fs.stat(c"d/f", true).unwrap() };
    say("attributes", fs.set_attributes(c"d/f", &set, false).map(|()| String::new()));
    say("attributes set", fs.stat(c"d/f", true).map(|s| format!("{:o} {:?} {:?}", s.mode, s.atime, s.mtime)));
    let set = Stat { mode: 0o2750, mtime: time(9), ..set };
    say("attributes by a descriptor", fs.set_attributes_of(&file, &set).map(|()| String::new()));
    say("attributes set so", fs.stat(c"d/f", true).map(|s| format!("{:o} {:?} {:?}", s.mode, s.atime, s.mtime)));
    say("attributes of another kind", fs.set_attributes(c"d/l", &set, false).map(|()| String::new()));
    let set = Stat { mtime: time(11), ..set };
    say("attributes behind a symlink", fs.set_attributes(c"d/l", &set, true).map(|()| String::new()));
    say("attributes set there", fs.stat(c"d/f", true).map(|s| format!("{:o} {:?}", s.mode, s.mtime)));
    for name in [c"d/l", c"d/p", c"d"] {
        let set = Stat { mode: 0o1700, mtime: time(77), ..fs.stat(name, false).unwrap() };
        say("attributes of others", fs.set_attributes(name, &set, false).map(|()| String::new()));
        say("set", fs.stat(name, false).map(|s| format!("{:o} {:?}", s.mode, s.mtime)));
    }
    say("link", fs.link(c"d/f", c"d/h").map(|()| String::new()));
    say("link to what is there", fs.link(c"d/f", c"d/l").map(|()| String::new()));
    say("link of a symlink", fs.link(c"d/l", c"d/m").map(|()| String::new()));
    say("what it is", fs.stat(c"d/m", false).map(|s| format!("{:?} {}", s.kind, s.nlink)));
    say("the same file", Ok((fs.stat(c"d/h", true).unwrap().id == set.id).to_string()));
    for name in [c"d/h", c"d/m"] {
        say("unlink of another name", fs.unlink(name).map(|()| String::new()));
    }
    say("names left", fs.stat(c"d/f", true).map(|s| s.nlink.to_string()));
    say("attributes of another kind", fs.set_xattr(c"d/l", FileKind::File, b"trusted.t", b"1").map(|()| String::new()));
    let own =
        |all: Vec<(Vec<u8>, Vec<u8>)>| all.iter().filter(|(n, _)| !n.starts_with(b"security.")).count().to_string();
    say("attributes of none", fs.xattrs(c"d/l").map(own));
    say("attributes of nothing", fs.xattrs(c"d/n").map(own));
    say("rename", fs.rename(c"d/f", c"d/g").map(|()| String::new()));
    say(
        "list",
        fs.list(c"d").map(|mut names| {
            names.sort();
            format!("{names:?}")
        }),
    );
    say("list of a file", fs.list(c"d/g").map(|_| String::new()));
    say("same inode", Ok((fs.stat(c"d/g", true).unwrap().id == set.id).to_string()));
    say("rmdir of a full one", fs.rmdir(c"d").map(|()| String::new()));
    for name in [c"d/g", c"d/l", c"d/p"] {
        say("unlink", fs.unlink(name).map(|()| String::new()));
    }
    say("unlink of nothing", fs.unlink(c"d/g").map(|()| String::new()));
    say("unlink of a directory", fs.unlink(c"d").map(|()| String::new()));
    say("rmdir", fs.rmdir(c"d").map(|()| String::new()));
    say("stat of the root", fs.stat(c".", true).map(|s| format!("{:?}", s.kind)));
    say("sync", fs.sync().map(|()| String::new()));
    out
}

#[test]
fn both_adapters_answer_alike() {
    let dir = tempfile::tempdir().unwrap();
    let (image, root) = (dir.path().join("image"), dir.path().join("root"));
    std::fs::File::create_new(&image).unwrap().set_len(64 << 20).unwrap();
    std::fs::create_dir(&root).unwrap();
    Library::format(&image).unwrap();
    let mut library = Library::mount(&image).unwrap();
    // new files belong to who runs the test, on both
    (library.cred.uid, library.cred.gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    rustix::process::umask(rustix::fs::Mode::empty());
    let (got, want) = (answers(&library), answers(&Kernel::at(&root).unwrap()));
    assert_eq!(got, want);
    assert!(got.iter().filter(|a| a.contains("Err")).count() > 5, "{got:?}");
    // what the library says of itself is kept
    let e = library.open(c"nothing", OpenHow::READ).unwrap_err();
    assert_eq!((e.kind(), e.to_string().as_str()), (ErrorKind::NotFound, "no such file or directory"));
    // a path that starts with a slash starts at the root, too
    library.mkdir(c"//d", 0o755).unwrap();
    assert_eq!(library.stat(c"/d/", true).unwrap().kind, FileKind::Dir);
    library.unmount().unwrap();
}

#[test]
fn other_content_and_other_owners_get_no_file_capabilities() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    std::fs::File::create_new(&image).unwrap().set_len(64 << 20).unwrap();
    Library::format(&image).unwrap();
    let library = Library::mount(&image).unwrap();
    let name = b"security.capability";
    // net_raw, permitted and effective
    let value: Vec<u8> = [0x0200_0001u32, 1 << 13, 0, 0, 0].iter().flat_map(|w| w.to_le_bytes()).collect();
    let file = library.open(c"f", OpenHow::CREATE).unwrap();
    library.write_all(&file, 0, b"text").unwrap();
    let stat = library.stat(c"f", true).unwrap();
    let truncate = OpenHow { truncate: true, ..OpenHow::WRITE };
    let changes: [(&str, bool, &dyn Fn()); 5] = [
        ("read", true, &|| drop(library.open(c"f", OpenHow::READ).unwrap())),
        ("write", false, &|| library.write_all(&library.open(c"f", OpenHow::WRITE).unwrap(), 0, b"x").unwrap()),
        ("truncate", false, &|| drop(library.open(c"f", truncate).unwrap())),
        ("chown by name", false, &|| library.set_attributes(c"f", &stat, false).unwrap()),
        ("chown", false, &|| library.set_attributes_of(&file, &stat).unwrap()),
    ];
    for (what, keeps, change) in changes {
        library.volume.setxattr(file.ino(), name, &value, braidfs::XattrMode::Set).unwrap();
        change();
        assert_eq!(library.volume.has_capabilities(&file), keeps, "{what}");
    }
    drop(file);
    library.unmount().unwrap();
}

/// As in Linux.
#[test]
fn a_default_acl_takes_the_place_of_the_umask() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    std::fs::File::create_new(&image).unwrap().set_len(64 << 20).unwrap();
    Library::format(&image).unwrap();
    let library = Library { umask: 0o077, ..Library::mount(&image).unwrap() };
    library.mkdir(c"plain", 0o777).unwrap();
    library.mkdir(c"shared", 0o777).unwrap();
    let entries: [(u16, u16, u32); 5] = [(1, 7, !0), (2, 7, 1234), (4, 5, !0), (16, 7, !0), (32, 5, !0)];
    let mut acl = 2u32.to_le_bytes().to_vec();
    for (tag, may, id) in entries {
        acl.extend([tag.to_le_bytes(), may.to_le_bytes()].concat());
        acl.extend(id.to_le_bytes());
    }
    let shared = library.attr(c"shared", true).unwrap().ino;
    library.volume.setxattr(shared, b"system.posix_acl_default", &acl, braidfs::XattrMode::Set).unwrap();
    for (names, file, below) in [
        ([c"plain/file", c"plain/pipe", c"plain/dir"], 0o600, 0o700),
        ([c"shared/file", c"shared/pipe", c"shared/dir"], 0o664, 0o775),
    ] {
        drop(library.open(names[0], OpenHow { mode: 0o666, ..OpenHow::FRESH }).unwrap());
        library.mknod(names[1], FileKind::Fifo, 0o666, 0).unwrap();
        library.mkdir(names[2], 0o777).unwrap();
        let modes = names.map(|name| library.stat(name, true).unwrap().mode);
        assert_eq!(modes, [file, file, below], "{names:?}");
    }
    library.unmount().unwrap();
}
