//! Open files and their data.
//!
//! The kernel's writeback cache takes writes before the volume sees them; [`crate::room`] sees to it that a full volume
//! shows at the `write` all the same.

use crate::abi::{self, fopen, op};
use crate::fs::{BraidFs, Context, MAX_IO_BYTES, errno};
use crate::handles::Handle;
use crate::helpers::{Kind, Whose};
use crate::node::WireId;
use crate::opened::Opened;
use crate::profile::Cache;
use crate::request::{Answer, Handled, Outcome, Request};
use crate::requester::{self, Doing};
use crate::room::beside::Taking;
use braidfs::format::inode::IMMUTABLE;
use braidfs::{FallocMode, OpenFile, SetAttr, Volume};
use rustix::io::Errno;
use std::sync::atomic::AtomicU64;

/// Of the kernel's page cache.
const PAGE_BYTES: u64 = 4096;
/// Longest copy in one request; the caller comes back for the rest.
const COPY_BYTES: u64 = 64 << 20;

impl BraidFs {
    pub(crate) fn open(&self, req: &Request<'_>, out: &mut Answer, cx: &Context<'_>) -> Handled {
        let arg: abi::OpenIn = req.arg()?;
        let file = self.hold(req.node())?;
        let node = file.ino();
        let append_only = writes(arg.flags) && self.may_write(node, arg.flags)?;
        if arg.flags & libc::O_TRUNC as u32 != 0 {
            self.drop_caps(node)?;
            let kill_suid = arg.open_flags & abi::OPEN_KILL_SUIDGID != 0;
            let mut set = SetAttr { size: Some(0), kill_suid, ..SetAttr::default() };
            if kill_suid {
                set = self.stripping(req, node, set)?.unwrap_or(set);
            }
            self.vol.setattr(node, &set).map_err(errno)?;
            if kill_suid {
                cx.channel.invalidate(req.node(), false);
            }
        }
        let open = self.keep(file, arg.flags, append_only, cx)?;
        // The kernel may know its attributes for long, from when nobody wrote: it is to ask from the first `write` on. Here, with
        // the handle there to be seen: who limits the tenant now tells the kernel after that.
        if writes(arg.flags) && open.open_flags & fopen::DIRECT_IO == 0 && self.asks_to_pace(node) {
            cx.channel.invalidate(req.node(), false);
        }
        out.put(&open);
        Ok(Outcome::Reply)
    }

    /// Gives an open file a number and decides how the kernel caches it. One that is append-only is written through: the
    /// kernel lets anybody take O_APPEND off the descriptor (`setfl` in fs/fcntl.c looks at a flag that FUSE never sets), so
    /// that each `write` must be looked at.
    pub(crate) fn keep(
        &self,
        file: OpenFile,
        flags: u32,
        append_only: bool,
        cx: &Context<'_>,
    ) -> Result<abi::OpenOut, Errno> {
        let (ino, writer) = (file.ino(), writes(flags));
        if writer {
            self.watch_room(ino, u64::MAX, cx.channel);
        }
        let limited = self.is_tight(ino) || self.asks_for_quota(ino);
        let cached_writer = writer && !append_only && !limited;
        let caps_epoch = AtomicU64::new(0);
        let handle = Handle { file, cached_writer: cached_writer.into(), writer, append_only, fh: 0, caps_epoch };
        let fh = self.handles.insert(handle)?;
        // Again: the domain may have become tight before the handle was there to be seen.
        let through = writer && (!cached_writer || self.is_tight(ino) || self.asks_for_quota(ino));
        if through {
            self.handles.write_through(fh)?;
        }
        let cache = if through { fopen::DIRECT_IO | fopen::PARALLEL_DIRECT_WRITES } else { fopen::KEEP_CACHE };
        Ok(abi::OpenOut { fh, open_flags: cache | fopen::NOFLUSH, padding: 0 })
    }

    pub(crate) fn read(&self, req: &Request<'_>, out: &mut Answer, cx: &Context<'_>) -> Handled {
        let arg: abi::ReadIn = req.arg()?;
        if arg.size > MAX_IO_BYTES {
            return Err(Errno::INVAL);
        }
        let opened = self.opened(req.node(), arg.fh)?;
        if arg.read_flags & abi::READ_LOCKOWNER == 0 {
            self.direct_writes.cached(opened.ino(), arg.offset, arg.size as usize);
        }
        // The kernel keeps no access times (it marks all inodes S_NOATIME): what it reads from its cache is not noted.
        // What it reads for who may only write is the rest of a page of which a part is written.
        let for_write = arg.flags as i32 & libc::O_ACCMODE == libc::O_WRONLY;
        let quiet = for_write || is_quiet(&arg);
        let read = if quiet { Volume::read_unnoted } else { Volume::read };
        out.fill(arg.size as usize, |buf| read(&self.vol, opened.file(), arg.offset, buf)).map_err(errno)?;
        cx.moved(out.body().len());
        Ok(Outcome::Reply)
    }

    pub(crate) fn write(&self, req: &Request<'_>, out: &mut Answer, cx: &Context<'_>) -> Handled {
        let (arg, data) = req.arg_and_rest::<abi::WriteIn>()?;
        let data = data.get(..arg.size as usize).ok_or(Errno::INVAL)?;
        let opened = self.opened(req.node(), arg.fh)?;
        // Of pages of its cache the kernel has taken them itself, at the `write`; since then the file may have got new ones.
        if arg.write_flags & abi::WRITE_CACHE == 0 {
            self.drop_caps_once(&opened)?;
        }
        if arg.write_flags & abi::WRITE_KILL_SUIDGID != 0 && self.kill_suid(req, opened.ino())? {
            // The kernel does not expect the mode to change by a write.
            cx.channel.invalidate(opened.id(), false);
        }
        let direct = arg.write_flags & (abi::WRITE_CACHE | abi::WRITE_LOCKOWNER) == abi::WRITE_LOCKOWNER;
        if !direct {
            self.direct_writes.cached(opened.ino(), arg.offset, data.len());
        }
        // The offset is the kernel's also for O_APPEND: with the writeback cache it knows the size.
        let size = if arg.write_flags & abi::WRITE_CACHE != 0 {
            // what has been written is not refused for want of a number
            let sectors = || self.vol.getattr(opened.ino()).map_or(0, |a| a.sectors);
            let before = sectors();
            let size = self.write_whole(opened.file(), arg.offset, data)?;
            if has_grown(before, sectors()) {
                cx.channel.invalidate(opened.id(), false);
            }
            size
        } else {
            self.takes_write(&opened, arg.offset)?;
            let _taking = match self.take_written_through(req, &opened, arg.offset, data.len(), cx) {
                Ok(taking) => taking,
                Err(handled) => return handled,
            };
            // (any other holds pages of the kernel until it is answered)
            let range = (arg.offset, if direct { data.len() as u64 } else { 0 });
            let cached = opened.handle().is_none_or(|h| h.is_cached_writer());
            let _quota = match self.take_quota(req, opened.ino(), range, cached, cx) {
                Ok(taking) => taking,
                Err(handled) => return handled,
            };
            if direct {
                self.note_past_cache(&opened);
            }
            let _as = self.as_requester(req);
            let mut size = self.vol.write(opened.file(), arg.offset, data).map_err(errno)?;
            if direct && size < data.len() && (cached || self.may_be_asynchronous(req, arg.flags)) {
                size = self.direct_rest(req, &opened, (arg.offset, data), size, cx)?;
            }
            size as u32
        };
        cx.moved(size as usize);
        self.watch_room(opened.ino(), size.into(), cx.channel);
        out.put(&abi::WriteOut { size, padding: 0 });
        if direct && size > 0 {
            return self.written_direct(req, arg.offset, size as usize, out, cx);
        }
        if arg.write_flags & abi::WRITE_CACHE != 0 {
            return Ok(self.written_cached(opened.ino(), out, cx));
        }
        Ok(Outcome::Reply)
    }

    /// Writes pages of the kernel's cache, all of them or an error: for these the kernel does not look at how much was
    /// written (`fuse_writepage_end` in fs/fuse/file.c), and would lose the rest without a word.
    fn write_whole(&self, file: &OpenFile, offset: u64, data: &[u8]) -> Result<u32, Errno> {
        // A writeback cache keeps the times of what it took, and may tell them while this is on its way (`fuse_flush_times`). What
        // comes of a map alone below a cache that writes through has no other time than now.
        let write = match self.profile.cache {
            Cache::Back => Volume::write_accepted_keeping_times,
            Cache::Through => Volume::write_accepted,
        };
        let mut done = 0;
        while done < data.len() {
            let wrote = write(&self.vol, file, offset + done as u64, &data[done..]).map_err(errno);
            match wrote {
                Ok(0) | Err(Errno::NOSPC) => {
                    let (ino, bytes, room) = (file.ino().0, data.len() - done, self.vol.write_room(file.ino()));
                    tracing::warn!(ino, offset, bytes, room, "no room for what the kernel had taken");
                    return Err(Errno::NOSPC);
                }
                Ok(n) => done += n,
                Err(e) => return Err(e),
            }
        }
        Ok(done as u32)
    }

    /// [`Self::take_room`] for a WRITE of a file that is written through, where there is little room: who writes to others through
    /// the cache may have been promised some. All other WRITEs come of a `write` that asked.
    fn take_written_through(
        &self,
        req: &Request<'_>,
        opened: &Opened<'_>,
        offset: u64,
        len: usize,
        cx: &Context<'_>,
    ) -> Result<Taking, Handled> {
        if !self.is_tight(opened.ino()) || opened.handle().is_none_or(|h| h.is_cached_writer()) {
            return Ok(Taking::default());
        }
        let need = self.vol.blocks_to_write(opened.ino(), offset, len as u64).map_err(|e| Err(errno(e)))?;
        self.take_room(req, opened.ino(), need, cx)
    }

    /// Whether a direct WRITE through a handle that is written through may be of an asynchronous call (Linux AIO, `io_uring`), with
    /// other requests under way: the kernel does so of descriptors with O_DIRECT. Rare: it looks what the thread does, which does not
    /// wait for this answer then. Who is seen in a `write` waits.
    fn may_be_asynchronous(&self, req: &Request<'_>, flags: u32) -> bool {
        if flags & libc::O_DIRECT as u32 == 0 {
            return false;
        }
        let thread = requester::thread(req);
        let seen = thread.and_then(|thread| self.looks.at(vec![thread]).remove(&thread));
        !matches!(seen.map(|seen| seen.doing), Some(Doing::Writing(_)))
    }

    /// Of a direct write only the first `done` bytes were taken: takes the rest, or tells why not. The kernel has all requests
    /// of such a write under way at once, and a short answer to one of them makes EIO of the whole (`fuse_get_res_by_io` in
    /// fs/fuse/file.c). Of a file that is written through it does so by asynchronous calls with O_DIRECT only
    /// ([`Self::may_be_asynchronous`]); else it sends one after the other, and tells how much was written, so that these are not
    /// asked for the rest.
    fn direct_rest(
        &self,
        req: &Request<'_>,
        opened: &Opened<'_>,
        (offset, data): (u64, &[u8]),
        mut done: usize,
        cx: &Context<'_>,
    ) -> Result<usize, Errno> {
        let why = loop {
            match self.vol.write(opened.file(), offset + done as u64, &data[done..]).map_err(errno) {
                Ok(0) => break Errno::NOSPC,
                Ok(n) => done += n,
                Err(e) => break e,
            }
            // somebody made room
            if done == data.len() {
                return Ok(done);
            }
        };
        if done > 0 {
            self.watch_room(opened.ino(), done as u64, cx.channel);
            self.part_written_direct(req, offset, done, cx);
        }
        Err(why)
    }

    pub(crate) fn release(&self, req: &Request<'_>, cx: &Context<'_>) -> Handled {
        let arg: abi::ReleaseIn = req.arg()?;
        if self.negotiated.opens() {
            if let Some(own) = cx.channel.own() {
                own.closed(arg.fh);
            }
            self.handles.release(arg.fh)?;
        }
        self.show_change(req.node());
        Ok(Outcome::Reply)
    }

    pub(crate) fn fsync(&self, req: &Request<'_>, cx: &Context<'_>) -> Handled {
        let arg: abi::FsyncIn = req.arg()?;
        let ino = self.opened_node(req.node(), arg.fh)?;
        let data_only = arg.fsync_flags & abi::FSYNC_FDATASYNC != 0;
        if req.head.opcode == op::FSYNC
            && self.syncs.may_wait(req.head.pid, cx.is_bound())
            && let Some(synced) = self.vol.fsync_here(ino, data_only, self.syncs.threads(cx.is_bound()))
        {
            synced.map_err(errno)?;
            return Ok(Outcome::Reply);
        }
        let (later, paid) = (cx.later(), self.vol.take_credit(ino));
        let done = move |result: braidfs::Result<()>| {
            drop(paid);
            later.done(result.map_err(errno));
        };
        self.vol.fsync_start(ino, data_only).on_done_quick(Box::new(done));
        Ok(Outcome::Deferred)
    }

    pub(crate) fn syncfs(&self, cx: &Context<'_>) -> Handled {
        let later = cx.later();
        self.vol.sync_start().on_done_quick(Box::new(move |result| later.done(result.map_err(errno))));
        Ok(Outcome::Deferred)
    }

    pub(crate) fn fallocate(&self, req: &Request<'_>, cx: &Context<'_>) -> Handled {
        let arg: abi::FallocateIn = req.arg()?;
        let mode = falloc_mode(arg.mode)?;
        let opened = self.opened(req.node(), arg.fh)?;
        self.strip(req, &opened, cx)?;
        let new = || self.vol.new_blocks(opened.ino(), arg.offset, arg.length).map_err(errno);
        let need = match mode {
            FallocMode::Allocate { .. } => new()?,
            FallocMode::ZeroRange { .. } => blocks_to_zero(arg.length, new()?),
            _ => 0,
        };
        let range = (arg.offset, if need > 0 { arg.length } else { 0 });
        let _quota = match self.take_quota(req, opened.ino(), range, false, cx) {
            Ok(taking) => taking,
            Err(handled) => return handled,
        };
        let _taking = match self.take_room(req, opened.ino(), need, cx) {
            Ok(taking) => taking,
            Err(handled) => return handled,
        };
        let _as = self.as_requester(req);
        let done = self.vol.fallocate(opened.file(), mode, arg.offset, arg.length);
        if let Err(e) = done {
            let e = errno(e);
            let allocates = matches!(mode, FallocMode::Allocate { .. });
            return if allocates { Err(e) } else { self.zeroed_in_part(req, &arg, e, cx) };
        }
        self.watch_room(opened.ino(), arg.length, cx.channel);
        Ok(Outcome::Reply)
    }

    /// Answers a FALLOCATE that failed, of which a part may be zeros by now: when the kernel has dropped its pages,
    /// which it does by itself only where all went well (`fuse_file_fallocate` in fs/fuse/file.c). At once, where too
    /// many wait for theirs.
    fn zeroed_in_part(&self, req: &Request<'_>, arg: &abi::FallocateIn, why: Errno, cx: &Context<'_>) -> Handled {
        let (id, whose) = (req.node(), Whose::of(req, cx.channel));
        let from = arg.offset - arg.offset % PAGE_BYTES;
        let to = arg.offset.saturating_add(arg.length).div_ceil(PAGE_BYTES).saturating_mul(PAGE_BYTES);
        let range = Some((from, to - from));
        let Some(waiting) = self.let_wait(false) else {
            let channel = cx.channel.clone();
            // Not sent only where the mount is ending.
            self.jobs.send(Kind::Pages, whose, move |fs| _ = fs.drop_pages(id, range, &channel));
            return Err(why);
        };
        let later = cx.later();
        // A job that cannot be handed over is dropped, and answers EIO.
        self.jobs.send(Kind::Pages, whose, move |fs| {
            let _waiting = waiting;
            fs.drop_pages(id, range, later.channel());
            later.done(Err(why));
        });
        Ok(Outcome::Deferred)
    }

    pub(crate) fn lseek(&self, req: &Request<'_>, out: &mut Answer, cx: &Context<'_>) -> Handled {
        let arg: abi::LseekIn = req.arg()?;
        let hole = match arg.whence as i32 {
            libc::SEEK_DATA => false,
            libc::SEEK_HOLE => true,
            _ => return Err(Errno::INVAL),
        };
        let id = req.node();
        if !self.may_be_dirty(id.ino()) {
            self.seek(id, &arg, hole, out)?;
            return Ok(Outcome::Reply);
        }
        // The kernel does not write its pages back before it asks. Have it do so, as far as the answer depends on them;
        // that sends WRITE requests, so it cannot be waited for here.
        let Some(waiting) = self.let_wait(false) else {
            // Too many wait for their pages, and what the kernel holds is not known: the file may reach beyond what the volume
            // has of it. Programs copy what they are told they cannot look at so.
            return Err(Errno::INVAL);
        };
        let later = cx.later();
        let job = move |fs: &Self| {
            let _waiting = waiting;
            fs.drop_pages(id, Some((arg.offset - arg.offset % PAGE_BYTES, u64::MAX)), later.channel());
            let mut out = Answer::new(size_of::<abi::LseekOut>());
            match fs.seek(id, &arg, hole, &mut out) {
                Ok(()) => later.answer(&mut out),
                Err(e) => later.done(Err(e)),
            }
        };
        // A job that cannot be handed over is dropped, and answers EIO.
        self.jobs.send(Kind::Pages, Whose::of(req, cx.channel), job);
        Ok(Outcome::Deferred)
    }

    fn seek(&self, id: WireId, arg: &abi::LseekIn, hole: bool, out: &mut Answer) -> Result<(), Errno> {
        let opened = self.opened(id, arg.fh)?;
        let offset = self.vol.seek(opened.file(), arg.offset, hole).map_err(errno)?;
        out.put(&abi::LseekOut { offset });
        Ok(())
    }

    pub(crate) fn copy_file_range(&self, req: &Request<'_>, out: &mut Answer, cx: &Context<'_>, wide: bool) -> Handled {
        let arg: abi::CopyRangeIn = req.arg()?;
        if arg.flags != 0 {
            return Err(Errno::INVAL);
        }
        let from = self.opened(req.node(), arg.fh_in)?;
        let to = self.opened(WireId(arg.nodeid_out), arg.fh_out)?;
        self.takes_write(&to, arg.off_out)?;
        self.strip(req, &to, cx)?;
        let size_of = |h: &Opened<'_>| self.vol.getattr(h.ino()).map(|a| a.size).map_err(errno);
        let len = arg.len.min(COPY_BYTES).min(size_of(&from)?.saturating_sub(arg.off_in));
        let len = whole_pages(arg.off_out, len, size_of(&to)?)?;
        let need = self.vol.blocks_to_write(to.ino(), arg.off_out, len).map_err(errno)?;
        let _quota = match self.take_quota(req, to.ino(), (arg.off_out, len), false, cx) {
            Ok(taking) => taking,
            Err(handled) => return handled,
        };
        let _taking = match self.take_room(req, to.ino(), need, cx) {
            Ok(taking) => taking,
            Err(handled) => return handled,
        };
        let _as = self.as_requester(req);
        let bytes_copied = self.vol.copy_range(from.file(), arg.off_in, to.file(), arg.off_out, len).map_err(errno)?;
        self.watch_room(to.ino(), bytes_copied, cx.channel);
        if wide {
            out.put(&abi::CopyRangeOut { bytes_copied });
        } else {
            out.put(&abi::WriteOut { size: bytes_copied as u32, padding: 0 });
        }
        Ok(Outcome::Reply)
    }

    /// Takes privileges off a file whose content is about to change by a request that does not say whether its user
    /// has CAP_FSETID: root is taken to have it.
    fn strip(&self, req: &Request<'_>, opened: &Opened<'_>, cx: &Context<'_>) -> Result<(), Errno> {
        let attr = self.vol.getattr(opened.ino()).map_err(errno)?;
        if attr.flags & IMMUTABLE != 0 {
            return Err(Errno::PERM);
        }
        self.drop_caps_once(opened)?;
        if attr.mode & 0o6000 != 0 && requester::uid(req) != Some(0) && self.kill_suid(req, opened.ino())? {
            // The kernel does not expect the mode to change by these either.
            cx.channel.invalidate(opened.id(), false);
        }
        Ok(())
    }
}

/// Whether who reads has asked that no access time is noted.
pub(crate) fn is_quiet(arg: &abi::ReadIn) -> bool {
    arg.flags & libc::O_NOATIME as u32 != 0
}

fn writes(flags: u32) -> bool {
    flags as i32 & libc::O_ACCMODE != libc::O_RDONLY
}

/// How much of a copy to `offset` of a file of `size` bytes is done here. Afterwards the kernel drops the pages that were
/// copied to, those that were so in part, too, with what was stored to the rest of them through a map meanwhile
/// (`__fuse_copy_file_range` in `fs/fuse/file.c`). Pages of which a part stays it copies itself, through its cache, when it
/// is told EXDEV.
fn whole_pages(offset: u64, len: u64, size: u64) -> Result<u64, Errno> {
    let rest = offset.saturating_add(len) % PAGE_BYTES;
    let whole = if offset.saturating_add(len) >= size { len } else { len - rest.min(len) };
    if len > 0 && (!offset.is_multiple_of(PAGE_BYTES) || whole == 0) { Err(Errno::XDEV) } else { Ok(whole) }
}

/// Whether the kernel is to ask anew how much a file takes, in units of 512 bytes: it does not count that itself, and asks by
/// itself only after a close. Each time that it has doubled, and only of files that `du` of a directory shows.
fn has_grown(before: u64, after: u64) -> bool {
    const SHOWS: u64 = 256;
    after >= SHOWS && after.ilog2() > before.max(1).ilog2()
}

/// Blocks that zeros for so many bytes take of which so many blocks are `new`: those, and some for others, which become free with a
/// commit. So the volume goes on one piece after the other, of 64 MiB at most.
fn blocks_to_zero(len: u64, new: u64) -> u64 {
    const PIECE: u64 = (64 << 20) / PAGE_BYTES;
    // and a page in part at each end
    new + (len.div_ceil(PAGE_BYTES) + 1).saturating_sub(new).min(PIECE)
}

fn falloc_mode(mode: u32) -> Result<FallocMode, Errno> {
    const KEEP: i32 = libc::FALLOC_FL_KEEP_SIZE;
    const PUNCH: i32 = libc::FALLOC_FL_PUNCH_HOLE | KEEP;
    const ZERO: i32 = libc::FALLOC_FL_ZERO_RANGE;
    const ZERO_KEEP: i32 = ZERO | KEEP;
    match mode as i32 {
        0 => Ok(FallocMode::Allocate { keep_size: false }),
        KEEP => Ok(FallocMode::Allocate { keep_size: true }),
        PUNCH => Ok(FallocMode::PunchHole),
        ZERO => Ok(FallocMode::ZeroRange { keep_size: false }),
        ZERO_KEEP => Ok(FallocMode::ZeroRange { keep_size: true }),
        // Linux 6.18 refuses these two by itself (`fuse_file_fallocate`, fs/fuse/file.c).
        libc::FALLOC_FL_COLLAPSE_RANGE => Ok(FallocMode::CollapseRange),
        libc::FALLOC_FL_INSERT_RANGE => Ok(FallocMode::InsertRange),
        _ => Err(Errno::OPNOTSUPP),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fallocate_modes() {
        assert_eq!(falloc_mode(0), Ok(FallocMode::Allocate { keep_size: false }));
        assert_eq!(falloc_mode(3), Ok(FallocMode::PunchHole));
        assert_eq!(falloc_mode(0x11), Ok(FallocMode::ZeroRange { keep_size: true }));
        assert_eq!((falloc_mode(8), falloc_mode(0x20)), (Ok(FallocMode::CollapseRange), Ok(FallocMode::InsertRange)));
        for refused in [2, 9, 0x21, 0x40] {
            assert_eq!(falloc_mode(refused), Err(Errno::OPNOTSUPP));
        }
    }

    #[test]
    fn zeros_take_the_place_of_what_is_there_piece_by_piece() {
        let mib = |n: u64| n * 256;
        assert_eq!(blocks_to_zero(1 << 30, mib(1024)), mib(1024) + 1, "all of it is new");
        assert_eq!(blocks_to_zero(1 << 30, 0), mib(64));
        assert_eq!(blocks_to_zero(1 << 30, mib(1000)), mib(1024) + 1);
        assert_eq!(blocks_to_zero(1 << 30, mib(900)), mib(964));
        assert_eq!((blocks_to_zero(1, 0), blocks_to_zero(1, 1)), (2, 2));
    }

    #[test]
    fn copies_end_with_pages() {
        let far = 1 << 30;
        assert_eq!(whole_pages(4096, 8192, far), Ok(8192));
        assert_eq!(whole_pages(4096, 8193, far), Ok(8192));
        assert_eq!(whole_pages(4096, 4095, far), Err(Errno::XDEV));
        assert_eq!(whole_pages(4096, 4095, 8191), Ok(4095), "nothing is behind it");
        assert_eq!(whole_pages(1, 8192, 1), Err(Errno::XDEV));
        assert_eq!(whole_pages(1, 0, 1), Ok(0));
    }

    #[test]
    fn access_modes() {
        assert!(!writes(libc::O_RDONLY as u32) && writes(libc::O_WRONLY as u32) && writes(libc::O_RDWR as u32));
    }
}
