//! A device that takes its time to say how large it is.

use crate::{MkfsOptions, MountOptions, NewSize, Volume, mkfs};
use braidfs_device::{Device, MemDevice, WriteOp};
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

/// Tells when it is asked, and waits for the word to answer.
#[derive(Debug)]
struct Slow {
    memory: MemDevice,
    asked: SyncSender<()>,
    go_on: braidfs_sync::plain::Mutex<Receiver<()>>,
}

impl Device for Slow {
    fn blocks(&self) -> u64 {
        self.memory.blocks()
    }
    fn read(&self, block: u64, buf: &mut [u8]) -> io::Result<()> {
        self.memory.read(block, buf)
    }
    fn write_batch(&self, ops: &[WriteOp<'_>]) -> io::Result<()> {
        self.memory.write_batch(ops)
    }
    fn flush(&self) -> io::Result<()> {
        self.memory.flush()
    }
    fn discard(&self, block: u64, blocks: u64) -> io::Result<()> {
        self.memory.discard(block, blocks)
    }
    fn grown(&self) -> io::Result<u64> {
        self.asked.send(()).unwrap();
        self.go_on.lock().recv().unwrap();
        Ok(self.blocks())
    }
    fn name(&self) -> String {
        "slow".into()
    }
}

/// Who claims a group, or asks for free space, does not wait for a device that is asked for its size.
#[test]
fn nobody_waits_for_the_size_of_a_device() {
    let ((asked, is_asked), (go_on, told)) = (sync_channel(1), sync_channel(1));
    let device: Arc<dyn Device> =
        Arc::new(Slow { memory: MemDevice::new(64 << 8), asked, go_on: braidfs_sync::plain::Mutex::new(told) });
    let how = MkfsOptions { domains: Some(1), group_bytes: Some(4 << 20), ..MkfsOptions::default() };
    mkfs::format(std::slice::from_ref(&device), &how).unwrap();
    let v = Volume::mount(vec![device], MountOptions { background: false, ..MountOptions::default() }).unwrap();
    let free = std::thread::scope(|s| {
        let growing = s.spawn(|| v.grow(NewSize::Device).unwrap());
        is_asked.recv().unwrap();
        let free = v.mounted().bat.try_lock().is_some();
        go_on.send(()).unwrap();
        growing.join().unwrap();
        free
    });
    assert!(free, "the table of groups is locked while the device is asked");
    v.unmount().unwrap();
}
