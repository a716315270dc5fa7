//! A braidfs volume in this process, with the calls of [`std::fs`]: paths, [`File`] with [`Read`](std::io::Read),
//! [`Write`](std::io::Write) and [`Seek`](std::io::Seek), directories, attributes. The C library and the Python package are
//! made of it.
//!
//! ```
//! use braidfs_fs::{Fs, Options};
//! use std::io::{Read, Seek, Write};
//! # fn main() -> std::io::Result<()> {
//! # let dir = tempfile::tempdir()?;
//! # let image = dir.path().join("vol.img");
//! Fs::format(&image, 64 << 20, &Default::default())?; // an image file of 64 MiB
//! let fs = Fs::open(&[&image], &Options::default())?;
//! fs.create_dir_all("mail/2026")?;
//! let mut file = fs.create("mail/2026/1")?;
//! file.write_all(b"hello")?;
//! file.sync_all()?; // it survives a crash from here on, with its name
//! file.rewind()?;
//! let mut text = String::new();
//! file.read_to_string(&mut text)?;
//! assert_eq!(text, "hello");
//! drop(file);
//! fs.close()?;
//! # Ok(())
//! # }
//! ```
//!
//! **Threads.** [`Fs`], [`File`] and [`ReadDir`] may be used by any number of threads; all calls of the first two take
//! `&self`. Threads that work on different files share no lock.
//!
//! **Users.** There are no permission checks: who may write the devices may do everything. New files belong to the user and
//! group of [`Options`], by default those of the process.
//!
//! **Durability** is that of a mount: what was synced survives, else the last commit (5 s). Dropping an [`Fs`] closes it, but
//! only [`Fs::close`] tells of errors.
//!
//! **Errors** are [`Error`]s, which turn into [`std::io::Error`]s of the kind that the kernel's file systems answer.
//!
//! **One process at a time** has a volume open for writing: the devices are locked. After a `fork` a child must not use an
//! `Fs` of its parent, nor drop it (`std::mem::forget` it): the threads behind it are not there.

#![cfg_attr(
    not(test),
    deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::unreachable, clippy::todo)
)]

mod dir;
mod error;
mod file;
mod fs;
mod metadata;
mod options;
mod pinned;

pub use braidfs::numa::Numa;
pub use braidfs::{
    Advice, AtimeMode, Attr, DataMode, Error as VolumeError, FallocMode, FileKind, InodeNo, MkfsOptions, MountOptions,
    Overwrite, Piece, Placement, RenameMode, SetAttr, SetTime, StatFs, Ticket, Timestamp, Volume, XattrMode,
};
pub use braidfs_device::{Device, OpenError};
pub use dir::{DirEntry, ReadDir};
pub use error::{CloseError, Error, Result};
pub use file::File;
pub use fs::Fs;
pub use metadata::Metadata;
pub use options::{OpenOptions, Options, parse_mkfs};
pub use pinned::Pinned;

/// The blocks of the page are compiled.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/embedding.md")]
struct Embedding;
