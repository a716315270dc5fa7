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
            // of a file: the next one follows; of the output: the end
            Err(f) if f.code == 1 => {
                crate::complain(format_args!("{f}"));
                code = 1;
            }
            done => done?,
        }
    }
    out.flush().map_err(|e| Failure::output(&e))?;
    tree.close()?;
    Ok(code)
}

fn copy(tree: &VolumeTree, path: &[u8], buf: &mut [u8], out: &mut impl Write) -> Result<(), Failure> {
    let fail = |why: braidfs::Error| Failure::at("cannot read", tree.show(path), why);
    let file = tree.open_file(path).map_err(fail)?;
    let mut at = 0;
    loop {
        match tree.volume().read(&file, at, buf).map_err(fail)? {
            0 => return Ok(()),
            n => {
                out.write_all(&buf[..n]).map_err(|e| Failure::output(&e))?;
                at += n as u64;
            }
        }
    }
}
