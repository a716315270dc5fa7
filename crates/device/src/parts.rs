//! Several devices that are parts of one: what a recording device notes is then one log for all of them, in which a flush
//! covers its own part alone.

use crate::{Device, Event, MemDevice, RecordDevice, TraceDevice, WriteOp, check_discard, check_ops, check_range};
use std::io;
use std::ops::Range;
use std::sync::Arc;

/// A device of which a part can be flushed by itself.
pub trait Parted: Device {
    /// [`Device::flush`] of these blocks alone: what lies elsewhere is as before.
    ///
    /// # Errors
    /// As [`Device::flush`].
    fn flush_part(&self, blocks: Range<u64>) -> io::Result<()>;
}

impl Parted for MemDevice {
    fn flush_part(&self, _: Range<u64>) -> io::Result<()> {
        self.flush()
    }
}

impl Parted for RecordDevice {
    fn flush_part(&self, blocks: Range<u64>) -> io::Result<()> {
        self.flush_part_while(blocks, &std::thread::yield_now)
    }
}

impl Parted for TraceDevice {
    fn flush_part(&self, blocks: Range<u64>) -> io::Result<()> {
        self.record_flush(blocks)
    }
}

/// Some blocks of another device, as a device of its own.
#[derive(Debug)]
pub struct PartDevice<D> {
    whole: Arc<D>,
    blocks: Range<u64>,
}

impl<D: Parted + 'static> PartDevice<D> {
    /// `whole` as devices of so many blocks, one behind the other; where it is shorter, the last ones are.
    pub fn split(whole: &Arc<D>, lengths: impl IntoIterator<Item = u64>) -> Vec<Arc<dyn Device>> {
        let end = whole.blocks();
        let mut at: u64 = 0;
        let part = |length: u64| {
            let blocks = at..at.saturating_add(length).min(end);
            at = blocks.end;
            Arc::new(Self { whole: whole.clone(), blocks }) as Arc<dyn Device>
        };
        lengths.into_iter().map(part).collect()
    }
}

impl<D: Parted> Device for PartDevice<D> {
    fn blocks(&self) -> u64 {
        self.blocks.end - self.blocks.start
    }

    fn read(&self, block: u64, buf: &mut [u8]) -> io::Result<()> {
        check_range(self.blocks(), block, buf.len(), io::ErrorKind::UnexpectedEof)?;
        self.whole.read(self.blocks.start + block, buf)
    }

    fn write_batch(&self, ops: &[WriteOp<'_>]) -> io::Result<()> {
        check_ops(self.blocks(), ops)?;
        let start = self.blocks.start;
        let moved = ops.iter().map(|op| WriteOp { block: start + op.block, bufs: op.bufs.clone() });
        self.whole.write_batch(&moved.collect::<Vec<_>>())
    }

    fn flush(&self) -> io::Result<()> {
        self.whole.flush_part(self.blocks.clone())
    }

    fn shares_flushes(&self) -> bool {
        self.whole.shares_flushes()
    }

    fn discard(&self, block: u64, blocks: u64) -> io::Result<()> {
        check_discard(self.blocks(), block, blocks)?;
        self.whole.discard(self.blocks.start + block, blocks)
    }

    fn name(&self) -> String {
        format!("{} from block {}", self.whole.name(), self.blocks.start)
    }
}

/// What the flushes of a log have made durable, part by part of the device.
#[derive(Debug, Clone, Default)]
pub struct Flushed {
    /// The blocks of each part that was flushed, and how many events its last flush covers.
    parts: Vec<(Range<u64>, usize)>,
}

impl Flushed {
    /// By these events, the first ones of a log.
    pub fn by(events: &[Event]) -> Self {
        let mut all = Self::default();
        for event in events {
            if let Event::Flush { blocks, covers, .. } = event {
                all.add(blocks, *covers);
            }
        }
        all
    }

    /// One more flush, which covers so many events, of what lies in `blocks`.
    pub(crate) fn add(&mut self, blocks: &Range<u64>, covers: usize) {
        match self.parts.iter_mut().find(|(part, _)| part == blocks) {
            // one that began later may have returned first
            Some((_, before)) => *before = covers.max(*before),
            None => self.parts.push((blocks.clone(), covers)),
        }
    }

    /// How many parts were flushed.
    pub(crate) fn parts(&self) -> usize {
        self.parts.len()
    }

    /// How many events the last flush of these blocks covers.
    pub(crate) fn covers(&self, blocks: &Range<u64>) -> usize {
        self.parts.iter().find(|(part, _)| part == blocks).map_or(0, |(_, covers)| *covers)
    }

    /// Whether event `index` of the log is durable.
    pub fn has(&self, index: usize, event: &Event) -> bool {
        let first = match event {
            Event::Write { block, .. } | Event::Discard { block, .. } => *block,
            Event::Flush { .. } => return true,
        };
        self.parts.iter().any(|(part, covers)| index < *covers && part.contains(&first))
    }

    /// All events before this one of the log of a device of `blocks` blocks are durable.
    pub fn prefix(&self, blocks: u64) -> usize {
        let (all, some): (Vec<_>, Vec<_>) = self.parts.iter().partition(|(part, _)| *part == (0..blocks));
        let flushed: u64 = some.iter().map(|(part, _)| part.end - part.start).sum();
        let least = |parts: &[&(Range<u64>, usize)]| parts.iter().map(|(_, covers)| *covers).min().unwrap_or(0);
        least(&all).max(if flushed == blocks { least(&some) } else { 0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{BLOCK_BYTES, Keep};

    fn byte(device: &dyn Device, block: u64) -> u8 {
        let mut buf = vec![0; BLOCK_BYTES];
        device.read(block, &mut buf).unwrap();
        buf[0]
    }

    #[test]
    fn a_part_is_a_device_of_its_own() {
        let whole = Arc::new(MemDevice::new(12));
        let parts = PartDevice::split(&whole, [4, 99]);
        assert_eq!(parts.iter().map(|p| p.blocks()).collect::<Vec<_>>(), [4, 8]);
        let two = vec![7; 2 * BLOCK_BYTES];
        parts[1].write(6, &two).unwrap();
        parts[0].write(2, &two).unwrap();
        assert!(parts[0].write(3, &two).is_err() && parts[1].write(7, &two).is_err());
        assert!(parts[0].discard(3, 2).is_err() && parts[0].read(4, &mut [0; BLOCK_BYTES]).is_err());
        assert_eq!((0..12).map(|b| byte(&*whole, b)).collect::<Vec<_>>(), [0, 0, 7, 7, 0, 0, 0, 0, 0, 0, 7, 7]);
        parts[1].discard(7, 1).unwrap();
        assert_eq!((byte(&*parts[1], 6), byte(&*parts[1], 7), byte(&*parts[0], 3)), (7, 0, 7));
    }

    #[test]
    fn a_flush_covers_its_own_part() {
        let log = Arc::new(RecordDevice::blank(8));
        let parts = PartDevice::split(&log, [4, 4]);
        let put = |part: usize, n: u8| parts[part].write(1, &[n; BLOCK_BYTES]).unwrap();
        put(0, 1); // event 0
        put(1, 2);
        parts[1].flush().unwrap(); // 2
        put(1, 3);
        put(0, 4);
        let found = |upto: usize, keep: Keep| {
            let image = log.crash_image(upto, &mut |_| keep);
            [byte(&image, 1), byte(&image, 5)]
        };
        assert_eq!((log.unflushed(2), log.unflushed(3), log.unflushed(5)), (vec![0, 1], vec![0], vec![0, 3, 4]));
        assert_eq!((found(3, Keep::None), found(3, Keep::Whole)), ([0, 2], [1, 2]));
        assert_eq!((found(5, Keep::None), found(5, Keep::Whole)), ([0, 2], [4, 3]));
        parts[0].flush().unwrap(); // 5
        assert_eq!((log.unflushed(6), found(6, Keep::None)), (vec![3], [4, 2]));
        parts[1].flush().unwrap(); // 6
        assert_eq!((log.unflushed(7), found(7, Keep::None)), (vec![], [4, 3]));
        put(0, 5);
        // of all parts
        log.flush().unwrap();
        assert_eq!((log.unflushed(9), found(9, Keep::None)), (vec![], [5, 3]));
        let flushed = Flushed::by(&log.log());
        assert_eq!((flushed.prefix(8), Flushed::by(&log.log()[..6]).prefix(8)), (8, 2));
    }
}
