//! What administrators ask of a mount beyond files: ioctls on its root directory. Low-level module.
//!
//! Owns the numbers and structures, for the server (`ops/scrub.rs`, `ops/remount.rs`, `ops/stats.rs`, `ops/watch.rs`,
//! `ops/resize.rs`, `ops/tenant.rs`, `ops/quota.rs`, `ops/device.rs`,
//! `ops/defrag.rs`) and for
//! the client, which is here, but for that of devices ([`devices`]). A scrub belongs to the open directory that started it: when that is closed, also because the
//! program died, the scrub stops. Where the kernel does not tell of closes, it belongs to the thread that started it, and
//! stops within seconds of its end.

pub mod devices;
mod label;
mod quota;
mod tenant;

pub use crate::tenant_mount::TenantMount;
pub(crate) use devices::{DEVICE_BLANK, DeviceAnswer, DeviceCall, DeviceStart};
pub(crate) use label::{FS_IOC_GETFSLABEL, FS_IOC_SETFSLABEL, LABEL_BYTES};
pub use label::{label, set_label};
pub(crate) use quota::{
    DIRECTORY as QUOTA_DIRECTORY, GROUP as QUOTA_GROUP, QUOTA, QUOTA_TEXT, QuotaArg, QuotaCall, USER as QUOTA_USER,
};
pub use quota::{QuotaChange, QuotaSubject, quota_remove, quota_set, quota_show, quotas};
pub use tenant::{
    ElsewhereInfo, NewLimit, TenantChange, TenantInfo, tenant_create, tenant_mount, tenant_remove, tenant_set,
    tenant_show, tenants,
};
pub(crate) use tenant::{
    KNOWS_INODES, LEAVE_SPACE, SET_DEVICES, SET_INODES, SET_JOURNAL, SET_MEMORY, SET_RATES, SET_SERVING, SET_SOFT,
    TENANT, TenantArg, TenantCall,
};

use crate::abi::op;
use crate::counters::CODES;
use crate::watch::sample::{LAYOUT, Sample};
use braidfs::{AtimeMode, DataMode, Defragmented, NewSize, Pieces, Remount, Resized};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

/// `_IOW(0xbf, 1, ScrubStart)`: begins a scrub. EBUSY while another one runs, EPERM but for root and the mount's owner.
pub(crate) const SCRUB_START: u32 = 0x4010_bf01;
/// `_IOR(0xbf, 2, ScrubStatus)`: how far the scrub of this open directory is.
pub(crate) const SCRUB_STATUS: u32 = 0x8040_bf02;
/// `_IOWR(0xbf, 3, ScrubText)`: a part of its report, JSON, once it is done.
pub(crate) const SCRUB_TEXT: u32 = 0xd000_bf03;

/// `_IOW(0xbf, 4, RemountArg)`: changes options of the mount; on any directory. EPERM but for root.
pub(crate) const REMOUNT: u32 = 0x4020_bf04;

/// `_IOR(0xbf, 5, StatsOut)`: what was asked since the mount; on any directory, by anybody who may open it.
pub(crate) const STATS: u32 = 0x8818_bf05;

/// `_IOWR(0xbf, 6, ResizeArg)`: another size for the volume; on any directory. EPERM but for root and the server's user. What
/// the volume says to it stands in the answer, also where it refuses.
pub(crate) const RESIZE: u32 = 0xc200_bf06;

/// `_IOWR(0xbf, 7, SamplePart)`: a part of a sample ([`crate::watch::sample`]); on any directory, by anybody who may open it.
pub(crate) const SAMPLE: u32 = 0xe000_bf07;

/// `_IOW(0xbf, 9, DeviceStart)`: begins a change of the volume's devices, on its root directory, which it belongs to as a scrub
/// does. EBUSY while another one runs, EPERM but for root and the server's user.
pub(crate) const DEVICE_START: u32 = 0x5020_bf09;
/// `_IOR(0xbf, 10, ScrubStatus)`: how far it is.
pub(crate) const DEVICE_STATUS: u32 = 0x8040_bf0a;
/// `_IOWR(0xbf, 11, ScrubText)`: a part of a [`DeviceAnswer`], JSON, once it is done.
pub(crate) const DEVICE_TEXT: u32 = 0xd000_bf0b;
/// `_IOWR(0xbf, 12, UpgradeArg)`: another program takes the mount over ([`crate::upgrade`]); on any directory. EPERM but for root
/// and the server's user. Why not stands in the answer, which otherwise comes from the new program.
pub(crate) const UPGRADE: u32 = 0xd020_bf0c;
/// `_IOWR(0xbf, 13, DefragArg)`: in how many pieces a file lies, or a part of one is made whole; on any directory. EPERM but for
/// root and the server's user.
pub(crate) const DEFRAG: u32 = 0xc050_bf0d;

/// [`ScrubStart::flags`]: leave file data alone.
pub(crate) const NO_DATA: u32 = 1;
/// Bytes of a report per call.
pub(crate) const TEXT_BYTES: usize = 4080;

#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct ScrubStart {
    /// 0: as fast as it goes.
    pub bytes_per_second: u64,
    pub flags: u32,
    pub reserved: u32,
}
const _: () = assert!(size_of::<ScrubStart>() == 16);

#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct ScrubStatus {
    /// 1: it is done.
    pub ended: u32,
    pub reserved: u32,
    pub done: u64,
    pub total: u64,
    /// Bytes of the report.
    pub text_bytes: u64,
    /// UTF-8, zeros behind it.
    pub phase: [u8; 32],
}
const _: () = assert!(size_of::<ScrubStatus>() == 64);

#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct ScrubText {
    pub offset: u64,
    pub bytes: u32,
    pub reserved: u32,
    pub text: [u8; TEXT_BYTES],
}
const _: () = assert!(size_of::<ScrubText>() == 4096);

/// In each field 0 means: it stays.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct RemountArg {
    /// [`NO`] or [`YES`].
    pub read_only: u32,
    /// 1 + place in [`DATA_MODES`].
    pub data: u32,
    /// 1 + place in [`ATIME_MODES`].
    pub atime: u32,
    /// [`NO`] or [`YES`], as the next ones.
    pub nodiratime: u32,
    pub lazytime: u32,
    pub sync: u32,
    pub commit_ms: u32,
    pub reserved: u32,
}
const _: () = assert!(size_of::<RemountArg>() == 32);

/// Bytes of the reason why a volume does not change its size.
pub(crate) const RESIZE_TEXT: usize = 464;

#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct ResizeArg {
    /// A number of [`ResizeTo`].
    pub to: u32,
    /// Of the answer: 0, or why not.
    pub errno: u32,
    pub bytes: u64,
    /// Of the answer, as [`Resized`] has them.
    pub before: u64,
    pub after: u64,
    pub volume: u64,
    pub groups: u32,
    pub reserved: u32,
    /// UTF-8, zeros behind it.
    pub text: [u8; RESIZE_TEXT],
}
const _: () = assert!(size_of::<ResizeArg>() == 512);

/// What the size of a [`ResizeArg`] means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum ResizeTo {
    Device = 1,
    Bytes,
    More,
}

/// Bytes of a path, or of the reason why not.
pub(crate) const UPGRADE_TEXT: usize = 4112;

#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct UpgradeArg {
    /// Of the answer: 0, or why not.
    pub errno: u32,
    /// So long the new program may take to mount.
    pub seconds: u32,
    /// Of the answer: the number of the process that serves.
    pub pid: u32,
    pub reserved: u32,
    /// Path of the program; of the answer its version, or why not. Zeros behind it.
    pub text: [u8; UPGRADE_TEXT],
}
const _: () = assert!(size_of::<UpgradeArg>() == 0x1020);

impl UpgradeArg {
    pub fn text(&self) -> &[u8] {
        self.text.split(|b| *b == 0).next().unwrap_or_default()
    }

    /// As much of it as there is room for.
    pub fn set_text(&mut self, text: &[u8]) {
        let n = text.len().min(UPGRADE_TEXT - 1);
        self.text.fill(0);
        self.text[..n].copy_from_slice(&text[..n]);
    }
}

/// Who serves a mount that was handed over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Upgraded {
    /// The number of its process, in its own pid namespace.
    pub pid: u32,
    /// The version of the program.
    pub version: String,
}

/// Has `program`, an absolute path where the server runs, take over the volume mounted on `mountpoint` from its server. It is
/// given `seconds` to mount; meanwhile requests wait.
///
/// # Errors
/// EPERM: only root may, and the user of the server. ENOTTY: the server is too old. Where it goes on with the old program,
/// why, as the error's text. ENOTCONN, ECONNABORTED: neither goes on.
pub fn upgrade(mountpoint: &File, program: &Path, seconds: u32) -> io::Result<Upgraded> {
    let mut arg = UpgradeArg { seconds, ..UpgradeArg::new_zeroed() };
    put(&mut arg.text, program.as_os_str().as_bytes())?;
    ask(mountpoint, UPGRADE, &mut arg)?;
    let text = String::from_utf8_lossy(arg.text()).into_owned();
    if arg.errno == 0 { Ok(Upgraded { pid: arg.pid, version: text }) } else { Err(io::Error::other(text)) }
}

#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct DefragArg {
    /// Number of a [`DefragCall`].
    pub call: u32,
    /// Of the answer to [`DefragCall::Look`]: 1, its blocks stay.
    pub stays: u32,
    pub ino: u64,
    /// Byte of the file at which a step begins.
    pub from: u64,
    /// Of the answer, as [`braidfs::Defragmented`] has them; `u64::MAX`: the end of the file.
    pub next: u64,
    pub moved: u64,
    /// Of the answer, as [`braidfs::Pieces`] has them.
    pub blocks: u64,
    pub pieces: u64,
    pub least: u64,
    pub reserved: [u64; 2],
}
const _: () = assert!(size_of::<DefragArg>() == 80);

/// What [`DefragArg::call`] asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum DefragCall {
    Look = 1,
    Step,
}

/// By operation code, see [`crate::counters`].
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct StatsOut {
    /// Threads that count.
    pub threads: u32,
    /// One request of so many is timed.
    pub sampled: u32,
    /// Of INIT, as negotiated.
    pub init_flags: u64,
    /// Bits that say how the mount was made, such as [`PRIVATE`].
    pub how: u64,
    pub ops: [StatsOp; CODES],
}
const _: () = assert!(size_of::<StatsOut>() == 0x818);

#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct StatsOp {
    pub requests: u64,
    pub deferred: u64,
    pub timed: u64,
    pub nanos: u64,
}

/// [`StatsOut::how`]: the daemon's user alone may enter, nothing is checked.
pub(crate) const PRIVATE: u64 = 1;

/// Bytes of a sample that are taken: each domain has some 300.
const SAMPLE_MAX: usize = 16 << 20;
/// Bytes of a sample per call.
pub(crate) const SAMPLE_BYTES: usize = 8192 - 40;

/// The first call, with `token` 0, has the server take a sample, which it keeps for the calls that fetch the rest.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct SamplePart {
    /// [`LAYOUT`] of who asks, of the answer that of the server.
    pub layout: u32,
    /// So long who asks goes on to watch; 0: does not.
    pub watch_seconds: u32,
    /// Number of the sample, so that all its parts are of one moment.
    pub token: u64,
    pub offset: u64,
    /// Of the answer: bytes of all of it, and of this part.
    pub total: u64,
    pub bytes: u32,
    pub reserved: u32,
    /// A part of the sample as JSON, padded with zeros.
    pub text: [u8; SAMPLE_BYTES],
}
const _: () = assert!(size_of::<SamplePart>() == 8192);

pub(crate) const NO: u32 = 1;
pub(crate) const YES: u32 = 2;
pub(crate) const DATA_MODES: [DataMode; 3] = [DataMode::Ordered, DataMode::Journal, DataMode::Writeback];
pub(crate) const ATIME_MODES: [AtimeMode; 3] = [AtimeMode::Relatime, AtimeMode::Noatime, AtimeMode::Strictatime];

/// Has the server of the volume mounted on `mountpoint` change options: those of the volume, and whether every change is
/// durable before it is answered (`sync`). The kernel's own flags are the caller's to change ([`crate::remount`]).
///
/// # Errors
/// EINVAL: the data mode cannot change. EPERM: only root may. ENOTTY: the server is too old. To writable: EROFS (also
/// where a domain failed), EBUSY (also while another program is about to take the mount over). EIO: the device.
pub fn remount(mountpoint: &Path, how: &Remount, sync: Option<bool>) -> io::Result<()> {
    fn place<T: PartialEq>(all: &[T], one: Option<T>) -> u32 {
        one.and_then(|o| all.iter().position(|x| *x == o)).map_or(0, |i| i as u32 + 1)
    }
    let flag = |on: Option<bool>| on.map_or(0, |on| if on { YES } else { NO });
    let mut arg = RemountArg {
        read_only: flag(how.read_only),
        data: place(&DATA_MODES, how.data),
        atime: place(&ATIME_MODES, how.atime),
        nodiratime: flag(how.nodiratime),
        lazytime: flag(how.lazytime),
        sync: flag(sync),
        commit_ms: how.commit_interval.map_or(0, |i| u32::try_from(i.as_millis()).unwrap_or(u32::MAX)),
        reserved: 0,
    };
    ask(&File::open(mountpoint)?, REMOUNT, &mut arg)
}

/// How a size is told to the server: number of a [`ResizeTo`], and bytes.
fn size_of_call(size: NewSize) -> (u32, u64) {
    let (to, bytes) = match size {
        NewSize::Device => (ResizeTo::Device, 0),
        NewSize::Bytes(n) => (ResizeTo::Bytes, n),
        NewSize::More(n) => (ResizeTo::More, n),
    };
    (to as u32, bytes)
}

/// Has the server of the volume mounted on `mountpoint` change the volume's size, and waits for that: it cannot be stopped
/// ([`devices::DeviceWork::resize`] can).
///
/// # Errors
/// EPERM: only root may, and the user of the server. ENOTTY: the server is too old. EROFS. Where the volume refuses, what it
/// says to it, as the error's text.
pub fn resize(mountpoint: &Path, size: NewSize) -> io::Result<Resized> {
    let (to, bytes) = size_of_call(size);
    let mut arg = ResizeArg { to, bytes, ..ResizeArg::new_zeroed() };
    ask(&File::open(mountpoint)?, RESIZE, &mut arg)?;
    match arg.errno as i32 {
        0 => Ok(Resized { before: arg.before, after: arg.after, volume: arg.volume, groups: arg.groups }),
        libc::EROFS => Err(io::Error::from_raw_os_error(libc::EROFS)),
        _ => {
            let text = arg.text.split(|b| *b == 0).next().unwrap_or_default();
            Err(io::Error::other(String::from_utf8_lossy(text).into_owned()))
        }
    }
}

/// In how many pieces the regular file `ino` lies, of the mounted volume of which `dir` is any directory.
///
/// # Errors
/// EPERM: only root may, and the user of the server. ENOTTY: the server is too old, or it is no braidfs. ENOENT, EISDIR, EINVAL
/// for what has no data; EIO.
pub fn defrag_look(dir: &File, ino: u64) -> io::Result<Pieces> {
    let mut arg = DefragArg { call: DefragCall::Look as u32, ino, ..DefragArg::new_zeroed() };
    ask(dir, DEFRAG, &mut arg)?;
    Ok(Pieces { blocks: arg.blocks, pieces: arg.pieces, least: arg.least, stays: arg.stays != 0 })
}

/// Makes a part of it whole, from byte `from` on: [`braidfs::Volume::defragment`].
///
/// # Errors
/// As [`defrag_look`]; ENOSPC: too little room lies together; EROFS.
pub fn defrag_step(dir: &File, ino: u64, from: u64) -> io::Result<Defragmented> {
    let mut arg = DefragArg { call: DefragCall::Step as u32, ino, from, ..DefragArg::new_zeroed() };
    ask(dir, DEFRAG, &mut arg)?;
    Ok(Defragmented { next: Some(arg.next).filter(|n| *n != u64::MAX), moved: arg.moved })
}

/// Text that leaves room for a zero behind it.
/// A text with zeros behind it.
fn text_of(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

fn put(room: &mut [u8], text: &[u8]) -> io::Result<()> {
    if text.len() >= room.len() || text.contains(&0) {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    room[..text.len()].copy_from_slice(text);
    Ok(())
}

/// What a mount was asked since it was made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stats {
    /// How many threads serve requests.
    pub threads: u32,
    /// One request of so many is timed.
    pub sampled: u32,
    /// Flags of INIT as `linux/fuse.h` has them, as agreed with the kernel.
    pub init_flags: u64,
    /// Mounted with `private`.
    pub private: bool,
    /// Operations that were asked at least once, in the order of their codes.
    pub ops: Vec<OpStats>,
}

/// Of one operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpStats {
    /// Of FUSE; 0: all that have none below 64.
    pub opcode: u32,
    /// As `linux/fuse.h` has it; empty for one that this server does not know.
    pub name: &'static str,
    /// How many requests there were.
    pub requests: u64,
    /// Those that another thread answered later.
    pub deferred: u64,
    /// Those whose handlers were timed.
    pub timed: u64,
    /// How long these took together.
    pub nanos: u64,
}

/// Asks the server of the volume mounted on `mountpoint` what it was asked: this question included.
///
/// # Errors
/// ENOTTY: the server is too old, or none of ours. EACCES: the mount is another user's.
pub fn stats(mountpoint: &Path) -> io::Result<Stats> {
    let mut s = StatsOut::new_zeroed();
    ask(&File::open(mountpoint)?, STATS, &mut s)?;
    let ops = (0..).zip(&s.ops).filter(|(_, o)| o.requests > 0).map(|(opcode, o)| OpStats {
        opcode,
        name: Some(op::name(opcode)).filter(|name| *name != "?").unwrap_or_default(),
        requests: o.requests,
        deferred: o.deferred,
        timed: o.timed,
        nanos: o.nanos,
    });
    Ok(Stats {
        threads: s.threads,
        sampled: s.sampled,
        init_flags: s.init_flags,
        private: s.how & PRIVATE != 0,
        ops: ops.collect(),
    })
}

/// Why there is no sample.
#[derive(Debug, thiserror::Error)]
pub enum SampleError {
    /// EACCES: the mount is another user's. ENOTTY: the server is none of ours.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// Of before there were any.
    #[error("its server is of an older version, which tells no latencies: mount it again")]
    OldServer,
    /// It tells what this program does not understand.
    #[error(
        "its server is of a newer version (layout {server}, this program understands {LAYOUT}): use the braidfs that mounted it"
    )]
    NewServer {
        /// What it tells.
        server: u32,
    },
    /// What it told is no sample.
    #[error("its server told nonsense: {0}")]
    Nonsense(#[from] serde_json::Error),
    /// No sample is so long.
    #[error("its server tells more than {SAMPLE_MAX} bytes")]
    TooLong,
    /// Others ask so often that the server has given up this one's sample each time.
    #[error("too many ask at once: try again")]
    Crowded,
}

/// Asks the server of the volume mounted on `mountpoint` what it does ([`crate::watch::sample`]). `watch_seconds`: for so
/// long every request is timed, and counted for the thread that asks; 0: as it is. Who is neither root nor the user of the
/// server gets a [restricted](Sample::restricted) one.
///
/// # Errors
/// See [`SampleError`].
pub fn sample(mountpoint: &Path, watch_seconds: u32) -> Result<Sample, SampleError> {
    let root = File::open(mountpoint)?;
    for _ in 0..8 {
        if let Some(text) = fetch(|part| ask_sample(&root, part), watch_seconds)? {
            return Ok(serde_json::from_slice(&text)?);
        }
    }
    Err(SampleError::Crowded)
}

fn ask_sample(root: &File, part: &mut SamplePart) -> Result<(), SampleError> {
    match ask(root, SAMPLE, part) {
        Err(e) if e.raw_os_error() == Some(libc::ENOTTY) && stats_known(root) => Err(SampleError::OldServer),
        other => Ok(other?),
    }
}

/// Whether it is one of ours at all.
fn stats_known(root: &File) -> bool {
    ask(root, STATS, &mut StatsOut::new_zeroed()).is_ok()
}

/// All parts of a sample; `None`: the server has given it up meanwhile.
fn fetch(
    mut ask: impl FnMut(&mut SamplePart) -> Result<(), SampleError>,
    watch_seconds: u32,
) -> Result<Option<Vec<u8>>, SampleError> {
    let (mut text, mut token) = (Vec::new(), 0);
    loop {
        let offset = text.len() as u64;
        let mut part = SamplePart { layout: LAYOUT, watch_seconds, token, offset, ..SamplePart::new_zeroed() };
        match ask(&mut part) {
            Err(SampleError::Io(e)) if e.raw_os_error() == Some(libc::ESTALE) => return Ok(None),
            other => other?,
        }
        if part.layout > LAYOUT {
            return Err(SampleError::NewServer { server: part.layout });
        }
        match part.text.get(..part.bytes as usize) {
            Some(more) if text.len() + more.len() > SAMPLE_MAX => return Err(SampleError::TooLong),
            Some(more) if !more.is_empty() => text.extend_from_slice(more),
            _ => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the sample ends early").into()),
        }
        token = part.token;
        if text.len() as u64 >= part.total {
            return Ok(Some(text));
        }
    }
}

/// A scrub of a mounted volume, as the program sees it that asked for it. Dropping it stops the scrub.
#[derive(Debug)]
pub struct Scrub {
    root: File,
}

/// How far a scrub, or a change of devices, is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Progress {
    /// Its report can be fetched.
    pub ended: bool,
    /// What it does.
    pub phase: String,
    /// Steps of the phase that are done.
    pub done: u64,
    /// Steps that the phase will have, about.
    pub total: u64,
    text_bytes: u64,
}

impl Scrub {
    /// Has the server of the volume mounted on `mountpoint` begin a scrub, which reads at most `bytes_per_second` (0: as
    /// fast as it goes), with file data or without.
    ///
    /// # Errors
    /// EBUSY: one is running. EPERM: only root and who owns the mount's root directory may. ENOTTY: the server is too old.
    pub fn start(mountpoint: &Path, bytes_per_second: u64, data: bool) -> io::Result<Self> {
        let scrub = Self { root: File::open(mountpoint)? };
        let flags = if data { 0 } else { NO_DATA };
        ask(&scrub.root, SCRUB_START, &mut ScrubStart { bytes_per_second, flags, reserved: 0 })?;
        Ok(scrub)
    }

    /// How far it is.
    ///
    /// # Errors
    /// Of the connection: the volume was unmounted, its server died.
    pub fn progress(&self) -> io::Result<Progress> {
        progress(&self.root, SCRUB_STATUS)
    }

    /// The report of a scrub that ended: [`braidfs_check::ScrubReport`] as JSON.
    ///
    /// # Errors
    /// As [`Self::progress`]; ENODATA where it has not ended.
    pub fn report(&self) -> io::Result<Vec<u8>> {
        report(&self.root, SCRUB_TEXT, self.progress()?.text_bytes)
    }
}

pub(crate) fn progress(root: &File, number: u32) -> io::Result<Progress> {
    let mut s = ScrubStatus::new_zeroed();
    ask(root, number, &mut s)?;
    let phase = s.phase.split(|b| *b == 0).next().unwrap_or_default();
    Ok(Progress {
        ended: s.ended == 1,
        phase: String::from_utf8_lossy(phase).into_owned(),
        done: s.done,
        total: s.total,
        text_bytes: s.text_bytes,
    })
}

pub(crate) fn report(root: &File, number: u32, bytes: u64) -> io::Result<Vec<u8>> {
    let mut out = Vec::new();
    while (out.len() as u64) < bytes {
        let mut part = ScrubText { offset: out.len() as u64, ..ScrubText::new_zeroed() };
        ask(root, number, &mut part)?;
        match part.text.get(..part.bytes as usize) {
            Some(text) if !text.is_empty() => out.extend_from_slice(text),
            _ => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the report ends early")),
        }
    }
    Ok(out)
}

pub(crate) fn ask<T: FromBytes + IntoBytes>(dir: &File, number: u32, arg: &mut T) -> io::Result<()> {
    // SAFETY: the number tells the kernel the size of `T` and the direction (asserted above); `arg` is valid for
    // reads and writes of that size until the call returns, and any bytes make a `T`.
    match unsafe { libc::ioctl(dir.as_raw_fd(), number.into(), std::ptr::from_mut(arg)) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Programs of other versions send these numbers, and old servers know them by nothing else: one that changes is a request
    /// that either side refuses. So a request that comes to be another one gets a number of its own, and its old number is not
    /// used again. (That of an upgrade has changed once, from 9 to 12: servers from before cannot be asked.)
    const SENT: [(u32, u32, u32, u32, usize); 14] = [
        (SCRUB_START, 0x4010_bf01, WRITE, 1, size_of::<ScrubStart>()),
        (SCRUB_STATUS, 0x8040_bf02, READ, 2, size_of::<ScrubStatus>()),
        (SCRUB_TEXT, 0xd000_bf03, READ | WRITE, 3, size_of::<ScrubText>()),
        (REMOUNT, 0x4020_bf04, WRITE, 4, size_of::<RemountArg>()),
        (STATS, 0x8818_bf05, READ, 5, size_of::<StatsOut>()),
        (RESIZE, 0xc200_bf06, READ | WRITE, 6, size_of::<ResizeArg>()),
        (SAMPLE, 0xe000_bf07, READ | WRITE, 7, size_of::<SamplePart>()),
        (TENANT, 0xc400_bf08, READ | WRITE, 8, size_of::<TenantArg>()),
        (DEVICE_START, 0x5020_bf09, WRITE, 9, size_of::<DeviceStart>()),
        (DEVICE_STATUS, 0x8040_bf0a, READ, 10, size_of::<ScrubStatus>()),
        (DEVICE_TEXT, 0xd000_bf0b, READ | WRITE, 11, size_of::<ScrubText>()),
        (UPGRADE, 0xd020_bf0c, READ | WRITE, 12, size_of::<UpgradeArg>()),
        (DEFRAG, 0xc050_bf0d, READ | WRITE, 13, size_of::<DefragArg>()),
        (QUOTA, 0xc140_bf0e, READ | WRITE, 14, size_of::<QuotaArg>()),
    ];
    /// `_IOC_WRITE` and `_IOC_READ` of <asm-generic/ioctl.h>.
    const WRITE: u32 = 1;
    const READ: u32 = 2;

    #[test]
    fn request_numbers_are_those_that_other_programs_send() {
        for (n, (number, sent, direction, request, size)) in (1..).zip(SENT) {
            assert_eq!(number, sent, "{number:#x} is sent as {sent:#x}");
            // (dir << 30) | (size << 16) | (type << 8) | nr
            let made = direction << 30 | (size as u32) << 16 | 0xbf << 8 | request;
            assert_eq!(number, made, "{number:#x} does not say what it carries: {made:#x}");
            assert_eq!(request, n, "each number once");
        }
    }

    /// The upgrade above all: the program that asks may be of any version.
    #[test]
    fn an_upgrade_is_asked_for_as_other_programs_do() {
        let mut arg = UpgradeArg { errno: 1, seconds: 2, pid: 3, ..UpgradeArg::new_zeroed() };
        arg.set_text(b"/p");
        let bytes = arg.as_bytes();
        assert_eq!(bytes[..20], [1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, b'/', b'p', 0, 0]);
        assert!(bytes[20..].iter().all(|b| *b == 0));
    }

    /// A server that tells `text`, at most five bytes a call, and of a layout.
    fn server(text: &[u8], layout: u32) -> impl FnMut(&mut SamplePart) -> Result<(), SampleError> {
        move |part| {
            assert_eq!(part.token, if part.offset == 0 { 0 } else { 3 }, "only the first call asks for a new sample");
            let rest = &text[part.offset as usize..];
            let n = rest.len().min(5);
            part.text[..n].copy_from_slice(&rest[..n]);
            (part.layout, part.token, part.total, part.bytes) = (layout, 3, text.len() as u64, n as u32);
            Ok(())
        }
    }

    #[test]
    fn a_sample_comes_in_parts() {
        let text = b"{\"layout\": 1, \"threads\": 7}";
        assert_eq!(fetch(server(text, LAYOUT), 0).unwrap().as_deref(), Some(&text[..]));
        let given_up = |_: &mut SamplePart| Err(io::Error::from_raw_os_error(libc::ESTALE).into());
        assert!(fetch(given_up, 0).unwrap().is_none());
        // one that says it has more than it tells
        assert!(fetch(server(b"", LAYOUT), 0).is_err());
    }

    #[test]
    fn a_server_that_tells_without_end_is_left() {
        let endless = |part: &mut SamplePart| {
            (part.layout, part.total, part.bytes) = (LAYOUT, u64::MAX, SAMPLE_BYTES as u32);
            part.text.fill(b' ');
            Ok(())
        };
        assert!(matches!(fetch(endless, 0), Err(SampleError::TooLong)));
    }

    #[test]
    fn a_newer_server_is_named() {
        let why = fetch(server(b"{}", LAYOUT + 1), 0).unwrap_err().to_string();
        assert!(why.contains("newer version (layout 2, this program understands 1)"), "{why}");
        assert!(why.contains("use the braidfs that mounted it"), "{why}");
    }
}
