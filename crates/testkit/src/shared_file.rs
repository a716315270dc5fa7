//! A file that several threads overwrite: each write puts a stamp of its own on all words of its pages.

use braidfs::{Cred, FileKind, InodeNo, NewNode, OpenFile, Result, Volume};

/// Bytes of a page.
pub const PAGE: usize = 4096;
/// Pages that all write, always all of them.
pub const COMMON: usize = 3;
/// That write it.
pub const THREADS: usize = 3;
/// The common pages, and one of each thread.
pub const PAGES: usize = COMMON + THREADS;

/// Content that says which write it is of.
pub fn stamped(stamp: u64, pages: usize) -> Vec<u8> {
    stamp.to_le_bytes().repeat(pages * PAGE / 8)
}

/// The stamps of some pages, or of the words of them, where they are not the same.
pub fn stamps(bytes: &[u8]) -> Vec<u64> {
    let mut all: Vec<u64> = bytes.as_chunks::<8>().0.iter().map(|w| u64::from_le_bytes(*w)).collect();
    all.dedup();
    all
}

/// Makes the file, of pages with the stamp 0, durably.
///
/// # Errors
/// Of any operation.
pub fn create(v: &Volume) -> Result<InodeNo> {
    let file = NewNode { kind: FileKind::File, mode: 0o644, umask: 0, rdev: 0, target: b"" };
    let ino = v.create(InodeNo::ROOT, b"f", &file, &Cred::root())?.ino;
    v.write(&v.open(ino)?, 0, &stamped(0, PAGES))?;
    v.sync()?;
    Ok(ino)
}

/// The common pages, as one read finds them.
///
/// # Errors
/// Of the read.
pub fn common(v: &Volume, f: &OpenFile) -> Result<Vec<u64>> {
    let mut buf = vec![0; COMMON * PAGE];
    v.read(f, 0, &mut buf)?;
    Ok(stamps(&buf))
}
