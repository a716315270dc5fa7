//! Reads a whole volume into memory, checking what any tree must be, and compares it with the model.
//!
//! The walk itself finds: names given twice, entries that do not resolve or resolve to something else, listings that give
//! something else where they go on in the middle, a `..` that leads elsewhere, directories reached twice (a loop or a second
//! link), link counts that are not the number of names.

use crate::blocks::Blocks;
use crate::model::{self, Ino, Link, Model, Node, Times};
use crate::sparse::{PAGE, Sparse};
use crate::subject::{Key, listing, stat_of, xattrs};
use braidfs::device::Device;
use braidfs::{Error, FileKind, InodeNo, Volume};
use braidfs_check::{FsckOptions, check};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The root directory. Its generation says nothing.
pub const ROOT_KEY: Key = (InodeNo::ROOT, 0);

/// An inode as found.
#[derive(Clone, Debug, PartialEq, Hash)]
pub struct SeenNode {
    /// What stat(2) tells, but for times.
    pub stat: model::Stat,
    /// Times.
    pub times: Times,
    /// Units of 512 bytes allocated.
    pub sectors: u64,
    /// Values by name.
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    /// Content of a regular file.
    pub data: Sparse,
    /// Of a symlink.
    pub target: Vec<u8>,
    /// Of a directory.
    pub entries: BTreeMap<Vec<u8>, Key>,
    /// The names by which it was found.
    pub links: BTreeSet<(Key, Vec<u8>)>,
}

impl SeenNode {
    /// What differs from the same inode, read at another time.
    pub fn difference(&self, later: &Self) -> Option<String> {
        let data = difference(&later.data, &self.data);
        let (a, b) =
            (Self { data: Sparse::default(), ..self.clone() }, Self { data: Sparse::default(), ..later.clone() });
        if a != b { Some(format!("{a:?}, then {b:?}")) } else { data }
    }
}

/// Everything that can be reached from the root.
#[derive(Clone, Debug, PartialEq, Hash)]
pub struct Seen {
    /// By number and generation.
    pub nodes: BTreeMap<Key, SeenNode>,
}

/// A name for messages.
pub fn show(name: &[u8]) -> String {
    let s = String::from_utf8_lossy(name);
    if s.len() > 40 { format!("{}…({} bytes)", s.chars().take(20).collect::<String>(), s.len()) } else { s.into() }
}

/// A walk lists one directory of so many a second time: each state of each crash is walked.
const LISTED_TWICE: u64 = 8;

/// Files up to this size are read whole, holes included.
const SMALL: u64 = 8 << 20;

/// Reads a regular file whole. Large ones by SEEK_DATA.
fn read_file(v: &Volume, ino: InodeNo, size: u64) -> Result<Sparse, Error> {
    let mut data = Sparse::default();
    let file = v.open(ino)?;
    let mut buf = vec![0; size.min(256 * 1024) as usize];
    let (mut at, mut end) = (0, if size > SMALL { 0 } else { size });
    while at < size {
        if at >= end {
            match v.seek(&file, at, false) {
                Ok(next) => at = next / PAGE as u64 * PAGE as u64,
                Err(Error::NoData) => break,
                Err(e) => return Err(e),
            }
            end = v.seek(&file, at.max(end), true)?.max(at + 1);
        }
        let len = (end - at).min(buf.len() as u64) as usize;
        let n = v.read(&file, at, &mut buf[..len])?;
        if n == 0 {
            return Err(Error::Invalid("a read ended before the size of the file"));
        }
        data.write(at, &buf[..n]);
        at += n as u64;
    }
    data.resize(size);
    Ok(data)
}

fn read_node(v: &Volume, key: Key) -> Result<SeenNode, Error> {
    let a = v.getattr(key.0)?;
    let (stat, times) = stat_of(&a);
    let xattrs = xattrs(v, key.0)?;
    let data = if stat.kind == FileKind::File { read_file(v, key.0, stat.size)? } else { Sparse::default() };
    let target = if stat.kind == FileKind::Symlink { v.readlink(key.0)? } else { Vec::new() };
    let (entries, links) = Default::default();
    Ok(SeenNode { stat, times, sectors: a.sectors, xattrs, data, target, entries, links })
}

/// Reads the volume.
///
/// # Errors
/// What is wrong with the tree, or the error of an operation that may not fail, and where.
pub fn walk(v: &Volume) -> Result<Seen, String> {
    let fail = |path: &[u8], what: &str, e: Error| format!("/{}: {what}: {e}", show(path));
    let root = read_node(v, ROOT_KEY).map_err(|e| fail(b"", "read", e))?;
    let mut nodes = BTreeMap::from([(ROOT_KEY, root)]);
    let mut dirs = vec![(ROOT_KEY, Vec::new())];
    while let Some((dir, path)) = dirs.pop() {
        let (entries, up) = listing(v, dir.0, LISTED_TWICE).map_err(|e| fail(&path, "readdir", e))?;
        let parent = nodes.get(&dir).and_then(|n| n.links.first()).map_or(InodeNo::ROOT, |(parent, _)| parent.0);
        if up != parent {
            return Err(format!("/{}: .. is {up}, not {parent}", show(&path)));
        }
        for (name, entry) in entries {
            let mut child_path = path.clone();
            if !child_path.is_empty() {
                child_path.push(b'/');
            }
            child_path.extend_from_slice(&name);
            let a = v.lookup(dir.0, &name).map_err(|e| fail(&child_path, "in readdir, but lookup", e))?;
            if !entry.names(&a) {
                return Err(format!("/{}: {entry:?} in readdir, but lookup gives {a:?}", show(&child_path)));
            }
            let key = if a.ino == InodeNo::ROOT { ROOT_KEY } else { (a.ino, a.generation) };
            let link = (dir, name.clone());
            if let Some(n) = nodes.get_mut(&dir) {
                n.entries.insert(name, key);
            }
            if let Some(n) = nodes.get_mut(&key) {
                if n.stat.kind == FileKind::Dir {
                    return Err(format!("/{}: a second way to the directory {}", show(&child_path), a.ino));
                }
                n.links.insert(link);
                continue;
            }
            let mut n = read_node(v, key).map_err(|e| fail(&child_path, "read", e))?;
            n.links.insert(link);
            if n.stat.kind == FileKind::Dir {
                dirs.push((key, child_path));
            }
            nodes.insert(key, n);
        }
    }
    let seen = Seen { nodes };
    seen.check_links()?;
    Ok(seen)
}

impl Seen {
    fn check_links(&self) -> Result<(), String> {
        for (key, n) in &self.nodes {
            let is_dir = |k: &&Key| self.nodes.get(k).is_some_and(|n| n.stat.kind == FileKind::Dir);
            let want = match n.stat.kind {
                FileKind::Dir => 2 + n.entries.values().filter(is_dir).count(),
                _ => n.links.len(),
            };
            if n.stat.nlink as usize != want {
                let below = n.entries.keys().map(|name| show(name)).collect::<Vec<_>>().join(" ");
                let (path, have) = (self.path(*key), n.stat.nlink);
                return Err(format!("{path} {key:?} has nlink {have}, but {want} names; entries: {below}"));
            }
        }
        Ok(())
    }

    /// A path of an inode, for messages.
    pub fn path(&self, key: Key) -> String {
        let mut path = String::new();
        let mut at = key;
        while let Some((parent, name)) = self.nodes.get(&at).and_then(|n| n.links.first()) {
            path = format!("/{}{path}", show(name));
            at = *parent;
        }
        if path.is_empty() { "/".into() } else { path }
    }

    /// A model of what was found, and the key of each of its inodes.
    pub fn to_model(&self) -> (Model, BTreeMap<Ino, Key>) {
        let inos: BTreeMap<Key, Ino> = std::iter::once(ROOT_KEY)
            .chain(self.nodes.keys().copied().filter(|k| *k != ROOT_KEY))
            .zip(model::ROOT..)
            .collect();
        let link = |(k, n): &(Key, Vec<u8>)| -> Option<Link> { Some((*inos.get(k)?, n.clone())) };
        let nodes = self.nodes.iter().filter_map(|(key, n)| {
            let node = Node {
                kind: n.stat.kind,
                mode: n.stat.mode,
                uid: n.stat.uid,
                gid: n.stat.gid,
                rdev: n.stat.rdev,
                times: n.times,
                xattrs: n.xattrs.clone(),
                data: n.data.clone(),
                target: n.target.clone(),
                entries: n.entries.iter().filter_map(|(e, k)| Some((e.clone(), *inos.get(k)?))).collect(),
                links: n.links.iter().filter_map(link).collect(),
                flags: n.stat.flags,
                blocks: Blocks::of_unknown(n.data.size()),
                linkable: false,
            };
            Some((*inos.get(key)?, node))
        });
        (Model::from_nodes(nodes.collect()), inos.into_iter().map(|(k, i)| (i, k)).collect())
    }

    /// What differs between a volume and the model; `keys` says which inode is which.
    ///
    /// # Errors
    /// The first difference.
    pub fn compare(&self, model: &Model, keys: &BTreeMap<Ino, Key>) -> Result<(), String> {
        let mut named = 0;
        for (ino, want) in model.nodes() {
            if want.links.is_empty() && ino != model::ROOT {
                continue;
            }
            named += 1;
            let key = keys.get(&ino).copied().ok_or(format!("inode {ino} of the model has no key"))?;
            let path = || match want.links.first() {
                Some((p, n)) => format!("{}/{}", keys.get(p).map_or("?".into(), |k| self.path(*k)), show(n)),
                None => "/".into(),
            };
            let got = self.nodes.get(&key).ok_or_else(|| format!("{}: {key:?} is missing", path()))?;
            let stat = model.stat(ino).map_err(|e| e.to_string())?;
            if got.stat != stat {
                return Err(format!("{}: volume {:?}, model {stat:?}", path(), got.stat));
            }
            if let Some(d) = want.times.differ(got.times) {
                return Err(format!("{}: {d}", path()));
            }
            if got.xattrs != want.xattrs {
                let list = |x: &BTreeMap<Vec<u8>, Vec<u8>>| {
                    x.iter().map(|(n, v)| format!("{}[{}]", show(n), v.len())).collect::<Vec<_>>().join(" ")
                };
                return Err(format!("{}: xattrs {}, model {}", path(), list(&got.xattrs), list(&want.xattrs)));
            }
            if got.target != want.target {
                return Err(format!("{}: target {}, model {}", path(), show(&got.target), show(&want.target)));
            }
            let entries: BTreeMap<&Vec<u8>, Option<&Key>> =
                want.entries.iter().map(|(n, i)| (n, keys.get(i))).collect();
            let found: BTreeMap<&Vec<u8>, Option<&Key>> = got.entries.iter().map(|(n, k)| (n, Some(k))).collect();
            if entries != found {
                return Err(format!("{}: entries {found:?}, model {entries:?}", path()));
            }
            if let Some(d) = difference(&got.data, &want.data) {
                return Err(format!("{}: {d}", path()));
            }
        }
        if named == self.nodes.len() { Ok(()) } else { Err(format!("{} objects, model {named}", self.nodes.len())) }
    }
}

/// Where two contents differ.
pub fn difference(got: &Sparse, want: &Sparse) -> Option<String> {
    if got.size() != want.size() {
        return Some(format!("{} bytes, model {}", got.size(), want.size()));
    }
    let pages: BTreeSet<u64> = got.pages().chain(want.pages()).collect();
    pages.into_iter().find(|p| got.page(*p) != want.page(*p)).map(|p| {
        let (g, w) = (got.page(p), want.page(p));
        let at = g.iter().zip(w).position(|(a, b)| a != b).unwrap_or(0);
        let n = g.iter().zip(w).filter(|(a, b)| a != b).count();
        let some = |x: &[u8; PAGE]| x[at..PAGE.min(at + 8)].to_vec();
        let offset = p * PAGE as u64 + at as u64;
        format!("content differs at byte {offset} ({n} bytes of that page): {:?}, model {:?}", some(g), some(w))
    })
}

/// Runs fsck on an unmounted volume.
///
/// # Errors
/// The findings, one a line.
pub fn fsck(devices: &[Arc<dyn Device>]) -> Result<(), String> {
    let found = findings(devices, false)?;
    if found.is_empty() {
        return Ok(());
    }
    let lines: Vec<String> = found.iter().map(|(code, why)| format!("{code}: {why}")).collect();
    Err(format!("fsck finds\n  {}", lines.join("\n  ")))
}

/// Runs fsck on an unmounted volume and has it mend what it finds: codes and messages.
///
/// # Errors
/// What keeps it from that.
pub fn repair(devices: &[Arc<dyn Device>]) -> Result<Vec<(u32, String)>, String> {
    findings(devices, true)
}

/// Whether fsck says by this code that one copy of a pair does not hold and the other one does.
pub fn is_of_a_copy(code: u32) -> bool {
    use braidfs_check::codes::{BAT_COPY, DOMAIN_COPY, GROUP_COPY, NODES_COPY, OWNERS_COPY, SEGMENTS_COPY, SUPER_COPY};
    [BAT_COPY, DOMAIN_COPY, GROUP_COPY, NODES_COPY, OWNERS_COPY, SEGMENTS_COPY, SUPER_COPY].contains(&code)
}

fn findings(devices: &[Arc<dyn Device>], repair: bool) -> Result<Vec<(u32, String)>, String> {
    let options = FsckOptions { repair, force: true };
    let report =
        check(devices, &options, &braidfs::JournalReplay, &|_, _, _| {}).map_err(|e| format!("fsck failed: {e}"))?;
    Ok(report.findings.into_iter().map(|f| (f.code, f.message)).collect())
}
