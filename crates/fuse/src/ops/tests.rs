//! Handlers, asked as the kernel asks, on a volume in memory: which inode a request means.

use crate::abi::{self, fattr, op};
use crate::channel::Channel;
use crate::fs::{BraidFs, Context, Negotiated};
use crate::node::WireId;
use crate::request::{Answer, Outcome, Request};
use braidfs::device::{Device, MemDevice};
use braidfs::{MkfsOptions, MountOptions, Volume};
use rustix::io::Errno;
use std::sync::Arc;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

pub(crate) const ROOT: WireId = WireId::ROOT;
pub(crate) const WITHOUT_OPEN: u64 =
    abi::init::SETXATTR_EXT | abi::init::NO_OPEN_SUPPORT | abi::init::NO_OPENDIR_SUPPORT;

pub(crate) struct Served {
    pub fs: BraidFs,
    pub channel: Arc<Channel>,
    /// Of the helper threads, of which there are none.
    pub jobs: crate::helpers::Work,
}

impl Served {
    fn new() -> Self {
        Self::with(abi::init::SETXATTR_EXT, 16384)
    }

    /// As a mount that runs without OPEN.
    fn without_open() -> Self {
        Self::with(WITHOUT_OPEN, 16384)
    }

    fn with(flags: u64, blocks: u64) -> Self {
        Self::of(flags, blocks, &MkfsOptions::default())
    }

    pub fn of(flags: u64, blocks: u64, options: &MkfsOptions) -> Self {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(blocks));
        braidfs::mkfs::format(std::slice::from_ref(&device), options).unwrap();
        let vol = Arc::new(Volume::mount(vec![device], MountOptions::default()).unwrap());
        let (jobs, work) = crate::helpers::queue();
        let negotiated = Negotiated { flags, minor: abi::MINOR };
        let null = std::fs::File::options().write(true).open("/dev/null").unwrap();
        Self { fs: BraidFs::new(vol, negotiated, jobs), channel: Arc::new(Channel::new(null.into())), jobs: work }
    }

    fn ask(&self, opcode: u32, node: WireId, args: &[&[u8]]) -> Result<Vec<u8>, Errno> {
        let frame = request(opcode, node, &args.concat());
        let mut out = Answer::new(4096);
        let cx = Context::new(&self.channel, 1, None);
        let outcome = self.fs.handle(&Request::parse(&frame).unwrap(), &mut out, &cx)?;
        assert_eq!(outcome, Outcome::Reply);
        Ok(out.body().to_vec())
    }

    fn lookup(&self, dir: WireId, name: &[u8]) -> Result<abi::EntryOut, Errno> {
        self.ask(op::LOOKUP, dir, &[name, b"\0"]).map(|b| entry(&b))
    }

    pub fn mknod(&self, dir: WireId, name: &str) -> abi::EntryOut {
        let arg = abi::MknodIn { mode: 0o100_644, rdev: 0, umask: 0, padding: 0 };
        entry(&self.ask(op::MKNOD, dir, &[arg.as_bytes(), name.as_bytes(), b"\0"]).unwrap())
    }

    fn mkdir(&self, dir: WireId, name: &str) -> abi::EntryOut {
        let arg = abi::MkdirIn { mode: 0o755, umask: 0 };
        entry(&self.ask(op::MKDIR, dir, &[arg.as_bytes(), name.as_bytes(), b"\0"]).unwrap())
    }

    pub fn open(&self, opcode: u32, node: WireId) -> Result<u64, Errno> {
        let arg = abi::OpenIn { flags: libc::O_RDWR as u32, open_flags: 0 };
        self.ask(opcode, node, &[arg.as_bytes()]).map(|b| abi::OpenOut::read_from_prefix(&b).unwrap().0.fh)
    }

    fn setattr(&self, node: WireId, valid: u32) -> Result<Vec<u8>, Errno> {
        let mut arg = abi::SetattrIn::new_zeroed();
        (arg.valid, arg.mode, arg.mtime, arg.ctime) = (valid, 0o100_600, 4711, 4712);
        self.ask(op::SETATTR, node, &[arg.as_bytes()])
    }

    fn getattr(&self, node: WireId) -> Result<abi::Attr, Errno> {
        let arg = abi::GetattrIn { getattr_flags: 0, dummy: 0, fh: 0 };
        self.ask(op::GETATTR, node, &[arg.as_bytes()]).map(|b| abi::AttrOut::read_from_prefix(&b).unwrap().0.attr)
    }

    /// The kernel forgets it.
    fn forget(&self, gone: &abi::EntryOut, times: u64) {
        let frame = request(op::FORGET, WireId(gone.nodeid), abi::ForgetIn { nlookup: times }.as_bytes());
        let cx = Context::new(&self.channel, 1, None);
        let outcome = self.fs.handle(&Request::parse(&frame).unwrap(), &mut Answer::new(0), &cx);
        assert_eq!(outcome, Ok(Outcome::Silent));
    }

    /// Inodes held, those of them without a name.
    fn held(&self) -> (usize, usize) {
        let s = self.fs.vol.held();
        (s.inodes, s.orphans)
    }

    /// Commits that it is gone; a directory's number is free after a checkpoint.
    fn give_back(&self, gone: &abi::EntryOut) {
        let vol = &self.fs.vol;
        vol.sync().unwrap();
        vol.commit_domain(vol.domain_of(braidfs::InodeNo(gone.attr.ino)).unwrap(), true).unwrap();
    }

    /// Makes files until one has the number of `gone`, which has been deleted.
    fn reuse(&self, gone: &abi::EntryOut) -> abi::EntryOut {
        self.give_back(gone);
        let found = (0..2000).map(|n| self.mknod(ROOT, &format!("n{n}"))).find(|e| e.attr.ino == gone.attr.ino);
        let new = found.expect("the number is given again");
        assert!(new.generation > gone.generation && new.nodeid != gone.nodeid);
        new
    }
}

pub(crate) fn request(opcode: u32, node: WireId, args: &[u8]) -> Vec<u8> {
    let mut head = abi::InHeader::new_zeroed();
    (head.len, head.opcode, head.nodeid) = (40 + args.len() as u32, opcode, node.0);
    [head.as_bytes(), args].concat()
}

/// The same, asked by this thread, whose user the request does not tell.
fn request_of_ours(opcode: u32, node: WireId, args: &[u8]) -> Vec<u8> {
    let mut frame = request(opcode, node, args);
    let (mut head, _) = abi::InHeader::read_from_prefix(&frame).unwrap();
    (head.uid, head.pid) = (u32::MAX, rustix::thread::gettid().as_raw_nonzero().get() as u32);
    frame[..size_of::<abi::InHeader>()].copy_from_slice(head.as_bytes());
    frame
}

fn entry(bytes: &[u8]) -> abi::EntryOut {
    abi::EntryOut::read_from_prefix(bytes).unwrap().0
}

const TIMES: u32 = fattr::MTIME | fattr::CTIME;

/// setfacl of who is not of the group takes setgid away where it sets a list, and not where it fails.
#[test]
fn setgid_stays_where_no_list_is_set() {
    let s = Served::new();
    let id = WireId(s.mknod(ROOT, "f").nodeid);
    let mode =
        |mode| s.fs.vol.setattr(id.ino(), &braidfs::SetAttr { mode, ..Default::default() }).unwrap().mode & 0o7777;
    assert_eq!(mode(Some(0o2610)), 0o2610);
    let set = |value: &[u8]| {
        let mut arg = abi::SetxattrIn::new_zeroed();
        (arg.size, arg.setxattr_flags) = (value.len() as u32, abi::SETXATTR_ACL_KILL_SGID);
        s.ask(op::SETXATTR, id, &[arg.as_bytes(), b"system.posix_acl_access\0", value])
    };
    assert_eq!((set(b"no list"), mode(None)), (Err(Errno::INVAL), 0o2610));
    // of owner, group and others alone
    let entry = |tag: u16, bits: u16| [&tag.to_le_bytes()[..], &bits.to_le_bytes(), &u32::MAX.to_le_bytes()].concat();
    let list = [2u32.to_le_bytes().to_vec(), entry(1, 6), entry(4, 4), entry(0x20, 0)].concat();
    set(&list).unwrap();
    assert_eq!(mode(None), 0o640);
}

#[test]
fn late_requests_do_not_reach_the_next_inode_of_the_number() {
    let s = Served::new();
    let gone = s.mknod(ROOT, "old");
    s.ask(op::UNLINK, ROOT, &[b"old\0"]).unwrap();
    s.forget(&gone, 1);
    let new = s.reuse(&gone);
    let (old_id, new_id) = (WireId(gone.nodeid), WireId(new.nodeid));
    let before = s.getattr(new_id).unwrap();

    // What the kernel sends on its own: told as done, but not done.
    assert_eq!(s.setattr(old_id, TIMES).map(|b| b.iter().all(|&b| b == 0)), Ok(true));
    assert_eq!(s.getattr(new_id).unwrap().as_bytes(), before.as_bytes());

    let xattr = abi::SetxattrIn { size: 1, flags: 0, setxattr_flags: 0, padding: 0 };
    let size = abi::GetxattrIn { size: 0, padding: 0 };
    let link = abi::LinkIn { oldnodeid: old_id.0 };
    let stale = Err(Errno::STALE);
    assert_eq!(s.setattr(old_id, fattr::MODE), stale);
    assert_eq!(s.getattr(old_id).map(|a| a.ino), Err(Errno::STALE));
    assert_eq!(s.ask(op::STATX, old_id, &[abi::StatxIn::new_zeroed().as_bytes()]), stale);
    assert_eq!(s.open(op::OPEN, old_id), Err(Errno::STALE));
    assert_eq!(s.ask(op::SETXATTR, old_id, &[xattr.as_bytes(), b"user.a\0v"]), stale);
    assert_eq!(s.ask(op::GETXATTR, old_id, &[size.as_bytes(), b"user.a\0"]), stale);
    assert_eq!(s.ask(op::LISTXATTR, old_id, &[size.as_bytes()]), stale);
    assert_eq!(s.ask(op::REMOVEXATTR, old_id, &[b"user.a\0"]), stale);
    assert_eq!(s.ask(op::READLINK, old_id, &[]), stale);
    assert_eq!(s.ask(op::LINK, ROOT, &[link.as_bytes(), b"l\0"]), stale);
    assert_eq!(s.lookup(old_id, b".").map(|e| e.nodeid), Err(Errno::STALE));
    assert_eq!(s.getattr(new_id).unwrap().as_bytes(), before.as_bytes());

    // The same, meant for the new one.
    s.setattr(new_id, TIMES).unwrap();
    assert_eq!(s.getattr(new_id).unwrap().mtime, 4711);
    s.setattr(new_id, fattr::MODE).unwrap();
    s.ask(op::SETXATTR, new_id, &[xattr.as_bytes(), b"user.a\0v"]).unwrap();
    s.ask(op::LINK, ROOT, &[abi::LinkIn { oldnodeid: new_id.0 }.as_bytes(), b"l\0"]).unwrap();
    let found = s.lookup(new_id, b".").unwrap();
    assert_eq!((found.nodeid, found.generation, found.attr.ino), (new_id.0, new.generation, gone.attr.ino));
    assert_eq!((found.attr.mode & 0o777, found.attr.nlink), (0o600, 2));
    let fh = s.open(op::OPEN, new_id).unwrap();
    let read = abi::ReadIn { fh, size: 10, ..abi::ReadIn::new_zeroed() };
    assert_eq!(s.ask(op::READ, new_id, &[read.as_bytes()]), Ok(Vec::new()));
    assert_eq!(s.ask(op::READ, old_id, &[read.as_bytes()]), stale, "the handle is of another inode");
}

#[test]
fn late_requests_in_a_removed_directory_do_not_reach_the_next() {
    let s = Served::new();
    let gone = s.mkdir(ROOT, "old");
    s.ask(op::RMDIR, ROOT, &[b"old\0"]).unwrap();
    let gone_id = WireId(gone.nodeid);
    assert_eq!(s.lookup(gone_id, b"x").map(|e| e.nodeid), Ok(0), "held, and empty");
    s.forget(&gone, 1);
    assert_eq!(s.lookup(gone_id, b"x").map(|e| e.nodeid), Err(Errno::STALE), "gone, its number free");
    let taken = s.reuse(&gone);
    // Out of the way, and once more: by a directory.
    let mut name = Vec::new();
    s.fs.vol
        .readdir(braidfs::InodeNo::ROOT, 0, &mut |e| {
            if e.ino.0 == taken.attr.ino && e.name != b"." && e.name != b".." {
                name = e.name.to_vec();
            }
            true
        })
        .unwrap();
    s.ask(op::UNLINK, ROOT, &[&name, b"\0"]).unwrap();
    s.forget(&taken, 1);
    s.fs.vol.sync().unwrap();
    let found = (0..2000).map(|n| s.mkdir(ROOT, &format!("d{n}"))).find(|e| e.attr.ino == gone.attr.ino);
    let new_id = WireId(found.expect("the number is given again").nodeid);

    let rename = |newdir: WireId| [abi::RenameIn { newdir: newdir.0 }.as_bytes(), b"f\0g\0"].concat();
    let mkdir = abi::MkdirIn { mode: 0o755, umask: 0 };
    s.mknod(ROOT, "f");
    s.mknod(new_id, "f");
    let stale = Err(Errno::STALE);
    assert_eq!(s.lookup(gone_id, b"f").map(|e| e.nodeid), Err(Errno::STALE));
    assert_eq!(s.lookup(gone_id, b"..").map(|e| e.nodeid), Err(Errno::STALE));
    assert_eq!(s.ask(op::MKDIR, gone_id, &[mkdir.as_bytes(), b"sub\0"]), stale);
    assert_eq!(s.ask(op::SYMLINK, gone_id, &[b"s\0target\0"]), stale);
    assert_eq!(s.ask(op::UNLINK, gone_id, &[b"f\0"]), stale);
    assert_eq!(s.ask(op::RMDIR, gone_id, &[b"f\0"]), stale);
    assert_eq!(s.ask(op::RENAME, ROOT, &[&rename(gone_id)]), stale);
    assert_eq!(s.ask(op::RENAME, gone_id, &[&rename(ROOT)]), stale);
    assert_eq!(s.open(op::OPENDIR, gone_id), Err(Errno::STALE));

    assert_eq!(s.lookup(new_id, b"..").unwrap().nodeid, 1);
    let fh = s.open(op::OPENDIR, new_id).unwrap();
    let list = abi::ReadIn { fh, size: 4096, offset: 2, ..abi::ReadIn::new_zeroed() };
    let listed = s.ask(op::READDIRPLUS, new_id, &[list.as_bytes()]).unwrap();
    let child = s.lookup(new_id, b"f").unwrap();
    assert_eq!((entry(&listed).nodeid, entry(&listed).generation), (child.nodeid, child.generation));
    assert_eq!(
        abi::Dirent::read_from_prefix(&listed[128..]).unwrap().0.ino,
        child.attr.ino,
        "d_ino is the bare number"
    );
    s.ask(op::RENAME, new_id, &[&rename(ROOT)]).unwrap();
    assert_eq!(s.lookup(ROOT, b"g").unwrap().nodeid, child.nodeid);
}

#[test]
fn unlinked_but_open_is_not_stale() {
    let s = Served::new();
    let file = s.mknod(ROOT, "f");
    let id = WireId(file.nodeid);
    let fh = s.open(op::OPEN, id).unwrap();
    s.ask(op::UNLINK, ROOT, &[b"f\0"]).unwrap();
    s.fs.vol.sync().unwrap();
    let write = abi::WriteIn { fh, size: 3, ..abi::WriteIn::new_zeroed() };
    s.ask(op::WRITE, id, &[write.as_bytes(), b"abc"]).unwrap();
    s.setattr(id, fattr::MODE).unwrap();
    let attr = s.getattr(id).unwrap();
    assert_eq!((attr.nlink, attr.size, attr.mode & 0o777), (0, 3, 0o600));
    let release = abi::ReleaseIn { fh, flags: 0, release_flags: 0, lock_owner: 0 };
    s.ask(op::RELEASE, id, &[release.as_bytes()]).unwrap();
    assert_eq!(s.getattr(id).map(|a| a.nlink), Ok(0), "closed, but the kernel has not forgotten it");
    s.forget(&file, 1);
    assert_eq!(s.held(), (0, 0));
    assert_eq!(s.getattr(id).map(|a| a.ino), Err(Errno::STALE));
    assert_eq!(s.setattr(id, fattr::MODE), Err(Errno::STALE));
    assert!(s.setattr(id, TIMES).is_ok(), "what the kernel sends on its own");
}

#[test]
fn no_way_up_from_a_removed_directory() {
    let s = Served::new();
    let outer = s.mkdir(ROOT, "outer");
    let inner = s.mkdir(WireId(outer.nodeid), "inner");
    let id = WireId(inner.nodeid);
    assert_eq!(s.lookup(id, b"..").unwrap().nodeid, outer.nodeid);
    s.open(op::OPENDIR, id).unwrap();
    s.ask(op::RMDIR, WireId(outer.nodeid), &[b"inner\0"]).unwrap();
    s.ask(op::RMDIR, ROOT, &[b"outer\0"]).unwrap();
    s.forget(&outer, 2);
    s.reuse(&outer);
    assert_eq!(s.lookup(id, b"..").map(|e| e.nodeid), Err(Errno::STALE));
    assert_eq!(s.lookup(id, b".").unwrap().attr.nlink, 0);
}

#[test]
fn numbers_that_never_were_are_stale() {
    let s = Served::new();
    let file = WireId(s.mknod(ROOT, "f").nodeid);
    for id in [0, 2, file.0 + 1, file.0 ^ 1 << 63, 1 | 1 << 40, u64::MAX] {
        assert_eq!(s.getattr(WireId(id)).map(|a| a.ino), Err(Errno::STALE), "{id:#x}");
        assert_eq!(s.lookup(WireId(id), b"f").map(|e| e.nodeid), Err(Errno::STALE), "{id:#x}");
        assert_eq!(s.open(op::OPEN, WireId(id)), Err(Errno::STALE), "{id:#x}");
    }
    assert_eq!(s.getattr(ROOT).unwrap().ino, 1);
}

#[test]
fn what_the_kernel_is_told_of_counts() {
    let s = Served::new();
    let file = s.mknod(ROOT, "f");
    let dir = s.mkdir(ROOT, "d");
    let (file_id, dir_id) = (WireId(file.nodeid), WireId(dir.nodeid));
    assert_eq!(s.held(), (2, 0));
    assert_eq!(s.lookup(ROOT, b"absent").map(|e| e.nodeid), Ok(0));
    s.lookup(ROOT, b"f").unwrap();
    s.lookup(dir_id, b"..").unwrap();
    s.lookup(file_id, b".").unwrap();
    s.ask(op::LINK, dir_id, &[abi::LinkIn { oldnodeid: file_id.0 }.as_bytes(), b"l\0"]).unwrap();
    let link = entry(&s.ask(op::SYMLINK, ROOT, &[b"s\0target\0"]).unwrap());
    let mut create = abi::CreateIn::new_zeroed();
    (create.flags, create.mode) = (libc::O_RDWR as u32, 0o100_644);
    let made = entry(&s.ask(op::CREATE, ROOT, &[create.as_bytes(), b"c\0"]).unwrap());
    let nameless = entry(&s.ask(op::TMPFILE, ROOT, &[create.as_bytes()]).unwrap());
    assert_eq!(s.held(), (5, 1));
    let fh = s.open(op::OPENDIR, ROOT).unwrap();
    let list = abi::ReadIn { fh, size: 4096, ..abi::ReadIn::new_zeroed() };
    let listed = s.ask(op::READDIRPLUS, ROOT, &[list.as_bytes()]).unwrap();

    // f: MKNOD, LOOKUP twice, LINK, READDIRPLUS; the listing does not count `.` and `..`
    let batch = |of: &[(&abi::EntryOut, u64)]| {
        let mut args = abi::BatchForgetIn { count: of.len() as u32, dummy: 0 }.as_bytes().to_vec();
        for (e, n) in of {
            args.extend_from_slice(abi::ForgetOne { nodeid: e.nodeid, nlookup: *n }.as_bytes());
        }
        let frame = request(op::BATCH_FORGET, WireId(0), &args);
        let cx = Context::new(&s.channel, 1, None);
        s.fs.handle(&Request::parse(&frame).unwrap(), &mut Answer::new(0), &cx).unwrap();
    };
    batch(&[(&file, 4), (&dir, 1), (&link, 1), (&made, 1), (&nameless, 0)]);
    assert_eq!((s.held(), s.fs.vol.held().excess), ((5, 1), 0), "each was told once more");
    // the answer with the listing was not taken
    s.fs.unlist(None, &listed);
    assert_eq!((s.held(), s.fs.vol.held().excess), ((1, 1), 0));
    let mut answer = Answer::new(0);
    answer.put(&s.lookup(ROOT, b"f").unwrap());
    assert_eq!(s.held(), (2, 1));
    let (null, closed) = std::io::pipe().unwrap();
    drop(null);
    assert!(!Channel::new(closed.into()).reply(1, &mut answer));
    s.fs.refused(None, op::LOOKUP, answer.body());
    assert_eq!(s.held(), (1, 1), "refused");
    s.forget(&nameless, 7);
    assert_eq!((s.held(), s.fs.vol.held().excess), ((0, 0), 1), "more than was told is all");
    assert_eq!(s.getattr(WireId(nameless.nodeid)).map(|a| a.nlink), Ok(0), "it is open");
}

#[test]
fn a_long_listing_tells_attributes_of_its_first_part_and_where_names_are_looked_up() {
    let s = Served::new();
    let file = s.mknod(ROOT, "f");
    let fh = s.open(op::OPENDIR, ROOT).unwrap();
    let list = |offset| {
        let arg = abi::ReadIn { fh, offset, size: 4096, ..abi::ReadIn::new_zeroed() };
        s.ask(op::READDIRPLUS, ROOT, &[arg.as_bytes()]).unwrap()
    };
    assert_eq!(entry(&list(2)).nodeid, file.nodeid);
    s.fs.listings.told(ROOT.ino(), crate::listing::PLENTY);
    let names = list(2);
    assert_eq!((entry(&names).nodeid, names.ends_with(b"f\0\0\0\0\0\0\0")), (0, true));
    s.forget(&file, 2);
    assert_eq!(s.held(), (0, 0), "the second listing counted nothing");
    let file = s.lookup(ROOT, b"f").unwrap();
    assert_eq!(entry(&list(2)).nodeid, file.nodeid);
}

/// Where an entry is counted for all connections before it is for its own, who looks it up over this one meanwhile takes it for
/// another's: EBUSY after a while.
#[test]
fn what_is_listed_counts_for_its_connection_at_once() {
    use crate::connections::Connection;
    let mut s = Served::new();
    let file = s.mknod(ROOT, "f");
    s.forget(&file, 1);
    let own = Arc::new(Connection::new(ROOT, braidfs::DomainId(0), "t".into(), "/point".into()));
    let null = std::fs::File::options().write(true).open("/dev/null").unwrap();
    s.channel = Arc::new(Channel::of_tenant(null.into(), s.fs.connections.clone(), own.clone()));
    let fh = s.open(op::OPENDIR, ROOT).unwrap();
    let arg = abi::ReadIn { fh, offset: 2, size: 4096, ..abi::ReadIn::new_zeroed() };
    let frame = request(op::READDIRPLUS, ROOT, arg.as_bytes());
    let (mut out, cx) = (Answer::new(4096), Context::new(&s.channel, 1, None));
    s.fs.readdirplus(&Request::parse(&frame).unwrap(), &mut out, &cx).unwrap();
    assert_eq!((own.told(file.nodeid), s.fs.vol.held_times(WireId(file.nodeid).ino())), (1, 1));
    s.fs.unlist(Some(&own), out.body());
    assert_eq!((own.told(file.nodeid), s.fs.vol.held_times(WireId(file.nodeid).ino())), (0, 0));
}

/// While files come to be asked about, an answer that was begun before must not say that its attributes are good.
#[test]
fn answers_under_way_can_be_made_good_for_no_time() {
    let s = Served::new();
    s.mknod(ROOT, "e");
    s.mknod(ROOT, "f");
    let fh = s.open(op::OPENDIR, ROOT).unwrap();
    let arg = abi::ReadIn { fh, size: 4096, ..abi::ReadIn::new_zeroed() };
    let untimed = |opcode, node, args: &[&[u8]]| {
        let mut out = Answer::new(4096);
        out.put_bytes(&s.ask(opcode, node, args).unwrap());
        crate::room::untimed(opcode, &mut out);
        out.body().to_vec()
    };
    let found = entry(&untimed(op::LOOKUP, ROOT, &[b"f\0"]));
    assert_eq!((found.attr_valid, found.entry_valid > 0, found.attr.nlink), (0, true, 1));
    let get = abi::GetattrIn { getattr_flags: 0, dummy: 0, fh: 0 };
    let got = untimed(op::GETATTR, WireId(found.nodeid), &[get.as_bytes()]);
    let got = abi::AttrOut::read_from_prefix(&got).unwrap().0;
    assert_eq!((got.attr_valid, got.attr.ino), (0, found.attr.ino));
    let listed = untimed(op::READDIRPLUS, ROOT, &[arg.as_bytes()]);
    let (mut at, mut all) = (0, Vec::new());
    while let Some(len) = listed.get(at..).and_then(crate::connections::listed_len) {
        all.push(entry(&listed[at..]));
        at += len;
    }
    assert_eq!((all.len(), at), (4, listed.len()));
    assert!(all.iter().all(|e| e.attr_valid == 0) && all.iter().filter(|e| e.nodeid != 0).count() == 2);
}

#[test]
fn a_removed_directory_answers_until_it_is_forgotten() {
    let s = Served::new();
    let dir = s.mkdir(ROOT, "d");
    let id = WireId(dir.nodeid);
    s.mknod(id, "f");
    s.ask(op::UNLINK, id, &[b"f\0"]).unwrap();
    s.ask(op::RMDIR, ROOT, &[b"d\0"]).unwrap();
    s.fs.vol.sync().unwrap();
    assert_eq!(s.getattr(id).map(|a| (a.nlink, a.mode & 0o777)), Ok((0, 0o755)));
    let fh = s.open(op::OPENDIR, id).unwrap();
    let list = abi::ReadIn { fh, size: 4096, ..abi::ReadIn::new_zeroed() };
    assert_eq!(s.ask(op::READDIRPLUS, id, &[list.as_bytes()]), Ok(Vec::new()));
    assert_eq!(s.ask(op::READDIR, id, &[list.as_bytes()]), Ok(Vec::new()));
    let mkdir = abi::MkdirIn { mode: 0o755, umask: 0 };
    assert_eq!(s.ask(op::MKDIR, id, &[mkdir.as_bytes(), b"sub\0"]), Err(Errno::NOENT));
    s.setattr(id, fattr::MODE).unwrap();
    let xattr = abi::SetxattrIn { size: 1, flags: 0, setxattr_flags: 0, padding: 0 };
    s.ask(op::SETXATTR, id, &[xattr.as_bytes(), b"user.a\0v"]).unwrap();
    let release = abi::ReleaseIn { fh, flags: 0, release_flags: 0, lock_owner: 0 };
    s.ask(op::RELEASEDIR, id, &[release.as_bytes()]).unwrap();
    assert_eq!(s.getattr(id).map(|a| a.mode & 0o777), Ok(0o600));
    s.forget(&dir, 1);
    assert_eq!(s.getattr(id).map(|a| a.ino), Err(Errno::STALE));
}

/// An answer that is not given after all closes what it would have opened.
#[test]
fn answers_that_are_not_given_leave_nothing_open() {
    let s = Served::with(abi::init::SETXATTR_EXT, 131_072);
    let mut create = abi::CreateIn::new_zeroed();
    (create.flags, create.mode) = (libc::O_RDWR as u32, 0o100_644);
    let made = s.ask(op::CREATE, ROOT, &[create.as_bytes(), b"c\0"]).unwrap();
    let (file, open) = (entry(&made), abi::OpenOut::read_from_bytes(&made[size_of::<abi::EntryOut>()..]).unwrap());
    let id = WireId(file.nodeid);
    assert!(s.fs.handles.get(open.fh).is_ok() && s.fs.handles.has_cached_writer(id.ino()));
    s.fs.refused(None, op::CREATE, &made);
    assert!(s.fs.handles.get(open.fh).is_err() && !s.fs.handles.has_cached_writer(id.ino()));
    assert_eq!((s.held(), s.fs.vol.is_open(id.ino())), ((0, 0), false));
    for opcode in [op::OPEN, op::OPENDIR] {
        let arg = abi::OpenIn { flags: libc::O_RDONLY as u32, open_flags: 0 };
        let opened = s.ask(opcode, ROOT, &[arg.as_bytes()]).unwrap();
        let fh = abi::OpenOut::read_from_bytes(&opened).unwrap().fh;
        s.fs.refused(None, opcode, &opened);
        assert!(s.fs.handles.get(fh).is_err(), "{}", op::name(opcode));
    }
    // the kernel takes the name for absent: it must look, also at permissions
    assert_eq!(s.ask(op::CREATE, ROOT, &[create.as_bytes(), b"c\0"]), Err(Errno::STALE));
    create.flags |= libc::O_EXCL as u32;
    assert_eq!(s.ask(op::CREATE, ROOT, &[create.as_bytes(), b"c\0"]), Err(Errno::EXIST));
}

#[test]
fn an_append_only_file_is_only_appended_to() {
    // with room enough for the kernel to hold pages
    let s = Served::with(abi::init::SETXATTR_EXT, 1 << 20);
    let id = WireId(s.mknod(ROOT, "log").nodeid);
    let before = s.open(op::OPEN, id).unwrap();
    let write = |fh, offset, flags| {
        let mut arg = abi::WriteIn::new_zeroed();
        (arg.fh, arg.offset, arg.size, arg.write_flags) = (fh, offset, 3, flags);
        s.ask(op::WRITE, id, &[arg.as_bytes(), b"abc"]).map(|_| ())
    };
    write(before, 0, 0).unwrap();
    let flags = |f| braidfs::SetAttr { flags: Some(f), ..braidfs::SetAttr::default() };
    s.fs.vol.setattr(id.ino(), &flags(braidfs::format::inode::APPEND)).unwrap();
    assert_eq!(s.open(op::OPEN, id), Err(Errno::PERM));
    let arg = abi::OpenIn { flags: (libc::O_WRONLY | libc::O_APPEND) as u32, open_flags: 0 };
    let opened = s.ask(op::OPEN, id, &[arg.as_bytes()]).unwrap();
    let open = abi::OpenOut::read_from_bytes(&opened).unwrap();
    assert!(open.open_flags & abi::fopen::DIRECT_IO != 0, "each write is asked for");
    // whether the descriptor still has O_APPEND does not matter
    let direct = 0;
    assert_eq!((write(open.fh, 0, direct), write(open.fh, 2, direct)), (Err(Errno::PERM), Err(Errno::PERM)));
    assert_eq!((write(open.fh, 3, direct), write(before, 0, direct)), (Ok(()), Ok(())));
    // the kernel notes times also for a writer whose writes it sends on; it tells them when the file is closed
    let release = abi::ReleaseIn { fh: before, flags: 0, release_flags: 0, lock_owner: 0 };
    s.ask(op::RELEASE, id, &[release.as_bytes()]).unwrap();
    let times = |valid, fh, at| {
        let valid = fattr::MTIME | fattr::CTIME | valid;
        let arg = abi::SetattrIn { valid, fh, mtime: at, ctime: at, ..abi::SetattrIn::new_zeroed() };
        s.ask(op::SETATTR, id, &[arg.as_bytes()]).map(|_| ())
    };
    assert_eq!((times(fattr::FH, open.fh, 1 << 40), times(0, 0, 1 << 41)), (Ok(()), Err(Errno::PERM)));
    let other = WireId(s.mknod(ROOT, "other").nodeid);
    let from = s.open(op::OPEN, other).unwrap();
    let range = abi::CopyRangeIn { fh_in: from, nodeid_out: id.0, fh_out: open.fh, ..abi::CopyRangeIn::new_zeroed() };
    assert_eq!(s.ask(op::COPY_FILE_RANGE, other, &[range.as_bytes()]), Err(Errno::PERM));
    s.fs.vol.setattr(id.ino(), &flags(0)).unwrap();
    assert_eq!(write(open.fh, 0, direct), Ok(()));
}

/// Also with OPEN: what the kernel holds of files that are open for writing stays within its bound until it knows that it must
/// ask, though no helper does anything.
#[test]
fn writes_are_held_back_until_the_kernel_knows_of_little_room() {
    let mut s = Served::with(abi::init::SETXATTR_EXT, 1 << 17);
    let id = WireId(s.mknod(ROOT, "f").nodeid);
    let fh = s.open(op::OPEN, id).unwrap();
    assert!(s.fs.handles.has_cached_writer(id.ino()));
    let other = WireId(s.mknod(ROOT, "other").nodeid);
    let taker = s.fs.vol.open(other.ino()).unwrap();
    let write = |s: &Served| {
        let mut arg = abi::WriteIn::new_zeroed();
        (arg.fh, arg.size, arg.write_flags) = (fh, 3, abi::WRITE_CACHE);
        let frame = request(op::WRITE, id, &[arg.as_bytes(), b"abc"].concat());
        s.fs.handle(&Request::parse(&frame).unwrap(), &mut Answer::new(64), &Context::new(&s.channel, 1, None))
    };
    assert_eq!(write(&s), Ok(Outcome::Reply));
    // a kernel that is told nothing for now
    let (kernel, mut full) = std::io::pipe().unwrap();
    let bytes = rustix::pipe::fcntl_setpipe_size(&full, 4096).unwrap();
    std::io::Write::write_all(&mut full, &vec![0; bytes]).unwrap();
    s.channel = Arc::new(Channel::new(full.into()));
    let room = s.fs.vol.sure_room(s.fs.vol.domain_of(id.ino()).unwrap()) * 4096;
    // by itself, as many small requests would: a large one has what the kernel holds written back first
    let allocate = braidfs::FallocMode::Allocate { keep_size: false };
    s.fs.vol.fallocate(&taker, allocate, 0, room - (32 << 20)).unwrap();
    s.fs.watch_room(other.ino(), u64::MAX, &s.channel);
    assert_eq!(write(&s), Ok(Outcome::Deferred));
    // what is answered later is told to nobody
    drop(kernel);
}

/// It may take long: whoever serves it must not wait.
#[test]
fn trimming_is_answered_by_a_thread_of_its_own() {
    let s = Served::new();
    let ioctl = abi::IoctlIn { cmd: 0xc018_5879, in_size: 24, out_size: 24, ..abi::IoctlIn::new_zeroed() };
    let range = [0u64, u64::MAX, 0];
    let frame = request_of_ours(op::IOCTL, ROOT, &[ioctl.as_bytes(), range.as_bytes()].concat());
    let fh = s.open(op::OPENDIR, ROOT).unwrap();
    let mut frame_of_root = frame;
    frame_of_root[40..48].copy_from_slice(&fh.to_ne_bytes());
    let cx = Context::new(&s.channel, 1, None);
    let asked = s.fs.handle(&Request::parse(&frame_of_root).unwrap(), &mut Answer::new(0), &cx);
    assert_eq!(asked, Ok(Outcome::Deferred));
    assert_eq!(s.fs.asides.lock().len(), 1);
    let vol = s.fs.into_volume();
    assert_eq!(Arc::strong_count(&vol), 1, "it is waited for");
}

/// Nor while the volume grows.
#[test]
fn another_size_is_answered_by_a_thread_of_its_own() {
    use crate::control::{RESIZE, ResizeArg, ResizeTo};
    let s = Served::new();
    let bytes = size_of::<ResizeArg>() as u32;
    let ioctl = abi::IoctlIn { cmd: RESIZE, in_size: bytes, out_size: bytes, ..abi::IoctlIn::new_zeroed() };
    let arg = ResizeArg { to: ResizeTo::Device as u32, ..ResizeArg::new_zeroed() };
    let fh = s.open(op::OPENDIR, ROOT).unwrap();
    let mut frame = request_of_ours(op::IOCTL, ROOT, &[ioctl.as_bytes(), arg.as_bytes()].concat());
    frame[40..48].copy_from_slice(&fh.to_ne_bytes());
    let cx = Context::new(&s.channel, 1, None);
    let asked = s.fs.handle(&Request::parse(&frame).unwrap(), &mut Answer::new(0), &cx);
    assert_eq!(asked, Ok(Outcome::Deferred));
    let vol = s.fs.into_volume();
    assert_eq!(Arc::strong_count(&vol), 1, "it is waited for");
}

impl Served {
    /// Asks for (a part of) a sample.
    fn sample(&self, uid: u32, part: &crate::control::SamplePart) -> Result<crate::control::SamplePart, Errno> {
        self.sample_of_bytes(uid, part.as_bytes())
    }

    fn sample_of_bytes(&self, uid: u32, arg: &[u8]) -> Result<crate::control::SamplePart, Errno> {
        use crate::control::{SAMPLE, SamplePart};
        let mut ioctl = abi::IoctlIn { cmd: SAMPLE, in_size: arg.len() as u32, ..abi::IoctlIn::new_zeroed() };
        (ioctl.fh, ioctl.out_size) = (self.open(op::OPENDIR, ROOT).unwrap(), size_of::<SamplePart>() as u32);
        let mut frame = request_of_ours(op::IOCTL, ROOT, &[ioctl.as_bytes(), arg].concat());
        let (mut head, _) = abi::InHeader::read_from_prefix(&frame).unwrap();
        head.uid = uid;
        frame[..size_of::<abi::InHeader>()].copy_from_slice(head.as_bytes());
        let mut out = Answer::new(16384);
        let cx = Context::new(&self.channel, 1, None);
        assert_eq!(self.fs.handle(&Request::parse(&frame).unwrap(), &mut out, &cx)?, Outcome::Reply);
        Ok(SamplePart::read_from_prefix(&out.body()[size_of::<abi::IoctlOut>()..]).unwrap().0)
    }
}

/// What others do is told to root and to the user of the server; nobody else has requests timed.
#[test]
fn a_sample_for_others_has_no_processes_and_watches_nothing() {
    use crate::control::SamplePart;
    use crate::watch::sample::Sample;
    let s = Served::new();
    let own = rustix::process::geteuid().as_raw();
    let stranger = own.max(1) + 1;
    let json = |p: &SamplePart| serde_json::from_slice::<Sample>(&p.text[..p.bytes as usize]).unwrap();
    let ask = SamplePart { watch_seconds: 60, ..SamplePart::new_zeroed() };
    let told = s.sample(stranger, &ask).unwrap();
    assert!(!s.fs.counters.is_watched() && json(&told).restricted);
    let again = s.sample(stranger, &ask).unwrap();
    assert_eq!(again.token, told.token, "it is the same one, or it took 100 ms");

    for may in [0, own] {
        assert!(!json(&s.sample(may, &ask).unwrap()).restricted);
    }
    assert!(s.fs.counters.is_watched());
    let line = s.fs.counters.line();
    line.end(&line.begin(op::GETATTR), &Ok(Outcome::Reply), 4711);
    let all = s.sample(own, &ask).unwrap();
    assert_eq!(json(&all).processes.iter().map(|p| p.thread).collect::<Vec<_>>(), [4711]);
    assert!(json(&all).pid_namespace > 0);
    assert_eq!(s.sample(stranger, &SamplePart { token: all.token, ..ask }).unwrap_err(), Errno::STALE);
    assert!(json(&s.sample(stranger, &ask).unwrap()).processes.is_empty());
}

#[test]
fn a_sample_is_fetched_in_parts_and_nothing_else_by_its_token() {
    use crate::control::SamplePart;
    let s = Served::new();
    let own = rustix::process::geteuid().as_raw();
    let first = s.sample(own, &SamplePart::new_zeroed()).unwrap();
    let at = |token, offset| s.sample(own, &SamplePart { token, offset, ..SamplePart::new_zeroed() });
    let rest = at(first.token, 5).unwrap();
    assert_eq!((rest.token, rest.total, rest.text[0]), (first.token, first.total, first.text[5]));
    assert_eq!(at(first.token, first.total).map(|p| p.bytes), Ok(0));
    assert_eq!(at(first.token, first.total + 1).unwrap_err(), Errno::INVAL);
    assert_eq!(at(first.token, u64::MAX).unwrap_err(), Errno::INVAL);
    assert_eq!(at(first.token + 1, 0).unwrap_err(), Errno::STALE);
    assert_eq!(s.sample_of_bytes(own, &[0; 100]).unwrap_err(), Errno::INVAL);
    // others have come for 16 of them meanwhile
    (0..16).for_each(|_| _ = at(0, 0).unwrap());
    assert_eq!(at(first.token, 0).unwrap_err(), Errno::STALE);
}

/// The first direct WRITE of a file is answered by a helper thread.
#[test]
fn bytes_of_a_write_that_another_thread_answers_are_counted() {
    let s = Served::new();
    let node = WireId(s.mknod(ROOT, "f").nodeid);
    let mut arg = abi::WriteIn::new_zeroed();
    (arg.fh, arg.size, arg.write_flags) = (s.open(op::OPEN, node).unwrap(), 5000, abi::WRITE_LOCKOWNER);
    let frame = request(op::WRITE, node, &[arg.as_bytes(), &[7; 5000]].concat());
    let line = s.fs.counters.line();
    let begun = line.begin(op::WRITE);
    let cx = Context::new(&s.channel, 1, None).counted(Some(begun.counted(&line)));
    let handled = s.fs.handle(&Request::parse(&frame).unwrap(), &mut Answer::new(64), &cx);
    assert_eq!(handled, Ok(Outcome::Deferred));
    line.end(&begun, &handled, 1);
    // the duty to reply is dropped with the job: EIO
    drop(s.jobs);
    let sum = s.fs.counters.sum()[op::WRITE as usize];
    assert_eq!((sum.bytes, sum.deferred, sum.errors), (5000, 1, 1));
}

/// Of pages of its cache the kernel does not look at how much was written: all of them, or an error.
#[test]
fn pages_of_the_cache_are_written_whole_or_refused() {
    let s = Served::new();
    let node = WireId(s.mknod(ROOT, "f").nodeid);
    let fh = s.open(op::OPEN, node).unwrap();
    let data = vec![7; 900_000];
    let mut offset = 0;
    let refused = loop {
        let mut arg = abi::WriteIn::new_zeroed();
        (arg.fh, arg.offset, arg.size, arg.write_flags) = (fh, offset, data.len() as u32, abi::WRITE_CACHE);
        match s.ask(op::WRITE, node, &[arg.as_bytes(), &data]) {
            Ok(reply) => assert_eq!(abi::WriteOut::read_from_prefix(&reply).unwrap().0.size, arg.size),
            Err(e) => break e,
        }
        offset += data.len() as u64;
    };
    assert_eq!(refused, Errno::NOSPC);
    assert!(offset > 40 << 20, "{offset}");
}

mod without_open {
    //! A mount on which the kernel asks for no open: all handles are 0.

    use super::*;
    use braidfs::format::inode::{APPEND, IMMUTABLE};

    impl Served {
        fn write(&self, node: WireId, offset: u64, flags: u32, data: &[u8]) -> Result<Vec<u8>, Errno> {
            let mut arg = abi::WriteIn::new_zeroed();
            (arg.offset, arg.size, arg.write_flags) = (offset, data.len() as u32, flags);
            self.ask(op::WRITE, node, &[arg.as_bytes(), data])
        }

        fn read(&self, node: WireId, offset: u64, size: u32) -> Result<Vec<u8>, Errno> {
            let arg = abi::ReadIn { offset, size, ..abi::ReadIn::new_zeroed() };
            self.ask(op::READ, node, &[arg.as_bytes()])
        }

        fn ttl(&self, name: &[u8]) -> u64 {
            self.lookup(ROOT, name).unwrap().attr_valid
        }
    }

    #[test]
    fn opens_and_creates_are_not_served() {
        let s = Served::without_open();
        let node = WireId(s.mknod(ROOT, "f").nodeid);
        assert_eq!(s.open(op::OPEN, node), Err(Errno::NOSYS));
        assert_eq!(s.open(op::OPENDIR, ROOT), Err(Errno::NOSYS));
        let create = abi::CreateIn { mode: 0o100_644, ..abi::CreateIn::new_zeroed() };
        assert_eq!(s.ask(op::CREATE, ROOT, &[create.as_bytes(), b"c\0"]), Err(Errno::NOSYS));
        assert_eq!(s.held(), (1, 0));
    }

    #[test]
    fn content_is_had_by_the_node() {
        let s = Served::without_open();
        let (file, dir) = (s.mknod(ROOT, "f"), s.mkdir(ROOT, "d"));
        let (id, dir_id) = (WireId(file.nodeid), WireId(dir.nodeid));
        s.write(id, 5000, 0, b"abc").unwrap();
        assert_eq!(s.read(id, 5000, 10).unwrap(), b"abc");
        let allocate = abi::FallocateIn { length: 20000, ..abi::FallocateIn::new_zeroed() };
        s.ask(op::FALLOCATE, id, &[allocate.as_bytes()]).unwrap();
        assert_eq!(s.getattr(id).unwrap().size, 20000);
        let copy = WireId(s.mknod(dir_id, "copy").nodeid);
        let range = abi::CopyRangeIn { nodeid_out: copy.0, len: 1 << 20, ..abi::CopyRangeIn::new_zeroed() };
        let copied = s.ask(op::COPY_FILE_RANGE_64, id, &[range.as_bytes()]).unwrap();
        assert_eq!(abi::CopyRangeOut::read_from_bytes(&copied).unwrap().bytes_copied, 20000);
        assert_eq!(s.read(copy, 5000, 3).unwrap(), b"abc");
        let list = abi::ReadIn { size: 4096, offset: 2, ..abi::ReadIn::new_zeroed() };
        let listed = s.ask(op::READDIRPLUS, dir_id, &[list.as_bytes()]).unwrap();
        assert_eq!(entry(&listed).nodeid, copy.0);
        let ioctl = abi::IoctlIn { cmd: 0x8008_6601, out_size: 8, ..abi::IoctlIn::new_zeroed() };
        assert_eq!(s.ask(op::IOCTL, id, &[ioctl.as_bytes()]).map(|b| b.len()), Ok(20));
        let release = abi::ReleaseIn { fh: 0, flags: 0, release_flags: 0, lock_owner: 0 };
        assert!(s.ask(op::RELEASE, id, &[release.as_bytes()]).is_ok_and(|b| b.is_empty()), "that of a TMPFILE");
    }

    #[test]
    fn an_unlinked_file_stays_until_it_is_forgotten() {
        let s = Served::without_open();
        let file = s.mknod(ROOT, "f");
        let id = WireId(file.nodeid);
        s.write(id, 0, 0, b"abc").unwrap();
        s.ask(op::UNLINK, ROOT, &[b"f\0"]).unwrap();
        s.fs.vol.sync().unwrap();
        s.write(id, 3, abi::WRITE_CACHE, b"def").unwrap();
        assert_eq!((s.read(id, 0, 10).unwrap(), s.held()), (b"abcdef".to_vec(), (1, 1)));
        s.forget(&file, 1);
        assert_eq!(s.held(), (0, 0));
        assert_eq!(s.read(id, 0, 10), Err(Errno::STALE));
        assert_eq!(s.write(id, 0, 0, b"abc"), Err(Errno::STALE));
        let new = s.reuse(&file);
        assert_eq!(s.write(id, 0, 0, b"abc"), Err(Errno::STALE), "its number is another's");
        assert_eq!(s.getattr(WireId(new.nodeid)).unwrap().size, 0);
    }

    #[test]
    fn a_nameless_file_lives_by_its_look_up() {
        let s = Served::without_open();
        let create = abi::CreateIn { flags: libc::O_RDWR as u32, mode: 0o100_600, ..abi::CreateIn::new_zeroed() };
        let made = s.ask(op::TMPFILE, ROOT, &[create.as_bytes()]).unwrap();
        let file = entry(&made);
        assert_eq!(abi::OpenOut::read_from_bytes(&made[size_of::<abi::EntryOut>()..]).unwrap().fh, 0);
        let id = WireId(file.nodeid);
        s.write(id, 0, 0, b"abc").unwrap();
        assert_eq!(s.held(), (1, 1));
        s.ask(op::LINK, ROOT, &[abi::LinkIn { oldnodeid: id.0 }.as_bytes(), b"named\0"]).unwrap();
        s.forget(&file, 2);
        assert_eq!((s.held(), s.read(id, 0, 3).unwrap()), ((0, 0), b"abc".to_vec()));
        let gone = entry(&s.ask(op::TMPFILE, ROOT, &[create.as_bytes()]).unwrap());
        s.forget(&gone, 1);
        assert_eq!(s.held(), (0, 0));
        assert_eq!(s.getattr(WireId(gone.nodeid)).map(|a| a.ino), Err(Errno::STALE));
    }

    #[test]
    fn truncation_takes_privileges() {
        let s = Served::without_open();
        let node = WireId(s.mknod(ROOT, "f").nodeid);
        s.write(node, 0, 0, b"abc").unwrap();
        let mut arg = abi::SetattrIn::new_zeroed();
        (arg.valid, arg.mode) = (fattr::MODE, 0o106_755);
        s.ask(op::SETATTR, node, &[arg.as_bytes()]).unwrap();
        // as for O_TRUNC, `do_truncate` of fs/open.c: lock owner, times, and what fs/fuse/dir.c adds
        let lockowner = 1 << 9;
        (arg.valid, arg.mode) = (fattr::SIZE | lockowner | fattr::MTIME | fattr::CTIME | fattr::KILL_SUIDGID, 0);
        let told = s.ask(op::SETATTR, node, &[arg.as_bytes()]).unwrap();
        let attr = abi::AttrOut::read_from_bytes(&told).unwrap().attr;
        assert_eq!((attr.size, attr.mode & 0o7777), (0, 0o755));
    }

    #[test]
    fn guarded_files_are_not_made_but_found() {
        let s = Served::with(WITHOUT_OPEN, 131_072);
        let node = WireId(s.mknod(ROOT, "f").nodeid);
        let set = |flags: u32| {
            let ioctl = abi::IoctlIn { cmd: 0x4008_6602, in_size: 4, ..abi::IoctlIn::new_zeroed() };
            s.ask(op::IOCTL, node, &[ioctl.as_bytes(), flags.as_bytes()]).map(|_| ())
        };
        let (immutable, append, noatime) = (0x10, 0x20, 0x80);
        assert_eq!(
            (set(immutable), set(append | noatime), set(noatime)),
            (Err(Errno::OPNOTSUPP), Err(Errno::OPNOTSUPP), Ok(()))
        );
        assert!(!s.fs.vol.guarded() && s.ttl(b"f") > 0);
        // a version that did not keep that there are such files made one
        s.write(node, 0, 0, b"abc").unwrap();
        let flags = |f| braidfs::SetAttr { flags: Some(f), ..braidfs::SetAttr::default() };
        s.fs.vol.setattr(node.ino(), &flags(APPEND)).unwrap();
        assert_eq!(s.ttl(b"f"), 0, "the kernel asks before each write");
        let direct = abi::WRITE_LOCKOWNER;
        assert_eq!(s.write(node, 2, direct, b"x"), Err(Errno::PERM));
        assert!(s.write(node, 2, abi::WRITE_CACHE, b"x").is_ok(), "the kernel took it before");
        assert_eq!(set(append | noatime), Ok(()), "what it has it may keep");
        s.fs.vol.setattr(node.ino(), &flags(IMMUTABLE)).unwrap();
        assert_eq!(s.write(node, 3, direct, b"x"), Err(Errno::PERM));
        assert_eq!(set(0), Ok(()));
        assert!(s.ttl(b"f") > 0 && s.fs.vol.guarded());
    }

    /// How much the kernel may hold dirty follows the room, down and up.
    #[test]
    fn the_kernels_bound_is_raised_again() {
        let dir = tempfile::tempdir().unwrap();
        let bound = dir.path().join("max_bytes");
        std::fs::write(&bound, "43000000").unwrap();
        let now = || std::fs::read_to_string(&bound).unwrap().trim().parse::<u64>().unwrap();
        let mut s = Served::with(WITHOUT_OPEN, 1 << 20);
        s.fs.allow_dirty(Some(crate::dirty::DirtyLimit::new(dir.path())));
        let (least, much) = (crate::dirty::LEAST_BYTES, now());
        assert!(much > 4 * crate::dirty::USUAL_BYTES, "{much}");
        let work = |s: &Served| s.jobs.try_iter().for_each(|job| job(&s.fs));
        let node = WireId(s.mknod(ROOT, "f").nodeid);
        let file = s.fs.vol.open(node.ino()).unwrap();
        let look = || {
            std::thread::sleep(std::time::Duration::from_millis(10));
            s.fs.watch_room(node.ino(), u64::MAX, &s.channel);
            work(&s);
        };
        let room = s.fs.vol.write_room(node.ino()) * 4096;
        let allocate = braidfs::FallocMode::Allocate { keep_size: false };
        s.fs.vol.fallocate(&file, allocate, 0, room - (200 << 20)).unwrap();
        look();
        assert_eq!(now(), least);
        // not while files are told that there is little
        (0..500).take_while(|_| s.ttl(b"f") == 0).for_each(|_| look());
        assert_eq!((now(), s.ttl(b"f") > 0), (least, true), "room enough for the least");
        s.fs.vol.fallocate(&file, allocate, 0, room - (50 << 20)).unwrap();
        look();
        assert_eq!((now(), s.ttl(b"f")), (least, 0), "little room");
        s.fs.vol.setattr(node.ino(), &braidfs::SetAttr { size: Some(0), ..braidfs::SetAttr::default() }).unwrap();
        s.fs.vol.sync().unwrap();
        look();
        look();
        assert!(now() > 4 * crate::dirty::USUAL_BYTES && s.ttl(b"f") > 0, "{}: there is room again", now());
    }

    /// A tenant with little left of its limit is watched, and what the kernel may hold of its neighbours stays as it was.
    #[test]
    fn a_tenant_at_its_limit_leaves_the_bound_to_its_neighbours() {
        let dir = tempfile::tempdir().unwrap();
        let bound = dir.path().join("max_bytes");
        std::fs::write(&bound, "43000000").unwrap();
        let now = || std::fs::read_to_string(&bound).unwrap().trim().parse::<u64>().unwrap();
        let mut s = Served::with(WITHOUT_OPEN, 1 << 20);
        s.fs.allow_dirty(Some(crate::dirty::DirtyLimit::new(dir.path())));
        let much = now();
        assert!(much > 2 * crate::dirty::MOST_BESIDE_LIMITED, "{much}");
        let much = crate::dirty::MOST_BESIDE_LIMITED;
        let limit = |mib: u64| braidfs::TenantBudget { space: Some(mib << 20), ..braidfs::TenantBudget::default() };
        let t = s.fs.vol.tenant_create(ROOT.ino(), b"t", 0o755, "t", limit(200), &braidfs::Cred::root()).unwrap();
        s.fs.limit_changed(t.domain, &s.channel);
        let root = WireId(s.lookup(ROOT, b"t").unwrap().nodeid);
        s.mknod(ROOT, "f");
        let node = WireId(s.mknod(root, "g").nodeid);
        let ttl = |name: &[u8]| s.lookup(root, name).unwrap().attr_valid;
        let work = |s: &Served| s.jobs.try_iter().for_each(|job| job(&s.fs));
        let look = || {
            std::thread::sleep(std::time::Duration::from_millis(10));
            s.fs.watch_room(node.ino(), u64::MAX, &s.channel);
            work(&s);
        };
        look();
        assert_eq!((ttl(b"g"), s.ttl(b"f") > 0), (0, true), "200 MiB are less than the kernel may hold");
        assert_eq!(now(), much, "less beside a tenant with a limit");
        let file = s.fs.vol.open(node.ino()).unwrap();
        let room = s.fs.vol.write_room(node.ino()) * 4096;
        let allocate = braidfs::FallocMode::Allocate { keep_size: false };
        s.fs.vol.fallocate(&file, allocate, 0, room).unwrap();
        look();
        assert_eq!(now(), much, "not less at the limit");
        // what came of the cache would have no room beyond it: nothing was accepted before
        let accepted = |at: u64| s.fs.vol.write_accepted(&file, room + at, &[1; 4096]);
        let all = (0..2000).find(|n| accepted(n * 4096).is_err());
        assert!(all.is_some(), "the limit ends what the cache writes, too");
        // memory becomes free, and the kernel's bound grows: what it may hold of the tenant does, too
        std::fs::write(&bound, (2 * much).to_string()).unwrap();
        s.fs.limit_changed(t.domain, &s.channel);
        assert_eq!(s.fs.kernel_holds(node.ino()), 2 * much / 4096);
        std::fs::write(&bound, much.to_string()).unwrap();
        s.fs.vol.tenant_set("t", limit(2000)).unwrap();
        s.fs.limit_changed(t.domain, &s.channel);
        look();
        look();
        assert!(ttl(b"g") > 0 && now() > much / 2, "{}: there is room again", now());
    }

    #[test]
    fn with_little_room_files_lose_their_time_to_live() {
        // 64 MiB: tight from the beginning
        let s = Served::without_open();
        s.mknod(ROOT, "f");
        s.mkdir(ROOT, "d");
        assert_eq!((s.ttl(b"f"), s.ttl(b"d") > 0), (0, true));
        let roomy = Served::with(WITHOUT_OPEN, 131_072);
        roomy.mknod(ROOT, "f");
        assert!(roomy.ttl(b"f") > 0);
        let old = Served::new();
        old.mknod(ROOT, "f");
        assert!(old.ttl(b"f") > 0, "with OPEN only those that are open for writing");
    }
}

mod later;
