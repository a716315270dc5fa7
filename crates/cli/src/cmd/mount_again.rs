//! The command lines by which other programs go on with a mount: as the process that serves, and as the one that looks after it.

use super::mount::Args;
use crate::mountinfo;
use braidfs_fuse::Successor;
use std::ffi::OsString;
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};
use uuid::Uuid;

/// The option by which a program is asked whether it can look after a mount.
pub const ASK: &str = "can-look-after";
/// That by which it does.
pub const LOOK_AFTER: &str = "look-after";

/// How a mount was asked for.
#[derive(Debug, Clone)]
pub struct Again {
    /// Of the log.
    log: Vec<OsString>,
    /// Of the mount, but for what is mounted where.
    options: Vec<OsString>,
    foreground: bool,
    devices: Vec<PathBuf>,
    mountpoint: PathBuf,
}

impl Again {
    /// `devices`: as no link and no working directory changes them.
    pub fn of(args: &Args, devices: &[PathBuf], mountpoint: &Path) -> Self {
        let mut options: Vec<OsString> = args.options.iter().flat_map(|o| ["-o".into(), o.into()]).collect();
        let mut given = |name: &str, value: Option<String>| {
            options.extend(value.map(|value| OsString::from(format!("--{name}={value}"))));
        };
        given("threads", args.threads.map(|n| n.to_string()));
        given("cache", args.cache.map(|n| n.to_string()));
        given("commit", args.commit.map(|n| n.to_string()));
        given("data", args.data.map(|d| format!("{d:?}").to_lowercase()));
        given("fuseblk", args.fuseblk.map(|f| format!("{f:?}").to_lowercase()));
        options.extend(args.sloppy.then(|| "--sloppy".into()));
        Self {
            log: crate::log::arguments(),
            options,
            foreground: args.foreground,
            devices: devices.to_vec(),
            mountpoint: mountinfo::absolute(mountpoint),
        }
    }

    /// Has another program serve the mount. Programs of any version are called so.
    pub fn take_over(&self) -> Vec<OsString> {
        self.call("--take-over".into(), &self.devices)
    }

    fn call(&self, as_what: OsString, devices: &[PathBuf]) -> Vec<OsString> {
        let mut all = self.log.clone();
        all.extend(["mount".into(), as_what]);
        all.extend_from_slice(&self.options);
        all.push("--".into());
        all.extend(devices.iter().map(OsString::from));
        all.push((&self.mountpoint).into());
        all
    }
}

/// Has another program look after the mount.
pub struct Parent<'a> {
    pub again: &'a Again,
    /// All that the volume has or had.
    pub devices: &'a dyn Fn() -> Vec<PathBuf>,
}

impl Successor for Parent<'_> {
    fn asked(&self) -> Vec<OsString> {
        vec!["mount".into(), format!("--{ASK}").into()]
    }

    fn called(&self, record: RawFd) -> Vec<OsString> {
        let Self { again, devices } = self;
        let mut all = again.call(format!("--{LOOK_AFTER}={record}").into(), &devices());
        if again.foreground {
            let at = again.log.len() + 1;
            all.insert(at, "--foreground".into());
        }
        all
    }
}

/// What a parent tells the next one: which volume it is, where that is known.
pub fn note_of(volume: Option<Uuid>) -> String {
    volume.map_or_else(String::new, |uuid| uuid.to_string())
}

/// [`note_of`] backwards.
pub fn volume_of(note: &str) -> Option<Uuid> {
    note.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn again(foreground: bool) -> Again {
        let log = vec!["--log".into(), "info".into()];
        let options = vec!["-o".into(), "supervise,noatime".into(), "--commit=7".into()];
        Again { log, options, foreground, devices: vec!["/a".into()], mountpoint: "/mnt".into() }
    }

    #[test]
    fn programs_are_called_as_the_first_one_was() {
        let line = |words: Vec<OsString>| words.join(&OsString::from(" ")).into_string().unwrap();
        let rest = "-o supervise,noatime --commit=7 --";
        for foreground in [false, true] {
            let again = again(foreground);
            assert_eq!(line(again.take_over()), format!("--log info mount --take-over {rest} /a /mnt"));
            let parent = Parent { again: &again, devices: &|| vec!["/a".into(), "/b".into()] };
            let place = if foreground { " --foreground" } else { "" };
            assert_eq!(line(parent.called(7)), format!("--log info mount{place} --look-after=7 {rest} /a /b /mnt"));
            assert_eq!(line(parent.asked()), "mount --can-look-after");
        }
    }

    #[test]
    fn the_next_parent_knows_the_volume() {
        let volume = Uuid::from_u128(7);
        assert_eq!((volume_of(&note_of(Some(volume))), volume_of(&note_of(None))), (Some(volume), None));
    }
}
