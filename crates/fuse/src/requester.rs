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
//! like another one.) The kernel writes in any call on behalf of a thread: overlayfs copies a file in `open`, and who dumps
//! core is shown in the call that it was in.

use crate::request::Request;
use rustix::fs::{AtFlags, CWD, FileType, StatxFlags, statx};
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
    matches!(doing(req).doing, Doing::Writing(_))
}

/// What a thread is seen to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Doing {
    /// It is in a call that writes: so many bytes, where that can be seen.
    Writing(Option<u64>),
    /// In none that does.
    Other,
    /// It runs just now: in which call, or in none, is not told. Who writes much waits at times for what that needs.
    Running,
    /// It is not seen, or is in a call that hands over orders to something else (`io_uring`, Linux AIO).
    Unknown,
}

/// A look at a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Seen {
    pub doing: Doing,
    /// In which call; `None`: in none, or that does not matter.
    pub call: Option<Call>,
}

impl Seen {
    /// Nothing was seen.
    pub const NOTHING: Self = Self { doing: Doing::Unknown, call: None };
    /// See [`Doing::Running`].
    const RUNNING: Self = Self { doing: Doing::Running, call: None };
    /// It writes to no file, or is gone.
    const ELSEWHERE: Self = Self { doing: Doing::Other, call: None };

    /// Whether it still does what it asked for in the call `asked_in`.
    pub fn since(self, asked_in: Option<Call>) -> Doing {
        match (asked_in, self.call) {
            (Some(then), Some(now)) if then != now => Doing::Other,
            // it asked in a call that is not known to write
            (Some(_), Some(_)) if self.doing == Doing::Other => Doing::Unknown,
            _ => self.doing,
        }
    }
}

/// The system call that a thread is in: its number, six arguments, the stack pointer and the place in the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Call([u64; 9]);

impl Call {
    fn number(self) -> libc::c_long {
        self.0[0] as libc::c_long
    }

    /// Whether it sets times.
    pub fn sets_times(self) -> bool {
        self.number() == libc::SYS_utimensat
    }

    fn doing(self) -> Doing {
        match self.number() {
            _ if self.0[7] <= u32::MAX.into() => Doing::Unknown,
            libc::SYS_write | libc::SYS_pwrite64 => Doing::Writing(Some(self.0[3])),
            n if WRITES.contains(&n) => Doing::Writing(None),
            libc::SYS_io_uring_enter | libc::SYS_io_submit => Doing::Unknown,
            _ => Doing::Other,
        }
    }

    /// The descriptor that it writes to, of one that does.
    fn written(self) -> u32 {
        let place = if matches!(self.number(), libc::SYS_splice | libc::SYS_copy_file_range) { 3 } else { 1 };
        self.0[place] as u32
    }
}

/// What the thread does that asks. Of one whose call is not known, or reads and writes, the kernel's stack is looked at (only
/// root may): it waits for the answer, so that it shows which function of `fs/fuse/file.c` asks.
pub(crate) fn doing(req: &Request<'_>) -> Seen {
    let Some(thread) = thread(req) else { return Seen::NOTHING };
    let call = call(req);
    let reads = || call.is_some_and(|c| READS.contains(&c.number())) && !dumps_core(thread);
    let by_call = match call.map_or(Doing::Unknown, Call::doing) {
        Doing::Other if !reads() => Doing::Unknown,
        seen => seen,
    };
    let doing = match by_call {
        Doing::Unknown | Doing::Writing(None) => {
            of_thread(thread, "stack").ok().and_then(|stack| parse_stack(&stack)).unwrap_or(by_call)
        }
        seen => seen,
    };
    Seen { doing, call }
}

/// The call that the thread is in that asks, where it can be told.
pub(crate) fn call(req: &Request<'_>) -> Option<Call> {
    parse_call(&of_thread(thread(req)?, "syscall").ok()?)
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
pub(crate) fn look_at(thread: u32) -> Seen {
    match of_thread(thread, "syscall") {
        Ok(text) if text.trim_end() == "running" => Seen::RUNNING,
        Ok(text) => match parse_call(&text) {
            Some(call) if writes_elsewhere(thread, call) => Seen::ELSEWHERE,
            Some(call) => Seen { doing: call.doing(), call: Some(call) },
            None => Seen::NOTHING,
        },
        // not one that is there and hidden
        Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ESRCH)) && is_gone(thread) => Seen::ELSEWHERE,
        Err(_) => Seen::NOTHING,
    }
}

/// Whether the thread is in a call that writes to what is no file: a pipe, a socket, a terminal. There it may stay.
fn writes_elsewhere(thread: u32, call: Call) -> bool {
    if !matches!(call.doing(), Doing::Writing(_)) {
        return false;
    }
    // asks no server: it may be a file of this mount
    let path = format!("/proc/{thread}/fd/{}", call.written());
    let found = statx(CWD, path, AtFlags::STATX_DONT_SYNC, StatxFlags::TYPE);
    found.is_ok_and(|s| FileType::from_raw_mode(s.stx_mode.into()) != FileType::RegularFile)
}

/// Whether the process of the thread dumps core.
fn dumps_core(thread: u32) -> bool {
    of_thread(thread, "status").is_ok_and(|status| parse_dumping(&status))
}

/// Where a thread that is inside `write` or `pwrite` writes, and how many bytes; `None` for the place: at the end of the file.
pub(crate) type WriteRange = (Option<u64>, u64);

/// Where a thread writes that asks, and how much.
pub(crate) fn write_range(thread: u32) -> Option<WriteRange> {
    let call = parse_call(&of_thread(thread, "syscall").ok()?)?;
    let Doing::Writing(Some(len)) = call.doing() else { return None };
    let (pos, appends) = parse_fdinfo(&of_thread(thread, &format!("fdinfo/{}", call.written())).ok()?)?;
    if dumps_core(thread) {
        return None;
    }
    let offset = if call.number() == libc::SYS_pwrite64 { call.0[4] } else { pos };
    Some(((!appends).then_some(offset), len))
}

/// Whether the thread is inside a call that writes through a pipe of the kernel's own: each of its `write`s has 16 pages at most.
pub(crate) fn writes_by_pipe(thread: u32) -> bool {
    let call = of_thread(thread, "syscall").ok().and_then(|text| parse_call(&text));
    call.is_some_and(|c| matches!(c.number(), libc::SYS_sendfile | libc::SYS_copy_file_range))
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

/// Numbers of the native calls in which the kernel reads a file, or looks for its end, and writes to none.
const READS: [libc::c_long; 9] = [
    libc::SYS_read,
    libc::SYS_pread64,
    libc::SYS_readv,
    libc::SYS_preadv,
    libc::SYS_preadv2,
    libc::SYS_lseek,
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_finit_module,
];

pub(crate) fn thread(req: &Request<'_>) -> Option<u32> {
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

/// `CoreDumping:`
fn parse_dumping(status: &str) -> bool {
    status.lines().find_map(|l| l.strip_prefix("CoreDumping:")).is_some_and(|value| value.trim() == "1")
}

/// The call; `None` for a thread that runs, or that is in none.
pub(crate) fn parse_call(text: &str) -> Option<Call> {
    let mut words = text.split_ascii_whitespace();
    let mut call = [words.next()?.parse().ok()?; 9];
    for number in &mut call[1..] {
        *number = u64::from_str_radix(words.next()?.strip_prefix("0x")?, 16).ok()?;
    }
    Some(Call(call))
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
        let parse_doing = |text: &str| parse_call(text).map_or(Doing::Unknown, Call::doing);
        assert_eq!(
            parse_call("1 0x3 0x7f 0x1 0x0 0x0 0x0 0x7ffd 0x7f\n"),
            Some(Call([1, 3, 127, 1, 0, 0, 0, 0x7ffd, 127]))
        );
        assert_eq!(parse_call("running\n"), None);
        assert_eq!(parse_call("-1 0x7ffd 0x7f\n"), None);
        assert!(parse_dumping("VmRSS:\t1 kB\nCoreDumping:\t1\n") && !parse_dumping("CoreDumping:\t0\n"));
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
        assert_eq!(look_at(u32::MAX >> 2), Seen::ELSEWHERE, "it is gone");
        assert!(!is_gone(std::process::id()) && is_gone(u32::MAX));
        assert_eq!(parse_fdinfo("pos:\t8192\nflags:\t0100002\nmnt_id:\t3\n"), Some((8192, false)));
        assert_eq!(parse_fdinfo("pos:\t0\nflags:\t0102001\n"), Some((0, true)));
        assert_eq!(parse_fdinfo("pos:\t0\n"), None);
        let own = fs::read_to_string("/proc/thread-self/status").unwrap();
        assert_eq!(parse_fsuid(&own), Some(rustix::process::geteuid().as_raw()));
    }

    /// It may be in the midst of a `write`.
    #[test]
    fn who_runs_is_seen_to_run() {
        let (tell, told) = std::sync::mpsc::channel();
        let end = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
        let ended = end.clone();
        let runs = std::thread::spawn(move || {
            tell.send(rustix::thread::gettid().as_raw_nonzero().get() as u32).unwrap();
            while !ended.load(std::sync::atomic::Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        });
        let thread = told.recv().unwrap();
        // it may wait for memory at its begin
        let seen = (0..100).find(|_| look_at(thread) == Seen::RUNNING);
        end.store(true, std::sync::atomic::Ordering::Relaxed);
        runs.join().unwrap();
        assert!(seen.is_some());
        assert_eq!(Seen::RUNNING.since(None), Doing::Running);
    }

    /// What a thread asked for is under way as long as it stays in the call.
    #[test]
    fn another_call_is_another_write() {
        let call = |text: &str| parse_call(text).unwrap();
        let seen = |call: Call| Seen { doing: call.doing(), call: Some(call) };
        let write = call("1 0x3 0x7f 0x1000 0x0 0x0 0x0 0x7ffd00000000 0x7f\n");
        let other = call("1 0x4 0x7f 0x1000 0x0 0x0 0x0 0x7ffd00000000 0x7f\n");
        let open = call("257 0x3 0x7f 0x1000 0x0 0x0 0x0 0x7ffd00000000 0x7f\n");
        assert_eq!(seen(write).since(Some(write)), Doing::Writing(Some(4096)));
        assert_eq!((seen(other).since(Some(write)), seen(open).since(Some(write))), (Doing::Other, Doing::Other));
        assert_eq!((seen(open).since(Some(open)), seen(open).since(None)), (Doing::Unknown, Doing::Other));
        assert_eq!(
            (seen(other).since(None), Seen::NOTHING.since(Some(write))),
            (Doing::Writing(Some(4096)), Doing::Unknown)
        );
        assert_eq!(Seen::ELSEWHERE.since(Some(write)), Doing::Other);
    }

    /// A thread that waits in a full pipe, and one that is in no call at all.
    #[test]
    fn who_writes_to_a_pipe_writes_to_no_file() {
        use std::io::{PipeReader, Write};
        let (reader, mut writer): (PipeReader, _) = std::io::pipe().unwrap();
        let (tell, told) = std::sync::mpsc::channel();
        let writes = std::thread::spawn(move || {
            tell.send(rustix::thread::gettid().as_raw_nonzero().get() as u32).unwrap();
            writer.write_all(&[0; 1 << 20])
        });
        let thread = told.recv().unwrap();
        let end = std::time::Instant::now() + std::time::Duration::from_secs(20);
        let text = || fs::read_to_string(format!("/proc/{thread}/syscall")).unwrap();
        while !parse_call(&text()).is_some_and(|c| matches!(c.doing(), Doing::Writing(_))) {
            assert!(std::time::Instant::now() < end, "{}", text());
            std::thread::yield_now();
        }
        assert_eq!(look_at(thread), Seen::ELSEWHERE);
        drop(reader);
        assert!(writes.join().unwrap().is_err());
    }
}
