//! A device that keeps its writes in memory and leaves the device below as it is.
//!
//! With it a read-only mount, and a check without repair, replay the journals of a volume that was not unmounted and
//! look at the result. Promises nothing about memory: it keeps every block written.
//!
//! A read-only mount can become writable ([`Overlays::write_through`]): what recovery wrote is then written to the
//! devices in the order in which it was written here, flushes included, so that a crash meanwhile is a crash during
//! recovery.

use braidfs_device::{BLOCK_BYTES, Device, WriteOp};
use braidfs_sync::plain::{Mutex, RwLock};
use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::{Arc, OnceLock};

/// A block written.
type Block = (u64, Arc<[u8]>);

/// What was done to the overlays of one volume, oldest first.
#[derive(Debug)]
enum Done {
    Write(usize, Vec<Block>),
    Flush(usize),
}

#[derive(Debug, Default)]
struct Log {
    done: VecDeque<Done>,
    /// A write that must not be repeated failed: what reached the devices is unknown.
    failed: bool,
}

/// See the module.
#[derive(Debug)]
pub struct OverlayDevice {
    base: Arc<dyn Device>,
    written: RwLock<HashMap<u64, Arc<[u8]>>>,
    /// The log of the volume, and the device's number there.
    log: Option<(Arc<Mutex<Log>>, usize)>,
    /// All goes here, once the volume was made writable.
    through: OnceLock<Arc<dyn Device>>,
}

impl OverlayDevice {
    /// An overlay over `base` without writes.
    pub fn new(base: Arc<dyn Device>) -> Self {
        Self { base, written: RwLock::default(), log: None, through: OnceLock::new() }
    }

    fn note(&self, what: impl FnOnce(usize) -> Done) {
        if let Some((log, device)) = &self.log {
            log.lock().done.push_back(what(*device));
        }
    }
}

impl Device for OverlayDevice {
    fn blocks(&self) -> u64 {
        self.through.get().unwrap_or(&self.base).blocks()
    }

    fn grown(&self) -> io::Result<u64> {
        self.through.get().unwrap_or(&self.base).grown()
    }

    fn extend(&self, blocks: u64) -> io::Result<()> {
        match self.through.get() {
            Some(device) => device.extend(blocks),
            None => Err(io::ErrorKind::ReadOnlyFilesystem.into()),
        }
    }

    fn cut_off(&self, blocks: u64) -> io::Result<()> {
        self.through.get().map_or(Ok(()), |device| device.cut_off(blocks))
    }

    fn read(&self, block: u64, buf: &mut [u8]) -> io::Result<()> {
        if let Some(device) = self.through.get() {
            return device.read(block, buf);
        }
        // held over both: the blocks leave the memory when they are on the device
        let written = self.written.read();
        match self.through.get() {
            Some(device) => device.read(block, buf)?,
            None => self.base.read(block, buf)?,
        }
        if written.is_empty() {
            return Ok(());
        }
        for (i, b) in buf.chunks_mut(BLOCK_BYTES).enumerate() {
            if let Some(w) = written.get(&(block + i as u64)) {
                b.copy_from_slice(w);
            }
        }
        Ok(())
    }

    fn write_batch(&self, ops: &[WriteOp<'_>]) -> io::Result<()> {
        if let Some(device) = self.through.get() {
            return device.write_batch(ops);
        }
        let mut blocks: Vec<Block> = Vec::new();
        for op in ops {
            for (at, b) in (op.block..).zip(op.bufs.iter().flat_map(|b| b.chunks(BLOCK_BYTES))) {
                if at >= self.base.blocks() {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                blocks.push((at, b.into()));
            }
        }
        let mut written = self.written.write();
        written.extend(blocks.iter().cloned());
        self.note(|device| Done::Write(device, blocks));
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        match self.through.get() {
            Some(device) => device.flush(),
            None => {
                self.note(Done::Flush);
                Ok(())
            }
        }
    }

    fn discard(&self, block: u64, blocks: u64) -> io::Result<()> {
        self.through.get().map_or(Ok(()), |device| device.discard(block, blocks))
    }

    fn block_device(&self) -> Option<(u32, u32)> {
        self.base.block_device()
    }

    fn name(&self) -> String {
        self.base.name()
    }
}

/// The overlays of all devices of a volume.
#[derive(Debug, Default)]
pub struct Overlays {
    devices: Vec<Arc<OverlayDevice>>,
    log: Arc<Mutex<Log>>,
}

impl Overlays {
    /// One over each of `bases`.
    pub fn new(bases: Vec<Arc<dyn Device>>) -> Self {
        let log = Arc::new(Mutex::default());
        let over = |(i, base)| Arc::new(OverlayDevice { log: Some((Arc::clone(&log), i)), ..OverlayDevice::new(base) });
        let devices = bases.into_iter().enumerate().map(over).collect();
        Self { devices, log }
    }

    /// There are overlays, and they keep what is written.
    pub fn is_waiting(&self) -> bool {
        self.devices.iter().any(|d| d.through.get().is_none())
    }

    /// For a volume to work on.
    pub fn devices(&self) -> Vec<Arc<dyn Device>> {
        self.devices.iter().map(|d| Arc::clone(d) as Arc<dyn Device>).collect()
    }

    /// Opens the devices for writing, writes to them what was written here, and from then on everything else. Nobody
    /// writes meanwhile. Done already (or no overlay at all): nothing happens. After an error that the devices can
    /// recover from it may be called again; it goes on where it stopped.
    ///
    /// # Errors
    /// A device is read-only or in use by others; of a device.
    pub fn write_through(&self) -> io::Result<()> {
        if !self.is_waiting() {
            return Ok(());
        }
        let mut log = self.log.lock();
        if log.failed {
            return Err(io::Error::other(
                "an earlier attempt to make the volume writable failed: unmount and mount it",
            ));
        }
        let mut targets = Vec::with_capacity(self.devices.len());
        for d in &self.devices {
            targets.push(d.base.writable()?.unwrap_or_else(|| Arc::clone(&d.base)));
        }
        while let Some(done) = log.done.pop_front() {
            let result = match &done {
                Done::Write(i, blocks) => {
                    let ops: Vec<WriteOp<'_>> =
                        blocks.iter().map(|(block, b)| WriteOp { block: *block, bufs: vec![b] }).collect();
                    targets[*i].write_batch(&ops)
                }
                Done::Flush(i) => targets[*i].flush(),
            };
            if let Err(e) = result {
                // part of it may be there, and no later flush can be trusted
                log.failed = true;
                return Err(e);
            }
        }
        for (d, target) in self.devices.iter().zip(targets) {
            let mut written = d.written.write();
            // nobody else sets it: the log is locked
            let _ = d.through.set(target);
            *written = HashMap::new();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use braidfs_device::{Event, RecordDevice};

    #[test]
    fn what_was_written_goes_through_in_its_order() {
        let below = Arc::new(RecordDevice::blank(16));
        let overlays = Overlays::new(vec![below.clone()]);
        let device = overlays.devices().remove(0);
        let block = |n: u8| vec![n; BLOCK_BYTES];
        device.write(3, &block(1)).unwrap();
        device.flush().unwrap();
        device.write(3, &block(2)).unwrap();
        device.write(5, &block(3)).unwrap();
        let read = |d: &dyn Device, at| {
            let mut buf = block(9);
            d.read(at, &mut buf).unwrap();
            buf[0]
        };
        assert_eq!((read(&*device, 3), read(&*device, 5), read(&*below, 3)), (2, 3, 0));
        overlays.write_through().unwrap();
        overlays.write_through().unwrap();
        assert_eq!((read(&*below, 3), read(&*below, 5), read(&*device, 3)), (2, 3, 2));
        device.write(4, &block(7)).unwrap();
        assert_eq!(read(&*below, 4), 7);
        let kinds: Vec<bool> = below.log().iter().map(|e| matches!(e, Event::Flush { .. })).collect();
        assert_eq!(kinds, [false, true, false, false, false], "write, flush, write, write, and the one after");
    }
}
