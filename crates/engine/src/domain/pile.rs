//! A list that only grows until somebody takes all of it.
//!
//! It grows by pieces of one size. A vector that doubles asks the allocator for a larger block each time, of a size of which the
//! thread has none: such a block lies in memory that the allocator hands out to all threads, by lines that all of them write.

/// Things of a piece.
const PIECE: usize = 64;

/// See the module.
#[derive(Debug)]
pub struct Pile<T> {
    /// The piece that grows.
    last: Vec<T>,
    /// Those that are full, the latest first.
    full: Option<Box<Full<T>>>,
}

#[derive(Debug)]
struct Full<T> {
    things: Vec<T>,
    before: Option<Box<Full<T>>>,
}

impl<T> Default for Pile<T> {
    fn default() -> Self {
        Self { last: Vec::new(), full: None }
    }
}

impl<T> Pile<T> {
    /// Adds a thing.
    #[inline]
    pub fn push(&mut self, thing: T) {
        if self.last.len() == PIECE {
            self.begin_piece();
        }
        self.last.push(thing);
    }

    #[cold]
    fn begin_piece(&mut self) {
        let things = std::mem::replace(&mut self.last, Vec::with_capacity(PIECE));
        self.full = Some(Box::new(Full { things, before: self.full.take() }));
    }

    /// Takes the full pieces, the latest first.
    fn take_full(&mut self) -> impl Iterator<Item = Vec<T>> {
        let mut next = self.full.take();
        std::iter::from_fn(move || {
            let piece = next.take()?;
            next = piece.before;
            Some(piece.things)
        })
    }

    /// Moves all things to the end of `all`, in the order in which they came.
    pub fn empty_into(&mut self, all: &mut Vec<T>) {
        let mut pieces: Vec<Vec<T>> = self.take_full().collect();
        pieces.reverse();
        all.reserve(pieces.len() * PIECE + self.last.len());
        pieces.into_iter().for_each(|mut piece| all.append(&mut piece));
        all.append(&mut self.last);
    }
}

impl<T> Drop for Pile<T> {
    /// One piece after the other: each within the one before would be so many calls deep.
    fn drop(&mut self) {
        self.take_full().for_each(drop);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn things_come_out_in_order_and_once() {
        let mut pile = Pile::default();
        for n in [0, 1, PIECE - 1, PIECE, PIECE + 1, 5 * PIECE + 7] {
            (0..n).for_each(|i| pile.push(i));
            let mut all = vec![usize::MAX];
            pile.empty_into(&mut all);
            assert!(all.iter().skip(1).copied().eq(0..n), "{n}: {all:?}");
            pile.empty_into(&mut all);
            assert_eq!(all.len(), n + 1);
        }
    }

    /// On a stack that would not do for a call for each piece.
    #[test]
    fn a_long_pile_can_be_dropped() {
        let drop_it = || {
            let mut pile = Pile::default();
            (0..200_000 * PIECE).for_each(|_| pile.push(()));
        };
        std::thread::Builder::new().stack_size(256 << 10).spawn(drop_it).unwrap().join().unwrap();
    }
}
