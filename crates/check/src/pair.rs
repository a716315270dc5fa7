//! Looking at both copies of a shadow pair, and mending a damaged one.

use braidfs_device::BLOCK_BYTES;
use braidfs_format::block::{BlockKind, open, other_copy_lost, seal};

/// State of one copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CopyState {
    /// Holds, with this `seq`.
    Good(u64),
    /// All zero: never written.
    Blank,
    /// Something else, and why it does not hold.
    Bad(String),
}

/// State of both copies of the pair at `addr`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PairState(pub [CopyState; 2]);

impl PairState {
    /// Looks at `pair`, two blocks.
    pub fn of(pair: &[u8], kind: BlockKind, volume: u32, addr: u64) -> Self {
        let state = |i: usize| {
            let b = &pair[i * BLOCK_BYTES..(i + 1) * BLOCK_BYTES];
            match open(b, kind, volume, addr + i as u64) {
                Ok(h) => CopyState::Good(h.seq.get()),
                Err(_) if b.iter().all(|&x| x == 0) => CopyState::Blank,
                Err(e) => CopyState::Bad(e.why),
            }
        };
        let mut states = [state(0), state(1)];
        if let (CopyState::Good(seq), CopyState::Blank) | (CopyState::Blank, CopyState::Good(seq)) =
            (&states[0], &states[1])
        {
            let copy = usize::from(states[0] == CopyState::Blank);
            if other_copy_lost(pair, kind, volume, addr, (copy, *seq)).is_some() {
                states[1 - copy] = CopyState::Bad("is blank, and was written before".into());
            }
        }
        Self(states)
    }

    /// The copy that counts.
    pub fn current(&self) -> Option<(usize, u64)> {
        match (&self.0[0], &self.0[1]) {
            (CopyState::Good(a), CopyState::Good(b)) => Some(if b > a { (1, *b) } else { (0, *a) }),
            (CopyState::Good(a), _) => Some((0, *a)),
            (_, CopyState::Good(b)) => Some((1, *b)),
            _ => None,
        }
    }

    /// The damaged copy, where the other one holds.
    pub fn damaged(&self) -> Option<(usize, &str)> {
        self.current()?;
        self.0.iter().enumerate().find_map(|(i, c)| match c {
            CopyState::Bad(why) => Some((i, why.as_str())),
            _ => None,
        })
    }
}

/// The block to write over copy `copy` of the pair at `addr`, with what the other copy holds.
pub fn mended(pair: &[u8], kind: BlockKind, volume: u32, addr: u64, copy: usize) -> Option<Vec<u8>> {
    let good = 1 - copy;
    let mut b = pair[good * BLOCK_BYTES..(good + 1) * BLOCK_BYTES].to_vec();
    let h = open(&b, kind, volume, addr + good as u64).ok()?;
    seal(&mut b, kind, h.domain.get(), h.volume.get(), addr + copy as u64, h.seq.get());
    Some(b)
}

/// How both copies of a pair are to be written: in which order, the one that does not count first, and with which `seq`.
/// `state` is what the pair is now, `floor` the lowest `seq` before. Between the two belongs a flush.
pub fn both(state: &PairState, floor: u64) -> ([usize; 2], u64) {
    let (first, seq) = match state.current() {
        Some((copy, seq)) => (1 - copy, (seq + 1).max(floor + 1)),
        None => (0, floor + 1),
    };
    ([first, 1 - first], seq)
}
