//! Sums by which two sets are compared that are seen in different orders, without keeping either.
//!
//! Each element is hashed to 128 bits under keys drawn anew for each check, and the hashes are added up (a multiset
//! hash). Equal sets give equal sums; different ones give different sums but for a chance of about 2^-60 per
//! comparison, which nobody who made the volume could better, as the keys did not exist then.

use braidfs_format::{BlockAddr, InodeNo};
use siphasher::sip128::{Hasher128, SipHasher13};
use std::hash::Hasher;
use std::io;

/// Sum of the hashes of a set.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MultisetHash(u128);

impl MultisetHash {
    /// Adds an element.
    pub fn add(&mut self, hash: u128) {
        self.0 = self.0.wrapping_add(hash);
    }
    /// Adds another set.
    pub fn join(&mut self, other: MultisetHash) {
        self.add(other.0);
    }
}

/// Keys of the hashes.
#[derive(Debug, Clone, Copy)]
pub struct Keys {
    sip: [u8; 16],
    k: [u64; 4],
}

/// Both halves of a product, mixed.
fn fold(a: u64, b: u64) -> u64 {
    let p = u128::from(a) * u128::from(b);
    p as u64 ^ (p >> 64) as u64
}

impl Keys {
    /// New ones.
    ///
    /// # Errors
    /// Where the system has no random numbers.
    pub fn random() -> io::Result<Self> {
        let mut keys = Self { sip: [0; 16], k: [0; 4] };
        getrandom::fill(&mut keys.sip)?;
        for k in &mut keys.k {
            *k = getrandom::u64()? | 1;
        }
        Ok(keys)
    }

    /// Block `addr` belongs to `node` as its logical block `lblk`; for node 0, a node block, `lblk` is its live
    /// records.
    pub fn block(&self, addr: BlockAddr, node: InodeNo, lblk: u64) -> u128 {
        let k = &self.k;
        let x = fold(addr.0 ^ k[0], node.0 ^ k[1]);
        let y = fold(lblk ^ k[2], addr.0.rotate_left(32) ^ k[3]);
        let (lo, hi) = (fold(x ^ k[2], y ^ k[0]), fold(x.rotate_left(29) ^ k[3], y.rotate_left(41) ^ k[1]));
        u128::from(hi) << 64 | u128::from(lo)
    }

    /// `name` in `dir` is the inode `node` of generation `generation` and type `kind`.
    pub fn name(&self, dir: InodeNo, name: &[u8], node: InodeNo, generation: u32, kind: u8) -> u128 {
        let mut h = SipHasher13::new_with_key(&self.sip);
        let mut head = [0u8; 21];
        head[..8].copy_from_slice(&dir.0.to_le_bytes());
        head[8..16].copy_from_slice(&node.0.to_le_bytes());
        head[16..20].copy_from_slice(&generation.to_le_bytes());
        head[20] = kind;
        h.write(&head);
        h.write(name);
        h.finish128().as_u128()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn order_does_not_matter_and_every_field_does() {
        let keys = Keys::random().unwrap();
        let block = |a: u64, n: u64, l: u64| keys.block(BlockAddr(a), InodeNo(n), l);
        let (mut one, mut two) = (MultisetHash::default(), MultisetHash::default());
        (0..100).for_each(|i| one.add(block(i, 7, i + 3)));
        (0..100).rev().for_each(|i| two.add(block(i, 7, i + 3)));
        assert_eq!(one, two);
        two.add(block(1, 7, 4));
        assert_ne!(one, two);

        let mut seen = HashSet::new();
        for (a, n, l) in (0..12).flat_map(|a| (0..12).flat_map(move |n| (0..12).map(move |l| (a, n, l)))) {
            assert!(seen.insert(block(a, n, l)), "{a} {n} {l}");
        }
        let name = |d: u64, s: &[u8], n: u64, g: u32, k: u8| keys.name(InodeNo(d), s, InodeNo(n), g, k);
        let all = [
            name(1, b"a", 2, 3, 4),
            name(2, b"a", 2, 3, 4),
            name(1, b"b", 2, 3, 4),
            name(1, b"a", 3, 3, 4),
            name(1, b"a", 2, 4, 4),
            name(1, b"a", 2, 3, 5),
        ];
        assert_eq!(all.iter().collect::<HashSet<_>>().len(), all.len());
        assert_ne!(Keys::random().unwrap().block(BlockAddr(1), InodeNo(1), 1), block(1, 1, 1));
    }
}
