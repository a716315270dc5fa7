//! Reads and checks the entries of directories.

use crate::collect::{load, read_entries};
use crate::model::inodes::{Inodes, Name, NameKey};
use crate::parts::domain::Domain;
use crate::parts::ino::Ino;
use crate::read::read_scattered;
use crate::report::{Checked, Log};
use crate::rules::dir::Buckets;
use crate::rules::{Rules, Visitor};
use braidfs_format::dentry::Dentry;
use braidfs_format::inode::Extent;
use braidfs_format::node::NodeKind;
use braidfs_format::{BlockAddr, InodeNo, NodeId};
use braidfs_store::Store;

/// Reads and checks the directories of `domain`. The entries of those that hold are packed; the others are whole.
pub fn check(store: &Store, log: &mut Log, domain: &Domain, inodes: &mut Inodes) {
    let rules = inodes.rules;
    for node in inodes.select(|_, i| i.is_dir()) {
        if let Some(ino) = inodes.whole_mut(node) {
            read_entries(&rules, store, log, node, ino);
            continue;
        }
        let mut ino = match load(&rules, store, domain, node) {
            Ok(ino) => ino,
            Err(e) => {
                inodes.fail(e);
                continue;
            }
        };
        if let Some(names) = pack(&rules, store, &inodes.name_key, node, &ino) {
            inodes.set_names(node, names);
            continue;
        }
        read_entries(&rules, store, log, node, &mut ino);
        if ino.dirty.any() {
            inodes.put(node, ino);
        } else {
            let names = ino.entries.iter().map(|e| Name::of(&inodes.name_key, node, e)).collect();
            inodes.set_names(node, names);
        }
    }
}

/// The entries of a directory in which all holds, packed; else `None`.
fn pack(rules: &Rules, store: &Store, name_key: &NameKey, node: InodeNo, ino: &Ino) -> Option<Vec<Name>> {
    let mut packer = Packer { store, name_key, names: Vec::new() };
    Buckets::until_bad(node).walk(rules, &mut packer, &ino.inode.content, &ino.extents).ok()?;
    Some(packer.names)
}

/// Keeps hashes of the names of a directory; the first finding ends the walk.
struct Packer<'a> {
    store: &'a Store,
    name_key: &'a NameKey,
    names: Vec<Name>,
}

impl Visitor for Packer<'_> {
    fn overflow(&mut self, _: InodeNo, _: &[NodeId], _: NodeKind) -> Checked<Vec<Option<Vec<u8>>>> {
        Ok(Vec::new())
    }

    fn holds(&self, _: BlockAddr, _: u64) -> bool {
        true
    }

    fn extent(&mut self, _: InodeNo, _: Extent, _: bool) -> Checked<()> {
        Ok(())
    }

    fn blocks(&mut self, addrs: &[BlockAddr]) -> Checked<Vec<u8>> {
        read_scattered(self.store, addrs)
    }

    fn entry(&mut self, dir: InodeNo, e: Dentry) {
        self.names.push(Name::of(self.name_key, dir, &e));
    }
}
