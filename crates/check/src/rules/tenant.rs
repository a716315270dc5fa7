//! Rules of what a domain's header says of a tenant.

use braidfs_format::InodeNo;
use braidfs_format::codec::Reader;
use braidfs_format::domain::{CLEAN, DomainHeader, TENANT_RATE_MAX, TENANT_RATES, TenantRate};
use braidfs_format::file_kind::FileKind;
use braidfs_format::inode::{Inode, Link};
use braidfs_format::node::{DIR, NodeEntry, NodeKind, NodeRecord};
use braidfs_format::super_block::MAX_DEVICES;
use std::collections::HashSet;

/// The least limit of a tenant, blocks: what the engine takes.
const BLOCKS_MIN: u64 = 256;
/// The least ceiling of memory, bytes.
const MEMORY_MIN: u64 = 4 << 20;
/// The highest limit of inodes: what the engine takes, more than a volume can have.
const INODES_MAX: u64 = 1 << 56;

/// What does not hold of a tenant's fields.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wrong {
    /// The directory cannot be the root of this domain's tenant.
    Root(String),
    /// The name is none.
    Name(String),
    /// The limit is none.
    Limit(String),
    /// The limit of inodes is none.
    Inodes(String),
    /// A rate is none; which one.
    Rate(usize, String),
    /// The soft limit is none.
    Soft(String),
    /// The limits of memory are none.
    Memory(String),
    /// What it says of its journal is nothing.
    Journal(String),
    /// The limit of processor time is none.
    Serving(String),
    /// The devices are none of the volume's.
    Devices(String),
}

impl Wrong {
    /// The finding in words, for people.
    pub fn why(self) -> String {
        let (Self::Root(why)
        | Self::Name(why)
        | Self::Limit(why)
        | Self::Inodes(why)
        | Self::Rate(_, why)
        | Self::Soft(why)
        | Self::Memory(why)
        | Self::Journal(why)
        | Self::Serving(why)
        | Self::Devices(why)) = self;
        why
    }
}

/// The names of tenants of a volume, one header after another.
#[derive(Debug, Default)]
pub struct Names(HashSet<String>);

impl Names {
    /// Tells why the name of the tenant in `h`, if there is one, cannot be its name: another has it.
    pub fn taken(&mut self, h: &DomainHeader) -> Option<String> {
        let name = h.tenant_name_str();
        let why = format!("another tenant is {name:?} already");
        (h.tenant_root.get() > 0 && !self.0.insert(name)).then_some(why)
    }
}

/// Whether this node is the root directory of the tenant in `h`, which has one.
pub fn is_root(h: &DomainHeader, e: &NodeEntry) -> bool {
    e.used() && e.flags & DIR != 0 && e.generation == h.tenant_generation.get()
}

/// That the root directory is not there, in words.
pub fn rootless(h: &DomainHeader) -> String {
    format!("the directory of tenant {:?}, inode {}, is not there", h.tenant_name_str(), h.tenant_root)
}

/// Tells `wrong` what does not hold of the tenant in `h`; `owner` is the domain to which a number of an inode belongs, `devices`
/// how many the volume has.
pub fn fields(h: &DomainHeader, devices: usize, owner: impl Fn(InodeNo) -> Option<u16>, mut wrong: impl FnMut(Wrong)) {
    let root = h.tenant_root.get();
    let blank = h.tenant_generation.get() == 0 && h.tenant_blocks.get() == 0 && h.tenant_name == [0; 64];
    let blank = blank && h.tenant_inodes.get() == 0 && h.tenant_rates == [TenantRate::default(); 4];
    let blank = blank && soft(h) == (0, 0, 0) && memory(h) == (0, 0) && h.tenant_journal == 0;
    let blank = blank && h.tenant_serving == TenantRate::default() && h.tenant_devices.get() == 0;
    if root == 0 {
        if !blank {
            wrong(Wrong::Root("a tenant without a directory".into()));
        }
        return;
    }
    if owner(InodeNo(root)) != Some(h.domain.get()) {
        return wrong(Wrong::Root(format!("the tenant's directory {root} is not of this domain")));
    }
    if !name_holds(&h.tenant_name) {
        wrong(Wrong::Name(format!("{:?} is no name of a tenant", h.tenant_name_str())));
    }
    let blocks = h.tenant_blocks.get();
    if blocks > 0 && blocks < BLOCKS_MIN {
        wrong(Wrong::Limit(format!("the tenant's limit is {blocks} blocks")));
    }
    let inodes = h.tenant_inodes.get();
    if inodes > INODES_MAX {
        wrong(Wrong::Inodes(format!("the tenant's limit is {inodes} inodes")));
    }
    for (i, (rate, name)) in h.tenant_rates.iter().zip(TENANT_RATES).enumerate() {
        if !rate_holds(rate) {
            let TenantRate { per_second, burst } = rate;
            wrong(Wrong::Rate(i, format!("the tenant's {name} is {per_second}, at once {burst}")));
        }
    }
    if !rate_holds(&h.tenant_serving) {
        let TenantRate { per_second, burst } = h.tenant_serving;
        wrong(Wrong::Serving(format!("the tenant's serving time is {per_second} ns a second, at once {burst}")));
    }
    // numbers of devices that have left may stand beside others, after a crash
    let bits = h.tenant_devices.get();
    if bits != 0 && (bits >> MAX_DEVICES != 0 || bits & ((1 << devices.min(MAX_DEVICES)) - 1) == 0) {
        wrong(Wrong::Devices(format!("the tenant's devices are {bits:#x}, of {devices}")));
    }
    let (most, since, grace) = soft(h);
    if most > 0 && (most < BLOCKS_MIN || blocks > 0 && most > blocks) || most == 0 && (since, grace) != (0, 0) {
        wrong(Wrong::Soft(format!("the tenant's soft limit is {most} blocks, exceeded since {since}")));
    }
    let (least, most) = memory(h);
    if most > 0 && most < MEMORY_MIN.max(least) {
        wrong(Wrong::Memory(format!("the tenant's memory is {least} bytes at least and {most} at most")));
    }
    if h.is_scratch() && kept_links(h).is_none() {
        wrong(Wrong::Journal(
            "the tenant has no journal, and no record from which its directory can be made again".into(),
        ));
    } else if h.is_discarded() && h.flags.get() & CLEAN != 0 {
        wrong(Wrong::Journal("the tenant has no journal, and was both in use and unmounted".into()));
    }
}

/// Names of the root directory of a domain without a journal, as its header keeps them; `None` where it keeps no such directory.
pub fn kept_links(h: &DomainHeader) -> Option<Vec<Link>> {
    let mut r = Reader::new(h.scratch_root_record(), "root directory of a tenant");
    let record = NodeRecord::decode(&mut r).ok().filter(|r| r.kind == NodeKind::Inode && r.flags & DIR != 0)?;
    let numbers = (InodeNo(h.tenant_root.get()).node(), h.tenant_generation.get());
    let inode = Inode::decode(&record.payload).ok().filter(|_| (record.node, record.generation) == numbers)?;
    let is_dir = FileKind::from_mode(inode.mode) == Some(FileKind::Dir);
    Some(inode.links).filter(|links| is_dir && !links.is_empty())
}

fn rate_holds(rate: &TenantRate) -> bool {
    let (per_second, burst) = (rate.per_second.get(), rate.burst.get());
    per_second <= TENANT_RATE_MAX && burst <= TENANT_RATE_MAX && (per_second > 0 || burst == 0)
}

/// Least and most bytes of memory.
fn memory(h: &DomainHeader) -> (u64, u64) {
    (h.tenant_memory_min.get(), h.tenant_memory_max.get())
}

/// The soft limit, since when it is exceeded, and for how long it may be.
fn soft(h: &DomainHeader) -> (u64, u64, u32) {
    (h.tenant_soft_blocks.get(), h.tenant_soft_since.get(), h.tenant_grace.get())
}

/// Whether a field holds a name as the engine takes it, padded with zeros.
fn name_holds(field: &[u8; 64]) -> bool {
    let n = field.iter().position(|&b| b == 0).unwrap_or(field.len());
    let text = std::str::from_utf8(&field[..n]);
    (1..field.len()).contains(&n)
        && field[n..].iter().all(|&b| b == 0)
        && text.is_ok_and(|t| !t.chars().any(|c| c.is_control() || c == '/'))
}

/// Makes the domain nobody's.
pub fn clear(h: &mut DomainHeader) {
    (h.tenant_root, h.tenant_generation, h.tenant_blocks) = (0.into(), 0.into(), 0.into());
    h.tenant_inodes = 0.into();
    h.tenant_name = [0; 64];
    h.tenant_rates = [TenantRate::default(); 4];
    no_soft_limit(h);
    any_memory(h);
    journaled(h);
    any_serving(h);
    any_devices(h);
}

/// Has it a journal, as the mount says.
pub fn journaled(h: &mut DomainHeader) {
    (h.tenant_journal, h.scratch_at_rest) = (0, 0);
    h.keep_scratch_root(&[]);
}

/// Takes the limit of processor time away.
pub fn any_serving(h: &mut DomainHeader) {
    h.tenant_serving = TenantRate::default();
}

/// Lets the tenant use all devices: which ones it were nobody knows.
pub fn any_devices(h: &mut DomainHeader) {
    h.tenant_devices = 0.into();
}

/// Takes the limits of memory away.
pub fn any_memory(h: &mut DomainHeader) {
    (h.tenant_memory_min, h.tenant_memory_max) = (0.into(), 0.into());
}

/// Takes a rate away: which one it was nobody knows.
pub fn unlimited_rate(h: &mut DomainHeader, which: usize) {
    h.tenant_rates[which] = TenantRate::default();
}

/// Takes the soft limit away, the hard one stays.
pub fn no_soft_limit(h: &mut DomainHeader) {
    (h.tenant_soft_blocks, h.tenant_soft_since, h.tenant_grace) = (0.into(), 0.into(), 0.into());
}

/// Gives the tenant another name.
pub fn rename(h: &mut DomainHeader, name: &str) {
    h.tenant_name = [0; 64];
    let n = name.len().min(63);
    h.tenant_name[..n].copy_from_slice(&name.as_bytes()[..n]);
}

/// Takes the limit of inodes away: which one it was nobody knows, and with the least one the tenant could make nothing.
pub fn unlimited_inodes(h: &mut DomainHeader) {
    h.tenant_inodes = 0.into();
}

/// Sets the limit to the least there is.
pub fn least(h: &mut DomainHeader) {
    h.tenant_blocks = BLOCKS_MIN.into();
    if h.tenant_soft_blocks.get() > BLOCKS_MIN {
        no_soft_limit(h);
    }
}
