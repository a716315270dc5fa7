//! `braidfs tenant`: directory trees of a mounted volume with a domain and limits of their own.

use crate::failure::{Failure, Outcome, host_error};
use crate::{mountinfo, text};
use braidfs_fuse::control::{self, TenantInfo};
use rustix::io::Errno;
use serde::Serialize;
use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Give a directory tree of a mounted volume a domain and limits of its own
#[derive(Debug, clap::Args)]
#[command(after_help = "Exit codes: 0 done, 1 it failed, 2 wrong usage.\n\n\
    Examples:\n  braidfs tenant create --space 20G /mnt/web      a new directory, of at most 20 GiB\n  \
    braidfs tenant set --space 30G /mnt web         more, while it is in use\n  \
    braidfs tenant set --space none /mnt web        as much as the volume has\n  \
    braidfs tenant set --inodes 100000 /mnt web     files, directories and links, its own directory among them\n  \
    braidfs tenant list /mnt\n  \
    braidfs tenant remove /mnt web                  an ordinary directory from now on, with all that is in it\n\n\
    What is made below the directory of a tenant lies in a domain of its own: a journal, an allocator and transactions that\n\
    no other tenant shares. What is moved there from elsewhere counts where it lies. `df` in the directory shows the\n\
    tenant's numbers, as `df -i` does, and ENOSPC comes at its limits. Root may, and who mounted the volume.")]
pub struct Args {
    #[command(subcommand)]
    call: Call,
}

#[derive(Debug, clap::Subcommand)]
enum Call {
    /// Make a directory, the root of a tenant
    Create {
        /// Its name [default: that of the directory]
        #[arg(long)]
        name: Option<String>,
        /// Most that it may use: 64M, 10G, or none
        #[arg(long, value_parser = parse, value_name = "SIZE", default_value = "none")]
        space: Limit,
        /// Most inodes that it may have, its directory among them: 1000, or none
        #[arg(long, value_parser = parse_number, value_name = "N", default_value = "none")]
        inodes: Limit,
        /// The result as JSON
        #[arg(long)]
        json: bool,
        /// The directory; it must not be there yet
        directory: PathBuf,
    },
    /// Change limits of a tenant, while it is in use
    #[command(group = clap::ArgGroup::new("limits").args(["space", "inodes"]).required(true).multiple(true))]
    Set {
        /// Most that it may use: 64M, 10G, or none
        #[arg(long, value_parser = parse, value_name = "SIZE")]
        space: Option<Limit>,
        /// Most inodes that it may have, its directory among them: 1000, or none
        #[arg(long, value_parser = parse_number, value_name = "N")]
        inodes: Option<Limit>,
        /// The result as JSON
        #[arg(long)]
        json: bool,
        /// The mount point, or any directory of the volume
        mountpoint: PathBuf,
        /// The tenant
        name: String,
    },
    /// Show a tenant
    Show {
        /// As JSON
        #[arg(long)]
        json: bool,
        /// The mount point, or any directory of the volume
        mountpoint: PathBuf,
        /// The tenant
        name: String,
    },
    /// List all tenants
    List {
        /// As JSON
        #[arg(long)]
        json: bool,
        /// The mount point, or any directory of the volume
        mountpoint: PathBuf,
    },
    /// Make the root of a tenant an ordinary directory, with all that is in it
    Remove {
        /// The mount point, or any directory of the volume
        mountpoint: PathBuf,
        /// The tenant
        name: String,
    },
}

/// Bytes or inodes, if there is a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Limit(Option<u64>);

fn parse(size: &str) -> Result<Limit, String> {
    match size {
        "none" => Ok(Limit(None)),
        size => match text::parse_size(size)? {
            0 => Err("0 is no limit: write none, or at least 1M".into()),
            n => Ok(Limit(Some(n))),
        },
    }
}

fn parse_number(number: &str) -> Result<Limit, String> {
    match number {
        "none" => Ok(Limit(None)),
        number => match number.parse() {
            Ok(0) => Err("0 is no limit: write none, or at least 1".into()),
            Ok(n) => Ok(Limit(Some(n))),
            Err(_) => Err("a number of inodes, or none".into()),
        },
    }
}

#[derive(Serialize)]
struct Report {
    name: String,
    domain: u32,
    /// Number of the root directory.
    root: u64,
    /// Most bytes that it may use, if there is a limit.
    space: Option<u64>,
    used: u64,
    inodes: u64,
    /// Most inodes that it may have, if there is a limit.
    inodes_max: Option<u64>,
    /// Its domain is read-only.
    failed: bool,
}

impl From<TenantInfo> for Report {
    fn from(t: TenantInfo) -> Self {
        let TenantInfo { name, root, domain, space, used, inodes, inodes_max, failed } = t;
        Self { name, domain, root, space, used, inodes, inodes_max, failed }
    }
}

pub fn run(args: &Args) -> Outcome {
    match &args.call {
        Call::Create { name, space, inodes, json, directory } => {
            create(directory, name.as_deref(), (*space, *inodes), *json)
        }
        Call::Set { space, inodes, json, mountpoint, name } => {
            let set = control::tenant_set(&open(mountpoint)?, name, space.map(|l| l.0), inodes.map(|l| l.0));
            tell(&set.map_err(|e| refused(mountpoint, name, &e))?.into(), *json)
        }
        Call::Show { json, mountpoint, name } => {
            let shown = control::tenant_show(&open(mountpoint)?, name);
            tell(&shown.map_err(|e| refused(mountpoint, name, &e))?.into(), *json)
        }
        Call::List { json, mountpoint } => {
            let all = control::tenants(&open(mountpoint)?).map_err(|e| refused(mountpoint, "", &e))?;
            let all: Vec<Report> = all.into_iter().map(Report::from).collect();
            if *json {
                return say_json(&all);
            }
            all.iter().try_for_each(|t| tell(t, false).map(drop))?;
            Ok(0)
        }
        Call::Remove { mountpoint, name } => {
            control::tenant_remove(&open(mountpoint)?, name).map_err(|e| refused(mountpoint, name, &e))?;
            Ok(0)
        }
    }
}

fn create(directory: &Path, name: Option<&str>, (space, inodes): (Limit, Limit), json: bool) -> Outcome {
    let path = mountinfo::absolute(directory);
    let (Some(parent), Some(entry)) = (path.parent(), path.file_name()) else {
        return Err(Failure::at("cannot make a tenant of", directory.display(), "it has no name"));
    };
    let name = match name.or_else(|| entry.to_str()) {
        Some(name) => name,
        None => {
            return Err(Failure::at(
                "cannot make a tenant of",
                directory.display(),
                "its name is not UTF-8: use --name",
            ));
        }
    };
    let made = control::tenant_create(&open(parent)?, OsStr::as_bytes(entry), name, space.0, inodes.0);
    let made = made.map_err(|e| match Errno::from_io_error(&e) {
        Some(Errno::EXIST) => {
            let why =
                "it is there already: what lies in a directory stays in its domain, so a tenant begins with a new one";
            Failure::at("cannot make a tenant of", directory.display(), why)
        }
        _ => refused(directory, name, &e),
    })?;
    tell(&made.into(), json)
}

fn open(directory: &Path) -> Result<File, Failure> {
    File::open(directory).map_err(|e| Failure::at("cannot open", directory.display(), host_error(&e)))
}

fn refused(place: &Path, name: &str, e: &std::io::Error) -> Failure {
    let why = match Errno::from_io_error(e) {
        Some(Errno::PERM) => "only root may, and who mounted it".into(),
        Some(Errno::NOTTY) => "no braidfs is mounted there, or its server is of an older version".into(),
        Some(Errno::ROFS) => "it is mounted read-only, or its domain failed".into(),
        Some(Errno::NOENT) => format!("there is no tenant {name}"),
        Some(Errno::NOTCONN | Errno::CONNABORTED | Errno::NODEV) => {
            "the volume was unmounted, or its server died".into()
        }
        _ => host_error(e),
    };
    Failure::at("tenant", place.display(), why)
}

fn tell(t: &Report, json: bool) -> Outcome {
    if json {
        return say_json(t);
    }
    let most = t.space.map_or_else(|| "no limit".into(), |n| format!("{} at most", text::size(n)));
    let of = t.inodes_max.map_or_else(String::new, |n| format!(" of {n}"));
    let failed = if t.failed { ", read-only after an error" } else { "" };
    crate::say(format_args!(
        "{}: domain {}, {} used, {most}, {}{of} inodes{failed}",
        t.name,
        t.domain,
        text::size(t.used),
        t.inodes
    ))?;
    Ok(0)
}

fn say_json<T: Serialize>(what: &T) -> Outcome {
    let json = serde_json::to_string_pretty(what).map_err(|e| Failure::new(format!("tenant: {e}")))?;
    crate::say(format_args!("{json}"))?;
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_of_inodes_is_a_number_or_none() {
        assert_eq!(parse_number("none"), Ok(Limit(None)));
        assert_eq!(parse_number("64"), Ok(Limit(Some(64))));
        assert!(parse_number("0").is_err() && parse_number("many").is_err() && parse_number("-1").is_err());
    }

    #[test]
    fn a_limit_is_a_size_or_none() {
        assert_eq!(parse("none"), Ok(Limit(None)));
        assert_eq!(parse("64M"), Ok(Limit(Some(64 << 20))));
        assert!(parse("0").is_err() && parse("much").is_err() && parse("-1").is_err());
    }
}
