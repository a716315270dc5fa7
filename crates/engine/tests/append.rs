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

/// Once an append went on behind what another one had put there meanwhile, where the last blocks are given out in parts,
/// and answered one run of bytes.
#[test]
fn what_fits_of_an_append_is_one_run() {
    const THREADS: usize = 4;
    for round in 0..20 {
        let (v, f) = volume(16);
        let start = Barrier::new(THREADS);
        let runs = std::thread::scope(|s| {
            let append = |t: usize| {
                let (v, f, start) = (&v, &f, &start);
                s.spawn(move || {
                    let data = vec![t as u8 + 1; PIECE];
                    start.wait();
                    std::iter::from_fn(|| v.append_some(f, &data).ok()).map(|(at, n)| (t, at, n)).collect::<Vec<_>>()
                })
            };
            let threads: Vec<_> = (0..THREADS).map(append).collect();
            threads.into_iter().flat_map(|t| t.join().unwrap()).collect::<Vec<_>>()
        });
        for (t, at, n) in runs {
            let mut back = vec![0; n];
            assert_eq!(v.read(&f, at, &mut back).unwrap(), n);
            assert!(back.iter().all(|b| usize::from(*b) == t + 1), "round {round}: {n} bytes of thread {t} at {at}");
        }
    }
}
