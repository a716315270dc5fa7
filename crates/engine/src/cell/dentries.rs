//! The dentry cache: names looked up lately.
//!
//! (directory, name) → inode, for paths to be walked without a look at the directories.
//!
//! A table of fixed size that readers ask without writing to memory. It knows nothing that the directories do not know,
//! and forgets at will: an entry is put in while the name's bucket of the directory is locked (for reading at least; who has
//! the directory locked for writing has all buckets) and taken out while that is locked for writing, in one step with the directory's own index. So what is found here stood in the directory at
//! some time of the look-up, as if its lock had been taken. Directories are told apart by number and generation: what
//! is known of a removed one means nothing for the next of its number.
//!
//! A bucket of four entries, one in each of its cache lines, has a sequence number, odd while one of them changes (a sequence
//! lock). Beside that number stands a byte of each entry's hash, so that a look-up reads one entry, if any. All words are
//! atomics: a reader that meets a change reads nonsense, sees that the number moved, and knows nothing.
//!
//! Of a long name ([`NAME_BYTES`]) a hash stands for the bytes: whoever finds one looks whether the inode has the name
//! ([`Key::is_hashed`]).
//!
//! Not promised: that what was put in is found again.

use super::untouched::Words;
use crate::types::{FileKind, InodeNo, InodeRef};
use braidfs_format::name::words;
use std::hash::{BuildHasher, Hasher};
use std::sync::atomic::{
    AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
    fence,
};

/// Longest name that is kept as it is.
pub const NAME_BYTES: usize = 31;
/// Length that says that a hash stands for the name.
const HASHED: u8 = 255;
/// Entries of a bucket.
const WAYS: usize = 4;
/// A cache line: in the first of a bucket the sequence number and tags, elsewhere nothing; then an entry.
const LINE: usize = 8;
/// A directory's number, the inode's with its kind, both generations, and the name with its length.
const ENTRY: usize = 7;
const WORDS: usize = WAYS * LINE;
/// In the first word of a bucket: the sequence number; above it a byte for each entry.
const SEQ: u64 = 0xffff_ffff;
/// Tag of an entry that is free.
const EMPTY: u8 = 0;
/// Where the kind stands beside the inode's number.
const KIND: u32 = 56;
/// Low bits of a name's last byte that say which of some neighbouring buckets it is in.
const NEAR: u64 = 7;
/// A directory and a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Key {
    dir: u64,
    generation: u32,
    name: [u64; 4],
}

impl Key {
    /// The key of any name.
    pub fn of(dir: InodeNo, generation: u32, name: &[u8]) -> Self {
        if name.len() > NAME_BYTES {
            return Self::hashed(dir, generation, name);
        }
        // the length, then the name
        let [a, b, c, d] = words(name);
        let name = [name.len() as u64 | a << 8, a >> 56 | b << 8, b >> 56 | c << 8, c >> 56 | d << 8];
        Self { dir: dir.0, generation, name }
    }
    #[cold]
    fn hashed(dir: InodeNo, generation: u32, name: &[u8]) -> Self {
        use foldhash::fast::FixedState;
        let word = |seed: u64| FixedState::with_seed(seed).hash_one(name);
        Self { dir: dir.0, generation, name: [word(1) & !0xff | u64::from(HASHED), word(2), word(3), word(4)] }
    }
    /// A hash stands for the name: what it is found to name may be what another name names.
    #[inline]
    pub fn is_hashed(&self) -> bool {
        self.name[0] as u8 == HASHED
    }
}

/// What a name names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Target {
    /// Number of the inode.
    pub node: InodeNo,
    /// Generation of the number.
    pub generation: u32,
    /// Type of the inode.
    pub kind: FileKind,
}

impl Target {
    /// Number and generation.
    pub fn inode(self) -> InodeRef {
        InodeRef { ino: self.node, generation: self.generation }
    }
}

/// See the module.
pub struct DentryCache {
    words: Words,
    mask: usize,
    hasher: foldhash::fast::RandomState,
}

impl std::fmt::Debug for DentryCache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DentryCache").field("buckets", &(self.mask + 1)).finish_non_exhaustive()
    }
}

impl DentryCache {
    /// Of about so many bytes, which are taken as they are used.
    pub fn new(bytes: u64) -> Self {
        let bucket = size_of::<[AtomicU64; WORDS]>();
        let buckets = 1usize << (bytes / bucket as u64).max(1).ilog2();
        // they begin at a cache line, so that each bucket does; without memory nothing is kept
        let words = Words::new(buckets * WORDS);
        Self { words, mask: buckets - 1, hasher: foldhash::fast::RandomState::default() }
    }

    /// The bucket of a key, and the key's tag.
    #[inline]
    fn bucket(&self, k: &Key) -> Option<(&[AtomicU64; WORDS], u8)> {
        // names that differ in the last byte only, as numbered files do, lie side by side: the first brings the others
        let last = (k.name[0] & 0xff) as usize % (4 * 8);
        let (word, shift) = (last / 8, last % 8 * 8);
        let low = k.name[word] >> shift & NEAR;
        let mut h = self.hasher.build_hasher();
        h.write_u64(k.dir);
        for (i, w) in k.name.into_iter().enumerate() {
            h.write_u64(if i == word { w & !(NEAR << shift) } else { w });
        }
        let hash = h.finish();
        let near = (hash >> 32).wrapping_add(low) & NEAR;
        let at = ((hash & !NEAR | near) as usize & self.mask) * WORDS;
        // the bits that tell neighbours apart do not tell those in one bucket apart
        let tag = ((hash >> 48) as u8).max(EMPTY + 1);
        Some((self.words.get(at..at + WORDS)?.try_into().ok()?, tag))
    }

    /// What `k` names, where that is known.
    #[inline]
    pub fn get(&self, k: &Key) -> Option<Target> {
        let (b, tag) = self.bucket(k)?;
        known_target(b, tag, k)
    }

    /// [`Self::get`] by who will [`Self::forget`] it if it is there: its line is asked for to be written. Else it would come to be
    /// read, and be taken from all others again for the change.
    #[inline]
    pub fn get_to_forget(&self, k: &Key) -> Option<Target> {
        let (b, tag) = self.bucket(k)?;
        // never the case: the word is as it was
        let _ = b[0].compare_exchange(u64::MAX, u64::MAX, Relaxed, Relaxed);
        known_target(b, tag, k)
    }

    /// [`Self::put`] follows soon.
    #[inline]
    pub fn fetch(&self, k: &Key) {
        if let Some((b, _)) = self.bucket(k) {
            braidfs_sync::fetch::to_change(&b[0]);
        }
    }

    /// Notes what `k` names. The caller has the name's bucket locked.
    pub fn put(&self, k: &Key, t: Target) {
        let Some((b, tag)) = self.bucket(k) else { return };
        if t.node.0 >> KIND != 0 {
            return;
        }
        let mut lock = Lock::take(&b[0]);
        let way = known(b, lock.0, tag, k)
            .or_else(|| tagged(lock.0, EMPTY).next())
            // one after the other
            .unwrap_or((lock.0 / 2) as usize % WAYS);
        lock.tag(way, tag);
        let e = entry(b, way);
        e[0].store(k.dir, Relaxed);
        e[1].store(t.node.0 | u64::from(t.kind.d_type()) << KIND, Relaxed);
        e[2].store(u64::from(k.generation) | u64::from(t.generation) << 32, Relaxed);
        for (w, n) in e[3..].iter().zip(k.name) {
            w.store(n, Relaxed);
        }
        lock.release(&b[0]);
    }

    /// Forgets what `k` names. The caller has the name's bucket locked for writing. Nothing is written where it is not known.
    pub fn forget(&self, k: &Key) {
        let Some((b, tag)) = self.bucket(k) else { return };
        // nobody puts it in meanwhile, and its tag stands there until it is out
        if tagged(b[0].load(Relaxed), tag).next().is_none() {
            return;
        }
        let mut lock = Lock::take(&b[0]);
        if let Some(way) = known(b, lock.0, tag, k) {
            entry(b, way)[0].store(0, Relaxed);
            lock.tag(way, EMPTY);
        }
        lock.release(&b[0]);
    }
}

fn entry(b: &[AtomicU64; WORDS], way: usize) -> &[AtomicU64] {
    &b[way * LINE + 1..][..ENTRY]
}

/// The entries of a bucket whose first word is `seq` that have this tag.
#[inline]
fn tagged(seq: u64, tag: u8) -> impl Iterator<Item = usize> {
    (0..WAYS).filter(move |i| (seq >> (32 + 8 * i)) as u8 == tag)
}

/// The entry of `k` in its bucket, whose first word is `seq`.
#[inline]
fn known(b: &[AtomicU64; WORDS], seq: u64, tag: u8, k: &Key) -> Option<usize> {
    tagged(seq, tag).find(|&way| is(entry(b, way), k))
}

/// What `k` names, where its bucket knows that.
#[inline]
fn known_target(b: &[AtomicU64; WORDS], tag: u8, k: &Key) -> Option<Target> {
    let seq = b[0].load(Acquire);
    let e = entry(b, known(b, seq, tag, k)?);
    let (node, generations) = (e[1].load(Relaxed), e[2].load(Relaxed));
    fence(Acquire);
    if seq % 2 == 1 || b[0].load(Relaxed) != seq {
        return None;
    }
    let kind = kind_of((node >> KIND) as u8)?;
    Some(Target { node: InodeNo(node & ((1 << KIND) - 1)), generation: (generations >> 32) as u32, kind })
}

/// Whether an entry is that of `k`. Node 0 is none, so that an empty entry is nobody's.
#[inline]
fn is(e: &[AtomicU64], k: &Key) -> bool {
    e[0].load(Relaxed) == k.dir
        && e[2].load(Relaxed) as u32 == k.generation
        && e[3..].iter().zip(k.name).all(|(w, n)| w.load(Relaxed) == n)
}

fn kind_of(d_type: u8) -> Option<FileKind> {
    FileKind::from_mode(u32::from(d_type) << 12)
}

/// The writer's right to a bucket: the first word with the even sequence number that it found.
struct Lock(u64);

impl Lock {
    fn take(seq: &AtomicU64) -> Self {
        let mut spins = 0u32;
        // without a look at it first, for which the line would come once more
        while seq.fetch_or(1, Acquire) & 1 != 0 {
            while seq.load(Relaxed) & 1 != 0 {
                spins += 1;
                // held for a few stores; its holder may have lost its processor
                if spins.is_multiple_of(64) { std::thread::yield_now() } else { std::hint::spin_loop() }
            }
        }
        // no word below is seen before the odd number
        fence(Release);
        // nobody else writes it now
        Self(seq.load(Relaxed) - 1)
    }
    /// The entry `way` gets this tag.
    fn tag(&mut self, way: usize, tag: u8) {
        let at = 32 + 8 * way;
        self.0 = self.0 & !(0xff << at) | u64::from(tag) << at;
    }
    fn release(self, seq: &AtomicU64) {
        // the number begins again when it is used up, and does not run into the tags
        seq.store(self.0 & !SEQ | (self.0 + 2) & SEQ, Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    fn key(dir: u64, name: &str) -> Key {
        Key::of(InodeNo(dir), 7, name.as_bytes())
    }
    fn target(node: u64) -> Target {
        Target { node: InodeNo(node), generation: node as u32, kind: FileKind::File }
    }

    #[test]
    fn put_get_forget() {
        let c = DentryCache::new(1 << 16);
        assert_eq!(c.get(&key(1, "a")), None);
        for kind in [FileKind::File, FileKind::Dir, FileKind::Symlink, FileKind::Socket, FileKind::Block] {
            c.put(&key(1, "a"), Target { kind, ..target(5) });
            assert_eq!(c.get(&key(1, "a")), Some(Target { kind, ..target(5) }));
        }
        assert_eq!(c.get_to_forget(&key(1, "a")), c.get(&key(1, "a")));
        for other in [key(2, "a"), key(1, "b"), key(1, "a\0"), key(1, ""), Key::of(InodeNo(1), 8, b"a")] {
            assert_eq!((c.get(&other), c.get_to_forget(&other)), (None, None), "{other:?}");
        }
        c.put(&key(1, "a"), target(6));
        assert_eq!(c.get(&key(1, "a")), Some(target(6)));
        c.forget(&key(1, "a"));
        assert_eq!(c.get(&key(1, "a")), None);
        // of any length
        let long = |n: usize| Key::of(InodeNo(1), 7, &b"x".repeat(n));
        for n in [0, 1, NAME_BYTES, NAME_BYTES + 1, NAME_BYTES + 2, 255] {
            assert_eq!(long(n).is_hashed(), n > NAME_BYTES);
            assert_eq!(c.get(&long(n)), None);
            c.put(&long(n), target(100 + n as u64));
        }
        assert_eq!(c.get(&long(255)), Some(target(355)));
        assert_eq!(c.get(&long(NAME_BYTES + 1)), Some(target(132)));
    }

    #[test]
    fn a_full_bucket_forgets_the_oldest() {
        let c = DentryCache::new(0);
        assert_eq!(c.mask, 0);
        let names: Vec<String> = (0..9).map(|i| i.to_string()).collect();
        for (i, n) in names.iter().enumerate() {
            c.put(&key(1, n), target(10 + i as u64));
            let known: Vec<usize> = (0..9).filter(|k| c.get(&key(1, &names[*k])).is_some()).collect();
            assert_eq!(known.len(), (i + 1).min(WAYS), "{known:?}");
            assert!(known.contains(&i));
        }
        // whichever entry holds it
        names.iter().for_each(|n| c.forget(&key(1, n)));
        assert!(names.iter().all(|n| c.get(&key(1, n)).is_none()));
    }

    /// Readers beside writers of one bucket never see an entry that nobody put in.
    #[test]
    fn no_torn_entries() {
        let c = DentryCache::new(0);
        let stop = AtomicBool::new(false);
        let all: Vec<Key> = (1..=4).map(|d| key(d, &"abcdefghij".repeat(d as usize)[..9 * d as usize - 5])).collect();
        std::thread::scope(|s| {
            for w in 0..2u64 {
                let (c, all, stop) = (&c, &all, &stop);
                s.spawn(move || {
                    for i in 0..200_000u64 {
                        let k = &all[((i * 7 + w) % 4) as usize];
                        // generation and number belong together, and to the directory
                        let node = (i << 3 | k.dir) & 0xffff_ffff;
                        if i % 5 == 0 { c.forget(k) } else { c.put(k, target(node)) }
                    }
                    stop.store(true, Relaxed);
                });
            }
            let mut seen = 0;
            // on a busy machine the writers may be done before the first look; they leave some entries
            while !stop.load(Relaxed) || seen == 0 {
                for k in &all {
                    if let Some(t) = c.get(k) {
                        assert_eq!((t.node.0 as u32, t.node.0 & 7), (t.generation, k.dir));
                        assert_eq!(t.kind, FileKind::File);
                        seen += 1;
                    }
                }
            }
            assert!(seen > 0);
        });
    }
}
