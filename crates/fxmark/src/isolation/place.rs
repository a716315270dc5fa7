//! The directories of the two, what limits them, and the neighbour's process.

use super::{Flood, Flooded, Plan};
use crate::lab_args;
use crate::target::{Lab, Target, program, run};
use crate::{Error, Result};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};

/// Directory of the victim.
pub const VICTIM: &str = "victim";
/// Directory of its neighbour.
pub const NEIGHBOUR: &str = "neighbour";

/// Bytes that each may have: both together what is there for sure.
fn share(plan: &Plan) -> u64 {
    plan.size * 2 / 5
}

/// A cgroup of a neighbour. It is removed with the value, and the controllers that were turned on for it are off again.
#[derive(Debug)]
pub struct Cgroup {
    at: PathBuf,
    /// That of the group above.
    control: PathBuf,
    added: Vec<&'static str>,
}

impl Cgroup {
    /// With so many bytes a second, each way, of this device; and whether that holds for what the kernel writes back later, too:
    /// only the memory controller tells it whose pages those are.
    fn limited(root: &Path, device: &Path, bps: u64) -> std::io::Result<(Self, bool)> {
        let at = root.join(format!("fxmark-isolation-{}", std::process::id()));
        let mut group = Self { at, control: root.join("cgroup.subtree_control"), added: Vec::new() };
        group.turn_on("io")?;
        let written_back = group.turn_on("memory").is_ok();
        std::fs::create_dir(&group.at)?;
        let number = std::fs::metadata(device)?.rdev();
        let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
        std::fs::write(group.at.join("io.max"), format!("{major}:{minor} rbps={bps} wbps={bps}"))?;
        Ok((group, written_back))
    }

    fn turn_on(&mut self, controller: &'static str) -> std::io::Result<()> {
        // who has no such file runs version 1, or none
        let on = std::fs::read_to_string(&self.control)?;
        if !on.split_whitespace().any(|c| c == controller) {
            std::fs::write(&self.control, format!("+{controller}"))?;
            self.added.push(controller);
        }
        Ok(())
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // the process in it has ended
        let _ = std::fs::remove_dir(&self.at);
        for controller in self.added.drain(..) {
            // somebody else's group may have it by now
            let _ = std::fs::write(&self.control, format!("-{controller}"));
        }
    }
}

/// Of mkfs.ext4, and of a mount of ext4 or XFS: quotas of projects.
const MKFS_QUOTAS: &str = "-Oquota,project";
const QUOTAS: &str = "prjquota";

/// Makes a small file system of that type below `dir`, and mounts it with quotas of projects: a kernel without them
/// refuses that.
fn try_quotas(dir: &Path, target: &Target) -> Result<()> {
    // mkfs.xfs refuses less than 300 MiB; of the sparse file it writes the log
    let (mkfs, bytes): (&[&str], u64) = match target {
        Target::Xfs => (&["mkfs.xfs", "-q", "-K"], 320 << 20),
        _ => (&["mkfs.ext4", "-q", "-F", MKFS_QUOTAS], 16 << 20),
    };
    let name = target.to_string();
    let (image, at) = (dir.join(format!("{name}-quotas.img")), dir.join(format!("{name}-quotas")));
    let said = |e| Error::io(format!("making {}", image.display()), e);
    std::fs::File::create(&image).and_then(|f| f.set_len(bytes)).map_err(said)?;
    std::fs::create_dir(&at).map_err(|e| Error::io(format!("making {}", at.display()), e))?;
    let tried = (|| {
        run(mkfs[0], &[&mkfs[1..], &[text(&image)?]].concat())?;
        run("mount", &["-t", &name, "-o", &format!("loop,{QUOTAS}"), text(&image)?, text(&at)?])?;
        run("umount", &[text(&at)?])
    })();
    // of a directory that goes with all that is in it
    let _ = std::fs::remove_file(&image);
    tried.map(drop)
}

/// Has ext4 and XFS made and mounted so that directories can have quotas, where what sets them is there, and the kernel
/// has them.
pub fn ask_for_quotas(lab: &mut Lab, targets: &[Target]) {
    for (target, programs) in [(Target::Ext4, &["setquota", "chattr"][..]), (Target::Xfs, &["xfs_quota"])] {
        if !targets.contains(&target) || programs.iter().any(|p| program(p).is_none()) {
            continue;
        }
        let name = target.to_string();
        if let Err(why) = try_quotas(&lab.dir, &target) {
            eprintln!("fxmark: {name} has no project quotas here: {why}");
            continue;
        }
        if target == Target::Ext4 {
            lab.mkfs_options.push((name.clone(), MKFS_QUOTAS.into()));
        }
        lab.mount_options.push((name, QUOTAS.into()));
    }
}

/// Whether [`ask_for_quotas`] asked for them.
fn has_quotas(lab: &Lab, target: &Target) -> bool {
    let name = target.to_string();
    lab.mount_options.iter().any(|(t, options)| *t == name && options == QUOTAS)
}

fn text(path: &Path) -> Result<&str> {
    path.to_str().ok_or_else(|| Error::Usage(format!("{}: not UTF-8", path.display())))
}

/// What limits the two directories of a mounted file system.
#[derive(Debug)]
pub struct Limits {
    /// The commands, or why there is no limit.
    pub said: Vec<String>,
    /// Of the neighbour.
    pub cgroup: Option<Cgroup>,
    /// Tenants that are mounted by themselves.
    pub mounts: Mounts,
}

/// Mounts on directories of the file system, which must go before it can be unmounted; with the value at the latest.
#[derive(Debug, Default)]
pub struct Mounts(Vec<PathBuf>);

impl Mounts {
    /// Unmounts them.
    ///
    /// # Errors
    /// Of umount(8).
    pub fn end(mut self) -> Result<()> {
        while let Some(at) = self.0.pop() {
            run("umount", &[text(&at)?])?;
        }
        Ok(())
    }
}

impl Drop for Mounts {
    fn drop(&mut self) {
        for at in self.0.drain(..) {
            // something has failed before, which is told
            let _ = text(&at).and_then(|at| run("umount", &["--lazy", at]));
        }
    }
}

/// Makes the two directories of a mounted file system, and limits them.
///
/// # Errors
/// Of making them.
pub fn limit_mounted(lab: &Lab, target: &Target, at: &Path, device: Option<&Path>, plan: &Plan) -> Result<Limits> {
    if *target == Target::Braidfs {
        let (said, mounts) = tenants_mounted(lab, at, plan)?;
        return Ok(Limits { said, cgroup: None, mounts });
    }
    let mut said = Vec::new();
    for (id, dir) in [(4711, VICTIM), (4712, NEIGHBOUR)] {
        let path = at.join(dir);
        std::fs::create_dir(&path).map_err(|e| Error::io(format!("making {}", path.display()), e))?;
        if !has_quotas(lab, target) {
            said.push(format!("without a project quota of {dir}: no program that sets one, or a kernel without them"));
            continue;
        }
        match project(target, at, &path, id, share(plan)) {
            Ok(command) => said.push(command),
            Err(why) => said.push(format!("without a project quota of {dir}: {why}")),
        }
    }
    let mut cgroup = None;
    if let (Some(bps), Some(device)) = (plan.neighbour_bps, device) {
        match Cgroup::limited(Path::new("/sys/fs/cgroup"), device, bps) {
            Ok((group, written_back)) => {
                let but =
                    if written_back { "" } else { ", not of what is written back: there is no memory controller" };
                said.push(format!("io.max of the neighbour's cgroup: rbps={bps} wbps={bps}{but}"));
                cgroup = Some(group);
            }
            Err(e) => said.push(format!("the neighbour's rate is not limited: no cgroup with io.max: {e}")),
        }
    }
    Ok(Limits { said, cgroup, mounts: Mounts::default() })
}

/// A project quota of a directory: the command.
fn project(target: &Target, at: &Path, dir: &Path, id: u32, bytes: u64) -> Result<String> {
    let (at, dir, number) = (text(at)?, text(dir)?, id.to_string());
    match target {
        Target::Xfs => {
            let assign = format!("project -s -p {dir} {id}");
            let limit = format!("limit -p bhard={bytes} {id}");
            run("xfs_quota", &["-x", "-c", &assign, "-c", &limit, at])?;
            Ok(format!("xfs_quota -x -c '{limit}' DIR"))
        }
        _ => {
            run("chattr", &["+P", "-p", &number, dir])?;
            let blocks = (bytes / 1024).to_string();
            run("setquota", &["-P", &number, "0", &blocks, "0", "0", at])?;
            Ok(format!("setquota -P {id} 0 {blocks} 0 0 DIR"))
        }
    }
}

fn tenants_mounted(lab: &Lab, at: &Path, plan: &Plan) -> Result<(Vec<String>, Mounts)> {
    let missing = || Error::Usage("the program braidfs was not found: name it with --braidfs".into());
    let braidfs = text(lab.braidfs.as_deref().ok_or_else(missing)?)?;
    let space = share(plan).to_string();
    let (mut said, mut mounts) = (Vec::new(), Mounts::default());
    for dir in [VICTIM, NEIGHBOUR] {
        let path = at.join(dir);
        let mut args = vec!["tenant", "create", "--space", &space];
        let bps = plan.neighbour_bps.filter(|_| dir == NEIGHBOUR).map(|n| n.to_string());
        if let Some(bps) = &bps {
            args.extend(["--read-bps", bps, "--write-bps", bps]);
        }
        args.push(text(&path)?);
        run(braidfs, &args)?;
        said.push(format!("braidfs {} DIR/{dir}", args[..args.len() - 1].join(" ")));
        if plan.mount_tenants {
            run(braidfs, &["tenant", "mount", text(at)?, dir])?;
            mounts.0.push(path);
            said.push(format!("braidfs tenant mount DIR {dir}"));
        }
    }
    Ok((said, mounts))
}

/// The same in process.
///
/// # Errors
/// Of making them.
#[cfg(feature = "braidfs")]
pub fn tenants(fs: &crate::fs::Library, plan: &Plan) -> Result<Vec<String>> {
    use braidfs::{InodeNo, Rate, Rates, TenantBudget};
    let mut said = Vec::new();
    for dir in [VICTIM, NEIGHBOUR] {
        let rate = plan.neighbour_bps.filter(|_| dir == NEIGHBOUR).map(|n| Rate { per_second: n, burst: None });
        let rates = Rates { read_bps: rate, write_bps: rate, ..Rates::default() };
        let budget = TenantBudget { space: Some(share(plan)), rates, ..TenantBudget::default() };
        let made = fs.volume.tenant_create(InodeNo::ROOT, dir.as_bytes(), 0o755, dir, budget, &fs.cred);
        made.map_err(|e| Error::Other(format!("making tenant {dir}: {e}")))?;
        let bps = rate.map_or_else(String::new, |r| format!(", {} bytes a second each way", r.per_second));
        said.push(format!("Volume::tenant_create of {dir}: {} bytes{bps}", share(plan)));
    }
    Ok(said)
}

/// A neighbour beside a mounted file system; it ends with the value, or with this process.
#[derive(Debug)]
pub struct Process {
    child: Child,
    out: BufReader<ChildStdout>,
}

impl Process {
    /// Starts it and waits until it floods.
    ///
    /// # Errors
    /// It cannot be started, or ended before.
    pub fn start(
        before: &[&str],
        dir: &Path,
        (flood, bytes): (Flood, u64),
        cpu: usize,
        cgroup: Option<&Cgroup>,
    ) -> Result<Self> {
        let exe = std::env::current_exe().map_err(|e| Error::io("finding this program", e))?;
        let mut command = Command::new(exe);
        command.args(lab_args::words(before, "neighbour")).arg(dir).arg(flood.name());
        command.args([bytes.to_string(), cpu.to_string()]).args(cgroup.map(|g| &g.at));
        let spawned = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = spawned.map_err(|e| Error::io("starting the neighbour", e))?;
        let Some(out) = child.stdout.take() else { return Err(Error::Other("the neighbour has no output".into())) };
        let mut process = Self { child, out: BufReader::new(out) };
        if process.line()? == "ready" { Ok(process) } else { Err(process.failed()) }
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.out.read_line(&mut line).map_err(|e| Error::io("listening to the neighbour", e))?;
        Ok(line.trim().to_owned())
    }

    fn failed(&mut self) -> Error {
        drop(self.child.stdin.take());
        let how = self.child.wait().map_or_else(|e| e.to_string(), |s| s.to_string());
        Error::Other(format!("the neighbour failed ({how}): what it said stands above"))
    }

    /// Ends it; what it did.
    ///
    /// # Errors
    /// It failed.
    pub fn end(mut self) -> Result<Flooded> {
        drop(self.child.stdin.take());
        let line = self.line()?;
        let done = serde_json::from_str(&line).map_err(|_| self.failed())?;
        match self.child.wait() {
            Ok(status) if status.success() => Ok(done),
            _ => Err(self.failed()),
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // where it has ended both say so
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Stands for a hierarchy: what is written there replaces what was.
    #[test]
    fn what_was_turned_on_for_a_cgroup_is_turned_off_again() {
        let root = tempfile::tempdir().expect("a directory");
        let control = root.path().join("cgroup.subtree_control");
        let said = || std::fs::read_to_string(&control).expect("the file");
        let device = Path::new("/dev/null");
        assert!(Cgroup::limited(root.path(), device, 1).is_err(), "no cgroups there");
        std::fs::write(&control, "cpu io").expect("written");
        let (group, written_back) = Cgroup::limited(root.path(), device, 7).expect("a group");
        assert!(written_back && group.added == ["memory"], "{:?}", group.added);
        assert_eq!(said(), "+memory");
        assert_eq!(std::fs::read_to_string(group.at.join("io.max")).expect("its limit"), "1:3 rbps=7 wbps=7");
        drop(group);
        assert_eq!(said(), "-memory");
    }
}
