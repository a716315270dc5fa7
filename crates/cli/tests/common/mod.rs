//! Runs the `braidfs` binary on images in a temporary directory.
#![allow(dead_code, reason = "each test file uses its part")]

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::time::Duration;
use tempfile::TempDir;

/// What a run gave.
#[derive(Debug)]
pub struct Run {
    /// Its exit code; -1 where a signal ended it.
    pub code: i32,
    /// What it wrote to standard output.
    pub out: String,
    /// What it wrote to standard error.
    pub err: String,
    /// The arguments, for messages.
    pub args: String,
}

impl Run {
    /// Exit code 0.
    #[track_caller]
    pub fn ok(self) -> Self {
        self.code(0)
    }
    /// This exit code.
    #[track_caller]
    pub fn code(self, code: i32) -> Self {
        assert_eq!(self.code, code, "{self:#?}");
        self
    }
    /// The error says this, in one line that names the program, and ends with this code.
    #[track_caller]
    pub fn fails(self, code: i32, parts: &[&str]) -> Self {
        let run = self.code(code);
        assert!(run.err.contains("braidfs: ") || run.err.contains("error: "), "no message: {run:#?}");
        for part in parts {
            assert!(run.err.contains(part), "`{part}` is missing: {run:#?}");
        }
        run
    }
}

/// Runs `braidfs` with `args` in `dir`.
#[track_caller]
pub fn braidfs_in<S: AsRef<OsStr>>(dir: &Path, args: &[S]) -> Run {
    run(Command::new(env!("CARGO_BIN_EXE_braidfs")).current_dir(dir).args(args))
}

/// Runs a prepared command. No input, however bad, may make it panic or end by a signal.
#[track_caller]
pub fn run(command: &mut Command) -> Run {
    prepare(command);
    let output = command.output().expect("the binary runs");
    told(command, &output)
}

/// As [`run`]; a command that has not ended when the time is over is killed, and the test fails.
#[track_caller]
pub fn run_within(limit: Duration, command: &mut Command) -> Run {
    prepare(command);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary runs");
    let _end = end_after(limit, &child);
    let output = child.wait_with_output().expect("it ends");
    told(command, &output)
}

fn prepare(command: &mut Command) {
    command.env_remove("BRAIDFS_LOG").env_remove("BRAIDFS_LOG_FILE").stdin(Stdio::null());
}

#[track_caller]
fn told(command: &Command, output: &Output) -> Run {
    let run = Run {
        code: output.status.code().unwrap_or(-1),
        out: String::from_utf8_lossy(&output.stdout).into_owned(),
        err: String::from_utf8_lossy(&output.stderr).into_owned(),
        args: command.get_args().map(|a| a.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" "),
    };
    assert!(run.code != -1 && run.code != 101 && !run.err.contains("panicked"), "{run:#?}");
    run
}

/// Kills a process that was started when the time is over, unless what this returns is dropped before.
#[must_use]
pub fn end_after(limit: Duration, child: &Child) -> Sender<()> {
    let (waits, ends) = mpsc::channel();
    let pid = rustix::process::Pid::from_child(child);
    std::thread::spawn(move || {
        if ends.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
            _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
    });
    waits
}

/// A directory for images and files.
pub struct Bench {
    dir: TempDir,
}

impl Bench {
    /// An empty one.
    pub fn new() -> Self {
        Self { dir: tempfile::tempdir().expect("a temporary directory") }
    }
    /// With a volume of 64 MiB in `vol.img`.
    #[track_caller]
    pub fn with_volume() -> Self {
        let bench = Self::new();
        bench.run(&["mkfs", "--quiet", "--domains", "2", "--size", "64M", "vol.img"]).ok();
        bench
    }
    /// Runs `braidfs` here.
    #[track_caller]
    pub fn run<S: AsRef<OsStr>>(&self, args: &[S]) -> Run {
        braidfs_in(self.dir.path(), args)
    }
    /// As [`Bench::run`]; where it has not ended when the time is over, the test fails.
    #[track_caller]
    pub fn run_within<S: AsRef<OsStr>>(&self, limit: Duration, args: &[S]) -> Run {
        let mut command = Command::new(env!("CARGO_BIN_EXE_braidfs"));
        run_within(limit, command.current_dir(self.dir.path()).args(args))
    }
    /// A path here.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
    /// Writes a file here.
    pub fn write(&self, name: &str, data: impl AsRef<[u8]>) {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().expect("a parent")).expect("directories");
        std::fs::write(path, data).expect("a file");
    }
    /// Content of a file of the directory.
    pub fn read(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.path(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
    }
    /// A sparse file of `bytes`.
    pub fn sparse(&self, name: &str, bytes: u64) -> std::fs::File {
        let file = std::fs::File::options().read(true).write(true).create(true).truncate(false).open(self.path(name));
        let file = file.expect("a file");
        file.set_len(bytes).expect("its size");
        file
    }
}
