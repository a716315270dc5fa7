//! Writing pairs of blocks, never both copies of one at a time.
//!
//! A device that loses power tears what it has not flushed. With a flush between the copies one of them holds, the old one or
//! the new; without, a repair could lose what the finding that it mends had left.

use crate::error::Result;
use crate::pair::{PairState, both};
use braidfs_format::BlockAddr;
use braidfs_store::Store;

/// Where the first copy of a pair lies.
#[derive(Debug, Clone, Copy)]
pub enum Place {
    /// In the group space.
    Group(BlockAddr),
    /// On the first device: a pair of the volume.
    Volume(u64),
}

impl Place {
    fn write(self, store: &Store, copy: usize, block: &[u8]) -> Result<()> {
        match self {
            Self::Group(addr) => store.write(BlockAddr(addr.0 + copy as u64), block)?,
            Self::Volume(at) => store.device(0).write(at + copy as u64, block)?,
        }
        Ok(())
    }
}

/// Pairs of which one copy is written, and the other one is to be.
pub struct Pairs<'a> {
    store: &'a Store,
    second: Vec<(Place, usize, Vec<u8>)>,
}

impl<'a> Pairs<'a> {
    /// None yet.
    pub fn new(store: &'a Store) -> Self {
        Self { store, second: Vec::new() }
    }

    pub fn store(&self) -> &'a Store {
        self.store
    }

    /// Writes the copy of a pair that does not count. `state` is what the pair is now; `encode` makes the block of a copy with a
    /// `seq`; `floor` is the lowest `seq`.
    ///
    /// # Errors
    /// Of the device.
    pub fn write(
        &mut self,
        place: Place,
        state: &PairState,
        floor: u64,
        encode: &dyn Fn(usize, u64) -> Vec<u8>,
    ) -> Result<()> {
        let ([first, second], seq) = both(state, floor);
        place.write(self.store, first, &encode(first, seq))?;
        self.second.push((place, second, encode(second, seq)));
        Ok(())
    }

    /// Writes the other copies. What was written, also in front of this, is on the device afterwards.
    ///
    /// # Errors
    /// Of the device.
    pub fn settle(&mut self) -> Result<()> {
        if self.second.is_empty() {
            return Ok(());
        }
        self.store.flush()?;
        for (place, copy, block) in self.second.drain(..) {
            place.write(self.store, copy, &block)?;
        }
        Ok(self.store.flush()?)
    }
}
