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
            let got = match self.read(from, from_offset + done, &mut buf[..n]) {
                Ok(0) => break,
                Ok(n) => n,
                // what was copied is told of, as of a write that fails
                Err(_) if done > 0 => break,
                Err(e) => return Err(e),
            };
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Cred, MkfsOptions, MountOptions, OpenHow, mkfs};
    use braidfs_device::{Device, Effect, FaultDevice, MemDevice, Op, Rule};
    use std::sync::Arc;

    /// What was copied before a block that cannot be read is told of; with nothing copied, the error.
    #[test]
    fn what_was_copied_before_an_error_counts() {
        let faults = Arc::new(FaultDevice::new(Arc::new(MemDevice::new(16384)), 1));
        let device: Arc<dyn Device> = faults.clone();
        mkfs::format(std::slice::from_ref(&device), &MkfsOptions::default()).unwrap();
        let mount = || {
            let options = MountOptions { background: false, ..MountOptions::default() };
            Volume::mount(vec![device.clone()], options).unwrap()
        };
        let open = |v: &Volume, path: &[u8]| {
            let how = OpenHow { read: true, write: true, create: true, mode: 0o644, ..OpenHow::default() };
            v.open_path(path, how, &Cred::root()).unwrap()
        };
        let v = mount();
        let f = open(&v, b"/from");
        let (piece, len) = (PIECE as u64, 2 * PIECE);
        assert_eq!(v.append(&f, &vec![7; len]).unwrap(), 0);
        drop(f);
        v.unmount().unwrap();
        // nothing of it is in memory
        let v = mount();
        let (from, to) = (open(&v, b"/from"), open(&v, b"/to"));
        let second =
            v.extents(from.ino()).unwrap().into_iter().find(|e| e.offset + e.len > piece + (piece / 2)).unwrap();
        let at = second.place.unwrap().1 / 4096 + (piece + piece / 2).saturating_sub(second.offset) / 4096;
        faults.add(Rule::new(Op::Read, Effect::Fail(5)).blocks(at..at + 1));
        assert_eq!(v.copy_range(&from, 0, &to, 0, len as u64).unwrap(), piece);
        assert!(v.copy_range(&from, piece, &to, piece, piece).is_err());
        faults.clear();
        drop((from, to));
        v.unmount().unwrap();
    }
}
