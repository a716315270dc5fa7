//! The memory device against a plain vector of bytes, and its images.

use braidfs_device::{BLOCK_BYTES, Device, FileDevice, Image, MemDevice, WriteOp};
use proptest::prelude::*;
use std::io::ErrorKind;
use std::sync::Arc;
use std::thread;

const BLOCKS: usize = 300;

#[derive(Debug, Clone)]
enum Step {
    Write(usize, usize, u8),
    Discard(usize, usize),
    Snapshot,
    Restart,
}

fn step() -> impl Strategy<Value = Step> {
    let range = (0..BLOCKS).prop_flat_map(|b| (Just(b), 1..=BLOCKS - b));
    prop_oneof![
        4 => (range.clone(), any::<u8>()).prop_map(|((b, n), v)| Step::Write(b, n, v)),
        2 => range.prop_map(|(b, n)| Step::Discard(b, n)),
        1 => Just(Step::Snapshot),
        1 => Just(Step::Restart),
    ]
}

fn content(dev: &dyn Device) -> Vec<u8> {
    let mut out = vec![1; BLOCKS * BLOCK_BYTES];
    dev.read(0, &mut out).unwrap();
    out
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn equals_a_vector_and_snapshots_stay(steps in prop::collection::vec(step(), 1..30), soiled: bool) {
        let image = if soiled { Image::soiled(BLOCKS as u64) } else { Image::new(BLOCKS as u64) };
        let (old, discarded) = if soiled { (0xa5, 0x5a) } else { (0, 0) };
        let mut dev = MemDevice::from_image(image);
        let mut model = vec![old; BLOCKS * BLOCK_BYTES];
        let mut snapshots: Vec<(Image, Vec<u8>)> = Vec::new();
        for s in steps {
            match s {
                Step::Write(b, n, v) => {
                    let data = vec![v; n * BLOCK_BYTES];
                    let (x, y) = data.split_at(n / 2 * BLOCK_BYTES);
                    dev.write_batch(&[WriteOp { block: b as u64, bufs: vec![x, y] }]).unwrap();
                    model[b * BLOCK_BYTES..][..data.len()].copy_from_slice(&data);
                }
                Step::Discard(b, n) => {
                    dev.discard(b as u64, n as u64).unwrap();
                    model[b * BLOCK_BYTES..][..n * BLOCK_BYTES].fill(discarded);
                }
                Step::Snapshot => snapshots.push((dev.snapshot(), model.clone())),
                Step::Restart => dev = MemDevice::from_image(dev.snapshot()),
            }
        }
        prop_assert!(content(&dev) == model);
        for (image, model) in snapshots {
            prop_assert!(content(&MemDevice::from_image(image.compact())) == model);
            prop_assert!(content(&MemDevice::from_image(image)) == model);
        }
    }
}

#[test]
fn limits_and_flushes() {
    let dev = MemDevice::new(10);
    let mut buf = vec![0; BLOCK_BYTES];
    assert_eq!(dev.read(10, &mut buf).unwrap_err().kind(), ErrorKind::UnexpectedEof);
    assert_eq!(dev.write(10, &buf).unwrap_err().kind(), ErrorKind::InvalidInput);
    assert_eq!(dev.write(0, &buf[1..]).unwrap_err().kind(), ErrorKind::InvalidInput);
    assert_eq!(dev.discard(9, 2).unwrap_err().kind(), ErrorKind::InvalidInput);
    dev.flush().unwrap();
    dev.flush().unwrap();
    assert_eq!((dev.flushes(), dev.blocks(), dev.name().as_str()), (2, 10, "memory"));
    // A terabyte takes no memory until it is written.
    let dev = MemDevice::new(1 << 28);
    dev.write((1 << 28) - 1, &[3; BLOCK_BYTES]).unwrap();
    dev.read((1 << 28) - 1, &mut buf).unwrap();
    assert_eq!(buf, [3; BLOCK_BYTES]);
}

#[test]
fn threads() {
    let dev = MemDevice::new(1024);
    thread::scope(|s| {
        for t in 0..4u64 {
            let dev = &dev;
            s.spawn(move || {
                for i in 0..256 {
                    dev.write(i * 4 + t, &[t as u8 + 1; BLOCK_BYTES]).unwrap();
                }
            });
        }
    });
    let mut buf = vec![0; BLOCK_BYTES];
    for b in 0..1024 {
        dev.read(b, &mut buf).unwrap();
        assert!(buf.iter().all(|&x| x == (b % 4) as u8 + 1));
    }
}

#[test]
fn images() {
    let mut image = Image::new(500);
    image.write(3, &[1; 2 * BLOCK_BYTES]).unwrap();
    let shared: Arc<[u8]> = Arc::from(&[2; 2 * BLOCK_BYTES][..]);
    image.share(127, &shared).unwrap();
    assert!(image.share(499, &shared).is_err() && image.write(500, &shared).is_err());
    let older = image.clone();
    // A write over shared data leaves it alone.
    image.write(128, &[9; BLOCK_BYTES]).unwrap();
    assert!(shared.iter().all(|&b| b == 2));
    image.discard(4, 1);
    image.discard(499, u64::MAX);
    assert_eq!(image.used().collect::<Vec<_>>(), [3, 127, 128]);
    assert_eq!(older.used().collect::<Vec<_>>(), [3, 4, 127, 128]);
    let dir = tempfile::tempdir().unwrap();
    let file = FileDevice::create(&dir.path().join("i"), 500 * BLOCK_BYTES as u64).unwrap();
    image.copy_to(&file).unwrap();
    let back = Image::copy_of(&file).unwrap();
    assert_eq!(back.used().collect::<Vec<_>>(), [3, 127, 128]);
    let mut buf = vec![0; BLOCK_BYTES];
    back.read(128, &mut buf).unwrap();
    assert_eq!(buf, [9; BLOCK_BYTES]);
}
