//! What callers ask of a check, and what it tells them.

use crate::codes;
pub use crate::finding::Finding;
use crate::usage::Usage;
use braidfs_device::{AlignedBuf, BLOCK_BYTES};
use braidfs_format::file_kind::FileKind;
use braidfs_format::{BlockAddr, NodeId};
use braidfs_store::Store;

/// How to check.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FsckOptions {
    /// Mend what can be mended; else the devices are not written.
    pub repair: bool,
    /// Also check a volume that was unmounted properly.
    pub force: bool,
}

/// Result of a check.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct FsckReport {
    /// The volume was unmounted properly and not looked at further; the counts are 0.
    pub clean_skip: bool,
    /// [`crate::preen`] has left it to somebody: what was found is not repaired, or not all of it, as something may be lost then.
    pub by_hand: bool,
    /// What was found.
    pub findings: Vec<Finding>,
    /// What is no error by itself: traces of a crash that might also be damage.
    pub notes: Vec<String>,
    /// Regular files that were counted.
    pub files: u64,
    /// Directories that were counted.
    pub dirs: u64,
    /// Symbolic links that were counted.
    pub symlinks: u64,
    /// Devices, sockets, pipes.
    pub other: u64,
    /// Blocks in use by files, directories and node blocks.
    pub blocks_used: u64,
    /// Blocks of all groups without their metadata and the journals.
    pub blocks_total: u64,
    /// What users, groups and projects use, where no error was found.
    pub usage: Usage,
}

impl FsckReport {
    /// Counts a file of the type that `mode` tells.
    pub(crate) fn count(&mut self, mode: u32) {
        match FileKind::from_mode(mode) {
            Some(FileKind::File) => self.files += 1,
            Some(FileKind::Dir) => self.dirs += 1,
            Some(FileKind::Symlink) => self.symlinks += 1,
            _ => self.other += 1,
        }
    }
    /// Adds what another part of the volume consists of, and what was found there.
    pub(crate) fn join(&mut self, mut other: Self) {
        self.files += other.files;
        self.dirs += other.dirs;
        self.symlinks += other.symlinks;
        self.other += other.other;
        self.blocks_used += other.blocks_used;
        self.usage.join(other.usage);
        self.findings.append(&mut other.findings);
    }
    /// Findings that were not mended.
    pub fn unfixed(&self) -> usize {
        self.findings.iter().filter(|f| !f.fixed).count()
    }
}

/// What a check may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Bytes for the list of inodes, 20 each; with less, the node tables are read several times. For the rest see
    /// `docs/fsck.md`. Not for a damaged volume, of which something is kept of every inode.
    pub memory_bytes: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { memory_bytes: 256 << 20 }
    }
}

/// Result of a scrub.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct ScrubReport {
    /// What does not hold, metadata and data.
    pub findings: Vec<Finding>,
    /// Traces of a crash in the journals, which may be damage; of a volume in use, what changed too often to be
    /// looked at.
    pub notes: Vec<String>,
    /// Inodes looked at.
    pub inodes: u64,
    /// Data blocks compared with their checksums.
    pub data_checked: u64,
    /// Data blocks without a checksum.
    pub data_unchecked: u64,
    /// Data blocks that are not what was written.
    pub data_bad: u64,
    /// Blocks read, of a volume in use.
    pub blocks_read: u64,
    /// Nodes that were looked at again, as they changed meanwhile or do not hold: of a volume in use.
    pub looked_again: u64,
    /// It was stopped before its end.
    pub stopped: bool,
}

/// Something that does not hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bad {
    /// A number of [`codes`].
    pub code: u32,
    /// What does not hold, in words.
    pub why: String,
    /// The logical block of the bucket or of the data that does not hold; `None`: something else.
    pub at: Option<u64>,
    /// It is file data.
    pub data: bool,
}

impl Bad {
    /// A finding with number `code`.
    pub fn new(code: u32, why: impl Into<String>) -> Self {
        Self { code, why: why.into(), at: None, data: false }
    }
    /// Of one logical block.
    pub fn at(self, lblk: u64) -> Self {
        Self { at: Some(lblk), ..self }
    }
}

/// What a rule comes to: `Err` ends the walk through the part.
pub type Checked<T> = std::result::Result<T, Bad>;

/// Collects findings of one domain, or of the volume.
#[derive(Debug, Default)]
pub struct Log {
    /// What was found.
    pub findings: Vec<Finding>,
    /// The domain that is looked at.
    pub domain: Option<u16>,
}

impl Log {
    /// A log of one domain.
    pub fn of(domain: u16) -> Self {
        Self { findings: Vec::new(), domain: Some(domain) }
    }
    /// Adds a finding.
    pub fn add(&mut self, code: u32, node: Option<NodeId>, message: impl Into<String>) {
        let message = message.into();
        tracing::debug!(code, domain = self.domain, ?node, %message, "finding");
        self.findings.push(Finding {
            code,
            domain: self.domain,
            node: node.map(|n| n.0),
            path: None,
            message,
            fixed: false,
        });
    }
    /// Reads two blocks of the volume's own tables, at `pair` of device 0; unreadable ones count as zeros and are
    /// reported.
    pub fn read_pair(&mut self, store: &Store, pair: u64) -> Vec<u8> {
        let mut buf = vec![0u8; 2 * BLOCK_BYTES];
        for (at, b) in (pair..).zip(buf.chunks_mut(BLOCK_BYTES)) {
            if let Err(e) = store.device(0).read(at, b) {
                b.fill(0);
                self.add(codes::UNREADABLE, None, format!("volume block {at} cannot be read: {e}"));
            }
        }
        buf
    }

    /// Reads blocks; those that the device cannot read count as zeros and are reported.
    pub fn read(&mut self, store: &Store, addr: BlockAddr, blocks: usize) -> AlignedBuf {
        let mut buf = AlignedBuf::zeroed(blocks * BLOCK_BYTES);
        if store.read(addr, &mut buf).is_err() {
            for (i, b) in buf.chunks_mut(BLOCK_BYTES).enumerate() {
                let at = BlockAddr(addr.0 + i as u64);
                if let Err(e) = store.read(at, b) {
                    b.fill(0);
                    self.add(codes::UNREADABLE, None, format!("{at} cannot be read: {e}"));
                }
            }
        }
        buf
    }
}
