//! Where a domain belongs on a machine with several NUMA nodes: memory for its pages comes from its node, and threads of the
//! volume's own run on the node's CPUs while they work for it.
//!
//! A domain's node is that of the device that most of its block groups are on, where the kernel knows one and the volume has devices
//! at several; else domains are dealt out to the nodes by their numbers: one device serves threads of all nodes. It stays as long as
//! the domain is open. A thread that a program brings, or a front end, runs where it does.

use crate::cell::frames::homes::Homes;
use crate::cell::frames::pool::Home;
use crate::numa::{Binder, Numa, System, Topology, tell_refused};
use crate::store::Store;
use crate::types::{DomainId, MountOptions};
use braidfs_sync::workers;
use std::cell::Cell;
use std::sync::Arc;

thread_local! {
    /// Place of the node on whose CPUs this thread runs. It is a thread of one volume.
    static AT: Cell<Option<usize>> = const { Cell::new(None) };
}

/// The nodes, where there are several.
#[derive(Debug)]
pub struct Nodes {
    topology: Topology,
    binder: Arc<dyn Binder>,
    homes: Homes,
}

/// Where a domain belongs; nowhere by default.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    home: Home,
    /// Place of its node, and the node's number.
    node: Option<(usize, u32)>,
}

impl Place {
    /// Whose its pages are.
    #[inline]
    pub fn home(&self) -> Home {
        self.home
    }

    /// Number of its node, where there are several.
    pub fn node(&self) -> Option<u32> {
        self.node.map(|(_, number)| number)
    }
}

impl Nodes {
    /// Those that a volume with these options is placed on; `None` where there is one, or it is not to be.
    pub fn new(options: &MountOptions) -> Option<Self> {
        let (topology, binder) = match &options.numa {
            Numa::Off => return None,
            Numa::Auto => (Topology::of_machine(), None),
            Numa::Given { topology, binder } => (topology, Some(binder)),
        };
        if !topology.are_several() {
            return None;
        }
        let binder = binder.cloned().unwrap_or_else(System::get);
        let homes = Homes::new(topology.nodes(), &binder, options.cache_bytes);
        let numbers: Vec<u32> = topology.nodes().iter().map(|n| n.number).collect();
        tracing::info!("domains are placed by NUMA node: {numbers:?}");
        Some(Self { topology: topology.clone(), binder, homes })
    }

    fn place(&self, id: DomainId, store: &Store, groups: &[u32]) -> Place {
        let node = |i: usize| self.topology.of_device(store.device(i).block_device()?);
        let at_devices: Vec<Option<usize>> = (0..store.devices()).map(node).collect();
        let differ = at_devices.iter().any(|at| *at != at_devices[0]);
        let by_device = if differ { main_device(store, groups).and_then(|i| at_devices[i]) } else { None };
        let at = by_device.unwrap_or_else(|| usize::from(id.0) % self.topology.nodes().len());
        Place { home: self.homes.of(at), node: self.topology.nodes().get(at).map(|n| (at, n.number)) }
    }

    /// The calling thread runs on the CPUs of this place's node from now on, where it is one of the volume's own.
    pub fn come_near(&self, place: Place) {
        if let Some((at, _)) = place.node
            && workers::is_own()
            && AT.replace(Some(at)) != Some(at)
        {
            self.bind(at);
        }
    }

    fn bind(&self, at: usize) {
        let Some(node) = self.topology.nodes().get(at) else { return };
        if let Err(e) = self.binder.bind_thread(&node.cpus) {
            tell_refused("a thread", &e);
        }
    }
}

/// The device that most of these groups are on, of several the first.
fn main_device(store: &Store, groups: &[u32]) -> Option<usize> {
    let mut on = vec![0usize; store.devices()];
    for g in groups {
        if let Ok((i, _)) = store.place(store.geometry().group_start(*g), 1)
            && let Some(n) = on.get_mut(i)
        {
            *n += 1;
        }
    }
    (0..on.len()).rev().max_by_key(|i| on[*i])
}

/// Where a domain with these groups belongs.
pub(super) fn place_of(nodes: Option<&Nodes>, id: DomainId, store: &Store, groups: impl FnOnce() -> Vec<u32>) -> Place {
    nodes.map_or(Place { home: Home::ANYWHERE, node: None }, |n| n.place(id, store, &groups()))
}

#[cfg(test)]
mod tests;
