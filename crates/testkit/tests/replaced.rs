//! Files that an inode of another domain has replaced: they stay until that is durable, and whoever needs what they have gets it,
//! the room in the journal's list of inodes without a name, numbers, blocks, and what counts for an owner's or a tenant's limits.

use braidfs::{
    Cred, Error, FallocMode, FileKind, InodeNo, MkfsOptions, MountOptions, OpenFile, OpenHow, Placement, QuotaOwner,
    RenameMode, TenantBudget, Volume, mkfs,
};
use braidfs_device::Device;
use braidfs_testkit::small::{self, BLOCK, MIB, ROOT, create, file, memory, mount, new_node, two_directories};
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const JOURNAL: u64 = 128 << 10;
/// So many inodes without a name, open or held, a journal of that size lists.
const LISTED: usize = (JOURNAL / 16 / 8) as usize;

fn begin(how: &MkfsOptions) -> (Arc<dyn Device>, Volume) {
    let device = memory(64);
    let how = MkfsOptions { domains: Some(2), group_bytes: Some(4 * MIB), ..how.clone() };
    mkfs::format(std::slice::from_ref(&device), &how).unwrap();
    // nothing is committed but by who needs it
    let v = mount(std::slice::from_ref(&device));
    (device, v)
}

fn with_small_journal() -> (Arc<dyn Device>, Volume) {
    begin(&MkfsOptions { journal_bytes: Some(JOURNAL), ..MkfsOptions::default() })
}

fn close(v: Volume, device: &Arc<dyn Device>) {
    assert!(v.domains().iter().all(|d| d.failed.is_none()));
    small::close(v, std::slice::from_ref(device));
}

/// Replaces a file of `to` by one of `from`, which is of another domain.
fn replace(v: &Volume, [to, from]: [InodeNo; 2], name: &str, cred: &Cred) -> Result<(), Error> {
    v.rename_by(from, name.as_bytes(), to, name.as_bytes(), RenameMode::Replace, cred)
}

fn make_both(v: &Volume, dirs: [InodeNo; 2], names: impl Iterator<Item = usize>) {
    names.for_each(|n| dirs.iter().for_each(|dir| _ = create(v, *dir, &n.to_string(), FileKind::File)));
}

/// Many more than the whole journal could list.
#[test]
fn replaced_files_do_not_fill_the_journal() {
    let (device, v) = with_small_journal();
    let dirs = two_directories(&v);
    let most = 7 * LISTED;
    make_both(&v, dirs, 0..most);
    v.sync().unwrap();
    for n in 0..most {
        replace(&v, dirs, &n.to_string(), &Cred::root()).unwrap_or_else(|e| panic!("{n}: {e}"));
    }
    v.sync().unwrap();
    close(v, &device);
}

/// Inodes that are open, and temporary ones, take the room in the list that replaced files have; and where those that are open
/// take all of it, names are replaced still.
#[test]
fn replaced_files_give_their_room_in_the_list() {
    let (device, v) = with_small_journal();
    let dirs = two_directories(&v);
    let (a, root) = (dirs[0], Cred::root());
    let open: Vec<OpenFile> = (0..LISTED + 1).map(|n| file(&v, a, &format!("open{n}"))).collect();
    let mut left = 0..open.len();
    let mut unlink = || v.unlink(a, format!("open{}", left.next().unwrap()).as_bytes());
    let filled = LISTED + LISTED / 8;
    make_both(&v, dirs, 0..filled + LISTED);
    for n in 0..filled {
        replace(&v, dirs, &n.to_string(), &root).unwrap();
    }
    unlink().unwrap();
    for n in filled..2 * LISTED {
        replace(&v, dirs, &n.to_string(), &root).unwrap();
    }
    let mut temporary = v.tmpfile(a, &new_node(FileKind::File), &root).unwrap().1;
    assert_eq!(v.domain_of(temporary.ino()).unwrap(), v.domain_of(a).unwrap());
    for _ in 0..LISTED - 2 {
        unlink().unwrap();
    }
    assert!(matches!(unlink(), Err(Error::NoSpace)));
    for n in 2 * LISTED..filled + LISTED {
        replace(&v, dirs, &n.to_string(), &root).unwrap();
    }
    assert!(matches!(v.tmpfile(a, &new_node(FileKind::File), &root), Err(Error::NoSpace)));
    drop(open);
    temporary = v.tmpfile(a, &new_node(FileKind::File), &root).unwrap().1;
    drop(temporary);
    close(v, &device);
}

/// What a user replaced counts no more for who would else be refused: whatever asks for the inode or the blocks.
#[test]
fn replaced_files_do_not_count_at_a_limit() {
    let (device, v) = begin(&MkfsOptions::default());
    let (dirs, alice) = (two_directories(&v), Cred::user(1000, 1000));
    let made = |dir: InodeNo, name: &str| {
        let made = v.create(dir, name.as_bytes(), &new_node(FileKind::File), &alice);
        made.map(|a| v.open(a.ino).unwrap())
    };
    let files: u64 = 8;
    for n in 0..files {
        for dir in dirs {
            let f = made(dir, &n.to_string()).unwrap();
            assert_eq!(v.append(&f, &[1; 4 * BLOCK as usize]).unwrap(), 0);
        }
    }
    let full = |l: &mut braidfs::QuotaLimits| {
        (l.inodes, l.space) = (Some(2 * files), Some(8 * files * BLOCK));
    };
    v.quota_change(QuotaOwner::User(1000), full).unwrap();
    let mut names = 0..files;
    let mut replace = || replace(&v, dirs, &names.next().unwrap().to_string(), &alice).unwrap();
    assert!(matches!(made(ROOT, "none"), Err(Error::Quota(_))));
    replace();
    let f = made(ROOT, "f").unwrap();
    let blocks = vec![2; 4 * BLOCK as usize];
    assert_eq!(v.write(&f, 0, &blocks).unwrap(), blocks.len());
    assert!(matches!(v.write(&f, 4 * BLOCK, &[3; 1]), Err(Error::Quota(_))));
    replace();
    assert_eq!(v.write(&f, 4 * BLOCK, &blocks).unwrap(), blocks.len());
    replace();
    v.fallocate(&f, FallocMode::Allocate { keep_size: false }, 8 * BLOCK, 4 * BLOCK).unwrap();
    // both gave an inode
    let [temporary, next] = [(); 2].map(|()| v.tmpfile(ROOT, &new_node(FileKind::File), &alice).unwrap().1);
    assert!(matches!(v.tmpfile(ROOT, &new_node(FileKind::File), &alice), Err(Error::Quota(_))));
    replace();
    let last = v.tmpfile(ROOT, &new_node(FileKind::File), &alice).unwrap().1;
    replace();
    v.rename_by(ROOT, b"f", ROOT, b"g", RenameMode::Whiteout, &alice).unwrap();
    assert_eq!(v.quota_drift().unwrap(), []);
    drop((f, temporary, next, last));
    close(v, &device);
}

/// An inode, and the blocks of a domain that has as many as it may.
#[test]
fn replaced_files_of_a_tenant_leave_it_their_room() {
    let (device, v) = begin(&MkfsOptions::default());
    let budget = TenantBudget { space: Some(8 * MIB), inodes: Some(3), ..TenantBudget::default() };
    let t = v.tenant_create(ROOT, b"t", 0o755, "t", budget, &Cred::root()).unwrap().root;
    let large = file(&v, t, "large");
    let had = small::fill(&v, &large, small::ALL);
    drop((large, file(&v, t, "small")));
    v.sync().unwrap();
    let outside = create(&v, ROOT, "outside", FileKind::Dir);
    let made = |name: &str| v.create(t, name.as_bytes(), &new_node(FileKind::File), &Cred::root());
    assert!(matches!(made("none"), Err(Error::NoSpace)));
    create(&v, outside, "large", FileKind::File);
    replace(&v, [t, outside], "large", &Cred::root()).unwrap();
    let f = v.open(made("more").unwrap().ino).unwrap();
    let has = small::fill(&v, &f, small::ALL);
    assert!(has > had / 2, "{has} bytes, {had} before");
    drop(f);
    close(v, &device);
}

/// Only blocks: the domain has other inodes.
#[test]
fn blocks_of_a_replaced_file_can_be_had_at_once() {
    let (device, v) = begin(&MkfsOptions::default());
    let budget = TenantBudget { space: Some(8 * MIB), ..TenantBudget::default() };
    let t = v.tenant_create(ROOT, b"t", 0o755, "t", budget, &Cred::root()).unwrap().root;
    let (large, other) = (file(&v, t, "large"), file(&v, t, "other"));
    let had = small::fill(&v, &large, small::ALL);
    drop(large);
    v.sync().unwrap();
    let outside = create(&v, ROOT, "outside", FileKind::Dir);
    create(&v, outside, "large", FileKind::File);
    replace(&v, [t, outside], "large", &Cred::root()).unwrap();
    let has = small::fill(&v, &other, small::ALL);
    assert!(has > had / 2, "{has} bytes, {had} before");
    drop(other);
    close(v, &device);
}

/// They go where a file with a name would.
#[test]
fn temporary_files_are_placed_as_others_are() {
    let (device, v) = begin(&MkfsOptions { placement: Placement::Spread, ..MkfsOptions::default() });
    let open: Vec<_> = (0..8).map(|_| v.tmpfile(ROOT, &new_node(FileKind::File), &Cred::root()).unwrap().1).collect();
    let domains: HashSet<_> = open.iter().map(|f| v.domain_of(f.ino()).unwrap()).collect();
    assert_eq!(domains.len(), 2);
    for (n, f) in open.iter().enumerate() {
        v.link(f.ino(), ROOT, n.to_string().as_bytes()).unwrap();
    }
    drop(open);
    close(v, &device);
}

/// Who opens a name that another thread has replaced meanwhile gets the one or the other, and who creates it one that is there.
#[test]
fn a_name_that_is_always_there_is_always_opened() {
    let device = memory(64);
    mkfs::format(std::slice::from_ref(&device), &MkfsOptions::default()).unwrap();
    let v = Volume::mount(vec![device.clone()], MountOptions::default()).unwrap();
    let root = Cred::root();
    let read = OpenHow { read: true, ..OpenHow::default() };
    let make = OpenHow { write: true, create: true, mode: 0o644, ..OpenHow::default() };
    let fresh = OpenHow { exclusive: true, ..make };
    drop(v.open_path(b"/conf", make, &root).unwrap());
    let over = AtomicBool::new(false);
    std::thread::scope(|s| {
        s.spawn(|| {
            for _ in 0..10_000 {
                drop(v.open_path(b"/next", make, &root).unwrap());
                v.rename_path(b"/next", b"/conf", RenameMode::Replace, &root).unwrap();
                let _ = v.unlink_path(b"/lock", &root);
            }
            over.store(true, Ordering::Relaxed);
        });
        for how in [make, fresh] {
            let (v, root, over) = (&v, &root, &over);
            s.spawn(move || {
                while !over.load(Ordering::Relaxed) {
                    v.open_path(b"/conf", read, root).unwrap();
                    match v.open_path(b"/lock", how, root) {
                        Ok(_) => {}
                        Err(Error::Exists) if how.exclusive => {}
                        Err(e) => panic!("{how:?}: {e}"),
                    }
                }
            });
        }
    });
    close(v, &device);
}
