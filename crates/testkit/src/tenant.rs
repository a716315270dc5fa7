//! A crash at every write and every flush while a tenant is made, used, given another budget, twice, and removed.
//!
//! After each the tenant is there as one of the calls left it that had returned or were under way, or not; fsck finds nothing,
//! and what was synced is there.

use crate::resize::{holds, keeps, options, write};
use crate::states::{Budget, CrashState, Log};
use crate::torn::{HEADER_COPY, nothing_but};
use crate::walk::fsck;
use braidfs::{
    Cred, DeviceSet, InodeNo, JournalMode, MemoryBudget, MkfsOptions, Rate, Rates, SoftLimit, Tenant, TenantBudget,
    Volume, mkfs,
};
use braidfs_device::{Device, MemDevice, RecordDevice};
use std::sync::Arc;
use std::time::Duration;

const MIB: u64 = 1 << 20;

/// What the tenant may use after each call, by the number of its [`budget`]; `None`: there is none. The file lies in it from the
/// second on.
const STEPS: [Option<u64>; 6] = [None, Some(1), Some(1), Some(2), Some(3), None];
const FILE_FROM: usize = 2;

/// A budget of which each field is another for another `n`, none of which it comes to here.
fn budget(n: u64) -> TenantBudget {
    let rate = |kind: u64| Some(Rate { per_second: (1 << 40) + 10 * n + kind, burst: Some((1 << 40) + 20 * n + kind) });
    TenantBudget {
        space: Some((5 + n) * MIB),
        inodes: Some(1000 + n),
        soft_space: Some(SoftLimit { space: (3 + n) * MIB, grace: Duration::from_secs(86_400 + n) }),
        rates: Rates { read_bps: rate(1), write_bps: rate(2), read_iops: rate(3), write_iops: rate(4) },
        memory: MemoryBudget { least: n * MIB, most: Some((8 + n) * MIB) },
        journal: [None, Some(JournalMode::Ordered), Some(JournalMode::Data)][n as usize % 3],
        serving: rate(5),
        devices: if n.is_multiple_of(2) { DeviceSet::ALL } else { crate::small::set(&[0]) },
    }
}

fn create(v: &Volume) -> braidfs::Result<Tenant> {
    v.tenant_create(InodeNo::ROOT, b"d", 0o755, "t", budget(1), &Cred::root())
}

fn look(image: MemDevice, done: usize) -> Result<usize, String> {
    let devices: [Arc<dyn Device>; 1] = [Arc::new(image)];
    let text = |e: braidfs::Error| e.to_string();
    // The write of a header may be torn, of the copy that does not count by then: a budget lies in several of its sectors. A mount
    // writes that anew.
    nothing_but(HEADER_COPY, &devices)?;
    let v = Volume::mount(devices.to_vec(), options()).map_err(text)?;
    holds(&v, "before", 1)?;
    if done >= FILE_FROM {
        holds(&v, "d/f", 2)?;
    }
    let is = v.tenants().first().map(|t| t.budget);
    let may: Vec<_> = STEPS[done..(done + 2).min(STEPS.len())].iter().map(|n| n.map(budget)).collect();
    // a call that changes the journal says so first
    let between = match may[..] {
        [Some(old), Some(new)] => is == Some(TenantBudget { journal: new.journal, ..old }),
        _ => false,
    };
    if !may.contains(&is) && !between || v.tenants().len() > 1 {
        return Err(format!("{:?} after {done} calls", v.tenants()));
    }
    // and it goes on: under the same name, or as it is
    if is.is_none() {
        v.tenant_create(InodeNo::ROOT, b"again", 0o755, "t", budget(7), &Cred::root()).map_err(text)?;
    } else {
        v.tenant_set("t", budget(7)).map_err(text)?;
    }
    v.unmount().map_err(text)?;
    fsck(&devices).map_err(|e| format!("afterwards: {e}"))?;
    let v = Volume::mount(devices.to_vec(), options()).map_err(text)?;
    if v.tenant("t").map_err(text)?.budget != budget(7) {
        return Err(format!("{:?} after an unmount", v.tenants()));
    }
    v.unmount().map_err(text)?;
    Ok(usize::from(is.is_some()))
}

/// Crashes that at every point; how many states there were, and in how many there was the tenant.
///
/// # Errors
/// The first state that is none of those that may be.
pub fn every_crash_of_a_tenant() -> Result<(usize, usize), String> {
    let text = |e: braidfs::Error| e.to_string();
    let small = Arc::new(MemDevice::soiled(48 * MIB / 4096));
    let device: Arc<dyn Device> = small.clone();
    let how = MkfsOptions { domains: Some(2), group_bytes: Some(4 * MIB), ..MkfsOptions::default() };
    mkfs::format(std::slice::from_ref(&device), &how).map_err(text)?;
    let v = Volume::mount(vec![device], options()).map_err(text)?;
    write(&v, "before", 1)?;
    v.unmount().map_err(text)?;
    let log = Arc::new(RecordDevice::new(small.snapshot()));
    let v = Volume::mount(vec![Arc::clone(&log) as Arc<dyn Device>], options()).map_err(text)?;
    let mut ends = vec![log.log_len()];
    create(&v).map_err(text)?;
    ends.push(log.log_len());
    write(&v, "d/f", 2)?;
    ends.push(log.log_len());
    for n in [2, 3] {
        v.tenant_set("t", budget(n)).map_err(text)?;
        ends.push(log.log_len());
    }
    v.tenant_remove("t").map_err(text)?;
    ends.push(log.log_len());
    v.crash();
    each_crash(&log, &ends, look)
}

/// Crashes at every point of what was written since the first of `ends`, and has each state looked at, told of how many calls
/// had returned then; how many states there were, and how many of them `look` counted.
pub(crate) fn each_crash(
    log: &Arc<RecordDevice>,
    ends: &[usize],
    look: impl Fn(MemDevice, usize) -> Result<usize, String>,
) -> Result<(usize, usize), String> {
    let record = Log::of(log);
    let few = Budget { subsets: 3, samples: 6 };
    let mut rng = fastrand::Rng::with_seed(7);
    let (mut states, mut there) = (0, 0);
    for upto in record.points(ends[0], ends.iter().copied()) {
        let done = ends.iter().rposition(|e| *e <= upto).unwrap_or(0);
        for keep in keeps(&record, upto, &few, &mut rng) {
            let state = CrashState { upto, keep };
            let image = MemDevice::from_image(record.image(&state));
            states += 1;
            there += look(image, done).map_err(|e| format!("{state}: {e}"))?;
        }
    }
    Ok((states, there))
}
