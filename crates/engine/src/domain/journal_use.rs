//! Whether a domain has a journal, and what that is for: what `scratch` and those who ask it look at.

use braidfs_format::domain::{DomainHeader, JournalMode};
use std::sync::atomic::{AtomicBool, AtomicU8};

/// How a domain uses its journal.
#[derive(Debug)]
pub(super) struct JournalUse {
    /// Number of the [`JournalMode`] that its header says.
    pub mode: AtomicU8,
    /// No name crosses its border: it has no journal, or is about to have none.
    pub closed: AtomicBool,
    /// Commits go to the journal.
    pub keeps: AtomicBool,
    /// The running transaction has to fit the journal.
    pub fits: AtomicBool,
    /// Blocks are reserved for all dirty pages, since none is overwritten in place, or will not be soon.
    pub reserves_all: AtomicBool,
}

impl JournalUse {
    /// As `header` says. Until the mount has marked it as in use any domain keeps a journal.
    pub fn of(header: &DomainHeader) -> Self {
        let mode = header.journal_mode();
        Self {
            mode: AtomicU8::new(JournalMode::number(mode)),
            closed: AtomicBool::new(mode == Some(JournalMode::Scratch)),
            keeps: AtomicBool::new(true),
            fits: AtomicBool::new(true),
            reserves_all: AtomicBool::new(mode == Some(JournalMode::Data)),
        }
    }
}
