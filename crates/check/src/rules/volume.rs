//! Rules of the volume's own tables: superblocks and replicas, the block group allocation table (BAT), domain headers.

use crate::codes;
use crate::pair::{CopyState, PairState};
use crate::report::Log;
use braidfs_format::BlockKind;
use braidfs_format::bat::{self, BatEntry, ENTRIES_PER_BLOCK};
use braidfs_format::domain::DomainHeader;
use braidfs_format::super_block::{DeviceEntry, INCOMPAT_SCRATCH, SuperBlock};
use braidfs_store::{Store, super_io};

/// The superblock at block `addr` of device `device` says what `sb` does; else that is noted.
pub fn superblock(store: &Store, log: &mut Log, sb: &SuperBlock, device: usize, addr: u64) -> bool {
    let d = store.device(device);
    let why = match super_io::read_at(d, addr) {
        Ok(s) if same(&s, sb, device as u16) => return true,
        Ok(_) => "differs from the others".to_string(),
        Err(e) => {
            // a device of which neither holds is none of a volume
            let other = if addr == 0 { "its replica" } else { "that at block 0" };
            format!("does not hold ({}), {other} does", super_io::why_alone(&e, &d.name()))
        }
    };
    log.add(codes::SUPER_COPY, None, format!("superblock at block {addr} of {}: {why}", d.name()));
    false
}

/// Whether superblock `a` says the same as `b`, which counts, but for the header, the device that they stand on, and what a
/// crash may have changed in some of them: the label, `compat`, that there is a domain without a journal, whether a device is
/// drained, and the number of domains, which the BAT tells; and the size, of a
/// volume that was about to grow, on its last device or by one more, or has just become smaller: all that a larger one needs
/// was there before.
fn same(a: &SuperBlock, b: &SuperBlock, device: u16) -> bool {
    let devices = b.device_table().len();
    let last = devices.saturating_sub(1);
    let plain = |s: &SuperBlock| {
        let mut s = SuperBlock { label: [0; 64], compat: 0.into(), groups: 0.into(), domains: 1.into(), ..*s };
        s.incompat = (s.incompat.get() & !INCOMPAT_SCRATCH).into();
        s.devices = b.devices;
        s.device[devices..].fill(DeviceEntry::empty());
        s.device[..devices].iter_mut().for_each(|d| d.flags = 0.into());
        let d = &mut s.device[last];
        (d.blocks, d.groups, d.last_group_blocks) = (0.into(), 0.into(), 0.into());
        s.to_block(0, 0, 0)
    };
    let larger = a.devices >= b.devices && a.device[last].blocks >= b.device[last].blocks;
    a.this_device.get() == device && larger && plain(a) == plain(b)
}

/// What a pair of the volume's tables holds: the content, `None` where neither copy holds, and which copy does not.
pub struct PairContent<T> {
    /// What the newest copy that holds says.
    pub content: Option<T>,
    /// The damaged copy, where the other one holds.
    pub damaged: Option<usize>,
}

/// First block of BAT pair `index`, its first group and its groups.
pub fn bat_place(sb: &SuperBlock, index: usize) -> (u64, usize, usize) {
    let first = index * ENTRIES_PER_BLOCK as usize;
    let count = (sb.groups.get() as usize).saturating_sub(first).min(ENTRIES_PER_BLOCK as usize);
    (sb.bat.get() + 2 * index as u64, first, count)
}

/// Number of BAT pairs.
pub fn bat_pairs(sb: &SuperBlock) -> usize {
    (sb.groups.get() as usize).div_ceil(ENTRIES_PER_BLOCK as usize)
}

/// BAT pair `index`, whose two copies are `buf`.
pub fn bat_pair(log: &mut Log, sb: &SuperBlock, index: usize, buf: &[u8]) -> PairContent<Vec<BatEntry>> {
    let ((pair, _, count), volume) = (bat_place(sb, index), sb.volume_id());
    let state = PairState::of(buf, BlockKind::Bat, volume, pair);
    if let Some((copy, why)) = state.damaged() {
        log.add(codes::BAT_COPY, None, format!("BAT pair {index}, copy {copy}: {why}"));
    }
    let content = match bat::decode(buf, volume, pair, count, sb.max_domains.get()) {
        Ok((_, _, entries)) => Some(entries),
        Err(e) => {
            log.add(codes::BAT_LOST, None, format!("BAT pair {index}: {e}; the group headers tell the owners"));
            None
        }
    };
    PairContent { content, damaged: state.damaged().map(|d| d.0) }
}

/// First block of the pair of a domain's header.
pub fn header_place(sb: &SuperBlock, domain: u16) -> u64 {
    sb.domain_table.get() + 2 * u64::from(domain)
}

/// The header of `domain`, whose two copies are `buf`.
pub fn domain_header(log: &mut Log, sb: &SuperBlock, domain: u16, buf: &[u8]) -> PairContent<DomainHeader> {
    let (pair, volume) = (header_place(sb, domain), sb.volume_id());
    let state = PairState::of(buf, BlockKind::Domain, volume, pair);
    if let Some((copy, why)) = state.damaged() {
        log.add(codes::DOMAIN_COPY, None, format!("domain header, copy {copy}: {why}"));
    }
    let content = match DomainHeader::from_pair(buf, volume, pair, domain) {
        Ok((_, _, h)) => Some(h),
        Err(e) => {
            // A pair never written is as bad as a damaged one: the domain exists.
            let blank = state.0 == [CopyState::Blank, CopyState::Blank];
            log.add(codes::DOMAIN_LOST, None, if blank { "domain header is blank".into() } else { e.to_string() });
            None
        }
    };
    PairContent { content, damaged: state.damaged().map(|d| d.0) }
}
