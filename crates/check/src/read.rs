//! Reading many blocks of the group space.

use crate::codes;
use crate::report::{Bad, Checked};
use braidfs_device::AlignedBuf;
use braidfs_format::{BLOCK_BYTES, BlockAddr};
use braidfs_store::Store;

/// Blocks nobody asks for that are read along rather than cutting a read in two.
const GAP_BLOCKS: u64 = 8;

/// Cuts `items`, which are sorted by `addr`, into runs that one read of at most `most` blocks takes along: first block,
/// blocks, and the items that lie there.
pub fn runs<'a, T>(
    items: &'a [T],
    addr: impl Fn(&T) -> u64 + 'a,
    most: u64,
) -> impl Iterator<Item = (u64, u64, &'a [T])> {
    let mut rest = items;
    std::iter::from_fn(move || {
        let first = addr(rest.first()?);
        let mut last = first;
        let near = |item: &&T| {
            let at = addr(item);
            let near = at <= last.saturating_add(1 + GAP_BLOCKS) && at - first < most;
            last = if near { at } else { last };
            near
        };
        let n = rest.iter().take_while(near).count();
        let (some, later) = rest.split_at(n);
        rest = later;
        Some((first, last - first + 1, some))
    })
}

/// Reads the blocks at `addrs`, in the order of the device and neighbours together; they come in the order of `addrs`.
///
/// # Errors
/// [`codes::UNREADABLE`], with the index of the block as [`Bad::at`].
pub fn read_scattered(store: &Store, addrs: &[BlockAddr]) -> Checked<Vec<u8>> {
    let mut order: Vec<u32> = (0..addrs.len() as u32).collect();
    order.sort_unstable_by_key(|&i| addrs[i as usize]);
    let mut out = vec![0u8; addrs.len() * BLOCK_BYTES];
    let mut buf = AlignedBuf::zeroed(BLOCK_BYTES);
    let mut at = 0;
    while at < order.len() {
        let first = addrs[order[at] as usize];
        let n = order[at..].iter().zip(0u64..).take_while(|(i, k)| addrs[**i as usize].0 == first.0 + k).count();
        if buf.len() < n * BLOCK_BYTES {
            buf = AlignedBuf::zeroed(n * BLOCK_BYTES);
        }
        let run = &mut buf[..n * BLOCK_BYTES];
        if store.read(first, run).is_err() {
            // one bad sector fails them all: which?
            for (i, block) in order[at..at + n].iter().zip(run.chunks_mut(BLOCK_BYTES)) {
                let addr = addrs[*i as usize];
                let bad = |e| Bad::new(codes::UNREADABLE, format!("{addr} cannot be read: {e}")).at(u64::from(*i));
                store.read(addr, block).map_err(bad)?;
            }
        }
        for (i, block) in order[at..at + n].iter().zip(run.chunks(BLOCK_BYTES)) {
            out[*i as usize * BLOCK_BYTES..][..BLOCK_BYTES].copy_from_slice(block);
        }
        at += n;
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_ends_at_a_gap_and_at_its_limit() {
        let of =
            |addrs: &[u64]| runs(addrs, |a| *a, 64).map(|(first, n, some)| (first, n, some.len())).collect::<Vec<_>>();
        assert_eq!(of(&[]), []);
        assert_eq!(of(&[10]), [(10, 1, 1)]);
        assert_eq!(of(&[10, 10, 11, 20, 30]), [(10, 11, 4), (30, 1, 1)]);
        assert_eq!(of(&(0..100).collect::<Vec<_>>()), [(0, 64, 64), (64, 36, 36)]);
        assert_eq!(of(&[u64::MAX - 1, u64::MAX]), [(u64::MAX - 1, 2, 2)]);
    }
}
