//! Threads that run strictly in turn: each does what it is told, and who tells it waits for the answer.

use crate::{Error, Result};
use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

/// The thread of one virtual CPU, which takes orders of type `O`.
#[derive(Debug)]
pub struct Member<O> {
    orders: SyncSender<O>,
    answers: Receiver<Result<u64>>,
    thread: JoinHandle<()>,
}

impl<O: Send + 'static> Member<O> {
    /// `make` makes, on the new thread, what obeys there.
    ///
    /// # Errors
    /// There is no thread more.
    pub fn start<F: FnMut(O) -> Result<u64>>(make: impl FnOnce() -> F + Send + 'static) -> Result<Self> {
        // these queues allocate nothing when they are used
        let (orders, incoming) = sync_channel(1);
        let (outgoing, answers) = sync_channel(1);
        let work = move || {
            let mut obey = make();
            while let Ok(order) = incoming.recv() {
                if outgoing.send(obey(order)).is_err() {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().spawn(work).map_err(|e| Error::io(Path::new("a thread"), e))?;
        Ok(Self { orders, answers, thread })
    }
    /// Has it do something; its answer.
    ///
    /// # Errors
    /// What it answers, or [`Error::Died`].
    pub fn tell(&self, order: O) -> Result<u64> {
        self.orders.send(order).map_err(|_| Error::Died)?;
        self.answers.recv().map_err(|_| Error::Died)?
    }
    /// Waits for its end.
    ///
    /// # Errors
    /// [`Error::Died`].
    pub fn end(self) -> Result<()> {
        let Self { orders, answers, thread } = self;
        drop((orders, answers));
        thread.join().map_err(|_| Error::Died)
    }
}
