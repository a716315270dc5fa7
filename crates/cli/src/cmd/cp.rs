//! `braidfs cp`: copies between the host and an unmounted volume, and inside one.
//!
//! Walks with a stack of its own; one file that fails is reported and the rest is copied. Holes stay holes. Hard links
//! become separate files. A symlink at a destination is replaced, never written through, so that a hostile volume
//! cannot send a copy elsewhere on the host.

use crate::failure::{Failure, Outcome};
use crate::text;
use crate::tree::host::HostTree;
use crate::tree::volume::VolumeTree;
use crate::tree::{Meta, Res, Target, Tree};
use braidfs::FileKind;
use std::ffi::OsString;
use std::path::PathBuf;

/// Copy files into, out of and inside an unmounted volume
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  braidfs cp -r ./dir disk.img:/x     into the volume\n  \
    braidfs cp disk.img:/x/y .          out of it\n  \
    braidfs cp -rp disk.img:/ ./all     everything, with owners, modes and times\n\n\
    DEVICE:PATH names a file in a volume; PATH is absolute. A host file whose name holds `:/` is found all the same\n\
    where it exists.")]
pub struct Args {
    /// Directories and all below; symlinks are copied as symlinks
    #[arg(short, long, visible_short_alias = 'R')]
    recursive: bool,
    /// Keep owner, group, mode and times
    #[arg(short, long)]
    preserve: bool,
    /// Sources, then the destination: paths of the host or DEVICE:PATH
    #[arg(value_name = "PATH", required = true, num_args = 2..)]
    paths: Vec<OsString>,
}

/// Runs it.
pub fn run(args: &Args) -> Outcome {
    let Some((to, from)) = args.paths.split_last() else {
        return Err(Failure::new("cp: no destination: write it as `braidfs cp SOURCE DESTINATION`"));
    };
    let to = Target::parse(to);
    let from: Vec<Target> = from.iter().map(|s| Target::parse(s)).collect();
    let mut devices: Vec<&PathBuf> = from.iter().chain([&to]).filter_map(device_of).collect();
    devices.sort();
    devices.dedup();
    if devices.is_empty() {
        return Err(Failure::new(
            "cp: no path names a volume: write one as DEVICE:PATH, e.g. disk.img:/dir (for host to host use cp)",
        ));
    }
    // Each volume is opened once, for writing only where the destination lies.
    let mut volumes = Vec::new();
    for device in devices {
        volumes.push((device.clone(), VolumeTree::open(device, device_of(&to) == Some(device))?));
    }
    let tree_of = |t: &Target| -> &dyn Tree {
        let volume = device_of(t).and_then(|d| volumes.iter().find(|v| v.0 == *d));
        volume.map_or(&HostTree as &dyn Tree, |v| &v.1)
    };
    // It can only be read by setting it; nothing makes files meanwhile.
    let umask = rustix::process::umask(rustix::fs::Mode::empty());
    rustix::process::umask(umask);
    let mut failed = false;
    {
        let dest = Dest { tree: tree_of(&to), path: path_of(&to), args, umask: umask.as_raw_mode() };
        let into_dir = match dest.tree.stat(dest.path, true) {
            Ok(meta) => meta.is_some_and(|m| m.kind == FileKind::Dir),
            Err(e) => return Err(Failure::at("cannot copy to", dest.tree.show(dest.path), e)),
        };
        if !into_dir && from.len() > 1 {
            let why = "several files can only be copied into a directory: make it first";
            return Err(Failure::at("cannot copy to", dest.tree.show(dest.path), why));
        }
        for source in &from {
            if device_of(source).is_none() && device_of(&to).is_none() {
                failed = report(&HostTree, path_of(source), "the destination is no volume either: use cp(1)");
                continue;
            }
            let same = device_of(source) == device_of(&to);
            failed |= dest.copy(tree_of(source), path_of(source), into_dir, same);
        }
    }
    for (_, volume) in volumes {
        volume.close()?;
    }
    Ok(u8::from(failed))
}

fn device_of(t: &Target) -> Option<&PathBuf> {
    match t {
        Target::Volume { device, .. } => Some(device),
        Target::Host(_) => None,
    }
}

fn path_of(t: &Target) -> &[u8] {
    match t {
        Target::Volume { path, .. } | Target::Host(path) => path,
    }
}

/// Tells of a failure; true, for "something failed".
fn report(tree: &dyn Tree, path: &[u8], why: &str) -> bool {
    eprintln!("braidfs: cannot copy {}: {why}", tree.show(path));
    true
}

struct Dest<'a> {
    tree: &'a dyn Tree,
    path: &'a [u8],
    args: &'a Args,
    umask: u32,
}

enum Step {
    Copy {
        from: Vec<u8>,
        to: Vec<u8>,
        top: bool,
    },
    /// All below has been copied: now the directory's own times can be set.
    Finish {
        from: Vec<u8>,
        to: Vec<u8>,
        meta: Meta,
    },
}

impl Dest<'_> {
    /// Copies one source; whether something failed (it has been reported).
    fn copy(&self, source: &dyn Tree, path: &[u8], into_dir: bool, same_tree: bool) -> bool {
        // `vol:/` and `.` have no name of their own: their content goes into the directory.
        let to = if into_dir { text::join(self.path, text::base_name(path)) } else { self.path.to_vec() };
        let mut failed = false;
        if same_tree && self.args.recursive {
            match self.is_inside(source, path, &to) {
                Ok(false) => {}
                Ok(true) => return report(source, path, "a directory cannot be copied into itself"),
                Err(e) => return report(source, path, &e),
            }
        }
        let mut stack = vec![Step::Copy { from: path.to_vec(), to, top: true }];
        while let Some(step) = stack.pop() {
            let (from, result) = match step {
                Step::Finish { from, to, meta } => (from, self.tree.set_meta(&to, &meta)),
                Step::Copy { from, to, top } => {
                    let result = self.one(source, &from, &to, top, same_tree, &mut stack);
                    (from, result)
                }
            };
            if let Err(e) = result {
                failed = report(source, &from, &e);
            }
        }
        failed
    }

    /// Whether `to` lies in the directory `path` of the same tree.
    fn is_inside(&self, source: &dyn Tree, path: &[u8], to: &[u8]) -> Res<bool> {
        let Some(meta) = source.stat(path, false)?.filter(|m| m.kind == FileKind::Dir) else { return Ok(false) };
        // All that lies on the way to it, the root included.
        let ends = (0..to.len()).filter(|&i| i == 0 || to[i] == b'/');
        for end in ends {
            if self.tree.stat(&to[..end], true)?.is_some_and(|m| m.id == meta.id) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn one(
        &self,
        source: &dyn Tree,
        from: &[u8],
        to: &[u8],
        top: bool,
        same_tree: bool,
        stack: &mut Vec<Step>,
    ) -> Res<()> {
        let follow = top && !self.args.recursive;
        let meta = source.stat(from, follow)?.ok_or("no such file or directory")?;
        let here = |e: String| format!("to {}: {e}", self.tree.show(to));
        // Only a destination that the user named may be reached through a symlink.
        let mut old = self.tree.stat(to, top && meta.kind == FileKind::Dir).map_err(here)?;
        let mode = if self.args.preserve { meta.mode & 0o777 } else { meta.mode & !self.umask & 0o777 };
        if same_tree && old.is_some_and(|o| o.id == meta.id) {
            return Err(format!("{} is the same file", self.tree.show(to)));
        }
        if meta.kind == FileKind::Dir {
            if !self.args.recursive {
                return Err("is a directory: copy it with -r".into());
            }
            match old {
                Some(old) if old.kind == FileKind::Dir => {}
                Some(_) => return Err(here("exists and is no directory".into())),
                // Writable until it is filled.
                None => self.tree.make_dir(to, mode | 0o700).map_err(here)?,
            }
            if self.args.preserve {
                stack.push(Step::Finish { from: from.to_vec(), to: to.to_vec(), meta });
            }
            for name in source.list(from)? {
                if name.contains(&b'/') || name.is_empty() {
                    return Err(format!("holds an impossible name {}", text::name(&name)));
                }
                let (from, to) = (text::join(from, &name), text::join(to, &name));
                stack.push(Step::Copy { from, to, top: false });
            }
            return Ok(());
        }
        if old.is_some_and(|o| o.kind == FileKind::Dir) {
            return Err(here("is a directory".into()));
        }
        if !self.args.recursive && !matches!(meta.kind, FileKind::File | FileKind::Symlink) {
            return Err("is a special file: copy it with -r".into());
        }
        if old.is_some_and(|o| o.kind != FileKind::File || meta.kind != FileKind::File) {
            self.tree.remove(to).map_err(here)?;
            old = None;
        }
        match meta.kind {
            FileKind::File => self.content(source, from, to, if old.is_some() { 0o600 } else { mode })?,
            FileKind::Symlink => self.tree.make_link(to, &source.read_link(from)?).map_err(here)?,
            _ => self.tree.make_special(to, &meta, mode).map_err(here)?,
        }
        if self.args.preserve { self.tree.set_meta(to, &meta).map_err(here) } else { Ok(()) }
    }

    fn content(&self, source: &dyn Tree, from: &[u8], to: &[u8], mode: u32) -> Res<()> {
        let here = |e: String| format!("to {}: {e}", self.tree.show(to));
        let input = source.open(from)?;
        let mut output = self.tree.create(to, mode).map_err(here)?;
        let mut buf = vec![0u8; 1 << 20];
        let mut at = 0;
        while let Some((start, end)) = input.data(at)? {
            at = start;
            while at < end {
                let want = buf.len().min((end - at) as usize);
                let n = input.read(at, &mut buf[..want])?;
                if n == 0 {
                    break;
                }
                output.write(at, &buf[..n]).map_err(here)?;
                at += n as u64;
            }
            // A file that shrinks while it is copied.
            if at < end {
                break;
            }
        }
        // The rest is a hole, or has come since; files of /proc have no size and content all the same.
        let size = source.stat(from, true)?.map_or(at, |m| m.size);
        if at >= size {
            loop {
                let n = input.read(at, &mut buf)?;
                if n == 0 {
                    break;
                }
                output.write(at, &buf[..n]).map_err(here)?;
                at += n as u64;
            }
        }
        output.set_size(at.max(size)).map_err(here)
    }
}
