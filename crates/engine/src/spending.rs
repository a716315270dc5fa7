//! Processor time that a thread spends for a tenant.
//!
//! What a thread does is charged to one domain at a time, by the clock that the system keeps for the thread: to wait costs
//! nothing. Where one tenant's request makes another domain commit, that one pays until it is done. The meter is the budget's
//! (`budget/serving.rs`).

use crate::budget::Budget;
use std::cell::RefCell;
use std::sync::Arc;

/// Who pays for what a thread does, since when, and how much he owes for what it did before somebody else paid.
#[derive(Debug)]
struct Payer {
    budget: Arc<Budget>,
    since: u64,
    spent: u64,
}

thread_local! {
    static PAYER: RefCell<Option<Payer>> = const { RefCell::new(None) };
}

/// While it lives, a domain pays for what this thread does; then who paid before goes on. See the module.
#[derive(Debug)]
pub struct Spending {
    before: Option<Payer>,
    /// It is a request, whose time the next ones are taken to need.
    request: bool,
    _of_this_thread: std::marker::PhantomData<*const ()>,
}

impl Spending {
    pub(crate) fn begin(budget: &Arc<Budget>, request: bool) -> Self {
        let now = budget.ran();
        PAYER.with_borrow_mut(|payer| {
            let mut before = payer.replace(Payer { budget: budget.clone(), since: now, spent: 0 });
            if let Some(b) = &mut before {
                b.spent += now.saturating_sub(b.since);
            }
            Self { before, request, _of_this_thread: std::marker::PhantomData }
        })
    }
}

impl Drop for Spending {
    fn drop(&mut self) {
        let mut before = self.before.take();
        let ended = PAYER.with_borrow_mut(|payer| {
            let ended = payer.take()?;
            let now = ended.budget.ran();
            if let Some(b) = &mut before {
                b.since = now;
            }
            *payer = before;
            Some((ended, now))
        });
        if let Some((Payer { budget, since, spent }, now)) = ended {
            budget.charge_time(spent + now.saturating_sub(since), self.request);
        }
    }
}

#[cfg(test)]
mod tests;
