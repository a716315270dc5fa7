//! Arguments that say what file systems are made of and with what: the same for all subcommands that make some.

use crate::cli::FILL_MAX;
use crate::target::{Lab, Media, MediaKind, Target};
use crate::{Error, Result, run, sys};
use clap::ValueEnum;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum MediaArg {
    /// A loop device over a file on disk
    Loop,
    /// A loop device over a file in memory (the paper's RAM disk)
    Ram,
    /// A zram device
    Zram,
}

/// See the module.
#[derive(Debug, Clone, clap::Args)]
pub struct LabArgs {
    /// What the file systems lie on
    #[arg(long, value_enum, default_value = "loop")]
    media: MediaArg,
    /// A block device instead; everything on it is lost
    #[arg(long, value_name = "DEVICE", requires = "force")]
    device: Option<PathBuf>,
    /// Yes, everything on --device may be lost
    #[arg(long)]
    force: bool,
    /// Where the image of `--media loop` is made
    #[arg(long, value_name = "DIR", default_value = "/var/tmp")]
    image_dir: PathBuf,
    /// More options of mount, as ext4:data=journal
    #[arg(long, value_name = "TARGET:OPTIONS", value_parser = parse_for)]
    mount_options: Vec<(String, String)>,
    /// More arguments of mkfs, as xfs:-m reflink=0
    #[arg(long, value_name = "TARGET:ARGS", value_parser = parse_for)]
    mkfs_options: Vec<(String, String)>,
    /// The program braidfs [default: this one, beside it, or in the path]
    #[arg(long, value_name = "PATH")]
    pub(crate) braidfs: Option<PathBuf>,
}

/// A size with a unit, at least 1 MiB.
pub(crate) fn parse_size(text: &str) -> Result<u64, String> {
    let bytes = parse_size::Config::new().with_binary().parse_size(text);
    bytes.ok().filter(|b| *b >= 1 << 20).ok_or_else(|| format!("`{text}` is no size: write 512M, 4G"))
}

/// A number of bytes with a unit, above nothing.
pub(crate) fn parse_bytes(text: &str) -> Result<u64, String> {
    let bytes = parse_size::Config::new().with_binary().parse_size(text);
    bytes.ok().filter(|b| *b > 0).ok_or_else(|| format!("`{text}` is no number of bytes: write 4K, 512M"))
}

fn parse_for(text: &str) -> Result<(String, String), String> {
    let (target, options) = text.split_once(':').ok_or("write it as TARGET:OPTIONS, like ext4:data=journal")?;
    if options.is_empty() || !Target::MADE.iter().any(|t| t.to_string() == target) {
        return Err(format!("`{target}` is no file system made here, or there are no options for it"));
    }
    Ok((target.into(), options.into()))
}

/// The words by which this program is called for `last`, a hidden subcommand, behind its own name.
pub(crate) fn words(before: &[&str], last: &str) -> Vec<OsString> {
    before.iter().copied().chain([last]).map(OsString::from).collect()
}

impl LabArgs {
    /// Where images are made.
    #[cfg(feature = "braidfs")]
    pub(crate) fn image_dir(&self) -> &Path {
        &self.image_dir
    }

    /// What the device is.
    pub(crate) fn kind(&self) -> MediaKind {
        match (&self.device, self.media) {
            (Some(device), _) => MediaKind::Device(device.clone()),
            (None, MediaArg::Loop) => MediaKind::Loop(self.image_dir.clone()),
            (None, MediaArg::Ram) => MediaKind::Ram,
            (None, MediaArg::Zram) => MediaKind::Zram,
        }
    }

    /// A directory for mount points, which only this process sees, and the device, where one of the targets needs one. `instead`:
    /// what else may be done who is not root.
    pub(crate) fn prepare(&self, targets: &[Target], size: u64, instead: &str) -> Result<(TempDir, Option<Media>)> {
        let root = rustix::process::geteuid().is_root();
        if !root && let Some(t) = targets.iter().find(|t| t.needs_root() && **t != Target::Library) {
            return Err(Error::Usage(format!("{t}: only root can make file systems: be root, or {instead}")));
        }
        if root {
            sys::private_mounts().map_err(|e| Error::io("making the mounts private", e))?;
        }
        let dir =
            tempfile::Builder::new().prefix("fxmark-").tempdir().map_err(|e| Error::io("making a directory", e))?;
        let kind = match self.kind() {
            // the library needs no block device
            MediaKind::Loop(dir) if !root => MediaKind::File(dir),
            kind => kind,
        };
        let needs = targets.iter().any(Target::needs_device);
        let media = needs.then(|| Media::make(&kind, size, size <= FILL_MAX, dir.path())).transpose()?;
        Ok((dir, media))
    }

    /// Is the library to be mounted with `data=journal`? It has no other options here.
    pub(crate) fn library_journal(&self) -> Result<bool> {
        let mut journal = false;
        for (_, options) in self.mount_options.iter().filter(|(target, _)| target == "library") {
            journal = match options.as_str() {
                "data=journal" => true,
                "data=ordered" => false,
                other => return Err(Error::Usage(format!("library: `{other}`: it takes data=journal, data=ordered"))),
            };
        }
        Ok(journal)
    }

    /// The place where file systems are made; `before` as in [`crate::cli::main`].
    pub(crate) fn lab(&self, media: Option<Media>, dir: PathBuf, size: u64, before: &[&str]) -> Lab {
        Lab {
            media,
            dir,
            size,
            braidfs: Lab::find_braidfs(self.braidfs.as_deref()),
            mount_options: self.mount_options.clone(),
            mkfs_options: self.mkfs_options.clone(),
            hold_args: words(before, "hold"),
            switches: None,
        }
    }

    /// So many more places, each with a directory and, where `needs` says so, a device of its own of `size` bytes, written
    /// through where that says so.
    pub(crate) fn more_labs(
        &self,
        count: usize,
        needs: bool,
        dir: &Path,
        (size, fill): (u64, bool),
        before: &[&str],
    ) -> Result<Vec<Lab>> {
        let one = |i| {
            let dir = dir.join(format!("part{i}"));
            std::fs::create_dir(&dir).map_err(|e| Error::io(format!("making {}", dir.display()), e))?;
            let media = needs.then(|| Media::make(&self.kind(), size, fill, &dir)).transpose()?;
            Ok(self.lab(media, dir, size, before))
        };
        (1..=count).map(one).collect()
    }

    /// The targets of these names. Named ones have to be there; of `all`, without `not_all`, those are taken that can be.
    pub(crate) fn targets(&self, names: &[String], not_all: &[Target]) -> Result<Vec<Target>> {
        let mut out = Vec::new();
        for name in names {
            if name == "all" {
                for target in Target::MADE.into_iter().filter(|t| !not_all.contains(t)) {
                    match self.missing(&target) {
                        None => out.push(target),
                        Some(why) => eprintln!("fxmark: leaving {target} out: {why}"),
                    }
                }
                continue;
            }
            let target: Target = name.parse()?;
            if let Target::Dir(dir) = &target {
                run::check_dir(dir)?;
            }
            if let Some(why) = self.missing(&target) {
                return Err(Error::Usage(format!("{target}: {why}")));
            }
            out.push(target);
        }
        if let Some((i, twice)) = out.iter().enumerate().find(|(i, t)| out[..*i].contains(t)) {
            return Err(Error::Usage(format!("target {} is `{twice}` again: name each once", i + 1)));
        }
        Ok(out)
    }

    /// Why it cannot be tested here; none where it can.
    pub(crate) fn missing(&self, target: &Target) -> Option<String> {
        let no_program = *target == Target::Braidfs && Lab::find_braidfs(self.braidfs.as_deref()).is_none();
        if no_program {
            Some("the program braidfs is not there: name it with --braidfs".into())
        } else {
            target.missing()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        assert_eq!(parse_size("2G"), Ok(2 << 30));
        assert_eq!(parse_size("64MiB"), Ok(64 << 20));
        for bad in ["", "x", "12", "1X", "99999999999T"] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
    }
}
