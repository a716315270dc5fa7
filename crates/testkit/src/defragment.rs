//! A crash at every write and every flush while a file that was written in pieces is made whole.
//!
//! Its content is the same in every state, or has what was written and synced meanwhile; fsck finds nothing, no block is lost, and
//! the same call again makes it whole.

use crate::resize::keeps;
use crate::small::{BLOCK, MIB, ROOT, file};
use crate::states::{Budget, CrashState, Log};
use crate::walk::fsck;
use braidfs::{DomainId, MkfsOptions, MountOptions, OpenFile, Overwrite, Result, Volume, mkfs};
use braidfs_device::{Device, MemDevice, RecordDevice};
use std::sync::Arc;

/// Blocks of the file.
const BLOCKS: u64 = 400;
/// What is synced while it is made whole: this block.
const LATER: u64 = 3;

/// Nothing goes on by itself, and all that is synced goes elsewhere.
pub fn options() -> MountOptions {
    MountOptions {
        cache_bytes: 32 * MIB,
        background: false,
        serial: true,
        overwrite: Overwrite::Log,
        ..MountOptions::default()
    }
}

/// A block of the file, as of the `version`th write of it.
pub fn block(lblk: u64, version: u64) -> Vec<u8> {
    (lblk << 32 | version).to_le_bytes().repeat(BLOCK as usize / 8)
}

/// Writes a file of so many blocks, then every block again in a scattered order with an fsync every few: it is in pieces.
///
/// # Errors
/// Of any operation.
pub fn in_pieces(v: &Volume, f: &OpenFile, blocks: u64) -> Result<()> {
    for b in 0..blocks {
        v.write(f, b * BLOCK, &block(b, 0))?;
    }
    v.sync()?;
    for i in 0..blocks {
        // a multiplier that shares no factor with the number of blocks
        let b = i * 7919 % blocks;
        v.write(f, b * BLOCK, &block(b, 1))?;
        if i % 20 == 19 {
            v.fsync(f.ino(), false)?;
        }
    }
    v.sync()
}

/// All of a file, from its beginning to its end, made whole; blocks moved.
///
/// # Errors
/// As [`Volume::defragment`].
pub fn whole(v: &Volume, f: &OpenFile) -> Result<u64> {
    let (mut from, mut moved) = (Some(0), 0);
    while let Some(at) = from {
        let done = v.defragment(f.ino(), at)?;
        (from, moved) = (done.next, moved + done.moved);
    }
    Ok(moved)
}

fn look(image: MemDevice, later: &[u64], free: u64) -> std::result::Result<bool, String> {
    let devices: [Arc<dyn Device>; 1] = [Arc::new(image)];
    let text = |e: braidfs::Error| e.to_string();
    // fsck comes after the mount: before it names tables of which a checkpoint was writing the other copy
    let v = Volume::mount(devices.to_vec(), options()).map_err(text)?;
    let f = v.open(v.lookup(ROOT, b"f").map_err(text)?.ino).map_err(text)?;
    let holds = || {
        let mut got = vec![0; BLOCK as usize];
        for b in 0..BLOCKS {
            v.read(&f, b * BLOCK, &mut got).map_err(text)?;
            let versions: &[u64] = if b == LATER { later } else { &[1] };
            if !versions.iter().any(|version| got == block(b, *version)) {
                return Err(format!("block {b} is another"));
            }
        }
        Ok(())
    };
    holds()?;
    let was_whole = v.pieces(f.ino()).map_err(text)?.pieces < BLOCKS / 8;
    whole(&v, &f).map_err(|e| format!("again: {e}"))?;
    holds()?;
    let after = v.pieces(f.ino()).map_err(text)?;
    if after.pieces > BLOCKS / 64 {
        return Err(format!("{after:?} after the second attempt"));
    }
    v.sync().map_err(text)?;
    // a node block or two are packed in another way
    let now = v.statfs().free;
    if now + 8 < free {
        return Err(format!("{now} blocks free, {free} before"));
    }
    drop(f);
    v.unmount().map_err(text)?;
    fsck(&devices).map_err(|e| format!("afterwards: {e}"))?;
    Ok(was_whole)
}

/// Crashes that at every point; how many states there were, and in how many it was whole.
///
/// # Errors
/// The first state that is none of those that may be.
pub fn every_crash(data_checksums: bool) -> std::result::Result<(usize, usize), String> {
    let text = |e: braidfs::Error| e.to_string();
    let small = Arc::new(MemDevice::soiled(48 * MIB / BLOCK));
    let device: Arc<dyn Device> = small.clone();
    let how = MkfsOptions { domains: Some(1), group_bytes: Some(16 * MIB), data_checksums, ..MkfsOptions::default() };
    mkfs::format(std::slice::from_ref(&device), &how).map_err(text)?;
    let v = Volume::mount(vec![device], options()).map_err(text)?;
    let f = file(&v, ROOT, "f");
    in_pieces(&v, &f, BLOCKS).map_err(text)?;
    let free = v.statfs().free;
    drop(f);
    v.unmount().map_err(text)?;
    let log = Arc::new(RecordDevice::new(small.snapshot()));
    let v = Volume::mount(vec![Arc::clone(&log) as Arc<dyn Device>], options()).map_err(text)?;
    let f = v.open(v.lookup(ROOT, b"f").map_err(text)?.ino).map_err(text)?;
    let begin = log.log_len();
    whole(&v, &f).map_err(text)?;
    let moved = log.log_len();
    v.write(&f, LATER * BLOCK, &block(LATER, 2)).map_err(text)?;
    v.fsync(f.ino(), false).map_err(text)?;
    let synced = log.log_len();
    v.commit_domain(DomainId(0), true).map_err(text)?;
    v.crash();
    drop(f);
    let record = Log::of(&log);
    let few = Budget { subsets: 3, samples: 5 };
    let mut rng = fastrand::Rng::with_seed(11);
    let (mut states, mut were_whole) = (0, 0);
    for upto in record.points(begin, [begin, moved, synced]) {
        let later: &[u64] = if upto >= synced { &[2] } else { &[1, 2] };
        for keep in keeps(&record, upto, &few, &mut rng) {
            let state = CrashState { upto, keep };
            let image = MemDevice::from_image(record.image(&state));
            let is = look(image, later, free).map_err(|e| format!("{state}: {e}"))?;
            if upto >= moved && !is {
                return Err(format!("{state}: in pieces, after the call returned"));
            }
            states += 1;
            were_whole += usize::from(is);
        }
    }
    Ok((states, were_whole))
}
