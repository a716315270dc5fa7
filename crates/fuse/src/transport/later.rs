//! Answers that do not come from the thread that received the request.

use super::mailbox::Ticket;
use crate::channel::Channel;
use crate::counters::Timing;
use crate::fs::Context;
use crate::request::Answer;
use rustix::io::Errno;
use std::sync::Arc;

/// The duty to reply to one request, apart from the thread that received it. Dropped without a reply, it answers EIO,
/// so that no process waits forever.
#[derive(Debug)]
pub(crate) struct Later {
    channel: Arc<Channel>,
    unique: u64,
    /// Of a request that came through a ring.
    ticket: Option<Ticket>,
    /// Where its answer is counted.
    timing: Option<Timing>,
    /// Nothing left to do.
    done: bool,
}

impl Later {
    /// For the request `unique`, which came from the device or in the entry that `ticket` names.
    pub fn new(channel: &Arc<Channel>, unique: u64, ticket: Option<Ticket>) -> Self {
        Self { channel: channel.clone(), unique, ticket, timing: None, done: false }
    }

    /// It is counted there, when it is answered.
    pub fn counted(self, timing: Option<Timing>) -> Self {
        // A value that has a `drop` cannot be taken apart.
        let mut counted = self;
        counted.timing = timing;
        counted
    }

    /// It is answered, or about to be, maybe with an error.
    fn answered(&mut self, failed: bool) {
        self.done = true;
        if let Some(timing) = self.timing.take() {
            timing.answered(failed);
        }
    }

    /// Replies success without a body, or an error.
    pub fn done(mut self, result: Result<(), Errno>) {
        self.answered(result.is_err());
        match (&self.ticket, result) {
            (Some(ticket), result) => ticket.post(result.map(|()| Vec::new())),
            (None, Ok(())) => self.channel.reply_empty(self.unique),
            (None, Err(e)) => self.channel.reply_error(self.unique, e),
        }
    }

    /// Replies with a body.
    pub fn answer(self, answer: &mut Answer) {
        self.try_answer(answer);
    }

    /// [`Self::answer`]; whether the kernel took it. (Through a ring it takes all but when the mount ends.)
    pub fn try_answer(mut self, answer: &mut Answer) -> bool {
        self.answered(false);
        match &self.ticket {
            Some(ticket) => ticket.post(Ok(answer.body().to_vec())),
            None => return self.channel.reply(self.unique, answer),
        }
        true
    }

    /// Where the answer goes, and to which request: for another process that has this descriptor, too. Not through a ring.
    pub fn place(&self) -> Option<(&Arc<Channel>, u64)> {
        self.ticket.is_none().then_some((&self.channel, self.unique))
    }

    /// Somebody else has the duty by now.
    pub fn taken(mut self) {
        self.done = true;
    }

    /// For a handler that answers the request after all.
    pub fn context(&self) -> Context<'_> {
        Context::new(&self.channel, self.unique, self.ticket.as_ref())
            .counted(self.timing.as_ref().map(Timing::counted))
    }

    /// The channel, for notifications.
    pub fn channel(&self) -> &Arc<Channel> {
        &self.channel
    }
}

impl Drop for Later {
    fn drop(&mut self) {
        if !self.done {
            self.answered(true);
            match &self.ticket {
                Some(ticket) => ticket.post(Err(Errno::IO)),
                None => self.channel.reply_error(self.unique, Errno::IO),
            }
        }
    }
}
