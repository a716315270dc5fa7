//! `braidfs defrag`: files that were written in pieces are made whole, while their volume is in use.

use crate::cmd::fsck::Bar;
use crate::failure::{Failure, Outcome, host_error, server_error};
use crate::{mounted, text};
use braidfs::Pieces;
use braidfs_fuse::control;
use rustix::io::Errno;
use serde::Serialize;
use std::collections::HashSet;
use std::fs::{self, File, Metadata};
use std::io::{self, IsTerminal};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Files shown by name.
const SHOWN: usize = 10;

/// Make files whole that lie in many pieces, while their volume is mounted
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Exit codes: 0 all was looked at, and moved where that is worth it, 1 something failed, or wrong usage.\n\n\
    Examples:\n  braidfs defrag /mnt            all files of the volume that is mounted there\n  \
    braidfs defrag /mnt/db /mnt/f  one directory with all below it, and one file\n  \
    braidfs defrag -c /mnt         only say how many pieces there are\n\n\
    Parts of files are moved where their pieces have less than 128 KiB on average: read, written side by side, and where \
    they lay becomes free with the same commit. A crash at any moment changes nothing of their content. Others may read and \
    write meanwhile. Files that are always overwritten in place (chattr +C, fallocate) are left as they are. A mount does the \
    same by itself while nothing else goes on and room is plenty, but with -o nodefrag."
)]
pub struct Args {
    /// Move nothing, only report
    #[arg(short = 'c', long = "check")]
    check: bool,
    /// The result as JSON
    #[arg(long)]
    json: bool,
    /// Print nothing but errors
    #[arg(short, long, conflicts_with = "json")]
    quiet: bool,
    /// Mount points, directories, files
    #[arg(required = true, value_name = "MOUNTPOINT|PATH")]
    paths: Vec<PathBuf>,
}

/// Sums over files.
#[derive(Debug, Default, Clone, Copy, Serialize)]
struct Sum {
    /// Blocks of 4 KiB.
    blocks: u64,
    pieces: u64,
    /// The least that there can be.
    least: u64,
}

impl Sum {
    fn add(&mut self, p: &Pieces) {
        self.blocks += p.blocks;
        self.pieces += p.pieces;
        self.least += p.least;
    }
}

#[derive(Debug, Serialize)]
struct Worst {
    path: String,
    blocks: u64,
    pieces: u64,
    least: u64,
}

#[derive(Debug, Default, Serialize)]
struct Report {
    /// Regular files that were looked at.
    files: u64,
    /// Of these, files in many short pieces.
    in_pieces: u64,
    /// Files that are always overwritten in place.
    stay: u64,
    /// Blocks that were moved.
    moved: u64,
    before: Sum,
    /// As `before`, with `--check`.
    after: Sum,
    /// Those with the most pieces, before anything was moved.
    worst: Vec<Worst>,
    errors: Vec<String>,
}

/// Files of several names that were met, by volume and number.
type Seen = HashSet<(u64, u64)>;

/// A regular file, and an open directory of its volume.
struct Found<'d> {
    path: PathBuf,
    meta: Metadata,
    dir: &'d File,
}

pub fn run(args: &Args) -> Outcome {
    one_user(&args.paths)?;
    let bar = Bar::new(io::stderr().is_terminal() && !args.json && !args.quiet);
    let mut r = Report::default();
    let mut seen = Seen::new();
    for path in &args.paths {
        // a path that is wrong ends it: nothing else was asked for
        let look = || fs::symlink_metadata(path);
        let meta = look().or_else(|e| mounted::enter(path).map_err(|_| e).and_then(|_| look()));
        let meta = meta.map_err(|e| Failure::at("cannot look at", path.display(), mounted::host_says(path, &e)))?;
        let dir = directory_of(path, &meta)?;
        if meta.is_dir() {
            below(path, &meta, &dir, &bar, args, &mut seen, &mut r);
        } else if meta.is_file() {
            one(&Found { path: path.clone(), meta, dir: &dir }, &bar, args, &mut seen, &mut r);
        } else {
            return Err(
                Failure::at("cannot defragment", path.display(), "no regular file and no directory").with_code(1)
            );
        }
    }
    bar.finish();
    tell(args, &r)
}

/// Refuses paths on mounts that let different users in alone: who became one of them is neither root nor another one.
fn one_user(paths: &[PathBuf]) -> Result<(), Failure> {
    let first = mounted::closed_by(&paths[0]);
    let Some(other) = paths.iter().find(|path| mounted::closed_by(path) != first) else { return Ok(()) };
    let why = format!("it cannot be looked at as the same user as {}: one command for each", paths[0].display());
    Err(Failure::at("cannot defragment", other.display(), why).with_code(1))
}

/// An open directory of the volume that a path is of: the server is asked through it.
fn directory_of(path: &Path, meta: &Metadata) -> Result<File, Failure> {
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let at = if meta.is_dir() { path } else { parent };
    let failed = |e: io::Error| Failure::at("cannot open", at.display(), host_error(&e));
    let dir = File::open(at).map_err(failed)?;
    if dir.metadata().map_err(failed)?.dev() != meta.dev() {
        return Err(Failure::at("cannot defragment", path.display(), "something is mounted on it").with_code(1));
    }
    match control::defrag_look(&dir, dir.metadata().map_err(failed)?.ino()) {
        // it is asked about a directory: any other answer is one of ours
        Err(e)
            if matches!(
                Errno::from_io_error(&e),
                Some(Errno::PERM | Errno::NOTTY | Errno::INVAL | Errno::OPNOTSUPP)
            ) =>
        {
            Err(Failure::at("cannot defragment", path.display(), why(&e)))
        }
        _ => Ok(dir),
    }
}

fn why(e: &io::Error) -> String {
    match Errno::from_io_error(e) {
        Some(Errno::NOTTY | Errno::OPNOTSUPP | Errno::INVAL) => {
            "it is on no mounted braidfs: give a mount point or a path on one (or the server is of an older version: mount it again)".into()
        }
        Some(Errno::NOSPC) => "too little free room lies together: make some, and try again".into(),
        _ => server_error(e),
    }
}

/// All files below a directory, on its volume; symbolic links are not followed.
fn below(top: &Path, meta: &Metadata, dir: &File, bar: &Bar, args: &Args, seen: &mut Seen, r: &mut Report) {
    let mut todo = vec![top.to_path_buf()];
    while let Some(at) = todo.pop() {
        let entries = match fs::read_dir(&at) {
            Ok(entries) => entries,
            Err(e) => {
                r.errors.push(format!("{}: {}", at.display(), host_error(&e)));
                continue;
            }
        };
        for entry in entries {
            let found = entry.and_then(|e| Ok((e.path(), e.metadata()?)));
            match found {
                Ok((path, m)) if m.dev() != meta.dev() => drop(path),
                Ok((path, m)) if m.is_dir() => todo.push(path),
                Ok((path, m)) if m.is_file() => one(&Found { path, meta: m, dir }, bar, args, seen, r),
                Ok(_) => {}
                // removed meanwhile
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => r.errors.push(format!("{}: {}", at.display(), host_error(&e))),
            }
        }
    }
}

fn one(f: &Found<'_>, bar: &Bar, args: &Args, seen: &mut Seen, r: &mut Report) {
    let ino = f.meta.ino();
    if f.meta.nlink() > 1 && !seen.insert((f.meta.dev(), ino)) {
        return;
    }
    let gone =
        |e: &io::Error| Errno::from_io_error(e) == Some(Errno::NOENT) || Errno::from_io_error(e) == Some(Errno::STALE);
    let before = match control::defrag_look(f.dir, ino) {
        Ok(p) => p,
        Err(e) if gone(&e) => return,
        Err(e) => return r.errors.push(format!("{}: {}", f.path.display(), why(&e))),
    };
    r.files += 1;
    r.before.add(&before);
    r.stay += u64::from(before.stays);
    r.in_pieces += u64::from(before.are_short());
    note_worst(&mut r.worst, &f.path, &before);
    let mut after = before;
    if !args.check && !before.stays && before.pieces > before.least {
        match whole(f, bar, &mut r.moved) {
            Ok(()) => {}
            Err(e) if gone(&e) => {}
            Err(e) => r.errors.push(format!("{}: {}", f.path.display(), why(&e))),
        }
        after = control::defrag_look(f.dir, ino).unwrap_or(before);
    }
    r.after.add(&after);
}

fn whole(f: &Found<'_>, bar: &Bar, moved: &mut u64) -> io::Result<()> {
    let mut from = Some(0);
    while let Some(at) = from {
        bar.show(&f.path.file_name().unwrap_or_default().to_string_lossy(), at, f.meta.len().max(at));
        let done = control::defrag_step(f.dir, f.meta.ino(), at)?;
        *moved += done.moved;
        from = done.next;
    }
    Ok(())
}

fn note_worst(worst: &mut Vec<Worst>, path: &Path, p: &Pieces) {
    let extra = |pieces: u64, least: u64| pieces.saturating_sub(least);
    let at = worst.partition_point(|w| extra(w.pieces, w.least) >= extra(p.pieces, p.least));
    if p.are_short() && at < SHOWN {
        let path = path.display().to_string();
        worst.insert(at, Worst { path, blocks: p.blocks, pieces: p.pieces, least: p.least });
        worst.truncate(SHOWN);
    }
}

fn tell(args: &Args, r: &Report) -> Outcome {
    if args.json {
        let json = serde_json::to_string_pretty(r).map_err(|e| Failure::new(format!("defrag: {e}")))?;
        crate::say(format_args!("{json}"))?;
    } else if !args.quiet {
        if args.check {
            for w in &r.worst {
                let size = text::size(w.blocks * 4096);
                crate::say(format_args!("{}: {size} in {} pieces, {} at least", w.path, w.pieces, w.least))?;
            }
        }
        let files = text::count(r.files, "file", "files");
        let (size, least) = (text::size(r.before.blocks * 4096), r.before.least);
        let short = text::count(r.in_pieces, "of them is", "of them are");
        let stay =
            if r.stay > 0 { format!("; {} overwritten in place, left as they are", r.stay) } else { String::new() };
        crate::say(format_args!(
            "{files}, {size} in {} pieces, {least} at least; {short} in many short ones{stay}",
            r.before.pieces
        ))?;
        if !args.check {
            crate::say(format_args!("moved {}: {} pieces now", text::size(r.moved * 4096), r.after.pieces))?;
        }
    }
    for e in &r.errors {
        crate::complain(format_args!("{e}"));
    }
    Ok(u8::from(!r.errors.is_empty()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_come_first_and_only_some() {
        let mut all = Vec::new();
        for n in 0..40u64 {
            let pieces = n * 7 % 40 + 2;
            note_worst(&mut all, Path::new(&format!("{n}")), &Pieces { blocks: 41, pieces, least: 1, stays: false });
        }
        let pieces: Vec<u64> = all.iter().map(|w| w.pieces).collect();
        assert_eq!(pieces, (32..42).rev().collect::<Vec<_>>());
        note_worst(&mut all, Path::new("whole"), &Pieces { blocks: 1 << 20, pieces: 900, least: 1, stays: false });
        note_worst(&mut all, Path::new("stays"), &Pieces { blocks: 41, pieces: 41, least: 1, stays: true });
        assert_eq!(all.len(), SHOWN);
        assert!(all.iter().all(|w| w.path != "whole" && w.path != "stays"));
    }
}
