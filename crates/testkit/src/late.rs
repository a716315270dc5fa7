//! One point of a log at which power may fail: what is durable by then, and the later writes, block by block.
//!
//! A crash leaves of every *varying* block (one that a later write touches) one of a few contents. A crash state is
//! therefore a short list of numbers, one per varying block, and two states are the same image exactly if their lists
//! are equal: torn writes of which the missing part was zeros, or writes overwritten by later ones, collapse.

use crate::states::{CrashState, Log};
use braidfs_device::{BLOCK_BYTES, BlockContent, Device, Event, Image, Keep, SECTOR_BYTES, TraceDevice};
use foldhash::fast::FixedState;
use foldhash::quality;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::BuildHasher;

/// 128 bits that tell images apart.
pub type ImageHash = u128;

/// What a block adds to the hash of an image: nothing where it is as in the beginning.
fn hash_of(initial: &Image, block: u64, bytes: &[u8]) -> ImageHash {
    let mut then = [0; BLOCK_BYTES];
    read(initial, block, &mut then);
    if bytes == then {
        return 0;
    }
    let half = |seed: u64| quality::FixedState::with_seed(seed).hash_one((block, bytes));
    u128::from(half(1)) << 64 | u128::from(half(2))
}

/// The durable content as the log goes on, and its hash. Only forwards.
#[derive(Debug)]
pub struct Durable {
    /// The content as it is now.
    pub image: Image,
    /// Events that are all in it, and those behind them that are in it, too: of other devices of the volume than the first
    /// that is not.
    events: usize,
    beyond: BTreeSet<usize>,
    /// Blocks that differ from the initial image.
    hashes: HashMap<u64, ImageHash, FixedState>,
    hash: ImageHash,
}

impl Durable {
    /// At the start.
    pub fn new(log: &Log) -> Self {
        let (hashes, hash) = Default::default();
        Self { image: log.initial.clone(), events: 0, beyond: BTreeSet::new(), hashes, hash }
    }

    /// Makes durable what is so after the first `upto` events of the log.
    pub fn advance(&mut self, log: &Log, upto: usize) {
        let (flushed, all) = log.durable(upto);
        let mut touched = BTreeSet::new();
        for (i, event) in (self.events..).zip(&log.events[self.events.min(upto)..upto]) {
            if flushed.has(i, event) && self.beyond.insert(i) {
                event.apply(&mut self.image, Keep::Whole);
                touched.extend(blocks_of(event));
            }
        }
        self.events = self.events.max(all);
        self.beyond = self.beyond.split_off(&self.events);
        let mut now = [0; BLOCK_BYTES];
        for block in touched {
            read(&self.image, block, &mut now);
            let new = hash_of(&log.initial, block, &now);
            self.hash ^= new ^ self.hashes.insert(block, new).unwrap_or(0);
        }
    }
}

fn blocks_of(event: &Event) -> std::ops::Range<u64> {
    match event {
        Event::Write { block, data, .. } => *block..block + (data.len() / BLOCK_BYTES) as u64,
        Event::Discard { block, blocks, .. } => *block..block + blocks,
        Event::Flush { .. } => 0..0,
    }
}

fn read(image: &Image, block: u64, buf: &mut [u8]) {
    // the block was written through this device, so it lies within
    if let Err(e) = image.read(block, buf) {
        unreachable!("block {block}: {e}");
    }
}

/// One of the contents that a varying block may have. The first of each block is what is durable.
#[derive(Debug)]
struct Content {
    data: BlockContent,
    /// Added to the image's hash; tells contents of one block apart.
    hash: ImageHash,
}

#[derive(Debug)]
struct Varying {
    block: u64,
    /// The writes that touch it, in order, and which of their blocks it is.
    by: Vec<(usize, usize)>,
    contents: Vec<Content>,
    /// What the durable content adds to the hash of its image, once that was asked for.
    durable: Option<ImageHash>,
    /// Content where all of the last write is left, whatever is left of those before it.
    whole: Option<u32>,
    /// Content by the sectors that each write left.
    known: HashMap<Box<[u8]>, u32, FixedState>,
}

/// See the module.
#[derive(Debug)]
pub struct Late {
    initial: Image,
    durable: Image,
    hash: ImageHash,
    writes: Vec<Event>,
    blocks: Vec<Varying>,
    /// Number of each varying block.
    number: HashMap<u64, u32, FixedState>,
}

impl Late {
    /// The point after the first `upto` events. `durable` is advanced to it: points must be visited in order.
    pub fn new(log: &Log, upto: usize, durable: &mut Durable) -> Self {
        durable.advance(log, upto);
        let writes: Vec<Event> = log.unflushed(upto).cloned().collect();
        let mut by: BTreeMap<u64, Vec<(usize, usize)>> = BTreeMap::new();
        for (w, event) in writes.iter().enumerate() {
            for (i, block) in blocks_of(event).enumerate() {
                by.entry(block).or_default().push((w, i));
            }
        }
        let blocks: Vec<Varying> = by
            .into_iter()
            .map(|(block, by)| {
                let contents = vec![Content { data: BlockContent::AsImage, hash: 0 }];
                Varying { block, by, contents, durable: None, whole: None, known: HashMap::default() }
            })
            .collect();
        let number = (0..).zip(&blocks).map(|(i, v)| (v.block, i)).collect();
        Self {
            initial: log.initial.clone(),
            durable: durable.image.clone(),
            hash: durable.hash,
            writes,
            blocks,
            number,
        }
    }

    /// A single crash: its point, and the state that it leaves.
    ///
    /// # Errors
    /// Where the log is shorter.
    pub fn of(log: &Log, crash: &CrashState) -> Result<(Self, Vec<u32>), String> {
        if crash.upto > log.events.len() {
            return Err(format!("the log has {} events", log.events.len()));
        }
        let mut late = Self::new(log, crash.upto, &mut Durable::new(log));
        let mut keep = crash.keep.clone();
        keep.resize(late.writes.len(), Keep::None);
        let mut state = Vec::new();
        late.state(&keep, &mut state);
        Ok((late, state))
    }

    /// Sectors of each unflushed write.
    pub fn sectors(&self) -> Vec<usize> {
        let blocks = |e: &Event| blocks_of(e).count() * BLOCK_BYTES / SECTOR_BYTES;
        self.writes.iter().map(blocks).collect()
    }

    /// The state that `keep` makes: the content of each varying block, in `out`; and the hash of the image.
    pub fn state(&mut self, keep: &[Keep], out: &mut Vec<u32>) -> ImageHash {
        out.clear();
        let (mut hash, mut sectors) = (self.hash, Vec::new());
        for v in &mut self.blocks {
            sectors.clear();
            sectors.extend(v.by.iter().map(|(w, i)| keep[*w].sectors(*i)));
            let images = (&self.initial, &self.durable);
            let number = match v.number(&sectors) {
                Some(n) => n,
                None => {
                    let n = v.make(images, &self.writes, &sectors);
                    match *sectors {
                        [.., u8::MAX] => v.whole = Some(n),
                        _ => _ = v.known.insert(sectors.clone().into(), n),
                    }
                    n
                }
            };
            hash ^= v.contents[number as usize].hash;
            out.push(number);
        }
        hash
    }

    fn table<'a>(&'a self, state: &'a [u32]) -> impl Iterator<Item = (u64, BlockContent)> + 'a {
        self.blocks.iter().zip(state).map(|(v, n)| (v.block, v.contents[*n as usize].data.clone()))
    }

    /// A device with this state.
    pub fn device(&self, state: &[u32]) -> TraceDevice {
        TraceDevice::new(self.durable.clone(), self.table(state))
    }

    /// The image of a state.
    pub fn image(&self, state: &[u32]) -> Image {
        let mut image = self.durable.clone();
        for (block, content) in self.table(state) {
            image.put(block, &content);
        }
        image
    }

    /// Which varying blocks a device of this point has read, in order.
    pub fn reads(&self, device: &TraceDevice) -> Vec<u32> {
        device.reads().iter().filter_map(|b| self.number.get(b).copied()).collect()
    }
}

impl Varying {
    /// The content that these sectors of the writes leave, where it was made before.
    fn number(&self, sectors: &[u8]) -> Option<u32> {
        match sectors {
            [.., u8::MAX] => self.whole,
            _ if sectors.iter().all(|s| *s == 0) => Some(0),
            _ => self.known.get(sectors).copied(),
        }
    }

    /// The content that these sectors of the writes leave: one that is there already, or a new one. `images`: the initial one, and
    /// what is durable.
    fn make(&mut self, images: (&Image, &Image), writes: &[Event], sectors: &[u8]) -> u32 {
        let (initial, durable) = images;
        let mut bytes = [0; BLOCK_BYTES];
        read(durable, self.block, &mut bytes);
        let before = *self.durable.get_or_insert_with(|| hash_of(initial, self.block, &bytes));
        let mut data = BlockContent::AsImage;
        for ((w, i), sectors) in self.by.iter().zip(sectors) {
            let from = match &writes[*w] {
                Event::Write { data, .. } => Some((data, i * BLOCK_BYTES)),
                _ => None,
            };
            for s in (0..BLOCK_BYTES / SECTOR_BYTES).filter(|s| sectors >> s & 1 == 1) {
                let at = s * SECTOR_BYTES;
                let to = &mut bytes[at..at + SECTOR_BYTES];
                match from {
                    Some((data, base)) => to.copy_from_slice(&data[base + at..base + at + SECTOR_BYTES]),
                    None => to.fill(initial.discarded()),
                }
            }
            data = match (*sectors, from) {
                (0, _) => data,
                (u8::MAX, Some((d, base))) => BlockContent::Bytes(d.clone(), base),
                (u8::MAX, None) => BlockContent::Discarded,
                _ => BlockContent::Bytes(bytes.to_vec().into(), 0),
            };
        }
        let hash = hash_of(initial, self.block, &bytes) ^ before;
        if let Some(same) = self.contents.iter().position(|c| c.hash == hash) {
            return same as u32;
        }
        self.contents.push(Content { data, hash });
        (self.contents.len() - 1) as u32
    }
}

/// The device of a state, as an image that others can mount too.
pub fn same_device(a: &Image, b: &dyn Device) -> bool {
    let (mut x, mut y) = (vec![0; BLOCK_BYTES], vec![0; BLOCK_BYTES]);
    (0..a.blocks()).all(|block| {
        read(a, block, &mut x);
        b.read(block, &mut y).is_ok() && x == y
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use braidfs_device::RecordDevice;

    #[test]
    fn states_are_the_images_that_the_log_gives() {
        let d = RecordDevice::soiled(64);
        let page = |n: u8| (0..BLOCK_BYTES).map(|i| if i < 2048 { n } else { 0 }).collect::<Vec<u8>>();
        d.write(1, &page(1)).unwrap();
        d.flush().unwrap();
        d.write(1, &page(2)).unwrap();
        d.write(2, &[page(3), page(4)].concat()).unwrap();
        d.write(2, &page(5)).unwrap();
        let log = Log::of(&d);
        assert_eq!(log.points(0, [3]), [1, 2, 3, 5]);
        let mut durable = Durable::new(&log);
        let mut late = Late::new(&log, 5, &mut durable);
        assert_eq!(late.sectors(), [8, 16, 8]);
        let keeps = [Keep::None, Keep::Whole, Keep::Torn(3), Keep::Torn(4), Keep::Torn(11), Keep::TornMask(0b101)];
        let mut seen: BTreeMap<Vec<u32>, ImageHash> = BTreeMap::new();
        for a in keeps {
            for b in keeps {
                for c in keeps {
                    let keep = [a, b, c];
                    let mut state = Vec::new();
                    let hash = late.state(&keep, &mut state);
                    let want = d.crash_image(5, &mut |i| keep[i]).snapshot();
                    let crash = CrashState { upto: 5, keep: keep.to_vec() };
                    assert!(same_device(&log.image(&crash), &late.device(&state)), "{keep:?}");
                    assert!(same_device(&want, &late.device(&state)), "{keep:?}");
                    assert!(same_device(&late.image(&state), &late.device(&state)), "{keep:?}");
                    assert_eq!(*seen.entry(state).or_insert(hash), hash);
                }
            }
        }
        // the first half of a page is all that is written: torn behind it is whole
        let of = |late: &mut Late, keep: &[Keep]| {
            let mut state = Vec::new();
            (late.state(keep, &mut state), state)
        };
        let (none, whole) = ([Keep::None; 3], [Keep::Whole, Keep::None, Keep::None]);
        assert_eq!(of(&mut late, &whole), of(&mut late, &[Keep::Torn(4), Keep::None, Keep::None]));
        assert_ne!(of(&mut late, &whole), of(&mut late, &none));
        let distinct: BTreeSet<ImageHash> = seen.values().copied().collect();
        assert_eq!(distinct.len(), seen.len());
        // the same image at two points has the same hash
        let nothing = of(&mut Late::new(&log, 0, &mut Durable::new(&log)), &[]).0;
        let mut early = Late::new(&log, 1, &mut Durable::new(&log));
        let mut after = Late::new(&log, 2, &mut Durable::new(&log));
        assert_eq!(of(&mut early, &[Keep::Whole]).0, of(&mut after, &[]).0);
        assert_ne!(of(&mut early, &[Keep::None]).0, of(&mut after, &[]).0);
        assert_eq!(of(&mut early, &[Keep::None]).0, nothing);
    }
}
