//! Limits of users, groups and directories of a mounted volume: the ioctl, and the client.

use super::{ask, text_of};
use braidfs::{Quota, QuotaLimits, QuotaOwner};
use std::fs::File;
use std::io;
use std::time::Duration;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

/// `_IOWR(0xbf, 14, QuotaArg)`: limits are set, looked at or taken away; on any directory, of a directory on itself. EPERM but
/// for root and the server's user; anybody may look. What the volume says to it stands in the answer.
pub(crate) const QUOTA: u32 = 0xc140_bf0e;

/// Bytes of the reason why not.
pub(crate) const QUOTA_TEXT: usize = 200;

#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct QuotaArg {
    /// [`QuotaCall`]; with [`OF_GROUP`] where it is about a group.
    pub call: u32,
    /// Of the answer: 0, or why not.
    pub errno: u32,
    /// [`USER`], [`DIRECTORY`], [`PROJECT`] or [`GROUP`]; of the answer not [`DIRECTORY`].
    pub kind: u32,
    /// Number of the user, group or project. Of [`QuotaCall::Next`] of the owner that was told of before, with its kind.
    pub id: u32,
    /// Of [`QuotaCall::Set`]: which limits are others, bits of [`Self::limits`], [`SET_GRACE`]. Of [`QuotaCall::Next`]: how many
    /// were told of before; all that older servers look at.
    pub which: u32,
    /// Seconds.
    pub grace: u32,
    /// Bytes, bytes of the soft limit, inodes, inodes of the soft limit; 0: no limit.
    pub limits: [u64; 4],
    /// Of the answer: bytes and inodes in use.
    pub used: [u64; 2],
    /// Of the answer: since when the soft limits of space and of inodes are exceeded, seconds since 1970; 0: they are not.
    pub since: [u64; 2],
    /// Of the answer: the project's directory.
    pub directory: u64,
    /// Of the answer, 1: a soft limit is a hard one by now.
    pub over: u32,
    pub reserved: [u32; 3],
    /// Of the answer: why not. UTF-8, zeros behind it.
    pub text: [u8; QUOTA_TEXT],
    pub reserved1: [u8; 8],
}
const _: () = assert!(size_of::<QuotaArg>() == 320);

/// [`QuotaArg::kind`].
pub(crate) const USER: u32 = 1;
/// [`QuotaArg::kind`]: the directory that is asked on.
pub(crate) const DIRECTORY: u32 = 2;
/// [`QuotaArg::kind`].
pub(crate) const PROJECT: u32 = 3;
/// [`QuotaArg::kind`].
pub(crate) const GROUP: u32 = 4;
/// [`QuotaArg::call`]: servers that know no groups take any other kind for a project, but refuse a call that they do not know.
pub(crate) const OF_GROUP: u32 = 16;
/// [`QuotaArg::which`], behind the bits of the limits.
pub(crate) const SET_GRACE: u32 = 16;

/// [`QuotaArg::call`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum QuotaCall {
    Set = 1,
    Show,
    Next,
    Remove,
}

/// Whose limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QuotaSubject {
    /// Of a user, by number.
    User(u32),
    /// Of a group, by number.
    Group(u32),
    /// Of the directory that is open.
    Directory,
    /// Of the directory whose project has this number.
    Project(u32),
}

/// Which limits change: `None` leaves one, `Some(None)` takes it away.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct QuotaChange {
    /// Bytes, bytes of the soft limit, inodes, inodes of the soft limit.
    pub limits: [super::NewLimit; 4],
    /// How long soft limits may be exceeded.
    pub grace: Option<Duration>,
}

impl QuotaArg {
    /// Makes of limits what the call asks for.
    pub fn change(&self, l: &mut QuotaLimits) {
        let all = [&mut l.space, &mut l.soft_space, &mut l.inodes, &mut l.soft_inodes];
        for (n, (limit, to)) in all.into_iter().zip(self.limits).enumerate() {
            if self.which & 1 << n != 0 {
                *limit = Some(to).filter(|n| *n > 0);
            }
        }
        if self.which & SET_GRACE != 0 {
            l.grace = Duration::from_secs(self.grace.into());
        }
    }

    /// Which [`QuotaCall`], as its number.
    pub fn asks(&self) -> u32 {
        self.call & !if self.kind == GROUP { OF_GROUP } else { 0 }
    }

    /// The owner behind which [`QuotaCall::Next`] asks, `None`: the first. Older clients tell only how many they know: to find
    /// their next one takes as much work as there are owners, each time.
    ///
    /// # Errors
    /// What to say to such a client.
    pub fn after(&self) -> Result<Option<QuotaOwner>, &'static str> {
        match (self.which, self.kind, self.id) {
            (0, ..) => Ok(None),
            // the first of all where it is there
            (2.., USER, 0) => {
                Err("the program that asks is older than the server: use the server's `braidfs quota report`")
            }
            (_, USER, n) => Ok(Some(QuotaOwner::User(n))),
            (_, GROUP, n) => Ok(Some(QuotaOwner::Group(n))),
            (_, PROJECT, n) => Ok(Some(QuotaOwner::Project(n))),
            _ => Err("an unknown kind of owner"),
        }
    }

    /// The answer.
    pub fn tell(&mut self, q: &Quota) {
        (self.kind, self.id) = match q.owner {
            QuotaOwner::User(n) => (USER, n),
            QuotaOwner::Group(n) => (GROUP, n),
            QuotaOwner::Project(n) => (PROJECT, n),
        };
        let l = &q.limits;
        self.limits = [l.space, l.soft_space, l.inodes, l.soft_inodes].map(|n| n.unwrap_or(0));
        self.grace = u32::try_from(l.grace.as_secs()).unwrap_or(u32::MAX);
        (self.used, self.over) = ([q.used, q.inodes], q.grace_is_over.into());
        self.since = [q.space_exceeded_since, q.inodes_exceeded_since].map(|n| n.unwrap_or(0));
        self.directory = q.directory.map_or(0, |d| d.0);
    }

    fn quota(&self) -> Quota {
        let some = |n: u64| Some(n).filter(|n| *n > 0);
        let [space, soft_space, inodes, soft_inodes] = self.limits.map(some);
        Quota {
            owner: match self.kind {
                USER => QuotaOwner::User(self.id),
                GROUP => QuotaOwner::Group(self.id),
                _ => QuotaOwner::Project(self.id),
            },
            directory: some(self.directory).map(braidfs::InodeNo),
            limits: QuotaLimits {
                space,
                soft_space,
                inodes,
                soft_inodes,
                grace: Duration::from_secs(self.grace.into()),
            },
            used: self.used[0],
            inodes: self.used[1],
            space_exceeded_since: some(self.since[0]),
            inodes_exceeded_since: some(self.since[1]),
            grace_is_over: self.over == 1,
        }
    }
}

fn call(dir: &File, call: QuotaCall, of: QuotaSubject, mut arg: QuotaArg) -> io::Result<Quota> {
    arg.call = call as u32;
    (arg.kind, arg.id) = match of {
        QuotaSubject::User(n) => (USER, n),
        QuotaSubject::Group(n) => (GROUP, n),
        QuotaSubject::Directory => (DIRECTORY, 0),
        QuotaSubject::Project(n) => (PROJECT, n),
    };
    if arg.kind == GROUP {
        arg.call |= OF_GROUP;
    }
    ask(dir, QUOTA, &mut arg)?;
    match arg.errno as i32 {
        0 => Ok(arg.quota()),
        n @ (libc::EROFS | libc::ENOENT) => Err(io::Error::from_raw_os_error(n)),
        _ => Err(io::Error::other(text_of(&arg.text))),
    }
}

/// Changes limits of a user or group of the volume that `dir` lies in, or of the directory that is open.
///
/// # Errors
/// EPERM: only root may, and the user of the server. ENOTTY: the server is too old. EROFS, ENOENT. Where the volume refuses,
/// what it says to it, as the error's text.
pub fn quota_set(dir: &File, of: QuotaSubject, change: &QuotaChange) -> io::Result<Quota> {
    let mut arg = QuotaArg::new_zeroed();
    for (n, (limit, to)) in arg.limits.iter_mut().zip(change.limits).enumerate() {
        if let Some(to) = to {
            arg.which |= 1 << n;
            *limit = to.unwrap_or(0);
        }
    }
    if let Some(grace) = change.grace {
        arg.which |= SET_GRACE;
        arg.grace = u32::try_from(grace.as_secs()).unwrap_or(u32::MAX);
    }
    call(dir, QuotaCall::Set, of, arg)
}

/// Limits, and what is used.
///
/// # Errors
/// As [`quota_set`].
pub fn quota_show(dir: &File, of: QuotaSubject) -> io::Result<Quota> {
    call(dir, QuotaCall::Show, of, QuotaArg::new_zeroed())
}

/// All owners that have limits or use anything.
///
/// # Errors
/// As [`quota_set`].
pub fn quotas(dir: &File) -> io::Result<Vec<Quota>> {
    let mut all: Vec<Quota> = Vec::new();
    loop {
        let behind = match all.last().map(|q| q.owner) {
            Some(QuotaOwner::Project(n)) => QuotaSubject::Project(n),
            Some(QuotaOwner::User(n)) => QuotaSubject::User(n),
            Some(QuotaOwner::Group(n)) => QuotaSubject::Group(n),
            None => QuotaSubject::User(0),
        };
        let arg = QuotaArg { which: all.len() as u32, ..QuotaArg::new_zeroed() };
        match call(dir, QuotaCall::Next, behind, arg) {
            Ok(q) => all.push(q),
            Err(e) if e.raw_os_error() == Some(libc::ENOENT) => return Ok(all),
            Err(e) => return Err(e),
        }
    }
}

/// Takes the limits away.
///
/// # Errors
/// As [`quota_set`].
pub fn quota_remove(dir: &File, of: QuotaSubject) -> io::Result<()> {
    call(dir, QuotaCall::Remove, of, QuotaArg::new_zeroed()).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Where a list goes on: by the owner that was last. Who only counts, as older programs do, would get the same one again
    /// and again.
    #[test]
    fn a_list_goes_on_behind_an_owner() {
        let after = |which, kind, id| QuotaArg { which, kind, id, ..QuotaArg::new_zeroed() }.after();
        assert_eq!(after(0, USER, 0), Ok(None));
        assert_eq!(after(1, USER, 0), Ok(Some(QuotaOwner::User(0))));
        assert_eq!(after(7, USER, 1000), Ok(Some(QuotaOwner::User(1000))));
        assert_eq!(after(8, GROUP, 0), Ok(Some(QuotaOwner::Group(0))));
        assert_eq!(after(9, PROJECT, 3), Ok(Some(QuotaOwner::Project(3))));
        assert!(after(2, USER, 0).is_err() && after(1, 77, 1).is_err());
    }
}
