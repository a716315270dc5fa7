//! What is so at the moment at which a domain fails.

use super::with_unsynced;
use crate::domain::Domain;
use crate::fsync::batch::Gathered;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata};

/// Hears that the domain fails, and notes whether a commit waits then.
struct Hears {
    domain: Arc<Domain>,
    waits: Arc<AtomicBool>,
}

impl tracing::Subscriber for Hears {
    fn enabled(&self, told: &Metadata<'_>) -> bool {
        *told.level() == Level::ERROR
    }
    fn event(&self, _: &Event<'_>) {
        self.waits.store(self.domain.has_io(), Ordering::Relaxed);
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
    let waits = Arc::new(AtomicBool::new(false));
    let hears = Hears { domain: domain.clone(), waits: waits.clone() };
    tracing::subscriber::with_default(hears, || {
        catch_unwind(AssertUnwindSafe(|| {
            let _gathered = gathered;
            panic!("on purpose")
        }))
        .unwrap_err();
    });
    assert!(waits.load(Ordering::Relaxed), "the commit was let go before the domain had failed");
    assert!(domain.failed().is_some() && !domain.has_io());
    v.crash();
}
