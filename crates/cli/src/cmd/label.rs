//! `braidfs label`: the name of a volume, mounted or not.

use crate::cmd::limits::say_json;
use crate::cmd::resize::mount_point;
use crate::failure::{Failure, Outcome};
use crate::{mounted, open, text};
use braidfs::{LABEL_MAX, Volume};
use braidfs_fuse::control;
use rustix::io::Errno;
use serde::Serialize;
use std::io;
use std::path::{Path, PathBuf};

/// Show or change the label of a volume, while it is mounted or not
#[derive(Debug, clap::Args)]
#[command(after_help = "Exit codes: 0 it was done, 1 it failed (the label is the old one), or wrong usage.\n\n\
    Examples:\n  braidfs label disk.img           say it\n  \
    braidfs label disk.img backup    another one\n  \
    braidfs label /mnt \"\"            the volume that is mounted there has none any more\n  \
    braidfs label a.img,b.img data   of a volume on two devices\n\n\
    What udev, lsblk -f and LABEL= in /etc/fstab know the volume by: up to 63 bytes. It is durable when the command returns. \
    Only root and the owner of the root directory change that of a mounted volume. What udev knows changes when the device \
    is looked at again: udevadm trigger.")]
pub struct Args {
    /// The result as JSON
    #[arg(long)]
    json: bool,
    /// The mount point of a mounted volume, or all devices of one, joined by commas
    #[arg(value_name = "MOUNTPOINT|DEVICE")]
    place: PathBuf,
    /// What it is called from now on
    #[arg(value_parser = parse)]
    label: Option<String>,
}

fn parse(text: &str) -> Result<String, String> {
    if text.len() > LABEL_MAX {
        return Err(format!("it has {} bytes: use at most {LABEL_MAX}", text.len()));
    }
    Ok(text.into())
}

#[derive(Serialize)]
struct Report {
    /// As it was named.
    place: String,
    /// Whether it was mounted meanwhile.
    mounted: bool,
    label: String,
}

pub fn run(args: &Args) -> Outcome {
    let paths = open::expand(std::slice::from_ref(&args.place));
    let mount = mount_point(&args.place).or_else(|| mounted::at(&paths).map(|m| m.target));
    let label = match &mount {
        Some(point) => online(point, args.label.as_deref()).map_err(|e| refused(point, &e))?,
        None => offline(&paths, args.label.as_deref())?,
    };
    if args.json {
        return say_json("label", &Report { place: args.place.display().to_string(), mounted: mount.is_some(), label });
    }
    if args.label.is_none() {
        crate::say(format_args!("{}", text::name(label.as_bytes())))?;
    }
    Ok(0)
}

fn online(point: &Path, label: Option<&str>) -> io::Result<String> {
    let root = mounted::enter(point)?;
    if let Some(label) = label {
        control::set_label(&root, label)?;
    }
    control::label(&root)
}

fn refused(point: &Path, e: &io::Error) -> Failure {
    let why = match Errno::from_io_error(e) {
        Some(Errno::PERM) => "only root may, and the owner of its root directory".into(),
        _ => mounted::server_error(point, e),
    };
    Failure::at("label", point.display(), why)
}

fn offline(paths: &[PathBuf], label: Option<&str>) -> Result<String, Failure> {
    let Some(label) = label else {
        // also where somebody uses it whose mount is not seen from here
        let devices = open::look_at(paths)?.devices;
        let volume = Volume::look_at(&devices).map_err(|e| open::explain("label", paths, &e))?;
        return Ok(volume.label());
    };
    let volume = open::volume(paths, true)?;
    let set = volume.set_label(label).map_err(|e| open::explain("label", paths, &e));
    let closed = open::close(volume);
    set.and(closed).map(|()| label.into())
}
