//! Who may write a volume that other machines reach: the lease in its owner record, and the fence before each write. The
//! other machine is this test, which writes its record into the server's disk.

use braidfs::store::lease::Lease;
use braidfs::store::super_io::read_super;
use braidfs::{Cred, Error, MkfsOptions, MountOptions, OpenHow, Volume, mkfs};
use braidfs_device::{BLOCK_BYTES, Device, MemDevice, NbdDevice, NbdUri, boot_time};
use braidfs_format::owner::{GIVEN_BACK, HELD, OwnerRecord};
use braidfs_testkit::nbd::{NbdServer, Offers};
use braidfs_testkit::walk::fsck;
use std::io::{ErrorKind, Write};
use std::path::Path;
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::{Duration, Instant};

const BYTES: u64 = 64 << 20;

fn server() -> (tempfile::TempDir, NbdServer) {
    let dir = tempfile::tempdir().unwrap();
    let server = NbdServer::start(dir.path(), BYTES, Offers::default());
    mkfs::format(&open(&server, "lease=off"), &MkfsOptions::default()).unwrap();
    (dir, server)
}

fn open_uri(uri: &str, write: bool) -> Vec<Arc<dyn Device>> {
    vec![Arc::new(NbdDevice::open(&NbdUri::parse(uri).unwrap(), write).unwrap())]
}

fn open(server: &NbdServer, how: &str) -> Vec<Arc<dyn Device>> {
    open_uri(&server.uri(how), true)
}

/// Does it again where the machine was too busy for a lease: a record whose write took half a second is none.
fn patiently<T>(mut take: impl FnMut() -> Result<T, Error>) -> Result<T, Error> {
    for _ in 0..20 {
        match take() {
            Err(Error::Io(e)) if e.kind() == ErrorKind::TimedOut => {}
            done => return done,
        }
    }
    take()
}

fn mount(server: &NbdServer, how: &str) -> Result<Volume, Error> {
    patiently(|| Volume::mount(open(server, how), MountOptions { background: false, ..MountOptions::default() }))
}

/// The lease of the volume there, and its devices.
fn take(uri: &str) -> (Lease, Vec<Arc<dyn Device>>) {
    let (sb, devices) = read_super(&open_uri(uri, true)).unwrap();
    let lease = patiently(|| Lease::take(&devices, &sb, false).map_err(Error::from)).unwrap().unwrap();
    (lease, devices)
}

/// The place of the owner record, and the volume's number.
fn place(server: &NbdServer) -> (u64, u32) {
    let (sb, _) = read_super(&open_uri(&server.uri(""), false)).unwrap();
    (OwnerRecord::place(&sb, 0).unwrap(), sb.volume_id())
}

/// What another machine would write.
fn foreign(server: &NbdServer, nonce: u8, state: u8, seq: u64) -> Vec<u8> {
    let (at, volume) = place(server);
    let mut r = OwnerRecord::empty();
    (r.nonce, r.state, r.boot) = ([nonce; 16], state, [9; 16]);
    (r.lease_ms, r.io_ms) = (700.into(), 500.into());
    r.pid = 4711.into();
    r.host[..5].copy_from_slice(b"other");
    r.to_block(volume, at, seq)
}

fn record(server: &NbdServer) -> OwnerRecord {
    let (at, volume) = place(server);
    OwnerRecord::from_block(&server.get(at), volume, at).unwrap()
}

fn write_synced(v: &Volume, name: &str, data: &[u8]) -> Result<(), Error> {
    let how = OpenHow { read: true, write: true, create: true, mode: 0o644, ..OpenHow::default() };
    let file = v.open_path(name.as_bytes(), how, &Cred::root())?;
    v.write(&file, 0, data)?;
    v.fsync(file.ino(), false)
}

/// The lease of a device is taken at the mount and kept until the unmount: none comes later, none leaves earlier.
#[test]
fn devices_that_are_elsewhere_neither_come_nor_leave() {
    let (_dir, server) = server();
    let local: Arc<dyn Device> = Arc::new(MemDevice::soiled(BYTES / BLOCK_BYTES as u64));
    mkfs::format(std::slice::from_ref(&local), &MkfsOptions::default()).unwrap();
    let v = Volume::mount(vec![local.clone()], MountOptions::default()).unwrap();
    let Err(Error::Size(why)) = v.add_device(open(&server, "").remove(0), false) else { panic!("it came") };
    assert!(why.contains("elsewhere"), "{why}");
    v.unmount().unwrap();
    let all: Vec<_> = std::iter::once(local).chain(open(&server, "lease=5")).collect();
    mkfs::format(&all, &MkfsOptions::default()).unwrap();
    let v = Volume::mount(all, MountOptions::default()).unwrap();
    let Err(Error::Size(why)) = v.remove_device(1, &|_, _| true) else { panic!("it left") };
    assert!(why.contains("elsewhere"), "{why}");
    v.unmount().unwrap();
}

fn writes(server: &NbdServer) -> usize {
    server.done().iter().filter(|d| matches!(d.what, 'w' | 't')).count()
}

fn wait_for(what: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(120);
    while !condition() {
        assert!(Instant::now() < end, "{what}: not within two minutes");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn of_two_mounts_at_once_one_is_refused() {
    let (_dir, server) = server();
    let first = mount(&server, "lease=5").unwrap();
    let Err(Error::Busy(why)) = mount(&server, "lease=5") else { panic!("mounted twice") };
    assert!(why.contains(&format!("process {} on ", std::process::id())) && why.contains("for 5 s"), "{why}");
    let reader =
        Volume::mount(open_uri(&server.uri(""), false), MountOptions { read_only: true, ..MountOptions::default() });
    assert!(matches!(reader, Err(Error::Busy(_))), "a reader beside a writer");
    write_synced(&first, "a", b"1").unwrap();
    first.unmount().unwrap();
    assert_eq!(record(&server).state, GIVEN_BACK);
    // given back: no waiting
    mount(&server, "timeout=60&lease=60").unwrap().unmount().unwrap();
    fsck(&open_uri(&server.uri(""), false)).unwrap();
}

/// What is given need not be a volume: a part of one, or devices of several. Who is about to write them, as mkfs and fsck are, is
/// refused where one of them is in use.
#[test]
fn a_device_of_a_volume_in_use_is_refused_in_any_company() {
    let dirs: [_; 3] = std::array::from_fn(|_| tempfile::tempdir().unwrap());
    let [a, b, blank] = dirs.each_ref().map(|d| NbdServer::start(d.path(), BYTES, Offers::default()));
    let (_dir, another) = server();
    let all = |servers: &[&NbdServer], how: &str| servers.iter().flat_map(|s| open(s, how)).collect::<Vec<_>>();
    mkfs::format(&all(&[&a, &b], "lease=off"), &MkfsOptions::default()).unwrap();
    let options = || MountOptions { background: false, ..MountOptions::default() };
    let v = patiently(|| Volume::mount(all(&[&a, &b], "lease=60"), options())).unwrap();
    let take =
        |servers: &[&NbdServer]| patiently(|| Lease::of_devices(&all(servers, "lease=60"), false).map_err(Error::from));
    let companies: [&[&NbdServer]; 6] = [&[&a], &[&b], &[&a, &b], &[&blank, &a], &[&b, &blank], &[&another, &b]];
    for (i, servers) in companies.iter().enumerate() {
        assert!(matches!(take(servers), Err(Error::Busy(_))), "{i}");
    }
    assert!(take(&[&blank]).unwrap().is_none(), "nobody can have it");
    v.unmount().unwrap();
    for servers in companies {
        assert!(take(servers).unwrap().is_some());
    }
}

/// All find the record free before the first has written it, again and again.
#[test]
fn of_those_that_race_one_wins() {
    let (_dir, server) = server();
    server.delay_writes(100);
    let (mut rounds, mut tries) = (0, 0);
    while rounds < 3 {
        let taken: Vec<_> = std::thread::scope(|s| {
            let racers: Vec<_> = (0..3)
                .map(|_| {
                    let devices = open(&server, "lease=30");
                    s.spawn(move || {
                        let (sb, devices) = read_super(&devices).unwrap();
                        (Lease::take(&devices, &sb, false).map(Option::unwrap).map_err(Error::from), devices)
                    })
                })
                .collect();
            racers.into_iter().map(|r| r.join().unwrap()).collect()
        });
        let (won, refused): (Vec<_>, Vec<_>) = taken.iter().map(|t| &t.0).partition(|r| r.is_ok());
        // a busy machine may have been too slow for the only one that was left
        let slow = refused.iter().any(|r| matches!(r, Err(Error::Io(e)) if e.kind() == ErrorKind::TimedOut));
        assert!(won.len() == 1 || (won.is_empty() && slow), "{} of 3 have the lease: {refused:?}", won.len());
        rounds += won.len();
        tries += 1;
        assert!(tries < 30, "nobody gets the lease: {refused:?}");
    }
}

#[test]
fn a_holder_that_is_alive_elsewhere_is_left_alone_and_a_dead_one_outlived() {
    let (_dir, server) = server();
    let (at, _) = place(&server);
    let mut renewals = 1;
    let mut renew = |lease_ms: u32| {
        let mut r = OwnerRecord::from_block(&foreign(&server, 7, HELD, renewals), place(&server).1, at).unwrap();
        r.lease_ms = lease_ms.into();
        server.put(at, &r.to_block(place(&server).1, at, renewals));
        renewals += 1;
    };
    // so long a lease that it does not end where this thread has no turn for a while
    renew(60_000);
    let refused = std::thread::scope(|s| {
        let mounting = s.spawn(|| mount(&server, ""));
        while !mounting.is_finished() {
            std::thread::sleep(Duration::from_millis(100));
            renew(60_000);
        }
        mounting.join().unwrap()
    });
    renew(700);
    let Err(Error::Busy(why)) = refused else { panic!("mounted beside another machine") };
    assert!(why.contains("process 4711 on other"), "{why}");
    // it renews no more: after its lease and what it may have in flight
    let start = Instant::now();
    let v = mount(&server, "lease=5").unwrap();
    assert!(start.elapsed() >= Duration::from_millis(1200), "{:?}", start.elapsed());
    v.unmount().unwrap();
}

/// Another machine takes the volume over while this one holds it (its clock runs fast, say): not one more write behind the end
/// of the lease, and an error for who syncs and for who reads what is the other's by then.
#[test]
fn who_loses_the_lease_submits_nothing_more() {
    let (_dir, server) = server();
    let (at, _) = place(&server);
    let devices = open(&server, "lease=2&timeout=4");
    let options = || MountOptions { background: false, ..MountOptions::default() };
    let v = patiently(|| Volume::mount(devices.clone(), options())).unwrap();
    write_synced(&v, "a", b"1").unwrap();
    let mut buf = vec![0; BLOCK_BYTES];
    devices[0].read(0, &mut buf).unwrap();
    server.put(at, &foreign(&server, 7, HELD, 1));
    let end = Instant::now() + Duration::from_secs(2);
    let mut n = 0;
    let failed = loop {
        n += 1;
        // what begins within the lease may be told of later
        let began = Instant::now();
        match write_synced(&v, &format!("b{n}"), b"2") {
            Ok(()) => assert!(began < end, "still writes"),
            Err(e) => break e,
        }
    };
    let before = writes(&server);
    assert!(write_synced(&v, "c", b"3").is_err(), "{failed}");
    let e = devices[0].read(0, &mut buf).unwrap_err().to_string();
    assert!(e.contains("the lease was lost to process 4711 on other"), "{e}");
    assert!(v.unmount().is_err());
    std::thread::sleep(Duration::from_millis(700));
    assert_eq!(writes(&server), before, "writes behind the end of the lease");
    assert_eq!(record(&server).nonce, [7; 16], "the other's record");
}

/// Behind the end of the lease, before it is known whether somebody took the volume, a read waits for that.
#[test]
fn reads_wait_for_a_lease_that_has_ended() {
    let (_dir, server) = server();
    let uri = server.uri("lease=60&timeout=5");
    let (lease, devices) = take(&uri);
    let mut buf = vec![0; BLOCK_BYTES];
    let fence = lease.fence(0).unwrap();
    fence.extend(boot_time());
    let e = devices[0].read(0, &mut buf).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::TimedOut, "{e}");
    fence.extend(boot_time() + Duration::from_secs(60));
    devices[0].read(0, &mut buf).unwrap();
    // who gave it back may look at the device all the same
    drop(lease);
    devices[0].read(0, &mut buf).unwrap();
}

/// The server is away for longer than the lease; a write waits for it meanwhile. Whether another one has the volume by then.
fn away_for_longer_than_the_lease(taken: bool) -> Result<(), Error> {
    let (_dir, server) = server();
    let (at, _) = place(&server);
    let v = mount(&server, "lease=2&timeout=20").unwrap();
    write_synced(&v, "a", b"1").unwrap();
    server.kill();
    let before = writes(&server);
    let synced = std::thread::scope(|s| {
        let writer = s.spawn(|| write_synced(&v, "b", b"2"));
        std::thread::sleep(Duration::from_millis(2500));
        if taken {
            server.put(at, &in_the_place_of(&server.get(at), at));
        }
        server.restart();
        writer.join().unwrap()
    });
    if taken {
        assert_eq!(writes(&server), before, "writes to another's volume");
    } else if synced.is_ok() {
        v.unmount().unwrap();
        fsck(&open_uri(&server.uri(""), false)).unwrap();
    }
    synced
}

/// Nobody took it: it goes on. Somebody did: nothing that waited is written.
#[test]
fn a_lease_that_ended_while_the_server_was_away() {
    away_for_longer_than_the_lease(true).unwrap_err();
    // a busy machine may be too slow for the look at the record and its renewal: once it is not
    for tries in 1.. {
        match away_for_longer_than_the_lease(false) {
            Ok(()) => break,
            Err(e) => assert!(e.to_string().contains("the lease had ended before") && tries < 20, "{e}"),
        }
    }
}

/// A device that has failed says so at once, also behind the end of its lease, which nobody renews any more.
#[test]
fn nobody_waits_for_the_lease_of_a_device_that_has_failed() {
    let (_dir, server) = server();
    let (lease, devices) = take(&server.uri("lease=2&timeout=3"));
    server.stop();
    devices[0].flush().unwrap_err();
    wait_for("the end of the lease", || !lease.fence(0).unwrap().is_open());
    let at = devices[0].blocks() - 2;
    let e = devices[0].read(at, &mut [0; BLOCK_BYTES]).unwrap_err().to_string();
    assert!(e.contains("no connection within 3 s"), "{e}");
    let e = devices[0].write(at, &[1; BLOCK_BYTES]).unwrap_err().to_string();
    assert!(e.contains("no connection within 3 s"), "{e}");
}

/// The server is away, or hangs, for longer than the lease lasts and a request may take, while nobody uses the volume: only its
/// lease is to be renewed. Then it is there again.
fn away_from_a_volume_that_rests(hangs: bool) -> Result<(), Error> {
    let (_dir, server) = server();
    let v = mount(&server, "lease=2&timeout=6").unwrap();
    write_synced(&v, "a", b"1").unwrap();
    if hangs {
        server.hang(true)
    } else {
        server.stop()
    }
    std::thread::sleep(Duration::from_secs(9));
    if hangs {
        server.hang(false)
    } else {
        server.restart()
    }
    write_synced(&v, "b", b"2")?;
    v.unmount().unwrap();
    fsck(&open_uri(&server.uri(""), false)).unwrap();
    Ok(())
}

#[test]
fn a_volume_that_rests_outlives_its_server() {
    for hangs in [false, true] {
        for tries in 1.. {
            match away_from_a_volume_that_rests(hangs) {
                Ok(()) => break,
                // as above
                Err(e) => assert!(e.to_string().contains("the lease had ended before") && tries < 20, "{hangs}: {e}"),
            }
        }
    }
}

/// Not so where somebody uses it.
#[test]
fn who_waits_for_a_lease_of_a_server_that_is_away_has_the_device_fail() {
    let (_dir, server) = server();
    let (lease, devices) = take(&server.uri("lease=2&timeout=3"));
    server.stop();
    wait_for("the end of the lease", || !lease.fence(0).unwrap().is_open());
    let at = devices[0].blocks() - 2;
    devices[0].write(at, &[1; BLOCK_BYTES]).unwrap_err();
    server.restart();
    let e = devices[0].read(at, &mut [0; BLOCK_BYTES]).unwrap_err().to_string();
    assert!(e.contains("no answer within 3 s"), "{e}");
    assert!(devices[0].flush().is_err());
}

/// A record of another one in the place of `old`, of a server that is away.
fn in_the_place_of(old: &[u8], at: u64) -> Vec<u8> {
    let mut r = OwnerRecord::empty();
    (r.nonce, r.state) = ([7; 16], HELD);
    r.to_block(u32::from_le_bytes([old[12], old[13], old[14], old[15]]), at, 1)
}

/// For [`stopped_between_check_and_submission`]: takes the lease, and stops itself between the look at the clock and the write.
#[test]
#[ignore = "a part of stopped_between_check_and_submission"]
fn child_that_stops() {
    let Ok(uri) = std::env::var("BRAIDFS_TEST_URI") else { return };
    let (lease, devices) = take(&uri);
    if std::env::var_os("BRAIDFS_TEST_KILLED").is_some() {
        lease.kill_when_stopped().unwrap();
    }
    let go_on = std::path::PathBuf::from(std::env::var_os("BRAIDFS_TEST_DIR").unwrap()).join("go-on");
    let stop = move || {
        let me = rustix::process::getpid();
        rustix::process::kill_process(me, rustix::process::Signal::STOP).unwrap();
        // any thread may have taken the signal: this one goes on when it is told to, and not because it has not stopped yet
        wait_for("the word to go on", || go_on.exists());
    };
    lease.fence(0).unwrap().set_hook(Box::new(stop));
    // into a block that the volume does not use
    let at = devices[0].blocks() - 2;
    devices[0].write(at, &[0xaa; BLOCK_BYTES]).unwrap();
    std::io::stdout().flush().unwrap();
}

struct Stopped(Child);

impl Stopped {
    fn start(server: &NbdServer, dir: &Path, killed: bool) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "child_that_stops", "--ignored"]).stdout(std::process::Stdio::null());
        command.env("BRAIDFS_TEST_URI", server.uri("lease=2&timeout=2&connections=1")).env("BRAIDFS_TEST_DIR", dir);
        if killed {
            command.env("BRAIDFS_TEST_KILLED", "1");
        }
        Self(command.spawn().unwrap())
    }

    fn state(&self) -> Option<char> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.0.id())).ok()?;
        stat.rsplit_once(')')?.1.trim_start().chars().next()
    }

    fn go_on(&self, dir: &Path) {
        std::fs::write(dir.join("go-on"), "").unwrap();
        let pid = rustix::process::Pid::from_child(&self.0);
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::CONT);
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn stopped_between_check_and_submission() {
    use std::os::unix::process::ExitStatusExt;
    for killed in [true, false] {
        let (dir, server) = server();
        let (at, _) = place(&server);
        let last = BYTES / BLOCK_BYTES as u64 - 2;
        let wrote = || server.get(last)[0] == 0xaa;
        let mut child = Stopped::start(&server, dir.path(), killed);
        wait_for("the child takes the lease", || server.get(at)[..4] == *b"BRFS");
        if killed {
            // by the kernel, at the end of the lease, though it is stopped
            let mut status = None;
            wait_for("the child's end", || {
                status = child.0.try_wait().unwrap();
                status.is_some()
            });
            assert_eq!(status.unwrap().signal(), Some(9));
        } else {
            wait_for("the child stops", || child.state() == Some('T'));
            // as long as it takes until another machine may have the volume
            std::thread::sleep(Duration::from_millis(4500));
        }
        server.put(at, &foreign(&server, 7, HELD, 1));
        assert!(!wrote());
        child.go_on(dir.path());
        if killed {
            std::thread::sleep(Duration::from_millis(300));
            assert!(!wrote(), "a write behind the take-over");
        } else {
            // what docs/remote.md says of programs that do not have themselves killed: the limit, not a wish
            wait_for("the write that was between check and submission", wrote);
        }
        assert_eq!(record(&server).nonce, [7; 16]);
    }
}

/// For [`stopped_while_it_recovers`]: mounts the volume.
#[test]
#[ignore = "a part of stopped_while_it_recovers"]
fn child_that_recovers() {
    let Ok(uri) = std::env::var("BRAIDFS_TEST_URI") else { return };
    let how = || MountOptions { background: false, kill_when_stopped: true, ..MountOptions::default() };
    drop(patiently(|| Volume::mount(open_uri(&uri, true), how())));
}

/// A process that is stopped while it recovers a volume ends with its lease, as one that has mounted it.
#[test]
fn stopped_while_it_recovers() {
    use std::os::unix::process::ExitStatusExt;
    let (_dir, server) = server();
    let (at, _) = place(&server);
    let v = mount(&server, "lease=off").unwrap();
    write_synced(&v, "a", b"1").unwrap();
    v.crash();
    // one write after the other, and none too slow for a lease
    server.delay_writes(150);
    let recovers = |from: usize| server.done()[from..].iter().any(|d| d.what == 'w' && d.block != at);
    let before = server.done().len();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "child_that_recovers", "--ignored"]).stdout(std::process::Stdio::null());
    command.env("BRAIDFS_TEST_URI", server.uri("lease=2&timeout=2"));
    let mut child = Stopped(command.spawn().unwrap());
    wait_for("the child recovers", || recovers(before));
    rustix::process::kill_process(rustix::process::Pid::from_child(&child.0), rustix::process::Signal::STOP).unwrap();
    let mut status = None;
    wait_for("the child's end", || {
        status = child.0.try_wait().unwrap();
        status.is_some()
    });
    assert_eq!(status.unwrap().signal(), Some(9));
    let before = server.done().len();
    std::thread::sleep(Duration::from_millis(300));
    assert!(!recovers(before), "writes behind the end of the lease");
}

/// For [`a_server_that_is_away_at_the_end_kills_nobody`]: takes the lease, and ends it when it is told to.
#[test]
#[ignore = "a part of a_server_that_is_away_at_the_end_kills_nobody"]
fn child_that_ends() {
    let (Ok(uri), Ok(dir)) = (std::env::var("BRAIDFS_TEST_URI"), std::env::var("BRAIDFS_TEST_DIR")) else { return };
    let dir = Path::new(&dir);
    let (lease, _devices) = take(&uri);
    lease.kill_when_stopped().unwrap();
    std::fs::write(dir.join("ready"), "").unwrap();
    wait_for("the word to end", || dir.join("end").exists());
    drop(lease);
}

/// All is written, and the lease cannot be given back: it ends by itself, and the process goes on behind it.
#[test]
fn a_server_that_is_away_at_the_end_kills_nobody() {
    let (dir, server) = server();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "child_that_ends", "--ignored"]).stdout(std::process::Stdio::null());
    // who is not scheduled for as long as its lease is killed, and rightly
    command.env("BRAIDFS_TEST_URI", server.uri("lease=5&timeout=4")).env("BRAIDFS_TEST_DIR", dir.path());
    let mut child = Stopped(command.spawn().unwrap());
    wait_for("the child takes the lease", || dir.path().join("ready").exists());
    server.hang(true);
    std::fs::write(dir.path().join("end"), "").unwrap();
    let mut status = None;
    wait_for("the child's end", || {
        status = child.0.try_wait().unwrap();
        status.is_some()
    });
    assert!(status.unwrap().success(), "{status:?}");
}
