//! Counted look-ups: what the kernel knows, and when it has forgotten.
//!
//! Each answer that tells the kernel of an inode (LOOKUP, CREATE, MKNOD, MKDIR, SYMLINK, LINK, TMPFILE, each entry of
//! READDIRPLUS but `.` and `..`) counts as one; FORGET and BATCH_FORGET give back. Until all is given back the inode
//! stays, also without a name: a working directory that was removed, a file that is held by O_PATH. The engine keeps
//! the counts ([`Volume::hold`]); this module knows the frames.
//!
//! It is counted before the answer is sent: the kernel may use and forget the inode before the sending thread runs
//! again. An answer that the kernel refuses is taken back entry by entry ([`BraidFs::refused`]): it does not come
//! back to it. (An operation that was interrupted takes its answer all the same, `fuse_dev_do_write`; refused is what
//! comes after the connection was cut off, or was malformed.) What the kernel takes and cannot use it forgets itself
//! (`fuse_queue_forget` in `fs/fuse/dir.c`).
//!
//! Nothing is deleted by UNLINK alone, then, as long as the kernel has the inode in its cache: the FORGET that
//! follows does it. Both are in the kernel's queue before the process that unlinked goes on. So what depends on it,
//! STATFS, SYNCFS and a look-up by file handle, comes after all FORGETs that were queued before ([`BraidFs::catch_up`]).
//! With rings FORGETs stay on the device: whoever needs them fetches them there, on the thread that got the request. At
//! the device FORGETs may be overtaken by a few requests (`fuse_dev_do_read` lets up to 8 pass), and another thread may
//! serve them: a helper thread waits until the kernel's queue has been seen empty. A removed file that somebody still
//! has open holds nothing up. A request that would fail for want of space waits longer, for all removals that are about
//! to be completed.
//!
//! [`Volume::hold`]: braidfs::Volume::hold

use crate::abi::{self, op};
use crate::channel::Channel;
use crate::connections::Connection;
use crate::counters::Line;
use crate::fs::{BraidFs, Context, MAX_IO_BYTES, errno};
use crate::helpers::{Kind, Whose};
use crate::node::WireId;
use crate::request::{Answer, Handled, Outcome, Request};
use crate::transport::{Forgets, Later};
use braidfs::{Attr, Error, InodeNo};
use crossbeam::utils::CachePadded;
use rustix::io::Errno;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use zerocopy::FromBytes;

/// A removal whose FORGET has not come after this long is one that somebody holds.
const LATELY: Duration = Duration::from_millis(200);
/// How long a request waits for the end of removed inodes whose FORGET has come: that of a large file on a busy machine.
const END: Duration = Duration::from_secs(5);
/// How long a request waits for FORGETs at most.
const PATIENCE: Duration = Duration::from_millis(100);
/// From one look whether they have come to the next.
const MOMENT: Duration = Duration::from_micros(200);

/// Where FORGETs are fetched, and the line that they are counted in.
type DeviceForgets = Forgets<Arc<CachePadded<Line>>>;

impl BraidFs {
    /// Counts the inode that an answer is about to tell of; its attributes by now.
    pub(crate) fn count(&self, attr: &Attr) -> Result<Attr, Errno> {
        self.vol.hold(attr.ino, |g| g == attr.generation).map_err(errno)
    }

    /// Counts the inode that the kernel, or an NFS client, knows by this id.
    pub(crate) fn count_known(&self, id: WireId) -> Result<Attr, Errno> {
        self.vol.hold(id.ino(), |g| id.is_of(g)).map_err(|e| match e {
            Error::NotFound => Errno::STALE,
            e => errno(e),
        })
    }

    /// Takes back one count of an answer that is not given after all.
    pub(crate) fn uncount(&self, attr: &Attr) {
        // it has not come to be counted of a connection
        self.give_back(None, WireId::of(attr).0, 1);
    }

    pub(crate) fn forget(&self, req: &Request<'_>, own: Option<&Connection>) -> Handled {
        if let Ok(arg) = req.arg::<abi::ForgetIn>() {
            self.give_back(own, req.head.nodeid, arg.nlookup);
        }
        Ok(Outcome::Silent)
    }

    pub(crate) fn batch_forget(&self, req: &Request<'_>, own: Option<&Connection>) -> Handled {
        self.forgetting.fetch_add(1, Ordering::Relaxed);
        if let Ok((arg, mut rest)) = req.arg_and_rest::<abi::BatchForgetIn>() {
            for _ in 0..arg.count {
                let Ok((one, next)) = abi::ForgetOne::read_from_prefix(rest) else { break };
                self.give_back(own, one.nodeid, one.nlookup);
                rest = next;
            }
        }
        self.forgetting.fetch_sub(1, Ordering::Relaxed);
        Ok(Outcome::Silent)
    }

    /// `own`: of the tenant's connection that counted it, if it was one.
    pub(crate) fn give_back(&self, own: Option<&Connection>, nodeid: u64, times: u64) {
        let id = WireId(nodeid);
        if let Some(own) = own {
            own.take_back(nodeid, times);
        }
        if self.vol.forget(id.ino(), |g| id.is_of(g), times) {
            self.direct_writes.forget(id.ino());
            self.past_cache.forget(id.ino());
            self.flagged.set_unseen(id.ino(), false);
        }
    }

    /// The kernel did not take this answer: what was counted for it is given back, what was opened is closed.
    pub(crate) fn refused(&self, own: Option<&Connection>, opcode: u32, body: &[u8]) {
        let open = match opcode {
            op::OPEN | op::OPENDIR => Some(body),
            op::CREATE | op::TMPFILE => body.get(size_of::<abi::EntryOut>()..),
            _ => None,
        };
        if self.negotiated.opens()
            && let Some(Ok((open, _))) = open.map(abi::OpenOut::read_from_prefix)
        {
            if let Some(own) = own {
                own.closed(open.fh);
            }
            // It was there a moment ago.
            let _ = self.handles.release(open.fh);
        }
        match opcode {
            op::LOOKUP | op::CREATE | op::MKNOD | op::MKDIR | op::SYMLINK | op::LINK | op::TMPFILE => {
                if let Ok((entry, _)) = abi::EntryOut::read_from_prefix(body)
                    && entry.nodeid != 0
                {
                    self.give_back(own, entry.nodeid, 1);
                }
            }
            op::READDIRPLUS => self.unlist(own, body),
            _ => {}
        }
    }

    /// [`Self::refused`] of a listing.
    pub(crate) fn unlist(&self, own: Option<&Connection>, mut body: &[u8]) {
        while let Ok((entry, rest)) = abi::EntryOut::read_from_prefix(body)
            && let Ok((name, _)) = abi::Dirent::read_from_prefix(rest)
        {
            if entry.nodeid != 0 {
                self.give_back(own, entry.nodeid, 1);
            }
            let len =
                (size_of::<abi::EntryOut>() + size_of::<abi::Dirent>() + name.namelen as usize).next_multiple_of(8);
            body = body.get(len..).unwrap_or_default();
        }
    }

    /// Whether space or numbers are about to come back by FORGETs that are under way.
    fn forgets_due(&self) -> bool {
        self.vol.orphans_due(LATELY)
    }

    /// Handles a request, or leaves it to a helper thread where it needs what FORGETs under way will give back.
    pub(crate) fn serve_now(&self, req: &Request<'_>, out: &mut Answer, cx: &Context<'_>) -> Handled {
        // a look-up of `.` is that of a file handle: what was just removed must not come back to life by it
        let early = match req.head.opcode {
            op::STATFS | op::SYNCFS => true,
            op::LOOKUP => req.names_itself(),
            _ => false,
        };
        if early
            && self.forgets_due()
            && !self.caught_up()
            && let Some(outcome) = self.put_off(req, cx, Self::catch_up)
        {
            return Ok(outcome);
        }
        let handled = self.handle(req, out, cx);
        if !self.may_fit_later(handled) {
            return handled;
        }
        if handled == Err(Errno::DQUOT) {
            return self.serve_after_forgets(req, out, cx);
        }
        if writes_from_the_cache(req) || sets_a_size(req) {
            // Its pages are locked or under writeback, or the kernel sends none of them until it is answered: a helper thread may
            // be waiting for just these.
            return self.handle_after_forgets(req, out, cx);
        }
        match self.put_off(req, cx, |fs, _| fs.await_forgets()) {
            Some(outcome) => Ok(outcome),
            None => self.handle_after_forgets(req, out, cx),
        }
    }

    /// Whether what became of a request may be another once FORGETs have given back what was removed lately. Not whether some are due
    /// now: the last one may have been served since this request looked for room.
    fn may_fit_later(&self, handled: Handled) -> bool {
        if handled == Err(Errno::NOSPC) {
            self.refused_for_room();
        }
        matches!(handled, Err(Errno::NOSPC | Errno::DQUOT)) && self.vol.removed_lately(LATELY)
    }

    /// Handles a request again on its serving thread, once all removals have ended that are about to.
    fn handle_after_forgets(&self, req: &Request<'_>, out: &mut Answer, cx: &Context<'_>) -> Handled {
        self.await_forgets();
        out.clear();
        self.handle(req, out, cx)
    }

    /// Handles a request again that met a limit, since what its owner removed before may still count. No more than what was
    /// queued is waited for, unlike on a full volume: who asks beyond his limit all the time must not keep others waiting.
    fn serve_after_forgets(&self, req: &Request<'_>, out: &mut Answer, cx: &Context<'_>) -> Handled {
        if self.caught_up() {
            out.clear();
            return self.handle(req, out, cx);
        }
        if sets_a_size(req) {
            return self.handle_after_forgets(req, out, cx);
        }
        if writes_from_the_cache(req) {
            return Err(Errno::DQUOT);
        }
        self.put_off(req, cx, Self::catch_up).ok_or(Errno::DQUOT)
    }

    /// Has a helper thread answer a request, after it has waited as told. `None`: not this one. Of WRITEs past the cache no more
    /// wait than leave the kernel places for those of the cache, for which a helper may be waiting.
    fn put_off(&self, req: &Request<'_>, cx: &Context<'_>, wait: fn(&Self, &Channel)) -> Option<Outcome> {
        let waiting = if req.head.opcode == op::WRITE { Some(self.let_wait(true)?) } else { None };
        let (whose, req, later) = (Whose::of(req, cx.channel), req.detach(), cx.later());
        let job = move |fs: &Self| {
            let (req, _waiting) = (req.get(), waiting);
            wait(fs, later.channel());
            let _spending = fs.spend(req.node());
            let mut out = Answer::new(MAX_IO_BYTES as usize);
            let handled = fs.handle(&req, &mut out, &later.context());
            fs.answer_later(&req, handled, later, &mut out);
        };
        // A job that cannot be handed over is dropped, and answers EIO.
        self.jobs.send(Kind::Removals, whose, job);
        Some(Outcome::Deferred)
    }

    /// [`Self::serve_now`] on a helper thread, which may wait for FORGETs by itself.
    pub(crate) fn serve_on_helper(
        &self,
        req: &Request<'_>,
        out: &mut Answer,
        later: &Later,
        cx: &Context<'_>,
    ) -> Handled {
        let _spending = self.spend(req.node());
        let handled = self.handle(req, out, cx);
        if !self.may_fit_later(handled) {
            return handled;
        }
        if handled == Err(Errno::DQUOT) {
            self.catch_up(later.channel())
        } else {
            self.await_forgets()
        }
        out.clear();
        self.handle(req, out, cx)
    }

    /// Sends what became of a request that was put aside.
    pub(crate) fn answer_later(&self, req: &Request<'_>, handled: Handled, later: Later, out: &mut Answer) {
        match handled {
            Ok(Outcome::Reply) => {
                let channel = later.channel().clone();
                if !later.try_answer(out) {
                    self.refused(channel.own(), req.head.opcode, out.body());
                }
            }
            Ok(Outcome::Deferred | Outcome::Silent) => later.taken(),
            Err(e) => later.done(Err(e)),
        }
    }

    /// Serves what has come by the device, where rings carry the requests. The number of frames; `None`: the mount is gone.
    pub(crate) fn take_forgets(&self, forgets: &DeviceForgets) -> io::Result<Option<usize>> {
        forgets.take(|frame, counts| self.serve_forget(forgets.channel(), frame, counts))
    }

    fn serve_forget(&self, channel: &Channel, frame: &[u8], counts: &Line) {
        let Ok(req) = Request::parse(frame) else {
            tracing::error!(bytes = frame.len(), "the kernel sent a FUSE request that does not parse");
            return;
        };
        let (opcode, unique) = (req.head.opcode, req.head.unique);
        let begun = counts.begin(opcode);
        let serve = AssertUnwindSafe(|| match opcode {
            op::FORGET => self.forget(&req, channel.own()),
            op::BATCH_FORGET => self.batch_forget(&req, channel.own()),
            // operations are short or cannot be undone; the kernel asks no more
            op::INTERRUPT => Err(Errno::NOSYS),
            _ => {
                tracing::error!(op = op::name(opcode), "a request by the device, where rings are to carry it");
                Err(Errno::IO)
            }
        });
        let handled = catch_unwind(serve).unwrap_or_else(|_| {
            tracing::error!(op = op::name(opcode), node = %req.node(), "panic in a FUSE operation");
            Ok(Outcome::Silent)
        });
        counts.end(&begun, &handled, 0);
        if let Err(e) = handled {
            channel.reply_error(unique, e);
        }
    }

    /// On a serving thread: whether all FORGETs have been served that the kernel had queued when it sent the request at
    /// hand. That costs nobody else's time where rings carry the requests and no other thread is at it.
    fn caught_up(&self) -> bool {
        let Some(forgets) = self.forgets.get() else { return false };
        let taken = forgets.try_take(|frame, counts| self.serve_forget(forgets.channel(), frame, counts));
        matches!(taken, Some(Ok(_))) && !self.vol.orphans_ending()
    }

    /// On a helper thread: waits for what [`Self::caught_up`] asks.
    fn catch_up(&self, channel: &Channel) {
        let begin = Instant::now();
        match self.forgets.get() {
            // who watches the device says what is wrong with it
            Some(forgets) => drop(self.take_forgets(forgets)),
            None => {
                // Once empty, all FORGETs are with threads that serve them now or in a moment.
                let mut empty = 0;
                while empty < 2 && self.forgets_due() && begin.elapsed() < PATIENCE {
                    empty += u32::from(channel.is_empty() && self.forgetting.load(Ordering::Relaxed) == 0);
                    std::thread::sleep(MOMENT);
                }
            }
        }
        while self.vol.orphans_ending() && begin.elapsed() < END {
            std::thread::sleep(MOMENT);
        }
    }

    /// On a helper thread: what was removed lately, and forgotten, counts for its owners no more.
    pub(crate) fn end_removals(&self, channel: &Channel) {
        if self.vol.removed_lately(LATELY) {
            self.catch_up(channel);
        }
    }

    /// On a helper thread: [`braidfs::Volume::find_room`], where need be with what removals give back that are about to be
    /// completed, and with what other domains keep for the kernel.
    ///
    /// # Errors
    /// As there.
    pub(crate) fn find_room(&self, ino: InodeNo, want: u64, channel: &Arc<Channel>) -> braidfs::Result<u64> {
        let mut room = self.vol.find_room(ino, want)?;
        if room < want && self.vol.removed_lately(LATELY) {
            self.await_forgets();
            room = self.vol.find_room(ino, want)?;
        }
        let lent = |room| self.with_lent_room(channel, || self.vol.find_room(ino, want)).unwrap_or(Ok(room));
        if room >= want { Ok(room) } else { lent(room) }
    }

    /// Waits for all removals that are about to be completed.
    fn await_forgets(&self) {
        let begin = Instant::now();
        let goes_on = |waited| {
            if waited < PATIENCE { self.forgets_due() } else { waited < END && self.vol.orphans_ending() }
        };
        while goes_on(begin.elapsed()) {
            if let Some(forgets) = self.forgets.get() {
                let _ = self.take_forgets(forgets);
            }
            std::thread::sleep(MOMENT);
        }
    }
}

/// Whether it sets a file's size, during which the kernel writes nothing of the file back (`fuse_set_nowrite` in `fs/fuse`).
fn sets_a_size(req: &Request<'_>) -> bool {
    match req.head.opcode {
        op::SETATTR => req.arg::<abi::SetattrIn>().is_ok_and(|arg| arg.valid & abi::fattr::SIZE != 0),
        op::OPEN => req.arg::<abi::OpenIn>().is_ok_and(|arg| arg.flags & libc::O_TRUNC as u32 != 0),
        _ => false,
    }
}

/// Whether it is a WRITE of pages of the kernel's cache.
fn writes_from_the_cache(req: &Request<'_>) -> bool {
    let direct =
        |arg: abi::WriteIn| arg.write_flags & (abi::WRITE_CACHE | abi::WRITE_LOCKOWNER) == abi::WRITE_LOCKOWNER;
    req.head.opcode == op::WRITE && !req.arg::<abi::WriteIn>().is_ok_and(direct)
}
