//! The process that hosts workers: reads its [`Spec`], pins itself, works, answers.

use super::{Answer, Ctx, Load, Place, Report, Shared, Spec, turn};
use crate::fs::{Fs, Kernel};
use crate::suite::{TestId, build};
use crate::{Error, Result, sys};
use std::io::{Read, Write};
use std::path::Path;
use std::sync::Arc;

/// The hidden `worker` command; its exit code.
pub fn main() -> u8 {
    let answer = match spec().and_then(|s| run(&s)) {
        Ok(reports) => Answer::Done(reports),
        Err(Error::Unsupported(why)) => Answer::Unsupported(why),
        Err(e) => Answer::Failed(e.to_string()),
    };
    let code = u8::from(!matches!(answer, Answer::Done(_)));
    let told = serde_json::to_vec(&answer).map_err(std::io::Error::from).and_then(|text| {
        let mut out = std::io::stdout().lock();
        out.write_all(&text)?;
        out.flush()
    });
    // without a reader there is nobody to tell
    if told.is_err() { 1 } else { code }
}

fn spec() -> Result<Spec> {
    sys::die_with_parent();
    let mut text = String::new();
    std::io::stdin().read_to_string(&mut text).map_err(|e| Error::io("reading the worker's task", e))?;
    serde_json::from_str(&text).map_err(|e| Error::Usage(format!("worker: not for people: {e}")))
}

fn run(spec: &Spec) -> Result<Vec<Report>> {
    let control = Shared::inherit(spec.control_fd).map_err(|e| Error::io("mapping the control memory", e))?;
    let test: TestId = spec.test.parse()?;
    let done = match &spec.place {
        Place::Dir(dir) => in_dir(spec, &test, dir, &control),
        Place::Library(device) => in_library(spec, &test, device, &control),
    };
    if done.is_err() {
        control.fail();
    }
    done
}

fn in_dir(spec: &Spec, test: &TestId, dir: &Path, control: &Shared) -> Result<Vec<Report>> {
    std::env::set_current_dir(dir).map_err(|e| Error::io(format!("entering {}", dir.display()), e))?;
    let fs = Arc::new(Kernel::here());
    // the original uses absolute paths
    let prefix = match spec.mode {
        super::Mode::Original => format!("{}/", dir.display()),
        super::Mode::Corrected => String::new(),
    };
    threads(spec, test, &fs, &prefix, control)
}

#[cfg(feature = "braidfs")]
fn in_library(spec: &Spec, test: &TestId, device: &Path, control: &Shared) -> Result<Vec<Report>> {
    let failed = |what: &str, e| Error::io(format!("{what} {}", device.display()), e);
    let data = if spec.journal { braidfs::DataMode::Journal } else { braidfs::DataMode::Ordered };
    let options = braidfs::MountOptions { data, ..braidfs::MountOptions::default() };
    let mount = crate::fs::Library::device(device).and_then(|d| crate::fs::Library::mount_with(vec![d], options));
    let fs = Arc::new(mount.map_err(|e| failed("mounting", e))?);
    let reports = threads(spec, test, &fs, "", control)?;
    let fs = Arc::into_inner(fs).ok_or_else(|| Error::Other("a worker still uses the volume".into()))?;
    fs.unmount().map_err(|e| failed("unmounting", e))?;
    Ok(reports)
}

#[cfg(not(feature = "braidfs"))]
fn in_library(_: &Spec, _: &TestId, _: &Path, _: &Shared) -> Result<Vec<Report>> {
    Err(Error::Usage("this fxmark was built without the braidfs library: build it with --features braidfs".into()))
}

/// Runs the workers of this process, the only one on the main thread.
fn threads<F: Fs>(spec: &Spec, test: &TestId, fs: &Arc<F>, prefix: &str, control: &Shared) -> Result<Vec<Report>> {
    if let [one] = spec.mine[..] {
        return Ok(vec![worker(spec, test, Arc::clone(fs), prefix, control, one)?]);
    }
    std::thread::scope(|s| {
        let start = |one| {
            s.spawn(move || {
                let done = worker(spec, test, Arc::clone(fs), prefix, control, one);
                if done.is_err() {
                    control.fail();
                }
                done
            })
        };
        let all: Vec<_> = spec.mine.iter().map(|&one| start(one)).collect();
        let join = |t: std::thread::ScopedJoinHandle<'_, Result<Report>>| {
            t.join().unwrap_or_else(|_| Err(Error::Other("a worker panicked".into())))
        };
        // all are joined before the first failure is returned
        let all: Vec<_> = all.into_iter().map(join).collect();
        all.into_iter().collect()
    })
}

fn worker<F: Fs>(
    spec: &Spec,
    test: &TestId,
    fs: Arc<F>,
    prefix: &str,
    control: &Shared,
    (id, cpu): (usize, usize),
) -> Result<Report> {
    sys::pin(cpu).map_err(|e| Error::io(format!("pinning worker {id} to CPU {cpu}"), e))?;
    if test.direct && !fs.has_direct() {
        return Err(Error::Unsupported("no O_DIRECT here".into()));
    }
    let c = Ctx {
        fs,
        id,
        foreground: spec.foreground,
        workers: spec.workers,
        background: id >= spec.foreground,
        leads: id < spec.parts,
        mode: spec.mode,
        direct: test.direct,
        scale: spec.scale,
        prefix: prefix.to_owned(),
        seed: spec.seed,
        seconds: spec.seconds,
    };
    let mut load: Box<dyn Load<F>> = build(test, &c);
    let done = turn::work(&c, &mut *load, control);
    if done.is_err() {
        control.fail();
    }
    done
}
