//! One volume: filled, read, aged, read again.

use super::load::{Churn, Kind, Load, Overwrites};
use super::results::{Plan, Slice, Volume};
use super::venue::{Aged, Layout, Venue, layout};
use crate::error::On;
use crate::fs::OpenHow;
use crate::target::Target;
use crate::{Error, Result};
use hdrhistogram::Histogram;
use std::ffi::CString;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Operations without space, one after another, after which a run ends.
const HOPELESS: u64 = 3000;
/// How long to wait after one: what was freed may be there after the next commit.
const PAUSE: Duration = Duration::from_millis(1);
/// Bytes read at once.
const READ_BYTES: usize = 1 << 20;

/// Ages a volume by a load, filled to so many percent, in this round.
pub fn age<V: Venue>(
    venue: &mut V,
    plan: &Plan,
    target: &Target,
    (kind, fill, round): (Kind, u64, u64),
    stop: &AtomicBool,
) -> Result<Volume> {
    let seed = plan.seed + round;
    let mut load: Box<dyn Load<V::F>> = match kind {
        Kind::Overwrite => Box::new(Overwrites::new(seed, plan.fsync_every)),
        Kind::Churn => Box::new(Churn::new(seed, plan.profile, plan.largest)),
    };
    let failed = |e: Error| match e {
        e @ (Error::Interrupted | Error::Usage(_)) => e,
        e => Error::Other(format!("{} on {target}, {fill} % full: {e}", kind.name())),
    };
    let mut volume = Volume {
        target: target.to_string(),
        load: kind,
        fill,
        round,
        capacity: 0,
        filled: 0,
        available: 0,
        slices: Vec::new(),
        settled: None,
        fresh: None,
        aged: None,
        read_fresh: 0.0,
        read_aged: 0.0,
        notes: Vec::new(),
    };
    run(venue, plan, load.as_mut(), &mut volume, stop).map_err(failed)?;
    Ok(volume)
}

fn run<V: Venue>(
    venue: &mut V,
    plan: &Plan,
    load: &mut dyn Load<V::F>,
    v: &mut Volume,
    stop: &AtomicBool,
) -> Result<()> {
    let fs = venue.open()?;
    v.capacity = fs.available()?.min(plan.size);
    let (filled, whole) = load.fill(&fs, v.capacity / 100 * v.fill)?;
    v.filled = filled;
    if !sync(&fs)? {
        v.notes.push("no space was told by the sync after filling".into());
    }
    v.available = fs.available()?;
    if !whole {
        v.notes.push(format!("no space for more than {} % of files", v.filled * 100 / v.capacity.max(1)));
    }
    if v.filled == 0 {
        return Err(Error::Usage("there is no room for one file: a larger --size is needed".into()));
    }
    let (fs, fresh) = renew(venue, fs, &load.files())?;
    (v.fresh, v.read_fresh) = (fresh, read(&fs, &load.files(), plan.read, stop)?);
    if !venue.is_cold() {
        v.notes.push("read from the cache, which only root can drop".into());
    }
    load.open(&fs)?;
    slices(venue, plan, load, &fs, v, stop)?;
    load.close();
    let before = venue.written();
    sync(&fs)?;
    if venue.sync_commits() {
        v.settled = venue.written().zip(before).map(|(after, before)| after - before);
    } else {
        let why =
            "syncfs does not reach it: what a part left in memory counts for the next, and the last one's for none";
        v.notes.push(why.into());
    }
    let (fs, aged) = renew(venue, fs, &load.files())?;
    (v.aged, v.read_aged) = (aged, read(&fs, &load.files(), plan.read, stop)?);
    venue.close(fs)
}

/// syncfs; whether there was space for what had none yet.
fn sync<F: Aged>(fs: &F) -> Result<bool> {
    match fs.sync().on("syncfs", c".") {
        Err(e) if e.no_space() => Ok(false),
        done => done.map(|()| true),
    }
}

/// Unmounts and mounts it, so that nothing is cached; the pieces of its files.
fn renew<V: Venue>(venue: &mut V, fs: V::F, files: &[CString]) -> Result<(V::F, Option<Layout>)> {
    let mut found = layout(&fs, files)?;
    venue.close(fs)?;
    if found.is_none() {
        found = venue.layout_closed(files)?;
    }
    Ok((venue.open()?, found))
}

/// Bytes a second of reading files from their start to their end, `most` bytes in all.
fn read<F: Aged>(fs: &F, files: &[CString], most: u64, stop: &AtomicBool) -> Result<f64> {
    let (mut buf, mut done, began) = (vec![0; READ_BYTES], 0u64, Instant::now());
    for path in files {
        if done >= most {
            break;
        }
        interrupted(stop)?;
        let file = fs.open(path, OpenHow::READ).on("open", path)?;
        let mut at = 0;
        loop {
            let n = fs.read(&file, at, &mut buf).on("pread", path)?;
            (at, done) = (at + n as u64, done + n as u64);
            if n == 0 || done >= most {
                break;
            }
        }
    }
    Ok(done as f64 / began.elapsed().as_secs_f64().max(1e-9))
}

fn interrupted(stop: &AtomicBool) -> Result<()> {
    if stop.load(Ordering::Relaxed) { Err(Error::Interrupted) } else { Ok(()) }
}

/// Writes several times what is free.
fn slices<V: Venue>(
    venue: &V,
    plan: &Plan,
    load: &mut dyn Load<V::F>,
    fs: &V::F,
    v: &mut Volume,
    stop: &AtomicBool,
) -> Result<()> {
    let free = v.capacity.saturating_sub(v.filled);
    let each = ((free as f64 * plan.times / plan.slices as f64) as u64).max(1);
    let began = Instant::now();
    for _ in 0..plan.slices {
        let left = plan.limit - began.elapsed().as_secs_f64();
        let (slice, whole) = slice(venue, load, fs, (each, left), stop)?;
        v.slices.push(slice);
        if !whole {
            let part = v.slices.iter().map(|s| s.user).sum::<u64>() as f64 / free.max(1) as f64;
            v.notes.push(format!("ended after {:.0} s, {part:.1} times the free space", began.elapsed().as_secs_f64()));
            break;
        }
    }
    Ok(())
}

/// One part: so many bytes, or what was done when there was no space for long or so many seconds were over; whether it is
/// whole.
fn slice<V: Venue>(
    venue: &V,
    load: &mut dyn Load<V::F>,
    fs: &V::F,
    (bytes, seconds): (u64, f64),
    stop: &AtomicBool,
) -> Result<(Slice, bool)> {
    let mut times = Histogram::<u64>::new(3).map_err(|e| Error::Other(format!("histogram: {e}")))?;
    let (mut s, before, began, mut in_vain) = (Slice::default(), venue.written(), Instant::now(), 0);
    while s.user < bytes && in_vain < HOPELESS && began.elapsed().as_secs_f64() < seconds {
        let start = Instant::now();
        let done = load.step(fs);
        let took = start.elapsed();
        match done {
            Ok(n) => (s.user, s.ops, in_vain) = (s.user + n, s.ops + 1, if n > 0 { 0 } else { in_vain }),
            Err(e) if e.no_space() => {
                (s.no_space, in_vain) = (s.no_space + 1, in_vain + 1);
                std::thread::sleep(PAUSE);
            }
            Err(e) => return Err(e),
        }
        times.record(took.as_nanos() as u64).map_err(|e| Error::Other(format!("histogram: {e}")))?;
        interrupted(stop)?;
    }
    // what is only in memory yet would be counted for the next part, or, of files that go soon, never
    s.no_space += u64::from(!sync(fs)?);
    s.seconds = began.elapsed().as_secs_f64();
    s.device = venue.written().zip(before).map(|(after, before)| after - before);
    (s.p50, s.p999, s.max) = (times.value_at_quantile(0.5), times.value_at_quantile(0.999), times.max());
    let whole = s.user >= bytes;
    Ok((s, whole))
}
