//! A volume in an image, used without mounting: mkfs, mkdir, cp, ls, cat, rm, fsck, info, dump, scrub.

mod common;
use common::{Bench, run};
use rustix::fs::{CWD, FileType as RawKind};
use std::ffi::OsStr;
use std::io::{Read, Write, stderr};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt, chown, symlink};
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Bytes that compress to nothing simple.
fn noise(n: usize) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(1);
    std::iter::repeat_with(|| random.u8(..)).take(n).collect()
}

fn json(text: &str) -> serde_json::Value {
    serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"))
}

#[test]
fn files_go_in_and_come_out() {
    let b = Bench::with_volume();
    let big = noise(3_000_001);
    b.write("dir/big", &big);
    b.write("dir/sub/small", "hello\n");
    b.write("dir/empty", "");
    symlink("sub/small", b.path("dir/link")).unwrap();
    b.run(&["cp", "-r", "dir", "vol.img:/"]).ok();
    assert_eq!(b.run(&["ls", "vol.img"]).ok().out, "dir\n");
    assert_eq!(b.run(&["ls", "vol.img", "/dir"]).ok().out, "big\nempty\nlink\nsub\n");
    assert_eq!(b.run(&["cat", "vol.img", "/dir/link"]).ok().out, "hello\n");
    let long = b.run(&["ls", "-l", "vol.img:/dir"]).ok().out;
    assert!(long.contains("3000001") && long.contains("link -> sub/small"), "{long}");
    let all = b.run(&["ls", "-Ra", "vol.img"]).ok().out;
    assert!(all.contains("/dir/sub:\n.\n..\nsmall\n"), "{all}");
    b.run(&["cp", "-r", "vol.img:/dir", "out"]).ok();
    assert_eq!(b.read("out/big"), big);
    assert_eq!(b.read("out/sub/small"), b"hello\n");
    assert_eq!(b.read("out/empty"), b"");
    assert_eq!(std::fs::read_link(b.path("out/link")).unwrap().to_str(), Some("sub/small"));
    // Inside the volume, too.
    b.run(&["cp", "-r", "vol.img:/dir", "vol.img:/copy"]).ok();
    b.run(&["cp", "vol.img:/copy/big", "again"]).ok();
    assert_eq!(b.read("again"), big);
    b.run(&["fsck", "-f", "vol.img"]).ok();
}

#[test]
fn modes_times_and_holes_survive() {
    let b = Bench::with_volume();
    let file = b.sparse("sparse", 20 << 20);
    file.write_all_at(b"middle", 9 << 20).unwrap();
    std::fs::set_permissions(b.path("sparse"), PermissionsExt::from_mode(0o640)).unwrap();
    let when = std::time::UNIX_EPOCH + std::time::Duration::new(1_000_000_000, 123_456_789);
    file.set_modified(when).unwrap();
    b.run(&["cp", "-p", "sparse", "vol.img:/s"]).ok();
    b.run(&["cp", "-p", "vol.img:/s", "back"]).ok();
    let meta = std::fs::metadata(b.path("back")).unwrap();
    assert_eq!((meta.mode() & 0o7777, meta.len()), (0o640, 20 << 20));
    assert_eq!(meta.modified().unwrap(), when);
    assert!(meta.blocks() * 512 < 1 << 20, "the hole was filled: {} blocks", meta.blocks());
    assert_eq!(b.read("back"), b.read("sparse"));
    let info = json(&b.run(&["info", "--json", "vol.img"]).ok().out);
    let used = info["space"]["blocks"].as_u64().unwrap() - info["space"]["free"].as_u64().unwrap();
    assert!(used < 5000, "20 MiB of hole became {used} blocks");
}

/// Files of /sys have the size of a page, whatever their content is.
#[test]
fn what_ends_before_its_size_is_copied_to_its_end() {
    let b = Bench::with_volume();
    let odd = |path: &&str| {
        let size = std::fs::metadata(path).map_or(0, |m| m.len());
        std::fs::read(path).is_ok_and(|content| !content.is_empty() && (content.len() as u64) < size)
    };
    let candidates =
        ["/sys/kernel/mm/transparent_hugepage/enabled", "/sys/devices/system/cpu/online", "/sys/kernel/profiling"];
    let Some(path) = candidates.iter().find(|path| odd(path)) else {
        _ = writeln!(stderr(), "SKIPPED: no file of /sys that is longer than its content");
        return;
    };
    b.run(&["cp", path, "vol.img:/f"]).ok();
    assert_eq!(b.run(&["cat", "vol.img:/f"]).ok().out.as_bytes(), std::fs::read(path).unwrap());
    b.run(&["fsck", "-f", "vol.img"]).ok();
}

#[test]
fn wrong_copies_are_refused() {
    let b = Bench::with_volume();
    b.write("dir/a", "a");
    b.write("file", "f");
    b.run(&["cp", "dir", "vol.img:/"]).fails(1, &["is a directory", "-r"]);
    b.run(&["cp", "missing", "vol.img:/"]).fails(1, &["missing", "no such file"]);
    b.run(&["cp", "vol.img:/missing", "."]).fails(1, &["vol.img:/missing", "no such file"]);
    b.run(&["cp", "file", "dir/a", "vol.img:/nowhere"]).fails(1, &["make it first"]);
    b.run(&["cp", "file", "vol.img:/no/parent"]).fails(1, &["no such file"]);
    b.run(&["cp", "-r", "dir", "vol.img:/d"]).ok();
    b.run(&["cp", "file", "vol.img:/d/a"]).ok();
    assert_eq!(b.run(&["cat", "vol.img:/d/a"]).ok().out, "f");
    // slashes in front mean nothing
    b.run(&["cp", "file", "vol.img://d/b"]).ok();
    b.run(&["cp", "vol.img:///d//b", "vol.img:/d/b"]).fails(1, &["same file"]);
    assert_eq!(b.run(&["cat", "vol.img:/d/b"]).ok().out, "f");
    b.run(&["rm", "vol.img:/d/b"]).ok();
    b.run(&["cp", "vol.img:/d/a", "vol.img:/d/a"]).fails(1, &["same file"]);
    b.run(&["cp", "-r", "vol.img:/d", "vol.img:/d"]).fails(1, &["into itself"]);
    b.run(&["cp", "-r", "vol.img:/", "vol.img:/d/all"]).fails(1, &["into itself"]);
    assert_eq!(b.run(&["ls", "-R", "vol.img:/d"]).ok().out, "/d:\na\n");
    // nor by a link that leads into it
    std::fs::create_dir_all(b.path("links")).unwrap();
    symlink("d/c/e", b.path("links/link")).unwrap();
    b.run(&["mkdir", "-p", "vol.img:/d/c/e", "/free"]).ok();
    b.run(&["cp", "-r", "links/link", "vol.img:/"]).ok();
    for to in ["vol.img:/link", "vol.img:/link/x", "vol.img:/free/../link/../e"] {
        b.run(&["cp", "-r", "vol.img:/d", to]).fails(1, &["/d: a directory cannot be copied into itself"]);
    }
    b.run(&["cp", "-r", "vol.img:/d", "vol.img:/d/c/.."]).fails(1, &["into itself"]);
    b.run(&["cp", "-r", "vol.img:/d", "vol.img:/"]).fails(1, &["same file"]);
    assert_eq!(b.run(&["ls", "-R", "vol.img:/d"]).ok().out, "/d:\na\nc\n\n/d/c:\ne\n\n/d/c/e:\n");
    // what is on the way by name alone is no obstacle
    b.run(&["cp", "-r", "vol.img:/d", "vol.img:/d/../free"]).ok();
    b.run(&["cat", "vol.img:/free/d/a"]).ok();
    b.run(&["fsck", "-f", "vol.img"]).ok();
}

#[test]
fn a_volume_cannot_write_through_links_of_the_host() {
    let b = Bench::with_volume();
    b.write("src/x", "new");
    b.run(&["cp", "-r", "src", "vol.img:/src"]).ok();
    b.write("precious", "old");
    std::fs::create_dir(b.path("out")).unwrap();
    symlink(b.path("precious"), b.path("out/x")).unwrap();
    b.run(&["cp", "-r", "vol.img:/src/", "out"]).ok();
    assert_eq!(b.read("precious"), b"old");
}

#[test]
fn the_image_of_an_open_volume_is_no_file_to_copy() {
    let b = Bench::with_volume();
    b.write("dir/f", "content");
    b.run(&["cp", "dir/f", "vol.img:/f"]).ok();
    // a colon and a slash were forgotten
    b.run(&["cp", "vol.img:/f", "vol.img"]).fails(1, &["vol.img: is a device of a volume that is open"]);
    std::fs::hard_link(b.path("vol.img"), b.path("dir/other name")).unwrap();
    b.run(&["cp", "vol.img:/f", "dir/other name"]).fails(1, &["is a device of a volume that is open"]);
    // a volume has a file of its image's name
    b.run(&["cp", "dir/f", "vol.img:/vol.img"]).ok();
    b.run(&["cp", "-r", "vol.img:/", "."]).fails(1, &["vol.img: is a device of a volume that is open"]);
    assert_eq!(b.read("f"), b"content");
    b.run(&["cp", "-r", ".", "vol.img:/all"]).fails(1, &["vol.img: is the volume itself", "other name: is the volume"]);
    assert_eq!(b.run(&["ls", "-R", "vol.img:/all"]).ok().out, "/all:\ndir\nf\n\n/all/dir:\nf\n");
    // a link to it is replaced, and an image that is only read is copied
    symlink("vol.img", b.path("link")).unwrap();
    b.run(&["cp", "vol.img:/f", "link"]).ok();
    assert_eq!(b.read("link"), b"content");
    b.run(&["mkfs", "-q", "--size", "256M", "large.img"]).ok();
    b.run(&["cp", "vol.img:/f", "vol.img", "large.img:/"]).ok();
    b.run(&["fsck", "-f", "vol.img"]).ok();
    b.run(&["cp", "large.img:/vol.img", "copy.img"]).ok();
    assert!(b.read("copy.img") == b.read("vol.img"));
}

/// As cp(1): the content goes into a device or a pipe that is named, also by a link. In a directory they are replaced.
#[test]
fn what_is_no_file_is_written_into_where_it_is_named() {
    let b = Bench::with_volume();
    let kind = |path: &str| std::fs::symlink_metadata(b.path(path)).unwrap().file_type();
    // less than a pipe holds
    b.sparse("f", 50_000).write_all_at(&noise(30_000), 20_000).unwrap();
    b.run(&["cp", "f", "vol.img:/f"]).ok();
    let whole = b.read("f");
    rustix::fs::mknodat(CWD, b.path("pipe"), RawKind::Fifo, 0o600.into(), 0).unwrap();
    symlink("pipe", b.path("link")).unwrap();
    for (to, more) in [("pipe", &[][..]), ("link", &[]), ("pipe", &["-p"]), ("link", &["-r"])] {
        let nonblocking = rustix::fs::OFlags::NONBLOCK.bits() as i32;
        let mut pipe =
            std::fs::File::options().read(true).write(true).custom_flags(nonblocking).open(b.path("pipe")).unwrap();
        b.run(&[&["cp"][..], more, &["vol.img:/f", to]].concat()).ok();
        let mut got = vec![0; whole.len()];
        pipe.read_exact(&mut got).unwrap();
        assert!(got == whole && kind("pipe").is_fifo() && kind("link").is_symlink(), "{to}");
        assert_eq!(pipe.read(&mut got).unwrap_err().kind(), std::io::ErrorKind::WouldBlock, "more than that");
        assert_eq!(std::fs::metadata(b.path("pipe")).unwrap().mode() & 0o777, 0o600);
    }
    // the standard output, and a file behind it, which begins anew
    symlink("/proc/self/fd/1", b.path("out")).unwrap();
    b.write("said", "long ago".repeat(1 << 20));
    let mut to_file = Command::new(env!("CARGO_BIN_EXE_braidfs"));
    let said = std::fs::File::options().write(true).open(b.path("said")).unwrap();
    run(to_file.args(["cp", "vol.img:/f", "out"]).current_dir(b.path(".")).stdout(said)).ok();
    assert!(b.read("said") == whole && kind("out").is_symlink());
    b.run(&["mkdir", "vol.img:/d"]).ok();
    b.write("word", "a word");
    b.run(&["cp", "word", "vol.img:/d/pipe"]).ok();
    assert_eq!(b.run(&["cp", "vol.img:/d/pipe", "out"]).ok().out, "a word");
    b.run(&["cp", "-r", "vol.img:/d/.", "."]).ok();
    assert_eq!(b.read("pipe"), b"a word");
}

#[test]
fn devices_are_written_into_where_they_are_named() {
    let b = Bench::with_volume();
    b.write("f", noise(1 << 20));
    b.run(&["cp", "f", "vol.img:/f"]).ok();
    let node = |path: &str, kind, (major, minor)| {
        rustix::fs::mknodat(CWD, b.path(path), kind, 0o600.into(), rustix::fs::makedev(major, minor)).is_ok()
    };
    // as /dev/null and /dev/full, here
    if !node("null", RawKind::CharacterDevice, (1, 3)) || std::fs::write(b.path("null"), "x").is_err() {
        _ = writeln!(stderr(), "SKIPPED: device nodes need root, and a file system that honours them");
        return;
    }
    assert!(node("full", RawKind::CharacterDevice, (1, 7)));
    let is_node = |path: &str| std::fs::symlink_metadata(b.path(path)).unwrap().file_type().is_char_device();
    for more in [&[][..], &["-p"], &["-r"]] {
        b.run(&[&["cp"][..], more, &["vol.img:/f", "null"]].concat()).ok();
        b.run(&[&["cp"][..], more, &["vol.img:/f", "full"]].concat()).fails(1, &["to full: no space left"]);
        assert!(is_node("null") && is_node("full"));
    }
    symlink("null", b.path("link")).unwrap();
    b.run(&["cp", "vol.img:/f", "link"]).ok();
    assert!(is_node("null") && std::fs::symlink_metadata(b.path("link")).unwrap().is_symlink());
    assert_eq!(std::fs::metadata(b.path("null")).unwrap().mode() & 0o777, 0o600);
}

/// Programs of others do not become set-user-ID programs of who copies them.
#[test]
fn who_may_not_give_files_away_keeps_no_set_user_id() {
    if !rustix::process::geteuid().is_root() {
        _ = writeln!(stderr(), "SKIPPED: files of others need root");
        return;
    }
    const NOBODY: u32 = 65534;
    let b = Bench::with_volume();
    let mode = |path: &str, mode| std::fs::set_permissions(b.path(path), PermissionsExt::from_mode(mode)).unwrap();
    let shown = |path: &str| {
        let m = std::fs::symlink_metadata(b.path(path)).unwrap();
        (m.uid(), m.gid(), m.mode() & 0o7777)
    };
    for name in ["d/root's", "d/own"] {
        b.write(name, "program");
    }
    for (path, uid, set) in [("d", 0, 0o3775), ("d/root's", 0, 0o6755), ("d/own", NOBODY, 0o6755)] {
        chown(b.path(path), Some(uid), Some(NOBODY)).unwrap();
        mode(path, set);
    }
    b.run(&["cp", "-rp", "d", "vol.img:/d"]).ok();
    std::fs::create_dir(b.path("out")).unwrap();
    // what is made here would have another group
    mode("out", 0o2777);
    mode(".", 0o755);
    mode("vol.img", 0o644);
    run(Command::new(env!("CARGO_BIN_EXE_braidfs"))
        .args(["cp", "-rp", "vol.img:/d", "out/d"])
        .current_dir(b.path("."))
        .uid(NOBODY)
        .gid(NOBODY))
    .ok();
    assert_eq!(shown("out/d"), (NOBODY, NOBODY, 0o775));
    assert_eq!(shown("out/d/root's"), (NOBODY, NOBODY, 0o755));
    assert_eq!(shown("out/d/own"), (NOBODY, NOBODY, 0o6755));
    // who may does
    b.run(&["cp", "-rp", "vol.img:/d", "again"]).ok();
    assert_eq!(shown("again"), (0, NOBODY, 0o3775));
    assert_eq!((shown("again/root's"), shown("again/own")), ((0, NOBODY, 0o6755), (NOBODY, NOBODY, 0o6755)));
}

/// As cp(1): what is named may be a link to a directory, and its target gets the attributes.
#[test]
fn attributes_reach_a_directory_behind_a_link() {
    let b = Bench::with_volume();
    b.write("build/f", "new");
    std::fs::set_permissions(b.path("build"), PermissionsExt::from_mode(0o750)).unwrap();
    for dir in ["v/v1", "data/d", "data/e"] {
        std::fs::create_dir_all(b.path(dir)).unwrap();
    }
    symlink("v1", b.path("v/current")).unwrap();
    b.run(&["cp", "-r", "v/v1", "v/current", "vol.img:/"]).ok();
    b.run(&["cp", "-rp", "build/.", "vol.img:/current"]).ok();
    assert_eq!(b.run(&["cat", "vol.img:/v1/f"]).ok().out, "new");
    let list = b.run(&["ls", "-l", "vol.img:/"]).ok().out;
    assert!(list.contains("drwxr-x---") && list.contains("current -> v1"), "{list}");
    // and on the host
    symlink("data", b.path("out")).unwrap();
    symlink("../d", b.path("data/e/v1")).unwrap();
    for (from, to, place) in [("vol.img:/v1/.", "out", "data"), ("vol.img:/v1", "data/e", "data/d")] {
        b.run(&["cp", "-rp", from, to]).ok();
        assert_eq!(std::fs::metadata(b.path(place)).unwrap().mode() & 0o7777, 0o750);
        assert_eq!(b.read(&format!("{place}/f")), b"new");
    }
    assert!(["out", "data/e/v1"].iter().all(|l| std::fs::symlink_metadata(b.path(l)).unwrap().is_symlink()));
}

/// They were given rights to be filled.
#[test]
fn directories_have_the_rights_of_their_owner_that_they_came_with() {
    let b = Bench::with_volume();
    b.write("d/shut/f", "content");
    let mode = |path: &str, mode| std::fs::set_permissions(b.path(path), PermissionsExt::from_mode(mode)).unwrap();
    mode("d/shut", 0o555);
    for args in
        [["cp", "-r", "d", "vol.img:/d"], ["cp", "-r", "vol.img:/d", "out"], ["cp", "-rp", "vol.img:/d", "kept"]]
    {
        b.run(&args).ok();
    }
    assert!(b.run(&["ls", "-l", "vol.img:/d"]).ok().out.contains("dr-xr-xr-x"));
    for path in ["out/shut", "kept/shut"] {
        assert_eq!(std::fs::metadata(b.path(path)).unwrap().mode() & 0o7777, 0o555, "{path}");
        assert_eq!(b.read(&format!("{path}/f")), b"content");
    }
    ["d/shut", "out/shut", "kept/shut"].iter().for_each(|path| mode(path, 0o755));
}

const ACCESS_ACL: &str = "system.posix_acl_access";
const DEFAULT_ACL: &str = "system.posix_acl_default";

/// rwx for user 1234, what `group` says for the group, nothing for others.
fn acl(group: u16) -> Vec<u8> {
    let mut acl = 2u32.to_le_bytes().to_vec();
    for (tag, may, id) in [(1u16, 7u16, !0u32), (2, 7, 1234), (4, group, !0), (16, 7, !0), (32, 0, !0)] {
        acl.extend([tag.to_le_bytes(), may.to_le_bytes()].concat());
        acl.extend(id.to_le_bytes());
    }
    acl
}

#[test]
fn acls_capabilities_and_attributes_are_kept() {
    let b = Bench::with_volume();
    b.write("d/f", "content");
    b.write("d/plain", "content");
    let set = |path: &str, name: &str, value: &[u8]| {
        rustix::fs::lsetxattr(b.path(path), name, value, rustix::fs::XattrFlags::empty())
    };
    let get = |path: String, name: &str| {
        let mut value = vec![0; 4096];
        rustix::fs::lgetxattr(b.path(&path), name, &mut value[..]).ok().map(|n| value[..n].to_vec())
    };
    rustix::fs::mknodat(CWD, b.path("d/pipe"), RawKind::Fifo, 0o600.into(), 0).unwrap();
    symlink("f", b.path("d/link")).unwrap();
    // net_raw, permitted and effective
    let capability: Vec<u8> = [0x0200_0001u32, 1 << 13, 0, 0, 0].iter().flat_map(|w| w.to_le_bytes()).collect();
    let all = [
        ("d/f", "user.tag", b"blue".to_vec()),
        ("d", "user.tag", b"red".to_vec()),
        ("d/f", ACCESS_ACL, acl(4)),
        ("d", ACCESS_ACL, acl(0)),
        ("d", DEFAULT_ACL, acl(5)),
        ("d/f", "security.capability", capability),
        ("d/pipe", ACCESS_ACL, acl(6)),
        ("d/pipe", "trusted.tag", b"green".to_vec()),
        ("d/link", "trusted.tag", b"yellow".to_vec()),
    ];
    let there: Vec<_> = all.iter().filter(|(path, name, value)| set(path, name, value).is_ok()).collect();
    if there.len() < all.len() {
        _ = writeln!(stderr(), "SKIPPED: {} attributes that the host does not take", all.len() - there.len());
    }
    b.run(&["cp", "-rp", "d", "vol.img:/d"]).ok();
    b.run(&["cp", "-rp", "vol.img:/d", "vol.img:/again"]).ok();
    b.run(&["cp", "-rp", "vol.img:/again", "out"]).ok();
    for (path, name, value) in &there {
        assert_eq!(get(path.replacen('d', "out", 1), name).as_ref(), Some(value), "{path} {name}");
    }
    let mode = |path: &str| std::fs::metadata(b.path(path)).unwrap().mode();
    for (from, to) in [("d", "out"), ("d/f", "out/f"), ("d/plain", "out/plain"), ("d/pipe", "out/pipe")] {
        assert_eq!(mode(from), mode(to), "{to}");
    }
    // what has no ACL gets none of the directory's
    b.run(&["cp", "-p", "vol.img:/again/plain", "vol.img:/again/new"]).ok();
    b.run(&["cp", "-p", "vol.img:/again/new", "d/new"]).ok();
    assert_eq!((get("d/new".into(), ACCESS_ACL), mode("d/new")), (None, mode("d/plain")));
    b.run(&["cp", "vol.img:/again/f", "bare"]).ok();
    assert!(["user.tag", ACCESS_ACL, "security.capability"].iter().all(|name| get("bare".into(), name).is_none()));
    b.run(&["fsck", "-f", "vol.img"]).ok();
}

/// As by `cp -a` of the host: also of symlinks and pipes, and of files that are named one by one.
#[test]
fn names_of_one_file_stay_names_of_one_file() {
    let b = Bench::with_volume();
    b.write("d/a", "content");
    b.write("d/sub/alone", "content");
    symlink("a", b.path("d/link")).unwrap();
    rustix::fs::mknodat(CWD, b.path("d/pipe"), RawKind::Fifo, 0o600.into(), 0).unwrap();
    let linked = [("a", "sub/b"), ("a", "c"), ("link", "sub/link"), ("pipe", "other pipe")];
    for (old, new) in linked {
        std::fs::hard_link(b.path(&format!("d/{old}")), b.path(&format!("d/{new}"))).unwrap();
    }
    // a name that is not copied
    std::fs::hard_link(b.path("d/sub/alone"), b.path("outside")).unwrap();
    let when = rustix::fs::Timespec { tv_sec: 1_000_000_000, tv_nsec: 5 };
    let times = rustix::fs::Timestamps { last_access: when, last_modification: when };
    rustix::fs::utimensat(CWD, b.path("d/link"), &times, rustix::fs::AtFlags::SYMLINK_NOFOLLOW).unwrap();
    let meta = |top: &str, name: &str| std::fs::symlink_metadata(b.path(&format!("{top}/{name}"))).unwrap();
    let is_kept = |top: &str| {
        let one = |(a, b): (&str, &str)| meta(top, a).ino() == meta(top, b).ino();
        let names = ["a", "link", "pipe", "sub/alone"].map(|name| meta(top, name).nlink());
        let link = meta(top, "link");
        linked.into_iter().all(one) && names == [3, 2, 2, 1] && (link.mtime(), link.mtime_nsec()) == (1_000_000_000, 5)
    };
    b.run(&["cp", "-a", "d", "vol.img:/d"]).ok();
    b.run(&["cp", "-rp", "vol.img:/d", "vol.img:/again"]).ok();
    b.run(&["cp", "-a", "vol.img:/again", "out"]).ok();
    assert!(is_kept("out") && b.read("out/sub/b") == b"content");
    // what is there already is written, or replaced
    b.write("out/c", "another one");
    std::fs::remove_file(b.path("out/sub/b")).unwrap();
    b.write("out/sub/b", "another one");
    b.run(&["cp", "-a", "vol.img:/d/.", "out"]).ok();
    assert!(is_kept("out") && b.read("out/a") == b"content");
    for (from, to) in [("d", "vol.img:/d"), ("vol.img:/d", "vol.img:/again")] {
        b.run(&["cp", "-a", &format!("{from}/."), to]).ok();
    }
    // links of the volume: the files in it are as many as before
    let count = || json(&b.run(&["scrub", "--json", "vol.img"]).ok().out)["inodes"].as_u64().unwrap();
    let before = count();
    b.run(&["mkdir", "vol.img:/few"]).ok();
    b.run(&["cp", "-p", "vol.img:/d/a", "vol.img:/d/c", "vol.img:/d/sub/alone", "vol.img:/few"]).ok();
    assert_eq!(count(), before + 3);
    // without -p each is a file of its own
    std::fs::create_dir(b.path("plain")).unwrap();
    b.run(&["cp", "-r", "vol.img:/d/.", "plain"]).ok();
    assert!(linked.into_iter().flat_map(|(a, b)| [a, b]).all(|name| meta("plain", name).nlink() == 1));
    b.run(&["fsck", "-f", "vol.img"]).ok();
}

/// Names of files of different volumes with one number are no names of one file.
#[test]
fn files_of_different_volumes_are_different() {
    let b = Bench::with_volume();
    b.run(&["mkfs", "-q", "--size", "64M", "other.img"]).ok();
    for (text, volume) in [("one", "vol.img"), ("other", "other.img")] {
        b.write("d/f", text);
        b.write("d/g", text);
        std::fs::remove_file(b.path("d/g")).unwrap();
        std::fs::hard_link(b.path("d/f"), b.path("d/g")).unwrap();
        b.run(&["cp", "-a", "d/.", &format!("{volume}:/")]).ok();
        std::fs::remove_dir_all(b.path("d")).unwrap();
    }
    std::fs::create_dir(b.path("out")).unwrap();
    b.run(&["cp", "-p", "vol.img:/f", "other.img:/g", "out"]).ok();
    assert_eq!((b.read("out/f"), b.read("out/g")), (b"one".to_vec(), b"other".to_vec()));
}

#[test]
fn attributes_that_are_lost_are_told_of_once() {
    let b = Bench::with_volume();
    for name in ["d/a", "d/b"] {
        b.write(name, "content");
        let set = |name: &str| rustix::fs::setxattr(b.path(name), "trusted.t", b"1", rustix::fs::XattrFlags::empty());
        if set(name).is_err() {
            _ = writeln!(stderr(), "SKIPPED: trusted attributes need root, and a file system that has them");
            return;
        }
    }
    b.run(&["cp", "-rp", "d", "vol.img:/d"]).ok();
    let mode = |path: &str, mode| std::fs::set_permissions(b.path(path), PermissionsExt::from_mode(mode)).unwrap();
    mode(".", 0o777);
    mode("vol.img", 0o644);
    let copy = run(Command::new(env!("CARGO_BIN_EXE_braidfs"))
        .args(["cp", "-rp", "vol.img:/d", "out"])
        .current_dir(b.path("."))
        .uid(65534)
        .gid(65534));
    copy.fails(1, &["does not get its attribute trusted.t"]);
    assert_eq!((b.read("out/a"), b.read("out/b")), (b"content".to_vec(), b"content".to_vec()));
}

/// As in a chroot to a system that is to be repaired.
#[test]
fn attributes_are_kept_without_proc() {
    let b = Bench::with_volume();
    let covered = |command: &str| {
        let shell = format!("mount -t tmpfs none /proc && exec {command}");
        let mut unshare = Command::new("unshare");
        unshare.args(["--mount", "sh", "-c", &shell]).current_dir(b.path("."));
        unshare
    };
    let can = covered("true").stderr(std::process::Stdio::null()).status();
    if !can.is_ok_and(|s| s.success()) {
        _ = writeln!(stderr(), "SKIPPED: covering /proc needs root, and unshare");
        return;
    }
    b.write("d/sub/f", "content");
    symlink("sub", b.path("d/link")).unwrap();
    rustix::fs::mknodat(CWD, b.path("d/pipe"), RawKind::Fifo, 0o600.into(), 0).unwrap();
    for (path, mode) in [("d/sub", 0o2751), ("d/sub/f", 0o4640), ("d/pipe", 0o1622), ("d", 0o1777)] {
        std::fs::set_permissions(b.path(path), PermissionsExt::from_mode(mode)).unwrap();
    }
    let paths = ["", "/sub", "/sub/f", "/link", "/pipe"];
    let shown = |top: &str| {
        let shown = |path| {
            let m = std::fs::symlink_metadata(b.path(&format!("{top}{path}"))).unwrap();
            (path, m.mode(), m.uid(), m.mtime(), m.mtime_nsec())
        };
        paths.map(shown)
    };
    chown(b.path("d/sub"), Some(7), Some(8)).unwrap();
    std::fs::set_permissions(b.path("d/sub"), PermissionsExt::from_mode(0o2751)).unwrap();
    b.run(&["cp", "-rp", "d", "vol.img:/d"]).ok();
    run(&mut covered(&format!("{} cp -rp vol.img:/d out", env!("CARGO_BIN_EXE_braidfs")))).ok();
    assert_eq!(shown("out"), shown("d"));
}

/// Inodes that cannot be read are told of; the others are listed and, where their domain is sound, removed.
#[test]
fn an_unreadable_inode_does_not_hide_the_others() {
    let b = Bench::with_volume();
    // so many that some are surely of another domain than the third
    for dir in 0..24 {
        // more names than fit in the directory's inode, few inodes in a block
        for n in 0..100 {
            b.write(&format!("all/d{dir}/file {n} of directory {dir}"), [b'x'; 900]);
        }
    }
    b.run(&["cp", "-r", "all", "vol.img:/all"]).ok();
    let mut image = b.read("vol.img");
    let victim = b"file 20 of directory 3";
    for block in image.chunks_exact_mut(4096) {
        if block.starts_with(b"BRFS") && block[8] == 8 && block.windows(victim.len()).any(|w| w == victim) {
            block[100] ^= 1;
        }
    }
    b.write("vol.img", &image);
    let list = b.run(&["ls", "-l", "vol.img:/all/d3"]).fails(1, &["/all/d3/file 20 of directory 3"]);
    assert_eq!(list.out.lines().count(), 100, "{list:#?}");
    let unknown = "??????????   ?     ?     ?            ? ?                   file 20 of directory 3\n";
    assert!(list.out.contains(unknown) && list.out.contains(" 900 "), "{list:#?}");
    b.run(&["cp", "-r", "vol.img:/all/d3", "out"]).fails(1, &["/all/d3/file 20 of directory 3"]);
    assert_eq!(b.read("out/file 0 of directory 3"), [b'x'; 900]);
    let rm = b.run(&["rm", "-r", "vol.img:/all"]).fails(1, &["cannot remove vol.img:/all/d3/file 20"]);
    // its domain takes no changes from then on, the other one does
    assert!(rm.err.matches("cannot remove").count() > 1 && !rm.err.contains("not empty"), "{rm:#?}");
    let left = b.run(&["ls", "-R", "vol.img:/all"]).out;
    let files = left.lines().filter(|l| l.starts_with("file ")).count();
    assert!(left.contains("/d3:\n") && (100..2400).contains(&files), "{left}");
}

#[test]
fn json_has_any_path() {
    let b = Bench::with_volume();
    let name = OsStr::from_bytes(b"\xff.img");
    std::fs::rename(b.path("vol.img"), b.path("").join(name)).unwrap();
    for (command, more) in [("label", "data"), ("resize", "+4M")] {
        let told = json(&b.run(&[command.as_ref(), "--json".as_ref(), name, more.as_ref()]).ok().out);
        assert_eq!(told["place"], "\u{fffd}.img");
    }
}

#[test]
fn a_volume_stays_whose_summary_cannot_be_told() {
    let b = Bench::new();
    for json in [&[][..], &["--json"]] {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let mut mkfs = Command::new(env!("CARGO_BIN_EXE_braidfs"));
        mkfs.args(["mkfs", "--force", "--size", "64M", "vol.img"]).args(json).current_dir(b.path("."));
        run(mkfs.stdout(full)).fails(1, &["writing the output"]);
        b.run(&["fsck", "-f", "vol.img"]).ok();
        std::fs::remove_file(b.path("vol.img")).unwrap();
    }
}

/// The exit code says what is wrong where a message cannot.
#[test]
fn a_message_that_cannot_be_written_changes_no_exit_code() {
    let b = Bench::with_volume();
    b.write("f", "x");
    for (code, args) in [
        (8, &["fsck", "nosuch.img"][..]),
        (1, &["cp", "missing", "f", "vol.img:/"]),
        (1, &["ls", "vol.img:/missing"]),
        (1, &["cat", "vol.img:/missing"]),
        (1, &["rm", "vol.img:/missing"]),
        (1, &["mkdir", "vol.img:/no/parent"]),
        (1, &["label", "nosuch.img"]),
    ] {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_braidfs"));
        run(command.args(args).current_dir(b.path(".")).stderr(full)).code(code);
    }
}

/// As with ls(1), cat(1), cp(1) and rm(1): what is named so is a directory, and no file is removed by it, nor a symlink.
#[test]
fn a_slash_behind_a_name_is_for_directories() {
    let b = Bench::with_volume();
    b.write("f", b"content");
    b.run(&["cp", "f", "vol.img:/f"]).ok();
    b.run(&["mkdir", "vol.img:/d/"]).ok();
    for command in ["rm", "cat", "ls"] {
        b.run(&[command, "vol.img:/f/"]).fails(1, &["vol.img:/f", "not a directory"]);
    }
    b.run(&["cp", "vol.img:/f/", "vol.img:/g"]).fails(1, &["vol.img:/f", "not a directory"]);
    b.run(&["cp", "vol.img:/f", "vol.img:/d/"]).ok();
    std::os::unix::fs::symlink("d", b.path("l")).unwrap();
    b.run(&["cp", "-r", "l", "vol.img:/l"]).ok();
    b.run(&["rm", "-r", "vol.img:/l/"]).fails(1, &["vol.img:/l", "not a directory"]);
    assert_eq!(b.run(&["ls", "-l", "vol.img:/l/"]).ok().out.lines().count(), 1);
    assert_eq!(b.run(&["ls", "vol.img"]).ok().out, "d\nf\nl\n");
    b.run(&["rm", "-r", "vol.img:/d/"]).ok();
    assert_eq!(b.run(&["ls", "vol.img:/"]).ok().out, "f\nl\n");
}

#[test]
fn directories_are_made_and_removed() {
    let b = Bench::with_volume();
    b.run(&["mkdir", "vol.img", "/a/b"]).fails(1, &["-p"]);
    b.run(&["mkdir", "-p", "vol.img", "/a/b/c", "/d"]).ok();
    b.run(&["mkdir", "-p", "vol.img:/a"]).ok();
    b.run(&["mkdir", "vol.img:/a"]).fails(1, &["vol.img:/a", "exists"]);
    assert_eq!(b.run(&["ls", "vol.img"]).ok().out, "a\nd\n");
    b.run(&["rm", "vol.img", "/a"]).fails(1, &["is a directory", "-r"]);
    b.run(&["rm", "-r", "vol.img", "/a", "/d"]).ok();
    b.run(&["rm", "vol.img", "/a"]).fails(1, &["no such file"]);
    b.run(&["rm", "-f", "vol.img", "/a"]).ok();
    b.run(&["rm", "-r", "vol.img", "/"]).fails(1, &["names no entry"]);
    assert_eq!(b.run(&["ls", "vol.img"]).ok().out, "");
    b.run(&["ls", "vol.img", "/a"]).fails(1, &["vol.img:/a", "no such file"]);
    b.run(&["cat", "vol.img", "/"]).fails(1, &["is a directory"]);
    b.run(&["fsck", "-f", "vol.img"]).ok();
}

#[test]
fn mkfs_tells_what_it_made() {
    let b = Bench::new();
    let uuid = "6f8ae0d4-3c1b-4f5e-9d38-0123456789ab";
    let args = ["mkfs", "--json", "-L", "data 1", "-U", uuid, "--domains", "3", "--inline", "0", "--data-checksums"];
    let made = json(&b.run(&[&args[..], &["--placement", "spread", "--size", "96M", "v.img"]].concat()).ok().out);
    assert_eq!((made["uuid"].as_str(), made["label"].as_str()), (Some(uuid), Some("data 1")));
    assert_eq!((made["domains"].as_u64(), made["inline_max"].as_u64()), (Some(3), Some(0)));
    assert_eq!((made["data_checksums"].as_bool(), made["placement"].as_str()), (Some(true), Some("spread")));
    let info = json(&b.run(&["info", "--json", "v.img"]).ok().out);
    assert_eq!((&info["uuid"], &info["bytes"]), (&made["uuid"], &made["bytes"]));
    assert_eq!(info["domain"].as_array().unwrap().len(), 3);
    let text = b.run(&["info", "v.img"]).ok().out;
    assert!(text.contains(uuid) && text.contains("label \"data 1\""), "{text}");
    // It is recognised.
    b.run(&["mkfs", "v.img"]).fails(1, &["braidfs volume", "--force"]);
    b.run(&["mkfs", "--force", "--quiet", "v.img"]).ok();
}

#[test]
fn sizes_from_smallest_to_largest() {
    let b = Bench::new();
    b.run(&["mkfs", "-q", "--size", "32M", "small.img"]).ok();
    b.write("f", noise(100_000));
    b.run(&["cp", "f", "small.img:/f"]).ok();
    b.run(&["fsck", "-f", "small.img"]).ok();
    let start = std::time::Instant::now();
    // 16 TiB but a block: the largest file of ext4.
    b.run(&["mkfs", "-q", "--size", "17592186040320", "huge.img"]).ok();
    let took = start.elapsed();
    assert!(took.as_secs() < 5, "16 TiB took {took:?}");
    b.run(&["cp", "f", "huge.img:/f"]).ok();
    b.run(&["cp", "huge.img:/f", "g"]).ok();
    assert_eq!(b.read("g"), b.read("f"));
}

#[test]
fn forced_mkfs_removes_old_signatures() {
    let b = Bench::new();
    b.sparse("v.img", 64 << 20).write_all_at(b"_BHRfS_M", 0x10040).unwrap();
    b.run(&["mkfs", "--force", "-q", "v.img"]).ok();
    let mut found = [0u8; 8];
    std::fs::File::open(b.path("v.img")).unwrap().read_exact_at(&mut found, 0x10040).unwrap();
    assert_ne!(&found, b"_BHRfS_M");
    b.run(&["fsck", "-f", "v.img"]).ok();
}

#[test]
fn several_devices_make_one_volume() {
    let b = Bench::new();
    b.run(&["mkfs", "-q", "--size", "48M", "a.img", "b.img"]).ok();
    b.write("f", noise(60_000_000));
    b.run(&["cp", "f", "a.img,b.img:/f"]).ok();
    // In any order.
    b.run(&["cp", "b.img,a.img:/f", "g"]).ok();
    assert_eq!(b.read("g"), b.read("f"));
    b.run(&["fsck", "-f", "b.img", "a.img"]).ok();
    b.run(&["ls", "a.img"]).fails(1, &["a.img", "devices"]);
    b.run(&["fsck", "a.img"]).fails(8, &["a.img"]);
}

#[test]
fn a_full_volume_says_so() {
    let b = Bench::with_volume();
    b.write("f", noise(80 << 20));
    b.run(&["cp", "f", "vol.img:/f"]).fails(1, &["no space left"]);
    b.run(&["rm", "vol.img:/f"]).ok();
    b.run(&["fsck", "-f", "vol.img"]).ok();
}

#[test]
fn structures_are_dumped() {
    let b = Bench::with_volume();
    b.write("f", "x");
    b.run(&["cp", "f", "vol.img:/f"]).ok();
    for what in
        ["super", "bat", "domain:0", "group:0", "segments:0", "nodes:0", "node:1", "journal:0", "path:/f", "block:0"]
    {
        assert!(!b.run(&["dump", what, "vol.img"]).ok().out.trim().is_empty(), "{what}");
    }
    for what in ["domain:999", "group:99999", "node:123456789012", "block:999999999999", "path:/missing"] {
        b.run(&["dump", what, "vol.img"]).fails(1, &["vol.img"]);
    }
}

#[test]
fn scrub_and_check_of_a_good_volume() {
    let b = Bench::with_volume();
    assert!(b.run(&["scrub", "--mend", "vol.img"]).ok().out.contains("0 entries mended"));
    assert!(b.run(&["scrub", "vol.img"]).ok().out.contains("everything holds"));
    let skipped = b.run(&["fsck", "vol.img"]).ok().out;
    assert!(skipped.contains("clean"), "{skipped}");
    let report = json(&b.run(&["fsck", "-f", "--json", "vol.img"]).ok().out);
    assert_eq!(report["exit_code"], 0);
    assert_eq!(report["findings"].as_array().map(Vec::len), Some(0));
    assert_eq!(b.run(&["fsck", "-f", "-p", "vol.img"]).ok().out, "");
}

#[test]
fn scrub_finds_rotten_data() {
    let b = Bench::new();
    b.run(&["mkfs", "-q", "--size", "64M", "--data-checksums", "vol.img"]).ok();
    let marker = b"a block that will rot".repeat(1000);
    b.write("file", &marker);
    b.run(&["cp", "file", "vol.img:/rotten"]).ok();
    let report = json(&b.run(&["scrub", "--json", "vol.img"]).ok().out);
    assert_eq!(report["data_checked"], 6);
    assert_eq!(report["data_bad"], 0);
    let mut image = b.read("vol.img");
    let at = image.windows(64).position(|w| w == &marker[..64]).expect("the file's data");
    image[at + 5000] ^= 1;
    b.write("vol.img", &image);
    let run = b.run(&["scrub", "vol.img"]).code(4);
    assert!(run.out.contains("E410") && run.out.contains("/rotten"), "{run:#?}");
    let report = json(&b.run(&["scrub", "--json", "vol.img"]).code(4).out);
    assert_eq!(report["data_bad"], 1);
    assert_eq!(report["exit_code"], 4);
}

#[test]
fn a_label_is_shown_and_changed() {
    let b = Bench::with_volume();
    assert_eq!(b.run(&["label", "vol.img"]).ok().out, "\n");
    assert_eq!(b.run(&["label", "vol.img", "größer 1"]).ok().out, "");
    assert_eq!(b.run(&["label", "vol.img"]).ok().out, "größer 1\n");
    let told = json(&b.run(&["label", "--json", "vol.img"]).ok().out);
    assert_eq!((&told["label"], &told["mounted"]), (&"größer 1".into(), &false.into()));
    assert_eq!(json(&b.run(&["info", "--json", "vol.img"]).ok().out)["label"], "größer 1");
    let refused = b.run(&["label", "vol.img", &"x".repeat(64)]);
    assert!(refused.code == 1 && refused.err.contains("at most 63"), "{} {}", refused.code, refused.err);
    let missing = b.run(&["label", "none.img", "x"]);
    assert!(missing.code == 1 && missing.err.contains("none.img"), "{} {}", missing.code, missing.err);
    b.run(&["label", "vol.img", "data"]).ok();
    let probed = b.run(&["probe", "vol.img"]).ok().out;
    assert!(probed.contains("LABEL=\"data\"") || probed.contains("LABEL=data"), "{probed}");
    // a terminal obeys nothing that stands in an image
    b.run(&["label", "vol.img", "\u{1b}[31mred"]).ok();
    assert_eq!(b.run(&["label", "vol.img"]).ok().out, "\\u{1b}[31mred\n");
    assert!(b.run(&["info", "vol.img"]).ok().out.contains("label \"\\u{1b}[31mred\""));
    assert_eq!(json(&b.run(&["label", "--json", "vol.img"]).ok().out)["label"], "\u{1b}[31mred");
    b.run(&["label", "vol.img", ""]).ok();
    assert_eq!(b.run(&["label", "vol.img"]).ok().out, "\n");
    b.run(&["fsck", "-f", "-n", "vol.img"]).ok();
}

/// Behind a file that was cut off another one would look like its rest.
#[test]
fn a_full_output_ends_what_is_written_to_it() {
    let b = Bench::with_volume();
    b.write("f", "line\n".repeat(1000));
    b.run(&["cp", "f", "vol.img:/a"]).ok();
    b.run(&["cp", "f", "vol.img:/b"]).ok();
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let mut cat = Command::new(env!("CARGO_BIN_EXE_braidfs"));
    let cat = run(cat.args(["cat", "vol.img", "/a", "/b"]).current_dir(b.path(".")).stdout(full));
    assert_eq!(cat.fails(1, &["No space left"]).err.lines().count(), 1);
    // what cannot be read is left out
    let some = b.run(&["cat", "vol.img", "/missing", "/a"]).fails(1, &["/missing"]);
    assert_eq!(some.out.len(), 5000);
}

#[test]
fn a_scrub_without_any_rate_is_refused() {
    let b = Bench::with_volume();
    b.run(&["scrub", "--rate", "0", "vol.img"]).fails(1, &["--rate", "no limit"]);
}
