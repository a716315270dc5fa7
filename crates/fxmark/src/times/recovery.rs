//! A mount after a crash that left journals nearly as full as they may be before a checkpoint begins (FAST '18, Table 3):
//! braidfs with several journals, one for each domain, by one thread, by two, and by as many as a mount takes; ext4 with one journal that has as much room as
//! all of these together. Both were filled by the same operations: the modes of all files change again and again, then small
//! files are written and synced. Each mount begins with a copy of the same image, of which nothing is cached.

use super::{Job, Unit, What, timed};
use crate::error::On;
use crate::fs::{Fs, Kernel, Library, OpenHow};
use crate::lab_args::LabArgs;
use crate::names::Name;
use crate::sys::disk_counters;
use crate::target::{Target, run};
use crate::{Error, Result, sys};
use braidfs::{InodeNo, MkfsOptions, MountOptions, Placement, SetAttr, mkfs};
use braidfs_device::LoopDevice;
use braidfs_vfs::FileSystem;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Of a domain.
const DOMAIN_BYTES: u64 = 3 << 29;
/// Of the file system beside its journal.
const EXT4_BYTES: u64 = 4 << 30;
/// Part of a journal that may be in use before a checkpoint begins.
const FULL: f64 = 0.61;
/// Of it, what commits write; the rest is of fsyncs.
const BY_COMMITS: f64 = 0.45;
/// Files whose modes change, for 32 MiB of a journal.
const FILES: u64 = 24_000;
/// Of them, those that are written and synced.
const SYNCED: u64 = 3000;

/// A crashed file system: its image, and bytes of its journals in use.
struct Crashed {
    image: PathBuf,
    used: f64,
}

fn files(job: &Job<'_>) -> u64 {
    (FILES * job.args.journal / (32 << 20)).max(100)
}

fn failed(what: &str, path: &Path) -> impl Fn(std::io::Error) -> Error {
    let what = format!("{what} {}", path.display());
    move |e| Error::io(what.clone(), e)
}

fn mount(image: &Path, threads: usize) -> Result<Library> {
    let options = MountOptions {
        background: false,
        commit_interval: Duration::from_secs(100_000),
        recovery_threads: threads,
        ..MountOptions::default()
    };
    let mounted = Library::device(image).and_then(|d| Library::mount_with(vec![d], options));
    mounted.map_err(failed("mounting", image))
}

fn library(job: &Job<'_>, image: PathBuf) -> Result<Crashed> {
    let domains = job.args.journals;
    let made = File::create_new(&image).and_then(|f| f.set_len(domains * DOMAIN_BYTES));
    let options = MkfsOptions {
        domains: Some(domains as u16),
        journal_bytes: Some(job.args.journal),
        placement: Placement::Inherit,
        ..MkfsOptions::default()
    };
    let made = made.and_then(|()| Library::device(&image));
    let made = made.and_then(|d| braidfs_vfs::call(mkfs::format(&[d], &options)));
    made.map_err(failed("making a volume on", &image))?;
    let (fs, mut name) = (mount(&image, 0)?, Name::new(""));
    // directories of the root go round: one in each domain, with all below it
    for d in 0..domains {
        let dir = name.set(format_args!("d{d}"));
        fs.ensure_dir(dir).on("mkdir", dir)?;
        for i in 0..files(job) {
            let path = name.set(format_args!("d{d}/{i}"));
            fs.open(path, OpenHow::FRESH).on("open", path)?;
        }
    }
    fs.sync().on("sync", c".")?;
    for d in 0..domains {
        job.check()?;
        fill(job, &fs, d, &mut name)?;
    }
    let used = fs.volume.domains().iter().map(|d| d.journal_used * 4096).sum::<u64>() as f64;
    fs.volume.crash();
    Ok(Crashed { image, used })
}

/// Fills the journal of the domain that directory `d` is in.
fn fill(job: &Job<'_>, fs: &Library, d: u64, name: &mut Name) -> Result<()> {
    let files = files(job);
    let inode = |name: &mut Name, i: u64| -> Result<InodeNo> {
        let path = name.set(format_args!("d{d}/{i}"));
        Ok(fs.attr(path, true).on("stat", path)?.ino)
    };
    let all: Vec<InodeNo> = (0..files).map(|i| inode(name, i)).collect::<Result<_>>()?;
    let engine = |what, done: braidfs::Result<()>| braidfs_vfs::call(done).on(what, c"a file");
    let domain = braidfs_vfs::call(fs.volume.domain_of(all[0])).on("stat", name.get())?;
    let used = || {
        let of = fs.volume.domains().into_iter().find(|x| x.domain == domain.0);
        of.map_or(1.0, |x| x.journal_used as f64 / x.journal_blocks as f64)
    };
    let mut mode = 0;
    while used() < BY_COMMITS {
        job.check()?;
        mode = (mode + 1) % 0o777;
        let change = SetAttr { mode: Some(mode), ..SetAttr::default() };
        all.iter().try_for_each(|f| engine("chmod", fs.volume.setattr(*f, &change).map(drop)))?;
        engine("commit", fs.volume.commit_domain(domain, false).map(drop))?;
    }
    let (mut n, mut reached) = (0, used());
    while reached < FULL {
        job.check()?;
        let path = name.set(format_args!("d{d}/{}", n % SYNCED.min(files)));
        let file = fs.open(path, OpenHow::WRITE).on("open", path)?;
        fs.write_all(&file, 0, &[n as u8; 3000]).on("pwrite", path)?;
        fs.fsync(&file, false).on("fsync", path)?;
        n += 1;
        let now = used();
        if now < reached {
            // the room that a checkpoint leaves itself is a large part of a small journal
            return Err(Error::Usage("a journal so small is emptied before it is full: use a larger --journal".into()));
        }
        reached = now;
    }
    Ok(())
}

fn mount_ext4(device: &Path, at: &Path) -> Result<f64> {
    let flags = rustix::mount::MountFlags::empty();
    let mount = || rustix::mount::mount(device, at, "ext4", flags, None::<&std::ffi::CStr>);
    Ok(timed(|| mount().map_err(|e| Error::io(format!("mounting {}", device.display()), e)))?.1)
}

fn unmount(at: &Path) -> Result<()> {
    let done = rustix::mount::unmount(at, rustix::mount::UnmountFlags::empty());
    done.map_err(|e| Error::io(format!("unmounting {}", at.display()), e))
}

fn text(path: &Path) -> Result<&str> {
    path.to_str().ok_or_else(|| Error::Usage(format!("{}: not UTF-8", path.display())))
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    run("cp", &["--sparse=always", "--reflink=auto", text(from)?, text(to)?])?;
    File::open(to).and_then(|f| f.sync_all()).map_err(failed("writing", to))
}

/// ext4 with a journal as large as all of the library's, copied while it is mounted: what a crash would leave.
fn ext4(job: &Job<'_>, image: PathBuf) -> Result<Crashed> {
    let journal = (job.args.journals * job.args.journal).max(4 << 20);
    let (live, at) = (image.with_extension("live"), job.lab.dir.join("ext4"));
    File::create_new(&live).and_then(|f| f.set_len(EXT4_BYTES + journal)).map_err(failed("making", &live))?;
    let size = format!("size={}", journal >> 20);
    run(
        "mkfs.ext4",
        &["-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0,nodiscard", "-J", &size, text(&live)?],
    )?;
    let device = LoopDevice::attach(&live, false).map_err(failed("attaching a loop device to", &live))?;
    std::fs::create_dir_all(&at).map_err(failed("making", &at))?;
    mount_ext4(device.path(), &at)?;
    let used = (|| {
        let fs = Kernel::at(&at).map_err(failed("opening", &at))?;
        let used = fill_ext4(job, &fs, device.path(), journal)?;
        // the device has all that a sync promised; the copy is what it would have after a power cut
        copy(&live, &image)?;
        Ok(used)
    })();
    unmount(&at)?;
    drop(device);
    std::fs::remove_file(&live).map_err(failed("removing", &live))?;
    let used = used?;
    if !needs_recovery(&image).map_err(failed("reading", &image))? {
        return Err(Error::Other("the copy of ext4 has nothing to recover".into()));
    }
    Ok(Crashed { image, used })
}

/// Bytes that its journal has in use then: those written since all was on its place.
fn fill_ext4(job: &Job<'_>, fs: &Kernel, device: &Path, journal: u64) -> Result<f64> {
    let mut name = Name::new("");
    for d in 0..job.args.journals {
        let dir = name.set(format_args!("d{d}"));
        fs.ensure_dir(dir).on("mkdir", dir)?;
        for i in 0..files(job) {
            let path = name.set(format_args!("d{d}/{i}"));
            fs.open(path, OpenHow::FRESH).on("open", path)?;
        }
    }
    fs.sync().on("syncfs", c".")?;
    // a commit after it, so that the journal begins with what comes now
    let path = name.set(format_args!("synced"));
    let synced = fs.open(path, OpenHow::FRESH).on("open", path)?;
    fs.fsync(&synced, false).on("fsync", path)?;
    let written = || disk_counters(device).map_or(0, |d| d.written_bytes);
    let begun = written();
    let used = || (written() - begun) as f64;
    let mut mode = 0;
    while used() < BY_COMMITS * journal as f64 {
        job.check()?;
        mode = (mode + 1) % 0o777;
        for d in 0..job.args.journals {
            for i in 0..files(job) {
                let path = name.set(format_args!("d{d}/{i}"));
                let mode = rustix::fs::Mode::from_raw_mode(mode);
                let done = rustix::fs::chmodat(fs, path, mode, rustix::fs::AtFlags::empty());
                done.map_err(std::io::Error::from).on("chmod", path)?;
            }
            // a transaction a directory, as the library has them: one alone may have a quarter of the journal
            fs.fsync(&synced, false).on("fsync", c"synced")?;
        }
    }
    let mut n = 0;
    while used() < FULL * journal as f64 {
        job.check()?;
        let path =
            name.set(format_args!("d{}/{}", n % job.args.journals, n / job.args.journals % SYNCED.min(files(job))));
        let file = fs.open(path, OpenHow::WRITE).on("open", path)?;
        fs.write_all(&file, 0, &[n as u8; 3000]).on("pwrite", path)?;
        fs.fsync(&file, false).on("fsync", path)?;
        n += 1;
    }
    Ok(used())
}

/// The flag of ext4's superblock.
fn needs_recovery(image: &Path) -> std::io::Result<bool> {
    let mut incompat = [0; 4];
    File::open(image)?.read_exact_at(&mut incompat, 1024 + 0x60)?;
    Ok(u32::from_le_bytes(incompat) & 4 != 0)
}

/// Seconds of the mount after the crash, and of another one after an unmount.
fn recover(job: &Job<'_>, crashed: &Crashed, threads: Option<usize>) -> Result<(f64, f64)> {
    let image = crashed.image.with_extension("copy");
    copy(&crashed.image, &image)?;
    sys::drop_caches();
    let done = match threads {
        Some(threads) => {
            let (fs, after_crash) = timed(|| mount(&image, threads))?;
            fs.unmount().map_err(failed("unmounting", &image))?;
            sys::drop_caches();
            let (fs, clean) = timed(|| mount(&image, threads))?;
            fs.unmount().map_err(failed("unmounting", &image))?;
            (after_crash, clean)
        }
        None => {
            let at = job.lab.dir.join("ext4");
            let device = LoopDevice::attach(&image, false).map_err(failed("attaching a loop device to", &image))?;
            let after_crash = mount_ext4(device.path(), &at)?;
            unmount(&at)?;
            sys::drop_caches();
            let clean = mount_ext4(device.path(), &at)?;
            unmount(&at)?;
            (after_crash, clean)
        }
    };
    std::fs::remove_file(&image).map_err(failed("removing", &image))?;
    Ok(done)
}

/// Times it on ext4 and on the library, where they are among the targets.
pub fn time(job: &mut Job<'_>, args: &LabArgs) -> Result<()> {
    let make = || tempfile::Builder::new().prefix("fxmark-").tempdir_in(args.image_dir());
    let dir = make().map_err(failed("making a directory in", args.image_dir()))?;
    let mut all: Vec<(&str, Crashed, Option<usize>)> = Vec::new();
    if job.has(&Target::Ext4) {
        all.push(("ext4", ext4(job, dir.path().join("ext4"))?, None));
    }
    if job.has(&Target::Library) {
        let one = library(job, dir.path().join("library"))?;
        for (label, threads) in [("library, 1 thread", 1), ("library, 2 threads", 2), ("library, as it is", 0)] {
            all.push((label, Crashed { image: one.image.clone(), used: one.used }, Some(threads)));
        }
    }
    if all.is_empty() {
        return Err(Error::Usage("recovery: it is timed of ext4 and of the library: have one of them".into()));
    }
    let (n, mib) = (job.args.journals, job.args.journal >> 20);
    job.note(
        What::Recovery,
        format!(
            "braidfs with {n} journals of {mib} MiB, ext4 with one of {} MiB; each mount of a copy of the same image in {}, nothing \
             cached. What ext4 has in use is what was written to its device since all was in its place.",
            (n * mib).max(4),
            args.image_dir().display()
        ),
    );
    for rep in 0..job.args.reps {
        for (label, crashed, threads) in &all {
            job.check()?;
            let (after_crash, clean) = recover(job, crashed, *threads)?;
            let gib = crashed.used / f64::from(1 << 30);
            for (step, unit, value) in [
                ("in use in the journals", Unit::Bytes, crashed.used),
                ("mount after the crash", Unit::Seconds, after_crash),
                ("the same, for each GiB in use", Unit::Seconds, after_crash / gib),
                ("mount after an unmount", Unit::Seconds, clean),
            ] {
                job.add(What::Recovery, label, (step, unit), value, rep);
            }
        }
    }
    Ok(())
}
