//! Recognises what a device or image holds already, and whether somebody uses it, before it is overwritten.
//!
//! Owns a table of signatures (the places that blkid(8) knows, for what is commonly met). Reads only. It does not
//! promise to know every format: it is the seat belt of `mkfs`, not an inventory.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::Path;

/// Something found on a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// For a message, e.g. `an ext2/3/4 file system`.
    pub what: &'static str,
    /// Byte offset of the signature.
    pub at: u64,
}

/// (name, offset, bytes).
const SIGNATURES: &[(&str, u64, &[u8])] = &[
    (BRAIDFS, 0, b"BRFS"),
    ("an ext2/3/4 file system", 0x438, b"\x53\xef"),
    ("an XFS file system", 0, b"XFSB"),
    ("a btrfs file system", 0x10040, b"_BHRfS_M"),
    ("an F2FS file system", 0x400, b"\x10\x20\xf5\xf2"),
    ("an F2FS file system", 0x1400, b"\x10\x20\xf5\xf2"),
    ("a bcachefs or bcache device", 0x1018, b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81"),
    ("a bcachefs or bcache device", 0x1018, b"\xc6\x85\x73\xf6\x66\xce\x90\xa9\xd9\x6a\x60\xcf\x80\x3d\xf7\xef"),
    ("swap space", 4086, b"SWAPSPACE2"),
    ("swap space", 4086, b"SWAP-SPACE"),
    ("an encrypted LUKS volume", 0, b"LUKS\xba\xbe"),
    ("an LVM physical volume", 0x200, b"LABELONE"),
    ("a member of a RAID (md)", 0x1000, b"\xfc\x4e\x2b\xa9"),
    ("an NTFS file system", 3, b"NTFS    "),
    ("an exFAT file system", 3, b"EXFAT   "),
    ("a FAT file system", 0x36, b"FAT1"),
    ("a FAT file system", 0x52, b"FAT32"),
    ("an EROFS file system", 0x400, b"\xe2\xe1\xf5\xe0"),
    ("a squashfs file system", 0, b"hsqs"),
    ("an ISO 9660 file system", 0x8001, b"CD001"),
    ("a ReiserFS file system", 0x10034, b"ReIsEr"),
    ("a JFS file system", 0x8000, b"JFS1"),
    ("a NILFS2 file system", 0x406, b"\x34\x34"),
    ("a GPT partition table", 0x200, b"EFI PART"),
    ("a GPT partition table", 0x1000, b"EFI PART"),
];
const BRAIDFS: &str = "a braidfs volume";
/// All fixed signatures lie below this.
const HEAD_BYTES: usize = 0x10040 + 64;

/// All that `file` (a device or an image) holds, in the order of the table.
///
/// # Errors
/// Of the device.
pub fn probe(file: &File) -> io::Result<Vec<Found>> {
    let mut head = vec![0u8; HEAD_BYTES];
    let n = read_some(file, &mut head)?;
    head.truncate(n);
    let mut found: Vec<Found> = SIGNATURES
        .iter()
        .filter(|(_, at, bytes)| head.get(*at as usize..).is_some_and(|h| h.starts_with(bytes)))
        .map(|&(what, at, _)| Found { what, at })
        .collect();
    // A boot sector's 55 AA alone says little (FAT and NTFS have it too): ask for a partition of non-zero type.
    let mbr = head.len() >= 512 && head[510..512] == [0x55, 0xaa];
    if found.is_empty() && mbr && (0..4).any(|p| head[446 + 16 * p + 4] != 0) {
        found.push(Found { what: "an MBR partition table", at: 510 });
    }
    Ok(found)
}

/// What a device holds that is no braidfs volume, for "this is … and not a braidfs volume".
pub fn foreign(path: &Path) -> Option<&'static str> {
    let file = File::open(path).ok()?;
    let found = probe(&file).ok()?;
    if found.iter().any(|f| f.what == BRAIDFS) {
        return None;
    }
    found.first().map(|f| f.what)
}

/// Zeroes the 4 KiB blocks of the signatures in `found` other than block 0, which mkfs overwrites, so that no other
/// program takes the volume for what it was.
///
/// # Errors
/// Of the device.
pub fn wipe(file: &File, found: &[Found]) -> io::Result<()> {
    found.iter().filter(|f| f.at >= 4096).try_for_each(|f| file.write_all_at(&[0; 4096], f.at & !4095))
}

/// Offset of the first byte of a regular file that is neither in a hole nor zero.
///
/// # Errors
/// Of the file.
pub fn first_data(file: &File) -> io::Result<Option<u64>> {
    use rustix::fs::{SeekFrom, seek};
    let mut at = 0u64;
    let mut buf = vec![0u8; 1 << 20];
    loop {
        let start = match seek(file, SeekFrom::Data(at)) {
            Ok(start) => start,
            Err(rustix::io::Errno::NXIO) => return Ok(None),
            Err(e) => return Err(e.into()),
        };
        let end = seek(file, SeekFrom::Hole(start))?;
        at = start;
        while at < end {
            let want = buf.len().min((end - at) as usize);
            let n = file.read_at(&mut buf[..want], at)?;
            if n == 0 {
                return Ok(None);
            }
            if let Some(i) = buf[..n].iter().position(|&b| b != 0) {
                return Ok(Some(at + i as u64));
            }
            at += n as u64;
        }
    }
}

/// Where `path` is mounted or what else keeps it busy; `None` where nothing is known (opening it exclusively is the
/// real test, this only tells the user more).
pub fn busy(path: &Path) -> Option<String> {
    let meta = std::fs::metadata(path).ok()?;
    if meta.file_type().is_block_device() {
        let (major, minor) = (rustix::fs::major(meta.rdev()), rustix::fs::minor(meta.rdev()));
        return mounted_on(&format!("{major}:{minor}")).map(|on| format!("mounted on {on}"));
    }
    // An image behind a loop device.
    let real = std::fs::canonicalize(path).ok()?;
    for entry in std::fs::read_dir("/sys/block").ok()?.flatten() {
        let Ok(backing) = std::fs::read_to_string(entry.path().join("loop/backing_file")) else { continue };
        if Path::new(backing.trim_end_matches('\n')) == real {
            return Some(format!("attached to /dev/{}", entry.file_name().to_string_lossy()));
        }
    }
    None
}

fn mounted_on(device: &str) -> Option<String> {
    crate::mountinfo::read().into_iter().find(|m| m.device == device).map(|m| m.target.display().to_string())
}

fn read_some(file: &File, buf: &mut [u8]) -> io::Result<usize> {
    let mut n = 0;
    while n < buf.len() {
        match file.read_at(&mut buf[n..], n as u64) {
            Ok(0) => break,
            Ok(k) => n += k,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(n)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file_with(at: u64, bytes: &[u8]) -> File {
        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 20).unwrap();
        file.write_all_at(bytes, at).unwrap();
        file
    }

    #[test]
    fn every_signature_is_found_and_wiped() {
        for &(what, at, bytes) in SIGNATURES {
            let file = file_with(at, bytes);
            let found = probe(&file).unwrap();
            assert_eq!(found, [Found { what, at }]);
            wipe(&file, &found).unwrap();
            assert_eq!(probe(&file).unwrap().is_empty(), at >= 4096, "{what}");
        }
    }

    #[test]
    fn an_mbr_needs_a_partition() {
        let file = file_with(510, &[0x55, 0xaa]);
        assert!(probe(&file).unwrap().is_empty());
        file.write_all_at(&[0x83], 446 + 4).unwrap();
        assert_eq!(probe(&file).unwrap()[0].what, "an MBR partition table");
    }

    #[test]
    fn data_is_told_from_holes_and_zeros() {
        let file = file_with(0, &[0; 8192]);
        assert_eq!(first_data(&file).unwrap(), None);
        file.write_all_at(b"x", 700_001).unwrap();
        assert_eq!(first_data(&file).unwrap(), Some(700_001));
        assert_eq!(first_data(&tempfile::tempfile().unwrap()).unwrap(), None);
    }

    #[test]
    fn a_short_file_is_no_error() {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(b"BRF", 0).unwrap();
        assert!(probe(&file).unwrap().is_empty());
    }
}
