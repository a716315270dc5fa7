//! Where the log goes and how much of it.

use crate::failure::{Failure, host_error};
use crate::mountinfo;
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

    /// Nothing is looked up where the volume is `mounted` already: whoever takes its server's place must not ask it.
    ///
    /// # Errors
    /// The file lies below the mount point: after an upgrade the server would write into what it serves.
    pub fn check_outside(&self, mountpoint: &Path, mounted: bool, codes: &Codes) -> Result<(), Failure> {
        let Some(file) = &self.log_file else { return Ok(()) };
        let plain = |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
        let lies_below = plain(file).starts_with(plain(mountpoint))
            || !mounted && mountinfo::absolute(file).starts_with(mountinfo::absolute(mountpoint));
        if !lies_below {
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
