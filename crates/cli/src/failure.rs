//! Why a command failed: a message for the user and an exit code.
//!
//! Messages read "what: where: what to do"; the program's name is put before them by `main`. Exit codes are those
//! that e2fsprogs and util-linux made known, since scripts and `mount(8)`/`fsck(8)` act on them.

use braidfs::Error;
use rustix::io::Errno;
use std::fmt::Display;
use std::io;
use std::path::Path;

/// What a command returns: its exit code.
pub type Outcome = Result<u8, Failure>;

/// Exit codes of mount(8) and umount(8).
pub mod mount_code {
    /// The command line is wrong.
    pub const USAGE: u8 = 1;
    /// System error (no memory, cannot fork).
    pub const SYSTEM: u8 = 2;
    /// The mount failed.
    pub const FAILED: u8 = 32;
}

/// Exit codes of fsck(8).
pub mod fsck_code {
    /// fsck found nothing wrong.
    pub const CLEAN: u8 = 0;
    /// Errors were corrected.
    pub const CORRECTED: u8 = 1;
    /// Errors are left.
    pub const UNCORRECTED: u8 = 4;
    /// The check could not be done.
    pub const OPERATIONAL: u8 = 8;
    /// The command line is wrong, for fsck.
    pub const USAGE: u8 = 16;
}

/// A command failed.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    /// What the process exits with.
    pub code: u8,
    /// What, where, what to do. Empty: the reader of our output has gone, there is nobody to tell.
    pub message: String,
}

impl Failure {
    /// With exit code 1.
    pub fn new(message: impl Into<String>) -> Self {
        Self { code: 1, message: message.into() }
    }
    /// An operation of the volume or the host failed on `place`.
    pub fn at(what: &str, place: impl Display, why: impl Display) -> Self {
        Self::new(format!("{what} {place}: {why}"))
    }
    /// The same failure with another exit code.
    pub fn with_code(self, code: u8) -> Self {
        Self { code, ..self }
    }
    /// Output could not be written. A closed pipe (`braidfs ls … | head`) is silent.
    pub fn output(e: &io::Error) -> Self {
        if e.kind() == io::ErrorKind::BrokenPipe {
            // What a shell shows for a program that SIGPIPE ended.
            return Self { code: 141, message: String::new() };
        }
        Self::new(format!("writing the output: {e}"))
    }
}

/// `io::Error` of the host without "(os error 2)".
pub fn host_error(e: &io::Error) -> String {
    let text = e.to_string();
    match text.split_once(" (os error") {
        Some((message, _)) => lower_first(message),
        None => text,
    }
}

/// Why the server does not administer the volume there.
pub const TENANT_ALONE: &str = "a tenant is mounted there by itself: ask where the volume is mounted";

/// Why the server of a mount did not do what it was asked; a command that knows better says so first.
pub fn server_error(e: &io::Error) -> String {
    match Errno::from_io_error(e) {
        Some(Errno::PERM) => "only root may, and who mounted it".into(),
        Some(Errno::OPNOTSUPP) => TENANT_ALONE.into(),
        Some(Errno::NOTTY) => "its server is of an older version: mount it again".into(),
        Some(Errno::ROFS) => "it is mounted read-only: remount it writable first (mount -o remount,rw)".into(),
        Some(Errno::NOTCONN | Errno::CONNABORTED | Errno::NODEV) => {
            "the volume was unmounted, or its server died".into()
        }
        _ => host_error(e),
    }
}

fn lower_first(text: &str) -> String {
    let mut chars = text.chars();
    match chars.next() {
        Some(c) => c.to_lowercase().chain(chars).collect(),
        None => String::new(),
    }
}

/// What to do about an error of a volume, as a clause to append; empty where there is nothing to say.
pub fn advice(e: &Error, device: &Path) -> String {
    match e {
        Error::Corrupt(_) | Error::DomainFailed { .. } => {
            format!(": check it with `braidfs fsck {}`", device.display())
        }
        Error::NoSpace => ": remove files".into(),
        Error::Io(_) => ": see the kernel's log (dmesg) for the device".into(),
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_errors_read_well() {
        let e = io::Error::from_raw_os_error(2);
        assert_eq!(host_error(&e), "no such file or directory");
        assert_eq!(host_error(&io::Error::other("plain")), "plain");
    }

    #[test]
    fn a_closed_pipe_is_silent() {
        assert!(Failure::output(&io::Error::from_raw_os_error(32)).message.is_empty());
    }
}
