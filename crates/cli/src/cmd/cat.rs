//! `braidfs cat`: writes files of an unmounted volume to standard output.

use crate::failure::{Failure, Outcome};
use crate::tree::volume::VolumeTree;
use crate::tree::{Target, Tree};
use std::ffi::OsString;
use std::io::Write;

/// Print files of an unmounted volume
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  braidfs cat disk.img /etc/hosts\n  braidfs cat disk.img:/etc/hosts")]
pub struct Args {
    /// Device or image (several of one volume: joined by commas), or DEVICE:PATH
    device: OsString,
    /// Files in the volume
    #[arg(value_name = "PATH")]
    paths: Vec<OsString>,
}

pub fn run(args: &Args) -> Outcome {
    let (device, paths) = Target::with_some_paths("cat", &args.device, &args.paths)?;
    let tree = VolumeTree::open(&device, false)?;
    let mut out = std::io::stdout().lock();
    let mut buf = vec![0u8; 1 << 20];
    let mut code = 0;
    for path in &paths {
        match copy(&tree, path, &mut buf, &mut out) {
            Ok(()) => {}
            // the next one follows
            Err(Stop::File(f)) => {
                crate::complain(format_args!("{f}"));
                code = 1;
            }
            Err(Stop::Output(f)) => return Err(f),
        }
    }
    out.flush().map_err(|e| Failure::output(&e))?;
    tree.close()?;
    Ok(code)
}

/// Why a file was not written to its end.
enum Stop {
    /// It cannot be read.
    File(Failure),
    /// Nothing more can be written.
    Output(Failure),
}

fn copy(tree: &VolumeTree, path: &[u8], buf: &mut [u8], out: &mut impl Write) -> Result<(), Stop> {
    let fail = |why: braidfs::Error| Stop::File(Failure::at("cannot read", tree.show(path), why));
    let file = tree.open_file(path).map_err(fail)?;
    let mut at = 0;
    loop {
        match tree.volume().read(&file, at, buf).map_err(fail)? {
            0 => return Ok(()),
            n => {
                out.write_all(&buf[..n]).map_err(|e| Stop::Output(Failure::output(&e)))?;
                at += n as u64;
            }
        }
    }
}
