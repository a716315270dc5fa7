//! `braidfs rm`: removes files of an unmounted volume.

use crate::failure::Outcome;
use crate::text;
use crate::tree::volume::VolumeTree;
use crate::tree::{FOREIGN, MET_BEFORE, Target, Tree};
use braidfs::{Error, FileKind, InodeNo};
use std::collections::HashSet;
use std::ffi::OsString;
use std::fmt::Display;

/// Remove files of an unmounted volume
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  braidfs rm disk.img /tmp/x\n  braidfs rm -r disk.img:/old")]
pub struct Args {
    /// Directories and all below
    #[arg(short, long)]
    recursive: bool,
    /// No complaint about names that do not exist
    #[arg(short, long)]
    force: bool,
    /// Device or image (several of one volume: joined by commas), or DEVICE:PATH
    device: OsString,
    /// What to remove
    #[arg(value_name = "PATH")]
    paths: Vec<OsString>,
}

pub fn run(args: &Args) -> Outcome {
    let (device, paths) = Target::with_some_paths("rm", &args.device, &args.paths)?;
    let tree = VolumeTree::open(&device, true)?;
    let mut failed = false;
    for path in &paths {
        failed |= match remove(&tree, path, args.recursive) {
            Ok(whole) => !whole,
            Err(Error::NotFound) if args.force => false,
            Err(Error::IsDir) => report(&tree, path, format!("{}: remove it with -r", Error::IsDir)),
            Err(e) => report(&tree, path, e),
        };
    }
    tree.close()?;
    Ok(u8::from(failed))
}

/// Tells of a failure; true, for "something failed".
fn report(tree: &VolumeTree, path: &[u8], why: impl Display) -> bool {
    crate::complain(format_args!("cannot remove {}: {why}", tree.show(path)));
    true
}

enum Step {
    /// Empty the directory, then remove it.
    Enter { dir: InodeNo, name: Vec<u8>, ino: InodeNo, path: Vec<u8> },
    /// All that could be removed from it is.
    Leave { dir: InodeNo, name: Vec<u8>, path: Vec<u8> },
}

/// Depth first with a stack of its own: a volume's tree may be deeper than this program's stack. One thing that cannot be
/// removed is reported and the rest is removed, but for the directories that it lies in: whether all is.
fn remove(tree: &VolumeTree, path: &[u8], recursive: bool) -> Result<bool, Error> {
    let (dir, name) = tree.parent(path)?;
    let attr = tree.volume().lookup(dir, name)?;
    if attr.kind() != FileKind::Dir {
        // as rm(1): a slash at the end says that a directory is meant, and what a symlink leads to is not removed by it
        if path.ends_with(b"/") {
            return Err(Error::NotDir);
        }
        return tree.volume().unlink(dir, name).map(|()| true);
    }
    if !recursive {
        return Err(Error::IsDir);
    }
    let mut stack = vec![Step::Enter { dir, name: name.to_vec(), ino: attr.ino, path: path.to_vec() }];
    // whether something of the directories that the walk is in could not be removed; the first stands for what was named
    let mut kept = vec![false];
    let mut seen = HashSet::new();
    while let Some(step) = stack.pop() {
        match step {
            Step::Leave { dir, name, path } => {
                let failed = kept.pop().unwrap_or(false)
                    || tree.volume().rmdir(dir, &name).is_err_and(|e| report(tree, &path, e));
                note(&mut kept, failed);
            }
            Step::Enter { ino, path, .. } if !seen.insert(ino) => note(&mut kept, report(tree, &path, MET_BEFORE)),
            // what an entry leads to may be above, or not be below what was named at all
            Step::Enter { dir, ino, ref path, .. } if !matches!(tree.volume().lookup(ino, b".."), Ok(up) if up.ino == dir) =>
            {
                note(&mut kept, report(tree, path, FOREIGN));
            }
            Step::Enter { dir, name, ino, path } => {
                let mut failed = false;
                let entries = tree.entries(ino).unwrap_or_else(|e| {
                    failed = report(tree, &path, e);
                    Vec::new()
                });
                stack.push(Step::Leave { dir, name, path: path.clone() });
                for entry in entries.into_iter().filter(|e| e.name != b"." && e.name != b"..") {
                    let below = text::join(&path, &entry.name);
                    if entry.is_dir_below() {
                        stack.push(Step::Enter { dir: ino, name: entry.name, ino: entry.ino, path: below });
                    } else {
                        let removed = entry.attr.and_then(|_| tree.volume().unlink(ino, &entry.name));
                        failed |= removed.is_err_and(|e| report(tree, &below, e));
                    }
                }
                kept.push(failed);
            }
        }
    }
    Ok(kept == [false])
}

/// Of the directory that the walk is in.
fn note(kept: &mut [bool], failed: bool) {
    if let Some(last) = kept.last_mut() {
        *last |= failed;
    }
}
