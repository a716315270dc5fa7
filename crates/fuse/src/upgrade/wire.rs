//! Messages between the two processes: JSON, one packet each, with descriptors beside it.
//!
//! *Hello* must never change its form: it is what programs of all versions understand of each other. What else is unknown to
//! one of them is an error, and the old process goes on.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// Largest message; what is larger goes in a file.
const MESSAGE_BYTES: usize = 64 << 10;
/// What is told of a process that has ended.
pub const ENDED: &str = "it ended without a word";
/// The kernel's SCM_MAX_FD.
pub(crate) const FDS_MAX: usize = 253;

/// What the new process says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) enum ToOld {
    /// First of all: which versions of the record it understands.
    Hello {
        oldest: u32,
        newest: u32,
        /// Version of the new program, for messages.
        program: String,
    },
    /// It can take over what it was offered.
    Willing,
    /// It cannot, and ends.
    Refused(String),
    /// It has the volume, and serves when it is told to.
    Mounted,
    /// It was told to, and begins.
    Going,
}

/// What the old process says.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) enum ToNew {
    Offer(super::record::Offer),
    Take(super::record::Take),
    Go,
}

/// One end of the socket.
#[derive(Debug)]
pub(crate) struct Peer(OwnedFd);

impl Peer {
    /// An end, and the descriptor of the other one.
    pub fn pair() -> io::Result<(Self, OwnedFd)> {
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        Ok((Self(ours), theirs))
    }

    pub fn of(fd: OwnedFd) -> Self {
        Self(fd)
    }

    /// # Errors
    /// The other process is gone; too many descriptors.
    pub fn send(&self, message: &impl Serialize, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let text = serde_json::to_vec(message)?;
        if text.len() > MESSAGE_BYTES || fds.len() > FDS_MAX {
            return Err(io::Error::other("a message of the hand-over is too large: too many devices"));
        }
        let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(fds));
        }
        loop {
            match sendmsg(&self.0, &[io::IoSlice::new(&text)], &mut control, SendFlags::NOSIGNAL) {
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// [`Self::send`] to the new process. One that has ended meanwhile may have said why.
    ///
    /// # Errors
    /// What it refused with, or that it said nothing; else as there.
    pub fn tell_new(&self, message: &ToNew, fds: &[BorrowedFd<'_>]) -> Result<(), String> {
        self.send(message, fds).map_err(|e| match self.receive(Some(Duration::ZERO)) {
            Ok(Some((ToOld::Refused(why), _))) => why,
            Ok(None) => ENDED.into(),
            _ => e.to_string(),
        })
    }

    /// The next message; `None`: the other process has closed its end. `within`: it is waited for at most so long.
    ///
    /// # Errors
    /// `TimedOut`; what came is no such message.
    pub fn receive<T: DeserializeOwned>(&self, within: Option<Duration>) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
        self.await_message(within)?;
        let mut text = vec![0; MESSAGE_BYTES];
        let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let got = loop {
            match recvmsg(&self.0, &mut [io::IoSliceMut::new(&mut text)], &mut control, RecvFlags::CMSG_CLOEXEC) {
                // of the other end, closed with something unread in it, this is told once; behind it comes what it said before
                Err(Errno::INTR | Errno::CONNRESET) => {}
                got => break got?,
            }
        };
        let mut fds = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(more) = message {
                fds.extend(more);
            }
        }
        if got.bytes == 0 {
            return Ok(None);
        }
        if got.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
            return Err(io::Error::other("a message of the hand-over came in part"));
        }
        match serde_json::from_slice(&text[..got.bytes]) {
            Ok(message) => Ok(Some((message, fds))),
            Err(e) => Err(io::Error::new(io::ErrorKind::InvalidData, format!("not understood: {e}"))),
        }
    }

    fn await_message(&self, within: Option<Duration>) -> io::Result<()> {
        let Some(within) = within else { return Ok(()) };
        let end = Instant::now() + within;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let wait = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
            match poll(&mut [PollFd::new(&self.0, PollFlags::IN)], Some(&wait)) {
                Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// Waits until the other process is gone.
    pub fn await_end(&self) {
        // what it may say yet is of no use
        while !matches!(self.receive::<serde_json::Value>(None), Ok(None)) {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::{Read, Seek, Write};
    use std::os::fd::AsFd;

    #[test]
    fn messages_bring_descriptors() {
        let (ours, theirs) = Peer::pair().unwrap();
        let theirs = Peer::of(theirs);
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"content").unwrap();
        ours.send(&ToOld::Willing, &[file.as_fd(), file.as_fd()]).unwrap();
        ours.send(&ToOld::Mounted, &[]).unwrap();
        let (said, fds) = theirs.receive::<ToOld>(Some(Duration::from_secs(5))).unwrap().unwrap();
        assert_eq!((said, fds.len()), (ToOld::Willing, 2));
        let mut got = File::from(fds.into_iter().next().unwrap());
        let mut text = String::new();
        got.rewind().unwrap();
        got.read_to_string(&mut text).unwrap();
        assert_eq!(text, "content");
        assert_eq!(theirs.receive::<ToOld>(None).unwrap().unwrap().0, ToOld::Mounted);
        let late = theirs.receive::<ToOld>(Some(Duration::from_millis(1))).unwrap_err();
        assert_eq!(late.kind(), io::ErrorKind::TimedOut);
        drop(ours);
        assert!(theirs.receive::<ToOld>(Some(Duration::from_secs(5))).unwrap().is_none());
        assert!(theirs.send(&ToOld::Willing, &[]).is_err());
    }

    /// Whether it has ended when it is told, or ends without having heard.
    #[test]
    fn why_one_has_ended_is_heard() {
        for told_first in [false, true] {
            let (ours, theirs) = Peer::pair().unwrap();
            let theirs = Peer::of(theirs);
            let told = if told_first { ours.tell_new(&ToNew::Go, &[]) } else { Ok(()) };
            theirs.send(&ToOld::Refused("no room".into()), &[]).unwrap();
            drop(theirs);
            if told_first {
                told.unwrap();
                let (said, _) = ours.receive::<ToOld>(Some(Duration::from_secs(5))).unwrap().unwrap();
                assert_eq!(said, ToOld::Refused("no room".into()));
            } else {
                assert_eq!(ours.tell_new(&ToNew::Go, &[]).unwrap_err(), "no room");
            }
            assert!(ours.receive::<ToOld>(Some(Duration::from_secs(5))).unwrap().is_none());
            assert_eq!(ours.tell_new(&ToNew::Go, &[]).unwrap_err(), ENDED);
        }
    }

    #[test]
    fn hello_keeps_its_form() {
        let hello = ToOld::Hello { oldest: 1, newest: 3, program: "0.2".into() };
        let text = r#"{"Hello":{"oldest":1,"newest":3,"program":"0.2"}}"#;
        assert_eq!(serde_json::to_string(&hello).unwrap(), text);
        assert_eq!(serde_json::from_str::<ToOld>(text).unwrap(), hello);
    }

    #[test]
    fn what_is_unknown_is_an_error() {
        let (ours, theirs) = Peer::pair().unwrap();
        let theirs = Peer::of(theirs);
        ours.send(&serde_json::json!({"Sorry": 1}), &[]).unwrap();
        assert_eq!(theirs.receive::<ToOld>(None).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}
