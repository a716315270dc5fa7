//! Which mount is at a place. Nothing here asks the mount itself, which may be dead, or not served yet.
//!
//! Device numbers and the numbers in `/proc/self/mountinfo` are used again at once when a mount has gone. So a mount is known by
//! the number that statx(2) gives, which is never used again (Linux 6.8); before, by the other two together.

use crate::mount::{detach_top, is_unserved};
use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;

const UNIQUE: StatxFlags = StatxFlags::from_bits_retain(0x4000);
/// Somebody mounts or unmounts there while it is looked at.
const TRIES: u32 = 20;

/// Tells one mount from all others at the same place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MountId {
    /// Never used again; `None` before Linux 6.8.
    unique: Option<u64>,
    /// As the table of mounts has it.
    number: u64,
    pub(crate) dev: (u32, u32),
}

impl MountId {
    /// Number of the mounted file system, as the table of mounts has it: `0:57`.
    pub fn device(&self) -> String {
        format!("{}:{}", self.dev.0, self.dev.1)
    }
    /// Whether both are the same mount.
    pub fn is(&self, other: &Self) -> bool {
        match (self.unique, other.unique) {
            (Some(ours), Some(theirs)) => ours == theirs,
            _ => (self.number, self.dev) == (other.number, other.dev),
        }
    }
}

/// For another process.
impl std::fmt::Display for MountId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {} {} {}", self.unique.unwrap_or(0), self.number, self.dev.0, self.dev.1)
    }
}

impl FromStr for MountId {
    type Err = ();

    fn from_str(s: &str) -> Result<Self, ()> {
        let mut numbers = s.split(' ').map(|n| n.parse::<u64>().map_err(|_| ()));
        let mut next = || numbers.next().ok_or(())?;
        let (unique, number) = (next()?, next()?);
        let mut part = || next().and_then(|n| u32::try_from(n).map_err(|_| ()));
        Ok(Self { unique: (unique > 0).then_some(unique), number, dev: (part()?, part()?) })
    }
}

/// What is on top at a place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Top {
    pub id: MountId,
    /// Type, with the subtype.
    pub kind: String,
    /// Of the mount, as `rw,noatime`.
    pub options: String,
    /// Of the file system.
    pub super_options: String,
    /// Where.
    point: PathBuf,
    /// The number and device of the one below it at the same place.
    below: Option<(u64, (u32, u32))>,
}

impl Top {
    pub fn is_braidfs(&self) -> bool {
        matches!(&*self.kind, "fuse.braidfs" | "fuseblk.braidfs")
    }
}

/// A mount whose server died.
#[derive(Debug, Clone)]
pub struct DeadMount {
    top: Top,
    /// It was detached already, by a process that died then.
    pub(crate) detached: bool,
}

impl DeadMount {
    pub(crate) fn new(top: Top) -> Self {
        Self { top, detached: false }
    }

    pub(crate) fn id(&self) -> MountId {
        self.top.id
    }

    /// Where it is, or was when it was looked at.
    pub fn point(&self) -> &Path {
        &self.top.point
    }

    /// Its options as the kernel has them, remounts included: of the mount, and what of the file system's (`ro`, `sync`,
    /// `lazytime`, `dirsync`) are no words of FUSE.
    pub fn options(&self) -> String {
        let shown = ["ro", "sync", "dirsync", "lazytime"];
        let of_fs = self.top.super_options.split(',').filter(|o| shown.contains(o));
        // a mount without either word has strict access times
        let times = ["relatime", "noatime"];
        let strict = (!self.top.options.split(',').any(|o| times.contains(&o))).then_some("strictatime");
        std::iter::once(&*self.top.options).chain(of_fs).chain(strict).collect::<Vec<_>>().join(",")
    }

    /// Whether the kernel keeps the block device with this number for it.
    pub fn has_claim_on(&self, major: u32, minor: u32) -> bool {
        !self.detached && self.top.kind == "fuseblk.braidfs" && self.top.id.dev == (major, minor)
    }

    /// Unmounts it, so that another one can be mounted in its place. False, and nothing is done: it is gone, or somebody has
    /// mounted over it, or has changed its options.
    ///
    /// # Errors
    /// Of `umount`, for want of permission for instance.
    pub fn detach(&self) -> io::Result<bool> {
        let point = self.point();
        let top = top_at(point)?;
        if self.detached {
            return Ok(self.leaves_free(top.as_ref()));
        }
        if top.as_ref() != Some(&self.top) || !is_unserved(point) {
            return Ok(false);
        }
        tracing::warn!(point = %point.display(), "unmounting what a dead server left");
        detach_top(point)?;
        Ok(true)
    }

    /// Whether `top` is what it lay on.
    pub(crate) fn leaves_free(&self, top: Option<&Top>) -> bool {
        top.map(|t| (t.id.number, t.id.dev)) == self.top.below
    }
}

/// The mount on top at `point`, where its server died and it is a braidfs.
pub fn dead_at(point: &Path) -> Option<DeadMount> {
    let top = top_at(point).ok()??;
    (top.is_braidfs() && is_unserved(point)).then(|| DeadMount::new(top))
}

/// Detaches the mount whose root is open, where its server died and it is a braidfs: just that one, whatever is at its path by then.
///
/// # Errors
/// Of `umount`.
pub(crate) fn detach_dead(root: BorrowedFd<'_>) -> io::Result<()> {
    let opened = PathBuf::from(format!("/proc/self/fd/{}", root.as_raw_fd()));
    let (Ok(point), Ok(table)) = (std::fs::read_link(&opened), std::fs::read("/proc/self/mountinfo")) else {
        return Ok(());
    };
    // an ordinary directory is none that something is mounted on
    let Some(top) = find(&table, &point, numbers(&opened)) else { return Ok(()) };
    if !top.is_braidfs() || !is_unserved(&opened) {
        return Ok(());
    }
    tracing::warn!(point = %point.display(), "unmounting what a dead server left");
    detach_top(if rustix::process::geteuid().is_root() { &opened } else { &point })
}

/// Which mounts there were, to tell from them one that is made.
#[derive(Debug)]
pub(crate) struct Before(Vec<(u64, (u32, u32))>);

impl Before {
    /// Those that there are now.
    ///
    /// # Errors
    /// The table of mounts cannot be read.
    pub fn now() -> io::Result<Self> {
        Ok(Self::of(&std::fs::read("/proc/self/mountinfo")?))
    }

    fn of(table: &[u8]) -> Self {
        Self(lines(table).map(|l| (l.number, l.dev)).collect())
    }

    /// The braidfs with this source that was mounted since, on `at` or wherever that is by now. `None`: there is none, or more than
    /// one.
    ///
    /// # Errors
    /// As [`Self::now`].
    pub fn made_since(&self, source: &str, at: &Path) -> io::Result<Option<MountId>> {
        let table = std::fs::read("/proc/self/mountinfo")?;
        let Some((id, point)) = self.made_in(&table, source, at) else { return Ok(None) };
        // with the number that is never used again, where it is still there
        let top = top_at(&point).ok().flatten().filter(|top| top.id.is(&id));
        Ok(Some(top.map_or(id, |top| top.id)))
    }

    fn made_in(&self, table: &[u8], source: &str, at: &Path) -> Option<(MountId, PathBuf)> {
        let is_made = |l: &Line<'_>| {
            matches!(l.kind, b"fuse.braidfs" | b"fuseblk.braidfs")
                && unescape(l.source) == source.as_bytes()
                && !self.0.contains(&(l.number, l.dev))
        };
        let mut made: Vec<_> = lines(table).filter(is_made).collect();
        let first = made.first()?.dev;
        // the same one may be seen below several mounts at once, where these are shared
        if made.iter().any(|l| l.dev != first) {
            return None;
        }
        let wanted = escape(at.as_os_str().as_bytes());
        let line = made.swap_remove(made.iter().position(|l| l.point == wanted).unwrap_or(0));
        let point = PathBuf::from(OsString::from_vec(unescape(line.point)));
        Some((MountId { unique: None, number: line.number, dev: line.dev }, point))
    }
}

/// What a mount that a process made is like.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Found {
    /// On top where it is, and nobody serves it.
    Dead(Top),
    /// On top where it is, and its connection goes on.
    Alive,
    /// Somebody has mounted over it.
    Covered,
    /// Not in the table of mounts.
    Gone,
}

/// Where a mount is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Place {
    /// On top at this path.
    OnTop(PathBuf),
    /// Somebody has mounted over it, or it cannot be told.
    Covered,
    /// Not in the table of mounts.
    Gone,
}

/// Looks for the mount `ours`, which was at `point` when it was last seen. Asks nobody else's whether it is served.
pub(crate) fn look_at(point: &Path, ours: &MountId) -> Found {
    match find_ours(point, ours) {
        (Place::OnTop(point), Some(top)) if is_unserved(&point) => Found::Dead(top),
        (Place::OnTop(_), _) => Found::Alive,
        (Place::Covered, _) => Found::Covered,
        (Place::Gone, _) => Found::Gone,
    }
}

/// Where the mount `ours` is, which was at `point` when it was last seen. Asks no server.
pub(crate) fn place_of(point: &Path, ours: &MountId) -> Place {
    find_ours(point, ours).0
}

/// Also what is on top there, where that is `ours`. A directory above a mount point may be renamed, and a mount be moved.
fn find_ours(point: &Path, ours: &MountId) -> (Place, Option<Top>) {
    // not known: nothing is touched
    let unknown = |e: io::Error| {
        tracing::debug!(error = %e, "cannot read the table of mounts");
        (Place::Covered, None)
    };
    let on_top = |point: &Path| Ok(top_at(point)?.filter(|top| top.id.is(ours)));
    let mut at = point.to_path_buf();
    for _ in 0..TRIES {
        match on_top(&at) {
            Ok(Some(top)) => return (Place::OnTop(top.point.clone()), Some(top)),
            Ok(None) => {}
            Err(e) => return unknown(e),
        }
        let listed = match std::fs::read("/proc/self/mountinfo") {
            Ok(table) => point_of(&table, ours),
            Err(e) => return unknown(e),
        };
        match listed {
            None => return (Place::Gone, None),
            Some(there) if there == at => break,
            Some(there) => at = there,
        }
    }
    (Place::Covered, None)
}

/// What is on top at `point`; `None`: nothing is mounted there.
///
/// # Errors
/// The table of mounts cannot be read, or changes all the time.
pub(crate) fn top_at(point: &Path) -> io::Result<Option<Top>> {
    let point = &std::path::absolute(point)?;
    for _ in 0..TRIES {
        let before = numbers(point);
        let table = std::fs::read("/proc/self/mountinfo")?;
        if numbers(point) == before {
            return Ok(find(&table, point, before));
        }
    }
    Err(io::ErrorKind::WouldBlock.into())
}

/// `unique` number and number of what a path leads to.
type Numbers = (Option<u64>, Option<u64>);

fn numbers(point: &Path) -> Numbers {
    let ask = |what: StatxFlags| {
        let flags = AtFlags::STATX_DONT_SYNC | AtFlags::NO_AUTOMOUNT;
        let told = statx(CWD, point, flags, what).ok()?;
        (told.stx_mask & what.bits() != 0).then_some(told.stx_mnt_id)
    };
    (ask(UNIQUE), ask(StatxFlags::MNT_ID))
}

/// A mount on the directory `inside` of the volume that is mounted on `point`, or below it: wherever else the volume is shown
/// (`mount --bind`), too. Not what other mount namespaces have.
///
/// # Errors
/// The table of mounts cannot be read.
pub(crate) fn mounts_inside(point: &Path, inside: &Path) -> io::Result<Option<PathBuf>> {
    let table = std::fs::read("/proc/self/mountinfo")?;
    Ok(find_inside(&table, point, inside))
}

fn find_inside(table: &[u8], point: &Path, inside: &Path) -> Option<PathBuf> {
    /// What is shown at a place.
    struct Shown<'a> {
        number: &'a [u8],
        above: &'a [u8],
        dev: &'a [u8],
        root: PathBuf,
        point: PathBuf,
    }
    let path = |bytes| PathBuf::from(OsString::from_vec(unescape(bytes)));
    let all: Vec<_> = table
        .split(|&b| b == b'\n')
        .filter_map(|line| {
            let mut fields = line.split(|&b| b == b' ');
            let [number, above, dev, root, point] = std::array::from_fn(|_| fields.next());
            Some(Shown { number: number?, above: above?, dev: dev?, root: path(root?), point: path(point?) })
        })
        .collect();
    let volume = all.iter().rev().find(|m| m.point == point && m.root == Path::new("/"))?.dev;
    let border = Path::new("/").join(inside);
    let is_inside = |m: &&Shown<'_>| {
        // where it lies in the file system that is shown by the mount above it
        all.iter().any(|above| {
            above.number == m.above
                && above.dev == volume
                && m.point.strip_prefix(&above.point).is_ok_and(|at| above.root.join(at).starts_with(&border))
        })
    };
    all.iter().find(is_inside).map(|m| m.point.clone())
}

fn find(table: &[u8], point: &Path, (unique, number): Numbers) -> Option<Top> {
    let lines: Vec<Line<'_>> = lines_at(table, point).collect();
    let at = match number {
        // of another mount: `point` is an ordinary directory of it
        Some(number) => lines.iter().rposition(|l| l.number == number)?,
        None => lines.len().checked_sub(1)?,
    };
    let line = &lines[at];
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let below = lines.iter().enumerate().rev().find(|(i, _)| *i != at).map(|(_, l)| (l.number, l.dev));
    Some(Top {
        id: MountId { unique, number: line.number, dev: line.dev },
        point: point.to_path_buf(),
        kind: text(line.kind),
        options: text(line.options),
        super_options: text(line.super_options),
        below,
    })
}

struct Line<'a> {
    number: u64,
    dev: (u32, u32),
    /// As the kernel writes it.
    point: &'a [u8],
    options: &'a [u8],
    kind: &'a [u8],
    /// As the kernel writes it.
    source: &'a [u8],
    super_options: &'a [u8],
}

/// Where the table of mounts has this one.
fn point_of(mountinfo: &[u8], mount: &MountId) -> Option<PathBuf> {
    let line = lines(mountinfo).find(|l| (l.number, l.dev) == (mount.number, mount.dev))?;
    Some(PathBuf::from(OsString::from_vec(unescape(line.point))))
}

/// Lines of the table of mounts about `point`, oldest first.
fn lines_at<'a>(mountinfo: &'a [u8], point: &Path) -> impl Iterator<Item = Line<'a>> + use<'a> {
    let wanted = escape(point.as_os_str().as_bytes());
    lines(mountinfo).filter(move |line| line.point == wanted)
}

fn lines(mountinfo: &[u8]) -> impl Iterator<Item = Line<'_>> {
    mountinfo.split(|&b| b == b'\n').filter_map(|line| {
        let mut fields = line.split(|&b| b == b' ');
        let number = std::str::from_utf8(fields.next()?).ok()?.parse().ok()?;
        let (major, minor) = std::str::from_utf8(fields.nth(1)?).ok()?.split_once(':')?;
        let dev = (major.parse().ok()?, minor.parse().ok()?);
        let point = fields.nth(1)?;
        let options = fields.next()?;
        // optional fields end with a lone "-"; type, source and the file system's options follow
        let mut rest = fields.skip_while(|f| *f != b"-").skip(1);
        let kind = rest.next()?;
        let [source, super_options] = std::array::from_fn(|_| rest.next().unwrap_or_default());
        Some(Line { number, dev, point, options, kind, source, super_options })
    })
}

/// As the kernel writes paths in `/proc`.
fn escape(path: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(path.len());
    for &b in path {
        match b {
            b' ' | b'\t' | b'\n' | b'\\' => out.extend_from_slice(format!("\\{b:03o}").as_bytes()),
            _ => out.push(b),
        }
    }
    out
}

/// As it is without [`escape`].
fn unescape(path: &[u8]) -> Vec<u8> {
    let (mut out, mut rest) = (Vec::with_capacity(path.len()), path);
    while let Some((&b, tail)) = rest.split_first() {
        let digits = tail.get(..3).filter(|d| b == b'\\' && d.iter().all(|d| (b'0'..=b'7').contains(d)));
        let (byte, tail) = match digits {
            Some(d) => (d.iter().fold(0, |n: u8, d| n.wrapping_mul(8) | (d - b'0')), &tail[3..]),
            None => (b, tail),
        };
        out.push(byte);
        rest = tail;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    const INFO: &[u8] = b"22 1 8:1 / / rw - ext4 /dev/sda1 rw\n30 22 0:40 / /mnt/a\\040b ro,nosuid shared:1 - fuse.braidfs x rw,sync,user_id=0\n\
                          31 30 0:41 / /mnt/a\\040b rw,relatime - fuse.sshfs y rw\n";

    #[test]
    fn the_topmost_mount_is_found() {
        let top = |point: &str, number| find(INFO, Path::new(point), (None, number));
        let theirs = top("/mnt/a b", None).unwrap();
        assert_eq!((theirs.id.dev, &*theirs.kind, theirs.below), ((0, 41), "fuse.sshfs", Some((30, (0, 40)))));
        assert!(!theirs.is_braidfs());
        // what the system calls the topmost one counts, not the order
        let ours = top("/mnt/a b", Some(30)).unwrap();
        assert!(ours.is_braidfs() && ours.id.dev == (0, 40));
        assert_eq!(top("/", None).unwrap().id.dev, (8, 1));
        assert_eq!((top("/mnt", None), top("/mnt", Some(22))), (None, None));
    }

    #[test]
    fn mounts_in_a_directory_of_a_volume_are_found() {
        let table = b"22 1 8:1 / / rw - ext4 /dev/sda1 rw\n\
                      30 22 0:40 / /mnt/a\\040b rw - fuse.braidfs x rw\n\
                      31 30 0:41 / /mnt/a\\040b/t/d rw - tmpfs y rw\n\
                      32 22 0:40 /u /srv/u rw - fuse.braidfs x rw\n\
                      33 32 0:42 / /srv/u/v/w rw - tmpfs y rw\n\
                      34 33 0:43 / /srv/u/v/w/x rw - tmpfs y rw\n\
                      35 22 0:40 /t /srv/t rw - fuse.braidfs x rw\n";
        let point = Path::new("/mnt/a b");
        let found = |inside: &str| find_inside(table, point, Path::new(inside)).map(|p| p.display().to_string());
        assert_eq!(found("t").as_deref(), Some("/mnt/a b/t/d"));
        assert_eq!(found("t/d").as_deref(), Some("/mnt/a b/t/d"));
        // by what is shown of it elsewhere
        assert_eq!(found("u/v").as_deref(), Some("/srv/u/v/w"));
        // beside it, and what lies on another file system in it
        assert_eq!((found("t/e"), found("d"), found("u/v/w/x"), found("u/v/ww")), (None, None, None, None));
        assert_eq!(find_inside(table, Path::new("/mnt"), Path::new("t")), None);
        assert_eq!(unescape(&escape(b"a b\\134\n")), b"a b\\134\n");
    }

    #[test]
    fn numbers_that_are_used_again_do_not_deceive() {
        let first = MountId { unique: Some(7), number: 30, dev: (0, 40) };
        let later = MountId { unique: Some(8), ..first };
        assert!(!first.is(&later) && first.is(&first));
        let old_kernel = MountId { unique: None, ..first };
        assert!(first.is(&old_kernel) && !old_kernel.is(&MountId { number: 31, ..old_kernel }));
        for id in [first, old_kernel] {
            assert_eq!(id.to_string().parse(), Ok(id));
        }
        assert!("1 2 3".parse::<MountId>().is_err() && "".parse::<MountId>().is_err());
    }

    /// By what it is, and not by where it is: a directory above it may have another name by then.
    #[test]
    fn a_mount_that_was_made_is_found_wherever_it_is() {
        let before = Before::of(INFO);
        let made = |more: &str, at: &str| {
            let table = [INFO, more.as_bytes()].concat();
            before.made_in(&table, "a b[t]", Path::new(at)).map(|(id, point)| (id.number, id.dev, point))
        };
        assert_eq!(made("", "/mnt/t"), None);
        let ours = "40 22 0:50 / /mnt/moved/t rw - fuse.braidfs a\\040b[t] rw\n";
        let moved = Some((40, (0, 50), PathBuf::from("/mnt/moved/t")));
        assert_eq!(made(ours, "/mnt/t"), moved);
        // beside others that were made meanwhile
        let others = "41 22 0:51 / /mnt/t rw - fuse.braidfs other rw\n42 22 0:52 / /mnt/t rw - tmpfs a\\040b[t] rw\n";
        assert_eq!(made(&[ours, others].concat(), "/mnt/t"), moved);
        // below mounts that are shared, it is seen twice
        let copied = [ours, "43 22 0:50 / /mnt/t rw - fuse.braidfs a\\040b[t] rw\n"].concat();
        assert_eq!(made(&copied, "/mnt/t").map(|found| found.0), Some(43));
        assert_eq!(made(&copied, "/mnt/u").map(|found| found.0), Some(40));
        let another = [ours, "44 22 0:53 / /mnt/t rw - fuse.braidfs a\\040b[t] rw\n"].concat();
        assert_eq!(made(&another, "/mnt/t"), None);
        let again = Before::of(&[INFO, ours.as_bytes()].concat());
        assert!(again.made_in(&[INFO, ours.as_bytes()].concat(), "a b[t]", Path::new("/mnt/moved/t")).is_none());
    }

    #[test]
    fn options_are_those_of_the_table() {
        let dead = DeadMount::new(find(INFO, Path::new("/mnt/a b"), (None, Some(30))).unwrap());
        assert_eq!(dead.options(), "ro,nosuid,sync,strictatime");
        assert!(!dead.has_claim_on(0, 40), "not a block device's");
    }

    #[test]
    fn the_system_numbers_mounts() {
        let root = top_at(Path::new("/")).unwrap().unwrap();
        assert!(root.id.is(&top_at(Path::new("/")).unwrap().unwrap().id));
        assert_eq!(look_at(Path::new("/"), &root.id), Found::Alive);
        let other = MountId { unique: root.id.unique.map(|u| u + 1), number: u64::MAX, dev: (0, 0) };
        assert_eq!(look_at(Path::new("/"), &other), Found::Gone);
        assert_eq!(top_at(tempfile::tempdir().unwrap().path()).unwrap(), None);
        // wherever it was before
        assert_eq!(place_of(Path::new("/missing"), &root.id), Place::OnTop("/".into()));
        assert_eq!(place_of(Path::new("/"), &other), Place::Gone);
    }

    #[test]
    fn a_mount_is_found_where_it_was_moved_to() {
        let id = |number, dev| MountId { unique: None, number, dev };
        assert_eq!(point_of(INFO, &id(30, (0, 40))), Some("/mnt/a b".into()));
        assert_eq!((point_of(INFO, &id(30, (0, 41))), point_of(INFO, &id(32, (0, 40)))), (None, None));
    }
}
