"""Limits of users, groups and directories, asked by real users."""

import contextlib
import ctypes
import errno
import json
import mmap
import os
import shutil
import signal
import struct
import subprocess
import threading
import time

from fslib import Failed, Skipped, run, wait_for
from mount_tests.common import LIBC, NOBODY, as_nobody, check, must, refused, root_only, same
from mount_tests.space import small

MIB = 1 << 20
BLOCK = 4096
OTHER = 1001
ME = ("--user", "nobody")


def quota(own, call, *args, ok=(0,)):
    _, text = run(own.binary, "quota", call, *(() if call == "remove" else ("--json",)), *args, own.mnt, ok=ok)
    if call == "remove":
        return None
    told = json.loads(text)
    for one in told if isinstance(told, list) else [told]:
        same(one["inodes"], one["inodes_used"], "inodes by both names")
    return told


def used(own, *whose):
    shown = quota(own, "show", *whose)
    return shown["used"] // BLOCK, shown["inodes_used"]


@contextlib.contextmanager
def volume_with(volume, *options):
    """A volume that anybody may write, with these mount options."""
    root_only()
    with small(volume, 2) as own:
        if options:
            own.umount()
            own.mount(*options)
        own.mnt.chmod(0o777)
        yield own


def write_blocks(path, most, size=BLOCK, flags=0):
    """Appends pieces until an error; how many bytes, and which error."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | flags, 0o666)
    done = 0
    try:
        while done < most:
            done += os.write(fd, b"q" * size)
        return done, 0
    except OSError as error:
        return done, error.errno
    finally:
        os.close(fd)


def fills(own, name, most, size=BLOCK, flags=0):
    return as_nobody(lambda: write_blocks(own.mnt / name, most, size, flags))


@check(seconds=120)
def quota_of_a_user_to_the_block(volume, _top):
    """Through the kernel's cache: every block of the limit and not one more, then EDQUOT; an overwrite goes on, and so does root."""
    with volume_with(volume) as own:
        quota(own, "set", *ME, "--space", str(300 * BLOCK))
        same(fills(own, "f", MIB * 4), (300 * BLOCK, errno.EDQUOT), "written, and the error")
        same(fills(own, "g", MIB), (0, errno.EDQUOT), "another file")

        def overwrite():
            with open(own.mnt / "f", "r+b", buffering=0) as f:
                f.write(b"r" * 10 * BLOCK)
                os.fsync(f.fileno())

        as_nobody(overwrite)
        same(used(own, *ME), (300, 2), "used")
        same(write_blocks(own.mnt / "root", MIB), (MIB, 0), "root's own")
        with open(own.mnt / "f", "ab", buffering=0) as f:
            f.write(b"s" * BLOCK)
            os.fsync(f.fileno())
        same(used(own, *ME), (301, 2), "used beyond the limit by root")
        os.truncate(own.mnt / "f", 290 * BLOCK)
        same(fills(own, "g", MIB), (10 * BLOCK, errno.EDQUOT), "what became free")
        own.cold()
        own.mnt.chmod(0o777)
        same(used(own, *ME), (300, 2), "used after a remount")
        same(fills(own, "g", MIB, flags=os.O_APPEND), (0, errno.EDQUOT), "and the error")
        quota(own, "set", *ME, "--space", "none")
        same(fills(own, "g", MIB, flags=os.O_APPEND), (MIB, 0), "without a limit")
        quota(own, "remove", *ME)
        same(quota(own, "report"), [q for q in quota(own, "report") if q["space"] is None], "limits")


@check(seconds=120)
def quota_of_a_user_in_a_directory_with_one(volume, _top):
    """Who refuses is told: the user's limit as EDQUOT, the directory's as ENOSPC; what one refuses counts for nobody."""
    with volume_with(volume) as own:
        top = own.mnt / "d"
        top.mkdir()
        top.chmod(0o777)
        quota(own, "set", "--directory", top, "--space", str(300 * BLOCK))
        quota(own, "set", *ME, "--space", str(200 * BLOCK))
        same(fills(own, "d/f", MIB * 4), (200 * BLOCK, errno.EDQUOT), "at the user's limit")
        quota(own, "set", *ME, "--space", str(1000 * BLOCK))
        # the directory itself is one of its blocks, if it has any
        done, error = fills(own, "d/g", MIB * 4)
        must(error == errno.ENOSPC and 98 * BLOCK <= done <= 100 * BLOCK, f"at the directory's: {done}, {error}")
        # many writes that the directory refuses take nothing of the user's limit
        for n in range(20):
            fills(own, f"d/h{n}", MIB, size=50 * BLOCK)
        left = 1000 * BLOCK - used(own, *ME)[0] * BLOCK
        same(fills(own, "elsewhere", MIB * 8), (left, errno.EDQUOT), "the rest of the user's limit")


@check(seconds=120)
def quota_with_many_writers(volume, _top):
    """64 threads at the limit get all blocks of it together."""
    with volume_with(volume) as own:
        quota(own, "set", *ME, "--space", str(1000 * BLOCK))

        def all_of_them():
            got = []

            def one(n):
                got.append(write_blocks(own.mnt / f"f{n}", MIB * 64, BLOCK * (1 + n % 3)))

            threads = [threading.Thread(target=one, args=(n,)) for n in range(64)]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
            return got

        got = as_nobody(all_of_them)
        same({e for _, e in got}, {errno.EDQUOT}, "errors")
        # of a write that does not fit nothing is taken: up to two blocks may be left
        written = sum(n for n, _ in got) // BLOCK
        must(998 <= written <= 1000, f"{written} blocks")
        run("sync", "-f", own.mnt)
        same(used(own, *ME), (written, 64), "used")


@check(seconds=120)
def quota_answered_by_the_volume(volume, _top):
    """With cache=through, and with O_DIRECT: as much of a write as there is room for."""
    with volume_with(volume, "cache=through") as own:
        quota(own, "set", *ME, "--space", str(100 * BLOCK))
        same(fills(own, "f", MIB * 4, 33 * BLOCK), (100 * BLOCK, errno.EDQUOT), "written, and the error")
        same(used(own, *ME), (100, 1), "used")


@check(seconds=120)
def quota_of_what_goes_past_the_cache(volume, _top):
    """What the kernel's cache has accepted counts for who takes blocks past it: `fallocate`, O_DIRECT and `copy_file_range`. Root
    has none of that limit."""
    with volume_with(volume, "commit=300") as own:
        quota(own, "set", *ME, "--space", str(300 * BLOCK))
        with open(own.mnt / "source", "wb") as file:
            file.write(b"s" * 200 * BLOCK)
            os.fsync(file.fileno())
        source = os.open(own.mnt / "source", os.O_RDONLY)

        def allocate(fd):
            os.posix_fallocate(fd, 0, 200 * BLOCK)

        def direct(fd):
            page = mmap.mmap(-1, 10 * BLOCK)
            for _ in range(20):
                os.write(fd, page)

        def copy(fd):
            done = 0
            while done < 200 * BLOCK:
                done += os.copy_file_range(source, fd, 200 * BLOCK - done, done, done)

        # (two blocks are granted for each `write` of one: all of these beside each other)
        for how, flags in (allocate, 0), (direct, os.O_DIRECT), (copy, 0):
            with written_and_open(own.mnt / "f", 140):

                def take(how=how, flags=flags):
                    fd = os.open(own.mnt / "g", os.O_WRONLY | os.O_CREAT | flags, 0o666)
                    with os.fdopen(fd, "wb", buffering=0), refused(errno.EDQUOT):
                        how(fd)

                as_nobody(take)
            run("sync", "-f", own.mnt)
            have, _ = used(own, *ME)
            must(140 <= have <= 300, f"{how.__name__}: {have} blocks of 300")
            for name in "f", "g":
                os.unlink(own.mnt / name)
        os.close(source)
        with written_and_open(own.mnt / "f", 140), open(own.mnt / "g", "wb") as file:
            os.chown(own.mnt / "g", NOBODY, NOBODY)
            os.posix_fallocate(file.fileno(), 0, 200 * BLOCK)
        run("sync", "-f", own.mnt)
        same(used(own, *ME), (340, 2), "with what root took")
        for name in "f", "g":
            os.unlink(own.mnt / name)

        def whole_limit():
            page = mmap.mmap(-1, 10 * BLOCK)
            with os.fdopen(os.open(own.mnt / "g", os.O_WRONLY | os.O_CREAT | os.O_DIRECT), "wb", buffering=0) as file:
                for _ in range(30):
                    same(os.write(file.fileno(), page), 10 * BLOCK, "written past the cache")
                with refused(errno.EDQUOT):
                    os.write(file.fileno(), page)

        as_nobody(whole_limit)
        same(used(own, *ME), (300, 1), "the limit")


def submit_direct_write(fd, data, offset):
    """Hands a write over to Linux AIO: `io_submit` returns before it is done."""
    io_setup, io_submit = 206, 209
    context = ctypes.c_ulong(0)
    if LIBC.syscall(io_setup, 8, ctypes.byref(context)):
        raise OSError(ctypes.get_errno(), "io_setup")
    address = ctypes.addressof(ctypes.c_char.from_buffer(data))
    # struct iocb of linux/aio_abi.h, with IOCB_CMD_PWRITE
    order = struct.pack("=QIiHhIQQqQII", 0, 0, 0, 1, 0, fd, address, len(data), offset, 0, 0, 0)
    order = ctypes.create_string_buffer(order, len(order))
    orders = (ctypes.c_void_p * 1)(ctypes.addressof(order))
    if LIBC.syscall(io_submit, context, ctypes.c_long(1), orders) != 1:
        raise OSError(ctypes.get_errno(), "io_submit")


@check
def quota_and_an_exec_that_waits_for_its_writes(volume, _top):
    """Who handed direct writes over and then execs waits for them in the kernel, and can be looked at by nobody meanwhile: the
    server looks at no thread whose requests it has to answer first."""
    if os.uname().machine != "x86_64":
        raise Skipped("numbers of calls of x86_64")
    with volume_with(volume) as own:
        quota(own, "set", *ME, "--space", str(512 * MIB))

        def submit_and_exec(n):
            fd = os.open(own.mnt / f"f{n}", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
            # within the size, so that nobody waits for it
            os.ftruncate(fd, 64 * MIB)
            data = mmap.mmap(-1, 64 * MIB)
            submit_direct_write(fd, data, 0)
            os.execv("/bin/true", ["true"])

        servers, children = own.daemons(), []
        for n in range(4):
            pid = os.fork()
            if pid == 0:
                try:
                    os.setgroups([])
                    os.setresgid(NOBODY, NOBODY, NOBODY)
                    os.setresuid(NOBODY, NOBODY, NOBODY)
                    submit_and_exec(n)
                finally:
                    os._exit(1)
            children.append(pid)
        for pid in children:
            ends = []
            try:
                wait_for("an exec", lambda: ends.append(os.waitpid(pid, os.WNOHANG)) or ends[-1][0] == pid, 30)
            except Failed:
                # who reads of the process in `/proc` hangs as well
                for server in servers:
                    os.kill(server, signal.SIGKILL)
                raise
            same(ends[-1], (pid, 0), "its exit code")
        for n in range(4):
            same((own.mnt / f"f{n}").stat().st_size, 64 * MIB, "size")


@check(seconds=120)
def quota_of_a_file_that_is_open(volume, _top):
    """With OPEN, too, a file that is open for writing when its owner gets a limit is held to it while it stays open; and where the
    limit is a soft one whose grace ends."""
    with volume_with(volume, "fileflags", "commit=300") as own:

        fd = os.open(own.mnt / "f", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.chown(fd, NOBODY, NOBODY)

        def append(blocks):
            done = 0
            try:
                while done < blocks:
                    os.write(fd, b"o" * BLOCK)
                    done += 1
            except OSError as error:
                return done, error.errno
            return done, 0

        same(as_nobody(lambda: append(100)), (100, 0), "without a limit")
        quota(own, "set", *ME, "--space", str(300 * BLOCK))
        same(as_nobody(lambda: append(1000)), (200, errno.EDQUOT), "written, and the error")
        run("sync", "-f", own.mnt)
        same(used(own, *ME), (300, 1), "used")
        quota(own, "set", *ME, "--space", "none", "--soft-space", str(100 * BLOCK), "--grace", "1s")
        wait_for("the end of the grace", lambda: quota(own, "show", *ME)["grace_is_over"], 20)
        wait_for("a write to be refused", lambda: as_nobody(lambda: append(1)) == (0, errno.EDQUOT), 20)
        os.close(fd)


@check(seconds=120)
def quota_with_opens_and_times(volume, _top):
    """With OPEN a file with a limited owner is written past the kernel's cache, which sends the time of before with a rename: the
    volume keeps that of the last write. `stat` shows it when the file is closed."""
    with volume_with(volume, "fileflags") as own:
        quota(own, "set", *ME, "--space", str(300 * BLOCK))

        def append(path):
            time.sleep(0.1)
            before = time.time_ns() - 20 * 10**6

            def write():
                with open(path, "ab", buffering=0) as file:
                    file.write(b"b")

            as_nobody(write)
            return before

        path, renamed = own.mnt / "f", own.mnt / "g"
        append(path)
        held = os.open(path, os.O_RDONLY)
        shown = path.stat().st_mtime_ns
        before = append(path)
        path.rename(renamed)
        same(renamed.stat().st_mtime_ns, shown, "the time shown while it is open")
        os.close(held)
        own.cold()
        written = renamed.stat().st_mtime_ns
        must(written >= before, f"{written}: the time of before, the last write is not older than {before}")
        own.umount()
        own.mount("fileflags")
        before = append(renamed)
        wait_for("the time of the write shown", lambda: renamed.stat().st_mtime_ns >= before, 10)
        # the modification time alone, as tar sets it
        os.utime(renamed, ns=(5, 5 * 10**9))
        append(renamed)
        run("touch", "-m", "-d", "@1000", renamed)
        same(renamed.stat().st_mtime, 1000, "a time that is set")
        own.cold()
        same(renamed.stat().st_mtime, 1000, "after a remount")


@check(seconds=120)
def quota_of_inodes_and_other_calls(volume, _top):
    """Inodes, chown, links, unlinked open files, truncate, fallocate, holes, O_TMPFILE."""
    with volume_with(volume) as own:
        quota(own, "set", *ME, "--inodes", "10", "--space", str(100 * BLOCK))

        def calls():
            top = own.mnt
            names = [top / f"n{n}" for n in range(10)]
            for n in names:
                n.touch()
            with refused(errno.EDQUOT):
                (top / "more").touch()
            with refused(errno.EDQUOT):
                (top / "more").mkdir()
            with refused(errno.EDQUOT):
                os.symlink("x", top / "more")
            with refused(errno.EDQUOT):
                os.open(top, os.O_TMPFILE | os.O_WRONLY, 0o600)
            os.link(names[0], top / "link")
            for n in names[1:]:
                n.unlink()
            fd = os.open(top, os.O_TMPFILE | os.O_RDWR, 0o600)
            os.posix_fallocate(fd, 0, 60 * BLOCK)
            with refused(errno.EDQUOT):
                os.posix_fallocate(fd, 0, 200 * BLOCK)
            os.ftruncate(fd, 0)
            os.pwrite(fd, b"x" * BLOCK, 1 << 32)
            os.fsync(fd)
            return os.getpid()

        as_nobody(calls)
        # of what was removed while it was open the kernel tells some time after the end of the process
        wait_for("nothing but a name used when all is closed", lambda: used(own, *ME) == (0, 1), 10)
        target = own.mnt / "n0"
        as_nobody(lambda: target.write_bytes(b"y" * 5 * BLOCK))
        os.chown(target, OTHER, OTHER)
        same((used(own, *ME), used(own, "--user", str(OTHER))), ((0, 0), (5, 1)), "used after chown")
        fd = os.open(target, os.O_RDWR)
        target.unlink()
        (own.mnt / "link").unlink()
        same(used(own, "--user", str(OTHER)), (5, 1), "of an unlinked open file")
        os.close(fd)
        run("sync", "-f", own.mnt)


@check(seconds=120)
def quota_has_room_for_what_was_removed_before(volume, _top):
    """At the limit one goes and the next comes: the kernel tells of a removal when it has forgotten the inode, some time after the unlink."""
    with volume_with(volume) as own:
        quota(own, "set", *ME, "--inodes", "4", "--space", str(85 * BLOCK))
        run(own.binary, "tenant", "create", "--inodes", "5", own.mnt / "t")
        run(own.binary, "tenant", "create", "--space", str(64 * MIB), own.mnt / "u")

        def rounds(top, size, count):
            held = [top / f"n{n}" for n in range(4)]
            for n in held:
                n.write_bytes(b"x" * size)
            for n in range(count):
                held.pop(0).unlink()
                held.append(top / f"m{n}")
                held[-1].write_bytes(b"y" * size)
            with refused(errno.EDQUOT, errno.ENOSPC):
                (top / "more").write_bytes(b"z" * size)
                (top / "most").write_bytes(b"z" * size)
            for n in top.iterdir():
                n.unlink()

        own.mnt.joinpath("mine").mkdir(mode=0o777)
        (own.mnt / "mine").chmod(0o777)
        as_nobody(lambda: rounds(own.mnt / "mine", 0, 1000))
        as_nobody(lambda: rounds(own.mnt / "mine", 20 * BLOCK, 300))
        rounds(own.mnt / "t", 0, 300)
        rounds(own.mnt / "u", 14 * MIB, 20)


@check(seconds=120)
def quota_of_a_directory(volume, _top):
    """What lies below it counts, for root too; nothing is renamed in; mv copies; statvfs tells the limit."""
    with volume_with(volume) as own:
        top = own.mnt / "d"
        (top / "sub").mkdir(parents=True)
        (top / "sub" / "old").write_bytes(b"o" * 10 * BLOCK)
        shown = quota(own, "set", "--directory", top, "--space", str(200 * BLOCK))
        # directories are blocks, too, where they have many entries
        same((shown["used"] // BLOCK, shown["inodes"]), (10, 3), "used at once")
        limits = quota(own, "set", "--directory", top, "--inodes", "500", "--soft-inodes", "400")
        same((limits["inodes"], limits["inodes_max"], limits["soft_inodes"]), (3, 500, 400), "of its limits")
        quota(own, "set", "--directory", top, "--inodes", "none", "--soft-inodes", "none")
        told = os.statvfs(top / "sub")
        same((told.f_blocks, told.f_bavail), (200, 190), "statvfs below it")
        must(os.statvfs(own.mnt).f_blocks > 10_000, "statvfs of the root")
        (own.mnt / "out").write_bytes(b"o" * 50 * BLOCK)
        with refused(errno.EXDEV):
            os.rename(own.mnt / "out", top / "in")
        with refused(errno.EXDEV):
            os.link(own.mnt / "out", top / "in")
        shutil.move(own.mnt / "out", top / "in")
        run("sync", "-f", own.mnt)
        same(used(own, "--directory", top), (60, 4), "used after mv")
        os.rename(top / "in", own.mnt / "out")
        same(used(own, "--directory", top), (60, 4), "moved out it still counts")
        os.rename(own.mnt / "out", top / "sub" / "in")
        same(write_blocks(top / "f", MIB * 4), (140 * BLOCK, errno.ENOSPC), "written by root, and the error")
        with open(top / "f", "r+b") as f, refused(errno.ENOSPC):
            os.posix_fallocate(f.fileno(), 0, 300 * BLOCK)
        own.cold()
        same(used(own, "--directory", top), (200, 5), "used after a remount")
        code, text = run(own.binary, "quota", "set", "--directory", "/tmp", "--space", "1M", own.mnt, ok=None)
        must(code == 1 and "does not lie on the volume" in text, f"{code}: {text}")
        quota(own, "remove", "--directory", top)
        same(write_blocks(top / "f", MIB, flags=os.O_APPEND), (MIB, 0), "without a limit")
        # one that is removed can be named by its number, and is gone at the next change of limits
        (own.mnt / "gone").mkdir()
        gone = quota(own, "set", "--directory", own.mnt / "gone", "--space", "1M")["project"]
        (own.mnt / "gone").rmdir()
        same(used(own, "--project", str(gone)), (0, 0), "used by a removed directory")
        quota(own, "remove", "--project", str(gone))
        code, text = run(own.binary, "quota", "show", "--project", str(gone), own.mnt, ok=None)
        must(code == 1 and f"project {gone} has no limits" in text, f"{code}: {text}")


@check(seconds=120)
def quota_of_a_group(volume, _top):
    """All files of the group count, whoever owns them; chgrp moves them, by their owner only where there is room; what is told elsewhere."""
    with volume_with(volume) as own:
        group = 1234
        whose = ("--group", str(group))
        top = own.mnt / "d"
        top.mkdir()
        os.chown(top, 0, group)
        top.chmod(0o2777)
        quota(own, "set", *whose, "--space", str(50 * BLOCK), "--inodes", "5")
        same(fills(own, "d/f", MIB), (50 * BLOCK, errno.EDQUOT), "written, and the error")
        same(as_nobody(lambda: os.stat(top / "f").st_gid), group, "inherited")
        same(used(own, *whose), (50, 2), "used")
        with open(top / "f", "ab", buffering=0) as f:
            f.write(b"r" * BLOCK)
            os.fsync(f.fileno())
        same(used(own, *whose), (51, 2), "used beyond the limit by root")
        # its owner gives it to a group of his
        quota(own, "set", "--group", "nogroup", "--space", str(20 * BLOCK))

        def give():
            with refused(errno.EDQUOT):
                os.chown(top / "f", -1, NOBODY)
            return os.stat(top / "f").st_gid

        same(as_nobody(give), group, "the group after a refusal")
        os.chown(top / "f", -1, NOBODY)
        same((used(own, *whose), used(own, "--group", "nogroup")), ((0, 1), (51, 1)), "used after chgrp by root")
        listed = quota(own, "report")
        limited = [(q["group"], q["space"]) for q in listed if q["space"]]
        same(limited, [(group, 50 * BLOCK), (NOBODY, 20 * BLOCK)], "limits in the report")
        _, text = run(own.binary, "stats", "--json", own.mnt)
        same([(q["group"], q["used"]) for q in json.loads(text)["quotas"]], [(group, 0), (NOBODY, 51 * BLOCK)], "stats")
        _, text = run(own.binary, "top", "--batch", "-n", "1", "-d", "0.1", own.mnt)
        must("limit of group 65534: 255 %" in text, text)
        run("sync", "-f", own.mnt)
        told = [(q["user"], q["group"], q["used"], q["inodes_used"]) for q in quota(own, "report") if q["inodes_used"]]
        own.umount()
        _, text = run(own.binary, "fsck", "-f", "--json", own.image)
        counted = [(u.get("user"), u.get("group"), u["bytes"], u["inodes"]) for u in json.loads(text)["usage"]]
        same(counted, told, "what fsck counts")
        own.mount()
        same(used(own, "--group", "nogroup"), (51, 1), "used after a remount")
        quota(own, "remove", "--group", "nogroup")
        quota(own, "remove", *whose)


@check(seconds=120)
def quota_that_is_soft_alone(volume, _top):
    """A file that the kernel knows since before the end of the grace is held to the limit when that is over, and goes on below."""
    with volume_with(volume) as own:
        quota(own, "set", *ME, "--soft-space", str(100 * BLOCK), "--grace", "2s")

        def write(blocks):
            done, error = fills(own, "f", blocks * BLOCK, flags=os.O_APPEND)
            run("sync", "-f", own.mnt)
            return done, error

        same(write(150), (150 * BLOCK, 0), "above the limit, within the grace")
        wait_for("the end of the grace", lambda: quota(own, "show", *ME)["grace_is_over"], 20)
        wait_for("a write to be refused", lambda: write(1) == (0, errno.EDQUOT), 20)
        same(write(1), (0, errno.EDQUOT), "again")
        os.truncate(own.mnt / "f", 50 * BLOCK)
        wait_for("the limit to be a soft one again", lambda: not quota(own, "show", *ME)["grace_is_over"], 20)
        same(write(100), (100 * BLOCK, 0), "with less in use")


@check(seconds=120)
def quota_survives_a_kill(volume, _top):
    """kill -9 while a user writes: the limit holds after it, and what is used is what there is."""
    with volume_with(volume) as own:
        quota(own, "set", *ME, "--space", str(500 * BLOCK), "--soft-space", str(100 * BLOCK), "--grace", "1d")
        for n in range(3):
            own.mnt.chmod(0o777)
            done, _ = fills(own, f"f{n}", 150 * BLOCK)
            if n < 2:
                same(done, 150 * BLOCK, "written")
            own.kill9()
            own.mount()
        there = sum(f.stat().st_blocks * 512 // BLOCK for f in own.mnt.iterdir())
        shown = quota(own, "show", *ME)
        same((shown["used"] // BLOCK, shown["space"]), (there, 500 * BLOCK), "used, and the limit")
        own.mnt.chmod(0o777)
        done, error = fills(own, "more", MIB * 16)
        same((done // BLOCK + there, error), (500, errno.EDQUOT), "in all")


@check
def quota_commands_refuse(volume, _top):
    """Wrong use, wrong users: a clear message and an exit code."""
    with volume_with(volume) as own:
        def run_quota(*args):
            return run(own.binary, "quota", *args, own.mnt, ok=None)

        for args, code, said in (
            (("set", *ME), 1, "required"),
            (("set", *ME, "--space", "0"), 1, "0 is no limit"),
            (("set", "--space", "1M"), 1, "required"),
            (("set", "--user", "root", "--space", "1M"), 1, "root"),
            (("set", "--user", "nobody knows", "--space", "1M"), 1, "no such user"),
            (("set", "--group", "nobody knows", "--space", "1M"), 1, "no such group"),
            (("set", "--group", "0", "--space", "1M"), 1, "root"),
            (("show", "--group", "7"), 1, "group 7 has no limits"),
            (("set", "--group", "7", *ME, "--space", "1M"), 1, "cannot be used with"),
            (("set", *ME, "--space", "1M", "--soft-space", "2M"), 1, "not above"),
            (("show", *ME), 1, "has no limits"),
            (("remove", "--directory", own.mnt), 1, "has no limits"),
            (("set", "--directory", own.mnt, "--space", "1M"), 1, "root of a volume"),
        ):
            have, text = run_quota(*args)
            must(have == code and said in text, f"{args}: exit code {have}: {text}")
        setpriv = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
        one = subprocess.run(
            [*setpriv, own.binary, "quota", "set", "--user", "1", "--space", "1M", own.mnt], capture_output=True, text=True
        )
        must(one.returncode == 1 and "only root may" in one.stderr, f"{one.returncode}: {one.stderr}")
        quota(own, "set", *ME, "--space", "1M")
        two = subprocess.run([*setpriv, own.binary, "quota", "report", own.mnt], capture_output=True, text=True)
        must(two.returncode == 0 and "user nobody" in two.stdout, f"{two.returncode}: {two.stdout}{two.stderr}")


@contextlib.contextmanager
def written_and_open(path, blocks):
    """A process of nobody's has written that, and keeps the file open: the kernel writes back what is closed."""
    written, tell = os.pipe()
    wait, end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(end)
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT)
            for _ in range(blocks):
                os.write(fd, b"f" * BLOCK)
            os.write(tell, b"w")
            os.read(wait, 1)
        finally:
            os._exit(0)
    for fd in tell, wait:
        os.close(fd)
    try:
        same(os.read(written, 1), b"w", "what the writer says")
        yield
    finally:
        for fd in end, written:
            os.close(fd)
        os.waitpid(pid, 0)


@check
def quota_of_what_was_accepted_before_an_upgrade(volume, _top):
    """What the kernel holds back counts for the process that serves next, also where that is the old one again: what a `write` took
    is written."""
    point = volume.image.with_suffix(".point")
    os.environ["BRAIDFS_TEST_UPGRADE"] = str(point)
    try:
        for code in 0, 32:
            with volume_with(volume, "transport=dev", "commit=300") as own:
                quota(own, "set", *ME, "--space", str(300 * BLOCK))
                with written_and_open(own.mnt / "f", 200):
                    if code:
                        point.write_text("new-mounted fail")
                    run(own.binary, "upgrade", own.mnt, ok=(code,))
                    same(fills(own, "g", MIB), (100 * BLOCK, errno.EDQUOT), f"written after exit code {code}")
                for name in "f", "g":
                    with open(own.mnt / name, "rb") as file:
                        os.fsync(file.fileno())
                own.settle()
                same(used(own, *ME), (300, 2), "used")
    finally:
        del os.environ["BRAIDFS_TEST_UPGRADE"]
        point.unlink(missing_ok=True)
