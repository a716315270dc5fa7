//! Mount and unmount, opens with nothing in any cache and with all in it, renames within a directory, to another one, and to
//! one of another domain (SpanFS, Table 5). braidfs has two domains here, and directories of the root go round: the first and
//! the third are in one, the second in the other.

use super::{Job, Unit, What, timed};
use crate::error::On;
use crate::fs::{Fs, Kernel, Library, OpenHow};
use crate::names::{Name, Rng};
use crate::target::{Site, Target};
use crate::worker::Place;
use crate::{Error, Result, sys};
use std::path::Path;

/// mkfs of braidfs.
const MKFS: &str = "--domains 2 --placement inherit";

/// Seconds of each of `n` operations.
fn each(n: u64, mut one: impl FnMut(u64) -> Result<()>) -> Result<f64> {
    let ((), seconds) = timed(|| (0..n).try_for_each(&mut one))?;
    Ok(seconds / n.max(1) as f64)
}

fn make<F: Fs>(fs: &F, files: u64) -> Result<()> {
    let mut name = Name::new("");
    for d in 0..3 {
        let dir = name.set(format_args!("d{d}"));
        fs.ensure_dir(dir).on("mkdir", dir)?;
    }
    (0..files).try_for_each(|i| {
        let path = name.set(format_args!("d0/{i}"));
        fs.open(path, OpenHow::FRESH).on("open", path).map(drop)
    })
}

/// What is done after the remount: steps and seconds of an operation.
fn steps<F: Fs>(fs: &F, files: u64) -> Result<Vec<(&'static str, f64)>> {
    let (mut from, mut to) = (Name::new(""), Name::new(""));
    let mut open = |rng: &mut Rng| {
        let path = from.set(format_args!("d0/{}", rng.below(files)));
        fs.open(path, OpenHow::READ).on("open", path).map(drop)
    };
    let (mut first, mut again) = (Rng::new(5, 0), Rng::new(5, 0));
    let cold = each(files, |_| open(&mut first))?;
    let warm = each(files, |_| open(&mut again))?;
    let mut renames = |old: &str, new: &str| {
        each(files, |i| {
            let (old, new) = (from.set(format_args!("{old}{i}")), to.set(format_args!("{new}{i}")));
            fs.rename(old, new).on("rename", old)
        })
    };
    Ok(vec![
        ("open and close, nothing cached", cold),
        ("open and close again", warm),
        ("rename within a directory", renames("d0/", "d0/r")?),
        ("rename to another directory of the domain", renames("d0/r", "d2/")?),
        ("rename to a directory of another domain", renames("d2/", "d1/")?),
    ])
}

fn at(site: &Site) -> Result<Kernel> {
    match &site.place {
        Place::Dir(at) => Kernel::at(at).map_err(|e| Error::io(format!("opening {}", at.display()), e)),
        Place::Library(_) => Err(Error::Other("the library is not mounted".into())),
    }
}

type Steps = Vec<(&'static str, f64)>;

fn mounted(job: &Job<'_>, target: &Target, site: &mut Site, files: u64) -> Result<Steps> {
    make(&at(site)?, files)?;
    let ((), unmount) = timed(|| site.unmount())?;
    sys::drop_caches();
    let ((), mount) = timed(|| job.lab.mount_again(target, site))?;
    let mut out = vec![("unmount with all of it dirty", unmount), ("mount, nothing cached", mount)];
    out.extend(steps(&at(site)?, files)?);
    let ((), unmount) = timed(|| site.unmount())?;
    out.push(("unmount after the renames", unmount));
    Ok(out)
}

fn in_process(device: &Path, files: u64) -> Result<Steps> {
    let failed = |e| Error::io(format!("mounting {}", device.display()), e);
    let mount = || Library::mount(device).map_err(failed);
    let fs = mount()?;
    make(&fs, files)?;
    let domain =
        |path| fs.attr(path, true).and_then(|a| braidfs_vfs::call(fs.volume.domain_of(a.ino))).on("stat", path);
    let domains = [domain(c"d0")?, domain(c"d1")?, domain(c"d2")?, domain(c"d0/0")?];
    if domains[0] == domains[1] || domains[0] != domains[2] || domains[0] != domains[3] {
        return Err(Error::Other(format!("directories are in other domains than they should: {domains:?}")));
    }
    let ((), unmount) = timed(|| fs.unmount().map_err(failed))?;
    sys::drop_caches();
    let (fs, mounted) = timed(mount)?;
    let mut out = vec![("unmount with all of it dirty", unmount), ("mount, nothing cached", mounted)];
    out.extend(steps(&fs, files)?);
    let ((), unmount) = timed(|| fs.unmount().map_err(failed))?;
    out.push(("unmount after the renames", unmount));
    Ok(out)
}

/// Times it on all targets.
pub fn time(job: &mut Job<'_>) -> Result<()> {
    let files = job.args.files.first().copied().unwrap_or(32_000);
    let text = format!(
        "{files} empty files; braidfs made with `{MKFS}`; mounts by mount(8), which takes some milliseconds itself, for braidfs \
         with the start of its daemon; {}.",
        job.results.head.plan.media
    );
    job.note(What::Remount, text);
    let options = std::mem::take(&mut job.lab.mkfs_options);
    job.lab.mkfs_options = ["braidfs", "library"].map(|t| (t.to_owned(), MKFS.to_owned())).into();
    for rep in 0..job.args.reps {
        for target in job.targets() {
            job.check()?;
            let mut site = job.lab.make(&target)?;
            let done = match &site.place {
                Place::Library(device) => in_process(&device.clone(), files)?,
                Place::Dir(_) => mounted(job, &target, &mut site, files)?,
            };
            site.close()?;
            for (step, seconds) in done {
                job.add(What::Remount, &target.to_string(), (step, Unit::Seconds), seconds, rep);
            }
        }
    }
    job.lab.mkfs_options = options;
    Ok(())
}
