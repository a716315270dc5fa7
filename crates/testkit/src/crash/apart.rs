//! Volumes on two devices whose domains have blocks on both, as far as there is room: the journal and most records of inodes on
//! the one, and on the other what is written from now on.

use crate::ops::At::Path;
use crate::ops::{Op, P};
use crate::run::Runner;
use braidfs::store::interface::LiveVolume;
use braidfs::{DomainId, FallocMode, FileKind, InodeNo};
use std::cmp::Reverse;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

/// Bytes by which files grow.
const STEP: u64 = 512 << 10;

/// The devices that a domain has groups on.
fn devices_of(r: &Runner, domain: DomainId) -> Result<BTreeSet<usize>, String> {
    let v = r.volume()?;
    let sb = v.super_block();
    let device = |g: u32| sb.device_table().partition_point(|d| d.first_group.get() <= g) - 1;
    Ok(v.groups(domain).into_iter().map(device).collect())
}

/// Whether a device has groups that are nobody's.
fn has_free(r: &Runner, device: usize) -> Result<bool, String> {
    let v = r.volume()?;
    let sb = v.super_block();
    let all: BTreeSet<u32> = (0..sb.domains.get()).flat_map(|d| v.groups(DomainId(d))).collect();
    let of = &sb.device_table()[device];
    let mut range = of.first_group.get()..of.first_group.get() + of.groups.get();
    Ok(range.any(|g| !all.contains(&g)))
}

/// A file of each domain that gets one by its placement, in a directory of its own.
fn files(r: &mut Runner) -> Result<BTreeMap<DomainId, P>, String> {
    let domains = r.volume()?.super_block().domains.get();
    let make = |path, kind| Op::Create { path, kind, mode: 0o755 };
    let mut files = BTreeMap::new();
    for n in 0..4 * domains {
        if files.len() == usize::from(domains) {
            break;
        }
        let dir = P::new(&format!("pad{n}"));
        let file = dir.join("f");
        r.apply(&make(dir, FileKind::Dir))?;
        r.apply(&make(file, FileKind::File))?;
        let domain = domain_of(r, file)?;
        if let Entry::Vacant(first) = files.entry(domain) {
            first.insert(file);
        } else {
            r.apply(&Op::Unlink { path: file })?;
            r.apply(&Op::Rmdir { path: dir })?;
        }
    }
    Ok(files)
}

fn domain_of(r: &Runner, file: P) -> Result<DomainId, String> {
    let v = r.volume()?;
    let mut at = InodeNo::ROOT;
    for name in file.0.split('/') {
        at = v.lookup(at, name.as_bytes()).map_err(|e| format!("{}: {e}", file.0))?.ino;
    }
    v.domain_of(at).map_err(|e| format!("{}: {e}", file.0))
}

/// Has the domains take blocks for files of no content until each has a group on either device, where there is one to be had,
/// and the room that it had before is used up.
///
/// # Errors
/// Of any operation.
pub fn spread(r: &mut Runner) -> Result<(), String> {
    let mut all = Vec::new();
    for (domain, file) in files(r)? {
        all.push((devices_of(r, domain)?, domain, file));
    }
    r.apply(&Op::Sync)?;
    // they claim the first group that is free: first those whose other device is the first
    all.sort_by_key(|(devices, domain, _)| (Reverse(devices.clone()), *domain));
    for (before, domain, file) in all {
        let mut at = STEP;
        let mut grow = |r: &mut Runner| {
            let mode = FallocMode::Allocate { keep_size: true };
            r.apply(&Op::Fallocate { at: Path(file), mode, off: at, len: STEP })?;
            at += STEP;
            Ok::<(), String>(())
        };
        let other = usize::from(before.contains(&0));
        while devices_of(r, domain)?.len() < 2 && has_free(r, other)? {
            grow(r)?;
        }
        if devices_of(r, domain)?.len() == 2 {
            // what it had left when it claimed one
            (0..2).try_for_each(|_| grow(r))?;
        }
    }
    r.apply(&Op::Sync)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::crash::explore::random_base;
    use crate::run::APART;

    #[test]
    fn domains_of_random_volumes_have_blocks_on_both() {
        let mut some = 0;
        for seed in 0..12 {
            let base = random_base(seed | APART).unwrap();
            let r = Runner::new(&base.setup, base.image, base.model, base.keys).unwrap();
            let domains = r.volume().unwrap().super_block().domains.get();
            let both = (0..domains).filter(|d| devices_of(&r, DomainId(*d)).unwrap().len() == 2).count();
            some += usize::from(both > 0);
            println!("seed {seed}: {both} of {domains}");
            r.abandon();
        }
        // where inodes lie in their directory's domain, it may be one that the first device has no group for
        assert!(some >= 8, "{some} of 12");
    }
}
