//! How much of what programs wrote the kernel may hold back: by the room that there is.
//!
//! The kernel holds dirty pages of a FUSE mount to a hundredth of what all may have, and has writers wait beyond: 40 MiB
//! on a machine of 24 GiB, which one writer fills in 50 ms. What it holds must find room in the volume, though
//! ([`crate::room`]). So at the mount it is allowed an eighth of the smallest domain's room, at least [`USUAL_BYTES`] and at
//! most [`MOST_BYTES`]; with little room [`LEAST_BYTES`] ([`wanted`]). When a domain gets so little room that the bound matters,
//! it goes down to the least; when all of them have much more again, it is set anew.
//!
//! The kernel keeps the bound as a part of the memory that may be dirty (`bdi_set_max_bytes` in `mm/page-writeback.c`),
//! so that it grows when memory becomes free. That is another reason to set it anew when it matters.

use braidfs_sync::{Mutex, rank};
use std::fs;
use std::path::PathBuf;

/// May be held in any case: what the bound is restricted to. One stream is written at 0.6 of the rate that it has with
/// [`USUAL_BYTES`]. A thread may store some more before the kernel looks at the bound: 1 % more was seen with 64 writers
/// (Linux 6.18), and [`crate::room`] leaves much more.
pub(crate) const LEAST_BYTES: u64 = 16 << 20;
/// Is allowed where a domain has [`USUAL_PARTS`] times as much room; and what the kernel is taken to hold at least where the
/// bound cannot be set.
pub(crate) const USUAL_BYTES: u64 = 64 << 20;
/// More than the room in which [`crate::room`] has the bound restricted: it is not set to and fro.
const USUAL_PARTS: u64 = 3;
/// More does not help: the kernel begins to write at a half of it.
const MOST_BYTES: u64 = 1 << 30;
/// At most beside a domain with a limit of its own (a tenant's): that must have room for twice the bound, or each `write` asks.
pub(crate) const MOST_BESIDE_LIMITED: u64 = 128 << 20;
/// Of the kernel's page cache.
const PAGE_BYTES: u64 = 4096;
/// Of the room.
const PART: u64 = 8;

/// The kernel's bound for one mount. Only root may set it; Linux 6.2.
///
/// What the kernel holds dirty of the volume is what it holds of all its mounts: where tenants are mounted by themselves
/// ([`Self::add`]), each has a bound of its own, [`USUAL_BYTES`], and all of them count.
#[derive(Debug)]
pub(crate) struct DirtyLimit(PathBuf, Mutex<Vec<PathBuf>, rank::DirtyTenants>);

impl DirtyLimit {
    /// Of the mount whose settings are in this directory.
    pub fn new(settings: impl Into<PathBuf>) -> Self {
        Self(settings.into().join("max_bytes"), Mutex::default())
    }

    /// Where the kernel has the settings of the connection, which it names by the number of the mount's device.
    pub fn connection(&self) -> Option<PathBuf> {
        let (major, minor) = self.0.parent()?.file_name()?.to_str()?.split_once(':')?;
        // behind it the kind of the file system, where that has a block device
        let minor = minor.split_once('-').map_or(minor, |m| m.0);
        Some(crate::mount::connection((major.parse().ok()?, minor.parse().ok()?)))
    }

    /// A tenant is mounted by itself, with this bound.
    pub fn add(&self, tenant: &Self) {
        // also where it is less: it is told of as this much
        tenant.set(USUAL_BYTES);
        self.1.lock().push(tenant.0.clone());
    }

    /// It is not any more.
    pub fn remove(&self, tenant: &Self) {
        self.1.lock().retain(|file| *file != tenant.0);
    }

    /// How much the kernel may hold of tenants that are mounted by themselves, bytes.
    pub fn of_tenants(&self) -> u64 {
        let files = self.1.lock().clone();
        files.into_iter().map(|file| Self(file, Mutex::default()).now().max(USUAL_BYTES)).sum()
    }

    /// Sets it to so much, or what comes near it; how much the kernel may hold then, bytes.
    pub fn allow(&self, mut bytes: u64) -> u64 {
        while bytes > LEAST_BYTES {
            if self.set(bytes) {
                return bytes + self.of_tenants();
            }
            // more than all mounts together may have
            bytes /= 2;
        }
        self.restrict()
    }

    /// Has it hold no more than the least. Where it holds more, writers wait until it does not. How much it may hold then,
    /// bytes: more where the bound cannot be set (not root, an old kernel).
    pub fn restrict(&self) -> u64 {
        let own = match self.set_at() {
            Some(now) if self.is_settable() && (now <= LEAST_BYTES || self.set(LEAST_BYTES)) => LEAST_BYTES,
            now => now.unwrap_or_else(usual).max(USUAL_BYTES),
        };
        own + self.of_tenants()
    }

    /// How much the kernel may hold now, bytes.
    pub fn now(&self) -> u64 {
        let least = if self.is_settable() { LEAST_BYTES } else { USUAL_BYTES };
        self.set_at().unwrap_or_else(usual).max(least) + self.of_tenants()
    }

    fn is_settable(&self) -> bool {
        fs::File::options().write(true).open(&self.0).is_ok()
    }

    fn set_at(&self) -> Option<u64> {
        fs::read_to_string(&self.0).ok().and_then(|text| text.trim().parse().ok())
    }

    fn set(&self, bytes: u64) -> bool {
        fs::write(&self.0, bytes.to_string())
            .inspect_err(
                |e| tracing::debug!(path = %self.0.display(), bytes, error = %e, "limit of dirty pages not set"),
            )
            .is_ok()
    }
}

/// What the kernel lets a FUSE mount hold by itself, bytes (`fuse_bdi_init` in fs/fuse/inode.c): a hundredth of all.
fn usual() -> u64 {
    let all = fs::read_to_string("/proc/vmstat").ok().and_then(|text| parse_threshold(&text)).unwrap_or(0);
    all * PAGE_BYTES / 100
}

/// Pages that may be dirty.
fn parse_threshold(vmstat: &str) -> Option<u64> {
    vmstat.lines().find_map(|line| line.strip_prefix("nr_dirty_threshold "))?.trim().parse().ok()
}

/// What it should be for a volume whose smallest domain has so much room, of those without limits; `limited`: there are some with.
pub(crate) fn wanted(room_bytes: u64, limited: bool) -> u64 {
    let most = if limited { MOST_BESIDE_LIMITED } else { MOST_BYTES };
    if room_bytes < USUAL_PARTS * USUAL_BYTES { LEAST_BYTES } else { (room_bytes / PART).clamp(USUAL_BYTES, most) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bound_follows_the_room() {
        let alone = |room| wanted(room, false);
        assert_eq!([0, 191 << 20, 192 << 20].map(alone), [LEAST_BYTES, LEAST_BYTES, USUAL_BYTES]);
        assert_eq!([512 << 20, 1 << 30, 1 << 40].map(alone), [USUAL_BYTES, 128 << 20, MOST_BYTES]);
        assert_eq!(
            [0, 2 << 30, 1 << 40].map(|room| wanted(room, true)),
            [LEAST_BYTES, MOST_BESIDE_LIMITED, MOST_BESIDE_LIMITED]
        );
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("max_bytes");
        std::fs::write(&file, "43000000\n").unwrap();
        let limit = DirtyLimit::new(dir.path());
        let now = || std::fs::read_to_string(&file).unwrap();
        assert_eq!((limit.allow(LEAST_BYTES), now()), (LEAST_BYTES, LEAST_BYTES.to_string()));
        std::fs::write(&file, "12000000\n").unwrap();
        assert_eq!(
            (limit.allow(LEAST_BYTES), now()),
            (LEAST_BYTES, "12000000\n".into()),
            "it is never raised for little room"
        );
        assert_eq!((limit.allow(512 << 20), now()), (512 << 20, (512 << 20).to_string()));
        std::fs::write(&file, "700000000\n").unwrap();
        assert_eq!(limit.now(), 700_000_000, "it grew with the memory that is free");
        limit.restrict();
        assert_eq!(now(), LEAST_BYTES.to_string());
        for (settings, connection) in [("7:0-fuseblk", "7340032"), ("0:300", "300"), ("0:57", "57")] {
            let found = DirtyLimit::new(PathBuf::from("/sys/class/bdi").join(settings)).connection().unwrap();
            assert_eq!(found.file_name().unwrap(), connection, "{settings}");
        }
        let none = DirtyLimit::new(dir.path().join("none"));
        assert_eq!(none.allow(MOST_BYTES), usual().max(USUAL_BYTES), "what cannot be set is what it is");
        std::fs::write(&file, "900000000\n").unwrap();
        std::fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o444)).unwrap();
        let free = std::fs::OpenOptions::new().write(true).open(&file).is_ok();
        assert_eq!(limit.restrict(), if free { LEAST_BYTES } else { 900_000_000 }, "root may write anything");
        std::fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        std::fs::write(&file, "9000000\n").unwrap();
        let other = tempfile::tempdir().unwrap();
        let tenant = DirtyLimit::new(other.path());
        std::fs::write(&tenant.0, "9000000\n").unwrap();
        limit.add(&tenant);
        std::fs::write(&tenant.0, "9000000\n").unwrap();
        assert_eq!(limit.now(), LEAST_BYTES + USUAL_BYTES, "the bound of a tenant's mount may grow to what was set");
        assert_eq!(parse_threshold("nr_dirty 5\nnr_dirty_threshold 777\nnr_x 1\n"), Some(777));
    }
}
