//! `braidfs mkdir`: makes directories in an unmounted volume.

use crate::failure::Outcome;
use crate::tree::volume::VolumeTree;
use crate::tree::{Target, Tree};
use braidfs::{Error, FileKind};
use std::ffi::OsString;

/// Make directories in an unmounted volume
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  braidfs mkdir disk.img /srv\n  braidfs mkdir -p disk.img:/srv/www/html")]
pub struct Args {
    /// Missing parents, too; no complaint where it exists
    #[arg(short, long)]
    parents: bool,
    /// Permissions of the new directories, octal
    #[arg(short, long, value_name = "MODE", default_value = "755", value_parser = parse_mode)]
    mode: u32,
    /// Device or image (several of one volume: joined by commas), or DEVICE:PATH
    device: OsString,
    /// Directories to make
    #[arg(value_name = "PATH")]
    paths: Vec<OsString>,
}

fn parse_mode(text: &str) -> Result<u32, String> {
    match u32::from_str_radix(text, 8) {
        Ok(mode) if mode <= 0o7777 => Ok(mode),
        _ => Err("not an octal mode: write it as 755".into()),
    }
}

pub fn run(args: &Args) -> Outcome {
    let (device, paths) = Target::with_some_paths("mkdir", &args.device, &args.paths)?;
    let tree = VolumeTree::open(&device, true)?;
    let mut code = 0;
    for path in &paths {
        if let Err(e) = make(&tree, path, args) {
            let hint = match e {
                Error::NotFound => ": make its parents with -p",
                _ => "",
            };
            crate::complain(format_args!("cannot make directory {}: {e}{hint}", tree.show(path)));
            code = 1;
        }
    }
    tree.close()?;
    Ok(code)
}

fn make(tree: &VolumeTree, path: &[u8], args: &Args) -> braidfs::Result<()> {
    if !args.parents {
        return tree.mkdir(path, args.mode);
    }
    let names = path.split(|&b| b == b'/').filter(|n| !n.is_empty());
    let mut at = Vec::new();
    for name in names {
        at.push(b'/');
        at.extend_from_slice(name);
        match tree.attr(&at, true) {
            Ok(attr) if attr.kind() == FileKind::Dir => {}
            Ok(_) => return Err(Error::NotDir),
            Err(Error::NotFound) => tree.mkdir(&at, args.mode)?,
            Err(e) => return Err(e),
        }
    }
    Ok(())
}
