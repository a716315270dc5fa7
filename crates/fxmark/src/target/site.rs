//! One file system for one run: made, mounted, unmounted.

use super::command::{program, run};
use super::{Media, Target};
use crate::worker::Place;
use crate::{Error, Result, sys};
use std::ffi::OsString;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// How long a daemon may take to mount or to close a volume.
const PATIENCE: Duration = Duration::from_secs(60);

/// Where sites are made.
#[derive(Debug, Default)]
pub struct Lab {
    /// The block device, where a target needs one.
    pub media: Option<Media>,
    /// For mount points.
    pub dir: PathBuf,
    /// Size of a tmpfs.
    pub size: u64,
    /// The program `braidfs`, with what comes before its own arguments.
    pub braidfs: Option<PathBuf>,
    /// More mount options, as `TARGET:OPTIONS`.
    pub mount_options: Vec<(String, String)>,
    /// More arguments of mkfs.
    pub mkfs_options: Vec<(String, String)>,
    /// How this program is called to hold another.
    pub hold_args: Vec<OsString>,
    /// Switches for experiments of the daemon of braidfs, [`SWITCHES`]; none: as this process has them.
    pub switches: Option<String>,
}

/// What is said of a mount whose syncfs(2) does not commit.
const NO_COMMIT: &str = "syncfs(2) does not reach this mount (FUSE without a block device, or Linux before 6.18): what it has not \
                         committed by itself is in no figure";
/// Once is enough.
static SAID: std::sync::Once = std::sync::Once::new();

/// The environment variable in which braidfs looks for its switches for experiments.
pub const SWITCHES: &str = "BRAIDFS_ABLATION";

/// A file system that stands.
#[derive(Debug)]
pub struct Site {
    /// Where workers go.
    pub place: Place,
    /// Its block device.
    pub device: Option<PathBuf>,
    /// Commands that made it.
    pub setup: Vec<String>,
    mounted: Option<PathBuf>,
    daemon: Option<Child>,
    scratch: Option<TempDir>,
}

fn text(path: &Path) -> Result<&str> {
    path.to_str().ok_or_else(|| Error::Usage(format!("{}: not UTF-8", path.display())))
}

impl Lab {
    fn device(&self) -> Result<&Path> {
        let media = self.media.as_ref().ok_or_else(|| Error::Other("the target needs a device and has none".into()))?;
        Ok(media.device())
    }

    fn more<'a>(list: &'a [(String, String)], target: &str) -> impl Iterator<Item = &'a str> {
        list.iter().filter(move |(t, _)| t == target).map(|(_, o)| o.as_str())
    }

    /// Makes the file system afresh and mounts it.
    ///
    /// # Errors
    /// A command that fails, with what it says. Nothing is left then.
    pub fn make(&self, target: &Target) -> Result<Site> {
        let mut site = Site {
            place: Place::Dir(self.dir.join("mnt")),
            device: None,
            setup: Vec::new(),
            mounted: None,
            daemon: None,
            scratch: None,
        };
        if target.needs_device() {
            site.device = Some(self.device()?.to_path_buf());
        }
        match target {
            Target::Dir(dir) => {
                let made = tempfile::Builder::new().prefix("fxmark-").tempdir_in(dir);
                let made = made.map_err(|e| Error::io(format!("making a directory in {}", dir.display()), e))?;
                let path = fs::canonicalize(made.path()).map_err(|e| Error::io("finding the directory", e))?;
                site.setup.push(format!("a directory in {}", dir.display()));
                site.place = Place::Dir(path);
                site.scratch = Some(made);
            }
            Target::Library => self.format_library(&mut site)?,
            made => {
                self.format(made, &mut site)?;
                let command = self.mount(made, &mut site)?;
                site.setup.push(command);
                if !site.sync_commits() {
                    site.setup.push(NO_COMMIT.into());
                    SAID.call_once(|| eprintln!("fxmark: {made}: {NO_COMMIT}"));
                }
            }
        }
        Ok(site)
    }

    /// Mounts a site that was unmounted by [`Site::unmount`] again, with the same options. A directory, or a device for
    /// the library, is there as it was.
    ///
    /// # Errors
    /// As of [`Lab::make`].
    pub fn mount_again(&self, target: &Target, site: &mut Site) -> Result<()> {
        match target {
            Target::Dir(_) | Target::Library => Ok(()),
            made => self.mount(made, site).map(drop),
        }
    }

    /// The command that mounted it, for people.
    fn mount(&self, target: &Target, site: &mut Site) -> Result<String> {
        match target {
            Target::Braidfs => self.mount_braidfs(site),
            kernel => self.mount_kernel(kernel, site),
        }
    }

    fn mkfs(&self, site: &mut Site, target: &str, command: &str, args: &[&str]) -> Result<()> {
        let more: Vec<&str> = Self::more(&self.mkfs_options, target).flat_map(str::split_whitespace).collect();
        let device = text(self.device()?)?;
        let all: Vec<&str> = args.iter().copied().chain(more).chain([device]).collect();
        run(command, &all)?;
        site.setup.push(format!("{command} {}", all.join(" ")));
        Ok(())
    }

    fn format(&self, target: &Target, site: &mut Site) -> Result<()> {
        let name = target.to_string();
        // no discard: the device below stays as it is for whoever comes next. An image in memory would lose its pages, and whoever
        // writes to a place for the first time would pay for new ones. Nothing is laid out lazily.
        match target {
            Target::Ext4 | Target::Ext4NoJournal => {
                let lazy = "lazy_itable_init=0,lazy_journal_init=0,nodiscard";
                let mut args = vec!["-q", "-F", "-E", lazy];
                if *target == Target::Ext4NoJournal {
                    args.extend(["-O", "^has_journal"]);
                }
                self.mkfs(site, &name, "mkfs.ext4", &args)?;
            }
            Target::Xfs => self.mkfs(site, &name, "mkfs.xfs", &["-q", "-f", "-K"])?,
            Target::Btrfs => self.mkfs(site, &name, "mkfs.btrfs", &["-q", "-f", "-K"])?,
            Target::F2fs => self.mkfs(site, &name, "mkfs.f2fs", &["-q", "-f", "-t", "0"])?,
            Target::Braidfs => self.mkfs_braidfs(site, &name)?,
            _ => {}
        }
        Ok(())
    }

    fn mkfs_braidfs(&self, site: &mut Site, name: &str) -> Result<()> {
        let braidfs = text(self.braidfs()?)?;
        let device = text(self.device()?)?;
        let more = Self::more(&self.mkfs_options, name).flat_map(str::split_whitespace);
        let mkfs: Vec<&str> =
            ["mkfs", "--force", "--quiet", "--nodiscard"].into_iter().chain(more).chain([device]).collect();
        run(braidfs, &mkfs)?;
        site.setup.push(format!("braidfs {}", mkfs.join(" ")));
        Ok(())
    }

    fn mount_kernel(&self, target: &Target, site: &mut Site) -> Result<String> {
        let name = target.to_string();
        let kind = target.kernel_type().unwrap_or_default();
        let at = self.mount_point()?;
        let mut options = vec!["noatime".to_owned()];
        if *target == Target::Tmpfs {
            options.push(format!("size={},nr_inodes=0", self.size));
        }
        options.extend(Self::more(&self.mount_options, &name).map(str::to_owned));
        let options = options.join(",");
        let source = if *target == Target::Tmpfs { "tmpfs" } else { text(self.device()?)? };
        let args = ["-t", kind, "-o", &options, source, text(&at)?];
        run("mount", &args)?;
        site.mounted = Some(at);
        Ok(format!("mount -t {kind} -o {options} {source} DIR"))
    }

    fn mount_point(&self) -> Result<PathBuf> {
        let at = self.dir.join("mnt");
        fs::create_dir_all(&at).map_err(|e| Error::io(format!("making {}", at.display()), e))?;
        Ok(at)
    }

    fn braidfs(&self) -> Result<&Path> {
        let missing = || Error::Usage("the program braidfs was not found: name it with --braidfs".into());
        self.braidfs.as_deref().ok_or_else(missing)
    }

    fn mount_braidfs(&self, site: &mut Site) -> Result<String> {
        let braidfs = text(self.braidfs()?)?;
        let device = text(self.device()?)?;
        let at = self.mount_point()?;
        let options: Vec<&str> = ["noatime"].into_iter().chain(Self::more(&self.mount_options, "braidfs")).collect();
        let options = options.join(",");
        let exe = std::env::current_exe().map_err(|e| Error::io("finding this program", e))?;
        let mut command = Command::new(exe);
        command.args(&self.hold_args).args([braidfs, "--log", "warn", "mount", "--foreground", "-o", &options, device]);
        if let Some(switches) = &self.switches {
            command.env(SWITCHES, switches);
        }
        command.arg(&at).process_group(0).stdin(Stdio::null()).stdout(Stdio::null());
        site.daemon = Some(command.spawn().map_err(|e| Error::io("starting the daemon of braidfs", e))?);
        site.mounted = Some(at.clone());
        wait_mounted(&at, site.daemon.as_mut())?;
        Ok(format!("braidfs mount -o {options} {device} DIR"))
    }

    #[cfg(feature = "braidfs")]
    fn format_library(&self, site: &mut Site) -> Result<()> {
        let device = self.device()?;
        if Self::more(&self.mkfs_options, "library").next().is_some() {
            self.mkfs_braidfs(site, "library")?;
        } else {
            let failed = |e| Error::io(format!("making a volume on {}", device.display()), e);
            crate::fs::Library::format(device).map_err(failed)?;
            site.setup.push(format!("braidfs::mkfs::format({}) with the defaults", device.display()));
        }
        let with = Self::more(&self.mount_options, "library").collect::<Vec<_>>().join(",");
        let with = if with.is_empty() { "the defaults" } else { &with };
        site.setup.push(format!("braidfs::Volume::mount with {with}"));
        site.place = Place::Library(device.to_path_buf());
        Ok(())
    }

    #[cfg(not(feature = "braidfs"))]
    fn format_library(&self, _: &mut Site) -> Result<()> {
        Err(Error::Usage("this fxmark was built without the braidfs library".into()))
    }
}

/// Waits until another file system than the parent's is there.
fn wait_mounted(at: &Path, mut daemon: Option<&mut Child>) -> Result<()> {
    use std::os::unix::fs::MetadataExt;
    let device = |p: &Path| fs::metadata(p).map(|m| m.dev());
    let outside = at.parent().map(device).transpose().map_err(|e| Error::io("looking at the mount point", e))?;
    let begun = Instant::now();
    while begun.elapsed() < PATIENCE {
        if device(at).is_ok_and(|inside| Some(inside) != outside) {
            return Ok(());
        }
        if let Some(Ok(Some(status))) = daemon.as_deref_mut().map(Child::try_wait) {
            return Err(Error::Other(format!("the daemon of braidfs ended with {status} instead of mounting")));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Err(Error::Other(format!("braidfs did not mount within {} s", PATIENCE.as_secs())))
}

impl Site {
    /// The process that is the file system, where it is none of ours.
    pub fn daemon(&self) -> Option<u32> {
        self.daemon.as_ref().map(Child::id)
    }

    /// Does syncfs(2), or the library's sync, make all of it durable?
    pub fn sync_commits(&self) -> bool {
        match &self.place {
            Place::Dir(at) => sys::syncfs_commits(at),
            Place::Library(_) => true,
        }
    }

    /// Unmounts it, and waits until it is closed.
    ///
    /// # Errors
    /// It cannot be unmounted.
    pub fn close(mut self) -> Result<()> {
        self.take_down()?;
        match self.scratch.take() {
            Some(dir) => dir.close().map_err(|e| Error::io("removing the test's directory", e)),
            None => Ok(()),
        }
    }

    /// Unmounts it, waits until it is closed, and keeps what is on the device for [`Lab::mount_again`].
    ///
    /// # Errors
    /// It cannot be unmounted.
    pub fn unmount(&mut self) -> Result<()> {
        self.take_down()
    }

    fn take_down(&mut self) -> Result<()> {
        let daemon = self.daemon.take();
        let unmounted = self.mounted.take().map_or(Ok(()), |at| unmount(&at));
        if let Some(mut daemon) = daemon {
            let begun = Instant::now();
            loop {
                match daemon.try_wait() {
                    Ok(Some(status)) if status.success() => break,
                    Ok(Some(status)) => return Err(Error::Other(format!("the daemon of braidfs ended with {status}"))),
                    Ok(None) if begun.elapsed() < PATIENCE => std::thread::sleep(Duration::from_millis(1)),
                    _ => {
                        // it may have ended just now
                        let _ = daemon.kill();
                        let _ = daemon.wait();
                        return Err(Error::Other("the daemon of braidfs did not end after its unmount".into()));
                    }
                }
            }
        }
        unmounted
    }
}

fn unmount(at: &Path) -> Result<()> {
    // somebody who just looks (an indexer) goes away soon
    for _ in 0..50 {
        match rustix::mount::unmount(at, rustix::mount::UnmountFlags::empty()) {
            Err(rustix::io::Errno::BUSY) => std::thread::sleep(Duration::from_millis(20)),
            // was never mounted
            Ok(()) | Err(rustix::io::Errno::INVAL) => return Ok(()),
            Err(e) => return Err(Error::io(format!("unmounting {}", at.display()), e)),
        }
    }
    let lazy = rustix::mount::unmount(at, rustix::mount::UnmountFlags::DETACH);
    lazy.map_err(|e| Error::io(format!("unmounting {} (busy)", at.display()), e))
}

impl Drop for Site {
    fn drop(&mut self) {
        if let Err(e) = self.take_down() {
            eprintln!("fxmark: {e}");
        }
    }
}

impl Lab {
    /// Where the program `braidfs` is: given, beside this one, or in the path.
    pub fn find_braidfs(given: Option<&Path>) -> Option<PathBuf> {
        if let Some(given) = given {
            return Some(given.to_path_buf());
        }
        let exe = std::env::current_exe().ok()?;
        let beside = exe.with_file_name("braidfs");
        if beside.is_file() { Some(beside) } else { program("braidfs") }
    }
}
