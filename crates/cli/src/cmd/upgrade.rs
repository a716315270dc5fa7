//! `braidfs upgrade`: a mount goes on with another program, without an unmount.

use crate::cmd::umount::is_braidfs;
use crate::failure::{Failure, Outcome, host_error, mount_code};
use crate::mountinfo::{self, Mount};
use braidfs_fuse::control;
use rustix::io::Errno;
use rustix::thread::{Gid, Uid, set_thread_res_gid, set_thread_res_uid};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

/// Go on with a mount by another version of the program, without unmounting it
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Exit codes: 0 the other program serves, 1 wrong usage, 32 it does not: the old one goes on, or the mount has ended; the message says which.\n\n\
    Examples:\n  braidfs upgrade /mnt                                  with the program of this command\n  \
    braidfs upgrade --program /opt/new/braidfs /mnt       with another one\n  \
    findmnt -nlo TARGET -t fuse.braidfs,fuseblk.braidfs | xargs -rn1 braidfs upgrade     all mounts\n\n\
    Open files, working directories, locks and maps stay as they are; calls that come meanwhile wait, as a rule some tenths\n\
    of a second. The old process makes all durable and closes the volume, the new one opens it and says so, the old one\n\
    ends. Where anything fails before that the old process goes on. Root may, and the user who mounted it.\n\n\
    Not of a mount whose requests come through io_uring (see `braidfs mount --help`, transport=), of one that was\n\
    mounted read-only and made writable since, nor while a scrub of it runs: the command says why, and nothing happens.\n\
    mounted.md in /usr/share/doc/braidfs (docs/ of the sources) has the rest."
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
    let mount = mountinfo::at(&target).ok_or_else(|| fail("nothing is mounted there"))?;
    if !is_braidfs(&mount) {
        return Err(fail(&format!("{} is mounted there, not braidfs", mount.kind)));
    }
    // As the server sees it: not by a name that says which command is meant.
    let program = match &args.program {
        Some(path) => std::fs::canonicalize(path).map_err(|e| (path.clone(), e)),
        None => std::env::current_exe().map_err(|e| (PathBuf::from("/proc/self/exe"), e)),
    };
    let program = program.map_err(|(path, e)| fail(&format!("{}: {}", path.display(), host_error(&e))))?;
    let root = enter(&target, &mount).map_err(|e| fail(&says(&e)))?;
    let upgraded = control::upgrade(&root, &program, args.timeout).map_err(|e| fail(&says(&e)))?;
    if !args.quiet {
        crate::say(format_args!("{show}: served by braidfs {}, process {}", upgraded.version, upgraded.pid))?;
    }
    Ok(0)
}

/// Opens the root of the mount. One of a user's own lets nobody else in, root neither: then as that user.
fn enter(target: &Path, mount: &Mount) -> io::Result<File> {
    match File::open(target) {
        Err(e) if Errno::from_io_error(&e) == Some(Errno::ACCESS) && rustix::process::geteuid().is_root() => {
            let number = |name: &str| {
                let value = mount.super_options.split(',').find_map(|o| o.strip_prefix(name)?.strip_prefix('='));
                value.and_then(|v| v.parse::<u32>().ok())
            };
            let (Some(user), Some(group)) = (number("user_id"), number("group_id")) else { return Err(e) };
            // This process has one thread, and does nothing else after it.
            let (user, group) = (Uid::from_raw(user), Gid::from_raw(group));
            set_thread_res_gid(group, group, group)?;
            set_thread_res_uid(user, user, user)?;
            File::open(target)
        }
        opened => opened,
    }
}

fn says(e: &io::Error) -> String {
    match Errno::from_io_error(e) {
        Some(Errno::PERM) => "only root may, and who mounted it".into(),
        Some(Errno::NOTTY) => "its server is of an older version: unmount it, and mount it with the new program".into(),
        Some(Errno::NOTCONN | Errno::CONNABORTED | Errno::NODEV) => {
            "the mount has ended: its server died, or it was unmounted; what was synced is there when it is mounted again"
                .into()
        }
        _ => host_error(e),
    }
}
