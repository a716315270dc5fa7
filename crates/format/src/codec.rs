//! Bounds-checked reading and writing of variable-length little-endian records.

use crate::Corrupt;

/// Reads fields one after the other; every read is checked.
#[derive(Debug, Clone)]
pub struct Reader<'a> {
    buf: &'a [u8],
    pos: usize,
    what: &'static str,
}

macro_rules! get {
    ($($name:ident: $t:ty),*) => {$(
        #[doc = concat!("The next `", stringify!($t), "`, little-endian.")]
        #[inline]
        pub fn $name(&mut self) -> Result<$t, Corrupt> {
            let b = self.bytes(size_of::<$t>())?;
            let mut a = [0u8; size_of::<$t>()];
            a.copy_from_slice(b);
            Ok(<$t>::from_le_bytes(a))
        }
    )*};
}

impl<'a> Reader<'a> {
    /// Reads `buf`; `what` names it in errors.
    pub fn new(buf: &'a [u8], what: &'static str) -> Self {
        Self { buf, pos: 0, what }
    }
    /// Bytes not yet read.
    #[inline]
    pub fn left(&self) -> usize {
        self.buf.len() - self.pos
    }
    /// Offset of the next byte.
    pub fn pos(&self) -> usize {
        self.pos
    }
    /// The next `n` bytes.
    #[inline]
    pub fn bytes(&mut self, n: usize) -> Result<&'a [u8], Corrupt> {
        if n > self.left() {
            return Err(self.ends_early(n));
        }
        let b = &self.buf[self.pos..self.pos + n];
        self.pos += n;
        Ok(b)
    }
    /// The next `N` bytes.
    ///
    /// # Errors
    /// [`Corrupt`] where there are fewer.
    #[inline]
    pub fn array<const N: usize>(&mut self) -> Result<&'a [u8; N], Corrupt> {
        match self.buf[self.pos..].first_chunk() {
            Some(b) => {
                self.pos += N;
                Ok(b)
            }
            None => Err(self.ends_early(N)),
        }
    }
    #[cold]
    fn ends_early(&self, n: usize) -> Corrupt {
        Corrupt::new(self.what, format!("ends at byte {} where {n} more are due", self.pos))
    }
    /// An error about this record.
    pub fn bad(&self, why: impl Into<String>) -> Corrupt {
        Corrupt::new(self.what, why)
    }
    get!(u8: u8, u16: u16, u32: u32, u64: u64, i64: i64);

    /// A 48-bit unsigned number.
    pub fn u48(&mut self) -> Result<u64, Corrupt> {
        let b = self.bytes(6)?;
        let mut a = [0u8; 8];
        a[..6].copy_from_slice(b);
        Ok(u64::from_le_bytes(a))
    }
}

/// Appends fields to a byte vector.
pub trait Put {
    /// Appends one byte.
    fn put_u8(&mut self, v: u8);
    /// Appends a `u16`, little-endian.
    fn put_u16(&mut self, v: u16);
    /// Appends a `u32`, little-endian.
    fn put_u32(&mut self, v: u32);
    /// Appends the low 48 bits of `v`; panics where it has more (a bug of ours).
    fn put_u48(&mut self, v: u64);
    /// Appends a `u64`, little-endian.
    fn put_u64(&mut self, v: u64);
    /// Appends an `i64`, little-endian.
    fn put_i64(&mut self, v: i64);
}

impl Put for Vec<u8> {
    fn put_u8(&mut self, v: u8) {
        self.push(v);
    }
    fn put_u16(&mut self, v: u16) {
        self.extend_from_slice(&v.to_le_bytes());
    }
    fn put_u32(&mut self, v: u32) {
        self.extend_from_slice(&v.to_le_bytes());
    }
    fn put_u48(&mut self, v: u64) {
        assert!(v >> 48 == 0, "{v} has more than 48 bits");
        self.extend_from_slice(&v.to_le_bytes()[..6]);
    }
    fn put_u64(&mut self, v: u64) {
        self.extend_from_slice(&v.to_le_bytes());
    }
    fn put_i64(&mut self, v: i64) {
        self.extend_from_slice(&v.to_le_bytes());
    }
}
