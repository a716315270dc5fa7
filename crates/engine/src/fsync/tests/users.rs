//! Code of users' that is told of a sync, and waits for another one, or for who waits for one.

use super::with_unsynced;
use crate::fsync::ticket::Pool;
use crate::{InodeNo, Volume};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Barrier, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

const LONG: Duration = Duration::from_secs(60);

/// Those who are told of the fsyncs of one group wait for each other.
#[test]
fn who_is_told_of_a_sync_may_wait_for_another_one_of_its_group() {
    let (v, _, files) = with_unsynced(8);
    let i = v.mounted().clone();
    i.syncing.queues[0].lock().served = true;
    let (all, (tell, done)) = (Arc::new(Barrier::new(files.len())), channel());
    for file in &files {
        let (all, tell) = (all.clone(), tell.clone());
        v.fsync_start(*file, false).on_done(Box::new(move |r| {
            all.wait();
            tell.send(r.is_ok()).unwrap();
        }));
    }
    i.clone().run_beside(move || i.serve_syncs(0));
    for _ in &files {
        assert!(done.recv_timeout(LONG).expect("they wait for ever"));
    }
}

/// Starts an fsync of which `f` is told on a thread of the volume.
fn told(v: &Volume, file: InodeNo, f: impl FnOnce() + Send + 'static) {
    let i = v.mounted().clone();
    // nobody takes it before it is known who is told
    i.syncing.queues[0].lock().served = true;
    v.fsync_start(file, false).on_done(Box::new(move |_| f()));
    i.clone().run_beside(move || i.serve_syncs(0));
}

/// Says how an fsync went that another thread waits for.
fn waits(v: &Arc<Volume>, file: InodeNo, tell: Sender<bool>) {
    let v = v.clone();
    thread::spawn(move || tell.send(v.fsync_start(file, false).wait().is_ok()));
}

#[test]
fn who_is_told_of_a_sync_may_wait_for_another_one() {
    let (v, _, files) = with_unsynced(2);
    let (v, (tell, done)) = (Arc::new(v), channel());
    let (of_user, second) = (v.clone(), files[1]);
    told(&v, files[0], move || tell.send(of_user.fsync_start(second, false).wait().is_ok()).unwrap());
    assert!(done.recv_timeout(LONG).expect("the second fsync is never done"));
}

/// More of them wait than the volume has threads for syncs.
#[test]
fn who_is_told_of_a_sync_may_want_a_lock_of_who_waits_for_one() {
    let (v, _, files) = with_unsynced(21);
    let (v, lock) = (Arc::new(v), Arc::new(Mutex::new(())));
    let held = lock.lock().unwrap();
    let ((begin, begun), (tell, done)) = (channel(), channel());
    for file in &files[..20] {
        let (lock, begin) = (lock.clone(), begin.clone());
        told(&v, *file, move || {
            begin.send(()).unwrap();
            drop(lock.lock().unwrap_or_else(PoisonError::into_inner));
        });
        begun.recv_timeout(LONG).expect("an fsync is never done");
    }
    waits(&v, files[20], tell);
    assert!(done.recv_timeout(LONG).expect("the last fsync is never done"));
    drop(held);
}

/// It ends while a thread of its own runs code of a user's, which starts a sync then.
#[test]
fn a_volume_is_killed_while_who_is_told_starts_a_sync() {
    let (v, _, files) = with_unsynced(2);
    let (v, (begin, begun), (tell, done)) = (Arc::new(v), channel(), channel());
    let (of_user, second, tell_first) = (v.clone(), files[1], tell.clone());
    told(&v, files[0], move || {
        begin.send(()).unwrap();
        while of_user.write(&of_user.open(second).unwrap(), 0, b"alive").is_ok() {
            thread::sleep(Duration::from_millis(1));
        }
        // until it waits for this thread
        thread::sleep(Duration::from_millis(300));
        let _ = of_user.fsync_start(second, false).wait();
        let _ = of_user.sync_start().wait();
        tell_first.send(()).unwrap();
    });
    begun.recv_timeout(LONG).expect("an fsync is never done");
    let killed = v.clone();
    thread::spawn(move || {
        killed.kill();
        tell.send(()).unwrap();
    });
    for _ in 0..2 {
        done.recv_timeout(LONG).expect("they wait for each other");
    }
}

/// All is done by who asks for it.
#[test]
fn who_is_told_may_wait_where_no_thread_can_be_started() {
    let (v, _, files) = with_unsynced(3);
    let none = Pool::of("none", 8, false, |_, _| Err(std::io::Error::other("no more threads")));
    let before = v.mounted().pool.write().replace(none);
    drop(before);
    let (v, (tell, done)) = (Arc::new(v), channel());
    let (of_user, others) = (v.clone(), [files[1], files[2]]);
    let all = v.clone();
    let first = files[0];
    thread::spawn(move || {
        told(&all, first, move || {
            let of_others = others.map(|f| of_user.fsync_start(f, false));
            assert!(of_others.into_iter().all(|t| t.wait().is_ok()) && of_user.sync_start().wait().is_ok());
            tell.send(()).unwrap();
        });
    });
    done.recv_timeout(LONG).expect("it is never told");
}
