//! The recording device: what a crash may leave, against a model written the slow way.

use braidfs_device::{BLOCK_BYTES, Device, Event, Image, Keep, MemDevice, RecordDevice, SECTOR_BYTES, WriteOp};
use proptest::prelude::*;
use std::thread;

const BLOCKS: u64 = 200;

fn content(dev: &dyn Device) -> Vec<u8> {
    let mut out = vec![1; dev.blocks() as usize * BLOCK_BYTES];
    dev.read(0, &mut out).unwrap();
    out
}

fn byte(dev: &dyn Device, block: u64) -> u8 {
    let mut out = vec![0; BLOCK_BYTES];
    dev.read(block, &mut out).unwrap();
    assert!(out.iter().all(|&b| b == out[0]), "block {block} is torn");
    out[0]
}

#[test]
fn flushed_stays_and_unflushed_is_as_told() {
    let mut initial = Image::new(BLOCKS);
    initial.write(0, &[9; BLOCK_BYTES]).unwrap();
    let dev = RecordDevice::new(initial);
    dev.write(1, &[1; BLOCK_BYTES]).unwrap();
    dev.flush().unwrap();
    dev.write(1, &[2; BLOCK_BYTES]).unwrap();
    let (a, b) = ([3; BLOCK_BYTES], [4; BLOCK_BYTES]);
    dev.write_batch(&[WriteOp { block: 2, bufs: vec![&a, &b] }, WriteOp { block: 130, bufs: vec![&b] }]).unwrap();
    assert_eq!((dev.log_len(), dev.flushes()), (5, vec![1]));
    assert_eq!(dev.unflushed(5), [2, 3, 4]);
    assert_eq!([0, 1, 2, 3, 130].map(|n| byte(&dev, n)), [9, 2, 3, 4, 4]);

    let see = |upto, keep: &mut dyn FnMut(usize) -> Keep| {
        let image = dev.crash_image(upto, keep);
        [0, 1, 2, 3, 130].map(|n| byte(&image, n))
    };
    assert_eq!(see(0, &mut |_| Keep::Whole), [9, 0, 0, 0, 0]);
    assert_eq!(see(1, &mut |_| Keep::None), [9, 0, 0, 0, 0]);
    assert_eq!(see(1, &mut |_| Keep::Whole), [9, 1, 0, 0, 0]);
    assert_eq!(see(2, &mut |_| unreachable!()), [9, 1, 0, 0, 0]);
    assert_eq!(see(5, &mut |_| Keep::None), [9, 1, 0, 0, 0]);
    assert_eq!(see(99, &mut |i| if i == 1 { Keep::Whole } else { Keep::None }), [9, 1, 3, 4, 0]);
    assert_eq!(see(5, &mut |i| if i == 1 { Keep::Torn(8) } else { Keep::Whole }), [9, 2, 3, 0, 4]);
    dev.flush().unwrap();
    assert_eq!(see(6, &mut |_| unreachable!()), [9, 2, 3, 4, 4]);
}

#[test]
fn torn_writes() {
    let dev = RecordDevice::blank(BLOCKS);
    dev.write(0, &[1; 3 * BLOCK_BYTES]).unwrap();
    dev.flush().unwrap();
    dev.write(0, &[2; 3 * BLOCK_BYTES]).unwrap();
    let sectors = |keep| {
        let all = content(&dev.crash_image(3, &mut |_| keep));
        all.chunks(SECTOR_BYTES).take(24).map(|s| s[0].to_string()).collect::<String>()
    };
    assert_eq!(sectors(Keep::Torn(0)), "1".repeat(24));
    assert_eq!(sectors(Keep::Torn(3)), format!("222{}", "1".repeat(21)));
    assert_eq!(sectors(Keep::Torn(10)), format!("{}{}", "2".repeat(10), "1".repeat(14)));
    assert_eq!(sectors(Keep::Torn(99)), "2".repeat(24));
    assert_eq!(sectors(Keep::TornMask(1 | 1 << 9 | 1 << 23)), "211111111211111111111112");
    // The recorded data was not touched by the tearing.
    assert_eq!(sectors(Keep::Whole), "2".repeat(24));
    assert_eq!(byte(&dev, 0), 2);
}

#[test]
fn a_discard_is_lost_or_not() {
    let dev = RecordDevice::blank(BLOCKS);
    dev.write(5, &[1; 4 * BLOCK_BYTES]).unwrap();
    dev.flush().unwrap();
    dev.discard(6, 2).unwrap();
    let see = |keep| [5, 6, 7, 8].map(|n| byte(&dev.crash_image(3, &mut |_| keep), n));
    assert_eq!(see(Keep::None), [1, 1, 1, 1]);
    assert_eq!(see(Keep::Torn(8)), [1, 0, 1, 1]);
    assert_eq!(see(Keep::Whole), [1, 0, 0, 1]);
}

#[derive(Debug, Clone)]
enum Step {
    Write(u64, u64, u8),
    Discard(u64, u64),
    Flush,
}

fn step() -> impl Strategy<Value = Step> {
    let range = (0..BLOCKS).prop_flat_map(|b| (Just(b), 1..=(BLOCKS - b).min(12)));
    prop_oneof![
        6 => (range.clone(), any::<u8>()).prop_map(|((b, n), v)| Step::Write(b, n, v)),
        1 => range.prop_map(|(b, n)| Step::Discard(b, n)),
        2 => Just(Step::Flush),
    ]
}

fn keep() -> impl Strategy<Value = Keep> {
    prop_oneof![
        Just(Keep::Whole),
        Just(Keep::None),
        (0..100usize).prop_map(Keep::Torn),
        any::<u64>().prop_map(Keep::TornMask),
    ]
}

fn sector_kept(keep: Keep, sector: usize) -> bool {
    match keep {
        Keep::Whole => true,
        Keep::None => false,
        Keep::Torn(n) => sector < n,
        Keep::TornMask(mask) => mask >> (sector % 64) & 1 == 1,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn equals_the_slow_model(
        steps in prop::collection::vec(step(), 1..150),
        keeps in prop::collection::vec(keep(), 150),
        cuts in prop::collection::vec(0..=150usize, 4),
    ) {
        let dev = RecordDevice::blank(BLOCKS);
        for s in &steps {
            match s {
                Step::Write(b, n, v) => dev.write(*b, &vec![*v; *n as usize * BLOCK_BYTES]).unwrap(),
                Step::Discard(b, n) => dev.discard(*b, *n).unwrap(),
                Step::Flush => dev.flush().unwrap(),
            }
        }
        for cut in cuts {
            let upto = cut.min(steps.len());
            let last_flush = steps[..upto].iter().rposition(|s| matches!(s, Step::Flush)).unwrap_or(0);
            let mut model = vec![0; BLOCKS as usize * BLOCK_BYTES];
            let mut late = 0;
            for (i, s) in steps[..upto].iter().enumerate() {
                let (b, n, v) = match s {
                    Step::Write(b, n, v) => (*b, *n, *v),
                    Step::Discard(b, n) => (*b, *n, 0),
                    Step::Flush => continue,
                };
                let keep = if i < last_flush { Keep::Whole } else { late += 1; keeps[late - 1] };
                let place = &mut model[b as usize * BLOCK_BYTES..][..n as usize * BLOCK_BYTES];
                for (s, bytes) in place.chunks_mut(SECTOR_BYTES).enumerate() {
                    if sector_kept(keep, s) {
                        bytes.fill(v);
                    }
                }
            }
            let mut asked = 0;
            let image = dev.crash_image(cut, &mut |i| { assert_eq!(i, asked); asked += 1; keeps[i] });
            prop_assert_eq!(asked, late);
            prop_assert_eq!(dev.unflushed(cut).len(), late);
            prop_assert!(content(&image) == model);
        }
    }
}

#[test]
fn threads_keep_the_rules() {
    let dev = RecordDevice::blank(64);
    thread::scope(|s| {
        for t in 0..4u8 {
            let dev = &dev;
            s.spawn(move || {
                for i in 1..=100u8 {
                    dev.write(u64::from(t), &[i; BLOCK_BYTES]).unwrap();
                    if i % 3 == 0 {
                        dev.flush().unwrap();
                        // My own write returned before my flush: it is durable from here on.
                        let image = dev.crash_image(dev.log_len(), &mut |_| Keep::None);
                        assert!(byte(&image, u64::from(t)) >= i);
                    }
                }
            });
        }
    });
    let mut newest = 0;
    for (i, event) in dev.log().into_iter().enumerate() {
        if let Event::Flush { covers, .. } = event {
            assert!(covers >= newest && covers <= i);
            newest = covers;
        }
    }
}

#[test]
fn crash_images_are_cheap() {
    let dev = RecordDevice::new(MemDevice::new(16384).snapshot());
    for i in 0..4000u64 {
        dev.write(i * 37 % 16000, &[i as u8; 2 * BLOCK_BYTES]).unwrap();
        if i % 20 == 19 {
            dev.flush().unwrap();
        }
    }
    let start = std::time::Instant::now();
    for i in 0..2000 {
        let image = dev.crash_image(i * 7919 % 4200, &mut |w| if w % 2 == 0 { Keep::Whole } else { Keep::None });
        image.write(0, &[0; BLOCK_BYTES]).unwrap();
    }
    let each = start.elapsed() / 2000;
    println!("{each:?} for each image of 64 MiB");
    assert!(each < std::time::Duration::from_millis(2), "{each:?} for an image");
}
