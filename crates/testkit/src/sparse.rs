//! File content as the model keeps it: pages that are not all zeros, and a size.
//!
//! Canonical: a page of zeros is never stored and nothing but zeros lies past the size, so `==` compares what a reader
//! would see. Cloning shares the pages, so that a crash test can keep the content after every operation.

use std::collections::BTreeMap;
use std::sync::Arc;

/// Bytes of a page.
pub const PAGE: usize = 4096;

static ZERO: [u8; PAGE] = [0; PAGE];

/// Content of a file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Sparse {
    size: u64,
    pages: BTreeMap<u64, Arc<[u8; PAGE]>>,
}

impl Sparse {
    /// The size in bytes, holes counted.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Calls `f` with (page number, offset in the page, offset in the range, bytes) for each page of a range.
    fn pieces(offset: u64, len: usize, mut f: impl FnMut(u64, usize, usize, usize)) {
        let mut done = 0;
        while done < len {
            let at = offset + done as u64;
            let within = (at % PAGE as u64) as usize;
            let n = (PAGE - within).min(len - done);
            f(at / PAGE as u64, within, done, n);
            done += n;
        }
    }

    /// Reads up to `len` bytes.
    pub fn read(&self, offset: u64, len: usize) -> Vec<u8> {
        let len = self.size.saturating_sub(offset).min(len as u64) as usize;
        let mut out = vec![0; len];
        Self::pieces(offset, len, |page, within, done, n| {
            if let Some(p) = self.pages.get(&page) {
                out[done..done + n].copy_from_slice(&p[within..within + n]);
            }
        });
        out
    }

    /// Writes at `offset`, and makes it longer where the data goes beyond its end.
    pub fn write(&mut self, offset: u64, data: &[u8]) {
        if data.is_empty() {
            return;
        }
        let pages = &mut self.pages;
        Self::pieces(offset, data.len(), |page, within, done, n| {
            let new = &data[done..done + n];
            let zero = *new == ZERO[..n];
            if zero && (n == PAGE || !pages.contains_key(&page)) {
                pages.remove(&page);
                return;
            }
            let p = Arc::make_mut(pages.entry(page).or_insert_with(|| Arc::new(ZERO)));
            p[within..within + n].copy_from_slice(new);
            if zero && *p == ZERO {
                pages.remove(&page);
            }
        });
        self.size = self.size.max(offset + data.len() as u64);
    }

    /// Makes a range read as zeros; the size stays.
    pub fn zero(&mut self, offset: u64, len: u64) {
        let end = offset.saturating_add(len).min(self.size);
        if end <= offset {
            return;
        }
        let touched: Vec<u64> =
            self.pages.range(offset / PAGE as u64..end.div_ceil(PAGE as u64)).map(|(p, _)| *p).collect();
        for page in touched {
            let start = page * PAGE as u64;
            let from = offset.max(start).min(end);
            let to = end.min(start + PAGE as u64);
            if from < to {
                self.write(from, &vec![0; (to - from) as usize]);
            }
        }
    }

    /// Truncates or extends with zeros.
    pub fn resize(&mut self, size: u64) {
        if size < self.size {
            self.zero(size, self.size - size);
        }
        self.size = size;
    }

    /// Takes whole pages out; what lies behind moves to their place.
    pub fn collapse(&mut self, offset: u64, len: u64) {
        let (first, n) = (offset / PAGE as u64, len / PAGE as u64);
        let mut rest = self.pages.split_off(&first).split_off(&(first + n));
        while let Some((page, bytes)) = rest.pop_first() {
            self.pages.insert(page - n, bytes);
        }
        self.size -= len;
    }

    /// Makes room for whole pages, of zeros.
    pub fn insert(&mut self, offset: u64, len: u64) {
        let rest = self.pages.split_off(&(offset / PAGE as u64));
        self.pages.extend(rest.into_iter().map(|(page, bytes)| (page + len / PAGE as u64, bytes)));
        self.size += len;
    }

    /// Whether a range holds nothing but zeros.
    pub fn is_zero(&self, offset: u64, len: u64) -> bool {
        let end = offset.saturating_add(len).min(self.size);
        if end <= offset {
            return true;
        }
        self.pages.range(offset / PAGE as u64..end.div_ceil(PAGE as u64)).all(|(page, p)| {
            let start = page * PAGE as u64;
            let from = offset.max(start) - start;
            let to = end.min(start + PAGE as u64) - start;
            p[from as usize..to as usize].iter().all(|b| *b == 0)
        })
    }

    /// Numbers of the pages that hold something.
    pub fn pages(&self) -> impl Iterator<Item = u64> + '_ {
        self.pages.keys().copied()
    }

    /// `PAGE` bytes of a page (zeros past the size).
    pub fn page(&self, page: u64) -> &[u8; PAGE] {
        self.pages.get(&page).map_or(&ZERO, |p| p)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn behaves_as_a_vector() {
        let mut rng = fastrand::Rng::with_seed(1);
        let (mut s, mut v) = (Sparse::default(), Vec::<u8>::new());
        for _ in 0..5000 {
            let (off, len) = (rng.usize(..20_000), rng.usize(..9000));
            match rng.u8(..4) {
                0 => {
                    s.resize(off as u64);
                    v.resize(off, 0);
                }
                1 => {
                    s.zero(off as u64, len as u64);
                    let (a, b) = (off.min(v.len()), (off + len).min(v.len()));
                    v[a..b].fill(0);
                }
                2 => {
                    let data = vec![rng.u8(..); len];
                    s.write(off as u64, &data);
                    if len > 0 {
                        v.resize(v.len().max(off + len), 0);
                        v[off..off + len].copy_from_slice(&data);
                    }
                }
                _ => {
                    let (a, b) = (off.min(v.len()), (off + len).min(v.len()));
                    assert_eq!(s.is_zero(off as u64, len as u64), v[a..b].iter().all(|x| *x == 0));
                }
            }
            assert_eq!(s.size(), v.len() as u64);
            assert_eq!(s.read(0, 40_000), v);
            assert!(s.pages().all(|p| s.page(p).iter().any(|b| *b != 0)));
        }
    }
}
