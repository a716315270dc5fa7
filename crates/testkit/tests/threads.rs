//! Several threads on one volume, in directories of their own (compared with a model each) and in a shared one (where
//! only the tree's invariants are known), while a background committer runs.
//!
//! `BRAIDFS_SEED`, `BRAIDFS_THREAD_OPS` (per thread, default 20 000). Not deterministic: the seed repeats the
//! operations, not their order.

use braidfs::OpenHow;
use braidfs::format::inode::NOCOW;
use braidfs::{
    AtimeMode, Cred, Error, FileKind, InodeNo, MkfsOptions, MountOptions, NewNode, Placement, RenameMode, SetAttr,
    Volume, mkfs,
};
use braidfs_device::{Device, MemDevice, RecordDevice};
use braidfs_testkit::env_number;
use braidfs_testkit::generate::{Generator, Profile};
use braidfs_testkit::model::{Model, ROOT, Times};
use braidfs_testkit::ops::{At, Op, Out, P, SLOTS, Slots, perform, same_answer};
use braidfs_testkit::run::{Did, both_refuse, is_guarded};
use braidfs_testkit::states::{Log, since};
use braidfs_testkit::subject::OnVolume;
use braidfs_testkit::walk::{SeenNode, fsck, walk};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

const THREADS: u64 = 4;

fn dir() -> NewNode<'static> {
    NewNode { kind: FileKind::Dir, mode: 0o755, umask: 0, rdev: 0, target: b"" }
}

/// Where files are spread over all domains, written pages are given up, as on a mount.
fn mount(device: &Arc<dyn Device>, placement: Placement) -> Volume {
    let options = MountOptions {
        commit_interval: Duration::from_millis(15),
        background: true,
        cache_bytes: 32 << 20,
        cached_above: matches!(placement, Placement::Spread),
        ..MountOptions::default()
    };
    Volume::mount(vec![device.clone()], options).unwrap()
}

fn same<A: std::fmt::Debug, B: std::fmt::Debug>(
    op: &Op,
    got: &braidfs::Result<Out<A>>,
    want: &braidfs::Result<Out<B>>,
    guarded: bool,
) {
    let equal = same_answer(got, want) || (guarded && both_refuse(got, want));
    assert!(equal, "{op:?}: volume {got:.300?}, model {want:.300?}");
}

/// Operations in a directory that nobody else uses.
fn own(v: &Volume, top: P, seed: u64, ops: u64) -> (Model, Did) {
    // it knows no clock: what is read may have another access time each time
    let mut model = Model::default();
    model.atime = AtimeMode::Strictatime;
    model.create(ROOT, top.0.as_bytes(), &dir()).unwrap();
    // Seeks have more than one right answer, and orphans relinked are another test's.
    let profile = Profile {
        slots: false,
        objects: 150,
        flags: true,
        whiteouts: true,
        rewrites: true,
        write_back: true,
        ..Profile::default()
    };
    let mut generator = Generator::new(seed, profile);
    generator.top = top;
    let (mut slots, mut model_slots): (Slots<OnVolume<'_>>, _) = (Default::default(), Default::default());
    let (mut full, mut did) = (0, Did::default());
    for _ in 0..ops {
        let op = generator.next(&model);
        if matches!(op, Op::Seek { .. }) {
            continue;
        }
        let got = perform(&mut OnVolume::among_others(v), &mut slots, &op);
        if matches!(got, Err(Error::NoSpace)) {
            full += 1;
        } else {
            let guarded = is_guarded(&mut model, &model_slots, &op);
            let want = perform(&mut model, &mut model_slots, &op);
            same(&op, &got, &want, guarded);
            if let Ok(out) = &got {
                did.note(&op, out);
            }
        }
    }
    println!("{}: {full} of {ops} operations found no space", top.0);
    assert!(full * 10 < ops, "{full} of {ops}: the volume is too small, or tells ENOSPC without need");
    (model, did)
}

/// The place of the open file that an operation uses.
fn slot_of(op: &Op) -> Option<u8> {
    let of = |at| if let At::Slot(slot) = at { Some(slot) } else { None };
    match *op {
        Op::LinkSlot { slot, .. } => Some(slot),
        Op::Write { at, .. } | Op::Append { at, .. } | Op::Truncate { at, .. } | Op::Fallocate { at, .. } => of(at),
        Op::WriteBack { at, .. } | Op::SetAttr { at, .. } | Op::FsyncAs { at, .. } => of(at),
        Op::Read { at, .. } | Op::Seek { at, .. } | Op::Fsync { at, .. } | Op::Defragment { at, .. } => of(at),
        _ => None,
    }
}

/// Operations after which a thread looks at what is there: what others change it does not learn otherwise.
const LOOK_AFTER: u64 = 100;

/// What is in the shared directory, as far as it can be told while others change it: names, kinds and sizes.
fn look(v: &Volume) -> Model {
    let mut guess = Model::default();
    let top = guess.create(ROOT, b"shared", &dir()).unwrap();
    let mut dirs = vec![(v.lookup(InodeNo::ROOT, b"shared").unwrap().ino, top)];
    while let Some((real, known)) = dirs.pop() {
        let mut entries = Vec::new();
        // who removed the directory meanwhile leaves nothing in it
        let listed = v.readdir_plus(real, 0, &mut |e, attr| {
            entries.extend(attr.map(|a| (e.name.to_vec(), *a)));
            true
        });
        assert!(matches!(listed, Ok(()) | Err(Error::NotFound)), "{listed:?}");
        for (name, attr) in entries {
            let target: &[u8] = if attr.kind() == FileKind::Symlink { b"t" } else { b"" };
            let new = NewNode { kind: attr.kind(), mode: 0o755, umask: 0, rdev: 0, target };
            // a name that moved during the listing may be in it twice
            let Ok(ino) = guess.create(known, &name, &new) else { continue };
            match attr.kind() {
                FileKind::Dir => dirs.push((attr.ino, ino)),
                FileKind::File => guess.setattr(ino, &SetAttr { size: Some(attr.size), ..SetAttr::default() }).unwrap(),
                _ => {}
            }
        }
    }
    guess
}

/// Operations where everybody else works too: any answer will do that a name, a kind or a lack of room can give. At least one in three
/// is done.
fn shared(v: &Volume, seed: u64, ops: u64) -> Did {
    let mut guess = look(v);
    let profile = Profile {
        objects: 60,
        depth: 5,
        syncs: 10,
        commits: 5,
        whiteouts: true,
        rewrites: true,
        write_back: true,
        ..Profile::default()
    };
    let mut generator = Generator::new(seed, profile);
    generator.top = P("shared");
    let (mut done, mut did) = (0, Did::default());
    let (mut slots, mut model_slots): (Slots<OnVolume<'_>>, _) = (Default::default(), Default::default());
    for n in 0..ops {
        if n % LOOK_AFTER == LOOK_AFTER - 1 {
            // open files are of the guess before
            (guess, model_slots) = (look(v), Default::default());
        }
        let op = generator.next(&guess);
        use Error as E;
        match perform(&mut OnVolume::among_others(v), &mut slots, &op) {
            Ok(out) => {
                done += 1;
                did.note(&op, &out);
                drop(perform(&mut guess, &mut model_slots, &op));
            }
            Err(E::NotFound | E::Exists | E::NotDir | E::IsDir | E::NotEmpty | E::Loop) => {}
            Err(
                E::NoSpace | E::NoAttr | E::NoData | E::Invalid(_) | E::Unsupported(_) | E::TooBig | E::TooManyExtents,
            ) => {}
            // who opened nothing has no file in that place
            Err(E::BadHandle) if slot_of(&op).is_some_and(|s| slots[usize::from(s) % SLOTS].is_none()) => {}
            // a second name of a directory, user attributes of what is neither file nor directory
            Err(E::Perm) if matches!(op, Op::Link { .. } | Op::SetXattr { .. } | Op::RemoveXattr { .. }) => {}
            Err(e) => panic!("{op:?}: {e}"),
        }
    }
    println!("{done} of {ops} operations done in the shared directory");
    assert!(done * 3 > ops, "{done} of {ops} operations done in the shared directory");
    did
}

/// Compares everything that a thread has made.
fn compare(v: &Volume, model: &mut Model) {
    let (mut slots, mut model_slots): (Slots<OnVolume<'_>>, _) = (Default::default(), Default::default());
    for (path, ino) in model.paths() {
        let path = P::new(std::str::from_utf8(&path).unwrap());
        let node = model.node(ino).unwrap().clone();
        let mut ops = Vec::new();
        if !path.0.is_empty() {
            ops.extend([Op::Stat { path }, Op::ListXattr { path }, Op::Readlink { path }, Op::Readdir { path }]);
        }
        let pages: Vec<u64> = node.data.pages().collect();
        for run in pages.chunks(16) {
            let off = run[0] * 4096;
            ops.push(Op::Read {
                at: At::Path(path),
                off,
                len: (run[run.len() - 1] * 4096 + 4096 - off).min(1 << 20) as u32,
            });
        }
        for name in node.xattrs.keys() {
            ops.push(Op::GetXattr { path, name: P::new(std::str::from_utf8(name).unwrap()) });
        }
        for op in ops {
            let got = perform(&mut OnVolume::among_others(v), &mut slots, &op);
            same(&op, &got, &perform(model, &mut model_slots, &op), false);
        }
    }
}

fn run(placement: Placement) {
    let seed = braidfs_testkit::seed();
    let ops = env_number("BRAIDFS_THREAD_OPS", 20_000) / 2;
    println!("BRAIDFS_SEED={seed}");
    let device: Arc<dyn Device> = Arc::new(MemDevice::soiled((256 << 20) / 4096));
    let options = MkfsOptions { domains: Some(4), placement, ..MkfsOptions::default() };
    mkfs::format(std::slice::from_ref(&device), &options).unwrap();
    let v = mount(&device, placement);
    let names: Vec<P> = (0..THREADS).map(|t| P::new(&format!("t{t}"))).collect();
    for name in names.iter().map(|n| n.0).chain(["shared"]) {
        v.create(InodeNo::ROOT, name.as_bytes(), &dir(), &Cred::root()).unwrap();
    }
    let done: Vec<(Model, Did, Did)> = std::thread::scope(|scope| {
        let work = |t: u64| {
            let (v, top) = (&v, names[t as usize]);
            let seed = seed.wrapping_add(1000 * t);
            scope.spawn(move || {
                let (model, did) = own(v, top, seed, ops);
                (model, did, shared(v, seed + 1, ops))
            })
        };
        let shared_only = scope.spawn(|| shared(&v, seed + 7, ops));
        let threads: Vec<_> = (0..THREADS).map(work).collect();
        shared_only.join().unwrap();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    let (mut models, mut own, mut shared) = (Vec::new(), Did::default(), Did::default());
    for (model, alone, beside) in done {
        models.push(model);
        own.add(&alone);
        shared.add(&beside);
    }
    println!("{own:?}\n{shared:?}");
    for (what, n) in own.named() {
        assert!(n > 0, "no {what} in directories of threads' own");
    }
    // flags are none of what is done there
    for (what, n) in (Did { flags: 1, ..shared }).named() {
        assert!(n > 0, "no {what} in the shared directory");
    }
    models.iter_mut().for_each(|m| compare(&v, m));
    let mut before = walk(&v).unwrap();
    // until a commit has written what is written anew it may count twice
    v.sync().unwrap();
    before.nodes.iter_mut().for_each(|(key, n)| n.sectors = v.getattr(key.0).unwrap().sectors);
    v.unmount().unwrap();
    fsck(std::slice::from_ref(&device)).unwrap();
    let v = mount(&device, placement);
    // the walk has read everything
    models.iter_mut().for_each(Model::all_accessed);
    models.iter_mut().for_each(|m| compare(&v, m));
    let after = walk(&v).unwrap();
    assert_eq!(before.nodes.len(), after.nodes.len());
    for (key, n) in &before.nodes {
        // the walks themselves have changed access times
        let other = |n: &SeenNode| SeenNode { times: Times { atime: None, ..n.times }, ..n.clone() };
        let (was, is) = (other(n), after.nodes.get(key).map(other));
        assert!(
            is.as_ref() == Some(&was),
            "{} changed by a remount: {}",
            before.path(*key),
            is.and_then(|is| was.difference(&is)).unwrap_or_else(|| "it is gone".into())
        );
    }
    v.unmount().unwrap();
}

#[test]
fn threads_with_files_in_their_directories_domain() {
    run(Placement::Dirs);
}

#[test]
fn threads_with_everything_spread() {
    run(Placement::Spread);
}

/// A volume of one domain, its root, and two files in it.
fn two_files(device: &Arc<dyn Device>) -> (Volume, [InodeNo; 2]) {
    mkfs::format(std::slice::from_ref(device), &MkfsOptions { domains: Some(1), ..MkfsOptions::default() }).unwrap();
    let v = mount(device, Placement::Dirs);
    let file = NewNode { kind: FileKind::File, mode: 0o644, umask: 0, rdev: 0, target: b"" };
    let make = |name: &[u8]| v.create(InodeNo::ROOT, name, &file, &Cred::root()).unwrap().ino;
    let inodes = [make(b"a"), make(b"b")];
    (v, inodes)
}

#[test]
fn an_exchange_is_seen_whole() {
    let device: Arc<dyn Device> = Arc::new(MemDevice::soiled((64 << 20) / 4096));
    let (v, inodes) = two_files(&device);
    // the last exchange that began, and how many pairs of names were seen with the exchange known that was under way
    let (begun, judged) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let open =
        |path: &[u8]| v.open_path(path, OpenHow { read: true, ..OpenHow::default() }, &Cred::root()).unwrap().ino();
    std::thread::scope(|s| {
        s.spawn(|| {
            let exchanges = env_number("BRAIDFS_THREAD_OPS", 20_000) as usize * 10;
            for n in 1..=exchanges * 10 {
                begun.store(n, SeqCst);
                v.rename(InodeNo::ROOT, b"a", InodeNo::ROOT, b"b", RenameMode::Exchange).unwrap();
                // on a busy machine the other thread may have had no turn yet
                if n >= exchanges && judged.load(SeqCst) >= exchanges / 1000 {
                    break;
                }
            }
            begun.store(usize::MAX, SeqCst);
        });
        loop {
            let n = begun.load(SeqCst);
            let (b, a) = (open(b"b"), open(b"a"));
            if n == usize::MAX {
                break;
            }
            // one exchange at most was under way: whoever sees one name as it is afterwards sees the other so, too
            if begun.load(SeqCst) == n && b == inodes[(n + 1) % 2] {
                assert_ne!(a, b, "exchange {n}: one inode under both names");
                judged.fetch_add(1, SeqCst);
            }
        }
    });
    println!("{judged:?} pairs of names judged");
    assert!(judged.into_inner() > 0, "no pair of names was seen beside an exchange");
    v.unmount().unwrap();
}

/// Data that is overwritten just when a commit is about to write it has its blocks all the same.
#[test]
fn a_full_volume_overwritten_while_it_commits() {
    let device: Arc<dyn Device> = Arc::new(MemDevice::soiled((64 << 20) / 4096));
    let (v, [filler, _]) = two_files(&device);
    let file = NewNode { kind: FileKind::File, mode: 0o644, umask: 0, rdev: 0, target: b"" };
    let make = |n: usize| v.create(InodeNo::ROOT, format!("f{n}").as_bytes(), &file, &Cred::root()).unwrap().ino;
    let files: Vec<InodeNo> = (0..32).map(make).collect();
    for ino in &files {
        v.write(&v.open(*ino).unwrap(), 0, &[1; 64 * 4096]).unwrap();
    }
    v.sync().unwrap();
    let stop = AtomicBool::new(false);
    let fine = |r: braidfs::Result<()>| match r {
        Ok(()) | Err(Error::NoSpace) => {}
        Err(e) => panic!("{e}"),
    };
    std::thread::scope(|s| {
        let threads = [
            s.spawn(|| {
                let f = v.open(filler).unwrap();
                for n in 0.. {
                    let mut at = 0;
                    while !stop.load(SeqCst) {
                        match v.write(&f, at, &[3; 16 * 4096]) {
                            Ok(n) => at += n as u64,
                            Err(Error::NoSpace) if n % 8 == 7 => break,
                            Err(Error::NoSpace) => std::thread::yield_now(),
                            Err(e) => panic!("{e}"),
                        }
                        if at > 60 << 20 {
                            break;
                        }
                    }
                    if stop.load(SeqCst) {
                        return;
                    }
                    fine(v.setattr(filler, &SetAttr { size: Some(0), ..SetAttr::default() }).map(|_| ()));
                }
            }),
            s.spawn(|| {
                while !stop.load(SeqCst) {
                    fine(v.sync())
                }
            }),
        ];
        let writers: Vec<_> = files
            .chunks(16)
            .map(|own| {
                let v = &v;
                s.spawn(move || {
                    let open: Vec<_> = own.iter().map(|ino| v.open(*ino).unwrap()).collect();
                    for n in 0..env_number("BRAIDFS_THREAD_OPS", 20_000) as usize / 2 {
                        fine(v.write(&open[n % open.len()], 0, &[n as u8; 64 * 4096]).map(|_| ()));
                    }
                })
            })
            .collect();
        let done: Vec<_> = writers.into_iter().map(|t| t.join()).collect();
        stop.store(true, SeqCst);
        threads.into_iter().for_each(|t| t.join().unwrap());
        done.into_iter().for_each(|r| r.unwrap());
    });
    assert!(v.domains().iter().all(|d| d.failed.is_none()));
    v.unmount().unwrap();
    fsck(std::slice::from_ref(&device)).unwrap();
}

/// Pages that were to be written in place need blocks when that is called off.
#[test]
fn a_full_volume_and_a_file_no_longer_written_in_place() {
    let device: Arc<dyn Device> = Arc::new(MemDevice::soiled((64 << 20) / 4096));
    let (v, [filler, ino]) = two_files(&device);
    let flags = |flags| v.setattr(ino, &SetAttr { flags: Some(flags), ..SetAttr::default() });
    flags(NOCOW).unwrap();
    let f = v.open(ino).unwrap();
    let len = v.write(&f, 0, &vec![1; 2000 * 4096]).unwrap();
    v.sync().unwrap();
    let other = v.open(filler).unwrap();
    let mut at = 0;
    while let Ok(n) = v.write(&other, at, &[2; 16 * 4096]) {
        at += n as u64;
    }
    v.sync().unwrap();
    assert_eq!(v.write(&f, 0, &vec![3; len]).unwrap(), len, "in place");
    match flags(0) {
        Ok(_) | Err(Error::NoSpace) => {}
        Err(e) => panic!("{e}"),
    }
    v.sync().unwrap();
    assert!(v.domains().iter().all(|d| d.failed.is_none()));
    drop((f, other));
    v.unmount().unwrap();
    fsck(std::slice::from_ref(&device)).unwrap();
}

/// A file is moved into new directories while another thread syncs it: it must have a name after a crash, whichever. The crashes come
/// when the first fsync or the last one had returned, and later, and lose what was not flushed.
#[test]
fn fsync_beside_moves_into_new_directories() {
    let quiet = || MountOptions { background: false, ..MountOptions::default() };
    let file = NewNode { kind: FileKind::File, ..dir() };
    let rounds = env_number("BRAIDFS_SYNC_ROUNDS", 100);
    let mut rng = fastrand::Rng::with_seed(braidfs_testkit::seed());
    for placement in [Placement::Inherit, Placement::Spread] {
        let mut beside = 0;
        for round in 0..rounds {
            let empty = Arc::new(MemDevice::soiled((64 << 20) / 4096));
            let options = MkfsOptions { domains: Some(2), placement, ..MkfsOptions::default() };
            mkfs::format(&[empty.clone() as Arc<dyn Device>], &options).unwrap();
            let device = Arc::new(RecordDevice::new(empty.snapshot()));
            let v = Volume::mount(vec![device.clone()], quiet()).unwrap();
            let f = v.create(InodeNo::ROOT, b"f", &file, &Cred::root()).unwrap().ino;
            let (moves, moved) = (1 + round as usize % 10, AtomicUsize::new(0));
            // the length of the log at the end of each fsync, and the moves that were done when it began
            let synced: Vec<(usize, usize)> = std::thread::scope(|s| {
                let mover = s.spawn(|| {
                    let mut at = InodeNo::ROOT;
                    for n in 0..moves {
                        let name = format!("d{n}");
                        let d = v.create(InodeNo::ROOT, name.as_bytes(), &dir(), &Cred::root()).unwrap().ino;
                        let d = v.create(d, b"e", &dir(), &Cred::root()).unwrap().ino;
                        v.rename(at, b"f", d, b"f", RenameMode::Replace).unwrap();
                        at = d;
                        moved.store(n + 1, SeqCst);
                        // the fsyncs have their turn, also on one processor
                        std::thread::yield_now();
                    }
                });
                let mut synced = Vec::new();
                while !mover.is_finished() {
                    let before = moved.load(SeqCst);
                    v.fsync(f, false).unwrap();
                    synced.push((device.log_len(), before));
                }
                synced
            });
            v.crash();
            let (Some(first), Some(last)) = (synced.first(), synced.last()) else { continue };
            beside += usize::from(synced.iter().any(|(_, before)| (1..moves).contains(before)));
            let log = Log::of(&device);
            let crashes = since(&log, first.0, 2, &mut rng).into_iter().chain([log.without_unflushed(last.0)]);
            for state in crashes {
                let image: Arc<dyn Device> = Arc::new(MemDevice::from_image(log.image(&state)));
                let v = Volume::mount(vec![image.clone()], quiet()).unwrap();
                let there = walk(&v).unwrap().nodes.keys().any(|k| k.0 == f);
                assert!(there, "round {round}, {placement:?}: lost its name: fsyncs {synced:?}, {state}");
                v.unmount().unwrap();
                fsck(std::slice::from_ref(&image)).unwrap();
            }
        }
        println!("{placement:?}: {beside} of {rounds} rounds had an fsync between two moves");
        assert!(
            beside as u64 * 10 > rounds,
            "{placement:?}: {beside} of {rounds} rounds had an fsync between two moves"
        );
    }
}
