//! Syncs beside changes of names.

use crate::{Cred, DomainId, FileKind, InodeNo, MkfsOptions, MountOptions, NewNode, Placement, RenameMode, Volume};
use braidfs_device::{Device, MemDevice};
use std::sync::Arc;

fn make(v: &Volume, dir: InodeNo, name: &str, kind: FileKind, not: &[DomainId]) -> (InodeNo, String) {
    let node = NewNode { kind, mode: 0o755, umask: 0, rdev: 0, target: b"" };
    let one = |i: u32| {
        let name = format!("{name}{i}");
        (v.create(dir, name.as_bytes(), &node, &Cred::root()).unwrap().ino, name)
    };
    (0..).map(one).find(|(ino, _)| !not.contains(&v.domain_of(*ino).unwrap())).unwrap()
}

/// A file was made, and a sync of its directory has looked, and goes on to commit the file's domain. Then the file moves into a
/// directory that is not durable: it must be, or the file is nowhere.
#[test]
fn what_a_sync_has_seen_does_not_move_below_what_is_not_durable() {
    for whole in [false, true] {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(16384));
        let o = MkfsOptions { domains: Some(4), placement: Placement::Spread, ..MkfsOptions::default() };
        crate::mkfs::format(std::slice::from_ref(&device), &o).unwrap();
        let mount = || {
            let o = MountOptions { background: false, serial: true, ..MountOptions::default() };
            Volume::mount(vec![device.clone()], o).unwrap()
        };
        let v = mount();
        let (dir, _) = make(&v, InodeNo::ROOT, "d", FileKind::Dir, &[]);
        v.sync().unwrap();
        let (file, name) = make(&v, dir, "f", FileKind::File, &[]);
        let of_file = v.domain_of(file).unwrap();
        let (new, new_name) = make(&v, InodeNo::ROOT, "e", FileKind::Dir, &[of_file]);
        // what `commit_for` and `commit_all` do first
        let d = v.mounted().dom(of_file).clone();
        let tx = d.running();
        d.want(tx);
        v.rename(dir, name.as_bytes(), new, b"moved", RenameMode::Replace).unwrap();
        d.commit_upto(tx).unwrap();
        if whole {
            v.fsync(dir, false).unwrap();
        }
        v.crash();
        let v = mount();
        let there = v.lookup(InodeNo::ROOT, new_name.as_bytes()).and_then(|e| v.lookup(e.ino, b"moved"));
        let here = v.lookup(dir, name.as_bytes());
        let at = [there, here].into_iter().flatten().map(|a| a.ino).collect::<Vec<_>>();
        assert_eq!(at, [file], "whole: {whole}");
    }
}
