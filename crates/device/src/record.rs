//! A device that remembers every write and flush, and makes of them what a crash may leave behind.
//!
//! Owns the log and the images made of it. Invariants: a write is in the log when it returns; a flush covers
//! exactly the writes that were in the log when it *started* (of its own part, where several devices are parts of it,
//! [`crate::PartDevice`]); reads see every write. The model: what the last completed flush covers is on the disk; each
//! later write is there whole, in part or not at all, as the caller chooses. Writes to one block reach the disk in the
//! order of the log. Lock order: log, memory chunk; the checkpoints are a leaf of their own.

use crate::{BLOCK_BYTES, Device, Flushed, Image, MemDevice, WriteOp, check_discard, check_ops, thread_number};
use braidfs_sync::device::Mutex;
use braidfs_sync::rank;
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::Arc;

/// Bytes that a disk writes whole or not at all.
pub const SECTOR_BYTES: usize = 512;
const BLOCK_SECTORS: usize = BLOCK_BYTES / SECTOR_BYTES;
/// Events between the images that are kept on the way to a later one.
const CHECKPOINT_EVENTS: usize = 64;

/// Something that the device did, in the order of completion.
#[derive(Debug, Clone)]
pub enum Event {
    /// One write of a batch.
    Write {
        /// The first block that it went to.
        block: u64,
        /// A multiple of 4096 bytes.
        data: Arc<[u8]>,
        /// The thread that wrote, numbered by first appearance in the process.
        thread: u64,
    },
    /// A discard: like a write of zeros, or of [`Image::discarded`], it may or may not have happened before the next flush.
    Discard {
        /// The first block that it was for.
        block: u64,
        /// Number of blocks.
        blocks: u64,
        /// As for `Write`.
        thread: u64,
    },
    /// A flush returned.
    Flush {
        /// The events before this index are durable, by this flush or an earlier one,
        covers: usize,
        /// if they are of these blocks.
        blocks: Range<u64>,
        /// As for `Write`.
        thread: u64,
    },
}

/// What a crash leaves of a write that no flush covered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keep {
    /// All of it.
    Whole,
    /// The old content of all its blocks.
    None,
    /// The first so many sectors of 512 bytes.
    Torn(usize),
    /// Sector `i` if bit `i % 64` is set.
    TornMask(u64),
}

impl Keep {
    /// The sectors of the `block`th block of a write that are kept, a bit each.
    pub fn sectors(self, block: usize) -> u8 {
        let first = block * BLOCK_SECTORS;
        match self {
            Keep::Whole => u8::MAX,
            Keep::None => 0,
            Keep::Torn(sectors) => {
                let kept = sectors.saturating_sub(first).min(BLOCK_SECTORS);
                ((1u16 << kept) - 1) as u8
            }
            Keep::TornMask(mask) => mask.rotate_right((first % 64) as u32) as u8,
        }
    }
}

#[derive(Debug, Default)]
struct Log {
    events: Vec<Event>,
    /// Indices of the flushes in `events`.
    flushes: Vec<usize>,
    /// What all of them have made durable.
    flushed: Flushed,
}

impl Log {
    /// What is durable after the first `upto` events.
    fn flushed(&self, upto: usize) -> Flushed {
        let before = &self.flushes[..self.flushes.partition_point(|&f| f < upto)];
        let mut all = Flushed::default();
        for flush in before.iter().rev() {
            if let Event::Flush { covers, blocks, .. } = &self.events[*flush] {
                all.add(blocks, *covers);
            }
            if all.parts() == self.flushed.parts() {
                break;
            }
        }
        all
    }
}

/// A device in memory that records.
#[derive(Debug)]
pub struct RecordDevice {
    now: MemDevice,
    log: Mutex<Log, rank::RecordLog>,
    /// The durable content after so many events. Holds the initial image at 0.
    checkpoints: Mutex<BTreeMap<usize, Image>, rank::RecordImages>,
}

impl RecordDevice {
    /// A device that starts with the content of `initial`, all of it durable.
    pub fn new(initial: Image) -> Self {
        Self {
            now: MemDevice::from_image(initial.clone()),
            log: Mutex::default(),
            checkpoints: Mutex::new(BTreeMap::from([(0, initial)])),
        }
    }

    /// A device of zeros.
    pub fn blank(blocks: u64) -> Self {
        Self::new(Image::new(blocks))
    }

    /// A device that was in use before, as [`Image::soiled`].
    pub fn soiled(blocks: u64) -> Self {
        Self::new(Image::soiled(blocks))
    }

    /// The content before the first event.
    pub fn initial(&self) -> Image {
        self.checkpoints.lock().get(&0).cloned().unwrap_or_else(|| Image::new(self.now.blocks()))
    }

    /// All events so far. The data is shared, not copied.
    pub fn log(&self) -> Vec<Event> {
        self.log.lock().events.clone()
    }

    /// Number of events so far: a mark to put between the steps of a workload.
    pub fn log_len(&self) -> usize {
        self.log.lock().events.len()
    }

    /// Indices in the log of the flushes so far; a prefix that ends with flush `f` has `f + 1` events.
    pub fn flushes(&self) -> Vec<usize> {
        self.log.lock().flushes.clone()
    }

    /// Indices in the log of the writes and discards that a crash after `upto` events may lose.
    pub fn unflushed(&self, upto: usize) -> Vec<usize> {
        let log = self.log.lock();
        let upto = upto.min(log.events.len());
        let flushed = log.flushed(upto);
        (flushed.prefix(self.blocks())..upto).filter(|&i| !flushed.has(i, &log.events[i])).collect()
    }

    /// The content now, all writes whole.
    pub fn snapshot(&self) -> Image {
        self.now.snapshot()
    }

    /// The disk after a crash that follows the first `upto` events (all, if there are fewer).
    ///
    /// `keep` is asked once for each unflushed write, with its index among them, in the order of the log
    /// ([`RecordDevice::unflushed`] tells which these are).
    pub fn crash_image(&self, upto: usize, keep: &mut dyn FnMut(usize) -> Keep) -> MemDevice {
        let (flushed, durable, late) = {
            let log = self.log.lock();
            let upto = upto.min(log.events.len());
            let flushed = log.flushed(upto);
            let durable = flushed.prefix(self.blocks());
            (flushed, durable, log.events[durable..upto].to_vec())
        };
        let mut image = self.durable_image(durable);
        let mut lost = 0;
        for (i, event) in (durable..).zip(&late) {
            if flushed.has(i, event) {
                apply(&mut image, event, Keep::Whole);
            } else {
                apply(&mut image, event, keep(lost));
                lost += 1;
            }
        }
        MemDevice::from_image(image)
    }

    /// The content after the first `events` events, from the nearest checkpoint on.
    fn durable_image(&self, events: usize) -> Image {
        let (from, mut image) = {
            let checkpoints = self.checkpoints.lock();
            let near = checkpoints.range(..=events).next_back();
            near.map_or_else(|| (0, Image::new(self.now.blocks())), |(&at, image)| (at, image.clone()))
        };
        if from == events {
            return image;
        }
        let todo = self.log.lock().events[from..events].to_vec();
        let mut new = Vec::new();
        for (i, event) in (from + 1..).zip(&todo) {
            apply(&mut image, event, Keep::Whole);
            if i % CHECKPOINT_EVENTS == 0 || i == events {
                new.push((i, image.clone()));
            }
        }
        self.checkpoints.lock().extend(new);
        image
    }

    /// A flush during which `meanwhile` runs: what others write by then returns before it, and is not covered.
    ///
    /// # Errors
    /// None.
    pub fn flush_while(&self, meanwhile: &dyn Fn()) -> io::Result<()> {
        self.flush_part_while(0..self.blocks(), meanwhile)
    }

    /// [`Self::flush_while`] of these blocks alone.
    ///
    /// # Errors
    /// None.
    pub fn flush_part_while(&self, blocks: Range<u64>, meanwhile: &dyn Fn()) -> io::Result<()> {
        let covers = self.log.lock().events.len();
        meanwhile();
        let mut log = self.log.lock();
        let at = log.events.len();
        // An overlapping flush that started later may have returned first.
        let covers = covers.max(log.flushed.covers(&blocks));
        log.flushed.add(&blocks, covers);
        log.events.push(Event::Flush { covers, blocks, thread: thread_number() });
        log.flushes.push(at);
        Ok(())
    }

    fn record(&self, event: Event) {
        let mut log = self.log.lock();
        // Memory and log change together, so that overlapping writes have one order in both.
        match &event {
            Event::Write { block, data, .. } => self.now.share(*block, data),
            Event::Discard { block, blocks, .. } => self.now.clear(*block, *blocks),
            Event::Flush { .. } => {}
        }
        log.events.push(event);
    }
}

impl Event {
    /// Applies what `keep` leaves of it to an image of the device that it was recorded on.
    pub fn apply(&self, image: &mut Image, keep: Keep) {
        apply(image, self, keep);
    }
}

/// Applies what `keep` leaves of `event`. The log holds only what lies on the device.
fn apply(image: &mut Image, event: &Event, keep: Keep) {
    match event {
        Event::Write { block, data, .. } => {
            for (i, at) in (0..data.len()).step_by(BLOCK_BYTES).enumerate() {
                let block = block + i as u64;
                match keep.sectors(i) {
                    u8::MAX => image.share_block(block, data, at),
                    0 => {}
                    sectors => image.overlay(block, &data[at..at + BLOCK_BYTES], sectors),
                }
            }
        }
        Event::Discard { block, blocks, .. } if keep == Keep::Whole => image.discard(*block, *blocks),
        Event::Discard { block, blocks, .. } => {
            let discarded = [image.discarded(); BLOCK_BYTES];
            for i in 0..*blocks {
                match keep.sectors(i as usize) {
                    u8::MAX => image.discard(block + i, 1),
                    0 => {}
                    sectors => image.overlay(block + i, &discarded, sectors),
                }
            }
        }
        Event::Flush { .. } => {}
    }
}

impl Device for RecordDevice {
    fn blocks(&self) -> u64 {
        self.now.blocks()
    }

    fn read(&self, block: u64, buf: &mut [u8]) -> io::Result<()> {
        self.now.read(block, buf)
    }

    fn write_batch(&self, ops: &[WriteOp<'_>]) -> io::Result<()> {
        check_ops(self.blocks(), ops)?;
        for op in ops {
            let data: Arc<[u8]> = match &op.bufs[..] {
                [one] => Arc::from(*one),
                many => Arc::from(many.concat()),
            };
            if !data.is_empty() {
                self.record(Event::Write { block: op.block, data, thread: thread_number() });
            }
        }
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        // Lets other threads' writes return while this flush runs: they must not rely on it.
        self.flush_while(&std::thread::yield_now)
    }

    fn discard(&self, block: u64, blocks: u64) -> io::Result<()> {
        check_discard(self.blocks(), block, blocks)?;
        if blocks > 0 {
            self.record(Event::Discard { block, blocks, thread: thread_number() });
        }
        Ok(())
    }

    fn name(&self) -> String {
        "recording memory".into()
    }
}
