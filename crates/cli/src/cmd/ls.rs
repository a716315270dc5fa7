//! `braidfs ls`: lists directories of an unmounted volume.

use crate::failure::{Failure, Outcome};
use crate::text;
use crate::tree::volume::{Entry, VolumeTree};
use crate::tree::{MET_BEFORE, Target, Tree};
use braidfs::{Attr, FileKind};
use std::collections::HashSet;
use std::ffi::OsString;
use std::fmt::Display;
use std::io::{BufWriter, Write};

/// List directories of an unmounted volume
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  braidfs ls disk.img\n  braidfs ls -l disk.img /etc\n  braidfs ls -lR disk.img:/home\n\n\
    Times are in UTC."
)]
pub struct Args {
    /// Permissions, links, owner, group, size, time
    #[arg(short = 'l', long)]
    long: bool,
    /// Directories below, too
    #[arg(short = 'R', long)]
    recursive: bool,
    /// Names that start with a dot, too
    #[arg(short = 'a', long)]
    all: bool,
    /// Show inode numbers, too
    #[arg(short = 'i', long)]
    inode: bool,
    /// Device or image (several of one volume: joined by commas), or DEVICE:PATH
    device: OsString,
    /// Files or directories in the volume [default: /]
    #[arg(value_name = "PATH")]
    paths: Vec<OsString>,
}

pub fn run(args: &Args) -> Outcome {
    let (device, mut paths) = Target::with_paths(&args.device, &args.paths);
    if paths.is_empty() {
        paths.push(b"/".to_vec());
    }
    let tree = VolumeTree::open(&device, false)?;
    let mut list =
        Lister { args, tree: &tree, out: BufWriter::new(std::io::stdout().lock()), failed: false, first: true };
    let titles = args.recursive || paths.len() > 1;
    for path in &paths {
        list.path(path, titles)?;
    }
    list.out.flush().map_err(|e| Failure::output(&e))?;
    let failed = list.failed;
    drop(list);
    tree.close()?;
    Ok(u8::from(failed))
}

struct Lister<'a, W: Write> {
    args: &'a Args,
    tree: &'a VolumeTree,
    out: W,
    failed: bool,
    first: bool,
}

impl<W: Write> Lister<'_, W> {
    fn path(&mut self, path: &[u8], titles: bool) -> Result<(), Failure> {
        // As ls: a symlink that is named is followed to a directory, but `-l` shows the link.
        let attr = match self.tree.attr(path, !self.args.long || path.ends_with(b"/")) {
            Ok(attr) => attr,
            Err(e) => return self.report(path, e),
        };
        if attr.kind() != FileKind::Dir {
            self.first = false;
            return self.entry(path, &Entry { name: path.to_vec(), ino: attr.ino, attr: Ok(attr) });
        }
        let mut stack = vec![(path.to_vec(), attr.ino)];
        let mut seen = HashSet::new();
        while let Some((path, ino)) = stack.pop() {
            if !seen.insert(ino) {
                self.report(&path, MET_BEFORE)?;
                continue;
            }
            let mut entries = match self.tree.entries(ino) {
                Ok(entries) => entries,
                Err(e) => {
                    self.report(&path, e)?;
                    continue;
                }
            };
            entries.retain(|e| self.args.all || !e.name.starts_with(b"."));
            entries.sort_by(|a, b| a.name.cmp(&b.name));
            if titles {
                let gap = if std::mem::take(&mut self.first) { "" } else { "\n" };
                let title = if path.is_empty() { "/".into() } else { text::name(&path) };
                writeln!(self.out, "{gap}{title}:").map_err(|e| Failure::output(&e))?;
            }
            for entry in &entries {
                self.entry(&text::join(&path, &entry.name), entry)?;
            }
            if self.args.recursive {
                let below = entries.iter().rev().filter(|e| e.is_dir_below());
                stack.extend(below.map(|e| (text::join(&path, &e.name), e.ino)));
            }
        }
        Ok(())
    }

    fn entry(&mut self, path: &[u8], entry: &Entry) -> Result<(), Failure> {
        let mut line = String::new();
        if self.args.inode {
            line += &format!("{:>8} ", entry.ino.0);
        }
        if self.args.long {
            line += &entry.attr.as_ref().map_or_else(|_| unknown(), columns);
        }
        line += &text::name(&entry.name);
        match &entry.attr {
            Ok(a) if self.args.long && a.kind() == FileKind::Symlink => match self.tree.volume().readlink(a.ino) {
                Ok(target) => line += &format!(" -> {}", text::name(&target)),
                Err(e) => self.report(path, e)?,
            },
            Ok(_) => {}
            Err(e) => self.report(path, e)?,
        }
        writeln!(self.out, "{line}").map_err(|e| Failure::output(&e))
    }

    /// Goes on with the rest of the list.
    fn report(&mut self, path: &[u8], e: impl Display) -> Result<(), Failure> {
        self.out.flush().map_err(|e| Failure::output(&e))?;
        crate::complain(format_args!("cannot list {}: {e}", self.tree.show(path)));
        self.failed = true;
        Ok(())
    }
}

/// What `-l` shows before the name.
fn columns(a: &Attr) -> String {
    let size = match a.kind() {
        FileKind::Char | FileKind::Block => {
            format!("{}, {}", rustix::fs::major(a.rdev), rustix::fs::minor(a.rdev))
        }
        _ => a.size.to_string(),
    };
    let (mode, time) = (text::mode(a), text::time(a.mtime));
    format!("{mode} {:>3} {:>5} {:>5} {size:>12} {time} ", a.nlink, a.uid, a.gid)
}

/// The same of an inode that cannot be read, as ls has it.
fn unknown() -> String {
    format!("{:?<10} {:>3} {:>5} {:>5} {:>12} {:<19} ", "", "?", "?", "?", "?", "?")
}
