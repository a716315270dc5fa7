//! Reads `/proc/self/mountinfo` (proc_pid_mountinfo(5)).

use crate::text;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// A line of `/proc/self/mountinfo`, as far as it is of use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// `major:minor` of the mounted file system.
    pub device: String,
    /// What of the file system is mounted: `/`, or the directory of a bind mount.
    pub root: PathBuf,
    /// The mount point.
    pub target: PathBuf,
    /// Options of this mount: `rw,nosuid,relatime`.
    pub options: String,
    /// Options of the file system: `rw,sync,…`.
    pub super_options: String,
    /// Type, with the subtype: `fuse.braidfs`, `fuseblk.braidfs`.
    pub kind: String,
    /// What the mounter gave as the source.
    pub source: OsString,
}

/// All mounts, oldest first; empty where `/proc` is not there.
pub fn read() -> Vec<Mount> {
    std::fs::read("/proc/self/mountinfo").map_or_else(|_| Vec::new(), |table| parse(&table))
}

/// The mount on `target` that is seen there: the newest on a path hides the others.
pub fn at(target: &Path) -> Option<Mount> {
    read().into_iter().rev().find(|m| m.target == target)
}

/// The mount table's name of a mount point. Nothing in it may be looked at: its server can be dead.
pub fn absolute(path: &Path) -> PathBuf {
    let joined = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
    match (joined.parent().and_then(|p| std::fs::canonicalize(p).ok()), joined.file_name()) {
        (Some(parent), Some(name)) => {
            let plain = parent.join(name);
            // A symlink to the mount point. Of what is mounted there this asks nothing, as looking for attributes would.
            match std::fs::read_link(&plain) {
                Ok(_) => std::fs::canonicalize(&plain).unwrap_or(plain),
                Err(_) => plain,
            }
        }
        _ => joined,
    }
}

fn parse(table: &[u8]) -> Vec<Mount> {
    table.split(|&b| b == b'\n').filter_map(parse_line).collect()
}

fn parse_line(line: &[u8]) -> Option<Mount> {
    let fields: Vec<&[u8]> = line.split(|&b| b == b' ').collect();
    // Optional fields end with a lone "-"; type and source follow.
    let dash = fields.iter().skip(6).position(|f| *f == b"-")? + 6;
    Some(Mount {
        device: String::from_utf8_lossy(fields.get(2)?).into_owned(),
        root: PathBuf::from(text::os_string(unescape(fields.get(3)?))),
        target: PathBuf::from(text::os_string(unescape(fields.get(4)?))),
        options: String::from_utf8_lossy(fields.get(5)?).into_owned(),
        super_options: String::from_utf8_lossy(fields.get(dash + 3).unwrap_or(&&b""[..])).into_owned(),
        kind: String::from_utf8_lossy(fields.get(dash + 1)?).into_owned(),
        source: text::os_string(unescape(fields.get(dash + 2)?)),
    })
}

/// Space, tab, newline and backslash stand as `\040` and so on.
fn unescape(field: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&b, tail)) = rest.split_first() {
        if let (b'\\', [a @ b'0'..=b'3', c @ b'0'..=b'7', d @ b'0'..=b'7', ..]) = (b, tail) {
            out.push(((a - b'0') << 6) | ((c - b'0') << 3) | (d - b'0'));
            rest = &tail[3..];
        } else {
            out.push(b);
            rest = tail;
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_points_become_absolute() {
        let dir = tempfile::tempdir().unwrap();
        let real = std::fs::canonicalize(dir.path()).unwrap();
        std::os::unix::fs::symlink(&real, dir.path().join("link")).unwrap();
        assert_eq!(absolute(&dir.path().join("link")), real);
        assert_eq!(absolute(&dir.path().join("missing/")), real.join("missing"));
        assert_eq!(absolute(Path::new("/")), Path::new("/"));
    }

    #[test]
    fn lines_parse() {
        let table = b"36 35 98:0 /mnt1 /mnt\\0402 rw,noatime master:1 shared:2 - fuse.braidfs /a\\134b,c rw\n\
                      37 35 0:5 / /proc rw - proc proc rw\nbroken line\n\n";
        let mounts = parse(table);
        assert_eq!(mounts.len(), 2);
        assert_eq!(mounts[0].target, PathBuf::from("/mnt 2"));
        assert_eq!(mounts[0].kind, "fuse.braidfs");
        assert_eq!(mounts[0].source, "/a\\b,c");
        assert_eq!(mounts[0].device, "98:0");
        assert_eq!((mounts[0].root.as_path(), &*mounts[0].options), (Path::new("/mnt1"), "rw,noatime"));
        assert_eq!(mounts[0].super_options, "rw");
        assert_eq!(mounts[1].kind, "proc");
    }
}
