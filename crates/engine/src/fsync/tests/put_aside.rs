//! Fsyncs that a nearly full journal has no room for, and that are tried again.

use super::{make, mounted, short_journals};
use crate::{FileKind, InodeNo};
use braidfs_device::MemDevice;
use std::sync::Arc;

/// Of a file whose extents are in a tree a first try encodes the leaf that has changed, which counts as written then. The second one
/// needs less room, and would tell of a leaf that is nowhere.
#[test]
fn what_a_first_try_has_encoded_is_not_left_out_of_the_second() {
    let mut aside = 0;
    for pad in 0..12 {
        let device = short_journals(1);
        let v = mounted(device.clone()).unwrap();
        let file = make(&v, InodeNo::ROOT, "tree", FileKind::File, &[]).0;
        let small = make(&v, InodeNo::ROOT, "small", FileKind::File, &[]).0;
        let (f, s) = (v.open(file).unwrap(), v.open(small).unwrap());
        for n in 0..1000 {
            v.write(&f, n * 8192, &[1; 4096]).unwrap();
        }
        v.sync().unwrap();
        let i = v.mounted().clone();
        i.domains[0].checkpoint().unwrap();
        for n in 0..pad {
            v.write(&s, 0, &[n; 10]).unwrap();
            v.fsync(small, false).unwrap();
        }
        for n in 0..40u8 {
            // holes, in several leaves: what has its place would be overwritten there
            let places = [0, 400, 800, 1200, 1600].map(|from| (from + 2 * u64::from(n) + 1) * 4096);
            for at in places {
                v.write(&f, at, &[n + 100; 4096]).unwrap();
            }
            let d = &i.domains[0];
            if i.fsync_together(&[(file, false)])[0].is_none() {
                let before = d.committed_tx();
                v.fsync(file, false).unwrap();
                assert!(d.committed_tx() > before, "write {n} behind {pad} syncs");
                aside += 1;
            }
            let after = mounted(Arc::new(MemDevice::from_image(device.snapshot()))).unwrap();
            let opened = after.open(file).unwrap();
            for at in places {
                let mut page = [0; 4096];
                after.read(&opened, at, &mut page).unwrap();
                assert_eq!(page, [n + 100; 4096], "write {n} at {at} behind {pad} syncs");
            }
            drop(opened);
            after.crash();
        }
        drop(i);
    }
    assert!(aside > 0, "no fsync was put aside");
}
