//! Whole images, edited so that the damage gets past the checksums: fields of metadata blocks are changed and the blocks
//! sealed again. Then everything is done with the volume that a user would do.
//!
//! Input: a byte for the image, then edits of 5 or more bytes: block (2 bytes, counts through the metadata blocks), place in
//! it (2), how many bytes (1), the bytes.

use crate::Input;
use braidfs::device::{BLOCK_BYTES, Device, Image, MemDevice};
use braidfs::format::block::{BlockKind, checksum};
use braidfs_check::{FsckOptions, check};
use braidfs_testkit::damage::sample::{self, Sample};
use braidfs_testkit::damage::target::{Kind, Target, targets};
use braidfs_testkit::damage::trial::abuse;
use std::sync::{Arc, OnceLock};

/// The images and their metadata blocks.
pub fn bases() -> &'static [(Sample, Vec<Target>)] {
    static BASES: OnceLock<Vec<(Sample, Vec<Target>)>> = OnceLock::new();
    BASES.get_or_init(|| {
        let made = [sample::clean(false), sample::crashed()];
        made.into_iter()
            .map(|s| {
                let s = s.unwrap_or_else(|e| panic!("the sample volume: {e}"));
                let list = targets(&s.image).unwrap_or_else(|e| panic!("the sample volume: {e}"));
                (s, list)
            })
            .collect()
    })
}

/// Seals a metadata block again: its header says for which place.
fn reseal(block: &mut [u8]) {
    let crc = checksum(block);
    block[4..8].copy_from_slice(&crc.to_le_bytes());
}

/// The edited image.
fn edited(base: &Image, list: &[Target], mut input: Input<'_>) -> Image {
    let mut image = base.clone();
    let mut block = vec![0u8; BLOCK_BYTES];
    for _ in 0..16 {
        if input.is_empty() {
            break;
        }
        let t = &list[input.number(2) as usize % list.len()];
        if t.kind == Kind::Journal || image.read(t.block, &mut block).is_err() {
            continue;
        }
        let from = input.number(2) as usize % BLOCK_BYTES;
        for i in 0..usize::from(input.byte() % 16) + 1 {
            let value = input.byte();
            if let Some(b) = block.get_mut(from + i) {
                *b = value;
            }
        }
        let keeps_kind = block[8] >= BlockKind::Super as u8;
        if keeps_kind {
            reseal(&mut block);
        }
        // within the image
        image.write(t.block, &block).unwrap_or_default();
    }
    image
}

/// Mounts, reads, writes, checks and repairs the edited image.
pub fn run(data: &[u8]) {
    let mut input = Input(data);
    let bases = bases();
    let (sample, list) = &bases[usize::from(input.byte()) % bases.len()];
    use_up(&edited(&sample.image, list, input), sample);
}

/// What a user would do with a volume, and a repair, which has to end in a sound one.
pub fn use_up(image: &Image, sample: &Sample) {
    abuse(&Arc::new(MemDevice::from_image(image.clone())), &sample.truth);
    let device = Arc::new(MemDevice::from_image(image.clone()));
    let devices = [device.clone() as Arc<dyn Device>];
    let options = FsckOptions { repair: true, force: true };
    let Ok(report) = check(&devices, &options, &braidfs::JournalReplay, &|_, _, _| {}) else { return };
    let left: Vec<_> = report.findings.iter().filter(|f| !f.fixed).collect();
    assert!(left.is_empty(), "a repair left {left:#?}");
    let again = check(&devices, &FsckOptions { repair: false, force: true }, &braidfs::JournalReplay, &|_, _, _| {});
    let again = again.unwrap_or_else(|e| panic!("the repaired volume cannot be checked: {e}"));
    assert!(again.findings.is_empty(), "the check after a repair finds {:#?}", again.findings);
    abuse(&device, &sample.truth);
}
