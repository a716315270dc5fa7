//! What `braidfs tenant` and `braidfs quota` have in common: limits that the server of a mounted volume keeps.

use crate::failure::{Failure, Outcome, server_error};
use crate::mounted;
use rustix::io::Errno;
use serde::Serialize;
use std::fs::File;
use std::io;
use std::path::Path;

/// A directory of the volume, to ask the server on.
pub fn open(directory: &Path) -> Result<File, Failure> {
    mounted::enter(directory)
        .map_err(|e| Failure::at("cannot open", directory.display(), mounted::host_says(directory, &e)))
}

/// Why the server did not do what `command` asked it on `place`; `missing` is said where there is no such thing.
pub fn refused(command: &str, place: &Path, missing: &str, e: &io::Error) -> Failure {
    let why = match Errno::from_io_error(e) {
        Some(Errno::NOTTY) => "no braidfs is mounted there, or its server is of an older version".into(),
        Some(Errno::ROFS) => "it is mounted read-only, or its domain failed".into(),
        Some(Errno::NOENT) => missing.into(),
        _ => server_error(e),
    };
    Failure::at(command, place.display(), why)
}

/// Says it as JSON.
pub fn say_json<T: Serialize>(command: &str, what: &T) -> Outcome {
    let json = serde_json::to_string_pretty(what).map_err(|e| Failure::new(format!("{command}: {e}")))?;
    crate::say(format_args!("{json}"))?;
    Ok(0)
}
