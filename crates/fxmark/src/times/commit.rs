//! How long it takes until all is durable, by how much data is dirty: a checkpoint of Max, a commit and the data before it of
//! a journaling file system. Where Max compares locks of the gate, a mount has it once with the switch `gate`.

use super::{Job, Unit, What, timed};
use crate::error::On;
use crate::fs::{Fs, Kernel, Library, OpenHow, Page};
use crate::target::Target;
use crate::worker::Place;
use crate::{Error, Result, sys};
use std::ffi::CString;

/// Of a file.
const FILE: u64 = 1 << 20;

/// Makes `bytes` dirty in new files of a directory; seconds of the sync after it.
fn dirty<F: Fs>(fs: &F, bytes: u64) -> Result<f64> {
    let data = Page::new().0.repeat(FILE as usize / 4096);
    let name = |text: String| CString::new(text).unwrap_or_else(|_| unreachable!("no NUL in it"));
    let dir = name(format!("dirty-{bytes}"));
    fs.ensure_dir(&dir).on("mkdir", &dir)?;
    fs.sync().on("syncfs", c".")?;
    for i in 0..bytes / FILE {
        let path = name(format!("dirty-{bytes}/{i}"));
        let file = fs.open(&path, OpenHow::FRESH).on("open", &path)?;
        fs.write_all(&file, 0, &data).on("pwrite", &path)?;
    }
    let ((), seconds) = timed(|| fs.sync().on("syncfs", c"."))?;
    for i in 0..bytes / FILE {
        let path = name(format!("dirty-{bytes}/{i}"));
        fs.unlink(&path).on("unlink", &path)?;
    }
    fs.sync().on("syncfs", c".")?;
    Ok(seconds)
}

/// A mount whose server learns of no syncfs would show how long the kernel takes to hand over its pages.
fn leave_out(job: &mut Job<'_>, label: &str) {
    let why = format!("{label} is left out: syncfs(2) does not reach it here, so nothing would be committed.");
    if !job.results.head.plan.notes.iter().any(|(_, note)| *note == why) {
        eprintln!("fxmark: {why}");
        job.note(What::Commit, why);
    }
}

fn all<F: Fs>(job: &mut Job<'_>, fs: &F, label: &str, rep: u64) -> Result<()> {
    for bytes in job.args.dirty.clone() {
        job.check()?;
        let seconds = dirty(fs, bytes)?;
        job.add(What::Commit, label, (&format!("{} MiB dirty", bytes >> 20), Unit::Seconds), seconds, rep);
    }
    Ok(())
}

/// Times it on all targets.
pub fn time(job: &mut Job<'_>) -> Result<()> {
    let media = job.results.head.plan.media.clone();
    let largest = job.args.dirty.iter().copied().max().unwrap_or(0);
    if largest > job.args.size / 4 {
        return Err(Error::Usage("--dirty: a quarter of --size at most".into()));
    }
    job.note(What::Commit, format!("Time of syncfs(2) after so much was written to new files of 1 MiB; {media}."));
    let mut series: Vec<(String, Target, &str)> = Vec::new();
    for target in job.targets() {
        series.push((target.to_string(), target.clone(), ""));
        if target == Target::Braidfs {
            series.push(("braidfs, gate".into(), target, "gate"));
        }
    }
    for rep in 0..job.args.reps {
        for (label, target, switches) in &series {
            sys::drop_caches();
            job.lab.switches = Some((*switches).into());
            let site = job.lab.make(target)?;
            match &site.place {
                Place::Dir(_) if !site.sync_commits() => leave_out(job, label),
                Place::Dir(at) => {
                    let fs = Kernel::at(at).map_err(|e| Error::io(format!("opening {}", at.display()), e))?;
                    all(job, &fs, label, rep)?;
                }
                Place::Library(device) => {
                    let failed = |e| Error::io(format!("mounting {}", device.display()), e);
                    let fs = Library::mount(device).map_err(failed)?;
                    all(job, &fs, label, rep)?;
                    fs.unmount().map_err(failed)?;
                }
            }
            site.close()?;
        }
    }
    job.lab.switches = None;
    Ok(())
}
