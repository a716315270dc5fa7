//! Devices of a mounted volume: what its server is asked, and what it answers.

use super::{DEVICE_START, DEVICE_STATUS, DEVICE_TEXT, Progress, ask, progress, report};
use braidfs::{DeviceChange, Drained, Elsewhere, Error, NewSize, Rebalanced, Resized};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

/// Bytes of a path, with a zero behind it.
const PATH: usize = 4096;
/// [`DeviceStart::flags`]: discard the device before.
pub(crate) const DEVICE_BLANK: u32 = 1;

#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct DeviceStart {
    /// Number of a [`DeviceCall`].
    pub call: u32,
    pub flags: u32,
    /// Of the device that is meant, where it is one of the volume's.
    pub uuid: [u8; 16],
    /// Of another size ([`super::ResizeTo`], in `flags`).
    pub bytes: u64,
    /// Of the device to be added, absolute.
    pub path: [u8; PATH],
}
const _: () = assert!(size_of::<DeviceStart>() == 0x1020);

/// What is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum DeviceCall {
    Add = 1,
    Remove,
    Drain,
    EndDrain,
    Rebalance,
    /// Of a tenant, whose name stands for a path: what it has on devices that it may not use.
    Move,
    /// The volume uses more of its last device, or less.
    Resize,
}

impl DeviceCall {
    pub fn of(number: u32) -> Option<Self> {
        [Self::Add, Self::Remove, Self::Drain, Self::EndDrain, Self::Rebalance, Self::Move, Self::Resize]
            .into_iter()
            .find(|c| *c as u32 == number)
    }
}

/// What has become of it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceAnswer {
    /// Why it was refused, or failed.
    pub error: Option<String>,
    /// The number of that error; 0: none.
    pub errno: i32,
    /// Number of the device.
    pub device: u16,
    /// Bytes of the device that the volume uses, or used.
    pub bytes: u64,
    /// Its block groups; of a drain those that are in use.
    pub groups: u32,
    /// Bytes of all devices that the volume has now.
    pub volume: u64,
    /// Of a drain.
    pub drain: Option<DrainAnswer>,
    /// Of a rebalance: block groups that data was moved out of.
    pub moved: u64,
    /// Of a rebalance: bytes that are in use of each device, and bytes that can be.
    pub devices: Vec<(u64, u64)>,
    /// Of a tenant that has moved: what it has still on devices that it may not use.
    pub elsewhere: Option<ElsewhereAnswer>,
    /// Of another size: bytes of the last device that were used before. Those that are used now are in `bytes`.
    pub before: Option<u64>,
}

/// What of a tenant did not move.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ElsewhereAnswer {
    /// Block groups.
    pub groups: u32,
    /// Bytes in them.
    pub bytes: u64,
    /// One of them has the tenant's journal.
    pub journal: bool,
    /// There is no room for it where the tenant may be.
    pub crowded: bool,
}

/// What keeps a device that is drained.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DrainAnswer {
    /// Block groups with the journal of a domain.
    pub journals: u32,
    /// Bytes that did not move.
    pub bytes: u64,
    /// Inodes that have their numbers there.
    pub inodes: u64,
    /// Directories that have names of these.
    pub directories: u64,
    /// Some of them, from the root of the volume on, with how many.
    pub told: Vec<(String, u64)>,
}

impl DeviceAnswer {
    /// A device has come, or gone.
    pub fn changed(c: &DeviceChange) -> Self {
        Self { device: c.device, bytes: c.bytes, groups: c.groups, volume: c.volume, ..Self::default() }
    }

    /// One is drained.
    pub fn drained(d: &Drained) -> Self {
        let told = d.told.iter().map(|t| (String::from_utf8_lossy(&t.path).into_owned(), t.inodes)).collect();
        let (journals, inodes, directories) = (d.journals, d.inodes, d.directories);
        let drain = DrainAnswer { journals, bytes: d.blocks << 12, inodes, directories, told };
        Self { device: d.device, groups: d.groups, drain: Some(drain), ..Self::default() }
    }

    /// Data has moved.
    pub fn rebalanced(r: &Rebalanced) -> Self {
        let devices = r.devices.iter().map(|(used, of)| (used << 12, of << 12)).collect();
        Self { moved: r.moved, devices, ..Self::default() }
    }

    /// A tenant has moved.
    pub fn moved(e: &Elsewhere) -> Self {
        let Elsewhere { groups, bytes, journal, crowded, .. } = *e;
        Self { elsewhere: Some(ElsewhereAnswer { groups, bytes, journal, crowded }), ..Self::default() }
    }

    /// The volume has another size.
    pub fn resized(r: &Resized) -> Self {
        Self { bytes: r.after, before: Some(r.before), volume: r.volume, groups: r.groups, ..Self::default() }
    }

    /// That, if it is that.
    pub fn as_resized(&self) -> Option<Resized> {
        let (after, volume, groups) = (self.bytes, self.volume, self.groups);
        self.before.map(|before| Resized { before, after, volume, groups })
    }

    pub(crate) fn refused(e: &Error) -> Self {
        Self { error: Some(e.to_string()), errno: e.errno(), ..Self::default() }
    }
}

/// A change of the devices of a mounted volume, by its server. It stops when this is dropped, but for one that is being added.
#[derive(Debug)]
pub struct DeviceWork {
    root: File,
}

impl DeviceWork {
    fn start(mountpoint: &Path, arg: DeviceStart) -> io::Result<Self> {
        let work = Self { root: File::open(mountpoint)? };
        let mut arg = arg;
        ask(&work.root, DEVICE_START, &mut arg)?;
        Ok(work)
    }

    /// Adds the device at `path` (absolute), which is discarded before where `blank`.
    ///
    /// # Errors
    /// EBUSY: another change is running. EPERM: only root may, and the user of the server. ENOTTY: the server is too old.
    /// EINVAL: no such path can be.
    pub fn add(mountpoint: &Path, path: &Path, blank: bool) -> io::Result<Self> {
        let mut arg = DeviceStart { call: DeviceCall::Add as u32, ..DeviceStart::new_zeroed() };
        arg.flags = if blank { DEVICE_BLANK } else { 0 };
        super::put(&mut arg.path, path.as_os_str().as_bytes())?;
        Self::start(mountpoint, arg)
    }

    /// Removes the volume's device with this UUID.
    ///
    /// # Errors
    /// As [`Self::add`].
    pub fn remove(mountpoint: &Path, uuid: [u8; 16]) -> io::Result<Self> {
        Self::start(mountpoint, DeviceStart { call: DeviceCall::Remove as u32, uuid, ..DeviceStart::new_zeroed() })
    }

    /// Drains it, or ends that.
    ///
    /// # Errors
    /// As [`Self::add`].
    pub fn drain(mountpoint: &Path, uuid: [u8; 16], end: bool) -> io::Result<Self> {
        let call = if end { DeviceCall::EndDrain } else { DeviceCall::Drain } as u32;
        Self::start(mountpoint, DeviceStart { call, uuid, ..DeviceStart::new_zeroed() })
    }

    /// Moves data so that devices are used evenly.
    ///
    /// # Errors
    /// As [`Self::add`].
    pub fn rebalance(mountpoint: &Path) -> io::Result<Self> {
        Self::start(mountpoint, DeviceStart { call: DeviceCall::Rebalance as u32, ..DeviceStart::new_zeroed() })
    }

    /// Moves what a tenant has on devices that it may not use.
    ///
    /// # Errors
    /// As [`Self::add`].
    pub fn move_tenant(mountpoint: &Path, name: &str) -> io::Result<Self> {
        let mut arg = DeviceStart { call: DeviceCall::Move as u32, ..DeviceStart::new_zeroed() };
        super::put(&mut arg.path, name.as_bytes())?;
        Self::start(mountpoint, arg)
    }

    /// Changes the volume's size, as [`super::resize`], with a word on how far it is; a smaller size can be stopped.
    ///
    /// # Errors
    /// As [`Self::add`]; EINVAL: the server is too old.
    pub fn resize(mountpoint: &Path, size: NewSize) -> io::Result<Self> {
        let (flags, bytes) = super::size_of_call(size);
        let call = DeviceCall::Resize as u32;
        Self::start(mountpoint, DeviceStart { call, flags, bytes, ..DeviceStart::new_zeroed() })
    }

    /// How far it is.
    ///
    /// # Errors
    /// Of the connection: the volume was unmounted, its server died.
    pub fn progress(&self) -> io::Result<Progress> {
        progress(&self.root, DEVICE_STATUS)
    }

    /// What has become of it.
    ///
    /// # Errors
    /// As [`Self::progress`]; ENODATA where it has not ended.
    pub fn answer(&self) -> io::Result<DeviceAnswer> {
        let text = report(&self.root, DEVICE_TEXT, self.progress()?.text_bytes)?;
        serde_json::from_slice(&text).map_err(io::Error::other)
    }
}
