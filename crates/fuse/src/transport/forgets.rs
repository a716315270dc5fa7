//! What stays on `/dev/fuse` while rings carry the requests: FORGET and INTERRUPT.
//!
//! They are fetched every [`PAUSE`] while they come, all that wait at once (the kernel packs FORGETs into one batch): a
//! reader that sleeps in `read` would be woken for each of them, beside the process that unlinks. A request that depends
//! on them fetches them itself ([`crate::lookups`]).

use crate::channel::{Channel, Received};
use braidfs_sync::{Mutex, rank};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// From one look to the next.
const PAUSE: Duration = Duration::from_millis(10);
/// Looks in vain until the reader sleeps for as long as nothing comes.
const PATIENCE: u32 = 50;

/// The device as far as it has FORGETs; for all threads. `C` is what they count in.
#[derive(Debug)]
pub(crate) struct Forgets<C> {
    channel: Arc<Channel>,
    /// Locked from the fetching of a frame until it has been served: who has it knows that nothing is under way. What a
    /// frame is read into, and what it is counted in.
    state: Mutex<(Box<[u8]>, C), rank::Forgets>,
}

impl<C> Forgets<C> {
    /// `bytes`: of the largest frame.
    ///
    /// # Errors
    /// Of the descriptor, which does not block any more from now on.
    pub fn new(channel: Arc<Channel>, bytes: usize, counts: C) -> io::Result<Self> {
        channel.set_nonblocking()?;
        Ok(Self { channel, state: Mutex::new((vec![0; bytes].into_boxed_slice(), counts)) })
    }

    pub fn channel(&self) -> &Arc<Channel> {
        &self.channel
    }

    /// Has all frames served that the kernel had queued before, also those that another thread has fetched. The number
    /// of frames; `None`: the mount is gone.
    ///
    /// # Errors
    /// Of the descriptor.
    pub fn take(&self, serve: impl FnMut(&[u8], &C)) -> io::Result<Option<usize>> {
        self.drain(&mut self.state.lock(), serve)
    }

    /// [`Self::take`], where no other thread is at it: else nothing.
    pub fn try_take(&self, serve: impl FnMut(&[u8], &C)) -> Option<io::Result<Option<usize>>> {
        Some(self.drain(&mut *self.state.try_lock()?, serve))
    }

    fn drain(&self, state: &mut (Box<[u8]>, C), mut serve: impl FnMut(&[u8], &C)) -> io::Result<Option<usize>> {
        let (buf, counts) = state;
        let mut frames = 0;
        loop {
            match self.channel.try_receive(buf)? {
                Received::Gone => return Ok(None),
                Received::Nothing => return Ok(Some(frames)),
                Received::Bytes(0) => {}
                Received::Bytes(n) => {
                    frames += 1;
                    serve(&buf[..n], counts);
                }
            }
        }
    }

    /// Has `take` called as often as is good, until it says `None`: the mount is gone.
    ///
    /// # Errors
    /// Of the descriptor.
    pub fn watch(&self, mut take: impl FnMut() -> io::Result<Option<usize>>) -> io::Result<()> {
        let mut vain = 0;
        while let Some(frames) = take()? {
            vain = if frames > 0 { 0 } else { vain + 1 };
            if vain > PATIENCE {
                match poll(&mut [PollFd::new(&self.channel, PollFlags::IN)], None) {
                    Ok(_) | Err(Errno::INTR) => {}
                    Err(e) => return Err(e.into()),
                }
                vain = 0;
            }
            std::thread::sleep(PAUSE);
        }
        Ok(())
    }
}
