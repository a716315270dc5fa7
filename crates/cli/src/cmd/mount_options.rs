//! The options of a mount: `-o` of mount(8) and fstab(5), and our own flags. No I/O.

use crate::text::parse_size;
use braidfs::{AtimeMode, DataMode};
use braidfs_fuse::Latency;
use std::time::Duration;

/// When to mount through a block device (`fuseblk`), which makes `umount` wait and `sync` work as in a kernel file
/// system, but needs root.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum FuseBlk {
    /// Where we are root
    #[default]
    Auto,
    /// Fail where it cannot be done
    Always,
    /// Plain FUSE
    Never,
}

/// Everything that can be set; `None` and `default()` are the defaults.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MountSpec {
    /// Read-only.
    pub read_only: bool,
    /// Access times.
    pub atime: AtimeMode,
    /// `suid` or `nosuid`; `None`: `suid` for root only.
    pub suid: Option<bool>,
    /// `dev` or `nodev`; as `suid`.
    pub dev: Option<bool>,
    /// Programs cannot be run.
    pub noexec: bool,
    /// Other users may enter; `None`: where root mounts.
    pub allow_other: Option<bool>,
    /// `commit=`.
    pub commit: Option<Duration>,
    /// `data=`.
    pub data: DataMode,
    /// `cache=`, bytes; 0: by the machine.
    pub cache_bytes: u64,
    /// `threads=`; 0: one per CPU.
    pub threads: usize,
    /// `fuseblk=`.
    pub fuseblk: FuseBlk,
    /// `latency=`.
    pub latency: Latency,
}

impl MountSpec {
    /// Applies a list `a,b=c,…`; what comes later wins. `sloppy` (mount -s) skips what is unknown.
    ///
    /// # Errors
    /// The first option that cannot be, and what to do.
    pub fn apply(&mut self, list: &str, sloppy: bool) -> Result<(), String> {
        for option in list.split(',').filter(|o| !o.is_empty()) {
            match self.one(option) {
                Ok(true) => {}
                Ok(false) if sloppy => {}
                Ok(false) => return Err(format!("option `{option}`: unknown: see `braidfs mount --help`")),
                Err(why) => return Err(format!("option `{option}`: {why}")),
            }
        }
        Ok(())
    }

    /// Whether the option is known.
    fn one(&mut self, option: &str) -> Result<bool, String> {
        let (name, value) = match option.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (option, None),
        };
        let need = || value.filter(|v| !v.is_empty()).ok_or_else(|| format!("needs a value: {name}=…"));
        match name {
            "commit" => self.commit = parse_commit(need()?)?,
            "data" => self.data = parse_data(need()?)?,
            "cache" => self.cache_bytes = parse_cache(need()?)?,
            "threads" => self.threads = parse_threads(need()?)?,
            "fuseblk" => {
                self.fuseblk = clap::ValueEnum::from_str(need()?, true).map_err(|_| "use auto, always or never")?;
            }
            "latency" => {
                self.latency = match need()? {
                    "auto" => Latency::Auto,
                    "low" => Latency::Low,
                    "off" => Latency::Off,
                    _ => return Err("use auto, low or off".into()),
                }
            }
            // For mount(8), systemd and others, not for us.
            "comment" | "helper" | "uhelper" | "subtype" => {}
            _ if name.starts_with("x-") || name.starts_with("X-") => {}
            _ if value.is_some() => return Ok(false),
            _ => return self.flag(name),
        }
        Ok(true)
    }

    fn flag(&mut self, name: &str) -> Result<bool, String> {
        match name {
            "ro" => self.read_only = true,
            "rw" => self.read_only = false,
            "relatime" | "nostrictatime" | "atime" => self.atime = AtimeMode::Relatime,
            "noatime" => self.atime = AtimeMode::Noatime,
            "strictatime" | "norelatime" => self.atime = AtimeMode::Strictatime,
            "suid" => self.suid = Some(true),
            "nosuid" => self.suid = Some(false),
            "dev" => self.dev = Some(true),
            "nodev" => self.dev = Some(false),
            "exec" => self.noexec = false,
            "noexec" => self.noexec = true,
            "allow_other" => self.allow_other = Some(true),
            "noallow_other" => self.allow_other = Some(false),
            // As mount(8) says: they imply these.
            "user" | "users" => (self.noexec, self.suid, self.dev) = (true, Some(false), Some(false)),
            "owner" | "group" => (self.suid, self.dev) = (Some(false), Some(false)),
            // What is so anyway, or concerns mount(8) only. Permissions are always checked by the kernel.
            "defaults"
            | "async"
            | "auto"
            | "noauto"
            | "nouser"
            | "nofail"
            | "_netdev"
            | "diratime"
            | "loud"
            | "silent"
            | "nomand"
            | "noiversion"
            | "nolazytime"
            | "noowner"
            | "nogroup"
            | "default_permissions" => {}
            "remount" => return Err("cannot be changed while mounted: unmount, then mount again".into()),
            "sync" | "dirsync" | "lazytime" | "mand" | "iversion" | "nodiratime" | "loop" => {
                return Err("not supported: leave it out".into());
            }
            _ => return Ok(false),
        }
        Ok(true)
    }
}

/// Seconds, 1 to 300; 0 means the default, as in ext4.
///
/// # Errors
/// What to write.
pub fn parse_commit(text: &str) -> Result<Option<Duration>, String> {
    match text.parse::<u64>() {
        Ok(0) => Ok(None),
        Ok(n @ 1..=300) => Ok(Some(Duration::from_secs(n))),
        _ => Err("use 1 to 300 seconds".into()),
    }
}

/// `ordered`, `journal`, `writeback`.
///
/// # Errors
/// What to write.
pub fn parse_data(text: &str) -> Result<DataMode, String> {
    match text {
        "ordered" => Ok(DataMode::Ordered),
        "journal" => Ok(DataMode::Journal),
        "writeback" => Ok(DataMode::Writeback),
        _ => Err("use ordered, journal or writeback".into()),
    }
}

/// Bytes; 0: by the machine.
///
/// # Errors
/// What to write.
pub fn parse_cache(text: &str) -> Result<u64, String> {
    match parse_size(text)? {
        n if n == 0 || n >= 8 << 20 => Ok(n),
        _ => Err("use at least 8M".into()),
    }
}

/// 1 to 1024; 0: one per CPU.
///
/// # Errors
/// What to write.
pub fn parse_threads(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|n| *n <= 1024).ok_or_else(|| "use 1 to 1024".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(list: &str) -> Result<MountSpec, String> {
        let mut s = MountSpec::default();
        s.apply(list, false)?;
        Ok(s)
    }

    #[test]
    fn later_options_win() {
        let s =
            spec("ro,noatime,nosuid,commit=30,data=journal,cache=64M,threads=3,rw,suid,x-systemd.automount").unwrap();
        assert!(!s.read_only);
        assert_eq!(s.suid, Some(true));
        assert_eq!(s.atime, AtimeMode::Noatime);
        assert_eq!(s.commit, Some(Duration::from_secs(30)));
        assert_eq!((s.data, s.cache_bytes, s.threads), (DataMode::Journal, 64 << 20, 3));
        assert_eq!(spec("defaults,_netdev,,nofail").unwrap(), MountSpec::default());
        assert_eq!(spec("commit=0").unwrap().commit, None);
        assert_eq!(spec("latency=off,latency=low").unwrap().latency, Latency::Low);
        assert!(spec("user,exec").is_ok_and(|s| !s.noexec && s.suid == Some(false)));
    }

    #[test]
    fn wrong_options_say_what_to_do() {
        for list in [
            "bogus",
            "commit",
            "commit=",
            "commit=x",
            "commit=301",
            "data=foo",
            "cache=1",
            "cache=3Q",
            "threads=-1",
            "ro=1",
            "remount",
            "sync",
            "fuseblk=maybe",
            "latency=high",
        ] {
            let why = spec(list).unwrap_err();
            assert!(why.starts_with("option `") && why.contains(": "), "{list}: {why}");
        }
        let mut s = MountSpec::default();
        assert!(s.apply("bogus,ro", true).is_ok() && s.read_only);
        assert!(s.apply("commit=x", true).is_err());
    }
}
