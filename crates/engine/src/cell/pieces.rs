//! In how many pieces a file lies, and which parts of it are worth moving so that they lie together.

use super::extents::ExtentMap;

/// Blocks that are moved together, with the file locked.
pub const WINDOW: u64 = 128;
/// Where pieces have as many blocks on average, moving them gains less than it costs: reads of 128 KiB.
const SHORT: u64 = 32;

/// In how many pieces a file, or a part of it, lies.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Pieces {
    /// Blocks of 4 KiB.
    pub blocks: u64,
    /// Runs of blocks that lie side by side.
    pub pieces: u64,
    /// The least there can be: runs between holes.
    pub least: u64,
    /// It is always overwritten in place, and is left as it is.
    pub stays: bool,
}

impl Pieces {
    /// Whether its pieces are so short that moving them is worth it.
    pub fn are_short(&self) -> bool {
        let extra = self.pieces.saturating_sub(self.least);
        !self.stays && extra > 0 && extra * SHORT > self.blocks.saturating_sub(SHORT)
    }
}

/// What became of a part of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Defragmented {
    /// Byte at which to go on; `None` at the end of the file.
    pub next: Option<u64>,
    /// Blocks that were moved.
    pub moved: u64,
}

/// Of the blocks `from .. end`.
pub fn pieces(map: &ExtentMap, from: u64, end: u64) -> Pieces {
    let mut all = Pieces::default();
    // one past the last block, in the file and on the device
    let mut last: Option<(u64, u64)> = None;
    let mut at = from;
    while let Some(p) = map.next_from(at).filter(|p| p.lblk < end) {
        let len = u64::from(p.len).min(end - p.lblk);
        let follows = last.is_some_and(|(lblk, _)| lblk == p.lblk);
        all.least += u64::from(!follows);
        all.pieces += u64::from(!follows || last.is_none_or(|(_, addr)| addr != p.addr.0));
        all.blocks += len;
        at = p.lblk + len;
        last = Some((at, p.addr.0 + len));
    }
    all
}

/// The first window from block `from` on that is worth moving.
pub fn next_window(map: &ExtentMap, from: u64) -> Option<u64> {
    let mut at = map.next_from(from)?.lblk;
    loop {
        let window = at / WINDOW * WINDOW;
        if pieces(map, window, window + WINDOW).are_short() {
            return Some(window);
        }
        at = map.next_from(window + WINDOW)?.lblk;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use braidfs_format::BlockAddr;
    use braidfs_format::inode::Extent;

    fn map(extents: &[(u64, u64, u32)]) -> ExtentMap {
        let all = extents.iter().map(|(lblk, addr, len)| Extent {
            lblk: *lblk,
            addr: BlockAddr(*addr),
            len: *len,
            unwritten: false,
            sums: None,
        });
        ExtentMap::from_inline(all.collect())
    }

    #[test]
    fn pieces_are_runs_on_the_device_and_holes_make_some_of_them() {
        let m = map(&[(0, 100, 4), (4, 104, 4), (8, 200, 2), (20, 202, 5)]);
        assert_eq!(pieces(&m, 0, u64::MAX), Pieces { blocks: 15, pieces: 3, least: 2, stays: false });
        assert_eq!(pieces(&m, 6, 9), Pieces { blocks: 3, pieces: 2, least: 1, stays: false });
        assert_eq!(pieces(&m, 10, 20), Pieces::default());
        assert_eq!(pieces(&map(&[]), 0, u64::MAX), Pieces::default());
    }

    #[test]
    fn what_is_in_few_pieces_stays() {
        let of = |blocks, pieces| Pieces { blocks, pieces, least: 1, stays: false }.are_short();
        assert!(of(8, 2) && of(32, 2) && of(128, 5) && of(128, 128));
        assert!(!of(8, 1) && !of(128, 1) && !of(128, 2) && !of(128, 4));
        assert!(!Pieces { blocks: 128, pieces: 128, least: 128, stays: false }.are_short(), "holes");
        assert!(!Pieces { blocks: 128, pieces: 128, least: 1, stays: true }.are_short());
    }

    #[test]
    fn windows_that_are_whole_are_passed_over() {
        let mut all: Vec<(u64, u64, u32)> = vec![(0, 1000, 128)];
        all.extend((0..64).map(|i| (256 + 2 * i, 5000 + 10 * i, 2)));
        all.push((512, 9000, 128));
        let m = map(&all);
        assert_eq!([0, 200, 256].map(|from| next_window(&m, from)), [Some(256); 3]);
        assert_eq!(next_window(&m, 384), None);
        assert_eq!(next_window(&map(&[]), 0), None);
    }
}
