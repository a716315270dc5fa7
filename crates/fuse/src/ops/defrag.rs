//! Files in pieces, looked at and made whole, see [`crate::control::defrag_step`]. A step reads
//! and writes some MiB and commits ([`super::aside`]).

use crate::abi;
use crate::control::{DefragArg, DefragCall};
use crate::fs::{BraidFs, Context};
use crate::request::{Handled, Request};
use crate::requester;
use braidfs::{InodeNo, Volume};
use rustix::io::Errno;
use zerocopy::FromBytes;

impl BraidFs {
    /// Only root may, and whose the server is: where any file lies, and how much the device is asked to do, is theirs.
    pub(super) fn defrag_ioctl(
        &self,
        req: &Request<'_>,
        arg: &abi::IoctlIn,
        input: &[u8],
        cx: &Context<'_>,
    ) -> Handled {
        requester::of_server(req)?;
        let (mut said, _) = DefragArg::read_from_prefix(input).map_err(|_| Errno::INVAL)?;
        let call = match said.call {
            c if c == DefragCall::Look as u32 => DefragCall::Look,
            c if c == DefragCall::Step as u32 => DefragCall::Step,
            _ => return Err(Errno::INVAL),
        };
        self.ioctl_aside("fuse-defrag", arg, cx, move |vol| answer(&vol, call, &mut said).map(|()| said))
    }
}

fn answer(vol: &Volume, call: DefragCall, said: &mut DefragArg) -> Result<(), Errno> {
    let ino = InodeNo(said.ino);
    let failed = |e: braidfs::Error| crate::fs::errno(e);
    match call {
        DefragCall::Look => {
            let p = vol.pieces(ino).map_err(failed)?;
            (said.blocks, said.pieces, said.least, said.stays) = (p.blocks, p.pieces, p.least, p.stays.into());
        }
        DefragCall::Step => {
            let done = vol.defragment(ino, said.from).map_err(failed)?;
            (said.moved, said.next) = (done.moved, done.next.unwrap_or(u64::MAX));
        }
    }
    Ok(())
}
