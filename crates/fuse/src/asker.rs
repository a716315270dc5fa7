//! Who asks, beyond what a request says: looked up in `/proc` while the asking thread waits for its answer.
//!
//! On a connection that allows idmapped mounts the kernel tells user and group only in requests that make an inode
//! (`fs/fuse/dev.c`, `fuse_get_req`: all others go out with `invalid_mnt_idmap`). And no request says which system call it
//! is part of. Both are needed in rare cases only, so that a file of `/proc` is not too much.
//!
//! Does not promise an answer: a thread of another pid namespace has no number here, one that was killed is gone, and
//! `io_uring` works without the thread that gave the order. Callers take the unprivileged case then.

use crate::request::Request;
use std::fs;

/// The uid of requests that carry none.
const NONE: u32 = u32::MAX;

/// The user who asks, for file system access, in this process' user namespace; `None` where it cannot be told.
pub(crate) fn uid(req: &Request<'_>) -> Option<u32> {
    match req.head.uid {
        NONE => parse_fsuid(&fs::read_to_string(format!("/proc/{}/status", thread(req)?)).ok()?),
        uid => Some(uid),
    }
}

/// Whether the group is one of the asking thread's; not where it cannot be told.
pub(crate) fn in_group(req: &Request<'_>, gid: u32) -> bool {
    let status = thread(req).and_then(|t| fs::read_to_string(format!("/proc/{t}/status")).ok());
    status.is_some_and(|s| parse_groups(&s).contains(&gid))
}

/// Whether the thread that asks is inside `write` or one of its kin.
pub(crate) fn is_writing(req: &Request<'_>) -> bool {
    let syscall = thread(req).and_then(|t| fs::read_to_string(format!("/proc/{t}/syscall")).ok());
    syscall.as_deref().and_then(parse_syscall).is_some_and(|n| WRITES.contains(&n))
}

/// Whether that cannot be excluded: it is, or is in a call that may do either (`io_uring`, Linux AIO), or is not seen.
pub(crate) fn may_be_writing(req: &Request<'_>) -> bool {
    thread(req).and_then(may_write).unwrap_or(true)
}

/// The same of a thread by its number, which may be gone; `None` where it is not seen.
pub(crate) fn may_write(thread: u32) -> Option<bool> {
    match fs::read_to_string(format!("/proc/{thread}/syscall")) {
        Ok(text) => parse_syscall(&text).map(|n| WRITES.contains(&n) || EITHER.contains(&n)),
        Err(e) => matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ESRCH)).then_some(false),
    }
}

/// Numbers of those that hand over orders for something else to do.
const EITHER: [libc::c_long; 2] = [libc::SYS_io_uring_enter, libc::SYS_io_submit];

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
        assert_eq!(parse_syscall("1 0x3 0x7f 0x1 0x0 0x0 0x0 0x7ffd 0x7f\n"), Some(1));
        assert_eq!(parse_syscall("running\n"), None);
        assert_eq!(parse_syscall("-1 0x7ffd 0x7f\n"), None);
        let own = fs::read_to_string("/proc/thread-self/status").unwrap();
        assert_eq!(parse_fsuid(&own), Some(rustix::process::geteuid().as_raw()));
    }
}
