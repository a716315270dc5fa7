//! `--force`: in order as long as the file system's process answers; where it does not, its connection is cut off.
//!
//! The kernel ends a FUSE connection as soon as it is asked for an unmount by force (`MNT_FORCE`), also of a mount that is
//! busy and stays: before anything is written that it holds. So that is asked for last, not first.

use super::{OnTop, detach, on_top};
use crate::failure::{Failure, host_error};
use crate::mounted::{become_user, must_be};
use crate::mountinfo::Mount;
use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags, statx};
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

/// So long the process has to answer.
const ANSWER: Duration = Duration::from_secs(10);

/// Unmounts what is on `target`, after a sync. Where that has not ended by the `deadline`, or its process does not answer,
/// cuts the process off.
///
/// # Errors
/// As without force; or that it was cut off, whether it is unmounted then or not.
pub(super) fn unmount_or_cut_off(target: &Path, mount: &Mount, lazy: bool, deadline: Instant) -> Result<(), Failure> {
    let who = must_be(mount);
    let meant = mount.clone();
    let in_order = by_thread(target, move |target| {
        sync(target, who);
        // that may have taken long
        detach(target, &meant, lazy, true)
    })?;
    loop {
        let now = Instant::now();
        if let Ok(done) = in_order.recv_timeout(ANSWER.min(deadline.saturating_duration_since(now))) {
            return done;
        }
        if Instant::now() >= deadline || !answers(target, mount)? {
            break;
        }
    }
    let unmounted = cut_off(target, mount)
        .map_err(|e| Failure::at("cannot cut off the process of", target.display(), host_error(&e)))?;
    let lost = "its process did not answer and was cut off: what it had not been given is lost";
    if unmounted {
        return Err(Failure::at("unmounted by force:", target.display(), lost));
    }
    // whom it waited for is awake
    Err(match in_order.recv_timeout(ANSWER) {
        Ok(Ok(())) => Failure::at("unmounted by force:", target.display(), lost),
        Ok(Err(f)) => Failure { message: format!("{}; {lost}, and who uses it gets errors", f.message), ..f },
        Err(_) => Failure::at("cannot unmount", target.display(), format!("it takes too long; {lost}")),
    })
}

/// Work that may have to wait for the mount's process, or for a device; what came of it.
pub(super) fn by_thread<T: Send + 'static>(
    target: &Path,
    work: impl FnOnce(&Path) -> T + Send + 'static,
) -> Result<Receiver<T>, Failure> {
    let (tell, told) = mpsc::channel();
    let own = target.to_path_buf();
    let work = move || {
        // Nobody waits any more where it took too long.
        let _ = tell.send(work(&own));
    };
    match thread::Builder::new().spawn(work) {
        Ok(_) => Ok(told),
        Err(e) => Err(Failure::at("cannot unmount", target.display(), host_error(&e))),
    }
}

/// User and group that alone are let in: the kernel answers root by itself, whatever becomes of the process.
type Who = Option<(u32, u32)>;

/// The root of the mount, to be asked on by a thread that has become the one who is let in. Root gets there, whoever may look
/// into the directories above.
fn root_as(target: &Path, who: Who) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let root = rustix::fs::open(target, flags, Mode::empty())?;
    who.map_or(Ok(()), become_user)?;
    Ok(root)
}

/// Writes what the kernel holds, as unmounting would do too late to be cut off.
fn sync(target: &Path, who: Who) {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    // of a process that has died nothing can be synced
    let work = || -> io::Result<()> {
        let root = rustix::fs::openat(root_as(target, who)?, ".", flags, Mode::empty())?;
        Ok(rustix::fs::syncfs(&root)?)
    };
    // who unmounts stays who it is
    thread::scope(|s| {
        if let Ok(thread) = thread::Builder::new().spawn_scoped(s, work)
            && let Ok(Err(e)) = thread.join()
        {
            tracing::debug!(error = %e, "not synced before it is unmounted");
        }
    });
}

fn is_there(target: &Path, mount: &Mount) -> bool {
    on_top(target, mount) == OnTop::It
}

/// Whether the process answers a question, be it with an error; also where it cannot be asked, as the mount has gone and is being
/// closed.
fn answers(target: &Path, mount: &Mount) -> Result<bool, Failure> {
    if !is_there(target, mount) {
        return Ok(true);
    }
    let who = must_be(mount);
    // The kernel asks though it may know the attributes; statfs might wait for what was removed to be freed, on a healthy server.
    let asked = by_thread(target, move |target| {
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_FORCE_SYNC;
        root_as(target, who).is_ok_and(|root| statx(&root, "", flags, StatxFlags::SIZE).is_ok())
    })?;
    Ok(asked.recv_timeout(ANSWER).is_ok())
}

/// Ends the connection; whether it is unmounted by that.
fn cut_off(target: &Path, mount: &Mount) -> io::Result<bool> {
    if is_there(target, mount) {
        match unmount(target, UnmountFlags::NOFOLLOW | UnmountFlags::FORCE) {
            Ok(()) => return Ok(true),
            // By what waits for its process, which is to unmount it, and tells more about it.
            Err(Errno::BUSY) => return Ok(false),
            // an ordinary user may still end what is theirs
            Err(e) => tracing::debug!(error = %e, "no unmount by force"),
        }
    }
    let numbers =
        mount.device.split_once(':').and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
    braidfs_fuse::cut_off(numbers.ok_or(io::ErrorKind::NotFound)?)?;
    Ok(false)
}
