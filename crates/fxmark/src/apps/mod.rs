//! Applications, as loads: their file operations without their computing.
//!
//! Filebench's personalities keep its parameters (files, sizes, order of operations); every worker is an instance with
//! one thread and file set, as SpanFS (4.3) and Max run them. `mail` is a replay, not Exim: see [`mail`].

mod aged;
mod catd;
mod filebench;
mod fileset;
mod full;
pub mod mail;
mod onefile;
mod sync;

use crate::fs::Fs;
use crate::worker::{Ctx, Load};

/// The load of an application.
pub fn build<F: Fs>(name: &str, c: &Ctx<F>) -> Box<dyn Load<F>> {
    match name {
        "varmail" => full::first(c, filebench::Varmail::new(c)),
        "fileserver" => full::first(c, filebench::FileServer::new(c, false)),
        "mail" => Box::new(mail::Mail::new(c)),
        "catd_append" => Box::new(catd::Append::new(c)),
        "catd_truncate" => Box::new(catd::Truncate::new(c)),
        "catd_delete" => Box::new(catd::Delete::new(c)),
        "aged_overwrite" => Box::new(aged::Overwrites::new(c)),
        "syncwrite" => Box::new(sync::SyncWrites::new(c, false)),
        "syncwrite_seq" => Box::new(sync::SyncWrites::new(c, true)),
        "write_seq" => Box::new(onefile::Sequential::new(c, false)),
        "write_osync" => Box::new(onefile::Sequential::new(c, true)),
        "write_rand" => Box::new(onefile::Random::new(c)),
        "tokubench" => Box::new(sync::Tree::new(c)),
        "kfsmark" => {
            let (bytes, piece) = (c.scale.sizes.file_or(51_200), c.scale.sizes.request_or(16 << 10));
            Box::new(sync::SyncFiles::new(c, bytes as usize, piece as usize))
        }
        // the neighbour is a worker in the background
        "tenant" if c.background => Box::new(filebench::FileServer::new(c, true)),
        "tenant" => Box::new(sync::SyncFiles::new(c, 4096, 4096)),
        _ => Box::new(catd::Create::new(c)),
    }
}
