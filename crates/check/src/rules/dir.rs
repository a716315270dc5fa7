//! Rules of a directory by itself: its buckets, and the positions of the entries in them.

use super::{AT_A_TIME, Rules, Visitor, corrupt, show};
use crate::codes;
use crate::report::{Bad, Checked};
use braidfs_format::dentry::{Dentry, HASH_MAX, HASH_PROBES, bucket_first, decode_bucket, decode_entries, name_hash};
use braidfs_format::inode::{Content, Extent};
use braidfs_format::name::FileName;
use braidfs_format::{BLOCK_BYTES, BlockAddr, InodeNo};
use std::collections::{HashSet, VecDeque};

/// Buckets of a directory that do not hold are told of up to here, each; the rest by their number: extents of a few bytes may
/// name millions of blocks.
pub const BUCKETS_TOLD: u64 = 1000;

/// The names among which one may stand twice.
#[derive(Debug)]
enum Names {
    /// Those at the last positions with these: enough where each stands where it may.
    Near(VecDeque<(u64, FileName)>),
    /// All of the directory.
    All(HashSet<FileName>),
}

/// The buckets of a directory, read some at a time in the order of positions.
#[derive(Debug)]
pub struct Buckets {
    dir: InodeNo,
    /// Not read yet: logical block and address.
    todo: Vec<(u64, BlockAddr)>,
    names: Names,
    /// Buckets that do not hold.
    bad: u64,
}

impl Buckets {
    /// Of directory `dir`, for a walk that ends with the first finding. Memory does not grow with the directory.
    pub fn until_bad(dir: InodeNo) -> Self {
        Self { dir, todo: Vec::new(), names: Names::Near(VecDeque::new()), bad: 0 }
    }

    /// Of directory `dir`, for a walk that goes on after findings: names are then also found twice where they stand at
    /// wrong positions. Memory: all names of the directory.
    pub fn to_the_end(dir: InodeNo) -> Self {
        Self { dir, todo: Vec::new(), names: Names::All(HashSet::new()), bad: 0 }
    }

    /// Goes through a directory with this content and these extents: calls [`Visitor::entry`] with all entries.
    ///
    /// # Errors
    /// What the visitor gives back.
    pub fn walk(
        mut self,
        rules: &Rules,
        visitor: &mut dyn Visitor,
        content: &Content,
        extents: &[Extent],
    ) -> Checked<()> {
        for e in extents {
            self.add(rules, visitor, e.lblk, e.addr, e.len)?;
        }
        self.finish(rules, visitor, content)
    }

    /// Adds the `len` buckets of an extent.
    ///
    /// # Errors
    /// What the visitor gives back.
    pub fn add(
        &mut self,
        rules: &Rules,
        visitor: &mut dyn Visitor,
        lblk: u64,
        addr: BlockAddr,
        len: u32,
    ) -> Checked<()> {
        for i in 0..u64::from(len) {
            if !visitor.bucket(lblk + i) {
                continue;
            }
            self.todo.push((lblk + i, BlockAddr(addr.0 + i)));
            if self.todo.len() > AT_A_TIME {
                self.read(rules, visitor, false)?;
            }
        }
        Ok(())
    }

    /// Reads the last buckets, and the entries in the record.
    ///
    /// # Errors
    /// What the visitor gives back.
    pub fn finish(mut self, rules: &Rules, visitor: &mut dyn Visitor, content: &Content) -> Checked<()> {
        if let Content::InlineDir(bytes) = content {
            match decode_entries(bytes).map_err(corrupt(codes::INLINE_ENTRIES)) {
                Ok(e) => self.entries(rules, visitor, e, None)?,
                Err(bad) => visitor.bad(bad)?,
            }
        }
        self.read(rules, visitor, true)?;
        match self.bad.checked_sub(BUCKETS_TOLD) {
            None | Some(0) => Ok(()),
            Some(more) => {
                visitor.bad(Bad::new(codes::BUCKET, format!("{more} more of its blocks are no buckets of it")))
            }
        }
    }

    /// Reads the buckets so far but the last one (whose end the next one tells), or all of them.
    fn read(&mut self, rules: &Rules, visitor: &mut dyn Visitor, all: bool) -> Checked<()> {
        let todo = std::mem::take(&mut self.todo);
        let now = if all { todo.len() } else { todo.len().saturating_sub(1) };
        let addrs: Vec<BlockAddr> = todo[..now].iter().map(|t| t.1).collect();
        let lblk_of = |b: Bad| Bad { at: b.at.map(|i| todo[i as usize].0), ..b };
        let blocks = if now > 0 { visitor.blocks(&addrs).map_err(lblk_of)? } else { Vec::new() };
        for (i, block) in blocks.chunks(BLOCK_BYTES).enumerate() {
            let (lblk, addr) = todo[i];
            let entries = match decode_bucket(block, self.dir, lblk, rules.volume, addr) {
                Ok(entries) => entries,
                Err(e) => {
                    self.bad += 1;
                    if self.bad <= BUCKETS_TOLD {
                        visitor.bad(Bad::new(codes::BUCKET, format!("bucket {lblk}: {e}")).at(lblk))?;
                    }
                    continue;
                }
            };
            let range = bucket_first(lblk)..todo.get(i + 1).map_or(HASH_MAX + 1, |b| bucket_first(b.0));
            if let Some(e) = entries.iter().find(|e| !range.contains(&e.hash)) {
                let why = format!("{} stands in bucket {lblk}", show(&e.name));
                visitor.bad(Bad::new(codes::BUCKET_RANGE, why).at(lblk))?;
            }
            self.entries(rules, visitor, entries, Some(lblk))?;
        }
        self.todo = todo[now..].to_vec();
        Ok(())
    }

    /// Checks the entries of one bucket, or of the record.
    fn entries(
        &mut self,
        rules: &Rules,
        visitor: &mut dyn Visitor,
        entries: Vec<Dentry>,
        lblk: Option<u64>,
    ) -> Checked<()> {
        let bad = |code, why| Bad { at: lblk, ..Bad::new(code, why) };
        for e in entries {
            let h = name_hash(&rules.hash_key, &e.name);
            if !(h..=h + HASH_PROBES).contains(&e.hash) {
                let why = format!("{} stands at {:#x}, its name says {h:#x}", show(&e.name), e.hash);
                visitor.bad(bad(codes::ENTRY_HASH, why))?;
            }
            if !self.is_new(&e) {
                // Which one is right, the links of the inodes say.
                visitor.bad(bad(codes::NAME_TWICE, format!("{} stands there twice", show(&e.name))))?;
            }
            visitor.entry(self.dir, e);
        }
        Ok(())
    }

    /// Whether the name of `e` did not come before.
    fn is_new(&mut self, e: &Dentry) -> bool {
        match &mut self.names {
            Names::All(all) => all.insert(e.name.clone()),
            Names::Near(last) => {
                while last.front().is_some_and(|l| l.0 + HASH_PROBES < e.hash) {
                    last.pop_front();
                }
                let new = last.iter().all(|l| l.1 != e.name);
                last.push_back((e.hash, e.name.clone()));
                new
            }
        }
    }
}
