//! The checker of a release build: nothing, of no size.

use crate::rank::Rank;
use std::marker::PhantomData;

/// What a lock says of itself.
pub struct Who<R: Rank>(PhantomData<fn() -> R>);

impl<R: Rank> Who<R> {
    #[inline(always)]
    pub const fn new(_key: R::Key) -> Self {
        Self(PhantomData)
    }
    #[inline(always)]
    pub fn wait(&self) -> HeldLock {
        HeldLock(PhantomData)
    }
    #[inline(always)]
    pub fn tried(&self) -> HeldLock {
        HeldLock(PhantomData)
    }
    #[inline(always)]
    pub fn wait_above(&self, _first: &HeldLock) -> HeldLock {
        HeldLock(PhantomData)
    }
}

/// Nobody knows: true.
#[inline(always)]
pub fn taken_downwards<R: Rank>(_above: R::Key, _below: R::Key) -> bool {
    true
}

/// A lock is held by this thread. As in a build with the checker, not to be sent to another thread.
#[derive(Debug)]
pub struct HeldLock(PhantomData<std::sync::MutexGuard<'static, ()>>);

impl HeldLock {
    #[inline(always)]
    pub fn without<T>(&self, f: impl FnOnce() -> T) -> T {
        f()
    }
}
