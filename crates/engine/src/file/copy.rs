//! `copy_file_range`: copies in pieces through memory.

use super::write::PIECE;
use crate::error::{Error, Result};
use crate::volume::{OpenFile, Volume};

impl Volume {
    /// `copy_file_range`; bytes copied.
    ///
    /// # Errors
    /// As [`Self::read`] and [`Self::write`]; [`Error::Invalid`] where the ranges overlap in one file.
    pub fn copy_range(
        &self,
        from: &OpenFile,
        from_offset: u64,
        to: &OpenFile,
        to_offset: u64,
        len: u64,
    ) -> Result<u64> {
        let size = from.cell.state.read().size;
        let len = len.min(size.saturating_sub(from_offset));
        if from.ino() == to.ino()
            && from_offset < to_offset.saturating_add(len)
            && to_offset < from_offset.saturating_add(len)
        {
            return Err(Error::Invalid("the ranges overlap"));
        }
        let mut buf = vec![0; PIECE.min(len as usize)];
        let mut done = 0;
        while done < len {
            let n = buf.len().min((len - done) as usize);
            let got = self.read(from, from_offset + done, &mut buf[..n])?;
            if got == 0 {
                break;
            }
            let put = match self.write(to, to_offset + done, &buf[..got]) {
                Ok(n) => n,
                Err(_) if done > 0 => break,
                Err(e) => return Err(e),
            };
            done += put as u64;
            if put < got {
                break;
            }
        }
        Ok(done)
    }
}
