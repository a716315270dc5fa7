//! `braidfs image`: all metadata of a volume in one file, without its data, to be sent with a bug report; and volumes
//! made of such a file.
//!
//! The file: a gzip stream of [`MAGIC`], the number of devices (4 bytes), the blocks of each (8 bytes); then runs of blocks:
//! device (4 bytes), first block (8), count (4), the blocks; at the end a device of `0xffff_ffff`. Little-endian. gzip's
//! checksum covers all of it. Nothing in a file that is read is trusted.

use crate::cmd::fsck::{Bar, line};
use crate::failure::{Failure, Outcome, host_error};
use crate::{open, text};
use braidfs::JournalReplay;
use braidfs_check::image;
use braidfs_device::BLOCK_BYTES;
use braidfs_format::super_block::{DEVICE_BLOCKS_MAX, MAX_DEVICES};
use flate2::read::GzDecoder;
use flate2::{Compression, write::GzEncoder};
use rustix::fs::{CWD, RenameFlags};
use rustix::io::Errno;
use std::fs::File;
use std::io::{self, BufReader, BufWriter, IsTerminal, Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Opens the stream; the last character is its version.
const MAGIC: &[u8; 8] = b"BRFSIMG1";
const END: u32 = u32::MAX;
/// So many files that other runs have left are passed over.
const PARTIALS_MAX: u32 = 10_000;
/// Longest run of blocks that is written.
const RUN_BLOCKS: u32 = 256;

/// Write a volume's metadata into one file, without data, for a bug report; make volumes of such files
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    braidfs image export disk.img report.brfs         all metadata, no data, compressed\n  \
    braidfs image import report.brfs copy.img         a sparse image of it\n  \
    braidfs fsck -fn copy.img                         finds there what it finds on the volume\n\n\
    File data, also of small files, and the values of extended attributes become zeros. Names of files and of extended \
    attributes, targets of symbolic links, sizes, owners and times stay: whoever gets the file sees them. Other users \
    cannot read what either command makes (mode 0600). What it makes has its name when it is whole, and is called \
    braidfs-image-*.part until then: remove what a run has left that was stopped. On a file system without hard links an \
    empty file may have the name for a moment before. The volume is not mounted meanwhile, \
    and not changed: a journal that was not replayed is replayed in memory, and the file has the result.")]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    /// Write the metadata of a volume into a file
    Export {
        /// All devices of the volume, then the file, which must not exist
        #[arg(required = true, num_args = 2.., value_names = ["DEVICE", "FILE"])]
        paths: Vec<PathBuf>,
    },
    /// Make sparse image files of such a file
    Import {
        /// The file that `image export` wrote
        file: PathBuf,
        /// An image file for each device of the volume; they must not exist
        #[arg(required = true, value_name = "IMAGE")]
        images: Vec<PathBuf>,
    },
}

pub fn run(args: &Args) -> Outcome {
    match &args.what {
        What::Export { paths } => match paths.split_last() {
            Some((file, devices)) => export(devices, file),
            None => Err(Failure::new("image: name the devices and a file")),
        },
        What::Import { file, images } => import(file, images),
    }
}

/// A file that has its name when it is whole and durable: a run that a signal ends leaves nothing that looks so.
struct Partial {
    file: File,
    path: PathBuf,
    /// What it is called until then.
    partial: PathBuf,
}

impl Partial {
    /// A new file that other users cannot read: whoever lists the volume's names needs its device. `number`: of those that this
    /// process makes.
    fn create(path: &Path, number: usize) -> Result<Self, Failure> {
        if path.symlink_metadata().is_ok() {
            return Err(is_there(path));
        }
        let mut others = 0;
        loop {
            // in a container each run may have the same process number: what another one has left, or makes now, is not touched
            let other = if others > 0 { format!("-{others}") } else { String::new() };
            let name = format!("braidfs-image-{}-{number}{other}.part", std::process::id());
            let partial = path.with_file_name(name);
            match File::options().write(true).create_new(true).mode(0o600).open(&partial) {
                Ok(file) => return Ok(Self { file, path: path.to_owned(), partial }),
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists && others < PARTIALS_MAX => others += 1,
                Err(e) => return Err(Failure::at("cannot make", partial.display(), host_error(&e))),
            }
        }
    }

    /// Makes it durable and gives it its name, which nothing else must have.
    fn finish(&self) -> Result<(), Failure> {
        let fail = |e: io::Error| Failure::at("cannot write", self.path.display(), host_error(&e));
        self.file.sync_all().map_err(fail)?;
        match rustix::fs::renameat_with(CWD, &self.partial, CWD, &self.path, RenameFlags::NOREPLACE) {
            // a file system that cannot; the other name goes with `self`
            Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => match rustix::fs::link(&self.partial, &self.path) {
                // nor has it links
                Err(Errno::PERM | Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => self.take_place(),
                done => done.map_err(io::Error::from),
            },
            done => done.map_err(io::Error::from),
        }
        .map_err(|e| if e.kind() == io::ErrorKind::AlreadyExists { is_there(&self.path) } else { fail(e) })
    }
}

impl Partial {
    /// Gives it its name as any file system can: where a new file of that name was made, which nothing else had. A crash between
    /// leaves an empty one.
    fn take_place(&self) -> io::Result<()> {
        drop(File::options().write(true).create_new(true).mode(0o600).open(&self.path)?);
        std::fs::rename(&self.partial, &self.path).inspect_err(|_| {
            // The first error is the one to tell.
            let _ = std::fs::remove_file(&self.path);
        })
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        // mostly it has its name
        let _ = std::fs::remove_file(&self.partial);
    }
}

fn is_there(path: &Path) -> Failure {
    Failure::at("cannot make", path.display(), "it exists: remove it first, or name another file")
}

fn export(devices: &[PathBuf], file: &Path) -> Outcome {
    let paths = open::expand(devices);
    let explain = |e| open::explain_check("cannot export", &paths, e);
    let opened = open::devices(&paths, false)?;
    open::nobody_writes(&opened)?;
    let volume = image::open(&opened, &JournalReplay).map_err(explain)?;
    let created = Partial::create(file, 0)?;
    let done = (|| {
        let mut out = Writer::new(BufWriter::new(&created.file), &volume.device_blocks())?;
        let bar = Bar::new(io::stderr().is_terminal());
        volume.metadata(&mut |device, at, block| out.put(device, at, block), &|done, total| {
            bar.show("metadata", done, total)
        })?;
        bar.finish();
        Ok(out.finish()?)
    })();
    let (blocks, bytes) = done.map_err(explain)?;
    created.finish()?;
    let place = open::show(&paths);
    for f in &volume.findings {
        crate::say(format_args!("{}", line(&place, f).trim_end()))?;
    }
    for note in &volume.notes {
        crate::say(format_args!("{place}: note: {note}"))?;
    }
    let size = text::size(bytes);
    crate::say(format_args!("{}: {} of metadata in {size}, no data", file.display(), text::size(blocks << 12)))?;
    Ok(0)
}

fn import(file: &Path, images: &[PathBuf]) -> Outcome {
    let fail = |e: &io::Error| Failure::at("cannot import", file.display(), host_error(e));
    let opened = File::open(file).map_err(|e| fail(&e))?;
    let mut from = Reader::new(opened).map_err(|e| fail(&e))?;
    if from.devices.len() != images.len() {
        let why =
            format!("it has {} devices, {} images were named: name one for each", from.devices.len(), images.len());
        return Err(Failure::at("cannot import", file.display(), why));
    }
    let mut made = Vec::new();
    for (path, blocks) in images.iter().zip(&from.devices) {
        let image = Partial::create(path, made.len())?;
        let sized = image.file.set_len(blocks * BLOCK_BYTES as u64);
        sized.map_err(|e| Failure::at("cannot make", path.display(), host_error(&e)))?;
        made.push(image);
    }
    while let Some((device, at, run)) = from.next().map_err(|e| fail(&e))? {
        let Partial { file, path, .. } = &made[device];
        file.write_all_at(&run, at).map_err(|e| Failure::at("cannot write", path.display(), host_error(&e)))?;
    }
    for (n, image) in made.iter().enumerate() {
        if let Err(e) = image.finish() {
            for whole in &made[..n] {
                // The first error is the one to tell.
                let _ = std::fs::remove_file(&whole.path);
            }
            return Err(e);
        }
    }
    Ok(0)
}

/// Writes the stream; neighbouring blocks become one run.
struct Writer<'f> {
    out: GzEncoder<BufWriter<&'f File>>,
    device: u32,
    first: u64,
    run: Vec<u8>,
    blocks: u64,
}

impl<'f> Writer<'f> {
    fn new(out: BufWriter<&'f File>, devices: &[u64]) -> io::Result<Self> {
        let mut out = GzEncoder::new(out, Compression::default());
        out.write_all(MAGIC)?;
        out.write_all(&(devices.len() as u32).to_le_bytes())?;
        devices.iter().try_for_each(|blocks| out.write_all(&blocks.to_le_bytes()))?;
        Ok(Self { out, device: 0, first: 0, run: Vec::new(), blocks: 0 })
    }

    fn put(&mut self, device: usize, at: u64, block: &[u8]) -> io::Result<()> {
        let held = (self.run.len() / BLOCK_BYTES) as u64;
        if device as u32 != self.device || at != self.first + held || held >= u64::from(RUN_BLOCKS) {
            self.flush()?;
            (self.device, self.first) = (device as u32, at);
        }
        self.run.extend_from_slice(block);
        self.blocks += 1;
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        if !self.run.is_empty() {
            self.out.write_all(&self.device.to_le_bytes())?;
            self.out.write_all(&self.first.to_le_bytes())?;
            self.out.write_all(&((self.run.len() / BLOCK_BYTES) as u32).to_le_bytes())?;
            self.out.write_all(&self.run)?;
            self.run.clear();
        }
        Ok(())
    }

    /// Ends it: blocks written, and bytes of the file.
    fn finish(mut self) -> io::Result<(u64, u64)> {
        self.flush()?;
        self.out.write_all(&END.to_le_bytes())?;
        let file = self.out.finish()?.into_inner().map_err(io::IntoInnerError::into_error)?;
        Ok((self.blocks, file.metadata()?.len()))
    }
}

/// Reads the stream.
struct Reader {
    from: BufReader<GzDecoder<File>>,
    /// Blocks of each device.
    devices: Vec<u64>,
}

impl Reader {
    fn new(file: File) -> io::Result<Self> {
        let mut from = BufReader::new(GzDecoder::new(file));
        let mut magic = [0; 8];
        match from.read_exact(&mut magic) {
            Ok(()) if magic == *MAGIC => {}
            _ => return Err(io::Error::other("no metadata of a braidfs volume, or that of another version")),
        }
        let n = u32_of(&mut from)? as usize;
        if n == 0 || n > MAX_DEVICES {
            return Err(io::Error::other(format!("{n} devices")));
        }
        let devices = (0..n).map(|_| u64_of(&mut from)).collect::<io::Result<Vec<_>>>()?;
        if let Some(blocks) = devices.iter().find(|blocks| **blocks > DEVICE_BLOCKS_MAX) {
            return Err(io::Error::other(format!("a device of {blocks} blocks")));
        }
        Ok(Self { from, devices })
    }

    /// Device, byte there, and bytes; `None` at the end.
    fn next(&mut self) -> io::Result<Option<(usize, u64, Vec<u8>)>> {
        let device = u32_of(&mut self.from)?;
        if device == END {
            // gzip checks its sum where the stream ends
            return match self.from.read(&mut [0])? {
                0 => Ok(None),
                _ => Err(io::Error::other("it goes on behind its end")),
            };
        }
        let (first, count) = (u64_of(&mut self.from)?, u32_of(&mut self.from)?);
        let fits = |blocks: &u64| {
            (1..=RUN_BLOCKS).contains(&count) && first.checked_add(count.into()).is_some_and(|end| end <= *blocks)
        };
        if !self.devices.get(device as usize).is_some_and(fits) {
            return Err(io::Error::other(format!("blocks {first} + {count} of device {device}")));
        }
        let mut run = vec![0; count as usize * BLOCK_BYTES];
        self.from.read_exact(&mut run)?;
        Ok(Some((device as usize, first * BLOCK_BYTES as u64, run)))
    }
}

fn u32_of(from: &mut impl Read) -> io::Result<u32> {
    let mut bytes = [0; 4];
    from.read_exact(&mut bytes).map(|()| u32::from_le_bytes(bytes))
}

fn u64_of(from: &mut impl Read) -> io::Result<u64> {
    let mut bytes = [0; 8];
    from.read_exact(&mut bytes).map(|()| u64::from_le_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of a process with the same number: in another container, or one that was killed there.
    #[test]
    fn what_another_run_left_stays_and_is_in_nobodys_way() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out");
        let make = || Partial::create(&path, 0).unwrap_or_else(|e| panic!("{e}"));
        let left = std::mem::ManuallyDrop::new(make());
        std::fs::write(&left.partial, "left").unwrap();
        for content in ["one", "two"] {
            let mut partial = make();
            partial.file.write_all(content.as_bytes()).unwrap();
            partial.finish().unwrap_or_else(|e| panic!("{e}"));
            drop(partial);
            assert_eq!(std::fs::read(&path).unwrap(), content.as_bytes());
            std::fs::remove_file(&path).unwrap();
        }
        assert_eq!(std::fs::read(&left.partial).unwrap(), b"left");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    /// What a volume can have, whatever files the host can have; and no more.
    #[test]
    fn devices_of_any_size_of_the_format_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("report.brfs");
        for (blocks, holds) in [(1 << 33, true), (DEVICE_BLOCKS_MAX, true), (DEVICE_BLOCKS_MAX + 1, false)] {
            let file = File::create(&path).unwrap();
            let mut out = Writer::new(BufWriter::new(&file), &[7, blocks]).unwrap();
            out.put(1, blocks - 1, &[0x5a; BLOCK_BYTES]).unwrap();
            out.finish().unwrap();
            let read = Reader::new(File::open(&path).unwrap());
            assert_eq!(read.is_ok(), holds, "{blocks}");
            let Ok(mut read) = read else { continue };
            assert_eq!(read.devices, [7, blocks]);
            let run = read.next().unwrap();
            assert_eq!(run, Some((1, (blocks - 1) * BLOCK_BYTES as u64, vec![0x5a; BLOCK_BYTES])));
            assert_eq!(read.next().unwrap(), None);
        }
    }
}
