//! What of a tenant is to move to other devices, and when that is tried.

use crate::device_set::DeviceSet;
use crate::types::DomainId;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// What of a tenant lies on devices that it may not use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Elsewhere {
    /// Block groups of its domain that are there.
    pub groups: u32,
    /// Bytes of data and metadata in these.
    pub bytes: u64,
    /// One of them has the domain's journal: it stays.
    pub journal: bool,
    /// The devices that it may use have no room for all of it: the tenant gets nothing more until they have.
    pub crowded: bool,
}

/// When the background tries which domain again.
#[derive(Debug, Default)]
pub(super) struct Moves(pub HashMap<DomainId, (DeviceSet, Instant, Duration)>);
