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

/// Runs it.
pub fn run(args: &Args) -> Outcome {
    let (device, paths) = Target::with_paths(&args.device, &args.paths);
    if paths.is_empty() {
        return Err(Failure::new("cat: no path given: write it as `braidfs cat DEVICE PATH`"));
    }
    let tree = VolumeTree::open(&device, false)?;
    let mut out = std::io::stdout().lock();
    let mut buf = vec![0u8; 1 << 20];
    let mut code = 0;
    for path in &paths {
        let mut copy = || -> Result<(), Failure> {
            let fail = |why: braidfs::Error| Failure::at("cannot read", tree.show(path), why);
            let file = tree.open_file(path).map_err(fail)?;
            let mut at = 0;
            loop {
                match tree.volume().read(&file, at, &mut buf).map_err(fail)? {
                    0 => return Ok(()),
                    n => {
                        out.write_all(&buf[..n]).map_err(|e| Failure::output(&e))?;
                        at += n as u64;
                    }
                }
            }
        };
        match copy_result(copy()) {
            Ok(()) => {}
            Err(Some(failure)) => return Err(failure),
            Err(None) => code = 1,
        }
    }
    out.flush().map_err(|e| Failure::output(&e))?;
    tree.close()?;
    Ok(code)
}

/// Reports a file's failure and goes on with the next file (`Err(None)`); only failing output ends the command.
fn copy_result(result: Result<(), Failure>) -> Result<(), Option<Failure>> {
    match result {
        Ok(()) => Ok(()),
        Err(f) if f.code != 1 => Err(Some(f)),
        Err(f) => {
            eprintln!("braidfs: {f}");
            Err(None)
        }
    }
}
