//! A crash at every write and every flush while a tenant is given other devices, and what it has moves there.
//!
//! After each the tenant may use the one or the other, as the call left it that had returned or was under way; fsck finds nothing,
//! what was synced is there, and the move goes on to its end.

use crate::devices::{both, each_crash, large, large_holds};
use crate::resize::{holds, options, write};
use crate::states::Log;
use crate::walk::fsck;
use braidfs::store::interface::LiveVolume;
use braidfs::{Cred, DeviceSet, InodeNo, MkfsOptions, TenantBudget, Volume, mkfs};
use braidfs_device::{Device, MemDevice, RecordDevice};
use std::sync::Arc;

const MIB: u64 = 1 << 20;
const EACH: u64 = 32 * MIB;
/// MiB of the tenant's file.
const LARGE: u64 = 7;

fn text(e: braidfs::Error) -> String {
    e.to_string()
}

/// One device and no other.
fn only(n: usize) -> DeviceSet {
    DeviceSet::of([n]).unwrap()
}

fn set(v: &Volume, n: usize) -> Result<(), String> {
    v.tenant_change("t", |b| b.devices = only(n)).map(drop).map_err(text)
}

/// Block groups that the tenant has on a device.
fn groups_on(v: &Volume, device: usize) -> Result<usize, String> {
    let sb = v.super_block();
    let of = &sb.device_table()[device];
    let range = of.first_group.get()..of.first_group.get() + of.groups.get();
    let domain = v.tenant("t").map_err(text)?.domain;
    Ok(v.groups(domain).iter().filter(|g| range.contains(g)).count())
}

/// A tenant with its journal and its numbers on device 0 and a large file on device 1, unmounted.
fn made() -> Result<Arc<MemDevice>, String> {
    let whole = Arc::new(MemDevice::soiled(2 * EACH / 4096));
    let all = both(&whole, [EACH, EACH]);
    let how = MkfsOptions { domains: Some(2), group_bytes: Some(4 * MIB), ..MkfsOptions::default() };
    mkfs::format(&all, &how).map_err(text)?;
    let v = Volume::mount(all.to_vec(), options()).map_err(text)?;
    write(&v, "before", 1)?;
    let budget = TenantBudget { devices: only(0), ..TenantBudget::default() };
    v.tenant_create(InodeNo::ROOT, b"d", 0o755, "t", budget, &Cred::root()).map_err(text)?;
    write(&v, "d/small", 2)?;
    large(&v, "d/large", 0)?;
    set(&v, 1)?;
    large(&v, "d/large", LARGE)?;
    v.sync().map_err(text)?;
    if groups_on(&v, 1)? < 2 {
        return Err("the tenant has not moved".into());
    }
    v.unmount().map_err(text)?;
    Ok(whole)
}

fn there(v: &Volume) -> Result<(), String> {
    holds(v, "before", 1)?;
    holds(v, "d/small", 2)?;
    large_holds(v, "d/large", LARGE)
}

/// Looks at one state; whether the tenant could still use the old device only. `done`: the call had returned, `moved`: so had the
/// move.
fn look(all: &[Arc<dyn Device>; 2], done: bool, moved: bool) -> Result<bool, String> {
    fsck(all)?;
    let v = Volume::mount(all.to_vec(), options()).map_err(text)?;
    there(&v)?;
    let is = v.tenant("t").map_err(text)?.budget.devices;
    let is_old = is == only(1);
    if is != only(0) && !is_old || is_old && done {
        return Err(format!("it may use {is}"));
    }
    if moved && groups_on(&v, 1)? > 0 {
        return Err("it has groups on the other device after the move".into());
    }
    if is_old {
        set(&v, 0)?;
    }
    let left = v.tenant_move("t", &|_, _| true).map_err(text)?;
    if left.groups > 0 || groups_on(&v, 1)? > 0 {
        return Err(format!("{left:?} after the move went on"));
    }
    there(&v)?;
    v.unmount().map_err(text)?;
    fsck(all).map_err(|e| format!("afterwards: {e}"))?;
    let v = Volume::mount(all.to_vec(), options()).map_err(text)?;
    there(&v)?;
    v.unmount().map_err(text)?;
    Ok(is_old)
}

/// Crashes that at every point; how many states there were, and in how many the tenant was where it had been.
///
/// # Errors
/// The first state that is none of those that may be.
pub fn every_crash_of_a_move() -> Result<(usize, usize), String> {
    let log = Arc::new(RecordDevice::new(made()?.snapshot()));
    let v = Volume::mount(both(&log, [EACH, EACH]).to_vec(), options()).map_err(text)?;
    v.sync().map_err(text)?;
    let begin = log.log_len();
    set(&v, 0)?;
    let done = log.log_len();
    v.tenant_move("t", &|_, _| true).map_err(text)?;
    let end = log.log_len();
    v.crash();
    each_crash(&Log::of(&log), [EACH, EACH], [begin, done], |upto, devices| look(devices, upto >= done, upto >= end))
}
