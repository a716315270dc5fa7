//! What the helpers of a commit share.

use super::tx::Tx;
use crate::cell::Cell;
use crate::error::Error;
use crate::types::*;
use braidfs_format::journal::Record;
use braidfs_sync::{Condvar, Mutex, rank};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize};

/// A commit that is under way, as far as others can help.
#[derive(Debug)]
pub struct Work {
    pub(super) tx: Arc<Tx>,
    pub(super) cells: Vec<Arc<Cell>>,
    pub(super) next: AtomicUsize,
    pub(super) active: AtomicUsize,
    pub(super) stop: AtomicBool,
    pub(super) result: Mutex<Share, rank::WorkResult>,
    pub(super) idle: Condvar,
}

/// What helpers hand to the committer.
#[derive(Debug, Default)]
pub(super) struct Share {
    pub(super) records: Vec<Record>,
    pub(super) free: Vec<(NodeId, u32)>,
    pub(super) dead: Vec<Arc<Cell>>,
    pub(super) error: Option<Error>,
}
