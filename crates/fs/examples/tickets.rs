//! Syncs that are under way at the same time, in one thread: each gives a ticket at once, and they share flushes of the
//! device. A ticket is waited for, calls a function at its end, or is awaited.
//!
//!     cargo run -p braidfs-fs --example tickets

use braidfs_fs::{Fs, Options};
use std::error::Error as StdError;
use std::pin::pin;
use std::sync::{Arc, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;

const FILES: usize = 16;

/// Waits for all of them, after all have been started.
fn wait(fs: &Fs) -> braidfs_fs::Result<()> {
    let mut tickets = Vec::new();
    for i in 0..FILES {
        let file = fs.create(format!("waited/{i}"))?;
        file.write_all_at(b"durable when the ticket says so", 0)?;
        // the file may be closed and changed meanwhile: the ticket is for what was there before
        tickets.push(file.sync_start(false));
    }
    for ticket in tickets {
        ticket.wait()?;
    }
    Ok(())
}

/// Has them call a function, here one that sends the number of the file to whoever collects them. It runs on a thread of the
/// volume, or at once: it does little, and waits for nothing.
fn call(fs: &Fs) -> braidfs_fs::Result<Vec<usize>> {
    let (send, done) = mpsc::channel();
    for i in 0..FILES {
        let path = format!("called/{i}");
        fs.write(&path, b"durable when the function is called")?;
        let send = send.clone();
        // nobody listens any more where another one has failed
        let tell = move |result| send.send((i, result)).unwrap_or_default();
        fs.open_read(&path)?.sync_start(true).on_done(Box::new(tell));
    }
    drop(send);
    done.into_iter().map(|(i, result)| Ok(result.map(|()| i)?)).collect()
}

/// As a task of an executor: a ticket is a future.
async fn save(fs: &Fs, path: &str) -> braidfs_fs::Result<u64> {
    fs.write(path, b"durable when the task goes on")?;
    let file = fs.open_read(path)?;
    file.sync_start(false).await?;
    Ok(file.metadata()?.len())
}

/// The smallest executor: this thread sleeps until it is woken.
struct Sleeper(Thread);

impl Wake for Sleeper {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

fn block_on<T>(task: impl Future<Output = T>) -> T {
    let waker = Waker::from(Arc::new(Sleeper(std::thread::current())));
    let (mut task, mut cx) = (pin!(task), Context::from_waker(&waker));
    loop {
        match task.as_mut().poll(&mut cx) {
            Poll::Ready(done) => return done,
            Poll::Pending => std::thread::park(),
        }
    }
}

/// What is printed, one string a line.
pub fn run() -> Result<Vec<String>, Box<dyn StdError>> {
    let fs = Fs::in_memory(64 << 20, &Options::default())?;
    fs.create_dir("waited")?;
    fs.create_dir("called")?;
    wait(&fs)?;
    let called = call(&fs)?;
    let bytes = block_on(save(&fs, "awaited"))?;
    fs.sync_start().wait()?; // the whole volume
    fs.close()?;
    Ok(vec![format!("{FILES} waited for"), format!("{} called", called.len()), format!("{bytes} bytes awaited")])
}

#[allow(dead_code)] // a test calls `run`
fn main() -> Result<(), Box<dyn StdError>> {
    for line in run()? {
        println!("{line}");
    }
    Ok(())
}
