//! The cleaner beside files whose blocks an fsync overwrites in place.

use super::*;
use crate::names::path::OpenHow;
use crate::{Cred, MkfsOptions, MountOptions};
use braidfs_device::{Device, MemDevice};

/// Where the blocks of a file lie.
fn places(c: &Cell) -> Vec<BlockAddr> {
    match &c.state.read().body {
        Body::File(f) => (0..f.map.last_end()).filter_map(|l| f.map.get(l)).map(|p| p.addr).collect(),
        _ => Vec::new(),
    }
}

#[test]
fn a_block_that_moves_is_not_overwritten_where_it_was() {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(16384));
    let o = MkfsOptions { domains: Some(1), ..MkfsOptions::default() };
    crate::mkfs::format(std::slice::from_ref(&device), &o).unwrap();
    let v = Volume::mount(vec![device], MountOptions { background: false, ..MountOptions::default() }).unwrap();
    let how = OpenHow { read: true, write: true, create: true, mode: 0o644, ..OpenHow::default() };
    let f = v.open_path(b"f", how, &Cred::root()).unwrap();
    v.write(&f, 0, &[1; 4 * 4096]).unwrap();
    v.sync().unwrap();
    let (i, c) = (v.mounted(), v.mounted().cell(f.ino()).unwrap());
    let d = i.dom(c.domain);
    let rewrite = |value: u8| {
        v.write(&f, 4096, &[value; 4096]).unwrap();
        v.fsync(f.ino(), false).unwrap();
    };
    let first = places(&c);
    rewrite(2);
    assert_eq!(places(&c), first, "in place");
    // the cleaner has marked it, the commit that moves it has not begun
    assert!(i.move_block(d, first[1], c.ino, 1).unwrap());
    rewrite(3);
    let second = places(&c);
    assert!(second[1] != first[1], "it went elsewhere");
    v.sync().unwrap();
    rewrite(4);
    assert_eq!(places(&c), second, "and stays there");
    // all of it at once: nothing is left where it was
    let all: Vec<_> =
        (0..).zip(&second).map(|(lblk, at)| (*at, Owner { node: c.ino, lblk, ..Owner::default() })).collect();
    assert_eq!(i.move_blocks(d, &all).unwrap(), 4);
    assert!(places(&c).iter().all(|p| !second.contains(p)));
    let mut have = [0; 4 * 4096];
    v.read(&f, 0, &mut have).unwrap();
    assert!(have[4096..8192] == [4; 4096] && have[..4096] == [1; 4096]);
}
