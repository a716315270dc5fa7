//! Every effect of the faulting device, and the counters.

use braidfs_device::{
    BLOCK_BYTES, CountDevice, Counters, Device, Effect, FaultDevice, MemDevice, Op, RecordDevice, Rule, WriteOp,
};
use std::io::ErrorKind;
use std::sync::Arc;
use std::time::{Duration, Instant};

fn device() -> FaultDevice {
    FaultDevice::new(Arc::new(MemDevice::new(100)), 42)
}

fn write(dev: &dyn Device, block: u64, blocks: usize, v: u8) -> Option<i32> {
    dev.write(block, &vec![v; blocks * BLOCK_BYTES]).err().map(|e| e.raw_os_error().unwrap_or(0))
}

fn read(dev: &dyn Device, block: u64) -> Vec<u8> {
    let mut out = vec![0xee; BLOCK_BYTES];
    dev.read(block, &mut out).unwrap();
    out
}

fn bits_off(data: &[u8], v: u8) -> u32 {
    data.iter().map(|b| (b ^ v).count_ones()).sum()
}

#[test]
fn fails_by_count_and_by_range() {
    let dev = device();
    dev.add(Rule::new(Op::Write, Effect::Fail(libc::EIO)).skip(2).times(1));
    let results: Vec<_> = (0..5).map(|i| write(&dev, i, 1, 1)).collect();
    assert_eq!(results, [None, None, Some(libc::EIO), None, None]);
    assert_eq!(read(&dev, 2), [0; BLOCK_BYTES]);
    dev.add(Rule::new(Op::Read, Effect::Fail(libc::EIO)).blocks(10..12));
    let mut buf = vec![0; 3 * BLOCK_BYTES];
    assert!(dev.read(9, &mut buf).is_err() && dev.read(11, &mut buf).is_err());
    dev.read(7, &mut buf).unwrap();
    dev.read(12, &mut buf).unwrap();
    assert_eq!(dev.fired(), 3);
    dev.clear();
    dev.read(9, &mut buf).unwrap();
}

#[test]
fn a_batch_fails_in_part() {
    let dev = device();
    dev.add(Rule::new(Op::Write, Effect::Fail(libc::ENOSPC)).blocks(5..6));
    let data = [7; BLOCK_BYTES];
    let ops: Vec<_> = (4..7).map(|block| WriteOp { block, bufs: vec![&data[..]] }).collect();
    assert_eq!(dev.write_batch(&ops).unwrap_err().raw_os_error(), Some(libc::ENOSPC));
    assert_eq!([4, 5, 6].map(|b| read(&dev, b)[0]), [7, 0, 7]);
}

#[test]
fn chance_is_repeatable() {
    let run = |seed| {
        let dev = FaultDevice::new(Arc::new(MemDevice::new(100)), seed);
        dev.add(Rule::new(Op::Write, Effect::Fail(libc::EIO)).chance(0.3));
        (0..1000).map(|_| write(&dev, 0, 1, 1).is_some()).collect::<Vec<_>>()
    };
    assert_eq!(run(1), run(1));
    assert_ne!(run(1), run(2));
    let failed = run(3).iter().filter(|&&f| f).count();
    assert!((200..400).contains(&failed), "{failed}");
}

#[test]
fn short_transfers() {
    let dev = device();
    write(&dev, 0, 4, 1);
    dev.add(Rule::new(Op::Write, Effect::Short(1)).times(1));
    let e = dev.write(0, &[2; 3 * BLOCK_BYTES]).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::WriteZero);
    assert_eq!([0, 1].map(|b| read(&dev, b)[0]), [2, 1]);
    dev.add(Rule::new(Op::Read, Effect::Short(1)).times(1));
    let mut buf = vec![0; 2 * BLOCK_BYTES];
    assert_eq!(dev.read(0, &mut buf).unwrap_err().kind(), ErrorKind::UnexpectedEof);
}

#[test]
fn silent_faults() {
    let dev = device();
    write(&dev, 0, 10, 1);
    dev.add(Rule::new(Op::Read, Effect::FlipBit).blocks(3..4).times(1));
    let mut buf = vec![0; 10 * BLOCK_BYTES];
    dev.read(0, &mut buf).unwrap();
    assert_eq!((bits_off(&buf, 1), bits_off(&buf[3 * BLOCK_BYTES..4 * BLOCK_BYTES], 1)), (1, 1));
    assert_eq!(bits_off(&read(&dev, 3), 1), 0);

    dev.add(Rule::new(Op::Write, Effect::FlipBit).times(1));
    assert_eq!(write(&dev, 3, 1, 2), None);
    assert_eq!(bits_off(&read(&dev, 3), 2), 1);

    dev.add(Rule::new(Op::Write, Effect::Lose).times(1));
    assert_eq!(write(&dev, 4, 1, 5), None);
    assert_eq!(read(&dev, 4)[0], 1);

    dev.add(Rule::new(Op::Write, Effect::Misdirect(2)).times(1));
    assert_eq!(write(&dev, 5, 1, 6), None);
    assert_eq!([5, 7].map(|b| read(&dev, b)[0]), [1, 6]);
    dev.add(Rule::new(Op::Write, Effect::Misdirect(-9)).times(1));
    assert_eq!(write(&dev, 5, 1, 7), None);
    assert_eq!(read(&dev, 5)[0], 1);

    dev.add(Rule::new(Op::Read, Effect::Misdirect(2)).times(1));
    assert_eq!(read(&dev, 5)[0], 6);
    dev.add(Rule::new(Op::Read, Effect::Lose).times(1));
    assert_eq!(read(&dev, 5)[0], 0xee);
}

#[test]
fn flushes_fail_lie_and_wait() {
    let record = Arc::new(RecordDevice::blank(10));
    let dev = FaultDevice::new(record.clone(), 0);
    dev.add(Rule::new(Op::Flush, Effect::Lose).times(1));
    dev.flush().unwrap();
    assert_eq!(record.flushes().len(), 0);
    dev.add(Rule::new(Op::Flush, Effect::Delay(Duration::from_millis(30))));
    let start = Instant::now();
    dev.flush().unwrap();
    assert!(start.elapsed() >= Duration::from_millis(30));
    assert_eq!(record.flushes().len(), 1);
    // one that failed is not forgotten: no later one claims what it could not
    dev.add(Rule::new(Op::Flush, Effect::Fail(libc::EIO)).times(1));
    assert_eq!(dev.flush().unwrap_err().raw_os_error(), Some(libc::EIO));
    dev.clear();
    assert_eq!(dev.flush().unwrap_err().raw_os_error(), Some(libc::EIO));
    assert_eq!(record.flushes().len(), 1);
}

#[test]
fn read_only_and_dead() {
    let dev = device();
    dev.set_read_only(true);
    assert_eq!(write(&dev, 0, 1, 1), Some(libc::EROFS));
    assert_eq!(dev.discard(0, 1).unwrap_err().raw_os_error(), Some(libc::EROFS));
    dev.flush().unwrap();
    dev.set_read_only(false);
    dev.add(Rule::new(Op::Write, Effect::Stop).skip(1));
    let data = [7; BLOCK_BYTES];
    let ops: Vec<_> = (0..3).map(|block| WriteOp { block, bufs: vec![&data[..]] }).collect();
    assert_eq!(dev.write_batch(&ops).unwrap_err().raw_os_error(), Some(libc::EIO));
    assert!(dev.is_stopped());
    dev.clear();
    assert!(dev.flush().is_err() && dev.discard(0, 1).is_err() && write(&dev, 0, 1, 1) == Some(libc::EIO));
    assert!(dev.read(0, &mut [0; BLOCK_BYTES]).is_err());
    assert_eq!([0, 1, 2].map(|b| read(&**dev.inner(), b)[0]), [7, 0, 0]);
}

#[test]
fn counters() {
    let fault = Arc::new(device());
    let dev = CountDevice::new(fault.clone());
    write(&dev, 0, 3, 1);
    let before = dev.counters();
    let data = [7; 2 * BLOCK_BYTES];
    dev.write_batch(&[WriteOp { block: 0, bufs: vec![&data] }, WriteOp { block: 5, bufs: vec![&data, &data] }])
        .unwrap();
    read(&dev, 0);
    dev.flush().unwrap();
    dev.discard(3, 9).unwrap();
    let expected = Counters {
        reads: 1,
        read_blocks: 1,
        batches: 1,
        writes: 2,
        write_blocks: 6,
        flushes: 1,
        discards: 1,
        discard_blocks: 9,
    };
    assert_eq!(dev.counters() - before, expected);
    assert_eq!(dev.counters(), fault.counters());
}
