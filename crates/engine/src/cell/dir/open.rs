//! Changes of names by those who have a directory locked for reading: of one bucket, under its lock.

use super::buckets::Content;
use super::{DirIndex, HASH_PROBES, home_position, is_in_one};
use crate::braid::vacated::Lately;
use crate::planted::{Bug, planted};
use braidfs_format::dentry::{BUCKET_BYTES, Dentry, ENTRY_FIXED_BYTES};
use braidfs_sync::BiasedWriteGuard;

/// The bucket that alone can hold some name, locked.
#[derive(Debug)]
pub struct OpenBucket<'a> {
    content: BiasedWriteGuard<'a, Content>,
    first: u64,
    /// Where the name stands if nothing is in its way.
    home: u64,
}

/// The free position of a name in a bucket, as long as that is locked.
#[derive(Debug)]
pub struct Room(u64);

/// What a change has made of a directory's counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Changed {
    /// Entries more, or less.
    pub entries: i64,
    /// Bytes of memory.
    pub memory: i64,
    /// First position of the bucket, where this is the first change since it was written.
    pub first: Option<u64>,
}

impl DirIndex {
    /// The bucket for changes of a name with `hash`, by who has the directory locked for reading. `None` where the
    /// directory is not shared, and where such a change may be one of other buckets, or of which there are: of a directory in
    /// its inode record; of a name that may stand in
    /// either of two buckets; of a bucket that is not in memory.
    pub fn open(&self, hash: u64) -> Option<OpenBucket<'_>> {
        let home = home_position(hash);
        if !self.shared || self.inline {
            return None;
        }
        let (first, bucket) = self.buckets.floor(home)?;
        // seldom does a bucket begin where one could
        if !is_in_one(home) && self.buckets.floor(home + HASH_PROBES)?.0 != first {
            return None;
        }
        let content = bucket.write();
        content.entries.as_ref()?.claim(home);
        Some(OpenBucket { content, first, home })
    }
}

impl OpenBucket<'_> {
    fn place(&self, name: &[u8]) -> Option<usize> {
        self.content.entries.as_ref()?.find(self.home..self.home + HASH_PROBES + 1, name)
    }

    /// The entry of the name.
    pub fn find(&self, name: &[u8]) -> Option<&Dentry> {
        self.content.entries.as_ref()?.get(self.place(name)?)
    }

    /// Whether an entry for this name makes the bucket split.
    pub fn is_full(&self, name: &[u8]) -> bool {
        self.content.bytes as usize + ENTRY_FIXED_BYTES + name.len() > BUCKET_BYTES
    }

    /// Where an entry for this name, which is not there, has room. `None` where it has none without a split.
    pub fn room(&self, name: &[u8]) -> Option<Room> {
        if self.is_full(name) {
            return None;
        }
        let pos = self.content.entries.as_ref()?.first_free(self.home, self.home + HASH_PROBES);
        (pos <= self.home + HASH_PROBES).then_some(Room(pos))
    }

    /// Adds an entry for a name that is not there, where it has room.
    pub fn insert(&mut self, Room(pos): Room, mut d: Dentry) -> Changed {
        let Content { entries, bytes, .. } = &mut *self.content;
        d.hash = pos;
        let (size, mut memory) = (d.encoded_bytes() as u16, 0);
        // `open` gives none that is not loaded
        debug_assert!((*bytes + size) as usize <= BUCKET_BYTES && entries.is_some(), "{bytes} and {size}");
        if let Some(entries) = entries.as_mut() {
            // what is shared has a table of one size
            memory = entries.share(true).unwrap_or(0) + entries.memory_of(&d) as i64;
            entries.insert(d);
            *bytes += size;
        }
        Changed { entries: 1, memory, first: self.mark() }
    }

    /// Whether the entry of a name that is there can be taken out: the bucket would go with its last one.
    pub fn can_remove(&self, name: &[u8]) -> bool {
        usize::from(self.content.bytes) > ENTRY_FIXED_BYTES + name.len()
    }

    /// Takes the entry of the name out, where [`Self::can_remove`].
    pub fn remove(&mut self, name: &[u8]) -> Option<Changed> {
        let mut place = self.place(name)?;
        let table = self.content.entries.as_mut()?.share(true);
        if table.is_some() {
            place = self.place(name)?;
        }
        let entries = self.content.entries.as_mut()?;
        let d = entries.remove(place)?;
        let memory = table.unwrap_or(0) - entries.memory_of(&d) as i64;
        self.content.bytes -= d.encoded_bytes() as u16;
        Some(Changed { entries: -1, memory, first: self.mark() })
    }

    /// The bucket is to be written.
    fn mark(&mut self) -> Option<u64> {
        if planted(Bug::BucketLeftOut) {
            return None;
        }
        (!std::mem::replace(&mut self.content.dirty, true)).then_some(self.first)
    }

    /// What it knows of names of it that were left lately.
    pub fn left(&mut self) -> &mut Lately {
        &mut self.content.left
    }

    /// When names of it were taken or left last, unless the directory knows a later time.
    pub fn name_time(&mut self) -> &mut u64 {
        &mut self.content.name_time
    }
}
