//! Ways to damage a block.

use super::target::Target;
use braidfs_device::{BLOCK_BYTES, Image};

/// What is done to a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Damage {
    /// One bit is flipped.
    Flip,
    /// All bytes are zero.
    Zero,
    /// All bytes are noise.
    Noise,
    /// The block is as it was at an earlier time: a write that never arrived.
    Older,
    /// The block and the next one of its kind change places: misdirected writes.
    Swap,
}

impl Damage {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Flip, Self::Zero, Self::Noise, Self::Older, Self::Swap];
}

fn get(image: &Image, block: u64) -> Vec<u8> {
    let mut b = vec![0; BLOCK_BYTES];
    // blocks of an image in memory can be read
    let _ = image.read(block, &mut b);
    b
}

/// Damages `target` in `image`; false where this changes nothing (it has no past, no twin, or is blank already).
pub fn inflict(
    image: &mut Image,
    damage: Damage,
    target: &Target,
    all: &[Target],
    past: &[Image],
    rng: &mut fastrand::Rng,
) -> bool {
    let old = get(image, target.block);
    let mut new = old.clone();
    let mut other = None;
    match damage {
        Damage::Flip => new[rng.usize(..BLOCK_BYTES)] ^= 1 << rng.u8(..8),
        Damage::Zero => new.fill(0),
        Damage::Noise => rng.fill(&mut new),
        Damage::Older => {
            let Some(was) = past.iter().map(|i| get(i, target.block)).find(|b| *b != old) else { return false };
            new = was;
        }
        Damage::Swap => {
            let same: Vec<&Target> = all.iter().filter(|t| t.kind == target.kind).collect();
            let Some(at) = same.iter().position(|t| t.block == target.block) else { return false };
            let twin = same[(at + 1 + rng.usize(..same.len().max(2) - 1)) % same.len()].block;
            new = get(image, twin);
            other = Some((twin, old.clone()));
        }
    }
    if new == old {
        return false;
    }
    let writes = std::iter::once((target.block, new)).chain(other);
    // within the image, whole blocks
    writes.for_each(|(block, bytes)| image.write(block, &bytes).unwrap_or_default());
    true
}
