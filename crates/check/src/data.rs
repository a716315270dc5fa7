//! Compares the data blocks of files with their checksums.
//!
//! Blocks without one (volumes made without `--data-checksums`, files that are overwritten in place) are counted and
//! not read: nothing can be said of them.

use crate::codes;
use crate::collect::load;
use crate::model::Model;
use crate::parts::ino::Ino;
use crate::report::{Log, ScrubReport};
use crate::threads::{cpus, each};
use braidfs_device::{AlignedBuf, BLOCK_BYTES};
use braidfs_format::inode::Extent;
use braidfs_format::{BlockAddr, InodeNo};
use braidfs_store::Store;
use std::convert::Infallible;
use std::sync::Arc;

/// Blocks read at once.
const PIECE: u64 = 256;

/// Compares the data of all inodes, on all CPUs; what is bad goes to the model's log.
pub fn compare_all(m: &mut Model, out: &mut ScrubReport, progress: &dyn Fn(&str, u64, u64)) {
    let store = Arc::clone(&m.store);
    let files: Vec<InodeNo> = m.inodes.select(|_, i| !i.is_dir() && i.is_mapped());
    let total = files.len() as u64;
    let shown = |done| progress("data", done, total);
    let done = each(cpus(), files.len(), shown, Default::default, |(log, sum): &mut (Log, ScrubReport), i| {
        let node = files[i];
        log.domain = m.domain_of(node);
        if let Some(ino) = m.inodes.whole(node) {
            file(&store, log, sum, node, ino);
        } else if let Some(domain) = log.domain.and_then(|d| m.domains.get(usize::from(d))) {
            match load(&m.inodes.rules, &store, domain, node) {
                Ok(ino) => file(&store, log, sum, node, &ino),
                Err(e) => log.add(codes::UNREADABLE, Some(node.node()), e.to_string()),
            }
        }
        Ok::<(), Infallible>(())
    });
    for (mut log, sum) in done.unwrap_or_else(|never| match never {}) {
        out.data_checked += sum.data_checked;
        out.data_unchecked += sum.data_unchecked;
        out.data_bad += sum.data_bad;
        m.log.findings.append(&mut log.findings);
    }
}

fn file(store: &Store, log: &mut Log, sum: &mut ScrubReport, node: InodeNo, ino: &Ino) {
    for e in ino.extents.iter().filter(|e| !e.unwritten) {
        let Some(sums) = &e.sums else {
            sum.data_unchecked += u64::from(e.len);
            continue;
        };
        sum.data_checked += u64::from(e.len);
        compare(store, e, sums, &mut |code, _, why| {
            sum.data_bad += 1;
            log.add(code, Some(node.node()), why);
        });
    }
}

/// Compares the data of an extent with its checksums; `bad` is told the code, the logical
/// block and what does not hold, block by block.
pub fn compare(store: &Store, e: &Extent, sums: &[u32], bad: &mut dyn FnMut(u32, u64, String)) {
    let mut buf = AlignedBuf::zeroed(PIECE.min(u64::from(e.len)) as usize * BLOCK_BYTES);
    let mut at = 0;
    while at < u64::from(e.len) {
        let n = PIECE.min(u64::from(e.len) - at);
        let buf = &mut buf[..n as usize * BLOCK_BYTES];
        let whole = store.read(BlockAddr(e.addr.0 + at), buf).is_ok();
        for (i, block) in (at..).zip(buf.chunks_mut(BLOCK_BYTES)) {
            let addr = BlockAddr(e.addr.0 + i);
            let lblk = e.lblk + i;
            // one bad sector fails the whole piece: block by block then
            if let Err(why) = if whole { Ok(()) } else { store.read(addr, block) } {
                bad(codes::UNREADABLE, lblk, format!("block {lblk} of the file ({addr}): {why}"));
            } else if sums.get(i as usize) != Some(&crc32c::crc32c(block)) {
                bad(codes::DATA_SUM, lblk, format!("block {lblk} of the file ({addr}): checksum does not match"));
            }
        }
        at += n;
    }
}
