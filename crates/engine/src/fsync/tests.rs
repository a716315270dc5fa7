//! Syncs beside changes of names.

mod apart;
mod full_ring;
mod put_aside;
mod told;
mod users;

use super::batch::Gathered;
use crate::{Cred, DomainId, FileKind, InodeNo, MkfsOptions, MountOptions, NewNode, Placement, RenameMode, Volume};
use braidfs_device::{Device, Effect, FaultDevice, MemDevice, Op, Rule};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::channel;
use std::task::{Context, Wake, Waker};
use std::time::Duration;

fn make(v: &Volume, dir: InodeNo, name: &str, kind: FileKind, not: &[DomainId]) -> (InodeNo, String) {
    let node = NewNode { kind, mode: 0o755, umask: 0, rdev: 0, target: b"" };
    let one = |i: u32| {
        let name = format!("{name}{i}");
        (v.create(dir, name.as_bytes(), &node, &Cred::root()).unwrap().ino, name)
    };
    (0..).map(one).find(|(ino, _)| !not.contains(&v.domain_of(*ino).unwrap())).unwrap()
}

/// A file was made, and a sync of its directory has looked, and goes on to commit the file's domain. Then the file moves into a
/// directory that is not durable: it must be, or the file is nowhere.
#[test]
fn what_a_sync_has_seen_does_not_move_below_what_is_not_durable() {
    for whole in [false, true] {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(16384));
        let o = MkfsOptions { domains: Some(4), placement: Placement::Spread, ..MkfsOptions::default() };
        crate::mkfs::format(std::slice::from_ref(&device), &o).unwrap();
        let mount = || {
            let o = MountOptions { background: false, serial: true, ..MountOptions::default() };
            Volume::mount(vec![device.clone()], o).unwrap()
        };
        let v = mount();
        let (dir, _) = make(&v, InodeNo::ROOT, "d", FileKind::Dir, &[]);
        v.sync().unwrap();
        let (file, name) = make(&v, dir, "f", FileKind::File, &[]);
        let of_file = v.domain_of(file).unwrap();
        let (new, new_name) = make(&v, InodeNo::ROOT, "e", FileKind::Dir, &[of_file]);
        // what `commit_for` and `commit_all` do first
        let d = v.mounted().dom(of_file).clone();
        let tx = d.running();
        d.want(tx);
        v.rename(dir, name.as_bytes(), new, b"moved", RenameMode::Replace).unwrap();
        d.commit_upto(tx).unwrap();
        if whole {
            v.fsync(dir, false).unwrap();
        }
        v.crash();
        let v = mount();
        let there = v.lookup(InodeNo::ROOT, new_name.as_bytes()).and_then(|e| v.lookup(e.ino, b"moved"));
        let here = v.lookup(dir, name.as_bytes());
        let at = [there, here].into_iter().flatten().map(|a| a.ino).collect::<Vec<_>>();
        assert_eq!(at, [file], "whole: {whole}");
    }
}

/// A volume of two domains on these devices.
fn of_two_domains(devices: Vec<Arc<dyn Device>>) -> Volume {
    let o = MkfsOptions { domains: Some(2), placement: Placement::Spread, ..MkfsOptions::default() };
    crate::mkfs::format(&devices, &o).unwrap();
    Volume::mount(devices, MountOptions { background: false, ..MountOptions::default() }).unwrap()
}

/// A volume of two domains on a device with faults, and so many files, written and not durable.
fn with_unsynced(files: usize) -> (Volume, Arc<FaultDevice>, Vec<InodeNo>) {
    let faults = Arc::new(FaultDevice::new(Arc::new(MemDevice::new(16384)), 1));
    let v = of_two_domains(vec![faults.clone()]);
    let files =
        (0..files).map(|i| make(&v, InodeNo::ROOT, &format!("f{i}-"), FileKind::File, &[]).0).collect::<Vec<_>>();
    v.sync().unwrap();
    for f in &files {
        v.write(&v.open(*f).unwrap(), 0, &[7; 8192]).unwrap();
    }
    (v, faults, files)
}

struct PanickingWaker;

impl Wake for PanickingWaker {
    fn wake(self: Arc<Self>) {
        panic!("a user's bug");
    }
}

/// Code of a user's that panics when it is told ends nobody's wait, and no thread: not of the same group, and not of later ones.
#[test]
fn a_panic_of_who_is_told_is_nobody_elses() {
    let (v, _, files) = with_unsynced(4);
    let i = v.mounted().clone();
    // a group of all: nobody takes them yet
    i.syncing.queues[0].lock().served = true;
    let mut tickets = files.iter().map(|f| v.fsync_start(*f, false)).collect::<Vec<_>>();
    assert_eq!(i.syncing.queues[0].lock().waiting.len(), 4);
    tickets.remove(0).on_done(Box::new(|_| panic!("a user's bug")));
    let waker = Waker::from(Arc::new(PanickingWaker));
    let mut polled = tickets.remove(0);
    assert!(Pin::new(&mut polled).poll(&mut Context::from_waker(&waker)).is_pending());
    let (tell, told) = channel();
    for t in tickets {
        let tell = tell.clone();
        t.on_done(Box::new(move |r| tell.send(r.is_ok()).unwrap()));
    }
    for round in 0..3 {
        if round == 0 {
            let i = i.clone();
            i.clone().run_beside(move || i.serve_syncs(0));
        } else {
            v.write(&v.open(files[0]).unwrap(), 0, &[round; 100]).unwrap();
            let tell = tell.clone();
            v.fsync_start(files[0], false).on_done(Box::new(move |r| {
                tell.send(r.is_ok()).unwrap();
                panic!("a user's bug");
            }));
        }
        for _ in 0..if round == 0 { 2 } else { 1 } {
            assert!(told.recv_timeout(Duration::from_secs(60)).expect("nobody is told"));
        }
    }
    assert!(polled.wait().is_ok());
    assert_eq!(i.syncing.under_way.load(Relaxed), 0);
    v.sync_start().wait().unwrap();
}

/// Data that no thread has written, after a panic, is not published by a commit that waited for it.
#[test]
fn a_panic_in_a_write_of_data_fails_the_domain() {
    let (v, faults, files) = with_unsynced(1);
    let i = v.mounted().clone();
    let c = i.cell(files[0]).unwrap();
    let dom = i.dom(c.domain);
    faults.add(Rule::new(Op::Write, Effect::Panic).times(1));
    catch_unwind(AssertUnwindSafe(|| dom.flush_cell(&c))).unwrap_err();
    v.sync().unwrap_err();
    assert!(dom.failed().is_some());
    v.crash();
}

/// What was gathered for an fsync is marked as changed no more: where it is not written, by a panic, its domain fails.
#[test]
fn a_panic_with_something_gathered_fails_the_domain() {
    let (v, _, files) = with_unsynced(1);
    let i = v.mounted().clone();
    let c = i.cell(files[0]).unwrap();
    let gathered = i.gather(&c, false, true).unwrap();
    assert!(matches!(gathered, Gathered::Ready(_)));
    catch_unwind(AssertUnwindSafe(|| {
        let _gathered = gathered;
        panic!("on purpose")
    }))
    .unwrap_err();
    assert!(i.dom(c.domain).failed().is_some());
    v.fsync(files[0], false).unwrap_err();
    v.crash();
}

/// A panic in the fsync itself: whoever waits for it is told of an error, and so is who comes later.
#[test]
fn a_panic_in_an_fsync_is_an_error_of_who_waits() {
    let (v, faults, files) = with_unsynced(3);
    let i = v.mounted().clone();
    i.syncing.queues[0].lock().served = true;
    let tickets = files.iter().map(|f| v.fsync_start(*f, false)).collect::<Vec<_>>();
    faults.add(Rule::new(Op::Write, Effect::Panic).times(1));
    let served = i.clone();
    i.run_beside(move || served.serve_syncs(0));
    let (tell, told) = channel();
    for t in tickets {
        let tell = tell.clone();
        t.on_done(Box::new(move |r| tell.send(r.is_err()).unwrap()));
    }
    for _ in 0..3 {
        assert!(told.recv_timeout(Duration::from_secs(60)).expect("nobody is told"));
    }
    assert_eq!(faults.fired(), 1);
    assert_eq!(i.syncing.under_way.load(Relaxed), 0);
    v.fsync_start(files[0], false).wait().unwrap_err();
    v.crash();
}

/// Content of the files that are synced together: short, so that it lies in their records.
fn content(i: usize) -> Vec<u8> {
    vec![i as u8 + 1; 100]
}

/// A volume of one domain with a journal of 32 blocks.
fn short_journal() -> Arc<MemDevice> {
    short_journals(1)
}

/// A volume of so many domains with journals of 32 blocks.
fn short_journals(domains: u16) -> Arc<MemDevice> {
    let device = Arc::new(MemDevice::new(16384));
    let (domains, journal_bytes) = (Some(domains), Some(128 << 10));
    let o = MkfsOptions { domains, placement: Placement::Spread, journal_bytes, ..MkfsOptions::default() };
    crate::mkfs::format(&[device.clone() as Arc<dyn Device>], &o).unwrap();
    device
}

fn mounted(device: Arc<dyn Device>) -> Result<Volume, crate::Error> {
    Volume::mount(vec![device], MountOptions { background: false, ..MountOptions::default() })
}

/// Writes so many files; nothing of them is durable.
fn written(v: &Volume, n: usize) -> Vec<InodeNo> {
    let one = |i: usize| {
        let node = NewNode { kind: FileKind::File, mode: 0o644, umask: 0, rdev: 0, target: b"" };
        let ino = v.create(InodeNo::ROOT, format!("f{i}").as_bytes(), &node, &Cred::root()).unwrap().ino;
        v.write(&v.open(ino).unwrap(), 0, &content(i)).unwrap();
        ino
    };
    (0..n).map(one).collect()
}

/// The image is without faults, and mounts with these files, after which it is without faults, too.
fn holds(image: &MemDevice, files: &[InodeNo]) {
    let device = || Arc::new(MemDevice::from_image(image.snapshot())) as Arc<dyn Device>;
    let clean = |device| {
        let how = braidfs_check::FsckOptions { repair: false, force: true };
        let found = braidfs_check::check(&[device], &how, &crate::JournalReplay, &|_, _, _| {}).unwrap();
        assert_eq!(found.findings, vec![]);
    };
    clean(device());
    let mount = device();
    let v = mounted(mount.clone()).unwrap();
    let read = |ino: &InodeNo| {
        let mut b = vec![0; 200];
        let n = v.read(&v.open(*ino).unwrap(), 0, &mut b).unwrap();
        b.truncate(n);
        b
    };
    files.iter().enumerate().for_each(|(i, ino)| assert_eq!(read(ino), content(i), "file {i}"));
    // the journal has room again
    let more = written_more(&v);
    v.fsync(more, false).unwrap();
    v.sync().unwrap();
    v.unmount().unwrap();
    clean(mount);
}

fn written_more(v: &Volume) -> InodeNo {
    let node = NewNode { kind: FileKind::File, mode: 0o644, umask: 0, rdev: 0, target: b"" };
    v.create(InodeNo::ROOT, b"more", &node, &Cred::root()).unwrap().ino
}

/// Each of many files that are synced together finds room in the journal before the first of them takes its own: they must not
/// take what the next commit needs, nor what recovery does after a crash.
#[test]
fn files_that_are_synced_together_leave_commits_their_room() {
    let device = short_journal();
    let v = mounted(device.clone()).unwrap();
    let files = written(&v, 40);
    let all: Vec<(InodeNo, bool)> = files.iter().map(|f| (*f, false)).collect();
    v.fsync_files(&all).into_iter().for_each(|r| r.unwrap());
    assert!(v.domains()[0].fast_syncs > 0, "the first ones need no commit");
    holds(&device, &files);
    v.sync().unwrap();
    v.unmount().unwrap();
    holds(&device, &files);
}

/// Mounts that fail when they have written the recovery transaction, and not its commit record, leave its chunks in the
/// journal: they must not fill it.
#[test]
fn recovery_that_is_cut_off_again_and_again_finds_room() {
    let device = short_journal();
    let v = mounted(device.clone()).unwrap();
    let files = written(&v, 40);
    let all: Vec<(InodeNo, bool)> = files[..3].iter().map(|f| (*f, false)).collect();
    v.fsync_files(&all).into_iter().for_each(|r| r.unwrap());
    let d = v.mounted().dom(DomainId(0)).clone();
    let (_, first) = v.mounted().store.place(d.journal.addr(0), d.journal.blocks()).unwrap();
    let journal = first..first + d.journal.blocks();
    drop(d);
    v.crash();
    let mut failed = 0;
    for _ in 0..40 {
        let faulty = Arc::new(FaultDevice::new(device.clone(), 1));
        // its chunks are one write, its commit record is the next
        faulty.add(Rule::new(Op::Write, Effect::Fail(5)).blocks(journal.clone()).skip(1));
        failed += u32::from(mounted(faulty.clone()).is_err() && faulty.fired() > 0);
    }
    assert!(failed >= 20, "{failed} recoveries were cut off");
    holds(&device, &files[..3]);
}

/// A journal that is full to its last block with what fsyncs have made durable: there is no room for the transaction with which
/// recovery ends.
#[test]
fn a_full_journal_is_recovered() {
    let device = short_journal();
    let v = mounted(device.clone()).unwrap();
    let files = written(&v, 40);
    let d = v.mounted().dom(DomainId(0)).clone();
    let one = |ino: &&InodeNo| {
        let c = v.mounted().cell(**ino).unwrap();
        d.sync_beyond_limit(&d.enter_unthrottled().unwrap(), &c)
    };
    let synced = files.iter().take_while(one).count();
    let (used, size) = (v.domains()[0].journal_used, v.domains()[0].journal_blocks);
    assert!(used == size && synced > 20, "{used} of {size} blocks, {synced} files");
    v.crash();
    holds(&device, &files[..synced]);
}
