//! The parent of a serving process goes on as the program that serves now, after an upgrade.
//!
//! It executes that program in its own place ([`execv`](libc::execv)), so that it keeps its number (a service manager knows it
//! by that), its child, its pipe, signals that wait, and that it is a subreaper. What it knows goes along in a file in memory
//! ([`Record`]). What has executed another program cannot go back, so that program is asked first, in a process of its own,
//! whether it can do this ([`Greeting`]); where it cannot, this one stays what it is.
//!
//! The record has a version, which rises when a field comes or means something else; fields that are not known are refused. The
//! newest one that both programs know is written. Low-level module: `execv`, descriptors by their numbers.

use super::{Child, HeldSignals, History, Limit};
use crate::daemon::escaped;
use crate::mount_table::MountId;
use crate::upgrade::at_step;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::MemfdFlags;
use rustix::io::{Errno, FdFlags, fcntl_setfd};
use rustix::process::Pid;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::ffi::{CString, OsStr, OsString};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The versions of the record that this program reads and writes.
const OLDEST: u32 = 1;
const NEWEST: u32 = 1;
/// How long the other program has to say which ones it knows.
const GREETING: Duration = Duration::from_secs(10);
/// More than a record of any version has.
const RECORD_BYTES: u64 = 1 << 20;

/// How another program is called that is to look after the mount.
pub trait Successor {
    /// With these arguments it prints [`greeting`] and ends, and does nothing else.
    fn asked(&self) -> Vec<OsString>;
    /// With these it goes on by [`super::look_after`], with the record behind this descriptor.
    fn called(&self, record: RawFd) -> Vec<OsString>;
}

/// What a program says that is asked whether it can look after a mount: a line of words. It must never change.
#[derive(Debug, PartialEq, Eq)]
struct Greeting {
    oldest: u32,
    newest: u32,
}

/// The line of this program.
pub fn greeting() -> String {
    format!("looks-after-mounts {OLDEST} {NEWEST} {}", env!("CARGO_PKG_VERSION"))
}

impl Greeting {
    fn find(said: &str) -> Option<Self> {
        said.lines().find_map(|line| {
            let mut words = line.strip_prefix("looks-after-mounts ")?.split(' ').map(|n| n.parse().ok());
            Some(Self { oldest: words.next()??, newest: words.next()?? })
        })
    }

    /// The newest version that both know.
    fn common(&self) -> Option<u32> {
        let version = self.newest.min(NEWEST);
        (version >= self.oldest.max(OLDEST)).then_some(version)
    }
}

/// All that a parent knows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Record {
    version: u32,
    /// Of the program that wrote it.
    program: String,
    /// The process that serves, or has just ended.
    pid: i32,
    /// Descriptor of the pipe from it.
    pipe: RawFd,
    /// [`MountId`] as text.
    mount: Option<String>,
    /// How long it has served, and those before it in whose place it came.
    served_ms: u64,
    /// How long this parent has looked after the mount, and when since its begin processes have ended.
    watched_ms: u64,
    ends_ms: Vec<u64>,
    failed_starts: u32,
    wait_ms: u64,
    /// Signals that were blocked before those that wait for the parent: bit n - 1 is signal n.
    blocked: u64,
    /// The caller's.
    note: String,
}

/// What is looked after.
pub(super) struct State<'a> {
    pub signals: &'a HeldSignals,
    pub history: &'a History,
    pub begun: Instant,
    pub mounted: Option<MountId>,
    pub since: Instant,
    pub note: &'a str,
}

/// What a parent before this one knew.
#[derive(Debug)]
pub struct Looked {
    pub(super) child: Child,
    pub(super) mounted: Option<MountId>,
    pub(super) since: Instant,
    pub(super) begun: Instant,
    ends: VecDeque<Duration>,
    failed_starts: u32,
    wait: Duration,
    pub(super) blocked: u64,
    /// What the caller of that one had to say.
    pub note: String,
    /// Of the program before.
    pub version: String,
}

impl Looked {
    /// Takes the record behind the descriptor with this number, and those that it names. Once.
    ///
    /// # Errors
    /// It is none, or of a version that is not known.
    pub fn take(record: RawFd) -> io::Result<Self> {
        let invalid = |why: String| io::Error::new(io::ErrorKind::InvalidData, why);
        let file = File::from(inherited(record)?);
        let bytes = file.metadata()?.len();
        if bytes > RECORD_BYTES {
            return Err(invalid("not what a parent leaves: too large".into()));
        }
        let mut text = vec![0; bytes as usize];
        file.read_exact_at(&mut text, 0)?;
        let read: Record =
            serde_json::from_slice(&text).map_err(|e| invalid(format!("not what a parent leaves: {e}")))?;
        if !(OLDEST..=NEWEST).contains(&read.version) {
            return Err(invalid(format!("knows versions {OLDEST} to {NEWEST}, this is {}", read.version)));
        }
        let Record { program, pid, pipe, mount, served_ms, watched_ms, ends_ms, failed_starts, wait_ms, .. } = read;
        let pid = Pid::from_raw(pid).ok_or_else(|| invalid("it names no process".into()))?;
        let (now, ms) = (Instant::now(), Duration::from_millis);
        let before = |ms: u64| now.checked_sub(Duration::from_millis(ms)).unwrap_or(now);
        Ok(Self {
            child: Child::of(pid, inherited(pipe)?.into()),
            mounted: mount.and_then(|id| id.parse().ok()),
            since: before(served_ms),
            begun: before(watched_ms),
            ends: ends_ms.into_iter().map(ms).collect(),
            failed_starts,
            wait: ms(wait_ms),
            blocked: read.blocked,
            note: read.note,
            version: program,
        })
    }

    pub(super) fn history(&self, limit: Limit) -> History {
        let (ends, failed_starts, wait) = (self.ends.clone(), self.failed_starts, self.wait);
        History { limit, ends, failed_starts, wait }
    }
}

/// A descriptor that was left open for this program.
fn inherited(number: RawFd) -> io::Result<OwnedFd> {
    if number <= 2 {
        return Err(Errno::BADF.into());
    }
    // SAFETY: only borrowed for the call; one that is not open is an error.
    fcntl_setfd(unsafe { BorrowedFd::borrow_raw(number) }, FdFlags::CLOEXEC)?;
    // SAFETY: it is open, and nothing else in this process knows it: it was passed to this program by its number, which names
    // it once.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Goes on as `program`: does not return then.
///
/// # Errors
/// Why this one goes on. Where `stopping` is set, it was asked to end meanwhile.
pub(super) fn go_on_as(
    program: &Path,
    how: &dyn Successor,
    child: &Child,
    state: &State<'_>,
    stopping: &mut bool,
) -> Result<std::convert::Infallible, String> {
    at_step("parent-asks")?;
    let version = ask(program, how, child, state.signals, stopping)?;
    let record = record_of(version, child, state);
    let text = |e: io::Error| e.to_string();
    let mut file =
        File::from(rustix::fs::memfd_create("braidfs-parent", MemfdFlags::CLOEXEC).map_err(|e| text(e.into()))?);
    file.write_all(&serde_json::to_vec(&record).map_err(|e| e.to_string())?).map_err(text)?;
    at_step("parent-executes")?;
    let kept = [file.as_fd(), child.pipe.as_fd()];
    let set = |flags| kept.iter().try_for_each(|fd| fcntl_setfd(fd, flags).map_err(io::Error::from));
    let failed = set(FdFlags::empty()).and_then(|()| execute(program, &how.called(file.as_raw_fd())));
    // still here
    let _ = set(FdFlags::CLOEXEC);
    failed.map_err(|e| format!("cannot be executed: {e}"))
}

fn record_of(version: u32, child: &Child, state: &State<'_>) -> Record {
    let ms = |d: Duration| u64::try_from(d.as_millis()).unwrap_or(u64::MAX);
    let History { ends, failed_starts, wait, .. } = state.history;
    Record {
        version,
        program: env!("CARGO_PKG_VERSION").into(),
        pid: child.pid.as_raw_pid(),
        pipe: child.pipe.as_raw_fd(),
        mount: state.mounted.map(|id| id.to_string()),
        served_ms: ms(state.since.elapsed()),
        watched_ms: ms(state.begun.elapsed()),
        ends_ms: ends.iter().map(|end| ms(*end)).collect(),
        failed_starts: *failed_starts,
        wait_ms: ms(*wait),
        blocked: state.signals.blocked_before(),
        note: state.note.into(),
    }
}

/// Which version of the record the program takes, by its own word.
fn ask(
    program: &Path,
    how: &dyn Successor,
    child: &Child,
    signals: &HeldSignals,
    stopping: &mut bool,
) -> Result<u32, String> {
    let text = |e: io::Error| format!("cannot be started: {e}");
    let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).map_err(|e| text(e.into()))?;
    let mut asked = Command::new(program);
    let errors = write.try_clone().map_err(text)?;
    asked.args(how.asked()).stdin(Stdio::null()).stdout(Stdio::from(write)).stderr(Stdio::from(errors));
    let mut other = asked.spawn().map_err(text)?;
    // with its ends of the pipe
    drop(asked);
    let said = listen(read, GREETING, || child.take_signal(signals, Duration::ZERO, stopping).map(|()| *stopping));
    // It has said all that it will.
    let _ = other.kill();
    let status = other.wait().map_err(|e| e.to_string())?;
    let said = said.map_err(|e| format!("does not say that it can: {e}"))?;
    if *stopping {
        return Err("this process was asked to end".into());
    }
    let Some(greeting) = Greeting::find(&said) else {
        let unknown = how.asked().last().is_some_and(|option| said.contains(&*option.to_string_lossy()));
        if unknown {
            return Err("is of a version that cannot".into());
        }
        let line = said.lines().map(str::trim).find(|l| !l.is_empty()).unwrap_or("no word");
        return Err(format!("does not say that it can: {line} ({status})"));
    };
    let Greeting { oldest, newest } = greeting;
    greeting.common().ok_or_else(|| {
        format!("takes what a parent knows in versions {oldest} to {newest}, this one tells it in {OLDEST} to {NEWEST}")
    })
}

/// All that comes, until the other end is closed, or `ends` says so.
///
/// # Errors
/// It is not closed for longer than `patience`.
fn listen(pipe: OwnedFd, patience: Duration, mut ends: impl FnMut() -> io::Result<bool>) -> io::Result<String> {
    let (mut pipe, until, mut said) = (File::from(pipe), Instant::now() + patience, Vec::new());
    let mut buf = [0; 4096];
    while !ends()? && said.len() < 1 << 16 {
        if Instant::now() >= until {
            return Err(io::Error::other(format!("it did not end for {} s", patience.as_secs())));
        }
        let pause = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
        match poll(&mut [PollFd::new(&pipe, PollFlags::IN)], Some(&pause)) {
            Ok(0) | Err(Errno::INTR) => continue,
            Ok(_) => {}
            Err(e) => return Err(e.into()),
        }
        match pipe.read(&mut buf)? {
            0 => break,
            n => said.extend_from_slice(&buf[..n]),
        }
    }
    Ok(String::from_utf8_lossy(&said).into_owned())
}

/// Returns only where it fails. As it stands, and not by [`std::os::unix::process::CommandExt::exec`], which changes what
/// happens on SIGPIPE also where it fails.
fn execute(program: &Path, arguments: &[OsString]) -> io::Result<std::convert::Infallible> {
    let text = |s: &OsStr| CString::new(s.as_bytes()).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput));
    let path = text(program.as_os_str())?;
    let arguments: Vec<CString> = arguments.iter().map(|a| text(a)).collect::<io::Result<_>>()?;
    let all: Vec<*const libc::c_char> =
        std::iter::once(&path).chain(&arguments).map(|a| a.as_ptr()).chain([std::ptr::null()]).collect();
    // SAFETY: both are C strings, the list ends with a null pointer, and all lives until the call returns, where it does.
    unsafe { libc::execv(path.as_ptr(), all.as_ptr()) };
    Err(io::Error::last_os_error())
}

/// What the process with this number runs, where nobody has told.
pub(super) fn program_of(pid: Pid) -> Option<PathBuf> {
    let path = std::fs::read_link(format!("/proc/{}/exe", pid.as_raw_pid())).ok()?;
    // replaced or removed meanwhile
    (!path.as_os_str().as_bytes().ends_with(b" (deleted)")).then_some(path)
}

pub(super) fn show(program: Option<&Path>) -> String {
    program.map_or_else(|| "its program, which is not known".into(), escaped)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_say_which_records_they_know() {
        let of = |said: &str| Greeting::find(said).map(|g| (g.oldest, g.newest));
        assert_eq!(of(&greeting()), Some((OLDEST, NEWEST)));
        assert_eq!(of("a warning\nlooks-after-mounts 2 7 9.9 and more\n"), Some((2, 7)));
        for none in [
            "",
            "looks-after-mounts",
            "looks-after-mounts 1",
            "error: looks-after-mounts 1 1",
            "looks-after-mounts a b",
        ] {
            assert_eq!(of(none), None, "{none}");
        }
        let common = |oldest, newest| Greeting { oldest, newest }.common();
        assert_eq!(
            (common(1, 1), common(1, 99), common(NEWEST + 1, 99), common(0, 0)),
            (Some(1), Some(NEWEST), None, None)
        );
    }

    #[test]
    fn a_program_that_says_nothing_is_not_waited_for_for_ever() {
        let pipe = || rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        let (read, write) = pipe();
        let late = listen(read, Duration::from_millis(30), || Ok(false)).unwrap_err();
        assert!(late.to_string().contains("did not end"), "{late}");
        drop(write);
        let (read, write) = pipe();
        rustix::io::write(&write, b"a word").unwrap();
        assert_eq!(listen(read, Duration::from_secs(100), || Ok(true)).unwrap(), "", "asked to end");
        let (read, other) = pipe();
        rustix::io::write(&other, b"a word").unwrap();
        drop(other);
        assert_eq!(listen(read, Duration::from_secs(100), || Ok(false)).unwrap(), "a word");
    }

    fn record() -> Record {
        Record {
            version: 1,
            program: "0.1.0".into(),
            pid: 17,
            pipe: 5,
            mount: Some("1 2 3 4".into()),
            served_ms: 1500,
            watched_ms: 60_000,
            ends_ms: vec![1000, 58_500],
            failed_starts: 1,
            wait_ms: 200,
            blocked: 1 << 9,
            note: "a \"b\"".into(),
        }
    }

    /// Programs of this version read it so for ever.
    #[test]
    fn the_record_of_the_first_version_keeps_its_form() {
        let text = r#"{"version":1,"program":"0.1.0","pid":17,"pipe":5,"mount":"1 2 3 4","served_ms":1500,"watched_ms":60000,"ends_ms":[1000,58500],"failed_starts":1,"wait_ms":200,"blocked":512,"note":"a \"b\""}"#;
        assert_eq!(serde_json::to_string(&record()).unwrap(), text);
        assert_eq!(serde_json::from_str::<Record>(text).unwrap(), record());
        assert!(serde_json::from_str::<Record>(&text.replace("}", r#","later":1}"#)).is_err());
    }

    fn take(record: &Record) -> io::Result<Looked> {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&serde_json::to_vec(record).unwrap()).unwrap();
        let number = OwnedFd::from(file);
        Looked::take(std::os::fd::IntoRawFd::into_raw_fd(number))
    }

    #[test]
    fn what_a_parent_knew_the_next_one_knows() {
        let (read, write) = rustix::pipe::pipe().unwrap();
        let pipe = std::os::fd::IntoRawFd::into_raw_fd(read);
        let looked = take(&Record { pipe, ..record() }).unwrap();
        assert_eq!((looked.child.pid.as_raw_pid(), looked.blocked, &*looked.note), (17, 1 << 9, "a \"b\""));
        assert_eq!(looked.mounted, "1 2 3 4".parse().ok());
        assert!(
            looked.since.elapsed() >= Duration::from_millis(1500) && looked.since.elapsed() < Duration::from_secs(50)
        );
        // the second end was 1.5 s ago: one more within the time is too many
        let limit = Limit { times: 2, within: Duration::from_secs(30) };
        let mut history = looked.history(limit);
        assert!(history.ended(looked.begun.elapsed(), Some(Duration::ZERO)).is_ok(), "the first is forgotten");
        assert!(history.ended(looked.begun.elapsed(), Some(Duration::ZERO)).unwrap_err().contains("more than 2 times"));
        drop(write);
    }

    #[test]
    fn what_no_parent_left_is_refused() {
        for wrong in [
            Record { version: NEWEST + 1, ..record() },
            Record { version: 0, ..record() },
            Record { pid: 0, ..record() },
            Record { pipe: 0, ..record() },
            Record { pipe: 100_000, ..record() },
        ] {
            assert!(take(&wrong).is_err(), "{wrong:?}");
        }
        assert!(Looked::take(1).is_err() && Looked::take(-1).is_err() && Looked::take(100_000).is_err());
    }
}
