//! What is so at the moment at which a domain fails.

use super::with_unsynced;
use crate::domain::Domain;
use crate::fsync::batch::Gathered;
use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata};

thread_local! {
    /// The domain that this thread looks at when it hears of an error.
    static LOOKS_AT: RefCell<Option<Arc<Domain>>> = const { RefCell::new(None) };
    /// Whether a commit waited then.
    static WAITS: Cell<bool> = const { Cell::new(false) };
}

/// Hears that the domain fails, and notes whether a commit waits then. For all threads of the process: of what another thread tells
/// for the first time tracing notes whether anybody hears it there, and that would hold here.
struct Hears;

impl tracing::Subscriber for Hears {
    fn enabled(&self, told: &Metadata<'_>) -> bool {
        *told.level() == Level::ERROR
    }
    fn event(&self, _: &Event<'_>) {
        LOOKS_AT.with_borrow(|domain| domain.iter().for_each(|d| WAITS.set(d.has_io())));
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// Something is gathered, and then the next file's gathering panics: the domain fails before its commit goes on, which would make
/// blocks durable that nobody writes.
#[test]
fn a_commit_that_waits_for_what_was_gathered_finds_the_domain_failed() {
    let (v, _, files) = with_unsynced(1);
    let i = v.mounted().clone();
    let c = i.cell(files[0]).unwrap();
    let domain = i.dom(c.domain).clone();
    let gathered = i.gather(&c, false, true).unwrap();
    assert!(matches!(gathered, Gathered::Ready(_)) && domain.has_io());
    tracing::subscriber::set_global_default(Hears).unwrap();
    // with what others have told for the first time just now
    tracing::callsite::rebuild_interest_cache();
    LOOKS_AT.set(Some(domain.clone()));
    catch_unwind(AssertUnwindSafe(|| {
        let _gathered = gathered;
        panic!("on purpose")
    }))
    .unwrap_err();
    LOOKS_AT.set(None);
    assert!(WAITS.get(), "the commit was let go before the domain had failed");
    assert!(domain.failed().is_some() && !domain.has_io());
    v.crash();
}
