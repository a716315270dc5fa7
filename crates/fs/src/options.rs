//! How to open volumes and files.

use crate::{Error, File, Fs, MkfsOptions, MountOptions, Result};
use braidfs::numa::Numa;
use braidfs::{AtimeMode, DataMode, OpenHow, Overwrite, Placement};
use std::path::Path;
use std::time::Duration;

/// How to open a volume: [`Self::default`], [`Self::new`] or [`Self::parse`], and what differs by fields or methods.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Options {
    /// As of a mount.
    pub mount: MountOptions,
    /// User and group of what is made.
    pub owner: (u32, u32),
    /// Permission bits that new files and directories do not get.
    pub umask: u32,
}

impl Default for Options {
    fn default() -> Self {
        let owner = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        Self { mount: MountOptions::default(), owner, umask: 0o022 }
    }
}

impl Options {
    /// As [`Self::default`], with these of a mount.
    ///
    /// ```
    /// use braidfs_fs::{AtimeMode, Fs, MountOptions, Options};
    ///
    /// let mount = MountOptions { atime: AtimeMode::Noatime, cache_bytes: 64 << 20, ..MountOptions::default() };
    /// let options = Options::new(mount).with_owner(1000, 100).with_umask(0o077);
    /// let fs = Fs::in_memory(64 << 20, &options)?;
    /// fs.create_dir("mine")?;
    /// assert_eq!((fs.metadata("mine")?.attr().uid, fs.metadata("mine")?.permissions()), (1000, 0o700));
    /// # Ok::<(), braidfs_fs::Error>(())
    /// ```
    pub fn new(mount: MountOptions) -> Self {
        Self { mount, ..Self::default() }
    }

    /// What is made belongs to this user and this group.
    #[must_use]
    pub fn with_owner(self, uid: u32, gid: u32) -> Self {
        Self { owner: (uid, gid), ..self }
    }

    /// New files and directories do not get these bits of the permissions that are asked for.
    #[must_use]
    pub fn with_umask(self, umask: u32) -> Self {
        Self { umask, ..self }
    }

    /// For reading only: nothing is written to the devices, not even to replay a journal.
    pub fn read_only() -> Self {
        Self::new(MountOptions { read_only: true, ..MountOptions::default() })
    }

    /// Options as text, in the words of mount.braidfs(8): `ro`, `rw`, `noatime`, `relatime`, `strictatime`, `nodiratime`,
    /// `lazytime`, `discard`, `nodefrag`, `commit=SECONDS`, `data=ordered|journal|writeback`, `overwrite=auto|log`,
    /// `cache=BYTES`, `numa=auto|off`, and `readahead=BYTES`, which a mount leaves to the kernel (1M; 0: none); and `uid=`, `gid=`,
    /// `umask=OCTAL`. What comes later wins. `commit=` and `cache=` take any number, 0 for the default; a mount takes no more
    /// than 300 seconds, and no less than 8 MiB.
    ///
    /// ```
    /// let options = braidfs_fs::Options::parse("noatime,commit=1,cache=64M,readahead=256K,umask=077")?;
    /// assert_eq!((options.mount.cache_bytes, options.mount.readahead, options.umask), (64 << 20, 256 << 10, 0o077));
    /// assert!(braidfs_fs::Options::parse("commit=soon").is_err());
    /// # Ok::<(), braidfs_fs::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Option`]: unknown, or with a value that cannot be.
    pub fn parse(text: &str) -> Result<Self> {
        let mut all = Self::default();
        let m = &mut all.mount;
        each(text, |name, value| {
            match (name, value) {
                ("ro", None) => m.read_only = true,
                ("rw", None) => m.read_only = false,
                ("noatime", None) => m.atime = AtimeMode::Noatime,
                ("relatime", None) => m.atime = AtimeMode::Relatime,
                ("strictatime", None) => m.atime = AtimeMode::Strictatime,
                ("nodiratime", None) => m.nodiratime = true,
                ("lazytime", None) => m.lazytime = true,
                ("discard", None) => m.discard = true,
                ("nodefrag", None) => m.defragment = false,
                ("commit", Some(v)) => {
                    let seconds: u32 = v.parse().map_err(|_| "a number of seconds")?;
                    // as of ext4: 0 is the default
                    m.commit_interval = Duration::from_secs(if seconds == 0 { 5 } else { seconds.into() });
                }
                ("data", Some("ordered")) => m.data = DataMode::Ordered,
                ("data", Some("journal")) => m.data = DataMode::Journal,
                ("data", Some("writeback")) => m.data = DataMode::Writeback,
                ("data", Some(_)) => return Err("ordered, journal or writeback"),
                ("overwrite", Some("auto")) => m.overwrite = Overwrite::Auto,
                ("overwrite", Some("log")) => m.overwrite = Overwrite::Log,
                ("overwrite", Some(_)) => return Err("auto or log"),
                ("cache", Some(v)) => m.cache_bytes = bytes(v)?,
                ("numa", Some("auto")) => m.numa = Numa::Auto,
                ("numa", Some("off")) => m.numa = Numa::Off,
                ("numa", Some(_)) => return Err("auto or off"),
                ("readahead", Some(v)) => m.readahead = bytes(v)?,
                ("uid", Some(v)) => all.owner.0 = v.parse().map_err(|_| "a number")?,
                ("gid", Some(v)) => all.owner.1 = v.parse().map_err(|_| "a number")?,
                ("umask", Some(v)) => {
                    let mask = u32::from_str_radix(v, 8).ok().filter(|m| *m <= 0o777);
                    all.umask = mask.ok_or("octal, 0 to 777")?;
                }
                _ => return Err(UNKNOWN),
            }
            Ok(())
        })?;
        Ok(all)
    }
}

const UNKNOWN: &str = "unknown, or with a value too many or missing";

/// [`MkfsOptions`] as text, in the words of `braidfs mkfs`: `label=TEXT`, `domains=N`, `group-size=BYTES`, `inline=BYTES`,
/// `journal=BYTES`, `mlogs=N`, `placement=dirs|spread|inherit`, `data-checksums`. The root directory belongs to the user
/// of the process.
///
/// # Errors
/// [`Error::Option`]: unknown, or with a value that cannot be.
pub fn parse_mkfs(text: &str) -> Result<MkfsOptions> {
    let mut all = MkfsOptions { root_owner: Options::default().owner, ..MkfsOptions::default() };
    each(text, |name, value| {
        match (name, value) {
            ("label", Some(v)) => all.label = v.into(),
            ("domains", Some(v)) => all.domains = Some(v.parse().map_err(|_| "a number")?),
            ("group-size", Some(v)) => all.group_bytes = Some(bytes(v)?),
            ("inline", Some(v)) => all.inline_max = bytes(v)?.try_into().map_err(|_| "too large")?,
            ("journal", Some(v)) => all.journal_bytes = Some(bytes(v)?),
            ("mlogs", Some(v)) => all.mlogs = Some(v.parse().map_err(|_| "a number")?),
            ("placement", Some("dirs")) => all.placement = Placement::Dirs,
            ("placement", Some("spread")) => all.placement = Placement::Spread,
            ("placement", Some("inherit")) => all.placement = Placement::Inherit,
            ("placement", Some(_)) => return Err("dirs, spread or inherit"),
            ("data-checksums", None) => all.data_checksums = true,
            _ => return Err(UNKNOWN),
        }
        Ok(())
    })?;
    Ok(all)
}

/// Calls `one` for each of `name`, `name=value`, separated by commas.
fn each(text: &str, mut one: impl FnMut(&str, Option<&str>) -> Result<(), &'static str>) -> Result<()> {
    for option in text.split(',').filter(|o| !o.is_empty()) {
        let (name, value) = match option.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (option, None),
        };
        one(name, value).map_err(|why| Error::Option { option: option.into(), why })?;
    }
    Ok(())
}

/// A number with K, M, G or T behind it, powers of 1024.
fn bytes(text: &str) -> Result<u64, &'static str> {
    const WRONG: &str = "a number of bytes, with K, M, G or T behind it";
    let (number, shift) = match text.char_indices().last().ok_or(WRONG)? {
        (at, 'k' | 'K') => (&text[..at], 10),
        (at, 'm' | 'M') => (&text[..at], 20),
        (at, 'g' | 'G') => (&text[..at], 30),
        (at, 't' | 'T') => (&text[..at], 40),
        _ => (text, 0),
    };
    let number: u64 = number.parse().map_err(|_| WRONG)?;
    number.checked_mul(1 << shift).ok_or(WRONG)
}

/// How to open a file, as [`std::fs::OpenOptions`].
///
/// ```
/// # use braidfs_fs::{Fs, OpenOptions, Options};
/// # use std::io::Write;
/// # let fs = Fs::in_memory(64 << 20, &Options::default())?;
/// let mut log = OpenOptions::new().append(true).create(true).open(&fs, "log")?;
/// log.write_all(b"one line\n")?;
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpenOptions {
    pub(crate) how: OpenHow,
    pub(crate) append: bool,
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self { how: OpenHow { mode: 0o666, ..OpenHow::default() }, append: false }
    }
}

impl OpenOptions {
    /// Nothing is allowed yet.
    pub fn new() -> Self {
        Self::default()
    }
    /// Whether the file can be read.
    pub fn read(&mut self, on: bool) -> &mut Self {
        self.how.read = on;
        self
    }
    /// Whether the file can be written, at any offset.
    pub fn write(&mut self, on: bool) -> &mut Self {
        self.how.write = on;
        self
    }
    /// For writing at the end, wherever others have moved it.
    pub fn append(&mut self, on: bool) -> &mut Self {
        self.append = on;
        self
    }
    /// Emptied where it is there.
    pub fn truncate(&mut self, on: bool) -> &mut Self {
        self.how.truncate = on;
        self
    }
    /// Made where it is not there.
    pub fn create(&mut self, on: bool) -> &mut Self {
        self.how.create = on;
        self
    }
    /// Made; refused where it is there, a symlink to nothing included.
    pub fn create_new(&mut self, on: bool) -> &mut Self {
        self.how.exclusive = on;
        self
    }
    /// A symlink at the end of the path is refused.
    pub fn no_follow(&mut self, on: bool) -> &mut Self {
        self.how.no_follow = on;
        self
    }
    /// Permissions of a new file, before the umask (666 unless told).
    pub fn mode(&mut self, mode: u32) -> &mut Self {
        self.how.mode = mode;
        self
    }
    /// Opens it.
    ///
    /// # Errors
    /// As open(2); [`std::io::ErrorKind::InvalidInput`] where nothing is allowed, or what is made or emptied is not to be
    /// written.
    pub fn open(&self, fs: &Fs, path: impl AsRef<Path>) -> Result<File> {
        fs.open_file(path.as_ref(), self)
    }
}
