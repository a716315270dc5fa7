//! Mail delivery: a replay of the file operations of Exim with `split_spool_directory`, without its processes, DNS and
//! parsing. What the replay has, per message:
//!
//! - reception: `input/X/ID-D` created and written, the envelope written to a temporary name and renamed to `ID-H`,
//!   `msglog/X/ID` created and written, a line for `log/mainlog`;
//! - delivery: `-D` and `-H` opened and read, the journal `ID-J` created and appended to, the message appended to the
//!   user's mailbox (one per worker and user), a line in `msglog` and in `mainlog`;
//! - completion: journal, msglog, `-D` and `-H` removed, a last line in `mainlog`.
//!
//! No fsync, as the paper's modified Exim. Mailboxes are locked by nobody: each worker has its own users.

use crate::Result;
use crate::error::On;
use crate::fs::{Fs, OpenHow};
use crate::names::{Name, Rng};
use crate::worker::{Ctx, Load, Step};

/// Spool directories below `input` and `msglog`: one per letter and digit of an ID.
const SPLIT: u64 = 62;
/// Users of each worker.
const USERS: u64 = 32;
/// Bytes of a message's body, and of its envelope.
const BODY: usize = 2000;
const ENVELOPE: usize = 900;
const LINE: usize = 130;
/// A mailbox that has grown to this is emptied: a user has fetched mail.
const MAILBOX_MAX: u64 = 4 << 20;

const APPEND: OpenHow = OpenHow { append: true, ..OpenHow::CREATE };

/// One delivering process.
pub struct Mail<F: Fs> {
    a: Name,
    b: Name,
    rng: Rng,
    message: u64,
    boxes: Vec<u64>,
    log: Option<F::File>,
    text: Vec<u8>,
}

impl<F: Fs> Mail<F> {
    /// For this worker.
    pub fn new(c: &Ctx<F>) -> Self {
        Self {
            a: c.name(),
            b: c.name(),
            rng: c.rng(),
            message: 0,
            boxes: vec![0; USERS as usize],
            log: None,
            text: vec![b'm'; BODY + ENVELOPE],
        }
    }

    fn log(&self, c: &Ctx<F>) -> Result<()> {
        match &self.log {
            Some(log) => c.fs.append(log, &self.text[..LINE]).on("append", c"log/mainlog"),
            None => Ok(()),
        }
    }

    fn receive(&mut self, c: &Ctx<F>, split: u64) -> Result<()> {
        let (w, n) = (c.id, self.message);
        let path = self.a.set(format_args!("input/{split}/{w}-{n}-D"));
        let data = c.fs.open(path, OpenHow::FRESH).on("open", path)?;
        c.fs.append(&data, &self.text[..BODY]).on("write", path)?;
        let path = self.a.set(format_args!("input/{split}/hdr.{w}-{n}"));
        let envelope = c.fs.open(path, OpenHow::FRESH).on("open", path)?;
        c.fs.append(&envelope, &self.text[..ENVELOPE]).on("write", path)?;
        drop(envelope);
        let to = self.b.set(format_args!("input/{split}/{w}-{n}-H"));
        c.fs.rename(path, to).on("rename", path)?;
        let path = self.a.set(format_args!("msglog/{split}/{w}-{n}"));
        let log = c.fs.open(path, APPEND).on("open", path)?;
        c.fs.append(&log, &self.text[..LINE]).on("write", path)?;
        self.log(c)
    }

    fn deliver(&mut self, c: &Ctx<F>, split: u64) -> Result<()> {
        let (w, n) = (c.id, self.message);
        for part in ["D", "H"] {
            let path = self.a.set(format_args!("input/{split}/{w}-{n}-{part}"));
            let file = c.fs.open(path, OpenHow::WRITE).on("open", path)?;
            c.fs.read(&file, 0, &mut self.text).on("read", path)?;
        }
        let path = self.a.set(format_args!("input/{split}/{w}-{n}-J"));
        let journal = c.fs.open(path, APPEND).on("open", path)?;
        let user = self.rng.below(USERS);
        let path = self.a.set(format_args!("mail/{w}/{user}"));
        let mailbox = c.fs.open(path, APPEND).on("open", path)?;
        c.fs.append(&mailbox, &self.text).on("append", path)?;
        let size = &mut self.boxes[user as usize];
        *size += self.text.len() as u64;
        if *size > MAILBOX_MAX {
            c.fs.truncate(&mailbox, 0).on("ftruncate", path)?;
            *size = 0;
        }
        c.fs.append(&journal, &self.text[..LINE / 4]).on("append", c"the journal")?;
        let path = self.a.set(format_args!("msglog/{split}/{w}-{n}"));
        let log = c.fs.open(path, APPEND).on("open", path)?;
        c.fs.append(&log, &self.text[..LINE]).on("append", path)?;
        self.log(c)
    }

    fn complete(&mut self, c: &Ctx<F>, split: u64) -> Result<()> {
        let (w, n) = (c.id, self.message);
        let path = self.a.set(format_args!("msglog/{split}/{w}-{n}"));
        c.fs.unlink(path).on("unlink", path)?;
        for part in ["D", "H", "J"] {
            let path = self.a.set(format_args!("input/{split}/{w}-{n}-{part}"));
            c.fs.unlink(path).on("unlink", path)?;
        }
        self.log(c)
    }
}

impl<F: Fs> Load<F> for Mail<F> {
    fn share(&mut self, c: &Ctx<F>) -> Result<()> {
        for dir in ["input", "msglog", "mail", "log"] {
            let path = self.a.set(format_args!("{dir}"));
            c.fs.ensure_dir(path).on("mkdir", path)?;
        }
        for split in 0..SPLIT {
            for dir in ["input", "msglog"] {
                let path = self.a.set(format_args!("{dir}/{split}"));
                c.fs.ensure_dir(path).on("mkdir", path)?;
            }
        }
        Ok(())
    }
    fn prepare(&mut self, c: &Ctx<F>) -> Result<()> {
        let path = self.a.set(format_args!("mail/{}", c.id));
        c.fs.ensure_dir(path).on("mkdir", path)?;
        let path = self.a.set(format_args!("log/mainlog"));
        self.log = Some(c.fs.open(path, APPEND).on("open", path)?);
        Ok(())
    }
    fn step(&mut self, c: &Ctx<F>) -> Result<Step> {
        let split = self.rng.below(SPLIT);
        self.receive(c, split)?;
        self.deliver(c, split)?;
        self.complete(c, split)?;
        self.message += 1;
        Ok(Step::Did(1))
    }
}
