//! The GC of stale entries after a crash, and what a load beside it keeps (SpanFS, Table 4): a volume whose objects are spread
//! over all domains, so that nearly all entries name an inode of another one, is dropped without an unmount. The GC runs by
//! itself then, as soon as the volume is mounted; here it is called, so that it can be timed, on a mount without threads in the
//! background.
//!
//! One pass is soon over: beside varmail it walks again and again, each pass followed by as long a pause, and varmail's
//! operations in the passes are compared with those in the pauses.

use super::{Job, Unit, What, timed};
use crate::error::On;
use crate::fs::{Fs, Library, OpenHow};
use crate::names::Name;
use crate::run::STANDARD;
use crate::suite::{TestId, build};
use crate::target::Target;
use crate::worker::{Ctx, Mode, Scale, Step};
use crate::{Error, Result, sys};
use braidfs::{MkfsOptions, MountOptions, Placement, mkfs};
use braidfs_vfs::FileSystem;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Files of a directory.
const WIDTH: u64 = 1000;
/// Between a pass and the next at least.
const PAUSE: Duration = Duration::from_millis(5);
/// Varmail's before the first pass.
const WARM_UP: Duration = Duration::from_millis(300);

fn failed(what: &str, device: &Path) -> impl Fn(std::io::Error) -> Error {
    let what = format!("{what} {}", device.display());
    move |e| Error::io(what.clone(), e)
}

fn mount(device: &Path, background: bool) -> Result<Library> {
    let options = MountOptions { background, ..MountOptions::default() };
    let mounted = Library::device(device).and_then(|d| Library::mount_with(vec![d], options));
    mounted.map_err(failed("mounting", device))
}

/// A volume with so many files that was not unmounted.
fn crashed(device: &Path, files: u64, domains: u64) -> Result<()> {
    let options = MkfsOptions { domains: Some(domains as u16), placement: Placement::Spread, ..MkfsOptions::default() };
    let made = Library::device(device).and_then(|d| braidfs_vfs::call(mkfs::format(&[d], &options)));
    made.map_err(failed("making a volume on", device))?;
    let fs = mount(device, false)?;
    let mut name = Name::new("");
    for i in 0..files {
        if i.is_multiple_of(WIDTH) {
            let dir = name.set(format_args!("d{}", i / WIDTH));
            fs.ensure_dir(dir).on("mkdir", dir)?;
        }
        let path = name.set(format_args!("d{}/{i}", i / WIDTH));
        fs.open(path, OpenHow::FRESH).on("open", path)?;
    }
    fs.sync().on("sync", c".")?;
    // what is in the journals only, and what is nowhere yet
    let synced = fs.open(c"d0/synced", OpenHow::FRESH).on("open", c"d0/synced")?;
    fs.fsync(&synced, false).on("fsync", c"d0/synced")?;
    fs.open(c"d0/lost", OpenHow::FRESH).on("open", c"d0/lost")?;
    drop(synced);
    fs.volume.crash();
    Ok(())
}

fn collect(fs: &Library) -> Result<f64> {
    let (_, seconds) = timed(|| braidfs_vfs::call(fs.volume.collect_stale()).on("GC", c"/"))?;
    Ok(seconds)
}

/// What varmail did in passes of the GC, and in the pauses between them.
#[derive(Default)]
struct Beside {
    passes: Vec<f64>,
    /// Operations and seconds.
    during: (u64, f64),
    between: (u64, f64),
}

/// Passes and pauses until the passes took so long.
fn passes(fs: &Library, ops: &AtomicU64, seconds: f64, ended: &AtomicBool) -> Result<Beside> {
    std::thread::sleep(WARM_UP);
    let (mut beside, mut before) = (Beside::default(), (ops.load(Ordering::Relaxed), Instant::now()));
    let mut add = |sum: &mut (u64, f64)| {
        let now = (ops.load(Ordering::Relaxed), Instant::now());
        *sum = (sum.0 + now.0 - before.0, sum.1 + (now.1 - before.1).as_secs_f64());
        before = now;
    };
    while beside.during.1 < seconds && !ended.load(Ordering::Relaxed) {
        let pass = collect(fs)?;
        beside.passes.push(pass);
        add(&mut beside.during);
        std::thread::sleep(Duration::from_secs_f64(pass).max(PAUSE));
        add(&mut beside.between);
    }
    Ok(beside)
}

/// varmail by one thread, and the GC beside it.
fn with_varmail(fs: &Arc<Library>, seconds: f64, stop: &AtomicBool) -> Result<Beside> {
    let test: TestId = "varmail".parse()?;
    let scale: Scale = STANDARD.scale;
    let c = Ctx {
        fs: Arc::clone(fs),
        id: 0,
        foreground: 1,
        workers: 1,
        background: false,
        leads: true,
        mode: Mode::Corrected,
        direct: false,
        scale,
        prefix: String::new(),
        seed: 42,
        seconds,
    };
    let mut load = build(&test, &c);
    load.prepare(&c)?;
    fs.sync().on("sync", c".")?;
    let (ops, end, ended) = (AtomicU64::new(0), AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|s| {
        // the passes are in a thread of their own: a load need not be able to go to another
        let passing = s.spawn(|| {
            let done = passes(fs, &ops, seconds, &ended);
            end.store(true, Ordering::Relaxed);
            done
        });
        let mut work = || -> Result<()> {
            while !end.load(Ordering::Relaxed) {
                if stop.load(Ordering::Relaxed) {
                    return Err(Error::Interrupted);
                }
                if let Step::Did(n) = load.step(&c)? {
                    ops.fetch_add(n, Ordering::Relaxed);
                }
            }
            Ok(())
        };
        let worked = work();
        ended.store(true, Ordering::Relaxed);
        let done = passing.join().unwrap_or_else(|_| Err(Error::Other("the GC panicked".into())));
        worked.and(done)
    })
}

fn one(job: &mut Job<'_>, device: &Path, files: u64, rep: u64) -> Result<()> {
    crashed(device, files, job.args.domains)?;
    sys::drop_caches();
    let (fs, mounted) = timed(|| mount(device, false))?;
    let gc = collect(&fs)?;
    fs.unmount().map_err(failed("unmounting", device))?;
    let fs = Arc::new(mount(device, true)?);
    let beside = with_varmail(&fs, job.args.seconds, &job.stop)?;
    let fs = Arc::into_inner(fs).ok_or_else(|| Error::Other("a worker still uses the volume".into()))?;
    fs.unmount().map_err(failed("unmounting", device))?;
    let rate = |(ops, seconds): (u64, f64)| ops as f64 / seconds.max(1e-9);
    let (during, between) = (rate(beside.during), rate(beside.between));
    for (step, unit, value) in [
        ("mount after the crash", Unit::Seconds, mounted),
        ("GC alone, nothing cached", Unit::Seconds, gc),
        ("GC beside varmail, cached", Unit::Seconds, crate::stats::median(&beside.passes)),
        ("varmail between passes", Unit::Rate, between),
        ("varmail beside the GC", Unit::Rate, during),
        ("varmail, beside over between", Unit::Ratio, during / between.max(1e-9)),
    ] {
        job.add(What::Gc, "library", (&format!("{files} files: {step}"), unit), value, rep);
    }
    Ok(())
}

/// Times it.
pub fn time(job: &mut Job<'_>) -> Result<()> {
    let device: Option<PathBuf> = job.lab.media.as_ref().map(|m| m.device().to_path_buf());
    let Some(device) = device.filter(|_| job.has(&Target::Library)) else {
        return Err(Error::Usage("gc: it is timed in the library: have that among the targets".into()));
    };
    let text = format!(
        "{} domains, objects spread over them; varmail by one thread, {} s of passes of the GC and as long between them; {}.",
        job.args.domains, job.args.seconds, job.results.head.plan.media
    );
    job.note(What::Gc, text);
    for rep in 0..job.args.reps {
        for files in job.args.files.clone() {
            job.check()?;
            one(job, &device, files, rep)?;
        }
    }
    Ok(())
}
