//! Blocks of a file as runs that rise by their addresses: memory and time go by the number of runs, however long they are.

use crate::cell::extents::ExtentMap;

/// Consecutive blocks of the volume that are consecutive ones of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Part {
    /// Address of the first one.
    pub start: u64,
    /// Number of blocks, not 0.
    pub len: u32,
    /// The first logical block.
    pub lblk: u64,
}

impl Part {
    fn end(&self) -> u64 {
        self.start + u64::from(self.len)
    }

    /// What lies in `from..to`, which is within this.
    fn cut(&self, from: u64, to: u64) -> Self {
        Self { start: from, len: (to - from) as u32, lblk: self.lblk + (from - self.start) }
    }
}

/// The blocks of a file by rising addresses, each once, also where a damaged map names one twice.
pub(super) fn parts_of(map: &ExtentMap) -> Vec<Part> {
    rising(map.iter().map(|x| Part { start: x.addr.0, len: x.len, lblk: x.lblk }).collect())
}

fn rising(mut parts: Vec<Part>) -> Vec<Part> {
    parts.sort_unstable();
    let mut end = 0;
    parts.retain_mut(|p| {
        if p.end() <= end {
            return false;
        }
        *p = p.cut(p.start.max(end), p.end());
        end = p.end();
        true
    });
    parts
}

/// Those of `all` that are not among `but`. Both rise.
pub(super) fn without(all: &[Part], but: &[Part]) -> Vec<Part> {
    let (mut out, mut but) = (Vec::new(), but.iter().peekable());
    for p in all {
        let mut at = p.start;
        while at < p.end() {
            while but.next_if(|b| b.end() <= at).is_some() {}
            match but.peek() {
                Some(b) if b.start <= at => at = b.end(),
                next => {
                    let end = next.map_or(p.end(), |b| b.start.min(p.end()));
                    out.push(p.cut(at, end));
                    at = end;
                }
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use braidfs_format::BlockAddr;
    use braidfs_format::inode::Extent;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    /// Logical block by address; of an address that is named twice that of the run which begins first.
    fn blocks(parts: &[Part]) -> BTreeMap<u64, u64> {
        let mut all = BTreeMap::new();
        for p in parts {
            for i in 0..u64::from(p.len) {
                all.entry(p.start + i).or_insert(p.lblk + i);
            }
        }
        all
    }

    #[test]
    fn a_run_costs_as_much_as_a_block() {
        let map = |extents: &[(u64, u64, u32)]| {
            let mut map = ExtentMap::default();
            for &(lblk, addr, len) in extents {
                let e = Extent { lblk, addr: BlockAddr(addr), len, unwritten: false, sums: None };
                map.insert(e, &mut Default::default());
            }
            parts_of(&map)
        };
        let old = map(&[(0, 10_000_000, 4_000_000), (4_000_000, 100, 1)]);
        let new = map(&[(0, 10_000_000, 4_000_000), (4_000_000, 200, 1)]);
        assert_eq!((old.len(), new.len()), (2, 2));
        assert_eq!(without(&new, &old), [Part { start: 200, len: 1, lblk: 4_000_000 }]);
        assert_eq!(without(&old, &new), [Part { start: 100, len: 1, lblk: 4_000_000 }]);
    }

    proptest! {
        #[test]
        fn as_sets_of_blocks(
            old in prop::collection::vec((0u64..200, 1u32..20, 0u64..1000), 0..20),
            new in prop::collection::vec((0u64..200, 1u32..20, 0u64..1000), 0..20),
        ) {
            let parts = |runs: Vec<(u64, u32, u64)>| -> Vec<Part> {
                runs.into_iter().map(|(start, len, lblk)| Part { start, len, lblk }).collect()
            };
            let (mut old, new) = (parts(old), parts(new));
            old.sort_unstable();
            let (old_blocks, old) = (blocks(&old), rising(old));
            prop_assert_eq!(&blocks(&old), &old_blocks);
            let new = rising(new);
            let mut left = blocks(&new);
            left.retain(|b, _| !old_blocks.contains_key(b));
            let found = without(&new, &old);
            prop_assert!(found.windows(2).all(|w| w[0].end() <= w[1].start));
            prop_assert_eq!(blocks(&found), left);
        }
    }
}
