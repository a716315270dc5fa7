//! `braidfs dump`: shows on-disk structures as text.

use crate::failure::{Failure, Outcome};
use crate::open;
use braidfs_check::Error;
use braidfs_check::dump::{DumpWhat, dump};
use std::ffi::OsString;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::time::Duration;

/// Show on-disk structures
#[derive(Debug, clap::Args)]
#[command(after_help = "WHAT is one of:\n  \
    super          superblock\n  \
    bat            which domain owns which block group\n  \
    domain:N       header of a domain\n  \
    group:N        header of a block group\n  \
    segments:N     segment table of a group\n  \
    nodes:N        node table of a group\n  \
    node:N         an inode or overflow node\n  \
    block:N        a block of the group space\n  \
    journal:N      journal of a domain\n  \
    path:PATH      the inode that a path names\n\n\
    Tables are shown as they lie on the devices: of a volume in use as of its last checkpoint.\n\n\
    Examples:\n  braidfs dump super disk.img\n  braidfs dump node:1 disk.img\n  braidfs dump path:/etc/hosts disk.img")]
pub struct Args {
    /// What to show, see below
    what: OsString,
    /// All devices of the volume
    #[arg(required = true, value_name = "DEVICE")]
    devices: Vec<PathBuf>,
}

/// How often a structure of a volume in use is read again that does not hold: until the next checkpoint, which may have to come.
const RETRIES: usize = 250;

pub fn run(args: &Args) -> Outcome {
    let what = parse(args.what.as_bytes()).map_err(|why| Failure::at("dump", args.what.display(), why))?;
    let paths = open::expand(&args.devices);
    let looked = open::look_at(&paths)?;
    let mut text = dump(&looked.devices, &what);
    if looked.in_use {
        crate::complain(format_args!("{}: in use: shown as of its last checkpoint", open::show(&paths)));
        for _ in 0..RETRIES {
            if !matches!(text, Err(Error::Corrupt(_))) {
                break;
            }
            // half of a change, perhaps
            std::thread::sleep(Duration::from_millis(20));
            text = dump(&looked.devices, &what);
        }
    }
    let text = text.map_err(|e| match e {
        Error::NotFound => {
            Failure::at("cannot dump", open::show(&paths), format!("there is no {}", args.what.display()))
        }
        e => open::explain_check("cannot dump", &paths, e),
    })?;
    let mut out = std::io::stdout().lock();
    out.write_all(text.trim_end().as_bytes())
        .and_then(|()| out.write_all(b"\n"))
        .and_then(|()| out.flush())
        .map_err(|e| Failure::output(&e))?;
    Ok(0)
}

fn parse(what: &[u8]) -> Result<DumpWhat, String> {
    let (kind, value) = match what.iter().position(|&b| b == b':') {
        Some(i) => (&what[..i], Some(&what[i + 1..])),
        None => (what, None),
    };
    fn number<T: std::str::FromStr>(kind: &[u8], value: Option<&[u8]>) -> Result<T, String> {
        let kind = String::from_utf8_lossy(kind);
        let value = value.ok_or_else(|| format!("which one? write it as {kind}:NUMBER"))?;
        let parsed = std::str::from_utf8(value).ok().and_then(|v| v.parse().ok());
        parsed.ok_or_else(|| format!("no number, or too large: write it as {kind}:NUMBER"))
    }
    Ok(match kind {
        b"super" if value.is_none() => DumpWhat::Super,
        b"bat" if value.is_none() => DumpWhat::Bat,
        b"domain" => DumpWhat::Domain(number(kind, value)?),
        b"group" => DumpWhat::Group(number(kind, value)?),
        b"segments" => DumpWhat::Segments(number(kind, value)?),
        b"nodes" => DumpWhat::Nodes(number(kind, value)?),
        b"node" => DumpWhat::Node(number(kind, value)?),
        b"block" => DumpWhat::Block(number(kind, value)?),
        b"journal" => DumpWhat::Journal(number(kind, value)?),
        b"path" => DumpWhat::Path(value.ok_or("which one? write it as path:/a/b")?.to_vec()),
        _ => {
            return Err("unknown structure: use super, bat, domain:N, group:N, segments:N, nodes:N, node:N, block:N, \
                        journal:N or path:PATH"
                .into());
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_parse() {
        assert!(matches!(parse(b"super"), Ok(DumpWhat::Super)));
        assert!(matches!(parse(b"node:17"), Ok(DumpWhat::Node(17))));
        assert!(matches!(parse(b"path:/a:b"), Ok(DumpWhat::Path(p)) if p == b"/a:b"));
        for bad in ["", "supper", "node", "node:", "node:x", "domain:70000", "super:1", "group:-1"] {
            assert!(parse(bad.as_bytes()).is_err(), "{bad}");
        }
    }
}
