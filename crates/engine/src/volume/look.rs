//! A look at a volume that somebody else has mounted, and goes on changing.
//!
//! Between two checkpoints the tables on the device stay as they are: what they tell together is the volume as of the last
//! checkpoint. Every checkpoint writes the domain's header, every claim of a group the group table: where these are the
//! same before and after, nothing has moved meanwhile.

use super::Volume;
use crate::error::{Error, Result};
use crate::store::super_io::read_super;
use crate::types::MountOptions;
use braidfs_device::{BLOCK_BYTES, Device};
use braidfs_format::bat::ENTRIES_PER_BLOCK;
use std::sync::Arc;
use std::time::Duration;

/// How often it is tried.
const TRIES: u32 = 40;
/// Longest pause between two tries.
const PAUSE_MAX: Duration = Duration::from_millis(100);

impl Volume {
    /// The volume on `devices` as of the last checkpoint, read-only; no journal is replayed, nothing is written. For its
    /// superblock, space and domains: files of a volume in use may change while they are read.
    ///
    /// # Errors
    /// As [`Volume::mount`]. [`Error::Busy`]: it changed each time while it was looked at, and was a volume the last time.
    pub fn look_at(devices: &[Arc<dyn Device>]) -> Result<Volume> {
        let options =
            MountOptions { read_only: true, background: false, checkpoint_only: true, ..MountOptions::default() };
        let mut pause = Duration::from_millis(1);
        let (mut last, mut error) = (None, None);
        for _ in 0..TRIES {
            let before = stamp(devices);
            let looked = Volume::mount(devices.to_vec(), options.clone());
            let still = before == stamp(devices);
            error = match looked {
                Ok(volume) if still && before.is_ok() => return Ok(volume),
                Ok(_) => None,
                // the same twice: it is not because it changes
                Err(e) if still && last.as_ref() == Some(&before) => return Err(e),
                Err(e) => Some(e),
            };
            last = Some(before);
            std::thread::sleep(pause);
            pause = (pause * 2).min(PAUSE_MAX);
        }
        Err(error.unwrap_or_else(|| Error::Busy("the volume changes too fast to be looked at: try again".into())))
    }
}

/// Group table and domain headers, as they lie on the first device; or why there are none, in words.
fn stamp(devices: &[Arc<dyn Device>]) -> std::result::Result<Vec<u8>, String> {
    tables(devices).map_err(|e| e.to_string())
}

fn tables(devices: &[Arc<dyn Device>]) -> Result<Vec<u8>> {
    let (sb, order) = read_super(devices)?;
    let mut all = Vec::new();
    let tables = u64::from(sb.groups.get()).div_ceil(u64::from(ENTRIES_PER_BLOCK));
    for (start, pairs) in [(sb.bat.get(), tables), (sb.domain_table.get(), u64::from(sb.max_domains.get()))] {
        let mut buf = vec![0; 2 * pairs as usize * BLOCK_BYTES];
        order[0].read(start, &mut buf).map_err(Error::Io)?;
        all.append(&mut buf);
    }
    Ok(all)
}
