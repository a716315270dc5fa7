//! What the old process tells the new one: in two parts, what does not change before anything stops, and the rest in a file in
//! memory.
//!
//! [`VERSION`] rises when the meaning of anything in it changes, or a field comes: also when numbers
//! that the kernel holds come about otherwise, node ids ([`crate::node`]) and offsets in directories. Fields that are not known are
//! refused. So a field that came later is left out where it says nothing, and a program writes the newest version that
//! the other one takes, too ([`common`]), if that can say what there is to say ([`Front::needs`]). Which versions of the disk
//! format a program knows says the volume.
//!
//! | version | what came with it |
//! |---|---|
//! | 1 | |
//! | 2 | [`Front::device_job`]; programs that write 1 and know it are out there |
//! | 3 | [`Options::read_only`], [`OfferedDevice`] that are open for reading |
//! | 4 | [`Front::quota_grants`]; programs that write an older one do not tell them ([`tells_quota_grants`]) |

use crate::abi::{MAJOR, init};
use crate::dirty_grants::HandedGrants;
use crate::flagged::HandedFlags;
use crate::fs::{KNOWN_FLAGS, MAX_BACKGROUND, MAX_IO_BYTES, Negotiated};
use crate::handles::HandedHandle;
use crate::ops::HandedJob;
use crate::room::HandedRoom;
use crate::within_quota::HandedOwner;
use braidfs::{AtimeMode, HeldInode, InodeNo, InodeRef, Remount};
use braidfs_device::{HandedClaim, HandedDevice};
use rustix::fs::MemfdFlags;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::Duration;

/// The newest version that this program writes and takes.
pub(crate) const VERSION: u32 = 4;
/// The oldest one.
pub(crate) const OLDEST: u32 = 1;

/// What was agreed with the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Agreed {
    major: u32,
    minor: u32,
    flags: u64,
    max_write: u32,
    max_background: u16,
}

impl Agreed {
    pub fn of(negotiated: Negotiated) -> Self {
        let Negotiated { flags, minor } = negotiated;
        Self { major: MAJOR, minor, flags, max_write: MAX_IO_BYTES, max_background: MAX_BACKGROUND }
    }

    /// What it means here.
    ///
    /// # Errors
    /// This program would not serve such a connection.
    pub fn understand(self) -> Result<Negotiated, String> {
        let Self { major, minor, flags, max_write, max_background } = self;
        let unknown = flags & !KNOWN_FLAGS;
        if major != MAJOR || unknown != 0 {
            return Err(format!(
                "the mount uses what it does not know of the kernel: FUSE {major}, flags {unknown:#x}"
            ));
        }
        if flags & init::OVER_IO_URING != 0 {
            return Err("its requests come through io_uring".into());
        }
        if max_write > MAX_IO_BYTES || max_background < MAX_BACKGROUND {
            return Err(format!(
                "the kernel was promised requests of up to {max_write} bytes and {max_background} at once, it serves \
                 {MAX_IO_BYTES} and {MAX_BACKGROUND}"
            ));
        }
        Ok(Negotiated { flags, minor })
    }
}

/// A device; its descriptors come beside it: the file, that of the lock on the bytes, that of the claim.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct OfferedDevice {
    path: PathBuf,
    range: bool,
    claim: OfferedClaim,
    /// Open for reading, as those of a volume that was mounted read-only.
    #[serde(default, skip_serializing_if = "is_not")]
    reader: bool,
}

/// For fields that are left out then.
#[allow(clippy::trivially_copy_pass_by_ref)] // serde calls it so
fn is_not(on: &bool) -> bool {
    !on
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum OfferedClaim {
    None,
    Held,
    Elsewhere,
}

impl OfferedDevice {
    /// It, and its descriptors.
    pub fn of(handed: HandedDevice) -> (Self, Vec<OwnedFd>) {
        let HandedDevice { path, file, write, range, claim } = handed;
        let (claim, held) = match claim {
            HandedClaim::None => (OfferedClaim::None, None),
            HandedClaim::Held(fd) => (OfferedClaim::Held, Some(fd)),
            HandedClaim::Elsewhere => (OfferedClaim::Elsewhere, None),
        };
        let offered = Self { path, range: range.is_some(), claim, reader: !write };
        (offered, std::iter::once(file).chain(range).chain(held).collect())
    }

    /// Takes its descriptors out of those that came; `None`: there are not so many.
    pub fn handed(self, fds: &mut impl Iterator<Item = OwnedFd>) -> Option<HandedDevice> {
        let file = fds.next()?;
        let range = if self.range { Some(fds.next()?) } else { None };
        let claim = match self.claim {
            OfferedClaim::None => HandedClaim::None,
            OfferedClaim::Held => HandedClaim::Held(fds.next()?),
            OfferedClaim::Elsewhere => HandedClaim::Elsewhere,
        };
        Some(HandedDevice { path: self.path, file, write: !self.reader, range, claim })
    }

    /// Whether it is open for writing.
    pub fn is_writable(&self) -> bool {
        !self.reader
    }
}

/// The first part.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Offer {
    /// Of the record.
    pub version: u32,
    /// The old program's.
    pub program: String,
    pub agreed: Agreed,
    pub devices: Vec<OfferedDevice>,
    /// The user that it runs as.
    pub user: u32,
}

/// The second part, whose bulk is in a file: the first descriptor. Those of the connection, and what else is said, follow.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Take {
    /// Bytes of the file.
    pub bytes: u64,
    /// The request that asked came by another descriptor of the connection.
    pub asked_elsewhere: bool,
    pub metrics: bool,
    pub supervisor: bool,
}

/// Options that a remount may have changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Options {
    commit_ms: u64,
    /// 0 relatime, 1 noatime, 2 strictatime.
    atime: u8,
    nodiratime: bool,
    lazytime: bool,
    pub sync: bool,
    pub dirsync: bool,
    /// Mounted so, or by a remount.
    #[serde(default, skip_serializing_if = "is_not")]
    read_only: bool,
}

impl Options {
    pub fn of(now: &Remount, sync: bool, dirsync: bool) -> Self {
        let millis = now.commit_interval.unwrap_or_default().as_millis();
        Self {
            commit_ms: u64::try_from(millis).unwrap_or(u64::MAX),
            atime: match now.atime.unwrap_or_default() {
                AtimeMode::Relatime => 0,
                AtimeMode::Noatime => 1,
                AtimeMode::Strictatime => 2,
            },
            nodiratime: now.nodiratime.unwrap_or_default(),
            lazytime: now.lazytime.unwrap_or_default(),
            sync,
            dirsync,
            read_only: now.read_only.unwrap_or_default(),
        }
    }

    pub fn of_volume(&self) -> Remount {
        Remount {
            commit_interval: Some(Duration::from_millis(self.commit_ms)),
            atime: Some(match self.atime {
                0 => AtimeMode::Relatime,
                1 => AtimeMode::Noatime,
                _ => AtimeMode::Strictatime,
            }),
            nodiratime: Some(self.nodiratime),
            lazytime: Some(self.lazytime),
            read_only: Some(self.read_only),
            ..Remount::default()
        }
    }
}

/// What the front end knows beside the volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Front {
    pub options: Options,
    pub handles: Vec<HandedHandle>,
    /// Files with cached writers that the kernel was promised room for.
    pub promised: Vec<u64>,
    pub flags: HandedFlags,
    pub room: HandedRoom,
    pub grants: HandedGrants,
    /// The same by owner with a limit.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub quota_grants: Vec<(HandedOwner, HandedGrants)>,
    pub scrub: Option<HandedJob>,
    /// As that of a scrub, of a change of devices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_job: Option<HandedJob>,
}

impl Front {
    /// The oldest version of a record that can say this, and what it is that an older one cannot say.
    pub fn needs(&self) -> Option<(u32, &'static str)> {
        needs(self.options.read_only, self.device_job.is_some(), !self.quota_grants.is_empty())
    }
}

/// [`Front::needs`] of a volume that is read-only, where a report of a change of its devices is there to fetch, and where the kernel
/// may hold what owners with limits wrote.
pub(crate) fn needs(read_only: bool, device_report: bool, quota_grants: bool) -> Option<(u32, &'static str)> {
    let all = [(quota_grants, QUOTA_GRANTS), (read_only, READ_ONLY), (device_report, REPORT_OF_DEVICES)];
    all.into_iter().find_map(|(there, what)| there.then_some(what))
}

/// Whether a record of this version has all that was granted to owners with limits.
pub(crate) fn tells_quota_grants(version: u32) -> bool {
    version >= QUOTA_GRANTS.0
}

const QUOTA_GRANTS: (u32, &str) = (
    4,
    "users, groups or directories with limits wrote, and that program would not know how much of it is not written back: unmount it \
     and mount it with that program",
);

const READ_ONLY: (u32, &str) = (3, "it is read-only: unmount it and mount it with the new program");
const REPORT_OF_DEVICES: (u32, &str) =
    (2, "a report of a change of its devices is there to fetch: wait until that command has ended");

/// All of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Record {
    pub version: u32,
    pub point: PathBuf,
    /// [`crate::MountId`] as text; none where it is not known.
    pub mount: Option<String>,
    pub front: Front,
    /// Number, generation, times.
    pub held: Vec<(u64, u32, u32)>,
    /// The request that asked for this, which the new process answers.
    pub asked: u64,
}

impl Record {
    /// In a file in memory, and how long it is.
    pub fn write(&self) -> io::Result<(File, u64)> {
        let mut file = File::from(rustix::fs::memfd_create("braidfs-upgrade", MemfdFlags::CLOEXEC)?);
        let text = serde_json::to_vec(self)?;
        file.write_all(&text)?;
        Ok((file, text.len() as u64))
    }

    /// # Errors
    /// It is none, or of another version.
    pub fn read(file: &File, bytes: u64) -> Result<Self, String> {
        let mut text = vec![0; usize::try_from(bytes).map_err(|e| e.to_string())?];
        file.read_exact_at(&mut text, 0).map_err(|e| format!("the record of the hand-over: {e}"))?;
        let record: Self = serde_json::from_slice(&text).map_err(|e| format!("the record of the hand-over: {e}"))?;
        check_version(record.version)?;
        Ok(record)
    }
}

/// # Errors
/// This program does not take such a record.
pub(crate) fn check_version(version: u32) -> Result<(), String> {
    if (OLDEST..=VERSION).contains(&version) {
        return Ok(());
    }
    Err(format!("takes records of versions {OLDEST} to {VERSION}, this one is {version}"))
}

/// The newest version that this program writes and another one takes, which takes those from `oldest` to `newest`.
pub(crate) fn common(oldest: u32, newest: u32) -> Option<u32> {
    let version = newest.min(VERSION);
    (version >= oldest.max(OLDEST)).then_some(version)
}

/// # Errors
/// A record of this version cannot say what there is to say.
pub(crate) fn check_needs(version: u32, needs: Option<(u32, &str)>) -> Result<(), String> {
    match needs {
        Some((needed, what)) if version < needed => {
            Err(format!("takes hand-over records up to version {version}, and this needs {needed}: {what}"))
        }
        _ => Ok(()),
    }
}

pub(crate) fn list_of(held: &[HeldInode]) -> Vec<(u64, u32, u32)> {
    held.iter().map(|h| (h.inode.ino.0, h.inode.generation, h.times)).collect()
}

pub(crate) fn held_of(list: &[(u64, u32, u32)]) -> Vec<HeldInode> {
    let of = |&(ino, generation, times): &(u64, u32, u32)| HeldInode {
        inode: InodeRef { ino: InodeNo(ino), generation },
        times,
    };
    list.iter().map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> Record {
        let now = Remount {
            commit_interval: Some(Duration::from_secs(7)),
            atime: Some(AtimeMode::Strictatime),
            nodiratime: Some(true),
            lazytime: Some(false),
            read_only: Some(false),
            ..Remount::default()
        };
        let handle = HandedHandle { fh: 3 << 52 | 7, ino: 5, generation: 2, cached_writer: true, append_only: false };
        let front = Front {
            options: Options::of(&now, true, false),
            handles: vec![handle],
            promised: vec![5],
            flags: HandedFlags::default(),
            room: HandedRoom::default(),
            grants: HandedGrants::default(),
            quota_grants: Vec::new(),
            scrub: None,
            device_job: None,
        };
        assert_eq!(front.options.of_volume(), now);
        let held = vec![(5, 2, 1), (u64::MAX >> 24, u32::MAX, 9)];
        assert_eq!(list_of(&held_of(&held)), held);
        Record { version: VERSION, point: "/mnt/a b".into(), mount: Some("1 2 3 4".into()), front, held, asked: 77 }
    }

    #[test]
    fn a_record_is_read_as_it_was_written() {
        let (file, bytes) = record().write().unwrap();
        assert_eq!(Record::read(&file, bytes).unwrap(), record());
        assert!(Record::read(&file, bytes - 1).is_err() && Record::read(&file, bytes + 1).is_err());
    }

    #[test]
    fn a_record_that_is_not_known_is_refused() {
        let (file, bytes) = Record { version: VERSION + 1, ..record() }.write().unwrap();
        assert!(Record::read(&file, bytes).unwrap_err().contains("version"));
        let (file, bytes) = Record { version: OLDEST - 1, ..record() }.write().unwrap();
        assert!(Record::read(&file, bytes).unwrap_err().contains("version"));
        let mut value = serde_json::to_value(record()).unwrap();
        value["front"]["later"] = 1.into();
        assert!(serde_json::from_value::<Record>(value).is_err(), "a field that this program does not know");
    }

    /// As the first program wrote it that could hand over. Programs of that version refuse what they do not know.
    const FIRST: &str = r#"{"version":1,"point":"/mnt/a b","mount":"1 2 3 4","front":{"options":{"commit_ms":7000,"atime":2,"nodiratime":true,"lazytime":false,"sync":true,"dirsync":false},"handles":[{"fh":13510798882111495,"ino":5,"generation":2,"cached_writer":true,"append_only":false}],"promised":[5],"flags":FLAGS,"room":ROOM,"grants":GRANTS,"scrub":null},"held":[[5,2,1],[1099511627775,4294967295,9]],"asked":77}"#;

    fn first() -> String {
        let of = |value: Result<String, serde_json::Error>| value.unwrap();
        FIRST
            .replace("FLAGS", &of(serde_json::to_string(&HandedFlags::default())))
            .replace("ROOM", &of(serde_json::to_string(&HandedRoom::default())))
            .replace("GRANTS", &of(serde_json::to_string(&HandedGrants::default())))
    }

    #[test]
    fn records_of_the_first_version_are_written_and_read() {
        let old = Record { version: 1, ..record() };
        assert_eq!(serde_json::to_string(&old).unwrap(), first());
        assert_eq!(serde_json::from_str::<Record>(&first()).unwrap(), old);
        assert_eq!(old.front.needs(), None);
        // as programs wrote it that knew the field and called it the first version, too
        let known = first().replace(r#""scrub":null"#, r#""scrub":null,"device_job":null"#);
        assert_eq!(serde_json::from_str::<Record>(&known).unwrap(), old);
    }

    #[test]
    fn what_is_read_only_needs_a_record_that_says_so() {
        let mut record = record();
        let said = serde_json::to_string(&record).unwrap();
        assert!(!said.contains("read_only"), "{said}");
        record.front.options.read_only = true;
        assert_eq!(record.front.options.of_volume().read_only, Some(true));
        assert_eq!(record.front.needs(), Some(READ_ONLY));
        let (file, bytes) = record.write().unwrap();
        assert_eq!(Record::read(&file, bytes).unwrap(), record);
        assert!(check_needs(2, record.front.needs()).unwrap_err().contains("read-only"));
        // the newer of two
        let all =
            [needs(true, true, false), needs(false, true, false), needs(true, false, true), needs(false, false, false)];
        assert_eq!(all, [Some(READ_ONLY), Some(REPORT_OF_DEVICES), Some(QUOTA_GRANTS), None]);
    }

    #[test]
    fn what_owners_with_limits_were_granted_needs_a_record_that_says_so() {
        let mut record = record();
        assert!(!serde_json::to_string(&record).unwrap().contains("quota"));
        record.front.quota_grants = [HandedOwner::User(7), HandedOwner::Project(7), HandedOwner::Group(7)]
            .map(|owner| (owner, HandedGrants::default()))
            .to_vec();
        assert_eq!(record.front.needs(), Some(QUOTA_GRANTS));
        let (file, bytes) = record.write().unwrap();
        assert_eq!(Record::read(&file, bytes).unwrap(), record);
        assert!(check_needs(3, record.front.needs()).unwrap_err().contains("limits"));
        assert!(!tells_quota_grants(3) && tells_quota_grants(VERSION));
    }

    #[test]
    fn devices_are_offered_as_they_are_open() {
        for write in [true, false] {
            let fd = || OwnedFd::from(File::open("/dev/null").unwrap());
            let handed = HandedDevice {
                path: "/a".into(),
                file: fd(),
                write,
                range: Some(fd()),
                claim: HandedClaim::Held(fd()),
            };
            let (offered, fds) = OfferedDevice::of(handed);
            let text = serde_json::to_string(&offered).unwrap();
            let first = r#"{"path":"/a","range":true,"claim":"Held"}"#;
            assert_eq!(text == first, write, "programs of the first version refuse what they do not know: {text}");
            let read: OfferedDevice = serde_json::from_str(&text).unwrap();
            assert_eq!((&read, read.is_writable()), (&offered, write));
            assert_eq!(read.clone().handed(&mut fds.into_iter()).unwrap().write, write);
            assert!(read.handed(&mut [fd(), fd()].into_iter()).is_none(), "one descriptor too few");
        }
    }

    #[test]
    fn the_newest_version_that_both_know_is_written() {
        assert_eq!((common(1, 1), common(1, VERSION), common(2, 99)), (Some(1), Some(VERSION), Some(VERSION)));
        assert_eq!((common(VERSION + 1, 99), common(0, OLDEST - 1)), (None, None));
        assert!(check_needs(1, None).is_ok() && check_needs(2, Some(REPORT_OF_DEVICES)).is_ok());
        assert!(check_needs(1, Some(REPORT_OF_DEVICES)).unwrap_err().contains("report of a change of its devices"));
    }

    #[test]
    fn a_connection_that_is_not_known_is_refused() {
        let agreed = Agreed::of(Negotiated { flags: init::MAX_PAGES, minor: 40 });
        assert_eq!(agreed.understand(), Ok(Negotiated { flags: init::MAX_PAGES, minor: 40 }));
        for wrong in [
            Agreed { flags: 1 << 63, ..agreed },
            Agreed { flags: init::OVER_IO_URING, ..agreed },
            Agreed { major: MAJOR + 1, ..agreed },
            Agreed { max_write: 2 * MAX_IO_BYTES, ..agreed },
            Agreed { max_background: 12, ..agreed },
        ] {
            assert!(wrong.understand().is_err(), "{wrong:?}");
        }
    }
}
