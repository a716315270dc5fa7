//! What stays on `/dev/fuse` while rings carry the requests: FORGET and INTERRUPT.
//!
//! They are fetched every [`PAUSE`] while they come, all that wait at once (the kernel packs FORGETs into one batch): a
//! reader that sleeps in `read` would be woken for each of them, beside the process that unlinks. A request that depends
//! on them wakes the reader ([`crate::lookups`]).

use crate::channel::{Channel, Received};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use std::io;
use std::time::Duration;

/// From one look to the next.
const PAUSE: Duration = Duration::from_millis(10);
/// Looks in vain until the reader sleeps for as long as nothing comes.
const PATIENCE: u32 = 50;

/// Hands frames to `serve` until the mount is gone.
///
/// # Errors
/// Of the descriptor.
pub(crate) fn read_forgets(channel: &Channel, buf: &mut [u8], mut serve: impl FnMut(&[u8])) -> io::Result<()> {
    channel.set_nonblocking()?;
    let mut vain = 0;
    loop {
        match channel.try_receive(buf)? {
            Received::Gone => return Ok(()),
            Received::Bytes(0) => {}
            Received::Bytes(n) => {
                vain = 0;
                serve(&buf[..n]);
            }
            Received::Nothing if vain < PATIENCE => {
                vain += 1;
                std::thread::park_timeout(PAUSE);
            }
            Received::Nothing => {
                match poll(&mut [PollFd::new(channel, PollFlags::IN)], None) {
                    Ok(_) | Err(Errno::INTR) => {}
                    Err(e) => return Err(e.into()),
                }
                vain = 0;
                std::thread::park_timeout(PAUSE);
            }
        }
    }
}
