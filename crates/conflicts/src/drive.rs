//! Builds the tool, has it run the cells, and reads what it found.

use crate::cell::Done;
use crate::matrix::{Cell, CellId};
use crate::report::Window;
use crate::{Error, Result, known};
use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use tempfile::TempDir;

/// Is valgrind there, with what the tool needs to be built? Else what is missing, in words.
pub fn missing() -> Option<&'static str> {
    let have = |program: &str| {
        let path = std::env::var_os("PATH").unwrap_or_default();
        std::env::split_paths(&path).any(|dir| dir.join(program).is_file())
    };
    if cfg!(not(all(target_arch = "x86_64", target_os = "linux"))) {
        Some("a Linux on x86-64")
    } else if !have("valgrind") || !Path::new("/usr/include/valgrind/pub_tool_tooliface.h").is_file() {
        Some("the Debian package valgrind (apt-get install valgrind)")
    } else if !have("gcc") {
        Some("gcc (apt-get install gcc)")
    } else {
        None
    }
}

/// Builds the tool beside this program, and says where it is.
///
/// # Errors
/// It cannot be built.
pub fn build_tool() -> Result<PathBuf> {
    let this = std::env::current_exe().map_err(|e| Error::io(Path::new("this program"), e))?;
    let dir = this.with_file_name("conflicts-tool");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tool/build.sh");
    let done = Command::new(&script).arg(&dir).status().map_err(|e| Error::io(&script, e))?;
    if done.success() { Ok(dir) } else { Err(Error::Cell(format!("{} failed", script.display()))) }
}

/// Free bytes that a directory in memory must have: images are sparse, a container's `/dev/shm` has 64 MiB.
const MEMORY_BYTES: u64 = 2 << 30;

/// A directory for images: in memory, where there is room.
///
/// # Errors
/// It cannot be made.
pub(crate) fn work_dir() -> Result<TempDir> {
    let memory = Path::new("/dev/shm");
    if has_room(memory, MEMORY_BYTES) {
        return TempDir::new_in(memory).map_err(|e| Error::io(memory, e));
    }
    TempDir::new().map_err(|e| Error::io(&std::env::temp_dir(), e))
}

/// Has the file system of this directory so many bytes for us? None where there is no such directory.
fn has_room(dir: &Path, bytes: u64) -> bool {
    rustix::fs::statvfs(dir).is_ok_and(|s| dir.is_dir() && s.f_bavail.saturating_mul(s.f_frsize) >= bytes)
}

/// How a cell is run.
#[derive(Debug, Clone, Copy, Default)]
pub struct How<'a> {
    /// Steps of each worker in a window; `None`: as many as the cell says.
    pub window: Option<usize>,
    /// Name of a planted shared write.
    pub planted: Option<&'a str>,
    /// Names of switches for experiments that are on.
    pub switches: Option<&'a str>,
}

/// One process under valgrind, which runs a cell at a time in a directory of its own.
struct Host {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    dir: TempDir,
}

impl Host {
    fn start(tool: &Path) -> Result<Self> {
        // in memory: a device's time does not count, and the image is sparse
        let dir = work_dir()?;
        let this = std::env::current_exe().map_err(|e| Error::io(Path::new("this program"), e))?;
        // its path is in the process's memory: one of the same length everywhere
        let link = dir.path().join("checker");
        std::os::unix::fs::symlink(&this, &link).map_err(|e| Error::io(&link, e))?;
        let mut child = Command::new("valgrind")
            .args(["-q", "--tool=conflicts", "--fair-sched=yes", "--vgdb=no", "--read-inline-info=yes"])
            .arg("--fullpath-after=")
            .args(["./checker", "host"])
            // nothing that differs between machines may reach the process
            .env_clear()
            .env("PATH", "/usr/bin:/bin")
            .env("VALGRIND_LIB", tool)
            .current_dir(&dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|e| Error::io(Path::new("valgrind"), e))?;
        match (child.stdin.take(), child.stdout.take()) {
            (Some(input), Some(output)) => Ok(Self { child, input, output: BufReader::new(output), dir }),
            _ => Err(Error::Died),
        }
    }

    fn run(&mut self, id: &CellId, how: How<'_>) -> Result<Cell> {
        let failed = |e| Error::io(Path::new("the process under valgrind"), e);
        let window = how.window.or(id.window).map_or_else(|| "-".into(), |w| w.to_string());
        let CellId { test, workers, domains, .. } = id;
        let (planted, switches) = (how.planted.unwrap_or("-"), how.switches.unwrap_or("-"));
        let line = format!("{test} {workers} {} {window} {planted} {switches}\n", domains.name());
        self.input.write_all(line.as_bytes()).map_err(failed)?;
        let mut answer = String::new();
        self.output.read_line(&mut answer).map_err(failed)?;
        if answer != "ok\n" {
            return Err(Error::Cell(format!("{id}: failed, see above")));
        }
        let read = |name: &str| {
            let path = self.dir.path().join(name);
            std::fs::read_to_string(&path).map_err(|e| Error::io(&path, e))
        };
        let done: Done = serde_json::from_str(&read("done")?)?;
        Ok(Cell {
            id: id.clone(),
            foreground: Window::read(&read("foreground")?, done.foreground, 0)?,
            commit: Window::read(&read("commit")?, done.commit, done.commits)?,
        })
    }

    fn end(self) -> Result<()> {
        let Self { mut child, input, .. } = self;
        drop(input);
        let status = child.wait().map_err(|e| Error::io(Path::new("valgrind"), e))?;
        if status.success() { Ok(()) } else { Err(Error::Cell(format!("valgrind: {status}"))) }
    }
}

/// Runs cells with `jobs` processes, after the programs whose sharing is known. `done` is told of each. The cells come back
/// in their order.
///
/// # Errors
/// The first cell that failed, or a checker that does not see what it must.
pub fn run(cells: &[(CellId, How<'_>)], tool: &Path, jobs: usize, done: impl Fn(&Cell) + Sync) -> Result<Vec<Cell>> {
    let queue: Mutex<VecDeque<usize>> = Mutex::new((0..cells.len()).collect());
    let found: Mutex<Vec<(usize, Cell)>> = Mutex::new(Vec::new());
    let work = |first: bool| {
        let mut host = Host::start(tool)?;
        if first {
            for (name, sharing) in known::ALL {
                known::judge(name, *sharing, &host.run(&known::cell(name), How::default())?.foreground)?;
            }
        }
        loop {
            let next = queue.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
            let Some(i) = next else { return host.end() };
            let cell = host.run(&cells[i].0, cells[i].1)?;
            done(&cell);
            found.lock().unwrap_or_else(PoisonError::into_inner).push((i, cell));
        }
    };
    let empty = || queue.lock().unwrap_or_else(PoisonError::into_inner).clear();
    std::thread::scope(|s| {
        let stop_at_error = |first| work(first).inspect_err(|_| empty());
        let all: Vec<_> = (0..jobs.max(1)).map(|j| s.spawn(move || stop_at_error(j == 0))).collect();
        let all: Vec<Result<()>> = all.into_iter().map(|t| t.join().unwrap_or(Err(Error::Died))).collect();
        all.into_iter().collect::<Result<()>>()
    })?;
    let mut found = found.into_inner().unwrap_or_else(PoisonError::into_inner);
    found.sort_by_key(|f| f.0);
    Ok(found.into_iter().map(|f| f.1).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_go_where_there_is_room() {
        let here = std::env::temp_dir();
        assert!(has_room(&here, 1) && !has_room(&here, u64::MAX));
        assert!(!has_room(&here.join("not there"), 1));
    }
}
