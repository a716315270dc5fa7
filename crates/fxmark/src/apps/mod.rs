//! Applications, as loads: their file operations without their computing.
//!
//! Filebench's personalities keep its parameters (files, sizes, order of operations); every worker is an instance with
//! one thread and file set, as SpanFS (4.3) and Max run them. `mail` is a replay, not Exim: see [`mail`].

mod aged;
mod catd;
mod filebench;
mod fileset;
pub mod mail;
mod sync;

use crate::fs::Fs;
use crate::worker::{Ctx, Load};

/// The load of an application.
pub fn build<F: Fs>(name: &str, c: &Ctx<F>) -> Box<dyn Load<F>> {
    match name {
        "varmail" => Box::new(filebench::Varmail::new(c)),
        "fileserver" => Box::new(filebench::FileServer::new(c, false)),
        "mail" => Box::new(mail::Mail::new(c)),
        "catd_append" => Box::new(catd::Append::new(c)),
        "catd_truncate" => Box::new(catd::Truncate::new(c)),
        "catd_delete" => Box::new(catd::Delete::new(c)),
        "aged_overwrite" => Box::new(aged::Overwrites::new(c)),
        "syncwrite" => Box::new(sync::RandomWrites::new(c)),
        "tokubench" => Box::new(sync::Tree::new(c)),
        "kfsmark" => Box::new(sync::SyncFiles::new(c, 51_200, 16 << 10)),
        // the neighbour is a worker in the background
        "tenant" if c.background => Box::new(filebench::FileServer::new(c, true)),
        "tenant" => Box::new(sync::SyncFiles::new(c, 4096, 4096)),
        _ => Box::new(catd::Create::new(c)),
    }
}
