//! A crash at every write and every flush while a tenant without a journal is made, used over two mounts and unmounted.
//!
//! After each the tenant is as its last unmount left it, if nothing came after that, or empty; its neighbours have what they
//! synced; fsck finds nothing; and the volume goes on. The same for crashes of the mount that empties it.

use crate::resize::{holds, keeps, options, write};
use crate::states::{Budget, CrashState, Log};
use crate::subject::names;
use crate::tenant::each_crash;
use crate::walk::{fsck, walk};
use braidfs::{Cred, FileKind, InodeNo, JournalMode, MkfsOptions, SetAttr, Tenant, TenantBudget, Volume, mkfs};
use braidfs_device::{Device, MemDevice, RecordDevice};
use std::collections::BTreeMap;
use std::sync::Arc;

const MIB: u64 = 1 << 20;
/// Of the root directory, as it is changed after it was made.
const MODE: u32 = 0o2750;

/// What lies below a directory: files with their content, and directories.
type Tree = BTreeMap<String, Option<Vec<u8>>>;

fn text(e: braidfs::Error) -> String {
    e.to_string()
}

/// A tenant without a journal.
pub fn budget(bytes: u64) -> TenantBudget {
    TenantBudget { space: Some(bytes), journal: Some(JournalMode::Scratch), ..TenantBudget::default() }
}

/// Makes one at `d`, named `t`.
pub fn create(v: &Volume) -> braidfs::Result<Tenant> {
    v.tenant_create(InodeNo::ROOT, b"d", 0o755, "t", budget(16 * MIB), &Cred::root())
}

/// All that lies below `dir`.
///
/// # Errors
/// Of reading it.
pub fn tree(v: &Volume, dir: InodeNo) -> braidfs::Result<Tree> {
    let mut all = Tree::new();
    let mut todo = vec![(String::new(), dir)];
    while let Some((path, dir)) = todo.pop() {
        for name in names(v, dir)? {
            let attr = v.lookup(dir, &name)?;
            let path = format!("{path}/{}", String::from_utf8_lossy(&name));
            let content = if attr.kind() == FileKind::Dir {
                todo.push((path.clone(), attr.ino));
                None
            } else {
                let mut content = vec![0; attr.size as usize];
                let n = v.read(&v.open(attr.ino)?, 0, &mut content)?;
                content.truncate(n);
                Some(content)
            };
            all.insert(path, content);
        }
    }
    Ok(all)
}

/// What may be found below the tenant's root: `None` stands for no tenant.
type States = Vec<Option<Tree>>;

fn may(found: &Option<Tree>, states: &[Option<Tree>], done: usize) -> Result<(), String> {
    if states.contains(found) {
        return Ok(());
    }
    let show = |t: &Option<Tree>| t.as_ref().map(|t| t.keys().cloned().collect::<Vec<_>>());
    let all: Vec<_> = states.iter().map(show).collect();
    Err(format!("{:?} after {done} steps, which leave one of {all:?}", show(found)))
}

/// How the volume is: what the neighbour has, and what may be found in the tenant.
struct Stage {
    /// Files of the neighbour that were synced, each with its number as content.
    synced: u8,
    states: States,
}

/// Whether the tenant was found, and held something.
fn look(image: MemDevice, done: usize, stage: &Stage) -> Result<bool, String> {
    let devices: [Arc<dyn Device>; 1] = [Arc::new(image)];
    fsck(&devices).map_err(|e| format!("fsck: {e}"))?;
    let v = Volume::mount(devices.to_vec(), options()).map_err(text)?;
    (1..=stage.synced).try_for_each(|n| holds(&v, &format!("n{n}"), n))?;
    let found = match v.tenant("t") {
        Ok(t) => Some(tree(&v, t.root).map_err(text)?),
        Err(_) => None,
    };
    may(&found, &stage.states, done)?;
    if let Ok(t) = v.tenant("t") {
        if t.budget != budget(16 * MIB) || v.lookup(InodeNo::ROOT, b"d").map_err(text)?.ino != t.root {
            return Err(format!("{t:?} has other limits, or another root"));
        }
        let attr = v.getattr(t.root).map_err(text)?;
        if done > 2 && (attr.mode & 0o7777, attr.uid) != (MODE, 7) {
            return Err(format!("its root has mode {:o} of {}", attr.mode, attr.uid));
        }
        if attr.nlink as usize
            != 2 + found.iter().flatten().filter(|(p, c)| c.is_none() && p.matches('/').count() == 1).count()
        {
            return Err(format!("its root has {} links", attr.nlink));
        }
    }
    walk(&v)?;
    // and it goes on
    if found.is_some() {
        write(&v, "d/again", 9)?;
        v.commit_domain(v.tenant("t").map_err(text)?.domain, false).map_err(text)?;
    }
    write(&v, "again", 8)?;
    v.unmount().map_err(text)?;
    fsck(&devices).map_err(|e| format!("fsck afterwards: {e}"))?;
    let v = Volume::mount(devices.to_vec(), options()).map_err(text)?;
    holds(&v, "again", 8)?;
    if found.is_some() {
        holds(&v, "d/again", 9)?;
        v.unlink(v.tenant("t").map_err(text)?.root, b"again").map_err(text)?;
        may(&Some(tree(&v, v.tenant("t").map_err(text)?.root).map_err(text)?), std::slice::from_ref(&found), done)?;
    }
    v.unmount().map_err(text)?;
    Ok(found.is_some_and(|t| !t.is_empty()))
}

fn mount(log: &Arc<RecordDevice>) -> Result<Volume, String> {
    Volume::mount(vec![Arc::clone(log) as Arc<dyn Device>], options()).map_err(text)
}

/// Changes what is in the tenant, and has blocks that were freed used again, without an unmount in between.
fn use_it(v: &Volume, n: u8) -> Result<(), String> {
    let t = v.tenant("t").map_err(text)?;
    let commit = || v.commit_domain(t.domain, false).map_err(text);
    let cred = Cred::root();
    for round in 0..3 {
        let dir = format!("d/dir{n}{round}");
        v.mkdir_path(dir.as_bytes(), 0o755, &cred).map_err(text)?;
        for i in 0..4 {
            write(v, &format!("{dir}/f{i}"), n.wrapping_mul(40).wrapping_add(round * 10 + i))?;
        }
        commit()?;
        v.unlink_path(format!("{dir}/f0").as_bytes(), &cred).map_err(text)?;
        v.unlink_path(format!("{dir}/f1").as_bytes(), &cred).map_err(text)?;
        write(v, "d/over", n.wrapping_add(round))?;
        commit()?;
    }
    Ok(())
}

/// A volume with a tenant without a journal that is made, used and unmounted, twice, recorded.
struct Run {
    log: Arc<RecordDevice>,
    ends: Vec<usize>,
    stages: Vec<Stage>,
}

fn run() -> Result<Run, String> {
    let small = Arc::new(MemDevice::soiled(64 * MIB / 4096));
    let device: Arc<dyn Device> = small.clone();
    let how = MkfsOptions { domains: Some(2), group_bytes: Some(4 * MIB), ..MkfsOptions::default() };
    mkfs::format(std::slice::from_ref(&device), &how).map_err(text)?;
    let v = Volume::mount(vec![device], options()).map_err(text)?;
    write(&v, "n1", 1)?;
    v.unmount().map_err(text)?;
    let log = Arc::new(RecordDevice::new(small.snapshot()));
    let empty = || Some(Tree::new());
    let mut v = mount(&log)?;
    let mut ends = vec![log.log_len()];
    // what holds from the end of each step on until the end of the next
    let mut stages = vec![Stage { synced: 1, states: vec![None, empty()] }];
    create(&v).map_err(text)?;
    ends.push(log.log_len());
    stages.push(Stage { synced: 1, states: vec![empty()] });
    let set = SetAttr { mode: Some(MODE), uid: Some(7), ..SetAttr::default() };
    v.setattr(v.tenant("t").map_err(text)?.root, &set).map_err(text)?;
    ends.push(log.log_len());
    stages.push(Stage { synced: 1, states: vec![empty()] });
    for n in 2..4 {
        use_it(&v, n)?;
        ends.push(log.log_len());
        stages.push(Stage { synced: n - 1, states: vec![empty()] });
        write(&v, &format!("n{n}"), n)?;
        let whole = Some(tree(&v, v.tenant("t").map_err(text)?.root).map_err(text)?);
        ends.push(log.log_len());
        stages.push(Stage { synced: n, states: vec![empty(), whole.clone()] });
        v.unmount().map_err(text)?;
        ends.push(log.log_len());
        stages.push(Stage { synced: n, states: vec![whole.clone()] });
        // a mount says that it is in use
        ends.push(log.log_len());
        stages.push(Stage { synced: n, states: vec![whole, empty()] });
        v = mount(&log)?;
        ends.push(log.log_len());
        stages.push(Stage { synced: n, states: vec![empty()] });
    }
    v.crash();
    Ok(Run { log, ends, stages })
}

/// Crashes that at every point; how many states there were, and in how many of them the tenant had something in it.
///
/// # Errors
/// The first state that is none of those that may be.
pub fn every_crash_of_a_scratch() -> Result<(usize, usize), String> {
    let run = run()?;
    each_crash(&run.log, &run.ends, |image, done| Ok(usize::from(look(image, done, &run.stages[done])?)))
}

/// Crashes at every point of a mount after a crash, which empties the tenant; how many states there were.
///
/// # Errors
/// As [`every_crash_of_a_scratch`].
pub fn every_crash_of_a_discard() -> Result<usize, String> {
    let run = run()?;
    let record = Log::of(&run.log);
    // in use, with blocks overwritten that the tables on the device do not tell of
    let upto = run.ends[run.ends.len() - 5];
    let few = Budget { subsets: 1, samples: 1 };
    let mut rng = fastrand::Rng::with_seed(11);
    let mut states = 0;
    for keep in keeps(&record, upto, &few, &mut rng).into_iter().take(3) {
        let image = MemDevice::from_image(record.image(&CrashState { upto, keep }));
        let log = Arc::new(RecordDevice::new(image.snapshot()));
        let begin = log.log_len();
        mount(&log)?.crash();
        let stage = Stage { synced: 2, states: vec![Some(Tree::new())] };
        states += each_crash(&log, &[begin], |image, _| Ok(usize::from(look(image, 3, &stage)?)))?.0;
    }
    Ok(states)
}

/// A file that was synced outside is moved into a tenant without a journal, and the volume is synced; then it crashes.
///
/// # Errors
/// Where the file is gone: it was synced, and nobody removed it.
pub fn a_name_over_the_border() -> Result<(), String> {
    let device: Arc<dyn Device> = Arc::new(MemDevice::soiled(64 * MIB / 4096));
    let how = MkfsOptions { domains: Some(2), group_bytes: Some(4 * MIB), ..MkfsOptions::default() };
    mkfs::format(std::slice::from_ref(&device), &how).map_err(text)?;
    let v = Volume::mount(vec![device.clone()], options()).map_err(text)?;
    create(&v).map_err(text)?;
    // a directory that a crash takes along
    let dir = v.mkdir_path(b"d/dir", 0o755, &Cred::root()).map_err(text)?.ino;
    write(&v, "n1", 1)?;
    let moved = v.rename(InodeNo::ROOT, b"n1", dir, b"n1", braidfs::RenameMode::Replace);
    v.sync().map_err(text)?;
    v.crash();
    fsck(std::slice::from_ref(&device))?;
    let v = Volume::mount(vec![device], options()).map_err(text)?;
    holds(&v, "n1", 1).or_else(|_| holds(&v, "d/dir/n1", 1)).map_err(|e| format!("{e}; the rename answered {moved:?}"))
}
