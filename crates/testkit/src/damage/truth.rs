//! What the files of a volume hold, by path, and how a damaged volume compares.

use crate::subject::{names, stat_of, xattrs};
use braidfs::{Error, FileKind, InodeNo, Result, Timestamp, Volume};
use std::collections::BTreeMap;

/// One name, and what is behind it.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// The inode's number.
    pub ino: u64,
    /// The inode's domain.
    pub domain: u16,
    /// Type, permissions, owner, links, size.
    pub stat: crate::model::Stat,
    /// Modification time of what is no directory.
    pub mtime: Option<Timestamp>,
    /// Extended attributes: values by name.
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    /// Content of a file, target of a symlink.
    pub data: Vec<u8>,
}

/// All names of a volume: `""` is the root, others have no slash in front.
pub type Truth = BTreeMap<Vec<u8>, Entry>;

/// Names with this in front are made by the tests, and compared where they are of a truth.
pub const OURS: &[u8] = b"new by the trial";
/// Where fsck puts what hangs nowhere.
pub const LOST_FOUND: &[u8] = b"lost+found";
/// No file of a sample is longer: what claims to be is not read.
const LONGEST: u64 = 64 << 20;

/// How a name of the truth is found on a volume.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    /// As it was.
    Right,
    /// An error, which is an honest answer.
    Refused(String),
    /// As if it had never been.
    Missing,
    /// Something else, said to be it.
    Wrong(String),
    /// No name of the truth, and the inode behind it.
    Surplus(u64),
}

fn join(dir: &[u8], name: &[u8]) -> Vec<u8> {
    if dir.is_empty() { name.to_vec() } else { [dir, b"/", name].concat() }
}

/// Directory and last name of a path.
pub fn split(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|b| *b == b'/') {
        Some(i) => (&path[..i], &path[i + 1..]),
        None => (b"", path),
    }
}

/// What is behind an inode's number.
///
/// # Errors
/// Of the volume; [`Error::TooBig`] where it claims to be longer than any file of a sample.
pub fn read_entry(v: &Volume, ino: InodeNo) -> Result<Entry> {
    let (mut stat, times) = stat_of(&v.getattr(ino)?);
    let xattrs = xattrs(v, ino)?;
    let data = match stat.kind {
        FileKind::File if stat.size > LONGEST => return Err(Error::TooBig),
        FileKind::File => {
            let f = v.open(ino)?;
            let mut data = vec![0xa5; stat.size as usize];
            let n = v.read(&f, 0, &mut data)?;
            data.truncate(n);
            data
        }
        FileKind::Symlink if stat.size > LONGEST => return Err(Error::TooBig),
        FileKind::Symlink => v.readlink(ino)?,
        _ => Vec::new(),
    };
    let dir = stat.kind == FileKind::Dir;
    if dir {
        // follows from the names, and a repair may change it
        stat.nlink = 0;
    }
    Ok(Entry { ino: ino.0, domain: v.domain_of(ino)?.0, stat, mtime: times.mtime.filter(|_| !dir), xattrs, data })
}

/// Reads everything.
///
/// # Errors
/// The first of the volume.
pub fn read_all(v: &Volume) -> Result<Truth> {
    let mut out = BTreeMap::from([(Vec::new(), read_entry(v, InodeNo::ROOT)?)]);
    let mut dirs = vec![(Vec::new(), InodeNo::ROOT)];
    while let Some((path, dir)) = dirs.pop() {
        for name in names(v, dir)? {
            let a = v.lookup(dir, &name)?;
            let path = join(&path, &name);
            if a.kind() == FileKind::Dir {
                dirs.push((path.clone(), a.ino));
            }
            out.insert(path, read_entry(v, a.ino)?);
        }
    }
    Ok(out)
}

fn differs(got: &Entry, want: &Entry, links: bool) -> Option<String> {
    let (mut a, mut b) = (got.stat.clone(), want.stat.clone());
    if !links {
        (a.nlink, b.nlink) = (0, 0);
    }
    if a != b {
        return Some(format!("{a:?}, should be {b:?}"));
    }
    if got.mtime != want.mtime {
        return Some(format!("changed {:?}, should be {:?}", got.mtime, want.mtime));
    }
    if got.xattrs != want.xattrs {
        return Some("other extended attributes".into());
    }
    if got.data == want.data {
        return None;
    }
    match got.data.iter().zip(&want.data).position(|(a, b)| a != b) {
        Some(at) => Some(format!("other content from byte {at} of {}", want.data.len())),
        None => Some(format!("{} bytes can be read of {}", got.data.len(), want.data.len())),
    }
}

/// Compares a volume with the truth, name by name; names that should not be there count as wrong. With `links` the
/// counts of links must be right too (a repair changes them where names are lost).
pub fn compare(v: &Volume, truth: &Truth, links: bool) -> BTreeMap<Vec<u8>, Verdict> {
    let mut out: BTreeMap<Vec<u8>, Verdict> = BTreeMap::new();
    let mut dirs: BTreeMap<&[u8], InodeNo> = BTreeMap::from([(&b""[..], InodeNo::ROOT)]);
    for (path, want) in truth {
        let (dir, name) = split(path);
        let found = if path.is_empty() {
            Ok(InodeNo::ROOT)
        } else {
            match (dirs.get(dir), out.get(dir)) {
                (Some(d), _) => v.lookup(*d, name).map(|a| a.ino),
                (None, Some(Verdict::Refused(e))) => {
                    let e = e.clone();
                    out.insert(path.clone(), Verdict::Refused(e));
                    continue;
                }
                _ => Err(Error::NotFound),
            }
        };
        let verdict = match found.and_then(|ino| read_entry(v, ino)) {
            Ok(got) => {
                if got.stat.kind == FileKind::Dir && want.stat.kind == FileKind::Dir {
                    dirs.insert(path, InodeNo(got.ino));
                }
                differs(&got, want, links).map_or(Verdict::Right, Verdict::Wrong)
            }
            Err(Error::NotFound) => Verdict::Missing,
            Err(e) => Verdict::Refused(e.to_string()),
        };
        out.insert(path.clone(), verdict);
    }
    let extra: Vec<(Vec<u8>, u64)> = dirs.iter().flat_map(|(path, dir)| surplus(v, path, *dir, truth)).collect();
    out.extend(extra.into_iter().map(|(path, ino)| (path, Verdict::Surplus(ino))));
    out
}

/// Names in a directory that the truth does not have, and what they name (0 where that cannot be told).
fn surplus(v: &Volume, path: &[u8], dir: InodeNo, truth: &Truth) -> Vec<(Vec<u8>, u64)> {
    let Ok(names) = names(v, dir) else { return Vec::new() };
    names
        .into_iter()
        .filter(|n| !(n.starts_with(OURS) || path.is_empty() && n.starts_with(LOST_FOUND)))
        .map(|n| (join(path, &n), v.lookup(dir, &n).map_or(0, |a| a.ino.0)))
        .filter(|(p, _)| !truth.contains_key(p))
        .collect()
}
