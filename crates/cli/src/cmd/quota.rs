//! `braidfs quota`: limits of users, groups and directories of a mounted volume.

use crate::cmd::limits::{self, open, say_json};
use crate::cmd::tenant::{Limit, parse, parse_number, parse_time};
use crate::failure::{Failure, Outcome};
use crate::{names, text};
use braidfs::{Quota, QuotaOwner, Timestamp};
use braidfs_fuse::control::{self, QuotaChange, QuotaSubject};
use serde::Serialize;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Limit what users, groups, or directory trees, may use of a mounted volume
#[derive(Debug, clap::Args)]
#[command(after_help = "Exit codes: 0 done, 1 it failed or wrong usage.\n\n\
    Examples:\n  braidfs quota set --user alice --space 10G --inodes 100000 /mnt\n  \
    braidfs quota set --user alice --soft-space 8G --grace 3d /mnt   8 GiB; more for three days only\n  \
    braidfs quota set --group staff --space 50G /mnt\n  \
    braidfs quota set --directory /mnt/web --space 20G /mnt          all that lies below /mnt/web\n  \
    braidfs quota set --user alice --space none /mnt\n  \
    braidfs quota show --user alice /mnt\n  \
    braidfs quota report /mnt                                        all with limits or usage\n  \
    braidfs quota remove --directory /mnt/web /mnt\n\n\
    Space is the blocks of files and directories, not their inodes. At the limit of a user or group writes get EDQUOT; at that \
    of a directory ENOSPC, and `stat -f` below it shows its numbers. Limits of users and groups do not hold for root. \
    Files that do not count for a directory with limits cannot be renamed or linked into it (EXDEV): mv copies them. Setting the \
    first limit of a volume counts all that is there. Root and the user who mounted may set limits; anybody may look.")]
pub struct Args {
    #[command(subcommand)]
    call: Call,
}

#[derive(Debug, clap::Args)]
#[group(required = true, multiple = false)]
struct Whose {
    /// A user, by name or number
    #[arg(long)]
    user: Option<String>,
    /// A group, by name or number: all files of that group, whoever owns them
    #[arg(long)]
    group: Option<String>,
    /// A directory, with all that lies below it
    #[arg(long, value_name = "DIR")]
    directory: Option<PathBuf>,
    /// A directory that has limits, by the number of its project: also one that was removed
    #[arg(long, value_name = "N")]
    project: Option<u32>,
}

#[derive(Debug, clap::Subcommand)]
enum Call {
    /// Set or change limits, while they are in use
    #[command(group = clap::ArgGroup::new("limits")
        .args(["space", "soft_space", "inodes", "soft_inodes", "grace"])
        .required(true)
        .multiple(true))]
    Set {
        #[command(flatten)]
        whose: Whose,
        /// Most space: 64M, 10G, or none. Files up to 3400 bytes and attributes take none of it: set --inodes, too
        #[arg(long, value_parser = parse, value_name = "SIZE")]
        space: Option<Limit>,
        /// Space that may be exceeded for a while only
        #[arg(long, value_parser = parse, value_name = "SIZE")]
        soft_space: Option<Limit>,
        /// Most inodes (files, directories, links): 1000, or none
        #[arg(long, value_parser = parse_number, value_name = "N")]
        inodes: Option<Limit>,
        /// Inodes that may be exceeded for a while only
        #[arg(long, value_parser = parse_number, value_name = "N")]
        soft_inodes: Option<Limit>,
        /// For how long soft limits may be exceeded: 30s, 12h, 7d [default: 7d]
        #[arg(long, value_parser = parse_time, value_name = "TIME")]
        grace: Option<Duration>,
        /// The result as JSON
        #[arg(long)]
        json: bool,
        /// The mount point, or any directory of the volume
        mountpoint: PathBuf,
    },
    /// Show limits of a user, group or directory, and what is used
    Show {
        #[command(flatten)]
        whose: Whose,
        /// As JSON
        #[arg(long)]
        json: bool,
        /// The mount point, or any directory of the volume
        mountpoint: PathBuf,
    },
    /// Show all that have limits or, where there is any limit, use anything
    Report {
        /// As JSON
        #[arg(long)]
        json: bool,
        /// The mount point, or any directory of the volume
        mountpoint: PathBuf,
    },
    /// Take the limits away; a directory is an ordinary one from then on
    Remove {
        #[command(flatten)]
        whose: Whose,
        /// What they were, as JSON
        #[arg(long)]
        json: bool,
        /// The mount point, or any directory of the volume
        mountpoint: PathBuf,
    },
}

#[derive(Serialize)]
struct Report {
    /// Of a user: its number.
    user: Option<u32>,
    /// Of a group: its number.
    group: Option<u32>,
    /// Name of the user or group, where the number has one.
    name: Option<String>,
    /// Of a directory: the number that its inodes carry.
    project: Option<u32>,
    /// Number of the directory, while it has limits.
    directory: Option<u64>,
    /// Its path, where that is known: it was named, or lies in the directory that was.
    path: Option<String>,
    /// Bytes.
    used: u64,
    space: Option<u64>,
    soft_space: Option<u64>,
    /// How many it has, as of a tenant and in `stats --json`.
    inodes: u64,
    /// The same, by its older name.
    inodes_used: u64,
    /// Most that it may have.
    inodes_max: Option<u64>,
    soft_inodes: Option<u64>,
    grace_seconds: u64,
    /// Seconds since 1970.
    space_exceeded_since: Option<u64>,
    inodes_exceeded_since: Option<u64>,
    /// A soft limit is a hard one by now.
    grace_is_over: bool,
}

impl From<Quota> for Report {
    fn from(q: Quota) -> Self {
        let (user, group, project) = match q.owner {
            QuotaOwner::User(n) => (Some(n), None, None),
            QuotaOwner::Group(n) => (None, Some(n), None),
            QuotaOwner::Project(n) => (None, None, Some(n)),
        };
        Self {
            user,
            group,
            name: user.and_then(names::user).or_else(|| group.and_then(names::group)),
            project,
            directory: q.directory.map(|d| d.0),
            path: None,
            used: q.used,
            space: q.limits.space,
            soft_space: q.limits.soft_space,
            inodes: q.inodes,
            inodes_used: q.inodes,
            inodes_max: q.limits.inodes,
            soft_inodes: q.limits.soft_inodes,
            grace_seconds: q.limits.grace.as_secs(),
            space_exceeded_since: q.space_exceeded_since,
            inodes_exceeded_since: q.inodes_exceeded_since,
            grace_is_over: q.grace_is_over,
        }
    }
}

pub fn run(args: &Args) -> Outcome {
    match &args.call {
        Call::Set { whose, space, soft_space, inodes, soft_inodes, grace, json, mountpoint } => {
            let limits = [space, soft_space, inodes, soft_inodes].map(|l| l.map(|l| l.0));
            let (dir, of) = whose.open(mountpoint)?;
            let set = control::quota_set(&dir, of, &QuotaChange { limits, grace: *grace });
            tell(&whose.report(set.map_err(|e| whose.refused(mountpoint, &e))?), *json)
        }
        Call::Show { whose, json, mountpoint } => {
            let (dir, of) = whose.open(mountpoint)?;
            let shown = control::quota_show(&dir, of);
            tell(&whose.report(shown.map_err(|e| whose.refused(mountpoint, &e))?), *json)
        }
        Call::Report { json, mountpoint } => {
            let dir = open(mountpoint)?;
            let all = control::quotas(&dir).map_err(|e| refused(mountpoint, "nothing", &e))?;
            let mut all: Vec<Report> = all.into_iter().map(Report::from).collect();
            find_paths(mountpoint, &dir, &mut all);
            if *json {
                return say_json("quota", &all);
            }
            if all.is_empty() {
                crate::say(format_args!("no limits: nothing is counted"))?;
            }
            all.iter().try_for_each(|q| tell(q, false).map(drop))?;
            Ok(0)
        }
        Call::Remove { whose, json, mountpoint } => {
            let (dir, of) = whose.open(mountpoint)?;
            let was = if *json { control::quota_show(&dir, of).ok() } else { None };
            control::quota_remove(&dir, of).map_err(|e| whose.refused(mountpoint, &e))?;
            was.map_or(Ok(0), |was| tell(&whose.report(was), true))
        }
    }
}

/// Of directories that lie right in `above`, which `dir` is, the paths. What is mounted there has numbers of its own.
fn find_paths(above: &Path, dir: &File, all: &mut [Report]) {
    if all.iter().all(|q| q.directory.is_none()) {
        return;
    }
    let Ok(volume) = dir.metadata().map(|m| m.dev()) else { return };
    for entry in std::fs::read_dir(above).into_iter().flatten().flatten() {
        let found = entry.metadata().ok().filter(|m| m.is_dir() && m.dev() == volume);
        let is_it = |q: &&mut Report| found.as_ref().is_some_and(|m| q.directory == Some(m.ino()));
        if let Some(q) = all.iter_mut().find(is_it) {
            q.path = Some(entry.path().display().to_string());
        }
    }
}

impl Whose {
    /// What it has, with the path that was named.
    fn report(&self, q: Quota) -> Report {
        Report { path: self.directory.as_ref().map(|d| d.display().to_string()), ..q.into() }
    }

    /// What to ask on, and about what.
    fn open(&self, mountpoint: &Path) -> Result<(File, QuotaSubject), Failure> {
        // names first: who opens another user's mount cannot ask for numbers any more
        let subject = match (self.project, &self.group, &self.directory) {
            (Some(n), ..) => QuotaSubject::Project(n),
            (_, Some(group), _) => QuotaSubject::Group(names::number_of_group(group)?),
            (.., Some(_)) => QuotaSubject::Directory,
            _ => QuotaSubject::User(names::number_of_user(self.user.as_deref().unwrap_or_default())?),
        };
        let mount = open(mountpoint)?;
        let Some(directory) = &self.directory else { return Ok((mount, subject)) };
        let dir = open(directory)?;
        let device = |f: &File| f.metadata().map(|m| m.dev()).ok();
        if device(&dir) != device(&mount) {
            let why = format!("it does not lie on the volume that is mounted at {}", mountpoint.display());
            return Err(Failure::at("quota", directory.display(), why));
        }
        Ok((dir, subject))
    }

    fn refused(&self, mountpoint: &Path, e: &std::io::Error) -> Failure {
        if let Some(group) = &self.group {
            return refused(mountpoint, &format!("group {group}"), e);
        }
        match (&self.user, &self.directory, self.project) {
            (Some(user), ..) => refused(mountpoint, &format!("user {user}"), e),
            (_, Some(dir), _) => refused(dir, "the directory", e),
            (_, _, Some(n)) => refused(mountpoint, &format!("project {n}"), e),
            _ => refused(mountpoint, "nothing", e),
        }
    }
}

fn refused(place: &Path, what: &str, e: &std::io::Error) -> Failure {
    limits::refused("quota", place, &format!("{what} has no limits, and uses nothing that is counted"), e)
}

fn tell(q: &Report, json: bool) -> Outcome {
    if json {
        return say_json("quota", q);
    }
    let of = |n: u32| q.name.as_ref().map_or_else(|| n.to_string(), |name| text::name(name.as_bytes()));
    let whose = match (q.user, q.group, q.project, q.directory) {
        (Some(n), ..) => format!("user {}", of(n)),
        (_, Some(n), ..) => format!("group {}", of(n)),
        (.., n, Some(dir)) => {
            let dir = q.path.as_ref().map_or_else(|| format!("of inode {dir}"), |p| text::name(p.as_bytes()));
            format!("directory {dir} (project {})", n.unwrap_or(0))
        }
        (.., n, None) => format!("project {} (no directory)", n.unwrap_or(0)),
    };
    let size = |n: Option<u64>| n.map_or_else(|| "no limit".into(), |n| format!("{} at most", text::size(n)));
    let count = |n: Option<u64>| n.map_or_else(|| "no limit".into(), |n| format!("{n} at most"));
    crate::say(format_args!(
        "{whose}: {} used, {}; {}, {}",
        text::size(q.used),
        size(q.space),
        text::count(q.inodes, "inode", "inodes"),
        count(q.inodes_max)
    ))?;
    for (what, soft, since) in [
        ("space", q.soft_space.map(text::size), q.space_exceeded_since),
        ("inodes", q.soft_inodes.map(|n| n.to_string()), q.inodes_exceeded_since),
    ] {
        let Some(soft) = soft else { continue };
        let time = |n: u64| text::time(Timestamp { sec: i64::try_from(n).unwrap_or(0), nsec: 0 });
        let state = match since {
            None => format!("for {}", text::span(q.grace_seconds)),
            Some(at) if q.grace_is_over => {
                format!("exceeded since {} (UTC): held to it until less is in use", time(at))
            }
            Some(at) => format!(
                "exceeded since {}, a hard limit from {} on (UTC)",
                time(at),
                time(at.saturating_add(q.grace_seconds))
            ),
        };
        crate::say(format_args!("  soft limit of {what} {soft}, {state}"))?;
    }
    Ok(0)
}
