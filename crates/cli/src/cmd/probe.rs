//! `braidfs probe`: does a device hold a braidfs volume, and which; for udev, scripts and people.
//!
//! Reads block 0 of one device and nothing else, so that udev, which asks for each block device that appears, waits for
//! one read. It decodes less than a mount does: a volume of a newer format has a type, a UUID and a label, too. The
//! replica in the device's last block is not looked for: a device whose block 0 is gone may have been given to another
//! use. `dist/util-linux` has the same for libblkid, and a test compares the two.

use crate::failure::{Failure, Outcome, host_error};
use braidfs_device::{is_nbd_uri, look_at_devices};
use braidfs_format::block::{self, BLOCK_BYTES, BlockKind};
use braidfs_format::super_block::SuperBlock;
use rustix::fs::OFlags;
use std::fmt::Write;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use zerocopy::FromBytes;

/// Exit code where there is no volume, as blkid(8) has it.
const NOTHING: u8 = 2;

/// Tell whether a device holds a volume, and which
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Exit codes: 0 it holds a volume, 1 wrong usage or the device cannot be read, 2 it holds none.\n\n\
    Examples:\n  braidfs probe /dev/sdb          type, UUID and label as lines NAME=VALUE, as `blkid -o export`\n  \
    braidfs probe --udev /dev/sdb   as properties for udev, as `blkid -o udev -p`\n\n\
    The superblock at the start of the device is read, nothing is written. The device may be in use. UUID_SUB is the \
    device's own UUID: all devices of a volume have the same UUID."
)]
pub struct Args {
    /// Print properties of udev(7), ID_FS_TYPE and so on
    #[arg(long)]
    udev: bool,
    /// A block device, an image file or an NBD export
    #[arg(value_name = "DEVICE")]
    device: PathBuf,
}

pub fn run(args: &Args) -> Outcome {
    let block =
        first_block(&args.device).map_err(|e| Failure::at("cannot read", args.device.display(), host_error(&e)))?;
    let Some(found) = block.as_deref().and_then(Identity::of) else { return Ok(NOTHING) };
    let text = if args.udev { found.udev() } else { found.export(&args.device) };
    crate::say(format_args!("{}", text.trim_end()))?;
    Ok(0)
}

/// Block 0; `None` where the device is shorter.
fn first_block(path: &Path) -> std::io::Result<Option<Vec<u8>>> {
    if is_nbd_uri(path) {
        let devices = look_at_devices(&[path.to_path_buf()]).map_err(|e| std::io::Error::other(e.to_string()))?;
        let mut block = vec![0; BLOCK_BYTES];
        return devices.first().map(|d| d.read(0, &mut block).map(|()| block)).transpose();
    }
    // Opening a FIFO or a drive without a medium must not wait.
    let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
    let file: File = OpenOptions::new().read(true).custom_flags(flags.bits().cast_signed()).open(path)?;
    let kind = file.metadata()?.file_type();
    if !kind.is_block_device() && !kind.is_file() {
        return Err(std::io::Error::other("neither a block device nor a file"));
    }
    let mut block = Vec::with_capacity(BLOCK_BYTES);
    std::io::Read::read_to_end(&mut std::io::Read::take(file, BLOCK_BYTES as u64), &mut block)?;
    Ok((block.len() == BLOCK_BYTES).then_some(block))
}

/// What a superblock tells of its volume and device.
#[derive(Debug, PartialEq, Eq)]
struct Identity {
    uuid: uuid::Uuid,
    /// The device's own; none where the superblock does not say which device it is of.
    uuid_sub: Option<uuid::Uuid>,
    /// Without the zeros behind it.
    label: Vec<u8>,
    version: u32,
    /// Bytes of all block groups.
    size: u64,
}

impl Identity {
    /// Of block 0 of a device. Only its own checksum is asked for: other programs' signatures have none, and what it says
    /// is only shown.
    fn of(first: &[u8]) -> Option<Self> {
        let sb = SuperBlock::read_from_bytes(first).ok()?;
        block::open(first, BlockKind::Super, sb.volume_id(), 0).ok()?;
        let devices = sb.device_table();
        let group = u64::from(sb.group_blocks.get());
        let blocks = devices.iter().fold(0u64, |sum, d| {
            let whole = u64::from(d.groups.get().saturating_sub(1)).saturating_mul(group);
            sum.saturating_add(whole).saturating_add(d.last_group_blocks.get().into())
        });
        let end = sb.label.iter().position(|&b| b == 0).unwrap_or(sb.label.len());
        Some(Self {
            uuid: uuid::Uuid::from_bytes(sb.uuid),
            uuid_sub: devices.get(usize::from(sb.this_device.get())).map(|d| uuid::Uuid::from_bytes(d.uuid)),
            label: sb.label[..end].to_vec(),
            version: sb.version.get(),
            size: blocks.saturating_mul(BLOCK_BYTES as u64),
        })
    }

    /// As `blkid -o udev -p`: what is unsafe is replaced in the plain values and written as `\x20` in those called `_ENC`.
    fn udev(&self) -> String {
        let mut out = String::new();
        let mut line = |name: &str, value: &dyn std::fmt::Display| {
            // Writing to a String cannot fail.
            let _ = writeln!(out, "{name}={value}");
        };
        if !self.label.is_empty() {
            line("ID_FS_LABEL", &safe(&self.label));
            line("ID_FS_LABEL_ENC", &encoded(&self.label));
        }
        line("ID_FS_UUID", &self.uuid);
        line("ID_FS_UUID_ENC", &self.uuid);
        if let Some(own) = &self.uuid_sub {
            line("ID_FS_UUID_SUB", own);
            line("ID_FS_UUID_SUB_ENC", own);
        }
        line("ID_FS_VERSION", &self.version);
        line("ID_FS_BLOCKSIZE", &BLOCK_BYTES);
        line("ID_FS_SIZE", &self.size);
        line("ID_FS_TYPE", &"braidfs");
        line("ID_FS_USAGE", &"filesystem");
        out
    }

    /// As `blkid -o export`, with the shell's special characters behind backslashes.
    fn export(&self, device: &Path) -> String {
        let quoted = |text: &str| {
            let special = |c: char| !c.is_alphanumeric() && !"/_-.:,@+=%".contains(c);
            text.chars()
                .fold(String::new(), |out, c| if special(c) { out + "\\" } else { out } + c.encode_utf8(&mut [0; 4]))
        };
        let mut out = format!("DEVNAME={}\n", quoted(&safe(device.as_os_str().as_encoded_bytes())));
        if !self.label.is_empty() {
            out += &format!("LABEL={}\n", quoted(&safe(&self.label)));
        }
        out += &format!("UUID={}\n", self.uuid);
        if let Some(own) = &self.uuid_sub {
            out += &format!("UUID_SUB={own}\n");
        }
        out + &format!("VERSION={}\nBLOCK_SIZE={BLOCK_BYTES}\nTYPE=braidfs\nUSAGE=filesystem\n", self.version)
    }
}

/// Characters that udev and libblkid leave as they are, everywhere.
fn harmless(c: char) -> bool {
    !c.is_ascii() || c.is_ascii_alphanumeric() || "#+-.:=@_".contains(c)
}

/// libblkid's `blkid_safe_string`: white space once as `_` and not at the ends, and what is neither harmless nor one of some
/// more as `_`, each byte that is no UTF-8 too.
fn safe(bytes: &[u8]) -> String {
    let mut out = String::new();
    for chunk in bytes.trim_ascii().utf8_chunks() {
        for c in chunk.valid().chars() {
            match c {
                c if c.is_ascii_whitespace() || c == '\x0b' => {
                    if !out.ends_with('_') {
                        out.push('_');
                    }
                }
                c if (harmless(c) || "/$%?,".contains(c)) && !c.is_control() => out.push(c),
                _ => out.push('_'),
            }
        }
        out.extend(chunk.invalid().iter().map(|_| '_'));
    }
    out
}

/// libblkid's `blkid_encode_string`: every byte that is not harmless as `\x` and two digits. What follows is a valid name of
/// a link in /dev/disk.
fn encoded(bytes: &[u8]) -> String {
    let mut out = String::new();
    for chunk in bytes.utf8_chunks() {
        for c in chunk.valid().chars() {
            if harmless(c) {
                out.push(c);
            } else {
                // ASCII: one byte
                let _ = write!(out, "\\x{:02x}", u32::from(c));
            }
        }
        for byte in chunk.invalid() {
            let _ = write!(out, "\\x{byte:02x}");
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use braidfs_format::super_block::DeviceEntry;

    fn super_block(label: &[u8]) -> SuperBlock {
        let mut sb = SuperBlock::empty();
        sb.uuid = *b"0123456789abcdef";
        sb.label[..label.len()].copy_from_slice(label);
        sb.group_blocks = 1024.into();
        sb.devices = 2.into();
        for (i, device) in sb.device.iter_mut().take(2).enumerate() {
            *device =
                DeviceEntry { uuid: [i as u8 + 1; 16], groups: 3.into(), last_group_blocks: 512.into(), ..*device };
        }
        sb
    }

    #[test]
    fn a_superblock_says_what_udev_wants() {
        let found = Identity::of(&super_block(b"my disk/1").to_block(1, 0, 1)).unwrap();
        assert_eq!(
            found.udev(),
            "ID_FS_LABEL=my_disk/1\nID_FS_LABEL_ENC=my\\x20disk\\x2f1\n\
             ID_FS_UUID=30313233-3435-3637-3839-616263646566\nID_FS_UUID_ENC=30313233-3435-3637-3839-616263646566\n\
             ID_FS_UUID_SUB=02020202-0202-0202-0202-020202020202\nID_FS_UUID_SUB_ENC=02020202-0202-0202-0202-020202020202\n\
             ID_FS_VERSION=3\nID_FS_BLOCKSIZE=4096\nID_FS_SIZE=20971520\nID_FS_TYPE=braidfs\nID_FS_USAGE=filesystem\n"
        );
        assert!(!Identity::of(&super_block(b"").to_block(0, 0, 1)).unwrap().udev().contains("LABEL"));
    }

    #[test]
    fn no_label_breaks_a_line_or_a_path() {
        for label in
            [&b"a\nID_FS_TYPE=ext4"[..], b"\"; reboot", b"\xff\xfe x\\", "ä\u{7f}\u{85} ö".as_bytes(), &[b'\n'; 64]]
        {
            let text = Identity::of(&super_block(label).to_block(0, 0, 1)).unwrap().udev();
            assert_eq!(text.lines().filter(|l| l.starts_with("ID_FS_TYPE=")).count(), 1, "{text}");
            assert!(text.lines().all(|l| l.starts_with("ID_FS_")) && !text.contains(['"', '\'']), "{text}");
            let enc = text.lines().find_map(|l| l.strip_prefix("ID_FS_LABEL_ENC=")).unwrap();
            assert!(!enc.contains(['/', ' ']), "{enc}");
        }
        assert_eq!(safe(b"  a \t b? "), "a_b?");
        assert_eq!(encoded("ü \\".as_bytes()), "ü\\x20\\x5c");
    }

    #[test]
    fn what_is_no_superblock_is_none() {
        let good = super_block(b"x").to_block(0, 0, 1);
        assert!(Identity::of(&good).is_some());
        for at in [0, 4, 8, 12, 16, 48, 64, 4095] {
            let mut bad = good.clone();
            bad[at] ^= 1;
            assert_eq!(Identity::of(&bad), None, "byte {at}");
        }
        // sealed, but for another place: the replica, and another kind of block
        assert_eq!(Identity::of(&super_block(b"x").to_block(0, 77, 1)), None);
        let mut other = good.clone();
        block::seal(&mut other, BlockKind::Bat, 0xffff, super_block(b"").volume_id(), 0, 1);
        assert_eq!(Identity::of(&other), None);
        assert_eq!(Identity::of(&good[..4095]), None);
    }

    #[test]
    fn hostile_numbers_and_newer_formats_are_shown() {
        let mut sb = super_block(b"");
        sb.version = 4_000_000_000.into();
        sb.incompat = u32::MAX.into();
        sb.devices = u16::MAX.into();
        sb.group_blocks = u32::MAX.into();
        for device in &mut sb.device {
            device.groups = u32::MAX.into();
            device.last_group_blocks = u32::MAX.into();
        }
        let found = Identity::of(&sb.to_block(u16::MAX, 0, 1)).unwrap();
        assert_eq!((found.version, found.uuid_sub, found.size), (4_000_000_000, None, u64::MAX));
    }
}
