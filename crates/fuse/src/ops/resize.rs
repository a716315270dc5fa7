//! Another size for the mounted volume, see [`crate::control::resize`].
//!
//! A smaller one only where the kernel holds no writes back that were accepted: they could find no room any more.
//!
//! It waits for whoever takes or empties groups, and for the device ([`super::aside`]).

use crate::abi;
use crate::control::{ResizeArg, ResizeTo};
use crate::fs::{BraidFs, Context};
use crate::ops::aside::short;
use crate::profile::Cache;
use crate::request::{Handled, Request};
use crate::requester;
use braidfs::{Error, NewSize, Resized, Volume};
use rustix::io::Errno;
use zerocopy::FromBytes;

/// Why a mount with a writeback cache does not become smaller.
const HELD_BACK: &str = "mounted, a volume becomes smaller only with `-o cache=through`, since the kernel's writeback cache \
    may hold what was accepted for room that would go: unmount it first";

impl BraidFs {
    /// Only root may, and whose the server is: it extends files that others need not be allowed to write.
    pub(super) fn resize_ioctl(
        &self,
        req: &Request<'_>,
        arg: &abi::IoctlIn,
        input: &[u8],
        cx: &Context<'_>,
    ) -> Handled {
        requester::of_server(req)?;
        let (mut said, _) = ResizeArg::read_from_prefix(input).map_err(|_| Errno::INVAL)?;
        let size = understand(said.to, said.bytes)?;
        let held_back = self.profile.cache == Cache::Back;
        self.ioctl_aside("fuse-resize", arg, cx, move |vol| {
            match resized(&vol, size, held_back, &|_, _| true) {
                Ok(r) => {
                    (said.before, said.after, said.volume, said.groups) = (r.before, r.after, r.volume, r.groups);
                    said.errno = 0;
                }
                // the reason goes along: a number would not tell how much there could be
                Err(e) => {
                    said.errno = e.errno().unsigned_abs();
                    said.text = short(&e.to_string());
                }
            }
            Ok(said)
        })
    }
}

/// Another size for the volume; `held_back`: the kernel may hold back what was written. `progress` says whether to go on.
pub(super) fn resized(
    vol: &Volume,
    size: NewSize,
    held_back: bool,
    progress: &dyn Fn(u64, u64) -> bool,
) -> Result<Resized, Error> {
    if !held_back {
        return vol.resize_while(size, progress);
    }
    // asked before, it could become a smaller one where somebody else makes the volume larger meanwhile
    vol.grow(size).map_err(|e| match e {
        Error::Size(_) if vol.is_smaller(size) => Error::Size(HELD_BACK.into()),
        e => e,
    })
}

/// What is asked for, by the number of a [`ResizeTo`].
pub(super) fn understand(to: u32, bytes: u64) -> Result<NewSize, Errno> {
    match to {
        t if t == ResizeTo::Device as u32 => Ok(NewSize::Device),
        t if t == ResizeTo::Bytes as u32 => Ok(NewSize::Bytes(bytes)),
        t if t == ResizeTo::More as u32 => Ok(NewSize::More(bytes)),
        _ => Err(Errno::INVAL),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_is_understood_or_refused() {
        let ask = understand;
        assert_eq!(ask(1, 7), Ok(NewSize::Device));
        assert_eq!(ask(2, 7), Ok(NewSize::Bytes(7)));
        assert_eq!(ask(3, 7), Ok(NewSize::More(7)));
        assert_eq!((ask(0, 7), ask(4, 7)), (Err(Errno::INVAL), Err(Errno::INVAL)));
    }
}
