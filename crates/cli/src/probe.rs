//! Recognises what a device or image holds already, and whether somebody uses it, before it is overwritten.
//!
//! What libblkid knows is asked of wipefs(8), which is part of util-linux and lists all signatures with their places; a
//! program rather than the library, which would have to be there when braidfs is built. Owns a table of what is commonly
//! met besides: our own, what libblkid is too new or too old for, and where wipefs is missing everything. Reads only, but
//! for [`wipe`].

use braidfs_device::{BLOCK_BYTES, Device, is_nbd_uri, look_at_devices};
use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::Path;
use std::process::{Command, Stdio};

/// Something found on a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// For a message, e.g. `an ext2/3/4 file system`.
    pub what: String,
    /// Byte offset of the signature.
    pub at: u64,
    /// Size of the device in bytes.
    pub bytes: u64,
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
/// More of them, for where libblkid cannot be asked: short ones among them, which it looks at more closely.
const MORE: &[(&str, u64, &[u8])] = &[
    ("a bfs file system", 0, b"\xce\xfa\xad\x1b"),
    ("a cramfs file system", 0, b"\x45\x3d\xcd\x28"),
    ("a cramfs file system", 0, b"\x28\xcd\x3d\x45"),
    ("a minix file system", 0x410, b"\x7f\x13"),
    ("a minix file system", 0x410, b"\x8f\x13"),
    ("a minix file system", 0x410, b"\x68\x24"),
    ("a minix file system", 0x410, b"\x78\x24"),
    ("a minix file system", 0x418, b"\x5a\x4d"),
    ("a romfs file system", 0, b"-rom1fs-"),
    ("an HFS file system", 0x400, b"BD\0"),
    ("an HFS+ file system", 0x400, b"H+\0"),
    ("a GFS2 file system", 0x10000, b"\x01\x16\x19\x70"),
    ("a UDF file system", 0x8001, b"BEA01"),
    ("a member of a RAID (md)", 0, b"\xfc\x4e\x2b\xa9"),
    ("an encrypted BitLocker volume", 3, b"-FVE-FS-"),
];
const BRAIDFS: &str = "a braidfs volume";
/// All fixed signatures lie below this.
const HEAD_BYTES: usize = 0x10040 + 64;
/// Where wipefs(8) is, where `PATH` does not say it: it is a program for administrators.
const WIPEFS: [&str; 3] = ["wipefs", "/usr/sbin/wipefs", "/sbin/wipefs"];

/// All that the device or image at `path` holds.
///
/// # Errors
/// Of the device.
pub fn probe(path: &Path) -> io::Result<Vec<Found>> {
    if is_nbd_uri(path) {
        let devices = look_at_devices(&[path.to_path_buf()]).map_err(|e| io::Error::other(e.to_string()))?;
        return devices.first().map_or(Ok(Vec::new()), |d| probe_device(&**d));
    }
    let file = File::open(path)?;
    let Some(listed) = WIPEFS.iter().find_map(|program| by_wipefs(program, path)) else {
        tracing::warn!(
            "{}: wipefs(8) of util-linux is missing or failed: only what braidfs itself knows is recognised",
            path.display()
        );
        return by_table(&file, &[SIGNATURES, MORE].concat());
    };
    let mut found = by_table(&file, SIGNATURES)?;
    found.extend(listed.into_iter().filter(|l| !found.iter().any(|f| f.at == l.at)).collect::<Vec<_>>());
    Ok(found)
}

/// What wipefs(8) prints.
#[derive(Debug, Default, serde::Deserialize)]
struct Listing {
    #[serde(default)]
    signatures: Vec<Listed>,
}

#[derive(Debug, serde::Deserialize)]
struct Listed {
    offset: String,
    length: u64,
    #[serde(rename = "type")]
    kind: String,
    usage: Option<String>,
}

/// What wipefs(8) finds; `None` where there is no such program, or it does not answer as expected.
fn by_wipefs(program: &str, path: &Path) -> Option<Vec<Found>> {
    let mut command = Command::new(program);
    command.args(["--no-act", "--json", "--output", "OFFSET,LENGTH,TYPE,USAGE", "--"]).arg(path);
    let output = command.stdin(Stdio::null()).output().ok()?;
    if !output.status.success() {
        tracing::debug!(said = %String::from_utf8_lossy(&output.stderr), "wipefs failed");
        return None;
    }
    // nothing found, nothing printed
    let listing: Listing = match output.stdout.trim_ascii() {
        b"" => Listing::default(),
        text => serde_json::from_slice(text).ok()?,
    };
    let found = |l: Listed| {
        let at = u64::from_str_radix(l.offset.trim_start_matches("0x"), 16).ok()?;
        let what = match l.usage.as_deref() {
            Some("filesystem") => format!("a file system ({})", l.kind),
            Some("raid") => format!("a member of a RAID or of a volume group ({})", l.kind),
            Some("crypto") => format!("an encrypted volume ({})", l.kind),
            Some("partition-table") => format!("a partition table ({})", l.kind),
            _ => format!("a signature ({})", l.kind),
        };
        Some(Found { what, at, bytes: l.length })
    };
    listing.signatures.into_iter().map(found).collect()
}

/// All that a device holds that has no path. wipefs(8) cannot be asked.
///
/// # Errors
/// Of the device.
pub fn probe_device(device: &dyn Device) -> io::Result<Vec<Found>> {
    by_table(device, &[SIGNATURES, MORE].concat())
}

/// What signatures are looked for in.
trait Bytes {
    /// How many bytes there are.
    fn bytes(&self) -> io::Result<u64>;
    /// Reads from `at` on, less where they end.
    fn read_some(&self, buf: &mut [u8], at: u64) -> io::Result<usize>;
}

impl Bytes for File {
    fn bytes(&self) -> io::Result<u64> {
        let mut file = self;
        file.seek(SeekFrom::End(0))
    }
    fn read_some(&self, buf: &mut [u8], at: u64) -> io::Result<usize> {
        let mut n = 0;
        while n < buf.len() {
            match self.read_at(&mut buf[n..], at + n as u64) {
                Ok(0) => break,
                Ok(k) => n += k,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(n)
    }
}

impl Bytes for dyn Device + '_ {
    fn bytes(&self) -> io::Result<u64> {
        Ok(self.blocks() * BLOCK_BYTES as u64)
    }
    fn read_some(&self, buf: &mut [u8], at: u64) -> io::Result<usize> {
        let end = (at + buf.len() as u64).min(self.bytes()?);
        let Some(n) = end.checked_sub(at) else { return Ok(0) };
        let (first, last) = (at / BLOCK_BYTES as u64, end.div_ceil(BLOCK_BYTES as u64));
        let mut blocks = vec![0; (last - first) as usize * BLOCK_BYTES];
        self.read(first, &mut blocks)?;
        let skip = (at - first * BLOCK_BYTES as u64) as usize;
        buf[..n as usize].copy_from_slice(&blocks[skip..skip + n as usize]);
        Ok(n as usize)
    }
}

/// What a table of signatures, and the places at the end of a device, tell; in the order of the table.
fn by_table(file: &(impl Bytes + ?Sized), table: &[(&str, u64, &[u8])]) -> io::Result<Vec<Found>> {
    let mut head = vec![0u8; HEAD_BYTES];
    let n = file.read_some(&mut head, 0)?;
    head.truncate(n);
    let mut found: Vec<Found> = table
        .iter()
        .filter(|(_, at, bytes)| head.get(*at as usize..).is_some_and(|h| h.starts_with(bytes)))
        .map(|&(what, at, bytes)| Found { what: what.into(), at, bytes: bytes.len() as u64 })
        .collect();
    let end = file.bytes()?;
    let mut last = [0u8; 512];
    if let Some(at) = (end / 512).checked_sub(1).map(|s| s * 512)
        && file.read_some(&mut last, at).is_ok_and(|n| n == last.len())
    {
        for (what, bytes) in
            [("a GPT partition table (its copy)", &b"EFI PART"[..]), ("a member of a RAID (DDF)", b"\xde\x11\xde\x11")]
        {
            if last.starts_with(bytes) {
                found.push(Found { what: what.into(), at, bytes: bytes.len() as u64 });
            }
        }
    }
    // A boot sector's 55 AA alone says little (FAT and NTFS have it too): ask for a partition of non-zero type.
    let mbr = head.len() >= 512 && head[510..512] == [0x55, 0xaa];
    if found.is_empty() && mbr && (0..4).any(|p| head[446 + 16 * p + 4] != 0) {
        found.push(Found { what: "an MBR partition table".into(), at: 510, bytes: 2 });
    }
    Ok(found)
}

/// What a device holds that is no braidfs volume, for "this is … and not a braidfs volume".
pub fn foreign(path: &Path) -> Option<String> {
    let found = probe(path).ok()?;
    if found.iter().any(|f| f.what == BRAIDFS) {
        return None;
    }
    found.into_iter().next().map(|f| f.what)
}

/// Rounds of [`wipe`]: behind one signature another of the same kind can come to light (zfs has dozens).
const WIPES_MAX: usize = 128;

/// Zeroes every signature on the device at `path`, as `wipefs --all` does, so that no other program takes the volume for
/// what it was.
///
/// # Errors
/// Of the device, or where signatures come up again and again.
pub fn wipe(path: &Path) -> io::Result<()> {
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    for _ in 0..WIPES_MAX {
        let found = probe(path)?;
        if found.is_empty() {
            return file.sync_all();
        }
        for f in found {
            file.write_all_at(&vec![0; f.bytes as usize], f.at)?;
        }
        // wipefs reads through the page cache, as this writes: no flush is needed in between
    }
    Err(io::Error::other("signatures come up again and again: see wipefs(8)"))
}

/// As [`wipe`], of a device that has no path.
///
/// # Errors
/// Of the device.
pub fn wipe_device(device: &dyn Device) -> io::Result<()> {
    for f in probe_device(device)? {
        let (first, last) = (f.at / BLOCK_BYTES as u64, (f.at + f.bytes).div_ceil(BLOCK_BYTES as u64));
        let mut blocks = vec![0; (last - first) as usize * BLOCK_BYTES];
        device.read(first, &mut blocks)?;
        let skip = (f.at - first * BLOCK_BYTES as u64) as usize;
        blocks[skip..skip + f.bytes as usize].fill(0);
        device.write(first, &blocks)?;
    }
    device.flush()
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

/// What keeps a device or an image busy.
pub struct Busy {
    /// `mounted on /mnt`, `attached to /dev/loop0`.
    pub what: String,
    /// The command that releases it.
    pub step: String,
}

/// Where `path` is mounted or what else keeps it busy; `None` where nothing is known (opening it exclusively is the
/// real test, this only tells the user more).
pub fn busy(path: &Path) -> Option<Busy> {
    let meta = std::fs::metadata(path).ok()?;
    if meta.file_type().is_block_device() {
        let (major, minor) = (rustix::fs::major(meta.rdev()), rustix::fs::minor(meta.rdev()));
        return mounted_on(&format!("{major}:{minor}"))
            .map(|on| Busy { what: format!("mounted on {on}"), step: format!("`umount {on}`") });
    }
    // An image behind a loop device.
    let real = std::fs::canonicalize(path).ok()?;
    for entry in std::fs::read_dir("/sys/block").ok()?.flatten() {
        let Ok(backing) = std::fs::read_to_string(entry.path().join("loop/backing_file")) else { continue };
        if Path::new(backing.trim_end_matches('\n')) != real {
            continue;
        }
        let device = entry.file_name().to_string_lossy().into_owned();
        let number = std::fs::read_to_string(entry.path().join("dev")).unwrap_or_default();
        return Some(match mounted_on(number.trim_end()) {
            Some(on) => Busy { what: format!("mounted on {on} by /dev/{device}"), step: format!("`umount {on}`") },
            None => Busy { what: format!("attached to /dev/{device}"), step: format!("`losetup -d /dev/{device}`") },
        });
    }
    None
}

fn mounted_on(device: &str) -> Option<String> {
    crate::mountinfo::read().into_iter().find(|m| m.device == device).map(|m| m.target.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named_with(at: u64, bytes: &[u8]) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        file.as_file().write_all_at(bytes, at).unwrap();
        file
    }

    fn file_with(at: u64, bytes: &[u8]) -> File {
        named_with(at, bytes).into_file()
    }

    #[test]
    fn every_signature_is_found_and_wiped() {
        for &(what, at, bytes) in SIGNATURES {
            let file = named_with(at, bytes);
            let found = probe(file.path()).unwrap();
            assert!(found.iter().any(|f| f.what == what && f.at == at), "{what}: {found:?}");
            wipe(file.path()).unwrap();
            assert_eq!(first_data(file.as_file()).unwrap(), None, "{what}");
        }
    }

    #[test]
    fn the_table_alone_knows_what_is_common() {
        let all = [SIGNATURES, MORE].concat();
        for &(what, at, bytes) in &all {
            let found = by_table(&file_with(at, bytes), &all).unwrap();
            assert!(found.iter().any(|f| f.what == what && f.at == at), "{what}: {found:?}");
        }
        for bytes in [&b"EFI PART"[..], b"\xde\x11\xde\x11"] {
            assert_eq!(by_table(&file_with((1 << 20) - 512, bytes), &all).unwrap().len(), 1);
        }
        assert!(by_table(&file_with(7000, b"text"), &all).unwrap().is_empty());
    }

    #[test]
    fn without_the_program_nothing_is_claimed() {
        let file = named_with(0, b"\xce\xfa\xad\x1b");
        assert!(by_wipefs("/no/such/wipefs", file.path()).is_none());
        assert!(by_wipefs("false", file.path()).is_none());
        assert!(by_wipefs("echo", file.path()).is_none(), "it says something else");
        assert!(by_wipefs("true", file.path()).is_some_and(|f| f.is_empty()));
    }

    #[test]
    fn an_mbr_needs_a_partition() {
        let file = file_with(510, &[0x55, 0xaa]);
        assert!(by_table(&file, SIGNATURES).unwrap().is_empty());
        file.write_all_at(&[0x83], 446 + 4).unwrap();
        assert_eq!(by_table(&file, SIGNATURES).unwrap()[0].what, "an MBR partition table");
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
        assert!(by_table(&file, SIGNATURES).unwrap().is_empty());
    }
}
