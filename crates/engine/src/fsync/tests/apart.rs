//! Files whose names and content are of several devices.

use super::*;
use braidfs_device::WriteOp;
use std::collections::HashSet;
use std::io;
use std::sync::Mutex;
use std::thread::{self, ThreadId};

/// Memory that notes which threads have begun a sync and not ended it, and how many have.
#[derive(Debug)]
struct Syncs {
    memory: MemDevice,
    open: Mutex<(HashSet<ThreadId>, u32)>,
}

impl Device for Syncs {
    fn blocks(&self) -> u64 {
        self.memory.blocks()
    }
    fn read(&self, block: u64, buf: &mut [u8]) -> io::Result<()> {
        self.memory.read(block, buf)
    }
    fn write_batch(&self, ops: &[WriteOp<'_>]) -> io::Result<()> {
        self.memory.write_batch(ops)
    }
    fn write_batch_through(&self, ops: &[WriteOp<'_>]) -> io::Result<()> {
        let mut open = self.open.lock().unwrap();
        open.0.insert(thread::current().id());
        open.1 += 1;
        drop(open);
        self.write_batch(ops)
    }
    fn end_sync(&self) {
        self.open.lock().unwrap().0.remove(&thread::current().id());
    }
    fn flush(&self) -> io::Result<()> {
        self.end_sync();
        Ok(())
    }
    // none is put before it, which would flush for several threads
    fn shares_flushes(&self) -> bool {
        true
    }
    fn discard(&self, _: u64, _: u64) -> io::Result<()> {
        Ok(())
    }
    fn name(&self) -> String {
        "memory".into()
    }
}

/// Large writes of others step back behind syncs: none may seem to go on when all have ended, whoever flushes what a thread wrote.
#[test]
fn a_sync_on_several_devices_is_over_when_it_returns() {
    let two = [(); 2].map(|()| Arc::new(Syncs { memory: MemDevice::new(16384), open: Mutex::default() }));
    let devices = two.each_ref().map(|d| d.clone() as Arc<dyn Device>);
    let v = of_two_domains(devices.to_vec());
    let begun = || two.each_ref().map(|d| d.open.lock().unwrap().1);
    let mut both = 0;
    for i in 0..200 {
        let (dir, _) = make(&v, InodeNo::ROOT, &format!("d{i}-"), FileKind::Dir, &[]);
        let (file, _) = make(&v, dir, "f", FileKind::File, &[v.domain_of(dir).unwrap()]);
        v.write(&v.open(file).unwrap(), 0, &[7; 8192]).unwrap();
        let before = begun();
        v.fsync(file, false).unwrap();
        let now = begun();
        both += u32::from(now[0] > before[0] && now[1] > before[1]);
        for d in &two {
            assert!(d.open.lock().unwrap().0.is_empty(), "round {i}");
        }
    }
    assert!(both > 0, "no sync was of two devices");
    v.unmount().unwrap();
}
