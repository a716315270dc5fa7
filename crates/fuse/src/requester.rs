//! Who asks, beyond what a request says: looked up in `/proc` while the asking thread waits for its answer.
//!
//! On a connection that allows idmapped mounts the kernel tells user and group only in requests that make an inode
//! (`fs/fuse/dev.c`, `fuse_get_req`: all others go out with `invalid_mnt_idmap`). And no request says which system call it
//! is part of. Both are needed in rare cases only, so that a file of `/proc` is not too much.
//!
//! Does not promise an answer: a thread of another pid namespace has no number here, one that was killed is gone, and
//! `io_uring` works without the thread that gave the order. `/proc` may hide other users' threads (`hidepid`), or be that
//! of another pid namespace, where the same numbers are others'. Callers take the unprivileged case then. Of system calls
//! only those of 64-bit programs are known: kernel threads are shown in call 0 (`read`), and the calls of 32-bit programs
//! have other numbers; both have a stack pointer that fits 32 bits. (One that a 64-bit program gives by `int 0x80` looks
//! like another one.)

use crate::request::Request;
use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};
use std::fs;
use std::io;
use std::sync::OnceLock;

/// The uid of requests that carry none.
const NONE: u32 = u32::MAX;

/// The user who asks, for file system access, in this process' user namespace; `None` where it cannot be told.
pub(crate) fn uid(req: &Request<'_>) -> Option<u32> {
    match req.head.uid {
        NONE => parse_fsuid(&of_thread(thread(req)?, "status").ok()?),
        uid => Some(uid),
    }
}

/// The user who asks, where that is an administrator or the user of this process: whose the server is.
///
/// # Errors
/// EPERM for everybody else, also where it cannot be told.
pub(crate) fn of_server(req: &Request<'_>) -> Result<u32, Errno> {
    let own = rustix::process::geteuid().as_raw();
    uid(req).filter(|&uid| if uid == 0 { is_administrator(req) } else { uid == own }).ok_or(Errno::PERM)
}

/// Whether it is root with CAP_SYS_ADMIN, which the kernel asks of who administers its own file systems: user 0 of a container
/// that shares the system's users usually is without. Not where it cannot be told.
pub(crate) fn is_administrator(req: &Request<'_>) -> bool {
    const SYS_ADMIN: u64 = 1 << 21;
    let Some(thread) = thread(req).filter(|_| uid(req) == Some(0)) else { return false };
    let capable = of_thread(thread, "status").is_ok_and(|s| parse_capabilities(&s) & SYS_ADMIN != 0);
    // Capabilities count in a namespace of users. A server that is not root sees those of its own processes only, and has
    // nothing to give that root has not.
    let here = match fs::read_link(format!("/proc/{thread}/ns/user")) {
        Ok(theirs) => fs::read_link("/proc/self/ns/user").is_ok_and(|own| own == theirs),
        Err(e) => e.kind() == io::ErrorKind::PermissionDenied && !rustix::process::geteuid().is_root(),
    };
    capable && here
}

/// Whether the group is one of the asking thread's; not where it cannot be told.
pub(crate) fn in_group(req: &Request<'_>, gid: u32) -> bool {
    let status = thread(req).and_then(|t| of_thread(t, "status").ok());
    status.is_some_and(|s| parse_groups(&s).contains(&gid))
}

/// Whether the thread that asks is inside `write` or one of its kin.
pub(crate) fn is_writing(req: &Request<'_>) -> bool {
    matches!(doing(req), Doing::Writing(_))
}

/// What a thread is seen to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Doing {
    /// It is in a call that writes: so many bytes, where that can be seen.
    Writing(Option<u64>),
    /// In none that does.
    Other,
    /// It is not seen, or is in a call that hands over orders to something else (`io_uring`, Linux AIO).
    Unknown,
}

/// What the thread does that asks. Of one whose call is not known, or reads and writes, the kernel's stack is looked at (only
/// root may): it waits for the answer, so that it shows which function of `fs/fuse/file.c` asks.
pub(crate) fn doing(req: &Request<'_>) -> Doing {
    let Some(thread) = thread(req) else { return Doing::Unknown };
    match thread_is_doing(thread) {
        by_call @ (Doing::Unknown | Doing::Writing(None)) => {
            of_thread(thread, "stack").ok().and_then(|stack| parse_stack(&stack)).unwrap_or(by_call)
        }
        seen => seen,
    }
}

/// The innermost function of FUSE decides: a file may be read for the sake of another one that is written.
fn parse_stack(stack: &str) -> Option<Doing> {
    let decides = |line: &str| {
        let is_in = |function| line.contains(function);
        match () {
            () if is_in("fuse_file_write_iter") => Some(Doing::Writing(None)),
            () if is_in("fuse_file_read_iter") || is_in("fuse_file_llseek") => Some(Doing::Other),
            () => None,
        }
    };
    stack.lines().find_map(decides)
}

/// What a thread does, which may be gone. Of one that waits for no answer: by [`crate::looks`] only.
pub(crate) fn thread_is_doing(thread: u32) -> Doing {
    match of_thread(thread, "syscall") {
        Ok(text) => parse_doing(&text),
        // not one that is there and hidden
        Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ESRCH)) && is_gone(thread) => Doing::Other,
        Err(_) => Doing::Unknown,
    }
}

/// Where a thread that is inside `write` or `pwrite` writes, and how many bytes; `None` for the place: at the end of the file.
pub(crate) type WriteRange = (Option<u64>, u64);

/// Where a thread writes that asks, and how much.
pub(crate) fn write_range(thread: u32) -> Option<WriteRange> {
    let text = of_thread(thread, "syscall").ok()?;
    let Doing::Writing(Some(len)) = parse_doing(&text) else { return None };
    let number = |at| u64::from_str_radix(text.split_ascii_whitespace().nth(at)?.strip_prefix("0x")?, 16).ok();
    let (pos, appends) = parse_fdinfo(&of_thread(thread, &format!("fdinfo/{}", number(1)? as u32)).ok()?)?;
    let offset = if parse_syscall(&text) == Some(libc::SYS_pwrite64) { number(4)? } else { pos };
    Some(((!appends).then_some(offset), len))
}

/// Whether the thread is inside a call that writes through a pipe of the kernel's own: each of its `write`s has 16 pages at most.
pub(crate) fn writes_by_pipe(thread: u32) -> bool {
    let call = of_thread(thread, "syscall").ok().and_then(|text| parse_syscall(&text));
    matches!(call, Some(libc::SYS_sendfile | libc::SYS_copy_file_range))
}

/// Position, and whether it is opened for appending.
fn parse_fdinfo(text: &str) -> Option<(u64, bool)> {
    let field = |name| text.lines().find_map(|l| l.strip_prefix(name)).map(str::trim);
    let flags = i32::from_str_radix(field("flags:")?, 8).ok()?;
    Some((field("pos:")?.parse().ok()?, flags & libc::O_APPEND != 0))
}

/// A file of `/proc` about a thread.
fn of_thread(thread: u32, file: &str) -> io::Result<String> {
    static OURS: OnceLock<bool> = OnceLock::new();
    let is_ours =
        || fs::read_link("/proc/self").is_ok_and(|me| me.as_os_str() == std::process::id().to_string().as_str());
    if !OURS.get_or_init(is_ours) {
        return Err(io::Error::new(io::ErrorKind::Unsupported, "/proc is not mounted, or of another pid namespace"));
    }
    fs::read_to_string(format!("/proc/{thread}/{file}"))
}

/// Whether there is no such thread any more.
pub(crate) fn is_gone(thread: u32) -> bool {
    let pid = i32::try_from(thread).ok().and_then(Pid::from_raw);
    pid.is_none_or(|pid| test_kill_process(pid) == Err(rustix::io::Errno::SRCH))
}

fn parse_doing(text: &str) -> Doing {
    let number = |at| u64::from_str_radix(text.split_ascii_whitespace().nth(at)?.strip_prefix("0x")?, 16).ok();
    match parse_syscall(text) {
        // its number, six arguments, the stack pointer
        Some(_) if number(7).is_none_or(|sp| sp <= u32::MAX.into()) => Doing::Unknown,
        Some(libc::SYS_write | libc::SYS_pwrite64) => Doing::Writing(number(3)),
        Some(n) if WRITES.contains(&n) => Doing::Writing(None),
        Some(libc::SYS_io_uring_enter | libc::SYS_io_submit) | None => Doing::Unknown,
        Some(_) => Doing::Other,
    }
}

/// Numbers of the native calls that write to a descriptor.
const WRITES: [libc::c_long; 8] = [
    libc::SYS_write,
    libc::SYS_pwrite64,
    libc::SYS_writev,
    libc::SYS_pwritev,
    libc::SYS_pwritev2,
    libc::SYS_sendfile,
    libc::SYS_splice,
    libc::SYS_copy_file_range,
];

fn thread(req: &Request<'_>) -> Option<u32> {
    (req.head.pid != 0).then_some(req.head.pid)
}

/// The fourth number of `Uid:`.
fn parse_fsuid(status: &str) -> Option<u32> {
    status.lines().find_map(|l| l.strip_prefix("Uid:"))?.split_ascii_whitespace().nth(3)?.parse().ok()
}

/// `CapEff:`, none where it is not there.
fn parse_capabilities(status: &str) -> u64 {
    let text = status.lines().find_map(|l| l.strip_prefix("CapEff:"));
    text.and_then(|t| u64::from_str_radix(t.trim(), 16).ok()).unwrap_or(0)
}

/// The fourth number of `Gid:`, and all of `Groups:`.
fn parse_groups(status: &str) -> Vec<u32> {
    let line = |name| status.lines().find_map(|l| l.strip_prefix(name)).unwrap_or_default().split_ascii_whitespace();
    line("Gid:").skip(3).chain(line("Groups:")).filter_map(|n| n.parse().ok()).collect()
}

/// The number of the call; `None` for a thread that runs, or that is in none.
fn parse_syscall(text: &str) -> Option<libc::c_long> {
    text.split_ascii_whitespace().next()?.parse().ok().filter(|n| *n >= 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proc_is_read() {
        assert_eq!(parse_fsuid("Name:\tx\nUid:\t1\t2\t3\t4\nGid:\t5\t6\t7\t8\n"), Some(4));
        assert_eq!(parse_fsuid("Name:\tx\n"), None);
        assert_eq!(parse_groups("Gid:\t5\t6\t7\t8\nGroups:\t1 22 \n"), [8, 1, 22]);
        assert!(parse_groups("Gid:\t5\n").is_empty());
        assert_eq!(parse_capabilities("CapPrm:\t1\nCapEff:\t00000000a80425fb\n"), 0xa804_25fb);
        assert_eq!(parse_capabilities("CapPrm:\t1\n"), 0);
        assert_eq!(parse_syscall("1 0x3 0x7f 0x1 0x0 0x0 0x0 0x7ffd 0x7f\n"), Some(1));
        assert_eq!(parse_syscall("running\n"), None);
        assert_eq!(parse_syscall("-1 0x7ffd 0x7f\n"), None);
        assert_eq!(parse_doing("1 0x3 0x7f 0x1000 0x0 0x0 0x0 0x7ffd00000000 0x7f\n"), Doing::Writing(Some(4096)));
        assert_eq!(parse_doing("20 0x3 0x7f 0x2 0x0 0x0 0x0 0x7ffd00000000 0x7f\n"), Doing::Writing(None));
        assert_eq!(parse_doing("0 0x3 0x7f 0x1000 0x0 0x0 0x0 0x7ffd00000000 0x7f\n"), Doing::Other);
        assert_eq!((parse_doing("-1 0x7ffd 0x7f\n"), parse_doing("running\n")), (Doing::Unknown, Doing::Unknown));
        let kernel_thread = format!("0{}\n", " 0x0".repeat(8));
        assert_eq!(parse_doing(&kernel_thread), Doing::Unknown, "nfsd, a loop device");
        let of_32_bits = "4 0x1 0x8050000 0x10000 0x0 0x0 0x0 0xffa3c1e0 0xf7f1a579\n";
        assert_eq!(parse_doing(of_32_bits), Doing::Unknown, "write of i386, stat of x86_64");
        let stack = |f: &str| format!("[<0>] request_wait_answer+0x1/0x2\n[<0>] {f}+0x3/0x4\n[<0>] nfsd+0x5/0x6\n");
        assert_eq!(
            ["fuse_file_read_iter", "fuse_file_llseek"].map(|f| parse_stack(&stack(f))),
            [Some(Doing::Other); 2]
        );
        assert_eq!(parse_stack(&stack("fuse_file_write_iter")), Some(Doing::Writing(None)));
        assert_eq!(parse_stack(&(stack("fuse_file_read_iter") + &stack("fuse_file_write_iter"))), Some(Doing::Other));
        assert_eq!(parse_stack(&stack("vfs_read")), None);
        assert_eq!(thread_is_doing(u32::MAX >> 2), Doing::Other, "it is gone");
        assert!(!is_gone(std::process::id()) && is_gone(u32::MAX));
        assert_eq!(parse_fdinfo("pos:\t8192\nflags:\t0100002\nmnt_id:\t3\n"), Some((8192, false)));
        assert_eq!(parse_fdinfo("pos:\t0\nflags:\t0102001\n"), Some((0, true)));
        assert_eq!(parse_fdinfo("pos:\t0\n"), None);
        let own = fs::read_to_string("/proc/thread-self/status").unwrap();
        assert_eq!(parse_fsuid(&own), Some(rustix::process::geteuid().as_raw()));
    }
}
