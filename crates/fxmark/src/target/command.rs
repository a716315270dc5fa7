//! Programs that are called: mkfs, mount, the braidfs daemon.

use crate::{Error, Result};
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// Where a program is; also where root's programs are when the path does not have them.
pub fn program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut dirs: Vec<PathBuf> = std::env::split_paths(&path).collect();
    dirs.extend(["/usr/sbin", "/sbin", "/usr/local/sbin"].map(PathBuf::from));
    dirs.into_iter().map(|d| d.join(name)).find(|p| p.is_file())
}

/// Runs a program to its end; what it wrote to standard output.
///
/// # Errors
/// With what it wrote to standard error.
pub fn run(name: &str, args: &[&str]) -> Result<String> {
    let shown = || format!("{name} {}", args.join(" "));
    let path = program(name).unwrap_or_else(|| name.into());
    let out = Command::new(path)
        .args(args)
        // not for a Ctrl-C at the terminal: cleaning up needs them
        .process_group(0)
        .stdin(Stdio::null())
        .output()
        .map_err(|e| Error::io(format!("running `{}`", shown()), e))?;
    if out.status.success() {
        return Ok(String::from_utf8_lossy(&out.stdout).trim().to_owned());
    }
    let said = String::from_utf8_lossy(&out.stderr).trim().to_owned();
    let said = if said.is_empty() { out.status.to_string() } else { said };
    Err(Error::Command { command: shown(), said })
}

/// The hidden `hold` command: becomes the program, which is then ended when its parent dies.
///
/// # Errors
/// The program cannot be started.
pub fn hold(command: &[OsString]) -> Result<()> {
    let [program, args @ ..] = command else {
        return Err(Error::Usage("hold: not for people: no program".into()));
    };
    let how = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::TERM));
    how.map_err(|e| Error::io("asking for a signal at the parent's death", e))?;
    Err(Error::io(format!("starting {}", program.display()), Command::new(program).args(args).exec()))
}
