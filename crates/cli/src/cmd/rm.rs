//! `braidfs rm`: removes files of an unmounted volume.

use crate::failure::Outcome;
use crate::text;
use crate::tree::volume::VolumeTree;
use crate::tree::{Target, Tree};
use braidfs::{Error, FileKind, InodeNo};
use std::ffi::OsString;

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
    let mut code = 0;
    for path in &paths {
        match remove(&tree, path, args.recursive) {
            Ok(()) => {}
            Err((_, Error::NotFound)) if args.force => {}
            Err((at, e)) => {
                let hint = if matches!(e, Error::IsDir) { ": remove it with -r" } else { "" };
                eprintln!("braidfs: cannot remove {}: {e}{hint}", tree.show(&at));
                code = 1;
            }
        }
    }
    tree.close()?;
    Ok(code)
}

enum Step {
    /// Empty the directory, then remove it.
    Enter { dir: InodeNo, name: Vec<u8>, ino: InodeNo, path: Vec<u8> },
    /// It is empty.
    Leave { dir: InodeNo, name: Vec<u8>, path: Vec<u8> },
}

/// Depth first with a stack of its own: a volume's tree may be deeper than this program's stack.
fn remove(tree: &VolumeTree, path: &[u8], recursive: bool) -> Result<(), (Vec<u8>, Error)> {
    let at = |path: &[u8]| {
        let path = path.to_vec();
        move |e| (path, e)
    };
    let (dir, name) = tree.parent(path).map_err(at(path))?;
    let attr = tree.volume().lookup(dir, name).map_err(at(path))?;
    if attr.kind() != FileKind::Dir {
        return tree.volume().unlink(dir, name).map_err(at(path));
    }
    if !recursive {
        return Err((path.to_vec(), Error::IsDir));
    }
    let mut stack = vec![Step::Enter { dir, name: name.to_vec(), ino: attr.ino, path: path.to_vec() }];
    while let Some(step) = stack.pop() {
        match step {
            Step::Leave { dir, name, path } => tree.volume().rmdir(dir, &name).map_err(at(&path))?,
            Step::Enter { dir, name, ino, path } => {
                let entries = tree.entries(ino).map_err(at(&path))?;
                stack.push(Step::Leave { dir, name, path: path.clone() });
                for entry in entries.into_iter().filter(|e| e.name != b"." && e.name != b"..") {
                    let below = text::join(&path, &entry.name);
                    if entry.attr.kind() == FileKind::Dir {
                        stack.push(Step::Enter { dir: ino, name: entry.name, ino: entry.attr.ino, path: below });
                    } else {
                        tree.volume().unlink(ino, &entry.name).map_err(at(&below))?;
                    }
                }
            }
        }
    }
    Ok(())
}
