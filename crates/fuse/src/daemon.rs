//! Going into the background: the shell gets its prompt back when the mount can be used, with the right exit status.
//!
//! Must run before the process has threads: only the calling thread survives a fork.

use std::fmt::Display;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;

const READY: u8 = b'+';
const FAILED: u8 = b'-';

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
    /// The process goes on without the terminal then.
    leaves: bool,
}

impl Ready {
    /// Lets the parent exit with success, and leaves terminal and working directory: relative paths end here.
    pub fn ready(&mut self) {
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
/// its number, and the pipe that it tells by when it is ready ([`understand`]).
pub(crate) fn fork_child<E: Display>(
    leaves: bool,
    work: impl FnOnce(&mut Ready) -> Result<(), E>,
) -> io::Result<(libc::pid_t, OwnedFd)> {
    if threads()? != 1 {
        return Err(io::Error::other("the process has threads already"));
    }
    let (theirs, ours) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).map_err(io::Error::from)?;
    // SAFETY: the process has just one thread (checked above), so that no lock or half-made state of another thread
    // is copied; parent and child may go on to use all of the library.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            drop(theirs);
            std::process::exit(child(ours, leaves, work))
        }
        pid => {
            drop(ours);
            Ok((pid, theirs))
        }
    }
}

fn child<E: Display>(pipe: OwnedFd, leaves: bool, work: impl FnOnce(&mut Ready) -> Result<(), E>) -> i32 {
    let mut ready = Ready { pipe: Some(pipe.into()), leaves };
    // A session of its own: signals of the terminal no longer come. Cannot fail in a fresh child.
    let _ = rustix::process::setsid();
    match work(&mut ready) {
        Ok(()) => {
            // Work that ended well without being ready has nothing more to wait for.
            ready.ready();
            0
        }
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
    while said.first() != Some(&READY) {
        let mut buf = [0; 512];
        match pipe.read(&mut buf)? {
            0 => break,
            n => said.extend_from_slice(&buf[..n]),
        }
    }
    match understand(&said) {
        Some(Ok(())) => Ok(()),
        Some(Err(message)) => {
            reap(pid);
            Err(DaemonError::Failed(message))
        }
        None => {
            reap(pid);
            Err(DaemonError::Died)
        }
    }
}

/// What a forked process said before it closed its pipe: that it is ready, why it is not, or nothing.
pub(crate) fn understand(said: &[u8]) -> Option<Result<(), String>> {
    let (first, message) = said.split_first()?;
    Some(if *first == READY { Ok(()) } else { Err(String::from_utf8_lossy(message).into_owned()) })
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
fn leave_terminal() -> io::Result<()> {
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
    }
}
