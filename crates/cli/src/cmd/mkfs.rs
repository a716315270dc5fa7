//! `braidfs mkfs`: makes a volume on image files or block devices.
//!
//! Refuses to overwrite what it recognises, and any image that is not empty, unless told to. Image files that it
//! made itself are removed again where it fails.

use crate::cmd::info::{VolumeReport, volume_report};
use crate::failure::{Failure, Outcome, host_error};
use crate::{mounted, open, probe, text};
use braidfs::format::inode::INLINE_MAX;
use braidfs::format::super_block::{MAX_DEVICES, MAX_DOMAINS};
use braidfs::store::lease::Lease;
use braidfs::{LABEL_MAX, MkfsOptions, Placement};
use braidfs_device::{BLOCK_BYTES, CutDevice, Device, FileDevice, OpenHow, is_nbd_uri, look_at_devices};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Smallest and largest volume that is made; see braidfs-resize(8) for what can become of it.
const VOLUME_BYTES: std::ops::RangeInclusive<u64> = 32 << 20..=16 << 40;

/// Make a volume on image files or block devices
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  braidfs mkfs --size 10G disk.img             make an image file of 10 GiB and a volume in it\n  \
    braidfs mkfs -L data /dev/sdb                a block device\n  \
    braidfs mkfs --domains 8 /dev/sdb /dev/sdc   one volume over two devices\n\n\
    A new volume has 32 MiB to 16 TiB (braidfs-resize(8) goes further). Sizes take K, M, G, T (powers of 1024).\n\n\
    A device that holds something is overwritten only with --force; its signatures are then wiped. What it holds is recognised \
    with wipefs(8) of util-linux, and by braidfs itself."
)]
pub struct Args {
    /// Label, at most 63 bytes
    #[arg(short = 'L', long, default_value = "", hide_default_value = true)]
    label: String,
    /// UUID of the volume [default: a random one]
    #[arg(short = 'U', long)]
    uuid: Option<uuid::Uuid>,
    /// Domains: parts with a journal and an allocator of their own [default: by CPUs and size]
    #[arg(long, value_name = "N")]
    domains: Option<u16>,
    /// Bytes of a block group, a power of two from 4M to 64M [default: by size]
    #[arg(long, value_parser = text::parse_size, value_name = "BYTES")]
    group_size: Option<u64>,
    /// Largest file that is kept in its inode; 0 for none [default: 3400]
    #[arg(long, value_parser = text::parse_size, value_name = "BYTES")]
    inline: Option<u64>,
    /// Checksum file data too (metadata always is): files end at 115 GiB, those overwritten in no order at 15 to 30 GiB
    #[arg(long)]
    data_checksums: bool,
    /// Journal of each domain, 512K to 32M [default: by size]
    #[arg(long, value_parser = text::parse_size, value_name = "BYTES")]
    journal: Option<u64>,
    /// mlogs (write streams) of each domain [default: by CPUs]
    #[arg(long, value_name = "N")]
    mlogs: Option<u16>,
    /// Where new files and directories go
    #[arg(long, value_enum, default_value_t = PlacementArg::Dirs)]
    placement: PlacementArg,
    /// Make the image files, or extend them to this size; of a block device, use this much
    #[arg(long, value_parser = text::parse_size, value_name = "BYTES", allow_hyphen_values = true)]
    size: Option<u64>,
    /// Do not discard the devices first (TRIM, hole punch)
    #[arg(short = 'K', long)]
    nodiscard: bool,
    /// Overwrite what is there
    #[arg(short, long)]
    force: bool,
    /// Print nothing on success
    #[arg(short, long)]
    quiet: bool,
    /// Print the summary as JSON
    #[arg(long)]
    json: bool,
    /// Image files, block devices, or NBD exports (nbd://HOST[:PORT][/EXPORT], nbd+unix:///EXPORT?socket=PATH)
    #[arg(required = true, value_name = "DEVICE")]
    devices: Vec<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum PlacementArg {
    /// Directories spread over the domains, files stay with their directory
    Dirs,
    /// Every object to the next domain
    Spread,
    /// Top-level directories spread, all below stays with them
    Inherit,
}

pub fn run(args: &Args) -> Outcome {
    let options = options(args)?;
    let paths = open::expand(&args.devices);
    if let [.., _, last] = &paths[..]
        && let Some(count) = last.to_str().filter(|t| t.bytes().all(|b| b.is_ascii_digit()) && !last.exists())
    {
        let why =
            "there is no such device; a size, which mkfs(8) takes in blocks, is given in bytes: --size 64M DEVICE";
        return Err(Failure::at("cannot use", count, why));
    }
    if paths.len() > MAX_DEVICES {
        return Err(Failure::new(format!("{} devices: a volume has at most {MAX_DEVICES}", paths.len())));
    }
    let mut made = Vec::new();
    let report = format(args, &options, &paths, &mut made).inspect_err(|_| {
        for path in made {
            // The first error is the one to tell.
            let _ = std::fs::remove_file(path);
        }
    })?;
    // The volume is there now, whoever reads of it.
    if args.json {
        let json = serde_json::to_string_pretty(&report).map_err(|e| Failure::new(format!("mkfs: {e}")))?;
        crate::say(format_args!("{json}"))?;
    } else if !args.quiet {
        crate::say(format_args!("{}: made a braidfs volume\n{}", open::show(&paths), report.text().trim_end()))?;
    }
    Ok(0)
}

/// Checks every option before anything is touched.
fn options(args: &Args) -> Result<MkfsOptions, Failure> {
    let bad = |option: &str, value: &dyn std::fmt::Display, why: &str| {
        Err(Failure::new(format!("{option} {value}: out of range: {why}")))
    };
    if args.label.len() > LABEL_MAX || args.label.contains('\0') {
        return bad("--label", &args.label, "use at most 63 bytes");
    }
    if let Some(n) = args.domains.filter(|n| !(1..=MAX_DOMAINS).contains(n)) {
        return bad("--domains", &n, &format!("use 1 to {MAX_DOMAINS}"));
    }
    if let Some(n) = args.group_size.filter(|n| !n.is_power_of_two() || !(4 << 20..=64 << 20).contains(n)) {
        return bad("--group-size", &text::size(n), "use 4M, 8M, 16M, 32M or 64M");
    }
    if let Some(n) = args.inline.filter(|n| *n > INLINE_MAX as u64) {
        return bad("--inline", &n, &format!("use 0 to {INLINE_MAX}"));
    }
    if let Some(n) = args.journal.filter(|n| !(512 << 10..=32 << 20).contains(n)) {
        return bad("--journal", &text::size(n), "use 512K to 32M");
    }
    if let Some(n) = args.mlogs.filter(|n| !(1..=64).contains(n)) {
        return bad("--mlogs", &n, "use 1 to 64");
    }
    if let Some(n) = args.size.filter(|n| n % 4096 != 0) {
        return bad("--size", &n, "use a multiple of 4096 bytes, and 32 MiB to 16 TiB for all devices together");
    }
    if let Some(uuid) = args.uuid.filter(uuid::Uuid::is_nil) {
        return bad("--uuid", &uuid, "all zero means none: leave the option out for a random one");
    }
    Ok(MkfsOptions {
        domains: args.domains,
        group_bytes: args.group_size,
        label: args.label.clone(),
        uuid: args.uuid.map(uuid::Uuid::into_bytes),
        inline_max: args.inline.map_or(INLINE_MAX, |n| n as usize) as u16,
        data_checksums: args.data_checksums,
        journal_bytes: args.journal,
        mlogs: args.mlogs,
        placement: match args.placement {
            PlacementArg::Dirs => Placement::Dirs,
            PlacementArg::Spread => Placement::Spread,
            PlacementArg::Inherit => Placement::Inherit,
        },
        discard: !args.nodiscard,
        root_owner: (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw()),
        ..MkfsOptions::default()
    })
}

fn format(
    args: &Args,
    options: &MkfsOptions,
    paths: &[PathBuf],
    made: &mut Vec<PathBuf>,
) -> Result<VolumeReport, Failure> {
    // All are looked at before the first is changed.
    for path in paths {
        look(path, args.size, args.force, "will not format")?;
    }
    open::no_duplicates(paths)?;
    check_total(args, paths)?;
    for path in paths {
        size_image(path, args.size, made)?;
    }
    let devices = open::devices(paths, true)?;
    // A volume that somebody writes from elsewhere is left alone, by --force, too.
    let lease = Lease::of_devices(&devices, false).map_err(|e| Failure::new(e.to_string()))?;
    lease.into_iter().for_each(Lease::into_unfenced);
    for (path, device) in paths.iter().zip(&devices) {
        // Old signatures would make other programs see two file systems, or the old one.
        let wiped = if is_nbd_uri(path) { probe::wipe_device(&**device) } else { probe::wipe(path) };
        wiped.map_err(|e| Failure::at("cannot wipe old signatures from", path.display(), host_error(&e)))?;
    }
    let devices =
        cut(devices, args.size).map_err(|e| Failure::at("cannot format", open::show(paths), host_error(&e)))?;
    let sb = braidfs::mkfs::format(&devices, options).map_err(|e| open::explain("cannot format", paths, &e))?;
    Ok(volume_report(&sb))
}

/// Refuses what must not, or not with `force`, be overwritten; an image file may be made, or extended, to `size`.
///
/// # Errors
/// Why it cannot be used; `refused` and what it holds.
pub fn look(path: &Path, size: Option<u64>, force: bool, refused: &str) -> Result<(), Failure> {
    if is_nbd_uri(path) {
        return look_at_export(path, size, force, refused);
    }
    let fail = |e: std::io::Error| Failure::at("cannot use", path.display(), host_error(&e));
    let meta = match std::fs::metadata(path) {
        Ok(meta) => meta,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound && size.is_some() => return Ok(()),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            return Err(Failure::at("cannot use", path.display(), "does not exist: --size BYTES makes an image file"));
        }
        Err(e) => return Err(fail(e)),
    };
    let kind = meta.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        return Err(Failure::at("cannot use", path.display(), "give an image file or a block device"));
    }
    if let Some(busy) = probe::busy(path) {
        let why = match mounted::at(&[path.to_path_buf()]) {
            Some(mount) => mounted::in_use(&mount).replacen("is", "it is", 1),
            None => format!("it is {}: {} first", busy.what, busy.step),
        };
        return Err(Failure::at("cannot use", path.display(), why));
    }
    if let Some(size) = size {
        if !kind.is_file() && size > device_bytes(path)? {
            let has = text::size(device_bytes(path)?);
            let why = format!("the device has {has}, less than --size: give less, or leave --size out");
            return Err(Failure::at("cannot use", path.display(), why));
        }
        if kind.is_file() && size < meta.len() {
            let has = text::size(meta.len());
            let why = format!("has {has}, more than --size: leave --size out, or remove the file first");
            return Err(Failure::at("cannot use", path.display(), why));
        }
    }
    if force {
        return Ok(());
    }
    let file = File::open(path).map_err(fail)?;
    let found = probe::probe(path).map_err(fail)?;
    if let Some(first) = found.first() {
        let why = format!("it holds {}: use --force to overwrite it", first.what);
        return Err(Failure::at(refused, path.display(), why));
    }
    if kind.is_file()
        && let Some(at) = probe::first_data(&file).map_err(fail)?
    {
        let why = format!("the file holds data (at byte {at}): use --force to overwrite it");
        return Err(Failure::at(refused, path.display(), why));
    }
    Ok(())
}

/// As [`look`], of an export of an NBD server.
fn look_at_export(path: &Path, size: Option<u64>, force: bool, refused: &str) -> Result<(), Failure> {
    let bytes = device_bytes(path)?;
    if let Some(size) = size
        && size > bytes
    {
        let why = format!("the device has {}, less than --size: give less, or leave --size out", text::size(bytes));
        return Err(Failure::at("cannot use", path.display(), why));
    }
    if force {
        return Ok(());
    }
    let found = probe::probe(path).map_err(|e| Failure::at("cannot use", path.display(), host_error(&e)))?;
    match found.first() {
        Some(first) => {
            let why = format!("it holds {}: use --force to overwrite it", first.what);
            Err(Failure::at(refused, path.display(), why))
        }
        None => Ok(()),
    }
}

/// The size that the volume will have.
fn check_total(args: &Args, paths: &[PathBuf]) -> Result<(), Failure> {
    let mut total = 0u64;
    for path in paths {
        let bytes = match (args.size, std::fs::metadata(path)) {
            (Some(size), _) => size,
            (None, Ok(meta)) if meta.is_file() => meta.len(),
            (None, _) => device_bytes(path)?,
        };
        total = total.saturating_add(bytes);
    }
    if VOLUME_BYTES.contains(&total) {
        return Ok(());
    }
    let limit = if total < *VOLUME_BYTES.start() { "at least 32 MiB" } else { "at most 16 TiB" };
    Err(Failure::at(
        "cannot format",
        open::show(paths),
        format!("{} in all: a new volume has {limit}", text::size(total)),
    ))
}

/// A block device tells its size at its end.
fn device_bytes(path: &Path) -> Result<u64, Failure> {
    if is_nbd_uri(path) {
        let devices = look_at_devices(&[path.to_path_buf()]).map_err(|e| Failure::new(e.to_string()))?;
        return Ok(devices.iter().map(|d| d.blocks() * BLOCK_BYTES as u64).sum());
    }
    File::open(path)
        .and_then(|mut f| std::io::Seek::seek(&mut f, std::io::SeekFrom::End(0)))
        .map_err(|e| Failure::at("cannot use", path.display(), host_error(&e)))
}

/// The first `size` bytes of each device that has more. In its last block, where the replica of a superblock lies, an
/// earlier volume on the whole device must not be found.
fn cut(devices: Vec<Arc<dyn Device>>, size: Option<u64>) -> std::io::Result<Vec<Arc<dyn Device>>> {
    let Some(blocks) = size.map(|s| s / BLOCK_BYTES as u64) else { return Ok(devices) };
    let one = |d: Arc<dyn Device>| {
        if d.blocks() > blocks {
            d.write(d.blocks() - 1, &[0; BLOCK_BYTES])?;
        }
        Ok(Arc::new(CutDevice::new(d, blocks)) as Arc<dyn Device>)
    };
    devices.into_iter().map(one).collect()
}

/// Makes or extends an image file, where there is a `size`; one that was made is put in `made`.
///
/// # Errors
/// Of the file system that it lies in; a process uses it.
pub fn size_image(path: &Path, size: Option<u64>, made: &mut Vec<PathBuf>) -> Result<(), Failure> {
    let Some(size) = size.filter(|_| !is_nbd_uri(path)) else { return Ok(()) };
    let as_failure = |e: &dyn std::fmt::Display| Failure::new(e.to_string());
    let fail = |e: std::io::Error| Failure::at("cannot extend", path.display(), host_error(&e));
    let meta = std::fs::metadata(path);
    if meta.as_ref().is_ok_and(|m| !m.is_file()) {
        return Ok(());
    }
    let Ok(meta) = meta else {
        drop(FileDevice::create(path, size).map_err(|e| as_failure(&e))?);
        made.push(path.to_path_buf());
        return Ok(());
    };
    if meta.len() < size {
        if meta.len() >= 4096 {
            // Not under the feet of a process that uses it.
            drop(FileDevice::open(path, OpenHow { write: true, direct: false }).map_err(|e| as_failure(&e))?);
        }
        OpenOptions::new().write(true).open(path).and_then(|f| f.set_len(size)).map_err(fail)?;
    }
    Ok(())
}
