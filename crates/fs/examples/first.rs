//! Makes a volume in an image file, opens it, writes a file safely, reads it again, lists, and closes.
//!
//!     cargo run -p braidfs-fs --example first -- /tmp/vol.img

use braidfs_fs::{Error, Fs, MkfsOptions, Options};
use std::error::Error as StdError;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;

/// What is printed, one string a line.
pub fn run(image: &Path) -> Result<Vec<String>, Box<dyn StdError>> {
    let mut said = Vec::new();
    // an image file of 64 MiB; one that is there is not overwritten
    let mkfs = MkfsOptions { label: "first".into(), ..MkfsOptions::default() };
    match Fs::format(image, 64 << 20, &mkfs) {
        Ok(()) => said.push("a new volume".into()),
        Err(Error::Device(e)) if image.exists() => said.push(format!("the volume that is there ({e})")),
        Err(e) => return Err(e.into()),
    }
    let fs = Fs::open(&[image], &Options::parse("noatime,cache=64M")?)?;

    // the new content takes the old one's place in one step, also across a crash: write, sync, rename
    fs.create_dir_all("mail/2026")?;
    let mut file = fs.create("mail/2026/.1.new")?;
    writeln!(file, "hello")?;
    writeln!(file, "world")?;
    file.sync_all()?;
    fs.rename("mail/2026/.1.new", "mail/2026/1")?;

    // the handle is still the file's
    file.seek(SeekFrom::Start(6))?;
    let mut rest = String::new();
    file.read_to_string(&mut rest)?;
    said.push(format!("from byte 6 on: {rest:?}"));
    drop(file);

    for entry in fs.read_dir("mail/2026")? {
        let entry = entry?;
        let bytes = fs.metadata(entry.path())?.len();
        said.push(format!("{}: {:?}, {bytes} bytes", entry.path().display(), entry.kind()));
    }

    // tells of errors, which a drop cannot
    fs.close()?;
    Ok(said)
}

#[allow(dead_code)] // a test calls `run`
fn main() -> Result<(), Box<dyn StdError>> {
    let image = std::env::args_os().nth(1).ok_or("usage: first IMAGE")?;
    for line in run(image.as_ref())? {
        println!("{line}");
    }
    Ok(())
}
