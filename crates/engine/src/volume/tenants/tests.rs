//! A tenant's journal mode changes to that of the mount, which may be another one.

use crate::{
    Cred, DataMode, FileKind, InodeNo, JournalMode, MkfsOptions, MountOptions, NewNode, OpenFile, SetAttr,
    TenantBudget, Volume, mkfs,
};
use braidfs_device::{Device, MemDevice};
use braidfs_format::inode::NOCOW;
use std::sync::Arc;

fn file(v: &Volume, dir: InodeNo, name: &str) -> OpenFile {
    let new = NewNode { kind: FileKind::File, mode: 0o644, umask: 0, rdev: 0, target: b"" };
    v.open(v.create(dir, name.as_bytes(), &new, &Cred::root()).unwrap().ino).unwrap()
}

/// Where data is journaled nothing is overwritten in place: pages that were dirty before, and for which no blocks are reserved
/// since they would have been, are written where they lie before that begins. On a full volume the commit had no room for them.
#[test]
fn pages_without_blocks_are_written_before_data_is_journaled() {
    const BYTES: u64 = 4 << 20;
    const STEP: u64 = 64 << 10;
    for removed in [true, false] {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(64 << 8));
        let how = MkfsOptions { domains: Some(1), group_bytes: Some(4 << 20), ..MkfsOptions::default() };
        mkfs::format(std::slice::from_ref(&device), &how).unwrap();
        let options = MountOptions { background: false, data: DataMode::Journal, ..MountOptions::default() };
        let v = Volume::mount(vec![device], options).unwrap();
        let budget = TenantBudget { journal: Some(JournalMode::Ordered), ..TenantBudget::default() };
        let t = v.tenant_create(InodeNo::ROOT, b"t", 0o755, "t", budget, &Cred::root()).unwrap().root;
        let (base, other) = (file(&v, t, "base"), file(&v, t, "other"));
        v.setattr(base.ino(), &SetAttr { flags: Some(NOCOW), ..SetAttr::default() }).unwrap();
        let write = |n: u8| {
            (0..BYTES / STEP).for_each(|at| {
                assert_eq!(v.write(&base, at * STEP, &[n; STEP as usize]).unwrap(), STEP as usize, "{at}");
            });
        };
        write(1);
        v.sync().unwrap();
        let mut end = 0;
        while let Ok(n) = v.write(&other, end, &[3; STEP as usize]) {
            end += n as u64;
        }
        v.sync().unwrap();
        // what the writes below need beside their own blocks
        v.setattr(other.ino(), &SetAttr { size: Some(end - (1 << 20)), ..SetAttr::default() }).unwrap();
        v.sync().unwrap();
        write(2);
        let d = v.mounted().domain_of(t).unwrap();
        assert!(d.memory.dirty() >= BYTES / 4096, "this test sees nothing");
        if removed {
            v.tenant_remove("t").unwrap();
        } else {
            v.tenant_change("t", |b| b.journal = None).unwrap();
        }
        assert_eq!(d.data_mode(), DataMode::Journal);
        v.sync().unwrap();
        assert!(v.domains().iter().all(|d| d.failed.is_none()), "{:?}", v.domains());
        let mut data = vec![0; STEP as usize];
        for at in 0..BYTES / STEP {
            v.read(&base, at * STEP, &mut data).unwrap();
            assert!(data.iter().all(|b| *b == 2), "{at}");
        }
        drop((base, other));
        v.unmount().unwrap();
    }
}
