//! `braidfs resize`: makes a volume larger or smaller, mounted or not.

use crate::cmd::device;
use crate::cmd::fsck::Bar;
use crate::cmd::umount::is_braidfs;
use crate::failure::{Failure, Outcome};
use crate::{mounted, mountinfo, open, text};
use braidfs::{Error, NewSize, Resized};
use serde::Serialize;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};

/// Make a volume larger or smaller, while it is mounted or not
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Exit codes: 0 the volume has that size, 1 it failed (the size is the old one, or the new one), or wrong usage.\n\n\
    Examples:\n  braidfs resize disk.img 20G       an image file, which is extended\n  \
    braidfs resize disk.img +512M     by so much\n  \
    braidfs resize disk.img 5G        a smaller one, where what lies behind can move\n  \
    braidfs resize /dev/sdb           a block device that has grown: all of it\n  \
    braidfs resize /mnt 20G           the volume that is mounted there, while it is in use\n  \
    braidfs resize a.img,b.img 20G    a volume on two devices: the last one grows\n\n\
    SIZE is what the volume uses of its last device: 4096, 64M or 10G (powers of 1024), with + so much more than now. \
    Without it the volume takes all that the device has. Killed or without power at any moment, the volume has its old \
    size or the new one, and the same command again goes on (not one with `+`). A volume made by this version can grow \
    to 1024 times its size, up to 64 TiB with block groups of 64 MiB.\n\n\
    To make a volume smaller, what lies behind the new end is moved first, and an image file is cut off. Some things cannot move: \
    block groups in which files have their inode numbers, journals, files that are overwritten in place (chattr +C) or \
    allocated. If such a thing is in the way, the command says what the least size is, which may be below what mkfs makes \
    (32 MiB), and the volume stays as it is. Ctrl-C stops it, for a mounted volume behind the present block group. A mounted volume becomes smaller only if it is mounted with -o cache=through; \
    else unmount it first."
)]
pub struct Args {
    /// The result as JSON
    #[arg(long)]
    json: bool,
    /// Print nothing on success
    #[arg(short, long)]
    quiet: bool,
    /// The mount point of a mounted volume, or all devices of one, joined by commas
    #[arg(value_name = "MOUNTPOINT|DEVICE")]
    place: PathBuf,
    /// How large [default: as the device is]
    #[arg(value_parser = parse, value_name = "SIZE", allow_hyphen_values = true)]
    size: Option<NewSize>,
}

fn parse(text: &str) -> Result<NewSize, String> {
    if text.starts_with('-') {
        return Err("a size is positive: to make the volume smaller name the size that it shall have, as 5G".into());
    }
    match text.strip_prefix('+') {
        Some(more) => text::parse_size(more).map(NewSize::More),
        None => text::parse_size(text).map(NewSize::Bytes),
    }
}

#[derive(Serialize)]
struct Report {
    /// As it was named.
    place: String,
    /// Whether it was mounted meanwhile.
    mounted: bool,
    /// Bytes of the device that changes.
    before: u64,
    after: u64,
    /// Bytes of all devices.
    volume: u64,
    groups: u32,
}

pub fn run(args: &Args) -> Outcome {
    let size = args.size.unwrap_or(NewSize::Device);
    let paths = open::expand(std::slice::from_ref(&args.place));
    let mount = mount_point(&args.place).or_else(|| mounted::at(&paths).map(|m| m.target));
    let bar = Bar::new(std::io::stderr().is_terminal() && !args.json && !args.quiet);
    let resized = match &mount {
        Some(point) => device::resize(point, size, &bar)?,
        None => offline(&paths, size, &bar)?,
    };
    tell(args, &resized, mount.is_some())
}

/// `place`, where a braidfs is mounted on it.
pub fn mount_point(place: &Path) -> Option<PathBuf> {
    let place = mountinfo::absolute(place);
    mountinfo::at(&place).filter(is_braidfs).map(|_| place)
}

fn offline(paths: &[PathBuf], size: NewSize, bar: &Bar) -> Result<Resized, Failure> {
    let volume = open::mount(open::devices(paths, true)?, paths, true)?;
    let resized = volume.resize(size, &|done, all| bar.show("emptying block groups", done, all));
    bar.finish();
    let resized = resized.map_err(|e| match e {
        Error::Size(why) => Failure::at("cannot resize", open::show(paths), why),
        e => open::explain("cannot resize", paths, &e),
    });
    let closed = open::close(volume);
    resized.and_then(|r| closed.map(|()| r))
}

fn tell(args: &Args, r: &Resized, mounted: bool) -> Outcome {
    if args.json {
        let place = args.place.display().to_string();
        let (before, after, volume, groups) = (r.before, r.after, r.volume, r.groups);
        let report = Report { place, mounted, before, after, volume, groups };
        let json = serde_json::to_string_pretty(&report).map_err(|e| Failure::new(format!("resize: {e}")))?;
        crate::say(format_args!("{json}"))?;
    } else if !args.quiet {
        let (place, after) = (args.place.display(), text::size(r.after));
        if r.before == r.after {
            crate::say(format_args!("{place}: has {after} already: nothing to do"))?;
        } else {
            let before = text::size(r.before);
            let how = if r.before < r.after { "grown" } else { "made smaller" };
            crate::say(format_args!("{place}: {how} from {before} to {after}, {} block groups", r.groups))?;
        }
    }
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_exact_or_more() {
        assert_eq!(parse("64M"), Ok(NewSize::Bytes(64 << 20)));
        assert_eq!(parse("+1G"), Ok(NewSize::More(1 << 30)));
        assert!(
            parse("++1G").is_err()
                && parse("-1G").is_err_and(|why| why.contains("positive"))
                && parse("+").is_err()
                && parse("much").is_err()
        );
    }
}
