//! Going into the background: the shell gets its prompt back when the mount can be used, with the right exit status.
//!
//! Must run before the process has threads: only the calling thread survives a fork.

use crate::mount_table::MountId;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::ffi::OsString;
use std::fmt::Display;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

// What a forked process says: any of the first two, then at most one of the others. They stay in the pipe when it is killed.
/// It is about to unmount what a dead server left.
const DETACHING: u8 = b'!';
/// It has mounted; a [`MountId`] and the end of the line follow.
const MOUNTED: u8 = b'*';
const READY: u8 = b'+';
/// The reason follows, as behind the next.
const FAILED: u8 = b'-';
const ENDED: u8 = b'=';
// Once it is ready, to a parent that looks after it; programs of all versions say and understand the first, and pass over lines
// that they do not know.
/// A process that may go on in its place; its number and the end of the line follow.
const HANDING: u8 = b'@';
/// Before that: what program it runs; the path ([`escaped`]) and the end of the line follow.
const PROGRAM: u8 = b'#';
/// Behind that: the one that says so was asked to end meanwhile, which is meant for the other one.
const ASKED_TO_END: u8 = b'~';
/// A pipe takes so much at once or not at all (PIPE_BUF).
const AT_ONCE_BYTES: usize = 4096;

/// Why there is no daemon.
#[derive(Debug, thiserror::Error)]
pub enum DaemonError {
    /// The process has threads already, or cannot fork.
    #[error("cannot go into the background: {0}")]
    Fork(#[from] io::Error),
    /// What the daemon said before it was ready.
    #[error("{0}")]
    Failed(String),
    /// It ended before it was ready, without a word (killed, for instance).
    #[error("the background process died before it was ready")]
    Died,
}

/// Tells the waiting parent that the daemon is ready. Call [`Ready::ready`] once, when the mount can be used.
#[derive(Debug)]
pub struct Ready {
    pipe: Option<File>,
    /// Nobody waits at a pipe: this is called.
    call: Option<fn()>,
    /// The process goes on without the terminal then.
    leaves: bool,
}

impl Ready {
    /// Nobody waits.
    pub(crate) fn silent() -> Self {
        Self { pipe: None, call: None, leaves: false }
    }

    /// For a process in the foreground.
    pub fn calling(call: fn()) -> Self {
        Self { pipe: None, call: Some(call), leaves: false }
    }

    /// Lets the parent exit with success, and leaves terminal and working directory: relative paths end here.
    pub fn ready(&mut self) {
        if let Some(call) = self.call.take() {
            call();
        }
        if let Some(mut pipe) = self.pipe.take() {
            // A parent that is gone no longer cares.
            let _ = pipe.write_all(&[READY]);
            if self.leaves
                && let Err(e) = leave_terminal()
            {
                tracing::warn!(error = %e, "standard streams stay as they are");
            }
        }
    }

    /// The pipe to the parent, for as long as this process and those that go on in its place live.
    pub fn to_parent(&self) -> Option<OwnedFd> {
        self.pipe.as_ref().and_then(|pipe| pipe.try_clone().ok()).map(OwnedFd::from)
    }

    /// Tells the parent that the mount of a dead server goes now, by this process.
    pub fn detaching(&mut self) {
        self.say(&[DETACHING]);
    }

    /// Tells the parent which mount it has made.
    pub fn mounted(&mut self, id: MountId) {
        self.say(format!("{}{id}\n", MOUNTED as char).as_bytes());
    }

    /// Tells the parent that there is nothing to serve any more, as somebody else has unmounted it or mounted over it.
    pub fn ended(&mut self, why: &dyn Display) {
        tracing::info!(reason = %why, "not served again");
        self.say(format!("{}{why}", ENDED as char).as_bytes());
        self.pipe = None;
    }

    /// In a process that another one is forked from, whose own this is not: who waits at the pipe shall not wait for both.
    pub(crate) fn forget(&mut self) {
        (self.pipe, self.call) = (None, None);
    }

    fn say(&mut self, what: &[u8]) {
        if let Some(pipe) = &mut self.pipe {
            // A parent that is gone no longer cares.
            let _ = pipe.write_all(what);
        }
    }

    /// Tells the parent, which tells the user; false where it no longer listens.
    fn failed(&mut self, why: &dyn Display) -> bool {
        let told = self.pipe.take().is_some_and(|mut pipe| write!(pipe, "{}{why}", FAILED as char).is_ok());
        if told {
            tracing::info!(error = %why, "cannot serve");
        }
        told
    }
}

/// Runs `work` in a background process and returns, in the calling one, when that has called [`Ready::ready`] or has
/// failed. The background process never returns: it exits when `work` is done, with status 0 or 1.
///
/// # Errors
/// See [`DaemonError`]; the caller reports it and exits.
pub fn daemonize<E: Display>(work: impl FnOnce(&mut Ready) -> Result<(), E>) -> Result<(), DaemonError> {
    let (pid, pipe) = fork_child(true, work)?;
    parent(pipe, pid)
}

/// Runs `work` in a forked process, which never returns: it exits when `work` is done, with status 0 or 1. In the calling one:
/// its number, and the pipe that it tells by when it is ready ([`parse_report`]).
pub(crate) fn fork_child<E: Display>(
    leaves: bool,
    work: impl FnOnce(&mut Ready) -> Result<(), E>,
) -> io::Result<(libc::pid_t, OwnedFd)> {
    let (theirs, ours) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).map_err(io::Error::from)?;
    match fork_process()? {
        None => {
            drop(theirs);
            std::process::exit(child(ours, leaves, work))
        }
        Some(pid) => {
            drop(ours);
            Ok((pid, theirs))
        }
    }
}

/// The number of the forked process; in that, `None`.
///
/// # Errors
/// The process has threads already, or cannot fork.
pub(crate) fn fork_process() -> io::Result<Option<libc::pid_t>> {
    if threads()? != 1 {
        return Err(io::Error::other("the process has threads already"));
    }
    // SAFETY: the process has just one thread (checked above), so that no lock or half-made state of another thread
    // is copied; parent and child may go on to use all of the library.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(None),
        pid => Ok(Some(pid)),
    }
}

fn child<E: Display>(pipe: OwnedFd, leaves: bool, work: impl FnOnce(&mut Ready) -> Result<(), E>) -> i32 {
    let mut ready = Ready { pipe: Some(pipe.into()), call: None, leaves };
    // A session of its own: signals of the terminal no longer come. Cannot fail in a fresh child.
    let _ = rustix::process::setsid();
    let done = work(&mut ready);
    exit_code(done, &mut ready)
}

fn exit_code<E: Display>(done: Result<(), E>, ready: &mut Ready) -> i32 {
    match done {
        // Where it never was ready, nothing is mounted: the parent finds that out by the end of the pipe.
        Ok(()) => 0,
        Err(e) => {
            if !ready.failed(&e) {
                tracing::error!(error = %e, "ended with an error");
            }
            1
        }
    }
}

fn parent(pipe: OwnedFd, pid: libc::pid_t) -> Result<(), DaemonError> {
    let mut said = Vec::new();
    let mut pipe = File::from(pipe);
    // A message ends when the daemon has ended or closed its end; READY is all at once, as a process that the daemon forked
    // may have that end open for as long as it lives.
    while !matches!(parse_report(&said).told, Some(Told::Ready)) {
        let mut buf = [0; 512];
        match pipe.read(&mut buf)? {
            0 => break,
            n => said.extend_from_slice(&buf[..n]),
        }
    }
    match parse_report(&said).told {
        Some(Told::Ready) => Ok(()),
        Some(Told::Failed(message) | Told::Ended(message)) => {
            reap(pid);
            Err(DaemonError::Failed(message))
        }
        None => {
            reap(pid);
            Err(DaemonError::Died)
        }
    }
}

/// What a forked process said before it closed its pipe.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct ChildReport {
    /// It went about to unmount what a dead server left.
    pub detaching: bool,
    /// The mount that it made last.
    pub mounted: Option<MountId>,
    /// Nothing: it died.
    pub told: Option<Told>,
    /// Behind [`Told::Ready`]: what it said while it served.
    pub later: Vec<u8>,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Told {
    Ready,
    /// Why it cannot serve.
    Failed(String),
    /// Why there is nothing to serve.
    Ended(String),
}

/// Another process, which may go on in the place of the one that says so.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Handing {
    pub pid: i32,
    /// What it runs; earlier programs do not say, nor does one whose path is too long.
    pub program: Option<PathBuf>,
    /// It is to end.
    pub asked_to_end: bool,
}

impl Handing {
    /// As [`handed_to`] reads it.
    pub fn said(&self) -> Vec<u8> {
        let pid = format!("{}{}\n", HANDING as char, self.pid);
        let program = self.program.iter().map(|p| format!("{}{}\n", PROGRAM as char, escaped(p)));
        program.filter(|p| p.len() + pid.len() <= AT_ONCE_BYTES).chain([pid.clone()]).collect::<String>().into_bytes()
    }
}

/// What a process tells that was asked to end while it handed over.
pub(crate) fn asked_to_end() -> Vec<u8> {
    vec![ASKED_TO_END, b'\n']
}

/// Tells a parent, by its pipe, all of it or nothing, without waiting.
///
/// # Errors
/// The parent does not read what it was told before. One that is gone no longer cares.
pub(crate) fn tell_parent(pipe: &OwnedFd, what: &[u8]) -> io::Result<()> {
    rustix::fs::fcntl_setfl(pipe, rustix::fs::OFlags::WRONLY | rustix::fs::OFlags::NONBLOCK)?;
    match rustix::io::write(pipe, what) {
        Err(rustix::io::Errno::PIPE) | Ok(_) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

/// [`tell_parent`] once the parent has read what it was told before, which it does each second: `patience` is longer.
///
/// # Errors
/// As [`tell_parent`], after `patience`.
pub(crate) fn tell_parent_within(pipe: &OwnedFd, what: &[u8], patience: Duration) -> io::Result<()> {
    let end = Instant::now() + patience;
    loop {
        match tell_parent(pipe, what) {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                let left = end.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Err(e);
                }
                let pause = Timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: left.subsec_nanos().into() };
                let _ = poll(&mut [PollFd::new(pipe, PollFlags::OUT)], Some(&pause));
            }
            told => return told,
        }
    }
}

/// The process that goes on in the place of another one, by what that said last about it once it was ready.
pub(crate) fn handed_to(said: &[u8]) -> Option<Handing> {
    let (mut program, mut last) = (None, None);
    for line in said.split(|b| *b == b'\n') {
        match line.split_first() {
            Some((&PROGRAM, path)) => program = unescaped(path),
            Some((&HANDING, pid)) => {
                let pid = std::str::from_utf8(pid).ok().and_then(|p| p.parse().ok());
                let program = program.take();
                last = pid.map(|pid| Handing { pid, program, asked_to_end: false }).or(last);
            }
            Some((&ASKED_TO_END, [])) => {
                if let Some(handing) = &mut last {
                    handing.asked_to_end = true;
                }
            }
            _ => {}
        }
    }
    last
}

/// A path on one line: bytes that are no plain character, and `%`, as `%` and two digits.
pub(crate) fn escaped(path: &Path) -> String {
    let one = |b: &u8| match b {
        b'%' => "%25".into(),
        b' '..=b'~' => char::from(*b).to_string(),
        _ => format!("%{b:02x}"),
    };
    path.as_os_str().as_bytes().iter().map(one).collect()
}

/// [`escaped`] backwards; `None`: it was cut off.
pub(crate) fn unescaped(mut text: &[u8]) -> Option<PathBuf> {
    let mut path = Vec::with_capacity(text.len());
    while let Some((first, rest)) = text.split_first() {
        text = rest;
        path.push(*first);
        if *first == b'%' {
            let (digits, rest) = rest.split_at_checked(2)?;
            *path.last_mut()? = u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
            text = rest;
        }
    }
    (!path.is_empty()).then(|| OsString::from_vec(path).into())
}

/// What is said up to [`Told`]; what follows [`Told::Ready`] stays in [`ChildReport::later`].
pub(crate) fn parse_report(mut said: &[u8]) -> ChildReport {
    let mut all = ChildReport::default();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    while let Some((first, rest)) = said.split_first() {
        said = rest;
        match *first {
            DETACHING => all.detaching = true,
            MOUNTED => {
                let end = rest.iter().position(|b| *b == b'\n').unwrap_or(rest.len());
                all.mounted = text(&rest[..end]).parse().ok();
                said = rest.get(end + 1..).unwrap_or_default();
            }
            READY => {
                (all.told, all.later) = (Some(Told::Ready), rest.to_vec());
                return all;
            }
            FAILED => (all.told, said) = (Some(Told::Failed(text(rest))), &[]),
            ENDED => (all.told, said) = (Some(Told::Ended(text(rest))), &[]),
            _ => return all,
        }
    }
    all
}

/// Waits for a child that is about to end: what it holds (locks, devices) is free when the error is reported.
fn reap(pid: libc::pid_t) {
    if let Some(pid) = rustix::process::Pid::from_raw(pid) {
        let _ = rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty());
    }
}

/// Threads of this process.
fn threads() -> io::Result<usize> {
    Ok(std::fs::read_dir("/proc/self/task")?.count())
}

/// Standard streams to `/dev/null`, so that pipes to the starting program close; and out of the directory it was
/// started from, which must not stay busy. Not earlier: `work` may have been given relative paths.
pub(crate) fn leave_terminal() -> io::Result<()> {
    rustix::process::chdir("/")?;
    let null = File::options().read(true).write(true).open("/dev/null")?;
    rustix::stdio::dup2_stdin(&null)?;
    rustix::stdio::dup2_stdout(&null)?;
    rustix::stdio::dup2_stderr(&null)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_with_threads_is_not_forked() {
        // The test harness has threads.
        let result = daemonize(|_| -> Result<(), String> { unreachable!("must not run") });
        assert!(matches!(result, Err(DaemonError::Fork(_))));
    }

    #[test]
    fn the_parent_understands_what_it_is_told() {
        let told = |bytes: &[u8]| {
            let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
            File::from(write).write_all(bytes).unwrap();
            parent(read, libc::pid_t::MAX)
        };
        assert!(told(b"+").is_ok());
        assert!(matches!(told(b"-no room"), Err(DaemonError::Failed(m)) if m == "no room"));
        assert!(matches!(told(b""), Err(DaemonError::Died)));
        assert!(told(b"*7 30 0 40\n+").is_ok());
    }

    #[test]
    fn what_a_process_said_before_it_was_killed_is_kept() {
        let id: MountId = "7 30 0 40".parse().unwrap();
        let said = |bytes: &[u8]| parse_report(bytes);
        assert_eq!(said(b"!"), ChildReport { detaching: true, ..ChildReport::default() });
        assert_eq!(
            said(b"!*7 30 0 40\n"),
            ChildReport { detaching: true, mounted: Some(id), ..ChildReport::default() }
        );
        assert_eq!(said(b"!-no room!").told, Some(Told::Failed("no room!".into())));
        assert_eq!(said(b"=gone"), ChildReport { told: Some(Told::Ended("gone".into())), ..ChildReport::default() });
        // cut off, or not ours
        for bytes in [&b"*7 3"[..], b"*", b"?", b"\xff+"] {
            assert_eq!(said(bytes), ChildReport::default());
        }
    }

    #[test]
    fn the_last_process_that_may_go_on_is_found() {
        let of = |said: &[u8]| handed_to(said).map(|h| (h.pid, h.program));
        assert_eq!(of(b"@17\n@230\n"), Some((230, None)));
        assert_eq!((of(b""), of(b"+"), of(b"@x\n"), of(b"#/a\n")), (None, None, None, None));
        for path in ["/usr/bin/braidfs", "/a b/100 %", "/new\nline\n@9\n", "/\u{e9}"] {
            let one = Handing { pid: 230, program: Some(path.into()), asked_to_end: false };
            assert_eq!(handed_to(&one.said()), Some(one));
        }
        // of the one that says it last, and not of another one
        assert_eq!(of(b"#/new\n@17\n@18\n"), Some((18, None)));
        assert_eq!(of(b"~ what a later version says\n#/b\n@3\n~\n"), Some((3, Some("/b".into()))));
        let ends = |said: &[u8]| handed_to(said).map(|h| h.asked_to_end);
        assert_eq!((ends(b"@3\n~\n"), ends(b"@3\n~\n@4\n"), ends(b"~\n@3\n")), (Some(true), Some(false), Some(false)));
        // all of it goes into a pipe at once
        let long = Handing { pid: 3, program: Some("/é".repeat(1000).into()), asked_to_end: false };
        assert_eq!(handed_to(&long.said()).map(|h| (h.pid, h.program)), Some((3, None)));
        let bytes = Path::new(std::ffi::OsStr::from_bytes(b"/\xff%"));
        assert_eq!(unescaped(escaped(bytes).as_bytes()).unwrap(), bytes);
        assert_eq!((unescaped(b""), unescaped(b"/a%2"), unescaped(b"/a%zz")), (None, None, None));
    }

    #[test]
    fn a_pipe_that_nobody_reads_is_not_waited_for() {
        let (theirs, ours) = rustix::pipe::pipe().unwrap();
        let line = [b'#'; 4096];
        while tell_parent(&ours, &line).is_ok() {}
        assert_eq!(tell_parent(&ours, b"@3\n").unwrap_err().kind(), io::ErrorKind::WouldBlock);
        let told = tell_parent_within(&ours, b"@3\n", Duration::from_millis(20));
        assert_eq!(told.unwrap_err().kind(), io::ErrorKind::WouldBlock);
        // one that reads late
        let mut theirs = File::from(theirs);
        std::thread::scope(|s| {
            s.spawn(|| {
                std::thread::sleep(Duration::from_millis(50));
                theirs.read_exact(&mut [0; 4096]).unwrap();
            });
            tell_parent_within(&ours, b"@3\n", Duration::from_secs(60)).unwrap();
        });
        drop(theirs);
        assert!(tell_parent(&ours, b"@3\n").is_ok(), "one that is gone does not care");
    }

    /// It was stopped meanwhile, and reads both at once.
    #[test]
    fn what_follows_readiness_is_kept() {
        let report = parse_report(b"*7 30 0 40\n+#/b\n@3\n");
        assert_eq!((report.told, report.mounted.is_some()), (Some(Told::Ready), true));
        assert_eq!(handed_to(&report.later).map(|h| h.pid), Some(3));
    }

    #[test]
    fn work_that_ends_before_it_is_ready_is_no_success() {
        let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        // as the forked process does, whose session is not to be ours
        let mut ready = Ready { pipe: Some(write.into()), call: None, leaves: false };
        assert_eq!(exit_code(Ok::<(), String>(()), &mut ready), 0);
        drop(ready);
        assert!(matches!(parent(read, libc::pid_t::MAX), Err(DaemonError::Died)));
    }
}
