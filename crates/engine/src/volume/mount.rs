//! Mounting: superblock, group table, all domains in parallel, recovery across them.

use super::domains::Domains;
use super::groups::Bat;
use super::held::table::LookupCounts;
use super::siblings::Siblings;
use super::{MountedVolume, Volume};
use crate::braid::reconcile::Unread;
use crate::cell::dentries::DentryCache;
use crate::cell::frames;
use crate::domain::peers::Peers;
use crate::domain::recovered::Recovered;
use crate::domain::{Domain, HeaderPair, Shared};
use crate::error::{Error, Result};
use crate::fsync::committers::Committers;
use crate::fsync::queue::Syncing;
use crate::fsync::ticket;
use crate::planted::{self, Bug};
use crate::store::Store;
use crate::store::lease::Lease;
use crate::store::overlay::Overlays;
use crate::store::super_io::read_super;
use crate::types::*;
use braidfs_device::Device;
use braidfs_format::BLOCK_BYTES;
use braidfs_format::block::{BlockKind, other_copy_lost};
use braidfs_format::domain::{CLEAN, DomainHeader, FAILED};
use braidfs_format::super_block::SuperBlock;
use braidfs_sync::{Mutex, RwLock, ablation, membarrier};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

/// Threads behind tickets: syncs that may share a flush.
const SYNC_THREADS: usize = 8;
/// Groups of a volume that one thread opens and closes.
const SMALL_GROUPS: u32 = 16;
/// Bytes of the names looked up lately, at least and at most; between them by the cache's memory and the volume's size: a
/// small volume has few names, and is mounted sooner.
const NAMES_MIN: u64 = 16 << 10;
const NAMES_MAX: u64 = 1 << 30;

/// For what a volume is mounted.
enum Purpose {
    /// To be used.
    Use,
    /// To be used by who held these inodes of the last mount.
    Hold(LookupCounts),
    /// To have its journals replayed.
    Replay,
}

impl Volume {
    /// Opens the volume on `devices` (in any order; all of it), recovering it where it was not unmounted. A read-only
    /// mount writes nothing: what recovery changes stays in memory.
    ///
    /// # Errors
    /// No braidfs volume, a newer format, a device missing or too small, damage that recovery cannot pass.
    pub fn mount(devices: Vec<Arc<dyn Device>>, options: MountOptions) -> Result<Volume> {
        Self::mount_with(devices, options, Purpose::Use)
    }

    /// [`Self::mount`], before a check, which mends what recovery could not read: nobody may change anything in this mount. A domain
    /// that has failed is replayed as well, unless it has nothing to replay, and its header says still that it has failed.
    ///
    /// # Errors
    /// As [`Self::mount`].
    pub(super) fn mount_to_replay(devices: Vec<Arc<dyn Device>>, options: MountOptions) -> Result<Volume> {
        Self::mount_with(devices, options, Purpose::Replay)
    }

    /// [`Volume::mount`] behind a [`Volume::unmount_holding`], whose list this is: what is on it is held as it was, and stays
    /// where it has no name until it is given back ([`Volume::forget`]). Inodes without a name that are not on it are
    /// reclaimed, as by any mount. Tenants without a journal keep one until [`Volume::end_hand_over`], so that another mount by
    /// the same list finds what is in them.
    ///
    /// # Errors
    /// As [`Volume::mount`]; [`Error::HeldGone`] where an inode of the list is not there: nothing was reclaimed then.
    /// [`Error::DomainFailed`], [`Error::Invalid`] for what is no such list.
    pub fn mount_holding(devices: Vec<Arc<dyn Device>>, options: MountOptions, held: &[HeldInode]) -> Result<Volume> {
        Self::mount_with(devices, options, Purpose::Hold(LookupCounts::of_list(held)?))
    }

    fn mount_with(devices: Vec<Arc<dyn Device>>, mut options: MountOptions, purpose: Purpose) -> Result<Volume> {
        let switches = ablation::check().map_err(|e| {
            tracing::error!("{e}");
            Error::Invalid(
                "BRAIDFS_ABLATION has a name that is no switch: there are gate, slots, cells, arcs, leader, all",
            )
        })?;
        if !switches.is_empty() {
            tracing::warn!("switches for experiments are on (BRAIDFS_ABLATION): threads share more than they need");
        }
        // before there are threads of ours, when the kernel can say so at once
        membarrier::prepare();
        if options.cache_bytes == 0 {
            options.cache_bytes = rustix::system::sysinfo().totalram / 4;
        }
        let (mut sb, mut devices) = read_super(&devices)?;
        let mut overlays = Overlays::default();
        let mut lease = None;
        if !options.read_only {
            sb.may_change()?;
            lease = Lease::take(&devices, &sb, options.kill_when_stopped)?;
            if lease.is_some() {
                // others may have changed it until then
                (sb, devices) = read_super(&devices)?;
                sb.may_change()?;
            }
        } else {
            if !options.checkpoint_only {
                Lease::look(&devices, &sb)?;
            }
            overlays = Overlays::new(devices);
            devices = overlays.devices();
        }
        let read_only = options.read_only;
        let mounted = open(sb, devices, options, purpose)?;
        if read_only {
            mounted.shared.read_only.store(true, Ordering::Relaxed);
        }
        *mounted.pool.write() = Some(ticket::Pool::new("braidfs-sync", SYNC_THREADS));
        let volume = Volume::new(mounted, overlays, lease);
        volume.start_background()?;
        Ok(volume)
    }
}

fn open(
    mut sb: SuperBlock,
    devices: Vec<Arc<dyn Device>>,
    options: MountOptions,
    purpose: Purpose,
) -> Result<Arc<MountedVolume>> {
    let replays = matches!(purpose, Purpose::Replay);
    let (holding, held) = match purpose {
        Purpose::Hold(held) => (true, held),
        Purpose::Use | Purpose::Replay => (false, LookupCounts::default()),
    };
    let store = Arc::new(Store::new(devices, &sb)?);
    let bat = Bat::read(&store, &sb)?;
    // a domain may have been added, and the superblocks not told of it
    let told = std::mem::replace(&mut sb.domains, bat.domains().into());
    let g = store.geometry();
    let volume = u64::from(g.groups) * u64::from(g.group_blocks()) * BLOCK_BYTES as u64;
    let names = (options.cache_bytes / 64).min(volume / 256).clamp(NAMES_MIN, NAMES_MAX);
    let mut shared = Shared::new(options, &sb);
    shared.replays = replays;
    let shared = Arc::new(shared);
    let room = super::resize::most_groups(&sb) as usize;
    let most = usize::from(sb.max_domains.get());
    let siblings = Arc::new(Siblings::new(bat.owners(), room, most));
    let opened = open_domains(&sb, &store, &shared, &siblings, &bat)?;
    store.release_journal_buffers();
    let (domains, mut recovered): (Vec<_>, Vec<_>) = opened.into_iter().unzip();
    let mut bat = bat;
    free_returned_groups(&domains, &store, &mut bat, &siblings)?;
    let traces: Vec<String> = recovered.iter_mut().flat_map(|r| std::mem::take(&mut r.traces)).collect();
    traces.iter().for_each(|t| tracing::warn!("{t}"));
    domains.iter().for_each(|d| siblings.add(d));
    let syncing = Syncing::new(most);
    let committers = Committers::new(domains.len());
    let mounted = Arc::new(MountedVolume {
        label: Mutex::new(sb.label),
        compat: AtomicU32::new(sb.compat.get()),
        placement: Placement::from_u8(sb.placement).unwrap_or_default(),
        sb: RwLock::new(sb),
        store,
        shared,
        siblings,
        domains: Domains::new(domains, most),
        bat: Mutex::new(bat),
        tenants: Mutex::new(()),
        quota_trees: Mutex::new(()),
        quotas: Mutex::default(),
        quotas_unwritten: AtomicBool::new(false),
        rename: Mutex::new(()),
        last_move: Mutex::new(None),
        next_domain: AtomicU32::new(0),
        traces,
        zombies: Mutex::default(),
        unreaped: Mutex::default(),
        maybe_stale: AtomicBool::new(false),
        evicting: Mutex::new(()),
        calls: Arc::default(),
        emptying: Mutex::default(),
        becomes_smaller: AtomicBool::new(false),
        cleaner_share: Mutex::default(),
        drained: Default::default(),
        resting: AtomicU32::new(0),
        claim_end: AtomicU32::new(u32::MAX),
        pool: RwLock::new(None),
        committers,
        syncing,
        dentries: DentryCache::new(names),
        root_generation: OnceLock::new(),
        held,
        _frames: frames::Used::begin(),
    });
    mounted.complete(recovered, holding, replays, told.get())?;
    Ok(mounted)
}

/// Makes groups free that their domains had given back when the volume stopped.
fn free_returned_groups(domains: &[Arc<Domain>], store: &Store, bat: &mut Bat, siblings: &Siblings) -> Result<()> {
    if domains.iter().any(|d| !d.space.returned().is_empty()) {
        // only the daemon may have died: what says so may not be durable yet
        store.flush()?;
    }
    for g in domains.iter().flat_map(|d| d.space.returned()) {
        // its domain knew nothing of it any more when the volume stopped
        bat.set_free(&**store.device(0), *g)?;
        siblings.set_owner(*g, None);
    }
    Ok(())
}

/// Opens and replays one domain.
///
/// # Errors
/// As [`Domain::open`]; damage of its header.
pub(crate) fn open_domain(
    sb: &SuperBlock,
    store: &Arc<Store>,
    shared: &Arc<Shared>,
    peers: &Arc<dyn Peers>,
    bat: &Bat,
    id: DomainId,
) -> Result<(Arc<Domain>, Recovered)> {
    let pair = sb.domain_table.get() + 2 * u64::from(id.0);
    let mut buf = vec![0u8; 2 * BLOCK_BYTES];
    store.device(0).read(pair, &mut buf).map_err(Error::Io)?;
    let (copy, seq, mut header) = DomainHeader::from_pair(&buf, store.volume, pair, id.0)?;
    let fails = header.flags.get() & FAILED != 0 && !(shared.replays && header.flags.get() & CLEAN == 0);
    if header.flags.get() & (FAILED | CLEAN) == FAILED && !shared.replays && !shared.options.read_only {
        // What stands in its journal, its fsyncs among it, is not in its tables yet, and becomes nothing in a domain that has failed:
        // the others would drop the names of inodes that it has, for good.
        let why = format!(
            "{id}: a check was cut off before it replayed the journal: run fsck.braidfs, or mount it read-only (-o ro)"
        );
        return Err(braidfs_format::Corrupt::new("domain header", why).into());
    }
    if let Some(lost) = other_copy_lost(&buf, BlockKind::Domain, store.volume, pair, (copy, seq)) {
        // what it does not know of stands in the journal
        tracing::warn!("{id}: {lost}; its journal is replayed");
        header.flags = (header.flags.get() & !CLEAN).into();
        // nor can one without a journal know that it was not in use
        header.scratch_at_rest = 0;
    }
    let groups = bat.groups_of(id);
    let start = BlockAddr(header.journal_start.get());
    if !store.geometry().contains(start, u64::from(header.journal_blocks.get()))
        || !groups.contains(&store.geometry().group_of(start))
    {
        return Err(braidfs_format::Corrupt::new(
            "domain header",
            format!("{id}: the journal lies outside its groups"),
        )
        .into());
    }
    let h = HeaderPair { pair, copy, seq, durable: seq, header };
    let (d, rec) = Domain::open(id, store.clone(), shared.clone(), peers.clone(), h, &groups, sb.mlogs.get())?;
    if fails {
        d.fail(&Error::Busy("it failed before; run fsck.braidfs".into()));
    }
    Ok((Arc::new(d), rec))
}

/// So few of `domains` domains are not worth a thread: those of a small volume are done sooner than threads start.
pub(super) fn grain(store: &Store, domains: usize) -> usize {
    if store.geometry().groups < SMALL_GROUPS { domains } else { 1 }
}

/// Opens and replays all domains side by side.
fn open_domains(
    sb: &SuperBlock,
    store: &Arc<Store>,
    shared: &Arc<Shared>,
    siblings: &Arc<Siblings>,
    bat: &Bat,
) -> Result<Vec<(Arc<Domain>, Recovered)>> {
    let peers: Arc<dyn Peers> = siblings.clone();
    let n = usize::from(sb.domains.get());
    shared.workers.each(n, grain(store, n), |i| open_domain(sb, store, shared, &peers, bat, DomainId(i as u16)))
}

impl MountedVolume {
    /// All that a mount does once the domains are open: recovery, and what an earlier mount left half done. `replays`: it ends
    /// with that ([`Volume::mount_to_replay`]). `told`: how many domains the superblock tells of.
    fn complete(self: &Arc<Self>, recovered: Vec<Recovered>, holding: bool, replays: bool, told: u16) -> Result<()> {
        self.count_unclaimed();
        if holding {
            self.all_domains_work()?;
        }
        let unread = self.start(recovered, holding)?;
        if unread.count > 0 && !replays {
            self.end_what_is_doubtful(&unread);
        }
        if holding {
            // recovery goes on without a domain that it cannot recover
            self.all_domains_work()?;
        }
        if told != self.sb.read().domains.get() {
            self.tell_domains()?;
        }
        self.go_on_draining();
        self.check_tenants()?;
        if !self.shared.options.read_only {
            self.keep_drained(&mut self.emptying.lock());
        }
        self.count_tenants_inodes();
        // as of the last checkpoint the root directory may lie where something else does by now
        if !self.shared.options.checkpoint_only {
            self.load_quotas()?;
        }
        Ok(())
    }

    /// Not all links between domains could be compared, and the next mount takes back, or gives back, what this one could not see. So
    /// nothing changes in the domains that passed a failure: no name or number is taken there that may be another inode's, no
    /// tombstone is forgotten. Nor in those where something could not be read: it may be there again in a moment.
    fn end_what_is_doubtful(&self, unread: &Unread) {
        let count = unread.count;
        let why = format!(
            "{count} inodes or blocks of node tables could not be read, or not judged, to compare links between domains; \
             run fsck.braidfs"
        );
        for d in self.domains.iter().filter(|d| d.has_passed_failure() || unread.domains.contains(&d.id)) {
            d.fail(&Error::Busy(why.clone()));
        }
    }

    /// Completes recovery, makes it durable, and marks the domains as in use. What could not be read of the links between domains:
    /// the next mount compares them again.
    fn start(self: &Arc<Self>, recovered: Vec<Recovered>, holding: bool) -> Result<Unread> {
        // as of the last checkpoint nothing is compared
        let looks = self.shared.options.checkpoint_only;
        let passed = !looks && self.domains.iter().any(|d| d.has_passed_failure());
        let mut unread = Unread::default();
        let dirty = passed || recovered.iter().any(|r| r.dirty);
        if dirty {
            let n: usize = recovered.iter().map(|r| r.transactions).sum();
            tracing::info!("recovering: {n} transactions replayed");
            self.maybe_stale.store(true, Ordering::Relaxed);
            // Only the daemon may have died: what was read so far need not be durable. Nothing may be written upon it before.
            self.store.flush()?;
            self.mark_recovery_begun()?;
            if passed {
                tracing::info!("a domain had failed: all links between domains are compared");
            }
            let unclean: Vec<bool> = recovered.iter().map(|r| r.dirty).collect();
            let reconciled = self.reconcile(recovered, passed)?;
            unread = reconciled.unread;
            if unread.by_any {
                let unclean = self.domains.iter().zip(unclean).filter(|(_, unclean)| *unclean);
                unread.domains.extend(unclean.map(|(d, _)| d.id));
            }
            if unread.count > 0 {
                self.mark_left_unjudged(&unread.domains)?;
            }
            let judged = reconciled.judged;
            let commit = || {
                self.commit_recovered()?;
                // What was judged is forgotten once all that followed from it is durable, of domains too that have left that to their
                // tables. And the next transactions may have to be in the journals, with their lists of orphans.
                let lacks = |d: &Arc<Domain>| d.failed().is_none() && d.lacks_journal_for(judged.len());
                if !judged.is_empty() && self.domains.iter().any(lacks) { self.checkpoint_all() } else { Ok(()) }
            };
            planted::in_order(Bug::JudgedEarly, commit, || self.forget_judged(&judged))?;
        }
        self.shared.recovering.store(false, Ordering::Relaxed);
        // the GC of an earlier mount has not finished: entries may be stale still
        if self.domains.iter().any(|d| d.needs_gc()) {
            self.maybe_stale.store(true, Ordering::Relaxed);
        }
        if !dirty {
            self.check_held()?;
            // only the daemon may have died, right after it wrote a header: none is written over the other one before
            self.store.device(0).flush()?;
        }
        self.mark_all_used(dirty, holding)?;
        if dirty {
            if let Err(e) = self.tell_size() {
                tracing::warn!("a superblock besides the one that counts tells of another size: {e}");
            }
            self.checkpoint_all()?;
        }
        if unread.count == 0 && passed && self.domains.iter().all(|d| d.failed().is_none()) {
            // what a domain that does not work takes back is not known yet
            self.domains.iter().filter(|d| d.has_passed_failure()).try_for_each(|d| d.forget_passed_failure())?;
        }
        Ok(unread)
    }
}
