//! A crash at every write and every flush of one call that changes how a tenant uses its journal and which devices it may use.
//!
//! After each the tenant is as before, or has the new mode on the old devices, or is as the call left it: never the new devices
//! in the old mode. What a tenant without a journal held is there as soon as its header says that it has one. fsck finds
//! nothing, and the same call goes on to its end.

use crate::devices::{both, each_crash};
use crate::resize::{holds, options, write};
use crate::scratch::tree;
use crate::states::Log;
use crate::walk::fsck;
use braidfs::{Cred, DeviceSet, InodeNo, JournalMode, MkfsOptions, TenantBudget, Volume, mkfs};
use braidfs_device::{Device, MemDevice, RecordDevice};
use std::cell::Cell;
use std::sync::Arc;

const MIB: u64 = 1 << 20;
const EACH: u64 = 32 * MIB;

/// States in which the tenant was as before, in between, and as the call left it.
#[derive(Debug, Default)]
pub struct Found {
    /// Neither of both was changed.
    pub old: Cell<usize>,
    /// The mode was, the devices not.
    pub between: Cell<usize>,
    /// Both were.
    pub new: Cell<usize>,
}

/// A change of the mode from the first to the second.
type Modes = [Option<JournalMode>; 2];

fn text(e: braidfs::Error) -> String {
    e.to_string()
}

fn only(n: usize) -> DeviceSet {
    DeviceSet::of([n]).unwrap_or(DeviceSet::ALL)
}

fn change(v: &Volume, journal: Option<JournalMode>) -> Result<(), String> {
    v.tenant_change("t", |b| (b.journal, b.devices) = (journal, only(1))).map(drop).map_err(text)
}

fn scratch(mode: Option<JournalMode>) -> bool {
    mode == Some(JournalMode::Scratch)
}

fn made(from: Option<JournalMode>) -> Result<Arc<MemDevice>, String> {
    let whole = Arc::new(MemDevice::soiled(2 * EACH / 4096));
    let all = both(&whole, [EACH, EACH]);
    let how = MkfsOptions { domains: Some(2), group_bytes: Some(4 * MIB), ..MkfsOptions::default() };
    mkfs::format(&all, &how).map_err(text)?;
    let v = Volume::mount(all.to_vec(), options()).map_err(text)?;
    write(&v, "before", 1)?;
    let budget = TenantBudget { devices: only(0), journal: from, ..TenantBudget::default() };
    v.tenant_create(InodeNo::ROOT, b"d", 0o755, "t", budget, &Cred::root()).map_err(text)?;
    // something that is gone
    write(&v, "d/gone", 7)?;
    v.unlink_path(b"d/gone", &Cred::root()).map_err(text)?;
    v.unmount().map_err(text)?;
    Ok(whole)
}

/// Looks at one state; `done`: the call had returned.
fn look(all: &[Arc<dyn Device>; 2], [from, to]: Modes, done: bool, found: &Found) -> Result<(), String> {
    fsck(all)?;
    let v = Volume::mount(all.to_vec(), options()).map_err(text)?;
    holds(&v, "before", 1)?;
    let t = v.tenant("t").map_err(text)?;
    let is = (t.budget.journal, t.budget.devices);
    let which = if is == (from, only(0)) && !done {
        &found.old
    } else if is == (to, only(0)) && !done {
        &found.between
    } else if is == (to, only(1)) {
        &found.new
    } else {
        return Err(format!(
            "journal {:?} on devices {} where the call had {}returned",
            is.0,
            is.1,
            ["not ", ""][usize::from(done)]
        ));
    };
    which.set(which.get() + 1);
    let there = |v: &Volume| match scratch(is.0) || scratch(to) {
        true if tree(v, t.root).map_err(text)?.is_empty() => Ok(()),
        true => Err("it is not empty".to_string()),
        false => (2..4).try_for_each(|n| holds(v, &format!("d/f{n}"), n)),
    };
    there(&v)?;
    if is != (to, only(1)) {
        change(&v, to).map_err(|e| format!("again: {e}"))?;
    }
    there(&v)?;
    write(&v, "d/again", 9)?;
    v.unmount().map_err(text)?;
    fsck(all).map_err(|e| format!("afterwards: {e}"))?;
    let v = Volume::mount(all.to_vec(), options()).map_err(text)?;
    holds(&v, "d/again", 9)?;
    let is = v.tenant("t").map_err(text)?.budget;
    if (is.journal, is.devices) != (to, only(1)) {
        return Err(format!("afterwards {is:?}"));
    }
    v.unmount().map_err(text)
}

/// Crashes such a call at every point; how many states there were.
///
/// # Errors
/// The first state that is none of those that may be.
pub fn every_crash_of_a_change(from: Option<JournalMode>, to: Option<JournalMode>) -> Result<(usize, Found), String> {
    let log = Arc::new(RecordDevice::new(made(from)?.snapshot()));
    let v = Volume::mount(both(&log, [EACH, EACH]).to_vec(), options()).map_err(text)?;
    if !scratch(to) {
        (2..4).try_for_each(|n| write(&v, &format!("d/f{n}"), n))?;
    }
    let begin = log.log_len();
    change(&v, to)?;
    let done = log.log_len();
    v.crash();
    let found = Found::default();
    let (states, _) = each_crash(&Log::of(&log), [EACH, EACH], [begin, done], |upto, devices| {
        look(devices, [from, to], upto >= done, &found).map(|()| true)
    })?;
    Ok((states, found))
}
