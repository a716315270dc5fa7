//! Appends: whole, by many threads, of more than one piece, and into a volume that fills up.

use braidfs::device::{Device, MemDevice};
use braidfs::{Cred, Error, MkfsOptions, MountOptions, OpenFile, OpenHow, Volume, mkfs};
use std::sync::{Arc, Barrier};

const PIECE: usize = 1 << 20;

fn volume(mib: u64) -> (Volume, OpenFile) {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(mib * 256));
    mkfs::format(std::slice::from_ref(&device), &MkfsOptions { domains: Some(1), ..MkfsOptions::default() }).unwrap();
    let v = Volume::mount(vec![device], MountOptions::default()).unwrap();
    let how = OpenHow { read: true, write: true, create: true, mode: 0o600, ..OpenHow::default() };
    let f = v.open_path(b"log", how, &Cred::root()).unwrap();
    (v, f)
}

/// Once the pieces of an append after its first went to where that one had ended, over what others had appended since.
#[test]
fn appends_of_several_pieces_overwrite_nobody() {
    const THREADS: usize = 3;
    const ROUNDS: usize = 2;
    // long enough for the others to come in between
    const LENGTH: usize = 16 * PIECE;
    let (v, f) = volume(256);
    let start = Barrier::new(THREADS);
    std::thread::scope(|s| {
        for t in 0..THREADS {
            let (v, f, start) = (&v, &f, &start);
            s.spawn(move || {
                let data = vec![t as u8 + 1; LENGTH];
                for _ in 0..ROUNDS {
                    start.wait();
                    v.append(f, &data).unwrap();
                }
            });
        }
    });
    let size = v.getattr(f.ino()).unwrap().size as usize;
    assert_eq!(size, THREADS * ROUNDS * LENGTH);
    let mut all = vec![0; size];
    assert_eq!(v.read(&f, 0, &mut all).unwrap(), size);
    for t in 0..THREADS {
        assert_eq!(all.iter().filter(|b| usize::from(**b) == t + 1).count(), ROUNDS * LENGTH, "of thread {t}");
    }
}

/// Once an append answered that all was written when space had run out in the middle.
#[test]
fn an_append_that_does_not_fit_says_so() {
    let (v, f) = volume(32);
    let data = vec![7; 5 * PIECE + 123];
    let mut told = 0;
    let e = loop {
        match v.append(&f, &data) {
            Ok(at) => {
                assert_eq!(at, told);
                told += data.len() as u64;
            }
            Err(e) => break e,
        }
        assert_eq!(v.getattr(f.ino()).unwrap().size, told, "more is said to be written than is");
    };
    assert!(matches!(e, Error::NoSpace), "{e}");
    // one piece at a time, as write(2): the bytes that it says
    let before = v.getattr(f.ino()).unwrap().size;
    if let Ok((at, n)) = v.append_some(&f, &data) {
        assert_eq!((at, at + n as u64), (before, v.getattr(f.ino()).unwrap().size));
    }
}
