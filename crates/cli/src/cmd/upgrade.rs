//! `braidfs upgrade`: a mount goes on with another program, without an unmount.

use crate::cmd::umount::{NOT_MOUNTED, is_braidfs};
use crate::failure::{Failure, Outcome, host_error, mount_code};
use crate::{mounted, mountinfo};
use braidfs_fuse::control;
use rustix::io::Errno;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Go on with a mount by another version of the program, without unmounting it
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Exit codes: 0 the other program serves, 1 wrong usage, 32 it does not: the old one goes on, or the mount has ended; the message says which.\n\n\
    Examples:\n  braidfs upgrade /mnt                                  with the program of this command\n  \
    braidfs upgrade --program /opt/new/braidfs /mnt       with another one\n  \
    findmnt -nlo TARGET -t fuse.braidfs,fuseblk.braidfs | xargs -rn1 braidfs upgrade     all mounts\n\n\
    Open files, working directories, locks and maps stay as they are; calls that come meanwhile wait, as a rule some tenths \
    of a second. The old process makes all durable and closes the volume, the new one opens it and says so, the old one \
    ends. Where anything fails before that the old process goes on. Root may, and the user who mounted it. The parent of a \
    mount with `-o supervise` becomes the other program, too, or, where that cannot look after a mount, stays what it is, \
    which is said.\n\n\
    Not of a mount whose requests come through io_uring (see `braidfs mount --help`, transport=), of one that was \
    mounted read-only and made writable since, nor while a scrub of it runs: the command says why, and nothing happens. \
    mounted.md in /usr/share/doc/braidfs (or /usr/local/share, or docs/ of the sources) has the rest."
)]
pub struct Args {
    /// The program that is to serve [default: the one of this command]
    #[arg(long, value_name = "PATH")]
    program: Option<PathBuf>,
    /// How long it may take to open the volume, and a second for each 4,000 inodes that the kernel knows; then the old one goes on
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..=3600))]
    timeout: u32,
    /// Print nothing on success
    #[arg(short, long)]
    quiet: bool,
    /// Where it is mounted
    mountpoint: PathBuf,
}

pub fn run(args: &Args) -> Outcome {
    let target = mountinfo::absolute(&args.mountpoint);
    let show = target.display();
    let fail = |why: &str| Failure::at("cannot upgrade", &show, why).with_code(mount_code::FAILED);
    let mount = mountinfo::at(&target).ok_or_else(|| fail(NOT_MOUNTED))?;
    if !is_braidfs(&mount) {
        return Err(fail(&format!("{} is mounted there, not braidfs", mount.kind)));
    }
    // As the server sees it: not by a name that says which command is meant.
    let program = match &args.program {
        Some(path) => std::fs::canonicalize(path).map_err(|e| (path.clone(), e)),
        None => std::env::current_exe().map_err(|e| (PathBuf::from("/proc/self/exe"), e)),
    };
    let program = program.map_err(|(path, e)| fail(&format!("{}: {}", path.display(), host_error(&e))))?;
    let root = mounted::enter(&target).map_err(|e| fail(&says(&e)))?;
    let upgraded = control::upgrade(&root, &program, args.timeout).map_err(|e| fail(&says(&e)))?;
    // nobody shall find the mount busy meanwhile
    drop(root);
    if !args.quiet {
        crate::say(format_args!("{show}: served by braidfs {}, process {}", upgraded.version, upgraded.pid))?;
    }
    match parent(upgraded.pid) {
        Parent::None => {}
        Parent::Same(pid) if args.quiet => tracing::debug!(pid, "the parent is upgraded, too"),
        Parent::Same(pid) => crate::say(format_args!("{show}: looked after by the same program, process {pid}"))?,
        // no failure: all that was asked for is so
        Parent::Other(pid) => crate::complain(format_args!(
            "{show}: the process that looks after it, {pid}, is of another program (its log may say why); should the one \
             that serves die, that program mounts it again"
        )),
    }
    Ok(0)
}

/// Who looks after a process that serves (`-o supervise`).
enum Parent {
    None,
    /// It runs the same program.
    Same(u32),
    /// It runs another one.
    Other(u32),
}

/// How long a parent may take to become another program.
const PARENT_WAIT: Duration = Duration::from_secs(2);
/// How long a process has another parent until the one that served before has ended.
const ADOPTION: Duration = Duration::from_millis(300);

/// Waits until the parent of the process `serving` runs the program that this one runs.
fn parent(serving: u32) -> Parent {
    let begun = Instant::now();
    let program = |pid: u32| std::fs::metadata(format!("/proc/{pid}/exe")).map(|m| (m.dev(), m.ino())).ok();
    let name = |pid: u32| std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    loop {
        let pid = match parent_of(serving) {
            None | Some(0 | 1) => return Parent::None,
            Some(pid) => pid,
        };
        let looks_after = name(pid).trim_end() == "braidfs-superv";
        // one that cannot be looked at may be anything
        let Some(own) = program(serving) else { return Parent::None };
        if looks_after && program(pid) == Some(own) {
            return Parent::Same(pid);
        }
        match begun.elapsed() {
            waited if looks_after && waited > PARENT_WAIT => return Parent::Other(pid),
            waited if !looks_after && waited > PARENT_WAIT + ADOPTION => return Parent::None,
            waited if !looks_after && waited > ADOPTION && !is_braidfs_process(pid) => return Parent::None,
            _ => std::thread::sleep(Duration::from_millis(10)),
        }
    }
}

fn is_braidfs_process(pid: u32) -> bool {
    let called = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    // a parent that has just become another program has not its name yet
    called.split(|b| *b == 0).any(|word| word.starts_with(b"--look-after="))
}

fn parent_of(pid: u32) -> Option<u32> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status.lines().find_map(|l| l.strip_prefix("PPid:")?.trim().parse().ok())
}

fn says(e: &io::Error) -> String {
    match Errno::from_io_error(e) {
        Some(Errno::PERM) => "only root may, and who mounted it".into(),
        Some(Errno::NOTTY) => "its server is of an older version: unmount it, and mount it with the new program".into(),
        Some(Errno::NOTCONN | Errno::CONNABORTED | Errno::NODEV) => {
            "the mount has ended: its server died, or it was unmounted; what was synced is there when it is mounted again"
                .into()
        }
        // the server's own words
        None => e.to_string(),
        _ => host_error(e),
    }
}
