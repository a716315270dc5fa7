//! A device in memory with a volatile cache, and a store on it, for the tests of space and node table.

use crate::store::Store;
use braidfs_device::{BLOCK_BYTES, Device, WriteOp};
use braidfs_format::super_block::SuperBlock;
use braidfs_sync::plain::Mutex;
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

/// What is durable, and single blocks written since the last flush.
#[derive(Debug, Default)]
pub(crate) struct TestDevice {
    durable: Mutex<Vec<u8>>,
    cache: Mutex<BTreeMap<u64, Vec<u8>>>,
    /// Whether writes fail from now on.
    pub broken: AtomicBool,
    /// Calls of `read`.
    pub reads: AtomicU64,
    /// Reads that touch one of these blocks fail.
    pub unreadable: Mutex<Range<u64>>,
}

impl TestDevice {
    /// Loses power: of the blocks not flushed, those survive for which `keep` says so, asked once more, others half.
    pub fn crash(&self, mut keep: impl FnMut() -> bool) {
        let mut durable = self.durable.lock();
        for (block, data) in std::mem::take(&mut *self.cache.lock()) {
            if keep() {
                durable[block as usize * BLOCK_BYTES..][..BLOCK_BYTES].copy_from_slice(&data);
            } else if keep() {
                durable[block as usize * BLOCK_BYTES..][..BLOCK_BYTES / 2].copy_from_slice(&data[..BLOCK_BYTES / 2]);
            }
        }
    }
}

impl Device for TestDevice {
    fn blocks(&self) -> u64 {
        (self.durable.lock().len() / BLOCK_BYTES) as u64
    }
    fn read(&self, block: u64, buf: &mut [u8]) -> io::Result<()> {
        self.reads.fetch_add(1, Relaxed);
        let bad = self.unreadable.lock().clone();
        if block < bad.end && bad.start < block + (buf.len() / BLOCK_BYTES) as u64 {
            return Err(io::Error::other("unreadable"));
        }
        let at = block as usize * BLOCK_BYTES;
        buf.copy_from_slice(self.durable.lock().get(at..at + buf.len()).ok_or(io::ErrorKind::UnexpectedEof)?);
        for (b, data) in self.cache.lock().range(block..block + (buf.len() / BLOCK_BYTES) as u64) {
            buf[(b - block) as usize * BLOCK_BYTES..][..BLOCK_BYTES].copy_from_slice(data);
        }
        Ok(())
    }
    fn write_batch(&self, ops: &[WriteOp<'_>]) -> io::Result<()> {
        if self.broken.load(Relaxed) {
            return Err(io::Error::other("broken"));
        }
        let mut cache = self.cache.lock();
        for op in ops {
            let blocks = op.bufs.iter().flat_map(|b| b.chunks(BLOCK_BYTES));
            cache.extend((op.block..).zip(blocks.map(<[u8]>::to_vec)));
        }
        Ok(())
    }
    fn flush(&self) -> io::Result<()> {
        self.crash(|| true);
        Ok(())
    }
    fn discard(&self, _: u64, _: u64) -> io::Result<()> {
        Ok(())
    }
    fn name(&self) -> String {
        "test".into()
    }
}

/// A store with `groups` groups of `segments` segments, the last one of `last` blocks.
pub(crate) fn store(segments: u32, groups: u32, last: u32) -> (Arc<TestDevice>, Arc<Store>) {
    let mut sb = SuperBlock::empty();
    sb.uuid = [7; 16];
    sb.group_blocks = (segments * 512).into();
    sb.groups = groups.into();
    sb.devices = 1.into();
    let blocks = u64::from((groups - 1) * segments * 512 + last) + 9;
    sb.device[0].blocks = blocks.into();
    sb.device[0].data_start = 8.into();
    sb.device[0].groups = groups.into();
    sb.device[0].last_group_blocks = last.into();
    let device =
        Arc::new(TestDevice { durable: Mutex::new(vec![0xa5; blocks as usize * BLOCK_BYTES]), ..Default::default() });
    let store = Store::new(vec![device.clone()], &sb).unwrap();
    (device, Arc::new(store))
}
