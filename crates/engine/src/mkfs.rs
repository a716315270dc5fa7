//! Makes a volume.
//!
//! Writes the volume's tables (domain headers, block group allocation table), the first group of every domain, and the
//! root directory; then, after a flush, the superblocks. A crash half way leaves no superblock of the new volume. All
//! other groups stay free and untouched until a domain claims them, so the time does not depend on the size.
//!
//! Does not look for old content on the devices: the command does that.

use crate::error::{Error, Result};
use crate::space::Space;
use crate::store::Store;
use crate::types::{DomainId, InodeNo, MkfsOptions, Placement, Timestamp};
use crate::volume::label::LABEL_MAX;
use crate::volume::trim::discard_device;
use braidfs_device::{BLOCK_BYTES, Device};
use braidfs_format::bat::{self, BatEntry, ENTRIES_PER_BLOCK};
use braidfs_format::domain::{CLEAN, DomainHeader};
use braidfs_format::geometry::NODES_PER_BLOCK;
use braidfs_format::group::{OWNERS_PER_BLOCK, Owner, SegmentKind, SegmentTable, Temperature, Written, table_mark};
use braidfs_format::group::{decode_owners, encode_owners};
use braidfs_format::inode::{INLINE_MAX, Inode};
use braidfs_format::node::{DIR, NodeBlockBuilder, NodeEntry, NodeKind, NodeRecord, NodeTableBlock, USED};
use braidfs_format::owner::OwnerRecord;
use braidfs_format::super_block::{DeviceEntry, INCOMPAT_DATA_SUMS, MAX_DEVICES, MAX_DOMAINS, SuperBlock};
use braidfs_format::{BlockAddr, Geometry};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

const MIB: u64 = 1 << 20;
/// Smallest volume that mkfs makes: room for one domain with a journal, its tables and some files.
pub const VOLUME_MIN_BYTES: u64 = 16 * MIB;
/// Smallest journal of a domain, in bytes; a smaller one would commit at every few operations.
const JOURNAL_MIN_BYTES: u64 = 512 << 10;
/// Smallest journal that can be asked for, bytes: tests recover thousands of tiny volumes a second.
const JOURNAL_LEAST_BYTES: u64 = 128 << 10;
/// Largest journal that is chosen unasked.
const JOURNAL_MAX_BYTES: u64 = 32 * MIB;
/// Epoch of the groups claimed here; free groups have 0.
const FIRST_EPOCH: u32 = 1;
/// `seq` of everything written first.
const FIRST_SEQ: u64 = 1;
/// A volume has room in its tables to grow by so much, but for no more groups than these (64 TiB in groups of 64 MiB), which
/// take 16 MiB; a very large one to grow by the least.
const GROWTH: u64 = 1024;
const GROUPS_ROOM: u64 = 1 << 20;
const GROWTH_LEAST: u64 = 4;

/// Makes an empty volume on `devices` (device 0 gets the volume's tables). Nothing is checked for old content: the
/// command does that, nor whether somebody writes a volume on a device that other machines reach ([`crate::store::lease`]). The
/// superblocks are written last, so that a crash half way leaves no volume.
///
/// # Errors
/// Sizes that do not fit ([`crate::Error::Invalid`]), or of a device.
pub fn format(devices: &[Arc<dyn Device>], options: &MkfsOptions) -> Result<SuperBlock> {
    let (sb, plan) = plan(devices, options)?;
    check_super(&sb, devices)?;
    let store = Store::new(devices.to_vec(), &sb)?;

    if options.discard {
        for (d, dev) in sb.device_table().iter().zip(devices) {
            discard_device(&**dev, d.blocks.get());
        }
    }
    // An old superblock must not survive beside the new tables: the volume is gone from the first write on.
    for (i, (d, dev)) in sb.device_table().iter().zip(devices).enumerate() {
        dev.write(0, &[0; BLOCK_BYTES])?;
        if let Some(owner) = OwnerRecord::place(&sb, i).filter(|_| dev.remote().is_some()) {
            // of a volume with the same UUID
            dev.write(owner, &[0; BLOCK_BYTES])?;
        }
        dev.write(d.blocks.get() - 1, &[0; BLOCK_BYTES])?;
    }
    store.flush()?;
    for (d, p) in plan.iter().enumerate() {
        let domain = DomainId(d as u16);
        let journal = Some((p.journal_at, p.journal_blocks));
        Space::init_group(&store, domain, p.group, FIRST_EPOCH, journal)?;
        if options.uuid.is_some() {
            // Chunks of a volume with the same UUID would look valid.
            let zeros = vec![0u8; 256 * BLOCK_BYTES];
            let start = store.geometry().group_start(p.group).0 + u64::from(p.journal_at);
            let mut at = 0;
            while at < p.journal_blocks {
                let n = (p.journal_blocks - at).min(256);
                store.write(BlockAddr(start + u64::from(at)), &zeros[..n as usize * BLOCK_BYTES])?;
                at += n;
            }
        }
    }
    let tables = write_root(&store, &plan[0], options)?;
    write_domain_table(&sb, &store, &plan, tables)?;
    write_bat(&sb, &store, &plan, options.uuid.is_some())?;
    store.flush()?;
    for at_start in [false, true] {
        for (i, (d, dev)) in sb.device_table().iter().zip(devices).enumerate() {
            let addr = if at_start { 0 } else { d.blocks.get() - 1 };
            dev.write(addr, &sb.to_block(i as u16, addr, FIRST_SEQ))?;
        }
    }
    store.flush()?;
    Ok(sb)
}

/// The first group of a domain.
struct FirstGroup {
    group: u32,
    /// First block of the journal in the group.
    journal_at: u32,
    journal_blocks: u32,
}

fn cpus() -> u64 {
    braidfs_sync::workers::cpus() as u64
}

/// Group size in blocks: as asked for, else so that there are about 16 groups, and about 8 for each domain: a file can have
/// what is free in one of its domain's own and in those of nobody. 4 MiB to 64 MiB, a journal in half of one.
fn group_blocks(total_bytes: u64, options: &MkfsOptions) -> Result<u32> {
    let bytes = match options.group_bytes {
        Some(b) => b,
        None => {
            let domains = u64::from(options.domains.unwrap_or(0)).max(2);
            let journal = options.journal_bytes.unwrap_or(0).min(32 * MIB).next_power_of_two();
            let b = (total_bytes / (8 * domains)).max(2 * journal).clamp(4 * MIB, 64 * MIB);
            1 << b.min((total_bytes / 16).max(4 * MIB)).ilog2()
        }
    };
    if !bytes.is_power_of_two() || !(4 * MIB..=64 * MIB).contains(&bytes) {
        return Err(Error::Invalid("the group size must be a power of two from 4 MiB to 64 MiB"));
    }
    Ok((bytes / BLOCK_BYTES as u64) as u32)
}

fn check_options(devices: &[Arc<dyn Device>], o: &MkfsOptions) -> Result<u64> {
    let invalid = |why| Err(Error::Invalid(why));
    if devices.is_empty() || devices.len() > MAX_DEVICES {
        return invalid("a volume has 1 to 16 devices");
    }
    if o.label.len() > LABEL_MAX || o.label.contains('\0') {
        return invalid("the label must have at most 63 bytes and no NUL");
    }
    if usize::from(o.inline_max) > INLINE_MAX {
        return invalid("the inline limit must be at most 3400 bytes");
    }
    if o.domains.is_some_and(|d| d == 0 || d > MAX_DOMAINS) {
        return invalid("a volume has 1 to 256 domains");
    }
    if o.mlogs.is_some_and(|m| m == 0 || m > 64) {
        return invalid("a domain has 1 to 64 mlogs");
    }
    let mut total = 0u64;
    for d in devices {
        if d.blocks() >= 1 << 48 {
            return invalid("a device must be smaller than 1 EiB");
        }
        total = total.saturating_add(d.blocks());
    }
    let bytes = total.saturating_mul(BLOCK_BYTES as u64);
    if bytes < VOLUME_MIN_BYTES {
        return invalid("the volume is too small: at least 16 MiB are needed");
    }
    Ok(bytes)
}

/// Lays the volume out.
fn plan(devices: &[Arc<dyn Device>], o: &MkfsOptions) -> Result<(SuperBlock, Vec<FirstGroup>)> {
    let total_bytes = check_options(devices, o)?;
    let group_blocks = group_blocks(total_bytes, o)?;
    let geometry = Geometry::new(group_blocks, 1)?;
    // Upper bound of the groups: what the BAT must have room for, and what the domains are chosen by.
    let groups_max: u64 = devices.iter().map(|d| d.blocks().div_ceil(u64::from(group_blocks))).sum();
    let domains = match o.domains {
        Some(d) => d,
        None => cpus().clamp(2, 64).min((groups_max / 3).max(1)) as u16,
    };
    let max_domains = (domains * 2).clamp(16, MAX_DOMAINS);
    let room = (GROWTH * groups_max).min(GROUPS_ROOM).max(GROWTH_LEAST * groups_max);
    let bat_pairs = room.div_ceil(u64::from(ENTRIES_PER_BLOCK));

    let mut sb = SuperBlock::empty();
    sb.uuid = o.uuid.unwrap_or_else(|| *uuid::Uuid::new_v4().as_bytes());
    getrandom::fill(&mut sb.hash_key).map_err(|e| Error::Io(e.into()))?;
    sb.incompat = if o.data_checksums { INCOMPAT_DATA_SUMS } else { 0 }.into();
    sb.group_blocks = group_blocks.into();
    sb.label[..o.label.len()].copy_from_slice(o.label.as_bytes());
    sb.domains = domains.into();
    sb.max_domains = max_domains.into();
    sb.devices = (devices.len() as u16).into();
    sb.inline_max = o.inline_max.into();
    sb.placement = if o.placement == Placement::Unset { Placement::Dirs } else { o.placement } as u8;
    sb.created = now().sec.into();
    sb.domain_table = 1.into();
    sb.bat = (1 + 2 * u64::from(max_domains)).into();
    sb.bat_pairs = u32::try_from(bat_pairs).map_err(|_| Error::Invalid("the volume is too large"))?.into();

    let mut groups = 0u32;
    for (i, dev) in devices.iter().enumerate() {
        let tables_end = if i == 0 { sb.bat.get() + 2 * bat_pairs } else { 0 };
        let uuid = *uuid::Uuid::new_v4().as_bytes();
        let entry = DeviceEntry::lay_out(uuid, dev.blocks(), tables_end, groups, geometry)
            .ok_or(Error::Invalid("a device is too small for a group: use a larger one or smaller groups"))?;
        groups = groups
            .checked_add(entry.groups.get())
            .filter(|&g| u64::from(g) * u64::from(geometry.nodes()) < 1 << 62)
            .ok_or(Error::Invalid("the volume is too large"))?;
        sb.device[i] = entry;
    }
    sb.groups = groups.into();
    let default_mlogs = cpus().min(8).min(u64::from(geometry.segments / 4)).max(1) as u16;
    sb.mlogs = o.mlogs.unwrap_or(default_mlogs).into();
    let first = first_groups(&sb, geometry, total_bytes, o)?;
    Ok((sb, first))
}

/// Gives every domain its first group, round-robin over the devices, and a journal in it.
fn first_groups(sb: &SuperBlock, g: Geometry, total_bytes: u64, o: &MkfsOptions) -> Result<Vec<FirstGroup>> {
    let domains = u64::from(sb.domains.get());
    let wanted =
        o.journal_bytes.unwrap_or_else(|| (total_bytes / 64 / domains).clamp(JOURNAL_MIN_BYTES, JOURNAL_MAX_BYTES));
    if wanted < JOURNAL_LEAST_BYTES {
        return Err(Error::Invalid("the journal must have at least 128 KiB"));
    }
    let wanted = wanted / BLOCK_BYTES as u64;
    let table = sb.device_table();
    // Short groups only where there are no more whole ones.
    let mut left: Vec<std::collections::VecDeque<(u32, u32)>> = vec![Default::default(); table.len()];
    for (d, queue) in table.iter().zip(&mut left) {
        // No more than `domains` groups of a device can be needed.
        for i in 0..d.groups.get().min(sb.domains.get().into()) {
            let last = i + 1 == d.groups.get();
            let blocks = if last { d.last_group_blocks.get() } else { g.group_blocks() };
            queue.push_back((d.first_group.get() + i, blocks));
        }
    }
    let mut out = Vec::new();
    let mut device = 0;
    for _ in 0..domains {
        let Some(found) = (0..left.len()).map(|i| (device + i) % left.len()).find(|&i| !left[i].is_empty()) else {
            return Err(Error::Invalid("more domains than groups: use fewer domains or smaller groups"));
        };
        device = (found + 1) % left.len();
        let Some((group, blocks)) = left[found].pop_front() else { continue };
        let most = g.journal_max(blocks);
        let journal_blocks = u32::try_from(wanted).unwrap_or(u32::MAX);
        if o.journal_bytes.is_some() && journal_blocks > most {
            return Err(Error::Invalid("the journal must fit into half a group"));
        }
        let journal_blocks = journal_blocks.min(most);
        if journal_blocks < 16 {
            return Err(Error::Invalid("a group is too small for a journal: use larger devices"));
        }
        out.push(FirstGroup { group, journal_at: g.meta_blocks(), journal_blocks });
    }
    Ok(out)
}

/// What is about to be written must be accepted when it is read (a bug of ours otherwise).
fn check_super(sb: &SuperBlock, devices: &[Arc<dyn Device>]) -> Result<()> {
    for (i, dev) in devices.iter().enumerate() {
        for addr in [0, dev.blocks() - 1] {
            SuperBlock::from_block(&sb.to_block(i as u16, addr, FIRST_SEQ), addr)?;
        }
    }
    Ok(())
}

fn now() -> Timestamp {
    let t = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Timestamp { sec: t.as_secs() as i64, nsec: t.subsec_nanos() }
}

/// The root directory, node 1, in the block behind the journal in group 0. The sum of the segment tables for the header.
fn write_root(store: &Store, first: &FirstGroup, o: &MkfsOptions) -> Result<u64> {
    let (g, volume) = (store.geometry(), store.volume);
    let placement = if o.placement == Placement::Unset { Placement::Dirs } else { o.placement };
    let (uid, gid) = o.root_owner;
    let inode = Inode { uid, gid, placement, ..Inode::empty_dir(0o755, now()) };
    let root = InodeNo::ROOT;
    let flags = USED | DIR;
    let record = NodeRecord {
        node: root.node(),
        generation: 1,
        kind: NodeKind::Inode,
        flags,
        owner: root,
        version: 1,
        payload: inode.encode(),
    };
    let at = first.journal_at + first.journal_blocks;
    let addr = BlockAddr(g.group_start(first.group).0 + u64::from(at));
    let mut builder = NodeBlockBuilder::default();
    let index = builder.push(&record.encode()).ok_or(Error::Invalid("the root directory does not fit a block"))?;
    store.write(addr, &builder.finish(0, volume, addr, FIRST_SEQ))?;

    let (group, segment, block) = g.split(addr);
    let mut written = Written::blank(g.segments);
    let mut buf = vec![0u8; 2 * BLOCK_BYTES];
    let half = block / OWNERS_PER_BLOCK;
    let pair = g.owners_addr(group, segment, half);
    store.read(pair, &mut buf)?;
    let (copy, seq, mut owners) = decode_owners(&buf, volume, pair)?;
    owners[(block % OWNERS_PER_BLOCK) as usize] = Owner { live: 1, ..Owner::default() };
    let to = BlockAddr(pair.0 + 1 - copy as u64);
    store.write(to, &encode_owners(&owners, 0, volume, pair, 1 - copy, seq + 1))?;
    written.counts[g.owners_index(segment, half)] = 1;

    let slot = root.0 as u32;
    let table = slot / NODES_PER_BLOCK;
    let pair = g.node_table_addr(group, table);
    store.read(pair, &mut buf)?;
    let (copy, seq, mut entries) = NodeTableBlock::decode(&buf, volume, pair)?;
    entries[(slot % NODES_PER_BLOCK) as usize] =
        NodeEntry { addr, index, flags, generation: 1, written: FIRST_SEQ as u32 };
    let to = BlockAddr(pair.0 + 1 - copy as u64);
    store.write(to, &NodeTableBlock::encode(&entries, 0, volume, pair, 1 - copy, seq + 1))?;
    written.counts[g.node_table_index(table)] = 1;

    let pair = g.segment_table_addr(group);
    store.read(pair, &mut buf)?;
    let (copy, seq, mut segments) = SegmentTable::decode(&buf, g.segments, volume, pair)?;
    let s = &mut segments[segment as usize];
    if s.kind != SegmentKind::Journal {
        (s.kind, s.temperature) = (SegmentKind::Node, Temperature::Hot);
    }
    s.set(block, true);
    let to = BlockAddr(pair.0 + 1 - copy as u64);
    store.write(to, &SegmentTable::encode(&segments, &written, 0, volume, pair, 1 - copy, seq + 1))?;
    Ok(table_mark(group, seq + 1))
}

/// All pairs there is room for: zeros where there is no domain. `tables` is the sum of domain 0.
fn write_domain_table(sb: &SuperBlock, store: &Store, plan: &[FirstGroup], tables: u64) -> Result<()> {
    let mut buf = vec![0u8; usize::from(sb.max_domains.get()) * 2 * BLOCK_BYTES];
    for (d, p) in plan.iter().enumerate() {
        let mut h = DomainHeader::empty();
        h.domain = (d as u16).into();
        h.flags = CLEAN.into();
        h.journal_start = (store.geometry().group_start(p.group).0 + u64::from(p.journal_at)).into();
        h.journal_blocks = p.journal_blocks.into();
        h.tables = if d == 0 { tables } else { 0 }.into();
        let pair = sb.domain_table.get() + 2 * d as u64;
        buf[2 * d * BLOCK_BYTES..][..BLOCK_BYTES].copy_from_slice(&h.to_block(sb.volume_id(), pair, 0, FIRST_SEQ));
    }
    Ok(store.device(0).write(sb.domain_table.get(), &buf)?)
}

/// The pairs in use; with `all`, also zeros over those for growth.
fn write_bat(sb: &SuperBlock, store: &Store, plan: &[FirstGroup], all: bool) -> Result<()> {
    let mut entries = vec![BatEntry::default(); sb.groups.get() as usize];
    for (d, p) in plan.iter().enumerate() {
        entries[p.group as usize] = BatEntry { domain: Some(DomainId(d as u16)), epoch: FIRST_EPOCH };
    }
    let used = entries.len().div_ceil(ENTRIES_PER_BLOCK as usize);
    let pairs = if all { sb.bat_pairs.get() as usize } else { used };
    let mut buf = vec![0u8; pairs * 2 * BLOCK_BYTES];
    for (i, chunk) in entries.chunks(ENTRIES_PER_BLOCK as usize).enumerate() {
        let pair = sb.bat.get() + 2 * i as u64;
        let block = bat::encode(chunk, sb.volume_id(), pair, 0, FIRST_SEQ);
        buf[2 * i * BLOCK_BYTES..][..BLOCK_BYTES].copy_from_slice(&block);
    }
    Ok(store.device(0).write(sb.bat.get(), &buf)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use braidfs_device::SparseDevice;
    use braidfs_store::super_io::read_super;

    fn devices(mib: &[u64]) -> Vec<Arc<dyn Device>> {
        mib.iter().map(|m| SparseDevice::new(m * 256) as Arc<dyn Device>).collect()
    }

    #[test]
    fn many_sizes_and_options() {
        for mib in [16, 17, 32, 64, 100, 1024, 5000, 1 << 20] {
            for domains in [None, Some(1), Some(3)] {
                let dev = devices(&[mib]);
                let o = MkfsOptions { domains, ..Default::default() };
                let sb = match format(&dev, &o) {
                    Ok(sb) => sb,
                    Err(Error::Invalid(_)) if mib < 20 => continue,
                    Err(e) => panic!("{mib} MiB, {domains:?}: {e}"),
                };
                let (read, _) = read_super(&dev).unwrap();
                assert_eq!(read.uuid, sb.uuid);
                assert_eq!(domains.unwrap_or(sb.domains.get()), sb.domains.get());
            }
        }
    }

    #[test]
    fn sixteen_tebibytes_in_a_second() {
        let dev = devices(&[16 << 20]);
        let t = std::time::Instant::now();
        format(&dev, &MkfsOptions::default()).unwrap();
        assert!(t.elapsed() < std::time::Duration::from_secs(2), "{:?}", t.elapsed());
    }

    #[test]
    fn several_devices_in_any_order() {
        let dev = devices(&[64, 200, 33]);
        let sb = format(&dev, &MkfsOptions { domains: Some(5), ..Default::default() }).unwrap();
        let mixed = [dev[2].clone(), dev[0].clone(), dev[1].clone()];
        let (read, order) = read_super(&mixed).unwrap();
        assert_eq!(read.device, sb.device);
        assert_eq!(order.iter().map(|d| d.blocks()).collect::<Vec<_>>(), [64 * 256, 200 * 256, 33 * 256]);
        assert!(read_super(&mixed[..2]).is_err());
        assert!(read_super(&[dev[0].clone(), dev[0].clone(), dev[1].clone()]).is_err());
        // the replica serves where block 0 is lost
        dev[0].write(0, &[0; BLOCK_BYTES]).unwrap();
        assert_eq!(read_super(&mixed).unwrap().0.uuid, sb.uuid);
    }

    #[test]
    fn bad_options_are_refused() {
        let dev = devices(&[64]);
        let bad = [
            MkfsOptions { domains: Some(0), ..Default::default() },
            MkfsOptions { domains: Some(257), ..Default::default() },
            MkfsOptions { domains: Some(200), ..Default::default() },
            MkfsOptions { group_bytes: Some(5 << 20), ..Default::default() },
            MkfsOptions { label: "x".repeat(64), ..Default::default() },
            MkfsOptions { inline_max: 3401, ..Default::default() },
            MkfsOptions { journal_bytes: Some(1), ..Default::default() },
            MkfsOptions { journal_bytes: Some(1 << 30), ..Default::default() },
            MkfsOptions { mlogs: Some(0), ..Default::default() },
        ];
        for (i, o) in bad.iter().enumerate() {
            assert!(matches!(format(&dev, o), Err(Error::Invalid(_))), "option set {i}");
        }
        assert!(format(&devices(&[8]), &MkfsOptions::default()).is_err());
        assert!(format(&[], &MkfsOptions::default()).is_err());
    }
}
