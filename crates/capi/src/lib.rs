//! The C library, declared by `include/braidfs.h`, which says what each function does: the calls of [`braidfs_fs`] behind
//! opaque handles.
//!
//! Every function answers a negative errno where it fails and leaves a text for [`error::braidfs_error`]. No panic comes
//! out of one: the first is the last thing that the library does in its process (`error.rs`).
//!
//! `unsafe` is what a caller must keep to, said once in the header: pointers are null or point to what the prototype says,
//! handles come from their open and were not closed yet, strings end with a zero byte, buffers have the length beside them.

// said above, for all of them
#![allow(clippy::missing_safety_doc)]
#![cfg_attr(
    not(test),
    deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::unreachable, clippy::todo)
)]

mod arguments;
mod attributes;
mod dir;
mod error;
mod file;
mod fork;
mod handle;
mod names;
mod pinned;
mod volume;
