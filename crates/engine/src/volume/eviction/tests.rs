//! What left memory and is read again, on a volume so small that blocks are used again all the time.

use crate::cell::cache::Memory;
use crate::{Cred, FileKind, InodeNo, MkfsOptions, MountOptions, NewNode, Volume};
use braidfs_device::{Device, MemDevice};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Everything that no transaction holds leaves memory: by the second turn also what was used.
fn forget_all(v: &Volume) {
    for d in v.mounted().domains.iter().cycle().take(2 * v.mounted().domains.len()) {
        d.evict(Memory { pages: 1 << 20, cells: 1 << 20, dir_bytes: 1 << 30 });
    }
}

fn names(v: &Volume, dir: InodeNo) -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    v.readdir(dir, 0, &mut |e| {
        all.insert(String::from_utf8_lossy(e.name).into_owned());
        true
    })
    .unwrap();
    all.retain(|n| n != "." && n != "..");
    all
}

#[test]
fn buckets_come_back_as_they_were_written_last() {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(4096));
    let o = MkfsOptions {
        domains: Some(1),
        group_bytes: Some(4 << 20),
        journal_bytes: Some(512 << 10),
        ..MkfsOptions::default()
    };
    crate::mkfs::format(std::slice::from_ref(&device), &o).unwrap();
    let v = Volume::mount(vec![device.clone()], MountOptions { background: false, ..MountOptions::default() }).unwrap();
    let me = Cred::root();
    let node = |kind| NewNode { kind, mode: 0o755, umask: 0, rdev: 0, target: b"" };
    let dirs: Vec<InodeNo> = (0..3)
        .map(|d| v.create(InodeNo::ROOT, format!("d{d}").as_bytes(), &node(FileKind::Dir), &me).unwrap().ino)
        .collect();
    let mut model = vec![BTreeSet::new(); dirs.len()];
    let (mut random, mut next) = (1u64, 0);
    for round in 0..250 {
        for (dir, model) in dirs.iter().zip(&mut model) {
            for _ in 0..12 {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let n = (random >> 33) as usize;
                if model.len() > 500 || (model.len() > 300 && n.is_multiple_of(2)) {
                    let name: String = model.iter().nth(n % model.len()).cloned().unwrap();
                    v.unlink(*dir, name.as_bytes()).unwrap();
                    model.remove(&name);
                } else {
                    let name = format!("a name that takes some room in its bucket, {next}");
                    v.create(*dir, name.as_bytes(), &node(FileKind::File), &me).unwrap();
                    model.insert(name);
                    next += 1;
                }
            }
        }
        v.sync().unwrap();
        forget_all(&v);
        for (dir, model) in dirs.iter().zip(&model) {
            assert!(names(&v, *dir) == *model, "round {round}");
        }
    }
    v.unmount().unwrap();
}
