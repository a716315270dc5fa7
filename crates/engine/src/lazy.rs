//! Values that few cells have: extents of a small file, attributes, what waits for another domain.
//!
//! A million cached inodes are as large as what each of them has for nothing: a value that is empty takes one word here.

use std::ops::{Deref, DerefMut};

/// A type with a value that stands for nothing.
pub trait Empty: Sized + 'static {
    /// That value, to read.
    const EMPTY: &'static Self;
    /// A new one, to change.
    fn empty() -> Self;
}

impl<T: 'static> Empty for Vec<T> {
    const EMPTY: &'static Self = &Vec::new();
    fn empty() -> Self {
        Self::new()
    }
}

/// A value that is mostly empty. To borrow it for a change makes it, so that callers on the way of every operation ask
/// [`Self::there`] instead.
#[derive(Debug, Clone)]
pub struct Lazy<T>(Option<Box<T>>);

impl<T> Default for Lazy<T> {
    fn default() -> Self {
        Self(None)
    }
}

impl<T: Empty> Lazy<T> {
    /// This value, which is not empty.
    pub fn of(value: T) -> Self {
        Self(Some(Box::new(value)))
    }
    /// The value to change, where there is one.
    pub fn there(&mut self) -> Option<&mut T> {
        self.0.as_deref_mut()
    }
    /// Takes the value out.
    pub fn take(&mut self) -> T {
        self.0.take().map_or_else(T::empty, |value| *value)
    }
}

impl<T> From<Vec<T>> for Lazy<Vec<T>> {
    fn from(value: Vec<T>) -> Self {
        Self((!value.is_empty()).then(|| Box::new(value)))
    }
}

impl<T: Empty> Deref for Lazy<T> {
    type Target = T;
    fn deref(&self) -> &T {
        self.0.as_deref().unwrap_or(T::EMPTY)
    }
}

impl<T: Empty> DerefMut for Lazy<T> {
    fn deref_mut(&mut self) -> &mut T {
        self.0.get_or_insert_with(|| Box::new(T::empty()))
    }
}
