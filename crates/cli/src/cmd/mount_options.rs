//! The options of a mount: `-o` of mount(8) and fstab(5), and our own flags. No I/O.
//!
//! [`super::option_table`] says what becomes of each.

use crate::text::parse_size;
use braidfs::{AtimeMode, DataMode, Overwrite, Remount};
use braidfs_fuse::control::TenantMount;
use braidfs_fuse::watch::MetricsAt;
use braidfs_fuse::{Cache, Latency, Limit, MountConfig, Profile, Transport};
use std::path::PathBuf;
use std::time::Duration;

/// Where the log goes by options of a mount (`log=`): the last one counts.
pub fn log_file(lists: &[String]) -> Option<PathBuf> {
    let options = lists.iter().flat_map(|list| list.split(','));
    options.filter_map(|o| o.strip_prefix("log=")).rfind(|file| file.starts_with('/')).map(PathBuf::from)
}

/// When to mount through a block device (`fuseblk`), which makes `umount` wait and `sync` work as in a kernel file
/// system, but needs root.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum FuseBlk {
    /// Where we are root
    #[default]
    Auto,
    /// Fail where it cannot be done
    Always,
    /// Never: a plain FUSE mount
    Never,
}

/// What helps with an option that is none.
const LISTED: &str = "mount.braidfs(8) lists those that there are";

/// Everything that can be set; `None` and `default()` are the defaults.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MountSpec {
    /// Change what is mounted.
    pub remount: bool,
    /// With `remount`: the mount point alone.
    pub bind: bool,
    /// Nothing is changed (`ro`).
    pub read_only: bool,
    /// Access times; `None`: relatime, on a remount as they are.
    pub atime: Option<AtimeMode>,
    /// No access times of directories; `None`: on a remount as it is.
    pub nodiratime: Option<bool>,
    /// Times may reach the disk late.
    pub lazytime: bool,
    /// Every change is durable at once.
    pub sync: bool,
    /// Changes of directories are.
    pub dirsync: bool,
    /// `suid` or `nosuid`; `None`: `suid` for root only.
    pub suid: Option<bool>,
    /// `dev` or `nodev`; as `suid`.
    pub dev: Option<bool>,
    /// Programs cannot be run.
    pub noexec: bool,
    /// Symbolic links are not followed.
    pub nosymfollow: bool,
    /// Other users may enter; `None`: where root mounts.
    pub allow_other: Option<bool>,
    /// Age at which a transaction is committed (`commit=`); `None`: by the kind of mount.
    pub commit: Option<Duration>,
    /// `data=`; `None`: ordered, on a remount as it is.
    pub data: Option<DataMode>,
    /// Where overwrites go (`overwrite=`).
    pub overwrite: Overwrite,
    /// `numa=off`: nothing is placed by NUMA node.
    pub numa_off: bool,
    /// `cache=`, bytes; 0: by the machine.
    pub cache_bytes: u64,
    /// `threads=`; 0: one per CPU.
    pub threads: usize,
    /// Whether it is a `fuseblk` mount (`fuseblk=`).
    pub fuseblk: FuseBlk,
    /// How long serving threads stay awake (`latency=`).
    pub latency: Latency,
    /// How requests come (`transport=`).
    pub transport: Transport,
    /// Where metrics are served (`metrics=`).
    pub metrics: Option<MetricsAt>,
    /// From how long on an operation is logged (`slow=`).
    pub slow: Option<Duration>,
    /// `discard` or `nodiscard`.
    pub discard: bool,
    /// `nodefrag`: files in pieces are left as they are.
    pub nodefrag: bool,
    /// `fileflags` or `opens`.
    pub opens: bool,
    /// For the mounting user alone.
    pub private: bool,
    /// Extended attributes also then.
    pub user_xattr: bool,
    /// `cache=back` or `cache=through`.
    pub write_cache: Cache,
    /// `nofail`: that a device is not there is no error, for mount(8).
    pub nofail: bool,
    /// `tenant=`: that alone, of a volume that is mounted.
    pub tenant: Option<String>,
    /// `supervise`: how often the process is replaced.
    pub supervise: Option<Limit>,
    /// The first option that a private mount cannot have.
    shared: Option<String>,
    /// The first option that only the kernel's FUSE gives, and only a remount is told of.
    of_the_kernel: Option<String>,
}

impl MountSpec {
    /// What the lists `a,b=c,…` say together; what comes later wins. `sloppy` (mount -s) skips what is unknown.
    ///
    /// # Errors
    /// The first option that cannot be, and what to do.
    pub fn parse<'a>(lists: impl IntoIterator<Item = &'a str>, sloppy: bool) -> Result<Self, String> {
        let mut spec = Self::default();
        lists.into_iter().try_for_each(|list| spec.apply(list, sloppy))?;
        // a remount gets these from the table of mounts and from fstab, and changes none of them
        if spec.private && !spec.remount {
            let other = match spec.allow_other {
                Some(true) => Some("allow_other"),
                _ => spec.shared.as_deref(),
            };
            if let Some(other) = other {
                return Err(format!(
                    "option `private`: not with `{other}`: nothing is checked on a private mount, so that nobody else may \
                     enter: leave one of them out"
                ));
            }
        }
        match &spec.of_the_kernel {
            Some(option) if !spec.remount => Err(format!("option `{option}`: braidfs sets it itself: leave it out")),
            _ if spec.bind && !spec.remount => {
                Err("option `bind`: only with remount: a directory is bound by `mount --bind`".into())
            }
            _ => Ok(spec),
        }
    }

    /// With the flags that the table of mounts shows, for a mount in place of another one.
    pub fn with_flags_of(&self, shown: &str) -> Self {
        let mut spec = Self {
            read_only: false,
            atime: None,
            nodiratime: None,
            lazytime: false,
            sync: false,
            dirsync: false,
            suid: Some(true),
            dev: Some(true),
            noexec: false,
            nosymfollow: false,
            ..self.clone()
        };
        if let Err(why) = spec.apply(shown, true) {
            tracing::warn!(why, "a flag of the dead mount is left out");
        }
        spec
    }

    fn apply(&mut self, list: &str, sloppy: bool) -> Result<(), String> {
        for option in list.split(',').filter(|o| !o.is_empty()) {
            match self.one(option) {
                Ok(true) => {}
                Ok(false) if sloppy => {}
                Ok(false) => return Err(format!("option `{option}`: unknown: leave it out; {LISTED}")),
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
            // taken before the options are looked at; a program that goes on with the mount works elsewhere
            "log" if need()?.starts_with('/') => {}
            "log" => return Err("log= is a path that begins with /".into()),
            "data" => self.data = Some(parse_data(need()?)?),
            "cache" => match need()? {
                "back" => self.write_cache = Cache::Back,
                "through" => self.write_cache = Cache::Through,
                size => {
                    self.cache_bytes =
                        parse_cache(size).map_err(|why| format!("cache= is back, through, or a size: {why}"))?;
                }
            },
            "supervise" if value.is_some() => self.supervise = Some(parse_limit(need()?)?),
            "X-mount.idmap" => {
                self.shared.get_or_insert_with(|| name.into());
            }
            "tenant" => self.tenant = Some(need()?.into()),
            "threads" => self.threads = parse_threads(need()?)?,
            "fuseblk" => {
                self.fuseblk = clap::ValueEnum::from_str(need()?, true).map_err(|_| "use auto, always or never")?;
            }
            "metrics" => self.metrics = Some(need()?.parse()?),
            "slow" => {
                let ms: u32 = need()?.parse().map_err(|_| "slow= is a number of milliseconds, 0 for none")?;
                self.slow = (ms > 0).then(|| Duration::from_millis(ms.into()));
            }
            "transport" => self.transport = need()?.parse()?,
            "latency" => {
                self.latency = match need()? {
                    "auto" => Latency::Auto,
                    "low" => Latency::Low,
                    "off" => Latency::Off,
                    _ => return Err("use auto, low or off".into()),
                }
            }
            "overwrite" => {
                self.overwrite = match need()? {
                    "auto" => Overwrite::Auto,
                    "log" => Overwrite::Log,
                    _ => return Err("use auto or log".into()),
                }
            }
            "numa" => {
                self.numa_off = match need()? {
                    "auto" => false,
                    "off" => true,
                    _ => return Err("use auto or off".into()),
                }
            }
            // For mount(8), systemd and others, not for us. With a name, `user` is what mount(8) keeps of who mounted.
            "comment" | "helper" | "uhelper" | "subtype" => {}
            "user" if value.is_some() => return self.flag(name),
            _ if name.starts_with("x-") || name.starts_with("X-") => {}
            "user_id" | "group_id" | "rootmode" | "fd" | "max_read" | "blksize" if value.is_some() => {
                self.of_the_kernel.get_or_insert_with(|| option.into());
            }
            "offset" | "sizelimit" => {
                return Err("a volume begins where its device does: give the loop device of `losetup --offset`".into());
            }
            "loop" if value.is_some() => return Err("give that loop device as the device".into()),
            _ if value.is_some() => return Ok(false),
            _ => return self.flag(name),
        }
        Ok(true)
    }

    fn flag(&mut self, name: &str) -> Result<bool, String> {
        match name {
            "remount" => self.remount = true,
            "bind" => self.bind = true,
            "ro" => self.read_only = true,
            "rw" => self.read_only = false,
            "relatime" | "nostrictatime" | "atime" => self.atime = Some(AtimeMode::Relatime),
            "noatime" => self.atime = Some(AtimeMode::Noatime),
            "strictatime" | "norelatime" => self.atime = Some(AtimeMode::Strictatime),
            "nodiratime" => self.nodiratime = Some(true),
            "diratime" => self.nodiratime = Some(false),
            "lazytime" => self.lazytime = true,
            "nolazytime" => self.lazytime = false,
            "sync" => self.sync = true,
            "async" => self.sync = false,
            "dirsync" => self.dirsync = true,
            "discard" | "nodiscard" => self.discard = name == "discard",
            "defrag" | "nodefrag" => self.nodefrag = name == "nodefrag",
            "fileflags" | "opens" => self.opens = true,
            "suid" => self.suid = Some(true),
            "nosuid" => self.suid = Some(false),
            "dev" => self.dev = Some(true),
            "nodev" => self.dev = Some(false),
            "exec" => self.noexec = false,
            "noexec" => self.noexec = true,
            "symfollow" => self.nosymfollow = false,
            "nosymfollow" => self.nosymfollow = true,
            "supervise" => self.supervise = Some(Limit::default()),
            "nosupervise" => self.supervise = None,
            "private" => self.private = true,
            "noprivate" => self.private = false,
            "user_xattr" => self.user_xattr = true,
            "nouser_xattr" => self.user_xattr = false,
            "acl" | "default_permissions" => {
                self.shared.get_or_insert_with(|| name.into());
            }
            "allow_other" => self.allow_other = Some(true),
            "noallow_other" => self.allow_other = Some(false),
            // As mount(8) says: they imply these.
            "user" | "users" => (self.noexec, self.suid, self.dev) = (true, Some(false), Some(false)),
            "owner" | "group" => (self.suid, self.dev) = (Some(false), Some(false)),
            // What is so anyway, or concerns mount(8) only.
            "nofail" => self.nofail = true,
            "defaults" | "auto" | "noauto" | "nouser" | "nousers" | "_netdev" | "loud" | "silent" | "nomand"
            | "noiversion" | "noowner" | "nogroup" | "loop" => {}
            "mand" | "iversion" => return Err("not supported: leave it out".into()),
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// What of it concerns the kernel and the front end.
    pub fn configure(&self, cfg: &mut MountConfig) {
        cfg.read_only = self.read_only;
        cfg.atime = self.atime.unwrap_or_default();
        cfg.nodiratime = self.nodiratime.unwrap_or_default();
        cfg.lazytime = self.lazytime;
        cfg.sync = self.sync;
        cfg.dirsync = self.dirsync;
        cfg.opens = self.opens;
        cfg.exec = !self.noexec;
        cfg.nosymfollow = self.nosymfollow;
        cfg.suid = self.suid.unwrap_or(cfg.suid);
        cfg.dev = self.dev.unwrap_or(cfg.dev);
        cfg.allow_other = self.allow_other.unwrap_or(cfg.allow_other) && !self.private;
        cfg.profile = Profile { private: self.private, user_xattr: self.user_xattr, cache: self.write_cache };
        if self.threads > 0 {
            cfg.threads = self.threads.max(2);
        }
        cfg.latency = self.latency;
        cfg.transport = self.transport;
        cfg.metrics.clone_from(&self.metrics);
        cfg.slow = self.slow;
    }

    /// What of it concerns the mount of a tenant by itself.
    pub fn of_tenant(&self) -> TenantMount {
        let no = |flag: Option<bool>| flag == Some(false);
        let (nosuid, nodev) = (no(self.suid), no(self.dev));
        TenantMount { read_only: self.read_only, nosuid, nodev, noexec: self.noexec }
    }

    /// What of it a remount changes in the volume, but for whether it is read-only.
    pub fn changes(&self) -> Remount {
        Remount {
            read_only: None,
            data: self.data,
            commit_interval: self.commit,
            atime: self.atime,
            nodiratime: self.nodiratime,
            lazytime: Some(self.lazytime),
            ..Remount::default()
        }
    }

    /// Whether a remount leaves alone what the kernel does about access times.
    pub fn keeps_atime(&self) -> bool {
        self.atime.is_none() && self.nodiratime.is_none()
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

/// `TIMES/SECONDS`, both at least 1.
fn parse_limit(text: &str) -> Result<Limit, String> {
    let limit = text.split_once('/').and_then(|(times, seconds)| {
        let (times, within) = (times.parse().ok()?, Duration::from_secs(seconds.parse::<u32>().ok()?.into()));
        (times > 0 && within > Duration::ZERO).then_some(Limit { times, within })
    });
    limit.ok_or_else(|| "write it as supervise=TIMES/SECONDS: so many restarts within so long".into())
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
    use crate::cmd::option_table::{Again, How, TABLE};

    fn spec(list: &str) -> Result<MountSpec, String> {
        MountSpec::parse([list], false)
    }

    #[test]
    fn the_table_is_true() {
        let changes = |option: &str| {
            // seen against either default
            let before = ["", "noatime,nodiratime,lazytime,sync,noexec,nosuid,nodev,ro,nosymfollow,bind,remount,"];
            before.iter().any(|b| {
                let with = |o: &str| MountSpec::parse([*b, "remount", o], false).unwrap();
                with(option) != with("")
            })
        };
        for row in TABLE {
            for name in row.names {
                let first = if *name == "bind" { spec("remount,bind") } else { spec(name) };
                assert_eq!(first.is_err(), row.how == How::Refused, "{name}: {first:?}");
                if row.how == How::Ignored {
                    assert!(first.is_ok_and(|s| s == MountSpec::default()), "{name}");
                    assert_eq!(row.again, Again::Ignored, "{name}");
                }
                let again = MountSpec::parse(["remount", name], false);
                assert_eq!(again.is_err(), row.again == Again::Refused, "{name}: {again:?}");
                if row.again == Again::Changes && *name != "remount" {
                    assert!(changes(name), "{name}");
                }
            }
        }
    }

    #[test]
    fn later_options_win() {
        let s =
            spec("ro,noatime,nosuid,commit=30,data=journal,cache=64M,threads=3,rw,suid,x-systemd.automount").unwrap();
        assert!(!s.read_only);
        assert_eq!(s.suid, Some(true));
        assert_eq!(s.atime, Some(AtimeMode::Noatime));
        assert_eq!(s.commit, Some(Duration::from_secs(30)));
        assert_eq!((s.data, s.cache_bytes, s.threads), (Some(DataMode::Journal), 64 << 20, 3));
        assert_eq!(spec("defaults,_netdev,,nofail").unwrap(), MountSpec { nofail: true, ..MountSpec::default() });
        assert_eq!(spec("commit=0").unwrap().commit, None);
        assert_eq!(spec("latency=off,latency=low").unwrap().latency, Latency::Low);
        assert_eq!(spec("transport=ring").unwrap().transport, Transport::Ring);
        assert_eq!(["numa=off", "numa=off,numa=auto", ""].map(|o| spec(o).unwrap().numa_off), [true, false, false]);
        assert!(spec("numa=0").unwrap_err().contains("auto or off"));
        assert!(spec("user,exec").is_ok_and(|s| !s.noexec && s.suid == Some(false)));
        assert!(spec("user=jane").is_ok_and(|s| s.noexec));
        assert!(MountSpec::parse(["ro,sync", "async", "dirsync"], false).is_ok_and(|s| s.read_only && !s.sync));
    }

    #[test]
    fn private_mounts_let_nobody_else_in() {
        let configured = |list: &str| {
            let mut cfg = MountConfig::new("a.img", "/mnt");
            cfg.allow_other = true; // as where root mounts
            spec(list).unwrap().configure(&mut cfg);
            (cfg.profile.private, cfg.allow_other)
        };
        assert_eq!((configured("private"), configured("")), ((true, false), (false, true)));
        assert_eq!(configured("private,allow_other,noallow_other"), (true, false));
        assert_eq!(configured("private,allow_other,noprivate"), (false, true));
        for other in ["allow_other", "acl", "default_permissions", "X-mount.idmap=/proc/1/ns/user"] {
            let name = other.split('=').next().unwrap();
            let why = spec(&format!("{other},private,noatime")).unwrap_err();
            assert!(why.contains("`private`") && why.contains(name) && why.contains("leave"), "{why}");
            // what stands in the tables must not keep anybody from mount -o remount,ro
            assert!(spec(&format!("{other},private,remount,ro")).is_ok());
        }
    }

    #[test]
    fn how_often_a_process_is_replaced() {
        assert_eq!(spec("").unwrap().supervise, None);
        assert_eq!(spec("supervise").unwrap().supervise, Some(Limit { times: 5, within: Duration::from_secs(600) }));
        let s = spec("supervise=20/60").unwrap();
        assert_eq!(s.supervise, Some(Limit { times: 20, within: Duration::from_secs(60) }));
        assert_eq!(spec("supervise,nosupervise").unwrap(), MountSpec::default());
    }

    #[test]
    fn the_two_caches_are_told_apart() {
        let s = spec("cache=64M,cache=through").unwrap();
        assert_eq!((s.cache_bytes, s.write_cache), (64 << 20, Cache::Through));
        assert_eq!(spec("cache=through,cache=back").unwrap(), MountSpec::default());
        assert!(spec("cache=trough").unwrap_err().contains("cache="));
    }

    #[test]
    fn what_mount_reads_from_its_table_is_taken_at_a_remount() {
        let s = spec("rw,nosuid,relatime,user_id=0,group_id=0,default_permissions,allow_other,blksize=4096,remount,ro");
        assert!(s.is_ok_and(|s| s.remount && s.read_only));
        assert!(spec("rw,user_id=0").unwrap_err().contains("user_id=0"));
    }

    #[test]
    fn the_last_log_file_counts() {
        let of = |lists: &[&str]| log_file(&lists.iter().map(|l| (*l).to_string()).collect::<Vec<_>>());
        assert_eq!(of(&["ro,log=/a,noatime", "log=/b"]), Some("/b".into()));
        assert_eq!((of(&["ro", "log="]), of(&["log=a"]), of(&[])), (None, None, None));
        assert!(spec("log=/a").is_ok() && spec("log=").is_err() && spec("log=a").is_err());
    }

    #[test]
    fn a_tenant_has_flags_of_its_own() {
        let s = spec("tenant=web,ro,nosuid").unwrap();
        let how = TenantMount { read_only: true, nosuid: true, ..TenantMount::default() };
        assert_eq!((s.tenant.as_deref(), s.of_tenant()), (Some("web"), how));
        assert_eq!(spec("tenant=web,suid").unwrap().of_tenant(), TenantMount::default());
        assert!(spec("tenant=").is_err());
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
            "bind",
            "mand",
            "offset=512",
            "loop=/dev/loop1",
            "fuseblk=maybe",
            "latency=high",
            "transport=uring",
            "supervise=5",
            "supervise=0/600",
            "supervise=5/0",
            "metrics=unix:here",
        ] {
            let why = spec(list).unwrap_err();
            assert!(why.starts_with("option `") && why.contains(": "), "{list}: {why}");
        }
        assert!(MountSpec::parse(["bogus,ro"], true).is_ok_and(|s| s.read_only));
        assert!(MountSpec::parse(["commit=x"], true).is_err());
    }
}
