//! A process that ends the connections of a serving process which was killed and waits for itself.
//!
//! A thread that has the kernel forget pages of a file (`FUSE_NOTIFY_INVAL_INODE`) waits in the kernel, and cannot be woken, while
//! such a page is on its way to the server: to its own process. Where that is killed meanwhile the answer will not come, the
//! thread does not end, and with it the connection, which it has open: all who use the mount wait, and sync(2) of the whole
//! machine. Nothing within the process can help, as all else of it has ended. So it starts a second one before it has threads, which
//! looks at it each second, and where its first thread has ended and others have not, ends what connections there are. It ends with
//! the process. (A pidfd does not tell: the end of a first thread is not notified before that of all others.)
//!
//! A mount with a parent ([`super`]) needs none: that does the same. Low-level module: fork.

use super::{HalfDead, HeldSignals, LOOK};
use crate::daemon::{fork_process, leave_terminal};
use crate::mount::abort;
use crate::mount_table::MountId;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, getpid};
use std::fs::File;
use std::io::{self, Read, Write};

/// `+` or `-`, and both numbers of the device.
const LINE: usize = 9;

/// The end of a serving process by which it tells its guard. When all of that process has ended, the guard does.
#[derive(Debug)]
pub struct Guard(File);

impl Guard {
    /// Starts the process. Standard streams of one that is going into the background are not kept open by it.
    ///
    /// # Errors
    /// This process has threads already, or the system has no room for another one.
    pub fn start(in_background: bool) -> io::Result<Self> {
        let (theirs, ours) = pipe_with(PipeFlags::CLOEXEC)?;
        let served = getpid();
        match fork_process()? {
            None => {
                drop(ours);
                let code = match watch(served, theirs.into(), in_background) {
                    Ok(()) => 0,
                    Err(e) => {
                        tracing::error!(error = %e, "the guard of the serving process ends");
                        1
                    }
                };
                std::process::exit(code)
            }
            Some(_) => Ok(Self(ours.into())),
        }
    }

    /// The connection of `mount` is this process' from now on.
    pub(crate) fn watch(&self, mount: MountId) {
        self.tell(b'+', mount);
    }

    /// It is no more.
    pub(crate) fn forget(&self, mount: MountId) {
        self.tell(b'-', mount);
    }

    fn tell(&self, what: u8, mount: MountId) {
        if let Err(e) = (&self.0).write_all(&line(what, mount.dev)) {
            tracing::warn!(error = %e, "the guard of this process has ended: killed, the mount may have to be cut off by hand");
        }
    }
}

fn line(what: u8, (major, minor): (u32, u32)) -> [u8; LINE] {
    let mut line = [what; LINE];
    line[1..5].copy_from_slice(&major.to_ne_bytes());
    line[5..].copy_from_slice(&minor.to_ne_bytes());
    line
}

/// Connections of the process, by their devices' numbers.
#[derive(Debug, Default)]
struct Watched {
    all: Vec<(u32, u32)>,
    /// Of a line.
    rest: Vec<u8>,
}

impl Watched {
    /// False: the process has ended.
    fn hear_from(&mut self, pipe: &mut File) -> io::Result<bool> {
        let mut buf = [0; 64 * LINE];
        let n = pipe.read(&mut buf)?;
        self.hear(&buf[..n]);
        Ok(n > 0)
    }

    /// Ends all.
    fn cut_off(&mut self, served: Pid) {
        for dev in self.all.drain(..) {
            tracing::error!(pid = served.as_raw_pid(), connection = ?dev,
                            "the serving process was killed and waits for itself: its connection is cut off");
            if let Err(e) = abort(dev) {
                tracing::error!(error = %e, "cannot cut off the FUSE connection");
            }
        }
    }

    fn hear(&mut self, said: &[u8]) {
        self.rest.extend_from_slice(said);
        let whole = self.rest.len() / LINE * LINE;
        for line in self.rest.drain(..whole).collect::<Vec<_>>().chunks_exact(LINE) {
            let number = |at: usize| u32::from_ne_bytes([line[at], line[at + 1], line[at + 2], line[at + 3]]);
            let dev = (number(1), number(5));
            self.all.retain(|d| *d != dev);
            if line[0] == b'+' {
                self.all.push(dev);
            }
        }
    }
}

/// Until all of the process `served` has ended, which has the other end of the pipe.
fn watch(served: Pid, mut pipe: File, in_background: bool) -> io::Result<()> {
    rustix::thread::set_name(c"braidfs-guard")?;
    // What asks that process to end is no affair of this one, which goes when it has.
    let _held = HeldSignals::hold()?;
    // Cannot fail in a fresh child.
    let _ = rustix::process::setsid();
    if in_background {
        leave_terminal()?;
    } else {
        rustix::process::chdir("/")?;
    }
    let mut watched = Watched::default();
    let mut half_dead = HalfDead::of(served);
    loop {
        let fd = &mut [PollFd::new(&pipe, PollFlags::IN)];
        match poll(fd, Some(&Timespec { tv_sec: LOOK.as_secs().cast_signed(), tv_nsec: LOOK.subsec_nanos().into() })) {
            Ok(0) => {}
            Ok(_) if watched.hear_from(&mut pipe)? => continue,
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => continue,
            Err(e) => return Err(e.into()),
        }
        if half_dead.stays() {
            watched.cut_off(served);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_are_known_until_they_are_forgotten() {
        let mut watched = Watched::default();
        let said = [line(b'+', (0, 41)), line(b'+', (7, 2)), line(b'-', (0, 41)), line(b'+', (7, 2))].concat();
        for piece in said.chunks(5) {
            watched.hear(piece);
        }
        assert_eq!((watched.all, watched.rest), (vec![(7, 2)], vec![]));
    }

    #[test]
    fn a_process_with_threads_has_no_guard() {
        // The test harness has threads.
        assert!(Guard::start(false).is_err());
    }
}
