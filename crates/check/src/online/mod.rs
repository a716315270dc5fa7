//! Scrub of a mounted volume: reads every metadata block, and data that has checksums, while the volume is in use.
//!
//! Looks at what is durable, as it lies on the device; what is only in memory or in a journal comes under its eyes when
//! it is committed. All metadata but journals: superblocks and replicas, both copies of the group table, of domain
//! headers and of the tables of all groups; the node block of every node; overflow nodes, extents and directory
//! buckets. What takes two inodes (names against links, blocks used twice) is for a check of the unmounted volume.
//!
//! No false alarm: everything is read without a lock first. Where that does not hold it may have been written
//! meanwhile, so it is looked up and read again at a moment at which it cannot change ([`LiveVolume::quiesce`]),
//! which others wait for: some hundred blocks at most. Only what does not hold then is a finding. An inode with more
//! overflow nodes is read in parts, at several such moments; if it changes between them it is begun again, some
//! times.

mod inodes;
mod pass;

use crate::codes;
use crate::report::{Log, ScrubReport};
use crate::rules::group::{has_owners, owners, parse_group};
use crate::rules::tenant::{self, Wrong};
use crate::rules::volume::{bat_pair, bat_pairs, bat_place, domain_header, header_place, superblock};
use braidfs_device::BLOCK_BYTES;
use braidfs_format::domain::DomainHeader;
use braidfs_format::{DomainId, InodeNo};
use braidfs_store::Store;
use braidfs_store::interface::{LiveVolume, Quiesced};
use pass::Scrub;
pub use pass::ScrubOptions;

/// Reads all metadata of a volume, and data that has checksums, while it is in use, and compares. Changes nothing;
/// memory: some MiB. `progress` is told the phase, blocks done and blocks (a guess), and says whether to go on. What
/// cannot be read is a finding.
pub fn scrub_mounted(
    volume: &dyn LiveVolume,
    options: &ScrubOptions,
    progress: &mut dyn FnMut(&str, u64, u64) -> bool,
) -> ScrubReport {
    let mut s = Scrub::new(volume, *options, progress);
    s.run();
    s.into_report()
}

impl Scrub<'_> {
    fn run(&mut self) {
        let volume = self.volume;
        let per_group = u64::from(volume.store().geometry().meta_blocks());
        let domains = || (0..volume.super_block().domains.get()).map(DomainId);
        for d in domains() {
            self.total += volume.used_blocks(d) + per_group * volume.groups(d).len() as u64;
        }
        self.show("volume", true);
        self.supers();
        self.group_table();
        for d in domains() {
            self.header(d);
        }
        self.tenants();
        for d in domains() {
            for group in volume.groups(d) {
                if self.report.stopped {
                    return;
                }
                self.group(d, group);
                inodes::of_group(self, d, group);
            }
        }
        self.done = self.total;
        self.show("blocks", true);
    }

    /// Superblocks, which are only written where the label or `compat` changes.
    fn supers(&mut self) {
        let (volume, store) = (self.volume, self.volume.store());
        for i in 0..volume.super_block().device_table().len() {
            for replica in [false, true] {
                self.look(Quiesced::Superblocks, None, 1, |log| {
                    // the volume may have grown since: then its replica lies elsewhere
                    let sb = volume.super_block();
                    if i >= sb.device_table().len() {
                        return; // or lost the device
                    }
                    let addr = if replica { sb.device[i].blocks.get().saturating_sub(1) } else { 0 };
                    superblock(store, log, &sb, i, addr);
                });
            }
        }
    }

    /// The group table, while nobody claims a group: it is small.
    fn group_table(&mut self) {
        let (sb, store) = (self.volume.super_block(), self.volume.store());
        for index in 0..bat_pairs(&sb) {
            self.look(Quiesced::Bat, None, 2, |log| {
                let pair = log.read_pair(store, bat_place(&sb, index).0);
                bat_pair(log, &sb, index, &pair);
            });
        }
    }

    fn header(&mut self, d: DomainId) {
        let (sb, store) = (self.volume.super_block(), self.volume.store());
        self.look(Quiesced::Header(d), Some(d), 2, |log| {
            let pair = log.read_pair(store, header_place(&sb, d.0));
            domain_header(log, &sb, d.0, &pair);
        });
    }

    /// What the headers say of tenants, of all domains at once: no two have one name.
    fn tenants(&mut self) {
        let volume = self.volume;
        let blocks = 2 * u64::from(volume.super_block().domains.get());
        self.look(Quiesced::Tenants, None, blocks, |log| {
            let sb = volume.super_block();
            let mut names = tenant::Names::default();
            for d in (0..sb.domains.get()).map(DomainId) {
                let place = header_place(&sb, d.0);
                // what does not hold was told of
                let pair = Log::default().read_pair(volume.store(), place);
                if let Ok((_, _, h)) = DomainHeader::from_pair(&pair, sb.volume_id(), place, d.0) {
                    log.domain = Some(d.0);
                    tenant_of(volume, log, d, &h);
                    if let Some(why) = names.taken(&h) {
                        log.add(codes::TENANT_NAME, None, why);
                    }
                }
            }
        });
    }

    /// The tables of a group, both copies of each.
    fn group(&mut self, d: DomainId, number: u32) {
        let volume = self.volume;
        let blocks = u64::from(volume.store().geometry().meta_blocks());
        self.look(Quiesced::Tables(d), Some(d), blocks, |log| {
            // a group may leave its domain, with a checkpoint; then it is looked at where it comes, or not at all
            if let Some(epoch) = volume.epoch(d, number) {
                look_at_group(volume.store(), log, d, (number, epoch));
            }
        });
        self.done += blocks;
    }
}

/// The tenant in the header of `d`, and its root directory.
fn tenant_of(volume: &dyn LiveVolume, log: &mut Log, d: DomainId, h: &DomainHeader) {
    let root = InodeNo(h.tenant_root.get());
    let owner = |ino: InodeNo| {
        let (group, _) = volume.store().geometry().node_place(ino)?;
        volume.owner(group).map(|d| d.0)
    };
    let mut has_root = root.0 > 0;
    tenant::fields(h, volume.store().devices(), owner, |w| {
        has_root &= !matches!(w, Wrong::Root(_));
        log.add(codes::TENANT, None, w.why());
    });
    // a table that cannot be read is told of with its group
    if has_root
        && let Ok(e) = volume.entry(d, root.node())
        && !e.is_some_and(|e| tenant::is_root(h, &e))
    {
        log.add(codes::TENANT, None, tenant::rootless(h));
    }
}

/// The tables of group `number`, which `d` owns by the claim of `epoch`.
fn look_at_group(store: &Store, log: &mut Log, d: DomainId, (number, epoch): (u32, u32)) {
    let g = store.geometry();
    let start = g.group_start(number);
    let image = log.read(store, start, g.meta_blocks().min(store.group_blocks(number)) as usize);
    let group = parse_group(store, log, d.0, (number, epoch), u64::MAX, &image);
    for half in (0..2 * g.segments).filter(|h| has_owners(&group, *h)) {
        let at = (g.owners_addr(number, half / 2, half % 2).0 - start.0) as usize * BLOCK_BYTES;
        owners(store, log, &mut Vec::new(), &group, half, &image[at..][..2 * BLOCK_BYTES]);
    }
}
