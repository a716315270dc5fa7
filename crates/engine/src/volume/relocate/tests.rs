//! Groups that are emptied for a domain, or not.

use super::For;
use crate::{Cred, DomainId, InodeNo, MkfsOptions, MountOptions, OpenHow, SetAttr, Volume, mkfs};
use braidfs_device::{BLOCK_BYTES, Device, MemDevice};
use braidfs_format::inode::NOCOW;
use std::sync::Arc;

/// A block with a fixed place keeps its group: nothing else is moved out of that for nothing.
#[test]
fn nothing_moves_out_of_a_group_that_a_fixed_block_keeps() {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(64 << 8));
    let how = MkfsOptions { domains: Some(2), group_bytes: Some(4 << 20), ..MkfsOptions::default() };
    mkfs::format(std::slice::from_ref(&device), &how).unwrap();
    let v = Volume::mount(vec![device], MountOptions { background: false, ..MountOptions::default() }).unwrap();
    let (i, [d, other]) = (v.mounted(), [0, 1].map(|n| v.mounted().dom(DomainId(n))));
    assert!(i.claim_group(d).unwrap());
    let g = *d.space.groups().last().unwrap();
    let open = OpenHow { read: true, write: true, create: true, mode: 0o600, ..OpenHow::default() };
    let in_group = |ino: InodeNo| {
        let all = v.extents(ino).unwrap();
        let at = |at: u64| i.store.geometry().group_of(crate::BlockAddr(at / BLOCK_BYTES as u64));
        all.iter().filter(|e| e.place.is_some_and(|(_, byte)| at(byte) == g)).map(|e| e.len).sum::<u64>()
    };
    // both files have blocks in a group in which nobody has a number
    let (mut ordinary, mut fixed) = (None, None);
    for n in 0..200 {
        let f = v.open_path(format!("{n}").as_bytes(), open, &Cred::root()).unwrap();
        assert_eq!(v.domain_of(f.ino()).unwrap(), DomainId(0));
        let flags = if n % 2 == 0 { NOCOW } else { 0 };
        v.setattr(f.ino(), &SetAttr { flags: Some(flags), ..SetAttr::default() }).unwrap();
        v.write(&f, 0, &[7; 16 * BLOCK_BYTES]).unwrap();
        v.sync().unwrap();
        match (in_group(f.ino()) > 0, n % 2 == 0) {
            // those fill the first group
            (false, _) => {}
            (true, true) => fixed = Some(n),
            (true, false) => ordinary = Some(f.ino()),
        }
        if ordinary.is_some() && fixed.is_some() {
            break;
        }
    }
    let (ordinary, name) = (ordinary.unwrap(), fixed.unwrap());
    let before = v.extents(ordinary).unwrap();
    assert!(!i.empty_for(For::Domain(other), d, g).unwrap());
    assert_eq!(v.extents(ordinary).unwrap(), before);
    v.unlink_path(format!("{name}").as_bytes(), &Cred::root()).unwrap();
    v.sync().unwrap();
    assert!(i.empty_for(For::Domain(other), d, g).unwrap());
    assert_eq!(in_group(ordinary), 0);
    v.unmount().unwrap();
}
