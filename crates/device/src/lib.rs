//! Block devices: what braidfs asks of storage, and the kinds of storage that it knows.

mod aligned;
mod blkdev;
mod count;
mod cut;
mod fault;
mod fence;
mod file;
mod flush;
mod loopdev;
mod mem;
mod nbd;
mod open;
mod parts;
mod range;
mod record;
mod rw;
mod sparse;
mod throttle;
mod trace;
mod uring;

pub use aligned::AlignedBuf;
pub use count::{CountDevice, Counters};
pub use cut::CutDevice;
pub use fault::{Effect, FaultDevice, Op, Rule};
pub use fence::{Fence, Pass, RecordIo, Rejoin, boot_time};
pub use file::hand_over::{HandedClaim, HandedDevice};
pub use file::{FileDevice, OpenHow};
pub use flush::SharedFlushes;
#[cfg(feature = "planted-bugs")]
pub use flush::planted;
pub use loopdev::LoopDevice;
pub use mem::{Image, MemDevice};
pub use nbd::{NbdDevice, NbdError, NbdUri, OpenHere, is_nbd_uri};
pub use open::{
    AnyDevice, OpenError, is_unclaimed, look_at_devices, open_any_devices, open_claimed_devices, open_volume_devices,
    open_volume_files,
};
pub use parts::{Flushed, PartDevice, Parted};
pub use record::{Event, Keep, RecordDevice, SECTOR_BYTES};
pub use sparse::SparseDevice;
pub use trace::{BlockContent, TraceDevice};

use std::io;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Bytes of a block.
pub const BLOCK_BYTES: usize = 4096;

/// A number of this thread alone: no later one gets it.
pub(crate) fn thread_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    thread_local!(static NUMBER: u64 = NEXT.fetch_add(1, Relaxed));
    NUMBER.with(|n| *n)
}

/// One write of a batch: whole blocks from `block` on, gathered from `bufs` (each a multiple of 4096 bytes).
#[derive(Debug, Clone)]
pub struct WriteOp<'a> {
    /// First block on the device.
    pub block: u64,
    /// Data, one piece behind the other.
    pub bufs: Vec<&'a [u8]>,
}

/// A device of 4 KiB blocks with a volatile write cache: a write is durable only after a later `flush`.
///
/// Safe to use from many threads. Writes of different threads are not ordered but by `flush`.
pub trait Device: Send + Sync + std::fmt::Debug {
    /// Number of blocks.
    fn blocks(&self) -> u64;

    /// Reads whole blocks.
    ///
    /// # Errors
    /// Of the device, or `UnexpectedEof` past the end; nothing is then said of `buf`.
    fn read(&self, block: u64, buf: &mut [u8]) -> io::Result<()>;

    /// Writes whole blocks.
    ///
    /// # Errors
    /// Of the device; any part of the write may have happened.
    fn write(&self, block: u64, buf: &[u8]) -> io::Result<()> {
        self.write_batch(&[WriteOp { block, bufs: vec![buf] }])
    }

    /// Writes all of `ops`, in parallel where the device can, and returns when all are done.
    ///
    /// # Errors
    /// The first one; the others may or may not have happened.
    fn write_batch(&self, ops: &[WriteOp<'_>]) -> io::Result<()>;

    /// As [`Self::write_batch`], of who flushes right afterwards: a device that can write past its cache makes the writes
    /// durable at once, and that flush may find nothing to do.
    ///
    /// # Errors
    /// As [`Self::write_batch`].
    fn write_batch_through(&self, ops: &[WriteOp<'_>]) -> io::Result<()> {
        self.write_batch(ops)
    }

    /// This thread has written by [`Self::write_batch_through`], and leaves the flush to another one: nobody waits for its sync any
    /// longer.
    fn end_sync(&self) {}

    /// Makes every write that returned before this call durable.
    ///
    /// # Errors
    /// Of the device: what was written since the last good flush is then in an unknown state, for good.
    fn flush(&self) -> io::Result<()>;

    /// Whether calls of [`Self::flush`] that come at the same time share the work: those that wait while one runs are all
    /// served by the next. Else [`SharedFlushes`] is put before it.
    fn shares_flushes(&self) -> bool {
        false
    }

    /// Says that the blocks hold nothing of use (TRIM, hole punch): they read as zeros or as anything until they are
    /// written. As a write, it is durable, or certainly not undone by a crash, only after a later `flush`.
    ///
    /// # Errors
    /// Of the device; [`io::ErrorKind::Unsupported`] where it cannot.
    fn discard(&self, block: u64, blocks: u64) -> io::Result<()>;

    /// Looks how large the device is by now. Where it has grown, [`Self::blocks`] tells so from then on; where it has shrunk
    /// only this tells.
    ///
    /// # Errors
    /// Of the device.
    fn grown(&self) -> io::Result<u64> {
        Ok(self.blocks())
    }

    /// Makes an image file so long where it is shorter, durably; [`Self::blocks`] tells so from then on.
    ///
    /// # Errors
    /// [`io::ErrorKind::Unsupported`]: it is none; of the file system that it lies in.
    fn extend(&self, blocks: u64) -> io::Result<()> {
        if blocks <= self.blocks() { Ok(()) } else { Err(io::ErrorKind::Unsupported.into()) }
    }

    /// Nobody needs what lies behind the first `blocks` blocks any more: an image file is cut off there.
    ///
    /// # Errors
    /// Of the file system that it lies in.
    fn cut_off(&self, _blocks: u64) -> io::Result<()> {
        Ok(())
    }

    /// The device opened for writing, where this one was opened for reading only; `None`: this one can be written. As long
    /// as the new one lives nobody else can open the device.
    ///
    /// # Errors
    /// EROFS, EACCES: it cannot be written. EBUSY: others have it open.
    fn writable(&self) -> io::Result<Option<std::sync::Arc<dyn Device>>> {
        Ok(None)
    }

    /// What a device has besides that others could write from elsewhere; `None`: locks of this machine keep them off.
    fn remote(&self) -> Option<&dyn Remote> {
        None
    }

    /// Major and minor number of the block device that it is, or that the file system of an image file is on; `None`: there is
    /// none, or it is not known.
    fn block_device(&self) -> Option<(u32, u32)> {
        None
    }

    /// What it is, for messages: a path, a URI, `memory`.
    fn name(&self) -> String;
}

/// A device that another machine could write at the same time: who writes it holds a lease, on the volume itself.
pub trait Remote: Send + Sync {
    /// How long a lease is to last; `None`: its user says that nobody else can write it.
    fn lease(&self) -> Option<std::time::Duration>;

    /// How long a request may be in flight.
    fn io_timeout(&self) -> std::time::Duration;

    /// From now on every write and discard passes `fence`, and no other one; behind the end of its lease reads wait for it, too.
    /// Where it is lost the device fails for good.
    fn set_fence(&self, fence: std::sync::Arc<Fence>);

    /// Whether its fence is open: who has the device holds the lease.
    fn is_held(&self) -> bool;

    /// The way beside the fence, for the owner record alone.
    fn record_io(&self) -> Box<dyn RecordIo + '_>;
}

/// Checks that `bytes` are whole blocks and lie on a device of `blocks` blocks; `past` is the error past its end.
fn check_range(blocks: u64, block: u64, bytes: usize, past: io::ErrorKind) -> io::Result<()> {
    if !bytes.is_multiple_of(BLOCK_BYTES) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("{bytes} bytes are not whole blocks")));
    }
    let count = (bytes / BLOCK_BYTES) as u64;
    if block.checked_add(count).is_none_or(|end| end > blocks) {
        let text = format!("blocks {block} + {count} lie past the end of a device of {blocks}");
        return Err(io::Error::new(past, text));
    }
    Ok(())
}

/// Bytes of a batch of writes.
fn bytes_of(ops: &[WriteOp<'_>]) -> usize {
    ops.iter().flat_map(|op| &op.bufs).map(|b| b.len()).sum()
}

/// [`check_range`] for a batch of writes.
fn check_ops(blocks: u64, ops: &[WriteOp<'_>]) -> io::Result<()> {
    for op in ops {
        for buf in &op.bufs {
            check_range(blocks, 0, buf.len(), io::ErrorKind::InvalidInput)?;
        }
        check_range(blocks, op.block, op.bufs.iter().map(|b| b.len()).sum(), io::ErrorKind::InvalidInput)?;
    }
    Ok(())
}

/// Checks that a discard lies on a device of `blocks` blocks.
fn check_discard(blocks: u64, block: u64, count: u64) -> io::Result<()> {
    if block.checked_add(count).is_none_or(|end| end > blocks) {
        let text = format!("discard of {block} + {count} lies past the end of a device of {blocks}");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    Ok(())
}
