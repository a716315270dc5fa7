//! Images that are no good: truncated, zeroed, foreign, newer, damaged, in use. A message and an exit code, no panic.

mod common;
use braidfs_format::super_block::SuperBlock;
use common::Bench;
use rustix::fs::{FlockOperation, flock};
use std::fs::File;
use std::os::unix::fs::FileExt;

const BLOCK: u64 = 4096;

/// Every command that opens a volume refuses `name` and says why.
#[track_caller]
fn all_refuse(b: &Bench, name: &str, parts: &[&str]) {
    files_refuse(b, name, parts);
    for command in ["info", "label"] {
        b.run(&[command, name]).fails(1, &[&[name][..], parts].concat());
    }
}

/// Every command that looks into files does.
#[track_caller]
fn files_refuse(b: &Bench, name: &str, parts: &[&str]) {
    b.write("file", "x");
    std::fs::create_dir_all(b.path("mnt")).unwrap();
    let inside = format!("{name}:/x");
    for args in [
        &["ls", name][..],
        &["cat", name, "/x"],
        &["cp", "file", &inside],
        &["cp", &inside, "out"],
        &["rm", name, "/x"],
        &["mkdir", name, "/x"],
        &["scrub", name],
    ] {
        b.run(args).fails(1, &[&[name][..], parts].concat());
    }
    b.run(&["mount", name, "mnt"]).fails(32, &[&[name][..], parts].concat());
}

#[test]
fn no_volume_at_all() {
    let b = Bench::new();
    b.sparse("zero.img", 64 << 20);
    all_refuse(&b, "zero.img", &["not a braidfs volume"]);
    b.run(&["fsck", "zero.img"]).fails(8, &["zero.img"]);
    b.run(&["fsck", "-fy", "zero.img"]).fails(8, &["zero.img"]);
    b.write("text.img", "no file system here\n".repeat(10_000));
    all_refuse(&b, "text.img", &["not a braidfs volume"]);
    b.write("empty.img", "");
    all_refuse(&b, "empty.img", &["0 bytes"]);
    b.run(&["fsck", "empty.img"]).fails(8, &["empty.img"]);
    all_refuse(&b, "missing.img", &["no such file"]);
    b.run(&["fsck", "missing.img"]).fails(8, &["no such file"]);
    b.write("note.txt", "no volume");
    all_refuse(&b, "note.txt", &["has 9 bytes, too few to hold a volume; name the right device"]);
}

#[test]
fn foreign_file_systems_are_named() {
    let b = Bench::new();
    b.sparse("ext.img", 64 << 20).write_all_at(b"\x53\xef", 0x438).unwrap();
    all_refuse(&b, "ext.img", &["ext2/3/4", "not a braidfs volume"]);
    b.run(&["fsck", "-fy", "ext.img"]).fails(8, &["ext2/3/4"]);
    let mut magic = [0u8; 2];
    File::open(b.path("ext.img")).unwrap().read_exact_at(&mut magic, 0x438).unwrap();
    assert_eq!(&magic, b"\x53\xef", "fsck changed a foreign image");
}

#[test]
fn truncated_images_are_refused() {
    let b = Bench::with_volume();
    for bytes in [40 << 20, 1 << 20, 3 * BLOCK, BLOCK] {
        b.run(&["mkfs", "-fq", "--size", "64M", "vol.img"]).ok();
        File::options().write(true).open(b.path("vol.img")).unwrap().set_len(bytes).unwrap();
        let ls = b.run(&["ls", "vol.img"]).fails(1, &["vol.img", "restore the missing part"]);
        assert!(ls.err.contains("truncated") || ls.err.contains("too small"), "{ls:#?}");
        let run = b.run(&["fsck", "-f", "vol.img"]);
        assert!([4, 8].contains(&run.code), "{run:#?}");
        b.run(&["mount", "vol.img", "."]).fails(32, &["vol.img"]);
    }
}

/// Changes the superblock and its copy, with right checksums.
fn change_super(b: &Bench, change: impl Fn(&mut SuperBlock)) {
    let file = File::options().read(true).write(true).open(b.path("vol.img")).unwrap();
    let last = file.metadata().unwrap().len() / BLOCK - 1;
    for addr in [0, last] {
        let mut block = vec![0u8; BLOCK as usize];
        file.read_exact_at(&mut block, addr * BLOCK).unwrap();
        let mut sb = SuperBlock::from_block(&block, addr).unwrap();
        change(&mut sb);
        file.write_all_at(&sb.to_block(0, addr, 9), addr * BLOCK).unwrap();
    }
}

#[test]
fn newer_formats_are_refused() {
    let b = Bench::with_volume();
    change_super(&b, |sb| sb.version = 99.into());
    all_refuse(&b, "vol.img", &["format version 99"]);
    b.run(&["fsck", "-fy", "vol.img"]).fails(8, &["format version 99"]);
    b.run(&["mkfs", "-fq", "vol.img"]).ok();
    change_super(&b, |sb| sb.incompat = 0x8000_0000.into());
    all_refuse(&b, "vol.img", &["unknown features"]);
    b.run(&["fsck", "-fy", "vol.img"]).fails(8, &["newer program"]);
}

#[test]
fn what_only_a_newer_program_may_change_is_read_only() {
    let b = Bench::with_volume();
    b.run(&["mkdir", "vol.img", "/kept"]).ok();
    change_super(&b, |sb| sb.ro_compat = 0x8000_0000.into());
    let before = b.read("vol.img");
    assert_eq!(b.run(&["ls", "vol.img"]).ok().out, "kept\n");
    b.run(&["info", "vol.img"]).ok();
    b.run(&["mkdir", "vol.img", "/new"]).fails(1, &["0x80000000", "read-only"]);
    b.run(&["fsck", "-fn", "vol.img"]).ok();
    b.run(&["fsck", "-fy", "vol.img"]).fails(8, &["0x80000000", "-n"]);
    assert!(b.read("vol.img") == before, "something was written");
}

#[test]
fn a_lost_superblock_comes_back_from_its_copy() {
    let b = Bench::with_volume();
    b.run(&["mkdir", "vol.img", "/kept"]).ok();
    let file = File::options().write(true).open(b.path("vol.img")).unwrap();
    file.write_all_at(&[0xff; BLOCK as usize], 0).unwrap();
    let found = b.run(&["fsck", "-fn", "vol.img"]).code(4);
    let told = "vol.img: does not hold (no braidfs magic), its replica does";
    assert!(found.out.contains("superblock at block 0 of ") && found.out.contains(told), "{found:#?}");
    assert!(!found.out.contains("not a braidfs volume"), "{found:#?}");
    let warned = b.run(&["ls", "vol.img"]).ok().err;
    assert!(warned.contains("repair with `braidfs fsck -p ") && !warned.contains("not a braidfs"), "{warned}");
    b.run(&["fsck", "-fy", "vol.img"]).code(1);
    b.run(&["fsck", "-f", "vol.img"]).ok();
    assert_eq!(b.run(&["ls", "vol.img"]).ok().out, "kept\n");
}

/// At a boot nobody is asked: what loses something is left, with another code, and nothing is written.
#[test]
fn a_boot_repairs_only_what_loses_nothing() {
    let b = Bench::with_volume();
    b.run(&["mkdir", "vol.img", "/kept"]).ok();
    let good = b.read("vol.img");
    let file = File::options().write(true).open(b.path("vol.img")).unwrap();
    file.write_all_at(&[0xff; BLOCK as usize], 0).unwrap();
    let repaired = b.run(&["fsck", "-a", "vol.img"]).code(1);
    assert!(repaired.out.contains("E101") && repaired.out.contains("(repaired)"), "{repaired:#?}");
    assert_eq!(b.run(&["fsck", "-fp", "vol.img"]).ok().out, "");

    // all node blocks of the first domain: the root directory is among them
    let mut bad = good;
    let is_node_block = |block: &[u8]| block.windows(4).any(|w| w == b"kept");
    bad.chunks_mut(BLOCK as usize).filter(|b| is_node_block(b)).for_each(|b| b.fill(0));
    b.write("vol.img", &bad);
    for letter in ["-fp", "-fa", "-fpC"] {
        let left = b.run(&["fsck", letter, "vol.img"]).code(4);
        assert!(left.out.contains("RUN fsck MANUALLY (`braidfs fsck -y`)") && left.out.contains("E3"), "{left:#?}");
        assert!(b.read("vol.img") == bad, "something was written");
    }
    let told = b.run(&["fsck", "-fp", "--json", "vol.img"]).code(4).out;
    assert!(told.contains("\"by_hand\": true"), "{told}");
    b.run(&["fsck", "-py", "vol.img"]).code(16);
    b.run(&["fsck", "-fy", "vol.img"]).code(1);
    b.run(&["fsck", "-fp", "vol.img"]).ok();
}

#[test]
fn damaged_blocks_never_panic() {
    let b = Bench::with_volume();
    b.write("dir/f", vec![7u8; 1 << 20]);
    b.run(&["cp", "-r", "dir", "vol.img:/"]).ok();
    let good = b.read("vol.img");
    // Blocks that hold something, up to the first megabytes: superblock, tables, group metadata, nodes.
    let used: Vec<usize> =
        (0..2048).filter(|i| good[i * 4096..(i + 1) * 4096].iter().any(|&x| x != 0)).take(24).collect();
    for (n, block) in used.into_iter().enumerate() {
        let mut bad = good.clone();
        match n % 3 {
            0 => bad[block * 4096..(block + 1) * 4096].fill(0),
            1 => bad[block * 4096 + 100] ^= 0x10,
            _ => bad[block * 4096..(block + 1) * 4096].fill(0xa5),
        }
        b.write("vol.img", &bad);
        for args in [&["ls", "-lR", "vol.img"][..], &["cp", "-r", "vol.img:/dir", "out"], &["info", "vol.img"]] {
            // Right, or an error; `run` fails the test on a panic.
            b.run(args);
        }
        let run = b.run(&["fsck", "-fy", "vol.img"]);
        assert!([0, 1, 4, 8].contains(&run.code), "block {block}: {run:#?}");
        if run.code == 1 {
            b.run(&["fsck", "-f", "vol.img"]).ok();
        }
    }
}

#[test]
fn a_volume_in_use_is_refused() {
    let b = Bench::with_volume();
    let held = File::open(b.path("vol.img")).unwrap();
    flock(&held, FlockOperation::LockExclusive).unwrap();
    files_refuse(&b, "vol.img", &["in use"]);
    // what reads tables alone answers, and says of when
    let info = b.run(&["info", "vol.img"]).ok();
    assert!(info.out.contains("as of the last checkpoint") && info.out.contains("domains     2"), "{info:#?}");
    assert!(b.run(&["dump", "super", "vol.img"]).ok().err.contains("as of its last checkpoint"));
    b.run(&["fsck", "-fy", "vol.img"]).fails(8, &["in use"]);
    b.run(&["mkfs", "--force", "vol.img"]).fails(1, &["in use"]);
    drop(held);
    b.run(&["ls", "vol.img"]).ok();
}
