//! Where the log goes and how much of it.

use crate::failure::{Failure, host_error};
use crate::system_log::Lines;
use std::ffi::OsString;
use std::fs::OpenOptions;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::FmtSpan;

/// Options of every command.
#[derive(Debug, clap::Args)]
pub struct LogArgs {
    /// What to log: error, warn, info, debug or trace, or per module as in `warn,braidfs::tx=debug`
    /// [default: warn; of a mount in the foreground, or with --log-file: info; fsck: error]
    #[arg(long = "log", value_name = "LEVEL", env = "BRAIDFS_LOG", global = true)]
    level: Option<String>,
    /// Log into this file (appended to) rather than to the terminal or, of a mount in the background, to the system's
    /// log
    #[arg(long, value_name = "FILE", env = "BRAIDFS_LOG_FILE", global = true)]
    log_file: Option<PathBuf>,
}

impl LogArgs {
    /// Has it go into the file that the options of a mount name, if they do.
    pub fn prefer(&mut self, file: Option<PathBuf>) {
        self.log_file = file.or(self.log_file.take());
    }

    /// Of a volume that is `mounted` already, whose server's place is taken, nothing is looked up on it.
    ///
    /// # Errors
    /// The file lies below the mount point: after an upgrade the server would write into what it serves.
    pub fn check_outside(&self, mountpoint: &Path, mounted: bool, codes: &Codes) -> Result<(), Failure> {
        let Some(file) = &self.log_file else { return Ok(()) };
        let on = resolved(mountpoint, None).unwrap_or_else(|| mountpoint.to_path_buf());
        if resolved(file, mounted.then_some(&*on)).is_some_and(|file| !file.starts_with(&on)) {
            return Ok(());
        }
        let why = "it would lie on the volume that is mounted: name a file elsewhere";
        Err(Failure::at("cannot log into", file.display(), why).with_code(codes.usage))
    }

    /// It goes into a file.
    pub fn to_file(&self) -> bool {
        self.log_file.is_some()
    }
}

/// As many links as the kernel follows.
const LINKS: u32 = 40;

/// Where a file is that is opened, or made, by this path: as the kernel finds it, the last link followed, too. `None`: it leads
/// into the directory `closed`, in which nothing is looked up, or links lead in circles.
fn resolved(path: &Path, closed: Option<&Path>) -> Option<PathBuf> {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
    let parts = |path: &Path| -> Vec<OsString> { path.components().rev().map(|c| c.as_os_str().to_owned()).collect() };
    // the next one last
    let (mut at, mut left, mut links) = (PathBuf::from("/"), parts(&path), 0);
    while let Some(part) = left.pop() {
        if part == ".." {
            at.pop();
            continue;
        }
        if closed == Some(&*at) && part != "." {
            return None;
        }
        let next = at.join(&part);
        // where it cannot be read, or is none, opening tells
        let Ok(link) = std::fs::read_link(&next) else {
            at = next;
            continue;
        };
        links += 1;
        if links > LINKS {
            return None;
        }
        left.extend(parts(&link));
    }
    Some(at)
}

/// What another process that is to log as this one is called with.
static ARGUMENTS: OnceLock<Vec<OsString>> = OnceLock::new();

/// Options that have another process log as this one does.
pub fn arguments() -> Vec<OsString> {
    ARGUMENTS.get().cloned().unwrap_or_default()
}

/// Exit codes of the command where there is no log.
pub struct Codes {
    /// The level is none.
    pub usage: u8,
    /// The file cannot be opened.
    pub file: u8,
}

/// Sets up logging for the process; one that goes into the `background` logs there by the system.
///
/// # Errors
/// A level that is none, a file that cannot be opened.
pub fn start(args: &LogArgs, default: &str, codes: &Codes, background: bool) -> Result<(), Failure> {
    let level = args.level.as_deref().unwrap_or(default);
    let mut same: Vec<OsString> = vec!["--log".into(), level.into()];
    if let Some(file) = &args.log_file {
        same.extend(["--log-file".into(), std::path::absolute(file).unwrap_or_else(|_| file.clone()).into()]);
    }
    // there is one log
    let _ = ARGUMENTS.set(same);
    let filter = EnvFilter::try_new(level).map_err(|e| {
        Failure::new(format!("--log {level}: {e}: use error, warn, info, debug or trace")).with_code(codes.usage)
    })?;
    // a line with its times at the end of each span that the level lets through
    let subscriber = tracing_subscriber::fmt().with_env_filter(filter).with_span_events(FmtSpan::CLOSE);
    // that it cannot log it would tell standard error, and panic where it cannot do that either
    let subscriber = subscriber.log_internal_errors(false);
    match &args.log_file {
        Some(path) => {
            let file = OpenOptions::new().create(true).append(true).open(path).map_err(|e| {
                Failure::at("cannot open the log file", path.display(), host_error(&e)).with_code(codes.file)
            })?;
            subscriber.with_ansi(false).with_writer(Mutex::new(file)).init();
        }
        None if background => {
            subscriber.without_time().with_target(false).with_ansi(false).with_writer(Lines::new()).init();
        }
        None => {
            let terminal = std::io::stderr().is_terminal();
            subscriber.without_time().with_target(false).with_ansi(terminal).with_writer(std::io::stderr).init();
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn paths_lead_where_the_kernel_opens_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let top = std::fs::canonicalize(dir.path()).unwrap();
        let on = top.join("mnt");
        for name in ["mnt/sub", "var"] {
            std::fs::create_dir_all(top.join(name)).unwrap();
        }
        for (to, name) in [("mnt/new.log", "dangling"), ("../var", "mnt/out"), ("circle", "circle"), ("mnt/sub", "in")]
        {
            symlink(to, top.join(name)).unwrap();
        }
        let at = |path: &str, mounted: bool| resolved(&top.join(path), mounted.then_some(&*on));
        for mounted in [false, true] {
            assert_eq!(at("mnt/../var/x.log", mounted), Some(top.join("var/x.log")));
            assert_eq!(at("var/x.log", mounted), Some(top.join("var/x.log")));
            assert_eq!(at("mnt.log", mounted), Some(top.join("mnt.log")));
            assert_eq!(at("circle", mounted), None);
        }
        assert_eq!(at("dangling", false), Some(on.join("new.log")));
        assert_eq!(at("in/../x.log", false), Some(on.join("x.log")));
        assert_eq!(at("mnt/out/x.log", false), Some(top.join("var/x.log")));
        // nothing is looked up there
        for path in ["dangling", "in/../x.log", "mnt/out/x.log", "mnt/x.log", "var/../mnt/./x.log"] {
            assert_eq!(at(path, true), None, "{path}");
        }
        let args = |file: &str| LogArgs { level: None, log_file: Some(top.join(file)) };
        let codes = Codes { usage: 1, file: 2 };
        assert!(args("mnt/../var/x.log").check_outside(&on, false, &codes).is_ok());
        assert!(args("dangling").check_outside(&on, false, &codes).is_err());
        assert!(args("dangling").check_outside(&on, true, &codes).is_err());
    }
}
